"""Messages of a running COPY BOTH: out of raw bytes, keep-alives, and the reports that answer them. Pure.

libpq gives out one CopyData message a call, with an allocation and two copies each; with 200,000 messages a second that
was a third of the leader's time. Here many messages are cut out of one read, and every read goes into the same memory:
fresh memory for each cost as much as the copying. (PostgreSQL manual, "Message Formats".)

The types of the compiled twin are in ``copy.pxd``; the difference between the twins is in `CopyReader.received`.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import TYPE_CHECKING

import msgspec

from parapply.errors import ProtocolError
from parapply.model import format_lsn

if TYPE_CHECKING:
    import cython  # read by the compiler only
else:
    from parapply import uncompiled as cython


_COPY_DATA = ord("d")
_XLOG_DATA = ord("w")
_KEEPALIVE = ord("k")
_STREAM_START = ord("S")

#: The beginning of COPY in binary, in the CopyData message of its first row: flags and an extension, of which
#: PostgreSQL makes none, follow the signature. (PostgreSQL manual, "COPY", "Binary Format".)
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_SIGNATURE_BYTES = 19
#: The end of COPY in binary: -1 in the place of a row's number of columns.
_TRAILER = b"\xff\xff"
#: A row of an LSN and a change: the number of columns, a length and the LSN, and a length; then the change.
_LSN_AT = 6
_CHANGE_LENGTH_AT = 14
_CHANGE_AT = 18
_ROW_BEGINS = b"\x00\x02\x00\x00\x00\x08"

#: Type byte and length.
_HEADER_BYTES = 5
#: Bytes of a message at most: PostgreSQL makes none of more than a gigabyte and some header.
_LIMIT_BYTES = (1 << 30) + (1 << 16)
#: Bytes read at once at most, while no message is larger.
BUFFER_BYTES = 256 * 1024


class CopyReader:
    """Cuts the server's bytes into messages. Owned by one connection: read into `room`, then call `received`.

    A message larger than the buffer is collected separately, and each byte is copied once: BytesIO grows with what has
    come, and gives its bytes away without a copy (CPython, Modules/_io/bytesio.c).
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Start before the first byte of a message."""
        self._buffer = bytearray(buffer_bytes)
        self._filled = 0  # bytes at the buffer's start that belong to a message that is not whole
        self._large: BytesIO | None = None  # contents so far of a message larger than the buffer
        self._large_type = 0
        self._missing = 0  # bytes of it still to come
        #: Latest keep-alive, whole ('k' first); whoever takes it puts None here.
        self.keepalive: bytes | None = None
        #: Messages other than CopyData: type byte and contents, in order; whoever takes them clears the list.
        self.others: list[tuple[int, bytes]] = []
        #: The send time that goes into frames made of rows, as on the wire; empty while a walsender streams.
        self.sent = b""
        #: True after a row that began a transaction in progress: it and all later rows are left out.
        self.has_stream = False

    def room(self) -> memoryview:
        """Return where the next bytes go; never empty. Of no use after the next `received`."""
        return memoryview(self._buffer)[self._filled :]

    def expect_rows(self, sent_us: int) -> None:
        """Take the next CopyData messages for rows of COPY TO STDOUT in binary, with columns `lsn` and `data`.

        Each row becomes a frame as a walsender sends it, byte by byte: kind 'w', the LSN twice, a send time, the
        change. (`WalSndPrepareWrite` in PostgreSQL's walsender.c and `LogicalOutputPrepareWrite` in logicalfuncs.c.)

        Args:
            sent_us: the send time, microseconds since 2000-01-01 UTC on the publisher's clock.
        """
        self.sent = sent_us.to_bytes(8, signed=True)
        self.has_stream = False

    def expect_stream(self) -> None:
        """Take the next CopyData messages as a walsender's, as at the start."""
        self.sent = b""

    def row(self, contents: bytes, frames: list[bytes]) -> None:
        """Take the contents of one CopyData message after `expect_rows`, and append its frame, if it holds one.

        Raises:
            ProtocolError: it is no row of an LSN and a change.
        """
        at = _SIGNATURE_BYTES if contents.startswith(_SIGNATURE) else 0
        size = len(contents)
        if size == at or contents[at:] == _TRAILER:
            return
        length = int.from_bytes(contents[at + _CHANGE_LENGTH_AT : at + _CHANGE_AT])
        if size - at <= _CHANGE_AT or contents[at : at + _LSN_AT] != _ROW_BEGINS or length != size - at - _CHANGE_AT:
            raise ProtocolError("d", 0, "not a row of an LSN and a change")
        if contents[at + _CHANGE_AT] == _STREAM_START:
            self.has_stream = True
        if not self.has_stream:
            lsn = contents[at + _LSN_AT : at + _CHANGE_LENGTH_AT]
            frames.append(b"w" + lsn + lsn + self.sent + contents[at + _CHANGE_AT :])

    def received(self, n_bytes: int, frames: list[bytes]) -> None:
        """Take so many bytes out of `room` and append the frame of every whole CopyData message that holds one.

        That is one of kind 'w', or after `expect_rows` a row.

        Raises:
            ProtocolError: a length that no message can have; the connection can no longer be used.
        """
        size = self._filled + n_bytes
        at = 0
        if self._missing:
            at = self._collect(n_bytes, frames)
        if not cython.compiled:  # noqa: SIM108  the compiler must see only one of them
            data = bytes(memoryview(self._buffer)[:size])
        else:
            # A bare pointer: nothing below looks behind `size`, and the buffer stays.
            data = self._buffer  # type: ignore[assignment]
        while size - at >= 5:
            length = data[at + 1]
            length = length << 8 | data[at + 2]
            length = length << 8 | data[at + 3]
            length = length << 8 | data[at + 4]
            end = at + 1 + length
            if end > size or length < 4:
                break
            kind = data[at + 5] if length > 4 else 0
            if data[at] != _COPY_DATA or length == 4:
                self.others.append((data[at], data[at + 5 : end]))
            elif self.sent:
                if cython.compiled and not self.has_stream and is_plain_row(data, at + 5, end):  # type: ignore[name-defined]  # noqa: F821
                    frames.append(frame_of_row(data, at + 5, end, self.sent))  # type: ignore[name-defined]  # noqa: F821
                else:
                    self.row(data[at + 5 : end], frames)
            elif kind == _XLOG_DATA:
                frames.append(data[at + 5 : end])
            elif kind == _KEEPALIVE:
                self.keepalive = data[at + 5 : end]
            at = end
        self._keep(at, size)

    def _keep(self, at: int, size: int) -> None:
        """Keep the beginning of a message that is not whole: at the buffer's start, or apart if it is a large one."""
        left = self._filled = size - at
        if left >= _HEADER_BYTES:
            length = int.from_bytes(self._buffer[at + 1 : at + _HEADER_BYTES])
            if not _HEADER_BYTES - 1 <= length <= _LIMIT_BYTES:
                raise ProtocolError(chr(self._buffer[at]), 1, f"a message of {length} bytes")
            if 1 + length > len(self._buffer):
                self._large = BytesIO()
                self._large.write(memoryview(self._buffer)[at + _HEADER_BYTES : size])
                self._large_type = self._buffer[at]
                self._missing = 1 + length - left
                self._filled = 0
                return
        if at and left:
            self._buffer[:left] = self._buffer[at:size]

    def _collect(self, n_bytes: int, frames: list[bytes]) -> int:
        """Take the received part of a large message from the buffer's start, and return its number of bytes."""
        assert self._large is not None, "bytes are missing of nothing else"
        taken = min(self._missing, n_bytes)
        self._large.write(memoryview(self._buffer)[:taken])
        self._missing -= taken
        if not self._missing:
            contents, self._large = self._large.getvalue(), None
            if self._large_type != _COPY_DATA:
                self.others.append((self._large_type, contents))
            elif self.sent:
                self.row(contents, frames)
            elif contents[0] == _XLOG_DATA:
                frames.append(contents)
            elif contents[0] == _KEEPALIVE:
                self.keepalive = contents
        return taken


class RowReader:
    """Takes the rows of a COPY TO STDOUT out of the server's bytes: what COPY FROM STDIN takes, many rows at once.

    A row is never held whole: it may be a gigabyte. Owned by one connection: read into `room`, then call `received`.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Start before the first byte of a message."""
        self._buffer = bytearray(buffer_bytes)
        self._filled = 0  # bytes at the buffer's start that belong to a header, or a message other than CopyData
        self._left = 0  # bytes still to come of the CopyData message under way
        #: CopyData messages so far: the server sends one for each row, and in text and CSV for a header line.
        self.n_rows = 0
        #: Messages other than CopyData: type byte and contents, in order; whoever takes them clears the list.
        self.others: list[tuple[int, bytes]] = []

    def room(self) -> memoryview:
        """Return where the next bytes go; never empty. Of no use after the next `received`."""
        return memoryview(self._buffer)[self._filled :]

    def received(self, n_bytes: int) -> bytes:
        """Take so many bytes out of `room` and return the data among them, in order, without any headers.

        Raises:
            ProtocolError: a length that no message can have; the connection can no longer be used.
        """
        size = self._filled + n_bytes
        if not cython.compiled:  # noqa: SIM108  the compiler must see only one of them
            data = bytes(memoryview(self._buffer)[:size])
        else:
            data = self._buffer  # type: ignore[assignment]
        parts: list[bytes] = []
        at = 0
        kept = 0
        while at < size:
            if self._left:
                end = at + self._left if self._left <= size - at else size
                self._left -= end - at
                if not cython.compiled:
                    parts.append(data[at:end])
                else:
                    # Moved together in the buffer: an object for each row would take longer than all else.
                    move_bytes(data, kept, at, end - at)  # type: ignore[name-defined]  # noqa: F821
                    kept += end - at
                at = end
                continue
            if size - at < 5:
                break
            length = data[at + 1]
            length = length << 8 | data[at + 2]
            length = length << 8 | data[at + 3]
            length = length << 8 | data[at + 4]
            if not 4 <= length <= _LIMIT_BYTES:
                raise ProtocolError(chr(data[at]), 1, f"a message of {length} bytes")
            end = at + 1 + length
            if data[at] == _COPY_DATA:
                self.n_rows += 1
                self._left = length - 4
                at += 5
                continue
            if end > size:
                break
            self.others.append((data[at], data[at + 5 : end]))
            at = end
        found = b"".join(parts) if not cython.compiled else data[:kept]
        self._keep(at, size)
        return found

    def _keep(self, at: int, size: int) -> None:
        left = self._filled = size - at
        if at:
            self._buffer[:left] = self._buffer[at:size]
        elif left == len(self._buffer):
            # An error message larger than the buffer. Replaced, because somebody may still hold its room.
            self._buffer = self._buffer + bytes(left)


def error_fields(contents: bytes) -> dict[str, str]:
    """Return the fields of an ErrorResponse or NoticeResponse by their type byte: 'M' message, 'C' SQLSTATE ..."""
    fields = {}
    for field in contents.split(b"\0"):
        if field:
            fields[chr(field[0])] = field[1:].decode("utf-8", "replace")
    return fields


#: Type byte, end of the WAL read, server's clock, whether a reply is wanted.
_KEEPALIVE_FIELDS = struct.Struct("!cQqB")
#: Type byte, written, flushed, applied, client's clock, whether a reply is wanted.
_STATUS_UPDATE = struct.Struct("!cQQQqB")


class Keepalive(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher is alive and has read its WAL up to `end_lsn` ('k')."""

    end_lsn: int
    send_time_us: int
    reply_requested: bool  # to be answered at once, or wal_sender_timeout ends the session


def parse_keepalive(frame: bytes) -> Keepalive:
    """Return the keep-alive that the contents of a CopyData message are.

    Raises:
        ProtocolError: the frame is not exactly one Keepalive.
    """
    if frame[:1] != b"k":
        raise ProtocolError(chr(frame[0]) if frame else "", 0, "not a keepalive")
    if len(frame) != _KEEPALIVE_FIELDS.size:
        raise ProtocolError("k", 0, f"a keepalive has {_KEEPALIVE_FIELDS.size} bytes, and {len(frame)} came")
    _, end_lsn, send_time_us, reply_requested = _KEEPALIVE_FIELDS.unpack(frame)
    if reply_requested > 1:
        raise ProtocolError("k", len(frame) - 1, f"reply requested is {reply_requested}, neither 0 nor 1")
    return Keepalive(end_lsn=end_lsn, send_time_us=send_time_us, reply_requested=bool(reply_requested))


def status_update(
    written_lsn: int,
    flushed_lsn: int,
    applied_lsn: int,
    client_time_us: int,
    reply_requested: bool,  # noqa: FBT001 - the fields in wire order
) -> bytes:
    """Return a standby status update ('r'), the contents of one CopyData message to the publisher.

    Each LSN is the position of the last byte plus one. Only the flushed one moves the slot. Changes before it will
    never be sent again, so it must be durable on the target.

    Args:
        written_lsn: received.
        flushed_lsn: durable on the target; never beyond `written_lsn`.
        applied_lsn: visible on the target.
        client_time_us: this side's clock, microseconds since 2000-01-01 UTC.
        reply_requested: ask the publisher to answer with a Keepalive at once.

    Raises:
        AssertionError: flushed lies beyond written, which is a bug here that would lose data.
    """
    # Raised by hand, as `python -O` removes assert statements and this one stands between a bug and lost rows.
    if flushed_lsn > written_lsn:
        raise AssertionError(f"flushed {format_lsn(flushed_lsn)} is beyond written {format_lsn(written_lsn)}")
    return _STATUS_UPDATE.pack(b"r", written_lsn, flushed_lsn, applied_lsn, client_time_us, reply_requested)
