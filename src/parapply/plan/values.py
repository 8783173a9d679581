"""Values of unique and foreign keys that a batch's rows hold, take or free. Pure.

Read from net changes when a batch is compared with another for the first time, never while it is filled: only what
reaches the target counts, and most tables have neither.

A value that an update or delete frees is on the wire only where the publisher's identity covers it (trap T-19). Others
are known only if an earlier batch in flight has written the row (`note_freed`). A batch that therefore starts
too early fails on the target and is repeated at the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.plan.keys import key_reader, value_reader
from parapply.plan.table import Equality
from parapply.plan.table_changes import NET_DELETE, NET_INSERT, NET_REPLACE, NET_UPDATE, InsertSegment, NetSegment
from parapply.wire.rows import UNCHANGED, value_at, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from parapply.plan.keys import Key
    from parapply.plan.table import ForeignKey, TablePlan, UniqueKey
    from parapply.plan.table_changes import TableChanges
    from parapply.wire.rows import KeptRow

    ValueOf = Callable[[KeptRow], Key | None]

_WRITES = (NET_INSERT, NET_UPDATE, NET_REPLACE)
_REMOVES = (NET_DELETE, NET_REPLACE)


def claimed(changes: TableChanges, unique: UniqueKey) -> set[Key]:
    """Return the values of a unique index that the batch's rows have once it is applied, or in between (relaxed)."""
    found = changes.values.get(unique.name)
    if found is None:
        of = _unique_reader(unique)
        found = changes.values[unique.name] = _values(of, _new_rows(changes))
    return found


def held(changes: TableChanges, unique: UniqueKey) -> set[Key]:
    """Return the values of a unique index that no other may take before the batch has committed: claimed or freed."""
    name = ("held", unique.name)
    found = changes.values.get(name)
    if found is None:
        found = set(claimed(changes, unique))
        if unique.is_old_sent:
            found |= _values(_unique_reader(unique), _old_rows(changes))
        changes.values[name] = found
    return found


def note_freed(later: TableChanges, earlier: TableChanges, keys: Iterable[Key]) -> None:
    """Register the values that a batch frees by changing rows that an earlier one in flight writes.

    Args:
        later: gets the values among those it holds.
        earlier: whose rows say what the values are.
        keys: of the rows that both change.
    """
    if not later.plan.unique_keys:
        return
    rows = []
    for segment in earlier.segments:
        if isinstance(segment, NetSegment):
            rows += [segment.net[key][1] for key in keys if key in segment.net and segment.net[key][0] in _WRITES]
    for unique in later.plan.unique_keys:
        held(later, unique).update(_values(_unique_reader(unique), rows))


def claims_unknown(changes: TableChanges) -> bool:
    """Return whether a row gets a value of a unique or foreign key of which only some columns were sent (trap T-41)."""
    plan = changes.plan
    wanted = [*[key.positions for key in plan.unique_keys], *[key.positions for key in plan.foreign_keys]]
    wanted = [positions for positions in wanted if len(positions) > 1]
    if not wanted:
        return False
    rows: list[KeptRow] = [row for _, row in changes.moved_rows]
    for segment in changes.segments:
        if isinstance(segment, NetSegment) and segment.has_unchanged:
            rows += [row for effect, row in segment.net.values() if effect == NET_UPDATE]
            rows += segment.written_over or ()
    return any(_is_partial(row, positions) for positions in wanted for row in rows)


def _is_partial(row: KeptRow, positions: tuple[int, ...]) -> bool:
    n_unchanged = [value_at(row, position) for position in positions].count(UNCHANGED)
    return 0 < n_unchanged < len(positions)


def frees_late(changes: TableChanges) -> bool:
    """Return whether a late key's change frees a unique value that another change of the batch claims before it.

    Known where old rows are sent; elsewhere such a batch fails on the target and is repeated.
    """
    late = changes.late_keys
    uniques = [unique for unique in changes.plan.unique_keys if unique.is_old_sent]
    if not late or not uniques:
        return False
    (segment,) = changes.segments
    assert isinstance(segment, NetSegment)
    key_of = key_reader(changes.plan)
    going = [segment.net[key][1] for key in late if segment.net[key][0] == NET_DELETE]
    going += [row for row in segment.old_rows or () if key_of(values_of(row)) in late]
    staying = [row for key, (effect, row) in segment.net.items() if effect in _WRITES and key not in late]
    return any(not _values(of, going).isdisjoint(_values(of, staying)) for of in map(_unique_reader, uniques))


def shared(changes: TableChanges, foreign: ForeignKey) -> set[Key]:
    """Return the parents' keys that the batch's child rows refer to, before or after it."""
    name = ("shared", foreign.name)
    found = changes.values.get(name)
    if found is None:
        of = _foreign_reader(foreign)
        found = _values(of, _new_rows(changes))
        if foreign.is_old_sent:
            found |= _values(of, _old_rows(changes))
        changes.values[name] = found
    return found


def frees_unknown(changes: TableChanges, foreign: ForeignKey) -> bool:
    """Return whether the batch lets go of parents that the wire does not name."""
    if foreign.is_old_sent:
        return False
    return bool(changes.moved_rows) or any(
        segment.counts[1] or segment.counts[2] for segment in changes.segments if isinstance(segment, NetSegment)
    )


def exclusive(changes: TableChanges, foreign: ForeignKey) -> set[Key] | None:
    """Return the referenced keys that come or go with the batch's parent rows; None if that can be any.

    An update that keeps the row's key counts only where the referenced columns are not that key; the value it may
    free is not known then.
    """
    name = ("exclusive", foreign.parent_columns, foreign.equalities)
    if name not in changes.values:
        changes.values[name] = _exclusive(changes, foreign)
    return changes.values[name]


def _exclusive(changes: TableChanges, foreign: ForeignKey) -> set[Key] | None:
    if changes.is_whole_table:
        return None
    is_key = refers_to_key(changes.plan, foreign)
    if not is_key and _removed(changes):
        return None
    found: set[Key] = set()
    for segment in changes.segments:
        # Their columns may have other places in each: the table was announced again.
        of = parent_reader(segment.plan, foreign)
        if of is None:
            return None
        if isinstance(segment, NetSegment):
            found |= _values(of, [row for effect, row in segment.net.values() if effect != NET_UPDATE or not is_key])
        elif isinstance(segment, InsertSegment):
            found |= _values(of, segment.rows)
        else:
            found |= _values(of, [row for move in segment.moves for row in move])
    return found


def parent_reader(plan: TablePlan, foreign: ForeignKey) -> ValueOf | None:
    """Return a reader of the referenced columns of a parent's row; None if they are not published or not comparable."""
    positions = {column.name: position for position, column in enumerate(plan.columns)}
    if not foreign.equalities or any(name not in positions for name in foreign.parent_columns):
        return None
    at = tuple([positions[name] for name in foreign.parent_columns])
    if any(plan.columns[position].equality is Equality.UNKNOWN for position in at):
        return None  # sent in another type, whose texts cannot be compared
    return value_reader(at, foreign.equalities, is_nulls_distinct=True)


def refers_to_key(plan: TablePlan, foreign: ForeignKey) -> bool:
    """Return whether a foreign key refers to columns that find the parent's rows: old rows always hold those."""
    return set(foreign.parent_columns) <= {plan.columns[position].name for position in plan.key_positions}


def removed_keys(changes: TableChanges) -> set[Key]:
    """Return the keys of rows that a batch deletes, or deletes and inserts again; its only segment has net changes."""
    (segment,) = changes.segments
    assert isinstance(segment, NetSegment)
    return {key for key, (effect, _) in segment.net.items() if effect in _REMOVES}


def removes(changes: TableChanges) -> bool:
    """Return whether rows go, or get another key."""
    return bool(changes.moved_rows) or _removed(changes)


def _removed(changes: TableChanges) -> bool:
    return any(
        segment.counts[2] and any(effect in _REMOVES for effect, _ in segment.net.values())
        for segment in changes.segments
        if isinstance(segment, NetSegment)
    )


def keys_with(changes: TableChanges, of: ValueOf, values: set[Key]) -> set[Key]:
    """Return the keys of a batch's net changes whose row has one of some values; it has one segment of net changes."""
    (segment,) = changes.segments
    assert isinstance(segment, NetSegment)
    return {key for key, (_, row) in segment.net.items() if of(row) in values}


def unique_keys_with(changes: TableChanges, unique: UniqueKey, values: set[Key]) -> set[Key]:
    """Return the keys of a batch's net changes that claim one of some values of a unique index."""
    return keys_with(changes, _unique_reader(unique), values)


def foreign_keys_with(changes: TableChanges, foreign: ForeignKey, values: set[Key]) -> set[Key]:
    """Return the keys of a batch's child rows that refer to one of some parents."""
    return keys_with(changes, _foreign_reader(foreign), values)


def _unique_reader(unique: UniqueKey) -> ValueOf:
    return value_reader(unique.positions, unique.equalities, is_nulls_distinct=unique.is_nulls_distinct)


def _foreign_reader(foreign: ForeignKey) -> ValueOf:
    # MATCH SIMPLE: a row with a NULL in it refers to nothing.
    return value_reader(foreign.positions, foreign.equalities, is_nulls_distinct=True)


def _values(of: ValueOf, rows: Iterable[KeptRow]) -> set[Key]:
    found = set(map(of, rows))
    found.discard(None)
    return found  # type: ignore[return-value]  # None is gone


def _new_rows(changes: TableChanges) -> Iterator[KeptRow]:
    for segment in changes.segments:
        if isinstance(segment, NetSegment):
            yield from [row for effect, row in segment.net.values() if effect in _WRITES]
            yield from segment.written_over or ()
        elif isinstance(segment, InsertSegment):
            yield from segment.rows
    yield from [row for _, row in changes.moved_rows]


def _old_rows(changes: TableChanges) -> Iterator[KeptRow]:
    for segment in changes.segments:
        if isinstance(segment, NetSegment):
            yield from [row for effect, row in segment.net.values() if effect == NET_DELETE]
            yield from segment.old_rows or ()
    yield from [old for old, _ in changes.moved_rows]
