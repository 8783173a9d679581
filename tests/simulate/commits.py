"""The target of the core: what its WAL says was committed, prepared, decided and recorded; its tail may be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.simulate.draws import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.simulate.tables import Locks, Written


class Entry(NamedTuple):
    """One record of the WAL."""

    kind: str  # commit, prepare, decide (the outcome of a prepared transaction), record (of a PREPARE or an outcome)
    lsn: int  # end of the source transaction, the last one of a batch
    ends: tuple[int, ...] = ()  # commit: of all its source transactions
    low_lsn: int = 0  # commit, record: the record says that everything up to there is committed
    xid: int = 0  # prepare, decide
    is_commit: bool = True  # decide
    written: Written | None = None  # commit, prepare: rows, where there are any
    locks: Locks | None = None  # prepare


class Commits:
    """Written by the model's sessions."""

    def __init__(self, *, is_relaxed: bool) -> None:
        """Start empty; with relaxed order no order is checked here."""
        self._is_relaxed = is_relaxed
        self.wal: list[Entry] = []
        self.n_flushed = 0
        #: Watermark of the slot's row, which is written durably.
        self.written_lsn = 0
        #: As the WAL says: ends of committed transactions, ends of those recorded, xids that are prepared.
        self.done: set[int] = set()
        self.prepared: set[int] = set()
        self.committed_xids: set[int] = set()
        self._last_lsn = 0

    def write(self, entry: Entry) -> None:
        """Take one record.

        Raises:
            Violation: it is out of order, or a second time.
        """
        if entry.kind == "decide" and not entry.is_commit and entry.xid not in self.prepared:
            return  # rolled back early in the meantime: the server knows no such name, and the daemon takes it as done
        self._take(entry)
        self.wal.append(entry)
        if entry.kind in ("prepare", "decide"):
            self.n_flushed = len(self.wal)  # PostgreSQL flushes both, whatever synchronous_commit is

    def _take(self, entry: Entry) -> None:
        kind, lsn = entry.kind, entry.lsn
        if kind == "commit":
            if not self.done.isdisjoint(entry.ends):
                raise Violation("a transaction commits twice")
            self.done.update(entry.ends)
        elif kind == "prepare":
            if entry.xid in self.prepared or lsn in self.done:
                raise Violation("a transaction is prepared twice")
            self.prepared.add(entry.xid)
        elif kind == "decide":
            if entry.xid not in self.prepared:
                raise Violation("a transaction is decided that is not prepared")
            self.prepared.discard(entry.xid)
            if entry.is_commit:
                self.committed_xids.add(entry.xid)
        else:
            self.done.add(lsn)
        # A rollback makes nothing visible, so it may come early.
        if not self._is_relaxed and (kind in ("commit", "prepare") or (kind == "decide" and entry.is_commit)):
            if (entry.ends[0] if entry.ends else lsn) <= self._last_lsn:
                raise Violation("commits are out of order")
            self._last_lsn = lsn

    def flush(self) -> None:
        """Have all records on disk."""
        self.n_flushed = len(self.wal)

    def is_flushed(self, ends: Iterable[int], lsn: int) -> bool:
        """Return whether all of these transactions that end up to a position survive every crash."""
        flushed = {end for entry in self.wal[: self.n_flushed] for end in (*entry.ends, entry.lsn)}
        return all(end in flushed for end in ends if end <= lsn)

    def crash(self, n_kept: int) -> None:
        """Lose all records but the first so many."""
        kept, self.wal = self.wal[:n_kept], []
        self.done, self.prepared, self.committed_xids, self._last_lsn = set(), set(), set(), 0
        for entry in kept:
            self._take(entry)
            self.wal.append(entry)
        self.n_flushed = len(self.wal)

    @property
    def low_lsn(self) -> int:
        """Return the watermark that the state proves, as `target/state/slots.py` reads it."""
        return max([self.written_lsn, *[entry.low_lsn for entry in self.wal]])
