"""Permission to start and to commit, in both orders, whatever the workers do."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from hypothesis import event, given
from hypothesis import strategies as st

from parapply.engine.flight import CommitTurn, Flight
from parapply.engine.job import SetJob, StreamJob
from parapply.engine.state import EngineState
from parapply.plan.batch import LEAST_THIN_TABLES, Batch
from parapply.plan.scheduler import Wait, overlaps
from parapply.plan.table_changes import TableChanges
from parapply.runtime.pool.pool import Released, WorkerPool
from parapply.runtime.pool.streams import StreamBuffer, buffer_of
from parapply.vocabulary import WaitKind
from tests.unit.changes_model import PLAIN
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.engine.job import Job


class _Run:
    """A worker pool whose workers take random numbers of steps and sometimes have to yield.

    Some batches are the ends of transactions that a worker follows from an earlier batch on, if one is free.
    """

    def __init__(self, jobs: Sequence[SetJob], n_workers: int, random: Random, *, is_relaxed: bool) -> None:
        self.jobs: list[SetJob | StreamJob] = [
            self._end_of_stream(job) if random.random() < 0.2 else job for job in jobs
        ]
        #: Last batch before the first chunk of what is followed, by the xid of its stream.
        self.after_seqs: dict[int, int] = {}
        self.random = random
        self.pace = random.random()
        self.commits: list[int] = []
        self.running: dict[int, Job] = {}
        self.parked: set[int] = set()
        self.n_idle_calls = 0
        self.n_given_back = 0
        self.n_followed = 0
        self.n_left = 0
        flight = Flight(EngineState(0, 0.0, is_relaxed=is_relaxed), max_followers=n_workers // 2)
        self.pool = WorkerPool(flight)
        self.pool.listen(self)
        self.n_workers = n_workers

    async def run(self) -> None:
        workers = [self._come() for _ in range(self.n_workers)]
        try:
            for at, job in enumerate(self.jobs):
                if self.random.random() < self.pace:
                    await self._steps()
                self._come_or_leave(workers)
                self._follow_some(at)
                if isinstance(job, StreamJob):
                    # The end of one that is no longer followed is a batch like any other.
                    job = self.pool.flight.follower_of(job.stream) or job  # noqa: PLW2901
                    job.batch = self.jobs[at].batch
                    buffer_of(job).end = job.batch.transactions[-1]
                self.pool.submit(job, 0.0)
                self._check_submitted(job)
            async with asyncio.timeout(20):
                while self.pool.flight.state.jobs:
                    await self._steps()
                    self._tell_somebody()
                    self._come_or_leave(workers)
            self.pool.release(0)
            await asyncio.sleep(0)  # those that were let go last see it
        finally:
            for worker in workers:
                worker.cancel()
            results = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(result, (asyncio.CancelledError, Released)) for result in results), results
        self.n_left = sum(isinstance(result, Released) for result in results)
        assert self.pool.flight.state.n_workers == len(workers) - self.n_left

    def _come(self) -> asyncio.Task[None]:
        self.pool.flight.state.n_workers += 1
        self.pool.flight.max_followers = self.pool.flight.state.n_workers // 2
        return asyncio.create_task(self._work())

    def _come_or_leave(self, workers: list[asyncio.Task[None]]) -> None:
        """Have a worker come now and then, or some of them leave when they can."""
        chance = self.random.random()
        if chance < 0.05 and self.pool.flight.state.n_workers < 6:
            workers.append(self._come())
        elif chance < 0.3 and self.pool.flight.state.n_workers > 1:
            self.pool.release(self.random.randrange(self.pool.flight.state.n_workers))
            self.pool.flight.max_followers = self.pool.flight.state.n_workers // 2

    @staticmethod
    def _end_of_stream(job: SetJob) -> StreamJob:
        job.batch.is_barrier = True
        return StreamJob(job.batch, {}, StreamBuffer(job.batch.seq))

    def _follow_some(self, at: int) -> None:
        """Have workers follow transactions that will end later, some of them."""
        for job in self.jobs[at:]:
            if not isinstance(job, StreamJob) or not self.pool.flight.may_follow:
                continue
            stream = buffer_of(job)
            if not stream.is_followed and not stream.why_spilled and self.random.random() < 0.5:
                stream.is_followed = True
                # Its first chunk came after this batch.
                self.after_seqs[stream.xid] = self.jobs[at - 1].batch.seq if at else 0
                self.pool.follow(StreamJob(Batch(0), {}, stream))

    async def _follow(self, job: StreamJob, stream: StreamBuffer) -> bool:
        """Follow a transaction to its end and its turn; False if the worker gave way before the end came."""
        self.n_followed += 1
        while not (
            self.pool.flight.has_passed(self.after_seqs[stream.xid])
            and stream.end
            and not self.pool.flight.waits_of(job)
        ):
            if job.must_yield:
                job.must_yield = False
                stream.stop_following("a test")
                if stream.end is None:
                    self.pool.leave(job)
                    return False
            stream.news.clear()
            await stream.news.wait()
            await self._steps()
        return True

    async def _work(self) -> None:
        while True:
            job = await self.pool.next_job()
            if isinstance(job, StreamJob) and job.stream.is_followed and not await self._follow(job, buffer_of(job)):
                continue
            self._check_start(job)
            self.running[job.batch.seq] = job
            if (
                self.pool.flight.state.is_relaxed
                and not isinstance(job, StreamJob)
                and job.batch.seq not in self.parked
                and self.random.random() < 0.2
            ):
                await self._steps()
                self._park(job)
                continue
            while True:
                await self._steps()
                told = await self.pool.turn(job)
                if told is not CommitTurn.YIELD:
                    break
                job.must_yield = False
                if self.pool.flight.state.is_relaxed and self.pool.flight.state.head is not job:
                    break
                await self.pool.head_turn(job)
            await self._steps()
            if told is CommitTurn.YIELD:
                self._park(job)
                continue
            del self.running[job.batch.seq]
            if told is CommitTurn.GIVE_BACK:
                self.n_given_back += 1
                n_calls = self.n_idle_calls
                self.pool.give_back(job)
                assert self.n_idle_calls > n_calls, "no worker heard that there is room"
            else:
                self._check_commit(job)
                self.pool.committed(job, 0.0)

    def _park(self, job: Job) -> None:
        """Leave a batch that fails: until it is the head, or for a while if it is."""
        self.parked.add(job.batch.seq)
        del self.running[job.batch.seq]
        if self.pool.flight.state.head is job:
            asyncio.get_running_loop().call_soon(self.pool.unpark, job)
        self.pool.park(job)

    def _check_submitted(self, job: Job) -> None:
        waits = self.pool.flight.waits_of(job) or self.pool.flight.late_waits_of(job)
        assert job.waited_for is (waits[-1] if waits else None)

    def _check_start(self, job: Job) -> None:
        assert job.batch.seq not in self.commits
        for earlier in self.pool.flight.state.jobs.values():
            if earlier.batch.seq < job.batch.seq:
                for overlap in overlaps(earlier.batch, job.batch):
                    assert overlap.changes is not None, "a barrier has not committed"
                    assert overlap.keys, "a table's holder has not committed"
                    assert overlap.keys <= overlap.changes.late_keys, "a key's holder has not committed"

    def _check_commit(self, job: Job) -> None:
        if not self.pool.flight.state.is_relaxed:
            assert self.pool.flight.state.head is job, "only the head has the turn"
        for earlier in self.pool.flight.state.jobs.values():
            if earlier.batch.seq < job.batch.seq:
                assert not overlaps(earlier.batch, job.batch), "something it depends on has not committed"

    def _tell_somebody(self) -> None:
        head = self.pool.flight.state.head
        streams = [job.stream for job in self.jobs if isinstance(job, StreamJob)]
        followers = [follower for stream in streams if (follower := self.pool.flight.follower_of(stream))]
        if head is not None and head.batch.seq in self.running and followers and self.random.random() < 0.1:
            self.pool.yield_to(head, self.random.choice(followers))
        if self.pool.flight.state.is_relaxed:
            for job in list(self.running.values()):
                self.pool.wants_back(job)
        if head is not None and head.batch.seq in self.running and self.random.random() < 0.3:
            self.pool.yield_to(head, self.random.choice(list(self.running.values())))

    async def _steps(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)

    def pool_changed(self) -> None:
        self.n_idle_calls += 1

    def batch_committed(self, job: Job) -> None:
        self.commits.append(job.batch.seq)
        self.pool_changed()


class _Listener:
    def __init__(self, changed: Callable[[], None]) -> None:
        self.pool_changed = changed

    def batch_committed(self, job: Job) -> None:
        self.pool_changed()


@given(
    wishes=ops(),
    sizes=st.lists(st.integers(1, 3), max_size=20),
    n_workers=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
    is_relaxed=st.booleans(),
)
def test_all_commit_and_nobody_starts_before_what_it_depends_on(
    *, wishes: list[Op], sizes: list[int], n_workers: int, seed: int, is_relaxed: bool
) -> None:
    """With any number of workers, any timing and any yields the head gets a worker and its turn (traps T-30, T-35).

    Commits come in source order, or relaxed after those that they depend on.
    """
    publisher = Publisher()
    jobs = [SetJob(batch, {}) for batch in batches(assembled(publisher.run(wishes)), publisher.plans, sizes)]
    run = _Run(jobs, n_workers, Random(seed), is_relaxed=is_relaxed)
    asyncio.run(run.run())
    event(f"given back: {min(run.n_given_back, 3)}")
    event(f"followed: {min(run.n_followed, 3)}")
    event(f"left: {min(run.n_left, 3)}")
    assert (sorted(run.commits) if is_relaxed else run.commits) == [job.batch.seq for job in jobs]
    assert run.pool.flight.state.held_bytes == 0
    assert len(run.pool.flight.state.jobs) == 0
    if jobs:
        assert run.pool.flight.state.watermark.low_lsn == jobs[-1].batch.end_lsn


async def test_the_watermark_moves_only_with_the_head() -> None:
    """Only the head commits, so the low LSN is the end of the last commit (trap T-2)."""
    publisher = Publisher()
    wishes = [Op("put", 0, 1), Op("commit", 0), Op("put", 0, 2), Op("commit", 0)]
    jobs = [SetJob(batch, {}) for batch in batches(assembled(publisher.run(wishes)), publisher.plans, [1, 1])]
    lows: list[int] = []
    state = EngineState(0, 0.0)
    pool = WorkerPool(Flight(state))
    for job in jobs:
        pool.submit(job, 0.0)
    for job in jobs:
        assert await pool.next_job() is job
        assert await pool.turn(job) is CommitTurn.COMMIT
        pool.committed(job, 0.0)
        lows.append(state.watermark.low_lsn)
    assert lows == [job.batch.end_lsn for job in jobs]


async def test_a_batch_with_late_keys_starts_at_once_and_names_their_holder() -> None:
    """Only changes of common keys wait, for the turn to commit, which comes after their holder's commit (trap T-35)."""
    publisher = Publisher()
    wishes = [Op("put", 0, 1), Op("commit", 0), Op("put", 0, 1), Op("put", 0, 2), Op("commit", 0)]
    jobs = [SetJob(batch, {}) for batch in batches(assembled(publisher.run(wishes)), publisher.plans, [1, 1])]
    pool = WorkerPool(Flight(EngineState(0, 0.0)))
    for job in jobs:
        pool.submit(job, 0.0)
    assert [pool.flight.waits_of(job) for job in jobs] == [(), ()]
    assert [job.waited_for for job in jobs] == [None, Wait(1, "s.t1", WaitKind.KEY)]
    assert [await pool.next_job() for _ in jobs] == jobs
    turn = asyncio.create_task(pool.turn(jobs[1]))
    assert await pool.turn(jobs[0]) is CommitTurn.COMMIT
    assert not turn.done()
    pool.committed(jobs[0], 0.0)
    assert await turn is CommitTurn.COMMIT
    pool.committed(jobs[1], 0.0)


async def test_t30_a_worker_that_becomes_free_is_not_for_a_follower_while_a_batch_waits_for_one() -> None:
    """A follower waits for what came before it, so it must not take the worker that the next head needs (T-30)."""
    earlier, blocked = SetJob(Batch(1), {}), SetJob(Batch(2), {})
    follower = StreamJob(Batch(0), {}, StreamBuffer(7))
    earlier.batch.end_lsn, blocked.batch.end_lsn = 10, 20
    blocked.batch.is_barrier = True
    pool = WorkerPool(Flight(EngineState(0, 0.0), max_followers=1))
    pool.submit(earlier, 0.0)
    assert await pool.next_job() is earlier
    pool.submit(blocked, 0.0)
    pool.follow(follower)
    pool.committed(earlier, 0.0)
    assert await pool.next_job() is blocked
    assert await pool.next_job() is follower, "nothing is blocked any more"


async def test_t30_the_last_idle_worker_is_kept_for_what_is_blocked() -> None:
    """While a batch has no worker, one that follows takes none that the batch will need; its end makes it a batch."""
    running, blocked = SetJob(Batch(1), {}), SetJob(Batch(2), {})
    follower = StreamJob(Batch(0), {}, StreamBuffer(7))
    running.batch.end_lsn, blocked.batch.end_lsn = 10, 20
    blocked.batch.is_barrier = True
    pool = WorkerPool(Flight(EngineState(0, 0.0), max_followers=1))
    pool.submit(running, 0.0)
    assert await pool.next_job() is running
    pool.submit(blocked, 0.0)
    idle = asyncio.create_task(pool.next_job())
    await asyncio.sleep(0)
    pool.follow(follower)
    assert not idle.done()
    follower.batch = Batch(3)
    follower.batch.end_lsn, follower.batch.is_barrier = 30, True
    pool.submit(follower, 0.0)
    pool.committed(running, 0.0)
    assert await idle is blocked
    pool.committed(blocked, 0.0)
    assert await pool.next_job() is follower, "no worker had it when it ended: it is given out in its turn"


async def test_thin_batches_run_alongside_each_other_as_soon_as_some_have_committed() -> None:
    """Each session that gets one meets its tables first, here one, which pays after 16 changes of each."""
    jobs = _thin_jobs(7)
    pool = WorkerPool(Flight(EngineState(0, 0.0)))
    for job in jobs:
        pool.submit(job, 0.0)
    asking = [asyncio.create_task(pool.next_job()) for _ in range(3)]
    n_running = []
    for job in jobs:
        for _ in range(3):
            await asyncio.sleep(0)
        n_running.append(len(pool.flight.state.jobs) - len(pool.flight.waiting_jobs()))
        pool.committed(job, 0.0)
        asking.append(asyncio.create_task(pool.next_job()))
    for one in asking:
        one.cancel()
    assert n_running == [1, 1, 2, 2, 3, 2, 1]


async def test_with_relaxed_order_a_thin_batch_that_stands_still_holds_up_no_other() -> None:
    """It may wait for a lock of another session for hours; independent ones continue from the first one on."""
    jobs = _thin_jobs(3)
    pool = WorkerPool(Flight(EngineState(0, 0.0, is_relaxed=True)))
    for job in jobs:
        pool.submit(job, 0.0)
    async with asyncio.timeout(5):
        assert [await pool.next_job() for _ in jobs] == jobs


def _thin_jobs(n_jobs: int) -> list[SetJob]:
    """Return batches that have few changes for each of many tables, and share no row."""
    jobs = [SetJob(Batch(seq), {}) for seq in range(1, n_jobs + 1)]
    for job in jobs:
        job.batch.table_changes = [TableChanges(PLAIN.plan(0))] * LEAST_THIN_TABLES
        job.batch.n_changes = 8
        job.batch.end_lsn = job.batch.seq
    return jobs


async def test_a_batch_submitted_while_a_worker_asks_for_one_goes_to_that_worker() -> None:
    """An idle worker's question makes intake close its open batch: `submit` is called inside `next_job`."""
    waiting = [SetJob(Batch(seq), {}) for seq in (1, 2)]
    for job in waiting:
        job.batch.end_lsn = job.batch.seq

    def close_open_batch() -> None:
        if waiting and pool.flight.wants(Batch(3)):
            pool.submit(waiting.pop(0), 0.0)

    pool = WorkerPool(Flight(EngineState(0, 0.0)))
    pool.listen(_Listener(close_open_batch))
    async with asyncio.timeout(5):
        first, second = await pool.next_job(), await pool.next_job()
    assert [first.batch.seq, second.batch.seq] == [1, 2]
    assert not pool.flight.wants(Batch(3)), "neither worker is listed as idle any more"
    assert pool.flight.waiting_jobs() == []


async def test_a_worker_that_asks_may_bring_about_the_batch_it_gets() -> None:
    """An idle worker is reason to close the open batch: that is submitted inside `next_job`, and the worker has it."""
    job = SetJob(Batch(1), {})
    job.batch.end_lsn = 10

    def changed() -> None:
        if not pool.flight.state.jobs:
            pool.submit(job, 0.0)

    pool = WorkerPool(Flight(EngineState(0, 0.0)))
    pool.listen(_Listener(changed))
    assert await pool.next_job() is job
    assert not pool.flight.wants(Batch(3))
