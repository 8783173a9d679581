"""The report in the order of the work: closed files to Parquet, views, figures, page.

In go an engine and a `ReportRequest`; out come the folder ``out`` and a `ReportOutcome`.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import parquet

from parapply import __version__, amounts
from parapply.analysis import page, words
from parapply.analysis.compute import QUERIES, compute
from parapply.analysis.figures import FIGURES
from parapply.analysis.store import PACKED, SUFFIXES, Store, groups, ignored
from parapply.analysis.views import Scope, make_views
from parapply.analysis.words import overview
from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.analysis.changes import Change
    from parapply.analysis.engine import Rows, StoredFile, Tables
    from parapply.analysis.progress import Steps
    from parapply.analysis.store import Engine, Storage
    from parapply.limits import LimitVerdict

#: Name of the page below the folder of the report.
PAGE: Final = "report.html"
_DENIED_HINT: Final = "run it as a user who may read the log's folders and files, and write into --out"


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """A request for a report."""

    log: str  # folder of the apply log, by any name that Hadoop knows
    out: str  # folder of the report; it keeps what was converted, so that the next report reads new files only
    scope: Scope = field(default_factory=Scope)  # which records are read
    what_if: Sequence[Change] | None = ()  # predict other numbers of workers, and these; None: nothing
    compare: Scope | None = None  # another span of time, set beside the scope's
    refresh_s: int = 0  # the page reloads itself so often; 0 never
    window: timedelta | None = None  # only the latest records, and a row for each day of all; None: all of them


@dataclass(frozen=True, kw_only=True)
class ReportOutcome:
    """The outcome of a report."""

    page: str  # where the page is
    new_files: int  # closed files that were converted now
    records: int  # in all files so far
    bad_lines: int  # in all files so far
    tables: Tables  # of the figures; empty where no record is within the scope
    in_short: dict[str, list[str]]  # by slot, what the figures say
    verdicts: dict[str, LimitVerdict] = field(default_factory=dict)  # by slot, what limits
    ignored: Rows = field(default_factory=list)  # files below the log's folder that are in no figure, with the reason


def make_report(engine: Engine, request: ReportRequest, steps: Steps) -> ReportOutcome:
    """Convert new files, compute the figures, write tables and page; raises what `convert` does."""
    with engine.errors():
        store = checked_store(engine, request)
    return show(engine, request, steps, new_files=convert(engine, request, steps, store), store=store)


def convert(engine: Engine, request: ReportRequest, steps: Steps, store: Store | None = None) -> int:
    """Convert closed files that are not converted yet; return their number.

    Raises:
        ReportRefused: there is no such log, or one of its files cannot be read; or the report's folder holds another
            log, or another report writes into it.
        ReportFailed: the engine could not do it; running it again continues where it stopped.
    """
    with engine.errors():
        storage = engine.storage
        if store is None:
            store = checked_store(engine, request)
        store.refresh()
        store.remove_abandoned()
        new = store.missing(file for file in store.listed(request.log, is_new=True) if file.name.endswith(SUFFIXES))
        check_readable(storage, new)
        new = [file for file in new if not (file.name.endswith(PACKED) and storage.why_no_gzip(file.path))]
        loads = list(groups(new))
        steps.expect(len(loads))
        for load in loads:
            size = amounts.size(sum(file.size_bytes for file in load))
            steps.begin(f"Converting {len(load)} of {len(new)} new files, {size}")
            store.load_files(load, request.log)
        return len(new)


def show(
    engine: Engine, request: ReportRequest, steps: Steps, *, new_files: int, store: Store | None = None
) -> ReportOutcome:
    """Compute the figures of what is converted, write tables and page; raises what `convert` does."""
    with engine.errors():
        storage = engine.storage
        if store is None:
            store = Store(engine, request.out)
        has_files = bool(store.files)
        days = fold(store, request.out, steps) if has_files else []
        then = _compared(store, request.compare, steps) if request.compare and has_files else None
        scope, opened = _scope(store, request)
        interval_s = make_views(store, scope, opened) if has_files else 0
        left_out = _ignored_files(storage, store, request)
        tables: Tables = {"files": [], "summary": []}
        verdicts: dict[str, LimitVerdict] = {}
        if interval_s:
            steps.expect(len(QUERIES) + 1)
            tables = compute(engine, interval_s, steps.begin, what_if=request.what_if)
            tables["ignored_files"] = left_out
            tables["comparison"] = comparison(then, tables) if then else []
            verdicts = page.verdicts(tables)
            tables["days"] = [row for row in days if scope.slot in (None, row["slot"])]
            tables["slots"] = overview(tables, verdicts)
            for name, table in tables.items():
                storage.write(f"{request.out.rstrip('/')}/tables/{name}.parquet", as_parquet(name, table))
        else:
            # Of an earlier report; the page says that there is nothing.
            storage.remove(f"{request.out.rstrip('/')}/tables")
        tables["ignored_files"] = left_out
        made = page.Made(
            log=request.log,
            at=datetime.now(UTC),
            version=__version__,
            interval_s=interval_s,
            changed_files=tuple(store.changed(store.listed(request.log))),
            refresh_s=request.refresh_s,
            n_files=len(store.files),
            n_records=store.n_records,
            compared=words.span(request.compare.since, request.compare.until) if request.compare else "",
        )
        path = f"{request.out.rstrip('/')}/{PAGE}"
        storage.write(path, page.render(tables, made).encode())
        return ReportOutcome(
            page=path,
            new_files=new_files,
            records=store.n_records,
            bad_lines=store.n_bad,
            tables=tables,
            in_short={slot: words.in_short(mine) for slot, mine in page.by_slot(tables).items()},
            verdicts=verdicts,
            ignored=left_out,
        )


def _scope(store: Store, request: ReportRequest) -> tuple[Scope, set[str] | None]:
    """Return what the figures are of, and the days that are opened for it; None: all."""
    newest = store.newest
    if request.window is None or request.scope.since is not None or newest is None:
        return request.scope, None
    since = _newest(store, newest, request.scope) - request.window
    return replace(request.scope, since=since), {day for day in store.days if day >= f"{since:%Y-%m-%d}"}


def _newest(store: Store, newest: datetime, scope: Scope) -> datetime:
    """Return the newest commit of a scope that is not in the future, as a wrong clock may have written one."""
    now = datetime.now(UTC)
    until = min(now, scope.until or now)
    if newest < until and scope.slot is None:
        return newest
    days = {
        day
        for slot, day in store.batches()
        if scope.slot in (None, slot) and day <= f"{until.astimezone(UTC):%Y-%m-%d}"
    }
    query = f"SELECT max(committed_at) AS newest FROM all_batch WHERE {replace(scope, until=until).condition()}"
    for day in sorted(days, reverse=True):
        store.open([day])
        (row,) = store.engine.rows(query)
        if row["newest"] is not None:
            found: datetime = row["newest"]
            return found
    return until


def _compared(store: Store, scope: Scope, steps: Steps) -> Tables:
    """Return the tables of the span that is compared."""
    interval_s = make_views(store, scope)
    if not interval_s:
        raise ReportRefused("No record is in the span of --compare.", hint="times are in UTC, of commits on the target")
    steps.expect(len(COMPARED))
    return compute(store.engine, interval_s, steps.begin, COMPARED)


def checked_store(engine: Engine, request: ReportRequest) -> Store:
    """Return the store of a report, for a log that exists and belongs to its folder.

    Raises:
        ReportRefused: it is no folder, or the folder of the report holds another log.
    """
    if not engine.storage.is_folder(request.log):
        raise ReportRefused(f"{request.log} is no folder.", hint="name the folder that applylog.directory names")
    store = Store(engine, request.out)
    store.check_log(request.log)
    return store


def check_readable(storage: Storage, files: Sequence[StoredFile]) -> None:
    """Refuse files that cannot be read: without them every figure would be too small.

    Raises:
        ReportRefused: names the first of them.
    """
    for file in files:
        why = storage.why_unreadable(file.path)
        if why:
            raise ReportRefused(f"{file.name} cannot be read: {why}.", hint=_DENIED_HINT)


def _ignored_files(storage: Storage, store: Store, request: ReportRequest) -> Rows:
    """Return the files below the log's folder that are in no figure, each with the reason."""
    inside = storage.raw_path(request.out).rstrip("/") + "/"
    root = storage.raw_path(request.log).rstrip("/") + "/"
    # The report may stand inside of the log.
    files = [file for file in store.listed(request.log) if not (root + file.name).startswith(inside)]
    found = ignored(files)
    for file in store.missing([file for file in files if file.name.endswith(PACKED)]):
        why = storage.why_no_gzip(file.path)
        if why:
            found.append((file, f"cannot be unpacked: {why}"))
    return [
        {"file": file.name, "size_bytes": file.size_bytes, "reason": why}
        for file, why in sorted(found, key=lambda one: one[0].name)
    ]


#: Types of columns by their names: ``_s`` and shares are fractions, and all that is not listed is counted.
_TIMES: Final = frozenset({"at", "first_at", "last_at", "until"})
_TEXTS: Final = frozenset({
    "slot", "table", "target", "kind", "name", "type", "policy", "outcome", "mode", "reason", "stage", "part", "unit",
    "commit_order", "limit", "link", "file", "example", "highest_end_lsn", "run",
    "state", "wait", "key", "tables", "commit_lsn", "what", "day", "end_lsn", "holder_end_lsn", "detail", "cause",
    "role", "relation", "question", "limit_words",
})  # fmt: skip
_FRACTIONS: Final = frozenset({"seconds", "share", "wait_share", "speed_up", "mean_bytes", "then", "now", "change"})


def as_parquet(name: str, rows: Rows) -> bytes:
    """Return the table of a figure, with its columns in the definition's order.

    Raises:
        KeyError: there is no such figure.
    """
    columns = {figure.name: figure.columns for figure in FIGURES}[name]
    schema = pa.schema([pa.field(column, _type(column), metadata={"meaning": columns[column]}) for column in columns])
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema), sink, compression="zstd")
    return sink.getvalue()


def _type(column: str) -> pa.DataType:
    if column in _TIMES:
        return pa.timestamp("us", tz="UTC")
    if column in _TEXTS:
        return pa.string()
    return pa.float64() if column in _FRACTIONS or column.endswith("_s") else pa.int64()


#: Figures that are compared, with those that they are made from.
COMPARED: Final = frozenset(
    {"summary", "latency", "waits", "parallelism", "moments", "reading", "backends", "blockers"}
)
_PERCENTILES: Final = (("half", "p50_s"), ("99 %", "p99_s"))


def comparison(then: Tables, now: Tables) -> Rows:
    """Return what is known of both spans, of each slot that has a record in either."""
    slots = dict.fromkeys(row["slot"] for tables in (now, then) for row in tables["summary"])
    rows = []
    for slot in slots:
        values = [dict(_values(tables, slot)) for tables in (then, now)]
        for what in dict.fromkeys([*values[1], *values[0]]):
            unit, (before, after) = what[1], (one.get(what) for one in values)
            change = after / before - 1 if before and after is not None else None
            rows.append({"slot": slot, "what": what[0], "unit": unit, "then": before, "now": after, "change": change})
    return rows


def _values(tables: Tables, slot: str) -> Iterator[tuple[tuple[str, str], float]]:
    mine: dict[str, list[dict[str, Any]]] = {
        name: [row for row in rows if row.get("slot") == slot] for name, rows in tables.items()
    }
    for summary in mine["summary"]:
        busy_s = sum(row["seconds"] for row in mine["parallelism"])
        yield ("transactions", "number"), summary["transactions"]
        yield ("batches", "number"), summary["batches"]
        yield ("time with a batch under way", "s"), busy_s
        if busy_s:
            yield ("transactions a second, of that time", "number"), summary["transactions"] / busy_s
            yield ("rows a second, of that time", "number"), summary["row_changes"] / busy_s
            held = sum(row["held"] * row["seconds"] for row in mine["parallelism"])
            yield ("batches with a worker at a time", "number"), held / busy_s
        yield ("repeated batches", "number"), summary["repeated_batches"]
        yield ("conflicts", "number"), summary["conflicts"]
    for row in mine["latency"]:
        for name, column in _PERCENTILES:
            yield (f"{row['stage']}: {name}", "s"), row[column]
    for row in mine["limits"]:
        cause = " ".join((row["cause"], row["detail"])).strip()
        yield (f"limited by {cause}", "share"), row["share"]


# The sums of a month are a file beside the manifest, each slot's day with the number of batches that it is of. A day
# whose number is another one by now, and one of a file that is gone or torn, is computed again, and nothing else.
_FOLDER: Final = "records/_folded"
_DAYS: Final = """
SELECT slot, CAST(CAST(committed_at AS date) AS string) AS day, count(*) AS batches,
       sum(n_transactions) AS transactions, sum(n_rows) AS row_changes, sum(size_bytes) AS size_bytes,
       percentile_approx(oldest_s, 0.5) AS oldest_p50_s, percentile_approx(oldest_s, 0.99) AS oldest_p99_s,
       max(oldest_s) AS oldest_max_s, sum(executing_s) AS execute_s, count_if(attempts > 1) AS repeated_batches,
       sum(n_conflicts) AS conflicts
  FROM batches GROUP BY slot, CAST(committed_at AS date) ORDER BY slot, day
"""
_MONTH: Final = len("2026-11")
#: A slot's day: the number of batches that were converted, and the row of `_DAYS`.
_Folded = dict[tuple[str, str], tuple[int, dict[str, Any]]]


def fold(store: Store, folder: str, steps: Steps) -> Rows:
    """Return one row for each slot and day, sorted.

    Raises:
        ReportRefused: rows of a day that is computed are missing.
    """
    place = f"{folder.rstrip('/')}/{_FOLDER}"
    converted, (kept, torn) = store.batches(), _read(store, place)
    folded = {key: kept[key] for key, n in converted.items() if key in kept and kept[key][0] == n}
    stale = converted.keys() - folded.keys()
    if stale:
        steps.expect(1)
        why = f", because {' and '.join(torn)} is torn" if torn else ""
        steps.begin(f"Folding days of slots: {len(stale)}{why}")
        make_views(store, Scope(), days={day for _, day in stale})
        for row in store.engine.rows(_DAYS):
            key = row["slot"], row["day"]
            if key in stale:
                folded[key] = converted[key], row
    _write(store, place, folded, {day[:_MONTH] for _, day in stale | (kept.keys() - folded.keys())})
    return [row for _, (_, row) in sorted(folded.items())]


def _read(store: Store, place: str) -> tuple[_Folded, list[str]]:
    kept: _Folded = {}
    torn = []
    for file in store.engine.storage.files(place, ".json"):
        try:
            month = json.loads(store.engine.storage.read_text(file.path))
            if month["query"] == _DAYS:
                for n, *values in month["rows"]:
                    row = dict(zip(month["columns"], values, strict=True))
                    kept[row["slot"], row["day"]] = n, row
        except (ValueError, TypeError, KeyError):
            torn.append(file.name)
    return kept, torn


def _write(store: Store, place: str, folded: _Folded, months: set[str]) -> None:
    rows: dict[str, list[list[Any]]] = defaultdict(list)
    columns: list[str] = []
    for (_, day), (n, row) in sorted(folded.items()):
        if day[:_MONTH] in months:
            columns = list(row)
            rows[day[:_MONTH]].append([n, *row.values()])
    for month in months:
        content = {"query": _DAYS, "columns": columns, "rows": rows[month]}
        store.engine.storage.write(f"{place}/{month}.json", json.dumps(content, separators=(",", ":")).encode())
