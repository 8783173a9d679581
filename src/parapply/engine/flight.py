"""The batches in flight and the workers that ask for one: which starts where, and the effects of a commit.

Dependencies say when a batch may start, the commit order says when it may commit. With the order kept the head, the
earliest batch that has not committed, has the turn; relaxed every batch whose late keys are free. A worker that asks
for its turn has an answer at once, or by an effect later, and each question has one answer. The head always has a
worker (trap T-30): ready batches are given out in source order, and what a blocked batch waits for has a worker or is
earlier still. So the last commit before a batch frees a worker for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from parapply.engine.job import InProgress, Job, LargeJob, StreamJob
from parapply.plan.scheduler import Scheduler

if TYPE_CHECKING:
    from parapply.engine.state import EngineState
    from parapply.plan.batch import Batch
    from parapply.plan.scheduler import Wait


#: Changes of a batch that is executed and committed in one flight, if it has its turn when it begins: without a backlog
#: the round trip is a good part of the latency, and a check of the counts by the server costs little for few rows. So
#: many late keys, at most, are applied in the flight of the commit.
ONE_FLIGHT: Final = 256


class CommitTurn(Enum):
    """The answer to a worker that asks for its turn to commit."""

    COMMIT = "commit"  # all batches that must commit before it have
    YIELD = "yield"  # an earlier one waits for a lock of this one: roll back, then become the head first
    GIVE_BACK = "give back"  # others could use the worker: roll back, then `give_back` the job


class Answer(NamedTuple):
    """An answer for the worker of a batch that has asked for its turn."""

    seq: int
    turn: CommitTurn


class _Asking:
    """A worker that waits for its answer, or has one that it has not taken yet."""

    __slots__ = ("is_answered", "needs_head")

    def __init__(self, *, needs_head: bool) -> None:
        self.needs_head = needs_head
        self.is_answered = False


class Turns:
    """Written by `Flight` and by questions of the workers."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Start with no question; the scheduler knows the order."""
        self._scheduler = scheduler
        self._asking: dict[int, _Asking] = {}

    def may_commit(self, job: Job) -> bool:
        """Return whether a job has its turn: it may apply its late keys and commit."""
        return self._scheduler.may_commit(job.batch)

    def ask(self, job: Job, *, needs_head: bool = False) -> CommitTurn | None:
        """Return the answer to a job's worker; None: it comes as an effect, and `heard` follows it.

        Args:
            job: executed, or rolled back.
            needs_head: everything earlier must have committed, whatever the order.
        """
        if self._scheduler.head is job.batch if needs_head else self._scheduler.may_commit(job.batch):
            return CommitTurn.COMMIT
        if job.must_yield:
            job.must_yield = False
            return CommitTurn.YIELD
        self._asking[job.batch.seq] = _Asking(needs_head=needs_head)
        return None

    def heard(self, job: Job) -> None:
        """Note that the worker has taken its answer, or asks no more."""
        del self._asking[job.batch.seq]

    def passed_to(self, seq: int) -> list[Answer]:
        """Return the answer to a worker that has asked, if its batch may commit now."""
        asking = self._asking.get(seq)
        if asking is None or asking.is_answered:
            return []
        head = self._scheduler.head
        if head is None or (head.seq != seq and asking.needs_head):
            return []
        return self._answer(seq, CommitTurn.COMMIT)

    def yield_to(self, earlier: Job, job: Job) -> list[Answer] | None:
        """Make a job roll back and become the head first; None if it is not later or was answered already."""
        if 0 < job.batch.seq <= earlier.batch.seq or job.must_yield:
            return None
        asking = self._asking.get(job.batch.seq)
        if asking is None:
            job.must_yield = True
            return []
        if asking.is_answered or asking.needs_head:
            return None
        return self._answer(job.batch.seq, CommitTurn.YIELD)

    def give_back(self, job: Job) -> list[Answer]:
        """Ask for the worker of a job that waits for the holders of its late keys; nothing if it does not."""
        asking = self._asking.get(job.batch.seq)
        if asking is None or asking.needs_head or asking.is_answered or not self._scheduler.late_waits_of(job.batch):
            return []
        return self._answer(job.batch.seq, CommitTurn.GIVE_BACK)

    def _answer(self, seq: int, turn: CommitTurn) -> list[Answer]:
        self._asking[seq].is_answered = True
        return [Answer(seq, turn)]


#: Changes for each table that must have committed in batches with few changes for each of many tables, for each further
#: such batch that may run alongside others. A session takes a tenth to a third of a millisecond of the target's CPU to
#: meet a table first, as long as for four to ten changes, which is worth while where many more are to come.
_LEARNT: Final = 16


class Given(NamedTuple):
    """A worker that asks is given a job."""

    asker: int
    job: Job


class LetGo(NamedTuple):
    """A worker that asks is to leave."""

    asker: int


class News(NamedTuple):
    """The worker that follows a transaction in progress has something to look at."""

    job: StreamJob


#: An action that follows a change.
Effect: TypeAlias = Given | LetGo | News | Answer


class Flight:
    """Written by intake (submit), by the workers (everything else) and by the stall check (yield_to)."""

    def __init__(self, state: EngineState, *, max_followers: int = 0, most_places: int = 1 << 30) -> None:
        """Start with nothing in flight.

        Args:
            state: of which the jobs, the workers, the bytes held and the watermark are written here.
            max_followers: workers at most that may follow transactions in progress; one must be left for the head.
            most_places: of batches with workers, in the target's table of locks.
        """
        self.state = state
        self._scheduler = Scheduler(is_relaxed=state.is_relaxed)
        self.turns = Turns(self._scheduler)
        self._ready: list[int] = []  # heap of batch numbers that may start
        self._assigned: set[int] = set()
        #: Changes of batches like these that have committed, and the trees of their tables.
        self._n_learnt = 0
        self._met: set[int] = set()
        #: Batches that no worker may start for now: they wait to be the head, or for a repair.
        self._parked: set[int] = set()
        #: Workers that ask for a job, the longest idle first.
        self._idle: list[int] = []
        #: Also written by `WorkerTasks`.
        self.max_followers = max_followers
        self._most_places = most_places
        #: Number of workers that are to leave.
        self._n_to_release = 0
        #: Jobs that follow a transaction in progress or will, and among them the jobs without a worker yet.
        self._following: list[StreamJob] = []
        self._to_follow: deque[StreamJob] = deque()
        self._last_seq = 0

    def count_in(self, size_bytes: int) -> None:
        """Count changes in: of a batch, or of a piece that comes; intake and workers do so with pieces."""
        self.state.held_bytes += size_bytes

    def count_out(self, size_bytes: int) -> None:
        """Count changes out: they are applied, or dropped. Each piece that was counted in must come here once."""
        self.state.held_bytes -= size_bytes

    def is_done_but_large(self, *, is_open: bool) -> bool:
        """Return whether nothing is in flight that can be finished.

        Args:
            is_open: a large transaction has not come whole; it is always the last.
        """
        head = self.state.head
        return head is None or (is_open and isinstance(head, LargeJob))

    def wants(self, batch: Batch) -> bool:
        """Return whether a worker is idle and no closed batch waits for one; with the order kept, none waits at all.

        Args:
            batch: the open one, which might be given to that worker.
        """
        has_room = bool(self._idle) and (self.state.is_relaxed or len(self._assigned) == len(self.state.jobs))
        return has_room and self._may_start(batch)

    @property
    def is_pressed(self) -> bool:
        """Return whether a batch could start with one more worker."""
        return bool(self._ready) and not self._idle

    @property
    def n_blocked(self) -> int:
        """Return the number of batches that wait for another one to commit before they start."""
        return len(self.state.jobs) - len(self._assigned) - len(self._ready)

    @property
    def next_blocked(self) -> Job | None:
        """Return the earliest job that waits for another one to commit before it starts."""
        blocked = (one for one in self._scheduler.batches() if self._scheduler.waits_of(one))
        return next((self.state.jobs[one.seq] for one in blocked if one.seq not in self._assigned), None)

    def waits_of(self, job: Job) -> tuple[Wait, ...]:
        """Return the waits of a job before it may start."""
        return self._scheduler.waits_of(job.batch)

    def late_waits_of(self, job: Job) -> tuple[Wait, ...]:
        """Return the waits of a job's late keys."""
        return self._scheduler.late_waits_of(job.batch)

    def waiting_jobs(self) -> list[Job]:
        """Return the jobs no worker has, in source order."""
        return [job for job in self.state.jobs.values() if job.batch.seq not in self._assigned]

    @property
    def may_follow(self) -> bool:
        """Return whether one more transaction in progress may have a worker."""
        return len(self._following) < self.max_followers

    def follow(self, job: StreamJob) -> list[Effect]:
        """Give a job that has no place in the order yet the next free worker."""
        self._following.append(job)
        self._to_follow.append(job)
        return self._assign()

    def follower_of(self, stream: InProgress) -> StreamJob | None:
        """Return the job that follows a stream or will; None if none does."""
        return next((job for job in self._following if job.stream is stream), None) if stream.is_followed else None

    def leave(self, job: StreamJob) -> None:
        """Drop a job whose worker no longer follows it; the job was not submitted."""
        self._following.remove(job)

    def has_passed(self, seq: int) -> bool:
        """Return whether every batch up to a number has committed, the one included."""
        head = self.state.head
        return self._last_seq >= seq and (head is None or head.batch.seq > seq)

    def submit(self, job: Job, now_s: float) -> list[Effect]:
        """Take a closed batch, later than all before it; a worker may follow it already."""
        batch = job.batch
        job.times.submitted_s = job.times.freed_s = now_s
        self._last_seq = batch.seq
        self.state.jobs[batch.seq] = job
        if self.state.head is None:
            self.state.head = job
        effects: list[Effect] = []
        if isinstance(job, StreamJob):
            if job in self._to_follow:
                self._to_follow.remove(job)  # no worker has it yet: it is given out like any other
            elif job in self._following:
                self._assigned.add(batch.seq)
                effects.append(News(job))
        if not isinstance(job, LargeJob):
            self.count_in(batch.size_bytes)
            self.state.watermark.open(batch.end_lsn)
        may_start = self._scheduler.add(batch)
        waits = self._scheduler.late_waits_of(batch) if may_start else self._scheduler.waits_of(batch)
        job.waited_for = waits[-1] if waits else None
        if may_start:
            self._start(batch.seq)
        return effects + self._assign()

    def release(self, n_workers: int) -> list[Effect]:
        """Let that many workers leave, each when it has nothing in hand, the longest idle first; 0: none from now on.

        None leaves while the head has no worker: then the one that commits before a batch takes that batch, as ever
        (trap T-30), however few there are.
        """
        self._n_to_release = n_workers
        effects: list[Effect] = []
        while self._idle and self._may_release():
            effects.append(self._let_go(self._idle.pop(0)))
        return effects

    def _may_release(self) -> bool:
        head = self.state.head
        if not self._n_to_release or (head is not None and head.batch.seq not in self._assigned):
            return False
        # More than half of the remaining workers must be free for jobs that have their place in the order.
        return 2 * len(self._following) < self.state.n_workers - 1

    def _let_go(self, asker: int) -> Effect:
        self._n_to_release -= 1
        self.state.n_workers -= 1
        return LetGo(asker)

    def ask(self, asker: int) -> list[Effect]:
        """Take a worker's question for a batch that may start; the answer is an effect of this or of a later call."""
        if self._may_release():
            return [self._let_go(asker), *self._assign()]
        self._idle.append(asker)
        return self._assign()

    def withdraw(self, asker: int) -> None:
        """Withdraw a worker's question, if it has no answer yet."""
        if asker in self._idle:
            self._idle.remove(asker)

    def _start(self, seq: int) -> None:
        """Let a batch start that waits for no other, unless a worker has it already."""
        if seq not in self._assigned:
            heapq.heappush(self._ready, seq)

    def _assign(self) -> list[Effect]:
        effects: list[Effect] = []
        if not self._idle:
            return effects
        while self._idle and self._ready and self._may_start(self.state.jobs[self._ready[0]].batch):
            seq = heapq.heappop(self._ready)
            self._assigned.add(seq)
            job = self.state.jobs[seq]
            self._scheduler.started(job.batch)
            effects.append(Given(self._idle.pop(), job))
        # A follower waits for everything before it, so the last idle worker is for a batch that is blocked or parked.
        n_kept = 1 if len(self._assigned) < len(self.state.jobs) else 0
        while len(self._idle) > n_kept and self._to_follow:
            effects.append(Given(self._idle.pop(), self._to_follow.popleft()))
        return effects

    def _may_start(self, batch: Batch) -> bool:
        """Return whether a batch may have one more worker, as far as locks and `_LEARNT` allow; the head always may.

        So may all in relaxed order: one that stands at another session's lock must not hold up independent ones.
        """
        head = self.state.head
        if self.state.is_relaxed or head is None or head.batch is batch:
            return True
        batches = [self.state.jobs[seq].batch for seq in self._assigned]
        n_places = sum([one.n_places for one in batches]) + batch.n_places
        # Each earlier one becomes the head, and starts then beside all that wait for their turn.
        before = [
            job.batch.n_places for seq, job in self.state.jobs.items() if seq < batch.seq and seq not in self._assigned
        ]
        if n_places + max(before, default=0) > self._most_places:
            return False
        if not batch.is_thin:
            return True
        n_learning = sum([one.is_thin for one in batches])
        return n_learning * _LEARNT * max(1, len(self._met)) <= self._n_learnt

    def yield_to(self, earlier: Job, job: Job) -> list[Effect] | None:
        """Make a job roll back and become the head first; None if it is not later or was answered already.

        A job that follows a transaction in progress has no number yet: it is later than all.
        """
        if isinstance(job, StreamJob) and job in self._following:
            return None if 0 < job.batch.seq <= earlier.batch.seq else self.give_way(job)
        answers = self.turns.yield_to(earlier, job)
        return None if answers is None else [*answers]

    def give_way(self, job: Job) -> list[Effect] | None:
        """Make a job that follows a transaction roll back until its end has come; None if it does not, or was asked.

        It then applies the transaction without its rolled back parts.
        """
        if not isinstance(job, StreamJob) or job not in self._following:
            return None
        if job.must_yield or not job.stream.is_followed:
            return None
        job.must_yield = True
        return [News(job)]

    def take_back(self, job: Job) -> list[Answer]:
        """Ask for the worker of a job that waits for the holders of its late keys, while others could start."""
        return self.turns.give_back(job) if self._ready else []

    def give_back(self, job: Job) -> None:
        """Take a job back whose worker has rolled it back; it starts again when its waits are over."""
        seq = job.batch.seq
        self._assigned.discard(seq)
        if self._scheduler.give_back(job.batch):
            heapq.heappush(self._ready, seq)

    def park(self, job: Job) -> None:
        """Take a job back whose worker has rolled it back: it starts again when it becomes the head, or at `unpark`."""
        seq = job.batch.seq
        self._assigned.discard(seq)
        self._parked.add(seq)

    def unpark(self, seq: int) -> list[Effect]:
        """Let a parked job start again; nothing happens to one that is not parked."""
        if seq not in self._parked:
            return []
        self._parked.discard(seq)
        heapq.heappush(self._ready, seq)
        return self._assign()

    def ended(self, job: LargeJob) -> None:
        """Register the end LSN of a large transaction, known only now that its last piece has come."""
        self.state.watermark.open(job.batch.end_lsn)

    def committed(self, job: Job, now_s: float) -> list[Effect]:
        """Register that the target has acknowledged a job's commit: only now may dependents start (trap T-35)."""
        batch, state = job.batch, self.state
        job.times.committed_s = now_s
        del state.jobs[batch.seq]
        was_head = state.head is job
        if was_head:
            state.head = next(iter(state.jobs.values()), None)
        self._assigned.discard(batch.seq)
        if isinstance(job, StreamJob) and job in self._following:
            self._following.remove(job)
        if not isinstance(job, LargeJob):
            self.count_out(batch.size_bytes)
        if batch.is_thin:
            self._n_learnt += batch.n_changes
            self._met.update([changes.tree_oid for changes in batch.table_changes])
        state.watermark.close(batch.end_lsn)
        effects: list[Effect] = list(map(News, self._following))
        freed = self._scheduler.committed(batch)
        for ready in freed.to_start:
            state.jobs[ready.seq].times.freed_s = now_s
            self._start(ready.seq)
        for ready in freed.to_commit:
            effects += self.turns.passed_to(ready.seq)
        # A head that was the head before may be parked until a repair, which the commit of another one does not bring.
        if state.is_relaxed and was_head and state.head is not None:
            effects += self.turns.passed_to(state.head.batch.seq)
            effects += self.unpark(state.head.batch.seq)
        # A piece that was not counted out would take its part of the memory limit until the epoch ends.
        is_empty = not state.jobs and not self._following
        assert state.held_bytes == 0 or not is_empty, "nothing is in flight, and something is held"
        if not batch.is_thin:
            # Else the worker that had it, and knows the tables now, comes first: it asks at once.
            effects += self._assign()
        return effects
