"""How long a pause of reading gathers anything. Pure: the reader reports what came of each.

A pause lets messages gather in the kernel, so that one wake-up serves many. It ends up costing time where the kernel's
buffer is full before its end: the publisher then waits, too, and each of its waits is several system calls. A Unix
socket holds about 270 small messages and is full in a few tenths of a millisecond; that of a TCP connection within one
machine is full in a millisecond or two where rows are large, or processors fast.
"""

from __future__ import annotations

from typing import Final

#: Reads without a pause before one is tried again: a try may cost two milliseconds, so many reads take far longer.
_TRY_AGAIN: Final = 256
#: Seconds of the shortest pause of which it can be told whether its second half gathers anything: the event loop's
#: timers count milliseconds.
SHORTEST_JUDGED_S: Final = 0.002


class Gathering:
    """Learns from each pause; used by the reader alone."""

    def __init__(self) -> None:
        """Start with pauses as long as they are wanted."""
        self._most_s = 1.0
        self._unpaused = 0

    def pause_s(self, wanted_s: float) -> float:
        """Return how long to pause, at most as long as wanted; 0: read on at once."""
        if wanted_s < SHORTEST_JUDGED_S or self._most_s:
            return min(wanted_s, self._most_s or wanted_s)
        self._unpaused += 1
        if self._unpaused < _TRY_AGAIN:
            return 0.0
        self._unpaused = 0
        return SHORTEST_JUDGED_S

    def paused(self, pause_s: float, *, has_grown: bool) -> None:
        """Take note of a whole pause.

        Args:
            pause_s: how long it was.
            has_grown: whether more came in its second half.
        """
        if pause_s < SHORTEST_JUDGED_S:
            return
        if has_grown:
            self._most_s = 2 * pause_s
        else:
            self._most_s = pause_s / 2 if pause_s / 2 >= SHORTEST_JUDGED_S else 0.0
