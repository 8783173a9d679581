"""Commits finishing in any order, turned into the LSN below which all is done. Pure.

The rule is the seed's (pgsql-hackers, "Parallel Apply", 2025-08-11): lowest_remote_lsn moves only when the first
transaction in progress commits. Everything counts commit **end** LSNs (trap T-3).
"""

from __future__ import annotations

from collections import deque

#: Bytes before which nothing that commits can end, counted from the end of a record. A page's header takes that much, a
#: record's own header no less, and a commit has more than its header; at the start of a segment the page's takes more.
#: Source: PostgreSQL's `xlog_internal.h` (SizeOfXLogShortPHD, SizeOfXLogLongPHD), `xlogrecord.h` (SizeOfXLogRecord).
_SHORT_HEADER_BYTES = 24
_LONG_HEADER_BYTES = 40
#: A multiple of every size of a segment is one of this.
_SEGMENT_BYTES = 1024 * 1024


def covers(low_lsn: int, lsn: int) -> bool:
    """Return whether a watermark says that everything is committed that ends at an LSN or before.

    Where the last record ended with its page, `pg_current_wal_insert_lsn()` lies after the header of the next, which is
    not written yet: an idle publisher never gets there, and nothing ends in between.

    Args:
        low_lsn: the watermark; it is the end of a record.
        lsn: any position of the publisher.
    """
    header_bytes = _SHORT_HEADER_BYTES if low_lsn % _SEGMENT_BYTES else _LONG_HEADER_BYTES
    return lsn <= low_lsn + header_bytes


class Watermark:
    """Tracks which batches are open in source order. Written and read by the leader only."""

    def __init__(self, low_lsn: int) -> None:
        """Start where the target's state ends: everything up to `low_lsn` is committed there."""
        #: Everything with an end LSN up to here is committed on the target (not yet durable). Never goes back.
        self.low_lsn = low_lsn
        #: Highest committed end LSN.
        self.high_lsn = low_lsn
        self._open: deque[int] = deque()
        self._done: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Return whether everything opened is committed."""
        return not self._open

    def open(self, end_lsn: int) -> None:
        """Register a batch by its last end LSN; calls come in source order."""
        assert end_lsn > (self._open[-1] if self._open else self.low_lsn), "batches are opened in source order"
        self._open.append(end_lsn)

    def close(self, end_lsn: int) -> bool:
        """Register the commit of a batch that was opened; True if the low LSN moved."""
        assert end_lsn in self._open, "a batch is closed once, after it was opened"
        assert end_lsn not in self._done, "a batch is closed once, after it was opened"
        self.high_lsn = max(self.high_lsn, end_lsn)
        self._done.add(end_lsn)
        low_lsn = self.low_lsn
        while self._open and self._open[0] in self._done:
            done = self._open.popleft()
            self._done.discard(done)
            self.low_lsn = max(self.low_lsn, done)
        return self.low_lsn > low_lsn

    def reached(self, lsn: int) -> bool:
        """Move up to an LSN the publisher says holds nothing more for us; only while nothing is open (trap T-8)."""
        if self._open or lsn <= self.low_lsn:
            return False
        self.low_lsn = lsn
        self.high_lsn = max(self.high_lsn, lsn)
        return True
