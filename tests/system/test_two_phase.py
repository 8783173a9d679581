"""PostgreSQL's own cases for prepared transactions, applied by the daemon.

Source: PostgreSQL, `src/test/subscription/t`: 021_twophase.pl, 022_twophase_cascade.pl, 023_twophase_stream.pl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.databases import create_database
from tests.fixtures.fan import make_slot
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED, foreign_transaction
from tests.fixtures.route import Route
from tests.fixtures.two_phase import (
    N_PREPARED,
    TABLES,
    TWO_PHASE,
    check_nothing_is_left,
    decide,
    n_prepared,
    stream_early,
    write_prepared,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase, OwnServers

__all__ = ["pair"]

on_oldest_and_newest = pytest.mark.pg_majors(15, 18)

_FULL = "CREATE TABLE tab_full (a int PRIMARY KEY); INSERT INTO tab_full SELECT generate_series(1, 10);"
_FULL_TARGET = "CREATE TABLE tab_full (a int PRIMARY KEY);"
_NESTED = ("INSERT INTO tab_full VALUES (21)", "SAVEPOINT sp_inner", "INSERT INTO tab_full VALUES (22)",
           "ROLLBACK TO SAVEPOINT sp_inner")  # fmt: skip
_STREAM = "CREATE TABLE test_tab (a int PRIMARY KEY, b text); INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar');"
#: Columns that only the target has get their defaults.
_STREAM_TARGET = """
CREATE TABLE test_tab (a int PRIMARY KEY, b text, c timestamptz DEFAULT now(), d bigint DEFAULT 999);
INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar');
"""
#: More than 64 kB of changes, so that they are streamed.
_LOAD = (
    "INSERT INTO test_tab SELECT i, sha256(i::text::bytea) FROM generate_series(3, 1500) s(i)",
    "UPDATE test_tab SET b = sha256(b::bytea) WHERE mod(a, 2) = 0",
    "DELETE FROM test_tab WHERE mod(a, 3) = 0",
)
_COUNTS = "SELECT count(*), count(c), count(d = 999) FROM test_tab"
#: Of the rows 1 to 1500, those that no third one is.
_LOADED = 1000


def _present(database: Database, *values: int) -> list[int]:
    """Return which of the values are in `tab_full`."""
    wanted = ", ".join(map(str, values))
    return [a for (a,) in database.rows(f"SELECT a FROM tab_full WHERE a IN ({wanted}) ORDER BY a")]


def _prepare(pair: Pair, daemon: Daemon, *statements: str, gid: str = "test_prepared_tab_full") -> None:
    """Prepare on the source and wait until it is prepared on the target."""
    write_prepared(pair.source, gid, *statements)
    daemon.wait_caught_up()
    assert n_prepared(pair.target) == 1


def _decide(pair: Pair, daemon: Daemon, what: str, gid: str = "test_prepared_tab_full") -> None:
    """End it on the source and wait until it is ended on the target."""
    decide(pair.source, gid, what)
    daemon.wait_caught_up()
    assert n_prepared(pair.target) == 0


@on_oldest_and_newest
def test_021_twophase(pair: Pair) -> None:
    """021: committed, rolled back, with a savepoint undone, with an empty name, and without any change.

    A transaction without changes comes in different ways from different versions, from some with its outcome only.
    """
    pair.create(_FULL, _FULL_TARGET)
    pair.source.execute("CREATE TABLE unpublished (a int); ALTER PUBLICATION pub RENAME TO everything;"
                        "CREATE PUBLICATION pub FOR TABLE tab_full")  # fmt: skip
    daemon = pair.start(settings=TWO_PHASE)
    _prepare(pair, daemon, "INSERT INTO tab_full VALUES (11)")
    _decide(pair, daemon, "COMMIT")
    _prepare(pair, daemon, "INSERT INTO tab_full VALUES (12)")
    _decide(pair, daemon, "ROLLBACK")
    assert _present(pair.target, 11, 12) == [11]
    _prepare(pair, daemon, *_NESTED, gid="outer")
    _decide(pair, daemon, "COMMIT", gid="outer")
    assert _present(pair.target, 21, 22) == [21]
    _prepare(pair, daemon, "INSERT INTO tab_full VALUES (51)", gid="")
    _decide(pair, daemon, "ROLLBACK", gid="")
    assert _present(pair.target, 51) == []
    for text in ("SELECT FROM tab_full WHERE a = 1 FOR SHARE", "SELECT pg_current_xact_id()",
                 "INSERT INTO unpublished VALUES (1)"):  # fmt: skip
        for what in ("COMMIT", "ROLLBACK"):
            write_prepared(pair.source, "test_empty", text)
            decide(pair.source, "test_empty", what)
    pair.write("INSERT INTO tab_full VALUES (31)")
    daemon.wait_caught_up()
    assert _present(pair.target, 31) == [31]
    daemon.stop()
    check_nothing_is_left(pair.target)


@pytest.mark.crash
def test_021_023_crashes_between_prepare_and_its_outcome(own_servers: OwnServers, start_daemon: StartDaemon) -> None:
    """021, 023: both ends, the target and the publisher crash with a transaction prepared; the outcome is as decided.

    The daemon is the same all the time. One of the transactions is streamed.
    """
    servers = {
        "publisher": own_servers("publisher", settings={"logical_decoding_work_mem": "64kB"}),
        "target": own_servers("crashing"),
    }
    pair = Pair(
        create_database(servers["publisher"], "source"), create_database(servers["target"], "target"), start_daemon
    )
    pair.create(_FULL_TARGET + _STREAM, _FULL_TARGET + _STREAM_TARGET)
    daemon = pair.start(settings={**TWO_PHASE, "apply.stream_start_bytes": 0})
    write_prepared(pair.source, "undone", "INSERT INTO tab_full VALUES (0), (1)")
    write_prepared(pair.source, "tab", "INSERT INTO tab_full VALUES (2), (3)", *_LOAD)
    _crash([servers["target"], servers["publisher"]])
    decide(pair.source, "undone", "ROLLBACK")
    decide(pair.source, "tab", "COMMIT")
    daemon.wait_caught_up()
    for n, name in enumerate(servers, 2):
        write_prepared(pair.source, "tab", f"INSERT INTO tab_full VALUES ({2 * n}), ({2 * n + 1})")
        _crash([servers[name]])
        decide(pair.source, "tab", "COMMIT")
        daemon.wait_caught_up()
    daemon.stop()
    assert _present(pair.target, *range(8)) == [2, 3, 4, 5, 6, 7]
    assert pair.target.rows(_COUNTS) == [(_LOADED, _LOADED, _LOADED)]
    check_nothing_is_left(pair.target)


def _crash(servers: list[PgServer]) -> None:
    for server in servers:
        server.crash()
    for server in reversed(servers):
        server.start()


@pytest.mark.pg_majors(15)
def test_022_twophase_cascade(
    pair: Pair, source_db: Database, new_database: NewDatabase, start_daemon: StartDaemon
) -> None:
    """022: the target is itself a publisher: prepared on A is prepared on B and C, and ends as on A."""
    stream_early(pair.source)
    stream_early(pair.target)
    pair.create(_FULL_TARGET + _STREAM, _FULL_TARGET + _STREAM_TARGET)
    last = new_database(source_db.server, "last")
    last.execute(_FULL_TARGET + _STREAM_TARGET)
    pair.target.execute("CREATE PUBLICATION pub FOR TABLE tab_full, test_tab")
    settings: Mapping[str, str | float] = {**TWO_PHASE, "apply.stream_start_bytes": 0}
    onwards = Route(source=pair.target, target=last)
    make_slot(onwards)
    daemons = [pair.start(settings=settings), start_daemon(onwards, settings=settings)]
    daemons[1].wait_for_event("source_connected")
    for gid, what, statements in (
        ("test_prepared_tab_full", "COMMIT", ["INSERT INTO tab_full VALUES (11)"]),
        ("test_prepared_tab_full", "ROLLBACK", ["INSERT INTO tab_full VALUES (12)"]),
        ("outer", "COMMIT", _NESTED),
        ("test_prepared_tab", "COMMIT", _LOAD),
        ("outer", "COMMIT", ["INSERT INTO test_tab VALUES (9999, 'foobar')", "SAVEPOINT sp_inner",
                             "UPDATE test_tab SET b = sha256(b::bytea)", "DELETE FROM test_tab WHERE mod(a, 5) = 0",
                             "ROLLBACK TO SAVEPOINT sp_inner"]),
    ):  # fmt: skip
        write_prepared(pair.source, gid, *statements)
        for expected in (1, 0):
            for daemon in daemons:
                daemon.wait_caught_up()
            assert [n_prepared(database) for database in (pair.target, last)] == [expected, expected], gid
            if expected:
                decide(pair.source, gid, what)
    for daemon in daemons:
        daemon.stop()
        assert daemon.events_of("stream_followed")
    for database in (pair.target, last):
        assert _present(database, 11, 12, 21, 22) == [11, 21]
        assert database.rows(_COUNTS) == [(_LOADED + 1, _LOADED + 1, _LOADED + 1)]
        check_nothing_is_left(database)


def test_a_stream_gives_way_to_what_is_prepared(pair: Pair) -> None:
    """A part that was rolled back met a row that another transaction has prepared since; its outcome comes behind.

    The worker that follows the stream would wait for that outcome, which waits for the stream's end.
    """
    stream_early(pair.source)
    pair.create(TABLES)
    daemon = pair.start(workers=4, settings={**TWO_PHASE, "apply.stream_start_bytes": 0})
    daemon.wait_for_event("source_connected")
    wide = "INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series({}, {}) AS g"
    with foreign_transaction(pair.target, "INSERT INTO t VALUES (1, 'foreign')"), pair.source.connect() as stream:
        for statement in ("BEGIN", wide.format(1, 600), "SAVEPOINT a", "INSERT INTO t VALUES (5000, 'gone')",
                          wide.format(2001, 2600), "ROLLBACK TO SAVEPOINT a"):  # fmt: skip
            stream.execute(statement)
        pair.target.wait_until(WORKER_IS_BLOCKED)
        write_prepared(pair.source, "row", "INSERT INTO t VALUES (5000, 'kept')")
        pair.target.wait_until(f"SELECT ({N_PREPARED}) = 1")
        stream.execute("PREPARE TRANSACTION 'stream'")
    assert daemon.wait_for_event("stream_spilled")
    for gid in ("stream", "row"):
        decide(pair.source, gid, "COMMIT")
    daemon.finish()
    assert pair.target.rows("SELECT count(*), min(v) FILTER (WHERE id = 5000) FROM t") == [(601, "kept")]
    check_nothing_is_left(pair.target)


def test_a_stream_at_its_end_waits_for_what_is_prepared(pair: Pair) -> None:
    """It gives way once, and at its commit it waits, where only the target has the index in which the two meet."""
    stream_early(pair.source)
    pair.create(TABLES, TABLES + "CREATE UNIQUE INDEX ON t (v);")
    daemon = pair.start(workers=4, settings={**TWO_PHASE, "apply.stream_start_bytes": 0})
    daemon.wait_for_event("source_connected")
    with foreign_transaction(pair.target, "INSERT INTO t VALUES (1, 'foreign')"), pair.source.connect() as stream:
        for statement in ("BEGIN", "INSERT INTO t SELECT g, repeat('x', 200) || g FROM generate_series(1, 600) AS g",
                          "INSERT INTO t VALUES (5000, 'same')"):  # fmt: skip
            stream.execute(statement)
        pair.target.wait_until(WORKER_IS_BLOCKED)
        write_prepared(pair.source, "row", "INSERT INTO t VALUES (6000, 'same')")
        pair.target.wait_until(f"SELECT ({N_PREPARED}) = 1")
        stream.execute("COMMIT")
        pair.target.wait_until("SELECT count(end_lsn) = 1 FROM parapply.workers WHERE state = 'executing'")
    ((gid,),) = pair.target.rows("SELECT gid FROM parapply.prepared")
    daemon.wait_for_event("stream_spilled")
    waits = f"a lock held by prepared transaction {gid}"
    pair.target.wait_until(f"SELECT '{waits}' = ANY (SELECT waits_for FROM parapply.workers)")
    decide(pair.source, "row", "ROLLBACK")
    daemon.wait_caught_up()
    daemon.stop()
    assert len(daemon.events_of("stall_broken")) == 1
    pair.check_equal()
    check_nothing_is_left(pair.target)


@pytest.mark.in_turn("workers")
@pytest.mark.parametrize("workers", [4, 1], ids=["followed", "spilled"])
def test_023_twophase_stream(pair: Pair, workers: int) -> None:
    """023: streamed and prepared, then committed or rolled back, also with an insert in between by another transaction.

    A worker follows it from its first chunk on, or it is kept until it is prepared, as where no worker is free.
    """
    stream_early(pair.source)
    pair.create(_STREAM, _STREAM_TARGET)
    daemon = pair.start(workers=workers, settings={**TWO_PHASE, "apply.stream_start_bytes": 0})
    for what, between, rows in (
        ("COMMIT", None, _LOADED), ("ROLLBACK", None, 2), ("ROLLBACK", 99999, 3), ("COMMIT", 99999, _LOADED + 1),
    ):  # fmt: skip
        _prepare(pair, daemon, *_LOAD, gid="test_prepared_tab")
        if between:
            pair.write(f"INSERT INTO test_tab VALUES ({between}, 'foobar')")
            daemon.wait_caught_up()
        _decide(pair, daemon, what, gid="test_prepared_tab")
        assert pair.target.rows(_COUNTS) == [(rows, rows, rows)], (what, between)
        pair.write("DELETE FROM test_tab WHERE a > 2")
    daemon.finish()
    assert bool(daemon.events_of("stream_followed")) is (workers > 1)
    assert pair.target.rows(_COUNTS) == [(2, 2, 2)]
    check_nothing_is_left(pair.target)


def test_of_twins_a_prepared_transaction_holds_only_its_own(pair: Pair) -> None:
    """Of equal rows without a key, a change takes one that no prepared transaction has changed.

    The built-in subscription waits for the first one it finds, and so for ever.
    """
    pair.create("CREATE TABLE twin (a int, v text)")
    pair.write("ALTER TABLE twin REPLICA IDENTITY FULL", "INSERT INTO twin VALUES (1, 'x'), (1, 'x'), (1, 'x')")
    daemon = pair.start(settings=TWO_PHASE)
    daemon.wait_caught_up()
    write_prepared(pair.source, "twin", "DELETE FROM twin WHERE ctid = '(0,1)'")
    pair.write("UPDATE twin SET v = 'y' WHERE ctid = '(0,2)'", "DELETE FROM twin WHERE ctid = '(0,3)'")
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT v FROM twin ORDER BY v") == [("x",), ("y",)]
    decide(pair.source, "twin", "COMMIT")
    daemon.finish()
    assert pair.target.rows("SELECT v FROM twin") == [("y",)]
    check_nothing_is_left(pair.target)
