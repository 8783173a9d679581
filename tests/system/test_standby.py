"""The daemon as the publisher's synchronous standby: rows that a commit waits for are present when it returns (F40)."""

from __future__ import annotations

import json
import secrets
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.fixtures.databases import create_database
from tests.fixtures.plain import commit_each, drop_slot, foreign_transaction, plain_route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route
    from tests.fixtures.servers import ServerPool

pytestmark = pytest.mark.crash

#: No timer of the daemon is due within a test: what is reported is reported because a commit waits.
_NO_TIMERS = {
    "apply.advance_interval_s": 3600, "source.status_interval_s": 3600, "source.receive_timeout_s": 36000,
}  # fmt: skip
#: Commits are acknowledged at once, and on disk ten seconds later unless another session flushes (F6).
_LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
_BLOCKED = (
    "SELECT count(*) = {} FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock'"
)


@pytest.fixture(scope="module")
def publisher(server_pool: ServerPool, pg_major: int) -> Iterator[PgServer]:
    """A publisher whose commits may wait, and which never asks its readers whether they live."""
    server = server_pool.new("publisher", pg_major, {"wal_sender_timeout": 0})
    yield server
    server.cleanup()


@pytest.fixture(scope="module")
def lazy_target(server_pool: ServerPool, pg_major: int) -> Iterator[PgServer]:
    """A target that loses commits that no session flushes."""
    server = server_pool.new("lazy", pg_major, _LAZY)
    yield server
    server.cleanup()


class _Standby(Protocol):
    """Have every commit on the publisher wait for a daemon, from now on until the block ends."""

    def __call__(self, **settings: str | float) -> AbstractContextManager[tuple[Route, Daemon]]:
        """Give route and daemon; `settings` with `__` for the dot."""


@pytest.fixture
def standby(
    publisher: PgServer, lazy_target: PgServer, init_route: Callable[[Route], None], start_daemon: StartDaemon
) -> _Standby:
    """A standby by that name whose databases are new."""

    @contextmanager
    def make(**settings: str | float) -> Iterator[tuple[Route, Daemon]]:
        name = f"standby_{secrets.token_hex(4)}"
        source_db, target_db = create_database(publisher, name), create_database(lazy_target, name)
        source_db.execute("CREATE TABLE unpublished (n int)")
        route = plain_route(source_db, target_db, init_route, **settings)
        commit_each(source_db, 1, 2)
        daemon = start_daemon(route, settings=_NO_TIMERS)
        daemon.wait_caught_up()
        try:
            _name_standby(publisher, route.slot)
            assert daemon.wait_for_event("standby_changed")["is_synchronous"] is True
            is_known = f"SELECT sync_state = 'sync' FROM pg_stat_replication WHERE application_name = '{route.slot}'"
            source_db.wait_until(is_known)
            yield route, daemon
        finally:
            _name_standby(publisher, "")

    return make


def _name_standby(publisher: PgServer, name: str) -> None:
    publisher.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    publisher.reload()


def _commit(database: Database, level: str, statement: str) -> None:
    """Commit a statement that waits as its session asks for."""
    with database.connect(options=f"-c synchronous_commit={level}") as connection:
        connection.execute(statement.encode())


# The commits that are reported and the means that make them durable do not depend on each other.
@pytest.mark.in_turn("commit_order", "synchronous_commit")
@pytest.mark.parametrize(("commit_order", "synchronous_commit"), [("preserve", "off"), ("relaxed", "on")])
def test_what_a_commit_waits_for_is_there(standby: _Standby, commit_order: str, synchronous_commit: str) -> None:
    """With remote_apply a row is visible when COMMIT returns; no level waits for a timer, nor for what is not its own.

    So does a commit return that changes nothing published, and one before another that a lock on the target holds up.
    """
    settings = {"apply__commit_order": commit_order, "target__synchronous_commit": synchronous_commit}
    with ThreadPoolExecutor() as threads, standby(**settings) as (route, daemon):
        for number, level in enumerate(["remote_write", "on", "remote_apply"] * 2, 10):
            _commit(route.source, level, f"INSERT INTO item VALUES ({number}, 0)")
            _commit(route.source, level, f"INSERT INTO unpublished VALUES ({number})")
            if level == "remote_apply":
                assert route.target.rows(f"SELECT id FROM item WHERE id = {number}")
        with ExitStack() as second:
            second.enter_context(foreign_transaction(route.target, "SELECT FROM item WHERE id = 2 FOR UPDATE"))
            with ExitStack() as first:
                first.enter_context(foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"))
                returns = []
                for n_blocked, (item, level) in enumerate([(1, "on"), (2, "remote_apply")], 1):
                    update = f"UPDATE item SET v = 7 WHERE id = {item}"
                    returns.append(threads.submit(_commit, route.source, level, update))
                    route.target.wait_until(_BLOCKED.format(n_blocked))
                assert not any(one.done() for one in returns)
            returns[0].result(timeout=30)
            assert not returns[1].done()
        returns[1].result(timeout=30)
        assert route.target.rows("SELECT v FROM item WHERE id IN (1, 2)") == [(7,), (7,)]
    assert daemon.wait_for_event("standby_changed", count=2)["is_synchronous"] is False
    daemon.stop()


def test_what_a_commit_waits_for_survives_a_crash(standby: _Standby, lazy_target: PgServer) -> None:
    """With `on` a row is on the target's disk when COMMIT returns, though no session of the daemon waits (O7, T-1).

    The daemon recovers without help, and commits that waited for it in the meantime return.
    """
    with ThreadPoolExecutor() as threads, standby(target__synchronous_commit="off") as (route, daemon):
        for crash in (lazy_target.crash, lazy_target.kill):
            ((before,),) = route.source.rows("SELECT max(id) FROM item")
            wanted = list(range(before + 1, before + 21))
            committing = [
                threads.submit(_commit, route.source, "on", f"INSERT INTO item VALUES ({number}, 0)")
                for number in wanted
            ]
            for one in committing:
                one.result(timeout=30)
            # It must not repair what we are about to look at.
            daemon.send(signal.SIGSTOP)
            crash()
            lazy_target.start()
            present = {number for (number,) in route.target.rows("SELECT id FROM item")}
            waiting = threads.submit(_commit, route.source, "on", f"INSERT INTO item VALUES ({wanted[-1] + 1}, 0)")
            daemon.send(signal.SIGCONT)
            assert set(wanted) <= present
            waiting.result(timeout=60)
            assert route.target.rows(f"SELECT id FROM item WHERE id = {wanted[-1] + 1}")


def test_no_command_waits_for_commits_that_wait_for_it(
    standby: _Standby, publisher: PgServer, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """A slot waits for commits that wait for the daemon. A command that the daemon waits for, or is away for, refuses.

    So do copies, a verify that got no snapshot, a cut-over before its fence, and a heal, by hand and by the daemon.
    """
    refused = "synchronous_standby_names has commits wait for the daemon"
    ended = threading.Event()

    def commit_on(database: Database) -> None:
        with database.connect() as session:
            while not ended.is_set():
                session.execute("UPDATE item SET v = v + 1 WHERE id = 1")

    with ThreadPoolExecutor() as threads, standby() as (route, daemon), ExitStack() as at_end:
        at_end.callback(ended.set)
        committing = threads.submit(commit_on, route.source)
        for command in ("refresh --table public.item --truncate", "verify --max-pause 1"):
            done = run_command(route, command)
            assert (done.returncode, refused in done.stderr, committing.done()) == (3, True, False), done
        path = tmp_path / "back.toml"
        path.write_text(
            f"[source]\ndsn = {json.dumps(route.target.dsn)}\nslot = 'back'\npublications = ['back']\n"
            f"[target]\ndsn = {json.dumps(route.source.target_role_dsn)}\n"
        )
        done = run_command(route, "cutover --verify none", "--reverse", str(path))
        assert (done.returncode != 0, refused in done.stderr, "fencing" in done.stdout) == (True, True, False), done
        # It waits until the name is gone.
        daemon.kill()
        drop_slot(route)
        done = run_command(route, "heal")
        assert (done.returncode, refused in done.stderr) == (3, True), done
        healing = start_daemon(route, settings={"source.on_lost_slot": "heal"})
        assert healing.exit_code() == 3
        assert "The daemon does not heal it: source: synchronous_standby_names" in healing.failure
        for name, command in (("other", "init --copy --truncate"), ("third", "init"), ("fourth", "seed --prepare")):
            _name_standby(publisher, name)
            done = run_command(replace(route, slot=name), command)
            assert (done.returncode, refused in done.stderr, committing.done()) == (3, True, False), done
        ended.set()
        _name_standby(publisher, "")
        committing.result(timeout=30)
        done = run_command(route, "heal")
        assert done.returncode == 0, done
