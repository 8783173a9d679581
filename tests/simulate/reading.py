"""The readers of one epoch, as `source/ranges.py` and `source/catch_up_stream.py` run them, and then the stream.

A reader is a generator that gives the condition for which it waits, or None for an answer of the publisher.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from parapply.errors import SourceLost
from parapply.source import catch_up
from parapply.source.catch_up import CatchUp, RangeLimits
from parapply.source.range_front import Asked, RangeFront
from parapply.source.range_order import RangeOrder
from parapply.vocabulary import Reading
from tests.simulate.draws import Violation
from tests.simulate.sessions import PIECE_BYTES
from tests.simulate.source import Event
from tests.simulate.wal import SCALE

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Generator
    from typing import TypeAlias

    from parapply.source.catch_up import RangePosition
    from parapply.source.range_order import RangesEnd
    from tests.simulate.draws import Draws
    from tests.simulate.wal import Record, Wal

    Waits: TypeAlias = Generator[Callable[[], bool] | None]
    EndWaits: TypeAlias = Generator[Callable[[], bool] | None, None, RangesEnd]

_CUT: Final = 8192
#: Events of one read at most.
_PART: Final = 2
_MESSAGE_BYTES: Final = 100


class _Refused(Exception):
    """The publisher makes no copy, or gives no session."""


class Reader:
    """One session."""

    def __init__(self, number: int, *, is_slow: bool) -> None:
        """Start without a copy; number 1 is of the connection that streams afterwards."""
        self.number = number
        self.is_slow = is_slow
        self.copy = f"copy {number}"
        self.position: RangePosition | None = None
        self.asked = Asked(0, 0)
        self.n_read = 0
        self.steps: Waits
        self.until: Callable[[], bool] | None = None

    def may_go_on(self) -> bool:
        """Return whether its wait is over."""
        return self.until is None or self.until()

    def end(self) -> None:
        """Let go what refers to itself, as `Schedule._end`."""
        del self.steps
        self.until = None


class Readers:
    """Written by its readers, and by the schedule, which drains it."""

    def __init__(self, wal: Wal, draws: Draws, seen: Counter[str], low_lsn: int) -> None:
        """Read what is not on the target, in ranges if there is much of it."""
        self._wal = wal
        self._draws = draws
        self._seen = seen
        range_bytes = _CUT * (1 + draws.below(8))
        self.limits = limits = RangeLimits(
            range_bytes=range_bytes,
            enter_bytes=_CUT * (1 + draws.below(4)),
            leave_bytes=_CUT * draws.below(2),
            buffer_bytes=PIECE_BYTES * (1 + draws.below(8)),
            readers=1 + draws.below(4),
        )
        self.start_lsn = low_lsn * SCALE
        self._p_dies = (0.0, 0.0, 0.02)[draws.below(3)]
        self._p_refused = (0.0, 0.2)[draws.below(2)]
        self.front = RangeFront(CatchUp(slot="slot", start_lsn=self.start_lsn, options=(), limits=limits))
        self.order = RangeOrder(limits.buffer_bytes)
        self.readers: list[Reader] = []
        self._asking: Reader | None = None
        self.durable_lsn = 0
        self.reading, self.reason = Reading.STREAM, catch_up.LITTLE
        self.is_streaming = False
        #: True if a session is lost, so that the epoch ends.
        self.is_lost = False
        self._stream: deque[Record] = deque()
        lag_bytes = wal.flush_lsn - self.start_lsn
        # After a range that came to no end the next connection streams.
        if lag_bytes < limits.enter_bytes or draws.chance(0.1):
            self._start(self.start_lsn)
            return
        self.reading = Reading.RANGES
        self._n_readers = limits.readers_of(lag_bytes)
        self._come(self._first)

    @property
    def has_more(self) -> bool:
        """Return whether more of the publisher's transactions come."""
        return not self.is_streaming or self.order.holds or bool(self._stream)

    @property
    def may_drain(self) -> bool:
        """Return whether something can be drained."""
        return self.order.holds or (bool(self._stream) and self._stream[0].end_lsn <= self._wal.flush_lsn)

    def able(self) -> list[Reader]:
        """Return the readers that can go on; slow ones seldom, if others can."""
        able = [one for one in self.readers if one.may_go_on()]
        quick = [one for one in able if not one.is_slow]
        return quick if quick and not self._draws.chance(0.05) else able

    def go_on(self, reader: Reader) -> None:
        """Let a reader go on to its next wait."""
        try:
            reader.until = next(reader.steps)
        except StopIteration:
            self.readers.remove(reader)
            reader.end()
        except SourceLost:
            self._seen["a reader is lost"] += 1
            self.is_lost = True
            self.end()
        else:
            held_bytes = self.order._held_bytes
            if held_bytes > self.limits.buffer_bytes + len(self.readers) * _PART * PIECE_BYTES:
                raise Violation("readers hold more than the limit and a read of each")

    def end(self) -> None:
        """Have all sessions end."""
        for reader in self.readers:
            reader.end()
        self.readers.clear()

    def drain(self, n_events: int) -> list[Event]:
        """Return some events, and the end of a range as a keep-alive."""
        if self.order.holds:
            found, end = self.order.take(n_events * PIECE_BYTES)
            events: list[Event] = [*found]  # type: ignore[list-item]
            return events if end is None else [*events, Event("keepalive", 0, end.end_lsn // SCALE)]
        events = []
        while self.may_drain and len(events) < n_events:
            events.append(self._stream.popleft().event)
        return events

    def report(self, durable_lsn: int) -> None:
        """Report what is durable: to the slot, or for its next move."""
        self.durable_lsn = max(self.durable_lsn, durable_lsn * SCALE)
        if self.is_streaming:
            self._wal.move(self.durable_lsn)

    def _come(self, life: Callable[[Reader], Waits]) -> None:
        reader = Reader(len(self.readers) + 1, is_slow=self._draws.chance(0.2))
        reader.steps = life(reader)
        self.readers.append(reader)

    def _start(self, lsn: int) -> None:
        if self._wal.slot.confirmed_lsn > lsn:
            raise Violation("the slot is ahead of the stream that begins")
        self._seen["a stream begins"] += 1
        self.is_streaming, self.reading = True, Reading.STREAM
        self._stream.extend(self._wal.after(lsn))

    def _answered(self) -> Waits:
        yield None
        if self._p_dies and self._draws.chance(self._p_dies):
            raise SourceLost("the connection ended.")

    # As `CatchUpStream`.

    def _first(self, reader: Reader) -> Waits:
        try:
            end = yield from self._ask_for(reader)
        except _Refused:
            self._start(self.start_lsn)
            return
        if end is not None:
            self._start(self.start_lsn)
            return
        self._seen["ranges are read"] += 1
        number = self.order.begin()
        for _ in range(1, self._n_readers):
            self._come(self._beside)
        try:
            yield from self._ranges(reader, number)
        except _Refused:
            raise SourceLost("a range was refused.") from None
        if self.order.outcome is None:
            yield lambda: self.order.outcome is not None
        yield from self._answered()
        assert self.order.outcome is not None
        self.reason = self.order.outcome.reason
        self._seen[f"the stream takes over: {self.reason.partition(' ')[0]}"] += 1
        self._start(self.front.stream_lsn(self.order.outcome))

    def _beside(self, reader: Reader) -> Waits:
        yield from self._answered()
        try:
            yield from self._ranges(reader, None)
        except _Refused:
            self._seen["a reader is refused"] += 1

    def _ranges(self, reader: Reader, number: int | None) -> Waits:
        while True:
            if number is None:
                yield lambda: self.front.may_ask(self.order, is_first=reader.number == 1)
                while self._asking is not None:
                    yield lambda: self._asking is None
                if self.order.is_ending:
                    return
                self._asking = reader
                try:
                    end = yield from self._ask_for(reader)
                finally:
                    self._asking = None
                number = self.order.begin()
                if end is not None:
                    self._end(number, end)
                    return
            try:
                end = yield from self._read(reader, number)
            except SourceLost:
                if self.order.wants(number):
                    raise
                self._seen["a reader of a void range is lost"] += 1
                return
            self._end(number, end)
            number = None

    def _end(self, number: int, end: RangesEnd) -> None:
        self._seen["a range ends before its turn"] += number > self.order._turn
        self._seen["a range is void"] += not self.order.wants(number)
        self.order.end(number, *end)

    # As `RangeReader`.

    def _ask_for(self, reader: Reader) -> Generator[Callable[[], bool] | None, None, RangesEnd | None]:
        front, wal = self.front, self._wal
        position = yield from self._come_up(reader)
        if (end := front.end_before(position)) is not None:
            return end
        if (lsn := front.move_lsn(self.durable_lsn)) is not None:
            yield from self._answered()
            self._seen["the slot is moved"] += 1
            wal.move(lsn)
            front.slot_lsn = lsn
        reader.asked = front.begin(position, reader.copy)
        return None

    def _come_up(self, reader: Reader) -> Generator[Callable[[], bool] | None, None, RangePosition]:
        front, wal = self.front, self._wal
        if front.copy == reader.copy and reader.position is not None:
            return reader.position
        yield from self._answered()
        is_refused = bool(self._p_refused) and self._draws.chance(self._p_refused)
        if is_refused or not wal.copy(front.copy, reader.copy):
            raise _Refused
        yield from self._answered()
        if front.is_ahead_of(wal.position(reader.copy)):
            yield from self._answered()
            wal.advance(reader.copy, front.lsn)
        return wal.position(reader.copy)

    def _read(self, reader: Reader, number: int) -> EndWaits:
        front, order, draws = self.front, self.order, self._draws
        yield from self._answered()
        decoded = self._wal.decode(reader.copy, reader.asked.end_lsn)
        left, last_lsn = decoded.events, None
        while left:
            yield from self._answered()
            n_events = 1 + draws.below(_PART)
            part, left = left[:n_events], left[n_events:]
            last_lsn = part[-1].end_lsn * SCALE
            order.add(number, part, len(part) * PIECE_BYTES)  # type: ignore[arg-type]
            if not order.may_read(number):
                self._seen["a reader waits for room"] += 1
                yield lambda: order.may_read(number)
        yield from self._answered()
        position = reader.position = self._wal.position(reader.copy)
        front.look(position)
        if decoded.has_stream:
            return front.end_inside(reader.asked, last_lsn)
        reader.n_read += 1
        return front.end_of(reader.asked, position, _MESSAGE_BYTES)
