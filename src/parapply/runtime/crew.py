"""The batches in flight, the workers, and whose turn it is to commit. Starts no task and does no I/O.

Dependencies say when a batch may start, the commit order says when it may commit. The head, the earliest batch that has
not committed, has the turn, and always a worker (trap T-30): ready batches are given out in source order, and what a
blocked batch waits for has a worker or is earlier still. So the last commit before a batch frees a worker for it.
"""

from __future__ import annotations

import asyncio
import heapq
from enum import Enum
from typing import TYPE_CHECKING

from parapply import probes
from parapply.plan.dependencies import Scheduler
from parapply.plan.watermark import Watermark

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.plan.dependencies import Wait
    from parapply.runtime.job import Job


class Turn(Enum):
    """What a worker is told when it asks for its turn to commit."""

    COMMIT = "commit"  # every earlier batch has committed
    YIELD = "yield"  # the head waits for a lock of this one: roll back, then ask again


class Crew:
    """Written by intake (submit), by the workers (everything else) and by the stall check (yield_to_head)."""

    def __init__(self, low_lsn: int, on_change: Callable[[], None], on_committed: Callable[[Job], None]) -> None:
        """Start with nothing in flight.

        Args:
            low_lsn: everything up to here is committed on the target.
            on_change: called when a worker became idle or a batch committed.
            on_committed: called with each committed job.
        """
        self.watermark = Watermark(low_lsn)
        self._scheduler = Scheduler()
        self._jobs: dict[int, Job] = {}
        self._ready: list[int] = []  # heap of batch numbers that may start
        self._assigned: set[int] = set()
        self._idle: list[asyncio.Future[Job]] = []
        self._turns: dict[int, asyncio.Future[Turn]] = {}
        #: Called by whoever makes room: a worker became idle, a batch committed, a piece was applied.
        self.changed = on_change
        self._on_committed = on_committed
        #: Bytes of changes held in batches not committed and in pieces not applied: `intake` and the worker of a large
        #: transaction count its pieces in and out. Read by intake.
        self.held_bytes = 0

    def __len__(self) -> int:
        """Return the number of batches not committed."""
        return len(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is in flight."""
        return not self._jobs

    @property
    def wants_work(self) -> bool:
        """Tell whether a worker is idle and no closed batch waits for one."""
        return bool(self._idle) and len(self._assigned) == len(self._jobs)

    @property
    def head(self) -> Job | None:
        """Return the earliest job that has not committed."""
        batch = self._scheduler.head
        return self._jobs[batch.seq] if batch is not None else None

    def jobs(self) -> list[Job]:
        """Return the jobs not committed, in source order."""
        return [self._jobs[batch.seq] for batch in self._scheduler.batches()]

    def waits_of(self, job: Job) -> tuple[Wait, ...]:
        """Return what a job waits for before it may start."""
        return self._scheduler.waits_of(job.batch)

    def waiting_jobs(self) -> list[Job]:
        """Return the jobs no worker has, in source order."""
        return [job for job in self.jobs() if job.batch.seq not in self._assigned]

    def submit(self, job: Job, now_s: float) -> None:
        """Take a closed batch, later than all before it."""
        probes.probe(probes.BATCH_READY)
        batch = job.batch
        job.submitted_s = job.freed_s = now_s
        self._jobs[batch.seq] = job
        if job.pieces is None:
            self.held_bytes += batch.size_bytes
            self.watermark.open(batch.end_lsn)
        if self._scheduler.add(batch):
            heapq.heappush(self._ready, batch.seq)
            job.waited_for = batch.late_for
        else:
            job.waited_for = self._scheduler.waits_of(batch)[-1]
        self._assign()

    async def next_job(self) -> Job:
        """Wait for a batch that may start; called by a worker that has none."""
        waiter: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        self._assign()
        if not waiter.done():
            self.changed()
        try:
            return await waiter
        finally:
            if waiter in self._idle:
                self._idle.remove(waiter)

    def _assign(self) -> None:
        while self._idle and self._ready:
            seq = heapq.heappop(self._ready)
            self._assigned.add(seq)
            self._idle.pop().set_result(self._jobs[seq])

    async def turn(self, job: Job) -> Turn:
        """Wait until a job may commit, or must yield to the head; a yield is answered once."""
        seq = job.batch.seq
        if self._has_turn(seq):
            return Turn.COMMIT
        if job.must_yield:
            job.must_yield = False
            return Turn.YIELD
        turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._turns[seq] = turn
        try:
            return await turn
        finally:
            del self._turns[seq]

    async def head_turn(self, job: Job) -> None:
        """Wait until every earlier batch has committed, holding nothing on the target meanwhile."""
        while await self.turn(job) is Turn.YIELD:
            pass

    def _has_turn(self, seq: int) -> bool:
        head = self._scheduler.head
        return head is not None and head.seq == seq

    def yield_to_head(self, job: Job) -> bool:
        """Make a job roll back and wait for its turn; False if it is the head or is told already."""
        if self._has_turn(job.batch.seq) or job.must_yield:
            return False
        turn = self._turns.get(job.batch.seq)
        if turn is not None and not turn.done():
            turn.set_result(Turn.YIELD)
        else:
            job.must_yield = True
        return True

    def ended(self, job: Job) -> None:
        """Register the end LSN of a large transaction, known only now that its last piece has come."""
        self.watermark.open(job.batch.end_lsn)

    def committed(self, job: Job, now_s: float) -> None:
        """Register that the target has acknowledged a job's commit: only now may dependents start (trap T-35)."""
        batch = job.batch
        job.committed_s = now_s
        self.watermark.close(batch.end_lsn)
        del self._jobs[batch.seq]
        self._assigned.discard(batch.seq)
        if job.pieces is None:
            self.held_bytes -= batch.size_bytes
        for freed in self._scheduler.committed(batch):
            self._jobs[freed.seq].freed_s = now_s
            heapq.heappush(self._ready, freed.seq)
        head = self._scheduler.head
        turn = self._turns.get(head.seq) if head is not None else None
        if turn is not None and not turn.done():
            turn.set_result(Turn.COMMIT)
        self._on_committed(job)
        self._assign()
        self.changed()
