"""One epoch: from both ends connected to the first that is lost, or to the end of the daemon.

Nothing of an epoch outlives it: the next one reads the target's state again (trap T-1: what was committed but not
durable is gone after a crash, with its record). Here every task of the daemon is started, named and ended.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from parapply import probes
from parapply.errors import ApplyFailed, ParapplyError, SourceLost, TargetLost
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime.arbiter import Arbiter
from parapply.runtime.crew import Crew
from parapply.runtime.gauges import Parts
from parapply.runtime.intake import Intake
from parapply.runtime.meter import count
from parapply.runtime.monitor import Monitor
from parapply.runtime.progress import Progress
from parapply.runtime.record import batch_record, new_run, transaction_records
from parapply.runtime.requests import Requests
from parapply.runtime.stall import StallCheck
from parapply.runtime.streams import StreamLimits, Streams
from parapply.runtime.tables import Tables
from parapply.runtime.tasks import end_tasks
from parapply.runtime.trace import Trace
from parapply.runtime.two_phase import TwoPhase
from parapply.runtime.unfinished import Unfinished
from parapply.runtime.watch import CatalogueWatch
from parapply.runtime.worker import Worker
from parapply.spill import Spill
from parapply.target.commands import CommandBuilder
from parapply.wire.assembler import Assembler

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from parapply.config import ApplyConfig, Config
    from parapply.metrics.figures import Figures
    from parapply.runtime.ends import Ends
    from parapply.runtime.health import Health
    from parapply.runtime.job import Job
    from parapply.runtime.scribe import Scribe
    from parapply.runtime.signals import Signals

#: Seconds that batches in hand get to finish, when the daemon is to stop and when the publisher is gone.
_DRAIN_S = 8.0
#: Seconds for the last commit and report.
_LAST_WORD_S = 5.0
#: Bytes after which a transaction is applied in pieces inside one target transaction.
_PIECE_BYTES = 8 * 1024 * 1024
#: Of so many workers one may follow a transaction in progress; PostgreSQL's own default is two for a subscription.
_WORKERS_A_FOLLOWER = 2
#: Parts of the publisher's patience between two reports: two may be late.
_TIMEOUT_PARTS = 3


class Epoch:
    """Wires the parts together. Its fields are set once; only the parts write their own."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: Config,
        ends: Ends,
        scribe: Scribe | None,
        until_lsn: int | None,
        *,
        figures: Figures,
        health: Health,
    ) -> None:
        """Make every part; start nothing."""
        self._figures = figures
        self._health = health
        self._config = config
        self._ends = ends
        self._scribe = scribe
        self._run = new_run()
        self._log = get_logger()
        loop = asyncio.get_running_loop()
        self._unix_minus_loop_s = time.time() - loop.time()
        self._idle = asyncio.Event()
        low_lsn = ends.state.lowest_lsn
        is_relaxed = config.apply.commit_order == "relaxed"
        self._crew = Crew(
            low_lsn,
            self._changed,
            self._committed,
            is_relaxed=is_relaxed,
            max_followers=len(ends.sessions) // _WORKERS_A_FOLLOWER,
        )
        builder = CommandBuilder()
        self._arbiter = Arbiter(
            config.conflict,
            builder,
            ends.desk,
            config.target.state_schema,
            ends.state.slot_id,
            tracks_commits=ends.tracks_commits,
            counts=figures.conflicts,
        )
        self._tables = Tables(
            ends.desk,
            ends.ahead,
            config.target.session_replication_role,
            config.apply.tables,
            is_relaxed=is_relaxed,
            rules=self._arbiter.rules,
            own_origins=ends.own_origins,
        )
        piece_bytes = min(_PIECE_BYTES, config.apply.memory_limit_bytes // 4)
        two_phase = TwoPhase(ends.state.slot_id, ends.prepared)
        self._spill = Spill(config.apply.spill_dir, config.apply.spill_limit_bytes)
        streams = Streams(self._spill, self._stream_limits(piece_bytes))
        self._intake = Intake(
            ends.stream,
            Assembler(
                piece_bytes,
                streaming_parallel=ends.streaming == "parallel",
                start_lsn=ends.state.resume_lsn,
                prepared_lsns=frozenset([end_lsn for _, end_lsn in ends.prepared.values()]),
            ),
            self._tables,
            self._crew,
            Unfinished(
                streams,
                two_phase,
                self._crew,
                ends.state,
                piece_bytes=piece_bytes,
            ),
            config=self._apply_config(),
            state=ends.state,
            trace=self._trace(),
        )
        stops_on_error = config.apply.on_error == "stop"
        self._workers = [
            Worker(
                number,
                session,
                self._crew,
                builder,
                self._tables,
                self._arbiter,
                two_phase=two_phase,
                stops_on_error=stops_on_error,
                piece_bytes=piece_bytes,
            )
            for number, session in enumerate(ends.sessions, 1)
        ]
        self._progress = Progress(
            ends.control,
            ends.stream,
            self._intake,
            self._crew,
            schema=config.target.state_schema,
            slot_id=ends.state.slot_id,
            advance_interval_s=config.apply.advance_interval_s,
            status_interval_s=self._status_interval_s(),
            receive_timeout_s=config.source.receive_timeout_s,
            # Relaxed, a record says what was committed when it was made, and nothing of what commits beside it.
            is_apply_durable=config.target.synchronous_commit != "off" and not is_relaxed,
            until_lsn=until_lsn,
            on_serving=lambda: health.serving(self._shown),
        )
        self._shown = Parts(
            ends.stream,
            self._intake,
            self._crew,
            self._workers,
            self._progress,
            self._arbiter,
            streams,
            self._spill,
            two_phase,
        )
        watch = CatalogueWatch(self._tables, ends.desk, config.apply.catalogue_check_s)
        stall = StallCheck(self._crew, self._workers, ends.desk, two_phase, config.apply.stall_check_s)
        self._monitor = Monitor(
            ends.source,
            ends.desk,
            config.target.state_schema,
            ends.state.slot_id,
            crew=self._crew,
            intake=self._intake,
            progress=self._progress,
            workers=self._workers,
            tables=self._tables,
            arbiter=self._arbiter,
            foreign_waits=stall.foreign_waits,
            figures=figures,
        )
        self._requests = Requests(
            config.target,
            config.source.slot,
            ends.state.slot_id,
            ends.desk,
            intake=self._intake,
            crew=self._crew,
            progress=self._progress,
            known=ends.copies,
            awaits_two_phase=ends.awaits_two_phase,
        )
        self._parts: dict[str, Callable[[], Coroutine[None, None, None]]] = {
            "intake": self._intake.run,
            "progress": self._progress.run,
            "monitor": self._monitor.run,
            "stall-check": stall.run,
            "catalogue-watch": watch.run,
            "requests": self._requests.run,
            **{f"worker-{worker.number}": worker.run for worker in self._workers},
        }

    @property
    def low_lsn(self) -> int:
        """Return the LSN up to which everything is committed on the target."""
        return self._crew.watermark.low_lsn

    async def serve(self, signals: Signals) -> str:
        """Apply until `until_lsn` is durable or a signal asks for an end; return why it ended.

        Raises:
            ParapplyError: an end was lost or refuses; the state on the target says why, if it could be written.
        """
        await self._arbiter.look(self.low_lsn, lambda _: False)
        tasks = {name: asyncio.create_task(run(), name=name) for name, run in self._parts.items()}
        stopping = asyncio.create_task(signals.end.wait(), name="stop")
        try:
            await asyncio.wait({*tasks.values(), stopping}, return_when=asyncio.FIRST_COMPLETED)
            error = _first_error(tasks)
            is_asked = signals.end.is_set()
            reason = shown = ""
            if error is None:
                await self._drain(tasks, signals.abort)
                error = _first_error(tasks)
            if error is None:
                # What was to be another beginning may become an end for good meanwhile.
                while error is None and (shown, reason) != (farewell := _farewell(signals if is_asked else None)):
                    shown, reason = farewell
                    await self._last_word(tasks, shown, reason)
                    error = _first_error(tasks)
            elif not isinstance(error, TargetLost):
                await self._leave(error, tasks, signals.abort)
            if error is not None:
                raise error
            return reason
        finally:
            await end_tasks([*tasks.values(), stopping])
            self._health.detach()
            self._spill.close()
            self._arbiter.close()

    async def _leave(self, error: BaseException, tasks: dict[str, asyncio.Task[None]], abort: asyncio.Event) -> None:
        """Save what can be saved after an error that is not the target's end."""
        if isinstance(error, SourceLost):
            # Closed first: a publisher that is shutting down must not wait for what we still have in hand (F9).
            await self._ends.stream.close()
        if not isinstance(error, ApplyFailed):
            await self._drain(tasks, abort)
        shown = "reconnecting" if isinstance(error, SourceLost) else "stopped"
        reason = error.line() if isinstance(error, ParapplyError) else type(error).__name__
        await self._last_word(tasks, shown, reason)

    async def _last_word(self, tasks: dict[str, asyncio.Task[None]], shown: str, reason: str) -> None:
        """Leave both ends with what is true: the watermark durable and reported, the state for people.

        A target or publisher that is lost by now is the caller's to see in the task.
        """
        progress = tasks["progress"]
        if progress.done() and (progress.cancelled() or progress.exception() is not None):
            return
        self._progress.finish(shown, reason)
        if progress.done():
            progress = tasks["progress"] = asyncio.create_task(self._progress.run(), name="progress")
        # A short run may have planned tables and met its error since the monitor's last look.
        look = asyncio.create_task(self._monitor.show(), name="last-look")
        await asyncio.wait({progress, look}, timeout=_LAST_WORD_S)
        await end_tasks([look])

    async def _drain(self, tasks: dict[str, asyncio.Task[None]], abort: asyncio.Event) -> None:
        """Read no more; finish the whole transactions in hand, within a time limit."""
        self._health.left("draining", "")
        probes.probe(probes.DRAIN)
        await end_tasks([tasks["intake"]])
        self._log.info("drain_started", n_transactions=sum([job.n_transactions for job in self._crew.jobs()]))
        self._changed()
        idle = asyncio.create_task(self._idle.wait(), name="drained")
        aborting = asyncio.create_task(abort.wait(), name="abort")
        workers = [task for name, task in tasks.items() if name.startswith("worker-")]
        try:
            await asyncio.wait({idle, aborting, *workers}, timeout=_DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if not idle.done() and _first_error(tasks) is None:
                self._log.warning("drain_aborted", reason="a second signal" if abort.is_set() else "time limit")
        finally:
            await end_tasks([idle, aborting])

    def _changed(self) -> None:
        self._intake.worker_changed()
        self._requests.moved.set()
        head = self._crew.head
        # A large transaction that has not come whole cannot be finished; it is always the last.
        if head is None or (self._intake.is_inside_large and head.pieces is not None):
            self._idle.set()
        else:
            self._idle.clear()

    def _committed(self, job: Job) -> None:
        self._progress.committed(job)
        self._intake.growth.committed(job)
        count(self._figures, job)
        if self._scribe is not None:
            of = (job, self._config.source.slot, self._run, self._unix_minus_loop_s)
            self._scribe.write([batch_record(*of), *transaction_records(*of)])
        self._log.debug(
            "batch_committed",
            seq=job.batch.seq,
            worker=job.worker,
            end_lsn=format_lsn(job.batch.end_lsn),
            n_transactions=job.n_transactions,
            n_changes=job.n_changes,
        )

    def _trace(self) -> Trace | None:
        wants = self._scribe is not None and self._config.applylog.detail == "transaction"
        return Trace(self._tables, self._config.apply.table_lock_threshold) if wants else None

    def _stream_limits(self, piece_bytes: int) -> StreamLimits:
        memory_bytes = self._config.apply.memory_limit_bytes // 4
        return StreamLimits(self._config.apply.stream_start_bytes, memory_bytes, 2 * piece_bytes)

    def _apply_config(self) -> ApplyConfig:
        config = self._config.apply
        if not self._arbiter.rules.needs_commit_times or config.max_batch_transactions == 1:
            return config
        # Merged transactions would have one commit time on the target, and the last update would not win everywhere.
        self._log.info("settings_lowered", setting="apply.max_batch_transactions", value=1)
        return msgspec.structs.replace(config, max_batch_transactions=1)

    def _status_interval_s(self) -> float:
        wanted_s = self._config.source.status_interval_s
        timeout_s = self._ends.source_facts.wal_sender_timeout_s
        if not timeout_s or wanted_s <= timeout_s / _TIMEOUT_PARTS:
            return wanted_s
        self._log.info("settings_lowered", setting="source.status_interval_s", value=timeout_s / _TIMEOUT_PARTS)
        return timeout_s / _TIMEOUT_PARTS


def _farewell(asked: Signals | None) -> tuple[str, str]:
    """Return state and reason that people shall see of an epoch that ends without an error, asked for or not."""
    if asked is None:
        return "stopped", "everything up to --until is durable"
    return "stopped" if asked.is_stop else "reconnecting", asked.why


def _first_error(tasks: dict[str, asyncio.Task[None]]) -> BaseException | None:
    """Return the error to act on: a verdict on the data before a lost end, which may be its consequence."""
    errors = [task.exception() for task in tasks.values() if task.done() and not task.cancelled()]
    found = [error for error in errors if error is not None]
    found.sort(key=lambda error: (not isinstance(error, ApplyFailed), not isinstance(error, TargetLost)))
    return found[0] if found else None
