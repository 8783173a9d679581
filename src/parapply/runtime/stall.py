"""Waits that PostgreSQL cannot see as a deadlock: the head needs a lock of a later batch that waits for its turn.

The server sees one session waiting for another that is idle in a transaction; only we know that the idle one waits for
the first (trap T-30). So when the head stands still, the server is asked whom it waits for; a later batch of ours rolls
back and waits. Somebody else's session is waited for, and shown (F23).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from psycopg import sql

from parapply.logs import get_logger
from parapply.target import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.runtime.crew import Crew
    from parapply.runtime.desk import Desk
    from parapply.runtime.worker import Worker

#: Not only who blocks the head, but also who blocks those: somebody else's session in the way may itself wait for a
#: later batch of ours, which waits for the head.
_BLOCKERS = sql.SQL(
    "WITH RECURSIVE chain (pid) AS (SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids($1::int))"
    " UNION SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(pid)) FROM chain) SELECT pid FROM chain"
)


class StallCheck:
    """`foreign_waits` is written here and read by the monitor."""

    def __init__(self, crew: Crew, workers: Sequence[Worker], desk: Desk, stall_check_s: float) -> None:
        """Look at nothing yet.

        Args:
            crew: knows the head and who may be told to yield.
            workers: of the crew.
            desk: to ask the target.
            stall_check_s: how long the head may take before anybody is asked.
        """
        self._crew = crew
        self._workers = workers
        self._desk = desk
        self._stall_check_s = stall_check_s
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()
        #: What a worker waits for on the target, by its number.
        self.foreign_waits: dict[int, str] = {}

    async def run(self) -> None:
        """Look from time to time until cancelled.

        Raises:
            TargetLost: the connection ended.
        """
        while True:
            await asyncio.sleep(self._stall_check_s / 2)
            head = self._crew.head
            holder = next((worker for worker in self._workers if worker.job is head), None)
            self.foreign_waits.clear()
            if head is None or holder is None or holder.state not in ("executing", "retrying"):
                continue
            if self._clock() - max(holder.since_s, head.freed_s) >= self._stall_check_s:
                await self._look(holder)

    async def _look(self, holder: Worker) -> None:
        job = holder.job
        with settings.target_errors("asking who blocks the head"):
            async with self._desk.session() as conn:
                found = await settings.rows(conn, _BLOCKERS, [holder.session.pipeline.backend_pid])
        if job is None or job is not self._crew.head:
            return
        own = {worker.session.pipeline.backend_pid: worker for worker in self._workers}
        foreign = sorted({pid for (pid,) in found} - own.keys())
        if foreign:
            self.foreign_waits[holder.number] = f"a lock held by pid {', '.join(map(str, foreign))}"
        for (pid,) in found:
            blocker = own.get(pid)
            if blocker is None or blocker is holder or blocker.job is None:
                continue
            is_executing = blocker.state == "executing"
            if self._crew.yield_to_head(blocker.job):
                self._log.warning(
                    "stall_broken", worker=blocker.number, seq=blocker.job.batch.seq, holder=holder.number
                )
                if is_executing:
                    # It may itself wait for somebody; otherwise it would notice only when it is done.
                    await blocker.session.cancel()
