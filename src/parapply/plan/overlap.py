"""Where two batches overlap: what they both touch so that it matters which comes first. Pure.

Compared are tables of one partition tree, by

- the key that rows are found by: old and new one of every change (traps T-18, T-20),
- further unique indexes of the target: a value claimed twice, or freed and claimed (T-19, T-22),
- foreign keys: a child's parent is shared, a parent that comes or goes is exclusive (T-25),
- the whole table, where rows cannot be told apart, and everything, at a barrier (T-26).

The idea of one table of keys in flight is Amit Kapila's (pgsql-hackers, "Parallel Apply", 2025-08-11); here the keys
are the keys of the dictionaries that hold the net changes anyway, so two batches are compared by set operations and
nothing is kept per change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from parapply.plan import values
from parapply.plan.keys import Key
from parapply.plan.table_changes import TableChanges
from parapply.plan.waits import Wait
from parapply.vocabulary import WaitKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.plan.batch import Batch
    from parapply.plan.table import ForeignKey

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
