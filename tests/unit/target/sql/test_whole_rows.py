"""Net changes of rows without a key, against the same changes one by one on a list of rows."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.plan.table import Equality, UniqueFacts
from parapply.plan.table_changes import RowSegment
from parapply.target.catalogue.match import match
from parapply.target.sql.whole_rows import Group, net_rows
from parapply.wire.rows import UNCHANGED, Row, text_of, values_of
from tests import build
from tests.unit.plans import column, relation, sent, table

if TYPE_CHECKING:
    from collections.abc import Sequence

Values = tuple[str | None, ...]

_SENT = relation(sent("a", "text", is_key=True), sent("b", "text", is_key=True), identity="f")
_FACTS = table([column("a", "text"), column("b", "text")], indexed_columns=("a",))
_PLAN = match(_SENT, _FACTS)
_NOT_INDEXED = match(_SENT, table([column("a", "text"), column("b", "text")]))


class Op(NamedTuple):
    """One wish: which row, and what becomes of it."""

    kind: str
    which: int
    values: Values
    is_unchanged: bool = False


def _row(values: Sequence[str | None]) -> bytes:
    return build.row(*[build.null() if value is None else build.text(value.encode()) for value in values])


def _new(old: Values, new: Values, *, is_unchanged: bool) -> bytes:
    if not is_unchanged or old[1] != new[1] or new[1] is None:
        return _row(new)
    return build.row(build.null() if new[0] is None else build.text(new[0].encode()), build.unchanged())


def _segment(payloads: Sequence[bytes], *, is_indexed: bool = True) -> RowSegment:
    segment = RowSegment(_PLAN if is_indexed else _NOT_INDEXED)
    for payload in payloads:
        segment.add(build.xlog_data(payload))
    return segment


def _texts(row: Row) -> list[str | None]:
    return [None if value is None or (text := text_of(value)) is None else text.decode() for value in row]


class Table:
    """Rows with a column that only the target has: the number in front, which distinguishes twins."""

    def __init__(self, rows: Sequence[Values]) -> None:
        """Number the rows."""
        self.rows = list(enumerate(rows))

    def take(self, old: Values) -> tuple[int, Values]:
        """Take out one row that equals another."""
        found = next(row for row in self.rows if row[1] == old)
        self.rows.remove(found)
        return found

    def run(self, group: Group, *, is_last_first: bool) -> int:
        """Do what the statement of a group does, and return the number of rows; it sees the rows of its beginning."""
        seen = list(reversed(self.rows)) if is_last_first else list(self.rows)
        chosen: list[tuple[tuple[int, Values], Values | None]] = []
        for number, old in enumerate(group.olds):
            texts = _texts(old)
            assert group.nulls == tuple([position for position, text in enumerate(texts) if text is None])
            same = [row for row in seen if list(row[1]) == texts][group.lows[number] : group.highs[number]]
            new = None if not group.present else group.news[number]
            if new is not None:
                assert group.present == tuple([at for at, value in enumerate(new) if value is not UNCHANGED])
            for row in same:
                after = None
                if new is not None:
                    pairs = zip(row[1], _texts(new), new, strict=True)
                    after = tuple([was if value is UNCHANGED else now for was, now, value in pairs])
                chosen.append((row, after))
        numbers = [row[0] for row, _ in chosen]
        assert len(set(numbers)) == len(numbers), "a row is changed twice"
        self.rows = [row for row in self.rows if row[0] not in set(numbers)]
        self.rows += [(row[0], after) for row, after in chosen if after is not None]
        return len(chosen)


_VALUES = st.tuples(st.sampled_from(["1", "2", "3", None]), st.sampled_from(["x", None]))


@given(
    st.lists(_VALUES, max_size=6),
    st.lists(st.builds(Op, st.sampled_from("IUUUD"), st.integers(0, 99), _VALUES, st.booleans()), max_size=14),
    st.sampled_from(["first", "last"]),
)
def test_net_changes_end_in_the_rows_that_single_ones_end_in(
    before: list[Values], wishes: list[Op], taken: str
) -> None:
    """Twins, NULLs, unchanged values and chains in any order: the same rows remain, and each statement finds them all.

    Where no change had a choice between twins, the very rows are the same: what else they hold goes with them.
    """
    serial, target = Table(before), Table(before)
    payloads: list[bytes] = []
    had_choice = False
    for op in wishes:
        if op.kind == "I":
            serial.rows.append((-1, op.values))
            payloads.append(build.insert(_row(op.values)))
            continue
        if not serial.rows:
            continue
        old = serial.rows[op.which % len(serial.rows)][1]
        had_choice = had_choice or [row for _, row in serial.rows].count(old) > 1
        number, _ = serial.take(old)
        if op.kind == "D":
            payloads.append(build.delete(old=_row(old)))
        else:
            serial.rows.append((number, op.values))
            payloads.append(build.update(_new(old, op.values, is_unchanged=op.is_unchanged), old=_row(old)))
    net = net_rows(_segment(payloads))
    if net is None:
        return
    for group in net.groups:
        assert target.run(group, is_last_first=taken == "last") == group.n_rows
    target.rows += [(-1, tuple(_texts(values_of(row)))) for row in net.inserts]
    assert Counter(row for _, row in target.rows) == Counter(row for _, row in serial.rows)
    if not had_choice:
        assert Counter(target.rows) == Counter(serial.rows)


def test_twins_in_one_batch_are_different_rows() -> None:
    """Equal changes are one entry with the number of rows; twins that change to different rows take turns (T-24)."""
    twin = _row(("1", "x"))
    net = net_rows(_segment([build.delete(old=twin), build.delete(old=twin)]))
    assert net is not None
    (group,) = net.groups
    assert (len(group.olds), group.lows, group.highs, group.n_rows) == (1, [0], [2], 2)
    changes = [build.update(_row((to, "x")), old=twin) for to in ("7", "8", "7")]
    net = net_rows(_segment(changes))
    assert net is not None
    (group,) = net.groups
    assert (group.lows, group.highs, group.n_rows) == ([0, 2], [2, 3], 3)


def test_a_row_that_a_statement_makes_is_not_taken_for_one_that_was_there() -> None:
    """Updates that need two statements are made one by one if the second could take what the first has made."""

    def short(old: str, new: str) -> bytes:
        return build.update(build.row(build.text(new.encode()), build.unchanged()), old=_row((old, "x")))

    whole = build.update(_row(("3", "x")), old=_row(("2", "x")))
    # The statement of `whole` comes first, or nothing of the other one makes what it looks for.
    assert net_rows(_segment([whole, short("9", "2")])) is not None
    assert net_rows(_segment([short("5", "6"), whole, short("9", "7")])) is not None
    assert net_rows(_segment([short("5", "6"), whole, short("9", "2")])) is None


@pytest.mark.parametrize(
    ("payloads", "why"),
    [
        ([build.update(_row(("1", "y")), key=_row(("1", None)))], "of the old row only the key was sent"),
        ([build.update(_row(("1", "y")))], "no old row"),
        ([build.delete(old=_row((None, None)))], "nothing but NULL"),
        ([build.insert(build.row(build.text(b"1"), build.unchanged()))], "a value was not sent"),
        ([build.update(build.row(build.unchanged(), build.unchanged()), old=_row(("1", "x")))], "nothing to set"),
        (
            [build.update(_row((f"{number}", "y")), old=_row(("1", "x"))) for number in range(17)],
            "each new row would be compared with each twin",
        ),
    ],
)
def test_what_is_applied_one_by_one(payloads: list[bytes], why: str) -> None:
    """Whatever sets cannot do exactly, or dearly, is left to the statements for single rows."""
    assert net_rows(_segment(payloads)) is None, why


@pytest.mark.parametrize("is_whole", [True, False])
def test_any_number_of_equal_rows_may_come(*, is_whole: bool) -> None:
    """Each knows the one before it; to let go of them goes no deeper for that, so a small stack is enough."""
    payloads = [build.insert(_row(("1", "x")))] * 20_000
    segment = _segment([*payloads, *([] if is_whole else [build.update(_row(("1", "y")))])])
    before = threading.stack_size(1 << 18)
    try:
        with ThreadPoolExecutor(1) as small:
            net = small.submit(net_rows, segment).result()
    finally:
        threading.stack_size(before)
    assert (net is not None) is is_whole
    assert net is None or len(net.inserts) == len(payloads)


def test_without_an_index_a_few_rows_are_looked_for_one_by_one() -> None:
    """A set reads the whole table once; a search for one row ends where it is found."""
    deletes = [build.delete(old=_row((f"{number}", "x"))) for number in range(8)]
    assert net_rows(_segment(deletes[:7], is_indexed=False)) is None
    assert net_rows(_segment(deletes, is_indexed=False)) is not None
    assert net_rows(_segment(deletes[:1])) is not None


@pytest.mark.parametrize(("n_columns", "is_set"), [(800, True), (801, False), (1600, False)])
def test_sets_have_room_for_all_columns_twice(n_columns: int, *, is_set: bool) -> None:
    """A list of the server has 1,664 columns at most, old values and new ones: wider rows change one by one (T-45)."""
    names = [f"c{number}" for number in range(n_columns)]
    plan = match(
        relation(*[sent(name, is_key=True) for name in names], identity="f"), table([column(name) for name in names])
    )
    assert plan.nets_whole_rows is is_set


@pytest.mark.parametrize("is_unique", [False, True])
@pytest.mark.parametrize(("type_", "expected"), [("int4", ["2", "9", "10"]), ("text", ["10", "2", "9"])])
def test_rows_come_in_the_order_of_an_index(type_: str, expected: list[str], *, is_unique: bool) -> None:
    """Neighbours share pages; with a further unique index rows stay as they came: one may take what another frees."""
    unique = UniqueFacts(
        name="u",
        columns=("a",),
        equalities=(Equality.BYTES,),
        is_nulls_distinct=True,
        is_partial=False,
        is_exclusion=False,
    )
    sent_ = relation(sent("b", "text", is_key=True), sent("a", type_, is_key=True), identity="f")
    facts = table(
        [column("a", type_), column("b", "text")], indexed_columns=("a",), unique=(unique,) if is_unique else ()
    )
    segment = RowSegment(match(sent_, facts))
    for number in ("9", "10", "2"):
        segment.add(build.xlog_data(build.update(_row(("y", number)), old=_row(("x", number)))))
    net = net_rows(segment)
    assert net is not None
    (group,) = net.groups
    came = ["9", "10", "2"] if is_unique else expected
    assert [_texts(row)[1] for row in group.olds] == came
    assert [_texts(row)[1] for row in group.news] == came


def test_a_malformed_row_is_told() -> None:
    """A row with another number of columns is no change of the table."""
    with pytest.raises(ProtocolError):
        net_rows(_segment([build.delete(old=_row(("1", "x", "y")))]))
