"""The bytes of every pgoutput message and walsender frame, put together by hand for tests.

Nothing of the decoder is used here, so that a layout misread there cannot hide. An `xid` of None means outside a
stream block: the field is then absent. Cells are the bytes of one column, made by `null`, `unchanged`, `text` and
`binary`; `row` joins them to a TupleData.

Source: PostgreSQL manual, "Logical Replication Message Formats" and "Streaming Replication Protocol".
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypedDict


class ColumnSpec(NamedTuple):
    """One column of a Relation message as it goes onto the wire."""

    name: str
    type_oid: int = 25
    type_modifier: int = -1
    flags: int = 0


class Before(TypedDict, total=False):
    """The old row of an update or delete as it goes to `update` and `delete`; at most one of the two."""

    key: bytes
    old: bytes


def string(text: str) -> bytes:
    """Return a NUL-terminated string."""
    return text.encode() + b"\0"


def _xid(xid: int | None) -> bytes:
    return b"" if xid is None else struct.pack("!I", xid)


def null() -> bytes:
    """Return the cell of an SQL NULL."""
    return b"n"


def unchanged() -> bytes:
    """Return the cell of a TOASTed value that was not sent."""
    return b"u"


def text(value: bytes) -> bytes:
    """Return the cell of a value in text format."""
    return b"t" + struct.pack("!i", len(value)) + value


def binary(value: bytes) -> bytes:
    """Return the cell of a value in binary format."""
    return b"b" + struct.pack("!i", len(value)) + value


def row(*cells: bytes) -> bytes:
    """Return the TupleData of some cells."""
    return struct.pack("!h", len(cells)) + b"".join(cells)


def begin(*, final_lsn: int = 0x100, commit_time_us: int = 1, xid: int = 700) -> bytes:
    """Return a Begin message."""
    return b"B" + struct.pack("!QqI", final_lsn, commit_time_us, xid)


def commit(*, flags: int = 0, commit_lsn: int = 0x100, end_lsn: int = 0x130, commit_time_us: int = 1) -> bytes:
    """Return a Commit message."""
    return b"C" + struct.pack("!BQQq", flags, commit_lsn, end_lsn, commit_time_us)


def origin(*, origin_commit_lsn: int = 0x90, name: str = "elsewhere") -> bytes:
    """Return an Origin message."""
    return b"O" + struct.pack("!Q", origin_commit_lsn) + string(name)


def relation(
    *columns: ColumnSpec,
    oid: int = 16384,
    namespace: str = "public",
    name: str = "t",
    replica_identity: str = "d",
    xid: int | None = None,
) -> bytes:
    """Return a Relation message."""
    head = _xid(xid) + struct.pack("!I", oid) + string(namespace) + string(name) + replica_identity.encode("ascii")
    body = b"".join(
        struct.pack("!B", column.flags)
        + string(column.name)
        + struct.pack("!Ii", column.type_oid, column.type_modifier)
        for column in columns
    )
    return b"R" + head + struct.pack("!h", len(columns)) + body


def type_(*, type_oid: int = 16400, namespace: str = "public", name: str = "mood", xid: int | None = None) -> bytes:
    """Return a Type message."""
    return b"Y" + _xid(xid) + struct.pack("!I", type_oid) + string(namespace) + string(name)


def insert(new: bytes, *, oid: int = 16384, xid: int | None = None) -> bytes:
    """Return an Insert message; `new` is a TupleData."""
    return b"I" + _xid(xid) + struct.pack("!I", oid) + b"N" + new


def update(
    new: bytes, *, key: bytes | None = None, old: bytes | None = None, oid: int = 16384, xid: int | None = None
) -> bytes:
    """Return an Update message; `new` and at most one of `key` and `old` are TupleData."""
    before = b"K" + key if key is not None else b"O" + old if old is not None else b""
    return b"U" + _xid(xid) + struct.pack("!I", oid) + before + b"N" + new


def delete(*, key: bytes | None = None, old: bytes | None = None, oid: int = 16384, xid: int | None = None) -> bytes:
    """Return a Delete message; exactly one of `key` and `old` is a TupleData (neither: a broken message)."""
    before = b"K" + key if key is not None else b"O" + old if old is not None else b""
    return b"D" + _xid(xid) + struct.pack("!I", oid) + before


def truncate(*oids: int, flags: int = 0, xid: int | None = None) -> bytes:
    """Return a Truncate message; flags are 1 CASCADE, 2 RESTART IDENTITY."""
    return b"T" + _xid(xid) + struct.pack(f"!iB{len(oids)}I", len(oids), flags, *oids)


def message(
    *, flags: int = 1, message_lsn: int = 0x80, prefix: str = "p", content: bytes = b"", xid: int | None = None
) -> bytes:
    """Return a logical decoding Message; flag 1 is transactional."""
    head = struct.pack("!BQ", flags, message_lsn) + string(prefix)
    return b"M" + _xid(xid) + head + struct.pack("!i", len(content)) + content


def stream_start(*, xid: int = 700, first_segment: int = 1) -> bytes:
    """Return a Stream Start message."""
    return b"S" + struct.pack("!IB", xid, first_segment)


def stream_stop() -> bytes:
    """Return a Stream Stop message."""
    return b"E"


def stream_commit(
    *, xid: int = 700, flags: int = 0, commit_lsn: int = 0x100, end_lsn: int = 0x130, commit_time_us: int = 1
) -> bytes:
    """Return a Stream Commit message."""
    return b"c" + struct.pack("!IBQQq", xid, flags, commit_lsn, end_lsn, commit_time_us)


def stream_abort(*, xid: int = 700, subxid: int = 701) -> bytes:
    """Return a Stream Abort message as sent unless `streaming 'parallel'` was asked for."""
    return b"A" + struct.pack("!II", xid, subxid)


def stream_abort_parallel(
    *, xid: int = 700, subxid: int = 701, abort_lsn: int = 0x100, abort_time_us: int = 1
) -> bytes:
    """Return a Stream Abort message as sent under `streaming 'parallel'`."""
    return b"A" + struct.pack("!IIQq", xid, subxid, abort_lsn, abort_time_us)


def begin_prepare(
    *, prepare_lsn: int = 0x100, end_lsn: int = 0x130, prepare_time_us: int = 1, xid: int = 700, gid: str = "g"
) -> bytes:
    """Return a Begin Prepare message."""
    return b"b" + struct.pack("!QQqI", prepare_lsn, end_lsn, prepare_time_us, xid) + string(gid)


def _flagged(kind: bytes, gid: str, *numbers: int) -> bytes:
    return kind + struct.pack("!BQQqI", *numbers) + string(gid)


def prepare(
    *,
    flags: int = 0,
    prepare_lsn: int = 0x100,
    end_lsn: int = 0x130,
    prepare_time_us: int = 1,
    xid: int = 700,
    gid: str = "g",
) -> bytes:
    """Return a Prepare message."""
    return _flagged(b"P", gid, flags, prepare_lsn, end_lsn, prepare_time_us, xid)


def stream_prepare(
    *,
    flags: int = 0,
    prepare_lsn: int = 0x100,
    end_lsn: int = 0x130,
    prepare_time_us: int = 1,
    xid: int = 700,
    gid: str = "g",
) -> bytes:
    """Return a Stream Prepare message."""
    return _flagged(b"p", gid, flags, prepare_lsn, end_lsn, prepare_time_us, xid)


def commit_prepared(
    *,
    flags: int = 0,
    commit_lsn: int = 0x100,
    end_lsn: int = 0x130,
    commit_time_us: int = 1,
    xid: int = 700,
    gid: str = "g",
) -> bytes:
    """Return a Commit Prepared message."""
    return _flagged(b"K", gid, flags, commit_lsn, end_lsn, commit_time_us, xid)


def rollback_prepared(
    *,
    flags: int = 0,
    prepare_end_lsn: int = 0x130,
    rollback_end_lsn: int = 0x160,
    prepare_time_us: int = 1,
    rollback_time_us: int = 2,
    xid: int = 700,
    gid: str = "g",
) -> bytes:
    """Return a Rollback Prepared message."""
    times = struct.pack("!BQQqqI", flags, prepare_end_lsn, rollback_end_lsn, prepare_time_us, rollback_time_us, xid)
    return b"r" + times + string(gid)


def xlog_data(payload: bytes, *, start_lsn: int = 0x100, end_lsn: int = 0x100, send_time_us: int = 1) -> bytes:
    """Return the CopyData contents that carry a pgoutput message."""
    return b"w" + struct.pack("!QQq", start_lsn, end_lsn, send_time_us) + payload


def keepalive(*, end_lsn: int = 0x100, send_time_us: int = 1, reply_requested: int = 0) -> bytes:
    """Return the CopyData contents of a primary keepalive message."""
    return b"k" + struct.pack("!QqB", end_lsn, send_time_us, reply_requested)
