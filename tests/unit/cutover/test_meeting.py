"""Cut-overs of several databases wait for each other: all pass a place, or none."""

from __future__ import annotations

import asyncio

import pytest

from parapply.cutover.meeting import PLACES, Meeting
from parapply.errors import ParapplyError
from parapply.vocabulary import CutoverStep


async def test_a_single_one_waits_for_none() -> None:
    """It passes each place, and is taken back whatever it has passed."""
    meeting = Meeting()
    for step in PLACES:
        await meeting.reach(step, "a")
    assert (meeting.is_shared, meeting.open_database) == (False, "")


async def test_all_pass_when_the_last_has_come() -> None:
    """No one passes before; behind the last place none is taken back any more."""
    meeting = Meeting(["a", "b"])
    first = asyncio.create_task(meeting.reach(CutoverStep.FENCING, "a"), name="first")
    await asyncio.sleep(0)
    assert not first.done()
    await meeting.reach(CutoverStep.FENCING, "b")
    await first
    assert meeting.open_database == ""
    await asyncio.gather(*(meeting.reach(CutoverStep.OPENING, name) for name in ("a", "b")))
    assert meeting.open_database


async def test_a_failure_fails_all_that_have_not_passed() -> None:
    """Those that wait and those that come later; those behind a place that all had passed go on."""
    meeting = Meeting(["a", "b", "c"])
    await asyncio.gather(*(meeting.reach(CutoverStep.FENCING, name) for name in "abc"))
    waiting = asyncio.create_task(meeting.reach(CutoverStep.STOPPING, "a"), name="waiting")
    await asyncio.sleep(0)
    meeting.fail("b")
    with pytest.raises(ParapplyError, match="because 'b' is not"):
        await waiting
    with pytest.raises(ParapplyError, match="because 'b' is not"):
        await meeting.reach(CutoverStep.STOPPING, "c")
    await meeting.reach(CutoverStep.FENCING, "c")


async def test_one_that_was_opened_before_is_not_waited_for() -> None:
    """The others pass without it, and are not taken back."""
    meeting = Meeting(["a", "b"])
    meeting.has_opened("a")
    await asyncio.gather(*(meeting.reach(CutoverStep.PREPARING, name) for name in "ab"))
    meeting.leave()
    await meeting.reach(CutoverStep.FENCING, "b")
    assert meeting.open_database == "a"
