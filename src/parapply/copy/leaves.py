"""Relations with rows of their own, and how large they are; on either end.

In: an open session, the OID of a table. Out: `Leaf`. Source: PostgreSQL manual, "Partitioning Information Functions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import psycopg

if TYPE_CHECKING:
    from typing import LiteralString


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A relation with rows of its own: the table, or one of its partitions."""

    schema: str
    name: str
    pages: int  # of the main fork; 0 if it has no such thing (a foreign table)
    has_ranges: bool  # rows can be found by ranges of ctid
    estimated_rows: int


async def leaves_of(conn: psycopg.AsyncConnection[tuple[Any, ...]], oid: int) -> list[Leaf]:
    """Return the relations in which a table's rows are: itself, or the partitions below it.

    Raises:
        psycopg.Error: the caller turns it into an error of ours.
    """
    query: LiteralString = """
        SELECT n.nspname, c.relname,
               CASE WHEN c.relkind = 'r' THEN (pg_catalog.pg_relation_size(c.oid)
                    / pg_catalog.current_setting('block_size')::int)::bigint ELSE 0 END,
               c.relkind = 'r' AND COALESCE(am.amname = 'heap', false), GREATEST(c.reltuples, 0)::bigint, c.relpages
          FROM (SELECT $1::oid AS relid WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_partition_tree($1::oid::regclass))
                UNION ALL SELECT relid FROM pg_catalog.pg_partition_tree($1::oid::regclass) WHERE isleaf) AS t
          JOIN pg_catalog.pg_class AS c ON c.oid = t.relid
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
          LEFT JOIN pg_catalog.pg_am AS am ON am.oid = c.relam
         WHERE c.relkind IN ('r', 'f') ORDER BY 1, 2"""
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(query, [oid])
        found = await cursor.fetchall()
    return [
        Leaf(
            schema=schema,
            name=name,
            pages=pages,
            has_ranges=has_ranges,
            # The table has grown since it was last analysed, as a rule.
            estimated_rows=int(rows * pages / analysed_pages) if analysed_pages else 0,
        )
        for schema, name, pages, has_ranges, rows, analysed_pages in found
    ]
