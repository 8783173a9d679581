"""The endpoint of a running daemon: what it counts, what its probes say, and that nothing disturbs it."""

from __future__ import annotations

import socket

import pytest

from parapply.metrics import table
from parapply.vocabulary import DaemonState, WorkerState
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import FAST, closed, foreign_transaction

__all__ = ["pair"]

_WRONG_CONFIGURATION = 2
_TABLES = 'CREATE TABLE item (id int PRIMARY KEY, v int); CREATE TABLE "odd \\ ""name" (id int PRIMARY KEY, v int);'
#: Metrics of settings, moves and events that a plain daemon does not have.
_SELDOM = {
    "parapply_applylog_dropped_total", "parapply_dependency_wait_seconds_total", "parapply_dependency_waits_total",
    "parapply_slot_retained_wal_limit_bytes", "parapply_slot_safe_wal_bytes", "parapply_table_target",
}  # fmt: skip
_ODD = 'public.odd \\ "name'


def test_what_is_applied_is_counted(pair: Pair) -> None:
    """Rows by table and operation, transactions, sizes, positions, conflicts: exact, and the same for odd names."""
    pair.create(_TABLES)
    daemon = pair.start(workers=2, settings={**LISTEN, "conflict.update_missing": "skip"})
    endpoint = Endpoint(daemon)
    assert daemon.events_of("metrics_listening")[0]["host"] == "127.0.0.1"
    pair.write(
        "INSERT INTO item SELECT g, 0 FROM generate_series(1, 10) AS g",
        "UPDATE item SET v = 1 WHERE id <= 4",
        "DELETE FROM item WHERE id > 8",
        'INSERT INTO "odd \\ ""name" VALUES (1, 1)',
        'TRUNCATE "odd \\ ""name"',
    )
    pair.target.execute("SET session_replication_role = replica; SELECT 1")
    daemon.wait_caught_up()
    pair.target.execute("DELETE FROM item WHERE id = 5")
    pair.write("UPDATE item SET v = 2 WHERE id = 5")
    daemon.wait_caught_up()
    endpoint.wait_until(lambda: endpoint.samples().get("parapply_lag_bytes", {}).get(()) == 0)
    endpoint.wait_until(lambda: "parapply_conflicts_kept" in endpoint.samples())
    found = endpoint.samples()
    rows = found["parapply_rows_total"]
    assert {key: n for key, n in rows.items() if n} == {
        ("insert", "public.item"): 10,
        ("update", "public.item"): 5,
        ("delete", "public.item"): 2,
        ("insert", _ODD): 1,
        ("truncate", _ODD): 1,
    }
    assert sum(found["parapply_transactions_total"].values()) >= 6
    batches = sum(found["parapply_batches_total"].values())
    assert found["parapply_batch_changes_count"][()] == batches > 0
    assert found["parapply_batch_changes_sum"][()] == 19
    assert found["parapply_batch_seconds_sum"][()] > 0
    assert found["parapply_table_conflicts_total"] == {("skipped", "public.item", "update_missing"): 1}
    conflicts = found["parapply_conflicts_total"]
    assert len(conflicts) == len(table.CONFLICT_TYPES) * len(table.OUTCOMES)
    assert {key: n for key, n in conflicts.items() if n} == {("skipped", "update_missing"): 1}
    assert sum(found["parapply_retries_total"].values()) >= 1
    assert found["parapply_stage_seconds_total"][("execute",)] > 0
    positions = found["parapply_lsn_bytes"]
    assert {position for (position,) in positions} == {
        "source",
        "received",
        "highest",
        "lowest",
        "durable",
        "confirmed",
    }
    assert positions["lowest",] >= positions["durable",] >= positions["confirmed",] > 0
    assert found["parapply_workers"] == {(state,): 2.0 * (state is WorkerState.IDLE) for state in table.WORKER_STATES}
    assert found["parapply_state"] == {(state,): float(state is DaemonState.RUNNING) for state in table.STATES}
    assert found["process_resident_memory_bytes"][()] > 1e6
    declared = {metric.name for metric in (*table.METRICS, *table.PROCESS_METRICS)}
    names = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in found}
    assert names <= declared
    seldom = {one for one in declared - names if not one.startswith(("parapply_migration_", "parapply_cutover_"))}
    assert seldom <= _SELDOM
    assert found["parapply_reading"] == {("stream",): 1, ("ranges",): 0}
    daemon.stop()
    # The history also has conflicts that no counter of this process has seen.
    endpoint = Endpoint(pair.start(workers=2, settings={**LISTEN, "conflict.update_missing": "skip"}))
    endpoint.wait_until(lambda: "parapply_conflicts_kept" in endpoint.samples())
    found = endpoint.samples()
    assert {key: n for key, n in found["parapply_conflicts_kept"].items() if n} == {("skipped", "update_missing"): 1}
    assert not any(found["parapply_conflicts_total"].values())


def test_wal_that_is_kept_is_seen_though_there_is_no_lag(pair: Pair) -> None:
    """A transaction left open on the publisher keeps WAL while nothing is behind: metrics show both."""
    pair.create(_TABLES)
    with foreign_transaction(pair.source, "INSERT INTO item VALUES (1, 0)"):
        pair.source.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000))")
        endpoint = Endpoint(pair.start(workers=2, settings=LISTEN))
        # Two gauges of two polls: the slot is asked about less often.
        endpoint.wait_until(lambda: endpoint.samples().get("parapply_lag_bytes", {}).get(()) == 0)
        endpoint.wait_until(
            lambda: endpoint.samples().get("parapply_slot_retained_wal_bytes", {}).get((), 0) > 1_000_000
        )
        found = endpoint.samples()
        assert found["parapply_slot_wal_status"] == {(one,): one == "reserved" for one in table.WAL_STATUSES}
        assert "parapply_slot_safe_wal_bytes" not in found


def test_the_oldest_prepared_transaction_is_seen(pair: Pair) -> None:
    """An alarm asks how long it stays: another one, or none, in its place is no trouble."""
    pair.create(_TABLES)
    daemon = pair.start(workers=2, settings={**LISTEN, "source.two_phase": "true"})
    endpoint = Endpoint(daemon)
    for number in (1, 2):
        pair.write(f"BEGIN; INSERT INTO item VALUES ({number}, 0); PREPARE TRANSACTION 'p{number}'")
    daemon.wait_caught_up()
    seen = []
    for number in (1, 2):
        seen.append(endpoint.samples()["parapply_lsn_bytes"]["prepared",])
        pair.write(f"COMMIT PREPARED 'p{number}'")
        daemon.wait_caught_up()
    assert 0 < seen[0] < seen[1]
    assert ("prepared",) not in endpoint.samples()["parapply_lsn_bytes"]


def test_a_worker_that_waits_is_seen(pair: Pair) -> None:
    """While a foreign lock holds a batch up: queue, lag and the workers' states show it; it is ready all along."""
    pair.create(_TABLES)
    daemon = pair.start(workers=2, settings=LISTEN)
    endpoint = Endpoint(daemon)
    endpoint.wait_until(lambda: endpoint.health()[0] == 200)
    pair.write("INSERT INTO item VALUES (1, 0), (2, 0)")
    daemon.wait_caught_up()
    with foreign_transaction(pair.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
        pair.write("UPDATE item SET v = 1 WHERE id = 1", "UPDATE item SET v = 2 WHERE id = 1")
        endpoint.wait_until(lambda: endpoint.samples().get("parapply_lag_seconds", {}).get((), 0) > 0)
        endpoint.wait_until(lambda: endpoint.samples()["parapply_queue_batches"][()] >= 1)
        found = endpoint.samples()
        assert found["parapply_workers"]["idle",] < 2
        assert found["parapply_queue_bytes"][()] > 0
        assert endpoint.health()[0] == 200
    daemon.wait_caught_up()
    endpoint.wait_until(lambda: endpoint.samples()["parapply_lag_seconds"][()] == 0)
    assert endpoint.samples()["parapply_queue_bytes"][()] == 0


def test_the_endpoint_outlives_both_ends(pair: Pair) -> None:
    """While an end is away it answers: live, not ready, with the reason; counters go on and the lag grows."""
    pair.create(_TABLES)
    daemon = pair.start(settings={**LISTEN, **FAST})
    endpoint = Endpoint(daemon)
    pair.write("INSERT INTO item VALUES (1, 0)")
    daemon.wait_caught_up()
    endpoint.wait_until(lambda: endpoint.samples()["parapply_rows_total"].get(("insert", "public.item")))
    endpoint.wait_until(lambda: "parapply_lag_seconds" in endpoint.samples())
    for end, database in (("target", pair.target), ("source", pair.source)):
        with closed(database):
            endpoint.wait_until(lambda: endpoint.health("/healthz/ready")[0] == 503)
            endpoint.wait_until(lambda end=end: endpoint.samples()["parapply_reconnects_total"][end,] >= 2)  # type: ignore[misc]
            status, report = endpoint.health("/healthz/ready")
            assert (status, report["ready"], report["live"], report["state"]) == (503, False, True, "reconnecting")
            assert end in report["reason"] or "publisher" in report["reason"]
            assert endpoint.health("/healthz")[0] == 503
            assert endpoint.health("/healthz/live")[0] == 200
            found = endpoint.samples()
            assert found["parapply_ready"][()] == 0
            assert found["parapply_state"]["reconnecting",] == 1
            assert found["parapply_rows_total"]["insert", "public.item"] == 1
            assert "parapply_lag_seconds" in found
            assert "parapply_slot_retained_wal_bytes" not in found
        endpoint.wait_until(lambda: endpoint.health()[0] == 200)
    pair.write("INSERT INTO item VALUES (2, 0)")
    daemon.wait_caught_up()
    assert endpoint.samples()["parapply_rows_total"]["insert", "public.item"] == 2


def test_a_failing_transaction_is_not_ready(pair: Pair) -> None:
    """With on_error = retry the daemon lives, is not ready, and says why; repaired, it is.

    It says so also while a foreign lock keeps it from showing its workers.
    """
    pair.create(_TABLES)
    daemon = pair.start(settings={**LISTEN, "apply.on_error": "retry"})
    endpoint = Endpoint(daemon)
    endpoint.wait_until(lambda: endpoint.health()[0] == 200)
    pair.target.execute("INSERT INTO item VALUES (1, 7)")
    with foreign_transaction(pair.target, "LOCK TABLE parapply.workers"):
        pair.write("INSERT INTO item VALUES (1, 0)")
        endpoint.wait_until(lambda: endpoint.health()[1]["state"] == "retrying")
        pair.target.wait_until("SELECT state = 'retrying' FROM parapply.progress")
    status, report = endpoint.health("/healthz/ready")
    assert (status, report["ready"], report["live"]) == (503, False, True)
    assert "insert_exists" in report["reason"]
    assert endpoint.samples()["parapply_conflicts_total"]["stopped", "insert_exists"] == 1
    assert endpoint.samples()["parapply_table_conflicts_total"] == {("stopped", "public.item", "insert_exists"): 1}
    pair.target.execute("DELETE FROM item")
    endpoint.wait_until(lambda: endpoint.health()[0] == 200)


def test_a_port_that_is_taken(pair: Pair) -> None:
    """One line that names the key and the address, exit 2; nothing was connected."""
    pair.create(_TABLES)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = pair.start_only(settings={"metrics.listen": f"127.0.0.1:{port}"})
        assert daemon.exit_code() == _WRONG_CONFIGURATION
    assert f"metrics.listen: cannot listen on 127.0.0.1:{port}" in daemon.failure
    assert "another daemon" in daemon.failure
    assert not daemon.events_of("lease_taken")
    # TEST-NET-1: no address of this machine.
    away = pair.start_only(settings={"metrics.listen": "192.0.2.1:9187"})
    assert away.exit_code() == _WRONG_CONFIGURATION
    assert "name an address of this machine" in away.failure


@pytest.fixture
def endpoint(pair: Pair) -> Endpoint:
    """The endpoint of a daemon that is ready and does nothing."""
    pair.create(_TABLES)
    found = Endpoint(pair.start(settings=LISTEN))
    # A stream that is open is not enough: the first report to the publisher comes after it.
    found.wait_until(lambda: found.health()[0] == 200)
    return found


def test_what_is_no_request_harms_nobody(endpoint: Endpoint) -> None:
    """Odd requests get their status or are dropped; who says nothing does not keep others from their answer."""
    assert endpoint.get("/nothing")[0] == 404
    assert endpoint.get("/metrics/../etc")[0] == 404
    assert endpoint.get("/metrics?name[]=x")[0] == 200
    assert endpoint.raw(b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    assert endpoint.raw(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert endpoint.raw(b"\xff\x00 \xfe HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    assert endpoint.raw(b"GET /" + b"\xff" * 20 + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")
    head = endpoint.raw(b"HEAD /metrics HTTP/1.0\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")
    assert endpoint.raw(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n") == b""
    # The name of a site of the web may lead to this machine, and its page would be that site's to read.
    hosts = {b"evil.example": 421, b"127.0.0.1.evil.example:80": 421, b"LOCALHOST:1": 200, b"[::1]": 200}
    hosts |= {b" \t127.0.0.1:80 \t": 200, b"a" + b" " * 7000 + b"x": 421, b"localhost:1:": 421}
    for host, status in hosts.items():
        said = endpoint.raw(b"GET /metrics HTTP/1.1\r\nAccept: */*\r\nhost: " + host + b"\r\n\r\n")
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), said
    silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(8)]
    try:
        assert endpoint.get("/healthz")[0] == 200
    finally:
        for connection in silent:
            connection.close()
