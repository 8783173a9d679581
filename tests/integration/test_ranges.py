"""Ranges of WAL by query, past libpq and by libpq: the frames of the stream, and the stream after them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from parapply import failpoints
from parapply.errors import SourceLost
from parapply.login import Login
from parapply.model import format_lsn, parse_lsn
from parapply.source import options, slot
from parapply.source.catch_up import CatchUp, RangeLimits, range_options
from parapply.source.catch_up_stream import CatchUpStream
from parapply.source.stream import ReplicationStream, transport_of
from parapply.tasks import end_tasks
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fixtures.databases import Database

BOTH = pytest.mark.parametrize("past_libpq", [True, False], ids=["plain", "libpq"])
_LIMITS = RangeLimits(range_bytes=1 << 20, enter_bytes=0, leave_bytes=0, buffer_bytes=1 << 26)
_COMMIT = ord("C")


def _command(version: int, name: str, start_lsn: int) -> str:
    return options.start_replication_sql(name, start_lsn, options.start_options(version, ["p"], "any"))


def _start_lsn(database: Database, name: str) -> int:
    ((lsn,),) = database.rows(f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{name}'")
    return parse_lsn(lsn)


async def _look(database: Database, name: str) -> slot.SlotFacts | None:
    async with await slot.connect(Login(database.source_role_dsn), application_name="look") as connection:
        return await slot.read_slot(connection, name)


@asynccontextmanager
async def _reading(
    database: Database, name: str, *, past_libpq: bool, limits: RangeLimits = _LIMITS, start_lsn: int | None = None
) -> AsyncIterator[CatchUpStream]:
    """Read a slot in ranges from its start, by the role that a daemon uses."""
    connection = await slot.connect(Login(database.source_role_dsn), application_name="test", is_replication=True)
    version = connection.info.server_version
    reader = CatchUpStream(connection, lambda: _look(database, name), past_libpq=past_libpq)
    start_lsn = _start_lsn(database, name) if start_lsn is None else start_lsn
    plan = CatchUp(slot=name, start_lsn=start_lsn, options=range_options(version, ["p"], "any"), limits=limits)
    running = None

    async def connect() -> slot.Connection:
        return await slot.connect(Login(database.source_role_dsn), application_name="test", is_replication=True)

    try:
        assert not await reader.catch_up(plan, lambda lsn: _command(version, name, lsn), 1 << 30, connect)
        running = asyncio.create_task(reader.run(), name="reader")
        yield reader
    finally:
        if running is not None:
            await end_tasks([running])
        await reader.close()


async def _frames(reader: CatchUpStream | ReplicationStream, n_commits: int) -> list[bytes]:
    """Return frames up to a number of commits, without announcements, which every range repeats, and send time."""
    found: list[bytes] = []
    readable = asyncio.Event()
    reader.resume_reading(readable.set)
    async with asyncio.timeout(20):
        while sum(frame[17] == _COMMIT for frame in found) < n_commits:
            await readable.wait()
            readable.clear()
            found += [frame[:17] + frame[25:] for frame in reader.drain(1 << 17) if frame[25:26] not in (b"R", b"Y")]
    reader.pause_reading()
    return found


def _prepare(database: Database, *names: str) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    for name in names:
        database.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")


def _fill(database: Database, first: int, n_transactions: int) -> None:
    """Commit inserts, updates and deletes: rows of all sizes, one far larger than any buffer; and restart points."""
    with database.connect() as connection:
        point = "SELECT pg_log_standby_snapshot()" if connection.info.server_version >= 160000 else "CHECKPOINT"
        for number in range(first, first + n_transactions):
            connection.execute(
                f"BEGIN; INSERT INTO t SELECT {number} * 100 + g, repeat(md5(g::text), g) FROM generate_series(1, 40) g"
                f"; UPDATE t SET v = 'new' WHERE id = {number} * 100 + 3; DELETE FROM t WHERE id = {number} * 100 + 4;"
                " COMMIT".encode()
            )
            if number % 4 == 0:
                connection.execute(point.encode())


@pytest.mark.parametrize(
    ("past_libpq", "readers"), [(True, 1), (False, 1), (True, 4), (False, 2)], ids=["plain", "libpq", "four", "two"]
)
@pytest.mark.pg_majors(15, 18)
async def test_ranges_and_the_stream_after_them_give_the_frames_of_the_stream(
    source_db: Database, *, past_libpq: bool, readers: int
) -> None:
    """Byte by byte but for the send time: each transaction once, in order, across every range and the hand-over.

    Several sessions give what one gives, also with ranges in the middle of a large row.
    """
    names = f"{source_db.dbname}_a", f"{source_db.dbname}_b"
    _prepare(source_db, *names)
    _fill(source_db, 0, 40)
    source_db.execute(
        "INSERT INTO t VALUES (-1, (SELECT string_agg(md5(g::text), '') FROM generate_series(1, 90000) g))"
    )
    _fill(source_db, 40, 20)
    range_bytes = _LIMITS.range_bytes if readers == 1 else 1 << 17
    limits = msgspec.structs.replace(_LIMITS, readers=readers, range_bytes=range_bytes)
    async with _reading(source_db, names[0], past_libpq=past_libpq, limits=limits) as reader:
        found = await _frames(reader, 61)
        assert reader.keepalive is not None or reader.reading is Reading.STREAM
        # Everything after the hand-over also comes once.
        await _handed_over(reader)
        _fill(source_db, 60, 5)
        found += await _frames(reader, 5)
        lsn = int.from_bytes(found[-1][-16:-8])
        reader.send_status(lsn, lsn, lsn)
        where = f"FROM pg_replication_slots WHERE slot_name = '{names[0]}'"
        source_db.wait_until(f"SELECT confirmed_flush_lsn >= '{format_lsn(lsn)}' {where}")
    connection = await slot.connect(Login(source_db.dsn), application_name="test", is_replication=True)
    stream = ReplicationStream(connection, past_libpq=past_libpq)
    try:
        await stream.start(_command(connection.info.server_version, names[1], 0))
        wanted = await _frames(stream, 66)
    finally:
        await stream.close()
    assert found == wanted


async def _handed_over(reader: CatchUpStream) -> None:
    async with asyncio.timeout(20):
        while reader.reading is not Reading.STREAM or not reader.is_drained:
            reader.drain(1 << 17)
            await asyncio.sleep(0)


@BOTH
async def test_nothing_is_read_beyond_what_is_held(source_db: Database, *, past_libpq: bool) -> None:
    """Back-pressure: without a reader the publisher is left alone after the bytes allowed, also within a range."""
    name = f"{source_db.dbname}_a"
    _prepare(source_db, name)
    _fill(source_db, 0, 60)
    limits = RangeLimits(range_bytes=1 << 24, enter_bytes=0, leave_bytes=0, buffer_bytes=1)
    async with _reading(source_db, name, past_libpq=past_libpq, limits=limits) as reader:
        source_db.wait_until(
            "SELECT bool_and(wait_event = 'ClientWrite' OR wait_event = 'ClientRead') FROM pg_stat_activity"
            " WHERE application_name = 'test' AND backend_type = 'walsender'"
        )
        assert reader.reading is Reading.RANGES
        assert sum(frame[17] == _COMMIT for frame in await _frames(reader, 60)) == 60
    # The copy is gone with its connection.
    source_db.wait_until("SELECT count(*) = 1 FROM pg_replication_slots WHERE database = current_database()")


@BOTH
async def test_the_end_of_the_copys_backend_is_a_lost_publisher(source_db: Database, *, past_libpq: bool) -> None:
    """Whatever ends the connection inside a range is a loss like any other, and the slot is where it was."""
    name = f"{source_db.dbname}_a"
    _prepare(source_db, name)
    where = f"FROM pg_replication_slots WHERE slot_name = '{name}'"
    ((before,),) = source_db.rows(f"SELECT confirmed_flush_lsn {where}")
    _fill(source_db, 0, 60)
    limits = RangeLimits(range_bytes=1 << 24, enter_bytes=0, leave_bytes=0, buffer_bytes=1)
    connection = await slot.connect(Login(source_db.source_role_dsn), application_name="test", is_replication=True)
    reader = CatchUpStream(connection, lambda: _look(source_db, name), past_libpq=past_libpq)
    try:
        plan = CatchUp(
            slot=name,
            start_lsn=_start_lsn(source_db, name),
            options=range_options(connection.info.server_version, ["p"], "any"),
            limits=limits,
        )
        assert not await reader.catch_up(plan, lambda _: "", 0)
        source_db.execute(f"SELECT pg_terminate_backend({reader.sender_pid})")
        with pytest.raises(SourceLost):
            async with asyncio.timeout(20):
                await asyncio.gather(reader.run(), _frames(reader, 1000))
        assert reader.is_unfinished
    finally:
        await reader.close()
    assert source_db.rows(f"SELECT confirmed_flush_lsn {where}") == [(before,)]
    assert parse_lsn(before) > 0


@pytest.mark.parametrize("in_ranges", [True, False])
async def test_a_closed_reader_is_paused_and_resumed_without_harm(source_db: Database, *, in_ranges: bool) -> None:
    """Intake ends after the publisher's connection is closed, and has more to end than its reading."""
    name = f"{source_db.dbname}_a"
    _prepare(source_db, name)
    connection = await slot.connect(Login(source_db.source_role_dsn), application_name="test", is_replication=True)
    version = connection.info.server_version
    reader = CatchUpStream(connection, lambda: _look(source_db, name))
    if in_ranges:
        plan = CatchUp(
            slot=name,
            start_lsn=_start_lsn(source_db, name),
            options=range_options(version, ["p"], "any"),
            limits=_LIMITS,
        )
        assert not await reader.catch_up(plan, lambda _: "", 0)
    else:
        await reader.start(_command(version, name, 0), _start_lsn(source_db, name))
    reader.resume_reading(lambda: None)
    await reader.close()
    reader.pause_reading()
    reader.resume_reading(lambda: None)
    reader.pause_reading()


@BOTH
async def test_a_row_larger_than_a_read_counts_whole(source_db: Database, *, past_libpq: bool) -> None:
    """The bytes held have a limit, so every byte counts, whichever read it came with."""
    connection = await slot.connect(Login(source_db.source_role_dsn), application_name="test", is_replication=True)
    transport = transport_of(connection, past_libpq=past_libpq)
    counted = 0

    async def take(_: list[bytes], n_bytes: int) -> None:
        nonlocal counted
        counted += n_bytes

    try:
        rows = "SELECT '0/1'::pg_lsn, convert_to(repeat('x', 10000000), 'UTF8') FROM generate_series(1, 3)"
        await transport.ask(f"COPY ({rows}) TO STDOUT (FORMAT binary)", 0)
        await transport.answer(take)
    finally:
        transport.close()
        await connection.close()
    assert counted >= 30_000_000


@BOTH
@pytest.mark.pg_majors(15, 18)
async def test_a_refused_query_ends_the_connection(source_db: Database, *, past_libpq: bool) -> None:
    """Its error has dropped the copy, and may have left pgoutput's cache behind: no decoding follows in that session.

    Refused here: to move a slot that another session streams.
    """
    name = f"{source_db.dbname}_a"
    _prepare(source_db, name)
    _fill(source_db, 0, 20)
    limits = RangeLimits(range_bytes=1 << 14, enter_bytes=0, leave_bytes=0, buffer_bytes=1 << 26)
    connection = await slot.connect(Login(source_db.source_role_dsn), application_name="test", is_replication=True)
    version = connection.info.server_version
    plan = CatchUp(
        slot=name, start_lsn=_start_lsn(source_db, name), options=range_options(version, ["p"], "any"), limits=limits
    )
    reader = CatchUpStream(connection, lambda: _look(source_db, name), past_libpq=past_libpq)
    stream = ReplicationStream(
        await slot.connect(Login(source_db.source_role_dsn), application_name="other", is_replication=True)
    )
    try:
        assert not await reader.catch_up(plan, lambda _: "", 0)
        await stream.start(_command(version, name, 0))
        ((flush,),) = source_db.rows("SELECT pg_current_wal_flush_lsn()")
        reader.send_status(*[parse_lsn(flush)] * 3)
        with pytest.raises(SourceLost, match="was refused"):
            async with asyncio.timeout(20):
                await reader.run()
        assert "is active for PID" in reader.refusal
        assert reader.reading is Reading.RANGES
    finally:
        await reader.close()
        await stream.close()


@BOTH
@pytest.mark.pg_majors(18)
async def test_a_warning_comes_with_the_first_frames_of_its_range(source_db: Database, *, past_libpq: bool) -> None:
    """Publications of a time when one was missing: a range that fails behind these frames does not take it along."""
    name = f"{source_db.dbname}_a"
    _prepare(source_db, name)
    source_db.execute("ALTER PUBLICATION p RENAME TO away")
    source_db.execute("INSERT INTO t VALUES (1)")
    source_db.execute("ALTER PUBLICATION away RENAME TO p")
    # A range ends where a page of WAL does.
    _fill(source_db, 1, 8)
    limits = RangeLimits(range_bytes=1 << 24, enter_bytes=0, leave_bytes=0, buffer_bytes=1 << 26)
    failpoints.arm({"PARAPPLY_FAILPOINT": "range_part:raise-lost"})
    try:
        async with _reading(source_db, name, past_libpq=past_libpq, limits=limits) as reader:
            readable = asyncio.Event()
            reader.resume_reading(readable.set)
            async with asyncio.timeout(20):
                await readable.wait()
            gap_lsn = reader.gap_lsn
            assert reader.drain(1 << 17)
            assert reader.is_unfinished
            assert gap_lsn is not None
            reader.forget_gap(gap_lsn)
            assert reader.gap_lsn is None
    finally:
        failpoints.arm({})


async def test_the_copy_begins_at_the_watermark(source_db: Database) -> None:
    """Changes that the target already has are not sent again, however far back the slot is."""
    name = f"{source_db.dbname}_a"
    _prepare(source_db, name)
    _fill(source_db, 0, 20)
    ((flush,),) = source_db.rows("SELECT pg_current_wal_flush_lsn()")
    _fill(source_db, 20, 1)
    async with _reading(source_db, name, past_libpq=True, start_lsn=parse_lsn(flush)) as reader:
        (first, *_) = [frame for frame in await _frames(reader, 1) if frame[17] == _COMMIT]
        assert int.from_bytes(first[-16:-8]) > parse_lsn(flush)


async def test_restart_points_are_logged_by_a_role_that_may(source_db: Database) -> None:
    """From version 16 on; one that may not causes no error in the publisher's log."""
    async with await slot.connect(Login(source_db.source_role_dsn), application_name="test") as connection:
        has_function = connection.info.server_version >= 160000
        assert not await slot.log_running(connection)
        if has_function:
            source_db.execute(f'GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO "{source_db.source_role}"')
            assert await slot.log_running(connection)
