"""`python -m bench.report_scale`: time and memory of `parapply report` over logs of growing size.

In go numbers of records; for each a log is made by `parapply synth-log`, reported by the command in a process of its
own, and removed. Out come, for each, seconds of each run, the peak of what all its processes hold in memory, and sizes
on disk, printed and written as JSON. A second report over the same log reads no file: the difference is the conversion.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import psutil  # type: ignore[import-untyped]  # no stubs are published with it

from parapply.bench.output import write_result
from parapply.bench.report import machine_facts

_RESULTS: Final = Path(__file__).parent / "results"
_LOOK_S: Final = 0.5


@click.command()
@click.option("--records", "sizes", type=click.IntRange(min=1000), multiple=True, default=[1_000_000, 20_000_000])
@click.option("--detail", type=click.Choice(["batch", "transaction"]), default="transaction", show_default=True)
@click.option("--memory", default="2g", show_default=True, help="Of Java.")
@click.option("--cores", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Where logs and reports are made.")
@click.option("--repeat/--no-repeat", "is_repeated", default=True, show_default=True, help="Report once more.")
def main(  # noqa: PLR0913, PLR0917  one parameter for each option
    sizes: tuple[int, ...],
    detail: str,
    memory: str,
    cores: int,
    scratch: Path | None,
    is_repeated: bool,  # noqa: FBT001
) -> None:
    """Measure the report at several sizes of the log."""
    machine = machine_facts(os.getloadavg()[0])
    figures = []
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            figures.append(
                _measure(Path(folder), size, detail, ["--memory", memory, "--cores", str(cores)], is_repeated)
            )
        print(figures[-1], flush=True)
    document = {"machine": machine, "memory": memory, "cores": cores, "detail": detail, "figures": figures}
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    print(write_result(_RESULTS / f"report-scale-{stamp}.json", document))


def _measure(folder: Path, size: int, detail: str, options: list[str], is_repeated: bool) -> dict[str, Any]:  # noqa: FBT001
    log, out = folder / "log", folder / "out"
    made_s, _ = _run("synth-log", "--out", str(log), "--records", str(size), "--detail", detail)
    log_bytes = _size_bytes(log)
    environ_scratch = folder / "spark"
    first_s, peak_bytes = _run("report", str(log), "--out", str(out), *options, scratch=environ_scratch)
    again_s = _run("report", str(log), "--out", str(out), *options, scratch=environ_scratch)[0] if is_repeated else None
    return {
        "records": size,
        "log_bytes": log_bytes,
        "parquet_bytes": _size_bytes(out / "records"),
        "page_bytes": (out / "report.html").stat().st_size,
        "synth_log_s": made_s,
        "report_s": first_s,
        "report_again_s": again_s,
        "peak_memory_bytes": peak_bytes,
        "records_per_s": round(size / first_s),
    }


def _run(*arguments: str, scratch: Path | None = None) -> tuple[float, int]:
    """Run a command to its end; return seconds, and the most bytes that it and its children held at a time."""
    environ = dict(os.environ)
    if scratch is not None:
        scratch.mkdir(exist_ok=True)
        environ["SPARK_LOCAL_DIRS"] = str(scratch)
    started_s = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "parapply", *arguments], env=environ, stderr=subprocess.DEVNULL)
    peak_bytes = 0
    ended = threading.Event()

    def look() -> None:
        nonlocal peak_bytes
        while not ended.wait(_LOOK_S):
            peak_bytes = max(peak_bytes, _held_bytes(process.pid))

    watch = threading.Thread(target=look, name="memory", daemon=True)
    watch.start()
    try:
        code = process.wait()
    finally:
        ended.set()
        watch.join()
    if code:
        raise click.ClickException(f"parapply {' '.join(arguments)}: exit {code}")
    return round(time.monotonic() - started_s, 1), peak_bytes


def _held_bytes(pid: int) -> int:
    held = 0
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            try:
                held += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        return held
    return held


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    if shutil.which("java") is None:
        print("no java on the PATH: the report looks elsewhere, see docs/REPORT.md", file=sys.stderr)
    main()
