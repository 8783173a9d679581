"""Transactions in progress beside others: what is followed, rolled back, announced, refused, and in which order.

One daemon with two workers for the head and two that follow serves all tests; each has tables of its own.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.daemon import Daemon
from tests.fixtures.databases import create_database, drop_database
from tests.fixtures.fan import QUICK, make_slot
from tests.fixtures.plain import check_equal, foreign_transaction
from tests.fixtures.route import Route
from tests.fixtures.streams import (
    FOLLOW,
    LITTLE_MEMORY,
    SOME_ROWS,
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

    from tests.fixtures.servers import ServerPool

_TABLES = """
CREATE TABLE small (id serial PRIMARY KEY, v int);
CREATE TABLE evt (id int, v text);
CREATE TABLE one (id int PRIMARY KEY, v text);
CREATE TABLE two (id int PRIMARY KEY, v text);
CREATE TABLE three (id int PRIMARY KEY, v text);
CREATE TABLE shape (id int PRIMARY KEY, v text);
CREATE TABLE hot (id int PRIMARY KEY, v text);
INSERT INTO hot VALUES (1, 'old'), (2, 'old');
"""
_IN_THE_WAY = "it was in the way of an earlier transaction"
#: Counted bytes of changes that wait in memory for a worker are bounded by half the memory limit.
_MORE_THAN_WAITS_IN_MEMORY = 14_000


class _Lab:
    """A route and the daemon on it."""

    def __init__(self, route: Route, daemon: Daemon) -> None:
        self.route = route
        self.daemon = daemon

    def check(self, *tables: str) -> None:
        """Wait until all is applied; fail unless tables are equal."""
        self.daemon.wait_caught_up()
        check_equal(self.route, *tables)

    def small(self) -> None:
        """Commit a small transaction and wait until it is visible on the target."""
        ((number,),) = self.route.source.rows("INSERT INTO small (v) VALUES (0) RETURNING id")
        self.route.target.wait_until(f"SELECT EXISTS (SELECT FROM small WHERE id = {number})")


@pytest.fixture(scope="module")
def lab(server_pool: ServerPool, pg_major: int) -> Iterator[_Lab]:
    """One daemon for all tests of this module."""
    name = secrets.token_hex(4)
    source = create_database(server_pool.get("source", pg_major), f"source_{name}")
    target = create_database(server_pool.get("target", pg_major), f"target_{name}", with_state=True)
    for database in (source, target):
        database.execute(_TABLES)
    # Known to the source only, and unique on the target only.
    source.execute("CREATE TABLE missing (id int PRIMARY KEY, v text); CREATE TABLE loose (id int, v text)")
    target.execute("CREATE TABLE loose (id int PRIMARY KEY, v text)")
    target.execute("ALTER TABLE shape ADD COLUMN c int, ADD COLUMN d int")
    source.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    stream_everything(source)
    route = Route(source=source, target=target)
    make_slot(route)
    daemon = Daemon(route, settings={**QUICK, **FOLLOW, **LITTLE_MEMORY, "source.status_interval_s": 0.1})
    try:
        daemon.wait_for_event("source_connected")
        yield _Lab(route, daemon)
    finally:
        daemon.end()
        drop_database(target)
        drop_database(source)


def test_several_in_progress_beside_small_ones(lab: _Lab) -> None:
    """Chunks of five sessions and small transactions alternate; small ones are visible before any of them commits.

    Two can be followed, the others are kept; one is rolled back as a whole. Nothing is lost or applied twice.
    """
    sessions = [lab.route.source.connect() for _ in range(5)]
    for number, session in enumerate(sessions):
        session.execute("BEGIN")
        session.execute(fill("evt", number * 10_000, 300))
    for step in range(1, 4):
        for number, session in enumerate(sessions):
            first = number * 10_000 + step * 1000
            session.execute("SAVEPOINT outside")
            session.execute(fill("evt", first, 300))
            session.execute("SAVEPOINT inside")
            session.execute(fill("one", first, 300))
            session.execute(("RELEASE inside", "ROLLBACK TO inside", "RELEASE outside", "ROLLBACK TO outside")[
                (step + number) % 4
            ].encode())  # fmt: skip
        lab.small()
    for session in (sessions[3], sessions[0], sessions[4], sessions[2]):
        session.execute("COMMIT")
    sessions[1].execute("ROLLBACK")
    for session in sessions:
        session.close()
    lab.check("evt", "one", "small")
    wait_none_follows(lab.route)


def test_t51_a_rollback_of_chunks_already_applied(lab: _Lab) -> None:
    """Savepoints follow subtransactions: what the target has of a rolled back one goes, what was before stays (T-51).

    The commit comes when the worker has nothing left to do; it is not applied a second time.
    """
    with lab.route.source.connect() as session:
        session.execute("BEGIN")
        xid = xid_of(session)
        session.execute(fill("two", 1))
        session.execute("SAVEPOINT a")
        session.execute(fill("two", 2000))
        session.execute("SAVEPOINT b")
        session.execute("DELETE FROM two WHERE id % 2 = 0")
        session.execute("RELEASE b")
        wait_followed(lab.route, "two")
        session.execute("ROLLBACK TO a")
        session.execute("UPDATE two SET v = repeat('y', 300)")
        session.execute(fill("evt", -SOME_ROWS))
        wait_followed(lab.route, "evt")
        session.execute("COMMIT")
    lab.check("two", "evt")
    assert is_followed(lab.daemon, xid)
    assert spilled(lab.daemon, xid) == []


def test_a_rolled_back_transaction_leaves_nothing_and_its_worker(lab: _Lab) -> None:
    """A transaction followed and rolled back as a whole is gone; its worker follows the next, three times in a row."""
    for _ in range(3):
        with lab.route.source.connect() as session:
            session.execute("BEGIN")
            xid = xid_of(session)
            session.execute(fill("three", 1))
            wait_followed(lab.route, "three")
            session.execute("ROLLBACK")
        wait_none_follows(lab.route)
        assert is_followed(lab.daemon, xid)
    lab.check("three")


def test_t52_a_schema_is_that_of_its_stream(lab: _Lab) -> None:
    """A column added in a transaction in progress is not there for others before it commits (T-52).

    Nor at all if its subtransaction is rolled back, for itself or for others.
    """
    source = lab.route.source
    wide = b"INSERT INTO shape SELECT g, repeat('x', 300), %d FROM generate_series(%d, %d) AS g"
    with source.connect() as session:
        session.execute("BEGIN")
        session.execute(fill("shape", 1))
        session.execute("SAVEPOINT a")
        session.execute("ALTER TABLE shape ADD COLUMN d int")
        session.execute(wide % (4, 2001, 3000))
        wait_received(lab.route)
        session.execute("ROLLBACK TO a")
        source.execute("INSERT INTO shape VALUES (-1, 'beside')")
        lab.route.target.wait_until("SELECT EXISTS (SELECT FROM shape WHERE id = -1)")
        session.execute(fill("shape", 2001))
        session.execute("COMMIT")
        session.execute("BEGIN")
        session.execute("ALTER TABLE shape ADD COLUMN c int")
        session.execute(wide % (5, 4001, 5000))
        session.execute("COMMIT")
        session.execute("INSERT INTO shape VALUES (-2, 'behind', 6)")
    lab.daemon.wait_caught_up()
    query = "SELECT c, count(*), sum(id) FROM shape GROUP BY c ORDER BY c"
    assert lab.route.target.rows(query) == source.rows(query)
    assert lab.route.target.rows("SELECT count(d) FROM shape") == [(0,)]


def test_t53_a_unique_key_on_the_target_only(lab: _Lab) -> None:
    """A transaction in progress that holds a key which an earlier commit needs gives way at once (T-53, seed 002).

    PostgreSQL sees no deadlock: the one waits for the other, and that for more of its transaction.
    """
    with lab.route.source.connect() as session:
        session.execute("BEGIN")
        xid = xid_of(session)
        session.execute("SAVEPOINT a")
        session.execute(fill("loose", 1))
        wait_followed(lab.route, "loose")
        lab.route.source.execute("INSERT INTO loose VALUES (1, 'other')")
        lab.route.target.wait_until("SELECT EXISTS (SELECT FROM loose WHERE v = 'other')")
        assert wait_spilled(lab.daemon, xid) == _IN_THE_WAY
        session.execute("ROLLBACK TO a")
        session.execute(fill("loose", 2001))
        session.execute("COMMIT")
    lab.check("loose")


def test_t53_a_full_queue(lab: _Lab) -> None:
    """A worker that waits for another one gets more than is kept for it in memory; reading goes on (T-53, seed 002).

    Both follow a transaction, and both have the same key, unique on the target only. The one that commits first is
    first.
    """
    source = lab.route.source
    with source.connect() as holder, source.connect() as waiter:
        holder.execute("BEGIN")
        holder_xid = xid_of(holder)
        holder.execute("SAVEPOINT a")
        holder.execute(fill("loose", 10_001))
        wait_followed(lab.route, "loose")
        waiter.execute("BEGIN")
        waiter_xid = xid_of(waiter)
        waiter.execute(fill("loose", 10_001))
        wait_followed(lab.route, "loose")
        waiter.execute(fill("evt", 500_000, _MORE_THAN_WAITS_IN_MEMORY))
        lab.small()
        assert not is_writing(lab.route, "evt")
        assert spilled(lab.daemon, holder_xid) == []
        waiter.execute("COMMIT")
        lab.route.target.wait_until("SELECT EXISTS (SELECT FROM loose WHERE id = 10001)")
        assert wait_spilled(lab.daemon, holder_xid) == _IN_THE_WAY
        assert spilled(lab.daemon, waiter_xid) == []
        holder.execute("ROLLBACK TO a")
        holder.execute(fill("loose", 20_001))
        holder.execute("COMMIT")
    lab.check("loose", "evt", "small")


def test_t54_a_chunk_waits_for_what_committed_before_it(lab: _Lab) -> None:
    """A transaction in progress that changes a row does so behind an earlier commit that changed it (T-54).

    That one is held on the target: nothing of the transaction is applied until then, though a worker follows it.
    """
    source, target = lab.route.source, lab.route.target
    with source.connect() as session:
        with foreign_transaction(target, "SELECT FROM hot WHERE id = 1 FOR UPDATE"):
            source.execute("UPDATE hot SET v = 'first' WHERE id = 1")
            session.execute("BEGIN")
            xid = xid_of(session)
            session.execute("UPDATE hot SET v = v || ', second' WHERE id IN (1, 2)")
            session.execute(fill("three", 9001))
            wait_received(lab.route)
            lab.daemon.wait_for_event("stream_followed", count=1 + _n_followed_before(lab.daemon, xid))
            assert not is_writing(lab.route, "three")
        wait_followed(lab.route, "three")
        assert target.rows("SELECT v FROM hot ORDER BY id") == [("first",), ("old",)]
        session.execute("COMMIT")
    lab.check("hot", "three")
    assert spilled(lab.daemon, xid) == []


def test_a_waiting_one_that_is_rolled_back_leaves_its_worker(lab: _Lab) -> None:
    """A follower that waits for an earlier commit ends with its transaction, though that commit is still held up."""
    source, target = lab.route.source, lab.route.target
    source.execute("INSERT INTO one VALUES (90000, 'old')")
    lab.check("one")
    with source.connect() as session:
        with foreign_transaction(target, "SELECT FROM one WHERE id = 90000 FOR UPDATE"):
            source.execute("UPDATE one SET v = 'first' WHERE id = 90000")
            session.execute("BEGIN")
            xid = xid_of(session)
            session.execute(fill("three", 20_001))
            wait_received(lab.route)
            lab.daemon.wait_for_event("stream_followed", count=1 + _n_followed_before(lab.daemon, xid))
            session.execute("ROLLBACK")
            wait_none_follows(lab.route)
        lab.check("one", "three")
    assert spilled(lab.daemon, xid) == []


def _n_followed_before(daemon: Daemon, xid: int) -> int:
    return sum(event["xid"] != xid for event in daemon.events_of("stream_followed"))


def test_a_refused_table_matters_only_if_its_rows_count(lab: _Lab) -> None:
    """A table that the target lacks makes the worker give way; rolled back before the commit, it has no effect."""
    with lab.route.source.connect() as session:
        session.execute("BEGIN")
        xid = xid_of(session)
        session.execute(fill("three", 5001))
        session.execute("SAVEPOINT a")
        n_spilled = len(lab.daemon.events_of("stream_spilled"))
        session.execute(fill("missing", 1))
        lab.daemon.wait_for_event("stream_spilled", count=n_spilled + 1)
        session.execute("ROLLBACK TO a")
        session.execute(fill("three", 7001))
        session.execute("COMMIT")
    lab.check("three")
    reason = wait_spilled(lab.daemon, xid)
    assert "public.missing" in reason
