"""Replies to the publisher while it stops, and while the target is paused (traps T-9, T-10, fault F9)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.databases import create_database
from tests.fixtures.plain import (
    WORKER_IS_BLOCKED,
    check_equal,
    commit_each,
    foreign_transaction,
    plain_route,
    walsender_pid,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

# A publisher that waits for no reader needs about one second for its last checkpoint, and a busy machine its time; one
# that waits for a reader in vain needs as long as `wal_sender_timeout`, 60 s.
_STOP_LIMIT_S = 20.0
# With a reader that cannot confirm: three seconds until it is sure, and some for a busy machine.
_HELD_STOP_LIMIT_S = 12.0
# Three times the publisher's patience.
_SENDER_TIMEOUT_S = 2
_LOCKED_S = 6


@pytest.fixture
def publisher(own_servers: OwnServers) -> PgServer:
    """A publisher that the test may stop."""
    return own_servers("publisher")


@pytest.fixture
def route(publisher: PgServer, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Plain tables from the publisher of the test."""
    return plain_route(create_database(publisher, "source"), target_db, new_slot)


def test_t9_a_publisher_stops_at_once(publisher: PgServer, route: Route, start_daemon: StartDaemon) -> None:
    """T-9, F8: a fast stop ends, idle and right after a load; the daemon comes back by itself.

    A transaction committed before the stop is on the target before the publisher is back, because it was waited for.
    """
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    for number, count in enumerate((0, 3000, 1), 2):
        commit_each(route.source, number * 10_000 + 1, number * 10_000 + count)
        ((expected,),) = route.source.rows("SELECT count(*) FROM item")
        if not count:
            daemon.wait_caught_up()
        losses = len(daemon.events_of("source_lost"))
        publisher.stop("fast", timeout_s=_STOP_LIMIT_S)
        daemon.wait_for_event("source_lost", count=losses + 1)
        assert route.target.rows("SELECT count(*) FROM item") == [(expected,)]
        publisher.start()
        daemon.wait_for_event("source_connected", count=number)
    commit_each(route.source, 1, 10)
    daemon.finish()
    check_equal(route)


def test_f9_a_blocked_worker_does_not_hold_the_publisher(
    publisher: PgServer, route: Route, start_daemon: StartDaemon
) -> None:
    """F9: a fast stop ends while a worker waits for a foreign lock; what was not confirmed is sent again."""
    route.source.execute("INSERT INTO item VALUES (1, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
        route.source.execute("UPDATE item SET v = 1; INSERT INTO evt VALUES (1)")
        commit_each(route.source, 2, 100)
        route.target.wait_until(WORKER_IS_BLOCKED)
        publisher.stop("fast", timeout_s=_HELD_STOP_LIMIT_S)
        daemon.wait_for_event("source_lost")
        assert route.target.rows("SELECT count(*) FROM item") == [(1,)]
    publisher.start()
    daemon.finish()
    check_equal(route)


def test_t10_a_blocked_daemon_still_replies(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """T-10, F23: the target's table is locked for three times wal_sender_timeout: the walsender stays the same."""
    source_db.execute(
        sql.SQL("ALTER DATABASE {} SET wal_sender_timeout = {}").format(
            sql.Identifier(source_db.dbname), sql.Literal(f"{_SENDER_TIMEOUT_S}s")
        )
    )
    route = plain_route(source_db, target_db, new_slot)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    pid = walsender_pid(route)
    with foreign_transaction(route.target, "LOCK TABLE item IN ACCESS EXCLUSIVE MODE") as foreign:
        started_s = time.monotonic()
        commit_each(route.source, 1, 500)
        route.target.wait_until(WORKER_IS_BLOCKED)
        # The time itself is what is tested, and the server keeps it.
        foreign.execute(f"SELECT pg_sleep({_LOCKED_S})".encode())
        assert time.monotonic() - started_s >= _LOCKED_S
        assert walsender_pid(route) == pid
    daemon.wait_caught_up()
    assert walsender_pid(route) == pid
    assert not daemon.events_of("source_lost")
    daemon.stop()
    check_equal(route)
