"""Whether there is room for more: batches ahead of the workers, the memory that all take, what the throttle lets in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.logs import get_logger

if TYPE_CHECKING:
    from parapply.config import ApplyConfig
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.intake.reader import SlotReader
    from parapply.runtime.intake.throttle import Throttle
    from parapply.runtime.pool.pool import WorkerPool

#: Batches closed ahead of the workers: enough that none waits for the leader, few enough to stay small.
AHEAD = 2
#: Batches that may wait for others while independent ones pass them.
_BLOCKED = 128


class Room:
    """Asked by intake's task; written by the worker pool's callback through `changed`."""

    def __init__(self, reader: SlotReader, batcher: Batcher, pool: WorkerPool, config: ApplyConfig) -> None:
        """Start with all of it.

        Args:
            reader: stops while there is none.
            batcher: whose open batch counts.
            pool: whose batches count.
            config: limits.
        """
        self._reader = reader
        self._batcher = batcher
        self._pool = pool
        self._memory_limit_bytes = config.memory_limit_bytes
        self._fewest_workers = config.first_workers
        self._changed = asyncio.Event()
        self._is_told_full = False
        self._log = get_logger()

    def is_left(self) -> bool:
        """Tell whether more may be taken."""
        throttle = self._batcher.throttle
        if throttle is not None and throttle.left_s:
            return False
        held_bytes = self._pool.held_bytes + self._batcher.open_bytes
        if held_bytes >= self._memory_limit_bytes and len(self._pool):
            if not self._is_told_full:
                self._is_told_full = True
                self._log.warning("memory_limit_reached", size_bytes=held_bytes)
            return False
        # Relaxed, batches that wait do not hold up independent ones, up to a number that is still compared fast.
        n_blocked = min(self._pool.n_blocked, _BLOCKED) if self._pool.is_relaxed else 0
        return len(self._pool) - n_blocked < max(self._fewest_workers, self._pool.n_workers) + AHEAD

    async def wait(self) -> None:
        """Return when more may be taken; reading is stopped until then."""
        while not self.is_left():
            self._reader.stop()
            self._changed.clear()
            throttle = self._batcher.throttle
            if throttle is not None and throttle.left_s:
                await self._wait_for(throttle)
            else:
                await self._changed.wait()
        self._is_told_full = False
        self._reader.go_on()

    async def _wait_for(self, throttle: Throttle) -> None:
        """Wait as long as the throttle asks for; what is open goes to the workers, for nothing joins it until then."""
        self._batcher.close_open()
        throttle.hold()
        try:
            with self._reader.waiting("apply.max_changes_per_s"):
                await asyncio.sleep(throttle.left_s)
        finally:
            throttle.go_on()

    def changed(self) -> None:
        """Note that a worker is idle, or a batch has committed."""
        self._changed.set()
