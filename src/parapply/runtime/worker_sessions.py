"""The sessions of the workers: each is opened under its number, at any time of an epoch, and closed alone or with all.

In: how to open one. Out: open sessions. A session takes the fence's lock and checks the lease as it is opened, however
late, so that a successor's fence also waits for it (traps T-14, T-15).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from parapply.errors import TargetLost, TargetRefused
from parapply.target.session import origins, settings
from parapply.target.session.session import CONNECTING, SessionOptions, WorkerSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.config import Config
    from parapply.errors import ParapplyError

#: Divisor of `max_connections`: workers started later leave this part of it to others.
_LEFT_TO_OTHERS: Final = 10
#: Superusers also leave the connections reserved for them.
_CONNECTIONS = sql.SQL(
    "SELECT m.n - pg_catalog.current_setting('superuser_reserved_connections')::int"
    " - COALESCE(pg_catalog.current_setting('reserved_connections', true)::int, 0)"
    " - (SELECT pg_catalog.sum(numbackends)::int FROM pg_catalog.pg_stat_database), m.n"
    " FROM (SELECT pg_catalog.current_setting('max_connections')::int) AS m (n)"
)


class ConnectionsLeft(NamedTuple):
    """Number of the target's connections that workers started later may take, and the error for one more."""

    n_left: int
    error: TargetRefused


async def connections_left(conn: settings.Connection) -> ConnectionsLeft:
    """Return the connections that the target has left, less the part kept for others."""
    with settings.target_errors("counting the target's connections"):
        ((free, most),) = await settings.rows(conn, _CONNECTIONS)
    kept = -(-most // _LEFT_TO_OTHERS)
    text = f"target: {max(free, 0)} of {most} connections are free, and {kept} are left to others"
    return ConnectionsLeft(
        max(free - kept, 0), TargetRefused(text, hint="raise max_connections, or lower apply.max_workers")
    )


class WorkerSessions:
    """Written by the connector while it opens an epoch, then by the task that starts workers."""

    def __init__(
        self, config: Config, slot_id: int, leader_pid: int, pids: list[int], server: settings.TargetSettings
    ) -> None:
        """Open nothing yet; `pids` gets the server process of each open session, `leader_pid` holds the lease."""
        self._pids = pids
        self._open: dict[int, WorkerSession] = {}
        self._shares_origin = server.shares_origins
        #: Where the origin is shared: the number of the session that has it for the others; 0: none yet.
        self._first = 0
        #: That session while its worker has left: an origin whose first session has ended takes no more sessions.
        self._resting: WorkerSession | None = None
        self._opening_first = asyncio.Lock()
        name, slot = "parapply worker", config.source.slot
        self._options: Callable[[int, int], SessionOptions] = lambda number, first_pid: SessionOptions(
            login=config.target.login,
            schema=config.target.state_schema,
            slot_id=slot_id,
            leader_pid=leader_pid,
            role=config.target.session_replication_role,
            synchronous_commit=config.target.synchronous_commit,
            application_name=f"{name} {number} {slot}",
            origin=origins.origin_name(slot_id, 1 if server.shares_origins else number),
            origin_pid=first_pid,
            may_stamp=server.may_stamp,
        )

    async def open(self, number: int) -> WorkerSession | ParapplyError:
        """Open the session of a worker; return the error if the target gives no connection: fewer serve (F17)."""
        if self._shares_origin and not self._first:
            async with self._opening_first:
                return await self._connect(number)
        return await self._connect(number)

    async def _connect(self, number: int) -> WorkerSession | ParapplyError:
        if self._resting is not None and number == self._first:
            session, self._resting = self._resting, None
            self._open[number] = session
            return session
        first = self._open.get(self._first, self._resting)
        first_pid = 0 if first is None else first.pipeline.backend_pid
        try:
            session = await WorkerSession.connect(self._options(number, first_pid))
        except TargetLost as error:
            if CONNECTING in str(error):
                return error
            raise
        self._open[number] = session
        self._pids.append(session.pipeline.backend_pid)
        if self._shares_origin and not self._first and session.origin_problem is None:
            self._first = number
        return session

    async def open_one_more(self, number: int) -> WorkerSession | ParapplyError:
        """Open a session later in an epoch, like those that are open; return the error if that cannot be now.

        Rows written without an origin would look like local ones beside the other workers' rows.
        """
        has_origins = all(session.origin_problem is None for session in self._open.values())
        try:
            session = await self.open(number)
        except (TargetLost, TargetRefused) as error:
            return error
        if isinstance(session, WorkerSession) and session.origin_problem is not None and has_origins:
            problem = session.origin_problem
            await self.close(number)
            return TargetRefused(f"target: {problem.text}", hint=problem.hint)
        return session

    async def close(self, number: int) -> None:
        """Close the session of a worker that has nothing in hand."""
        session = self._open.pop(number)
        if number == self._first:
            self._resting = session
            return
        self._pids.remove(session.pipeline.backend_pid)
        await session.close()

    async def close_all(self) -> None:
        """Close all at the end of an epoch; their processes stay noted, because a broken network may leave them."""
        resting = [] if self._resting is None else [self._resting]
        for session in [*self._open.values(), *resting]:
            await session.close()
