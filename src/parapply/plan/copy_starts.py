"""From which LSN on are the changes of a table applied? Pure.

A table that was copied holds what its snapshot showed, so changes before the snapshot's LSN are left out; one that is
not copied yet gets none. In: transactions as the stream sends them. Out: the same without such changes. Changes are
checked only while there is such a table; afterwards it costs nothing. `target/state/copies.py` says what the states
mean.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from parapply.model import Relation, Transaction
from parapply.plan.steps import read_truncate, without_tables
from parapply.wire.rows import KIND_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

#: Schema and table, as announced.
Name: TypeAlias = "tuple[str, str]"
#: The identity of a table: the publisher's OID, which outlives a rename; its name where an older version wrote that.
Known: TypeAlias = "int | Name"

_relation_at = struct.Struct(">I").unpack_from


class Start(NamedTuple):
    """Where a table joins the stream."""

    lsn: int | None  # commit records at or after it count; None: none does until the table is copied
    is_copied: bool  # its rows are on the target; else changes that count must wait for them

    def counts_at(self, commit_lsn: int) -> bool:
        """Return whether a change that commits there is applied, without waiting."""
        return self.is_copied and self.lsn is not None and self.lsn <= commit_lsn


#: Of a table that is applied from the slot's start.
_FROM_THE_START = Start(0, is_copied=True)
#: Of a table none of whose changes is applied.
NEVER = Start(None, is_copied=False)
#: Of a table whose rows the configuration leaves out: it joins after every LSN, and waits for no copy.
LEFT_OUT = Start((1 << 64) - 1, is_copied=True)


class CopyStarts:
    """Written by intake, which passes announcements, and by the reader of the copy states (`update`)."""

    def __init__(self) -> None:
        """Know of no copies: every change is applied."""
        self._tables: Mapping[Known, Start] = {}
        self._beside: Mapping[int, Start] = {}
        #: Number of known tables that get no changes until they are copied.
        self.n_waiting = 0
        self._others = _FROM_THE_START
        self._left_out: Collection[str] = ()
        self._names: dict[int, Name] = {}
        #: Publisher's OIDs of announced tables some of whose changes are to be left out. While there are any,
        #: transactions must be shown to `waits_for` and `without_skipped`. Written here only.
        self.apart: dict[int, Start] = {}

    @property
    def exact_from_lsn(self) -> int | None:
        """Return the LSN from which on the target equals the publisher; None if tables are not copied yet."""
        starts = [start for start in self._tables.values() if start != LEFT_OUT]
        if any(not start.is_copied or start.lsn is None for start in starts):
            return None
        return max([start.lsn or 0 for start in starts], default=0)

    def update(self, tables: Mapping[Known, Start], beside: Mapping[int, Start], *, is_listed: bool) -> None:
        """Take the facts known of all tables; with `is_listed` a table not among them gets no changes.

        Args:
            tables: that are copied, or wait.
            beside: others that are announced, and count neither as copied nor as waiting.
            is_listed: as said.
        """
        self._tables = tables
        self._beside = beside
        self.n_waiting = sum(start.lsn is None for start in tables.values())
        self._others = NEVER if is_listed else _FROM_THE_START
        starts = {oid: self._start(oid, name) for oid, name in self._names.items()}
        self.apart = {oid: start for oid, start in starts.items() if start.lsn != 0}

    def leave_out(self, schemas: Collection[str]) -> None:
        """Never apply changes in these schemas: they hold the progress of a parapply that applies to the publisher."""
        self._left_out = schemas

    def leaves_out(self, schema: str) -> bool:
        """Return whether a schema is one of `leave_out`."""
        return schema in self._left_out

    def _start(self, oid: int, name: Name) -> Start:
        if name[0] in self._left_out:
            return NEVER
        start = self._tables.get(oid) or self._beside.get(oid)
        return start if start is not None else self._tables.get(name, self._others)

    def _start_of(self, relation: Relation) -> Start:
        return self._start(relation.oid, relation.full_name)

    def name_of(self, oid: int) -> Name | None:
        """Return the name under which a table was announced last."""
        return self._names.get(oid)

    def announce(self, relation: Relation) -> None:
        """Take a relation, before its changes are shown."""
        name = relation.full_name
        self._names[relation.oid] = name
        start = self._start(relation.oid, name)
        if start.lsn != 0:
            self.apart[relation.oid] = start
        else:
            self.apart.pop(relation.oid, None)

    def waits_for(self, transaction: Transaction) -> Name | None:
        """Return a table that is being copied now, and whose rows must be there before the transaction is applied."""
        waiting = {
            oid: self._names[oid]
            for oid, start in self.apart.items()
            if not start.is_copied and start.lsn is not None and start.lsn <= transaction.commit_lsn
        }
        if waiting:
            for change in transaction.changes:
                if not isinstance(change, Relation):
                    for oid in _oids(change):
                        if oid in waiting:
                            return waiting[oid]
        return None

    def without_skipped(self, transaction: Transaction) -> Transaction:
        """Return a transaction, or piece, without the changes that are not applied; whole if it has none.

        Calls come in source order. A table whose start is reached is not checked again.
        """
        for oid, start in list(self.apart.items()):
            if start.counts_at(transaction.commit_lsn):
                del self.apart[oid]
        return _without(transaction, self.apart)

    def is_apart(self, relations: Iterable[Relation], lsn: int) -> bool:
        """Return whether changes of relations may be left out or must wait, in a transaction that commits at an LSN."""
        return any(not self._start_of(one).counts_at(lsn) for one in relations)

    def copying_of(self, relations: Iterable[Relation], commit_lsn: int) -> Name | None:
        """Return a table among relations that is being copied now, and must be there before such a commit."""
        for one in relations:
            start = self._start_of(one)
            if not start.is_copied and start.lsn is not None and start.lsn <= commit_lsn:
                return one.schema, one.name
        return None

    def kept_at(self, commit_lsn: int) -> Callable[[Transaction], Transaction]:
        """Return what `without_skipped` does at a commit's place in the stream, for pieces that are read later."""
        apart = {oid: start for oid, start in self.apart.items() if not start.counts_at(commit_lsn)}
        return lambda piece: _without(piece, apart)


def _without(transaction: Transaction, apart: Mapping[int, Start]) -> Transaction:
    """Return a transaction without the changes of some relations."""
    if not apart:
        return transaction
    changes: list[bytes | Relation] = []
    dropped_bytes = 0
    for change in transaction.changes:
        if isinstance(change, Relation) or (kept := _kept(change, apart)) is change:
            changes.append(change)
        else:
            dropped_bytes += len(change)
            if kept is not None:
                changes.append(kept)
    return transaction if not dropped_bytes else _with_changes(transaction, changes, dropped_bytes)


def _oids(frame: bytes) -> tuple[int, ...]:
    """Return the relations that a change frame names; none if it is too short, which its reader will report."""
    if len(frame) < RELATION_AT + 4:
        return ()
    if frame[KIND_AT] == TRUNCATE:
        return read_truncate(frame).relation_oids
    return (_relation_at(frame, RELATION_AT)[0],)


def _kept(frame: bytes, apart: Mapping[int, Start]) -> bytes | None:
    """Return the rest of a change: the same object, None, or a TRUNCATE of fewer tables."""
    oids = _oids(frame)
    left = [oid for oid in oids if oid not in apart]
    if len(left) == len(oids):
        return frame
    return without_tables(frame, left) if left else None


def _with_changes(whole: Transaction, changes: list[bytes | Relation], dropped_bytes: int) -> Transaction:
    part = Transaction(whole.xid, whole.commit_lsn, whole.commit_time_us)
    part.changes = changes
    part.end_lsn = whole.end_lsn
    part.send_time_us = whole.send_time_us
    part.relations = whole.relations
    part.is_first, part.is_last = whole.is_first, whole.is_last
    part.event = whole.event
    part.has_ddl = whole.has_ddl
    part.size_bytes = max(0, whole.size_bytes - dropped_bytes)
    part.has_truncate = any(not isinstance(change, Relation) and change[KIND_AT] == TRUNCATE for change in changes)
    return part
