"""Remaining parts of a relation of which parts are copied."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from parapply.copy.published import Leaf, PublishedTable
from parapply.copy.resume import _Collector, left_of
from parapply.target.state.copy_parts import CopiedPart
from tests import build


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


def test_a_key_that_is_no_text_ends_the_looking_for_its_table() -> None:
    """A publisher in SQL_ASCII sends bytes as they are: the table is copied from its start (T-61)."""
    table = PublishedTable(
        oid=1, schema="s", name="t", columns=("id",), types=(25,), modifiers=(-1,), row_filter="", key=("id",),
        leaves=(),
    )  # fmt: skip
    reasons = {1: ""}
    collector = _Collector({1: table}, {1: set()}, reasons)
    collector.take(build.relation(build.ColumnSpec("id", 25, flags=1), oid=1))
    collector.take(build.insert(build.row(build.text(b"\xe9")), oid=1))
    assert reasons == {1: "a key is no text in UTF-8"}
