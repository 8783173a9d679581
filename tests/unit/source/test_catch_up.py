"""When ranges of WAL are read, how long they are, and their SQL."""

from __future__ import annotations

import msgspec
import pytest

from parapply.errors import ProtocolError
from parapply.source.catch_up import (
    RangeLimits,
    RangePosition,
    behind_bytes,
    end_lsn_of,
    range_sql,
    why_leave,
    why_stream,
)
from parapply.source.slot import SlotFacts, SourceFacts

MB = 1 << 20
LIMITS = RangeLimits(range_bytes=64 * MB, enter_bytes=32 * MB, leave_bytes=4 * MB, buffer_bytes=MB)
SLOT = SlotFacts(
    name="s", plugin="pgoutput", slot_type="logical", database="app", is_temporary=False, active_pid=None,
    confirmed_flush_lsn=1000 * MB, restart_lsn=990 * MB, wal_status="reserved", invalidation_reason=None,
    is_conflicting=False, is_two_phase=False,
)  # fmt: skip
FACTS = SourceFacts(
    system_identifier="1", timeline=1, database="app", server_version_num=180000, wal_level="logical",
    is_in_recovery=False, wal_sender_timeout_s=60, decoding_memory_bytes=64 * MB, flush_lsn=2000 * MB, slot=SLOT,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"active_pid": 7}, "another process"),
        ({"is_two_phase": True}, "prepared"),
        ({"is_failover": True}, "failover"),
        ({"restart_lsn": None}, "no WAL"),
        # Sixteen ranges before the first one.
        ({"confirmed_flush_lsn": 1100 * MB, "restart_lsn": 76 * MB}, ""),
        ({"confirmed_flush_lsn": 1100 * MB, "restart_lsn": 76 * MB - 1}, "restarts 1024 MB before"),
    ],
)
def test_what_a_slot_must_be_like(changed: dict[str, object], reason: str) -> None:
    """A copy has neither two_phase nor failover, and each range is decoded from the restart point on."""
    facts = msgspec.structs.replace(FACTS, slot=msgspec.structs.replace(SLOT, **changed))
    found = why_stream(facts, 1000 * MB, LIMITS, two_phase=False)
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.parametrize("restart_mb", [0, 500, 999])
def test_a_stream_is_left_for_what_is_then_read_in_ranges(restart_mb: int) -> None:
    """The next connection then reads ranges, however far the slot restarts."""
    facts = msgspec.structs.replace(FACTS, slot=msgspec.structs.replace(SLOT, restart_lsn=restart_mb * MB))
    for enter_bytes in (0, MB, LIMITS.enter_bytes):
        limits = msgspec.structs.replace(LIMITS, enter_bytes=enter_bytes)
        lag_bytes = behind_bytes(facts, limits)
        assert why_stream(facts, facts.flush_lsn - lag_bytes, limits, two_phase=False) == ""
    assert behind_bytes(msgspec.structs.replace(FACTS, slot=None), LIMITS) == 8 * LIMITS.enter_bytes


def test_what_else_keeps_the_stream() -> None:
    """Little to catch up, prepared transactions applied as such, a publisher that does not say what is in progress."""
    assert why_stream(FACTS, 2000 * MB - LIMITS.enter_bytes, LIMITS, two_phase=False) == ""
    assert "little" in why_stream(FACTS, 2000 * MB - LIMITS.enter_bytes + 1, LIMITS, two_phase=False)
    far = msgspec.structs.replace(FACTS, slot=msgspec.structs.replace(SLOT, restart_lsn=0))
    assert why_stream(far, 2000 * MB - 32 * MB, LIMITS, two_phase=False) == ""
    assert "little" in why_stream(
        far, 2000 * MB - 31 * MB, msgspec.structs.replace(LIMITS, enter_bytes=0), two_phase=False
    )
    assert "prepared" in why_stream(FACTS, 0, LIMITS, two_phase=True)
    for version, reason in ((130010, "older"), (150012, "minor version"), (170004, "minor version"), (170005, "")):
        facts = msgspec.structs.replace(FACTS, server_version_num=version)
        found = why_stream(facts, 1000 * MB, LIMITS, two_phase=False)
        assert reason in found
        assert bool(reason) == bool(found)
    assert why_stream(msgspec.structs.replace(FACTS, slot=None), 0, LIMITS, two_phase=False)


@pytest.mark.parametrize(
    ("restart_mb", "range_mb"), [(0, 4), (10, 10), (64, 64), (200, 64), (512, 128), (1024, 256), (9999, 256)]
)
def test_ranges_grow_with_what_is_read_before_them(restart_mb: int, range_mb: int) -> None:
    """The first is short, each next as long as what is decoded again before it, up to four times the usual length."""
    assert LIMITS.next_bytes(restart_mb * MB, 99999 * MB) == range_mb * MB


@pytest.mark.parametrize(("left_mb", "range_mb"), [(5, 5), (8, 8), (9, 4), (4, 4), (3, 4)])
def test_a_range_leaves_no_little_rest(left_mb: int, range_mb: int) -> None:
    """WAL that would be left for the stream, and existed when the range was asked for, comes with the range."""
    assert LIMITS.next_bytes(0, left_mb * MB) == range_mb * MB


def test_a_range_is_never_empty() -> None:
    """Whatever is configured, a range goes on."""
    assert RangeLimits(range_bytes=1, enter_bytes=0, leave_bytes=0, buffer_bytes=1).next_bytes(0, 0) == 1


def test_ranges_end_where_every_reader_parts_the_same_records() -> None:
    """At multiples of 8 KiB and at the end of the WAL, never within the header that a WAL page of any size may have."""
    for copy_lsn, flush_lsn, end_lsn in (
        (100 * MB + 5, 99999 * MB, 104 * MB + 8192),
        (100 * MB + 5, 100 * MB + 8191 * 3, 100 * MB + 8191 * 3),
        (100 * MB + 5, 100 * MB + 8192, 100 * MB + 8192),
        (100 * MB + 5, 100 * MB + 8192 + 24, 100 * MB + 8192),
        (100 * MB + 5, 100 * MB + 5 * 1024 + 40, 100 * MB + 5 * 1024),
        (100 * MB + 5, 100 * MB + 5 * 1024 + 48, 100 * MB + 5 * 1024 + 48),
    ):
        position = RangePosition(copy_lsn=copy_lsn, restart_lsn=copy_lsn, slot_lsn=0, flush_lsn=flush_lsn, clock_us=0)
        assert position.left_bytes > 0
        assert LIMITS.next_end(position) == end_lsn
    rest = RangePosition(copy_lsn=100 * MB + 5, restart_lsn=0, slot_lsn=0, flush_lsn=100 * MB + 24, clock_us=0)
    assert rest.left_bytes == 0
    assert LIMITS.next_end(rest) == rest.copy_lsn


def test_how_many_read() -> None:
    """Each has a whole range at least; with an old transaction open every reader would decode from its begin."""
    limits = msgspec.structs.replace(LIMITS, readers=4)
    assert [limits.readers_of(lag_mb * MB) for lag_mb in (4, 64, 128, 9999)] == [1, 2, 3, 4]
    assert [limits.is_near(restart_mb * MB) for restart_mb in (0, 128, 129)] == [True, True, False]


@pytest.mark.parametrize(
    ("copy_mb", "restart_mb", "end_mb", "message_bytes", "reason"),
    [(1000, 990, 1000, 500, ""), (1996, 1990, 1996, 9000, "caught up"), (2001, 1990, 2000, 90, "caught up"),
     (1000, 990, 1001, 90, "came to no end"), (1900, 800, 1900, 90, "restarts 1100 MB before"),
     (1000, 990, 1000, 700, "rows are large")],
)  # fmt: skip
def test_when_the_stream_takes_over(
    copy_mb: int, restart_mb: int, end_mb: int, message_bytes: int, reason: str
) -> None:
    """With little left, without the end that was asked for, with much to decode again, or with large rows."""
    position = RangePosition(
        copy_lsn=copy_mb * MB, restart_lsn=restart_mb * MB, slot_lsn=900 * MB, flush_lsn=2000 * MB, clock_us=0
    )
    found = why_leave(position, LIMITS, end_lsn=end_mb * MB, message_bytes=message_bytes)
    assert reason in found
    assert bool(reason) == bool(found)


def test_names_are_literals() -> None:
    """A publication may have any name; the call is bounded by WAL, never by a number of changes."""
    query = range_sql("copy", 0x1_0000_0010, [("publication_names", '"it\'s"')])
    assert "'copy', '1/10', NULL, VARIADIC ARRAY['publication_names', '\"it''s\"']" in query


def test_only_a_commit_ends_whole_transactions() -> None:
    """The stream starts at the end of the last one; anything else at its place is a broken stream."""
    commit = b"C\0" + (5).to_bytes(8) + (9).to_bytes(8) + bytes(8)
    assert end_lsn_of(bytes(25) + commit) == 9
    with pytest.raises(ProtocolError):
        end_lsn_of(bytes(25) + b"B" + bytes(20))
