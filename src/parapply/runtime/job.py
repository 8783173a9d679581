"""One batch on its way through the daemon: who has it, since when, and what it waited for.

All times are seconds of the event loop's clock, which is monotonic (fault F29: a clock that jumps must not matter).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from parapply.applylog_schema import XIDS_LIMIT, Conflict, RowCounts
from parapply.model import Relation
from parapply.plan.steps import OrderedStep, TruncateStep
from parapply.wire.rows import DELETE, INSERT, KIND_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    import asyncio

    from parapply.model import Transaction
    from parapply.plan.batch import Batch
    from parapply.plan.dependencies import Wait
    from parapply.plan.lineage import Traced
    from parapply.plan.table import TablePlan
    from parapply.runtime.head import Attempts
    from parapply.runtime.streams import Stream
    from parapply.runtime.two_phase import Outcome
    from parapply.wire.messages import Prepare, StreamPrepare

_relation_at = struct.Struct(">I").unpack_from


class Counted(NamedTuple):
    """What a job has counted at a point."""

    rows: dict[str, RowCounts]
    n_changes: int
    size_bytes: int


NOTHING_COUNTED = Counted({}, 0, 0)


class Resume(NamedTuple):
    """Where a batch that is applied in source order has come to."""

    n_done: int  # source transactions committed
    plans: dict[int, TablePlan]  # in force after them
    attempts: Attempts  # of the next


class Job:
    """Written by intake until it is submitted, then by the crew and its worker; read by progress and the apply log."""

    __slots__ = (
        "arrivals",
        "attempts",
        "batch",
        "commit_lsn",
        "committed_s",
        "conflicts",
        "error",
        "executed_s",
        "freed_s",
        "is_one_flight",
        "mode",
        "must_yield",
        "n_changes",
        "n_transactions",
        "outcome",
        "pieces",
        "plans_before",
        "prepare",
        "received_s",
        "resume",
        "rows",
        "size_bytes",
        "started_s",
        "stream",
        "submitted_s",
        "traced",
        "turn_s",
        "waited_for",
        "worker",
        "xids",
    )

    def __init__(self, batch: Batch, plans_before: dict[int, TablePlan]) -> None:
        """Start with an open batch.

        Args:
            batch: to be filled by intake.
            plans_before: plan in force for each publisher's OID before its first change; never written. A retry reads
                the changes again from there.
        """
        self.batch = batch
        self.plans_before = plans_before
        #: Pieces of one large transaction; None for every other batch. None in the queue ends them.
        self.pieces: asyncio.Queue[Transaction | None] | None = None
        #: The transaction that was streamed while it was in progress; None for every other batch.
        self.stream: Stream | None = None
        #: What it ends with instead of a commit.
        self.prepare: Prepare | StreamPrepare | None = None
        #: What became of a prepared transaction, which is all that it does.
        self.outcome: Outcome | None = None
        self.commit_lsn = 0  # of a large one: all that is known of its place before it has come whole
        self.received_s = 0.0  # its last byte was read
        self.submitted_s = 0.0  # closed
        self.freed_s = 0.0  # the last dependency committed
        self.started_s = 0.0  # a worker has it
        self.worker = 0
        self.executed_s = 0.0  # all its statements have succeeded
        self.turn_s = 0.0  # all earlier batches have committed
        self.committed_s = 0.0
        self.attempts = 1
        self.is_one_flight = False  # executed and committed at once
        self.mode = "set"  # or rows, large, streamed, spilled, outcome
        #: A later batch than the head stands in its way: it rolls back and waits for its turn (trap T-30).
        self.must_yield = False
        #: The last dependency that it, or the changes of its late keys, had to wait for.
        self.waited_for: Wait | None = None
        #: Set once it is applied in source order; its worker may leave it and another one go on there.
        self.resume: Resume | None = None
        #: Why it had to be repeated, for people: SQLSTATE or 'row count'.
        self.error = ""
        #: What its changes met, for the apply log, each with the commit LSN of its source transaction; see
        #: `arbiter.count`.
        self.conflicts: list[tuple[int, Conflict]] = []
        #: For the apply log, counted once: rows by schema.table, source transactions, changes, bytes, the first xids.
        self.rows: dict[str, RowCounts] = {}
        self.n_transactions = 0
        self.n_changes = 0
        self.size_bytes = 0
        self.xids: tuple[int, ...] = ()
        #: Only at ``applylog.detail = "transaction"``: what is said of each, and how many were there at which time.
        self.traced: list[Traced] = []
        self.arrivals: list[tuple[int, float]] = []

    def count_batch(self) -> None:
        """Count what the closed batch holds."""
        batch = self.batch
        self.n_transactions = len(batch.transactions)
        self.n_changes = batch.n_changes
        self.size_bytes = batch.size_bytes
        self.xids = tuple([transaction.xid for transaction in batch.transactions[:XIDS_LIMIT]])
        self._count_steps(batch)

    def counted(self) -> Counted:
        """Return what was counted so far, to go back to."""
        return Counted(_copied(self.rows), self.n_changes, self.size_bytes)

    def count_again_from(self, counted: Counted) -> None:
        """Forget what was counted since: it was rolled back."""
        self.n_changes, self.size_bytes = counted.n_changes, counted.size_bytes
        self.rows = _copied(counted.rows)

    def _count_steps(self, batch: Batch) -> None:
        for changes in batch.table_changes:
            counts = self._counts(changes.plan)
            counts.insert += changes.counts[0]
            counts.update += changes.counts[1]
            counts.delete += changes.counts[2]
        for step in batch.steps:
            if isinstance(step, TruncateStep):
                self._count_truncate(step)
            elif isinstance(step, OrderedStep):
                for change in step.changes:
                    if isinstance(change, TruncateStep):
                        self._count_truncate(change)
                    else:
                        self._count_row(*change)

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

    def _counts(self, plan: TablePlan) -> RowCounts:
        return self.rows.setdefault(plan.relation.qualified_name, RowCounts())

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
