"""A pause of reading costs at most what it gathers, whatever the kernel's buffer holds."""

from __future__ import annotations

from parapply.runtime.intake.gathering import Gathering

_WANTED_S = 0.004


def test_a_pause_that_gathers_stays() -> None:
    """A buffer that is not full at its half: as long as wanted, again and again."""
    gathering = Gathering()
    for _ in range(1000):
        assert gathering.pause_s(_WANTED_S) == _WANTED_S
        gathering.paused(_WANTED_S, has_grown=True)


def test_a_pause_that_gathers_nothing_is_left_out() -> None:
    """Full before its half, it is halved, and then left out but for a short one now and then."""
    gathering = Gathering()
    pauses = []
    for _ in range(1000):
        pauses.append(gathering.pause_s(_WANTED_S))
        if pauses[-1]:
            gathering.paused(pauses[-1], has_grown=False)
    assert pauses[:3] == [_WANTED_S, _WANTED_S / 2, 0]
    # At most a hundredth of the reads.
    assert 0 < sum(pause > 0 for pause in pauses[3:]) < 10


def test_it_comes_back_when_it_gathers_again() -> None:
    """A short one that gathers is followed by a whole one: the next messages may be smaller."""
    gathering = Gathering()
    for _ in range(2):
        gathering.paused(gathering.pause_s(_WANTED_S), has_grown=False)
    while not (pause_s := gathering.pause_s(_WANTED_S)):
        pass
    gathering.paused(pause_s, has_grown=True)
    assert gathering.pause_s(_WANTED_S) == _WANTED_S


def test_a_pause_too_short_to_judge_stays() -> None:
    """Without a backlog it is a millisecond, of which no half can be timed."""
    gathering = Gathering()
    for _ in range(2):
        gathering.paused(gathering.pause_s(_WANTED_S), has_grown=False)
    gathering.paused(0.001, has_grown=False)
    assert gathering.pause_s(0.001) == 0.001
