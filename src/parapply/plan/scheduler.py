"""The order of batches: one waits for another that it overlaps, or may commit. Pure; one scheduler serves one stream.

Batches are ordered, because batches commit. One that overlaps another in flight waits until that has committed, not
until it has finished executing (traps T-34, T-35). Compared are tables of one partition tree, by

- the key that rows are found by: old and new one of every change (traps T-18, T-20),
- further unique indexes of the target: a value claimed twice, or freed and claimed (T-19, T-22),
- foreign keys: a child's parent is shared, a parent that comes or goes is exclusive (T-25),
- the whole table, where rows cannot be told apart, and everything, at a barrier (T-26).

The idea of one table of keys in flight is Amit Kapila's (pgsql-hackers, "Parallel Apply", 2025-08-11). Here the keys
are the keys of the dictionaries that hold the net changes anyway, so two batches are compared by set operations and
nothing is kept per change.

Where possible, only the changes of the common keys wait, the **late keys** of the batch: net changes of different keys
do not depend on each other, so the batch applies all others at once and these last, when their holders have committed.
So hot rows, which every batch touches, cost a statement of a few rows and not the parallelism.

With the commit order kept a batch commits when all earlier ones have. Relaxed it commits when the holders of its late
keys have; everything else it depends on has committed before it started.

The types of the compiled twin are in ``scheduler.pxd``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from parapply.plan import values
from parapply.plan.foreign_keys import ties
from parapply.plan.keys import Key
from parapply.plan.table_changes import NET_INSERT, NET_REPLACE, NetSegment, TableChanges
from parapply.vocabulary import WaitKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import cython  # read by the compiler only

    from parapply.plan.batch import Batch
    from parapply.plan.table import ForeignKey
else:
    from parapply import uncompiled as cython


class KeysInFlight:
    """Keys of the batches in flight, with how many hold each: one lookup a key, however many batches are in flight.

    Comparing a batch with each of those in flight, key by key, was the leader's largest part of a transaction. Nearly
    all keys are held by no batch, and one lookup a key finds that out here. The compiled twin counts hashes, so it may
    name a key that no batch holds (one in a few hundred), but it never leaves out one that is held. The exact
    comparison follows, for the named ones only. Written by the scheduler only.
    """

    def __init__(self) -> None:
        """Start with none."""
        if cython.compiled:
            self._slots = bytearray()  # as long as no key is held; see `_note`
        else:
            self._held: dict[int, dict[Key, int]] = {}

    def add(self, changes: TableChanges) -> set[Key]:
        """Note the keys of one table of a new batch, and return those that an earlier one may hold."""
        found: set[Key] = set()
        for segment in changes.segments:
            if isinstance(segment, NetSegment) and segment.net:
                self._note(changes.tree_oid, segment.net, found)
        if changes.moved_keys:
            self._note(changes.tree_oid, dict.fromkeys(changes.moved_keys), found)
        return found

    def remove(self, changes: TableChanges) -> None:
        """Forget the keys of one table of a batch that has committed."""
        for segment in changes.segments:
            if isinstance(segment, NetSegment) and segment.net:
                self._forget(changes.tree_oid, segment.net)
        if changes.moved_keys:
            self._forget(changes.tree_oid, dict.fromkeys(changes.moved_keys))

    def _note(self, tree_oid: int, keys: Mapping[Key, object], found: set[Key]) -> None:
        if cython.compiled:
            if not self._slots:
                self._slots = bytearray(1 << 20)
            note_hashes(self._slots, tree_oid, keys, found)  # type: ignore[name-defined]  # noqa: F821  scheduler.pxd
        else:
            held = self._held.setdefault(tree_oid, {})
            found |= held.keys() & keys.keys()
            for key in keys:
                held[key] = held.get(key, 0) + 1

    def _forget(self, tree_oid: int, keys: Mapping[Key, object]) -> None:
        if cython.compiled:
            forget_hashes(self._slots, tree_oid, keys)  # type: ignore[name-defined]  # noqa: F821  scheduler.pxd
        else:
            held = self._held[tree_oid]
            for key in keys:
                count = held[key] - 1
                if count:
                    held[key] = count
                else:
                    del held[key]
            if not held:
                del self._held[tree_oid]


class Wait(msgspec.Struct, frozen=True):
    """The batch that another one waits for, and the rows or values that it holds."""

    seq: int
    table: str  # schema.table; empty for a barrier
    kind: WaitKind
    name: str = ""  # of the index or constraint

    def __str__(self) -> str:
        """Return it in words."""
        what = f"{self.kind} {self.name}" if self.name else self.kind
        return f"batch {self.seq}: {what}" + (f" in {self.table}" if self.table else "")


_NO_KEYS: frozenset[Key] = frozenset()


class Overlap(msgspec.Struct, frozen=True):
    """A table that two batches touch so that it matters which comes first."""

    wait: Wait
    changes: TableChanges | None  # of the later batch; None for a barrier
    #: Keys of the later batch's changes that must come after the earlier batch; nothing where that is not known.
    keys: frozenset[Key] | set[Key]


def overlaps(earlier: Batch, later: Batch) -> list[Overlap]:
    """Return where two batches overlap; nothing if they are independent."""
    if earlier.runs_alone or later.runs_alone:
        return [Overlap(Wait(earlier.seq, "", WaitKind.BARRIER), None, _NO_KEYS)]
    held: dict[int, list[TableChanges]] = {}
    for changes in earlier.table_changes:
        held.setdefault(changes.tree_oid, []).append(changes)
        if changes.plan.constants:
            # A foreign key does not say in which part of the parent table its rows are.
            held.setdefault(changes.plan.facts.root_oid, []).append(changes)
    found: list[Overlap] = []
    for changes in later.table_changes:
        # Of thousands of tables nearly all are in both batches, and hold no key of each other's.
        is_by_key = changes.contended is not None and not (changes.contended or changes.plan.unique_keys)
        for other in held.get(changes.tree_oid, ()):
            if not (is_by_key and changes.is_compared_by_key(other)):
                found += _in_one_table(earlier.seq, other, changes)
        for foreign in changes.plan.foreign_keys:
            for parent in held.get(foreign.parent_oid, ()):
                found += _child_after_parent(earlier.seq, parent, changes, foreign)
    if earlier.has_foreign_keys:
        found += _parents_after_children(earlier, later)
    return found


def _in_one_table(seq: int, earlier: TableChanges, later: TableChanges) -> Iterator[Overlap]:
    table = later.plan.relation.qualified_name
    if earlier.plan.rows_oid != later.plan.rows_oid and not (
        earlier.plan.facts.is_partitioned or later.plan.facts.is_partitioned
    ):
        return  # two leaves: no row is in both
    if not earlier.is_compared_by_key(later):
        yield Overlap(Wait(seq, table, WaitKind.TABLE), later, _NO_KEYS)
        return
    common: set[Key] = set()
    for wanted in later.key_sets() if later.contended is None else [later.contended] if later.contended else ():
        for held in earlier.key_sets():
            common |= held & wanted
    if common:
        values.note_freed(later, earlier, common)
        yield Overlap(Wait(seq, table, WaitKind.KEY), later, common)
    for unique in later.plan.unique_keys:
        taken = values.claimed(later, unique) & values.held(earlier, unique)
        if taken:
            keys = values.unique_keys_with(later, unique, taken) if later.can_split else _NO_KEYS
            yield Overlap(Wait(seq, table, WaitKind.UNIQUE, unique.name), later, keys)


def _child_after_parent(seq: int, parent: TableChanges, child: TableChanges, foreign: ForeignKey) -> Iterator[Overlap]:
    if not foreign.leads_to(parent.plan):
        return
    wait = Wait(seq, child.plan.relation.qualified_name, WaitKind.FOREIGN_KEY, foreign.name)
    coming = values.exclusive(parent, foreign)
    if coming is None or child.is_whole_table or not foreign.equalities:
        yield Overlap(wait, child, _NO_KEYS)
    elif common := values.shared(child, foreign) & coming:
        keys = values.foreign_keys_with(child, foreign, common) if child.can_split else _NO_KEYS
        yield Overlap(wait, child, keys)


def _parents_after_children(earlier: Batch, later: Batch) -> Iterator[Overlap]:
    parents: dict[int, list[TableChanges]] = {}
    for changes in later.table_changes:
        parents.setdefault(changes.plan.facts.root_oid, []).append(changes)
    for child in earlier.table_changes:
        for foreign in child.plan.foreign_keys:
            for parent in parents.get(foreign.parent_oid, ()):
                yield from _parent_after_child(earlier.seq, child, parent, foreign)


def _parent_after_child(seq: int, child: TableChanges, parent: TableChanges, foreign: ForeignKey) -> Iterator[Overlap]:
    if not foreign.leads_to(parent.plan):
        return
    wait = Wait(seq, parent.plan.relation.qualified_name, WaitKind.FOREIGN_KEY, foreign.name)
    going = values.exclusive(parent, foreign)
    if going is None or child.is_whole_table or not foreign.equalities:
        # Parents that only change otherwise matter to no child.
        if going is None or values.removes(parent):
            yield Overlap(wait, parent, _NO_KEYS)
        return
    keys: set[Key] = set()
    common = values.shared(child, foreign) & going
    is_unknown = values.removes(parent) and values.frees_unknown(child, foreign)
    if not common and not is_unknown:
        return
    if parent.can_split:
        of = values.parent_reader(parent.plan, foreign)
        assert of is not None, "exclusive values were read with it"
        keys = values.keys_with(parent, of, common)
        if is_unknown:
            keys |= values.removed_keys(parent)
    yield Overlap(wait, parent, keys)


def is_split_unsafe(batch: Batch) -> bool:
    """Return whether late keys would bring a child before its parent, or take a parent from its child.

    Late updates and deletes of parents are harmless: they do not touch what children refer to, or come last anyway.
    """
    for child, parent in ties(batch.table_changes):
        if _has_late_inserts(parent) or (child.late_keys and _removes_at_once(parent)):
            return True
    return False


def _has_late_inserts(changes: TableChanges) -> bool:
    if not changes.late_keys:
        return False
    (segment,) = changes.segments
    assert isinstance(segment, NetSegment)
    return any(segment.net[key][0] in (NET_INSERT, NET_REPLACE) for key in changes.late_keys)


def _removes_at_once(changes: TableChanges) -> bool:
    if not changes.late_keys:
        return values.removes(changes)
    return not values.removed_keys(changes) <= changes.late_keys


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
        return not any(map(values.frees_late, batch.table_changes)) and not is_split_unsafe(batch)

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
