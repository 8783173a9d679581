"""A real Prometheus scrapes a real daemon, and its alarms fire and go out.

tests/unit/test_alerts.py has every alarm; here are those whose trouble is quickly made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import FAST, closed
from tests.fixtures.prometheus import prometheus

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pair"]

_TABLE = "CREATE TABLE item (id int PRIMARY KEY, v int)"


@pytest.mark.prometheus
def test_alarms_of_a_daemons_life(pair: Pair, tmp_path: Path) -> None:
    """None while it applies; then an end is away and comes back, a change meets a conflict, and the daemon is gone."""
    pair.create(_TABLE)
    daemon = pair.start(workers=2, settings={**LISTEN, **FAST, "conflict.update_missing": "skip"})
    pair.write("INSERT INTO item VALUES (1, 0)")
    daemon.wait_caught_up()
    with prometheus(Endpoint(daemon).port, tmp_path) as server:
        server.wait_for('parapply_conflicts_total{type="update_missing",outcome="skipped"} == 0')
        server.wait_for("parapply_ready == 1")
        assert server.firing() == {}
        with closed(pair.target):
            server.wait_until_firing("ParapplyNotReady")
        server.wait_until_firing()
        pair.target.execute("DELETE FROM item")
        pair.write("UPDATE item SET v = 1")
        labels = server.wait_until_firing("ParapplyConflicts")["ParapplyConflicts"]
        assert labels["type"] == "update_missing"
        daemon.stop()
        server.wait_until_firing("ParapplyConflicts", "ParapplyDown")
