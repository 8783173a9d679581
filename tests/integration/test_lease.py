"""One daemon for each slot: the lease, and the fence around the sessions of the daemon before."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.errors import LeaseHeld
from parapply.login import Login
from parapply.target.session import lease, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.fixtures.databases import Database

pytestmark = pytest.mark.each_session

SLOT_ID = 1_000_000_007  # near the top: its keys must still be ints
#: The key the orphan waits for inside its transaction; the test holds it.
GATE = 4711


@asynccontextmanager
async def control(dsn: str, name: str = "leader") -> AsyncIterator[settings.Connection]:
    """Open a control session."""
    conn = await settings.connect_control(Login(dsn), role="replica", application_name=name)
    async with conn:
        yield conn


def unexpected(present: Sequence[lease.Holder]) -> None:
    """Fail, because no session should hold the fence."""
    pytest.fail(f"waits for {present}")


async def test_second_leader_is_told_who_holds_the_lease(target_db: Database) -> None:
    """The error names process, application and client; when the holder goes, a waiting one gets the lease."""
    async with control(target_db.dsn, "the first") as one, control(target_db.dsn) as two:
        await lease.take_lease(one, SLOT_ID, 0)
        # Another slot is another lease.
        await lease.take_lease(two, SLOT_ID - 1, 0)
        with pytest.raises(LeaseHeld) as caught:
            await lease.take_lease(two, SLOT_ID, 0.05)
        assert f"pid {one.info.backend_pid} (the first, client 127.0.0.1 since" in caught.value.line()
        # Only one command has the option, which ends no copy.
        assert "`parapply run --takeover`" in caught.value.hint
        await lease.take_lease(one, SLOT_ID, 0, lock_class=lease.COPY_LOCK_CLASS)
        with pytest.raises(LeaseHeld) as caught:
            await lease.take_lease(two, SLOT_ID, 0, lock_class=lease.COPY_LOCK_CLASS)
        assert "takeover" not in caught.value.hint
        waiting = asyncio.ensure_future(lease.take_lease(two, SLOT_ID, 30))
        await one.close()
        await waiting
        await lease.fence(two, SLOT_ID, unexpected)


async def test_takeover_ends_leader_and_workers(target_db: Database) -> None:
    """A takeover ends every session of the other leader, so that the fence has none to wait for."""
    async with control(target_db.dsn) as one, control(target_db.dsn) as two:
        await lease.take_lease(one, SLOT_ID, 0)
        with target_db.connect() as worker:
            worker.execute(lease.worker_lock_sql(SLOT_ID, one.info.backend_pid).encode())
            assert [holder.is_leader for holder in await lease.holders(two, SLOT_ID)] == [True, False]
            await lease.take_lease(two, SLOT_ID, 5, takeover=True)
            await lease.fence(two, SLOT_ID, unexpected)
            with pytest.raises(psycopg.OperationalError):
                worker.execute("SELECT 1")


async def test_a_leader_that_lost_the_lease_opens_no_worker(target_db: Database) -> None:
    """A stopped leader that comes back after its successor's fence cannot slip a new worker session in (F20)."""
    async with control(target_db.dsn) as one, control(target_db.dsn) as two:
        await lease.take_lease(one, SLOT_ID, 0)
        await lease.take_lease(two, SLOT_ID, 5, takeover=True)
        await lease.fence(two, SLOT_ID, unexpected)
        with target_db.connect() as late, pytest.raises(psycopg.errors.ObjectInUse, match="no longer holds"):
            late.execute(lease.worker_lock_sql(SLOT_ID, one.info.backend_pid).encode())
        with target_db.connect() as worker:
            worker.execute(lease.worker_lock_sql(SLOT_ID, two.info.backend_pid).encode())


ORPHAN = """
import sys, psycopg
dsn, lock, gate = sys.argv[1:]
with psycopg.connect(dsn, autocommit=True) as conn:
    conn.execute(lock)
    conn.execute(f"BEGIN; INSERT INTO done VALUES (1); SELECT pg_advisory_xact_lock({gate}); COMMIT")
"""


@pytest.mark.pg_majors(15, 18)
async def test_fence_waits_for_an_orphaned_commit(target_db: Database) -> None:
    """The client is killed while its server process executes: the fence waits until that commit is visible (T-14)."""
    target_db.execute("CREATE TABLE done (i int)")
    waited_for: list[lease.Holder] = []
    gate = target_db.connect()
    gate.execute(f"SELECT pg_advisory_lock({GATE})".encode())
    async with control(target_db.dsn, "old leader") as old:
        await lease.take_lease(old, SLOT_ID, 0)
        lock = lease.worker_lock_sql(SLOT_ID, old.info.backend_pid)
        client = subprocess.Popen([sys.executable, "-c", ORPHAN, target_db.dsn, lock, str(GATE)])  # noqa: ASYNC220  our own text
        target_db.wait_until(f"SELECT EXISTS (SELECT FROM pg_locks WHERE objid = {GATE} AND NOT granted)")
        client.send_signal(signal.SIGKILL)
        client.wait()
    async with control(target_db.dsn, "new leader") as new:
        await lease.take_lease(new, SLOT_ID, 10)
        assert target_db.rows("SELECT count(*) FROM done") == [(0,)]

        def on_wait(present: Sequence[lease.Holder]) -> None:
            waited_for.extend(present)
            gate.close()

        await lease.fence(new, SLOT_ID, on_wait)
        assert target_db.rows("SELECT count(*) FROM done") == [(1,)]
    assert len(waited_for) == 1
    assert not waited_for[0].is_leader
