"""Which batch waits for which. Pure; one scheduler serves one stream.

The idea is Amit Kapila's for parallel apply (pgsql-hackers, 2022-04-06 and 2025-08-11): a transaction depends on every
earlier, unfinished one that holds one of its keys. Two things differ. What is ordered is a batch, because a batch is
what commits; and a batch's keys are the keys of the dictionaries that already hold its net changes, so two batches are
compared by set operations and nothing is kept per change. Whatever meets a key in flight waits until its holder has
committed, not until it has finished executing (traps T-34, T-35).

Where it can, not the batch waits but only the changes of the common keys, its **late keys**: net changes of different
keys do not depend on each other, so the batch applies all others at once and these last, in its turn to commit. Hot
rows, which every batch touches, so cost a statement of a few rows in turn and not the parallelism.

Doubt widens: a table without comparable keys, with unique indexes beside its key or applied row by row counts as one
key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parapply.plan.batch import Batch
    from parapply.plan.changes import TableChanges
    from parapply.plan.keys import Key

_NO_KEYS: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a batch waits, for people: which batch holds what."""

    seq: int
    table: str
    kind: str  # 'key', 'table' or 'barrier'


@dataclass(frozen=True, slots=True)
class Meeting:
    """A table that two batches touch so that it matters which comes first."""

    wait: Wait
    changes: TableChanges | None  # of the later batch; None for a barrier
    keys: frozenset[Key] | set[Key]  # touched by both; nothing where that is not known


def meetings(earlier: Batch, later: Batch) -> list[Meeting]:
    """Return where two batches meet; nothing if they are independent."""
    if earlier.is_barrier or later.is_barrier or earlier.is_suspect or later.is_suspect:
        return [Meeting(Wait(earlier.seq, "", "barrier"), None, _NO_KEYS)]
    held: dict[int, list[TableChanges]] = {}
    for changes in earlier.table_changes:
        held.setdefault(changes.plan.facts.oid, []).append(changes)
    found = []
    for changes in later.table_changes:
        for other in held.get(changes.plan.facts.oid, ()):
            is_wide = other.is_whole_table or changes.is_whole_table or other.key_form != changes.key_form
            keys = _NO_KEYS if is_wide else _common_keys(other, changes)
            if is_wide or keys:
                kind = "table" if is_wide else "key"
                found.append(Meeting(Wait(earlier.seq, changes.plan.relation.qualified_name, kind), changes, keys))
    return found


def _common_keys(earlier: TableChanges, later: TableChanges) -> set[Key]:
    common: set[Key] = set()
    for held in earlier.key_sets():
        for wanted in later.key_sets():
            common |= held & wanted
    return common


class Scheduler:
    """Closed batches that have not committed, in source order, and what each waits for.

    Written and read by the leader only.
    """

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self._open: dict[int, Batch] = {}
        self._waits: dict[int, dict[int, Wait]] = {}

    def __len__(self) -> int:
        """Return the number of batches not committed."""
        return len(self._open)

    def add(self, batch: Batch) -> bool:
        """Add a closed batch, later than all others, and put its late keys off; True if it may start at once."""
        assert not self._open or batch.seq > next(reversed(self._open)), "batches are added in source order"
        waits = {}
        for earlier in self._open.values():
            for meeting in meetings(earlier, batch):
                changes = meeting.changes
                if meeting.keys and changes is not None and changes.can_split:
                    changes.late_keys |= meeting.keys
                    batch.late_for = meeting.wait
                else:
                    waits[earlier.seq] = meeting.wait
        self._open[batch.seq] = batch
        self._waits[batch.seq] = waits
        return not waits

    def wait_for_all_earlier(self, batch: Batch) -> bool:
        """Make a batch wait for every earlier one, as a retry at the head does; True if there is none."""
        waits = self._waits[batch.seq]
        for seq in self._open:
            if seq < batch.seq:
                waits.setdefault(seq, Wait(seq, "", "barrier"))
        return not waits

    def committed(self, batch: Batch) -> list[Batch]:
        """Take a committed batch out and return those that may start now, in source order."""
        del self._open[batch.seq]
        del self._waits[batch.seq]
        freed = []
        for seq, waits in self._waits.items():
            if waits.pop(batch.seq, None) is not None and not waits:
                freed.append(self._open[seq])
        return freed

    def waits_of(self, batch: Batch) -> tuple[Wait, ...]:
        """Return what a batch waits for now."""
        return tuple(self._waits.get(batch.seq, {}).values())

    @property
    def head(self) -> Batch | None:
        """Return the earliest batch that has not committed: it has the commit turn."""
        return next(iter(self._open.values()), None)

    def batches(self) -> list[Batch]:
        """Return the batches not committed, in source order."""
        return list(self._open.values())
