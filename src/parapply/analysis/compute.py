"""Figures from views: each query once, its table as rows.

In goes a session with the views; out come tables of at most a few thousand rows, whatever the log's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply import limits
from parapply.analysis import more_workers, queries_culprit, queries_limits, queries_time, queries_work, verdict
from parapply.analysis.figures import FIGURES
from parapply.analysis.units import Row, of_transactions
from parapply.analysis.whatif import WORKERS, what_if
from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from parapply.analysis.engine import Engine, Rows, Tables
    from parapply.analysis.whatif import WhatIf


QUERIES: Final = {
    "summary": queries_work.SUMMARY,
    "over_time": queries_work.OVER_TIME,
    "tables": queries_work.TABLES,
    "target_names": queries_work.TARGET_NAMES,
    "workers": queries_work.WORKERS,
    "latency": queries_time.LATENCY,
    "waits": queries_time.WAITS,
    "dependencies": queries_time.DEPENDENCIES,
    "transaction_dependencies": queries_time.TRANSACTION_DEPENDENCIES,
    "batch_sizes": queries_work.BATCH_SIZES,
    "retries": queries_work.RETRIES,
    "conflicts": queries_work.CONFLICTS,
    "parallelism": queries_time.PARALLELISM,
    "moments": queries_limits.MOMENTS,
    "reading": queries_limits.READING,
    "backends": queries_limits.BACKENDS,
    "hot_keys": queries_limits.HOT_KEYS,
    "blockers": queries_limits.BLOCKERS,
    "slow_batches": queries_culprit.SLOW_BATCHES,
    "slow_transactions": queries_culprit.SLOW_TRANSACTIONS,
    "runs": queries_culprit.RUNS,
    "lanes": queries_culprit.LANES,
    "gaps": queries_work.GAPS,
    "files": queries_work.FILES,
    "bad_lines": queries_work.BAD_LINES,
}
#: What `limits.limits` takes, in its order.
_LIMITED_BY: Final = ("moments", "reading", "backends", "blockers")
#: Links of a chain that are followed.
_LONGEST_CHAIN: Final = 50
#: Microseconds that the way from the publisher takes at most: more is waiting.
_LONGEST_WAY_US: Final = 1_000_000


def compute(
    engine: Engine,
    interval_s: int,
    what_if_transactions: int,
    begin: Callable[[str], None],
    only: Container[str] = QUERIES,
) -> Tables:
    """Compute the figures.

    Args:
        engine: with the views of `views.make_views`.
        interval_s: length of an interval.
        what_if_transactions: how many transactions of a slot are replayed; 0 leaves the what-if out.
        begin: called with the title of each figure before it is computed.
        only: names of figures with a query; those that `limits.limits` takes must be among them.

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
        for limit in limits.limits(*(_of(tables[name], row["slot"]) for name in _LIMITED_BY))
    ]
    tables["chain"] = [link for row in _first_of_slots(tables["blockers"]) for link in _chain(engine, row)]
    if not what_if_transactions:
        return tables | {"what_if": [], "critical_path": []}
    begin("With more workers")
    tables |= _what_if_tables(engine, what_if_transactions, tables)
    return tables


def _of(rows: Rows, slot: str) -> Rows:
    return [row for row in rows if row["slot"] == slot]


def _first_of_slots(rows: Rows) -> Iterator[dict[str, Any]]:
    seen = set()
    for row in rows:
        if row["slot"] not in seen:
            seen.add(row["slot"])
            yield row


def _chain(engine: Engine, last: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the batches before one that waited, each the one that the other waited for last."""
    key = {"slot": last["slot"], "run": last["run"], "seq": last["seq"]}
    known = {row["seq"]: row for row in engine.rows(queries_culprit.CHAIN, **key)}
    seq = last["seq"]
    for _ in range(_LONGEST_CHAIN):
        link = known.get(seq)
        if link is None:
            return
        yield {"slot": last["slot"], **link}
        if link["holder_seq"] is None:
            return
        seq = link["holder_seq"]


def _what_if_tables(engine: Engine, limit: int, known: Tables) -> Tables:
    shares = {
        row["slot"]: verdict.shares_of((one["wait"], one["samples"]) for one in _of(known["backends"], row["slot"]))
        for row in known["summary"]
    }
    predicted = more_workers.predicted(engine, WORKERS, {slot: one.commit for slot, one in shares.items()})
    tables: Tables = {"what_if": predicted, "critical_path": []}
    for run in _first_of_slots(engine.rows(queries_time.WHAT_IF_RUNS)):
        arguments = {"slot": run["slot"], "run": run["run"], "after_seq": run["last_seq"] - limit}
        (source,) = engine.rows(queries_time.WHAT_IF_SOURCE, **arguments)
        # Where nothing came fast the shortest way holds a backlog's waiting, and says nothing of the clocks.
        way_us = source["shortest_us"] if source["shortest_us"] <= _LONGEST_WAY_US else 0
        arguments["begun_us"] = source["first_us"] - way_us
        workers = _workers(_of(known["reading"], run["slot"]), _of(known["summary"], run["slot"]))
        # Streamed, sorted by the engine: this process keeps the replay's window only.
        rows = engine.stream(queries_time.WHAT_IF_ROWS, **arguments)
        try:
            result = what_if(of_transactions(Row(*row) for row in rows), sorted({*WORKERS, workers, 2 * workers}))
        except ValueError as error:
            raise ReportRefused(
                f"Transactions of slot {run['slot']} are in the log twice: {error}.",
                hint="leave copies of the same files out; --what-if 0 counts them twice",
            ) from error
        _add_what_if(tables, run, result)
    return tables


def _workers(reading: Rows, summary: Rows) -> int:
    """Return how many workers the daemon has; of an old log how many have committed something."""
    return int((reading or summary)[0]["workers"])


def _add_what_if(tables: Tables, run: dict[str, Any], result: WhatIf) -> None:
    slot = run["slot"]
    for one in result.attainable:
        tables["what_if"].append(
            {
                "slot": slot,
                "unit": "transaction",
                "commit_order": one.order,
                "workers": one.workers,
                "seconds": one.makespan_s,
                "least_s": one.makespan_s,
                "most_s": one.makespan_s,
                "speed_up": one.speed_up,
                "limit": str(one.limit),
                "units": result.n_units,
                "until": run["until"],
            }
        )
    for order, path in result.critical_path.items():
        for label, link_s in sorted(path.items(), key=lambda item: -item[1]):
            tables["critical_path"].append(
                {"slot": slot, "unit": "transaction", "commit_order": order, "link": str(label), "seconds": link_s}
            )
