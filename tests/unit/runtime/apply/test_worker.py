"""One worker, where what it does fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from parapply.engine.flight import Flight
from parapply.engine.job import OutcomeJob
from parapply.engine.state import EngineState
from parapply.errors import ParapplyError, StatementFailed, TargetLost
from parapply.plan.batch import Batch
from parapply.runtime.apply.transaction import ApplyRules, WorkerKit
from parapply.runtime.apply.worker import Worker
from parapply.runtime.pool.pool import WorkerPool
from parapply.wire.messages import CommitPrepared

if TYPE_CHECKING:
    from parapply.engine.job import Job
    from parapply.runtime.apply.conflicts import ConflictHandler
    from parapply.runtime.apply.transaction import CommandRules
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.plans import TablePlans
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import CommandBuilder

_MESSAGE = CommitPrepared(commit_lsn=1, end_lsn=2, commit_time_us=0, xid=7, gid="g")


class _Failing(Worker):
    """One whose statement fails where nothing expects it."""

    sqlstate: str

    async def _apply(self, job: Job) -> bool:
        del job
        raise StatementFailed("a statement", sqlstate=self.sqlstate)


@pytest.mark.parametrize(("sqlstate", "error"), [("57014", TargetLost), ("42883", StatementFailed)])
async def test_a_request_to_cancel_that_comes_late_ends_the_epoch_only(
    sqlstate: str, error: type[ParapplyError]
) -> None:
    """Whatever statement it hits, all that is not committed is read again; a true failure ends the daemon."""
    kit = WorkerKit(
        pool=WorkerPool(Flight(EngineState(0, 0.0))),
        builder=cast("CommandBuilder", None),
        tables=cast("TablePlans", None),
        conflict_handler=cast("ConflictHandler", SimpleNamespace(skips=None)),
        two_phase=cast("TwoPhase", None),
        rules=ApplyRules(commands=cast("CommandRules", None), piece_bytes=1, stops_on_error=True),
        is_applied=lambda _: False,
    )
    worker = _Failing(1, cast("WorkerSession", None), kit)
    worker.sqlstate = sqlstate
    job = OutcomeJob(Batch(1), _MESSAGE)
    job.batch.end_lsn = 2
    kit.pool.submit(job, 0.0)
    with pytest.raises(error):
        await worker.run()
