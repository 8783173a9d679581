"""Checked reads of big-endian fields: a missing or wrong one is a ProtocolError that says where."""

from __future__ import annotations

from parapply.errors import ProtocolError


class Reader:
    """A position in one message. Every read either returns a field that is wholly there or raises.

    Each read takes `what`, the field's name in the manual, for the error. Offsets count from the message's type byte.

    Source: PostgreSQL manual, "Message Data Types".
    """

    __slots__ = ("_data", "kind", "offset")

    def __init__(self, data: bytes) -> None:
        """Read the type byte.

        Args:
            data: one whole message.

        Raises:
            ProtocolError: the type byte is missing.
        """
        if not data:
            raise ProtocolError("", 0, "the message is empty")
        self._data = data
        self.kind = chr(data[0])
        #: Offset of the next field; only this class writes it.
        self.offset = 1

    def error(self, reason: str, offset: int | None = None) -> ProtocolError:
        """Return the error to raise; `offset` is where the next field begins unless given."""
        return ProtocolError(self.kind, self.offset if offset is None else offset, reason)

    def _bytes(self, size: int, what: str) -> bytes:
        start = self.offset
        left = len(self._data) - start
        if size > left:
            raise self.error(f"{what} needs {size} bytes and {left} are left")
        self.offset = start + size
        return self._data[start : start + size]

    def unsigned(self, size: int, what: str) -> int:
        """Return an integer of `size` bytes: LSNs (8), OIDs and xids (4), flags (1)."""
        return int.from_bytes(self._bytes(size, what), "big")

    def signed(self, size: int, what: str) -> int:
        """Return a two's complement integer of `size` bytes: times in microseconds (8), type modifiers (4)."""
        return int.from_bytes(self._bytes(size, what), "big", signed=True)

    def count(self, size: int, what: str) -> int:
        """Return a length or count of `size` bytes, which is signed on the wire and must not be negative."""
        offset = self.offset
        number = self.signed(size, what)
        if number < 0:
            raise self.error(f"{what} is negative ({number})", offset)
        return number

    def flags(self, allowed: int, what: str) -> int:
        """Return one byte of flags; a bit outside `allowed` would mean something this program does not know."""
        offset = self.offset
        flags = self.unsigned(1, what)
        if flags & ~allowed:
            raise self.error(f"{what} are {flags:#04x}, of which only {allowed:#04x} is known", offset)
        return flags

    def one_of(self, allowed: str, what: str) -> str:
        """Return one byte as a character, which must be in `allowed`."""
        offset = self.offset
        char = chr(self.unsigned(1, what))
        if char not in allowed:
            raise self.error(f"{what} is {char!r}, not one of {', '.join(map(repr, allowed))}", offset)
        return char

    def string(self, what: str) -> str:
        """Return a NUL-terminated UTF-8 string: the session's client_encoding is UTF8 (trap T-61)."""
        start = self.offset
        end = self._data.find(b"\0", start)
        if end < 0:
            raise self.error(f"{what} has no terminating zero byte")
        self.offset = end + 1
        try:
            return self._data[start:end].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8", start + error.start) from error

    def value(self, what: str) -> bytes:
        """Return bytes preceded by their Int32 length, undecoded."""
        return self._bytes(self.count(4, f"length of {what}"), what)

    def finish(self) -> None:
        """Check that the message ends here.

        Raises:
            ProtocolError: bytes are left.
        """
        left = len(self._data) - self.offset
        if left:
            raise self.error(f"{left} bytes follow the end of the message")
