"""`parapply heal`: another slot in the place of one that is lost, and only what differs is copied again.

In: the configuration and options. Out: a slot, and a target that equals the publisher at the slot's start.

The way of the data, as every step may be the last one before a kill:

1. The lease and the copy lock are taken, so that no daemon and no copy writes, and their last sessions are waited for.
   The state and the slot are read; a slot that gives all that the target lacks is refused.
2. The target's snapshot is taken, then the publisher's, from a temporary slot: S, as of its consistent point C. It
   shows every transaction whose commit record lies before C and no other. In a two-way pair S is taken only when each
   slot of the target has sent all that the target's snapshot shows: rows of the target that are not in S were then
   deleted on the publisher.
3. Every table is compared under both snapshots, range by range, and the rows of ranges that differ key by key
   (`compare.py`). Up to here nothing is changed: a dry run ends, and so does one with more rows than allowed.
4. In one transaction the watermark becomes 0/0 and the records of transactions go (`target/state/heals.py`). No daemon
   starts from then on, whatever slot exists. Transactions that the lost slot has prepared on the target are rolled
   back, because S has the rows of those that were committed, and none is prepared while S is made.
5. The old slot is dropped, and the new one made as a copy of the temporary one: it begins at C, before which nothing is
   missing in S.
6. Each table that differs is made equal to S, in one transaction and under the slot's origins (`repair.py`), or is
   emptied and copied whole from S, as a first copy is (`copy/load.py`).
7. In one transaction the watermark becomes C, and every table of this heal is noted as copied as of C. The daemon
   goes on from there. Conflicts that stopped it lie before C, and become `repaired` with its first look.

A kill before 4 has changed nothing. After it the next heal finds 0/0, drops the slot of this one, and compares again
with a later snapshot: rows that were repaired differ no more unless they have changed since. So the rows themselves are
the record of the work done, and no note can disagree with them.

Tables that are paused stay paused. Tables that wait because they were published later, and never copied, wait for
`refresh`; so does a table that was published while the slot was lost and holds rows here. A table that waits because
changes of it may be missing is compared and waits no more.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
from psycopg import sql

from parapply import connect, continuity, failpoints, sharing
from parapply.amounts import few
from parapply.config import HEAL_LIMIT_ROWS
from parapply.conflict.skips import OTHER_HISTORY_HINT, forget_other_history
from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.bar import Bar
from parapply.copy.load import CopyLoad, LoadOptions
from parapply.copy.published import PublishedTable, check_readable, named, published_tables
from parapply.copy.snapshot import check_unchanged
from parapply.copy.writer import Writers
from parapply.errors import ParapplyError, SlotLost, SourceRefused, TargetRefused
from parapply.heal.compare import HealPlan, TableComparison, before_tables
from parapply.heal.repair import check_temporary, repair
from parapply.model import format_lsn
from parapply.printable import printable
from parapply.source import ddl_queue, failover, late_tables, refusals, slot
from parapply.target.catalogue.facts import look_for_foreign_code
from parapply.target.session import lease, origins, prepared, settings
from parapply.target.state import commands, copies, cutovers, heals
from parapply.vocabulary import CopyState, DaemonState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config import Config
    from parapply.copy.snapshot import SourceSnapshot
    from parapply.plan.copy_starts import Name
    from parapply.source.refusals import KnownPosition

#: Seconds to wait for who follows the target in a two-way pair.
_FOLLOW_S: Final = 60.0
_POLL_S: Final = 0.1
_DIFFERENT: Final = 1
_UNPUBLISHED_HINT: Final = (
    "`parapply heal --dry-run` shows how many; --follow-unpublished makes the tables equal all the same, and without it"
    " `parapply drop` and `parapply init` begin a slot that brings what is published from then on"
)
_PUBLISHED_LATER: Final = "published while the slot was lost, and the target's table holds rows"


class HealOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to heal."""

    is_dry: bool = False
    is_by_daemon: bool = False
    max_rows: int = HEAL_LIMIT_ROWS
    whole: tuple[str, ...] = ()  # schema.table: emptied and copied
    follows_unpublished: bool = False  # also updates, deletes and truncates that no publication brings
    connections: int = 4  # on each side


class Voice(NamedTuple):
    """Receivers of lines for people."""

    say: Callable[[str], None]
    warn: Callable[[str], None]
    progress: Callable[[str], None] | None = None  # None: a bar on a terminal, else as `Bar` does


class HealOutcome(NamedTuple):
    """The end of a heal; of a dry run nothing was done."""

    n_different: int  # tables
    n_rows: int  # copied
    start_lsn: int  # of the new slot


class _Tables(msgspec.Struct, frozen=True, kw_only=True):
    compared: list[PublishedTable]
    begun: frozenset[int]  # of these, by OID: their first copy was interrupted
    left: list[str]  # lines about others
    later: list[PublishedTable]  # that wait from now on
    known: copies.Copies


async def heal(config: Config, options: HealOptions) -> int:
    """Heal the slot, and return the exit code: 0; 1 of a dry run that has found something to copy.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost: an end is not as it must be; the same command goes on.
        LeaseHeld: a daemon or another command works on the slot.
    """
    async with connect.open_both(config, "heal") as ends:
        run = await begin(config, options, ends, Voice(click.echo, partial(click.echo, err=True)))
        if run.lost is None:
            why = run.found.unproved
            raise SourceRefused(
                f"slot {config.source.slot!r} gives all that the target lacks: it needs no healing"
                + (f"; that the publisher was not put back is not proved: {why}" if why else ""),
                hint="`parapply run` applies it; `parapply verify` compares rows, and `parapply refresh --table` copies"
                " a table again",
            )
        if run.found.awaited:
            raise run.found.awaited
        click.echo(printable(str(run.lost)))
        if (kept := run.found.kept) and not options.follows_unpublished:
            refused = SourceRefused(
                f"changes that are not published would be made here also, and rows deleted: {kept}",
                hint=_UNPUBLISHED_HINT,
            )
            if not options.is_dry:
                raise refused
            click.echo(f"warning: {refused.line()}", err=True)
        outcome = await run.heal(await run.tables())
    if options.is_dry:
        return _DIFFERENT if outcome.n_different else 0
    click.echo(
        f"healed: slot {config.source.slot!r} begins at {format_lsn(outcome.start_lsn)}, where the target equals the"
        f" publisher; {outcome.n_rows:,} rows were copied. Start the daemon: `parapply run`"
    )
    return 0


async def begin(
    config: Config, options: HealOptions, ends: connect.Connections, voice: Voice, *, lease_wait_s: float = 0.0
) -> HealRun:
    """Take the locks of the slot, and look if it is lost.

    Raise LeaseHeld if a daemon or another command works on the slot; SlotBusy if a process on the publisher still reads
    it; SourceRefused if the publisher is another one, or cannot decode from the slot on.
    """
    facts = await slot.inspect(ends.source, config.source.slot)
    await slot.check_publications(ends.source, config.source.publications)
    found = await connect.known_state(config, ends.target, facts.system_identifier)
    if found is None:
        raise TargetRefused(
            f"the target knows nothing of slot {config.source.slot!r}", hint="run `parapply init --copy`"
        )
    await _own(config, ends, found.slot_id, voice, lease_wait_s)
    await sharing.claim(ends.source, ends.target, config, found.slot_id)
    before = await copies.load(ends.target, config.target.state_schema, found.slot_id)
    await continuity.leave_out(ends.source, ends.target, config, found.slot_id, before)
    facts = await refusals.with_timeline(ends.source, facts, config.source.login)
    # Read again: a daemon that has just ended may have applied more.
    again = await connect.known_state(config, ends.target, facts.system_identifier)
    known = await connect.known_position(ends.target, config.target.state_schema, again)
    lost: SlotLost | None = None
    unproved = ""
    try:
        two_phase = config.source.two_phase
        await refusals.check(ends.source, facts, config.source.login, config.source.slot, known, two_phase=two_phase)
        if again is not None:
            unproved = await connect.check_history(config, ends.source, facts.server_version_num, again)
    except SlotLost as error:
        lost = error
    kept = await _kept_rows(ends.source, config.source.publications)
    awaited = await refusals.awaited(ends.source, config.source)
    return HealRun(config, options, ends, voice, SlotFound(found.slot_id, facts, known, lost, unproved, kept, awaited))


async def _kept_rows(source: slot.Connection, publications: Sequence[str]) -> str:
    """Return tables whose rows the target keeps on purpose, as an archive does, with the operations; or empty."""
    in_part = await slot.published_in_part(source, publications)
    return few([f"{schema}.{table} ({', '.join(left)})" for schema, table, left in in_part])


async def _own(config: Config, ends: connect.Connections, slot_id: int, voice: Voice, wait_s: float) -> None:
    """Take both locks of the slot, and wait for sessions of who held them before; raise LeaseHeld if one works."""
    await lease.take_both(ends.target, slot_id, wait_s, lambda sessions: voice.say(lease.awaited(sessions)))
    await connect.check_back(config, ends.source, await slot.inspect(ends.source, config.source.slot))
    await cutovers.check_may_write(
        ends.target, config.target.state_schema, slot_id, config.source.slot, until=cutovers.COPIES_STOP
    )


class SlotFound(NamedTuple):
    """The slot as both ends know it."""

    slot_id: int
    facts: slot.SourceFacts
    known: KnownPosition | None
    lost: SlotLost | None  # why it is; None: it gives all that the target lacks
    unproved: str = ""  # why that is not proved of a publisher that may have been put back
    kept: str = ""  # tables whose rows the target keeps on purpose
    awaited: SourceRefused | None = None  # commits wait for the slot's daemon


class HealRun:
    """One heal; the locks of the slot are held."""

    def __init__(
        self, config: Config, options: HealOptions, ends: connect.Connections, voice: Voice, found: SlotFound
    ) -> None:
        self._config = config
        self._options = options
        self._source, self._target = ends.source, ends.target
        self._voice = voice
        self.found = found
        self._slot_id = found.slot_id
        self._name, self._schema = config.source.slot, config.target.state_schema
        self._login = config.source.login

    @property
    def lost(self) -> SlotLost | None:
        """Return why the slot is lost, None if it is not."""
        return self.found.lost

    async def tables(self) -> _Tables:
        """Return the tables to compare; refuse those that cannot be compared or written."""
        config = self._config
        config.mapping.check_rows(self._options.whole)
        published = await published_tables(self._source, config.source.publications, config.mapping)
        if replaced := [table.text for table in published if table.replaced]:
            raise TargetRefused(
                f"no heal compares rows whose columns are replaced: {', '.join(replaced)}",
                hint="`parapply drop`, then `parapply init --copy --truncate` copies all tables again",
            )
        named(published, self._options.whole, "write schema.table")
        await check_readable(self._source, published)
        known = await copies.load(self._target, self._schema, self._slot_id)
        kept = () if known.is_listed else await copies.load_marks(self._target, self._schema, self._slot_id)
        names = {**continuity.known_names(kept), **{row.source_oid: row.name for row in known.tables}}
        rows = {row.source_oid: row for row in known.tables}
        compared, left, later, unknown = [], [], [], []
        begun = set()
        for table in published:
            row = rows.get(table.oid)
            if row is None or not (row.is_paused or (row.is_late and not row.is_again)):
                sharing.check_renamed(config.mapping, names.get(table.oid, table.full_name), table.full_name)
            if row is None:
                unknown.append(table)
            elif row.is_paused or (row.is_late and not row.is_again):
                left.append(f"{table.shown}: not compared: {row.reason}")
            else:
                compared.append(table)
                if row.state != CopyState.COPIED and not row.is_again:
                    begun.add(table.oid)
        await on_target.check_columns(self._target, [table.here() for table in [*compared, *unknown]])
        if known.is_listed and unknown:
            full = await on_target.not_empty(self._target, [table.here() for table in unknown], config.target)
            later = [table for table in unknown if table.oid in {one.oid for one in full}]
            left += [
                f"{table.shown}: not compared: {_PUBLISHED_LATER}; `parapply refresh` copies it" for table in later
            ]
        compared += [table for table in unknown if table not in later]
        await self._check_writable(compared)
        return _Tables(compared=compared, begun=frozenset(begun), left=left, later=later, known=known)

    async def _check_writable(self, tables: Sequence[PublishedTable]) -> None:
        here = [table.here() for table in tables]
        await on_target.check_access(self._target, here, emptied=[])
        await check_temporary(self._target)
        if self._config.target.apply_as == "owner":
            role = self._config.target.session_replication_role
            for table in here:
                await look_for_foreign_code(self._target, *table.full_name, table.filled, role=role)

    async def heal(self, tables: _Tables) -> HealOutcome:
        """Do all from the snapshots on; errors as `heal`."""
        shapes = await on_target.shapes(self._target, [table.here() for table in tables.compared])
        async with AsyncExitStack() as stack:
            readers = await self._target_readers(stack)
            await self._until_followed(tables.compared)
            self._voice.say(
                "waiting for the publisher's snapshot: transactions that run there must end, prepared ones too"
            )
            snapshot = await stack.enter_async_context(snapshots.exported(self._login, None))
            marks = await check_unchanged(self._config, tables.compared, snapshot, None)
            plans = await self._compare(readers, snapshot, tables)
            left = [plan for plan in plans if not plan.is_equal]
            self._say(tables, left)
            self._check_budget(left)
            await self._warn_of_commands()
            if self._options.is_dry:
                return HealOutcome(len(left), 0, 0)
            whole = [plan.table for plan in left if plan.why_whole]
            await on_target.check_access(
                self._target, [table.here() for table in whole], emptied=[table.here() for table in whole]
            )
            failpoints.probe(failpoints.HEAL_COMPARED)
            await self._replace_slot(snapshot)
            await self._rename(tables)
            n_rows = await self._repair([plan for plan in left if not plan.why_whole], snapshot)
            n_rows += await self._copy_whole(whole, snapshot, shapes, is_listed=tables.known.is_listed)
            failpoints.probe(failpoints.HEAL_DONE)
            await self._finish(tables, snapshot, marks)
        return HealOutcome(len(left), n_rows, snapshot.lsn)

    # -- the snapshots, and what they show

    async def _target_readers(self, stack: AsyncExitStack) -> list[settings.Connection]:
        """Open sessions that see one snapshot of the target."""
        readers: list[settings.Connection] = []
        name = ""
        for _ in range(self._options.connections):
            conn = await stack.enter_async_context(await connect.open_target(self._config, "heal"))
            with settings.target_errors("taking a snapshot"):
                await conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                if readers:
                    await conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(name)))
                else:
                    ((name,),) = await settings.rows(conn, sql.SQL("SELECT pg_catalog.pg_export_snapshot()"))
            readers.append(conn)
        return readers

    async def _until_followed(self, tables: Sequence[PublishedTable]) -> None:
        """Return, in a two-way pair, once all of the target's snapshot was sent on; refuse a slot that is not read."""
        names = [table.here().full_name for table in tables]
        if self._config.source.origin != "none" or not (slots := await origins.followers(self._target, names)):
            return
        message = sql.SQL("SELECT pg_catalog.pg_logical_emit_message(true, 'parapply heal', '')::text")
        behind = sql.SQL(
            "SELECT slot_name::text FROM pg_catalog.pg_replication_slots WHERE slot_name = ANY ($1::text[])"
            " AND confirmed_flush_lsn IS DISTINCT FROM NULL AND confirmed_flush_lsn < $2::pg_lsn ORDER BY 1"
        )
        with settings.target_errors("looking who follows the target"):
            ((lsn,),) = await settings.rows(self._target, message)
            deadline_s = asyncio.get_running_loop().time() + _FOLLOW_S
            while late := await settings.rows(self._target, behind, [slots, lsn]):
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise TargetRefused(
                        f"target: slot {late[0][0]!r} has not sent all of its changes, and rows that the publisher does"
                        " not have yet would be taken for rows that were deleted there",
                        hint="start the daemon that applies that slot to the publisher, and run the same command again",
                    )
                await asyncio.sleep(_POLL_S)

    async def _compare(
        self, target: Sequence[settings.Connection], snapshot: SourceSnapshot, tables: _Tables
    ) -> list[HealPlan]:
        name = f"parapply heal {self._name}"
        async with AsyncExitStack() as reading:
            source = [
                await reading.enter_async_context(await snapshots.open_reader(self._login, name, snapshot))
                for _ in range(self._options.connections)
            ]
            with slot.source_errors("comparing"):
                await before_tables(source)
            with settings.target_errors("comparing"):
                await before_tables(target)
            named = {table.oid for table in tables.compared if table.text in self._options.whole}
            with Bar("comparing", has_bytes=False, said=self._voice.progress) as bar:
                pages = sum(leaf.pages for table in tables.compared for leaf in table.leaves)
                bar.begin(len(tables.compared), 2 * pages, 0)
                comparison = TableComparison(source, target, max_rows=self._options.max_rows, bar=bar)
                plans = await comparison.run(
                    tables.compared, named=named, begun=tables.begun, said=lambda plan: bar.say(plan.line())
                )
        # The target's snapshot keeps vacuum from its work, and locks tables that are to be emptied.
        for conn in target:
            await conn.close()
        return plans

    def _say(self, tables: _Tables, left: Sequence[HealPlan]) -> None:
        for line in tables.left:
            self._voice.say(printable(line))
        n_rows = sum(plan.n_rows for plan in left)
        self._voice.say(f"{len(left)} of {len(tables.compared)} tables differ; {n_rows:,} rows to copy or delete")

    def _check_budget(self, left: Sequence[HealPlan]) -> None:
        n_rows = sum(plan.n_rows for plan in left)
        if n_rows > self._options.max_rows:
            raise TargetRefused(
                f"{'more than ' * any(plan.is_cut for plan in left)}{n_rows:,} rows are to be copied or deleted, and"
                f" {'source.heal_limit_rows' if self._options.is_by_daemon else '--max-rows'} is"
                f" {self._options.max_rows:,}: nothing was changed",
                hint="`parapply heal` with a larger --max-rows; where most rows of a table differ, name it with"
                " --whole too",
            )

    async def _warn_of_commands(self) -> None:
        """Say that commands of the publisher are not noted here: the new slot does not bring them."""
        config = self._config
        if not (config.ddl.apply and await ddl_queue.is_published(self._source, config.source.publications)):
            return
        noted, _ = await commands.noted(self._target, self._schema, self._slot_id)
        if missed := sorted(await ddl_queue.names(self._source) - noted):
            self._voice.warn(
                f"warning: {len(missed)} commands of parapply.ddl_queue, from number {missed[0].number} on, were not"
                " run here by this slot, and will not be: do on the target what they do, where it was not done"
            )

    # -- from here on something is changed

    async def _replace_slot(self, snapshot: SourceSnapshot) -> None:
        await prepared.check_may_end(self._target, self._schema, self._slot_id)
        facts = await slot.inspect(self._source, self._name)
        refusals.check_own_and_idle(facts)
        await heals.begin(
            self._target,
            self._schema,
            self._slot_id,
            source_lsn=snapshot.lsn,
            source_started_us=facts.started_us,
            state=DaemonState.HEALING if self._options.is_by_daemon else DaemonState.LOST,
        )
        held = [gid for gid, _ in (await prepared.pending(self._target, self._schema, self._slot_id)).values()]
        await prepared.roll_back(self._target, held)
        if held:
            self._voice.say(f"target: {len(held)} prepared transactions rolled back; the copy has what became of them")
        failpoints.probe(failpoints.HEAL_BEGUN)
        if facts.slot is not None:
            await slot.drop_slot(self._source, self._name)
        start_lsn = await slot.copy_slot(self._source, snapshot.slot_name, self._name)
        assert start_lsn == snapshot.lsn, "a copy of a slot begins where that one does"
        if facts.slot is not None and facts.slot.is_failover:
            # A copy is none, and where no setting asks for one, it was made by hand.
            source = msgspec.structs.replace(self._config.source, failover="auto")
            await failover.ensure(source, await slot.inspect(self._source, self._name))
        failpoints.probe(failpoints.HEAL_SLOT)

    async def _rename(self, tables: _Tables) -> None:
        """Note the names that tables have now: what is noted of a copy from here on is found by them."""
        known = {row.source_oid: row.name for row in tables.known.tables}
        names = {table.oid: table.full_name for table in tables.compared}
        renamed = {oid: name for oid, name in names.items() if known.get(oid, name) != name}
        if renamed:
            await copies.rename(self._target, self._schema, self._slot_id, renamed)

    async def _repair(self, plans: Sequence[HealPlan], snapshot: SourceSnapshot) -> int:
        if not plans:
            return 0
        names: list[Name] = [plan.table.here().full_name for plan in plans]
        writers = Writers(self._config, self._slot_id, self._target.info.backend_pid, snapshot, names)
        n_rows = 0
        reader = await snapshots.open_reader(self._login, f"parapply heal {self._name}", snapshot)
        async with reader, writers.open(1) as writer:
            for plan in plans:
                checks_code = self._config.target.apply_as == "owner"
                n_rows += await repair(reader, writer, plan, checks_code=checks_code)
                self._voice.say(f"{printable(plan.table.shown)}: repaired")
        with suppress(ParapplyError):
            await writers.release_origins(self._target, 1)
        return n_rows

    async def _copy_whole(
        self, tables: Sequence[PublishedTable], snapshot: SourceSnapshot, shapes: dict[Name, str], *, is_listed: bool
    ) -> int:
        if not tables:
            return 0
        oids = {table.full_name: table.oid for table in tables}
        await copies.add(self._target, self._schema, self._slot_id, oids, is_listed=is_listed)
        await copies.begin(self._target, self._schema, self._slot_id, oids.values(), snapshot.lsn)
        with Bar(said=self._voice.progress) as bar:
            how = LoadOptions(connections=self._options.connections)
            load = CopyLoad(self._config, self._slot_id, self._target, how, shapes=shapes, bar=bar)
            await load.run(tables, snapshot)
        return bar.rows

    async def _finish(self, tables: _Tables, snapshot: SourceSnapshot, marks: dict[int, str]) -> None:
        schema, slot_id = self._schema, self._slot_id
        is_listed = tables.known.is_listed
        if is_listed:
            kept: Sequence[str] = await late_tables.marks(self._source, self._config.source.publications)
        else:
            # A table that is not published now lacks changes when it is published again.
            found = await copies.load_marks(self._target, schema, slot_id)
            before = continuity.known_without_copy(found)
            kept = continuity.kept_without_copy({**dict.fromkeys(before, ""), **marks}, found)
        oids = {table.full_name: table.oid for table in tables.compared}
        with settings.target_errors("noting that the slot is healed"):
            async with self._target.transaction():
                if is_listed:
                    await copies.add(self._target, schema, slot_id, oids, is_listed=True)
                for table in tables.later:
                    await copies.settle(self._target, schema, slot_id, table.full_name, table.oid, _PUBLISHED_LATER)
                await heals.finish(
                    self._target,
                    schema,
                    slot_id,
                    lsn=snapshot.lsn,
                    timeline=self.found.facts.timeline,
                    publications=self._config.source.publications,
                    source_oids=oids.values(),
                )
                # A publisher that was put back ends other transactions at the LSNs that come.
                for asked in await forget_other_history(self._target, schema, slot_id, None):
                    self._voice.warn(f"warning: the request to skip {asked} is forgotten: {OTHER_HISTORY_HINT}")
                await copies.keep_published(self._target, schema, slot_id, marks)
                await copies.keep_marks(self._target, schema, slot_id, kept)
