"""Relations that hold rows themselves, and their sizes; on either end.

In: an open session, OIDs of tables. Out: `Leaf`. Source: PostgreSQL manual, "Partitioning Information Functions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import psycopg

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import LiteralString


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A relation that holds rows itself: the table, or one of its partitions."""

    schema: str
    name: str
    pages: int  # of the main fork; 0 if it has no such thing (a foreign table)
    has_ranges: bool  # rows can be found by ranges of ctid
    estimated_rows: int


async def leaves_of(conn: psycopg.AsyncConnection[tuple[Any, ...]], oids: Sequence[int]) -> dict[int, list[Leaf]]:
    """Return the relations in which tables' rows are, by the table's OID: itself, or the partitions below it.

    Raises:
        psycopg.Error: the caller turns it into an error of ours.
    """
    query: LiteralString = """
        SELECT t.root::bigint, n.nspname, c.relname,
               CASE WHEN c.relkind = 'r' THEN (pg_catalog.pg_relation_size(c.oid)
                    / pg_catalog.current_setting('block_size')::int)::bigint ELSE 0 END,
               c.relkind = 'r' AND COALESCE(am.amname = 'heap', false), GREATEST(c.reltuples, 0)::bigint, c.relpages
          FROM (SELECT w.root, COALESCE(p.relid, w.root) AS relid
                  FROM unnest($1::oid[]) AS w(root)
                  LEFT JOIN LATERAL pg_catalog.pg_partition_tree(w.root::regclass) AS p ON true
                 WHERE p.relid IS NULL OR p.isleaf) AS t
          JOIN pg_catalog.pg_class AS c ON c.oid = t.relid
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
          LEFT JOIN pg_catalog.pg_am AS am ON am.oid = c.relam
         WHERE c.relkind IN ('r', 'f') ORDER BY 1, 2, 3"""
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(query, [list(oids)])
        found = await cursor.fetchall()
    leaves: dict[int, list[Leaf]] = {oid: [] for oid in oids}
    for root, schema, name, pages, has_ranges, rows, analysed_pages in found:
        leaf = Leaf(
            schema=schema,
            name=name,
            pages=pages,
            has_ranges=has_ranges,
            # The table has grown since it was last analysed, as a rule.
            estimated_rows=int(rows * pages / analysed_pages) if analysed_pages else 0,
        )
        leaves[root].append(leaf)
    return leaves
