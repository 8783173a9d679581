"""A batch: one target transaction holding whole source transactions (or the pieces of one large one). Pure.

A batch is a list of steps applied in order. Most have one step, the changes of each table. TRUNCATE of several
relations is a step of its own (trap T-26); a transaction that touches a serial table is one step of raw frames in
source order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parapply.errors import ParapplyError, ProtocolError
from parapply.model import FRAME_HEADER_BYTES, Relation, Transaction
from parapply.plan.changes import NotASet, TableChanges
from parapply.plan.table import Lane, TablePlan
from parapply.wire.decode import decode
from parapply.wire.messages import Truncate
from parapply.wire.rows import KIND_AT, MARK_AT, RELATION_AT, TRUNCATE, malformed

if TYPE_CHECKING:
    from parapply.plan.dependencies import Wait
    from parapply.plan.segments import Taker

_OID_BYTES = 4
_relation_at = struct.Struct(">I").unpack_from


@dataclass(slots=True)
class TablesStep:
    """Changes of tables that do not care about each other, by target table OID."""

    tables: dict[int, TableChanges]


@dataclass(frozen=True, slots=True)
class TruncateStep:
    """One TRUNCATE of all its relations at once."""

    plans: tuple[TablePlan, ...]
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class OrderedStep:
    """Change frames in source order, each with the plan it is decoded with; applied one by one."""

    changes: list[tuple[TablePlan, bytes] | TruncateStep]


Step = TablesStep | TruncateStep | OrderedStep


class Plans:
    """The table plans in force at a point of the stream.

    `known` maps every announced relation to its plan; the leader writes it before the announcement is read here.
    `current` maps a publisher's OID to the plan of the relation last announced under it (trap T-71).
    `refused` holds announced relations that cannot be applied, and why. That is no error before a change of them comes:
    pgoutput announces a partition beside the root that it is published as, and the target may have no such partition.
    """

    __slots__ = ("current", "known", "may_be_serial", "refused")

    def __init__(self) -> None:
        """Start with nothing announced."""
        self.known: dict[Relation, TablePlan] = {}
        self.current: dict[int, TablePlan] = {}
        self.refused: dict[Relation, ParapplyError] = {}
        #: False only if whoever fills `known` is sure that no table in it is serial: spares a look at each transaction.
        self.may_be_serial = True

    def announce(self, relation: Relation) -> None:
        """Put a relation in force; a refused one leaves its OID without a plan."""
        if relation in self.refused:
            self.current.pop(relation.oid, None)
        else:
            self.current[relation.oid] = self.known[relation]

    def view(self) -> Plans:
        """Return plans that can move ahead without moving these."""
        ahead = Plans()
        ahead.known, ahead.refused, ahead.may_be_serial = self.known, self.refused, self.may_be_serial
        ahead.current = dict(self.current)
        return ahead

    def of(self, frame: bytes) -> TablePlan:
        """Return the plan of a change frame.

        Raises:
            ProtocolError: the change names a relation that was never announced, or is cut before the name.
            TargetRefused: the relation cannot be applied.
        """
        if len(frame) < RELATION_AT + _OID_BYTES:
            raise malformed(frame, 0)
        return self.of_oid(_relation_at(frame, RELATION_AT)[0], chr(frame[KIND_AT]), 1)

    def of_oid(self, oid: int, kind: str, offset: int) -> TablePlan:
        """Return the plan of the publisher's OID at a place of a message.

        Raises:
            ProtocolError, TargetRefused: as `of`.
        """
        plan = self.current.get(oid)
        if plan is None:
            # The last one first: an OID may have been announced several times.
            errors = [error for relation, error in self.refused.items() if relation.oid == oid]
            raise errors[-1] if errors else ProtocolError(kind, offset, f"relation {oid} was never announced")
        return plan


class Limits:
    """When a batch is large enough to be closed; it may go beyond by its last transaction."""

    __slots__ = ("changes", "size_bytes", "transactions")

    def __init__(self, transactions: int, changes: int, size_bytes: int) -> None:
        """Keep them."""
        self.transactions = transactions
        self.changes = changes
        self.size_bytes = size_bytes


class Batch:
    """Source transactions on their way into one target transaction.

    Filled by the leader (`add`), read by one worker, never changed after it is closed.
    """

    __slots__ = (
        "_by_relation",
        "_takers",
        "commit_time_us",
        "end_lsn",
        "first_commit_time_us",
        "first_lsn",
        "has_truncate",
        "is_barrier",
        "is_large",
        "is_suspect",
        "late_for",
        "n_changes",
        "seq",
        "size_bytes",
        "steps",
        "table_changes",
        "transactions",
        "truncates",
    )

    def __init__(self, seq: int) -> None:
        """Start empty. `seq` counts batches in source order."""
        self.seq = seq
        #: Kept until the commit: a failed batch is split and retried from them.
        self.transactions: list[Transaction] = []
        self.steps: list[Step] = []
        #: Every table the batch touches, over all steps; for dependencies and the apply log.
        self.table_changes: list[TableChanges] = []
        #: Waits for everything earlier to commit, and everything later waits for it.
        self.is_barrier = False
        #: One large transaction in pieces: raw frames are not kept, a failure replays the stream.
        self.is_large = False
        #: The set form would hide a contradiction: go to the head and row by row at once.
        self.is_suspect = False
        #: The last batch that holds some of its late keys; None if it has none.
        self.late_for: Wait | None = None
        self.has_truncate = False
        self.truncates: list[TruncateStep] = []
        self.n_changes = 0
        self.size_bytes = 0
        self.first_lsn = 0
        self.end_lsn = 0
        self.first_commit_time_us = 0
        self.commit_time_us = 0
        #: Cache for one step: publisher's OID to the changes of its target table.
        self._by_relation: dict[int, TableChanges] = {}
        #: Cache on top of it: kind and OID, as the bytes of a frame, to what takes such frames. Emptied whenever a
        #: table may go on with another segment or plan.
        self._takers: dict[bytes, Taker] = {}

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was added yet."""
        return not self.transactions

    def add(self, transaction: Transaction, plans: Plans) -> None:
        """Add one transaction (or piece), reading its changes.

        With `is_suspect` set afterwards, steps and keys are incomplete: only `transactions` counts, and the batch
        should be closed.

        Raises:
            ProtocolError: a change cannot be read; neither batch nor plans are of use any more.
        """
        self._count(transaction)
        if plans.may_be_serial and is_serial(transaction, plans):
            self.is_barrier = True
            self._forget()
            self.steps.append(OrderedStep(ordered_changes(transaction, plans)))
            return
        has_relations = bool(transaction.relations)
        takers = self._takers
        try:
            for change in transaction.changes:
                if has_relations and isinstance(change, Relation):
                    self._announce(change, plans)
                    continue
                frame: bytes = change  # type: ignore[assignment]  # only Relations are announced
                # A frame too short for this is in no cache.
                take = takers.get(frame[KIND_AT:MARK_AT])
                if take is None:
                    if frame[KIND_AT] == TRUNCATE:
                        self._truncate(frame, plans)
                        continue
                    take = self._taker(frame, plans)
                if take(frame):
                    self._by_relation[_relation_at(frame, RELATION_AT)[0]].add_by_itself(frame)
                    takers.clear()
        except NotASet:
            self._give_up_sets(transaction, plans)

    def add_run(self, transactions: list[Transaction], at: int, plans: Plans, limits: Limits) -> int:
        """Add transactions from an index on while they are whole and announce nothing, and return the index behind.

        This is `add` for nearly everything there is. It ends at a limit, too: the batch must be closed then. The plans
        must be without serial and refused tables.

        Raises:
            ProtocolError: as `add`.
        """
        count = len(transactions)
        while at < count:
            transaction = transactions[at]
            if transaction.relations or not (transaction.is_first and transaction.is_last):
                break
            self.add(transaction, plans)
            at += 1
            if self.is_full(limits):
                break
        return at

    def is_full(self, limits: Limits) -> bool:
        """Tell whether nothing should be added any more."""
        return (
            self.is_suspect
            or len(self.transactions) >= limits.transactions
            or self.n_changes >= limits.changes
            or self.size_bytes >= limits.size_bytes
        )

    def _count(self, transaction: Transaction) -> None:
        if not self.transactions:
            self.first_commit_time_us = transaction.commit_time_us
        if not (transaction.is_first and transaction.is_last):
            # What the pieces to come will touch is not known, so nothing may run beside this one.
            self.is_large = self.is_barrier = True
        self.transactions.append(transaction)
        # Only the last piece of a large transaction knows where it ends.
        self.first_lsn = self.first_lsn or transaction.end_lsn
        self.end_lsn = transaction.end_lsn
        self.commit_time_us = transaction.commit_time_us
        self.n_changes += len(transaction.changes) - len(transaction.relations)
        self.size_bytes += transaction.size_bytes

    def _announce(self, relation: Relation, plans: Plans) -> None:
        plans.announce(relation)
        # Its next change looks the plan up again.
        self._by_relation.pop(relation.oid, None)
        self._takers.clear()

    def _forget(self) -> None:
        """Begin a new step: what comes is not merged with what came before."""
        self._by_relation.clear()
        self._takers.clear()

    def _taker(self, frame: bytes, plans: Plans) -> Taker:
        """Return what takes a frame, and keep it for others of its kind and relation."""
        if len(frame) < MARK_AT:
            raise malformed(frame, 0)
        oid = _relation_at(frame, RELATION_AT)[0]
        table = self._by_relation.get(oid)
        if table is None:
            table = self._table(oid, plans.of(frame))
        take = self._takers[frame[KIND_AT:MARK_AT]] = table.taker(frame[KIND_AT])
        return take

    def _table(self, relation_oid: int, plan: TablePlan) -> TableChanges:
        """Return the changes of a target table in the current step.

        Several published relations can map to one target table (partitions): they share one lane, in source order,
        and each change of relation goes on with the other's plan.
        """
        step = self.steps[-1] if self.steps else None
        if not isinstance(step, TablesStep):
            step = TablesStep({})
            self.steps.append(step)
        table = step.tables.get(plan.facts.oid)
        if table is None:
            table = step.tables[plan.facts.oid] = TableChanges(plan)
            self.table_changes.append(table)
        elif table.plan is not plan:
            table.use(plan)
            self._takers.clear()
            # Changes of another relation that maps here must not be read with this one's columns.
            for other, changes in list(self._by_relation.items()):
                if changes is table:
                    del self._by_relation[other]
        self._by_relation[relation_oid] = table
        return table

    def _truncate(self, frame: bytes, plans: Plans) -> None:
        step = truncate_step(frame, plans)
        self.steps.append(step)
        self.truncates.append(step)
        self.has_truncate = True
        self.is_barrier = True
        self._forget()

    def _give_up_sets(self, transaction: Transaction, plans: Plans) -> None:
        """Mark the batch for row by row application; relations announced later in the transaction still count."""
        self.is_suspect = True
        for change in transaction.changes:
            if isinstance(change, Relation):
                plans.announce(change)
        self._forget()


def ordered_changes(transaction: Transaction, plans: Plans) -> list[tuple[TablePlan, bytes] | TruncateStep]:
    """Return a transaction's changes in source order, each with its plan; announcements on the way are put in force."""
    changes: list[tuple[TablePlan, bytes] | TruncateStep] = []
    for change in transaction.changes:
        if isinstance(change, Relation):
            plans.announce(change)
        elif change[KIND_AT] == TRUNCATE:
            changes.append(truncate_step(change, plans))
        else:
            changes.append((plans.of(change), change))
    return changes


def truncate_step(frame: bytes, plans: Plans) -> TruncateStep:
    """Read a Truncate frame.

    Raises:
        ProtocolError: a relation was never announced, or the bytes are malformed.
        TargetRefused: a relation cannot be applied.
    """
    message = decode(frame[FRAME_HEADER_BYTES:])
    assert isinstance(message, Truncate)
    if not message.relation_oids:
        raise ProtocolError("T", 1, "no relation is truncated")
    tables = [plans.of_oid(oid, "T", 5) for oid in message.relation_oids]
    return TruncateStep(tuple(tables), message.restart_identity)


def check_plans(transaction: Transaction, plans: Plans) -> None:
    """Make sure that every change can be applied, before anything of the transaction is in a batch.

    Raises:
        ProtocolError, TargetRefused: as `Plans.of`.
    """
    if plans.refused:
        ordered_changes(transaction, plans.view())


def is_serial(transaction: Transaction, plans: Plans) -> bool:
    """Tell whether a transaction touches a table where the target runs code: then all of it keeps source order.

    The leader gives such a transaction a batch of its own.

    Raises:
        ProtocolError: a change names a relation that was never announced, or is malformed.
    """
    if not plans.may_be_serial:
        return False
    # A view of the plans as the changes see them; the real ones move only when the changes are read.
    ahead = plans.view()
    for change in transaction.changes:
        if isinstance(change, Relation):
            ahead.announce(change)
        else:
            touched = truncate_step(change, ahead).plans if change[KIND_AT] == TRUNCATE else (ahead.of(change),)
            if any(plan.lane is Lane.SERIAL for plan in touched):
                return True
    return False
