"""Memory stays bounded: a locked target while changes pour in, transactions larger than memory, and huge rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from parapply.target.sql.commands import SET_BYTES
from tests.fixtures.plain import (
    TABLES,
    WORKER_IS_BLOCKED,
    check_equal,
    commit_each,
    foreign_transaction,
    peak_resident_bytes,
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
# A row is held as a frame, as parameters and by libpq, and by the interpreted twin as values too; and libpq keeps its
# memory for each connection that has sent one (docs/how-to/run-as-a-service.md).
_ROW_BYTES = 36 * 1000 * 1000
_ROW_PEAK_BYTES = 64 * _MIB + 7 * _ROW_BYTES
# Kept in memory, the frames of these rows would be 5,080 bytes each; with the interpreter that is more than the peak
# that is allowed.
_BIG_ROWS = 19_000
_BIG_PAD = "repeat('x', 5000)"
_BIG_PEAK_BYTES = 140 * 1000 * 1000
_BIG_TIMEOUT_S = 280.0


def test_f23_back_pressure_bounds_memory(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F23: the target's table is locked while 120 MB of changes come: memory stays bounded, and replies go on.

    The publisher's patience is 2 s; its walsender stays the same all the time.
    """
    for database in (source_db, target_db):
        database.execute("CREATE TABLE wide (id int PRIMARY KEY, pad text)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE wide")
    source_db.execute(
        sql.SQL("ALTER DATABASE {} SET wal_sender_timeout = '2s'").format(sql.Identifier(source_db.dbname))
    )
    # Transactions of more than 4 MB each, and ten in the queue: the limit is reached before the queue is full.
    route = slot_route(source_db, target_db, new_slot, apply__memory_limit_bytes=_LIMIT_BYTES, apply__workers=8)
    # A forked process also has the memory of its origin.
    daemon = start_daemon(route, is_cold=True)
    daemon.wait_caught_up()
    pid = walsender_pid(route)
    with foreign_transaction(target_db, "LOCK TABLE wide IN ACCESS EXCLUSIVE MODE"):
        source_db.execute(
            "DO $$ BEGIN FOR i IN 1..30 LOOP INSERT INTO wide SELECT i * 1000 + g, repeat(md5((i * g)::text), 1280)"
            " FROM generate_series(0, 99) AS g; COMMIT; END LOOP; END $$"
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


def test_a_huge_row_holds_neither_replies_nor_memory(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """Rows of 36 MB on the wire are received, planned and sent while a publisher with a patience of 2 s gets replies.

    The first is not streamed, the second is, the update leaves a huge value out. A thread makes their statements.
    """
    assert _ROW_BYTES > SET_BYTES
    for database in (source_db, target_db):
        database.execute("CREATE TABLE wide (id int PRIMARY KEY, pad text, raw bytea)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE wide")
    role, name = sql.SQL(source_db.source_role), sql.Identifier(source_db.dbname)
    source_db.execute(sql.SQL("ALTER ROLE {} IN DATABASE {} SET wal_sender_timeout = '2s'").format(role, name))
    daemon = start_daemon(route := slot_route(source_db, target_db, new_slot), is_cold=True)
    daemon.wait_caught_up()
    pid = walsender_pid(route)
    half = _ROW_BYTES // 2
    insert = "INSERT INTO wide VALUES (%s, repeat('abcdefgh', %s), decode(repeat('0a', %s), 'hex'))"
    source_db.execute(insert, [1, half // 8, half // 2])
    daemon.wait_caught_up()
    source_db.execute("ALTER TABLE wide ALTER pad SET STORAGE EXTERNAL, ALTER raw SET STORAGE EXTERNAL")
    source_db.execute(insert, [2, half // 8, half // 2])
    daemon.wait_caught_up()
    source_db.execute("UPDATE wide SET pad = left(pad, -1) WHERE id = 2")
    daemon.wait_caught_up()
    assert not daemon.events_of("source_lost")
    assert walsender_pid(route) == pid
    peak_bytes = peak_resident_bytes(daemon.pid)
    assert peak_bytes < _ROW_PEAK_BYTES, f"{peak_bytes / _MIB:.0f} MiB"
    daemon.stop()
    check_equal(route, "wide")


@pytest.mark.timeout(_BIG_TIMEOUT_S + 20)
def test_f36_one_huge_transaction(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F36: a transaction of many rows without a key, then small ones: less resident than its frames; rows equal.

    No reader sees a part of it: the count is 0 or all.
    """
    for database in (source_db, target_db):
        database.execute(f"{TABLES} CREATE TABLE big (n int, pad text)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item, evt, big")
    # A forked process also has the memory of its origin.
    daemon = start_daemon(route := slot_route(source_db, target_db, new_slot), is_cold=True)
    daemon.wait_caught_up()
    source_db.execute(f"INSERT INTO big SELECT n, {_BIG_PAD} FROM generate_series(1, {_BIG_ROWS}) AS n")
    commit_each(source_db, 1, 200)
    # A record of one large transaction is visible with its rows, never before.
    target_db.wait_until("SELECT EXISTS (SELECT FROM big)", timeout_s=_BIG_TIMEOUT_S)
    assert target_db.rows("SELECT count(*) FROM big") == [(_BIG_ROWS,)]
    daemon.wait_caught_up()
    peak_bytes = peak_resident_bytes(daemon.pid)
    assert peak_bytes < _BIG_PEAK_BYTES, f"{peak_bytes / 1e6:.0f} MB"
    daemon.stop()
    check_equal(route, "big", "item", "evt")
