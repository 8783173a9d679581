"""The workers of an epoch: started, watched, and, with `apply.workers = "auto"`, made more or fewer.

Only a worker that has nothing in hand leaves, and only while the head has a worker (`Flight.release`). A session
that cannot be opened is no error: the present workers go on, and more sessions are tried later.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.engine.workers import LoadSample
from parapply.errors import ParapplyError
from parapply.logs import get_logger
from parapply.runtime.apply.worker import Worker
from parapply.runtime.rest import LONG_S
from parapply.runtime.worker_sessions import connections_left
from parapply.target.session import settings
from parapply.tasks import end_tasks
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.engine.workers import Scaling, Step
    from parapply.runtime.apply.transaction import WorkerKit
    from parapply.runtime.pool.pool import WorkerPool
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.worker_sessions import WorkerSessions
    from parapply.target.session.session import WorkerSession

#: Seconds between two looks while changes are being applied, and while none are.
_LOOK_S: Final = 0.075
_IDLE_LOOK_S: Final = 0.25
#: Seconds until the target is asked again after no session waited for its disk: a question takes the leader as long as
#: many changes.
_ASK_AGAIN_S: Final = 0.3
#: Seconds without a further attempt after the target had no session for one more worker.
_REFUSED_S: Final = 30.0
#: Workers for each one that may follow a transaction in progress; PostgreSQL's own default is two for a subscription.
_WORKERS_A_FOLLOWER: Final = 2
_EXECUTING: Final = (WorkerState.EXECUTING, WorkerState.RETRYING)

#: Sessions of one role see each other's waits. Source: PostgreSQL manual, "Wait Events of Type IO", "IPC".
_WAITING = sql.SQL(
    "SELECT pg_catalog.count(*) FROM pg_catalog.unnest($1::int[]) AS own (pid)"
    " CROSS JOIN LATERAL pg_catalog.pg_stat_get_activity(own.pid) AS a"
    " WHERE a.wait_event_type = 'IO' OR pg_catalog.lower(a.wait_event) = 'bufferio'"
)


class WorkerTasks:
    """Its task, named `sessions`, starts and ends the workers' tasks; the monitor and others read."""

    def __init__(
        self,
        pool: WorkerPool,
        sessions: WorkerSessions,
        kit: WorkerKit,
        control_pool: ControlPool,
        scaling: Scaling | None,
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self.kit = kit
        self._control_pool = control_pool
        self._scaling = scaling
        #: In the order of their numbers; the list itself stays the same.
        self.workers: list[Worker] = []
        #: Number and reason of the last step, for people; empty before the first.
        self.reason = ""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._opening: asyncio.Task[list[WorkerSession | ParapplyError]] | None = None
        self._opening_numbers: list[int] = []
        self._refused_until_s = self._ask_from_s = 0.0
        self._is_told_refused = False
        #: Batches and changes committed by workers that have left.
        self._left_batches = self._left_changes = 0
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()

    def add(self, opened: Sequence[tuple[int, WorkerSession]]) -> None:
        """Add the workers of sessions; workers added before `start` are started by it."""
        for number, session in opened:
            worker = Worker(number, session, self.kit)
            self.workers.append(worker)
            self.workers.sort(key=lambda one: one.number)
            self._pool.flight.state.n_workers += 1
            self._pool.flight.max_followers = self._pool.flight.state.n_workers // _WORKERS_A_FOLLOWER

    def start(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Start the workers as tasks among the epoch's; later workers are also added there, leaving ones removed."""
        self._tasks = tasks
        for worker in self.workers:
            self._start(worker)
        if self._scaling is not None and len(self.workers) < self._scaling.wanted:
            # The connector has said so.
            self._is_told_refused = True
            self._refuse(self._scaling)

    def _start(self, worker: Worker) -> None:
        name = f"worker-{worker.number}"
        task = self._tasks[name] = asyncio.create_task(worker.run(), name=name)
        task.add_done_callback(lambda _: self._news.set())
        worker.session.pipeline.lost.add_done_callback(lambda _: self._news.set())

    async def run(self) -> None:
        """Watch the workers and their number; return when one has failed, whose task says why.

        Raises:
            TargetLost: a worker's session has ended; the worker itself sees it only with its next statement.
        """
        try:
            while not self._has_failed():
                await self._close_left()
                for worker in self.workers:
                    if worker.session.pipeline.lost.done():
                        raise worker.session.pipeline.lost.result()
                if self._scaling is not None:
                    await self._look(self._scaling)
                await self._wait()
        finally:
            self._pool.release(0)
            if self._opening is not None:
                await end_tasks([self._opening])

    async def _wait(self) -> None:
        scaling, is_idle = self._scaling, not self._pool.flight.state.jobs
        self._news.clear()
        if self._has_failed() or any(worker.session.pipeline.lost.done() for worker in self.workers):
            return
        if scaling is None:
            await self._news.wait()
            return
        look_s = _IDLE_LOOK_S if is_idle else _LOOK_S
        may_rest = scaling.is_at_first and self._opening is None
        await self._pool.rest.sleep(look_s, LONG_S if may_rest else look_s, until=self._news)

    def _task(self, worker: Worker) -> asyncio.Task[None]:
        return self._tasks[f"worker-{worker.number}"]

    def _has_failed(self) -> bool:
        return any(task.done() and not _has_left(task) for task in map(self._task, self.workers))

    async def _close_left(self) -> None:
        for worker in [worker for worker in self.workers if _has_left(self._task(worker))]:
            del self._tasks[f"worker-{worker.number}"]
            self.workers.remove(worker)
            self._left_batches += worker.batches
            self._left_changes += worker.changes
            self._pool.flight.max_followers = self._pool.flight.state.n_workers // _WORKERS_A_FOLLOWER
            await self._sessions.close(worker.number)
            self._log.debug("worker_left", worker=worker.number, n_transactions=worker.transactions)

    async def _look(self, scaling: Scaling) -> None:
        if self._opening is not None:
            if self._opening.done():
                self._take_opened(scaling, self._opening)
            return
        if len(self.workers) > scaling.wanted:
            # Those that are to leave have not all left.
            return
        executing = [worker for worker in self.workers if worker.state in _EXECUTING]
        is_pressed = self._pool.flight.is_pressed and 2 * len(executing) >= len(self.workers)
        may_grow = scaling.may_grow() and self._clock() >= self._refused_until_s
        is_asked = is_pressed and may_grow and self._clock() >= self._ask_from_s
        waiting = await self._waiting(executing) if is_asked else None
        if waiting == 0.0:
            self._ask_from_s = self._clock() + _ASK_AGAIN_S
        step = scaling.look(self._sample(is_pressed=is_pressed, waiting=waiting))
        if step is not None:
            self._step(scaling, step)

    def _sample(self, *, is_pressed: bool, waiting: float | None) -> LoadSample:
        workers = self.workers
        return LoadSample(
            now_s=self._clock(),
            n_workers=len(workers),
            n_busy=sum([worker.job is not None for worker in workers]),
            is_pressed=is_pressed,
            waiting=waiting,
            n_batches=self._left_batches + sum([worker.batches for worker in workers]),
            n_changes=self._left_changes + sum([worker.changes for worker in workers]),
        )

    async def _waiting(self, executing: Sequence[Worker]) -> float:
        """Return the part of the sessions that wait for the target's disk at this moment."""
        with settings.target_errors("asking what the workers wait for"):
            async with self._control_pool.session() as conn:
                pids = [worker.session.pipeline.backend_pid for worker in executing]
                ((n_waiting,),) = await settings.rows(conn, _WAITING, [pids])
        return int(n_waiting) / len(pids)

    def _step(self, scaling: Scaling, step: Step) -> None:
        n_more = step.n_workers - len(self.workers)
        if n_more > 0 and self._clock() < self._refused_until_s:
            scaling.stay(self._sample(is_pressed=False, waiting=None))
            return
        self._tell(step.n_workers, step.reason)
        if n_more <= 0:
            self._pool.release(-n_more)
            return
        taken = {worker.number for worker in self.workers}
        free = [number for number in range(1, step.n_workers + 1) if number not in taken]
        self._opening_numbers = free[:n_more]
        self._opening = asyncio.create_task(self._open(), name="workers-opening")
        self._opening.add_done_callback(lambda _: self._news.set())

    async def _open(self) -> list[WorkerSession | ParapplyError]:
        async with self._control_pool.session() as conn:
            n_left, error = await connections_left(conn)
        numbers = self._opening_numbers
        opened = await asyncio.gather(*[self._sessions.open_one_more(number) for number in numbers[:n_left]])
        return [*opened, *[error for _ in numbers[n_left:]]]

    def _take_opened(self, scaling: Scaling, opening: asyncio.Task[list[WorkerSession | ParapplyError]]) -> None:
        self._opening = None
        n_before = len(self.workers)
        found = list(zip(self._opening_numbers, opening.result(), strict=True))
        self.add([(number, session) for number, session in found if not isinstance(session, ParapplyError)])
        errors = [error for _, error in found if isinstance(error, ParapplyError)]
        for worker in self.workers:
            if f"worker-{worker.number}" not in self._tasks:
                self._start(worker)
        if not errors:
            self._is_told_refused = False
            return
        self._refuse(scaling)
        if not self._is_told_refused:
            self._is_told_refused = True
            self._log.warning("workers_reduced", workers=len(self.workers), error=str(errors[0]))
        if len(self.workers) > n_before:
            self._tell(len(self.workers), "the target has no session for more")

    def _refuse(self, scaling: Scaling) -> None:
        self._refused_until_s = self._clock() + _REFUSED_S
        scaling.stay(self._sample(is_pressed=False, waiting=None))

    def _tell(self, n_workers: int, reason: str) -> None:
        self.reason = f"{n_workers} workers: {reason}"
        self._log.info("workers_changed", workers=n_workers, reason=reason)


def _has_left(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
