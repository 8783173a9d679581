"""Remaining parts of a relation of which parts are copied."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from parapply.copy.published import Leaf
from parapply.copy.resume import left_of
from parapply.target.state.copy_parts import CopiedPart


def _done(first: int, end: int | None) -> CopiedPart:
    return CopiedPart(
        source_oid=1, leaf_schema="s", leaf_name="t", first_page=first, end_page=end, lsn=1, rows=1, size_bytes=1,
        fingerprint="",
    )  # fmt: skip


@given(
    cuts=st.sets(st.integers(1, 40), max_size=8),
    keep=st.lists(st.booleans(), min_size=9, max_size=9),
    pages=st.integers(0, 60),
    size=st.integers(1, 7),
)
def test_every_page_is_in_one_part(cuts: set[int], keep: list[bool], pages: int, size: int) -> None:
    """Parts that are copied and parts that are left hold each page once, including pages that come later."""
    bounds = [0, *sorted(cuts), None]
    all_parts = [_done(first or 0, end) for first, end in itertools.pairwise(bounds)]
    done = [part for part, is_here in zip(all_parts, keep, strict=False) if is_here]
    leaf = Leaf(schema="s", name="t", pages=pages, has_ranges=True, estimated_rows=pages * 10)
    left = list(left_of(leaf, done, size))
    ranges = [(part.first_page, part.end_page) for part in done] + [(part.first_page, part.end_page) for part in left]
    for page in range(100):
        holding = [one for one in ranges if one[0] <= page and (one[1] is None or page < one[1])]
        assert len(holding) == 1, page
    assert all(part.pages >= 0 and part.estimated_rows >= 0 for part in left)
