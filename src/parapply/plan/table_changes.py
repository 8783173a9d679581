"""The changes of a batch for one target table: net changes per key, plain inserts, or rows in order. Pure.

Inside a batch the order between tables does not matter but where foreign keys are enforced (`plan/foreign_keys.py`);
tables where code runs never get here, they are serial. Inside a table it matters only where a set cannot be exact:
there the lane starts a new segment (traps T-20, T-38 to T-41).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.plan.keys import Key, key_form, key_reader
from parapply.plan.segments import (
    NET_ABSENT,
    NET_DELETE,
    NET_INSERT,
    NET_REPLACE,
    NET_UPDATE,
    InsertSegment,
    NetSegment,
    NotASet,
    RowSegment,
    Segment,
    fill_key,
)
from parapply.plan.table import Lane, TablePlan
from parapply.wire.rows import INSERT, KIND_AT, NULL, Row, read_update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.plan.segments import Taker


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
