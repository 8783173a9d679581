"""The latency benchmark on real servers: every probe is seen, and the figures fit together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench import latency, probing
from bench.latency import BUILT_IN, LatencyOptions, LatencyTurn, measure, parapply
from bench.latency_report import document, percentiles, summary
from parapply.demo.load import DemoLoad
from parapply.demo.stage import BANK, Interrupts, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

FAR_S = 0.005
#: Transactions a second: dozens in each turn also where a slow machine makes a fifth of them, as they come at random.
RATE = 100
FAR = parapply(target_delay_s=FAR_S)
OPTIONS = LatencyOptions(probes=10, interval_s=0.1, rounds=1, scale=1, clients=1, ceiling_s=1, systems=(BUILT_IN, FAR))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Two servers of version 18, as the benchmark has them."""
    with Stage(Interrupts(), name="latency-test", settings={"fsync": "off"}) as stage:
        yield stage


@pytest.fixture(scope="module")
def turns(stage: Stage) -> list[LatencyTurn]:
    """The turns of a tiny run.

    The load of all that the publisher takes is smaller here: the test is not its size, but that half of it comes.
    """
    told: list[LatencyTurn] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "DemoLoad", partial(DemoLoad, rate=RATE))
        patch.setattr(probing, "_WARM_UP_PROBES", 2)
        turns = measure(stage, OPTIONS, told.append)
    assert told == turns
    return turns


def test_every_probe_is_seen_once(turns: list[LatencyTurn]) -> None:
    """Each system has an idle turn and one beside the load, and each turn has one latency for every probe."""
    assert [(turn.system, turn.load) for turn in turns] == [
        (system.name, load) for system in OPTIONS.systems for load in ("idle", "half")
    ]
    for turn in turns:
        assert len(turn.visible_ms) == len(turn.commit_ms) == OPTIONS.probes
        # From sending COMMIT to being seen cannot be no time, whatever the answer's way takes.
        assert all(sum(parts) > 0 for parts in zip(turn.visible_ms, turn.commit_ms, strict=True))
        assert (turn.load_per_s > 0) == (turn.wanted_per_s > 0) == (turn.load == "half")


def test_percentiles_are_ordered(turns: list[LatencyTurn]) -> None:
    """No percentile is below a lower one, over single turns and over all."""
    for latencies_ms in (turn.visible_ms for turn in turns):
        found = percentiles(latencies_ms)
        assert min(latencies_ms) <= found.p50_ms <= found.p95_ms <= found.p99_ms <= found.max_ms == max(latencies_ms)


def test_a_far_subscriber_is_later(turns: list[LatencyTurn]) -> None:
    """Through the delay no probe is seen before the way to the subscriber is over."""
    for turn in turns:
        if turn.system == FAR.name:
            whole_ms = [sum(parts) for parts in zip(turn.visible_ms, turn.commit_ms, strict=True)]
            assert min(whole_ms) >= FAR_S * 1000


def test_nothing_is_left_behind(stage: Stage, turns: list[LatencyTurn]) -> None:
    """Neither slot nor subscription nor database of a turn is left, and the publisher keeps all probes."""
    assert stage.source.execute("SELECT count(*) FROM pg_replication_slots") == [(0,)]
    assert stage.target.execute("SELECT count(*) FROM pg_subscription") == [(0,)]
    assert stage.target.execute("SELECT count(*) FROM pg_database WHERE datname = 'latency'") == [(0,)]
    ((probes,),) = stage.source.execute("SELECT count(*) FROM probe", dbname=BANK)
    assert probes > OPTIONS.probes * len(turns)


def test_the_report_holds_every_system_and_load(turns: list[LatencyTurn]) -> None:
    """Table and document have a line for each system and load; the document also each turn."""
    console = Console(width=160, record=True)
    console.print(summary(turns))
    text = console.export_text()
    held = document(turns)
    assert len(held["turns"]) == len(turns)
    assert [(one["system"], one["load"]) for one in held["all_rounds"]] == [(turn.system, turn.load) for turn in turns]
    for turn in turns:
        assert text.count(turn.load) == len(OPTIONS.systems)
        assert turn.system in text


def test_percentiles_are_measured_values() -> None:
    """A percentile is the smallest latency that its number of a hundred did not exceed."""
    found = percentiles([float(number) for number in range(1, 201)])
    assert (found.p50_ms, found.p95_ms, found.p99_ms, found.max_ms) == (100, 190, 198, 200)
    alone = percentiles([7.0])
    assert (alone.p50_ms, alone.max_ms) == (7.0, 7.0)
