"""What people see: the lag, what each worker does and waits for, how tables are applied. Nothing here decides."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from parapply.errors import SourceLost
from parapply.runtime.meter import take_counts
from parapply.source import slot
from parapply.target import display, state
from parapply.target.state import WorkerRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.metrics.figures import Figures
    from parapply.runtime.arbiter import Arbiter
    from parapply.runtime.crew import Crew
    from parapply.runtime.desk import Desk
    from parapply.runtime.intake import Intake
    from parapply.runtime.job import Job
    from parapply.runtime.progress import Progress
    from parapply.runtime.tables import Tables
    from parapply.runtime.worker import Worker

#: Seconds between two looks: what a person watching expects.
_INTERVAL_S = 1.0
#: Before the first look: the first announced tables are looked up over the same few sessions, and the stream waits.
_FIRST_LOOK_S = 0.2
#: Seconds the stream may go on after the publisher ended our plain session: a fast stop ends plain sessions first and
#: then waits for the stream, which should end by itself once all is confirmed (trap T-9). If it is still there then,
#: it is held up by us, and nothing is lost by leaving (F9).
_LEAVE_S = 3.0


class Monitor:
    """Reads the others' fields; writes only what progress shows (`source_lsn`, `lag_s`)."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        source: slot.Connection,
        desk: Desk,
        schema: str,
        slot_id: int,
        *,
        crew: Crew,
        intake: Intake,
        progress: Progress,
        workers: Sequence[Worker],
        tables: Tables,
        arbiter: Arbiter,
        foreign_waits: Mapping[int, str],
        figures: Figures,
    ) -> None:
        """Keep whom to look at; `foreign_waits` says what a worker waits for on the target, by its number."""
        self._source = source
        self._desk = desk
        self._schema = schema
        self._slot_id = slot_id
        self._crew = crew
        self._intake = intake
        self._progress = progress
        self._workers = workers
        self._tables = tables
        self._arbiter = arbiter
        self._foreign_waits = foreign_waits
        self._figures = figures
        # The rows that show them are made anew in each epoch.
        figures.changed = dict.fromkeys(figures.tables)
        self._clock = asyncio.get_running_loop().time
        #: The publisher's positions not yet applied, each with the time it was first seen.
        self._seen: deque[tuple[int, float]] = deque()

    async def run(self) -> None:
        """Look once a second until cancelled.

        Raises:
            SourceLost: the plain session on the publisher ended, and the stream did not end by itself.
            TargetLost, TargetRefused: nothing can be shown.
        """
        await asyncio.sleep(_FIRST_LOOK_S)
        while True:
            try:
                flush_lsn, now_us = await slot.position(self._source)
            except SourceLost:
                await asyncio.sleep(_LEAVE_S)
                raise
            self._progress.source_lsn = flush_lsn
            self._progress.lag_s = self._lag_s(flush_lsn, now_us)
            self._progress.looked_s = self._clock()
            trouble = self._arbiter.trouble
            self._progress.shown = ("retrying", trouble) if trouble else ("running", "")
            await self.show()
            await asyncio.sleep(_INTERVAL_S)

    def _lag_s(self, flush_lsn: int, now_us: int) -> float:
        """Return how far the target is behind: the age of the oldest source position or transaction not applied."""
        now_s = self._clock()
        low_lsn = self._crew.watermark.low_lsn
        if flush_lsn > low_lsn and (not self._seen or self._seen[-1][0] < flush_lsn):
            self._seen.append((flush_lsn, now_s))
        while self._seen and self._seen[0][0] <= low_lsn:
            self._seen.popleft()
        lag_s = now_s - self._seen[0][1] if self._seen else 0.0
        oldest_us = self._intake.oldest_commit_time_us
        if oldest_us is not None:
            lag_s = max(lag_s, (now_us - oldest_us) / 1e6)
        return lag_s

    async def show(self) -> None:
        """Write what the workers do and how the tables are applied.

        Raises:
            TargetLost, TargetRefused: it could not be written.
        """
        await self._arbiter.look(self._crew.watermark.low_lsn, self._is_committing)
        rows = [self._row(worker) for worker in self._workers]
        tables = self._tables.take_rows()
        async with self._desk.session() as conn:
            await state.write_workers(conn, self._schema, self._slot_id, rows)
            if tables:
                await state.write_tables(conn, self._schema, self._slot_id, tables)
            counts = take_counts(self._figures)
            if counts:
                await display.write_counts(conn, self._schema, self._slot_id, counts)

    def _is_committing(self, end_lsn: int) -> bool:
        """Tell whether COMMIT was sent for the transaction that ends there."""
        jobs = [worker.job for worker in self._workers if worker.state == "committing" and worker.job is not None]
        return any(job.batch.first_lsn <= end_lsn <= job.batch.end_lsn for job in jobs)

    def _row(self, worker: Worker) -> WorkerRow:
        job = worker.job
        since_s = datetime.now(UTC).timestamp() - (self._clock() - worker.since_s)
        return WorkerRow(
            worker=worker.number,
            pid=worker.session.pipeline.backend_pid,
            state=worker.state,
            batch_seq=job.batch.seq if job else None,
            end_lsn=job.batch.end_lsn or None if job else None,
            waits_for=self._waits_for(worker),
            since=datetime.fromtimestamp(since_s, UTC),
            transactions=worker.transactions,
            changes=worker.changes,
        )

    def _waits_for(self, worker: Worker) -> str | None:
        if worker.number in self._foreign_waits:
            return self._foreign_waits[worker.number]
        if worker.state in ("waiting", "retrying") and worker.job is not None:
            return self._turn_waits_for(worker.job)
        if worker.state == "idle":
            for job in self._crew.waiting_jobs():
                if waits := self._crew.waits_of(job):
                    return f"batch {job.batch.seq} waits for {waits[-1]}"
        return None

    def _turn_waits_for(self, job: Job) -> str | None:
        """Say what a job waits for that a worker has."""
        head = self._crew.head
        if head is None or head is job:
            return None
        late = self._crew.late_waits_of(job)
        turn = f"its turn to commit, after batch {head.batch.seq}"
        if late:
            return f"{late[-1]}" if self._crew.is_relaxed else f"{turn}; part of it for {late[-1]}"
        return turn
