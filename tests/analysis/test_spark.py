"""Spark over the same logs as DuckDB. One module, so that Java starts once."""

from __future__ import annotations

import gzip
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError
from pyarrow import parquet

from parapply.analysis import store as stored
from parapply.analysis.compute import QUERIES
from parapply.analysis.engine import STORED
from parapply.analysis.follow import stream
from parapply.analysis.job import ReportRequest, convert, show
from parapply.analysis.progress import Silent
from parapply.analysis.spark import SparkEngine, shares_of
from parapply.analysis.store import SUFFIXES, Store
from parapply.analysis.views import Scope, make_views
from parapply.errors import ReportRefused
from tests.analysis.hand_log import RECORDS, batch, comparable, write, write_everything

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from parapply.analysis.duck import DuckEngine
    from parapply.analysis.engine import Rows
    from parapply.analysis.store import Engine

# The first test also waits for Java.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def test_both_engines_say_the_same(spark: SparkSession, engine: DuckEngine, tmp_path: Path) -> None:
    """Each figure is equal, whichever engine converts a file and whichever computes: a folder can go to the other.

    A duplicated file makes every query longer, and changes only the views, so it comes in the end.
    """
    request = ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out"))
    write_everything(tmp_path / "log")
    later = tmp_path / "log" / "é two.jsonl"
    later.rename(tmp_path / "later")
    sparks = SparkEngine(spark)
    assert convert(engine, request, Silent()) == 1
    (tmp_path / "later").rename(later)
    assert convert(sparks, request, Silent()) == 1
    by_spark = show(sparks, request, Silent(), new_files=1)
    shutil.rmtree(tmp_path / "out" / "records" / "_folded")
    by_duckdb = show(engine, request, Silent(), new_files=1)
    assert list(by_spark.tables) == list(by_duckdb.tables)
    for name, rows in by_spark.tables.items():
        assert comparable(rows) == comparable(by_duckdb.tables[name]), name
        assert rows or name in ("gaps", "ignored_files", "comparison"), name
    assert by_spark.in_short == by_duckdb.in_short
    assert (by_spark.records, by_spark.bad_lines) == (by_duckdb.records, by_duckdb.bad_lines) == (14, 5)
    write(tmp_path / "log" / "copy", "apply-1.jsonl", RECORDS)
    assert convert(engine, request, Silent()) == 1
    summaries = [_summary(one, request) for one in (sparks, engine)]
    assert comparable(summaries[0]) == comparable(summaries[1])
    summary = summaries[0][0]
    assert (summary["slot"], summary["batches"], summary["doubled_records"]) == ("app", 3, len(RECORDS))


def _summary(engine: Engine, request: ReportRequest) -> Rows:
    """Return the figure that counts batches, transactions and doubled records, over views of all that is converted."""
    assert make_views(Store(engine, request.out), Scope())
    return engine.rows(QUERIES["summary"])


def test_a_stream_passes_a_broken_file_over(spark: SparkSession, tmp_path: Path) -> None:
    """Started again without its checkpoint it counts each file once, and a file that is cut off does not end it.

    The report is made once: that it is made again of more files is the rule of `test_report`.
    """
    log = tmp_path / "log"
    # No record is of this slot, so no figure is computed.
    request = ReportRequest(log=str(log), out=str(tmp_path / "out"), scope=Scope(slot="none"))
    loaded: list[tuple[int, int]] = []

    def on_load(mine: Engine, new_files: int, _store: object) -> None:
        records = Store(mine, request.out).n_records
        assert loaded or show(mine, request, Silent(), new_files=new_files).records == records
        loaded.append((new_files, records))

    write(log, "apply-1.jsonl", [batch(1), batch(2)])
    (log / "apply-2.jsonl.gz").write_bytes(gzip.compress(b"cut off" * 100)[:20])
    stream(SparkEngine(spark), request, None, on_load, threading.Event())
    write(log, "apply-3.jsonl", [batch(3)])
    (tmp_path / "out" / "checkpoint").rename(tmp_path / "lost")
    stream(SparkEngine(spark), request, None, on_load, threading.Event())
    assert loaded == [(1, 2), (1, 3)]


def test_what_java_may_not_read_is_no_matter_of_memory(spark: SparkSession) -> None:
    """The reason is Java's, the hint names the permission."""
    java: Any = spark._jvm
    denied = java.java.io.FileNotFoundException("/log/apply-1.jsonl (Permission denied)")
    with pytest.raises(ReportRefused, match="Permission denied"), SparkEngine(spark).errors():
        raise Py4JJavaError("denied", denied)


def test_rows_of_a_slots_day_are_read_alone(spark: SparkSession, tmp_path: Path) -> None:
    """Of a slot's day only the files of the day are opened, and of these only pages that have the slot.

    A large load has a file for each share of the slots, a small one has one for a day: its slots are neighbours there.
    """
    log, engine = tmp_path / "log", SparkEngine(spark)
    slots = [f"slot_{n:02}" for n in range(16)]
    for day, begin in (("20241121", 20), ("20241122", 86_420)):
        for slot in slots:
            records = [batch(n, slot=slot, committed_at=begin + n) for n in range(1, 41)]
            write(log, f"apply-{slot}-{day}T000000Z-1-1.jsonl", records)
    request = ReportRequest(log=str(log), out=str(tmp_path / "out"))
    spark.sparkContext._jsc.hadoopConfiguration().set("parquet.page.row.count.limit", "40")
    convert(engine, request, Silent())
    store = Store(engine, request.out)
    store.open({"2024-11-22"})
    assert {path.rsplit("/", 2)[1] for path in spark.table(STORED).inputFiles()} == {"day=2024-11-22"}
    assert len(spark.table(STORED).inputFiles()) == 1
    assert _read(spark, "SELECT seq FROM all_batch") == (640, 640)
    n_rows, n_read = _read(spark, "SELECT seq FROM all_batch WHERE slot = 'slot_07'")
    assert n_rows == 40
    assert n_read <= 4 * 40
    files = [replace(file, size_bytes=1 << 26) for file in engine.storage.files(request.log, SUFFIXES)]
    assert shares_of(files) == 4
    # As in a report, but that tasks of little are not put together.
    settings = {"shuffle.partitions": "64", "adaptive.enabled": "true", "adaptive.coalescePartitions.enabled": "false"}
    before = {name: spark.conf.get(f"spark.sql.{name}", "true") for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(f"spark.sql.{name}", value)
        engine.read_lines(files, request.log)
        engine.write(stored.records(engine.words), str(tmp_path / "large"))
    finally:
        for name, was in before.items():
            spark.conf.set(f"spark.sql.{name}", str(was))
    for day in ("2024-11-21", "2024-11-22"):
        found = [
            set(parquet.read_table(path, columns=["slot"], partitioning=None)["slot"].to_pylist())
            for path in (tmp_path / "large" / "record=batch" / f"day={day}").glob("*.parquet")
        ]
        assert 2 <= len(found) <= 4
        assert sum(map(len, found)) == len(set().union(*found)) == len(slots)


def _read(spark: SparkSession, query: str) -> tuple[int, int]:
    """Return the numbers of rows of a query, and of rows that were read from files for it."""
    rows: Any = spark.sql(query)
    n_rows = len(rows.collect())
    leaves = rows._jdf.queryExecution().executedPlan().collectLeaves()
    return n_rows, sum(leaves.apply(n).metrics().apply("numOutputRows").value() for n in range(leaves.size()))
