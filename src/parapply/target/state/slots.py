"""Progress of a slot on the target: read it at start, record it with every batch, advance it durably.

In: a control session (autocommit, pinned), the name of the state schema, LSNs as integers. Out: `SlotState`, SQL texts.
All LSNs are commit END LSNs (trap T-3). Must never be asked for progress before `lease.fence` has returned: until
then a session of an earlier daemon may still commit (trap T-14).

Source: traps T-1 to T-16; PostgreSQL manual, "Asynchronous Commit".
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import psycopg
from psycopg import sql

from parapply import failpoints
from parapply.driver import run_prepared
from parapply.errors import SourceRefused, TargetRefused
from parapply.model import POSTGRES_EPOCH_US, format_lsn, lsn_text, parse_lsn
from parapply.target.session.settings import rows, target_error, target_errors
from parapply.target.state.display import (
    LAG_NOW,
    DaemonRow,
    TableRow,
    WorkerRow,
    set_state,
    write_daemon,
    write_tables,
    write_workers,
)
from parapply.target.state.schema import (
    check_schema,
    drop_schema,
    ensure_schema,
    gone,
    has_schema,
    in_schema,
    state_rows,
    update_slot,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.target.session.settings import Connection

__all__ = [
    "DaemonRow", "NewSlot", "SlotProgress", "SlotState", "TableRow", "WorkerRow", "advance", "check_may_drop",
    "check_schema", "create", "drop_schema", "drop_slot_state", "ensure_schema", "find_slot", "find_slots", "flush",
    "has_schema", "in_schema", "load", "record_sql", "set_state", "set_timeline", "write_daemon", "write_tables",
    "write_workers",
]  # fmt: skip

#: A source commit time, microseconds since 2000-01-01 UTC, as timestamptz. Exact: a float holds 2^53
#: of them, which is 285 years.
_TIME = "('2000-01-01 00:00:00+00'::timestamptz + {}::bigint * '1 microsecond'::interval)"


def wire_time_sql(number: str) -> str:
    """Return the timestamptz of a time on the wire (microseconds since 2000-01-01 UTC); NULL stays NULL."""
    return _TIME.format(number)


def stamp_sql(lsn: str, time: str) -> str:
    """Return the call that has the transaction of a session with an origin commit, or be prepared, at a wire time.

    PostgreSQL logs the time that such a session had last, 2000-01-01 at first, whether it tracks commit timestamps or
    not. Readers of the target's WAL take it for the commit time (`XactLogCommitRecord`, `DecodeCommit`).
    """
    return f"pg_catalog.pg_replication_origin_xact_setup({lsn}::pg_lsn, {wire_time_sql(time)})"


class StatePlace(NamedTuple):
    """Where the state of a slot is on the target."""

    schema: str
    slot_name: str
    slot_id: int


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    """Transactions committed on the target, as read at start."""

    slot_id: int
    slot_name: str
    system_identifier: str
    timeline: int
    begin_lsn: int  # where the slot was begun; transactions that end there or before were never asked for
    low_lsn: int  # everything that ends here or before is committed
    # Every transaction that ends in [first, last] is also committed. They lie apart, in order, because one stuck
    # transaction in relaxed order can leave very many, and each transaction that comes again is looked for in them.
    ranges: tuple[tuple[int, int], ...]
    members: frozenset[int]  # end LSNs of further committed transactions
    recorded: tuple[tuple[int, int], ...] = ()  # end LSN and commit time of the last transaction of each record
    has_forgotten: bool = False  # something was applied, and no record of it is left: from before the last one was kept
    confirmed_flush_lsn: int = 0  # reported to the publisher; the watermark may be reported since
    copied_lsn: int = 0  # of the publisher's latest snapshot from which a table was copied, or is; 0: no copy
    publications: tuple[str, ...] = ()  # that the stream was last asked for
    lacks_origins: bool = False  # rows that were replicated to the publisher were once left out
    source_started_us: int | None = None  # of the publisher that was last known to have all, since 1970-01-01 UTC
    lag_s: float = 0.0  # as it was read, at most

    @property
    def resume_lsn(self) -> int:
        """Return where START_REPLICATION begins; never 0/0, because the publisher forgets reports (T-4)."""
        return self.low_lsn

    @property
    def high_lsn(self) -> int:
        """Return the LSN after which nothing is committed here."""
        return max([self.low_lsn, *self.members, *[last for _, last in self.ranges]])

    def is_applied(self, end_lsn: int) -> bool:
        """Return whether the source transaction that ends at `end_lsn` is committed here."""
        if end_lsn <= self.low_lsn or end_lsn in self.members:
            return True
        at = bisect_right(self.ranges, end_lsn, key=itemgetter(0))
        return at > 0 and end_lsn <= self.ranges[at - 1][1]


class NewSlot(msgspec.Struct, frozen=True, kw_only=True):
    """The first row of a slot."""

    slot_name: str
    system_identifier: str
    timeline: int
    database_name: str  # on the publisher
    publications: tuple[str, ...]
    low_lsn: int  # where the slot starts: what ends before is on the target already, or never will be
    commit_order: str
    workers: int


class SlotProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Values that `advance` writes. None leaves a display column as it is."""

    low_lsn: int
    high_lsn: int
    confirmed_flush_lsn: int | None = None  # last reported to the publisher, which is the previous low_lsn
    source_lsn: int | None = None
    last_commit_time_us: int | None = None  # publisher's clock, microseconds since 2000-01-01 UTC
    lag_s: float | None = None
    state: str
    reason: str = ""
    reading: str | None = None  # how the slot is read, and why so
    shown_every_s: float = 1.0  # until it is written again


def record_sql(schema: str, *, stamps: bool = False) -> str:
    """Return the INSERT that a worker sends as the FIRST statement of every target transaction.

    First, because a second apply of the same transactions then blocks on this row's key and fails with 23505
    instead of writing rows twice (T-14); in the same transaction, so that rows and record are one (T-11).

    Parameters, in text format: $1 slot_id; $2 end_lsn; $3 first_lsn; $4 members, a pg_lsn[] literal or NULL for
    "all that end from first_lsn to end_lsn"; $5 low_lsn; $6 source commit time of the last one in microseconds
    since 2000-01-01 UTC, the number on the wire; $7 number of source transactions.

    Args:
        schema: of the state.
        stamps: the session has a replication origin: have the transaction commit with the source's commit time, as
            the built-in subscription does, so that the last update can win.
    """
    if stamps:
        text = (
            "INSERT INTO {s}.applied (slot_id, end_lsn, first_lsn, members, low_lsn, commit_time, n_transactions)"  # noqa: S608  only our own text
            " SELECT $1::int, $2::pg_lsn, $3::pg_lsn, $4::pg_lsn[], $5::pg_lsn, "
            + _TIME.format("$6")
            + ", $7::int FROM "
            + stamp_sql("$2", "$6")
        )
        return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)
    text = (
        "INSERT INTO {s}.applied (slot_id, end_lsn, first_lsn, members, low_lsn, commit_time, n_transactions)"  # noqa: S608  only our own text
        " VALUES ($1::int, $2::pg_lsn, $3::pg_lsn, $4::pg_lsn[], $5::pg_lsn, " + _TIME.format("$6") + ", $7::int)"
    )
    return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)


async def load(conn: Connection, schema: str, slot_name: str, system_identifier: str | None) -> SlotState | None:
    """Read what is committed here for a slot; None if the target knows nothing of it.

    Raises:
        SourceRefused: the state belongs to a slot of the same name in another cluster than the one that is given (F13),
            or states of several clusters exist.
        TargetRefused: the state schema is not there, or may not be read.
    """
    # One statement, hence one snapshot: between two, an applied row could be pruned into a watermark not yet seen.
    query = (
        "SELECT slot_id, system_identifier, timeline, lowest_lsn, batch.first_lsn, batch.end_lsn,"  # noqa: S608
        " batch.members::text[], batch.low_lsn, confirmed_flush_lsn, last_commit_time IS NOT NULL,"
        " (extract(epoch FROM batch.commit_time) * 1000000)::bigint, begin_lsn,"
        " (SELECT pg_catalog.max(start_lsn) FROM {s}.copies AS c WHERE c.slot_id = slots.slot_id"
        " AND c.state <> 'waiting'), (extract(epoch FROM source_started_at) * 1000000)::bigint, "
        + LAG_NOW
        + ", publications, lacks_origins FROM {s}.slots"
        " LEFT JOIN {s}.applied AS batch USING (slot_id) WHERE slot_name = $1 ORDER BY batch.end_lsn"
    )
    found = await state_rows(conn, schema, "reading the state", query, [slot_name])
    others = sorted({row[1] for row in found if row[1] != (system_identifier or found[0][1])})
    if others:
        raise SourceRefused(
            f"slot {slot_name!r} was applied here from the cluster with system identifier {', '.join(others)}; "
            f"source.dsn leads to the cluster {system_identifier or found[0][1]}",
            hint="correct source.dsn; to follow both clusters give the slots different names or state schemas;"
            " after a pg_upgrade of the publisher `parapply drop`, without --yes, removes the state",
        )
    return _slot_state(slot_name, found) if found else None


async def newest_commit_time_us(conn: Connection, schema: str, slot_id: int) -> int | None:
    """Return the commit time of the last transaction applied, on the publisher's clock; None if none is recorded.

    Microseconds since 2000-01-01 UTC. The daemon must not be applying.

    Raises:
        TargetRefused: the state may not be read.
    """
    query = (
        "SELECT (EXTRACT(epoch FROM pg_catalog.max(t.at)) * 1000000)::bigint FROM ("
        "SELECT last_commit_time FROM {s}.slots WHERE slot_id = $1::int UNION ALL"
        " SELECT commit_time FROM {s}.applied WHERE slot_id = $1::int) AS t (at)"
    )
    ((unix_us,),) = await state_rows(conn, schema, "reading the state", query, [slot_id])
    return None if unix_us is None else int(unix_us) - POSTGRES_EPOCH_US


async def find_slot(conn: Connection, schema: str, slot_name: str) -> int:
    """Return the id of a slot's state.

    Raises:
        TargetRefused: the target knows nothing of the slot, or of two of that name.
    """
    found = await find_slots(conn, schema, slot_name)
    if not found:
        raise TargetRefused(f"the target knows nothing of slot {slot_name!r}", hint="run `parapply init`")
    if len(found) > 1:
        raise TargetRefused(
            f"the target has states of several slots {slot_name!r}, of different clusters",
            hint="give each its own state schema (target.state_schema)",
        )
    return found[0]


async def find_slots(conn: Connection, schema: str, slot_name: str) -> list[int]:
    """Return the ids of the states of a name, of whatever cluster."""
    query = "SELECT slot_id FROM {s}.slots WHERE slot_name = $1"
    return [int(slot_id) for (slot_id,) in await state_rows(conn, schema, "reading the state", query, [slot_name])]


def _slot_state(slot_name: str, found: Sequence[tuple[Any, ...]]) -> SlotState:
    slot_id, system_identifier, timeline, lowest = found[0][:4]
    confirmed, has_applied = found[0][8:10]
    batches = [row[4:8] for row in found if row[5] is not None]
    low_lsn = max([parse_lsn(lowest), *(parse_lsn(low) for *_, low in batches)])
    ranges = []
    members: set[int] = set()
    for first, end, ends, _ in batches:
        if ends is None:
            ranges.append((parse_lsn(first), parse_lsn(end)))
        else:
            members.update(parse_lsn(member) for member in ends)
    return SlotState(
        slot_id=slot_id,
        slot_name=slot_name,
        system_identifier=system_identifier,
        timeline=timeline,
        begin_lsn=parse_lsn(found[0][11]),
        low_lsn=low_lsn,
        ranges=apart([pair for pair in ranges if pair[1] > low_lsn]),
        members=frozenset(member for member in members if member > low_lsn),
        recorded=tuple([(parse_lsn(row[5]), row[10] - POSTGRES_EPOCH_US) for row in found if row[5] is not None]),
        has_forgotten=has_applied and not batches,
        confirmed_flush_lsn=parse_lsn(confirmed) if confirmed else 0,
        copied_lsn=parse_lsn(found[0][12] or "0/0"),
        source_started_us=found[0][13],
        lag_s=found[0][14],
        publications=tuple(found[0][15]),
        lacks_origins=found[0][16],
    )


def apart(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges in order, with those that overlap as one: what is applied again may have a hole that was not."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


async def create(conn: Connection, schema: str, slot: NewSlot) -> int:
    """Write the first row of a slot, durably (a control session commits synchronously), and return its slot_id.

    Raises:
        TargetRefused: the row exists, or a privilege is missing.
        TargetLost: the connection broke; check before trying again.
    """
    query = (
        "INSERT INTO {s}.slots (slot_name, system_identifier, timeline, database_name, publications, begin_lsn,"
        " lowest_lsn, highest_lsn, commit_order, workers, state) VALUES ($1, $2, $3::int, $4, $5::text[], $6::pg_lsn,"
        " $6::pg_lsn, $6::pg_lsn, $7, $8::int, 'stopped') RETURNING slot_id"
    )
    values = [slot.slot_name, slot.system_identifier, slot.timeline, slot.database_name, list(slot.publications)]
    values = [*values, format_lsn(slot.low_lsn), slot.commit_order, slot.workers]
    ((slot_id,),) = await state_rows(conn, schema, "creating the state of the slot", query, values)
    return int(slot_id)


async def advance(conn: Connection, schema: str, slot_id: int, progress: SlotProgress) -> None:
    """Move the watermark durably, and prune what it has passed but for the newest record.

    The newest record says by which transaction the publisher is known again (`source/history.py`).

    When this returns, everything that committed on this cluster before the call is durable, whatever
    synchronous_commit it used: WAL is one sequence, flushed in order, and this commit waits for the flush of its
    own record, which lies after theirs (T-1): a control session is pinned to synchronous_commit = on. So `low_lsn` may
    be reported to the publisher; and because an idle keep-alive's LSN is persisted here before it is reported, a slot
    ahead of the watermark always means a gap (T-8).

    The watermark never goes backwards. Only the control session writes this row: workers updating it would wait
    for each other against the commit order (T-16).

    Raises:
        TargetRefused: the slot's row is gone.
        TargetLost: the connection broke; what was and was not advanced is known after reading the state again.
    """
    values = (
        *(str(slot_id), format_lsn(progress.low_lsn), format_lsn(progress.high_lsn)),
        *(lsn_text(progress.confirmed_flush_lsn), lsn_text(progress.source_lsn), progress.last_commit_time_us),
        *(progress.lag_s, progress.state, progress.reason, progress.reading, progress.shown_every_s),
    )
    params = [None if value is None else str(value).encode() for value in values]
    try:
        if failpoints.armed == failpoints.PRUNING:
            async with conn.transaction():
                n_found = await run_prepared(conn, b"parapply_advance", _advance_query(schema), params)
                failpoints.probe(failpoints.PRUNING)
        else:
            n_found = await run_prepared(conn, b"parapply_advance", _advance_query(schema), params)
    except psycopg.Error as error:
        raise target_error(_ADVANCING, error) from error
    if not n_found:
        raise gone(slot_id)


_ADVANCING: Final = "advancing the watermark"


@cache
def _advance_query(schema: str) -> sql.Composed:
    return in_schema(
        "WITH moved AS (UPDATE {s}.slots SET lowest_lsn = GREATEST(lowest_lsn, $2::pg_lsn),"  # noqa: S608  only our own text
        " highest_lsn = GREATEST(highest_lsn, $2::pg_lsn, $3::pg_lsn),"
        " confirmed_flush_lsn = COALESCE($4::pg_lsn, confirmed_flush_lsn),"
        " source_lsn = COALESCE($5::pg_lsn, source_lsn),"
        " last_commit_time = COALESCE(" + _TIME.format("$6") + ", last_commit_time),"
        " lag_s = COALESCE($7::float8, lag_s), state = $8, reason = $9,"
        " reading = COALESCE($10, reading), shown_every_s = $11::float8, updated_at = pg_catalog.clock_timestamp()"
        " WHERE slot_id = $1::int RETURNING slot_id, lowest_lsn),"
        " pruned AS (DELETE FROM {s}.applied AS batch USING moved WHERE batch.slot_id = moved.slot_id"
        " AND batch.end_lsn < (SELECT pg_catalog.max(newest.end_lsn) FROM {s}.applied AS newest"
        " WHERE newest.slot_id = $1::int AND newest.end_lsn <= moved.lowest_lsn))"
        " SELECT lowest_lsn FROM moved",
        schema,
    )


async def set_timeline(conn: Connection, schema: str, slot_id: int, timeline: int) -> None:
    """Note the timeline that the publisher has gone on to under a stream that continues.

    Raises:
        TargetRefused: the slot's row is gone.
    """
    query = "UPDATE {s}.slots SET timeline = $2::int WHERE slot_id = $1::int RETURNING 1"
    await update_slot(conn, schema, "noting the publisher's timeline", query, [slot_id, timeline])


async def flush(conn: Connection, schema: str, slot_id: int, low_lsn: int, high_lsn: int) -> None:
    """Move the watermark durably, with the guarantees of `advance` and nothing else that it does: one round trip.

    Raises:
        TargetRefused: the slot's row is gone.
        TargetLost: the connection broke; what was and was not advanced is known after reading the state again.
    """
    query = in_schema(
        "UPDATE {s}.slots SET lowest_lsn = GREATEST(lowest_lsn, $2::pg_lsn),"
        " highest_lsn = GREATEST(highest_lsn, $2::pg_lsn, $3::pg_lsn) WHERE slot_id = $1::int RETURNING slot_id",
        schema,
    )
    params = [b"%d" % slot_id, format_lsn(low_lsn).encode(), format_lsn(high_lsn).encode()]
    with target_errors(_ADVANCING):
        n_found = await run_prepared(conn, b"parapply_flush", query, params)
    if not n_found:
        raise gone(slot_id)


async def check_may_drop(conn: Connection, schema: str, slot_id: int) -> None:
    """Refuse what `drop_slot_state` would be refused, without waiting for rows that a prepared transaction holds.

    EXPLAIN checks the privileges of its statement and runs nothing.
    """
    with target_errors("dropping the state of the slot"):
        for query in _removals(schema):
            await rows(conn, sql.SQL("EXPLAIN ") + query, [slot_id])


async def drop_slot_state(conn: Connection, schema: str, slot_id: int) -> None:
    """Forget a slot. The lease must be held: a daemon that still runs would apply without a record."""
    with target_errors("dropping the state of the slot"):
        async with conn.transaction():
            for query in _removals(schema):
                await rows(conn, query, [slot_id])


def _removals(schema: str) -> list[sql.Composed]:
    shown = ("cutovers", "conflicts", "skips", "snapshots", "marks", "copies", "copy_parts", "ddl", "tables", "workers")
    return [
        *[in_schema(_OF_MIGRATION.replace("TABLE", table), schema) for table in ("migrations", "migration_items")],
        *[
            sql.SQL("DELETE FROM {} WHERE slot_id = $1::int").format(sql.Identifier(schema, table))
            for table in (*shown, "undecided", "committed_prepared", "applied", "slots")
        ],
    ]


_OF_MIGRATION: Final = (
    "DELETE FROM {s}.TABLE WHERE (slot_name, system_identifier) IN"
    " (SELECT slot_name, system_identifier FROM {s}.slots WHERE slot_id = $1::int)"
)
