"""One epoch: from both ends connected to the first that is lost, or to the end of the daemon.

Nothing of an epoch outlives it: the next one reads the target's state again (trap T-1: what was committed but not
durable is gone after a crash, with its record). Here every task of the daemon is started, named and ended.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from parapply import failpoints, logs
from parapply.conflict.skips import Skips
from parapply.engine.durability import Durability, Reporting
from parapply.engine.flight import Flight
from parapply.engine.intake import DueTimes, Room
from parapply.engine.job import SetJob
from parapply.engine.state import EngineState
from parapply.engine.workers import Scaling
from parapply.errors import ApplyFailed, ConfigError, ParapplyError, SlotLost, SourceLost, SourceRefused, TargetLost
from parapply.logs import get_logger, redact_text
from parapply.model import format_lsn, format_time
from parapply.retention import wal_limit
from parapply.runtime.apply.conflicts import ConflictHandler
from parapply.runtime.apply.deadlocks import StallCheck
from parapply.runtime.apply.transaction import ApplyRules, WorkerKit, command_rules
from parapply.runtime.control.catch_up_watch import CatchUpWatch
from parapply.runtime.control.later_commands import LaterCommands
from parapply.runtime.control.progress import Progress
from parapply.runtime.control.requests import Awaited, Requests
from parapply.runtime.control.sequence_carrier import SequenceCarrier
from parapply.runtime.intake.batcher import Admission, Batcher
from parapply.runtime.intake.commands import CommandTransactions
from parapply.runtime.intake.intake import Intake
from parapply.runtime.intake.reader import SlotReader
from parapply.runtime.intake.special import SpecialTransactions
from parapply.runtime.observe.applylog_intervals import Intervals
from parapply.runtime.observe.applylog_records import LogRun, TargetNames, batch_record, new_run, transaction_records
from parapply.runtime.observe.gauges import Parts
from parapply.runtime.observe.monitor import Monitor, Publisher
from parapply.runtime.pool.pool import WorkerPool
from parapply.runtime.pool.streams import StreamBuffers, StreamLimits
from parapply.runtime.pool.two_phase import TwoPhase
from parapply.runtime.sessions import LACKS_ORIGINS
from parapply.runtime.tables.copied import Copied
from parapply.runtime.tables.plans import TablePlans
from parapply.runtime.tables.watch import CatalogueWatch
from parapply.runtime.worker_tasks import WorkerTasks
from parapply.source import history, slot
from parapply.source.catch_up import behind_bytes, range_limits
from parapply.spill import Spill
from parapply.target.catalogue.facts import privileges_for
from parapply.target.session.origins import origin_name
from parapply.target.sql.commands import CommandBuilder
from parapply.target.state import slots as state
from parapply.tasks import end_tasks
from parapply.vocabulary import CommandOutcome, DaemonState, Mode, Reading, RetryReason
from parapply.wire.assembler import Assembler
from parapply.wire.omission import Omission

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from parapply.config import ApplyConfig, Config
    from parapply.engine.job import Job
    from parapply.engine.shares import Share
    from parapply.metrics.figures import Figures
    from parapply.model import Until
    from parapply.runtime.observe.applylog_writer import ApplyLogWriter
    from parapply.runtime.observe.health import Health
    from parapply.runtime.sessions import Sessions
    from parapply.runtime.signals import Signals
    from parapply.spill import SpillRoom

#: Seconds that batches in hand get to finish, when the daemon is to stop and when the publisher is gone.
_DRAIN_S = 8.0
#: Seconds for the last commit and report, and for moving the slot where ranges are read.
_LAST_WORD_S = 5.0
#: Bytes after which a transaction is applied in pieces inside one target transaction.
_PIECE_BYTES = 8 * 1024 * 1024
#: The same where apply.max_changes_per_s must also hold within a transaction.
_THROTTLED_PIECE_BYTES = 128 * 1024
#: server_version_num of the first publisher that announces the tables of a renamed schema again.
_RENAMED_SINCE = 160_000
#: Parts of the publisher's patience between two reports: two may be late.
_TIMEOUT_PARTS = 3

#: Text for people while the publisher keeps a transaction that could not be kept here.
_PAUSED = "streaming is off until {}: a transaction in progress could not be kept in apply.spill_dir"


class Epoch:
    """Wires the parts together. Its fields are set once; only the parts write their own."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: Config,
        ends: Sessions,
        applylog_writer: ApplyLogWriter | None,
        until: Until,
        *,
        share: Share,
        spill_room: SpillRoom | None,
        figures: Figures,
        health: Health,
    ) -> None:
        self._share = share
        self._figures = figures
        self._health = health
        self._config = config
        self._until = until
        self._ends = ends
        self._applylog_writer = applylog_writer
        self._log = get_logger()
        loop = asyncio.get_running_loop()
        self._log_run = LogRun(config.source.slot, new_run(), time.time() - loop.time())
        self._idle = asyncio.Event()
        self._place = state.StatePlace(config.target.state_schema, config.source.slot, ends.state.slot_id)
        is_relaxed = config.apply.commit_order == "relaxed"
        self._engine = EngineState(ends.state.low_lsn, loop.time(), is_relaxed=is_relaxed)
        self._engine.lag_s = ends.state.lag_s
        self._engine.note = _note(ends, config)
        self._pool = WorkerPool(Flight(self._engine, most_places=ends.most_places))
        self._conflict_handler = ConflictHandler(
            config.conflict,
            Skips(config.target.state_schema, ends.state.slot_id, ends.large_ends),
            ends.control_pool,
            figures,
        )
        self._piece_bytes = _piece_bytes(config.apply, ends.state)
        self._spill = Spill(config.apply.spill_dir, config.apply.spill_limit_bytes, spill_room)
        self._streams = StreamBuffers(self._spill, self._stream_limits(self._piece_bytes))
        self._make_tables()
        self._make_reading()
        self._make_workers()
        self._make_intake()
        self._parts = self._make_observers()
        if until.lsn is None and until.time_us is None:
            self._pool.rest.allow(self._may_rest)
        self._pool.listen(self)

    def _make_tables(self) -> None:
        config, ends, rules = self._config, self._ends, self._conflict_handler.rules
        self._tables = TablePlans(
            ends.control_pool,
            ends.ahead,
            config.target.session_replication_role,
            config.apply.tables,
            is_relaxed=self._engine.is_relaxed,
            rules=rules,
            own_origins=origin_name(ends.state.slot_id, ""),
            privileges=privileges_for(ends.published, overwrites=rules.overwrites),
            mapping=None if config.mapping.is_empty else config.mapping,
            apply_as=config.target.apply_as,
        )
        self._target_names = TargetNames(self._tables.target_names)
        self._two_phase = TwoPhase(
            ends.state.slot_id,
            ends.prepared,
            slot.StreamSender(ends.source, config.source.slot, ends.stream.sender_pid, config.source.receive_timeout_s),
            is_each_noted=ends.source_facts.server_version_num >= history.EACH_NOTED_SINCE
            and config.source.origin == "any",
        )

    def _make_reading(self) -> None:
        config, ends = self._config, self._ends
        assembler = Assembler(
            self._piece_bytes,
            streaming_parallel=ends.streaming == "parallel",
            start_lsn=ends.state.resume_lsn,
            prepared_lsns=ends.proved_lsns.union([end_lsn for _, end_lsn in ends.prepared.values()]),
        )
        omission = Omission(config.mapping.omitted_of) if config.mapping.omits else None
        self._reader = SlotReader(ends.stream, assembler, omission)
        self._batcher = Batcher(
            self._reader,
            self._tables,
            self._pool,
            config=self._apply_config(),
            state=ends.state,
            most_places=ends.most_places,
            notes_transactions=self._applylog_writer is not None and config.applylog.detail == "transaction",
        )
        copied = Copied(
            config, ends.state, ends.source, ends.control_pool,
            tables=self._tables, known=ends.copies, taken=ends.taken, names=ends.names,
        )  # fmt: skip
        copied.starts.leave_out(ends.source_facts.state_schemas)
        self._admission = Admission(self._batcher, copied, self._two_phase, ends.state)

    def _make_workers(self) -> None:
        config, ends, two_phase = self._config, self._ends, self._two_phase
        self._kit = WorkerKit(
            pool=self._pool,
            builder=CommandBuilder(
                lambda: two_phase.n_pending > 0,
                may_change_role=ends.may_change_role,
                may_lock_rows=self._tables.may_lock_rows,
            ),
            tables=self._tables,
            conflict_handler=self._conflict_handler,
            two_phase=two_phase,
            rules=ApplyRules(
                commands=command_rules(config, ends.state.slot_id),
                piece_bytes=self._piece_bytes,
                stops_on_error=config.apply.on_error == "stop",
                tracks_commits=ends.tracks_commits,
                times_commits=self._applylog_writer is not None,
            ),
            is_applied=ends.state.is_applied,
        )
        self._worker_tasks = WorkerTasks(self._pool, ends.opener, self._kit, ends.control_pool, self._scaling())
        self._worker_tasks.add(ends.sessions)

    def _make_intake(self) -> None:
        config, ends = self._config, self._ends
        durability = Durability(self._pool.flight, self._reporting(), asyncio.get_running_loop().time())
        self._progress = Progress(ends.control, self._place, self._reader, self._batcher, durability)
        self._later = LaterCommands(
            config, ends.state.slot_id, ends.control_pool, tables=self._tables, figures=self._figures
        )
        commands = CommandTransactions(
            self._admission,
            self._later,
            config.ddl,
            announces_renamed=ends.source_facts.server_version_num >= _RENAMED_SINCE,
        )
        self._intake = Intake(
            self._admission,
            SpecialTransactions(self._admission, commands, self._streams, piece_bytes=self._piece_bytes),
            self._batcher,
            room=Room(self._pool.flight, self._share),
            due=DueTimes(config.apply.delay_s, self._until.time_us),
            reports=self._progress,
        )

    def _make_observers(self) -> dict[str, Callable[[], Coroutine[None, None, None]]]:
        """Return the function of each task of the epoch, by the task's name."""
        config, ends = self._config, self._ends
        stall = StallCheck(
            self._worker_tasks.workers,
            ends.control_pool,
            self._kit,
            place=self._place,
            stall_check_s=config.apply.stall_check_s,
        )
        limits = range_limits(config)
        behind = CatchUpWatch(
            self._batcher,
            self._streams,
            self._log_running,
            limits=limits,
            behind_bytes=behind_bytes(ends.source_facts, limits),
            pause_s=config.source.catch_up_pause_s,
        )
        login = config.source.login
        self._monitor = Monitor(
            Publisher(
                ends.source,
                ends.ask_position,
                ends.source_facts.timeline,
                lambda: slot.replayed_timeline(ends.source, login),
                wal_limit(config.source),
            ),
            ends.control_pool,
            self._place,
            self._worker_tasks,
            batcher=self._batcher,
            intervals=Intervals(
                self._applylog_writer,
                self._log_run,
                ends.control_pool,
                batcher=self._batcher,
                workers=self._worker_tasks.workers,
                figures=self._figures,
            ),
        )
        self._shown_parts = Parts(
            self._admission, self._worker_tasks, self._progress, self._monitor, self._streams, self._spill
        )
        self._requests = Requests(
            config.target,
            self._place,
            ends.control_pool,
            admission=self._admission,
            progress=self._progress,
            awaited=Awaited(ends.awaits_two_phase, ends.whole_until_lsn, config.apply.delay_s),
        )
        parts = {
            "reader": ends.stream.run,
            "intake": self._intake.run,
            "progress": self._report,
            "reports": self._progress.report_at_once,
            "monitor": self._monitor.run,
            "catch-up-watch": behind.run,
            "stall-check": stall.run,
            "catalogue-watch": CatalogueWatch(
                self._tables, ends.control_pool, config.apply.catalogue_check_s, self._pool.rest
            ).run,
            "requests": self._requests.run,
            "sessions": self._worker_tasks.run,
            "later-commands": self._later.run,
        }
        return {**parts, "sequences": SequenceCarrier(config).run} if config.sequences.interval_s else parts

    async def _log_running(self) -> bool:
        # Without ranges the other end may be the files of a capture, and the session the target's.
        return self._config.source.catch_up != "off" and await slot.log_running(self._ends.source)

    def _may_rest(self) -> bool:
        """Return whether nothing is open, on its way, or not durable yet, and nothing is asked that does not call."""
        engine, batcher, stream = self._engine, self._batcher, self._ends.stream
        is_open = engine.jobs or not batcher.holds_nothing or batcher.is_taking or batcher.reader.is_paused
        is_behind = engine.lag_s != 0.0 or engine.durable_lsn < batcher.taken_lsn
        is_special = stream.reading is not Reading.STREAM or stream.is_synchronous
        is_awaited = self._admission.copied.is_under_way or self._requests.are_open
        return not (
            is_open
            or is_behind
            or is_special
            or is_awaited
            or len(self._streams)
            or self._two_phase.n_pending
            or self._conflict_handler.skips
            or engine.troubles
            or self._monitor.moves.are_under_way
            or self._progress.is_held_up
            or not self._requests.hears_calls
        )

    @property
    def low_lsn(self) -> int:
        """Return the LSN up to which everything is committed on the target."""
        return self._pool.flight.state.watermark.low_lsn

    async def serve(self, signals: Signals) -> str:
        """Apply until everything up to `until` is durable or a signal asks for an end; return why it ended.

        Raises:
            ConfigError: the target has something already that is later than `until`.
            ParapplyError: an end was lost or refuses; the state on the target says why, if it could be written.
        """
        await self._refuse_past()
        await self._conflict_handler.begin(self._ends.control, self.low_lsn)
        tasks = {name: asyncio.create_task(run(), name=name) for name, run in self._parts.items()}
        # The task of the sessions ends when one of the workers has failed, which come and go.
        lasting = [*tasks.values()]
        self._worker_tasks.start(tasks)
        stopping = asyncio.create_task(signals.end.wait(), name="stop")
        try:
            await asyncio.wait([*lasting, stopping], return_when=asyncio.FIRST_COMPLETED)
            error = _first_error(tasks)
            is_asked = signals.end.is_set()
            shown: DaemonState | None = None
            reason = ""
            if error is None:
                await self._drain(tasks, signals.abort)
                error = _first_error(tasks)
            if error is None:
                # A planned restart of the epoch may have become the end of the daemon.
                while error is None and (shown, reason) != (farewell := _farewell(signals if is_asked else None)):
                    shown, reason = farewell
                    await self._last_word(tasks, shown, reason)
                    error = _first_error(tasks)
                if error is None:
                    await self._confirm(tasks)
            elif not isinstance(error, TargetLost):
                await self._leave(error, tasks, signals.abort)
            if error is not None:
                raise error
            return reason
        finally:
            # First, because it starts others.
            await end_tasks([tasks["sessions"]])
            await end_tasks([*tasks.values(), stopping])
            self._health.detach()
            self._conflict_handler.close()
            # A thread that the disk keeps waiting holds a file's lock; the other slots of this process go on.
            await asyncio.to_thread(self._spill.close)

    async def _report(self) -> None:
        """Say that this daemon serves, once a first report is sent; then keep both ends up to date."""
        self._progress.report()
        self._health.serving(self._shown_parts)
        await self._progress.run()

    async def _refuse_past(self) -> None:
        """Refuse a time of `--until` that the target has passed: it would not be as it was then."""
        until_us = self._until.time_us
        if until_us is None:
            return
        async with self._ends.control_pool.session() as conn:
            newest_us = await state.newest_commit_time_us(
                conn, self._config.target.state_schema, self._ends.state.slot_id
            )
        if newest_us is not None and newest_us > until_us:
            raise ConfigError(
                f"--until {format_time(until_us)}: the target has applied a transaction already that committed at "
                f"{format_time(newest_us)}",
                hint="what is applied cannot be taken back; restore the target, or name a later time",
            )

    async def _leave(self, error: BaseException, tasks: dict[str, asyncio.Task[None]], abort: asyncio.Event) -> None:
        """Save as much as possible after an error that is not the target's end."""
        if isinstance(error, SourceLost):
            # Close it first, because a publisher that is shutting down must not wait for the work we still have in hand
            # (F9). The reader before it, because it may be waiting for the socket that is closed.
            await end_tasks([tasks["reader"]])
            await self._ends.stream.close()
        if not isinstance(error, ApplyFailed):
            await self._drain(tasks, abort)
        shown = DaemonState.LOST if isinstance(error, SlotLost) else DaemonState.STOPPED
        shown = DaemonState.RECONNECTING if isinstance(error, SourceLost) else shown
        reason = redact_text(error.line()) if isinstance(error, ParapplyError) else type(error).__name__
        await self._last_word(tasks, shown, reason)
        if not isinstance(error, SourceLost):
            await self._confirm(tasks)

    async def _confirm(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Move the slot to the durable position if no stream has reported it, because ranges are read.

        An error ends nothing here: the slot keeps more WAL until the next start, and that starts at the watermark.
        """
        stream, lsn = self._ends.stream, self._pool.flight.state.durable_lsn
        if stream.reading is not Reading.RANGES or lsn <= stream.confirmed_flush_lsn:
            return
        # The reader also moves the slot.
        await end_tasks([tasks["reader"]])
        with suppress(SourceLost, SourceRefused, TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await slot.advance_slot(self._ends.source, self._config.source.slot, lsn)

    async def _last_word(self, tasks: dict[str, asyncio.Task[None]], shown: DaemonState, reason: str) -> None:
        """Leave both ends up to date: the watermark durable and reported, the state for people.

        If the target or publisher is lost by now, the caller sees that in the task.
        """
        progress = tasks["progress"]
        if progress.done() and (progress.cancelled() or progress.exception() is not None):
            return
        self._progress.finish(shown, reason)
        if progress.done():
            progress = tasks["progress"] = asyncio.create_task(self._progress.run(), name="progress")
        # A short run may have planned tables and met its error since the monitor's last check.
        look = asyncio.create_task(self._monitor.show_last(), name="last-look")
        await asyncio.wait({progress, look}, timeout=_LAST_WORD_S)
        await end_tasks([look])

    async def _drain(self, tasks: dict[str, asyncio.Task[None]], abort: asyncio.Event) -> None:
        """Read no more; finish the whole transactions in hand, within a time limit."""
        self._health.left(DaemonState.DRAINING, "")
        failpoints.probe(failpoints.DRAIN)
        # With everything committed the loss of an idle session must not cost the last word; a worker with a job in hand
        # notices the loss itself.
        await end_tasks([tasks["intake"], tasks["sessions"]])
        n_transactions = sum([job.counts.n_transactions for job in self._pool.flight.state.jobs.values()])
        self._log.info("drain_started", n_transactions=n_transactions)
        self.pool_changed()
        idle = asyncio.create_task(self._idle.wait(), name="drained")
        aborting = asyncio.create_task(abort.wait(), name="abort")
        # One that has left is done.
        workers = [task for name, task in tasks.items() if name.startswith("worker-") and not task.done()]
        try:
            await asyncio.wait({idle, aborting, *workers}, timeout=_DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if not idle.done() and _first_error(tasks) is None:
                self._log.warning("drain_aborted", reason="a second signal" if abort.is_set() else "time limit")
        finally:
            await end_tasks([idle, aborting])

    def pool_changed(self) -> None:
        """Act on a change of the pool."""
        self._intake.worker_changed()
        self._requests.moved.set()
        if self._engine.head is None or self._pool.flight.is_done_but_large(is_open=self._batcher.large is not None):
            self._idle.set()
        else:
            self._idle.clear()

    def batch_committed(self, job: Job) -> None:
        """Count and record a job that has committed, have its LSN reported, and go on."""
        self._progress.committed(job)
        _count(self._figures, job)
        self._batcher.sizing.committed(job)
        if self._applylog_writer is not None:
            reading = self._ends.stream.reading_of(job.batch.end_lsn)
            of = self._log_run
            names = self._target_names.take(job.counts.rows, job.times.committed_s)
            self._applylog_writer.write([batch_record(job, of, reading, names), *transaction_records(job, of)])
        if logs.writes_debug:
            self._log.debug(
                "batch_committed",
                seq=job.batch.seq,
                worker=job.worker,
                end_lsn=format_lsn(job.batch.end_lsn),
                n_transactions=job.counts.n_transactions,
                n_changes=job.counts.n_changes,
            )
        self.pool_changed()

    def _reporting(self) -> Reporting:
        config = self._config
        return Reporting(
            advance_interval_s=config.apply.advance_interval_s,
            status_interval_s=self._status_interval_s(),
            receive_timeout_s=config.source.receive_timeout_s,
            # Relaxed, a record names the batches committed when it was made, and no batch that commits alongside it.
            is_apply_durable=config.target.synchronous_commit != "off" and not self._pool.flight.state.is_relaxed,
            until=self._until,
        )

    def _scaling(self) -> Scaling | None:
        """Return the rule for the number of workers, None where it is fixed."""
        return Scaling(self._share) if self._config.apply.workers == "auto" else None

    def _stream_limits(self, piece_bytes: int) -> StreamLimits:
        memory_bytes = self._config.apply.memory_limit_bytes // 4
        return StreamLimits(self._config.apply.stream_start_bytes, memory_bytes, 2 * piece_bytes)

    def _apply_config(self) -> ApplyConfig:
        config = self._config.apply
        if not self._conflict_handler.rules.needs_commit_times or config.max_batch_transactions == 1:
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


def _count(figures: Figures, job: Job) -> None:
    """Add a job that the target has just acknowledged: once for each target transaction, nothing for a change."""
    counts, times, stages, mode = job.counts, job.times, figures.stages, job.mode
    if isinstance(job, SetJob) and mode is Mode.ROWS:
        figures.transactions[Mode.ROWS] += job.n_in_order
        figures.transactions[Mode.SET] += counts.n_transactions - job.n_in_order
    else:
        figures.transactions[mode] += counts.n_transactions
    figures.batches[mode] += 1
    figures.commands[CommandOutcome.APPLIED] += len(counts.commands)
    figures.commands[CommandOutcome.LEFT_OUT] += counts.n_left_out
    figures.change_bytes += counts.size_bytes
    seconds = max(0.0, times.committed_s - times.received_s)
    observed = (counts.n_transactions, counts.n_changes, counts.size_bytes, seconds)
    for histogram, value in zip(figures.of_batches, observed, strict=True):
        histogram.counts[bisect_left(histogram.metric.buckets, value)] += 1
        histogram.sum += value
    stages.queued_s += times.queued_s
    stages.dependency_s += times.wait_dependency_s
    stages.execute_s += times.execute_s
    stages.turn_s += times.wait_turn_s
    stages.commit_s += times.commit_s
    for name, rows in counts.rows.items():
        table = figures.tables[name]
        if name in figures.tables:
            figures.changed[name] = None
        table.transactions += 1
        table.rows.insert += rows.insert
        table.rows.update += rows.update
        table.rows.delete += rows.delete
        table.rows.truncate += rows.truncate
    wait = job.waited_for
    if wait is not None:
        # A table with rows above: it is among the changed.
        table = figures.tables[wait.table] if wait.table else figures.barriers
        table.waits[wait.kind] += 1
        table.wait_s[wait.kind] += times.wait_dependency_s
    if job.attempts > 1:
        figures.retries[job.error or RetryReason.YIELD] += job.attempts - 1


def _piece_bytes(config: ApplyConfig, known: state.SlotState) -> int:
    """Return the bytes after which a transaction comes in pieces: then only the watermark says that it is applied."""
    if known.high_lsn > known.low_lsn:
        # No earlier run has cut smaller pieces than it now could: what was whole above the watermark comes whole again.
        return _PIECE_BYTES
    return min(_THROTTLED_PIECE_BYTES if config.max_changes_per_s else _PIECE_BYTES, config.memory_limit_bytes // 4)


def _note(ends: Sessions, config: Config) -> str:
    """Return the reason that people are shown while all goes well."""
    notes = [_PAUSED.format(format_lsn(ends.whole_until_lsn))] if ends.whole_until_lsn else []
    notes += [LACKS_ORIGINS] if ends.state.lacks_origins and config.source.origin == "any" else []
    notes += [f"late on purpose: apply.delay_s = {config.apply.delay_s:g}"] if config.apply.delay_s else []
    rate = config.apply.max_changes_per_s
    notes += [f"slow on purpose: apply.max_changes_per_s = {rate}"] if rate else []
    return "; ".join(notes)


def _farewell(asked: Signals | None) -> tuple[DaemonState, str]:
    """Return state and reason that people shall see of an epoch that ends without an error, asked for or not."""
    if asked is None:
        return DaemonState.STOPPED, "everything up to --until is durable"
    return DaemonState.STOPPED if asked.is_stop else DaemonState.RECONNECTING, asked.why


def _first_error(tasks: dict[str, asyncio.Task[None]]) -> BaseException | None:
    """Return the error to act on: a verdict on the data before a lost end, which may be its consequence."""
    errors = [task.exception() for task in tasks.values() if task.done() and not task.cancelled()]
    found = [error for error in errors if error is not None]
    found.sort(key=lambda error: (not isinstance(error, ApplyFailed), not isinstance(error, TargetLost)))
    return found[0] if found else None
