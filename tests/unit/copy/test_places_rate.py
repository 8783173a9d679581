"""The limit on bytes a second, on a clock of its own."""

from __future__ import annotations

import asyncio

from parapply.copy.places import RateLimit


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def time(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


async def _take(limit: RateLimit, count: int) -> None:
    for _ in range(count):
        await limit.take(1000)


async def test_all_connections_together_keep_to_it() -> None:
    """Four connections get no more than one would; a pause before gives no burst."""
    clock = _Clock()
    limit = RateLimit(10_000, clock=clock.time, sleep=clock.sleep)
    clock.now_s += 3600
    began_s = clock.now_s
    await asyncio.gather(*[_take(limit, 25) for _ in range(4)])
    assert clock.now_s - began_s > 100_000 / 10_000 - 0.2


async def test_without_a_limit_nothing_waits() -> None:
    """Zero is no limit."""
    clock = _Clock()
    limit = RateLimit(0, clock=clock.time, sleep=clock.sleep)
    await _take(limit, 100)
    assert clock.now_s == 100.0
