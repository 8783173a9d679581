"""When an open batch closes before it is full, and how long reading pauses. Starts no task; owns one timer.

The rule: a batch closes when a worker is free to take it and the stream has nothing more at hand. With a backlog
batches so grow to what sets are good at. Without one a transaction leaves at once if nothing is under way. Else, with
the order kept, it joins what comes until the batch under way has committed, for at most a moment, because it could not
commit before, and the commits of many small batches, one after the other, cost more than a second worker gains.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.config import ApplyConfig
    from parapply.model import Transaction
    from parapply.plan.batch import Batch
    from parapply.runtime.pool.pool import WorkerPool

#: In a backlog a read that empties the socket is followed by a pause: a walsender sends every message by itself, and to
#: wake up a reader for each took it half as much CPU again.
COLLECT_S: Final = 0.004
#: The same without a backlog while a batch is under way; with the order kept nothing overtakes it.
_BUSY_COLLECT_S: Final = 0.001
#: Without a backlog, seconds that a batch waits for the one under way: longer than small ones take to commit on a busy
#: machine, where a second one alongside it would only take its processor.
BEHIND_S: Final = 0.01
#: Changes with which it does not wait.
WORTH_A_WORKER: Final = 200


class BatchClosing:
    """Written by intake alone; calls `close` when the open batch is due."""

    def __init__(
        self, pool: WorkerPool, config: ApplyConfig, close: Callable[[], None], is_held: Callable[[], bool]
    ) -> None:
        """Start without a backlog.

        Args:
            pool: whose workers are free or not.
            config: what a backlog is, and how long a batch lingers in one.
            close: hands the open batch over; called with one open only.
            is_held: tells whether a batch of a backlog stays open, although nothing comes.
        """
        self._pool = pool
        self._is_held = is_held
        self._close = close
        self._loop = asyncio.get_running_loop()
        self._backlog_us = config.backlog_threshold_s * 1e6
        # Longer than a read pause; otherwise every pause would look like the end of the backlog.
        self._linger_s = config.linger_s + COLLECT_S
        self._timer: asyncio.TimerHandle | None = None
        #: Whether the stream is late. Written here only.
        self.is_backlog = False
        self._heard_s = 0.0

    def received(self, transaction: Transaction) -> None:
        """Measure how late the stream is."""
        self.is_backlog = transaction.send_time_us - transaction.commit_time_us > self._backlog_us

    @property
    def pause_s(self) -> float:
        """Return how long not to read after everything at hand was read; 0 where a worker could apply it at once."""
        if self.is_backlog:
            return COLLECT_S
        return 0.0 if self._pool.is_idle or self._pool.is_relaxed else _BUSY_COLLECT_S

    def look(self, batch: Batch, heard_s: float) -> None:
        """Close the open batch now or set the timer, whichever is due.

        Args:
            batch: the open one.
            heard_s: when bytes last came.
        """
        self._heard_s = heard_s
        if not self._pool.wants(batch):
            return
        if self.is_backlog:
            if self._timer is None:
                self._timer = self._loop.call_later(self._linger_s, self._lingered, batch, heard_s)
        elif self._pool.is_relaxed or self._pool.is_idle or batch.n_changes >= WORTH_A_WORKER:
            self._close()
        elif self._timer is None:
            self._timer = self._loop.call_later(BEHIND_S, self._waited, batch)

    def disarm(self) -> None:
        """Drop the timer: the batch is closed, or reading has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _lingered(self, batch: Batch, armed_s: float) -> None:
        """Close a batch of a backlog if nothing has come for a while; else wait as long again."""
        self._timer = None
        if not self._pool.wants(batch):
            return
        if self._heard_s > armed_s or self._is_held():
            self._timer = self._loop.call_later(self._linger_s, self._lingered, batch, self._heard_s)
        else:
            self._close()

    def _waited(self, batch: Batch) -> None:
        """Close a batch that has waited long enough for the one under way to commit."""
        self._timer = None
        if self._pool.wants(batch):
            self._close()
