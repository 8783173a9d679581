"""What a large transaction touches as far as it was planned: whole tables, or from which to which key. Pure.

Of a large transaction the keys themselves are not kept. Two that touch other tables, or other ranges of keys, can be
applied at the same time. That is a prediction, from what has come so far. Where it is wrong, a lock, a duplicate key or
a number of rows says so on the target, and one of both rolls back. So nothing may be applied alongside an earlier one
whose number of rows is not checked (`runtime/apply/pieces.py`).

Keys are put in order as bytes. It is no order that people know, but in any order two sets are disjoint if their ranges
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from parapply.plan.batch import Batch
    from parapply.plan.keys import Key
    from parapply.plan.table_changes import TableChanges


class _Range(NamedTuple):
    """Keys of one form, the ends included; without ends there is none."""

    form: tuple[object, ...]
    low: Key | None
    high: Key | None

    def overlaps(self, other: _Range) -> bool:
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


class Footprint:
    """Of one piece, or of the pieces of a transaction, which the worker that plans them joins to it."""

    def __init__(self) -> None:
        """Start with nothing."""
        #: By the topmost table of each partition tree; None: all of it.
        self._ranges: dict[int, _Range | None] = {}
        #: Topmost tables that its foreign keys refer to.
        self._parents: set[int] = set()
        #: Publisher's OIDs of what it has changed.
        self._relations: set[int] = set()
        self._is_all = False

    @classmethod
    def of(cls, batch: Batch | None) -> Footprint:
        """Return what a piece touches; without a batch it was not read as sets, and may touch anything."""
        footprint = cls()
        if batch is None or batch.runs_alone:
            footprint._is_all = True
            return footprint
        for changes in batch.table_changes:
            footprint._add(changes.tree_oid, _range_of(changes))
            footprint._parents.update([foreign.parent_oid for foreign in changes.plan.foreign_keys])
            footprint._relations.add(changes.plan.relation.oid)
        return footprint

    def join(self, piece: Footprint) -> bool:
        """Add what one more piece touches, and tell whether that was the first change of a table."""
        is_new = not piece._relations <= self._relations
        for tree_oid, own in piece._ranges.items():
            self._add(tree_oid, own)
        self._parents |= piece._parents
        self._relations |= piece._relations
        self._is_all = self._is_all or piece._is_all
        return is_new

    def overlaps(self, piece: Footprint, announced: AbstractSet[int] = frozenset()) -> bool:
        """Tell whether a piece of another transaction may touch what this one does.

        Args:
            piece: of the other one.
            announced: publisher's OIDs of everything that this one changes or will change.
        """
        if self._is_all or piece._is_all or not (announced & piece._relations) <= self._relations:
            return True
        if self._parents & piece._ranges.keys() or piece._parents & self._ranges.keys():
            return True
        for tree_oid in self._ranges.keys() & piece._ranges.keys():
            held, wanted = self._ranges[tree_oid], piece._ranges[tree_oid]
            if held is None or wanted is None or held.overlaps(wanted):
                return True
        return False

    def _add(self, tree_oid: int, own: _Range | None) -> None:
        if tree_oid in self._ranges:
            before = self._ranges[tree_oid]
            own = own and before and before.joined(own)
        self._ranges[tree_oid] = own


def _range_of(changes: TableChanges) -> _Range | None:
    """Return the range of a piece's keys in one table; None: what it touches there is not known by them."""
    if changes.is_whole_table or changes.plan.unique_keys:
        return None
    sets = [keys for keys in changes.key_sets() if keys]
    low = min([min(keys) for keys in sets], default=None)
    high = max([max(keys) for keys in sets], default=None)
    return _Range(changes.key_form, low, high)
