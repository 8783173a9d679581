"""How an epoch ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from parapply.errors import SourceLost
from parapply.runtime.epoch import Epoch


async def test_the_reader_ends_before_its_connection_is_closed() -> None:
    """It waits for the socket: closed under it, the number may be another descriptor's when the wait is given up."""
    reader = asyncio.create_task(asyncio.Event().wait(), name="reader")
    was_done: list[bool] = []

    async def close() -> None:
        was_done.append(reader.done())

    async def nothing(*_: object) -> None:
        """Do nothing."""

    epoch: Any = SimpleNamespace(
        _ends=SimpleNamespace(stream=SimpleNamespace(close=close)), _drain=nothing, _last_word=nothing
    )
    await Epoch._leave(epoch, SourceLost("gone"), {"reader": reader}, asyncio.Event())  # type: ignore[dict-item]
    assert was_done == [True]
