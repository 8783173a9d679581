"""Counts of a job's contents, made once for metrics, apply log and screens."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from parapply.applylog_schema import XIDS_LIMIT, RowCounts
from parapply.model import Relation
from parapply.plan.steps import OrderedStep, TruncateStep
from parapply.wire.rows import DELETE, INSERT, KIND_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from parapply.model import Transaction
    from parapply.plan.batch import Batch
    from parapply.plan.table import TablePlan

_relation_at = struct.Struct(">I").unpack_from


class Counted(NamedTuple):
    """Counts of a job at one point."""

    rows: dict[str, RowCounts]
    n_changes: int
    size_bytes: int


NOTHING_COUNTED = Counted({}, 0, 0)


class JobCounts:
    """Written by intake when a batch is closed, or by the worker piece by piece; read when it is committed."""

    __slots__ = ("commands", "n_changes", "n_left_out", "n_transactions", "rows", "size_bytes", "xids")

    def __init__(self) -> None:
        """Start with nothing."""
        #: Rows by schema.table.
        self.rows: dict[str, RowCounts] = {}
        #: Number of source transactions.
        self.n_transactions = 0
        self.n_changes = 0
        self.size_bytes = 0
        #: The first of them, at most as many as a record lists.
        self.xids: tuple[int, ...] = ()
        #: Tags of the publisher's commands that have run, in order; and how many were left out.
        self.commands: list[str] = []
        self.n_left_out = 0

    def count_batch(self, batch: Batch) -> None:
        """Count the contents of a closed batch."""
        self.n_transactions = len(batch.transactions)
        self.n_changes = batch.n_changes
        self.size_bytes = batch.size_bytes
        self.xids = tuple([transaction.xid for transaction in batch.transactions[:XIDS_LIMIT]])
        self._count_steps(batch)

    def count_piece(self, piece: Transaction, batch: Batch | None, current: dict[int, TablePlan]) -> None:
        """Count a piece of a large transaction, which is dropped once it is applied.

        Args:
            piece: just applied.
            batch: with its net changes, if it could be read into one; counts are cheap there.
            current: plan of each publisher's OID after it; tables keep their name, so before it would do as well.
        """
        self.n_transactions = 1
        self.xids = (piece.xid,)
        self.n_changes += len(piece.changes) - len(piece.relations)
        self.size_bytes += piece.size_bytes
        if batch is not None:
            self._count_steps(batch)
            return
        for change in piece.changes:
            if not isinstance(change, Relation) and change[KIND_AT] != TRUNCATE:
                self._count_row(current[_relation_at(change, RELATION_AT)[0]], change)

    def counted(self) -> Counted:
        """Return the counts so far, to go back to."""
        return Counted(_copied(self.rows), self.n_changes, self.size_bytes)

    def go_back_to(self, counted: Counted) -> None:
        """Forget the counts since then, because the changes were rolled back."""
        self.n_changes, self.size_bytes = counted.n_changes, counted.size_bytes
        self.rows = _copied(counted.rows)

    def _count_steps(self, batch: Batch) -> None:
        for changes in batch.table_changes:
            counts = self._counts(changes.plan)
            inserts, updates, deletes = changes.counts
            counts.insert += inserts
            counts.update += updates
            counts.delete += deletes
        for truncate in batch.truncates:
            self._count_truncate(truncate)
        for step in batch.steps:
            if isinstance(step, OrderedStep):
                for change in step.changes:
                    if isinstance(change, TruncateStep):
                        self._count_truncate(change)
                    else:
                        self._count_row(*change)

    def _counts(self, plan: TablePlan) -> RowCounts:
        name = plan.relation.qualified_name
        counts = self.rows.get(name)
        if counts is None:
            counts = self.rows[name] = RowCounts()
        return counts

    def _count_row(self, plan: TablePlan, frame: bytes) -> None:
        counts = self._counts(plan)
        kind = frame[KIND_AT]
        if kind == INSERT:
            counts.insert += 1
        elif kind == DELETE:
            counts.delete += 1
        else:
            counts.update += 1

    def _count_truncate(self, step: TruncateStep) -> None:
        for plan in step.plans:
            self._counts(plan).truncate += 1


def _copied(rows: dict[str, RowCounts]) -> dict[str, RowCounts]:
    return {name: msgspec.structs.replace(counts) for name, counts in rows.items()}
