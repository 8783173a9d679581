"""One worker: takes a job, executes it, waits for its turn, commits; else repeats it at the head; else stops.

The leader starts one task for each worker and names it. Jobs that are not applied as the sets of a whole batch have
separate files: `parts.py` with `serial.py`, `large.py`, `streamed.py`, `outcome.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from parapply.engine.flight import CommitTurn
from parapply.engine.job import LargeJob, OutcomeJob, SetJob, StreamJob
from parapply.errors import StatementFailed, TargetLost, TargetRefused
from parapply.plan.downgrade import Level
from parapply.runtime.apply.failure import FailureClass, classify
from parapply.runtime.apply.large import LargeApply
from parapply.runtime.apply.outcome import apply_outcome
from parapply.runtime.apply.parts import PartApply
from parapply.runtime.apply.repair import Repair
from parapply.runtime.apply.streamed import StreamApply
from parapply.runtime.apply.transaction import SetCommands, TargetTransaction
from parapply.runtime.pool.pool import Released
from parapply.vocabulary import RetryReason, WorkerState

if TYPE_CHECKING:
    from parapply.engine.job import Job
    from parapply.runtime.apply.transaction import WorkerKit
    from parapply.target.session.session import WorkerSession

#: Among batches whose statements and COMMIT are sent at once, one in this many has its COMMIT timed for the apply log.
_TIMED_EACH: Final = 16


class Worker:
    """Its fields are written by its own task; read by the stall check, the watchdog, the monitor and metrics."""

    def __init__(self, number: int, session: WorkerSession, kit: WorkerKit) -> None:
        """Start idle."""
        #: From 1.
        self.number = number
        self.session = session
        #: The one in hand.
        self.job: Job | None = None
        #: Target transactions, source transactions and changes committed in this epoch.
        self.batches = 0
        self.transactions = 0
        self.changes = 0
        self._kit = kit
        self._pool = kit.pool
        self._skips = kit.conflict_handler.skips
        self._target = TargetTransaction(session, kit)
        self._repair = Repair(session, kit)
        self._parts = PartApply(self._target, self._repair, kit)
        self._clock = asyncio.get_running_loop().time

    @property
    def state(self) -> WorkerState:
        """Return its state."""
        return self._target.state

    @property
    def since_s(self) -> float:
        """Return since when, by the event loop's clock."""
        return self._target.since_s

    async def run(self) -> None:
        """Work until cancelled, or until the pool lets it go.

        Raises:
            ApplyFailed: a batch still fails at the head.
            TargetRefused: a table or a privilege is missing.
            ProtocolError: a change cannot be read.
        """
        while True:
            self._target.show(WorkerState.IDLE)
            try:
                self.job = job = await self._pool.next_job()
            except Released:
                return
            self._target.show(WorkerState.EXECUTING)
            job.times.started_s = self.since_s
            job.worker = self.number
            try:
                is_committed = await self._apply(job)
            except StatementFailed as failure:
                if classify(failure) is not FailureClass.AGAIN:
                    raise
                # A request to cancel what ran before has come late, and hit a statement with no other attempt.
                raise TargetLost(f"target: a statement was interrupted: {failure.sqlstate}") from failure
            self.job = None
            if is_committed:
                self.batches += 1
                self.transactions += job.counts.n_transactions
                self.changes += job.counts.n_changes
                if self._kit.tables.trust:
                    self._kit.tables.count_applied(job.batch)
                self._pool.committed(job, self._clock())

    async def _apply(self, job: Job) -> bool:
        """Apply a job until it is committed; False if it was given back, or is not to be committed now."""
        match job:
            case SetJob() if job.batch.is_serial and job.prepare is None:
                return await self._parts.apply_each(job)
            case SetJob():
                return await self._apply_sets(job)
            case LargeJob():
                await LargeApply(job, self._target, self._repair, self._kit).apply(job)
            case StreamJob():
                return await StreamApply(job, self._target, self._repair, self._kit).apply()
            case OutcomeJob():
                await apply_outcome(job, self._target, self._repair, self._kit)
        return True

    async def _apply_sets(self, job: SetJob) -> bool:
        """Execute, wait for the turn, commit; else repeat it at the head, in parts, which stops on a real error."""
        if job.resume is not None or job.batch.is_suspect:
            return await self._parts.apply(job, RetryReason.SUSPECT)
        try:
            sets = await SetCommands.made(
                job.batch, self._kit.builder, self._kit.tables.role, self._kit.ahead, may_commit=job.prepare is None
            )
        except TargetRefused:
            # Changes before the refused one are applied first, at the head, where the refusal is raised again.
            return await self._parts.apply(job, RetryReason.REFUSED)
        while not (self._skips.ends and self._skips.hits(job.batch)):
            is_head = self._pool.flight.state.head is job
            try:
                turn = await self._attempt(job, sets)
            except StatementFailed as failure:
                await self.session.rollback()
                job.times.turn_s = 0.0
                if not job.must_yield or classify(failure) is not FailureClass.AGAIN:
                    return await self._parts.repeat(job, sets, failure, was_at_head=is_head)
                turn = CommitTurn.YIELD  # it was cancelled because it is in the way
            if turn is CommitTurn.COMMIT:
                return True
            if not await self._is_to_repeat(job, sets, turn):
                return False
        return await self._parts.apply(job, RetryReason.SKIP)

    async def _attempt(self, job: SetJob, sets: SetCommands) -> CommitTurn:
        """Execute, wait for the turn and commit; or roll back and return the other answer of the pool."""
        target, times = self._target, job.times
        has_turn = self._pool.flight.turns.may_commit(job)
        record = target.record_of(job)
        if has_turn and sets.fit_one_flight:
            target.show(WorkerState.COMMITTING)
            is_timed = self._kit.rules.times_commits and job.batch.seq % _TIMED_EACH == 0
            commands = sets.all if self._pool.flight.state.is_relaxed else sets.in_turn
            began_s = await self.session.execute_and_commit(record, commands, is_commit_timed=is_timed)
            times.executed_s = times.turn_s = self._clock()
            job.is_one_flight = True
            if began_s:
                job.flight_commit_s = times.executed_s - began_s
            return CommitTurn.COMMIT
        await target.execute(job, record, sets.all if has_turn else sets.first, on_sent=self._make_ahead)
        times.executed_s = self._clock()
        target.show(WorkerState.WAITING)
        turn = await self._pool.turn(job)
        if turn is CommitTurn.COMMIT and self._skips.ends and self._skips.hits(job.batch):
            turn = CommitTurn.YIELD  # the operator has asked since
        if turn is not CommitTurn.COMMIT:
            await self.session.rollback()
            return turn
        times.turn_s = self._clock()
        if sets.late and not has_turn and await self._late_and_commit(job, sets):
            return CommitTurn.COMMIT
        target.show(WorkerState.COMMITTING)
        await target.end(job, target.record_of(job))
        return CommitTurn.COMMIT

    def _make_ahead(self) -> None:
        """Make the commands of the next batch that waits for another, now that the target has some to execute."""
        blocked = self._pool.flight.next_blocked
        if isinstance(blocked, SetJob):
            self._kit.ahead.make(blocked, self._kit.builder, self._kit.tables.role)

    async def _late_and_commit(self, job: SetJob, sets: SetCommands) -> bool:
        """Apply a job's late keys; True if COMMIT went in the same flight.

        COMMIT goes along only at the head: any other job may have to be cancelled because it blocks the head, and a
        COMMIT on its way cannot be.
        """
        is_one_flight = self._pool.flight.state.head is job and sets.late_fit_one_flight
        # The stall check covers both states.
        self._target.show(WorkerState.COMMITTING if is_one_flight else WorkerState.EXECUTING)
        try:
            if is_one_flight:
                await self.session.execute_late_and_commit(sets.late)
            else:
                await self.session.execute_late(sets.late)
        except StatementFailed as failure:
            if failure.statement >= 0:
                failure.statement += len(sets.first)
            raise
        return is_one_flight

    async def _is_to_repeat(self, job: SetJob, sets: SetCommands, turn: CommitTurn) -> bool:
        """Return when a job that was rolled back for others may be executed again; False if it was given back."""
        job.attempts += 1
        if turn is CommitTurn.GIVE_BACK:
            self._pool.give_back(job)
            return False
        is_skipped = self._skips.ends and self._skips.hits(job.batch)
        suspects = [] if is_skipped else sets.suspects(None)
        self._kit.tables.count_retry(suspects)
        self._kit.tables.distrust(suspects, Level.ALONE)
        job.must_yield = False
        if self._pool.flight.state.is_relaxed and self._pool.flight.state.head is not job:
            # The head may have no worker yet.
            self._pool.park(job)
            return False
        self._target.show(WorkerState.WAITING)
        await self._pool.head_turn(job)
        self._target.show(WorkerState.EXECUTING)
        return True
