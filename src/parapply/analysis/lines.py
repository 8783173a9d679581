"""Lines of the apply log as rows: what each is, and why a line is none.

In go lines read with `schema.wide_schema`; out comes a row for each line with its kind (`batch`, `transaction` or
`bad`), the day and the file. A torn, foreign or newer line is a row of the kind `bad` with a reason; nothing raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  as everyone imports it

from parapply.analysis.schema import BAD, KIND, TORN, required_of, wide_schema
from parapply.applylog_schema import READABLE_VERSIONS, RECORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

#: Columns besides those of the records.
REASON: Final = "reason"
FILE: Final = "file"
DAY: Final = "day"
#: How the log's files are read, by the batch job and by the stream.
JSON_OPTIONS: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": TORN}
#: Fields that are sums in the figures: one below 0 would be taken off what other records say.
_COUNTED: Final = (
    "n_transactions", "n_changes", "size_bytes", "queued_s", "wait_dependency_s", "execute_s", "wait_turn_s",
    "commit_s",
)  # fmt: skip
#: Characters of a bad line that are kept: enough to see what it is.
_SHOWN_CHARACTERS: Final = 200


def read_lines(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Return the lines of these files."""
    return spark.read.schema(wide_schema()).options(**JSON_OPTIONS).json(list(paths))


def as_records(lines: DataFrame, raw_root: str) -> DataFrame:
    """Say of each line what it is.

    Args:
        lines: of `read_lines`, or of a stream with the same schema and options.
        raw_root: the log's folder as `Storage.raw_path` has it.

    Returns:
        The columns of `wide_schema`, with `KIND` one of the records' or `BAD`; `REASON` null but for bad lines; `FILE`
        below the folder; `DAY` in UTC, of the commit on the target, for bad lines that on which they are read.
    """
    root = raw_root.rstrip("/") + "/"
    # file:/logs/x, file:///logs/x or hdfs://host:8020/logs/x: the path begins after scheme and host.
    raw_path = F.regexp_replace(F.col("_metadata.file_path"), "^[A-Za-z0-9+.-]+:(//[^/]*)?", "")
    reason = _reason()
    return (
        lines.withColumn(FILE, F.substring(raw_path, len(root) + 1, 4096))
        .withColumn(REASON, reason)
        .withColumn(KIND, F.when(F.col(REASON).isNull(), F.col(KIND)).otherwise(F.lit(BAD)))
        .withColumn(
            DAY,
            F.when(F.col(REASON).isNull(), F.to_date(F.coalesce("committed_at", "ended_at"))).otherwise(
                F.current_date()
            ),
        )
        # A line of another program may hold anything; a record that only lacks a field is known by its other fields.
        .withColumn(TORN, F.substring(TORN, 1, _SHOWN_CHARACTERS))
    )


def _reason() -> Column:
    """Return why a line is no record, or null."""
    reason = F.when(F.col(TORN).isNotNull(), F.lit("not a record in JSON, or a field of another type"))
    reason = reason.when(F.col(KIND).isNull() | ~F.col(KIND).isin(list(RECORDS)), F.lit("unknown kind of record"))
    version = F.col("schema_version")
    # A record without a version has the first: every record has one, but the rule is the structs'.
    reason = reason.when(
        ~F.coalesce(version, F.lit(1)).isin(list(READABLE_VERSIONS)),
        F.concat(F.lit("schema version "), version.cast("string"), F.lit(", which this parapply does not read")),
    )
    for name in _COUNTED:
        reason = reason.when(F.col(name) < 0, F.lit(f"the field {name} is below 0"))
    for kind, struct in RECORDS.items():
        for name in required_of(struct):
            is_missing = (F.col(KIND) == kind) & F.col(name).isNull()
            reason = reason.when(is_missing, F.lit(f"a {kind} without the field {name}"))
    return reason
