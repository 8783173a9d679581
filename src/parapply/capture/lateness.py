"""How late a replay is, or would be at the pace at which the stream came. Pure.

Each mark is the end of transactions that came together. In a paced replay it is late by the time from when it was due
to when it was applied. As fast as it goes nothing is due. Then the time between two marks is the work for the second
one, and the marks queue as they did on their day: each begins when it came, or when the one before was done.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

_MINUTE_US: Final = 60_000_000


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """The result."""

    most_s: float = 0.0
    most_at_us: int = 0  # since 1970-01-01 UTC: arrival of what was latest
    minutes: dict[int, float] = {}  # most seconds late, by the minute of arrival since 1970-01-01 UTC

    def joined(self, other: Late) -> Late:
        """Return this result and a later one of the same replay, which went on."""
        minutes = dict(self.minutes)
        for minute, late_s in other.minutes.items():
            minutes[minute] = max(minutes.get(minute, 0.0), late_s)
        latest = max(self, other, key=lambda one: one.most_s)
        return Late(most_s=latest.most_s, most_at_us=latest.most_at_us, minutes=minutes)


class Queue:
    """Marks that queue as they did on their day, or whose lateness is known."""

    def __init__(self) -> None:
        self._minutes: dict[int, float] = {}
        self._most_s = 0.0
        self._most_at_us = 0
        self._done_us = 0.0

    def take(self, arrival_us: int, work_us: float) -> None:
        """Take a mark that begins when it came, or when the one before is done."""
        self._done_us = max(self._done_us, arrival_us) + work_us
        self.note(arrival_us, (self._done_us - arrival_us) / 1e6)

    def note(self, arrival_us: int, late_s: float) -> None:
        """Take a mark that was late."""
        minute, late_s = arrival_us // _MINUTE_US, max(0.0, late_s)
        self._minutes[minute] = max(self._minutes.get(minute, 0.0), late_s)
        if late_s >= self._most_s:
            self._most_s, self._most_at_us = late_s, arrival_us

    @property
    def result(self) -> Late:
        """Return the result so far."""
        minutes = {minute: round(late_s, 3) for minute, late_s in self._minutes.items()}
        return Late(most_s=round(self._most_s, 3), most_at_us=self._most_at_us, minutes=minutes)


class Lateness:
    """Filled by a stream: `given` when frames are handed over, `applied` with each report."""

    def __init__(self, *, is_paced: bool) -> None:
        self._is_paced = is_paced
        self._marks: deque[tuple[int, int, float]] = deque()
        self._queue = Queue()
        self._applied_s: float | None = None

    def given(self, end_lsn: int, arrival_us: int, due_s: float) -> None:
        """Take the end of transactions that are handed over now.

        They came at `arrival_us` since 1970-01-01 UTC, and are due by the clock of `applied`; as fast as it goes: now.
        """
        if self._applied_s is None:
            self._applied_s = due_s
        self._marks.append((end_lsn, arrival_us, due_s))

    def applied(self, lsn: int, now_s: float) -> None:
        """Take the LSN up to which everything is applied."""
        done: list[tuple[int, int, float]] = []
        while self._marks and self._marks[0][0] <= lsn:
            done.append(self._marks.popleft())
        if not done:
            return
        work_us = max(0.0, now_s - (self._applied_s or now_s)) * 1e6 / len(done)
        self._applied_s = now_s
        for _, arrival_us, due_s in done:
            if self._is_paced:
                self._queue.note(arrival_us, now_s - due_s)
            else:
                self._queue.take(arrival_us, work_us)

    @property
    def result(self) -> Late:
        """Return the result so far."""
        return self._queue.result
