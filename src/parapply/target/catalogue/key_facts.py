"""Unique indexes and foreign keys, from what the catalogue query returns to plain data. Pure.

In: the JSON objects of `target/catalogue/key_query.py`. Out: `UniqueFacts` and `ForeignKeyFacts`. Columns that an
index compares in a special way are UNKNOWN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply.plan.table import Equality, ForeignKeyFacts, UniqueFacts
from parapply.target.catalogue.equality import equality_of, prints_alike

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# OIDs of pg_type.dat.
#: Types that are indexed by another's class, and that one: varchar by text's, cidr by inet's.
_WITHOUT_CLASS: Final = {1043: 25, 650: 869}
#: anyarray, anyenum, anyrange, anymultirange, record.
_POLYMORPHIC: Final = frozenset({2277, 3500, 3831, 4537, 2249})


def indexed_equality(column: Mapping[str, Any]) -> Equality:
    """Return how an index compares one of its columns; without an index, how the type's default class does.

    Args:
        column: JSON object with base_type_oid, is_enum, is_deterministic, is_index_default, and class_type: the type
            that the index's operator class is made for, None without an index.
    """
    base_type = column["base_type_oid"]
    if not column["is_index_default"] or not _is_own_class(column["class_type"], base_type):
        return Equality.UNKNOWN
    return equality_of(base_type, is_enum=column["is_enum"], is_deterministic=column["is_deterministic"])


def _is_own_class(class_type: int | None, base_type: int) -> bool:
    """Return whether the default operator class of one type is also the default class of another.

    Types may be indexed by the class of any that they are binary-coercible to: under bpchar's, which is also a default
    one, trailing blanks of a varchar do not count (trap T-21).
    """
    return class_type in {None, base_type, _WITHOUT_CLASS.get(base_type)} or class_type in _POLYMORPHIC


def unique_facts(index: Mapping[str, Any]) -> UniqueFacts:
    """Return the facts of one unique or exclusion index."""
    columns = index["columns"]
    has_expression = any(column["name"] is None for column in columns)
    return UniqueFacts(
        name=index["name"],
        columns=() if has_expression else tuple(column["name"] for column in columns),
        equalities=() if has_expression else tuple(indexed_equality(column) for column in columns),
        is_nulls_distinct=index["is_nulls_distinct"],
        is_partial=index["is_partial"],
        is_exclusion=index["is_exclusion"],
        is_immediate=index["is_immediate"],
        named=tuple(column["name"] for column in columns if column["name"] is not None),
    )


def foreign_key_facts(foreign_key: Mapping[str, Any], columns: Sequence[Mapping[str, Any]]) -> ForeignKeyFacts:
    """Return the facts of one foreign key.

    Args:
        foreign_key: JSON object.
        columns: of the child, as the catalogue query describes them.
    """
    types = {column["name"]: column["base_type_oid"] for column in columns}
    parent_columns = foreign_key["parent_columns"]
    pairs = zip(foreign_key["columns"], parent_columns, strict=True)
    return ForeignKeyFacts(
        name=foreign_key["name"],
        columns=tuple(foreign_key["columns"]),
        parent_oid=foreign_key["parent_oid"],
        parent=foreign_key["parent"],
        parent_columns=tuple(column["name"] for column in parent_columns),
        parent_equalities=tuple(
            indexed_equality(parent) if prints_alike(types[child], parent["base_type_oid"]) else Equality.UNKNOWN
            for child, parent in pairs
        ),
        is_enforced=foreign_key["is_enforced"],
        is_cascading=foreign_key["is_cascading"],
    )
