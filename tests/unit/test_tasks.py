"""Tasks: one that loses a cancellation ends all the same, and long waits end together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from parapply import tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def _loses_one(lost: list[str]) -> None:
    """Work in a loop, as the parts of an epoch do, and lose the first cancellation, as ``wait_for`` may."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if lost:
                raise
            lost.append("cancellation")


async def _fails(_: list[str]) -> None:
    """Fail while it cleans up, as a session does whose connection is lost."""
    try:
        await asyncio.Event().wait()
    finally:
        raise ConnectionError


@pytest.mark.parametrize("work", [_loses_one, _fails])
async def test_every_task_ends(monkeypatch: pytest.MonkeyPatch, work: Callable[[list[str]], Awaitable[None]]) -> None:
    """A task that goes on after it was cancelled is cancelled again, and one that fails then is no error of ours.

    Otherwise a daemon that loses a connection may stand still for ever between two epochs (F15, F16, F20).
    """
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.01)
    lost: list[str] = []
    running = [asyncio.ensure_future(work(lost)) for _ in range(2)]
    started = asyncio.create_task(asyncio.wait(running, timeout=0))
    await started
    await tasks.end_tasks(running)
    assert all(task.done() for task in running)


async def test_no_task_is_no_wait() -> None:
    """Nothing to end is nothing to wait for."""
    await tasks.end_tasks([])


async def test_long_waits_end_together() -> None:
    """With a whole second, at most one late and never early; a short wait ends with none."""
    before_s = asyncio.get_running_loop().time()
    for seconds in (5.0, 10.75):
        end_s = tasks.beat_s(seconds)
        assert end_s == int(end_s)
        assert before_s + seconds <= end_s <= asyncio.get_running_loop().time() + seconds + 1
    assert before_s + 4.9 <= tasks.beat_s(4.9) <= asyncio.get_running_loop().time() + 4.9


async def test_answers_come_between_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks have a turn before each module that is not loaded yet."""
    turns: list[str] = []

    async def take_turns() -> None:
        while True:
            turns.append("turn")
            await asyncio.sleep(0)

    monkeypatch.setattr("importlib.import_module", turns.append)
    other = asyncio.create_task(take_turns())
    await tasks.load_modules(["tasks", "no_module", "none_either"])
    await tasks.end_tasks([other])
    assert turns == ["turn", "parapply.no_module", "turn", "parapply.none_either"]
