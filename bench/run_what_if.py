"""`python -m bench.run_what_if`: how near the report's predictions come to runs with other numbers of workers.

In go kinds of target; out comes an exit code. Only the file stays, and the logs where they are asked for.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.table import Table

from bench.disk import slow_disk
from bench.options import FAST
from bench.output import Output, write_result
from bench.report import machine_facts
from bench.servers import make_stage, versions
from bench.what_if import FROM_WORKERS, GOOD, KINDS, compare, measure
from bench.workloads import WORKLOADS
from parapply.demo.stage import Interrupts
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.what_if import Cell

    #: By the target's name its cells, and what its log says that limits.
    _Found = dict[str, tuple[list[Cell], str]]

_GOOD_PART: Final = 0.9
_NOT_GOOD: Final = 1
#: Beside kept logs: where and when they were measured.
_FACTS: Final = "measured.json"
_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option(
    "--target", "names", multiple=True, type=click.Choice(list(KINDS)), default=list(KINDS), show_default=True,
    help="Cause of the target's slowness; repeatable.",
)  # fmt: skip
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Turns of each cell; the quietest counts.",
)
@click.option(
    "--part", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Of each load."
)
@click.option("--keep", type=_DIRECTORY, metavar="DIR", help="Have the apply logs there.")
@click.option(
    "--from", "kept", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR",
    help="Measure nothing: compare the logs that --keep has left there.",
)  # fmt: skip
@click.option("--out", "directory", type=_DIRECTORY, metavar="DIR", help="For the file.  [default: bench/results]")
@click.option("--no-save", "is_unsaved", is_flag=True, help="Write no file.")
def main(  # noqa: PLR0913  one for each option
    names: tuple[str, ...],
    *,
    rounds: int,
    part: float,
    keep: Path | None,
    kept: Path | None,
    directory: Path | None,
    is_unsaved: bool,
) -> None:
    """Run the daemon with 2, 4, 8 and 16 workers, and compare with what the log of 4 says about them.

    The exit code is 0 if nine of ten cells are within 15 %, else 1.
    """
    try:
        output = Output(directory=directory, is_saved=not is_unsaved)
        sys.exit(_compared(names, kept, output) if kept else _run(names, rounds, part, output, keep))
    except ParapplyError as error:
        raise click.ClickException(str(error)) from error


def _run(names: Sequence[str], rounds: int, part: float, output: Output, keep: Path | None) -> int:
    output.prepare()
    at = datetime.now(UTC)
    facts: dict[str, str | float] = dict(machine_facts(os.getloadavg()[0]))
    found: _Found = {}
    for name in names:
        kind = KINDS[name].shortened(part)
        with (
            Interrupts() as interrupts,
            slow_disk() if kind.disk != FAST else nullcontext() as disk,
            make_stage(interrupts, kind.options, disk, is_local=WORKLOADS[kind.workload].is_local) as stage,
        ):
            facts |= versions(stage)
            output.say(f"{name}: {kind.text}")
            if disk is not None:
                disk.check(stage.target.pid)
            found[name] = measure(stage, kind, rounds=rounds, disk=disk, say=output.say, keep=keep)
    if keep:
        write_result(keep / _FACTS, {"measured_at": at.isoformat(timespec="seconds"), "machine": facts})
    return _shown(found, output, at, {"measured_at": at.isoformat(timespec="seconds"), "machine": facts})


def _compared(names: Sequence[str], kept: Path, output: Output) -> int:
    output.prepare()
    facts = json.loads((kept / _FACTS).read_bytes()) if (kept / _FACTS).is_file() else {}
    return _shown({name: compare(KINDS[name], kept) for name in names}, output, datetime.now(UTC), facts)


def _shown(found: _Found, output: Output, at: datetime, facts: dict[str, object]) -> int:
    cells = [cell for some, _ in found.values() for cell in some]
    n_good = sum(cell.is_good for cell in cells)
    output.console.print(_table(cells))
    for name, (_, verdict) in found.items():
        output.say(f"{name}, from the log of {FROM_WORKERS}: {verdict}")
    output.say(
        f"{n_good} of {len(cells)} cells within {GOOD:.0%}; the interval holds "
        f"{sum(cell.is_within for cell in cells)} of them."
    )
    content = {
        "benchmark": "what-if",
        **facts,
        "from_workers": FROM_WORKERS,
        "rounds": max(len(cell.rounds_s) for cell in cells),
        "kinds": {name: KINDS[name].text for name in found},
        "cells": [cell.document() for cell in cells],
        "good": n_good,
        "within": sum(cell.is_within for cell in cells),
        "verdicts": {name: verdict for name, (_, verdict) in found.items()},
    }
    output.save(f"whatif-{at:%Y%m%dT%H%M%SZ}", content)
    return 0 if n_good >= _GOOD_PART * len(cells) else _NOT_GOOD


def _table(cells: Sequence[Cell]) -> Table:
    table = Table(title=f"Predicted from the log of {FROM_WORKERS} workers")
    for heading in ("target", "order", "workers", "measured", "others", "predicted", "interval", "error", "limit"):
        table.add_column(heading)
    for cell in cells:
        table.add_row(
            cell.kind,
            cell.order,
            str(cell.workers),
            f"{cell.measured_s:.2f} s",
            f"{cell.others:.1f}",
            f"{cell.predicted_s:.2f} s",
            f"{cell.least_s:.2f} to {cell.most_s:.2f}",
            f"{cell.error:+.0%}{'' if cell.is_good else ' !'}",
            cell.limit,
        )
    return table


if __name__ == "__main__":
    main()
