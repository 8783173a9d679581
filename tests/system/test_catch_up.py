"""A backlog read in ranges of WAL: every hazard of that has its rule here, and nothing is lost or comes twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from parapply.model import parse_lsn
from tests.fixtures.backlog import (
    RANGES,
    TABLES,
    fill,
    fill_long,
    fill_more,
    reason_declined,
    reason_left,
    stop_equal,
)
from tests.fixtures.databases import create_database
from tests.fixtures.fan import QUICK
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import foreign_transaction
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.streams import stream_everything

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

__all__ = ["pair"]

# Small batches that are durable at once, and fewer bytes read ahead than `_MANY` transactions have: reading waits for
# the target, so that the slot is moved on the way, however fast the publisher is.
_STEPS: dict[str, str | float] = {
    **RANGES, "source.catch_up_range_bytes": 65_536, "apply.memory_limit_bytes": 1 << 24,
    "apply.max_batch_transactions": 20, "target.synchronous_commit": "on",
}  # fmt: skip
_MANY = 350
_EITHER_ORDER = pytest.mark.parametrize("order", ["preserve", "relaxed"])


@pytest.mark.pg_majors(15, 18)
def test_a_backlog_is_read_in_ranges_and_the_stream_goes_on(pair: Pair, pg_major: int) -> None:
    """By a role with LOGIN and REPLICATION, in either order; what is committed in the meantime also comes once.

    Reading is the publisher's affair and the order the target's, so each order is tried once.
    """
    order = "preserve" if pg_major == 15 else "relaxed"
    pair.create(TABLES)
    fill(pair.source, 1, 400)
    daemon = pair.start(settings={**RANGES, "apply.commit_order": order})
    fill(pair.source, 401, 100)
    assert reason_left(daemon) == "caught up"
    pair.write("TRUNCATE b; INSERT INTO b VALUES (1, 40001, 2)")
    fill(pair.source, 501, 20)
    stop_equal(pair, daemon)


def test_ranges_leave_nothing_of_a_backlog_to_the_stream(pair: Pair) -> None:
    """It would send the last transactions only after it had decoded the whole backlog once more."""
    pair.create(TABLES)
    fill(pair.source, 1, 100)
    ((end,),) = pair.source.rows("SELECT pg_current_wal_flush_lsn()")
    daemon = pair.start(settings=RANGES)
    # But for the header of a page, in which a position may lie.
    assert parse_lsn(daemon.wait_for_event("catch_up_left")["start_lsn"]) >= parse_lsn(end) - 40
    stop_equal(pair, daemon)


@pytest.mark.in_turn("order")
@_EITHER_ORDER
def test_a_stream_that_falls_behind_is_left_for_ranges(pair: Pair, order: str) -> None:
    """And taken up again, as often as it takes: each hand-over, either way, keeps every transaction once."""
    pair.create(TABLES)
    fill(pair.source, 1, 100)
    # In long ranges: with short ones it would matter how far back the slot restarts.
    long = {"source.catch_up_range_bytes": 1 << 26, "source.catch_up_pause_s": 0}
    daemon = pair.start(settings={**RANGES, **long, "apply.commit_order": order})
    for number in (1, 2, 3):
        fill(pair.source, number * 1000, 100)
        daemon.wait_for_event("catch_up_left", count=number)
    assert "left for ranges" in daemon.wait_for_event("stream_left")["reason"]
    assert not daemon.events_of("source_lost")
    stop_equal(pair, daemon)


def test_the_slot_never_passes_what_is_durable(pair: Pair, start_daemon: StartDaemon) -> None:
    """While no session streams, the slot moves every few ranges, and never past the watermark on the target's disk."""
    pair.create(TABLES)
    fill_long(pair.source, _MANY)
    before = pair.route.confirmed_flush_lsn()
    failpoint = {"PARAPPLY_FAILPOINT": f"{failpoints.SLOT_MOVED}:exit"}
    daemon = start_daemon(pair.route, settings={**QUICK, **_STEPS}, environ=failpoint)
    assert daemon.exit_code(60) == failpoints.EXIT_STATUS, daemon.log_tail()
    ((durable,),) = pair.target.rows("SELECT lowest_remote_lsn FROM parapply.progress")
    assert before < pair.route.confirmed_flush_lsn() <= parse_lsn(durable)
    stop_equal(pair, pair.start(settings=RANGES))


def test_a_run_that_ends_inside_ranges_moves_the_slot(pair: Pair, start_daemon: StartDaemon) -> None:
    """To what is durable, as the stream would have reported it: `--until` is for those who go on from there."""
    pair.create(TABLES)
    fill(pair.source, 1, 20)
    ((until,),) = pair.source.rows("SELECT pg_current_wal_flush_lsn()")
    # More than is read ahead.
    text = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 12) AS i)"
    for number in range(90):
        first = 100_000 + number * 1000
        pair.source.execute(f"INSERT INTO a SELECT g, 1, {text} FROM generate_series({first}, {first} + 700) AS g")
    settings = {**QUICK, **RANGES, "source.catch_up_range_bytes": 1 << 20, "apply.memory_limit_bytes": 1 << 24}
    daemon = start_daemon(pair.route, "--until", until, settings=settings)
    assert daemon.exit_code(60) == 0, daemon.log_tail()
    assert not daemon.events_of("catch_up_left")
    ((durable,),) = pair.target.rows("SELECT lowest_remote_lsn FROM parapply.progress")
    assert parse_lsn(until) <= pair.route.confirmed_flush_lsn() == parse_lsn(durable)
    stop_equal(pair, pair.start(settings=RANGES))


@pytest.mark.in_turn("order", "points")
@pytest.mark.crash
@pytest.mark.parametrize(
    ("order", "points"),
    [
        ("preserve", ("range_part:kill:2", "slot_moved:kill")),
        ("relaxed", ("range_part:kill:2", "range_read:kill:3", "slot_moved:kill", "range_part:kill:9",
                     "handed_over:kill")),
    ],
    ids=["preserve", "relaxed"],
)  # fmt: skip
def test_killed_inside_a_range_nothing_is_lost_or_doubled(
    pair: Pair, start_daemon: StartDaemon, order: str, points: Sequence[str]
) -> None:
    """SIGKILL within a range, between two, with the slot just moved, and with the copy dropped and no stream yet.

    Where the order is kept, the target knows one position: only what was read and what moves the slot matter.
    """
    pair.create(TABLES)
    fill_long(pair.source, _MANY)
    settings = {**QUICK, **_STEPS, "apply.commit_order": order}
    for point in points:
        daemon = start_daemon(pair.route, settings=settings, environ={"PARAPPLY_FAILPOINT": point})
        assert daemon.exit_code(60) == -9, f"{point}: {daemon.log_tail()}"
        fill_long(pair.source, 20)
    stop_equal(pair, pair.start(settings={**RANGES, "apply.commit_order": order}))


@pytest.mark.crash
def test_a_connection_lost_inside_a_range_is_followed_by_ranges_or_the_stream(
    pair: Pair, start_daemon: StartDaemon
) -> None:
    """Inside a range, whatever came before, the stream follows, which always makes progress; between two, ranges do.

    Nor do ranges if nothing was applied before the loss, as when the tables were not known yet.
    """
    pair.create(TABLES)
    fill_more(pair.source, 150)
    for point, is_inside in (("range_part:raise-lost:6", True), ("range_read:raise-lost:3", False)):
        settings = {**QUICK, **RANGES, "source.catch_up_range_bytes": 65_536}
        daemon = start_daemon(pair.route, settings=settings, environ={"PARAPPLY_FAILPOINT": point})
        daemon.wait_for_event("source_lost")
        daemon.wait_for_event("source_connected", count=2)
        first, second = [event["start_lsn"] for event in daemon.events_of("source_connected")]
        if is_inside or first == second:
            assert "did not come to its end" in reason_declined(daemon)
        else:
            assert len(daemon.events_of("catch_up_entered")) == 2
        fill_more(pair.source, 150)
        stop_equal(pair, daemon)
        fill_more(pair.source, 150)
    stop_equal(pair, pair.start(settings=RANGES))


@pytest.mark.crash
def test_a_network_cut_inside_a_range(
    source_db: Database, target_db: Database, pair: Pair, start_daemon: StartDaemon
) -> None:
    """The next epoch goes on from what is on the target: nothing of a range that was not read whole counts."""
    pair.create(TABLES)
    fill(pair.source, 1, 200)
    with CutProxy("127.0.0.1", int(pair.source.rows("SHOW port")[0][0])) as proxy:
        route = Route(
            source=source_db, target=target_db, slot=pair.route.slot, source_dsn=proxy.dsn(source_db.source_role_dsn)
        )
        hit = proxy.drop_reply_after(b"get_binary_changes", reply=b"PGCOPY")
        daemon = start_daemon(route, settings={**QUICK, **RANGES})
        assert hit.wait(20)
        daemon.wait_for_event("source_lost")
        daemon.wait_caught_up()
        fill(pair.source, 201, 50)
        stop_equal(pair, daemon)


@pytest.mark.pg_majors(15, 18)
def test_a_transaction_in_progress_is_left_to_the_stream(pair: Pair) -> None:
    """At its Stream Start the ranges end with the last whole transaction, whether it commits or not, and it comes once.

    Read on in ranges it would come again from its beginning in each, or be written to the publisher's disk in each.
    """
    pair.create(TABLES)
    stream_everything(pair.source)
    fill(pair.source, 1, 50)
    with pair.source.connect() as open_one, pair.source.connect() as undone:
        for connection, first in ((open_one, 100_000), (undone, 200_000)):
            connection.execute("BEGIN")
            rows = f"SELECT g, 1, repeat('x', 100) FROM generate_series({first}, {first} + 3000) g"
            connection.execute(f"INSERT INTO a {rows}".encode())
        fill(pair.source, 51, 50)
        daemon = pair.start(settings={**RANGES, "source.catch_up_range_bytes": 1 << 20})
        assert reason_left(daemon) == "a transaction in progress is too large for a range"
        open_one.execute("COMMIT")
        undone.execute("ROLLBACK")
    fill(pair.source, 101, 20)
    stop_equal(pair, daemon)


def test_large_rows_send_it_to_the_stream(pair: Pair) -> None:
    """The gain of a range grows with messages, its cost with bytes; small rows in front do not hide that."""
    pair.create(TABLES)
    fill(pair.source, 1, 100)
    pair.source.execute("ALTER TABLE b ADD body text; ALTER TABLE b ALTER body SET STORAGE external")
    with pair.source.connect() as connection:
        for number in range(60):
            connection.execute(f"INSERT INTO b VALUES (-{number}, NULL, 1, repeat('x', 8000))".encode())
    pair.target.execute("ALTER TABLE b ADD body text")
    daemon = pair.start(settings=RANGES)
    assert reason_left(daemon) == "the rows are large"
    stop_equal(pair, daemon)


@pytest.mark.pg_majors(15, 18)
def test_an_old_open_transaction_sends_it_to_the_stream(pair: Pair) -> None:
    """Each range is decoded from the restart point on: far behind, before or after a range, it is not worth it."""
    pair.create(TABLES)
    with pair.source.connect() as old:
        old.execute("BEGIN; INSERT INTO a VALUES (-1, 1, 'old')")
        fill(pair.source, 1, 200)
        near = {**RANGES, "source.catch_up_range_bytes": 16_384}
        daemon = pair.start(settings=near)
        assert "restarts" in reason_left(daemon)
        daemon.finish()
        fill(pair.source, 201, 20)
        daemon = pair.start(settings=near)
        assert "restarts" in reason_declined(daemon)
        old.execute("COMMIT")
    stop_equal(pair, daemon)


def test_no_free_slot_is_no_error(own_servers: OwnServers, target_db: Database, start_daemon: StartDaemon) -> None:
    """One line says why, and the stream reads."""
    server = own_servers("publisher", settings={"max_replication_slots": 1})
    pair = Pair(create_database(server, "source"), target_db, start_daemon)
    pair.create(TABLES)
    fill(pair.source, 1, 100)
    daemon = pair.start(settings=RANGES)
    assert "all replication slots are in use" in reason_declined(daemon)
    assert not daemon.events_of("source_lost")
    stop_equal(pair, daemon)


def test_a_refused_range_sends_it_to_the_stream(pair: Pair) -> None:
    """Its changes may be far larger than its WAL: what the publisher's limits refuse, another connection streams."""
    pair.create(TABLES)
    role = f"{pair.source.source_role} IN DATABASE {pair.source.dbname}"
    pair.source.execute(f"ALTER ROLE {role} SET temp_file_limit = '1MB'")
    fill(pair.source, 1, 200)
    pair.source.execute("INSERT INTO a SELECT -g, 1, repeat('x', 100000) FROM generate_series(1, 30) g")
    fill(pair.source, 201, 20)
    daemon = pair.start(settings={**RANGES, "source.catch_up_range_bytes": 65_536})
    assert "temp_file_limit" in reason_declined(daemon)
    stop_equal(pair, daemon)
    (lost,) = daemon.events_of("source_lost")
    assert "was refused" in lost["error"]
    assert not daemon.events_of("catch_up_left")


@pytest.mark.crash
def test_a_publisher_that_dies_inside_a_range(
    own_servers: OwnServers, target_db: Database, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Killed with a part of a range here: after its recovery the copy is gone and the slot is not, nothing is lost."""
    server = own_servers("publisher")
    pair = Pair(create_database(server, "source"), target_db, start_daemon)
    pair.create(TABLES)
    fill(pair.source, 1, 200)
    environ = {"PARAPPLY_FAILPOINT": "range_part:hold:3", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    settings = {**RANGES, "source.catch_up_range_bytes": 65_536}
    daemon = pair.start_only(settings=settings, environ=environ)
    held = tmp_path / "range_part.held"
    daemon.wait_for_event("source_connected")
    while not held.exists():
        assert daemon.runs_for(0.01), daemon.log_tail()
    server.kill()
    held.unlink()
    daemon.wait_for_event("source_lost")
    server.start()
    fill(pair.source, 201, 50)
    stop_equal(pair, daemon)


def test_a_slot_with_two_phase_is_left_to_the_stream(own_servers: OwnServers, start_daemon: StartDaemon) -> None:
    """A copy has no two_phase: what is prepared would come with its commit, as if it had never been prepared."""
    server = own_servers("both", settings={"max_prepared_transactions": 10})
    pair = Pair(create_database(server, "source"), create_database(server, "target"), start_daemon)
    pair.create(TABLES)
    fill(pair.source, 1, 100)
    pair.write("BEGIN; INSERT INTO a VALUES (-1, 1, 'p'); PREPARE TRANSACTION 'p'")
    daemon = pair.start(settings={**RANGES, "source.two_phase": "true"})
    assert "prepared" in reason_declined(daemon)
    daemon.wait_caught_up()
    pair.write("COMMIT PREPARED 'p'")
    stop_equal(pair, daemon)


@pytest.mark.pg_majors(18)
def test_a_failover_slot_is_left_to_the_stream(pair: Pair) -> None:
    """A copy does not wait for the standbys that a failover slot waits for: the target could be ahead of them."""
    pair.create(TABLES)
    slot = pair.route.slot
    pair.source.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    pair.source.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, false, true)")
    fill(pair.source, 1, 100)
    daemon = pair.start(settings=RANGES)
    assert "failover" in reason_declined(daemon)
    stop_equal(pair, daemon)


def test_settings_of_the_role_hold_nothing_up(pair: Pair) -> None:
    """Timeouts and memory of the role or the database do not reach the session that reads ranges."""
    pair.create(TABLES)
    role = pair.source.source_role
    for setting in ("statement_timeout = '1ms'", "idle_session_timeout = '2s'", "work_mem = '64kB'",
                    "idle_in_transaction_session_timeout = '1ms'", "default_transaction_read_only = on",
                    "standard_conforming_strings = off", "lock_timeout = '1ms'"):  # fmt: skip
        pair.source.execute(f"ALTER ROLE {role} IN DATABASE {pair.source.dbname} SET {setting}")
    fill(pair.source, 1, 100)
    daemon = pair.start(settings=RANGES)
    assert reason_left(daemon) == "caught up"
    stop_equal(pair, daemon)


def test_a_range_covers_wal_and_not_changes(pair: Pair) -> None:
    """Where little of the WAL is published, each call ends after its share of WAL, and the watermark moves with it."""
    pair.create(TABLES, published="TABLE b")
    pair.source.execute("CREATE TABLE noise (t text)")
    pair.source.execute("INSERT INTO noise SELECT repeat('x', 1000) FROM generate_series(1, 3000)")
    daemon = pair.start(settings=RANGES)
    assert daemon.wait_for_event("catch_up_left")["n_ranges"] > 5
    daemon.finish()


@pytest.mark.in_turn("command", "settings")
@pytest.mark.crash
@pytest.mark.parametrize(
    ("command", "settings"),
    [(b"START_REPLICATION", {}), (b"pg_copy_logical_replication_slot", RANGES)],
    ids=["stream", "ranges"],
)
def test_a_slot_moved_between_the_check_and_the_start(
    pair: Pair, start_daemon: StartDaemon, command: bytes, settings: dict[str, str | float]
) -> None:
    """PostgreSQL begins at the slot's later position without a word: the gap is noticed, and refused (exit 3)."""
    pair.create(TABLES)
    pair.drain()
    fill(pair.source, 1, 20)
    with CutProxy("127.0.0.1", int(pair.source.rows("SHOW port")[0][0])) as proxy:
        source_dsn = proxy.dsn(pair.source.source_role_dsn)
        route = Route(source=pair.source, target=pair.target, slot=pair.route.slot, source_dsn=source_dsn)
        frozen = proxy.freeze_before(command)
        daemon = start_daemon(route, settings={**QUICK, **settings})
        assert frozen.wait(20)
        pair.source.rows(f"SELECT pg_replication_slot_advance('{route.slot}', pg_current_wal_flush_lsn())")
        proxy.thaw()
        pair.check_stopped(daemon, code=3, says="starts at .* read by another process")


def test_a_publisher_that_falls_silent_in_a_range_isreason_left(pair: Pair, start_daemon: StartDaemon) -> None:
    """A half-open way, through which TCP still answers: neither the range nor the monitor's question gets an answer."""
    pair.create(TABLES)
    fill(pair.source, 1, 40)
    with CutProxy("127.0.0.1", int(pair.source.rows("SHOW port")[0][0])) as proxy:
        source_dsn = proxy.dsn(pair.source.source_role_dsn)
        route = Route(source=pair.source, target=pair.target, slot=pair.route.slot, source_dsn=source_dsn)
        frozen = proxy.freeze_before(b"pg_logical_slot_get_binary_changes")
        daemon = start_daemon(route, settings={**RANGES, "source.receive_timeout_s": 3})
        assert frozen.wait(20)
        assert "the publisher has said nothing for" in daemon.wait_for_event("source_lost")["error"]
        proxy.thaw()
        daemon.wait_caught_up()
    pair.check_equal()


def test_a_slot_that_is_read_in_ranges_is_kept_from_a_second_daemon(pair: Pair, start_daemon: StartDaemon) -> None:
    """No walsender holds the slot, so a daemon with another state would also read it: every row twice."""
    pair.create("CREATE TABLE evt (id int)")
    with pair.source.connect() as connection:
        connection.execute("DO $$ BEGIN FOR i IN 1..400 LOOP INSERT INTO evt VALUES (i); COMMIT; END LOOP; END $$")
    with pair.target.connect() as lock:
        lock.execute("BEGIN")
        lock.execute("LOCK TABLE evt")
        first = pair.start(settings={**_STEPS, "source.catch_up_range_bytes": 8192})
        first.wait_for_event("catch_up_entered")
        second = start_daemon(pair.route, settings={**QUICK, "target.state_schema": "other"})
        second.wait_for_event("source_lost")
        assert "is read by another parapply" in second.events_of("source_lost")[0]["error"]
        lock.execute("COMMIT")
    first.wait_caught_up()
    assert pair.target.rows("SELECT count(*), count(DISTINCT id) FROM evt") == [(400, 400)]


def test_a_start_says_how_much_wal_the_publisher_decodes_first(pair: Pair) -> None:
    """A transaction that stays open keeps the slot's restart point behind: a start is slow then, and silent."""
    pair.create("CREATE TABLE evt (id int)", published="TABLE evt")
    with foreign_transaction(pair.source, "INSERT INTO evt VALUES (0)"):
        daemon = pair.start()
        assert daemon.wait_for_event("source_connected")["size_bytes"] < 1_000_000
        pair.write("CREATE TABLE apart AS SELECT g, repeat('x', 100) FROM generate_series(1, 20000) AS g")
        daemon.finish()
        daemon = pair.start()
        assert daemon.wait_for_event("source_connected")["size_bytes"] > 1_000_000
        daemon.stop()
