"""What single source transactions hold besides the key of a row: unique values and parents. Pure; for ``tracks.py``.

The rules are those of ``values.py``, for one change instead of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.lineage.holders import ALL_CHANGES, DependencyCause, note
from parapply.plan import values
from parapply.plan.keys import value_reader
from parapply.vocabulary import WaitKind
from parapply.wire.rows import UNCHANGED

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.lineage.holders import Found, Holders, Referring
    from parapply.plan.keys import Key
    from parapply.plan.table import ForeignKey, TablePlan, UniqueKey
    from parapply.wire.rows import KeptRow, Row

    ValueOf = Callable[[KeptRow], Key | None]

#: In place of a value's hash: the row has none.
_NO_VALUE: Final = 1
#: What is held of a parent's key.
_COMES_OR_GOES: Final = 1
_REFERRED_TO: Final = 2


class Change(NamedTuple):
    """One change as the further keys of its table see it."""

    seq: int
    old: Row | None
    row: Row | None
    weight: int  # changes that must come after what it meets
    is_insert: bool
    is_same_key: bool  # an update that leaves the row its key


class UniqueTrack:
    """A further unique index."""

    def __init__(self, plan: TablePlan, unique: UniqueKey, past: Holders) -> None:
        """Start with nothing looked up."""
        self._past = past
        self._unique = unique
        # Of this very table: indexes of two leaves may have one name, and no row is in both.
        self._salt = hash((plan.facts.oid, unique.name))
        self._key_place = DependencyCause(WaitKind.KEY, plan.relation.qualified_name)
        self._place = DependencyCause(WaitKind.UNIQUE, plan.relation.qualified_name, unique.name)
        self._of = value_reader(unique.positions, unique.equalities, is_nulls_distinct=unique.is_nulls_distinct)

    def look(self, change: Change, key: Key | None, found: Found) -> None:
        """Find what a change of the row with a key (None where there is none) meets, and register what it holds."""
        holders = self._past.holders
        claimed = self._thing(change.row)
        freed = self._thing(change.old) if self._unique.is_old_sent else self._freed(change.row, key, claimed)
        if claimed:
            before = holders.get(claimed)
            # The same row with the same value as before says nothing new.
            if before and before != change.seq and (before, self._key_place) not in found:
                note(found, before, self._place, change.weight)
            holders.put(claimed, change.seq)
        if freed and freed != claimed:
            holders.put(freed, change.seq)

    def _thing(self, row: Row | None) -> int:
        value = self._of(row) if row is not None else None
        return hash((self._salt, value)) if value is not None else 0

    def _freed(self, row: Row | None, key: Key | None, claimed: int) -> int:
        """Return the value that the row had, as far as an earlier change has said so."""
        if key is None:
            return 0
        claims = self._past.claims
        of_row = hash((self._salt, key))
        if row is None or not any(row[position] is UNCHANGED for position in self._unique.positions):
            before = claims.get(of_row)
            claims.put(of_row, claimed or _NO_VALUE)
            return before if before != _NO_VALUE else 0
        return 0


class ChildTrack:
    """A foreign key of the table."""

    def __init__(self, plan: TablePlan, foreign: ForeignKey, past: Holders) -> None:
        """Start with nothing looked up."""
        self._past = past
        self._foreign = foreign
        self._salt = _salt(foreign)
        self._place = DependencyCause(WaitKind.FOREIGN_KEY, plan.relation.qualified_name, foreign.name)
        self._of: ValueOf | None = None
        if foreign.equalities:
            self._of = value_reader(foreign.positions, foreign.equalities, is_nulls_distinct=True)

    def look(self, change: Change, found: Found) -> None:
        """Find what a change meets, and register what it holds."""
        past, of, seq = self._past, self._of, change.seq
        if of is None:  # its parent cannot be told from others
            past.tree(self._foreign.parent_oid).meet(seq, self._place, found)
            return
        if not change.is_insert and not self._foreign.is_old_sent:
            past.let_go[self._salt] = seq
        for row in (change.old if self._foreign.is_old_sent else None, change.row):
            value = of(row) if row is not None else None
            if value is not None:
                before = past.holders.get(hash((self._salt, _COMES_OR_GOES, value)))
                if before and before != seq:
                    note(found, before, self._place, change.weight)
                past.holders.put(hash((self._salt, _REFERRED_TO, value)), seq)

    def take(self, seq: int, found: Found) -> None:
        """Take the whole table: it may refer to any parent, before and after."""
        self._past.tree(self._foreign.parent_oid).meet(seq, self._place, found)
        self._past.let_go[self._salt] = seq


class ParentTrack:
    """A foreign key that refers to the table."""

    def __init__(self, plan: TablePlan, referring: Referring, past: Holders) -> None:
        """Start with nothing looked up."""
        self._past = past
        self._child_tree = past.tree(referring.child_oid)
        self._salt = _salt(referring.foreign)
        self._place = DependencyCause(WaitKind.FOREIGN_KEY, plan.relation.qualified_name, referring.foreign.name)
        self._of = values.parent_reader(plan, referring.foreign)
        self._is_key = values.refers_to_key(plan, referring.foreign)

    def look(self, change: Change, found: Found) -> None:
        """Find what a change meets, and register what it holds."""
        past, of, seq = self._past, self._of, change.seq
        if of is None or (change.row is None and not self._is_key):
            self._child_tree.meet(seq, self._place, found)  # which one goes is not on the wire
            return
        if self._is_key and change.is_same_key:
            return
        for row in (change.old if self._is_key else None, change.row):
            value = of(row) if row is not None else None
            if value is not None:
                before = past.holders.get(hash((self._salt, _REFERRED_TO, value)))
                if before and before != seq:
                    note(found, before, self._place, change.weight)
                past.holders.put(hash((self._salt, _COMES_OR_GOES, value)), seq)
        let_go = past.let_go.get(self._salt, 0)
        if not change.is_insert and let_go and let_go != seq:
            found[let_go, self._place] = ALL_CHANGES

    def take(self, seq: int, found: Found) -> None:
        """Take the whole table: any parent may come or go."""
        self._child_tree.meet(seq, self._place, found)


def _salt(foreign: ForeignKey) -> int:
    return hash((foreign.parent_oid, foreign.parent_columns, foreign.equalities))
