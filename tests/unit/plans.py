"""Table facts and relations for tests without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from parapply.model import Column, Relation
from parapply.plan.table import ColumnFacts, Equality, ForeignKeyFacts, TableFacts, UniqueFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

#: OIDs and cast names of the types used in tests.
TYPES = {
    "int2": 21,
    "int4": 23,
    "int8": 20,
    "oid": 26,
    "text": 25,
    "varchar": 1043,
    "bpchar": 1042,
    "numeric": 1700,
    "float8": 701,
    "date": 1082,
    "timestamp": 1114,
    "uuid": 2950,
    "jsonb": 3802,
    "json": 114,
}

PLAIN_TABLE = TableFacts(
    oid=1,
    root_oid=1,
    schema="s",
    name="t",
    is_partitioned=False,
    columns=(),
    key_columns=(),
    key_is_deferrable=False,
    unique=(),
    foreign_keys=(),
    triggers=(),
    rules=(),
    code=(),
)


def column(name: str, type_: str = "int4", **changes: Any) -> ColumnFacts:  # noqa: ANN401 - any field
    """Return a target column of a built-in type, comparing by bytes unless told otherwise."""
    facts = ColumnFacts(
        name=name,
        type_sql=f"pg_catalog.{type_}",
        type_oid=TYPES[type_],
        base_type_oid=TYPES[type_],
        is_generated=False,
        is_identity_always=False,
        has_equality=True,
        equality=Equality.BYTES,
    )
    return replace(facts, **changes)


def table(columns: Sequence[ColumnFacts], key: Sequence[str] = (), **changes: Any) -> TableFacts:  # noqa: ANN401
    """Return a target table ``s.t``."""
    changes.setdefault("root_oid", changes.get("oid", PLAIN_TABLE.oid))
    return replace(PLAIN_TABLE, columns=tuple(columns), key_columns=tuple(key), **changes)


def unique(name: str, *columns: str, **changes: Any) -> UniqueFacts:  # noqa: ANN401 - any field
    """Return a unique index on columns that compare by bytes; without columns, on an expression."""
    facts = UniqueFacts(
        name=name,
        columns=columns,
        equalities=(Equality.BYTES,) * len(columns),
        is_nulls_distinct=True,
        is_partial=False,
        is_exclusion=False,
    )
    return replace(facts, **changes)


def exclusion(name: str, *columns: str) -> UniqueFacts:
    """Return an exclusion constraint."""
    return unique(name, *columns, equalities=(Equality.UNKNOWN,) * len(columns), is_exclusion=True)


def foreign_key(name: str, *columns: str, **changes: Any) -> ForeignKeyFacts:  # noqa: ANN401 - any field
    """Return an enforced foreign key to columns of the same names, compared by bytes, of ``s.parent``."""
    facts = ForeignKeyFacts(
        name=name,
        columns=columns,
        parent_oid=2,
        parent="s.parent",
        parent_columns=columns,
        parent_equalities=(Equality.BYTES,) * len(columns),
        is_enforced=True,
        is_cascading=False,
    )
    return replace(facts, **changes)


def sent(name: str, type_: str = "int4", *, is_key: bool = False, type_modifier: int = -1, oid: int = 0) -> Column:
    """Return a published column; `oid` takes the place of the type's."""
    return Column(name=name, type_oid=oid or TYPES[type_], type_modifier=type_modifier, is_key=is_key)


def relation(*columns: Column, identity: str = "d", oid: int = 7, name: str = "t") -> Relation:
    """Return a published relation ``s.t``."""
    return Relation(oid=oid, schema="s", name=name, replica_identity=identity, columns=columns)
