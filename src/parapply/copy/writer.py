"""Sessions that write rows of a copy on the target: under replication origins of the slot, as the workers do.

So nothing that a copy does goes back to the publisher where that follows the target, and the rows are known as the
publisher's and not a client's. They have the LSN and the time of the snapshot: what was committed after it is later.

Source: PostgreSQL manual, "Replication Progress Tracking"; `tablesync.c`, which also copies under an origin.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply import connect
from parapply.model import format_lsn
from parapply.target.session import lease, origins, settings
from parapply.target.state.slots import stamp_sql

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from parapply.config import Config
    from parapply.copy.snapshot import SourceSnapshot
    from parapply.plan.copy_starts import Name

_STAMP: Final = sql.SQL(f"SELECT {stamp_sql('$1', '$2')}")


class Writer:
    """One session."""

    def __init__(self, conn: settings.Connection, snapshot: SourceSnapshot, *, stamps: bool) -> None:
        self.conn = conn
        self._stamps = stamps
        self._snapshot = [format_lsn(snapshot.lsn), str(snapshot.time_us)]

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Open a transaction whose rows have the snapshot's time."""
        async with self.conn.transaction():
            if self._stamps:
                with settings.target_errors("setting the copy's commit time"):
                    await settings.rows(self.conn, _STAMP, self._snapshot)
            yield


class Writers:
    """Opens sessions; the copy lock is held."""

    def __init__(
        self, config: Config, slot_id: int, leader_pid: int, snapshot: SourceSnapshot, names: Sequence[Name]
    ) -> None:
        self._config = config
        self._slot_id = slot_id
        self._leader_pid = leader_pid
        self._snapshot = snapshot
        self._names = names

    @asynccontextmanager
    async def open(self, number: int) -> AsyncIterator[Writer]:
        """Open the session of a number, until the block ends; each number is open once at a time.

        Raises:
            TargetRefused: there is no origin for it, and without one something would be lost.
        """
        target = self._config.target
        conn = await settings.connect_control(
            target.login,
            role=target.session_replication_role,
            application_name=f"parapply copy {self._config.source.slot}",
        )
        async with conn:
            with settings.target_errors("joining the copy"):
                # So that nothing of an interrupted copy is still on its way when the next one begins.
                lock = lease.worker_lock_sql(self._slot_id, self._leader_pid, lease.COPY_LOCK_CLASS)
                await conn.execute(lock.encode())
                await conn.execute("SET synchronous_commit = off")
            has_origin = await connect.carry_origin(
                self._config, conn, self._slot_id, _who(number), "the copy", self._names
            )
            yield Writer(conn, self._snapshot, stamps=has_origin and (await settings.target_settings(conn)).may_stamp)

    async def release_origins(self, conn: settings.Connection, n_opened: int) -> None:
        """Give the places of the origins to other sessions; the origins stay, because rows are known by them."""
        names = [origins.origin_name(self._slot_id, _who(number)) for number in range(1, n_opened + 1)]
        await origins.release_origins(conn, names)


def _who(number: int) -> str:
    return f"copy_{number}"
