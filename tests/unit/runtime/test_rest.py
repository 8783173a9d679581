"""Rest: when looks are far apart, and that its end has all of them done at once."""

from __future__ import annotations

import asyncio

import pytest

from parapply.runtime import rest as module
from parapply.runtime.rest import Rest
from parapply.tasks import end_tasks

_NEVER_S = 1e6


@pytest.fixture(autouse=True)
def _is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.0)


def _resting() -> Rest:
    rest = Rest()
    rest.allow(lambda: True)
    rest.look()
    return rest


async def test_rest_needs_quiet_and_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before it is allowed, nor while anything is open, nor soon after something came."""
    rest = Rest()
    for may_be, quiet_s, is_on in ((None, 0.0, False), (True, 0.0, True), (False, 0.0, False), (True, _NEVER_S, False)):
        monkeypatch.setattr(module, "QUIET_S", quiet_s)
        if may_be is not None:
            rest.allow(lambda may_be=may_be: may_be)  # type: ignore[misc]
        rest.look()
        assert rest.is_on is is_on


async def test_the_end_wakes_every_task() -> None:
    """A wait that a second event also ends; a wait that began without rest goes on."""
    rest = Rest()
    usual = asyncio.create_task(rest.sleep(_NEVER_S))
    await asyncio.sleep(0)
    rest.allow(lambda: True)
    rest.look()
    news = asyncio.Event()
    asleep = [asyncio.create_task(one) for one in (rest.sleep(0.0), rest.sleep(0.0, _NEVER_S, until=news))]
    await asyncio.sleep(0)
    rest.end()
    await asyncio.wait_for(asyncio.gather(*asleep), 5)
    assert not rest.is_on
    assert not usual.done()
    await end_tasks([usual])


async def test_an_event_of_its_own_wakes_a_task_at_rest() -> None:
    """Such as the loss of a worker's session."""
    rest = _resting()
    news = asyncio.Event()
    asleep = asyncio.create_task(rest.sleep(0.0, _NEVER_S, until=news))
    await asyncio.sleep(0)
    news.set()
    await asyncio.wait_for(asleep, 5)


async def test_a_look_ends_the_rest_when_something_is_open() -> None:
    """Such as a publisher that is ahead, of which neither the stream nor a call says anything."""
    rest = _resting()
    asleep = asyncio.create_task(rest.sleep(0.0, _NEVER_S))
    await asyncio.sleep(0)
    rest.look()
    await asyncio.sleep(0)
    assert not asleep.done()
    rest.allow(lambda: False)
    rest.look()
    await asyncio.wait_for(asleep, 5)
