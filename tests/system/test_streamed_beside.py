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
    wait_none_follows,
    wait_received,
    wait_spilled,
    xid_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import ServerPool

_TABLES = """
CREATE TABLE hot (id int PRIMARY KEY, v text);
INSERT INTO hot SELECT g, 'old' FROM generate_series(1, 9) AS g;
CREATE TABLE first (id int PRIMARY KEY, v text);
CREATE TABLE second (id int PRIMARY KEY, v text);
CREATE TABLE ranges (id int PRIMARY KEY, v text);
CREATE TABLE same (id int PRIMARY KEY, v text);
CREATE TABLE gone (id int PRIMARY KEY, v text);
CREATE TABLE twice (id int PRIMARY KEY, v text);
CREATE TABLE announced (id int PRIMARY KEY, v text);
CREATE TABLE kept (id int PRIMARY KEY, v text);
CREATE TABLE watched (id int, v text);
ALTER TABLE watched REPLICA IDENTITY FULL;
CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER watch BEFORE UPDATE ON watched FOR EACH ROW EXECUTE FUNCTION watch();
ALTER TABLE watched ENABLE ALWAYS TRIGGER watch;
CREATE TABLE codes (id int PRIMARY KEY, v text, code int UNIQUE);
"""


#: Sessions that have written to a table, uncommitted.
_WRITERS = (
    "SELECT count(DISTINCT pid) FROM pg_locks WHERE granted AND mode = 'RowExclusiveLock' AND relation = '{}'::regclass"
)
#: One of the followers has a transaction open and nothing to do; the other is stopped.
_ONE_IS_IDLE = (
    "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE"
    " 'parapply worker%' AND state = 'idle in transaction'"
)


def _wait_writers(route: Route, table: str, n_sessions: int) -> None:
    """Return when so many sessions have written to a table, uncommitted."""
    route.target.wait_until(f"SELECT ({_WRITERS.format(table)}) = {n_sessions}")


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
    target = create_database(server_pool.get("target", pg_major), f"target_{name}", with_state=True)
    for database in (source, target):
        database.execute(_TABLES)
    source.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    stream_everything(source)
    route = Route(source=source, target=target)
    make_slot(route)
    settings = {
        **QUICK, **FOLLOW, "apply.workers": 4, "source.status_interval_s": 0.1,
        'apply.tables."public.watched".parallel': "always",
    }  # fmt: skip
    daemon = Daemon(route, settings=settings)
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
        _wait_writers(lab.route, "ranges", 2)
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
        assert lab.route.target.rows(_WRITERS.format("same")) == [(1,)]
        assert is_followed(lab.daemon, later)
    lab.check("same")
    assert spilled(lab.daemon, later) == []


def test_t54_a_table_with_another_unique_index_waits(lab: _Lab) -> None:
    """Whose values the ranges of the key say nothing of: all of such a table is taken for touched."""
    with lab.stopped_at(4) as stop:
        lab.commit(b"INSERT INTO codes SELECT g, repeat('x', 300), g FROM generate_series(1, 1000) AS g", stop)
        later = lab.commit(b"INSERT INTO codes SELECT g, repeat('x', 300), -g FROM generate_series(5001, 6000) AS g")
        wait_followed(lab.route, "codes")
        assert lab.route.target.rows(_WRITERS.format("codes")) == [(1,)]
        assert is_followed(lab.daemon, later)
    lab.check("codes")
    assert spilled(lab.daemon, later) == []


def test_t54_rows_that_are_not_there_yet(lab: _Lab) -> None:
    """A later one that was begun too early, because nobody knew what comes, finds no rows, and comes again."""
    with lab.stopped_at(5) as stop:
        lab.commit(fill("gone", 1), stop, fill("second", 100_000), fill("gone", 50_000))
        later = lab.commit(b"UPDATE gone SET v = repeat('y', 300) WHERE id >= 50000")
        assert wait_spilled(lab.daemon, later) == "a change failed (row count)"
    lab.check("second", "gone")


def test_t54_rows_that_an_earlier_one_wants_later(lab: _Lab) -> None:
    """A later one that was begun too early stands in the way of the earlier one, rolls back, and comes again."""
    lab.commit(fill("twice", 1))
    lab.commit(fill("twice", 50_000))
    lab.check("twice")
    with lab.stopped_at(6) as stop:
        first, second = (b"UPDATE twice SET v = repeat('a', 300) WHERE id %s 50000" % way for way in (b"<", b">="))
        earlier = lab.commit(first, stop, fill("second", 200_000), second)
        later = lab.commit(b"UPDATE twice SET v = repeat('b', 300) WHERE id >= 50000")
        _wait_writers(lab.route, "twice", 2)
        lab.route.target.wait_until(_ONE_IS_IDLE)
        assert lab.route.target.rows("SELECT count(*) FROM twice WHERE v LIKE 'b%'") == [(0,)]
    lab.check("second", "twice")
    assert wait_spilled(lab.daemon, later) == "it was in the way of an earlier transaction"
    assert spilled(lab.daemon, earlier) == []


def test_t54_a_table_that_an_earlier_one_has_announced(lab: _Lab) -> None:
    """What an earlier one will change is known from its announcements, though not which rows."""
    with lab.stopped_at(7) as stop:
        lab.commit(fill("first", 300_000), stop, fill("second", 300_000), fill("announced", 1))
        later = lab.commit(b"UPDATE announced SET v = repeat('y', 300)")
        wait_received(lab.route)
        lab.route.target.wait_until(_ONE_IS_IDLE)
        assert is_followed(lab.daemon, later)
        assert not is_writing(lab.route, "announced")
    lab.check("first", "second", "announced")
    assert spilled(lab.daemon, later) == []


def test_a_waiting_one_that_is_rolled_back_leaves_its_worker(lab: _Lab) -> None:
    """Though what it waited for still stands."""
    lab.commit(fill("kept", 1))
    lab.check("kept")
    with lab.stopped_at(8) as stop:
        lab.commit(b"UPDATE kept SET v = repeat('a', 300)", stop)
        with lab.route.source.connect() as session:
            session.execute("BEGIN")
            later = xid_of(session)
            session.execute(b"UPDATE kept SET v = repeat('b', 300)")
            wait_received(lab.route)
            lab.route.target.wait_until(_ONE_IS_IDLE)
            assert is_followed(lab.daemon, later)
            session.execute("ROLLBACK")
        wait_none_follows(lab.route)
    lab.check("kept")
    assert spilled(lab.daemon, later) == []


def test_t25_rows_that_nobody_counts_wait(lab: _Lab) -> None:
    """A trigger may keep a row from being written: nothing says then that one is missing, so nothing goes ahead."""
    lab.commit(fill("watched", 1))
    lab.check("watched")
    with lab.stopped_at(9) as stop:
        lab.commit(fill("first", 400_000), stop)
        later = lab.commit(b"UPDATE watched SET v = repeat('y', 300)")
        wait_received(lab.route)
        lab.route.target.wait_until(_ONE_IS_IDLE)
        assert is_followed(lab.daemon, later)
        assert not is_writing(lab.route, "watched")
    lab.check("first", "watched")
    assert spilled(lab.daemon, later) == []


def test_t25_rows_that_need_not_be_there(source_db: Database, target_db: Database, start_daemon: StartDaemon) -> None:
    """Where the target cascades, a missing row is no error for a single one: beside an earlier one it is (T-25).

    The later one deletes what a part of the earlier one inserts that nobody has seen yet.
    """
    tables = """
    CREATE TABLE hot (id int PRIMARY KEY, v text);
    INSERT INTO hot VALUES (1, 'old');
    CREATE TABLE more (id int PRIMARY KEY, v text);
    CREATE TABLE parent (id int PRIMARY KEY);
    INSERT INTO parent VALUES (1);
    CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent ON DELETE CASCADE, v text);
    """
    for database in (source_db, target_db):
        database.execute(tables)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    stream_everything(source_db)
    route = Route(source=source_db, target=target_db)
    make_slot(route)
    settings = {
        **QUICK, **FOLLOW, "apply.workers": 4, "source.status_interval_s": 0.1,
        "target.session_replication_role": "origin",
    }  # fmt: skip
    lab = _Lab(route, start_daemon(route, settings=settings))
    lab.daemon.wait_for_event("source_connected")
    insert = "INSERT INTO child SELECT g, 1, repeat('x', 300) FROM generate_series({}, {}) AS g"
    with lab.stopped_at(1) as stop:
        unseen = insert.format(50_001, 53_000).encode()
        lab.commit(insert.format(1, 1000).encode(), stop, fill("more", 1), unseen)
        later = lab.commit(b"DELETE FROM child WHERE id > 50000")
        assert wait_spilled(lab.daemon, later) == "a change failed (row count)"
    lab.check("more", "child")
    assert route.target.rows("SELECT count(*) FROM child") == [(1000,)]
