"""What a batch holds for one target table: net changes per key, plain inserts, or rows in order. Pure.

Inside a batch the order between tables does not matter (replica role: foreign keys are not checked and triggers do not
fire; tables where code runs never get here, they are serial). Inside a table it matters only where a set cannot be
exact: there the lane starts a new segment (traps T-20, T-38 to T-41).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.errors import ProtocolError
from parapply.plan.keys import Key, key_form, key_reader
from parapply.plan.table import Lane, TablePlan
from parapply.wire.rows import DELETE, INSERT, KIND_AT, NULL, UNCHANGED, Row, read_delete, read_insert, read_update

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Net effect of one key's changes inside one segment.
NET_INSERT: Final = 1  # the row must not exist, then does
NET_UPDATE: Final = 2  # the row exists; values present are set
NET_DELETE: Final = 3  # the row exists, then does not
NET_REPLACE: Final = 4  # deleted, then inserted: both are done, so that columns only the target has start anew
NET_ABSENT: Final = 5  # inserted, then deleted: nothing to write, but the row must not exist


class NotASet(Exception):
    """The changes of one key contradict each other (two inserts, an update after a delete).

    The set form would hide that, so the batch is applied row by row at the head, where the target says what is wrong.
    """


class NetSegment:
    """The net change of each key, and the rows to write it.

    Applied as deletes, then updates, then inserts: no two entries are for one row, so only what other unique indexes
    forbid on the way can fail, and that fails on the target, loudly (trap T-38).
    """

    __slots__ = ("_key_of", "_n_columns", "has_unchanged", "net", "plan")

    def __init__(self, plan: TablePlan) -> None:
        """Start empty for a table whose lane is SET and that has a key."""
        self.plan = plan
        #: Per key: [net effect, row]. Written here, read by the dependency check (its keys) and by the statements.
        #: Only the row of a NET_UPDATE can hold UNCHANGED, and never in a key column.
        self.net: dict[Key, tuple[int, Row]] = {}
        #: Whether any row holds UNCHANGED, so that updates must be grouped by the columns present.
        self.has_unchanged = False
        self._key_of = key_reader(plan)
        self._n_columns = len(plan.columns)

    @property
    def is_empty(self) -> bool:
        """Tell whether there is no change."""
        return not self.net

    def insert(self, frame: bytes) -> None:
        """Add an Insert frame.

        Raises:
            NotASet: the key already exists inside the batch.
            ProtocolError: the frame is malformed.
        """
        row = read_insert(frame, self._n_columns)
        key = self._key_of(row)
        before = self.net.get(key)
        if before is None:
            self.net[key] = (NET_INSERT, row)
        elif before[0] == NET_DELETE:
            self.net[key] = (NET_REPLACE, row)
        elif before[0] == NET_ABSENT:
            self.net[key] = (NET_INSERT, row)
        else:
            raise NotASet

    def update(self, frame: bytes) -> bool:
        """Add an Update frame; False if it moves the row to another key, which no set can do (trap T-38).

        Raises:
            NotASet: the row was deleted inside the batch.
            ProtocolError: the frame is malformed.
        """
        old, row = read_update(frame, self._n_columns)
        is_partial = UNCHANGED in row
        if is_partial:
            _fill_key(row, old, self.plan)
            is_partial = UNCHANGED in row
        key = self._key_of(row)
        if old is not None and self._key_of(old) != key:
            return False
        before = self.net.get(key)
        if before is None:
            self.net[key] = (NET_UPDATE, row)
            self.has_unchanged |= is_partial
            return True
        effect, earlier = before
        if effect in (NET_DELETE, NET_ABSENT):
            raise NotASet
        if is_partial:
            # An insert followed by an update with unchanged TOAST is the insert with both (trap T-41).
            row = [was if now is UNCHANGED else now for was, now in zip(earlier, row, strict=True)]
            self.has_unchanged = self.has_unchanged or UNCHANGED in row
        self.net[key] = (effect, row)
        return True

    def delete(self, frame: bytes) -> None:
        """Add a Delete frame.

        Raises:
            NotASet: the row was deleted inside the batch already.
            ProtocolError: the frame is malformed.
        """
        row = read_delete(frame, self._n_columns)
        key = self._key_of(row)
        before = self.net.get(key)
        if before is None or before[0] == NET_UPDATE:
            self.net[key] = (NET_DELETE, row)
        elif before[0] == NET_INSERT:
            self.net[key] = (NET_ABSENT, row)
        elif before[0] == NET_REPLACE:
            self.net[key] = (NET_DELETE, row)
        else:
            raise NotASet


class InsertSegment:
    """Inserts into a table without a key: nothing to net, nothing to depend on."""

    __slots__ = ("_n_columns", "plan", "rows")

    def __init__(self, plan: TablePlan) -> None:
        """Start empty."""
        self.plan = plan
        self.rows: list[Row] = []
        self._n_columns = len(plan.columns)

    @property
    def is_empty(self) -> bool:
        """Tell whether there is no change."""
        return not self.rows

    def insert(self, frame: bytes) -> None:
        """Add an Insert frame.

        Raises:
            ProtocolError: the frame is malformed.
        """
        self.rows.append(read_insert(frame, self._n_columns))


class RowSegment:
    """Change frames of one table, applied one by one in this order."""

    __slots__ = ("frames", "plan")

    def __init__(self, plan: TablePlan) -> None:
        """Start empty."""
        self.plan = plan
        self.frames: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """Tell whether there is no change."""
        return not self.frames


Segment = NetSegment | InsertSegment | RowSegment


class TableChanges:
    """All changes of one batch to one target table, as segments applied in order; the last one may be empty."""

    __slots__ = ("_current", "_net", "counts", "is_whole_table", "key_form", "moved_keys", "plan", "segments")

    def __init__(self, plan: TablePlan) -> None:
        """Start empty, in the best form the plan allows."""
        #: In force for the next change; each segment has its own.
        self.plan = plan
        self.segments: list[Segment] = []
        #: Keys that rows moved from and to; the dependency check reads them beside the segments' own.
        self.moved_keys: set[Key] = set()
        #: Other batches that touch the table depend on this one whatever their keys. Once true it stays true: an
        #: earlier plan of the batch may have been wider than the last.
        self.is_whole_table = False
        #: What all keys of the batch are made of; of no meaning with `is_whole_table`.
        self.key_form = key_form(plan)
        #: Source changes: inserts, updates, deletes; for the apply log.
        self.counts = [0, 0, 0]
        self._net: NetSegment | None = None
        self._current: Segment = self._open(plan)

    def use(self, plan: TablePlan) -> None:
        """Go on with another plan of the same table: its columns were announced anew inside the batch."""
        if plan is not self.plan:
            self.plan = plan
            if key_form(plan) != self.key_form:
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
        kind = frame[KIND_AT]
        net = self._net
        if net is not None:
            if kind == INSERT:
                self.counts[0] += 1
                net.insert(frame)
            elif kind == DELETE:
                self.counts[2] += 1
                net.delete(frame)
            else:
                self.counts[1] += 1
                if not net.update(frame):
                    self._move(frame)
            return
        self.counts[0 if kind == INSERT else 2 if kind == DELETE else 1] += 1
        current = self._current
        if isinstance(current, RowSegment):
            current.frames.append(frame)
        elif kind == INSERT and isinstance(current, InsertSegment):
            current.insert(frame)
        else:
            # Only a table whose updates are refused meets this: the statement layer says why, with the row in order.
            self.is_whole_table = True
            self._by_itself(frame)

    def _move(self, frame: bytes) -> None:
        """Apply a key move by itself, after what came before and before what follows (trap T-20)."""
        old, row = read_update(frame, len(self.plan.columns))
        assert old is not None
        _fill_key(row, old, self.plan)
        key_of = key_reader(self.plan)
        self.moved_keys.add(key_of(old))
        self.moved_keys.add(key_of(row))
        self._by_itself(frame)

    def _by_itself(self, frame: bytes) -> None:
        """Put a frame between two segments; a run of such frames shares one."""
        self._drop_empty()
        last = self.segments[-1] if self.segments else None
        if not isinstance(last, RowSegment) or last.plan is not self.plan:
            last = RowSegment(self.plan)
            self.segments.append(last)
        last.frames.append(frame)
        self._current = self._open(self.plan)

    def _open(self, plan: TablePlan) -> Segment:
        self._drop_empty()
        self._net = None
        segment: Segment
        # Without columns a set of rows has no length (trap T-67).
        is_by_row = plan.lane is not Lane.SET or not plan.columns
        if is_by_row or plan.is_table_exclusive or plan.is_shared:
            self.is_whole_table = True
        if is_by_row:
            segment = RowSegment(plan)
        elif plan.key_positions:
            segment = self._net = NetSegment(plan)
        else:
            segment = InsertSegment(plan)
        self.segments.append(segment)
        return segment

    def _drop_empty(self) -> None:
        if self.segments and self.segments[-1].is_empty:
            self.segments.pop()


def _fill_key(row: Row, old: Row | None, plan: TablePlan) -> None:
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


__all__ = ["INSERT", "NULL", "InsertSegment", "NetSegment", "NotASet", "RowSegment", "Segment", "TableChanges"]
