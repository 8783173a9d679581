"""`python -m bench.micro.planner`: what planning costs a source transaction, compiled and interpreted, without I/O.

Each run is a process of its own (`bench/micro/planning.py`), the twins take turns, and medians are printed, so that
what drifts on the machine meets both alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

from bench.output import write_result
from bench.report import machine_facts
from parapply.hotpath import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

# The twin's name, and what makes the process take it.
_TWINS: Final = {"compiled": "require", "interpreted": "forbid"}
_PHASES: Final = ("assemble", "add", "schedule")
_COLUMNS = 140
_RUN_TIMEOUT_S = 600.0
_RESULTS: Final = Path(__file__).parents[1] / "results"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--transactions", type=click.IntRange(min=1), default=50_000, show_default=True, help="In each stream.")
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True, help="Of each twin.")
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(min=1), default=[2500, 1],
    show_default=True, help="Source transactions in a batch. May be given several times.",
)  # fmt: skip
@click.option("--save/--no-save", "is_saved", default=True, help="Write the JSON file.")
def main(*, transactions: int, runs: int, batches: tuple[int, ...], is_saved: bool) -> None:
    """Measure the CPU time of planning for each transaction and change."""
    at = datetime.now(UTC)
    facts = machine_facts(os.getloadavg()[0])
    # Every process measures a twin of its own.
    del facts["hot_path"]
    done: dict[str, list[dict[str, Any]]] = {twin: [] for twin in _TWINS}
    missing: dict[str, str] = {}
    for number in range(runs):
        for twin in _TWINS if number % 2 else reversed(_TWINS):
            if twin in missing:
                continue
            try:
                done[twin] += _run(twin, transactions, batches)
            except _TwinMissing as error:
                # Said below and in the file: a table without it must not look whole.
                missing[twin] = str(error)
    rows = _medians(done)
    console = Console(highlight=False, soft_wrap=True, width=_COLUMNS)
    console.print(f"{transactions:,} transactions a stream, medians of {runs} runs, microseconds of CPU")
    console.print(_table(rows))
    for twin, reason in missing.items():
        console.print(f"{twin}: not measured: {reason}", markup=False)
    if is_saved:
        document = {
            "benchmark": "planner: CPU time for each source transaction, no I/O",
            "measured_at": at.isoformat(timespec="seconds"),
            "machine": facts,
            "transactions": transactions,
            "runs": runs,
            "not_measured": missing,
            "median_us": rows,
        }
        path = write_result(_RESULTS / f"planner-{at:%Y%m%dT%H%M%SZ}.json", document)
        console.print(f"written: bench/{_RESULTS.name}/{path.name}")
    sys.exit(1 if missing else 0)


class _TwinMissing(Exception):
    """The process could not take the twin it was told to."""


def _run(twin: str, transactions: int, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Run one process and return what it measured."""
    command = [sys.executable, "-m", "bench.micro.planning", f"--transactions={transactions}"]
    command += [f"--batch={size}" for size in batches]
    done = subprocess.run(
        command, env={**os.environ, VARIABLE: _TWINS[twin]},
        capture_output=True, text=True, check=False, timeout=_RUN_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if VARIABLE in last:
            raise _TwinMissing(last)
        raise click.ClickException(f"the measuring process ended with {done.returncode}: {last}")
    found: list[dict[str, Any]] = json.loads(done.stdout)["measured"]
    return found


def _medians(done: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each twin, stream and batch size: microseconds a transaction and a change."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for twin, measured in done.items():
        for one in measured:
            groups.setdefault((twin, one["stream"], one["batch_transactions"]), []).append(one)
    rows = []
    for (twin, stream, size), each in groups.items():
        transactions, changes = each[0]["transactions"], each[0]["changes"]
        phases = {name: median(one[f"{name}_s"] for one in each) * 1e6 / transactions for name in _PHASES}
        # The median of the sums, not the sum of the medians: a run is slow in all phases or in none.
        total_us = median(sum(one[f"{name}_s"] for name in _PHASES) for one in each) * 1e6
        rows.append(
            {
                "twin": twin,
                "stream": stream,
                "batch_transactions": size,
                "changes_per_transaction": changes / transactions,
                **{f"{name}_us": round(us, 3) for name, us in phases.items()},
                "transaction_us": round(total_us / transactions, 3),
                "change_us": round(total_us / changes, 3),
                "batches": each[0]["batches"],
                "waiting_batches": each[0]["waiting_batches"],
                "late_keys": each[0]["late_keys"],
            }
        )
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("twin", no_wrap=True)
    grid.add_column("stream", no_wrap=True)
    for name in ("tx a batch", "changes a tx", *_PHASES, "us a tx", "us a change", "batches", "waiting", "late keys"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(
            row["twin"],
            row["stream"],
            f"{row['batch_transactions']:,}",
            f"{row['changes_per_transaction']:g}",
            *(f"{row[f'{name}_us']:.2f}" for name in _PHASES),
            f"{row['transaction_us']:.2f}",
            f"{row['change_us']:.2f}",
            f"{row['batches']:,}",
            f"{row['waiting_batches']:,}",
            f"{row['late_keys']:,}",
        )
    return grid


if __name__ == "__main__":
    main()
