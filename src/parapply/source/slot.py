"""Is this the publisher, the slot and the position we know? Checked before every start of the stream.

In: an open plain session on the publisher, and what the target's state says. Out: `SourceFacts`, or a refusal.
Never makes a slot unless asked to: a new slot in the place of a lost one hides a gap (traps F11, F12).
Also the one place where errors of a psycopg session on the publisher become ours (`source_errors`).

The role needs LOGIN and REPLICATION, nothing else; a role without REPLICATION can still read all facts here.

Source: PostgreSQL manual, "pg_replication_slots", "Control Data Functions", "Replication Management Functions".
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import psycopg

from parapply.driver import Session, dsn_problem, lost_hint
from parapply.errors import ConfigError, SlotBusy, SourceLost, SourceRefused
from parapply.model import POSTGRES_EPOCH_US, format_lsn, parse_lsn
from parapply.source.options import later_settings_sql, source_conninfo
from parapply.state_mark import STATE_SCHEMAS_SQL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import LiteralString

    from parapply.login import Login

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]


#: Seconds to wait for a TCP connection to the publisher; libpq would wait for the kernel, which is minutes.
CONNECT_TIMEOUT_S = 10

#: Every session that was opened, with its DSN.
_sessions: WeakKeyDictionary[Session, Login] = WeakKeyDictionary()

#: The transaction id $1 with its epoch, as xids of 32 bits lie within 2^31 of `near`, which has it.
FULL_XID_SQL: LiteralString = "near + 2147483648 - (near - $1::bigint + 2147483648) % 4294967296"
#: server_version_num of the first server that logs them on request.
_LOGS_RUNNING_SINCE = 160000
#: Operations that a publication may publish, in the order of the columns of pg_publication.
_OPERATIONS = ("insert", "update", "delete", "truncate")


class SlotFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A replication slot as pg_replication_slots shows it; what a server does not know yet is None or False."""

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    is_temporary: bool
    active_pid: int | None
    confirmed_flush_lsn: int | None
    restart_lsn: int | None = None  # the publisher keeps its WAL from here on; None once it is lost
    wal_status: str | None  # reserved, extended, unreserved, lost
    safe_wal_bytes: int | None = None  # may be written before the slot can be lost; None: as much as the disk holds
    invalidation_reason: str | None  # 17 and later
    is_conflicting: bool  # 16 and later
    is_two_phase: bool
    is_failover: bool = False  # 17 and later
    is_synced: bool = False  # 17 and later: as it came from a primary

    def retained_bytes(self, flush_lsn: int) -> int | None:
        """Return the bytes of WAL that the publisher keeps for the slot up to `flush_lsn`, None if it is lost."""
        return None if self.restart_lsn is None else max(0, flush_lsn - self.restart_lsn)


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher as it is now."""

    system_identifier: str  # unsigned 64 bits
    timeline: int  # on a standby, of its last restart point: `replayed_timeline` asks for the present one
    database: str
    server_version_num: int
    wal_level: str
    is_in_recovery: bool
    wal_sender_timeout_s: float  # 0: none
    decoding_memory_bytes: int  # logical_decoding_work_mem of this session
    flush_lsn: int
    slot: SlotFacts | None
    effective_wal_level: str = ""  # as WAL is written; 19 and later, which raise it for the first logical slot
    synchronized_standby_slots: str = ""  # whose standbys a failover slot waits for; 17 and later
    standby_slots_unread: tuple[str, ...] = ()  # of these, slots that are not there or that no standby reads
    hot_standby_feedback: bool = True
    started_us: int = 0  # the server's start, microseconds since 1970-01-01 UTC
    state_schemas: frozenset[str] = frozenset()  # of parapplies that apply, or applied, to the publisher


class SourcePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher's positions, which are asked for all the time."""

    clock_us: int  # microseconds since 2000-01-01 UTC; read before the LSNs
    passed_us: int | None  # nothing that commits earlier comes later; None: a standby that has replayed no commit
    flush_lsn: int  # end of its durable WAL
    insert_lsn: int  # end of all its WAL; on a standby of what it has replayed
    standby_names: str  # for which its commits wait; empty on a standby, where nothing commits
    timeline: int  # of the WAL being written; 0 on a standby


@contextmanager
def source_errors(doing: str) -> Iterator[None]:
    """Turn errors of psycopg into ours; every other exception passes.

    Raises:
        ConfigError: libpq refuses the DSN.
        SourceRefused: a privilege, an object or a setting is wrong; retrying does not help.
        SlotBusy: another process reads the slot.
        SourceLost: the connection broke or the server is short of something.
    """
    try:
        yield
    except psycopg.Error as error:
        raise _source_error(doing, error) from error


#: SQLSTATE: hint, for what retrying does not help.
_REFUSALS = {
    "25006": "source.dsn leads to a standby, which takes no writes: run this on the primary",
    "42501": "the source's role needs LOGIN and REPLICATION: ALTER ROLE ... REPLICATION",
    "42704": "check source.slot and source.publications; `parapply init` creates the slot",
    "42710": "choose another source.slot",
    "53400": "raise max_replication_slots on the publisher, or drop a slot whose reader never comes back",
    "55000": "see `parapply status` and pg_replication_slots on the publisher",
}


_GRANT = "GRANT what is missing to the source's role: config/roles/publisher.sql does"
#: The role lacks a privilege other than REPLICATION then.
_OBJECTS = {
    "for table": _GRANT, "for schema": _GRANT, "for sequence": _GRANT, "for view": _GRANT, "for function": _GRANT,
    "event trigger": "only a superuser may make event triggers: have one run what `init --ddl=print-automatic` prints"
    "; without them `init --ddl` makes parapply.replicate_ddl",
}  # fmt: skip


def _source_error(doing: str, error: psycopg.Error) -> ConfigError | SourceRefused | SourceLost:
    if problem := dsn_problem(error):
        return ConfigError(
            f"source.dsn: {problem}", hint="correct source.dsn, or the variable or service it comes from"
        )
    primary = error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]
    text = f"source, {doing}: {primary}"
    if error.sqlstate == "55006":
        return SlotBusy(text, hint="another process reads the slot; after a broken connection the server notices later")
    if error.sqlstate == "42501" and (hint := next((hint for word, hint in _OBJECTS.items() if word in primary), "")):
        return SourceRefused(text, hint=hint)
    if error.sqlstate in _REFUSALS:
        return SourceRefused(text, hint=_REFUSALS[error.sqlstate])
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return SourceLost(text, hint=lost_hint(error, text))
    return SourceRefused(text)


async def databases(conn: Connection) -> list[tuple[str, bool, bool]]:
    """Return name, whether it is a template, and whether it allows connections, of each database of the server."""
    query: LiteralString = "SELECT datname, datistemplate, datallowconn FROM pg_catalog.pg_database ORDER BY datname"
    with source_errors("reading the names of the databases"):
        return [(name, is_template, allows) for name, is_template, allows in await read_rows(conn, query)]


async def connect(
    login: Login,
    *,
    application_name: str,
    is_replication: bool = False,
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
    decoding_memory_bytes: int = 0,
) -> Connection:
    """Open an autocommit session on the publisher with its settings pinned.

    Args:
        login: as configured.
        application_name: if the DSN has none.
        is_replication: for START_REPLICATION.
        connect_timeout_s: if the DSN has none.
        decoding_memory_bytes: for logical_decoding_work_mem; 0: as the publisher has it.

    Raises:
        ConfigError: the DSN cannot be parsed, or libpq refuses it.
        SourceRefused: the role may not (replicate).
        SourceLost: no connection.
    """
    text = source_conninfo(
        login.dsn,
        application_name=application_name,
        is_replication=is_replication,
        connect_timeout_s=connect_timeout_s,
        decoding_memory_bytes=decoding_memory_bytes,
    )
    with source_errors("connecting"):
        conn = await Session.connect(text, command=login.command, autocommit=True)
    _sessions[conn] = login
    try:
        with source_errors("pinning session settings"):
            if settings := later_settings_sql(conn.info.server_version):
                await conn.execute(settings.encode())
    except BaseException:
        await conn.close()
        raise
    return conn


async def take_bytes(conn: Connection) -> None:
    """Take texts of a publisher in SQL_ASCII as they are: it refuses to send what is no UTF8 in UTF8 (trap T-61).

    In this session psycopg then returns texts as bytes.
    """
    if conn.info.parameter_status("server_encoding") == "SQL_ASCII":
        with source_errors("taking texts as bytes"):
            await conn.execute("SET client_encoding TO SQL_ASCII")


def without_answer(login: Login, wait_s: float) -> list[int]:
    """Return the pids of this process's sessions of a login that have waited that many seconds for an answer."""
    since_s = time.monotonic() - wait_s
    waiting = [(conn, its_login) for conn, its_login in _sessions.items() if 0 < conn.waits_since_s <= since_s]
    return [conn.info.backend_pid for conn, its_login in waiting if its_login == login and not conn.closed]


async def read_rows(
    conn: psycopg.AsyncConnection[Any], query: str, params: Sequence[object] = ()
) -> list[tuple[Any, ...]]:
    """Return the rows of one of the package's own queries, which take `$1` style parameters, on either end.

    Raises:
        psycopg.Error: the caller turns it into an error of ours.
    """
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(query.encode(), params)
        return await cursor.fetchall()


async def inspect(conn: Connection, slot_name: str) -> SourceFacts:
    """Read what the publisher is and what it knows of the slot; raise SourceLost if the connection broke."""
    # The timeline of the WAL being written: pg_control_checkpoint() has the old one until the first checkpoint
    # after a promotion, and a standby has no other function for it. The slot as jsonb: its columns differ from version
    # to version.
    query: LiteralString = rf"""
        SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()),
               CASE WHEN r THEN GREATEST((SELECT timeline_id FROM pg_catalog.pg_control_checkpoint()),
                                         (SELECT min_recovery_end_timeline FROM pg_catalog.pg_control_recovery()))
                    ELSE ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(
                         pg_catalog.pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END,
               pg_catalog.current_database(),
               pg_catalog.current_setting('wal_level'),
               COALESCE(pg_catalog.current_setting('effective_wal_level', true), ''),
               r,
               (SELECT setting::float8 / 1000 FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'),
               pg_catalog.pg_size_bytes(pg_catalog.current_setting('logical_decoding_work_mem')),
               CASE WHEN r THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END,
               (SELECT pg_catalog.to_jsonb(s) FROM pg_catalog.pg_replication_slots AS s WHERE s.slot_name = $1),
               COALESCE(pg_catalog.current_setting('synchronized_standby_slots', true), ''),
               ARRAY(SELECT name FROM pg_catalog.regexp_split_to_table(NULLIF(
                     pg_catalog.current_setting('synchronized_standby_slots', true), ''), '[\s",]+') AS name
                     WHERE name <> '' AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots
                                                      WHERE slot_name = pg_catalog.lower(name) AND active)),
               pg_catalog.current_setting('hot_standby_feedback')::bool,
               (extract(epoch FROM pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint,
               ARRAY(SELECT schema_name::text FROM {STATE_SCHEMAS_SQL} AS own)
          FROM pg_catalog.pg_is_in_recovery() AS r"""  # noqa: S608 - a constant
    with source_errors("inspecting the publisher"):
        found = await read_rows(conn, query, [slot_name])
    ((identifier, timeline, database, wal_level, level_now, is_standby, timeout_s, decoding_bytes, *rest),) = found
    flush, slot, synced, unread, feedback, started_us, own = rest
    return SourceFacts(
        # The control file's number is unsigned, SQL's bigint is not.
        system_identifier=str(identifier & 0xFFFF_FFFF_FFFF_FFFF),
        timeline=timeline,
        database=database,
        server_version_num=conn.info.server_version,
        wal_level=wal_level,
        effective_wal_level=level_now,
        is_in_recovery=is_standby,
        wal_sender_timeout_s=timeout_s,
        decoding_memory_bytes=decoding_bytes,
        flush_lsn=parse_lsn(flush) if flush else 0,
        slot=_slot_facts(slot) if slot else None,
        synchronized_standby_slots=synced,
        standby_slots_unread=tuple(unread),
        hot_standby_feedback=feedback,
        started_us=started_us,
        state_schemas=frozenset(own),
    )


async def state_schemas(conn: Connection) -> frozenset[str]:
    """Return the schemas of parapplies that apply, or applied, to the publisher."""
    query: LiteralString = f"SELECT schema_name::text FROM {STATE_SCHEMAS_SQL} AS own"  # noqa: S608 - a constant
    with source_errors("looking for state schemas"):
        return frozenset([str(schema) for (schema,) in await read_rows(conn, query)])


async def position(conn: Connection) -> SourcePosition:
    """Return the publisher's position; raise SourceLost if the connection broke."""
    query: LiteralString = """
        SELECT (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint,
               (extract(epoch FROM CASE WHEN r THEN pg_catalog.pg_last_xact_replay_timestamp()
                                   ELSE pg_catalog.clock_timestamp() END) * 1000000)::bigint,
               CASE WHEN r THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END,
               CASE WHEN r THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_insert_lsn() END,
               CASE WHEN r THEN '' ELSE pg_catalog.current_setting('synchronous_standby_names') END,
               CASE WHEN r THEN 0 ELSE ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(
                   pg_catalog.pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END
          FROM pg_catalog.pg_is_in_recovery() AS r"""
    with source_errors("reading the publisher's position"):
        ((unix_us, passed_unix_us, flush, insert, standby_names, timeline),) = await read_rows(conn, query)
    return SourcePosition(
        clock_us=unix_us - POSTGRES_EPOCH_US,
        passed_us=None if passed_unix_us is None else passed_unix_us - POSTGRES_EPOCH_US,
        flush_lsn=parse_lsn(flush) if flush else 0,
        insert_lsn=parse_lsn(insert) if insert else 0,
        standby_names=standby_names,
        timeline=timeline,
    )


async def log_running(conn: Connection) -> bool:
    """Have the publisher log its running transactions, where decoding may begin later; return whether the role may."""
    if conn.info.server_version < _LOGS_RUNNING_SINCE:
        return False
    function = "pg_catalog.pg_log_standby_snapshot()"
    query = f"SELECT NOT pg_catalog.pg_is_in_recovery() AND pg_catalog.has_function_privilege('{function}', 'EXECUTE')"
    with source_errors("logging running transactions"):
        ((may,),) = await read_rows(conn, query)
        if may:
            await conn.execute(f"SELECT {function}")
    return bool(may)


async def replayed_timeline(conn: Connection, login: Login) -> int:
    """Return the timeline that a server replays or writes, which SQL does not show on a standby.

    Raise SourceRefused if the role lacks REPLICATION, SourceLost if the DSN leads to another server than the session.
    """
    started = "SELECT pg_catalog.pg_postmaster_start_time()::text"
    asking = await connect(login, application_name="parapply timeline", is_replication=True)
    async with asking:
        with source_errors("identifying the publisher"):
            cursor = await asking.execute(started.encode())
            there = await cursor.fetchone()
            cursor = await asking.execute(b"IDENTIFY_SYSTEM")
            row = await cursor.fetchone()
            cursor = await conn.execute(started.encode())
            here = await cursor.fetchone()
    if row is None or there is None or there != here:
        raise SourceLost("source: two connections to the publisher lead to different servers.")
    return int(row[1])


async def read_slot(conn: Connection, slot_name: str) -> SlotFacts | None:
    """Return the slot as it is now, None if it does not exist; raise SourceLost if the connection broke."""
    query: LiteralString = (
        "SELECT pg_catalog.to_jsonb(s) FROM pg_catalog.pg_replication_slots AS s WHERE s.slot_name = $1"
    )
    with source_errors("reading the slot"):
        found = await read_rows(conn, query, [slot_name])
    return _slot_facts(found[0][0]) if found else None


async def has_sent(conn: Connection, slot_name: str) -> bool:
    """Return whether a slot has sent a transaction to any reader, as far as the publisher's statistics go back.

    A crash or a failover of the publisher empties them, until the next transaction is sent.
    """
    query: LiteralString = (
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_replication_slots WHERE slot_name = $1 AND total_txns > 0)"
    )
    with source_errors("asking for the slot's statistics"):
        return bool((await read_rows(conn, query, [slot_name]))[0][0])


class StreamSender(NamedTuple):
    """The publisher's process that sends a slot's stream, to be asked about what it has sent."""

    conn: Connection  # plain session
    slot_name: str
    pid: int  # behind an address that moves another server may answer; 0: none, as of a capture
    answer_s: float  # the connection is lost after that many seconds without an answer

    async def is_rolled_back(self, xid: int) -> bool:
        """Return whether a transaction whose PREPARE was sent was rolled back; False if that is not certain.

        The slot's catalog_xmin keeps what the server knows of a transaction until its PREPARE is confirmed. The
        stream's xid has no epoch.

        Raises:
            SourceLost: the connection broke or is silent, or that process does not send any more.
        """
        if not self.pid:
            return False
        query: LiteralString = f"""
            SELECT pg_catalog.pg_xact_status(({FULL_XID_SQL})::text::xid8)
              FROM pg_catalog.pg_replication_slots, LATERAL (SELECT
                   pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint) AS next (near)
             WHERE slot_name = $2 AND active_pid = $3::int"""  # noqa: S608 - a constant
        with source_errors("asking what became of a prepared transaction"):
            try:
                # Intake may wait for room as long as a worker waits here, and then it takes no silence for a loss.
                async with asyncio.timeout(self.answer_s):
                    found = await read_rows(self.conn, query, [xid, self.slot_name, self.pid])
            except TimeoutError as silent:
                raise SourceLost(f"source: no answer about a prepared transaction for {self.answer_s:g} s.") from silent
        if not found:
            raise SourceLost("source: another process sends the slot's stream, or none.")
        return found == [("aborted",)]


def _slot_facts(row: dict[str, Any]) -> SlotFacts:
    confirmed, restart = row["confirmed_flush_lsn"], row["restart_lsn"]
    return SlotFacts(
        name=row["slot_name"],
        plugin=row["plugin"],
        slot_type=row["slot_type"],
        database=row["database"],
        is_temporary=row["temporary"],
        active_pid=row["active_pid"],
        confirmed_flush_lsn=parse_lsn(confirmed) if confirmed else None,
        restart_lsn=parse_lsn(restart) if restart else None,
        wal_status=row["wal_status"],
        safe_wal_bytes=row["safe_wal_size"],
        invalidation_reason=row.get("invalidation_reason"),
        is_conflicting=bool(row.get("conflicting")),
        is_two_phase=bool(row.get("two_phase")),
        is_failover=bool(row.get("failover")),
        is_synced=bool(row.get("synced")),
    )


async def check_publications(conn: Connection, names: Sequence[str]) -> frozenset[str]:
    """Refuse missing publications: newer servers skip them with a warning only, and rows are missing.

    Returns:
        Operations that they publish, all together: of insert, update, delete, truncate.

    Raises:
        SourceRefused: at least one is missing; the message lists what there is.
    """
    with source_errors("reading the publications"):
        query: LiteralString = (
            "SELECT pubname, pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_catalog.pg_publication ORDER BY 1"
        )
        present = {str(name): flags for name, *flags in await read_rows(conn, query)}
    missing = [name for name in names if name not in present]
    if missing:
        there = ", ".join(repr(name) for name in present) or "none"
        raise SourceRefused(
            f"source: no publication {', '.join(repr(name) for name in missing)} in this database; there is {there}",
            hint="CREATE PUBLICATION ... on the publisher, or correct source.publications",
        )
    return frozenset([kind for name in names for kind, flag in zip(_OPERATIONS, present[name], strict=True) if flag])


async def published_in_part(conn: Connection, names: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Return (schema, table, operations) of tables whose updates, deletes or truncates no publication brings."""
    # The view takes long for each table, and is read only where a publication leaves something out.
    query: LiteralString = """
        SELECT t.schemaname, t.tablename,
               pg_catalog.array_remove(ARRAY[
                   CASE WHEN NOT pg_catalog.bool_or(p.pubupdate) THEN 'update' END,
                   CASE WHEN NOT pg_catalog.bool_or(p.pubdelete) THEN 'delete' END,
                   CASE WHEN NOT pg_catalog.bool_or(p.pubtruncate) THEN 'truncate' END], NULL) AS left_out
          FROM pg_catalog.pg_publication_tables AS t JOIN pg_catalog.pg_publication AS p ON p.pubname = t.pubname
         WHERE t.pubname = ANY ($1::text[])
         GROUP BY 1, 2 HAVING NOT (pg_catalog.bool_or(p.pubupdate) AND pg_catalog.bool_or(p.pubdelete)
                                   AND pg_catalog.bool_or(p.pubtruncate))
         ORDER BY 1, 2"""
    flags: LiteralString = (
        "SELECT FROM pg_catalog.pg_publication WHERE pubname = ANY ($1::text[])"
        " AND NOT (pubupdate AND pubdelete AND pubtruncate) LIMIT 1"
    )
    with source_errors("reading the published tables"):
        if not await read_rows(conn, flags, [list(names)]):
            return []
        found = await read_rows(conn, query, [list(names)])
    return [(str(schema), str(table), list(left)) for schema, table, left in found]


async def published_tables(conn: Connection, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (schema, table) of everything in the publications, sorted; raise SourceLost if the connection broke."""
    query: LiteralString = (
        "SELECT DISTINCT schemaname, tablename FROM pg_catalog.pg_publication_tables"
        " WHERE pubname = ANY ($1::text[]) ORDER BY 1, 2"
    )
    with source_errors("reading the published tables"):
        return tuple((str(schema), str(table)) for schema, table in await read_rows(conn, query, [list(names)]))


async def tables_to_expect(conn: Connection, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return what `published_tables` does and the partitions below, the oldest first; for a hint only.

    pgoutput announces a partition along with the root that it is published as. The view takes long for each table, and
    locks it since version 16; this reads the catalogue.
    """
    query: LiteralString = """
        WITH entry (relid, nspid) AS MATERIALIZED (
            SELECT NULL::oid, NULL::oid FROM pg_catalog.pg_publication WHERE puballtables AND pubname = ANY ($1::text[])
            UNION ALL SELECT r.prrelid, NULL FROM pg_catalog.pg_publication_rel AS r
              JOIN pg_catalog.pg_publication AS p ON p.oid = r.prpubid WHERE p.pubname = ANY ($1::text[])
               AND pg_catalog.to_jsonb(r) ->> 'prexcept' IS DISTINCT FROM 'true'
            UNION ALL SELECT NULL, s.pnnspid FROM pg_catalog.pg_publication_namespace AS s
              JOIN pg_catalog.pg_publication AS p ON p.oid = s.pnpubid WHERE p.pubname = ANY ($1::text[]))
        SELECT n.nspname, c.relname
          FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
         WHERE c.relkind IN ('r', 'p') AND pg_catalog.pg_relation_is_publishable(c.oid)
           AND (EXISTS (SELECT FROM entry WHERE relid IS NULL AND nspid IS NULL)
                OR c.oid IN (SELECT relid FROM entry WHERE relid IS NOT NULL)
                OR n.oid IN (SELECT nspid FROM entry WHERE nspid IS NOT NULL)
                OR c.relispartition AND EXISTS (
                    SELECT FROM pg_catalog.pg_partition_ancestors(c.oid) AS a
                      JOIN pg_catalog.pg_class AS above ON above.oid = a.relid
                     WHERE above.oid IN (SELECT relid FROM entry WHERE relid IS NOT NULL)
                        OR above.relnamespace IN (SELECT nspid FROM entry WHERE nspid IS NOT NULL)))
         ORDER BY c.oid"""
    with source_errors("reading the published tables"):
        return tuple([(str(schema), str(table)) for schema, table in await read_rows(conn, query, [list(names)])])


async def check_room(conn: Connection) -> None:
    """Refuse a publisher on which no further slot can be made now; a snapshot's temporary slot also needs room.

    Raises:
        SourceRefused: all of max_replication_slots are in use.
    """
    query: LiteralString = (
        "SELECT pg_catalog.current_setting('max_replication_slots')::int > pg_catalog.count(*)"
        " FROM pg_catalog.pg_replication_slots"
    )
    with source_errors("counting the slots"):
        ((has_room,),) = await read_rows(conn, query)
    if not has_room:
        raise SourceRefused(
            "source: no replication slot is free, and the copy's snapshot needs one while it is made",
            hint=_REFUSALS["53400"],
        )


async def create_slot(conn: Connection, slot_name: str, *, two_phase: bool = False) -> int:
    """Create a permanent pgoutput slot, with two_phase or without, and return the LSN it starts at.

    It waits until every transaction that runs on the publisher has ended: that is PostgreSQL's rule.

    Raises:
        SourceRefused: the name is taken or not a slot name, no slot is free, or the role lacks REPLICATION.
        SourceLost: the connection broke; the slot may exist.
    """
    query: LiteralString = (
        "SELECT lsn FROM pg_catalog.pg_create_logical_replication_slot($1::name, 'pgoutput', false, $2)"
    )
    with source_errors(f"creating the slot {slot_name!r}"):
        ((lsn,),) = await read_rows(conn, query, [slot_name, two_phase])
    return parse_lsn(lsn)


async def advance_slot(conn: Connection, slot_name: str, lsn: int) -> None:
    """Move the slot forward to an LSN, which is durable on the target.

    Raise SlotBusy if a process reads it; SourceRefused if it is not there, or is past the LSN.
    """
    query: LiteralString = "SELECT pg_catalog.pg_replication_slot_advance($1::name, $2::pg_lsn)"
    with source_errors(f"moving the slot {slot_name!r}"):
        await read_rows(conn, query, [slot_name, format_lsn(lsn)])


async def copy_slot(conn: Connection, slot_name: str, new_name: str) -> int:
    """Make a permanent slot that begins where another one does, and return the LSN that it starts at.

    Raises:
        SourceRefused: the name is taken, no slot is free, or the role lacks REPLICATION.
        SourceLost: the connection broke; the slot may exist.
    """
    query: LiteralString = (
        "SELECT c.lsn FROM pg_catalog.pg_copy_logical_replication_slot($1::name, $2::name, false) AS c"
    )
    with source_errors(f"creating the slot {new_name!r}"):
        ((lsn,),) = await read_rows(conn, query, [slot_name, new_name])
    return parse_lsn(lsn)


async def drop_slot(conn: Connection, slot_name: str) -> None:
    """Drop the slot.

    Raise SlotBusy if a process reads it; SourceRefused if it is not there, or the role lacks REPLICATION.
    """
    with source_errors(f"dropping the slot {slot_name!r}"):
        await read_rows(conn, "SELECT pg_catalog.pg_drop_replication_slot($1::name)", [slot_name])
