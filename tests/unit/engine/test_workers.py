"""The number of workers finds itself: simulated targets, each with the number of workers that suits it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parapply.engine.shares import Share
from parapply.engine.workers import LoadSample, Scaling, Step

LOOK_S = 0.1
FEWEST, FIRST, MOST = 2, 4, 16
#: Changes a second by the number of workers.
Speed = Callable[[int], float]


def disk(n_workers: int) -> float:
    """Apply in proportion to the workers: each waits for reads of its own."""
    return 1_000.0 * n_workers


def processors(n_cores: int) -> Speed:
    """Return a target that is as fast as its processors, and a little slower with more workers."""
    return lambda n_workers: 10_000.0 * min(n_workers, n_cores) * (1 - 0.005 * max(0, n_workers - n_cores))


class Target:
    """A target with a rule, and a clock of its own."""

    def __init__(self, speed: Speed, *, waiting: float | None, first: int = FIRST) -> None:
        self.speed = speed
        self.waiting = waiting
        self.share = Share(least_workers=FEWEST, first_workers=first, most_workers=MOST, memory_bytes=0)
        self.scaling = Scaling(self.share)
        self.n_workers = first
        self.now_s = 100.0
        self.n_changes = 0.0
        self.steps: list[Step] = []
        #: Seconds with each number of workers.
        self.spent_s: dict[int, float] = {}

    def run(self, seconds: float, *, is_pressed: bool = True, n_busy: int | None = None) -> None:
        """Let time pass, with or without a backlog."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            self.n_changes += self.speed(self.n_workers) * LOOK_S * is_pressed
            self.spent_s[self.n_workers] = self.spent_s.get(self.n_workers, 0.0) + LOOK_S
            step = self.scaling.look(self.sample(is_pressed=is_pressed, n_busy=n_busy))
            if step is not None:
                self.steps.append(step)
                self.n_workers = step.n_workers
            assert FEWEST <= self.n_workers <= MOST

    def sample(self, *, is_pressed: bool, n_busy: int | None = None) -> LoadSample:
        """Return what is seen now."""
        return LoadSample(
            now_s=self.now_s, n_workers=self.n_workers, n_busy=self.n_workers if n_busy is None else n_busy,
            is_pressed=is_pressed, waiting=self.waiting if is_pressed and self.scaling.may_grow() else None,
            n_batches=int(self.n_changes / 100), n_changes=int(self.n_changes),
        )  # fmt: skip


def test_a_target_that_waits_for_its_disk_has_the_most_within_a_second() -> None:
    """Sessions that wait take no processor, so the number is doubled without a trial until there are no more."""
    target = Target(disk, waiting=0.9)
    target.run(1.0)
    assert [step.n_workers for step in target.steps] == [8, 16]
    assert {step.reason for step in target.steps} == {"the target waits for its disk"}


def test_one_sample_that_waits_is_no_disk() -> None:
    """A single sample in which most sessions wait grows nothing, and neither do samples with fewer than half."""
    target = Target(processors(2), waiting=0.9)
    target.run(LOOK_S)
    target.waiting = 0.4
    target.run(0.9)
    assert target.steps == []


@pytest.mark.parametrize(("n_cores", "found"), [(1, {2, 4}), (2, {2, 4}), (8, {8, 16}), (64, {16})])
def test_a_target_in_memory_is_left_at_what_its_processors_take(n_cores: int, found: set[int]) -> None:
    """Of ten minutes of backlog, nine tenths are spent where the target is within a tenth of its best."""
    target = Target(processors(n_cores), waiting=0.0)
    target.run(600)
    best = max(target.speed(n) for n in range(FEWEST, MOST + 1))
    assert sum(s for n, s in target.spent_s.items() if target.speed(n) >= 0.9 * best) >= 0.9 * 600
    assert target.n_changes >= 0.9 * best * 600
    assert target.scaling.wanted in found


def test_the_first_trial_comes_soon_and_costs_little() -> None:
    """In four seconds of backlog that eight workers do not apply faster, less than half are spent with eight."""
    target = Target(processors(2), waiting=0.0)
    target.run(4.0)
    assert [step.n_workers for step in target.steps] == [8, 4]
    assert "changes/s with 8" in target.steps[-1].reason
    assert target.spent_s[8] < 2.0


def test_trials_that_fail_become_rare() -> None:
    """Each pause is twice the last, up to ten minutes: an hour of the same backlog has a dozen trials at most."""
    target = Target(processors(4), waiting=0.0)
    target.run(3600)
    assert sum("a trial" in step.reason for step in target.steps) <= 12


def test_a_disk_that_is_saturated_has_fewer_workers_again() -> None:
    """Growing for waits is judged later: half of the workers stay if they apply as much."""
    target = Target(lambda n_workers: 1_000.0 * min(n_workers, 6), waiting=0.9)
    target.run(1.0)
    assert target.n_workers == 16
    target.waiting = 0.0  # not asked with the most; with eight it may be answered either way
    target.run(120)
    assert target.n_workers == 8


def test_workers_that_nothing_needs_leave_after_a_minute() -> None:
    """Without a backlog the number falls to the most that worked at once in a minute, or to what it began with."""
    target = Target(disk, waiting=0.9)
    target.run(1.0)
    target.run(60.0, is_pressed=False, n_busy=0)
    assert target.n_workers == 16, "all of them were needed in the first minute"
    target.run(60.0, is_pressed=False, n_busy=5)
    assert target.n_workers == 5
    target.run(600.0, is_pressed=False, n_busy=0)
    assert target.n_workers == FIRST


def test_a_backlog_that_ends_ends_the_trial() -> None:
    """Without backlog nothing can be judged: the number from before the trial comes back."""
    target = Target(processors(2), waiting=0.0)
    while not target.steps:
        target.run(LOOK_S)
    assert target.n_workers == 8
    target.run(20.0, is_pressed=False, n_busy=1)
    assert target.n_workers == 4
    assert target.steps[-1].reason == "the backlog ended during a trial"


def test_what_cannot_be_had_is_not_asked_for_at_once() -> None:
    """Where no more sessions can be opened the number there is becomes the wanted one, and no trial follows soon."""
    target = Target(disk, waiting=0.0)
    while not target.steps:
        target.run(LOOK_S)
    target.n_workers = 5
    target.scaling.stay(target.sample(is_pressed=True))
    assert target.scaling.wanted == 5
    n_steps = len(target.steps)
    target.run(25.0)
    assert len(target.steps) == n_steps


def test_as_many_as_there_may_be() -> None:
    """With the fewest as the most there is nothing to find."""
    scaling = Scaling(Share(least_workers=FEWEST, first_workers=FEWEST, most_workers=FEWEST, memory_bytes=0))
    for at in range(3000):
        sample = LoadSample(at * LOOK_S, FEWEST, FEWEST, is_pressed=True, waiting=1.0, n_batches=at, n_changes=at)
        assert scaling.look(sample) is None


def test_a_share_that_shrinks_takes_workers_away_at_once_and_gives_them_back_by_the_rule() -> None:
    """Also in the middle of a trial, whose end then asks for no more than the share has."""
    target = Target(processors(16), waiting=None)
    target.run(20.0)
    assert target.n_workers == MOST
    target.share.most_workers = 3
    target.run(LOOK_S)
    assert (target.n_workers, target.steps[-1].reason) == (3, "its share of the fleet's connections")
    target.run(120.0)
    assert max([step.n_workers for step in target.steps[-3:]]) <= 3
    target.share.most_workers = MOST
    target.run(700.0)
    assert target.n_workers > 3
