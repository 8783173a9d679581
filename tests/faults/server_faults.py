"""Faults of the servers: crashes, restarts, full disks, and of what stands around them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from parapply.demo.binaries import server_account
from parapply.demo.errors import DemoError
from tests.faults.catalogue import fault
from tests.faults.lab import WAIT_S
from tests.faults.side_load import large
from tests.fixtures.plain import WORKER_IS_BLOCKED, foreign_transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.lab import Round
    from tests.faults.oracles import Findings

_CRASHES = 2
_LOCK_NOT_AVAILABLE = "55P03"
# A publisher that stops waits for its readers; ours must not hold it for long.
_STOP_LIMIT_S = 60.0
_FULL_MIB = 24
_STORM_MIB = 40
#: More than four times as many as the smallest part that is tried as a set.
_TRANSACTIONS = 300


def _answers(run: Round) -> None:
    """Return when the target takes connections again."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            run.target.rows("SELECT 1")
        except DemoError:
            assert time.monotonic() < deadline_s, "the target does not come back"
            threading.Event().wait(0.1)
        else:
            return


@fault("F4", "a target backend killed (-9): the server crashes all")
def f4(run: Round) -> None:
    """The postmaster ends every session, recovers and goes on."""
    for _ in range(_CRASHES):
        run.caught_up()
        run.work()
        query = (
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'parapply worker%'"
            " AND datname = current_database() LIMIT 1"
        )
        lost = len(run.daemon.events_of("target_lost"))
        for (pid,) in run.target.rows(query):
            # A server that has not noticed the death still answers, and readers see what it will forget.
            with run.sampler.crash(), run.target.connect() as witness:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                run.daemon.wait_for_event("target_lost", WAIT_S, count=lost + 1)
                with contextlib.suppress(psycopg.OperationalError):
                    witness.execute("SELECT pg_sleep(%s)", [WAIT_S])
                _answers(run)


@fault("F5", "target crashes, synchronous commits")
def f5(run: Round) -> Findings:
    """With every commit on disk before it is acknowledged."""
    run.restart(settings={"target.synchronous_commit": "on"})
    found = run.crash_target(run.servers.target.crash)
    found.take(run.crash_target(run.servers.target.kill))
    run.caught_up()
    run.restart()
    return found


@fault("F6", "target crashes and forgets acknowledged commits")
def f6(run: Round) -> Findings:
    """Commits are acknowledged long before they are on disk: they must not have been reported to the publisher."""
    # Not restarted without need: a daemon that has reported too much would find that out itself.
    if run.options.settings.get("target.synchronous_commit") != "off":
        run.restart(settings={"target.synchronous_commit": "off", "apply.advance_interval_s": 1})
    found = run.crash_target(run.servers.target.kill, piles_up=True)
    if not found:
        found.take(run.crash_target(run.servers.target.crash))
    run.caught_up()
    run.restart()
    return found


@fault("F8", "publisher restarts in order")
def f8(run: Round) -> None:
    """It waits for its readers to confirm everything; ours does."""
    began_s = time.monotonic()
    run.servers.source.stop("fast", WAIT_S)
    took_s = time.monotonic() - began_s
    run.servers.source.start()
    assert took_s < _STOP_LIMIT_S, f"the publisher stopped after {took_s:.0f} s"


@fault("F9", "publisher stops while the target is blocked")
def f9(run: Round) -> None:
    """Changes that are not applied cannot be confirmed: the daemon leaves, and the publisher can stop."""
    with foreign_transaction(run.target, "SELECT FROM acct FOR UPDATE"):
        run.target.wait_until(WORKER_IS_BLOCKED, WAIT_S)
        began_s = time.monotonic()
        run.servers.source.stop("fast", WAIT_S)
        took_s = time.monotonic() - began_s
        run.servers.source.start()
    assert took_s < _STOP_LIMIT_S, f"the publisher stopped after {took_s:.0f} s"


@fault("F10", "publisher crashes, its slot goes back")
def f10(run: Round) -> None:
    """Confirmed transactions may be sent again, and are not applied again."""
    for crash in (run.servers.source.crash, run.servers.source.kill):
        run.caught_up()
        run.work()
        lost = len(run.daemon.events_of("source_lost"))
        crash()
        run.daemon.wait_for_event("source_lost", WAIT_S, count=lost + 1)
        run.servers.source.start()
        run.work()


@fault("F33", "either server crashes between PREPARE and its outcome", needs_two_phase=True)
def f33_crash(run: Round) -> Findings | None:
    """Prepared on both sides, then a crash, then the outcome; nothing is prepared for ever."""
    found = None
    for number, outcome in enumerate(run.chooser.sample(["COMMIT", "ROLLBACK"], 2)):
        gid = f"fault_{number}"
        with run.source.connect() as session:
            session.execute("BEGIN")
            large(session, run.chooser, run.chooser.choice([2, 800]))
            session.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
        wanted = "SELECT count(*) > 0 FROM pg_prepared_xacts WHERE database = current_database()"
        run.target.wait_until(wanted, WAIT_S)
        if run.chooser.random() < 0.5:
            found = run.crash_target(run.servers.target.kill)
        else:
            lost = len(run.daemon.events_of("source_lost"))
            run.servers.source.crash()
            run.daemon.wait_for_event("source_lost", WAIT_S, count=lost + 1)
            run.servers.source.start()
        run.source.execute(sql.SQL("{} PREPARED {}").format(sql.SQL(outcome), sql.Literal(gid)))
        run.caught_up()
    return found


def _mounting_problem() -> str:
    """Return why no small file system can be mounted here, or an empty string."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "needs root to mount a small file system"
    with tempfile.TemporaryDirectory() as directory:
        command = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", directory]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return "this machine does not let us mount a small file system"
        subprocess.run(["umount", directory], check=True)
    return ""


@contextlib.contextmanager
def _small_disk(size_mib: int) -> Iterator[Path]:
    """Give an empty file system of a size that the server's account may write to."""
    account = server_account()
    assert account is not None, "root runs its servers under another account"
    with tempfile.TemporaryDirectory(prefix="parapply-disk-") as directory:
        Path(directory).chmod(0o755)
        place = Path(directory) / "disk"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}M", "tmpfs", str(place)], check=True)
        try:
            os.chown(place, account.uid, account.gid)
            yield place
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@fault("F22", "disk of the target full", why_not=_mounting_problem())
def f22(run: Round) -> None:
    """A table's disk has no room: the daemon tries again until there is some."""
    # Attempts that failed leave dead rows, which also need room.
    ((size_bytes,),) = run.target.rows("SELECT pg_total_relation_size('bulk')")
    with _small_disk(_FULL_MIB + int(size_bytes) // 2**20) as place:
        space = f"small_{run.target.dbname}"
        run.target.execute(f"CREATE TABLESPACE {space} LOCATION '{place}'")
        _move(run, space)
        ballast = place / "ballast"
        lost = len(run.daemon.events_of("target_lost"))
        try:
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * 65536)
                    file.flush()
            with run.source.connect() as session, session.transaction():
                large(session, run.chooser, 4000)
            run.daemon.wait_for_event("target_lost", WAIT_S, count=lost + 1)
        finally:
            ballast.unlink()
        run.caught_up()
        _move(run, "pg_default")
        run.target.execute(f"DROP TABLESPACE {space}")


def _move(run: Round, space: str) -> None:
    """Move a table that is written to.

    A session that waits for a prepared transaction there keeps the daemon from changes before its outcome, so none may
    wait for long (docs/how-to/change-schemas.md).
    """
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            run.target.execute(f"SET lock_timeout = '1s'; ALTER TABLE bulk SET TABLESPACE {space}")
        except DemoError as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE or time.monotonic() > deadline_s:
                raise
        else:
            return


@fault("F39", "much WAL of unpublished tables")
def f39(run: Round) -> None:
    """The slot moves on, so that the publisher can remove its WAL."""
    slot = f"FROM pg_replication_slots WHERE slot_name = '{run.route.slot}'"
    ((before,),) = run.source.rows(f"SELECT restart_lsn {slot}")
    for _ in range(4):
        run.source.execute(
            f"INSERT INTO unpublished SELECT g, repeat('x', 1000) FROM generate_series(1, {_STORM_MIB * 256}) AS g"
        )
    end_lsn = run.route.end_of_source_lsn()
    run.source.wait_until(f"SELECT confirmed_flush_lsn >= '{end_lsn}' {slot}", WAIT_S)
    run.source.execute("TRUNCATE unpublished; CHECKPOINT")
    run.source.wait_until(
        f"SELECT restart_lsn - '{before}' > {_STORM_MIB * 1024 * 1024} AND pg_log_standby_snapshot() IS NOT NULL {slot}"
        if run.servers.source.binaries.major >= 16 else f"SELECT restart_lsn > '{before}' {slot}", WAIT_S
    )  # fmt: skip


@fault("F40", "the daemon is the publisher's synchronous standby")
def f40(run: Round) -> None:
    """Every commit on the publisher waits until the target has it on disk, also over a restart of the daemon."""
    with run.standby("on"):
        run.work()
        run.restart()
        run.work()


@fault("F7", "state table UNLOGGED")
def f7(run: Round) -> None:
    """Refused with exit code 4, and accepted again after the repair."""
    run.daemon.stop(WAIT_S)
    run.target.execute("ALTER TABLE parapply.applied SET UNLOGGED")
    refused = run.start_beside()
    assert refused.exit_code(WAIT_S) == 4, refused.log_tail()
    run.target.execute("ALTER TABLE parapply.applied SET LOGGED")
    run.start_connected()


@fault("F24", "foreign sessions that deadlock with the workers")
def f24(run: Round) -> None:
    """A client locks accounts in orders of its choice; the server makes one of both give way."""
    chooser = random.Random(run.chooser.getrandbits(30))
    with run.target.connect(application_name="foreign") as connection:
        connection.execute("SET statement_timeout = '20s'; SET deadlock_timeout = '100ms'")
        for _ in range(15):
            connection.execute("BEGIN")
            for account in chooser.sample(range(1, 21), 4):
                try:
                    connection.execute(b"SELECT FROM acct WHERE id = %s FOR UPDATE", [account])
                except Exception:  # noqa: BLE001  a deadlock or the time limit: either is what we came for
                    break
            connection.execute("ROLLBACK")
    run.daemon.check_running()


@fault("F24", "statements of a large head cancelled while they wait for a lock")
def f24_cancelled(run: Round) -> None:
    """A failure that passes, of a batch of many transactions on a table without a key.

    The first batch waits for a client while the others gather behind it; a second client then stands before these.
    """
    settings: dict[str, str | float] = {
        "apply.workers": 1, "apply.max_batch_transactions": 20000, "source.streaming": "off", "source.catch_up": "off",
    }  # fmt: skip
    run.restart(settings=settings)
    run.caught_up()
    txid = run.chooser.getrandbits(60)
    lock = "BEGIN; LOCK TABLE single IN SHARE MODE"
    with (
        run.target.connect(application_name="foreign") as first,
        run.target.connect(application_name="second") as second,
    ):
        first.execute(lock)
        run.source.execute(f"INSERT INTO single VALUES ({txid}, 0)")
        run.target.wait_until(WORKER_IS_BLOCKED, WAIT_S)
        run.source.execute(
            f"DO $$ BEGIN FOR n IN 1..{_TRANSACTIONS} LOOP INSERT INTO single VALUES ({txid}, n); COMMIT; END LOOP;"
            " END $$"
        )
        # Not until all is taken: batches that markers have closed may stop reading.
        run.source.wait_until(
            f"SELECT sent_lsn >= '{run.route.end_of_source_lsn()}' FROM pg_stat_replication JOIN pg_replication_slots"
            f" ON pid = active_pid WHERE slot_name = '{run.route.slot}'",
            WAIT_S,
        )
        standing = threading.Thread(target=second.execute, args=(lock.encode(),), daemon=True)
        standing.start()
        pid = second.info.backend_pid
        run.target.wait_until(f"SELECT EXISTS (SELECT FROM pg_locks WHERE pid = {pid} AND NOT granted)", WAIT_S)
        first.execute("ROLLBACK")
        standing.join(WAIT_S)
        run.target.wait_until(WORKER_IS_BLOCKED, WAIT_S)
        n_retried = len(run.daemon.events_of("batch_retried"))
        run.target.execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock'"
        )
        run.daemon.wait_for_event("batch_retried", WAIT_S, count=n_retried + 1)
        second.execute("ROLLBACK")
    run.restart()
