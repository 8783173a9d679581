"""Predictions from logs made by hand whose truth can be worked out: one thing limits each of them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from parapply.analysis.contention import Contention, Executed, Processors, beside, fit, learn, line_of_sizes
from parapply.analysis.prediction import Prediction, Recorded, Second, predict
from parapply.analysis.simulation import Load, Plant, Stretch, play

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
    values: dict[str, object] = {"leader_cpu_s": 0.01, "paused_s": 0.98, "order": "preserve", **_LIMITS, **more}
    return [Second(ended_s=float(at), length_s=1.0, workers=workers, **values) for at in range(1, int(until_s) + 2)]  # type: ignore[arg-type]


def _waves(n: int, workers: int, execute_s: float) -> list[Recorded]:
    """Return batches of which a number execute at a time, all alike; commits take next to nothing."""
    return [
        _batch(
            seq + 1, seq // workers * execute_s, execute_s, (seq // workers + 1) * execute_s + 1e-4 * (seq % workers)
        )
        for seq in range(n)
    ]


def _seconds_of(found: Prediction, order: str = "preserve") -> list[float]:
    return [found.of(order, workers).seconds for workers in (1, 2, 4, 8, 16)]  # type: ignore[arg-type]


def test_batches_that_only_wait_are_as_fast_as_there_are_workers() -> None:
    """A disk that answers all at a time: twice the workers take half as long, and are what limits."""
    recorded = _waves(160, 4, 0.1)
    found = predict(recorded, _seconds(4, 4, processors=2, busy_s=0.1, sessions_s=0.05), (1, 2, 4, 8, 16))
    assert _seconds_of(found) == pytest.approx([16.0, 8.0, 4.0, 2.0, 1.0], rel=0.1)
    assert found.of("preserve", 8).limit == "workers"
    assert (found.order, found.workers) == ("preserve", 4)
    for one in found.predicted:
        assert one.least_s <= one.seconds <= one.most_s


def test_full_processors_are_not_made_faster_by_more_workers() -> None:
    """Four workers on two processors that are full: two are as fast, one half so, more are not; that is said."""
    recorded = _waves(160, 4, 0.1)
    found = predict(recorded, _seconds(4, 4, processors=2, busy_s=2.0, sessions_s=2.0), (1, 2, 4, 8, 16))
    assert _seconds_of(found) == pytest.approx([8.0, 4.0, 4.0, 4.0, 4.0], rel=0.1)
    assert found.of("preserve", 8).limit == "processors"
    assert found.learned.is_known


def test_what_sends_the_changes_is_part_of_the_work() -> None:
    """A publisher on the same machine takes a processor for each change: what is full with it stays full."""
    seconds = _seconds(4, 4, processors=2, busy_s=2.0, sessions_s=0.8)
    with_sender = [one._replace(sender_s=1.19) for one in seconds]
    recorded = _waves(160, 4, 0.1)
    apart, together = (predict(recorded, found, (2, 4, 8)).of("preserve", 8) for found in (seconds, with_sender))
    assert apart.seconds < 3.5
    assert together.seconds == pytest.approx(4.0, rel=0.05)
    assert together.most_s - together.least_s < apart.most_s - apart.least_s


def test_what_else_runs_on_the_machine_may_give_way_or_not() -> None:
    """Sessions that need little of processors that others have filled: both are within the interval."""
    found = predict(_waves(160, 4, 0.1), _seconds(4, 4, processors=2, busy_s=1.98, sessions_s=0.2), (4, 16))
    sixteen = found.of("preserve", 16)
    # 0.05 of each second of a batch: two processors serve 40 at a time, what is left to four of them no more than four.
    assert sixteen.least_s < 1.1
    assert sixteen.most_s > 3.5
    assert found.of("preserve", 4).most_s < 4.5


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
    found = predict(recorded, _seconds(at_s, 4, samples=4, on_cpu=4), (1, 4, 8))
    assert not found.learned.is_known
    best = found.learned.best
    assert (best.processors, round(best.cpu_share, 6)) == (1.0, 1.0)
    assert found.of("preserve", 8).seconds == pytest.approx(found.of("preserve", 1).seconds, rel=0.1)


def test_what_a_log_does_not_say_widens_the_interval() -> None:
    """Where all batches ran beside three others, a full processor and a slow one look the same: both are within."""
    recorded = _waves(160, 4, 0.1)
    found = predict(recorded, _seconds(4, 4, samples=4, on_cpu=4), (4, 8))
    eight = found.of("preserve", 8)
    assert eight.least_s < 2.0
    assert eight.most_s > 4.0
    four = found.of("preserve", 4)
    assert four.most_s < 4.4


def test_commits_one_after_the_other_are_the_limit() -> None:
    """With the order kept more workers gain nothing; relaxed they share flushes."""
    recorded = [
        _batch(seq + 1, max(0.0, (seq - 3) * 0.05), 0.01, (seq + 1) * 0.05 + 0.01, commit_s=0.05) for seq in range(100)
    ]
    found = predict(recorded, _seconds(5, 4, processors=2, busy_s=0.1, sessions_s=0.05), (1, 2, 4, 8, 16))
    assert _seconds_of(found) == pytest.approx([6.0, 5.0, 5.0, 5.0, 5.0], rel=0.1)
    assert found.of("preserve", 8).limit == "commits"
    # One flush is of all that wait: 16 workers need a flush for about 16 batches.
    relaxed = _seconds_of(found, "relaxed")
    assert relaxed == sorted(relaxed, reverse=True)
    assert relaxed[-1] < 1.0


def test_a_chain_is_as_long_for_any_number() -> None:
    """Batches each of which waits for the one before take as long one by one; that is no question of workers."""
    recorded = [_batch(seq + 1, seq * 0.1, 0.1, (seq + 1) * 0.1, holder_seq=seq, waits=seq > 0) for seq in range(50)]
    found = predict(recorded, _seconds(5, 4, processors=2, busy_s=0.1, sessions_s=0.05), (1, 2, 4, 8, 16))
    for order in ("preserve", "relaxed"):
        assert _seconds_of(found, order) == pytest.approx([5.0] * 5, rel=0.1)
        assert found.of(order, 8).limit == "dependencies"


def test_late_rows_follow_in_the_turn() -> None:
    """A tenth of each batch is held by the one before: the rest is executed beside it, and these rows in line."""
    recorded = [
        _batch(
            seq + 1, seq // 4 * 0.1, 0.1, 0.1 + seq * 0.025, holder_seq=seq or -1, late_rows=10 if seq else 0,
            commit_s=0.0101 if seq else 1e-4,
        )
        for seq in range(100)
    ]  # fmt: skip
    found = predict(recorded, _seconds(3, 4, processors=8, busy_s=0.1, sessions_s=0.05), (1, 16))
    assert found.plant.late_row_s == pytest.approx(0.001)
    # Nothing is in flight before a single worker's batch; sixteen are limited by a hundred times ten late rows.
    assert found.of("preserve", 1).seconds > 5
    assert found.of("preserve", 16).seconds > 1


def test_late_rows_wait_for_all_that_hold_them() -> None:
    """With relaxed order the later of two holders may commit first: the rows follow both."""
    parts = [Stretch(transactions=10, changes=10, size_bytes=1, release_s=0.0, due_s=-9.0)] * 40
    parts[0] = parts[0]._replace(weight=30.0)
    parts[20] = parts[20]._replace(holder=0, late_rows=1)
    parts[21] = parts[21]._replace(holder=10, late_rows=1)
    plant = Plant(
        workers=3, order="relaxed", limits=(100, 100, 1000), batch_s=0.0, change_s=0.01, late_row_s=1.0,
        commit_s=0.0, slowdowns=(1.0,),
    )  # fmt: skip
    # 100 changes and 290 more of the first take 3.9 s, and only then comes the late row.
    assert play(Load(parts), plant).seconds == pytest.approx(3.9 + 1.0, abs=0.05)


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
    narrow, wide = (predict(recorded, seconds, (4,)).of("preserve", 4) for recorded in (even, uneven))
    assert wide.seconds == pytest.approx(narrow.seconds, rel=0.05)
    assert wide.most_s / wide.least_s > narrow.most_s / narrow.least_s + 0.1


def test_more_batches_under_way_hold_more_rows() -> None:
    """Of four batches at a time each second one had a row that another one held: of sixteen nearly all do."""
    recorded = [
        _batch(
            seq + 1, seq // 4 * 0.1, 0.09, seq // 4 * 0.1 + 0.095 + seq % 4 * 1e-4, received_s=seq // 4 * 0.1 - 1e-3,
            holder_seq=seq if seq % 2 else -1, late_rows=seq % 2, commit_s=0.01 if seq % 2 else 1e-4,
        )
        for seq in range(200)
    ]  # fmt: skip
    seconds = _seconds(5, 4, processors=8, busy_s=0.1, sessions_s=0.05)
    found = predict(recorded, seconds, (4, 16))
    # Nothing of the batches beside it that are later ones in the log: none, one, two and three others for each.
    assert found.plant.late_pairs == pytest.approx(100 / (200 / 4 * (1 + 2 + 3) * _FULL**2), rel=0.05)
    parts = [Stretch(transactions=50, changes=50, size_bytes=1, release_s=0.0, due_s=-9.0)] * 400
    known = [part._replace(seen_from=0) for part in parts]
    unknown = [part._replace(seen_from=place) for place, part in enumerate(parts)]
    plant = replace(found.plant, order="relaxed", workers=16)
    assert play(Load(unknown), plant).seconds > 1.1 * play(Load(known), plant).seconds
    assert play(Load(unknown), plant) == play(Load(unknown), plant)


def test_the_rest_of_a_backlog_is_given_out_at_once() -> None:
    """Five batches for sixteen workers are as long as one, though the last is not full; then nothing is left."""
    parts = [Stretch(transactions=10, changes=10, size_bytes=1, release_s=0.0, due_s=-9.0)] * 45
    plant = Plant(
        workers=16, order="preserve", limits=(100, 100, 1000), batch_s=0.0, change_s=0.01, commit_s=0.001,
        slowdowns=(1.0,),
    )  # fmt: skip
    played = play(Load(parts), plant)
    assert played.batches == 5
    assert played.seconds == pytest.approx(1.0, rel=0.05)
    assert played.ended_s > 0.9
    assert not played.idle_s


def test_a_turn_costs_the_leader_time() -> None:
    """Between two COMMITs 3 ms pass in the log, in which nothing is committed: so they do in a prediction."""
    recorded = [_batch(seq + 1, max(0, seq - 3) * 0.01, 0.001, (seq + 1) * 0.01, commit_s=0.007) for seq in range(200)]
    found = predict(recorded, _seconds(2, 4, processors=8, busy_s=0.1, sessions_s=0.05), (4, 16))
    assert found.plant.turn_s == pytest.approx(0.003, rel=0.3)
    assert found.of("preserve", 16).seconds == pytest.approx(2.0, rel=0.1)


def test_a_daemon_that_keeps_up_gains_nothing() -> None:
    """Ten batches a second as they come: any number of workers ends with the source, and it is named."""
    recorded = [
        _batch(
            seq + 1, seq * 0.1 + 0.002, 0.02, seq * 0.1 + 0.03, received_s=seq * 0.1 + 0.001, due_s=seq * 0.1,
            transactions=5, changes=5,
        )
        for seq in range(100)
    ]  # fmt: skip
    found = predict(recorded, _seconds(10, 4, paused_s=0.0), (1, 2, 4, 8, 16))
    for order in ("preserve", "relaxed"):
        assert _seconds_of(found, order) == pytest.approx([9.93] * 5, rel=0.01)
        assert {found.of(order, workers).limit for workers in (1, 4, 16)} == {"source"}
        # It varies as the source does: this one does not.
        sixteen = found.of(order, 16)
        assert (sixteen.least_s, sixteen.most_s) == pytest.approx((9.93, 9.93), rel=0.015)


def test_a_leader_that_is_full_is_named() -> None:
    """Workers that wait for the leader are not made faster by more of them."""
    recorded = [_batch(seq + 1, seq * 0.1, 0.02, seq * 0.1 + 0.021, received_s=seq * 0.1) for seq in range(100)]
    found = predict(recorded, _seconds(9, 4, paused_s=0.0, leader_cpu_s=0.95), (1, 4, 16))
    assert found.of("preserve", 16).seconds == pytest.approx(9.92, rel=0.05)
    assert found.of("preserve", 16).limit == "leader"


def test_batches_are_formed_again() -> None:
    """Sizes grow while the target is quick with full batches, and shrink while it is slow, by the daemon's own rule."""
    parts = [Stretch(transactions=50, changes=100, size_bytes=5000, release_s=0.0, due_s=-9.0) for _ in range(1000)]
    plant = Plant(
        workers=1, order="preserve", limits=(20_000, 20_000, 8 << 20), batch_s=0.0, change_s=1e-6, commit_s=0.0,
        slowdowns=(1.0,),
    )  # fmt: skip
    # 5,000 changes at first, twice as many after one that was full and quick, 20,000 at most. Three are closed ahead:
    # 5, 5, 5, then 10, 10, 10, then 20, 20 and 15 thousand.
    assert play(Load(parts), plant).batches == 9
    slow = Plant(**{**{name: getattr(plant, name) for name in Plant.__dataclass_fields__}, "change_s": 2e-4})
    # 1 s each: halved to 2,500, 1,250 and 625.
    assert play(Load(parts), slow).batches > 30


def test_any_load_is_played_to_its_end() -> None:
    """Dependencies of all kinds, late rows and a slow source: every batch commits, in both orders."""
    for seed in range(40):
        parts = [
            Stretch(
                transactions=1 + (index * seed) % 7, changes=1 + (index * seed) % 11, size_bytes=100,
                release_s=index * (seed % 3) * 0.001, due_s=index * (seed % 3) * 0.001 - (seed % 2) * 9,
                holder=index - 1 - seed % 5 if index > seed and index % 3 else -1, late_rows=seed % 4,
                waits=index % 7 == 0,
            )
            for index in range(300)
        ]  # fmt: skip
        for order in ("preserve", "relaxed"):
            for workers in (1, 3, 16):
                plant = Plant(
                    workers=workers, order=order, limits=(20, 20, 1 << 20), batch_s=1e-3, change_s=1e-4,
                    late_row_s=1e-4, commit_s=1e-3, slowdowns=Contention(cpu_share=0.5, processors=2).slowdowns(16),
                )  # fmt: skip
                played = play(Load(parts), plant)
                assert played.seconds >= 0.9 * parts[-1].release_s
                assert played.delay_s > 0
                assert played.batches >= sum(part.transactions for part in parts) / 27


def test_more_workers_are_never_said_to_be_slower() -> None:
    """Whatever the log, each number takes at most as long as the one before."""
    found = predict(_waves(64, 4, 0.1), _seconds(2, 4), (1, 2, 3, 4, 8, 16, 64))
    for order in ("preserve", "relaxed"):
        seconds = [one.seconds for one in found.predicted if one.order == order]
        assert seconds == sorted(seconds, reverse=True)
    with pytest.raises(KeyError):
        found.of("preserve", 5)
    with pytest.raises(ValueError, match="comes after"):
        predict([*_waves(4, 4, 0.1), *_waves(4, 4, 0.1)], [], (1,))


def test_contention_of_a_repairman() -> None:
    """Processors that are always wanted serve at their speed; those wanted in turn by few are nearly free."""
    full = Contention(cpu_share=1.0, processors=2.0).slowdowns(8)
    assert full == pytest.approx([1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    assert Contention(cpu_share=0.5, processors=inf).slowdowns(4) == [1.0] * 5
    half = Contention(cpu_share=0.5, processors=1.0).slowdowns(64)
    # Two that take turns: half of the time nothing is in the way, else one waits for the other.
    assert half[2] == pytest.approx(1.25, rel=0.01)
    # In the end only the processor counts: 64 times half a second.
    assert half[64] == pytest.approx(32.0, rel=0.001)


def test_seconds_beside_others_add_up() -> None:
    """Spans are cut where others begin and end."""
    assert beside([(0.0, 2.0), (1.0, 3.0), (5.0, 5.0)]) == [{1: 1.0, 2: 1.0}, {2: 1.0, 1: 1.0}, {}]
    line = fit([(10, 0.2), (100, 1.1)])
    assert line.batch_s == pytest.approx(0.1)
    assert line.change_s == pytest.approx(0.01)
    nothing = learn([Executed(1, {})], Processors())
    assert nothing.best.processors == inf
