"""The workers' questions as futures: what `engine/flight.py` answers is given to the worker that waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from parapply import failpoints
from parapply.engine.flight import CommitTurn, Flight, Given, LetGo, News
from parapply.runtime.pool.streams import buffer_of
from parapply.runtime.rest import Rest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.engine.flight import Effect
    from parapply.engine.job import Job, StreamJob


class Released(Exception):
    """The answer to a worker that asks for a batch and is to leave."""


class PoolListener(Protocol):
    """The driver of the engine."""

    def pool_changed(self) -> None:
        """Take notice that a worker became idle, a batch committed, or a piece was applied."""

    def batch_committed(self, job: Job) -> None:
        """Take a job that has just committed, which is also a change as above."""


class WorkerPool:
    """Its only state is the questions that wait for an answer; `flight` has the rest."""

    def __init__(self, flight: Flight) -> None:
        """Start with no question, and nothing in flight."""
        self.flight = flight
        self._questions: dict[int, asyncio.Future[Job]] = {}
        self._n_questions = 0
        self._turns: dict[int, asyncio.Future[CommitTurn]] = {}
        self._listener: PoolListener | None = None
        #: Of the whole epoch.
        self.rest = Rest()

    def listen(self, listener: PoolListener) -> None:
        """Notify a listener of the pool's events from now on."""
        self._listener = listener

    def changed(self) -> None:
        """Report that there may be room: a worker became idle, a batch committed, a piece was applied."""
        if self._listener is not None:
            self._listener.pool_changed()

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Given):
                self._questions.pop(effect.asker).set_result(effect.job)
            elif isinstance(effect, News):
                buffer_of(effect.job).news.set()
            elif isinstance(effect, LetGo):
                self._questions.pop(effect.asker).set_exception(Released())
            else:
                self._turns[effect.seq].set_result(effect.turn)

    def follow(self, job: StreamJob) -> None:
        """Give a job that has no place in the order yet the next free worker."""
        self._perform(self.flight.follow(job))

    def leave(self, job: StreamJob) -> None:
        """Drop a job whose worker no longer follows it; the job was not submitted."""
        self.flight.leave(job)
        self.changed()

    def submit(self, job: Job, now_s: float) -> None:
        """Take a closed batch, later than all before it."""
        if failpoints.armed:
            failpoints.probe(failpoints.BATCH_READY)
        self._perform(self.flight.submit(job, now_s))

    def release(self, n_workers: int) -> None:
        """Let that many workers leave, as `Flight.release`."""
        self._perform(self.flight.release(n_workers))

    async def next_job(self) -> Job:
        """Wait for a batch that may start; called by a worker that has none.

        Raises:
            Released: it is to leave.
        """
        self._n_questions += 1
        asker = self._n_questions
        answer: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._questions[asker] = answer
        self._perform(self.flight.ask(asker))
        if not answer.done():
            # This may close the open batch and submit it here and now, which then answers.
            self.changed()
        try:
            return await answer
        finally:
            if self._questions.pop(asker, None) is not None:
                self.flight.withdraw(asker)

    async def turn(self, job: Job) -> CommitTurn:
        """Wait until a job may commit, or must yield to an earlier one; a yield is answered once."""
        return await self._ask(job, needs_head=False)

    async def head_turn(self, job: Job) -> None:
        """Wait until every earlier batch has committed, holding nothing on the target."""
        while await self._ask(job, needs_head=True) is not CommitTurn.COMMIT:
            pass

    async def _ask(self, job: Job, *, needs_head: bool) -> CommitTurn:
        turn = self.flight.turns.ask(job, needs_head=needs_head)
        if turn is not None:
            return turn
        seq = job.batch.seq
        answer: asyncio.Future[CommitTurn] = asyncio.get_running_loop().create_future()
        self._turns[seq] = answer
        try:
            return await answer
        finally:
            del self._turns[seq]
            self.flight.turns.heard(job)

    def yield_to(self, earlier: Job, job: Job) -> bool:
        """Make a job roll back and become the head first; False if it is not later or was answered already."""
        effects = self.flight.yield_to(earlier, job)
        self._perform(effects or [])
        return effects is not None

    def give_way(self, job: Job) -> bool:
        """Make a job stop following a transaction, as `Flight.give_way`; False if it does not, or was asked."""
        effects = self.flight.give_way(job)
        self._perform(effects or [])
        return effects is not None

    def wants_back(self, job: Job) -> bool:
        """Ask for a job's worker, as `Flight.take_back`; False if no other job needs it, or it is about to continue."""
        effects = self.flight.take_back(job)
        self._perform(effects)
        return bool(effects)

    def give_back(self, job: Job) -> None:
        """Take a job back whose worker has rolled it back; it starts again when its waits are over."""
        self.flight.give_back(job)
        # A blocked batch does not count against the queue limit, so there is room now; no other event announces it.
        self.changed()

    def park(self, job: Job) -> None:
        """Take a job back whose worker has rolled it back: it starts again when it becomes the head, or at `unpark`."""
        self.flight.park(job)
        self.changed()

    def unpark(self, job: Job) -> None:
        """Let a parked job start again; nothing happens to one that is not parked."""
        self._perform(self.flight.unpark(job.batch.seq))

    def committed(self, job: Job, now_s: float) -> None:
        """Register that the target has acknowledged a job's commit."""
        self._perform(self.flight.committed(job, now_s))
        if self._listener is not None:
            self._listener.batch_committed(job)


def give_way(job: StreamJob) -> None:
    """Have the worker that follows a transaction roll back; all of it is applied at the commit."""
    job.must_yield = True
    buffer_of(job).news.set()
