"""The Spark session: Spark in this process on one machine, or the one that spark-submit has started.

In go the memory and the number of cores; out comes a session that thinks in UTC. Java's output goes to a file, from
which `Local.said` takes the end when something fails. A person sees the report's lines only.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from parapply.analysis.java import find_java
from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

#: Settings of every run, on one machine and on a cluster.
SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
}
#: Where this process is the driver: nothing is shown in a browser, nothing is printed.
_DRIVER_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # Of the stream's log only; the files are small.
    "spark.sql.streaming.minBatchesToRetain": "10",
}
#: On one machine nothing listens to the outside.
_LOCAL_SETTINGS: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # On one machine no executor can be lost: one that was asleep, or stopped, continues with what it had.
    "spark.executor.heartbeatInterval": "3600s",
    "spark.network.timeout": "86400s",
}
_SAID_BYTES: Final = 2000


class Local:
    """A session in this process, and what its Java printed."""

    def __init__(self, session: SparkSession, output: Path) -> None:
        self.session = session
        self._output = output

    def said(self) -> str:
        """Return the end of what Java printed."""
        return self._output.read_bytes()[-_SAID_BYTES:].decode(errors="replace")


@contextmanager
def local_session(
    memory: str, cores: int | None, settings: dict[str, str] | None = None, master: str | None = None
) -> Iterator[Local]:
    """Run Spark in this process, or its driver, until the end of the block.

    Args:
        memory: of Java, for example ``2g``: what is larger goes to Spark's folder for temporary files.
        cores: None takes all.
        settings: more of Spark's own, which win.
        master: of a cluster; None is this machine.

    Raises:
        JavaMissing: no Java of a fitting version was found.
        ReportRefused: Java does not start with these settings.
    """
    find_java(os.environ).apply(os.environ)
    if master is None:
        # It would look for an address itself and may take one that a firewall closes.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("parapply report").master(master or f"local[{cores or '*'}]")
    partitions = str(2 * (cores or os.cpu_count() or 1))
    all_settings = {
        **SETTINGS,
        **_DRIVER_SETTINGS,
        **({} if master else {**_LOCAL_SETTINGS, "spark.sql.shuffle.partitions": partitions}),
        "spark.driver.memory": memory,
        **({"spark.cores.max": str(cores)} if master and cores else {}),
        **(settings or {}),
    }
    # It prints every error that Java raises, with its stack, besides raising it.
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    for name, value in all_settings.items():
        builder = builder.config(name, value)
    with tempfile.NamedTemporaryFile(prefix="parapply-spark-", suffix=".log") as output:
        with _standard_error_to(output.fileno()):
            try:
                session = builder.getOrCreate()
            except Exception as error:
                # Java says why on its standard error, and PySpark only that it has ended.
                said = Path(output.name).read_text(errors="replace").strip().splitlines()
                raise ReportRefused(
                    f"Spark does not start: {said[-1] if said else error}", hint="see --memory, and JAVA_HOME"
                ) from error
        try:
            yield Local(session, Path(output.name))
        finally:
            session.stop()


@contextmanager
def _standard_error_to(descriptor: int) -> Iterator[None]:
    """Let programs started in the block write their standard error elsewhere, as long as they live."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# The executors need neither file: all work on records is Spark's own. The driver needs the package's dependencies.
PACKAGE_FILE: Final = "parapply.zip"
SCRIPT_FILE: Final = "parapply_report.py"
_SUFFIXES: Final = (".py", ".html")
# Always the same file from the same sources.
_TIME: Final = (2026, 1, 1, 0, 0, 0)
_SCRIPT: Final = '''\
"""The report over parapply's apply log, for spark-submit (--py-files parapply.zip)."""

import sys

from parapply.analysis.command import submitted

sys.exit(submitted(sys.argv[1:]))
'''


def write_bundle(folder: Path) -> None:
    """Write both files, over existing ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / PACKAGE_FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in _sources(resources.files("parapply"), "parapply"):
            archive.writestr(zipfile.ZipInfo(name, _TIME), file.read_bytes(), zipfile.ZIP_DEFLATED)
    (folder / SCRIPT_FILE).write_text(_SCRIPT)


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, path)
        elif entry.name.endswith(_SUFFIXES):
            yield path, entry
