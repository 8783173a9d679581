"""The control pool's sessions: opened for an epoch, gone with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from parapply.login import Login
from parapply.runtime.tables.control_pool import ControlPool

if TYPE_CHECKING:
    from tests.fixtures.databases import Database


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
async def test_a_desk_given_up_while_it_opens_leaves_nothing_behind(target_db: Database, turns: int) -> None:
    """The epoch's opening fails elsewhere, or a signal comes: no task of the pool goes on.

    Observed: the pool's own tasks, left running, kept the process from ending after it had said why it must.
    """
    before = asyncio.all_tasks()
    control_pool = ControlPool(Login(target_db.dsn), "replica", "parapply control pool given up")
    opening = asyncio.create_task(control_pool.__aenter__(), name="opening")
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with asyncio.timeout(10):
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)


async def test_a_second_session_is_opened_only_while_the_first_is_held(target_db: Database) -> None:
    """Questions that take a moment share one session; one that takes long, or is blocked, holds up no other."""
    async with ControlPool(Login(target_db.dsn), "replica", "parapply control pool shared") as control_pool:

        async def ask() -> int:
            async with control_pool.session() as conn:
                return conn.info.backend_pid

        async with control_pool.session() as conn:
            first = conn.info.backend_pid
            asking = [asyncio.create_task(ask(), name=f"question {number}") for number in range(3)]
            await asyncio.sleep(0)
        assert [await question for question in asking] == [first] * 3
        async with control_pool.session():
            second = await ask()
            assert second != first
            assert await ask() == second
