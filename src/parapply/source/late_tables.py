"""Tables that are published and that the copy has not brought: has the stream every row of one?

It has if the table was made after a time that is known, and was published from its first moment on. Neither is in the
stream. So what the publisher's catalogue holds at some time is kept as *marks*: a text for each table, each entry of
the publications, and each partitioned table's place below another one. Whatever has no mark came later; an entry
that has one has existed since. An entry that the configuration or a publication has left out for a time loses its own.

That a partition was made as one, and not attached with rows in it, shows in its inherited columns: ATTACH PARTITION
rewrites their rows in pg_attribute. A command that writes rows takes its own command id, and CREATE TABLE is done
with a column at the first or the second one. (Tried on PostgreSQL 15 to 18. A DROP TABLE that was rolled back leaves
its command id in the rows until a freeze, and its xid in xmax for as long.)

In: a plain session on the publisher. Out: marks, tables, and reasons. No lock on a published table is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from parapply.source.slot import read_rows, source_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import LiteralString

    from parapply.plan.copy_starts import Name
    from parapply.source.slot import Connection

#: server_version_num of the first server that publishes schemas.
_SCHEMAS_SINCE: Final = 150000

#: server_version_num of the first server whose publications of all tables may leave some out.
_EXCEPT_SINCE: Final = 190000

# Behind the `@` is the transaction that has written the publication's row: once it is altered its entries are others,
# because it may have sent fewer kinds of changes for a time. A mark of all tables has those left out behind a `!`.
_ENTRIES: LiteralString = """
    SELECT 'a' || p.oid || '@' || p.xmin AS mark, NULL::oid AS relid, NULL::oid AS nspid, p.oid AS pubid,
           false AS is_part, '{}'::oid[] AS excepted
      FROM pg_catalog.pg_publication AS p WHERE p.puballtables AND p.pubname = ANY ($1::text[])
    UNION ALL
    SELECT 'r' || r.oid || '@' || p.xmin, r.prrelid, NULL, p.oid,
           to_jsonb(r) ->> 'prqual' IS NOT NULL OR to_jsonb(r) ->> 'prattrs' IS NOT NULL, '{}'
      FROM pg_catalog.pg_publication_rel AS r
      JOIN pg_catalog.pg_publication AS p ON p.oid = r.prpubid WHERE p.pubname = ANY ($1::text[])"""
_SCHEMA_ENTRIES: LiteralString = """
    UNION ALL
    SELECT 'n' || s.oid || '@' || p.xmin, NULL, s.pnnspid, p.oid, false, '{}'
      FROM pg_catalog.pg_publication_namespace AS s
      JOIN pg_catalog.pg_publication AS p ON p.oid = s.pnpubid WHERE p.pubname = ANY ($1::text[])"""
#: Put over the entries from `_EXCEPT_SINCE` on: a row of pg_publication_rel may then name a table that is left out.
_EXCEPTED: LiteralString = """
    SELECT e.mark || COALESCE('!' || x.marks, '') AS mark, e.relid, e.nspid, e.pubid, e.is_part,
           COALESCE(x.oids, '{}') AS excepted
      FROM (ENTRIES) AS e
      LEFT JOIN LATERAL (
           SELECT string_agg(r.oid || '@' || r.xmin, ',' ORDER BY r.oid) AS marks, array_agg(r.prrelid) AS oids
             FROM pg_catalog.pg_publication_rel AS r WHERE r.prpubid = e.pubid AND r.prexcept) AS x
        ON e.relid IS NULL AND e.nspid IS NULL
     WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_publication_rel AS r
                        WHERE r.prpubid = e.pubid AND r.prrelid = e.relid AND r.prexcept)"""

_MARKS: LiteralString = """
    SELECT mark FROM entries
    UNION ALL SELECT 't' || oid FROM pg_catalog.pg_class WHERE relkind IN ('r', 'p')
    UNION ALL SELECT 'e' || i.inhrelid || '<' || i.inhparent || '@' || i.xmin FROM pg_catalog.pg_inherits AS i
      JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid AND c.relkind = 'p'"""

#: Condition on a partition c with the row a of its first system column.
WAS_MADE_THERE: LiteralString = """
           EXISTS (SELECT FROM pg_catalog.pg_attribute AS k
                    WHERE k.attrelid = c.oid AND k.attnum > 0 AND k.attinhcount > 0 AND k.xmin = a.xmin
                      AND k.cmin::text::bigint - a.cmin::text::bigint <= 1 AND k.xmax = 0 AND a.xmax = 0)"""

_LINE: LiteralString = """
    , line AS (
        SELECT $2::oid AS oid, 0 AS depth
        UNION ALL SELECT i.inhparent, line.depth + 1 FROM line
          JOIN pg_catalog.pg_class AS c ON c.oid = line.oid AND c.relispartition
          JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = line.oid)
    SELECT c.oid::bigint, 'e' || i.inhrelid || '<' || i.inhparent || '@' || i.xmin,
           WAS_MADE_THERE,
           EXISTS (SELECT FROM pg_catalog.pg_depend AS d
                    WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0
                      AND d.refclassid = 'pg_catalog.pg_namespace'::regclass AND d.xmin = a.xmin
                      AND d.cmin::text = a.cmin::text AND d.xmax = 0 AND a.xmax = 0),
           c.relkind <> 'r' OR c.relfilenode = c.oid,
           ARRAY(SELECT mark FROM entries WHERE relid = c.oid), ARRAY(SELECT mark FROM entries WHERE nspid = n.oid),
           ARRAY(SELECT mark FROM entries WHERE relid IS NULL AND nspid IS NULL
                    AND NOT excepted && (SELECT array_agg(one.oid) FROM line AS one))
      FROM line
      JOIN pg_catalog.pg_class AS c ON c.oid = line.oid
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
      JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = -1
      LEFT JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = c.oid AND c.relispartition
     ORDER BY line.depth""".replace("WAS_MADE_THERE", WAS_MADE_THERE)

#: The leaves that are published, directly or with a partitioned table above them: by OID, with the tables above.
_UNCOVERED: LiteralString = """
    , line AS (
        SELECT c.oid AS leaf, c.oid FROM pg_catalog.pg_class AS c
         WHERE c.relkind = 'r' AND pg_catalog.pg_relation_is_publishable(c.oid)
        UNION ALL SELECT line.leaf, i.inhparent FROM line
          JOIN pg_catalog.pg_class AS c ON c.oid = line.oid AND c.relispartition
          JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = line.oid)
    SELECT leaf.oid::bigint, n.nspname, leaf.relname
      FROM line
      JOIN pg_catalog.pg_class AS c ON c.oid = line.oid
      JOIN pg_catalog.pg_class AS leaf ON leaf.oid = line.leaf
      JOIN pg_catalog.pg_namespace AS n ON n.oid = leaf.relnamespace
     GROUP BY 1, 2, 3
    HAVING bool_or(c.oid IN (SELECT relid FROM entries WHERE relid IS NOT NULL)
                   OR c.relnamespace IN (SELECT nspid FROM entries WHERE nspid IS NOT NULL)
                   OR EXISTS (SELECT FROM entries WHERE relid IS NULL AND nspid IS NULL AND NOT EXISTS (
                              SELECT FROM line AS one WHERE one.leaf = line.leaf AND one.oid = ANY (excepted))))
       AND NOT bool_or(c.oid = ANY (CASE WHEN c.oid = line.leaf THEN $2::oid[] ELSE $3::oid[] END))
     ORDER BY 2, 3"""


class TablePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A table, or a partitioned table above it, as the catalogue has it now."""

    oid: int
    edge: str | None  # mark of its place below the next one; None: it is no partition
    was_made_there: bool  # CREATE TABLE ... PARTITION OF, and not attached since
    was_made_in_schema: bool  # and not moved since
    is_as_made: bool  # never rewritten: what was UNLOGGED once has been
    entries: tuple[str, ...]  # marks of the publications' entries that name it,
    schema_entries: tuple[str, ...]  # those that name its schema,
    all_entries: tuple[str, ...]  # and publications of all tables


async def marks(conn: Connection, publications: Sequence[str]) -> tuple[str, ...]:
    """Return the present content of the catalogue; raise SourceRefused or SourceLost if it could not be read."""
    with source_errors("reading which tables there are"):
        return tuple([str(mark) for (mark,) in await entry_rows(conn, _MARKS, [list(publications)])])


async def still_published(conn: Connection, publications: Sequence[str], known: Collection[str]) -> list[str]:
    """Return marks without the entries that are not there now, or not of these publications; errors as `marks`."""
    with source_errors("reading what is published"):
        now = {mark for (mark,) in await entry_rows(conn, "SELECT mark FROM entries", [list(publications)])}
    return [mark for mark in known if mark[0] not in "arn" or mark in now]


async def places(conn: Connection, publications: Sequence[str], oid: int) -> tuple[TablePlace, ...]:
    """Return a table and the partitioned tables above it, from the bottom up; nothing if it is gone."""
    with source_errors("reading what is known of a table"):
        found = await entry_rows(conn, _LINE, [list(publications), oid])
    return tuple(
        TablePlace(
            oid=relid,
            edge=edge,
            was_made_there=was_made_there,
            was_made_in_schema=was_made_in_schema,
            is_as_made=is_as_made,
            entries=tuple(entries),
            schema_entries=tuple(schema_entries),
            all_entries=tuple(all_entries),
        )
        for relid, edge, was_made_there, was_made_in_schema, is_as_made, entries, schema_entries, all_entries in found
    )


async def uncovered(
    conn: Connection, publications: Sequence[str], known_oids: Collection[int], root_oids: Collection[int]
) -> list[tuple[int, Name]]:
    """Return the published tables that are not known, nor published as a partitioned table above them that is.

    Partitions below `root_oids` are published as these.
    """
    with source_errors("looking for tables published since"):
        found = await entry_rows(conn, _UNCOVERED, [list(publications), list(known_oids), list(root_oids)])
    return [(oid, (schema, name)) for oid, schema, name in found]


async def oids(conn: Connection, names: Sequence[Name]) -> dict[Name, int]:
    """Return the OIDs of tables by their names; one that does not exist has none."""
    query: LiteralString = """
        SELECT n.nspname, c.relname, c.oid::bigint
          FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)
          JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name
          JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name
         WHERE c.relkind IN ('r', 'p')"""
    with source_errors("looking for tables"):
        found = await read_rows(conn, query, [[schema for schema, _ in names], [table for _, table in names]])
    return {(schema, name): oid for schema, name, oid in found}


async def names(conn: Connection, oids: Collection[int]) -> dict[int, Name]:
    """Return the names that tables have now; a table that is gone has none."""
    query: LiteralString = """
        SELECT c.oid::bigint, n.nspname, c.relname FROM pg_catalog.pg_class AS c
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = ANY ($1::oid[])"""
    with source_errors("reading the tables' names"):
        return {oid: (schema, name) for oid, schema, name in await read_rows(conn, query, [list(oids)])}


async def relatives(conn: Connection, names: Sequence[Name]) -> dict[int, list[Name]]:
    """Return tables that are, or are above or below, tables by these names as partitions; with these, by OID."""
    query: LiteralString = """
        WITH RECURSIVE named AS MATERIALIZED (
            SELECT c.oid, n.nspname, c.relname
              FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)
              JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name
              JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name),
        below AS (
            TABLE named
            UNION ALL
            SELECT i.inhrelid, below.nspname, below.relname
              FROM below JOIN pg_catalog.pg_inherits AS i ON i.inhparent = below.oid
              JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid AND c.relispartition)
        SELECT oid::bigint, nspname, relname FROM below
        UNION
        SELECT above.relid::oid::bigint, nspname, relname
          FROM named CROSS JOIN pg_catalog.pg_partition_ancestors(named.oid) AS above(relid)"""
    found: dict[int, list[Name]] = {}
    if names:
        with source_errors("looking for partitions"):
            rows = await read_rows(conn, query, [[schema for schema, _ in names], [name for _, name in names]])
        for oid, schema, name in rows:
            found.setdefault(oid, []).append((schema, name))
    return found


async def columns(conn: Connection, oids: Collection[int]) -> dict[int, dict[str, int]]:
    """Return the numbers of the columns that tables have now, by name; none of a table that is gone."""
    query: LiteralString = """
        SELECT attrelid::bigint, attname, attnum::int FROM pg_catalog.pg_attribute
         WHERE attrelid = ANY ($1::oid[]) AND attnum > 0 AND NOT attisdropped"""
    found: dict[int, dict[str, int]] = {oid: {} for oid in oids}
    with source_errors("reading a table's columns"):
        for oid, name, number in await read_rows(conn, query, [list(oids)]):
            found[oid][name] = number
    return found


def why_not_whole(line: Sequence[TablePlace], known: Collection[str]) -> str:
    """Return why the stream may lack rows of a table; empty: it has all of them.

    `known` are marks of a time at which the stream had begun.
    """
    if not line:
        return "it is no longer on the publisher"
    table = line[0]
    if f"t{table.oid}" in known:
        return "it existed before it was published, or its copy was not asked for"
    if not table.is_as_made:
        return "it was rewritten since it was made, as by TRUNCATE or SET LOGGED"
    if not _was_published_when_made(line, known):
        return "it may have had rows before it was published"
    return ""


def _was_published_when_made(line: Sequence[TablePlace], known: Collection[str]) -> bool:
    """Return whether it was, for a table that was made after the marks were taken."""
    table, above = line[0], line[1:]
    if any(mark in known for mark in table.all_entries):
        return True
    if table.was_made_in_schema and any(mark in known for mark in table.schema_entries):
        return True
    return bool(above) and table.was_made_there and _publishes_partitions(above, known)


def _publishes_partitions(line: Sequence[TablePlace], known: Collection[str]) -> bool:
    """Return whether a partition made below this table, at any time since the marks, was published with it."""
    table, above = line[0], line[1:]
    if f"t{table.oid}" not in known:
        return _was_published_when_made(line, known)
    if any(mark in known for mark in (*table.all_entries, *table.entries)):
        return True
    return bool(above) and table.edge in known and _publishes_partitions(above, known)


def entries(version_num: int) -> LiteralString:
    """Return the query for the publications' entries on a server of this version."""
    found = _ENTRIES + (_SCHEMA_ENTRIES if version_num >= _SCHEMAS_SINCE else "")
    return _EXCEPTED.replace("ENTRIES", found) if version_num >= _EXCEPT_SINCE else found


async def entry_rows(conn: Connection, query: LiteralString, params: Sequence[object]) -> list[tuple[Any, ...]]:
    """Run a query that reads the publications' entries; they are its first parameter."""
    found = entries(conn.info.server_version)
    return await read_rows(conn, f"WITH RECURSIVE entries AS MATERIALIZED ({found}) {query}", params)
