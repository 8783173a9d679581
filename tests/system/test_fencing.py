"""One daemon for each slot: a second one waits or takes over, the first one commits nothing afterwards (T-15)."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.plain import FAST, WORKER_IS_BLOCKED, end_sessions, foreign_transaction, walsender_pid
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.databases import Database

pytestmark = [pytest.mark.crash, pytest.mark.each_session]

_TARGET_REFUSED = 4
# Transactions are what costs here, and what is shown happens between two of them.
_PACE_S = 0.1


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """A bank on both sides, with many small target transactions."""
    create_bank(source_db, target_db)
    made = Route(source=source_db, target=target_db, settings={**FAST, "apply.max_batch_transactions": 3})
    new_slot(made)
    return made


def _leader_pid(route: Route) -> int:
    query = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'parapply leader%'"
    )
    ((pid,),) = route.target.rows(query)
    return int(pid)


def _finish(route: Route, daemon: Daemon, load: BankLoad, reader: BankReader) -> None:
    load.wait_for_more(20)
    load.stop()
    daemon.wait_caught_up()
    reader.wait_for_snapshot()
    daemon.stop()
    check_bank(route.source, route.target, load)


def test_t15_f18_a_second_daemon_waits_or_takes_over(route: Route, start_daemon: StartDaemon) -> None:
    """T-15, F18: one daemon after another asks for the lease of the one that applies the load, which stays exact.

    The second waits lease_wait_s, exits 4 with one line that names the holder; the first goes on. The third takes over:
    --takeover ends the sessions of the first, which finds the lease taken and exits 4. The fourth waits, takes the
    lease as soon as the third has drained, and goes on.
    """
    with BankReader(route.target) as reader, BankLoad(route.source, seed=21, pace_s=_PACE_S) as load:
        first = start_daemon(route)
        first.wait_caught_up()
        # While there is only one.
        leader_pid = _leader_pid(route)
        second = start_daemon(route)
        holder = second.wait_for_event("lease_waiting")["holder"]
        assert second.exit_code() == _TARGET_REFUSED
        assert f"pid {leader_pid} (parapply leader {route.slot}" in holder[0]
        assert second.failure.startswith("another parapply holds the lease")
        assert holder[0] in second.failure
        assert "Traceback" not in "\n".join(second.lines)
        assert not first.events_of("target_lost")
        third = start_daemon(route, "--takeover")
        third.wait_for_event("source_connected")
        assert first.exit_code() == _TARGET_REFUSED, first.log_tail()
        assert "another parapply holds the lease" in first.failure
        third.wait_caught_up()
        fourth = start_daemon(route, settings={"target.lease_wait_s": 30})
        fourth.wait_for_event("lease_waiting")
        third.stop()
        fourth.wait_for_event("source_connected")
        _finish(route, fourth, load, reader)


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ["takeover", "sessions ended"])
def test_f20_a_paused_daemon_commits_nothing_later(route: Route, start_daemon: StartDaemon, way: str) -> None:
    """F20, T-15: the first daemon stands still with work in hand, a second one takes over, the first wakes up.

    It commits nothing of what it held, and exits 4; rows without a key show it if it did.
    """
    with BankReader(route.target) as reader, BankLoad(route.source, seed=24, pace_s=_PACE_S) as load:
        first = start_daemon(route)
        first.wait_caught_up()
        with foreign_transaction(route.target, "SELECT FROM acct FOR UPDATE"):
            # Its workers are in the middle of transactions, and its queue is full.
            route.target.wait_until(WORKER_IS_BLOCKED)
            load.wait_for_more(50)
            first.pause()
        if way == "takeover":
            second = start_daemon(route, "--takeover", settings={"source.reconnect_max_s": 0.3})
        else:
            second = start_daemon(route, settings={"target.lease_wait_s": 20})
            second.wait_for_event("lease_waiting")
            assert end_sessions(route.target, "parapply%" + route.slot) >= 2
        # The walsender of the paused one still exists: the slot is busy until its session is ended.
        second.wait_for_event("lease_taken")
        pid = walsender_pid(route)
        if pid is not None:
            route.source.execute(f"SELECT pg_terminate_backend({pid})")
        second.wait_for_event("source_connected")
        load.wait_for_more(20)
        first.send(signal.SIGCONT)
        assert first.exit_code() == _TARGET_REFUSED, first.log_tail()
        assert "another parapply holds the lease" in first.failure
        _finish(route, second, load, reader)
