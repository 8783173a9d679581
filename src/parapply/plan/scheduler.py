"""The order of batches: one waits for another, or may commit. Pure; one scheduler serves one stream.

Batches are ordered, because batches commit. One that overlaps another in flight (`overlap.py`) waits until that has
committed, not until it has finished executing (traps T-34, T-35).

Where possible, only the changes of the common keys wait, the **late keys** of the batch: net changes of different keys
do not depend on each other, so the batch applies all others at once and these last, when their holders have committed.
So hot rows, which every batch touches, cost a statement of a few rows and not the parallelism.

With the commit order kept a batch commits when all earlier ones have. Relaxed it commits when the holders of its late
keys have; everything else it depends on has committed before it started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parapply.plan.flight import KeysInFlight
from parapply.plan.late_keys import is_split_unsafe
from parapply.plan.overlap import overlaps
from parapply.plan.values import frees_late

if TYPE_CHECKING:
    from parapply.plan.batch import Batch
    from parapply.plan.waits import Wait


class Freed(NamedTuple):
    """Batches that may go on after a commit, both lists in source order."""

    to_start: list[Batch]
    to_commit: list[Batch]  # may commit as soon as they have executed


class _InFlight:
    """A batch that has not committed, with the facts that the scheduler alone knows of it."""

    __slots__ = ("batch", "is_slow", "late", "waits")

    def __init__(self, batch: Batch, waits: dict[int, Wait], late: dict[int, Wait]) -> None:
        self.batch = batch
        #: Its waits before it starts, by the number of the batch that holds the rows.
        self.waits = waits
        #: The same for the changes of its late keys.
        self.late = late
        #: True if others have waited for it long enough.
        self.is_slow = False


class Scheduler:
    """Closed batches that have not committed, in source order, and what each waits for.

    Of two batches that overlap, the later one starts after the earlier one has committed, or starts at once and applies
    its late keys after that. Two that do not overlap may run at the same time. Written and read by the leader only.
    """

    def __init__(self, *, is_relaxed: bool = False) -> None:
        """Start with nothing in flight; `is_relaxed` lets independent batches commit in any order."""
        self._is_relaxed = is_relaxed
        self._open: dict[int, _InFlight] = {}
        self._keys = KeysInFlight()

    def __len__(self) -> int:
        """Return the number of batches not committed."""
        return len(self._open)

    def add(self, batch: Batch) -> bool:
        """Add a closed batch, later than all others, and put its late keys off; True if it may start at once."""
        assert not self._open or batch.seq > next(reversed(self._open)), "batches are added in source order"
        waits: dict[int, Wait] = {}
        late: dict[int, Wait] = {}
        for changes in batch.table_changes:
            changes.contended = self._keys.add(changes)
        for seq, earlier in self._open.items():
            for overlap in overlaps(earlier.batch, batch):
                contended = overlap.changes
                if overlap.keys and contended is not None and contended.can_split:
                    contended.late_keys |= overlap.keys
                    late.setdefault(seq, overlap.wait)
                else:
                    waits.setdefault(seq, overlap.wait)
        if late and not self._may_split(batch, late):
            waits = {**late, **waits}
            late = {}
            _join(batch)
        self._open[batch.seq] = _InFlight(batch, waits, late)
        return not waits

    def _may_split(self, batch: Batch, late: dict[int, Wait]) -> bool:
        if any(self._open[seq].is_slow for seq in late):
            return False  # it would keep a worker for long
        if all(changes.is_all_late for changes in batch.table_changes):
            return False  # nothing to do until then
        return not any(map(frees_late, batch.table_changes)) and not is_split_unsafe(batch)

    def started(self, batch: Batch) -> None:
        """Take a batch that a worker begins with: split no more if all holders of its late keys have committed."""
        if not self._open[batch.seq].late:
            _join(batch)

    def give_back(self, batch: Batch) -> bool:
        """Make a rolled back batch wait as a whole for the holders of its late keys; True if none is left.

        The holders are marked slow, so that no worker waits for them any more.
        """
        own = self._open[batch.seq]
        for seq in own.late:
            self._open[seq].is_slow = True
        _join(batch)
        own.waits, own.late = own.late, {}
        return not own.waits

    def committed(self, batch: Batch) -> Freed:
        """Take a committed batch out and return what that makes possible."""
        for changes in batch.table_changes:
            self._keys.remove(changes)
        del self._open[batch.seq]
        to_start = [one.batch for one in self._open.values() if _is_last(one.waits, batch.seq)]
        after_late = [one.batch for one in self._open.values() if _is_last(one.late, batch.seq)]
        if self._is_relaxed:
            return Freed(to_start, after_late)
        return Freed(to_start, [self.head] if self.head is not None else [])

    def may_commit(self, batch: Batch) -> bool:
        """Return whether a batch that has started may apply its late keys and commit."""
        return not self._open[batch.seq].late if self._is_relaxed else self.head is batch

    def waits_of(self, batch: Batch) -> tuple[Wait, ...]:
        """Return the waits of a batch before it starts; nothing if it is not in flight."""
        own = self._open.get(batch.seq)
        return tuple(own.waits.values()) if own is not None else ()

    def late_waits_of(self, batch: Batch) -> tuple[Wait, ...]:
        """Return the waits of the changes of a batch's late keys; nothing if it is not in flight."""
        own = self._open.get(batch.seq)
        return tuple(own.late.values()) if own is not None else ()

    @property
    def head(self) -> Batch | None:
        """Return the earliest batch that has not committed; with the order kept it has the commit turn."""
        first = next(iter(self._open.values()), None)
        return first.batch if first is not None else None

    def batches(self) -> list[Batch]:
        """Return the batches not committed, in source order."""
        return [one.batch for one in self._open.values()]


def _join(batch: Batch) -> None:
    """Have all changes of a batch applied at once."""
    for changes in batch.table_changes:
        changes.late_keys.clear()


def _is_last(waits: dict[int, Wait], seq: int) -> bool:
    """Take a wait out; True if it existed and was the last one."""
    return waits.pop(seq, None) is not None and not waits
