"""When the leader counts as stuck: a part that does not move and waits for nobody, for longer than is patient."""

from __future__ import annotations

from parapply.runtime.pulse import Pulse, Sign

_PATIENCE_S = 10.0


def _stuck_after(pulse: Pulse, *looks: tuple[float, object, str]) -> str:
    """Look at one part at some times, each with what has moved and what it waits for; say what is stuck at the last."""
    for at_s, moved, waits_for in looks:
        pulse.look([Sign("intake", moved, waits_for)], at_s)
    return pulse.stuck(_PATIENCE_S, looks[-1][0])


def test_a_part_that_moves_lives() -> None:
    """However seldom it moves within its patience; and it counts from the last move on."""
    assert _stuck_after(Pulse(), (0, 1, ""), (9, 2, ""), (18, 3, ""), (27, 3, "")) == ""


def test_a_part_that_stands_still_is_stuck() -> None:
    """One that waits for nobody and shows the same for longer than the patience; moving once, it lives again."""
    pulse = Pulse()
    assert _stuck_after(pulse, (0, 1, ""), (5, 1, ""), (11, 1, "")) == "intake"
    assert _stuck_after(pulse, (12, 2, "")) == ""


def test_who_waits_for_others_is_not_stuck() -> None:
    """A foreign lock may last for hours; the time counts from when the waiting ended."""
    pulse = Pulse()
    assert _stuck_after(pulse, (0, 1, "the target"), (5000, 1, "the target"), (5005, 1, "")) == ""
    assert _stuck_after(pulse, (5016, 1, "")) == "intake"


def test_each_part_counts_for_itself() -> None:
    """One busy part does not hide one that stands still."""
    pulse = Pulse()
    for at_s in range(0, 20, 2):
        pulse.look([Sign("intake", 1, ""), Sign("progress", at_s, "")], at_s)
    assert pulse.stuck(_PATIENCE_S, 18) == "intake"


def test_a_pause_of_the_process_is_nobodys_fault() -> None:
    """After the process stood still, all parts begin anew."""
    pulse = Pulse()
    pulse.look([Sign("intake", 1, "")], 0)
    pulse.forget()
    assert _stuck_after(pulse, (3600, 1, "")) == ""
