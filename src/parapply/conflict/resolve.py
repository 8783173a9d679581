"""The statements by which the publisher's row wins. Pure; rows in the way are locked, so their ctid identifies them.

In: a change and the rows of the target that it met. Out: commands for the open target transaction.
"""

# ruff: noqa: S608 - this module makes SQL: names are quoted, values are parameters
from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.conflict.kinds import EXISTS
from parapply.conflict.statements import only, statement
from parapply.quoting import identifier, literal
from parapply.target.session.pipeline import ANY_COUNT
from parapply.target.sql.commands import Command
from parapply.target.sql.conditions import types_unaltered
from parapply.target.sql.statements import Sql, Statements
from parapply.wire.rows import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.conflict.changes import RowChange
    from parapply.conflict.kinds import LocalRow
    from parapply.target.sql.commands import Operation
    from parapply.vocabulary import ConflictType


def remote_wins(
    kind: ConflictType, change: RowChange, rows: Sequence[LocalRow], *, first_by_key: bool, own: Sequence[Command]
) -> list[Command]:
    """Return the commands that make the target hold the publisher's row.

    - Of the rows in the way of an insert one becomes the new row, the one with its key if there is one; so columns that
      only the target has keep their values. All others are deleted.
    - Rows in the way of an update are deleted, then the update is executed.
    - A row last written by another session or origin is updated or deleted as if it were ours; a missing one is
      inserted.

    Args:
        kind: of the conflict.
        change: that met it.
        rows: in the way.
        first_by_key: the first of them has the new row's key.
        own: commands of the change itself, which ignore who wrote the row; of an update whose row is missing the
            insert.
    """
    if kind not in EXISTS:
        return [*own]
    if change.operation == "update":
        return [*(_delete(change, row) for row in rows), *own]
    if len(rows) > 1 and not first_by_key:
        # None is surely the same row, so it is not known whose target-only columns to keep.
        return [*(_delete(change, row) for row in rows), *own]
    if any(column.is_identity_always for column in change.plan.columns) or not change.plan.columns:
        # SQL cannot set such a column (T-50).
        return [*(_delete(change, row) for row in rows), *own]
    return [*(_delete(change, row) for row in rows[1:]), _overwrite(change, rows[0])]


def inserting(change: RowChange) -> Command:
    """Return the insert of a change's new row, which is complete."""
    plan = change.plan
    prepared = Statements(plan).row_insert(tuple(range(len(plan.columns))))
    parameters = _values(change, prepared.positions)
    return Command(prepared, parameters, expected=_expected(change), operation="insert", plan=plan)


def _delete(change: RowChange, row: LocalRow) -> Command:
    text = f"DELETE FROM {only(change.plan)} AS t WHERE t.ctid = $1::tid AND t.tableoid = {_table(row)}"
    return _command(text, [row.ctid.encode()], "delete", change)


def _overwrite(change: RowChange, row: LocalRow) -> Command:
    columns = change.plan.columns
    statements = Statements(change.plan)
    assigned = statements.assigned(range(len(columns)))
    texts, positions = statements.row_values(assigned, first=2)
    pairs = zip(assigned, texts, strict=True)
    sets = ", ".join(f"{identifier(columns[position].name)} = {text}" for position, text in pairs)
    text = f"UPDATE {only(change.plan)} AS t SET {sets} WHERE t.ctid = $1::tid AND t.tableoid = {_table(row)}"
    text += f" AND {types_unaltered(change.plan.facts, columns)}"
    return _command(text, [row.ctid.encode(), *_values(change, positions)], "update", change)


def _values(change: RowChange, positions: Sequence[int]) -> list[bytes | None]:
    new = change.new or []
    return [None if (value := new[position]) is None else text_of(value) for position in positions]


def _table(row: LocalRow) -> str:
    return f"{literal(row.table)}::pg_catalog.regclass"


def _command(text: str, parameters: list[bytes | None], operation: Operation, change: RowChange) -> Command:
    made = statement(text, parameters).prepared
    assert isinstance(made, Sql)
    return Command(made, parameters, expected=_expected(change), operation=operation, plan=change.plan)


def _expected(change: RowChange) -> int:
    return ANY_COUNT if change.plan.facts.triggers else 1
