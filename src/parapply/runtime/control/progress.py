"""Performs what `engine/durability.py` decides: writes the watermark to the target, and reports to the publisher.

While commits on the publisher wait for these reports (`CatchUpStream.is_synchronous`) no report waits for a timer: what
is received and what is visible is reported at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply import failpoints
from parapply.engine.durability import MOVED_S, Stream
from parapply.errors import SourceLost
from parapply.runtime.rest import LONG_S
from parapply.target.state import slots as state
from parapply.tasks import beat_s
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from parapply.engine.durability import Durability
    from parapply.engine.job import Job
    from parapply.engine.state import EngineState
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.intake.reader import SlotReader
    from parapply.target.session.settings import Connection
    from parapply.target.state.slots import StatePlace
    from parapply.vocabulary import DaemonState
    from parapply.wire.copy import Keepalive

#: Seconds that the target may take to write the slot's row, which waits for its disk.
_HELD_UP_S = 1.0


class Progress:
    """Fields are written by its own task, and through `keepalive` and `committed` by intake and the workers."""

    def __init__(
        self, control: Connection, place: StatePlace, reader: SlotReader, batcher: Batcher, durability: Durability
    ) -> None:
        """Start with the target's state; the control session is only used here while the epoch runs."""
        self._control = control
        self._place = place
        self._stream = reader.stream
        self._reader = reader
        self._batcher = batcher
        self._durability = durability
        self._rest = batcher.pool.rest
        self._engine: EngineState = durability.state
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        #: Failure seen by `committed`, for `report_at_once` to raise.
        self._stream_error: SourceLost | None = None
        self._reported_received_lsn = 0
        #: Rounds so far, and whether this one waits for the target's answer. Read by the watchdog.
        self.turns = 0
        self.is_asking_target = False
        self._turned_s = self._clock()
        #: Wakes it while it waits at rest.
        self._timer: asyncio.TimerHandle | None = None
        #: Arguments of `finish`. They win over the engine's state.
        self._last_word: tuple[DaemonState, str] | None = None
        self._last_commit_time_us: int | None = None

    async def run(self) -> None:
        """Keep the target's record and the publisher informed until `--until` is durable or `finish` is called.

        Raise SourceLost if the stream ended, the publisher is silent, or it shuts down and waits for us; TargetLost if
        the control session ended; TargetRefused if the state is gone.
        """
        durability, clock = self._durability, self._clock
        while self._last_word is None:
            self.turns += 1
            self._turned_s = clock()
            seen = self._looked()
            durability.settle(seen)
            if durability.advance_is_due(seen, clock()):
                await self.advance()
                seen = self._looked()
            elif durability.is_waited_for(seen):
                await self._flush()
                seen = self._looked()
            if durability.report_is_due(clock()):
                self.report()
            if durability.question_is_due(seen, clock()):
                self.report(is_asking=True)
            if durability.is_over():
                return
            self._check_silence()
            await self._sleep(seen)
        await self.advance()
        self.report()

    def _looked(self) -> Stream:
        return self._seen(LONG_S if self._rest.is_on and self._last_word is None else 0.0)

    def _seen(self, rest_s: float) -> Stream:
        batcher = self._batcher
        is_synchronous = self._stream.is_synchronous
        return Stream(batcher.received_lsn, batcher.holds_nothing, batcher.large is not None, is_synchronous, rest_s)

    @property
    def is_at_rest(self) -> bool:
        """Return whether it has nothing to do yet."""
        return self._timer is not None and self._clock() < self._timer.when()

    @property
    def is_held_up(self) -> bool:
        """Return whether the target has owed an answer for longer than a write takes."""
        return self.is_asking_target and self._clock() - self._turned_s >= _HELD_UP_S

    async def report_at_once(self) -> None:
        """Report the received and the visible position as soon as they change, while commits wait for them."""
        while True:
            await self._news.wait()
            if self._stream_error is not None:
                raise self._stream_error
            if self._news.is_set():  # not if `committed` has reported it since
                self.report()

    def finish(self, shown: DaemonState, reason: str) -> None:
        """Make `run` write and report a last time, with the state and reason for people, and return."""
        self._last_word = (shown, reason)
        self._wake.set()

    def keepalive(self, keepalive: Keepalive) -> None:
        """Take a keep-alive; everything received before it is in the worker pool's hands or committed.

        Raises:
            SourceLost: the publisher shuts down and waits for us.
        """
        is_due = self._durability.keepalive(keepalive, self._clock())
        if is_due and (keepalive.reply_requested or self._timer is None):
            self._wake.set()
        elif is_due and self._timer is not None:
            # One comes with every commit in other databases of the server: it is no lag, and written seldom.
            self._durability.settle(self._seen(0.0))
            if self._timer.when() > (due_s := beat_s(MOVED_S)):
                self._timer.cancel()
                self._timer = self._loop.call_at(due_s, self._wake.set)

    def ends_at(self, received_lsn: int) -> None:
        """Take the end of all before the first transaction after `--until`."""
        self._durability.ends_at(received_lsn)
        self._wake.set()

    def received(self) -> None:
        """Note that everything received is in the batcher's hands, while commits on the publisher wait for reports."""
        if self._batcher.received_lsn > self._reported_received_lsn:
            self._news.set()

    def committed(self, job: Job) -> None:
        """Record a commit that the target has acknowledged."""
        self._last_commit_time_us = job.batch.commit_time_us
        is_synchronous = self._stream.is_synchronous
        tables = self._batcher.tables
        is_to_look = self._durability.committed(
            job.times.committed_s,
            is_synchronous=is_synchronous,
            is_believed=not (tables.plans.may_be_serial or tables.has_code or job.is_left_out),
        )
        if is_to_look:
            self._wake.set()
        if is_synchronous:
            self._report_visible()

    def _report_visible(self) -> None:
        """Report from the worker's task, because a turn of the event loop is a large part of a single client's wait."""
        try:
            self.report()
        except SourceLost as error:
            # Not the worker's to raise.
            self._stream_error = error
            self._news.set()

    async def advance(self) -> None:
        """Write the watermark durably, then report it to the publisher."""
        every_s = self._durability.shown_every_s(self._looked())
        low_lsn = self._durability.advances(self._clock(), every_s)
        shown, reason = self._last_word or self._engine.shown
        lag_s = self._engine.lag_at(self._clock())
        progress = state.SlotProgress(
            low_lsn=low_lsn,
            high_lsn=self._engine.watermark.high_lsn,
            confirmed_flush_lsn=self._stream.confirmed_flush_lsn or None,
            source_lsn=self._engine.source_lsn,
            last_commit_time_us=self._last_commit_time_us,
            lag_s=lag_s,
            state=shown,
            reason=reason,
            reading=self._stream.shown,
            shown_every_s=every_s,
        )
        self.is_asking_target = True
        await state.advance(self._control, self._place.schema, self._place.slot_id, progress)
        self.is_asking_target = False
        self._made_durable(low_lsn)

    async def _flush(self) -> None:
        """Make the visible commits durable, and report them."""
        low_lsn = self._engine.watermark.low_lsn
        self.is_asking_target = True
        high_lsn = self._engine.watermark.high_lsn
        await state.flush(self._control, self._place.schema, self._place.slot_id, low_lsn, high_lsn)
        self.is_asking_target = False
        self._made_durable(low_lsn)

    def _made_durable(self, low_lsn: int) -> None:
        if self._durability.made_durable(low_lsn):
            if failpoints.armed:
                failpoints.probe(failpoints.ADVANCED)
            self.report()
            if failpoints.armed:
                failpoints.probe(failpoints.FEEDBACK_SENT)

    def report(self, *, is_asking: bool = False) -> None:
        """Report to the publisher the position up to which all is durable; raise SourceLost if the stream ended."""
        self._durability.reported(self._clock())
        self._news.clear()
        # A report is not sent while ranges are read; a stream counts as a standby after its first report.
        is_sent = self._stream.reading is Reading.STREAM
        self._reported_received_lsn = self._batcher.received_lsn if is_sent else 0
        self._stream.send_status(
            max(self._batcher.received_lsn, self._engine.durable_lsn),
            self._engine.durable_lsn,
            self._engine.watermark.low_lsn,
            reply_requested=is_asking,
        )

    def _check_silence(self) -> None:
        if self._stream.reading is Reading.RANGES:
            self._durability.reads_ranges(self._clock())
        if not self._reader.is_paused and self._durability.silence_is_long(self._reader.heard_s, self._clock()):
            self.report(is_asking=True)

    async def _sleep(self, seen: Stream) -> None:
        """Wait for an event or the next thing due."""
        rest_s = self._durability.rest_s(seen, self._clock())
        if not rest_s:
            return
        if not seen.rest_s:
            timer = self._loop.call_later(rest_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        else:
            await self._wait_at_rest(rest_s)
        self._wake.clear()

    async def _wait_at_rest(self, rest_s: float) -> None:
        self._timer = self._loop.call_at(beat_s(rest_s), self._wake.set)
        try:
            with self._rest.waking(self._wake.set):
                await self._wake.wait()
        finally:
            self._timer.cancel()
            self._timer = None
