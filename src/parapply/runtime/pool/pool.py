"""The batches in flight, the workers, and whose turn it is to commit. Starts no task and does no I/O.

Dependencies say when a batch may start, the commit order says when it may commit: with the order kept the head, the
earliest batch that has not committed, has the turn; relaxed every batch whose late keys are free. The head always has a
worker (trap T-30): ready batches are given out in source order, and what a blocked batch waits for has a worker or is
earlier still. So the last commit before a batch frees a worker for it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply import failpoints
from parapply.plan.scheduler import Scheduler
from parapply.plan.watermark import Watermark
from parapply.runtime.pool.job import LargeJob, StreamJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.plan.batch import Batch
    from parapply.plan.waits import Wait
    from parapply.runtime.pool.job import Job
    from parapply.runtime.pool.streams import StreamBuffer


#: Batches with few changes for each of many tables that have committed, for each further one that may run alongside
#: others. A session takes half a millisecond of the target's CPU to meet a table first, which is worth while where more
#: is to come.
_LEARNT: Final = 2


class CommitTurn(Enum):
    """The answer to a worker that asks for its turn to commit."""

    COMMIT = "commit"  # whatever must have committed before it has
    YIELD = "yield"  # an earlier one waits for a lock of this one: roll back, then become the head first
    GIVE_BACK = "give back"  # others could use the worker: roll back, then `give_back` the job


class Released(Exception):
    """The answer to a worker that asks for a batch and is to leave."""


class _Asking(NamedTuple):
    """A worker that waits for its answer."""

    told: asyncio.Future[CommitTurn]
    needs_head: bool


class WorkerPool:
    """Written by intake (submit), by the workers (everything else) and by the stall check (yield_to)."""

    def __init__(
        self,
        low_lsn: int,
        on_change: Callable[[], None],
        on_committed: Callable[[Job], None],
        *,
        is_relaxed: bool = False,
        max_followers: int = 0,
    ) -> None:
        """Start with nothing in flight.

        Args:
            low_lsn: everything up to here is committed on the target.
            on_change: called when a worker became idle or a batch committed.
            on_committed: called with each committed job.
            is_relaxed: independent batches commit in any order.
            max_followers: workers at most that may follow transactions in progress; one must be left for the head.
        """
        self.watermark = Watermark(low_lsn)
        self.is_relaxed = is_relaxed
        self._scheduler = Scheduler(is_relaxed=is_relaxed)
        self._jobs: dict[int, Job] = {}
        self._ready: list[int] = []  # heap of batch numbers that may start
        self._assigned: set[int] = set()
        #: Batches like these that have committed.
        self._n_learnt = 0
        #: Batches that no worker may start for now: they wait to be the head, or for a repair.
        self._parked: set[int] = set()
        self._idle: list[asyncio.Future[Job]] = []
        self._turns: dict[int, _Asking] = {}
        #: Written by `WorkerTasks`, too.
        self.max_followers = max_followers
        #: Workers that are there: counted by `WorkerTasks` as they come, and here as they leave.
        self.n_workers = 0
        #: How many of them are to leave.
        self._n_to_release = 0
        #: Jobs that follow a transaction in progress or will, and those of them without a worker yet.
        self._following: list[StreamJob] = []
        self._to_follow: deque[StreamJob] = deque()
        self._last_seq = 0
        #: Called when there is room: a worker became idle, a batch committed, a piece was applied.
        self.changed = on_change
        self._on_committed = on_committed
        self._held_bytes = 0

    def __len__(self) -> int:
        """Return the number of batches not committed."""
        return len(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is in flight."""
        return not self._jobs

    @property
    def held_bytes(self) -> int:
        """Return the bytes of changes held in batches not committed and in pieces not applied."""
        return self._held_bytes

    def count_in(self, size_bytes: int) -> None:
        """Count changes in: of a batch, or of a piece that comes; intake and workers do so with pieces."""
        self._held_bytes += size_bytes

    def count_out(self, size_bytes: int) -> None:
        """Count changes out: they are applied, or dropped. Each piece that was counted in must come here once."""
        self._held_bytes -= size_bytes

    def is_done_but_large(self, *, is_open: bool) -> bool:
        """Tell whether nothing is in flight that can be finished.

        Args:
            is_open: a large transaction has not come whole; it is always the last.
        """
        head = self.head
        return head is None or (is_open and isinstance(head, LargeJob))

    def wants(self, batch: Batch) -> bool:
        """Tell whether a worker is idle and no closed batch waits for one; with the order kept, none waits at all.

        Args:
            batch: the open one, which might be given to that worker.
        """
        has_room = bool(self._idle) and (self.is_relaxed or len(self._assigned) == len(self._jobs))
        return has_room and self._may_start(batch)

    @property
    def is_pressed(self) -> bool:
        """Tell whether a batch could start if there were one more worker."""
        return bool(self._ready) and not self._idle

    @property
    def n_blocked(self) -> int:
        """Return how many batches wait for another one to commit before they start."""
        return len(self._jobs) - len(self._assigned) - len(self._ready)

    @property
    def next_blocked(self) -> Job | None:
        """Return the earliest job that waits for another one to commit before it starts."""
        blocked = (one for one in self._scheduler.batches() if self._scheduler.waits_of(one))
        return next((self._jobs[one.seq] for one in blocked if one.seq not in self._assigned), None)

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

    def late_waits_of(self, job: Job) -> tuple[Wait, ...]:
        """Return what the changes of a job's late keys wait for."""
        return self._scheduler.late_waits_of(job.batch)

    def waiting_jobs(self) -> list[Job]:
        """Return the jobs no worker has, in source order."""
        return [job for job in self.jobs() if job.batch.seq not in self._assigned]

    @property
    def may_follow(self) -> bool:
        """Tell whether one more transaction in progress may have a worker."""
        return len(self._following) < self.max_followers

    def follow(self, job: StreamJob) -> None:
        """Give a job that has no place in the order yet the next free worker."""
        self._following.append(job)
        self._to_follow.append(job)
        self._assign()

    def follower_of(self, stream: StreamBuffer) -> StreamJob | None:
        """Return the job that follows a stream or will; None if none does."""
        return next((job for job in self._following if job.stream is stream), None) if stream.is_followed else None

    def leave(self, job: StreamJob) -> None:
        """Drop a job whose worker follows no more; the job was not submitted."""
        self._following.remove(job)
        self.changed()

    def has_passed(self, seq: int) -> bool:
        """Tell whether every batch up to a number has committed, the one included."""
        head = self._scheduler.head
        return self._last_seq >= seq and (head is None or head.seq > seq)

    def submit(self, job: Job, now_s: float) -> None:
        """Take a closed batch, later than all before it; a worker may follow it already."""
        failpoints.probe(failpoints.BATCH_READY)
        batch = job.batch
        job.times.submitted_s = job.times.freed_s = now_s
        self._last_seq = batch.seq
        self._jobs[batch.seq] = job
        if isinstance(job, StreamJob):
            if job in self._to_follow:
                self._to_follow.remove(job)  # no worker has it yet: it is given out like any other
            elif job in self._following:
                self._assigned.add(batch.seq)
                job.stream.news.set()
        if not isinstance(job, LargeJob):
            self.count_in(batch.size_bytes)
            self.watermark.open(batch.end_lsn)
        if self._scheduler.add(batch):
            self._start(batch.seq)
            waits = self._scheduler.late_waits_of(batch)
        else:
            waits = self._scheduler.waits_of(batch)
        job.waited_for = waits[-1] if waits else None
        self._assign()

    def release(self, n_workers: int) -> None:
        """Let so many workers leave, each when it has nothing in hand, the longest idle first; 0: none from now on.

        None leaves while the head has no worker: then the one that commits before a batch takes that batch, as ever
        (trap T-30), however few there are.
        """
        self._n_to_release = n_workers
        while self._idle and self._may_release():
            self._count_released()
            self._idle.pop(0).set_exception(Released())

    def _may_release(self) -> bool:
        head = self._scheduler.head
        if not self._n_to_release or (head is not None and head.seq not in self._assigned):
            return False
        # More than half of those that stay must be free for what has its place in the order.
        return 2 * len(self._following) < self.n_workers - 1

    def _count_released(self) -> None:
        self._n_to_release -= 1
        self.n_workers -= 1

    async def next_job(self) -> Job:
        """Wait for a batch that may start; called by a worker that has none.

        Raises:
            Released: it is to leave.
        """
        if self._may_release():
            self._count_released()
            self._assign()
            raise Released
        waiter: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        self._assign()
        if not waiter.done():
            # This may close the open batch and submit it here and now, which then answers the waiter.
            self.changed()
        try:
            return await waiter
        finally:
            if waiter in self._idle:
                self._idle.remove(waiter)

    def _start(self, seq: int) -> None:
        """Let a batch start that waits for no other, unless a worker has it already."""
        if seq not in self._assigned:
            heapq.heappush(self._ready, seq)

    def _assign(self) -> None:
        while self._idle and self._ready and self._may_start(self._jobs[self._ready[0]].batch):
            seq = heapq.heappop(self._ready)
            self._assigned.add(seq)
            job = self._jobs[seq]
            self._scheduler.started(job.batch)
            self._idle.pop().set_result(job)
        # A follower waits for what came before it: the last idle worker is for a batch that is blocked or parked.
        n_kept = 1 if len(self._assigned) < len(self._jobs) else 0
        while len(self._idle) > n_kept and self._to_follow:
            self._idle.pop().set_result(self._to_follow.popleft())

    def _may_start(self, batch: Batch) -> bool:
        """Tell whether a batch may have one more worker, as far as `_LEARNT` is concerned; the head always may.

        So may all in relaxed order: one that stands at another session's lock must not hold up independent ones.
        """
        if self.is_relaxed or not batch.is_thin or self._scheduler.head is batch:
            return True
        n_learning = sum([self._jobs[seq].batch.is_thin for seq in self._assigned])
        return n_learning <= self._n_learnt // _LEARNT

    def may_commit(self, job: Job) -> bool:
        """Tell whether a job has its turn: it may apply its late keys and commit."""
        return self._scheduler.may_commit(job.batch)

    async def turn(self, job: Job) -> CommitTurn:
        """Wait until a job may commit, or must yield to an earlier one; a yield is answered once."""
        if self._scheduler.may_commit(job.batch):
            return CommitTurn.COMMIT
        return await self._ask(job, needs_head=False)

    async def _ask(self, job: Job, *, needs_head: bool) -> CommitTurn:
        if job.must_yield:
            job.must_yield = False
            return CommitTurn.YIELD
        seq = job.batch.seq
        asking = self._turns[seq] = _Asking(asyncio.get_running_loop().create_future(), needs_head)
        try:
            return await asking.told
        finally:
            del self._turns[seq]

    async def head_turn(self, job: Job) -> None:
        """Wait until every earlier batch has committed, holding nothing on the target."""
        while self._scheduler.head is not job.batch:
            await self._ask(job, needs_head=True)

    def yield_to(self, earlier: Job, job: Job) -> bool:
        """Make a job roll back and become the head first; False if it is not later or was answered already.

        A job that follows a transaction in progress has no number yet: it is later than all.
        """
        if 0 < job.batch.seq <= earlier.batch.seq or job.must_yield:
            return False
        if isinstance(job, StreamJob) and job in self._following:
            give_way(job)
            return True
        asking = self._turns.get(job.batch.seq)
        if asking is None:
            job.must_yield = True
        elif not asking.told.done() and not asking.needs_head:
            asking.told.set_result(CommitTurn.YIELD)
        else:
            return False
        return True

    def wants_back(self, job: Job) -> bool:
        """Ask for the worker of a job that waits for the holders of its late keys, while others could start.

        False if no job needs it, or this one is about to continue.
        """
        asking = self._turns.get(job.batch.seq)
        if not self._ready or asking is None or asking.needs_head or asking.told.done():
            return False
        if not self._scheduler.late_waits_of(job.batch):
            return False
        asking.told.set_result(CommitTurn.GIVE_BACK)
        return True

    def give_back(self, job: Job) -> None:
        """Take a job back whose worker has rolled it back; it starts again when what it waits for has committed."""
        seq = job.batch.seq
        self._assigned.discard(seq)
        if self._scheduler.give_back(job.batch):
            heapq.heappush(self._ready, seq)
        # A blocked batch does not count against the queue limit, so there is room now; no other event announces it.
        self.changed()

    def park(self, job: Job) -> None:
        """Take a job back whose worker has rolled it back: it starts again when it becomes the head, or at `unpark`."""
        seq = job.batch.seq
        self._assigned.discard(seq)
        self._parked.add(seq)
        self.changed()

    def unpark(self, job: Job) -> None:
        """Let a parked job start again; nothing happens to one that is not parked."""
        self._unpark(job.batch.seq)

    def _unpark(self, seq: int) -> None:
        if seq in self._parked:
            self._parked.discard(seq)
            heapq.heappush(self._ready, seq)
            self._assign()

    def ended(self, job: LargeJob) -> None:
        """Register the end LSN of a large transaction, known only now that its last piece has come."""
        self.watermark.open(job.batch.end_lsn)

    def committed(self, job: Job, now_s: float) -> None:
        """Register that the target has acknowledged a job's commit: only now may dependents start (trap T-35)."""
        batch = job.batch
        job.times.committed_s = now_s
        self.watermark.close(batch.end_lsn)
        del self._jobs[batch.seq]
        self._assigned.discard(batch.seq)
        if isinstance(job, StreamJob) and job in self._following:
            self._following.remove(job)
        if not isinstance(job, LargeJob):
            self.count_out(batch.size_bytes)
        self._n_learnt += batch.is_thin
        freed = self._scheduler.committed(batch)
        for ready in freed.to_start:
            self._jobs[ready.seq].times.freed_s = now_s
            self._start(ready.seq)
        for following in self._following:
            following.stream.news.set()
        for ready in freed.to_commit:
            self._tell(ready.seq)
        if self.is_relaxed and (head := self._scheduler.head) is not None:
            self._tell(head.seq)
            self._unpark(head.seq)
        self._on_committed(job)
        # A piece that was not counted out would take its part of the memory limit until the epoch ends.
        assert self._held_bytes == 0 or self._jobs or self._following, "nothing is in flight, and something is held"
        if not batch.is_thin:
            self._assign()  # else the worker that had it, and knows the tables now, comes first: it asks at once
        self.changed()

    def _tell(self, seq: int) -> None:
        """Answer a worker that asks for its turn, if it may commit now."""
        asking = self._turns.get(seq)
        if asking is None or asking.told.done():
            return
        head = self._scheduler.head
        if head is not None and (head.seq == seq or not asking.needs_head):
            asking.told.set_result(CommitTurn.COMMIT)


def give_way(job: StreamJob) -> None:
    """Have the worker that follows a transaction roll back; all of it is applied at the commit."""
    job.must_yield = True
    job.stream.news.set()
