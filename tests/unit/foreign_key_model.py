"""Parents and children with a unique column, as dictionaries: a publisher, and a target that commits out of order.

In go wishes; out come the publisher's stream, and what a random hand makes of a scheduler's choices. The model shares
nothing with the planner: it looks at rows and at what PostgreSQL would refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from parapply.model import FRAME_HEADER_BYTES, Transaction
from parapply.plan.scheduler import Scheduler
from parapply.plan.table import Equality, ForeignKey, Plans, TablePlan, UniqueKey
from parapply.plan.table_changes import NET_ABSENT, NET_DELETE, NET_INSERT, NET_REPLACE, NET_UPDATE, NetSegment
from parapply.target.catalogue.match import match
from parapply.wire.decode import decode
from parapply.wire.messages import Delete, Insert, TupleData, Update
from parapply.wire.rows import text_of, values_of
from tests import build
from tests.unit import plans

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from parapply.plan.batch import Batch

PARENT, CHILD = 1, 2
Row = tuple[int, int | None]  # id, and the parent's mail or the child's parent
Rows = dict[int, dict[int, Row]]


class Op(NamedTuple):
    """One wish; what is not possible is left out."""

    kind: str  # insert, delete, update, move or commit
    table: int
    key: int
    value: int | None


class Refused(Exception):
    """The target refuses a batch, or reports a count that is not the expected one."""


def plan_of(table: int, *, is_full: bool, is_enforced: bool) -> TablePlan:
    """Return the plan of one of the two tables.

    Args:
        table: PARENT or CHILD.
        is_full: the publisher sends whole old rows.
        is_enforced: the foreign key is.
    """
    value = "mail" if table == PARENT else "pid"
    facts = plans.table([plans.column("id"), plans.column(value)], ["id"], oid=table, root_oid=table, name=f"t{table}")
    columns = [plans.sent("id", is_key=True), plans.sent(value, is_key=is_full)]
    plan = match(plans.relation(*columns, identity="f" if is_full else "d", oid=table, name=f"t{table}"), facts)
    equalities = (Equality.BYTES,)
    if table == PARENT:
        unique = UniqueKey(
            name="mail_key", positions=(1,), equalities=equalities, is_nulls_distinct=True, is_old_sent=is_full
        )
        return replace(plan, unique_keys=(unique,))
    foreign = ForeignKey(
        name="pid_fkey",
        positions=(1,),
        parent_oid=PARENT,
        parent_columns=("id",),
        equalities=equalities,
        is_old_sent=is_full,
        is_enforced=is_enforced,
        is_cascading=False,
    )
    return replace(plan, foreign_keys=(foreign,))


class Source:
    """The publisher: does what is possible of the wishes and writes it down."""

    def __init__(self, *, is_full: bool, is_enforced: bool) -> None:
        """Start empty."""
        self.rows: Rows = {PARENT: {}, CHILD: {}}
        self.plans = Plans()
        self._is_full = is_full
        for table in (PARENT, CHILD):
            plan = plan_of(table, is_full=is_full, is_enforced=is_enforced)
            self.plans.known[plan.relation] = plan
            self.plans.announce(plan.relation)
        self.transactions: list[Transaction] = []
        self._changes: list[bytes] = []

    def run(self, wishes: Sequence[Op]) -> None:
        """Do the wishes and commit."""
        for op in wishes:
            if op.kind == "commit":
                self._commit()
            else:
                self._do(op)
        self._commit()

    def _commit(self) -> None:
        if self._changes:
            number = len(self.transactions) + 1
            transaction = Transaction(number, number * 16, number)
            transaction.end_lsn = number * 16 + 8
            transaction.changes += self._changes
            self.transactions.append(transaction)
            self._changes = []

    def _do(self, op: Op) -> None:
        rows = self.rows[op.table]
        old = rows.get(op.key)
        new = _wished(op, old)
        if (op.kind == "insert") is (old is not None) or (new is not None and new[0] != op.key and new[0] in rows):
            return
        after = {table: dict(held) for table, held in self.rows.items()}
        if old is not None:
            del after[op.table][old[0]]
        if new is not None:
            after[op.table][new[0]] = new
        if refused(after):
            return
        self.rows = after
        self._changes.append(build.xlog_data(self._message(op.table, old, new)))

    def _message(self, table: int, old: Row | None, new: Row | None) -> bytes:
        if old is None:
            assert new is not None
            return build.insert(_cells(new), oid=table)
        sent_key = build.row(_cell(old[0]), build.null())
        if new is None:
            return build.delete(old=_cells(old), oid=table) if self._is_full else build.delete(key=sent_key, oid=table)
        if self._is_full:
            return build.update(_cells(new), old=_cells(old), oid=table)
        return build.update(_cells(new), key=sent_key if old[0] != new[0] else None, oid=table)


def _wished(op: Op, old: Row | None) -> Row | None:
    if op.kind == "delete":
        return None
    if op.kind == "move" and old is not None and op.value is not None:
        return (op.value, old[1])
    return (op.key, op.value)


def _cell(value: int | None) -> bytes:
    return build.null() if value is None else build.text(b"%d" % value)


def _cells(row: Row) -> bytes:
    return build.row(_cell(row[0]), _cell(row[1]))


def refused(rows: Rows) -> str:
    """Return which constraint the rows break; '' if none."""
    mails = [mail for _, mail in rows[PARENT].values() if mail is not None]
    if len(mails) != len(set(mails)):
        return "unique"
    if any(pid is not None and pid not in rows[PARENT] for _, pid in rows[CHILD].values()):
        return "foreign key"
    return ""


@dataclass
class _Open:
    """A target transaction: the rows it has written, None for one that is gone."""

    batch: Batch
    written: dict[tuple[int, int], Row | None] = field(default_factory=dict)


class Target:
    """Executes and commits batches in any order that the scheduler allows."""

    def __init__(self, random: Random, *, is_relaxed: bool, is_exact: bool, is_enforced: bool) -> None:
        """Start empty.

        Args:
            random: chooses what happens next.
            is_relaxed: of the scheduler.
            is_exact: the wire says all, so nothing may be refused; else what is refused is repeated at the head.
            is_enforced: the target refuses children without a parent.
        """
        self.rows: Rows = {PARENT: {}, CHILD: {}}
        self.retries = 0
        self.n_parallel = 0
        self._random = random
        self._is_exact = is_exact
        self._is_enforced = is_enforced
        self._scheduler = Scheduler(is_relaxed=is_relaxed)
        self._ready: list[Batch] = []
        self._open: dict[int, _Open] = {}
        self._at_head: set[int] = set()

    def run(self, coming: list[Batch]) -> None:
        """Bring all batches to their commit.

        Raises:
            AssertionError: something was refused that was known, or cannot go on.
        """
        coming = list(coming)
        while coming or len(self._scheduler):
            startable = [batch for batch in self._ready if batch.seq not in self._open and self._may_start(batch)]
            endable = [open_.batch for open_ in self._open.values() if self._scheduler.may_commit(open_.batch)]
            # More come and start than end, so that many are under way at a time.
            steps = ["come"] * (3 * bool(coming)) + ["start"] * (3 * bool(startable)) + ["end"] * bool(endable)
            assert steps, "nothing can go on"
            step = self._random.choice(steps)
            if step == "come":
                batch = coming.pop(0)
                if self._scheduler.add(batch):
                    self._ready.append(batch)
                waits = (*self._scheduler.waits_of(batch), *self._scheduler.late_waits_of(batch))
                assert all(wait.seq < batch.seq for wait in waits), "an edge to itself or to a later one: a ring"
            elif step == "start":
                self._start(self._random.choice(startable))
            else:
                self._end(self._random.choice(endable))
            self.n_parallel = max(self.n_parallel, len(self._open))

    def _may_start(self, batch: Batch) -> bool:
        return batch.seq not in self._at_head or batch is self._scheduler.head

    def _start(self, batch: Batch) -> None:
        open_ = self._open[batch.seq] = _Open(batch)
        if batch.seq in self._at_head or batch.is_suspect:
            if batch is self._scheduler.head:
                self._in_order(open_)
            else:
                del self._open[batch.seq]
                self._at_head.add(batch.seq)
            return
        self._try(open_, is_late=False)

    def _end(self, batch: Batch) -> None:
        open_ = self._open[batch.seq]
        if batch.seq not in self._at_head and not self._try(open_, is_late=True):
            return
        self.rows = self._view(open_)
        assert not refused(self.rows), "readers see what the source never had"
        del self._open[batch.seq]
        self._ready.remove(batch)
        self._ready += self._scheduler.committed(batch).to_start

    def _try(self, open_: _Open, *, is_late: bool) -> bool:
        try:
            self._execute(open_, is_late=is_late)
        except Refused as error:
            if self._is_exact:
                raise AssertionError(f"{error} although the wire says all") from error
            self.retries += 1
            del self._open[open_.batch.seq]
            self._at_head.add(open_.batch.seq)
            return False
        return True

    def _execute(self, open_: _Open, *, is_late: bool) -> None:
        for changes in open_.batch.table_changes:
            for segment in changes.segments:
                if isinstance(segment, NetSegment):
                    for key, (effect, row) in segment.net.items():
                        if (key in changes.late_keys) is is_late:
                            self._net(
                                open_, changes.plan.facts.oid, effect, [_number(value) for value in values_of(row)]
                            )
                elif not is_late:
                    for frame in segment.frames:  # type: ignore[union-attr]  # rows that moved to another key
                        self._move(open_, changes.plan.facts.oid, frame)
        why = refused(self._view(open_))
        if why == "unique" or (why and self._is_enforced):
            raise Refused(why)

    def _net(self, open_: _Open, table: int, effect: int, values: list[int | None]) -> None:
        key = values[0]
        assert key is not None
        is_there = key in self._view(open_)[table]
        if is_there is (effect in (NET_INSERT, NET_ABSENT)):
            raise Refused("count")
        assert effect in (NET_INSERT, NET_UPDATE, NET_DELETE, NET_REPLACE, NET_ABSENT)
        if effect != NET_ABSENT:
            self._write(open_, table, key, None if effect == NET_DELETE else (key, values[1]))

    def _move(self, open_: _Open, table: int, frame: bytes) -> None:
        old, new = moved_rows(frame)
        if old[0] not in self._view(open_)[table] or new[0] in self._view(open_)[table]:
            raise Refused("count")
        self._write(open_, table, old[0], None)
        self._write(open_, table, new[0], new)

    def _write(self, open_: _Open, table: int, key: int, row: Row | None) -> None:
        for other in self._open.values():
            if other is not open_ and (table, key) in other.written:
                raise AssertionError("one row is locked twice")
        open_.written[table, key] = row

    def _in_order(self, open_: _Open) -> None:
        """Repeat at the head: all earlier ones have committed, so nothing may be refused."""
        for transaction in open_.batch.transactions:
            for frame in transaction.changes:
                assert isinstance(frame, bytes)
                apply_frame(open_.written, frame)
        assert not refused(self._view(open_)), "refused at the head"
        self._at_head.add(open_.batch.seq)

    def _view(self, open_: _Open) -> Rows:
        return view(self.rows, open_.written)


def view(committed: Rows, written: dict[tuple[int, int], Row | None]) -> Rows:
    """Return the rows as a target transaction sees them that has written some."""
    rows = {table: dict(held) for table, held in committed.items()}
    for (table, key), row in written.items():
        if row is None:
            rows[table].pop(key, None)
        else:
            rows[table][key] = row
    return rows


def _number(value: bytes | None) -> int | None:
    text = text_of(value) if value is not None else None
    return None if text is None else int(text)


def moved_rows(frame: bytes) -> tuple[Row, Row]:
    """Return old and new row of an Update frame that moves a row; the old value is known with a full identity only."""
    message = _decoded(frame)
    assert isinstance(message, Update)
    old = message.old or message.key
    assert old is not None
    return _row(old), _row(message.new)


def apply_frame(written: dict[tuple[int, int], Row | None], frame: bytes) -> None:
    """Write one change as it was sent."""
    message = _decoded(frame)
    if isinstance(message, Insert):
        new = _row(message.new)
        written[message.relation_oid, new[0]] = new
    elif isinstance(message, Update):
        old, new = message.old or message.key, _row(message.new)
        if old is not None:
            written[message.relation_oid, _row(old)[0]] = None
        written[message.relation_oid, new[0]] = new
    else:
        assert isinstance(message, Delete)
        gone = message.old or message.key
        assert gone is not None
        written[message.relation_oid, _row(gone)[0]] = None


def _decoded(frame: bytes) -> object:
    return decode(frame[FRAME_HEADER_BYTES:])


def _row(row: TupleData) -> Row:
    key, value = [None if cell.value is None else int(cell.value) for cell in row]
    assert key is not None
    return key, value
