"""Operators for hours: `python -m tests.operators --minutes 60`, or `make faults OPERATORS=1`."""

from __future__ import annotations

import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from parapply import __version__
from tests.operators.machines import MACHINES
from tests.operators.search import n_steps
from tests.operators.turns import Done, Options, end_with_parent, run


@click.command()
@click.option("--minutes", default=60.0, show_default=True, help="How long; 0: one turn of each machine.")
@click.option("--steps", "most_steps", default=0, help="End after this number of steps.")
@click.option("--seed", type=int, help="Of the first turn; fresh when left out. Alone: one turn.")
@click.option("--versions", default="", help="Such as 18,15; all that are found.")
@click.option("--machine", "machines", multiple=True, type=click.Choice(list(MACHINES)), help="Only this; repeatable.")
@click.option("--length", default=25, show_default=True, help="Steps of an example.")
@click.option("--without", multiple=True, help="A rule that is left out; repeatable.")
@click.option(
    "--without-tables", multiple=True, help="Left out: a family of tables, `origin` policies, pausing `twice`."
)
@click.option("--only", multiple=True, help="The only rules that are done; repeatable.")
@click.option(
    "--shrink", "shrink_s", default=120.0, show_default=True, help="Seconds to make a failing script shorter."
)
@click.option("--go-on", is_flag=True, help="Go on with other seeds after something was found.")
@click.option("--found", type=click.Path(path_type=Path), help="Append what is found to this file.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the counts here.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes, each with its servers.")
def main(*, json_path: Path | None, jobs: int, **given: Any) -> None:  # noqa: ANN401  click's options
    """Do what operators do, in any order, and look whether both sides are equal. Ends with 1 if something was found."""
    options, began_s = Options(**given), time.monotonic()
    if jobs == 1:
        done = run(options)
    else:
        # A forked process would share the line to the origin of its daemons.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent) as pool:
            done = sum(pool.map(run, options.shared(jobs)), Done())
    took_s = time.monotonic() - began_s
    _print(done, took_s)
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(_as_json(done, took_s, jobs)), indent=1))
    sys.exit(1 if done.n_found else 0)


def _as_json(done: Done, took_s: float, jobs: int) -> dict[str, object]:
    return {
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "parapply": __version__, "python": platform.python_version(),
        "versions": done.majors, "jobs": jobs, "minutes": round(took_s / 60, 1), "steps": n_steps(done.counts),
        "found": done.n_found, "counts": dict(sorted(done.counts.items())),
    }  # fmt: skip


def _print(done: Done, took_s: float) -> None:
    for name, count in sorted(done.counts.items()):
        click.echo(f"{count:8,} {name}")
    rate = n_steps(done.counts) / max(took_s, 1e-3)
    click.echo(f"{n_steps(done.counts):,} steps in {took_s:.0f} s ({rate:.1f} a second); found: {done.n_found}")


if __name__ == "__main__":
    main()
