"""Blockers of a batch: a wait for another transaction has one, a wait for a momentary lock has none."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.runtime.apply.deadlocks import BLOCKERS
from tests.fixtures.roles import SOURCE_ROLE, STATE_SCHEMA, TARGET_ROLE

if TYPE_CHECKING:
    from tests.fixtures.databases import Database

#: Each row takes a page, so the table's file grows with each.
_GROW = "DO $$ BEGIN LOOP INSERT INTO wide SELECT repeat('x', 8000) FROM generate_series(1, 200); END LOOP; END $$"
_WAITS = "SELECT locktype FROM pg_locks WHERE pid = {} AND NOT granted"
_PATIENCE_S = 100.0
_LOOK_S = 1.0


def _blockers(database: Database, pid: int) -> list[tuple[int]]:
    return database.rows(BLOCKERS.as_string(None).replace("$1", str(pid)).replace("$2", f"'{STATE_SCHEMA}'"))


def test_a_row_of_another_transaction_blocks(target_db: Database) -> None:
    """A blocker's own blocker counts as well: it may wait for a later batch of ours."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with target_db.connect() as first, target_db.connect() as second, target_db.connect() as third:
        first.execute("BEGIN; INSERT INTO t VALUES (1)")
        second.execute("BEGIN; INSERT INTO t VALUES (2)")
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(second.execute, "INSERT INTO t VALUES (1)")]
            target_db.wait_until(f"SELECT EXISTS ({_WAITS.format(second.info.backend_pid)})")
            waits.append(threads.submit(third.execute, "INSERT INTO t VALUES (2)"))
            target_db.wait_until(f"SELECT EXISTS ({_WAITS.format(third.info.backend_pid)})")
            found = {pid for (pid,) in _blockers(target_db, third.info.backend_pid)}
            assert found == {first.info.backend_pid, second.info.backend_pid}
            first.execute("ROLLBACK")
            waits[0].result(timeout=_PATIENCE_S)
            second.execute("ROLLBACK")
            waits[1].result(timeout=_PATIENCE_S)


@pytest.mark.parametrize(
    ("slot", "role", "is_followed"),
    [("other", TARGET_ROLE, True), ("other", SOURCE_ROLE, False), ("mine", TARGET_ROLE, False)],
)
def test_an_idle_worker_of_another_slot_waits_for_its_turn(
    target_db: Database, slot: str, role: str, *, is_followed: bool
) -> None:
    """So what that slot's other workers wait for blocks too, if the names are of a role that may write the state."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); GRANT INSERT ON t TO PUBLIC")
    with (
        target_db.connect() as foreign,
        target_db.connect(user=TARGET_ROLE, application_name="parapply worker 1 mine") as head,
        target_db.connect(user=role, application_name=f"parapply worker 11 {slot}") as earlier,
        target_db.connect(user=role, application_name=f"parapply worker 9 {slot}") as idle,
        ThreadPoolExecutor(2) as threads,
    ):
        foreign.execute("BEGIN; INSERT INTO t VALUES (1)")
        idle.execute("BEGIN; INSERT INTO t VALUES (2)")
        waits = []
        for session, number in ((earlier, b"1"), (head, b"2")):
            waits.append(threads.submit(session.execute, b"INSERT INTO t VALUES (" + number + b")"))
            target_db.wait_until(f"SELECT EXISTS ({_WAITS.format(session.info.backend_pid)})")
        found = {pid for (pid,) in _blockers(target_db, head.info.backend_pid)}
        behind = {earlier.info.backend_pid, foreign.info.backend_pid}
        assert found == {idle.info.backend_pid} | (behind if is_followed else set())
        foreign.execute("ROLLBACK")
        idle.execute("ROLLBACK")
        for each in waits:
            each.result(timeout=_PATIENCE_S)


def test_who_makes_a_file_longer_blocks_nobody(target_db: Database) -> None:
    """Though PostgreSQL names it among the blockers: a batch that yielded to it would be repeated for nothing."""
    target_db.execute("CREATE TABLE wide (body text); ALTER TABLE wide ALTER body SET STORAGE plain")
    with target_db.connect() as one, target_db.connect() as other, ThreadPoolExecutor(3) as threads:
        stopped, waiting = one.info.backend_pid, other.info.backend_pid
        growing = [threads.submit(session.execute, _GROW) for session in (one, other)]
        deadline_s = time.monotonic() + _PATIENCE_S
        try:
            while True:
                os.kill(stopped, signal.SIGSTOP)
                # At any moment, also in one in which it holds that lock; the other one then comes to wait for it.
                look = threads.submit(_waits_for_extension, target_db, waiting)
                # It may as well hold a lock that every look at pg_locks needs: a look that hangs is for nothing.
                hangs = bool(wait([look], timeout=_LOOK_S).not_done)
                if not hangs and look.result():
                    break
                os.kill(stopped, signal.SIGCONT)
                look.result(timeout=_PATIENCE_S)
                assert time.monotonic() < deadline_s, "the two never met"
            named = target_db.rows(f"SELECT unnest(pg_blocking_pids({waiting}))")
            found = _blockers(target_db, waiting)
        finally:
            os.kill(stopped, signal.SIGCONT)
            one.cancel()
            other.cancel()
        for each in growing:
            with pytest.raises(psycopg.errors.QueryCanceled):
                each.result(timeout=_PATIENCE_S)
    assert (named, found) == ([(stopped,)], [])


def _waits_for_extension(database: Database, pid: int) -> bool:
    """Return whether a session waits for that lock twice in a row: for one who is stopped it waits on."""
    query = _WAITS.format(pid)
    return all(database.rows(query) == [("extend",)] for _ in range(3))
