"""When a transaction may enter by its commit time: not before `apply.delay_s` is over, never after that of `--until`.

Commit times are of the publisher's clock, and so is the time that they are compared with: the monitor reads that clock
each second, and the event loop's carries it on in between. Neither the daemon's nor the target's time of day matters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.model import Transaction

#: Seconds until the next look while the publisher's clock was not read yet.
_UNKNOWN_S: Final = 0.05


class DueTimes:
    """Asked by intake only."""

    def __init__(self, delay_s: float, until_time_us: int | None, now_us: Callable[[], int | None]) -> None:
        """Keep the limits.

        Args:
            delay_s: from a commit on the publisher until it may be applied.
            until_time_us: the first transaction with a later commit time, and all after it, never enter; microseconds
                since 2000-01-01 UTC. None: there is no such time.
            now_us: returns the publisher's time, as `Shown` knows it.
        """
        self._delay_us = int(delay_s * 1e6)
        self._until_time_us = until_time_us
        self._now_us = now_us
        #: Whether there is any limit.
        self.is_limited = bool(self._delay_us) or until_time_us is not None

    def first_not_due(self, transactions: Sequence[Transaction], at: int) -> int:
        """Return the index, from `at` on, of the first transaction that may not enter yet; their number if all may."""
        while at < len(transactions) and not self.left_s(transactions[at]):
            at += 1
        return at

    def left_s(self, transaction: Transaction) -> float:
        """Return after how many seconds to ask again; 0: it may enter now; infinity: it never may."""
        # A piece without an LSN belongs to a transaction in progress, which counts only when its end comes. The last
        # piece counts, too: of a transaction prepared before the slot had two_phase only that one has the commit time.
        if not transaction.commit_lsn or not (transaction.is_first or transaction.is_last):
            return 0.0
        time_us = transaction.commit_time_us
        if self._until_time_us is not None and time_us > self._until_time_us:
            return math.inf
        if not self._delay_us:
            return 0.0
        now_us = self._now_us()
        if now_us is None:
            return _UNKNOWN_S
        return max(0, time_us + self._delay_us - now_us) / 1e6
