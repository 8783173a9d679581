"""The frames of a stream become blocks that end between transactions, wherever that is possible.

Only such an end is reported to the publisher, which sends everything behind it again to the next connection. Of
transactions that are streamed while they are in progress the publisher then repeats all that has come, so a capture
that goes on first aborts the ones that were open.
"""

from __future__ import annotations

import struct
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.capture.blocks import KIND, XID, BlockKind, CapturedColumn, CapturedTable, FrameGroup, encode
from parapply.capture.shapes import shapes
from parapply.wire.decode import decode
from parapply.wire.messages import (
    Commit,
    CommitPrepared,
    Prepare,
    RelationMessage,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.capture.blocks import CapturedType, Shapes
    from parapply.capture.folder import CaptureWriter
    from parapply.capture.redact import FrameReplacement
    from parapply.model import Relation
    from parapply.source.slot import Connection
    from parapply.wire.messages import Message

#: Bytes of frames that are written together; less where a file is smaller.
_BLOCK_BYTES: Final = 1 << 20
_ROWS: Final = b"IUDT"
_KIND_AT: Final = KIND.start
#: Type byte, LSN, LSN, send time; then xid and subtransaction's xid, and for streaming 'parallel' LSN and time.
_ABORT: Final = struct.Struct(">cQQqcII")
_ABORT_MORE: Final = struct.Struct(">Qq")


def abort_frame(xid: int, lsn: int, *, is_parallel: bool) -> bytes:
    """Return the frame that aborts a streamed transaction, as the publisher would send it."""
    text = _ABORT.pack(b"w", lsn, lsn, 0, b"A", xid, xid)
    return text + _ABORT_MORE.pack(lsn, 0) if is_parallel else text


class Recorder:
    """Takes frames, and writes them when it is asked to. Used by one task."""

    def __init__(
        self, writer: CaptureWriter, conn: Connection, redacted: FrameReplacement | None, *, is_parallel: bool
    ) -> None:
        """Start outside any transaction; a plain session on the publisher is asked for shapes.

        Without `redacted` values stay. Streaming 'parallel' has more fields in an abort.
        """
        self._writer = writer
        self._conn = conn
        self._redacted = redacted
        self._is_parallel = is_parallel
        self._block_bytes = min(_BLOCK_BYTES, writer.limits.file_bytes)
        self._known: dict[int, CapturedTable] = {}
        self._types: dict[int, CapturedType] = {}
        self._frames: list[tuple[int, bytes]] = []
        #: Announcements, whole frames outside of any stream, with the number of frames before them. They hold for a
        #: file that begins later only once these are written. And the OIDs of all that came.
        self._announced: list[tuple[int, int, bytes]] = []
        self._oids: set[int] = set()
        self._bytes = 0
        #: Inside an ordinary or a prepared transaction, and inside a part of a streamed one.
        self._is_inside = False
        self._is_in_stream = False
        self._open: dict[int, None] = {}
        self._end_lsn = writer.end_lsn
        #: Frames up to the last moment between two transactions, with what was open and the end LSN then.
        self._safe: tuple[int, tuple[int, ...], int] = (0, (), self._end_lsn)

    @property
    def is_idle(self) -> bool:
        """Return whether everything that has come is written, and no transaction is open, but for streamed ones."""
        return not self._frames and not self._is_inside and not self._is_in_stream

    @property
    def is_full(self) -> bool:
        """Return whether it is time to write."""
        return self._bytes >= self._block_bytes

    async def begin(self, oids: Sequence[int], now_us: int) -> None:
        """Write the shapes of tables; raise CaptureFull if the folder has no room."""
        self._write_shapes(await shapes(self._conn, oids), now_us)

    def resume(self, open_xids: Sequence[int], now_us: int) -> None:
        """Abort the streamed transactions that were open, because a new connection sends them from their beginning.

        Raises:
            CaptureFull: the folder has no room.
        """
        lsn = self._writer.end_lsn
        frames = [abort_frame(xid, lsn, is_parallel=self._is_parallel) for xid in open_xids]
        self._writer.write_frames(
            [FrameGroup(now_us, frames)], open_xids=(), end_lsn=lsn, is_between=True, kind=BlockKind.RESUMED
        )

    async def take(self, frames: Sequence[bytes], now_us: int) -> None:
        """Take frames that came together; further errors are as of `begin`.

        Raise CaptureRefused if a table cannot be redacted, ProtocolError if a frame cannot be read.
        """
        append, redacted, partitions = self._frames.append, self._redacted, self._writer.partitions
        for frame in frames:
            kind = frame[_KIND_AT] if len(frame) > _KIND_AT else 0
            kept = frame
            if kind == _RELATION:
                await self._relation(frame, now_us)
            elif redacted is not None:
                kept = redacted.replaced(frame, in_stream=self._is_in_stream)
            append((now_us, kept))
            self._bytes += len(kept)
            if kind not in _ROWS:
                self._look(frame)
            elif partitions.near:
                at = XID.stop if self._is_in_stream else XID.start
                # A TRUNCATE has no OID there.
                partitions.meet(int.from_bytes(frame[at : at + 4]) if kind != _TRUNCATE else 0, is_change=True)

    def write(self, *, is_end: bool = False) -> bool:
        """Write all up to the last moment between two transactions; return whether something was written.

        Raises:
            CaptureFull: the folder has no room.
        """
        n_frames, open_xids, end_lsn = self._safe
        is_between = n_frames > 0
        if not is_between:
            if is_end or not self.is_full:
                return False
            # A part of a transaction that is larger than a block.
            n_frames, open_xids, end_lsn = len(self._frames), tuple(self._open), self._end_lsn
        groups = [
            FrameGroup(at_us, [frame for _, frame in part])
            for at_us, part in groupby(self._frames[:n_frames], key=itemgetter(0))
        ]
        self._writer.write_frames(groups, open_xids=open_xids, end_lsn=end_lsn, is_between=is_between)
        del self._frames[:n_frames]
        written, self._announced = self._announced, []
        for before, oid, frame in written:
            if before < n_frames:
                self._writer.relations[oid] = frame
            else:
                self._announced.append((before - n_frames, oid, frame))
        self._bytes = sum(len(frame) for _, frame in self._frames)
        self._safe = (0, (), end_lsn)
        return True

    def _look(self, frame: bytes) -> None:
        """Follow where transactions begin and end."""
        kind = frame[KIND]
        if kind in (b"B", b"b"):
            self._is_inside = True
        elif kind == b"E":
            self._is_in_stream = False
        if kind in _MARKS and self._is_between(decode(frame[_KIND_AT:], streaming_parallel=self._is_parallel)):
            self._safe = (len(self._frames), tuple(self._open), self._end_lsn)

    def _is_between(self, message: Message) -> bool:
        """Take a mark of the stream, and return whether no transaction is open behind it, but for streamed ones."""
        match message:
            case StreamStart():
                self._is_in_stream = True
                self._open[message.xid] = None
                return False
            case StreamAbort():
                if message.xid == message.subxid:
                    self._open.pop(message.xid, None)
            case Prepare() | StreamPrepare() if message.end_lsn <= self._writer.begin_lsn:
                # Prepared before the slot began: with its outcome, which follows, all of it would come again.
                self._is_inside = True
            case StreamCommit() | StreamPrepare():
                self._open.pop(message.xid, None)
                self._end_lsn = message.end_lsn
            case RollbackPrepared():
                self._open.pop(message.xid, None)
                self._end_lsn = message.rollback_end_lsn
            case CommitPrepared():
                self._is_inside = False
                self._open.pop(message.xid, None)
                self._end_lsn = message.end_lsn
            case Commit() | Prepare():
                self._is_inside = False
                self._end_lsn = message.end_lsn
        return not self._is_inside

    async def _relation(self, frame: bytes, now_us: int) -> None:
        message = decode(frame[_KIND_AT:], in_stream=self._is_in_stream)
        assert isinstance(message, RelationMessage), "its first byte says so"
        relation = message.relation
        bare = frame[: XID.start] + frame[XID.stop :] if self._is_in_stream else frame
        known = self._known.get(relation.oid)
        # A table is announced again whenever something of it has changed, also an index.
        if known is None or relation.oid in self._oids or not _is_like(known, relation):
            types = {column.type_oid for column in relation.columns}
            found = await shapes(self._conn, [relation.oid], types)
            table = _announced(relation, next(iter(found.tables), None))
            if table != known:
                self._write_shapes(msgspec.structs.replace(found, tables=(table,)), now_us)
        if self._redacted is not None:
            self._redacted.announce(_announced(relation, self._known[relation.oid]), self._types)
        self._oids.add(relation.oid)
        self._writer.partitions.meet(relation.oid, is_change=False)
        bare = bare[:1] + bytes(_KIND_AT - 1) + bare[_KIND_AT:]
        self._announced.append((len(self._frames), relation.oid, bare))

    def _write_shapes(self, found: Shapes, now_us: int) -> None:
        self._types |= {one.oid: one for one in found.types}
        tables = []
        for table in found.tables:
            self._known[table.oid] = table
            if self._redacted is not None:
                table = self._without_values(table, self._redacted)  # noqa: PLW2901
            tables.append(table)
        record = msgspec.structs.replace(found, tables=tuple(tables))
        self._writer.write(BlockKind.TABLES, encode(record), time_us=now_us)

    def _without_values(self, table: CapturedTable, redacted: FrameReplacement) -> CapturedTable:
        columns = [
            msgspec.structs.replace(column, missing=redacted.missing(column.type_oid, column.missing, self._types))
            for column in table.columns
        ]
        return msgspec.structs.replace(table, columns=tuple(columns))


_RELATION: Final = ord("R")
_TRUNCATE: Final = ord("T")
_MARKS: Final = frozenset({b"C", b"S", b"E", b"c", b"A", b"P", b"K", b"r", b"p"})


def _is_like(known: CapturedTable, relation: Relation) -> bool:
    """Return whether a table has the name, the identity and the columns with which it is announced."""
    there = {column.name: (column.type_oid, column.modifier) for column in known.columns}
    named = [(column.name, (column.type_oid, column.type_modifier)) for column in relation.columns]
    is_same = (known.schema, known.name, known.identity) == (*relation.full_name, relation.replica_identity)
    return is_same and len(there) == len(named) and all(there.get(name) == kind for name, kind in named)


def _announced(relation: Relation, now: CapturedTable | None) -> CapturedTable:
    """Return a table with the columns that a stream announces, and what else is known of it, which may be later."""
    there = {column.name: column for column in now.columns} if now is not None else {}
    columns = []
    for column in relation.columns:
        plain = CapturedColumn(name=column.name, type_oid=column.type_oid, modifier=column.type_modifier)
        later = there.get(column.name)
        is_same = later is not None and later.type_oid == column.type_oid
        columns.append(later if later is not None and is_same else plain)
    names = {column.name for column in columns}
    indexes = [index for index in now.indexes if names.issuperset(index.columns)] if now is not None else []
    return CapturedTable(
        oid=relation.oid,
        schema=relation.schema,
        name=relation.name,
        identity=relation.replica_identity,
        columns=tuple(columns),
        indexes=tuple(indexes),
        left_out=now.left_out if now is not None else (),
    )
