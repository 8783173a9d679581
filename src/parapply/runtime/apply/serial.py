"""One source transaction at the head, row by row: everything earlier has committed.

    as it is, in source order ──► committed
            │ failed
            ├─ a PREPARE that the publisher has rolled back ──► nothing is prepared, recorded
            ├─ may be a conflict ──► change by change, settled by policies (`conflict/settle.py`) ──► committed
            │                              │ a policy stops it: recorded, then as below
            └─ else ──► the same again, or stop (`repair.py`)

A transaction that the operator wants skipped is recorded as done instead, in the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.conflict.kinds import ConflictStop
from parapply.conflict.settle import may_be_conflict
from parapply.errors import StatementFailed, TargetRefused
from parapply.plan.steps import ordered_changes
from parapply.runtime.apply.conflicts import source_of
from parapply.runtime.apply.failure import may_follow_conflict
from parapply.runtime.apply.transaction import record_at_head
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.conflict.kinds import Conflict
    from parapply.engine.job import Attempts, Resume, SetJob
    from parapply.model import Transaction
    from parapply.plan.table import Plans, TablePlan
    from parapply.runtime.apply.repair import Repair
    from parapply.runtime.apply.transaction import TargetTransaction, WorkerKit
    from parapply.target.sql.commands import Command


class SerialApply:
    """Used by one worker, for one transaction at a time."""

    def __init__(self, target: TargetTransaction, repair: Repair, kit: WorkerKit) -> None:
        """Apply nothing yet."""
        self._target = target
        self._session = target.session
        self._repair = repair
        self._kit = kit
        self._conflict_handler = kit.conflict_handler

    async def apply(self, job: SetJob, transaction: Transaction, resume: Resume) -> dict[int, TablePlan]:
        """Apply one source transaction until it is committed; return the plans in force after it.

        Raises:
            TryLater: it fails, and another job can use the worker.
            ApplyFailed: it fails, and on_error is "stop".
            TargetLost, TargetRefused, ProtocolError: as everywhere.
        """
        while True:
            plans = self._kit.tables.plans_from(resume.plans)
            try:
                if not await self._try(job, transaction, plans, resume.attempts):
                    continue
            except (ConflictStop, _Failed, TargetRefused) as stop:
                await self._session.rollback()
                self._target.show(WorkerState.RETRYING)
                job.attempts += 1
                if job.prepare is None or not await self._kit.two_phase.is_rolled_back(job.prepare):
                    await self._judge(job, stop, transaction, resume.attempts)
                    continue
                await self._target.leave_out(job, job.prepare, transaction)
            self._repair.succeeded(job)
            return dict(plans.current)

    async def _try(self, job: SetJob, transaction: Transaction, plans: Plans, attempts: Attempts) -> bool:
        """Apply it once, or skip it, and commit; return False if the other was asked for before the commit."""
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
                if not await conflict_handler.finish_skip(self._session, wanted, transaction.xid):
                    await self._session.rollback()
                    return False
            elif attempts.is_settling:
                settler = self._repair.settler(source_of(transaction))
                await self._target.begin(job, record)
                await settler.apply(changes)
                kept = await self._repair.keep(settler)
            else:
                commands = self._kit.builder.in_order(changes)
                await self._target.execute(job, record, commands)
            if wanted is None and conflict_handler.skips.find(transaction.commit_lsn, transaction.end_lsn) is not None:
                await self._session.rollback()
                return False
            self._target.show(WorkerState.COMMITTING)
            await self._target.end(job, record)
        except StatementFailed as failure:
            raise _Failed(failure, settler.commands if settler is not None else commands) from failure
        conflict_handler.count(job, kept)
        if wanted is not None and not job.is_left_out:
            conflict_handler.skipped(wanted, transaction.xid)
        return True

    async def _judge(
        self, job: SetJob, stop: ConflictStop | _Failed | TargetRefused, transaction: Transaction, attempts: Attempts
    ) -> None:
        """Return when it may be tried again, the same or with its conflicts settled.

        Raises:
            ApplyFailed, TryLater, TargetLost, TargetRefused: as `apply`.
        """
        if isinstance(stop, ConflictStop):
            await self._repair.stopped(job, stop, transaction, attempts)
        elif isinstance(stop, TargetRefused):
            raise stop
        elif await self._repair.learns(stop.failure, stop.commands, attempts, self._repair.refresh):
            return
        elif not attempts.is_settling and (
            may_be_conflict(stop.failure, stop.commands) or may_follow_conflict(stop.failure, stop.commands)
        ):
            attempts.is_settling = True
        else:
            await self._repair.look_at(job, stop.failure, stop.commands, transaction, attempts)


class _Failed(Exception):
    """A statement failed; `commands` is what it counts in."""

    def __init__(self, failure: StatementFailed, commands: Sequence[Command]) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.commands = commands
