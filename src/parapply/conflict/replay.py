"""Applying a kept change now, by hand: one that was skipped, or lost against the target's row.

In: rows of the history. Out: what each did, row before and row after. All in one transaction, which the caller commits
or rolls back. Values go as text, which the columns' own input functions read, as when they came from the publisher.

- A new row is written over the row with its key (old key first, then the new one), else inserted; without all columns
  (unchanged TOAST) it can only be written over an existing row.
- A delete takes the row with its key, if it exists.
- In a table without a key rows are found by all their values, and several may have the same: an insert always inserts,
  and a change that was replayed before is not repeated.
- Several conflicts of one change are replayed by the first of them, and marked together.
"""

# ruff: noqa: S608 - this module makes SQL: names are quoted, values are parameters
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg

from parapply.conflict.changes import RESTARTS_IDENTITY, listed_tables
from parapply.conflict.history import CHANGE
from parapply.conflict.statements import row_as_text
from parapply.errors import TargetRefused
from parapply.plan.table import table_name
from parapply.quoting import identifier
from parapply.target.catalogue import facts as catalogue
from parapply.target.catalogue.constants import constants_of
from parapply.target.session.settings import target_errors
from parapply.target.sql.conditions import column_holds, column_is_null
from parapply.target.sql.statements import emptying
from parapply.target.state.schema import in_schema
from parapply.vocabulary import ConflictOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import TargetConfig
    from parapply.config_mapping import MappingConfig
    from parapply.plan.table import TableFacts
    from parapply.target.session.settings import Connection

_Row = dict[str, Any]
#: A row of the target, None if there is none, and the condition that it alone fulfils.
_Found = tuple[_Row | None, str]

#: Another replay of the same conflict waits here, and finds it replayed.
_CLAIM: Final = (
    "SELECT 1 FROM {s}.conflicts WHERE conflict_id = $1::bigint"
    " AND replayed_at IS NOT DISTINCT FROM $2::text::timestamptz FOR UPDATE"
)
_MARK: Final = (
    f"UPDATE {{s}}.conflicts SET replayed_at = pg_catalog.now() WHERE (slot_id, {', '.join(CHANGE)}) ="
    f" (SELECT slot_id, {', '.join(CHANGE)} FROM {{s}}.conflicts WHERE conflict_id = $1::bigint)"
)
_VETOED: Final = "code on the target left it out"
_STAYS: Final = "columns without a value here stay as they were: it was not sent, or could not be kept"


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of replaying one conflict, done or planned."""

    conflict_id: int
    table: str
    action: str  # insert, update, delete, truncate, or nothing
    before: _Row | None  # the target's row; None: there was none
    after: _Row | None
    reason: str = ""  # why nothing is done, or not all


async def replay(
    conn: Connection, schema: str, conflicts: Sequence[_Row], mapping: MappingConfig, target: TargetConfig
) -> list[Effect]:
    """Apply conflicts, with rows, in the order given, inside the open transaction, and mark them as replayed.

    Raise TargetRefused if one cannot be applied; roll back.
    """
    role = target.session_replication_role
    effects = []
    done: dict[tuple[object, ...], int] = {}
    claim, mark = (in_schema(text, schema).as_string(None) for text in (_CLAIM, _MARK))
    for conflict in conflicts:
        _check(conflict)
        if mapping.replaced_of((conflict["schema_name"], conflict["table_name"])):
            raise TargetRefused(
                f"conflict {conflict['conflict_id']}: the values of replaced columns are not in the history",
                hint="change the publisher's row, or run `parapply refresh` for its table",
            )
        if target.apply_as == "owner":
            await _check_code(conn, conflict, mapping)
        number, change = conflict["conflict_id"], tuple(conflict[name] for name in CHANGE)
        if change in done:
            table = ".".join(mapping.target_of((conflict["schema_name"], conflict["table_name"])))
            effects.append(_nothing(conflict, table, f"conflict {done[change]} is of the same change"))
            continue
        with target_errors(f"replaying conflict {number}"):
            if not await _rows(conn, claim, [number, conflict["replayed_at"]]):
                raise TargetRefused(
                    f"conflict {number} was replayed or dropped since it was read",
                    hint=f"nothing was applied; see `parapply conflicts show {number}`",
                )
            effects.append(await _one(conn, role, conflict, mapping))
            if effects[-1].reason != _VETOED:
                await _rows(conn, mark, [number])
                done[change] = number
    return effects


def _check(conflict: _Row) -> None:
    if conflict["outcome"] in (ConflictOutcome.STOPPED, ConflictOutcome.REPAIRED):
        what = "is still tried again" if conflict["outcome"] == ConflictOutcome.STOPPED else "has been applied"
        raise TargetRefused(
            f"conflict {conflict['conflict_id']} was not left out: its transaction {what}",
            hint="replay what was skipped or lost against the target's row (outcome skipped or kept_local)",
        )


async def _check_code(conn: Connection, conflict: _Row, mapping: MappingConfig) -> None:
    tables = [(conflict["schema_name"], conflict["table_name"])]
    if conflict["operation"] == "truncate":
        tables = list(listed_tables(conflict["key"] or {}))
    # Only a new row has defaults.
    sent = conflict["remote_row"] or () if conflict["operation"] in ("insert", "update") else None
    for there in tables:
        more = () if sent is None else mapping.constants_of(there)
        await catalogue.check_foreign_code(conn, *mapping.target_of(there), None if sent is None else {*sent, *more})


async def _one(conn: Connection, role: str, conflict: _Row, mapping: MappingConfig) -> Effect:
    there = conflict["schema_name"], conflict["table_name"]
    here, fixed = mapping.target_of(there), mapping.constants_of(there)
    name = ".".join(here)
    facts = await catalogue.load_facts(conn, *here, role=role)
    if facts is None:
        raise TargetRefused(f"target table {name} does not exist", hint="create it, or drop the conflict")
    if conflict["operation"] == "truncate":
        return await _truncate(conn, role, conflict, mapping)
    constants_of(facts, fixed, conflict["remote_row"] or ())
    key, row = conflict["key"] or {}, {**(conflict["remote_row"] or {}), **fixed}
    # Of a conflict from before they were to be left out.
    if of_key := [column for column in mapping.omitted_of(there) if column in key]:
        raise TargetRefused(
            f'conflict {conflict["conflict_id"]}: `omit` leaves out column "{of_key[0]}" of its key',
            hint="change the row by hand, and drop the conflict",
        )
    row = {column: value for column, value in row.items() if column not in mapping.omitted_of(there)}
    # Without a key no row is looked for, and the constants alone find any.
    key = {**key, **fixed} if key else key
    if not facts.key_columns and conflict["replayed_at"] is not None:
        why = f"it was replayed at {conflict['replayed_at']}, and without a key its row cannot be told from others"
        return _nothing(conflict, name, why)
    found: _Found = None, ""
    if facts.key_columns or conflict["operation"] != "insert":
        _check_whole(conflict, facts, key)
        found = await _find(conn, facts, key)
    if found[0] is None and conflict["operation"] != "delete":
        found = await _find(conn, facts, {column: row.get(column) for column in facts.key_columns})
    if conflict["operation"] == "delete":
        return await _take(conn, facts, conflict, found)
    return await _put(conn, facts, conflict, row, found)


def _check_whole(conflict: _Row, facts: TableFacts, key: _Row) -> None:
    """Refuse a row that would be found by fewer columns than it has, because the history left a value out."""
    needed = facts.key_columns or [column.name for column in facts.columns if not column.is_generated]
    if not (conflict["is_complete"] or key.keys() >= set(needed)):
        raise TargetRefused(
            f"conflict {conflict['conflict_id']}: a value could not be kept, so its row cannot be found",
            hint="change the row by hand, and drop the conflict",
        )


async def _take(conn: Connection, facts: TableFacts, conflict: _Row, found: _Found) -> Effect:
    before, where = found
    name = f"{facts.schema}.{facts.name}"
    if before is None:
        return _nothing(conflict, name, "the row is not there")
    if not await _rows(conn, f"DELETE FROM {_only(facts)} AS t WHERE {where} RETURNING 1", []):
        return _nothing(conflict, name, _VETOED)
    return Effect(conflict_id=conflict["conflict_id"], table=name, action="delete", before=before, after=None)


async def _put(conn: Connection, facts: TableFacts, conflict: _Row, row: _Row, found: _Found) -> Effect:
    before, where = found
    if before is None and not conflict["is_complete"]:
        raise TargetRefused(
            f"conflict {conflict['conflict_id']}: the row is not on the target, and some of its values were not sent or"
            " are no UTF-8",
            hint="insert the row by hand, then replay",
        )
    name = f"{facts.schema}.{facts.name}"
    after = await (_insert(conn, facts, row) if before is None else _update(conn, facts, row, where))
    if after is None:
        return _nothing(conflict, name, _VETOED)
    action = "insert" if before is None else "update"
    reason = "" if conflict["is_complete"] else _STAYS
    return Effect(
        conflict_id=conflict["conflict_id"], table=name, action=action, before=before, after=after, reason=reason
    )


def _nothing(conflict: _Row, name: str, why: str) -> Effect:
    return Effect(
        conflict_id=conflict["conflict_id"], table=name, action="nothing", before=None, after=None, reason=why
    )


async def _find(conn: Connection, facts: TableFacts, key: _Row) -> _Found:
    """Return one row that has these values, locked, and the condition that it alone fulfils."""
    columns = {column.name: column for column in facts.columns}
    missing = [name for name in key if name not in columns]
    if missing:
        raise TargetRefused(f"target table {facts.schema}.{facts.name} has no column {', '.join(missing)}")
    if not key:
        return None, ""
    conditions, values = [], []
    for name, value in key.items():
        if value is None:
            conditions.append(column_is_null(columns[name]))
        else:
            values.append(value)
            conditions.append(column_holds(columns[name], f"${len(values)}"))
    text = (
        f"SELECT {row_as_text(facts.columns)}, t.ctid::text, t.tableoid::text FROM {_only(facts)} AS t"
        f" WHERE {' AND '.join(conditions)} LIMIT 1 FOR UPDATE"
    )
    found = await _rows(conn, text, values)
    if not found:
        return None, ""
    row, ctid, table = found[0]
    return row, f"t.ctid = '{ctid}'::tid AND t.tableoid = {int(table)}"


async def _insert(conn: Connection, facts: TableFacts, row: _Row) -> _Row | None:
    names = _settable(facts, row)
    table = f"{table_name(facts)} AS t"
    text = f"INSERT INTO {table} DEFAULT VALUES"
    if names:
        targets = ", ".join(map(identifier, names))
        values = ", ".join(f"${number}" for number in range(1, len(names) + 1))
        text = f"INSERT INTO {table} ({targets}) OVERRIDING SYSTEM VALUE VALUES ({values})"
    found = await _rows(conn, f"{text} RETURNING {row_as_text(facts.columns)}", [row[name] for name in names])
    return found[0][0] if found else None


async def _update(conn: Connection, facts: TableFacts, row: _Row, where: str) -> _Row | None:
    always = {column.name for column in facts.columns if column.is_identity_always}
    names = [name for name in _settable(facts, row) if name not in always]
    if names:
        sets = ", ".join(f"{identifier(name)} = ${number}" for number, name in enumerate(names, 1))
        text = f"UPDATE {_only(facts)} AS t SET {sets} WHERE {where} RETURNING {row_as_text(facts.columns)}"
    else:
        text = f"SELECT {row_as_text(facts.columns)} FROM {_only(facts)} AS t WHERE {where}"
    found = await _rows(conn, text, [row[name] for name in names])
    return found[0][0] if found else None


async def _truncate(conn: Connection, role: str, conflict: _Row, mapping: MappingConfig) -> Effect:
    """Empty the tables that the publisher has emptied, and no others, as the daemon would have."""
    if not conflict["is_complete"]:
        raise TargetRefused(
            f"conflict {conflict['conflict_id']}: the names of its tables could not be kept",
            hint="empty the tables by hand, and drop the conflict",
        )
    key = conflict["key"] or {}
    tables = []
    for there in listed_tables(key):
        here = mapping.target_of(there)
        facts = await catalogue.load_facts(conn, *here, role=role)
        if facts is None:
            raise TargetRefused(f"target table {'.'.join(here)} does not exist", hint="create it, or drop the conflict")
        tables.append((facts, constants_of(facts, mapping.constants_of(there), ())))
    for made in emptying(tables, restart_identity=key.get(RESTARTS_IDENTITY) == "true"):
        await _rows(conn, made.text.decode("utf-8", "surrogateescape"), [])
    names = ", ".join(f"{facts.schema}.{facts.name}" for facts, _ in tables)
    return Effect(conflict_id=conflict["conflict_id"], table=names, action="truncate", before=None, after=None)


def _settable(facts: TableFacts, row: _Row) -> list[str]:
    generated = {column.name for column in facts.columns if column.is_generated}
    return [name for name in row if name not in generated]


def _only(facts: TableFacts) -> str:
    return table_name(facts) if facts.is_partitioned else f"ONLY {table_name(facts)}"


async def _rows(conn: Connection, text: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    """Run a statement whose text holds quoted names with any characters."""
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(text.encode(), values, prepare=False)
        return await cursor.fetchall() if cursor.description else []


def as_lines(effect: Effect) -> list[str]:
    """Return an effect as a person reads it: what changes, column by column."""
    head = f"conflict {effect.conflict_id}: {effect.action} {effect.table}"
    if effect.action == "nothing":
        return [f"{head}: {effect.reason}"]
    before, after = effect.before or {}, effect.after or {}
    lines = [head, *([f"    {effect.reason}"] if effect.reason else [])]
    for column in dict.fromkeys([*before, *after]):
        old, new = before.get(column), after.get(column)
        if effect.before is not None and effect.after is not None and old == new:
            lines.append(f"    {column}: {_shown(old)}")
        elif effect.after is None:
            lines.append(f"  - {column}: {_shown(old)}")
        else:
            changed = f"{_shown(old)} -> " if effect.before is not None else ""
            lines.append(f"  {'~' if effect.before is not None else '+'} {column}: {changed}{_shown(new)}")
    return lines


def _shown(value: str | None) -> str:
    text = "NULL" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
