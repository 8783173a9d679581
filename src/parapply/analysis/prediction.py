"""Predictions for other numbers of workers from the batches of a log, which it learns from and then simulates.

In: `Recorded` batches of one run in source order, and its `Second`s. Out: a `Predicted` for each order and number of
workers, with an interval. Pure, without Spark; the caller says how many batches it can hold.

Learned are the times of a batch and of a change alone, and how much longer they take beside others (`contention`); the
times of a COMMIT and of a late row; and when the stream could have been read, had nothing held it up. The simulation
follows the daemon's rules (`simulation`). The run itself is also simulated, and its error corrects every prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import hypot, log2, sqrt
from statistics import fmean, median
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply import config
from parapply.analysis.contention import Executed, Learned, Line, Processors, alone_s, beside, fit, learn, line_of_sizes
from parapply.analysis.simulation import Load, Order, Plant, Played, Stretch, play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.analysis.contention import Contention

ORDERS: Final[tuple[Order, ...]] = ("preserve", "relaxed")
#: Parts that a recorded batch is cut into at most: so finely batches are formed again.
_CUT: Final = 16
#: Seconds that the way from the publisher takes at most: more is waiting.
_LONGEST_WAY_S: Final = 1.0
#: Least error of any prediction, and by how much it may be too long or too short with each doubling of the workers.
#: Effects that the model does not know mostly make more of them slower (docs/WHATIF.md, "How good it is").
_LEAST_ERROR: Final = 0.05
_SHORTER_EACH: Final = 0.05
_LONGER_EACH: Final = 0.25
#: The same with each halving, both ways.
_FEWER_EACH: Final = 0.10
#: Least variation of the source from one time to another.
_LEAST_SOURCE_ERROR: Final = 0.01
#: Windows of a log whose speeds are compared, and standard errors of their sum that are within the interval.
_WINDOWS: Final = 12
#: Batches of each worker in a window: how many of them end in it is chance.
_WAVES: Final = 4
_SIGMAS: Final = 2.0
#: Largest factor by which a prediction is put right.
_MOST_RIGHT: Final = 1.5
#: Factor by which twice the workers must be faster for their number to be the limit.
_WORTH: Final = 1.25
#: Part of a processor from which on the leader has no more to give.
_FULL: Final = 0.7
#: Flushes that a COMMIT waits for on average where another one is always under way: half of that, and its own.
_FLUSHES: Final = 1.5
#: Multiple of the usual time from which on a COMMIT was held up by something else.
_ODD: Final = 10
#: Number of batches of one size from which on they were as large as they may be.
_SEVERAL: Final = 3


class Recorded(NamedTuple):
    """A batch's record; seconds are of one clock, but `due_s`."""

    seq: int
    transactions: int
    changes: int
    size_bytes: int
    tables: int
    received_s: float
    started_s: float
    committed_s: float
    due_s: float  # its last transaction's commit, by the publisher's clock
    execute_s: float
    commit_s: float
    late_rows: int = 0
    holder_seq: int = -1  # the batch that it, or its late rows, waited for last
    waits: bool = False  # as a whole
    is_one_flight: bool = False
    flight_commit_s: float = 0.0


class Second(NamedTuple):
    """An interval's record."""

    ended_s: float
    length_s: float
    workers: int
    leader_cpu_s: float
    paused_s: float
    samples: int = 0  # of executing sessions
    on_cpu: int = 0  # of these
    order: str = ""
    max_transactions: int = 0
    max_changes: int = 0
    max_bytes: int = 0
    processors: int = 0
    busy_s: float = 0.0
    sessions_s: float = 0.0
    sender_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One commit order with one number of workers.

    Attributes:
        order: of the commits.
        workers: of the daemon.
        seconds: from the first start to the last commit.
        least_s: the shortest time that the log does not rule out for another run of that kind.
        most_s: the longest.
        delay_s: mean over the transactions, from when they could be read to their commit.
        batches: formed.
        limit: source, publisher, leader, dependencies, commits, processors, workers.
    """

    order: Order
    workers: int
    seconds: float
    least_s: float
    most_s: float
    delay_s: float
    batches: int
    limit: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions from one log.

    Attributes:
        order: that the daemon had.
        workers: that it had.
        measured_s: of the batches, from the first start to the last commit.
        played_s: the same in simulated time, not put right.
        predicted: for each order and number.
        learned: about contention.
        plant: as the daemon was.
    """

    order: Order
    workers: int
    measured_s: float
    played_s: float
    predicted: tuple[Predicted, ...]
    learned: Learned
    plant: Plant

    def of(self, order: Order, workers: int) -> Predicted:
        """Return one of them.

        Raises:
            KeyError: it was not asked for.
        """
        for one in self.predicted:
            if (one.order, one.workers) == (order, workers):
                return one
        raise KeyError((order, workers))


def predict(  # noqa: PLR0913  what a log does not say is asked for
    recorded: Sequence[Recorded],
    seconds: Sequence[Second],
    workers: Sequence[int],
    *,
    order: Order | None = None,
    flush_share: float | None = None,
    processors: int = 0,
) -> Prediction:
    """Return predictions for numbers of workers from the batches of a log.

    Args:
        recorded: of one run, in source order, at least one.
        seconds: of the same run, in order; of an old log none.
        workers: numbers to predict.
        order: that the daemon had; None: as the log says, else preserve.
        flush_share: of a flight with its COMMIT, the part of a COMMIT by itself, where the log measured none.
        processors: of the target, where the log does not say.

    Raises:
        ValueError: there is no batch, or the batches are out of order.
    """
    _check_order(recorded)
    had_order: Order = order or ("relaxed" if any(one.order == "relaxed" for one in seconds) else "preserve")
    had_workers = max((one.workers for one in seconds), default=0) or _most_at_a_time(recorded)
    commit_s, late = _commits(recorded, flush_share)
    seen_from, late_pairs = _held(recorded)
    spans, executed = _executed(recorded, commit_s)
    learned = learn(executed, _processors(seconds, spans, processors))
    feed = _feed(recorded, seconds)
    limits = _limits(recorded, seconds)
    base = Plant(
        workers=had_workers, order=had_order, limits=limits, scale=_scale(recorded, limits, had_workers), batch_s=0.0,
        change_s=0.0, late_batch_s=late.batch_s, late_row_s=late.change_s, late_pairs=late_pairs,
        # With relaxed order COMMITs met a flush that was under way, and waited for the next one.
        commit_s=commit_s / _FLUSHES if had_order == "relaxed" else commit_s,
        turn_s=_turn_s(recorded, is_relaxed=had_order == "relaxed"), slowdowns=(1.0,),
    )  # fmt: skip

    def player(contention: Contention) -> _Player:
        slowdowns = contention.slowdowns(2 * max([*workers, had_workers]))
        works = [(one.changes, alone_s(one, slowdowns) if one.seconds_by_n else 0.0) for one in executed]
        batch_s, change_s = line_of_sizes(works)
        works_s = [work_s for _, work_s in works]
        load = Load(_parts(recorded, works_s, lambda changes: batch_s + change_s * changes, feed, seen_from))
        return _Player(load, replace(base, batch_s=batch_s, change_s=change_s, slowdowns=slowdowns))

    best = player(learned.best)
    others = [player(one) for one in (learned.least, learned.most) if one != learned.best]
    measured_s = max(one.committed_s for one in recorded) - min(one.started_s for one in recorded)
    played_s = best.play(had_order, had_workers).seconds
    right = min(max(measured_s / played_s, 1 / _MOST_RIGHT), _MOST_RIGHT) if played_s else 1.0
    known = _Known.of(recorded, feed, had_workers, right)
    return Prediction(
        order=had_order, workers=had_workers, measured_s=measured_s, played_s=played_s, learned=learned,
        predicted=tuple([
            one for each in ORDERS for one in _of_order(each, workers, best, others, known, measured_s, right, feed)
        ]),
        plant=best.plant,
    )  # fmt: skip


def _executed(recorded: Sequence[Recorded], commit_s: float) -> tuple[list[tuple[float, float]], list[Executed]]:
    """Return when each batch executed, from and until, and how long beside how many others."""
    spans = [(one.started_s, one.started_s + one.execute_s - _in_flight_s(one, commit_s)) for one in recorded]
    by_n = zip(recorded, beside(spans), strict=True)
    return spans, [Executed(max(1, one.changes - one.late_rows), seconds) for one, seconds in by_n]


class _Player:
    """Plays a log with one contention, each number of workers once."""

    def __init__(self, load: Load, plant: Plant) -> None:
        """Play nothing yet."""
        self.plant = plant
        self._load = load
        self._known: dict[tuple[Order, int], Played] = {}

    def play(self, order: Order, n_workers: int) -> Played:
        """Return the throughput with a number of workers."""
        key = (order, n_workers)
        if key not in self._known:
            self._known[key] = play(self._load, replace(self.plant, order=order, workers=n_workers))
        return self._known[key]

    def seconds(self, order: Order, n_workers: int, measured_s: float) -> float:
        """Return the seconds that a number of workers take, corrected by the run that the daemon made."""
        base_s = self.play(self.plant.order, self.plant.workers).seconds
        return self.play(order, n_workers).seconds * (measured_s / base_s if base_s else 1.0)


def _of_order(  # noqa: PLR0913, PLR0917  one caller
    order: Order,
    workers: Sequence[int],
    best: _Player,
    others: Sequence[_Player],
    known: _Known,
    measured_s: float,
    right: float,
    feed: _Feed,
) -> Iterator[Predicted]:
    """Give what each number of workers would do with one commit order, the smallest first."""
    had_workers = best.plant.workers
    # Workers that apply as fast as the source gives: more of them are not played.
    fewest_s, n_fed = measured_s * _MOST_RIGHT * had_workers * 1e3, 0
    for n_workers in sorted(workers):
        n_played = n_fed or n_workers
        one = best.play(order, n_played)
        spans_s = [one.seconds * right, *[other.seconds(order, n_played, measured_s) for other in others]]
        # Workers that are not needed stay idle.
        seconds_s = fewest_s = min(spans_s[0], fewest_s)
        is_fed = seconds_s <= known.fed_s
        n_fed = n_fed or (n_workers if max(spans_s) <= known.fed_s else 0)
        least_s, most_s = known.bounds(seconds_s, spans_s, log2(n_workers / had_workers))
        yield Predicted(
            order=order, workers=n_workers, seconds=seconds_s, least_s=least_s, most_s=most_s,
            delay_s=one.delay_s, batches=one.batches,
            limit=feed.leader if is_fed else _limit(one, best.plant, n_workers, feed.leader),
        )  # fmt: skip


class _Known(NamedTuple):
    """How sure a prediction is; parts of its seconds."""

    varied: float  # another run of that kind, by what this one's speed varied
    source_s: float  # the source's time
    source_varied: float  # and another time so much less or more

    @classmethod
    def of(cls, recorded: Sequence[Recorded], feed: _Feed, n_workers: int, right: float) -> _Known:
        """Return the certainty of predictions from a run.

        Args:
            recorded: the run.
            feed: of it.
            n_workers: that it had.
            right: the factor by which predictions are put right.
        """
        varied = _varied([one.committed_s for one in recorded], recorded, _WAVES * n_workers)
        return cls(
            varied=hypot(varied, (right - 1) / 2),
            source_s=feed.until_s,
            source_varied=max(_varied(feed.releases_s, recorded, 1), _LEAST_SOURCE_ERROR),
        )

    @property
    def fed_s(self) -> float:
        """Return the seconds up to which the source is what limits."""
        return self.source_s * (1 + _LEAST_ERROR)

    def bounds(self, seconds_s: float, spans_s: Sequence[float], doublings: float) -> tuple[float, float]:
        """Return the least and the most seconds.

        Args:
            seconds_s: predicted.
            spans_s: the same by all that the processors may be, none of them put aside.
            doublings: of the workers.
        """
        shorter = max(_SHORTER_EACH * doublings, -_FEWER_EACH * doublings)
        longer = max(_LONGER_EACH * doublings, -_FEWER_EACH * doublings)
        # Nothing is applied before it can be read, and the source is not the same each time either.
        least_s = max(
            min(spans_s) * (1 - hypot(self.varied, _LEAST_ERROR + shorter)),
            min(self.source_s, seconds_s) * (1 - self.source_varied),
        )
        most_s = seconds_s * (1 + self.source_varied)
        if max(spans_s) > self.fed_s:
            most_s = max(most_s, max(spans_s) * (1 + hypot(self.varied, _LEAST_ERROR + longer)))
        return min(least_s, seconds_s), most_s


def _varied(ends_s: Sequence[float], recorded: Sequence[Recorded], together: int) -> float:
    """Return the part by which another run would be longer or shorter if its speed varied as this one's.

    Args:
        ends_s: of each batch.
        recorded: the batches.
        together: number of them that end at about the same time, and differ less than their times do.
    """
    n = min(_WINDOWS, len(recorded) // together)
    changes = [0, *accumulate([one.changes for one in recorded])]
    latest_s = list(accumulate(ends_s, max))
    places = [bisect_right(changes, changes[-1] * window / n) - 1 for window in range(1, n + 1)] if n > 1 else []
    # From the first window's end on: before it the daemon begins.
    speeds = [
        (latest_s[end - 1] - latest_s[begin - 1], changes[end] - changes[begin])
        for begin, end in pairwise(places)
        if end > begin > 0
    ]
    took_s = sum([seconds for seconds, _ in speeds])
    if len(speeds) < 2 or not took_s:
        return 0.0
    usual = took_s / sum([number for _, number in speeds])
    off = [seconds - number * usual for seconds, number in speeds]
    # By and large windows differ by chance: their sum differs less than each of them.
    return _SIGMAS * sqrt(sum([one * one for one in off]) * len(speeds) / (len(speeds) - 1)) / took_s


def _check_order(recorded: Sequence[Recorded]) -> None:
    for before, after in pairwise(recorded):
        if after.seq <= before.seq:
            raise ValueError(f"batch {after.seq} comes after batch {before.seq}")


def _most_at_a_time(recorded: Sequence[Recorded]) -> int:
    by_n = beside([(one.started_s, one.committed_s) for one in recorded])
    return max([n for one in by_n for n in one], default=1)


def _commits(recorded: Sequence[Recorded], flush_share: float | None) -> tuple[float, Line]:
    """Return the cost of a COMMIT, and the additional cost of late rows."""
    alone = [one.commit_s for one in recorded if not one.is_one_flight and not one.late_rows]
    late = [one for one in recorded if not one.is_one_flight and one.late_rows]
    in_flight = [one.flight_commit_s for one in recorded if one.flight_commit_s]
    if alone:
        commit_s = _usual(alone)
    elif in_flight:
        commit_s = _usual(in_flight)
    elif late:
        commit_s = sorted(one.commit_s for one in late)[len(late) // 10]
    else:
        commit_s = _usual([one.execute_s for one in recorded]) * (flush_share or 0.0)
    return commit_s, fit([(one.late_rows, max(0.0, one.commit_s - commit_s)) for one in late])


def _turn_s(recorded: Sequence[Recorded], *, is_relaxed: bool) -> float:
    """Return how long it takes from when a batch may commit until it does: the leader's work, and the way."""
    found = []
    for before, one in pairwise(recorded):
        if not one.is_one_flight and not one.late_rows and one.seq == before.seq + 1:
            executed_s = one.started_s + one.execute_s
            may_s = executed_s if is_relaxed else max(executed_s, before.committed_s)
            found.append(max(0.0, one.committed_s - one.commit_s - may_s))
    return _usual(found) if found else 0.0


def _usual(values: Sequence[float]) -> float:
    """Return the mean of what is not odd."""
    most = median(values) * _ODD
    return fmean([value for value in values if value <= most])


def _in_flight_s(one: Recorded, commit_s: float) -> float:
    """Return the part of `execute_s` that is the COMMIT's."""
    return min(one.flight_commit_s or commit_s, one.execute_s) if one.is_one_flight else 0.0


def _processors(seconds: Sequence[Second], spans: Sequence[tuple[float, float]], number: int) -> Processors:
    counted = [one for one in seconds if one.processors]
    busy_s = sum([one.busy_s for one in counted])
    samples = sum([one.samples for one in seconds])
    cpu_share = sum([one.on_cpu for one in seconds]) / samples if samples else None
    executed_s = _executed_s(spans, counted)
    if not busy_s or not executed_s:
        return Processors(number=number, cpu_share=cpu_share)
    sessions_s = sum([one.sessions_s for one in counted])
    leader_s = sum([one.leader_cpu_s + one.sender_s for one in counted])
    length_s = sum([one.length_s for one in counted])
    return Processors(
        number=max(one.processors for one in counted),
        # Not every moment of a run is in an interval.
        sessions_s=sessions_s * sum([end_s - begin_s for begin_s, end_s in spans]) / executed_s,
        sessions=sessions_s / length_s,
        leader=leader_s / length_s,
        others=max(0.0, busy_s - sessions_s - leader_s) / length_s,
        cpu_share=cpu_share,
    )


def _executed_s(spans: Sequence[tuple[float, float]], seconds: Sequence[Second]) -> float:
    """Return the seconds for which batches executed within intervals, all of them together."""
    begins_s = sorted(begin_s for begin_s, _ in spans)
    ends_s = sorted(end_s for _, end_s in spans)
    begun_s, ended_s = [0.0, *accumulate(begins_s)], [0.0, *accumulate(ends_s)]

    def until(at_s: float) -> float:
        n_begun, n_ended = bisect_right(begins_s, at_s), bisect_right(ends_s, at_s)
        return ended_s[n_ended] - begun_s[n_begun] + (n_begun - n_ended) * at_s

    return sum([until(one.ended_s) - until(one.ended_s - one.length_s) for one in seconds])


def _limits(recorded: Sequence[Recorded], seconds: Sequence[Second]) -> tuple[int, int, int]:
    """Return a batch's transactions, changes and bytes at most."""
    for one in seconds:
        if one.max_transactions:
            return one.max_transactions, one.max_changes, one.max_bytes
    largest = max(one.transactions for one in recorded)
    is_full = largest > 1 and sum(one.transactions == largest for one in recorded) >= _SEVERAL
    usual = config.MAX_BATCH_TRANSACTIONS
    return largest if is_full and largest < usual else usual, config.MAX_BATCH_CHANGES, config.MAX_BATCH_BYTES


def _scale(recorded: Sequence[Recorded], limits: tuple[int, int, int], workers: int) -> float:
    """Return by what the first size of a batch is to be multiplied where the beginning of the run is not there."""
    if recorded[0].seq <= 1:
        return 1.0
    first = min(2_500, limits[0])
    largest = max(one.transactions for one in recorded[: workers + 2])
    return max(0.125, min(8.0, 2.0 ** round(log2(max(largest, 1) / first))))


class _Feed(NamedTuple):
    """When the batches could be read."""

    releases_s: list[float]  # of the last transaction of each, ascending, from 0
    dues_s: list[float]  # the same, by the publisher's commit alone
    until_s: float  # the last
    leader: str  # what limits the reading


def _feed(recorded: Sequence[Recorded], seconds: Sequence[Second]) -> _Feed:
    """Return when the batches could be read if reading never had to be paused."""
    way_s = min([one.received_s - one.due_s for one in recorded])
    way_s = way_s if way_s <= _LONGEST_WAY_S else 0.0
    ends_s = [one.ended_s for one in seconds]
    sums_s = [0.0]
    for one in seconds:
        sums_s.append(sums_s[-1] + min(one.paused_s, one.length_s))

    def unpaused_s(at_s: float) -> float:
        index = bisect_right(ends_s, at_s)
        paused_s = sums_s[index]
        if index < len(seconds):
            now = seconds[index]
            begun_s = now.ended_s - now.length_s
            if at_s > begun_s and now.length_s:
                paused_s += min(now.paused_s, now.length_s) * (at_s - begun_s) / now.length_s
        return at_s - paused_s

    changes = sum([one.changes for one in recorded])
    cpu_s = sum([one.leader_cpu_s for one in seconds]) / max(changes, 1)
    begun_s = max(unpaused_s(recorded[0].received_s), recorded[0].due_s + way_s)
    releases_s: list[float] = []
    before_s, by_leader_s = 0.0, 0.0
    for batch in recorded:
        there_s = max(unpaused_s(batch.received_s), batch.due_s + way_s) - begun_s
        by_leader_s += cpu_s * batch.changes
        before_s = max(before_s, there_s, before_s + (cpu_s * batch.changes if releases_s else 0.0))
        releases_s.append(before_s)
    dues_s = [one.due_s + way_s - begun_s for one in recorded]
    is_backlog = dues_s[-1] < releases_s[-1] / 2
    is_full = by_leader_s >= _FULL * releases_s[-1]
    what = ("leader" if is_full else "publisher") if is_backlog else "source"
    return _Feed(releases_s, dues_s, releases_s[-1], what)


def _held(recorded: Sequence[Recorded]) -> tuple[list[int], float]:
    """Return the log's facts about rows that a batch holds and a later one also changes.

    Returns:
        For each batch the index of the first one that was under way beside it: what holds its rows is known from that
        one on. And of all pairs of changes in two batches that were, the part that is of one row.
    """
    seen_from: list[int] = []
    changes = [0, *accumulate([one.changes for one in recorded])]
    first, pairs, late_rows = 0, 0, 0
    for index, one in enumerate(recorded):
        while first < index and recorded[first].committed_s <= one.received_s:
            first += 1
        seen_from.append(first)
        if index > first and not one.waits:
            pairs += one.changes * (changes[index] - changes[first])
            late_rows += one.late_rows
    return seen_from, late_rows / pairs if pairs else 0.0


def _parts(
    recorded: Sequence[Recorded],
    works_s: Sequence[float],
    usual_s: Callable[[int], float],
    feed: _Feed,
    seen_from: Sequence[int],
) -> list[Stretch]:
    """Return the batches cut into parts, each with what it takes more than others, and what it follows."""
    parts: list[Stretch] = []
    first_parts: list[int] = []
    last_part: dict[int, int] = {}
    before_s = 0.0
    for one, work_s, there_s, due_s, seen in zip(
        recorded, works_s, feed.releases_s, feed.dues_s, seen_from, strict=True
    ):
        first_parts.append(len(parts))
        usual = usual_s(max(1, one.changes - one.late_rows))
        weight = work_s / usual if usual else 1.0
        n = max(1, min(_CUT, one.transactions))
        holder = last_part.get(one.holder_seq, -1)
        # Rows that a batch holds are also held by each of its parts.
        is_close = holder >= 0 and one.seq - one.holder_seq <= 2
        for index in range(n):
            begin, end = index / n, (index + 1) / n
            parts.append(
                Stretch(
                    transactions=int(one.transactions * end) - int(one.transactions * begin),
                    changes=max(1, int(one.changes * end) - int(one.changes * begin)),
                    size_bytes=int(one.size_bytes * end) - int(one.size_bytes * begin),
                    release_s=before_s + (there_s - before_s) * end,
                    due_s=due_s,
                    weight=weight,
                    tables=one.tables,
                    late_rows=one.late_rows,
                    holder=holder if index == 0 else len(parts) - 1 if is_close else -1,
                    waits=one.waits and not one.late_rows,
                    seen_from=first_parts[seen],
                )
            )
        last_part[one.seq] = len(parts) - 1
        before_s = there_s
    return parts


def _limit(one: Played, plant: Plant, workers: int, leader: str) -> str:
    """Return the limit that most of the time went to."""
    idle_s = one.idle_s + one.ended_s
    most = max(idle_s, one.blocked_s, one.turn_s, one.executing_s)
    if most == idle_s:
        return leader if one.idle_s >= one.ended_s else "source"
    if most == one.blocked_s:
        return "dependencies"
    if most == one.turn_s:
        return "commits"
    # Twice as many that execute would do so much more.
    gain = 2 * plant.slowdowns[workers] / plant.slowdowns[2 * workers]
    return "workers" if gain > _WORTH else "processors"
