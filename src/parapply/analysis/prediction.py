"""Predictions for other settings from the batches of a log: learns what things cost, and states an interval.

In: `Recorded` batches of one run in source order, and its `Second`s. Out: a `Predicted` for each `Change`. Pure,
without an engine of queries; the caller says how many batches it can hold.

Learned are the times of a batch and of a change alone, and how much longer they take beside others (`contention`); the
times of a COMMIT, its flush and a late row; and when the stream could have been read, had nothing held it up. The
daemon's engine is asked for the rest (`replay`). The run itself is also replayed, and its error corrects every
prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import hypot, inf, log, log2, sqrt
from statistics import fmean, linear_regression, median, pstdev
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply import config
from parapply.analysis.changes import Change, Errors, Usual
from parapply.analysis.contention import Executed, Line, Processors, alone_s, beside, fit, learn, line_of_sizes
from parapply.analysis.replay import Costs, HotRows, Played, Settings, play
from parapply.analysis.stream import Recorded, stream_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.analysis.changes import Order
    from parapply.analysis.contention import Contention
    from parapply.analysis.stream import LoggedStream

#: Seconds that the way from the publisher takes at most: more is waiting.
_LONGEST_WAY_S: Final = 1.0
#: Part by which runs of the same load vary, two standard errors, and the number of a log's windows that it outweighs.
#: Rounds of the same cell differed by 2 to 17 % (docs/WHATIF.md, "How good it is").
_RUNS_VARY: Final = 0.08
_RUNS_WEIGH: Final = 8
#: Growth of the error with each doubling or halving of the workers. Effects that the model does not know mostly make
#: more of them slower.
_ERROR_EACH: Final = 0.05
_LONGER_EACH: Final = 0.10
#: The same with each doubling or halving of anything else, both ways.
_OTHER_EACH: Final = 0.10
#: Part by which a prediction is longer at most than the source needs where the source is what limits.
_FED: Final = 0.05
#: Power of a batch's changes by which its hot rows become more: the least, and the usual one, for a log of batches that
#: are alike, because the logarithms of their changes differ less than the last of these.
_LEAST_POWER, _USUAL_POWER, _ALIKE_SIZES = 0.3, 0.7, 0.2
#: Least variation of the source from one time to another.
_LEAST_SOURCE_ERROR: Final = 0.01
#: Windows of a log whose speeds are compared, and standard errors of their sum that are within the interval.
_WINDOWS: Final = 12
#: Batches of each worker in a window: how many of them end in it is chance.
_WAVES: Final = 4
_SIGMAS: Final = 2.0
#: Part of the leader's work that is reading; the rest makes statements.
_READING: Final = 0.5
#: Ratio of the most processors that the sessions can have to the fewest, up to which both are not played.
_NARROW: Final = 1.4
#: Part of a batch's execution that is the target's, at least.
_LEAST_TARGET: Final = 0.1
#: Largest factor by which a prediction is put right.
_MOST_RIGHT: Final = 1.5
#: Factor by which twice the workers must be faster for their number to be the limit.
_WORTH: Final = 1.25
#: Part by which two predictions differ at most that are alike.
_ALIKE: Final = 0.01
#: Part of a processor from which on the leader has no more to give.
_FULL: Final = 0.7
#: Flushes that a COMMIT waits for on average where another one is always under way: half of that, and its own.
_FLUSHES: Final = 1.5
#: Multiple of the usual time from which on a COMMIT was held up by something else.
_ODD: Final = 10
#: Number of batches of one size from which on they were as large as they may be.
_SEVERAL: Final = 3


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
    flushing: int = 0  # of the samples, of sessions that waited for a flush


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One prediction."""

    order: Order  # of the commits
    workers: int  # of the daemon
    seconds: float  # from the first start to the last commit
    least_s: float  # the shortest time that the log does not rule out for another run of that kind
    most_s: float  # the longest
    limit: str  # source, publisher, leader, dependencies, commits, processors, workers


class Log:
    """A run's log: what it says of costs and of the source, and predictions from that."""

    def __init__(self, recorded: Sequence[Recorded], seconds: Sequence[Second]) -> None:
        """Learn from the batches, at least one, and intervals of one run in source order, and play the run itself.

        Raise ValueError if there is no batch, or they are out of order.
        """
        _check_order(recorded)
        #: That the daemon had.
        self.order: Order = "relaxed" if any(one.order == "relaxed" for one in seconds) else "preserve"
        self.workers = max((one.workers for one in seconds), default=0) or _most_at_a_time(recorded)
        self._recorded = recorded
        commit_s, late = _commits(recorded, seconds)
        self._feed = _feed(recorded, seconds)
        make_s = self._feed.leader_s * (1 - _READING)
        spans, self._executed = _executed(recorded, commit_s, make_s)
        #: Contention as the log shows it.
        self.learned = learn(self._executed, _processors(seconds, spans))
        waited_s = min(commit_s, _flush_s(recorded, seconds))
        #: The part of a COMMIT that is its flush. With relaxed order it met one under way, and waited for the next one.
        self.flush_s = waited_s / _FLUSHES if self.order == "relaxed" else waited_s
        commit_s += self.flush_s - waited_s
        limits = _limits(recorded, seconds)
        self._settings = Settings(
            workers=self.workers, order=self.order, limits=limits, scale=_scale(recorded, limits, self.workers)
        )
        self._costs = Costs(
            batch_s=0.0, change_s=0.0, late_batch_s=late.batch_s, late_row_s=late.change_s, commit_s=commit_s,
            hot_rows=_hot_rows(recorded),
            turn_s=_turn_s(recorded, is_relaxed=self.order == "relaxed"),
            read_s=self._feed.leader_s * _READING, make_s=make_s,
        )  # fmt: skip
        self._costs_of: dict[Contention, Costs] = {}
        self._streams: dict[int, LoggedStream] = {}
        self._played: dict[tuple[Contention, Change], Played] = {}
        #: From the first start to the last commit.
        self.measured_s = max(one.committed_s for one in recorded) - min(one.started_s for one in recorded)
        #: The same in the replay, not put right.
        self.played_s = played_s = self._play(self.learned.best, Change()).seconds
        #: The factor by which predictions are put right.
        self.right = min(max(self.measured_s / played_s, 1 / _MOST_RIGHT), _MOST_RIGHT) if played_s else 1.0
        least, most = self.learned.least, self.learned.most
        # Where the processors are nearly known, other errors are larger.
        is_narrow = self.learned.is_known and least.processors < _NARROW * most.processors
        self._others = [] if is_narrow else [one for one in (least, most) if one != self.learned.best]
        self._known = _Known.of(recorded, self._feed, self.workers, self.right)
        #: Of the predictions, as far as trials have told them; put in later, it counts from then on.
        self.errors = Errors(Usual(self.order, _usual_sizes(recorded, limits)))

    def costs(self, contention: Contention) -> Costs:
        """Return what is learned, with one of the contentions that the log does not rule out."""
        if contention not in self._costs_of:
            slowdowns = contention.slowdowns()
            works = [(one.changes, alone_s(one, slowdowns) if one.seconds_by_n else 0.0) for one in self._executed]
            batch_s, change_s = line_of_sizes(works)
            usual_s = [batch_s + change_s * changes for changes, _ in works]
            weights = [work_s / usual if usual else 1.0 for (_, work_s), usual in zip(works, usual_s, strict=True)]
            self._costs_of[contention] = replace(
                self._costs, batch_s=batch_s, change_s=change_s, weights=weights, slowdowns=slowdowns
            )
        return self._costs_of[contention]

    def predict(self, change: Change, workers: int = 0) -> Predicted:
        """Return the run as it would have been with a change; `workers` are more than make a difference."""
        best, known = self.learned.best, self._known
        order, n_workers = change.order or self.order, workers or change.workers or self.workers
        played, factor = self.errors.right(change)
        spans_s = [self._play(best, played).seconds * self.right]
        for other in self._others:
            base_s = self._play(other, Change()).seconds
            spans_s.append(self._play(other, played).seconds * (self.measured_s / base_s if base_s else 1.0))
        spans_s = [factor * each for each in spans_s]
        least_s, most_s = known.bounds(
            spans_s[0], spans_s, log2(n_workers / self.workers), self._others_changed(change)
        )
        is_fed = spans_s[0] <= known.fed_s
        return Predicted(
            order=order, workers=n_workers, seconds=spans_s[0], least_s=least_s, most_s=most_s,
            limit=self._feed.limit if is_fed else self._limit(self._play(best, change), best, n_workers),
        )  # fmt: skip

    def _others_changed(self, change: Change) -> float:
        """Return by how many doublings or halvings more than the number of workers is changed; a flush is one."""
        asked = (change.batch_transactions, change.batch_changes, change.batch_bytes)
        larger = [
            log2(one / mine) for one, mine in zip(asked, self._settings.limits, strict=True) if one and one > mine
        ]
        flush = change.synchronous_commit is not None or change.flush_ms is not None
        return max([self.errors.unknown(change), *larger]) + abs(log2(change.target_speed)) + flush

    def of_workers(self, order: Order, workers: Sequence[int]) -> Iterator[Predicted]:
        """Yield predictions for numbers of workers, the smallest first.

        Where twice as many make no difference, still more are not played: they stay idle, but not on full processors.
        """
        before: Predicted | None = None
        n_played = 0
        for n_workers in workers:
            one = self.predict(Change(workers=n_played or n_workers, order=order), n_workers)
            if before is not None and not n_played and n_workers >= 2 * before.workers and n_workers > self.workers:
                is_alike = abs(one.seconds - before.seconds) < _ALIKE * before.seconds
                n_played = n_workers if is_alike and one.limit != "processors" else 0
            before = one
            yield one

    def _play(self, contention: Contention, change: Change) -> Played:
        key = (contention, change)
        if key not in self._played:
            log, settings = self.costs(contention), self._settings
            speed, flush_s = change.target_speed, self.flush_s if change.flush_ms is None else change.flush_ms / 1e3
            flush_s = 0.0 if change.synchronous_commit == "off" else flush_s
            costs = replace(
                log, batch_s=log.batch_s / speed, change_s=log.change_s / speed, late_row_s=log.late_row_s / speed,
                late_batch_s=log.late_batch_s / speed, commit_s=log.commit_s - self.flush_s + flush_s,
                is_flushed=flush_s > 0,
            )  # fmt: skip
            asked = (change.batch_transactions, change.batch_changes, change.batch_bytes)
            transactions, changes, size_bytes = [one or mine for one, mine in zip(asked, settings.limits, strict=True)]
            settings = replace(
                settings, workers=change.workers or self.workers, order=change.order or self.order,
                limits=(transactions, changes, size_bytes),
            )  # fmt: skip
            self._played[key] = play(self._stream(min(transactions, changes)), settings, costs)
        return self._played[key]

    def _stream(self, size: int) -> LoggedStream:
        size = 0 if size >= min(self._settings.limits[:2]) else size
        if size not in self._streams:
            feed = self._feed
            self._streams[size] = stream_of(self._recorded, feed.releases_s, feed.dues_s, changes=size)
        return self._streams[size]

    def _limit(self, one: Played, contention: Contention, workers: int) -> str:
        """Return the limit that most of the time went to."""
        idle_s = one.idle_s + one.ended_s
        most = max(idle_s, one.blocked_s, one.turn_s, one.executing_s)
        if most == idle_s:
            return self._feed.limit if one.idle_s >= one.ended_s else "source"
        if most == one.blocked_s:
            return "dependencies"
        if most == one.turn_s:
            return "commits"
        # Twice as many that execute would do so much more.
        slowdowns = contention.slowdowns(2 * workers)
        return "workers" if 2 * slowdowns[workers] / slowdowns[2 * workers] > _WORTH else "processors"


def _executed(
    recorded: Sequence[Recorded], commit_s: float, make_s: float
) -> tuple[list[tuple[float, float]], list[Executed]]:
    """Return when the target executed each batch, from and until, and how long beside how many others."""
    spans = []
    for one in recorded:
        # Part of it is the COMMIT of a flight.
        execute_s = max(0.0, one.execute_s - (one.flight_commit_s or commit_s) * one.is_one_flight)
        made_s = min(make_s * one.changes, execute_s * (1 - _LEAST_TARGET))
        spans.append((one.started_s + made_s, one.started_s + execute_s))
    by_n = zip(recorded, beside(spans), strict=True)
    return spans, [Executed(max(1, one.changes - one.late_rows), seconds) for one, seconds in by_n]


def _flush_s(recorded: Sequence[Recorded], seconds: Sequence[Second]) -> float:
    """Return for how long a batch's session waited for a flush, by the samples; infinity: there is none."""
    samples = sum([one.samples for one in seconds])
    held_s = sum([one.committed_s - one.started_s for one in recorded])
    return held_s / len(recorded) * sum([one.flushing for one in seconds]) / samples if samples else inf


class _Known(NamedTuple):
    varied: float  # another run of that kind, by what this one's speed varied
    source_s: float  # the source's time
    source_varied: float  # and another time so much less or more

    @classmethod
    def of(cls, recorded: Sequence[Recorded], feed: _Feed, n_workers: int, right: float) -> _Known:
        varied, n_windows = _varied([one.committed_s for one in recorded], recorded, _WAVES * n_workers)
        # A log has few windows, and what is seldom in one run may be often in the next.
        square = (_RUNS_WEIGH * _RUNS_VARY**2 + n_windows * varied**2) / (_RUNS_WEIGH + n_windows)
        source_varied, _ = _varied(feed.releases_s, recorded, 1)
        return cls(
            # This run varies, and so does the other one.
            varied=hypot(sqrt(2 * square), (right - 1) / 2),
            source_s=feed.until_s,
            source_varied=max(source_varied, _LEAST_SOURCE_ERROR),
        )

    @property
    def fed_s(self) -> float:
        """Return the seconds up to which the source is what limits."""
        return self.source_s * (1 + _FED)

    def bounds(
        self, seconds_s: float, spans_s: Sequence[float], doublings: float, others: float
    ) -> tuple[float, float]:
        """Return the least and the most seconds; `spans_s` are of each number of processors."""
        shorter = _ERROR_EACH * abs(doublings) + _OTHER_EACH * others
        longer = max(_LONGER_EACH * doublings, -_ERROR_EACH * doublings) + _OTHER_EACH * others
        # Nothing is applied before it can be read, and the source is not the same each time either.
        least_s = max(
            min(spans_s) * (1 - hypot(self.varied, shorter)), min(self.source_s, seconds_s) * (1 - self.source_varied)
        )
        most_s = min(self.source_s, seconds_s) * (1 + self.source_varied)
        if max(spans_s) > self.fed_s:
            most_s = max(most_s, max(spans_s) * (1 + hypot(self.varied, longer)))
        return min(least_s, seconds_s), max(most_s, seconds_s)


def _varied(ends_s: Sequence[float], recorded: Sequence[Recorded], together: int) -> tuple[float, int]:
    """Return the part by which a run is longer or shorter by chance, as its speed varied, and of how many windows.

    About `together` batches end at the same time, and differ less than their times do.
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
        return 0.0, 0
    usual = took_s / sum([number for _, number in speeds])
    off = [seconds - number * usual for seconds, number in speeds]
    # By and large windows differ by chance: their sum differs less than each of them.
    square = sum([one * one for one in off]) * len(speeds) / (len(speeds) - 1)
    return _SIGMAS * sqrt(square) / took_s, len(speeds) - 1


def _check_order(recorded: Sequence[Recorded]) -> None:
    for before, after in pairwise(recorded):
        if after.seq <= before.seq:
            raise ValueError(f"batch {after.seq} comes after batch {before.seq}")


def _most_at_a_time(recorded: Sequence[Recorded]) -> int:
    by_n = beside([(one.started_s, one.committed_s) for one in recorded])
    return max([n for one in by_n for n in one], default=1)


def _commits(recorded: Sequence[Recorded], seconds: Sequence[Second]) -> tuple[float, Line]:
    """Return the time of a COMMIT, and the additional time of late rows."""
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
        flushing = sum([one.flushing for one in seconds]) / max(1, sum([one.samples for one in seconds]))
        commit_s = _usual([one.execute_s for one in recorded]) * flushing
    return commit_s, fit([(one.late_rows, max(0.0, one.commit_s - commit_s)) for one in late])


def _hot_rows(recorded: Sequence[Recorded]) -> HotRows:
    """Return how many late rows batches have that have hot ones."""
    hot = [one for one in recorded if one.has_hot]
    if not hot:
        return HotRows()
    logarithms = [(log(one.changes), log(one.late_rows)) for one in hot]
    power = _USUAL_POWER
    if pstdev([x for x, _ in logarithms]) > _ALIKE_SIZES:
        power = min(max(linear_regression(*zip(*logarithms, strict=True)).slope, _LEAST_POWER), 1.0)
    return HotRows(sum([one.late_rows for one in hot]) / sum([one.changes**power for one in hot]), power)


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
    most = median(values) * _ODD
    return fmean([value for value in values if value <= most])


def _processors(seconds: Sequence[Second], spans: Sequence[tuple[float, float]]) -> Processors:
    counted = [one for one in seconds if one.processors]
    busy_s = sum([one.busy_s for one in counted])
    samples = sum([one.samples for one in seconds])
    cpu_share = sum([one.on_cpu for one in seconds]) / samples if samples else None
    executed_s = _executed_s(spans, counted)
    if not busy_s or not executed_s:
        return Processors(cpu_share=cpu_share)
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


def _usual_sizes(recorded: Sequence[Recorded], limits: tuple[int, int, int]) -> tuple[float, float, float]:
    """Return how large the batches were, each weighed by its changes, but for those that run alone."""
    found = [one for one in recorded if not one.is_alone and one.changes]
    if not found:
        return limits
    changes = sum([one.changes for one in found])
    by_changes = [(one.transactions * one.changes, one.changes**2, one.size_bytes * one.changes) for one in found]
    transactions, squares, size_bytes = (sum(each) / changes for each in zip(*by_changes, strict=True))
    return max(1.0, transactions), squares, max(1.0, size_bytes)


def _scale(recorded: Sequence[Recorded], limits: tuple[int, int, int], workers: int) -> float:
    """Return by what the first size of a batch is to be multiplied where the beginning of the run is not there."""
    if recorded[0].seq <= 1:
        return 1.0
    first = min(2_500, limits[0])
    largest = max(one.transactions for one in recorded[: workers + 2])
    return max(0.125, min(8.0, 2.0 ** round(log2(max(largest, 1) / first))))


class _Feed(NamedTuple):
    releases_s: list[float]  # of the last transaction of each, ascending, from 0
    dues_s: list[float]  # the same, by the publisher's commit alone
    until_s: float  # the last
    limit: str  # what limits the reading
    leader_s: float  # CPU time of the leader for a change


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
    return _Feed(releases_s, dues_s, releases_s[-1], what, cpu_s)
