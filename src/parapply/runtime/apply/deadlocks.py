"""Asks the target which sessions block a batch that makes no progress, and does what `engine/stalls.py` decides."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.blocked import Telling, look
from parapply.engine.job import LargeJob
from parapply.engine.stalls import AT_WORK, Stalls
from parapply.limits import BLOCKED_S, next_line_s
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.target.session import prepared, settings
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.engine.job import Job
    from parapply.engine.stalls import Blocked
    from parapply.runtime.apply.transaction import WorkerKit
    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.target.state.slots import StatePlace

#: Not only the sessions that block the head, but also those that block them: a foreign session that blocks the head may
#: itself wait for a later batch of ours, which waits for the head. A session that makes a file longer or cleans a
#: page holds a lock for that moment only, and waits for no other transaction then: to wait for it is work, no stall.
#:
#: A worker of another slot that waits for no lock may wait for its turn, so behind it are the workers of its slot that
#: do. Any session can take such a name, so only names of a role that may write the state count. A server cuts a name
#: after 63 bytes, at another place of the slot's name for worker 10 than for worker 9.
BLOCKERS: Final = sql.SQL(
    "WITH RECURSIVE worker AS (SELECT a.pid, a.usesysid,"
    " pg_catalog.substring(a.application_name, '^parapply worker [0-9]+ (.{1,40})') AS slot"
    " FROM pg_catalog.pg_stat_activity AS a WHERE a.datname = pg_catalog.current_database()"
    " AND a.application_name LIKE 'parapply worker %' AND pg_catalog.has_table_privilege(a.usesysid,"
    " pg_catalog.to_regclass(pg_catalog.format('%I.applied', $2::text)), 'INSERT')),"
    " chain (pid) AS (SELECT $1::int UNION SELECT next.pid FROM chain CROSS JOIN LATERAL ("
    "SELECT blocker.pid FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids(chain.pid)) AS blocker (pid)"
    " WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_locks AS wanted WHERE wanted.pid = chain.pid AND NOT wanted.granted"
    " AND wanted.locktype IN ('extend', 'page'))"
    " UNION ALL SELECT earlier.pid FROM worker AS held JOIN worker AS earlier USING (usesysid, slot)"
    " WHERE CASE WHEN held.pid = chain.pid"
    " AND held.slot <> (SELECT own.slot FROM worker AS own WHERE own.pid = $1::int)"
    " THEN pg_catalog.pg_blocking_pids(held.pid) = '{}' AND pg_catalog.pg_blocking_pids(earlier.pid) <> '{}' END"
    ") AS next (pid)) SELECT pid FROM chain WHERE pid <> $1::int"
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

#: The lock that a session waits for, and the first of the sessions that block it, a direct blocker before others. For a
#: row's lock the table is found by the lock on the row's place, which the waiting session holds.
_FACTS = sql.SQL(
    "SELECT coalesce(wanted.relation, (SELECT place.relation FROM pg_catalog.pg_locks AS place"
    " WHERE place.pid = $1::int AND place.locktype = 'tuple' LIMIT 1))::regclass::text, wanted.mode,"
    " a.pid, a.usename::text, a.application_name, a.xact_start::text, a.query_start::text"
    " FROM pg_catalog.pg_locks AS wanted LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = ANY ($2::int[])"
    " WHERE wanted.pid = $1::int AND NOT wanted.granted"
    " ORDER BY a.pid = ANY (pg_catalog.pg_blocking_pids($1::int)) DESC NULLS LAST, a.pid LIMIT 1"
)
#: Only a statement that waits for a lock: a COMMIT that waits for a standby has committed here already.
_CANCEL = sql.SQL(
    "SELECT pg_catalog.pg_cancel_backend(pid) FROM pg_catalog.pg_stat_activity"
    " WHERE pid = $1::int AND wait_event_type = 'Lock'"
)


class StallCheck:
    """Writes who waits for foreign sessions, and since when."""

    def __init__(
        self,
        workers: Sequence[Worker],
        control_pool: ControlPool,
        kit: WorkerKit,
        *,
        place: StatePlace,
        stall_check_s: float,
    ) -> None:
        """Start with nothing checked.

        Args:
            workers: of the worker pool.
            control_pool: to ask the target.
            kit: its pool knows the order, and which jobs may be asked to yield; it also has the prepared
                transactions, and the ones that the operator has asked to skip.
            place: of the state; the slot's name ends the names of its sessions.
            stall_check_s: how long a batch may take before the server is asked.
        """
        self._pool = kit.pool
        self._workers = workers
        self._control_pool = control_pool
        self._two_phase = kit.two_phase
        self._conflict_handler = kit.conflict_handler
        self._place = place
        #: When the slot's other sessions were looked at.
        self._looked_s = 0.0
        self._stalls = Stalls(kit.pool.flight, stall_check_s)
        self._engine = kit.pool.flight.state
        self._telling = Telling()
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()

    async def run(self) -> None:
        """Check from time to time until cancelled."""
        while True:
            await self._pool.rest.sleep(self._stalls.check_s)
            self._engine.foreign_waits.clear()
            for worker in self._workers:
                job = worker.job
                if job is not None and self._stalls.holds_up(worker, self._clock()) and self._pool.wants_back(job):
                    self._log.info("worker_freed", worker=worker.number, seq=job.batch.seq)
            for worker in self._workers:
                if self._stalls.stands_still(worker, self._clock()):
                    await self._look(worker)
            for number, over in self._stalls.looked():
                wait_s = round(self._clock() - over.since_s, 1)
                self._log.info("batch_unblocked", worker=number, seq=over.job.batch.seq, wait_s=wait_s)
            await self._look_at_others()

    async def _look_at_others(self) -> None:
        """Log the sessions that hold up one of the slot's that is no worker's."""
        if self._clock() - self._looked_s < BLOCKED_S:
            return
        self._looked_s = self._clock()
        own = [worker.session.pipeline.backend_pid for worker in self._workers]
        with settings.target_errors("asking who blocks a session"):
            async with self._control_pool.session() as conn:
                found = await look(conn, slot_name=self._place.slot_name, but=own)
        self._engine.session_blocked_s = max([one.wait_s for one in found], default=0.0)
        for one in self._telling.due(found):
            one.log("target")

    async def _tell_blocked(self, worker: Worker, found: Blocked, pids: Sequence[int], gids: list[str]) -> None:
        """Log a wait for foreign sessions that is long."""
        job, wait_s = found.job, self._clock() - found.since_s
        with settings.target_errors("asking who blocks a batch"):
            async with self._control_pool.session() as conn:
                facts = await settings.rows(conn, _FACTS, [worker.session.pipeline.backend_pid, list(pids)])
        if not facts:
            return
        found.next_s = next_line_s(wait_s)
        relation, mode, pid, role, application_name, xact_start, query_start = facts[0]
        self._log.warning(
            "batch_blocked",
            worker=worker.number,
            seq=job.batch.seq,
            end_lsn=format_lsn(job.batch.end_lsn) if job.batch.end_lsn else None,
            commit_lsn=format_lsn(job.commit_lsn) if isinstance(job, LargeJob) else None,
            wait_s=round(wait_s, 1),
            holder=found.holder,
            gid=gids,
            relation=relation,
            mode=mode,
            pid=pid,
            role=role,
            application_name=application_name,
            xact_start=xact_start,
            query_start=query_start,
        )

    async def _look(self, holder: Worker) -> None:
        job = holder.job
        with settings.target_errors("asking who blocks a batch"):
            async with self._control_pool.session() as conn:
                pid = holder.session.pipeline.backend_pid
                found = [blocker for (blocker,) in await settings.rows(conn, BLOCKERS, [pid, self._place.schema])]
                held = await settings.rows(conn, _PREPARED, [[pid, *found]]) if _NO_SESSION in found else []
        if job is None or job is not holder.job or holder.state not in AT_WORK:
            return
        own = {worker.session.pipeline.backend_pid: worker for worker in self._workers}
        pids = sorted(set(found) - own.keys() - {_NO_SESSION})
        foreign = [f"pid {pid}" for pid in pids]
        gids = [str(gid) for (gid,) in held]
        foreign += [f"prepared transaction {gid}" for gid in gids]
        if foreign:
            blocked = self._stalls.waits(holder, job, f"a lock held by {', '.join(foreign)}", self._clock())
            if blocked is not None:
                await self._tell_blocked(holder, blocked, pids, gids)
            if self._conflict_handler.is_to_skip(job):
                await self._cancel(holder, job)
        await self._leave_to_prepared(holder, job, await self._end_rolled_back(gids))
        for pid in found:
            blocker = own.get(pid)
            if blocker is not None and blocker is not holder and self._stalls.may_break(job, blocker):
                await self._break(job, blocker)

    async def _cancel(self, worker: Worker, job: Job) -> None:
        """Cancel the statement in which a worker waits; its batch is repeated at the head, less the ones to skip.

        COMMIT may be on its way behind the statement. The server does not execute it then, and its answer says so.
        """
        with settings.target_errors("cancelling a statement"):
            async with self._control_pool.session() as conn:
                if job is worker.job and await settings.rows(conn, _CANCEL, [worker.session.pipeline.backend_pid]):
                    job.is_unwanted = True
                    self._log.warning("batch_cancelled", worker=worker.number, seq=job.batch.seq)

    async def _end_rolled_back(self, gids: Sequence[str]) -> list[str]:
        """Roll back the prepared transactions whose ROLLBACK PREPARED waits for its turn; return the other ones.

        When its turn comes it finds nothing to do. If the process dies before, it is received again, with the same
        result.
        """
        ended = [gid for gid in map(self._two_phase.pending_gid, self._stalls.rollbacks()) if gid in gids]
        if ended:
            async with self._control_pool.session() as conn:
                await prepared.roll_back(conn, ended)
            self._log.warning("rolled_back_early", gid=ended)
        return [gid for gid in gids if gid not in ended]

    async def _leave_to_prepared(self, worker: Worker, job: Job, gids: Sequence[str]) -> None:
        """Have a worker that follows a transaction leave rows that a prepared transaction of the same stream holds.

        On the publisher only rows of a part that was rolled back can have met them. The outcome of the prepared one may
        come behind the transaction's own end, which then waits for it for ever.
        """
        if any(self._two_phase.is_ours(gid) for gid in gids) and self._pool.give_way(job):
            self._log.warning("stall_broken", worker=worker.number, seq=job.batch.seq, holder=None)
            await worker.session.cancel()

    async def _break(self, job: Job, blocker: Worker) -> None:
        """Make a worker yield to a job that it blocks."""
        other = blocker.job
        assert other is not None
        is_executing = blocker.state is WorkerState.EXECUTING
        if self._pool.yield_to(job, other):
            self._log.warning("stall_broken", worker=blocker.number, seq=other.batch.seq, holder=job.worker)
            if is_executing:
                # Its statement may itself be waiting; without a cancel it would notice only when it is done.
                await blocker.session.cancel()
