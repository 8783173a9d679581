"""Reads a slot: in ranges of WAL while there is much to catch up, then as a stream. Both give the same messages.

`run` is the only part that waits; the runtime starts it as a task, in which each reader of ranges is one. Everything
else is called by intake and progress, as if there were a stream from the beginning.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from parapply import failpoints
from parapply.errors import ParapplyError, SlotBusy, SourceLost
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.quoting import literal
from parapply.source.failover import check_same
from parapply.source.range_front import RangeFront
from parapply.source.range_order import RangeOrder
from parapply.source.ranges import CopyRefused, RangeReader
from parapply.source.slot import source_errors
from parapply.source.stream import ReplicationStream, transport_of
from parapply.tasks import end_tasks
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from parapply.source.catch_up import CatchUp
    from parapply.source.range_order import RangesEnd
    from parapply.source.slot import Connection, SlotFacts, SourceFacts
    from parapply.wire.copy import Keepalive


class CatchUpStream:
    """One connection that reads one slot, with others beside it for ranges. Only the leader uses it."""

    def __init__(
        self, connection: Connection, look: Callable[[], Awaitable[SlotFacts | None]], *, past_libpq: bool = True
    ) -> None:
        """Take over a connection opened with ``replication=database``; arguments as for `ReplicationStream`.

        `look` asks another session for the slot as it is now.
        """
        self._connection = connection
        self._look = look
        self._past_libpq = past_libpq
        self._stream = ReplicationStream(connection, past_libpq=past_libpq)
        self._loop = asyncio.get_running_loop()
        self._log = get_logger()
        self._facts: SourceFacts | None = None
        self._plan: CatchUp | None = None
        self._front: RangeFront | None = None
        #: Held by the reader that asks for the next range.
        self._asking = asyncio.Lock()
        #: The one of this connection first.
        self._readers: list[RangeReader] = []
        self._n_readers = 1
        self._connect: Callable[[], Awaitable[Connection]] | None = None
        self._command: Callable[[int], str] | None = None
        self._order = RangeOrder(0)
        #: Set when a reader that waits for the others, or for room, must look again.
        self._has_changed = asyncio.Event()
        #: Readable as long as something is held: what waits for it sees what it would of the stream's own socket.
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._is_ringing = False
        self._is_bell_watched = False
        self._on_readable: Callable[[], None] | None = None
        self._is_streaming = False
        #: True if nothing of ranges is left to take: what comes next is the stream's own.
        self._is_at_stream = False
        self._is_closed = False
        self._durable_lsn = 0
        self._ranges_end_lsn = 0
        #: See `ReplicationStream`.
        self.keepalive: Keepalive | None = None
        #: True if the last `drain` took everything that had come, and nothing of a range has come since.
        self.is_drained = True
        #: True if commits on the publisher wait for what is reported. Written by the monitor; read by progress.
        self.is_synchronous = False
        #: How the slot is read now, and why so; for people.
        self.reading = Reading.STREAM
        self.reason = ""

    @property
    def sender_pid(self) -> int:
        """Return the publisher's process that sends."""
        return self._stream.sender_pid

    @property
    def standby_name(self) -> str:
        """Return the name that the publisher knows the stream by among its standbys."""
        return self._stream.standby_name

    @property
    def shown(self) -> str:
        """Return how the slot is read, and why so, for people."""
        return f"{self.reading}: {self.reason}" if self.reason else self.reading.value

    def reading_of(self, end_lsn: int) -> Reading:
        """Return how the transaction was read that ends at an LSN."""
        return Reading.RANGES if self.reading is Reading.RANGES or end_lsn <= self._ranges_end_lsn else Reading.STREAM

    @property
    def gathers(self) -> bool:
        """Return whether messages gather while nothing is read.

        Messages of ranges come into memory without it, and clients whose commits wait write nothing more.
        """
        return self._is_at_stream and not self.is_synchronous

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes that the kernel holds for the next read of the stream."""
        return self._stream.waiting_bytes

    @property
    def confirmed_flush_lsn(self) -> int:
        """Return the LSN that was last reported to the slot, and never goes back."""
        return max(self._stream.confirmed_flush_lsn, self._front.slot_lsn if self._front else 0)

    @property
    def is_unfinished(self) -> bool:
        """Return whether a range that was asked for did not come to its end: another attempt may end the same way."""
        return self.reading is Reading.RANGES and any(reader.is_unfinished for reader in self._readers)

    @property
    def refusal(self) -> str:
        """Return why the publisher refused a query of a range, for people; empty: it refused none."""
        return next((reader.refusal for reader in self._readers if reader.refusal), "")

    async def check_same(self, facts: SourceFacts) -> None:
        """Make sure, before `start` and `catch_up`, that the connection leads to a server; as `failover.check_same`."""
        self._facts = facts
        await check_same(self._connection, facts)

    async def claim(self, slot_name: str, own_pid: int = 0) -> None:
        """Keep every other parapply off the slot until the connection ends, before `start` and `catch_up`.

        PostgreSQL does that for a stream only; a stream takes the lock as well because it would pass by one that reads
        ranges. The publisher may not have noticed that the last connection was left: its process is ended if it holds
        the lock.

        Raise SlotBusy if another one has it.
        """
        key = f"pg_catalog.hashtextextended({literal(f'parapply reads {slot_name}')}, 0)"
        with source_errors("claiming the slot"):
            cursor = await self._connection.execute(f"SELECT pg_catalog.pg_try_advisory_lock({key})".encode())
            row = await cursor.fetchone()
            if row is not None and not row[0]:
                await self._connection.execute(
                    "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_locks WHERE locktype = 'advisory'"  # noqa: S608
                    f" AND granted AND objsubid = 1 AND pid = {own_pid:d}"
                    f" AND classid::bigint << 32 | objid::bigint = {key}".encode()
                )
        if row is None or not row[0]:
            raise SlotBusy(
                f"slot {slot_name!r} is read by another parapply.",
                hint="it is a capture, or has another target or target.state_schema, or the publisher has not noticed "
                "yet that it went away",
            )

    async def start(self, command: str, start_lsn: int, reason: str = "") -> None:
        """Send a START_REPLICATION that names an LSN; errors as of `ReplicationStream.start`.

        Raises:
            SourceLost: another reader has moved the slot past the LSN, where the publisher begins without a word.
        """
        self.reading, self.reason = Reading.STREAM, reason
        await self._stream.start(command)
        # No other session moves it from now on, and nothing has been reported yet.
        found = await self._look()
        if found is None or (found.confirmed_flush_lsn or 0) > start_lsn:
            raise SourceLost("the slot was moved by another reader before the stream began.")
        self._is_streaming = True
        self._is_at_stream = not self._order.holds

    async def catch_up(
        self,
        plan: CatchUp,
        command: Callable[[int], str],
        lag_bytes: int,
        connect: Callable[[], Awaitable[Connection]] | None = None,
    ) -> str:
        """Ask for the first range; return why that cannot be, empty if it is under way and `run` will read it.

        Args:
            plan: what to read.
            command: makes the START_REPLICATION for the LSN where the ranges end.
            lag_bytes: of WAL to catch up.
            connect: opens another connection like this one, for another reader; None: this one reads alone.

        Raises:
            SourceLost: the connection ended, or is of no use after a refused query, with `refusal`.
        """
        front = self._front = RangeFront(plan)
        first = RangeReader(self._connection, self._stream.transport, plan, front)
        self._readers = [first]
        try:
            async with self._asking:
                end = await first.ask(0)
        except CopyRefused as refused:
            return str(refused)
        if end is not None:
            await first.leave()
            return end.reason
        self._plan, self._command, self._connect = plan, command, connect
        self._order = RangeOrder(plan.limits.buffer_bytes)
        self._order.begin()
        self._n_readers = plan.limits.readers_of(lag_bytes) if connect is not None else 1
        self.reading, self.reason = Reading.RANGES, f"{lag_bytes // (1024 * 1024)} MB of WAL to catch up"
        self._log.info("catch_up_entered", start_lsn=format_lsn(plan.start_lsn), size_bytes=lag_bytes)
        return ""

    async def run(self) -> None:
        """Read ranges to their end, start the stream there, and wait to be cancelled.

        Raises:
            SourceLost: the connection ended, or is of no use after a refused range, with `refusal`.
            SlotBusy, SourceRefused: the stream did not start.
        """
        if self._plan is not None and not self._is_streaming:
            beside = [self._read_beside(self._plan, number) for number in range(2, self._n_readers + 1)]
            tasks = [asyncio.create_task(work, name="ranges") for work in (self._read_first(), *beside)]
            try:
                await asyncio.gather(*tasks)
            finally:
                await end_tasks(tasks)
        await asyncio.Event().wait()

    async def _read_first(self) -> None:
        assert self._command is not None
        first = self._readers[0]
        try:
            await self._read_ranges(first, 0)
        except CopyRefused as refused:
            raise first.refused(refused) from refused
        await self._until(lambda: self._order.outcome is not None)
        assert self._order.outcome is not None
        assert self._front is not None
        end = self._order.outcome
        await first.leave()
        failpoints.probe(failpoints.HANDED_OVER)
        start_lsn = self._ranges_end_lsn = self._front.stream_lsn(end)
        await self.start(self._command(start_lsn), start_lsn, end.reason)
        n_ranges = [reader.n_read for reader in self._readers if reader.n_read]
        self._log.info(
            "catch_up_left",
            start_lsn=format_lsn(start_lsn),
            reason=end.reason,
            n_ranges=sum(n_ranges),
            n_readers=len(n_ranges),
        )
        self._listen()

    async def _read_beside(self, plan: CatchUp, number: int) -> None:
        """Read ranges in another session, as long as the publisher gives one."""
        assert self._connect is not None
        assert self._front is not None
        reader: RangeReader | None = None
        try:
            async with AsyncExitStack() as stack:
                connection = await self._connect()
                stack.push_async_callback(connection.close)
                if self._facts is not None:
                    await check_same(connection, self._facts)
                transport = transport_of(connection, past_libpq=self._past_libpq)
                stack.callback(transport.close)
                reader = RangeReader(connection, transport, plan, self._front)
                stack.push_async_callback(reader.cancel)
                self._readers.append(reader)
                await self._read_ranges(reader)
        except ParapplyError as error:
            if reader is not None:
                raise
            self._log.info("catch_up_readers_reduced", readers=number - 1, reason=error.line())
        except CopyRefused as refused:
            self._log.info("catch_up_readers_reduced", readers=number - 1, reason=str(refused))

    async def _read_ranges(self, reader: RangeReader, number: int | None = None) -> None:
        """Read one range after the other, from this one on that was asked for, until the last one is known."""
        while number is not None or (number := await self._ask(reader)) is not None:
            try:
                end = await reader.read(partial(self._take, reader, number))
            except SourceLost:
                if self._order.wants(number):
                    raise
                return
            self._end(reader, number, end)
            number = None

    async def _ask(self, reader: RangeReader) -> int | None:
        """Ask for the next range when there is room for it, and return its number; None: there is no further one."""
        order, front = self._order, self._front
        assert front is not None
        await self._until(lambda: front.may_ask(order, is_first=reader is self._readers[0]))
        async with self._asking:
            if order.is_ending:
                return None
            end = await reader.ask(self._durable_lsn)
            number = order.begin()
        if end is None:
            return number
        self._end(reader, number, end)
        return None

    def _end(self, reader: RangeReader, number: int, end: RangesEnd) -> None:
        self._note_gap(reader, number)
        self._order.end(number, *end)
        self._ring()

    def _note_gap(self, reader: RangeReader, number: int) -> None:
        """Note a warning before anything of its range can be drained: the range may fail before its end."""
        if reader.transport.has_gap and self._order.wants(number):
            reader.transport.has_gap = False
            self._stream.note_gap(reader.asked.end_lsn)

    async def _take(self, reader: RangeReader, number: int, frames: list[bytes], n_bytes: int) -> None:
        self._note_gap(reader, number)
        self._order.add(number, frames, n_bytes)
        self._ring()
        await self._until(lambda: self._order.may_read(number))

    def _ring(self) -> None:
        """Report what can be drained, and have the readers look."""
        self._has_changed.set()
        if self._order.holds:
            self.is_drained = False
        if self._order.holds and not self._is_ringing and not self._is_closed:
            self._is_ringing = True
            self._ringer.send(b"\0")

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._has_changed.clear()
            await self._has_changed.wait()

    def resume_reading(self, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever there is something to drain, until `pause_reading`."""
        self._on_readable = on_readable
        self._listen()

    def pause_reading(self) -> None:
        """Stop calling; status updates still go out."""
        self._on_readable = None
        if self._is_closed:
            return
        self._ignore_bell()
        self._stream.pause_reading()

    def _listen(self) -> None:
        """Wait for what comes next: what is held, and then the stream."""
        if self._on_readable is None or self._is_closed:
            return
        if self._is_at_stream:
            self._ignore_bell()
            self._stream.resume_reading(self._on_readable)
        else:
            self._loop.add_reader(self._bell, self._on_readable)
            self._is_bell_watched = True

    def _ignore_bell(self) -> None:
        # For a socket that is not watched the event loop makes and drops an error, which takes longer than a read.
        if self._is_bell_watched:
            self._is_bell_watched = False
            self._loop.remove_reader(self._bell)

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return the data frames at hand, at most about `limit_bytes`; errors as of `ReplicationStream.drain`."""
        if self._is_at_stream:
            frames = self._stream.drain(limit_bytes)
            self.is_drained = self._stream.is_drained
            if self._stream.keepalive is not None:
                self.keepalive, self._stream.keepalive = self._stream.keepalive, None
            return frames
        if not self._order.holds:
            return []
        found, end = self._order.take(limit_bytes)
        if end is not None:
            self.keepalive = end
        self._has_changed.set()
        if not self._order.holds:
            self.is_drained = True
            self._is_ringing = False
            self._is_at_stream = self._is_streaming
            self._bell.recv(1)
            self._listen()
        return found

    @property
    def gap_lsn(self) -> int | None:
        """Return the LSN before which a publication was missing; None: none was, as far as known."""
        return self._stream.gap_lsn

    def forget_gap(self, lsn: int) -> None:
        """See `ReplicationStream.forget_gap`."""
        self._stream.forget_gap(lsn)

    def send_status(
        self, written_lsn: int, flushed_lsn: int, applied_lsn: int, *, reply_requested: bool = False
    ) -> None:
        """Report progress; errors as of `ReplicationStream`.

        While ranges are read the slot is moved between two of them.
        """
        self._durable_lsn = max(self._durable_lsn, flushed_lsn)
        if self._is_streaming:
            self._stream.send_status(written_lsn, flushed_lsn, applied_lsn, reply_requested=reply_requested)

    async def close(self) -> None:
        """End the stream politely if it still runs, and close the connection; once more is harmless.

        `run` has ended: it waits for the socket that is closed here.
        """
        if self._is_closed:
            return
        self.pause_reading()
        self._is_closed = True
        if self._readers:
            await self._readers[0].cancel()
        await self._stream.close()
        self._order = RangeOrder(0)
        self._bell.close()
        self._ringer.close()
