"""Signs that the leader is stuck: a part that neither moves nor waits for anything, for longer than the patience."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from parapply.engine.state import EngineState
from parapply.runtime.observe.health import Health, Heartbeat, Watchdog
from parapply.runtime.observe.systemd import Notifier
from parapply.vocabulary import DaemonState

_PATIENCE_S = 10.0


def _stuck_after(watchdog: Watchdog, *looks: tuple[float, object, str]) -> str:
    """Look at one part at some times, each with what has moved and what it waits for; say what is stuck at the last."""
    for at_s, moved, waits_for in looks:
        watchdog.look([Heartbeat("intake", moved, waits_for)], at_s)
    return watchdog.stuck(_PATIENCE_S, looks[-1][0])


def test_a_part_that_moves_lives() -> None:
    """However seldom it moves within its patience; and it counts from the last move on."""
    assert _stuck_after(Watchdog(), (0, 1, ""), (9, 2, ""), (18, 3, ""), (27, 3, "")) == ""


def test_a_part_that_stands_still_is_stuck() -> None:
    """A part that waits for nothing and shows the same for longer than the patience; once it moves, it lives again."""
    watchdog = Watchdog()
    assert _stuck_after(watchdog, (0, 1, ""), (5, 1, ""), (11, 1, "")) == "intake"
    assert _stuck_after(watchdog, (12, 2, "")) == ""


def test_who_waits_for_others_is_not_stuck() -> None:
    """A foreign lock may last for hours; the time counts from when the waiting ended."""
    watchdog = Watchdog()
    assert _stuck_after(watchdog, (0, 1, "the target"), (5000, 1, "the target"), (5005, 1, "")) == ""
    assert _stuck_after(watchdog, (5016, 1, "")) == "intake"


def test_each_part_counts_for_itself() -> None:
    """One busy part does not hide one that stands still."""
    watchdog = Watchdog()
    for at_s in range(0, 20, 2):
        watchdog.look([Heartbeat("intake", 1, ""), Heartbeat("progress", at_s, "")], at_s)
    assert watchdog.stuck(_PATIENCE_S, 18) == "intake"


def test_a_pause_of_the_process_is_nobodys_fault() -> None:
    """After the process was paused, all parts begin again."""
    watchdog = Watchdog()
    watchdog.look([Heartbeat("intake", 1, "")], 0)
    watchdog.forget()
    assert _stuck_after(watchdog, (3600, 1, "")) == ""


async def test_an_epoch_that_ends_is_neither_ready_nor_stuck() -> None:
    """Its sessions may take long to close; and the other slots of a fleet live on after a leader that was stuck."""
    parts: Any = SimpleNamespace(engine=EngineState(0, 0.0), workers=[])
    gauges: Any = SimpleNamespace(parts=None, lag=lambda: None, detach=lambda: None)
    health = Health("s", gauges, Notifier({}))
    health.serving(parts)
    assert health.is_ready
    health.stuck = "intake"
    gauges.parts = None
    health.detach()
    assert not health.is_ready
    health.left(DaemonState.STOPPED, "why")
    assert (health.report()["live"], health.report()["state"]) == (True, "stopped")
