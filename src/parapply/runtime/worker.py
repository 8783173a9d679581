"""One worker: takes a batch, executes it, waits for its turn, commits; on failure repeats it in order at the head.

Owns one session on the target. The leader starts one task for each worker and names it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from parapply import probes
from parapply.errors import StatementFailed, TargetRefused
from parapply.logs import get_logger
from parapply.model import Transaction, format_lsn
from parapply.runtime.crew import Turn
from parapply.runtime.head import Head, TryLater, record_at_head
from parapply.runtime.job import Resume
from parapply.runtime.streamed import Streamed
from parapply.runtime.verdict import Verdict, verdict
from parapply.runtime.whole import Whole
from parapply.target.session import Proof, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.model import Relation
    from parapply.plan.batch import Batch
    from parapply.runtime.arbiter import Arbiter
    from parapply.runtime.crew import Crew
    from parapply.runtime.job import Job
    from parapply.runtime.tables import Tables
    from parapply.runtime.two_phase import TwoPhase
    from parapply.target.commands import Command, CommandBuilder
    from parapply.target.session import WorkerSession

#: Changes of a batch that is executed and committed in one flight, if it has its turn when it begins: without a backlog
#: the round trip is a good part of the latency, and a check of the counts by the server costs little for few rows. So
#: many late keys, at most, are applied in the flight of the commit.
_ONE_FLIGHT = 256
#: Source transactions that a record names one by one; of more it says from which to which.
_MEMBERS = 64


class Worker:
    """All fields are written by its own task and read by progress, which shows them."""

    def __init__(  # noqa: PLR0913, PLR0917  one place makes workers
        self,
        number: int,
        session: WorkerSession,
        crew: Crew,
        builder: CommandBuilder,
        tables: Tables,
        arbiter: Arbiter,
        *,
        two_phase: TwoPhase,
        stops_on_error: bool,
        piece_bytes: int,
    ) -> None:
        """Start idle."""
        self.number = number
        self.session = session
        #: idle, executing, streaming (waits for more of a transaction in progress), waiting (for its turn), committing,
        #: retrying
        self.state = "idle"
        self.job: Job | None = None
        self.since_s = asyncio.get_running_loop().time()
        self.transactions = 0
        self.changes = 0
        self._crew = crew
        self._builder = builder
        self._tables = tables
        self._two_phase = two_phase
        self._arbiter = arbiter
        self._head = Head(
            number,
            session,
            builder,
            tables,
            arbiter,
            stops_on_error=stops_on_error,
            waits_elsewhere=crew.is_relaxed,
            first=self._first,
            end=self._end,
        )
        self._piece_bytes = piece_bytes
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            ApplyFailed: a batch still fails at the head.
            TargetLost: the connection ended.
            TargetRefused: a table or a privilege is missing.
            ProtocolError: a change cannot be read.
        """
        while True:
            self._now("idle")
            job = await self._crew.next_job()
            self.job = job
            self._now("executing")
            job.started_s = self.since_s
            job.worker = self.number
            if not await self._apply(job):
                self.job = None
                continue
            self.transactions += job.n_transactions
            self.changes += job.n_changes
            self.job = None
            self._tables.count_applied(job.batch)
            self._crew.committed(job, self._clock())

    async def _apply(self, job: Job) -> bool:
        """Apply a job until it is committed; False if it was given back, or is not to be committed now."""
        if job.outcome is not None:
            job.mode = "outcome"
            await self._decide(job)
        elif job.stream is not None:
            is_done = await self._streamed(job)
            if not is_done:
                self._crew.leave(job)
            return is_done
        elif job.pieces is not None:
            # A barrier: everything earlier has committed.
            job.mode = "large"
            await self._whole(job).apply_large(job.pieces)
        else:
            return await self._small(job)
        return True

    def _now(self, state: str) -> None:
        self.state = state
        self.since_s = self._clock()

    async def _small(self, job: Job) -> bool:
        """Apply a batch until it is committed; False if it was given back before."""
        batch = job.batch
        if job.resume is not None or batch.is_suspect:
            return await self._in_order(job, "suspect")
        try:
            commands = self._builder.of_steps(batch.steps, batch.size_bytes)
            late = self._builder.of_late_keys(batch.steps, batch.size_bytes) if batch.late_for else []
        except TargetRefused:
            # What comes before the refused change is applied first: at the head, where the same is met again.
            return await self._in_order(job, "refused")
        why = "skip"
        while not self._arbiter.skips.hits(batch):
            try:
                told = await self._attempt(job, commands, late)
            except StatementFailed as failure:
                await self.session.rollback()
                job.turn_s = 0.0
                if not job.must_yield or verdict(failure) is not Verdict.AGAIN:
                    self._tables.count_retry(_suspects(batch, failure, [*commands, *late]))
                    why = failure.sqlstate or "row count"
                    break
            else:
                if told is Turn.COMMIT:
                    return True
                await self.session.rollback()
                if told is Turn.GIVE_BACK:
                    job.attempts += 1
                    self._crew.give_back(job)
                    return False
            self._tables.count_retry(_suspects(batch, None, ()))
            job.attempts += 1
            job.must_yield = False
            if self._crew.is_relaxed and self._crew.head is not job:
                # The head may have no worker yet.
                self._crew.park(job)
                return False
            self._now("waiting")
            await self._crew.head_turn(job)
            self._now("executing")
        return await self._in_order(job, why)

    async def _attempt(self, job: Job, commands: list[Command], late: list[Command]) -> Turn:
        """Execute, wait for the turn and commit, or return what the job was told instead."""
        has_turn = self._crew.may_commit(job)
        if has_turn and job.batch.n_changes <= _ONE_FLIGHT and _is_one_flight(job, [*commands, *late]):
            self._now("committing")
            await self.session.execute_and_commit(self._record(job), [*commands, *late])
            job.executed_s = job.turn_s = self._clock()
            job.is_one_flight = True
            return Turn.COMMIT
        first = self._first(job, self._record(job))
        await self.session.execute(first, [*commands, *late] if has_turn else commands)
        job.executed_s = self._clock()
        self._now("waiting")
        told = await self._crew.turn(job)
        if told is not Turn.COMMIT:
            return told
        if self._arbiter.skips.hits(job.batch):
            return Turn.YIELD  # somebody has asked meanwhile
        job.turn_s = self._clock()
        if late and not has_turn and await self._late_and_commit(job, late, n_before=len(commands)):
            return Turn.COMMIT
        self._now("committing")
        await self._end(job, self._record(job))
        return Turn.COMMIT

    def _first(self, job: Job, record: Record) -> Record | Proof:
        """Return what the target transaction writes about itself."""
        return record if job.prepare is None else Proof(self._two_phase.gid(job.prepare))

    async def _end(self, job: Job, record: Record) -> None:
        """Commit the open transaction, or prepare it and then record that."""
        if job.prepare is None:
            await self.session.commit()
        else:
            await self._two_phase.prepare(self.session, job.prepare, record)

    async def _late_and_commit(self, job: Job, late: list[Command], n_before: int) -> bool:
        """Apply a job's late keys; True if COMMIT went in the same flight.

        Only of the head: another one may have to be cancelled where it stands in the head's way, which a COMMIT on its
        way cannot be.
        """
        is_few = sum([command.expected for command in late]) <= _ONE_FLIGHT
        is_one_flight = self._crew.head is job and is_few and _is_one_flight(job, late)
        # The stall check looks at both.
        self._now("committing" if is_one_flight else "executing")
        try:
            if is_one_flight:
                await self.session.execute_late_and_commit(late)
            else:
                await self.session.execute_late(late)
        except StatementFailed as failure:
            if failure.statement >= 0:
                failure.statement += n_before
            raise
        return is_one_flight

    def _record(self, job: Job) -> Record:
        """Return what the job's target transaction says of itself."""
        batch = job.batch
        members: tuple[int, ...] = ()
        if not self._crew.is_relaxed or self._crew.head is job:
            # Everything earlier is committed, or will be before this.
            low_lsn = batch.end_lsn
        else:
            low_lsn = self._crew.watermark.low_lsn
            members = tuple([one.end_lsn for one in batch.transactions[: _MEMBERS + 1]])
        return Record(
            batch.first_lsn,
            batch.end_lsn,
            batch.commit_time_us,
            len(batch.transactions),
            low_lsn,
            members if len(members) <= _MEMBERS else (),
        )

    async def _in_order(self, job: Job, why: str) -> bool:
        """Repeat a batch at the head: each source transaction by itself, row by row, everything earlier committed.

        False if it was given back before it was done, for others to be applied meanwhile; it goes on where it was.
        """
        batch = job.batch
        self._now("retrying")
        if job.resume is None:
            if batch.is_suspect:
                relations = [changes.plan.relation for changes in batch.table_changes]
                self._tables.count_retry(relations, was_predictable=True)
            job.attempts += 1
            job.mode = "rows"
            job.error = why
            job.resume = Resume(0, dict(job.plans_before), self._head.new_attempts())
        if self._crew.is_relaxed and self._crew.head is not job:
            self._crew.park(job)
            return False
        await self._crew.head_turn(job)
        if job.resume.n_done == 0:
            self._log.warning(
                "batch_retried", seq=batch.seq, worker=self.number, end_lsn=format_lsn(batch.end_lsn), reason=why
            )
        for transaction in batch.transactions[job.resume.n_done :]:
            n_done, current, attempts = job.resume
            try:
                current = await self._head.apply(job, transaction, current, attempts)
            except TryLater as later:
                self._crew.park(job)
                self._arbiter.later(later.delay_s, partial(self._crew.unpark, job))
                return False
            job.resume = Resume(n_done + 1, current, self._head.new_attempts())
        job.executed_s = job.turn_s = self._clock()
        return True

    def _whole(self, job: Job) -> Whole:
        return Whole(
            job,
            session=self.session,
            builder=self._builder,
            tables=self._tables,
            crew=self._crew,
            arbiter=self._arbiter,
            head=self._head,
            finish=self._finish,
        )

    async def _finish(self, job: Job, end: Transaction) -> None:
        """Record and end the open transaction of a large or streamed one."""
        record = record_at_head(end)
        await self.session.record(self._first(job, record))
        job.executed_s = job.turn_s = self._clock()
        self._now("committing")
        await self._end(job, record)

    async def _streamed(self, job: Job) -> bool:
        return await Streamed(
            job,
            session=self.session,
            builder=self._builder,
            tables=self._tables,
            crew=self._crew,
            whole=self._whole(job),
            arbiter=self._arbiter,
            note=self._now,
            finish=self._finish,
            piece_bytes=self._piece_bytes,
        ).apply()

    async def _decide(self, job: Job) -> None:
        """Do what the publisher did with a prepared transaction. It is a barrier: everything earlier has committed."""
        assert job.outcome is not None, "the caller has looked"
        batch = job.batch
        record = Record(batch.end_lsn, batch.end_lsn, batch.commit_time_us, 0, low_lsn=batch.end_lsn)
        end = Transaction(job.outcome.xid, batch.end_lsn, batch.commit_time_us)
        end.end_lsn = batch.end_lsn
        attempts = self._head.new_attempts()
        while True:
            try:
                await self._two_phase.decide(self.session, job.outcome, record)
                break
            except StatementFailed as failure:
                job.attempts += 1
                try:
                    await self._head.look_at(failure, (), end, attempts)
                except TryLater as later:
                    # Everything later waits for this one anyway.
                    await asyncio.sleep(later.delay_s)
        job.executed_s = job.turn_s = self._clock()


def _is_one_flight(job: Job, commands: Sequence[Command]) -> bool:
    """Tell whether the server can check what a job's commands must have found, and commit without asking back."""
    return (
        job.prepare is None
        and all(command.prepared.is_set for command in commands)
        and not probes.is_armed(probes.DML_SENT, probes.BEFORE_COMMIT)
    )


def _suspects(batch: Batch, failure: StatementFailed | None, commands: Sequence[Command]) -> list[Relation]:
    """Return the tables because of which a batch may have to be repeated.

    Args:
        batch: that failed.
        failure: as met; None where it had to yield.
        commands: of the batch.
    """
    if failure is not None and verdict(failure) is Verdict.STALE:
        return []  # the tables have changed: that says nothing about keys
    if failure is not None and 0 <= failure.statement < len(commands):
        return [commands[failure.statement].plan.relation]
    plans = [changes.plan for changes in batch.table_changes]
    # Where code runs, or what is unique is not all predicted.
    known = [plan for plan in plans if plan.facts.unique or plan.facts.foreign_keys or plan.facts.triggers]
    return [plan.relation for plan in known or plans]
