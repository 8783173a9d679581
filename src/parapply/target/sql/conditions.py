"""Quoted names and the conditions that find a row, as SQL text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.plan.table import Equality, table_name
from parapply.quoting import identifier, literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.table import ColumnFacts, Constant, TableFacts

# OIDs of pg_type.dat.
_NUMERIC: Final = 1700
_VARCHAR: Final = 1043
#: Types whose modifier rounds, and the functions that do it.
_ROUNDING: Final = {1083: "time", 1114: "timestamp", 1184: "timestamptz", 1186: "interval", 1266: "timetz"}
_NUMERIC_ARRAY: Final = 1231
_INTERVAL_ARRAY: Final = 1187
#: Arrays of types of `_ROUNDING`.
_ROUNDING_ARRAYS: Final = frozenset({1183, 1115, 1185, _INTERVAL_ARRAY, 1270})
#: The precision of a numeric at most; and as a modifier has it, the one of an interval that does not round.
_MOST_DIGITS: Final = 1000
_FULL_PRECISION: Final = 0xFFFF
#: A modifier that is a length, or a precision, is greater by this number (VARHDRSZ).
_LENGTH_OFFSET: Final = 4


def column_equals(column: ColumnFacts, value: str) -> str:
    """Return `t.column = value`, with the value cast so that the column's index serves.

    An uncast text would compare char(5) as text and find nothing, and an untyped parameter would let a domain refuse
    an old value that a row still holds.

    Args:
        column: of the target.
        value: an SQL expression: a parameter, or an element of an unnested array, that the column stores as it is.
    """
    return _equals(column, f"{value}::{column.type_sql}")


def column_holds(column: ColumnFacts, value: str) -> str:
    """Return `column_equals` for a value that the column may have rounded, or cut blanks off, when it was assigned."""
    return _equals(column, _stored(column, value))


def constants_hold(constants: Sequence[Constant]) -> str:
    """Return the condition for the rows with some constants; `true` without any."""
    return " AND ".join(column_equals(one.column, literal(one.text)) for one in constants) or "true"


def constant_value(constant: Constant) -> str:
    """Return a constant for an INSERT: as the base type, so that the column's length and domain are checked."""
    return f"{literal(constant.text)}::{constant.column.type_sql}"


def key_condition(columns: Sequence[ColumnFacts], first: int) -> str:
    """Return the condition for one key; its parameters are `$first` and following, in the order of the columns."""
    return " AND ".join(column_holds(column, f"${number}") for number, column in enumerate(columns, first))


def types_unaltered(facts: TableFacts, columns: Sequence[ColumnFacts]) -> str:
    """Return a condition that holds while columns have the types they were described with; else it is an error (42883).

    A value that was read as the old type would be assigned to the new one by other rules than its input: 1.5 would be
    rounded to an integer. Arrays of two types have no common operator. The server reports that when it parses the
    statement, also when it parses it again because the table has changed, so nothing is left to execute.

    Args:
        facts: of the table.
        columns: that are assigned.
    """
    row = f"(NULL::{table_name(facts)})"
    tests = [
        f" OR ARRAY[{row}.{identifier(column.name)}] OPERATOR(pg_catalog.=) NULL::{column.array_type_sql}"
        for column in columns
        if column.array_type_sql
    ]
    return f"(true{''.join(tests)})"


def row_condition(columns: Sequence[ColumnFacts], first: int) -> str:
    """Return the condition for one whole row, NULL matching NULL (trap T-24); `true` without columns.

    Not `IS NOT DISTINCT FROM $1`: that looks its operator up by name (see `target/sql/statements.py`). `IS NOT DISTINCT
    FROM NULL` looks none up, and unlike `IS NULL` it does not hold for a composite of NULLs.

    Args:
        columns: every wire column; each has an equality operator.
        first: number of the first parameter.
    """
    return " AND ".join(_same_value(column, f"${number}") for number, column in enumerate(columns, first)) or "true"


def same_text(columns: Sequence[ColumnFacts], first: int) -> str:
    """Return the condition that a row which `row_condition` finds looks like the wanted one; '' where all of them do.

    Equal values may differ: 1.0 and 1.00, 0 and -0.
    """
    tests = [
        f"coalesce({_looks_like(column, f'${number}')}, true)"
        for number, column in enumerate(columns, first)
        if column.equality is not Equality.BYTES
    ]
    return " AND ".join(tests)


def column_is(column: ColumnFacts, value: str) -> str:
    """Return the condition that a column holds a value and looks like it; NULL on either side fails.

    The first part is what an index serves, the second is empty where equal values look the same.
    """
    holds = column_holds(column, value)
    return holds if column.equality is Equality.BYTES else f"{holds} AND {_looks_like(column, value)}"


def column_is_null(column: ColumnFacts) -> str:
    """Return the condition that a column is NULL; a composite of NULLs is not (see `row_condition`)."""
    return f"t.{identifier(column.name)} IS NOT DISTINCT FROM NULL"


def _looks_like(column: ColumnFacts, value: str) -> str:
    found, wanted = f"t.{identifier(column.name)}", f"({_stored(column, value)})"
    return f"{_printed(found)} OPERATOR(pg_catalog.=) {_printed(wanted)}"


def _printed(value: str) -> str:
    return f'{value}::pg_catalog.text COLLATE pg_catalog."C"'


def _same_value(column: ColumnFacts, value: str) -> str:
    both_null = f"{column_is_null(column)} AND {value}::{column.type_sql} IS NOT DISTINCT FROM NULL"
    return f"({column_holds(column, value)} OR ({both_null}))"


def _equals(column: ColumnFacts, value: str) -> str:
    name = f"t.{identifier(column.name)}"
    if column.is_enum and column.type_oid != column.base_type_oid:
        # The operator of enums does not see through a domain.
        name += f"::{column.type_sql}"
    return f"{name} {column.equality_operator} {value}{column.collation_sql}"


def _stored(column: ColumnFacts, value: str) -> str:
    """Return a value as an assignment to the column stores it; a value that it would refuse stays, and equals nothing.

    Not by a cast with the modifier, which cuts texts, but for arrays of numbers and times, for whose elements there is
    nothing else: an infinite number in one is an error (22003), and not unequal. Bit strings and char(n) lose nothing
    that counts.
    """
    cast, modifier = f"{value}::{column.type_sql}", column.type_modifier
    if modifier == -1:
        return cast
    # numeric.c, make_numeric_typmod: the scale is a signed number of eleven bits.
    scale = ((modifier - _LENGTH_OFFSET) & 0x7FF ^ 0x400) - 0x400
    if column.base_type_oid == _NUMERIC:
        return f"pg_catalog.round({cast}, {scale})"
    if column.base_type_oid == _NUMERIC_ARRAY:
        return f"{cast}::{column.type_sql}({_MOST_DIGITS}, {scale})"
    if column.base_type_oid in _ROUNDING_ARRAYS:
        return f"{cast}::{column.type_sql}({_modifier_sql(column)})"
    if column.base_type_oid == _VARCHAR:
        length = modifier - _LENGTH_OFFSET
        beyond = f"pg_catalog.substr({cast}, {length + 1})"
        return f"(pg_catalog.left({cast}, {length}) OPERATOR(pg_catalog.||) pg_catalog.rtrim({beyond}, ' '))"
    function = _ROUNDING.get(column.base_type_oid)
    return f'pg_catalog."{function}"({cast}, {modifier})' if function else cast


def _modifier_sql(column: ColumnFacts) -> str:
    """Return a modifier of a time as it is written behind the name of a type."""
    if column.base_type_oid != _INTERVAL_ARRAY:
        return f"{column.type_modifier}"
    # timestamp.c, intervaltypmodin: the fields, and the precision where there is one.
    fields, precision = divmod(column.type_modifier, _FULL_PRECISION + 1)
    return f"{fields}" if precision == _FULL_PRECISION else f"{fields}, {precision}"
