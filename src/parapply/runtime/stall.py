"""Waits that PostgreSQL cannot see as a deadlock: a batch needs a lock of a later one that waits for its turn.

The server sees one session waiting for another that is idle in a transaction; only we know that the idle one waits for
the first (trap T-30). So when a batch stands still, the server is asked whom it waits for; a later batch of ours rolls
back and waits. Somebody else's session is waited for, and shown (F23), and so is a prepared transaction; but what the
publisher has rolled back in the meantime, as far as that was received, is rolled back at once: its place in the order
does not matter, and that place is behind the one who waits (T-37).

With the order kept only the head is looked at: everything waits for it in the end. Relaxed, every batch is: behind a
head that waits for a foreign lock two others may stand in each other's way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from psycopg import sql

from parapply.logs import get_logger
from parapply.target import prepared, settings
from parapply.wire.messages import RollbackPrepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.runtime.crew import Crew
    from parapply.runtime.desk import Desk
    from parapply.runtime.job import Job
    from parapply.runtime.two_phase import TwoPhase
    from parapply.runtime.worker import Worker

#: Not only who blocks the head, but also who blocks those: somebody else's session in the way may itself wait for a
#: later batch of ours, which waits for the head.
_BLOCKERS = sql.SQL(
    "WITH RECURSIVE chain (pid) AS (SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids($1::int))"
    " UNION SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(pid)) FROM chain) SELECT pid FROM chain"
)

#: A prepared transaction has no session, so above it is pid 0. Its locks have no pid, but all of them the virtual
#: transaction that it began as; one is on its own number. (PostgreSQL manual, "pg_locks".)
_NO_SESSION = 0
_PREPARED = sql.SQL(
    "SELECT DISTINCT held.gid FROM pg_catalog.pg_locks AS wanted JOIN pg_catalog.pg_locks AS lock"
    " ON (lock.locktype, lock.database, lock.relation, lock.page, lock.tuple, lock.virtualxid, lock.transactionid,"
    " lock.classid, lock.objid, lock.objsubid) IS NOT DISTINCT FROM (wanted.locktype, wanted.database, wanted.relation,"
    " wanted.page, wanted.tuple, wanted.virtualxid, wanted.transactionid, wanted.classid, wanted.objid,"
    " wanted.objsubid) JOIN pg_catalog.pg_locks AS own ON own.virtualtransaction = lock.virtualtransaction"
    " JOIN pg_catalog.pg_prepared_xacts AS held ON held.transaction = own.transactionid"
    " WHERE wanted.pid = ANY ($1::int[]) AND NOT wanted.granted AND lock.pid IS NULL AND own.pid IS NULL ORDER BY 1"
)


#: States in which the server works for a worker, and may wait: for a deferred constraint at COMMIT, too.
_AT_WORK = ("executing", "retrying", "committing")


#: Checks that a batch waits for others with a worker, before it gives that back: work is repeated then.
_GIVE_BACK_CHECKS = 4


class StallCheck:
    """`foreign_waits` is written here and read by the monitor."""

    def __init__(
        self, crew: Crew, workers: Sequence[Worker], desk: Desk, two_phase: TwoPhase, stall_check_s: float
    ) -> None:
        """Look at nothing yet.

        Args:
            crew: knows the order and who may be told to yield.
            workers: of the crew.
            desk: to ask the target.
            two_phase: knows what is prepared.
            stall_check_s: how long a batch may take before anybody is asked.
        """
        self._crew = crew
        self._workers = workers
        self._desk = desk
        self._two_phase = two_phase
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
            self.foreign_waits.clear()
            self._ask_back()
            for worker in self._workers:
                if self._stands_still(worker):
                    await self._look(worker)

    def _ask_back(self) -> None:
        """Free workers that wait for another batch for long, while batches that could start have none."""
        for worker in self._workers:
            waited_s = self._clock() - worker.since_s
            has_waited = worker.state == "waiting" and waited_s >= _GIVE_BACK_CHECKS * self._stall_check_s
            if self._crew.is_relaxed and worker.job is not None and has_waited and self._crew.wants_back(worker.job):
                self._log.info("worker_freed", worker=worker.number, seq=worker.job.batch.seq)

    def _stands_still(self, worker: Worker) -> bool:
        job, head = worker.job, self._crew.head
        if job is None or head is None or worker.state not in _AT_WORK:
            return False
        if job is not head and not self._crew.is_relaxed:
            return False
        return self._clock() - max(worker.since_s, job.freed_s) >= self._stall_check_s

    async def _look(self, holder: Worker) -> None:
        job = holder.job
        with settings.target_errors("asking who blocks a batch"):
            async with self._desk.session() as conn:
                pid = holder.session.pipeline.backend_pid
                found = [blocker for (blocker,) in await settings.rows(conn, _BLOCKERS, [pid])]
                held = await settings.rows(conn, _PREPARED, [[pid, *found]]) if _NO_SESSION in found else []
        if job is None or job is not holder.job or holder.state not in _AT_WORK:
            return
        own = {worker.session.pipeline.backend_pid: worker for worker in self._workers}
        foreign = [f"pid {pid}" for pid in sorted(set(found) - own.keys() - {_NO_SESSION})]
        gids = [str(gid) for (gid,) in held]
        foreign += [f"prepared transaction {gid}" for gid in gids]
        if foreign:
            self.foreign_waits[holder.number] = f"a lock held by {', '.join(foreign)}"
        await self._end_rolled_back(gids)
        for pid in found:
            blocker = own.get(pid)
            if blocker is None or blocker is holder or blocker.job is None:
                continue
            await self._break(job, blocker)

    async def _end_rolled_back(self, gids: Sequence[str]) -> None:
        """Roll back those of the prepared transactions whose ROLLBACK PREPARED waits for its turn.

        It comes to nothing then. If the process dies before, it comes again, to the same end.
        """
        outcomes = [job.outcome for job in self._crew.jobs() if isinstance(job.outcome, RollbackPrepared)]
        ended = [gid for gid in map(self._two_phase.pending_gid, outcomes) if gid in gids]
        if ended:
            async with self._desk.session() as conn:
                await prepared.roll_back(conn, ended)
            self._log.warning("rolled_back_early", gid=ended)

    async def _break(self, job: Job, blocker: Worker) -> None:
        """Make a worker yield to a job that it blocks, unless it will end by itself."""
        other = blocker.job
        assert other is not None
        is_endless = job.batch.seq and not other.batch.seq  # it follows a transaction in progress
        if job is not self._crew.head and not is_endless:
            # What executes goes on to its end, and so does what waits for somebody else than this job.
            waits = self._crew.late_waits_of(other)
            if blocker.state != "waiting" or all(wait.seq != job.batch.seq for wait in waits):
                return
        is_executing = blocker.state == "executing"
        if self._crew.yield_to(job, other):
            self._log.warning("stall_broken", worker=blocker.number, seq=other.batch.seq, holder=job.worker)
            if is_executing:
                # It may itself wait for somebody; otherwise it would notice only when it is done.
                await blocker.session.cancel()
