"""Spark over the same logs as DuckDB. One module, so that Java starts once."""

from __future__ import annotations

import gzip
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError

from parapply.analysis.compute import QUERIES
from parapply.analysis.follow import stream
from parapply.analysis.job import ReportRequest, convert, show
from parapply.analysis.progress import Silent
from parapply.analysis.spark import SparkEngine
from parapply.analysis.store import Store
from parapply.analysis.views import Scope, make_views
from parapply.applylog_schema import BackendSample, ConflictCount, ConflictRecord, IntervalRecord, LateKey, LockHolder
from parapply.errors import ReportRefused
from tests.analysis.hand_log import RECORDS, A, at, batch, old_line, transaction, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from parapply.analysis.duck import DuckEngine
    from parapply.analysis.engine import Engine, Rows

# The first test also waits for Java.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def _write_log(folder: Path) -> None:
    """Write a log in two files with everything that a figure looks at."""
    conflict = {"type": "update_missing", "table": A, "policy": "skip", "outcome": "skipped"}
    backends = (BackendSample(wait="CPU", samples=3), BackendSample(wait="IO:WALSync", samples=1))
    locks = (LockHolder(pid=4711, role="app", relation="archive.a", mode="ShareLock"),)
    late: dict[str, Any] = {"late_keys": 1, "late_rows": (LateKey(table=A, key="ab12cd34"),)}
    write(folder, "apply-1.jsonl", RECORDS)
    write(folder, "é two.jsonl", [
        batch(1, slot="two", run="a", committed_at=0.29, commit_s=0.29, queued_s=0.0, **late),
        transaction(1, 1, slot="two", run="a"),
        IntervalRecord(
            slot="two", run="a", ended_at=at(1), length_s=1.0, workers=4, leader_cpu_s=0.1, publisher_s=0.2,
            paused_s=0.3, behind_bytes=1 << 22, backends=backends, locks=locks,
        ),
        batch(4, slot="two", run="a", conflicts=(ConflictRecord(**conflict),),
              more_conflicts=(ConflictCount(**conflict, conflicts=530),)),
        batch(5, n_transactions=-5),
        "torn", b"\xff\xfe", "", '{"record": "poem"}', '{"record": "batch", "seq": "x"}',
        old_line(batch(1, slot="old")), old_line(batch(2, slot="old")).replace('"schema_version":1,', ""),
    ])  # fmt: skip


def _comparable(rows: Rows) -> list[tuple[Any, ...]]:
    """Return rows in an order that does not depend on the engine; sums of fractions depend on it in the last digit."""
    found = [tuple(float(f"{one:.9g}") if isinstance(one, float) else one for one in row.values()) for row in rows]
    return sorted(found, key=repr)


def test_both_engines_say_the_same(spark: SparkSession, engine: DuckEngine, tmp_path: Path) -> None:
    """Each figure is equal, whichever engine converts a file and whichever computes: a folder can go to the other.

    A duplicated file makes every query longer, and changes only the views, so it comes in the end.
    """
    request = ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out"))
    _write_log(tmp_path / "log")
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
        assert _comparable(rows) == _comparable(by_duckdb.tables[name]), name
        assert rows or name in ("gaps", "ignored_files", "comparison"), name
    assert by_spark.in_short == by_duckdb.in_short
    assert (by_spark.records, by_spark.bad_lines) == (by_duckdb.records, by_duckdb.bad_lines) == (14, 5)
    write(tmp_path / "log" / "copy", "apply-1.jsonl", RECORDS)
    assert convert(engine, request, Silent()) == 1
    summaries = [_summary(one, request) for one in (sparks, engine)]
    assert _comparable(summaries[0]) == _comparable(summaries[1])
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
