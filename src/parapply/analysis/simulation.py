"""The daemon's rules, played through in simulated time: how long a stream takes with other workers.

In: a `Load`, which is the stream in small parts with the work of each, and a `Plant`, which is what applies it. Out: a
`Played`. Pure; one event after the other, no clock.

A batch is formed as `runtime/intake` forms it: it closes at its limits, which grow and shrink by the rule of
`engine/pace.py`, or when a worker is free and nothing more is at hand. Two more than there are workers may
be closed. It executes as fast as the others that execute at the time let it, waits for its turn, applies its late rows
and commits: one after the other with the order kept, else sharing flushes as the target's sessions do.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from parapply.config import MEMORY_LIMIT_BYTES
from parapply.engine.intake import AHEAD, BEHIND_S, COLLECT_S, WORTH_A_WORKER
from parapply.engine.pace import BatchSizing
from parapply.plan.batch import FEW_CHANGES, LEAST_THIN_TABLES, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

Order = Literal["preserve", "relaxed"]


class Stretch(NamedTuple):
    """Neighbouring source transactions that stay together."""

    transactions: int
    changes: int  # at least 1
    size_bytes: int
    release_s: float  # when it can be read at the earliest; ascending
    due_s: float  # the same by the publisher's commit alone: a part that is read later is late
    weight: float = 1.0  # time of its changes, as a multiple of the average
    tables: int = 1
    late_rows: int = 0  # rows that have to follow the commit of their holder
    holder: int = -1  # the place of the last part that holds them; -1: nothing is held
    waits: bool = False  # the whole has to follow
    seen_from: int = 0  # the place of the first part whose rows are known to be held or not


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A daemon and a target that apply a load.

    Attributes:
        workers: of the daemon.
        order: of the commits.
        limits: a batch's transactions, changes and bytes at most.
        scale: of the first size of a batch, 1.0 at the beginning of a run.
        batch_s: seconds of any batch alone, whatever its size.
        change_s: and each change of it.
        late_batch_s: in the turn of a batch with late rows.
        late_row_s: and for each of them.
        late_pairs: share of all pairs of changes that are of one row; it stands for holders that the log does not name.
        commit_s: a COMMIT with nothing beside it.
        turn_s: from when a batch may commit until its COMMIT begins.
        slowdowns: how many times as long with 0, 1, 2 ... batches executing.
        backlog_s: what is read so late is part of a backlog.
        linger_s: that a batch of a backlog waits for more.
    """

    workers: int
    order: Order
    limits: tuple[int, int, int]
    scale: float = 1.0
    batch_s: float
    change_s: float
    late_batch_s: float = 0.0
    late_row_s: float = 0.0
    late_pairs: float = 0.0
    commit_s: float
    turn_s: float = 0.0
    slowdowns: Sequence[float]
    backlog_s: float = 0.05
    linger_s: float = 0.002


@dataclass(frozen=True, kw_only=True)
class Played:
    """The outcome of a simulation.

    Attributes:
        seconds: from the first start to the last commit.
        delay_s: mean over the transactions, from when they could be read to their commit.
        batches: formed.
        idle_s: a worker was free, and nothing closed waited for it, though more was to come.
        ended_s: the same after the last batch was closed.
        blocked_s: a worker was free, and every closed batch had to wait for another one's commit.
        turn_s: all had a batch, and most of them waited for commits.
        executing_s: all had a batch, and most of them executed.
    """

    seconds: float
    delay_s: float
    batches: int
    idle_s: float
    ended_s: float
    blocked_s: float
    turn_s: float
    executing_s: float


class Load:
    """A stream in parts, with sums that give at once the contents of any stretch of it."""

    def __init__(self, parts: Sequence[Stretch]) -> None:
        """Add up.

        Raises:
            ValueError: there is no part.
        """
        if not parts:
            raise ValueError("a load needs at least one part")
        self.parts: Final = parts
        self.transactions: Final = [0, *accumulate([one.transactions for one in parts])]
        self.changes: Final = [0, *accumulate([one.changes for one in parts])]
        self.size_bytes: Final = [0, *accumulate([one.size_bytes for one in parts])]
        self.weights: Final = [0.0, *accumulate([one.weight * one.changes for one in parts])]
        self.releases_s: Final = [one.release_s for one in parts]

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self.parts)

    def end(self, begin: int, limits: Limits) -> int:
        """Return the end of a batch that is as large as it may be; one more than there are parts if none is."""
        end = self._end(begin, limits.transactions, limits.changes, limits.size_bytes)
        tables = self.parts[begin].tables
        thick = FEW_CHANGES * tables if tables >= LEAST_THIN_TABLES else 0
        if end > len(self.parts) or self.changes[end] - self.changes[begin] >= thick:
            return end
        return self._end(begin, limits.most_transactions, min(thick, limits.most_changes), limits.most_bytes)

    def _end(self, begin: int, transactions: int, changes: int, size_bytes: int) -> int:
        return min(
            bisect_left(self.transactions, self.transactions[begin] + transactions),
            bisect_left(self.changes, self.changes[begin] + changes),
            bisect_left(self.size_bytes, self.size_bytes[begin] + size_bytes),
        )


class _Batch:
    __slots__ = (
        "begin",
        "changes",
        "end",
        "executed_s",
        "holders",
        "late_rows",
        "started_s",
        "state",
        "waits",
    )

    def __init__(self, begin: int, end: int, changes: int) -> None:
        self.begin = begin
        self.end = end
        self.changes = changes
        self.late_rows = 0
        self.holders: set[int] = set()  # places of the batches that hold its late rows, or all of it, and are to commit
        self.waits = False
        self.started_s = self.executed_s = 0.0
        self.state = _CLOSED


_CLOSED, _EXECUTING, _EXECUTED, _COMMITTING, _COMMITTED = range(5)


def play(load: Load, plant: Plant) -> Played:
    """Apply a load, and return the seconds that it took."""
    return _Simulation(load, plant).run()


class _Simulation:
    def __init__(self, load: Load, plant: Plant) -> None:
        self._load = load
        self._plant = plant
        self._is_relaxed = plant.order == "relaxed"
        self._sizing = BatchSizing(Limits(*plant.limits), plant.scale, memory_bytes=MEMORY_LIMIT_BYTES)
        self._linger_s = plant.linger_s + COLLECT_S
        releases_s = load.releases_s
        #: Parts before which nothing comes for that time, and the end. A backlog has none: when its parts could be read
        #: is known as a mean only.
        self._gaps = [
            at
            for at in range(1, len(load))
            if releases_s[at] - releases_s[at - 1] >= self._linger_s
            and releases_s[at] - load.parts[at].due_s <= plant.backlog_s
        ]
        self._gaps.append(len(load))
        self._now_s = 0.0
        self._next = 0  # part that is not in a closed batch yet
        self._opened_s = 0.0  # the batch before was closed
        self._wake_s = 0.0  # when intake has something to do
        self._batches: list[_Batch] = []
        self._batch_of: list[int] = [-1] * len(load)
        self._ready: list[int] = []  # heap of places that may start
        self._n_ready = self._n_blocked = self._n_executing = self._n_held = 0
        self._followers: dict[int, list[int]] = {}  # by the place of what they wait for, to start
        self._late: dict[int, list[int]] = {}  # the same, to commit
        self._head = 0
        # Work that each executing batch has done since the beginning; all of them work at the same speed.
        self._done_s = 0.0
        self._executing: list[tuple[float, int]] = []  # heap of work at its end, place
        self._committing: list[tuple[float, int]] = []  # heap of time, place
        self._flush_end_s = 0.0
        self._flush_is_wanted = False
        self._spent = [0.0, 0.0, 0.0, 0.0, 0.0]
        # Drawn alike in each play, so that a difference is one of the plants.
        self._random = Random(0)  # noqa: S311  no secret
        self._delay_s = 0.0

    def run(self) -> Played:
        first_s: float | None = None
        n_parts = len(self._load)
        while self._head < len(self._batches) or self._next < n_parts:
            self._intake()
            # Where one starts there may be room for the next, or a worker that waits for it.
            while self._start():
                self._intake()
            if first_s is None and self._n_held:
                first_s = self._now_s
            self._advance()
        load = self._load
        idle_s, blocked_s, turn_s, executing_s, ended_s = self._spent
        return Played(
            seconds=self._now_s - (first_s or 0.0),
            delay_s=self._delay_s / max(load.transactions[-1], 1),
            batches=len(self._batches),
            idle_s=idle_s,
            ended_s=ended_s,
            blocked_s=blocked_s,
            turn_s=turn_s,
            executing_s=executing_s,
        )

    def _intake(self) -> None:
        """Close what may be closed now, and note when there may be more."""
        load, now_s = self._load, self._now_s
        n_parts = len(load)
        self._wake_s = inf
        while self._next < n_parts:
            n_waiting = self._n_blocked if self._is_relaxed else 0
            n_there = self._n_held + self._n_ready + self._n_blocked
            if n_there - n_waiting >= self._plant.workers + AHEAD:
                return
            begin = self._next
            full = load.end(begin, self._sizing.limits)
            end = min(full, n_parts)
            at_s = load.releases_s[end - 1]
            if at_s > now_s or full > n_parts:
                is_idle = self._n_held < self._plant.workers
                if not is_idle or (not self._is_relaxed and self._n_ready + self._n_blocked):
                    # A commit, or a worker that has ended, comes first where the stream ends here.
                    self._wake_s = at_s if full <= n_parts else inf
                    return
                end, at_s = self._due(begin, end, n_there)
                if at_s > now_s:
                    self._wake_s = at_s
                    return
            self._close(begin, end)

    def _due(self, begin: int, end: int, n_there: int) -> tuple[int, float]:
        """Return the batch that a free worker gets, and the time."""
        load, now_s = self._load, self._now_s
        releases_s = load.releases_s
        there = bisect_right(releases_s, now_s, begin, end)
        if there == begin:
            return begin, releases_s[begin]
        if now_s - load.parts[there - 1].due_s > self._plant.backlog_s:
            there = min(end, self._gaps[bisect_left(self._gaps, there)])
            if there == len(load):
                return there, releases_s[-1]
            return there, releases_s[there - 1] + (self._linger_s if there < end else 0.0)
        is_worth_it = load.changes[there] - load.changes[begin] >= WORTH_A_WORKER
        if self._is_relaxed or not n_there or is_worth_it:
            return there, now_s
        return there, max(self._opened_s, releases_s[begin]) + BEHIND_S

    def _close(self, begin: int, end: int) -> None:
        load = self._load
        place = len(self._batches)
        batch = _Batch(begin, end, load.changes[end] - load.changes[begin])
        self._batches.append(batch)
        self._next = end
        self._opened_s = self._now_s
        self._batch_of[begin:end] = [place] * (end - begin)
        for part in load.parts[begin:end]:
            if 0 <= part.holder < begin:
                holder = self._batch_of[part.holder]
                if self._batches[holder].state != _COMMITTED:
                    batch.holders.add(holder)
                    batch.waits = batch.waits or part.waits
                    batch.late_rows = max(batch.late_rows, min(part.late_rows, batch.changes))
        if self._plant.late_pairs:
            self._hold(batch)
        batch.waits = batch.waits or (batch.late_rows > 0 and batch.late_rows == batch.changes)
        if batch.waits:
            batch.late_rows = 0
            self._n_blocked += 1
        else:
            if not batch.late_rows:
                batch.holders.clear()
            self._n_ready += 1
            heapq.heappush(self._ready, place)
        waiting = self._followers if batch.waits else self._late
        for holder in batch.holders:
            waiting.setdefault(holder, []).append(place)

    def _hold(self, batch: _Batch) -> None:
        """Add late rows that batches hold which were not under way beside this one when the log was written."""
        load, until = self._load, min(self._load.parts[batch.begin].seen_from, batch.begin)
        holders = []
        for place in range(self._head, len(self._batches) - 1):
            other = self._batches[place]
            if other.begin >= until:
                break
            if other.state != _COMMITTED:
                holders.append((place, load.changes[min(other.end, until)] - load.changes[other.begin]))
        expected = self._plant.late_pairs * batch.changes * sum([changes for _, changes in holders])
        for _ in range(self._drawn(expected, batch.changes - batch.late_rows)):
            (holder,) = self._random.choices(holders, [changes for _, changes in holders])
            batch.late_rows += 1
            batch.holders.add(holder[0])

    def _drawn(self, expected: float, most: int) -> int:
        """Return the number of rare events that happen (Poisson): the times between them are exponential."""
        number, at = 0, self._random.expovariate(1.0)
        while at < expected and number < most:
            number, at = number + 1, at + self._random.expovariate(1.0)
        return number

    def _start(self) -> bool:
        """Give closed batches to free workers; return whether there was one."""
        load, plant = self._load, self._plant
        n_held = self._n_held
        while self._ready and self._n_held < plant.workers:
            place = heapq.heappop(self._ready)
            self._n_ready -= 1
            self._n_held += 1
            self._n_executing += 1
            batch = self._batches[place]
            batch.state = _EXECUTING
            batch.started_s = self._now_s
            if not batch.holders:
                batch.late_rows = 0
            changes = batch.changes - batch.late_rows
            weight = (load.weights[batch.end] - load.weights[batch.begin]) / batch.changes
            work_s = (plant.batch_s + plant.change_s * changes) * weight
            heapq.heappush(self._executing, (self._done_s + work_s, place))
        return self._n_held > n_held

    def _advance(self) -> None:
        """Go on to the next thing that happens, and let it happen."""
        slowdowns = self._plant.slowdowns
        slowdown = slowdowns[min(self._n_executing, len(slowdowns) - 1)]
        executed_s = committed_s = inf
        if self._executing:
            executed_s = self._now_s + (self._executing[0][0] - self._done_s) * slowdown
        if self._committing:
            committed_s = self._committing[0][0]
        next_s = min(executed_s, committed_s, self._wake_s)
        if next_s == inf:
            raise RuntimeError("nothing is under way, and something is left")
        passed_s = max(0.0, next_s - self._now_s)
        self._count(passed_s)
        self._now_s = max(self._now_s, next_s)
        if self._executing:
            self._done_s += passed_s / slowdown
        if executed_s == next_s:
            done_s, place = heapq.heappop(self._executing)
            self._done_s = done_s
            self._executed(place)
        elif committed_s == next_s:
            _, place = heapq.heappop(self._committing)
            self._committed(place)

    def _count(self, passed_s: float) -> None:
        if self._n_held < self._plant.workers:
            state = 1 if self._n_blocked else 0 if self._next < len(self._load) else 4
        else:
            state = 3 if 2 * self._n_executing >= self._n_held else 2
        self._spent[state] += passed_s

    def _executed(self, place: int) -> None:
        batch = self._batches[place]
        batch.state = _EXECUTED
        self._n_executing -= 1
        batch.executed_s = self._now_s
        self._may_commit(place)

    def _may_commit(self, place: int) -> None:
        batch = self._batches[place]
        if batch.state != _EXECUTED or not (not batch.holders if self._is_relaxed else place == self._head):
            return
        batch.state = _COMMITTING
        late_s = self._plant.late_batch_s + self._plant.late_row_s * batch.late_rows if batch.late_rows else 0.0
        at_s = self._now_s + self._plant.turn_s + late_s
        end_s = self._flushed_s(at_s) if self._is_relaxed else at_s + self._plant.commit_s
        heapq.heappush(self._committing, (end_s, place))

    def _flushed_s(self, at_s: float) -> float:
        """Return the time when a COMMIT is durable: one flush at a time, the next one is of all that wait for it."""
        flush_s = self._plant.commit_s
        if self._flush_is_wanted and at_s >= self._flush_end_s:
            self._flush_end_s += flush_s
            self._flush_is_wanted = False
        if at_s >= self._flush_end_s:
            self._flush_end_s = at_s + flush_s
            return self._flush_end_s
        self._flush_is_wanted = True
        return self._flush_end_s + flush_s

    def _committed(self, place: int) -> None:
        load, batch = self._load, self._batches[place]
        batch.state = _COMMITTED
        self._n_held -= 1
        middle_s = (load.releases_s[batch.begin] + load.releases_s[batch.end - 1]) / 2
        n_transactions = load.transactions[batch.end] - load.transactions[batch.begin]
        self._delay_s += (self._now_s - middle_s) * n_transactions
        limits = self._sizing.limits
        if (
            n_transactions >= limits.transactions
            or batch.changes >= limits.changes
            or load.size_bytes[batch.end] - load.size_bytes[batch.begin] >= limits.size_bytes
        ):
            self._sizing.learn(batch.changes, load.parts[batch.begin].tables, batch.executed_s - batch.started_s)
        while self._head < len(self._batches) and self._batches[self._head].state == _COMMITTED:
            self._head += 1
        for follower in self._followers.pop(place, ()):
            self._batches[follower].holders.discard(place)
            if not self._batches[follower].holders:
                self._n_blocked -= 1
                self._n_ready += 1
                heapq.heappush(self._ready, follower)
        for late in self._late.pop(place, ()):
            self._batches[late].holders.discard(place)
            self._may_commit(late)
        if not self._is_relaxed and self._head < len(self._batches):
            self._may_commit(self._head)
