"""Predictions from logs made by hand whose truth can be worked out: one thing limits each of them."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest

from parapply.analysis import prediction
from parapply.analysis.changes import ORDERS, Change, Order, read_change
from parapply.analysis.contention import Contention, Executed, Processors, beside, fit, learn, line_of_sizes
from parapply.analysis.prediction import Log, Predicted, Second
from parapply.analysis.stream import Recorded

#: Changes of each batch of these logs, as large as it may be.
_FULL = 100
_LIMITS = {"max_transactions": _FULL, "max_changes": 20_000, "max_bytes": 8 << 20}


def _batch(seq: int, started_s: float, execute_s: float, committed_s: float, **more: object) -> Recorded:
    """Return a batch of a backlog: read a moment before its start, committed on the publisher an hour ago."""
    values: dict[str, object] = {
        "transactions": _FULL, "changes": _FULL, "size_bytes": 1000, "tables": 1, "received_s": started_s - 1e-4,
        "due_s": -3600.0, "execute_s": execute_s, "commit_s": 1e-4, **more,
    }  # fmt: skip
    return Recorded(seq=seq, started_s=started_s, committed_s=committed_s, **values)  # type: ignore[arg-type]


def _seconds(until_s: float, workers: int, **more: object) -> list[Second]:
    """Return intervals in which reading was paused nearly all the time, as where the workers limit."""
    values: dict[str, Any] = {"leader_cpu_s": 0.01, "paused_s": 0.98, "order": "preserve", **_LIMITS, **more}
    return [Second(ended_s=float(at), length_s=1.0, workers=workers, **values) for at in range(1, int(until_s) + 2)]


def _waves(n: int, workers: int, execute_s: float) -> list[Recorded]:
    """Return batches of which a number execute at a time, all alike; commits take next to nothing."""
    return [
        _batch(
            seq + 1, seq // workers * execute_s, execute_s, (seq // workers + 1) * execute_s + 1e-4 * (seq % workers)
        )
        for seq in range(n)
    ]


def _of(log: Log, workers: int, order: Order = "preserve") -> Predicted:
    return log.predict(Change(workers=workers, order=order))


def _seconds_of(log: Log, order: Order = "preserve") -> list[float]:
    return [_of(log, workers, order).seconds for workers in (1, 2, 4, 8, 16)]


def test_batches_that_only_wait_are_as_fast_as_there_are_workers() -> None:
    """A disk that answers all at a time: twice the workers take little more than half as long, and are what limits."""
    recorded = _waves(160, 4, 0.1)
    found = Log(recorded, _seconds(4, 4, processors=2, busy_s=0.1, sessions_s=0.05))
    assert _seconds_of(found) == pytest.approx([16.0, 8.0, 4.0, 2.0, 1.0], rel=0.2)
    assert _of(found, 8).limit == "workers"
    assert (found.order, found.workers) == ("preserve", 4)
    for one in found.of_workers("preserve", (1, 2, 4, 8, 16)):
        assert one.least_s <= one.seconds <= one.most_s


@pytest.mark.parametrize("workers", [33, 64])
def test_twice_as_many_are_predicted_whatever_the_daemon_has(workers: int) -> None:
    """Up to the most workers there may be, and the limit of twice as many is also said."""
    found = Log(_waves(4 * workers, workers, 0.1), _seconds(1, workers, processors=2, busy_s=0.1, sessions_s=0.05))
    assert [one.limit for one in found.of_workers("preserve", (workers, 2 * workers))] == ["workers", "workers"]


def test_full_processors_are_not_made_faster_by_more_workers() -> None:
    """Four workers on two processors that are full: two are faster, one is half so, more are slower; that is said."""
    recorded = _waves(160, 4, 0.1)
    found = Log(recorded, _seconds(4, 4, processors=2, busy_s=2.0, sessions_s=2.0))
    assert _seconds_of(found) == pytest.approx([7.6, 3.8, 4.0, 4.4, 5.1], rel=0.03)
    assert _of(found, 8).limit == "processors"
    assert found.learned.is_known


def test_what_sends_the_changes_is_part_of_the_work() -> None:
    """A publisher on the same machine takes a processor for each change: what is full with it stays full."""
    seconds = _seconds(4, 4, processors=2, busy_s=2.0, sessions_s=0.8)
    with_sender = [one._replace(sender_s=1.19) for one in seconds]
    recorded = _waves(160, 4, 0.1)
    apart, together = (_of(Log(recorded, found), 8) for found in (seconds, with_sender))
    assert apart.seconds < 3.5
    # A tenth more than with four, because four more wait for a processor.
    assert together.seconds == pytest.approx(4.4, rel=0.05)
    assert together.most_s - together.least_s < apart.most_s - apart.least_s


def test_what_else_runs_on_the_machine_may_give_way_or_not() -> None:
    """Sessions that need little of processors that others have filled: both are within the interval."""
    found = Log(_waves(160, 4, 0.1), _seconds(4, 4, processors=2, busy_s=1.98, sessions_s=0.2))
    sixteen = _of(found, 16)
    # 0.05 of each second of a batch: two processors serve 40 at a time, what is left to four of them no more than four.
    assert sixteen.least_s < 1.1
    assert sixteen.most_s > 3.5
    assert _of(found, 4).most_s < 4.5


def test_processors_that_are_not_counted_are_learned_from_what_ran_beside() -> None:
    """Batches that took as many times as long as others ran beside them had one processor."""
    recorded: list[Recorded] = []
    at_s = 0.0
    for wave in range(40):
        beside_it = 1 + wave % 4
        took_s = 0.02 * beside_it
        recorded += [
            _batch(len(recorded) + one + 1, at_s, took_s, at_s + took_s + 1e-4 * one) for one in range(beside_it)
        ]
        at_s += took_s + 0.001
    found = Log(recorded, _seconds(at_s, 4, samples=4, on_cpu=4))
    assert not found.learned.is_known
    best = found.learned.best
    assert (best.processors, round(best.cpu_share, 6)) == (1.0, 1.0)
    # Seven that wait for the processor make each other's work longer.
    assert _of(found, 8).seconds == pytest.approx(_of(found, 1).seconds * (1 + 7 / 40), rel=0.1)


def test_what_a_log_does_not_say_widens_the_interval() -> None:
    """Where all batches ran beside three others, a full processor and a slow one look the same: both are within."""
    recorded = _waves(160, 4, 0.1)
    found = Log(recorded, _seconds(4, 4, samples=4, on_cpu=4))
    eight = _of(found, 8)
    assert eight.least_s < 2.0
    assert eight.most_s > 4.0
    four = _of(found, 4)
    assert four.most_s < 4.4


def test_commits_one_after_the_other_are_the_limit() -> None:
    """With the order kept more workers gain nothing; relaxed they share flushes."""
    recorded = [
        _batch(seq + 1, max(0.0, (seq - 3) * 0.05), 0.01, (seq + 1) * 0.05 + 0.01, commit_s=0.05) for seq in range(100)
    ]
    found = Log(recorded, _seconds(5, 4, processors=2, busy_s=0.1, sessions_s=0.05))
    assert _seconds_of(found) == pytest.approx([6.0, 5.0, 5.0, 5.0, 5.0], rel=0.1)
    assert _of(found, 8).limit == "commits"
    # One flush is of all that wait: 16 workers need a flush for about 16 batches.
    relaxed = _seconds_of(found, "relaxed")
    assert relaxed == sorted(relaxed, reverse=True)
    assert relaxed[-1] < 1.0


def test_a_chain_is_as_long_for_any_number() -> None:
    """Batches each of which waits for the one before take as long one by one; that is no question of workers."""
    recorded = [_batch(seq + 1, seq * 0.1, 0.1, (seq + 1) * 0.1, holder_seq=seq, waits=seq > 0) for seq in range(50)]
    found = Log(recorded, _seconds(5, 4, processors=2, busy_s=0.1, sessions_s=0.05))
    for order in ("preserve", "relaxed"):
        assert _seconds_of(found, order) == pytest.approx([5.0] * 5, rel=0.1)
        assert _of(found, 8, order).limit == "dependencies"


def test_late_rows_follow_in_the_turn() -> None:
    """A tenth of each batch is held by the one before: the rest is executed beside it, and these rows in line."""
    recorded = [
        _batch(
            seq + 1, seq // 4 * 0.1, 0.1, 0.1 + seq * 0.025, holder_seq=seq or -1, late_rows=10 if seq else 0,
            commit_s=0.0101 if seq else 1e-4,
        )
        for seq in range(100)
    ]  # fmt: skip
    found = Log(recorded, _seconds(3, 4, processors=8, busy_s=0.1, sessions_s=0.05))
    assert found.costs(found.learned.best).late_row_s == pytest.approx(0.001)
    # Nothing is in flight before a single worker's batch; sixteen are limited by a hundred times ten late rows.
    assert _of(found, 1).seconds > 5
    assert _of(found, 16).seconds > 1


def test_batches_of_one_size_do_not_tell_what_one_takes_for_itself() -> None:
    """A few seconds more or less in some of them are chance; small batches next to large ones do show it."""
    alike = [(199 + seq % 2, 0.02 + 0.01 * (seq % 2)) for seq in range(60)]
    assert line_of_sizes(alike) == pytest.approx((0.0, 0.025 / 199.5), rel=0.01)
    apart = [(changes, 0.005 + 1e-4 * changes) for changes in (100, 500, 1000) * 20]
    assert line_of_sizes([*apart, (100, 9.0)])[0] == pytest.approx(0.005, rel=0.01)
    assert line_of_sizes([]) == (0.0, 0.0)


def test_a_log_whose_speed_varies_has_a_wider_interval() -> None:
    """Two logs of as many batches in the same time: one even, one now fast and now slow."""
    even = _waves(160, 4, 0.1)
    uneven: list[Recorded] = []
    at_s = 0.0
    for wave in range(40):
        took_s = 0.05 if wave // 10 % 2 else 0.15
        uneven += [_batch(4 * wave + one + 1, at_s, took_s, at_s + took_s + 1e-4 * one) for one in range(4)]
        at_s += took_s
    seconds = _seconds(4, 4, processors=2, busy_s=0.1, sessions_s=0.05)
    narrow, wide = (_of(Log(recorded, seconds), 4) for recorded in (even, uneven))
    assert wide.seconds == pytest.approx(narrow.seconds, rel=0.05)
    assert wide.most_s / wide.least_s > narrow.most_s / narrow.least_s + 0.1


def test_a_source_that_does_not_limit_makes_nothing_less_sure() -> None:
    """It was read in fits, in a quarter of the time: another run is not longer for that."""
    seconds = _seconds(4, 4, processors=2, busy_s=0.1, sessions_s=0.05)
    in_fits = [one._replace(paused_s=0.98 if at % 2 else 0.6) for at, one in enumerate(seconds)]
    even, uneven = (_of(Log(_waves(160, 4, 0.1), found), 4) for found in (seconds, in_fits))
    assert uneven.most_s == pytest.approx(even.most_s, rel=0.02)


def test_a_log_of_few_batches_is_no_surer_than_others() -> None:
    """An even log of a few windows says little of another run: rounds of other loads count for more."""
    found = Log(_waves(64, 4, 0.1), _seconds(2, 4, processors=2, busy_s=0.1, sessions_s=0.05))
    four, sixteen = _of(found, 4), _of(found, 16)
    assert (four.least_s, four.most_s) == pytest.approx((1.6 * (1 - 0.1), 1.6 * (1 + 0.1)), rel=0.03)
    # Further from the log it is less sure, most of all of how much longer it takes.
    assert sixteen.most_s / sixteen.seconds - 1 > 0.2
    assert 0.1 < 1 - sixteen.least_s / sixteen.seconds < 0.2


def test_a_turn_costs_the_leader_time() -> None:
    """Between two COMMITs 3 ms pass in the log, in which nothing is committed: so they do in a prediction."""
    recorded = [_batch(seq + 1, max(0, seq - 3) * 0.01, 0.001, (seq + 1) * 0.01, commit_s=0.007) for seq in range(200)]
    found = Log(recorded, _seconds(2, 4, processors=8, busy_s=0.1, sessions_s=0.05))
    assert found.costs(found.learned.best).turn_s == pytest.approx(0.003, rel=0.3)
    assert _of(found, 16).seconds == pytest.approx(2.0, rel=0.1)


def test_statements_that_are_made_take_no_processor_of_the_target() -> None:
    """A leader that makes them for half of a batch's time leaves the other half to the target."""
    recorded = [_batch(seq + 1, seq * 0.1, 0.1, (seq + 1) * 0.1) for seq in range(100)]
    # It reads for as long as it makes.
    found = Log(recorded, _seconds(10, 1, leader_cpu_s=10 / 11, processors=8, busy_s=1.4, sessions_s=0.5))
    assert found.costs(found.learned.best).change_s == pytest.approx(0.0005, rel=0.01)
    assert found.learned.best.cpu_share == pytest.approx(1.0, rel=0.15)
    assert _of(found, 1).seconds == pytest.approx(10.0, rel=0.1)


def test_a_daemon_that_keeps_up_gains_nothing() -> None:
    """Ten batches a second as they come: any number of workers ends with the source, and it is named."""
    recorded = [
        _batch(
            seq + 1, seq * 0.1 + 0.002, 0.02, seq * 0.1 + 0.03, received_s=seq * 0.1 + 0.001, due_s=seq * 0.1,
            transactions=5, changes=5,
        )
        for seq in range(100)
    ]  # fmt: skip
    found = Log(recorded, _seconds(10, 4, paused_s=0.0))
    for order in ("preserve", "relaxed"):
        assert _seconds_of(found, order) == pytest.approx([9.93] * 5, rel=0.01)
        assert {_of(found, workers, order).limit for workers in (1, 4, 16)} == {"source"}
        # It varies as the source does: this one does not.
        sixteen = _of(found, 16, order)
        assert (sixteen.least_s, sixteen.most_s) == pytest.approx((9.93, 9.93), rel=0.015)


def test_a_leader_that_is_full_is_named() -> None:
    """Workers that wait for the leader are not made faster by more of them."""
    recorded = [_batch(seq + 1, seq * 0.1, 0.02, seq * 0.1 + 0.021, received_s=seq * 0.1) for seq in range(100)]
    found = Log(recorded, _seconds(9, 4, paused_s=0.0, leader_cpu_s=0.95))
    assert _of(found, 16).seconds == pytest.approx(9.92, rel=0.05)
    assert _of(found, 16).limit == "leader"


def test_more_workers_than_make_a_difference_are_not_played() -> None:
    """Where twice as many are alike, so are still more: here each batch waits for the one before."""
    chain = [_batch(seq + 1, seq * 0.1, 0.1, (seq + 1) * 0.1, holder_seq=seq, waits=seq > 0) for seq in range(50)]
    found = Log(chain, _seconds(5, 4, processors=2, busy_s=0.1, sessions_s=0.05))
    for order in ORDERS:
        predicted = list(found.of_workers(order, (1, 2, 3, 4, 8, 16, 64)))
        seconds = [one.seconds for one in predicted]
        assert all(later <= 1.01 * before for before, later in pairwise(seconds))
        assert seconds[-1] == seconds[-2] == seconds[-3]
        assert [one.workers for one in predicted] == [1, 2, 3, 4, 8, 16, 64]
    with pytest.raises(ValueError, match="comes after"):
        Log([*_waves(4, 4, 0.1), *_waves(4, 4, 0.1)], [])


def test_more_workers_on_full_processors_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not stay idle: twice as many may be about as fast, and still more are slower."""
    monkeypatch.setattr(prediction, "_ALIKE", 1.0)
    found = Log(_waves(160, 4, 0.1), _seconds(4, 4, processors=2, busy_s=2.0, sessions_s=2.0))
    eight, sixteen, most = found.of_workers("preserve", (8, 16, 64))
    assert eight.seconds < sixteen.seconds < most.seconds


def test_a_faster_target_takes_less_for_statements_only() -> None:
    """Twice as fast: the statements take half, the commits what they took, and the source is no faster."""
    seconds = _seconds(4, 4, processors=2, busy_s=0.1, sessions_s=0.05)
    statements, commits = (
        Log(_waves(160, 4, 0.1), seconds),
        Log([_batch(seq + 1, max(0.0, (seq - 3) * 0.05), 0.01, (seq + 1) * 0.05 + 0.01, commit_s=0.05)
             for seq in range(100)], seconds),
    )  # fmt: skip
    twice = Change(target_speed=2.0)
    assert statements.predict(twice).seconds == pytest.approx(2.0, rel=0.1)
    assert commits.predict(twice).seconds == pytest.approx(5.0, rel=0.05)
    # Without its flush a COMMIT takes next to nothing; a slower disk makes each one longer.
    assert commits.flush_s == pytest.approx(0.05)
    assert commits.predict(Change(synchronous_commit="off")).seconds < 0.5
    assert commits.predict(Change(flush_ms=100.0)).seconds == pytest.approx(10.0, rel=0.05)


def test_samples_say_which_part_of_a_commit_is_its_flush() -> None:
    """Sessions that were never seen waiting for one did not: nothing is gained by leaving it out."""
    recorded = [
        _batch(seq + 1, max(0.0, (seq - 3) * 0.05), 0.01, (seq + 1) * 0.05 + 0.01, commit_s=0.05) for seq in range(100)
    ]
    seconds = _seconds(5, 4, processors=2, busy_s=0.1, sessions_s=0.05, samples=4)
    assert Log(recorded, seconds).flush_s == 0.0
    # A batch is held for 0.21 s; a tenth of the samples are of its flush.
    some = Log(recorded, [one._replace(samples=10, flushing=1) for one in seconds])
    assert some.flush_s == pytest.approx(0.021, rel=0.05)


def test_smaller_batches_cost_as_small_ones_do_in_the_log() -> None:
    """Each batch takes 5 ms and 0.1 ms for a change: of 20 changes each they take more than twice as long as of 100."""
    sizes = [(100, 20)[seq % 3 == 0] for seq in range(240)]
    recorded, at_s = [], 0.0
    for seq, size in enumerate(sizes):
        took_s = 0.005 + 1e-4 * size
        recorded.append(_batch(seq + 1, at_s, took_s, at_s + took_s + 1e-4, transactions=size, changes=size))
        at_s += took_s + 1e-4
    found = Log(recorded, _seconds(at_s, 1, processors=2, busy_s=0.1, sessions_s=0.05))
    n = sum(sizes)
    # The daemon would have formed larger ones of such a backlog, as the replay does.
    for change, took_s in (
        (Change(batch_changes=20), n / 20 * 0.0071), (Change(batch_transactions=20), n / 20 * 0.0071),
        (Change(batch_changes=500, batch_transactions=500), n / 500 * 0.0551),
    ):  # fmt: skip
        assert found.predict(change).seconds == pytest.approx(found.right * took_s, rel=0.02)


def test_a_question_is_read_as_it_is_shown() -> None:
    """Each key has a value of its kind; a wrong one is named with the values that it can have."""
    text = "workers=8,order=relaxed,batch_changes=20000,target_speed=2,synchronous_commit=on,flush_ms=0.5"
    assert str(read_change(text)) == text
    assert read_change("workers=8, order=relaxed") == Change(workers=8, order="relaxed")
    for wrong, words in (
        ("", "no KEY=VALUE with one of the keys workers, order"), ("workers", "no KEY=VALUE"),
        ("speed=2", "target_speed"),
        ("workers=0", "workers is a number from 1 to 64"), ("workers=x", "a number from 1 to 64"),
        ("order=fast", "preserve or relaxed"), ("workers=1,workers=2", "workers is given twice"),
        ("target_speed=nan", "a factor from 0.01"), ("synchronous_commit=maybe", "on or off"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            read_change(wrong)


def test_contention_of_a_repairman() -> None:
    """Processors that are always wanted serve at their speed; those wanted in turn by few are nearly free."""
    full = Contention(cpu_share=1.0, processors=2.0).slowdowns(8)
    # A fortieth longer for each one that waits.
    assert full == pytest.approx([1.0, 1.0, 1.0, 1.5375, 2.1, 2.6875, 3.3, 3.9375, 4.6])
    assert Contention(cpu_share=0.5, processors=inf).slowdowns(2) == [1.0, 1.0, 2**0.1]
    half = Contention(cpu_share=0.5, processors=1.0).slowdowns(64)
    # Two that take turns: half of the time nothing is in the way, else one waits for the other; and both wait a little
    # longer for what is no processor.
    assert half[2] == pytest.approx(1.28, rel=0.01)
    # In the end only the processor counts: 64 times half a second, and an eightieth more for each other one.
    assert half[64] == pytest.approx(32.0 * (1 + 63 / 80), rel=0.01)


def test_seconds_beside_others_add_up() -> None:
    """Spans are cut where others begin and end."""
    assert beside([(0.0, 2.0), (1.0, 3.0), (5.0, 5.0)]) == [{1: 1.0, 2: 1.0}, {2: 1.0, 1: 1.0}, {}]
    line = fit([(10, 0.2), (100, 1.1)])
    assert line.batch_s == pytest.approx(0.1)
    assert line.change_s == pytest.approx(0.01)
    nothing = learn([Executed(1, {})], Processors())
    assert nothing.best.processors == inf
