"""Rows that get other keys: which of them may be one set. Pure.

As a set they are updated in any order, and PostgreSQL looks at the key with each row (trap T-38): 1 to 2 and 2 to 3
fails or succeeds by luck. Where no row's old or new key is the old or new key of another row, every order gives
the result of the source's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.plan.keys import Key, key_reader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.plan.table import TablePlan
    from parapply.plan.table_changes import RowSegment


def can_move(plan: TablePlan) -> bool:
    """Return whether sets can give rows of a table other keys: not where each row has to be asked for separately.

    That is where a trigger may veto the change (trap T-43), where it matters who wrote the row last, where a column
    cannot be set (trap T-50), and where foreign keys are enforced: the rows that refer to a key may go along (T-25).
    """
    return not (
        plan.facts.triggers
        or plan.checks_origin
        or any(column.is_identity_always for column in plan.columns)
        or any(foreign.is_enforced for foreign in plan.foreign_keys)
        or any(foreign.is_enforced for foreign in plan.facts.foreign_keys)
    )


def runs_of_moves(segment: RowSegment) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of moves that may be one set, in source order."""
    key_of = key_reader(segment.plan)
    touched: set[Key] = set()
    start = 0
    for number, (old, row) in enumerate(segment.moves):
        before, after = key_of(old), key_of(row)
        if before in touched or after in touched:
            yield start, number
            start = number
            touched.clear()
        touched.add(before)
        touched.add(after)
    yield start, len(segment.moves)
