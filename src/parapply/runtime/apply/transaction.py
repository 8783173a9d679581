"""The target transactions of one worker: the record of each, its end, and its display.

A target transaction writes its record first, or last if its end LSN is not known before. One that will be prepared
writes a proof instead, and its record when it is prepared (`pool/two_phase.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.target.session.pipeline import do_nothing
from parapply.target.session.session import Proof, Record
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.engine.job import AppliedJob, LargeJob, SetJob, StreamJob
    from parapply.model import Transaction
    from parapply.runtime.apply.kit import WorkerKit
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import Command
    from parapply.wire.messages import Prepare, StreamPrepare

#: Source transactions that a record names one by one; of more it names the first and the last.
_MEMBERS = 64


class TargetTransaction:
    """One after the other, on one session. Owned by a worker, and used by the parts that it calls for its job."""

    def __init__(self, session: WorkerSession, kit: WorkerKit) -> None:
        """Start idle, with no open transaction."""
        self.session = session
        #: State of the worker, and its beginning by the event loop's clock. Written by `show`; read by the stall check,
        #: the watchdog, the monitor and metrics.
        self.state = WorkerState.IDLE
        self._pool = kit.pool
        self._two_phase = kit.two_phase
        self._clock = asyncio.get_running_loop().time
        self.since_s = self._clock()

    def show(self, state: WorkerState) -> None:
        """Show the worker's state from now on."""
        self.state = state
        self.since_s = self._clock()

    def record_of(self, job: SetJob) -> Record:
        """Return the record of a target transaction that holds a whole batch."""
        batch = job.batch
        members: tuple[int, ...] = ()
        if not self._pool.flight.state.is_relaxed or self._pool.flight.state.head is job:
            # Everything earlier is committed, or will be before this.
            low_lsn = batch.end_lsn
        else:
            low_lsn = self._pool.flight.state.watermark.low_lsn
            members = tuple([one.end_lsn for one in batch.transactions[: _MEMBERS + 1]])
        return Record(
            batch.first_lsn,
            batch.end_lsn,
            batch.commit_time_us,
            len(batch.transactions),
            low_lsn,
            members if len(members) <= _MEMBERS else (),
        )

    async def begin(self, job: SetJob, record: Record) -> None:
        """Begin one, recorded, whose changes come in pieces.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.begin_recorded`.
        """
        await self.session.begin_recorded(self._first(job, record))

    async def execute(
        self, job: SetJob, record: Record, commands: Sequence[Command], on_sent: Callable[[], None] = do_nothing
    ) -> None:
        """Begin one, recorded, and execute commands; `end` commits it.

        Args:
            job: of which batch.
            record: of it.
            commands: of it.
            on_sent: called while the target executes them.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.execute`.
        """
        await self.session.execute(self._first(job, record), commands, on_sent=on_sent)

    async def end(self, job: AppliedJob, record: Record) -> None:
        """Commit the open transaction, or prepare it and then record that.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.commit` and `TwoPhase.prepare`.
        """
        if job.prepare is None:
            await self.session.commit()
        else:
            await self._two_phase.prepare(self.session, job.prepare, record)

    async def finish(self, job: LargeJob | StreamJob, end: Transaction) -> None:
        """Record and end the open transaction, which was begun without a record.

        Args:
            job: whose it is.
            end: the last piece or the event that ends it on the publisher.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.record` and `end`.
        """
        record = record_at_head(end)
        await self.session.record(self._first(job, record))
        job.times.executed_s = job.times.turn_s = self._clock()
        self.show(WorkerState.COMMITTING)
        await self.end(job, record)

    async def leave_out(self, job: AppliedJob, message: Prepare | StreamPrepare, end: Transaction) -> None:
        """Record a PREPARE that the publisher has rolled back, without preparing anything; no transaction is open.

        Raises:
            TargetLost: the connection ended.
        """
        await self._two_phase.leave_out(self.session, message, record_at_head(end))
        job.left_out()

    def _first(self, job: AppliedJob, record: Record) -> Record | Proof:
        """Return the record of the target transaction of a job."""
        return record if job.prepare is None else Proof(self._two_phase.gid(job.prepare))


def record_at_head(end: Transaction) -> Record:
    """Return the record of a single source transaction's target transaction, with everything earlier committed.

    Args:
        end: the transaction, or the piece or event that ends it.
    """
    return record_of_run([end])


def record_of_run(transactions: Sequence[Transaction]) -> Record:
    """Return the same of consecutive source transactions, at least one, that are one target transaction."""
    last = transactions[-1]
    return Record(transactions[0].end_lsn, last.end_lsn, last.commit_time_us, len(transactions), low_lsn=last.end_lsn)
