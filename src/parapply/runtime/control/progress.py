"""What is durable, and what of it is reported to the publisher.

The watermark moves in memory with every commit. It is written to the target with one synchronous commit a few times a
second (`advance`), after which everything before it is durable whatever synchronous_commit the workers use: only that
is ever reported as flushed (traps T-1, T-2, T-8).

While commits on the publisher wait for these reports (`CatchUpStream.is_synchronous`) no report waits for a timer: what
is received and what is visible is reported at once, and one flush follows the other as long as anything is not durable.
So each flush serves all that committed during the one before.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from parapply import failpoints
from parapply.errors import SourceLost
from parapply.model import format_lsn
from parapply.plan.watermark import covers
from parapply.target.state import slots as state
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.engine.flight import Flight
    from parapply.engine.job import Job
    from parapply.engine.state import EngineState
    from parapply.model import Until
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.intake.reader import SlotReader
    from parapply.source.catch_up_stream import CatchUpStream
    from parapply.target.session.settings import Connection
    from parapply.vocabulary import DaemonState
    from parapply.wire.frames import Keepalive

#: Seconds between two answers at least: a publisher that is shutting down asks again as soon as it is answered.
_REPLY_S = 0.05
#: Seconds between two advances at least when idle.
_ADVANCE_MIN_S = 0.02
#: A publisher that asks this often about one LSN that we cannot confirm is shutting down and waits for us (traps T-9,
#: F9). It is left, and nothing is lost by that, after so many seconds in which nothing became durable on the target.
_STUCK_REQUESTS = 10
_STUCK_S = 3.0
#: Seconds between questions for the publisher's position while `--until` is not reached.
_ASK_S = 0.05
#: A transaction takes its commit time before it writes its commit record: microseconds that this may take on a machine
#: that is busy. Until then a time is not over.
_COMMITTING_US = 1_000_000
#: Seconds between questions while WAL of the publisher is on its way that may hold nothing for us.
_ASK_IDLE_S = 1.0


class Progress:
    """Fields are written by its own task, and through `keepalive` and `committed` by intake and the workers."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        control: Connection,
        stream: CatchUpStream,
        reader: SlotReader,
        batcher: Batcher,
        flight: Flight,
        *,
        engine: EngineState,
        schema: str,
        slot_id: int,
        advance_interval_s: float,
        status_interval_s: float,
        receive_timeout_s: float,
        is_apply_durable: bool,
        until: Until,
        on_serving: Callable[[], None],
    ) -> None:
        """Start with what the target's state says.

        Args:
            control: control session; only used here while the epoch runs.
            stream: to report to.
            reader: to know when the publisher was heard.
            batcher: to know what is received, and whether all of it is in the pool's hands.
            flight: to know what is committed.
            engine: what the state row says for people, and where the publisher is.
            schema: state schema.
            slot_id: of the state.
            advance_interval_s: between durable advances under load.
            status_interval_s: between reports when nothing else causes one.
            receive_timeout_s: silence of a streaming publisher after which it counts as gone.
            is_apply_durable: the workers' commits are durable when they are acknowledged, and their records in the
                state say that everything up to the watermark is committed.
            until: `run` returns when everything up to there is durable.
            on_serving: called once, after the first report to the publisher.
        """
        self._control = control
        self._stream = stream
        self._reader = reader
        self._batcher = batcher
        self._flight = flight
        self._engine = engine
        self._schema = schema
        self._slot_id = slot_id
        self._advance_interval_s = advance_interval_s
        self._status_interval_s = status_interval_s
        self._receive_timeout_s = receive_timeout_s
        self._is_apply_durable = is_apply_durable
        self._until_lsn = until.lsn
        self._until_time_us = until.time_us
        #: Intake has met its last transaction; what it holds beyond is never taken.
        self._has_ended = False
        self._on_serving = on_serving
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        #: Met by `committed`, for `report_at_once` to raise.
        self._stream_error: SourceLost | None = None
        self._reported_received_lsn = 0
        self._written_lsn = self._engine.durable_lsn  # what the state row says
        self._advanced_s = self._reported_s = self._asked_s = loop.time()
        self._is_reply_due = False
        self._idle_lsn = 0  # a keep-alive's position: nothing for us before it
        self._streaming_since_s = loop.time()
        self._stuck_lsn = 0
        self._stuck_durable_lsn = 0
        self._stuck_since_s = 0.0
        self._stuck_requests = 0
        #: Rounds so far, and whether this one waits for the target's answer. Read by the watchdog.
        self.turns = 0
        self.is_asking_target = False
        #: What `finish` was told: the monitor's task may still write what it has just seen to `shown`.
        self._last_word: tuple[DaemonState, str] | None = None
        self._last_commit_time_us: int | None = None

    async def run(self) -> None:
        """Keep the target's record and the publisher informed until `until_lsn` is durable or `finish` is called.

        Raises:
            SourceLost: the stream ended, the publisher is silent, or it shuts down and waits for us.
            TargetLost: the control session ended.
            TargetRefused: the state is gone.
        """
        if self._last_word is None:
            self.report()
            self._on_serving()
        while self._last_word is None:
            self.turns += 1
            self._settle()
            if self._advance_is_due():
                await self.advance()
            elif self._is_waited_for:
                await self._flush()
            self._report_if_due()
            self._look_for_time()
            if self._until_lsn is not None and covers(self._engine.durable_lsn, self._until_lsn):
                return
            self._check_silence()
            await self._sleep()
        await self.advance()
        self.report()

    async def report_at_once(self) -> None:
        """Report what is received and what is visible as soon as it changes, while commits wait for that.

        Raises:
            SourceLost: the stream ended.
        """
        while True:
            await self._news.wait()
            if self._stream_error is not None:
                raise self._stream_error
            if self._news.is_set():  # not if `committed` has reported it since
                self.report()

    def finish(self, shown: DaemonState, reason: str) -> None:
        """Make `run` write and report a last time, and return.

        Args:
            shown: state for people.
            reason: why, in one line.
        """
        self._engine.shown = (shown, reason)
        self._last_word = (shown, reason)
        self._wake.set()

    def keepalive(self, keepalive: Keepalive) -> None:
        """Take a keep-alive; everything received before it is in the worker pool's hands or committed."""
        self._idle_lsn = keepalive.end_lsn
        if keepalive.reply_requested:
            self._is_reply_due = True
            self._look_for_shutdown(keepalive.end_lsn)
        elif self._stream.is_synchronous and not (
            self._engine.is_idle and self._idle_lsn > self._engine.watermark.low_lsn
        ):
            # One comes with nearly every commit, which says the same, and wakes up this task if it is not enough.
            return
        self._wake.set()

    def ends_at(self, received_lsn: int) -> None:
        """Take the end of what came before the first transaction after `--until`; as `Intake` calls `on_end`."""
        self._has_ended = True
        self._until_lsn = self._idle_lsn = received_lsn
        self._wake.set()

    def _look_for_time(self) -> None:
        """Set where to end if the publisher's WAL has passed the time, and nothing later has come to say so."""
        passed_us = self._engine.passed_us
        if self._until_time_us is None or self._until_lsn is not None or passed_us is None:
            return
        if passed_us > self._until_time_us + _COMMITTING_US:
            self._until_lsn = self._engine.source_insert_lsn

    def received(self) -> None:
        """Note that what has come is in the batcher's hands."""
        if self._stream.is_synchronous and self._batcher.received_lsn > self._reported_received_lsn:
            self._news.set()

    def committed(self, job: Job) -> None:
        """Record a commit that the target has acknowledged."""
        self._last_commit_time_us = job.batch.commit_time_us
        is_waited_for = self._stream.is_synchronous
        if self._is_apply_durable:
            self._engine.durable_lsn = max(self._engine.durable_lsn, self._engine.watermark.low_lsn)
            self._is_reply_due = True
            # A keep-alive's position may be next.
            if not is_waited_for or self._idle_lsn > self._engine.durable_lsn:
                self._wake.set()
        elif is_waited_for or self._engine.is_idle:
            self._wake.set()
        if is_waited_for:
            self._report_visible()

    def _report_visible(self) -> None:
        """Report from the worker's task: a turn of the event loop is a good part of what a single client waits for."""
        try:
            self.report()
        except SourceLost as error:
            # Not the worker's to raise.
            self._stream_error = error
            self._news.set()

    async def advance(self) -> None:
        """Write the watermark durably, then tell the publisher.

        Raises:
            TargetLost, TargetRefused: as `state.advance`.
        """
        self._advanced_s = self._clock()
        low_lsn = self._engine.watermark.low_lsn
        shown, reason = self._last_word or self._engine.shown
        progress = state.SlotProgress(
            low_lsn=low_lsn,
            high_lsn=self._engine.watermark.high_lsn,
            confirmed_flush_lsn=self._stream.confirmed_flush_lsn or None,
            source_lsn=self._engine.source_lsn,
            last_commit_time_us=self._last_commit_time_us,
            lag_s=self._engine.lag_s,
            state=shown,
            reason=reason,
            reading=self._stream.shown,
        )
        self.is_asking_target = True
        await state.advance(self._control, self._schema, self._slot_id, progress)
        self.is_asking_target = False
        self._made_durable(low_lsn)

    async def _flush(self) -> None:
        """Make what is visible durable, and say so."""
        low_lsn = self._engine.watermark.low_lsn
        self.is_asking_target = True
        await state.flush(self._control, self._schema, self._slot_id, low_lsn, self._engine.watermark.high_lsn)
        self.is_asking_target = False
        self._made_durable(low_lsn)

    def _made_durable(self, low_lsn: int) -> None:
        self._written_lsn = low_lsn
        if low_lsn > self._engine.durable_lsn:
            self._engine.durable_lsn = low_lsn
            failpoints.probe(failpoints.ADVANCED)
            self.report()
            failpoints.probe(failpoints.FEEDBACK_SENT)

    @property
    def _is_waited_for(self) -> bool:
        """Tell whether commits on the publisher wait until what is visible here is durable."""
        return self._stream.is_synchronous and self._engine.watermark.low_lsn > self._engine.durable_lsn

    def report(self, *, is_asking: bool = False) -> None:
        """Tell the publisher what is durable.

        Raises:
            SourceLost: the stream ended.
        """
        self._is_reply_due = False
        self._news.clear()
        self._reported_s = self._clock()
        # What is reported while ranges are read is not sent; a stream counts as a standby after its first report.
        is_sent = self._stream.reading is Reading.STREAM
        self._reported_received_lsn = self._batcher.received_lsn if is_sent else 0
        self._stream.send_status(
            max(self._batcher.received_lsn, self._engine.durable_lsn),
            self._engine.durable_lsn,
            self._engine.watermark.low_lsn,
            reply_requested=is_asking,
        )

    def _settle(self) -> None:
        """Move the watermark to the publisher's position when nothing is open (trap T-8)."""
        is_done = self._engine.is_idle and self._batcher.holds_nothing
        # At the end nothing is open but a transaction whose last piece is too late: it is rolled back.
        if is_done or (self._has_ended and self._flight.is_done_but_large(is_open=self._batcher.is_inside_large)):
            self._engine.watermark.reached(self._idle_lsn)

    def _advance_is_due(self) -> bool:
        since_s = self._clock() - self._advanced_s
        low_lsn = self._engine.watermark.low_lsn
        if low_lsn > self._written_lsn:
            return since_s >= self._advance_wait_s
        # Without progress people still want to see the lag grow and the daemon alive.
        return since_s >= max(1.0, self._advance_interval_s)

    @property
    def _advance_wait_s(self) -> float:
        """Return the seconds between two advances where there is progress."""
        # Between two advances of a standby its flushes keep it durable.
        is_quiet = self._engine.is_idle and not self._stream.is_synchronous
        return _ADVANCE_MIN_S if is_quiet else self._advance_interval_s

    def _report_if_due(self) -> None:
        since_s = self._clock() - self._reported_s
        if (self._is_reply_due and since_s >= _REPLY_S) or since_s >= self._status_interval_s:
            self.report()
        if self._engine.is_idle and self._clock() - self._asked_s >= self._ask_s():
            self._asked_s = self._clock()
            self.report(is_asking=True)

    def _ask_s(self) -> float:
        """Return how long to wait between two questions for the publisher's position; infinity: there is no need.

        A walsender busy with what other databases have written says by itself only at the end of it that there was
        nothing for us, but it answers a question at once; otherwise that time would look like lag.
        """
        if self._until_lsn is not None and self._batcher.received_lsn < self._until_lsn:
            return _ASK_S
        is_behind = self._engine.source_lsn is not None and self._engine.source_lsn > self._engine.watermark.low_lsn
        return _ASK_IDLE_S if is_behind and self._batcher.holds_nothing else math.inf

    def _check_silence(self) -> None:
        if self._stream.reading is Reading.RANGES:
            # A range is decoded whole before its first byte comes. TCP's keep-alives tell whether the publisher lives.
            self._streaming_since_s = self._clock()
        if self._reader.is_paused:
            return
        silent_s = self._clock() - max(self._reader.heard_s, self._streaming_since_s)
        if silent_s >= self._receive_timeout_s:
            raise SourceLost(f"the publisher has said nothing for {silent_s:.0f} s.")
        if silent_s >= self._receive_timeout_s / 2 and self._clock() - self._asked_s >= self._receive_timeout_s / 4:
            self._asked_s = self._clock()
            self.report(is_asking=True)

    def _look_for_shutdown(self, lsn: int) -> None:
        now_s = self._clock()
        if (
            lsn != self._stuck_lsn
            or self._engine.durable_lsn >= lsn
            or self._engine.durable_lsn > self._stuck_durable_lsn
        ):
            self._stuck_lsn, self._stuck_since_s, self._stuck_requests = lsn, now_s, 0
            self._stuck_durable_lsn = self._engine.durable_lsn
        self._stuck_requests += 1
        if self._stuck_requests >= _STUCK_REQUESTS and now_s - self._stuck_since_s >= _STUCK_S:
            raise SourceLost(
                f"the publisher is shutting down and waits for {format_lsn(lsn)}, which the target cannot confirm now; "
                "leaving it, what is not confirmed will be sent again."
            )

    async def _sleep(self) -> None:
        """Wait for an event or the next thing due."""
        if self._is_waited_for:
            return
        now_s = self._clock()
        deadlines = [self._reported_s + self._status_interval_s, now_s + 0.5]
        if self._engine.watermark.low_lsn > self._written_lsn:
            deadlines.append(self._advanced_s + self._advance_wait_s)
        else:
            deadlines.append(self._advanced_s + max(1.0, self._advance_interval_s))
        if self._is_reply_due:
            deadlines.append(self._reported_s + _REPLY_S)
        if self._until_lsn is not None:
            deadlines.append(now_s + _ASK_S)
        try:
            async with asyncio.timeout(max(0.001, min(deadlines) - now_s)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
