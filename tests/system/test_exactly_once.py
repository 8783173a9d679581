"""Exactly once: what identifies a transaction, what may be confirmed, what a restart applies (traps T-1 to T-8)."""

from __future__ import annotations

import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from parapply.applylog_schema import BatchRecord, read_record
from parapply.demo.binaries import process_options, server_account
from parapply.target.state.slots import SlotState
from parapply.wire.assembler import Assembler
from tests import build
from tests.fixtures.databases import create_database
from tests.fixtures.plain import (
    WORKER_IS_BLOCKED,
    check_equal,
    commit_each,
    foreign_transaction,
    lsn_of,
    plain_route,
    slot_route,
    wait_for_replies,
    wait_until_unread,
    watermark,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route
    from tests.fixtures.servers import OwnServers

pytestmark = [pytest.mark.crash, pytest.mark.each_session]

_LOOKS = 20
_SAMPLES = 5
# Some quarter of a second of transactions from a number on, every other one on a table that is not published.
_MIXED_LOAD = (
    "DO $$ BEGIN FOR i IN {0}..{0} + 49 LOOP INSERT INTO item VALUES (i, i); INSERT INTO evt VALUES (i); COMMIT;"
    " PERFORM pg_sleep(0.002); INSERT INTO quiet VALUES (i); COMMIT; PERFORM pg_sleep(0.002); END LOOP; END $$"
)


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Plain tables, replies every 50 ms."""
    return plain_route(source_db, target_db, new_slot, source__status_interval_s=0.05)


def test_t1_t8c_what_is_confirmed_is_durable_and_recorded_before(route: Route, start_daemon: StartDaemon) -> None:
    """T-1, T-8c: at no moment is the slot's confirmed position above the watermark recorded on the target.

    Published and unpublished changes go on. For each look the daemon is stopped just after it was heard, so that both
    numbers stand still while what it does after a reply is not done yet.
    """
    route.source.execute("CREATE TABLE quiet (n int)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    confirmed = set()
    with ThreadPoolExecutor(1) as pool:
        # The load lasts until the looks are done, however slow the machine is.
        is_enough = threading.Event()
        load = pool.submit(_mixed_load, route.source, is_enough)
        try:
            for _ in range(_LOOKS):
                wait_for_replies(route, 1)
                daemon.pause()
                confirmed.add(route.confirmed_flush_lsn())
                assert route.confirmed_flush_lsn() <= watermark(route)
                daemon.send(signal.SIGCONT)
        finally:
            is_enough.set()
        load.result()
    assert len(confirmed) >= _SAMPLES, "the position hardly moved: this proves nothing"
    daemon.finish()
    check_equal(route)


def _mixed_load(source: Database, is_enough: threading.Event) -> None:
    first = 1
    while not is_enough.is_set():
        source.execute(_MIXED_LOAD.format(first))
        first += 50


def test_t2_nothing_is_confirmed_past_a_frozen_transaction(route: Route, start_daemon: StartDaemon) -> None:
    """T-2, T-8b: one worker is frozen by a foreign row lock, 300 later transactions and unpublished ones come.

    The slot stays at or before the frozen commit all the time; after a kill and a restart nothing is lost, although
    the lock is still held when the next daemon takes over.
    """
    route.source.execute("CREATE TABLE quiet (n int); INSERT INTO item VALUES (1, 0)")
    first = start_daemon(route)
    first.wait_caught_up()
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
        route.source.execute("UPDATE item SET v = 1 WHERE id = 1")
        frozen_lsn = lsn_of(route.source)
        route.target.wait_until(WORKER_IS_BLOCKED)
        commit_each(route.source, 2, 301)
        route.source.execute("INSERT INTO quiet SELECT generate_series(1, 10000)")

        def look() -> None:
            assert route.confirmed_flush_lsn() <= frozen_lsn
            assert watermark(route) <= frozen_lsn

        wait_for_replies(route, 20, look)
        first.kill()
        second = start_daemon(route, settings={"target.lease_wait_s": 20})
        second.wait_for_event("source_connected")
        wait_for_replies(route, 5, look)
        assert route.target.rows("SELECT count(*) FROM item") == [(1,)], "a later transaction became visible"
    second.finish()
    assert route.target.rows("SELECT v FROM item WHERE id = 1") == [(1,)]
    check_equal(route)


def test_t3_a_restart_applies_nothing(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """T-3: the slot is confirmed at the end LSN, so that it sends nothing again and a restart applies nothing."""
    first = start_daemon(route)
    commit_each(route.source, 1, 50)
    first.finish()
    wait_until_unread(route)
    peek = (
        f"SELECT count(*) FROM pg_logical_slot_peek_binary_changes('{route.slot}', NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')"
    )
    assert route.source.rows(peek) == [(0,)]
    second = start_daemon(route, settings={"applylog.directory": str(tmp_path)})
    second.finish()
    # The work of the daemon as a whole is also written.
    records = [read_record(line) for path in tmp_path.iterdir() for line in path.read_bytes().splitlines()]
    assert not [one for one in records if isinstance(one, BatchRecord)], "something was applied again"
    check_equal(route)


@pytest.mark.in_turn("pad", "mode")
@pytest.mark.parametrize(("pad", "mode"), [("", "set"), ("x" * 9000, "large")])
def test_t5_a_copy_killed_in_the_middle(
    *,
    source_db: Database,
    target_db: Database,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
    tmp_path: Path,
    pad: str,
    mode: str,
) -> None:
    """T-5: the rows of one COPY share LSNs; killed between two of them, the next daemon still applies all 1000."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE copied (id int PRIMARY KEY, pad text)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE copied")
    # The smallest limit: larger transactions than a quarter of it are applied in pieces.
    route = slot_route(source_db, target_db, new_slot, apply__memory_limit_bytes=16 << 20)
    first = start_daemon(route)
    first.wait_caught_up()
    # The same key, not yet decided: its row waits, those before it are in.
    with foreign_transaction(route.target, "INSERT INTO copied VALUES (800)"):
        with source_db.connect() as connection, connection.cursor().copy(b"COPY copied FROM STDIN") as copy:
            copy.write("".join([f"{number}\t{pad}\n" for number in range(1, 1001)]))
        route.target.wait_until(WORKER_IS_BLOCKED)
        first.kill()
    second = start_daemon(route, settings={"target.lease_wait_s": 20, "applylog.directory": str(tmp_path)})
    second.finish()
    assert route.target.rows("SELECT count(*) FROM copied") == [(1000,)]
    check_equal(route, "copied")
    (path,) = tmp_path.iterdir()
    assert f'"mode":"{mode}"' in path.read_text(encoding="utf-8")


def test_t6_positions_are_numbers(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """T-6: LSNs go from F/FFxxxxxx to 10/0xxxxxxx, which is less as text; the watermark and the restart do not mind."""
    server = own_servers("publisher")
    server.stop()
    subprocess.run(
        [server.binaries.bin_dir / "pg_resetwal", "-l", "000000010000000F000000FE", "-D", server.data_dir],
        check=True, capture_output=True, cwd="/", **process_options(server_account()),
    )  # fmt: skip
    server.start()
    source = create_database(server, "source")
    route = plain_route(source, target_db, new_slot)
    first = start_daemon(route)
    commit_each(source, 1, 100)
    first.wait_caught_up()
    assert 0xF_FE00_0000 <= watermark(route) < 0x10_0000_0000
    while lsn_of(source) < 0x10_0000_0000:
        source.execute("SELECT pg_switch_wal()")
        source.execute("INSERT INTO evt VALUES (0)")
    commit_each(source, 101, 200)
    first.wait_caught_up()
    assert watermark(route) >= 0x10_0000_0000
    assert route.target.rows("SELECT lowest_remote_lsn::text FROM parapply.progress")[0][0].startswith("10/")
    first.kill()
    second = start_daemon(route, settings={"target.lease_wait_s": 20})
    commit_each(source, 201, 300)
    second.finish()
    check_equal(route)


def test_t7_the_same_xid_twice_is_two_transactions() -> None:
    """T-7: transaction ids are reused; only the end LSN shows whether a transaction was applied."""
    xid, first_lsn, second_lsn = 700, 0x1000, 0x2000
    frames = []
    for lsn in (first_lsn, second_lsn):
        frames.append(build.xlog_data(build.begin(final_lsn=lsn, xid=xid)))
        frames.append(build.xlog_data(build.commit(commit_lsn=lsn, end_lsn=lsn + 8)))
    first, second = Assembler(1 << 20).push(frames)
    assert first.xid == second.xid == xid
    state = SlotState(
        slot_id=1, slot_name="s", system_identifier="1", timeline=1, begin_lsn=0, low_lsn=first.end_lsn,
        ranges=(), members=frozenset(),
    )  # fmt: skip
    assert state.is_applied(first.end_lsn)
    assert not state.is_applied(second.end_lsn)


def test_t8a_unpublished_changes_move_the_slot(route: Route, start_daemon: StartDaemon) -> None:
    """T-8a: while only unpublished tables change, confirmed_flush_lsn and restart_lsn follow, and WAL can go."""
    route.source.execute("CREATE TABLE quiet (n int)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    for _ in range(3):
        route.source.execute("INSERT INTO quiet SELECT generate_series(1, 20000)")
        lsn = lsn_of(route.source)
        # Where the slot may start is logged at a checkpoint, and taken over when a later position is confirmed.
        route.source.execute("CHECKPOINT")
        route.source.execute("INSERT INTO quiet VALUES (0)")
        for column in ("confirmed_flush_lsn", "restart_lsn"):
            route.source.wait_until(
                f"SELECT {column} - '0/0' >= {lsn} FROM pg_replication_slots WHERE slot_name = '{route.slot}'"
            )
    daemon.stop()
