"""Judgement of predictions from a capture."""

from __future__ import annotations

from bench.run_predictions import cells


def test_a_prediction_is_judged_by_the_median_of_the_replays() -> None:
    """The run that was learnt from is none; 15 % either way are good, and the interval is judged apart from that."""
    said = {"seconds": 11.0, "least_s": 8.0, "most_s": 9.5, "limit": "commits"}
    predicted = [
        {"settings": "a", "seconds": 5.0, "predicted": None},
        {"settings": "b", "seconds": 0.0, "predicted": said},
        {"settings": "c", "seconds": 0.0, "predicted": {**said, "seconds": 12.0, "most_s": 13.0}},
    ]
    found = [[{"seconds": 5.0}, {"seconds": b}, {"seconds": b}] for b in (10.0, 4.0, 10.2)]
    learnt, good, bad = cells(predicted, found)
    assert (learnt["is_learnt_from"], learnt["error"]) == (True, 0.0)
    assert (good["is_good"], good["is_within"], good["seconds"]) == (True, False, [10.0, 4.0, 10.2])
    assert (bad["is_good"], bad["is_within"], round(bad["error"], 2)) == (False, True, 0.2)
