"""The publisher crashes: its slot forgets what it was told, and the daemon does not."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from parapply.model import parse_lsn
from tests.fixtures.databases import create_database
from tests.fixtures.fan import make_slot
from tests.fixtures.pair import Pair
from tests.fixtures.route import Route
from tests.fixtures.two_phase import TABLES, TWO_PHASE, decide, stream_early, write_prepared
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

#: More than the publisher keeps in memory, of which nothing is published, or nothing is left.
_WITHOUT_CHANGES = {
    2: "INSERT INTO other SELECT repeat('x', 900) FROM generate_series(1, 200)",
    4: "BEGIN; SAVEPOINT s; INSERT INTO evt SELECT g, repeat('x', 900) FROM generate_series(1, 200) AS g;"
    " ROLLBACK TO s; COMMIT",
}


@pytest.mark.slow
def test_a_forgetful_slot_sends_nothing_twice(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """After each of two crashes the daemon comes back by itself and starts at its own watermark (T-4, F10).

    Nothing is applied twice although the slot went back behind what was confirmed, and nothing is lost.
    """
    server = own_servers("publisher")
    route = Route(source=create_database(server, "source"), target=target_db, settings={"apply.workers": 4})
    create_bank(route.source, route.target)
    new_slot(route)
    forgotten = 0
    with BankReader(target_db) as reader, BankLoad(route.source, seed=4) as load:
        daemon = start_daemon(route)
        for crash in (server.crash, server.kill):
            daemon.wait_caught_up()
            load.wait_for_more(50)
            # Otherwise there may be nothing to forget.
            slot = f"FROM pg_replication_slots WHERE slot_name = '{route.slot}'"
            route.source.wait_until(f"SELECT confirmed_flush_lsn >= '{route.end_of_source_lsn()}' {slot}")
            confirmed_lsn, losses = route.confirmed_flush_lsn(), len(daemon.events_of("source_lost"))
            crash()
            daemon.wait_for_event("source_lost", count=losses + 1)
            # Paused, it cannot report its position to the slot before we have looked.
            daemon.pause()
            server.start()
            forgotten += route.confirmed_flush_lsn() < confirmed_lsn
            daemon.send(signal.SIGCONT)
            load.wait_for_more(50)
        daemon.wait_caught_up()
        load.stop()
        daemon.wait_caught_up()
        reader.wait_for_snapshot()
        daemon.stop()
        check_bank(route.source, target_db, load)
    assert forgotten, "the slot forgot nothing: this proves nothing"


@pytest.mark.in_turn("is_two_phase")
@pytest.mark.parametrize("is_two_phase", [False, True], ids=["plain", "two_phase"])
def test_a_publisher_put_back_that_has_written_past_the_watermark(
    own_servers: OwnServers, target_db: Database, start_daemon: StartDaemon, *, is_two_phase: bool
) -> None:
    """An applied transaction is looked for where the slot is behind: present after a crash, also after keep-alives.

    So it is behind a streamed transaction without a change, whose end the publisher sends only in a stream.
    After the publisher's files were put back it is not, and its new transactions would be left out: exit 3.
    """
    server = own_servers("publisher")
    pair = Pair(create_database(server, "source"), target_db, start_daemon)
    pair.source.execute(f"{TABLES} CREATE TABLE other (t text); CREATE PUBLICATION pub FOR TABLE t, evt")
    pair.target.execute(TABLES)
    stream_early(pair.source)
    make_slot(pair.route, is_two_phase=is_two_phase)
    settings = TWO_PHASE if is_two_phase else {"apply.commit_order": "relaxed"}
    pair.write("INSERT INTO t VALUES (1, 'a')")
    pair.drain(settings=settings)
    kept = server.data_dir.with_name("kept")
    server.stop()
    subprocess.run(["cp", "-a", str(server.data_dir), str(kept)], check=True)
    server.start()
    told_lsn = 0
    for n in (2, 4):
        pair.write(f"INSERT INTO t VALUES ({n}, 'b')")
        if is_two_phase:
            write_prepared(pair.source, "g", f"INSERT INTO t VALUES ({n + 1}, 'c')")
        if is_two_phase and n == 4:
            decide(pair.source, "g", "COMMIT")
        pair.drain(settings=settings)
        # The slot passes what is not published. It is streamed, and so its end is sent.
        pair.write(_WITHOUT_CHANGES[n])
        pair.drain(settings=settings)
        told_lsn = pair.route.confirmed_flush_lsn()
        server.crash()
        server.start()
        assert pair.route.confirmed_flush_lsn() < told_lsn, "the slot forgot nothing: this proves nothing"
        daemon = pair.drain(settings=settings)
        assert not daemon.events_of("history_unproved")
        if is_two_phase and n == 2:
            decide(pair.source, "g", "COMMIT")
            pair.drain(settings=settings)
        assert pair.target.rows("SELECT * FROM t ORDER BY id") == pair.source.rows("SELECT * FROM t ORDER BY id")
    server.stop()
    subprocess.run(["rm", "-rf", str(server.data_dir)], check=True)
    kept.rename(server.data_dir)
    server.start()
    while parse_lsn(pair.route.end_of_source_lsn()) <= told_lsn + 16_384:
        pair.write("INSERT INTO t SELECT max(id) + 1, 'new' FROM t")
        pair.source.execute("INSERT INTO other SELECT repeat('x', 900) FROM generate_series(1, 20)")
    refused = pair.start_only(settings=settings)
    pair.check_stopped(refused, code=3, says="it was put back to an older state, and has written since. Hint: bring")
