"""Connections and bytes a second that all copies of one command share, and the order in which databases get them.

A place is one connection on each side. A place that becomes free goes to the database of the lowest rank that waits,
so the largest one is given as many as it can use, and no place is idle as long as something is left.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

#: Seconds of idle time that may be made up for: no burst after a pause.
_CREDIT_S = 0.1


class RateLimit:
    """Written by the connections' tasks, which are tasks of one loop."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Let everything pass if the limit is 0."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._due_s = clock()

    async def take(self, size_bytes: int) -> None:
        """Return when that many bytes that were handed on are due."""
        if not self._bytes_per_s:
            return
        now_s = self._clock()
        self._due_s = max(self._due_s, now_s - _CREDIT_S) + size_bytes / self._bytes_per_s
        if self._due_s > now_s:
            await self._sleep(self._due_s - now_s)


class Places:
    """Written by tasks of one loop."""

    def __init__(self, connections: int, max_bytes_per_s: int = 0) -> None:
        """Make as many places as connections are allowed on each side; bytes are not limited by 0."""
        self.limit = RateLimit(max_bytes_per_s)
        self.connections = connections
        self._n_free = connections
        #: By rank, then in the order of coming.
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def take(self, rank: int) -> None:
        """Return when the place is the caller's, who gives it back."""
        if self._n_free:
            self._n_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (rank, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Pass the place on to the first one that still waits."""
        while self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._n_free += 1


class Access:
    """The access of one database to the places."""

    def __init__(self, places: Places, rank: int = 0) -> None:
        self.limit = places.limit
        self.connections = places.connections
        self._places = places
        self._rank = rank
        self._has_kept = False

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it for the first lane: a snapshot that no lane could read yet would age."""
        await self._places.take(self._rank)
        self._has_kept = True
        try:
            yield
        finally:
            if self._has_kept:
                self._has_kept = False
                self._places.give_back()

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[None]:
        """Have a place until the block ends."""
        if self._has_kept:
            self._has_kept = False
        else:
            await self._places.take(self._rank)
        try:
            yield
        finally:
            self._places.give_back()
