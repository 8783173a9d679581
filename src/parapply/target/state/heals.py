"""The state of a slot that is healed: nothing is known from the first change on, and all again after the last.

In: a control session that holds the lease, the schema's name, a slot_id. Out: rows of the state.
A watermark of 0/0 says that a heal was begun and is not complete: every slot starts behind it, so that no daemon starts
(`source/refusals.py`), and no reader takes the target for a state of the source.
Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parapply.model import format_lsn, parse_lsn
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.display import DATED
from parapply.target.state.schema import gone, in_schema, state_rows, update_slot
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from parapply.target.session.settings import Connection

_REASON = "a heal was begun and is not complete"
#: Microseconds since 1970-01-01 UTC as timestamptz, exact.
_TIME = "('1970-01-01 00:00:00+00'::timestamptz + $2::bigint * '1 microsecond'::interval)"


class HealNotes(NamedTuple):
    """Facts by which a daemon decides if it may heal."""

    source_started_us: int | None  # of the publisher that was last known to have all; since 1970-01-01 UTC
    heal_lsn: int  # where the publisher was when the last heal began; 0: there was none
    healed_s: float | None  # seconds since the daemon last healed the slot, or failed to


async def notes(conn: Connection, schema: str, slot_id: int) -> HealNotes:
    """Return what is noted."""
    query = (
        "SELECT (extract(epoch FROM source_started_at) * 1000000)::bigint, COALESCE(heal_lsn, '0/0')::text,"
        " extract(epoch FROM pg_catalog.clock_timestamp() - healed_at)::float8 FROM {s}.slots WHERE slot_id = $1::int"
    )
    found = await state_rows(conn, schema, "reading what is noted of heals", query, [slot_id])
    if not found:
        raise gone(slot_id)
    started_us, lsn, healed_s = found[0]
    return HealNotes(started_us, parse_lsn(lsn), healed_s)


async def note_source(conn: Connection, schema: str, slot_id: int, started_us: int) -> None:
    """Note when the publisher's server had started that has all that the target has.

    Called only once that is proved: a server that was put back to an older state has started again since.
    """
    query = "UPDATE {s}.slots SET source_started_at = " + _TIME + " WHERE slot_id = $1::int RETURNING 1"  # noqa: S608
    await update_slot(conn, schema, "noting the publisher's start", query, [slot_id, started_us])


async def note_end(conn: Connection, schema: str, slot_id: int) -> None:
    """Note that a heal by the daemon has ended now, well or not."""
    query = "UPDATE {s}.slots SET healed_at = pg_catalog.clock_timestamp() WHERE slot_id = $1::int RETURNING 1"
    await update_slot(conn, schema, "noting the end of a heal", query, [slot_id])


async def begin(  # noqa: PLR0913  the columns of a row
    conn: Connection, schema: str, slot_id: int, *, source_lsn: int, source_started_us: int, state: DaemonState
) -> None:
    """Take the watermark back, and forget all that is recorded of the slot's transactions.

    `source_lsn` is of the snapshot that the target is to equal, `source_started_us` the start of the server that gave
    it, since 1970-01-01 UTC. The state is lost, or healing where the daemon does it.
    """
    query = in_schema(
        "UPDATE {s}.slots SET begin_lsn = '0/0', lowest_lsn = '0/0', highest_lsn = '0/0', confirmed_flush_lsn = NULL,"  # noqa: S608
        " source_started_at = " + _TIME + ", heal_lsn = $3::pg_lsn, state = $4, reason = $5, lacks_origins = false,"
        f" {DATED} WHERE slot_id = $1::int RETURNING 1",
        schema,
    )
    with target_errors("noting that the slot is healed"):
        async with conn.transaction():
            if not await rows(conn, query, [slot_id, source_started_us, format_lsn(source_lsn), state, _REASON]):
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

    The LSN is of the snapshot that all tables were compared with. Tables of other OIDs of the publisher than those that
    were compared or copied count as not published.
    """
    slots = in_schema(
        "UPDATE {s}.slots SET begin_lsn = $2::pg_lsn,"  # noqa: S608  only our own text
        " lowest_lsn = $2::pg_lsn, highest_lsn = $2::pg_lsn,"
        " confirmed_flush_lsn = $2::pg_lsn, source_lsn = $2::pg_lsn, n_forgotten = 0,"
        " timeline = $3::int, publications = $4::text[], state = $5, reason = $6,"
        f" {DATED} WHERE slot_id = $1::int RETURNING 1",
        schema,
    )
    tables = in_schema(
        "UPDATE {s}.copies SET state = 'copied', start_lsn = $2::pg_lsn, reason = ''"
        " WHERE slot_id = $1::int AND source_oid = ANY ($3::bigint[])",
        schema,
    )
    others = in_schema(
        "UPDATE {s}.copies SET published_by = CASE state WHEN 'copied' THEN '' ELSE published_by END,"
        " start_lsn = LEAST(start_lsn, $3::pg_lsn)"
        " WHERE slot_id = $1::int AND state <> 'waiting' AND source_oid <> ALL ($2::bigint[])",
        schema,
    )
    with target_errors("noting that the slot is healed"):
        values = [timeline, list(publications), DaemonState.STOPPED, "`parapply heal` is complete"]
        if not await rows(conn, slots, [slot_id, format_lsn(lsn), *values]):
            raise gone(slot_id)
        await rows(conn, tables, [slot_id, format_lsn(lsn), list(source_oids)])
        await rows(conn, others, [slot_id, list(source_oids), format_lsn(lsn)])
