"""Captures as a load: the same bytes each time, and no publisher beside the target.

`python -m bench.run_capture` makes the three captures of `bench/captures` again. `parapply bench --capture DIR` replays
one into a server of its own, once for each of parapply's settings and rounds.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from bench.filling import fill, load
from bench.options import Options
from bench.servers import make_stage, versions
from bench.workloads import LARGE_ROWS, WORKLOADS
from parapply.demo.errors import DemoError
from parapply.demo.interrupts import Interrupts
from parapply.demo.stage import BANK, PUBLICATION, own_environment
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.output import Output
    from parapply.demo.stage import Stage

CAPTURES: Final = Path(__file__).parent / "captures"
#: Workload and number of transactions of each capture; the tables have a scale of 1.
_MADE: Final = {"pgbench": ("tpcb", 6_000), "orders": ("foreign-keys", 6_000), "many-tables": ("many-tables", 3_000)}
_SLOT: Final = "capture"
#: Database of a replay, on the subscriber.
_SCRATCH: Final = "scratch"
_TIMEOUT_S: Final = 900
_DIFFERENT: Final = 1


def _parapply(*words: str, codes: Sequence[int] = (0,)) -> str:
    """Run the command to its end and return what it printed.

    Raises:
        DemoError: it failed.
    """
    done = subprocess.run(  # noqa: S603  our own program, no shell
        [sys.executable, "-m", "parapply", *words],
        env=own_environment(), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode not in codes:
        raise DemoError(f"`parapply {words[0]}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _capture(stage: Stage, folder: Path) -> None:
    """Capture all that the publisher has written by now."""
    ((end_lsn,),) = stage.source.execute("SELECT pg_logical_emit_message(true, 'parapply bench', '')", dbname=BANK)
    _parapply(
        "capture", str(folder), "--source", stage.source_dsn(), "--publication", PUBLICATION,
        "--kept-slot", _SLOT, "--until", str(end_lsn),
    )  # fmt: skip


def make(folder: Path, names: Sequence[str]) -> int:
    """Make captures again, in the place of the present ones, and return their bytes.

    Raises:
        DemoError: a server or a program failed.
    """
    for name in names:
        workload_name, transactions = _MADE[name]
        workload = WORKLOADS[workload_name]
        options = Options(transactions=transactions, scale=1, large_rows=LARGE_ROWS, systems=("parapply",))
        with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
            made = stage.directory / name
            fill(stage, workload, scale=1)
            _capture(stage, made)
            load(stage, workload, options)
            _capture(stage, made)
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(made, folder / name)
    return sum(path.stat().st_size for path in folder.rglob("*.capture"))


def main(folder: Path, options: Options, output: Output) -> int:
    """Replay a capture in rounds, and return the exit code: 0 if all tables were equal each time, else 1.

    Raises:
        DemoError: a server or a program failed.
    """
    output.prepare()
    groups = [
        " ".join([f"apply.workers={workers}", f"apply.commit_order={order}", f"target.synchronous_commit={sync}"])
        for workers in options.workers for order in options.orders for sync in options.syncs
    ]  # fmt: skip
    more = [word for setting in options.settings for word in ("--set", setting)]
    words = [*more, *[word for group in groups for word in ("--run", group)], "--json", "--again"]
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        rows = []
        if folder.name in _MADE:
            fill(stage, WORKLOADS[_MADE[folder.name][0]], scale=1)
            rows = ["--copy-of", stage.target.dsn(BANK)]
        stage.target.execute(f"CREATE DATABASE {_SCRATCH}")
        target = ["--target", stage.target.dsn(_SCRATCH)]
        call = ("replay", str(folder), *target, *rows, *words)
        rounds = [json.loads(_parapply(*call, codes=(0, _DIFFERENT))) for _ in range(options.rounds)]
        facts = versions(stage)
    at = datetime.now(UTC)
    figures = [
        {"settings": group, "seconds": [found["runs"][index]["seconds"] for found in rounds]}
        for index, group in enumerate(groups)
    ]
    failures = [run["failure"] for found in rounds for run in found["runs"] if run["failure"]]
    different = sorted({table for found in rounds for table in found["different_tables"]})
    for one in figures:
        output.say(f"{one['settings']}: {statistics.median(one['seconds']):.2f} s, best {min(one['seconds']):.2f}")
    output.say(f"failed: {'; '.join(failures)}" if failures else f"different: {different}" if different else "equal")
    content = {
        "benchmark": "capture", "capture": folder.name, "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts, "rounds": options.rounds, "figures": figures, "failures": failures, "different": different,
    }  # fmt: skip
    output.save(f"capture-{folder.name}-{at:%Y%m%dT%H%M%SZ}", content)
    output.print_document(content)
    return _DIFFERENT if failures or different else 0


@click.command()
@click.option("--name", "names", multiple=True, type=click.Choice(list(_MADE)), default=list(_MADE), help="Which.")
@click.option("--out", "folder", type=click.Path(path_type=Path, file_okay=False), default=CAPTURES, help="For them.")
def command(names: tuple[str, ...], folder: Path) -> None:
    """Make the captures of the benchmark again."""
    try:
        click.echo(f"{make(folder, names):,} bytes")
    except ParapplyError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    command()
