"""Segments: changes of one table that are applied at once, or one by one in order. Pure.

The types of the compiled twin are in ``segments.pxd``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.errors import ProtocolError
from parapply.plan.keys import Key, Order, key_order, key_reader, plain_positions
from parapply.wire.rows import (
    DELETE,
    INSERT,
    KIND_AT,
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
    from collections.abc import Callable

    import cython  # read by the compiler only

    from parapply.plan.table import TablePlan

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
            self._n_plain = len(self._plain) if len(self._plain) <= _MAX_PLAIN else 0
            for index, position in enumerate(sorted(self._plain)[:_MAX_PLAIN]):
                self._wanted[index] = position
                self._found_at[self._plain.index(position)] = index

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
