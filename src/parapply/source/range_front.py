"""Place where the next range of WAL begins, and what follows a range that was read. Pure.

The readers of a slot share it. The queries, and the lock of the reader that asks, are `ranges.py`'s and
`catch_up_stream.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parapply.errors import SourceLost
from parapply.source import catch_up
from parapply.source.range_order import RangesEnd

if TYPE_CHECKING:
    from parapply.source.catch_up import CatchUp, RangePosition
    from parapply.source.range_order import RangeOrder

#: Whole ranges between two moves of the slot: each move reads the WAL from the slot's restart point on.
_MOVE_RANGES = 4


class Asked(NamedTuple):
    """A range that was asked for."""

    begin_lsn: int
    end_lsn: int


class RangeFront:
    """Written by the reader that asks, one at a time, and by each that has read."""

    def __init__(self, plan: CatchUp) -> None:
        self._plan = plan
        self.lsn = plan.start_lsn
        #: The slot, or the copy that reads the range before: the next range is read from a copy of this one.
        self.copy = plan.slot
        #: Bytes of WAL that are decoded again before the last range that was asked for.
        self.restart_bytes = 0
        #: The slot's position: confirmed, and moved by us.
        self.slot_lsn = 0

    def may_ask(self, order: RangeOrder, *, is_first: bool) -> bool:
        """Return whether a reader need not wait: the last range is known, or it may ask for the next one."""
        is_near = is_first or self._plan.limits.is_near(self.restart_bytes)
        return order.is_ending or (order.may_read(order.n_begun) and is_near)

    def is_ahead_of(self, position: RangePosition) -> bool:
        """Return whether a copy that was just made is to be moved to the front, for which nothing is decoded.

        Raises:
            SourceLost: another reader has moved the slot: the first copy begins where the slot is.
        """
        if self.copy == self._plan.slot and position.copy_lsn > self.lsn:
            raise SourceLost(f"slot {self._plan.slot!r} was moved by another reader before it was copied.")
        return position.copy_lsn < self.lsn and not self._plan.limits.is_far(position.restart_bytes)

    def end_before(self, position: RangePosition) -> RangesEnd | None:
        """Return where the ranges end if no further one follows; the copy is at `position`."""
        self.restart_bytes = position.restart_bytes
        reason = catch_up.why_leave(position, self._plan.limits)
        # The first range is read in any case if ranges may be read.
        if not reason or (reason == catch_up.CAUGHT_UP and self.copy == self._plan.slot):
            return None
        # Before the front everything was asked for, wherever this copy is.
        return RangesEnd(max(self.lsn, position.copy_lsn), reason)

    def move_lsn(self, durable_lsn: int) -> int | None:
        """Return where to move the slot, if there is much to move: never past what is durable on the target."""
        is_due = durable_lsn - self.slot_lsn >= _MOVE_RANGES * self._plan.limits.range_bytes
        return durable_lsn if is_due else None

    def begin(self, position: RangePosition, copy: str) -> Asked:
        """Return the range that begins at a copy's position; the next one begins where it ends."""
        self.lsn, self.copy = self._plan.limits.next_end(position), copy
        return Asked(position.copy_lsn, self.lsn)

    def look(self, position: RangePosition) -> None:
        """Note the slot's position after a range.

        Raises:
            SourceLost: the slot is gone, or was moved past what was read here; the next epoch says what that means.
        """
        if position.slot_lsn is None:
            raise SourceLost(f"slot {self._plan.slot!r} was dropped while its WAL was read in ranges.")
        if position.slot_lsn > max(position.copy_lsn, self._plan.start_lsn):
            raise SourceLost(f"slot {self._plan.slot!r} was moved by another reader.")
        self.slot_lsn = max(self.slot_lsn, position.slot_lsn)

    def end_inside(self, asked: Asked, last_lsn: int | None) -> RangesEnd:
        """Return where the ranges end if a transaction in progress began in one.

        Nothing of it was handed over, nor anything after its beginning: what was, ends with a Commit, at `last_lsn`.
        """
        reason = catch_up.IN_PROGRESS if self._plan.is_streaming else catch_up.IN_PROGRESS_WHOLE
        return RangesEnd(asked.begin_lsn if last_lsn is None else last_lsn, reason)

    def end_of(self, asked: Asked, position: RangePosition, message_bytes: int) -> RangesEnd:
        """Return the end of a range that was read whole, and why the stream takes over there; empty: it does not."""
        limits = self._plan.limits
        reason = catch_up.why_leave(position, limits, end_lsn=asked.end_lsn, message_bytes=message_bytes)
        return RangesEnd(position.copy_lsn, reason)

    def stream_lsn(self, end: RangesEnd) -> int:
        """Return where the stream begins after the last range: never before what is on the target."""
        return max(end.lsn, self._plan.start_lsn)
