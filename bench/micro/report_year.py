"""Cost of a new day for `parapply report` after a year of many slots: `python -m bench.micro.report_year`.

In go numbers of slots, days and batches; a log is made with a file for each slot and day, all days equal but for their
times. The command runs in a separate process over the last day alone, over the days before it, and over the same
folder once more when the last day has come. Out come seconds and CPU of each with DuckDB, printed and written as JSON.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click

from bench.output import write_result
from bench.report import machine_facts
from bench.synth.shape import LogShape
from bench.synth.write import write_file

_RESULTS: Final = Path(__file__).parents[1] / "results"
_DAY_S: Final = 86_400.0
#: Slot and first day of all that `bench.synth` makes.
_MADE: Final = LogShape(records=1, duration_s=_DAY_S)
_MADE_DAY: Final = date(2026, 11, 1)


@click.command()
@click.option("--slots", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--days", type=click.IntRange(min=1), default=365, show_default=True, help="Before the new one.")
@click.option("--batches", type=click.IntRange(min=1), default=48, show_default=True, help="Of a slot's day.")
@click.option("--memory", default="2g", show_default=True)
@click.option("--cores", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="New days, one by one.")
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Folder for logs and reports.")
def main(*, slots: int, days: int, batches: int, repeat: int, scratch: Path | None, **options: Any) -> None:  # noqa: ANN401  click's options
    """Measure the report of a new day with and without a year before it."""
    machine = machine_facts(os.getloadavg()[0])
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        made = _day(folder, batches)
        new_days = [_MADE_DAY + timedelta(days=days + number) for number in range(repeat)]
        alone = []
        for number, day in enumerate(new_days):
            _add(made, folder / f"alone-{number}", slots, day)
            alone.append(_run(folder / f"alone-{number}", folder / f"out-{number}", options))
            _say("the day alone", alone[-1])
        for number in range(days):
            _add(made, folder / "log", slots, _MADE_DAY + timedelta(days=number))
        before = _run(folder / "log", folder / "out", options)
        _say("all days before", before)
        after = []
        for day in new_days:
            _add(made, folder / "log", slots, day)
            after.append(_run(folder / "log", folder / "out", options))
            _say("the new day", after[-1])
        records = folder / "out" / "records"
        figures = {
            "log_bytes": sum(path.stat().st_size for path in (folder / "log").iterdir()),
            "log_files": len(list((folder / "log").iterdir())),
            "parquet_bytes": sum(path.stat().st_size for path in records.rglob("*.parquet")),
            "parquet_files": len(list(records.rglob("*.parquet"))),
            "page_bytes": (folder / "out" / "report.html").stat().st_size,
        }
    least = [min(one["cpu_s"] for one in runs) for runs in (alone, after)]
    print(f"the new day after {days} days takes {least[1] / least[0]:.2f} times the CPU of the day alone")
    shape = {"slots": slots, "days_before": days, "batches_of_a_slots_day": batches}
    document = {
        "machine": {**machine, "load_after": os.getloadavg()[0]}, **options, **shape, **figures,
        "day_alone": alone, "days_before_it": before, "new_day": after, "cpu_ratio": round(least[1] / least[0], 2),
    }  # fmt: skip
    print(write_result(_RESULTS / f"report-year-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json", document))


def _day(folder: Path, batches: int) -> bytes:
    """Return the lines of a slot's day."""
    shape = LogShape(records=batches, duration_s=_DAY_S, file_records=batches)
    made = folder / "made"
    made.mkdir()
    write_file(shape, made, 0)
    (path,) = made.iterdir()
    return path.read_bytes()


def _add(made: bytes, log: Path, slots: int, day: date) -> None:
    """Add a day of all slots, each day as a separate run."""
    log.mkdir(exist_ok=True)
    dated = made.replace(f'"{_MADE_DAY}T'.encode(), f'"{day}T'.encode())
    dated = dated.replace(f'"run":"{_MADE_DAY:%Y%m%d}'.encode(), f'"run":"{day:%Y%m%d}'.encode())
    for number in range(slots):
        slot = f"slot_{number:03}"
        lines = dated.replace(f'"slot":"{_MADE.slot}"'.encode(), f'"slot":"{slot}"'.encode())
        (log / f"apply-{slot}-{day:%Y%m%d}T000000Z-1-0.jsonl").write_bytes(lines)


def _run(log: Path, out: Path, options: dict[str, Any]) -> dict[str, float]:
    """Run the command to its end and return its cost."""
    words = [word for name in ("memory", "cores") for word in (f"--{name}", str(options[name]))]
    # A prediction takes seconds for each slot, the same for any day.
    words += ["--out", str(out), "--window", "24", "--no-what-if", "--engine", "duckdb"]
    command = [sys.executable, "-m", "parapply", "report", str(log), *words]
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-2000:]}")
    wall_s, usage = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2)}


def _say(what: str, cost: dict[str, float]) -> None:
    print(f"{what}: {cost['wall_s']:.1f} s, {cost['cpu_s']:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
