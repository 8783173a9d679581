"""History of a slot from several readings: rates, busy workers, the lag of the last minutes. Pure; reads no clock."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Final, NamedTuple

from parapply.vocabulary import WorkerState

#: Seconds that rates are taken over: the daemon writes its counts about once a second.
_WINDOW_S: Final = 10.0
#: Shorter spans say little, because one write of the daemon more or less is too large a part of them.
_SHORT_S: Final = 2.0
#: Readings from which a worker's busy share is taken.
_BUSY_LOOKS: Final = 30
#: Readings that are kept for the course over time, one a second.
_COURSE: Final = 600


class TableRate(NamedTuple):
    """The rates of one table now."""

    name: str
    rows_s: float  # inserts, updates and deletes a second; as what follows
    inserts_s: float
    updates_s: float
    deletes_s: float
    waits_s: float  # target transactions that waited because of it
    waits_for: str  # what for, most often
    lane: str
    is_set_for_inserts: bool  # nothing else is applied as sets
    is_alone: bool  # one batch at a time
    n_rows: int  # since the daemon started

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing happens to it."""
        return not (self.rows_s or self.waits_s)


class _Counts(NamedTuple):
    at_s: float
    counted_s: float  # when the daemon last wrote them, by the target's clock
    transactions: int
    tables: dict[str, dict[str, Any]]


class ReadingHistory:
    """Written by the reader, once a second."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {}
        self.lag_s: deque[float | None] = deque(maxlen=_COURSE)  # None: not known
        self.rows_s: deque[float] = deque(maxlen=_COURSE)
        self._counts: deque[_Counts] = deque()
        self._states: deque[dict[int, str]] = deque(maxlen=_BUSY_LOOKS)
        self._run = ""

    def add(self, report: dict[str, Any], at_s: float) -> None:
        """Take one reading."""
        if report["started_at"] != self._run:
            # Another epoch of the daemon: some of its counts begin again.
            self._run = report["started_at"]
            self._counts.clear()
            self._states.clear()
        self.report = report
        tables = {f"{one['schema_name']}.{one['table_name']}": one for one in report["tables"]}
        counted_s = max([one["counted_s"] for one in report["tables"]], default=0.0)
        transactions = sum([one["transactions"] for one in report["workers"]])
        self._counts.append(_Counts(at_s, counted_s, transactions, tables))
        while at_s - self._counts[0].at_s > _WINDOW_S and len(self._counts) > 2:
            self._counts.popleft()
        self._states.append({one["worker"]: one["state"] for one in report["workers"]})
        self.lag_s.append(report["lag_s"])
        if at_s - self._counts[0].at_s >= _SHORT_S:
            self.rows_s.append(sum([one.rows_s for one in self.tables()]))

    @property
    def transactions_s(self) -> float:
        """Return source transactions a second."""
        first, last = self._counts[0], self._counts[-1]
        return max(0, last.transactions - first.transactions) / self._span_s(first.counted_s, last.counted_s)

    def _span_s(self, first_s: float, last_s: float) -> float:
        """Return the seconds between two writes of the daemon; after a long silence, the ones between our readings."""
        looked_s = max(self._counts[-1].at_s - self._counts[0].at_s, 1e-3)
        written_s = last_s - first_s
        return written_s if 0 < written_s < looked_s + _SHORT_S else looked_s

    def busy(self, worker: int) -> float:
        """Return the share of readings at which a worker was busy, from 0 to 1."""
        states = [states[worker] for states in self._states if worker in states]
        return sum([state != WorkerState.IDLE for state in states]) / len(states) if states else 0.0

    def states(self) -> Counter[str]:
        """Return the number of workers in each state."""
        return Counter([one["state"] for one in self.report["workers"]])

    def tables(self, order: str = "rows") -> list[TableRate]:
        """Return all tables, the ones with the highest `order` (rows or waits) or by name first."""
        first, last = self._counts[0].tables, self._counts[-1].tables
        rates = [self._rate(name, first.get(name, now), now) for name, now in last.items()]
        if order == "name":
            return sorted(rates, key=lambda one: one.name)
        rank = {"rows": lambda one: (one.rows_s, one.n_rows), "waits": lambda one: (one.waits_s, one.rows_s)}[order]
        return sorted(sorted(rates, key=lambda one: one.name), key=rank, reverse=True)

    def _rate(self, name: str, before: dict[str, Any], now: dict[str, Any]) -> TableRate:
        span_s = self._span_s(before["counted_s"], now["counted_s"])
        inserts, updates, deletes, waits = (
            max(0, now[key] - before[key]) / span_s for key in ("inserts", "updates", "deletes", "waits")
        )
        return TableRate(
            name=name,
            rows_s=inserts + updates + deletes,
            inserts_s=inserts,
            updates_s=updates,
            deletes_s=deletes,
            waits_s=waits,
            waits_for=now["waits_mostly_for"],
            lane=now["lane"],
            # As `target/catalogue/match.py` begins the reason where updates and deletes are refused or made one by one.
            is_set_for_inserts=now["lane"] == "set-based" and "inserts" in now["reason"].partition(";")[0],
            is_alone=now["is_table_exclusive"],
            n_rows=now["inserts"] + now["updates"] + now["deletes"],
        )

    def document(self) -> dict[str, Any]:
        """Return the last reading, with the figures taken from all readings, for programs."""
        return {
            **self.report,
            "transactions_s": round(self.transactions_s, 3),
            "rows_s": round(sum([one.rows_s for one in self.tables()]), 3),
            "busy": {str(one["worker"]): round(self.busy(one["worker"]), 3) for one in self.report["workers"]},
            "rates": [one._asdict() for one in self.tables()],
        }
