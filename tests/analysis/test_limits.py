"""A real daemon held up by one thing at a time: the verdict on its log names that thing."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING, Final

import pytest

from parapply.analysis.compute import compute
from parapply.analysis.job import ReportRequest, convert
from parapply.analysis.progress import Silent
from parapply.analysis.queries import READING
from parapply.analysis.store import Store
from parapply.analysis.verdict import verdict
from parapply.analysis.views import Scope, make_views
from parapply.applylog_schema import IntervalRecord, read_record
from tests.analysis.hand_log import at, batch, write
from tests.fixtures.plain import WORKER_IS_BLOCKED, foreign_transaction, plain_route

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parapply.analysis.duck import DuckEngine
    from parapply.limits import LimitVerdict
    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

_TIMEOUT_S: Final = 30.0
_LOOK_S: Final = 0.05
#: Figures that the verdict is made from.
_FIGURES: Final = ("summary", "moments", "reading", "backends", "locks", "hot_keys", "blockers", "dependencies")
_EACH: Final = "DO $$ BEGIN FOR i IN 1..4 LOOP UPDATE item SET v = v + 1 WHERE id = {}; COMMIT; END LOOP; END $$"


@pytest.fixture
def route(source_db: Database, target_db: Database, init_route: Callable[[Route], None]) -> Route:
    """Each source transaction is a batch, for two workers."""
    return plain_route(source_db, target_db, init_route, apply__workers=2, apply__max_batch_transactions=1)


def test_the_verdict_names_what_held_a_daemon_up(
    engine: DuckEngine, route: Route, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Nothing to apply, a table that another session has locked, one row that every transaction changes.

    That row is locked by another session, too, so whatever else waits for it, the lock is what limits.
    """
    log = tmp_path / "log"
    daemon = start_daemon(route, settings={"applylog.directory": str(log)})
    bounds = []

    def commit(statement: str) -> None:
        route.source.execute(statement)
        daemon.wait_caught_up()

    commit("INSERT INTO item SELECT n, 0 FROM generate_series(0, 9) AS n")
    bounds.append(datetime.now(UTC))
    for _ in range(4):
        commit("UPDATE item SET v = v + 1 WHERE id = 9")
    bounds.append(datetime.now(UTC))
    with foreign_transaction(route.target, "LOCK TABLE item IN SHARE ROW EXCLUSIVE MODE") as foreign:
        pids, role = [foreign.info.backend_pid], foreign.info.user
        route.source.execute(_EACH.format("i"))
        _wait_for_blocked_seconds(route, log, since=bounds[-1])
    daemon.wait_caught_up()
    bounds.append(datetime.now(UTC))
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 5 FOR UPDATE") as foreign:
        pids.append(foreign.info.backend_pid)
        route.source.execute(_EACH.format(5))
        _wait_for_blocked_seconds(route, log, since=bounds[-1])
    daemon.finish()

    convert(engine, ReportRequest(log=str(log), out=str(tmp_path / "out")), Silent())
    said, holders = [], []
    for since, until in zip(bounds, [*bounds[1:], None], strict=True):
        found = _verdict(engine, tmp_path / "out", Scope(since=since, until=until))
        said.append((found.limit, found.detail))
        holders += [text for text in found.evidence if text.startswith("Locks: ")]
        assert found.share > 0.5, found
    assert said == [("source", ""), ("target", "locks"), ("target", "locks")]
    # One for each of both, and none of the workers' own.
    assert [re.sub(r"\d+ seconds", "N seconds", text) for text in holders] == [
        f"Locks: held by role {role}, pid {pid}, on public.item, N seconds ({mode} was asked for)."
        for pid, mode in zip(pids, ("RowExclusiveLock", "ShareLock"), strict=True)
    ]


def test_the_commit_of_late_rows_is_a_commit(engine: DuckEngine, tmp_path: Path) -> None:
    """Half of the batches have a late row, and COMMIT takes 140 ms with and without: it limits, not the rows."""
    batches = [
        batch(
            n, worker=1 + n % 4, received_at=n / 20, started_at=n / 20, committed_at=n / 20 + 0.2, queued_s=0.0,
            execute_s=0.05, wait_turn_s=0.01, commit_s=0.14, late_keys=n % 2,
        )
        for n in range(1, 201)
    ]  # fmt: skip
    write(tmp_path / "log", "apply-1.jsonl", batches)
    convert(engine, ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out")), Silent())
    found = _verdict(engine, tmp_path / "out", Scope())
    assert (found.limit, found.detail) == ("commit", "order")
    assert found.share > 0.9


@pytest.mark.parametrize(("run", "began_s"), [("r0", -1.0), ("r1", 10.0)])
def test_workers_are_as_many_as_there_were_then(engine: DuckEngine, tmp_path: Path, run: str, began_s: float) -> None:
    """Two full workers are the limit, though another run, or another time of an automatic number, had eight."""
    now = [
        batch(
            n, worker=1 + n % 2, received_at=n / 20, started_at=n / 20, committed_at=n / 20 + 0.1, queued_s=0.0,
            execute_s=0.1, wait_turn_s=0.0, commit_s=0.0,
        )
        for n in range(1, 200)
    ]  # fmt: skip
    others = [
        batch(
            200 + n, run=run, worker=n, received_at=began_s, started_at=began_s, committed_at=began_s + 0.1,
            queued_s=0.0, execute_s=0.1, wait_turn_s=0.0, commit_s=0.0,
        )
        for n in range(1, 9)
    ]  # fmt: skip
    seconds = [(float(second), "r1", 2) for second in range(1, 11)]
    intervals = [
        IntervalRecord(
            slot="app", run=of, ended_at=at(ended_s), length_s=1.0, workers=workers, leader_cpu_s=0.1, publisher_s=0.0,
            paused_s=0.0, behind_bytes=0,
        )
        for ended_s, of, workers in [*seconds, (began_s + 1, run, 8)]
    ]  # fmt: skip
    write(tmp_path / "log", "apply-1.jsonl", [*now, *others, *intervals])
    convert(engine, ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out")), Silent())
    found = _verdict(engine, tmp_path / "out", Scope())
    assert (found.limit, found.detail) == ("target", "")
    assert found.share > 0.9
    # The page speaks of as many as there are now.
    assert [row["workers"] for row in engine.rows(READING, behind_bytes=0)] == [2 if run == "r0" else 8]


def _verdict(engine: DuckEngine, out: Path, scope: Scope) -> LimitVerdict:
    interval_s = make_views(Store(engine, str(out)), scope)
    tables = compute(engine, interval_s, lambda _: None, _FIGURES)
    found = verdict(tables["limits"], tables)
    assert found
    return found


def _wait_for_blocked_seconds(route: Route, log: Path, since: datetime) -> None:
    """Return when a worker is blocked, and two intervals of the log have seen its session wait for a lock."""
    route.target.wait_until(WORKER_IS_BLOCKED)
    deadline_s = time.monotonic() + _TIMEOUT_S
    while _n_blocked(log, since) < 2:
        assert time.monotonic() < deadline_s, "no interval saw the lock"
        Event().wait(_LOOK_S)


def _n_blocked(log: Path, since: datetime) -> int:
    """Return how many whole lines of intervals have samples of locks since a time."""
    lines = [line for path in log.iterdir() for line in path.read_bytes().splitlines(keepends=True)]
    records = [read_record(line) for line in lines if line.endswith(b"\n")]
    return sum(
        datetime.fromisoformat(one.ended_at) > since and any(each.wait.startswith("Lock:") for each in one.backends)
        for one in records
        if isinstance(one, IntervalRecord)
    )
