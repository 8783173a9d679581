"""Faults after which the slot and the target do not fit any more: the daemon must refuse, clearly, and apply nothing.

Each comes at the end of a round, when load and daemon have ended and both sides were found equal.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg

from tests.faults.catalogue import fault
from tests.faults.lab import ROLE, WAIT_S
from tests.faults.side_load import large
from tests.fixtures.daemon import _environment
from tests.fixtures.fan import make_slot
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from parapply.demo.server import PgServer
    from tests.faults.lab import Round

_REFUSED = 3
_COUNT = "SELECT count(*), max(n) FROM marker"


def _write(run: Round, times: int = 5) -> None:
    with run.source.connect() as connection:
        for _ in range(times):
            with connection.transaction():
                large(connection, run.chooser, 4)


def _is_refused(run: Round, *, route: Route | None = None) -> None:
    """Fail unless a daemon ends with exit code 3, one line for the operator, and nothing applied."""
    before = run.target.rows(_COUNT + ", bulk_txn")
    daemon = run.start_beside(route=route)
    code = daemon.exit_code(WAIT_S)
    assert code == _REFUSED, f"exit code {code}\n{daemon.log_tail()}"
    assert daemon.failure
    assert run.target.rows(_COUNT + ", bulk_txn") == before, "something was applied after the gap"


@fault("F11", "slot invalidated by the publisher", is_last=True)
def f11(run: Round) -> None:
    """The WAL that the slot needs is gone."""
    run.source.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    try:
        run.servers.source.reload()
        for _ in range(4):
            _write(run)
            run.source.execute("SELECT pg_switch_wal()")
        slot = f"FROM pg_replication_slots WHERE slot_name = '{run.route.slot}'"
        run.source.execute("CHECKPOINT")
        run.source.wait_until(f"SELECT wal_status = 'lost' {slot}", WAIT_S)
        _is_refused(run)
    finally:
        run.source.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        run.servers.source.reload()


@fault("F12", "slot dropped and made again", is_last=True)
def f12(run: Round) -> None:
    """Changes written in between are in no slot."""
    run.source.execute(f"SELECT pg_drop_replication_slot('{run.route.slot}')")
    _is_refused(run)
    _write(run)
    make_slot(run.route)
    _is_refused(run)


@fault("F13", "another cluster behind the source's address", is_last=True)
def f13(run: Round) -> None:
    """It has tables, publication and slot of the same names."""
    run.target.execute("CREATE PUBLICATION pub FOR TABLE acct, xfer, evt, bulk, bulk_txn, kv, uq, marker")
    run.target.execute(f"SELECT pg_create_logical_replication_slot('{run.route.slot}', 'pgoutput')")
    dsn = run.target.dsn_with(user=ROLE)
    wrong = Route(source=run.target, target=run.target, slot=run.route.slot, settings=run.route.settings,
                  source_dsn=dsn, target_dsn=dsn)  # fmt: skip
    _is_refused(run, route=wrong)


@contextlib.contextmanager
def _kept(server: PgServer) -> Iterator[Callable[[], None]]:
    """Keep a copy of a server as it is now; give a function that puts it back, which leaves the server stopped."""
    kept: Path = server.directory / "kept"
    server.stop("fast", WAIT_S)
    subprocess.run(["cp", "-a", str(server.data_dir), str(kept)], check=True)
    server.start()

    def put_back() -> None:
        server.stop("fast", WAIT_S)
        subprocess.run(["rm", "-rf", str(server.data_dir)], check=True)
        subprocess.run(["cp", "-a", str(kept), str(server.data_dir)], check=True)

    try:
        yield put_back
    finally:
        subprocess.run(["rm", "-rf", str(kept)], check=True)


def _promote(server: PgServer) -> None:
    """Start a stopped server as a standby would that is promoted: on a timeline of its own."""
    signal_file = server.data_dir / "standby.signal"
    signal_file.touch()
    signal_file.chmod(0o666)
    server.start()
    server.execute("SELECT pg_promote(true, 120)")


def _apply(run: Round) -> None:
    _write(run)
    daemon = run.start()
    daemon.wait_caught_up(WAIT_S)
    daemon.stop(WAIT_S)


@fault("F14", "publisher fails over to a standby that misses commits", is_last=True)
def f14(run: Round) -> None:
    """The target is ahead of it, and LSNs are used again for other transactions."""
    with _kept(run.servers.source) as put_back:
        _apply(run)
        put_back()
        _promote(run.servers.source)
        _write(run, 50)
        _is_refused(run)


@fault("F30", "target fails over to a standby that misses commits", is_last=True)
def f30(run: Round) -> None:
    """The publisher was told of more than it has."""
    with _kept(run.servers.target) as put_back:
        _apply(run)
        put_back()
        _promote(run.servers.target)
        _write(run)
        _is_refused(run)


@fault("F31", "target restored from a backup", is_last=True)
def f31(run: Round) -> None:
    """The publisher was told of more than it has."""
    with _kept(run.servers.target) as put_back:
        _apply(run)
        put_back()
        run.servers.target.start()
        _is_refused(run)


@fault("F34", "prepared transactions of a slot that is dropped", is_last=True, needs_two_phase=True)
def f34(run: Round) -> None:
    """`parapply drop` rolls them back on the target."""
    daemon = run.start_connected()
    with run.source.connect() as session:
        session.execute("BEGIN")
        large(session, run.chooser, 3)
        session.execute("PREPARE TRANSACTION 'left'")
    is_there = "SELECT count(*) = 1 FROM pg_prepared_xacts WHERE database = current_database()"
    run.target.wait_until(is_there, WAIT_S)
    daemon.stop(WAIT_S)
    done = subprocess.run(
        [sys.executable, "-m", "parapply", "drop", "--yes", *run.route.arguments()], env=_environment(None),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    left = run.target.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    assert not left, f"still prepared: {left}"
    with contextlib.suppress(psycopg.Error):
        run.source.execute("ROLLBACK PREPARED 'left'")
