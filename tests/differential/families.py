"""Random tables tied by foreign keys, on the publisher and, where the target's role lets them, on the target (T-25).

In goes a chooser; out come a family of four tables and one that refers to itself. Actions that the target takes when a
parent goes, the publisher has also taken, and sends: the target's actions leave nothing else to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.differential.statements import KEYED, SINGLE, handed, insert_one
from tests.differential.tables import RandomColumn, RandomTable, key, literal, numbered
from tests.differential.types import of

if TYPE_CHECKING:
    import random

    from tests.differential.tables import Operation
    from tests.differential.types import Feature

_DEFERRED = " DEFERRABLE INITIALLY DEFERRED"
_NO_ACTION = "NO ACTION"
# By the publisher's action, what a target may do. Not CASCADE where the publisher says SET NULL, which loses rows, nor
# where it checks at the commit, until when a parent may come back.
_TARGET_ACTIONS = {"CASCADE": ("CASCADE", "CASCADE", "SET NULL"), "SET NULL": ("SET NULL",), _NO_ACTION: (_NO_ACTION,)}


@dataclass(frozen=True, kw_only=True)
class _Foreign:
    """A foreign key: what follows REFERENCES on each side; nothing on a target that has none."""

    source: str
    target: str
    is_deferred: bool  # on the publisher: the child may come before its parent


def _foreign(on_delete: str, chooser: random.Random) -> _Foreign:
    on_update = chooser.choice(("CASCADE", _NO_ACTION))
    is_deferred = chooser.random() < 0.4
    source = _actions(on_delete, on_update, is_deferred=is_deferred)
    kind = chooser.random()
    if kind < 0.1:
        target = ""
    elif kind < 0.3:
        # Every check at the commit finds what the publisher's own actions have sent.
        target = _actions(_NO_ACTION, _NO_ACTION, is_deferred=True)
    else:
        is_later = is_deferred or chooser.random() < 0.3
        target = _actions(chooser.choice(_TARGET_ACTIONS[on_delete]), on_update, is_deferred=is_later)
    return _Foreign(source=source, target=target, is_deferred=is_deferred)


def _actions(on_delete: str, on_update: str, *, is_deferred: bool) -> str:
    return f"ON DELETE {on_delete} ON UPDATE {on_update}{_DEFERRED if is_deferred else ''}"


def family(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a parent, two tables of children and one of grandchildren, with each of the three ways to delete.

    A child has one foreign key: through two of them a target could delete what the publisher changes first. It may
    refer to another unique column than the key.
    """
    code = RandomColumn(
        name="code",
        type_sql="text",
        values=of(*(f"c{n}" for n in range(20))),
        clause="UNIQUE",
        nulls=0.1,
        spare="spare",
    )
    parent = RandomTable(
        name="t_parent", key=(key("int"),), columns=(numbered(), code), operations=(*KEYED, *handed("code"))
    )
    referenced = [parent.key[0], code]
    actions = ["CASCADE", "SET NULL", _NO_ACTION]
    for drawn in (referenced, actions):
        chooser.shuffle(drawn)
    child = _child("t_child", parent, referenced[0], actions[0], chooser)
    heir = _child("t_heir", parent, referenced[1], actions[1], chooser)
    return [parent, child, heir, _child("t_grandchild", child, child.key[0], actions[2], chooser)]


def itself(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table whose rows refer to rows of it, to be changed one by one: a check sees single rows on a target."""
    foreign = _foreign(chooser.choice(("CASCADE", "CASCADE", "SET NULL", _NO_ACTION)), chooser)
    up = _referring("up", "t_tree", key("int"))

    def delete_a_leaf(table: RandomTable, chooser: random.Random) -> str:
        parent = literal(table.key[0].values(chooser))
        return f"DELETE FROM t_tree WHERE k = (SELECT k FROM t_tree WHERE up = {parent} ORDER BY k LIMIT 1)"

    table = RandomTable(name="t_tree", key=(key("int"),), columns=(numbered(), up))
    first = (_child_first(table, table.key[0], "up"),) * 2 if foreign.is_deferred else ()
    table = replace(table, operations=(*SINGLE, insert_one, delete_a_leaf, *first))
    return [_tied(table, "up", "t_tree", "k", foreign)]


def _child(
    name: str, parent: RandomTable, referenced: RandomColumn, on_delete: str, chooser: random.Random
) -> RandomTable:
    foreign = _foreign(on_delete, chooser)
    refers = _referring("parent", parent.name, referenced)
    first = (_child_first(parent, referenced, "parent"),) * 3 if foreign.is_deferred else ()
    operations = (*KEYED, *_endings(parent, referenced), *first)
    table = RandomTable(name=name, key=(key("int"),), columns=(numbered(), refers), operations=operations)
    return _tied(table, "parent", parent.name, referenced.name, foreign)


def _tied(table: RandomTable, column: str, parent: str, referenced: str, foreign: _Foreign) -> RandomTable:
    add = f"ALTER TABLE {table.name} ADD FOREIGN KEY ({column}) REFERENCES {parent} ({referenced})"
    target = (f"{add} {foreign.target}",) if foreign.target else ()
    return replace(table, source_after=(f"{add} {foreign.source}",), target_after=target)


def _referring(name: str, parent: str, referenced: RandomColumn) -> RandomColumn:
    """Return a column whose values mostly exist in the parent: else most transactions were refused."""

    def value(chooser: random.Random) -> str:
        if chooser.random() < 0.05:
            return referenced.value(chooser)
        some = literal(key("int").values(chooser))
        column = referenced.name
        return f"(SELECT {column} FROM {parent} WHERE k >= {some} AND {column} IS NOT NULL ORDER BY k LIMIT 1)"

    return RandomColumn(name=name, type_sql=referenced.type_sql, values=value, nulls=0.1, is_expression=True)


def _endings(parent: RandomTable, referenced: RandomColumn) -> tuple[Operation, ...]:
    """Return how a parent goes with its children, or after they went to another one."""

    def end(children: str, chooser: random.Random) -> str:
        value = literal(referenced.values(chooser))
        return f"{children} WHERE parent = {value}; DELETE FROM {parent.name} WHERE {referenced.name} = {value}"

    def with_children(table: RandomTable, chooser: random.Random) -> str:
        return end(f"DELETE FROM {table.name}", chooser)

    def after_children(table: RandomTable, chooser: random.Random) -> str:
        new = table.columns[-1].value(chooser)
        return end(f"UPDATE {table.name} SET parent = {new}", chooser)

    return (with_children, after_children)


def _child_first(parent: RandomTable, referenced: RandomColumn, column: str) -> Operation:
    """Return an insert of a child whose parent comes after it, in the same transaction."""

    def run(table: RandomTable, chooser: random.Random) -> str:
        value = literal(referenced.values(chooser))
        rows = [
            (names, [value if name == which else _value(each, name, chooser) for name in names], each)
            for each, which, names in (
                (table, column, [one.name for one in table.all_columns]),
                (parent, referenced.name, [one.name for one in parent.all_columns]),
            )
        ]
        return "; ".join(
            f"INSERT INTO {each.name} ({', '.join(names)}) VALUES ({', '.join(row)}) ON CONFLICT DO NOTHING"
            for names, row, each in rows
        )

    return run


def _value(table: RandomTable, name: str, chooser: random.Random) -> str:
    return next(column for column in table.all_columns if column.name == name).value(chooser)
