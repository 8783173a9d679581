"""Every pgoutput message: its bytes, put together by hand, and what they mean."""

from __future__ import annotations

from typing import NamedTuple

from parapply.model import Column, Relation
from parapply.wire.decode import decode
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
    TypeMessage,
    Update,
)
from tests import build

HIGH_OID = 3_000_000_000
HIGH_XID = 4_294_967_290
HIGH_LSN = 0xFFFF_FFFF_0000_0001
BEFORE_2000_US = -1_000_000

NULL = TupleColumn(ColumnKind.NULL, None)
UNCHANGED = TupleColumn(ColumnKind.UNCHANGED, None)
MIXED_ROW = build.row(build.null(), build.unchanged(), build.text(b"a\0b"), build.binary(b"\0\xff"), build.text(b""))
MIXED = (
    NULL,
    UNCHANGED,
    TupleColumn(ColumnKind.TEXT, b"a\0b"),
    TupleColumn(ColumnKind.BINARY, b"\0\xff"),
    TupleColumn(ColumnKind.TEXT, b""),
)
KEY_ROW = build.row(build.text(b"7"), build.null())
KEY = (TupleColumn(ColumnKind.TEXT, b"7"), NULL)


class Case(NamedTuple):
    """A message's bytes and what they mean."""

    payload: bytes
    expected: Message
    in_stream: bool = False
    streaming_parallel: bool = False

    def read(self, payload: bytes) -> Message:
        """Decode other bytes as this message's were sent."""
        return decode(payload, in_stream=self.in_stream, streaming_parallel=self.streaming_parallel)


RELATION = Relation(
    oid=HIGH_OID,
    schema="S.p 1",
    name='t%s"x"',
    replica_identity="i",
    columns=(
        Column(name="größe", type_oid=HIGH_OID + 1, type_modifier=-1, is_key=True),
        Column(name="{c}", type_oid=1043, type_modifier=14, is_key=False),
    ),
)


def _relation_bytes(xid: int | None) -> bytes:
    return build.relation(
        build.ColumnSpec("größe", HIGH_OID + 1, -1, 1),
        build.ColumnSpec("{c}", 1043, 14, 0),
        oid=HIGH_OID,
        namespace="S.p 1",
        name='t%s"x"',
        replica_identity="i",
        xid=xid,
    )


def _announcements_and_others(xid: int | None) -> dict[str, tuple[bytes, Message]]:
    return {
        "relation": (_relation_bytes(xid), RelationMessage(xid=xid, relation=RELATION)),
        "type": (
            build.type_(type_oid=HIGH_OID, namespace="s", name="mood", xid=xid),
            TypeMessage(xid=xid, type_oid=HIGH_OID, schema="s", name="mood"),
        ),
        "truncate": (
            build.truncate(HIGH_OID, 1, flags=2, xid=xid),
            Truncate(xid=xid, cascade=False, restart_identity=True, relation_oids=(HIGH_OID, 1)),
        ),
        "truncate cascade": (
            build.truncate(5, flags=1, xid=xid),
            Truncate(xid=xid, cascade=True, restart_identity=False, relation_oids=(5,)),
        ),
        "message": (
            build.message(flags=1, message_lsn=HIGH_LSN, prefix="p", content=b"\0\xff", xid=xid),
            LogicalMessage(xid=xid, is_transactional=True, message_lsn=HIGH_LSN, prefix="p", content=b"\0\xff"),
        ),
        "message outside a transaction": (
            build.message(flags=0, message_lsn=3, prefix="", content=b"", xid=xid),
            LogicalMessage(xid=xid, is_transactional=False, message_lsn=3, prefix="", content=b""),
        ),
    }


def _rows(xid: int | None) -> dict[str, tuple[bytes, Message]]:
    oid = HIGH_OID
    return {
        "insert": (build.insert(MIXED_ROW, oid=oid, xid=xid), Insert(xid=xid, relation_oid=oid, new=MIXED)),
        "insert without columns": (
            build.insert(build.row(), oid=oid, xid=xid),
            Insert(xid=xid, relation_oid=oid, new=()),
        ),
        "update": (
            build.update(MIXED_ROW, oid=oid, xid=xid),
            Update(xid=xid, relation_oid=oid, key=None, old=None, new=MIXED),
        ),
        "update with key": (
            build.update(MIXED_ROW, key=KEY_ROW, oid=oid, xid=xid),
            Update(xid=xid, relation_oid=oid, key=KEY, old=None, new=MIXED),
        ),
        "update with old row": (
            build.update(KEY_ROW, old=MIXED_ROW, oid=oid, xid=xid),
            Update(xid=xid, relation_oid=oid, key=None, old=MIXED, new=KEY),
        ),
        "delete by key": (
            build.delete(key=KEY_ROW, oid=oid, xid=xid),
            Delete(xid=xid, relation_oid=oid, key=KEY, old=None),
        ),
        "delete by old row": (
            build.delete(old=MIXED_ROW, oid=oid, xid=xid),
            Delete(xid=xid, relation_oid=oid, key=None, old=MIXED),
        ),
    }


def _changes(xid: int | None) -> dict[str, Case]:
    """Return the messages that carry an xid inside a stream block and none outside."""
    suffix = "" if xid is None else " in a stream"
    messages = _announcements_and_others(xid) | _rows(xid)
    return {name + suffix: Case(*pair, in_stream=xid is not None) for name, pair in messages.items()}


def _prepared(message: type[BeginPrepare | Prepare | StreamPrepare], payload: bytes) -> Case:
    expected = message(prepare_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 9, prepare_time_us=5, xid=HIGH_XID, gid="gid é")
    return Case(payload, expected)


CASES = {
    "begin": Case(
        build.begin(final_lsn=HIGH_LSN, commit_time_us=BEFORE_2000_US, xid=HIGH_XID),
        Begin(final_lsn=HIGH_LSN, commit_time_us=BEFORE_2000_US, xid=HIGH_XID),
    ),
    "commit": Case(
        build.commit(commit_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 1, commit_time_us=7),
        Commit(commit_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 1, commit_time_us=7),
    ),
    "origin": Case(
        build.origin(origin_commit_lsn=HIGH_LSN, name="node é"), Origin(origin_commit_lsn=HIGH_LSN, name="node é")
    ),
    "stream start": Case(
        build.stream_start(xid=HIGH_XID, first_segment=1), StreamStart(xid=HIGH_XID, is_first_segment=True)
    ),
    "stream start again": Case(
        build.stream_start(xid=HIGH_XID, first_segment=0), StreamStart(xid=HIGH_XID, is_first_segment=False)
    ),
    "stream stop": Case(build.stream_stop(), StreamStop(), in_stream=True),
    "stream commit": Case(
        build.stream_commit(xid=HIGH_XID, commit_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 1, commit_time_us=7),
        StreamCommit(xid=HIGH_XID, commit_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 1, commit_time_us=7),
    ),
    "stream abort": Case(
        build.stream_abort(xid=HIGH_XID, subxid=HIGH_XID + 1),
        StreamAbort(xid=HIGH_XID, subxid=HIGH_XID + 1, abort_lsn=None, abort_time_us=None),
    ),
    "stream abort, parallel": Case(
        build.stream_abort_parallel(xid=HIGH_XID, subxid=3, abort_lsn=HIGH_LSN, abort_time_us=8),
        StreamAbort(xid=HIGH_XID, subxid=3, abort_lsn=HIGH_LSN, abort_time_us=8),
        streaming_parallel=True,
    ),
    "begin prepare": _prepared(
        BeginPrepare,
        build.begin_prepare(prepare_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 9, prepare_time_us=5, xid=HIGH_XID, gid="gid é"),
    ),
    "prepare": _prepared(
        Prepare,
        build.prepare(prepare_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 9, prepare_time_us=5, xid=HIGH_XID, gid="gid é"),
    ),
    "stream prepare": _prepared(
        StreamPrepare,
        build.stream_prepare(prepare_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 9, prepare_time_us=5, xid=HIGH_XID, gid="gid é"),
    ),
    "commit prepared": Case(
        build.commit_prepared(commit_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 9, commit_time_us=5, xid=HIGH_XID, gid=""),
        CommitPrepared(commit_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 9, commit_time_us=5, xid=HIGH_XID, gid=""),
    ),
    "rollback prepared": Case(
        build.rollback_prepared(
            prepare_end_lsn=4, rollback_end_lsn=HIGH_LSN, prepare_time_us=5, rollback_time_us=6, xid=9, gid="g"
        ),
        RollbackPrepared(
            prepare_end_lsn=4, rollback_end_lsn=HIGH_LSN, prepare_time_us=5, rollback_time_us=6, xid=9, gid="g"
        ),
    ),
    **_changes(None),
    **_changes(HIGH_XID),
}
