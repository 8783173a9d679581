"""Records of the apply log as units of the what-if: each source transaction by itself, or batches as they were formed.

In: `Row`s in source order, of one run. Out: `Unit`s. Pure; reads each row once.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from statistics import median_low
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
    release_s: float = 0.0  # when the publisher had committed it, at the earliest


class Flights(NamedTuple):
    """How long the flights of a run's batches took; None: it has none of that sort."""

    commit_s: float | None  # a COMMIT by itself, the median
    whole_s: float | None  # statements and COMMIT sent at once, the median
    shortest_s: float  # the shortest of either sort


def flights_of(batches: Iterable[BatchRecord]) -> Flights:
    """Return how long the flights of batches took, as `queries_time.WHAT_IF_RUNS` does."""
    found = list(batches)
    alone = [one.commit_s for one in found if not one.is_one_flight and not one.late_keys]
    whole = [one.execute_s for one in found if one.is_one_flight]
    shortest_s = min([one.execute_s if one.is_one_flight else one.commit_s for one in found], default=0.0)
    return Flights(median_low(alone) if alone else None, median_low(whole) if whole else None, shortest_s)


def commit_floor_s(flights: Flights, commit_share: float | None) -> float:
    """Return what a COMMIT takes that is sent by itself.

    Args:
        flights: of the run.
        commit_share: part of the sessions' samples that a COMMIT by itself would have, too: WAL being flushed, and the
            way. None: not known, and then the shortest flight is taken, which may hold statements.
    """
    if flights.commit_s is not None:
        return flights.commit_s
    if flights.whole_s is None or commit_share is None:
        return flights.shortest_s
    return flights.whole_s * commit_share


def of_transactions(rows: Iterable[Row]) -> Iterator[Unit]:
    """Yield each transaction with its share of its batch's times, by changes: what merging at will would allow."""
    for row in rows:
        share = max(row.n_changes, 1) / max(row.batch_changes, row.n_changes, 1)
        edges = [
            Edge(seq, Label(kind, table, name), _share(changes, row.n_changes), is_barrier=kind == WaitKind.BARRIER)
            for seq, kind, table, name, changes in row.depends_on
        ]
        yield Unit(row.seq, row.execute_s * share, row.commit_s * share, edges, row.release_s)


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
            members[-1].release_s,
        )


def _share(changes: int, n_changes: int) -> float:
    return min(changes / n_changes, 1.0) if changes and n_changes else 1.0


def rows_of(records: Iterable[Record], flush_s: float = 0.0) -> list[Row]:
    """Return the rows of one run's records, in source order, all there from the beginning; for logs that fit in memory.

    Args:
        records: of batches and transactions; others are passed over.
        flush_s: of a flight of statements and COMMIT, the part that is the COMMIT's.

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
    return [_row(one, batches[one.batch_seq], flush_s) for one in transactions]


def _row(one: TransactionRecord, batch: BatchRecord, flush_s: float) -> Row:
    batch_changes = sum(
        [counts.insert + counts.update + counts.delete + counts.truncate for counts in batch.rows.values()]
    )
    depends_on = [(at.seq, at.kind, at.table, at.name, at.changes) for at in one.depends_on]
    flush_s = min(flush_s, batch.execute_s) if batch.is_one_flight else 0.0
    execute_s, commit_s = batch.execute_s - flush_s, batch.commit_s + flush_s
    return Row(one.seq, one.batch_seq, one.n_changes, batch_changes, execute_s, commit_s, depends_on)
