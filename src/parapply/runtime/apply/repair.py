"""Repair of a failure at the head. Everything earlier has committed, so none of our batches has caused it.

Another session in the way: the same again, soon. Tables that have changed: the catalogue is read, then the same again.
An error of the data, or a conflict that no policy allows: on_error says whether to stop, or to wait and try again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.conflict.local import LocalRows
from parapply.conflict.settle import Settler
from parapply.engine.job import Attempts, LargeJob, TryLater
from parapply.errors import StatementFailed, TargetLost
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime.apply.conflicts import source_of
from parapply.runtime.apply.failure import FailureClass, apply_failed, classify
from parapply.target.sql.commands import code_check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from parapply.conflict.kinds import Conflict, ConflictStop, Source
    from parapply.engine.job import Job, StreamJob
    from parapply.errors import ApplyFailed
    from parapply.model import Relation, Transaction
    from parapply.plan.steps import TruncateStep
    from parapply.plan.table import TablePlan
    from parapply.runtime.apply.transaction import WorkerKit
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import Command

    #: Reads the target's tables of relations again; raises TargetRefused or TargetLost.
    Refresh = Callable[[Iterable[Relation]], Awaitable[None]]


class Repair:
    """Used by one worker, for one job at a time."""

    def __init__(self, session: WorkerSession, kit: WorkerKit) -> None:
        """Keep what the repair of a failure needs."""
        self._session = session
        self._kit = kit
        self._conflict_handler = kit.conflict_handler
        #: Reads the target's rows that changes conflict with; None: no conflict yet.
        self._local: LocalRows | None = None
        self._log = get_logger()

    def settler(self, source: Source) -> Settler:
        """Return the settler that applies a transaction, or its pieces, with its conflicts settled."""
        if self._local is None:
            tracks_commits, may_lock = self._kit.rules.tracks_commits, self._kit.tables.may_lock_rows
            self._local = LocalRows(self._session, tracks_commits=tracks_commits, locks=may_lock)
        self._local.begin()
        return Settler(self._session, self._local, self._kit.builder, self._conflict_handler.rules, source)

    async def keep(self, settler: Settler) -> list[Conflict]:
        """Write the settled conflicts into the history, inside the open transaction, and return them.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
        """
        return await self._conflict_handler.keep(self._session, settler)

    async def refresh(self, relations: Iterable[Relation]) -> None:
        """Read the target's tables of relations again, as other sessions see them; errors as `learns`."""
        await self._kit.tables.refresh(relations)

    async def learns(
        self,
        failure: StatementFailed,
        commands: Sequence[Command],
        attempts: Attempts,
        refresh: Refresh,
    ) -> bool:
        """Return whether a wrong row count may be the doing of code that the plans did not know; they know it then.

        A trigger may leave out an existing row, and such a count says nothing until the plan knows of the trigger.

        Args:
            failure: of `commands`, which are undone.
            commands: executed row by row.
            attempts: of their transaction or piece.
            refresh: reads their tables again.

        Raises:
            TargetRefused: a table can no longer be written to.
        """
        if failure.sqlstate:
            return False
        try:
            found = [await self._session.fetch(check) for check in code_check(commands, self._kit.tables.role)]
        except StatementFailed as error:
            raise TargetLost(f"target: code on it could not be looked for: {error.sqlstate}") from error
        return any(found) and await self._rereads(commands, attempts, refresh)

    async def _rereads(self, commands: Sequence[Command], attempts: Attempts, refresh: Refresh) -> bool:
        """Read the tables of commands again, and return whether that may help: the first time, or if one has changed.

        Tables may be altered several times while one transaction is tried.
        """
        has_changed = await self.have_changed(commands, refresh)
        is_first, attempts.is_refreshed = not attempts.is_refreshed, True
        return is_first or has_changed

    async def have_changed(self, commands: Sequence[Command], refresh: Refresh) -> bool:
        """Read the tables of commands again, and return whether one has changed since its plan."""
        await refresh({command.plan.relation for command in commands})
        known = self._kit.tables.plans.known
        return any(known[one.plan.relation].facts != one.plan.facts for one in commands)

    async def look_at(
        self,
        job: Job,
        failure: StatementFailed,
        commands: Sequence[Command],
        transaction: Transaction,
        attempts: Attempts,
    ) -> None:
        """Return when the same may be tried again; it is rolled back.

        Raises:
            ApplyFailed: it makes no sense to.
            TryLater: not now.
        """
        failed = command_of(failure, commands)
        is_again = await self.may_repeat(failure, commands, attempts, self.refresh)
        retried = is_again or not attempts.stops_on_error
        error = apply_failed(failure, failed, transaction.xid, transaction.end_lsn, is_retried=retried)
        if is_again:
            self.tell_long(job, error, attempts)
        else:
            await self._wait(job, error, attempts)

    async def may_repeat(
        self,
        failure: StatementFailed,
        commands: Sequence[Command],
        attempts: Attempts,
        refresh: Refresh,
    ) -> bool:
        """Return whether the same may be tried again, when it may; `refresh` is as of `learns`."""
        judged = classify(failure)
        if judged is FailureClass.AGAIN:
            await asyncio.sleep(attempts.again_s())
            return True
        if judged is FailureClass.FINAL:
            return False
        await self._session.forget_statements()
        return await self._rereads(commands, attempts, refresh)

    async def stopped(self, job: Job, stop: ConflictStop, transaction: Transaction, attempts: Attempts) -> None:
        """Record a conflict that stops its transaction, then stop or wait; the transaction is rolled back.

        Raises:
            ApplyFailed, TryLater: as `look_at`.
            TargetLost, TargetRefused: the history could not be written.
        """
        await self._conflict_handler.stopped(stop, source_of(transaction))
        retried = not attempts.stops_on_error
        error = apply_failed(
            stop.failure, stop.command, transaction.xid, transaction.end_lsn, stop=stop, is_retried=retried
        )
        await self._wait(job, error, attempts)

    def tell_long(self, job: Job, error: ApplyFailed, attempts: Attempts) -> None:
        """Log and show why a job is tried again, if another session seems to have been in the way for long."""
        if attempts.is_long(asyncio.get_running_loop().time()):
            self._tell(job, error)

    def succeeded(self, job: Job) -> None:
        """Stop showing that a job is tried again and again."""
        self._kit.pool.flight.state.troubles.pop(job.batch.seq, None)

    async def _wait(self, job: Job, error: ApplyFailed, attempts: Attempts) -> None:
        if attempts.stops_on_error:
            raise error
        self._tell(job, error)
        attempts.is_refreshed = False
        delay_s = attempts.error_s()
        if self._kit.pool.flight.state.is_relaxed:
            # Others can use the worker.
            raise TryLater(delay_s)
        await self._conflict_handler.wait(delay_s)

    def _tell(self, job: Job, error: ApplyFailed) -> None:
        commit_lsn = format_lsn(job.commit_lsn) if isinstance(job, LargeJob) else None
        self._log.error("batch_failed", worker=job.worker, commit_lsn=commit_lsn, error=str(error), hint=error.hint)
        self._kit.pool.flight.state.troubles[job.batch.seq] = error.line()


class DataFailed(Exception):
    """An error of the data; reported when the end of the transaction is known."""

    def __init__(self, failure: StatementFailed, command: Command | None) -> None:
        """Keep the failure and the command that failed, if it was one."""
        super().__init__(str(failure))
        self.failure = failure
        self.command = command


class RolledBack(Exception):
    """The publisher has rolled the transaction back after its PREPARE: a failure in it is no error."""


class Unwanted(Exception):
    """The operator skips a transaction, which this one is, or may be: its statement was cancelled, or has failed."""


class PieceRepair:
    """Repair of a failed piece of one transaction: the pieces before it are not repeated.

    An error that stops the transaction is raised here and reported by the caller, because the end may not be known yet.
    """

    def __init__(self, job: LargeJob | StreamJob, end: Transaction | None, repair: Repair, kit: WorkerKit) -> None:
        """Start with no conflict.

        Args:
            job: whose pieces they are.
            end: the event that ends it, where that is known; None where the last piece does.
            repair: of the worker.
            kit: of the workers.
        """
        self._job = job
        self._end = end
        self._repair = repair
        self._conflict_handler = kit.conflict_handler
        self._two_phase = kit.two_phase
        #: Conflicts settled in it so far.
        self.kept: list[Conflict] = []

    async def look_at(
        self,
        failure: StatementFailed,
        commands: Sequence[Command],
        piece: Transaction,
        attempts: Attempts,
        refresh: Refresh,
    ) -> None:
        """Return when the same piece may be tried again in source order; it is undone. `refresh` reads tables again.

        If that takes long it is shown.

        Raises:
            DataFailed: it makes no sense to.
            RolledBack, Unwanted: as the classes.
        """
        self.check_wanted()
        await self._check_outcome(piece)
        command = command_of(failure, commands)
        if not await self._repair.may_repeat(failure, commands, attempts, refresh):
            raise DataFailed(failure, command)
        end = self.end_of(piece)
        self.tell_long(apply_failed(failure, command, end.xid, end.end_lsn, is_retried=True), attempts)

    def tell_long(self, error: ApplyFailed, attempts: Attempts) -> None:
        """Do what `Repair.tell_long` does; `succeeded` ends it."""
        self._repair.tell_long(self._job, error, attempts)

    def succeeded(self) -> None:
        """Do what `Repair.succeeded` does, after each piece: the next one may take long."""
        self._repair.succeeded(self._job)

    def end_of(self, piece: Transaction) -> Transaction:
        """Return what has the transaction's end LSN, if that is known."""
        return self._end or piece

    async def learns(
        self, failure: StatementFailed, commands: Sequence[Command], attempts: Attempts, refresh: Refresh
    ) -> bool:
        """Do what `Repair.learns` does; the piece is undone."""
        return await self._repair.learns(failure, commands, attempts, refresh)

    async def settle(
        self, piece: Transaction, changes: Sequence[tuple[TablePlan, bytes] | TruncateStep], refresh: Refresh
    ) -> None:
        """Apply a piece change by change, its conflicts settled; half of it cannot be repeated. `refresh` as `look_at`.

        Raises:
            ConflictStop: a policy stops it.
            DataFailed, RolledBack, Unwanted: as `look_at`.
            TargetLost: another session was in the way, or has changed a table; it is sent again.
        """
        await self._check_outcome(piece)
        settler = self._repair.settler(source_of(self.end_of(piece)))
        try:
            await settler.apply(changes, self._job.counts.n_changes + 1)
            self.kept += await self._repair.keep(settler)
        except StatementFailed as failure:
            judged = classify(failure)
            if judged is FailureClass.AGAIN:
                self.check_wanted()
                command, end = command_of(failure, settler.commands), self.end_of(piece)
                error = apply_failed(failure, command, end.xid, end.end_lsn, is_retried=True)
                raise TargetLost(f"target: a large transaction with a conflict is sent again: {error}") from failure
            # An error of the data may look the same, and would come again each time.
            if judged is FailureClass.STALE and await self._repair.have_changed(settler.commands, refresh):
                raise TargetLost("target: tables of a large transaction have changed; it is sent again") from failure
            raise DataFailed(failure, command_of(failure, settler.commands)) from failure

    def check_wanted(self) -> None:
        """Go on with the transaction.

        Raises:
            Unwanted: as the class.
        """
        if self._job.is_unwanted or self._conflict_handler.is_to_skip(self._job):
            raise Unwanted

    async def _check_outcome(self, piece: Transaction) -> None:
        if await self._two_phase.is_rolled_back(self.end_of(piece).event):
            raise RolledBack


def command_of(failure: StatementFailed, commands: Sequence[Command]) -> Command | None:
    """Return the command that failed; None for the record, the commit or another statement of ours."""
    return commands[failure.statement] if 0 <= failure.statement < len(commands) else None
