"""Tables that hold a copy of the publisher's rows, and the LSN from which the stream applies to each of them.

A copy of a table holds the rows that a snapshot of the publisher shows. The snapshot has an LSN, the consistent point
of the slot that exported it: it shows every transaction whose commit record lies before that LSN and no other. So a
change of the table is applied exactly if its transaction's commit record lies at the LSN or after it. Tables copied at
different times differ in nothing but their LSN. (PostgreSQL keeps the same in pg_subscription_rel.)

| state   | meaning                                                    | a change of the table                       |
|---------|------------------------------------------------------------|---------------------------------------------|
| waiting | published, not copied, no copy of it is running; or paused | is skipped: a later copy will hold it       |
| copying | a copy as of start_lsn is running                          | before start_lsn skipped, else it must wait |
| copied  | the target has its rows as of start_lsn                    | before start_lsn skipped, else applied      |

The copy command holds the copy lock of the slot, so `copying` without a holder means that it was interrupted; the next
one takes a new snapshot, later than all that was received until then, and so the daemon may continue as if it were
`waiting`. A command that copies other tables notes it as waiting, with its start_lsn: it has rows of the copy.

In: a control session, the schema's name, a slot_id. Out: rows of `parapply.copies`.
Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from psycopg import sql

from parapply.errors import TargetRefused
from parapply.model import format_lsn
from parapply.plan.copy_starts import LEFT_OUT, Start
from parapply.target.session import lease
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.schema import in_schema, state_rows, struct_of
from parapply.vocabulary import SCHEMA_ONLY, CopyState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from parapply.plan.copy_starts import Known, Name
    from parapply.target.session.settings import Connection

#: Why a table waits that `parapply pause` has taken out of the stream.
PAUSED: Final = "paused: `parapply resume` copies it again"
#: Why a table waits that the configuration has left out.
WAS_SCHEMA_ONLY: Final = "mapping.schema_only has left its rows out"
#: Why a table waits that has the name of another, which is gone.
LACKS_INDEXES: Final = "an interrupted copy has dropped indexes of the target's table"


class CopyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    schema_name: str
    table_name: str
    state: CopyState
    start_lsn: int | None  # of the copy's snapshot; None as long as no copy has begun
    source_oid: int  # the publisher's, by which it is known after a rename
    reason: str = ""  # why it waits; empty: it is one of the first copy, or of a refresh
    rows: int | None = None  # so far, while it is copied
    size_bytes: int | None = None
    indexes: tuple[str, ...] = ()  # statements that make the indexes again which the copy has dropped
    published_by: str | None = None  # marks of the last look (`source/publishing.py`); None: none since it was copied

    @property
    def name(self) -> Name:
        """Return schema and table."""
        return self.schema_name, self.table_name

    @property
    def is_paused(self) -> bool:
        """Return whether `parapply pause` has taken it out of the stream, and no `resume` has begun."""
        return self.state == CopyState.WAITING and self.reason == PAUSED

    @property
    def is_schema_only(self) -> bool:
        """Return whether the configuration leaves its rows out."""
        return self.reason == SCHEMA_ONLY

    @property
    def is_late(self) -> bool:
        """Return whether it was published later, its rows seemed to be missing in the stream, and no copy was begun."""
        return self.state == CopyState.WAITING and self.reason not in {"", PAUSED, SCHEMA_ONLY}

    @property
    def is_begun(self) -> bool:
        """Return whether rows of the target are from a copy of it, to which a later copy may return without asking."""
        return self.state == CopyState.COPYING or (
            self.state == CopyState.WAITING and self.start_lsn is not None and not self.is_schema_only
        )

    @property
    def is_again(self) -> bool:
        """Return whether it was copied, and waits because changes of it may be missing: its rows came from the copy."""
        return self.is_late and self.start_lsn is not None


class PublishedChange(NamedTuple):
    """How a table is published now, and has not been at the last look."""

    source_oid: int
    before: str | None  # marks as they were read
    marks: str
    reason: str  # why changes of it may be missing; empty: none is


class Stamp(NamedTuple):
    """Differs when a row has changed: a later version has a higher xmin than any before, one that goes is missing."""

    is_listed: bool
    n_tables: int
    versions: int  # sum of xmin


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """The known state of a slot's tables."""

    is_listed: bool  # only tables that have a row are applied; else those without one are applied from the slot's start
    is_running: bool  # a session holds the copy lock
    tables: tuple[CopyRow, ...] = ()
    stamp: Stamp = Stamp(is_listed=False, n_tables=0, versions=0)
    unseen: frozenset[int] = frozenset()  # versions of rows that a command waits for the daemon to have read

    @property
    def is_under_way(self) -> bool:
        """Return whether a copy is running or was interrupted: the lock says which, and leaves no trace in the rows."""
        return any(row.state == CopyState.COPYING for row in self.tables)

    def is_settled(self, low_lsn: int) -> bool:
        """Return whether the stream, from an LSN on, is applied whole to all tables.

        Before, two-phase commit must not begin: of a transaction prepared before a table's start and committed after it
        the PREPARE would be left out, and the copy would not hold it either.
        """
        # A late table gets nothing, prepared or not, and no refresh brings it once two-phase commit has begun. One that
        # is paused will be copied.
        rows = [row for row in self.tables if row.state != CopyState.WAITING or not row.reason or row.is_paused]
        return all(row.state == CopyState.COPIED and (row.start_lsn or 0) <= low_lsn for row in rows)

    def starts(self, low_lsn: int) -> dict[Known, Start]:
        """Return where each table joins the stream that is read from `low_lsn` on; a start before is as good as none.

        One whose copy was interrupted does not join it, until the next copy.
        """
        found: dict[Known, Start] = {}
        for row in self.tables:
            is_under_way = row.state == CopyState.COPYING and self.is_running
            lsn = row.start_lsn if row.state == CopyState.COPIED or is_under_way else None
            if row.state == CopyState.COPIED and lsn is not None and lsn <= low_lsn:
                lsn = 0
            is_copied = row.state == CopyState.COPIED
            found[row.source_oid] = LEFT_OUT if row.is_schema_only else Start(lsn, is_copied=is_copied)
        return found

    def count(self, state: CopyState) -> int:
        """Return how many tables are in a state."""
        return sum(row.state == state for row in self.tables)


def channel(slot_id: int) -> str:
    """Return the notification channel on which daemon and commands of a slot call each other."""
    return f"parapply_{slot_id:d}"


async def load(conn: Connection, schema: str, slot_id: int) -> Copies:
    """Read the tables of a slot, and whether a copy is running.

    Raises:
        TargetRefused: the state schema is not there, or may not be read.
    """
    # Check the lock after reading the rows, so that "no copier" holds for exactly those rows.
    query = (
        "SELECT c.schema_name, c.table_name, c.state, c.start_lsn::text, c.source_oid, c.reason,"
        " c.rows, c.size_bytes, c.indexes, c.published_by, s.copies_only, c.is_seen,"
        " c.xmin::text::bigint FROM {s}.slots AS s LEFT JOIN {s}.copies AS c USING (slot_id)"
        " WHERE s.slot_id = $1::int ORDER BY 1, 2"
    )
    found = await state_rows(conn, schema, "reading which tables are copied", query, [slot_id])
    tables = tuple([struct_of(CopyRow, row) for row in found if row[0] is not None])
    asked = {row.name for row in tables if row.state == CopyState.COPYING or row.is_paused}
    unseen = frozenset(row[-1] for row in found if row[:2] in asked and not row[-2])
    stamp = Stamp(
        is_listed=bool(found and found[0][-3]), n_tables=len(tables), versions=sum(row[-1] or 0 for row in found)
    )
    is_running = any(row.state == CopyState.COPYING for row in tables) and bool(
        await lease.holders(conn, slot_id, lock_class=lease.COPY_LOCK_CLASS, with_self=True)
    )
    return Copies(is_listed=stamp.is_listed, is_running=is_running, tables=tables, stamp=stamp, unseen=unseen)


async def load_stamp(conn: Connection, schema: str, slot_id: int) -> Stamp:
    """Return a value that changes when `load` would return other rows; far cheaper, with thousands of tables."""
    query = (
        "SELECT COALESCE(bool_or(s.copies_only), false), count(c.slot_id),"
        " COALESCE(sum(c.xmin::text::bigint), 0)::bigint"
        " FROM {s}.slots AS s LEFT JOIN {s}.copies AS c USING (slot_id) WHERE s.slot_id = $1::int"
    )
    found = await state_rows(conn, schema, "looking whether other tables are copied", query, [slot_id])
    ((is_listed, n_tables, versions),) = found
    return Stamp(is_listed=is_listed, n_tables=n_tables, versions=versions)


async def add(conn: Connection, schema: str, slot_id: int, oids: Mapping[Name, int], *, is_listed: bool) -> None:
    """Write a row, waiting, for each table that has none; with `is_listed` only tables with a row are applied at all.

    Without it that stays as it is. A row of the same name and of another table, by the publisher's OID, is replaced.
    """
    insert = (
        "INSERT INTO {s}.copies AS c (slot_id, schema_name, table_name, source_oid, state)"
        " SELECT $1::int, n.schema_name, n.table_name, n.source_oid, 'waiting'"
        " FROM unnest($2::text[], $3::text[], $4::bigint[]) AS n(schema_name, table_name, source_oid)"
        " ON CONFLICT (slot_id, schema_name, table_name) DO UPDATE SET source_oid = EXCLUDED.source_oid,"
        " state = CASE WHEN c.source_oid <> EXCLUDED.source_oid THEN 'waiting' ELSE c.state END,"
        " published_by = CASE WHEN c.source_oid <> EXCLUDED.source_oid THEN NULL ELSE c.published_by END"
    )
    update = "UPDATE {s}.slots SET copies_only = true WHERE slot_id = $1::int"
    statements: list[tuple[str, Sequence[object]]] = [(insert, [slot_id, *_columns(oids), list(oids.values())])]
    statements += [(update, [slot_id])] if is_listed else []
    await change(conn, schema, slot_id, "writing which tables are to be copied", *statements)


async def begin(conn: Connection, schema: str, slot_id: int, oids: Collection[int], start_lsn: int) -> None:
    """Note that tables are copied now, as of an LSN; the copy lock must be held.

    Twice: before the snapshot is made with an LSN before it, and, when `is_seen` says that the daemon knows, with the
    snapshot's own. In between the daemon must not continue to leave out changes that the snapshot does not show.
    Tables of an earlier copy that was interrupted wait from now on: no other session can hold the lock.

    Raises:
        TargetRefused: the state does not know one of them by its OID.
    """
    query = in_schema(
        "UPDATE {s}.copies SET state = 'copying', start_lsn = $3::pg_lsn, rows = NULL, size_bytes = NULL,"
        " reason = '', is_seen = false, started_at = pg_catalog.clock_timestamp(), finished_at = NULL,"
        " published_by = NULL WHERE slot_id = $1::int AND source_oid = ANY ($2::bigint[]) RETURNING 1",
        schema,
    )
    others = in_schema(
        "UPDATE {s}.copies SET state = 'waiting'"
        " WHERE slot_id = $1::int AND state = 'copying' AND (source_oid = ANY ($2::bigint[])) IS NOT TRUE",
        schema,
    )
    with target_errors("noting what is copied"):
        async with conn.transaction():
            await rows(conn, others, [slot_id, list(oids)])
            noted = await rows(conn, query, [slot_id, list(oids), format_lsn(start_lsn)])
            if len(noted) != len(oids):
                raise _other_table()
            await notify(conn, slot_id)


async def give_up(conn: Connection, schema: str, slot_id: int, oids: Collection[int], reason: str) -> None:
    """Have tables wait for a reason that are being copied, and hold no row of the copy."""
    query = (
        "UPDATE {s}.copies SET state = 'waiting', reason = $3"
        " WHERE slot_id = $1::int AND source_oid = ANY ($2::bigint[]) AND state = 'copying'"
    )
    await change(conn, schema, slot_id, "noting what is not copied", (query, [slot_id, list(oids), reason]))


def _other_table() -> TargetRefused:
    return TargetRefused(
        "target: the state no longer knows a table that is being copied, because it was made again or is left out",
        hint="run the same command again",
    )


async def pause(conn: Connection, schema: str, slot_id: int, names: Sequence[Name]) -> None:
    """Take tables that have a row out of the stream; the copy lock must be held.

    `is_seen` shows when no change of them is applied.
    """
    query = (
        "UPDATE {s}.copies AS c SET state = 'waiting', start_lsn = NULL, rows = NULL, size_bytes = NULL, reason = $4,"
        " is_seen = false, started_at = NULL, finished_at = NULL"
        " FROM unnest($2::text[], $3::text[]) AS n(schema_name, table_name)"
        " WHERE c.slot_id = $1::int AND c.schema_name = n.schema_name AND c.table_name = n.table_name"
        # One that is paused already is nothing new to the daemon, which would never say that it has seen it.
        " AND NOT (c.state = 'waiting' AND c.reason = $4)"
    )
    await change(conn, schema, slot_id, "noting what is paused", (query, [slot_id, *_columns(names), PAUSED]))


async def leave_out(conn: Connection, schema: str, slot_id: int, oids: Mapping[Name, int]) -> None:
    """Note the tables whose rows the configuration leaves out: all, and no others.

    Before the first change of them is left out, so that none is applied again once the configuration has changed.
    """
    others = (
        "UPDATE {s}.copies SET state = 'waiting', reason = $3"
        " WHERE slot_id = $1::int AND reason = $2 AND NOT source_oid = ANY ($4::bigint[])"
    )
    known = (
        "UPDATE {s}.copies SET state = 'waiting', reason = $2, published_by = NULL"
        " WHERE slot_id = $1::int AND reason IS DISTINCT FROM $2 AND source_oid = ANY ($3::bigint[])"
    )
    new = (
        "INSERT INTO {s}.copies AS c (slot_id, schema_name, table_name, source_oid, state, reason)"
        " SELECT $1::int, n.schema_name, n.table_name, n.source_oid, 'waiting', $2"
        " FROM unnest($3::text[], $4::text[], $5::bigint[]) AS n(schema_name, table_name, source_oid)"
        " WHERE NOT EXISTS (SELECT FROM {s}.copies AS o WHERE o.slot_id = $1::int AND o.source_oid = n.source_oid)"
        " ON CONFLICT (slot_id, schema_name, table_name) DO UPDATE SET source_oid = EXCLUDED.source_oid,"
        " state = 'waiting', reason = EXCLUDED.reason, published_by = NULL"
    )
    given = list(oids.values())
    statements = (
        (others, [slot_id, SCHEMA_ONLY, WAS_SCHEMA_ONLY, given]),
        (known, [slot_id, SCHEMA_ONLY, given]),
        (new, [slot_id, SCHEMA_ONLY, *_columns(oids), given]),
    )
    await change(conn, schema, slot_id, "noting which tables' rows are left out", *statements)


async def is_seen(conn: Connection, schema: str, slot_id: int, oids: Collection[int]) -> bool:
    """Return whether the daemon, if one runs, keeps to what `begin` or `pause` has written last of tables.

    Raises:
        TargetRefused: the state does not know one of them as it was written.
    """
    query = (
        "SELECT pg_catalog.count(*), pg_catalog.bool_and(is_seen) FROM {s}.copies WHERE slot_id = $1::int"
        " AND source_oid = ANY ($2::bigint[]) AND (state = 'copying' OR state = 'waiting' AND reason = $3)"
    )
    values = [slot_id, list(oids), PAUSED]
    ((n_known, has_seen),) = await state_rows(
        conn, schema, "looking whether the daemon knows of the copy", query, values
    )
    if n_known != len(oids):
        raise _other_table()
    # In this order, because a daemon that comes after the check reads what was written before it.
    return has_seen is not False or not await lease.holders(conn, slot_id)


async def tell_seen(conn: Connection, schema: str, slot_id: int, known: Copies) -> None:
    """Report to the command that copies or pauses that the daemon keeps to the rows it has read.

    Not to rows that were written since, though they look the same: another command on an idle publisher writes its LSN.
    """
    query = (
        "UPDATE {s}.copies SET is_seen = true"
        " WHERE slot_id = $1::int AND xmin::text::bigint = ANY ($2::bigint[]) AND NOT is_seen"
    )
    if known.unseen:
        await state_rows(conn, schema, "telling who copies", query, [slot_id, list(known.unseen)])


async def keep_indexes(conn: Connection, schema: str, slot_id: int, source_oid: int, indexes: Sequence[str]) -> None:
    """Keep the statements that make dropped indexes again, before they are dropped.

    Raises:
        TargetRefused: the state does not know the table.
    """
    query = "UPDATE {s}.copies SET indexes = $3::text[] WHERE slot_id = $1::int AND source_oid = $2::bigint RETURNING 1"
    if not await state_rows(conn, schema, "noting dropped indexes", query, [slot_id, source_oid, list(indexes)]):
        raise _other_table()


async def note_progress(conn: Connection, schema: str, slot_id: int, figures: Mapping[int, tuple[int, int]]) -> None:
    """Note how many rows and bytes of tables under way were handed on; for people only, so it need not be durable."""
    if not figures:
        return
    query = (
        "WITH quick AS (SELECT pg_catalog.set_config('synchronous_commit', 'off', true))"
        " UPDATE {s}.copies AS c SET rows = n.rows, size_bytes = n.size_bytes"
        " FROM quick, unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS n(source_oid, rows, size_bytes)"
        " WHERE c.slot_id = $1::int AND c.source_oid = n.source_oid AND c.state = 'copying'"
    )
    counts = [[count[part] for count in figures.values()] for part in (0, 1)]
    await state_rows(conn, schema, "noting how far the copy is", query, [slot_id, list(figures), *counts])


async def finish(  # noqa: PLR0913  the columns of a row
    conn: Connection,
    schema: str,
    slot_id: int,
    source_oid: int,
    *,
    n_rows: int,
    size_bytes: int,
    is_durable: bool,
) -> None:
    """Note that all rows of a table are committed and its indexes are made.

    Not durable is as exact, because a crash that takes the rows also takes this note, which comes after them in the
    WAL, and everything that is based on it. The last one of a copy must be durable, and makes all of them so.

    Raises:
        TargetRefused: the state does not know the table, or not as being copied.
    """
    query = (
        "WITH noted AS (UPDATE {s}.copies SET state = 'copied', rows = $3::bigint, size_bytes = $4::bigint,"
        " indexes = '{{}}', finished_at = pg_catalog.clock_timestamp()"
        " WHERE slot_id = $1::int AND source_oid = $2::bigint AND state = 'copying' RETURNING source_oid),"
        " whole AS (DELETE FROM {s}.copy_parts AS p USING noted"
        " WHERE p.slot_id = $1::int AND p.source_oid = noted.source_oid)"
        " SELECT pg_catalog.pg_notify($5, ''), pg_catalog.set_config('synchronous_commit', $6, true) FROM noted"
    )
    values = [slot_id, source_oid, n_rows, size_bytes, channel(slot_id), "on" if is_durable else "off"]
    if not await state_rows(conn, schema, "noting what is copied", query, values):
        raise _other_table()


async def forget(conn: Connection, schema: str, slot_id: int, names: Sequence[Name]) -> None:
    """Forget tables that are no longer published."""
    query = (
        "DELETE FROM {s}.copies AS c USING unnest($2::text[], $3::text[]) AS n(schema_name, table_name)"
        " WHERE c.slot_id = $1::int AND c.schema_name = n.schema_name AND c.table_name = n.table_name"
    )
    await change(
        conn, schema, slot_id, "forgetting tables that are not published", (query, [slot_id, *_columns(names)])
    )


async def settle(  # noqa: PLR0913, PLR0917  the columns of a row
    conn: Connection, schema: str, slot_id: int, name: Name, source_oid: int, reason: str
) -> bool:
    """Note a table that was published later: applied from its first row on, or waiting for a reason.

    A row of its name and of another table is replaced, because that one is gone; what a copy has dropped of the
    target's table is kept if this one waits. Rows of tables that only have other names by now must have been renamed
    before.

    Returns:
        True if it was noted; False if the state knows the table already.
    """
    query = (
        "INSERT INTO {s}.copies AS c (slot_id, schema_name, table_name, source_oid, state, start_lsn, reason)"
        " SELECT $1::int, $2, $3, $4::bigint, CASE WHEN $5 = '' THEN 'copied' ELSE 'waiting' END,"
        " CASE WHEN $5 = '' THEN '0/0'::pg_lsn END, $5"
        " WHERE NOT EXISTS (SELECT FROM {s}.copies AS o WHERE o.slot_id = $1::int AND o.source_oid = $4::bigint)"
        " ON CONFLICT (slot_id, schema_name, table_name) DO UPDATE SET source_oid = EXCLUDED.source_oid,"
        " state = EXCLUDED.state, start_lsn = EXCLUDED.start_lsn, reason = EXCLUDED.reason, published_by = NULL,"
        " rows = NULL, size_bytes = NULL, started_at = NULL, finished_at = NULL,"
        " indexes = CASE EXCLUDED.reason WHEN '' THEN EXCLUDED.indexes ELSE c.indexes END"
        " WHERE c.source_oid IS DISTINCT FROM EXCLUDED.source_oid RETURNING 1"
    )
    values = [slot_id, *name, source_oid, reason]
    return bool(await state_rows(conn, schema, "noting a table that was published later", query, values))


async def join(conn: Connection, schema: str, slot_id: int, source_oid: int) -> None:
    """Note of a table that waits that it is applied from its first row on, unless a copy of it has begun."""
    query = (
        "UPDATE {s}.copies SET state = 'copied', start_lsn = '0/0', reason = '', published_by = NULL"
        " WHERE slot_id = $1::int AND source_oid = $2::bigint AND state = 'waiting' AND NOT reason = ANY ($3::text[])"
    )
    values = [slot_id, source_oid, ["", PAUSED, SCHEMA_ONLY]]
    await state_rows(conn, schema, "noting a table that a command makes", query, values)


async def keep_published(conn: Connection, schema: str, slot_id: int, marks: Mapping[int, str]) -> None:
    """Keep how tables were published when the snapshot of their copy was made, by the publisher's OIDs."""
    query = (
        "UPDATE {s}.copies AS c SET published_by = n.marks"
        " FROM unnest($2::bigint[], $3::text[]) AS n(source_oid, marks)"
        # A gap that the daemon has noted since the copy began stays.
        " WHERE c.slot_id = $1::int AND c.source_oid = n.source_oid"
        " AND (c.state <> 'copying' OR c.published_by IS DISTINCT FROM '')"
    )
    await state_rows(
        conn, schema, "noting how tables are published", query, [slot_id, list(marks), list(marks.values())]
    )


async def note_published(conn: Connection, schema: str, slot_id: int, changes: Sequence[PublishedChange]) -> None:
    """Keep how tables are published, and have those wait of which changes may be missing.

    A table whose copy has begun since is left alone, as is one that another look has changed.
    """
    if not changes:
        return
    query = in_schema(
        "UPDATE {s}.copies AS c SET published_by = n.marks, reason = n.reason,"
        " state = CASE n.reason WHEN '' THEN 'copied' ELSE 'waiting' END"
        " FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[]) AS n(source_oid, before, marks, reason)"
        " WHERE c.slot_id = $1::int AND c.source_oid = n.source_oid AND c.state = 'copied'"
        " AND c.published_by IS NOT DISTINCT FROM n.before",
        schema,
    )
    columns = [list(column) for column in zip(*changes, strict=True)]
    with target_errors("noting how tables are published"):
        async with conn.transaction():
            await rows(conn, query, [slot_id, *columns])
            if any(change.reason for change in changes):
                await notify(conn, slot_id)


async def note_gap(conn: Connection, schema: str, slot_id: int, gap_lsn: int, seen: Sequence[int]) -> None:
    """Note of tables being copied as of before an LSN that they were not published: the look after the copy says so.

    The caller knows the publisher's OIDs `seen` as copied; the copy of another table may have ended.
    """
    query = (
        "UPDATE {s}.copies SET published_by = '' WHERE slot_id = $1::int AND state IN ('copying', 'copied')"
        " AND start_lsn <= $2::pg_lsn AND source_oid <> ALL ($3::bigint[])"
    )
    values = [slot_id, format_lsn(gap_lsn), list(seen)]
    await state_rows(conn, schema, "noting how tables are published", query, values)


async def rename(conn: Connection, schema: str, slot_id: int, names: Mapping[int, Name]) -> None:
    """Give tables the names that they have now, by OID; a row that has such a name and is none of them goes.

    The table then has the indexes to make that the row had. A name of a table that has no row changes nothing.
    """
    # By way of names that no table has: two tables may have exchanged theirs.
    aside = in_schema(
        "UPDATE {s}.copies SET schema_name = '', table_name = source_oid::text"
        " WHERE slot_id = $1::int AND source_oid = ANY ($2::bigint[])",
        schema,
    )
    carry = in_schema(
        "UPDATE {s}.copies AS c SET indexes = c.indexes || o.indexes"
        " FROM unnest($2::text[], $3::text[], $4::bigint[]) AS n(schema_name, table_name, source_oid)"
        " JOIN {s}.copies AS o USING (schema_name, table_name)"
        " WHERE c.slot_id = $1::int AND c.source_oid = n.source_oid AND o.slot_id = $1::int AND o.indexes <> '{{}}'",
        schema,
    )
    remove = in_schema(
        "DELETE FROM {s}.copies AS c USING unnest($2::text[], $3::text[], $4::bigint[])"
        " AS n(schema_name, table_name, source_oid) JOIN {s}.copies AS o USING (source_oid)"
        " WHERE c.slot_id = $1::int AND o.slot_id = $1::int"
        " AND c.schema_name = n.schema_name AND c.table_name = n.table_name",
        schema,
    )
    update = in_schema(
        "UPDATE {s}.copies AS c SET schema_name = n.schema_name, table_name = n.table_name"
        " FROM unnest($2::text[], $3::text[], $4::bigint[]) AS n(schema_name, table_name, source_oid)"
        " WHERE c.slot_id = $1::int AND c.source_oid = n.source_oid",
        schema,
    )
    named = [slot_id, *_columns(names.values()), list(names)]
    with target_errors("noting the tables' names"):
        async with conn.transaction():
            await rows(conn, aside, [slot_id, list(names)])
            await rows(conn, carry, named)
            await rows(conn, remove, named)
            await rows(conn, update, named)


async def keep_marks(conn: Connection, schema: str, slot_id: int, marks: Sequence[str]) -> None:
    """Keep what the publisher's catalogue held at a time when the stream had begun, in the place of what was kept."""
    query = (
        "INSERT INTO {s}.marks (slot_id, marks) VALUES ($1::int, $2::text[])"
        " ON CONFLICT (slot_id) DO UPDATE SET marks = EXCLUDED.marks, taken_at = EXCLUDED.taken_at"
    )
    await state_rows(conn, schema, "noting which tables there are", query, [slot_id, list(marks)])


async def load_marks(conn: Connection, schema: str, slot_id: int) -> frozenset[str] | None:
    """Return what `keep_marks` has kept, None if there is nothing."""
    query = "SELECT marks FROM {s}.marks WHERE slot_id = $1::int"
    found = await state_rows(conn, schema, "reading which tables there were", query, [slot_id])
    return frozenset(found[0][0]) if found else None


def _columns(names: Iterable[Name]) -> tuple[list[str], list[str]]:
    both = list(names)
    return [name for name, _ in both], [table for _, table in both]


async def change(
    conn: Connection, schema: str, slot_id: int, doing: str, *statements: tuple[str, Sequence[object]]
) -> None:
    """Run statements with their parameters in one transaction, and notify the slot's listeners when it commits."""
    with target_errors(doing):
        async with conn.transaction():
            for query, params in statements:
                await rows(conn, in_schema(query, schema), params)
            await notify(conn, slot_id)


async def notify(conn: Connection, slot_id: int) -> None:
    """Notify all listeners; inside a transaction, when it commits."""
    await rows(conn, sql.SQL("SELECT pg_catalog.pg_notify($1, '')"), [channel(slot_id)])


async def call(conn: Connection, schema: str, slot_name: str) -> None:
    """Notify the daemon of a slot from a session that only reads; a standby takes no notification.

    Raises:
        TargetRefused: the role may not read the slots.
    """
    query = (
        "SELECT pg_catalog.pg_notify('parapply_' || slot_id, '') FROM {s}.slots"
        " WHERE slot_name = $1 AND NOT pg_catalog.pg_is_in_recovery()"
    )
    await state_rows(conn, schema, "calling the daemon", query, [slot_name])
