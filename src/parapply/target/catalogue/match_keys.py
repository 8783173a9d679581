"""Unique indexes and foreign keys of a target table that the planner can read from the rows on the wire. Pure.

In: a published relation, the facts of its target table and the matched columns. Out: `UniqueKey` and `ForeignKey` for
the plan, and phrases for people. With the commit order kept, an index that is left out costs repeated batches, never
rows, because a failed batch is applied again at the head. Relaxed, a later transaction could commit a value before an
earlier one had it, which would then fail at the head for ever, so such a table must be taken whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from parapply.plan.table import Equality, ForeignKey, UniqueKey
from parapply.target.catalogue.equality import equality_across

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.model import Relation
    from parapply.plan.table import ColumnFacts, ForeignKeyFacts, TableFacts, UniqueFacts

    _Key = TypeVar("_Key", UniqueKey, ForeignKey)


class UniqueKeys(NamedTuple):
    """Predicted unique indexes of a table, phrases about all of its unique indexes, and about unpredicted ones."""

    keys: tuple[UniqueKey, ...]
    phrases: list[str]
    unpredicted: list[str]


def unique_keys(relation: Relation, facts: TableFacts, columns: Sequence[ColumnFacts]) -> UniqueKeys:
    """Return the unique indexes whose values are on the wire and compare by their text (traps T-19, T-22).

    Partial ones also count: rows outside of their predicate only make batches wait without need. Indexes that differ
    in nothing but their partition are one.

    Args:
        relation: as announced.
        facts: of the target table.
        columns: target column of each wire column.
    """
    keys: list[UniqueKey] = []
    unpredicted: dict[str, list[str]] = {}
    for index in facts.unique:
        if index.is_exclusion:
            continue
        positions, why_not = _positions(relation, facts, index.columns)
        equalities = _equalities(relation, columns, index, positions)
        if not why_not and Equality.UNKNOWN in equalities:
            why_not = "equal values may differ in their text"
        if why_not:
            unpredicted.setdefault(why_not, []).append(index.name)
            continue
        key = UniqueKey(
            name=index.name,
            positions=positions,
            equalities=equalities,
            is_nulls_distinct=index.is_nulls_distinct,
            is_old_sent=_is_old_sent(relation, positions),
        )
        keys.append(key)
    phrases = [
        f"unique index {_few(names)} is not predicted ({why}): batches that fail are repeated"
        for why, names in unpredicted.items()
    ]
    if keys:
        phrases.insert(0, f"waits by unique index {_few([key.name for key in keys])}")
    named = [f"unique index {_few(names)} is not predicted ({why})" for why, names in unpredicted.items()]
    return UniqueKeys(_distinct(keys), phrases, named)


def foreign_keys(
    relation: Relation, facts: TableFacts, columns: Sequence[ColumnFacts], *, is_relaxed: bool
) -> tuple[ForeignKey, ...]:
    """Return the foreign keys whose edges matter: enforced ones, and with `is_relaxed` all (traps T-25, T-32).

    Args:
        relation: as announced.
        facts: of the target table, the child.
        columns: target column of each wire column.
        is_relaxed: independent transactions commit in any order, so readers could see a child without its parent.
    """
    keys: list[ForeignKey] = []
    for each in facts.foreign_keys:
        if not (each.is_enforced or is_relaxed):
            continue
        positions, why_not = _positions(relation, facts, each.columns)
        key = ForeignKey(
            name=each.name,
            positions=() if why_not else positions,
            parent_oid=each.parent_oid,
            parent_columns=each.parent_columns,
            equalities=() if why_not else _common([columns[position] for position in positions], each),
            is_old_sent=not why_not and _is_old_sent(relation, positions),
            is_enforced=each.is_enforced,
            is_cascading=each.is_cascading,
            constants=each.constants,
        )
        keys.append(key)
    return _distinct(keys)


def foreign_key_phrases(facts: TableFacts, keys: Sequence[ForeignKey]) -> list[str]:
    """Return the phrases shown to people about the foreign keys of a plan."""
    by_value = [key.name for key in keys if key.equalities]
    parents = {each.name: each.parent for each in facts.foreign_keys}
    phrases = [f"waits by foreign key {_few(by_value)}"] if by_value else []
    phrases += [
        f"waits for all of {parents[key.name]}: values of foreign key {key.name} cannot be compared"
        for key in keys
        if not key.equalities
    ]
    return phrases


def _positions(relation: Relation, facts: TableFacts, names: tuple[str, ...]) -> tuple[tuple[int, ...], str]:
    """Return the wire positions of columns, or why they cannot be read there."""
    if not names:
        return (), "expression"
    by_name = {column.name: position for position, column in enumerate(relation.columns)}
    unsent = {name for name in names if name not in by_name}
    if not unsent:
        return tuple(by_name[name] for name in names), ""
    if any(column.is_generated for column in facts.columns if column.name in unsent):
        return (), "generated column"
    return (), "column not published"


def _equalities(
    relation: Relation, columns: Sequence[ColumnFacts], index: UniqueFacts, positions: tuple[int, ...]
) -> tuple[Equality, ...]:
    """Return how the index compares values that come in the publisher's types; () without positions."""
    return tuple(
        equality_across(relation.columns[position], replace(columns[position], equality=equality))
        for position, equality in zip(positions, index.equalities, strict=False)
    )


def _common(columns: Sequence[ColumnFacts], foreign_key: ForeignKeyFacts) -> tuple[Equality, ...]:
    """Return forms in which values of child and parent compare, or () if one column has none.

    The child's column is matched with the publisher's type already, the parent's with the child's (`key_facts.py`).
    """
    pairs = zip((column.equality for column in columns), foreign_key.parent_equalities, strict=True)
    found = [_of_both(child, parent) for child, parent in pairs]
    return () if Equality.UNKNOWN in found else tuple(found)


def _of_both(child: Equality, parent: Equality) -> Equality:
    if child is parent:
        return child
    # Of the types that are compared with numeric only integers compare by their text.
    return Equality.NUMERIC if {child, parent} == {Equality.BYTES, Equality.NUMERIC} else Equality.UNKNOWN


def _is_old_sent(relation: Relation, positions: Iterable[int]) -> bool:
    return relation.replica_identity == "f" or all(relation.columns[position].is_key for position in positions)


def _distinct(keys: Iterable[_Key]) -> tuple[_Key, ...]:
    """Leave out keys that equal another except for its name, because every partition may have a copy of an index."""
    found: dict[_Key, _Key] = {}
    for key in keys:
        found.setdefault(replace(key, name=""), key)
    return tuple(found.values())


def _few(names: Sequence[str]) -> str:
    """Return names for people; of many only the first."""
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} and {len(names) - 1} more"


#: More would hide the rest of the reason.
_MOST_NAMES = 5
