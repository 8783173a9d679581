"""A daemon that lives on: lost sessions, restarted servers, and an orderly end whatever it is doing."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socketserver
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.databases import create_database
from tests.fixtures.plain import (
    FAST,
    WORKER_IS_BLOCKED,
    check_equal,
    commit_each,
    end_new_sessions,
    foreign_transaction,
    plain_route,
)
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

_DRAIN_LIMIT_S = 10.0
# No drain, no back-off and no connection timeout fits in here.
_AT_ONCE_S = 3.0


@pytest.fixture
def bank(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """A bank on both sides, with many small target transactions."""
    return _bank(source_db, target_db, new_slot)


def _bank(source: Database, target: Database, make_slot: Callable[[Route], None]) -> Route:
    create_bank(source, target)
    route = Route(source=source, target=target, settings={**FAST, "apply.max_batch_transactions": 5})
    make_slot(route)
    return route


def _state(route: Route) -> tuple[str, str]:
    ((state, reason),) = route.target.rows(
        f"SELECT state, reason FROM parapply.progress WHERE slot_name = '{route.slot}'"
    )
    return state, reason


#: Each kind of session: its end, and its application_name.
_SESSIONS = {
    "walsender": ("source", "{slot}"), "plain source session": ("source", "parapply {slot}"),
    "control session": ("target", "parapply leader {slot}"), "one worker": ("target", "parapply worker 2 {slot}"),
    "all workers": ("target", "parapply worker % {slot}"), "control pool": ("target", "parapply control pool {slot}"),
}  # fmt: skip


def test_f3_a_session_that_is_ended_under_load(bank: Route, start_daemon: StartDaemon) -> None:
    """F3, F15: each kind of session is ended under load, one after the other; the daemon comes back by itself, exactly.

    The readers' snapshots are checked after each, so that a failure names the kind.
    """
    ended: set[int] = set()
    n_lost = {"source": 0, "target": 0}
    with BankReader(bank.target) as reader, BankLoad(bank.source, seed=31) as load:
        daemon = start_daemon(bank)
        for kind, (end, session) in _SESSIONS.items():
            try:
                daemon.wait_for_event("source_connected", count=1 + sum(n_lost.values()))
                daemon.wait_caught_up()
                load.wait_for_more(20)
                end_new_sessions(bank.source if end == "source" else bank.target, session.format(slot=bank.slot), ended)
                # The control pool opens its session again when it needs one.
                if kind != "control pool":
                    n_lost[end] += 1
                    daemon.wait_for_event(f"{end}_lost", count=n_lost[end])
                reader.check()
            except AssertionError as error:
                error.add_note(f"the session ended last: {kind}")
                raise
        load.stop()
        daemon.wait_caught_up()
        reader.wait_for_snapshot()
        daemon.stop()
    check_bank(bank.source, bank.target, load)


def test_f3_a_worker_session_that_ends_while_there_is_no_work(bank: Route, start_daemon: StartDaemon) -> None:
    """F3: a worker whose session has ended is not left to fail with the next load: the daemon reconnects at once."""
    daemon = start_daemon(bank)
    daemon.wait_caught_up()
    end_new_sessions(bank.target, f"parapply worker 2 {bank.slot}", set())
    daemon.wait_for_event("target_lost")
    daemon.wait_for_event("source_connected", count=2)


def test_f16_a_target_that_goes_without_a_word_is_noticed(bank: Route, start_daemon: StartDaemon) -> None:
    """F16: the kernel asks after every idle connection to the target within 30 s, not within its own two hours."""
    ((port,),) = bank.target.rows("SELECT inet_server_port()")
    daemon = start_daemon(bank)
    daemon.wait_caught_up()
    timers = _tcp_timers(daemon.pid, port)
    # The sessions: control, control pool, the listener for requests, and the workers.
    assert len(timers) >= 5
    assert all(left_s <= 30 for left_s in timers), timers


def _tcp_timers(pid: int, port: int) -> list[float]:
    """Return, for each connection of a process to a port, the seconds until the kernel does something by itself.

    Infinite where it has no timer. Source: proc(5), /proc/pid/fd and /proc/net/tcp.
    """
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # It may have been closed since.
        with contextlib.suppress(FileNotFoundError):
            inodes.add(link.readlink().name)
    timers = []
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, _, remote, _, _, timer, _, _, _, inode, *_ = line.split()
        if f"socket:[{inode}]" in inodes and int(remote.rpartition(":")[2], 16) == port:
            kind, _, ticks = timer.partition(":")
            timers.append(math.inf if kind == "00" else int(ticks, 16) / os.sysconf("SC_CLK_TCK"))
    return timers


@contextlib.contextmanager
def _no_server_yet(answers: Sequence[bytes]) -> Iterator[int]:
    """Give the port of what answers each connection with the next of some texts, and closes it; the last one stays."""
    left = list(answers)

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)
            self.request.sendall(left.pop(0) if len(left) > 1 else left[0])

    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        serving = threading.Thread(target=server.serve_forever, name="no server yet", daemon=True)
        serving.start()
        yield int(server.server_address[1])
        server.shutdown()
        serving.join()


def test_a_target_that_starts_up_is_no_failure(
    source_db: Database, target_db: Database, start_daemon: StartDaemon
) -> None:
    """A server that says that it starts up is asked again after a second at most, and the next pause is no longer.

    One that closes the connection makes each pause twice the last one.
    """
    # ErrorResponse. (PostgreSQL manual, "Message Formats".)
    fields = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"
    starts_up, closes = b"E" + (len(fields) + 4).to_bytes(4, "big") + fields, b""
    with _no_server_yet([starts_up, closes, starts_up, closes]) as port:
        dsn = f"host=127.0.0.1 port={port} dbname=app user=app sslmode=disable gssencmode=disable"
        route = Route(source=source_db, target=target_db, target_dsn=dsn)
        daemon = start_daemon(route, settings={"source.reconnect_min_s": 0.6, "source.reconnect_max_s": 30})
        daemon.wait_for_event("target_lost", count=4)
        daemon.stop()
    assert [event["wait_s"] for event in daemon.events_of("target_lost")][:4] == [0.6, 0.6, 1.0, 1.2]


@pytest.mark.slow
def test_f5_f8_both_servers_are_restarted_under_load(
    own_servers: OwnServers, init_route: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F5, F8: fast and immediate restarts of either end and of both at once; the same daemon goes on, exactly."""
    source, target = own_servers("publisher"), own_servers("subscriber")
    route = _bank(create_database(source, "source"), create_database(target, "target"), init_route)
    with BankReader(route.target) as reader, BankLoad(route.source, seed=32) as load:
        daemon = start_daemon(route)
        for servers, mode in (([target], "fast"), ([source], "fast"), ([source, target], "immediate")):
            daemon.wait_caught_up()
            load.wait_for_more(20)
            for server in servers:
                server.stop("immediate" if mode == "immediate" else "fast")
            daemon.wait_for_event("source_lost" if source in servers else "target_lost")
            for server in servers:
                server.start()
            load.wait_for_more(20)
        load.stop()
        daemon.wait_caught_up()
        reader.wait_for_snapshot()
        daemon.stop()
    check_bank(route.source, route.target, load)


def test_f38_a_signal_drains_under_load(bank: Route, start_daemon: StartDaemon) -> None:
    """F38: SIGTERM and Ctrl-C under load end the daemon with 0 within 10 s, and the state says why and that it stopped.

    Nothing it drained is applied again by the next one.
    """
    with BankReader(bank.target) as reader, BankLoad(bank.source, seed=38, pace_s=0.01) as load:
        for number in (signal.SIGTERM, signal.SIGINT):
            daemon = start_daemon(bank)
            daemon.wait_for_event("source_connected")
            load.wait_for_more(60)
            daemon.send(number)
            assert daemon.exit_code(_DRAIN_LIMIT_S) == 0, daemon.log_tail()
            assert _state(bank) == ("stopped", "stopped by a signal")
        load.stop()
        daemon = start_daemon(bank)
        daemon.wait_caught_up()
        reader.wait_for_snapshot()
        daemon.stop()
    check_bank(bank.source, bank.target, load)


def test_f38_a_second_signal_aborts_a_blocked_drain(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F38: a drain that waits for a foreign lock is given up at once by a second signal; nothing is lost or done twice.

    The COMMIT of a small batch is on its way with its statements: it may still take effect when the lock goes.
    """
    route = plain_route(source_db, target_db, new_slot)
    source_db.execute("INSERT INTO item VALUES (1, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with foreign_transaction(target_db, "SELECT FROM item FOR UPDATE"):
        source_db.execute("UPDATE item SET v = 1; INSERT INTO evt VALUES (1)")
        commit_each(source_db, 2, 50)
        target_db.wait_until(WORKER_IS_BLOCKED)
        daemon.send(signal.SIGTERM)
        daemon.wait_for_event("drain_started")
        assert daemon.runs_for(0.2), "it did not wait for the worker"
        daemon.send(signal.SIGTERM)
        assert daemon.exit_code(_AT_ONCE_S) == 0, daemon.log_tail()
        assert daemon.wait_for_event("drain_aborted")["reason"] == "a second signal"
        assert _state(route)[0] == "stopped"
    daemon = start_daemon(route, settings={"target.lease_wait_s": 20})
    daemon.finish()
    check_equal(route)


def test_f38_an_idle_session_that_ends_during_the_drain_costs_no_last_word(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F38: only a session that has something in hand can lose something; with all committed the state says so."""
    route = plain_route(source_db, target_db, new_slot)
    source_db.execute("INSERT INTO item VALUES (1, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with foreign_transaction(target_db, "SELECT FROM item FOR UPDATE"):
        source_db.execute("UPDATE item SET v = 1")
        target_db.wait_until(WORKER_IS_BLOCKED)
        daemon.send(signal.SIGTERM)
        daemon.wait_for_event("drain_started")
        ended = target_db.rows(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'parapply worker%' AND state = 'idle'"
        )
        assert ended, "no worker was idle"
    assert daemon.exit_code() == 0, daemon.log_tail()
    assert _state(route) == ("stopped", "stopped by a signal")
    check_equal(route)


@pytest.mark.in_turn("end")
@pytest.mark.parametrize("end", ["source", "target"])
def test_f38_a_signal_while_connecting(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon, end: str
) -> None:
    """F38: a daemon that waits for a silent network to answer ends at once, with 0."""
    route = plain_route(source_db, target_db, new_slot)
    database = source_db if end == "source" else target_db
    with CutProxy("127.0.0.1", int(database.rows("SELECT inet_server_port()")[0][0])) as proxy:
        proxy.freeze()
        dsns = {f"{end}_dsn": proxy.dsn(database.dsn)}
        daemon = start_daemon(
            Route(source=source_db, target=target_db, slot=route.slot, settings=route.settings, **dsns)
        )
        daemon.wait_for_event("daemon_started")
        assert daemon.runs_for(1.0), daemon.log_tail()
        daemon.send(signal.SIGTERM)
        assert daemon.exit_code(_AT_ONCE_S) == 0, daemon.log_tail()


@pytest.mark.in_turn("end")
@pytest.mark.parametrize("end", ["source", "target"])
def test_f38_a_signal_while_backing_off(
    *,
    own_servers: OwnServers,
    source_db: Database,
    target_db: Database,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
    end: str,
) -> None:
    """F38: a daemon that waits for its next attempt to reach a stopped server ends at once, with 0."""
    server = own_servers(end)
    ends = {"source": source_db, "target": target_db, end: create_database(server, end)}
    route = plain_route(
        ends["source"], ends["target"], init_route, source__reconnect_max_s=60, source__reconnect_min_s=60
    )
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    server.stop()
    assert daemon.wait_for_event(f"{end}_lost")["wait_s"] > _DRAIN_LIMIT_S
    started_s = time.monotonic()
    daemon.send(signal.SIGTERM)
    assert daemon.exit_code(_AT_ONCE_S) == 0, daemon.log_tail()
    assert time.monotonic() - started_s < _AT_ONCE_S
