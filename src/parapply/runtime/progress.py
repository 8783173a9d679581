"""What is durable, and what the publisher is told of it.

The watermark moves in memory with every commit. It is written to the target with one synchronous commit a few times a
second (`advance`), after which everything before it is durable whatever synchronous_commit the workers use: only that
is ever reported as flushed (traps T-1, T-2, T-8).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply import probes
from parapply.errors import SourceLost
from parapply.model import format_lsn
from parapply.target import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.runtime.crew import Crew
    from parapply.runtime.intake import Intake
    from parapply.runtime.job import Job
    from parapply.source.stream import ReplicationStream
    from parapply.target.settings import Connection
    from parapply.wire.frames import Keepalive

#: Seconds between two answers at least: a publisher that is shutting down asks again as soon as it is answered.
_REPLY_S = 0.05
#: Seconds between two advances at least when idle.
_ADVANCE_MIN_S = 0.02
#: A publisher that asks this often, for this many seconds, about one LSN that we cannot confirm is shutting down and
#: waits for us (traps T-9, F9): nothing is lost by leaving it.
_STUCK_REQUESTS = 10
_STUCK_S = 3.0
#: Seconds between questions for the publisher's position while `--until` is not reached.
_ASK_S = 0.05


class Progress:
    """Fields are written by its own task, and through `keepalive` and `committed` by intake and the workers."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        control: Connection,
        stream: ReplicationStream,
        intake: Intake,
        crew: Crew,
        *,
        schema: str,
        slot_id: int,
        advance_interval_s: float,
        status_interval_s: float,
        receive_timeout_s: float,
        is_apply_durable: bool,
        until_lsn: int | None,
        on_serving: Callable[[], None],
    ) -> None:
        """Start with what the target's state says.

        Args:
            control: control session; only used here while the epoch runs.
            stream: to report to.
            intake: to know what is received.
            crew: to know what is committed.
            schema: state schema.
            slot_id: of the state.
            advance_interval_s: between durable advances under load.
            status_interval_s: between reports when nothing else causes one.
            receive_timeout_s: silence of the publisher after which it is taken for gone.
            is_apply_durable: the workers' commits are durable when they are acknowledged, and their records say to
                whoever reads the state that everything up to the watermark is committed.
            until_lsn: `run` returns when everything up to here is durable.
            on_serving: called once, when the publisher has been told for the first time.
        """
        self._control = control
        self._stream = stream
        self._intake = intake
        self._crew = crew
        self._schema = schema
        self._slot_id = slot_id
        self._advance_interval_s = advance_interval_s
        self._status_interval_s = status_interval_s
        self._receive_timeout_s = receive_timeout_s
        self._is_apply_durable = is_apply_durable
        self._until_lsn = until_lsn
        self._on_serving = on_serving
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._wake = asyncio.Event()
        #: Everything up to here is durable on the target, and recorded there as such or in its record rows.
        self.durable_lsn = crew.watermark.low_lsn
        self._written_lsn = self.durable_lsn  # what the state row says
        self._advanced_s = self._reported_s = self._asked_s = loop.time()
        self._is_reply_due = False
        self._idle_lsn = 0  # a keep-alive's position: nothing for us before it
        self._stuck_lsn = 0
        self._stuck_since_s = 0.0
        self._stuck_requests = 0
        #: Shown to people; written by the monitor.
        self.source_lsn: int | None = None
        self.lag_s: float | None = None
        #: When the monitor last looked.
        self.looked_s = loop.time()
        #: Rounds so far, and whether this one waits for the target's answer. Read by the pulse.
        self.turns = 0
        self.is_asking_target = False
        #: State and reason shown to people; written by the monitor, and by the epoch when it ends.
        self.shown = ("running", "")
        self._is_finishing = False
        self._last_commit_time_us: int | None = None
        intake.on_keepalive = self.keepalive

    async def run(self) -> None:
        """Keep the target's record and the publisher informed until `until_lsn` is durable or `finish` is called.

        Raises:
            SourceLost: the stream ended, the publisher is silent, or it shuts down and waits for us.
            TargetLost: the control session ended.
            TargetRefused: the state is gone.
        """
        if not self._is_finishing:
            self.report()
            self._on_serving()
        while not self._is_finishing:
            self.turns += 1
            self._settle()
            if self._advance_is_due():
                await self.advance()
            self._report_if_due()
            if self._until_lsn is not None and self.durable_lsn >= self._until_lsn:
                return
            self._check_silence()
            await self._sleep()
        await self.advance()
        self.report()

    def finish(self, shown: str, reason: str) -> None:
        """Make `run` write and report once more, and return.

        Args:
            shown: state for people, for example stopped.
            reason: why, in one line.
        """
        self.shown = (shown, reason)
        self._is_finishing = True
        self._wake.set()

    def keepalive(self, keepalive: Keepalive) -> None:
        """Take a keep-alive; everything received before it is in the crew's hands or committed."""
        self._idle_lsn = keepalive.end_lsn
        if keepalive.reply_requested:
            self._is_reply_due = True
            self._look_for_shutdown(keepalive.end_lsn)
        self._wake.set()

    def committed(self, job: Job) -> None:
        """Take note of a commit that the target has acknowledged."""
        self._last_commit_time_us = job.batch.commit_time_us
        if self._is_apply_durable:
            self.durable_lsn = max(self.durable_lsn, self._crew.watermark.low_lsn)
            self._is_reply_due = True
            self._wake.set()
        elif self._crew.is_idle:
            self._wake.set()

    async def advance(self) -> None:
        """Write the watermark durably, then tell the publisher.

        Raises:
            TargetLost, TargetRefused: as `state.advance`.
        """
        self._advanced_s = self._clock()
        low_lsn = self._crew.watermark.low_lsn
        shown, reason = self.shown
        progress = state.Progress(
            lowest_lsn=low_lsn,
            highest_lsn=self._crew.watermark.high_lsn,
            confirmed_flush_lsn=self._stream.reported_flush_lsn or None,
            source_lsn=self.source_lsn,
            last_commit_time_us=self._last_commit_time_us,
            lag_s=self.lag_s,
            state=shown,
            reason=reason,
        )
        self.is_asking_target = True
        await state.advance(self._control, self._schema, self._slot_id, progress)
        self.is_asking_target = False
        self._written_lsn = low_lsn
        if low_lsn > self.durable_lsn:
            self.durable_lsn = low_lsn
            probes.probe(probes.ADVANCED)
            self.report()
            probes.probe(probes.FEEDBACK_SENT)

    def report(self, *, is_asking: bool = False) -> None:
        """Tell the publisher what is durable.

        Raises:
            SourceLost: the stream ended.
        """
        self._is_reply_due = False
        self._reported_s = self._clock()
        self._stream.send_status(
            max(self._intake.received_lsn, self.durable_lsn),
            self.durable_lsn,
            self._crew.watermark.low_lsn,
            reply_requested=is_asking,
        )

    def _settle(self) -> None:
        """Move the watermark to the publisher's position when nothing is open (trap T-8)."""
        if self._crew.is_idle and self._intake.holds_nothing:
            self._crew.watermark.reached(self._idle_lsn)

    def _advance_is_due(self) -> bool:
        since_s = self._clock() - self._advanced_s
        low_lsn = self._crew.watermark.low_lsn
        if low_lsn > self._written_lsn:
            return since_s >= (_ADVANCE_MIN_S if self._crew.is_idle else self._advance_interval_s)
        # Without progress people still want to see the lag grow and the daemon alive.
        return since_s >= max(1.0, self._advance_interval_s)

    def _report_if_due(self) -> None:
        since_s = self._clock() - self._reported_s
        if (self._is_reply_due and since_s >= _REPLY_S) or since_s >= self._status_interval_s:
            self.report()
        if (
            self._until_lsn is not None
            and self._crew.is_idle
            and self._intake.received_lsn < self._until_lsn
            and self._clock() - self._asked_s >= _ASK_S
        ):
            self._asked_s = self._clock()
            self.report(is_asking=True)

    def _check_silence(self) -> None:
        if self._intake.is_paused:
            return
        silent_s = self._clock() - self._intake.heard_s
        if silent_s >= self._receive_timeout_s:
            raise SourceLost(f"the publisher has said nothing for {silent_s:.0f} s.")
        if silent_s >= self._receive_timeout_s / 2 and self._clock() - self._asked_s >= self._receive_timeout_s / 4:
            self._asked_s = self._clock()
            self.report(is_asking=True)

    def _look_for_shutdown(self, lsn: int) -> None:
        now_s = self._clock()
        if lsn != self._stuck_lsn or self.durable_lsn >= lsn:
            self._stuck_lsn, self._stuck_since_s, self._stuck_requests = lsn, now_s, 0
        self._stuck_requests += 1
        if self._stuck_requests >= _STUCK_REQUESTS and now_s - self._stuck_since_s >= _STUCK_S:
            raise SourceLost(
                f"the publisher is shutting down and waits for {format_lsn(lsn)}, which the target cannot confirm now; "
                "leaving it, what is not confirmed will be sent again."
            )

    async def _sleep(self) -> None:
        """Wait for an event or the next thing due."""
        now_s = self._clock()
        deadlines = [self._reported_s + self._status_interval_s, now_s + 0.5]
        if self._crew.watermark.low_lsn > self._written_lsn:
            interval_s = _ADVANCE_MIN_S if self._crew.is_idle else self._advance_interval_s
            deadlines.append(self._advanced_s + interval_s)
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
