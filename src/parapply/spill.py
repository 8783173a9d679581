"""Changes of transactions in progress, kept on disk until it is known whether they commit.

In: lists of changes. Out: the same lists, checked. A file has no name: it is gone when it is closed, when the process
dies, and at every reconnect, so nothing of a stream can outlive it (trap T-55). Blocking; the caller has it done in a
thread. Must never return anything but exactly what was put in.

A block is a header (magic, xid, number of changes, bytes after the checksum), the CRC-32 of everything else, the length
of each change with the highest bit set for a Relation, and the changes: frames as they are, Relations as MessagePack.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import zlib
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from parapply.errors import ConfigError, SpillFailed
from parapply.model import Relation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_HEADER: Final = struct.Struct("<4sIIQ")
_CHECKSUM: Final = struct.Struct("<I")
_START_BYTES: Final = _HEADER.size + _CHECKSUM.size
_MAGIC: Final = b"PSB1"
_IS_RELATION: Final = 1 << 31
_LENGTH_BYTES: Final = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Relation).decode


class BlockPlace(NamedTuple):
    """Where a block lies in its file."""

    offset: int
    n_bytes: int


class SpillRoom:
    """Bytes on disk that several slots may take together; each can always have half of an equal part.

    `limit_bytes` and `n_slots` are written by the owner.
    """

    def __init__(self, limit_bytes: int, n_slots: int = 1) -> None:
        self.limit_bytes = limit_bytes
        self.n_slots = n_slots
        #: Held for every change of what a slot has used.
        self.lock = threading.Lock()
        #: Of slots that have one now. Written under the lock.
        self.spills: set[Spill] = set()

    def is_left(self, spill: Spill, n_bytes: int) -> bool:
        """Return whether a slot may take more; to be called under the lock."""
        own_bytes = self.limit_bytes // (2 * max(1, self.n_slots))
        wanted_bytes = spill.used_bytes + n_bytes
        others = [max(own_bytes, one.used_bytes) for one in self.spills if one is not spill]
        others += [own_bytes] * (self.n_slots - 1 - len(others))
        return wanted_bytes <= own_bytes or sum(others) + wanted_bytes <= self.limit_bytes


class Spill:
    """A directory and how much may lie in it. `used_bytes` is written by the files, under the lock."""

    def __init__(self, directory: Path | None, limit_bytes: int, room: SpillRoom | None = None) -> None:
        """Check that files can be made there.

        Args:
            directory: absolute or relative to the working directory, made if missing; None is the system's temporary
                directory.
            limit_bytes: of all files together.
            room: that is shared with other slots, if any are in this process.

        Raises:
            ConfigError: they cannot.
        """
        self._directory = directory
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.room = room or SpillRoom(limit_bytes)
        self.lock = self.room.lock
        self._files: set[SpillFile] = set()
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise ConfigError(f"apply.spill_dir: cannot write in {directory}: {error.strerror}.") from error
        with self.lock:
            self.room.spills.add(self)

    def open(self, xid: int) -> SpillFile:
        """Return an empty file for a transaction; raise SpillFailed if it cannot be made, or all are closed."""
        try:
            file = SpillFile(self, _nameless(self._directory), xid)
        except OSError as error:
            raise _failed(xid, error.strerror or str(error)) from error
        with self.lock:
            self._files.add(file)
            is_open = self in self.room.spills
        if not is_open:
            # The task that asked for it was cancelled while the disk answered.
            file.close()
            raise _failed(xid, "all of them were given up")
        return file

    def close(self) -> None:
        """Close every file that is still open, and each that opens later."""
        with self.lock:
            self.room.spills.discard(self)
            files = list(self._files)
        for file in files:
            file.close()

    def forget(self, file: SpillFile) -> None:
        """Take a file out of the count: it is closed."""
        with self.lock:
            self.used_bytes -= file.size_bytes
            self._files.discard(file)


def _nameless(directory: Path | None) -> int:
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return os.dup(file.fileno())


class SpillFile:
    """The blocks of one transaction. Appended to by one thread at a time, while another may read."""

    def __init__(self, spill: Spill, fd: int, xid: int) -> None:
        self._spill = spill
        self._fd = fd
        self._xid = xid
        self._lock = threading.Lock()
        self.size_bytes = 0

    def append(self, changes: Sequence[bytes | Relation]) -> BlockPlace:
        """Write a block after all others.

        Raises:
            SpillFailed: the disk is full, or the limit is reached; nothing of the block counts.
        """
        # Once for each change of a large transaction: nearly all are frames, which are taken as they are.
        relations = [index for index, change in enumerate(changes) if change.__class__ is not bytes]
        texts: list[bytes] = list(changes)  # type: ignore[arg-type]  # what is no frame is replaced now
        for index in relations:
            texts[index] = _encode(changes[index])
        lengths = array("I", map(len, texts))
        for index in relations:
            lengths[index] |= _IS_RELATION
        texts.insert(0, lengths.tobytes())
        body = b"".join(texts)
        header = _HEADER.pack(_MAGIC, self._xid, len(changes), len(body))
        header += _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header)))
        place = BlockPlace(self.size_bytes, len(header) + len(body))
        self._reserve(place.n_bytes)
        try:
            with self._lock:
                _write(self._fd, header, body, place.offset)
        except OSError as error:
            self._reserve(-place.n_bytes)
            raise _failed(self._xid, error.strerror or str(error)) from error
        self.size_bytes += place.n_bytes
        return place

    def read(self, place: BlockPlace) -> list[bytes | Relation]:
        """Return the changes of a block; raise SpillFailed if the file does not hold what was written."""
        try:
            with self._lock:
                data = os.pread(self._fd, place.n_bytes, place.offset)
        except OSError as error:
            raise _failed(self._xid, error.strerror or str(error)) from error
        if len(data) < _START_BYTES:
            raise _failed(self._xid, "a block is cut")
        magic, xid, n_changes, n_bytes = _HEADER.unpack_from(data)
        body = memoryview(data)[_START_BYTES:]
        (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
        found = zlib.crc32(body, zlib.crc32(data[: _HEADER.size]))
        if (magic, xid, n_bytes) != (_MAGIC, self._xid, len(body)) or checksum != found:
            raise _failed(self._xid, "a block is damaged")
        lengths = array("I", body[: n_changes * _LENGTH_BYTES].tobytes())
        changes: list[bytes | Relation] = []
        at = _START_BYTES + n_changes * _LENGTH_BYTES
        for length in lengths:
            if length < _IS_RELATION:
                changes.append(data[at : at + length])
                at += length
            else:
                end = at + (length ^ _IS_RELATION)
                changes.append(_decode(data[at:end]))
                at = end
        return changes

    def cut(self, size_bytes: int) -> None:
        """Drop the blocks from an offset on and free their room; they must no longer be read."""
        with self._lock:
            os.ftruncate(self._fd, size_bytes)
        self._reserve(size_bytes - self.size_bytes)
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Forget everything; closing twice is fine."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
        self._spill.forget(self)

    def _reserve(self, n_bytes: int) -> None:
        spill = self._spill
        with spill.lock:
            if n_bytes > 0 and spill.used_bytes + n_bytes > spill.limit_bytes:
                raise _failed(self._xid, f"apply.spill_limit_bytes = {spill.limit_bytes} is reached")
            if n_bytes > 0 and not spill.room.is_left(spill, n_bytes):
                raise _failed(self._xid, f"fleet.spill_limit_bytes = {spill.room.limit_bytes} is reached")
            spill.used_bytes += n_bytes


def _write(fd: int, header: bytes, body: bytes, offset: int) -> None:
    # A disk that becomes full takes a part, and refuses only the next write.
    views = [memoryview(header), memoryview(body)]
    while views:
        written = os.pwritev(fd, views, offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def _failed(xid: int, why: str) -> SpillFailed:
    return SpillFailed(
        f"the changes of transaction {xid}, in progress on the publisher, could not be kept on disk: {why}.",
        hint="make room in apply.spill_dir or raise the limit (apply.spill_limit_bytes); the publisher sends them "
        "again, nothing is lost, and what commits before that transaction is applied",
    )
