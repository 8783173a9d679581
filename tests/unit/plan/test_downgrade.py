"""A table whose batches keep failing is serial for a while, then tried again."""

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


def _fail_until_changed(trust: Downgrades, limit: int = 100) -> int:
    for number in range(1, limit):
        if trust.failed():
            return number
    raise AssertionError("failures do not matter")


def test_rare_failures_do_not_matter() -> None:
    """A batch in a hundred costs less than to lose the parallelism."""
    trust = Downgrades()
    for _ in range(50):
        assert not trust.failed()
        for _ in range(99):
            assert not trust.applied()
    assert trust.level is Level.TRUSTED
    assert trust.retries == 50


def test_a_table_that_keeps_failing_loses_company_first_and_the_set_form_then() -> None:
    """Each step needs failures of its own, and after the last one more failures change nothing."""
    trust = Downgrades()
    assert _fail_until_changed(trust) == 4
    levels = [trust.level]
    assert _fail_until_changed(trust) == 4
    levels.append(trust.level)
    assert not any(trust.failed() for _ in range(20))
    assert [*levels, trust.level] == [Level.ALONE, Level.IN_ORDER, Level.IN_ORDER]


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


@given(st.lists(st.booleans(), max_size=600))
def test_the_level_says_what_changed(steps: list[bool]) -> None:
    """What is returned tells of every change, and the level goes up by failures, down by time only."""
    trust = Downgrades()
    for is_failure in steps:
        before = trust.level
        has_changed = trust.failed() if is_failure else trust.applied()
        assert has_changed is (trust.level is not before)
        if has_changed:
            assert trust.level == (before + 1 if is_failure else Level.TRUSTED)
    assert trust.retries == sum(steps)
