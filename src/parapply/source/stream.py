"""The replication stream: frames out of the socket, status updates into it.

psycopg has no replication API beyond COPY_BOTH, so this is the copy protocol itself, never blocking. The bytes go by
libpq, or past it where nothing is encrypted; libpq makes, authenticates and closes the connection in both cases, and
the choice of transport changes nothing but speed. (PostgreSQL manual, "Streaming Replication Protocol".)
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, TypeAlias

import psycopg
from psycopg import pq

from parapply.errors import NoPublication, SlotBusy, SourceLost, SourceRefused
from parapply.model import POSTGRES_EPOCH_US
from parapply.source.slot import take_bytes
from parapply.wire.copy import CopyReader, Keepalive, error_fields, parse_keepalive, status_update

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from parapply.source.slot import Connection

#: Kernel buffer asked for, so that the walsender is not stopped while the leader computes. The kernel may give less.
RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024
#: The same on one machine, where the network needs none: a walsender sends every message separately, and with the
#: receiver's buffer full the kernel joins them, which cost the publisher an eighth less. A quarter of it stopped the
#: sender.
LOCAL_RECEIVE_BUFFER_BYTES = 256 * 1024
#: After every other LSN.
_ANY_LSN: Final = 2**64 - 1
#: Undefined object. The slot existed a moment ago.
_NO_PUBLICATION: Final = "42704"
#: A character that UTF8 does not have, bytes that are none.
_NO_CHARACTER: Final = frozenset({"22P05", "22021"})
_AGAIN: Final = "`parapply drop`, then `parapply init --copy --truncate`"


#: The two ways of the bytes.
Transport: TypeAlias = "LibpqTransport | PlainTransport"


class ReplicationStream:
    """One running START_REPLICATION. Only the leader uses it."""

    def __init__(self, connection: Connection, *, past_libpq: bool = True) -> None:
        """Take over a connection opened with ``replication=database``.

        Args:
            connection: idle; closed by `close`.
            past_libpq: read an unencrypted socket directly, which is faster; else always by libpq.
        """
        self._connection = connection
        # As the server has it: it cuts a long one, and replaces what is not ASCII.
        self._standby_name = connection.info.parameter_status("application_name") or ""
        self._transport: Transport = transport_of(connection, past_libpq=past_libpq)
        self._loop = asyncio.get_running_loop()
        self._fd = self._transport.fd
        self._is_writing = False
        self._is_reading = False
        self._ended = False
        #: Latest keep-alive, valid once every frame drained before it has been handled; the leader takes it.
        self.keepalive: Keepalive | None = None
        #: True if the last `drain` took everything that had come.
        self.is_drained = True
        #: A publication was missing while changes were decoded that lie before this LSN; None: none was, as far as
        #: known. Written here; intake has it forgotten.
        self.gap_lsn: int | None = None
        #: LSN last reported as flushed; it never decreases. The leader reads it.
        self.confirmed_flush_lsn = 0

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes that the kernel holds for the next read."""
        (n_bytes,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)))
        return int(n_bytes)

    @property
    def transport(self) -> Transport:
        """Return the transport of the bytes; before `start` others may use it."""
        return self._transport

    @property
    def sender_pid(self) -> int:
        """Return the publisher's process that sends the stream."""
        return self._connection.info.backend_pid

    @property
    def standby_name(self) -> str:
        """Return the name that the publisher knows the stream by among its standbys."""
        return self._standby_name

    async def start(self, command: str) -> None:
        """Send START_REPLICATION.

        Raises:
            SlotBusy: another process reads the slot (55006); try again with back-off.
            SourceRefused: the publisher will never accept this command.
        """
        with socket.socket(fileno=self._fd) as view:
            try:
                view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _receive_buffer_bytes(view))
            finally:
                view.detach()
        try:
            await take_bytes(self._connection)
            await self._transport.start(command)
        except CopyFailed as failure:
            raise _start_error(failure) from failure

    def resume_reading(self, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever bytes have come, until `pause_reading`."""
        if not self._is_reading and not self._ended:
            self._is_reading = True
            self._loop.add_reader(self._fd, on_readable)
            if self._transport.has_early_data:
                self._loop.call_soon(on_readable)

    def pause_reading(self) -> None:
        """Stop reading: back-pressure. Status updates still go out, which keeps the walsender alive (trap T-10)."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return the data frames at hand, at most about `limit_bytes`, without waiting.

        Keep-alives are not among them: the latest is left in `keepalive`.

        Raises:
            NoPublication: it needs one of a time when there was none.
            ProtocolError: the bytes are not what a walsender sends.
        """
        transport = self._transport
        try:
            frames = transport.drain(limit_bytes)
        except CopyFailed as failure:
            raise self._lost(failure) from failure
        self.is_drained = transport.is_drained
        if transport.has_gap:
            transport.has_gap = False
            # A frame before the warning may be far older than what was left out.
            self.note_gap(_ANY_LSN)
        if transport.keepalive is not None:
            self.keepalive, transport.keepalive = parse_keepalive(transport.keepalive), None
        return frames

    def note_gap(self, lsn: int) -> None:
        """Note that a publication was missing while changes were decoded that lie before an LSN."""
        self.gap_lsn = max(lsn, self.gap_lsn or 0)

    def forget_gap(self, lsn: int) -> None:
        """Forget such an LSN, once the target's state says which tables wait, unless a later one was noted since."""
        if self.gap_lsn == lsn:
            self.gap_lsn = None

    def send_status(
        self, written_lsn: int, flushed_lsn: int, applied_lsn: int, *, reply_requested: bool = False
    ) -> None:
        """Report progress; only `flushed_lsn` moves the slot, and it must be durable on the target (trap T-1)."""
        if self._ended:
            return
        flushed_lsn = max(flushed_lsn, self.confirmed_flush_lsn)
        now_us = int(time.time() * 1_000_000) - POSTGRES_EPOCH_US
        message = status_update(written_lsn, flushed_lsn, max(applied_lsn, flushed_lsn), now_us, reply_requested)
        try:
            self._transport.write(message)
        except CopyFailed as failure:
            raise self._lost(failure) from failure
        self.confirmed_flush_lsn = flushed_lsn
        self._flush()

    async def close(self) -> None:
        """End the stream politely if it still runs, and close the connection."""
        self.pause_reading()
        if not self._ended:
            self._ended = True
            self._transport.end()
        if self._is_writing:
            self._loop.remove_writer(self._fd)
            self._is_writing = False
        self._transport.close()
        await self._connection.close()

    def _flush(self) -> None:
        blocked = self._transport.flush()
        if blocked and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._flush)
        elif not blocked and self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._fd)

    def _lost(self, failure: CopyFailed) -> SourceLost | SourceRefused:
        self.pause_reading()
        self._ended = True
        return _refusal(failure) or SourceLost(
            f"the stream from the publisher ended: {str(failure) or 'connection lost'}."
        )


def _receive_buffer_bytes(view: socket.socket) -> int:
    is_internet = view.family in (socket.AF_INET, socket.AF_INET6)
    is_local = is_internet and ip_address(view.getpeername()[0]).is_loopback
    return LOCAL_RECEIVE_BUFFER_BYTES if is_local else RECEIVE_BUFFER_BYTES


def _refusal(failure: CopyFailed) -> SourceRefused | None:
    """Return what an error of the stream means that comes each time again; None: it passes."""
    if failure.sqlstate == _NO_PUBLICATION:
        # Up to 17 it never goes on.
        return NoPublication(
            f"the publisher cannot decode changes of a time when a publication was missing: {failure}.",
            hint=f"the slot cannot give these changes: {_AGAIN}",
        )
    if failure.sqlstate in _NO_CHARACTER:
        return SourceRefused(
            f"the publisher cannot send a text in UTF8: {failure}.",
            hint=f"correct it on the publisher; the slot cannot give the change that wrote it: {_AGAIN}",
        )
    return None


def _start_error(failure: CopyFailed) -> SlotBusy | SourceLost | SourceRefused:
    if failure.sqlstate == "55006":
        return SlotBusy(
            f"the replication slot is in use: {failure}.",
            hint="another reader holds it, or the publisher has not noticed yet that one went away",
        )
    if refusal := _refusal(failure):
        return refusal
    if failure.sqlstate is None or failure.sqlstate[:2] in ("08", "53", "57"):
        return SourceLost(f"the publisher did not start the stream: {failure}.")
    return SourceRefused(
        f"the publisher refused to start the stream: {failure}.",
        hint="the publisher's log has more; docs/TROUBLESHOOTING.md has the common causes",
    )


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


def transport_of(connection: Connection, *, past_libpq: bool = True) -> Transport:
    """Return the fastest transport a connection allows."""
    pg = connection.pgconn
    is_plain = not pg.ssl_in_use and not pg.used_gssapi
    return PlainTransport(connection) if past_libpq and is_plain else LibpqTransport(connection)


class LibpqTransport:
    """COPY ... TO STDOUT any number of times, then one COPY BOTH; every method may raise CopyFailed.

    By libpq, never blocking: `get_copy_data(0)` would hold the interpreter lock while it waits.
    """

    def __init__(self, connection: Connection) -> None:
        """Take over an idle connection made with replication=database."""
        self._connection = connection
        self._pg = connection.pgconn
        #: File descriptor to watch.
        self.fd = self._pg.socket
        #: Latest keep-alive, whole; its reader puts None here.
        self.keepalive: bytes | None = None
        #: True if the last `drain` took everything that had come.
        self.is_drained = True
        #: The server has warned that a publication was missing; the reader that notes it puts False here.
        self.has_gap = False
        connection.add_notice_handler(self._look_at_notice)
        #: Data is at hand although the descriptor may stay quiet.
        self.has_early_data = False
        self._rows = CopyReader()

    def _look_at_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if _is_gap(notice.severity_nonlocalized, notice.sqlstate):
            self.has_gap = True

    async def ask(self, query: str, sent_us: int) -> None:
        """Send a COPY of columns `lsn` and `data` in binary; nothing else may be under way.

        Args:
            query: the COPY.
            sent_us: the send time for its frames, microseconds since 2000-01-01 UTC on the publisher's clock.
        """
        self._rows.expect_rows(sent_us)
        self._pg.nonblocking = 1
        try:
            self._pg.send_query(query.encode())
            while self._pg.flush():
                await _ready(self.fd, is_writing=True)
        except psycopg.Error as error:
            raise CopyFailed(str(error), error.sqlstate) from error

    async def answer(self, take: Callable[[list[bytes], int], Awaitable[None]]) -> bool:
        """Read the answer as fast as it comes, and leave out all from a Stream Start on; return whether one was in it.

        Args:
            take: gets frames and their bytes on the wire; nothing is read until it returns.

        Raises:
            QueryFailed: the server refused; what was handed over may end inside a transaction.
        """
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
        """Send START_REPLICATION and wait until the server streams."""
        try:
            await self._connection.execute(command.encode())
        except psycopg.Error as error:
            raise CopyFailed(str(error), error.sqlstate) from error
        self._pg.nonblocking = 1
        # libpq may have read what follows the answer, even the error that ends the stream.
        self.has_early_data = True

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return the contents of the CopyData messages of kind 'w' at hand, at most about `limit_bytes`."""
        pg = self._pg
        frames: list[bytes] = []
        append, get_copy_data = frames.append, pg.get_copy_data
        size = 0
        self.is_drained = self.has_early_data = False
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
                    raise self._failed()
                if len(frames) == before:
                    self.is_drained = True
                    break
        except psycopg.Error as error:
            raise CopyFailed(str(error)) from error
        return frames

    def _failed(self) -> CopyFailed:
        """Return why the copy ended."""
        result = self._pg.get_result()
        if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
            return CopyFailed("the publisher ended the stream")
        sqlstate = result.error_field(pq.DiagnosticField.SQLSTATE)
        message = (result.error_message or b"").decode("utf-8", "replace")
        return CopyFailed(message, sqlstate.decode() if sqlstate else None)

    def write(self, message: bytes) -> None:
        """Queue one CopyData message."""
        try:
            self._pg.put_copy_data(message)
        except psycopg.Error as error:
            raise CopyFailed(str(error)) from error

    def flush(self) -> bool:
        """Send what is queued; True if some of it must wait until the descriptor is writable."""
        try:
            return bool(self._pg.flush())
        except psycopg.Error:
            # The reader gets the same error and reports it.
            return False

    def end(self) -> None:
        """Announce to the server that nothing more is sent, if that is possible at once."""
        try:
            self._pg.put_copy_end()
            self._pg.flush()
        except psycopg.Error:
            return

    def close(self) -> None:
        """Let go of the socket; the connection itself is closed by its owner."""


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
        """See LibpqTransport."""
        return self._reader.keepalive

    @keepalive.setter
    def keepalive(self, value: bytes | None) -> None:
        self._reader.keepalive = value

    @property
    def has_early_data(self) -> bool:
        """See LibpqTransport."""
        return bool(self._early or self._reader.keepalive)

    async def ask(self, query: str, sent_us: int) -> None:
        """See LibpqTransport."""
        self._reader.expect_rows(sent_us)
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _message(b"Q", query.encode() + b"\0"))
        except OSError as error:
            raise CopyFailed(error.strerror or str(error)) from error

    async def answer(self, take: Callable[[list[bytes], int], Awaitable[None]]) -> bool:
        """See LibpqTransport."""
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
                # A warning comes before the frames that it is about.
                for kind, contents in reader.others:
                    self._look_at_notice(kind, contents)
                    if kind == ord("E"):
                        fields = error_fields(contents)
                    is_over = is_over or kind == ord("Z")
                reader.others.clear()
                if frames:
                    await take(frames, unseen_bytes)
                    unseen_bytes = 0
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
        """See LibpqTransport."""
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
        """See LibpqTransport."""
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
        """See LibpqTransport."""
        self._unsent += _message(b"d", message)

    def flush(self) -> bool:
        """See LibpqTransport."""
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
        """See LibpqTransport."""
        self._unsent += _message(b"c", b"")
        self.flush()

    def close(self) -> None:
        """See LibpqTransport."""
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
