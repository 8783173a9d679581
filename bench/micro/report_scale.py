"""`python -m bench.micro.report_scale`: time and memory of `parapply report` over logs of growing size.

In go numbers of records; for each a log is made by `python -m bench.synth`, reported by the command in a process of its
own, and removed. Out come, for each, seconds of each run, what its processes hold in memory at most, and sizes on disk,
printed and written as JSON. A second report over the same log reads no file: the difference is the conversion. With
``--kill-after`` a report is killed once so many loads are converted, all its processes at once, and the measured one
goes on from there. With ``--grow`` it is one log: a run of a million records a day, each report reads what is new.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psutil

from bench.output import write_result
from bench.processes import peak_bytes
from bench.report import machine_facts
from bench.synth.shape import LogShape
from bench.synth.write import write_logs

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESULTS: Final = Path(__file__).parents[1] / "results"
_LOOK_S: Final = 0.5
_SAID: Final = "said"
_COUNTED: Final = ("java", "python")
#: Records of a day of a log that grows, and the day of all the times in it that `bench.synth` makes.
_DAY_RECORDS: Final = 1_000_000
_MADE_DAY: Final = b"202611%02d"
_TIME_DAY: Final = b'"2026-11-%02dT'


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Cost of a command.

    Attributes:
        wall_s: from start to end.
        cpu_s: of it and all its children.
        peak_bytes: the most that all of them held at a time, pages that they share counted for each.
        peak_by_name: the most that each held (VmHWM of proc_pid_status(5)), summed over processes of one name.
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int
    peak_by_name: dict[str, int]


@click.command()
@click.option("--records", "sizes", type=click.IntRange(min=1000), multiple=True, default=[1_000_000, 20_000_000])
@click.option("--detail", type=click.Choice(["batch", "transaction"]), default="transaction", show_default=True)
@click.option("--engine", type=click.Choice(["duckdb", "spark"]), default="duckdb", show_default=True)
@click.option("--memory", default="2g", show_default=True, help="Of the engine.")
@click.option("--cores", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Where logs and reports are made.")
@click.option("--repeat/--no-repeat", "is_repeated", default=True, show_default=True, help="Report once more.")
@click.option("--kill-after", type=click.IntRange(min=1), metavar="LOADS", help="Kill one report on the way before.")
@click.option("--grow", "is_growing", is_flag=True, help="One log, of the first size, then of the next ...")
@click.option("--log", type=click.Path(path_type=Path, exists=True), help="An existing log, of that many records.")
def main(*, sizes: tuple[int, ...], scratch: Path | None, **options: Any) -> None:  # noqa: ANN401  click's options
    """Measure the report at several sizes of the log."""
    machine = machine_facts(os.getloadavg()[0])
    figures = []
    with ExitStack() as stack:
        new_folder = partial(tempfile.TemporaryDirectory, dir=scratch)
        folder = Path(stack.enter_context(new_folder()))
        for size in sizes:
            if not options["is_growing"]:
                folder = Path(stack.enter_context(new_folder()))
            figures.append(_measure(folder, size, options))
            print(figures[-1], flush=True)
    settings = {name: options[name] for name in ("engine", "memory", "cores", "detail", "is_growing")}
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    document = {"machine": {**machine, "load_after": os.getloadavg()[0]}, **settings, "figures": figures}
    print(write_result(_RESULTS / f"report-scale-{stamp}.json", document))


def _measure(folder: Path, size: int, options: dict[str, Any]) -> dict[str, Any]:
    log, out = options["log"] or folder / "log", folder / "out"
    if options["is_growing"]:
        _grow(folder, log, size, options["detail"])
    elif options["log"] is None:
        write_logs(LogShape(records=size, detail=options["detail"]), log, lambda _: None)
    report = ["report", str(log), "--out", str(out), *(
        word for name in ("engine", "memory", "cores") for word in (f"--{name}", str(options[name]))
    )]  # fmt: skip
    killed_s = _killed(folder, out, options["kill_after"], report) if options["kill_after"] else None
    first = _run(folder, *report)
    again = _run(folder, *report) if options["is_repeated"] else None
    return {
        "records": size,
        "log_bytes": _size_bytes(log),
        "parquet_bytes": _size_bytes(out / "records"),
        "page_bytes": (out / "report.html").stat().st_size,
        "killed_after_s": killed_s,
        "report_s": first.wall_s,
        "report_cpu_s": first.cpu_s,
        "peak_memory_bytes": first.peak_bytes,
        "peak_memory_by_name_bytes": first.peak_by_name,
        "report_again_s": again.wall_s if again else None,
        "report_again_cpu_s": again.cpu_s if again else None,
        "report_again_peak_memory_bytes": again.peak_bytes if again else None,
        "records_per_s": round(size / first.wall_s),
        "records_per_cpu_s": round(size / first.cpu_s),
    }


def _grow(folder: Path, log: Path, size: int, detail: str) -> None:
    """Add days to a log until it is large enough; each is the first one again, as a run of its own."""
    made = folder / "made"
    if not made.exists():
        write_logs(LogShape(records=_DAY_RECORDS, detail=detail), made, lambda _: None)
        log.mkdir()
    first_day, first_time = _MADE_DAY % 1, _TIME_DAY % 1
    for day in range(1, size // _DAY_RECORDS + 1):
        for path in made.iterdir():
            target = log / path.name.replace(first_day.decode(), (_MADE_DAY % day).decode())
            if not target.exists():
                content = path.read_bytes().replace(first_time, _TIME_DAY % day)
                target.write_bytes(content.replace(b'"run":"' + first_day, b'"run":"' + _MADE_DAY % day))


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command in a group of its own, with what it says in a file."""
    scratch = folder / "spark"
    scratch.mkdir(exist_ok=True)
    environ = {**os.environ, "SPARK_LOCAL_DIRS": str(scratch)}
    with (folder / _SAID).open("wb") as said:
        command = [sys.executable, "-m", "parapply", *arguments]
        return subprocess.Popen(command, env=environ, stdout=said, stderr=said, start_new_session=True)


def _killed(folder: Path, out: Path, n_loads: int, report: list[str]) -> float:
    """Kill a report once it has converted so many loads and begun with the next; return its seconds."""
    started_s = time.monotonic()
    with _start(folder, *report) as process:
        manifest, begun = out / "records" / "_manifest", out / "records" / "_temporary"
        while process.poll() is None and not (len(list(manifest.glob("*.json"))) >= n_loads and begun.exists()):
            time.sleep(_LOOK_S)
        if process.returncode is not None:
            raise click.ClickException(f"the report ended before {n_loads} loads: {_said(folder)}")
        os.killpg(process.pid, signal.SIGKILL)
    return round(time.monotonic() - started_s, 1)


def _run(folder: Path, *arguments: str) -> _Run:
    """Run a command to its end."""
    started_s = time.monotonic()
    process = _start(folder, *arguments)
    cpu_s: dict[int, float] = {}
    highest: dict[int, tuple[str, int]] = {}
    peak_bytes = 0
    while process.poll() is None:
        held_bytes = 0
        for pid, name, held, high, used_s in _usage(process.pid):
            held_bytes += held
            cpu_s[pid] = used_s
            # One that has ended and is not waited for yet shows nothing.
            highest[pid] = name, max(high, highest.get(pid, (name, 0))[1])
        peak_bytes = max(peak_bytes, held_bytes)
        time.sleep(_LOOK_S)
    if process.returncode:
        raise click.ClickException(f"parapply {' '.join(arguments)}: exit {process.returncode}: {_said(folder)}")
    wall_s = round(time.monotonic() - started_s, 1)
    names = {name for name, _ in highest.values()}
    by_name = {name: sum(high for other, high in highest.values() if other == name) for name in sorted(names)}
    return _Run(wall_s=wall_s, cpu_s=round(sum(cpu_s.values()), 1), peak_bytes=peak_bytes, peak_by_name=by_name)


def _usage(pid: int) -> Iterator[tuple[int, str, int, int, float]]:
    """Yield number, name, bytes, most bytes and seconds of CPU of a process and of its children.

    Of Java and Python only: what Java starts besides is for an instant a copy of Java itself, with all its memory.
    """
    try:
        process = psutil.Process(pid)
        everyone = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in everyone:
        try:
            times, name = one.cpu_times(), one.name()
            if not name.startswith(_COUNTED):
                continue
            yield one.pid, name, one.memory_info().rss, peak_bytes(one.pid), times.user + times.system
        except (psutil.NoSuchProcess, OSError):
            continue


def _said(folder: Path) -> str:
    return (folder / _SAID).read_text(errors="replace")[-2000:]


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
