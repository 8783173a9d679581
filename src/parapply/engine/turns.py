"""The turn to commit: which batch has it, which one makes room for another, and which answers were given already.

With the order kept the head, the earliest batch that has not committed, has the turn; relaxed every batch whose late
keys are free. A worker that asks has an answer at once, or by an effect later, and each question has one answer.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from parapply.engine.job import Job
    from parapply.plan.scheduler import Scheduler


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
