"""Rows as segments keep them, what they become as parameters, and the order in which a set has them.

Both twins keep the same contract: the compiled one leaves most rows in the frame they came in.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.plan.keys import Order, key_order
from parapply.plan.table_changes import NET_DELETE, NET_INSERT, NET_UPDATE, InsertSegment, NetSegment
from parapply.target.catalogue.match import match
from parapply.wire.rows import (
    NULL,
    TEXT_OID,
    UNCHANGED,
    Value,
    by_columns,
    columns_of,
    read_delete,
    read_insert,
    read_update,
    value_at,
    values_of,
)
from tests import build
from tests.unit import plans
from tests.unit.changes_model import KEYLESS, NUMERIC, PAIR, PLAIN

if TYPE_CHECKING:
    from types import EllipsisType

    from parapply.plan.table import TablePlan
    from parapply.wire.rows import KeptRow

NUMBERS = st.integers(-99_999, 9_999_999).map(lambda number: str(number).encode())
TEXTS = st.one_of(st.none(), st.binary(max_size=9), st.sampled_from([b"t", b"n\0\0\0\x01", b"\xff" * 4]))
#: No text of PostgreSQL holds a NUL.
WORDS = st.binary(max_size=8).map(lambda word: word.replace(b"\0", b"\1"))


def cells(*texts: bytes | EllipsisType | None) -> bytes:
    """Return a row of text values, NULLs, and values that are not sent: `...`."""
    return build.row(*[_cell(text) for text in texts])


def _cell(text: bytes | EllipsisType | None) -> bytes:
    return build.null() if text is None else build.unchanged() if text is ... else build.text(text)


def wire(text: bytes | None) -> bytes:
    """Return a value as it travels."""
    return NULL if text is None else struct.pack("!i", len(text)) + text


def frame(kind: str, *texts: bytes | None) -> bytes:
    """Return a change of one row."""
    row = cells(*texts)
    made = build.insert(row) if kind == "I" else build.update(row) if kind == "U" else build.delete(key=row)
    return build.xlog_data(made)


def kept(segment: NetSegment) -> list[KeptRow]:
    """Return the rows of a segment in the order of the changes."""
    return [row for _, row in segment.net.values()]


@given(st.lists(st.tuples(st.sampled_from("IUD"), NUMBERS, TEXTS, TEXTS), max_size=30, unique_by=lambda each: each[1]))
def test_a_kept_row_has_the_values_of_its_frame(changes: list[tuple[str, bytes, bytes | None, bytes | None]]) -> None:
    """Whatever form a row is kept in, its values are those that were sent, one by one and all together."""
    segment = NetSegment(PLAIN.plan(0))
    for kind, *texts in changes:
        segment.taker(ord(kind))(frame(kind, *texts))
    for (_, *texts), row in zip(changes, kept(segment), strict=True):
        assert values_of(row) == [wire(text) for text in texts]
        assert [value_at(row, position) for position in range(3)] == [wire(text) for text in texts]
    assert list(segment.net) == [wire(key) for _, key, _, _ in changes]


@given(
    st.lists(st.tuples(NUMBERS, TEXTS, TEXTS), min_size=1, max_size=20, unique_by=lambda each: each[0]),
    st.permutations([0, 1, 2]).flatmap(lambda order: st.integers(1, 3).map(lambda n: tuple(order[:n]))),
    st.data(),
)
def test_columns_are_the_values_joined(
    rows: list[tuple[bytes, bytes | None, bytes | None]], positions: tuple[int, ...], data: st.DataObject
) -> None:
    """Rows kept as frames and rows kept as values give the same parameters, in any mixture and for any positions."""
    segment = NetSegment(PLAIN.plan(0))
    for texts in rows:
        segment.insert(frame("I", *texts))
    mixed = [values_of(row) if data.draw(st.booleans()) else row for row in kept(segment)]
    header = struct.pack("!iiIii", 1, 1, TEXT_OID, len(rows), 1)
    expected = [header + b"".join(wire(texts[position]) for texts in rows) for position in positions]
    assert columns_of(mixed, positions, (TEXT_OID,) * len(positions), 3) == expected


@pytest.mark.parametrize("order", ["reversed", "rotated", "second last"])
@pytest.mark.parametrize("n_columns", [8, 9, 10, 16])
def test_keys_of_many_columns_are_whole(n_columns: int, order: str) -> None:
    """Rows that differ in one key column are two rows, however many columns the key has and in whatever order."""
    names = [f"c{number}" for number in range(n_columns)]
    orders = {"reversed": names[::-1], "rotated": names[4:] + names[:4], "second last": [*names[:1], *names[2:], "c1"]}
    facts = plans.table([plans.column(name) for name in (*names, "v")], orders[order])
    sent = [plans.sent(name, is_key=True) for name in names]
    plan = match(plans.relation(*sent, plans.sent("v")), facts)
    rows = [[b"2" if at == changed else b"1" for at in range(n_columns)] for changed in range(n_columns + 1)]
    keys = [tuple([wire(row[names.index(name)]) for name in orders[order]]) for row in rows]
    for kind, effect in (("I", NET_INSERT), ("U", NET_UPDATE), ("D", NET_DELETE)):
        segment = NetSegment(plan)
        for row in rows:
            segment.taker(ord(kind))(frame(kind, *row, b"v"))
        assert list(segment.net) == keys
        assert {one for one, _ in segment.net.values()} == {effect}
        assert [values_of(row)[n_columns - 1] for row in kept(segment)] == [wire(row[-1]) for row in rows]


PAIRS_OF_WORDS = st.tuples(*[st.sampled_from([b"", b"a", b"b"])] * 2)
GAPS = st.one_of(TEXTS, st.just(...))


@given(st.lists(st.tuples(st.sampled_from("UUI"), st.integers(1, 4), GAPS, GAPS, st.sampled_from(" KO")), max_size=30))
def test_what_an_update_does_not_send_stays_as_the_changes_before_have_left_it(
    changes: list[tuple[str, int, bytes | EllipsisType | None, bytes | EllipsisType | None, str]],
) -> None:
    """In any sequence each value is the last one sent, or absent, with an old row or not (trap T-41).

    Rows are grouped by the columns that have a value, and a group's parameters are its values.
    """
    segment = NetSegment(PLAIN.plan(0))
    expected: dict[bytes, list[Value]] = {}
    for kind, number, first, second, sent in changes:
        key = str(number).encode()
        before = expected.get(key, [UNCHANGED] * 3)
        if kind == "I" and key not in expected and first is not ... and second is not ...:
            segment.insert(frame("I", key, first, second))
        else:
            row = cells(key, first, second)
            old = {"K": build.Before(key=cells(key, None, None)), "O": build.Before(old=cells(key, b"old", b""))}
            segment.update(build.xlog_data(build.update(row, **old.get(sent, build.Before()))))
        pairs = zip((key, first, second), before, strict=True)
        expected[key] = [was if text is ... else wire(text) for text, was in pairs]
    rows = kept(segment)
    assert [values_of(row) for row in rows] == list(expected.values())
    assert [[value_at(row, position) for position in range(3)] for row in rows] == list(expected.values())
    assert segment.has_unchanged or all(UNCHANGED not in row for row in expected.values())
    groups = by_columns(rows, 3)
    for present, group in groups.items():
        alike = [row for row in expected.values() if present == _present(row)]
        assert [values_of(row) for row in group] == alike
        header = struct.pack("!iiIii", 1, 1, TEXT_OID, len(group), 1)
        joined = [header + b"".join([row[position] or b"" for row in alike]) for position in present]
        assert columns_of(group, present, (TEXT_OID,) * len(present), 3) == joined
    assert set(groups) == {_present(row) for row in expected.values()}


def _present(row: list[Value]) -> tuple[int, ...]:
    return tuple([position for position, value in enumerate(row) if value is not UNCHANGED])


@given(was=PAIRS_OF_WORDS, now=PAIRS_OF_WORDS, sent=st.sampled_from("KO"), is_key_sent=st.booleans())
def test_an_update_with_its_old_row_is_a_move_if_the_key_differs(
    was: tuple[bytes, bytes], now: tuple[bytes, bytes], sent: str, *, is_key_sent: bool
) -> None:
    """The old row says whether a row moves, and which it is where its key was not sent; the new one is kept."""
    segment = NetSegment(PAIR.plan(0))
    before = cells(*was, None, None)
    key = now if is_key_sent else (..., now[1])
    update = build.update(
        cells(*key, b"a", ...), **(build.Before(key=before) if sent == "K" else build.Before(old=before))
    )
    whole = now if is_key_sent else (was[0], now[1])
    assert segment.update(build.xlog_data(update)) is (whole != was)
    if whole == was:
        assert {key: values_of(row) for key, (_, row) in segment.net.items()} == {
            (wire(was[0]), wire(was[1])): [wire(was[0]), wire(was[1]), wire(b"a"), UNCHANGED]
        }


@given(st.sampled_from("IUD"), st.tuples(NUMBERS, TEXTS, TEXTS), st.data())
def test_a_cut_frame_is_no_row(kind: str, texts: tuple[bytes, bytes | None, bytes | None], data: st.DataObject) -> None:
    """A row that the readers refuse, a segment refuses in the same words; nothing of it stays behind."""
    whole = frame(kind, *texts)
    if kind == "U" and data.draw(st.booleans()):
        before = data.draw(st.sampled_from([build.Before(), build.Before(key=cells(texts[0], None, None))]))
        whole = build.xlog_data(build.update(cells(*texts[:2], ...), **before))
    # Behind the mark: what is cut before does not reach a segment.
    cut = data.draw(st.one_of(st.integers(31, len(whole) - 1).map(lambda end: whole[:end]), st.just(whole + b"n")))
    read = {"I": read_insert, "U": read_update, "D": read_delete}[kind]
    segment, heap = NetSegment(PLAIN.plan(0)), InsertSegment(KEYLESS.plan(0))
    with pytest.raises(ProtocolError) as expected:
        read(cut, 3)
    with pytest.raises(ProtocolError) as found:
        segment.taker(ord(kind))(cut)
    assert str(found.value) == str(expected.value)
    assert segment.is_empty
    if kind == "I":
        with pytest.raises(ProtocolError):
            heap.insert(cut)
        assert heap.is_empty


@given(st.lists(NUMBERS, max_size=60, unique=True), st.sets(NUMBERS, max_size=9))
def test_rows_of_a_number_key_go_by_length_and_digits(numbers: list[bytes], late: set[bytes]) -> None:
    """Neighbours in the index are neighbours in the set, for late keys and for the others."""
    segment = NetSegment(PLAIN.plan(0))
    for number in numbers:
        segment.update(frame("U", number, b"a", b"b"))
    for is_late in (False, True):
        effects = segment.by_effect({wire(number) for number in late}, is_late=is_late)
        found = [values_of(row)[0] for row in effects[NET_UPDATE - 1]]
        assert found == sorted(wire(number) for number in numbers if (number in late) is is_late)
        assert not any(rows for effect, rows in enumerate(effects, 1) if effect != NET_UPDATE)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=40, unique=True))
def test_rows_of_a_text_key_go_by_its_bytes(keys: list[tuple[bytes, bytes]]) -> None:
    """A key of several columns goes by the first, then by the second; what ends comes before what goes on."""
    segment = NetSegment(PAIR.plan(0))
    for first, second in keys:
        segment.delete(frame("D", first, second, None, None))
    found = [values_of(row)[:2] for row in segment.by_effect(set(), is_late=False)[NET_DELETE - 1]]
    padded = [[value[4:].ljust(8, b"\0") for value in pair if value is not None] for pair in found]
    assert padded == sorted(padded)
    assert sorted(map(str, found)) == sorted(str([wire(first), wire(second)]) for first, second in keys)


def test_the_order_of_the_source_is_kept_where_another_index_is_unique() -> None:
    """In another order a value could be taken before it is free, and the set would fail (trap T-38)."""
    assert key_order(PLAIN.plan(0)) is Order.NUMBERS
    assert key_order(PAIR.plan(0)) is Order.TEXTS
    # Texts of equal numbers differ: the key is no value as it is.
    assert key_order(NUMERIC.plan(0)) is Order.NONE
    plan = _with_unique_index()
    assert key_order(plan) is Order.NONE
    segment = NetSegment(plan)
    for number in (b"3", b"1", b"2"):
        segment.insert(frame("I", number, b"a"))
    rows = segment.by_effect(set(), is_late=False)[NET_INSERT - 1]
    assert [values_of(row)[0] for row in rows] == [wire(number) for number in (b"3", b"1", b"2")]


def _with_unique_index() -> TablePlan:
    columns = [plans.column("k", "int4"), plans.column("a", "text")]
    facts = plans.table(columns, ["k"], unique=(plans.unique("t_a_key", "a"),))
    return match(plans.relation(plans.sent("k", is_key=True), plans.sent("a", "text")), facts)
