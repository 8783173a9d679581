"""The report while the daemon writes: each closed file is converted once, the page made again after each.

In go an engine and a `ReportRequest`; out comes the same folder as from `job`, kept up to date until it is stopped.
With Spark it is a stream: its checkpoint remembers which files it has seen, and others are converted each time that
they appear. Only the store's manifest says which files are done, so a stream that is killed, has lost its
checkpoint or runs alongside a report without ``--follow`` counts each record once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from parapply.analysis.job import checked_store, convert
from parapply.analysis.progress import Silent
from parapply.analysis.store import SUFFIXES, Store

if TYPE_CHECKING:
    import threading

    from pyspark.sql import DataFrame

    from parapply.analysis.job import ReportRequest
    from parapply.analysis.spark import SparkEngine
    from parapply.analysis.store import Engine

_WAIT_S: Final = 1
#: Called with an engine, the number of files that have been converted, and the store where it is kept.
OnLoad = Callable[["Engine", int, "Store | None"], None]
_OPTIONS: Final = {
    "pathGlobFilter": f"*{{{','.join(SUFFIXES)}}}",
    "recursiveFileLookup": "true",
    # By default a file a week older than the newest is passed over; a daemon of long ago may have left one.
    "maxFileAge": "36500d",
}


def look(engine: Engine, request: ReportRequest, every_s: float, on_load: OnLoad, stop: threading.Event) -> None:
    """Look for new files until the event is set.

    Raise ReportRefused or ReportFailed as `job.convert`.
    """
    with engine.errors():
        store = checked_store(engine, request)
    while True:
        new_files = convert(engine, request, Silent(), store)
        if new_files:
            on_load(engine, new_files, store)
            with engine.errors():
                store.compact()
        if stop.wait(every_s):
            return


def stream(
    engine: SparkEngine, request: ReportRequest, every_s: float | None, on_load: OnLoad, stop: threading.Event
) -> None:
    """Do the same as a stream of Spark's; `every_s` None handles the existing files and ends.

    `on_load` is called in another thread, with another session.
    """
    from parapply.analysis.spark import SparkEngine  # noqa: PLC0415  PySpark

    with engine.errors():
        checked_store(engine, request)
        files = engine.session.readStream.options(**_OPTIONS).text(request.log)

        def load(part: DataFrame, _number: int) -> None:
            # Nothing is read through the stream: it says that there are files, and a broken one would end it.
            mine = SparkEngine(part.sparkSession)
            new_files = convert(mine, request, Silent())
            if new_files:
                on_load(mine, new_files, None)
                with mine.errors():
                    Store(mine, request.out).compact()

        writer = files.writeStream.queryName("parapply report").foreachBatch(load)
        writer = writer.option("checkpointLocation", f"{request.out.rstrip('/')}/checkpoint")
        if every_s is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds")
        query = writer.start()
        while not stop.is_set() and not query.awaitTermination(_WAIT_S):
            pass
        # Converted files are in the manifest; others are handed out again.
        query.stop()
