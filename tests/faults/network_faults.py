"""Faults between the daemon and the servers: cut and silent connections, roles, limits, locks, clocks (F15 to F29)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from parapply.demo.errors import DemoError
from tests.faults.catalogue import fault
from tests.faults.lab import ROLE, WAIT_S
from tests.fixtures.plain import WORKER_IS_BLOCKED, end_sessions, foreign_transaction, walsender_pid

if TYPE_CHECKING:
    from tests.faults.lab import Round
    from tests.fixtures.databases import Database

# Longer than the publisher's wal_sender_timeout.
_LOCK_S = 13.0
_PEAK_LIMIT_BYTES = 400 * 1024 * 1024
# In the name of COMMIT, and of the record of a flight that commits at its end. ReadyForQuery after that, or the tag:
# of transactions in flights, one ahead of the answers, no end is sent before they come.
_COMMIT = b"to commit\0"
_COMMIT_DONE = (b"Z\0\0\0\5I", b"COMMIT\0")
_CLOCK_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1",
                    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1")  # fmt: skip
_CLOCK = next((path for path in _CLOCK_LIBRARIES if Path(path).exists()), "")


@fault("F15", "connections to the publisher cut")
def f15_cut(run: Round) -> None:
    """Reset in the middle of the stream, several times."""
    for _ in range(4):
        lost, connected = (len(run.daemon.events_of(name)) for name in ("source_lost", "source_connected"))
        run.source_proxy.cut()
        run.daemon.wait_for_event("source_lost", WAIT_S, count=lost + 1)
        # Else the next cut might meet no connection.
        run.daemon.wait_for_event("source_connected", WAIT_S, count=connected + 1)
        run.work(1, 40)


@fault("F15", "publisher silent (half-open connection)")
def f15_silent(run: Round) -> None:
    """Nothing comes and nothing goes, and no end is seen: the daemon gives up by itself, and finds the slot busy."""
    lost = len(run.daemon.events_of("source_lost"))
    run.source_proxy.freeze()
    run.daemon.wait_for_event("source_lost", WAIT_S, count=lost + 1)
    run.source_proxy.thaw()


@fault("F16", "COMMIT lost, or its answer")
def f16_commit(run: Round) -> None:
    """A commit is lost on its way, or its answer is: the state on the target shows which."""
    for number in range(4):
        lost = len(run.daemon.events_of("target_lost"))
        proxy = run.target_proxy
        cut = proxy.drop_before(_COMMIT) if number % 2 else proxy.drop_reply_after(_COMMIT, reply=_COMMIT_DONE)
        assert cut.wait(WAIT_S), f"no commit came:\n{run.daemon.log_tail()}"
        run.daemon.wait_for_event("target_lost", WAIT_S, count=lost + 1)


@fault("F16", "target silent, then cut")
def f16_silent(run: Round) -> None:
    """Commits are held up in the network, and then all connections are reset."""
    lost = len(run.daemon.events_of("target_lost"))
    held = run.target_proxy.freeze_before(_COMMIT)
    assert held.wait(WAIT_S), f"no commit came:\n{run.daemon.log_tail()}"
    run.work(30, 100)
    run.target_proxy.cut()
    run.target_proxy.thaw()
    run.daemon.wait_for_event("target_lost", WAIT_S, count=lost + 1)


@fault("F17", "role may not log in any more")
def f17_login(run: Round) -> None:
    """Refused by one end, the daemon goes on trying and finds its way back."""
    for database, event in ((run.target, "target_lost"), (run.source, "source_lost")):
        lost = len(run.daemon.events_of(event))
        database.execute(f"ALTER ROLE {ROLE} NOLOGIN")
        try:
            _end_sessions(database)
            run.daemon.wait_for_event(event, WAIT_S, count=lost + 2)
        finally:
            database.execute(f"ALTER ROLE {ROLE} LOGIN")


@fault("F17", "target has no connection left")
def f17_full(run: Round) -> None:
    """Others take every connection while the daemon has none; then it gets back what it needs."""
    with contextlib.ExitStack() as stack:
        lost = len(run.daemon.events_of("target_lost"))
        run.target_proxy.cut(then_refuse=True)
        taken = 0
        with contextlib.suppress(psycopg.OperationalError):
            while taken < 200:
                # The role's own: those that are kept for superusers are also taken.
                stack.enter_context(run.target.connect(connect_timeout=5, application_name="foreign"))
                taken += 1
        run.target_proxy.restore()
        run.daemon.wait_for_event("target_lost", WAIT_S, count=lost + 2)
    run.caught_up()
    # With fewer workers than it was to have, if it was fast.
    run.restart()


@fault("F23", "foreign lock on a table, longer than wal_sender_timeout")
def f23(run: Round) -> None:
    """The publisher hears from the daemon all the while, and its memory stays bounded."""
    # The fault before may have ended with a daemon that has only just been started.
    run.caught_up()
    pid = walsender_pid(run.route)
    assert pid is not None, "nothing reads the slot"
    with foreign_transaction(run.target, "LOCK TABLE acct IN ACCESS EXCLUSIVE MODE"):
        # The database's own way of waiting: it counts while nothing of ours runs.
        run.source.execute(f"SELECT pg_sleep({_LOCK_S})")
    assert walsender_pid(run.route) == pid, "the publisher has ended the stream"
    peak_bytes = run.peak_bytes()
    assert peak_bytes < _PEAK_LIMIT_BYTES, f"{peak_bytes} bytes"


@fault("F23", "foreign lock on a row")
def f23_row(run: Round) -> None:
    """A batch that needs the row waits; everything is applied when it is free."""
    with foreign_transaction(run.target, "SELECT FROM acct WHERE id IN (3, 7) FOR UPDATE"):
        run.target.wait_until(WORKER_IS_BLOCKED, WAIT_S)
        run.work(50, 200)


@fault("F26", "settings of the role that would change meanings and limits")
def f26(run: Round) -> None:
    """Time limits, date style, search path, isolation and so on: the daemon's sessions set all of them themselves."""
    settings = {
        "statement_timeout": "'50ms'", "lock_timeout": "'20ms'", "idle_in_transaction_session_timeout": "'50ms'",
        "idle_session_timeout": "'100ms'", "search_path": "nowhere", "DateStyle": "'SQL, DMY'", "row_security": "off",
        "default_transaction_isolation": "serializable", "default_transaction_read_only": "on",
        "standard_conforming_strings": "off", "bytea_output": "escape", "extra_float_digits": "-5",
    }  # fmt: skip
    with run.target.connect() as connection:
        for name, value in settings.items():
            connection.execute(f"ALTER ROLE {ROLE} IN DATABASE {run.target.dbname} SET {name} = {value}".encode())
    lost = len(run.daemon.events_of("target_lost"))
    _end_sessions(run.target)
    run.daemon.wait_for_event("target_lost", WAIT_S, count=lost + 1)
    run.work(50, 100)
    run.caught_up()
    run.target.execute(f"ALTER ROLE {ROLE} IN DATABASE {run.target.dbname} RESET ALL")
    _end_sessions(run.target)


@fault("F27", "tables of the target change under load")
def f27(run: Round) -> None:
    """Indexes, columns and triggers come and go."""
    no_op = (
        "CREATE OR REPLACE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NEW; END$$;"
        " CREATE TRIGGER nothing BEFORE UPDATE ON kv FOR EACH ROW EXECUTE FUNCTION nothing();"
        " ALTER TABLE kv ENABLE ALWAYS TRIGGER nothing"
    )
    for command in (
        "CREATE INDEX one_more ON kv (v)", no_op, "ALTER TABLE kv ALTER COLUMN v TYPE bigint",
        "CREATE UNIQUE INDEX two_more ON acct (id, bal)", "DROP TRIGGER nothing ON kv",
        "ALTER TABLE kv ALTER COLUMN v TYPE int", "DROP INDEX one_more", "DROP INDEX two_more",
    ):  # fmt: skip
        _altering(run.target, command)
        run.work(5, 40)
    run.daemon.check_running()


@fault("F28", "publisher's table changes, the target's does not")
def f28(run: Round) -> None:
    """A column that the target lacks stops the daemon, clearly; once it exists, nothing was lost."""
    name = f"missing_{run.chooser.getrandbits(30)}"
    run.source.execute(f"ALTER TABLE kv ADD COLUMN {name} int; UPDATE kv SET {name} = 1")
    run.source.execute(f"INSERT INTO kv (k, v, log, {name}) VALUES (100000 + {run.chooser.getrandbits(16)}, 0, '', 2)")
    code = run.daemon.exit_code(WAIT_S)
    assert code in {4, 5}, f"exit code {code}\n{run.daemon.log_tail()}"
    _altering(run.target, f"ALTER TABLE kv ADD COLUMN {name} int")
    run.start_connected()


@fault("F29", "clock jumps by an hour", why_not="" if _CLOCK else "needs libfaketime, which is not here")
def f29(run: Round) -> None:
    """The daemon's wall clock jumps an hour ahead and two back; only its monotonic clock counts."""
    clock = run.directory / "clock"
    clock.write_text("+0\n", encoding="ascii")
    environ = {
        "LD_PRELOAD": _CLOCK, "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_NO_CACHE": "1",
    }  # fmt: skip
    run.restart(environ=environ)
    lost = len(run.daemon.events_of("source_lost")) + len(run.daemon.events_of("target_lost"))
    for jump in ("+1h", "-1h", "+0"):
        clock.write_text(f"{jump}\n", encoding="ascii")
        run.work(30, 80)
        run.caught_up()
    assert len(run.daemon.events_of("source_lost")) + len(run.daemon.events_of("target_lost")) == lost
    run.restart()


def _end_sessions(database: Database) -> None:
    """End the daemon's sessions, its walsender too."""
    end_sessions(database, "parapply%")
    database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database()"
        " AND active_pid IS NOT NULL"
    )


def _altering(database: Database, command: str) -> None:
    """Run DDL as soon as it gets its lock."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            database.execute(f"SET lock_timeout = '2s'; {command}")
        except DemoError as error:
            if error.sqlstate not in {"55P03", "40P01"} or time.monotonic() > deadline_s:
                raise
            os.sched_yield()
        else:
            return
