"""A stream without some columns is the stream that a column list would have sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES, Relation
from parapply.wire.assembler import Assembler
from parapply.wire.decode import decode
from parapply.wire.omission import Omission
from tests import build

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from parapply.model import Transaction

_ID = build.ColumnSpec("id", flags=1)
_X = build.ColumnSpec("x")
_V = build.ColumnSpec("v")
_CELLS = st.one_of(
    st.just(build.null()), st.just(build.unchanged()), st.binary(max_size=5).map(build.text),
    st.binary(max_size=5).map(build.binary),
)  # fmt: skip


def _read(payloads: Sequence[bytes], omitted: Collection[str] = ()) -> list[Transaction]:
    found = Assembler(1 << 30).push([build.xlog_data(payload) for payload in payloads])
    Omission(lambda name: omitted if name == ("public", "t") else ()).cut(found)
    return found


def _seen(transactions: Sequence[Transaction]) -> list[list[object]]:
    return [[change if isinstance(change, Relation) else change[FRAME_HEADER_BYTES:] for change in each.changes]
            for each in transactions]  # fmt: skip


@given(st.data(), st.sets(st.integers(0, 3)))
def test_as_a_column_list_would_have_it(data: st.DataObject, left_out: set[int]) -> None:
    """Whatever the values, and whichever row of a change has them; other relations are as they came."""
    columns = [build.ColumnSpec(name) for name in ("a", "b", "c", "d")]

    def payloads(without: Collection[int], rows: Sequence[Sequence[bytes]]) -> list[bytes]:
        one, two = (build.row(*[cell for at, cell in enumerate(cells) if at not in without]) for cells in rows)
        kept = [column for at, column in enumerate(columns) if at not in without]
        return [
            build.begin(), build.relation(*kept), build.insert(one), build.update(one), build.update(one, old=two),
            build.update(one, key=two), build.delete(key=one), build.delete(old=two), build.truncate(16384),
            build.commit(),
        ]  # fmt: skip

    rows = [[data.draw(_CELLS) for _ in columns] for _ in range(2)]
    cut = _read(payloads((), rows), {columns[at].name for at in left_out})
    assert _seen(cut) == _seen(_read(payloads(left_out, rows)))
    [one] = cut
    assert one.relations == [change for change in one.changes if isinstance(change, Relation)]


def test_the_identity_stays_unless_it_is_the_whole_row() -> None:
    """A key without a column would find other rows, so that the table is refused; a whole row is whole without it."""
    all_keys = [column._replace(flags=1) for column in (_ID, _X)]
    stays = _read([build.begin(), build.relation(*all_keys), build.commit()], {"x"})
    goes = _read([build.begin(), build.relation(*all_keys, replica_identity="f"), build.commit()], {"x"})
    names = [[column.name for column in one.relations[0].columns] for (one,) in (stays, goes)]
    assert names == [["id", "x"], ["id"]]


def test_a_column_that_does_not_exist_is_noted() -> None:
    """It may have another name by now, under which its values would come."""
    (one,) = _read([build.begin(), build.relation(_ID, _X), build.commit()], ["x", "y"])
    assert ([column.name for column in one.relations[0].columns], one.relations[0].lacks) == (["id"], ("y",))


@pytest.mark.parametrize("ending", ["commit", "abort", "prepare", "subtransaction"])
def test_a_transaction_in_progress_has_its_own_columns(ending: str) -> None:
    """Its announcement holds for others once it has committed, and never if it is rolled back or prepared."""
    row = build.row(build.text(b"1"), build.text(b"2"), build.text(b"3"))
    few = build.row(build.text(b"1"), build.null())
    ends = {
        "commit": build.stream_commit(), "abort": build.stream_abort(subxid=700), "prepare": build.stream_prepare(),
        "subtransaction": build.stream_abort(subxid=701),
    }  # fmt: skip
    found = _read(
        [
            build.begin(), build.relation(_ID, _X, _V), build.insert(row), build.commit(),
            build.stream_start(), build.relation(_X, _ID, xid=700), build.insert(few, xid=700), build.stream_stop(),
            build.begin(), build.insert(row), build.commit(),
            build.stream_start(first_segment=0), build.insert(few, xid=700), build.stream_stop(),
            ends[ending],
            build.begin(), build.insert(few if ending == "commit" else row), build.commit(),
        ],
        {"x"},
    )  # fmt: skip
    of_three, of_two = build.row(build.text(b"1"), build.text(b"3")), build.row(build.null())
    rows = [change for each in _seen(found) for change in each if isinstance(change, bytes)]
    last = of_two if ending == "commit" else of_three
    assert rows == [build.insert(one) for one in (of_three, of_two, of_three, of_two, last)]


def test_what_was_announced_to_others_since_stays_in_force_for_them() -> None:
    """A transaction in progress whose announcement is older ends, and the next row is cut as it was announced."""
    row = build.row(build.text(b"1"), build.text(b"2"))
    found = _read(
        [
            build.stream_start(), build.relation(_ID, _X, xid=700), build.insert(row, xid=700), build.stream_stop(),
            build.begin(), build.relation(_X, _ID), build.insert(row), build.commit(),
            build.stream_start(first_segment=0), build.insert(row, xid=700), build.stream_stop(),
            build.stream_commit(),
            build.begin(), build.insert(row), build.commit(),
        ],
        {"x"},
    )  # fmt: skip
    rows = [change for each in _seen(found) for change in each if isinstance(change, bytes)]
    assert rows == [build.insert(build.row(build.text(value))) for value in (b"1", b"2", b"1", b"2")]


def test_a_row_that_ends_early_is_no_row() -> None:
    """Cut anywhere, a change of such a table is reported at once, or is as malformed as it came."""
    whole = build.update(build.row(build.text(b"12"), build.null()), old=build.row(build.text(b"3"), build.text(b"4")))
    for end in range(1, len(whole)):
        with pytest.raises(ProtocolError):  # noqa: PT012  by the first that looks
            [one] = _read([build.begin(), build.relation(_ID, _X), whole[:end], build.commit()], {"x"})
            for change in one.changes:
                if not isinstance(change, Relation):
                    decode(change[FRAME_HEADER_BYTES:])
