"""Verdict of a slot's state on a transaction that comes again."""

from __future__ import annotations

import time

from parapply.target.state.slots import SlotState, apart

#: Of processor time; to walk all ranges for each transaction takes many times as long.
_LIMIT_S = 2.0
_N_RANGES = 20_000


def test_many_ranges_are_searched_and_not_walked() -> None:
    """A transaction that was stuck for hours in relaxed order leaves as many; each that comes again is looked for."""
    ranges = [(at, at + 2) for at in range(4, 4 * _N_RANGES, 4)]
    state = SlotState(
        slot_id=1, slot_name="s", system_identifier="1", timeline=1, begin_lsn=0, low_lsn=0,
        ranges=apart(ranges),
        members=frozenset(),
    )  # fmt: skip
    began_s = time.process_time()
    found = [end_lsn for end_lsn in range(1, 4 * _N_RANGES) if state.is_applied(end_lsn)]
    assert time.process_time() - began_s < _LIMIT_S
    assert found == [end_lsn for first, _ in ranges for end_lsn in range(first, first + 3)]


def test_ranges_that_overlap_are_one() -> None:
    """A batch that was applied again may enclose what had been applied, or continue it."""
    assert apart([(50, 60), (10, 20), (12, 14), (20, 30), (31, 40)]) == ((10, 30), (31, 40), (50, 60))
