"""Bounds of the ranges of a table: values of the key's first column out of a sample of the publisher's pages.

In: a session on the publisher that sees the snapshot. Out: `Ranges`. A bad sample makes ranges of unequal size, but
no wrong result, because both ends number the rows by the same values.

Source: PostgreSQL manual, "TABLESAMPLE", "width_bucket".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from parapply.source.slot import source_errors
from parapply.verify.canonical import Ranges

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from parapply.copy.published import PublishedTable
    from parapply.source.slot import Connection

#: Pages of the sample for each range, about, and at least for a table.
_PAGES_PER_RANGE = 2
_FEWEST_PAGES = 64


def drawn(chosen: random.Random, n_ranges: int, n_wanted: int, read: Sequence[int]) -> list[int]:
    """Return numbers of ranges in their order, none of those that were read; fewer if not enough are left."""
    some = chosen.sample(range(n_ranges), min(n_ranges, n_wanted + len(read)))
    return sorted([number for number in some if number not in read][:n_wanted])


async def ranges_of(source: Connection, table: PublishedTable, type_name: str, count: int) -> Ranges:
    """Return about `count` ranges of the key's first column; hash slices if too few of its values differ."""
    column = table.key[0]
    leaves = [leaf for leaf in table.leaves if leaf.has_ranges]
    pages = max(1, sum(leaf.pages for leaf in leaves))
    # The same share of every leaf, or the sample would not be like the table.
    percent = min(100.0, 100 * max(_FEWEST_PAGES, count * _PAGES_PER_RANGE) / pages)
    select = sql.SQL("SELECT {}::{} AS v FROM ONLY {} TABLESAMPLE SYSTEM ({})")
    samples = sql.SQL(" UNION ALL ").join(
        [
            select.format(
                sql.Identifier(column),
                sql.Identifier("pg_catalog", type_name),
                sql.Identifier(leaf.schema, leaf.name),
                sql.Literal(percent),
            )
            for leaf in leaves
        ]
    )
    # The least value of each of `count` equal portions of the sample but the first.
    query = sql.SQL(
        "SELECT DISTINCT ON (portion) v::pg_catalog.text FROM (SELECT v, pg_catalog.ntile({count}) OVER (ORDER BY v)"
        " AS portion FROM ({samples}) AS s) AS n WHERE portion > 1 ORDER BY portion, v"
    ).format(count=sql.Literal(count), samples=samples)
    if not leaves:
        return Ranges(count=count)
    with source_errors(f"reading a sample of {table.text}"):
        async with source.cursor() as cursor:
            await cursor.execute(query)
            bounds = tuple(dict.fromkeys(bound for (bound,) in await cursor.fetchall()))
    if len(bounds) < count // 2:
        return Ranges(count=count)
    return Ranges(count=len(bounds) + 1, column=column, type_name=type_name, bounds=bounds)
