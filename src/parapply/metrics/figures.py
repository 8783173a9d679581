"""The daemon's counts, from its start to its end: plain numbers, written at most once per target transaction."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import TYPE_CHECKING, Any

from parapply.applylog_schema import RowCounts
from parapply.metrics import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parapply.metrics.table import Metric

#: The values of a metric: a number for each combination of its labels' values, in their order.
Values = dict["Metric", dict[tuple[str, ...], float]]


class Histogram:
    """Observations of a quantity, counted by upper bound, and their sum."""

    __slots__ = ("counts", "metric", "sum")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        #: Observations in each bucket, above the bound before and up to its own; the last is above all bounds.
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum = 0.0


class Stages:
    """Seconds that all target transactions together spent in each stage."""

    __slots__ = ("commit_s", "dependency_s", "execute_s", "queued_s", "turn_s")

    def __init__(self) -> None:
        self.queued_s = self.dependency_s = self.execute_s = self.turn_s = self.commit_s = 0.0


class TableFigures:
    """The counts of one table."""

    __slots__ = ("conflicts", "rows", "transactions", "wait_s", "waits")

    def __init__(self) -> None:
        self.rows = RowCounts()
        self.transactions = 0
        #: By kind of dependency.
        self.waits: Counter[str] = Counter()
        self.wait_s: defaultdict[str, float] = defaultdict(float)
        #: By type and outcome.
        self.conflicts: Counter[tuple[str, str]] = Counter()


class _Tables(dict[str, TableFigures]):
    """By name. One that is asked for first is made; all that come too late to have their own share one."""

    def __missing__(self, name: str) -> TableFigures:
        """Make the figures of a table."""
        return self.setdefault(name if len(self) < table.TABLES_LIMIT else table.OTHER_TABLES, TableFigures())


class Figures:
    """Written by `runtime`: the meter, the conflict handler (conflicts), intervals, daemon and fleet (its last three).

    In a fleet they outlive a leader, because who counts a conflict that stops it ends before the next scrape.
    """

    def __init__(self) -> None:
        self.tables: dict[str, TableFigures] = _Tables()
        #: Waits for barriers, which have no table.
        self.barriers = TableFigures()
        #: Tables whose figures changed since they were last taken, the oldest change first. Added by who changes them,
        #: where the table has figures of its own.
        self.changed: dict[str, None] = {}
        self.transactions: Counter[str] = Counter(dict.fromkeys(table.MODES, 0))
        self.batches: Counter[str] = Counter(dict.fromkeys(table.MODES, 0))
        self.commands: Counter[str] = Counter(dict.fromkeys(table.COMMAND_OUTCOMES, 0))
        self.change_bytes = 0
        #: Seconds in which the throttle held changes back. Written by the intervals.
        self.throttled_s = 0.0
        self.stages = Stages()
        self.retries: Counter[str] = Counter(dict.fromkeys(table.RETRY_REASONS, 0))
        #: By type and outcome. All exist from the start: Prometheus sees no increase in a series that begins at 1.
        self.conflicts: Counter[tuple[str, str]] = Counter(
            dict.fromkeys(product(table.CONFLICT_TYPES, table.OUTCOMES), 0)
        )
        #: Of the history, as it was last read; empty before that, so that no start looks like an increase.
        self.conflicts_kept: dict[tuple[str, str], int] = {}
        self.reconnects: Counter[str] = Counter(dict.fromkeys(table.ENDS, 0))
        self.heals = 0
        self.failures = 0
        #: Of a batch: its source transactions, changes, bytes and seconds.
        self.of_batches = tuple(
            map(Histogram, (table.BATCH_TRANSACTIONS, table.BATCH_CHANGES, table.BATCH_BYTES, table.BATCH_SECONDS))
        )

    def count_conflict(self, conflict_type: str, name: str, outcome: str) -> None:
        """Count a conflict of a table, schema.table, by type and outcome."""
        self.conflicts[conflict_type, outcome] += 1
        self.tables[name].conflicts[conflict_type, outcome] += 1
        if name in self.tables:
            self.changed[name] = None

    def take_changed(self, limit: int) -> list[str]:
        """Return the tables whose figures have changed since they were taken, the longest unseen first."""
        names = list(self.changed)[:limit]
        for name in names:
            del self.changed[name]
        return names

    def values(self) -> Values:
        """Return all counters."""
        stages = self.stages
        values: Values = {
            table.TRANSACTIONS: _by_one(self.transactions),
            table.BATCHES: _by_one(self.batches),
            table.COMMANDS: _by_one(self.commands),
            table.CHANGE_BYTES: {(): self.change_bytes},
            table.THROTTLED: {(): self.throttled_s},
            table.RETRIES: _by_one(self.retries),
            table.CONFLICTS: {key: float(n) for key, n in self.conflicts.items()},
            table.TABLE_CONFLICTS: {},
            table.CONFLICTS_KEPT: {key: float(n) for key, n in self.conflicts_kept.items()},
            table.RECONNECTS: _by_one(self.reconnects),
            table.HEALS: {(): self.heals},
            table.FAILURES: {(): self.failures},
            table.STAGE_SECONDS: {(stage,): getattr(stages, f"{stage}_s") for stage in table.STAGES},
            table.ROWS: {},
            table.TABLE_TRANSACTIONS: {},
            table.WAITS: {("", kind): n for kind, n in self.barriers.waits.items()},
            table.WAIT_SECONDS: {("", kind): wait_s for kind, wait_s in self.barriers.wait_s.items()},
        }
        for name, figures in self.tables.items():
            for operation in table.OPERATIONS:
                values[table.ROWS][name, operation] = getattr(figures.rows, operation)
            values[table.TABLE_TRANSACTIONS][name,] = figures.transactions
            for (conflict_type, outcome), n in figures.conflicts.items():
                values[table.TABLE_CONFLICTS][conflict_type, name, outcome] = n
            for kind, n in figures.waits.items():
                values[table.WAITS][name, kind] = n
                values[table.WAIT_SECONDS][name, kind] = figures.wait_s[kind]
        return values


def _by_one(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): number for key, number in counts.items()}


def migration_values(steps: Iterable[Mapping[str, Any]]) -> Values:
    """Return the gauges of the steps that were begun; none without a migration."""
    values: Values = {
        table.MIGRATION_STEP: {},
        table.MIGRATION_SECONDS: {},
        table.MIGRATION_DONE: {},
        table.MIGRATION_EXPECTED: {},
        table.MIGRATION_BYTES: {},
        table.MIGRATION_LEFT: {},
    }
    for one in steps:
        step = one["step"]
        for state in table.STEP_STATES:
            values[table.MIGRATION_STEP][step, state] = float(one["state"] == state)
        values[table.MIGRATION_SECONDS][step,] = one["seconds"]
        if one["unit"]:
            values[table.MIGRATION_DONE][step, one["unit"]] = one["done"]
            if one["total"]:
                values[table.MIGRATION_EXPECTED][step, one["unit"]] = one["total"]
        if one["size_bytes"]:
            values[table.MIGRATION_BYTES][step,] = one["size_bytes"]
        if one["left_s"] is not None:
            values[table.MIGRATION_LEFT][step,] = one["left_s"]
    return values


def cutover_values(found: Mapping[str, Any] | None) -> Values:
    """Return the gauges of a cut-over; none before the first one."""
    if found is None:
        return {}
    slot = found["reverse_slot"]
    return {
        table.CUTOVER_STEP: {(step, slot): float(step == found["step"]) for step in table.CUTOVER_STEPS},
        table.CUTOVER_STEP_SECONDS: {(): found["step_s"]},
        table.CUTOVER_FENCED: {(): float(found["is_fenced"])},
        table.CUTOVER_GAP: {} if found["gap_s"] is None else {(): found["gap_s"]},
    }
