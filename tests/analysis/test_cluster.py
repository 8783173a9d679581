"""The job of spark-submit on a cluster: a master and three workers, as processes of this machine."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from parapply.analysis.command import _json_value
from parapply.analysis.job import ReportRequest, make_report
from parapply.analysis.progress import Silent
from parapply.analysis.session import PACKAGE_FILE, SCRIPT_FILE, write_bundle
from tests.analysis.hand_log import batch, comparable, write, write_everything
from tests.fixtures.spark import WORKERS

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.analysis.duck import DuckEngine
    from tests.fixtures.spark import Cluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_three_workers_say_the_same_as_one_process(cluster: Cluster, engine: DuckEngine, tmp_path: Path) -> None:
    """Each of the workers does a part, and every figure is as DuckDB has it, and as it has it from their files.

    That Spark in one process says the same of this log is the rule of `test_spark`.
    """
    log, out, events = tmp_path / "log", tmp_path / "out", tmp_path / "events"
    write_everything(log)
    write(log, "apply-3.jsonl", [batch(n, slot="three") for n in range(1, 9)])
    write_bundle(tmp_path / "job")
    events.mkdir()
    settings = {
        # No task begins before all have registered, and each file is one.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
        "spark.cores.max": str(WORKERS),
        "spark.sql.shuffle.partitions": str(WORKERS),
        "spark.sql.adaptive.enabled": "true",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
    }
    job = ["--py-files", str(tmp_path / "job" / PACKAGE_FILE), str(tmp_path / "job" / SCRIPT_FILE)]
    lines = cluster.submit(settings, *job, str(log), "--out", str(out), "--no-what-if", "--json").splitlines()
    said = json.loads(lines[-1])
    assert (said["new_files"], said["records"], said["bad_lines"]) == (3, 22, 5)
    done = [json.loads(line) for path in events.iterdir() for line in path.read_text().splitlines()]
    by_worker = Counter(
        event["Task Info"]["Executor ID"]
        for event in done
        if event["Event"] == "SparkListenerTaskEnd" and not event["Task Info"]["Failed"]
    )
    assert len(by_worker) == WORKERS
    alone = ReportRequest(log=str(log), out=str(tmp_path / "alone"), what_if=None)
    assert _comparable(said["tables"]) == _of(engine, alone)
    # The same rows from the workers' files; files of the store are in the order in which they came.
    assert _of(engine, ReportRequest(log=str(log), out=str(out), what_if=None)) == _comparable(said["tables"])


def _of(engine: DuckEngine, request: ReportRequest) -> dict[str, list[tuple[Any, ...]]]:
    tables = make_report(engine, request, Silent()).tables
    return _comparable(json.loads(json.dumps(tables, default=_json_value)))


def _comparable(tables: dict[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
    return {name: comparable(rows) for name, rows in tables.items()}
