"""What single source transactions hold of a table: keys and the table itself. Pure.

They are read from the frames again, change by change, because a batch keeps net changes only, and those of all its
transactions together. ``graph.py`` calls this, and says what it is for; unique and foreign keys are in
``track_values.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.applylog_schema import RowCounts
from parapply.lineage.holders import ALL_CHANGES, DependencyCause, note
from parapply.lineage.track_values import Change, ChildTrack, ParentTrack, UniqueTrack
from parapply.plan.keys import key_reader
from parapply.plan.segments import fill_key
from parapply.plan.table import Lane
from parapply.vocabulary import WaitKind
from parapply.wire.rows import DELETE, INSERT, NULL, UNCHANGED, read_delete, read_insert, read_update

if TYPE_CHECKING:
    from parapply.lineage.holders import Found, Holders
    from parapply.plan.keys import Key
    from parapply.plan.table import TablePlan
    from parapply.wire.rows import Row


class Track:
    """One table under one plan."""

    def __init__(self, plan: TablePlan, past: Holders) -> None:
        """Start with nothing looked up."""
        self.plan = plan
        self.table = plan.relation.qualified_name
        #: The last transaction that touched it, its rows, and whether it takes the whole table.
        self.seq = 0
        self.is_taken = False
        self._counts = RowCounts()
        self.is_serial = plan.lane is Lane.SERIAL
        is_by_row = plan.lane is not Lane.SET or not plan.columns
        self._is_whole = is_by_row or plan.is_table_exclusive or plan.is_shared
        self._past = past
        self._holders = past.holders
        self._tree_oid = plan.facts.root_oid
        self._tree = past.tree(self._tree_oid)
        self._n_columns = len(plan.columns)
        self._key_of = key_reader(plan) if plan.key_positions and not self._is_whole else None
        self._key_place = DependencyCause(WaitKind.KEY, self.table)
        self._table_place = DependencyCause(WaitKind.TABLE, self.table)
        self._unique = [UniqueTrack(plan, unique, past) for unique in plan.unique_keys]
        self._children = [ChildTrack(plan, foreign, past) for foreign in plan.foreign_keys]
        self._foreign: list[ChildTrack | ParentTrack] = []
        self._has_more = False  # than its key
        self._version = -1
        past.refer(plan)

    def begin(self, seq: int, rows: dict[str, RowCounts]) -> None:
        """Continue with another transaction, whose rows are counted there."""
        self.seq = seq
        self.is_taken = False
        counts = rows.get(self.table)
        if counts is None:
            counts = rows[self.table] = RowCounts()
        self._counts = counts

    def count(self, kind: int) -> None:
        """Count a row."""
        if kind == INSERT:
            self._counts.insert += 1
        elif kind == DELETE:
            self._counts.delete += 1
        else:
            self._counts.update += 1

    def look(self, frame: bytes, kind: int, found: Found) -> bool:
        """Find what one change meets, and register what it holds; True if it takes the whole table.

        Raises:
            ProtocolError: the frame is malformed.
        """
        key_of = self._key_of
        if self._is_whole or (key_of is None and kind != INSERT):
            return True
        if self._version != self._past.version:  # saves a call
            self._learn()
        old, row = self._rows(frame, kind)
        key: Key | None = None
        weight = 1
        if key_of is not None:
            key = key_of(row if row is not None else old)  # type: ignore[arg-type]  # one of them is there
            if row is not None and old is not None and (was := key_of(old)) != key:
                weight = ALL_CHANGES
                self._meet_key(was, weight, found)
            self._meet_key(key, weight, found)
        if self._has_more:
            is_same_key = kind not in (INSERT, DELETE) and weight == 1
            change = Change(self.seq, old, row, weight, kind == INSERT, is_same_key)
            for unique in self._unique:
                unique.look(change, key, found)
            for other in self._foreign:
                other.look(change, found)
        return False

    def _rows(self, frame: bytes, kind: int) -> tuple[Row | None, Row | None]:
        if kind == INSERT:
            # A value that was not sent is none that others could hold.
            return None, [NULL if value is UNCHANGED else value for value in read_insert(frame, self._n_columns)]
        if kind == DELETE:
            return read_delete(frame, self._n_columns), None
        old, row = read_update(frame, self._n_columns)
        if old is not None:
            fill_key(row, old, self.plan)
        return old, row

    def touch(self, found: Found) -> None:
        """Register that the transaction has touched the table, once, after all its changes."""
        tree, seq = self._tree, self.seq
        if tree.exclusive and tree.exclusive != seq:
            found[tree.exclusive, self._table_place] = ALL_CHANGES
        if self.is_taken:
            tree.meet(seq, self._table_place, found)
            tree.touched.clear()
            tree.exclusive = seq
            self._learn()
            for other in self._foreign:
                other.take(seq, found)
        elif not tree.touched or tree.touched[-1] != seq:
            tree.touched.append(seq)

    def _learn(self) -> None:
        if self._version == self._past.version:
            return
        self._version = self._past.version
        parents = [ParentTrack(self.plan, one, self._past) for one in self._past.referring(self._tree_oid)]
        self._foreign = [*self._children, *parents]
        self._has_more = bool(self._unique or self._foreign)

    def _meet_key(self, key: Key, weight: int, found: Found) -> None:
        seq = self.seq
        before = self._holders.swap(hash((self._tree_oid, key)), seq)
        if before and before != seq:
            note(found, before, self._key_place, weight)
