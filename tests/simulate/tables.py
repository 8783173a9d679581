"""Rows of two tables with their locks, as PostgreSQL keeps them: parents with a unique column, and their children.

A session sees what is committed and what it has written itself. Before a change it waits for the locks of others on the
rows, on the unique values that the change takes or frees, and on the parents that it refers to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parapply.model import FRAME_HEADER_BYTES
from parapply.plan.foreign_keys import deleted_last, parents_first
from parapply.plan.steps import TablesStep
from parapply.plan.table_changes import (
    NET_ABSENT,
    NET_DELETE,
    NET_INSERT,
    NET_REPLACE,
    NET_UPDATE,
    NetSegment,
    RowSegment,
)
from parapply.wire.decode import decode
from parapply.wire.messages import Delete, Insert, Update
from parapply.wire.rows import text_of, values_of
from tests.unit.foreign_key_model import CHILD, PARENT, Row, Rows, moved_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.plan.batch import Batch
    from parapply.plan.table_changes import Segment, TableChanges
    from parapply.wire.messages import TupleData
    from parapply.wire.rows import KeptRow

#: A lock's name: the sort of thing, its table or 0, and its number. True: shared.
Name = tuple[str, int, int]
Locks = dict[Name, bool]
Written = dict[tuple[int, int], Row | None]


class Refused(Exception):
    """A constraint or a row count refuses a change."""


class Change(NamedTuple):
    """One row's change."""

    table: int
    #: The row that must exist; None: of an insert.
    key: int | None
    new: Row | None
    #: Nothing is written, but the row must not exist.
    is_absent: bool = False


class Session:
    """A session with a transaction, or a prepared transaction."""

    def __init__(self) -> None:
        """Start with nothing written."""
        self.written: Written = {}
        self.locks: Locks = {}


class Tables:
    """Committed rows, and who holds which lock."""

    def __init__(self) -> None:
        """Start empty."""
        self.rows: Rows = {PARENT: {}, CHILD: {}}
        self.held: dict[Name, list[Session]] = {}

    def row(self, session: Session, table: int, key: int) -> Row | None:
        """Return a row as a session sees it."""
        at = (table, key)
        return session.written[at] if at in session.written else self.rows[table].get(key)

    def seen(self, session: Session, table: int) -> Iterator[Row]:
        """Return all rows of a table as a session sees them."""
        for key, row in self.rows[table].items():
            if (table, key) not in session.written:
                yield row
        for (other, _), written in session.written.items():
            if other == table and written is not None:
                yield written

    def blocker(self, session: Session, change: Change) -> Session | None:
        """Return a session for which a change has to wait; None: it has all locks now."""
        names = self._names(session, change)
        for name, is_shared in names.items():
            for other in self.held.get(name, ()):
                if other is not session and not (is_shared and other.locks[name]):
                    return other
        self.take(session, names)
        return None

    def take(self, session: Session, names: Locks) -> None:
        """Give locks to a session."""
        for name, is_shared in names.items():
            if name not in session.locks:
                self.held.setdefault(name, []).append(session)
            session.locks[name] = is_shared and session.locks.get(name, True)

    def _names(self, session: Session, change: Change) -> Locks:
        table, key, new, _ = change
        names: Locks = {}
        old = None if key is None else self.row(session, table, key)
        if key is not None:
            names["row", table, key] = False
        if new is not None:
            names["row", table, new[0]] = False
        if table == PARENT:
            values = {row[1] for row in (old, new) if row is not None}
            if old is None or new is None or old[1] != new[1]:
                names |= {("mail", 0, value): False for value in values if value is not None}
            if old is not None and old != new:
                # Also its unique value is a key that children might refer to.
                names["ref", 0, old[0]] = False
        elif new is not None and new[1] is not None and (old is None or old[1] != new[1]):
            names["ref", 0, new[1]] = True
        return names

    def apply(self, session: Session, change: Change) -> None:
        """Make a change whose locks the session has.

        Raises:
            Refused: a constraint or a count.
        """
        table, key, new, is_absent = change
        old = None if key is None else self.row(session, table, key)
        if key is not None and old is None:
            raise Refused("the row is missing")
        if new is not None and new[0] != key and self.row(session, table, new[0]) is not None:
            raise Refused("the row exists")
        if is_absent:
            return
        if table == PARENT:
            self._check_parent(session, old, new)
        elif new is not None and new[1] is not None and self.row(session, PARENT, new[1]) is None:
            raise Refused("the parent is missing")
        if old is not None:
            session.written[table, old[0]] = None
        if new is not None:
            session.written[table, new[0]] = new

    def _check_parent(self, session: Session, old: Row | None, new: Row | None) -> None:
        if new is not None and new[1] is not None:
            others = [row for row in self.seen(session, PARENT) if row != old]
            if any(row[1] == new[1] for row in others):
                raise Refused("the unique value exists")
        is_gone = old is not None and (new is None or new[0] != old[0])
        if is_gone and any(row[1] == old[0] for row in self.seen(session, CHILD)):  # type: ignore[index]
            raise Refused("a child refers to it")

    def commit(self, session: Session) -> None:
        """Make what a session has written visible, and release its locks."""
        for (table, key), row in session.written.items():
            if row is None:
                self.rows[table].pop(key, None)
            else:
                self.rows[table][key] = row
        self.release(session)

    def release(self, session: Session) -> None:
        """Forget what a session has written, and release its locks."""
        self.go_back(session, {}, {})

    def go_back(self, session: Session, written: Written, locks: Locks) -> None:
        """Go back to a savepoint."""
        for name in session.locks.keys() - locks.keys():
            others = self.held[name]
            others.remove(session)
            if not others:
                del self.held[name]
        session.written, session.locks = dict(written), dict(locks)

    def hand_over(self, session: Session, other: Session) -> None:
        """Give all that a session has to another one: it is prepared."""
        written, locks = session.written, session.locks
        self.release(session)
        other.written = written
        self.take(other, locks)


def changes_of(batch: Batch, *, is_late: bool | None) -> Iterator[Change]:
    """Return the changes of a closed batch in the order of its statements.

    Args:
        batch: with two tables that a foreign key ties.
        is_late: of late keys only, or of others only; None: of all.
    """
    for step in batch.steps:
        assert isinstance(step, TablesStep)
        tables = parents_first([*step.tables.values()])
        if any(len(changes.segments) > 1 for changes in tables):
            # No foreign key ties them, or the batch would be suspect.
            for changes in tables:
                for segment in changes.segments:
                    yield from _of_segment(changes, segment, is_late=is_late)
            continue
        last = deleted_last(tables)
        for changes in reversed(tables):
            if id(changes) not in last:
                yield from _deletes(changes, changes.segments[0], is_late=is_late)
        for changes in tables:
            yield from _writes(changes, changes.segments[0], is_late=is_late)
        for changes in reversed(tables):
            if id(changes) in last:
                yield from _deletes(changes, changes.segments[0], is_late=is_late)


def _of_segment(changes: TableChanges, segment: Segment, *, is_late: bool | None) -> Iterator[Change]:
    yield from _deletes(changes, segment, is_late=is_late)
    yield from _writes(changes, segment, is_late=is_late)


def _deletes(changes: TableChanges, segment: Segment, *, is_late: bool | None) -> Iterator[Change]:
    for effect, row in _net(changes, segment, is_late=is_late):
        if effect in (NET_DELETE, NET_REPLACE):
            yield Change(changes.plan.facts.oid, row[0], None)


def _writes(changes: TableChanges, segment: Segment, *, is_late: bool | None) -> Iterator[Change]:
    table = changes.plan.facts.oid
    found = list(_net(changes, segment, is_late=is_late))
    yield from [Change(table, row[0], row) for effect, row in found if effect == NET_UPDATE]
    yield from [Change(table, None, row) for effect, row in found if effect in (NET_INSERT, NET_REPLACE)]
    yield from [Change(table, None, row, is_absent=True) for effect, row in found if effect == NET_ABSENT]
    if isinstance(segment, RowSegment) and not is_late:
        for frame in segment.frames:
            old, new = moved_rows(frame)
            yield Change(table, old[0], new)


def _net(changes: TableChanges, segment: Segment, *, is_late: bool | None) -> Iterator[tuple[int, Row]]:
    if isinstance(segment, NetSegment):
        for key, (effect, values) in segment.net.items():
            if is_late is None or (key in changes.late_keys) is is_late:
                yield effect, _kept(values)


def changes_in_order(frames: Sequence[object]) -> Iterator[Change]:
    """Return changes as they were sent."""
    for frame in frames:
        assert isinstance(frame, bytes)
        message = decode(frame[FRAME_HEADER_BYTES:])
        if isinstance(message, Insert):
            yield Change(message.relation_oid, None, _sent(message.new))
        elif isinstance(message, Update):
            old, new = message.old or message.key, _sent(message.new)
            yield Change(message.relation_oid, new[0] if old is None else _sent(old)[0], new)
        else:
            assert isinstance(message, Delete)
            gone = message.old or message.key
            assert gone is not None
            yield Change(message.relation_oid, _sent(gone)[0], None)


def _kept(row: KeptRow) -> Row:
    key, value = [None if one is None or (text := text_of(one)) is None else int(text) for one in values_of(row)]
    assert key is not None
    return key, value


def _sent(row: TupleData) -> Row:
    key, value = [None if cell.value is None else int(cell.value) for cell in row]
    assert key is not None
    return key, value
