"""All of the engine's state that more than one part of the daemon knows, with the part that writes each field.

`status`, metrics, health and the watchdog are made of it. Times are seconds of the event loop's clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from parapply.limits import BLOCKED_S
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from parapply.engine.job import Job

#: Seconds without a check of the publisher after which the last one is not current.
FRESH_S = 5.0


def lag_since(lag_s: float, looked_s: float, look_s: float, now_s: float) -> float:
    """Return a lag at `now_s`: without a recent check, changes are assumed to have been waiting since the last one."""
    age_s = now_s - looked_s
    return lag_s + (age_s if age_s > FRESH_S + look_s else 0.0)


class Watermark:
    """Commits finishing in any order, turned into the LSN below which all is done. Used by the leader only.

    The rule is the seed's (pgsql-hackers, "Parallel Apply", 2025-08-11): lowest_remote_lsn moves only when the first
    transaction in progress commits. Everything counts commit **end** LSNs (trap T-3).
    """

    def __init__(self, low_lsn: int) -> None:
        """Start where the target's state ends: everything up to `low_lsn` is committed there."""
        #: Everything with an end LSN up to here is committed on the target (not yet durable). Never goes back.
        self.low_lsn = low_lsn
        #: Highest committed end LSN.
        self.high_lsn = low_lsn
        self._open: deque[int] = deque()
        self._done: set[int] = set()

    def open(self, end_lsn: int) -> None:
        """Register a batch by its last end LSN; calls come in source order."""
        assert end_lsn > (self._open[-1] if self._open else self.low_lsn), "batches are opened in source order"
        self._open.append(end_lsn)

    def close(self, end_lsn: int) -> bool:
        """Register the commit of a batch that was opened; True if the low LSN moved."""
        assert end_lsn in self._open, "a batch is closed once, after it was opened"
        assert end_lsn not in self._done, "a batch is closed once, after it was opened"
        self.high_lsn = max(self.high_lsn, end_lsn)
        self._done.add(end_lsn)
        low_lsn = self.low_lsn
        while self._open and self._open[0] in self._done:
            done = self._open.popleft()
            self._done.discard(done)
            self.low_lsn = max(self.low_lsn, done)
        return self.low_lsn > low_lsn

    def reached(self, lsn: int) -> bool:
        """Move up to an LSN the publisher says holds nothing more for us; only while nothing is open (trap T-8)."""
        if self._open or lsn <= self.low_lsn:
            return False
        self.low_lsn = lsn
        self.high_lsn = max(self.high_lsn, lsn)
        return True


class EngineState:
    """One epoch's; nothing of it outlives that."""

    __slots__ = (
        "blocked",
        "durable_lsn",
        "foreign_waits",
        "head",
        "held_bytes",
        "is_relaxed",
        "jobs",
        "lag_s",
        "look_s",
        "looked_s",
        "n_workers",
        "note",
        "passed_us",
        "reason",
        "session_blocked_s",
        "source_clock_us",
        "source_insert_lsn",
        "source_lsn",
        "troubles",
        "unanswered_since_s",
        "watermark",
    )

    def __init__(self, low_lsn: int, now_s: float, *, is_relaxed: bool = False) -> None:
        """Start with nothing in flight, before the publisher was looked at.

        Args:
            low_lsn: everything up to here is committed on the target.
            now_s: the time.
            is_relaxed: independent batches commit in any order.
        """
        self.is_relaxed = is_relaxed
        # Flight:
        #: Batches not committed, by their numbers, in source order, and the earliest of them.
        self.jobs: dict[int, Job] = {}
        self.head: Job | None = None
        #: Bytes of changes in them and in pieces not applied; intake and workers count pieces by `Flight.count_in`.
        self.held_bytes = 0
        #: Workers that are running and are not to leave; `WorkerTasks` adds new ones.
        self.n_workers = 0
        #: Position up to which all is committed; an idle publisher's position also moves it (`Progress`).
        self.watermark = Watermark(low_lsn)
        # Progress:
        #: Everything up to here is durable on the target, and recorded there as such or in its record rows.
        self.durable_lsn = low_lsn
        # The monitor, by `looked`:
        #: Where the publisher is; None: not checked yet.
        self.source_lsn: int | None = None
        #: Its clock at that moment, microseconds since 2000-01-01 UTC, and the end of all WAL that it had written then.
        self.source_clock_us: int | None = None
        self.source_insert_lsn = 0
        #: The time that its WAL had passed: its clock, or, of a standby, of the last commit replayed. None: not known.
        self.passed_us: int | None = None
        #: How far the target is behind; before the first check at most, by the state; None: not known.
        self.lag_s: float | None = None
        #: Time of that check.
        self.looked_s = now_s
        #: Seconds for which that is current beside the usual ones: at rest the next check is later.
        self.look_s = 0.0
        #: Time of its question to the publisher that has no answer yet. None: all are answered. Read by `Durability`.
        self.unanswered_since_s: float | None = None
        # The stall check:
        #: Begin of the longest wait of a batch for foreign sessions, and their description; None: none waits.
        self.blocked: tuple[float, str] | None = None
        #: Longest wait on the target of a session that is no worker's; 0.0: none waits.
        self.session_blocked_s = 0.0
        #: Lock of another session that a worker waits for, by the worker's number.
        self.foreign_waits: dict[int, str] = {}
        #: Shown as the reason while all goes well; the epoch's.
        self.note = ""
        #: The same and all that slows it, as the monitor saw it last.
        self.reason = ""
        # The repair:
        #: Why workers keep trying batches, by number of the batch.
        self.troubles: dict[int, str] = {}

    @property
    def shown(self) -> tuple[DaemonState, str]:
        """Return state and reason, for people. Trouble shows also while the monitor itself waits for a lock."""
        if self.troubles:
            return DaemonState.RETRYING, self.troubles[min(self.troubles)]
        return DaemonState.RUNNING, self.reason

    def lag_at(self, now_s: float) -> float | None:
        """Return how far the target is behind; None: not known."""
        return None if self.lag_s is None else lag_since(self.lag_s, self.looked_s, self.look_s, now_s)

    def blocked_s(self, now_s: float) -> float:
        """Return how long a batch has waited for foreign sessions; 0: none does."""
        return now_s - self.blocked[0] if self.blocked else 0.0

    def blocked_reason(self, now_s: float) -> str:
        """Return for whom a batch waits, once it has waited for long; else nothing."""
        blocked_s = self.blocked_s(now_s)
        return f"blocked for {blocked_s:.0f} s by {self.blocked[1]}" if self.blocked and blocked_s >= BLOCKED_S else ""

    def source_time_us(self, now_s: float) -> int | None:
        """Return the publisher's time, or a little less, in microseconds since 2000-01-01 UTC; None: not known yet."""
        if self.source_clock_us is None:
            return None
        return self.source_clock_us + int((now_s - self.looked_s) * 1e6)
