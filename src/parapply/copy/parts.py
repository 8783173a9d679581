"""Tables cut into parts that are copied, or read, separately. Pure.

A part is a range of a relation's pages, read by a TID range scan, so that several connections share one large table.

Source: PostgreSQL manual, "System Columns" (ctid), "COPY".
"""

from __future__ import annotations

import itertools
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parapply.copy.published import Leaf, PublishedTable

_NO_TYPES: Final[Mapping[str, int]] = MappingProxyType({})
#: Pages of a part that is copied: 16 MB with PostgreSQL's own page size. Small enough that connections end at about the
#: same time, large enough that a part's start and commit, some milliseconds, cost little.
COPIED_PAGES = 2048
#: OIDs of built-in types, the same on every server (pg_type.dat), whose binary form has not changed since PostgreSQL 14
#: at least. A table with any other type is copied as text: types of users and extensions may differ under one name,
#: arrays and composites name the types of their elements by number, and an infinite interval is a number of months to
#: servers before 17. Length and precision are checked on the way in as they are for text.
BINARY_TYPES = frozenset(
    {
        16,  # bool
        17,  # bytea
        20,  # int8
        21,  # int2
        23,  # int4
        25,  # text
        114,  # json
        700,  # float4
        701,  # float8
        1042,  # bpchar
        1043,  # varchar
        1082,  # date
        1083,  # time
        1114,  # timestamp
        1184,  # timestamptz
        1266,  # timetz
        1700,  # numeric
        2950,  # uuid
        3802,  # jsonb
    }
)

#: Names of the types of constants, by OID; any other constant comes as text.
CONSTANT_TYPES = {16: "bool", 20: "int8", 21: "int2", 23: "int4", 25: "text", 1043: "varchar", 2950: "uuid"}


def is_binary(table: PublishedTable, target_types: Mapping[str, int]) -> bool:
    """Return whether a table's rows can go in binary."""
    return all(target_types.get(column) in CONSTANT_TYPES for column in table.constants) and all(
        type_oid in BINARY_TYPES and target_types.get(column) == type_oid
        for column, type_oid in zip(table.columns, table.types, strict=True)
    )


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some pages of a relation."""

    schema: str
    name: str
    first_page: int = 0
    end_page: int | None = None  # None: to the end of the relation
    pages: int = 0  # about, for the order of work and the progress bar
    estimated_rows: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether it is all of the relation."""
        return self.first_page == 0 and self.end_page is None


def parts_of(leaf: Leaf, part_pages: int) -> Iterator[Part]:
    """Cut a relation into parts of about equal size, at most that many pages; the last one has no end."""
    n_parts = max(1, -(-leaf.pages // part_pages)) if leaf.has_ranges else 1
    bounds = [leaf.pages * number // n_parts for number in range(n_parts + 1)]
    for first, end in itertools.pairwise(bounds):
        yield Part(
            schema=leaf.schema,
            name=leaf.name,
            first_page=first,
            end_page=None if end == bounds[-1] else end,
            pages=end - first,
            estimated_rows=leaf.estimated_rows * (end - first) // leaf.pages if leaf.pages else leaf.estimated_rows,
        )


def bounds(part: Part, column: str = "ctid", *, alias: str = "") -> sql.Composed:
    """Return the condition for the rows of a part, without WHERE; empty if it is all of the relation."""
    name: sql.Composable = sql.SQL("ctid") if column == "ctid" else sql.Identifier(column)
    name = sql.SQL("{}.{}").format(sql.Identifier(alias), name) if alias else name
    terms = []
    if part.first_page:
        terms.append(sql.SQL("{} >= {}::pg_catalog.tid").format(name, sql.Literal(f"({part.first_page},0)")))
    if part.end_page is not None:
        terms.append(sql.SQL("{} < {}::pg_catalog.tid").format(name, sql.Literal(f"({part.end_page},0)")))
    return sql.SQL(" AND ").join(terms)


def condition(part: Part, row_filter: str | sql.Composed = "") -> sql.Composed:
    """Return WHERE and its condition, or nothing for all rows of the relation."""
    terms = [] if part.is_whole else [bounds(part)]
    if row_filter:
        # The publisher's own text of an expression that it has checked, or ours.
        text = sql.SQL(row_filter) if isinstance(row_filter, str) else row_filter
        terms.append(sql.SQL("({})").format(text))
    return sql.SQL(" WHERE ") + sql.SQL(" AND ").join(terms) if terms else sql.Composed([])


def column_list(columns: Sequence[str]) -> sql.Composed:
    """Return quoted names, separated by commas."""
    return sql.SQL(", ").join([sql.Identifier(column) for column in columns])


def copy_out(
    table: PublishedTable, part: Part, *, is_binary: bool = False, target_types: Mapping[str, int] = _NO_TYPES
) -> sql.Composed:
    """Return the COPY that sends a part's published rows and columns, and constants of the target behind them.

    A constant's binary form follows from the OID of its column's type on the target.
    """
    relation = sql.Identifier(part.schema, part.name)
    types = target_types if is_binary else _NO_TYPES
    columns = with_constants([sql.Identifier(column) for column in table.columns], table, types)
    form = _FORMS[is_binary]
    # The other form is refused for generated columns.
    if part.is_whole and not (table.row_filter or table.constants or table.has_generated):
        return sql.SQL("COPY {} ({}) TO STDOUT{}").format(relation, columns, form)
    return sql.SQL("COPY (SELECT {} FROM ONLY {}{}) TO STDOUT{}").format(
        columns, relation, condition(part, table.row_filter), form
    )


def copy_in(table: PublishedTable, *, is_binary: bool = False) -> sql.Composed:
    """Return the COPY that takes such rows on the target; a partitioned table there routes them itself."""
    return sql.SQL("COPY {} ({}) FROM STDIN{}").format(
        sql.Identifier(*(table.target or table.full_name)), column_list(table.filled), _FORMS[is_binary]
    )


def with_constants(
    columns: Sequence[sql.Composable], table: PublishedTable, types: Mapping[str, int] = _NO_TYPES
) -> sql.Composed:
    """Return what a SELECT on the publisher returns for `PublishedTable.filled`: columns, then constants.

    These are of their types, if types are given, else texts.
    """
    fixed = [
        sql.SQL("{}::{}").format(
            sql.Literal(text), sql.Identifier("pg_catalog", CONSTANT_TYPES.get(types.get(name, 0), "text"))
        )
        for name, text in table.constants.items()
    ]
    return sql.SQL(", ").join([*columns, *fixed])


#: The option of COPY for the rows' form: text, or binary.
_FORMS = (sql.SQL(""), sql.SQL(" (FORMAT binary)"))
