"""Closed files of the log as Parquet, each converted once: what has been done is a manifest, and nothing else counts.

In go the folder of the log and the folder of the report; out come rows under ``records/``, by load, kind of record and
day. A load is one group of files that was written together; it counts when its entry of the manifest exists, which is
written last, whole and under a new number. So a job that dies in between leaves rows that are never read and that the
next job writes again, and a file whose name is in the manifest is never read again, even if it no longer exists.

An entry counts the rows of each kind and day and the batches of each slot and day. So a report of some days opens only
the loads that have them, rows that are missing are noticed, and `fold` knows which slot has new batches of which day.
Rows are not in folders by slot also: for a year of 50 slots 18,250 files, most of each its footer, would replace 365.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from parapply.analysis.engine import LINES, LOST_HINT, STORED, begun_of
from parapply.analysis.schema import (
    BAD,
    DAY,
    FILE,
    KIND,
    LOAD,
    REASON,
    TORN,
    is_time,
    required_of,
    stored_columns,
    wide_columns,
    with_defaults,
)
from parapply.applylog_schema import READABLE_VERSIONS, RECORDS
from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from parapply.analysis.duck import DuckEngine
    from parapply.analysis.engine import StoredFile
    from parapply.analysis.local import LocalStorage
    from parapply.analysis.schema import TypeWords
    from parapply.analysis.spark import HadoopStorage, SparkEngine

#: Folders and small files.
Storage: TypeAlias = "LocalStorage | HadoopStorage"
#: An engine with its session: views and tables are seen by its queries only.
Engine: TypeAlias = "DuckEngine | SparkEngine"

#: Closed files of the log, as the daemon leaves them or packed since.
PACKED: Final = ".jsonl.gz"
SUFFIXES: Final = (".jsonl", PACKED)
#: How files end that are not closed.
_OPEN: Final = ".jsonl.open"
# About a minute of work on two cores: what is repeated if the job dies, and how often progress is seen.
_GROUP_BYTES: Final = 2 * 1024**3
_GROUP_FILES: Final = 10_000
# Rows of a load without an entry may belong to a job at work; a job of a day ago is none.
_ABANDONED: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Loads of one level that are written as one of the next.
_MANY: Final = 32
#: A kind and day has many files if it is in an eighth of these loads.
_FEWER: Final = 8
_STAMP: Final = "%Y%m%dT%H%M%SZ"
#: Numbers by kind of record or slot, and by day as the names of folders have it.
_ByDay = dict[str, dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class LoadedFile:
    """A file of the log that is in the store."""

    file: str  # its path below the log's folder
    size_bytes: int  # when it was read
    records: int  # lines that are records
    bad: int  # lines that are none


@dataclass(frozen=True, kw_only=True)
class _Entry:
    load: str  # whose rows count
    files: tuple[LoadedFile, ...]  # that they are of
    rows: _ByDay  # of each kind of record, by day
    batches: _ByDay = field(default_factory=dict)  # of each slot, by day
    level: int = 0  # how often rows were compacted to get here; 0: they come from the log
    newest_us: int = 0  # commit of the newest record, in microseconds since 1970; 0: there is none


class Store:
    """The rows of all loads. One job at a time writes here; a second one notices at its next entry and stops."""

    def __init__(self, engine: Engine, folder: str) -> None:
        self.engine = engine
        self._folder = folder
        self._storage = engine.storage
        self._records = f"{folder.rstrip('/')}/records"
        self._manifest = f"{self._records}/_manifest"
        self._entries: dict[int, _Entry] = {}
        #: The highest number that is known, also of entries that were replaced.
        self.number = 0
        self._logs: set[str] = set()
        #: Files that are in the store by name, in the order in which they came.
        self.files: dict[str, LoadedFile] = {}
        self._listed: list[StoredFile] | None = None
        self.n_records = 0
        self.n_bad = 0
        self.refresh()

    def refresh(self) -> None:
        """Read entries that have come since; an entry that was read is not read again."""
        replaced: set[int] = set()
        known = self.number
        for file in self._storage.files(self._manifest, ".json"):
            number = int(file.name.removesuffix(".json"))
            if number <= known:
                continue
            try:
                fields = json.loads(self._storage.read_text(file.path))
                replaced |= set(fields.pop("replaces", ()))
                self._logs |= {fields.pop("log")} - {""}
                fields["files"] = tuple(LoadedFile(**one) for one in fields["files"])
                entry = _Entry(**fields)
            except (ValueError, TypeError, KeyError) as error:
                raise ReportRefused(f"{file.path} is torn: it is no entry of a manifest.", hint=LOST_HINT) from error
            self._add(number, entry)
        for number in replaced:
            self._entries.pop(number, None)

    def _add(self, number: int, entry: _Entry) -> None:
        self._entries[number] = entry
        self.number = max(self.number, number)
        for file in entry.files:
            if file.file not in self.files:
                self.files[file.file] = file
                self.n_records += file.records
                self.n_bad += file.bad

    @property
    def newest(self) -> datetime | None:
        """Return the commit of the newest record; None: not known."""
        newest_us = max((entry.newest_us for entry in self._entries.values()), default=0)
        return _EPOCH + timedelta(microseconds=newest_us) if newest_us else None

    @property
    def days(self) -> set[str]:
        """Return the days of all rows, as texts that sort."""
        return {day for entry in self._entries.values() for _, day in _numbers(entry.rows)}

    def batches(self) -> dict[tuple[str, str], int]:
        """Return the number of batches by slot and day. It grows with each that comes, and with nothing else."""
        found: Counter[tuple[str, str]] = Counter()
        for entry in self._entries.values():
            found.update(_numbers(entry.batches))
        return found

    def check_log(self, log: str) -> None:
        """Refuse another log than the one in the store, because their files may have the same names.

        Raises:
            ReportRefused: it is another one.
        """
        others = sorted(self._logs - {self._storage.qualified(log)})
        if others:
            raise ReportRefused(
                f"{self._folder} holds the report of another log: {others[0]}.",
                hint="name another folder with --out; to see both in one report, put both below one folder",
            )

    def listed(self, log: str, *, is_new: bool = False) -> list[StoredFile]:
        """Return all files below the log's folder, as they were listed last; `is_new` lists them again."""
        if self._listed is None or is_new:
            self._listed = self._storage.files(log)
        return self._listed

    def missing(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Return the files that are not in the store."""
        return [file for file in files if file.name not in self.files]

    def changed(self, files: Iterable[StoredFile]) -> list[str]:
        """Return the names of files that have another size than when they were read: they are not read again."""
        done = self.files
        return [file.name for file in files if file.name in done and file.size_bytes != done[file.name].size_bytes]

    def load_files(self, files: Sequence[StoredFile], log: str) -> None:
        """Convert files that are not in the store; afterwards it has all of them, or none.

        Raises:
            ReportRefused: another job has written here in the meantime; nothing of this load counts.
        """
        self.engine.read_lines(files, log)
        self._enter(self._write({file.name: file.size_bytes for file in files}), self._storage.qualified(log))

    def _write(self, sizes: dict[str, int]) -> _Entry:
        """Write the rows of a load; they do not count yet."""
        entry = self._write_load(records(self.engine.words), ())
        rows = self.engine.rows(
            f"SELECT {FILE}, count_if({KIND} <> '{BAD}') AS records, count_if({KIND} = '{BAD}') AS bad"
            f" FROM {STORED} GROUP BY {FILE} ORDER BY {FILE}"
        )
        # A file of empty lines has no rows; it is done all the same.
        counts = dict.fromkeys(sizes, (0, 0)) | {row[FILE]: (row["records"], row["bad"]) for row in rows}
        files = tuple(
            LoadedFile(file=name, size_bytes=sizes.get(name, 0), records=records, bad=bad)
            for name, (records, bad) in sorted(counts.items())
        )
        return replace(entry, files=files)

    def _write_load(self, query: str, files: tuple[LoadedFile, ...], level: int = 0) -> _Entry:
        load = f"{datetime.now(UTC).strftime(_STAMP)}-{uuid.uuid4().hex[:8]}"
        self.engine.write(query, self._folder_of(load))
        self.engine.open_stored(self._records, [self._folder_of(load)])
        rows: _ByDay = {}
        batches: _ByDay = {}
        found = self.engine.rows(
            f"SELECT {KIND}, CAST({DAY} AS string) AS day, slot, count(*) AS n,"
            f" coalesce(max(unix_micros(committed_at)), 0) AS newest_us FROM {STORED} GROUP BY {KIND}, {DAY}, slot"
        )
        for row in found:
            by_day = rows.setdefault(row[KIND], {})
            by_day[row["day"]] = by_day.get(row["day"], 0) + row["n"]
            if row[KIND] == "batch":
                batches.setdefault(row["slot"], {})[row["day"]] = row["n"]
        newest_us = max((row["newest_us"] for row in found if row[KIND] != BAD), default=0)
        return _Entry(load=load, files=files, rows=rows, batches=batches, level=level, newest_us=newest_us)

    def _folder_of(self, load: str) -> str:
        return f"{self._records}/{LOAD}={load}"

    def _enter(self, entry: _Entry, log: str, replaces: Sequence[int] = ()) -> None:
        fields = asdict(entry) | {"log": log, "replaces": list(replaces)}
        number = self.number + 1
        content = json.dumps(fields, separators=(",", ":")).encode()
        if not self._storage.write(f"{self._manifest}/{number:06}.json", content, is_new=True):
            raise ReportRefused(
                "Another report has written into this folder since this one began.",
                hint="let it finish, then run this one again",
            )
        self._add(number, entry)
        self._logs |= {log} - {""}

    def compact(self, many: int = _MANY) -> None:
        """Write the rows of many small loads as one, so that neither files nor entries become many.

        Rows are written again where files become much fewer by it: loads of a day or more each stay as they are,
        because many of them would cost a run the rows of months. A report that reads at this moment may lose files
        under its hands: it fails, and can be run again.

        Raises:
            ReportRefused: as `load_files`.
        """
        for level in range(max((entry.level for entry in self._entries.values()), default=0) + 1):
            numbers = self._crowded(level, many)
            if len(numbers) >= many:
                self._merge(numbers, [self._folder_of(self._entries[number].load) for number in numbers], level + 1)

    def _crowded(self, level: int, many: int) -> list[int]:
        """Return the entries of a level, sorted, half of whose kinds and days at least have many files."""
        parts = {n: _numbers(entry.rows).keys() for n, entry in self._entries.items() if entry.level == level}
        n_files = Counter(part for mine in parts.values() for part in mine)
        return sorted(
            n for n, mine in parts.items() if 2 * sum(n_files[part] * _FEWER >= many for part in mine) >= len(mine)
        )

    def _merge(self, numbers: Sequence[int], folders: Sequence[str], level: int) -> None:
        """Replace loads by one, written from their folders; raise ReportRefused if rows are missing there."""
        self.engine.open_stored(self._records, folders)
        columns = ", ".join(name for name in stored_columns(self.engine.words) if name != LOAD)
        files = tuple(file for number in numbers for file in self._entries[number].files)
        merged = self._write_load(f"SELECT {columns} FROM {STORED}", files, level)
        n_gone = sum(file.records + file.bad for file in files) - sum(_numbers(merged.rows).values())
        if n_gone:
            raise ReportRefused(f"Converted rows are missing: {n_gone} below {self._records}.", hint=LOST_HINT)
        self._enter(merged, next(iter(self._logs), ""), numbers)
        for number in numbers:
            self._storage.remove(self._folder_of(self._entries.pop(number).load))
            self._storage.remove(f"{self._manifest}/{number:06}.json")

    def remove_abandoned(self) -> None:
        """Remove rows of loads that have no entry and are older than a day: their job has died."""
        loads = {entry.load for entry in self._entries.values()}
        oldest = (datetime.now(UTC) - _ABANDONED).strftime(_STAMP)
        for folder in self._storage.folders(f"{self._records}/{LOAD}=*"):
            load = folder.rpartition(f"{LOAD}=")[2]
            if load not in loads and load < oldest:
                self._storage.remove(folder)

    def open(self, days: Collection[str] | None = None, n_files: int | None = None) -> None:
        """Make the views of all loads: ``all_KIND`` of each kind of record, `bad_lines` and `files`.

        Args:
            days: no others are opened; None: all.
            n_files: the latest files only.

        Raises:
            ReportRefused: rows that were converted are missing.

        Records have defaults where an older daemon wrote no such field, `FILE` and `DAY`; bad lines have `FILE`,
        `REASON`, and the beginning of the line or null; files the fields of `LoadedFile`.
        """
        words = self.engine.words
        self._open_rows(days)
        for kind, struct in RECORDS.items():
            fields = ", ".join([*with_defaults(struct, words), FILE, DAY])
            self.engine.make_view(f"all_{kind}", f"SELECT {fields} FROM {STORED} WHERE {KIND} = '{kind}'")
        self.engine.make_view(
            "bad_lines", f"SELECT {FILE}, {REASON}, {TORN} AS line FROM {STORED} WHERE {KIND} = '{BAD}'"
        )
        columns = {FILE: words.text, "size_bytes": words.whole, "records": words.whole, "bad": words.whole}
        self.engine.make_table("files", columns, [astuple(file) for file in self.latest(n_files)])

    def _open_rows(self, days: Collection[str] | None) -> None:
        expected: Counter[tuple[str, str]] = Counter()
        present = {folder.rpartition(f"{LOAD}=")[2] for folder in self._storage.folders(f"{self._records}/{LOAD}=*")}
        folders, gone = [], []
        for entry in self._entries.values():
            whole = _numbers(entry.rows)
            rows = {key: n for key, n in whole.items() if days is None or key[1] in days}
            expected.update(rows)
            folder = self._folder_of(entry.load)
            if rows and entry.load not in present:
                gone.append(folder)
            elif rows and rows.keys() == whole.keys():
                folders.append(folder)
            else:
                parts = [f"{folder}/{KIND}={kind}/{DAY}={day}" for kind, day in rows]
                folders += filter(self._storage.is_folder, parts)
        if not gone:
            self.engine.open_stored(self._records, folders)
            found = self.engine.rows(
                f"SELECT {KIND}, CAST({DAY} AS string) AS day, count(*) AS n FROM {STORED} GROUP BY {KIND}, {DAY}"
            )
            for row in found:
                expected[row[KIND], row["day"]] -= row["n"]
            lost = sorted((day, kind, n) for (kind, day), n in expected.items() if n > 0)
            gone = [f"{self._records}: {n} rows of {KIND}={kind}, {DAY}={day}" for day, kind, n in lost]
        if gone:
            more = f" (and {len(gone) - 1} more)" if gone[1:] else ""
            raise ReportRefused(f"Converted rows are missing: {gone[0]}{more}.", hint=LOST_HINT)

    def latest(self, n_files: int | None) -> list[LoadedFile]:
        """Return the files that came last, None: all of them."""
        return [self.files[name] for name in islice(reversed(self.files), n_files)]


def _numbers(of: _ByDay) -> dict[tuple[str, str], int]:
    return {(name, day): n for name, by_day in of.items() for day, n in by_day.items()}


def ignored(files: Iterable[StoredFile]) -> list[tuple[StoredFile, str]]:
    """Return the files that no report reads, each with the reason."""
    return [(file, _why_ignored(file)) for file in files if not file.name.endswith(SUFFIXES)]


def _why_ignored(file: StoredFile) -> str:
    if file.name.endswith(_OPEN):
        return "not closed: its daemon closes it after applylog.rotate_s, or the next daemon there if this one died"
    return "not named like a file of the log (*.jsonl, *.jsonl.gz)"


def groups(files: Sequence[StoredFile], limit_bytes: int = _GROUP_BYTES) -> Iterator[list[StoredFile]]:
    """Yield the files in groups of about this size and not too many, at least one in each, of as few days as can be."""
    group: list[StoredFile] = []
    size_bytes = 0
    for file in sorted(files, key=lambda file: begun_of(file.name)):
        if group and (size_bytes + file.size_bytes > limit_bytes or len(group) == _GROUP_FILES):
            yield group
            group, size_bytes = [], 0
        group.append(file)
        size_bytes += file.size_bytes
    if group:
        yield group


#: Fields that are sums in the figures: one below 0 would be taken off what other records say.
_COUNTED: Final = (
    "n_transactions", "n_changes", "size_bytes", "queued_s", "wait_dependency_s", "execute_s", "wait_turn_s",
    "commit_s",
)  # fmt: skip
#: Fields that are made numbers.
_LSNS: Final = ("first_end_lsn", "end_lsn")
_LSN: Final = "'^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$'"
#: Times that a clock may show; PostgreSQL's own begin with 2000. Others have no place on an axis, or in Python.
_FIRST: Final = "CAST('2000-01-01 00:00:00+00:00' AS {})"
_LAST: Final = "CAST('2099-12-31 00:00:00+00:00' AS {})"
#: Characters of a bad line that are kept: enough to see what it is.
_SHOWN_CHARACTERS: Final = 200


# A torn, foreign or newer line is a row of the kind `bad` with a reason; nothing raises.
def records(words: TypeWords) -> str:
    """Return the query that says of each line what it is.

    It has the columns of `schema.stored_columns` except the load. `KIND` is a kind of record or `BAD`; `REASON` is null
    except for bad lines; `DAY` is the day in UTC of the commit on the target, or of reading for bad lines.
    A line of another program may hold anything, so only its beginning is kept; a record that lacks a field is known by
    its other fields.
    """
    fields = [name for name in wide_columns(words) if name not in (KIND, TORN)]
    return f"""
        SELECT {", ".join(fields)}, substring({TORN}, 1, {_SHOWN_CHARACTERS}) AS {TORN}, {FILE}, {REASON},
               CASE WHEN {REASON} IS NULL THEN {KIND} ELSE '{BAD}' END AS {KIND},
               CASE WHEN {REASON} IS NULL THEN CAST(coalesce(committed_at, ended_at) AS date)
                    ELSE current_date END AS {DAY}
          FROM (SELECT *, CASE {_reasons(words)} END AS {REASON} FROM {LINES})
        """


def _reasons(words: TypeWords) -> str:
    """Return the conditions under which a line is no record, each with the reason."""
    kinds = ", ".join(f"'{kind}'" for kind in RECORDS)
    versions = ", ".join(str(version) for version in READABLE_VERSIONS)
    reasons = {
        f"{TORN} IS NOT NULL": "'not a record in JSON, or a field of another type'",
        f"{KIND} IS NULL OR {KIND} NOT IN ({kinds})": "'unknown kind of record'",
        # A record without a version has the first: every record has one, but the rule is the structs'.
        f"coalesce(schema_version, 1) NOT IN ({versions})": (
            "concat('schema version ', CAST(schema_version AS string), ', which this parapply does not read')"
        ),
        **{f"{name} < 0": f"'the field {name} is below 0'" for name in _COUNTED},
        **{f"NOT regexp_like({name}, {_LSN})": f"'the field {name} is no LSN'" for name in _LSNS},
        **{
            f"{name} NOT BETWEEN {_FIRST.format(words.time)} AND {_LAST.format(words.time)}": (
                f"'the time {name} is before 2000 or after 2099'"
            )
            for struct in RECORDS.values()
            for name in struct.__struct_fields__
            if is_time(name)
        },
        **{
            f"{KIND} = '{kind}' AND {name} IS NULL": f"'a {kind} without the field {name}'"
            for kind, struct in RECORDS.items()
            for name in required_of(struct)
        },
    }
    return " ".join(f"WHEN {condition} THEN {reason}" for condition, reason in reasons.items())
