"""What would dependencies and commit order allow? Replays source transactions on any number of workers, in both orders.

In: `Unit`s in source order, each with the time it took and the earlier units that had to come first. Out: a `WhatIf`.
Pure, and without Spark: a unit is read once, and only the last `WINDOW` of them are kept. A dependency on an older one
is treated as done, and counted.

The model is the daemon's: units are given out in source order, to any free worker, as soon as those they depend on have
committed. Where only some rows of a unit depend, the others are executed first and those follow when the unit may
commit (late keys). With the order kept a unit commits, and frees its worker, only after all earlier ones; relaxed it
does so at once. The backlog is there from the beginning: neither the publisher nor the daemon nor the processors of the
target are ever what is waited for. So the figures are what dependencies and order allow, no promise: that is
`prediction`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Order = Literal["preserve", "relaxed"]

#: Numbers of workers that are tried.
WORKERS: Final = (1, 2, 4, 8, 16, 32, 64)
#: Units whose end is remembered; memory is a few hundred bytes for each.
WINDOW: Final = 65_536
#: Different limits that are counted apart; what comes later is counted as "other".
LABELS: Final = 64
_ORDERS: Final[tuple[Order, ...]] = ("preserve", "relaxed")


class Label(NamedTuple):
    """What limits: a dependency's kind, table and key, or one of the constants below."""

    kind: str
    table: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return it in words: ``unique item_code_key in public.item``."""
        what = f"{self.kind} {self.name}" if self.name else self.kind
        return f"{what} in {self.table}" if self.table else what


#: The units themselves: nothing was waited for.
WORK: Final = Label("work")
#: With the order kept: the commits of earlier units.
COMMIT_ORDER: Final = Label("commit order")
#: The number of workers: more of them would help.
WORKERS_LABEL: Final = Label("workers")
OTHER: Final = Label("other")
#: The publisher's commits: a unit cannot be applied before it is there.
SOURCE: Final = Label("source")


class Edge(NamedTuple):
    """An earlier unit that must have committed first."""

    seq: int
    label: Label
    late_share: float = 1.0  # part of the execution that waits for it; 1: all, from its start
    is_barrier: bool = False  # everything up to `seq`


class Unit(NamedTuple):
    """What is applied by one worker at once: a source transaction. Numbers ascend, gaps are fine."""

    seq: int
    execute_s: float
    commit_s: float
    edges: Sequence[Edge] = ()
    release_s: float = 0.0  # when it could be read at the earliest


@dataclass(frozen=True, kw_only=True)
class Attainable:
    """One commit order with one number of workers."""

    order: Order
    workers: int  # 0: as many as there is work for
    makespan_s: float  # from the beginning until the last commit
    speed_up: float  # against one worker
    limit: Label  # what keeps it from being shorter


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What the units allow."""

    n_units: int
    work_s: float  # execution and commits of all of them, one after the other
    attainable: list[Attainable]
    #: By order: seconds of the longest chain, by what tied its links together. Their sum is its length.
    critical_path: dict[Order, dict[Label, float]] = field(default_factory=dict)
    n_forgotten: int = 0  # dependencies on units older than the window

    def of(self, order: Order, workers: int) -> Attainable:
        """Return the result for an order and a number of workers that was asked for.

        Raises:
            KeyError: it was not.
        """
        for one in self.attainable:
            if (one.order, one.workers) == (order, workers):
                return one
        raise KeyError((order, workers))


def what_if(
    units: Iterable[Unit],
    workers: Sequence[int] = WORKERS,
    *,
    window: int = WINDOW,
) -> WhatIf:
    """Replay units on so many workers, in both orders.

    Args:
        units: in source order (ascending `seq`).
        workers: numbers to try.
        window: units remembered.

    Raises:
        ValueError: the units are out of order.
    """
    chains = [_Chain(order, window) for order in _ORDERS]
    replays = [_Replay(order, window, n) for order in _ORDERS for n in workers]
    everyone: list[_Replay] = [*chains, *replays]
    labels: dict[Label, Label] = {}
    places: dict[int, int] = {}
    work_s, n_units, n_forgotten, last = 0.0, 0, 0, -1
    for unit in units:
        if unit.seq <= last:
            raise ValueError(f"unit {unit.seq} comes after unit {last}")
        links = _links(unit.edges, places, n_units, labels) if unit.edges else _NO_LINKS
        n_forgotten += len(unit.edges) - len(links)
        if links:
            for one in everyone:
                one.add(unit, links, n_units)
        else:
            for one in everyone:
                one.add_free(unit, n_units)
        places[unit.seq] = n_units
        if len(places) > window:
            del places[next(iter(places))]
        last, n_units, work_s = unit.seq, n_units + 1, work_s + unit.execute_s + unit.commit_s
    paths: dict[Order, dict[Label, float]] = {chain.order: chain.longest for chain in chains}
    return WhatIf(
        n_units=n_units,
        work_s=work_s,
        attainable=_monotonic([_attainable(one, work_s, paths[one.order]) for one in [*replays, *chains]]),
        critical_path=paths,
        n_forgotten=n_forgotten,
    )


def _monotonic(found: list[Attainable]) -> list[Attainable]:
    """Return the results with each speed-up against one worker, and none with more workers slower than with fewer.

    The rules are greedy: with one more worker a unit may start at once and leave rows for later, and end later. Workers
    that are not needed may be left idle.
    """
    best: dict[Order, float] = {}
    single: dict[Order, float] = {}
    shown = []
    for one in found:
        makespan_s = one.makespan_s
        if one.workers:
            makespan_s = best[one.order] = min(makespan_s, best.get(one.order, makespan_s))
        if one.workers == 1:
            single[one.order] = makespan_s
        base_s = single.get(one.order, one.speed_up * one.makespan_s)
        speed_up = base_s / makespan_s if makespan_s else 1.0
        shown.append(replace(one, makespan_s=makespan_s, speed_up=speed_up))
    return shown


def _attainable(replay: _Replay, work_s: float, path: dict[Label, float]) -> Attainable:
    """Return a result; no order of work ends before its longest chain does, nor before every worker is done."""
    length_s = sum(path.values())
    limit = WORKERS_LABEL
    if not replay.workers or work_s / replay.workers <= length_s:
        tied = {label: value for label, value in path.items() if label != WORK}
        limit = max(tied, key=lambda label: tied[label]) if tied else WORK
    return Attainable(
        order=replay.order,
        workers=replay.workers,
        makespan_s=replay.latest_s,
        speed_up=work_s / replay.latest_s if replay.latest_s else 1.0,
        limit=limit,
    )


class _Link(NamedTuple):
    """An edge with the place of its unit; -1 for everything before this one."""

    place: int
    label: Label
    late_share: float


_NO_LINKS: Final[list[_Link]] = []


def _links(edges: Sequence[Edge], places: dict[int, int], place: int, labels: dict[Label, Label]) -> list[_Link]:
    """Return the edges to units that are remembered; the others' have long committed."""
    links = []
    for edge in edges:
        at = places.get(edge.seq)
        if at is not None:
            label = labels.get(edge.label)
            if label is None:
                label = labels[edge.label] = edge.label if len(labels) < LABELS else OTHER
            links.append(_Link(-1 if edge.is_barrier and at == place - 1 else at, label, edge.late_share))
    return links


#: Of a unit: when what it depends on had committed, when it was executed but for late rows, when it might commit, how
#: long its late rows took, and when it had committed.
_Times = tuple[float, float, float, float, float]


class _Replay:
    """One order with one number of workers. Each unit's commit time is kept in a ring."""

    def __init__(self, order: Order, window: int, workers: int) -> None:
        self.order = order
        self.workers = workers
        self.latest_s = 0.0
        self._is_relaxed = order == "relaxed"
        self._window = window
        self._ends = [0.0] * window
        self._free = [0.0] * workers  # when each worker is free, ascending

    def add(self, unit: Unit, links: list[_Link], place: int) -> _Times:
        """Give a unit to a worker and note when it has committed."""
        _, execute_s, commit_s, _, ready_s = unit
        turn_s = late_s = 0.0
        if links:
            ready_s, late = self._ready(links, ready_s)
            if late:
                ready_s, share, turn_s = self._split(ready_s, late)
                if share:
                    late_s = share * execute_s
                    execute_s *= 1.0 - share
        start_s = self._start(ready_s)
        done_s = start_s + execute_s
        if not self._is_relaxed:
            turn_s = self.latest_s
        end_s = max(done_s, turn_s) + late_s + commit_s
        if self.workers:
            insort(self._free, end_s)
        self._ends[place % self._window] = end_s
        self.latest_s = max(self.latest_s, end_s)
        return ready_s, done_s, turn_s, late_s, end_s

    def add_free(self, unit: Unit, place: int) -> None:
        """Do the same for a unit that depends on nothing: nearly all of them, mostly."""
        free = self._free
        start_s = max(free.pop(0), unit.release_s)
        end_s = start_s + unit.execute_s
        if not self._is_relaxed:
            end_s = max(end_s, self.latest_s)
        end_s += unit.commit_s
        insort(free, end_s)
        self._ends[place % self._window] = end_s
        if end_s > self.latest_s:  # noqa: PLR1730  a call less
            self.latest_s = end_s

    def _ready(self, links: list[_Link], ready_s: float) -> tuple[float, list[tuple[float, float]]]:
        """Return when a unit may start, and for its late rows when those they follow have committed and their part.

        Args:
            links: of the unit.
            ready_s: when it is there.
        """
        late = []
        for place, _, share in links:
            end_s = self._end(place)
            if share >= 1.0:
                ready_s = max(ready_s, end_s)
            else:
                late.append((end_s, share))
        return ready_s, late

    def _split(self, ready_s: float, late: list[tuple[float, float]]) -> tuple[float, float, float]:
        """Return when a unit with late rows may start, which part of it is late then, and when that part may follow."""
        start_s = max(ready_s, self._free[0]) if self.workers else ready_s
        still = [(end_s, share) for end_s, share in late if end_s > start_s]
        share = sum([share for _, share in still])
        follow_s = max([end_s for end_s, _ in still], default=0.0)
        # With nothing to do until then it waits as a whole.
        return (max(ready_s, follow_s), 0.0, 0.0) if share >= 1.0 else (ready_s, share, follow_s)

    def _end(self, place: int) -> float:
        return self._ends[place % self._window] if place >= 0 else self.latest_s

    def _start(self, ready_s: float) -> float:
        """Take a worker: the one idle for the shortest time before the unit is ready, else the next free.

        So the others continue with later units.
        """
        free = self._free
        if not free:
            return ready_s
        index = bisect_right(free, ready_s) - 1
        if index < 0:
            return free.pop(0)
        del free[index]
        return ready_s


class _Chain(_Replay):
    """As many workers as there is work for: then the last commit is the end of the longest chain of dependencies."""

    def __init__(self, order: Order, window: int) -> None:
        super().__init__(order, window, 0)
        #: Of each unit in the ring: seconds of the chain that ends with it, by what tied its links.
        self._paths: list[dict[Label, float]] = [{}] * window
        self.longest: dict[Label, float] = {}

    def add(self, unit: Unit, links: list[_Link], place: int) -> _Times:
        """Do the same, and keep the chain that ends with the unit: its last link is what it waited for last."""
        ends = [(self._end(link.place), link) for link in links]
        before, before_s = self.longest, self.latest_s
        times = super().add(unit, links, place)
        ready_s, done_s, turn_s, late_s, end_s = times
        if turn_s > done_s:
            waited = max(ends, key=lambda one: one[0], default=None) if late_s or self._is_relaxed else None
            label = waited[1].label if waited else COMMIT_ORDER
            path = _longer(before if waited is None or not self._is_relaxed else self._path(waited[1]), label, late_s)
            path = _longer(path, label if self._is_relaxed else COMMIT_ORDER, end_s - turn_s - late_s)
        elif ready_s > unit.release_s:
            link = next(link for tied_s, link in ends if tied_s == ready_s)
            path = _longer(before if link.place < 0 else self._path(link), link.label, end_s - ready_s)
        else:
            path = _released(unit, end_s)
        self._paths[place % self._window] = path
        if end_s > before_s:
            self.longest = path
        return times

    def add_free(self, unit: Unit, place: int) -> None:
        """Do the same for a unit that depends on nothing."""
        end_s, commit_s = unit.release_s + unit.execute_s, unit.commit_s
        path = _released(unit, end_s + commit_s)
        if not self._is_relaxed and end_s < self.latest_s:
            path = _longer(self.longest, COMMIT_ORDER, commit_s)
            end_s = self.latest_s
        end_s += commit_s
        self._ends[place % self._window] = end_s
        self._paths[place % self._window] = path
        if end_s > self.latest_s:
            self.latest_s = end_s
            self.longest = path

    def _path(self, link: _Link) -> dict[Label, float]:
        return self._paths[link.place % self._window]


def _released(unit: Unit, end_s: float) -> dict[Label, float]:
    """Return the chain of a unit that waited for nothing but to be there."""
    path = {WORK: end_s - unit.release_s}
    return {SOURCE: unit.release_s, **path} if unit.release_s else path


def _longer(path: dict[Label, float], label: Label, by_s: float) -> dict[Label, float]:
    return {**path, label: path.get(label, 0.0) + by_s} if by_s else path
