"""Waits that PostgreSQL cannot see as a deadlock: a batch needs a lock of a later one that waits for its turn.

The server sees one session waiting for another that is idle in a transaction; only we know that the idle one waits for
the first (trap T-30). So when a batch makes no progress, we ask the server which sessions block it; a later batch of
ours rolls back and waits. For a foreign session the batch waits, and that is shown (F23), and so for a prepared
transaction; where the operator has asked to skip what waits, its statement is cancelled. But a prepared transaction
that the publisher has rolled back in the meantime, as far as that was received, is rolled back at once, because its
place in the order does not matter, and comes after the batch that waits (T-37).

With the order kept only the head is checked, because everything waits for it in the end. Relaxed, every batch is: after
a head that waits for a foreign lock, two others may block each other.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply import blocked
from parapply.limits import BLOCKED_S
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime.pool.job import LargeJob, OutcomeJob, StreamJob
from parapply.target.session import prepared, settings
from parapply.vocabulary import WorkerState
from parapply.wire.messages import RollbackPrepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.conflict.skips import Skips
    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.pool.job import Job
    from parapply.runtime.pool.pool import WorkerPool
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.control_pool import ControlPool

#: Not only the sessions that block the head, but also those that block them: a foreign session that blocks the head may
#: itself wait for a later batch of ours, which waits for the head. A session that makes a file longer or cleans a
#: page holds a lock for that moment only, and waits for no other transaction then: to wait for it is work, no stall.
BLOCKERS: Final = sql.SQL(
    "WITH RECURSIVE chain (pid) AS (SELECT $1::int"
    " UNION SELECT blocker.pid FROM chain"
    " CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(chain.pid)) AS blocker (pid)"
    " WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_locks AS wanted WHERE wanted.pid = chain.pid AND NOT wanted.granted"
    " AND wanted.locktype IN ('extend', 'page'))) SELECT pid FROM chain WHERE pid <> $1::int"
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


#: What a session waits for, and who the others are that it waits for; the first of those that block it itself. Of a row
#: the waiting session holds the lock of its place.
_FACTS = sql.SQL(
    "SELECT coalesce(wanted.relation, (SELECT place.relation FROM pg_catalog.pg_locks AS place"
    " WHERE place.pid = $1::int AND place.locktype = 'tuple' LIMIT 1))::regclass::text, wanted.mode,"
    " a.pid, a.usename::text, a.application_name, a.xact_start::text, a.query_start::text"
    " FROM pg_catalog.pg_locks AS wanted LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = ANY ($2::int[])"
    " WHERE wanted.pid = $1::int AND NOT wanted.granted"
    " ORDER BY a.pid = ANY (pg_catalog.pg_blocking_pids($1::int)) DESC NULLS LAST, a.pid LIMIT 1"
)
#: Only what waits for a lock: COMMIT that waits for a standby has committed here already.
_CANCEL = sql.SQL(
    "SELECT pg_catalog.pg_cancel_backend(pid) FROM pg_catalog.pg_stat_activity"
    " WHERE pid = $1::int AND wait_event_type = 'Lock'"
)
#: States in which the server works for a worker, and may wait: for a deferred constraint at COMMIT, too.
AT_WORK: Final = (WorkerState.EXECUTING, WorkerState.RETRYING, WorkerState.COMMITTING)


#: Checks during which a batch waits for others and keeps its worker; giving that back costs repeated work.
_GIVE_BACK_CHECKS = 4


@dataclass
class _Blocked:
    """A batch that waits for foreign sessions."""

    job: Job
    since_s: float
    holder: str
    #: After how many seconds it is logged next.
    next_s: float = BLOCKED_S


class StallCheck:
    """`foreign_waits` is written here and read by the monitor, like what is shown as blocked."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        pool: WorkerPool,
        workers: Sequence[Worker],
        control_pool: ControlPool,
        two_phase: TwoPhase,
        skips: Skips,
        *,
        slot_name: str,
        on_blocked: Callable[[tuple[float, str] | None], None],
        on_session_blocked: Callable[[float], None],
        stall_check_s: float,
    ) -> None:
        """Start with nothing checked.

        Args:
            pool: knows the order and which jobs may be asked to yield.
            workers: of the worker pool.
            control_pool: to ask the target.
            two_phase: knows what is prepared.
            skips: what the operator has asked to skip.
            slot_name: ends the names of the slot's sessions.
            on_blocked: gets since when a batch waits for foreign sessions, the longest, and for whom; None: none does.
            on_session_blocked: gets how long another session of the slot's has waited, the longest; 0.0: none does.
            stall_check_s: how long a batch may take before the server is asked.
        """
        self._pool = pool
        self._workers = workers
        self._control_pool = control_pool
        self._two_phase = two_phase
        self._skips = skips
        self._slot_name = slot_name
        #: When the slot's other sessions were looked at.
        self._looked_s = 0.0
        self._telling = blocked.Telling()
        self._on_session_blocked = on_session_blocked
        self._on_blocked = on_blocked
        self._stall_check_s = stall_check_s
        self._blocked: dict[int, _Blocked] = {}
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()
        #: What a worker waits for on the target, by its number.
        self.foreign_waits: dict[int, str] = {}

    async def run(self) -> None:
        """Check from time to time until cancelled.

        Raises:
            TargetLost: the connection ended.
        """
        while True:
            # What begins while nothing is under way stands still for so long at the earliest.
            await asyncio.sleep(self._stall_check_s / (1 if self._pool.is_idle else 2))
            self.foreign_waits.clear()
            self._ask_back()
            for worker in self._workers:
                if self._stands_still(worker):
                    await self._look(worker)
            self._end_blocked()
            await self._look_at_others()

    async def _look_at_others(self) -> None:
        """Log what holds up a session of the slot's that is no worker's."""
        if self._clock() - self._looked_s < BLOCKED_S:
            return
        self._looked_s = self._clock()
        own = [worker.session.pipeline.backend_pid for worker in self._workers]
        with settings.target_errors("asking who blocks a session"):
            async with self._control_pool.session() as conn:
                found = await blocked.look(conn, slot_name=self._slot_name, but=own)
        self._on_session_blocked(max([one.wait_s for one in found], default=0.0))
        for one in self._telling.due(found):
            one.log("target")

    def _end_blocked(self) -> None:
        """Forget the waits that are over, and show the longest of the others."""
        for number in self._blocked.keys() - self.foreign_waits.keys():
            over = self._blocked.pop(number)
            if over.next_s > BLOCKED_S:
                wait_s = round(self._clock() - over.since_s, 1)
                self._log.info("batch_unblocked", worker=number, seq=over.job.batch.seq, wait_s=wait_s)
        longest = min(self._blocked.values(), key=lambda one: one.since_s, default=None)
        self._on_blocked(None if longest is None else (longest.since_s, longest.holder))

    async def _tell_blocked(self, worker: Worker, job: Job, holder: str, pids: Sequence[int], gids: list[str]) -> None:
        """Take notice of a wait for foreign sessions, and log it once it is long."""
        found = self._blocked.get(worker.number)
        if found is None or found.job is not job:
            found = self._blocked[worker.number] = _Blocked(job, max(worker.since_s, job.times.freed_s), holder)
        found.holder = holder
        wait_s = self._clock() - found.since_s
        if wait_s < found.next_s:
            return
        with settings.target_errors("asking who blocks a batch"):
            async with self._control_pool.session() as conn:
                facts = await settings.rows(conn, _FACTS, [worker.session.pipeline.backend_pid, list(pids)])
        if not facts:
            return
        found.next_s = min(2 * wait_s, wait_s + blocked.LONGEST_S)
        relation, mode, pid, role, application_name, xact_start, query_start = facts[0]
        self._log.warning(
            "batch_blocked",
            worker=worker.number,
            seq=job.batch.seq,
            end_lsn=format_lsn(job.batch.end_lsn) if job.batch.end_lsn else None,
            commit_lsn=format_lsn(job.commit_lsn) if isinstance(job, LargeJob) else None,
            wait_s=round(wait_s, 1),
            holder=holder,
            gid=gids,
            relation=relation,
            mode=mode,
            pid=pid,
            role=role,
            application_name=application_name,
            xact_start=xact_start,
            query_start=query_start,
        )

    def _ask_back(self) -> None:
        """Free workers that wait for another batch for long, while batches that could start have none."""
        for worker in self._workers:
            waited_s = self._clock() - worker.since_s
            has_waited = worker.state is WorkerState.WAITING and waited_s >= _GIVE_BACK_CHECKS * self._stall_check_s
            if self._pool.is_relaxed and worker.job is not None and has_waited and self._pool.wants_back(worker.job):
                self._log.info("worker_freed", worker=worker.number, seq=worker.job.batch.seq)

    def _stands_still(self, worker: Worker) -> bool:
        job, head = worker.job, self._pool.head
        if job is None or head is None or worker.state not in AT_WORK:
            return False
        if job is not head and not self._pool.is_relaxed:
            return False
        return self._clock() - max(worker.since_s, job.times.freed_s) >= self._stall_check_s

    async def _look(self, holder: Worker) -> None:
        job = holder.job
        with settings.target_errors("asking who blocks a batch"):
            async with self._control_pool.session() as conn:
                pid = holder.session.pipeline.backend_pid
                found = [blocker for (blocker,) in await settings.rows(conn, BLOCKERS, [pid])]
                held = await settings.rows(conn, _PREPARED, [[pid, *found]]) if _NO_SESSION in found else []
        if job is None or job is not holder.job or holder.state not in AT_WORK:
            return
        own = {worker.session.pipeline.backend_pid: worker for worker in self._workers}
        pids = sorted(set(found) - own.keys() - {_NO_SESSION})
        foreign = [f"pid {pid}" for pid in pids]
        gids = [str(gid) for (gid,) in held]
        foreign += [f"prepared transaction {gid}" for gid in gids]
        if foreign:
            waits_for = self.foreign_waits[holder.number] = f"a lock held by {', '.join(foreign)}"
            await self._tell_blocked(holder, job, waits_for, pids, gids)
            if self._is_to_skip(job):
                await self._cancel(holder, job)
        await self._end_rolled_back(gids)
        for pid in found:
            blocker = own.get(pid)
            if blocker is None or blocker is holder or blocker.job is None:
                continue
            await self._break(job, blocker)

    def _is_to_skip(self, job: Job) -> bool:
        """Tell whether a transaction is, or may be, to be skipped that is executed now, alone or merged with others."""
        if not self._skips or isinstance(job, OutcomeJob):
            return False
        if isinstance(job, StreamJob):
            end = job.stream.end
            return end is not None and self._skips.find(end.commit_lsn, end.end_lsn) is not None
        if isinstance(job, LargeJob):
            is_wanted = self._skips.find(job.commit_lsn, job.batch.end_lsn) is not None
            return is_wanted or (not job.batch.end_lsn and self._skips.may_find(job.commit_lsn))
        transactions = job.batch.transactions
        if job.resume is not None and not job.resume.halving.is_done:
            part = job.resume.halving.part
            transactions = transactions[part.start : part.end]
        return any(self._skips.find(one.commit_lsn, one.end_lsn) is not None for one in transactions)

    async def _cancel(self, worker: Worker, job: Job) -> None:
        """Have the server end what a worker waits for; the batch is repeated at the head, and leaves out what it must.

        COMMIT may be on its way behind the statement. The server does not execute it then, and its answer says so.
        """
        with settings.target_errors("cancelling a statement"):
            async with self._control_pool.session() as conn:
                if job is worker.job and await settings.rows(conn, _CANCEL, [worker.session.pipeline.backend_pid]):
                    job.is_unwanted = True
                    self._log.warning("batch_cancelled", worker=worker.number, seq=job.batch.seq)

    async def _end_rolled_back(self, gids: Sequence[str]) -> None:
        """Roll back those of the prepared transactions whose ROLLBACK PREPARED waits for its turn.

        It comes to nothing then. If the process dies before, it comes again, to the same end.
        """
        outcomes = [job.outcome for job in self._pool.jobs() if isinstance(job, OutcomeJob)]
        rollbacks = [outcome for outcome in outcomes if isinstance(outcome, RollbackPrepared)]
        ended = [gid for gid in map(self._two_phase.pending_gid, rollbacks) if gid in gids]
        if ended:
            async with self._control_pool.session() as conn:
                await prepared.roll_back(conn, ended)
            self._log.warning("rolled_back_early", gid=ended)

    async def _break(self, job: Job, blocker: Worker) -> None:
        """Make a worker yield to a job that it blocks, unless it will end by itself."""
        other = blocker.job
        assert other is not None
        is_endless = job.batch.seq and not other.batch.seq  # it follows a transaction in progress
        if job is not self._pool.head and not is_endless:
            # Leave a worker alone while it executes, or while it waits for anything but this job.
            waits = self._pool.late_waits_of(other)
            if blocker.state is not WorkerState.WAITING or all(wait.seq != job.batch.seq for wait in waits):
                return
        is_executing = blocker.state is WorkerState.EXECUTING
        if self._pool.yield_to(job, other):
            self._log.warning("stall_broken", worker=blocker.number, seq=other.batch.seq, holder=job.worker)
            if is_executing:
                # Its statement may itself be waiting; without a cancel it would notice only when it is done.
                await blocker.session.cancel()
