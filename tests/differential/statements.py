"""Random statements on random tables, each valid in every state or refused by the publisher as a whole.

A target applies the publisher's changes row by row in the same order: no statement relies on a check at its end. Single
rows change unique values, so a target's immediate check of every row finds what the publisher's found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.differential.tables import literal

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.differential.tables import Operation, RandomColumn, RandomTable


def operations_of(table: RandomTable) -> Sequence[Operation]:
    """Return what transactions do to a table: its own list, or what its shape allows."""
    if table.operations:
        return table.operations
    if not table.can_update:
        return (insert,)
    return KEYED if table.key else (insert, insert, update_some, delete_some)


def _names(table: RandomTable) -> str:
    return ", ".join(column.name for column in table.all_columns)


def _row(table: RandomTable, chooser: random.Random) -> str:
    return f"({', '.join(column.value(chooser) for column in table.all_columns)})"


def insert(table: RandomTable, chooser: random.Random) -> str:
    """Insert one row or many."""
    rows = ", ".join(_row(table, chooser) for _ in range(chooser.choice((1, 1, 2, 12))))
    return f"INSERT INTO {table.name} ({_names(table)}) VALUES {rows} ON CONFLICT DO NOTHING"


def insert_one(table: RandomTable, chooser: random.Random) -> str:
    """Insert one row if its key is free; any other unique value must be."""
    return f"{insert_or_fail(table, chooser)} ON CONFLICT ({_key_names(table)}) DO NOTHING"


def insert_or_fail(table: RandomTable, chooser: random.Random) -> str:
    """Insert one row that may be there."""
    return f"INSERT INTO {table.name} ({_names(table)}) VALUES {_row(table, chooser)}"


def upsert(table: RandomTable, chooser: random.Random) -> str:
    """Insert or update one row."""
    insertion = insert_or_fail(table, chooser)
    return f"{insertion} ON CONFLICT ({_key_names(table)}) DO UPDATE SET {assignments(table, chooser)}"


def _key_names(table: RandomTable) -> str:
    return ", ".join(column.name for column in table.key)


def assignments(table: RandomTable, chooser: random.Random, leave: Sequence[str] = ()) -> str:
    """Return new values for some columns but those to leave: what stays and is big is not sent (T-41)."""
    columns = [column for column in table.columns if column.name not in leave]
    chosen = chooser.sample(columns, chooser.randint(1, len(columns)))
    return ", ".join(f"{column.name} = {column.value(chooser)}" for column in chosen)


def by_key(table: RandomTable, chooser: random.Random) -> str:
    """Return a condition that at most one row meets."""
    return " AND ".join(column.is_equal(column.value(chooser), table.name) for column in table.key)


def update(table: RandomTable, chooser: random.Random) -> str:
    """Update one row."""
    return f"UPDATE {table.name} SET {assignments(table, chooser)} WHERE {by_key(table, chooser)}"


def delete(table: RandomTable, chooser: random.Random) -> str:
    """Delete one row."""
    return f"DELETE FROM {table.name} WHERE {by_key(table, chooser)}"


def replace(table: RandomTable, chooser: random.Random) -> str:
    """Delete and insert perhaps the same key (T-39)."""
    return f"{delete(table, chooser)}; {insert(table, chooser)}"


def replace_one(table: RandomTable, chooser: random.Random) -> str:
    """Delete one row and insert one, perhaps with the same key."""
    return f"{delete(table, chooser)}; {insert_one(table, chooser)}"


def move(table: RandomTable, chooser: random.Random) -> str:
    """Change the key of one row (T-20)."""
    moves = ", ".join(f"{column.name} = {column.value(chooser)}" for column in table.key)
    return f"UPDATE {table.name} SET {moves} WHERE {by_key(table, chooser)}"


def swap_keys(table: RandomTable, chooser: random.Random) -> str:
    """Let two rows swap their keys through a spare one (T-20); only one may be there."""
    column = table.key[0]
    rest = "".join(f" AND {other.is_equal(other.value(chooser))}" for other in table.key[1:])
    return _swap(table, column, column.value(chooser), column.value(chooser), rest)


def _swap(table: RandomTable, column: RandomColumn, one: str, other: str, rest: str = "") -> str:
    name, spare = column.name, literal(column.spare)
    assert column.spare, f"{name} has no spare value"
    steps = ((one, spare), (other, one), (spare, other))
    return "; ".join(f"UPDATE {table.name} SET {name} = {to} WHERE {column.is_equal(old)}{rest}" for old, to in steps)


def update_some(table: RandomTable, chooser: random.Random) -> str:
    """Update many rows, in no unique value."""
    chosen = chooser.choice((f"n % 4 = {chooser.randrange(4)}", "true"))
    return f"UPDATE {table.name} SET n = (n + 1) % 10 WHERE {chosen}"


def delete_some(table: RandomTable, chooser: random.Random) -> str:
    """Delete several rows."""
    return f"DELETE FROM {table.name} WHERE n = {chooser.randrange(10)}"


#: For a table with a key and nothing that forbids statements of many rows.
KEYED: tuple[Operation, ...] = (
    insert, insert, insert_or_fail, upsert, update, update, update, delete, replace, move, swap_keys, update_some,
    delete_some,
)  # fmt: skip

#: For a table where rows refer to rows, or an index that ON CONFLICT cannot use.
SINGLE: tuple[Operation, ...] = (
    insert_one, insert_one, insert_one, insert_or_fail, update, update, update, delete, replace_one, move, swap_keys,
)  # fmt: skip


def handed(name: str) -> tuple[Operation, ...]:
    """Return how a value of a column goes from one row to another: in one transaction, and freed here, taken there."""

    def free(table: RandomTable, chooser: random.Random) -> str:
        return f"UPDATE {table.name} SET {name} = NULL WHERE {name} = {value_of(table, chooser)}"

    def take(table: RandomTable, chooser: random.Random) -> str:
        return f"UPDATE {table.name} SET {name} = {value_of(table, chooser)} WHERE {by_key(table, chooser)}"

    def hand_over(table: RandomTable, chooser: random.Random) -> str:
        value = value_of(table, chooser)
        freed = chooser.choice((f"UPDATE {table.name} SET {name} = NULL WHERE", f"DELETE FROM {table.name} WHERE"))
        return f"{freed} {name} = {value}; UPDATE {table.name} SET {name} = {value} WHERE {by_key(table, chooser)}"

    def swap(table: RandomTable, chooser: random.Random) -> str:
        return _swap(table, _column(table, name), value_of(table, chooser), value_of(table, chooser))

    def value_of(table: RandomTable, chooser: random.Random) -> str:
        column = _column(table, name)
        return literal(column.values(chooser))

    return (free, take, take, hand_over, hand_over, swap)


def _column(table: RandomTable, name: str) -> RandomColumn:
    return next(column for column in table.all_columns if column.name == name)


def guarded(name: str) -> tuple[Operation, ...]:
    """Return the operations of a table whose column is unique although the publisher has no index that says so.

    A transaction that gives the column a value first waits for all others that do, then looks whether it is free: in
    every state that commits, and after every single row, no two rows have the same.
    """
    free, _, _, hand_over, _, swap = handed(name)

    def insert_free(table: RandomTable, chooser: random.Random) -> str:
        value = _column(table, name).value(chooser)
        row = [value if column.name == name else column.value(chooser) for column in table.all_columns]
        typed = [f"{text}::{column.type_sql}" for text, column in zip(row, table.all_columns, strict=True)]
        return (
            f"INSERT INTO {table.name} ({_names(table)}) SELECT {', '.join(typed)}"
            f" WHERE NOT EXISTS (SELECT FROM {table.name} AS o WHERE o.{name} = {value}) ON CONFLICT DO NOTHING"
        )

    def take_free(table: RandomTable, chooser: random.Random) -> str:
        value = literal(_column(table, name).values(chooser))
        is_free = f"NOT EXISTS (SELECT FROM {table.name} AS o WHERE o.{name} = {value})"
        return f"UPDATE {table.name} SET {name} = {value} WHERE {by_key(table, chooser)} AND {is_free}"

    def update_rest(table: RandomTable, chooser: random.Random) -> str:
        return f"UPDATE {table.name} SET {assignments(table, chooser, leave=(name,))} WHERE {by_key(table, chooser)}"

    def locked(operation: Operation) -> Operation:
        def run(table: RandomTable, chooser: random.Random) -> str:
            # A separate statement: the next one's snapshot is taken when the lock is held.
            return f"SELECT pg_advisory_xact_lock(hashtext({literal(table.name)})); {operation(table, chooser)}"

        return run

    claims = (*[insert_free] * 6, take_free, take_free, hand_over, swap)
    return (*map(locked, claims), free, update_rest, update_rest, delete, move, swap_keys, update_some, delete_some)


#: More than the 64 kB from which on a publisher may stream a transaction.
BULK_ROWS = 350


def bulk_statement(table: RandomTable, chooser: random.Random) -> str:
    """Write hundreds of rows of the table of large transactions, more than a publisher keeps in memory."""
    first = chooser.randrange(4) * BULK_ROWS
    last = first + BULK_ROWS - 1
    if chooser.random() < 0.3:
        return f"DELETE FROM {table.name} WHERE k BETWEEN {first} AND {last}"
    pad = f"repeat('{chooser.choice('abc')}', 200)"
    return (
        f"INSERT INTO {table.name} SELECT g, g % 10, {pad} FROM generate_series({first}, {last}) AS g"
        f" ON CONFLICT (k) DO UPDATE SET n = {chooser.randrange(10)}, pad = {pad}"
    )


def come_and_go(table: RandomTable, chooser: random.Random) -> list[str]:
    """Insert rows whose keys no other statement uses, change some and delete all, with a savepoint in between."""
    first = 10 * BULK_ROWS * (1 + chooser.randrange(3))
    last = first + chooser.choice((3, BULK_ROWS))
    rows = f"SELECT g, g % 10, 'here' FROM generate_series({first}, {last}) AS g"
    between = f"k BETWEEN {first} AND {last}"
    return [
        f"INSERT INTO {table.name} {rows} ON CONFLICT DO NOTHING",
        "SAVEPOINT gone",
        f"UPDATE {table.name} SET n = 3 WHERE {between} AND n = 2",
        f"DELETE FROM {table.name} WHERE {between}",
    ]
