"""A capture of a mixed load: `python -m bench.capture_mixed DIR`.

pgbench writes bank transactions, orders with lines, documents and deletions at rates that change as over a day, and at
two thirds of the time a job of 80,000 rows runs beside it. The capture begins before the first row, so that a replay
needs no copy of rows from before it.

Source: PostgreSQL manual, "pgbench".
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console

from bench.options import Options
from bench.run_capture import parapply
from bench.servers import make_stage
from bench.workloads import LARGE_ROWS
from parapply.demo.errors import DemoError
from parapply.demo.stage import BANK, PUBLICATION, Interrupts, end, own_environment
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    import subprocess

    from parapply.demo.stage import Stage

_SCRIPTS: Final = Path(__file__).parent / "scripts"
#: Part of the hour's highest rate in each twelfth of the time.
_DAY: Final = (0.1, 0.2, 0.4, 0.75, 0.3, 0.1, 0.5, 1.0, 0.15, 0.15, 0.3, 0.2)
#: Twelfth in which the large job runs.
_NIGHT: Final = 8
#: Weight of each script; the rest are pgbench's own.
WEIGHTS: Final = {"order": 4, "ship": 3, "document": 2, "cleanup": 1}
_CLIENTS: Final = 4
_SLOT: Final = "capture"
_POLL_S: Final = 0.2
_ACTIVE: Final = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'capture' AND active"


def _begin(stage: Stage, folder: Path, source_dsn: str) -> subprocess.Popen[bytes]:
    """Publish an empty database, and return the capture that follows it."""
    stage.source.execute(f"CREATE DATABASE {BANK}")
    stage.source.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES", dbname=BANK)
    words = ("capture", str(folder), "--source", source_dsn, "--publication", PUBLICATION, "--kept-slot", _SLOT)
    return stage.start(
        [sys.executable, "-m", "parapply", *words], env=own_environment(), output=stage.directory / "capture.log"
    )


def _write(stage: Stage, seconds: int, rate: int, seed: int) -> None:
    """Write the load of a day, shortened."""
    env = {**stage.source.client_env(BANK), "PGOPTIONS": "-c synchronous_commit=off"}
    stage.source.run("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={_SCRIPTS / 'mixed.schema.sql'}", dbname=BANK)
    stage.source.run("pgbench", "--initialize", "--quiet", "--scale=1", dbname=BANK)
    scripts = [f"--file={_SCRIPTS / f'mixed.{name}.sql'}@{weight}" for name, weight in WEIGHTS.items()]
    each_s = max(seconds // len(_DAY), 1)
    for index, part in enumerate(_DAY):
        command = [
            str(stage.source.program("pgbench")), "--no-vacuum", f"--client={_CLIENTS}",
            f"--jobs={os.cpu_count() or 1}", f"--time={each_s}", f"--rate={max(rate * part, 1):g}",
            f"--random-seed={seed * len(_DAY) + index}",
            "--builtin=tpcb-like@4", "--builtin=simple-update@4", *scripts,
        ]  # fmt: skip
        running = stage.start(command, env=env, output=stage.directory / f"load-{index}.log")
        if index == _NIGHT:
            stage.source.run("psql", "--quiet", f"--file={_SCRIPTS / 'mixed.night.sql'}", dbname=BANK)
        if code := running.wait():
            raise DemoError(f"pgbench ended with {code}.")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seconds", type=click.IntRange(min=12), default=3600, show_default=True, help="Time of the load.")
@click.option("--rate", type=click.IntRange(min=1), default=200, show_default=True, help="Most transactions a second.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another one: another load.")
@click.option("--bindir-source", type=click.Path(path_type=Path), default=None, help="The publisher's programs.")
def command(folder: Path, seconds: int, rate: int, seed: int, bindir_source: Path | None) -> None:
    """Capture a mixed load in DIR."""
    options = Options(systems=("parapply",), large_rows=LARGE_ROWS, scale=1, bindir_source=bindir_source)
    console = Console(stderr=True)
    try:
        with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
            reading = _begin(stage, folder, stage.source_dsn())
            while stage.source.execute(_ACTIVE) == [(0,)]:
                if reading.poll() is not None:
                    raise DemoError("The capture did not begin.", hint=(stage.directory / "capture.log").read_text())
                time.sleep(_POLL_S)
            _write(stage, seconds, rate, seed)
            ((last,),) = stage.source.execute("SELECT pg_logical_emit_message(true, 'parapply bench', '')", dbname=BANK)
            end(reading)
            parapply(
                "capture", str(folder), "--source", stage.source_dsn(), "--publication", PUBLICATION,
                "--kept-slot", _SLOT, "--until", str(last),
            )  # fmt: skip
    except ParapplyError as error:
        raise click.ClickException(str(error)) from error
    console.print(f"{sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    command()
