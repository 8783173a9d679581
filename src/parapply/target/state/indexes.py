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
_BEGINNING: Final = rf"CREATE (?:UNIQUE )?INDEX IF NOT EXISTS {_QUOTED} ON (?:ONLY )?(?P<table>{_QUOTED})"


def made_again(definition: str) -> str:
    """Return the statement to keep for an index; it does nothing if an index of its name exists."""
    return definition.replace(" INDEX ", " INDEX IF NOT EXISTS ", 1)


async def make(conn: Connection, name: Name, statements: Sequence[str]) -> list[str]:
    """Make indexes on the tables that their statements name, and return the statements whose table or column is gone.

    Those made before one that is refused stay. `name` is the table for people, which may have another one by now.

    Raises:
        TargetRefused: one was not made.
    """
    # An existing index needs no owner's right, and a note may name one that was never dropped.
    there = await _there(conn, statements)
    missing = [one for one in statements if _named(one) not in there]
    gone: list[str] = []
    for one in missing:
        with target_errors(f"making the indexes of {'.'.join(name)} again"):
            try:
                await conn.execute(one.encode())
            except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                gone.append(one)
    there = await _there(conn, missing)
    if skipped := [one for one in missing if one not in gone and _named(one) not in there]:
        raise TargetRefused(
            f"target: an index of {'.'.join(name)} was not made again, because another one has its name:"
            f" {'; '.join(sorted(skipped))}",
            hint="rename the other one, and run the same command again",
        )
    return gone


async def _there(conn: Connection, statements: Sequence[str]) -> set[str]:
    """Return the beginnings of the statements of all indexes that the tables of some have."""
    query = sql.SQL(
        "SELECT pg_catalog.pg_get_indexdef(i.indexrelid) FROM pg_catalog.pg_index AS i WHERE i.indrelid IN"
        " (SELECT pg_catalog.to_regclass(w.name) FROM pg_catalog.unnest($1::text[]) AS w(name))"
    )
    tables = {_beginning(one)["table"] for one in statements}
    with target_errors("reading the indexes"):
        return {_named(made_again(one)) for (one,) in await rows(conn, query, [sorted(tables)])}


def _named(statement: str) -> str:
    """Return a statement up to the name of its table: PostgreSQL may write the rest in other words the next time."""
    return _beginning(statement)[0]


def _beginning(statement: str) -> re.Match[str]:
    found = re.match(_BEGINNING, statement)
    assert found is not None, "the server has written it"
    return found
