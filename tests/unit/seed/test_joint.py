"""Where a copy joins: behind the last record that it shares with the publisher, whatever both became since."""

from __future__ import annotations

import pytest

from parapply.errors import ParapplyError, SlotLost, TargetRefused
from parapply.seed.joint import CopiedServer, Joint, joint


@pytest.mark.parametrize(
    ("copy", "source", "wanted"),
    [
        pytest.param((2, {1: 50}), (1, {}), Joint(1, 50), id="promoted"),
        pytest.param((3, {1: 50, 2: 70}), (1, {}), Joint(1, 50), id="promoted twice"),
        pytest.param((3, {1: 50, 2: 70}), (2, {1: 50}), Joint(2, 70), id="after the publisher's failover"),
        pytest.param(
            (2, {1: 50}), (2, {1: 90}), Joint(1, 50), id="the publisher's failover came later, with the number"
        ),
        pytest.param((3, {1: 50}), (2, {1: 50}), Joint(1, 50), id="both left the first at one place"),
        pytest.param((2, {1: 50}), (4, {1: 60, 3: 80}), Joint(1, 50), id="several failovers"),
    ],
)
def test_a_copy_joins_where_its_timelines_leave_the_publishers(
    copy: tuple[int, dict[int, int]], source: tuple[int, dict[int, int]], wanted: Joint
) -> None:
    """The place is the earliest one at which the two differ."""
    assert joint(CopiedServer("1", *copy), *source) == wanted


@pytest.mark.parametrize(
    ("copy", "source", "error"),
    [
        pytest.param((1, {}), (1, {}), TargetRefused, id="started as the files lay"),
        pytest.param((2, {1: 50}), (2, {1: 50}), TargetRefused, id="the same after the publisher's failover"),
        pytest.param((2, {1: 90}), (2, {1: 50}), SlotLost, id="beyond the publisher's failover"),
        pytest.param((1, {}), (2, {1: 50}), SlotLost, id="the publisher's timeline, which the publisher left"),
        pytest.param((3, {2: 50}), (1, {}), TargetRefused, id="none in common"),
    ],
)
def test_a_copy_without_such_a_place_is_refused(
    copy: tuple[int, dict[int, int]], source: tuple[int, dict[int, int]], error: type[ParapplyError]
) -> None:
    """Nothing is guessed: the message names the reason, and the hint how to make a copy that joins."""
    with pytest.raises(error, match="timeline") as refused:
        joint(CopiedServer("1", *copy), *source)
    assert refused.type is error
    assert "make the copy again" in refused.value.hint
