"""Many random cases, one after the other, on servers of several versions that they share.

In goes a first seed; out come counts of what happened, and by seed what was found. Used by the command line and by the
fault campaign.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from parapply.demo.binaries import available
from tests.differential.case import RandomCase, Servers, draw_case, run_case
from tests.differential.conflicts import draw_conflicts, run_conflicts
from tests.differential.policies import run_policies
from tests.differential.schema import drawn_alone
from tests.fixtures.selection import Selection
from tests.fixtures.servers import ServerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Parts that are run of each seed.
PARTS = ("tables", "conflicts", "policies")
_POLICY_CASES = 40


class ServersOf:
    """Servers of chosen versions, started when first wanted."""

    def __init__(self, pool: ServerPool, majors: Sequence[int]) -> None:
        """Keep the pool and the versions that are on this machine."""
        self._pool = pool
        self.majors = tuple(majors)

    def __call__(self, majors: tuple[int, int]) -> Servers:
        """Return a publisher and a target."""
        source, target = majors
        return Servers(source=self._pool.own("source", source), target=self._pool.own("target", target))


@contextmanager
def differential_servers() -> Iterator[ServersOf]:
    """Give servers of the versions on this machine; they are removed at the end.

    Raises:
        DemoError: a version that was named has no server.
    """
    binaries = {one.major: one for one in available()}
    pool = ServerPool(Selection(external_dsns={}, binaries=binaries, problem="", majors=tuple(binaries)))
    with ExitStack() as stack:
        stack.callback(pool.close)
        yield ServersOf(pool, sorted(binaries, reverse=True))


class Cases:
    """Runs cases one after the other, some of each seed, and keeps what they found.

    One compares with the built-in subscription (`case`), one with a model of the conflict policies on partitions
    (`conflicts`), and many small ones compare batches of every size with one change after the other (`policies`).

    Attributes:
        problems: by seed, the errors with their notes.
        counts: of what happened in all cases.
        n_cases: how many were run.
    """

    def __init__(
        self, *, servers_of: ServersOf, majors: Sequence[int], has_crashes: bool, tell: Callable[[str], None],
        only: Sequence[str] = (), parts: Sequence[str] = PARTS,
    ) -> None:  # fmt: skip
        """Run nothing yet.

        Args:
            servers_of: servers for a pair of versions.
            majors: versions to draw from.
            has_crashes: kill daemons on the way.
            tell: called with a line for each case, and with its findings.
            only: kinds of tables to draw instead of the usual ones, and no conflicts.
            parts: what is run, of `PARTS`.
        """
        self._parts = ("tables",) if only else tuple(parts)
        self._servers_of = servers_of
        self._majors = majors
        self._has_crashes = has_crashes
        self._only = only
        self._tell = tell
        self.problems: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self.n_cases = 0

    def draw(self, seed: int) -> RandomCase:
        """Return the case of a seed."""
        only = self._only or drawn_alone(seed)
        return draw_case(seed, self._majors, has_crashes=self._has_crashes, only=only)

    def run(self, first_seed: int, until_s: float) -> None:
        """Run at least one case, and more until a time of the monotonic clock."""
        seed = first_seed
        while seed == first_seed or time.monotonic() < until_s:
            self._one(seed)
            seed += 1

    def _one(self, seed: int) -> None:
        case = self.draw(seed)
        servers = self._servers_of(case.majors)
        name = f"{seed}: {case.majors[0]} to {case.majors[1]}"
        runs: dict[str, Callable[[], Counter[str]]] = {
            "tables": lambda: run_case(case, servers),
            "conflicts": lambda: run_conflicts(draw_conflicts(seed), servers),
            "policies": lambda: run_policies(seed, servers, n_cases=_POLICY_CASES),
        }
        for part in self._parts:
            self._try(seed, f"{name}, {part}", runs[part])

    def _try(self, seed: int, name: str, run: Callable[[], Counter[str]]) -> None:
        began_s = time.monotonic()
        self.n_cases += 1
        try:
            counts = run()
        except Exception as error:  # noqa: BLE001  the next case is another one
            text = "".join(traceback.format_exception(error))
            self.problems[seed] = self.problems.get(seed, "") + text
            self._tell(f"seed {name}: FOUND\n{text}")
            return
        self.counts += counts
        happened = ", ".join(f"{count} {what}" for what, count in counts.items())
        self._tell(f"seed {name}, {happened}: well ({time.monotonic() - began_s:.1f} s)")
