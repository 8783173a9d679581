"""What was measured, for people and for programs: a table on the terminal and a JSON file.

In go turns; out come medians. The file names the machine by what it is, never by its name or address.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psycopg
from rich.table import Table

from bench.catchup import BUILT_IN, PARAPPLY
from parapply import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from bench.catchup import Turn, Workload

RESULTS = Path(__file__).parent / "results"


def machine_facts(postgresql_version: str, load: float) -> dict[str, str | float]:
    """Return what the figures depend on.

    Args:
        postgresql_version: of both servers.
        load: mean number of running processes in the minute before.
    """
    return {
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(load, 2),
        "architecture": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        "postgresql": postgresql_version,
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "parapply": __version__,
    }


def _processor() -> str:
    """Return the processor's model; empty where the system does not tell. Source: proc_cpuinfo(5)."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def medians_s(turns: Sequence[Turn]) -> dict[str, float]:
    """Return each runner's median seconds."""
    return {runner: median(turn.total_s for turn in turns if turn.runner == runner) for runner in (BUILT_IN, PARAPPLY)}


def summary(turns: Sequence[Turn], transactions: int) -> Table:
    """Return a table: each runner's median, its best and worst turn, its rate, and the ratio to the built-in one."""
    medians = medians_s(turns)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("runner", no_wrap=True)
    for name in ("median", "best", "worst", "first row", "per second", "as fast"):
        grid.add_column(name, justify="right", no_wrap=True)
    for runner, median_s in medians.items():
        totals = [turn.total_s for turn in turns if turn.runner == runner]
        first_s = median(turn.first_s for turn in turns if turn.runner == runner)
        figures = (median_s, min(totals), max(totals), first_s)
        rate, ratio = transactions / median_s, medians[BUILT_IN] / median_s
        grid.add_row(runner, *(f"{seconds:.2f} s" for seconds in figures), f"{rate:,.0f}", f"{ratio:.2f} x")
    return grid


def save(
    turns: Sequence[Turn], workload: Workload, transactions: int, facts: dict[str, str | float], at: datetime
) -> Path:
    """Write the JSON file and return its place.

    Args:
        turns: all of them.
        workload: what was asked for.
        transactions: what the backlog held.
        facts: of the machine.
        at: when the run began, in UTC.

    Raises:
        OSError: the file cannot be written.
    """
    medians = medians_s(turns)
    document: dict[str, Any] = {
        "benchmark": "catch-up, pgbench simple-update",
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        "workload": {**asdict(workload), "transactions": transactions},
        "turns": [asdict(turn) for turn in turns],
        "median_s": medians,
        "times_as_fast": medians[BUILT_IN] / medians[PARAPPLY],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"catch-up-{at:%Y%m%dT%H%M%SZ}-sync-{workload.sync}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path
