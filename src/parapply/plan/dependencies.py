"""Which batch waits for which, and which may commit. Pure; one scheduler serves one stream.

What is ordered is a batch, because a batch is what commits. Whatever meets something in flight (`meetings.py`) waits
until its holder has committed, not until it has finished executing (traps T-34, T-35).

Where it can, not the batch waits but only the changes of the common keys, its **late keys**: net changes of different
keys do not depend on each other, so the batch applies all others at once and these last, when their holders have
committed. Hot rows, which every batch touches, so cost a statement of a few rows and not the parallelism.

With the commit order kept a batch commits when all earlier ones have. Relaxed it commits when the holders of its late
keys have; everything else it depends on has committed before it started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parapply.plan.families import is_split_unsafe
from parapply.plan.flight import KeysInFlight
from parapply.plan.meetings import Meeting, Wait, meetings
from parapply.plan.values import frees_late

if TYPE_CHECKING:
    from parapply.plan.batch import Batch

__all__ = ["Freed", "Meeting", "Scheduler", "Wait", "meetings"]


class Freed(NamedTuple):
    """What a commit makes possible, both in source order."""

    to_start: list[Batch]
    to_commit: list[Batch]  # may commit as soon as they have executed


class Scheduler:
    """Closed batches that have not committed, in source order, and what each waits for.

    Written and read by the leader only.
    """

    def __init__(self, *, is_relaxed: bool = False) -> None:
        """Start with nothing in flight; `is_relaxed` lets independent batches commit in any order."""
        self._is_relaxed = is_relaxed
        self._open: dict[int, Batch] = {}
        self._keys = KeysInFlight()
        #: By batch: whom it waits for before it starts, and before the changes of its late keys.
        self._waits: dict[int, dict[int, Wait]] = {}
        self._late: dict[int, dict[int, Wait]] = {}

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
        for earlier in self._open.values():
            for meeting in meetings(earlier, batch):
                met = meeting.changes
                if meeting.keys and met is not None and met.can_split:
                    met.late_keys |= meeting.keys
                    late.setdefault(earlier.seq, meeting.wait)
                else:
                    waits.setdefault(earlier.seq, meeting.wait)
        if late and not self._may_split(batch, late):
            waits = {**late, **waits}
            late = {}
            for changes in batch.table_changes:
                changes.late_keys.clear()
        batch.late_for = next(reversed(late.values()), None)
        self._open[batch.seq] = batch
        self._waits[batch.seq] = waits
        self._late[batch.seq] = late
        return not waits

    def _may_split(self, batch: Batch, late: dict[int, Wait]) -> bool:
        if any(self._open[seq].is_slow for seq in late):
            return False  # it would keep a worker for long
        if all(changes.is_all_late for changes in batch.table_changes):
            return False  # nothing to do meanwhile
        return not any(map(frees_late, batch.table_changes)) and not is_split_unsafe(batch)

    def give_back(self, batch: Batch) -> bool:
        """Make a rolled back batch wait as a whole for the holders of its late keys; True if none is left.

        The holders are marked slow: nobody waits for them with a worker any more.
        """
        late, self._late[batch.seq] = self._late[batch.seq], {}
        for seq in late:
            self._open[seq].is_slow = True
        for changes in batch.table_changes:
            changes.late_keys.clear()
        self._waits[batch.seq] = late
        return not late

    def committed(self, batch: Batch) -> Freed:
        """Take a committed batch out and return what that makes possible."""
        for changes in batch.table_changes:
            self._keys.remove(changes)
        del self._open[batch.seq]
        del self._waits[batch.seq]
        del self._late[batch.seq]
        to_start = [self._open[seq] for seq, waits in self._waits.items() if _is_last(waits, batch.seq)]
        after_late = [self._open[seq] for seq, late in self._late.items() if _is_last(late, batch.seq)]
        if self._is_relaxed:
            return Freed(to_start, after_late)
        return Freed(to_start, [self.head] if self.head is not None else [])

    def may_commit(self, batch: Batch) -> bool:
        """Tell whether a batch that has started may apply its late keys and commit."""
        return not self._late[batch.seq] if self._is_relaxed else self.head is batch

    def waits_of(self, batch: Batch) -> tuple[Wait, ...]:
        """Return what a batch waits for before it starts."""
        return tuple(self._waits.get(batch.seq, {}).values())

    def late_waits_of(self, batch: Batch) -> tuple[Wait, ...]:
        """Return what the changes of a batch's late keys wait for."""
        return tuple(self._late.get(batch.seq, {}).values())

    @property
    def head(self) -> Batch | None:
        """Return the earliest batch that has not committed; with the order kept it has the commit turn."""
        return next(iter(self._open.values()), None)

    def batches(self) -> list[Batch]:
        """Return the batches not committed, in source order."""
        return list(self._open.values())


def _is_last(waits: dict[int, Wait], seq: int) -> bool:
    """Take a wait out; True if it was there and was the last one."""
    return waits.pop(seq, None) is not None and not waits
