"""Errors of predictions from a capture: `python -m bench.run_predictions CAPTURE`, for several targets.

In: a capture that begins before its first row. One replay with the first settings on each target and short trials of a
part with settings of their own predict all others, which are then replayed there. Out: a table of measured and
predicted seconds, and a file.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import click
from rich.table import Table

from bench.disk import slow_disk
from bench.options import FAST, Disk, Options
from bench.output import Output
from bench.report import machine_facts
from bench.run_capture import parapply
from bench.servers import make_stage, placed_on_one, versions
from bench.what_if import GOOD
from bench.workloads import LARGE_ROWS
from parapply.demo.stage import Interrupts
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Settings of the replay that predicts, and of the predicted ones.
_LEARNT: Final = "apply.workers=4"
_OTHERS: Final = (
    "apply.workers=2",
    "apply.workers=8",
    "apply.workers=4 apply.commit_order=relaxed",
    "apply.workers=8 apply.commit_order=relaxed",
    "apply.workers=4 apply.max_batch_transactions=500",
)
_DISKS: Final = {"fast": FAST, "slow reads": Disk(read_us=150), "slow flushes": Disk(sync_us=8_000), "one core": FAST}
_SCRATCH: Final = "scratch"
_GOOD_PART: Final = 0.9
_NOT_GOOD: Final = 1


@contextmanager
def _target(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the connection string of an empty database on a target of that kind, and the servers' versions."""
    disk = _DISKS[name]
    options = Options(systems=("parapply",), large_rows=LARGE_ROWS, scale=1)
    with (
        Interrupts() as interrupts,
        slow_disk() if disk != FAST else nullcontext() as slow,
        make_stage(interrupts, options, slow) as stage,
        placed_on_one(stage) if name == "one core" else nullcontext(),
        slow.slowed(disk) if slow is not None else nullcontext(),
    ):
        stage.target.execute(f"CREATE DATABASE {_SCRATCH}")
        yield stage.target.dsn(_SCRATCH), versions(stage)


def _measured(
    capture: Path, dsn: str, log: Path, rounds: int, set_: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Predict and replay, and return `cells` and the trials.

    Raises:
        DemoError: a replay failed, or its tables differ.
    """
    words = [word for one in (_LEARNT, *_OTHERS) for word in ("--run", one)]
    call = ("replay", str(capture), "--target", dsn, *[w for one in set_ for w in ("--set", one)], *words, "--json")
    shown = json.loads(parapply(*call, "--predict", str(log)))
    found = [json.loads(parapply(*call, "--again"))["runs"] for _ in range(rounds)]
    return cells(shown["runs"], found), shown["learnt_from"]["trials"]


def cells(predicted: Sequence[dict[str, Any]], found: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a cell for each of the settings; the first ones, which are not predicted, show how much runs differ.

    Args:
        predicted: runs as a replay with --predict prints them.
        found: the same of each replay without.
    """
    judged = []
    for index, run in enumerate(predicted):
        seconds = [one[index]["seconds"] for one in found]
        said = run["predicted"] or dict.fromkeys(("seconds", "least_s", "most_s"), run["seconds"]) | {"limit": ""}
        middle = statistics.median(seconds)
        error = said["seconds"] / middle - 1
        judged.append(
            {
                "settings": run["settings"], "is_learnt_from": not index, "seconds": seconds, "predicted": said,
                "error": error, "is_good": abs(error) <= GOOD, "is_within": said["least_s"] <= middle <= said["most_s"],
            }
        )  # fmt: skip
    return judged


def _table(targets: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table("target", "settings", "measured s", "predicted s", "interval", "error", "limit", box=None)
    for name, judged in targets.items():
        for cell in judged:
            said = cell["predicted"]
            is_first = cell["is_learnt_from"]
            interval = "" if is_first else f"{said['least_s']:.2f} to {said['most_s']:.2f}"
            error = f"{cell['error']:+.0%}{'' if cell['is_good'] or is_first else ' !'}"
            measured = ", ".join([f"{one:.2f}" for one in cell["seconds"]])
            table.add_row(name, cell["settings"], measured, f"{said['seconds']:.2f}", interval, error, said["limit"])
    return table


@click.command()
@click.argument("capture", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--target", "names", multiple=True, type=click.Choice(list(_DISKS)), default=list(_DISKS), help="Which.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Replays of each; the median.")
@click.option("--set", "set_", multiple=True, metavar="KEY=VALUE", help="A setting of all replays.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Keep the logs there.")
@click.option("--out", "directory", type=click.Path(path_type=Path, file_okay=False), help="For the file.")
@click.option("--no-save", "is_unsaved", is_flag=True, help="Write no file.")
def command(  # noqa: PLR0913  one for each option
    capture: Path, names: tuple[str, ...], *, rounds: int, set_: tuple[str, ...], keep: Path | None,
    directory: Path | None, is_unsaved: bool,
) -> None:  # fmt: skip
    """Predict replays of CAPTURE from one on each target, and compare.

    The exit code is 0 if nine of ten predictions are within 15 %, else 1.
    """
    output = Output(directory=directory, is_saved=not is_unsaved)
    at = datetime.now(UTC)
    facts: dict[str, object] = {"machine": machine_facts(os.getloadavg()[0])}
    targets: dict[str, list[dict[str, Any]]] = {}
    trials: dict[str, list[dict[str, Any]]] = {}
    try:
        output.prepare()
        for name in names:
            with _target(name) as (dsn, found), TemporaryDirectory(prefix="parapply-predictions-") as log:
                facts["servers"] = found
                folder = (keep or Path(log)) / name.replace(" ", "-")
                targets[name], trials[name] = _measured(capture, dsn, folder, rounds, set_)
    except ParapplyError as error:
        raise click.ClickException(str(error)) from error
    output.console.print(_table(targets))
    for name, some in trials.items():
        tried = ", ".join([f"{one['settings']} {one['seconds']:.1f} s" for one in some])
        output.say(f"{name}, trials of a part: {tried}")
    judged = [cell for each in targets.values() for cell in each if not cell["is_learnt_from"]]
    n_good, n_within = (sum(cell[key] for cell in judged) for key in ("is_good", "is_within"))
    output.say(f"{n_good} of {len(judged)} within {GOOD:.0%}; the interval holds {n_within} of them.")
    content = {
        "schema_version": 1, "benchmark": "predictions from a capture", "measured_at": at.isoformat(timespec="seconds"),
        **facts, "rounds": rounds, "targets": targets, "trials": trials, "good": n_good, "within": n_within,
    }  # fmt: skip
    output.save(f"predictions-{at:%Y%m%dT%H%M%SZ}", content)
    sys.exit(0 if n_good >= _GOOD_PART * len(judged) else _NOT_GOOD)


if __name__ == "__main__":
    command()
