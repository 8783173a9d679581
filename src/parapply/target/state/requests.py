"""Requests for snapshots, which travel through the state schema: command and daemon may be on different machines.

| state    | written by | meaning                                                                      |
|----------|------------|------------------------------------------------------------------------------|
| asked    | command    | wants a snapshot at lsn, or at the earliest possible one                      |
| standing | daemon     | everything up to at_lsn is committed, nothing later; waits for the LSN        |
| go       | command    | apply up to lsn                                                               |
| ready    | daemon     | snapshot_name equals the publisher at at_lsn; kept until it is taken          |
| taken    | command    | imported: the daemon may let go of it                                        |
| refused  | daemon     | reason says why                                                              |

A request ends with the session that asked. In: an open session, the schema's name. Out: rows of `parapply.snapshots`.
Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from psycopg import sql

from parapply.model import lsn_text
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.copies import change, notify
from parapply.target.state.schema import in_schema, state_rows, struct_of

if TYPE_CHECKING:
    from parapply.target.session.settings import Connection

_COLUMNS = "request_id, state, lsn::text, stands, at_lsn::text, snapshot_name, pause_s, reason"


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    request_id: int
    state: str
    lsn: int | None
    stands: bool
    at_lsn: int | None
    snapshot_name: str | None
    pause_s: float | None
    reason: str


async def ask(conn: Connection, schema: str, slot_id: int, lsn: int | None, *, stands: bool) -> int:
    """Write a request and call the daemon; return its number. It ends with this session, or with `withdraw`."""
    query = in_schema(
        "INSERT INTO {s}.snapshots (slot_id, client_pid, lsn, stands)"
        " VALUES ($1::int, pg_catalog.pg_backend_pid(), $2::pg_lsn, $3::bool) RETURNING request_id",
        schema,
    )
    with target_errors("asking for a snapshot"):
        async with conn.transaction():
            ((request_id,),) = await rows(conn, query, [slot_id, lsn_text(lsn), stands])
            await notify(conn, slot_id)
    return int(request_id)


async def withdraw(conn: Connection, schema: str, slot_id: int, request_id: int) -> None:
    """Remove a request."""
    query = "DELETE FROM {s}.snapshots WHERE request_id = $1::bigint"
    await change(conn, schema, slot_id, "withdrawing a request", (query, [request_id]))


async def read(conn: Connection, schema: str, request_id: int) -> SnapshotRequest | None:
    """Return a request as it is; None if it, or the session that asked, is gone."""
    query = (
        f"SELECT {_COLUMNS} FROM {{s}}.snapshots WHERE request_id = $1::bigint"  # noqa: S608  only our own text
        " AND client_pid IN (SELECT pid FROM pg_catalog.pg_stat_get_activity(NULL))"
    )
    found = await state_rows(conn, schema, "reading a request", query, [request_id])
    return struct_of(SnapshotRequest, found[0]) if found else None


async def open_requests(conn: Connection, schema: str, slot_id: int) -> list[SnapshotRequest]:
    """Return the open requests to a slot's daemon, the oldest first; requests of sessions that are gone are removed."""
    gone = in_schema(
        "DELETE FROM {s}.snapshots WHERE slot_id = $1::int"
        " AND client_pid NOT IN (SELECT pid FROM pg_catalog.pg_stat_get_activity(NULL))",
        schema,
    )
    query = in_schema(
        f"SELECT {_COLUMNS} FROM {{s}}.snapshots WHERE slot_id = $1::int ORDER BY request_id",  # noqa: S608  as above
        schema,
    )
    with target_errors("reading requests"):
        found = await rows(conn, query, [slot_id])
        if found:
            await rows(conn, gone, [slot_id])
            found = await rows(conn, query, [slot_id])
    return [struct_of(SnapshotRequest, row) for row in found]


async def answer(  # noqa: PLR0913  the columns of a row
    conn: Connection,
    schema: str,
    slot_id: int,
    request_id: int,
    state: str,
    *,
    lsn: int | None = None,
    at_lsn: int | None = None,
    snapshot_name: str | None = None,
    pause_s: float | None = None,
    reason: str = "",
) -> None:
    """Write the next state of a request and call the other side; None leaves a column as it is.

    One that is refused, or gone, stays so.
    """
    query = (
        "UPDATE {s}.snapshots SET state = $2, lsn = COALESCE($3::pg_lsn, lsn), at_lsn = COALESCE($4::pg_lsn, at_lsn),"
        " snapshot_name = COALESCE($5, snapshot_name), pause_s = COALESCE($6::float8, pause_s), reason = $7"
        " WHERE request_id = $1::bigint AND state <> 'refused'"
    )
    values = [request_id, state, lsn_text(lsn), lsn_text(at_lsn), snapshot_name, pause_s, reason]
    await change(conn, schema, slot_id, "answering a request", (query, values))


async def listen(conn: Connection, channel: str) -> None:
    """Listen on a channel; raise TargetLost if the connection broke."""
    with target_errors("listening"):
        await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))


async def wait_for_call(conn: Connection, timeout_s: float) -> bool:
    """Return after a notification on a channel that the session listens to, or, False, when the time is over."""
    is_called = False
    with target_errors("listening"):
        async for _ in conn.notifies(timeout=timeout_s, stop_after=1):
            is_called = True
    return is_called
