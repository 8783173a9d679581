"""SQL expressions that replace columns of the publisher's rows (`replace` in [mapping]), as the target judges them.

In: the text of an expression, and the relation that it reads. Out: the expression as the target prints it, with the
columns that it reads; or a refusal. An index on an empty temporary table is the judge: PostgreSQL makes it of exactly
one expression of the table's own columns, without subquery, aggregate, window or set-returning function, in which every
function is IMMUTABLE. A view comes first, because it runs nothing: to make the index would run a function of constants,
which may be of an owner who may not become the role that applies.

Source: PostgreSQL manual, "CREATE INDEX", "pg_depend"; `indexcmds.c`, ComputeIndexAttrs.
"""

# ruff: noqa: S608 - this module makes SQL: names are quoted, and the expression is the operator's own SQL
from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from parapply.errors import TargetRefused
from parapply.plan.table import Input, Replacement
from parapply.quoting import identifier
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.model import Relation
    from parapply.target.session.settings import Connection

_TYPES: Final = sql.SQL(
    "SELECT t.oid::bigint, pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(t.typname), t.typlen > 0"
    " FROM pg_catalog.pg_type AS t JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace"
    " WHERE t.oid = ANY ($1::oid[]) AND t.oid < 16384"
)
#: Objects that the view depends on, besides its table, that are not the server's own, and whether they may be there.
_OTHERS: Final = sql.SQL("""
SELECT pg_catalog.pg_describe_object(d.refclassid, d.refobjid, 0),
       d.refclassid = 'pg_catalog.pg_collation'::regclass
         OR coalesce(pg_catalog.pg_has_role(p.proowner, current_user, 'MEMBER'), false)
  FROM pg_catalog.pg_rewrite AS r
  JOIN pg_catalog.pg_depend AS d ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = r.oid
  LEFT JOIN pg_catalog.pg_operator AS o ON d.refclassid = 'pg_catalog.pg_operator'::regclass AND o.oid = d.refobjid
  LEFT JOIN pg_catalog.pg_proc AS p
    ON p.oid = CASE d.refclassid WHEN 'pg_catalog.pg_proc'::regclass THEN d.refobjid ELSE o.oprcode END
 WHERE r.ev_class = $1::regclass AND d.refobjid NOT IN ($1::regclass, $2::regclass)
  ORDER BY 2, 1""")
_JUDGED: Final = sql.SQL("""
SELECT pg_catalog.pg_get_indexdef(i.indexrelid, 1, false), i.indnatts = 1 AND i.indpred IS NULL,
  ARRAY(SELECT DISTINCT a.attname::text FROM pg_catalog.pg_depend AS d
          JOIN pg_catalog.pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
         WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = i.indexrelid
           AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = i.indrelid AND d.refobjsubid > 0
         ORDER BY 1)
  FROM pg_catalog.pg_index AS i WHERE i.indexrelid = $1::regclass""")
_COLUMN: Final = sql.SQL(
    "SELECT pg_catalog.format_type(a.atttypid, a.atttypmod), pg_catalog.format_type(a.atttypid, -1),"
    " a.atttypid::bigint < 16384"
    " FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid"
    " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2"
    " AND a.attname = $3 AND a.attnum > 0 AND NOT a.attisdropped"
)
_HINT: Final = (
    "correct `replace` in [mapping]: one expression of published columns of built-in types, with IMMUTABLE functions,"
    " whose schema is written unless it is pg_catalog"
)


async def judge(
    conn: Connection, relation: Relation, target: tuple[str, str], texts: Mapping[str, str]
) -> dict[str, Replacement]:
    """Return the expressions of a relation's columns, by column, if all of them can be kept.

    Args:
        conn: in no transaction; nothing is left of what is made here.
        relation: that they read, as announced.
        target: schema and name of its table here.
        texts: of the expressions by column.

    Raises:
        TargetRefused: one is no such expression, or reads what its value cannot be known from, or runs code of an owner
            who may not become the role that applies; or no temporary table may be made.
    """
    found: dict[str, Replacement] = {}
    if not texts:
        return found
    sent = {column.name: column.type_oid for column in relation.columns}
    with target_errors(f"judging `replace` of {relation.qualified_name}"):
        async with conn.transaction(force_rollback=True):
            await rows(conn, sql.SQL("SET TRANSACTION READ WRITE"))  # `check` only reads, and takes this back
            types = {oid: rest for oid, *rest in await rows(conn, _TYPES, [sorted(set(sent.values()))])}
            inputs = {
                name: Input(name=name, type_sql=types[oid][0])
                for name, oid in sent.items() if oid in types
            }  # fmt: skip
            # A name that no text can have: so none reads the row as a whole.
            table = f"parapply_{secrets.token_hex(16)}"
            columns = ", ".join([f"{identifier(one.name)} {one.type_sql}" for one in inputs.values()])
            await rows(conn, sql.SQL(f"CREATE TEMPORARY TABLE pg_temp.{table} ({columns})"))
            for name, text in texts.items():
                if name not in sent:
                    # It may have another name now, under which its values would come as they are.
                    raise _refused(relation, name, "the column is not published")
                printed, read, is_system = await _judge(conn, relation, table, name, text)
                if len(read) > 1 and (large := [one for one in read if not types[sent[one]][1]]):
                    why = f'it reads several columns, and "{large[0]}" is not always sent: its type has large values'
                    raise _refused(relation, name, why)
                type_sql, base_sql = await _type_of(conn, relation, target, name)
                found[name] = Replacement(
                    name=name, sql=printed, is_system=is_system, inputs=tuple([inputs[one] for one in read]),
                    type_sql=type_sql, base_sql=base_sql,
                )  # fmt: skip
                nulls = [f"NULL::{one.type_sql}" for one in found[name].inputs]
                await rows(conn, sql.SQL(f"SELECT {found[name].of(nulls)}::{type_sql} WHERE false"))
    return found


async def _judge(conn: Connection, relation: Relation, table: str, name: str, text: str) -> tuple[str, list[str], bool]:
    """Return an expression as the server prints it, the columns that it reads, and whether it has no users' code."""
    view, index = (f"{table}_{secrets.token_hex(4)}" for _ in "vi")
    # Behind a line's end, where a comment ends.
    selected = f"SELECT ({text}\n) FROM pg_temp.{table}"
    await _one(conn, relation, name, f"CREATE TEMPORARY VIEW {view} (replaced) AS {selected}")
    others = await rows(conn, _OTHERS, [f"pg_temp.{view}", f"pg_temp.{table}"])
    if others and not others[0][1]:
        raise _refused(relation, name, f"it uses {others[0][0]}, which is not the server's own or of a trusted owner")
    await _one(conn, relation, name, f"CREATE INDEX {index} ON pg_temp.{table} ((({text}\n)))")
    ((printed, is_one, read),) = await rows(conn, _JUDGED, [f"pg_temp.{index}"])
    if not is_one:
        raise _refused(relation, name, "it is not one expression")
    return printed, read, not others


async def _one(conn: Connection, relation: Relation, name: str, statement: str) -> None:
    """Run one statement with an expression in it; by the protocol that takes no second one behind a semicolon."""
    try:
        async with psycopg.AsyncRawCursor(conn) as cursor:
            await cursor.execute(statement.encode(), binary=True)
    except (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError) as error:
        raise _refused(relation, name, error.diag.message_primary or str(error)) from error


async def _type_of(conn: Connection, relation: Relation, target: tuple[str, str], name: str) -> tuple[str, str]:
    found = await rows(conn, _COLUMN, [*target, name])
    if not found:
        raise _refused(relation, name, f"target table {'.'.join(target)} has no such column")
    ((type_sql, base_sql, is_built_in),) = found
    if not is_built_in:
        raise _refused(relation, name, f"its type on the target is {type_sql}, which is not built in")
    return str(type_sql), str(base_sql)


def _refused(relation: Relation, name: str, why: str) -> TargetRefused:
    return TargetRefused(f'`replace` of column "{name}" of {relation.qualified_name} cannot be kept: {why}', hint=_HINT)
