"""The report in the order of the work: closed files to Parquet, views, figures, page.

In go a session and a `ReportRequest`; out come the folder ``out`` and a `ReportOutcome`. What Spark and Java raise
becomes one of our errors here, and nowhere else.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from parapply import __version__
from parapply.analysis import page, words
from parapply.analysis.compute import QUERIES, compute
from parapply.analysis.parquet import as_parquet
from parapply.analysis.storage import Storage
from parapply.analysis.store import PACKED, SUFFIXES, Store, groups, ignored
from parapply.analysis.views import Scope, make_views
from parapply.errors import ReportFailed, ReportRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from parapply.analysis.compute import Rows, Tables
    from parapply.analysis.progress import Steps
    from parapply.analysis.storage import StoredFile
    from parapply.analysis.verdict import LimitVerdict

#: Transactions that the what-if replays at most: some seconds for each hundred thousand.
WHAT_IF_TRANSACTIONS: Final = 200_000
#: Name of the page below the folder of the report.
PAGE: Final = "report.html"
_DENIED: Final = "Permission denied"
_DENIED_HINT: Final = "run it as a user who may read the log's folders and files, and write into --out"
_REASON: Final = re.compile(r"^(?:[\w.$]+(?:Exception|Error): |\[[A-Z_.]+\] )+")


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What is asked for.

    Attributes:
        log: folder of the apply log, by any name that Hadoop knows.
        out: folder of the report; it keeps what was converted, so that the next report reads new files only.
        scope: which records are read.
        what_if_transactions: how many transactions of a slot are replayed at most; 0 leaves it out.
        refresh_s: the page reloads itself so often; 0 never.
    """

    log: str
    out: str
    scope: Scope = field(default_factory=Scope)
    what_if_transactions: int = WHAT_IF_TRANSACTIONS
    refresh_s: int = 0


@dataclass(frozen=True, kw_only=True)
class ReportOutcome:
    """What a report has done.

    Attributes:
        page: where the page is.
        new_files: closed files that were converted now.
        records: in all files so far.
        bad_lines: in all files so far.
        tables: of the figures; empty where no record is within the scope.
        in_short: by slot, what the figures say.
        verdicts: by slot, what limits.
        ignored: files below the log's folder that are in no figure, with the reason.
    """

    page: str
    new_files: int
    records: int
    bad_lines: int
    tables: Tables
    in_short: dict[str, list[str]]
    verdicts: dict[str, LimitVerdict] = field(default_factory=dict)
    ignored: Rows = field(default_factory=list)


def make_report(spark: SparkSession, request: ReportRequest, steps: Steps) -> ReportOutcome:
    """Convert new files, compute the figures, write tables and page; raises what `convert` does."""
    return show(spark, request, steps, new_files=convert(spark, request, steps))


def convert(spark: SparkSession, request: ReportRequest, steps: Steps) -> int:
    """Convert closed files that are not converted yet; return how many.

    Raises:
        ReportRefused: there is no such log, or one of its files cannot be read; or the report's folder holds another
            log, or another report writes into it.
        ReportFailed: Spark could not do it; running it again continues where it stopped.
    """
    with spark_errors():
        storage = Storage(spark)
        check_log(storage, request)
        store = Store(spark, storage, request.out)
        store.remove_abandoned()
        new = store.missing(storage.files(request.log, SUFFIXES))
        check_readable(storage, new)
        new = [file for file in new if not _why_not_unpacked(storage, file)]
        loads = list(groups(new))
        steps.expect(len(loads))
        log, raw_root = storage.qualified(request.log), storage.raw_path(request.log)
        for load in loads:
            size = words.size(sum(file.size_bytes for file in load))
            steps.begin(f"Converting {len(load)} of {len(new)} new files, {size}")
            store.load_files(load, log, raw_root)
        return len(new)


def show(spark: SparkSession, request: ReportRequest, steps: Steps, *, new_files: int) -> ReportOutcome:
    """Compute the figures of what is converted, write tables and page; raises what `convert` does."""
    with spark_errors():
        storage = Storage(spark)
        store = Store(spark, storage, request.out)
        files = sorted(store.files.values(), key=lambda file: file.file)
        interval_s = make_views(store, request.scope) if files else 0
        left_out = _ignored_files(storage, store, request)
        tables: Tables = {"files": [], "summary": []}
        if interval_s:
            steps.expect(len(QUERIES) + 1)
            limit = request.what_if_transactions
            tables = compute(spark, interval_s, limit, steps.begin) | {"ignored_files": left_out}
            for name, table in tables.items():
                storage.write(f"{request.out.rstrip('/')}/tables/{name}.parquet", as_parquet(name, table))
        tables["ignored_files"] = left_out
        made = page.Made(
            log=request.log,
            at=datetime.now(UTC),
            version=__version__,
            interval_s=interval_s,
            changed_files=tuple(store.changed(storage.files(request.log, SUFFIXES))),
            refresh_s=request.refresh_s,
        )
        path = f"{request.out.rstrip('/')}/{PAGE}"
        storage.write(path, page.render(tables, made).encode())
        return ReportOutcome(
            page=path,
            new_files=new_files,
            records=sum(file.records for file in files),
            bad_lines=sum(file.bad for file in files),
            tables=tables,
            in_short={row["slot"]: words.in_short(page.of_slot(tables, row["slot"])) for row in tables["summary"]},
            verdicts=page.verdicts(tables),
            ignored=left_out,
        )


def check_log(storage: Storage, request: ReportRequest) -> None:
    """Refuse a log that is not there, and one that is not that of the report's folder.

    Raises:
        ReportRefused: it is no folder, or the folder of the report holds another log.
    """
    if not storage.is_folder(request.log):
        raise ReportRefused(f"{request.log} is no folder.", hint="name the folder that applylog.directory names")
    Store(storage.spark, storage, request.out).check_log(storage.qualified(request.log))


def check_readable(storage: Storage, files: Sequence[StoredFile]) -> None:
    """Refuse files that cannot be read: without them every figure would be too small.

    Raises:
        ReportRefused: names the first of them.
    """
    for file in files:
        why = storage.why_unreadable(file.path)
        if why:
            raise ReportRefused(f"{file.name} cannot be read: {why}.", hint=_DENIED_HINT)


def _why_not_unpacked(storage: Storage, file: StoredFile) -> str:
    return storage.why_no_gzip(file.path) if file.name.endswith(PACKED) else ""


def _ignored_files(storage: Storage, store: Store, request: ReportRequest) -> Rows:
    """Return the files below the log's folder that are in no figure, each with the reason."""
    inside = storage.raw_path(request.out).rstrip("/") + "/"
    root = storage.raw_path(request.log).rstrip("/") + "/"
    # The report may stand inside of the log.
    files = [file for file in storage.files(request.log) if not (root + file.name).startswith(inside)]
    found = ignored(files)
    for file in store.missing([file for file in files if file.name.endswith(PACKED)]):
        why = storage.why_no_gzip(file.path)
        if why:
            found.append((file, f"cannot be unpacked: {why}"))
    return [{"file": file.name, "size_bytes": file.size_bytes, "reason": why} for file, why in sorted(found, key=_name)]


def _name(found: tuple[StoredFile, str]) -> str:
    return found[0].name


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turn what Spark and Java raise into our errors."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        reason = reason_of(error)
        if _DENIED in reason:
            raise ReportRefused(f"The report cannot go on: {reason}.", hint=_DENIED_HINT) from error
        raise ReportFailed(
            f"Spark stopped: {reason}.",
            hint="run it again: what was converted is kept; for 'Java heap space' see --memory",
        ) from error


def reason_of(error: Any) -> str:  # noqa: ANN401  of PySpark or of py4j
    """Return the line of a Java error that says what happened, without names of classes."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    line = next((one.strip() for one in text.splitlines() if one.strip()), type(error).__name__)
    return _REASON.sub("", line).rstrip(".")
