"""One pgoutput payload to one message, every byte checked. Keeps no state and knows no relation.

This is the cold path and the reference: the assembler and the row reader cut corners for speed and are tested
against what is returned here.

Source of every layout: PostgreSQL manual, "Logical Replication Message Formats".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from parapply.wire.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _relation(reader: Reader, xid: int | None) -> RelationMessage:
    relation = Relation(
        oid=reader.unsigned(4, "relation OID"),
        schema=_namespace(reader),
        name=reader.string("relation name"),
        replica_identity=reader.one_of("dnfi", "replica identity"),
        columns=tuple(_column(reader) for _ in range(reader.count(2, "number of columns"))),
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
