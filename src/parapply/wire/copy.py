"""Messages of the frontend/backend protocol out of raw bytes, as far as a running COPY BOTH needs them. Pure.

libpq gives out one CopyData message a call, with an allocation and two copies each; with 200,000 messages a second that
was a third of the leader's time. Here many messages are cut out of one read, and every read goes into the same memory:
fresh memory for each cost as much as the copying. (PostgreSQL manual, "Message Formats".)

The types of the compiled twin are in ``copy.pxd``; what differs between the twins stands in `CopyReader.received`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.errors import ProtocolError

if TYPE_CHECKING:
    import cython  # read by the compiler only
else:
    from parapply import uncompiled as cython

_COPY_DATA = ord("d")
_XLOG_DATA = ord("w")
_KEEPALIVE = ord("k")

#: Type byte and length.
_HEADER_BYTES = 5
#: Bytes of a message at most: PostgreSQL makes none of more than a gigabyte and some header.
_LIMIT_BYTES = (1 << 30) + (1 << 16)
#: Bytes read at once at most, while no message is larger.
BUFFER_BYTES = 256 * 1024


class CopyReader:
    """Cuts the server's bytes into messages. Owned by one connection: read into `room`, then call `received`."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Start before the first byte of a message."""
        self._buffer = bytearray(buffer_bytes)
        self._buffer_bytes = buffer_bytes
        self._filled = 0  # bytes at the buffer's start that belong to a message that is not whole
        #: Latest keep-alive, whole ('k' first); whoever takes it puts None here.
        self.keepalive: bytes | None = None
        #: Messages other than CopyData: type byte and contents, in order; whoever takes them clears the list.
        self.others: list[tuple[int, bytes]] = []

    def room(self) -> memoryview:
        """Return where the next bytes go; never empty. Of no use after the next `received`."""
        return memoryview(self._buffer)[self._filled :]

    def received(self, n_bytes: int, frames: list[bytes]) -> None:
        """Take so many bytes out of `room` and append the contents of every whole CopyData message of kind 'w'.

        Raises:
            ProtocolError: a length that no message can have; the connection is of no use any more.
        """
        size = self._filled + n_bytes
        if not cython.compiled:  # noqa: SIM108  the compiler must see only one of them
            data = bytes(memoryview(self._buffer)[:size])
        else:
            # A bare pointer: nothing below looks behind `size`, and the buffer stays until `_keep`.
            data = self._buffer  # type: ignore[assignment]
        at = 0
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
            elif kind == _XLOG_DATA:
                frames.append(data[at + 5 : end])
            elif kind == _KEEPALIVE:
                self.keepalive = data[at + 5 : end]
            at = end
        self._keep(at, size)

    def _keep(self, at: int, size: int) -> None:
        """Move a message that is not whole to the buffer's start; for a large one the buffer grows as it comes."""
        left = self._filled = size - at
        needed = 0
        if left >= _HEADER_BYTES:
            length = int.from_bytes(self._buffer[at + 1 : at + _HEADER_BYTES])
            if not _HEADER_BYTES - 1 <= length <= _LIMIT_BYTES:
                raise ProtocolError(chr(self._buffer[at]), 1, f"a message of {length} bytes")
            needed = 1 + length
        if needed <= self._buffer_bytes:
            if len(self._buffer) > self._buffer_bytes:
                self._replace(self._buffer_bytes, at, left)
            elif at and left:
                self._buffer[:left] = self._buffer[at:size]
        elif at or left == len(self._buffer):
            # Doubled, not made as large as the message says it is: what never comes takes no memory.
            self._replace(min(needed, max(2 * left, self._buffer_bytes)), at, left)

    def _replace(self, buffer_bytes: int, at: int, left: int) -> None:
        buffer = bytearray(buffer_bytes)
        buffer[:left] = memoryview(self._buffer)[at : at + left]
        self._buffer = buffer


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
            ProtocolError: a length that no message can have; the connection is of no use any more.
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
