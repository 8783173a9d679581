"""The engine driven by a clock: what comes out follows from its rules, and changes when one of them is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from parapply.analysis.changes import ORDERS
from parapply.analysis.contention import Contention
from parapply.analysis.replay import Costs, HotRows, Settings, play
from parapply.analysis.stream import Recorded, stream_of
from parapply.engine import intake
from parapply.engine.intake import Closing
from parapply.engine.stalls import Stalls
from parapply.plan import scheduler
from parapply.plan.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.analysis.stream import LoggedStream

_SETTINGS = Settings(workers=3, order="preserve", limits=(100, 100, 1000))
_COSTS = Costs(batch_s=0.0, change_s=0.01, commit_s=0.0)


def _recorded(seq: int, **more: object) -> Recorded:
    values: dict[str, Any] = {
        "transactions": 1, "changes": 10, "size_bytes": 1, "tables": 1, "received_s": float(seq),
        "started_s": seq + 0.1, "committed_s": seq + 0.5, "due_s": -9.0, "execute_s": 0.1, "commit_s": 0.0, **more,
    }  # fmt: skip
    return Recorded(seq=seq, **values)


def _backlog(recorded: Sequence[Recorded], release_s: float = 0.0) -> LoggedStream:
    """Return a stream of which all is late, each batch to be read so long after the one before."""
    n = len(recorded)
    return stream_of(recorded, [index * release_s for index in range(n)], [-9.0] * n)


def test_late_rows_wait_for_all_that_hold_them() -> None:
    """With relaxed order the later of two holders may commit first: the rows follow both."""
    recorded = [_recorded(seq) for seq in range(1, 41)]
    recorded[20] = _recorded(21, holder_seq=1, late_rows=1)
    recorded[21] = _recorded(22, holder_seq=11, late_rows=1)
    costs = replace(_COSTS, late_row_s=1.0, weights=[30.0, *[1.0] * 39])
    # 100 changes and 290 more of the first take 3.9 s, and only then come the late rows.
    played = play(_backlog(recorded), replace(_SETTINGS, order="relaxed", limits=(10, 100, 1000)), costs)
    assert played.seconds == pytest.approx(3.9 + 2.0, abs=0.05)


def test_a_listed_row_is_one_row() -> None:
    """Batches that list the same late row meet, and it is the same which of them was waited for last. Others do not."""
    same = [_recorded(seq, holder_seq=seq - 1, late_rows=1, keys=["a"]) for seq in range(1, 9)]
    apart = [_recorded(seq, holder_seq=seq - 1, late_rows=1, keys=[f"{seq}"]) for seq in range(1, 9)]
    costs = replace(_COSTS, late_row_s=1.0)
    settings = replace(_SETTINGS, workers=8, limits=(1, 10, 1000), order="relaxed")
    # All wait for the batch before: relaxed, seven rows follow one another. Only neighbours meet otherwise.
    assert play(_backlog(same), settings, costs).seconds == pytest.approx(7.1, abs=0.05)
    frames = [unit.transaction.changes for unit in _backlog(apart).units]
    assert [len(set(one) & set(frames[0])) for one in frames] == [2, 1, 0, 0, 0, 0, 0, 0]
    assert len(set.intersection(*[set(unit.transaction.changes[1:]) for unit in _backlog(same).units])) == 1


def test_a_listed_row_is_anywhere_in_its_batches() -> None:
    """The log does not say which transaction of a batch changes it: no place is taken for all."""
    recorded = [
        _recorded(seq, transactions=8, changes=8)
        if seq % 2
        else _recorded(seq, transactions=8, changes=8, holder_seq=seq - 1, late_rows=1, keys=[f"{seq:016}"])
        for seq in range(1, 41)
    ]
    units = _backlog(recorded).units
    places = {place % 16 for place, unit in enumerate(units) if len(unit.transaction.changes) > 1}
    # Of the holders, and of the batches that are late.
    assert len([place for place in places if place < 8]) > 4
    assert len([place for place in places if place >= 8]) > 4


def test_batches_that_ran_alone_run_alone() -> None:
    """A batch in pieces, or one that a barrier's wait is due to, begins when all before have committed."""
    recorded = [_recorded(seq, changes=100) for seq in range(1, 7)]
    recorded[2] = _recorded(3, changes=100, is_alone=True)
    recorded[3] = _recorded(4, changes=100, waits=True, holder_seq=3, kind="barrier")
    recorded[5] = _recorded(6, changes=100, waits=True, holder_seq=5, kind="barrier")
    stream = _backlog(recorded)
    assert [unit.is_alone for unit in stream.units] == [False, False, True, False, False, True]
    # Two together, one, two together, one: a second each.
    assert play(stream, replace(_SETTINGS, workers=8), _COSTS).seconds == pytest.approx(4.0, abs=0.05)


def test_a_barrier_is_the_batch_that_several_wait_for() -> None:
    """Also one that a batch with late rows waited for; of its transactions one is the barrier."""
    recorded = [_recorded(seq, changes=100, transactions=2) for seq in range(1, 6)]
    for place, holder in ((2, 2), (3, 2)):
        recorded[place] = recorded[place]._replace(waits=True, holder_seq=holder, kind="barrier")
    recorded[4] = recorded[4]._replace(waits=True, holder_seq=4, kind="barrier", late_rows=3)
    alone = [(unit.batch, unit.is_alone) for unit in _backlog(recorded).units]
    assert [place for place, is_alone in alone if is_alone] == [1, 3]


def test_hot_rows_become_more_with_the_batch_but_slower() -> None:
    """A power of its changes, because some rows are changed often and others seldom."""
    rows = HotRows(one=2.0, power=0.5)
    assert [rows.of(changes) for changes in (1, 100, 10_000)] == [2, 20, 200]


def test_more_batches_under_way_hold_more_rows() -> None:
    """Of four batches at a time each second one had a row that another one held: of sixteen nearly all do."""
    recorded = [
        _recorded(
            seq, transactions=100, changes=100, received_s=(seq - 1) // 4 * 0.1 - 1e-3,
            started_s=(seq - 1) // 4 * 0.1, committed_s=(seq - 1) // 4 * 0.1 + 0.095,
            holder_seq=seq - 1 if seq % 2 == 0 else -1, late_rows=int(seq % 2 == 0),
        )
        for seq in range(1, 201)
    ]  # fmt: skip
    stream = _backlog(recorded)
    # Of the batches beside it none, one, two and three are earlier ones.
    assert stream.pairs == pytest.approx(100 / (200 / 4 * (1 + 2 + 3) * 100**2), rel=0.05)
    apart = _backlog([one._replace(late_rows=0) for one in recorded])
    costs = replace(_COSTS, change_s=0.001, late_row_s=0.1, commit_s=0.001)
    settings = replace(_SETTINGS, workers=16, order="relaxed")
    slower, faster = play(stream, settings, costs), play(apart, settings, costs)
    assert slower.seconds > 1.1 * faster.seconds
    assert play(_backlog(recorded), settings, costs) == slower


def test_batches_that_have_committed_hold_no_rows() -> None:
    """While one is under way for long, others come and go in relaxed order: each new one has only that one beside it.

    The late row of the last one is then one in 100 pairs of batches, not one in all of them.
    """
    recorded = [
        _recorded(seq, received_s=float(seq), started_s=seq + 0.1, committed_s=seq + 0.5, changes=10)
        for seq in range(1, 102)
    ]
    recorded[0] = recorded[0]._replace(committed_s=200.0)
    recorded[-1] = recorded[-1]._replace(holder_seq=1, late_rows=1)
    assert _backlog(recorded).pairs == pytest.approx(1 / (100 * 10 * 10))


def test_batches_that_commit_before_the_start_hold_late_rows_only() -> None:
    """A batch that is read beside two others begins beside one: both count if its rows are late, else that one."""
    first = _recorded(1, received_s=0.0, started_s=0.0, committed_s=1.5)
    second = _recorded(2, received_s=0.1, started_s=0.1, committed_s=3.0)
    third = _recorded(3, received_s=1.0, started_s=2.0, committed_s=4.0, holder_seq=2)
    # In pairs: the second beside the first, and the third beside one or both.
    late = second._replace(late_rows=1, holder_seq=1)
    assert _backlog([first, late, third]).pairs == pytest.approx(1 / 200)
    assert _backlog([first, late, third._replace(late_rows=1)]).pairs == pytest.approx(2 / 300)


def test_the_rest_of_a_backlog_is_given_out_at_once() -> None:
    """Five batches for sixteen workers take as long as one, though the last is not full; then nothing is left."""
    stream = _backlog([_recorded(seq) for seq in range(1, 46)])
    played = play(stream, replace(_SETTINGS, workers=16), replace(_COSTS, commit_s=0.001))
    assert played.batches == 5
    assert played.seconds == pytest.approx(1.0, rel=0.05)
    assert played.ended_s > 0.9
    assert not played.idle_s


def test_batches_are_formed_again() -> None:
    """Sizes grow while the target is quick with full batches, and shrink while it is slow, by the daemon's own rule."""
    stream = _backlog([_recorded(seq, changes=100, size_bytes=5000) for seq in range(1, 1001)])
    settings = Settings(workers=1, order="preserve", limits=(20_000, 20_000, 8 << 20))
    # 5,000 changes at first, twice as many after one that was full and quick, 20,000 at most. Three are closed ahead:
    # 5, 5, 5, then 10, 10, 10, then 20, 20 and 15 thousand.
    assert play(stream, settings, replace(_COSTS, change_s=1e-6)).batches == 9
    # 1 s each: halved to 2,500, 1,250 and 625.
    assert play(stream, settings, replace(_COSTS, change_s=2e-4)).batches > 30


def test_many_tables_make_a_batch_larger() -> None:
    """A batch of few changes for each of many tables grows beyond its limits, as the daemon's does."""
    few, many = (
        play(
            _backlog([_recorded(seq, tables=tables) for seq in range(1, 1001)]),
            replace(_SETTINGS, limits=(1000, 1000, 8 << 20)), replace(_COSTS, change_s=1e-3),
        )
        for tables in (1, 100)
    )  # fmt: skip
    assert many.batches < few.batches


def test_a_worker_that_waits_for_long_is_taken_back() -> None:
    """In relaxed order late rows that wait for a holder of some seconds do not keep the worker from others."""
    recorded = [_recorded(seq) for seq in range(1, 41)]
    recorded[1] = _recorded(2, holder_seq=1, late_rows=1)
    costs = replace(_COSTS, weights=[100.0, *[1.0] * 39])
    settings = replace(_SETTINGS, workers=2, limits=(1, 10, 1000), order="relaxed")
    # The first takes 10 s; the other worker does all others within it, but for the second that waits a second.
    assert play(_backlog(recorded), settings, costs).seconds == pytest.approx(10.1, abs=0.3)


def test_any_load_is_played_to_its_end() -> None:
    """Dependencies of all kinds, late rows and a slow source: every batch commits, in both orders."""
    for seed in range(10):
        recorded = [
            _recorded(
                seq, transactions=1 + (seq * seed) % 7, changes=1 + (seq * seed) % 11, size_bytes=100,
                holder_seq=seq - 1 - seed % 5 if seq > seed and seq % 3 else -1, late_rows=seed % 4,
                waits=seq % 7 == 0, kind=("key", "table", "barrier")[seed % 3], is_alone=seq % 25 == seed,
                keys=["a", f"{seq % 3}"][: seed % 3], tables=1 + 80 * (seed % 2),
            )
            for seq in range(1, 61)
        ]  # fmt: skip
        releases_s = [seq * (seed % 3) * 0.001 for seq in range(60)]
        dues_s = [release_s - (seed % 2) * 9 for release_s in releases_s]
        stream = stream_of(recorded, releases_s, dues_s)
        for order in ORDERS:
            for workers in (1, 3, 16):
                costs = Costs(
                    batch_s=1e-3, change_s=1e-4, late_row_s=1e-4, commit_s=1e-3, turn_s=1e-4, read_s=1e-6, make_s=1e-6,
                    slowdowns=Contention(cpu_share=0.5, processors=2).slowdowns(16),
                )  # fmt: skip
                played = play(stream, Settings(workers=workers, order=order, limits=(20, 20, 1 << 20)), costs)
                assert played.seconds >= 0.9 * releases_s[-1]
                assert played.batches >= sum(one.transactions for one in recorded) / 30


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Scheduler, "may_commit", lambda _self, _batch: True),
        (scheduler, "overlaps", lambda _earlier, _later: []),
        (intake, "AHEAD", 40),
        (intake, "_FIRST_CHANGES", 50),
        (Closing, "look", lambda _self, _batch, _heard_s: 0.0),
        (Stalls, "holds_up", lambda _self, _worker, _now_s: False),
    ],
    ids=["turn", "overlaps", "room", "size", "closing", "giving back"],
)
def test_the_rules_are_the_engines(where: object, name: str, broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is broken in the engine shows in what is predicted: it is nowhere else."""
    recorded = [_recorded(seq) for seq in range(1, 41)]
    recorded[1] = _recorded(2, holder_seq=1, late_rows=1)
    recorded[30] = _recorded(31, holder_seq=30, waits=True)
    stream = _backlog(recorded, 0.003)
    costs = replace(_COSTS, weights=[100.0, *[1.0] * 39], read_s=1e-6)
    settings = [replace(_SETTINGS, workers=2, limits=limits, order=order) for order in ORDERS for limits in _LIMITS]
    before = [play(stream, one, costs) for one in settings]
    assert before == [play(stream, one, costs) for one in settings]
    monkeypatch.setattr(where, name, broken)
    assert before != [play(stream, one, costs) for one in settings]


_LIMITS = [(1, 10, 1000), (10, 100, 1000), (1000, 10_000, 1 << 20)]
