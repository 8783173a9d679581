"""Rest: while nothing comes and nothing is open, the leader's looks at both servers are far apart.

A fleet has many databases of which few are written to, and looking at all of them each second would take most of what
its process does (docs/design/FLEET.md). Anything that comes in the stream ends the rest, and so does a command's call.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from parapply.logs import get_logger
from parapply.tasks import beat_s, end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds without anything in the stream, and without a command's call, after which rest begins.
QUIET_S = 10.0
#: Seconds between two looks at rest, and between two writes of the slot's row, which says so to its readers.
LONG_S = 30.0
#: The same of questions where the publisher is.
ASKED_S = 10.0


class Rest:
    """Ended by intake and requests; asked by every task that looks from time to time."""

    def __init__(self) -> None:
        """Start without rest, until `allow`."""
        self._may_be: Callable[[], bool] = lambda: False
        #: True if looks may be far apart now; `look` begins it. Read by all on the way of a transaction without a call.
        self.is_on = False
        #: When something last came in the stream, by the monotonic clock, or called. Written by intake.
        self.stirred_s = time.monotonic()
        #: Each wakes a task that rests.
        self._asleep: set[Callable[[], None]] = set()
        self._log = get_logger()

    def allow(self, may_be: Callable[[], bool]) -> None:
        """Rest from now on, whenever it has been quiet and a function says that nothing is open."""
        self._may_be = may_be

    def look(self) -> None:
        """Begin the rest where that may be; end it if something is open that came neither in the stream nor by a call.

        The monitor calls it in each of its rounds.
        """
        may_be = time.monotonic() - self.stirred_s >= QUIET_S and self._may_be()
        if may_be and not self.is_on:
            self.is_on = True
            self._log.debug("rest_begun")
        elif self.is_on and not may_be:
            self.end()

    def end(self) -> None:
        """Have all look now, and as often as usual for some time."""
        self.is_on = False
        self.stirred_s = time.monotonic()
        asleep, self._asleep = self._asleep, set()
        for wake in asleep:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have a function called if the rest ends while the block runs."""
        self._asleep.add(wake)
        try:
            yield
        finally:
            self._asleep.discard(wake)

    async def sleep(self, usual_s: float, rest_s: float | None = None, *, until: asyncio.Event | None = None) -> None:
        """Wait until the next look is due, by seconds without rest and at rest, or until an event.

        At rest it is up to a second more, unless rest ends before; None: `LONG_S`.
        """
        rest_s = LONG_S if rest_s is None else rest_s
        is_on = rest_s > usual_s and self.is_on
        if not is_on and until is None:
            await asyncio.sleep(usual_s)
            return
        loop = asyncio.get_running_loop()
        awake = loop.create_future()

        def wake(*_: object) -> None:
            if not awake.done():
                awake.set_result(None)

        timer = loop.call_at(beat_s(rest_s) if is_on else loop.time() + usual_s, wake)
        waiting = [] if until is None else [asyncio.create_task(until.wait(), name="rest")]
        for task in waiting:
            task.add_done_callback(wake)
        try:
            with self.waking(wake) if is_on else nullcontext():
                await awake
        finally:
            timer.cancel()
            await end_tasks(waiting)
