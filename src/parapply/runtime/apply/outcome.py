"""Outcomes of the publisher's prepared transactions, repeated here. A barrier: everything earlier has committed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.engine.job import TryLater
from parapply.errors import StatementFailed
from parapply.model import Transaction
from parapply.target.session.session import Record

if TYPE_CHECKING:
    from parapply.engine.job import OutcomeJob
    from parapply.runtime.apply.repair import Repair
    from parapply.runtime.apply.transaction import TargetTransaction, WorkerKit


async def apply_outcome(job: OutcomeJob, target: TargetTransaction, repair: Repair, kit: WorkerKit) -> None:
    """Commit or roll back the prepared transaction, and record that.

    Raises:
        ApplyFailed: it fails, and on_error is "stop"; or another session ended it in another way.
    """
    batch = job.batch
    record = Record(batch.end_lsn, batch.end_lsn, batch.commit_time_us, 0, low_lsn=batch.end_lsn)
    end = Transaction(job.outcome.xid, batch.end_lsn, batch.commit_time_us)
    end.end_lsn = batch.end_lsn
    attempts = kit.new_attempts()
    while True:
        try:
            await kit.two_phase.decide(target.session, job.outcome, record)
            break
        except StatementFailed as failure:
            job.attempts += 1
            try:
                await repair.look_at(job, failure, (), end, attempts)
            except TryLater as later:
                # Everything later waits for this one anyway.
                await asyncio.sleep(later.delay_s)
    repair.succeeded(job)
    job.times.executed_s = job.times.turn_s = asyncio.get_running_loop().time()
