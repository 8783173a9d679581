"""Equality of two tables, as SQL that both ends answer alike. Every engine uses this and nothing else.

- The text of a row is `ROW(...)::text` of the published columns, by name, in sessions that print alike: a NULL is not
  an empty text, and no separator can be mistaken for a value. The text of its key is the same of the key's columns;
  without a key it is the text of the row.
- The hash of a text is `hashtextextended`: 64 bits, the same in all versions of PostgreSQL with one byte order. Where
  the databases have different encodings, its bytes in UTF-8 are hashed, in hexadecimal.
- Rows are divided into ranges, numbered from 0. Where the key's first column is of a type that every server sorts
  alike, a range lies between two values of it, so that the rows of one range are found by the key's index.
  Where it is not (two databases may sort text differently), or there is no key, a range is a slice of the keys by the
  hash of their text; their number is a power of two. A small table is one range.
- Two tables are equal if in every range both have the same number of rows and the same sum of the rows' hashes. Where
  they differ, a comparison of keys and hashes shows the rows.

In: plain values. Out: SQL. Source: PostgreSQL manual, "Row Constructors", "Composite Types".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from psycopg import sql

from parapply.copy.parts import condition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.copy.parts import Part
    from parapply.copy.published import PublishedTable

#: Rows of a range, about: what is read again, from both ends, for each difference.
ROWS_PER_RANGE = 10_000
#: Ranges of a table at most: each is a row of every part's answer.
MOST_RANGES = 1 << 14

#: Pages of a relation that one statement sums up: 64 MB with PostgreSQL's own page size.
READ_PAGES = 8192

#: Seeds of the hashes: a row without a key has one text for both.
_ROW_SEED, _KEY_SEED = 0, 1

#: Types whose order is the same on every server, by OID (pg_type.dat), and the type in which bounds are compared.
_ORDERED_TYPES = {
    20: "int8",
    21: "int8",
    23: "int8",
    1082: "date",
    1114: "timestamp",
    1184: "timestamptz",
    2950: "uuid",
}
#: The least and the largest value of each of them. A range that is open at one end is a third of a table to the planner
#: while that has no statistics, and all pages of it would be read.
_ENDS = {
    "int8": ("-9223372036854775808", "9223372036854775807"),
    "date": ("-infinity", "infinity"),
    "timestamp": ("-infinity", "infinity"),
    "timestamptz": ("-infinity", "infinity"),
    "uuid": ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
}


class Ranges(msgspec.Struct, frozen=True, kw_only=True):
    """How a table's rows are divided."""

    count: int  # of hash slices; 1: all rows are one range
    column: str = ""  # ranges of its values instead
    type_name: str = ""  # in which they are compared
    bounds: tuple[str, ...] = ()  # as texts, ascending: range n begins with bounds[n - 1]
    is_utf8: bool = False  # what is hashed, because the databases' encodings differ


def n_ranges(rows: int) -> int:
    """Return the number of ranges of a table with this number of rows."""
    wanted = max(1, rows // ROWS_PER_RANGE)
    return min(MOST_RANGES, 1 << (wanted - 1).bit_length())


def ordered_type(table: PublishedTable, target_types: Mapping[str, int]) -> str:
    """Return the type in which the key's first column is compared; empty if there is none that both ends sort alike."""
    if not table.key:
        return ""
    here = _ORDERED_TYPES.get(table.types[table.columns.index(table.key[0])], "")
    return here if here == _ORDERED_TYPES.get(target_types.get(table.key[0], 0)) else ""


def row_text(values: Sequence[sql.Composable]) -> sql.Composed:
    """Return the expression for the text of columns, which have these values."""
    return sql.SQL("ROW({})::pg_catalog.text").format(sql.SQL(", ").join(values))


def _key_values(table: PublishedTable) -> list[sql.Composable]:
    """Return the values of the key, in which no expression replaces a column, or without one of the row."""
    return [*map(sql.Identifier, table.key)] or table.values


def _hash(text: sql.Composed, ranges: Ranges, seed: int) -> sql.Composed:
    if ranges.is_utf8:
        text = sql.SQL("pg_catalog.encode(pg_catalog.convert_to({}, 'UTF8'), 'hex')").format(text)
    # With a stated collation, because the default one may be any, and the hash follows it.
    return sql.SQL('pg_catalog.hashtextextended({} COLLATE "C", {})').format(text, sql.Literal(seed))


def row_hash(table: PublishedTable, ranges: Ranges) -> sql.Composed:
    """Return the expression for the hash of a row."""
    return _hash(row_text(table.values), ranges, _ROW_SEED)


def key_range(table: PublishedTable, ranges: Ranges) -> sql.Composed:
    """Return the expression for the number of the range a row is in."""
    if ranges.bounds:
        array = "{" + ",".join(f'"{bound}"' for bound in ranges.bounds) + "}"
        # A key that the target does not hold to be NOT NULL: such rows are in the first range.
        return sql.SQL("COALESCE(pg_catalog.width_bucket({}::{type}, {}::{type}[]), 0)").format(
            sql.Identifier(ranges.column), sql.Literal(array), type=sql.Identifier("pg_catalog", ranges.type_name)
        )
    if ranges.count == 1:
        return sql.Composed([sql.SQL("0")])
    text = row_text(_key_values(table))
    return sql.SQL("({} & {}::bigint)").format(_hash(text, ranges, _KEY_SEED), ranges.count - 1)


def summary(
    table: PublishedTable, part: Part, ranges: Ranges, row_filter: str | sql.Composed, numbers: Sequence[int] = ()
) -> sql.Composed:
    """Return the query for (range, number of rows, sum of their hashes) of a part; of some ranges, if any are given."""
    where = condition(part, row_filter)
    return sql.SQL("SELECT {}, pg_catalog.count(*), pg_catalog.sum({}) FROM ONLY {}{}{} GROUP BY 1").format(
        key_range(table, ranges),
        row_hash(table, ranges),
        sql.Identifier(part.schema, part.name),
        where,
        _and(where, _within(table, ranges, numbers)) if numbers else sql.SQL(""),
    )


def _and(where: sql.Composed, more: sql.Composable) -> sql.Composed:
    return sql.Composed([sql.SQL(" AND " if where.as_string(None) else " WHERE "), more])


def _within(table: PublishedTable, ranges: Ranges, numbers: Sequence[int]) -> sql.Composed:
    if ranges.bounds:
        return sql.SQL("({})").format(sql.SQL(" OR ").join([_between(ranges, number) for number in numbers]))
    return sql.SQL("{} = ANY ({}::bigint[])").format(key_range(table, ranges), sql.Literal(list(numbers)))


def rows_of(
    table: PublishedTable, part: Part, ranges: Ranges, numbers: Sequence[int], row_filter: str | sql.Composed
) -> sql.Composed:
    """Return the query for (key's values as texts, hash) of a part's rows in some ranges.

    Without a key the row has the values of all columns.
    """
    values = sql.SQL(", ").join([sql.SQL("{}::pg_catalog.text").format(value) for value in _key_values(table)])
    where = condition(part, row_filter)
    return sql.SQL("SELECT ARRAY[{}]::pg_catalog.text[], {} FROM ONLY {}{}{}").format(
        values,
        row_hash(table, ranges),
        sql.Identifier(part.schema, part.name),
        where,
        _and(where, _within(table, ranges, numbers)),
    )


def _between(ranges: Ranges, number: int) -> sql.Composed:
    """Return the condition for one range, in the form that the key's index answers."""
    column, type_name = sql.Identifier(ranges.column), sql.Identifier("pg_catalog", ranges.type_name)
    bounds = ranges.bounds
    least, largest = _ENDS[ranges.type_name]
    is_last = number == len(bounds)
    return sql.SQL("({column} >= {begin}::{type} AND {column} {before} {end}::{type}{null})").format(
        column=column,
        type=type_name,
        begin=sql.Literal(bounds[number - 1] if number else least),
        before=sql.SQL("<=" if is_last else "<"),
        end=sql.Literal(largest if is_last else bounds[number]),
        null=sql.SQL("" if number else " OR {} IS NULL").format(column),
    )
