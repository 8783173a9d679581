"""Published tables: the rows and columns that the publications send, and the size of them.

In: a plain session on the publisher. Out: `PublishedTable`, as the stream names it: with publish_via_partition_root the
root represents its partitions. Row filters and column lists are the same as in the stream.

Source: PostgreSQL manual, "pg_publication_tables", "CREATE PUBLICATION"; `tablesync.c`, fetch_remote_table_info, for
how several publications of one table go together.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psycopg
from psycopg import sql

from parapply.config_mapping import are_apart
from parapply.errors import SourceRefused, TargetRefused
from parapply.plan.table import Replacement
from parapply.sharing import of_other_partitions
from parapply.source import late_tables
from parapply.source.slot import read_rows, source_errors
from parapply.state_mark import STATE_SCHEMAS_SQL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import LiteralString

    from parapply.config_mapping import MappingConfig
    from parapply.plan.copy_starts import Name
    from parapply.source.slot import Connection

#: server_version_num of the first server that publishes generated columns, and then lists only those it does.
_GENERATED_SINCE = 180000


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
    found = await read_rows(conn, query, [list(oids)])
    leaves: dict[int, list[Leaf]] = {oid: [] for oid in oids}
    for root, schema, name, pages, has_ranges, n_rows, analysed_pages in found:
        leaf = Leaf(
            schema=schema,
            name=name,
            pages=pages,
            has_ranges=has_ranges,
            # The table has grown since it was last analysed, as a rule.
            estimated_rows=int(n_rows * pages / analysed_pages) if analysed_pages else 0,
        )
        leaves[root].append(leaf)
    return leaves


async def rewritten(conn: psycopg.AsyncConnection[tuple[Any, ...]], relations: Sequence[Name]) -> list[str]:
    """Return the relations whose file is another one than in the session's snapshot, or whose name means another.

    A table that was rewritten or emptied is empty for a snapshot from before, or its rows are in other pages
    (PostgreSQL manual, "Caveats" of MVCC). From the reading on a lock keeps its file.

    Raises:
        psycopg.Error: the caller turns it into an error of ours.
    """
    # A foreign table has no file: NULL.
    query: LiteralString = """
        SELECT w.schema_name || '.' || w.relation_name
          FROM unnest($1::text[], $2::text[], $3::text[]) AS w(schema_name, relation_name, quoted)
          LEFT JOIN (pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace)
            ON n.nspname = w.schema_name AND c.relname = w.relation_name
         WHERE c.oid IS NULL OR (c.relfilenode = pg_catalog.pg_relation_filenode(c.oid)
                                 AND c.oid = pg_catalog.to_regclass(w.quoted)) IS FALSE
         ORDER BY 1"""
    quoted = [sql.Identifier(*name).as_string(None) for name in relations]
    found = await read_rows(conn, query, [[schema for schema, _ in relations], [name for _, name in relations], quoted])
    return [str(text) for (text,) in found]


class PublishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """One published table."""

    oid: int
    schema: str
    name: str
    columns: tuple[str, ...]  # that are sent, in the table's order
    types: tuple[int, ...]  # OIDs of the columns' types on the publisher
    modifiers: tuple[int, ...]  # of these types: length, precision and scale; -1: none
    row_filter: str  # SQL expression over them; empty: all rows
    key: tuple[str, ...]  # columns of the replica identity, or of the primary key; empty without one
    leaves: tuple[Leaf, ...]
    target: tuple[str, str] | None = None  # schema and table on the target where they are others
    constants: dict[str, str] = {}  # columns of the target's table with their values in all rows of this one
    left_out: tuple[str, ...] = ()  # columns with values of their own that are not published
    omitted: tuple[str, ...] = ()  # columns that are published, and that `columns` are without
    has_generated: bool = False  # some of `columns` are generated on the publisher
    replaced: dict[str, str] = {}  # of `columns`, with the SQL expression whose value the target's rows get instead
    replacements: tuple[Replacement, ...] = ()  # these expressions, once the target has judged them

    def __hash__(self) -> int:
        """Return a hash of the name, because a dict has none."""
        return hash(self.full_name)

    def here(self) -> PublishedTable:
        """Return it by its name on the target."""
        if self.target is None:
            return self
        return msgspec.structs.replace(self, schema=self.target[0], name=self.target[1], target=None)

    @property
    def filled(self) -> tuple[str, ...]:
        """Return the columns of the target's table that get values."""
        return (*self.columns, *self.constants)

    @property
    def values(self) -> list[sql.Composable]:
        """Return the SQL of the columns' values on the publisher, as the target's rows are to have them."""
        by_name = {one.name: one for one in self.replacements}
        return [_value(by_name[name]) if name in by_name else sql.Identifier(name) for name in self.columns]

    @property
    def shown(self) -> str:
        """Return ``schema.name`` for people, and the name on the target where it is another one."""
        return self.text if self.target is None else f"{self.text} ({'.'.join(self.target)} on the target)"

    @property
    def full_name(self) -> Name:
        """Return schema and name."""
        return self.schema, self.name

    @property
    def text(self) -> str:
        """Return ``schema.name`` for people, never for SQL."""
        return f"{self.schema}.{self.name}"


def named(tables: Sequence[PublishedTable], texts: Sequence[str], hint: str) -> list[PublishedTable]:
    """Return published tables by ``schema.table``, each once.

    Raises:
        SourceRefused: one is not published, or two have this text.
    """
    found = []
    for text in dict.fromkeys(texts):
        some = [table for table in tables if table.text == text]
        if len(some) > 1:
            shown = " and ".join([sql.Identifier(*table.full_name).as_string(None) for table in some])
            raise SourceRefused(f"{text} may be each of {shown}", hint="rename one, or leave out the option")
        found += some
    if missing := sorted(set(texts) - {table.text for table in found}):
        raise SourceRefused(f"not published: {', '.join(missing)}", hint=hint)
    return found


def _value(one: Replacement) -> sql.Composable:
    names = [sql.Identifier(each.name).as_string(None) for each in one.inputs]
    return sql.SQL(f"{one.of(names)}::{one.type_sql}")


async def published_tables(
    conn: Connection, publications: Sequence[str], mapping: MappingConfig
) -> list[PublishedTable]:
    """Return the tables of the publications whose rows are wanted, by name.

    Without the tables of a parapply that applies there, and without `schema_only_tables`.

    Raise TargetRefused if two of them lead to one table of the target, or as `of_other_partitions`; SourceRefused if
    publications of one table list different columns, which the stream also refuses; or if `omit` names a column that is
    not published, or one of the key.
    """
    found = await _read(conn, publications)
    tables = [table for table in found if not mapping.is_schema_only(table.full_name)]
    relatives = await late_tables.relatives(conn, mapping.withholding)
    for error in of_other_partitions(mapping, {table.full_name: table.oid for table in tables}, relatives).values():
        raise error
    return _mapped(tables, mapping)


async def schema_only_tables(
    conn: Connection, publications: Sequence[str], mapping: MappingConfig
) -> list[PublishedTable]:
    """Return the published tables whose rows are left out, by name; errors as `published_tables`."""
    if not mapping.schema_only:
        return []
    return [table for table in await _read(conn, publications) if mapping.is_schema_only(table.full_name)]


async def _read(conn: Connection, publications: Sequence[str]) -> list[PublishedTable]:
    # As jsonb, because a server of version 14 has neither column lists nor row filters. Partitions whose root is
    # published as one are dropped, because with several publications both can be listed.
    query: LiteralString = f"""
        WITH listed AS (
            SELECT c.oid, p.schemaname, p.tablename, to_jsonb(p) -> 'attnames' AS attnames,
                   to_jsonb(p) ->> 'rowfilter' AS rowfilter
              FROM pg_catalog.pg_publication_tables AS p
              JOIN pg_catalog.pg_namespace AS n ON n.nspname = p.schemaname
              JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = p.tablename
             WHERE p.pubname = ANY ($1::text[])
               AND p.schemaname NOT IN (SELECT schema_name FROM {STATE_SCHEMAS_SQL} AS own))
        SELECT l.oid::bigint, l.schemaname, l.tablename, array_agg(DISTINCT l.attnames), array_agg(l.rowfilter)
          FROM listed AS l
         WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_partition_ancestors(l.oid::regclass) AS a(relid)
                           JOIN listed AS o ON o.oid = a.relid WHERE a.relid <> l.oid)
         GROUP BY 1, 2, 3 ORDER BY 2, 3"""  # noqa: S608 - a constant
    with source_errors("reading the published tables"):
        found = await read_rows(conn, query, [list(publications)])
        oids = [oid for oid, *_ in found]
        columns, keys, leaves = await _columns(conn, oids), await _keys(conn, oids), await leaves_of(conn, oids)
    is_exact = conn.info.server_version >= _GENERATED_SINCE
    return [_table(row, columns[row[0]], keys.get(row[0], ()), leaves[row[0]], is_exact=is_exact) for row in found]


def _mapped(tables: Sequence[PublishedTable], mapping: MappingConfig) -> list[PublishedTable]:
    found: dict[Name, list[PublishedTable]] = {}
    placed = []
    for table in tables:
        here = mapping.target_of(table.full_name)
        own = msgspec.structs.replace(
            without(table, mapping.omitted_of(table.full_name)),
            target=None if here == table.full_name else here,
            constants=dict(mapping.constants_of(table.full_name)),
            replaced=dict(mapping.replaced_of(table.full_name)),
        )
        others = found.setdefault(here, [])
        if met := [other for other in others if not are_apart([other.constants, own.constants])]:
            raise TargetRefused(
                f"{met[0].text} and {table.text} are both published and lead to target table {'.'.join(here)}",
                hint="correct [mapping], where `set` gives each its own values",
            )
        others.append(own)
        placed.append(own)
    return placed


def without(table: PublishedTable, omitted: Sequence[str]) -> PublishedTable:
    """Return a table without columns that the target's rows do not get, or that are not compared.

    Raises:
        SourceRefused: one is not published, or is of the key.
    """
    if not omitted:
        return table
    unknown = [name for name in omitted if name not in table.columns]
    of_key = [name for name in omitted if name in table.key]
    if unknown or of_key:
        words = "publishes no such column" if unknown else "has it in its key"
        raise SourceRefused(
            f'source: `omit` names column "{(unknown or of_key)[0]}", and {table.text} {words}',
            hint="correct `omit` in [mapping]",
        )
    left = [at for at, name in enumerate(table.columns) if name not in omitted]
    return msgspec.structs.replace(
        table,
        columns=tuple([table.columns[at] for at in left]),
        types=tuple([table.types[at] for at in left]),
        modifiers=tuple([table.modifiers[at] for at in left]),
        omitted=(*table.omitted, *omitted),
    )


async def check_readable(conn: Connection, tables: Sequence[PublishedTable]) -> None:
    """Refuse tables that the role may not read, all of them in one message; errors as `unreadable`.

    Raises:
        SourceRefused: there are some.
    """
    if found := await unreadable(conn, tables):
        names = [f"{'.'.join(name)}{' (its row-level security applies)' if found[name] else ''}" for name in found]
        raise SourceRefused(
            f"source: the role may not read {', '.join(names)}",
            hint="GRANT SELECT on them, USAGE on their schemas to the source's role: config/roles/publisher.sql does;"
            " and BYPASSRLS where row-level security applies",
        )


async def unreadable(conn: Connection, tables: Sequence[PublishedTable]) -> dict[Name, bool]:
    """Return tables and partitions of which the role may not read all rows and columns that are sent.

    Each with whether row-level security hides rows. Raise SourceLost if the connection broke.
    """
    query: LiteralString = """
        SELECT w.schema_name, w.table_name, pg_catalog.bool_or(pg_catalog.row_security_active(c.oid))
          FROM unnest($1::text[], $2::text[], $3::jsonb[]) AS w(schema_name, table_name, sent)
          JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name
          JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name
         WHERE NOT (has_schema_privilege(n.oid, 'USAGE') AND has_any_column_privilege(c.oid, 'SELECT')
                    AND (has_table_privilege(c.oid, 'SELECT') OR NOT EXISTS (
                         SELECT FROM pg_catalog.jsonb_array_elements_text(w.sent) AS name
                          WHERE NOT has_column_privilege(c.oid, name, 'SELECT'))))
            OR pg_catalog.row_security_active(c.oid) GROUP BY 1, 2 ORDER BY 1, 2"""
    leaves = [(leaf.schema, leaf.name, json.dumps(table.columns)) for table in tables for leaf in table.leaves]
    with source_errors("looking whether the published tables may be read"):
        found = await read_rows(conn, query, [[leaf[at] for leaf in leaves] for at in range(3)])
    return {(schema, name): is_hidden for schema, name, is_hidden in found}


class _Column(NamedTuple):
    name: str
    type_oid: int
    type_modifier: int
    is_stored: bool  # not generated


def _table(
    row: tuple[Any, ...], columns: Sequence[_Column], key: tuple[str, ...], leaves: Sequence[Leaf], *, is_exact: bool
) -> PublishedTable:
    """Put together the facts of a table; `is_exact`: a column list names all generated columns sent."""
    oid, schema, name, lists, filters = row
    if len(lists) > 1:
        raise SourceRefused(
            f"source: publications list different columns of {schema}.{name}",
            hint="give them the same column list; the stream cannot be read otherwise",
        )
    listed = lists[0]
    sent = [
        column
        for column in columns
        if (listed is None or column.name in listed) and (column.is_stored or (is_exact and listed is not None))
    ]
    names = tuple(column.name for column in sent)
    return PublishedTable(
        oid=oid,
        schema=schema,
        name=name,
        columns=names,
        types=tuple(column.type_oid for column in sent),
        modifiers=tuple(column.type_modifier for column in sent),
        row_filter="" if None in filters else " OR ".join(f"({one})" for one in dict.fromkeys(filters) if one),
        key=key if set(key) <= set(names) else (),
        leaves=tuple(leaves),
        left_out=tuple(column.name for column in columns if column.is_stored and column not in sent),
        has_generated=not all(column.is_stored for column in sent),
    )


async def _columns(conn: Connection, oids: Sequence[int]) -> dict[int, list[_Column]]:
    query: LiteralString = """
        SELECT attrelid::bigint, attname, atttypid::bigint, atttypmod, attgenerated = '' FROM pg_catalog.pg_attribute
         WHERE attrelid = ANY ($1::oid[]) AND attnum > 0 AND NOT attisdropped ORDER BY attrelid, attnum"""
    columns: dict[int, list[_Column]] = {oid: [] for oid in oids}
    for oid, *column in await read_rows(conn, query, [list(oids)]):
        columns[oid].append(_Column(*column))
    return columns


async def _keys(conn: Connection, oids: Sequence[int]) -> dict[int, tuple[str, ...]]:
    query: LiteralString = """
        SELECT DISTINCT ON (i.indrelid) i.indrelid::bigint, array_agg(a.attname::text ORDER BY k.n)
          FROM pg_catalog.pg_index AS i
          CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, n)
          JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
         WHERE i.indrelid = ANY ($1::oid[]) AND i.indisvalid AND k.n <= i.indnkeyatts
           AND (i.indisreplident OR i.indisprimary)
         GROUP BY i.indrelid, i.indexrelid, i.indisreplident ORDER BY i.indrelid, i.indisreplident DESC"""
    return {oid: tuple(names) for oid, names in await read_rows(conn, query, [list(oids)])}
