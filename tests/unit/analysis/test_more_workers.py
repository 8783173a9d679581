"""Choice of the runs that are predicted."""

from __future__ import annotations

from parapply.analysis.more_workers import ENOUGH, chosen


def test_the_latest_run_that_says_enough_is_predicted() -> None:
    """Of each slot one run, the latest first: one with enough batches, else the longest."""
    runs = [
        {"slot": "a", "run": "3", "n": 7},
        {"slot": "a", "run": "2", "n": ENOUGH},
        {"slot": "a", "run": "1", "n": 900},
        {"slot": "b", "run": "2", "n": 3},
        {"slot": "b", "run": "1", "n": 5},
    ]
    assert [(run["slot"], run["run"]) for run in chosen(runs, None)] == [("a", "2"), ("b", "1")]


def test_of_many_slots_the_largest_are_predicted() -> None:
    """In the order of the log."""
    runs = [{"slot": f"s{number}", "run": "1", "n": n} for number, n in enumerate((5, 90, 1, 70, 80))]
    assert [run["slot"] for run in chosen(runs, 3)] == ["s1", "s3", "s4"]
