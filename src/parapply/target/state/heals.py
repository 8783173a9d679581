"""The state of a slot that is healed: nothing is known from the first change on, and all again after the last.

In: a control session that holds the lease, the schema's name, a slot_id. Out: rows of the state.
A watermark of 0/0 says that a heal was begun and is not complete: every slot starts behind it, so that no daemon starts
(`source/refusals.py`), and no reader takes the target for a state of the source.
Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.model import format_lsn
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.schema import gone, in_schema
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from parapply.target.session.settings import Connection

_REASON = "`parapply heal` was begun and is not complete"


async def begin(conn: Connection, schema: str, slot_id: int) -> None:
    """Take the watermark back, and forget all that is recorded of the slot's transactions."""
    query = in_schema(
        "UPDATE {s}.slots SET begin_lsn = '0/0', lowest_lsn = '0/0', highest_lsn = '0/0', confirmed_flush_lsn = NULL,"
        " state = $2, reason = $3, updated_at = pg_catalog.clock_timestamp() WHERE slot_id = $1::int RETURNING 1",
        schema,
    )
    with target_errors("noting that the slot is healed"):
        async with conn.transaction():
            if not await rows(conn, query, [slot_id, DaemonState.LOST, _REASON]):
                raise gone(slot_id)
            for table in ("applied", "undecided", "committed_prepared"):
                await rows(conn, in_schema(f"DELETE FROM {{s}}.{table} WHERE slot_id = $1::int", schema), [slot_id])  # noqa: S608


async def finish(  # noqa: PLR0913  the columns of a row
    conn: Connection,
    schema: str,
    slot_id: int,
    *,
    lsn: int,
    timeline: int,
    publications: Sequence[str],
    source_oids: Collection[int],
) -> None:
    """Note that the target has all tables as of an LSN, where the slot begins; inside a transaction.

    Args:
        conn: control session.
        schema: of the state.
        slot_id: slot.
        lsn: of the snapshot that all tables were compared with.
        timeline: of the publisher.
        publications: that were compared.
        source_oids: tables that were compared or copied, by the publisher's OIDs; others stay as they are noted.
    """
    slots = in_schema(
        "UPDATE {s}.slots SET begin_lsn = $2::pg_lsn, lowest_lsn = $2::pg_lsn, highest_lsn = $2::pg_lsn,"
        " confirmed_flush_lsn = $2::pg_lsn, source_lsn = $2::pg_lsn, lag_s = 0,"
        " timeline = $3::int, publications = $4::text[], state = $5, reason = $6,"
        " updated_at = pg_catalog.clock_timestamp() WHERE slot_id = $1::int RETURNING 1",
        schema,
    )
    tables = in_schema(
        "UPDATE {s}.copies SET state = 'copied', start_lsn = $2::pg_lsn, reason = ''"
        " WHERE slot_id = $1::int AND source_oid = ANY ($3::bigint[])",
        schema,
    )
    with target_errors("noting that the slot is healed"):
        values = [timeline, list(publications), DaemonState.STOPPED, "`parapply heal` is complete"]
        if not await rows(conn, slots, [slot_id, format_lsn(lsn), *values]):
            raise gone(slot_id)
        await rows(conn, tables, [slot_id, format_lsn(lsn), list(source_oids)])
