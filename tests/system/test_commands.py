"""The commands around a daemon, each as a user runs it: run, wait, status, drop, and what wrong options say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.daemon import error_of
from tests.fixtures.plain import (
    check_equal,
    commit_each,
    foreign_transaction,
    plain_route,
    wait_until_gone,
    wait_until_unread,
)
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_NOT_REACHED = 1
_WRONG_CONFIGURATION = 2
_SOURCE_REFUSED = 3
_TARGET_REFUSED = 4
_PASSWORD = "secret-sesame"

_PROGRESS = """
SELECT state, lag_bytes, lag_s, lowest_remote_lsn = highest_remote_lsn, list_remote_lsn = '{}', commit_order, workers,
       in_doubt FROM parapply.progress WHERE slot_name = '{slot}'
"""


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Plain tables and a slot."""
    return plain_route(source_db, target_db, new_slot)


def _status(run_command: RunCommand, route: Route) -> dict[str, Any]:
    done = run_command(route, "status", "--json", code=0)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_run_until_ends_by_itself(route: Route, start_daemon: StartDaemon) -> None:
    """`run --until` exits 0 when all up to the LSN is on the target, durable and confirmed; on reached ones at once."""
    commit_each(route.source, 1, 200)
    lsn = route.end_of_source_lsn()
    for _ in range(2):
        daemon = start_daemon(route, "--until", lsn)
        assert daemon.exit_code() == 0, daemon.log_tail()
        assert daemon.events_of("daemon_stopped")[0]["reason"] == "everything up to --until is durable"
    check_equal(route)
    assert route.target.rows(f"SELECT lowest_remote_lsn >= '{lsn}' FROM parapply.progress") == [(True,)]
    slot = f"FROM pg_replication_slots WHERE slot_name = '{route.slot}'"
    assert route.source.rows(f"SELECT confirmed_flush_lsn >= '{lsn}' {slot}") == [(True,)]


def test_wait_reads_your_writes(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """`wait` returns 0 when the write is visible on the target, and 1 in one line when it is not there in time."""
    start_daemon(route).wait_for_event("source_connected")
    commit_each(route.source, 1, 100)
    done = run_command(route, "wait", "--lsn", route.end_of_source_lsn(), "--timeout", "30")
    assert (done.returncode, done.stderr) == (0, "")
    check_equal(route)
    with foreign_transaction(route.target, "LOCK TABLE item"):
        commit_each(route.source, 101, 101)
        done = run_command(route, "wait", "--lsn", route.end_of_source_lsn(), "--timeout", "0.2", code=_NOT_REACHED)
        assert done.stderr.count("\n") == 1
        assert "not there after 0.2 s" in done.stderr


def _fill_page(source: Database) -> str:
    """Write until the last record ends with its page; return the insert position, which lies after the next header."""
    query = "SELECT lsn::text, ((lsn - '0/0') % 8192)::int FROM pg_current_wal_insert_lsn() AS lsn"
    for _ in range(100):
        ((lsn, used),) = source.rows(query)
        if used in {24, 40}:
            return str(lsn)
        # The overhead of a message is found by trying, because its length is not always written alike.
        for overhead in range(48, 80, 8):
            length = (8192 - used - overhead) % 8192
            source.execute(f"SELECT pg_logical_emit_message(false, '', repeat('x', {length}))")
            ((lsn, used),) = source.rows(query)
            if used in {24, 40}:
                return str(lsn)
    raise AssertionError("no record ended with its page")


def test_wait_and_until_reach_the_end_of_a_full_page(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """The publisher's insert position is reached although it lies after a header that nothing was written behind."""
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    lsn = _fill_page(route.source)
    # Without another word of the publisher.
    done = run_command(route, "wait", "--lsn", lsn, "--timeout", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert route.target.rows(f"SELECT parapply.wait_for('{lsn}', 0)") == [(True,)]
    assert route.target.rows(f"SELECT lowest_remote_lsn < '{lsn}' FROM parapply.progress") == [(True,)]
    daemon.stop()
    assert start_daemon(route, "--until", lsn).exit_code() == 0


def test_status_tells_whether_a_daemon_runs(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """`status --json` while a daemon runs, while it is killed, and after an orderly end; each time exit 0.

    Of another cluster, or of one that was put back, the lag is not known.
    """
    run_command(route, "init", code=0)
    assert not _status(run_command, route)["is_daemon_connected"]
    daemon = start_daemon(route, settings={"apply.workers": "auto"})
    commit_each(route.source, 1, 100)
    daemon.wait_caught_up()
    route.target.wait_until("SELECT sum(transactions) >= 100 FROM parapply.workers")
    route.target.wait_until("SELECT count(*) = 2 FROM parapply.tables")
    running = _status(run_command, route)
    assert (running["is_daemon_connected"], running["state"], running["pid"]) == (True, "running", daemon.pid)
    assert (len(running["workers"]), running["worker_count"]) == (4, 16)
    assert {table["table_name"] for table in running["tables"]} == {"item", "evt"}
    assert running["source"]["slot_active_pid"]
    route.target.wait_until("SELECT lag_s IS NOT NULL FROM parapply.progress")
    daemon.kill()
    route.target.wait_until(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'parapply leader%'"
    )
    # How old this WAL is cannot be known, but it is not older than the daemon's last write.
    route.source.execute("CREATE TABLE more ()")
    killed = _status(run_command, route)
    assert killed["lag_bytes"] > 0
    assert killed["lag_s"] >= killed["silent_s"] > 0
    assert killed["source"]["slot_retained_wal_bytes"] > 0
    assert "bytes of WAL, at most " in run_command(route, "status").stdout
    assert (killed["is_daemon_connected"], killed["workers"]) == (False, [])
    assert route.target.rows("SELECT count(*) FROM parapply.workers") == [(4,)]
    assert start_daemon(route, "--until", route.end_of_source_lsn()).exit_code() == 0
    wait_until_gone(route)
    stopped = _status(run_command, route)
    assert (stopped["is_daemon_connected"], stopped["state"]) == (False, "stopped")
    assert stopped["reason"] == "everything up to --until is durable"
    assert stopped["source"]["slot_active_pid"] is None
    assert "stopped" in run_command(route, "status").stdout
    for words, column, value in (("LESS", "lowest_lsn", "FFFFFF/0"), ("ANOTHER", "system_identifier", "1")):
        route.target.execute(f"UPDATE parapply.slots SET {column} = '{value}'")
        shown = _status(run_command, route)
        assert (shown["lag_bytes"], shown["source"]["lag_bytes"]) == (None, None)
        assert words in run_command(route, "status").stdout
        assert words in run_command(route, "top", "--once").stdout


def test_drop_refuses_while_a_daemon_runs(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """`drop` takes nothing from a running daemon, also while its stream is down; afterwards it removes everything."""
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    done = run_command(route, "drop", "--yes")
    assert (done.returncode, done.stderr.count("\n")) == (_SOURCE_REFUSED, 1)
    assert "is in use by process" in done.stderr
    daemon.pause()
    route.source.execute("SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE active")
    done = run_command(route, "drop", "--yes")
    assert (done.returncode, done.stderr.count("\n")) == (_TARGET_REFUSED, 1)
    assert "another parapply holds the lease" in done.stderr
    daemon.send(signal.SIGCONT)
    daemon.wait_for_event("source_connected", count=2)
    daemon.stop()
    wait_until_unread(route)
    drop = [sys.executable, "-m", "parapply", "drop", *route.arguments()]
    refused = subprocess.run(drop, input="n\n", capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, refused.stderr) == (1, "parapply: nothing was dropped. Hint: answer y, or give --yes\n")
    run_command(route, "drop", "--yes", code=0)
    assert route.source.rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    assert route.target.rows("SELECT count(*) FROM pg_namespace WHERE nspname = 'parapply'") == [(0,)]
    done = run_command(route, "drop", "--yes")
    assert (done.returncode, "nothing to do" in done.stdout) == (0, True)


def test_sigusr1_logs_what_every_task_waits_for(route: Route, start_daemon: StartDaemon) -> None:
    """One line, with the leader's tasks and every worker by name, and the daemon goes on."""
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    daemon.send(signal.SIGUSR1)
    tasks = daemon.wait_for_event("tasks")["tasks"]
    assert {"intake", "worker-1"} <= tasks.keys()
    assert any("pool.py" in call and "next_job" in call for call in tasks["worker-1"])
    daemon.wait_caught_up()


def test_progress_shows_the_three_metrics(route: Route, start_daemon: StartDaemon) -> None:
    """`parapply.progress`: lowest, highest and the list between; all lag is 0 when the target has caught up."""
    query = _PROGRESS.replace("{slot}", route.slot)
    daemon = start_daemon(route, settings={"apply.workers": "auto"})
    commit_each(route.source, 1, 100)
    daemon.wait_caught_up()
    # In one look: an idle publisher, too, writes WAL now and then.
    at_rest = "(running,0,0,t,t,preserve,16,0)"
    route.target.wait_until(f"SELECT p::text = '{at_rest}' FROM ({query.strip()}) AS p")
    with foreign_transaction(route.target, "LOCK TABLE item"):
        commit_each(route.source, 101, 200)
        route.target.wait_until(f"SELECT lag_bytes > 0 AND lag_s > 1 FROM ({query.strip()}) AS p")
    daemon.wait_caught_up()
    route.target.wait_until(f"SELECT lag_bytes = 0 AND lag_s = 0 FROM ({query.strip()}) AS p")
    daemon.stop()
    assert route.target.rows(query)[0][0] == "stopped"


_NOWHERE: tuple[tuple[dict[str, str | int], str], ...] = (
    ({"dbname": "no_such_database"}, '"no_such_database" does not exist. Hint: correct dbname in the DSN'),
    ({"port": 1}, "Hint: start the server there, or correct host and port of the DSN"),
    ({"host": "nohost.invalid"}, "Hint: correct the host of the DSN"),
    ({"user": "nobody_of_that_name"}, '"nobody_of_that_name" does not exist'),
)


def test_a_wrong_dsn_is_one_line(route: Route, run_command: RunCommand) -> None:
    """A DSN that leads nowhere: exit 3 or 4, one line that says which end and why, no traceback and no password."""
    for end, code in (("source", _SOURCE_REFUSED), ("target", _TARGET_REFUSED)):
        database = route.source if end == "source" else route.target
        for part, words in _NOWHERE:
            dsns = {f"{end}_dsn": make_conninfo(database.dsn, password=_PASSWORD, **part)}
            wrong = Route(source=route.source, target=route.target, slot=route.slot, settings=route.settings, **dsns)
            # A server that does not answer yet is no refusal for the daemon: it goes on trying.
            commands = [("init",), ("drop", "--yes"), *([] if {"port", "host"} & part.keys() else [("run",)])]
            # Both read the target only; status says of the source that it is not reachable.
            commands += [] if end == "source" else [("status",), ("wait", "--lsn", "0/1")]
            for command in commands:
                done = run_command(wrong, *command)
                case = f"{command} with {part} of the {end}: {done.stderr}"
                assert done.returncode == code, case
                told = error_of(done.stderr.splitlines())
                assert told.startswith(end), case
                assert words in told, case
                assert _PASSWORD not in done.stderr + done.stdout, case
                assert "Traceback" not in done.stderr + done.stdout, case


def test_an_unreachable_source_is_tried_again(route: Route, start_daemon: StartDaemon) -> None:
    """A publisher that does not answer yet: the daemon says so with a growing wait, and ends with 0 at a signal."""
    away = Route(
        source=route.source,
        target=route.target,
        slot=route.slot,
        settings=route.settings,
        source_dsn=make_conninfo(route.source.dsn, port=1, password=_PASSWORD),
    )
    daemon = start_daemon(away)
    waits = [daemon.wait_for_event("source_lost", count=count)["wait_s"] for count in (1, 2, 3)]
    assert waits == sorted(set(waits))
    daemon.stop()
    assert _PASSWORD not in "\n".join(daemon.lines)


def test_wrong_options_are_all_told(run_command: RunCommand, route: Route) -> None:
    """Exit 2 with one line for each wrong option, before any connection is made."""
    done = run_command(route, "run", "--set", "apply.workers=0", "--set", "apply.worker=1", "--set", "log.level=loud")
    assert done.returncode == _WRONG_CONFIGURATION
    lines = sorted(done.stderr.splitlines())
    for line, key in zip(lines, ("apply.worker:", "apply.workers:", "log.level:"), strict=True):
        assert line.startswith(f"parapply: {key}")
