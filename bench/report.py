"""What was measured, for people and for programs: tables on the terminal and a JSON file.

In go turns; out come medians and sums. The file names the machine by what it is, never by its name or address.
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

from bench.applied import total
from bench.catchup import BUILT_IN
from parapply import __file__ as package_file
from parapply import __version__
from parapply.hotpath import why_not_compiled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from bench.applied import Applied
    from bench.catchup import Options, Turn
    from bench.workloads import Workload

RESULTS = Path(__file__).parent / "results"


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
    """Return the processor's model; empty where the system does not tell. Source: proc_cpuinfo(5)."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def medians_s(turns: Sequence[Turn]) -> dict[str, float]:
    """Return each runner's median seconds, the built-in subscription first."""
    names = [BUILT_IN, *sorted({turn.runner for turn in turns} - {BUILT_IN})]
    return {name: median(turn.total_s for turn in turns if turn.runner == name) for name in names}


def summary(turns: Sequence[Turn], transactions: int) -> Table:
    """Return a table: each runner's median, its best and worst turn, its rate, and the ratio to the built-in one."""
    medians = medians_s(turns)
    grid = _grid("runner", "median", "best", "worst", "first row", "per second", "as fast")
    for runner, median_s in medians.items():
        totals = [turn.total_s for turn in turns if turn.runner == runner]
        first_s = median(turn.first_s for turn in turns if turn.runner == runner)
        figures = (median_s, min(totals), max(totals), first_s)
        rate, ratio = transactions / median_s, medians[BUILT_IN] / median_s
        grid.add_row(runner, *(f"{seconds:.2f} s" for seconds in figures), f"{rate:,.0f}", f"{ratio:.2f} x")
    return grid


def applied_totals(turns: Sequence[Turn]) -> dict[str, Applied]:
    """Return what each parapply did, all its turns together."""
    by_runner: dict[str, list[Applied]] = {}
    for turn in turns:
        if turn.applied is not None:
            by_runner.setdefault(turn.runner, []).append(turn.applied)
    return {runner: total(each) for runner, each in sorted(by_runner.items())}


def applied_summary(turns: Sequence[Turn]) -> Table:
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


def _grid(first: str, *others: str) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column(first, no_wrap=True)
    for name in others:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def save(  # noqa: PLR0913  one for each part of the document
    turns: Sequence[Turn],
    workload: Workload,
    options: Options,
    *,
    transactions: int,
    facts: Mapping[str, str | float],
    at: datetime,
) -> Path:
    """Write the JSON file and return its place.

    Args:
        turns: all of them.
        workload: what was drained.
        options: what was asked for.
        transactions: what the backlog held.
        facts: of machine and servers.
        at: when the run began, in UTC.

    Raises:
        OSError: the file cannot be written.
    """
    medians = medians_s(turns)
    totals = applied_totals(turns)
    document: dict[str, Any] = {
        "benchmark": f"catch-up, {workload.text}",
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        "workload": {
            "name": workload.name,
            **asdict(options),
            "transactions": transactions,
            "settings": [*workload.settings, *options.settings],
        },
        "turns": [asdict(turn) for turn in turns],
        "median_s": medians,
        "times_as_fast": {runner: medians[BUILT_IN] / seconds for runner, seconds in medians.items()},
        "applied": {runner: asdict(applied) for runner, applied in totals.items()},
        "retries_per_100_batches": {
            runner: round(applied.retries_per_100_batches, 3) for runner, applied in totals.items()
        },
    }
    return write_result(f"catch-up-{workload.name}-{at:%Y%m%dT%H%M%SZ}-sync-{options.sync}", document)


def write_result(name: str, document: Mapping[str, Any]) -> Path:
    """Write a JSON file among the results and return its place.

    Raises:
        OSError: it cannot be written.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path
