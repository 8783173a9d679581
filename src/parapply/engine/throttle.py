"""Limit of row changes handed to the workers in a second, as `apply.max_changes_per_s` sets it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Parts of a second in which changes are handed over: a batch is no larger than one part allows.
_PARTS = 4


class Throttle:
    """Written by intake's task; its seconds are read by the intervals.

    Changes are paid for after they are taken, and nothing is saved up while few changes come. So in any period the
    number taken is at most what the rate allows for it plus, once, the last take, which is larger only for a larger
    transaction.
    """

    def __init__(self, changes_per_s: int, clock: Callable[[], float]) -> None:
        """Start with nothing taken.

        Args:
            changes_per_s: at most, above 0.
            clock: in seconds; only goes forwards.
        """
        self._changes_per_s = changes_per_s
        self._clock = clock
        self._free_s = clock()
        self._held_s = 0.0
        self._held_since_s: float | None = None

    @property
    def batch_changes(self) -> int:
        """Return the number of changes that a batch may have, so that they do not come in gusts."""
        return max(1, self._changes_per_s // _PARTS)

    @property
    def left_s(self) -> float:
        """Return the seconds for which nothing more may be taken; 0: something may."""
        return max(0.0, self._free_s - self._clock())

    def take(self, n_changes: int) -> None:
        """Count changes that were handed over, whatever the rate."""
        self._free_s = max(self._free_s, self._clock()) + n_changes / self._changes_per_s

    def hold(self) -> None:
        """Note that changes are held back from now on."""
        if self._held_since_s is None:
            self._held_since_s = self._clock()

    def go_on(self) -> None:
        """Note that none are."""
        if self._held_since_s is not None:
            self._held_s += self._clock() - self._held_since_s
            self._held_since_s = None

    @property
    def held_s(self) -> float:
        """Return the seconds for which changes were held back so far."""
        return self._held_s + (0.0 if self._held_since_s is None else self._clock() - self._held_since_s)
