"""Figures from views: each query once, its table as rows.

In goes a session with the views; out come tables of at most a few thousand rows, whatever the log's size.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from parapply.analysis import queries_limits, queries_time, queries_work, verdict
from parapply.analysis.figures import FIGURES
from parapply.analysis.units import Flights, Row, commit_floor_s, of_batches, of_transactions
from parapply.analysis.whatif import WORKERS, what_if
from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession

    from parapply.analysis.whatif import Unit, WhatIf

#: A row of a figure by column; times are aware, in UTC.
Rows = list[dict[str, Any]]
#: All tables of a report by the name of the figure.
Tables = dict[str, Rows]

QUERIES: Final = {
    "summary": queries_work.SUMMARY,
    "over_time": queries_work.OVER_TIME,
    "tables": queries_work.TABLES,
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
    "gaps": queries_work.GAPS,
    "files": queries_work.FILES,
    "bad_lines": queries_work.BAD_LINES,
}
#: What `verdict.limits` takes, in its order.
_LIMITED_BY: Final = ("moments", "reading", "backends", "blockers")
#: Microseconds that the way from the publisher takes at most: more is waiting.
_LONGEST_WAY_US: Final = 1_000_000
_UNITS: Final[dict[str, Callable[[Iterable[Row]], Iterator[Unit]]]] = {
    "batch": of_batches,
    "transaction": of_transactions,
}


def compute(spark: SparkSession, interval_s: int, what_if_transactions: int, begin: Callable[[str], None]) -> Tables:
    """Compute all figures.

    Args:
        spark: with the views of `views.make_views`.
        interval_s: length of an interval.
        what_if_transactions: how many transactions of a slot are replayed; 0 leaves the what-if out.
        begin: called with the title of each figure before it is computed.

    Raises:
        ReportRefused: the log has the same records twice.
    """
    tables: Tables = {}
    for figure in FIGURES:
        if figure.name not in QUERIES:
            continue
        begin(figure.title)
        arguments = {
            "interval_s": interval_s,
            "interval_us": interval_s * 1_000_000,
            "behind_bytes": verdict.BEHIND_BYTES,
        }
        used = {name: value for name, value in arguments.items() if f":{name}" in QUERIES[figure.name]}
        rows = spark.sql(QUERIES[figure.name], args=used).collect()
        tables[figure.name] = [_in_utc(row.asDict()) for row in rows]
    tables["limits"] = [
        {"slot": row["slot"], **limit}
        for row in tables["summary"]
        for limit in verdict.limits(*(_of(tables[name], row["slot"]) for name in _LIMITED_BY))
    ]
    begin("With more workers")
    tables |= _what_if_tables(spark, what_if_transactions, tables)
    return tables


def _of(rows: Rows, slot: str) -> Rows:
    return [row for row in rows if row["slot"] == slot]


def _in_utc(row: dict[str, Any]) -> dict[str, Any]:
    # PySpark gives local times without an offset.
    return {
        name: value.astimezone(UTC) if isinstance(value, datetime) else value  # none of ours is aware before
        for name, value in row.items()
    }


def _what_if_tables(spark: SparkSession, limit: int, known: Tables) -> Tables:
    tables: Tables = {"what_if": [], "critical_path": []}
    seen = set()
    for run in spark.sql(queries_time.WHAT_IF_RUNS).collect() if limit else []:
        # The first of a slot is its longest run.
        if run["slot"] in seen:
            continue
        seen.add(run["slot"])
        arguments = {"slot": run["slot"], "run": run["run"], "after_seq": run["last_seq"] - limit}
        shares = verdict.shares_of((row["wait"], row["samples"]) for row in _of(known["backends"], run["slot"]))
        flights = Flights(run["commit_s"], run["whole_s"], run["shortest_s"])
        (source,) = spark.sql(queries_time.WHAT_IF_SOURCE, args=arguments).collect()
        # Where nothing came fast the shortest way holds a backlog's waiting, and says nothing of the clocks.
        way_us = source["shortest_us"] if source["shortest_us"] <= _LONGEST_WAY_US else 0
        arguments["begun_us"] = source["first_us"] - way_us
        arguments["flush_s"] = (flights.whole_s or 0.0) * (shares.flush or 0.0)
        workers = _workers(_of(known["reading"], run["slot"]), _of(known["summary"], run["slot"]))
        for unit, units_of in _UNITS.items():
            # Merged at will, transactions share their flights.
            floor_s = commit_floor_s(flights, shares.commit) if unit == "batch" else 0.0
            # Streamed, sorted by Spark: this process keeps the replay's window only.
            rows = spark.sql(queries_time.WHAT_IF_ROWS, args=arguments).toLocalIterator()
            try:
                counts = sorted({*WORKERS, workers, 2 * workers})
                result = what_if(units_of(Row(*row) for row in rows), counts, commit_floor_s=floor_s)
            except ValueError as error:
                raise ReportRefused(
                    f"Transactions of slot {run['slot']} are in the log twice: {error}.",
                    hint="leave copies of the same files out; --what-if 0 counts them twice",
                ) from error
            _add_what_if(tables, run, unit, result)
    return tables


def _workers(reading: Rows, summary: Rows) -> int:
    """Return how many workers the daemon has; of an old log how many have committed something."""
    return int((reading or summary)[0]["workers"])


def _add_what_if(tables: Tables, run: Any, unit: str, result: WhatIf) -> None:  # noqa: ANN401  Spark's row
    slot = run["slot"]
    for one in result.attainable:
        tables["what_if"].append(
            {
                "slot": slot,
                "unit": unit,
                "commit_order": one.order,
                "workers": one.workers,
                "seconds": one.makespan_s,
                "speed_up": one.speed_up,
                "limit": str(one.limit),
                "units": result.n_units,
                "until": run["at"].astimezone(UTC),
            }
        )
    for order, path in result.critical_path.items():
        for label, link_s in sorted(path.items(), key=lambda item: -item[1]):
            tables["critical_path"].append(
                {"slot": slot, "unit": unit, "commit_order": order, "link": str(label), "seconds": link_s}
            )
