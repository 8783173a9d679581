"""Positions that a watermark covers."""

from __future__ import annotations

import pytest

from parapply.model import covers


@pytest.mark.parametrize(
    ("low_lsn", "lsn", "is_covered"),
    [
        (0x1A8, 0x1A7, True),
        (0x1A8, 0x1A8, True),
        (0x2000, 0x2018, True),  # after the header of a page
        (0x2000, 0x2019, False),
        (0x100000, 0x100028, True),  # after the longer one of a segment
        (0x100000, 0x100029, False),
        (0x2000, 0x2028, False),  # where the smallest commit would end if no page began
    ],
)
def test_nothing_ends_inside_a_header(low_lsn: int, lsn: int, *, is_covered: bool) -> None:
    """An idle publisher's insert position may lie after a header that is not written; no commit ends before it."""
    assert covers(low_lsn, lsn) is is_covered
