"""Closed files of the log as Parquet, each converted once: what has been done is a manifest, and nothing else counts.

In go the folder of the log and the folder of the report; out come rows under ``records/``, by kind of record, day and
load. A load is one group of files that was written together; it counts when its entry of the manifest is there, which
is written last, whole and under a new number. So a job that dies in between leaves rows that are never read and that
the next job writes again, and a file whose name is in the manifest is never read again, even if it is no longer there.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  as everyone imports it

from parapply.analysis.lines import DAY, FILE, REASON, as_records, read_lines
from parapply.analysis.schema import BAD, KIND, TORN, columns_of, wide_schema, with_defaults
from parapply.applylog_schema import RECORDS
from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from parapply.analysis.storage import Storage, StoredFile

#: Closed files of the log, as the daemon leaves them or packed since.
PACKED: Final = ".jsonl.gz"
SUFFIXES: Final = (".jsonl", PACKED)
#: How files end that are not closed.
_OPEN: Final = ".jsonl.open"
_LOAD: Final = "load"
# About a minute of work on two cores: what is repeated if the job dies, and how often progress is seen.
_GROUP_BYTES: Final = 2 * 1024**3
# Rows of a load without an entry may belong to a job at work; a job of a day ago is none.
_ABANDONED: Final = timedelta(days=1)
_STAMP: Final = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, kw_only=True)
class LoadedFile:
    """A file of the log that is in the store.

    Attributes:
        file: its path below the log's folder.
        size_bytes: when it was read.
        records: lines that are records.
        bad: lines that are none.
    """

    file: str
    size_bytes: int
    records: int
    bad: int


class Store:
    """The rows of all loads. One job at a time writes here; a second one notices at its next entry and stops."""

    def __init__(self, spark: SparkSession, storage: Storage, folder: str) -> None:
        self._spark = spark
        self._folder = folder
        self._storage = storage
        self._records = f"{folder.rstrip('/')}/records"
        self._manifest = f"{self._records}/_manifest"
        self._entries: dict[int, tuple[str, list[LoadedFile]]] = {}
        self._logs: set[str] = set()
        for file in storage.files(self._manifest, ".json"):
            entry = json.loads(storage.read_text(file.path))
            number = int(file.name.removesuffix(".json"))
            self._entries[number] = entry["load"], [LoadedFile(**one) for one in entry["files"]]
            if "log" in entry:  # entries of older versions do not say
                self._logs.add(entry["log"])

    @property
    def files(self) -> dict[str, LoadedFile]:
        """Return the files that are in the store by name."""
        return {file.file: file for _, files in self._entries.values() for file in files}

    def check_log(self, log: str) -> None:
        """Refuse another log than the one that is in the store: their files may have the same names.

        Args:
            log: its folder with the scheme, as `Storage.qualified` has it.

        Raises:
            ReportRefused: it is another one.
        """
        others = sorted(self._logs - {log})
        if others:
            raise ReportRefused(
                f"{self._folder} holds the report of another log: {others[0]}.",
                hint="name another folder with --out; to see both in one report, put both below one folder",
            )

    def missing(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Return the files that are not in the store."""
        done = self.files
        return [file for file in files if file.name not in done]

    def changed(self, files: Iterable[StoredFile]) -> list[str]:
        """Return the names of files that have another size than when they were read: they are not read again."""
        done = self.files
        return [file.name for file in files if file.name in done and file.size_bytes != done[file.name].size_bytes]

    def load_files(self, files: Sequence[StoredFile], log: str, raw_root: str) -> None:
        """Convert files that are not in the store; all of them are there afterwards, or none.

        Args:
            files: to convert.
            log: as for `check_log`.
            raw_root: as for `lines.as_records`.

        Raises:
            ReportRefused: another job has written here in the meantime; nothing of this load counts.
        """
        lines = read_lines(self._spark, [file.path for file in files])
        load, loaded = self._write(as_records(lines, raw_root), {file.name: file.size_bytes for file in files})
        # A file of empty lines has no rows; it is done all the same.
        with_rows = {one.file for one in loaded}
        empty = [
            LoadedFile(file=file.name, size_bytes=file.size_bytes, records=0, bad=0)
            for file in files
            if file.name not in with_rows
        ]
        self._enter(load, log, loaded + empty)

    def load_stream(self, lines: DataFrame, files: Sequence[StoredFile], log: str, raw_root: str) -> int:
        """Convert the lines of files that are not in the store and pass the others over.

        Args:
            lines: what a stream hands out at once, with the column ``_metadata``.
            files: all files of the log, for their sizes.
            log: as for `check_log`.
            raw_root: as for `lines.as_records`.

        Returns:
            Number of files converted.

        Raises:
            ReportRefused: as `load_files`.
        """
        records = as_records(lines, raw_root)
        if self._entries:
            records = records.where(~F.col(FILE).isin(list(self.files)))
        load, loaded = self._write(records.drop("_metadata"), {file.name: file.size_bytes for file in files})
        if loaded:
            self._enter(load, log, loaded)
        return len(loaded)

    def _write(self, records: DataFrame, sizes: dict[str, int]) -> tuple[str, list[LoadedFile]]:
        """Write the rows of a load; they do not count yet."""
        load = f"{datetime.now(UTC).strftime(_STAMP)}-{uuid.uuid4().hex[:8]}"
        records.withColumn(_LOAD, F.lit(load)).write.mode("append").partitionBy(KIND, DAY, _LOAD).parquet(self._records)
        written = self._spark.read.schema(_stored_schema()).parquet(self._records).where(F.col(_LOAD) == load)
        rows = written.groupBy(FILE).agg(
            F.count_if(F.col(KIND) != BAD).alias("records"), F.count_if(F.col(KIND) == BAD).alias("bad")
        )
        return load, [
            LoadedFile(file=row[FILE], size_bytes=sizes.get(row[FILE], 0), records=row["records"], bad=row["bad"])
            for row in rows.orderBy(FILE).collect()
        ]

    def _enter(self, load: str, log: str, files: list[LoadedFile]) -> None:
        number = max(self._entries, default=0) + 1
        entry = json.dumps({"load": load, "log": log, "files": [asdict(file) for file in files]}, indent=1)
        if not self._storage.write(f"{self._manifest}/{number:06}.json", entry.encode(), is_new=True):
            raise ReportRefused(
                "Another report has written into this folder since this one began.",
                hint="let it finish, then run this one again",
            )
        self._entries[number] = load, files
        self._logs.add(log)

    def remove_abandoned(self) -> None:
        """Remove rows of loads that have no entry and are older than a day: their job has died."""
        loads = {load for load, _ in self._entries.values()}
        oldest = (datetime.now(UTC) - _ABANDONED).strftime(_STAMP)
        for folder in self._storage.folders(f"{self._records}/{KIND}=*/{DAY}=*/{_LOAD}=*"):
            load = folder.rpartition(f"{_LOAD}=")[2]
            if load not in loads and load < oldest:
                self._storage.remove(folder)

    def records(self, kind: str) -> DataFrame:
        """Return the records of a kind, with defaults where an older daemon wrote no such field, `FILE` and `DAY`."""
        struct = RECORDS[kind]
        rows = self._rows().where(F.col(KIND) == kind).select(*columns_of(struct), FILE, DAY)
        return with_defaults(rows, struct)

    def bad_lines(self) -> DataFrame:
        """Return the lines that are no record: `FILE`, `REASON`, and the beginning of the line or null."""
        return self._rows().where(F.col(KIND) == BAD).select(FILE, REASON, F.col(TORN).alias("line"))

    def file_rows(self) -> DataFrame:
        """Return the files as rows: the fields of `LoadedFile`."""
        rows = [asdict(file) for file in self.files.values()]
        return self._spark.createDataFrame(rows, "file string, size_bytes bigint, records bigint, bad bigint")

    def _rows(self) -> DataFrame:
        loads = [load for load, _ in self._entries.values()]
        # Partitions of other loads are not even opened.
        return self._spark.read.schema(_stored_schema()).parquet(self._records).where(F.col(_LOAD).isin(loads))


def ignored(files: Iterable[StoredFile]) -> list[tuple[StoredFile, str]]:
    """Return the files that no report reads, each with the reason."""
    return [(file, _why_ignored(file)) for file in files if not file.name.endswith(SUFFIXES)]


def _why_ignored(file: StoredFile) -> str:
    if file.name.endswith(_OPEN):
        return "not closed: its daemon closes it after applylog.rotate_s, or the next daemon there if this one died"
    return "not named like a file of the log (*.jsonl, *.jsonl.gz)"


def groups(files: Sequence[StoredFile], limit_bytes: int = _GROUP_BYTES) -> Iterator[list[StoredFile]]:
    """Yield the files in groups of about this size, at least one in each."""
    group: list[StoredFile] = []
    size_bytes = 0
    for file in files:
        if group and size_bytes + file.size_bytes > limit_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(file)
        size_bytes += file.size_bytes
    if group:
        yield group


def _stored_schema() -> str:
    """Return the columns of the Parquet files; of the partitions, too, so that nothing is guessed."""
    columns = [f"`{field.name}` {field.dataType.simpleString()}" for field in wide_schema() if field.name != KIND]
    return ", ".join([*columns, f"{FILE} string, {REASON} string, {KIND} string, {DAY} date, {_LOAD} string"])
