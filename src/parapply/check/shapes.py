"""Tables as either end describes them, in one text form that can be compared: columns, constraints, unique indexes.

These are facts that `target/catalogue/facts.py` does not need for applying. Both ends are asked the same, because a
fact that the publisher shares is no finding. One query for all tables. Types, collations and definitions are
printed with their schema, because the sessions of both ends have a search path without one.

Source: PostgreSQL manual, "System Catalogs": pg_attribute, pg_constraint, pg_index, pg_collation, pg_enum;
"System Catalog Information Functions" (format_type, pg_get_constraintdef, pg_get_indexdef).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from parapply.source.slot import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from parapply.plan.copy_starts import Name

_WANTED: Final = """
wanted AS (
  SELECT w.n, c.oid, c.relpersistence
  FROM unnest($1::name[], $2::name[]) WITH ORDINALITY AS w(schema_name, table_name, n)
  JOIN pg_catalog.pg_namespace s ON s.nspname = w.schema_name
  JOIN pg_catalog.pg_class c ON c.relnamespace = s.oid AND c.relname = w.table_name AND c.relkind IN ('r', 'p')
)"""

# The collation of a column only where it is not its type's.
_SHAPES: Final = f"""
WITH {_WANTED}
SELECT w.n, w.relpersistence = 'u',
  (SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
     'name', a.attname, 'type', pg_catalog.format_type(a.atttypid, a.atttypmod),
     'is_not_null', a.attnotnull, 'is_generated', a.attgenerated <> '', 'is_identity_always', a.attidentity = 'a',
     'is_filled', a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL,
     'collation', CASE WHEN a.attcollation <> t.typcollation THEN
       pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(co.collname) ELSE '' END,
     'collation_version', coalesce(co.collversion, ''),
     'actual_collation_version', CASE WHEN co.collversion IS NULL THEN ''
       ELSE coalesce(pg_catalog.pg_collation_actual_version(co.oid), '') END) ORDER BY a.attnum), '[]')
   FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
   LEFT JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation
   LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace
   WHERE a.attrelid = w.oid AND a.attnum > 0 AND NOT a.attisdropped),
  (SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
     'constraint', k.conname, 'index', '', 'kind', k.contype,
     'definition', pg_catalog.pg_get_constraintdef(k.oid)) ORDER BY k.conname), '[]')
   FROM pg_catalog.pg_constraint k WHERE k.conrelid = w.oid AND k.contype IN ('c', 'x', 'f')),
  (SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
     'constraint', (SELECT coalesce(pg_catalog.min(k.conname::text), '') FROM pg_catalog.pg_constraint k
       WHERE k.conindid = i.indexrelid AND k.conrelid = i.indrelid),
     'index', i.indexrelid::pg_catalog.regclass::text, 'kind', 'u',
     'definition', pg_catalog.regexp_replace(pg_catalog.pg_get_indexdef(i.indexrelid), '^.*? USING ', ''))
     ORDER BY i.indexrelid::pg_catalog.regclass::text), '[]')
   FROM pg_catalog.pg_index i WHERE i.indrelid = w.oid AND i.indisunique AND NOT i.indisexclusion AND i.indislive)
FROM wanted w"""  # noqa: S608 - only the constant above is put in

# Types of the tables' columns that are not built in, with what they are made of.
_TYPES: Final = f"""
WITH RECURSIVE {_WANTED}, part(typid) AS (
  SELECT DISTINCT a.atttypid FROM wanted w JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid
  WHERE a.attnum > 0 AND NOT a.attisdropped
  UNION
  SELECT x.typid FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.typid
  CROSS JOIN LATERAL (VALUES (t.typelem), (t.typbasetype)) AS x(typid) WHERE x.typid <> 0
)
SELECT pg_catalog.format_type(p.typid, NULL),
  ARRAY(SELECT e.enumlabel::text FROM pg_catalog.pg_enum e WHERE e.enumtypid = p.typid ORDER BY e.enumsortorder),
  coalesce(x.extname::text, ''), coalesce(x.extversion, '')
FROM part p
LEFT JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_type'::pg_catalog.regclass AND d.objid = p.typid
  AND d.deptype = 'e'
LEFT JOIN pg_catalog.pg_extension x ON x.oid = d.refobjid
WHERE p.typid >= 16384"""  # noqa: S608 - only the constant above is put in


class ColumnShape(msgspec.Struct, frozen=True, kw_only=True):
    """One column."""

    name: str
    type: str
    is_not_null: bool
    is_generated: bool
    is_identity_always: bool
    is_filled: bool  # a default or identity gives it a value when an INSERT gives none
    collation: str  # quoted schema.name; empty: the type's own
    collation_version: str
    actual_collation_version: str


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint or unique index that can refuse rows."""

    constraint: str  # its name; empty: an index without one
    index: str  # quoted schema.name of a unique index; empty: none
    kind: str  # c: check, x: exclusion, f: foreign key, u: unique index
    definition: str  # without its name


class TableShape(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    is_unlogged: bool
    columns: dict[str, ColumnShape]  # by name, in the table's order
    rules: tuple[Rule, ...]


class UserType(msgspec.Struct, frozen=True, kw_only=True):
    """A type that is not built in."""

    labels: tuple[str, ...]  # of an enum, in their order
    extension: str  # that made it; empty: none
    extension_version: str


async def read_shapes(conn: psycopg.AsyncConnection[Any], names: Sequence[Name]) -> dict[Name, TableShape]:
    """Return the existing tables, by schema and name.

    Raises:
        psycopg.Error: the caller turns it into an error of ours.
    """
    shapes = {}
    for number, is_unlogged, columns, constraints, unique in await read_rows(conn, _SHAPES, _lists(names)):
        shapes[names[number - 1]] = TableShape(
            is_unlogged=is_unlogged,
            columns={column["name"]: ColumnShape(**column) for column in columns},
            rules=tuple(Rule(**rule) for rule in (*constraints, *unique)),
        )
    return shapes


async def read_types(conn: psycopg.AsyncConnection[Any], names: Sequence[Name]) -> dict[str, UserType]:
    """Return the types of the tables' columns that are not built in, by what format_type prints.

    Raises:
        psycopg.Error: the caller turns it into an error of ours.
    """
    return {
        name: UserType(labels=tuple(labels), extension=extension, extension_version=version)
        for name, labels, extension, version in await read_rows(conn, _TYPES, _lists(names))
    }


def _lists(names: Sequence[Name]) -> list[list[str]]:
    return [[schema for schema, _ in names], [table for _, table in names]]
