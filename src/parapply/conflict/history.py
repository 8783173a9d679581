"""The history on the target: how a conflict is written there, and how long it stays.

A settled conflict is written inside the target transaction that settled it, so it is recorded exactly once. A
conflict that stopped a transaction is written by another session after the rollback (trap T-68); the row's name (slot,
transaction, change, type) makes one row of it however often it is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from parapply.conflict.changes import shortened
from parapply.conflict.kinds import provisional_lsn
from parapply.conflict.statements import statement
from parapply.errors import StatementFailed, TargetRefused
from parapply.model import format_lsn
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.schema import in_schema, state_rows
from parapply.target.state.slots import wire_time_sql
from parapply.vocabulary import ConflictOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.conflict.kinds import Conflict
    from parapply.target.session.pipeline import Statement
    from parapply.target.session.session import WorkerSession
    from parapply.target.session.settings import Connection

_WRITE: Final = (
    "INSERT INTO {s}.conflicts AS c (slot_id, conflict_type, schema_name, table_name, operation, key, local_row,"
    " remote_row, is_complete, constraints, remote_lsn, remote_xid, remote_commit_time, change_no, local_commit_time,"
    " local_origin, policy, outcome)"
    " SELECT $1::int, $2, $3, $4, $5, $6::jsonb, $7::jsonb, $8::jsonb, $9::bool,"
    " ARRAY(SELECT pg_catalog.jsonb_array_elements_text($10::jsonb)), $11::pg_lsn, $12::bigint, "
    + wire_time_sql("$13")
    + ", $14::int, "
    + wire_time_sql("$15")
    + ", $16, $17, $18 ON CONFLICT (slot_id, remote_lsn, change_no, conflict_type) DO UPDATE SET"
    " (key, local_row, constraints, local_commit_time, local_origin, policy, outcome, attempts) = (EXCLUDED.key,"
    " EXCLUDED.local_row, EXCLUDED.constraints, EXCLUDED.local_commit_time, EXCLUDED.local_origin, EXCLUDED.policy,"
    " EXCLUDED.outcome, c.attempts + 1)"
)

#: A character has no equivalent in the target's encoding.
NO_CHARACTER: Final = "22P05"
_IS_LACKING: Final = "outcome IN ('skipped', 'kept_local') AND replayed_at IS NULL"
#: Changes of the publisher that rows of the target lack. Where a copy of the table is of a later LSN, none is missing.
LEFT_OUT: Final = (
    f"{_IS_LACKING} AND NOT EXISTS"
    " (SELECT FROM {s}.copies AS t WHERE t.slot_id = conflicts.slot_id AND t.schema_name = conflicts.schema_name"
    " AND t.table_name = conflicts.table_name AND t.state = 'copied' AND t.start_lsn >= conflicts.remote_lsn)"
)
#: Columns that name a change of a slot, which may have several rows: one that stopped it, then one of its skip.
CHANGE: Final = ("remote_lsn", "change_no", "schema_name", "table_name", "operation")
_CHANGE: Final = ", ".join(CHANGE)
#: Drops what a condition names, with $1 the slot, and returns how many. Of changes left out that lose their last row
#: the number is kept. The rows of each are counted by the unique index, because a long history may be dropped.
DROPPING: Final = (
    f"WITH dropped AS (DELETE FROM {{s}}.conflicts WHERE CONDITION RETURNING {_CHANGE}, {LEFT_OUT} AS is_left_out,"  # noqa: S608  own text
    " (SELECT pg_catalog.count(*) FROM {s}.conflicts AS o WHERE o.slot_id = conflicts.slot_id AND"
    f" ({', '.join([f'o.{name}' for name in CHANGE])}) = ({', '.join([f'conflicts.{name}' for name in CHANGE])})"
    f" AND {_IS_LACKING}) AS n_rows), noted AS (UPDATE {{s}}.slots AS s SET n_forgotten = s.n_forgotten +"
    " (SELECT pg_catalog.count(*) FROM (SELECT FROM dropped AS d WHERE d.is_left_out AND d.remote_lsn > s.begin_lsn"
    f" GROUP BY {_CHANGE} HAVING pg_catalog.count(*) = pg_catalog.max(n_rows)) AS f)"
    " WHERE s.slot_id = $1::int AND EXISTS (SELECT FROM dropped AS d WHERE d.is_left_out))"
    " SELECT pg_catalog.count(*) FROM dropped"
)

#: An earlier run may have stopped at the same change and known the end.
_DROP_NAMED: Final = (
    "DELETE FROM {s}.conflicts AS c USING {s}.conflicts AS n WHERE c.slot_id = $1::int AND c.remote_lsn = $3::pg_lsn"
    " AND n.slot_id = c.slot_id AND n.remote_lsn = $2::pg_lsn AND n.change_no = c.change_no"
    " AND n.conflict_type = c.conflict_type"
)
_NAME_BY_END: Final = (
    "UPDATE {s}.conflicts SET remote_lsn = $3::pg_lsn WHERE slot_id = $1::int AND remote_lsn = $2::pg_lsn"
)


class ConflictHistory:
    """The history of one slot. Holds nothing but names."""

    def __init__(self, schema: str, slot_id: int) -> None:
        self._schema = schema
        self._slot_id = slot_id
        self._write = in_schema(_WRITE, schema).as_string(None)

    async def write_inside(self, session: WorkerSession, conflicts: Sequence[Conflict]) -> None:
        """Write conflicts in the open transaction that settles them.

        Of one with characters that the target's encoding lacks the values outside ASCII are left out.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
        """
        try:
            await session.run([self._writing(one) for one in conflicts], is_piece=True)
        except StatementFailed as failure:
            if failure.sqlstate != NO_CHARACTER:
                raise
            await session.undo_piece()
            if len(conflicts) == 1:
                await session.run([self._writing(conflicts[0], is_ascii=True)])
                return
            for half in (conflicts[: len(conflicts) // 2], conflicts[len(conflicts) // 2 :]):
                await self.write_inside(session, half)

    async def write(self, conn: Connection, conflict: Conflict, *, is_ascii: bool = False) -> None:
        """Write a conflict whose transaction was rolled back, durably, with the values as `write_inside`."""
        values = [None if value is None else value.decode() for value in self._values(conflict, is_ascii=is_ascii)]
        try:
            await state_rows(conn, self._schema, "writing the history of conflicts", _WRITE, values)
        except TargetRefused as error:
            if is_ascii or getattr(error.__cause__, "sqlstate", None) != NO_CHARACTER:
                raise
            await self.write(conn, conflict, is_ascii=True)

    def _writing(self, conflict: Conflict, *, is_ascii: bool = False) -> Statement:
        return statement(self._write, self._values(conflict, is_ascii=is_ascii))

    def naming_end(self, commit_lsn: int, end_lsn: int) -> list[Statement]:
        """Return the statements that give the conflicts of a large transaction its end LSN, known only now."""
        lsns = provisional_lsn(commit_lsn), end_lsn
        values = [str(self._slot_id).encode(), *[format_lsn(lsn).encode() for lsn in lsns]]
        return [
            statement(in_schema(text, self._schema).as_string(None), values) for text in (_DROP_NAMED, _NAME_BY_END)
        ]

    async def has_stopped(self, conn: Connection) -> bool:
        """Return whether a conflict is recorded whose transaction was stopped and not seen applied."""
        query = "SELECT EXISTS (SELECT FROM {s}.conflicts WHERE slot_id = $1::int AND outcome = $2)"
        values = [self._slot_id, ConflictOutcome.STOPPED.value]
        ((found,),) = await state_rows(conn, self._schema, "reading the history of conflicts", query, values)
        return bool(found)

    async def mark_repaired(self, conn: Connection, low_lsn: int) -> bool:
        """Mark stopped conflicts whose transaction was applied since, up to `low_lsn`; return whether any is left.

        Rows that a prepared transaction has written are locked until its outcome; this does not wait for them (T-37).
        `conn` is in autocommit mode.
        """
        query = in_schema(
            "UPDATE {s}.conflicts SET outcome = $4 WHERE conflict_id IN (SELECT conflict_id FROM {s}.conflicts"
            " WHERE slot_id = $1::int AND outcome = $2 AND remote_lsn <= $3::pg_lsn"
            " FOR UPDATE SKIP LOCKED)",
            self._schema,
        )
        with target_errors("writing the history of conflicts"):
            values = [self._slot_id, ConflictOutcome.STOPPED.value, format_lsn(low_lsn), ConflictOutcome.REPAIRED.value]
            await rows(conn, query, values)
        return await self.has_stopped(conn)

    async def prune(self, conn: Connection, keep_s: float, keep_rows: int) -> None:
        """Drop conflicts that are too old or too many, none that still stops a transaction, without waiting (T-37)."""
        doing = "pruning the history of conflicts"
        found = (
            "SELECT conflict_id FROM {s}.conflicts WHERE slot_id = $1::int AND outcome <> $4 AND (recorded_at"
            " < pg_catalog.clock_timestamp() - $2::float8 * '1 second'::interval OR conflict_id <= (SELECT conflict_id"
            " FROM {s}.conflicts WHERE slot_id = $1::int ORDER BY conflict_id DESC OFFSET $3::bigint LIMIT 1))"
        )
        values = [self._slot_id, keep_s, keep_rows, ConflictOutcome.STOPPED.value]
        # The other statement also locks `slots`, and the monitor reports waits for that table.
        if await state_rows(conn, self._schema, doing, f"{found} LIMIT 1", values):
            query = DROPPING.replace("CONDITION", f"conflict_id IN ({found} FOR UPDATE SKIP LOCKED)")
            await state_rows(conn, self._schema, doing, query, values)

    async def kept(self, conn: Connection) -> dict[tuple[str, str], int]:
        """Return the number of conflicts that are kept, by type and outcome.

        Raises:
            TargetRefused, TargetLost: as `write`.
        """
        query = (
            "SELECT conflict_type, outcome, pg_catalog.count(*) FROM {s}.conflicts"
            " WHERE slot_id = $1::int GROUP BY conflict_type, outcome"
        )
        found = await state_rows(conn, self._schema, "counting conflicts", query, [self._slot_id])
        return {(conflict_type, outcome): n for conflict_type, outcome, n in found}

    def _values(self, conflict: Conflict, *, is_ascii: bool) -> list[bytes | None]:
        key, key_is_cut = shortened(conflict.key, is_ascii=is_ascii)
        remote, remote_is_cut = shortened(conflict.remote_row, is_ascii=is_ascii)
        newest = max(
            (row for row in conflict.local_rows if row.commit_time_us is not None),
            key=lambda row: row.commit_time_us or 0,
            default=None,
        )
        shown = newest or (conflict.local_rows[0] if conflict.local_rows else None)
        local = [shortened(row.values, is_ascii=False)[0] for row in conflict.local_rows]
        source = conflict.source
        return [
            str(self._slot_id).encode(),
            conflict.type.value.encode(),
            conflict.schema.encode("utf-8", "replace"),
            conflict.table.encode("utf-8", "replace"),
            conflict.operation.encode(),
            _json(key),
            _json(local[0] if len(local) == 1 else local) if local else None,
            _json(remote),
            b"true" if conflict.is_complete and not (key_is_cut or remote_is_cut) else b"false",
            _json(list(conflict.constraints)),
            format_lsn(source.lsn).encode(),
            str(source.xid).encode(),
            str(source.commit_time_us).encode(),
            str(conflict.change_no).encode(),
            str(shown.commit_time_us).encode() if shown and shown.commit_time_us is not None else None,
            shown.origin.encode() if shown and shown.origin is not None else None,
            conflict.policy.value.encode(),
            conflict.outcome.value.encode(),
        ]


def _json(value: object) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)
