"""Slowdown of a statement by others that run beside it: learned from a log, predicted for any number of them.

In: for each batch the seconds it executed with one, two ... batches executing at a time. Out: a `Contention`, which
divides a batch's work into a part that needs a processor and one that only waits (disk, network), and has a number of
processors. Pure.

A batch takes turns: it needs a processor, and it waits for something that serves all at a time. The number of n batches
that then need one is the "machine repairman" of queueing theory, and known exactly.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf, log, sqrt
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Batches that execute at a time: as many as there may be workers.
MOST: Final = 64
#: By which power of their number batches wait longer for disk, locks and wake-ups: a fourteenth for each doubling. With
#: 2, 4, 8 and 16 that read slowly, what was left beside the processors' part grew so (docs/WHATIF.md).
_CROWD: Final = 0.1
#: Part by which each session that has to wait for a processor makes the work of all longer: it may hold a latch when it
#: loses its processor, and others then spin, sleep and wake up for nothing.
_PREEMPTED: Final = 0.025
#: Numbers of processors that are tried where it is not known. inf: nothing is ever waited for.
_TRIED: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, inf)
#: Twice the logarithm by which a number of processors may be less likely than the likeliest: 95 of 100 true ones are.
_PLAUSIBLE: Final = 3.84
#: Neighbouring batches share what slows them down, so that this number of them counts as one in that comparison.
_ALIKE: Final = 4
_STEPS: Final = 40
#: Least ratio of large batches to small ones from which the time of a batch alone can be computed.
_APART: Final = 1.5


@dataclass(frozen=True, kw_only=True)
class Contention:
    """The waits of batches that execute at a time."""

    cpu_share: float  # part of a batch's execution alone that needs a processor
    processors: float  # that serve it; fewer than the machine has where other processes also need them for each batch

    def slowdowns(self, most: int = MOST) -> list[float]:
        """Return the factors by which a batch takes longer with 0, 1, 2 ... of them executing."""
        return [1.0, *[self._slowdown(n) for n in range(1, most + 1)]]

    def busy(self, n: int) -> float:
        """Return how many processors a number of them that execute keep busy, on average."""
        return self._in_service(n)[0]

    def _slowdown(self, n: int) -> float:
        if self.processors == inf or not self.cpu_share:
            return float(n**_CROWD)
        by_itself = 1.0 - self.cpu_share + self.cpu_share / min(1.0, self.processors)
        return n * self.cpu_share / (self._in_service(n)[1] * by_itself)

    def _in_service(self, n: int) -> tuple[float, float]:
        """Return the processors that are busy on average while a number execute, and the work that these do."""
        work, wait = self.cpu_share, (1.0 - self.cpu_share) * n**_CROWD
        if not wait:
            served = min(float(n), self.processors)
            return served, self._done(n)
        # Likelihoods that 0, 1, 2 ... need a processor, as multiples of that for 0.
        likely, total, busy, done = 1.0, 1.0, 0.0, 0.0
        for j in range(1, n + 1):
            likely *= (n - j + 1) * work / (wait * self._done(j))
            total += likely
            busy += min(float(j), self.processors) * likely
            done += self._done(j) * likely
        return busy / total, done / total

    def _done(self, n: int) -> float:
        """Return the work that is done in a second while a number need a processor."""
        served = min(float(n), self.processors)
        return served / (1.0 + _PREEMPTED * self.cpu_share * (n - served))


class Executed(NamedTuple):
    """One batch's execution."""

    changes: int
    seconds_by_n: dict[int, float]  # by how many batches executed then, this one included


def beside(spans: Sequence[tuple[float, float]]) -> list[dict[int, float]]:
    """Return for each span (begin, end) its seconds by the number of spans at the time."""
    points = sorted(
        [(begin_s, 1, index) for index, (begin_s, end_s) in enumerate(spans) if end_s > begin_s]
        + [(end_s, 0, index) for index, (begin_s, end_s) in enumerate(spans) if end_s > begin_s]
    )
    found: list[defaultdict[int, float]] = [defaultdict(float) for _ in spans]
    now: set[int] = set()
    before_s = 0.0
    for at_s, is_begin, index in points:
        if at_s > before_s:
            n = len(now)
            for one in now:
                found[one][n] += at_s - before_s
        before_s = at_s
        if is_begin:
            now.add(index)
        else:
            now.discard(index)
    return [dict(one) for one in found]


def alone_s(executed: Executed, slowdowns: Sequence[float]) -> float:
    """Return the seconds that a batch would have taken alone."""
    return sum([seconds / slowdowns[n] for n, seconds in executed.seconds_by_n.items()])


@dataclass(frozen=True, kw_only=True)
class Processors:
    """Known facts of the processors that the statements use."""

    number: int = 0  # of the target's machine; 0: not known
    #: Processor seconds of the workers' sessions while batches executed; None: not counted.
    sessions_s: float | None = None
    sessions: float = 0.0  # processors that the sessions took in the seconds that were counted, on average
    #: The same of processes that also work for each batch: the daemon's leader, the publisher's sender.
    leader: float = 0.0
    others: float = 0.0  # the same of everything else on the machine
    #: Part of the samples of executing sessions that were on a processor; None: no samples.
    cpu_share: float | None = None

    @property
    def served(self) -> tuple[float, float, float]:
        """Return how many processors the sessions can have: if others give way, as a mean, if others do not.

        Processes that work for each batch take their part of any of them. The work of others may belong to that, or to
        nothing here; they share fairly, but the number of sharers is not known.
        """
        part = self.sessions / (self.sessions + self.leader) if self.sessions else 1.0
        most = self.number * part
        least = min(most, max(self.number - self.others, self.sessions + self.leader) * part)
        return most, sqrt(most * least), least


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Contention as a log shows it."""

    best: Contention  # as it is taken for
    least: Contention  # the least contention that the log does not rule out
    most: Contention  # the most
    is_known: bool  # the processors are known, and what the sessions took of them


def learn(executed: Sequence[Executed], known: Processors) -> Learned:
    """Return what batches waited for that executed at a time.

    The counted processors of the target decide, if they are known. Otherwise the number is the one with which batches
    took most nearly the same time for each change by themselves, whatever ran beside them.
    """
    by_n: defaultdict[int, float] = defaultdict(float)
    for each in executed:
        for n, seconds in each.seconds_by_n.items():
            by_n[n] += seconds
    total_s = sum(by_n.values())
    if known.number and known.sessions_s is not None and total_s:
        least, best, most = (
            Contention(cpu_share=_measured_share(by_n, processors, known.sessions_s), processors=processors)
            for processors in known.served
        )
        return Learned(best=best, least=least, most=most, is_known=True)
    found = []
    for processors in _TRIED:
        share = 1.0 if known.cpu_share is None else known.cpu_share
        if known.cpu_share is not None and processors < inf:
            share = _sampled_share(by_n, processors, total_s * (1.0 - known.cpu_share))
        one = Contention(cpu_share=share, processors=processors)
        found.append((_unlikely(executed, one), one))
    if not found or not total_s:
        nothing = Contention(cpu_share=0.0, processors=inf)
        return Learned(best=nothing, least=nothing, most=nothing, is_known=False)
    least_unlikely = min(value for value, _ in found)
    plausible = [one for value, one in found if value - least_unlikely <= _PLAUSIBLE]
    most, least = plausible[0], plausible[-1]
    return Learned(best=plausible[len(plausible) // 2], least=least, most=most, is_known=False)


def _measured_share(by_n: Mapping[int, float], processors: float, sessions_s: float) -> float:
    """Return the part with which the batches would have taken the processor seconds that they took."""

    def is_enough(share: float) -> bool:
        one = Contention(cpu_share=share, processors=processors)
        return sum([seconds / n * one.busy(n) for n, seconds in by_n.items()]) >= sessions_s

    return _first(is_enough)


def _sampled_share(by_n: Mapping[int, float], processors: float, waited_s: float) -> float:
    """Return the part with which what is no processor time would be what the samples say."""
    return _first(lambda share: (1.0 - share) * _work_s(by_n, share, processors) <= waited_s)


def _first(is_enough: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def _work_s(seconds_by_n: Mapping[int, float], share: float, processors: float) -> float:
    slowdowns = Contention(cpu_share=share, processors=processors).slowdowns(max(seconds_by_n, default=0))
    return sum([seconds / slowdowns[n] for n, seconds in seconds_by_n.items()])


def _unlikely(executed: Sequence[Executed], contention: Contention) -> float:
    """Return how badly the batches' seconds by themselves fit one line of their changes; less is likelier."""
    slowdowns = contention.slowdowns(max([n for one in executed for n in one.seconds_by_n], default=0))
    line = fit([(one.changes, alone_s(one, slowdowns)) for one in executed if one.changes])
    return len(executed) / _ALIKE * log(max(line.error, 1e-9))


class Line(NamedTuple):
    """Seconds of a batch: a fixed part, and a part for each change."""

    batch_s: float
    change_s: float
    error: float  # mean square of the relative errors, each weighed by its changes

    def seconds(self, changes: int) -> float:
        """Return the seconds of a batch with this number of changes."""
        return self.batch_s + self.change_s * changes


def line_of_sizes(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the seconds of a batch for itself, and for each change, by how small batches differ from large ones.

    Medians of a third of the batches each, so that a few odd ones do not count. Where all are about as large, the two
    cannot be separated, and all the time is given to the changes. Their sum stays.
    """
    ordered = sorted([point for point in points if point[0]])
    if not ordered:
        return 0.0, 0.0
    third = max(1, len(ordered) // 3)
    (small, small_s), (large, large_s) = (
        (median([changes for changes, _ in some]), median([seconds for _, seconds in some]))
        for some in (ordered[:third], ordered[-third:])
    )
    total = sum([changes for changes, _ in ordered])
    total_s = sum([seconds for _, seconds in ordered])
    batch_s = 0.0
    if large >= _APART * small:
        slope = (large_s - small_s) / (large - small)
        batch_s = min(max(0.0, small_s - slope * small), small_s, total_s / len(ordered))
    return batch_s, (total_s - batch_s * len(ordered)) / total


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """Return the line through batches (changes, seconds) that is nearest to them in seconds a change."""
    total = sum([changes for changes, _ in points])
    if not total:
        return Line(0.0, 0.0, 0.0)
    # y = b + a x with x = 1 / changes, weighed by changes.
    mean_x = len(points) / total
    mean_y = sum([seconds for _, seconds in points]) / total
    spread = sum([changes * (1 / changes - mean_x) ** 2 for changes, _ in points])
    slope = 0.0
    if spread > 1e-12 * total:
        both = sum([changes * (1 / changes - mean_x) * (s / changes - mean_y) for changes, s in points])
        # Neither a batch nor a change takes less than nothing.
        slope = min(max(0.0, both / spread), mean_y / mean_x)
    change_s = mean_y - slope * mean_x
    square = sum([changes * (s / changes - change_s - slope / changes) ** 2 for changes, s in points]) / total
    return Line(slope, change_s, square / mean_y**2 if mean_y else 0.0)
