"""Looks after this process's sessions on the publisher: what waits for a lock there is reported, with who holds it.

A session that waits cannot say so, so another one is opened, only while one has had no answer for long. One that has
ended may be the first of a publisher that stops.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from parapply import blocked
from parapply.errors import ParapplyError, SourceLost, StreamLeft, WalLimitReached
from parapply.limits import BLOCKED_S
from parapply.source import slot
from parapply.tasks import end_tasks, sleep_to_beat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from parapply.blocked import BlockedSession
    from parapply.login import Login

#: Seconds between two checks, which ask no server while every session has its answers.
_CHECK_S: Final = 5.0
#: Seconds the stream may continue after the publisher ended our plain session: a fast stop ends plain sessions first
#: and then waits for the stream, which the publisher should end once all is confirmed (trap T-9). If it is still open
#: then, we hold it up, and nothing is lost by leaving (F9).
_LEAVE_S: Final = 3.0


class PublisherWaits:
    """One for a publisher and a process. `longest_s` is written here and read by the metrics."""

    def __init__(self, login: Callable[[], Login], tell: Callable[[BlockedSession], None]) -> None:
        self._login = login
        self._tell = tell
        self._telling = blocked.Telling()
        #: Seconds of the longest wait at the last look; 0.0: nothing waited.
        self.longest_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await sleep_to_beat(_CHECK_S)
            login = self._login()
            pids = slot.without_answer(login, BLOCKED_S)
            if not pids:
                self.longest_s = 0.0
                continue
            # The publisher may have no connection left, or hold this one up by the same lock: the next look says more.
            with suppress(ParapplyError, TimeoutError):
                async with (
                    asyncio.timeout(BLOCKED_S),
                    await slot.connect(login, application_name="parapply waits") as conn,
                ):
                    with slot.source_errors("asking who blocks a session"):
                        found = await blocked.look(conn, pids=pids)
                self.longest_s = max([one.wait_s for one in found], default=0.0)
                for one in self._telling.due(found):
                    self._tell(one)


@asynccontextmanager
async def stream_ends_first() -> AsyncIterator[None]:
    """Let the stream end by itself, with all that it still brings, where a question in the block finds no session."""
    try:
        yield
    except (StreamLeft, WalLimitReached):
        raise
    except SourceLost:
        await asyncio.sleep(_LEAVE_S)
        raise


@asynccontextmanager
async def looked_after(login: Login, tell: Callable[[BlockedSession], None]) -> AsyncIterator[None]:
    """Look after the sessions of one publisher while the block runs."""
    task = asyncio.create_task(PublisherWaits(lambda: login, tell).run(), name="publisher-waits")
    try:
        yield
    finally:
        await end_tasks([task])
