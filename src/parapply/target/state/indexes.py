"""Indexes that a copy has dropped, made again: only the row of their table in `parapply.copies` knows of them.

In: a session on the target, a table there, the statements. Out: the indexes, each under its name.
Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from parapply.errors import TargetRefused
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection


def made_again(definition: str) -> str:
    """Return the statement to keep for an index; it does nothing if an index of its name exists."""
    return definition.replace(" INDEX ", " INDEX IF NOT EXISTS ", 1)


async def make(conn: Connection, name: Name, statements: Sequence[str]) -> list[str]:
    """Make the indexes that a table lacks, and return the statements whose table or column is gone.

    Those made before one that is refused stay.

    Raises:
        TargetRefused: one was not made.
    """
    there = await _there(conn, name)
    if there is None:
        return list(statements)
    # An existing index needs no owner's right, and a note may name one that was never dropped.
    missing = [one for one in statements if _named(one) not in there]
    gone: list[str] = []
    for one in missing:
        with target_errors(f"making the indexes of {'.'.join(name)} again"):
            try:
                await conn.execute(one.encode())
            except psycopg.errors.UndefinedColumn:
                gone.append(one)
    there = await _there(conn, name) if missing else there
    if skipped := [one for one in missing if one not in gone and _named(one) not in (there or ())]:
        raise TargetRefused(
            f"target: an index of {'.'.join(name)} was not made again, because another one has its name:"
            f" {'; '.join(sorted(skipped))}",
            hint="rename the other one, and run the same command again",
        )
    return gone


async def _there(conn: Connection, name: Name) -> set[str] | None:
    """Return the beginnings of the statements of a table's indexes; None without the table."""
    query = sql.SQL(
        "SELECT ARRAY(SELECT pg_catalog.pg_get_indexdef(i.indexrelid) FROM pg_catalog.pg_index AS i"
        " WHERE i.indrelid = w.relation) FROM pg_catalog.to_regclass($1::text) AS w(relation)"
        " WHERE w.relation IS NOT NULL"
    )
    with target_errors("reading the indexes"):
        found = await rows(conn, query, [sql.Identifier(*name).as_string(None)])
    return {_named(made_again(one)) for one in found[0][0]} if found else None


def _named(statement: str) -> str:
    """Return a statement up to the name of its index: PostgreSQL may write the rest in other words the next time."""
    return statement.partition(" ON ")[0]
