"""The views that the figures' queries read: `batches`, `transactions`, `intervals`, `numbered`, `doubled`, `files` ...

In go the rows of the store; out come views with the interval of each record, so that all figures share the intervals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  as everyone imports it

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import Column, DataFrame

    from parapply.analysis.store import Store

#: Lengths of an interval that a person can read off an axis.
INTERVALS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
#: As many as a plot can show; what is longer has intervals of days.
_MOST_INTERVALS: Final = 240

_ROWS_OF: Final = "aggregate(map_values(rows), 0L, (sum, counts) -> sum + {})"
_N_ROWS: Final = _ROWS_OF.format("coalesce(counts.insert, 0) + coalesce(counts.update, 0) + coalesce(counts.delete, 0)")
_N_TRUNCATES: Final = _ROWS_OF.format("coalesce(counts.truncate, 0)")
# 16/B374D848 is two numbers in hexadecimal, the first the high half.
_LSN_NUMBER: Final = (
    "CAST(conv(split_part({0}, '/', 1), 16, 10) AS bigint) * 4294967296"
    " + CAST(conv(split_part({0}, '/', 2), 16, 10) AS bigint)"
)
_N_CONFLICTS: Final = "size(conflicts) + aggregate(more_conflicts, 0L, (sum, one) -> sum + one.conflicts)"
# A transaction that is applied while it comes is given to a worker before its last byte is received. What it executes,
# and what it waits for, until then is no part of the time from received to committed.
_BEFORE: Final = "greatest(0, (unix_micros(received_at) - unix_micros(started_at)) / 1e6)"
_EXECUTING: Final = f"greatest(0, execute_s - {_BEFORE})"
_DEPENDING: Final = f"if({_BEFORE} > 0, 0, wait_dependency_s)"
# Points of a batch in microseconds, none before the one before it.
_START: Final = "unix_micros(started_at)"
_TIMED: Final = (
    "slot",
    "run",
    "unix_micros(received_at) AS received_us",
    f"{_START} AS start_us",
    "CAST(depending_s * 1e6 AS bigint) AS depend_us",
    f"least({_START} + CAST(execute_s * 1e6 AS bigint), unix_micros(committed_at)) AS done_us",
    f"greatest({_START}, unix_micros(committed_at) - CAST(commit_s * 1e6 AS bigint)) AS turn_us",
    "unix_micros(committed_at) AS end_us",
    "if(late_keys > 0, 1, 0) AS is_late",
)
#: What a record is, once; lines of before have no run, and their numbers begin again with each.
_KEY: Final = ("slot", "run", "seq")
#: Runs with a number that may be in the log twice.
_OVERLAPPING: Final = """
SELECT DISTINCT slot, run
  FROM (SELECT slot, run, first, last, n,
               max(last) OVER (PARTITION BY slot, run ORDER BY first, last, file
                               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM (SELECT slot, run, file, min(seq) AS first, max(seq) AS last, count(*) AS n
                  FROM all_{} WHERE run <> '' GROUP BY slot, run, file))
 WHERE before >= first OR n > last - first + 1
"""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a report covers; None is no limit.

    Attributes:
        slot: records of one slot only.
        since: commits on the target from this time on, aware.
        until: commits before this time.
    """

    slot: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def is_within(self) -> Column:
        """Return whether a row's commit is in the time that is covered."""
        at = F.col("committed_at")
        since = F.lit(True) if self.since is None else at >= F.lit(self.since)
        return since if self.until is None else since & (at < F.lit(self.until))

    def of(self, rows: DataFrame, at: str = "committed_at") -> DataFrame:
        """Return the rows within, by the time `at`; by the day, too, so that other days are not read."""
        if self.slot is not None:
            rows = rows.where(F.col("slot") == self.slot)
        if self.since is not None:
            since = F.lit(self.since)
            rows = rows.where((F.col(at) >= since) & (F.col("day") >= F.to_date(since)))
        if self.until is not None:
            until = F.lit(self.until)
            rows = rows.where((F.col(at) < until) & (F.col("day") <= F.to_date(until)))
        return rows


def _once(records: DataFrame, kind: str, scope: Scope) -> tuple[DataFrame, Counter[str]]:
    """Return the records of a kind, each once, also where a file of the log is there twice; and how many are, by slot.

    As the files are written, no number is in two of them, and then nothing is done: numbers of one run may overlap in
    two files only for batches that committed in another order, or where one file is a copy.
    """
    if scope.slot is not None:
        records = records.where(F.col("slot") == scope.slot)
    records.createOrReplaceTempView(f"all_{kind}")
    session = records.sparkSession
    overlapping = session.sql(_OVERLAPPING.format(kind))
    pairs = [(row["slot"], row["run"]) for row in overlapping.collect()]
    if not pairs:
        return records, Counter()
    runs = session.createDataFrame(pairs, "slot string, run string")
    concerned = records.join(F.broadcast(runs), ["slot", "run"], "left_semi")
    copies = concerned.groupBy("slot").agg((F.count("*") - F.countDistinct("run", "seq")).alias("n"))
    doubled = Counter({row["slot"]: row["n"] for row in copies.collect() if row["n"]})
    if not doubled:
        return records, doubled
    others = records.join(F.broadcast(runs), ["slot", "run"], "left_anti")
    return others.unionByName(concerned.dropDuplicates(list(_KEY))), doubled


def make_views(store: Store, scope: Scope) -> int:
    """Make the views.

    Returns:
        Length of an interval in seconds; 0 where there is no batch within the scope.
    """
    all_batches, doubled = _once(store.records("batch"), "batch", scope)
    all_transactions, doubled_transactions = _once(store.records("transaction"), "transaction", scope)
    batches = scope.of(all_batches)
    (times,) = batches.agg(
        F.min("committed_at").cast("double").alias("first"), F.max("committed_at").cast("double").alias("last")
    ).collect()
    if times["first"] is None:
        return 0
    interval_s = interval_of(times["last"] - times["first"])
    at = f"timestamp_seconds(unix_seconds(committed_at) div {interval_s} * {interval_s})"
    with_interval = (
        batches.withColumn("at", F.expr(at))
        .withColumn("n_rows", F.expr(_N_ROWS))
        .withColumn("n_truncates", F.expr(_N_TRUNCATES))
        .withColumn("end_lsn_number", F.expr(_LSN_NUMBER.format("end_lsn")))
        .withColumn("oldest_s", F.expr("(unix_micros(committed_at) - unix_micros(commit_time_first)) / 1e6"))
        .withColumn("executing_s", F.expr(_EXECUTING))
        .withColumn("depending_s", F.expr(_DEPENDING))
        .withColumn("n_conflicts", F.expr(_N_CONFLICTS))
        .withColumn("delivery_s", F.expr("(unix_micros(received_at) - unix_micros(commit_time_last)) / 1e6"))
    )
    with_interval.createOrReplaceTempView("batches")
    in_order = with_interval.where(F.col("committed_at") >= F.col("started_at"))
    in_order.selectExpr(*_TIMED).createOrReplaceTempView("timed")
    scope.of(all_transactions).createOrReplaceTempView("transactions")
    numbered = all_batches if scope.slot is None else all_batches.where(F.col("slot") == scope.slot)
    # Also what is outside of the scope's time: the record before the first one within is no gap.
    numbered.where(F.col("run") != "").select(
        "slot", "run", "seq", "committed_at", scope.is_within().alias("is_within"),
        F.expr(_LSN_NUMBER.format("first_end_lsn")).alias("first_number"),
        F.expr(_LSN_NUMBER.format("end_lsn")).alias("last_number"),
    ).createOrReplaceTempView("numbered")  # fmt: skip
    intervals = scope.of(store.records("interval"), "ended_at")
    # One for about a second: few enough to compare all of them.
    intervals.dropDuplicates(["slot", "run", "ended_at"]).createOrReplaceTempView("intervals")
    doubled += doubled_transactions
    counted = all_batches.sparkSession.createDataFrame(list(doubled.items()), "slot string, n bigint")
    counted.createOrReplaceTempView("doubled")
    store.bad_lines().createOrReplaceTempView("bad_lines")
    store.file_rows().createOrReplaceTempView("files")
    return interval_s


def interval_of(seconds: float) -> int:
    """Return the shortest length of an interval that makes few enough of them, in seconds."""
    return next((one for one in INTERVALS_S if seconds / one <= _MOST_INTERVALS), INTERVALS_S[-1])
