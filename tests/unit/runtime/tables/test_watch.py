"""How often the target's catalogue is looked at."""

from __future__ import annotations

import pytest

from parapply.runtime.tables.watch import pause_s


@pytest.mark.parametrize(
    ("took_s", "expected_s", "quiet_s"),
    [(0.001, 5.0, 5.0), (0.05, 5.0, 50.0), (0.3, 30.0, 300.0), (9.0, 100.0, 600.0)],
    ids=["few", "some", "many", "busy"],
)
def test_checks_take_a_hundredth_of_the_time_but_do_not_stay_away(
    took_s: float, expected_s: float, quiet_s: float
) -> None:
    """With thousands of tables they are further apart; one that met a busy target says little about the next.

    Where the target has counted no change of its catalogue, they are ten times as far apart.
    """
    assert pause_s(5.0, took_s) == pytest.approx(expected_s)
    assert pause_s(5.0, took_s, is_quiet=True) == pytest.approx(quiet_s)
