"""Present state of the daemon, read from its parts on request and kept nowhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from parapply import __version__
from parapply.engine.state import lag_since
from parapply.metrics import table
from parapply.metrics.figures import cutover_values, migration_values
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.engine.shares import Share
    from parapply.engine.state import EngineState
    from parapply.metrics.figures import Values
    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.control.progress import Progress
    from parapply.runtime.intake.batcher import Admission, Batcher
    from parapply.runtime.observe.applylog_writer import ApplyLogWriter
    from parapply.runtime.observe.monitor import Monitor
    from parapply.runtime.pool.streams import StreamBuffers
    from parapply.runtime.worker_tasks import WorkerTasks
    from parapply.source.waits import PublisherWaits
    from parapply.spill import Spill

#: Seconds after which the last facts about the slot are too old, without rest and at rest: three of the monitor's
#: questions, and one and a half.
_SLOT_FRESH_S = 30.0
_SLOT_REST_S = 45.0


class Parts(NamedTuple):
    """Parts of an epoch that are shown, each with the parts that it stands on."""

    admission: Admission
    worker_tasks: WorkerTasks
    progress: Progress
    monitor: Monitor
    streams: StreamBuffers
    spill: Spill

    @property
    def batcher(self) -> Batcher:
        """Return the batcher of intake."""
        return self.admission.batcher

    @property
    def engine(self) -> EngineState:
        """Return the state of the engine."""
        return self.batcher.pool.flight.state

    @property
    def workers(self) -> Sequence[Worker]:
        """Return the present workers."""
        return self.worker_tasks.workers


class Lag(NamedTuple):
    """How far the target was behind at the last check."""

    lag_s: float
    looked_s: float  # by the event loop's clock
    source_lsn: int
    low_lsn: int
    look_s: float  # as of `EngineState`

    def seconds(self, now_s: float) -> float:
        """Return it at `now_s`, also when the epoch is over."""
        return lag_since(self.lag_s, self.looked_s, self.look_s, now_s)


class Gauges:
    """`parts` is set by the daemon for as long as an epoch serves."""

    def __init__(
        self, config: Config, share: Share, applylog_writer: ApplyLogWriter | None, waits: PublisherWaits
    ) -> None:
        self.parts: Parts | None = None
        self._share = share
        self._config = config
        self._applylog_writer = applylog_writer
        self._waits = waits
        self._clock = asyncio.get_running_loop().time
        self._lag: Lag | None = None

    def use(self, config: Config, share: Share) -> None:
        """Show another configuration from now on."""
        self._config, self._share = config, share

    def lag(self) -> Lag | None:
        """Return the last check of both ends, None before the first."""
        if self.parts is not None:
            shown = self.parts.engine
            if shown.lag_s is not None and shown.source_lsn is not None:
                low_lsn = self.parts.engine.watermark.low_lsn
                self._lag = Lag(shown.lag_s, shown.looked_s, shown.source_lsn, low_lsn, shown.look_s)
        return self._lag

    def detach(self) -> None:
        """Keep the figures that stay true when an epoch ends."""
        self.lag()
        self.parts = None

    def values(self, state: str, *, is_ready: bool) -> Values:
        """Return every gauge; gauges of an epoch only while one runs."""
        config = self._config
        values: Values = {
            table.INFO: {(__version__, config.apply.commit_order): 1},
            table.STATE: {(name,): float(name == state) for name in table.STATES},
            table.READY: {(): float(is_ready)},
            table.QUEUE_LIMIT: {(): self._share.memory_bytes},
            table.DELAY: {(): config.apply.delay_s},
            table.SPILL_LIMIT: {(): config.apply.spill_limit_bytes},
            table.SLOT_RETAINED_LIMIT: {(): limit} if (limit := config.source.retained_wal_limit_bytes) else {},
            table.LSN: {},
            table.SESSION_BLOCKED: {("source",): self._waits.longest_s},
        }
        if self._applylog_writer is not None:
            values[table.APPLYLOG_DROPPED] = {(): self._applylog_writer.dropped}
        lag = self.lag()
        if lag is not None:
            values[table.LAG_SECONDS] = {(): lag.seconds(self._clock())}
            values[table.LAG_BYTES] = {(): max(0, lag.source_lsn - lag.low_lsn)}
            values[table.LSN]["source",] = lag.source_lsn
            values[table.LSN]["lowest",] = lag.low_lsn
        states = Counter(dict.fromkeys(table.WORKER_STATES, 0))
        if self.parts is not None:
            values |= _present(self.parts, self._clock())
            values[table.SESSION_BLOCKED]["target",] = self.parts.engine.session_blocked_s
            is_at_rest = self.parts.engine.look_s > 0
            values |= _slot(self.parts.monitor, self._clock(), _SLOT_REST_S if is_at_rest else _SLOT_FRESH_S)
            values |= migration_values(self.parts.monitor.moves.migration)
            values |= cutover_values(self.parts.monitor.moves.cutover)
            values[table.LSN] |= _positions(self.parts)
            states.update([worker.state for worker in self.parts.workers])
        values[table.WORKERS] = {(name,): number for name, number in states.items()}
        return values


def _present(parts: Parts, now_s: float) -> Values:
    return {
        table.QUEUE_BATCHES: {(): len(parts.engine.jobs)},
        table.QUEUE_BYTES: {(): parts.engine.held_bytes + parts.batcher.open_bytes},
        table.BLOCKED_SECONDS: {(): parts.engine.blocked_s(now_s)},
        table.READING: {(one,): float(one is parts.batcher.reader.stream.reading) for one in Reading},
        table.READING_PAUSED: {(): float(parts.batcher.reader.is_paused)},
        table.STREAMS: {(): len(parts.streams)},
        table.SPILL_BYTES: {(): parts.spill.used_bytes},
        table.TABLES_WAITING: {(): parts.admission.starts.n_waiting},
        table.PREPARED: {(): parts.admission.two_phase.n_pending},
        table.TABLE_TARGET: dict.fromkeys(islice(parts.monitor.target_names.items(), table.TABLES_LIMIT), 1.0),
    }


def _slot(monitor: Monitor, now_s: float, fresh_s: float) -> Values:
    seen = monitor.slot
    if seen is None or now_s - seen.looked_s > fresh_s:
        return {}
    facts = seen.facts
    retained_bytes = facts.retained_bytes(seen.source_lsn)
    return {
        table.SLOT_RETAINED: {} if retained_bytes is None else {(): retained_bytes},
        table.SLOT_SAFE: {} if facts.safe_wal_bytes is None else {(): facts.safe_wal_bytes},
        table.SLOT_WAL_STATUS: {(status,): float(status == facts.wal_status) for status in table.WAL_STATUSES},
    }


def _positions(parts: Parts) -> dict[tuple[str, ...], float]:
    watermark, prepared_lsn = parts.engine.watermark, parts.admission.two_phase.oldest_lsn
    return {
        **({("prepared",): prepared_lsn} if prepared_lsn else {}),
        ("received",): parts.batcher.received_lsn,
        ("highest",): watermark.high_lsn,
        ("lowest",): watermark.low_lsn,
        ("durable",): parts.engine.durable_lsn,
        ("confirmed",): parts.batcher.reader.stream.confirmed_flush_lsn,
    }
