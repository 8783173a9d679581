"""Check that the publisher still has the transactions recorded on the target. Asked where its slot does not say so.

A slot behind the watermark is nothing special: it forgets reports when its server crashes (trap T-4), and the last ones
may never have come. But a publisher that was put back to an older state has such a slot, too, and once it has written
past the watermark, its LSNs name other transactions: they would be left out. So the changes behind the watermark are
looked at without being consumed: the last transaction of each record must be there, at its end LSN and with its commit
time, and none after the last one (without a record: after the slot's begin), where only keep-alives have moved the
watermark.

Source: PostgreSQL manual, "Replication Management Functions"; `src/backend/replication/logical/logical.c`: the LSN of
what ends a transaction is its end LSN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psycopg

from parapply.errors import SlotBusy, SlotLost
from parapply.model import format_lsn
from parapply.source.slot import read_slot, source_errors, take_bytes
from parapply.wire.decode import decode
from parapply.wire.messages import Commit, CommitPrepared, Prepare, RollbackPrepared, StreamCommit, StreamPrepare

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, LiteralString, TypeAlias

    from parapply.source.slot import Connection

    Cursor: TypeAlias = psycopg.AsyncRawCursor[tuple[Any, ...]]

#: Bytes of WAL that are decoded at most: the publisher keeps all changes in a file first. WAL before them is passed
#: with a copy of the slot, for which it is only read.
_LIMIT_BYTES: Final = 1 << 30
#: Bytes decoded before the end of the first transaction looked for. Its commit record, which has less, begins in them.
_BEFORE_BYTES: Final = 1 << 24
#: Classes of SQLSTATE that say the connection, or the server behind it, is going.
_GOING: Final = ("08", "57P")

#: server_version_num of the first publisher that sends no COMMIT PREPARED without its PREPARE.
EACH_NOTED_SINCE: Final = 180000
# Of what ends a transaction: C, P, K and r. A P that comes twice, again with its K, is of before the slot had two_phase
# (trap T-58): the K alone has a record. Without its K it comes once, behind all others here, so that it takes the place
# of none.
_QUERY: LiteralString = """
    SELECT data
      FROM (SELECT lsn, data,
                   kind = 80 AND pg_catalog.count(*) OVER (PARTITION BY xid::text, kind) > 1 AS is_late
              FROM pg_catalog.pg_logical_slot_peek_binary_changes($1::name, $2::pg_lsn, NULL, VARIADIC $3::text[]),
                   pg_catalog.get_byte(data, 0) AS kind
             WHERE kind IN (67, 80, 75, 114)) AS found
     WHERE lsn = ANY ($4::pg_lsn[]) OR lsn > $5::pg_lsn AND NOT is_late
     ORDER BY pg_catalog.get_byte(data, 0) = 80 AND lsn <> ALL ($4::pg_lsn[]), lsn LIMIT $6"""


async def check(  # noqa: PLR0913
    conn: Connection,
    slot_name: str,
    slot_lsn: int,
    options: Sequence[tuple[str, str]],
    *,
    begin_lsn: int,
    low_lsn: int,
    recorded: Sequence[tuple[int, int]],
) -> str:
    """Refuse a publisher that does not have the recorded transactions.

    Args:
        conn: plain session on the publisher.
        slot_name: of the slot, which no session reads.
        slot_lsn: where it is.
        options: pgoutput's, without streaming; two_phase only if the slot has it.
        begin_lsn: where the slot was begun; transactions that end up to there are not looked at.
        low_lsn: everything that ends up to there is on the target.
        recorded: end LSN and commit time (microseconds since 2000-01-01 UTC) of the last transaction of each record:
            the newest one up to the watermark, and all after it.

    Returns:
        Why the publisher was not looked at; empty: it has them.

    Raises:
        SlotLost: one is missing, or there is another.
        SourceRefused: the publisher cannot decode from the slot on.
        SlotBusy: another process reads the slot, or has moved it.
    """
    awaited = {end_lsn: time_us for end_lsn, time_us in recorded if end_lsn > slot_lsn}
    # That one proves all before it. Below the watermark there may be others, of a record above it: its transactions
    # came again, and were left out up to the end of a range, to which the watermark has moved.
    last_lsn = max([slot_lsn, begin_lsn, *[end_lsn for end_lsn, _ in recorded]])
    # The publisher ends with the record in which that LSN lies. A stream from there leaves out what ends so: its record
    # begins before.
    up_to_lsn = max([low_lsn, *awaited])
    words = [word for pair in options for word in pair]
    awaited_ends = [format_lsn(end_lsn) for end_lsn in awaited]
    values = [format_lsn(up_to_lsn), words, awaited_ends, format_lsn(last_lsn), len(awaited) + 1]
    copy = ""
    with source_errors("looking for what is applied"):
        async with psycopg.AsyncRawCursor(conn) as cursor:
            if up_to_lsn - slot_lsn > _LIMIT_BYTES:
                from_lsn = min([last_lsn, *awaited]) - _BEFORE_BYTES
                # A copy has no two_phase.
                if up_to_lsn - from_lsn > _LIMIT_BYTES or "two_phase" in words:
                    return "the slot is too far behind"
                copy = f"parapply_history_{conn.info.backend_pid}"
                if why := await _copy(cursor, slot_name, copy, from_lsn):
                    return f"the slot is far behind, and was not copied: {why}"
            try:
                async with conn.transaction(force_rollback=True):
                    await take_bytes(conn)
                    await cursor.execute(_QUERY, [copy or slot_name, *values], binary=True)
                    messages = [bytes(data) for (data,) in await cursor.fetchall()]
            finally:
                await _drop(cursor, copy)
    ends = [(message[:1], *end_of(message)) for message in messages]
    found = {end_lsn: time_us for _, end_lsn, time_us in ends}
    undecided = {end_lsn for kind, end_lsn, _ in ends if kind == b"P"} - awaited.keys()
    others = {end_lsn for end_lsn, _ in found.items() ^ awaited.items()}
    if conn.info.server_version >= EACH_NOTED_SINCE and ("origin", "none") not in options:
        # Its COMMIT PREPARED fails, should its PREPARE be of another history. Others would pass it.
        others -= undecided
    if not others:
        return "a transaction was prepared before the slot sent such ones, and is not decided" if undecided else ""
    facts = await read_slot(conn, slot_name)
    if facts is not None and facts.confirmed_flush_lsn != slot_lsn:
        # The query of a killed daemon that moves it may outlive the session that had the claim.
        raise SlotBusy(f"source: slot {slot_name!r} was moved while its history was looked at")
    lsn = min(others)
    what = (
        "sends no transaction, or another one, that ends" if lsn in awaited else "sends another transaction that ends"
    )
    raise SlotLost(
        f"slot {slot_name!r} is at {format_lsn(slot_lsn)}, the target has applied it up to {format_lsn(up_to_lsn)}, "
        f"and the publisher {what} at {format_lsn(lsn)}: it was put back to an older state, and has written since",
        hint="bring the newer state of the publisher back, or `parapply heal` makes another slot and copies what "
        "differs; if source.publications or source.origin was changed since the last run, start once as it was",
    )


async def _copy(cursor: Cursor, slot_name: str, copy: str, lsn: int) -> str:
    """Make a temporary copy of a slot that is at a later LSN, and return why that cannot be; empty: it is made."""
    try:
        await cursor.execute("SELECT pg_catalog.pg_copy_logical_replication_slot($1, $2, true)", [slot_name, copy])
        await cursor.execute("SELECT pg_catalog.pg_replication_slot_advance($1, $2)", [copy, format_lsn(lsn)])
    except psycopg.Error as error:
        if (error.sqlstate or "08").startswith(_GOING):
            raise
        await _drop(cursor, copy)
        return " ".join(str(error).split())
    return ""


async def _drop(cursor: Cursor, copy: str) -> None:
    """Drop a copy, if one was named and made; it does not outlive the connection."""
    if copy and not cursor.connection.broken:
        query = "SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots"
        await cursor.execute(f"{query} WHERE slot_name = $1 AND temporary", [copy])


def end_of(message: bytes) -> tuple[int, int]:
    """Return the end LSN and the time (microseconds since 2000-01-01 UTC) of a message that ends a transaction."""
    end = decode(message)
    if isinstance(end, Commit | CommitPrepared | StreamCommit):
        return end.end_lsn, end.commit_time_us
    if isinstance(end, Prepare | StreamPrepare):
        return end.end_lsn, end.prepare_time_us
    assert isinstance(end, RollbackPrepared), "no other one does"
    return end.rollback_end_lsn, end.rollback_time_us
