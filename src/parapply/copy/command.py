"""The copy of `parapply init --copy`, and `parapply refresh`: the hand-over from a copy to the stream.

In: the configuration and options. Out: tables with the publisher's rows as of one LSN each, and a state that says so;
the daemon adds what comes later. Both may be interrupted anywhere and begun again: what is complete stays, parts of a
table are brought forward (`resume.py`), and the rest is copied from a later snapshot.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click
import psycopg

from parapply import cascades, connect, continuity, failpoints, sharing
from parapply.amounts import few
from parapply.commands import lifecycle
from parapply.conflict.skips import OTHER_HISTORY_HINT, forget_other_history
from parapply.copy import left_out, replaced, slot_guard
from parapply.copy import schema as schemas
from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.bar import Bar, CopyProgress
from parapply.copy.load import CopyLoad, LoadOptions
from parapply.copy.published import check_readable, named, published_tables
from parapply.copy.snapshot import IS_LEFT, came_late, check_commands, check_unchanged
from parapply.errors import ConfigError, ParapplyError, SlotLost, SourceRefused, TargetRefused
from parapply.model import covers, format_lsn
from parapply.printable import printable
from parapply.source import ddl_queue, late_tables, refusals, slot
from parapply.target.session import lease, settings
from parapply.target.state import commands, copies, cutovers
from parapply.target.state import slots as state
from parapply.vocabulary import CopyState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from parapply.config import Config
    from parapply.copy.published import PublishedTable
    from parapply.copy.snapshot import SourceSnapshot
    from parapply.plan.copy_starts import Name
    from parapply.wire.ddl_queue import CommandName

#: Seconds between two checks whether the daemon knows of the copy.
_POLL_S = 0.02
#: Seconds until a daemon has noted a new timeline, at most.
_PROMOTION_S = 40.0
_DIFFERS = "`parapply check` names what differs on the target"


class CopyOptions(LoadOptions, frozen=True, kw_only=True):
    """How to copy."""

    truncates: bool = False  # tables that hold rows
    brings_schema: bool = False
    brings_roles: bool = False  # before the copy
    pg_dump: str | None = None
    on_progress: Callable[[CopyProgress], None] | None = None  # called about once a second, and at the end
    tables: tuple[str, ...] = ()  # schema.table; of `refresh`: copy these, empty: those that are not copied, nor paused
    resumes: bool = False  # they must be paused


async def begin(  # noqa: PLR0913, PLR0917  what is known by now
    config: Config,
    options: CopyOptions,
    ends: connect.Connections,
    facts: slot.SourceFacts,
    tables: Sequence[PublishedTable],
    have_run: Collection[CommandName] | None = None,
) -> None:
    """Make slot and state, and copy all published tables.

    Args:
        config: what is to be set up.
        options: how to copy.
        ends: a session on both.
        facts: the publisher, with the slot if it exists: it is adopted then.
        tables: all that are published, readable for the role.
        have_run: commands of the publisher that the target's schema has, where that was brought; a slot
            that shows others is not kept.

    Raises:
        SourceRefused, SourceLost: the slot cannot be made or adopted; a row cannot be read.
        TargetRefused, TargetLost: the target's tables are not as they must be.
        LeaseHeld: another process copies.
    """
    schema, copy = config.target.state_schema, _Copy(config, ends, options)
    _check_two_phase(facts.slot)
    dumped = b""
    if options.brings_schema and not config.mapping.is_empty:
        raise ConfigError(
            "--schema makes the tables as they are on the publisher, and [mapping] says otherwise",
            hint="make the tables on the target by hand, or leave out --schema",
        )
    if options.brings_schema:
        program = schemas.find_pg_dump(options.pg_dump)
        dumped = await schemas.dump(program, config.source.login, without=sorted({schema, *facts.state_schemas}))
        with settings.target_errors("making the schema"):
            # One transaction: where something is refused, nothing of the schema is left.
            async with ends.target.transaction():
                await schemas.make(ends.target, dumped)
                await copy.check_target(tables)
    else:
        # Each query alone, because one transaction would keep every table and index locked, which takes more shared
        # memory than a server has for ten thousand tables.
        await copy.check_target(tables)
    if dumped:
        click.echo(f"target: schema made ({len(dumped):,} bytes of SQL)")
    async with connect.state_schema(ends.target, schema):
        if facts.slot is not None:
            # Its snapshot is gone: the state says that nothing is copied, then it is as after an interruption.
            async with ends.target.transaction():
                adopted = await connect.adopt(config, ends)
                await copies.add(ends.target, schema, adopted.slot_id, _oids(tables), is_listed=True)
                await left_out.note(config, ends, adopted.slot_id)
            have_run = await copy.until_commands(adopted.slot_id)
            await copy.copy_later(adopted, tables, have_run)
        else:
            made = await copy.begin(tables, have_run)
            if made is not None:
                await copy.go_on_after_pause(made, tables)


async def go_on(
    config: Config,
    options: CopyOptions,
    ends: connect.Connections,
    found: state.SlotState,
    have_run: Collection[CommandName] | None = None,
) -> bool:
    """Copy the parts that an interrupted copy has left, and return whether any were left.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost, LeaseHeld: as `begin`; the slot was begun without a copy.
    """
    name, schema = config.source.slot, config.target.state_schema
    copy = _Copy(config, ends, options)
    await copy.check_not_cut_over(found.slot_id)
    published = await published_tables(ends.source, config.source.publications, config.mapping)
    known = await copy.known(found.slot_id, published)
    if not known.is_listed:
        raise TargetRefused(
            f"slot {name!r} was begun without a copy and is applied up to {format_lsn(found.low_lsn)}",
            hint="`parapply refresh --table` copies single tables; to copy all of them `parapply drop` first",
        )
    left_out.say_paused(known)
    left_out.say_schema_only(known)
    wanted = [row for row in known.tables if not (row.is_paused or row.is_schema_only)]
    left = {row.name for row in wanted if row.state != CopyState.COPIED}
    if not left:
        click.echo(f"slot {name!r}: all {len(wanted)} tables are copied; nothing to do")
        return False
    tables = [table for table in published if table.full_name in left]
    click.echo(f"slot {name!r}: {len(wanted) - len(left)} tables are copied, {len(left)} are left")
    begun = {row.name for row in known.tables if row.is_begun}
    await check_readable(ends.source, tables)
    if have_run is None:
        have_run = await copy.until_commands(found.slot_id)
    elif not await ddl_queue.names(ends.source) <= set(have_run):
        raise came_late()
    await copy.check_target(tables, begun=begun)
    unpublished = sorted(left - {table.full_name for table in tables})
    await copy.forget(found.slot_id, known, unpublished)
    await copies.add(ends.target, schema, found.slot_id, _oids(tables), is_listed=True)
    await copy.copy_later(found, tables, have_run)
    return True


async def pause(config: Config, names: Sequence[str]) -> None:
    """Take tables out of the stream until `resume` copies them again; return when the daemon applies nothing to them.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost: a table is not published; an end is not as it must be.
        LeaseHeld: another process copies.
    """
    schema = config.target.state_schema
    async with connect.open_both(config, "pause") as ends:
        copy = _Copy(config, ends, CopyOptions())
        found, known, published = await copy.slot_tables()
        tables = _named(config, names, published)
        await copy.take_lock(found.slot_id)
        async with ends.target.transaction():
            await copies.add(ends.target, schema, found.slot_id, _oids(tables), is_listed=known.is_listed)
            await copies.pause(ends.target, schema, found.slot_id, [table.full_name for table in tables])
        await copy.until_seen(found.slot_id, tables)
        paused = printable(few([table.text for table in tables]))
        click.echo(f"paused: {paused}; `parapply resume` copies what is paused again")


async def refresh(config: Config, options: CopyOptions) -> None:
    """Copy tables that were added to the publications, or single ones again, and join them to the stream.

    The daemon may run at the same time. It continues with all other tables; it pauses at a change that is later than
    the copy of its table, as long as that is under way.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost, LeaseHeld: as `init`.
    """
    schema = config.target.state_schema
    async with connect.open_both(config, "refresh") as ends:
        copy = _Copy(config, ends, options)
        found, known, published = await copy.slot_tables()
        tables = copy.chosen(known, published)
        await sharing.claim(ends.source, ends.target, config, found.slot_id)
        left_out.say_schema_only(known)
        begun = {row.name for row in known.tables if row.is_begun}
        have_run = await copy.until_commands(found.slot_id) if tables else None
        await copy.check_target(tables, begun=begun)
        there = {row.name for row in known.tables if not row.is_schema_only}
        gone = sorted(there - {table.full_name for table in published})
        if gone:
            await copy.forget(found.slot_id, known, gone)
            names = printable(few([f"{one}.{two}" for one, two in gone]))
            click.echo(f"no longer published, their rows stay: {names}")
            known = await copies.load(ends.target, schema, found.slot_id)
        if not tables:
            click.echo("all published tables are copied or paused; nothing to do")
            return
        await copy.check_cascades(found, known, tables)
        await copies.add(ends.target, schema, found.slot_id, _oids(tables), is_listed=known.is_listed)
        await copy.copy_later(found, tables, have_run)


def _named(config: Config, texts: Sequence[str], published: Sequence[PublishedTable]) -> list[PublishedTable]:
    """Return published tables by ``schema.table``, each once."""
    config.mapping.check_rows(texts)
    return named(published, texts, "ALTER PUBLICATION ... ADD TABLE first, and write schema.table")


def _check_two_phase(found: slot.SlotFacts | None) -> None:
    if found is not None and found.is_two_phase:
        raise SourceRefused(
            f"slot {found.name!r} has two_phase: a transaction prepared before the copy and committed after it"
            " would be neither in the copy nor in the stream",
            hint="`parapply drop`, then `parapply init --copy`, during which two_phase is pending",
        )


def _oids(tables: Sequence[PublishedTable]) -> dict[Name, int]:
    return {table.full_name: table.oid for table in tables}


_WAITS_FOR_TRANSACTIONS = (
    "waiting until the transactions that run on the publisher have ended, prepared ones too: the snapshot needs it"
)


def _why_refused(error: ParapplyError) -> str:
    """Return advice for a row that the target does not take; empty: none is known."""
    cause = error.__cause__
    # It has the code of a CHECK, which has a name.
    if isinstance(cause, psycopg.errors.CheckViolation) and not cause.diag.constraint_name:
        return "make the partition of the row on the target"
    return _DIFFERS if isinstance(cause, psycopg.DataError | psycopg.IntegrityError) else ""


class _Copy:
    """A copy, or what is done to the tables of one; the sessions on both ends are the caller's."""

    def __init__(self, config: Config, ends: connect.Connections, options: CopyOptions) -> None:
        self._config = config
        self._ends = ends
        self._source, self._target = ends.source, ends.target
        self._options = options
        self._name, self._publications = config.source.slot, config.source.publications
        self._schema = config.target.state_schema

    async def begin(
        self, tables: Sequence[PublishedTable], have_run: Collection[CommandName] | None
    ) -> state.SlotState | None:
        """Make the slot and copy from its own snapshot, where the stream begins; return the slot if the copy pauses."""
        schema, login = self._schema, self._config.source.login
        shapes = await on_target.shapes(self._target, [table.here() for table in tables])
        async with (
            lifecycle.patiently(_WAITS_FOR_TRANSACTIONS) as told,
            snapshots.exported(login, self._name) as snapshot,
        ):
            told.cancel()
            failpoints.probe(failpoints.COPY_SLOT)
            # One transaction, so that a daemon which finds the state also finds the tables under way.
            async with lifecycle.new_slot(self._source, self._name), self._target.transaction():
                if have_run is not None:
                    await check_commands(self._config, snapshot, have_run)
                made = await connect.adopt(self._config, self._ends, is_new=True)
                await lease.take_lease(self._target, made.slot_id, 0, lock_class=lease.COPY_LOCK_CLASS)
                await copies.add(self._target, schema, made.slot_id, _oids(tables), is_listed=True)
                await copies.begin(self._target, schema, made.slot_id, _oids(tables).values(), snapshot.lsn)
                await self._keep_marks(made.slot_id)
                await left_out.note(self._config, self._ends, made.slot_id)
            failpoints.probe(failpoints.COPY_STATE)
            click.echo(f"slot {self._name!r}: starts at {format_lsn(snapshot.lsn)}, where the copy ends")
            # The stream begins with the snapshot: no command of before comes.
            try:
                await self._load(made.slot_id, tables, shapes, snapshot, None)
            except slot_guard.CopyPaused:
                return made
            return None

    async def copy_later(
        self, found: state.SlotState, tables: Sequence[PublishedTable], have_run: Collection[CommandName] | None
    ) -> None:
        """Copy from a snapshot of now, although the stream has begun before; pause where that is configured."""
        try:
            await self._copy_now(found, tables, have_run)
        except slot_guard.CopyPaused:
            await self.go_on_after_pause(found, tables)

    async def go_on_after_pause(self, found: state.SlotState, tables: Sequence[PublishedTable]) -> None:
        """Copy what is left of tables once the slot keeps less WAL; their copy pauses, and its snapshot is gone."""
        # Without the lock the daemon leaves the changes of these tables out, as after an interruption.
        await lease.release_lease(self._target, found.slot_id, lease.COPY_LOCK_CLASS)
        await slot_guard.until_free(self._config, found.slot_id)
        # Not by the session on the source: it was idle, and may have ended.
        await self._state(found.slot_id, found.system_identifier)
        known = await copies.load(self._target, self._schema, found.slot_id)
        copied = {row.name for row in known.tables if row.state == CopyState.COPIED}
        if left := [table for table in tables if table.full_name not in copied]:
            click.echo(f"the copy goes on: {len(tables) - len(left)} tables are copied, {len(left)} are left", err=True)
            have_run = await self.until_commands(found.slot_id)
            await self.copy_later(found, left, have_run)

    async def _copy_now(
        self, found: state.SlotState, tables: Sequence[PublishedTable], have_run: Collection[CommandName] | None
    ) -> None:
        """Copy from a snapshot of now.

        First the daemon must know that these tables are under way: the snapshot shows what is committed before it, so
        no later change may be left out of the stream.
        """
        schema, slot_id = self._schema, found.slot_id
        # From the first note on a copied table counts as not copied: its changes are left out until it is copied.
        await slot.check_room(self._source)
        await self.take_lock(slot_id)
        # Before the first note, which has the daemon wait for the copy.
        await self._check_not_awaited()
        # They were chosen before, when another command had the lock.
        known = await copies.load(self._target, schema, slot_id)
        if not self._options.tables:
            paused = {row.source_oid for row in known.tables if row.is_paused}
            left = [table for table in tables if table.oid not in paused]
            if len(left) < len(tables):
                left_out.say_paused(known)
                if not left:
                    return
            tables = left
        await self.check_cascades(found, known, tables)
        oids = _oids(tables).values()
        _check_two_phase(await self._check_publisher(slot_id))
        before_lsn = (await slot.position(self._source)).flush_lsn
        await copies.begin(self._target, schema, slot_id, oids, before_lsn)
        failpoints.probe(failpoints.COPY_STATE)
        await self.until_seen(slot_id, tables)
        try:
            # A daemon that had not read these rows may have begun it since. One that has read them does not.
            _check_two_phase(await slot.read_slot(self._source, self._name))
        except SourceRefused as error:
            await copies.give_up(self._target, schema, slot_id, oids, error.line())
            raise
        login = self._config.source.login
        shapes = await on_target.shapes(self._target, [table.here() for table in tables])
        async with lifecycle.patiently(_WAITS_FOR_TRANSACTIONS) as told, snapshots.exported(login, None) as snapshot:
            told.cancel()
            await copies.begin(self._target, schema, slot_id, oids, snapshot.lsn)
            if not self._options.tables:
                await self._keep_marks(slot_id)
            # A large transaction that stood here may have written a table before: it ends now.
            await self.until_seen(slot_id, tables)
            click.echo(f"{len(tables)} tables join the stream at {format_lsn(snapshot.lsn)}")
            await self._load(slot_id, tables, shapes, snapshot, have_run)

    async def until_commands(self, slot_id: int) -> Collection[CommandName] | None:
        """Return when commands that have run on the publisher have also run here, because a copy has their effects.

        Returns:
            Their names; None: no commands run here.

        Raises:
            TargetRefused: some are still to be run, and no daemon does it.
        """
        if not (self._config.ddl.apply and await ddl_queue.is_published(self._source, self._publications)):
            return None
        schema = self._schema
        before = await ddl_queue.names(self._source)
        wanted_lsn = (await slot.position(self._source)).insert_lsn
        async with lifecycle.patiently(
            "waiting for the daemon to run commands of the publisher that came before the copy"
        ):
            while True:
                noted, low_lsn = await commands.noted(self._target, schema, slot_id)
                # A command that is not noted by then is older than the slot.
                if not (left := before - noted) or covers(low_lsn, wanted_lsn):
                    return before
                if not await lease.holders(self._target, slot_id):
                    raise TargetRefused(
                        f"{len(left)} commands in the publisher's queue may still have to run here, and a copy has what"
                        " they did: they would do it twice",
                        hint="start the daemon, which runs them first, and run the same command again; rows of"
                        " parapply.ddl_queue that are older than the slot can be deleted",
                    )
                await asyncio.sleep(_POLL_S)

    async def until_seen(self, slot_id: int, tables: Sequence[PublishedTable]) -> None:
        """Return when the daemon, if one runs, keeps to what was written, and has committed what it took before."""
        oids = _oids(tables).values()
        async with lifecycle.patiently("waiting for the daemon to take note of it"):
            while not await copies.is_seen(self._target, self._schema, slot_id, oids):  # noqa: ASYNC110  another process writes it
                await asyncio.sleep(_POLL_S)

    async def _load(
        self,
        slot_id: int,
        tables: Sequence[PublishedTable],
        shapes: Mapping[Name, str],
        snapshot: SourceSnapshot,
        have_run: Collection[CommandName] | None,
    ) -> None:
        failpoints.probe(failpoints.COPY_BEGUN)
        marks = await check_unchanged(self._config, tables, snapshot, have_run)
        await copies.keep_published(self._target, self._schema, slot_id, marks)
        with Bar(listener=self._options.on_progress) as bar:
            load = CopyLoad(self._config, slot_id, self._target, self._options, shapes=shapes, bar=bar)
            try:
                await slot_guard.guarded(self._config, slot_id, load.run(tables, snapshot))
            except ParapplyError as error:
                own = error.hint or _why_refused(error)
                error.hint = "; ".join([text for text in (own, IS_LEFT) if text])
                raise
        failpoints.probe(failpoints.COPY_DONE)
        click.echo(f"copied {len(tables)} tables: {bar.summary()}")

    async def _keep_marks(self, slot_id: int) -> None:
        """Note which tables exist, once the snapshot is made, so that later ones can be distinguished from them."""
        marks = await late_tables.marks(self._source, self._publications)
        await copies.keep_marks(self._target, self._schema, slot_id, marks)

    async def _check_not_awaited(self) -> None:
        if error := await refusals.awaited(self._source, self._config.source):
            raise error

    async def take_lock(self, slot_id: int) -> None:
        """Take the copy lock of a slot that is not cut over, and wait until no session of an earlier copy writes.

        Raises:
            LeaseHeld: another process copies, or a cut-over is under way.
            TargetRefused, TargetLost: it is cut over.
        """
        await lease.take_lease(self._target, slot_id, 0, lock_class=lease.COPY_LOCK_CLASS)
        say = lifecycle.say_whom_it_waits_for
        await lease.fence(self._target, slot_id, say, lock_class=lease.COPY_LOCK_CLASS)
        await self.check_not_cut_over(slot_id)

    async def check_cascades(
        self, found: state.SlotState, known: copies.Copies, tables: Sequence[PublishedTable]
    ) -> None:
        """Refuse tables whose rows older changes of others would change; errors as `cascades.check`."""
        names = [table.full_name for table in tables]
        if names:
            await cascades.check(self._source, self._target, self._config, known, found.low_lsn, copied=names)

    async def check_not_cut_over(self, slot_id: int) -> None:
        """Refuse a target that takes over, and a source that has not taken over yet."""
        facts = await slot.inspect(self._source, self._name)
        await connect.check_back(self._config, self._source, facts, copies=True)
        await cutovers.check_may_write(self._target, self._schema, slot_id, self._name, until=cutovers.COPIES_STOP)

    async def slot_tables(self) -> tuple[state.SlotState, copies.Copies, list[PublishedTable]]:
        """Return what is known of the slot and of its tables, and what is published."""
        facts = await slot.inspect(self._source, self._name)
        await slot.check_publications(self._source, self._publications)
        # An older state schema is refused here, and not when something is half done.
        found = await connect.known_state(self._config, self._target, facts.system_identifier)
        if found is None:
            raise TargetRefused(f"the target knows nothing of slot {self._name!r}", hint="run `parapply init --copy`")
        await self.check_not_cut_over(found.slot_id)
        _check_two_phase(facts.slot)
        published = await self._published(facts)
        return found, await self.known(found.slot_id, published), published

    async def _read_state(self, slot_id: int) -> tuple[slot.SourceFacts, state.SlotState]:
        """Return the publisher, and the state that the caller has read before; raise TargetRefused if it is gone."""
        facts = await slot.inspect(self._source, self._name)
        return facts, await self._state(slot_id, facts.system_identifier)

    async def _state(self, slot_id: int, system_identifier: str) -> state.SlotState:
        found = await connect.known_state(self._config, self._target, system_identifier)
        # Without the copy lock `parapply drop` may remove it, and an `init` make another one.
        if found is None or found.slot_id != slot_id:
            raise TargetRefused(
                f"target: the state of slot {self._name!r} was removed while its copy waited",
                hint="`parapply init --copy` begins again",
            )
        return found

    async def _check_publisher(self, slot_id: int) -> slot.SlotFacts | None:
        """Refuse a publisher whose WAL lacks what is on the target, and note its timeline, which the copy will be of.

        Return its slot.

        A daemon notes a promotion within half a minute, and until then the state is of the timeline before.

        Raises:
            SlotLost, SourceRefused: as at the daemon's start.
            SourceLost: a standby has not come as far as the target.
            TargetRefused: the state was removed.
        """
        end_s = time.monotonic() + _PROMOTION_S
        while True:
            facts, found = await self._read_state(slot_id)
            known = await connect.known_position(self._target, self._schema, found)
            login, two_phase = self._config.source.login, self._config.source.two_phase
            try:
                facts = await refusals.check(self._source, facts, login, self._name, known, two_phase=two_phase)
            except SlotLost:
                if time.monotonic() > end_s or not await lease.holders(self._target, found.slot_id):
                    raise
                await asyncio.sleep(_POLL_S)
                continue
            if facts.timeline != found.timeline:
                for lsn in await forget_other_history(self._target, self._schema, found.slot_id, facts.timeline):
                    click.echo(f"warning: the request to skip {lsn} is forgotten: {OTHER_HISTORY_HINT}", err=True)
                await state.set_timeline(self._target, self._schema, found.slot_id, facts.timeline)
            return facts.slot

    def chosen(self, known: copies.Copies, published: Sequence[PublishedTable]) -> list[PublishedTable]:
        paused = {row.name for row in known.tables if row.is_paused}
        if self._options.tables:
            named = _named(self._config, self._options.tables, published)
            running = [table.text for table in named if self._options.resumes and table.full_name not in paused]
            if running:
                raise TargetRefused(
                    f"not paused: {few(running)}",
                    hint="`parapply status` shows which are; `refresh --table` copies others",
                )
            return named
        if not known.is_listed:
            raise TargetRefused(
                "this slot was begun without a copy: which tables are new is not known",
                hint="name them with --table schema.table",
            )
        left_out.say_paused(known)
        copied = {(row.name, row.source_oid) for row in known.tables if row.state == CopyState.COPIED or row.is_paused}
        return [
            table for table in published if copied.isdisjoint({(table.full_name, one) for one in (table.oid, None)})
        ]

    async def known(self, slot_id: int, published: Sequence[PublishedTable]) -> copies.Copies:
        """Return the facts known of the tables, by the names that they have now, and checked as the daemon does."""
        schema = self._schema
        known = await copies.load(self._target, schema, slot_id)
        known = await continuity.leave_out(self._source, self._target, self._config, slot_id, known)
        names = {row.source_oid: row.name for row in known.tables}
        renamed = {
            table.oid: table.full_name
            for table in published
            if names.get(table.oid, table.full_name) != table.full_name
        }
        emptied = self._options.tables if self._options.truncates else ()
        paused = {row.source_oid for row in known.tables if row.is_paused}
        again = [
            name
            for oid, name in renamed.items()
            if ".".join(name) in emptied
            and not self._config.mapping.is_alike(names[oid], name)
            and (oid in paused or not self._options.resumes)
        ]
        for oid, name in renamed.items():
            if name not in again:
                sharing.check_renamed(self._config.mapping, names[oid], name)
        if renamed:
            async with self._target.transaction():
                await copies.rename(self._target, schema, slot_id, renamed)
                # Where this ends before the copy begins, the daemon must not apply them by their new names.
                await copies.pause(self._target, schema, slot_id, again)
            known = await copies.load(self._target, schema, slot_id)
        found = await continuity.look(self._source, self._target, self._config, slot_id, known)
        if found.altered:
            altered = printable(few([".".join(name) for name in found.altered]))
            click.echo(f"warning: {continuity.ALTERED}: {altered}. Hint: {continuity.ALTERED_HINT}")
        return await copies.load(self._target, schema, slot_id) if found.has_changed else known

    async def forget(self, slot_id: int, known: copies.Copies, names: Sequence[Name]) -> None:
        """Forget tables that are no longer published, and make their indexes that a copy has dropped."""
        forgotten = set(names)
        left = [row for row in known.tables if row.name in forgotten]
        await lifecycle.make_left_indexes(self._config, self._target, left)
        await copies.forget(self._target, self._schema, slot_id, names)

    async def _published(self, facts: slot.SourceFacts) -> list[PublishedTable]:
        """Return the tables to copy from; report which are left out although they are published."""
        left_out.say_state(facts, await slot.published_tables(self._source, self._publications))
        tables = await published_tables(self._source, self._publications, self._config.mapping)
        await check_readable(self._source, tables)
        return tables

    async def check_target(self, tables: Sequence[PublishedTable], *, begun: Collection[Name] | None = None) -> None:
        """Refuse what would fail when something is half done.

        Args:
            tables: to be copied.
            begun: tables that have rows of an interrupted copy; None: no copy has begun.

        Raises:
            SourceRefused: the publisher's commits wait for the daemon.
            TargetRefused: tables or columns are missing, hold rows, or the role may not do what the copy needs.
        """
        await self._check_not_awaited()
        here = [table.here() for table in tables]
        await on_target.check_columns(self._target, here, may_be_made=begun is None)
        await replaced.judged(self._target, tables)
        begun_oids = {table.oid for table in tables if table.full_name in (begun or ())}
        full = await on_target.not_empty(self._target, here, self._config.target)
        foreign = [table.text for table in full if table.oid not in begun_oids]
        if foreign and not self._options.truncates:
            raise TargetRefused(
                f"target: {few(foreign)} hold rows already",
                hint="if target.dsn leads to the right database and these rows may go, --truncate deletes them",
            )
        await on_target.check_access(self._target, here, emptied=full)
        if self._options.defers_indexes:
            await on_target.check_owned(self._target, [table for table in here if not table.constants])
