"""Choice of the ranges of a table that are read."""

from __future__ import annotations

import random

from parapply.verify.postgres import drawn


def test_other_ranges_are_read_than_before() -> None:
    """None of those that were read, and as many as are wanted while there are such."""
    chosen = random.Random(7)
    for _ in range(20):
        assert set(drawn(chosen, 4, 1, (0, 2))) < {1, 3}
        assert drawn(chosen, 4, 2, (0, 2)) == [1, 3]
        assert drawn(chosen, 2, 1, (0, 1)) == []
        assert len(drawn(chosen, 9, 2, ())) == 2
