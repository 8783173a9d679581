"""SQL that would make the target's rows equal to the source's snapshot; printed, never run.

In: differing keys and a session on the publisher that sees the snapshot. Out: statements for a person to judge, because
changes that the daemon applies in the meantime are later than the snapshot, and may have changed the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from parapply.source.slot import source_errors
from parapply.target.sql.own_rows import own_rows
from parapply.verify.canonical import row_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.copy.published import Leaf, PublishedTable
    from parapply.plan.copy_starts import Name
    from parapply.source.slot import Connection
    from parapply.verify.differences import Difference, Key
    from parapply.verify.postgres import Compared


async def statements(source: Connection, compared: Compared, found: Sequence[Difference]) -> list[str]:
    """Return the statements for each key that differs.

    Raises:
        SourceRefused, SourceLost: the rows could not be read.
    """
    table = compared.published
    wanted = [one.key for one in found if one.kind != "extra"]
    # Without a key the row is its own.
    rows = await _source_rows(source, table, wanted) if table.key else {one.key: [one.key] * one.count for one in found}
    texts = []
    for one in found:
        if one.kind in {"extra", "different"}:
            texts.append(_delete(compared, one))
        if one.kind in {"missing", "different"}:
            texts += [_insert(table, row) for row in rows.get(one.key, [])[: one.count]]
    return texts


async def _source_rows(
    source: Connection, table: PublishedTable, keys: Sequence[Key]
) -> dict[Key, list[Sequence[str | None]]]:
    if not keys:
        return {}
    values = sql.SQL(", ").join([sql.SQL("{}::pg_catalog.text").format(value) for value in table.values])
    match = sql.SQL(" OR ").join([_matches(table.key, key) for key in keys])
    query = sql.SQL("SELECT {} FROM {} WHERE {}").format(values, _alone(table.full_name, table.leaves), match)
    with source_errors(f"reading {table.text}"):
        async with source.cursor() as cursor:
            await cursor.execute(query)
            found = await cursor.fetchall()
    at = [table.columns.index(column) for column in table.key]
    rows: dict[Key, list[Sequence[str | None]]] = {}
    for row in found:
        rows.setdefault(tuple(row[position] for position in at), []).append(row)
    return rows


def _matches(columns: Sequence[str], key: Key) -> sql.Composed:
    """Return the condition for a key; its values are literals without a type, which the columns give them."""
    return sql.SQL("({})").format(
        sql.SQL(" AND ").join(
            [
                sql.SQL("{} IS NULL").format(sql.Identifier(column))
                if value is None
                else sql.SQL("{} = {}").format(sql.Identifier(column), sql.Literal(value))
                for column, value in zip(columns, key, strict=True)
            ]
        )
    )


def _alone(name: Name, leaves: Sequence[Leaf]) -> sql.Composed:
    """Return the expression for a table without its children, because their rows are not its own."""
    is_leaf = name in {(leaf.schema, leaf.name) for leaf in leaves}
    return sql.SQL("ONLY {}" if is_leaf else "{}").format(sql.Identifier(*name))


def _delete(compared: Compared, one: Difference) -> str:
    table = compared.published
    relation = _alone(table.here().full_name, compared.target_leaves)
    if table.key:
        query = sql.SQL("DELETE FROM {} WHERE {}{};").format(
            relation, _matches(table.key, one.key), own_rows(table.constants, word="AND")
        )
    else:
        same = sql.SQL("{} = {}::text").format(
            row_text([*map(sql.Identifier, table.columns)]), sql.Literal(_row_literal(one.key))
        )
        # Each partition has a row at the same ctid.
        query = sql.SQL(
            "DELETE FROM {relation} WHERE (tableoid, ctid) IN"
            " (SELECT tableoid, ctid FROM {relation} WHERE {same}{own} LIMIT {count});"
        ).format(relation=relation, same=same, own=own_rows(table.constants, word="AND"), count=one.count)
    return query.as_string(None)


def _row_literal(values: Key) -> str:
    """Return what ROW(...)::text prints for values, as record_out does."""
    parts = []
    for value in values:
        if value is None:
            parts.append("")
        elif value == "" or any(char in '(),"\\' or char.isspace() for char in value):
            parts.append('"' + value.replace("\\", "\\\\").replace('"', '""') + '"')
        else:
            parts.append(value)
    return f"({','.join(parts)})"


def _insert(table: PublishedTable, row: Sequence[str | None]) -> str:
    columns = sql.SQL(", ").join([sql.Identifier(column) for column in table.filled])
    values = sql.SQL(", ").join([sql.Literal(value) for value in (*row, *table.constants.values())])
    return (
        sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({});")
        .format(sql.Identifier(*table.here().full_name), columns, values)
        .as_string(None)
    )
