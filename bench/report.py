"""Results for people and for programs: tables on the terminal and a JSON document for each workload.

In go turns and their figures; out come tables and documents. A document names the machine by what it is, never by its
name or address.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from rich.table import Table

from bench.figures import applied_totals, figures
from parapply import __file__ as package_file
from parapply import __version__
from parapply.hotpath import why_not_compiled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from bench.catchup import Turn
    from bench.figures import Figures
    from bench.filling import Backlog
    from bench.options import Options, Sync
    from bench.workloads import Workload

#: Version of the document. Raised when a field changes its meaning or goes.
SCHEMA_VERSION = 3

_MB = 1 << 20
_BLANK = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One workload with one synchronous_commit, all turns taken.

    Attributes:
        at: when its servers were made, in UTC.
        facts: of machine and servers.
    """

    workload: Workload
    sync: Sync
    backlog: Backlog
    turns: list[Turn]
    at: datetime
    facts: Mapping[str, str | float]

    @property
    def is_equal(self) -> bool:
        """Return whether no turn ended with tables that differ."""
        return all(turn.is_equal is not False for turn in self.turns)

    @property
    def figures(self) -> list[Figures]:
        """The figures of every runner."""
        return figures(self.turns, self.backlog)


def machine_facts(load: float) -> dict[str, str | float]:
    """Return what the figures depend on.

    Args:
        load: mean number of running processes in the minute before.
    """
    # Not what this process runs: the daemon is started without our environment, which may choose the other twin here.
    why_interpreted = why_not_compiled(Path(package_file).parent)
    return {
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(load, 2),
        "architecture": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "parapply": __version__,
        "hot_path": f"interpreted: {why_interpreted}" if why_interpreted else "compiled",
    }


def _processor() -> str:
    """Return the processor's model; empty where the system does not report it. Source: proc_cpuinfo(5)."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def time_table(every: Sequence[Figures]) -> Table:
    """Return a table: each runner's median, best and worst turn, its rates, and how it compares."""
    grid = _grid("runner", "median", "best", "worst", "first row", "tx/s", "changes/s", "x built-in", "x ceiling")
    for one in every:
        grid.add_row(
            one.runner,
            *(_text(seconds, "{:.2f} s") for seconds in (one.median_s, one.best_s, one.worst_s, one.first_s)),
            f"{one.transactions_per_s:,.0f}",
            f"{one.changes_per_s:,.0f}",
            _text(one.times_built_in, "{:.2f}"),
            _text(one.times_ceiling, "{:.2f}"),
        )
    return grid


def cost_table(every: Sequence[Figures]) -> Table:
    """Return a table: CPU of leader, target and walsender, what of it one change takes, and memory."""
    grid = _grid(
        "runner", "leader CPU", "target CPU", "walsender CPU", "leader us/change", "target us/change",
        "target x bulk", "leader MB", "target MB",
    )  # fmt: skip
    for one in every:
        grid.add_row(
            one.runner,
            *(_text(one.cpu_s.get(role), "{:.2f} s") for role in ("leader", "target", "walsender")),
            _text(one.leader_us_per_change, "{:.2f}"),
            _text(one.target_us_per_change, "{:.2f}"),
            _text(one.times_bulk, "{:.2f}"),
            *(_megabytes(one.peak_bytes.get(role)) for role in ("leader", "target")),
        )
    return grid


def wal_table(every: Sequence[Figures]) -> Table:
    """Return a table: the target's WAL of each change, and how it compares."""
    grid = _grid("runner", "WAL bytes/change", "images bytes/change", "records/change", "x built-in without images")
    for one in every:
        if one.wal_bytes_per_change is not None:
            grid.add_row(
                one.runner,
                *(_text(value, "{:,.0f}") for value in (one.wal_bytes_per_change, one.wal_image_bytes_per_change)),
                *(_text(value, "{:.2f}") for value in (one.wal_records_per_change, one.times_built_in_wal)),
            )
    return grid


def applied_table(turns: Sequence[Turn]) -> Table:
    """Return a table: batches of all turns, how many were repeated, and how many waited."""
    grid = _grid("runner", "batches", "tx a batch", "retries", "per 100", "in order", "waited", "late keys")
    for runner, applied in applied_totals(turns).items():
        grid.add_row(
            runner,
            f"{applied.batches:,}",
            f"{applied.transactions / max(1, applied.batches):,.0f}",
            f"{applied.retries:,}",
            f"{applied.retries_per_100_batches:.2f}",
            f"{applied.in_order_batches:,}",
            f"{applied.waiting_batches:,}",
            f"{applied.late_keys:,}",
        )
    return grid


def applied_reasons(turns: Sequence[Turn]) -> list[str]:
    """Return lines: why batches were repeated, and what they, or their late keys, waited for; nothing if nothing."""
    lines = []
    for runner, applied in applied_totals(turns).items():
        for what, counts in (("repeated for", applied.retry_reasons), ("waited for", applied.waits)):
            if counts:
                lines.append(f"{runner} {what} {', '.join(f'{name}: {count}' for name, count in counts.items())}")
    return lines


def _text(value: float | None, form: str) -> str:
    return _BLANK if value is None else form.format(value)


def _megabytes(size_bytes: int | None) -> str:
    return _text(None if size_bytes is None else size_bytes / _MB, "{:,.0f}")


def _grid(first: str, *others: str) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column(first, no_wrap=True)
    for name in others:
        # Headings take two lines where the table would be wider than the terminal.
        grid.add_column(name, justify="right", vertical="bottom")
    return grid


def document(measured: Measured, options: Options) -> dict[str, Any]:
    """Return the JSON document of one workload."""
    workload = measured.workload
    totals = applied_totals(measured.turns)
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": f"catch-up, {workload.text}",
        "measured_at": measured.at.isoformat(timespec="seconds"),
        "machine": measured.facts,
        "workload": {
            "name": workload.name,
            "transactions": measured.backlog.transactions,
            "changes": measured.backlog.changes,
            "scale": options.scale,
            "clients": options.clients,
            "large_rows": options.large() if workload.has_beside else None,
            "settings": [*workload.settings, *options.settings],
            "alone": options.alone,
        },
        "rounds": options.rounds,
        "sync": measured.sync,
        "turns": [asdict(turn) for turn in measured.turns],
        "figures": {one.runner: asdict(one) for one in measured.figures},
        "applied": {
            runner: {**asdict(applied), "retries_per_100_batches": round(applied.retries_per_100_batches, 3)}
            for runner, applied in totals.items()
        },
    }
