"""Schedules of the engine alone, one seed after the other: ``python -m tests.simulate``, or ``make simulate``."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom
from typing import Final

import click

from parapply import __version__
from parapply.engine.turns import CommitTurn
from tests.simulate.core import Schedule, Violation

#: States that a run of this many schedules must have reached: a tame generator proves nothing.
RARE: Final = (
    "late keys",
    "parked",
    "failed",
    "kill",
    "crash that loses commits",
    "a worker leaves",
    str(CommitTurn.YIELD),
    str(CommitTurn.GIVE_BACK),
)
_ENOUGH: Final = 20_000
_BETWEEN_LOOKS: Final = 100


@click.command()
@click.option("--minutes", type=float, default=1.0, show_default=True, help="How long the run takes.")
@click.option("--seed", type=int, help="First seed; a fresh one when left out. With --minutes 0 the only one.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="File for the counts.")
def main(minutes: float, seed: int | None, json_path: Path | None) -> None:
    """Play schedules of the engine and check each step; end with 1 at the first violation, with its seed."""
    first = SystemRandom().randrange(1 << 40) if seed is None else seed
    seen: Counter[str] = Counter()
    began_s, n_schedules, violation = time.monotonic(), 0, ""
    while not violation and (not n_schedules or time.monotonic() - began_s < 60 * minutes):
        for _ in range(_BETWEEN_LOOKS if minutes else 1):
            schedule = Schedule(first + n_schedules)
            n_schedules += 1
            try:
                schedule.run()
            except Violation as error:
                violation = str(error)
                break
            finally:
                seen += schedule.seen
    cpu_s = time.process_time()
    missing = [one for one in RARE if not seen[one]] if n_schedules >= _ENOUGH else []
    for what, count in sorted(seen.items()):
        click.echo(f"{count:12,} {what}")
    click.echo(
        f"seeds {first} to {first + n_schedules - 1}: {n_schedules:,} schedules, {n_schedules / cpu_s:,.0f} for each "
        f"second of a processor; {violation or '0 violations'}"
    )
    if json_path is not None:
        report = {
            "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "parapply": __version__, "first_seed": first,
            "schedules": n_schedules, "cpu_s": round(cpu_s, 1), "violation": violation,
            "seen": dict(sorted(seen.items())),
        }  # fmt: skip
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if missing:
        click.echo(f"never reached: {', '.join(missing)}")
    sys.exit(bool(violation or missing))


if __name__ == "__main__":
    main()
