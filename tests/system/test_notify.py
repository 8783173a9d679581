"""Messages to systemd: ready when changes are applied, alive while the leader makes progress, stopping at the end."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.endpoint import NotifySocket
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import FAST, WORKER_IS_BLOCKED, closed, foreign_transaction

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pair"]

_TABLES = "CREATE TABLE item (id int PRIMARY KEY, v int);"
#: Seconds: far below what a service has, so that silence is seen soon.
_WATCHDOG_S = 0.4
#: Seconds after which a sign of life must have come if it comes at all: several intervals.
_SILENCE_S = 1.5
#: Signs of life, four in an interval, that take longer than the leader may be silent where it waits for nothing.
_BEYOND_PATIENCE = 24


@pytest.mark.in_turn("is_abstract")
@pytest.mark.parametrize("is_abstract", [False, True], ids=["path", "abstract"])
def test_ready_and_stopping(pair: Pair, tmp_path: Path, is_abstract: bool) -> None:  # noqa: FBT001
    """READY=1 comes once, when the publisher was told where the target is; SIGTERM says STOPPING=1."""
    pair.create(_TABLES)
    with NotifySocket(None if is_abstract else tmp_path) as systemd:
        held = tmp_path / "connected.held"
        environ = {"PARAPPLY_FAILPOINT": "connected:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
        daemon = pair.start_only(environ={**systemd.environ(), **environ})
        daemon.wait_for_event("source_connected")
        assert not [one for one in systemd.pending() if "READY" in one]
        while not held.exists():
            threading.Event().wait(0.01)
        held.unlink()
        ready = systemd.wait_for("READY", "1")
        assert ready["STATUS"].startswith(f"slot {pair.route.slot}: applying")
        # It was sent before READY; the walsender has it when it has read it.
        pair.source.wait_until(
            "SELECT bool_and(reply_time IS NOT NULL) FROM pg_stat_replication"
            f" WHERE application_name = '{pair.route.slot}'"
        )
        pair.write("INSERT INTO item VALUES (1, 0)")
        daemon.finish()
        rest = systemd.pending()
        assert any(one.get("STOPPING") == "1" for one in rest)
        assert not [one for one in rest if "READY" in one or "WATCHDOG" in one]


def test_the_watchdog_sees_a_daemon_that_stands_still(pair: Pair, tmp_path: Path) -> None:
    """Stopped by a signal, or with an event loop that hangs: silence. Going on: signs of life."""
    pair.create(_TABLES)
    with NotifySocket(tmp_path) as systemd:
        environ = {"PARAPPLY_FAILPOINT": "batch_ready:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
        daemon = pair.start_only(environ={**systemd.environ(_WATCHDOG_S), **environ})
        systemd.wait_for("READY")
        systemd.wait_for("WATCHDOG", "1")
        daemon.pause()
        _check_silent(systemd)
        daemon.send(signal.SIGCONT)
        systemd.wait_for("WATCHDOG", "1")
        pair.write("INSERT INTO item VALUES (1, 0)")
        held = tmp_path / "batch_ready.held"
        while not held.exists():
            threading.Event().wait(0.01)
        _check_silent(systemd)
        held.unlink()
        systemd.wait_for("WATCHDOG", "1")
        daemon.wait_caught_up()


def test_the_watchdog_is_fed_while_others_are_waited_for(pair: Pair, tmp_path: Path) -> None:
    """Idle, held up by a foreign lock for longer than the patience, with either end away: a restart would not help."""
    pair.create(_TABLES)
    with NotifySocket(tmp_path) as systemd:
        daemon = pair.start_only(settings=FAST, environ=systemd.environ(_WATCHDOG_S))
        systemd.wait_for("READY")
        _check_fed(systemd)
        pair.write("INSERT INTO item VALUES (1, 0)")
        daemon.wait_caught_up()
        with foreign_transaction(pair.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
            pair.write("UPDATE item SET v = 1 WHERE id = 1", "INSERT INTO item VALUES (2, 0)")
            pair.target.wait_until(WORKER_IS_BLOCKED)
            _check_fed(systemd, _BEYOND_PATIENCE)
        for database in (pair.target, pair.source):
            with closed(database):
                systemd.wait_for("STATUS", "reconnecting")
                _check_fed(systemd)
            systemd.wait_for("STATUS", "applying")
        assert not daemon.events_of("leader_stuck")


def _check_silent(systemd: NotifySocket) -> None:
    """Fail if anything comes within several intervals."""
    systemd.pending()
    assert systemd.receive(_SILENCE_S) is None


def _check_fed(systemd: NotifySocket, n_signs: int = 5) -> None:
    """Fail unless this number of signs of life comes."""
    systemd.pending()
    for _ in range(n_signs):
        systemd.wait_for("WATCHDOG", "1")
