"""Quoted names and the conditions that find a row, as SQL text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.table import ColumnFacts, TableFacts


def quote_identifier(name: str) -> str:
    """Return a name as a quoted SQL identifier; nothing in it keeps a meaning (trap T-60).

    psycopg.sql.Identifier needs an adaptation context and this module must not do I/O; the rule is one: double the
    quotation mark. Texts are never formatted with `%` or `{}` afterwards.

    Source: PostgreSQL manual, "Lexical Structure", Identifiers and Key Words.
    """
    return '"' + name.replace('"', '""') + '"'


def table_name(facts: TableFacts) -> str:
    """Return the table's quoted name with its schema, without ONLY."""
    return f"{quote_identifier(facts.schema)}.{quote_identifier(facts.name)}"


def column_equals(column: ColumnFacts, value: str) -> str:
    """Return `t.column = value`, with the value cast so that the column's index serves.

    An uncast text would compare char(5) as text and find nothing, and an untyped parameter would let a domain refuse
    an old value that a row still holds.

    Args:
        column: of the target.
        value: an SQL expression: a parameter, or an element of an unnested array.
    """
    name = quote_identifier(column.name)
    return f"t.{name} {column.equality_operator} {value}::{column.type_sql}{column.collation_sql}"


def key_condition(columns: Sequence[ColumnFacts], first: int) -> str:
    """Return the condition for one key; its parameters are `$first` and following, in the order of the columns."""
    return " AND ".join(column_equals(column, f"${number}") for number, column in enumerate(columns, first))


def row_condition(columns: Sequence[ColumnFacts], first: int) -> str:
    """Return the condition for one whole row, NULL matching NULL (trap T-24); `true` without columns.

    Not `IS NOT DISTINCT FROM $1`: that looks its operator up by name (see `target/statements.py`). `IS NOT DISTINCT
    FROM NULL` looks none up, and unlike `IS NULL` it does not hold for a composite of NULLs.

    Args:
        columns: every wire column; each has an equality operator.
        first: number of the first parameter.
    """
    return " AND ".join(_same_value(column, f"${number}") for number, column in enumerate(columns, first)) or "true"


def _same_value(column: ColumnFacts, value: str) -> str:
    name = quote_identifier(column.name)
    both_null = f"t.{name} IS NOT DISTINCT FROM NULL AND {value}::{column.type_sql} IS NOT DISTINCT FROM NULL"
    return f"({column_equals(column, value)} OR ({both_null}))"
