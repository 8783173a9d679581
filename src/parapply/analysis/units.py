"""Records of the apply log as units of `whatif`: each source transaction by itself.

In: `Row`s in source order, of one run. Out: `Unit`s. Pure; reads each row once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parapply.analysis.whatif import Edge, Label, Unit
from parapply.vocabulary import WaitKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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


def of_transactions(rows: Iterable[Row]) -> Iterator[Unit]:
    """Yield each transaction with its share of its batch's times, by changes: what merging at will would allow."""
    for row in rows:
        share = max(row.n_changes, 1) / max(row.batch_changes, row.n_changes, 1)
        edges = [
            Edge(seq, Label(kind, table, name), _share(changes, row.n_changes), is_barrier=kind == WaitKind.BARRIER)
            for seq, kind, table, name, changes in row.depends_on
        ]
        yield Unit(row.seq, row.execute_s * share, row.commit_s * share, edges, row.release_s)


def _share(changes: int, n_changes: int) -> float:
    return min(changes / n_changes, 1.0) if changes and n_changes else 1.0
