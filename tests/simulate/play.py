"""Many schedules, one seed after the other; of the first that fails, its shortest form in words."""

from __future__ import annotations

import gc
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.simulate.draws import Violation, shrink
from tests.simulate.kept import Kept
from tests.simulate.kinds import KINDS

if TYPE_CHECKING:
    from tests.simulate.kinds import Case, Kind

#: Schedules between two looks at the clock.
_SLICE: Final = 50
#: Schedules between two collections of what streams have left that no schedule uses any more: one collection takes as
#: long as 200 schedules of the core, and finds nothing as long as the streams stay the same.
_COLLECTED: Final = 20_000
#: Seeds of each process, which starts at its own.
_STRIDE: Final = 1 << 32


class Played(NamedTuple):
    """Schedules of one kind that one process has played."""

    n_schedules: int
    cpu_s: float
    seen: Counter[str]
    #: Of the first that failed; None: none did.
    failed_seed: int | None


def play(name: str, first: int, for_s: float, jobs: int = 1) -> Played:
    """Play schedules of one kind until the time is over, or one fails; at least one."""
    if jobs == 1:
        return _play(name, first, for_s)
    with ProcessPoolExecutor(jobs) as processes:
        found = list(processes.map(_play, [name] * jobs, [first + _STRIDE * n for n in range(jobs)], [for_s] * jobs))
    failed = [one.failed_seed for one in found if one.failed_seed is not None]
    seen: Counter[str] = Counter()
    for one in found:
        seen += one.seen
    n_schedules, cpu_s = sum([one.n_schedules for one in found]), sum([one.cpu_s for one in found])
    return Played(n_schedules, cpu_s, seen, min(failed, default=None))


def _play(name: str, first: int, for_s: float) -> Played:
    # Schedules leave few circles (`Applying.end`), so the collector would only take time.
    gc.disable()
    try:
        return _play_on(name, first, for_s)
    finally:
        gc.enable()


def _play_on(name: str, first: int, for_s: float) -> Played:
    kind, seen = KINDS[name], Counter[str]()
    began_s, began_cpu_s, n_schedules = time.monotonic(), time.process_time(), 0
    failed = None
    while failed is None and (not n_schedules or time.monotonic() - began_s < for_s):
        for _ in range(_SLICE if for_s else 1):
            case = kind.of(first + n_schedules)
            case.seen = seen
            n_schedules += 1
            try:
                case.run()
            except Violation:
                failed = first + n_schedules - 1
                break
        if n_schedules % _COLLECTED == 0:
            gc.collect()
    return Played(n_schedules, time.process_time() - began_cpu_s, seen, failed)


def explained(kind: Kind, seed: int) -> str:
    """Return the shortest schedule found that fails as a seed's does: its steps, and how to keep it as a test."""
    case = kind.of(seed)
    what = _violation(case)
    parts = shrink(case.parts, lambda tried: _violation(kind.again(tried)) == what)
    short = kind.again(parts)
    short.trace = []
    _violation(short)
    steps = [f"{number:5} {step}" for number, step in enumerate(short.trace, 1)]
    kept = Kept.of(kind.name, parts)
    how = "add this line to tests/simulate/kept.py to keep it as a test:"
    line = f'    Kept("{kept.kind}", "{kept.source}", "{kept.schedule}"),'
    return "\n".join([f"violation: {what}", *steps, how, line])


def _violation(case: Case) -> str:
    """Play a schedule and return which promise is broken; nothing if none is."""
    try:
        case.run()
    except Violation as error:
        return str(error)
    return ""
