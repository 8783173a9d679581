"""Schedules of seeds keep every promise, those that failed once too; and broken engines are caught by them."""

from __future__ import annotations

import gc
import weakref
from random import SystemRandom
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from parapply.engine.durability import Durability
from parapply.engine.flight import CommitTurn, Flight, News, Turns
from parapply.engine.job import StreamJob
from parapply.engine.stalls import Stalls
from parapply.engine.state import Watermark
from parapply.plan import scheduler
from parapply.plan.scheduler import Scheduler, overlaps
from parapply.source.catch_up import IN_PROGRESS
from parapply.source.range_front import RangeFront
from parapply.source.range_order import RangeOrder, RangesEnd
from parapply.vocabulary import WaitKind
from tests.simulate import core
from tests.simulate.draws import Draws, Violation, shrink
from tests.simulate.kept import KEPT, Kept
from tests.simulate.kinds import KINDS
from tests.simulate.play import explained, play

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.engine.flight import Effect
    from parapply.engine.job import Job
    from parapply.engine.stalls import WorkerSeen
    from parapply.plan.batch import Batch
    from parapply.plan.scheduler import Overlap

    Mutant = Callable[[pytest.MonkeyPatch], None]

#: Seconds of each kind for an example of the profile of Hypothesis: 5 in all, 1 in the inner loop.
_FOR_S = 0.1
_MOST_S = 60.0
#: A broken engine must be caught by so many schedules.
_SEEDS = range(4_000)


@pytest.mark.parametrize("name", [*KINDS])
def test_schedules_keep_every_promise(name: str) -> None:
    """As `tests/simulate` says; with fresh seeds, so the message has the schedule that fails, and its steps."""
    played = play(name, SystemRandom().randrange(1 << 31), min(_FOR_S * settings().max_examples, _MOST_S))
    assert played.failed_seed is None, explained(KINDS[name], played.failed_seed)


@pytest.mark.parametrize("kept", KEPT, ids=range(len(KEPT)))
def test_a_schedule_that_failed_once_keeps_every_promise(kept: Kept) -> None:
    """Its choices are the choices of the shortest one that failed."""
    KINDS[kept.kind].again(kept.parts).run()


def test_the_same_choices_are_the_same_schedule() -> None:
    """A seed that fails can be played again, and made shorter, by its choices."""
    first = core.Schedule(7)
    first.run()
    second = core.Schedule.again(first.parts)
    second.run()
    assert (second.seen, second.parts) == (first.seen, first.parts)


@pytest.mark.parametrize("name", [*KINDS])
def test_a_schedule_that_ends_is_freed(name: str) -> None:
    """Nothing of it refers to itself, so a run of hours needs no more memory, and seldom the collector."""
    gc.disable()
    try:
        for seed in range(20):
            case = KINDS[name].of(seed)
            left = weakref.ref(case.seen)
            case.run()
            del case
            assert left() is None, seed
    finally:
        gc.enable()


def test_a_failing_schedule_is_made_shorter() -> None:
    """Choices are left out, made plain or lowered as long as it still fails; 0 follows the last one given."""

    def fails(parts: list[list[int]]) -> bool:
        draws = Draws(0, parts[0])
        return sum([draws.below(10) for _ in range(20)]) >= 12

    assert sum(shrink([[9, 0, 0, 9, 3, 0, 1, 8, 0, 2]], fails)[0]) == 12


def _turn_given_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "ask", lambda *_, **__: CommitTurn.COMMIT)


def _release_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "count_out", lambda *_: None)


def _parked_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "unpark", lambda *_: [])


def _late_key_dropped(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def without(order: Scheduler, batch: Batch) -> bool:
        may_start = add(order, batch)
        for changes in batch.table_changes:
            changes.late_keys.clear()
        return may_start

    patch.setattr(Scheduler, "add", without)


def _watermark_not_written(patch: pytest.MonkeyPatch) -> None:
    def ahead(durability: Durability, _low_lsn: int) -> bool:
        durability.state.durable_lsn = durability.state.watermark.high_lsn + 1
        return True

    patch.setattr(Durability, "made_durable", ahead)


def _answer_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "passed_to", lambda *_: [])


def _give_way_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "give_way", lambda *_: None)


def _asked_to_give_way_at_its_commit(patch: pytest.MonkeyPatch) -> None:
    def give_way(flight: Flight, job: Job) -> list[Effect] | None:
        if not isinstance(job, StreamJob) or job not in flight._following or job.must_yield:
            return None
        job.must_yield = True
        return [News(job)]

    patch.setattr(Flight, "give_way", give_way)


def _watermark_too_high(patch: pytest.MonkeyPatch) -> None:
    close = Watermark.close

    def closed(watermark: Watermark, end_lsn: int) -> bool:
        has_moved = close(watermark, end_lsn)
        watermark.low_lsn = watermark.high_lsn
        return has_moved

    patch.setattr(Watermark, "close", closed)


def _has_passed_too_early(patch: pytest.MonkeyPatch) -> None:
    has_passed = Flight.has_passed
    patch.setattr(Flight, "has_passed", lambda flight, seq: has_passed(flight, seq - 1))


def _keys_of_a_parked_batch_lost(patch: pytest.MonkeyPatch) -> None:
    park, parked = Flight.park, set[int]()

    def note(flight: Flight, job: Job) -> None:
        park(flight, job)
        parked.add(id(job.batch))

    def without(earlier: Batch, later: Batch) -> list[Overlap]:
        return [] if id(earlier) in parked else overlaps(earlier, later)

    patch.setattr(Flight, "park", note)
    patch.setattr(scheduler, "overlaps", without)


def _durable_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    committed = Durability.committed

    def moved(durability: Durability, now_s: float, *, is_synchronous: bool) -> bool:
        durability.state.durable_lsn = durability.state.watermark.low_lsn
        return committed(durability, now_s, is_synchronous=is_synchronous)

    patch.setattr(Durability, "committed", moved)


def _edge_of_a_stall_reversed(patch: pytest.MonkeyPatch) -> None:
    def may_break(stalls: Stalls, job: Job, blocker: WorkerSeen) -> bool:
        return blocker.job is stalls._state.head and job is not blocker.job

    patch.setattr(Stalls, "may_break", may_break)


def _end_of_a_large_one_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "ended", lambda *_: None)


def _barrier_ignored(patch: pytest.MonkeyPatch) -> None:
    def without(earlier: Batch, later: Batch) -> list[Overlap]:
        return [one for one in overlaps(earlier, later) if one.wait.kind is not WaitKind.BARRIER]

    patch.setattr(scheduler, "overlaps", without)


def _all_workers_follow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "may_follow", property(lambda _: True))


def _news_of_a_commit_forgotten(patch: pytest.MonkeyPatch) -> None:
    committed = Flight.committed

    def without(flight: Flight, job: Job, now_s: float) -> list[Effect]:
        return [one for one in committed(flight, job, now_s) if not isinstance(one, News)]

    patch.setattr(Flight, "committed", without)


def _follower_given_out_again(patch: pytest.MonkeyPatch) -> None:
    submit = Flight.submit

    def twice(flight: Flight, job: Job, now_s: float) -> list[Effect]:
        effects = submit(flight, job, now_s)
        flight._assigned.discard(job.batch.seq)
        return effects

    patch.setattr(Flight, "submit", twice)


def _given_back_without_its_waits(patch: pytest.MonkeyPatch) -> None:
    give_back = Scheduler.give_back

    def at_once(order: Scheduler, batch: Batch) -> bool:
        give_back(order, batch)
        order._open[batch.seq].waits.clear()
        return True

    patch.setattr(Scheduler, "give_back", at_once)


def _pause_cut_short(patch: pytest.MonkeyPatch) -> None:
    """Each commit wakes a head that is parked until a repair."""
    committed = Flight.committed

    def woken(flight: Flight, job: Job, now_s: float) -> list[Effect]:
        effects, head = committed(flight, job, now_s), flight.state.head
        return effects if head is None else effects + flight.unpark(head.batch.seq)

    patch.setattr(Flight, "committed", woken)


def _lease_ignored(patch: pytest.MonkeyPatch) -> None:
    """The next daemon reads the state while sessions of this one may still commit (trap T-14)."""
    fence, begin = core.Schedule._fence, core.Schedule._begin
    late: list[str] = []

    def begun(schedule: core.Schedule) -> None:
        old = schedule.applying if late else None
        begin(schedule)
        if old is not None:
            schedule.applying, new = old, schedule.applying
            fence(schedule, late.pop())
            schedule.applying = new

    patch.setattr(core.Schedule, "_fence", lambda _, why: late.append(why))
    patch.setattr(core.Schedule, "_begin", begun)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        _turn_given_early,
        _release_forgotten,
        _parked_forgotten,
        _late_key_dropped,
        _watermark_not_written,
        _answer_lost,
        _give_way_ignored,
        _asked_to_give_way_at_its_commit,
        _watermark_too_high,
        _has_passed_too_early,
        _keys_of_a_parked_batch_lost,
        _durable_before_the_flush,
        _edge_of_a_stall_reversed,
        _end_of_a_large_one_forgotten,
        _barrier_ignored,
        _all_workers_follow,
        _news_of_a_commit_forgotten,
        _follower_given_out_again,
        _given_back_without_its_waits,
        _pause_cut_short,
        _lease_ignored,
    ],
)
def test_a_broken_engine_is_caught(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Order, dependencies, exactly once, what a crash takes, what waits for ever, what is held: one of them fails."""
    mutant(monkeypatch)
    with pytest.raises(Violation):
        _play_all()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [_turn_given_early, _late_key_dropped, _barrier_ignored, _give_way_ignored])
def test_models_catch_a_broken_engine(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Rows in a wrong order, a lock that is never released, a reader who sees no state of the source: one shows it."""
    mutant(monkeypatch)
    with pytest.raises(Violation):
        _play_all("models")


def _turn_of_a_range_ignored(patch: pytest.MonkeyPatch) -> None:
    def at_once(order: RangeOrder, number: int, frames: list[bytes], n_bytes: int) -> None:
        if order.wants(number):
            order._held_bytes += n_bytes
            order._ready.append((frames, n_bytes))

    patch.setattr(RangeOrder, "add", at_once)


def _reason_for_the_stream_ignored(patch: pytest.MonkeyPatch) -> None:
    end = RangeOrder.end
    patch.setattr(RangeOrder, "end", lambda order, number, lsn, _: end(order, number, lsn, ""))


def _range_in_turn_waits_for_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RangeOrder, "may_read", lambda order, _: order._held_bytes < order._limit_bytes // 2)


def _slot_moved_to_what_is_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RangeFront, "move_lsn", lambda front, _: front.lsn)


def _copy_left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RangeFront, "is_ahead_of", lambda *_: False)


def _stream_begins_after_the_range(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RangeFront, "end_inside", lambda _, asked, __: RangesEnd(asked.end_lsn, IN_PROGRESS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        _turn_of_a_range_ignored,
        _reason_for_the_stream_ignored,
        _range_in_turn_waits_for_room,
        _slot_moved_to_what_is_asked,
        _copy_left_behind,
        _stream_begins_after_the_range,
    ],
)
def test_broken_readers_are_caught(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """A gap, a repetition, readers that all wait, or a slot that moves past what is durable: one of them shows it."""
    mutant(monkeypatch)
    with pytest.raises(Violation):
        _play_all("readers")


def _play_all(name: str = "core") -> None:
    for seed in _SEEDS:
        KINDS[name].of(seed).run()
