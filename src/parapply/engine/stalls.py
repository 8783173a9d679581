"""Waits that PostgreSQL cannot see as a deadlock, with the batch that makes room, and streams left behind.

A batch needs a lock of a later one that waits for its turn. The server sees one session waiting for another that is
idle in a transaction; only we know that the idle one waits for the first (trap T-30)::

    batch 8 ──── the turn (here: flight.py) ───► batch 7 ◄──── late keys, dependencies (here: scheduler.py) ──── batch 9
       ▲                                            │
       │                                            │ worker 1 has it
       │                                            ▼
    worker 2 ◄── a lock (pg_blocking_pids) ── worker 1 ── a lock ──► foreign session ── a lock ──► worker 2
    idle in transaction                           └────── a lock ──► prepared transaction

So when a batch makes no progress, the target is asked which sessions block it, and which block those: a later batch of
ours among them rolls back and waits, which breaks each circle through this graph. A foreign session may be a worker of
another slot that waits for its own turn: then the workers that its slot waits for count as well. For a foreign session
the batch waits, and that is shown (F23), and so for a prepared transaction; where the operator has asked to skip what
waits, its statement is cancelled. But a prepared transaction that the publisher has rolled back in the meantime, as far
as that was received, is rolled back at once, because its place in the order does not matter, and comes after the batch
that waits (T-37).

With the order kept only the head is checked, because everything waits for it in the end. Relaxed, every batch is: after
a head that waits for a foreign lock, two others may block each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from parapply.engine.job import OutcomeJob, SetJob
from parapply.limits import BLOCKED_S
from parapply.vocabulary import Reading, WorkerState
from parapply.wire.messages import RollbackPrepared

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.engine.flight import Flight
    from parapply.engine.job import Job
    from parapply.model import Transaction

#: States in which the server works for a worker and may wait, also for a deferred constraint at COMMIT.
AT_WORK: Final = (WorkerState.EXECUTING, WorkerState.RETRYING, WorkerState.COMMITTING)
#: Checks during which a batch waits for others and keeps its worker; giving that back costs repeated work.
_GIVE_BACK_CHECKS: Final = 4
#: Checks in a row that must find the stream behind.
_CHECKS: Final = 3


class WorkerSeen(Protocol):
    """A worker, as far as it matters here."""

    @property
    def number(self) -> int:
        """Return its number, from 1."""

    @property
    def job(self) -> Job | None:
        """Return the one in hand."""

    @property
    def state(self) -> WorkerState:
        """Return its state."""

    @property
    def since_s(self) -> float:
        """Return since when."""


@dataclass(slots=True)
class Blocked:
    """A batch that waits for foreign sessions."""

    job: Job
    since_s: float
    holder: str
    #: After how many seconds it is logged next.
    next_s: float = BLOCKED_S


class Stalls:
    """Written by the stall check alone, at each of its looks."""

    def __init__(self, flight: Flight, stall_check_s: float) -> None:
        """Start with nothing checked; `stall_check_s` is how long a batch may take before the target is asked."""
        self._flight = flight
        self._state = flight.state
        self._stall_check_s = stall_check_s
        self._blocked: dict[int, Blocked] = {}

    @property
    def check_s(self) -> float:
        """Return the seconds until the next look: a batch that begins while none is under way cannot stall before."""
        return self._stall_check_s / (2 if self._state.jobs else 1)

    def holds_up(self, worker: WorkerSeen, now_s: float) -> bool:
        """Return whether a worker has waited for another batch for long, so that others could use it."""
        has_waited = now_s - worker.since_s >= _GIVE_BACK_CHECKS * self._stall_check_s
        return self._state.is_relaxed and has_waited and worker.state is WorkerState.WAITING

    def stands_still(self, worker: WorkerSeen, now_s: float) -> bool:
        """Return whether to ask the target about a worker's waits."""
        job, head = worker.job, self._state.head
        if job is None or head is None or worker.state not in AT_WORK:
            return False
        if job is not head and not self._state.is_relaxed:
            return False
        return now_s - max(worker.since_s, job.times.freed_s) >= self._stall_check_s

    def may_break(self, job: Job, blocker: WorkerSeen) -> bool:
        """Return whether to make a worker yield to a job that it blocks: not if its job will end without that."""
        other = blocker.job
        if other is None:
            return False
        is_endless = job.batch.seq and not other.batch.seq  # it follows a transaction in progress
        if job is self._state.head or is_endless:
            return True
        # Leave a worker alone while it executes, or while it waits for anything but this job: with late keys for their
        # holders, or, having followed a transaction to its end, for everything earlier.
        waits = (*self._flight.late_waits_of(other), *self._flight.waits_of(other))
        return blocker.state is WorkerState.WAITING and any(wait.seq == job.batch.seq for wait in waits)

    def waits(self, worker: WorkerSeen, job: Job, holder: str, now_s: float) -> Blocked | None:
        """Take notice of a wait for foreign sessions; return it if it is long enough for a line in the log."""
        self._state.foreign_waits[worker.number] = holder
        found = self._blocked.get(worker.number)
        if found is None or found.job is not job:
            found = self._blocked[worker.number] = Blocked(job, max(worker.since_s, job.times.freed_s), holder)
        found.holder = holder
        return found if now_s - found.since_s >= found.next_s else None

    def looked(self) -> list[tuple[int, Blocked]]:
        """Forget the waits that are over, show the longest of the others, and return those that were logged.

        Returns:
            Number of the worker and the wait.
        """
        if not self._blocked:
            self._state.blocked = None
            return []
        over = [
            (number, self._blocked.pop(number)) for number in self._blocked.keys() - self._state.foreign_waits.keys()
        ]
        longest = min(self._blocked.values(), key=lambda one: one.since_s, default=None)
        self._state.blocked = None if longest is None else (longest.since_s, longest.holder)
        return [(number, one) for number, one in over if one.next_s > BLOCKED_S]

    def rollbacks(self) -> list[RollbackPrepared]:
        """Return the outcomes in flight that roll a prepared transaction back: they need not wait for their turn."""
        outcomes = [job.outcome for job in self._state.jobs.values() if isinstance(job, OutcomeJob)]
        return [outcome for outcome in outcomes if isinstance(outcome, RollbackPrepared)]


def executed_now(job: Job) -> Sequence[Transaction]:
    """Return the source transactions that a worker executes now, alone or merged."""
    if not isinstance(job, SetJob):
        return ()
    transactions = job.batch.transactions
    if job.resume is not None and not job.resume.halving.is_done:
        part = job.resume.halving.part
        return transactions[part.start : part.end]
    return transactions


class StreamSeen(NamedTuple):
    """State of a stream at one check."""

    reading: Reading
    received_lsn: int
    #: True if the reason for reading it as a stream still allows ranges.
    may_be_left: bool
    is_paused: bool
    #: True for each place where a transaction has begun. It would come again from its beginning, a long one for ever.
    begun: Iterable[bool]


class FallingBehind:
    """When a stream that falls behind is left for ranges of WAL; asked at each of its checks."""

    def __init__(self, *, behind_bytes: int, pause_s: float, now_s: float) -> None:
        """Start with a stream that is not behind.

        Args:
            behind_bytes: of WAL to catch up, from which it is behind.
            pause_s: that a stream runs at least.
            now_s: when it begins.
        """
        self._behind_bytes = behind_bytes
        self._pause_s = pause_s
        self._streaming_since_s = now_s
        self._n_behind = 0

    def look(self, seen: StreamSeen, source_lsn: int | None, now_s: float) -> int | None:
        """Return the bytes of WAL that ranges shall bring; None: the stream is kept.

        Args:
            seen: the stream.
            source_lsn: where the publisher is; None: not known yet.
            now_s: the time.
        """
        if seen.reading is Reading.RANGES:
            self._streaming_since_s = now_s
            return None
        # With reading paused the target takes the time.
        may_be_left = seen.may_be_left and not seen.is_paused and not any(seen.begun)
        if source_lsn is None or not may_be_left:
            self._n_behind = 0
            return None
        lag_bytes = max(0, source_lsn - seen.received_lsn)
        self._n_behind = self._n_behind + 1 if lag_bytes >= self._behind_bytes else 0
        is_over = self._n_behind >= _CHECKS and now_s - self._streaming_since_s >= self._pause_s
        return lag_bytes if is_over else None


class RestartPoints:
    """When the publisher is asked to log its running transactions: later readers can begin to decode there.

    It does that every 15 seconds, and what is written in between is decoded from the last such point on.
    """

    def __init__(self, apart_bytes: int) -> None:
        """Ask for points at least this number of bytes of WAL apart, while at least that is to be caught up."""
        self._apart_bytes = apart_bytes
        self._last_lsn: int | None = None

    def is_due(self, source_lsn: int | None, received_lsn: int) -> bool:
        """Return, once for each point, whether to ask.

        Args:
            source_lsn: where the publisher is; None: not known yet.
            received_lsn: where the reader is.
        """
        if source_lsn is None:
            return False
        if self._last_lsn is None:
            self._last_lsn = source_lsn
        is_due = min(source_lsn - received_lsn, source_lsn - self._last_lsn) >= self._apart_bytes
        if is_due:
            self._last_lsn = source_lsn
        return is_due
