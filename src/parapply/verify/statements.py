"""SQL that would make the target's rows equal to the source's snapshot; printed, never run.

In: differing keys and a session on the publisher that sees the snapshot. Out: statements for a person to judge, because
changes that the daemon applies in the meantime are later than the snapshot, and may have changed the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.driver import values_hidden
from parapply.printable import printable
from parapply.source.slot import source_errors
from parapply.target.session import settings
from parapply.target.sql.own_rows import own_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.copy.published import Leaf, PublishedTable
    from parapply.plan.copy_starts import Name
    from parapply.source.slot import Connection
    from parapply.verify.differences import Difference, Key
    from parapply.verify.postgres import Compared


#: Values without a key are looked for by their texts, which print so where rows are compared.
_AS_COMPARED: Final = (
    "SET DateStyle = 'ISO, YMD'; SET IntervalStyle = 'postgres'; SET TimeZone = 'UTC'; SET extra_float_digits = 3;"
    " SET bytea_output = 'hex'; SET lc_monetary = 'C'; SET search_path = pg_catalog;"
)
#: The comparisons of keys by types of an extension, and triggers, need their own schemas.
_AS_BEFORE: Final = "RESET search_path;"


async def statements(
    source: Connection, target: settings.Connection, compared: Compared, found: Sequence[Difference]
) -> list[str]:
    """Return the statements for the keys that differ; all DELETEs come first, as keys may be equal that print apart.

    They are one transaction, because the INSERTs after a DELETE that fails would double rows.
    """
    table = compared.published
    deleted: list[str] = []
    updated: list[str] = []
    inserted: list[str] = []
    if not table.key:
        deleted = [_delete_alike(compared, one) for one in found if one.kind != "missing"]
        # Without a key the row is its own.
        inserted = [_insert(table, one.key) for one in found if one.kind != "extra" for _ in range(one.count)]
        return ["BEGIN;", *([_AS_COMPARED, *deleted, _AS_BEFORE] if deleted else []), *inserted, "COMMIT;"]
    by_key: dict[Key, list[Difference]] = {}
    for one in found:
        by_key.setdefault(one.key, []).append(one)
    rows = await _source_rows(source, table, list(by_key))
    fixed = await _fixed(target, table)
    settable = [name for name in table.columns if name not in table.key and name not in fixed]
    notes: list[str] = []
    for key, alike in by_key.items():
        here = rows.get(key, [])
        is_one = len(here) == len(alike) == alike[0].count == 1
        if is_one and alike[0].kind == "different" and (settable or fixed):
            updated += [_update(compared, key, here[0], settable)] if settable else []
            notes = [f"-- not set, since no UPDATE can: {printable(name)}" for name in fixed]
            continue
        if not (is_one and alike[0].kind == "missing"):
            deleted.append(_delete(compared, key))
        inserted += [_insert(table, row) for row in here]
    return ["BEGIN;", *notes, *deleted, *updated, *inserted, "COMMIT;"]


async def _fixed(target: settings.Connection, table: PublishedTable) -> list[str]:
    """Return the columns of the target's table outside the key that an INSERT may set, and no UPDATE."""
    query = sql.SQL(
        "SELECT attname FROM pg_catalog.pg_attribute WHERE attrelid = $1::pg_catalog.regclass AND attidentity = 'a'"
        " AND attname = ANY ($2::text[])"
    )
    others = [name for name in table.columns if name not in table.key]
    name = sql.Identifier(*table.here().full_name).as_string(None)
    with settings.target_errors(f"reading {table.text}"):
        return [str(column) for (column,) in await settings.rows(target, query, [name, others])]


async def _source_rows(
    source: Connection, table: PublishedTable, keys: Sequence[Key]
) -> dict[Key, list[Sequence[str | None]]]:
    values = sql.SQL(", ").join([sql.SQL("{}::pg_catalog.text").format(value) for value in table.values])
    match = sql.SQL(" OR ").join([_matches(table.key, key) for key in keys])
    query = sql.SQL("SELECT {} FROM {} WHERE ({}){}").format(
        values,
        _alone(table.full_name, table.leaves),
        match,
        # The publisher's own text of an expression that it has checked.
        sql.SQL(f" AND ({table.row_filter})") if table.row_filter else sql.SQL(""),
    )
    with source_errors(f"reading {table.text}"), values_hidden(when=bool(table.replaced)):
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


def _delete(compared: Compared, key: Key) -> str:
    return sql.SQL("DELETE FROM {} WHERE {};").format(*_place(compared, key)).as_string(None)


def _update(compared: Compared, key: Key, row: Sequence[str | None], settable: Sequence[str]) -> str:
    """Return the statement that leaves columns that are not published, and rows that refer to this one, as they are."""
    values = [
        sql.SQL("{} = {}").format(sql.Identifier(column), sql.Literal(value))
        for column, value in zip(compared.published.columns, row, strict=True)
        if column in settable
    ]
    relation, place = _place(compared, key)
    return sql.SQL("UPDATE {} SET {} WHERE {};").format(relation, sql.SQL(", ").join(values), place).as_string(None)


def _place(compared: Compared, key: Key) -> tuple[sql.Composed, sql.Composed]:
    """Return the target's table and the condition for a key."""
    table = compared.published
    own = own_rows(table.constants, word="AND")
    return _alone(table.here().full_name, compared.target_leaves), sql.Composed([_matches(table.key, key), own])


def _delete_alike(compared: Compared, one: Difference) -> str:
    """Return the statement for as many rows with these values as are too many."""
    table = compared.published
    same = sql.SQL(" AND ").join(
        [
            sql.SQL("{}::pg_catalog.text IS NOT DISTINCT FROM {}").format(sql.Identifier(column), sql.Literal(value))
            for column, value in zip(table.columns, one.key, strict=True)
        ]
    )
    # Each partition has a row at the same ctid.
    query = sql.SQL(
        "DELETE FROM {relation} WHERE (tableoid, ctid) IN"
        " (SELECT tableoid, ctid FROM {relation} WHERE {same}{own} LIMIT {count});"
    )
    return query.format(
        relation=_alone(table.here().full_name, compared.target_leaves),
        same=same,
        own=own_rows(table.constants, word="AND"),
        count=one.count,
    ).as_string(None)


def _insert(table: PublishedTable, row: Sequence[str | None]) -> str:
    columns = sql.SQL(", ").join([sql.Identifier(column) for column in table.filled])
    values = sql.SQL(", ").join([sql.Literal(value) for value in (*row, *table.constants.values())])
    return (
        sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({});")
        .format(sql.Identifier(*table.here().full_name), columns, values)
        .as_string(None)
    )
