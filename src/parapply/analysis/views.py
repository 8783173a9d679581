"""The views that the figures' queries read: `batches`, `transactions`, `intervals`, `numbered`, `doubled`, `files` ...

In go the rows of the store; out come views with the interval of each record, so that all figures share the intervals.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from collections.abc import Collection

    from parapply.analysis.store import Engine, Store

#: Lengths of an interval that a person can read off an axis.
INTERVALS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
#: As many as a plot can show; what is longer has intervals of days.
_MOST_INTERVALS: Final = 240

_SLOT: Final = re.compile(r"[a-z0-9_]+")
#: Files that are listed where not all days are looked at.
_LATEST_FILES: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_ROWS_OF: Final = "aggregate(transform(map_values(rows), counts -> {}), 0L, (sum, one) -> sum + one)"
_N_ROWS: Final = _ROWS_OF.format("coalesce(counts.insert, 0) + coalesce(counts.update, 0) + coalesce(counts.delete, 0)")
_N_TRUNCATES: Final = _ROWS_OF.format("coalesce(counts.truncate, 0)")
# 16/B374D848 is two numbers in hexadecimal, the first the high half.
_LSN_NUMBER: Final = (
    "CAST(conv(split_part({0}, '/', 1), 16, 10) AS bigint) * 4294967296"
    " + CAST(conv(split_part({0}, '/', 2), 16, 10) AS bigint)"
)
_N_CONFLICTS: Final = (
    "size(conflicts) + aggregate(transform(more_conflicts, one -> one.conflicts), 0L, (sum, one) -> sum + one)"
)
# A transaction that is applied while it comes is given to a worker before its last byte is received. Its statements and
# waits until then are no part of the time from received to committed.
_BEFORE: Final = "greatest(0, (unix_micros(received_at) - unix_micros(started_at)) / 1e6)"
_EXECUTING: Final = f"greatest(0, execute_s - {_BEFORE})"
_DEPENDING: Final = f"if({_BEFORE} > 0, 0, wait_dependency_s)"
# Points of a batch in microseconds, none before the one before it.
_START: Final = "unix_micros(started_at)"
_USUAL_US: Final = "CAST(round(coalesce(usual_s, 0) * 1e6) AS bigint)"
_TURN: Final = "unix_micros(committed_at) - CAST(round(commit_s * 1e6) AS bigint)"
_TIMED: Final = (
    "slot",
    "run",
    "worker",
    "unix_micros(received_at) AS received_us",
    f"{_START} AS start_us",
    "CAST(round(depending_s * 1e6) AS bigint) AS depend_us",
    f"least({_START} + CAST(round(execute_s * 1e6) AS bigint), unix_micros(committed_at)) AS done_us",
    f"greatest({_START}, {_TURN}) AS turn_us",
    f"greatest({_START}, {_TURN}, unix_micros(committed_at) - {_USUAL_US}) AS late_us",
    "unix_micros(committed_at) AS end_us",
    "if(late_keys > 0, 1, 0) AS is_late",
)
# Seconds of a usual COMMIT: the rest of a batch's turn belongs to its late rows.
_USUAL: Final = """
SELECT slot AS usual_slot, percentile_approx(if(is_one_flight, flight_commit_s, commit_s), 0.5) AS usual_s
  FROM batches WHERE (late_keys = 0 AND NOT is_one_flight) OR flight_commit_s > 0 GROUP BY slot
"""
#: Runs with a number that may be in the log twice: slot, run and number are what a record is. Lines of before have no
#: run, and their numbers begin again with each.
_OVERLAPPING: Final = """
SELECT DISTINCT slot, run
  FROM (SELECT slot, run, first, last, n,
               max(last) OVER (PARTITION BY slot, run ORDER BY first, last, file
                               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM (SELECT slot, run, file, min(seq) AS first, max(seq) AS last, count(*) AS n
                  FROM {} WHERE run <> '' GROUP BY slot, run, file))
 WHERE before >= first OR n > last - first + 1
"""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The span of a report; None is no limit."""

    slot: str | None = None  # records of one slot only
    since: datetime | None = None  # commits on the target from this time on, aware
    until: datetime | None = None  # commits before this time

    def is_within(self, at: str = "committed_at") -> str:
        """Return the condition that a row is in the time that is covered, by the time `at`."""
        since = [f"unix_micros({at}) >= {_micros(self.since)}"] if self.since else []
        until = [f"unix_micros({at}) < {_micros(self.until)}"] if self.until else []
        return " AND ".join([*since, *until]) or "true"

    def condition(self, at: str = "committed_at") -> str:
        """Return the condition that a row is within; also by the day, so that other days are not read."""
        since = [f"day >= DATE '{self.since.astimezone(UTC):%Y-%m-%d}'"] if self.since else []
        until = [f"day <= DATE '{self.until.astimezone(UTC):%Y-%m-%d}'"] if self.until else []
        return " AND ".join([self.of_slot(), self.is_within(at), *since, *until])

    def of_slot(self) -> str:
        """Return the condition that a row is of the slot."""
        return "true" if self.slot is None else f"slot = '{self.slot}'"

    def __post_init__(self) -> None:
        """Refuse what is no slot's name."""
        if self.slot is not None and not _SLOT.fullmatch(self.slot):
            raise ReportRefused(
                f"{self.slot!r} is no slot's name.", hint="they have lower-case letters, digits and underscores only"
            )


def _micros(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def _once(engine: Engine, kind: str, scope: Scope) -> Counter[str]:
    """Make the view ``once_KIND``: records of a kind, each once, even if a file of the log exists twice.

    As the files are written, no number is in two of them, and then nothing is done: numbers of one run may overlap in
    two files only for batches that committed in another order, or where one file is a copy.

    Returns:
        Number of records that were doubled, by slot.
    """
    records = f"(SELECT * FROM all_{kind} WHERE {scope.of_slot()})"
    overlapping = f"overlapping_{kind}"
    pairs = engine.rows(_OVERLAPPING.format(records))
    doubled: Counter[str] = Counter()
    numbered = f"""
        (SELECT *, 1 AS copy FROM {records} ANTI JOIN {overlapping} USING (slot, run)
          UNION ALL
         SELECT *, row_number() OVER (PARTITION BY slot, run, seq ORDER BY file) AS copy
           FROM {records} SEMI JOIN {overlapping} USING (slot, run))"""
    if pairs:
        columns = {"slot": engine.words.text, "run": engine.words.text}
        engine.make_table(overlapping, columns, [(row["slot"], row["run"]) for row in pairs])
        copies = engine.rows(f"SELECT slot, count(*) AS n FROM {numbered} WHERE copy > 1 GROUP BY slot")
        doubled.update({row["slot"]: row["n"] for row in copies})
    engine.make_view(
        f"once_{kind}", f"SELECT * FROM {numbered} WHERE copy = 1" if doubled else f"SELECT * FROM {records}"
    )
    return doubled


def make_views(store: Store, scope: Scope, days: Collection[str] | None = None) -> int:
    """Make the views.

    Args:
        store: with the rows.
        scope: of the figures.
        days: no others are opened, whatever their number; gaps just before them are not noticed then. None: all.

    Returns:
        Length of an interval in seconds; 0 where there is no batch within the scope.
    """
    engine = store.engine
    store.open(days, None if days is None else _LATEST_FILES)
    doubled = _once(engine, "batch", scope) + _once(engine, "transaction", scope)
    within = scope.condition()
    (times,) = engine.rows(
        f"SELECT unix_micros(min(committed_at)) AS first, unix_micros(max(committed_at)) AS last"
        f" FROM once_batch WHERE {within}"
    )
    if times["first"] is None:
        return 0
    interval_s = interval_of((times["last"] - times["first"]) / 1e6)
    more = ", ".join(f"{expression} AS {name}" for name, expression in _more(interval_s).items())
    engine.make_view("batches", f"SELECT *, {more} FROM once_batch WHERE {within}")
    engine.make_view(
        "timed",
        f"SELECT {', '.join(_TIMED)} FROM batches LEFT JOIN ({_USUAL}) ON slot = usual_slot"
        " WHERE committed_at >= started_at",
    )
    engine.make_view("transactions", f"SELECT * FROM once_transaction WHERE {within}")
    # Also what is outside of the scope's time: the record before the first one within is no gap.
    engine.make_view(
        "numbered",
        f"SELECT slot, run, seq, committed_at, {scope.is_within()} AS is_within,"
        f" {'true' if days is None else 'false'} AS is_whole,"
        f" {_LSN_NUMBER.format('first_end_lsn')} AS first_number, {_LSN_NUMBER.format('end_lsn')} AS last_number"
        f" FROM all_batch WHERE run <> '' AND {scope.of_slot()}",
    )
    # Intervals of a file that exists twice count once. One is about a second: few enough to compare them all.
    engine.make_view(
        "intervals",
        "SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY slot, run, ended_at ORDER BY file) AS copy"
        f" FROM all_interval WHERE {scope.condition('ended_at')}) WHERE copy = 1",
    )
    columns = {"slot": engine.words.text, "n": engine.words.whole}
    engine.make_table("doubled", columns, list(doubled.items()))
    return interval_s


def _more(interval_s: int) -> dict[str, str]:
    """Return the columns that `batches` has besides the columns of the records."""
    interval_us = interval_s * 1_000_000
    return {
        "at": f"timestamp_micros(unix_micros(committed_at) div {interval_us} * {interval_us})",
        "n_rows": _N_ROWS,
        "n_truncates": _N_TRUNCATES,
        "end_lsn_number": _LSN_NUMBER.format("end_lsn"),
        "oldest_s": "(unix_micros(committed_at) - unix_micros(commit_time_first)) / 1e6",
        "executing_s": _EXECUTING,
        "depending_s": _DEPENDING,
        "n_conflicts": _N_CONFLICTS,
        "delivery_s": "(unix_micros(received_at) - unix_micros(commit_time_last)) / 1e6",
    }


def interval_of(seconds: float) -> int:
    """Return the shortest length of an interval that makes few enough of them, in seconds."""
    return next((one for one in INTERVALS_S if seconds / one <= _MOST_INTERVALS), INTERVALS_S[-1])
