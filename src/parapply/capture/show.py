"""Runs of a replay for people and for programs."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from parapply.amounts import brief, number
from parapply.printable import printable

if TYPE_CHECKING:
    from parapply.capture.replay import ReplayOutcome, RunResult


def document(outcome: ReplayOutcome, late_after_s: float) -> dict[str, Any]:
    """Return all results as JSON has them; times are UTC."""
    return {
        "runs": [_run(run, late_after_s) for run in outcome.runs],
        "left_out": outcome.lines,
        "different_tables": outcome.different,
        "is_stopped": outcome.is_stopped,
    }


def _run(run: RunResult, late_after_s: float) -> dict[str, Any]:
    late = run.late
    over = sorted([minute for minute, late_s in late.minutes.items() if late_s > late_after_s])
    return {
        "settings": run.settings,
        "is_done": run.is_done,
        "seconds": run.seconds,
        "most_late_s": late.most_s,
        "most_late_at": _at(late.most_at_us // 1_000_000) if late.most_at_us else None,
        "late_since": _at(over[0] * 60) if over else None,
        "late_minutes": len(over),
        "limit": run.limit or None,
        "failure": run.failure or None,
        "tables": {name: {"rows": found[0], "checksum": found[1]} for name, found in sorted(run.sums.items())},
        "late_by_minute": [[_at(minute * 60), late_s] for minute, late_s in sorted(late.minutes.items())],
    }


def _at(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def show(outcome: ReplayOutcome, late_after_s: float, *, as_json: bool) -> None:
    """Print the results."""
    if as_json:
        click.echo(json.dumps(document(outcome, late_after_s), indent=2))
        return
    from rich.console import Console  # noqa: PLC0415  a tenth of a second, which --json need not wait for
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("settings", "took", "most late", "at", f"over {brief(late_after_s)}", "tables", "limit", box=None)
    for run in outcome.runs:
        one = _run(run, late_after_s)
        n_rows = sum(found[0] for found in run.sums.values())
        since = f"{one['late_minutes']} min since {one['late_since']}" if one["late_since"] else "never"
        equal = f"{number(n_rows)} rows" if run.is_done else "stopped" if not run.failure else "failed"
        cells = (
            run.settings, brief(run.seconds), brief(run.late.most_s), one["most_late_at"] or "", since, equal,
            run.failure or run.limit or "too short to say",
        )  # fmt: skip
        table.add_row(*[Text(cell) for cell in cells])
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for line in outcome.lines:
        click.echo(f"left out: {line}")
    if outcome.different:
        click.echo(f"different after the runs: {printable(', '.join(outcome.different))}")
    elif len([run for run in outcome.runs if run.is_done]) > 1:
        click.echo("all tables are equal after all runs")
