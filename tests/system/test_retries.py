"""Locks that batches of one daemon and foreign sessions hold against each other: repeated, never reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.daemon import Daemon

__all__ = ["pair"]

#: Rows on which a foreign session stops a transaction, and two tables whose trigger counts by key.
_TABLES = """
CREATE TABLE hold (id int PRIMARY KEY, v int); INSERT INTO hold SELECT n, 0 FROM generate_series(1, 3) AS n;
CREATE TABLE ta (id int PRIMARY KEY, k int); CREATE TABLE tb (id int PRIMARY KEY, k int);
"""
_COUNTERS = """
CREATE TABLE counter (k int PRIMARY KEY, n int); INSERT INTO counter VALUES (1, 0), (2, 0);
CREATE FUNCTION bump() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  UPDATE public.counter SET n = n + 1 WHERE k = NEW.k; RETURN NULL; END $$;
CREATE TRIGGER bump AFTER INSERT ON ta FOR EACH ROW EXECUTE FUNCTION bump();
CREATE TRIGGER bump AFTER INSERT ON tb FOR EACH ROW EXECUTE FUNCTION bump();
ALTER TABLE ta ENABLE ALWAYS TRIGGER bump; ALTER TABLE tb ENABLE ALWAYS TRIGGER bump;
"""
_TRUSTED: Mapping[str, str | float] = {
    'apply.tables."public.ta".parallel': "always",
    'apply.tables."public.tb".parallel': "always",
}
_LOCK_HOLD = "BEGIN; SELECT FROM hold WHERE id = 1 FOR UPDATE"
_WORKERS_BLOCKED = (
    "SELECT count(*) = {} FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock'"
)


def check_no_conflict(daemon: Daemon) -> None:
    """Fail unless a running daemon stops in order and has reported no error and lost no connection."""
    daemon.stop()
    errors = [event for event in daemon.events if event.get("level") == "error"]
    assert errors == []
    assert not daemon.events_of("target_lost")
    assert len(daemon.events_of("target_connected")) == 1


@pytest.mark.in_turn("first")
@pytest.mark.parametrize("first", ["server", "daemon"])
def test_t31_a_deadlock_between_own_batches(pair: Pair, first: str) -> None:
    """F25: Batches that lock each other out end in the source's rows, whether server or daemon sees it first (T-31)."""
    pair.create(_TABLES, _TABLES + _COUNTERS)
    # The longest waiter looks first, and is the victim if the other has begun to wait by then: the later batch.
    timeout = "2s" if first == "server" else "30s"
    pair.target.execute(f"ALTER DATABASE {pair.target.dbname} SET deadlock_timeout = '{timeout}'")
    stall_check_s = 60.0 if first == "server" else 0.1
    daemon = pair.start(settings={**_TRUSTED, "apply.stall_check_s": stall_check_s})
    with pair.target.connect() as foreign:
        foreign.execute(_LOCK_HOLD)
        pair.write(
            "BEGIN; INSERT INTO ta VALUES (1, 1); UPDATE hold SET v = 1 WHERE id = 1;"
            " INSERT INTO tb VALUES (1, 2); COMMIT"
        )
        pair.target.wait_until(WORKER_IS_BLOCKED)
        pair.write("BEGIN; INSERT INTO ta VALUES (2, 2); INSERT INTO tb VALUES (2, 1); COMMIT")
        pair.target.wait_until(_WORKERS_BLOCKED.format(2))
        foreign.execute("COMMIT")
    daemon.wait_caught_up()
    check_no_conflict(daemon)
    assert pair.target.rows("SELECT k, n FROM counter ORDER BY k") == [(1, 2), (2, 2)]
    for table in ("ta", "tb", "hold"):
        query = f"SELECT * FROM {table} ORDER BY id"
        assert pair.target.rows(query) == pair.source.rows(query)
    retried = {str(event["reason"]) for event in daemon.events_of("batch_retried")}
    assert "40P01" in retried if first == "server" else daemon.events_of("stall_broken")


def test_t31_triggers_that_collide_under_load(pair: Pair) -> None:
    """Many batches that meet on two counters in opposite orders lose no count (T-31, T-69)."""
    pair.create(_TABLES, _TABLES + _COUNTERS)
    pair.target.execute(f"ALTER DATABASE {pair.target.dbname} SET deadlock_timeout = '20ms'")
    settings = {**_TRUSTED, "apply.stall_check_s": 0.05, "apply.max_batch_transactions": 1}
    daemon = pair.start(workers=8, settings=settings)
    pair.write(
        *(
            f"BEGIN; INSERT INTO ta VALUES ({n}, {n % 2 + 1}); INSERT INTO tb VALUES ({n}, {2 - n % 2}); COMMIT"
            for n in range(80)
        )
    )
    daemon.wait_caught_up()
    check_no_conflict(daemon)
    assert pair.target.rows("SELECT k, n FROM counter ORDER BY k") == [(1, 80), (2, 80)]


def test_f24_a_deadlock_with_a_foreign_session(pair: Pair) -> None:
    """The batch that PostgreSQL chose as the victim is repeated; nothing restarts, nothing is reported (F24)."""
    pair.create(_TABLES)
    pair.write("INSERT INTO ta VALUES (1, 0)", "INSERT INTO tb VALUES (1, 0)")
    pair.drain()
    # Only the worker looks for deadlocks, once, deadlock_timeout after it began to wait; by then there must be one.
    pair.target.execute(f"ALTER DATABASE {pair.target.dbname} SET deadlock_timeout = '3s'")
    daemon = pair.start()
    with pair.target.connect() as foreign:
        foreign.execute("SET deadlock_timeout = '60s'; BEGIN; UPDATE tb SET k = k WHERE id = 1")
        pair.write("BEGIN; UPDATE ta SET k = 1 WHERE id = 1; UPDATE tb SET k = 1 WHERE id = 1; COMMIT")
        pair.target.wait_until(WORKER_IS_BLOCKED)
        foreign.execute("UPDATE ta SET k = k WHERE id = 1")
        foreign.execute("COMMIT")
    daemon.wait_caught_up()
    check_no_conflict(daemon)
    assert "40P01" in {event["reason"] for event in daemon.events_of("batch_retried")}
    pair.check_equal()


def test_t31_a_cancelled_statement_is_repeated(pair: Pair) -> None:
    """A statement that another session cancels on the target is executed again, each time (57014)."""
    pair.create(_TABLES)
    daemon = pair.start()
    with pair.target.connect() as foreign:
        foreign.execute(_LOCK_HOLD)
        pair.write("UPDATE hold SET v = 1 WHERE id = 1", "UPDATE hold SET v = 2 WHERE id = 2")
        for _ in range(3):
            pair.target.wait_until(WORKER_IS_BLOCKED)
            foreign.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock'"
            )
        foreign.execute("COMMIT")
    daemon.wait_caught_up()
    check_no_conflict(daemon)
    assert daemon.events_of("batch_retried")
    pair.check_equal()


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ["large", "streamed"])
def test_t31_a_large_transaction_cancelled_in_its_commit_is_repeated(pair: Pair, way: str) -> None:
    """Deferred checks wait for other sessions behind the last piece, whose pieces are not kept: it comes again."""
    pair.create(
        "CREATE TABLE parent (a int, b int, PRIMARY KEY (a, b)); INSERT INTO parent VALUES (1, 1);"
        "CREATE TABLE child (id int PRIMARY KEY, a int, b int, v text,"
        " FOREIGN KEY (a, b) REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
    )
    if way == "streamed":
        pair.source.execute(f"ALTER DATABASE {pair.source.dbname} SET logical_decoding_work_mem = '64kB'")
    daemon = pair.start(
        settings={
            "target.session_replication_role": "origin",
            "apply.memory_limit_bytes": 16 << 20,
            "apply.stream_start_bytes": 1 << 30,
            "source.reconnect_min_s": 0.01,
        }
    )
    in_commit = (
        "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'parapply worker%'"
        " AND wait_event_type = 'Lock' AND query = 'COMMIT'"
    )
    with pair.target.connect() as foreign:
        foreign.execute("BEGIN; SELECT FROM parent FOR UPDATE")
        pair.write("INSERT INTO child SELECT n, 1, 1, repeat('x', 15000) FROM generate_series(1, 400) AS n")
        pair.target.wait_until(f"SELECT EXISTS (SELECT {in_commit})")
        foreign.execute(f"SELECT pg_cancel_backend(pid) {in_commit}".encode())
        daemon.wait_for_event("target_lost")
        foreign.execute("COMMIT")
    daemon.wait_caught_up()
    pair.check_equal()
    daemon.stop()


def test_t19_an_index_that_came_while_running(pair: Pair) -> None:
    """A unique index made on the target mid-run costs repeats at most, never a reported conflict (T-19, T-23)."""
    pair.create(
        "CREATE TABLE u (id int PRIMARY KEY, email text); CREATE TABLE hold (id int PRIMARY KEY, v int);"
        "INSERT INTO hold VALUES (1, 0); INSERT INTO u SELECT n, 'a' || n FROM generate_series(1, 60) AS n"
    )
    daemon = pair.start(workers=8, settings={"apply.max_batch_transactions": 1})
    pair.write("INSERT INTO u VALUES (0, 'known by now')")
    daemon.wait_caught_up()
    pair.target.execute("CREATE UNIQUE INDEX late ON u (email)")
    with pair.target.connect() as foreign:
        foreign.execute(_LOCK_HOLD)
        # The one that frees the value is held up, so the one that takes it comes first.
        pair.write(
            "BEGIN; UPDATE hold SET v = 1 WHERE id = 1; UPDATE u SET email = 'b1' WHERE id = 1; COMMIT",
            "INSERT INTO u VALUES (1001, 'a1')",
        )
        daemon_has_failed = (
            "SELECT count(*) >= 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'parapply worker%' AND query LIKE 'ROLLBACK%'"
        )
        pair.target.wait_until(daemon_has_failed)
        foreign.execute("COMMIT")
    pair.write(
        *(
            text
            for n in range(2, 61)
            for text in (f"UPDATE u SET email = 'b{n}' WHERE id = {n}", f"INSERT INTO u VALUES ({1000 + n}, 'a{n}')")
        )
    )
    daemon.wait_caught_up()
    check_no_conflict(daemon)
    assert "23505" in {event["reason"] for event in daemon.events_of("batch_retried")}
    pair.check_equal()
