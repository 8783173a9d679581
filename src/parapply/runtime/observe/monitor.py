"""State for people: the lag, each worker's work and waits, how tables are applied. Nothing here decides."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from parapply.conflict.skips import OTHER_HISTORY_HINT, forget_other_history
from parapply.engine.job import SetJob
from parapply.engine.stalls import AT_WORK, executed_now
from parapply.engine.state import FRESH_S
from parapply.errors import SourceLost, SourceRefused, WalLimitReached
from parapply.logs import get_logger
from parapply.runtime.rest import ASKED_S, LONG_S
from parapply.source import slot
from parapply.source.standby import is_named
from parapply.source.waits import stream_ends_first
from parapply.target.state import display
from parapply.target.state import slots as state
from parapply.target.state.display import TableCounts
from parapply.target.state.moves import Moves, read_moves
from parapply.target.state.slots import WorkerRow
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from parapply.engine.job import Job
    from parapply.metrics.figures import Figures
    from parapply.retention import WalLimit
    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.observe.applylog_intervals import Intervals
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.worker_tasks import WorkerTasks
    from parapply.target.state.slots import StatePlace

#: Tables whose counts are written to the target at one time, so that thousands of them cost no more than that.
_TABLES = 200
#: Seconds between two checks, as a person watching expects.
_INTERVAL_S = 1.0
#: Delay of the first check, because the first announced tables are looked up over the same few sessions, and the stream
#: waits.
_FIRST_LOOK_S = 0.2
#: Seconds between two queries of the slot: how much WAL it keeps changes slowly.
_SLOT_S = 10.0
#: The same of the timeline of a standby, which takes a connection each time; it changes with a failover.
_TIMELINE_S = 30.0
#: The same for a migration or a cut-over; mostly none is in progress.
_MOVES_S = 3.0


class SeenSlot(NamedTuple):
    """The slot on the publisher as last queried."""

    facts: slot.SlotFacts
    source_lsn: int
    looked_s: float  # by the event loop's clock


class Publisher(NamedTuple):
    """The way to ask the publisher for its position."""

    conn: slot.Connection
    ask_position: Callable[[], Awaitable[slot.SourcePosition]]
    #: As it was at the start; a change is recorded.
    timeline: int
    #: Asks for the timeline of a standby.
    ask_timeline: Callable[[], Awaitable[int]]
    wal_limit: WalLimit


class Monitor:
    """Reads the others' fields; writes only its own, the state shown, and whether commits wait for the stream."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        publisher: Publisher,
        control_pool: ControlPool,
        place: StatePlace,
        worker_tasks: WorkerTasks,
        *,
        batcher: Batcher,
        intervals: Intervals,
    ) -> None:
        """Keep the parts to show; the intervals get their turn after each check."""
        kit = worker_tasks.kit
        self._source = publisher.conn
        self._ask_position = publisher.ask_position
        self._control_pool = control_pool
        self._schema, self._slot_name, self._slot_id = place
        self._stream = batcher.reader.stream
        self._flight = kit.pool.flight
        self._batcher = batcher
        self._engine = kit.pool.flight.state
        self._rest = kit.pool.rest
        #: When requests were read that a call announces.
        self._asked_requests_s = 0.0
        self._worker_tasks = worker_tasks
        self._workers = worker_tasks.workers
        #: Row shown of each worker, by its number.
        self._shown_workers: dict[int, tuple[WorkerRow, float]] = {}
        self._tables = kit.tables
        #: Taken from their owners and not yet written. The end of an epoch interrupts a write, which the last look then
        #: repeats.
        self._unwritten_tables: dict[tuple[str, str], display.TableRow] = {}
        self._unwritten_counts: dict[str, display.TableCounts] = {}
        self._conflict_handler = kit.conflict_handler
        self._figures = kit.conflict_handler.figures
        self._log = get_logger()
        self._intervals = intervals
        self._timeline = publisher.timeline
        self._ask_timeline = publisher.ask_timeline
        self._wal_limit = publisher.wal_limit
        #: Text for people while the slot keeps more than that.
        self._wal_note = ""
        # The rows that show them are made again in each epoch.
        self._figures.changed = dict.fromkeys(self._figures.tables)
        self._clock = asyncio.get_running_loop().time
        #: The publisher's positions not yet applied, each with the time when it was first seen.
        self._seen: deque[tuple[int, float]] = deque()
        #: Since when what the first check finds may have been there; None after it.
        self._unseen_since_s = None if self._engine.lag_s is None else self._engine.looked_s - self._engine.lag_s
        #: As the publisher showed it last; None: not yet, or it is gone.
        self.slot: SeenSlot | None = None
        self._asked_slot_s = -_SLOT_S
        self._asked_timeline_s = self._clock()
        #: A migration and a cut-over as their commands noted them last.
        self.moves = Moves()
        self._asked_moves_s = -_MOVES_S

    @property
    def target_names(self) -> Mapping[str, str]:
        """Return the names on the target of tables that have others there, by the publisher's."""
        return self._tables.target_names

    @property
    def limits(self) -> dict[str, Any] | None:
        """Return the limit, as `status` shows it; None if nothing is known of the present."""
        is_present = self.now_s - self._engine.looked_s < FRESH_S + self._engine.look_s
        return self._intervals.limiting.latest if is_present else None

    @property
    def now_s(self) -> float:
        """Return the time by the clock of `worker_rows`."""
        return self._clock()

    async def run(self) -> None:
        """Check once a second until cancelled.

        Raises:
            WalLimitReached: the slot keeps too much WAL, and is to be dropped for that.
            SourceLost: the plain session on the publisher ended, and the stream did not end by itself.
            TargetLost, TargetRefused: nothing can be shown.
        """
        await asyncio.sleep(_FIRST_LOOK_S)
        while True:
            async with stream_ends_first():
                self._engine.unanswered_since_s = self._clock()
                position = await self._ask_position()
                self._engine.unanswered_since_s = None
                self._look_for_waiting(position.standby_names)
                await self._look_at_slot(position.flush_lsn)
            self._engine.source_lsn, self._engine.source_insert_lsn = position.flush_lsn, position.insert_lsn
            self._engine.source_clock_us, self._engine.passed_us = position.clock_us, position.passed_us
            self._engine.lag_s = self._lag_s(position.flush_lsn, position.clock_us)
            self._engine.looked_s = self._clock()
            note = self._engine.blocked_reason(self._clock()) or self._engine.note or self._worker_tasks.reason
            self._engine.reason = "; ".join([text for text in (self._wal_note, note) if text])
            await self._look_at_timeline(position.timeline)
            self._rest.look()
            if not self._rest.is_on or self._clock() - self._asked_requests_s >= LONG_S:
                await self._look_for_requests()
            await self._show()
            await self._look_at_moves()
            await self._intervals.take()
            self._engine.look_s = ASKED_S if self._rest.is_on else 0.0
            await self._rest.sleep(_INTERVAL_S, ASKED_S)

    def _look_for_waiting(self, standby_names: str) -> None:
        is_synchronous = is_named(standby_names, self._stream.standby_name)
        if is_synchronous != self._stream.is_synchronous:
            self._stream.is_synchronous = is_synchronous
            self._log.info("standby_changed", slot=self._slot_name, is_synchronous=is_synchronous)

    async def _look_at_timeline(self, timeline: int) -> None:
        """Record that the publisher, once a standby, was promoted, or follows another primary: the stream goes on."""
        if not timeline:
            if self._clock() - self._asked_timeline_s < _TIMELINE_S:
                return
            self._asked_timeline_s = self._clock()
            # A separate connection. If it fails, the next question gets the answer, or the next start does.
            with suppress(SourceLost, SourceRefused):
                timeline = await self._ask_timeline()
        if timeline > self._timeline:
            async with self._control_pool.session() as conn:
                for lsn in await forget_other_history(conn, self._schema, self._slot_id, timeline):
                    self._log.warning("skip_passed", end_lsn=lsn, hint=OTHER_HISTORY_HINT)
                await state.set_timeline(conn, self._schema, self._slot_id, timeline)
            self._log.info("timeline_followed", slot=self._slot_name, before=self._timeline, timeline=timeline)
            self._timeline = timeline

    async def _look_at_slot(self, flush_lsn: int) -> None:
        now_s = self._clock()
        if now_s - self._asked_slot_s < (LONG_S if self._rest.is_on else _SLOT_S):
            return
        self._asked_slot_s = now_s
        facts = await slot.read_slot(self._source, self._slot_name)
        self.slot = None if facts is None else SeenSlot(facts, flush_lsn, now_s)
        self._look_at_wal(facts, flush_lsn)

    def _look_at_wal(self, facts: slot.SlotFacts | None, flush_lsn: int) -> None:
        """Say once that the slot keeps more WAL than allowed, and once that it no longer does.

        Raises:
            WalLimitReached: it does, and is to be dropped for that.
        """
        limit = self._wal_limit
        kept_bytes = limit.exceeded_bytes(facts, flush_lsn)
        if kept_bytes is None:
            if self._wal_note:
                self._log.info("retained_wal_fallen", slot=self._slot_name, limit_bytes=limit.limit_bytes)
            self._wal_note = ""
            return
        if not self._wal_note:
            self._log.warning(
                "retained_wal_exceeded",
                slot=self._slot_name,
                retained_bytes=kept_bytes,
                limit_bytes=limit.limit_bytes,
                action=limit.action,
            )
        self._wal_note = limit.words(kept_bytes)
        if limit.action == "drop_slot":
            raise WalLimitReached(self._wal_note)

    async def _look_at_moves(self) -> None:
        now_s = self._clock()
        interval_s = LONG_S if self._rest.is_on else _MOVES_S
        if now_s - self._asked_moves_s < interval_s and not self.moves.are_under_way:
            return
        self._asked_moves_s = now_s
        async with self._control_pool.session() as conn:
            self.moves = await read_moves(conn, self._schema, self._slot_name, self._slot_id)

    def _lag_s(self, flush_lsn: int, now_us: int) -> float:
        """Return how far the target is behind: the age of the oldest source position or transaction not applied."""
        now_s = self._clock()
        low_lsn = self._flight.state.watermark.low_lsn
        if flush_lsn > low_lsn and (not self._seen or self._seen[-1][0] < flush_lsn):
            self._seen.append((flush_lsn, now_s if self._unseen_since_s is None else self._unseen_since_s))
        self._unseen_since_s = None
        while self._seen and self._seen[0][0] <= low_lsn:
            self._seen.popleft()
        lag_s = now_s - self._seen[0][1] if self._seen else 0.0
        oldest_us = self._batcher.oldest_commit_time_us
        if oldest_us is not None:
            lag_s = max(lag_s, (now_us - oldest_us) / 1e6)
        return lag_s

    async def show_last(self) -> None:
        """Write the same as before for the last time: an epoch that has ended has no workers."""
        await self._look_for_requests()
        await self._show()
        await self._intervals.take()
        async with self._control_pool.session() as conn:
            await display.forget_workers(conn, self._schema, self._slot_id)

    async def _look_for_requests(self) -> None:
        self._asked_requests_s = self._clock()
        await self._conflict_handler.look(self._flight.state.watermark.low_lsn, self._is_committing)

    async def _show(self) -> None:
        rows = self.worker_rows()
        changed = [self._dated(*row) for number, row in rows.items() if self._shown_workers.get(number) != row]
        have_left = not self._shown_workers.keys() <= rows.keys()
        tables, counts = self._unwritten_tables, self._unwritten_counts
        tables |= {(row.schema_name, row.table_name): row for row in self._tables.take_rows()}
        counts |= {row.name: row for row in _take_counts(self._figures)}
        limits = self._intervals.limiting.take()
        if not (changed or have_left or tables or limits or counts):
            return
        async with self._control_pool.session() as conn:
            if changed:
                await state.write_workers(conn, self._schema, self._slot_id, changed)
            if have_left:
                await display.forget_workers(conn, self._schema, self._slot_id, but=sorted(rows))
            self._shown_workers = rows
            if tables:
                await state.write_tables(conn, self._schema, self._slot_id, list(tables.values()))
                tables.clear()
            if limits:
                await display.write_limits(conn, self._schema, self._slot_id, limits)
            if counts:
                await display.write_counts(conn, self._schema, self._slot_id, list(counts.values()))
                counts.clear()

    def worker_rows(self) -> dict[int, tuple[WorkerRow, float]]:
        """Return each worker's state, its wait, and its beginning by the event loop's clock, by the worker's number."""
        # One idle worker for each batch that waits: the others are idle because nothing else is left to do.
        blocked = iter([job for job in self._flight.waiting_jobs() if self._flight.waits_of(job)])
        idle = WorkerState.IDLE
        return {
            worker.number: (self._row(worker, next(blocked, None) if worker.state is idle else None), worker.since_s)
            for worker in self._workers
        }

    def _is_committing(self, end_lsn: int) -> bool:
        """Return whether COMMIT was sent for the transaction that ends there."""
        jobs = [worker.job for worker in self._workers if worker.state is WorkerState.COMMITTING]
        if any(job.batch.first_lsn <= end_lsn <= job.batch.end_lsn for job in jobs if job is not None):
            return True
        # Transactions one after the other are sent with their COMMIT.
        each = [worker.job for worker in self._workers if isinstance(worker.job, SetJob) and worker.job.is_one_by_one]
        return any(transaction.end_lsn == end_lsn for job in each for transaction in executed_now(job))

    def _row(self, worker: Worker, blocked: Job | None) -> WorkerRow:
        job = worker.job
        return WorkerRow(
            worker=worker.number,
            pid=worker.session.pipeline.backend_pid,
            state=worker.state.value,
            batch_seq=job.batch.seq if job else None,
            end_lsn=job.batch.end_lsn or None if job else None,
            waits_for=self._waits_for(worker, blocked),
            transactions=worker.transactions,
            changes=worker.changes,
        )

    def _dated(self, row: WorkerRow, since_s: float) -> WorkerRow:
        unix_s = datetime.now(UTC).timestamp() - (self._clock() - since_s)
        return replace(row, since=datetime.fromtimestamp(unix_s, UTC))

    def _waits_for(self, worker: Worker, blocked: Job | None) -> str | None:
        """Return the wait of a worker; for an idle one, the wait of the batch that it would take."""
        if worker.state in AT_WORK and worker.number in self._engine.foreign_waits:
            return self._engine.foreign_waits[worker.number]
        if worker.state in (WorkerState.WAITING, WorkerState.RETRYING) and worker.job is not None:
            return self._turn_waits_for(worker.job)
        if blocked is not None:
            return f"batch {blocked.batch.seq} waits for {self._flight.waits_of(blocked)[-1]}"
        return None

    def _turn_waits_for(self, job: Job) -> str | None:
        """Return the wait of a job that a worker has."""
        head = self._flight.state.head
        if head is None or head is job:
            return None
        late = self._flight.late_waits_of(job)
        turn = f"its turn, after batch {head.batch.seq}"
        if late:
            return f"{late[-1]}" if self._flight.state.is_relaxed else f"{turn}; partly {late[-1]}"
        return turn


def _take_counts(figures: Figures) -> list[TableCounts]:
    """Return the counts of tables that have changed since they were last taken, for the state schema; of many, some."""
    counts = []
    for name in figures.take_changed(_TABLES):
        table = figures.tables.get(name)
        if table is None:
            continue
        mostly = max(table.waits, key=lambda kind: table.waits[kind], default="")
        counts.append(
            TableCounts(
                name=name,
                transactions=table.transactions,
                inserts=table.rows.insert,
                updates=table.rows.update,
                deletes=table.rows.delete,
                truncates=table.rows.truncate,
                waits=sum(table.waits.values()),
                wait_s=sum(table.wait_s.values(), 0.0),
                waits_mostly_for=mostly,
            )
        )
    return counts
