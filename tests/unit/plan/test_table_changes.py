"""Net changes of one table, case by case; that they are exact in general is tested in test_batch.py."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from parapply.errors import ProtocolError
from parapply.plan.table import Equality, Lane, TablePlan
from parapply.plan.table_changes import (
    NET_ABSENT,
    NET_DELETE,
    NET_INSERT,
    NET_REPLACE,
    NET_UPDATE,
    InsertSegment,
    NetSegment,
    NotASet,
    RowSegment,
    TableChanges,
)
from parapply.target.catalogue.match import match
from parapply.wire.rows import UNCHANGED, Row, values_of
from tests import build
from tests.unit import plans
from tests.unit.changes_model import BLANK, KEYLESS, NUMERIC, PAIR, PLAIN, UNIQUE, Spec

N, U = build.null(), build.unchanged()


def _cells(*cells: bytes | str) -> bytes:
    """Return a row; texts are values, bytes are cells."""
    return build.row(*[build.text(cell.encode()) if isinstance(cell, str) else cell for cell in cells])


def _value(text: str) -> bytes:
    return len(text.encode()).to_bytes(4, "big") + text.encode()


def _insert(*cells: bytes | str) -> bytes:
    return build.xlog_data(build.insert(_cells(*cells)))


def _update(*cells: bytes | str, key: tuple[bytes | str, ...] = (), old: tuple[bytes | str, ...] = ()) -> bytes:
    before = build.Before()
    if key:
        before["key"] = _cells(*key)
    elif old:
        before["old"] = _cells(*old)
    return build.xlog_data(build.update(_cells(*cells), **before))


def _delete(*cells: bytes | str) -> bytes:
    return build.xlog_data(build.delete(key=_cells(*cells)))


def _changes(plan: TablePlan, *frames: bytes) -> TableChanges:
    changes = TableChanges(plan)
    for frame in frames:
        changes.add(frame)
    return changes


def _net(plan: TablePlan, *frames: bytes) -> tuple[int, Row]:
    [segment] = _changes(plan, *frames).segments
    assert isinstance(segment, NetSegment)
    [(effect, row)] = segment.net.values()
    return effect, values_of(row)


@pytest.mark.parametrize(
    ("letters", "effect"),
    [
        ("I", NET_INSERT),
        ("IU", NET_INSERT),
        ("ID", NET_ABSENT),
        ("IDI", NET_INSERT),
        ("IDID", NET_ABSENT),
        ("U", NET_UPDATE),
        ("UU", NET_UPDATE),
        ("UD", NET_DELETE),
        ("UDI", NET_REPLACE),
        ("D", NET_DELETE),
        ("DI", NET_REPLACE),
        ("DIU", NET_REPLACE),
        ("DID", NET_DELETE),
        ("DIDI", NET_REPLACE),
    ],
)
def test_net_effect_of_a_sequence(letters: str, effect: int) -> None:
    """A delete before an insert stays visible: columns that only the target has get their defaults again."""
    frames = {"I": _insert("1", "a", "b"), "U": _update("1", "a", "b"), "D": _delete("1", N, N)}
    assert _net(PLAIN.plan(0), *[frames[letter] for letter in letters])[0] == effect


@pytest.mark.parametrize("letters", ["II", "UI", "DD", "DU", "IDU", "IDD", "DII", "DIDU"])
def test_a_contradiction_is_no_set(letters: str) -> None:
    """Changes that no row can go through are not merged."""
    frames = {"I": _insert("1", "a", "b"), "U": _update("1", "a", "b"), "D": _delete("1", N, N)}
    changes = _changes(PLAIN.plan(0), *[frames[letter] for letter in letters[:-1]])
    with pytest.raises(NotASet):
        changes.add(frames[letters[-1]])


@pytest.mark.parametrize("before", [[], [_delete("1", N, N)]])
def test_unchanged_values_come_from_the_insert_before(before: list[bytes]) -> None:
    """Insert and update with unchanged TOAST are one insert with all values (trap T-41)."""
    effect, row = _net(PLAIN.plan(0), *before, _insert("1", "a", "big"), _update("1", "c", U), _update("1", U, U))
    assert effect == (NET_REPLACE if before else NET_INSERT)
    assert row == [_value("1"), _value("c"), _value("big")]


def test_unchanged_values_of_an_update_stay_absent() -> None:
    """The target keeps its own value; a later update gives one, an earlier one is not lost."""
    plan = PLAIN.plan(0)
    assert _net(plan, _update("1", "a", U)) == (NET_UPDATE, [_value("1"), _value("a"), UNCHANGED])
    assert _net(plan, _update("1", "a", U), _update("1", U, "b"))[1] == [_value("1"), _value("a"), _value("b")]
    [segment] = _changes(plan, _update("1", U, "b"), _update("1", "a", "b")).segments
    assert isinstance(segment, NetSegment)
    assert segment.has_unchanged
    [segment] = _changes(plan, _insert("1", "a", "b"), _update("1", "a", U)).segments
    assert isinstance(segment, NetSegment)
    assert not segment.has_unchanged


@pytest.mark.parametrize("spec", [PLAIN, KEYLESS], ids=["key", "no key"])
def test_an_insert_that_lacks_a_value_is_in_no_set(spec: Spec) -> None:
    """An insert that a row filter made of an update lacks values: no set can make it, and no NULL replaces them."""
    plan = spec.plan(0)
    cells = [build.text(b"1")] * (len(plan.columns) - 1)
    frame = build.xlog_data(build.insert(build.row(*cells, U)))
    with pytest.raises(NotASet):
        TableChanges(plan).add(frame)


def test_null_in_a_key_tuple_is_not_a_value() -> None:
    """A 'K' tuple has NULL for what is not in the identity: an unchanged value next to it stays absent."""
    for plan in (PLAIN.plan(0), BLANK.plan(0)):
        effect, row = _net(plan, _update(U, "a", U, key=("1", N, N)))
        assert (effect, row) == (NET_UPDATE, [_value("1"), _value("a"), UNCHANGED])


def test_an_unchanged_key_comes_from_the_old_row() -> None:
    """A TOASTed key is not sent again: it is in the old row, 'K' or 'O', and is not a move."""
    pair = PAIR.plan(0)
    assert _net(pair, _update(U, "y", "a", "b", key=("x", "y", N, N)))[1][:2] == [_value("x"), _value("y")]
    assert _net(BLANK.plan(0), _update(U, "a", "b", old=("k", "a", "b")))[1][0] == _value("k")
    moved = _changes(pair, _update(U, "z", "a", "b", key=("x", "y", N, N)))
    assert moved.moved_keys == {(_value("x"), _value("y")), (_value("x"), _value("z"))}


def test_a_key_that_was_not_sent_is_a_protocol_error() -> None:
    """Without a key nothing says which row is meant; guessing would write another one."""
    for spec in (PLAIN, NUMERIC, BLANK):
        with pytest.raises(ProtocolError):
            _changes(spec.plan(0), _update(U, "a", "b"))


def test_a_key_that_only_prints_differently_has_not_moved() -> None:
    """1.0 to 1.00 is an update of one row, with the new text (trap T-21)."""
    changes = _changes(NUMERIC.plan(0), _insert("1.0", "a", "b"), _update("1.00", "c", "b", key=("1.0", N, N)))
    [segment] = changes.segments
    assert isinstance(segment, NetSegment)
    assert list(segment.net.values()) == [(NET_INSERT, [_value("1.00"), _value("c"), _value("b")])]
    assert changes.moved_keys == set()


def test_a_null_key_of_a_full_old_row_is_its_own_key() -> None:
    """NULL and the empty string are two rows: two updates stay two, so that the target counts both."""
    null, empty = (N, "a", "b"), ("", "a", "b")
    [segment] = _changes(BLANK.plan(0), _update(*null, old=null), _update(*empty, old=empty)).segments
    assert isinstance(segment, NetSegment)
    assert len(segment.net) == 2


def test_moves_are_applied_by_themselves_between_sets() -> None:
    """A run of moves is one segment; nothing before or after it is merged across; both keys are touched."""
    moves = [_update("2", "a", "b", key=("1", N, N)), _update("3", "a", "b", key=("2", N, N))]
    changes = _changes(PLAIN.plan(0), _insert("1", "a", "b"), *moves, _update("3", "c", "b"), _delete("3", N, N))
    first, middle, last = changes.segments
    assert isinstance(first, NetSegment)
    assert isinstance(middle, RowSegment)
    assert middle.frames == moves
    assert isinstance(last, NetSegment)
    assert [effect for effect, _ in last.net.values()] == [NET_DELETE]
    assert changes.moved_keys == {_value("1"), _value("2"), _value("3")}
    assert not changes.is_whole_table
    assert changes.counts == [1, 3, 1]


def test_a_swap_through_a_third_key_is_not_netted() -> None:
    """1 to -1, 2 to 1, -1 to 2 stays three changes in order: as a set it would violate the key (trap T-20)."""
    steps = [("1", "-1"), ("2", "1"), ("-1", "2")]
    moves = [_update(new, "a", "b", key=(old, N, N)) for old, new in steps]
    segment = _changes(PLAIN.plan(0), *moves).segments[0]
    assert isinstance(segment, RowSegment)
    assert segment.frames == moves


def test_another_plan_starts_another_segment() -> None:
    """Rows of a relation announced again have other columns: no statement mixes them; empty segments do not pile up."""
    changes = _changes(PLAIN.plan(0), _insert("1", "a", "b"))
    for variant in (1, 0, 1):
        changes.use(PLAIN.plan(variant))
    changes.add(_update("c", "1"))
    first, second = changes.segments
    assert isinstance(first, NetSegment)
    assert isinstance(second, NetSegment)
    assert list(first.net) == list(second.net) == [_value("1")]
    assert second.plan is changes.plan
    assert not changes.is_whole_table


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(
    "wide",
    [
        replace(PLAIN.plan(0), lane=Lane.ROW),
        replace(PLAIN.plan(0), is_table_exclusive=True),
        replace(PLAIN.plan(0), facts=replace(PLAIN.facts, key_columns=("a",))),
    ],
    ids=["row", "exclusive", "other key"],
)
def test_one_wide_plan_makes_the_batch_wide(*, wide: TablePlan, is_last: bool) -> None:
    """A batch that touched the table by a wide plan is wide, whichever plan came last."""
    narrow = PLAIN.plan(1)
    changes = TableChanges(narrow if is_last else wide)
    changes.use(wide if is_last else narrow)
    assert changes.is_whole_table


def test_rows_without_columns_are_never_a_set() -> None:
    """A set of rows without columns has no length (trap T-67)."""
    plan = match(plans.relation(identity="n"), plans.table([plans.column("x")]))
    frame = build.xlog_data(build.insert(build.row()))
    for lane in (plan.lane, Lane.SET):
        changes = _changes(replace(plan, lane=lane), frame, frame)
        [segment] = changes.segments
        assert isinstance(segment, RowSegment)
        assert segment.frames == [frame, frame]
        assert changes.is_whole_table


def test_a_table_without_a_key_takes_inserts() -> None:
    """Inserts of equal rows stay as many as they are, and depend on nothing."""
    frame = _insert("a", "b")
    changes = _changes(KEYLESS.plan(0), frame, frame)
    [segment] = changes.segments
    assert isinstance(segment, InsertSegment)
    assert [values_of(row) for row in segment.rows] == [[_value("a"), _value("b")]] * 2
    assert list(changes.key_sets()) == []
    assert not changes.is_whole_table


def test_a_refused_update_is_left_to_the_target() -> None:
    """A table that allows no updates keeps the change in its place, and runs beside nothing."""
    refused = _update("a", "b")
    changes = _changes(KEYLESS.plan(0), _insert("a", "b"), refused, refused, _insert("c", "d"))
    assert [type(segment) for segment in changes.segments] == [InsertSegment, RowSegment, InsertSegment]
    assert changes.is_whole_table
    assert changes.counts == [2, 2, 0]


def test_rows_of_other_lanes_keep_their_order() -> None:
    """Where no set is exact, frames stay as they are."""
    plan = replace(PLAIN.plan(0), lane=Lane.ROW)
    frames = [_insert("1", "a", "b"), _delete("1", N, N), _insert("1", "a", "b"), _insert("1", "a", "b")]
    [segment] = _changes(plan, *frames).segments
    assert isinstance(segment, RowSegment)
    assert segment.frames == frames


def test_key_sets_are_every_key_touched() -> None:
    """All segments count, moves too, and a key inserted and deleted again."""
    changes = _changes(
        PLAIN.plan(0),
        _insert("1", "a", "b"),
        _delete("1", N, N),
        _update("3", "a", "b", key=("2", N, N)),
        _delete("4", N, N),
    )
    assert set().union(*changes.key_sets()) == {_value(number) for number in "1234"}
    assert not changes.is_whole_table
    assert TableChanges(UNIQUE.plan(0)).is_whole_table


def test_numeric_keys_need_no_common_scale() -> None:
    """An insert of 1.0, its delete as 1.00: nothing is left to do, whatever the texts."""
    assert NUMERIC.plan(0).columns[0].equality is Equality.NUMERIC
    assert _net(NUMERIC.plan(0), _insert("1.0", "a", "b"), _delete("1.00", N, N))[0] == NET_ABSENT
