"""Random tables with exotic keys, names, identities and publications; each holds on the target what it held before.

In goes a chooser; out come tables for `schema`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.differential.statements import KEYED, SINGLE, delete, delete_some, insert, update, update_some, upsert
from tests.differential.tables import (
    RandomColumn,
    RandomTable,
    column_of,
    is_comparable,
    key,
    literal,
    numbered,
    others,
    with_other_types,
)
from tests.differential.types import ENUM_DOMAIN, TYPES, available, is_filtered, key_types, mixed, number, of, pattern

if TYPE_CHECKING:
    import random

    from tests.differential.types import Feature, Values

#: Schemas besides public; leaves and indexes of one name stand in several of them.
SCHEMAS = ('"Odd ""Schema"" 1.x"', "s1", "s2")
_ODD_NAMES = (
    '"select"', '"a b"', '"q""q"', '"dot.ted"', '"per%cent%s"', '"{brace}"', '"Ünï"', '"$1"', '"back\\slash"',
    '''"'quote'"''', '"new\nline"', f'"{"long" * 15}"', '"CamelCase"', '"1st"', '"-- no comment"', '"tab\t"',
)  # fmt: skip
_STATEMENT_OF_ROWS = 4


def keyed(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return three tables with keys of one to three columns of any type.

    Names of tables and columns are odd in every other one; the target may have other types, more columns and another
    order; the publication may list columns or filter rows.
    """
    return [_keyed(f"t_key_{number}", chooser, features) for number in range(3)]


def _keyed(name: str, chooser: random.Random, features: frozenset[Feature]) -> RandomTable:
    first = chooser.choice(key_types(features))
    more = [one for one in available(features) if one.is_key]
    kinds = [first, *chooser.sample(more, chooser.choice((0, 0, 1, 2)))]
    keys = tuple(column_of(kind, f"k{number}" if number else "k") for number, kind in enumerate(kinds))
    rest = others(chooser, features)
    if chooser.random() < 0.5:
        name, keys, rest = _oddly_named(name, keys, rest, chooser)
    is_full = chooser.random() < 0.2 and is_comparable((*keys, *rest))
    # PostgreSQL 18 refuses updates where the replica identity holds a generated column that is not published.
    has_generated = chooser.random() < 0.3 and not is_full
    if chooser.random() < 0.4:
        keys, rest = with_other_types(keys, chooser), with_other_types(rest, chooser)
    table = RandomTable(
        name=name,
        key=keys,
        columns=rest,
        both_extra=("g int GENERATED ALWAYS AS (n * 2) STORED",) if has_generated else (),
        source_columns=_shuffled((*keys, *rest), chooser) if chooser.random() < 0.5 else (),
        target_columns=_shuffled((*keys, *rest), chooser) if chooser.random() < 0.5 else (),
        target_extra=(
            "extra text DEFAULT 'here'", "extra_n int", "extra_a int[] DEFAULT '{1}'",
            "extra_g text GENERATED ALWAYS AS ('n' || n::text) STORED",
        ) if chooser.random() < 0.5 else (),
        identity="FULL" if is_full else "",
    )  # fmt: skip
    return _published_in_part(table, chooser) if chooser.random() < 0.4 else table


def _shuffled(columns: tuple[RandomColumn, ...], chooser: random.Random) -> tuple[RandomColumn, ...]:
    return tuple(chooser.sample(columns, len(columns)))


def _oddly_named(
    name: str, keys: tuple[RandomColumn, ...], rest: tuple[RandomColumn, ...], chooser: random.Random
) -> tuple[str, tuple[RandomColumn, ...], tuple[RandomColumn, ...]]:
    table_name, *names = chooser.sample(_ODD_NAMES, 1 + len(keys) + len(rest))
    # Other names may be cut at 63 bytes: one number distinguishes the tables.
    quoted = f'{table_name[:-1][:50]}{name[-1]}"' if not table_name.startswith('"long') else f'"long{name}"'
    schema = chooser.choice(("", *(f"{schema}." for schema in SCHEMAS)))
    renamed = [
        replace(column, name=column.name if column.name == "n" else odd)
        for column, odd in zip((*keys, *rest), names, strict=True)
    ]
    return f"{schema}{quoted}", tuple(renamed[: len(keys)]), tuple(renamed[len(keys) :])


def _published_in_part(table: RandomTable, chooser: random.Random) -> RandomTable:
    """Return the table with a column list or a row filter, or both, by what its identity allows.

    A row that comes into the filter is sent as an insert; what it has of unchanged big values is on the wire only with
    REPLICA IDENTITY FULL.
    """
    listed: tuple[RandomColumn, ...] = ()
    if table.identity != "FULL" and chooser.random() < 0.6:
        sent = chooser.sample(table.columns, chooser.randint(1, len(table.columns)))
        listed = (*table.key, *sent)
    column = table.key[0]
    where = ""
    has_big = any(one.is_big for one in table.columns)
    if chooser.random() < 0.6 and is_filtered(column.type_sql) and (table.identity == "FULL" or not has_big):
        value = literal(column.values(chooser))
        where = chooser.choice((
            f"{column.name} >= {value}", f"{column.name} <> {value}", f"NOT {column.name} < {value}",
        ))  # fmt: skip
        if table.identity == "FULL" and chooser.random() < 0.5:
            where = chooser.choice(("n > 4", f"n % 2 = 0 OR {where}"))
    return replace(table, listed=listed, where=where)


def no_identity(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table with a key that is no replica identity, so that it takes inserts only; rows may be filtered."""
    where = chooser.choice(("", "n > 3", "n IS NULL OR n < 7"))
    columns = others(chooser, features)
    table = RandomTable(
        name="t_nothing", key=(key("int"),), columns=columns, identity="NOTHING", operations=(insert,), where=where
    )
    return [table]


def deferrable_key(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose key is checked at the commit, so that keys change hands in one statement (T-49)."""
    column = RandomColumn(name="k", type_sql="int", values=number(0, 40), spare="-1000")

    def swap_at_once(table: RandomTable, chooser: random.Random) -> str:
        one, other = (column.values(chooser) for _ in range(2))
        return f"UPDATE {table.name} SET k = {one} + {other} - k WHERE k IN ({one}, {other})"

    def insert_new(table: RandomTable, chooser: random.Random) -> str:
        names = ", ".join(one.name for one in table.all_columns)
        row = [one.value(chooser) for one in table.all_columns]
        typed = ", ".join(f"{text}::{one.type_sql}" for text, one in zip(row, table.all_columns, strict=True))
        return f"INSERT INTO {table.name} ({names}) SELECT {typed} WHERE {row[0]} NOT IN (SELECT k FROM {table.name})"

    # SINGLE begins with inserts that name the key in ON CONFLICT, which needs an index that is checked at once.
    single = [one for one in SINGLE if one.__name__ in {"insert_or_fail", "update", "delete", "move", "swap_keys"}]
    table = RandomTable(
        name="t_late_key",
        key=(column,),
        columns=others(chooser, features, is_exact=True),
        key_clause="DEFERRABLE INITIALLY DEFERRED",
        identity="FULL",
        operations=(*single, *[insert_new] * 4, *[swap_at_once] * 3),
    )
    return [table]


def other_key_on_target(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose key is no primary key on the target.

    There it is another unique index which is the target's identity; with REPLICA IDENTITY FULL on the publisher also
    one that is checked at the commit, or nothing at all.
    """
    kinds = chooser.sample([one for one in key_types(features) if one.is_exact], 2)
    columns = tuple(column_of(kind, f"k{number}") for number, kind in enumerate(kinds))
    is_full = chooser.random() < 0.5
    unique = "CONSTRAINT other_key UNIQUE ({})"
    target_key = (
        chooser.choice((unique, f"{unique} DEFERRABLE", "UNIQUE NULLS NOT DISTINCT ({})", "")) if is_full else unique
    )
    table = RandomTable(
        name="t_other_key",
        key=tuple(replace(column, target_clause="NOT NULL") for column in columns),
        columns=others(chooser, features, is_exact=is_full),
        identity="FULL" if is_full else "",
        target_key=target_key,
        target_after=() if is_full else ("ALTER TABLE t_other_key REPLICA IDENTITY USING INDEX other_key",),
    )
    return [table]


def identity_column(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose key is an identity column, or whose other column is.

    A column that is `ALWAYS` on the target never changes on the publisher, because no SQL could do that after it.
    """
    rest = others(chooser, features)
    by_default, always = (f"GENERATED {which} AS IDENTITY" for which in ("BY DEFAULT", "ALWAYS"))
    if chooser.random() < 0.5:
        serial = RandomColumn(name="serial_n", type_sql="int", values=number(0, 50), clause=by_default)
        return [RandomTable(name="t_identity", key=(key("int"),), columns=(*rest, serial))]
    target = chooser.choice((by_default, always))
    column = replace(key("int"), source_clause=by_default, target_clause=target)
    unmoved = (insert, insert, upsert, update, update, delete, update_some, delete_some)
    operations = unmoved if target == always else KEYED
    return [RandomTable(name="t_identity", key=(column,), columns=rest, operations=operations)]


def full_of_anything(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table without a key, of any types, whose rows are distinguished by a number that only they have.

    Rows with the same number are the same in all columns.
    """
    kinds = [one for one in available(features) if one.is_comparable]
    some = chooser.sample(kinds, chooser.randint(2, 6))
    columns = tuple(column_of(kind, f"c{number}", nulls=0.2) for number, kind in enumerate(some))
    unique = RandomColumn(name="u", type_sql="int", values=number(0, 40), spare="-1000", nulls=0.1)

    def insert_new(table: RandomTable, chooser: random.Random) -> str:
        names = ", ".join(one.name for one in table.all_columns)
        row = [unique.value(chooser), *(one.value(chooser) for one in table.all_columns[1:])]
        typed = ", ".join(f"{text}::{one.type_sql}" for text, one in zip(row, table.all_columns, strict=True))
        is_new = f"NOT EXISTS (SELECT FROM {table.name} AS o WHERE o.u IS NOT DISTINCT FROM {row[0]}::int)"
        lock = f"SELECT pg_advisory_xact_lock(hashtext('{table.name}'))"
        return f"{lock}; INSERT INTO {table.name} ({names}) SELECT {typed} WHERE {is_new}"

    def change(table: RandomTable, chooser: random.Random) -> str:
        chosen = chooser.sample(table.columns[1:], chooser.randint(1, len(table.columns) - 1))
        new = ", ".join(f"{one.name} = {one.value(chooser)}" for one in chosen)
        return f"UPDATE {table.name} SET {new} WHERE u IS NOT DISTINCT FROM {unique.value(chooser)}"

    def remove(table: RandomTable, chooser: random.Random) -> str:
        return f"DELETE FROM {table.name} WHERE u IS NOT DISTINCT FROM {unique.value(chooser)}"

    table = RandomTable(
        name="t_full_any",
        key=(),
        columns=(unique, numbered(), *columns),
        identity="FULL",
        operations=(*[insert_new] * _STATEMENT_OF_ROWS, change, change, change, remove),
        target_after=("CREATE UNIQUE INDEX ON t_full_any (u)",) if chooser.random() < 0.3 else (),
    )
    return [table]


def generated_on_source(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose generated column is not sent; the target's column of its name is a usual one."""
    table = RandomTable(
        name="t_generated",
        key=(key("int"),),
        columns=others(chooser, features),
        source_after=("ALTER TABLE t_generated ADD g text GENERATED ALWAYS AS ('n' || n::text) STORED",),
        target_extra=("g text DEFAULT 'not sent'",),
    )
    return [table]


def wide_key(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose key has 4 to 16 columns, which the index has in another order than the table.

    Most keys differ in one or two of the columns only. All are integers in every other table.
    """
    kinds = (
        [TYPES["int"], TYPES["bigint"]]
        if chooser.random() < 0.5
        else [one for one in available(features) if one.is_key]
    )
    n_columns = chooser.randint(4, 16)
    varying = chooser.sample(range(n_columns), 3)
    columns = []
    for index in range(n_columns):
        column = column_of(chooser.choice(kinds), f"k{index}")
        if index not in varying:
            column = replace(column, values=_mostly(column.values(chooser), column.values))
        columns.append(column)
    movable = next((column for column in columns if column.spare), None)
    if movable is not None:  # `swap_keys` takes the first
        columns.remove(movable)
        columns.insert(0, movable)
    rest = others(chooser, features)
    table = RandomTable(
        name="t_wide_key",
        key=tuple(columns),
        columns=rest,
        source_columns=_shuffled((*columns, *rest), chooser),
        target_columns=_shuffled((*columns, *rest), chooser) if chooser.random() < 0.5 else (),
        operations=KEYED if movable is not None else (insert, insert, update, update, delete, upsert),
    )
    return [table]


def _mostly(usual: str, values: Values) -> Values:
    return lambda chooser: values(chooser) if chooser.random() < 0.03 else usual


def many_columns(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table of 30 to 200 columns of any types, in another order on the target; found by all in every third."""
    kinds = [one for one in available(features) if one.is_comparable and one.is_exact]
    some = [column_of(chooser.choice(kinds), f"c{n}", nulls=0.3) for n in range(chooser.randint(30, 200))]
    columns = (numbered(), *some)
    first = key("int")
    table = RandomTable(
        name="t_many_columns",
        key=(first,),
        columns=columns,
        source_columns=_shuffled((first, *columns), chooser),
        target_columns=_shuffled((first, *columns), chooser) if chooser.random() < 0.5 else (),
        identity="FULL" if chooser.random() < 0.3 else "",
    )
    return [table]


def modified_key(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose key loses digits or spaces on the target; no two keys become one."""
    source, target, values, spare = chooser.choice((
        ("numeric", "numeric(8,2)", mixed("{n}.001", 30, "7.5"), "99.001"),
        ("timestamptz", "timestamptz(0)", pattern("2024-01-01 12:00:{n}.1+00", 30), "1970-01-01 00:00:00.1+00"),
        ("time", "time(1)", pattern("12:00:{n}.01", 30), "01:01:01.01"),
        ("text", "varchar(3)", of("a      ", "b", "c     ", "d  ", "ee     ", "fff"), "zzz     "),
        ("text", "char(3)", of("a      ", "b", "c     ", "d  ", "ee     ", "fff"), "zzz     "),
        ("varbit", "varbit(5)", of("1", "0", "10101", ""), "11111"),
    ))  # fmt: skip
    column = RandomColumn(name="k", type_sql=source, target_type=target, values=values, spare=spare)
    is_full = chooser.random() < 0.3
    columns = others(chooser, features, is_exact=is_full)
    return [RandomTable(name="t_modified", key=(column,), columns=columns, identity="FULL" if is_full else "")]


def enum_domain_key(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table with a domain over an enum in its key."""
    columns = (column_of(ENUM_DOMAIN, "k"), replace(key("int"), name="k2"))
    rest = others(chooser, features, is_exact=True)
    identity = chooser.choice(("", "FULL"))
    return [RandomTable(name="t_enum_domain", key=columns, columns=rest, identity=identity, operations=KEYED)]


def alike_twins(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table without a key whose rows are equal but look different."""
    kinds = [one for one in available(features) if not one.is_exact]
    columns = tuple(column_of(kind, f"c{number}") for number, kind in enumerate(chooser.sample(kinds, 2)))
    table = RandomTable(
        name="t_alike", key=(), columns=(numbered(), *columns), identity="FULL", is_ambiguous=True
    )  # fmt: skip
    return [table]


def filtered_big(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose rows come into a filter with big values that are not sent."""
    columns = others(chooser, features, has_big=True)
    return [RandomTable(name="t_filtered", key=(key("int"),), columns=columns, where="k > 10")]
