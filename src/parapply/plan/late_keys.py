"""Foreign keys and late keys: may a batch put off the changes of its late keys? Pure.

Late keys are those that another batch in flight holds; their changes are applied after all others of the batch, when
the holders have committed (`scheduler.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.plan.foreign_keys import ties
from parapply.plan.table_changes import NET_INSERT, NET_REPLACE, NetSegment
from parapply.plan.values import removed_keys, removes

if TYPE_CHECKING:
    from parapply.plan.batch import Batch
    from parapply.plan.table_changes import TableChanges


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
        return removes(changes)
    return not removed_keys(changes) <= changes.late_keys
