"""Asks for a transaction to be skipped, and waits for the outcome: the operator's side of `skips`.

In: a session on the target. Out: the request's outcome. A daemon that runs answers within about a second; without one
the request waits on the target for the next.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from parapply.errors import TargetRefused
from parapply.model import format_lsn, parse_lsn
from parapply.target.session import lease
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.copies import notify
from parapply.target.state.schema import in_schema

if TYPE_CHECKING:
    from parapply.target.session.settings import Connection

_POLL_S = 0.1
#: Seconds for the daemon's answer at least: it looks once a second, and cannot answer while it commits the transaction.
_ANSWER_S = 5.0
_PASSED_HINT = (
    "only a transaction that has not been applied can be skipped; look for its end LSN in the daemon's error, in "
    "`parapply status` or `parapply conflicts list`"
)


class SkipRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its outcome."""

    lsn: str
    outcome: str  # requested (no daemon runs), unanswered (one runs and cannot say yet), accepted, skipped
    remote_xid: int | None  # once skipped
    kept: int  # changes in the history, once skipped


async def ask(  # noqa: PLR0913  who, which, how long
    conn: Connection, schema: str, slot_id: int, lsn: int, wait_s: float, *, source_lsn: int | None
) -> SkipRequest:
    """Ask for the transaction that ends at an LSN to be skipped; `conn` is in autocommit mode.

    Wait `wait_s` until a running daemon has skipped it, or a little for its answer in any case. Without the LSN where
    the publisher's WAL ends, the daemon's last record of it counts.

    Raise TargetRefused if it has been applied, or no transaction can end there yet.
    """
    passed = in_schema(
        "SELECT $2::pg_lsn <= s.lowest_lsn OR EXISTS (SELECT FROM {s}.applied AS a WHERE a.slot_id = s.slot_id AND"
        " ($2::pg_lsn <= a.low_lsn OR ($2::pg_lsn BETWEEN a.first_lsn AND a.end_lsn"
        " AND (a.members IS NULL OR $2::pg_lsn = ANY (a.members))))) FROM {s}.slots AS s WHERE s.slot_id = $1::int",
        schema,
    )
    write = in_schema(
        "INSERT INTO {s}.skips (slot_id, lsn) VALUES ($1::int, $2::pg_lsn) ON CONFLICT (slot_id, lsn) DO NOTHING",
        schema,
    )
    values = [slot_id, format_lsn(lsn)]
    with target_errors("asking for a transaction to be skipped"):
        known = await _read(conn, schema, slot_id, lsn)
        if known is None or known.outcome == "passed":
            # Before the request, because a daemon that applies it in the meantime makes it passed.
            ((has_passed,),) = await rows(conn, passed, values)
            if has_passed or known is not None:
                raise _has_passed(lsn)
            await _check_end(conn, schema, slot_id, lsn, source_lsn)
        async with conn.transaction():
            await rows(conn, write, values)
            await notify(conn, slot_id)
    return await _wait(conn, schema, slot_id, lsn, wait_s)


async def _check_end(conn: Connection, schema: str, slot_id: int, lsn: int, source_lsn: int | None) -> None:
    """Refuse an LSN that the publisher has not reached: the request would wait for ever, or for another transaction."""
    seen = in_schema(
        "SELECT GREATEST(s.source_lsn, s.highest_lsn, (SELECT pg_catalog.max(c.remote_lsn) FROM {s}.conflicts AS c"
        " WHERE c.slot_id = s.slot_id))::text FROM {s}.slots AS s WHERE s.slot_id = $1::int",
        schema,
    )
    hint = "give the end LSN as the daemon's error, `parapply status` or `parapply conflicts list` shows it"
    if source_lsn is None:
        ((text,),) = await rows(conn, seen, [slot_id])
        source_lsn, hint = parse_lsn(text), f"{hint}; with --source the publisher is asked, which may be further by now"
    if lsn > source_lsn:
        raise TargetRefused(
            f"no transaction ends at {format_lsn(lsn)}: the publisher's WAL ends at {format_lsn(source_lsn)}", hint=hint
        )


async def take_back(conn: Connection, schema: str, slot_id: int, lsn: int) -> bool:
    """Take back a request that was not carried out yet; return whether one existed."""
    query = in_schema(
        "DELETE FROM {s}.skips WHERE slot_id = $1::int AND lsn = $2::pg_lsn AND outcome IN ('requested', 'accepted')"
        " RETURNING 1",
        schema,
    )
    with target_errors("taking back a request to skip"):
        async with conn.transaction():
            was_wanted = bool(await rows(conn, query, [slot_id, format_lsn(lsn)]))
            await notify(conn, slot_id)
    return was_wanted


async def _wait(conn: Connection, schema: str, slot_id: int, lsn: int, wait_s: float) -> SkipRequest:
    began_s = time.monotonic()
    while True:
        with target_errors("reading what became of a request to skip"):
            found = await _read(conn, schema, slot_id, lsn)
        if found is None:
            raise TargetRefused(
                f"the request to skip {format_lsn(lsn)} is gone: another command took it back, or the publisher has"
                " another history since",
                hint="ask again if a transaction stops the daemon",
            )
        if found.outcome == "passed":
            raise _has_passed(lsn)
        has_daemon = any(holder.is_leader for holder in await lease.holders(conn, slot_id))
        waited_s = time.monotonic() - began_s
        is_accepted = found.outcome == "accepted"
        # The one that has accepted it may be connecting again, to have a large transaction sent once more.
        is_answered = waited_s >= wait_s if is_accepted else not has_daemon
        if found.outcome == "skipped" or is_answered:
            return found
        if found.outcome == "requested" and waited_s >= max(wait_s, _ANSWER_S):
            return msgspec.structs.replace(found, outcome="unanswered")
        await asyncio.sleep(_POLL_S)


async def _read(conn: Connection, schema: str, slot_id: int, lsn: int) -> SkipRequest | None:
    query = in_schema(
        "SELECT outcome, remote_xid, (SELECT pg_catalog.count(*) FROM {s}.conflicts AS c WHERE c.slot_id = r.slot_id"
        " AND c.remote_lsn = r.lsn AND c.conflict_type = 'skipped') FROM {s}.skips AS r"
        " WHERE slot_id = $1::int AND lsn = $2::pg_lsn",
        schema,
    )
    found: list[tuple[Any, ...]] = await rows(conn, query, [slot_id, format_lsn(lsn)])
    if not found:
        return None
    outcome, xid, kept = found[0]
    return SkipRequest(lsn=format_lsn(lsn), outcome=outcome, remote_xid=xid, kept=kept)


def _has_passed(lsn: int) -> TargetRefused:
    return TargetRefused(
        f"{format_lsn(lsn)} has passed: the transaction that ends there has been applied, or there is none",
        hint=_PASSED_HINT,
    )
