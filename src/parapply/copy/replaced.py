"""Rows of tables in which expressions replace columns: judged by the target, copied through a temporary table there.

So one server evaluates the expressions of rows that are copied and of rows that are applied. The temporary table has
the target's types for what is kept, and the publisher's for what the expressions read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply.copy.parts import column_list, condition, with_constants
from parapply.driver import values_hidden
from parapply.errors import TargetRefused
from parapply.model import Column, Relation
from parapply.target.catalogue.expressions import judge
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.copy.parts import Part
    from parapply.copy.published import PublishedTable
    from parapply.target.session.settings import Connection

_STAGE: Final = sql.Identifier("pg_temp", "parapply_stage")
#: Copies into the temporary table.
STAGE_IN: Final = sql.SQL("COPY {} FROM STDIN").format(_STAGE)
_RULES: Final = sql.SQL(
    "SELECT rulename::text FROM pg_catalog.pg_rewrite WHERE ev_class = $1::text::regclass AND ev_type = '3' ORDER BY 1"
)


async def judged(conn: Connection, tables: Sequence[PublishedTable]) -> list[PublishedTable]:
    """Return tables with their expressions as the target has judged them; raise TargetRefused if one cannot be kept."""
    found = []
    for table in tables:
        if table.replaced:
            relation = Relation(
                oid=table.oid, schema=table.schema, name=table.name, replica_identity="d",
                columns=tuple([
                    Column(name=name, type_oid=oid, type_modifier=modifier, is_key=name in table.key)
                    for name, oid, modifier in zip(table.columns, table.types, table.modifiers, strict=True)
                ]),
            )  # fmt: skip
            by_name = await judge(conn, relation, table.here().full_name, table.replaced)
            table = msgspec.structs.replace(table, replacements=tuple(by_name.values()))  # noqa: PLW2901
        found.append(table)
    return found


def staged_out(table: PublishedTable, part: Part) -> sql.Composed:
    """Return the COPY that sends a part's rows without replaced columns, then what the expressions read."""
    columns = [sql.Identifier(name) for name in _kept(table.columns, table)]
    read = [sql.Identifier(each.name) for one in table.replacements for each in one.inputs]
    return sql.SQL("COPY (SELECT {} FROM ONLY {}{}) TO STDOUT").format(
        sql.SQL(", ").join([with_constants(columns, table), *read]),
        sql.Identifier(part.schema, part.name),
        condition(part, table.row_filter),
    )


async def make_stage(conn: Connection, table: PublishedTable) -> None:
    """Make the temporary table, until the end of the transaction."""
    kept = [sql.Identifier(name) for name in _kept(table.filled, table)]
    names = [sql.SQL("{} AS {}").format(name, sql.Identifier(f"k{at}")) for at, name in enumerate(kept)]
    read = [each.type_sql for one in table.replacements for each in one.inputs]
    with target_errors(f"making the temporary table of {table.text}"):
        query = "CREATE TEMPORARY TABLE {} ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA"
        here = sql.Identifier(*table.here().full_name)
        await rows(conn, sql.SQL(query).format(_STAGE, sql.SQL(", ").join(names), here))
        added = [sql.SQL("ADD {} {}").format(sql.Identifier(f"i{at}"), sql.SQL(of)) for at, of in enumerate(read)]
        if added:
            await rows(conn, sql.SQL("ALTER TABLE {} {}").format(_STAGE, sql.SQL(", ").join(added)))


async def insert_staged(conn: Connection, table: PublishedTable, n_rows: int) -> None:
    """Insert the rows of the temporary table, of which `n_rows` were copied there, with the values of the expressions.

    Raises:
        TargetRefused, TargetLost: a row does not fit, a rule takes rows, or the connection broke.
    """
    kept = _kept(table.filled, table)
    values: list[sql.Composable] = [sql.SQL("v.{}").format(sql.Identifier(f"k{at}")) for at in range(len(kept))]
    n_read = 0
    for one in table.replacements:
        read = [f'v."i{n_read + at}"' for at in range(len(one.inputs))]
        values.append(sql.SQL(f"{one.of(read)}::{one.base_sql}"))
        n_read += len(read)
    names = column_list([*kept, *[one.name for one in table.replacements]])
    query = sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {} AS v")
    here = sql.Identifier(*table.here().full_name)
    with target_errors(f"copying into {table.text}"), values_hidden(when=True):
        cursor = await conn.execute(query.format(here, names, sql.SQL(", ").join(values), _STAGE))
        if cursor.rowcount == n_rows:
            return
        # A trigger may leave rows out, here as in the stream. COPY knows no rules.
        if rules := [name for (name,) in await rows(conn, _RULES, [here.as_string(None)])]:
            raise TargetRefused(
                f"target: of {n_rows:,} rows copied into {table.text} {cursor.rowcount:,} came there, because it has"
                f" rules on INSERT: {', '.join(rules)}",
                hint="drop the rules, and run the same command again",
            )


def _kept(columns: Sequence[str], table: PublishedTable) -> list[str]:
    return [name for name in columns if name not in table.replaced]
