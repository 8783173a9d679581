"""two_phase switched on and off, and targets that prepare nothing or no more (traps T-58, T-59, faults F33, F34)."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply import failpoints
from tests.fixtures.databases import create_database
from tests.fixtures.fan import make_slot
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import wait_until_unread
from tests.fixtures.two_phase import (
    FOLLOWED,
    LARGE,
    STREAMED_SMALL,
    TABLES,
    TWO_PHASE,
    WHOLE,
    check_nothing_is_left,
    decide,
    n_prepared,
    rows_from,
    stream_early,
    write_prepared,
)
from tests.system.test_skip import stopped_at

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

__all__ = ["pair"]


@pytest.mark.pg_majors(15, 18)
def test_t58_prepared_before_the_slot_had_two_phase(pair: Pair) -> None:
    """T-58: what was prepared before comes whole with its COMMIT PREPARED, once; its ROLLBACK PREPARED is nothing.

    Small ones, and such as are applied in pieces.
    """
    pair.create(TABLES)
    pair.drain()
    for n, shape in enumerate((WHOLE, LARGE)):
        write_prepared(pair.source, f"commit {shape}", *rows_from(200_000 * n + 1, shape))
        write_prepared(pair.source, f"rollback {shape}", *rows_from(200_000 * n + 100_001, shape))
    pair.drain()
    daemon = pair.start(settings={**TWO_PHASE, **LARGE.settings})
    write_prepared(pair.source, "after", *rows_from(500_001, WHOLE))
    daemon.wait_caught_up()
    assert n_prepared(pair.target) == 1
    for shape in (WHOLE, LARGE):
        decide(pair.source, f"rollback {shape}", "ROLLBACK")
        decide(pair.source, f"commit {shape}", "COMMIT")
    decide(pair.source, "after", "COMMIT")
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT count(*) FROM t") == [(2 * WHOLE.rows + LARGE.rows,)]
    daemon.stop()
    pair.check_equal()
    check_nothing_is_left(pair.target)


def test_t58_conflicts_of_what_was_prepared_before(pair: Pair, run_command: RunCommand) -> None:
    """T-58: each large one has its own end in the history, also at equal changes, and is skipped by it.

    The publisher does not announce again what others have used since the daemon connected, be it left out here.
    """
    pair.create(TABLES)
    pair.drain()
    for n, gid in enumerate(("a", "b", "c")):
        write_prepared(pair.source, gid, *rows_from(200_000 * n + 1, LARGE))
    pair.drain()
    pair.target.execute("INSERT INTO t SELECT 200000 * n + 5, 'local' FROM generate_series(0, 2) AS n")
    settings = {**TWO_PHASE, **LARGE.settings, "mapping.schema_only": "public.evt"}
    daemon = pair.start(settings={**settings, "conflict.insert_exists": "keep_local"})
    pair.write("INSERT INTO evt VALUES (0, '')", "INSERT INTO t VALUES (0, '')")
    decide(pair.source, "a", "COMMIT")
    decide(pair.source, "b", "COMMIT")
    daemon.wait_caught_up()
    daemon.stop()
    # Every record begins at a multiple of 8.
    found = "SELECT change_no, count(DISTINCT remote_lsn), bool_and((remote_lsn - '0/0') % 8 = 0)"
    assert pair.target.rows(f"{found} FROM parapply.conflicts GROUP BY 1") == [(5, 2, True)]
    daemon = pair.start(settings=settings)
    decide(pair.source, "c", "COMMIT")
    lsn = stopped_at(pair, daemon)
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    skipping = pair.drain(settings=settings)
    assert len(skipping.events_of("source_connected")) <= 2
    assert pair.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)]
    assert pair.target.rows("SELECT count(*) FROM t WHERE id > 400000") == [(1,)]
    assert pair.target.rows("SELECT count(*) FROM evt") == [(0,)]


def test_t58_columns_published_otherwise_within_what_was_prepared_before(pair: Pair) -> None:
    """T-58: a large one reads its first rows with the announcement that was in force, be it another's."""
    pair.create("CREATE TABLE t (id int PRIMARY KEY, a text, b text)", published="TABLE t (id, a)")
    pair.drain()
    rows = "INSERT INTO t SELECT g, {}, {} FROM generate_series({}, {}) AS g"
    before, after = ("repeat('a', 1900)", "NULL"), ("NULL", "'b'")
    write_prepared(
        pair.source,
        "late",
        rows.format(*before, 1, 2 * LARGE.rows),
        "ALTER PUBLICATION pub SET TABLE t (id, b)",
        rows.format(*after, 2 * LARGE.rows + 1, 2 * LARGE.rows + 9),
    )
    pair.drain()
    settings = {**TWO_PHASE, **LARGE.settings}
    pair.start(settings=settings).stop()
    # A publisher that decodes the outcome before the invalidation reaches it: here both are in its past.
    pair.write("INSERT INTO t VALUES (0, 'a')")
    decide(pair.source, "late", "COMMIT")
    # The table does not wait if nothing shows that its entry is another one now.
    pair.target.execute("DELETE FROM parapply.marks")
    pair.drain(settings=settings)
    pair.check_equal()


def test_a_time_between_a_prepare_and_its_outcome(pair: Pair) -> None:
    """`run --until TIME` leaves every outcome after TIME to the next run: a rollback, and a late large commit.

    Of a ROLLBACK PREPARED only the end is sent, and what the slot was told to be past never comes again. A large one
    that was prepared before the slot had two_phase has the PREPARE's time in its first piece, and never comes whole.
    """
    pair.create(TABLES)
    pair.drain()
    write_prepared(pair.source, "late", *rows_from(1, LARGE))
    pair.drain()
    pair.start(settings={**TWO_PHASE, **LARGE.settings}).stop()
    write_prepared(pair.source, "undone", *rows_from(200_001, WHOLE))
    for gid, what in (("undone", "ROLLBACK"), ("late", "COMMIT")):
        ((time,),) = pair.source.rows("SELECT clock_timestamp()::text")
        decide(pair.source, gid, what)
        pair.source.execute("INSERT INTO evt VALUES (0, 'later')")
        daemon = pair.start("--until", time, settings={**TWO_PHASE, **LARGE.settings})
        assert daemon.exit_code() == 0, daemon.log_tail()
        # The PREPARE waits for its outcome, though nothing is prepared: the publisher has rolled it back by now.
        assert pair.target.rows("SELECT count(*) FROM parapply.undecided") == [(int(gid == "undone"),)]
        assert n_prepared(pair.target) == 0
    assert pair.target.rows("SELECT count(*) FROM t") == [(0,)]
    daemon = pair.start(settings={**TWO_PHASE, **LARGE.settings})
    daemon.finish()
    pair.check_equal()
    check_nothing_is_left(pair.target)


@pytest.mark.pg_majors(15, 18)
def test_t58_prepared_before_and_streamed_afterwards(pair: Pair) -> None:
    """T-58: the publisher may stream it all the same, to make room for others: it still ends with its outcome only.

    A worker follows each of them; what is rolled back has no other end than its ROLLBACK PREPARED.
    """
    stream_early(pair.source)
    pair.create(TABLES)
    pair.drain()
    rows = "SELECT g, repeat('x', 100) FROM generate_series({}, {}) AS g"
    for n, gid in enumerate(("a", "b", "c")):
        write_prepared(pair.source, gid, f"INSERT INTO evt {rows.format(100 * n + 1, 100 * n + 75)}")
    prepared = {int(xid) for (xid,) in pair.source.rows("SELECT transaction::text FROM pg_prepared_xacts")}
    pair.drain()
    daemon = pair.start(workers=8, settings={**TWO_PHASE, "apply.stream_start_bytes": 0})
    with ExitStack() as stack:
        # Small enough to be less worth streaming than those that are prepared.
        others = [stack.enter_context(pair.source.connect()) for _ in range(4)]
        for n, other in enumerate(others):
            other.execute("BEGIN")
            other.execute(f"INSERT INTO evt {rows.format(1000 * n + 1001, 1000 * n + 1060)}".encode())
        for gid, what in (("b", "ROLLBACK"), ("a", "COMMIT"), ("c", "ROLLBACK")):
            decide(pair.source, gid, what)
        for other in others:
            other.execute("COMMIT")
    daemon.finish()
    assert len(prepared & {event["xid"] for event in daemon.events_of("stream_followed")}) > 0
    pair.check_equal()
    check_nothing_is_left(pair.target)


def _exhaust(target: Database, stack: ExitStack) -> list[str]:
    """Prepare as many transactions as the server takes, and return their names."""
    connection = stack.enter_context(target.connect())
    gids: list[str] = []
    while True:
        connection.execute("BEGIN")
        try:
            connection.execute(f"PREPARE TRANSACTION 'other_{len(gids)}'".encode())
        except psycopg.errors.OutOfMemory:
            return gids
        gids.append(f"other_{len(gids)}")


@pytest.mark.crash
def test_t59_no_room_for_a_prepared_transaction(
    source_db: Database, own_servers: OwnServers, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """T-59: none possible is refused by init and run with exit 4 and what to set; none left is waited for, in order."""
    server = own_servers("target", settings={"max_prepared_transactions": 0})
    target = create_database(server, "target")
    pair = Pair(source_db, target, start_daemon)
    pair.create(TABLES)
    says = "max_prepared_transactions = 0. Hint: set "
    init = run_command(pair.route, "init", "--set", "source.two_phase=true")
    assert (init.returncode, says in init.stderr) == (4, True), init.stderr
    assert target.rows("SELECT count(*) FROM pg_namespace WHERE nspname = 'parapply'") == [(0,)]
    refused = start_daemon(pair.route, settings=TWO_PHASE)
    pair.check_stopped(refused, code=4, says=says)
    server.configure({"max_prepared_transactions": 2})
    server.restart()
    with ExitStack() as stack:
        gids = _exhaust(target, stack)
        daemon = pair.start(settings=TWO_PHASE)
        write_prepared(pair.source, "a", *rows_from(1, WHOLE))
        pair.write("INSERT INTO t VALUES (100, 'later')")
        daemon.wait_for_event("target_lost", count=3)
        assert target.rows("SELECT count(*) FROM t") == [(0,)]
        target.execute(f"ROLLBACK PREPARED '{gids.pop()}'")
        daemon.wait_caught_up()
        decide(pair.source, "a", "COMMIT")
        daemon.wait_caught_up()
        for gid in gids:
            target.execute(f"ROLLBACK PREPARED '{gid}'")
    daemon.stop()
    pair.check_equal()
    check_nothing_is_left(target)


# Before PostgreSQL 18 a slot keeps two_phase for good.
@pytest.mark.pg_majors(18)
def test_two_phase_is_not_switched_off_with_something_prepared(pair: Pair, start_daemon: StartDaemon) -> None:
    """Off while the slot has it is refused (exit 3), as is off with something prepared (exit 4); on again goes on.

    A transaction prepared here ends here, although the slot then sends it as if it had never been prepared.
    """
    stream_early(pair.source)
    pair.create(TABLES)
    daemon = pair.start(settings=TWO_PHASE)
    for n, (gid, shape) in enumerate((("a", WHOLE), ("b", STREAMED_SMALL), ("c", LARGE))):
        write_prepared(pair.source, gid, *rows_from(100_000 * n, shape))
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT two_phase FROM parapply.progress") == [("enabled",)]
    daemon.stop()
    wait_until_unread(pair.route)
    pair.check_stopped(start_daemon(pair.route), code=3, says="has two_phase.* Hint: set source.two_phase = true")
    with psycopg.connect(pair.source.dsn_with(replication="database"), autocommit=True) as connection:
        connection.execute(f"ALTER_REPLICATION_SLOT {pair.route.slot} (TWO_PHASE false)".encode())
    says = "3 transactions are prepared on the target.* source.two_phase is off. Hint: set source.two_phase = true"
    pair.check_stopped(start_daemon(pair.route), code=4, says=says)
    daemon = pair.start(settings={**TWO_PHASE, **LARGE.settings})
    for gid, what in (("a", "COMMIT"), ("b", "ROLLBACK"), ("c", "COMMIT")):
        decide(pair.source, gid, what)
    daemon.finish()
    pair.check_equal()
    check_nothing_is_left(pair.target)


@pytest.mark.pg_majors(15, 18)
def test_a_slot_from_before_two_phase_sends_again_what_is_committed(pair: Pair, run_command: RunCommand) -> None:
    """A promoted standby may have the slot as it was then: it sends as new what was committed here without a record.

    A daemon without two_phase, which would apply it, is refused until it is recorded.
    """
    stream_early(pair.source)
    pair.create(TABLES)
    name = pair.route.slot
    pair.source.execute(f"SELECT pg_copy_logical_replication_slot('{name}', '{name}_kept')")
    for n, shape in enumerate((WHOLE, LARGE, FOLLOWED)):
        settings = {**TWO_PHASE, **shape.settings}
        environ = {"PARAPPLY_FAILPOINT": f"{failpoints.DECIDED}:kill"}
        daemon = pair.start_only(settings=settings, environ=environ)
        write_prepared(pair.source, "a", *rows_from(10_000 * n, shape))
        pair.write(f"INSERT INTO evt VALUES ({n}, 'behind')")
        daemon.wait_caught_up()
        decide(pair.source, "a", "COMMIT")
        assert daemon.exit_code() == -signal.SIGKILL
        assert n_prepared(pair.target) == 0
        wait_until_unread(pair.route)
        pair.source.execute(f"SELECT pg_drop_replication_slot('{name}')")
        pair.source.execute(f"SELECT pg_copy_logical_replication_slot('{name}_kept', '{name}')")
        says = "1 transactions are .* committed without a record of it, but source.two_phase is off"
        pair.check_stopped(pair.start_only(), code=4, says=says)
        assert re.search(says, run_command(pair.route, "check").stdout)
        daemon = pair.start(settings=settings)
        daemon.wait_caught_up()
        daemon.stop()
        pair.check_equal()
        check_nothing_is_left(pair.target)
        wait_until_unread(pair.route)


# Before PostgreSQL 18 a COMMIT PREPARED may come without its PREPARE for a transaction without changes.
@pytest.mark.pg_majors(18)
def test_what_the_last_reader_of_a_slot_was_sent_as_prepared(source_db: Database, pair: Pair) -> None:
    """A slot is not adopted behind a PREPARE: only the outcome would come, and with nothing to commit rows are lost.

    Refused while it is prepared on the publisher (exit 3), or here by a subscription that is gone (exit 4); an outcome
    that comes all the same is an error (exit 5).
    """
    source_db.execute(f"{TABLES} CREATE PUBLICATION pub FOR ALL TABLES")
    pair.target.execute(TABLES)
    make_slot(pair.route, is_two_phase=True)
    write_prepared(source_db, "a", "INSERT INTO t VALUES (1, 'a')")
    says = "has two_phase, and 1 transactions are prepared on the publisher .*'a'.* Hint: end them"
    pair.check_stopped(pair.start_only(settings=TWO_PHASE), code=3, says=says)
    passed = f"pg_replication_slot_advance('{pair.route.slot}', '{pair.route.end_of_source_lsn()}')"
    source_db.rows(f"SELECT FROM {passed}")
    decide(source_db, "a", "COMMIT")
    write_prepared(pair.target, "pg_gid_1_2", "SELECT FROM pg_current_xact_id()")
    says = "1 transactions are prepared by a subscription that was dropped .*'pg_gid_1_2'.* Hint: roll them back"
    pair.check_stopped(pair.start_only(settings=TWO_PHASE), code=4, says=says)
    decide(pair.target, "pg_gid_1_2", "ROLLBACK")
    says = "COMMIT PREPARED of transaction .* its PREPARE never came here.* Hint: another reader"
    pair.check_stopped(pair.start_only(settings=TWO_PHASE), code=5, says=says)
