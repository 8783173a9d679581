"""`python -m bench.micro.report_follow`: what a new file costs `parapply report --follow`, by how much there is.

In go numbers of days; for each a log with a batch a minute and a file an hour is made as `bench.synth` does, and
converted but for its last files. These come one by one then. Out come, for each, the CPU time and the seconds that one
took (medians), how many files of Parquet and entries of the manifest there were, and the bytes of the process, printed
and written as JSON.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click

from bench.output import write_result
from bench.processes import peak_bytes
from bench.report import machine_facts
from bench.synth.shape import LogShape
from bench.synth.write import write_logs
from parapply.analysis.duck import DuckEngine
from parapply.analysis.job import ReportRequest, checked_store, convert, show
from parapply.analysis.progress import Silent

_RESULTS: Final = Path(__file__).parents[1] / "results"
_MINUTES: Final = 1440
_WINDOW: Final = timedelta(hours=24)


@click.command()
@click.option("--days", "lengths", type=click.IntRange(min=1), multiple=True, default=[1, 30, 365])
@click.option(
    "--triggers", type=click.IntRange(min=1), default=9, show_default=True, help="Files that come one by one."
)
@click.option("--memory", default="1g", show_default=True)
@click.option("--cores", type=click.IntRange(min=1), default=2, show_default=True)
def main(*, lengths: tuple[int, ...], triggers: int, memory: str, cores: int) -> None:
    """Measure a trigger of --follow after so many days."""
    machine = machine_facts(os.getloadavg()[0])
    figures = []
    for days in lengths:
        with tempfile.TemporaryDirectory() as folder, closing(DuckEngine(memory, cores)) as engine:
            figures.append(_measure(engine, Path(folder), days, triggers))
        print(figures[-1], flush=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    document = {"machine": machine, "memory": memory, "cores": cores, "window_h": 24, "figures": figures}
    print(write_result(_RESULTS / f"report-follow-{stamp}.json", document))


def _measure(engine: DuckEngine, folder: Path, days: int, triggers: int) -> dict[str, Any]:
    log = folder / "log"
    shape = LogShape(records=days * _MINUTES, duration_s=days * 86_400.0, file_records=60)
    write_logs(shape, log, lambda _: None, processes=1)
    last = sorted(log.glob("*.jsonl"))[-triggers:]
    for path in last:
        path.rename(folder / path.name)
    request = ReportRequest(log=str(log), out=str(folder / "out"), window=_WINDOW)
    store = checked_store(engine, request)
    began_s = time.process_time()
    convert(engine, request, Silent(), store)
    show(engine, request, Silent(), new_files=1, store=store)
    first_s = time.process_time() - began_s
    taken = []
    outcome = None
    for path in last:
        (folder / path.name).rename(path)
        began = time.process_time(), time.monotonic()
        convert(engine, request, Silent(), store)
        outcome = show(engine, request, Silent(), new_files=1, store=store)
        store.compact()
        taken.append((time.process_time() - began[0], time.monotonic() - began[1]))
    records = folder / "out" / "records"
    return {
        "days": days,
        "records": outcome.records if outcome else 0,
        "all_before_cpu_s": round(first_s, 2),
        "trigger_cpu_s": round(statistics.median(cpu_s for cpu_s, _ in taken), 3),
        "trigger_s": round(statistics.median(wall_s for _, wall_s in taken), 3),
        "parquet_files": len(list(records.rglob("*.parquet"))),
        "manifest_entries": len(list((records / "_manifest").glob("*.json"))),
        "peak_memory_bytes": peak_bytes(os.getpid()),
    }


if __name__ == "__main__":
    main()
