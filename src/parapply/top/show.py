"""Shows the screen: once as text or JSON, or live in a terminal."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console

from parapply.top.layout import screen
from parapply.top.overview import Watched, in_order, overview

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from parapply.config import Config

#: Seconds between the two readings of `once` at least: the daemon writes its counts once a second.
_ONCE_S = 2.5


async def once(config: Config, interval_s: float, *, as_json: bool) -> None:
    """Read twice and print one screen, or one JSON document.

    Raises:
        TargetRefused: the target knows nothing of the slot.
    """
    (one,) = await twice({"": config}, interval_s)
    if one.error is not None:
        raise one.error
    if as_json:
        click.echo(json.dumps(one.history.document(), indent=2))
        return
    console = Console()
    console.print(screen(one.history, console.width, 0, "rows"))


async def twice(configs: Mapping[str, Config], interval_s: float) -> Sequence[Watched]:
    """Read each of several slots twice, and return them; the error of one is kept in it."""
    async with _watched(configs) as slots:
        await _look(slots)
        # Nothing more is learned from a second reading where the first one was refused.
        if read := [one for one in slots if one.error is None]:
            await asyncio.sleep(max(interval_s, _ONCE_S))
            await _look(read)
        return slots


def print_overview(slots: Sequence[Watched]) -> None:
    """Print a line for each slot."""
    Console().print(overview(in_order(slots, "lag"), 0))


async def live(configs: Mapping[str, Config], interval_s: float) -> None:
    """Show the screen until the user ends it, of several slots with a line for each.

    Raises:
        TargetRefused, TargetLost: as `once`, before the screen is taken; only where there is one slot.
    """
    from parapply.top.app import Top  # noqa: PLC0415

    async with _watched(configs) as slots:
        await _look(slots)
        if len(slots) == 1 and slots[0].error is not None:
            raise slots[0].error
        await Top(slots, interval_s).run_async()


async def _look(slots: Sequence[Watched]) -> None:
    await asyncio.gather(*[one.look() for one in slots])


@asynccontextmanager
async def _watched(configs: Mapping[str, Config]) -> AsyncIterator[list[Watched]]:
    async with AsyncExitStack() as stack:
        slots = [Watched(name, config) for name, config in configs.items()]
        for one in slots:
            await stack.enter_async_context(one.reader)
        yield slots
