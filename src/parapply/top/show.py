"""Shows the screen: once as text or JSON, or live in a terminal."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console

from parapply.commands.state_reader import StateReader
from parapply.top.history import ReadingHistory
from parapply.top.layout import screen

if TYPE_CHECKING:
    from parapply.config import Config

#: Seconds between the two readings of `once` at least: the daemon writes its counts once a second.
_ONCE_S = 2.5


async def once(config: Config, interval_s: float, *, as_json: bool) -> None:
    """Read twice and print one screen, or one JSON document.

    Raises:
        TargetRefused: the target knows nothing of the slot.
        TargetLost: the target cannot be reached.
    """
    history = ReadingHistory()
    async with StateReader(config) as reader:
        history.add(await reader.read(), time.monotonic())
        await asyncio.sleep(max(interval_s, _ONCE_S))
        history.add(await reader.read(), time.monotonic())
    if as_json:
        click.echo(json.dumps(history.document(), indent=2))
        return
    console = Console()
    console.print(screen(history, console.width, 0, "rows"))


async def live(config: Config, interval_s: float) -> None:
    """Show the screen until the user ends it.

    Raises:
        TargetRefused, TargetLost: as `once`, before the screen is taken.
    """
    from parapply.top.app import Top  # noqa: PLC0415

    history = ReadingHistory()
    async with StateReader(config) as reader:
        history.add(await reader.read(), time.monotonic())
        await Top(reader, history, interval_s).run_async()
