"""Operators for hours: `python -m tests.operators --minutes 60`, or `make faults OPERATORS=1`."""

from __future__ import annotations

import platform
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from parapply import __version__
from tests.operators.lab import Lab, fresh_seed, lab
from tests.operators.machines import MACHINES
from tests.operators.search import n_steps, search


@click.command()
@click.option("--minutes", default=60.0, show_default=True, help="How long; 0: one turn of each machine.")
@click.option("--steps", "most_steps", default=0, help="End after so many steps.")
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
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the counts here.")
@click.option("--found", type=click.Path(path_type=Path), help="Append what is found to this file.")
def main(
    *, minutes: float, most_steps: int, seed: int | None, versions: str, machines: tuple[str, ...], length: int,
    without: tuple[str, ...], without_tables: tuple[str, ...], only: tuple[str, ...], shrink_s: float, go_on: bool,
    json_path: Path | None, found: Path | None,
) -> None:  # fmt: skip
    """Do what operators do, in any order, and look whether both sides are equal. Ends with 1 if something was found."""
    if seed is not None and not go_on and not most_steps:
        minutes = 0.0
    n_found, began_s = 0, time.monotonic()
    with lab([int(word) for word in versions.split(",") if word]) as made:
        made.left_out.update(without_tables)
        number = fresh_seed() if seed is None else seed
        while True:
            left = minutes - (time.monotonic() - began_s) / 60 if minutes else 0.0
            try:
                search(
                    made, machines=machines, minutes=left, most_steps=most_steps, seed=number, steps=length,
                    without=without, only=only, shrink_s=shrink_s, tell=click.echo,
                )  # fmt: skip
            except Exception as error:  # noqa: BLE001  whatever it is, it was found
                n_found += 1
                text = "".join(traceback.format_exception(error, limit=-3))
                click.echo(text)
                if found:
                    with found.open("a", encoding="utf-8") as file:
                        file.write(f"==== after {n_steps(made)} steps\n{text}\n")
            made.has_found = False
            number = fresh_seed()
            is_over = made.is_over or (most_steps and n_steps(made) >= most_steps)
            if not go_on or is_over or not (minutes or most_steps):
                break
        took_s = time.monotonic() - began_s
        _print(made, took_s, n_found)
        if json_path:
            json_path.write_bytes(msgspec.json.format(msgspec.json.encode(_as_json(made, took_s, n_found)), indent=1))
    sys.exit(1 if n_found else 0)


def _as_json(made: Lab, took_s: float, n_found: int) -> dict[str, object]:
    return {
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "parapply": __version__, "python": platform.python_version(),
        "versions": made.majors, "minutes": round(took_s / 60, 1), "steps": n_steps(made), "found": n_found,
        "counts": dict(sorted(made.counts.items())),
    }  # fmt: skip


def _print(made: Lab, took_s: float, n_found: int) -> None:
    for name, count in sorted(made.counts.items()):
        click.echo(f"{count:8,} {name}")
    rate = n_steps(made) / max(took_s, 1e-3)
    click.echo(f"{n_steps(made):,} steps in {took_s:.0f} s ({rate:.1f} a second); found: {n_found}")


if __name__ == "__main__":
    main()
