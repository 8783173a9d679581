"""Errors of predictions, as short runs show them."""

from __future__ import annotations

import pytest

from parapply.analysis.changes import Change, Errors, Usual, trials

_RELAXED = Change(order="relaxed")
_USUAL = Usual("preserve", (2000.0, 6000.0, 4e6))


def test_trials_are_between_the_log_and_what_is_asked() -> None:
    """Half of the smallest batches, and the other order with a number of workers of its own; else none is needed."""
    asked = [
        Change(workers=8), Change(workers=16, order="relaxed"), Change(batch_transactions=500),
        Change(batch_transactions=300, batch_bytes=1500),
    ]  # fmt: skip
    assert trials(4, "preserve", asked) == [
        Change(batch_transactions=150, batch_bytes=1024), Change(workers=8, order="relaxed")
    ]  # fmt: skip
    assert trials(4, "preserve", [_RELAXED]) == [Change(workers=5, order="relaxed")]
    assert trials(64, "preserve", [_RELAXED]) == [Change(workers=64, order="relaxed")]
    assert trials(4, "preserve", [Change(workers=1, order="relaxed")]) == [Change(workers=2, order="relaxed")]
    assert trials(None, "preserve", [_RELAXED]) == [_RELAXED]
    assert trials(4, "relaxed", [_RELAXED, Change(workers=8), Change(synchronous_commit="on")]) == []


def test_smaller_batches_follow_from_the_trial_and_the_other_order_from_its_error() -> None:
    """A power of the size is the time of batches that are between; the other order's is a factor; and both together."""
    errors, half = Errors(_USUAL), Change(batch_transactions=500)
    assert errors.right(half) == (half, 1.0)
    errors = errors.learn(Change(batch_transactions=125), 1.44, 3.0).learn(_RELAXED, 1.5, 1.25)
    larger = Change(workers=8, batch_transactions=5000, order="preserve")
    assert errors.right(larger) == (larger, 1.0)
    both = Change(workers=8, batch_transactions=500, order="relaxed")
    assert [errors.right(one)[0] for one in (half, both)] == [Change(), Change(workers=8, order="relaxed")]
    assert [errors.right(one)[1] for one in (half, both)] == pytest.approx([1.2, 1.44])
    assert [errors.unknown(Change(batch_transactions=size)) for size in (4000, 1000, 500, 250, 125)] == [0, 1, 2, 1, 0]
    assert errors.learn(_RELAXED, 9.0, 1.0).right(_RELAXED) == (_RELAXED, 2.0)
    assert errors.learn(Change(batch_transactions=4000), 9.0, 1.0).right(half) == (half, 1.0)
