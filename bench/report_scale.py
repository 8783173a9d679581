"""`python -m bench.report_scale`: time and memory of `parapply report` over logs of growing size.

In go numbers of records; for each a log is made by `parapply synth-log`, reported by the command in a process of its
own, and removed. Out come, for each, seconds of each run, the peak of what all its processes hold in memory, and sizes
on disk, printed and written as JSON. A second report over the same log reads no file: the difference is the conversion.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psutil  # type: ignore[import-untyped]  # no stubs are published with it

from parapply.bench.output import write_result
from parapply.bench.report import machine_facts

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESULTS: Final = Path(__file__).parent / "results"
_LOOK_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a command took: seconds, CPU of it and all its children, and the most bytes that they held at a time."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


@click.command()
@click.option("--records", "sizes", type=click.IntRange(min=1000), multiple=True, default=[1_000_000, 20_000_000])
@click.option("--detail", type=click.Choice(["batch", "transaction"]), default="transaction", show_default=True)
@click.option("--memory", default="2g", show_default=True, help="Of Java.")
@click.option("--cores", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Where logs and reports are made.")
@click.option("--repeat/--no-repeat", "is_repeated", default=True, show_default=True, help="Report once more.")
@click.option("--log", type=click.Path(path_type=Path, exists=True), help="A log that is there, of that many records.")
def main(*, sizes: tuple[int, ...], scratch: Path | None, **options: Any) -> None:  # noqa: ANN401  click's options
    """Measure the report at several sizes of the log."""
    machine = machine_facts(os.getloadavg()[0])
    figures = []
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            figures.append(_measure(Path(folder), size, options))
        print(figures[-1], flush=True)
    settings = {name: options[name] for name in ("memory", "cores", "detail")}
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    document = {"machine": {**machine, "load_after": os.getloadavg()[0]}, **settings, "figures": figures}
    print(write_result(_RESULTS / f"report-scale-{stamp}.json", document))


def _measure(folder: Path, size: int, options: dict[str, Any]) -> dict[str, Any]:
    log, out = options["log"] or folder / "log", folder / "out"
    if options["log"] is None:
        _run(folder, "synth-log", "--out", str(log), "--records", str(size), "--detail", options["detail"])
    report = ["report", str(log), "--out", str(out), "--memory", options["memory"], "--cores", str(options["cores"])]
    first = _run(folder, *report)
    again = _run(folder, *report) if options["is_repeated"] else None
    return {
        "records": size,
        "log_bytes": _size_bytes(log),
        "parquet_bytes": _size_bytes(out / "records"),
        "page_bytes": (out / "report.html").stat().st_size,
        "report_s": first.wall_s,
        "report_cpu_s": first.cpu_s,
        "peak_memory_bytes": first.peak_bytes,
        "report_again_s": again.wall_s if again else None,
        "report_again_cpu_s": again.cpu_s if again else None,
        "records_per_s": round(size / first.wall_s),
    }


def _run(folder: Path, *arguments: str) -> _Run:
    """Run a command to its end."""
    scratch = folder / "spark"
    scratch.mkdir(exist_ok=True)
    environ = {**os.environ, "SPARK_LOCAL_DIRS": str(scratch)}
    started_s = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "parapply", *arguments], env=environ, stderr=subprocess.DEVNULL)
    cpu_s: dict[int, float] = {}
    peak_bytes = 0
    while process.poll() is None:
        held_bytes = 0
        for pid, held, used_s in _usage(process.pid):
            held_bytes += held
            cpu_s[pid] = used_s
        peak_bytes = max(peak_bytes, held_bytes)
        time.sleep(_LOOK_S)
    if process.returncode:
        raise click.ClickException(f"parapply {' '.join(arguments)}: exit {process.returncode}")
    wall_s = round(time.monotonic() - started_s, 1)
    return _Run(wall_s=wall_s, cpu_s=round(sum(cpu_s.values()), 1), peak_bytes=peak_bytes)


def _usage(pid: int) -> Iterator[tuple[int, int, float]]:
    """Yield the number, bytes and seconds of CPU of a process and of each of its children."""
    try:
        process = psutil.Process(pid)
        everyone = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in everyone:
        try:
            times = one.cpu_times()
            yield one.pid, one.memory_info().rss, times.user + times.system
        except psutil.NoSuchProcess:
            continue


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
