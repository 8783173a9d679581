"""Runs of a replay for people and for programs."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from parapply.amounts import brief, number
from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.capture.lateness import Late
    from parapply.capture.replay import Learnt, ReplayOutcome, RunResult


class Forecast(NamedTuple):
    """A prediction of a run."""

    seconds: float
    least_s: float
    most_s: float
    limit: str
    late: Late | None  # None: nothing is said of it, as of a run with a pace


def document(outcome: ReplayOutcome, late_after_s: float, forecasts: Sequence[Forecast | None]) -> dict[str, Any]:
    """Return all results as JSON has them; times are UTC."""
    return {
        "runs": [
            {**_run(run, late_after_s), "predicted": _predicted(forecast, late_after_s) if forecast else None}
            for run, forecast in zip(outcome.runs, forecasts, strict=True)
        ],
        "learnt_from": _learnt(outcome.learnt) if outcome.learnt else None,
        "left_out": outcome.lines,
        "different_tables": outcome.different,
        "is_stopped": outcome.is_stopped,
    }


def _run(run: RunResult, late_after_s: float) -> dict[str, Any]:
    return {
        "settings": run.settings,
        "is_done": run.is_done,
        "seconds": run.seconds,
        "lost_parts": run.lost_parts,
        **_late(run.late, late_after_s),
        "limit": run.limit or None,
        "failure": run.failure or None,
        "tables": {name: {"rows": found[0], "checksum": found[1]} for name, found in sorted(run.sums.items())},
    }


def _predicted(forecast: Forecast, late_after_s: float) -> dict[str, Any]:
    times = {name: round(getattr(forecast, name), 3) for name in ("seconds", "least_s", "most_s")}
    late = _late(forecast.late, late_after_s) if forecast.late else {}
    return {**times, "limit": forecast.limit, **late}


def _late(late: Late, late_after_s: float) -> dict[str, Any]:
    over = sorted([minute for minute, late_s in late.minutes.items() if late_s > late_after_s])
    return {
        "most_late_s": late.most_s,
        "most_late_at": _at(late.most_at_us // 1_000_000) if late.most_at_us else None,
        "late_since": _at(over[0] * 60) if over else None,
        "late_minutes": len(over),
        "late_by_minute": [[_at(minute * 60), late_s] for minute, late_s in sorted(late.minutes.items())],
    }


def _learnt(learnt: Learnt) -> dict[str, Any]:
    run = learnt.run
    return {
        "settings": run.settings, "is_done": run.is_done, "seconds": run.seconds, "is_part": learnt.is_part,
        "capture_changes": learnt.arrivals.n_changes, "failure": run.failure or None,
        "trials": [
            {"settings": one.settings, "is_done": one.is_done, "seconds": one.seconds, "failure": one.failure or None}
            for one in learnt.trials
        ],
    }  # fmt: skip


def _at(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _cells(one: dict[str, Any]) -> list[str]:
    if "most_late_s" not in one:
        return ["", "", ""]
    since = f"{one['late_minutes']} min since {one['late_since']}" if one["late_since"] else "never"
    return [brief(one["most_late_s"]), one["most_late_at"] or "", since]


def _row_of_run(run: RunResult, late_after_s: float) -> list[str]:
    if not (run.is_done or run.failure or run.seconds or run.lost_parts):
        return ["not run", "", "", "", "", ""]
    n_rows = sum(found[0] for found in run.sums.values())
    equal = f"{number(n_rows)} rows" if run.is_done else "stopped" if not run.failure else "failed"
    limit = run.failure or run.limit or ("too short to say" if run.is_done else "")
    took = brief(run.seconds) + (" and more" if run.lost_parts else "")
    return [took, *_cells(_run(run, late_after_s)), equal, limit]


def _row_of_forecast(forecast: Forecast, late_after_s: float) -> list[str]:
    times = [brief(one) for one in (forecast.seconds, forecast.least_s, forecast.most_s)]
    cells = _cells(_predicted(forecast, late_after_s))
    return [f"{times[0]} ({times[1]} to {times[2]})", *cells, "predicted", forecast.limit]


def show(outcome: ReplayOutcome, late_after_s: float, forecasts: Sequence[Forecast | None], *, as_json: bool) -> None:
    """Print the results: since when more than some seconds were missing, and predictions, as far as there are any."""
    if as_json:
        click.echo(json.dumps(document(outcome, late_after_s, forecasts), indent=2))
        return
    from rich.console import Console  # noqa: PLC0415  a tenth of a second, which --json need not wait for
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    titles = ["took", "most late", "at", f"over {brief(late_after_s)}", "tables", "limited by"]
    table = Table("settings", *titles, box=None)
    for run, forecast in zip(outcome.runs, forecasts, strict=True):
        rows = [_row_of_run(run, late_after_s), *([_row_of_forecast(forecast, late_after_s)] if forecast else [])]
        for name, row in zip((run.settings, ""), rows, strict=False):
            table.add_row(*[Text(cell) for cell in (name, *row)])
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if outcome.learnt is not None:
        _show_learnt(outcome.learnt)
    for run in outcome.runs:
        if run.lost_parts and run.is_done:
            click.echo(
                f"{printable(run.settings)} was killed, and took longer than is known: --again measures all of it"
            )
    for line in outcome.lines:
        click.echo(f"left out: {line}")
    if outcome.different:
        click.echo(f"different after the runs: {printable(', '.join(outcome.different))}")
    elif len([run for run in outcome.runs if run.is_done]) > 1:
        click.echo("all tables are equal after all runs")


def _show_learnt(learnt: Learnt) -> None:
    run, of_changes = learnt.run, f"{number(learnt.arrivals.n_changes)} changes"
    if run.failure:
        click.echo(f"learning from {printable(run.settings)} failed: {run.failure}")
    elif learnt.is_part:
        click.echo(
            f"predicted from the first part of the capture with {printable(run.settings)}: all {of_changes} are taken"
            " to be like it"
        )
    for one in learnt.trials:
        said = f"failed: {one.failure}" if one.failure else f"took {brief(one.seconds)}"
        click.echo(f"a trial of its first part with {printable(one.settings)} {said}")
