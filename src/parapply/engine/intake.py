"""Rules of entry, and of closing the open batch: by place and time, by the room that is left, by idle workers.

A batch closes when a worker is free to take it and the stream has nothing more at hand. With a backlog batches so grow
to what sets are good at. Without one a transaction leaves at once if nothing is under way. Else, with the order kept,
it joins what comes until the batch under way has committed, for at most a moment, because it could not commit before,
and the commits of many small batches, one after the other, cost more than a second worker gains.

A snapshot of the target equals the publisher at an LSN if all up to there is committed and nothing later is. So no
worker has to be stopped, in either commit order: intake takes nothing later, and all that it took before will commit.

Commit times are of the publisher's clock, and so is the time that they are compared with: the monitor reads that clock
each second, and the event loop's carries it on in between. Neither the daemon's nor the target's time of day matters.

Size of batches and length of reading pauses are adapted to the outcome of the last. A batch may get twice as large
while full ones are applied quickly, and half as large while they take long. Larger sets are cheaper for each row, as
long as rows of neighbouring keys share pages. But a batch also holds locks until it commits, is repeated whole if it
fails, and is left for the target to do when the backlog ends. A batch over many tables has few rows for each of its
statements, and the statements take most of its time: half as large it would have nearly as many. So it may grow beyond
others at once, and says nothing about their size.

A pause lets messages gather in the kernel, so that one wake-up serves many. It costs time where the kernel's buffer is
full before the pause ends, because the publisher then also waits, and each of its waits is several system calls. A Unix
socket holds about 270 small messages and is full in a few tenths of a millisecond. A TCP socket within one machine is
full in a millisecond or two where rows are large or processors fast.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from parapply.plan.batch import Limits, has_few_changes
from parapply.vocabulary import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.engine.flight import Flight
    from parapply.engine.job import Job
    from parapply.engine.shares import Share
    from parapply.model import Transaction
    from parapply.plan.batch import Batch


#: Parts of a second in which changes are handed over: a batch is no larger than one part allows.
_PARTS = 4


class Throttle:
    """Written by intake's task; its seconds are read by the intervals.

    Changes are paid for after they are taken, and nothing is saved up while few changes come. So in any period the
    number taken is at most what the rate allows for it plus, once, the last take, which is larger only for a larger
    transaction.
    """

    def __init__(self, changes_per_s: int, clock: Callable[[], float]) -> None:
        """Start with nothing taken.

        Args:
            changes_per_s: at most, above 0.
            clock: in seconds; only goes forwards.
        """
        self._changes_per_s = changes_per_s
        self._clock = clock
        self._free_s = clock()
        self._held_s = 0.0
        self._held_since_s: float | None = None

    @property
    def batch_changes(self) -> int:
        """Return the number of changes that a batch may have, so that they do not come in gusts."""
        return max(1, self._changes_per_s // _PARTS)

    @property
    def left_s(self) -> float:
        """Return the seconds for which nothing more may be taken; 0: something may."""
        return max(0.0, self._free_s - self._clock())

    def take(self, n_changes: int) -> None:
        """Count changes that were handed over, whatever the rate."""
        self._free_s = max(self._free_s, self._clock()) + n_changes / self._changes_per_s

    def hold(self) -> None:
        """Note that changes are held back from now on."""
        if self._held_since_s is None:
            self._held_since_s = self._clock()

    def go_on(self) -> None:
        """Note that none are."""
        if self._held_since_s is not None:
            self._held_s += self._clock() - self._held_since_s
            self._held_since_s = None

    @property
    def held_s(self) -> float:
        """Return the seconds for which changes were held back so far."""
        return self._held_s + (0.0 if self._held_since_s is None else self._clock() - self._held_since_s)


#: Where a stream begins: the cost paid once for each batch matters up to here.
_FIRST_TRANSACTIONS: Final = 2_500
_FIRST_CHANGES: Final = 5_000
_FIRST_BYTES: Final = 4 * 1024 * 1024
#: Times as much as configured that a batch of few changes for each of many tables may have.
THIN_SIZE: Final = 4
#: Transactions of a batch below which the operator who configured so few wants commits close to the publisher's.
_SMALL_TRANSACTIONS: Final = 20_000
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
        self._thin_bytes = max(most.size_bytes, min(THIN_SIZE * most.size_bytes, memory_bytes // 8))
        self._least = Limits(
            max(1, limits.transactions // _SMALLEST_PART),
            max(1, limits.changes // _SMALLEST_PART),
            max(1, limits.size_bytes // _SMALLEST_PART),
        )
        if scale != 1.0:
            self._scale(scale)

    def closed(self, batch: Batch) -> None:
        """Let batches of few changes for each of many tables grow once the first one is closed.

        While the target meets the tables of that one, which takes it longer than their changes, more can be read.
        """
        if batch.is_thin:
            limits, most = self.limits, self.most
            is_small = most.transactions < _SMALL_TRANSACTIONS
            limits.most_transactions = most.transactions if is_small else THIN_SIZE * most.transactions
            limits.most_changes = THIN_SIZE * most.changes
            limits.most_bytes = self._thin_bytes

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


#: Bytes read before workers and timers get their turn: a few hundred transactions, about two milliseconds.
DRAIN_BYTES: Final = 128 * 1024
#: Between commit and sending of a transaction, by the publisher's clock: from this on the stream is late, and
#: transactions are merged.
BACKLOG_S: Final = 0.05
#: In a backlog a read that empties the socket is followed by a pause, because a walsender sends every message
#: separately, and to wake up a reader for each took it half as much CPU again.
COLLECT_S: Final = 0.004
#: The same without a backlog while a batch is under way; with the order kept nothing overtakes it.
_BUSY_COLLECT_S: Final = 0.001
#: Without a backlog, seconds that a batch waits for the one under way: longer than small ones take to commit on a busy
#: machine, where a second one alongside it would only take its processor.
BEHIND_S: Final = 0.01
#: Changes with which it does not wait.
WORTH_A_WORKER: Final = 200
#: Batches closed ahead of the workers: enough that none waits for the leader, few enough to stay small.
AHEAD = 2
#: Batches that may wait for others while independent ones pass them.
_BLOCKED = 128
#: Seconds until the next look while the publisher's clock was not read yet.
_UNKNOWN_S: Final = 0.05


class Closing:
    """Asked at each read and at each change of the batches in flight; the open batch is the driver's."""

    def __init__(self, flight: Flight, *, linger_s: float) -> None:
        """Start without a backlog.

        Args:
            flight: whose workers are free or not.
            linger_s: that a batch of a backlog waits for more.
        """
        self._flight = flight
        # Longer than a read pause; otherwise every pause would look like the end of the backlog.
        self._linger_s = linger_s + COLLECT_S
        #: True if the stream is late. Written here only.
        self.is_backlog = False
        self._heard_s = 0.0
        #: When bytes last came before the wait of a backlog's batch began; None: it waits for the one under way.
        self._armed_s: float | None = None
        self._is_armed = False
        self._held_until_s = 0.0

    def received(self, transaction: Transaction) -> None:
        """Measure how late the stream is."""
        self.is_backlog = transaction.send_time_us - transaction.commit_time_us > BACKLOG_S * 1e6

    @property
    def pause_s(self) -> float:
        """Return the seconds not to read after everything at hand was read; 0 where a worker could apply it at once."""
        if self.is_backlog:
            return COLLECT_S
        return _BUSY_COLLECT_S if self._flight.state.jobs and not self._flight.state.is_relaxed else 0.0

    def hold_open(self, until_s: float) -> None:
        """Keep a batch of a backlog open until then, although nothing comes: the next transactions may join it soon."""
        self._held_until_s = until_s

    def look(self, batch: Batch, heard_s: float) -> float | None:
        """Return the seconds after which to call `waited`; 0.0: close the open batch now; None: wait for a change."""
        self._heard_s = heard_s
        if not self._flight.wants(batch):
            return None
        if self.is_backlog:
            return None if self._is_armed else self._arm(heard_s, self._linger_s)
        if self._flight.state.is_relaxed or not self._flight.state.jobs or batch.n_changes >= WORTH_A_WORKER:
            return 0.0
        return None if self._is_armed else self._arm(None, BEHIND_S)

    def waited(self, batch: Batch, now_s: float) -> float | None:
        """Return the same as `look` when the seconds that were asked for are over: a backlog's batch may wait again."""
        armed_s, self._is_armed = self._armed_s, False
        if not self._flight.wants(batch):
            return None
        if armed_s is not None and (self._heard_s > armed_s or now_s < self._held_until_s):
            return self._arm(self._heard_s, self._linger_s)
        return 0.0

    def closed(self) -> None:
        """Ask for no more: the batch is closed, or reading has ended."""
        self._is_armed = False

    def _arm(self, armed_s: float | None, after_s: float) -> float:
        self._armed_s, self._is_armed = armed_s, True
        return after_s


class Room:
    """Room for more batches: the number closed ahead of the workers, and the memory that all of them take."""

    def __init__(self, flight: Flight, share: Share) -> None:
        """Start with all room free.

        Args:
            flight: whose batches count.
            share: memory for all batches in hand, and the workers that batches are closed for, however few there are.
        """
        self._flight = flight
        self._share = share

    def is_memory_full(self, held_bytes: int) -> bool:
        """Return whether batches in flight and the open one take all the memory that they may."""
        return held_bytes >= self._share.memory_bytes and bool(self._flight.state.jobs)

    def is_left(self, open_bytes: int) -> bool:
        """Return whether more may be taken beside the changes in the open batch."""
        state = self._flight.state
        if self.is_memory_full(state.held_bytes + open_bytes):
            return False
        # Relaxed, batches that wait do not hold up independent ones, up to a number that is still compared fast.
        n_blocked = min(self._flight.n_blocked, _BLOCKED) if state.is_relaxed else 0
        return len(state.jobs) - n_blocked < max(self._share.first_workers, state.n_workers) + AHEAD


class Hold:
    """Where intake is held: after everything up to an LSN of the publisher, before everything later."""

    def __init__(self) -> None:
        """Start open."""
        self._lsn: int | None = None
        #: True if intake waits at its present LSN. Set by intake.
        self.is_reached = False

    def lets_pass(self, transactions: Sequence[Transaction]) -> bool:
        """Return whether all of some transactions, pieces and events may pass."""
        lsn = self._lsn
        return lsn is None or all(transaction.commit_lsn < lsn for transaction in transactions)

    def close(self, lsn: int) -> None:
        """Let transactions pass whose commit record lies before an LSN; called again it moves."""
        self._lsn = lsn
        # A waiting intake must check again, and only then waits at this LSN.
        self.is_reached = False

    def open(self) -> None:
        """Let everything pass."""
        self._lsn = None

    def holds(self, transaction: Transaction) -> bool:
        """Return whether a transaction must wait; pieces of one that has passed continue."""
        # A piece without an LSN belongs to a transaction in progress, which counts only when its end comes.
        lsn, commit_lsn = self._lsn, transaction.commit_lsn
        return lsn is not None and transaction.is_first and commit_lsn > 0 and commit_lsn >= lsn


class DueTimes:
    """When a transaction may enter: not before `apply.delay_s` is over, never after the time of `--until`."""

    def __init__(self, delay_s: float, until_time_us: int | None) -> None:
        """Keep the limits.

        Args:
            delay_s: from a commit on the publisher until it may be applied.
            until_time_us: the first transaction with a later commit time, and all after it, never enter; microseconds
                since 2000-01-01 UTC. None: no end.
        """
        self._delay_us = int(delay_s * 1e6)
        self._until_time_us = until_time_us
        #: True if a limit is set.
        self.is_limited = bool(self._delay_us) or until_time_us is not None

    def first_not_due(self, transactions: Sequence[Transaction], at: int, source_time_us: int | None) -> int:
        """Return the index, from `at` on, of the first transaction that may not enter yet; their number if all may."""
        while at < len(transactions) and not self.left_s(transactions[at], source_time_us):
            at += 1
        return at

    def left_s(self, transaction: Transaction, source_time_us: int | None) -> float:
        """Return the seconds after which to ask again; 0: it may enter now; infinity: it never may.

        Args:
            transaction: a whole one, a piece or an event.
            source_time_us: the publisher's time, or a little less; None: not known yet.
        """
        # A piece without an LSN belongs to a transaction in progress, which counts only when its end comes.
        if not transaction.commit_lsn or not transaction.is_first:
            return 0.0
        time_us = transaction.commit_time_us
        if self._until_time_us is not None and time_us > self._until_time_us:
            return math.inf
        if not self._delay_us:
            return 0.0
        if source_time_us is None:
            return _UNKNOWN_S
        return max(0, time_us + self._delay_us - source_time_us) / 1e6
