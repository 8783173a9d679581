"""Size of batches and length of reading pauses, each adapted to the outcome of the last.

A batch may get twice as large while full ones are applied quickly, and half as large while they take long.

Larger sets are cheaper for each row, as long as rows of neighbouring keys share pages. But a batch also holds locks
until it commits, is repeated whole if it fails, and is left for the target to do when the backlog ends.

A batch over many tables has few rows for each of its statements, and the statements take most of its time: half as
large it would have nearly as many. So it may grow beyond others at once, and says nothing about their size.

A pause lets messages gather in the kernel, so that one wake-up serves many. It costs time where the kernel's buffer is
full before the pause ends, because the publisher then also waits, and each of its waits is several system calls. A Unix
socket holds about 270 small messages and is full in a few tenths of a millisecond. A TCP socket within one machine is
full in a millisecond or two where rows are large or processors fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.plan.batch import Limits, has_few_changes
from parapply.vocabulary import Mode

if TYPE_CHECKING:
    from parapply.engine.job import Job

#: Where a stream begins: the cost paid once for each batch matters up to here.
_FIRST_TRANSACTIONS: Final = 2_500
_FIRST_CHANGES: Final = 5_000
_FIRST_BYTES: Final = 4 * 1024 * 1024
#: Times as many changes and bytes as configured that a batch of few changes for each of many tables may have.
THIN_SIZE: Final = 4
#: Not below this part of the first size.
_SMALLEST_PART: Final = 8
#: Seconds of execution below which a full batch may be twice as large, and above which it is halved.
_QUICK_S: Final = 0.08
_SLOW_S: Final = 0.5

#: Reads without a pause before one is tried again: a try may cost two milliseconds, and 256 reads take far longer.
_TRY_AGAIN: Final = 256
#: Seconds of the shortest pause that shows whether its second half gathers anything: the event loop's timers count
#: milliseconds.
SHORTEST_JUDGED_S: Final = 0.002


class BatchSizing:
    """Written by the epoch at each commit; intake reads `limits`, which is always the same object."""

    def __init__(self, most: Limits, scale: float = 1.0, *, memory_bytes: int) -> None:
        """Begin with the first size, or with the configured one where that is smaller.

        Args:
            most: as configured; `places` as the target can lock.
            memory_bytes: for all batches in hand.
            scale: factor of the first size, for a run that is not begun.
        """
        #: As configured.
        self.most = most
        self.limits = Limits(
            min(_FIRST_TRANSACTIONS, most.transactions),
            min(_FIRST_CHANGES, most.changes),
            min(_FIRST_BYTES, most.size_bytes),
            most.places,
        )
        limits = self.limits
        limits.most_transactions, limits.most_changes = most.transactions, THIN_SIZE * most.changes
        limits.most_bytes = max(most.size_bytes, min(THIN_SIZE * most.size_bytes, memory_bytes // 8))
        self._least = Limits(
            max(1, limits.transactions // _SMALLEST_PART),
            max(1, limits.changes // _SMALLEST_PART),
            max(1, limits.size_bytes // _SMALLEST_PART),
        )
        if scale != 1.0:
            self._scale(scale)

    def committed(self, job: Job) -> None:
        """Learn from a batch that was applied as sets at its first attempt and was as large as it might be."""
        batch = job.batch
        if job.mode is not Mode.SET or job.attempts > 1 or batch.is_serial or not batch.is_full(self.limits):
            return
        self.learn(batch.n_changes, len(batch.table_changes), job.times.execute_s)

    def learn(self, n_changes: int, n_tables: int, took_s: float) -> None:
        """Learn from such a batch.

        Args:
            n_changes: in it.
            n_tables: that they are of.
            took_s: from its start until its statements had succeeded.
        """
        if has_few_changes(n_changes, n_tables):
            return
        if took_s < _QUICK_S:
            self._scale(2)
        elif took_s > _SLOW_S:
            self._scale(0.5)

    def _scale(self, by: float) -> None:
        for name in ("transactions", "changes", "size_bytes"):
            wanted = int(getattr(self.limits, name) * by)
            bounded = max(getattr(self._least, name), min(getattr(self.most, name), wanted))
            setattr(self.limits, name, bounded)


class Gathering:
    """Learns from each pause; used by the reader alone."""

    def __init__(self) -> None:
        """Start with pauses as long as they are wanted."""
        self._most_s = 1.0
        self._unpaused = 0

    def pause_s(self, wanted_s: float) -> float:
        """Return how long to pause, at most as long as wanted; 0: read on at once."""
        if wanted_s < SHORTEST_JUDGED_S or self._most_s:
            return min(wanted_s, self._most_s or wanted_s)
        self._unpaused += 1
        if self._unpaused < _TRY_AGAIN:
            return 0.0
        self._unpaused = 0
        return SHORTEST_JUDGED_S

    def paused(self, pause_s: float, *, has_grown: bool) -> None:
        """Take note of a whole pause.

        Args:
            pause_s: how long it was.
            has_grown: whether more came in its second half.
        """
        if pause_s < SHORTEST_JUDGED_S:
            return
        if has_grown:
            self._most_s = 2 * pause_s
        else:
            self._most_s = pause_s / 2 if pause_s / 2 >= SHORTEST_JUDGED_S else 0.0
