"""What a large transaction touches as far as it was planned: whole tables, or from which to which key. Pure.

Of a large transaction the keys themselves are not kept. Two that touch other tables, or other ranges of keys, can be
applied at the same time. That is a prediction, from what has come so far: where it is wrong, a lock, a missing row or a
duplicate key on the target says so, and the later transaction rolls back (`runtime/streamed.py`).

Keys are put in order as bytes. It is no order that people know, but two sets are disjoint if their ranges are, in any
order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from parapply.plan.batch import Batch
    from parapply.plan.changes import TableChanges
    from parapply.plan.keys import Key


class _Range(NamedTuple):
    """Keys of one form, the ends included; without ends there is none."""

    form: tuple[object, ...]
    low: Key | None
    high: Key | None

    def meets(self, other: _Range) -> bool:
        """Tell whether a key may be in both."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        # Keys of one form are all values or all tuples.
        return self.form != other.form or (self.low <= other.high and other.low <= self.high)  # type: ignore[operator]

    def joined(self, other: _Range) -> _Range | None:
        """Return the range of both; None if their keys cannot be compared."""
        if self.form != other.form:
            return None
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return _Range(self.form, min(lows, default=None), max(highs, default=None))


class Reach:
    """Written by the worker that plans the pieces; read by those of later transactions."""

    def __init__(self) -> None:
        """Start with nothing."""
        #: By the topmost table of each partition tree; None: all of it.
        self._ranges: dict[int, _Range | None] = {}
        #: Topmost tables that its foreign keys refer to.
        self._parents: set[int] = set()
        self._is_all = False

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was planned yet, so that nothing is known."""
        return not self._ranges and not self._is_all

    def add(self, batch: Batch | None) -> None:
        """Add what a piece touches; without a batch it was not read as sets, and may touch anything."""
        if batch is None or batch.runs_alone:
            self._is_all = True
            return
        for changes in batch.table_changes:
            own = _range_of(changes)
            tree_oid = changes.tree_oid
            if tree_oid in self._ranges:
                before = self._ranges[tree_oid]
                own = own and before and before.joined(own)
            self._ranges[tree_oid] = own
            self._parents.update([foreign.parent_oid for foreign in changes.plan.foreign_keys])

    def meets(self, batch: Batch | None) -> bool:
        """Tell whether a piece of a later transaction may touch what this one does; so does one that is not a set."""
        if self._is_all or batch is None or batch.runs_alone:
            return True
        return any(self._meets_in(changes) for changes in batch.table_changes)

    def _meets_in(self, changes: TableChanges) -> bool:
        if changes.tree_oid in self._parents:
            return True
        if any(foreign.parent_oid in self._ranges for foreign in changes.plan.foreign_keys):
            return True
        if changes.tree_oid not in self._ranges:
            return False
        own, held = _range_of(changes), self._ranges[changes.tree_oid]
        return own is None or held is None or held.meets(own)


def _range_of(changes: TableChanges) -> _Range | None:
    """Return the range of a piece's keys in one table; None: what it touches there is not known by them."""
    if changes.is_whole_table or changes.plan.unique_keys:
        return None
    sets = [keys for keys in changes.key_sets() if keys]
    low = min([min(keys) for keys in sets], default=None)
    high = max([max(keys) for keys in sets], default=None)
    return _Range(changes.key_form, low, high)
