"""Messages of the frontend/backend protocol out of raw bytes, as far as a running COPY BOTH needs them. Pure.

libpq gives out one CopyData message a call, with an allocation and two copies each; with 200,000 messages a second that
was a third of the leader's time. Here many messages are cut out of one read. (PostgreSQL manual, "Message Formats".)
"""

from __future__ import annotations

import struct

from parapply.errors import ProtocolError

_COPY_DATA = ord("d")
_XLOG_DATA = ord("w")
_KEEPALIVE = ord("k")
_length_at = struct.Struct(">I").unpack_from

#: Bytes of a message at most: PostgreSQL makes none of more than a gigabyte and some header.
_LIMIT_BYTES = (1 << 30) + (1 << 16)


class CopyReader:
    """Cuts the server's bytes into messages. Owned by one connection."""

    def __init__(self) -> None:
        """Start before the first byte of a message."""
        self._rest = bytearray()
        self._needed = 5  # bytes until the first message in `_rest` is whole, as far as is known
        #: Latest keep-alive, whole ('k' first); whoever takes it puts None here.
        self.keepalive: bytes | None = None
        #: Messages other than CopyData: type byte and contents, in order; whoever takes them clears the list.
        self.others: list[tuple[int, bytes]] = []

    def push(self, data: bytes, frames: list[bytes]) -> None:
        """Take the next bytes and append the contents of every whole CopyData message of kind 'w'.

        Raises:
            ProtocolError: a length that no message can have; the connection is of no use any more.
        """
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._needed:
                return
            data = bytes(rest)
            rest.clear()
        at, size, append = 0, len(data), frames.append
        while size - at >= 5:
            end = at + 1 + _length_at(data, at + 1)[0]
            if end > size or end < at + 5:
                break
            if data[at] == _COPY_DATA and end > at + 5:
                kind = data[at + 5]
                if kind == _XLOG_DATA:
                    append(data[at + 5 : end])
                elif kind == _KEEPALIVE:
                    self.keepalive = data[at + 5 : end]
            else:
                self.others.append((data[at], data[at + 5 : end]))
            at = end
        if at < size:
            self._keep(data, at)

    def _keep(self, data: bytes, at: int) -> None:
        """Keep a message that is not whole yet; a large one is put together once, not at every read."""
        self._rest += data[at:]
        self._needed = 5
        if len(self._rest) >= 5:
            length = _length_at(self._rest, 1)[0]
            if not 4 <= length <= _LIMIT_BYTES:
                raise ProtocolError(chr(data[at]), 1, f"a message of {length} bytes")
            self._needed = 1 + length


def error_fields(contents: bytes) -> dict[str, str]:
    """Return the fields of an ErrorResponse or NoticeResponse by their type byte: 'M' message, 'C' SQLSTATE ..."""
    fields = {}
    for field in contents.split(b"\0"):
        if field:
            fields[chr(field[0])] = field[1:].decode("utf-8", "replace")
    return fields
