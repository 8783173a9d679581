"""The commands around the daemon, `drop` and `wait`, and the undoing of an `init` that is refused on its way.

In: the configuration. Out: lines on standard output for people; failures are ours, with their exit code.
Each one opens its own sessions, does its work, and closes them; none needs a running daemon but `wait`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import click
import msgspec

from parapply.amounts import few
from parapply.connect import check_back, open_both
from parapply.errors import ParapplyError, SourceRefused, TargetRefused
from parapply.logs import redact_text
from parapply.model import covers, format_lsn, parse_lsn
from parapply.printable import printable
from parapply.source import refusals, slot
from parapply.target.session import lease, origins, prepared, settings
from parapply.target.state import copies, cutovers, indexes, migrations
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from parapply.config import Config
    from parapply.connect import Connections
    from parapply.plan.copy_starts import Name

#: Seconds between two looks at the progress: the first ones soon, for a read that follows its own write.
_POLL_MIN_S = 0.02
_POLL_MAX_S = 0.2
#: Seconds between two calls of a daemon that may rest, shorter than its rest takes to begin.
_CALL_S = 5.0
#: Seconds after which a message says what is waited for.
_PATIENCE_S = 3.0
#: Seconds for the walsender of a daemon that was killed just now to end: it sees that only when it next sends or reads.
_READER_ENDS_S = 5.0
#: The same for the session of a `migrate` or `drop` that was killed just now.
_MIGRATION_ENDS_S = 1.0


@asynccontextmanager
async def patiently(text: str) -> AsyncIterator[asyncio.TimerHandle]:
    """Report the object of a wait if it takes a while."""
    timer = asyncio.get_running_loop().call_later(_PATIENCE_S, click.echo, text)
    try:
        yield timer
    finally:
        timer.cancel()


@asynccontextmanager
async def new_slot(source: slot.Connection, name: str) -> AsyncIterator[None]:
    """Drop a slot that was made just now if the state that would name it is refused: it would keep the publisher's WAL.

    The name is empty if it existed before, so that it stays.
    """
    try:
        yield
    except (SourceRefused, TargetRefused):
        if name:
            try:
                await slot.drop_slot(source, name)
            except ParapplyError:
                click.echo(f"source: slot {name!r} was made and is left; it keeps WAL until it is dropped", err=True)
        raise


def drop(config: Config, assume_yes: bool) -> None:  # noqa: FBT001  the command line passes it by position
    """Remove the slot and its state, and the state schema when no slot is left in it; ask first.

    The state of a slot of another cluster is removed only if that cluster is named, and no slot then.
    Raise SlotBusy if a process reads the slot, LeaseHeld if a daemon, a copy or a migration runs.
    """
    asyncio.run(drop_one(config, assume_yes=assume_yes))


def ask(configs: Sequence[Config]) -> None:
    """Name the slots of several databases, and ask once whether they may go; raise ParapplyError if they may not."""
    for config in configs:
        try:
            text = asyncio.run(_described(config))
        except ParapplyError as error:
            # It also ends the removal of this one.
            text = redact_text(error.line())
        click.echo(f"slot {config.source.slot!r}: {text}")
    if not click.confirm(f"Drop these {len(configs)} slots on the source and their states on the target?"):
        raise ParapplyError("nothing was dropped", hint="answer y, or give --yes")


async def _described(config: Config) -> str:
    async with open_both(config, "drop") as ends:
        facts, found = await _look(config, ends)
    if facts.slot is None and found is None:
        return "neither slot nor state"
    return f"of database {printable(facts.database)!r}{_applied(found)}"


def _applied(found: state.SlotState | None) -> str:
    return f" (applied up to {format_lsn(found.low_lsn)})" if found else ""


async def _look(
    config: Config, ends: Connections, *, any_cluster: bool = False
) -> tuple[slot.SourceFacts, state.SlotState | None]:
    schema, name = config.target.state_schema, config.source.slot
    facts = await slot.inspect(ends.source, name)
    if not await state.has_schema(ends.target, schema):
        return facts, None
    return facts, await state.load(ends.target, schema, name, None if any_cluster else facts.system_identifier)


async def drop_one(config: Config, *, assume_yes: bool = True) -> bool:
    """Do what `drop` does, and return whether something existed; errors as there."""
    schema, name = config.target.state_schema, config.source.slot
    async with open_both(config, "drop") as ends:
        publisher = await _wait_until_idle(ends.source, name)
        migration = migrations.Migration(schema=schema, slot_name=name, system_identifier=publisher)
        # Until the end: another `drop` would let a slot and a state be made that were not asked about.
        await migrations.lock(ends.target, migration, _MIGRATION_ENDS_S)
        facts, found = await _look(config, ends, any_cluster=not assume_yes)
        other = found.system_identifier if found and found.system_identifier != facts.system_identifier else ""
        if other:
            # After pg_upgrade of the publisher no address leads to the state's cluster. A slot there may be another's.
            facts = msgspec.structs.replace(facts, slot=None)
        if facts.slot is None and found is None:
            if await _forget_migration(ends.target, migration):
                return True
            click.echo(f"slot {name!r}: neither slot nor state; nothing to do")
            return False
        refusals.check_own_and_idle(facts)
        await check_back(config, ends.source, facts)
        if not assume_yes:
            _ask_one(name, found, facts.system_identifier)
        if found:
            # A daemon or a copy that still runs, or a session of one that was killed, would go on without a record.
            await lease.take_both(ends.target, found.slot_id, 0, say_whom_it_waits_for)
            await _check_removable(ends.target, schema, found.slot_id, name)
            known = await copies.load(ends.target, schema, found.slot_id)
            await make_left_indexes(config, ends.target, known.tables)
        if facts.slot is not None:
            await slot.drop_slot(ends.source, name)
            click.echo(f"source: slot {name!r} dropped")
        if found:
            await _remove_state(ends.target, schema, found.slot_id, name)
            if other:
                click.echo(f"slot {name!r} of the cluster {other} is left: if that runs, it keeps WAL until dropped")
        else:
            await _forget_migration(ends.target, migration)
    return True


def _ask_one(name: str, found: state.SlotState | None, publisher: str) -> None:
    """Ask whether a slot may go, or only the state of another cluster's; raise ParapplyError if it may not."""
    if found is None or found.system_identifier == publisher:
        if not click.confirm(f"Drop slot {name!r}{_applied(found)} on the source and its state on the target?"):
            raise ParapplyError("nothing was dropped", hint="answer y, or give --yes")
        return
    other = found.system_identifier
    click.echo(
        f"The state of slot {name!r}{_applied(found)} is of the cluster {other}, and source.dsn leads to {publisher}."
    )
    # A `y` that comes through a pipe is for the usual question.
    text = "To drop that state, and leave every slot, type the identifier of its cluster"
    if click.prompt(text, default="", show_default=False) != other:
        raise ParapplyError("nothing was dropped", hint="correct source.dsn, or type the identifier")


async def make_indexes(target: settings.Connection, name: Name, statements: Sequence[str]) -> None:
    """Make the indexes that a table of the target lacks; raise TargetRefused or TargetLost if one is not made."""
    for gone in await indexes.make(target, name, statements):
        of = printable(".".join(name))
        why = "because the table or its column is gone"
        click.echo(f"warning: an index of {of} is not made again, {why}: {printable(gone)}", err=True)


async def make_left_indexes(config: Config, target: settings.Connection, tables: Iterable[copies.CopyRow]) -> None:
    """Make the indexes that interrupted copies of tables have dropped, before their rows go; errors as above."""
    for row in tables:
        if row.indexes:
            name = config.mapping.target_of(row.name)
            shown = printable(".".join(name))
            click.echo(f"target: making indexes of {shown} again, which a copy has dropped: {len(row.indexes)}")
            pid = target.info.backend_pid
            waits = (
                f"target: still making them; of a lock that this waits for, SELECT pg_blocking_pids({pid}) says whose"
            )
            try:
                async with patiently(waits):
                    await make_indexes(target, name, row.indexes)
            except TargetRefused as error:
                error.hint = error.hint or "make them otherwise, or empty the table, and run the same command again"
                raise


async def _wait_until_idle(source: slot.Connection, name: str) -> str:
    """Return the publisher's system identifier once no process reads a slot, or after `_READER_ENDS_S`."""
    until_s = time.monotonic() + _READER_ENDS_S
    while True:
        facts = await slot.inspect(source, name)
        if facts.slot is None or facts.slot.active_pid is None or time.monotonic() >= until_s:
            return facts.system_identifier
        await asyncio.sleep(_POLL_MAX_S)


async def _forget_migration(target: settings.Connection, migration: migrations.Migration) -> bool:
    """Forget a migration that was ended before its copy had begun; return whether one existed."""
    if not await state.has_schema(target, migration.schema) or not await migrations.forget(target, migration):
        return False
    name = migration.slot_name
    click.echo(f"target: steps of the migration with slot {name!r} removed; what they have made stays")
    await _drop_schema(target, migration.schema)
    return True


async def _remove_state(target: settings.Connection, schema: str, slot_id: int, name: str) -> None:
    # Nothing else would ever end them: they hold locks and keep vacuum from its work (F34).
    held = [gid for gid, _ in (await prepared.pending(target, schema, slot_id)).values()]
    await prepared.roll_back(target, held)
    if held:
        click.echo(f"target: {len(held)} prepared transactions rolled back")
    if others := await prepared.others(target, schema, slot_id):
        names = printable(few(others))
        click.echo(f"target: prepared by roles that may not write the state, and left: {names}")
    await state.drop_slot_state(target, schema, slot_id)
    if left := await origins.drop_origins(target, slot_id):
        click.echo(f"target: replication origins of the slot are left: {left}")
    click.echo(f"target: state of slot {name!r} removed")
    await _drop_schema(target, schema)


async def _drop_schema(target: settings.Connection, schema: str) -> None:
    try:
        if await state.drop_schema(target, schema):
            click.echo(f"target: state schema {schema!r} dropped, no slot was left in it")
    except TargetRefused as error:
        click.echo(f"target: state schema {schema!r} is left: {error.line()}")


async def _check_removable(target: settings.Connection, schema: str, slot_id: int, name: str) -> None:
    """Refuse a removal while the slot exists, if the target would refuse it when nothing could take it back."""
    cutover = await cutovers.read(target, schema, slot_id)
    if cutover is not None and cutover.holds_others:
        raise TargetRefused(
            f"a cut-over of slot {name!r} is under way, at the step {cutover.step}: only its note knows of the fence on"
            f" the source, and of slot {cutover.reverse_slot!r} on the target",
            hint="`parapply cutover` goes on with it, or takes it back with --undo; then `parapply drop`",
        )
    await prepared.check_may_end(target, schema, slot_id)
    await state.check_may_drop(target, schema, slot_id)


def say_whom_it_waits_for(sessions: Sequence[lease.Holder]) -> None:
    """Report the sessions that a command waits for."""
    click.echo(lease.awaited(sessions))


def wait(config: Config, lsn: int, timeout_s: float) -> None:
    """Return as soon as the target shows everything that ends at `lsn` or before: read-your-writes.

    Rows and their record commit together, so what the progress shows is visible.

    Args:
        config: only the target and the slot's name are used.
        lsn: of the publisher, for example pg_current_wal_insert_lsn() after the write.
        timeout_s: how long to wait; 0 looks once.

    Raises:
        ParapplyError: not there in time; exit code 1.
        TargetRefused: the target knows nothing of the slot.
    """
    asyncio.run(applied(config, lsn, timeout_s))


async def applied(config: Config, lsn: int, timeout_s: float) -> None:
    """Return when `wait` would; the arguments and errors are its own."""
    schema, name = config.target.state_schema, config.source.slot
    query = state.in_schema(
        "SELECT lowest_remote_lsn, state, updated_at::text FROM {s}.progress WHERE slot_name = $1", schema
    )
    deadline_s = time.monotonic() + timeout_s
    delay_s, called_s = _POLL_MIN_S, -_CALL_S
    # A plain session: a reader needs neither the replica role nor a primary.
    async with await settings.connect_reader(config.target.login, f"parapply wait {name}") as conn:
        await state.has_schema(conn, schema, only_reads=True)  # refuses another version
        while True:
            with settings.target_errors("reading the progress"):
                found = await settings.rows(conn, query, [name])
            if not found:
                raise TargetRefused(f"the target knows nothing of slot {name!r}", hint="run `parapply init`")
            lowest, daemon_state, updated_at = found[0]
            if covers(parse_lsn(lowest), lsn):
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ParapplyError(
                    f"not there after {timeout_s:g} s: {format_lsn(lsn)} is wanted, the target shows {lowest} "
                    f"(daemon {daemon_state}, last heard of {updated_at})",
                    hint="see `parapply status`",
                )
            if time.monotonic() - called_s >= _CALL_S:
                called_s = time.monotonic()
                # A role that may not see the table of slots waits for the daemon's own look.
                with suppress(TargetRefused):
                    await copies.call(conn, schema, name)
            await asyncio.sleep(min(delay_s, left_s))
            delay_s = min(delay_s * 2, _POLL_MAX_S)
