"""Rest: while nothing comes and nothing is open, the leader's looks at both servers are far apart.

A fleet has many databases of which few are written to, and looking at all of them each second would take most of what
its process does (docs/design/FLEET.md). Anything that comes in the stream ends the rest, and so does a command's call.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from parapply.logs import get_logger
from parapply.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds without anything in the stream, and without a command's call, after which rest begins.
QUIET_S = 10.0
#: Seconds between two looks at rest.
LONG_S = 30.0
#: The same of questions where the publisher is.
ASKED_S = 10.0
#: Seconds between two writes of the slot's row at rest: a reader of the state calls the daemon silent after five.
SHOWN_S = 3.0


class Rest:
    """Ended by intake and requests; asked by every task that looks from time to time."""

    def __init__(self) -> None:
        """Start without rest, until `allow`."""
        self._may_be: Callable[[], bool] = lambda: False
        self._stirred_s = time.monotonic()
        self._ended = asyncio.Event()
        self._n_asleep = 0
        self._is_told = False
        self._log = get_logger()

    def allow(self, may_be: Callable[[], bool]) -> None:
        """Rest from now on, whenever it has been quiet and a function says that nothing is open."""
        self._may_be = may_be

    @property
    def is_on(self) -> bool:
        """Return whether looks may be far apart now."""
        return time.monotonic() - self._stirred_s >= QUIET_S and self._may_be()

    def look(self) -> None:
        """End the rest if something is open by now that came neither in the stream nor by a call."""
        is_on = self.is_on
        if is_on and not self._is_told:
            self._log.debug("rest_begun")
        elif not is_on and self._n_asleep:
            self.end()
        self._is_told = is_on

    def end(self) -> None:
        """Have all look now, and as often as usual for some time."""
        self._stirred_s = time.monotonic()
        if self._n_asleep:
            self._ended.set()
            self._ended = asyncio.Event()

    async def sleep(self, usual_s: float, rest_s: float | None = None, *, until: asyncio.Event | None = None) -> None:
        """Wait until the next look is due.

        Args:
            usual_s: seconds without rest.
            rest_s: seconds at rest, unless it ends before; None: `LONG_S`.
            until: the look is also due when this is set.
        """
        events = [until] if until is not None else []
        rest_s = LONG_S if rest_s is None else rest_s
        is_on = rest_s > usual_s and self.is_on
        if is_on:
            events.append(self._ended)
        self._n_asleep += is_on
        try:
            await _any_of(events, rest_s if is_on else usual_s)
        finally:
            self._n_asleep -= is_on


async def _any_of(events: list[asyncio.Event], limit_s: float) -> None:
    """Wait until one of at most two events is set, or for some seconds."""
    if not events:
        await asyncio.sleep(limit_s)
        return
    if len(events) == 1:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await events[0].wait()
        return
    tasks = [asyncio.create_task(event.wait(), name="rest") for event in events]
    try:
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(tasks)
