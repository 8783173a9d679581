"""The publisher crashes: its slot forgets what it was told, and the daemon does not."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.databases import create_database
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash


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
            # Standing still, it cannot tell the slot its position before we have looked.
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
