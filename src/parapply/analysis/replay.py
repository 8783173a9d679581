"""The engine itself, driven by a log: how long a stream takes with other settings or at other costs.

In: a `LoggedStream`, `Settings` of a daemon, and `Costs` of what it does. Out: a `Played`. The engine decides what
enters, when a batch closes, how large it may be, which one starts, whose turn it is and who gives a worker back. This
driver has a clock that goes from one event to the next, and performs effects by letting their time pass:

- the leader reads units and makes statements, one thing after the other;
- statements take as long as the others that execute at the time let them;
- a worker that has its turn applies late rows and commits: one after the other with the order kept, else sharing
  flushes as the target's sessions do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.analysis.stream import BEGIN_US, HOT, table_plan
from parapply.config import LINGER_S, MEMORY_LIMIT_BYTES, STALL_CHECK_S
from parapply.engine.flight import ONE_FLIGHT, Answer, CommitTurn, Flight, Given
from parapply.engine.intake import DRAIN_BYTES, BatchSizing, Closing, Room
from parapply.engine.job import SetJob
from parapply.engine.shares import Share
from parapply.engine.stalls import Stalls
from parapply.engine.state import EngineState
from parapply.plan.batch import LEAST_THIN_TABLES, Batch, Limits
from parapply.plan.table_changes import TableChanges
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.analysis.changes import Order
    from parapply.analysis.stream import LoggedStream, Unit
    from parapply.engine.flight import Effect
    from parapply.engine.job import Job

#: Number of trees for tables that only count: above the batches that are in flight at most.
_TREES: Final = 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a daemon."""

    workers: int  # of the daemon
    order: Order  # of the commits
    limits: tuple[int, int, int]  # a batch's transactions, changes and bytes at most
    scale: float = 1.0  # of the first size of a batch, 1.0 at the beginning of a run


class HotRows(NamedTuple):
    """Late rows of a batch, where the run's hottest rows are among them: some are changed often, others seldom."""

    one: float = 0.0  # of a batch of one change
    power: float = 1.0  # of the batch's changes by which they become more

    def of(self, changes: int) -> int:
        """Return the late rows of a batch with a number of changes."""
        return int(self.one * changes**self.power + 0.5)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that the target and the leader take."""

    batch_s: float  # of any batch alone, whatever its size
    change_s: float  # and each change of it
    #: Of the changes of each recorded batch, as a multiple of the average; nothing: all are alike.
    weights: Sequence[float] = ()
    late_batch_s: float = 0.0  # in the turn of a batch with late rows
    late_row_s: float = 0.0  # and for each of them
    hot_rows: HotRows = field(default_factory=HotRows)
    commit_s: float  # a COMMIT with nothing beside it
    is_flushed: bool = True  # a COMMIT waits for a flush, which others share
    turn_s: float = 0.0  # from when a batch may commit until its COMMIT begins
    read_s: float = 0.0  # of the leader, to read a change
    make_s: float = 0.0  # of the leader, to make the statements of a change; `change_s` does not hold it
    slowdowns: Sequence[float] = (1.0,)  # how many times as long with 0, 1, 2 ... batches executing.


@dataclass(kw_only=True)
class Played:
    """The outcome of a replay."""

    seconds: float = 0.0  # from the first start to the last commit
    batches: int = 0  # formed
    idle_s: float = 0.0  # a worker was free, and nothing closed waited for it, though more was to come
    ended_s: float = 0.0  # the same after the last unit was read
    blocked_s: float = 0.0  # a worker was free, and every closed batch had to wait for another one's commit
    turn_s: float = 0.0  # all had a batch, and most of them waited for commits
    executing_s: float = 0.0  # all had a batch, and most of them executed


@dataclass(slots=True)
class _Worker:
    """As the stall check sees it."""

    number: int
    job: SetJob | None = None
    state: WorkerState = WorkerState.IDLE
    since_s: float = 0.0


@dataclass(slots=True)
class _Work:
    """Statements of a batch in sum."""

    changes: int = 0
    weighed: float = 0.0
    tables: int = 0
    late_rows: int = 0


def play(stream: LoggedStream, settings: Settings, costs: Costs) -> Played:
    """Apply a stream, and return how long it took."""
    return _Replay(stream, settings, costs).run()


class _Replay:
    def __init__(self, stream: LoggedStream, settings: Settings, costs: Costs) -> None:
        self._units, self._plans = stream.units, stream.plans
        self._costs = costs
        is_relaxed = settings.order == "relaxed"
        self._state = EngineState(0, 0.0, is_relaxed=is_relaxed)
        self._state.n_workers = settings.workers
        self._flight = Flight(self._state)
        self._closing = Closing(self._flight, linger_s=LINGER_S)
        share = Share(
            least_workers=settings.workers,
            first_workers=settings.workers,
            most_workers=settings.workers,
            memory_bytes=MEMORY_LIMIT_BYTES,
        )
        self._room = Room(self._flight, share)
        self._sizing = BatchSizing(Limits(*settings.limits), settings.scale, memory_bytes=MEMORY_LIMIT_BYTES)
        self._stalls = Stalls(self._flight, STALL_CHECK_S)
        self._workers = [_Worker(number) for number in range(settings.workers)]
        self._worker_of: dict[int, _Worker] = {}
        self._now_s = self._heard_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = count()
        # Intake:
        self._next = 0
        self._open: SetJob | None = None
        self._works: dict[int, _Work] = {}
        self._is_stopped = False
        self._pause_end_s = 0.0
        # Numbers of the events that are waited for; earlier ones are of no more use.
        self._reading = self._timer = 0
        self._fillers: dict[int, TableChanges] = {}
        # The leader, and the statements that execute: all of them at the same speed, in work done since the beginning.
        self._leader_free_s = 0.0
        self._done_s = 0.0
        self._executing: list[tuple[float, int, SetJob]] = []
        self._flush_end_s = 0.0
        self._flush_is_wanted = False
        self._n_held = 0
        self._played = Played()

    def run(self) -> Played:
        first_s = None
        for worker in self._workers:
            self._ask(worker)
        self._read_later(self._units[0].release_s)
        if self._state.is_relaxed:
            self._at(self._stalls.check_s, self._look)
        while self._next < len(self._units) or self._open is not None or self._state.jobs:
            self._go_on()
            if first_s is None and self._n_held:
                first_s = self._now_s
        self._played.seconds = self._now_s - (first_s or 0.0)
        return self._played

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(at_s, self._now_s), next(self._n_events), act))

    def _go_on(self) -> None:
        slowdowns, executing = self._costs.slowdowns, self._executing
        slowdown = slowdowns[min(len(executing), len(slowdowns) - 1)]
        executed_s = self._now_s + (executing[0][0] - self._done_s) * slowdown if executing else inf
        event_s = self._events[0][0] if self._events else inf
        next_s = max(self._now_s, min(executed_s, event_s))
        assert next_s < inf, "nothing is under way, and something is left"
        self._count(next_s - self._now_s)
        if executed_s <= event_s:
            self._done_s, _, job = heapq.heappop(executing)
            self._now_s = next_s
            self._executed(job)
            return
        if executing:
            self._done_s += (next_s - self._now_s) / slowdown
        self._now_s = next_s
        heapq.heappop(self._events)[2]()

    def _count(self, passed_s: float) -> None:
        played = self._played
        if self._n_held < len(self._workers):
            if self._flight.n_blocked:
                played.blocked_s += passed_s
            elif self._next < len(self._units):
                played.idle_s += passed_s
            else:
                played.ended_s += passed_s
        elif 2 * len(self._executing) >= self._n_held:
            played.executing_s += passed_s
        else:
            played.turn_s += passed_s

    # Intake

    def _read_later(self, at_s: float) -> None:
        self._reading += 1
        self._at(at_s, partial(self._read, self._reading))

    def _read(self, number: int) -> None:
        """Read what is at hand, as far as there is room, as `runtime/intake` does."""
        if number != self._reading or self._next == len(self._units):
            return
        if not self._room.is_left(self._open_bytes):
            self._is_stopped = True
            return
        units, n_units = self._units, len(self._units)
        free_s = max(self._leader_free_s, units[self._next].release_s, self._pause_end_s)
        if free_s > self._now_s:
            self._read_later(free_s)
            return
        self._heard_s, n_changes, n_bytes = self._now_s, 0, 0
        while self._next < n_units and units[self._next].release_s <= self._now_s and n_bytes < DRAIN_BYTES:
            if self._open is None and n_changes and not self._room.is_left(0):
                break
            unit = units[self._next]
            self._next += 1
            n_changes += unit.changes
            n_bytes += unit.transaction.size_bytes
            self._take(unit)
        self._leader_free_s = self._now_s + self._costs.read_s * n_changes
        if self._open is not None:
            self._wait(self._closing.look(self._open.batch, self._heard_s))
        if self._next < n_units:
            at_s = units[self._next].release_s
            if at_s > self._now_s:
                self._pause_end_s = self._now_s + self._closing.pause_s
            self._read_later(max(at_s, self._leader_free_s, self._pause_end_s))

    @property
    def _open_bytes(self) -> int:
        return self._open.batch.size_bytes if self._open is not None else 0

    def _take(self, unit: Unit) -> None:
        unit.transaction.send_time_us = BEGIN_US + round(self._now_s * 1e6)
        self._closing.received(unit.transaction)
        if unit.is_alone and self._open is not None:
            self._close(self._open)
        job = self._open
        if job is None:
            self._played.batches += 1
            job = self._open = SetJob(Batch(self._played.batches), {})
            self._works[job.batch.seq] = _Work()
        batch, work = job.batch, self._works[job.batch.seq]
        batch.add(unit.transaction, self._plans)
        # It stands for as many transactions and changes.
        batch.transactions.extend([unit.transaction] * (unit.transactions - 1))
        batch.n_changes += unit.changes - len(unit.transaction.changes)
        job.times.received_s = self._now_s
        work.changes += unit.changes
        work.weighed += unit.changes * (self._costs.weights[unit.batch] if self._costs.weights else 1.0)
        work.tables = max(work.tables, unit.tables)
        if work.tables >= LEAST_THIN_TABLES:
            batch.table_changes.extend([self._filler(batch.seq)] * (work.tables - len(batch.table_changes)))
        batch.is_barrier = unit.is_alone
        if unit.is_alone or batch.is_full(self._sizing.limits):
            self._close(job)

    def _filler(self, seq: int) -> TableChanges:
        """Return a table that no other batch in flight changes: only its number counts."""
        oid = (1 << 31) + seq % _TREES
        if oid not in self._fillers:
            self._fillers[oid] = TableChanges(table_plan(oid, is_exclusive=False))
        return self._fillers[oid]

    def _close(self, job: SetJob) -> None:
        self._open = None
        self._timer += 1
        self._closing.closed()
        self._sizing.closed(job.batch)
        self._perform(self._flight.submit(job, self._now_s))

    def _wait(self, wait_s: float | None) -> None:
        """Close the open batch now or after some seconds, as the rules of closing say."""
        if wait_s == 0.0:
            assert self._open is not None
            self._close(self._open)
        elif wait_s is not None:
            self._timer += 1
            self._at(self._now_s + wait_s, partial(self._waited, self._timer))

    def _waited(self, timer: int) -> None:
        if timer == self._timer and self._open is not None:
            self._wait(self._closing.waited(self._open.batch, self._now_s))

    def _changed(self) -> None:
        if not self._state.jobs and self._pause_end_s > self._now_s:
            self._pause_end_s = 0.0
            self._read_later(self._now_s)
        if self._open is not None:
            self._wait(self._closing.look(self._open.batch, self._heard_s))
        if self._is_stopped and self._room.is_left(self._open_bytes):
            self._is_stopped = False
            self._heard_s = self._now_s
            self._read_later(self._now_s)

    # Workers

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Given):
                self._begin(self._workers[effect.asker], effect.job)
            elif isinstance(effect, Answer):
                job = self._state.jobs[effect.seq]
                assert isinstance(job, SetJob)
                self._flight.turns.heard(job)
                self._answered(job, effect.turn)

    def _ask(self, worker: _Worker) -> None:
        worker.job, worker.state, worker.since_s = None, WorkerState.IDLE, self._now_s
        self._perform(self._flight.ask(worker.number))
        if worker.job is None:
            self._changed()

    def _begin(self, worker: _Worker, job: Job) -> None:
        assert isinstance(job, SetJob)
        worker.job, worker.state, worker.since_s = job, WorkerState.EXECUTING, self._now_s
        self._worker_of[job.batch.seq] = worker
        self._n_held += 1
        job.times.started_s = self._now_s
        self._leader_free_s = made_s = (
            max(self._leader_free_s, self._now_s) + self._costs.make_s * self._works[job.batch.seq].changes
        )
        self._at(made_s, partial(self._execute, job))

    def _execute(self, job: SetJob) -> None:
        work, costs = self._works[job.batch.seq], self._costs
        if self._flight.turns.may_commit(job):
            job.is_one_flight = job.batch.n_changes <= ONE_FLIGHT
        else:
            keys = [key for changes in job.batch.table_changes for key in changes.late_keys]
            n_hot = costs.hot_rows.of(work.changes) if any(key.endswith(HOT) for key in keys) else 0  # type: ignore[union-attr]
            work.late_rows = min(work.changes, max(len(keys), n_hot))
        changes = max(0, work.changes - work.late_rows)
        work_s = (costs.batch_s + costs.change_s * changes) * work.weighed / max(work.changes, 1)
        heapq.heappush(self._executing, (self._done_s + work_s, job.batch.seq, job))

    def _executed(self, job: SetJob) -> None:
        worker = self._worker_of[job.batch.seq]
        worker.state, worker.since_s = WorkerState.WAITING, self._now_s
        job.times.executed_s = self._now_s
        if job.is_one_flight:
            self._commit(job)
            return
        turn = self._flight.turns.ask(job)
        if turn is not None:
            self._answered(job, turn)

    def _answered(self, job: SetJob, turn: CommitTurn) -> None:
        worker = self._worker_of[job.batch.seq]
        if turn is CommitTurn.COMMIT:
            worker.state = WorkerState.COMMITTING
            costs, late_rows = self._costs, self._works[job.batch.seq].late_rows
            late_s = costs.late_batch_s + costs.late_row_s * late_rows if late_rows else 0.0
            self._at(self._now_s + costs.turn_s + late_s, partial(self._commit, job))
        else:
            job.attempts += 1
            self._n_held -= 1
            self._flight.give_back(job)
            self._changed()
            self._ask(worker)

    def _commit(self, job: SetJob) -> None:
        commit_s = self._costs.commit_s
        end_s = self._flushed_s() if self._state.is_relaxed and self._costs.is_flushed else self._now_s + commit_s
        self._at(end_s, partial(self._committed, job))

    def _flushed_s(self) -> float:
        """Return when a COMMIT is durable: one flush at a time, the next one is of all that wait for it."""
        flush_s, at_s = self._costs.commit_s, self._now_s
        if self._flush_is_wanted and at_s >= self._flush_end_s:
            self._flush_end_s += flush_s
            self._flush_is_wanted = False
        if at_s >= self._flush_end_s:
            self._flush_end_s = at_s + flush_s
            return self._flush_end_s
        self._flush_is_wanted = True
        return self._flush_end_s + flush_s

    def _committed(self, job: SetJob) -> None:
        worker = self._worker_of.pop(job.batch.seq)
        self._n_held -= 1
        del self._works[job.batch.seq]
        self._perform(self._flight.committed(job, self._now_s))
        self._sizing.committed(job)
        self._changed()
        self._ask(worker)

    def _look(self) -> None:
        """Have the stall check take workers from batches that wait for long."""
        for worker in self._workers:
            if worker.job is not None and self._stalls.holds_up(worker, self._now_s):
                self._perform(self._flight.take_back(worker.job))
        self._at(self._now_s + self._stalls.check_s, self._look)
