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


def test_an_error_counts_by_how_far_a_setting_is() -> None:
    """Of smaller batches in part, up to the trial's; of the other order as a whole, and both together."""
    errors = Errors(_USUAL)
    assert errors.factor(Change(batch_transactions=500, order="relaxed")) == 1.0
    errors = errors.learn(Change(batch_transactions=125), 0.81).learn(_RELAXED, 1.2)
    assert errors.factor(Change(workers=8, batch_transactions=5000, order="preserve")) == 1.0
    half = Change(batch_transactions=500)
    assert errors.factor(half) == pytest.approx(0.9)
    assert errors.factor(Change(batch_transactions=10)) == pytest.approx(0.81)
    assert errors.factor(Change(batch_transactions=500, order="relaxed")) == pytest.approx(1.08)
    assert [errors.unknown(Change(batch_transactions=size)) for size in (4000, 1000, 500, 250, 125)] == [0, 1, 2, 1, 0]
    assert errors.learn(_RELAXED, 9.0).factor(_RELAXED) == 2.0
