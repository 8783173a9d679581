"""`parapply cutover`: the target takes over from the source, step by step, and the source follows it from there on.

In: the configurations of the stream that runs and of the way back, and options. Out: a line for each step. Every step
is noted on the target before it begins (`target/state/cutovers.py`), and may be done again from its beginning: a
command that was killed goes on with the same command. A failure before the daemon is stopped is taken back
automatically.

| step      | what it does                                                                              | undone by |
|-----------|-------------------------------------------------------------------------------------------|-----------|
| preparing | publication and slot of the way back on the target, state schema on the source; compares   | dropped   |
| fencing   | no client writes to the source                                                            | lifted    |
| draining  | the daemon applies all that was committed there                                           |           |
| comparing | `parapply verify`, if wanted                                                              |           |
| sequences | `parapply sequences`                                                                      |           |
| stopping  | the daemon is stopped, and none may start; nothing was committed after the fence          | allowed   |
| turning   | the stream of the way back begins here                                                    | dropped   |
| opening   | what kept writers from the target, if it was a fenced source itself, is lifted            | no more   |
| ending    | the slot on the source is dropped                                                         |           |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import click
from psycopg import sql

from parapply import connect
from parapply.amounts import few
from parapply.commands import lifecycle
from parapply.copy import sequences
from parapply.copy.published import published_tables
from parapply.cutover import fence, way_back
from parapply.cutover.client_sessions import ClientSessions
from parapply.cutover.comparison import CutoverComparison
from parapply.cutover.hooks import Hooks
from parapply.cutover.look import CutoverLook, CutoverOptions, Pair, check_pair
from parapply.cutover.notes import CutoverNotes, Held, Undoing
from parapply.cutover.poolers import Poolers
from parapply.errors import ConfigError, LeaseHeld, ParapplyError, SlotBusy, SourceRefused, TargetRefused
from parapply.model import covers, format_lsn
from parapply.sequences import SequenceOptions, carry
from parapply.source import refusals, slot
from parapply.source.options import start_options
from parapply.source.slot import read_rows, source_errors, take_bytes
from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.target.session import lease, prepared
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import cutovers
from parapply.target.state import slots as state
from parapply.vocabulary import CutoverStep
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.cutover.meeting import Meeting
    from parapply.source.slot import Connection

_INCOMPLETE: Final = 1
_NOT_CARRIED: Final = "a sequence is missing on the target, or could not be set"
_WITHOUT_SEQUENCES: Final = "make it there, or give --no-sequences and set them yourself"
#: Seconds between two looks at a slot that is about to be left.
_POLL_S: Final = 0.01
#: Most seconds to wait for the lease of a daemon, however long one that stands by waits: clients wait here.
_LEASE_WAIT_MAX_S: Final = 300.0
#: Seconds until the process that sends the stream is ended: a daemon that is stopped (SIGSTOP) holds it.
_PATIENCE_S: Final = 3.0

# The messages Begin and Begin Prepare, with the LSN of the record of the commit or the PREPARE; Commit Prepared and
# Rollback Prepared; and Insert, Update, Delete, Truncate, with tables' OIDs. Transactions without a change of a
# published table send none of the last four.
_CHANGES: Final = """
SELECT pg_catalog.get_byte(data, 0),
       pg_catalog.substr(data, 2, CASE pg_catalog.chr(pg_catalog.get_byte(data, 0))
           WHEN 'T' THEN pg_catalog.length(data) WHEN 'b' THEN 28 WHEN 'K' THEN 29 WHEN 'r' THEN 37 ELSE 8 END)
  FROM pg_catalog.pg_logical_slot_peek_binary_changes($1::name, NULL, NULL, VARIADIC $2::text[])
 WHERE pg_catalog.strpos('BbKrIUDT', pg_catalog.chr(pg_catalog.get_byte(data, 0))) > 0"""
_BEGIN, _BEGIN_PREPARE, _COMMIT_PREPARED, _ROLLBACK_PREPARED, _TRUNCATE = b"BbKrT"
#: Places of LSNs in them: of the record of the commit or the PREPARE; of the end of Rollback Prepared.
_LSN, _DECIDED_LSN, _ROLLED_BACK_LSN = slice(8), slice(1, 9), slice(9, 17)
# A publication FOR ALL TABLES also has the state of the way back, which the cut-over itself writes there.
_OWN: Final = f"""
SELECT c.oid::bigint FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND n.nspname IN (SELECT schema_name FROM {STATE_SCHEMAS_SQL} AS own)
   AND (n.nspname, c.relname) <> ($1::name, $2::name)"""  # noqa: S608  a constant


async def wait_until_unread(source: Connection, slot_name: str, deadline_s: float) -> None:
    """Return once no process reads the slot.

    Raise SlotBusy if one still does.
    """
    patience_s = time.monotonic() + _PATIENCE_S
    while (found := await slot.read_slot(source, slot_name)) and found.active_pid is not None:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise SlotBusy(f"slot {slot_name!r} is in use by process {found.active_pid}", hint="stop its reader")
        if now_s >= patience_s:
            with source_errors("ending the sender of the slot"):
                await source.execute(f"SELECT pg_catalog.pg_terminate_backend({found.active_pid:d})".encode())
            patience_s = now_s + _PATIENCE_S
        await asyncio.sleep(_POLL_S)


async def late_count(source: Connection, config: Config, low_lsn: int) -> int:
    """Return how many transactions with published changes have committed on the source and are not on the target.

    Raises:
        SlotBusy: a process reads the slot.
    """
    version, wanted = source.info.server_version, config.source
    found = start_options(version, wanted.publications, wanted.origin, two_phase=wanted.two_phase)
    words = [word for pair in found for word in pair]
    # WAL may be flushed to the end of a page, within a record. The slot is read up to there and waits for the rest,
    # which a fenced server flushes after 15 s. A durable commit flushes it now.
    await fence.mark(source)
    with source_errors("reading what came after the fence"):
        async with source.transaction(force_rollback=True):
            await take_bytes(source)
            changes = await read_rows(source, _CHANGES, [config.source.slot, words])
        own = {oid for (oid,) in await read_rows(source, _OWN, list(QUEUE))}
    return len(_late(changes, low_lsn, own))


def _late(changes: Sequence[tuple[int, bytes]], low_lsn: int, own: set[int]) -> set[tuple[int, int]]:
    """Return LSN and xid of what came late; the xid is 0 of what was not prepared."""
    late: set[tuple[int, int]] = set()
    #: Prepared at or behind the watermark, by xid.
    prepared_late: dict[int, tuple[int, int]] = {}
    place = (0, 0)
    for kind, data in changes:
        if kind == _BEGIN:
            place = (int.from_bytes(data[_LSN]), 0)
        elif kind == _BEGIN_PREPARE:
            place = (int.from_bytes(data[_LSN]), int.from_bytes(data[24:28]))
            if place[0] >= low_lsn:
                prepared_late[place[1]] = place
        elif kind in {_COMMIT_PREPARED, _ROLLBACK_PREPARED}:
            is_commit = kind == _COMMIT_PREPARED
            xid = int.from_bytes(data[25:29] if is_commit else data[33:37])
            decided_lsn = int.from_bytes(data[_DECIDED_LSN if is_commit else _ROLLED_BACK_LSN])
            if xid in prepared_late:
                late -= set() if is_commit else {prepared_late[xid]}
                del prepared_late[xid]
            elif decided_lsn >= low_lsn + (not is_commit):
                # Prepared before, and applied so: nothing decides it on the target.
                late.add((decided_lsn, xid))
        # A transaction that ends at the watermark has its commit record before it.
        elif place[0] >= low_lsn and not own.issuperset(_tables(kind, data)):
            late.add(place)
    return late


def _tables(kind: int, data: bytes) -> list[int]:
    """Return the OIDs of the tables that a message changes: a Truncate has their number and its options before them."""
    if kind != _TRUNCATE:
        return [int.from_bytes(data[:4])]
    count = int.from_bytes(data[:4])
    return [int.from_bytes(data[start : start + 4]) for start in range(5, 5 + 4 * count, 4)]


async def one(  # noqa: PLR0913  the two streams, and their place among others
    forward: Config, reverse: Config, options: CutoverOptions, meeting: Meeting, name: str = "", *, is_undo: bool
) -> int:
    """Cut one database over, or go on with it, or take that back; return the exit code: 1 if transactions came late.

    Args:
        forward: the stream that runs; its target takes over.
        reverse: the way back: its source is that target, its target the old source.
        options: how.
        meeting: with the others of the command.
        name: of the database, as the command has it; of several.
        is_undo: take back, as long as no writers were let in.

    Raises:
        ConfigError: the two do not belong together.
        SourceRefused, SourceLost, TargetRefused, TargetLost, LeaseHeld: an end refuses, or is not there.
        ParapplyError: not ready in time, or a table differs.
    """
    if not (forward.mapping.is_empty and reverse.mapping.is_empty):
        raise ConfigError(
            "mapping: the way back goes to tables of the same names", hint="cut over by hand (docs/how-to/cut-over.md)"
        )
    if set(forward.mapping.schema_only) != set(reverse.mapping.schema_only):
        raise ConfigError(
            "mapping.schema_only: the way back would write into tables whose rows differ on both ends",
            hint="name the same tables in both files",
        )
    async with AsyncExitStack() as stack:
        ahead = await stack.enter_async_context(connect.open_both(forward, "cutover"))
        back = await stack.enter_async_context(connect.open_both(reverse, "cutover"))
        facts = await slot.inspect(ahead.source, forward.source.slot)
        refusals.check_primary(facts, "`parapply cutover`")
        await check_pair(ahead, back)
        await way_back.check_none_under_way(back, reverse, options.other_way)
        found = await connect.known_state(forward, ahead.target, facts.system_identifier)
        if found is None:
            raise TargetRefused(
                f"the target knows nothing of slot {forward.source.slot!r}", hint="run `parapply init` first"
            )
        await _lock(ahead.target, found.slot_id)
        row = await cutovers.read(ahead.target, forward.target.state_schema, found.slot_id)
        cutting = _Cutover(Pair(forward, reverse, ahead, back, found.slot_id), options, row, meeting, name)
        stack.push_async_callback(cutting.close)
        await cutting.meet()
        return await (cutting.undoing.asked(options) if is_undo else cutting.run())


async def _lock(conn: slot.Connection, slot_id: int) -> None:
    with target_errors("looking for another cut-over"):
        query = sql.SQL("SELECT pg_catalog.pg_try_advisory_lock($1::int, $2::int)")
        ((is_taken,),) = await rows(conn, query, [lease.CUTOVER_LOCK_CLASS, slot_id])
    if not is_taken:
        raise TargetRefused("another cut-over command of this slot runs", hint="wait for its end")


class _Cutover:
    def __init__(
        self, pair: Pair, options: CutoverOptions, row: cutovers.Cutover | None, meeting: Meeting, name: str
    ) -> None:
        self._forward, self._reverse, self._ahead, self._back, self._slot_id = pair
        self._options = options
        self._meeting = meeting
        #: As the command has it.
        self._name = name
        self._schema = pair.forward.target.state_schema
        self._notes = CutoverNotes(pair, row)
        self._look = CutoverLook(pair, options)
        self._deadline_s = time.monotonic() + options.timeout_s
        #: By this call the daemon was stopped.
        self._has_stopped = False
        #: Transactions that had come late when writers were let in; None: not by this call.
        self._n_late: int | None = None
        self._comparison = CutoverComparison(pair.forward, options.verify, options.timeout_s, self._look.warn)
        self._writers = ClientSessions(pair.ahead.source, self._look, options.fence_command)
        self._poolers = Poolers(pair, row.poolers if row is not None else (), self._look.warn)
        self._hooks = Hooks(pair, row, is_back=options.is_back)
        self.undoing = Undoing(pair, self._notes, meeting, Held(self._writers, self._poolers, self._hooks))

    async def close(self) -> None:
        """Leave the poolers' consoles, and the sessions that compare."""
        await self._poolers.close()
        await self._comparison.close()

    async def meet(self) -> None:
        """Wait until the state of all databases of the command is known."""
        has_passed = not self._notes.step.is_before(CutoverStep.OPENING)
        if has_passed:
            self._meeting.has_opened(self._name)
        await self._meeting.reach(CutoverStep.PREPARING, self._name)
        if has_passed:
            self._meeting.leave()

    async def run(self) -> int:
        row = self._notes.found
        if row is not None and row.is_done:
            click.echo(f"slot {self._forward.source.slot!r} was cut over already; nothing to do")
            self._say_end()
            return 0
        if row is not None:
            self._check_goes_on(row)
        if not self._options.is_dry:
            await self._poolers.check_named(leaves=self._options.leaves_poolers)
        if row is not None and row.step is not CutoverStep.PREPARING:
            self._notes.say_where(self._poolers.are_held)
        try:
            if row is None or row.step.is_before(CutoverStep.STOPPING):
                # Also of one that goes on: it may have been killed long ago.
                await self._check()
            if self._options.is_dry:
                click.echo("nothing was changed (--dry-run)")
                return 0
            return await self._steps()
        except Exception:
            self._meeting.fail(self._name)
            await self.undoing.after_failure(has_stopped=self._has_stopped)
            raise
        except asyncio.CancelledError:
            if self._notes.found is not None:
                self._notes.say_where(self._poolers.are_held)
            raise

    def _check_goes_on(self, row: cutovers.Cutover) -> None:
        """Refuse to go on with a cut-over that is taken back, or that has another way back."""
        if row.step is CutoverStep.UNDOING:
            raise TargetRefused(
                "the last cut-over is being taken back, and that is not finished", hint="the same command with --undo"
            )
        if row.reverse_slot != self._reverse.source.slot:
            raise ConfigError(
                f"the cut-over was begun with slot {row.reverse_slot!r} for the way back, not"
                f" {self._reverse.source.slot!r}",
                hint="name the same --reverse, or take it back with --undo",
            )

    async def _steps(self) -> int:
        notes = self._notes
        if notes.found is None:
            await self._prepare()
        elif notes.step is CutoverStep.PREPARING:
            await self._prepare_rest()
        if notes.step is CutoverStep.PREPARING:
            # While clients wait, late transactions are looked for from the slot's restart point on. The second call
            # moves it to the first.
            await slot.log_running(self._ahead.source)
            await self._comparison.before()
            await slot.log_running(self._ahead.source)
        if notes.step.is_before(CutoverStep.OPENING):
            # Even if it was done before: a standing fence is put up again, and sessions behind it are checked again.
            await self._fence()
            if notes.step.is_before(CutoverStep.STOPPING):
                await self._drain()
                await self._compare()
                await self._sequences()
            await self._stop()
            await self._turn()
            await self._meeting.reach(CutoverStep.OPENING, self._name)
        if notes.step.is_before(CutoverStep.ENDING):
            await self._open()
        return await self._end()

    async def _enter(self, step: CutoverStep, *, fence_lsn: int | None = None, takeover_lsn: int | None = None) -> None:
        """Run the operator's commands up to a step, and note it."""
        await self._hooks.reach(f"before_{step}")
        await self._notes.enter(step, fence_lsn=fence_lsn, takeover_lsn=takeover_lsn)

    # Checks before anything is made.

    async def _check(self) -> None:
        """Check everything that can be checked, and print it; raise the last reason why it would fail."""
        forward = self._forward
        tables = await published_tables(self._ahead.source, forward.source.publications, forward.mapping)
        known = self._notes.found
        refused = await self._look.refusals(tables, has_made=known is not None and known.made_publication)
        refused += await self._poolers.refusals(self._options.timeout_s)
        if self._reverse.cutover.poolers and not forward.cutover.poolers:
            self._look.warn("the other file names poolers, and the file of this stream none: its clients get errors")
        if self._options.is_dry:
            self._look.say_plan(len(tables), self._poolers.plan(), self._hooks.plan())
        connect.raise_all(refused)
        if self._options.with_sequences and self._options.is_dry:
            how = SequenceOptions(is_dry=True)
            if await sequences.bring(forward, how):
                raise TargetRefused("sequences could not be set; see above", hint="make them on the target")

    # The steps.

    async def _facts(self) -> slot.SourceFacts:
        return await slot.inspect(self._ahead.source, self._forward.source.slot)

    async def _prepare(self) -> None:
        reverse, back = self._reverse, self._back
        facts = await slot.inspect(back.source, reverse.source.slot)
        missing = await way_back.missing_publications(back.source, reverse.source.publications)
        new = cutovers.Cutover(
            step=CutoverStep.PREPARING,
            reverse_slot=reverse.source.slot,
            made_slot=facts.slot is None,
            made_publication=bool(missing),
            fence=self._writers.kind,
            opens=await self._look.what_to_open(),
            fence_lsn=None,
            takeover_lsn=None,
            fenced_s=None,
            gap_s=None,
        )
        # Before anything is made: what is noted as to be made is dropped by --undo.
        await self._notes.begin(new)
        # Again: a daemon that adopted the slot since the first look did not see the note.
        await way_back.stale_state(back, reverse)
        await self._prepare_rest()

    async def _prepare_rest(self) -> None:
        reverse, back = self._reverse, self._back
        await self._hooks.reach("before_preparing")
        tables = await published_tables(self._ahead.source, self._forward.source.publications, self._forward.mapping)
        if await way_back.missing_publications(back.source, reverse.source.publications):
            await way_back.make_publication(self._ahead.target, reverse, tables)
        await way_back.check_covers(back.source, reverse, tables, is_made=self._notes.row.made_publication)
        facts = await slot.inspect(back.source, reverse.source.slot)
        if facts.slot is None:
            await slot.create_slot(back.source, reverse.source.slot, two_phase=reverse.source.two_phase)
        refused = await self._look.findings_of_back()
        if refused:
            raise refused[-1]
        await state.ensure_schema(back.target, reverse.target.state_schema)
        self._notes.say(CutoverStep.PREPARING, f"slot {reverse.source.slot!r} on the target, {len(tables)} tables")

    async def _fence(self) -> None:
        await self._meeting.reach(CutoverStep.FENCING, self._name)
        # Once more, because a command that goes on has not looked, and no daemon may run any more.
        if awaited := await refusals.awaited(self._ahead.source, self._forward.source):
            raise awaited
        await self._keep_copies_off()
        await self._hooks.reach("before_fencing")
        await self._poolers.pause()
        self._deadline_s = time.monotonic() + self._options.timeout_s
        if self._notes.step.is_before(CutoverStep.STOPPING):
            await self._enter(CutoverStep.FENCING)
        self._notes.say(CutoverStep.FENCING, await self._writers.keep_out(self._deadline_s))

    async def _keep_copies_off(self) -> None:
        """Keep `refresh` and its like from the tables, until this command ends; then the noted step does."""
        try:
            await lease.take_lease(self._ahead.target, self._slot_id, 0, lock_class=lease.COPY_LOCK_CLASS)
        except LeaseHeld as error:
            raise TargetRefused(
                "tables of this slot are being copied, or paused", hint="wait for the end of that command"
            ) from error

    async def _drain(self) -> None:
        lsn = await fence.last_lsn(self._ahead.source, self._deadline_s)
        await self._enter(CutoverStep.DRAINING, fence_lsn=lsn)
        await lifecycle.applied(self._forward, lsn, max(0.0, self._deadline_s - time.monotonic()))
        await self._look.check_tables(is_made=self._notes.row.made_publication)
        # One that began after the first look, and was ended before the fence, leaves a table in part.
        await self._look.check_copied(lsn)
        self._notes.say(CutoverStep.DRAINING, f"the target has everything up to {format_lsn(lsn)}")

    async def _compare(self) -> None:
        await self._enter(CutoverStep.COMPARING)
        self._notes.say(CutoverStep.COMPARING, await self._comparison.after(self._notes.row.fence_lsn or 0))

    async def _sequences(self) -> None:
        await self._enter(CutoverStep.SEQUENCES)
        if not self._options.with_sequences:
            self._notes.say(CutoverStep.SEQUENCES, "left out (--no-sequences)")
            return
        if await sequences.bring(self._forward, SequenceOptions(), ends=self._ahead):
            raise ParapplyError(f"{_NOT_CARRIED}; see above", hint=_WITHOUT_SEQUENCES)
        self._notes.say(CutoverStep.SEQUENCES, "brought")

    async def _stop(self) -> None:
        """Stop the daemon for good, and make sure that it has applied everything."""
        name, ahead = self._forward.source.slot, self._ahead
        await self._meeting.reach(CutoverStep.STOPPING, self._name)
        await self._enter(CutoverStep.STOPPING)
        wait_s = min(self._forward.target.lease_wait_s, _LEASE_WAIT_MAX_S)
        await lease.take_lease(ahead.target, self._slot_id, wait_s, takeover=True)
        await lease.fence(ahead.target, self._slot_id, lifecycle.say_whom_it_waits_for)
        self._has_stopped = True
        if self._options.with_sequences:
            # The daemon also carries them, and may have begun to set older values before that step.
            left = [one for one in await carry(ahead, SequenceOptions()) if not one.is_carried]
            if left:
                names = few([f"{one.schema_name}.{one.sequence_name}" for one in left])
                raise ParapplyError(f"{_NOT_CARRIED}: {names}", hint=_WITHOUT_SEQUENCES)
        found = await state.load(ahead.target, self._schema, name, (await self._facts()).system_identifier)
        fence_lsn = self._notes.row.fence_lsn
        if found is None or fence_lsn is None or not covers(found.low_lsn, fence_lsn):
            await self._back_to_draining()
            raise TargetRefused(
                f"the target no longer has everything up to {format_lsn(fence_lsn or 0)}",
                hint="start the daemon, and give the same command again",
            )
        deadline_s = time.monotonic() + wait_s
        await wait_until_unread(ahead.source, name, deadline_s)
        await self._writers.end_others(deadline_s)
        if n_late := await late_count(ahead.source, self._forward, found.low_lsn):
            await self._back_to_draining()
            raise SourceRefused(
                f"{n_late} transactions were committed on the source after the fence: a session writes in spite of it",
                hint="end it, start the daemon, and give the same command again; --undo lets all writers in again",
            )
        # A transaction that was prepared behind the fence, and applied so, would be committed on the old source only.
        held = await fence.prepared(ahead.source)
        held += [gid for gid, _ in (await prepared.pending(ahead.target, self._schema, self._slot_id)).values()]
        if held:
            await self._back_to_draining()
            raise SourceRefused(
                f"transactions were prepared on the source after the fence, and have no end yet: {few(held)}",
                hint="end them and the session that writes, start the daemon, and give the same command again; --undo"
                " lets all writers in again",
            )
        self._notes.say(CutoverStep.STOPPING, "the daemon is stopped, and nothing was committed after the fence")

    async def _back_to_draining(self) -> None:
        """Let a daemon start again. The way back then begins later: what that one applies must not be sent back."""
        if self._notes.row.takeover_lsn is not None:
            await way_back.drop_known_state(self._back, self._reverse)
        await self._notes.back_to_draining()

    async def _turn(self) -> None:
        reverse, back = self._reverse, self._back
        if self._notes.row.takeover_lsn is None:
            old_id, _ = await way_back.stale_state(back, reverse)
            if old_id is not None:
                await way_back.drop_state(back, reverse, old_id)
            # On both sides of the mark, because a client may prepare one just before it, or end it just after.
            await self._look.check_prepared()
            takeover_lsn = await fence.mark(back.source)
            await self._look.check_prepared()
            await self._enter(CutoverStep.TURNING, takeover_lsn=takeover_lsn)
        assert self._notes.row.takeover_lsn is not None
        await way_back.make_state(back, reverse, self._notes.row.takeover_lsn)
        async with self._meeting.at_poolers:
            await self._poolers.lead_on()
        self._notes.say(
            CutoverStep.TURNING,
            f"slot {reverse.source.slot!r} sends what commits after {format_lsn(self._notes.row.takeover_lsn)}",
        )

    async def _open(self) -> None:
        await self._enter(CutoverStep.OPENING)
        await self._writers.let_in(self._notes.row.opens, self._back.source)
        # A command that goes on would end the sessions of clients that were let in.
        await self._notes.opened()
        async with self._meeting.at_poolers:
            await self._poolers.resume()
        await self._notes.took_over()
        # Before the way back may begin: what that applies to the old source looks like late writes.
        with contextlib.suppress(SourceRefused):  # the end asks again, and leaves the slot
            self._n_late = await self._count_late()
        await self._notes.enter(CutoverStep.ENDING)
        gap_s = self._notes.row.gap_s or 0.0
        self._notes.say(CutoverStep.OPENING, f"the target takes over; no client could write for {gap_s:.3f} s")

    async def _end(self) -> int:
        name, ahead = self._forward.source.slot, self._ahead
        await self._hooks.reach("before_ending")
        facts = await self._facts()
        if facts.slot is not None:
            n_late: int | None = await self._count_late()
            if n_late and not await self._is_old_source_still():
                n_late = self._n_late
            if n_late:
                click.echo(
                    f"parapply: {n_late} transactions were committed on the source after the target took over; they are"
                    f" on the source only. Hint: slot {name!r} is left, and has them; bring them by hand, and then"
                    " `parapply drop`",
                    err=True,
                )
                return _INCOMPLETE
            if n_late is None:
                click.echo(
                    "parapply: the way back writes on the source, so whether a session also did after the target took"
                    f" over is not known. Hint: slot {name!r} is left, and has it; `parapply verify` with the"
                    " configuration of the way back compares, and then `parapply drop`",
                    err=True,
                )
                return _INCOMPLETE
            await slot.drop_slot(ahead.source, name)
        await self._hooks.reach("after_ending")
        await self._notes.enter(CutoverStep.DONE)
        self._say_end()
        return 0

    async def _count_late(self) -> int:
        facts = await self._facts()
        found = await state.load(self._ahead.target, self._schema, self._forward.source.slot, facts.system_identifier)
        if found is None or facts.slot is None:
            return 0
        return await late_count(self._ahead.source, self._forward, found.low_lsn)

    async def _is_old_source_still(self) -> bool:
        """Return whether the way back has written nothing there yet; its changes there would look like late writes."""
        found = await way_back.state_of(self._back, self._reverse)
        return found is not None and found.high_lsn == self._notes.row.takeover_lsn

    def _say_end(self) -> None:
        if self._options.hint:
            click.echo(self._options.hint)
