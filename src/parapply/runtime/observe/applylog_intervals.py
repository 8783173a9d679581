"""What daemon and sessions did in each second with work, as records of the apply log: what limits shows there."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.applylog import utc_text
from parapply.applylog_schema import BackendSample, IntervalRecord
from parapply.target.session import settings
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.control.shown import Shown
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.intake.reader import SlotReader
    from parapply.runtime.observe.applylog_writer import ApplyLogWriter
    from parapply.runtime.pool.pool import WorkerPool
    from parapply.runtime.tables.control_pool import ControlPool

_ACTIVITY: Final = sql.SQL(
    "SELECT CASE WHEN state <> 'active' OR wait_event_type = 'Client' THEN 'client'"
    " ELSE coalesce(wait_event_type || ':' || wait_event, 'CPU') END, pg_catalog.count(*)"
    " FROM pg_catalog.pg_stat_activity WHERE pid = ANY ($1::int[]) GROUP BY 1 ORDER BY 1"
)
#: States in which a worker has nothing to do on the target: no session of them is sampled.
_WAITS: Final = (WorkerState.IDLE, WorkerState.WAITING, WorkerState.STREAMING)


class Intervals:
    """Used by the monitor alone; reads the others' fields."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        writer: ApplyLogWriter,
        slot: str,
        run: str,
        control_pool: ControlPool,
        *,
        reader: SlotReader,
        batcher: Batcher,
        pool: WorkerPool,
        workers: Sequence[Worker],
        shown: Shown,
    ) -> None:
        """Begin the first interval."""
        self._writer = writer
        self._slot = slot
        self._run = run
        self._control_pool = control_pool
        self._reader = reader
        self._batcher = batcher
        self._pool = pool
        self._workers = workers
        self._shown = shown
        self._clock = asyncio.get_running_loop().time
        self._applied = 0
        self._begun = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        return self._clock(), time.thread_time(), self._reader.waited_s, self._reader.paused_s

    async def take(self) -> None:
        """End the interval, and write it unless nothing was done in it.

        Raises:
            TargetLost, TargetRefused: the target could not be asked.
        """
        begun, self._begun = self._begun, self._now()
        length_s, cpu_s, waited_s, paused_s = (now - before for now, before in zip(self._begun, begun, strict=True))
        # Not the watermark: keep-alives move it, too.
        applied, self._applied = self._applied, sum([worker.transactions for worker in self._workers])
        had_work = not self._pool.is_idle or applied != self._applied
        if not had_work:
            return
        behind_bytes = max(0, (self._shown.source_lsn or 0) - self._batcher.received_lsn)
        record = IntervalRecord(
            slot=self._slot,
            run=self._run,
            ended_at=utc_text(time.time()),
            length_s=round(length_s, 6),
            workers=len(self._workers),
            leader_cpu_s=round(cpu_s, 6),
            publisher_s=round(waited_s, 6),
            paused_s=round(paused_s, 6),
            behind_bytes=behind_bytes,
            backends=await self._sampled(),
        )
        self._writer.write([record])

    async def _sampled(self) -> tuple[BackendSample, ...]:
        pids = [worker.session.pipeline.backend_pid for worker in self._workers if worker.state not in _WAITS]
        found: Counter[str] = Counter()
        if pids:
            with settings.target_errors("asking what the workers' sessions wait for"):
                async with self._control_pool.session() as conn:
                    found.update(dict(await settings.rows(conn, _ACTIVITY, [pids])))
        return tuple([BackendSample(wait=wait, samples=samples) for wait, samples in found.items()])
