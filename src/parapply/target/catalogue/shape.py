"""Shapes of target tables: texts that are equal where the catalogue says the same of two tables but for their names.

Where each tenant has a schema, thousands of tables have few shapes, and the facts of one serve for all of its shape.
Pure text.

A shape holds all that `target/catalogue/query.py` reads about a plain table, with types, functions and operator classes
by their OIDs. A table has none if the query would read or name other objects of its own: partitions, triggers, rules,
foreign keys, extended statistics, expressions of indexes. A default that calls a sequence has the sequence's OID in it.

Source: PostgreSQL manual, "System Catalogs".
"""

# ruff: noqa: S608 - only the constants here are put in
from __future__ import annotations

from typing import Final

from parapply.state_mark import STATE_SCHEMAS_SQL

# A plain table of no parts; `w` has its schema.
_PLAIN: Final = f"""c.relkind = 'r' AND NOT c.relispartition AND c.relpersistence = 'p'
    AND w.schema_name NOT IN (SELECT own.schema_name FROM {STATE_SCHEMAS_SQL} AS own)
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid)
    AND NOT EXISTS (
      SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND (NOT t.tgisinternal OR t.tgparentid <> 0))
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'f')
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_statistic_ext x WHERE x.stxrelid = c.oid)
    AND NOT EXISTS (
      SELECT FROM pg_catalog.pg_index i
      WHERE i.indrelid = c.oid AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL))"""

# Parts of a table's shape, each with the catalogue's rows and the column that has the table's OID.
_COLUMNS: Final = (
    """pg_catalog.string_agg(pg_catalog.concat_ws(' ', a.attnum, pg_catalog.quote_literal(a.attname), a.atttypid,
     a.atttypmod, a.attcollation, a.attidentity, a.attgenerated), ', ' ORDER BY a.attnum)""",
    "pg_catalog.pg_attribute a WHERE a.attnum > 0 AND NOT a.attisdropped",
    "a.attrelid",
)
_DEFAULTS: Final = (
    """pg_catalog.string_agg(pg_catalog.concat_ws(' ', d.adnum, pg_catalog.quote_literal(d.adbin::text)), ', '
     ORDER BY d.adnum)""",
    "pg_catalog.pg_attrdef d WHERE true",
    "d.adrelid",
)
_CHECKS: Final = (
    """pg_catalog.string_agg(pg_catalog.concat_ws(' ', pg_catalog.quote_literal(k.conname),
     pg_catalog.quote_literal(k.conbin::text)), ', ' ORDER BY k.conname)""",
    "pg_catalog.pg_constraint k WHERE k.contype = 'c'",
    "k.conrelid",
)
_INDEXES: Final = (
    # as JSON, so that a property of an index that a later version has counts as well
    """pg_catalog.string_agg(pg_catalog.concat_ws(' ', pg_catalog.quote_literal(c.relname), c.relam, c.relkind,
     pg_catalog.to_jsonb(i) - 'indexrelid' - 'indrelid'), ', ' ORDER BY c.relname)""",
    "pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid WHERE true",
    "i.indrelid",
)


def _of_all(said: str, rows: str, table: str) -> str:
    return f"SELECT {table} AS oid, {said} AS said FROM {rows} AND {table} IN (SELECT oid FROM asked) GROUP BY 1"


#: For thousands of tables: each catalogue is read once, with `JOINS`. Parameter: `$1` OIDs. A row for each table that
#: has a shape: its schema and name, its OID, its shape. The facts must be read with the same snapshot.
SHAPES_SQL: Final = f"""
WITH asked AS MATERIALIZED (
  SELECT w.schema_name, c.relname, c.oid, c.relowner, c.relreplident
  FROM (SELECT n.oid AS namespace, n.nspname AS schema_name FROM pg_catalog.pg_namespace n) AS w
  JOIN pg_catalog.pg_class c ON c.relnamespace = w.namespace
  WHERE c.oid IN (SELECT pg_catalog.unnest($1::oid[])) AND {_PLAIN}
)
SELECT asked.schema_name::text, asked.relname::text, asked.oid::int8,
  pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.concat_ws(' / ', asked.relowner, asked.relreplident,
    one.said, coalesce(two.said, ''), coalesce(three.said, ''), coalesce(four.said, '')), 'UTF8'))
FROM asked
LEFT JOIN ({_of_all(*_COLUMNS)}) AS one USING (oid)
LEFT JOIN ({_of_all(*_DEFAULTS)}) AS two USING (oid)
LEFT JOIN ({_of_all(*_CHECKS)}) AS three USING (oid)
LEFT JOIN ({_of_all(*_INDEXES)}) AS four USING (oid)
"""

#: For that. The planner does not know how many tables are asked for.
JOINS: Final = "SET LOCAL enable_nestloop = off; SET LOCAL jit = off"
