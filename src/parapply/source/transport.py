"""How the bytes of a running COPY BOTH get in and out: by libpq, or past it where nothing is encrypted.

libpq makes, authenticates and closes the connection in both cases. The choice of transport changes nothing but speed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING, Protocol

import psycopg
from psycopg import pq

from parapply.wire.copy import CopyReader, error_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from parapply.source.slot import Connection

#: Bytes of a range taken before workers and the planner get their turn: about ten milliseconds. The kernel's buffer
#: lets the publisher go on sending then.
_TURN_BYTES = 2 * 1024 * 1024
#: SQLSTATE of pgoutput's warning, from version 18 on, that it decodes changes while a publication is not there. Nothing
#: that it publishes is sent then, and an older server ends the stream.
_PUBLICATION_MISSING = "55000"


class CopyFailed(Exception):
    """The stream did not start, or ended; the caller turns it into an error of ours."""

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        """Keep the server's message and SQLSTATE, if the server said anything."""
        super().__init__(" ".join(message.split()))
        self.sqlstate = sqlstate


class QueryFailed(Exception):
    """The server refused a query, and the connection goes on."""

    def __init__(self, message: str, sqlstate: str | None) -> None:
        """Keep the server's message and SQLSTATE."""
        super().__init__(" ".join(message.split()))
        self.sqlstate = sqlstate


class Transport(Protocol):
    """COPY ... TO STDOUT any number of times, then one COPY BOTH; every method may raise CopyFailed."""

    #: File descriptor to watch.
    fd: int
    #: Latest keep-alive, whole; its reader puts None here.
    keepalive: bytes | None
    #: True if the last `drain` took everything that had come.
    is_drained: bool
    #: The server has warned that a publication was missing; the reader that notes it puts False here.
    has_gap: bool

    @property
    def has_early_data(self) -> bool:
        """Return whether data is at hand although the descriptor may stay quiet."""

    async def ask(self, query: str, sent_us: int) -> None:
        """Send a COPY of columns `lsn` and `data` in binary; nothing else may be under way.

        Args:
            query: the COPY.
            sent_us: the send time for its frames, microseconds since 2000-01-01 UTC on the publisher's clock.
        """

    async def answer(self, take: Callable[[list[bytes], int], Awaitable[None]]) -> bool:
        """Read the answer as fast as it comes, and leave out all from a Stream Start on; return whether one was in it.

        Args:
            take: gets frames and their bytes on the wire; nothing is read until it returns.

        Raises:
            QueryFailed: the server refused; what was handed over may end inside a transaction.
        """

    async def start(self, command: str) -> None:
        """Send START_REPLICATION and wait until the server streams."""

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return the contents of the CopyData messages of kind 'w' at hand, at most about `limit_bytes`."""

    def write(self, message: bytes) -> None:
        """Queue one CopyData message."""

    def flush(self) -> bool:
        """Send what is queued; True if some of it must wait until the descriptor is writable."""

    def end(self) -> None:
        """Announce to the server that nothing more is sent, if that is possible at once."""

    def close(self) -> None:
        """Let go of the socket; the connection itself is closed by its owner."""


def transport_of(connection: Connection, *, past_libpq: bool = True) -> LibpqTransport | PlainTransport:
    """Return the fastest transport a connection allows."""
    pg = connection.pgconn
    is_plain = not pg.ssl_in_use and not pg.used_gssapi
    return PlainTransport(connection) if past_libpq and is_plain else LibpqTransport(connection)


class LibpqTransport:
    """By libpq, never blocking: `get_copy_data(0)` would hold the interpreter lock while it waits."""

    def __init__(self, connection: Connection) -> None:
        """Take over an idle connection made with replication=database."""
        self._connection = connection
        self._pg = connection.pgconn
        self.fd = self._pg.socket
        self.keepalive: bytes | None = None
        self.is_drained = True
        self.has_gap = False
        connection.add_notice_handler(self._look_at_notice)
        self.has_early_data = False
        self._rows = CopyReader()

    def _look_at_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if _is_gap(notice.severity_nonlocalized, notice.sqlstate):
            self.has_gap = True

    async def ask(self, query: str, sent_us: int) -> None:
        """See Transport."""
        self._rows.expect_rows(sent_us)
        self._pg.nonblocking = 1
        try:
            self._pg.send_query(query.encode())
            while self._pg.flush():
                await _ready(self.fd, is_writing=True)
        except psycopg.Error as error:
            raise CopyFailed(str(error), error.sqlstate) from error

    async def answer(self, take: Callable[[list[bytes], int], Awaitable[None]]) -> bool:
        """See Transport."""
        pg = self._pg
        failed: QueryFailed | None = None
        try:
            while True:
                while pg.is_busy():
                    await _ready(self.fd)
                    pg.consume_input()
                result = pg.get_result()
                if result is None:
                    break
                if result.status == pq.ExecStatus.COPY_OUT:
                    await self._take_rows(take)
                elif result.status == pq.ExecStatus.FATAL_ERROR:
                    sqlstate = result.error_field(pq.DiagnosticField.SQLSTATE)
                    message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message or b""
                    failed = QueryFailed(message.decode("utf-8", "replace"), sqlstate.decode() if sqlstate else None)
        except psycopg.Error as error:
            raise CopyFailed(str(error), error.sqlstate) from error
        if failed is not None:
            if pg.status != pq.ConnStatus.OK:
                raise CopyFailed(str(failed), failed.sqlstate)
            raise failed
        return self._rows.has_stream

    async def _take_rows(self, take: Callable[[list[bytes], int], Awaitable[None]]) -> None:
        pg, add = self._pg, self._rows.row
        n_bytes, size = 0, 0
        while n_bytes >= 0:
            frames: list[bytes] = []
            while size < _TURN_BYTES:
                n_bytes, data = pg.get_copy_data(1)
                if n_bytes <= 0:
                    break
                add(bytes(data), frames)
                size += n_bytes
            if frames:
                await take(frames, size)
            if n_bytes == 0:
                await _ready(self.fd)
                pg.consume_input()
                size = 0
            elif n_bytes > 0:
                await asyncio.sleep(0)
                size = 0

    async def start(self, command: str) -> None:
        """See Transport."""
        try:
            await self._connection.execute(command.encode())
        except psycopg.Error as error:
            raise CopyFailed(str(error), error.sqlstate) from error
        self._pg.nonblocking = 1

    def drain(self, limit_bytes: int) -> list[bytes]:
        """See Transport."""
        pg = self._pg
        frames: list[bytes] = []
        append, get_copy_data = frames.append, pg.get_copy_data
        size = 0
        self.is_drained = False
        try:
            while size < limit_bytes:
                pg.consume_input()
                before = len(frames)
                while True:
                    n_bytes, data = get_copy_data(1)
                    if n_bytes <= 0:
                        break
                    # One copy of the message: the view belongs to a libpq buffer that goes with it.
                    frame = bytes(data)
                    if frame[:1] == b"w":
                        append(frame)
                        size += n_bytes
                    elif frame[:1] == b"k":
                        self.keepalive = frame
                if n_bytes < 0:
                    raise CopyFailed(self._last_words())
                if len(frames) == before:
                    self.is_drained = True
                    break
        except psycopg.Error as error:
            raise CopyFailed(str(error)) from error
        return frames

    def _last_words(self) -> str:
        """Return why the copy ended."""
        result = self._pg.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return (result.error_message or b"").decode("utf-8", "replace")
        return "the publisher ended the stream"

    def write(self, message: bytes) -> None:
        """See Transport."""
        try:
            self._pg.put_copy_data(message)
        except psycopg.Error as error:
            raise CopyFailed(str(error)) from error

    def flush(self) -> bool:
        """See Transport."""
        try:
            return bool(self._pg.flush())
        except psycopg.Error:
            # The reader gets the same error and reports it.
            return False

    def end(self) -> None:
        """See Transport."""
        try:
            self._pg.put_copy_end()
            self._pg.flush()
        except psycopg.Error:
            return

    def close(self) -> None:
        """See Transport: everything belongs to the connection."""


class PlainTransport:
    """Past libpq on its socket: many messages for each read. The connection is idle, so libpq's buffers are empty."""

    def __init__(self, connection: Connection) -> None:
        """Take over an idle, unencrypted connection made with replication=database."""
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        self._socket.setblocking(False)
        self._reader = CopyReader()
        self._early: list[bytes] = []
        self.is_drained = True
        self.has_gap = False
        self._unsent = b""
        self.fd = self._socket.fileno()

    @property
    def keepalive(self) -> bytes | None:
        """See Transport."""
        return self._reader.keepalive

    @keepalive.setter
    def keepalive(self, value: bytes | None) -> None:
        self._reader.keepalive = value

    @property
    def has_early_data(self) -> bool:
        """See Transport."""
        return bool(self._early or self._reader.keepalive)

    async def ask(self, query: str, sent_us: int) -> None:
        """See Transport."""
        self._reader.expect_rows(sent_us)
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _message(b"Q", query.encode() + b"\0"))
        except OSError as error:
            raise CopyFailed(error.strerror or str(error)) from error

    async def answer(self, take: Callable[[list[bytes], int], Awaitable[None]]) -> bool:
        """See Transport."""
        loop = asyncio.get_running_loop()
        reader = self._reader
        fields: dict[str, str] = {}
        size = unseen_bytes = 0
        is_over = False
        try:
            while not is_over:
                frames: list[bytes] = []
                n_bytes = await loop.sock_recv_into(self._socket, reader.room())
                if not n_bytes:
                    raise CopyFailed(fields.get("M", "the server closed the connection unexpectedly"), fields.get("C"))
                reader.received(n_bytes, frames)
                # A row larger than one read comes with the last of its reads.
                unseen_bytes += n_bytes
                if frames:
                    await take(frames, unseen_bytes)
                    unseen_bytes = 0
                for kind, contents in reader.others:
                    self._look_at_notice(kind, contents)
                    if kind == ord("E"):
                        fields = error_fields(contents)
                    is_over = is_over or kind == ord("Z")
                reader.others.clear()
                size += n_bytes
                if size >= _TURN_BYTES:
                    # Data at hand is taken without waiting for the event loop, so that the publisher, which decodes
                    # the next range only when this one is sent, never waits for the leader.
                    size = 0
                    await asyncio.sleep(0)
        except OSError as error:
            raise CopyFailed(error.strerror or str(error)) from error
        finally:
            reader.expect_stream()
        if fields:
            raise QueryFailed(fields.get("M", ""), fields.get("C"))
        return reader.has_stream

    async def start(self, command: str) -> None:
        """See Transport."""
        loop = asyncio.get_running_loop()
        others = self._reader.others
        try:
            await loop.sock_sendall(self._socket, _message(b"Q", command.encode() + b"\0"))
            while True:
                n_bytes = await loop.sock_recv_into(self._socket, self._reader.room())
                if not n_bytes:
                    raise CopyFailed("the server closed the connection unexpectedly")
                self._reader.received(n_bytes, self._early)
                for kind, contents in others:
                    self._look_at_notice(kind, contents)
                    if kind == ord("E"):
                        fields = error_fields(contents)
                        raise CopyFailed(fields.get("M", ""), fields.get("C"))
                is_started = any(kind == ord("W") for kind, _ in others)
                others.clear()
                if is_started:
                    return
        except OSError as error:
            raise CopyFailed(error.strerror or str(error)) from error

    def drain(self, limit_bytes: int) -> list[bytes]:
        """See Transport."""
        frames, self._early = self._early, []
        reader, receive_into = self._reader, self._socket.recv_into
        size = 0
        self.is_drained = False
        try:
            while size < limit_bytes:
                room = reader.room()
                n_bytes = receive_into(room)
                if not n_bytes:
                    raise CopyFailed("the server closed the connection unexpectedly")
                reader.received(n_bytes, frames)
                size += n_bytes
                if reader.others:
                    self._look_at_others()
                if n_bytes < len(room):
                    # That was all; asking again would cost as much as reading.
                    self.is_drained = True
                    break
        except BlockingIOError:
            self.is_drained = True
        except OSError as error:
            raise CopyFailed(error.strerror or str(error)) from error
        return frames

    def _look_at_others(self) -> None:
        for kind, contents in self._reader.others:
            self._look_at_notice(kind, contents)
            if kind == ord("E"):
                fields = error_fields(contents)
                raise CopyFailed(f"{fields.get('S', 'ERROR')}: {fields.get('M', '')}", fields.get("C"))
            if kind in b"cCZ":
                raise CopyFailed("the publisher ended the stream")
        # Other notices and parameter changes are nothing to us.
        self._reader.others.clear()

    def _look_at_notice(self, kind: int, contents: bytes) -> None:
        if kind == ord("N"):
            fields = error_fields(contents)
            self.has_gap = self.has_gap or _is_gap(fields.get("V"), fields.get("C"))

    def write(self, message: bytes) -> None:
        """See Transport."""
        self._unsent += _message(b"d", message)

    def flush(self) -> bool:
        """See Transport."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:
            # The reader gets the same error and reports it.
            self._unsent = b""
        return False

    def end(self) -> None:
        """See Transport."""
        self._unsent += _message(b"c", b"")
        self.flush()

    def close(self) -> None:
        """See Transport."""
        self._socket.close()


def _is_gap(severity: str | None, sqlstate: str | None) -> bool:
    """Return whether a notice, its severity in English, reports one."""
    return severity == "WARNING" and sqlstate == _PUBLICATION_MISSING


async def _ready(fd: int, *, is_writing: bool = False) -> None:
    """Wait until a descriptor can be read, or written."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def done() -> None:
        if not ready.done():
            ready.set_result(None)

    (loop.add_writer if is_writing else loop.add_reader)(fd, done)
    try:
        await ready
    finally:
        (loop.remove_writer if is_writing else loop.remove_reader)(fd)


def _message(kind: bytes, contents: bytes) -> bytes:
    return kind + struct.pack(">I", len(contents) + 4) + contents
