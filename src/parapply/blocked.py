"""Sessions that wait for a lock, or, to make a slot, for the end of transactions: who, since when, and for whom.

In: an open session on either end. Out: `BlockedSession`, as one line for people and as a line of the log. The caller
turns psycopg's errors into ours.

Source: PostgreSQL manual, "pg_locks", "pg_stat_activity", "pg_prepared_xacts"; `SnapBuildWaitSnapshot` (snapbuild.c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg

from parapply.limits import BLOCKED_S, next_line_s
from parapply.logs import get_logger
from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Sessions by their pids, and by the slot's name that ends theirs; a DSN may give them another one. Leases are waited
#: for on purpose. A new slot waits for all that run when it begins, one after the other, so the oldest one is named:
#: by its number, which everyone may read.
_BLOCKED: Final = """
SELECT waiting.application_name, extract(epoch FROM pg_catalog.clock_timestamp() - CASE WHEN makes.slot
         THEN waiting.query_start
         ELSE coalesce((pg_catalog.to_jsonb(wanted) ->> 'waitstart')::timestamptz, waiting.query_start) END)::float8,
       makes.slot, wanted.relation::regclass::text, wanted.mode,
       holder.pid, holder.gid, holder.role, holder.application_name, holder.xact_start::text, holder.query_start::text
  FROM pg_catalog.pg_stat_activity AS waiting
  JOIN pg_catalog.pg_locks AS wanted ON wanted.pid = waiting.pid AND NOT wanted.granted
  CROSS JOIN LATERAL (SELECT wanted.locktype IN ('transactionid', 'virtualxid')
         AND waiting.query ~* 'create_(logical_)?replication_slot') AS makes (slot)
  LEFT JOIN LATERAL (
        SELECT a.pid, NULL::text, a.usename::text, a.application_name, a.xact_start, a.query_start,
               pg_catalog.age(a.backend_xid)
          FROM pg_catalog.pg_stat_activity AS a
         WHERE CASE WHEN makes.slot THEN a.backend_xid IS NOT NULL AND a.pid <> waiting.pid
                    ELSE a.pid = ANY (pg_catalog.pg_blocking_pids(waiting.pid)) END
        UNION ALL
        SELECT NULL, p.gid, p.owner::text, NULL, p.prepared, NULL, pg_catalog.age(p.transaction)
          FROM pg_catalog.pg_prepared_xacts AS p
         WHERE makes.slot OR EXISTS (
               SELECT FROM pg_catalog.pg_locks AS lock
                 JOIN pg_catalog.pg_locks AS own ON own.virtualtransaction = lock.virtualtransaction
                WHERE lock.pid IS NULL AND own.pid IS NULL AND own.transactionid = p.transaction
                  AND (lock.locktype, lock.database, lock.relation, lock.transactionid, lock.classid, lock.objid)
                      IS NOT DISTINCT FROM (wanted.locktype, wanted.database, wanted.relation, wanted.transactionid,
                                            wanted.classid, wanted.objid))
         ORDER BY 7 DESC NULLS LAST, 1 LIMIT 1)
    AS holder (pid, gid, role, application_name, xact_start, query_start, age) ON true
 WHERE wanted.locktype <> 'advisory' AND (waiting.pid = ANY ($1::int[])
       OR $2::text <> '' AND waiting.datname = pg_catalog.current_database() AND waiting.pid <> ALL ($3::int[])
          AND (waiting.application_name = pg_catalog.current_setting('application_name')
               OR waiting.application_name LIKE 'parapply %'
                  AND pg_catalog.right(waiting.application_name, pg_catalog.length($2::text)) = $2::text))
 ORDER BY 2 DESC"""


class BlockedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that waits, and the one that it waits for, as far as that can be seen."""

    session: str  # its application_name
    wait_s: float
    is_making_slot: bool  # it waits for transactions to end, and the holder is the oldest one
    relation: str | None
    mode: str
    pid: int | None  # of the holder; None: a prepared transaction, or it has just ended
    gid: str | None
    role: str | None
    application_name: str | None
    xact_start: str | None  # None also where the role may not see it
    query_start: str | None

    def line(self) -> str:
        """Return it for people, safe for a terminal."""
        what = f"{self.mode} on {self.relation}" if self.relation else self.mode
        if self.is_making_slot:
            what = "transactions that run on the publisher to end, because a new slot begins behind them"
        facts = (
            ("role", self.role),
            ("application", self.application_name),
            ("in a transaction since", self.xact_start),
            ("query since", self.query_start),
        )
        told = ", ".join(f"{name} {value}" for name, value in facts if value)
        who = f"prepared transaction {self.gid}" if self.gid else f"pid {self.pid}" if self.pid else "unknown"
        held = "the oldest" if self.is_making_slot else "held by"
        return printable(f"{self.session}: waits for {what}, for {self.wait_s:.0f} s; {held}: {who} ({told})")

    def log(self, end: str) -> None:
        """Write it to the log as a wait on an end."""
        get_logger().warning(
            "session_blocked",
            end=end,
            session=self.session,
            wait_s=round(self.wait_s, 1),
            reason="a slot is made" if self.is_making_slot else None,
            relation=self.relation,
            mode=self.mode,
            pid=self.pid,
            gid=self.gid,
            role=self.role,
            application_name=self.application_name,
            xact_start=self.xact_start,
            query_start=self.query_start,
        )


async def look(
    conn: psycopg.AsyncConnection[tuple[Any, ...]],
    *,
    pids: Sequence[int] = (),
    slot_name: str = "",
    but: Sequence[int] = (),
) -> list[BlockedSession]:
    """Return the sessions that wait now, the longest wait first; raise psycopg.Error if the server does not say it.

    They have `pids`, or are of this database and have the slot's names, but for `but`.
    """
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(_BLOCKED.encode(), [list(pids), slot_name, list(but)])
        found = await cursor.fetchall()
    names = BlockedSession.__struct_fields__
    return [BlockedSession(**dict(zip(names, row, strict=True))) for row in found if row[1] is not None]


class Telling:
    """Selects the waits to report: from `BLOCKED_S` on, then at growing intervals."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}

    def due(self, found: Iterable[BlockedSession]) -> Iterator[BlockedSession]:
        """Yield the waits to report now, among all present ones."""
        before, self._next_s = self._next_s, {}
        for one in found:
            next_s = self._next_s[one.session] = before.get(one.session, BLOCKED_S)
            if one.wait_s >= next_s:
                self._next_s[one.session] = next_line_s(one.wait_s)
                yield one
