"""How the bytes of a running COPY BOTH get in and out: by libpq, or past it where nothing is encrypted.

libpq makes, authenticates and closes the connection in both cases. Which transport is used changes speed, nothing else.
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
    from parapply.source.slot import Connection


class CopyFailed(Exception):
    """The stream did not start, or ended; the caller turns it into an error of ours."""

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        """Keep the server's message and SQLSTATE, if the server said anything."""
        super().__init__(" ".join(message.split()))
        self.sqlstate = sqlstate


class Transport(Protocol):
    """One COPY BOTH; every method may raise CopyFailed."""

    #: File descriptor to watch.
    fd: int
    #: Latest keep-alive, whole; whoever takes it puts None here.
    keepalive: bytes | None
    #: Whether the last `drain` took everything that had come.
    is_drained: bool

    @property
    def has_early_data(self) -> bool:
        """Tell whether data is at hand although the descriptor may stay quiet."""

    async def start(self, command: str) -> None:
        """Send START_REPLICATION and wait until the server streams."""

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return the contents of the CopyData messages of kind 'w' at hand, at most about `limit_bytes`."""

    def write(self, message: bytes) -> None:
        """Queue one CopyData message."""

    def flush(self) -> bool:
        """Send what is queued; True if some of it must wait until the descriptor is writable."""

    def end(self) -> None:
        """Tell the server politely that nothing more comes from here, if that is possible at once."""

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
        self.has_early_data = False

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
            # The reader meets the same error and reports it.
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
            if kind == ord("E"):
                fields = error_fields(contents)
                raise CopyFailed(f"{fields.get('S', 'ERROR')}: {fields.get('M', '')}", fields.get("C"))
            if kind in b"cCZ":
                raise CopyFailed("the publisher ended the stream")
        # Notices and parameter changes are nothing to us.
        self._reader.others.clear()

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
            # The reader meets the same error and reports it.
            self._unsent = b""
        return False

    def end(self) -> None:
        """See Transport."""
        self._unsent += _message(b"c", b"")
        self.flush()

    def close(self) -> None:
        """See Transport."""
        self._socket.close()


def _message(kind: bytes, contents: bytes) -> bytes:
    return kind + struct.pack(">I", len(contents) + 4) + contents
