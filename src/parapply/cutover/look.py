"""Obstacles that would keep a cut-over from its end, looked for before anything is made.

In: sessions of both configurations. Out: errors, not raised; warnings and notes are printed. Nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import click
import msgspec
from psycopg import sql

from parapply.amounts import few
from parapply.check.kinds import Code, Finding, Severity
from parapply.check.look import look_at
from parapply.check.source import CheckOptions
from parapply.copy.published import published_tables
from parapply.cutover import fence, way_back
from parapply.errors import ConfigError, ParapplyError, SourceRefused, TargetRefused
from parapply.printable import printable
from parapply.quoting import copyable
from parapply.source import refusals, slot
from parapply.source.slot import source_errors
from parapply.target.session import lease, prepared
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import commands, copies, display
from parapply.target.state import slots as state
from parapply.vocabulary import CopyState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from parapply.config import Config
    from parapply.connect import Connections
    from parapply.copy.published import PublishedTable

#: Findings that mean nothing while the way back is still to be made.
_OF_MAKING: Final = frozenset({Code.PUBLICATION_MISSING, Code.PUBLICATION_EMPTY, Code.SLOT_ADOPTED, Code.SLOT_READ})
#: Findings of objects that the stream does not bring.
_NOT_THERE: Final = frozenset({Code.NOT_REPLICATED, Code.TABLE_UNPUBLISHED, Code.LARGE_OBJECTS})
_PRESENT: Final = """
SELECT w.schema_name, w.table_name, w.column_name
  FROM unnest($1::text[], $2::text[], $3::text[]) AS w(schema_name, table_name, column_name)
  JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name
  JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name
  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attname = w.column_name
 WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"""


class CutoverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to cut over."""

    verify: Literal["none", "sampled", "whole"] = "sampled"
    keep_roles: tuple[str, ...] = ()  # whose sessions on the source stay
    fence_command: str = ""  # instead of the database's own setting
    timeout_s: float = 60.0  # from the fence until the target has everything
    with_sequences: bool = True
    leaves_poolers: bool = False  # those that were paused and are not named now
    is_dry: bool = False
    is_back: bool = False  # the stream of the way back runs, and ends
    other_way: str = "parapply cutover --back"  # the command in the other direction
    hint: str = ""  # printed at the end


class Pair(NamedTuple):
    """The stream that runs and the way back, with the sessions of each."""

    forward: Config
    reverse: Config
    ahead: Connections
    back: Connections
    slot_id: int  # of the stream that runs


class CutoverLook:
    """Looks at both streams; keeps nothing."""

    def __init__(self, pair: Pair, options: CutoverOptions) -> None:
        self._forward, self._reverse, self._ahead, self._back, self._slot_id = pair
        self._options = options
        self._tables: Sequence[PublishedTable] = ()
        self._told: set[str] = set()

    def say_plan(self, n_tables: int, of_poolers: Mapping[str, str], hooks: Sequence[str]) -> None:
        """Print what each step would do."""
        slot_name, back = self._forward.source.slot, self._reverse.source.slot
        how = "by --fence-command" if self._options.fence_command else "default_transaction_read_only of its database"
        kept = f", except sessions of {', '.join(self._options.keep_roles)}" if self._options.keep_roles else ""
        lines = {
            "preparing": f"publication {self._reverse.source.publications[0]!r} and slot {back!r} on the target, for"
            f" {n_tables} tables",
            "fencing": how + ("" if self._options.fence_command else f"; its sessions end{kept}"),
            "draining": f"the daemon applies what is left of slot {slot_name!r}, within {self._options.timeout_s:g} s",
            "comparing": self._options.verify,
            "sequences": "brought" if self._options.with_sequences else "left out",
            "stopping": f"the daemon of slot {slot_name!r} ends, and no other may start",
            "turning": f"slot {back!r} sends what is committed on the target from there on",
            "opening": "writers may be let in on the target; from here on the way back is --back",
            "ending": f"slot {slot_name!r} is dropped on the source",
        }
        for number, (step, text) in enumerate(lines.items(), 1):
            click.echo(printable(f"{number}/{len(lines)} {step}: {of_poolers.get(step, '')}{text}"))
        for line in hooks:
            click.echo(printable(line))

    async def refusals(self, tables: Sequence[PublishedTable], *, has_made: bool) -> list[ParapplyError]:
        """Return all that would be refused."""
        self._tables = tables
        of_stream = self._of_stream(), self._of_columns(tables), self._of_commands(), self._of_fence()
        of_back = self._of_opening(), self._of_slot(), self._of_publication(has_made=has_made)
        found = [error for look in (*of_stream, *of_back) async for error in look]
        return found + await self.findings_of_back()

    async def check_tables(self, *, is_made: bool) -> None:
        """Check the published tables again, both ways, because until the fence any session could change them.

        Raises:
            SourceRefused: a table came that was not looked at, or the way back leaves one out or overwrites a column.
        """
        forward = self._forward
        tables = await published_tables(self._ahead.source, forward.source.publications, forward.mapping)
        known = {table.oid for table in self._tables}
        if new := [table.text for table in tables if table.oid not in known]:
            raise SourceRefused(
                f"source: published since the cut-over looked at its tables: {few(new)}", hint=way_back.AGAIN
            )
        async for error in self._of_columns(tables):
            raise error
        await way_back.check_covers(self._back.source, self._reverse, tables, is_made=is_made)

    async def check_copied(self, low_lsn: int) -> None:
        """Refuse tables of which the target does not have all, as `refusals` does; no copy runs since the fence.

        Raises:
            TargetRefused: there are some.
        """
        copied = await copies.load(self._ahead.target, self._forward.target.state_schema, self._slot_id)
        for error in self._of_copies(copied, low_lsn):
            raise error

    async def check_prepared(self) -> None:
        """Refuse transactions that are prepared on the target by others than the stream that runs.

        Raises:
            TargetRefused: there are some, and the way back, once it has begun, would be sent their outcome alone.
        """
        if not self._reverse.source.two_phase:
            return
        own = await prepared.pending(self._ahead.target, self._forward.target.state_schema, self._slot_id)
        held = set(await fence.prepared(self._back.source)) - {gid for gid, _ in own.values()}
        if held:
            raise TargetRefused(
                f"target: {len(held)} transactions are prepared: {few(sorted(held))}; the way back would get their"
                " outcome, and not their changes",
                hint="COMMIT PREPARED or ROLLBACK PREPARED them, on its publisher what another slot brought, and give"
                " the same command again",
            )

    def _of_copies(self, copied: copies.Copies, low_lsn: int) -> Iterator[ParapplyError]:
        # One that is dropped since, or no more published, is of no concern.
        names = {each for table in self._tables for each in (table.full_name, *_leaves(table))}
        # A row keeps the name that a table had before it was renamed.
        oids = {table.oid for table in self._tables}
        lacking = [
            ".".join(row.name)
            for row in copied.tables
            if (row.name in names or row.source_oid in oids)
            and (row.state != CopyState.COPIED or (row.start_lsn or 0) > low_lsn)
        ]
        if lacking:
            yield TargetRefused(
                f"the target does not have all of {few(lacking)}: not copied, paused, or only now copied",
                hint="see `parapply status`; `parapply refresh` or `parapply resume` copies them",
            )

    def warn(self, text: str) -> None:
        """Print a warning, once."""
        if text not in self._told:
            self._told.add(text)
            click.echo(printable(f"warning: {text}"))

    async def _of_stream(self) -> AsyncIterator[ParapplyError]:
        """Yield the reasons why the stream that runs cannot be brought to its end."""
        forward, ahead, schema = self._forward, self._ahead, self._forward.target.state_schema
        facts = await slot.inspect(ahead.source, forward.source.slot)
        if not any(holder.is_leader for holder in await lease.holders(ahead.target, self._slot_id)):
            why = await display.reason(ahead.target, schema, self._slot_id)
            ended = f"; the last one ended: {why}" if why else ""
            yield TargetRefused(
                f"no daemon applies slot {forward.source.slot!r}{ended}", hint="start `parapply run`, and wait"
            )
        known = await state.load(ahead.target, schema, forward.source.slot, facts.system_identifier)
        copied = await copies.load(ahead.target, schema, self._slot_id)
        for error in self._of_copies(copied, known.low_lsn if known is not None else 0):
            yield error
        if unlisted := await self._not_applied(copied):
            yield TargetRefused(
                f"the target gets nothing of {few(unlisted)}: published, with rows, and never copied",
                hint="`parapply refresh` copies them",
            )
        if forward.apply.delay_s > self._options.timeout_s:
            yield ConfigError(
                f"apply.delay_s is {forward.apply.delay_s:g}: the target would not be there within --timeout",
                hint="set it to 0, and have the daemon read its configuration again (SIGHUP)",
            )
        if held := await fence.prepared(ahead.source):
            yield SourceRefused(
                f"source: {len(held)} transactions are prepared: {few(held)}",
                hint="COMMIT PREPARED or ROLLBACK PREPARED them first",
            )
        if await prepared.pending(ahead.target, schema, self._slot_id):
            yield TargetRefused("transactions are prepared on the target", hint="end them on the source")
        if left := [table.text for table in self._tables if table.row_filter]:
            self.warn(f"{few(left)}: a row filter leaves rows out, which the target does not have")
        report = await look_at(ahead, forward, CheckOptions(), facts, known)
        for each in report.findings:
            if each.code in _NOT_THERE:
                self.warn(f"{each.code.text}: {each.found}: the target does not have that")

    async def _of_columns(self, tables: Sequence[PublishedTable]) -> AsyncIterator[ParapplyError]:
        """Yield an error if the way back would overwrite columns whose values only the source has."""
        found = [(table.schema, table.name, column) for table in tables for column in table.left_out]
        if not found:
            return
        with target_errors("reading the columns"):
            there = set(
                await rows(self._ahead.target, sql.SQL(_PRESENT), [list(each) for each in zip(*found, strict=True)])
            )
        if met := [".".join(column) for column in found if column in there]:
            yield SourceRefused(
                f"the publication leaves out {few(met)}, and the target has them also: the way back would overwrite"
                " the source's values, which nothing else has",
                hint="publish them, and `parapply refresh` the tables; or drop these columns on the target",
            )
        if lacking := [".".join(column) for column in found if column not in there]:
            self.warn(f"{few(lacking)}: the publication leaves columns out, which the target does not have")

    async def _not_applied(self, copied: copies.Copies) -> list[str]:
        """Return the published tables that hold rows and that the daemon has never heard of: no change came yet."""
        if not copied.is_listed:
            return []
        names, oids = {row.name for row in copied.tables}, {row.source_oid for row in copied.tables}
        found = []
        for table in self._tables:
            if table.oid in oids or names & {table.full_name, *_leaves(table)}:
                continue
            with source_errors(f"reading {table.text}"):
                only = sql.SQL("ONLY " if table.full_name in _leaves(table) else "")
                query = sql.SQL("SELECT EXISTS (SELECT FROM {}{})").format(only, sql.Identifier(*table.full_name))
                ((has_rows,),) = await rows(self._ahead.source, query)
            if has_rows:
                found.append(table.text)
        return found

    async def _of_commands(self) -> AsyncIterator[ParapplyError]:
        """Yield an error if the target is still to run commands of the publisher outside of the stream."""
        pending = await commands.pending(self._ahead.target, self._forward.target.state_schema, self._slot_id)
        if pending:
            yield TargetRefused(
                f"{len(pending)} commands of the publisher are still to run on the target: CREATE or DROP INDEX"
                " CONCURRENTLY",
                hint="see `parapply status`: wait, or correct what is in their way",
            )

    async def kept(self, *, with_daemon: bool) -> fence.Kept:
        """Return whose sessions on the source stay; raise TargetLost if the connection of the way back to it broke."""
        with target_errors("asking for its process"):
            ((pid,),) = await rows(self._back.target, sql.SQL("SELECT pg_catalog.pg_backend_pid()"))
        return fence.Kept(roles=self._options.keep_roles, pids=(pid,), with_daemon=with_daemon)

    async def _of_fence(self) -> AsyncIterator[ParapplyError]:
        source = self._ahead.source
        # The way back writes to the fenced source when the daemon has stopped, and its commits would wait for it.
        if awaited := await refusals.awaited(source, self._forward.source):
            yield awaited
        if not self._options.fence_command:
            for error in await fence.refusals(source, await self.kept(with_daemon=False)):
                yield error
        # Neither heeds default_transaction_read_only.
        with source_errors("looking who applies to the source"):
            subscriptions = await rows(
                source,
                sql.SQL(
                    "SELECT subname::text FROM pg_catalog.pg_subscription WHERE subenabled AND subdbid ="
                    " (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
                ),
            )
            daemons = await rows(
                source,
                sql.SQL(
                    "SELECT pid FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND classid::int8 = $1::int8"
                    " AND objsubid = 2 AND granted AND objid::int8 % 2 = 0 AND database ="
                    " (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
                ),
                [lease.LOCK_CLASS],
            )
        if subscriptions:
            names = few([str(name) for (name,) in subscriptions])
            yield SourceRefused(f"source: the subscriptions {names} write to it", hint="ALTER SUBSCRIPTION ... DISABLE")
        if daemons:
            pids = few([str(pid) for (pid,) in daemons])
            yield SourceRefused(f"source: another parapply applies to it (process {pids} there)", hint="stop it first")

    async def _of_opening(self) -> AsyncIterator[ParapplyError]:
        """Yield the reasons why writers could not be let in on the target."""
        try:
            opens = await self.what_to_open()
            if opens == fence.COMMAND and not self._options.fence_command:
                yield ConfigError(
                    "the target was fenced by a command, which has to open it again", hint="--fence-command"
                )
            if opens == fence.DATABASE:
                for refused in await fence.refusals_of_owner(self._back.source):
                    yield refused
        except TargetRefused as error:
            yield error

    async def _of_publication(self, *, has_made: bool) -> AsyncIterator[ParapplyError]:
        """Yield the reasons why the publication of the way back cannot be made, or leaves something out."""
        reverse, back = self._reverse, self._back
        missing = await way_back.missing_publications(back.source, reverse.source.publications)
        if not missing:
            try:
                in_leaves = await way_back.check_covers(back.source, reverse, self._tables, is_made=has_made)
            except SourceRefused as error:
                yield error
            else:
                if in_leaves:
                    self.warn(
                        f"the publication of the way back names only partitions of {few(in_leaves)}: of one that is"
                        " made later nothing comes back"
                    )
        elif len(reverse.source.publications) > 1:
            yield SourceRefused(f"no publications {', '.join(missing)} on the target", hint="make them, or name one")
        if without := await way_back.without_identity(self._ahead, self._tables):
            yield SourceRefused(
                f"a publication of the target would break UPDATE and DELETE there: {few(without)} have no"
                " replica identity that can be published",
                hint="on the target make their primary keys and ALTER TABLE ... REPLICA IDENTITY DEFAULT, or FULL"
                " if they have no generated columns",
            )

    async def _of_slot(self) -> AsyncIterator[ParapplyError]:
        """Yield the reasons why the slot of the way back would leave something out, or cannot be used."""
        try:
            await self.check_prepared()
        except TargetRefused as error:
            yield error
        name = self._reverse.source.slot
        facts = await slot.inspect(self._back.source, name)
        if facts.slot is None:
            return
        try:
            refusals.check_slot(facts, name, None, two_phase=self._reverse.source.two_phase)
        except SourceRefused as error:
            yield error
        if facts.slot.active_pid is not None:
            yield SourceRefused(f"the slot {name!r} of the way back is in use", hint="stop its reader")

    async def findings_of_back(self) -> list[ParapplyError]:
        """Return what `parapply check` would refuse of the way back; its warnings are printed."""
        reverse, back = self._reverse, self._back
        facts = await slot.inspect(back.source, reverse.source.slot)
        report = await look_at(back, reverse, CheckOptions(), facts, None)
        found: list[ParapplyError] = []
        for each in report.findings:
            severity = each.code.value.severity
            if each.code in _OF_MAKING:
                continue
            if severity is Severity.REFUSED:
                fix = f"; here: {copyable(each.fix)}" if each.fix else ""
                found.append(_error_of(each, f"{each.code.value.advice}{fix}"))
            elif severity is Severity.WARNING:
                self.warn(f"the way back, {each.code.text}: {each.found}")
        return found

    async def what_to_open(self) -> str:
        """Return the fence that keeps writers from the target, which may have been the source of an earlier cut-over.

        Raises:
            TargetRefused: the slot of the way back is applied already.
        """
        _, before = await way_back.stale_state(self._back, self._reverse)
        if before != fence.COMMAND and await fence.is_up(self._back.source):
            return fence.DATABASE
        return before if before == fence.COMMAND else ""


def _leaves(table: PublishedTable) -> list[tuple[str, str]]:
    return [(leaf.schema, leaf.name) for leaf in table.leaves]


def _error_of(finding: Finding, hint: str) -> ParapplyError:
    # The way back's source is the target of the stream that runs.
    is_source = finding.code.value.end.value == "source"
    error = TargetRefused if is_source else SourceRefused
    return error(f"the way back, {finding.code.text}: {finding.found}", hint=hint)


async def check_pair(ahead: Connections, back: Connections) -> None:
    """Refuse a way back that leads elsewhere."""
    query = sql.SQL(
        "SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()), pg_catalog.current_database(),"
        " pg_catalog.current_setting('port')"
    )

    async def place(conn: slot.Connection, *, is_source: bool) -> tuple[object, ...]:
        with source_errors("asking who it is") if is_source else target_errors("asking who it is"):
            return (await rows(conn, query))[0]

    for here, there, what in (
        (await place(ahead.target, is_source=False), await place(back.source, is_source=True), "source"),
        (await place(ahead.source, is_source=True), await place(back.target, is_source=False), "target"),
    ):
        if here != there:
            other = "target" if what == "source" else "source"
            raise ConfigError(
                f"{what}.dsn of the way back leads to the database {there[1]!r} of the cluster {there[0]}, port"
                f" {there[2]}, and {other}.dsn of the stream that runs to {here[1]!r} of {here[0]}, port {here[2]}",
                hint="see `parapply cutover --print-reverse`; with --back both files stay in their places",
            )
