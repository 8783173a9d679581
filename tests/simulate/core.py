"""The core alone: a seed draws transactions, workers, the order of all that they do, failures, kills and crashes.

Checked after each step: commits keep the source's order, or what relaxed order promises; each transaction commits once;
what is reported as flushed survives every crash; something is always possible until all has committed; and at the end
nothing is held.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache, partial
from random import Random
from typing import TYPE_CHECKING

from parapply.engine.durability import Durability, Reporting, Stream
from parapply.engine.flight import Flight, Given, LetGo
from parapply.engine.intake import Room
from parapply.engine.job import SetJob
from parapply.engine.state import EngineState
from parapply.engine.turns import Answer, CommitTurn
from parapply.model import Until
from parapply.plan.overlap import overlaps
from parapply.wire.frames import Keepalive
from tests.unit.changes_stream import Op, Publisher, assembled, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.engine.flight import Effect
    from parapply.engine.job import Job
    from parapply.model import Transaction
    from parapply.plan.batch import Batch
    from parapply.plan.plans import Plans

#: Steps for each batch in which a schedule must have ended: far more than any needs.
_PATIENCE = 2_000
_REPORTING = Reporting(
    advance_interval_s=0.1, status_interval_s=10, receive_timeout_s=60, is_apply_durable=False, until=Until()
)


#: So many schedules apply the same transactions: to draw them takes longer than to play one.
_SCHEDULES_A_SOURCE = 32


@lru_cache(maxsize=2)
def _source(seed: int) -> tuple[Sequence[Transaction], Plans]:
    """Return what a publisher sends: few tables and keys, because changes that never meet prove nothing."""
    random, publisher = Random(seed), Publisher()
    tables, n_keys = random.sample(range(len(publisher.specs)), random.randint(1, 2)), random.randint(1, 4)
    truncates = ["truncate"] * (random.random() < 0.3)
    kinds = (*["put"] * 4, *["update"] * 3, "delete", "move", *["commit"] * random.randint(1, 5), *truncates)
    wishes = [
        Op(random.choice(kinds), random.choice(tables), random.randrange(n_keys), random.randrange(n_keys + 1))
        for _ in range(random.randint(3, 40))
    ]
    return assembled(publisher.run(wishes)), publisher.plans


class Violation(AssertionError):
    """A promise is broken; the message ends with the seed."""


class Worker:
    """One worker: idle, asking, at work, executed, waiting for its turn, or about to commit."""

    def __init__(self, number: int) -> None:
        """Start idle."""
        self.number = number
        self.job: SetJob | None = None
        self.phase = "idle"
        self.answer: CommitTurn | None = None


class Schedule:
    """One seed's."""

    def __init__(self, seed: int) -> None:
        """Draw what the publisher sends, and how the engine is set."""
        self.seed = seed
        self.random = random = Random(seed)
        self.is_relaxed = random.random() < 0.5
        #: What has happened, by its name.
        self.seen: Counter[str] = Counter()
        self._transactions, self._plans = _source(seed // _SCHEDULES_A_SOURCE)
        #: End LSNs in the order of their commits: the target's WAL, of which the first records are flushed.
        self.wal: list[int] = []
        self._n_flushed = 0
        #: Up to where the publisher was told that all is flushed.
        self.confirmed_lsn = 0
        self._p_fail, self._p_yield = random.random() * 0.3, random.random() * 0.3
        self._p_kill = random.choice((0.0, 0.01, 0.03))

    def run(self) -> None:
        """Play it to its end.

        Raises:
            Violation: a promise is broken.
        """
        self._begin()
        n_steps = 0
        while len(self.wal) < len(self._transactions):
            n_steps += 1
            self._check(n_steps < _PATIENCE * (1 + len(self._transactions)), "it never ends")
            self._step()
        self._check(self.state.is_idle and self.state.held_bytes == 0, "something is held at the end")
        # What was committed before a kill is passed over, so only the publisher's position tells that all is done.
        end_lsn = self._transactions[-1].end_lsn
        keepalive = Keepalive(end_lsn=end_lsn, send_time_us=0, reply_requested=False)
        self._durability.keepalive(keepalive, 0.0, is_synchronous=False)
        self._durability.settle(Stream(end_lsn, holds_nothing=True, is_inside_large=False, is_synchronous=False))
        self._check(self.state.watermark.low_lsn == end_lsn, "the watermark stands still")

    def _check(self, is_right: bool, what: str) -> None:  # noqa: FBT001  reads as an assertion
        if not is_right:
            raise Violation(f"{what}: seed {self.seed}")

    def _begin(self) -> None:
        """Start an epoch with what the target has: nothing of the one before is left."""
        random, done = self.random, set(self.wal)
        left = [one for one in self._transactions if one.end_lsn not in done]
        # Everything up to there is committed; relaxed, more may be.
        low_lsn = max(
            (one.end_lsn for one in self._transactions if not left or one.end_lsn < left[0].end_lsn), default=0
        )
        self._check(self.confirmed_lsn <= low_lsn, "what was reported as flushed is gone")
        self.state = EngineState(low_lsn, 0.0, is_relaxed=self.is_relaxed)
        self.flight = Flight(self.state)
        self._durability = Durability(self.flight, _REPORTING, 0.0)
        self._room = Room(self.flight, memory_limit_bytes=random.choice((1, 1 << 30)), fewest_workers=2)
        sizes = [random.randint(1, 3) for _ in left]
        self._open: list[Batch] = batches(left, self._plans, sizes)[::-1]
        self.workers: dict[int, Worker] = {}
        self._parked: list[SetJob] = []
        for _ in range(random.randint(1, 4)):
            self._come()

    def _come(self) -> None:
        number = max(self.workers, default=0) + 1
        self.workers[number] = Worker(number)
        self.state.n_workers += 1

    def _step(self) -> None:
        random = self.random
        if random.random() < self._p_kill:
            self._kill()
            return
        possible = self._possible()
        if possible:
            random.choice(possible)()
            self._disturb()
        else:
            self._check(self._take_back(), "nothing can happen any more")

    def _possible(self) -> list[Callable[[], None]]:
        """Return all that can happen next; without the ways in which it may be disturbed."""
        found: list[Callable[[], None]] = []
        if self._open and self._room.is_left(0):
            found.append(self._submit)
        for worker in self.workers.values():
            match worker.phase:
                case "idle":
                    found.append(partial(self._ask, worker))
                case "working":
                    found.append(partial(self._execute, worker))
                case "answered":
                    found.append(partial(self._obey, worker))
                case "committing":
                    found.append(partial(self._commit, worker))
        found += [partial(self._unpark, job) for job in self._parked if self.state.head is job]
        return found

    def _disturb(self) -> None:
        """Have the stall check look, the watermark written, and workers come or leave; now and then."""
        random, head = self.random, self.state.head
        chance = random.random()
        at_work = [one.job for one in self.workers.values() if one.job is not None]
        if chance < self._p_yield and head in at_work:
            effects = self.flight.yield_to(head, random.choice(at_work))
            self._perform(effects or [])
        elif chance < 0.6:
            self._take_back()
        elif chance < 0.7:
            low_lsn = self._durability.advances(0.0)
            self._n_flushed = len(self.wal)
            self._durability.made_durable(low_lsn)
            self.confirmed_lsn = self.state.durable_lsn
        elif chance < 0.73 and self.state.n_workers < 5:
            self._come()
        elif chance < 0.76 and self.state.n_workers > 1:
            self._perform(self.flight.release(random.randrange(self.state.n_workers)))

    def _take_back(self) -> bool:
        """Have the stall check free workers that wait for others' commits; return whether it did."""
        at_work = [one.job for one in self.workers.values() if one.job is not None] if self.is_relaxed else []
        effects = [effect for job in at_work for effect in self.flight.take_back(job)]
        self._perform(effects)
        return bool(effects)

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Given):
                worker = self.workers[effect.asker]
                assert isinstance(effect.job, SetJob)
                worker.job, worker.phase = effect.job, "working"
                self._check_start(effect.job)
            elif isinstance(effect, LetGo):
                self.seen["a worker leaves"] += 1
                del self.workers[effect.asker]
            else:
                assert isinstance(effect, Answer)
                (worker,) = [one for one in self.workers.values() if one.job and one.job.batch.seq == effect.seq]
                self._check(worker.phase == "waiting", "a worker that did not ask has an answer")
                worker.answer, worker.phase = effect.turn, "answered"

    def _submit(self) -> None:
        self._perform(self.flight.submit(SetJob(self._open.pop(), {}), 0.0))

    def _ask(self, worker: Worker) -> None:
        worker.phase = "asking"
        self._perform(self.flight.ask(worker.number))

    def _execute(self, worker: Worker) -> None:
        """Have all statements succeed, or one fail: it is repeated at the head."""
        job = worker.job
        assert job is not None
        has_failed = self.random.random() < self._p_fail
        # At the head it is parked while its transaction waits for a repair.
        if has_failed and self.is_relaxed and (self.state.head is not job or self.random.random() < 0.3):
            self.seen["parked"] += 1
            self._park(worker, job)
            return
        self.seen["failed"] += has_failed
        self._ask_turn(worker, job, needs_head=has_failed)

    def _ask_turn(self, worker: Worker, job: SetJob, *, needs_head: bool) -> None:
        worker.answer = self.flight.turns.ask(job, needs_head=needs_head)
        worker.phase = "waiting" if worker.answer is None else "answered"
        if worker.answer is None:
            worker.phase = "waiting"
        else:
            self._obey(worker, has_asked=False)

    def _obey(self, worker: Worker, *, has_asked: bool = True) -> None:
        job = worker.job
        assert job is not None
        if has_asked:
            self.flight.turns.heard(job)
        self.seen[str(worker.answer)] += 1
        if worker.answer is CommitTurn.COMMIT:
            worker.phase = "committing"
        elif worker.answer is CommitTurn.GIVE_BACK:
            worker.job, worker.phase = None, "idle"
            self.flight.give_back(job)
        elif self.is_relaxed and self.state.head is not job:
            self._park(worker, job)
        else:
            self._ask_turn(worker, job, needs_head=True)

    def _park(self, worker: Worker, job: SetJob) -> None:
        worker.job, worker.phase = None, "idle"
        job.must_yield = False
        self.flight.park(job)
        self._parked.append(job)

    def _unpark(self, job: SetJob) -> None:
        self._parked.remove(job)
        self._perform(self.flight.unpark(job.batch.seq))

    def _commit(self, worker: Worker) -> None:
        job = worker.job
        assert job is not None
        self._check_commit(job)
        worker.job, worker.phase = None, "idle"
        ends = [one.end_lsn for one in job.batch.transactions]
        self._check(not set(ends) & set(self.wal), "a transaction commits twice")
        if not self.is_relaxed:
            self._check(not self.wal or self.wal[-1] < ends[0], "commits are out of order")
        self.wal += ends
        self._perform(self.flight.committed(job, 0.0))
        if job in self._parked:
            self._parked.remove(job)
        self._durability.committed(is_synchronous=False)

    def _kill(self) -> None:
        """End the daemon, or the target, which loses a part of what was not flushed."""
        if self.random.random() < 0.5:
            kept = self.random.randint(self._n_flushed, len(self.wal))
            self.seen["crash that loses commits"] += kept < len(self.wal)
            del self.wal[kept:]
        self.seen["kill"] += 1
        self._n_flushed = len(self.wal)
        self._begin()

    def _earlier(self, job: Job) -> list[Job]:
        return [one for one in self.state.jobs.values() if one.batch.seq < job.batch.seq]

    def _check_start(self, job: Job) -> None:
        for earlier in self._earlier(job):
            for overlap in overlaps(earlier.batch, job.batch):
                is_late = overlap.changes is not None and overlap.keys and overlap.keys <= overlap.changes.late_keys
                self._check(bool(is_late), "a batch starts before what it depends on")
                self.seen["late keys"] += 1

    def _check_commit(self, job: Job) -> None:
        if not self.is_relaxed:
            self._check(self.state.head is job, "another than the head commits")
        for earlier in self._earlier(job):
            self._check(not overlaps(earlier.batch, job.batch), "a batch commits before what it depends on")
