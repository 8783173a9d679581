"""Random partition trees of two levels: by hash, list and range, with leaves of one name in several schemas (T-28).

In goes a chooser; out come a tree published by its root, whose target has another tree, or one published by its leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.differential.exotic import SCHEMAS
from tests.differential.statements import KEYED, guarded
from tests.differential.tables import RandomColumn, RandomTable, key, numbered, others
from tests.differential.types import number, of

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from tests.differential.types import Feature

_REGIONS = ("north", "south", "east")
_DAYS = 30
_KEY = (
    key("int"),
    RandomColumn(name="region", type_sql="text", values=of(*_REGIONS), spare="west"),
    RandomColumn(name="day", type_sql="int", values=number(0, _DAYS), spare="1000"),
)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How a level is divided: the clause of its parent, and the bounds of each part."""

    by: str
    bounds: tuple[str, ...]


_CUTS = {
    "region": _Cut(
        by="LIST (region)", bounds=("FOR VALUES IN ('north')", "FOR VALUES IN ('south', 'west')", "DEFAULT")
    ),
    "day": _Cut(
        by="RANGE (day)",
        bounds=(
            "FOR VALUES FROM (MINVALUE) TO (10)",
            "FOR VALUES FROM (10) TO (20)",
            "FOR VALUES FROM (20) TO (MAXVALUE)",
        ),
    ),
    "k": _Cut(
        by="HASH (k)",
        bounds=("FOR VALUES WITH (MODULUS 2, REMAINDER 0)", "FOR VALUES WITH (MODULUS 2, REMAINDER 1)"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree of partitions.

    Attributes:
        by: the root's PARTITION BY clause.
        statements: what makes the partitions.
        leaves: their names.
        middles: names of the partitions that are partitioned themselves.
        divided_by: by such a name, the column that divides it.
    """

    by: str
    statements: tuple[str, ...]
    leaves: tuple[str, ...]
    middles: tuple[str, ...]
    divided_by: dict[str, str]


def random_tree(root: str, chooser: random.Random) -> Tree:
    """Return a tree of one or two levels; the n-th leaf of each schema has the same name as the others' n-th."""
    first, second = chooser.sample(sorted(_CUTS), 2)
    names = _names("leaf", chooser)
    statements: list[str] = []
    leaves: list[str] = []
    middles: list[str] = []
    for position, bounds in enumerate(_CUTS[first].bounds):
        made = f"PARTITION OF {root} {bounds}"
        if chooser.random() < 0.4:
            leaves.append(next(names))
            statements.append(f"CREATE TABLE {leaves[-1]} {made}")
            continue
        middle = f"{SCHEMAS[position % len(SCHEMAS)]}.middle"
        middles.append(middle)
        statements.append(f"CREATE TABLE {middle} {made} PARTITION BY {_CUTS[second].by}")
        for inner in _CUTS[second].bounds:
            leaves.append(next(names))
            statements.append(f"CREATE TABLE {leaves[-1]} PARTITION OF {middle} {inner}")
    return Tree(
        by=_CUTS[first].by, statements=tuple(statements), leaves=tuple(leaves), middles=tuple(middles),
        divided_by=dict.fromkeys(middles, second),
    )  # fmt: skip


def _names(name: str, chooser: random.Random) -> Iterator[str]:
    schemas = chooser.sample(SCHEMAS, len(SCHEMAS))
    count = 0
    while True:
        yield f"{schemas[count % len(schemas)]}.{name}_{count // len(schemas)}"
        count += 1


def by_root(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table for publish_via_partition_root whose target has another tree, or none.

    Leaves of the target may have a unique index of their own; those in different schemas have one name (T-23).
    """
    source = random_tree("t_tree_root", chooser)
    target = random_tree("t_tree_root", chooser)
    is_guarded = chooser.random() < 0.5
    mail = RandomColumn(name="mail", type_sql="text", values=of(*(f"m{n}" for n in range(24))), nulls=0.2, spare="x")
    is_plain = chooser.random() < 0.2
    indexes = [
        f"CREATE UNIQUE INDEX own_index_{leaf.rpartition('_')[2]} ON {leaf} (mail)"
        for leaf in target.leaves
        if is_guarded and not is_plain
    ]
    where = "" if is_guarded or chooser.random() < 0.7 else f"day < {chooser.randrange(_DAYS)}"
    table = RandomTable(
        name="t_tree_root",
        key=_KEY,
        # A row that comes into the filter is sent without unchanged big values.
        columns=(mail, numbered()) if is_guarded else others(chooser, features, has_big=False if where else None),
        source_tree=f"PARTITION BY {source.by}",
        source_after=source.statements,
        target_tree="" if is_plain else f"PARTITION BY {target.by}",
        target_after=() if is_plain else (*target.statements, *indexes),
        operations=guarded("mail") if is_guarded else KEYED,
        where=where,
    )
    return [table]


def by_leaves(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table published by its leaves, which the target also has: in the same tree or as plain tables."""
    tree = random_tree("t_tree_leaf", chooser)
    is_plain = chooser.random() < 0.4
    table = RandomTable(
        name="t_tree_leaf",
        key=_KEY,
        columns=others(chooser, features),
        source_tree=f"PARTITION BY {tree.by}",
        source_after=tree.statements,
        target_tree=f"PARTITION BY {tree.by}",
        target_after=() if is_plain else tree.statements,
        target_leaves=tree.leaves if is_plain else (),
    )
    return [table]
