"""``python -m tests.simulate [SECONDS [SEED]]``: schedules of the core, one seed after the other."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.simulate.core import Schedule


def main() -> None:
    """Play for some seconds; print what has happened, and how fast."""
    seconds, seed = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0
    seen: Counter[str] = Counter()
    began_s, n_schedules = time.monotonic(), 0
    while time.monotonic() - began_s < seconds:
        schedule = Schedule(seed + n_schedules)
        schedule.run()
        seen += schedule.seen
        n_schedules += 1
    rate = n_schedules / time.process_time()
    print(f"{n_schedules:,} schedules, {rate:,.0f} for each second of a processor, 0 violations")  # noqa: T201
    for what, count in sorted(seen.items()):
        print(f"{count:>12,} {what}")  # noqa: T201


main()
