"""From the stream to batches: reads what has come and adds whole transactions to a batch.

A batch closes at its limits, in front of what must not be in it, or when `rhythm.py` says so.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.errors import ParapplyError
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.plan.batch import Batch, Limits
from parapply.plan.starts import Starts
from parapply.plan.steps import check_plans, is_serial
from parapply.runtime.gate import Gate
from parapply.runtime.growth import Growth
from parapply.runtime.job import Job
from parapply.runtime.rhythm import Rhythm
from parapply.wire.messages import BeginPrepare, Prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config import ApplyConfig
    from parapply.model import Relation, Transaction
    from parapply.plan.starts import Name
    from parapply.runtime.crew import Crew
    from parapply.runtime.tables import Tables
    from parapply.runtime.trace import Trace
    from parapply.runtime.unfinished import Unfinished
    from parapply.source.stream import ReplicationStream
    from parapply.target.state import SlotState
    from parapply.wire.assembler import Assembler
    from parapply.wire.frames import Keepalive

#: Bytes read before workers and timers get their turn: some hundred transactions, about two milliseconds.
_DRAIN_BYTES = 128 * 1024
#: Pieces of a large transaction that wait for their worker.
_PIECES = 2
#: Batches that may wait for others while independent ones pass them.
_BLOCKED = 128


def _ignore(_keepalive: Keepalive) -> None:
    """Stand in until somebody listens."""


class Intake:
    """All fields are written by its own task, and by the crew's callback through `worker_changed`."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        stream: ReplicationStream,
        assembler: Assembler,
        tables: Tables,
        crew: Crew,
        unfinished: Unfinished,
        *,
        config: ApplyConfig,
        state: SlotState,
        trace: Trace | None = None,
    ) -> None:
        """Start with nothing read.

        Args:
            stream: of the slot.
            assembler: new.
            tables: for plans.
            crew: gets the batches.
            unfinished: takes what does not simply come whole.
            config: limits.
            state: what the target had at the start.
            trace: told of every transaction once it is in the crew's hands; None where nobody wants to know.
        """
        self._stream = stream
        self._assembler = assembler
        self._tables = tables
        self._crew = crew
        self._unfinished = unfinished
        self._config = config
        self._state = state
        self._trace = trace
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._clock = loop.time
        self._readable = asyncio.Event()
        self._room = asyncio.Event()
        self._pause_over = asyncio.Event()
        self._log = get_logger()
        self._seq = 0
        self._building: Job | None = None
        self._large: Job | None = None
        self._plans_now = dict(tables.plans.current)
        self._rhythm = Rhythm(crew, config, self._close)
        #: Told of every commit by the epoch.
        self.growth = Growth(Limits(config.max_batch_transactions, config.max_batch_changes, config.max_batch_bytes))
        self._limits = self.growth.limits
        #: What comes now ends behind everything in the state.
        self._is_past_state = False
        self._is_told_full = False
        #: Batches closed ahead of the workers: enough that none waits for the leader, few enough to stay small.
        self._ahead = config.workers + 2
        #: When bytes last came. Read by progress, which takes a silent publisher for gone.
        self.heard_s = loop.time()
        #: Whether nobody listens: memory or the queue is full, or intake is busy. Read by progress.
        self.is_paused = False
        #: What it waits for outside of this daemon; empty while it works or waits for the workers. Read by the pulse.
        self.waits_for = ""
        #: Highest LSN received: end of a transaction or of a keep-alive. Read by progress.
        self.received_lsn = state.lowest_lsn
        #: End of the last transaction that was taken, or is committed from before. Read by requests.
        self.taken_lsn = state.highest_lsn
        #: Whether transactions are in hand that are in no batch yet. Read by requests.
        self.is_taking = False
        #: Closed and opened by requests.
        self.gate = Gate()
        #: Which changes are left out, because a copy holds or will hold them. Updated by requests, which then sets the
        #: event.
        self.starts = Starts()
        self.starts_changed = asyncio.Event()
        #: Told of every keep-alive, after what came before it was taken; progress puts itself here.
        self.on_keepalive: Callable[[Keepalive], None] = _ignore

    @property
    def holds_nothing(self) -> bool:
        """Tell whether every byte read is in the crew's hands or behind it."""
        return self._building is None and self._large is None and not self._assembler.is_open

    @property
    def building_is_empty(self) -> bool:
        """Tell whether no batch is being filled."""
        return self._building is None

    @property
    def building_bytes(self) -> int:
        """Return the bytes of changes in the batch that is being filled."""
        return self._building.batch.size_bytes if self._building else 0

    @property
    def is_inside_large(self) -> bool:
        """Tell whether a large transaction was begun that has not been received whole."""
        return self._large is not None

    @property
    def oldest_commit_time_us(self) -> int | None:
        """Return the publisher's commit time of the oldest transaction not committed here, None if there is none."""
        head = self._crew.head or self._building
        return head.batch.first_commit_time_us if head else None

    async def run(self) -> None:
        """Read until cancelled.

        Raises:
            SourceLost: the stream ended. What was received whole is in the crew's hands.
            ProtocolError: the stream cannot be read.
            TargetRefused, TargetLost: a published table cannot be applied.
        """
        self._stream.resume_reading(self._bytes_came)
        try:
            while True:
                self._go_on_reading()
                self.waits_for = "the publisher"
                await self._readable.wait()
                self.waits_for = ""
                self._readable.clear()
                frames = self._stream.drain(_DRAIN_BYTES)
                self.heard_s = self._clock()
                self.is_taking = True
                await self._take_all(self._assembler.push(frames))
                self.is_taking = False
                keepalive, self._stream.keepalive = self._stream.keepalive, None
                if keepalive is not None:
                    self.received_lsn = max(self.received_lsn, keepalive.end_lsn)
                    self.on_keepalive(keepalive)
                self._close_if_due()
                await self._wait_for_room()
                if self._stream.is_drained:
                    await self._pause()
        finally:
            self.waits_for = "nobody: it has ended"
            self._stream.pause_reading()
            self.finish()

    def _bytes_came(self) -> None:
        """Be told that there is something to read; again and again, until it is read or nobody asks for it."""
        if self._readable.is_set():
            # Busy elsewhere: with a table's catalogue, or with a large transaction whose worker waits for a lock.
            self._stop_reading()
        self._readable.set()

    def _stop_reading(self) -> None:
        self.is_paused = True
        self._stream.pause_reading()

    def _go_on_reading(self) -> None:
        if self.is_paused:
            self.is_paused = self._is_told_full = False
            # Nobody listened, so nobody was silent.
            self.heard_s = self._clock()
            self._stream.resume_reading(self._bytes_came)

    def worker_changed(self) -> None:
        """Be told by the crew that a worker is idle or a batch has committed."""
        self._room.set()
        if self._crew.is_idle:
            self._pause_over.set()
        self._close_if_due()

    def finish(self) -> None:
        """Hand over what is whole; what is not will be sent again."""
        self._rhythm.disarm()
        self.close_open()
        self._unfinished.close()

    async def _take_all(self, transactions: list[Transaction]) -> None:
        at = 0
        while at < len(transactions):
            if self.gate.lets_pass(transactions):
                at = self._take_run(transactions, at)
                if at == len(transactions):
                    break
            elif self.gate.holds(transactions[at]):
                self.close_open()
                self._stop_reading()
                self.waits_for = "a snapshot"
                await self.gate.wait(transactions[at])
                self.waits_for = ""
            await self._take(transactions[at])
            at += 1

    def _take_run(self, transactions: list[Transaction], at: int) -> int:
        """Add transactions from an index on while nothing about them is special; return the index of one that is."""
        plans = self._tables.plans
        if plans.refused or plans.may_be_serial or self.starts.is_active:
            return at
        while at < len(transactions):
            first = transactions[at]
            if first.event is not None or first.relations or not (first.is_first and first.is_last):
                break
            if self._may_be_done(first):
                break
            job = self._building
            if job is None:
                job = self._building = self.new_job()
            try:
                at = job.batch.add_run(transactions, at, plans, self._limits)
            except ParapplyError:
                # Half a transaction must not reach a worker: all of the batch is sent again.
                self._building = None
                raise
            job.received_s = self.heard_s
            if self._trace is not None:
                self._trace.arrived(job)
            self.received(transactions[at - 1])
            if job.batch.is_full(self._limits):
                self._close()
        return at

    def received(self, transaction: Transaction) -> None:
        """Take note of where the stream stands, and how late it is."""
        self.received_lsn = transaction.end_lsn
        self.taken_lsn = max(self.taken_lsn, transaction.end_lsn)
        self._rhythm.received(transaction)

    async def _take(self, transaction: Transaction) -> None:
        event = transaction.event
        if event is not None and not isinstance(event, BeginPrepare | Prepare):
            await self._unfinished.take(transaction, self)
            return
        if transaction.relations:
            await self._look_up(transaction.relations)
        if self._is_done(transaction):
            self._read_announcements(transaction)
            if isinstance(event, Prepare) and self._unfinished.is_prepared(event):
                self._unfinished.record_prepared(transaction, event, self)
            return
        if self.starts.is_active:
            transaction = await self._without_skipped(transaction)
        if not (transaction.is_first and transaction.is_last):
            await self._take_piece(transaction)
            return
        check_plans(transaction, self._tables.plans)
        self.received(transaction)
        if isinstance(event, Prepare) or is_serial(transaction, self._tables.plans):
            self.close_open()
            self._add(transaction)
            if self._building is not None and isinstance(event, Prepare):
                self._building.prepare = event
                self._building.batch.is_barrier = True
            self._close()
            return
        self._add(transaction)
        if self._building is not None and self._building.batch.is_full(self._limits):
            self._close()

    async def _look_up(self, relations: Sequence[Relation]) -> None:
        self.close_open()
        self.waits_for = "the target's catalogue"
        await self._tables.resolve(relations)
        self.waits_for = ""
        self._plans_now = dict(self._tables.plans.current)
        for relation in relations:
            self.starts.announce(relation)

    async def take_whole(self, transaction: Transaction) -> None:
        """Take a transaction like any other."""
        await self._take(transaction)

    async def announce(self, relations: Sequence[Relation]) -> None:
        """Put relations in force for what comes next.

        Raises:
            TargetLost: the connection ended.
        """
        self.waits_for = "the target's catalogue"
        await self._tables.resolve(relations)
        self.waits_for = ""
        for relation in relations:
            self._tables.plans.announce(relation)
            self.starts.announce(relation)
        self._plans_now = dict(self._tables.plans.current)

    def is_apart(self, relations: Sequence[Relation], lsn: int) -> bool:
        """Tell whether changes of relations may be left out, or must wait for a copy, in a commit at an LSN."""
        return self.starts.is_apart(relations, lsn)

    async def kept_of(self, relations: Sequence[Relation], commit_lsn: int) -> Callable[[Transaction], Transaction]:
        """Return what takes out of a streamed transaction what is not applied, when every table is there it needs."""
        while (name := self.starts.copying_of(relations, commit_lsn)) is not None:
            await self._wait_for_copy(name, commit_lsn)
        return self.starts.kept_at(commit_lsn)

    @property
    def last_seq(self) -> int:
        """Return the number of the last batch begun, closed or not."""
        return self._seq

    def close_open(self) -> None:
        """Close the batch that is open, if one is."""
        if self._building is not None:
            self._close()

    def submit(self, job: Job, event: Transaction) -> None:
        """Hand over a job that an event has ended, and whose batch is complete."""
        # A worker that has followed it began before it had come.
        job.received_s = self.heard_s
        self._crew.submit(job, self._clock())
        if self._trace is not None:
            self._trace.alone(job, event)

    async def _without_skipped(self, transaction: Transaction) -> Transaction:
        """Return what is to be applied of a transaction, as soon as every table is there that it needs."""
        while (name := self.starts.waits_for(transaction)) is not None:
            await self._wait_for_copy(name, transaction.commit_lsn)
        return self.starts.without_skipped(transaction)

    async def _wait_for_copy(self, name: Name, commit_lsn: int) -> None:
        """Wait until something is known about copies that was not known before."""
        self.close_open()
        self._stop_reading()
        self._log.info("table_awaited", relation=".".join(name), commit_lsn=format_lsn(commit_lsn))
        self.starts_changed.clear()
        self.waits_for = "a copy"
        await self.starts_changed.wait()
        self.waits_for = ""

    def _add(self, transaction: Transaction) -> None:
        job = self._building
        if job is None:
            job = self._building = self.new_job()
        try:
            job.batch.add(transaction, self._tables.plans)
        except ParapplyError:
            # Half a transaction must not reach a worker: all of the batch is sent again.
            self._building = None
            raise
        job.received_s = self.heard_s
        if self._trace is not None:
            self._trace.arrived(job)
        if transaction.relations:
            self._plans_now = dict(self._tables.plans.current)

    def new_job(self) -> Job:
        """Return a job with a batch behind all others."""
        self._seq += 1
        job = Job(Batch(self._seq, self._config.table_lock_threshold), self._plans_now)
        job.received_s = self.heard_s
        return job

    def _may_be_done(self, transaction: Transaction) -> bool:
        """Tell whether a whole transaction must be looked up in the state; never again after the last one in it."""
        if self._is_past_state:
            return False
        self._is_past_state = transaction.end_lsn > self._state.highest_lsn
        return not self._is_past_state

    def _is_done(self, transaction: Transaction) -> bool:
        """Tell whether a re-sent transaction is committed here; of a large one only the commit LSN is known early."""
        if self._unfinished.is_prepared(transaction.event):
            return True
        if transaction.is_first and transaction.is_last:
            return self._state.is_applied(transaction.end_lsn)
        # No commit record straddles the watermark: it is the end of another one, or of a keep-alive between them.
        return transaction.commit_lsn < self._state.lowest_lsn

    def _read_announcements(self, transaction: Transaction) -> None:
        for relation in transaction.relations:
            self._tables.plans.announce(relation)
        self._plans_now = dict(self._tables.plans.current)

    async def _take_piece(self, piece: Transaction) -> None:
        """Hand a piece of a large transaction to its worker; waits while enough of them wait there."""
        if piece.is_first:
            self.close_open()
            job = self._large = self.new_job()
            job.pieces = asyncio.Queue(_PIECES)
            job.received_s = self.heard_s
            job.commit_lsn = piece.commit_lsn
            job.batch.is_barrier = job.batch.is_large = True
            job.batch.first_commit_time_us = job.batch.commit_time_us = piece.commit_time_us
            self._crew.submit(job, self._clock())
            if self._trace is not None:
                self._trace.alone(job, piece)
        job = self._large  # type: ignore[assignment]
        assert job is not None, "the pieces of a transaction come one after the other"
        assert job.pieces is not None
        self._read_announcements(piece)
        self._crew.held_bytes += piece.size_bytes
        await job.pieces.put(piece)
        if piece.is_last:
            self.received_lsn = piece.end_lsn
            self.taken_lsn = max(self.taken_lsn, piece.end_lsn)
            job.batch.first_lsn = job.batch.end_lsn = piece.end_lsn
            job.prepare = piece.event if isinstance(piece.event, Prepare) else None
            self._crew.ended(job)
            await job.pieces.put(None)
            # Only now: until the worker can know of the end, a drain must not wait for it.
            self._large = None

    def _close_if_due(self) -> None:
        if self._building is not None:
            self._rhythm.look(self._building.batch.n_changes, self.heard_s)

    def _close(self) -> None:
        self._rhythm.disarm()
        job = self._building
        assert job is not None
        self._building = None
        job.batch.close()
        job.batch.is_fence = self._tables.take_changed()
        job.count_batch()
        self._crew.submit(job, self._clock())
        if self._trace is not None:
            self._trace.batch(job)

    async def _wait_for_room(self) -> None:
        """Stop reading while enough is held: the kernel's buffers fill up and the publisher waits."""
        while not self._has_room():
            self._stop_reading()
            self._room.clear()
            await self._room.wait()
        self._go_on_reading()

    def _has_room(self) -> bool:
        building = self.building_bytes
        if self._crew.held_bytes + building >= self._config.memory_limit_bytes and len(self._crew):
            if not self._is_told_full:
                self._is_told_full = True
                self._log.warning("memory_limit_reached", size_bytes=self._crew.held_bytes + building)
            return False
        # Relaxed, those that wait do not hold up those that need not, up to a number that is still compared fast.
        n_blocked = min(self._crew.n_blocked, _BLOCKED) if self._crew.is_relaxed else 0
        return len(self._crew) - n_blocked < self._ahead

    async def _pause(self) -> None:
        """Let the publisher send more than one message before the next read, unless somebody could apply it at once.

        It ends early when nothing is under way any more.
        """
        pause_s = self._rhythm.pause_s
        if not pause_s:
            return
        self._stream.pause_reading()
        self._pause_over.clear()
        timer = self._loop.call_later(pause_s, self._pause_over.set)
        try:
            await self._pause_over.wait()
        finally:
            timer.cancel()
        self._stream.resume_reading(self._bytes_came)
