"""Indexes that a copy has dropped, made again: only the row of their table in `parapply.copies` knows of them.

In: a session on the target, a table there, the statements. Out: the indexes, each under its name.
Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from parapply.errors import TargetRefused
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection


_QUOTED: Final = r'(?:"(?:[^"]|"")*"|[^ "])+'
_BEGINNING: Final = rf"(?P<index>CREATE (?:UNIQUE )?INDEX IF NOT EXISTS {_QUOTED}) ON (?:ONLY )?(?P<table>{_QUOTED})"


def made_again(definition: str) -> str:
    """Return the statement to keep for an index; it does nothing if an index of its name exists."""
    return definition.replace(" INDEX ", " INDEX IF NOT EXISTS ", 1)


async def make(conn: Connection, name: Name, statements: Sequence[str]) -> list[str]:
    """Make indexes on the tables that their statements name, and return the statements whose table or column is gone.

    Those made before one that is refused stay. `name` is the table's present name: a renamed table is not gone, and
    counts as having an index where it has one of its name.

    Raises:
        TargetRefused: one was not made.
    """
    # An existing index needs no owner's right, and a note may name one that was never dropped.
    there = await _there(conn, statements)
    missing = [one for one in statements if _named(one) not in there]
    gone: list[str] = []
    moved: list[str] = []
    for one in missing:
        with target_errors(f"making the indexes of {'.'.join(name)} again"):
            try:
                await conn.execute(one.encode())
            except psycopg.errors.UndefinedColumn:
                gone.append(one)
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                (moved if await _is_there(conn, name) else gone).append(one)
    own = {_beginning(one)["index"] for one in await _definitions(conn, [_quoted(name)])} if moved else set()
    if lacking := [one for one in moved if _beginning(one)["index"] not in own]:
        raise TargetRefused(
            f"target: an index of {'.'.join(name)} was not made again, because the table had another name:"
            f" {'; '.join(sorted(lacking))}",
            hint="make it on the table by its present name, and run the same command again",
        )
    there = await _there(conn, missing)
    if skipped := [one for one in missing if one not in gone and one not in moved and _named(one) not in there]:
        raise TargetRefused(
            f"target: an index of {'.'.join(name)} was not made again, because another one has its name:"
            f" {'; '.join(sorted(skipped))}",
            hint="rename the other one, and run the same command again",
        )
    return gone


async def _is_there(conn: Connection, name: Name) -> bool:
    query = sql.SQL("SELECT pg_catalog.to_regclass($1::text) IS NOT NULL")
    return bool((await rows(conn, query, [_quoted(name)]))[0][0])


async def _there(conn: Connection, statements: Sequence[str]) -> set[str]:
    """Return the beginnings of the statements of all indexes that the tables of some have."""
    return {_named(one) for one in await _definitions(conn, sorted({_beginning(one)["table"] for one in statements}))}


async def _definitions(conn: Connection, tables: Sequence[str]) -> list[str]:
    """Return the statements of all indexes of tables."""
    query = sql.SQL(
        "SELECT pg_catalog.pg_get_indexdef(i.indexrelid) FROM pg_catalog.pg_index AS i WHERE i.indrelid IN"
        " (SELECT pg_catalog.to_regclass(w.name) FROM pg_catalog.unnest($1::text[]) AS w(name))"
    )
    with target_errors("reading the indexes"):
        return [made_again(one) for (one,) in await rows(conn, query, [tables])]


def _quoted(name: Name) -> str:
    return sql.Identifier(*name).as_string(None)


def _named(statement: str) -> str:
    """Return a statement up to the name of its table: PostgreSQL may write the rest in other words the next time."""
    return _beginning(statement)[0]


def _beginning(statement: str) -> re.Match[str]:
    found = re.match(_BEGINNING, statement)
    assert found is not None, "the server has written it"
    return found
