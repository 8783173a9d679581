"""The net change of rows that are found by all their columns, so that sets can write it (trap T-24). Pure.

In: the change frames of one table in source order. Out: groups, each for one statement, which find their rows among
the rows that existed before: deletes, then updates; inserts come last.

A table is a multiset of rows here, and each change takes one row out and puts one in. A change that takes out a row
which an earlier change of the batch has put in continues that change. All others take rows that existed before, so
these can be looked for at the same time. Any of several twins may be taken, which is all that "equal" says.

Values are compared as the publisher sends them, and the statements compare what values look like as well. Where that
is not how the target compares them, a statement finds fewer rows than it must, and the batch is repeated row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from parapply.plan.keys import NUMBERS
from parapply.wire.rows import (
    DELETE,
    INSERT,
    KIND_AT,
    MARK_AT,
    NULL,
    UNCHANGED,
    KeptRow,
    Row,
    Value,
    has_unchanged,
    read_delete,
    read_insert,
    read_update,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.plan.table import TablePlan
    from parapply.plan.table_changes import RowSegment

#: Each group is one more statement to prepare for the table. Rows with NULL here and there would make hundreds.
_MAX_GROUPS: Final = 16
#: Changes for each group from which on one look at a table without an index costs less than a search for each of them,
#: which ends at the row that is found: 125 ms of CPU in a table of a million rows, against 3 to 30 ms for each row.
_PAYS: Final = 8
#: Updates of twins to different rows: each of them is compared with each twin.
_MAX_TWINS: Final = 16
_OLD: Final = ord("O")

_Whole: TypeAlias = tuple[Value, ...]


class Group(msgspec.Struct):
    """Changes that one statement makes: their old rows are NULL in the same columns, their new ones have the same."""

    nulls: tuple[int, ...]
    present: tuple[int, ...]  # () for a delete
    olds: list[Row] = []
    news: list[Row] = []  # as long as `olds`, or empty for a delete
    #: Of the rows that equal an old one, counted from 1, those above `lows` and up to `highs` are changed.
    lows: list[int] = []
    highs: list[int] = []
    n_rows: int = 0


class WholeRows(msgspec.Struct):
    """The net change of one segment."""

    groups: list[Group]  # in this order: deletes take rows that existed before, and so do updates
    inserts: list[KeptRow]  # after them


class _Change:
    """The change of one row: `old` is None for one that comes, `new` for one that goes."""

    __slots__ = ("key", "new", "number", "old", "twin")

    def __init__(self, number: int, key: _Whole, old: Row | None, new: Row | None) -> None:
        self.number = number
        self.key = key
        self.old = old
        self.new = new
        #: The number of another one that has put in an equal row, before this one; -1: none. No reference: a chain of
        #: hundreds of thousands, each freed within the one before, overflows the stack in the compiled twin.
        self.twin = -1


#: By the positions that are NULL in the old row, and those that are set: () for a delete.
_Groups: TypeAlias = dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Change]]


def net_rows(segment: RowSegment) -> WholeRows | None:
    """Return the net change of a segment; None if only single rows in order are exact, or cheaper.

    Raises:
        ProtocolError: a frame is malformed.
    """
    net = _net(segment.frames, len(segment.plan.columns))
    if net is None:
        return None
    changes, made = net
    inserts: list[KeptRow] = [change.new for change in changes if change.old is None and change.new is not None]
    groups = _groups(changes, tuple(range(len(segment.plan.columns))))
    if groups is None:
        return None
    updates = [group for (_, present), group in groups.items() if present]
    is_cheap = segment.plan.is_indexed or len(segment.frames) >= _PAYS * len(groups)
    if not is_cheap or len(groups) > _MAX_GROUPS or (len(updates) > 1 and _meet(updates, changes, made)):
        return None
    place = _place(segment.plan)
    deletes: list[Group] = []
    others: list[Group] = []
    for (nulls, present), group in groups.items():
        if place is not None:
            group.sort(key=place)
        ready = _group(nulls, present, group)
        if ready is None:
            return None
        (others if present else deletes).append(ready)
    return WholeRows(deletes + others, inserts)


def _groups(changes: list[_Change], everything: tuple[int, ...]) -> _Groups | None:
    """Return changes of rows that existed before, by the columns that are NULL and by the columns that are set.

    None if a row has nothing to be found by, or nothing to be set.
    """
    groups: _Groups = {}
    for change in changes:
        old, new = change.old, change.new
        if old is None:
            continue
        nulls = tuple([position for position, value in enumerate(old) if value == NULL]) if NULL in change.key else ()
        if new is None:
            present: tuple[int, ...] = ()
        elif has_unchanged(new):
            present = tuple([position for position, value in enumerate(new) if value is not UNCHANGED])
        else:
            present = everything
        if len(nulls) == len(everything) or (new is not None and not present):
            return None
        group = groups.get((nulls, present))
        if group is None:
            group = groups[nulls, present] = []
        group.append(change)
    return groups


def _place(plan: TablePlan) -> Callable[[_Change], bytes] | None:
    """Return what to sort changes by, so that neighbours in an index are neighbours in the set, as in `plan/keys.py`.

    None where no index narrows the search. Also where there is a unique one: a value that one row frees and a later one
    takes.
    """
    if not plan.is_indexed or plan.facts.unique:
        return None
    first = next(at for at, column in enumerate(plan.columns) if column.name in plan.facts.indexed_columns)
    # A value begins with its length: numbers are sorted by that first, texts without it.
    start = 0 if plan.columns[first].base_type_oid in NUMBERS else 4

    def place(change: _Change) -> bytes:
        value = change.key[first]
        assert value is not None, "old rows have all their values"
        return value[start:]

    return place


def _net(frames: Sequence[bytes], n_columns: int) -> tuple[list[_Change], dict[_Whole, _Change]] | None:
    """Return the changes, and by their new row the last that put one in; None if a row is not whole."""
    changes: list[_Change] = []
    made: dict[_Whole, _Change] = {}
    for frame in frames:
        kind = frame[KIND_AT]
        if kind == INSERT:
            row = read_insert(frame, n_columns)
            if has_unchanged(row):
                return None
            key = tuple(row)
            change = _Change(len(changes), key, None, row)
            changes.append(change)
            _put_in(change, key, made)
            continue
        if frame[MARK_AT] != _OLD:
            return None
        new: Row | None = None
        if kind == DELETE:
            old: Row = read_delete(frame, n_columns)
        else:
            sent, new = read_update(frame, n_columns)
            assert sent is not None, "the mark says so"
            old = sent
        key = tuple(old)
        # All that such a row can be is in the row that was put in last: values that were not sent are the old ones.
        after = new if new is None or not has_unchanged(new) else _filled(new, old)
        continued = made.get(key)
        if continued is None:
            change = _Change(len(changes), key, old, new)
            changes.append(change)
        else:
            change = continued
            if change.twin < 0:
                del made[key]
            else:
                made[key] = changes[change.twin]
            was = change.new
            assert was is not None, "it has put a row in"
            change.new = new if new is after else _filled(new or [], was)
        if after is not None:
            _put_in(change, tuple(after), made)
    return changes, made


def _put_in(change: _Change, row: _Whole, made: dict[_Whole, _Change]) -> None:
    before = made.get(row)
    change.twin = -1 if before is None else before.number
    made[row] = change


def _filled(new: Row, was: Row) -> Row:
    return [before if now is UNCHANGED else now for now, before in zip(new, was, strict=True)]


def _meet(updates: list[list[_Change]], changes: list[_Change], made: dict[_Whole, _Change]) -> bool:
    """Return whether a statement could take a row made by an earlier one, which is no twin of the row that is meant."""
    last = {change.key: place for place, group in enumerate(updates) for change in group}
    places = {change.number: place for place, group in enumerate(updates) for change in group}
    for key in made.keys() & last.keys():
        number = made[key].number
        while number >= 0:
            if places.get(number, len(updates)) < last[key]:
                return True
            number = changes[number].twin
    return False


def _group(nulls: tuple[int, ...], present: tuple[int, ...], changes: list[_Change]) -> Group | None:
    """Return changes as a group, equal ones as one; None if too many twins change to different rows."""
    group = Group(nulls, present, n_rows=len(changes))
    if len({change.key for change in changes}) == len(changes):
        group.olds = [change.old for change in changes if change.old is not None]
        group.news = [change.new for change in changes if change.new is not None]
        group.lows, group.highs = [0] * len(changes), [1] * len(changes)
        return group
    equal: dict[tuple[_Whole, _Whole], list[_Change]] = {}
    for change in changes:
        equal.setdefault((change.key, tuple(change.new or ())), []).append(change)
    taken: dict[_Whole, int] = {}
    different: dict[_Whole, int] = {}
    for (key, _), twins in equal.items():
        low = taken.get(key, 0)
        taken[key] = low + len(twins)
        different[key] = different.get(key, 0) + 1
        group.olds += [twins[0].old] if twins[0].old is not None else []
        group.news += [twins[0].new] if twins[0].new is not None else []
        group.lows.append(low)
        group.highs.append(taken[key])
    return group if max(different.values()) <= _MAX_TWINS else None
