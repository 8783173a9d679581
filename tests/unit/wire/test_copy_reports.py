"""Keep-alives and the status update, without a server."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.wire.copy import Keepalive, parse_keepalive, status_update
from tests import build

LSNS = st.integers(0, 2**64 - 1)
TIMES_US = st.integers(-(2**63), 2**63 - 1)


@given(end_lsn=LSNS, send_time_us=TIMES_US, reply_requested=st.booleans())
def test_keepalive(end_lsn: int, send_time_us: int, reply_requested: bool) -> None:  # noqa: FBT001 - hypothesis
    """A keepalive has LSN, time and whether it must be answered."""
    frame = build.keepalive(end_lsn=end_lsn, send_time_us=send_time_us, reply_requested=reply_requested)
    expected = Keepalive(end_lsn=end_lsn, send_time_us=send_time_us, reply_requested=reply_requested)
    assert parse_keepalive(frame) == expected


def test_a_keepalive_must_be_exact() -> None:
    """Every length short of the fields, bytes behind them, and a reply flag that is neither 0 nor 1, are refused."""
    frame = build.keepalive()
    for wrong in [frame[:size] for size in range(len(frame))] + [frame + b"\0"]:
        with pytest.raises(ProtocolError) as caught:
            parse_keepalive(wrong)
        assert caught.value.kind == ("k" if wrong else "")
    with pytest.raises(ProtocolError, match="reply requested"):
        parse_keepalive(build.keepalive(reply_requested=2))


def test_another_kind_is_no_keepalive() -> None:
    """parse_keepalive never takes another frame's bytes for a keepalive's."""
    with pytest.raises(ProtocolError, match="not a keepalive"):
        parse_keepalive(b"s" + build.keepalive()[1:])


@given(st.binary(max_size=60))
def test_random_bytes_are_a_keepalive_or_a_protocol_error(frame: bytes) -> None:
    """No frame from the publisher raises anything but ProtocolError."""
    offset = 0
    try:
        parse_keepalive(frame)
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
