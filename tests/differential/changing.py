"""Random tables that change as a whole: keys that move in sets, TRUNCATE of several, columns that come and go.

In goes a chooser; out come tables for `schema`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.differential.statements import KEYED, insert
from tests.differential.tables import RandomColumn, RandomTable, big, column_of, key, literal, numbered, others
from tests.differential.types import TYPES, number, of

if TYPE_CHECKING:
    import random

    from tests.differential.types import Feature

_SHIFT = 1000


def shifted(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table where one statement gives many rows other keys: apart from each other, in chains, in a circle.

    Its key has up to ten columns, of which one moves.
    """
    moving = RandomColumn(
        name="k", type_sql=chooser.choice(("int", "bigint", "numeric")), values=number(0, 40), spare="-1"
    )
    more = [
        column_of(TYPES[chooser.choice(("int", "text", "uuid"))], f"k{n}") for n in range(chooser.choice((0, 0, 1, 9)))
    ]
    usual = [replace(column, values=of(column.values(chooser), column.spare)) for column in more]
    is_full = chooser.random() < 0.3
    columns = (*others(chooser, features, is_exact=is_full, has_big=False), big(chooser))
    table = RandomTable(
        name="t_shifted", key=(moving, *usual), columns=columns,
        source_columns=tuple(chooser.sample((moving, *usual, *columns), 1 + len(usual) + len(columns))),
        identity="FULL" if is_full else "",
        target_after=("CREATE INDEX ON t_shifted (n)",) if chooser.random() < 0.3 else (),
        operations=(*KEYED, insert, insert, *[_apart] * 4, *[_one_by_one] * 4),
    )  # fmt: skip
    return [table]


def _apart(table: RandomTable, chooser: random.Random) -> str:
    """Move rows far away, or back; a key that is taken refuses all."""
    new = chooser.choice((f"k + {_SHIFT}", f"k - {_SHIFT}", "-2 - k"))
    first = chooser.choice((0, 10, _SHIFT, -_SHIFT))
    more = chooser.choice(("", ", n = (n + 1) % 10", ", big = NULL"))
    return f"UPDATE {table.name} SET k = {new}{more} WHERE k BETWEEN {first} AND {first + chooser.randrange(50)}"


def _one_by_one(table: RandomTable, chooser: random.Random) -> str:
    """Move each row to the place of the next, the first one to the last place or not at all."""
    circle = chooser.random() < 0.5
    first, last = (f"UPDATE {table.name} SET k = {new} WHERE k = {old}" for new, old in ((-1, 20), (0, -1)))
    step = f"UPDATE {table.name} SET k = r.k + 1 WHERE k = r.k"
    loop = (
        f"FOR r IN SELECT DISTINCT k FROM {table.name} WHERE k BETWEEN 0 AND 19 ORDER BY k DESC LOOP {step}; END LOOP"
    )
    body = f"{first}; {loop}; {last};" if circle else f"{loop};"
    return f"DO $$ DECLARE r record; BEGIN {body} END $$"


def emptied(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return tables that TRUNCATE empties together, or with those that refer to them."""
    parent = RandomTable(name="t_emptied", key=(key("int"),), columns=others(chooser, features))
    alone = RandomTable(name="t_emptied_alone", key=(key("int"),), columns=others(chooser, features))

    def some_parent(chooser: random.Random) -> str:
        return f"(SELECT min(k) FROM t_emptied WHERE k > {chooser.randrange(-5, 35)})"

    up = RandomColumn(name="up", type_sql="int", values=some_parent, is_expression=True, nulls=0.2)
    ties = "ALTER TABLE t_emptied_child ADD FOREIGN KEY (up) REFERENCES t_emptied ON DELETE CASCADE ON UPDATE CASCADE"
    child = RandomTable(
        name="t_emptied_child", key=(key("int"),), columns=(numbered(), up), source_after=(ties,),
        target_after=(ties,) if chooser.random() < 0.5 else (),
    )  # fmt: skip
    names = [parent.name, child.name, alone.name]

    def empty(table: RandomTable, chooser: random.Random) -> str:
        some = chooser.choice(([table.name], chooser.sample(names, 2), names))
        cascade = "" if {parent.name, child.name} <= {*some} or parent.name not in some else " CASCADE"
        text = f"TRUNCATE {', '.join(some)}{chooser.choice((' RESTART IDENTITY', ''))}{cascade}"
        rows = [insert(one, chooser) for one in (parent, alone, child)]
        return "; ".join((*chooser.sample(rows[:2], chooser.randint(0, 2)), text, *rows[: chooser.randint(0, 3)]))

    return [replace(table, operations=(*KEYED, empty)) for table in (parent, child, alone)]


# A publication of all tables has it already.
_PUBLISH = (
    "DO $$ BEGIN IF EXISTS (SELECT FROM pg_publication WHERE pubname = 'pub' AND NOT puballtables)"
    " THEN ALTER PUBLICATION pub ADD TABLE {}; END IF; END $$"
)
#: Columns that the target always has, and the publisher at times.
_PASSING = ("d0", "d1", "d2")


def altered(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose columns, types, identity and OID change on the publisher, while the target also changes.

    The target's changes leave the same rows whenever they are made.
    """
    name = "t_altered"
    target_type = chooser.choice(("numeric", "bigint"))
    first = RandomColumn(name="k", type_sql="int", target_type=target_type, values=number(0, 40), spare="-1000")
    a = RandomColumn(name="a", type_sql="int", target_type="numeric", values=number(0, 40), nulls=0.2)
    columns = (numbered(), a, big(chooser))
    table = RandomTable(
        name=name, key=(first,), columns=columns, target_extra=("d0 text DEFAULT 'old'", "d1 text", "d2 text"),
        target_columns=tuple(chooser.sample((first, *columns), 4)),
        # By itself: beside the primary key in CREATE TABLE it would be that.
        source_after=("ALTER TABLE t_altered ADD CONSTRAINT t_altered_k UNIQUE (k)",),
    )  # fmt: skip
    made = table.source_sql().rstrip(";\n")

    def again(table: RandomTable, chooser: random.Random) -> str:
        return f"TRUNCATE {name}; DROP TABLE {name}; {made}; {_PUBLISH.format(name)}"

    operations = (*KEYED * 2, *[_alter] * 6, *[_with_passing] * 12, again)
    return [replace(table, operations=operations, target_live=_live(name))]


def _attempt(statement: str) -> str:
    missing = "undefined_column OR duplicate_column"
    return f"DO $$ BEGIN {statement}; EXCEPTION WHEN {missing} THEN NULL; END $$"


def _alter(table: RandomTable, chooser: random.Random) -> str:
    one, other = chooser.sample(_PASSING, 2)
    default = chooser.choice(("", " DEFAULT 'new'"))
    integer = chooser.choice(("int", "bigint", "numeric"))
    what = chooser.choice((
        f"ADD COLUMN {one} {chooser.choice(('int', 'varchar(9)'))}",
        f"ADD COLUMN {one} text{default}",
        f"DROP COLUMN {one}",
        f"RENAME {one} TO {other}",
        f"ALTER k TYPE {integer}",
        f"ALTER a TYPE {integer}",
        f"REPLICA IDENTITY {chooser.choice(('FULL', 'DEFAULT', 'DEFAULT', 'USING INDEX t_altered_k'))}",
        "DROP CONSTRAINT t_altered_pkey, ADD CONSTRAINT t_altered_pkey PRIMARY KEY (k, n)",
        "DROP CONSTRAINT t_altered_pkey, ADD CONSTRAINT t_altered_pkey PRIMARY KEY (n, k)",
        "DROP CONSTRAINT t_altered_pkey, ADD CONSTRAINT t_altered_pkey PRIMARY KEY (k)",
    ))  # fmt: skip
    return _attempt(f"ALTER TABLE {table.name} {what}")


def _with_passing(table: RandomTable, chooser: random.Random) -> str:
    """Write to a column that may not be there."""
    name, value = chooser.choice(_PASSING), literal(chooser.choice("123"))
    where = f"k = {table.key[0].value(chooser)}"
    if chooser.random() < 0.5:
        return _attempt(f"UPDATE {table.name} SET {name} = {value}, n = {chooser.randrange(10)} WHERE {where}")
    row = ", ".join(column.value(chooser) for column in table.all_columns)
    names = ", ".join(column.name for column in table.all_columns)
    inserted = f"INSERT INTO {table.name} ({names}, {name}) VALUES ({row}, {value}) ON CONFLICT DO NOTHING"
    return _attempt(inserted)


def _live(name: str) -> tuple[str, ...]:
    """Return the statements of the target, run in this order and again from the start."""
    alter = f"ALTER TABLE {name}"
    names = "k, n, a, big, d0, d1, d2, own"
    return (
        f"{alter} ADD COLUMN own text DEFAULT 'own'",
        f"{alter} ALTER k TYPE numeric",
        f"CREATE INDEX ON {name} (n)",
        f"{alter} ALTER a TYPE text",
        f"{alter} ADD COLUMN g text GENERATED ALWAYS AS (n * 2) STORED",
        f"{alter} DROP CONSTRAINT t_altered_pkey, ADD CONSTRAINT t_altered_pkey PRIMARY KEY (k)",
        (
            f"{alter} RENAME TO gone; CREATE TABLE {name} (LIKE gone INCLUDING ALL);"
            f" INSERT INTO {name} ({names}) SELECT {names} FROM gone; DROP TABLE gone;"
            f" {alter} RENAME CONSTRAINT t_altered_pkey1 TO t_altered_pkey"
        ),
        f"{alter} DROP COLUMN own",
        f"{alter} ALTER k TYPE bigint, ALTER a TYPE numeric USING a::numeric",
        f"{alter} DROP COLUMN g",
    )
