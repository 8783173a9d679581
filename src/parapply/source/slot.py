"""Is this the publisher, the slot and the position we know? Checked before every start of the stream.

In: an open plain session on the publisher, and what the target's state says. Out: `SourceFacts`, or a refusal.
Never makes a slot unless asked to: a new slot in the place of a lost one hides a gap (traps F11, F12).
Also the one place where errors of a psycopg session on the publisher become ours (`source_errors`).

The role needs LOGIN and REPLICATION, nothing else; a role without REPLICATION can still read all facts here.

Source: PostgreSQL manual, "pg_replication_slots", "Control Data Functions", "Replication Management Functions".
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import psycopg

from parapply.driver import Session, refusal_hint
from parapply.errors import SlotBusy, SourceLost, SourceRefused
from parapply.model import POSTGRES_EPOCH_US, parse_lsn
from parapply.source.options import source_conninfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import LiteralString

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]


#: Seconds to wait for a TCP connection to the publisher; libpq would wait for the kernel, which is minutes.
CONNECT_TIMEOUT_S = 10

#: Tables of a database, the catalogue's own 68 among them, up to which listing the published ones is a matter of
#: milliseconds.
_MANY_TABLES = 500


class SlotFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A replication slot as pg_replication_slots shows it; what a server does not know yet is None or False."""

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    is_temporary: bool
    active_pid: int | None
    confirmed_flush_lsn: int | None
    wal_status: str | None  # reserved, extended, unreserved, lost
    invalidation_reason: str | None  # 17 and later
    is_conflicting: bool  # 16 and later
    is_two_phase: bool


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher as it is now."""

    system_identifier: str  # unsigned 64 bits
    timeline: int  # 0 on a standby
    database: str
    server_version_num: int
    wal_level: str
    is_in_recovery: bool
    wal_sender_timeout_s: float  # 0: none
    decoding_memory_bytes: int  # logical_decoding_work_mem of this session
    flush_lsn: int
    slot: SlotFacts | None


@contextmanager
def source_errors(doing: str) -> Iterator[None]:
    """Turn errors of psycopg into ours; every other exception passes.

    Args:
        doing: what was attempted, for the message.

    Raises:
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
    "42501": "the source's role needs LOGIN and REPLICATION: ALTER ROLE ... REPLICATION",
    "42704": "check source.slot and source.publications; `parapply init` creates the slot",
    "42710": "choose another source.slot",
    "53400": "raise max_replication_slots on the publisher, or drop a slot nobody reads",
    "55000": "see `parapply status` and pg_replication_slots on the publisher",
}


#: What the role lacks is not REPLICATION then.
_OBJECTS = ("for table", "for schema", "for sequence", "for view", "for function")


def _source_error(doing: str, error: psycopg.Error) -> SourceRefused | SourceLost:
    primary = error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]
    text = f"source, {doing}: {primary}"
    if error.sqlstate == "55006":
        return SlotBusy(text, hint="another process reads the slot; after a broken connection the server notices later")
    if error.sqlstate == "42501" and any(words in primary for words in _OBJECTS):
        return SourceRefused(text, hint="GRANT what is missing to the source's role: config/roles/publisher.sql does")
    if error.sqlstate in _REFUSALS:
        return SourceRefused(text, hint=_REFUSALS[error.sqlstate])
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return SourceLost(text, hint=refusal_hint(text))
    return SourceRefused(text)


async def connect(
    dsn: str,
    *,
    application_name: str,
    is_replication: bool = False,
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
    decoding_memory_bytes: int = 0,
) -> Connection:
    """Open an autocommit session on the publisher with its settings pinned.

    Args:
        dsn: as configured.
        application_name: if the DSN has none.
        is_replication: for START_REPLICATION.
        connect_timeout_s: if the DSN has none.
        decoding_memory_bytes: for logical_decoding_work_mem; 0: as the publisher has it.

    Raises:
        ConfigError: the DSN cannot be parsed.
        SourceRefused: the role may not (replicate).
        SourceLost: no connection.
    """
    text = source_conninfo(
        dsn,
        application_name=application_name,
        is_replication=is_replication,
        connect_timeout_s=connect_timeout_s,
        decoding_memory_bytes=decoding_memory_bytes,
    )
    with source_errors("connecting"):
        return await Session.connect(text, autocommit=True)


async def _rows(conn: Connection, query: LiteralString, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(query, params)
        return await cursor.fetchall()


async def inspect(conn: Connection, slot_name: str) -> SourceFacts:
    """Read what the publisher is and what it knows of the slot.

    Raises:
        SourceLost: the connection broke.
    """
    # The timeline of the WAL being written: pg_control_checkpoint() tells the old one until the first checkpoint
    # after a promotion. The slot as jsonb: its columns differ from version to version.
    query: LiteralString = """
        SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()),
               CASE WHEN r THEN 0 ELSE ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(
                    pg_catalog.pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END,
               pg_catalog.current_database(),
               pg_catalog.current_setting('wal_level'),
               r,
               (SELECT setting::float8 / 1000 FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'),
               pg_catalog.pg_size_bytes(pg_catalog.current_setting('logical_decoding_work_mem')),
               CASE WHEN r THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END,
               (SELECT pg_catalog.to_jsonb(s) FROM pg_catalog.pg_replication_slots AS s WHERE s.slot_name = $1)
          FROM pg_catalog.pg_is_in_recovery() AS r"""
    with source_errors("inspecting the publisher"):
        found = await _rows(conn, query, [slot_name])
    ((identifier, timeline, database, wal_level, is_in_recovery, timeout_s, decoding_bytes, flush, slot),) = found
    return SourceFacts(
        # The control file's number is unsigned, SQL's bigint is not.
        system_identifier=str(identifier & 0xFFFF_FFFF_FFFF_FFFF),
        timeline=timeline,
        database=database,
        server_version_num=conn.info.server_version,
        wal_level=wal_level,
        is_in_recovery=is_in_recovery,
        wal_sender_timeout_s=timeout_s,
        decoding_memory_bytes=decoding_bytes,
        flush_lsn=parse_lsn(flush) if flush else 0,
        slot=_slot_facts(slot) if slot else None,
    )


async def position(conn: Connection) -> tuple[int, int]:
    """Return the end of the publisher's durable WAL and its clock, in microseconds since 2000-01-01 UTC.

    Raises:
        SourceLost: the connection broke.
    """
    query: LiteralString = """
        SELECT CASE WHEN r THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END,
               (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint
          FROM pg_catalog.pg_is_in_recovery() AS r"""
    with source_errors("reading the publisher's position"):
        ((flush, unix_us),) = await _rows(conn, query)
    return parse_lsn(flush) if flush else 0, unix_us - POSTGRES_EPOCH_US


def _slot_facts(row: dict[str, Any]) -> SlotFacts:
    confirmed = row["confirmed_flush_lsn"]
    return SlotFacts(
        name=row["slot_name"],
        plugin=row["plugin"],
        slot_type=row["slot_type"],
        database=row["database"],
        is_temporary=row["temporary"],
        active_pid=row["active_pid"],
        confirmed_flush_lsn=parse_lsn(confirmed) if confirmed else None,
        wal_status=row["wal_status"],
        invalidation_reason=row.get("invalidation_reason"),
        is_conflicting=bool(row.get("conflicting")),
        is_two_phase=bool(row.get("two_phase")),
    )


async def check_publications(conn: Connection, names: Sequence[str]) -> None:
    """Refuse publications that are not there: newer servers skip them with a warning only, and rows are missing.

    Raises:
        SourceRefused: at least one is missing; the message lists what there is.
        SourceLost: the connection broke.
    """
    with source_errors("reading the publications"):
        present = [
            str(name) for (name,) in await _rows(conn, "SELECT pubname FROM pg_catalog.pg_publication ORDER BY 1")
        ]
    missing = [name for name in names if name not in present]
    if missing:
        there = ", ".join(repr(name) for name in present) or "none"
        raise SourceRefused(
            f"source: no publication {', '.join(repr(name) for name in missing)} in this database; there is {there}",
            hint="CREATE PUBLICATION ... on the publisher, or correct source.publications",
        )


async def published_tables(conn: Connection, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (schema, table) of everything in the publications, sorted.

    Raises:
        SourceLost: the connection broke.
    """
    query: LiteralString = (
        "SELECT DISTINCT schemaname, tablename FROM pg_catalog.pg_publication_tables"
        " WHERE pubname = ANY ($1::text[]) ORDER BY 1, 2"
    )
    with source_errors("reading the published tables"):
        return tuple((str(schema), str(table)) for schema, table in await _rows(conn, query, [list(names)]))


async def few_published_tables(conn: Connection, names: Sequence[str], limit: int) -> tuple[tuple[str, str], ...]:
    """Return (schema, table) of everything in the publications if that is few, else nothing; for a hint only.

    The view takes time for every table, so a database of many is not asked.

    Raises:
        SourceLost: the connection broke.
    """
    query: LiteralString = (
        "SELECT DISTINCT schemaname, tablename FROM pg_catalog.pg_publication_tables"
        " WHERE pubname = ANY ($1::text[]) AND (SELECT pg_catalog.count(*) FROM pg_catalog.pg_class"
        " WHERE relkind IN ('r', 'p')) <= $2::int LIMIT $3::int"
    )
    with source_errors("reading the published tables"):
        found = await _rows(conn, query, [list(names), _MANY_TABLES, limit + 1])
    return tuple((str(schema), str(table)) for schema, table in found) if len(found) <= limit else ()


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
        ((lsn,),) = await _rows(conn, query, [slot_name, two_phase])
    return parse_lsn(lsn)


async def drop_slot(conn: Connection, slot_name: str) -> None:
    """Drop the slot.

    Raises:
        SlotBusy: a process reads it.
        SourceRefused: it is not there, or the role lacks REPLICATION.
        SourceLost: the connection broke.
    """
    with source_errors(f"dropping the slot {slot_name!r}"):
        await _rows(conn, "SELECT pg_catalog.pg_drop_replication_slot($1::name)", [slot_name])
