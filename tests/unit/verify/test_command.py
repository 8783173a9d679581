"""Earlier result of a table that was compared a moment ago."""

from __future__ import annotations

import msgspec

from parapply.copy.published import Leaf, PublishedTable
from parapply.verify.canonical import Ranges
from parapply.verify.command import Verdict, VerifyAgain, VerifyResult
from parapply.verify.postgres import Compared


def _leaf(name: str, pages: int = 1) -> Leaf:
    return Leaf(schema="public", name=name, pages=pages, has_ranges=True, estimated_rows=1)


def test_a_table_that_is_another_one_by_now_is_not_known() -> None:
    """Made again, with another column, type, filter or partition: nothing of before holds. Growth is no change."""
    table = PublishedTable(
        oid=7, schema="public", name="t", columns=("a",), types=(23,), modifiers=(-1,), row_filter="", key=("a",),
        leaves=(_leaf("t"),),
    )  # fmt: skip
    compared = Compared(published=table, target_leaves=(), ranges=Ranges(count=1))
    verdict = Verdict(table=table, source_rows=1, target_rows=1, found=(), is_cut=False)
    again = VerifyAgain(VerifyResult(verdicts=[verdict], at_lsn=1, pause_s=0.0, tables=[compared]), 1.0)
    replace = msgspec.structs.replace
    assert again.then(replace(table, leaves=(_leaf("t", pages=9),))) == (compared, verdict)
    assert again.then(replace(table, oid=8)) is None
    assert again.then(replace(table, columns=("a", "b"), types=(23, 23), modifiers=(-1, -1))) is None
    assert again.then(replace(table, types=(20,))) is None
    assert again.then(replace(table, row_filter="a > 0")) is None
    assert again.then(replace(table, leaves=(_leaf("t"), _leaf("u")))) is None
