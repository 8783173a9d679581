"""Tables of one batch that enforced foreign keys tie together, and the order in which sets of them are exact. Pure.

A child must not be written before its parent, nor a parent deleted before its child. So, with parents first: deletes
from the last table to the first, then each table's updates and inserts from the first to the last. A parent whose
children are updated is deleted last, because they may let go of it. A case that this cannot order (a ring of tables, a
value that a parent frees for its successor) fails on the target, and the batch is repeated row by row in source order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.plan.table_changes import InsertSegment, NetSegment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from parapply.plan.steps import TablesStep
    from parapply.plan.table import TableFacts
    from parapply.plan.table_changes import TableChanges


def ties(tables: Collection[TableChanges]) -> Iterator[tuple[TableChanges, TableChanges]]:
    """Yield each child and parent among a batch's tables that an enforced foreign key ties; one may be both."""
    by_tree: dict[int, list[TableChanges]] = {}
    for changes in tables:
        by_tree.setdefault(changes.plan.facts.root_oid, []).append(changes)
    for child in tables:
        for foreign in child.plan.foreign_keys:
            if foreign.is_enforced:
                for parent in by_tree.get(foreign.parent_oid, ()):
                    if foreign.leads_to(parent.plan):
                        yield child, parent


def can_order(step: TablesStep) -> bool:
    """Return whether sets of the step's tables can be put into an order that their foreign keys take."""
    for pair in ties(step.tables.values()):
        for changes in pair:
            if len(changes.segments) != 1 or not isinstance(changes.segments[0], NetSegment | InsertSegment):
                return False
    return True


def parents_first(tables: Sequence[TableChanges]) -> list[TableChanges]:
    """Return the tables with every parent before its children; where they form a ring, as they came."""
    by_id = {id(changes): changes for changes in tables}
    parents: dict[int, set[int]] = {number: set() for number in by_id}
    for child, parent in ties(tables):
        if child is not parent:
            parents[id(child)].add(id(parent))
    return [by_id[number] for number in _ordered(by_id, parents)]


def children_first(tables: Sequence[TableFacts]) -> list[int]:
    """Return the places of tables with every child before its parents; others, and a ring, from the last one on."""
    children = {
        at: {
            other
            for other, child in enumerate(tables)
            if other != at and any(key.is_enforced and key.parent_oid == table.root_oid for key in child.foreign_keys)
        }
        for at, table in enumerate(tables)
    }
    return _ordered(reversed(children), children)


def _ordered(numbers: Iterable[int], earlier: Mapping[int, set[int]]) -> list[int]:
    """Return numbers in their order, but each behind its earlier ones; in a ring the first one left comes next."""
    ordered: list[int] = []
    left = list(numbers)
    while left:
        placed = set(ordered)
        ready = [number for number in left if earlier[number] <= placed] or left[:1]
        ordered += ready
        placed.update(ready)
        left = [number for number in left if number not in placed]
    return ordered


def deleted_last(tables: Sequence[TableChanges]) -> set[int]:
    """Return the identities of parents whose children are updated in the same batch."""
    return {id(parent) for child, parent in ties(tables) if any(segment.counts[1] for segment in child.segments)}


def overlaps_itself(tables: Sequence[TableChanges]) -> bool:
    """Return whether rows of one partition tree are in two tables of a batch: written to a leaf and through its root.

    That happens where the publication changes how it names partitions. Their order is in the stream only.
    """
    named: dict[int, set[int]] = {}
    for changes in tables:
        named.setdefault(changes.tree_oid, set()).add(changes.plan.rows_oid)
    several = {tree for tree, oids in named.items() if len(oids) > 1}
    return any(changes.tree_oid in several and changes.plan.facts.is_partitioned for changes in tables)
