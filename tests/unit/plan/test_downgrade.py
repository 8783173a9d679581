"""A table whose batches keep failing is applied otherwise for a while, then as planned again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parapply.plan.downgrade import Downgrades, Level


def _apply_until_changed(trust: Downgrades, limit: int = 100_000) -> int:
    """Return after how many applied batches the level changes."""
    for number in range(1, limit):
        if trust.applied():
            return number
    raise AssertionError("never tried again")


def _fail_until_changed(trust: Downgrades, level: Level = Level.ALONE, limit: int = 100) -> int:
    for number in range(1, limit):
        if trust.failed(level):
            return number
    raise AssertionError("failures do not matter")


def test_rare_failures_do_not_matter() -> None:
    """A batch in a hundred costs less than to lose the parallelism."""
    trust = Downgrades()
    for _ in range(50):
        assert not trust.failed(Level.ALONE)
        for _ in range(99):
            assert not trust.applied()
    assert trust.level is Level.TRUSTED


def test_a_table_loses_what_its_batches_would_have_done_better_without() -> None:
    """A table that overtook others goes alone and stays a set; only one that needs source order is applied in it."""
    trust = Downgrades()
    assert _fail_until_changed(trust) == 4
    levels = [trust.level]
    assert not any(trust.failed(Level.ALONE) for _ in range(20))
    levels.append(trust.level)
    assert _fail_until_changed(trust, Level.IN_ORDER) == 4
    assert not any(trust.failed(Level.IN_ORDER) for _ in range(20))
    assert [*levels, trust.level] == [Level.ALONE, Level.ALONE, Level.IN_ORDER]


def test_it_is_tried_again_and_a_relapse_takes_longer() -> None:
    """The wait doubles with each relapse, up to a limit, and ends in full trust."""
    trust = Downgrades()
    waits = []
    for _ in range(10):
        _fail_until_changed(trust)
        waits.append(_apply_until_changed(trust))
        assert trust.level is Level.TRUSTED
    assert waits[:3] == [256, 512, 1024]
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == 16_384


def test_a_table_that_stayed_trusted_for_as_long_begins_anew() -> None:
    """A relapse that comes later than the distrust before had lasted waits no longer than the first."""
    trust = Downgrades()
    waits = []
    for n_trusted in (0, 512, 255, 0):
        _fail_until_changed(trust)
        waits.append(_apply_until_changed(trust))
        assert not any(trust.applied() for _ in range(n_trusted))
    assert waits == [256, 512, 256, 512]


@given(st.lists(st.sampled_from([None, Level.ALONE, Level.IN_ORDER]), max_size=600))
def test_the_level_says_what_changed(steps: list[Level | None]) -> None:
    """The result reports every change, and the level goes up by failures, down by time only."""
    trust = Downgrades()
    for wanted in steps:
        before = trust.level
        has_changed = trust.applied() if wanted is None else trust.failed(wanted)
        assert has_changed is (trust.level is not before)
        if has_changed:
            assert trust.level == (Level.TRUSTED if wanted is None else wanted)
            assert wanted is None or wanted > before
