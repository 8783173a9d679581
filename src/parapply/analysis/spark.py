"""Spark as the report's engine: a session on this machine or on a cluster, and files by Hadoop's names."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812  as everyone imports it

from parapply.analysis import schema
from parapply.analysis.engine import LINES, STORED, TORN_HINT, Rows, StoredFile, begun_of
from parapply.analysis.schema import DAY, FILE, KIND, TORN
from parapply.errors import ReportFailed, ReportRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession


_JSON_OPTIONS: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": TORN}
#: Bytes of log, about, in a file of a kind and day.
_SHARE_BYTES: Final = 256 * 1024**2
_SHARE: Final = "share"
_SLOT: Final = "slot"
_DAY_DIGITS: Final = len("20261121")
_DENIED: Final = "Permission denied"
_REASON: Final = re.compile(r"^(?:[\w.$]+(?:Exception|Error): |\[[A-Z_.]+\] )+")


class SparkEngine:
    """A session that ends with its owner; see `duck.DuckEngine` for each function."""

    words = schema.SPARK

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        self.storage = HadoopStorage(session)
        self._shares = 1

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except (PySparkException, Py4JError) as error:
            reason = reason_of(error)
            if _DENIED in reason:
                raise ReportRefused(
                    f"The report cannot go on: {reason}.",
                    hint="run it as a user who may read the log's folders and files, and write into --out",
                ) from error
            hint = "run it again: what was converted is kept; for 'Java heap space' see --memory"
            raise ReportFailed(f"Spark stopped: {reason}.", hint=TORN_HINT if ".parquet" in reason else hint) from error

    def done(self) -> float | None:
        tracker = self.session.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        total = sum(stage.numTasks for stage in stages if stage)
        return sum(stage.numCompletedTasks for stage in stages if stage) / total if total else None

    def rows(self, query: str, **arguments: Any) -> Rows:  # noqa: ANN401  values of SQL
        found = self.session.sql(query, args=arguments).collect()
        return [{name: _in_utc(value) for name, value in row.asDict().items()} for row in found]

    def stream(self, query: str, **arguments: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401  values of SQL
        yield from self.session.sql(query, args=arguments).toLocalIterator()

    def make_view(self, name: str, query: str) -> None:
        self.session.sql(query).createOrReplaceTempView(name)

    def make_table(self, name: str, columns: dict[str, str], rows: Sequence[Sequence[Any]]) -> None:
        values = list(zip(*rows, strict=True)) or [() for _ in columns]
        # From rows of Python each executor would need a Python to read them.
        table = pa.table(dict(zip(columns, values, strict=True)))
        self.session.createDataFrame(table, _columns(columns)).createOrReplaceTempView(name)

    def read_lines(self, files: Sequence[StoredFile], log: str) -> None:
        self._shares = shares_of(files)
        reader = self.session.read.schema(_columns(schema.wide_columns(self.words))).options(**_JSON_OPTIONS)
        root = self.storage.raw_path(log).rstrip("/") + "/"
        # file:/logs/x, file:///logs/x or hdfs://host:8020/logs/x: the path begins after scheme and host.
        raw_path = F.regexp_replace(F.col("_metadata.file_path"), "^[A-Za-z0-9+.-]+:(//[^/]*)?", "")
        name = F.substring(raw_path, len(root) + 1, 4096)
        rows = reader.json([file.path for file in files]).withColumn(FILE, name)
        # DuckDB refuses a file of Parquet whose texts hold other bytes.
        rows.withColumn(TORN, F.make_valid_utf8(F.col(TORN))).createOrReplaceTempView(LINES)

    def write(self, query: str, folder: str) -> None:
        rows = self.session.sql(query).withColumn(_SHARE, F.pmod(F.xxhash64(_SLOT), F.lit(self._shares)))
        # A task has some slots of a day, as neighbours in its file, where Parquet's statistics find them.
        rows = rows.hint("rebalance", KIND, DAY, _SHARE).sortWithinPartitions(KIND, DAY, _SLOT).drop(_SHARE)
        rows.write.mode("append").partitionBy(KIND, DAY).parquet(folder)

    def open_stored(self, root: str, folders: Sequence[str]) -> None:
        columns = schema.stored_columns(self.words)
        if folders:
            rows = self.session.read.schema(_columns(columns)).option("basePath", root).parquet(*folders)
        else:
            nothing = ", ".join(f"CAST(NULL AS {type_}) AS `{name}`" for name, type_ in columns.items())
            rows = self.session.sql(f"SELECT {nothing} WHERE false")
        rows.createOrReplaceTempView(STORED)


def shares_of(files: Sequence[StoredFile]) -> int:
    """Return in how many parts the slots of a day are written, by the days that the names of the files have.

    A part for each slot would be 18,250 files for a year of 50 small ones, most of each its footer.
    """
    days = {begun_of(file.name)[:_DAY_DIGITS] for file in files}
    return max(1, sum(file.size_bytes for file in files) // (_SHARE_BYTES * len(days))) if days else 1


def reason_of(error: Any) -> str:  # noqa: ANN401  of PySpark or of py4j
    """Return the line of a Java error that says what happened, without names of classes."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    line = next((one.strip() for one in text.splitlines() if one.strip()), type(error).__name__)
    return _REASON.sub("", line).rstrip(".")


def _columns(columns: dict[str, str]) -> str:
    return ", ".join(f"`{name}` {type_}" for name, type_ in columns.items())


def _in_utc(value: Any) -> Any:  # noqa: ANN401  of a row
    # PySpark gives local times without an offset.
    return value.astimezone(UTC) if isinstance(value, datetime) else value


class HadoopStorage:
    """Hadoop's file systems through the session's JVM; see `local.LocalStorage` for each function."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self._jvm: Any = spark._jvm  # noqa: SLF001  PySpark has no public way to Hadoop's file systems
        self._configuration: Any = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001

    def qualified(self, text: str) -> str:
        path = self._path(text)
        return str(path.getFileSystem(self._configuration).makeQualified(path).toString())

    def raw_path(self, text: str) -> str:
        return str(self._path(self.qualified(text)).toUri().getRawPath())

    def is_folder(self, text: str) -> bool:
        path = self._path(text)
        system = path.getFileSystem(self._configuration)
        return bool(system.exists(path)) and bool(system.getFileStatus(path).isDirectory())

    def files(self, folder: str, suffix: str | tuple[str, ...] = "") -> list[StoredFile]:
        path = self._path(folder)
        system = path.getFileSystem(self._configuration)
        if not system.exists(path):
            return []
        root = self.raw_path(folder).rstrip("/") + "/"
        found = []
        folders = [path]
        # Not listFiles(): it asks for permissions, too, and on a local disk that is a program started for each file.
        while folders:
            for status in system.listStatus(folders.pop()):
                if status.isDirectory():
                    folders.append(status.getPath())
                    continue
                name = str(status.getPath().toUri().getRawPath()).removeprefix(root)
                if name.endswith(suffix):
                    found.append(StoredFile(name=name, path=str(status.getPath()), size_bytes=int(status.getLen())))
        return sorted(found, key=lambda file: file.name)

    def why_unreadable(self, text: str) -> str:
        path = self._path(text)
        try:
            if path.toUri().getScheme() == "file":
                # Java's own error for a file that it may not read is that there is none.
                with Path(path.toUri().getPath()).open("rb"):
                    return ""
            path.getFileSystem(self._configuration).open(path).close()
        except OSError as error:
            return error.strerror or type(error).__name__
        except Py4JJavaError as error:
            return str(error.java_exception.toString()).partition(": ")[2].splitlines()[0]
        return ""

    def why_no_gzip(self, text: str) -> str:
        path = self._path(text)
        stream = path.getFileSystem(self._configuration).open(path)
        try:
            self._jvm.org.apache.commons.io.IOUtils.consume(self._jvm.java.util.zip.GZIPInputStream(stream))
        except Py4JJavaError as error:
            return str(error.java_exception.toString()).rpartition(": ")[2]
        finally:
            stream.close()
        return ""

    def read_text(self, text: str) -> str:
        path = self._path(text)
        stream = path.getFileSystem(self._configuration).open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()

    def write(self, text: str, content: bytes, *, is_new: bool = False) -> bool:
        path, part = self._path(text), self._path(f"{text}.part")
        system = path.getFileSystem(self._configuration)
        stream = system.create(part, True)
        try:
            stream.write(content)
        finally:
            stream.close()
        if system.exists(path):
            if is_new:
                system.delete(part, False)
                return False
            # Not every file system renames onto an existing file.
            system.delete(path, False)
        return bool(system.rename(part, path))

    def remove(self, text: str) -> None:
        path = self._path(text)
        path.getFileSystem(self._configuration).delete(path, True)

    def folders(self, pattern: str) -> list[str]:
        path = self._path(pattern)
        found = path.getFileSystem(self._configuration).globStatus(path)
        return [str(status.getPath()) for status in found or () if status.isDirectory()]

    def _path(self, text: str) -> Any:  # noqa: ANN401  a Java object
        return self._jvm.org.apache.hadoop.fs.Path(text)
