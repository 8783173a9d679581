"""Rules of entry, and of closing the open batch: by place and time, by the room that is left, by idle workers.

A batch closes when a worker is free to take it and the stream has nothing more at hand. With a backlog batches so grow
to what sets are good at. Without one a transaction leaves at once if nothing is under way. Else, with the order kept,
it joins what comes until the batch under way has committed, for at most a moment, because it could not commit before,
and the commits of many small batches, one after the other, cost more than a second worker gains.

A snapshot of the target equals the publisher at an LSN if all up to there is committed and nothing later is. So no
worker has to be stopped, in either commit order: intake takes nothing later, and all that it took before will commit.

Commit times are of the publisher's clock, and so is the time that they are compared with: the monitor reads that clock
each second, and the event loop's carries it on in between. Neither the daemon's nor the target's time of day matters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.engine.flight import Flight
    from parapply.engine.shares import Share
    from parapply.model import Transaction
    from parapply.plan.batch import Batch

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
        return 0.0 if self._flight.state.is_idle or self._flight.state.is_relaxed else _BUSY_COLLECT_S

    def hold_open(self, until_s: float) -> None:
        """Keep a batch of a backlog open until then, although nothing comes: the next transactions may join it soon."""
        self._held_until_s = until_s

    def look(self, batch: Batch, heard_s: float) -> float | None:
        """Return the seconds after which to call `waited`; 0.0: close the open batch now; None: wait for a change.

        Args:
            batch: the open one.
            heard_s: when bytes last came.
        """
        self._heard_s = heard_s
        if not self._flight.wants(batch):
            return None
        if self.is_backlog:
            return None if self._is_armed else self._arm(heard_s, self._linger_s)
        if self._flight.state.is_relaxed or self._flight.state.is_idle or batch.n_changes >= WORTH_A_WORKER:
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
        return held_bytes >= self._share.memory_bytes and not self._flight.state.is_idle

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
        # A piece without an LSN belongs to a transaction in progress, which counts only when its end comes. The last
        # piece also counts. If a transaction was prepared before the slot had two_phase, only that piece has the commit
        # time.
        if not transaction.commit_lsn or not (transaction.is_first or transaction.is_last):
            return 0.0
        time_us = transaction.commit_time_us
        if self._until_time_us is not None and time_us > self._until_time_us:
            return math.inf
        if not self._delay_us:
            return 0.0
        if source_time_us is None:
            return _UNKNOWN_S
        return max(0, time_us + self._delay_us - source_time_us) / 1e6
