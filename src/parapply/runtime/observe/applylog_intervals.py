"""Activity of the daemon and its sessions in each second, which shows the limit now and in the apply log."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from parapply.applylog import utc_text
from parapply.applylog_schema import LOCKS_LIMIT, BackendSample, IntervalRecord, LockHolder
from parapply.limits import is_lock
from parapply.runtime.observe import limiting, machine
from parapply.runtime.observe.limiting import Limiting, Look
from parapply.target.session import settings
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.metrics.figures import Figures
    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.observe.applylog_records import LogRun
    from parapply.runtime.observe.applylog_writer import ApplyLogWriter
    from parapply.runtime.tables.control_pool import ControlPool

_ACTIVITY: Final = sql.SQL(
    "SELECT CASE WHEN state <> 'active' OR wait_event_type = 'Client' THEN 'client'"
    " ELSE coalesce(wait_event_type || ':' || wait_event, 'CPU') END, pg_catalog.count(*)"
    " FROM pg_catalog.pg_stat_activity WHERE pid = ANY ($1::int[]) GROUP BY 1 ORDER BY 1"
)
#: The sessions that hold up the waiting ones, except the workers' own. For a row, the waiting session has the lock of
#: its place, or waits for that.
_HOLDERS: Final = sql.SQL(
    "SELECT DISTINCT holder.pid, coalesce(a.usename::text, ''), coalesce(coalesce(wanted.relation,"
    " (SELECT place.relation FROM pg_catalog.pg_locks AS place WHERE place.pid = wanted.pid"
    " AND place.locktype = 'tuple' LIMIT 1))::regclass::text, ''), wanted.mode"
    " FROM pg_catalog.pg_locks AS wanted"
    " CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(wanted.pid)) AS holder (pid)"
    " LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = holder.pid"
    " WHERE wanted.pid = ANY ($1::int[]) AND NOT wanted.granted AND holder.pid <> ALL ($2::int[])"
    " ORDER BY 1, 3, 4 LIMIT $3::int"
)
#: States in which a worker has nothing to do on the target: no session of them is sampled.
_WAITS: Final = (WorkerState.IDLE, WorkerState.WAITING, WorkerState.STREAMING)


class _Cpu(NamedTuple):
    busy_s: float  # of everything on the machine
    sessions_s: dict[int, float]  # of each session's process
    sender_s: float  # of the publisher's process that sends
    processors: int  # that the sessions may use

    def since(self, before: _Cpu) -> tuple[float, float, float]:
        """Return the seconds of machine, sessions and sender since another time; a new session counts whole.

        A process that has ended since counts as 0, because its last seconds are no longer known.
        """
        pids = self.sessions_s.items()
        sessions_s = sum([max(0.0, taken_s - before.sessions_s.get(pid, 0.0)) for pid, taken_s in pids])
        return self.busy_s - before.busy_s, sessions_s, max(0.0, self.sender_s - before.sender_s)


class Intervals:
    """Used by the monitor alone; reads the others' fields."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        writer: ApplyLogWriter | None,
        of: LogRun,
        control_pool: ControlPool,
        *,
        batcher: Batcher,
        workers: Sequence[Worker],
        figures: Figures,
    ) -> None:
        """Begin the first interval; intervals with work are written if there is an apply log."""
        self._writer = writer
        self._of = of
        self._control_pool = control_pool
        self._reader = batcher.reader
        self._batcher = batcher
        self._flight = batcher.pool.flight
        self._workers = workers
        self._engine = batcher.pool.flight.state
        self._figures = figures
        #: The publisher's process that sends.
        self._sender_pid = batcher.reader.stream.sender_pid
        #: True if that process runs on this machine.
        self._is_sender_near = machine.is_sender(self._sender_pid)
        self.limiting = Limiting()
        self._clock = asyncio.get_running_loop().time
        #: True if the target runs on this machine; None: not known yet.
        self._is_near: bool | None = None
        self._order = "relaxed" if self._engine.is_relaxed else "preserve"
        self._applied = 0
        self._begun = self._now()
        self._cpu_then = self._cpu()

    def _now(self) -> tuple[float, float, float, float, float]:
        throttle = self._batcher.throttle
        held_s = throttle.held_s if throttle is not None else 0.0
        return self._clock(), time.thread_time(), self._reader.waited_s, self._reader.paused_s, held_s

    async def take(self) -> None:
        """End the interval, take notice of it, and write it unless nothing was done in it."""
        begun, self._begun = self._begun, self._now()
        before_cpu, self._cpu_then = self._cpu_then, self._cpu()
        length_s, cpu_s, waited_s, paused_s, throttled_s = (
            now - before for now, before in zip(self._begun, begun, strict=True)
        )
        # Not the watermark, because keep-alives also move it.
        applied, self._applied = self._applied, sum([worker.transactions for worker in self._workers])
        had_work = bool(self._engine.jobs) or applied != self._applied or throttled_s > 0
        behind_bytes = max(0, (self._engine.source_lsn or 0) - self._batcher.received_lsn)
        self._figures.throttled_s += throttled_s
        state = limiting.state_of(self._flight, self._workers)
        waits = limiting.waits_of(self._flight, self._workers)
        backends, locks = await self._sampled() if had_work else ((), ())
        sampled = tuple([(one.wait, one.samples) for one in backends])
        self.limiting.add(
            Look(state, length_s, cpu_s, waited_s, paused_s, behind_bytes, sampled, waits, locks, throttled_s)
        )
        if not had_work or self._writer is None:
            return
        taken_s = self._cpu_then.since(before_cpu) if self._cpu_then and before_cpu else (0.0, 0.0, 0.0)
        busy_s, sessions_s, sender_s = taken_s
        most = self._batcher.sizing.most
        record = IntervalRecord(
            slot=self._of.slot,
            run=self._of.run,
            ended_at=utc_text(time.time()),
            length_s=round(length_s, 6),
            workers=len(self._workers),
            leader_cpu_s=round(cpu_s, 6),
            publisher_s=round(waited_s, 6),
            paused_s=round(paused_s, 6),
            behind_bytes=behind_bytes,
            backends=backends,
            commit_order=self._order,
            max_batch_transactions=most.transactions,
            max_batch_changes=most.changes,
            max_batch_bytes=most.size_bytes,
            processors=self._cpu_then.processors if self._cpu_then else 0,
            busy_cpu_s=round(busy_s, 6),
            sessions_cpu_s=round(sessions_s, 6),
            sender_cpu_s=round(sender_s, 6),
            locks=locks,
            throttled_s=round(throttled_s, 6),
        )
        self._writer.write([record])

    def _cpu(self) -> _Cpu | None:
        """Return the time taken of the target's processors; None where they are not this machine's, or not written."""
        if self._writer is None:
            return None
        pids = {worker.session.pipeline.backend_pid: worker.session.pipeline for worker in self._workers}
        if self._is_near is None and pids:
            pid, pipeline = next(iter(pids.items()))
            self._is_near = pipeline.is_near and machine.is_postgres(pid)
        busy_s = machine.busy_s() if self._is_near else None
        if busy_s is None:
            return None
        sender_s = machine.taken_s(self._sender_pid) if self._is_sender_near else 0.0
        processors = max([machine.processors(pid) for pid in pids], default=0)
        return _Cpu(busy_s, {pid: machine.taken_s(pid) for pid in pids}, sender_s, processors)

    async def _sampled(self) -> tuple[tuple[BackendSample, ...], tuple[LockHolder, ...]]:
        """Return the present waits of the workers' sessions, and other sessions that hold the locks they wait for."""
        pids = [worker.session.pipeline.backend_pid for worker in self._workers if worker.state not in _WAITS]
        found: Counter[str] = Counter()
        locks: list[tuple[int, str, str, str]] = []
        if pids:
            with settings.target_errors("asking what the workers' sessions wait for"):
                async with self._control_pool.session() as conn:
                    found.update(dict(await settings.rows(conn, _ACTIVITY, [pids])))
                    if any(map(is_lock, found)):
                        own = [worker.session.pipeline.backend_pid for worker in self._workers]
                        locks = await settings.rows(conn, _HOLDERS, [pids, own, LOCKS_LIMIT])
        return (
            tuple([BackendSample(wait=wait, samples=samples) for wait, samples in found.items()]),
            tuple([LockHolder(pid=pid, role=role, relation=name, mode=mode) for pid, role, name, mode in locks]),
        )
