"""Who may start and who may commit, in both orders, whatever the workers do."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import event, given
from hypothesis import strategies as st

from parapply.plan.batch import Batch
from parapply.plan.dependencies import Wait, meetings
from parapply.runtime.crew import Crew, Turn
from parapply.runtime.job import Job
from parapply.runtime.streams import Stream
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops


class _Run:
    """A crew whose workers take random numbers of steps and sometimes are told to yield.

    Some batches are the ends of transactions that a worker follows from an earlier batch on, if one is free.
    """

    def __init__(self, jobs: list[Job], n_workers: int, random: Random, *, is_relaxed: bool) -> None:
        self.jobs = [self._end_of_stream(job) if random.random() < 0.2 else job for job in jobs]
        self.random = random
        self.pace = random.random()
        self.commits: list[int] = []
        self.running: dict[int, Job] = {}
        self.parked: set[int] = set()
        self.n_idle_calls = 0
        self.n_given_back = 0
        self.n_followed = 0
        self.crew = Crew(0, self._changed, self._committed, is_relaxed=is_relaxed, max_followers=n_workers // 2)
        self.n_workers = n_workers

    async def run(self) -> None:
        workers = [asyncio.create_task(self._work()) for _ in range(self.n_workers)]
        try:
            for at, job in enumerate(self.jobs):
                if self.random.random() < self.pace:
                    await self._steps()
                self._follow_some(at)
                if job.stream is not None:
                    # Of one that nobody follows any more the end is a batch like any other.
                    job = job.stream.follower or job  # noqa: PLW2901
                    assert job.stream is not None
                    job.batch = self.jobs[at].batch
                    job.stream.end = job.batch.transactions[-1]
                self.crew.submit(job, 0.0)
                self._check_submitted(job)
            async with asyncio.timeout(20):
                while not self.crew.is_idle:
                    await self._steps()
                    self._tell_somebody()
        finally:
            for worker in workers:
                worker.cancel()
            results = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results

    @staticmethod
    def _end_of_stream(job: Job) -> Job:
        job.stream = Stream(job.batch.seq)
        job.batch.is_barrier = True
        return job

    def _follow_some(self, at: int) -> None:
        """Have workers follow transactions that will end later, some of them."""
        for job in self.jobs[at:]:
            stream = job.stream
            if stream is None or stream.follower or stream.why_spilled or not self.crew.may_follow:
                continue
            if self.random.random() < 0.5:
                follower = stream.follower = Job(Batch(0), {})
                follower.stream = stream
                follower.commit_lsn = self.jobs[at - 1].batch.seq if at else 0  # what its first chunk came after
                self.crew.follow(follower)

    async def _follow(self, job: Job, stream: Stream) -> bool:
        """Follow a transaction to its end and its turn; False if the worker gave way before the end came."""
        self.n_followed += 1
        while not (self.crew.has_passed(job.commit_lsn) and stream.end and not self.crew.waits_of(job)):
            if job.must_yield:
                job.must_yield = False
                stream.stop_following("a test")
                if stream.end is None:
                    self.crew.leave(job)
                    return False
            stream.news.clear()
            await stream.news.wait()
            await self._steps()
        return True

    async def _work(self) -> None:
        while True:
            job = await self.crew.next_job()
            if job.stream is not None and job.stream.follower is job and not await self._follow(job, job.stream):
                continue
            self._check_start(job)
            self.running[job.batch.seq] = job
            if (
                self.crew.is_relaxed
                and job.stream is None
                and job.batch.seq not in self.parked
                and self.random.random() < 0.2
            ):
                await self._steps()
                self._park(job)
                continue
            while True:
                await self._steps()
                told = await self.crew.turn(job)
                if told is not Turn.YIELD:
                    break
                job.must_yield = False
                if self.crew.is_relaxed and self.crew.head is not job:
                    break
                await self.crew.head_turn(job)
            await self._steps()
            if told is Turn.YIELD:
                self._park(job)
                continue
            del self.running[job.batch.seq]
            if told is Turn.GIVE_BACK:
                self.n_given_back += 1
                n_calls = self.n_idle_calls
                self.crew.give_back(job)
                assert self.n_idle_calls > n_calls, "nobody was told that there is room"
            else:
                self._check_commit(job)
                self.crew.committed(job, 0.0)

    def _park(self, job: Job) -> None:
        """Leave a batch that fails: until it is the head, or for a while if it is."""
        self.parked.add(job.batch.seq)
        del self.running[job.batch.seq]
        if self.crew.head is job:
            asyncio.get_running_loop().call_soon(self.crew.unpark, job)
        self.crew.park(job)

    def _check_submitted(self, job: Job) -> None:
        waits = self.crew.waits_of(job)
        assert job.waited_for is (waits[-1] if waits else job.batch.late_for)

    def _check_start(self, job: Job) -> None:
        assert job.batch.seq not in self.commits
        for earlier in self.crew.jobs():
            if earlier.batch.seq < job.batch.seq:
                for meeting in meetings(earlier.batch, job.batch):
                    assert meeting.changes is not None, "a barrier has not committed"
                    assert meeting.keys, "a table's holder has not committed"
                    assert meeting.keys <= meeting.changes.late_keys, "a key's holder has not committed"

    def _check_commit(self, job: Job) -> None:
        if not self.crew.is_relaxed:
            assert self.crew.head is job, "only the head has the turn"
        for earlier in self.crew.jobs():
            if earlier.batch.seq < job.batch.seq:
                assert not meetings(earlier.batch, job.batch), "something it depends on has not committed"

    def _tell_somebody(self) -> None:
        head = self.crew.head
        followers = [job.stream.follower for job in self.jobs if job.stream is not None and job.stream.follower]
        if head is not None and head.batch.seq in self.running and followers and self.random.random() < 0.1:
            self.crew.yield_to(head, self.random.choice(followers))
        if self.crew.is_relaxed:
            for job in list(self.running.values()):
                self.crew.wants_back(job)
        if head is not None and head.batch.seq in self.running and self.random.random() < 0.3:
            self.crew.yield_to(head, self.random.choice(list(self.running.values())))

    async def _steps(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)

    def _changed(self) -> None:
        self.n_idle_calls += 1

    def _committed(self, job: Job) -> None:
        self.commits.append(job.batch.seq)


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
    jobs = [Job(batch, {}) for batch in batches(assembled(publisher.run(wishes)), publisher.plans, sizes)]
    run = _Run(jobs, n_workers, Random(seed), is_relaxed=is_relaxed)
    asyncio.run(run.run())
    event(f"given back: {min(run.n_given_back, 3)}")
    event(f"followed: {min(run.n_followed, 3)}")
    assert (sorted(run.commits) if is_relaxed else run.commits) == [job.batch.seq for job in jobs]
    assert run.crew.held_bytes == 0
    assert len(run.crew) == 0
    if jobs:
        assert run.crew.watermark.low_lsn == jobs[-1].batch.end_lsn


def test_the_watermark_moves_only_with_the_head() -> None:
    """What commits is the head, so the low LSN is the end of the last commit (trap T-2)."""
    publisher = Publisher()
    wishes = [Op("put", 0, 1), Op("commit", 0), Op("put", 0, 2), Op("commit", 0)]
    jobs = [Job(batch, {}) for batch in batches(assembled(publisher.run(wishes)), publisher.plans, [1, 1])]

    async def go() -> None:
        lows: list[int] = []
        crew = Crew(0, lambda: None, lambda _: lows.append(crew.watermark.low_lsn))
        for job in jobs:
            crew.submit(job, 0.0)
        for job in jobs:
            assert await crew.next_job() is job
            assert await crew.turn(job) is Turn.COMMIT
            crew.committed(job, 0.0)
        assert lows == [job.batch.end_lsn for job in jobs]

    asyncio.run(go())


def test_a_batch_with_late_keys_starts_at_once_and_names_their_holder() -> None:
    """Only changes of common keys wait, for the turn to commit, which comes after their holder's commit (trap T-35)."""
    publisher = Publisher()
    wishes = [Op("put", 0, 1), Op("commit", 0), Op("put", 0, 1), Op("put", 0, 2), Op("commit", 0)]
    jobs = [Job(batch, {}) for batch in batches(assembled(publisher.run(wishes)), publisher.plans, [1, 1])]

    async def go() -> None:
        crew = Crew(0, lambda: None, lambda _: None)
        for job in jobs:
            crew.submit(job, 0.0)
        assert [crew.waits_of(job) for job in jobs] == [(), ()]
        assert [job.waited_for for job in jobs] == [None, Wait(1, "s.t1", "key")]
        assert [await crew.next_job() for _ in jobs] == jobs
        turn = asyncio.create_task(crew.turn(jobs[1]))
        assert await crew.turn(jobs[0]) is Turn.COMMIT
        assert not turn.done()
        crew.committed(jobs[0], 0.0)
        assert await turn is Turn.COMMIT
        crew.committed(jobs[1], 0.0)

    asyncio.run(go())


def test_t30_a_worker_that_becomes_free_is_not_for_a_follower_while_a_batch_waits_for_one() -> None:
    """A follower waits for what came before it, so it must not take the worker that the next head needs (T-30)."""
    earlier, blocked, follower = Job(Batch(1), {}), Job(Batch(2), {}), Job(Batch(0), {})
    earlier.batch.end_lsn, blocked.batch.end_lsn = 10, 20
    blocked.batch.is_barrier = True
    follower.stream = Stream(7)

    async def go() -> None:
        crew = Crew(0, lambda: None, lambda _: None, max_followers=1)
        crew.submit(earlier, 0.0)
        assert await crew.next_job() is earlier
        crew.submit(blocked, 0.0)
        crew.follow(follower)
        crew.committed(earlier, 0.0)
        assert await crew.next_job() is blocked
        assert await crew.next_job() is follower, "nothing is blocked any more"

    asyncio.run(go())


def test_t30_the_last_idle_worker_is_kept_for_what_is_blocked() -> None:
    """While a batch has no worker, one that follows takes none that the batch will need; its end makes it a batch."""
    running, blocked, follower = Job(Batch(1), {}), Job(Batch(2), {}), Job(Batch(0), {})
    running.batch.end_lsn, blocked.batch.end_lsn = 10, 20
    blocked.batch.is_barrier = True
    follower.stream = Stream(7)

    async def go() -> None:
        crew = Crew(0, lambda: None, lambda _: None, max_followers=1)
        crew.submit(running, 0.0)
        assert await crew.next_job() is running
        crew.submit(blocked, 0.0)
        idle = asyncio.create_task(crew.next_job())
        await asyncio.sleep(0)
        crew.follow(follower)
        assert not idle.done()
        follower.batch = Batch(3)
        follower.batch.end_lsn, follower.batch.is_barrier = 30, True
        crew.submit(follower, 0.0)
        crew.committed(running, 0.0)
        assert await idle is blocked
        crew.committed(blocked, 0.0)
        assert await crew.next_job() is follower, "no worker had it when it ended: it is given out in its turn"

    asyncio.run(go())
