"""The contents of a walsender's CopyData messages, and the status update that goes back.

LSNs are unsigned numbers; times are microseconds since 2000-01-01 UTC (`POSTGRES_EPOCH_US`), on the sender's clock.

Source: PostgreSQL manual, "Streaming Replication Protocol", under START_REPLICATION.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from parapply.model import FRAME_HEADER_BYTES, format_lsn
from parapply.wire.reader import Reader

#: Type byte, written, flushed, applied, client's clock, whether a reply is wanted.
_STATUS_UPDATE = struct.Struct("!cQQQqB")
#: Type byte, end LSN, send time, whether a reply is wanted.
_KEEPALIVE_FRAME = struct.Struct("!cQqB")

_XLOG_DATA = "w"
_KEEPALIVE = "k"
_REPLY_REQUESTED = 1


class XLogData(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the stream ('w'), called WALData since PostgreSQL 19: with pgoutput exactly one message."""

    start_lsn: int
    end_lsn: int
    send_time_us: int
    frame: bytes  # the whole CopyData; the payload begins at FRAME_HEADER_BYTES and is not copied

    @property
    def payload(self) -> bytes:
        """Return a copy of the pgoutput message."""
        return self.frame[FRAME_HEADER_BYTES:]


class Keepalive(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher is alive and has read its WAL up to `end_lsn` ('k')."""

    end_lsn: int
    send_time_us: int
    reply_requested: bool  # to be answered at once, or wal_sender_timeout ends the session


class UnknownFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A kind this program never asked for, such as PostgreSQL 19's 's': to be ignored."""

    kind: str  # one character, the type byte


Frame: TypeAlias = XLogData | Keepalive | UnknownFrame


def parse(frame: bytes) -> Frame:
    """Return the walsender's message in one CopyData message.

    Args:
        frame: the message's contents, as a separate copy, because XLogData keeps it.

    Raises:
        ProtocolError: the frame is empty, an XLogData or Keepalive is cut, or a Keepalive is too long.
    """
    reader = Reader(frame)
    if reader.kind == _XLOG_DATA:
        return XLogData(
            start_lsn=reader.unsigned(8, "start LSN"),
            end_lsn=reader.unsigned(8, "end LSN"),
            send_time_us=reader.signed(8, "send time"),
            frame=frame,
        )
    if reader.kind == _KEEPALIVE:
        return _keepalive(reader)
    return UnknownFrame(kind=reader.kind)


def parse_keepalive(frame: bytes) -> Keepalive:
    """Return a frame already known to be of kind 'k': for a reader that sorts frames by their first byte.

    Raises:
        ProtocolError: the frame is not exactly one Keepalive.
    """
    if len(frame) == _KEEPALIVE_FRAME.size and frame[:1] == b"k" and frame[-1] <= _REPLY_REQUESTED:
        _, end_lsn, send_time_us, reply_requested = _KEEPALIVE_FRAME.unpack(frame)  # one comes with every commit
        return Keepalive(end_lsn=end_lsn, send_time_us=send_time_us, reply_requested=bool(reply_requested))
    reader = Reader(frame)
    if reader.kind != _KEEPALIVE:
        raise reader.error("not a keepalive", 0)
    return _keepalive(reader)


def _keepalive(reader: Reader) -> Keepalive:
    keepalive = Keepalive(
        end_lsn=reader.unsigned(8, "end LSN"),
        send_time_us=reader.signed(8, "send time"),
        reply_requested=bool(reader.flags(_REPLY_REQUESTED, "reply requested")),
    )
    reader.finish()
    return keepalive


def status_update(
    written_lsn: int,
    flushed_lsn: int,
    applied_lsn: int,
    client_time_us: int,
    reply_requested: bool,  # noqa: FBT001 - the fields in wire order
) -> bytes:
    """Return a standby status update ('r'), the contents of one CopyData message to the publisher.

    Each LSN is the position of the last byte plus one. Only the flushed one moves the slot. Changes before it will
    never be sent again, so it must be durable on the target.

    Args:
        written_lsn: received.
        flushed_lsn: durable on the target; never beyond `written_lsn`.
        applied_lsn: visible on the target.
        client_time_us: this side's clock, microseconds since 2000-01-01 UTC.
        reply_requested: ask the publisher to answer with a Keepalive at once.

    Raises:
        AssertionError: flushed lies beyond written, which is a bug here that would lose data.
    """
    # Raised by hand, as `python -O` removes assert statements and this one stands between a bug and lost rows.
    if flushed_lsn > written_lsn:
        raise AssertionError(f"flushed {format_lsn(flushed_lsn)} is beyond written {format_lsn(written_lsn)}")
    return _STATUS_UPDATE.pack(b"r", written_lsn, flushed_lsn, applied_lsn, client_time_us, reply_requested)
