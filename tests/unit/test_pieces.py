"""The piece under way when its transaction is given up."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from parapply.errors import TargetLost
from parapply.runtime.pieces import Pieces


async def test_a_piece_that_failed_while_nobody_waited_for_it_is_no_complaint_of_the_loop() -> None:
    """A worker that waits for more of its transaction does not wait for the piece; others tell of the lost target."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))

    async def fails() -> None:
        raise TargetLost("target: it is gone")

    pieces = Pieces.__new__(Pieces)
    pieces._under_way = loop.create_task(fails())
    await asyncio.wait({pieces._under_way})
    await pieces.abandon()
    assert pieces._under_way is None
    gc.collect()
    assert told == []
