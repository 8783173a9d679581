"""apply.max_changes_per_s: no more is applied than it allows, it is named as the limit, and SIGHUP takes it away."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from tests.fixtures.plain import check_equal, commit_each, plain_route

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

_CHANGES_PER_S = 50


def test_the_rate_is_bounded_and_named(  # noqa: PLR0917  fixtures
    source_db: Database,
    target_db: Database,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
    run_command: RunCommand,
    tmp_path: Path,
) -> None:
    """From the start on no more is applied than the rate allows, while status says what holds it back; then all is."""
    route = plain_route(source_db, target_db, new_slot)
    path = tmp_path / "app.toml"
    path.write_text(f"[apply]\nmax_changes_per_s = {_CHANGES_PER_S}\nmax_workers = 2\n", encoding="utf-8")
    commit_each(source_db, 1, 5000)
    source_db.execute("INSERT INTO evt SELECT generate_series(1, 20000)")
    begun_s = time.monotonic()
    daemon = start_daemon(route, "--config", str(path))
    daemon.wait_for_event("source_connected")
    target_db.wait_until("SELECT count(*) > 0 FROM item")
    target_db.wait_until("SELECT limits::json ->> 'limit' = 'throttle' FROM parapply.slots")
    ((n_applied,),) = target_db.rows("SELECT (SELECT count(*) FROM item) + (SELECT count(*) FROM evt)")
    # One batch is a quarter of a second's, and may be applied before its time is over.
    assert 0 < n_applied <= (time.monotonic() - begun_s + 1) * _CHANGES_PER_S
    status = run_command(route, "status").stdout
    assert f"slow on purpose: apply.max_changes_per_s = {_CHANGES_PER_S}" in status
    assert "The throttle: apply.max_changes_per_s held changes back" in status
    path.write_text("", encoding="utf-8")
    daemon.send(signal.SIGHUP)
    assert daemon.wait_for_event("config_reloaded")["settings"] == ["apply.max_changes_per_s", "apply.max_workers"]
    daemon.wait_caught_up()
    check_equal(route, "item", "evt")
    daemon.stop()
