"""Schedules of the engine, one seed after the other: ``python -m tests.simulate``, or ``make simulate``."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom

import click

from parapply import __version__
from tests.simulate.kinds import KINDS
from tests.simulate.play import explained, play


@click.command()
@click.option("--minutes", type=float, default=1.0, show_default=True, help="How long the run takes.")
@click.option("--seed", type=int, help="First seed; a fresh one when left out. With --minutes 0 the only one.")
@click.option("--kind", "kinds", type=click.Choice([*KINDS]), multiple=True, help="All kinds when left out.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Number of processes.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="File for the counts.")
def main(minutes: float, seed: int | None, kinds: tuple[str, ...], jobs: int, json_path: Path | None) -> None:
    """Play schedules of the engine, check each step, and end with 1 at a violation, with its shortest schedule."""
    first = SystemRandom().randrange(1 << 31) if seed is None else seed
    reports = {}
    is_wrong = False
    for name in kinds or KINDS:
        played = play(name, first, 60 * minutes / len(kinds or KINDS), jobs)
        is_enough = played.n_schedules >= KINDS[name].enough
        missing = [one for one in KINDS[name].rare if is_enough and not played.seen[one]]
        is_wrong = is_wrong or played.failed_seed is not None or bool(missing)
        for what, count in sorted(played.seen.items()):
            click.echo(f"{count:12,} {what}")
        rate = played.n_schedules / max(played.cpu_s, 0.001)
        what = "0 violations" if played.failed_seed is None else f"violated by seed {played.failed_seed}"
        click.echo(f"{name}, from seed {first}: {played.n_schedules:,} schedules, {rate:,.0f} a CPU second; {what}")
        if missing:
            click.echo(f"never reached: {', '.join(missing)}")
        if played.failed_seed is not None:
            click.echo(explained(KINDS[name], played.failed_seed))
        reports[name] = {
            "schedules": played.n_schedules, "cpu_s": round(played.cpu_s, 1), "failed_seed": played.failed_seed,
            "missing": missing, "seen": dict(sorted(played.seen.items())),
        }  # fmt: skip
    if json_path is not None:
        report = {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "parapply": __version__, "first_seed": first}
        json_path.write_text(json.dumps({**report, **reports}, indent=1) + "\n", encoding="utf-8")
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
