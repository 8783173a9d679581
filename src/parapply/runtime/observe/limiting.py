"""Limit of the last minutes: the report's rule (`parapply.limits`) over samples taken once a second."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from parapply import limits
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.applylog_schema import LockHolder
    from parapply.engine.flight import Flight
    from parapply.engine.job import Job
    from parapply.plan.scheduler import Wait
    from parapply.runtime.apply.worker import Worker

#: Seconds that are looked back on: long enough for a share to mean something, short enough to be current.
_WINDOW_S: Final = 120.0
#: Seconds that are enough for a verdict.
_ENOUGH_S: Final = 5.0
#: Looks between two verdicts.
_EVERY: Final = 5


class Look(NamedTuple):
    """State at the end of about a second, and the work done in it."""

    state: str  # as `limits.state_of` names it
    length_s: float
    leader_cpu_s: float
    publisher_s: float  # the reader waited for the publisher
    paused_s: float  # reading was paused: enough was at hand
    behind_bytes: int  # of the publisher's WAL, not read
    backends: tuple[tuple[str, int], ...]  # what the workers' sessions waited for, and how many of them
    waits: tuple[tuple[str, str, str], ...]  # kind, table and name of what batches waited for
    locks: tuple[LockHolder, ...] = ()  # who held the workers' sessions up
    throttled_s: float = 0.0  # apply.max_changes_per_s held changes back


class Limiting:
    """Written by the intervals; the monitor shows what it says."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque()
        self._length_s = 0.0
        self._n_since = 0
        #: Last verdict of `take`, before it became JSON. Read by the page.
        self.latest: dict[str, Any] | None = None

    def add(self, look: Look) -> None:
        """Take notice of a second."""
        self._looks.append(look)
        self._length_s += look.length_s
        self._n_since += 1
        while self._length_s > _WINDOW_S and len(self._looks) > 1:
            self._length_s -= self._looks.popleft().length_s

    def take(self) -> str | None:
        """Return the verdict as JSON if it is time for a new one: fields of `limits.LimitVerdict`, and `window_s`.

        Nothing to do for a minute is said once, because in a fleet it would be much of all that is written.
        """
        if self._n_since < _EVERY or self._length_s < _ENOUGH_S:
            return None
        self._n_since = 0
        said = self._said()
        if said is None:
            return None
        fields: dict[str, Any] = {name: getattr(said, name) for name in said.__dataclass_fields__}
        before, self.latest = self.latest, {**fields, "window_s": round(self._length_s, 1)}
        if before is not None and _is_rest(before) and _is_rest(self.latest) and before["window_s"] >= _WINDOW_S / 2:
            return None
        return msgspec.json.encode(self.latest).decode()

    def _said(self) -> limits.LimitVerdict | None:
        looks = self._looks
        states: dict[str, float] = {}
        backends: Counter[str] = Counter()
        waits: Counter[tuple[str, str, str]] = Counter()
        held: dict[LockHolder, float] = {}
        for look in looks:
            states[look.state] = states.get(look.state, 0.0) + look.length_s
            backends.update(dict(look.backends))
            waits.update(look.waits)
            for lock in look.locks:
                held[lock] = held.get(lock, 0.0) + look.length_s
        behind = [look for look in looks if look.behind_bytes > limits.BEHIND_BYTES]
        reading = {
            "seconds": self._length_s,
            "leader_cpu_s": sum([look.leader_cpu_s for look in looks]),
            "publisher_s": sum([look.publisher_s for look in looks]),
            "paused_s": sum([look.paused_s for look in looks]),
            "throttled_s": sum([look.throttled_s for look in looks]),
            "behind_s": sum([max(look.length_s - look.paused_s, 0.0) for look in behind]),
            "behind_cpu_s": sum([look.leader_cpu_s for look in behind]),
            "behind_publisher_s": sum([look.publisher_s for look in behind]),
            "last_behind_bytes": looks[-1].behind_bytes,
        }
        moments = [{"state": state, "seconds": seconds} for state, seconds in states.items()]
        samples = [{"wait": wait, "samples": n} for wait, n in backends.most_common()]
        blockers = [
            {"kind": kind, "table": table, "name": name, "wait_s": n} for (kind, table, name), n in waits.most_common()
        ]
        locks = [
            {**msgspec.structs.asdict(lock), "seconds": seconds}
            for lock, seconds in sorted(held.items(), key=lambda item: (-item[1], item[0].pid))
        ]
        rows = limits.limits(moments, [reading], samples, blockers)
        named = limits.named(blockers[0]) if blockers else ""
        return limits.said(rows, [reading], samples, f"last {self._length_s:.0f} s", named, limits.held_by(locks))


def _is_rest(verdict: dict[str, Any]) -> bool:
    return bool(verdict["limit"] == "source" and verdict["share"] == 1.0)


def state_of(flight: Flight, workers: Sequence[Worker]) -> str:
    """Return the present state, as `limits.state_of` names it."""
    held = [worker for worker in workers if worker.job is not None]
    return limits.state_of(
        workers=len(workers),
        queued=max(0, len(flight.state.jobs) - len(held)),
        blocked=flight.n_blocked,
        held=len(held),
        executing=sum([_is_executing(worker) for worker in held]),
        late=len(_late(workers)),
    )


def waits_of(flight: Flight, workers: Sequence[Worker]) -> tuple[tuple[str, str, str], ...]:
    """Return kind, table and name of each blocked batch's last wait, also of batches that execute their late rows."""
    found: list[Wait | None] = [waits[-1] for job in flight.waiting_jobs() if (waits := flight.waits_of(job))]
    found += [job.waited_for for job in _late(workers)]
    return tuple([(wait.kind.value, wait.table, wait.name) for wait in found if wait is not None])


def _is_executing(worker: Worker) -> bool:
    """Return whether statements run that are not late, also statements sent together with their COMMIT."""
    if worker.job is None or worker.job.times.turn_s:
        return False
    is_in_flight = worker.state is WorkerState.COMMITTING and not worker.job.times.executed_s
    return is_in_flight or worker.state in (WorkerState.EXECUTING, WorkerState.RETRYING)


def _late(workers: Sequence[Worker]) -> list[Job]:
    at_work = [worker.job for worker in workers if worker.state in (WorkerState.EXECUTING, WorkerState.COMMITTING)]
    return [
        job
        for job in at_work
        if job is not None and job.times.turn_s and any(changes.late_keys for changes in job.batch.table_changes)
    ]
