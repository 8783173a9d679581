"""The throttle by a clock of the test's: the rate is bounded from above, whatever comes, and what it costs is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parapply.engine.intake import Throttle


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


_BATCHES = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 400)), min_size=1, max_size=40)


@given(st.integers(1, 100_000), _BATCHES)
def test_no_time_has_more_than_the_rate_and_one_batch(changes_per_s: int, batches: list[tuple[float, int]]) -> None:
    """Between any two moments no more is taken than the rate times their distance, and the last batch."""
    clock = _Clock()
    throttle = Throttle(changes_per_s, clock)
    taken: list[tuple[float, int]] = []
    for quiet_s, n_changes in batches:
        clock.now_s += quiet_s
        clock.now_s += throttle.left_s
        # Floating point may leave less than it can show.
        assert throttle.left_s < 1e-6
        taken.append((clock.now_s, n_changes))
        throttle.take(n_changes)
    for first, (begin_s, _) in enumerate(taken):
        for last in range(first, len(taken)):
            end_s, n_last = taken[last]
            total = sum(n for _, n in taken[first : last + 1])
            assert total <= (end_s - begin_s) * changes_per_s * (1 + 1e-9) + n_last + 1e-3


def test_a_quiet_time_saves_nothing_up() -> None:
    """After an hour without changes the next batch is followed by as long a pause as any."""
    clock = _Clock()
    throttle = Throttle(100, clock)
    clock.now_s += 3600
    assert throttle.left_s == 0
    throttle.take(50)
    assert throttle.left_s == 0.5
    throttle.take(50)
    assert throttle.left_s == 1.0
    assert throttle.batch_changes == 25
    assert Throttle(1, clock).batch_changes == 1


def test_the_time_that_it_takes_is_counted_once() -> None:
    """From the first hold to the end of it, however often it is noted, also while it lasts."""
    clock = _Clock()
    throttle = Throttle(100, clock)
    throttle.go_on()
    throttle.hold()
    clock.now_s += 1
    throttle.hold()
    clock.now_s += 1
    assert throttle.held_s == 2
    throttle.go_on()
    throttle.go_on()
    clock.now_s += 5
    assert throttle.held_s == 2
