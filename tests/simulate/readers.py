"""The core behind readers of ranges: what comes to intake is read by several sessions, then as a stream, and back.

Checked besides what `core.py` checks: what is read comes once, in the publisher's order, and nothing is left out; a
position that a range brings covers nothing that has not come; and the slot never passes what is durable.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self

from parapply.engine.stalls import FallingBehind, StreamSeen
from parapply.source.catch_up import PASSING
from parapply.wire.copy import Keepalive
from tests.simulate import core
from tests.simulate.draws import Draws, Violation
from tests.simulate.reading import Readers
from tests.simulate.source import Source
from tests.simulate.wal import REST, SCALE, Wal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulate.source import Batches, Event

_SOURCES: Final = 128
_SCHEDULES: Final = 10_000
#: Events before intake at which nothing is drained.
_PAUSED: Final = 4


class _Whole(Source):
    """A stream without prepared transactions: their slots are not read in ranges."""

    has_two_phase = False


class RangesSchedule(core.Schedule):
    """One seed's."""

    # The end of the last range is a position.
    _rest = 2 * REST

    def __init__(self, seed: int, source: Batches | None = None, choices: Sequence[int] | None = None) -> None:
        """Draw how the engine is set, and how much WAL there is."""
        super().__init__(seed, source, choices)
        self._wal = Wal(self.source, self.draws, self.commits)
        #: Behind the ends that came to intake.
        self._next = 0

    @classmethod
    def again(cls, parts: Sequence[Sequence[int]]) -> Self:
        """Return the schedule of other choices: of the stream, and of the schedule."""
        return cls(0, _Whole(Draws(0, parts[0])), parts[1])

    @staticmethod
    def _source_of(seed: int) -> Batches:
        return _source(seed // _SCHEDULES * _SOURCES + seed % _SOURCES)

    def _begin(self) -> None:
        super()._begin()
        self._events.clear()
        self._wal.restart()
        low_lsn = self.commits.low_lsn
        self._next = sum([end <= low_lsn for end in self._ends])
        self._readers = Readers(self._wal, self.draws, self.seen, low_lsn)
        self._behind = FallingBehind(behind_bytes=2 * self._readers.limits.enter_bytes, pause_s=0.0, now_s=0.0)

    def _end(self) -> None:
        super()._end()
        self._readers.end()

    def _has_more(self) -> bool:
        return self._readers.has_more

    def _last_of(self, event: Event) -> Event:
        return next(one for one in self.source.events if one.xid == event.xid and one.end_lsn)

    def _step(self) -> None:
        if not (self.draws.chance(0.5) and self._read_on()):
            super()._step()

    def _unblock(self) -> bool:
        return self._read_on() or super()._unblock()

    def _read_on(self) -> bool:
        """Let a reader, the publisher or the drain go on; return whether one can."""
        readers, wal = self._readers, self._wal
        found: list[object] = [*readers.able()]
        if readers.may_drain and len(self._events) < _PAUSED:
            found.append(readers)
        if wal.flush_lsn < wal.last_lsn:
            found.append(wal)
        if not found:
            return False
        what = found[self.draws.below(len(found))]
        if what is readers:
            self._events.extend(readers.drain(1 + self.draws.below(_PAUSED)))
        elif what is wal:
            wal.write(SCALE * 0x20 * (1 + self.draws.below(16)))
        else:
            readers.go_on(what)  # type: ignore[arg-type]
            self.applying.is_lost = self.applying.is_lost or readers.is_lost
        return True

    def _disturb(self) -> None:
        if self._readers.is_streaming and self.draws.chance(0.3):
            self._look()
        else:
            super()._disturb()

    def _look(self) -> None:
        """As `runtime/control/catch_up_watch.py`."""
        readers = self._readers
        seen = StreamSeen(
            readers.reading,
            self._received_lsn * SCALE,
            may_be_left=readers.reason in PASSING,
            is_paused=len(self._events) >= _PAUSED,
            begun=(bool(self._streams), self._large is not None),
        )
        if self._behind.look(seen, self._wal.flush_lsn, 0.0) is not None:
            self._kill("the stream is left for ranges")

    def _report(self) -> None:
        super()._report()
        self._readers.report(self.state.durable_lsn)

    def _take(self, event: Event) -> None:
        if event.kind == "keepalive":
            if self._next < len(self._ends) and self._ends[self._next] <= event.end_lsn:
                raise Violation("a position covers what has not come")
            self._received_lsn = max(self._received_lsn, event.end_lsn)
            keepalive = Keepalive(end_lsn=event.end_lsn, send_time_us=0, reply_requested=False)
            self._durability.keepalive(keepalive, 0.0)
            if not self._events:
                self._read_ends()
            return
        if event.end_lsn:
            if self._next == len(self._ends) or self._ends[self._next] != event.end_lsn:
                raise Violation("what is read has a gap, or comes again")
            self._next += 1
        super()._take(event)


@lru_cache(maxsize=_SOURCES)
def _source(seed: int) -> Source:
    return _Whole(Draws(seed))
