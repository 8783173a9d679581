"""SIGHUP: the configuration is read again under load; what can change does, and what is wrong changes nothing (F38)."""

from __future__ import annotations

import os
import pty
import secrets
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.daemon import _environment
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.plain import FAST, TABLES, check_equal, commit_each, end_sessions, plain_route, slot_route
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase

#: Refused only when both ends are opened.
_REFUSED = {
    '[apply]\nspill_dir = "/dev/null/x"\n': "apply.spill_dir",
    '[ddl]\napply = true\nrole = "no such role"\n': "no such role",
}
_WORKERS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name LIKE 'parapply worker%'"
)


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Two plain tables on both sides, published, with a slot."""
    return plain_route(source_db, target_db, new_slot)


@pytest.fixture
def role(target_db: Database) -> Iterator[str]:
    """Another role that may do everything on the target."""
    name = f"other_{secrets.token_hex(4)}"
    target_db.execute(f"CREATE ROLE {name} LOGIN SUPERUSER")
    yield name
    target_db.execute(f"REASSIGN OWNED BY {name} TO CURRENT_USER; DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration file that says nothing yet."""
    path = tmp_path / "app.toml"
    path.touch()
    return path


def _started(start_daemon: StartDaemon, route: Route, path: Path, **settings: float) -> Daemon:
    """Return a daemon with a configuration file when it reads the stream."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    daemon = start_daemon(route, "--config", str(path), settings=named)
    daemon.wait_for_event("source_connected")
    return daemon


def _hang_up(daemon: Daemon, event: str = "config_reloaded") -> dict[str, object]:
    """Send SIGHUP and return what the daemon says of it."""
    count = len(daemon.events_of(event)) + 1
    daemon.send(signal.SIGHUP)
    return daemon.wait_for_event(event, count=count)


def test_another_epoch_takes_what_has_changed(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon,
    path: Path,
) -> None:  # fmt: skip
    """Workers, order and batches change repeatedly under load, in one process; each transaction is applied once."""
    create_bank(source_db, target_db)
    route = slot_route(source_db, target_db, new_slot)
    daemon = _started(start_daemon, route, path)
    with BankLoad(source_db, seed=38, pace_s=0.1) as load:
        for n in range(1, 4):
            load.wait_for_more(15, 60)
            order = "relaxed" if n % 2 else "preserve"
            path.write_text(f'[apply]\nworkers = {2 + n}\ncommit_order = "{order}"\nmax_batch_transactions = {n}\n')
            told = _hang_up(daemon)
            assert told["settings"] == ["apply.commit_order", "apply.max_batch_transactions", "apply.workers"]
            daemon.wait_for_event("source_connected", count=1 + n)
            shown = target_db.rows("SELECT commit_order, workers FROM parapply.progress")
            assert shown == [(order, 2 + n)]
    daemon.wait_caught_up()
    check_bank(source_db, target_db, load)
    # A server process ends a little after its client.
    target_db.wait_until(f"SELECT ({_WORKERS}) = 5")
    assert not daemon.events_of("source_lost") + daemon.events_of("target_lost")
    daemon.stop()


def test_what_changes_nothing_the_log_and_a_stop(route: Route, start_daemon: StartDaemon, path: Path) -> None:
    """One process is asked again and again to read its file.

    A file with a mistake is refused with every error, without a value; the daemon goes on as it was. Values that fail
    when both ends are opened are tried again until the next SIGHUP. A level of the log needs no other epoch; what
    belongs to the process is named and stays; nothing new is said as such. SIGTERM right behind SIGHUP ends the daemon
    in order, and no other epoch begins.
    """
    daemon = _started(start_daemon, route, path, source__reconnect_min_s=600, source__reconnect_max_s=600)
    path.write_text('[apply]\nworkers = 0\nlinger = "geheim"\n')
    told = str(_hang_up(daemon, "config_refused")["error"])
    assert "apply.workers" in told
    assert "apply.linger" in told
    path.write_text('[target]\nstate_schema = "other"\n[apply]\nworkers = 3\n')
    assert "target.state_schema" in str(_hang_up(daemon, "config_refused")["error"])
    path.unlink()
    assert "cannot read" in str(_hang_up(daemon, "config_refused")["error"])
    os.mkfifo(path)
    assert "no regular file" in str(_hang_up(daemon, "config_refused")["error"])
    commit_each(route.source, 1, 20)
    daemon.wait_caught_up()
    check_equal(route)
    path.unlink()
    path.touch()
    assert _hang_up(daemon)["settings"] == []
    path.write_text('[log]\nlevel = "debug"\n[metrics]\nlisten = "127.0.0.1:0"\n[applylog]\nrotate_s = 77\n')
    assert _hang_up(daemon)["settings"] == ["log.level"]
    (fixed,) = daemon.events_of("config_needs_restart")
    assert fixed["settings"] == ["applylog.rotate_s", "metrics.listen"]
    assert not daemon.events_of("batch_committed")
    commit_each(route.source, 21, 40)
    daemon.wait_for_event("batch_committed")
    daemon.wait_caught_up()
    assert len(daemon.events_of("source_connected")) == 1
    assert not daemon.events_of("metrics_listening")
    for n, (text, what) in enumerate(_REFUSED.items(), len(daemon.events_of("config_refused")) + 1):
        path.write_text(text)
        _hang_up(daemon)
        assert what in str(daemon.wait_for_event("config_refused", count=n)["error"])
    path.write_text("")
    _hang_up(daemon)
    daemon.wait_for_event("source_connected", count=2)
    commit_each(route.source, 41, 240)
    path.write_text("[apply]\nworkers = 2\n")
    daemon.send(signal.SIGHUP)
    daemon.stop()
    assert daemon.events_of("daemon_stopped")[0]["reason"].startswith("stopped by a signal")
    assert not [line for line in daemon.lines if "geheim" in line]


def test_a_reload_does_not_hold_up_an_end(route: Route, start_daemon: StartDaemon, path: Path) -> None:
    """One that changes nothing, or the log only, is no reason to try again; nor is any where only a command helps."""
    daemon = _started(start_daemon, route, path)
    _hang_up(daemon)
    path.write_text('[log]\nlevel = "debug"\n')
    _hang_up(daemon)
    route.target.execute("ALTER TABLE parapply.applied SET UNLOGGED")
    end_sessions(route.target, "parapply%")
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert "applied is UNLOGGED" in daemon.failure
    route.target.execute("ALTER TABLE parapply.applied SET LOGGED")
    cut_over = (
        "INSERT INTO parapply.cutovers (slot_id, step, reverse_slot, made_slot, made_publication, fence, opens)"
        " SELECT slot_id, 'done', 'back', false, false, 'database', '' FROM parapply.slots"
    )
    for query, what in [(cut_over, "was cut over"), ("UPDATE parapply.schema_version SET version = 9999", "9999")]:
        path.write_text("")
        daemon = _started(start_daemon, route, path)
        route.target.execute(query)
        path.write_text("[apply]\nworkers = 3\n")
        daemon.send(signal.SIGHUP)
        assert daemon.exit_code() == 4, daemon.log_tail()
        assert what in daemon.failure
        route.target.execute("DELETE FROM parapply.cutovers")


class _TargetInFile(Route):
    """A route whose target the command line does not name."""

    def arguments(self, *settings: Any, **defaults: Any) -> list[str]:  # noqa: ANN401  as the route's
        """Return the options that every command takes but `--target`."""
        words = super().arguments(*settings, **defaults)
        at = words.index("--target")
        return words[:at] + words[at + 2 :]


def test_another_secret_is_taken_without_waiting(
    route: Route, role: str, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """A connection string in a file is read again, also while the daemon waits between two attempts to connect."""
    path = tmp_path / "dsn"
    path.write_text(route.target.target_role_dsn)
    settings = {"source.reconnect_min_s": 600, "source.reconnect_max_s": 600}
    given = _TargetInFile(source=route.source, target=route.target, slot=route.slot, settings=FAST)
    daemon = start_daemon(given, settings=settings, environ={"PARAPPLY_TARGET__DSN_FILE": str(path)})
    daemon.wait_for_event("source_connected")
    route.target.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'parapply%'"
    )
    daemon.wait_for_event("target_lost")
    commit_each(route.source, 1, 20)
    path.write_text(route.target.dsn_with(user=role))
    assert _hang_up(daemon)["settings"] == ["target.dsn"]
    daemon.wait_caught_up()
    check_equal(route)
    query = "SELECT DISTINCT usename FROM pg_stat_activity WHERE application_name LIKE 'parapply worker%'"
    assert route.target.rows(f"{query} AND datname = current_database()") == [(role,)]
    daemon.stop()


def test_a_target_that_no_longer_knows_the_slot_is_not_adopted(
    route: Route, new_database: NewDatabase, start_daemon: StartDaemon, run_command: RunCommand, tmp_path: Path
) -> None:
    """After its first epoch a daemon adopts nothing: what it had confirmed is missing where the state is.

    Neither another target nor a dropped state ends it, because the process that a supervisor would start in its place
    does not know that there was a state. It is live, not ready, and goes on with the state. Such a process, on a target
    without one, is refused with exit 4. Nothing is confirmed to the publisher, and the wrong target is left as it was.
    Neither makes a schema, which could be in the way of the one brought back: their role may not.
    """
    path = tmp_path / "dsn"
    path.write_text(route.target.target_role_dsn)
    other = new_database(route.target.server)
    other.execute(TABLES)
    given = _TargetInFile(source=route.source, target=route.target, slot=route.slot, settings={**FAST, **LISTEN})
    daemon = start_daemon(given, environ={"PARAPPLY_TARGET__DSN_FILE": str(path)})
    endpoint = Endpoint(daemon)
    daemon.wait_for_event("source_connected")
    commit_each(route.source, 1, 20)
    daemon.wait_caught_up()
    path.write_text(other.target_role_dsn)
    daemon.send(signal.SIGHUP)
    told = daemon.wait_for_event("config_refused")
    assert f"the target no longer knows slot '{route.slot}'" in str(told["error"])
    path.write_text(route.target.target_role_dsn)
    daemon.send(signal.SIGHUP)
    daemon.wait_for_event("source_connected", count=2)
    run_command(replace(route, target=other), "run", code=4)
    assert other.rows("SELECT to_regnamespace('parapply')::text") == [(None,)]

    daemon.pause()
    ((kept_lsn,),) = route.source.rows("SELECT pg_current_wal_lsn()::text")
    commit_each(route.source, 21, 40)
    rights = f"ON DATABASE {route.target.dbname} FROM {route.target.target_role}"
    route.target.execute(f"ALTER SCHEMA parapply RENAME TO dropped; REVOKE CREATE {rights}")
    end_sessions(route.target, "parapply%")
    daemon.send(signal.SIGCONT)
    told = daemon.wait_for_event("target_refused", count=2)
    assert "it is another one, or an older one" in str(told["error"])
    assert (endpoint.get("/healthz/live")[0], endpoint.get("/healthz/ready")[0]) == (200, 503)
    slot = f"FROM pg_replication_slots WHERE slot_name = '{route.slot}'"
    assert route.source.rows(f"SELECT confirmed_flush_lsn <= '{kept_lsn}' {slot}") == [(True,)]
    assert len(daemon.events_of("slot_adopted")) == 1
    started = run_command(route, "run", code=4)
    # Docker Compose runs it at each start.
    assert f"slot_read: slot '{route.slot}' was read before" in run_command(route, "init", code=4).stderr
    assert f"the target does not know slot '{route.slot}', which was read before" in started.stderr
    route.target.execute("ALTER SCHEMA dropped RENAME TO parapply")
    daemon.wait_caught_up()
    check_equal(route)
    daemon.stop()


def test_a_terminal_that_closes_ends_the_daemon_in_order(route: Route, start_daemon: StartDaemon) -> None:
    """Its SIGHUP is no wish for another configuration, and that nothing can be logged any more is no reason to fail."""
    ours, terminal = pty.openpty()
    # Python's own buffer is present for users.
    environ = {name: value for name, value in _environment(None).items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "parapply", "run", *route.arguments()], stdin=terminal, stdout=terminal, stderr=terminal,
        env=environ, start_new_session=True,
    )  # fmt: skip
    try:
        os.close(terminal)
        seen = b""
        while b"source_connected" not in seen:
            seen += os.read(ours, 65536)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert route.target.rows("SELECT state, reason FROM parapply.progress") == [("stopped", "stopped by a signal")]
    start_daemon(route).wait_for_event("source_connected")
