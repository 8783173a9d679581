"""Shapes of published tables: columns, types and indexes, as far as changes are applied by them.

In: a plain session on the publisher. Out: facts without any text of SQL, so that no file can hold a statement. All that
a stream does not need is left out: foreign keys, checks, defaults, triggers; and indexes on expressions or with a
condition, whose names are kept.

Source: PostgreSQL manual, "pg_attribute", "pg_index", "pg_type".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply.capture.blocks import CapturedColumn, CapturedIndex, CapturedTable, CapturedType, Shapes
from parapply.source.slot import read_rows, source_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import LiteralString

    from parapply.source.slot import Connection

#: Tables by OID, and those that publications have: what `tables_to_expect` of `source/slot.py` finds, by OID.
_TABLES: Final[LiteralString] = """
    SELECT c.oid::bigint, n.nspname, c.relname, c.relreplident::text,
           (SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(a.attname, a.atttypid::bigint, a.atttypmod,
                   a.attnotnull, (a.attmissingval::text::text[])[1]) ORDER BY a.attnum)
              FROM pg_catalog.pg_attribute AS a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
           (SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(i.relname, m.amname, x.indisunique,
                   x.indisprimary, x.indisreplident, x.indnkeyatts,
                   pg_catalog.to_jsonb(x) ->> 'indnullsnotdistinct' = 'true',
                   x.indpred IS NULL AND x.indexprs IS NULL,
                   (SELECT pg_catalog.jsonb_agg(a.attname ORDER BY k.place)
                      FROM pg_catalog.unnest(x.indkey::int2[]) WITH ORDINALITY AS k (number, place)
                      JOIN pg_catalog.pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.number))
                   ORDER BY i.relname)
              FROM pg_catalog.pg_index AS x JOIN pg_catalog.pg_class AS i ON i.oid = x.indexrelid
              JOIN pg_catalog.pg_am AS m ON m.oid = i.relam WHERE x.indrelid = c.oid AND x.indisvalid)
      FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
     WHERE c.oid = ANY ($1::oid[]) ORDER BY n.nspname, c.relname"""
_OIDS: Final[LiteralString] = """
    SELECT c.oid::bigint FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
      JOIN ROWS FROM (pg_catalog.unnest($1::text[]), pg_catalog.unnest($2::text[])) AS t (schema_name, table_name)
        ON t.schema_name = n.nspname AND t.table_name = c.relname"""
_TYPES: Final[LiteralString] = """
    WITH RECURSIVE needed (oid) AS (
        SELECT pg_catalog.unnest($1::oid[])
        UNION
        SELECT further.oid FROM needed JOIN pg_catalog.pg_type AS t ON t.oid = needed.oid
          CROSS JOIN LATERAL (VALUES (t.typbasetype), (CASE WHEN t.typcategory = 'A' THEN t.typelem ELSE 0 END))
            AS further (oid) WHERE further.oid <> 0)
    SELECT t.oid::bigint, n.nspname, t.typname, t.typtype::text, t.typbasetype::bigint, t.typtypmod,
           CASE WHEN t.typcategory = 'A' AND t.typname NOT IN ('int2vector', 'oidvector') THEN t.typelem::bigint
                ELSE 0 END,
           ARRAY(SELECT e.enumlabel::text FROM pg_catalog.pg_enum AS e WHERE e.enumtypid = t.oid
                  ORDER BY e.enumsortorder),
           COALESCE((SELECT e.extname FROM pg_catalog.pg_depend AS d JOIN pg_catalog.pg_extension AS e
                         ON e.oid = d.refobjid
                      WHERE d.classid = 'pg_catalog.pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e'
                        AND d.refclassid = 'pg_catalog.pg_extension'::regclass), '')
      FROM needed JOIN pg_catalog.pg_type AS t ON t.oid = needed.oid
      JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace ORDER BY t.oid"""
_SETTINGS: Final[LiteralString] = (
    "SELECT name, pg_catalog.current_setting(name) FROM pg_catalog.pg_settings WHERE name = ANY ($1::text[])"
)
#: Of the publisher, as far as they say what the stream was like; none is a secret.
_SETTING_NAMES: Final = (
    "autovacuum", "block_size", "checkpoint_timeout", "effective_io_concurrency", "fsync", "full_page_writes",
    "logical_decoding_work_mem", "max_connections", "max_prepared_transactions", "max_wal_size", "random_page_cost",
    "server_encoding", "server_version", "shared_buffers", "synchronous_commit", "track_commit_timestamp",
    "wal_buffers", "wal_compression", "wal_level", "wal_sender_timeout", "work_mem",
)  # fmt: skip


async def oids_of(conn: Connection, tables: Sequence[tuple[str, str]]) -> list[int]:
    """Return the OIDs of tables by schema and name; one that is gone has none."""
    found = await _rows(conn, _OIDS, [[schema for schema, _ in tables], [name for _, name in tables]])
    return [int(oid) for (oid,) in found]


async def shapes(conn: Connection, oids: Collection[int], more_types: Collection[int] = ()) -> Shapes:
    """Return the tables with these OIDs that exist, and all types that they need.

    `more_types` are those that a stream has named, and a table may have no more.
    """
    tables = tuple([_table(row) for row in await _rows(conn, _TABLES, [list(oids)])])
    needed = {column.type_oid for table in tables for column in table.columns} | set(more_types)
    types = [
        CapturedType(
            oid=oid, schema=schema, name=name, kind=kind, base=base, base_modifier=modifier, element=element,
            labels=tuple(labels), extension=extension,
        )
        for oid, schema, name, kind, base, modifier, element, labels, extension in await _rows(
            conn, _TYPES, [sorted(needed)]
        )
    ]  # fmt: skip
    return Shapes(tables=tables, types=tuple(types))


async def settings(conn: Connection) -> dict[str, str]:
    """Return settings of the publisher; errors as `oids_of`."""
    return {str(name): str(value) for name, value in await _rows(conn, _SETTINGS, [list(_SETTING_NAMES)])}


async def _rows(conn: Connection, query: LiteralString, params: Sequence[object]) -> list[tuple[Any, ...]]:
    with source_errors("reading the shapes of tables"):
        return await read_rows(conn, query, params)


def _table(row: tuple[Any, ...]) -> CapturedTable:
    oid, schema, name, identity, columns, indexes = row
    plain = [one for one in indexes or () if one[7]]
    return CapturedTable(
        oid=oid,
        schema=schema,
        name=name,
        identity=identity,
        columns=tuple([
            CapturedColumn(name=column, type_oid=type_oid, modifier=modifier, is_not_null=not_null, missing=missing)
            for column, type_oid, modifier, not_null, missing in columns or ()
        ]),
        indexes=tuple([
            CapturedIndex(
                name=index, columns=tuple(names), n_keys=n_keys, method=method, is_unique=is_unique,
                is_primary=is_primary, is_identity=is_identity, nulls_not_distinct=bool(nulls_not_distinct),
            )
            for index, method, is_unique, is_primary, is_identity, n_keys, nulls_not_distinct, _, names in plain
        ]),
        left_out=tuple([one[0] for one in indexes or () if not one[7]]),
    )  # fmt: skip
