"""One pgoutput payload to one message, every byte checked. Keeps no state and knows no relation.

This is the cold path and the reference: the assembler and the row reader cut corners for speed and are tested
against what is returned here.

Source of every layout: PostgreSQL manual, "Logical Replication Message Formats".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.errors import ProtocolError
from parapply.model import Column, Relation
from parapply.wire.messages import (
    Begin,
    BeginPrepare,
    ColumnKind,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    RelationMessage,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleColumn,
    TupleData,
    TypeMessage,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Callable


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

    @property
    def rest(self) -> bytes:
        """Return the bytes from the next field on."""
        return self._data[self.offset :]

    def skip(self, size: int) -> None:
        """Leave out bytes that are known."""
        self.offset += size

    def finish(self) -> None:
        """Check that the message ends here.

        Raises:
            ProtocolError: bytes are left.
        """
        left = len(self._data) - self.offset
        if left:
            raise self.error(f"{left} bytes follow the end of the message")


_NO_FLAGS = 0
_KEY_COLUMN = 1
_CASCADE = 1
_RESTART_IDENTITY = 2
_TRANSACTIONAL = 1
_FIRST_SEGMENT = 1

#: Shared, as they carry no bytes and a wide row has many.
_NULL = TupleColumn(ColumnKind.NULL, None)
_UNCHANGED = TupleColumn(ColumnKind.UNCHANGED, None)


def decode(payload: bytes, *, in_stream: bool = False, streaming_parallel: bool = False) -> Message:
    """Decode one message.

    Args:
        payload: the whole message, its type byte first; without the CopyData header of `FRAME_HEADER_BYTES`.
        in_stream: a Stream Start came and no Stream Stop since: changes then carry an xid. The bytes do not show it.
        streaming_parallel: the session asked for `streaming 'parallel'`: Stream Abort then carries LSN and time.

    Returns:
        The message; values of rows stay bytes.

    Raises:
        ProtocolError: the bytes are not exactly one message as documented.
    """
    reader = Reader(payload)
    message: Message
    if read_change := _IN_STREAM_WITH_XID.get(reader.kind):
        message = read_change(reader, reader.unsigned(4, "xid") if in_stream else None)
    elif read := _WITHOUT_XID.get(reader.kind):
        message = read(reader)
    elif reader.kind == "A":
        message = _stream_abort(reader, streaming_parallel=streaming_parallel)
    else:
        raise reader.error("unknown message type", 0)
    reader.finish()
    return message


def _begin(reader: Reader) -> Begin:
    return Begin(
        final_lsn=reader.unsigned(8, "final LSN"),
        commit_time_us=reader.signed(8, "commit time"),
        xid=reader.unsigned(4, "xid"),
    )


def _commit(reader: Reader) -> Commit:
    reader.flags(_NO_FLAGS, "flags")
    return Commit(
        commit_lsn=reader.unsigned(8, "commit LSN"),
        end_lsn=reader.unsigned(8, "end LSN"),
        commit_time_us=reader.signed(8, "commit time"),
    )


def _origin(reader: Reader) -> Origin:
    return Origin(origin_commit_lsn=reader.unsigned(8, "origin commit LSN"), name=reader.string("origin name"))


def _namespace(reader: Reader) -> str:
    # Empty on the wire means pg_catalog, never "no schema" and never the search path.
    return reader.string("namespace") or "pg_catalog"


def _column(reader: Reader) -> Column:
    return Column(
        is_key=bool(reader.flags(_KEY_COLUMN, "column flags")),
        name=reader.string("column name"),
        type_oid=reader.unsigned(4, "column type OID"),
        type_modifier=reader.signed(4, "column type modifier"),
    )


def _columns(reader: Reader) -> tuple[Column, ...]:
    """Read the columns, which end the message; equal ones are one object."""
    rest = reader.rest
    columns = _known_columns.get(rest)
    if columns is not None:
        reader.skip(len(rest))
        return columns
    columns = tuple(_column(reader) for _ in range(reader.count(2, "number of columns")))
    reader.finish()
    if len(_known_columns) >= _MOST_KNOWN:
        _known_columns.clear()
    _known_columns[rest] = columns
    return columns


#: Columns of relations by their bytes: of thousands of tables most are like others, and each range of WAL announces
#: them again.
_known_columns: dict[bytes, tuple[Column, ...]] = {}
_MOST_KNOWN = 1024


def _relation(reader: Reader, xid: int | None) -> RelationMessage:
    relation = Relation(
        oid=reader.unsigned(4, "relation OID"),
        schema=_namespace(reader),
        name=reader.string("relation name"),
        replica_identity=reader.one_of("dnfi", "replica identity"),
        columns=_columns(reader),
    )
    return RelationMessage(xid=xid, relation=relation)


def _type(reader: Reader, xid: int | None) -> TypeMessage:
    return TypeMessage(
        xid=xid,
        type_oid=reader.unsigned(4, "type OID"),
        schema=_namespace(reader),
        name=reader.string("type name"),
    )


def _tuple_column(reader: Reader) -> TupleColumn:
    match reader.one_of("nutb", "column kind"):
        case "n":
            return _NULL
        case "u":
            return _UNCHANGED
        case "t":
            return TupleColumn(ColumnKind.TEXT, reader.value("text value"))
        case _:
            return TupleColumn(ColumnKind.BINARY, reader.value("binary value"))


def _tuple_data(reader: Reader) -> TupleData:
    return tuple(_tuple_column(reader) for _ in range(reader.count(2, "number of columns")))


def _insert(reader: Reader, xid: int | None) -> Insert:
    relation_oid = reader.unsigned(4, "relation OID")
    reader.one_of("N", "tuple kind")
    return Insert(xid=xid, relation_oid=relation_oid, new=_tuple_data(reader))


def _update(reader: Reader, xid: int | None) -> Update:
    relation_oid = reader.unsigned(4, "relation OID")
    key = old = None
    kind = reader.one_of("KON", "tuple kind")
    if kind != "N":
        before = _tuple_data(reader)
        key, old = (before, None) if kind == "K" else (None, before)
        reader.one_of("N", "tuple kind")
    return Update(xid=xid, relation_oid=relation_oid, key=key, old=old, new=_tuple_data(reader))


def _delete(reader: Reader, xid: int | None) -> Delete:
    relation_oid = reader.unsigned(4, "relation OID")
    kind = reader.one_of("KO", "tuple kind")
    before = _tuple_data(reader)
    key, old = (before, None) if kind == "K" else (None, before)
    return Delete(xid=xid, relation_oid=relation_oid, key=key, old=old)


def _truncate(reader: Reader, xid: int | None) -> Truncate:
    count = reader.count(4, "number of relations")
    flags = reader.flags(_CASCADE | _RESTART_IDENTITY, "truncate options")
    return Truncate(
        xid=xid,
        cascade=bool(flags & _CASCADE),
        restart_identity=bool(flags & _RESTART_IDENTITY),
        relation_oids=tuple(reader.unsigned(4, "relation OID") for _ in range(count)),
    )


def _logical_message(reader: Reader, xid: int | None) -> LogicalMessage:
    return LogicalMessage(
        xid=xid,
        is_transactional=bool(reader.flags(_TRANSACTIONAL, "flags")),
        message_lsn=reader.unsigned(8, "message LSN"),
        prefix=reader.string("prefix"),
        content=reader.value("content"),
    )


def _stream_start(reader: Reader) -> StreamStart:
    return StreamStart(
        xid=reader.unsigned(4, "xid"),
        is_first_segment=bool(reader.flags(_FIRST_SEGMENT, "first segment")),
    )


def _stream_stop(_reader: Reader) -> StreamStop:
    return StreamStop()


def _stream_commit(reader: Reader) -> StreamCommit:
    xid = reader.unsigned(4, "xid")
    reader.flags(_NO_FLAGS, "flags")
    return StreamCommit(
        xid=xid,
        commit_lsn=reader.unsigned(8, "commit LSN"),
        end_lsn=reader.unsigned(8, "end LSN"),
        commit_time_us=reader.signed(8, "commit time"),
    )


def _stream_abort(reader: Reader, *, streaming_parallel: bool) -> StreamAbort:
    return StreamAbort(
        xid=reader.unsigned(4, "xid"),
        subxid=reader.unsigned(4, "subtransaction xid"),
        abort_lsn=reader.unsigned(8, "abort LSN") if streaming_parallel else None,
        abort_time_us=reader.signed(8, "abort time") if streaming_parallel else None,
    )


def _prepared(reader: Reader) -> tuple[int, int, int, int, str]:
    """Return the fields of all two-phase messages but Rollback Prepared: LSN, end LSN, time in us, xid and gid."""
    return (
        reader.unsigned(8, "LSN"),
        reader.unsigned(8, "end LSN"),
        reader.signed(8, "time"),
        reader.unsigned(4, "xid"),
        reader.string("gid"),
    )


def _begin_prepare(reader: Reader) -> BeginPrepare:
    lsn, end_lsn, time_us, xid, gid = _prepared(reader)
    return BeginPrepare(prepare_lsn=lsn, end_lsn=end_lsn, prepare_time_us=time_us, xid=xid, gid=gid)


def _prepare(reader: Reader) -> Prepare:
    reader.flags(_NO_FLAGS, "flags")
    lsn, end_lsn, time_us, xid, gid = _prepared(reader)
    return Prepare(prepare_lsn=lsn, end_lsn=end_lsn, prepare_time_us=time_us, xid=xid, gid=gid)


def _commit_prepared(reader: Reader) -> CommitPrepared:
    reader.flags(_NO_FLAGS, "flags")
    lsn, end_lsn, time_us, xid, gid = _prepared(reader)
    return CommitPrepared(commit_lsn=lsn, end_lsn=end_lsn, commit_time_us=time_us, xid=xid, gid=gid)


def _rollback_prepared(reader: Reader) -> RollbackPrepared:
    reader.flags(_NO_FLAGS, "flags")
    return RollbackPrepared(
        prepare_end_lsn=reader.unsigned(8, "prepare end LSN"),
        rollback_end_lsn=reader.unsigned(8, "rollback end LSN"),
        prepare_time_us=reader.signed(8, "prepare time"),
        rollback_time_us=reader.signed(8, "rollback time"),
        xid=reader.unsigned(4, "xid"),
        gid=reader.string("gid"),
    )


def _stream_prepare(reader: Reader) -> StreamPrepare:
    reader.flags(_NO_FLAGS, "flags")
    lsn, end_lsn, time_us, xid, gid = _prepared(reader)
    return StreamPrepare(prepare_lsn=lsn, end_lsn=end_lsn, prepare_time_us=time_us, xid=xid, gid=gid)


_IN_STREAM_WITH_XID: dict[str, Callable[[Reader, int | None], Message]] = {
    "R": _relation,
    "Y": _type,
    "I": _insert,
    "U": _update,
    "D": _delete,
    "T": _truncate,
    "M": _logical_message,
}

_WITHOUT_XID: dict[str, Callable[[Reader], Message]] = {
    "B": _begin,
    "C": _commit,
    "O": _origin,
    "S": _stream_start,
    "E": _stream_stop,
    "c": _stream_commit,
    "b": _begin_prepare,
    "P": _prepare,
    "K": _commit_prepared,
    "r": _rollback_prepared,
    "p": _stream_prepare,
}
