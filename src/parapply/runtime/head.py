"""One source transaction at the head: everything earlier has committed, so no failure can be of our own making.

    as it is, in source order ──► committed
            │ failed
            ├─ somebody in the way (deadlock, lock timeout) ──► the same again, soon
            ├─ the tables have changed ──► read the catalogue, once more
            ├─ may be a conflict ──► change by change, settled by policies (`conflict/settle.py`) ──► committed
            │                              │ a policy lets nothing pass: written down, then as below
            └─ an error of the data ──► on_error: stop, or wait and try again

A transaction that the operator wants skipped is recorded as done instead, in the same place.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.conflict.kinds import ConflictStop
from parapply.conflict.settle import may_be_conflict
from parapply.errors import StatementFailed
from parapply.logs import get_logger
from parapply.plan.steps import ordered_changes
from parapply.runtime.arbiter import source_of
from parapply.runtime.verdict import Verdict, apply_failed, verdict
from parapply.target.session import Record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from parapply.conflict.kinds import Conflict
    from parapply.errors import ApplyFailed
    from parapply.model import Transaction
    from parapply.plan.plans import Plans
    from parapply.plan.table import TablePlan
    from parapply.runtime.arbiter import Arbiter
    from parapply.runtime.job import Job
    from parapply.runtime.tables import Tables
    from parapply.target.commands import Command, CommandBuilder
    from parapply.target.session import Proof, WorkerSession

#: Seconds between attempts at the head when somebody else is in the way, doubled from the first to the last.
_AGAIN_MIN_S = 0.01
_AGAIN_MAX_S = 1.0
#: Seconds between attempts with on_error = "retry", doubled likewise.
_ERROR_MIN_S = 0.5
_ERROR_MAX_S = 30.0


class TryLater(Exception):
    """A transaction is to be tried again later; it is rolled back, and nothing of it is held on the target."""

    def __init__(self, delay_s: float) -> None:
        """Keep how long to wait."""
        super().__init__(delay_s)
        self.delay_s = delay_s


class Attempts:
    """How often one source transaction was tried at the head, and how long to wait before the next."""

    def __init__(self, *, stops_on_error: bool) -> None:
        """Begin with the shortest pauses."""
        self.stops_on_error = stops_on_error
        self.is_refreshed = False
        #: Whether each change is applied so that its conflicts can be settled.
        self.is_settling = False
        self._again_s = _AGAIN_MIN_S
        self._error_s = _ERROR_MIN_S

    def again_s(self) -> float:
        """Return the next pause for somebody else."""
        self._again_s, now = min(self._again_s * 2, _AGAIN_MAX_S), self._again_s
        return now

    def error_s(self) -> float:
        """Return the next pause for a repair."""
        self._error_s, now = min(self._error_s * 2, _ERROR_MAX_S), self._error_s
        return now


class Head:
    """Used by one worker, for one batch at a time."""

    def __init__(  # noqa: PLR0913  one place makes it
        self, number: int, session: WorkerSession, builder: CommandBuilder, tables: Tables, arbiter: Arbiter, *,
        stops_on_error: bool, waits_elsewhere: bool,
        first: Callable[[Job, Record], Record | Proof], end: Callable[[Job, Record], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Apply nothing yet.

        Args:
            number: of the worker, for the log.
            session: of the worker.
            builder: of the leader.
            tables: of the leader.
            arbiter: of the leader.
            stops_on_error: on_error is "stop".
            first: returns what the target transaction of a job writes about itself.
            end: commits the open transaction of a job, or prepares it.
            waits_elsewhere: raise `TryLater` instead of waiting for a repair: others can be applied meanwhile.
        """
        self._number = number
        self._session = session
        self._builder = builder
        self._tables = tables
        self._arbiter = arbiter
        self._stops_on_error = stops_on_error
        self._waits_elsewhere = waits_elsewhere
        self._first = first
        self._end = end
        self._seq = 0  # of the batch whose transaction is applied
        self._log = get_logger()

    def new_attempts(self) -> Attempts:
        """Return a fresh count."""
        return Attempts(stops_on_error=self._stops_on_error)

    async def apply(
        self, job: Job, transaction: Transaction, current: dict[int, TablePlan], attempts: Attempts
    ) -> dict[int, TablePlan]:
        """Apply one source transaction until it is committed; return the plans in force after it.

        Raises:
            ApplyFailed: it fails, and on_error is "stop".
            TryLater: it fails, and somebody else can use the worker.
            TargetLost, TargetRefused, ProtocolError: as everywhere.
        """
        self._seq = job.batch.seq
        while True:
            plans = self._tables.plans_from(current)
            try:
                await self._try(job, transaction, plans, attempts)
            except ConflictStop as stop:
                await self._session.rollback()
                job.attempts += 1
                await self.arbitrate(stop, transaction, attempts)
            except _Failed as failed:
                await self._session.rollback()
                job.attempts += 1
                if not attempts.is_settling and may_be_conflict(failed.failure, failed.commands):
                    attempts.is_settling = True
                else:
                    await self.look_at(failed.failure, failed.commands, transaction, attempts)
            else:
                self._arbiter.troubles.pop(job.batch.seq, None)
                return dict(plans.current)

    async def _try(self, job: Job, transaction: Transaction, plans: Plans, attempts: Attempts) -> None:
        """Apply it once, or skip it, and commit."""
        arbiter = self._arbiter
        record = record_at_head(transaction)
        first = self._first(job, record)
        changes = ordered_changes(transaction, plans)
        commands: Sequence[Command] = ()
        settler = None
        kept: list[Conflict] = []
        wanted = arbiter.skips.find(transaction.commit_lsn, transaction.end_lsn)
        try:
            if wanted is not None:
                kept = await arbiter.skip(self._session, first, transaction, changes, wanted)
            elif attempts.is_settling:
                settler = arbiter.settler(self._session, source_of(transaction))
                await self._session.begin_recorded(first)
                await settler.apply(changes)
                kept = await arbiter.keep(self._session, settler)
            else:
                commands = self._builder.in_order(changes)
                await self._session.execute(first, commands)
            await self._end(job, record)
        except StatementFailed as failure:
            raise _Failed(failure, settler.commands if settler is not None else commands) from failure
        arbiter.count(job, kept)
        if wanted is not None:
            arbiter.skipped(wanted, transaction.xid)

    async def look_at(
        self, failure: StatementFailed, commands: Sequence[Command], transaction: Transaction, attempts: Attempts
    ) -> None:
        """Return when the same may be tried again.

        Raises:
            ApplyFailed: it makes no sense to.
            TryLater: not now.
        """
        failed = commands[failure.statement] if 0 <= failure.statement < len(commands) else None
        judged = verdict(failure)
        if judged is Verdict.AGAIN:
            await asyncio.sleep(attempts.again_s())
            return
        if judged is Verdict.STALE and not attempts.is_refreshed:
            attempts.is_refreshed = True
            await self._session.forget_statements()
            self._arbiter.forget(self._session)
            await self._tables.refresh({command.plan.relation for command in commands})
            return
        error = apply_failed(failure, failed, transaction.xid, transaction.end_lsn)
        await self._wait_for_repair(error, attempts)

    async def arbitrate(self, stop: ConflictStop, transaction: Transaction, attempts: Attempts) -> None:
        """Write a conflict down that lets nothing pass, then stop or wait; its transaction is rolled back.

        Raises:
            ApplyFailed, TryLater: as `look_at`.
            TargetLost, TargetRefused: the history could not be written.
        """
        await self._arbiter.stopped(stop, source_of(transaction))
        error = apply_failed(stop.failure, stop.command, transaction.xid, transaction.end_lsn, stop=stop)
        await self._wait_for_repair(error, attempts)

    async def _wait_for_repair(self, error: ApplyFailed, attempts: Attempts) -> None:
        if attempts.stops_on_error:
            raise error
        self._log.error("batch_failed", worker=self._number, error=str(error), hint=error.hint)
        self._arbiter.troubles[self._seq] = error.line()
        attempts.is_refreshed = False
        delay_s = attempts.error_s()
        if self._waits_elsewhere:
            raise TryLater(delay_s)
        await self._arbiter.wait(delay_s)


def record_at_head(end: Transaction) -> Record:
    """Return what the target transaction of a source transaction says of itself when everything earlier is committed.

    Args:
        end: the transaction, or the piece or event that ends it.
    """
    return Record(end.end_lsn, end.end_lsn, end.commit_time_us, 1, low_lsn=end.end_lsn)


class _Failed(Exception):
    """A statement failed; `commands` is what it counts in."""

    def __init__(self, failure: StatementFailed, commands: Sequence[Command]) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.commands = commands
