"""The changes of a batch for one target table: net changes per key, plain inserts, or rows in order. Pure.

Inside a batch the order between tables does not matter but where foreign keys are enforced (`plan/foreign_keys.py`);
tables where code runs never get here, they are serial. Inside a table it matters only where a set cannot be exact:
there the lane starts a new **segment**: changes that are applied at once, or one by one in order (traps T-20, T-38 to
T-41).

The types of the compiled twin are in ``table_changes.pxd``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.errors import ProtocolError
from parapply.plan.keys import Key, Order, key_form, key_order, key_reader, plain_positions
from parapply.plan.table import Lane, TablePlan
from parapply.wire.rows import (
    DELETE,
    INSERT,
    KIND_AT,
    NULL,
    UNCHANGED,
    UPDATE,
    KeptRow,
    Row,
    has_unchanged,
    read_delete,
    read_insert,
    read_update,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import cython  # read by the compiler only

    #: Takes one change frame of one kind into a segment; True if the frame must be applied by itself instead.
    #: Good as long as the segment is its table's last.
    Taker = Callable[[bytes], bool]
else:
    from parapply import uncompiled as cython

#: Net effect of one key's changes inside one segment.
NET_INSERT: Final = 1  # the row must not exist, then does
NET_UPDATE: Final = 2  # the row exists; values present are set
NET_DELETE: Final = 3  # the row exists, then does not
NET_REPLACE: Final = 4  # deleted, then inserted: both are done, so that columns only the target has start afresh
NET_ABSENT: Final = 5  # inserted, then deleted: nothing to write, but the row must not exist
N_EFFECTS: Final = 5

#: Rows by net effect, the lists in the order of the numbers above.
Effects = list[list[KeptRow]]

#: Key columns whose values the compiled twin finds in the frame; a key of more is made from the whole row.
_MAX_PLAIN: Final = 8
_INSERT, _UPDATE, _DELETE = INSERT, UPDATE, DELETE  # C numbers in the compiled twin


class NotASet(Exception):
    """The changes of one key contradict each other (two inserts, an update after a delete), or a value is missing.

    The set form would hide that, so the batch is applied row by row at the head, where the error is reported.
    """


class NetSegment:
    """The net change of each key, and the rows to write it.

    Applied as deletes, then updates, then inserts: no two entries are for one row, so only what other unique indexes
    forbid on the way can fail, and that fails on the target, loudly (trap T-38).
    """

    __slots__ = (
        "_found_at",
        "_is_partial",
        "_key_of",
        "_n_columns",
        "_n_plain",
        "_order",
        "_plain",
        "_row",
        "_wanted",
        "counts",
        "has_unchanged",
        "net",
        "old_rows",
        "plan",
        "written_over",
    )

    # Arrays of numbers in the compiled twin, which is the only one to have them.
    _wanted: list[int]
    _found_at: list[int]
    _n_plain: int
    # The row that `_simple_update` has read last.
    _row: bytes
    _is_partial: bool

    def __init__(self, plan: TablePlan) -> None:
        """Start empty for a table whose lane is SET and that has a key."""
        self.plan = plan
        #: Per key: [net effect, row]. Written here, read by the dependency check (its keys) and by the statements.
        #: Only the row of a NET_UPDATE can hold UNCHANGED, and never in a key column.
        self.net: dict[Key, tuple[int, KeptRow]] = {}
        #: True if any row holds UNCHANGED, so that updates must be grouped by the columns present.
        self.has_unchanged = False
        #: Inserts, updates, deletes taken.
        self.counts = [0, 0, 0]
        #: Old rows that the net change of their key does not hold, where what they free can be known; else None.
        keeps_old = any([key.is_old_sent for key in plan.unique_keys] + [key.is_old_sent for key in plan.foreign_keys])
        self.old_rows: list[KeptRow] | None = [] if keeps_old else None
        #: Rows that the batch writes and then changes or deletes, where that matters; else None. Row by row, as a batch
        #: is repeated for a conflict, their values are on the target for a moment.
        self.written_over: list[KeptRow] | None = [] if plan.keeps_written_over else None
        self._key_of = key_reader(plan)
        #: Positions of values that are the key as they are. Most keys are one such value; saves the call.
        self._plain = plain_positions(plan)
        self._order = key_order(plan)
        self._n_columns = len(plan.columns)
        if cython.compiled:
            # Nothing checks the bounds of these arrays, so that one value too many would overwrite what lies behind.
            plain = self._plain if len(self._plain) <= _MAX_PLAIN else ()
            self._n_plain = len(plain)
            for index, position in enumerate(sorted(plain)):
                self._wanted[index] = position
                self._found_at[plain.index(position)] = index

    @property
    def is_empty(self) -> bool:
        """Return whether there is no change."""
        return not self.net

    def taker(self, kind: int) -> Taker:
        """Return the method for frames of a kind."""
        return self.insert if kind == INSERT else self.delete if kind == DELETE else self.update

    def insert(self, frame: bytes) -> bool:
        """Add an Insert frame.

        Raises:
            NotASet: the key already exists inside the batch, or a value was not sent.
            ProtocolError: the frame is malformed.
        """
        row: KeptRow = frame
        key = self._simple_key(frame, _INSERT) if cython.compiled else None
        if key is None:
            row = _whole(read_insert(frame, self._n_columns))
            key = self._key(row)
        self.counts[0] += 1
        change = (NET_INSERT, row)
        if cython.compiled:
            untrack(change)  # type: ignore[name-defined]  # noqa: F821  collector.pxd
        before = self.net.setdefault(key, change)
        if before is change:
            return False
        if before[0] == NET_DELETE:
            if self.old_rows is not None:
                self.old_rows.append(before[1])
            change = (NET_REPLACE, row)
        elif before[0] != NET_ABSENT:
            raise NotASet
        self.net[key] = change
        return False

    def update(self, frame: bytes) -> bool:  # noqa: C901, PLR0912  a call for each part costs as much as the part
        """Add an Update frame; True if it moves the row to another key, which no set can do (trap T-38).

        Raises:
            NotASet: the row was deleted inside the batch.
            ProtocolError: the frame is malformed.
        """
        kept: KeptRow = frame
        is_partial = False
        key = None
        if cython.compiled:
            key = self._simple_update(frame)
            if key is not None:
                kept, is_partial = self._row, self._is_partial
        if key is None:
            old, row = read_update(frame, self._n_columns)
            is_partial = has_unchanged(row)
            if is_partial:
                fill_key(row, old, self.plan)
                is_partial = has_unchanged(row)
            kept, key = row, self._key(row)
            if old is not None:
                if self._key_of(old) != key:
                    return True
                if self.old_rows is not None:
                    self.old_rows.append(old)
        self.counts[1] += 1
        change = (NET_UPDATE, kept)
        if cython.compiled:
            untrack(change)  # type: ignore[name-defined]  # noqa: F821  collector.pxd
        before = self.net.setdefault(key, change)
        if before is change:
            if is_partial:
                self.has_unchanged = True
            return False
        effect = before[0]
        if effect in (NET_DELETE, NET_ABSENT):
            raise NotASet
        if self.written_over is not None:
            self.written_over.append(before[1])
        if is_partial:
            kept = self._filled(kept, before[1])
        self.net[key] = (effect, kept)
        return False

    def delete(self, frame: bytes) -> bool:
        """Add a Delete frame.

        Raises:
            NotASet: the row was deleted inside the batch already.
            ProtocolError: the frame is malformed.
        """
        row: KeptRow = frame
        key = self._simple_key(frame, _DELETE) if cython.compiled else None
        if key is None:
            row = read_delete(frame, self._n_columns)
            key = self._key(row)
        self.counts[2] += 1
        before = self.net.get(key)
        if before is None or before[0] == NET_UPDATE:
            self.net[key] = (NET_DELETE, row)
        elif before[0] == NET_INSERT:
            self.net[key] = (NET_ABSENT, row)
        elif before[0] == NET_REPLACE:
            self.net[key] = (NET_DELETE, row)
        else:
            raise NotASet
        if before is not None and self.written_over is not None:
            self.written_over.append(before[1])
        return False

    def by_effect(self, late: set[Key], *, is_late: bool) -> Effects:
        """Return the rows by net effect, in the order of their keys where that is known to be the target's (`Order`).

        Args:
            late: keys whose changes are applied after the others.
            is_late: those changes are asked for, else the others.
        """
        effects: Effects = [[] for _ in range(N_EFFECTS)]
        if cython.compiled:
            split_by_effect(self.net, late, is_late, self._order.value, effects)  # type: ignore[name-defined]  # noqa: F821  order.pxd
        else:
            keys = [key for key in self.net if (key in late) is is_late]
            for key in sorted(keys, key=self._order.place) if self._order is not Order.NONE else keys:
                effect, row = self.net[key]
                effects[effect - 1].append(row)
        return effects

    def _simple_key(self, frame: bytes, kind: int) -> Key | None:
        """Return the key of a row that can be kept as its frame (compiled twin only), or None: it must be read."""
        if not self._n_plain or not is_simple(  # type: ignore[name-defined]  # noqa: F821  walk.pxd
            frame,
            kind,
            self._n_columns,
            self._wanted,
            self._n_plain,
            starts,  # type: ignore[name-defined]  # noqa: F821
            cython.address(self._is_partial),
        ):
            return None
        if self._n_plain == 1:
            return value_from(frame, starts[0])  # type: ignore[name-defined, no-any-return]  # noqa: F821
        values = [value_from(frame, starts[self._found_at[index]]) for index in range(self._n_plain)]  # type: ignore[name-defined]  # noqa: F821
        return tuple(values)

    def _simple_update(self, frame: bytes) -> Key | None:
        """Return the key of an update that can be kept as a frame (compiled twin only), which is in `_row` then.

        That is without its old row where that says nothing: it has the same key, and what it frees is of no interest.
        """
        self._row = frame
        key = self._simple_key(frame, _UPDATE)
        if key is None and self.old_rows is None:
            self._row = without_old(frame, self._n_columns, self._wanted, self._n_plain)  # type: ignore[name-defined]  # noqa: F821  walk.pxd
            if self._row is not None:
                key = self._simple_key(self._row, _UPDATE)
        return key

    def _filled(self, row: KeptRow, before: KeptRow) -> KeptRow:
        """Return a new row that lacks values with those which the changes before it have left (trap T-41).

        An insert followed by an update with unchanged TOAST is the insert with both.
        """
        filled: KeptRow
        if cython.compiled and isinstance(row, bytes) and isinstance(before, bytes):
            is_partial = False
            filled = filled_frame(row, before, self._n_columns, cython.address(is_partial))  # type: ignore[name-defined]  # noqa: F821  walk.pxd
        else:
            pairs = zip(values_of(before), values_of(row), strict=True)
            filled = [was if now is UNCHANGED else now for was, now in pairs]
            is_partial = has_unchanged(filled)
        if is_partial:
            self.has_unchanged = True
        return filled

    def _key(self, row: Row) -> Key:
        if len(self._plain) == 1:
            return row[self._plain[0]]  # type: ignore[return-value]  # no key value is UNCHANGED here
        return self._key_of(row)


class InsertSegment:
    """Inserts into a table without a key: nothing to net, nothing to depend on."""

    __slots__ = ("_n_columns", "plan", "rows")

    def __init__(self, plan: TablePlan) -> None:
        """Start empty."""
        self.plan = plan
        self.rows: list[KeptRow] = []
        self._n_columns = len(plan.columns)

    @property
    def is_empty(self) -> bool:
        """Return whether there is no change."""
        return not self.rows

    @property
    def counts(self) -> list[int]:
        """Return inserts, updates, deletes."""
        return [len(self.rows), 0, 0]

    def taker(self, kind: int) -> Taker:
        """Return the method for frames of a kind."""
        return self.insert if kind == INSERT else self.refuse

    def insert(self, frame: bytes) -> bool:
        """Add an Insert frame.

        Raises:
            NotASet: a value was not sent.
            ProtocolError: the frame is malformed.
        """
        if cython.compiled and is_plain(frame, self._n_columns):  # type: ignore[name-defined]  # noqa: F821  walk.pxd
            self.rows.append(frame)
        else:
            self.rows.append(_whole(read_insert(frame, self._n_columns)))
        return False

    def refuse(self, _frame: bytes) -> bool:
        """Take no update and no delete."""
        return True


class RowSegment:
    """Change frames of one table, applied one by one in this order."""

    __slots__ = ("counts", "frames", "moves", "plan")

    def __init__(self, plan: TablePlan) -> None:
        """Start empty."""
        self.plan = plan
        self.frames: list[bytes] = []
        #: Where they are rows that move to other keys: each as it was (at least its key) and as it will be.
        self.moves: list[tuple[Row, Row]] = []
        #: Inserts, updates, deletes taken.
        self.counts = [0, 0, 0]

    @property
    def is_empty(self) -> bool:
        """Return whether there is no change."""
        return not self.frames

    def taker(self, _kind: int) -> Taker:
        """Return the method for frames of a kind."""
        return self.add

    def add(self, frame: bytes) -> bool:
        """Add a frame, which is read later."""
        kind = frame[KIND_AT]
        self.counts[0 if kind == INSERT else 2 if kind == DELETE else 1] += 1
        self.frames.append(frame)
        return False


Segment = NetSegment | InsertSegment | RowSegment


def _whole(row: Row) -> Row:
    """Return an inserted row.

    Raises:
        NotASet: a value was not sent.
    """
    if has_unchanged(row):
        raise NotASet
    return row


def fill_key(row: Row, old: Row | None, plan: TablePlan) -> None:
    """Take key values that an update says are unchanged from its old row (trap T-41).

    Only those: other unchanged values stay absent, so that the target keeps its own, as the built-in worker does.

    Raises:
        ProtocolError: no old row was sent, so nothing says which row is meant.
    """
    for position in plan.key_positions:
        if row[position] is UNCHANGED:
            if old is None:
                raise ProtocolError("U", 5, "a key value is unchanged and was not sent, nor was the old row")
            row[position] = old[position]


class TableChanges:
    """All changes of one batch to one target table, as segments applied in order; the last one may be empty."""

    __slots__ = (
        "_current",
        "_run",
        "contended",
        "is_whole_table",
        "late_keys",
        "locks_indexes",
        "moved_keys",
        "moved_rows",
        "plan",
        "segments",
        "tree_oid",
        "values",
    )

    def __init__(self, plan: TablePlan) -> None:
        """Start empty, in the best form the plan allows."""
        #: In force for the next change; each segment has its own.
        self.plan = plan
        #: Topmost table of the target's partition tree: rows of two trees never meet.
        self.tree_oid = plan.tree_oid
        self.segments: list[Segment] = []
        #: Keys that rows moved from and to; the dependency check reads them besides the segments' own.
        self.moved_keys: set[Key] = set()
        #: Their rows: before and after. Values of other keys are read from there.
        self.moved_rows: list[tuple[Row, Row]] = []
        #: Other batches that touch the table depend on this one whatever their keys. Once true it stays true: an
        #: earlier plan of the batch may have been wider than the last.
        self.is_whole_table = False
        #: Keys that an earlier batch in flight holds too: their changes are applied when that one has committed, the
        #: others at once. Written when the batch is closed, and only if `can_split`.
        self.late_keys: set[Key] = set()
        #: Keys that an earlier batch in flight may hold; all of them, while the batch is not among those in flight.
        self.contended: set[Key] | None = None
        #: True if rows are updated or deleted. Written by the batch, which counts the places in the table of locks.
        self.locks_indexes = False
        #: Values of unique and foreign keys, read once when the batch is compared first; see `plan/values.py`.
        self.values: dict[object, set[Key] | None] = {}
        #: Takes the next row that moves, if nothing comes before it.
        self._run: RowSegment | None = None
        self._current: Segment = self._open(plan)

    @property
    def is_all_late(self) -> bool:
        """Return whether nothing is to be applied before the late keys."""
        return self.can_split and len(self.late_keys) == len(self.segments[0].net)  # type: ignore[union-attr]  # as said

    @property
    def can_split(self) -> bool:
        """Return whether the changes of some keys can be applied after all others: one net change a key."""
        return not self.is_whole_table and len(self.segments) == 1 and isinstance(self.segments[0], NetSegment)

    def is_compared_by_key(self, other: TableChanges) -> bool:
        """Return whether another batch's changes of the tree depend on these only by keys, unique and foreign ones."""
        return not (self.is_whole_table or other.is_whole_table) and _have_one_form(self.plan, other.plan)

    @property
    def counts(self) -> list[int]:
        """Return the source changes for the apply log: inserts, updates, deletes; not to be changed."""
        if len(self.segments) == 1:
            return self.segments[0].counts
        return [sum(kind) for kind in zip(*[segment.counts for segment in self.segments], strict=True)]

    def use(self, plan: TablePlan) -> None:
        """Continue with another plan of the same table: its columns were announced again inside the batch."""
        if plan is not self.plan:
            before, self.plan = self.plan, plan
            self.tree_oid = plan.tree_oid
            if not _have_one_form(before, plan):
                self.is_whole_table = True
            self._current = self._open(plan)

    def key_sets(self) -> Iterator[set[Key]]:
        """Return every key the batch touches in the table, in sets that are not copies: read only."""
        for segment in self.segments:
            if isinstance(segment, NetSegment) and segment.net:
                yield segment.net.keys()  # type: ignore[misc]  # a key view does what is asked of a set
        if self.moved_keys:
            yield self.moved_keys

    def add(self, frame: bytes) -> None:
        """Add one Insert, Update or Delete frame.

        Raises:
            NotASet: see there.
            ProtocolError: the frame is malformed. Frames of a RowSegment are read later.
        """
        if self.taker(frame[KIND_AT])(frame):
            self.add_by_itself(frame)

    def taker(self, kind: int) -> Taker:
        """Return what takes frames of a kind until `use` or `add_by_itself` is called: saves the call of `add`."""
        return self._current.taker(kind)

    def add_by_itself(self, frame: bytes) -> bool:
        """Apply a frame after what came before and before what follows (trap T-20); a run of them shares a segment.

        Returns:
            True if later frames go to another segment than earlier ones: takers are of no more use.

        Raises:
            ProtocolError: the frame is malformed.
        """
        current = self._current
        if isinstance(current, NetSegment):
            self._note_move(frame)
            run = self._run
            if run is not None and not current.net:
                run.add(frame)
                run.moves.append(self.moved_rows[-1])
                return False
            run = self._last_rows()
            run.add(frame)
            run.moves.append(self.moved_rows[-1])
            # Made again for each of many moves it would cost more than they do.
            self._current = self._open(self.plan) if current.net else self._append(current)
            self._run = run
            return True
        # Without a key any row may be meant. Where updates are refused the statement layer says why.
        self.is_whole_table = True
        last = self._last_rows()
        last.add(frame)
        # Inserts into such a table are part of the net change of its rows.
        self._current = last if self.plan.nets_whole_rows else self._open(self.plan)
        return True

    def _last_rows(self) -> RowSegment:
        """Return the last segment if it takes rows one by one by the plan in force, or begin such a one."""
        self._drop_empty()
        last = self.segments[-1] if self.segments else None
        if not isinstance(last, RowSegment) or last.plan is not self.plan:
            last = RowSegment(self.plan)
            self.segments.append(last)
        return last

    def _append(self, segment: Segment) -> Segment:
        self.segments.append(segment)
        return segment

    def _note_move(self, frame: bytes) -> None:
        old, row = read_update(frame, len(self.plan.columns))
        assert old is not None
        fill_key(row, old, self.plan)
        key_of = key_reader(self.plan)
        self.moved_keys.add(key_of(old))
        self.moved_keys.add(key_of(row))
        self.moved_rows.append((old, row))

    def _open(self, plan: TablePlan) -> Segment:
        self._drop_empty()
        self._run = None
        segment: Segment
        # Without columns a set of rows has no length (trap T-67).
        is_by_row = plan.lane is not Lane.SET or not plan.columns
        if is_by_row or plan.is_table_exclusive or plan.is_shared:
            self.is_whole_table = True
        if is_by_row:
            segment = RowSegment(plan)
        elif plan.key_positions:
            segment = NetSegment(plan)
        else:
            segment = InsertSegment(plan)
        self.segments.append(segment)
        return segment

    def _drop_empty(self) -> None:
        if self.segments and self.segments[-1].is_empty:
            self.segments.pop()


def _have_one_form(one: TablePlan, other: TablePlan) -> bool:
    return one is other or _form(one) == _form(other)


def _form(plan: TablePlan) -> tuple[object, ...]:
    """Return the form of a plan's keys and values: two plans are compared only if their forms are equal."""
    # With positions, because one batch's values are read by the other's plan, and a name is of one schema only.
    unique = [(key.name, key.positions, key.equalities, key.is_nulls_distinct) for key in plan.unique_keys]
    return key_form(plan), tuple(unique)


__all__ = [
    "INSERT",
    "NET_ABSENT",
    "NET_DELETE",
    "NET_INSERT",
    "NET_REPLACE",
    "NET_UPDATE",
    "NULL",
    "InsertSegment",
    "NetSegment",
    "NotASet",
    "RowSegment",
    "Segment",
    "TableChanges",
]
