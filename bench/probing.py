"""Probes: single rows committed on one server at fixed distances, and when each is first seen on another.

In go two connection strings; out come milliseconds. One thread of ours commits, another polls; both read one clock.
Every probe is looked for by itself, because the system that carries them need not keep their order.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import median
from threading import Event
from typing import TYPE_CHECKING, Self

import psycopg

from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

#: On both servers.
PROBE_TABLE = "CREATE TABLE probe (id bigint PRIMARY KEY, committed_at timestamptz NOT NULL)"

# The first probes find tables unknown and statements unprepared.
_WARM_UP_PROBES = 20
# The kernel makes about 0.2 ms of it: finer than the medians met, and it leaves most of a processor to the others.
_LOOK_PAUSE_S = 0.00005
# A system starts within a second or two; one that cannot keep up with half its rate is a fault.
_SEEN_TIMEOUT_S = 30.0
_CHECK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Results of the counted probes, in their order.

    Attributes:
        visible_ms: for each the milliseconds from COMMIT's answer until it was seen.
        commit_ms: for each the milliseconds from sending COMMIT to its answer.
        look_ms: median distance of two polls: a probe was visible up to so much earlier than it was seen.
    """

    visible_ms: tuple[float, ...]
    commit_ms: tuple[float, ...]
    look_ms: float


def probe(  # noqa: PLR0913  one for each thing that differs
    source_dsn: str,
    target_dsn: str,
    ids: Iterator[int],
    *,
    probes: int,
    interval_s: float,
    check: Callable[[], None],
) -> Probed:
    """Commit a probe until it is seen, some more that do not count, then those that do.

    Args:
        source_dsn: where probes are committed; with a flush, so that the walsender gets them at once.
        target_dsn: where they are looked for.
        ids: of the probes, each greater than every one before.
        probes: that count.
        interval_s: seconds between two; one that is late does not put off the next.
        check: raises if the system that carries the probes has failed.

    Raises:
        DemoError: a server failed, or a probe was not seen 30 s after the last was committed.
    """
    looker = Looker(target_dsn)
    sent_s: dict[int, float] = {}
    answered_s: dict[int, float] = {}
    try:
        with looker, psycopg.connect(source_dsn, options="-c synchronous_commit=on") as connection:

            def commit() -> int:
                number = next(ids)
                connection.execute("INSERT INTO probe VALUES (%s, clock_timestamp())", [number], prepare=True)
                looker.announce(number)
                sent_s[number] = time.monotonic()
                connection.commit()
                answered_s[number] = time.monotonic()
                return number

            commit()
            looker.wait_for_all(check)
            counted: list[int] = []
            started_s = time.monotonic()
            for place in range(_WARM_UP_PROBES + probes):
                time.sleep(max(0.0, started_s + place * interval_s - time.monotonic()))
                counted.append(commit())
            looker.wait_for_all(check)
    except psycopg.Error as error:
        raise DemoError(f"PostgreSQL said: {error}", sqlstate=error.sqlstate or "") from error
    counted = counted[_WARM_UP_PROBES:]
    return Probed(
        visible_ms=tuple([(looker.seen_s[number] - answered_s[number]) * 1000 for number in counted]),
        commit_ms=tuple([(answered_s[number] - sent_s[number]) * 1000 for number in counted]),
        look_ms=looker.look_ms(),
    )


class Looker:
    """A thread that looks for probes as long as some are on their way; it does so while the block runs.

    Attributes:
        seen_s: when each probe was first seen. Written by the thread; the committing thread waits for what it reads.
    """

    def __init__(self, dsn: str, *, pause_s: float = _LOOK_PAUSE_S) -> None:
        """Look for nothing yet.

        Args:
            dsn: where probes are looked for.
            pause_s: seconds between the end of a poll and the next.
        """
        self._pause_s = pause_s
        self.seen_s: dict[int, float] = {}
        self._dsn = dsn
        # From the committer to the thread; None ends it.
        self._announced: SimpleQueue[int | None] = SimpleQueue()
        # Written by the committer.
        self._n_announced = 0
        # From the thread to the committer.
        self._has_seen = Event()
        # Written by the thread, read when it is over.
        self._distances_s: list[float] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="probe-looker")
        self._future: Future[None] | None = None

    def __enter__(self) -> Self:
        """Start the thread."""
        self._future = self._executor.submit(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, whatever is still on its way."""
        self._announced.put(None)
        self._executor.shutdown()

    def announce(self, number: int) -> None:
        """Have a probe looked for that is about to be committed; its number is greater than every one before."""
        self._n_announced += 1
        self._announced.put(number)

    @property
    def n_announced(self) -> int:
        """Number of announced probes."""
        return self._n_announced

    def has_all(self) -> bool:
        """Return whether every announced probe has been seen."""
        return len(self.seen_s) >= self._n_announced

    def wait_for_all(self, check: Callable[[], None]) -> None:
        """Return once every announced probe has been seen.

        Raises:
            DemoError: one was not within 30 s; psycopg's errors, if looking failed.
        """
        self.wait_until(self.has_all, check, _SEEN_TIMEOUT_S)

    def wait_until(self, is_over: Callable[[], bool], check: Callable[[], None], timeout_s: float) -> None:
        """Return once something holds, asked whenever a probe has been seen.

        Args:
            is_over: what shall hold of the probes seen.
            check: called while waiting; raises if the system that carries the probes has failed.
            timeout_s: for which to wait.

        Raises:
            DemoError: it took longer; psycopg's errors, if looking failed.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_over():
            self._has_seen.wait(_CHECK_S)
            self._has_seen.clear()
            if self._future is not None and self._future.done():
                self._future.result()
            check()
            if time.monotonic() > deadline_s:
                raise DemoError(
                    f"{self._n_announced - len(self.seen_s)} of {self._n_announced} probes were not seen"
                    f" {timeout_s:g} s after the last."
                )

    def look_ms(self) -> float:
        """Return the median distance of two polls for the same probe, in milliseconds."""
        return median(self._distances_s) * 1000 if self._distances_s else math.nan

    def _look(self) -> None:
        awaited: list[int] = []
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            cursor = connection.cursor(binary=True)
            query = "SELECT id FROM probe WHERE id >= %s"
            looked_s: float | None = None
            while self._is_anything_awaited(awaited):
                rows = cursor.execute(query, [awaited[0]], prepare=True).fetchall()
                now_s = time.monotonic()
                if looked_s is not None:
                    self._distances_s.append(now_s - looked_s)
                looked_s = now_s
                for number in {row[0] for row in rows}.intersection(awaited):
                    self.seen_s[number] = now_s
                    awaited.remove(number)
                    self._has_seen.set()
                if not awaited:
                    looked_s = None
                time.sleep(self._pause_s)

    def _is_anything_awaited(self, awaited: list[int]) -> bool:
        """Add what was announced since, or is next if nothing is awaited, oldest first; False at the end."""
        while not awaited or not self._announced.empty():
            number = self._announced.get()
            if number is None:
                return False
            awaited.append(number)
        return True
