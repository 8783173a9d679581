"""The benchmark of huge transactions on real servers: everything is seen, and the figures fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.attached import System
from bench.live import LiveOptions, LiveTurn, measure
from parapply.demo.stage import BANK, Interrupts, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

PARALLEL = System(name="built-in parallel", streaming="parallel")
OURS = System(name="parapply", settings=("apply.workers=2", "apply.commit_order=preserve"))
HOLD_S = 0.3
# Enough for a follower: more than `apply.stream_start_bytes`.
OPTIONS = LiveOptions(systems=(PARALLEL, OURS), rows=20_000, holds_s=(HOLD_S,), interval_s=0.01, rounds=1)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Two servers of version 18, as the benchmark has them."""
    with Stage(Interrupts(), name="live-test", settings={"fsync": "off"}) as stage:
        yield stage


@pytest.fixture(scope="module")
def turns(stage: Stage) -> list[LiveTurn]:
    """The turns of a tiny run."""
    told: list[LiveTurn] = []
    turns = measure(stage, OPTIONS, told.append)
    assert told == turns
    return turns


def test_each_system_has_the_same_rows_afterwards(turns: list[LiveTurn]) -> None:
    """Everybody takes a turn for each hold and ends with equal tables."""
    assert [(turn.system, turn.hold_s, turn.is_equal) for turn in turns] == [
        (system.name, HOLD_S, True) for system in OPTIONS.systems
    ]


def test_small_transactions_go_on_beside(turns: list[LiveTurn]) -> None:
    """Small ones are committed and seen while the huge one is open, and time passes from commit to visible."""
    for turn in turns:
        flow = turn.flow
        assert len(flow.before_ms) >= 2
        assert min(flow.write_s, flow.commit_s) > 0
        # It was seen after its COMMIT was sent; the answer may come later than the reader sees it.
        assert flow.visible_s + flow.commit_s > 0
        assert flow.gap_s > 0


def test_costs_and_ways_are_told(turns: list[LiveTurn]) -> None:
    """A streamed transaction is known as one; the daemon's memory is known, and who has no daemon has none."""
    built_in, ours = turns
    assert built_in.applying is None
    assert set(built_in.usage) == {"walsender", "target"}
    assert ours.applying is not None
    assert ours.applying.mode in {"streamed", "spilled"}
    assert (ours.applying.mode == "spilled") == bool(ours.applying.spilled_because)
    # The interpreter alone takes more.
    assert ours.usage["leader"].peak_bytes > 10 << 20


def test_nothing_is_left_behind(stage: Stage, turns: list[LiveTurn]) -> None:
    """Neither slot nor subscription nor database of a turn is left, and the publisher keeps what the last one wrote."""
    assert turns
    assert stage.source.execute("SELECT count(*) FROM pg_replication_slots") == [(0,)]
    assert stage.target.execute("SELECT count(*) FROM pg_subscription") == [(0,)]
    assert stage.target.execute("SELECT count(*) FROM pg_database WHERE datname = 'live'") == [(0,)]
    assert stage.source.execute("SELECT count(*) FROM items", dbname=BANK) == [(OPTIONS.rows,)]
