"""Differences between two looks that mean that changes of a table may be missing."""

from __future__ import annotations

import pytest

from parapply.source.publishing import altered, is_by_root, new_partitions, why_incomplete


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ("a1:iudt p1@9:10", "a1:iudt p1@9:10", ""),
        ("a1:iudt", "a2:iudt", "made again"),
        ("", "a1:iudt", "not published for a time"),
        ("r1*:iudt", "r2:iudt", "made again"),
        ("r1:i", "r1:iudt", "sends other changes"),
        ("r1:ud", "r1:i", "sends other changes"),
        # Fewer kinds of changes, because they are not wanted.
        ("r1:iudt", "r1:i", ""),
        ("n1:iudt&800", "n1:i&800", ""),
        ("n1:iudt&800", "n1:i&850", "sends other changes"),
        ("r1:iudtv", "r1:iudt", "sends other changes"),
        ("r1:iudt<7@900", "r1:iudt<7@950", "attached"),
        ("n1:iudt&800", "n1:iudt&850", "schema"),
        # An entry that sends everything existed all the time.
        ("a1:iudt r5*:iudt", "a1:iudt r6:iudt", ""),
        ("r1*:iudt r5:iudt", "r1*:iudt r6:iudt", "made again"),
        ("a1:i r5:iudt", "a1:i r6:iudt", "made again"),
        # Fewer entries, and none that is new.
        ("a1:iudt r5:iudt", "r5:iudt", ""),
    ],
)
def test_why_changes_may_be_missing(before: str, now: str, says: str) -> None:
    """A new entry shows it, unless another one without a filter has sent everything all the time."""
    reason = why_incomplete(before, now)
    assert says in reason
    assert bool(says) == bool(reason)


def test_altered_and_altered_back() -> None:
    """Another version of the publication's row shows it; another owner is no reason, nor is another publication."""
    assert altered("a1:iudt p1@9:10", "a1:iudt p1@12:10")
    assert not altered("a1:iudt p1@9:10", "a1:iudt p1@12:11")
    assert not altered("a1:iudt p1@9:10", "a1:iudt p1@9:10")
    assert not altered("a1:iudt p1@9:10", "a2:iudt p2@12:10")


def test_partitions_of_a_root() -> None:
    """One that was put there since is new, and so is one that was detached and attached."""
    assert new_partitions("r1:iudtv e8<7@900", "r1:iudtv e8<7@950 e9<7@960") == {8: "e8<7@950", 9: "e9<7@960"}
    assert is_by_root("r1:iudtv p1@9:10")
    assert not is_by_root("r1:iudt p1@9:10")
