"""Random tables beyond usual sizes: hundreds of tables in a transaction, values of a megabyte, the ends of each type.

In goes a chooser; out come tables for `schema`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.differential.exotic import SCHEMAS
from tests.differential.statements import delete, insert, insert_one, operations_of, update, update_some, upsert
from tests.differential.tables import RandomColumn, RandomTable, column_of, key, numbered
from tests.differential.types import available, mixed, number, of

if TYPE_CHECKING:
    import random

    from tests.differential.types import Feature

# More than the tables of a step from which their few rows are inserted by value (256).
_N_TABLES = 320
# Tables that are sometimes written together with most of the others.
_N_WRITTEN_WITH = 16
#: By type: both ends, what is next to them, and other texts that its input and output treat by themselves.
_ENDS = {
    "bigint": ("9223372036854775807", "-9223372036854775808", "-9223372036854775807", "1000000000000000000"),
    "int": ("2147483647", "-2147483648", "-2147483647", "1000000000"),
    "smallint": ("32767", "-32768", "-32767", "10000"),
    "float8": (
        "1.7976931348623157e+308", "-1.7976931348623157e+308", "5e-324", "2.2250738585072014e-308", "-5e-324", "1e+20",
        "123456789012345680", "0.30000000000000004", "-1e-07", "1e+15", "NaN", "Infinity", "-Infinity",
    ),
    "float4": ("3.4028235e+38", "1e-45", "1e+06", "16777216", "NaN", "-Infinity"),
    "date": ("4714-11-24 BC", "5874897-12-31", "0001-01-01", "0001-12-31 BC", "9999-12-31", "10000-01-01",
             "2000-02-29", "1900-02-28", "1600-02-29", "infinity", "-infinity"),
    "timestamp": (
        "4714-11-24 00:00:00 BC", "294276-12-31 23:59:59.999999", "0001-01-01 00:00:00", "0001-12-31 23:59:59 BC",
        "9999-12-31 23:59:59.999999", "10000-01-01 00:00:00", "1999-12-31 23:59:59.9", "2000-01-01 00:00:00.000001",
        "infinity", "-infinity",
    ),
    "timestamptz": (
        "4714-11-24 00:00:00+00 BC", "294276-12-31 23:59:59.999999+00", "0001-01-01 00:00:00+00",
        "9999-12-31 23:59:59.99+00", "10000-01-01 00:00:00+00", "1582-10-15 00:00:00+14", "infinity", "-infinity",
    ),
    "uuid": ("ffffffff-ffff-ffff-ffff-ffffffffffff", "00000000-0000-0000-0000-000000000000",
             "0123456789abcdefABCDEF0123456789"),
    "numeric": ("1e-16383", "9e+131071", "-1e100", "0.000000000000000000000000000001", "NaN", "-Infinity"),
    "interval": ("178000000 years", "-178000000 years", "2147483647 days", "-00:00:00.000001", "1 mon -1 days"),
    "bytea": ("\\x", "\\x00", "\\xff", "\\x" + "0f" * 5000),
}  # fmt: skip
_LARGE_BYTES = (300_000, 1_048_575, 1_048_576, 1_200_000)


def ends(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table of values at the ends of their types, one or two of them in its key."""
    columns = [
        RandomColumn(name=f"c{at}", type_sql=name, values=mixed("{n}", 1, *texts) if name == "bigint" else of(*texts),
                     nulls=0.1)
        for at, (name, texts) in enumerate(_ENDS.items())
    ]  # fmt: skip
    chooser.shuffle(columns)
    names = chooser.sample([name for name in _ENDS if name != "numeric"], 2)
    keys = [RandomColumn(name=f"k{at}", type_sql=name, values=of(*_ENDS[name])) for at, name in enumerate(names)]
    table = RandomTable(
        name="t_ends",
        key=(key("int"), *keys),
        columns=(numbered(), *columns),
        target_columns=(key("int"), *reversed(columns), *keys, numbered()) if chooser.random() < 0.5 else (),
        identity="FULL" if chooser.random() < 0.3 else "",
    )
    return [table]


def _large(name: str, type_sql: str, form: str) -> RandomColumn:
    def values(chooser: random.Random) -> str:
        if chooser.random() < 0.4:
            return f"''::{type_sql}"
        return form.format(f"repeat('{chooser.choice('xyz')}', {chooser.choice(_LARGE_BYTES)})")

    return RandomColumn(name=name, type_sql=type_sql, values=values, is_expression=True, is_big=True, nulls=0.1)


def large_values(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return two tables of values of up to a megabyte, mostly kept apart; one may be found by them."""
    columns = (numbered(), _large("a", "text", "{}"), _large("b", "bytea", "convert_to({}, 'UTF8')"))
    few = RandomColumn(name="k", type_sql="int", values=number(0, 12), spare="-1000")

    # Twelve rows are more than a piece of a transaction (8 MiB).
    keyed = (insert_one, insert_one, insert, update, update, update, upsert, update_some, delete)
    found = (insert_one, insert_one, insert_one, update, update, update_some, delete)
    return [
        RandomTable(name="t_large", key=(few,), columns=columns, operations=keyed),
        RandomTable(
            name="t_large_full", key=(few,), columns=columns, identity="FULL", operations=found,
            target_key=chooser.choice(("PRIMARY KEY ({})", "")),
        ),
    ]  # fmt: skip


def many_tables(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return hundreds of small tables, four of each name, which one transaction writes together."""
    kinds = [one for one in available(features) if one.is_exact and one.is_comparable]
    tables = []
    for at in range(_N_TABLES):
        schema = ("public", *SCHEMAS)[at % 4]
        some = [column_of(chooser.choice(kinds), f"c{n}", nulls=0.2) for n in range(chooser.randint(0, 3))]
        has_key = chooser.random() < 0.85
        tables.append(
            RandomTable(
                name=f"{schema}.t_many_{at // 4}",
                key=(key("int"),) if has_key else (),
                columns=(numbered(), *some),
                identity="" if has_key else chooser.choice(("", "FULL")),
                target_columns=(*some, numbered(), *((key("int"),) if has_key else ())),
            )
        )
    return [_written_with(table, tables) for table in tables[:_N_WRITTEN_WITH]] + tables[_N_WRITTEN_WITH:]


def _written_with(table: RandomTable, tables: list[RandomTable]) -> RandomTable:
    """Return a table one of whose operations writes to most of the others as well."""

    def in_most(_: RandomTable, chooser: random.Random) -> str:
        chosen = chooser.sample(tables, chooser.randint(_N_TABLES // 2, _N_TABLES))
        # In one order, or sessions would wait for each other.
        return "; ".join(
            (insert_one if one.key and chooser.random() < 0.8 else insert)(one, chooser)
            for one in sorted(chosen, key=lambda one: one.name)
        )

    usual = tuple(operations_of(table))
    return RandomTable(
        name=table.name, key=table.key, columns=table.columns, identity=table.identity,
        target_columns=table.target_columns, operations=(*usual, *[in_most] * len(usual)),
    )  # fmt: skip
