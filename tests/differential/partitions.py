"""Random partitioned tables, whose tree on the target is another one than on the publisher (T-28).

In goes a chooser; out come tables, some published by their root and some by their leaves. The target's tables take
every row that the publisher's take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.differential.statements import guarded
from tests.differential.tables import RandomColumn, RandomTable, key, numbered, others
from tests.differential.types import of

if TYPE_CHECKING:
    import random

    from tests.differential.types import Feature

_BY_REGION = (
    "CREATE TABLE t_region_north PARTITION OF t_region FOR VALUES IN ('north')",
    "CREATE TABLE t_region_rest PARTITION OF t_region DEFAULT",
)


def _hashed(table: str, modulus: int) -> tuple[str, ...]:
    """Return statements that make all hash partitions of a table."""
    return tuple(
        f"CREATE TABLE {table}_{n} PARTITION OF {table} FOR VALUES WITH (MODULUS {modulus}, REMAINDER {n})"
        for n in range(modulus)
    )


def on_target_only(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a plain table, partitioned on the target; columns of a partition may have another order there."""
    modulus = chooser.randint(1, 3)
    table = RandomTable(
        name="t_spread", key=(key("bigint"),), columns=others(chooser, features), target_tree="PARTITION BY HASH (k)"
    )
    leaves = _hashed("t_spread", modulus)
    if chooser.random() < 0.5:
        shuffled = list(table.all_columns)
        chooser.shuffle(shuffled)
        attached = (
            f"CREATE TABLE t_spread_0 ({table.target_body(tuple(shuffled))})",
            f"ALTER TABLE t_spread ATTACH PARTITION t_spread_0 FOR VALUES WITH (MODULUS {modulus}, REMAINDER 0)",
        )
        leaves = (*attached, *leaves[1:])
    return [replace(table, target_after=leaves)]


def by_root(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return tables for publish_via_partition_root: the target's partitions are others, or there are none.

    The first one's leaves have a unique index of their own on the target (T-23); rows of the second one change their
    partition on the publisher, which sends a delete and an insert.
    """
    modulus = chooser.randint(1, 3)
    mail = RandomColumn(
        name="mail", type_sql="text", values=of(*(f"m{n}" for n in range(24))), nulls=0.2, spare="spare"
    )
    hashed = RandomTable(
        name="t_hash",
        key=(key("int"),),
        columns=(mail, numbered()),
        source_tree="PARTITION BY HASH (k)",
        source_after=_hashed("t_hash", 2),
        target_tree="PARTITION BY HASH (k)",
        target_after=(*_hashed("t_hash", modulus), "CREATE UNIQUE INDEX ON t_hash_0 (mail)"),
        # Of the root only: old rows of the leaves are keys all the same.
        identity="FULL" if chooser.random() < 0.3 else "",
        operations=guarded("mail"),
    )
    is_plain = chooser.random() < 0.3
    listed = replace(
        _by_region(chooser, features),
        target_tree="" if is_plain else "PARTITION BY HASH (k)",
        target_after=() if is_plain else _hashed("t_region", 2),
    )
    return [hashed, listed]


def by_leaves(chooser: random.Random, features: frozenset[Feature]) -> list[RandomTable]:
    """Return a table published by its leaves: on the target the same ones, partitioned further, or plain tables."""
    table = _by_region(chooser, features)
    layout = chooser.randrange(3)
    if layout == 0:
        return [replace(table, target_tree="PARTITION BY LIST (region)", target_after=_BY_REGION)]
    if layout == 1:
        return [replace(table, target_leaves=("t_region_north", "t_region_rest"))]
    finer = (
        f"{_BY_REGION[0]} PARTITION BY HASH (k)",
        *(
            f"CREATE TABLE t_region_north_{n} PARTITION OF t_region_north FOR VALUES WITH (MODULUS 2, REMAINDER {n})"
            for n in range(2)
        ),
        _BY_REGION[1],
    )
    return [replace(table, target_tree="PARTITION BY LIST (region)", target_after=finer)]


def _by_region(chooser: random.Random, features: frozenset[Feature]) -> RandomTable:
    """Return a table partitioned on the publisher by a part of its key, which moves change."""
    region = RandomColumn(name="region", type_sql="text", values=of("north", "south", "east"), spare="spare")
    return RandomTable(
        name="t_region",
        key=(key("int"), region),
        columns=others(chooser, features),
        source_tree="PARTITION BY LIST (region)",
        source_after=_BY_REGION,
    )
