"""Waits that PostgreSQL cannot see: the commit order among our own sessions, with somebody else's in between (T-30)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from parapply.model import format_lsn
from parapply.wire.decode import decode
from parapply.wire.messages import Commit
from tests.fixtures.plain import WORKER_IS_BLOCKED, check_equal, foreign_transaction, plain_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

_STALL_TIMEOUT_S = 15
_ONE_WAITS_ITS_TURN = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%' AND state = 'idle in transaction')"
)


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Plain tables; each source transaction is a target transaction."""
    return plain_route(source_db, target_db, new_slot, apply__max_batch_transactions=1)


def test_t30_a_foreign_session_between_head_and_later_batch(route: Route, start_daemon: StartDaemon) -> None:
    """T-30: the head waits for a foreign session, which waits for a later batch, which waits for its turn.

    The later one yields, the foreign session gets its lock and ends, and everything is applied, in order.
    """
    route.source.execute("INSERT INTO item VALUES (1, 0), (2, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with (
        foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE") as foreign,
        ThreadPoolExecutor(1) as pool,
    ):
        for item in (1, 2):
            route.source.execute(f"UPDATE item SET v = 1 WHERE id = {item}")
        route.target.wait_until(WORKER_IS_BLOCKED)
        route.target.wait_until(_ONE_WAITS_ITS_TURN)
        # The server gives up in time, so that a stall fails the test instead of holding it.
        foreign.execute(f"SET LOCAL statement_timeout = '{_STALL_TIMEOUT_S}s'".encode())
        pool.submit(foreign.execute, b"SELECT FROM item WHERE id = 2 FOR UPDATE").result()
        daemon.wait_for_event("stall_broken")
    daemon.wait_caught_up()
    daemon.stop()
    check_equal(route)


def test_who_holds_a_batch_up_is_told(route: Route, start_daemon: StartDaemon) -> None:
    """A batch that waits for a foreign session is in the log with the facts, and in the state's reason."""
    route.source.execute("INSERT INTO item VALUES (1, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE") as foreign:
        route.source.execute("UPDATE item SET v = 1 WHERE id = 1")
        told = daemon.wait_for_event("batch_blocked")
        pid = foreign.info.backend_pid
        assert (told["pid"], told["application_name"], told["relation"], told["mode"]) == (
            pid, "foreign", "public.item", "ShareLock",
        )  # fmt: skip
        assert told["wait_s"] >= 5
        assert told["level"] == "warning"
        words = rf"SELECT reason ~ 'blocked for \d+ s by a lock held by pid {pid}' FROM parapply.progress"
        route.target.wait_until(words)
    assert daemon.wait_for_event("batch_unblocked")["wait_s"] >= 5
    daemon.wait_caught_up()
    daemon.stop()
    check_equal(route)


def test_t70_a_blocked_transaction_is_skipped(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """`skip` of a transaction that waits for a foreign session works while it waits, and its neighbours are applied.

    Merged with them, it was executed in one flight with its COMMIT.
    """
    route.source.execute("INSERT INTO item VALUES (1, 0), (2, 0), (3, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    daemon.stop()
    for item in (1, 2, 3):
        route.source.execute(f"UPDATE item SET v = 1 WHERE id = {item}")
    sent = route.source.rows(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{route.slot}', NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')"
    )
    ends = [message.end_lsn for (data,) in sent if isinstance(message := decode(bytes(data)), Commit)]
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 2 FOR UPDATE"):
        daemon = start_daemon(route, settings={"apply.max_batch_transactions": 100})
        route.target.wait_until(WORKER_IS_BLOCKED)
        asked = run_command(route, "skip", "--lsn", format_lsn(ends[-2]), "--wait", "30")
        assert (asked.returncode, asked.stdout.partition(":")[0]) == (0, "skipped"), asked
        assert len(daemon.events_of("batch_cancelled")) == 1
        daemon.wait_caught_up()
        assert route.target.rows("SELECT id, v FROM item ORDER BY id") == [(1, 1), (2, 0), (3, 1)]
    assert route.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)]
    kept = "SELECT conflict_type, operation, remote_row->>'id' FROM parapply.conflicts"
    assert route.target.rows(kept) == [("skipped", "update", "2")]
    daemon.stop()


def test_a_session_that_is_no_workers_and_is_blocked_is_told(route: Route, start_daemon: StartDaemon) -> None:
    """Also where no batch waits: somebody has locked the state, so nothing can be shown or confirmed."""
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with foreign_transaction(route.target, "LOCK TABLE parapply.slots IN SHARE ROW EXCLUSIVE MODE") as foreign:
        told = daemon.wait_for_event("session_blocked")
        assert (told["pid"], told["application_name"], told["relation"]) == (
            foreign.info.backend_pid, "foreign", "parapply.slots",
        )  # fmt: skip
        assert told["wait_s"] >= 5
        assert str(told["session"]).endswith(route.slot)
    daemon.stop()


def test_locked_tables_do_not_hold_up_the_start(route: Route, start_daemon: StartDaemon) -> None:
    """A table that somebody has locked on either end keeps a daemon that starts from no other table."""
    route.source.execute("INSERT INTO item VALUES (1, 0)")
    with (
        foreign_transaction(route.source, "TRUNCATE evt"),
        foreign_transaction(route.target, "LOCK TABLE evt IN ACCESS EXCLUSIVE MODE"),
    ):
        daemon = start_daemon(route)
        daemon.wait_caught_up()
    daemon.stop()
    check_equal(route, "item")
