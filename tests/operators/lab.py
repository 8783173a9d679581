"""The servers that all examples of a run share, and the clock and counters of that run.

In go versions and minutes; out come servers, fresh databases, and whether there is time for another example.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from parapply.demo.binaries import available
from tests.fixtures.memory import memory_directory
from tests.fixtures.selection import Selection
from tests.fixtures.servers import ServerPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.demo.server import PgServer


class Violation(AssertionError):
    """A promise of the product does not hold."""


class Lab:
    """Servers by role and version, kept for a whole run.

    Attributes:
        majors: versions to draw pairs from.
        counts: steps by rule, and what happened.
        deadline_s: of the monotonic clock: no example begins after it, and one under way does nothing more.
        has_found: an example failed, which is being shrunk: the clock does not count.
    """

    def __init__(self, pool: ServerPool, majors: Sequence[int]) -> None:
        """Start nothing yet."""
        self._pool = pool
        self._kept: dict[str, PgServer] = {}
        self.majors = tuple(majors)
        #: Things that examples leave out: families of tables; `origin`, its policies; `twice`, a pause after a pause.
        self.left_out: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.deadline_s = float("inf")
        self.has_found = False

    @property
    def is_over(self) -> bool:
        """Return whether no example should begin, nor go on."""
        return not self.has_found and time.monotonic() >= self.deadline_s

    def server(self, role: str, major: int) -> PgServer:
        """Return the running server of a role and a version."""
        return self._pool.own("source" if role == "source" else "target", major)

    def kept(self, name: str, major: int) -> PgServer:
        """Return a server that may be stopped and put back, the same for each example of the run."""
        server = self._kept.get(name)
        if server is None:
            server = self._kept[name] = self._pool.new(name, major)
        server.start()
        return server

    def close(self) -> None:
        """Remove the servers that only this lab knows."""
        for server in self._kept.values():
            server.cleanup()

    def own_server(self, name: str, major: int, **settings: str | int) -> PgServer:
        """Return a new server that the caller removes."""
        return self._pool.new(name, major, settings)


#: Of the run under way: Hypothesis makes machines without arguments.
_current: list[Lab] = []


def current() -> Lab:
    """Return the lab of the run under way."""
    return _current[-1]


@contextmanager
def lab(majors: Sequence[int] = (), pool: ServerPool | None = None) -> Iterator[Lab]:
    """Give the lab of a run; servers that it starts are removed at the end.

    Args:
        majors: versions to use; all that are found when empty.
        pool: the servers of a test session; servers of the lab's own when left out.
    """
    with ExitStack() as stack:
        binaries = {one.major: one for one in available()}
        if pool is None:
            if memory := memory_directory():
                os.environ["TMPDIR"] = str(memory)
                tempfile.tempdir = None
            pool = ServerPool(Selection(external_dsns={}, binaries=binaries, problem="", majors=tuple(binaries)))
            stack.callback(pool.close)
        made = Lab(pool, [one for one in majors or sorted(binaries, reverse=True) if one in binaries])
        stack.callback(made.close)
        _current.append(made)
        stack.callback(_current.pop)
        yield made


def fresh_seed() -> int:
    """Return a seed that no earlier run is likely to have had."""
    return random.SystemRandom().randrange(1_000_000_000)
