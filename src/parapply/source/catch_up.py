"""Rules for reading a backlog in ranges of WAL instead of as a stream, the size of a range, and the SQL of both. Pure.

A walsender sends every change as a separate message, which with small changes costs it more than decoding does. So a
large backlog may be read by a query over the same slot's changes, `pg_logical_slot_get_binary_changes`, range after
range, from a temporary copy of the slot; the stream takes over where the last range ended. The copy may be consumed
freely: the slot itself is moved only to what is durable on the target. Several sessions may read a range each.

Source: PostgreSQL manual, "Replication Management Functions"; `src/backend/replication/logical/logicalfuncs.c`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES, format_lsn
from parapply.quoting import literal
from parapply.source.options import start_options
from parapply.wire.decode import decode
from parapply.wire.messages import Commit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.source.slot import SourceFacts

#: server_version_num of the first server whose pgoutput says which transactions are in progress.
_STREAMING_SINCE = 140000
#: Minor versions from which moving a slot forward leaves it the catalogue rows that it still needs: before them
#: `pg_replication_slot_advance` let vacuum remove some. (PostgreSQL, "Fix xmin advancement during fast_forward
#: decoding", 2025-04-28.) Later major versions had it from their first release.
_MOVES_SAFELY_SINCE = {14: 140018, 15: 150013, 16: 160009, 17: 170005}
#: The first range is this part of a whole one, so that the first rows come soon; ranges then grow to the whole.
_FIRST_PART = 16
#: Every range is decoded from the copy's restart_lsn on, which the publisher moves every 15 seconds at best. The WAL
#: before the range costs about a tenth of the range itself, byte for byte, because none of it is sent. With this many
#: bytes before it for each byte of the range, a range takes a fifth to a half longer.
_RESTART_RATIO = 4
#: A stream is left for ranges when it is this many times as far behind as a connection that begins with them must be,
#: because both ends are then opened again.
_BEHIND = 8
#: A slot that restarts this many times as far back as there is to catch up is streamed, because the stream that follows
#: ranges decodes from there once more.
_LITTLE_RATIO = 32
#: A stream must be this many times as far behind as that ratio says: the restart point may be further back by then.
_MARGIN = 2
#: Ranges grow to this many times their configured size where the restart point is far back; beyond that the stream,
#: which decodes from there only once, is the cheaper reader.
_LARGEST = 4
#: Bytes of a message, on average over a range, from which the stream is the faster reader: the publisher keeps a range
#: in memory or a file before it sends it, and reads again what lies before it, which costs for each byte, while what a
#: range saves it saves for each message. Measured with one row a transaction: with rows of 0.8 kB (0.3 kB a message)
#: a backlog took a sixth longer as a stream, with 2.2 kB (0.75) a tenth less, with 4 kB (1.4) as long.
_LARGE_MESSAGE_BYTES = 600
_MEGABYTE = 1024 * 1024
#: Ranges end at multiples of this. A commit record begins on one side of such a position for everybody who reads: every
#: size of a WAL page divides it or is a multiple of it, so it lies in no page's header, across which a reader would go
#: on to the next record although the position is behind it. The last range ends where the WAL does, at the end of a
#: record or of a page: the stream would send the rest only after it had decoded the whole backlog once more.
_CUT_BYTES = 8192
#: No page is smaller, and no page's header larger. (`src/include/access/xlog_internal.h`)
_SMALLEST_PAGE_BYTES = 1024
_LARGEST_HEADER_BYTES = 40
#: With several readers the WAL before a range is read once more, without decoding, at about a tenth of what the range
#: costs, byte for byte. Where the restart point is further back than this many ranges, only one reads.
_NEAR_RANGES = 2
#: Bytes of WAL to catch up at which the stream takes over: it reads them in a few hundredths of a second.
_LEAVE_BYTES = 4 * 1024 * 1024
#: Part of the memory limit for changes read from ranges and in no batch yet.
_RANGES_PART = 4

#: Reasons for the stream that pass: when there is much to catch up again, ranges are tried again. Every other one holds
#: until the next connection.
LITTLE: Final = "little to catch up"
CAUGHT_UP: Final = "caught up"
IN_PROGRESS: Final = "a transaction in progress is too large for a range"
#: No reason that passes: a stream that is left before all of it has come would send it from its beginning again.
IN_PROGRESS_WHOLE: Final = "a transaction in progress is too large for a range, and comes whole after its commit"
UNFINISHED: Final = "the last attempt to read a range did not come to its end"
LARGE: Final = "the rows are large"
PASSING: Final = frozenset({LITTLE, CAUGHT_UP, IN_PROGRESS, UNFINISHED, LARGE})


class RangeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Size of one read, and the conditions under which ranges are read at all; bytes of WAL."""

    range_bytes: int
    enter_bytes: int  # to catch up at least
    leave_bytes: int  # to catch up at most, and the stream takes over
    buffer_bytes: int  # of changes that have come and are not applied; above, nothing is read
    readers: int = 1  # sessions that read a range each

    @property
    def point_bytes(self) -> int:
        """Return the bytes of WAL between restart points that are asked for: a few in each range."""
        return self.range_bytes // _RESTART_RATIO

    def readers_of(self, lag_bytes: int) -> int:
        """Return the number of sessions for a backlog. Each has at least a whole range."""
        return min(self.readers, 1 + lag_bytes // self.range_bytes)

    def is_near(self, restart_bytes: int) -> bool:
        """Return whether a restart point lies so near before a range that another session may read the next one."""
        return restart_bytes <= _NEAR_RANGES * self.range_bytes

    def is_far(self, restart_bytes: int) -> bool:
        """Return whether a restart point lies so far before a range that the stream costs the publisher less."""
        return restart_bytes > _RESTART_RATIO * _LARGEST * self.range_bytes

    def next_bytes(self, restart_bytes: int, left_bytes: int) -> int:
        """Return the length of the next range, which takes all where it would leave only what the stream is for.

        The publisher decodes `restart_bytes` of WAL again before it comes to the range.
        """
        grown = max(self.range_bytes // _FIRST_PART, min(restart_bytes, self.range_bytes))
        length = max(grown, min(restart_bytes // _RESTART_RATIO, _LARGEST * self.range_bytes), 1)
        return left_bytes if length < left_bytes <= length + self.leave_bytes else length

    def next_end(self, position: RangePosition) -> int:
        """Return where the range ends that begins at a position; with nothing left it is empty."""
        end_lsn = position.copy_lsn + self.next_bytes(position.restart_bytes, position.left_bytes)
        cut_lsn = min(-(-end_lsn // _CUT_BYTES) * _CUT_BYTES, _end_of_wal(position.flush_lsn))
        return max(cut_lsn, position.copy_lsn)


def range_limits(config: Config) -> RangeLimits:
    """Return how ranges of WAL are read by a configuration."""
    source = config.source
    return RangeLimits(
        range_bytes=source.catch_up_range_bytes,
        enter_bytes=source.catch_up_enter_bytes,
        leave_bytes=min(_LEAVE_BYTES, source.catch_up_enter_bytes),
        buffer_bytes=config.apply.memory_limit_bytes // _RANGES_PART,
        readers=source.catch_up_readers,
    )


class CatchUp(msgspec.Struct, frozen=True, kw_only=True):
    """The WAL that is to be read in ranges."""

    slot: str
    start_lsn: int  # everything that ends up to here is on the target
    options: tuple[tuple[str, str], ...]  # pgoutput's, of a range
    is_streaming: bool = True  # the stream that follows sends transactions in progress
    limits: RangeLimits


class RangePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where the copy is, and the slot."""

    copy_lsn: int  # every transaction whose commit record begins before it has been read
    restart_lsn: int  # of the copy
    slot_lsn: int | None  # confirmed_flush_lsn of the slot; None: the slot is gone
    flush_lsn: int
    clock_us: int  # of the publisher, microseconds since 2000-01-01 UTC

    @property
    def left_bytes(self) -> int:
        """Return the bytes of WAL to catch up that a range may have."""
        return max(0, _end_of_wal(self.flush_lsn) - self.copy_lsn)

    @property
    def restart_bytes(self) -> int:
        """Return the bytes of WAL that are decoded again before the next range."""
        return max(0, self.copy_lsn - self.restart_lsn)


def why_stream(facts: SourceFacts, start_lsn: int, limits: RangeLimits, *, two_phase: bool) -> str:
    """Return why the slot cannot be read in ranges, or need not; empty if it shall be.

    Args:
        facts: the publisher now; the slot exists.
        start_lsn: everything that ends up to here is on the target.
        limits: as configured.
        two_phase: prepared transactions are applied as such.
    """
    slot = facts.slot
    lag_bytes = facts.flush_lsn - start_lsn
    if lag_bytes < limits.enter_bytes:
        return LITTLE
    if slot is None or slot.restart_lsn is None or slot.confirmed_flush_lsn is None:
        return "the slot holds no WAL"
    restart_bytes = slot.confirmed_flush_lsn - slot.restart_lsn
    if max(_LITTLE_RATIO * lag_bytes, limits.range_bytes) < restart_bytes and not limits.is_far(restart_bytes):
        return LITTLE
    reasons = (
        # START_REPLICATION says that best, and is tried again until the other one is gone.
        (slot.active_pid is not None, "another process reads the slot"),
        # A copy has no two_phase: what is prepared would come at its commit, as if it had never been prepared.
        (slot.is_two_phase or two_phase, "the slot sends prepared transactions, which a copy of it does not"),
        # A walsender holds back what the standbys in synchronized_standby_slots do not have yet. No one does that for
        # a copy, which is no failover slot: after a failover the target would be ahead of the publisher.
        (slot.is_failover, "the slot waits for standbys (failover), which a copy of it does not"),
        (facts.is_in_recovery, "the publisher is a standby"),
        (facts.server_version_num < _STREAMING_SINCE, "the publisher is older than PostgreSQL 14"),
        (
            facts.server_version_num < _MOVES_SAFELY_SINCE.get(facts.server_version_num // 10_000, 0),
            "the publisher's minor version is too old: moving a slot could lose catalogue rows that it needs",
        ),
        (limits.is_far(restart_bytes), far_reason(restart_bytes)),
    )
    return next((reason for holds, reason in reasons if holds), "")


def behind_bytes(facts: SourceFacts, limits: RangeLimits) -> int:
    """Return the bytes of WAL to catch up from which a stream is left for ranges.

    Where the slot restarts far back it is more than `why_stream` asks for. Otherwise the next connection would stream
    again, from there on. The facts are of when the stream began.
    """
    least = _BEHIND * limits.enter_bytes
    slot = facts.slot
    if slot is None or slot.restart_lsn is None or slot.confirmed_flush_lsn is None:
        return least
    restart_bytes = _MARGIN * (slot.confirmed_flush_lsn - slot.restart_lsn)
    return least if restart_bytes <= limits.range_bytes else max(least, restart_bytes // _LITTLE_RATIO + 1)


def far_reason(restart_bytes: int) -> str:
    """Return why ranges are not worth their price: an old transaction is open on the publisher, or was."""
    return f"the slot restarts {restart_bytes // _MEGABYTE} MB before its position, which each range decodes again"


def _end_of_wal(flush_lsn: int) -> int:
    """Return where a range may end at most, which is before the page's header if the WAL ends within one."""
    in_page_bytes = flush_lsn % _SMALLEST_PAGE_BYTES
    return flush_lsn if in_page_bytes > _LARGEST_HEADER_BYTES else flush_lsn - in_page_bytes


def why_leave(position: RangePosition, limits: RangeLimits, *, end_lsn: int = 0, message_bytes: int = 0) -> str:
    """Return why the stream takes over; empty: the next range follows.

    The last range was asked for up to `end_lsn`, and has messages of `message_bytes` on average.
    """
    if position.left_bytes <= limits.leave_bytes:
        return CAUGHT_UP
    if position.copy_lsn < end_lsn:
        return "a range came to no end"
    if message_bytes > _LARGE_MESSAGE_BYTES:
        return LARGE
    return far_reason(position.restart_bytes) if limits.is_far(position.restart_bytes) else ""


def range_options(server_version_num: int, publications: Sequence[str], origin: str) -> tuple[tuple[str, str], ...]:
    """Return pgoutput's options for a range.

    Transactions in progress are asked for, whatever the stream is asked: their first message says that the stream is
    the better reader of what comes, and without it they would be written to the publisher's disk in every range.
    """
    return start_options(server_version_num, publications, origin, streaming="on")


def range_sql(copy: str, end_lsn: int, options: Sequence[tuple[str, str]]) -> str:
    """Return the query for the changes up to an LSN: bounded by WAL, because a bound of changes bounds no work.

    Where the publication is a small part of the WAL, a call for a few changes could read hundreds of gigabytes.
    """
    words = ", ".join(literal(word) for pair in options for word in pair)
    changes = f"{literal(copy)}, '{format_lsn(end_lsn)}', NULL, VARIADIC ARRAY[{words}]"
    function = "pg_catalog.pg_logical_slot_get_binary_changes"
    return f"COPY (SELECT lsn, data FROM {function}({changes})) TO STDOUT (FORMAT binary)"  # noqa: S608  literals


def advance_sql(slot: str, lsn: int) -> str:
    """Return the query that moves a slot, or a copy of one, forward without output."""
    return f"SELECT pg_catalog.pg_replication_slot_advance({literal(slot)}, '{format_lsn(lsn)}')"


def position_sql(copy: str, slot: str) -> str:
    """Return the query for a `RangePosition`, in numbers: texts come as bytes here (`slot.take_bytes`)."""
    slots = "pg_catalog.pg_replication_slots"
    lsns = "c.confirmed_flush_lsn", "c.restart_lsn", "s.confirmed_flush_lsn", "pg_catalog.pg_current_wal_flush_lsn()"
    numbers = ", ".join([f"({lsn} - '0/0')::bigint" for lsn in lsns])
    return (
        f"SELECT {numbers},"  # noqa: S608
        f" (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint FROM {slots} AS c"
        f" LEFT JOIN {slots} AS s ON s.slot_name = {literal(slot)} WHERE c.slot_name = {literal(copy)}"
    )


def end_lsn_of(frame: bytes) -> int:
    """Return the end LSN of the transaction whose Commit a frame holds.

    Raises:
        ProtocolError: it holds another message.
    """
    message = decode(frame[FRAME_HEADER_BYTES:])
    if not isinstance(message, Commit):
        raise ProtocolError(chr(frame[FRAME_HEADER_BYTES]), 0, "a transaction in progress begins inside another")
    return message.end_lsn
