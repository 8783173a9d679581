"""`parapply init`: looks at both ends, then makes slot and state, and copies if asked to.

In: the configuration, how to copy, and which refusals to go on with. Out: lines on standard output for people; refusals
on standard error, a line each. Nothing is made before the look at both ends is over.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal

import click

from parapply import connect
from parapply.check.kinds import Code, End, Severity, by_code
from parapply.check.look import look_at
from parapply.check.source import CheckOptions
from parapply.commands import lifecycle
from parapply.copy import command as copying
from parapply.copy import left_out
from parapply.copy import snapshot as snapshots
from parapply.errors import ConfigError, ParapplyError, SourceRefused, TargetRefused
from parapply.model import format_lsn
from parapply.printable import printable
from parapply.quoting import copyable
from parapply.source import ddl_queue, failover, refusals, slot
from parapply.source.ddl_automatic import Automatic
from parapply.target.state import cutovers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from parapply.check.kinds import Finding
    from parapply.config import Config
    from parapply.copy.published import PublishedTable

#: Findings of one code that are printed.
_MOST_TOLD: Final = 10


def print_queue(config: Config, *, inexact: Literal["refuse", "warn"] | None = None) -> None:
    """Print the SQL that makes the queue of commands on the publisher; connect nowhere.

    `inexact`: the reaction of event triggers to commands that cannot be recorded; None: none are made.
    """
    click.echo(ddl_queue.install_sql(config.source.publications, _automatic(config, inexact)))


def _automatic(config: Config, inexact: Literal["refuse", "warn"] | None) -> Automatic | None:
    return None if inexact is None else Automatic(tags=config.ddl.tags, inexact=inexact)


def init(
    config: Config,
    copy: copying.CopyOptions | None = None,
    *,
    despite: Collection[str] = (),
    makes_queue: bool = False,
    inexact: Literal["refuse", "warn"] | None = None,
) -> None:
    """Check both ends, make slot and state, copy if asked to, and report the work done.

    Doing it again changes nothing and says so, or goes on with a copy that was interrupted. A slot that exists while
    the target knows nothing of it is adopted; one that was read is so only if asked to, or for a copy.

    Args:
        config: what is to be set up.
        copy: how to copy the rows from before; None: not at all.
        despite: codes of arguable refusals to go on with.
        makes_queue: also make the queue of commands on the publisher, before everything else.
        inexact: with event triggers, and what they do about commands that cannot be recorded; None: without.

    Raises:
        ConfigError: a code in `despite` names no arguable refusal.
        SourceRefused, SourceLost: the publisher, its publications or the slot are not as they must be.
        TargetRefused, TargetLost: the same for the target.
        LeaseHeld: another process copies.
    """
    check_despite("init", despite)
    asyncio.run(_init(config, copy, despite, makes_queue=makes_queue, automatic=_automatic(config, inexact)))


def check_despite(command: str, despite: Collection[str], more: Collection[str] = ()) -> None:
    """Refuse, as ConfigError, codes with which a command cannot go on; beside arguable refusals it takes `more`."""
    arguable = [*more, *[code.text for code in Code if code.value.is_arguable]]
    if wrong := [code for code in despite if code not in arguable]:
        raise ConfigError(
            f"--despite {', '.join(wrong)}: {command} cannot go on with that; it can with {', '.join(sorted(arguable))}"
        )


async def _init(
    config: Config,
    copy: copying.CopyOptions | None,
    despite: Collection[str],
    *,
    makes_queue: bool,
    automatic: Automatic | None,
) -> None:
    name = config.source.slot
    async with connect.open_both(config, "init") as ends:
        if makes_queue:
            await slot.check_publications(ends.source, config.source.publications)
            await ddl_queue.install(ends.source, config.source.publications, automatic)
            click.echo("source: parapply.ddl_queue: made, and published")
            if automatic is not None:
                click.echo(f"source: event triggers record {', '.join(automatic.tags)}; else they {automatic.inexact}")
        facts = await slot.inspect(ends.source, name)
        await connect.check_back(config, ends.source, facts)
        found = await connect.known_state(config, ends.target, facts.system_identifier)
        if found is not None:
            # Before hints that are none for a target which has taken over.
            await cutovers.check_may_write(ends.target, config.target.state_schema, found.slot_id, name)
            await slot.check_publications(ends.source, config.source.publications)
            login, two_phase = config.source.login, config.source.two_phase
            position = await connect.known_position(ends.target, config.target.state_schema, found)
            facts = await refusals.check(ends.source, facts, login, name, position, two_phase=two_phase)
            is_made = (await failover.ensure(config.source, facts)) is not facts
            _tell_failover(config, facts)
            if copy is not None:
                if await copying.go_on(config, copy, ends, found):
                    click.echo("next: parapply run, with the same options")
            else:
                done = "it is a failover slot now" if is_made else "nothing to do"
                click.echo(f"slot {name!r}: exists and is applied up to {format_lsn(found.low_lsn)}; {done}")
            return
        tables = await look_first(config, copy, ends, facts, despite)
        click.echo(f"source: database {facts.database!r}, system identifier {facts.system_identifier}: fine")
        if copy is not None:
            await copying.begin(config, copy, ends, facts, tables)
        else:
            await _begin(config, ends, facts)
        _tell_failover(config, facts)
        click.echo("next: parapply run, with the same options")


def _tell_failover(config: Config, facts: slot.SourceFacts) -> None:
    if config.source.failover == "auto" and (why := failover.unprotected(facts)):
        click.echo(f"source.failover: {why}")


async def _begin(config: Config, ends: connect.Connections, facts: slot.SourceFacts) -> None:
    """Make slot and state, or adopt the slot."""
    schema, name = config.target.state_schema, config.source.slot
    async with connect.state_schema(ends.target, schema):
        click.echo(f"target: state schema {schema!r}: fine")
        if facts.slot is None:
            # The slot first: if this ends in between, the next init adopts it. State first would name a lost slot.
            if error := await refusals.awaited(ends.source, config.source):
                raise error
            snapshots.tell_what_is_awaited(ends.source)
            await slot.create_slot(ends.source, name, two_phase=config.source.two_phase)
        # One transaction: a late refusal drops the slot, and must leave no state of it.
        async with lifecycle.new_slot(ends.source, "" if facts.slot else name), ends.target.transaction():
            adopted = await connect.adopt(config, ends, is_new=facts.slot is None)
            await left_out.note(config, ends, adopted.slot_id)
    click.echo(f"slot {name!r}: starts at {format_lsn(adopted.low_lsn)}; rows from before are not copied")


async def look_first(
    config: Config,
    copy: copying.CopyOptions | None,
    ends: connect.Connections,
    facts: slot.SourceFacts,
    despite: Collection[str],
) -> Sequence[PublishedTable]:
    """Look at both ends, print warnings, refuse what would fail, and return the published tables.

    Raises:
        SourceRefused, TargetRefused: something would fail; what else would is printed already.
    """
    options = CheckOptions()
    if copy is not None:
        options = CheckOptions(
            is_copy=True,
            truncates=copy.truncates,
            brings_schema=copy.brings_schema,
            connections=copy.connections,
            brings_roles=copy.brings_roles,
        )
    report = await look_at(ends, config, options, facts, None)
    refused = [each for each in report.of(Severity.REFUSED) if each.code.text not in despite]
    # The publisher's come last: the last one gives the exit code, and an init ended there before it met the target.
    refused.sort(key=lambda each: each.code.value.end is End.SOURCE)
    told = [each for each in report.findings if each not in refused and each.code.value.severity is not Severity.NOTE]
    for each, more in _shortened(told):
        code = each.code.value
        click.echo(printable(f"{code.severity.value}: {_text(each)}{more}: {code.advice}{_fix(each)}"))
    connect.raise_all(list(_errors(refused)))
    return report.published


def _shortened(findings: Sequence[Finding]) -> Iterator[tuple[Finding, str]]:
    """Give the first findings of each code, the last of them with words about how many there are more."""
    for code, group in by_code(findings).items():
        shown, n_more = group[:_MOST_TOLD], len(group) - _MOST_TOLD
        for each in shown[:-1]:
            yield each, ""
        yield shown[-1], f" (and {n_more:,} more of {code.text}: see `parapply check`)" if n_more > 0 else ""


def _errors(findings: Sequence[Finding]) -> Iterator[ParapplyError]:
    for each, more in _shortened(findings):
        code = each.code
        go_on = f"; or go on all the same with --despite {code.text}" if code.value.is_arguable else ""
        error = SourceRefused if code.value.end is End.SOURCE else TargetRefused
        yield error(f"{_text(each)}{more}", hint=f"{code.value.advice}{go_on}{_fix(each)}")


def _fix(finding: Finding) -> str:
    return f"; here: {copyable(finding.fix)}" if finding.fix else ""


def _text(finding: Finding) -> str:
    end = finding.code.value.end.value
    return f"{end}, {finding.code.text}: {finding.found.removeprefix(f'{end}: ')}"
