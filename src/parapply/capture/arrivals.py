"""Changes of a capture by their arrival, and how late they would be with another time for each change."""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.capture import folder as folders
from parapply.capture.blocks import CHANGES, KIND, XID
from parapply.capture.lateness import Late, Queue
from parapply.capture.stream import WITH_FRAMES, After
from parapply.wire.decode import decode
from parapply.wire.messages import StreamCommit, StreamPrepare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.capture.stream import Read

#: Arrivals within this time are one, so that a day takes some megabytes. It divides a minute.
_TOGETHER_US: Final = 100_000
#: Changes at least between two ends that are kept.
_ENDS_APART: Final = 1000
_SUBXID: Final = slice(XID.stop, XID.stop + 4)


class Arrivals(NamedTuple):
    """Changes of transactions that ended, a TRUNCATE as one."""

    times_us: list[int]  # since 1970-01-01 UTC, ascending unless the clock was set
    counts: list[int]  # of changes, for each time
    n_changes: int  # all of them
    part_lsn: int  # end of the transaction with which as many had come as were asked for; else of the capture
    n_part: int = 0  # changes up to there
    ends: Sequence[tuple[int, int]] = ()  # changes up to ends of transactions and their LSNs, 1000 apart or more

    def lsn_of(self, n_changes: int) -> int:
        """Return the end of a transaction with which not quite a number of changes had come, the first one at least."""
        at = bisect_right(self.ends, (n_changes, sys.maxsize)) - 1
        return self.ends[max(at, 0)][1] if self.ends else self.part_lsn

    def late(self, seconds: float) -> Late:
        """Return how late they would be if all took these seconds together, with the same time for each change."""
        queue, change_us = Queue(), seconds * 1e6 / max(1, self.n_changes)
        for arrival_us, number in zip(self.times_us, self.counts, strict=True):
            queue.take(arrival_us, number * change_us)
        return queue.result


def arrivals(read: Read, part: int) -> Arrivals:
    """Count the changes of a capture; of `part` changes the end of the last one's transaction is wanted.

    Raise CaptureRefused if a block is not what was written, ProtocolError if a frame cannot be read.
    """
    times_us: list[int] = []
    counts: list[int] = []
    ends: list[tuple[int, int]] = []
    n_changes = n_part = part_lsn = 0
    for arrival_us, end_lsn, number in _ends(read):
        n_changes += number
        if n_changes >= part and not part_lsn:
            n_part, part_lsn = n_changes, end_lsn
        if not ends or n_changes >= ends[-1][0] + _ENDS_APART:
            ends.append((n_changes, end_lsn))
        if times_us and arrival_us // _TOGETHER_US == times_us[-1] // _TOGETHER_US:
            counts[-1] += number
        else:
            times_us.append(arrival_us)
            counts.append(number)
    is_part = 0 < n_part < n_changes
    part_lsn, n_part = (part_lsn, n_part) if is_part else (read.until_lsn, n_changes)
    return Arrivals(times_us, counts, n_changes, part_lsn, n_part, ends)


def _ends(read: Read) -> Iterator[tuple[int, int, int]]:
    """Yield arrival, end and changes of transactions that ended together."""
    after, counting = After(0, begin_lsn=read.begin_lsn, is_parallel=read.is_parallel), _Counting()
    for place in read.places:
        if place.header.kind in WITH_FRAMES:
            for group in folders.groups(read.folder, place)[1]:
                before_lsn = after.end_lsn
                number = counting.take(after.take(group.frames))
                if after.end_lsn > before_lsn:
                    yield group.arrival_us, after.end_lsn, number


class _Counting:
    def __init__(self) -> None:
        self._number = 0  # of the open transaction
        self._xid = b""  # of the stream that is being sent; empty: none
        #: Of streamed transactions that are open: changes by subtransaction, by transaction.
        self._streamed: dict[bytes, dict[bytes, int]] = {}

    def take(self, frames: Sequence[bytes]) -> int:
        ended = 0
        for frame in frames:
            kind = frame[KIND]
            if kind in CHANGES:
                if self._xid:
                    counts, xid = self._streamed.setdefault(self._xid, {}), frame[XID]
                    counts[xid] = counts.get(xid, 0) + 1
                else:
                    self._number += 1
            elif kind == b"S":
                self._xid = frame[XID]
            elif kind == b"E":
                self._xid = b""
            elif kind == b"A":
                self._abort(frame[XID], frame[_SUBXID])
            elif kind in {b"C", b"P"}:
                ended += self._number
                self._number = 0
            elif kind in {b"c", b"p"}:
                message = decode(frame[KIND.start :])
                assert isinstance(message, StreamCommit | StreamPrepare), "by its kind"
                ended += sum(self._streamed.pop(message.xid.to_bytes(4), {}).values())
        return ended

    def _abort(self, xid: bytes, subxid: bytes) -> None:
        if xid == subxid:
            self._streamed.pop(xid, None)
        else:
            self._streamed.get(xid, {}).pop(subxid, None)
