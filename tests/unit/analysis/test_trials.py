"""Errors of predictions, as short runs show them."""

from __future__ import annotations

import pytest

from parapply.analysis.changes import Change
from parapply.analysis.trials import Errors, Usual, trials

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


def test_an_error_counts_as_often_as_there_are_batches() -> None:
    """Of smaller batches by their number, up to the trial's; of the other order it is a factor; and both together."""
    errors, half = Errors(_USUAL), Change(batch_transactions=500)
    assert errors.right(12.0, Change(batch_transactions=500, order="relaxed"), 10.0) == 12.0
    # Sixteen times the batches took 1.25 times as long instead of twice.
    errors = errors.learn(Change(batch_transactions=125), 1.25, 2.0).learn(_RELAXED, 1.2, 1.0)
    assert errors.right(12.0, Change(workers=8, batch_transactions=5000, order="preserve"), 10.0) == 12.0
    assert errors.right(12.0, half, 10.0) == pytest.approx(12.0 - 10.0 * 0.75 / 15 * 3)
    assert errors.right(20.0, Change(batch_transactions=10), 10.0) == pytest.approx(12.5)
    assert errors.right(12.0, Change(batch_transactions=500, order="relaxed"), 10.0) == pytest.approx(1.2 * 10.5)
    assert errors.right(10.0, Change(batch_transactions=125), 10.0) == pytest.approx(5.0)
    assert [errors.unknown(Change(batch_transactions=size)) for size in (4000, 1000, 500, 250, 125)] == [0, 1, 2, 1, 0]
    assert errors.learn(_RELAXED, 9.0, 1.0).right(1.0, _RELAXED, 1.0) == 2.0
    assert errors.learn(Change(batch_transactions=4000), 9.0, 1.0) == errors
