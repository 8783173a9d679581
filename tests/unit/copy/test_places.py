"""Connections that copies of several databases access: the lowest rank first, none lost and none idle."""

from __future__ import annotations

import asyncio
from random import Random

from parapply.copy.places import Access, Places


async def test_the_lowest_rank_is_next() -> None:
    """A place that becomes free goes to the largest database that waits, however late it came."""
    places = Places(1)
    order: list[int] = []

    async def work(rank: int) -> None:
        async with Access(places, rank).lane():
            order.append(rank)

    async with Access(places, 9).lane(), asyncio.TaskGroup() as group:
        for rank in (5, 0, 3):
            group.create_task(work(rank))
        await asyncio.sleep(0)
        # Ends while the others wait.
        group.create_task(_give(places))
    assert order == [0, 3, 5]


async def _give(places: Places) -> None:
    """Give a place to those that wait, and take it back from the last of them."""
    places.give_back()
    await places.take(99)


async def test_the_place_that_is_kept_is_the_first_lanes() -> None:
    """A copy that has begun needs no second place for its first lane, and gives back one that no lane has used."""
    places = Places(1)
    access = Access(places)
    async with access.kept():
        async with access.lane():
            pass
        async with access.lane():
            pass
    async with access.kept():
        pass
    async with asyncio.timeout(5), access.lane():
        pass


def test_no_place_is_lost() -> None:
    """However lanes end, also while they wait, never more have a place than exist, and all exist at the end."""

    async def run(seed: int) -> None:
        random, places, n_inside = Random(seed), Places(3), 0

        async def work(rank: int) -> None:
            nonlocal n_inside
            async with Access(places, rank).lane():
                n_inside += 1
                assert n_inside <= 3
                for _ in range(random.randrange(4)):
                    await asyncio.sleep(0)
                n_inside -= 1

        tasks = [asyncio.create_task(work(random.randrange(3))) for _ in range(30)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            one = random.choice(tasks)
            if not n_inside and random.random() < 0.3:
                one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(5):
            for _ in range(3):
                await places.take(0)

    for seed in range(20):
        asyncio.run(run(seed))
