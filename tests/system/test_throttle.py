"""apply.max_changes_per_s: no more is applied than it allows, it is named as the limit, and SIGHUP takes it away."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from parapply.applylog_schema import IntervalRecord, read_record
from tests.fixtures.endpoint import LISTEN, Endpoint
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
    watched = f'[applylog]\ndirectory = "{tmp_path / "log"}"\n[metrics]\nlisten = "127.0.0.1:0"\n'
    apply = f"[apply]\nmax_changes_per_s = {_CHANGES_PER_S}\nmax_workers = 2\n"
    path.write_text(watched + apply, encoding="utf-8")
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
    assert "The throttle: apply.max_changes_per_s held changes back" in run_command(route, "top", "--once").stdout
    endpoint = Endpoint(daemon)
    endpoint.wait_until(lambda: endpoint.samples()["parapply_throttled_seconds_total"][()] > 0)
    path.write_text(watched, encoding="utf-8")
    daemon.send(signal.SIGHUP)
    assert daemon.wait_for_event("config_reloaded")["settings"] == ["apply.max_changes_per_s", "apply.max_workers"]
    daemon.wait_caught_up()
    check_equal(route, "item", "evt")
    daemon.stop()
    # The seconds in which it limited are in the apply log, and those after it was taken away are not.
    intervals = _intervals(tmp_path / "log")
    assert any(one.throttled_s > one.length_s / 2 for one in intervals)
    assert not intervals[-1].throttled_s


def test_nothing_is_held_back_where_nothing_waits(
    source_db: Database,
    target_db: Database,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
    tmp_path: Path,
) -> None:
    """The time after a change in which another one could not be taken counts only if there is another one."""
    route = plain_route(source_db, target_db, new_slot)
    settings: dict[str, str | float] = {"apply.max_changes_per_s": 1, "applylog.directory": str(tmp_path), **LISTEN}
    daemon = start_daemon(route, settings=settings)
    endpoint = Endpoint(daemon)
    source_db.execute("INSERT INTO evt VALUES (1)")
    daemon.wait_caught_up()
    endpoint.wait_until(lambda: endpoint.samples()["parapply_reading_paused"][()] == 0)
    daemon.stop()
    intervals = _intervals(tmp_path)
    assert intervals
    assert [one.throttled_s for one in intervals if one.throttled_s] == []


def _intervals(log: Path) -> list[IntervalRecord]:
    """Return the intervals of a log that is closed."""
    records = [read_record(line) for path in sorted(log.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    return [one for one in records if isinstance(one, IntervalRecord)]
