"""Conditions that leave the rows of other sources out of statements, as `psycopg.sql` composes them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Mapping


def own_condition(constants: Mapping[str, str], *, alias: str = "") -> sql.Composed:
    """Return the condition for the target's rows with some constants; empty without any."""
    terms = [
        sql.SQL("{} = {}").format(sql.Identifier(*[*([alias] if alias else []), name]), sql.Literal(text))
        for name, text in constants.items()
    ]
    return sql.SQL(" AND ").join(terms)


def own_rows(constants: Mapping[str, str], *, alias: str = "", word: str = "WHERE") -> sql.Composed:
    """Return the end of a statement on the target that leaves the rows of other sources out; nothing without constants.

    Args:
        constants: of the table.
        alias: of the table in the statement; empty: none.
        word: before the condition, WHERE or AND.
    """
    held = own_condition(constants, alias=alias)
    return sql.SQL(" {} {}").format(sql.SQL(word), held) if constants else held
