"""Blocks of a captured stream: bytes in, checked facts out, and back. Pure.

Everything in a file is data from another side. A block that is not exactly as written here is refused by its place, and
nothing of it is used.

A block is a header, the CRC-32 of header and body, and the body, compressed with zlib. Bodies are JSON, but for frames:
the number of streamed transactions that are open behind the block and the xid of each, the number of groups, arrival
and number of frames of each group, the length of each frame, and the frames. All numbers are big-endian.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from parapply.errors import CaptureRefused, CaptureTorn
from parapply.model import FRAME_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
#: First bytes of every file, with the version of the format.
FILE_MARK: Final = b"parapply capture 1\n"
#: Magic, kind, whether it ends between transactions, open streamed transactions, number of the block, end LSN, time in
#: microseconds since 1970, bytes of the body, and of the body as stored.
_HEADER: Final = struct.Struct(">4sBBIQQqII")
_CHECKSUM: Final = struct.Struct(">I")
_MAGIC: Final = b"PCB1"
START_BYTES: Final = _HEADER.size + _CHECKSUM.size
_GROUP: Final = struct.Struct(">qI")
_COUNT: Final = struct.Struct(">I")
#: PostgreSQL sends no message of 1 GiB; a block has one of these at most, and else little.
_MOST_BYTES: Final = (1 << 30) + (1 << 27)
#: 9999-12-31, in microseconds since 1970: later times cannot be shown.
_LAST_US: Final = 253_402_214_400_000_000
#: Speed matters more than the last percent, because the publisher waits for a reader that is behind.
_LEVEL: Final = 3
Operation: TypeAlias = Literal["insert", "update", "delete", "truncate"]
#: Where a frame has the kind of its message, and where the xid is that follows within a stream.
KIND: Final = slice(FRAME_HEADER_BYTES, FRAME_HEADER_BYTES + 1)
XID: Final = slice(KIND.stop, KIND.stop + 4)
#: Kinds of the messages that change rows.
CHANGES: Final = frozenset({b"I", b"U", b"D", b"T"})
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)


class BlockKind(IntEnum):
    """Content of a block."""

    HEAD = 1  # of a file: which capture, and which file of it
    START = 2  # of the capture: publisher, slot, options
    TABLES = 3  # shapes of tables
    RELATIONS = 4  # frames: announcements that hold at the beginning of a file
    FRAMES = 5
    POSITION = 6  # nothing came up to an LSN; where the publisher has changed, its timeline from there on
    RESUMED = 7  # frames: made by the capture, they abort what a new connection sends again
    END = 8  # the capture ended in order, and why; more may follow


_KINDS: Final = frozenset(kind.value for kind in BlockKind)
_WITH_FRAMES: Final = frozenset({BlockKind.RELATIONS, BlockKind.FRAMES, BlockKind.RESUMED})


class Header(NamedTuple):
    """All that is known of a block without its body."""

    kind: BlockKind
    is_between: bool  # no transaction is open behind it, but for streamed ones
    n_open: int  # streamed transactions that are open behind it
    number: int  # of the capture's blocks, from 0
    end_lsn: int  # everything that ended up to here is in this block, or in one before
    time_us: int  # since 1970-01-01 UTC: arrival of its first frame
    body_bytes: int
    stored_bytes: int


class FrameGroup(NamedTuple):
    """Frames that came together."""

    arrival_us: int  # since 1970-01-01 UTC
    frames: list[bytes]


class CapturedBlock(NamedTuple):
    """Where a block lies."""

    file: str  # its name, without the folder
    offset: int
    header: Header

    @property
    def end(self) -> int:
        """Return the offset behind it."""
        return self.offset + START_BYTES + self.header.stored_bytes

    def refused(self, why: str) -> CaptureRefused:
        """Return the error to raise."""
        return CaptureRefused(f"{self.file}, block {self.header.number} at byte {self.offset}: {why}.")


def block(header: Header, body: bytes) -> bytes:
    """Return a block; the lengths of the header are filled in."""
    stored = zlib.compress(body, _LEVEL)
    kind, is_between, n_open, number, end_lsn, time_us, *_ = header
    text = _HEADER.pack(_MAGIC, kind, is_between, n_open, number, end_lsn, time_us, len(body), len(stored))
    return text + _CHECKSUM.pack(zlib.crc32(stored, zlib.crc32(text))) + stored


def place_of(file: str, offset: int, start: bytes, left_bytes: int) -> CapturedBlock:
    """Return the place of a block from its first bytes, which are `START_BYTES`, or as many as the file has there.

    `left_bytes` are the file's from the offset on. Raise CaptureTorn if it ends within the block, CaptureRefused if
    these bytes are no header.
    """
    if len(start) < START_BYTES:
        raise CaptureTorn(file, offset, "the file ends within a block's header")
    magic, kind, is_between, n_open, number, end_lsn, time_us, body_bytes, stored_bytes = _HEADER.unpack_from(start)
    if magic != _MAGIC or kind not in _KINDS or is_between > 1 or max(body_bytes, stored_bytes) > _MOST_BYTES:
        raise CaptureTorn(file, offset, "no block begins there")
    found = CapturedBlock(
        file,
        offset,
        Header(BlockKind(kind), bool(is_between), n_open, number, end_lsn, time_us, body_bytes, stored_bytes),
    )
    if stored_bytes > left_bytes - START_BYTES:
        raise CaptureTorn(file, offset, "the file ends within a block")
    return found


def body_of(place: CapturedBlock, data: bytes) -> bytes:
    """Return the body of a block; raise CaptureTorn if it is not what was written."""
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    stored = memoryview(data)[START_BYTES:]
    if checksum != zlib.crc32(stored, zlib.crc32(data[: _HEADER.size])):
        raise CaptureTorn(place.file, place.offset, "the block's checksum differs")
    unpacker = zlib.decompressobj()
    try:
        # One byte more than it may have: a body that does not end is never made.
        body = unpacker.decompress(stored, place.header.body_bytes + 1)
    except zlib.error as error:
        raise place.refused("it cannot be decompressed") from error
    if not unpacker.eof or unpacker.unused_data or len(body) != place.header.body_bytes:
        raise place.refused("its length is not as its header says")
    return body


def frames_body(open_xids: Sequence[int], groups: Sequence[FrameGroup]) -> bytes:
    """Return the body of a block of frames."""
    frames = [frame for group in groups for frame in group.frames]
    return b"".join(
        [
            _COUNT.pack(len(open_xids)),
            *map(_COUNT.pack, open_xids),
            _COUNT.pack(len(groups)),
            *[_GROUP.pack(group.arrival_us, len(group.frames)) for group in groups],
            *[_COUNT.pack(len(frame)) for frame in frames],
            *frames,
        ]
    )


def groups_of(place: CapturedBlock, body: bytes) -> tuple[list[int], list[FrameGroup]]:
    """Return the xids of the streamed transactions that are open behind a block of frames, and its groups.

    Raises:
        CaptureRefused: a number in it is not as it must be.
    """
    if place.header.kind not in _WITH_FRAMES:
        raise place.refused("it has no frames")
    try:
        open_xids, at = _numbers(body, 0)
        (n_groups,) = _COUNT.unpack_from(body, at)
        heads = list(_GROUP.iter_unpack(memoryview(body)[at + _COUNT.size :][: n_groups * _GROUP.size]))
        at += _COUNT.size + n_groups * _GROUP.size
        n_frames = sum([number for _, number in heads])
        lengths = struct.unpack_from(f">{n_frames}I", body, at) if n_frames <= len(body) else ()
    except struct.error as error:
        raise place.refused("its lists are cut") from error
    at += n_frames * _COUNT.size
    if any(not 0 <= arrival_us < _LAST_US for arrival_us, _ in heads):
        raise place.refused("its frames came at no time of this calendar")
    if len(heads) != n_groups or len(lengths) != n_frames or at + sum(lengths) != len(body):
        raise place.refused("its lengths do not add up")
    ends = [at, *[at + end for end in accumulate(lengths)]]
    frames = [body[begin:end] for begin, end in pairwise(ends)]
    starts = [0, *accumulate([number for _, number in heads])]
    return open_xids, [
        FrameGroup(arrival_us, frames[begin : begin + number])
        for (arrival_us, number), begin in zip(heads, starts, strict=False)
    ]


def _numbers(body: bytes, at: int) -> tuple[list[int], int]:
    """Return a list of numbers that follows its length, and the offset behind it."""
    (number,) = _COUNT.unpack_from(body, at)
    if number * _COUNT.size > len(body):
        raise struct.error
    at += _COUNT.size
    return list(struct.unpack_from(f">{number}I", body, at)), at + number * _COUNT.size


class FileHead(msgspec.Struct, frozen=True, kw_only=True):
    """First block of each file."""

    capture: str  # 32 hexadecimal digits, the same in all of its files
    file: int  # from 1


class Redaction(msgspec.Struct, frozen=True, kw_only=True):
    """How a capture is redacted; the key is nowhere."""

    check: str  # the same for the same key, and says nothing about it


class CaptureStart(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher, the slot, and what was asked of it."""

    version: str  # of parapply
    server_version_num: int
    system_identifier: str
    timeline: int
    database: str
    slot: str
    is_kept: bool  # the slot outlives the capture
    publications: tuple[str, ...]
    operations: tuple[Operation, ...]
    options: dict[str, str]  # of pgoutput
    settings: dict[str, str]  # of the publisher
    redaction: Redaction | None = None


class CapturedType(msgspec.Struct, frozen=True, kw_only=True):
    """A type of the publisher."""

    oid: int
    schema: str
    name: str
    kind: str  # as pg_type.typtype: b, c, d, e, p, r, m
    base: int = 0  # of a domain
    base_modifier: int = -1
    element: int = 0  # of an array
    labels: tuple[str, ...] = ()  # of an enum, in order
    extension: str = ""  # that it belongs to


class CapturedColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column."""

    name: str
    type_oid: int
    modifier: int
    is_not_null: bool = False
    missing: str | None = None  # value of the rows from before it was added


class CapturedIndex(msgspec.Struct, frozen=True, kw_only=True):
    """An index on plain columns, without a condition."""

    name: str
    columns: tuple[str, ...]
    n_keys: int  # the columns after these are only included
    method: str
    is_unique: bool
    is_primary: bool
    is_identity: bool
    nulls_not_distinct: bool = False


class CapturedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as the stream names it: a partition may be one, or its root."""

    oid: int
    schema: str
    name: str
    identity: str  # as pg_class.relreplident
    columns: tuple[CapturedColumn, ...]
    indexes: tuple[CapturedIndex, ...] = ()
    left_out: tuple[str, ...] = ()  # names of indexes on expressions, or with a condition


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """Tables, and every type that they need."""

    tables: tuple[CapturedTable, ...]
    types: tuple[CapturedType, ...]


class CaptureTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher of what follows, which has everything of before, goes on with another timeline."""

    timeline: int


class CaptureEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The capture ended in order."""

    reason: str


_Record = TypeVar("_Record", FileHead, CaptureStart, Shapes, CaptureTimeline, CaptureEnd)


def encode(record: FileHead | CaptureStart | Shapes | CaptureTimeline | CaptureEnd) -> bytes:
    """Return the body of a block."""
    return msgspec.json.encode(record)


def decode(place: CapturedBlock, body: bytes, kind: type[_Record]) -> _Record:
    """Return the record in a block's body; raise CaptureRefused if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise place.refused(f"it is no {kind.__name__}") from error
