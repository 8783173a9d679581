"""Display of the daemon in the state schema: its state, its workers, how it applies each table.

In: a control session and plain rows. For people only: nothing here is ever read back to decide anything.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg
from psycopg.types.json import Json

from parapply.model import lsn_text
from parapply.target.session.settings import target_errors
from parapply.target.state.schema import in_schema, state_rows, update_slot
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg import sql

    from parapply.target.session.settings import Connection

#: Seconds that a daemon may be later with its row than the row says, before it is stuck or gone.
LATE_S: Final = 4.0
_AGE: Final = "GREATEST(EXTRACT(epoch FROM pg_catalog.clock_timestamp() - updated_at), 0)::float8"
#: The most that the lag of a row may be since the row was written; of a new one, since the slot was made.
LAG_NOW: Final = f"COALESCE(lag_s, 0) + {_AGE}"
#: For a row that gets a later date without a check of the publisher, or its lag would stand still.
DATED: Final = f"lag_s = {LAG_NOW}, updated_at = pg_catalog.clock_timestamp()"


class DaemonRow(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon that applies the slot from now on."""

    timeline: int  # of the publisher, as accepted by the slot check
    publications: tuple[str, ...]
    commit_order: str
    workers: int
    host: str
    pid: int
    version: str
    two_phase: str = "disabled"  # or pending, enabled
    lacks_origins: bool = False  # rows that were replicated to the publisher do not come


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one worker, for people."""

    worker: int
    pid: int | None
    state: str
    batch_seq: int | None = None
    end_lsn: int | None = None
    waits_for: str | None = None
    since: datetime | None = None
    transactions: int = 0
    changes: int = 0


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """How one table is applied, for people."""

    schema_name: str
    table_name: str
    lane: str
    is_table_exclusive: bool
    reason: str
    key_columns: tuple[str, ...]
    retries: int = 0


class TableCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Changes applied to one table since the daemon started, and the waits because of it; for people."""

    name: str  # schema.table
    transactions: int
    inserts: int
    updates: int
    deletes: int
    truncates: int
    waits: int
    wait_s: float
    waits_mostly_for: str


async def set_state(conn: Connection, schema: str, slot_id: int, state: str, reason: str = "") -> None:
    """Show what the daemon does and why, for example ("stopped", "SIGTERM").

    While it reconnects, the row keeps the time of the last progress, because alarms on its age are meant for that.

    Raises:
        TargetRefused: the slot's row is gone.
    """
    dated = "" if state == DaemonState.RECONNECTING else f", {DATED}"
    query = (
        f"UPDATE {{s}}.slots SET state = $2, reason = $3, shown_every_s = DEFAULT{dated}"  # noqa: S608  only our own text
        " WHERE slot_id = $1::int RETURNING 1"
    )
    await update_slot(conn, schema, "writing the daemon's state", query, [slot_id, state, reason])


async def reason(conn: Connection, schema: str, slot_id: int) -> str:
    """Return why the daemon is in its state; empty: it said nothing."""
    query = "SELECT reason FROM {s}.slots WHERE slot_id = $1::int"
    found = await state_rows(conn, schema, "reading the daemon's state", query, [slot_id])
    return str(found[0][0]) if found else ""


async def write_daemon(conn: Connection, schema: str, slot_id: int, daemon: DaemonRow) -> None:
    """Say which daemon applies the slot from now on, and forget the workers and tables of the one before.

    Called after the fence and after the slot was checked: it also accepts the publisher's timeline (F14).

    Raises:
        TargetRefused: the slot's row is gone.
    """
    query = (
        "WITH w AS (DELETE FROM {s}.workers WHERE slot_id = $1::int),"  # noqa: S608  only our own text
        " t AS (DELETE FROM {s}.tables WHERE slot_id = $1::int)"
        " UPDATE {s}.slots SET timeline = $2::int, publications = $3::text[], commit_order = $4, workers = $5::int,"
        " host = $6, pid = $7::int, version = $8, two_phase = $9, state = 'starting',"
        " lacks_origins = lacks_origins OR $10::bool,"
        " started_at = pg_catalog.clock_timestamp(), limits = NULL,"
        f" reason = '', shown_every_s = DEFAULT, {DATED}"
        " WHERE slot_id = $1::int RETURNING 1"
    )
    values = [slot_id, daemon.timeline, list(daemon.publications), daemon.commit_order, daemon.workers]
    values += [daemon.host, daemon.pid, daemon.version, daemon.two_phase, daemon.lacks_origins]
    await update_slot(conn, schema, "writing the daemon's state", query, values)


async def write_workers(conn: Connection, schema: str, slot_id: int, workers: Sequence[WorkerRow]) -> None:
    """Show what the workers do; one row each, those not named stay."""
    query = in_schema(
        "INSERT INTO {s}.workers VALUES ($1::int, $2::int, $3::int, $4, $5::bigint, $6::pg_lsn, $7, $8::timestamptz,"
        " $9::bigint, $10::bigint) ON CONFLICT (slot_id, worker) DO UPDATE SET (pid, state, batch_seq, end_lsn,"
        " waits_for, since, transactions, changes) = (EXCLUDED.pid, EXCLUDED.state, EXCLUDED.batch_seq,"
        " EXCLUDED.end_lsn, EXCLUDED.waits_for, EXCLUDED.since, EXCLUDED.transactions, EXCLUDED.changes)",
        schema,
    )
    values = [
        (
            slot_id,
            w.worker,
            w.pid,
            w.state,
            w.batch_seq,
            lsn_text(w.end_lsn),
            w.waits_for,
            w.since,
            w.transactions,
            w.changes,
        )
        for w in workers
    ]
    await _write_all(conn, query, values, "writing what the workers do")


async def write_limits(conn: Connection, schema: str, slot_id: int, limits: str) -> None:
    """Show what limits now, in JSON."""
    query = in_schema("UPDATE {s}.slots SET limits = $2::jsonb WHERE slot_id = $1::int", schema)
    await _write_all(conn, query, [(slot_id, limits)], "writing what limits")


async def forget_workers(conn: Connection, schema: str, slot_id: int, *, but: Sequence[int] = ()) -> None:
    """Remove workers that are no longer connected from the display; the ones in `but` stay."""
    query = in_schema("DELETE FROM {s}.workers WHERE slot_id = $1::int AND worker <> ALL ($2::int[])", schema)
    await _write_all(conn, query, [(slot_id, list(but))], "writing which workers have left")


async def write_tables(conn: Connection, schema: str, slot_id: int, tables: Sequence[TableRow]) -> None:
    """Show how tables are applied; one row each, those not named stay."""
    query = in_schema(
        "INSERT INTO {s}.tables SELECT $1::int, found.schema_name, found.table_name, found.lane,"
        " found.is_table_exclusive, found.reason,"
        " ARRAY(SELECT pg_catalog.json_array_elements_text(found.key_columns)), found.retries"
        " FROM ROWS FROM (pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::text[]), pg_catalog.unnest($4::text[]),"
        " pg_catalog.unnest($5::bool[]), pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::json[]),"
        " pg_catalog.unnest($8::bigint[]))"
        " AS found (schema_name, table_name, lane, is_table_exclusive, reason, key_columns, retries)"
        " ON CONFLICT (slot_id, schema_name, table_name) DO UPDATE SET (lane, is_table_exclusive, reason, key_columns,"
        " retries, updated_at) = (EXCLUDED.lane, EXCLUDED.is_table_exclusive, EXCLUDED.reason, EXCLUDED.key_columns,"
        " EXCLUDED.retries, pg_catalog.clock_timestamp())",
        schema,
    )
    if not tables:
        return
    # One statement for all. An array cannot hold arrays of different lengths. Names go as they are: PostgreSQL refuses
    # \u in JSON where the server's encoding has no such letter, and always in SQL_ASCII.
    keys = [Json(table.key_columns, dumps=msgspec.json.encode) for table in tables]
    shown = [
        (t.schema_name, t.table_name, t.lane, t.is_table_exclusive, t.reason, key, t.retries)
        for t, key in zip(tables, keys, strict=True)
    ]
    values = [(slot_id, *map(list, zip(*shown, strict=True)))]
    await _write_all(conn, query, values, "writing how tables are applied")


async def write_counts(conn: Connection, schema: str, slot_id: int, counts: Sequence[TableCounts]) -> None:
    """Show what was applied to tables, as far as they have a row; those not named stay."""
    query = in_schema(
        "UPDATE {s}.tables AS shown SET transactions = found.transactions, inserts = found.inserts,"
        " updates = found.updates, deletes = found.deletes, truncates = found.truncates, waits = found.waits,"
        " wait_s = found.wait_s, waits_mostly_for = found.waits_mostly_for,"
        " counted_at = pg_catalog.clock_timestamp()"
        " FROM ROWS FROM (pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::bigint[]),"
        " pg_catalog.unnest($4::bigint[]), pg_catalog.unnest($5::bigint[]), pg_catalog.unnest($6::bigint[]),"
        " pg_catalog.unnest($7::bigint[]), pg_catalog.unnest($8::bigint[]), pg_catalog.unnest($9::float8[]),"
        " pg_catalog.unnest($10::text[]))"
        " AS found (name, transactions, inserts, updates, deletes, truncates, waits, wait_s, waits_mostly_for)"
        " WHERE shown.slot_id = $1::int AND shown.schema_name || '.' || shown.table_name = found.name",
        schema,
    )
    columns = [list(column) for column in zip(*map(msgspec.structs.astuple, counts), strict=True)]
    await _write_all(conn, query, [(slot_id, *columns)], "writing what was applied to tables")


async def _write_all(conn: Connection, query: sql.Composed, values: Sequence[tuple[Any, ...]], doing: str) -> None:
    with target_errors(doing):
        # Shown to people only: not worth a wait for the disk.
        async with conn.transaction():
            await conn.execute("SET LOCAL synchronous_commit = off")
            async with psycopg.AsyncRawCursor(conn) as cursor:
                await cursor.executemany(query, values)
