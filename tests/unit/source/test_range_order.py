"""Ranges that several sessions read at once are handed on in order, each once, within the limit, and none waits."""

from __future__ import annotations

import random

import pytest

from parapply.source.range_order import RangeOrder, RangesEnd
from parapply.wire.copy import Keepalive

_LIMIT_BYTES = 40
_PART_BYTES = 5


def _end(lsn: int) -> Keepalive:
    return Keepalive(end_lsn=lsn, send_time_us=0, reply_requested=False)


def _play(chooser: random.Random, readers: int, lengths: list[int], last: int) -> list[bytes | int]:
    """Have readers read ranges in any order, `last` being the first one with a reason; return what was handed on."""
    order = RangeOrder(_LIMIT_BYTES)
    left: dict[int, int] = {}
    found: list[bytes | int] = []
    held_bytes = 0
    while order.outcome is None or order.holds:
        # The first frames come in any case, and only then a reader waits for room.
        moves = [number for number in left if left[number] == lengths[number] or order.may_read(number)]
        may_begin = len(left) < readers and order.n_begun < len(lengths) and not order.is_ending
        assert moves or may_begin or order.holds, "every reader waits, and so does intake"
        choice = chooser.choice([*moves, *(["begin"] if may_begin else []), *(["take"] if order.holds else [])])
        if choice == "begin":
            number = order.begin()
            left[number] = lengths[number]
        elif choice == "take":
            frames, end = order.take(chooser.choice([1, 12, 1000]))
            held_bytes -= _PART_BYTES * len(frames)
            found += frames
            if end is not None:
                found.append(end.end_lsn)
        else:
            assert isinstance(choice, int)
            if left[choice]:
                order.add(choice, [b"%d.%d" % (choice, left[choice])], _PART_BYTES)
                held_bytes += _PART_BYTES * order.wants(choice)
                left[choice] -= 1
                assert order.is_ending or held_bytes <= _LIMIT_BYTES + _PART_BYTES * readers
            else:
                del left[choice]
                order.end(choice, choice, "no more" if choice >= last else "")
    assert order.outcome == RangesEnd(last, "no more")
    return found


@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_any_interleaving_gives_one_order(readers: int) -> None:
    """In any order of reading: all of a range, its end, and then the next, up to the first one with a reason."""
    for seed in range(200):
        chooser = random.Random(seed)
        lengths = [chooser.choice([0, 1, 3, 20]) for _ in range(12)]
        last = chooser.randrange(12)
        wanted: list[bytes | int] = []
        for number in range(last + 1):
            wanted += [b"%d.%d" % (number, part) for part in range(lengths[number], 0, -1)]
            wanted.append(number)
        assert _play(chooser, readers, lengths, last) == wanted


def test_what_comes_early_leaves_room_for_the_range_in_turn() -> None:
    """Later ranges hold half of the limit together; the range in turn may have all that is left."""
    order = RangeOrder(_LIMIT_BYTES)
    first, second, third = (order.begin() for _ in range(3))
    order.add(second, [b"b"], 10)
    order.add(third, [b"c"], 10)
    assert not order.may_read(second)
    assert not order.may_read(third)
    assert order.may_read(first)
    order.add(first, [b"a"], 20)
    assert not order.may_read(first)
    assert order.take(1) == ([b"a"], None)
    assert order.may_read(first)
    assert not order.may_read(second)
    # Rows may be larger than the limit: what is early never stops what comes before it.
    order.add(second, [b"B"], 1000)
    assert order.may_read(first)
    order.end(first, 7, "")
    assert [order.take(2000), order.take(2000)] == [([], _end(7)), ([b"b", b"B"], None)]
    assert order.may_read(second)


def test_a_range_behind_the_last_is_forgotten() -> None:
    """A transaction in progress in an earlier range: nothing of a later one is kept, nor holds its reader up."""
    order = RangeOrder(_LIMIT_BYTES)
    first, second, third = (order.begin() for _ in range(3))
    order.add(third, [b"c"], 20)
    order.end(third, 9, "caught up")
    order.end(second, 8, "in progress")
    assert order.outcome is None
    assert not order.wants(third)
    assert order.may_read(third)
    order.add(third, [b"c"], 1000)
    assert order.may_read(first)
    order.end(first, 7, "")
    assert order.outcome == RangesEnd(8, "in progress")
    assert [one for _, one in (order.take(1), order.take(1))] == [_end(7), _end(8)]


def test_the_end_of_a_range_is_not_taken_back() -> None:
    """The next one may be empty and end before: inside the record, perhaps of a commit, with which this one ended."""
    order = RangeOrder(_LIMIT_BYTES)
    for lsn, reason in ((9, ""), (8, "caught up")):
        order.end(order.begin(), lsn, reason)
    assert order.outcome == RangesEnd(9, "caught up")
    assert [one for _, one in (order.take(1), order.take(1))] == [_end(9), _end(9)]
