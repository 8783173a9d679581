"""Records of the apply log as units of the what-if: each source transaction by itself, or batches as they were formed.

In: `Row`s in source order, of one run. Out: `Unit`s. Pure; reads each row once.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from parapply.analysis.whatif import WINDOW, Edge, Label, Unit
from parapply.applylog_schema import BatchRecord, TransactionRecord
from parapply.vocabulary import WaitKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from parapply.applylog_schema import Record

    #: seq, kind, table, name, changes: the fields of a `Dependency` in the record's order.
    DependencyRow = tuple[int, str, str, str, int]


class Row(NamedTuple):
    """A transaction's record joined with its batch's, on ``run`` and ``batch_seq``."""

    seq: int
    batch_seq: int
    n_changes: int
    batch_changes: int  # sum over the batch's rows and operations
    execute_s: float  # of the batch, as what follows
    commit_s: float
    depends_on: Sequence[DependencyRow]


def round_trip_s(batches: Iterable[tuple[float, float, bool]]) -> float:
    """Return what a round trip to the target takes, about: the shortest flight in the log; 0 without a batch.

    Args:
        batches: `execute_s`, `commit_s` and `is_one_flight` of each.
    """
    return min([execute_s if is_one else commit_s for execute_s, commit_s, is_one in batches], default=0.0)


def of_transactions(rows: Iterable[Row]) -> Iterator[Unit]:
    """Yield each transaction with its share of its batch's times, by changes: what merging at will would allow."""
    for row in rows:
        share = max(row.n_changes, 1) / max(row.batch_changes, row.n_changes, 1)
        edges = [
            Edge(seq, Label(kind, table, name), _share(changes, row.n_changes), is_barrier=kind == WaitKind.BARRIER)
            for seq, kind, table, name, changes in row.depends_on
        ]
        yield Unit(row.seq, row.execute_s * share, row.commit_s * share, edges)


def of_batches(rows: Iterable[Row], window: int = WINDOW) -> Iterator[Unit]:
    """Yield the batches as they were formed, with the dependencies between their transactions.

    Args:
        rows: in source order; a batch's transactions are neighbours.
        window: transactions whose batch is remembered.
    """
    batch_of: dict[int, int] = {}
    seqs: deque[int] = deque()
    for batch_seq, group in groupby(rows, key=lambda row: row.batch_seq):
        members = list(group)
        edges: dict[tuple[int, Label], float] = {}
        n_changes = max(members[0].batch_changes, 1)
        for row in members:
            batch_of[row.seq] = batch_seq
            seqs.append(row.seq)
            for seq, kind, table, name, changes in row.depends_on:
                earlier = batch_of.get(seq)
                if earlier == batch_seq and kind == WaitKind.BARRIER:
                    earlier = batch_seq - 1  # everything before the transaction, so before its batch
                if earlier is not None and earlier != batch_seq:
                    key = (earlier, Label(kind, table, name))
                    edges[key] = edges.get(key, 0.0) + (changes / n_changes if changes else 1.0)
        while len(seqs) > window:
            del batch_of[seqs.popleft()]
        yield Unit(
            batch_seq,
            members[0].execute_s,
            members[0].commit_s,
            [
                Edge(seq, label, min(share, 1.0), label.kind == WaitKind.BARRIER)
                for (seq, label), share in edges.items()
            ],
        )


def _share(changes: int, n_changes: int) -> float:
    return min(changes / n_changes, 1.0) if changes and n_changes else 1.0


def rows_of(records: Iterable[Record]) -> list[Row]:
    """Return the rows of one run's records, in source order; for logs that fit into memory.

    Raises:
        KeyError: a transaction's batch is not among them.
    """
    batches: dict[int, BatchRecord] = {}
    transactions: list[TransactionRecord] = []
    for record in records:
        if isinstance(record, BatchRecord):
            batches[record.seq] = record
        elif isinstance(record, TransactionRecord):
            transactions.append(record)
    transactions.sort(key=lambda one: one.seq)
    return [_row(one, batches[one.batch_seq]) for one in transactions]


def _row(one: TransactionRecord, batch: BatchRecord) -> Row:
    batch_changes = sum(
        [counts.insert + counts.update + counts.delete + counts.truncate for counts in batch.rows.values()]
    )
    depends_on = [(at.seq, at.kind, at.table, at.name, at.changes) for at in one.depends_on]
    return Row(one.seq, one.batch_seq, one.n_changes, batch_changes, batch.execute_s, batch.commit_s, depends_on)
