"""Watch over a reader that falls behind: the publisher logs restart points for it, and a stream is left for ranges.

Only another epoch forgets the transactions that the stream has begun. So the way back to ranges is the same as after a
lost connection: the work in hand is finished, and both ends are opened again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.engine.stalls import FallingBehind, RestartPoints, StreamSeen
from parapply.errors import StreamLeft
from parapply.source.catch_up import PASSING
from parapply.source.waits import stream_ends_first

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sized

    from parapply.runtime.intake.batcher import Batcher
    from parapply.source.catch_up import RangeLimits

#: Seconds between two checks: how often the publisher's position is asked for.
_LOOK_S = 1.0


class CatchUpWatch:
    """Reads the others' fields; `engine/stalls.py` decides."""

    def __init__(  # noqa: PLR0913  one place calls it
        self,
        batcher: Batcher,
        streams: Sized,
        log_running: Callable[[], Awaitable[bool]],
        *,
        limits: RangeLimits,
        behind_bytes: int,
        pause_s: float,
    ) -> None:
        """Start with a stream that is not behind; a stream runs for `pause_s` seconds at least."""
        self._batcher = batcher
        self._engine = batcher.pool.flight.state
        self._rest = batcher.pool.rest
        self._streams = streams
        self._log_running = log_running
        self._apart_bytes = limits.point_bytes
        self._behind_bytes = behind_bytes
        self._pause_s = pause_s

    async def run(self) -> None:
        """Check until cancelled.

        Raise StreamLeft if the stream is behind, SourceLost if the plain session on the publisher ended.
        """
        clock = asyncio.get_running_loop().time
        behind = FallingBehind(behind_bytes=self._behind_bytes, pause_s=self._pause_s, now_s=clock())
        points: RestartPoints | None = RestartPoints(self._apart_bytes)
        while True:
            await self._rest.sleep(_LOOK_S)
            if points is not None and points.is_due(self._engine.source_lsn, self._batcher.received_lsn):
                async with stream_ends_first():
                    points = points if await self._log_running() else None
            lag_bytes = behind.look(self._seen(), self._engine.source_lsn, clock())
            if lag_bytes is not None:
                raise StreamLeft(f"The stream is left for ranges of WAL: {lag_bytes} bytes to catch up.")

    def _seen(self) -> StreamSeen:
        batcher = self._batcher
        reader, stream = batcher.reader, batcher.reader.stream
        return StreamSeen(
            stream.reading,
            batcher.received_lsn,
            may_be_left=stream.reason in PASSING,
            is_paused=reader.is_paused,
            begun=(bool(self._streams), batcher.large is not None, reader.is_inside_transaction),
        )
