"""Figures from views: each query once, its table as rows.

In goes a session with the views; out come tables of at most a few thousand rows, whatever the log's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply import limits
from parapply.analysis import more_workers, queries
from parapply.analysis.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from parapply.analysis.changes import Change
    from parapply.analysis.engine import Rows, Tables
    from parapply.analysis.store import Engine


#: The query of each figure that has one; a chain is followed link by link.
QUERIES: Final[dict[str, str]] = {
    figure.name: getattr(queries, figure.name.upper())
    for figure in FIGURES
    if hasattr(queries, figure.name.upper()) and figure.name != "chain"
}
#: Arguments of `limits.limits`, in its order.
_LIMITED_BY: Final = ("moments", "reading", "backends", "blockers")
#: Links of a chain that are followed.
_LONGEST_CHAIN: Final = 50
#: Numbers of workers that are predicted.
WORKERS: Final = (1, 2, 4, 8, 16, 32, 64)


def compute(
    engine: Engine,
    interval_s: int,
    begin: Callable[[str], None],
    only: Container[str] = QUERIES,
    *,
    what_if: Sequence[Change] | None = None,
) -> Tables:
    """Compute the figures.

    Args:
        engine: with the views of `views.make_views`.
        interval_s: length of an interval.
        begin: called with the title of each figure before it is computed.
        only: names of figures with a query; those that `limits.limits` takes must be among them.
        what_if: predict other numbers of workers, and these; None: nothing.

    Raises:
        ReportRefused: the log has the same records twice.
    """
    tables: Tables = {}
    for figure in FIGURES:
        if figure.name not in QUERIES or figure.name not in only:
            continue
        begin(figure.title)
        arguments = {
            "interval_s": interval_s,
            "interval_us": interval_s * 1_000_000,
            "behind_bytes": limits.BEHIND_BYTES,
        }
        used = {name: value for name, value in arguments.items() if f":{name}" in QUERIES[figure.name]}
        tables[figure.name] = engine.rows(QUERIES[figure.name], **used)
    tables["limits"] = [
        {"slot": row["slot"], **limit}
        for row in tables["summary"]
        for limit in limits.limits(
            *([one for one in tables[name] if one["slot"] == row["slot"]] for name in _LIMITED_BY)
        )
    ]
    tables["chain"] = [link for row in _first_of_slots(tables["blockers"]) for link in _chain(engine, row)]
    tables["what_if"] = []
    if what_if is not None:
        begin("With more workers")
        tables["what_if"] = more_workers.predicted(engine, WORKERS, what_if)
    return tables


def _first_of_slots(rows: Rows) -> Iterator[dict[str, Any]]:
    seen = set()
    for row in rows:
        if row["slot"] not in seen:
            seen.add(row["slot"])
            yield row


def _chain(engine: Engine, last: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the batches before one that waited, each the one that the other waited for last."""
    key = {"slot": last["slot"], "run": last["run"], "seq": last["seq"]}
    known = {row["seq"]: row for row in engine.rows(queries.CHAIN, **key)}
    seq = last["seq"]
    for _ in range(_LONGEST_CHAIN):
        link = known.get(seq)
        if link is None:
            return
        yield {"slot": last["slot"], **link}
        if link["holder_seq"] is None:
            return
        seq = link["holder_seq"]
