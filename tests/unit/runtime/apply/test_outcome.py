"""Outcome of a prepared transaction, where the target refuses it at first."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from parapply.config import ConflictConfig
from parapply.conflict.skips import Skips
from parapply.engine.flight import Flight
from parapply.engine.job import OutcomeJob
from parapply.engine.state import EngineState
from parapply.errors import StatementFailed
from parapply.metrics.figures import Figures
from parapply.plan.batch import Batch
from parapply.runtime.apply.conflicts import ConflictHandler
from parapply.runtime.apply.outcome import apply_outcome
from parapply.runtime.apply.repair import Repair
from parapply.runtime.apply.transaction import ApplyRules, TargetTransaction, WorkerKit
from parapply.runtime.pool.pool import WorkerPool
from parapply.vocabulary import DaemonState, Mode
from parapply.wire.messages import RollbackPrepared

if TYPE_CHECKING:
    from parapply.runtime.apply.transaction import CommandRules
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.plans import TablePlans
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import CommandBuilder

_MESSAGE = RollbackPrepared(
    xid=7, gid="g", prepare_end_lsn=1, rollback_end_lsn=2, prepare_time_us=0, rollback_time_us=0
)


class _RefusesOnce:
    """A target that another role must help first."""

    def __init__(self) -> None:
        self.n_asked = 0

    async def decide(self, *_: object) -> None:
        """Fail the first time."""
        self.n_asked += 1
        if self.n_asked == 1:
            raise StatementFailed("permission denied", sqlstate="42501")


class _Impatient(ConflictHandler):
    """Waits for nothing, and keeps what was shown."""

    def __init__(self, engine: EngineState) -> None:
        super().__init__(ConflictConfig(), Skips("parapply", 1, {}), cast("ControlPool", None), Figures())
        self._engine = engine
        self.shown: list[str] = []

    async def wait(self, delay_s: float) -> None:
        """Keep what is shown."""
        del delay_s
        self.shown.append(" ".join(self._engine.shown))


async def test_what_was_repaired_is_shown_no_longer() -> None:
    """With on_error = "retry" the state says what is wrong with an outcome while it is, and not afterwards."""
    engine = EngineState(0, 0.0)
    handler, two_phase = _Impatient(engine), _RefusesOnce()
    kit = WorkerKit(
        pool=WorkerPool(Flight(engine)),
        builder=cast("CommandBuilder", None),
        tables=cast("TablePlans", None),
        conflict_handler=handler,
        two_phase=cast("TwoPhase", two_phase),
        rules=ApplyRules(commands=cast("CommandRules", None), piece_bytes=1, stops_on_error=False),
        is_applied=lambda _: False,
    )
    session = cast("WorkerSession", None)
    job = OutcomeJob(Batch(1), _MESSAGE)
    await apply_outcome(job, TargetTransaction(session, kit), Repair(session, kit), kit)
    assert ["retrying" in shown and "42501" in shown for shown in handler.shown] == [True]
    assert engine.shown == (DaemonState.RUNNING, "")
    assert (two_phase.n_asked, job.attempts, job.mode) == (2, 2, Mode.OUTCOME)
