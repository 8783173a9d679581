"""Whether a stream that falls behind is left for ranges of WAL.

Only another epoch forgets what the stream has begun, so the way back to ranges is that of a lost connection: what is in
hand is finished, and both ends are opened again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.errors import LeftForRanges
from parapply.source.catch_up import PASSING
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from collections.abc import Sized

    from parapply.engine.state import EngineState
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.intake.reader import SlotReader
    from parapply.source.catch_up_stream import CatchUpStream

#: Seconds between two checks: how often the publisher's position is asked for.
_LOOK_S = 1.0
#: Checks in a row that must find the stream behind.
_CHECKS = 3


class CatchUpWatch:
    """Reads the others' fields; its own are written by its task."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        stream: CatchUpStream,
        reader: SlotReader,
        batcher: Batcher,
        engine: EngineState,
        streams: Sized,
        *,
        behind_bytes: int,
        pause_s: float,
        look_s: float = _LOOK_S,
    ) -> None:
        """Start with a stream that is not behind.

        Args:
            stream: of the slot.
            reader: to know whether reading waits for the target.
            batcher: to know how far it has come.
            engine: to know where the publisher is.
            streams: transactions in progress; they would come again from their beginning.
            behind_bytes: of WAL to catch up, from which it is behind.
            pause_s: that a stream runs at least.
            look_s: between two checks.
        """
        self._stream = stream
        self._reader = reader
        self._batcher = batcher
        self._engine = engine
        self._streams = streams
        self._behind_bytes = behind_bytes
        self._pause_s = pause_s
        self._look_s = look_s
        self._behind = 0

    async def run(self) -> None:
        """Check until cancelled.

        Raises:
            LeftForRanges: the stream is behind.
        """
        clock = asyncio.get_running_loop().time
        streaming_since_s = clock()
        while True:
            await asyncio.sleep(self._look_s)
            if self._stream.reading is Reading.RANGES:
                streaming_since_s = clock()
                continue
            lag_bytes = self._lag_bytes()
            self._behind = self._behind + 1 if lag_bytes is not None else 0
            if self._behind >= _CHECKS and clock() - streaming_since_s >= self._pause_s:
                raise LeftForRanges(f"The stream is left for ranges of WAL: {lag_bytes} bytes to catch up.")

    def _lag_bytes(self) -> int | None:
        """Return how far the stream is behind; None where it is not, or where ranges would not help."""
        source_lsn = self._engine.source_lsn
        # With reading paused the target is what takes the time.
        if source_lsn is None or self._stream.reason not in PASSING or self._reader.is_paused:
            return None
        # However long it takes: what has come of a transaction would come again from its beginning, for ever.
        if self._streams or self._batcher.is_inside_large or self._reader.is_inside_transaction:
            return None
        lag_bytes = max(0, source_lsn - self._batcher.received_lsn)
        return lag_bytes if lag_bytes >= self._behind_bytes else None
