"""Times of durable watermarks, of reports and questions to the publisher, and of leaving it.

The watermark moves in memory with every commit. It is written to the target with one synchronous commit a few times a
second, after which everything before it is durable whatever synchronous_commit the workers use. Only this position is
ever reported as flushed (traps T-1, T-2, T-8). While commits on the publisher wait for these reports, one flush follows
the other as long as anything is not durable. So each flush serves all that committed during the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.errors import SourceLost
from parapply.model import covers, format_lsn

if TYPE_CHECKING:
    from parapply.engine.flight import Flight
    from parapply.model import Until
    from parapply.wire.copy import Keepalive

#: Seconds between two answers at least: a publisher that is shutting down asks again as soon as it is answered.
_REPLY_S: Final = 0.05
#: Seconds between two advances at least when idle, and from the last of several commits until it counts as that.
_ADVANCE_MIN_S: Final = 0.02
#: A publisher that asks this often about one LSN that we cannot confirm is shutting down and waits for us (traps T-9,
#: F9). It is left, and nothing is lost by that, after these seconds in which nothing became durable on the target.
_STUCK_REQUESTS: Final = 10
_STUCK_S: Final = 3.0
#: Seconds between questions for the publisher's position while `--until` is not reached.
_ASK_S: Final = 0.05
#: A transaction takes its commit time before it writes its commit record: microseconds that this may take on a machine
#: that is busy. Until then a time is not over.
_COMMITTING_US: Final = 1_000_000
#: Seconds between questions while WAL of the publisher is on its way that may hold nothing for us.
ASK_IDLE_S: Final = 1.0
#: Parts of the time that a publisher may be silent: it is asked after two of them, and again after three.
_TIMEOUT_PARTS: Final = 4
#: Seconds between two looks at most, and between two advances without progress.
_LOOK_S: Final = 0.5
_SHOW_S: Final = 1.0
#: Seconds at rest after which a position that brought nothing is written and reported, as often as the built-in
#: subscription reports one.
MOVED_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Intervals of reports, and their end.

    Attributes:
        advance_interval_s: between durable advances under load.
        status_interval_s: between reports when nothing else causes one.
        receive_timeout_s: silence of a streaming publisher after which it counts as gone.
        is_apply_durable: the workers' commits are durable when they are acknowledged, unless code on the target says
            otherwise, and their records in the state say that everything up to the watermark is committed.
        until: it is over when everything up to there is durable.
        ask_idle_s: as `ASK_IDLE_S`.
    """

    advance_interval_s: float
    status_interval_s: float
    receive_timeout_s: float
    is_apply_durable: bool
    until: Until
    ask_idle_s: float = ASK_IDLE_S


class Stream(NamedTuple):
    """State of the stream at one moment."""

    #: End of the bytes received.
    received_lsn: int
    #: Every byte of it is in flight or has passed through it.
    holds_nothing: bool
    #: A large transaction was begun that has not come whole.
    is_inside_large: bool
    #: Commits on the publisher wait for our reports.
    is_synchronous: bool
    #: Seconds between two looks, and between two advances, as long as nothing comes; 0.0: as usual.
    rest_s: float = 0.0


class Durability:
    """Written by the task that reports, by intake (`keepalive`, `ends_at`) and by the workers (`committed`)."""

    def __init__(self, flight: Flight, reporting: Reporting, now_s: float) -> None:
        """Start with everything durable that is committed, and nothing reported."""
        self._flight = flight
        self.state = flight.state
        self._reporting = reporting
        self._until_lsn = reporting.until.lsn
        #: Intake has reached its last transaction; later ones that it holds are never taken.
        self._has_ended = False
        self._written_lsn = self.state.durable_lsn  # as in the state row
        self._promised_s = 0.0  # the same, of `shown_every_s`
        self._advanced_s = self._reported_s = self._asked_s = self._streaming_since_s = now_s
        #: Commits since the last advance, and when the last one came.
        self._n_commits = 0
        self._committed_s = -math.inf
        self._is_reply_due = False
        self._idle_lsn = 0  # a keep-alive's position: nothing for us before it
        self._stuck_lsn = self._stuck_durable_lsn = self._stuck_requests = 0
        self._stuck_since_s = 0.0

    def keepalive(self, keepalive: Keepalive, now_s: float) -> bool:
        """Take a keep-alive, with everything received before it in flight or committed; return whether to look at once.

        Raises:
            SourceLost: the publisher shuts down and waits for us.
        """
        self._idle_lsn = keepalive.end_lsn
        if keepalive.reply_requested:
            self._is_reply_due = True
            self._look_for_shutdown(keepalive.end_lsn, now_s)
            return True
        # One comes with nearly every commit, which says the same, and has us look if it is not enough.
        return not self.state.jobs and self._idle_lsn > self.state.watermark.low_lsn

    def ends_at(self, received_lsn: int) -> None:
        """Take the end of all before the first transaction after `--until`: no more will be taken."""
        self._has_ended = True
        self._until_lsn = self._idle_lsn = received_lsn

    def committed(self, now_s: float, *, is_synchronous: bool, is_believed: bool = True) -> bool:
        """Take a commit that the target has acknowledged; return whether to look at once.

        Code on the target may have set synchronous_commit to off for its transaction or session, and of what was left
        out no record says that the watermark is behind it, so these are not believed. The next one that is, which
        begins after the answer, is flushed with everything before it.
        """
        state = self.state
        self._committed_s = now_s
        self._n_commits += 1
        if self._reporting.is_apply_durable and is_believed:
            state.durable_lsn = max(state.durable_lsn, state.watermark.low_lsn)
            self._is_reply_due = True
            # A keep-alive's position may be next.
            return not is_synchronous or self._idle_lsn > state.durable_lsn
        # The looks that follow the first one see the others.
        return is_synchronous or self._n_commits == 1

    def settle(self, stream: Stream) -> None:
        """Move the watermark to the publisher's position when nothing is open (trap T-8)."""
        if self._idle_lsn <= self.state.watermark.low_lsn:
            return
        is_done = not self.state.jobs and stream.holds_nothing
        # At the end nothing is open but a transaction whose last piece is too late: it is rolled back.
        if is_done or (self._has_ended and self._flight.is_done_but_large(is_open=stream.is_inside_large)):
            self.state.watermark.reached(self._idle_lsn)

    def advance_is_due(self, stream: Stream, now_s: float) -> bool:
        """Return whether to write the state row, with the watermark."""
        return now_s - self._advanced_s >= self._advance_wait_s(stream, now_s)

    def shown_every_s(self, stream: Stream) -> float:
        """Return the seconds between two advances without progress, which the state row promises its readers."""
        # People still want to see the lag grow and the daemon alive.
        return max(stream.rest_s or _SHOW_S, self._reporting.advance_interval_s)

    def _advance_wait_s(self, stream: Stream, now_s: float) -> float:
        has_moved = self.state.watermark.low_lsn > self._written_lsn
        if not has_moved or (stream.rest_s and not self._is_reply_due):
            every_s = self.shown_every_s(stream)
            if every_s > self._promised_s:
                # Not before the row says so.
                return max(_SHOW_S, self._reporting.advance_interval_s)
            return max(min(every_s, MOVED_S), self._reporting.advance_interval_s) if has_moved else every_s
        # Between two advances of a standby its flushes keep it durable.
        is_quiet = not self.state.jobs and not stream.is_synchronous and self._is_last(now_s)
        return _ADVANCE_MIN_S if is_quiet else self._reporting.advance_interval_s

    def _is_last(self, now_s: float) -> bool:
        """Return whether the last commit seems to be the last one for now: an advance takes as long as a transaction.

        The position of the keep-alive that follows a commit can wait, unless something waits for it.
        """
        since_s = now_s - self._committed_s
        if self._n_commits:
            return self._n_commits == 1 or since_s >= _ADVANCE_MIN_S
        return self._is_reply_due or self._until_lsn is not None or since_s >= self._reporting.advance_interval_s

    def is_waited_for(self, stream: Stream) -> bool:
        """Return whether commits on the publisher wait until the visible ones here are durable."""
        return stream.is_synchronous and self.state.watermark.low_lsn > self.state.durable_lsn

    def advances(self, now_s: float, promised_s: float = 0.0) -> int:
        """Return the watermark that is about to be written, with the seconds until it is written again."""
        self._advanced_s, self._promised_s = now_s, promised_s
        self._n_commits = 0
        return self.state.watermark.low_lsn

    def made_durable(self, low_lsn: int) -> bool:
        """Take the position that was written; return whether it is another one, which is to be reported."""
        has_moved = low_lsn > self._written_lsn
        self._written_lsn = low_lsn
        self.state.durable_lsn = max(self.state.durable_lsn, low_lsn)
        return has_moved

    def reported(self, now_s: float) -> None:
        """Note a report."""
        self._is_reply_due = False
        self._reported_s = now_s

    def report_is_due(self, now_s: float) -> bool:
        """Return whether to report the durable position."""
        since_s = now_s - self._reported_s
        return (self._is_reply_due and since_s >= _REPLY_S) or since_s >= self._reporting.status_interval_s

    def question_is_due(self, stream: Stream, now_s: float) -> bool:
        """Return, once for each time, whether the publisher is to be asked where it is."""
        if self.state.jobs or now_s - self._asked_s < self._ask_s(stream):
            return False
        self._asked_s = now_s
        return True

    def _ask_s(self, stream: Stream) -> float:
        """Return how long to wait between two questions for the publisher's position; infinity: no need.

        A walsender busy with WAL of other databases reports only at its end that it held nothing for us, but answers a
        question at once. Without the question that time would look like lag.
        """
        if self._until_lsn is not None and stream.received_lsn < self._until_lsn:
            return _ASK_S
        source_lsn = self.state.source_lsn
        is_behind = source_lsn is not None and source_lsn > self.state.watermark.low_lsn
        return self._reporting.ask_idle_s if is_behind and stream.holds_nothing else math.inf

    def is_over(self) -> bool:
        """Return whether everything up to `--until` is durable."""
        until_us = self._reporting.until.time_us
        if until_us is not None and self._until_lsn is None and (self.state.passed_us or 0) > until_us + _COMMITTING_US:
            # The publisher's WAL has passed the time, and nothing later has come to say so.
            self._until_lsn = self.state.source_insert_lsn
        return self._until_lsn is not None and covers(self.state.durable_lsn, self._until_lsn)

    def reads_ranges(self, now_s: float) -> None:
        """Note that no stream is read: a range is decoded whole before its first byte comes.

        The monitor's question shows whether the publisher lives, so its silence counts from the one without an answer.
        TCP's keep-alives do not show it, because a proxy in between answers them.
        """
        asked_s = self.state.unanswered_since_s
        self._streaming_since_s = now_s if asked_s is None else asked_s

    def silence_is_long(self, heard_s: float, now_s: float) -> bool:
        """Return whether to ask a publisher that says nothing, `heard_s` being when it last did.

        Raises:
            SourceLost: it counts as gone.
        """
        timeout_s = self._reporting.receive_timeout_s
        silent_s = now_s - max(heard_s, self._streaming_since_s)
        if silent_s >= timeout_s:
            raise SourceLost(f"the publisher has said nothing for {silent_s:.0f} s.")
        part_s = timeout_s / _TIMEOUT_PARTS
        if silent_s < 2 * part_s or now_s - self._asked_s < part_s:
            return False
        self._asked_s = now_s
        return True

    def _look_for_shutdown(self, lsn: int, now_s: float) -> None:
        durable_lsn = self.state.durable_lsn
        if lsn != self._stuck_lsn or durable_lsn >= lsn or durable_lsn > self._stuck_durable_lsn:
            self._stuck_lsn, self._stuck_since_s, self._stuck_requests = lsn, now_s, 0
            self._stuck_durable_lsn = durable_lsn
        self._stuck_requests += 1
        if self._stuck_requests >= _STUCK_REQUESTS and now_s - self._stuck_since_s >= _STUCK_S:
            raise SourceLost(
                f"the publisher is shutting down and waits for {format_lsn(lsn)}, which the target cannot confirm now; "
                "leaving it, what is not confirmed will be sent again."
            )

    def rest_s(self, stream: Stream, now_s: float) -> float:
        """Return for how long nothing is due; 0.0: something is."""
        if self.is_waited_for(stream):
            return 0.0
        due_s = [
            # A silent publisher is asked, and left, in time.
            now_s + max(_LOOK_S, min(stream.rest_s, self._reporting.receive_timeout_s / _TIMEOUT_PARTS)),
            self._reported_s + self._reporting.status_interval_s,
            self._advanced_s + self._advance_wait_s(stream, now_s),
        ]
        if self._n_commits and self.state.watermark.low_lsn > self._written_lsn:
            # To see that no more come.
            due_s.append(now_s + _ADVANCE_MIN_S)
        if self._is_reply_due:
            due_s.append(self._reported_s + _REPLY_S)
        if self._until_lsn is not None:
            due_s.append(now_s + _ASK_S)
        return max(0.001, min(due_s) - now_s)
