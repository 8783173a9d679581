"""A limit on the bytes a second of all connections of a copy together."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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
