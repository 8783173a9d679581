"""The open batch: what may join it, when it closes, and the hand-over of each closed batch to the worker pool.

Nothing enters that is committed or prepared here already, nor what a copy holds or will hold. Nothing enters before the
tables it needs are known and copied, nor past a hold. A batch closes when `engine/intake.py` says so, or before a
transaction that must not be in it. Pieces of a large transaction, and transactions that an event ends, are separate
batches.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from parapply.engine.intake import BatchSizing, Closing, Hold, Throttle
from parapply.engine.job import Alone, LargeJob, SetJob
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.plan.batch import Batch, Limits
from parapply.plan.steps import are_planned, is_serial
from parapply.wire.messages import BeginPrepare, Prepare, StreamPrepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config import ApplyConfig
    from parapply.engine.job import Job
    from parapply.model import Relation, Transaction
    from parapply.plan.commands import JudgedFrames
    from parapply.plan.copy_starts import Name
    from parapply.plan.table import TablePlan
    from parapply.runtime.intake.reader import SlotReader
    from parapply.runtime.pool.pool import WorkerPool
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.copied import Copied
    from parapply.runtime.tables.plans import TablePlans
    from parapply.target.state.slots import SlotState

#: Pieces of a large transaction that wait for their worker.
_PIECES = 2
#: Transactions without code on the target that may follow one with code in its batch, and changes of each.
_BETWEEN = 16


class Batcher:
    """Written by intake's task; requests, and the worker pool's callback, may close the open batch."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        reader: SlotReader,
        tables: TablePlans,
        pool: WorkerPool,
        *,
        config: ApplyConfig,
        state: SlotState,
        most_places: int,
        notes_transactions: bool = False,
    ) -> None:
        """Start with no batch open.

        Args:
            reader: says when bytes came.
            tables: for plans.
            pool: gets the batches.
            config: limits.
            state: the target's state at the start.
            most_places: of a batch, in the target's table of locks.
            notes_transactions: for the apply log's records of single transactions.
        """
        self.reader = reader
        self.tables = tables
        self.pool = pool
        self._notes_transactions = notes_transactions
        #: Source transactions handed over so far, while they are noted.
        self._n_transactions = 0
        self._clock = asyncio.get_running_loop().time
        self._seq = 0
        self._open: SetJob | None = None
        #: True once transactions that were read are in no batch: a change among them could not be read.
        #: Read by requests.
        self.is_torn = False
        #: Transactions without code on the target since the last one with code.
        self._n_between = 0
        #: The large transaction that has begun and not come whole. Read by progress, requests and the epoch.
        self.large: LargeJob | None = None
        #: Made when a batch needs it: copied at every announcement, thousands of tables would take seconds.
        self._plans_now: dict[int, TablePlan] | None = None
        self._closing = Closing(pool.flight, linger_s=config.linger_s)
        self._timer: asyncio.TimerHandle | None = None
        #: None: nothing is held back. Read by intake and by the intervals.
        self.throttle = Throttle(config.max_changes_per_s, self._clock) if config.max_changes_per_s else None
        most_changes = min(config.max_batch_changes, self.throttle.batch_changes if self.throttle else 1 << 63)
        #: Updated with every commit by the epoch.
        self.sizing = BatchSizing(
            Limits(config.max_batch_transactions, most_changes, config.max_batch_bytes, most_places),
            memory_bytes=config.memory_limit_bytes,
        )
        self._limits = self.sizing.limits
        if not pool.flight.state.is_relaxed:
            # Two may then be in flight. In relaxed order any number may be, and the places are few from the beginning.
            self._limits.places = max(1, most_places // 2)
        #: Highest LSN received: end of a transaction or of a keep-alive. Intake writes the latter. Read by progress,
        #: requests and gauges.
        self.received_lsn = state.low_lsn
        #: End of the last transaction that was taken, or is committed from before. Read by requests and the watchdog.
        self.taken_lsn = state.high_lsn
        #: True while transactions were read that are in no batch yet. Written by intake; requests then closes nothing.
        self.is_taking = False

    @property
    def plans_now(self) -> dict[int, TablePlan]:
        """Return the plan in force for each publisher's OID before what comes next; never written. For `special`."""
        if self._plans_now is None:
            self._plans_now = dict(self.tables.plans.current)
        return self._plans_now

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is open."""
        return self._open is None

    @property
    def open_bytes(self) -> int:
        """Return the bytes of changes in the open batch."""
        return self._open.batch.size_bytes if self._open else 0

    @property
    def holds_nothing(self) -> bool:
        """Return whether every byte read is in the worker pool's hands or has passed through it."""
        return self._open is None and self.large is None and not (self.reader.is_inside_transaction or self.is_torn)

    @property
    def oldest_commit_time_us(self) -> int | None:
        """Return the publisher's commit time of the oldest transaction not committed here, None without one."""
        head = self.pool.flight.state.head or self._open
        return head.batch.first_commit_time_us if head else None

    @property
    def last_seq(self) -> int:
        """Return the number of the last batch begun, closed or not."""
        return self._seq

    @property
    def pause_s(self) -> float:
        """Return the seconds not to read after everything at hand was read; 0 where a worker could apply it at once.

        While nothing waits here it is 0, as a single client sends nothing before its answer.
        """
        return 0.0 if self.holds_nothing and not self._closing.is_backlog else self._closing.pause_s

    def add_run(self, transactions: list[Transaction], at: int) -> int:
        """Add transactions from an index on, at least one, while they are plain and the batch is not full.

        Returns:
            The index of the next one. If the batch was full, it is closed.

        Raises:
            ProtocolError: a change cannot be read.
        """
        job = self._open or self._begin()
        try:
            at = job.batch.add_run(transactions, at, self.tables.plans, self._limits)
        except BaseException:
            # Half a transaction must not reach a worker: all of the batch is sent again.
            self._open, self.is_torn = None, True
            raise
        job.times.received_s = self.reader.heard_s
        if self._notes_transactions:
            job.arrivals.append((len(job.batch.transactions), job.times.received_s))
        self.received(transactions[at - 1])
        if job.batch.is_full(self._limits):
            self._close()
        return at

    def _begin(self) -> SetJob:
        plans_before = self.plans_now
        self._open = SetJob(self.new_batch(), plans_before)
        return self._open

    def add_whole(self, transaction: Transaction) -> None:
        """Add one whole transaction, to another batch if it is not for the open one.

        Raises:
            ProtocolError: a change cannot be read.
        """
        event = transaction.event
        self.received(transaction)
        if isinstance(event, Prepare):
            self.close_open()
            job = self._add(transaction)
            job.prepare = event
            job.batch.is_barrier = True
            self._close()
            return
        if not self._fits(transaction):
            self._close()
        if self._add(transaction).batch.is_full(self._limits):
            self._close()

    def _fits(self, transaction: Transaction) -> bool:
        """Return whether a transaction may join the open batch: transactions where code runs have separate batches.

        A few others between them are taken along, also row by row, because a batch of so few is worth no barrier.
        """
        is_first = self._open is None
        is_in_serial = self._open is not None and self._open.batch.is_serial
        if is_serial(transaction, self.tables.plans):
            self._n_between = 0
            return is_first or is_in_serial
        self._n_between += 1
        return not is_in_serial or (self._n_between <= _BETWEEN and len(transaction.changes) <= _BETWEEN)

    def _add(self, transaction: Transaction) -> SetJob:
        job = self._open or self._begin()
        try:
            job.batch.add(transaction, self.tables.plans)
        except BaseException:
            # Half of it must not reach a worker, as in `add_run`.
            self._open, self.is_torn = None, True
            raise
        job.times.received_s = self.reader.heard_s
        if self._notes_transactions:
            job.arrivals.append((len(job.batch.transactions), job.times.received_s))
        if transaction.relations:
            self.tables.announced(transaction.relations)
            self.plans_changed()
        return job

    async def add_piece(self, piece: Transaction, commands: JudgedFrames | None = None) -> None:
        """Hand a piece of a large transaction to its worker; waits while enough of them wait there.

        Args:
            piece: the next one.
            commands: of the publisher, in this piece of a transaction that holds some; its worker looks its relations
                up. None for another transaction, whose relations are put in force.
        """
        if piece.is_first:
            self.close_open()
            job = self.large = LargeJob(self.new_batch(), self.plans_now, asyncio.Queue(_PIECES), piece.commit_lsn)
            job.times.received_s = self.reader.heard_s
            job.batch.is_barrier = True
            job.batch.first_commit_time_us = job.batch.commit_time_us = piece.commit_time_us
            self.pool.submit(job, self._clock())
            self._note_alone(job, piece)
        assert self.large is not None, "the pieces of a transaction come one after the other"
        job = self.large
        if commands is None:
            self.announce(piece.relations)
        else:
            job.commands.update(commands)
        self.pool.flight.count_in(piece.size_bytes)
        if self.throttle is not None:
            self.throttle.take(len(piece.changes))
        await job.pieces.put(piece)
        if piece.is_last:
            self.received_lsn = piece.end_lsn
            self.taken_lsn = max(self.taken_lsn, piece.end_lsn)
            job.batch.first_lsn = job.batch.end_lsn = piece.end_lsn
            job.prepare = piece.event if isinstance(piece.event, Prepare) else None
            self.pool.flight.ended(job)
            await job.pieces.put(None)
            # Cleared only now, because until the worker can know of the end, a drain must not wait for it.
            self.large = None

    def received(self, transaction: Transaction) -> None:
        """Record the position of the stream, and how late it is."""
        self.received_lsn = transaction.end_lsn
        self.taken_lsn = max(self.taken_lsn, transaction.end_lsn)
        self._closing.received(transaction)

    def announce(self, relations: Sequence[Relation]) -> None:
        """Put relations in force for the next changes; their plans are known.

        A retry of the open batch would not meet these announcements, so what needs them goes into another one.
        """
        if relations:
            self.close_open()
        for relation in relations:
            self.tables.plans.announce(relation)
        self.tables.announced(relations)
        self.plans_changed()

    def plans_changed(self) -> None:
        """Note that the next batch begins with other plans."""
        self._plans_now = None

    def new_batch(self) -> Batch:
        """Return a batch after all others."""
        self._seq += 1
        return Batch(self._seq)

    def submit(self, job: Job, event: Transaction) -> None:
        """Hand over a job that an event has ended, and whose batch is complete."""
        # A worker that has followed it began before it had come.
        job.times.received_s = self.reader.heard_s
        self.pool.submit(job, self._clock())
        self._note_alone(job, event)

    def close_if_due(self) -> bool:
        """Close the open batch if it is due, and return whether it was; called when bytes came or the pool changed."""
        if self._open is None:
            return False
        self._close_after(self._closing.look(self._open.batch, self.reader.heard_s))
        return self._open is None

    def _close_after(self, wait_s: float | None) -> None:
        if wait_s == 0.0:
            self._close()
        elif wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._waited)

    def _waited(self) -> None:
        self._timer = None
        if self._open is not None:
            self._close_after(self._closing.waited(self._open.batch, self._clock()))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._closing.closed()
            self._timer.cancel()
            self._timer = None

    def close_open(self) -> None:
        """Close the open batch, if any, because the next transaction is not for it."""
        if self._open is not None:
            self._close()

    def hold_open(self, for_s: float) -> None:
        """Keep a batch of a backlog open for some seconds, because the next transactions may join it soon."""
        self._closing.hold_open(self._clock() + for_s)

    def close_first(self) -> None:
        """Close the batch that is open, if it is the first one."""
        if self._seq == 1:
            self.close_open()

    @property
    def is_backlog(self) -> bool:
        """Return whether the stream is late."""
        return self._closing.is_backlog

    def finish(self) -> None:
        """Hand over whole transactions, and close nothing later."""
        self._disarm()
        self.close_open()

    def _close(self) -> None:
        self._disarm()
        job = self._open
        assert job is not None
        self._open = None
        job.batch.close()
        self.sizing.closed(job.batch)
        job.batch.is_fence, self.tables.has_changed = self.tables.has_changed, False
        job.counts.count_batch(job.batch)
        if self.throttle is not None:
            self.throttle.take(job.batch.n_changes)
        self.pool.submit(job, self._clock())
        if self._notes_transactions:
            self._note(job, len(job.batch.transactions))

    def _note(self, job: Job, n_transactions: int) -> None:
        job.first_transaction = self._n_transactions + 1
        self._n_transactions += n_transactions

    def _note_alone(self, job: Job, event: Transaction) -> None:
        if self._notes_transactions:
            self._note(job, 1)
        job.alone = Alone(event.xid, event.commit_lsn, event.commit_time_us)


#: Seconds for which a batch stays open at most while tables are read ahead: the target may take longer to answer.
_HELD_S = 1.0


class Admission:
    """Asked by intake's task only; the fields say who else writes them."""

    def __init__(self, batcher: Batcher, copied: Copied, two_phase: TwoPhase, state: SlotState) -> None:
        """Start with nothing admitted, and no hold.

        Args:
            batcher: whose open batch is closed before something waits, and whose reader stops then.
            copied: decides from where on announced relations are applied.
            two_phase: the prepared transactions.
            state: the target's state at the start.
        """
        self._reader = batcher.reader
        self.batcher = batcher
        self._tables = batcher.tables
        self.copied = copied
        self._awaits_copy = False
        self.two_phase = two_phase
        self._state = state
        # True once transactions end after everything in the state.
        self._is_past_state = False
        self._log = get_logger()
        #: Read by intake and requests; requests close and open it by `hold_at` and `let_pass`.
        self.hold = Hold()
        self._hold_moved = asyncio.Event()
        #: Changes that are left out, because a copy holds or will hold them. Updated by `copied`. Read by requests and
        #: gauges.
        self.starts = copied.starts

    @property
    def admits_runs(self) -> bool:
        """Return whether plain transactions need no other question than `is_plain`: no table is special."""
        plans = self._tables.plans
        return not (plans.may_be_serial or self.starts.apart)

    def is_plain(self, transaction: Transaction) -> bool:
        """Return whether a transaction is whole, announces nothing and cannot be refused or committed here already."""
        plans = self._tables.plans
        return (
            transaction.event is None
            and not transaction.relations
            and not transaction.has_ddl
            and transaction.is_first
            and transaction.is_last
            and not self._may_be_done(transaction)
            and (not plans.refused or are_planned(transaction, plans))
        )

    def _may_be_done(self, transaction: Transaction) -> bool:
        """Return whether a whole transaction must be looked up in the state; never again after the last one in it."""
        if self._is_past_state:
            return False
        self._is_past_state = transaction.end_lsn > self._state.high_lsn
        return not self._is_past_state

    def is_done(self, transaction: Transaction) -> bool:
        """Return whether a re-sent transaction is committed here; of a large one only the commit LSN is known early."""
        if self.is_prepared(transaction.event):
            return True
        if transaction.is_first and transaction.is_last:
            return self.is_applied(transaction.end_lsn)
        # No commit record straddles the watermark: it is the end of another one, or of a keep-alive between them.
        return transaction.commit_lsn < self._state.low_lsn

    def is_applied(self, end_lsn: int) -> bool:
        """Return whether the transaction that ends at an LSN was committed here before the start."""
        return self._state.is_applied(end_lsn)

    def is_prepared(self, message: object) -> bool:
        """Return whether a transaction that comes again was prepared here before (trap T-57)."""
        return isinstance(message, BeginPrepare | Prepare | StreamPrepare) and self.two_phase.is_prepared(message)

    async def look_up(self, transaction: Transaction, *, was_in_progress: bool = False) -> None:
        """Have plans ready for the relations that a transaction announces, before it is read.

        The open batch also takes new tables, because a thousand of them would otherwise be a thousand small batches. It
        waits for them only in a backlog, and while they are being read ahead. The first one is not kept back, so that a
        backlog's first rows come soon.

        A relation already in force is announced again with every range of WAL, and a root with each of its partitions.
        It needs no query, because the watch soon finds any change of the target's table.

        Args:
            transaction: that one.
            was_in_progress: they were announced some time ago, while their transaction was: they are read again.
        """
        relations, commit_lsn = transaction.relations, transaction.commit_lsn
        others = relations if was_in_progress else self._not_in_force(relations)
        if others and self.batcher.is_backlog:
            self.batcher.hold_open(_HELD_S)
            await self._tables.read_ahead(others)
            self.batcher.hold_open(0.0)
        if not self.copied.is_settled(relations, commit_lsn) or not self._tables.resolve_new(others):
            self.batcher.close_open()
            await self._resolve(others)
            with self._reader.waiting("what is known of a new table"):
                await self.copied.settle(relations, commit_lsn)
            self.batcher.plans_changed()
        elif others:
            self.batcher.close_first()
        for relation in relations:
            self.starts.announce(relation)

    async def settle_made(self, relations: Sequence[Relation]) -> None:
        """Settle from where on relations are applied that a transaction announces which may make their tables itself.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be asked.
        """
        self.batcher.close_open()
        with self._reader.waiting("what is known of a new table"):
            await self.copied.settle(relations, may_be_missing=True)
        for relation in relations:
            self.starts.announce(relation)

    async def announce(self, relations: Sequence[Relation]) -> None:
        """Put relations in force for the next changes."""
        await self._resolve(relations)
        with self._reader.waiting("what is known of a new table"):
            await self.copied.settle(relations)
        self.batcher.announce(relations)
        for relation in relations:
            self.starts.announce(relation)

    def _not_in_force(self, relations: Sequence[Relation]) -> list[Relation]:
        """Return the relations to plan, and have the watch look at the others."""
        found = [relation for relation in relations if not self._tables.is_in_force(relation)]
        if len(found) < len(relations):
            self._tables.is_in_doubt.set()
        return found

    async def _resolve(self, relations: Sequence[Relation]) -> None:
        with self._reader.waiting("the target's catalogue"):
            await self._tables.resolve(relations)

    async def wait_for_gap(self) -> None:
        """Have the tables wait of which changes are missing, because a publication was, before anything more is taken.

        The warning comes once: with what is taken the watermark moves past the changes that it is about.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be asked.
        """
        self.batcher.close_open()
        stream = self._reader.stream
        with self._reader.waiting("what is known of the publications"):
            while (lsn := stream.gap_lsn) is not None:
                await self.copied.look(gap_lsn=lsn)
                stream.forget_gap(lsn)

    async def wait_at_hold(self, transaction: Transaction) -> None:
        """Wait until a transaction may pass that is held."""
        self.batcher.close_open()
        self._reader.stop()
        with self._reader.waiting("a snapshot"):
            try:
                while self.hold.holds(transaction):
                    self.hold.is_reached = True
                    self._hold_moved.clear()
                    await self._hold_moved.wait()
            finally:
                self.hold.is_reached = False

    async def wait_until_hold_moves(self, limit_s: float) -> None:
        """Return when the hold was closed, moved or opened, or after some seconds."""
        self._hold_moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._hold_moved.wait()

    def hold_at(self, lsn: int) -> None:
        """Let transactions pass whose commit record lies before an LSN, and nothing later."""
        self.hold.close(lsn)
        self._hold_moved.set()

    def let_pass(self) -> None:
        """Let everything pass."""
        self.hold.open()
        self._hold_moved.set()

    async def without_skipped(self, transaction: Transaction) -> Transaction:
        """Return the part of a transaction that is to be applied, as soon as every table that it needs is copied."""
        while (name := self.starts.waits_for(transaction)) is not None:
            await self._wait_for_copy(name, transaction.commit_lsn)
        return self.starts.without_skipped(transaction)

    async def kept_of(self, relations: Sequence[Relation], commit_lsn: int) -> Callable[[Transaction], Transaction]:
        """Return a function that drops a streamed transaction's skipped changes, once all its tables are copied."""
        while (name := self.starts.copying_of(relations, commit_lsn)) is not None:
            await self._wait_for_copy(name, commit_lsn)
        return self.starts.kept_at(commit_lsn)

    @property
    def stands_at_copy(self) -> bool:
        """Return whether nothing is taken, be it within a large transaction, before there is news about copies."""
        return self._awaits_copy and not self.copied.changed.is_set()

    async def _wait_for_copy(self, name: Name, commit_lsn: int) -> None:
        """Wait until there is news about copies."""
        self.batcher.close_open()
        self._reader.stop()
        self._log.info("table_awaited", relation=".".join(name), commit_lsn=format_lsn(commit_lsn))
        self.copied.changed.clear()
        self._awaits_copy = True
        try:
            with self._reader.waiting("a copy"):
                await self.copied.changed.wait()
        finally:
            self._awaits_copy = False
