"""What-if: makespans and limits of small cases that can be worked out by hand, and what holds for any case."""

from __future__ import annotations

import random

import pytest

from parapply.analysis.units import Row, of_transactions
from parapply.analysis.whatif import COMMIT_ORDER, OTHER, SOURCE, WORK, WORKERS_LABEL, Edge, Label, Unit, what_if

_KEY = Label("key", "public.t")
_TABLE = Label("table", "public.log")


def test_independent_units_use_every_worker() -> None:
    """Without dependencies and commit time the work is divided evenly, in both orders, and more workers would help."""
    found = what_if([Unit(seq, 1.0, 0.0) for seq in range(1, 65)], (1, 4, 64))
    for order in ("preserve", "relaxed"):
        assert [found.of(order, n).makespan_s for n in (1, 4, 64, 0)] == [64.0, 16.0, 1.0, 1.0]
        assert found.of(order, 4).speed_up == 4.0
        assert found.of(order, 4).limit == WORKERS_LABEL
        assert found.critical_path[order] == {WORK: 1.0}


def test_a_chain_gains_nothing_and_is_named() -> None:
    """Where each unit needs the one before, any number of workers takes as long as one; the key is named."""
    units = [Unit(seq, 2.0, 1.0, [Edge(seq - 1, _KEY)] if seq > 1 else []) for seq in range(1, 11)]
    found = what_if(units, (1, 8))
    for order in ("preserve", "relaxed"):
        assert found.of(order, 8).makespan_s == found.of(order, 1).makespan_s == 30.0
        assert found.of(order, 8).limit == _KEY
        assert found.critical_path[order] == {WORK: 3.0, _KEY: 27.0}
    assert str(_KEY) == "key in public.t"
    assert str(Label("unique", "public.t", "t_v_key")) == "unique t_v_key in public.t"


def test_commits_in_order_are_one_after_the_other() -> None:
    """With the order kept a COMMIT is sent when the one before is acknowledged; relaxed they overlap."""
    found = what_if([Unit(seq, 1.0, 1.0) for seq in range(1, 9)], (8,))
    assert found.of("relaxed", 8).makespan_s == 2.0
    assert found.of("preserve", 8).makespan_s == 9.0
    assert found.of("preserve", 0).limit == COMMIT_ORDER
    assert found.critical_path["preserve"] == {WORK: 2.0, COMMIT_ORDER: 7.0}


def test_late_rows_cost_only_themselves() -> None:
    """Of units that share one of four rows only that row is applied in line, with COMMIT."""
    units = [Unit(seq, 4.0, 0.0, [Edge(seq - 1, _KEY, 0.25)] if seq > 1 else []) for seq in range(1, 5)]
    found = what_if(units, (4,))
    for order in ("preserve", "relaxed"):
        # The first is done at 4, the others have done the rest by then.
        assert found.of(order, 4).makespan_s == 4.0 + 3 * 1.0
        assert found.critical_path[order] == {WORK: 4.0, _KEY: 3.0}
    # With one worker there is no other to share with: nothing is late.
    assert what_if(units, (1,)).of("preserve", 1).makespan_s == 16.0


def test_a_unit_that_is_late_as_a_whole_waits() -> None:
    """Several shared rows may add up to all of a unit: then it has nothing to do meanwhile."""
    units = [Unit(1, 1.0, 0.0), Unit(2, 1.0, 0.0, [Edge(1, _KEY, 0.5), Edge(1, _TABLE, 0.5)])]
    assert what_if(units, (2,)).of("relaxed", 2).makespan_s == 2.0


def test_a_barrier_waits_for_everything() -> None:
    """A barrier starts when all before it have committed, and what follows when it has."""
    barrier = Label("barrier", "public.t", "truncate")
    units = [
        Unit(1, 5.0, 0.0),
        Unit(2, 1.0, 0.0),
        Unit(3, 1.0, 0.0, [Edge(2, barrier, is_barrier=True)]),
        Unit(4, 1.0, 0.0, [Edge(3, barrier, is_barrier=True)]),
        Unit(5, 1.0, 0.0, [Edge(3, barrier, is_barrier=True)]),
    ]
    found = what_if(units, (8,))
    assert found.of("relaxed", 8).makespan_s == 7.0
    assert found.critical_path["relaxed"] == {WORK: 5.0, barrier: 2.0}


def test_independent_units_pass_one_that_waits() -> None:
    """A worker is not kept for a unit that cannot start yet: later ones go first."""
    units = [Unit(1, 10.0, 0.0), Unit(2, 1.0, 0.0, [Edge(1, _KEY)]), *(Unit(seq, 1.0, 0.0) for seq in range(3, 12))]
    assert what_if(units, (2,)).of("relaxed", 2).makespan_s == 11.0


def test_old_dependencies_are_counted_as_done() -> None:
    """Memory is bounded: what lies further back than the window is taken for committed, and the reader is told."""
    units = [Unit(seq, 1.0, 0.0, [Edge(seq - 5, _KEY)] if seq > 5 else []) for seq in range(1, 101)]
    assert what_if(units, (64,), window=5).n_forgotten == 0
    found = what_if(units, (64,), window=4)
    assert found.n_forgotten == 95
    assert found.of("relaxed", 0).makespan_s == 1.0


def test_the_number_of_labels_is_bounded() -> None:
    """A thousand tables are told apart only up to a limit; the rest stands together."""
    units = [Unit(seq, 1.0, 0.0, [Edge(seq - 1, Label("key", f"t{seq}"))] if seq > 1 else []) for seq in range(1, 1001)]
    path = what_if(units, (1,)).critical_path["relaxed"]
    assert len(path) < 100
    assert path[OTHER] > 900
    assert sum(path.values()) == 1000.0


def test_no_unit_is_applied_before_it_is_there() -> None:
    """Of a daemon that keeps up no number of workers makes anything faster, and the source is named as the limit."""
    found = what_if([Unit(seq, 0.5, 0.1, release_s=float(seq)) for seq in range(1, 11)], (1, 4, 64))
    for order in ("preserve", "relaxed"):
        assert {found.of(order, n).makespan_s for n in (1, 4, 64, 0)} == {10.6}
        assert {found.of(order, n).speed_up for n in (1, 4, 64, 0)} == {1.0}
        assert {found.of(order, n).limit for n in (4, 64, 0)} == {SOURCE}
        assert found.critical_path[order] == pytest.approx({SOURCE: 10.0, WORK: 0.6})


def test_a_backlog_that_is_there_has_no_source_to_wait_for() -> None:
    """A unit that waits longer for its worker or for another unit than for the publisher is as if it had been there."""
    units = [Unit(1, 5.0, 0.0), Unit(2, 1.0, 0.0, [Edge(1, _KEY)], 3.0), Unit(3, 1.0, 0.0, (), 4.0)]
    found = what_if(units, (1, 2))
    assert found.of("relaxed", 1).makespan_s == 7.0
    assert found.of("relaxed", 2).makespan_s == 6.0
    assert found.critical_path["relaxed"] == {WORK: 5.0, _KEY: 1.0}


def test_units_out_of_order_are_refused() -> None:
    """The source order is the order of the input; a caller that has not sorted is told."""
    with pytest.raises(ValueError, match="comes after"):
        what_if([Unit(2, 1.0, 0.0), Unit(1, 1.0, 0.0)])


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_for_any_units(seed: int) -> None:
    """No makespan is below the longest chain or a part of the work; one worker takes all; more take no longer."""
    rng = random.Random(seed)
    units = []
    for seq in range(1, 300):
        earlier = [rng.randrange(max(1, seq - 30), seq) for _ in range(rng.choice((0, 0, 1, 3)))] if seq > 1 else []
        edges = [Edge(one, rng.choice((_KEY, _TABLE)), rng.choice((1.0, 0.2))) for one in earlier]
        units.append(Unit(seq, rng.expovariate(1.0), rng.expovariate(5.0), edges))
    found = what_if(units)
    for order in ("preserve", "relaxed"):
        length_s = sum(found.critical_path[order].values())
        assert length_s == pytest.approx(found.of(order, 0).makespan_s)
        assert found.of(order, 1).makespan_s == pytest.approx(found.work_s)
        makespans = [one.makespan_s for one in found.attainable if one.order == order and one.workers]
        assert makespans == sorted(makespans, reverse=True)
        for one in found.attainable:
            if one.order == order and one.workers:
                assert one.makespan_s >= found.work_s / one.workers * (1 - 1e-9)
                assert one.makespan_s >= max(unit.execute_s + unit.commit_s for unit in units)
    assert found.of("relaxed", 64).makespan_s <= found.of("preserve", 64).makespan_s * (1 + 1e-9)


def test_transactions_share_their_batch_by_changes() -> None:
    """A transaction's part of its batch's time is its part of the changes; a dependency concerns part of those."""
    rows = [Row(1, 7, 1, 4, 8.0, 4.0, ()), Row(2, 7, 3, 4, 8.0, 4.0, [(1, "key", "public.t", "", 1)])]
    assert list(of_transactions(rows)) == [
        Unit(1, 2.0, 1.0, []),
        Unit(2, 6.0, 3.0, [Edge(1, _KEY, 1 / 3)]),
    ]
