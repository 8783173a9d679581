"""Memory stays bounded: a locked target while changes pour in, and transactions larger than memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.plain import (
    WORKER_IS_BLOCKED,
    check_equal,
    commit_each,
    foreign_transaction,
    peak_resident_bytes,
    plain_route,
    slot_route,
    wait_for_replies,
    walsender_pid,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

pytestmark = [pytest.mark.slow, pytest.mark.crash]

_MIB = 1 << 20
_LIMIT_BYTES = 32 * _MIB
# The interpreter and its libraries need some 60 MiB, the changes a multiple of the limit at most.
_BLOCKED_PEAK_BYTES = 200 * _MIB
_BIG_PEAK_BYTES = 500 * 1000 * 1000
_BIG_TIMEOUT_S = 280.0


def test_f23_back_pressure_bounds_memory(
    source_db: Database, target_db: Database, init_route: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F23: the target's table is locked while 200 MB of changes come: memory stays bounded, and replies go on.

    The publisher's patience is 2 s; its walsender stays the same all the time.
    """
    for database in (source_db, target_db):
        database.execute("CREATE TABLE wide (id int PRIMARY KEY, pad text)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE wide")
    source_db.execute(
        sql.SQL("ALTER DATABASE {} SET wal_sender_timeout = '2s'").format(sql.Identifier(source_db.dbname))
    )
    # Transactions of more than 4 MB each, and ten in the queue: the limit is reached before the queue is full.
    route = slot_route(source_db, target_db, init_route, apply__memory_limit_bytes=_LIMIT_BYTES, apply__workers=8)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    pid = walsender_pid(route)
    with foreign_transaction(target_db, "LOCK TABLE wide IN ACCESS EXCLUSIVE MODE"):
        source_db.execute(
            "DO $$ BEGIN FOR i IN 1..50 LOOP INSERT INTO wide SELECT i * 1000 + g, repeat(md5((i * g)::text), 128)"
            " FROM generate_series(0, 999) AS g; COMMIT; END LOOP; END $$"
        )
        target_db.wait_until(WORKER_IS_BLOCKED)
        daemon.wait_for_event("memory_limit_reached")
        wait_for_replies(route, 5)
        assert walsender_pid(route) == pid
        assert peak_resident_bytes(daemon.pid) < _BLOCKED_PEAK_BYTES
    daemon.wait_caught_up()
    assert not daemon.events_of("source_lost")
    assert walsender_pid(route) == pid
    assert peak_resident_bytes(daemon.pid) < _BLOCKED_PEAK_BYTES
    daemon.stop()
    check_equal(route, "wide")


@pytest.mark.timeout(_BIG_TIMEOUT_S + 20)
def test_f36_five_million_changes_in_one_transaction(
    source_db: Database, target_db: Database, init_route: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F36: one transaction of 5 million rows without a key, then small ones: less than 500 MB resident, rows equal.

    Nobody sees a part of it: the readers' count is 0 or all.
    """
    route = plain_route(source_db, target_db, init_route)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    source_db.execute("INSERT INTO evt SELECT generate_series(1, 5000000)")
    commit_each(source_db, 1, 200)
    # A record of one large transaction is visible with its rows, never before.
    target_db.wait_until("SELECT EXISTS (SELECT FROM evt)", timeout_s=_BIG_TIMEOUT_S)
    assert target_db.rows("SELECT count(*) >= 5000000 FROM evt") == [(True,)]
    daemon.wait_caught_up()
    peak_bytes = peak_resident_bytes(daemon.pid)
    assert peak_bytes < _BIG_PEAK_BYTES, f"{peak_bytes / 1e6:.0f} MB"
    daemon.stop()
    check_equal(route)
