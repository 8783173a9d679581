"""The stream itself, past libpq and by libpq: the same frames, the same errors."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from parapply.errors import SlotBusy, SourceLost, SourceRefused
from parapply.login import Login
from parapply.model import format_lsn
from parapply.source import options, slot
from parapply.source.stream import ReplicationStream
from parapply.wire.assembler import Assembler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from parapply.model import Transaction
    from tests.fixtures.databases import Database

BOTH = pytest.mark.parametrize("past_libpq", [True, False], ids=["plain", "libpq"])


@asynccontextmanager
async def streaming(database: Database, name: str, *, past_libpq: bool) -> AsyncIterator[ReplicationStream]:
    """Stream a slot from its start."""
    connection = await slot.connect(Login(database.dsn), application_name="test", is_replication=True)
    stream = ReplicationStream(connection, past_libpq=past_libpq)
    try:
        version = connection.info.server_version
        start = options.start_replication_sql(name, 0, options.start_options(version, ["p"], "any"))
        await stream.start(start)
        yield stream
    finally:
        await stream.close()


def prepared(database: Database, *names: str) -> None:
    """Make a table, a publication and slots."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    for name in names:
        database.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")


async def transactions(stream: ReplicationStream, count: int) -> list[Transaction]:
    """Read a number of transactions."""
    assembler = Assembler(1 << 30)
    found: list[Transaction] = []
    readable = asyncio.Event()
    stream.resume_reading(readable.set)
    async with asyncio.timeout(20):
        while len(found) < count:
            await readable.wait()
            readable.clear()
            found += assembler.push(stream.drain(1 << 17))
    stream.pause_reading()
    return found


@pytest.mark.pg_majors(15, 16, 18)
async def test_both_transports_give_the_same_transactions(source_db: Database) -> None:
    """Messages read past libpq equal libpq's, one by one; rows of all sizes."""
    slots = f"{source_db.dbname}_a", f"{source_db.dbname}_b"
    prepared(source_db, *slots)
    for number in range(50):
        source_db.execute(
            f"INSERT INTO t SELECT {number} * 100 + g, repeat('x', g * g * 7) FROM generate_series(1, 40) g"
        )
    source_db.execute("INSERT INTO t VALUES (-1, repeat('y', 9000000))")
    read = []
    for name, past_libpq in zip(slots, (True, False), strict=True):
        async with streaming(source_db, name, past_libpq=past_libpq) as stream:
            found = await transactions(stream, 51)
            read.append([(each.xid, each.end_lsn, [frame[25:] for frame in changes(each)]) for each in found])
    assert read[0] == read[1]
    assert len(read[0]) == 51


def changes(transaction: Transaction) -> list[bytes]:
    """Return the change frames; announcements are objects."""
    return [change for change in transaction.changes if isinstance(change, bytes)]


@BOTH
async def test_a_status_moves_the_slot_and_is_answered_on_request(source_db: Database, *, past_libpq: bool) -> None:
    """The flushed LSN reaches the slot; a request is answered by a keep-alive."""
    name = f"{source_db.dbname}_s"
    prepared(source_db, name)
    source_db.execute("INSERT INTO t VALUES (1, 'a')")
    async with streaming(source_db, name, past_libpq=past_libpq) as stream:
        (one,) = await transactions(stream, 1)
        stream.send_status(one.end_lsn, one.end_lsn, one.end_lsn, reply_requested=True)
        await until(stream, lambda: stream.keepalive is not None)
        source_db.wait_until(
            f"SELECT confirmed_flush_lsn >= '{format_lsn(one.end_lsn)}' FROM pg_replication_slots"
            f" WHERE slot_name = '{name}'"
        )


@BOTH
async def test_refusals_and_losses_are_ours(source_db: Database, *, past_libpq: bool) -> None:
    """No slot: refused. Slot in use: busy, to be tried again. Walsender ended: lost."""
    name = f"{source_db.dbname}_r"
    prepared(source_db, name)
    with pytest.raises(SourceRefused, match="does not exist"):
        async with streaming(source_db, "no_such_slot", past_libpq=past_libpq):
            pass
    async with streaming(source_db, name, past_libpq=past_libpq) as stream:
        with pytest.raises(SlotBusy, match="is active for PID"):
            async with streaming(source_db, name, past_libpq=past_libpq):
                pass
        source_db.execute(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{name}'"
        )
        with pytest.raises(SourceLost, match="the stream from the publisher ended"):
            await until(stream, lambda: False)


async def until(stream: ReplicationStream, is_done: Callable[[], bool]) -> None:
    """Read until something is true."""
    readable = asyncio.Event()
    stream.resume_reading(readable.set)
    async with asyncio.timeout(20):
        while not is_done():
            await readable.wait()
            readable.clear()
            stream.drain(1 << 17)
    stream.pause_reading()


@pytest.mark.pg_majors(15, 17)
@BOTH
async def test_a_publication_that_was_missing_ends_the_stream_for_good(source_db: Database, past_libpq: bool) -> None:  # noqa: FBT001
    """Up to 17 no slot can give changes of a time without the publication: a reader that tries again never gets on."""
    name = source_db.dbname
    prepared(source_db, name)
    source_db.execute("DROP PUBLICATION p")
    source_db.execute("INSERT INTO t VALUES (1)")
    source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    with pytest.raises(SourceRefused, match="a time when a publication was missing"):
        async with streaming(source_db, name, past_libpq=past_libpq) as stream:
            await transactions(stream, 1)
