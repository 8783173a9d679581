"""The report while the daemon writes: a stream of closed files, each converted once, the page made again after each.

In go a session and a `ReportRequest`; out comes the same folder as from `job`, kept up to date until it is stopped.
Spark's checkpoint remembers which files the stream has handed out, and the store's manifest which are done: a stream
that is killed hands its last files out again, and those that are done are passed over. So are files that a report
without ``--follow`` has converted, and a lost checkpoint costs a check of every file and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.analysis.job import check_log, spark_errors
from parapply.analysis.lines import JSON_OPTIONS
from parapply.analysis.schema import wide_schema
from parapply.analysis.storage import Storage
from parapply.analysis.store import SUFFIXES, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from parapply.analysis.job import ReportRequest

_OPTIONS: Final = {
    **JSON_OPTIONS,
    "pathGlobFilter": f"*{{{','.join(SUFFIXES)}}}",
    "recursiveFileLookup": "true",
    # By default a file a week older than the newest is passed over; a daemon of long ago may have left one.
    "maxFileAge": "36500d",
    # Bounds what is repeated after a stop in the first pass over a log of years.
    "maxFilesPerTrigger": "64",
}


def start(
    spark: SparkSession, request: ReportRequest, every_s: float | None, on_load: Callable[[SparkSession, int], None]
) -> StreamingQuery:
    """Start the stream.

    Args:
        spark: ends with the caller.
        request: as for `job.make_report`.
        every_s: seconds between checks for new files; None handles those that are there and ends.
        on_load: called, in another thread, with the number of files that have been converted, and a session of it.

    Raises:
        ReportRefused: there is no such log.
        ReportFailed: Spark could not start; see also `StreamingQuery.exception` later.
    """
    with spark_errors():
        check_log(Storage(spark), request)
        lines = spark.readStream.schema(wide_schema()).options(**_OPTIONS).json(request.log).select("*", "_metadata")

        def load(part: DataFrame, _number: int) -> None:
            new_files = _load(part, request)
            if new_files:
                on_load(part.sparkSession, new_files)

        writer = lines.writeStream.queryName("parapply report").foreachBatch(load)
        writer = writer.option("checkpointLocation", f"{request.out.rstrip('/')}/checkpoint")
        if every_s is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds").start()


def _load(part: DataFrame, request: ReportRequest) -> int:
    """Convert the lines of files that are not in the store yet; return how many files."""
    spark = part.sparkSession
    storage = Storage(spark)
    store = Store(spark, storage, request.out)
    files, log = storage.files(request.log, SUFFIXES), storage.qualified(request.log)
    return store.load_stream(part, files, log, storage.raw_path(request.log))
