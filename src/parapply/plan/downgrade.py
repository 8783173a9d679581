"""How far prediction can be trusted for a table: one whose batches keep failing is serial for a while. Pure.

What frees a unique value is not always on the wire (trap T-19), so batches run in parallel and those that fail are
repeated at the head. Where that happens often it costs more than it gains. A table then loses, step by step, first the
company of other batches, then the set form; after a few hundred batches it is tried again, later each time it fails.
It counts batches, not seconds, so the same stream leads to the same decisions.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Final

#: Latest batches that count, and failures among them that are too many.
_WINDOW: Final = 64
_FAILURES: Final = 4
#: Batches until the table is tried again, doubled with each relapse up to the limit.
_PENALTY: Final = 256
_PENALTY_LIMIT: Final = 16_384


class Level(IntEnum):
    """How a table's batches are applied for now."""

    TRUSTED = 0  # as planned
    ALONE = 1  # one batch at a time
    IN_ORDER = 2  # and row by row


class Downgrades:
    """The record of one table. Written by the leader as batches commit."""

    def __init__(self) -> None:
        """Start trusted."""
        self.level = Level.TRUSTED
        #: Batches that had to be repeated, since the start. Shown to people.
        self.retries = 0
        self._seen = 0
        self._failed_at: deque[int] = deque()
        self._penalty = _PENALTY
        self._until = 0

    def failed(self) -> bool:
        """Count a batch that had to be repeated because of this table; True if the level changed."""
        self.retries += 1
        self._failed_at.append(self._seen)
        while self._failed_at[0] <= self._seen - _WINDOW:
            self._failed_at.popleft()
        if len(self._failed_at) < _FAILURES or self.level is Level.IN_ORDER:
            return False
        self._failed_at.clear()
        self.level = Level(self.level + 1)
        self._until = self._seen + self._penalty
        self._penalty = min(self._penalty * 2, _PENALTY_LIMIT)
        return True

    def applied(self) -> bool:
        """Count a batch with this table that has committed; True if the level changed."""
        self._seen += 1
        if self.level is Level.TRUSTED or self._seen < self._until:
            return False
        self._failed_at.clear()
        self.level = Level.TRUSTED
        return True
