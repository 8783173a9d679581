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
    from collections.abc import Collection, Iterator, Sequence

    from parapply.plan.steps import TablesStep
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
    parents: dict[int, set[int]] = {id(changes): set() for changes in tables}
    for child, parent in ties(tables):
        if child is not parent:
            parents[id(child)].add(id(parent))
    ordered: list[TableChanges] = []
    left = list(tables)
    while left:
        placed = {id(changes) for changes in ordered}
        ready = [changes for changes in left if parents[id(changes)] <= placed] or left[:1]
        ordered += ready
        left = [changes for changes in left if changes not in ready]
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
