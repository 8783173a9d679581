"""Walsender frames and the status update, without a server."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES
from parapply.wire.frames import Keepalive, UnknownFrame, XLogData, parse, parse_keepalive, status_update
from tests import build

if TYPE_CHECKING:
    from collections.abc import Callable

LSNS = st.integers(0, 2**64 - 1)
TIMES_US = st.integers(-(2**63), 2**63 - 1)


@given(start_lsn=LSNS, end_lsn=LSNS, send_time_us=TIMES_US, payload=st.binary(max_size=40))
def test_xlog_data_keeps_its_frame_and_the_payload_begins_behind_the_header(
    start_lsn: int, end_lsn: int, send_time_us: int, payload: bytes
) -> None:
    """The whole frame is kept as it is, and its payload is what lies from FRAME_HEADER_BYTES on."""
    frame = build.xlog_data(payload, start_lsn=start_lsn, end_lsn=end_lsn, send_time_us=send_time_us)
    parsed = parse(frame)
    assert parsed == XLogData(start_lsn=start_lsn, end_lsn=end_lsn, send_time_us=send_time_us, frame=frame)
    assert isinstance(parsed, XLogData)
    assert parsed.frame is frame
    assert parsed.payload == payload
    assert len(frame) - len(payload) == FRAME_HEADER_BYTES


@given(end_lsn=LSNS, send_time_us=TIMES_US, reply_requested=st.booleans())
def test_keepalive(end_lsn: int, send_time_us: int, reply_requested: bool) -> None:  # noqa: FBT001 - hypothesis
    """A keepalive has LSN, time and whether it must be answered, through either way in."""
    frame = build.keepalive(end_lsn=end_lsn, send_time_us=send_time_us, reply_requested=reply_requested)
    expected = Keepalive(end_lsn=end_lsn, send_time_us=send_time_us, reply_requested=reply_requested)
    assert parse(frame) == expected
    assert parse_keepalive(frame) == expected


@pytest.mark.parametrize(
    ("frame", "shortest_bytes"),
    [(build.xlog_data(b"E"), FRAME_HEADER_BYTES), (build.keepalive(), len(build.keepalive()))],
    ids=["XLogData", "Keepalive"],
)
def test_a_frame_cut_within_its_header_is_refused(frame: bytes, shortest_bytes: int) -> None:
    """Every length short of the fixed fields raises ProtocolError with the kind and the offset."""
    for size in range(shortest_bytes):
        with pytest.raises(ProtocolError) as caught:
            parse(frame[:size])
        assert caught.value.kind == (chr(frame[0]) if size else "")
        assert 0 <= caught.value.offset <= size
    parse(frame[:shortest_bytes])


@pytest.mark.parametrize("read", [parse, parse_keepalive])
def test_a_keepalive_must_be_exact(read: Callable[[bytes], object]) -> None:
    """Bytes behind a keepalive, and a reply flag that is neither 0 nor 1, are refused."""
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        read(build.keepalive() + b"\0")
    with pytest.raises(ProtocolError, match="reply requested"):
        read(build.keepalive(reply_requested=2))


def test_another_kind_is_no_keepalive() -> None:
    """parse_keepalive never takes another frame's bytes for a keepalive's."""
    with pytest.raises(ProtocolError, match="not a keepalive"):
        parse_keepalive(b"s" + build.keepalive()[1:])


def test_a_kind_never_asked_for_is_returned_as_such() -> None:
    """PostgreSQL 19's primary status update, of whatever length, can be ignored by the caller."""
    assert parse(b"s" + bytes(36)) == UnknownFrame(kind="s")
    assert parse(b"\xff") == UnknownFrame(kind="\xff")


@given(st.binary(max_size=60))
def test_random_bytes_are_a_frame_or_a_protocol_error(frame: bytes) -> None:
    """No frame from the publisher raises anything but ProtocolError."""
    for read in (parse, parse_keepalive):
        offset = 0
        try:
            read(frame)
        except ProtocolError as error:
            offset = error.offset
        assert 0 <= offset <= len(frame)


@given(lsns=st.lists(LSNS, min_size=2, max_size=2).map(sorted), applied_lsn=LSNS, client_time_us=TIMES_US)
def test_status_update_layout(lsns: list[int], applied_lsn: int, client_time_us: int) -> None:
    """The update is 'r', written, flushed, applied, clock and reply flag, 34 bytes in all."""
    flushed_lsn, written_lsn = lsns
    for reply_requested in (False, True):
        update = status_update(written_lsn, flushed_lsn, applied_lsn, client_time_us, reply_requested)
        fields = struct.unpack("!cQQQqB", update)
        assert fields == (b"r", written_lsn, flushed_lsn, applied_lsn, client_time_us, reply_requested)
        assert len(update) == 34


@given(written_lsn=st.integers(0, 2**64 - 2), beyond=st.integers(1, 2**32))
def test_flushed_is_never_beyond_written(written_lsn: int, beyond: int) -> None:
    """An LSN that was not received cannot be durable: such an update is never built."""
    with pytest.raises(AssertionError, match="beyond written"):
        status_update(written_lsn, written_lsn + beyond, 0, 0, reply_requested=False)
