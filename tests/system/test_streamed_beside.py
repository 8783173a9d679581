"""Large transactions, one committed after the other, that are applied at the same time because they touch other rows.

What they touch is predicted from what has come; where that is wrong, the target says so and the later one rolls back.
One daemon serves all tests: two of its workers may follow. A foreign lock on a row of `hot` stops the earlier
transaction in its middle; what comes some chunks behind that is not known by then.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.daemon import Daemon
from tests.fixtures.databases import create_database, drop_database
from tests.fixtures.fan import QUICK, make_slot
from tests.fixtures.plain import check_equal, foreign_transaction
from tests.fixtures.route import Route
from tests.fixtures.streams import (
    FOLLOW,
    fill,
    is_followed,
    is_writing,
    spilled,
    stream_everything,
    wait_followed,
    wait_spilled,
    xid_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.servers import ServerPool

_TABLES = """
CREATE TABLE hot (id int PRIMARY KEY, v text);
INSERT INTO hot VALUES (1, 'old'), (2, 'old'), (3, 'old'), (4, 'old'), (5, 'old'), (6, 'old');
CREATE TABLE first (id int PRIMARY KEY, v text);
CREATE TABLE second (id int PRIMARY KEY, v text);
CREATE TABLE ranges (id int PRIMARY KEY, v text);
CREATE TABLE same (id int PRIMARY KEY, v text);
CREATE TABLE gone (id int PRIMARY KEY, v text);
CREATE TABLE twice (id int PRIMARY KEY, v text);
CREATE TABLE codes (id int PRIMARY KEY, v text, code int UNIQUE);
"""


class _Lab:
    """A route and the daemon on it."""

    def __init__(self, route: Route, daemon: Daemon) -> None:
        self.route = route
        self.daemon = daemon

    def commit(self, *statements: bytes) -> int:
        """Commit statements in one transaction on the source and return its number."""
        with self.route.source.connect() as session:
            session.execute("BEGIN")
            xid = xid_of(session)
            for statement in statements:
                session.execute(statement)
            session.execute("COMMIT")
        return xid

    @contextmanager
    def stopped_at(self, row: int) -> Iterator[bytes]:
        """Give a statement at which a transaction stops on the target while the block runs."""
        with foreign_transaction(self.route.target, f"SELECT FROM hot WHERE id = {row} FOR UPDATE"):
            yield f"UPDATE hot SET v = 'new' WHERE id = {row}".encode()

    def check(self, *tables: str) -> None:
        """Wait until all is applied; fail unless tables are equal."""
        self.daemon.wait_caught_up()
        check_equal(self.route, "hot", *tables)


@pytest.fixture(scope="module")
def lab(server_pool: ServerPool, pg_major: int) -> Iterator[_Lab]:
    """One daemon for all tests of this module."""
    name = secrets.token_hex(4)
    source = create_database(server_pool.get("source", pg_major), f"source_{name}")
    target = create_database(server_pool.get("target", pg_major), f"target_{name}")
    for database in (source, target):
        database.execute(_TABLES)
    source.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    stream_everything(source)
    route = Route(source=source, target=target)
    make_slot(route)
    daemon = Daemon(route, settings={**QUICK, **FOLLOW, "source.status_interval_s": 0.1})
    try:
        daemon.wait_for_event("source_connected")
        yield _Lab(route, daemon)
    finally:
        daemon.end()
        drop_database(target)
        drop_database(source)


def test_t54_other_tables_do_not_wait(lab: _Lab) -> None:
    """A large transaction is applied while an earlier one stands still in other tables, and commits after it."""
    with lab.stopped_at(1) as stop:
        earlier = lab.commit(fill("first", 1), stop)
        later = lab.commit(fill("second", 1))
        wait_followed(lab.route, "first", "second")
        assert lab.route.target.rows("SELECT count(*) FROM second WHERE id <= 1000") == [(0,)]
    lab.check("first", "second")
    assert spilled(lab.daemon, earlier) == spilled(lab.daemon, later) == []


def test_t54_other_ranges_of_keys_do_not_wait(lab: _Lab) -> None:
    """In one table, too, if the keys of one lie before or behind those of the other."""
    with lab.stopped_at(2) as stop:
        lab.commit(fill("ranges", 1), stop)
        later = lab.commit(fill("ranges", 50_000))
        wait_followed(lab.route, "ranges")
        lab.route.target.wait_until(
            "SELECT count(DISTINCT pid) = 2 FROM pg_locks WHERE granted AND mode = 'RowExclusiveLock'"
            " AND relation = 'ranges'::regclass"
        )
    lab.check("ranges")
    assert spilled(lab.daemon, later) == []


def test_t54_the_same_keys_wait(lab: _Lab) -> None:
    """What changes rows of an earlier one waits for its commit, and need not roll back (PA.8)."""
    lab.commit(fill("same", 1))
    lab.check("same")
    with lab.stopped_at(3) as stop:
        lab.commit(b"UPDATE same SET v = repeat('a', 300)", stop)
        later = lab.commit(b"UPDATE same SET v = repeat('b', 300)")
        wait_followed(lab.route, "same")
        held = lab.route.target.rows(
            "SELECT count(DISTINCT pid) FROM pg_locks WHERE granted AND mode = 'RowExclusiveLock'"
            " AND relation = 'same'::regclass"
        )
        assert held == [(1,)]
        assert is_followed(lab.daemon, later)
    lab.check("same")
    assert spilled(lab.daemon, later) == []


def test_t54_a_table_with_another_unique_index_waits(lab: _Lab) -> None:
    """Whose values the ranges of the key say nothing of: all of such a table is taken for touched."""
    with lab.stopped_at(4) as stop:
        lab.commit(b"INSERT INTO codes SELECT g, repeat('x', 300), g FROM generate_series(1, 1000) AS g", stop)
        later = lab.commit(b"INSERT INTO codes SELECT g, repeat('x', 300), -g FROM generate_series(5001, 6000) AS g")
        wait_followed(lab.route, "codes")
        held = lab.route.target.rows(
            "SELECT count(DISTINCT pid) FROM pg_locks WHERE granted AND mode = 'RowExclusiveLock'"
            " AND relation = 'codes'::regclass"
        )
        assert held == [(1,)]
        assert is_followed(lab.daemon, later)
    lab.check("codes")
    assert spilled(lab.daemon, later) == []


def test_t54_rows_that_are_not_there_yet(lab: _Lab) -> None:
    """A later one that was begun too early, because nobody knew what comes, finds no rows, and comes again."""
    with lab.stopped_at(5) as stop:
        lab.commit(fill("first", 100_000), stop, fill("second", 100_000), fill("gone", 1))
        later = lab.commit(b"UPDATE gone SET v = repeat('y', 300)")
        assert wait_spilled(lab.daemon, later) == "a change failed (row count)"
        assert not is_writing(lab.route, "gone")
    lab.check("first", "second", "gone")


def test_t54_rows_that_an_earlier_one_wants_later(lab: _Lab) -> None:
    """A later one that was begun too early stands in the way of the earlier one, rolls back, and comes again."""
    lab.commit(fill("twice", 1))
    lab.check("twice")
    with lab.stopped_at(6) as stop:
        more = fill("second", 200_000)
        earlier = lab.commit(fill("first", 200_000), stop, more, b"UPDATE twice SET v = repeat('a', 300)")
        later = lab.commit(b"UPDATE twice SET v = repeat('b', 300)")
        wait_followed(lab.route, "twice")
        assert lab.route.target.rows("SELECT count(*) FROM twice WHERE v LIKE 'b%'") == [(0,)]
    lab.check("first", "second", "twice")
    assert wait_spilled(lab.daemon, later) == "it was in the way of an earlier transaction"
    assert spilled(lab.daemon, earlier) == []
