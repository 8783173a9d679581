"""How far prediction can be trusted for a table: one whose batches keep failing is applied otherwise for a while. Pure.

A change that frees a unique value is not always on the wire (trap T-19), so batches run in parallel and those that fail
are repeated at the head. Where that happens often it costs more than it gains. The form that succeeded in the end
decides how the table is applied: alone, if the same sets succeeded at the head; not as sets either, if only the source
order did. A conflict is no reason for either.

4 such batches of the latest 64 that touch the table are too many. After 256 more it is trusted again, and after twice
as many with each relapse, up to 16,384. One that has then stayed trusted for as many as it was not begins at 256
again. Batches are counted, not seconds, so the same stream leads to the same decisions.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Final

#: Latest batches that count, and failures among them that are too many.
_WINDOW: Final = 64
_FAILURES: Final = 4
#: Batches until the table is trusted again, doubled with each relapse up to the limit.
_PENALTY: Final = 256
_PENALTY_LIMIT: Final = 16_384


class Level(IntEnum):
    """How a table's batches are applied for now."""

    TRUSTED = 0  # as planned
    ALONE = 1  # one batch at a time, still as sets
    IN_ORDER = 2  # and row by row


class Downgrades:
    """The record of one table. Written by the leader as batches commit."""

    def __init__(self) -> None:
        """Start trusted."""
        self.level = Level.TRUSTED
        #: Batches that had to be repeated, since the start. Shown to people.
        self.retries = 0
        self._seen = 0
        #: Batches that had been seen at each failure, by the level that would have spared it.
        self._failed_at: dict[Level, deque[int]] = {Level.ALONE: deque(), Level.IN_ORDER: deque()}
        #: Batches for which it is not trusted, or was not the last time; 0: that is forgotten, or never was.
        self.penalty = 0
        #: Batches that will have been seen when it is trusted again, or when the penalty is forgotten.
        self._until = 0

    def failed(self, level: Level) -> bool:
        """Count a batch that had failed because of this table, and would not have at a level; True if ours changed."""
        if level <= self.level:
            return False
        failed_at = self._failed_at[level]
        failed_at.append(self._seen)
        while failed_at[0] <= self._seen - _WINDOW:
            failed_at.popleft()
        if len(failed_at) < _FAILURES:
            return False
        self.penalty = min(self.penalty * 2, _PENALTY_LIMIT) or _PENALTY
        self._change(level)
        return True

    def applied(self) -> bool:
        """Count a batch with this table that has committed; True if the level changed."""
        self._seen += 1
        if self._seen < self._until:
            return False
        if self.level is Level.TRUSTED:
            self.penalty = 0
            return False
        self._change(Level.TRUSTED)
        return True

    def _change(self, level: Level) -> None:
        for failed_at in self._failed_at.values():
            failed_at.clear()
        self.level = level
        self._until = self._seen + self.penalty
