"""Rows that differ, from keys and hashes of both ends."""

from __future__ import annotations

from parapply.verify.canonical import MOST_RANGES, n_ranges
from parapply.verify.differences import Difference, Key, Summary, add, differences, differing_ranges, shown


def _found(source: list[tuple[Key, int]], target: list[tuple[Key, int]]) -> list[tuple[str, Key, int]]:
    return [(one.kind, one.key, one.count) for one in differences(source, target)]


def test_each_kind_is_told() -> None:
    """A key on one end only is missing or extra, one on both with other rows is different; keys are in order."""
    source: list[tuple[Key, int]] = [(("2",), 1), (("10",), 1), (("3",), 1)]
    target: list[tuple[Key, int]] = [(("2",), 1), (("3",), 9), (("4",), 1)]
    assert _found(source, target) == [("different", ("3",), 1), ("extra", ("4",), 1), ("missing", ("10",), 1)]


def test_keys_that_look_like_numbers_are_sorted() -> None:
    """Numbers by size, and any other text after them, also with more signs and with digits of other scripts."""
    keys = ["--5", "-", "", "10", "\N{ARABIC-INDIC DIGIT THREE}", "-5", "\N{SUPERSCRIPT TWO}", "9" * 50]
    found = [key for _, (key,), _ in _found([((key,), 1) for key in keys], [])]
    assert found == ["-5", "\N{ARABIC-INDIC DIGIT THREE}", "10", "", "-", "--5", "9" * 50, "\N{SUPERSCRIPT TWO}"]


def test_rows_without_a_key_are_counted() -> None:
    """Three equal rows against one are two missing."""
    assert _found([(("a",), 5)] * 3, [(("a",), 5)]) == [("missing", ("a",), 2)]
    assert _found([(("a",), 5)], [(("a",), 5)]) == []


def test_null_is_no_text() -> None:
    """A NULL in a key is a value of its own."""
    assert _found([((None,), 1)], [(("",), 1)]) == [("extra", ("",), 1), ("missing", (None,), 1)]


def test_ranges_of_parts_add_up() -> None:
    """However the rows are spread over parts, equal tables have equal sums; a row moved between ranges shows twice."""
    one: Summary = {}
    other: Summary = {}
    for part in ([(0, 2, 10), (1, 1, 5)], [(0, 1, -3)]):
        add(one, part)
    add(other, [(0, 3, 7), (1, 1, 5)])
    assert differing_ranges(one, other) == []
    add(other, [(7, 1, 1)])
    assert differing_ranges(one, other) == [7]


def test_the_number_of_ranges_is_a_power_of_two() -> None:
    """So that the range is some bits of the hash; it grows with the table up to a limit."""
    for rows in (0, 1, 9_999, 10_000, 30_000, 10**7, 10**12):
        ranges = n_ranges(rows)
        assert ranges & (ranges - 1) == 0
        assert 1 <= ranges <= MOST_RANGES
    assert n_ranges(0) == 1


def test_long_values_are_cut() -> None:
    """A key is shown by its columns, and cut, because a megabyte is not read."""
    assert shown(("a", "b"), (None, "x" * 100)) == f"a=NULL, b={'x' * 60}..."
    assert Difference(kind="extra", key=("1",)).count == 1
