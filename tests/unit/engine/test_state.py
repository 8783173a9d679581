"""Display of the engine's state."""

from __future__ import annotations

from parapply.engine.state import EngineState
from parapply.limits import BLOCKED_S


def test_a_wait_is_a_reason_once_it_is_long() -> None:
    """Shorter ones are a number only."""
    state = EngineState(0, 0.0)
    assert (state.blocked_s(9.0), state.blocked_reason(1e9)) == (0.0, "")
    state.blocked = (10.0, "pid 7")
    assert state.blocked_s(12.0) == 2.0
    assert state.blocked_reason(10.0 + BLOCKED_S / 2) == ""
    assert state.blocked_reason(10.0 + BLOCKED_S) == f"blocked for {BLOCKED_S:.0f} s by pid 7"


def test_the_publishers_clock_goes_on_between_two_looks() -> None:
    """Carried on by ours; unknown before the first look."""
    state = EngineState(0, 0.0)
    assert state.source_time_us(1.0) is None
    state.source_clock_us, state.looked_s = 5_000_000, 2.0
    assert state.source_time_us(3.5) == 6_500_000
