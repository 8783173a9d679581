"""The views that the figures' queries read: `batches`, `transactions`, `files`, `bad_lines`.

In go the rows of the store; out come views with the interval of each record, so that all figures share the intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  as everyone imports it

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame

    from parapply.analysis.store import Store

#: Lengths of an interval that a person can read off an axis.
INTERVALS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
#: As many as a plot can show; what is longer has intervals of days.
_MOST_INTERVALS: Final = 240

_ROWS_OF: Final = "aggregate(map_values(rows), 0L, (sum, counts) -> sum + {})"
_N_ROWS: Final = _ROWS_OF.format("coalesce(counts.insert, 0) + coalesce(counts.update, 0) + coalesce(counts.delete, 0)")
_N_TRUNCATES: Final = _ROWS_OF.format("coalesce(counts.truncate, 0)")
# 16/B374D848 is two numbers in hexadecimal, the first the high half.
_END_LSN_NUMBER: Final = (
    "CAST(conv(split_part(end_lsn, '/', 1), 16, 10) AS bigint) * 4294967296"
    " + CAST(conv(split_part(end_lsn, '/', 2), 16, 10) AS bigint)"
)


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

    def of(self, rows: DataFrame) -> DataFrame:
        """Return the rows within; by the day, too, so that other days are not read."""
        if self.slot is not None:
            rows = rows.where(F.col("slot") == self.slot)
        if self.since is not None:
            since = F.lit(self.since)
            rows = rows.where((F.col("committed_at") >= since) & (F.col("day") >= F.to_date(since)))
        if self.until is not None:
            until = F.lit(self.until)
            rows = rows.where((F.col("committed_at") < until) & (F.col("day") <= F.to_date(until)))
        return rows


def make_views(store: Store, scope: Scope) -> int:
    """Make the views.

    Returns:
        Length of an interval in seconds; 0 where there is no batch within the scope.
    """
    batches = scope.of(store.records("batch"))
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
        .withColumn("end_lsn_number", F.expr(_END_LSN_NUMBER))
        .withColumn("oldest_s", F.expr("(unix_micros(committed_at) - unix_micros(commit_time_first)) / 1e6"))
        .withColumn("delivery_s", F.expr("(unix_micros(received_at) - unix_micros(commit_time_last)) / 1e6"))
    )
    with_interval.createOrReplaceTempView("batches")
    scope.of(store.records("transaction")).createOrReplaceTempView("transactions")
    store.bad_lines().createOrReplaceTempView("bad_lines")
    store.file_rows().createOrReplaceTempView("files")
    return interval_s


def interval_of(seconds: float) -> int:
    """Return the shortest length of an interval that makes few enough of them, in seconds."""
    return next((one for one in INTERVALS_S if seconds / one <= _MOST_INTERVALS), INTERVALS_S[-1])
