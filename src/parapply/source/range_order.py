"""Ranges of WAL that several sessions read at once, handed on in the order of the WAL. Pure.

Each range has a number. The frames of the range in turn are handed on as they come. The frames of later ranges are
kept, within half of the limit. So the range in turn always has the other half, and no reader waits for a later one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from parapply.wire.copy import Keepalive

#: Part of the limit for frames of ranges whose turn has not come.
_EARLY_PART = 2


class RangesEnd(NamedTuple):
    """End of the last range."""

    lsn: int
    reason: str  # why the stream takes over there


class RangeOrder:
    """Written by the readers (`begin`, `add`, `end`) and by intake (`take`)."""

    def __init__(self, limit_bytes: int) -> None:
        """Begin before the first range; each reader goes beyond the limit of bytes held by one read at most."""
        self._limit_bytes = limit_bytes
        #: Frames with their bytes on the wire, and after each range its end: to be taken.
        self._ready: deque[tuple[list[bytes], int] | Keepalive] = deque()
        #: The same of ranges whose turn has not come, by number.
        self._early: dict[int, list[tuple[list[bytes], int]]] = {}
        self._ended: dict[int, RangesEnd] = {}
        self._held_bytes = self._early_bytes = 0
        self._turn = 0
        self._end_lsn = 0
        #: Number of the next range.
        self.n_begun = 0
        self._last: int | None = None
        #: End of the last range, once all before it is handed on.
        self.outcome: RangesEnd | None = None

    @property
    def is_ending(self) -> bool:
        """Return whether the last range is known: no other one shall begin."""
        return self._last is not None

    @property
    def holds(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._ready)

    def begin(self) -> int:
        """Return the number of a range that begins where the one before ends."""
        self.n_begun += 1
        return self.n_begun - 1

    def wants(self, number: int) -> bool:
        """Return whether a range is not behind the last one."""
        return self._last is None or number <= self._last

    def may_read(self, number: int) -> bool:
        """Return whether more of a range may come.

        Of the one in turn some always may if nothing else can be taken, because others are behind it; of one that is
        not wanted all may, because nothing is kept.
        """
        has_room = self._held_bytes < self._limit_bytes
        if number == self._turn:
            return has_room or not self._ready
        return not self.wants(number) or (has_room and self._early_bytes < self._limit_bytes // _EARLY_PART)

    def add(self, number: int, frames: list[bytes], n_bytes: int) -> None:
        """Take frames of a range, and their bytes on the wire."""
        if not self.wants(number):
            return
        self._held_bytes += n_bytes
        if number == self._turn:
            self._ready.append((frames, n_bytes))
        else:
            self._early_bytes += n_bytes
            self._early.setdefault(number, []).append((frames, n_bytes))

    def end(self, number: int, lsn: int, reason: str) -> None:
        """Take the end of a range: everything of the slot up to there is in this range and those before it.

        `reason`: why the stream takes over there; empty: the next range follows.
        """
        if not self.wants(number):
            return
        self._ended[number] = RangesEnd(lsn, reason)
        if reason:
            self._last = number
            for later in [one for one in self._early if one > number]:
                n_bytes = self._forget(later)
                self._held_bytes -= n_bytes
        while self.outcome is None and (found := self._ended.pop(self._turn, None)) is not None:
            # A range reads the record in which it is cut. The next copy was moved into that one, and may read nothing.
            self._end_lsn = max(self._end_lsn, found.lsn)
            self._ready.append(Keepalive(end_lsn=self._end_lsn, send_time_us=0, reply_requested=False))
            if found.reason:
                self.outcome = RangesEnd(self._end_lsn, found.reason)
                return
            self._turn += 1
            self._ready.extend(self._early.get(self._turn, ()))
            self._forget(self._turn)

    def _forget(self, number: int) -> int:
        n_bytes = sum([size for _, size in self._early.pop(number, ())])
        self._early_bytes -= n_bytes
        return n_bytes

    def take(self, limit_bytes: int) -> tuple[list[bytes], Keepalive | None]:
        """Return frames, up to about a number of bytes, and the end of their range if they are its last ones."""
        found: list[bytes] = []
        size = 0
        end = None
        while self._ready and size < limit_bytes and end is None:
            item = self._ready.popleft()
            if isinstance(item, Keepalive):
                end = item
            else:
                frames, n_bytes = item
                found += frames
                size += n_bytes
        self._held_bytes -= size
        return found, end
