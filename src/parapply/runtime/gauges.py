"""What the daemon shows of its present: read from its parts when somebody asks, kept nowhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from parapply import __version__
from parapply.metrics import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.metrics.figures import Values
    from parapply.runtime.arbiter import Arbiter
    from parapply.runtime.crew import Crew
    from parapply.runtime.intake import Intake
    from parapply.runtime.progress import Progress
    from parapply.runtime.scribe import Scribe
    from parapply.runtime.streams import Streams
    from parapply.runtime.two_phase import TwoPhase
    from parapply.runtime.worker import Worker
    from parapply.source.stream import ReplicationStream
    from parapply.spill import Spill

#: Seconds after which what was last heard of the publisher is too old to be the present.
_FRESH_S = 5.0


class Parts(NamedTuple):
    """Those of an epoch that have something to show."""

    stream: ReplicationStream
    intake: Intake
    crew: Crew
    workers: Sequence[Worker]
    progress: Progress
    arbiter: Arbiter
    streams: Streams
    spill: Spill
    two_phase: TwoPhase


class Lag(NamedTuple):
    """How far the target was behind when somebody looked."""

    lag_s: float
    looked_s: float  # by the event loop's clock
    source_lsn: int
    low_lsn: int

    def seconds(self, now_s: float) -> float:
        """Return it for a later time: who cannot look must suppose that there was something to apply since."""
        age_s = now_s - self.looked_s
        return self.lag_s + (age_s if age_s > _FRESH_S else 0.0)


class Gauges:
    """`parts` is set by the daemon for as long as an epoch serves."""

    def __init__(self, config: Config, scribe: Scribe | None) -> None:
        """Start with no epoch."""
        self.parts: Parts | None = None
        self._config = config
        self._scribe = scribe
        self._clock = asyncio.get_running_loop().time
        self._lag: Lag | None = None

    def use(self, config: Config) -> None:
        """Tell of another configuration from now on."""
        self._config = config

    def lag(self) -> Lag | None:
        """Return the last look at both ends, None if there was none yet."""
        if self.parts is not None:
            progress = self.parts.progress
            if progress.lag_s is not None and progress.source_lsn is not None:
                low_lsn = self.parts.crew.watermark.low_lsn
                self._lag = Lag(progress.lag_s, progress.looked_s, progress.source_lsn, low_lsn)
        return self._lag

    def detach(self) -> None:
        """Keep of an epoch that ends what is true without it."""
        self.lag()
        self.parts = None

    def values(self, state: str, *, is_ready: bool) -> Values:
        """Return every gauge; those that need an epoch only while there is one."""
        config = self._config
        values: Values = {
            table.INFO: {(__version__, config.apply.commit_order): 1},
            table.STATE: {(name,): float(name == state) for name in table.STATES},
            table.READY: {(): float(is_ready)},
            table.QUEUE_LIMIT: {(): config.apply.memory_limit_bytes},
            table.SPILL_LIMIT: {(): config.apply.spill_limit_bytes},
            table.LSN: {},
        }
        if self._scribe is not None:
            values[table.APPLYLOG_DROPPED] = {(): self._scribe.dropped}
        lag = self.lag()
        if lag is not None:
            values[table.LAG_SECONDS] = {(): lag.seconds(self._clock())}
            values[table.LAG_BYTES] = {(): max(0, lag.source_lsn - lag.low_lsn)}
            values[table.LSN]["source",] = lag.source_lsn
            values[table.LSN]["lowest",] = lag.low_lsn
        states = Counter(dict.fromkeys(table.WORKER_STATES, 0))
        if self.parts is not None:
            values |= _present(self.parts)
            values[table.LSN] |= _positions(self.parts)
            states.update([worker.state for worker in self.parts.workers])
        values[table.WORKERS] = {(name,): number for name, number in states.items()}
        return values


def _present(parts: Parts) -> Values:
    return {
        table.QUEUE_BATCHES: {(): len(parts.crew)},
        table.QUEUE_BYTES: {(): parts.crew.held_bytes + parts.intake.building_bytes},
        table.READING_PAUSED: {(): float(parts.intake.is_paused)},
        table.STREAMS: {(): len(parts.streams)},
        table.SPILL_BYTES: {(): parts.spill.used_bytes},
        table.PREPARED: {(): parts.two_phase.n_pending},
    }


def _positions(parts: Parts) -> dict[tuple[str, ...], float]:
    watermark = parts.crew.watermark
    return {
        ("received",): parts.intake.received_lsn,
        ("highest",): watermark.high_lsn,
        ("lowest",): watermark.low_lsn,
        ("durable",): parts.progress.durable_lsn,
        ("confirmed",): parts.stream.reported_flush_lsn,
    }
