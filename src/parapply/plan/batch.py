"""A batch: one target transaction holding whole source transactions (or the pieces of one large one). Pure.

A batch is a list of steps applied in order; see `steps.py`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from parapply.model import Relation, Transaction
from parapply.plan.foreign_keys import can_order, overlaps_itself
from parapply.plan.steps import (
    OrderedStep,
    Step,
    TablesStep,
    TruncateStep,
    are_planned,
    is_serial,
    ordered_changes,
    truncate_step,
)
from parapply.plan.table_changes import NetSegment, NotASet, TableChanges
from parapply.plan.values import claims_unknown
from parapply.wire.rows import DELETE, INSERT, KIND_AT, MARK_AT, RELATION_AT, TRUNCATE, malformed

if TYPE_CHECKING:
    import cython  # read by the compiler only

    from parapply.plan.table import Plans, TablePlan
    from parapply.plan.table_changes import Taker
else:
    from parapply import uncompiled as cython

_relation_at = struct.Struct(">I").unpack_from

_MAX_KNOWN: Final = 8
_INSERT, _DELETE = INSERT, DELETE  # C numbers in the compiled twin

#: Transactions of a serial batch at most: each is a round of the target's own, so larger ones save nothing.
SERIAL_TRANSACTIONS: Final = 500

#: Changes of each table, on average, below which a batch is thin.
FEW_CHANGES: Final = 128
#: A batch of fewer tables is not thin: what their statements cost by themselves is little.
LEAST_THIN_TABLES: Final = 64


def has_few_changes(n_changes: int, n_tables: int) -> bool:
    """Return whether a batch has few changes for each of many tables: in a larger one each change would cost less."""
    return n_tables >= LEAST_THIN_TABLES and n_changes < FEW_CHANGES * n_tables


class Limits:
    """When a batch is large enough to be closed; it may go beyond by its last transaction."""

    __slots__ = (
        "changes",
        "most_bytes",
        "most_changes",
        "most_places",
        "most_transactions",
        "places",
        "size_bytes",
        "transactions",
    )

    def __init__(self, transactions: int, changes: int, size_bytes: int, places: int = 1 << 30) -> None:
        """Keep the limits. The limits of a thin batch, `most_...`, are the same until one of both is changed.

        `most_places` is for a batch that has at least half of its places for tables and not for their indexes.

        Args:
            transactions: source transactions.
            changes: of all its tables.
            size_bytes: of its changes.
            places: in the target's table of locks, as `Batch.n_places` counts them.
        """
        self.transactions = self.most_transactions = transactions
        self.changes = self.most_changes = changes
        self.size_bytes = self.most_bytes = size_bytes
        self.places = self.most_places = places


class Batch:
    """Source transactions on their way into one target transaction.

    Filled by the leader (`add`), read by one worker, never changed after it is closed.
    """

    __slots__ = (
        "_after",
        "_by_relation",
        "_emptied",
        "_first",
        "_known",
        "_known_tags",
        "_n_known",
        "_rows",
        "_takers",
        "commit_time_us",
        "end_lsn",
        "first_commit_time_us",
        "first_lsn",
        "has_foreign_keys",
        "has_truncate",
        "is_barrier",
        "is_fence",
        "is_serial",
        "is_suspect",
        "n_changes",
        "n_places",
        "seq",
        "size_bytes",
        "steps",
        "table_changes",
        "transactions",
        "truncates",
    )

    # An array of numbers in the compiled twin, which is the only one to have it.
    _known_tags: list[int]

    def __init__(self, seq: int) -> None:
        """Start empty; `seq` counts batches in source order."""
        self.seq = seq
        #: Kept until the commit: a failed batch is split and retried from them.
        self.transactions: list[Transaction] = []
        self.steps: list[Step] = []
        #: Every table the batch touches, over all steps, and what a TRUNCATE has taken out of them; for dependencies
        #: and the apply log.
        self.table_changes: list[TableChanges] = []
        #: Waits for everything earlier to commit, and everything later waits for it.
        self.is_barrier = False
        #: A barrier, because tables have changed since the batch before, and their facts cannot be compared. Written
        #: when it is closed.
        self.is_fence = False
        #: True if a plan of its tables has foreign keys that matter. Known when it is closed.
        self.has_foreign_keys = False
        #: Code on the target may see the order and the limits of its transactions: each is a target transaction of its
        #: own, row by row, one after the other.
        self.is_serial = False
        #: The set form would hide a contradiction, so apply it row by row at the head, at once.
        self.is_suspect = False
        self.has_truncate = False
        #: As they came, whatever became of them in the steps.
        self.truncates: list[TruncateStep] = []
        self.n_changes = 0
        #: Places that it takes in the target's table of locks until its commit: one for each table and, where rows are
        #: updated or deleted, about one for each of the table's indexes.
        self.n_places = 0
        self.size_bytes = 0
        self.first_lsn = 0
        self.end_lsn = 0
        self.first_commit_time_us = 0
        self.commit_time_us = 0
        #: Where the steps begin that are still added to: rows, each TRUNCATE, and rows of the tables that it emptied.
        self._first = 0
        self._rows: TablesStep | None = None
        self._after: TablesStep | None = None
        self._emptied: set[int] = set()
        #: Cache for one step: publisher's OID to the changes of its target table.
        self._by_relation: dict[int, TableChanges] = {}
        #: Cache on top of it: kind and OID, as the bytes of a frame, to what takes such frames. Emptied whenever a
        #: table may continue with another segment or plan.
        self._takers: dict[bytes, Taker] = {}
        if cython.compiled:
            # The same without Python's calls: kind and OID as a number, and the segment.
            self._known: list[NetSegment] = []
            self._n_known = 0

    @property
    def runs_alone(self) -> bool:
        """Return whether everything earlier commits before it starts, and it before anything later starts."""
        return self.is_barrier or self.is_suspect or self.is_fence

    @property
    def has_late_keys(self) -> bool:
        """Return whether changes of some keys are applied after all others; see `scheduler.py`."""
        return any(changes.late_keys for changes in self.table_changes)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was added yet."""
        return not self.transactions

    def add(self, transaction: Transaction, plans: Plans) -> None:
        """Add one transaction (or piece), reading its changes.

        With `is_suspect` set afterwards, steps and keys are incomplete: only `transactions` counts, and the batch
        should be closed.

        Raises:
            ProtocolError: a change cannot be read; neither batch nor plans are of use any more.
        """
        self._count(transaction)
        if self.is_serial or (plans.may_be_serial and is_serial(transaction, plans)):
            # The first says what the batch is: the leader adds no serial one to others.
            self.is_serial = self.is_serial or len(self.transactions) == 1
            self.is_barrier = True
            self._forget()
            self._add_step(OrderedStep(ordered_changes(transaction, plans)))
            return
        has_relations = bool(transaction.relations)
        takers = self._takers
        try:
            for change in transaction.changes:
                if has_relations and isinstance(change, Relation):
                    self._announce(change, plans)
                    continue
                frame: bytes = change  # type: ignore[assignment]  # only Relations are announced
                if cython.compiled and self._take_known(frame):
                    continue
                # A frame too short for this is in no cache.
                take = takers.get(frame[KIND_AT:MARK_AT])
                if take is None:
                    if frame[KIND_AT] == TRUNCATE:
                        self._truncate(frame, plans)
                        continue
                    take = self._taker(frame, plans)
                if take(frame):
                    self._add_by_itself(frame)
        except NotASet:
            self._give_up_sets(transaction, plans)

    def _take_known(self, frame: bytes) -> bool:
        """Take a frame into the segment that took the last one of its relation (compiled twin only).

        Saves Python's calls; False if they are needed.

        Raises:
            NotASet, ProtocolError: as the segment.
        """
        tag = tag_of(frame)  # type: ignore[name-defined]  # noqa: F821  walk.pxd
        for index in range(self._n_known):
            if self._known_tags[index] == tag:
                segment = self._known[index]
                if tag >> 32 == _INSERT:
                    segment.insert(frame)
                    return True
                if tag >> 32 == _DELETE:
                    segment.delete(frame)
                    return True
                if segment.update(frame):
                    self._add_by_itself(frame)
                return True
        return False

    def _add_by_itself(self, frame: bytes) -> None:
        if self._by_relation[_relation_at(frame, RELATION_AT)[0]].add_by_itself(frame):
            self._forget_takers()

    def _note_known(self, frame: bytes, table: TableChanges) -> None:
        segment = table.segments[-1] if table.segments else None
        if isinstance(segment, NetSegment) and self._n_known < _MAX_KNOWN:
            self._known_tags[self._n_known] = tag_of(frame)  # type: ignore[name-defined]  # noqa: F821  walk.pxd
            self._known.append(segment)
            self._n_known += 1

    def _forget_takers(self) -> None:
        self._takers.clear()
        if cython.compiled:
            self._known.clear()
            self._n_known = 0

    def close(self) -> None:
        """Settle what only the whole batch shows; nothing is added afterwards."""
        for changes in self.table_changes:
            if changes.plan.keeps_written_over and claims_unknown(changes):
                changes.is_whole_table = True
        self.has_foreign_keys = any(changes.plan.foreign_keys for changes in self.table_changes)
        if self.has_foreign_keys and not all(can_order(step) for step in self.steps if isinstance(step, TablesStep)):
            self.is_suspect = True
        trees = {changes.tree_oid for changes in self.table_changes}
        if len(trees) < len(self.table_changes) and overlaps_itself(self.table_changes):
            self.is_suspect = True

    def add_run(self, transactions: list[Transaction], at: int, plans: Plans, limits: Limits) -> int:
        """Add transactions from an index on while they are whole and announce nothing; return the index after the last.

        This is `add` for nearly all transactions. It also ends at a limit, where the batch must be closed. The plans
        must be without serial tables, and the first transaction without refused ones.

        Raises:
            ProtocolError: as `add`.
        """
        count = len(transactions)
        has_refused = bool(plans.refused)
        while at < count:
            transaction = transactions[at]
            if (
                transaction.relations
                or transaction.has_ddl
                or transaction.event is not None
                or not (transaction.is_first and transaction.is_last)
                or (has_refused and not are_planned(transaction, plans))
            ):
                break
            self.add(transaction, plans)
            at += 1
            if self.is_full(limits):
                break
        return at

    def is_full(self, limits: Limits) -> bool:
        """Return whether nothing should be added any more."""
        n_transactions = len(self.transactions)
        if self.is_suspect or (self.is_serial and n_transactions >= SERIAL_TRANSACTIONS):
            return True
        # Of two halves with nearly as many tables, each would cost as much. Else they might run side by side.
        has_most = self.n_places >= limits.most_places or self.n_places > 2 * len(self.table_changes)
        if self.n_places >= limits.places and has_most:
            return True
        if (
            n_transactions < limits.transactions
            and self.n_changes < limits.changes
            and self.size_bytes < limits.size_bytes
        ):
            return False
        return (
            n_transactions >= limits.most_transactions
            or self.n_changes >= limits.most_changes
            or self.size_bytes >= limits.most_bytes
            or not self.is_thin
        )

    @property
    def is_thin(self) -> bool:
        """Return whether it has few changes for each of its tables, which are many.

        A session that meets them for the first time takes longer for that than for the changes.
        """
        return has_few_changes(self.n_changes, len(self.table_changes))

    def _count(self, transaction: Transaction) -> None:
        if not self.transactions:
            self.first_commit_time_us = transaction.commit_time_us
        if not (transaction.is_first and transaction.is_last):
            # The tables and keys of later pieces are unknown, so nothing may run alongside this one.
            self.is_barrier = True
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
        self._forget_takers()

    def _forget(self) -> None:
        """Begin a new step: what comes is not merged with what came before."""
        self._by_relation.clear()
        self._forget_takers()

    def _taker(self, frame: bytes, plans: Plans) -> Taker:
        """Return what takes a frame, and keep it for others of its kind and relation."""
        if len(frame) < MARK_AT:
            raise malformed(frame, 0)
        oid = _relation_at(frame, RELATION_AT)[0]
        table = self._by_relation.get(oid)
        if table is None:
            table = self._table(oid, plans.of(frame))
        if frame[KIND_AT] != INSERT and not table.locks_indexes:
            table.locks_indexes = True
            self.n_places += table.plan.facts.n_indexes
        take = self._takers[frame[KIND_AT:MARK_AT]] = table.taker(frame[KIND_AT])
        if cython.compiled:
            self._note_known(frame, table)
        return take

    def _table(self, relation_oid: int, plan: TablePlan) -> TableChanges:
        """Return the changes of a target table in the current step.

        Several published relations can map to one target table (partitions): each change of relation continues with
        the other's plan.
        """
        rows_oid = plan.rows_oid
        step = self._step_of(rows_oid)
        table = step.tables.get(rows_oid)
        if table is None:
            table = step.tables[rows_oid] = TableChanges(plan)
            self.table_changes.append(table)
            self.n_places += 1
        elif table.plan is not plan:
            table.use(plan)
            self._forget_takers()
            # Changes of another relation that maps here must not be read with this one's columns.
            for other, changes in list(self._by_relation.items()):
                if changes is table:
                    del self._by_relation[other]
        self._by_relation[relation_oid] = table
        return table

    def _truncate(self, frame: bytes, plans: Plans) -> None:
        step = truncate_step(frame, plans)
        self.truncates.append(step)
        self.has_truncate = True
        self.is_barrier = True
        self._forget()
        if not step.stands_alone:
            self._add_step(step)
            return
        # The changes that open steps made to these tables are gone. Other tables come first, because they do
        # not need the lock; then each TRUNCATE once, because again in one transaction it would flush the WAL each time;
        # then what comes after it.
        steps = self.steps[self._first :]
        for earlier in steps:
            if isinstance(earlier, TablesStep):
                for plan in step.plans:
                    earlier.tables.pop(plan.rows_oid, None)
        if self._after is None:
            self._after = TablesStep({})
            self.steps += [step, self._after]
        elif step not in steps:
            self.steps.insert(-1, step)
        self._emptied.update([plan.rows_oid for plan in step.plans])

    def _add_step(self, step: Step) -> None:
        """Add a step that keeps its place: what comes is applied after it."""
        self.steps.append(step)
        self._first = len(self.steps)
        self._rows = self._after = None
        self._emptied.clear()

    def _step_of(self, table_oid: int) -> TablesStep:
        """Return the step that takes the next change of a table."""
        if self._after is not None and table_oid in self._emptied:
            return self._after
        if self._rows is None:
            self._rows = TablesStep({})
            self.steps.insert(self._first, self._rows)
        return self._rows

    def _give_up_sets(self, transaction: Transaction, plans: Plans) -> None:
        """Mark the batch for row by row application; relations announced later in the transaction still count."""
        self.is_suspect = True
        for change in transaction.changes:
            if isinstance(change, Relation):
                plans.announce(change)
        self._forget()
