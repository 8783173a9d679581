"""SIGKILL at every named point: nothing is lost, nothing is applied twice, no reader sees a torn one.

At random moments: `test_faults.py`, and `tests/simulate` in thousands of schedules.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.crash

# Passages of points that come with every batch before the kill: other batches are at work beside it then.
_PASSAGES = {
    failpoints.BATCH_READY: 5, failpoints.BEFORE_STATE: 5, failpoints.DML_SENT: 5, failpoints.BEFORE_COMMIT: 5,
    failpoints.COMMIT_SENT: 5, failpoints.COMMITTED: 5, failpoints.ADVANCED: 3, failpoints.FEEDBACK_SENT: 3,
    failpoints.PRUNING: 3,
}  # fmt: skip
# Only streamed and prepared transactions, and ranges of WAL, pass them, which have tests of their own.
_OTHER_LOADS = frozenset(
    {
        failpoints.SPOOLED,
        failpoints.STREAM_ENDED,
        failpoints.PREPARE_SENT,
        failpoints.PREPARED,
        failpoints.DECISION_SENT,
        failpoints.DECIDED,
        failpoints.RANGE_PART,
        failpoints.RANGE_READ,
        failpoints.SLOT_MOVED,
        failpoints.HANDED_OVER,
    }
)
# The recovery itself is killed again: what it does must be repeatable.
_REPEATS = {failpoints.RECOVERY: 3, failpoints.CONNECTED: 2}


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """A bank on both sides, with the slot made before its first transaction."""
    create_bank(source_db, target_db)
    made = Route(source=source_db, target=target_db, settings={"apply.workers": 4, "apply.max_batch_transactions": 5})
    new_slot(made)
    return made


def _finish(daemon: Daemon, route: Route, load: BankLoad) -> None:
    """Let the daemon end in order and check everything there is to check."""
    daemon.finish()
    check_bank(route.source, route.target, load)
    # Nothing of any daemon is left on either side (O9).
    for database in (route.source, route.target):
        database.wait_until(
            "SELECT count(*) = 0 FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'parapply%'"
        )
    locks = (
        "SELECT count(*) FROM pg_locks JOIN pg_database AS d ON d.oid = pg_locks.database"
        " WHERE locktype = 'advisory' AND datname = current_database()"
    )
    assert route.target.rows(locks) == [(0,)]


#: One daemon after the other is killed, each at its point and after it has gone on from where the one before ended.
_POINTS = sorted(failpoints.NAMES - _OTHER_LOADS)
_CHAINS = [_POINTS[first::3] for first in range(3)]


@pytest.mark.in_turn("points")
@pytest.mark.parametrize("points", _CHAINS, ids="-".join)
def test_kill_at_a_named_point(route: Route, start_daemon: StartDaemon, points: Sequence[str]) -> None:
    """Killed under load at any point from the first connection to the drain, the next one goes on exactly (F1, T-14).

    The process must have died by the signal, at the point: a point that is not passed would prove nothing. Readers look
    after each kill, so what the one before it left behind is named.
    """
    with BankReader(route.target) as reader, BankLoad(route.source, seed=1) as load:
        for number, point in enumerate(points):
            failpoint = {"PARAPPLY_FAILPOINT": f"{point}:kill:{_PASSAGES.get(point, 1)}"}
            for _ in range(_REPEATS.get(point, 1)):
                daemon = start_daemon(route, environ=failpoint)
                if point == failpoints.DRAIN:
                    daemon.wait_for_event("source_connected")
                    load.wait_for_more(50)
                    daemon.send(signal.SIGTERM)
                code = daemon.exit_code(timeout_s=30)
                assert code == -signal.SIGKILL, f"{point} was not reached: exit code {code}\n{daemon.log_tail()}"
            reader.wait_for_snapshot()
            _check(reader, f"after kills at {', '.join(points[: number + 1])}")
        daemon = start_daemon(route)
        daemon.wait_for_event("source_connected")
        load.wait_for_more(50)
        load.stop()
        daemon.wait_caught_up()
        reader.wait_for_snapshot()
        _check(reader, f"after the last kill, at {points[-1]}")
        _finish(daemon, route, load)


def _check(reader: BankReader, when: str) -> None:
    try:
        reader.check()
    except AssertionError as error:
        error.add_note(when)
        raise
