"""Odd kinds of random tables without partitions and foreign keys: unique indexes of every kind, identities, triggers.

In goes a chooser; out come tables for `random_schema`. A value allowed once on the publisher is so on the target.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.differential.statements import BULK_ROWS, KEYED, SINGLE, guarded, handed, insert_one, swap_keys
from tests.differential.tables import (
    RandomColumn,
    RandomTable,
    key,
    numbered,
    others,
)
from tests.differential.types import number, of

if TYPE_CHECKING:
    import random

    from tests.differential.types import Feature


# On the target only: both triggers note every change, the second one only where ordinary triggers fire.
AUDIT = """
CREATE TABLE audit_always (id bigserial PRIMARY KEY, entry text);
CREATE TABLE audit_ordinary (id bigserial PRIMARY KEY, entry text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql SET search_path = '' AS $$ BEGIN
  EXECUTE format('INSERT INTO public.%I (entry) VALUES ($1)', TG_ARGV[0])
    USING concat_ws(' ', TG_OP, TG_TABLE_NAME, OLD::text, '->', NEW::text);
  RETURN NEW; END $$;
"""
_TRIGGER = (
    "CREATE TRIGGER {trigger} AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW"
    " EXECUTE FUNCTION note('audit_{trigger}')"
)

# Fewer than keys, so that values change hands; many enough that most transactions find a free one.
_MAILS = tuple(f"m{n}" for n in range(24))
_MIXED_MAILS = tuple(f"{letter}{n}" for n in range(16) for letter in "mM")


def bulk() -> RandomTable:
    """Return the table of large transactions, whose rows come and go in hundreds; small ones meet them."""
    pad = RandomColumn(name="pad", type_sql="text", values=of("short", "x" * 200, "y" * 200))
    column = RandomColumn(name="k", type_sql="int", values=number(0, 4 * BULK_ROWS), spare="-1")
    return RandomTable(name="bulk", key=(column,), columns=(numbered(), pad), operations=SINGLE)


def keyless(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table that takes inserts only."""
    return [RandomTable(name="t_log", key=(), columns=others(chooser, features))]


def full(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table without a key whose rows are found by all their columns, twins among them (T-24)."""
    columns = others(chooser, features, is_exact=True)
    return [
        RandomTable(name="t_full", key=(), columns=columns, identity="FULL", target_after=_narrowing("t_full", chooser))
    ]


def twins(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table where most rows have twins (T-24)."""
    mark = RandomColumn(name="mark", type_sql="text", values=of("a", "b"), nulls=0.3)
    columns = (numbered(), mark)
    return [
        RandomTable(
            name="t_twins", key=(), columns=columns, identity="FULL", target_after=_narrowing("t_twins", chooser)
        )
    ]


def _narrowing(table: str, chooser: random.Random) -> tuple[str, ...]:
    """Return an index of the target that narrows the search for a whole row, in half of the tables."""
    return (f"CREATE INDEX ON {table} (n)",) if chooser.random() < 0.5 else ()


def _unique(
    name: str,
    columns: tuple[RandomColumn, ...],
    chooser: random.Random,
    *,
    extra: tuple[str, ...] = (),
    index: str = "",
    is_single: bool = False,
) -> list[RandomTable]:
    """Return a table whose column(s) are unique in some way; the first one's values go from row to row (T-19)."""
    # Where the whole old row is sent, the value that it frees is on the wire.
    is_full = chooser.random() < 0.3 and not any("GENERATED" in clause for clause in extra)
    table = RandomTable(
        name=name,
        key=(key("int"),),
        columns=(*columns, numbered()),
        both_extra=extra,
        both_after=(index,) if index else (),
        identity="FULL" if is_full else "",
        operations=(*(SINGLE if is_single else KEYED), *handed(columns[0].name) * 2),
    )
    return [table]


def _mail(values: tuple[str, ...] = _MAILS, clause: str = "") -> RandomColumn:
    return RandomColumn(name="mail", type_sql="text", values=of(*values), clause=clause, nulls=0.2, spare="spare")


def second_unique(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table where one transaction takes a value that another has freed, unseen on the wire (T-19)."""
    return _unique("t_unique", (_mail(clause="UNIQUE"),), chooser)


def partial_unique(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table where a value is free although its row still has it (T-22)."""
    active = RandomColumn(name="active", type_sql="bool", values=of("t", "f"))
    return _unique(
        "t_partial", (_mail(), active), chooser, index="CREATE UNIQUE INDEX ON t_partial (mail) WHERE active"
    )


def expression_unique(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table where other letters are the same value, by an index or by a column not on the wire (T-22)."""
    if chooser.random() < 0.5:
        index = "CREATE UNIQUE INDEX ON t_lower (lower(mail))"
        return _unique("t_lower", (_mail(_MIXED_MAILS),), chooser, index=index)
    extra = ("low text GENERATED ALWAYS AS (lower(mail)) STORED UNIQUE",)
    return _unique("t_lower", (_mail(_MIXED_MAILS),), chooser, extra=extra)


def nulls_not_distinct(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table where NULL is a value that one row has (T-22)."""
    room = RandomColumn(name="room", type_sql="int", values=number(0, 24), nulls=0.1, spare="-1000")
    return _unique("t_nulls", (room,), chooser, extra=("UNIQUE NULLS NOT DISTINCT (room)",))


def two_columns(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table with a unique index over two columns that change by themselves."""
    a = RandomColumn(name="a", type_sql="text", values=of("ab", "a", "", "abc"), nulls=0.1, spare="spare")
    b = RandomColumn(name="b", type_sql="text", values=of("c", "bc", "abc", "", "b", "x"), nulls=0.1)
    nulls = chooser.choice(("", "NULLS NOT DISTINCT"))
    return _unique("t_two", (a, b), chooser, extra=(f"UNIQUE {nulls} (a, b)",))


def deferrable_unique(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose unique values may meet until the commit (T-49)."""
    place = RandomColumn(name="place", type_sql="int", values=number(0, 30), nulls=0.1, spare="-1000")

    def swap_at_once(table: RandomTable, chooser: random.Random) -> str:
        one, other = (place.values(chooser) for _ in range(2))
        return f"UPDATE {table.name} SET place = {one} + {other} - place WHERE place IN ({one}, {other})"

    extra = ("UNIQUE (place) DEFERRABLE INITIALLY DEFERRED",)
    (table,) = _unique("t_deferred", (place,), chooser, extra=extra, is_single=True)
    return [replace(table, operations=(*table.operations, *[swap_at_once] * 4))]


def exclusion(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose values exclude each other without being equal (T-22)."""

    def ranges(chooser: random.Random) -> str:
        start = chooser.randrange(60)
        return f"[{start},{start + chooser.choice((1, 1, 2, 4))})"

    slot = RandomColumn(name="slot", type_sql="int4range", values=ranges, nulls=0.2, spare="[1000,1001)")
    return _unique("t_range", (slot,), chooser, extra=("EXCLUDE USING gist (slot WITH &&)",))


def hidden_unique(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table with a unique index that only the target has (T-23)."""
    table = RandomTable(
        name="t_hidden",
        key=(key("int"),),
        columns=(_mail(), numbered()),
        target_after=("CREATE UNIQUE INDEX ON t_hidden (mail)",),
        identity="FULL" if chooser.random() < 0.3 else "",
        operations=guarded("mail"),
    )
    return [table]


def identity_index(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose rows are found by another index than the primary key's, on both sides (T-23)."""
    ident = replace(key("text", "ident"), clause="NOT NULL")
    statements = (
        "CREATE UNIQUE INDEX t_index_ident ON t_index (ident)",
        "ALTER TABLE t_index REPLICA IDENTITY USING INDEX t_index_ident",
    )

    def move_ident(table: RandomTable, chooser: random.Random) -> str:
        one, other = (ident.value(chooser) for _ in range(2))
        return f"UPDATE {table.name} SET ident = {one} WHERE ident = {other}"

    columns = (ident, *others(chooser, features))
    operations = (*KEYED, move_ident, move_ident)
    return [
        RandomTable(name="t_index", key=(key("int"),), columns=columns, both_after=statements, operations=operations)
    ]


def audited(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose triggers on the target write to separate tables, in the order of changes (T-29)."""
    triggers = (
        _TRIGGER.format(trigger="always", table="t_audited"),
        "ALTER TABLE t_audited ENABLE ALWAYS TRIGGER always",
        _TRIGGER.format(trigger="ordinary", table="t_audited"),
    )
    columns = (numbered(), RandomColumn(name="v", type_sql="text", values=of("a", "b", "c"), nulls=0.2))
    # Serial, so less than of others: what runs beside it also matters.
    operations = (insert_one, *SINGLE, swap_keys)
    table = RandomTable(
        name="t_audited", key=(key("int"),), columns=columns, target_after=triggers, has_audit=True,
        operations=operations,
    )  # fmt: skip
    return [table]


#: Bodies of row triggers: two that the new row alone decides, and two that earlier values also do.
_COMPUTED = ("NEW.p := CASE WHEN NEW.b IS NULL THEN 'none' ELSE left(NEW.a, NEW.b) END", "NEW.q := NEW.b * 2 - NEW.k")
_COUNTED = (
    "NEW.q := coalesce(OLD.q, 0) + NEW.b",
    "IF TG_OP = 'UPDATE' AND NEW.b > OLD.b THEN NEW.q := coalesce(NEW.q, 0) + 1; NEW.p := OLD.a; END IF",
)
_COMPUTES = (
    "CREATE FUNCTION of_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN NEW; END $$",
    "CREATE TRIGGER computes BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION of_{table}()",
    "ALTER TABLE {table} ENABLE ALWAYS TRIGGER computes",
)


def computed(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return two tables with columns that triggers on the target compute from their rows (T-29)."""
    columns = (
        numbered(),
        RandomColumn(name="a", type_sql="text", values=of("x" * 2500, "y" * 2500, "z"), nulls=0.1, is_big=True),
        RandomColumn(name="b", type_sql="int", values=number(0, 9), nulls=0.2),
    )
    return [
        RandomTable(
            name=name, key=(key("int"),), columns=columns, target_extra=("p text", "q bigint"),
            target_after=tuple([line.format(table=name, body=chooser.choice(bodies)) for line in _COMPUTES]),
        )
        for name, bodies in (("t_computed", _COMPUTED), ("t_counted", _COUNTED))
    ]  # fmt: skip
