"""A batch at the head, one source transaction after the other, row by row: everything earlier has committed.

    as it is, in source order ──► committed
            │ failed
            ├─ a PREPARE that the publisher has rolled back ──► nothing is prepared, recorded
            ├─ may be a conflict ──► change by change, settled by policies (`conflict/settle.py`) ──► committed
            │                              │ a policy stops it: recorded, then as below
            └─ else ──► the same again, or stop (`repair.py`)

A transaction that the operator wants skipped is recorded as done instead, in the same place.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from parapply.conflict.kinds import ConflictStop
from parapply.conflict.settle import may_be_conflict
from parapply.errors import StatementFailed, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.plan.steps import ordered_changes
from parapply.runtime.apply.conflicts import source_of
from parapply.runtime.apply.transaction import record_at_head
from parapply.runtime.pool.job import Resume
from parapply.runtime.pool.retry import TryLater
from parapply.vocabulary import RetryReason, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.conflict.kinds import Conflict
    from parapply.model import Transaction
    from parapply.plan.plans import Plans
    from parapply.plan.table import TablePlan
    from parapply.runtime.apply.kit import WorkerKit
    from parapply.runtime.apply.repair import Repair
    from parapply.runtime.apply.transaction import TargetTransaction
    from parapply.runtime.pool.job import SetJob
    from parapply.runtime.pool.retry import Attempts
    from parapply.target.sql.commands import Command


class SerialApply:
    """Used by one worker, for one batch at a time."""

    def __init__(self, target: TargetTransaction, repair: Repair, kit: WorkerKit) -> None:
        """Apply nothing yet."""
        self._target = target
        self._session = target.session
        self._repair = repair
        self._kit = kit
        self._pool = kit.pool
        self._conflict_handler = kit.conflict_handler
        self._log = get_logger()

    async def apply(self, job: SetJob, why: str) -> bool:
        """Repeat a batch at the head; False if it was given back before it was done: it resumes where it was.

        Args:
            job: rolled back, or not begun.
            why: for people.

        Raises:
            ApplyFailed: a transaction of it fails, and on_error is "stop".
            TargetLost, TargetRefused, ProtocolError: as everywhere.
        """
        batch = job.batch
        self._target.show(WorkerState.RETRYING)
        resume = job.resume
        if resume is None:
            if batch.is_suspect:
                relations = [changes.plan.relation for changes in batch.table_changes]
                self._kit.tables.count_retry(relations, was_predictable=True)
            job.attempts += 1
            job.error = why
            resume = job.resume = Resume(0, dict(job.plans_before), self._kit.new_attempts())
        if self._pool.is_relaxed and self._pool.head is not job:
            self._pool.park(job)
            return False
        await self._pool.head_turn(job)
        if resume.n_done == 0:
            self._log.warning(
                "batch_retried", seq=batch.seq, worker=job.worker, end_lsn=format_lsn(batch.end_lsn), reason=why
            )
            if job.error == RetryReason.CODE:
                await self._kit.tables.refresh_written(batch)
        for transaction in batch.transactions[resume.n_done :]:
            try:
                current = await self._one(job, transaction, resume)
            except TryLater as later:
                self._pool.park(job)
                self._conflict_handler.later(later.delay_s, partial(self._pool.unpark, job))
                return False
            resume = job.resume = Resume(resume.n_done + 1, current, self._kit.new_attempts())
        job.times.executed_s = job.times.turn_s = asyncio.get_running_loop().time()
        return True

    async def _one(self, job: SetJob, transaction: Transaction, resume: Resume) -> dict[int, TablePlan]:
        """Apply one source transaction until it is committed; return the plans in force after it.

        Raises:
            TryLater: it fails, and another job can use the worker.
            ApplyFailed, TargetLost, TargetRefused, ProtocolError: as `apply`.
        """
        while True:
            plans = self._kit.tables.plans_from(resume.plans)
            try:
                await self._try(job, transaction, plans, resume.attempts)
            except (ConflictStop, _Failed, TargetRefused) as stop:
                await self._session.rollback()
                job.attempts += 1
                if job.prepare is None or not await self._kit.two_phase.is_rolled_back(job.prepare):
                    await self._judge(job, stop, transaction, resume.attempts)
                    continue
                await self._target.leave_out(job, job.prepare, transaction)
            self._repair.succeeded(job)
            return dict(plans.current)

    async def _try(self, job: SetJob, transaction: Transaction, plans: Plans, attempts: Attempts) -> None:
        """Apply it once, or skip it, and commit."""
        conflict_handler = self._conflict_handler
        record = record_at_head(transaction)
        changes = ordered_changes(transaction, plans)
        commands: Sequence[Command] = ()
        settler = None
        kept: list[Conflict] = []
        wanted = conflict_handler.skips.find(transaction.commit_lsn, transaction.end_lsn)
        try:
            if wanted is not None:
                await self._target.begin(job, record)
                kept = await conflict_handler.write_skipped(self._session, source_of(transaction), changes)
                await self._session.run(conflict_handler.skips.finishing(wanted, transaction.xid))
            elif attempts.is_settling:
                settler = self._repair.settler(source_of(transaction))
                await self._target.begin(job, record)
                await settler.apply(changes)
                kept = await self._repair.keep(settler)
            else:
                commands = self._kit.builder.in_order(changes)
                await self._target.execute(job, record, commands)
            await self._target.end(job, record)
        except StatementFailed as failure:
            raise _Failed(failure, settler.commands if settler is not None else commands) from failure
        conflict_handler.count(job, kept)
        if wanted is not None:
            conflict_handler.skipped(wanted, transaction.xid)

    async def _judge(
        self, job: SetJob, stop: ConflictStop | _Failed | TargetRefused, transaction: Transaction, attempts: Attempts
    ) -> None:
        """Return when it may be tried again, the same or with its conflicts settled.

        Raises:
            ApplyFailed, TryLater, TargetLost, TargetRefused: as `_one`.
        """
        if isinstance(stop, ConflictStop):
            await self._repair.stopped(job, stop, transaction, attempts)
        elif isinstance(stop, TargetRefused):
            raise stop
        elif await self._repair.learns(stop.failure, stop.commands, attempts):
            return
        elif not attempts.is_settling and may_be_conflict(stop.failure, stop.commands):
            attempts.is_settling = True
        else:
            await self._repair.look_at(job, stop.failure, stop.commands, transaction, attempts)


class _Failed(Exception):
    """A statement failed; `commands` is what it counts in."""

    def __init__(self, failure: StatementFailed, commands: Sequence[Command]) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.commands = commands
