"""The publisher's WAL and slots, as readers see them: positions of commit records, copies of the slot, restart points.

The engine has the stream's LSNs. The WAL's are `SCALE` times as high, so that ranges end among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.source.catch_up import RangePosition
from tests.simulate.draws import Violation

if TYPE_CHECKING:
    from tests.simulate.commits import Commits
    from tests.simulate.draws import Draws
    from tests.simulate.source import Batches, Event

#: Bytes of WAL for each of the stream's positions.
SCALE: Final = 64
#: Positions that a commit record takes, so that ranges end before, in and after some.
_RECORD: Final = 0x18
#: Bytes of WAL between two restart points.
_APART: Final = 3 * 8192
#: Positions after the last commit that hold nothing for the slot.
REST: Final = 0x200


class Slot:
    """A slot, or a copy of it."""

    def __init__(self, confirmed_lsn: int = 0, restart_lsn: int = 0) -> None:
        """Start where another one is."""
        self.confirmed_lsn = confirmed_lsn
        self.restart_lsn = restart_lsn


class Record(NamedTuple):
    """An event in the WAL."""

    event: Event
    lsn: int
    #: Where its transaction's commit record begins, or its rollback.
    commit_lsn: int
    end_lsn: int


class Decoded(NamedTuple):
    """Contents of a range."""

    events: list[Event]
    has_stream: bool


class Wal:
    """One publisher's; it outlives the daemon's epochs."""

    def __init__(self, source: Batches, draws: Draws, commits: Commits) -> None:
        """Start with some of it written.

        Args:
            source: the stream.
            draws: choices of the schedule.
            commits: of the target.
        """
        self._draws = draws
        self._ends = source.ends
        self._commits = commits
        self.records = _records(source.events)
        self.last_lsn = (source.end_lsn + REST) * SCALE
        self.flush_lsn = 0
        self.slot = Slot()
        #: The slot as it is on disk: a publisher that crashes goes back to it.
        self._saved_lsn = 0
        #: By name, as long as their sessions live.
        self.copies: dict[str, Slot] = {}
        self.write(self.last_lsn if draws.chance(0.5) else self.last_lsn // (1 + draws.below(8)))

    def write(self, n_bytes: int) -> None:
        """Write on, never a part of a commit record."""
        self.flush_lsn = self._after(min(self.flush_lsn + n_bytes, self.last_lsn))

    def _after(self, lsn: int) -> int:
        """Return where a reader stops that goes up to a position: after the record that lies across it."""
        return next((one.end_lsn for one in self.records if one.event.end_lsn and one.lsn < lsn < one.end_lsn), lsn)

    def restart(self) -> None:
        """Have the daemon's sessions end, and perhaps the publisher crash."""
        self.copies.clear()
        if self._draws.chance(0.2):
            self.slot.confirmed_lsn = self._saved_lsn
        self._saved_lsn = self.slot.confirmed_lsn

    def move(self, lsn: int) -> None:
        """Move the slot: what is before it never comes again.

        Raises:
            Violation: something of it is not durable on the target.
        """
        if not self._commits.is_flushed(self._ends, lsn // SCALE):
            raise Violation("the slot passes what is not durable")
        if lsn > self.slot.confirmed_lsn:
            self._reach(self.slot, lsn)

    def copy(self, of: str, name: str) -> bool:
        """Make a copy of the slot, or of a copy; return whether that one exists."""
        found = self.slot if of == "slot" else self.copies.get(of)
        if found is not None:
            self.copies[name] = Slot(found.confirmed_lsn, found.restart_lsn)
        return found is not None

    def advance(self, name: str, lsn: int) -> None:
        """Move a copy without output."""
        self._reach(self.copies[name], self._after(lsn))

    def _reach(self, slot: Slot, lsn: int) -> None:
        slot.confirmed_lsn = lsn
        is_open = [one.lsn for one in self.records if one.event.kind == "chunk" and one.lsn < lsn <= one.commit_lsn]
        slot.restart_lsn = max(slot.restart_lsn, min([lsn // _APART * _APART, *is_open]))

    def position(self, name: str) -> RangePosition:
        """Return where a copy is, and the slot."""
        copy = self.copies[name]
        return RangePosition(
            copy_lsn=copy.confirmed_lsn,
            restart_lsn=copy.restart_lsn,
            slot_lsn=self.slot.confirmed_lsn,
            flush_lsn=self.flush_lsn,
            clock_us=0,
        )

    def decode(self, name: str, end_lsn: int) -> Decoded:
        """Return what a range holds up to the first message of a transaction in progress; the copy then is behind it.

        Raises:
            Violation: the range is not written yet.
        """
        if end_lsn > self.flush_lsn:
            raise Violation("a range ends after the WAL")
        begin_lsn = self.copies[name].confirmed_lsn
        streams = [
            max(one.lsn, begin_lsn)
            for one in self.records
            if one.event.kind == "chunk" and one.lsn < end_lsn and one.commit_lsn >= begin_lsn
        ]
        until_lsn = min([end_lsn, *streams])
        wholes = ("whole", "piece", "last")
        events = [
            one.event
            for one in self.records
            if one.event.kind in wholes and begin_lsn <= one.commit_lsn < until_lsn
        ]  # fmt: skip
        self.advance(name, end_lsn)
        return Decoded(events, until_lsn < end_lsn)

    def after(self, start_lsn: int) -> list[Record]:
        """Return what a stream sends from a position on."""
        return [one for one in self.records if one.commit_lsn >= start_lsn]


def _records(events: list[Event]) -> list[Record]:
    places = []
    last_end = 0
    for event in events:
        if event.end_lsn:
            places.append((event.end_lsn - _RECORD, event.end_lsn))
            last_end = event.end_lsn
        else:
            places.append((last_end + 1, last_end + 1))
    ends = {
        event.xid: lsn for event, (lsn, _) in zip(events, places, strict=True) if event.kind not in ("piece", "chunk")
    }
    return [
        Record(event, lsn * SCALE, ends[event.xid] * SCALE, end_lsn * SCALE)
        for event, (lsn, end_lsn) in zip(events, places, strict=True)
    ]
