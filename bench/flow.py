"""One huge transaction alongside small ones: both are committed on one server and looked for on another.

In go two connection strings and sizes; out come seconds and milliseconds. Three threads of ours commit the small ones,
run the huge one, and poll; all read one clock. Small ones are probes, and so is the huge one's last row: it shows when
the transaction is visible, for the cost of one query, whatever lies unfinished in the tables.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

import psycopg

from bench.probing import Looker
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

#: Table that the huge transaction fills, on both servers, besides the probes' table.
HUGE_TABLE: Final = "CREATE TABLE items (id bigint PRIMARY KEY, amount bigint NOT NULL, name text NOT NULL)"

_INSERT = "INSERT INTO items SELECT id, 0, 'Item ' || id FROM generate_series(1, %s) AS id"
_PROBE = "INSERT INTO probe VALUES (%s, clock_timestamp())"
# As a client that waits for its commit has it; a walsender is woken by the flush.
_OPTIONS = "-c synchronous_commit=on"
# The first ones find tables unknown and statements unprepared, and wait for a system that starts.
_WARM_UP_PROBES = 20
_START_TIMEOUT_S = 60.0
# Ten million rows take a slow subscriber some minutes.
_SEEN_TIMEOUT_S = 900.0
# Finer than what is reported of the small ones on a machine at its limits, and nearly free for it.
_LOOK_PAUSE_S = 0.001
_CHECK_S = 0.05
_CANCEL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Times that were measured.

    Attributes:
        write_s: the huge transaction's statement on the publisher.
        commit_s: from sending its COMMIT until the answer.
        visible_s: from that answer until a reader on the subscriber saw it.
        before_ms: from COMMIT's answer until seen, for every small one committed since the huge one began and before
            its COMMIT was sent.
        after_ms: the same for those committed later, until the huge one was seen.
        gap_s: longest time after the answer in which no small one became visible.
    """

    write_s: float
    commit_s: float
    visible_s: float
    before_ms: tuple[float, ...]
    after_ms: tuple[float, ...]
    gap_s: float

    @property
    def own_s(self) -> float:
        """Seconds that the huge transaction took on the publisher, without the time it was held open."""
        return self.write_s + self.commit_s


@dataclass(frozen=True, kw_only=True)
class _Huge:
    """When the huge transaction began, had written, sent COMMIT and had the answer; and the number of its last row."""

    number: int
    began_s: float
    written_s: float
    sent_s: float
    answered_s: float


def flow(  # noqa: PLR0913  one for each thing that differs
    source_dsn: str,
    target_dsn: str,
    *,
    rows: int,
    hold_s: float,
    interval_s: float,
    check: Callable[[], None],
) -> Flow:
    """Commit small transactions all the time, one huge one among them, and return when all have been seen.

    Args:
        source_dsn: where they are committed. The tables are empty.
        target_dsn: where they are looked for.
        rows: of the huge one.
        hold_s: seconds that it stays open when it has written.
        interval_s: between two small ones; one that is late does not put off the next.
        check: called several times a second; raises if the system that replicates has failed.

    Raises:
        DemoError: a server failed, or something was not seen in time.
    """
    try:
        with (
            Looker(target_dsn, pause_s=_LOOK_PAUSE_S) as looker,
            psycopg.connect(source_dsn, options=_OPTIONS) as small,
            psycopg.connect(source_dsn, options=_OPTIONS) as huge,
        ):
            committer = _Committer(looker)
            with ThreadPoolExecutor(2, thread_name_prefix="committer") as executor:
                try:
                    small_ones = executor.submit(committer.commit_small, small, interval_s)
                    _warm_up(looker, _checks(check, small_ones))
                    huge_one = executor.submit(committer.commit_huge, huge, rows, hold_s)
                    while not huge_one.done():
                        wait([huge_one], timeout=_CHECK_S)
                        _checks(check, small_ones)()
                    found = huge_one.result()
                    looker.wait_until(
                        lambda: found.number in looker.seen_s, _checks(check, small_ones), _SEEN_TIMEOUT_S
                    )
                finally:
                    committer.stop()
                    # Nothing is left to cancel, unless something failed or we were interrupted.
                    huge.cancel_safe(timeout=_CANCEL_TIMEOUT_S)
            small_ones.result()
            looker.wait_until(looker.has_all, check, _SEEN_TIMEOUT_S)
    except psycopg.Error as error:
        raise DemoError(f"PostgreSQL said: {error}", sqlstate=error.sqlstate or "") from error
    return _flow(found, looker.seen_s, committer.answered_s)


def _warm_up(looker: Looker, check: Callable[[], None]) -> None:
    """Return when the system has begun, and has carried the probes of that time and some more."""
    looker.wait_until(lambda: bool(looker.seen_s), check, _START_TIMEOUT_S)
    # Do not wait until none is on its way: alongside other work on the machine one always may be.
    wanted = looker.n_announced + _WARM_UP_PROBES
    looker.wait_until(lambda: len(looker.seen_s) >= wanted, check, _START_TIMEOUT_S)


def _checks(check: Callable[[], None], small_ones: Future[None]) -> Callable[[], None]:
    """Return what raises when the system, or committing small ones, has failed."""

    def both() -> None:
        check()
        if small_ones.done():
            small_ones.result()

    return both


class _Committer:
    """Commits on the publisher, in two threads, and notes when.

    Attributes:
        answered_s: when COMMIT of each small one was answered. Written by their thread, read when it is over.
    """

    def __init__(self, looker: Looker) -> None:
        self.answered_s: dict[int, float] = {}
        self._looker = looker
        self._ids = itertools.count(1)
        # Numbers must be announced in their order.
        self._lock = Lock()
        self._has_ended = Event()

    def stop(self) -> None:
        """Begin no further transaction and hold none open."""
        self._has_ended.set()

    def commit_small(self, connection: psycopg.Connection, interval_s: float) -> None:
        """Commit one row after another until it is over."""
        started_s = time.monotonic()
        for place in itertools.count():
            if self._has_ended.wait(max(0.0, started_s + place * interval_s - time.monotonic())):
                return
            number = self._announce()
            connection.execute(_PROBE, [number], prepare=True)
            connection.commit()
            self.answered_s[number] = time.monotonic()

    def commit_huge(self, connection: psycopg.Connection, rows: int, hold_s: float) -> _Huge:
        """Write many rows, hold the transaction open, commit it, and return when that was."""
        began_s = time.monotonic()
        connection.execute(_INSERT, [rows])
        written_s = time.monotonic()
        self._has_ended.wait(hold_s)
        number = self._announce()
        connection.execute(_PROBE, [number])
        sent_s = time.monotonic()
        connection.commit()
        return _Huge(number=number, began_s=began_s, written_s=written_s, sent_s=sent_s, answered_s=time.monotonic())

    def _announce(self) -> int:
        with self._lock:
            number = next(self._ids)
            self._looker.announce(number)
        return number


def _flow(huge: _Huge, seen_s: dict[int, float], answered_s: dict[int, float]) -> Flow:
    before = [number for number, at_s in answered_s.items() if huge.began_s <= at_s < huge.sent_s]
    after = [number for number, at_s in answered_s.items() if huge.sent_s <= at_s <= seen_s[huge.number]]
    ends_s = sorted(at_s for number, at_s in seen_s.items() if number != huge.number and at_s > huge.answered_s)
    return Flow(
        write_s=huge.written_s - huge.began_s,
        commit_s=huge.answered_s - huge.sent_s,
        visible_s=seen_s[huge.number] - huge.answered_s,
        before_ms=tuple([(seen_s[number] - answered_s[number]) * 1000 for number in before]),
        after_ms=tuple([(seen_s[number] - answered_s[number]) * 1000 for number in after]),
        gap_s=max((late - early for early, late in pairwise([huge.answered_s, *ends_s])), default=0.0),
    )
