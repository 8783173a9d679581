"""The report in sentences: what a person should take from the figures before looking at any plot.

In go the tables of one slot; out come plain texts. Says only what the tables say, and what it does not cover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply.amounts import duration, number, percent
from parapply.analysis.figures import EACH_TRANSACTION

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from parapply.analysis.engine import Rows, Tables
    from parapply.limits import LimitVerdict

#: A part of the time that is worth a sentence.
_NOTABLE: Final = 0.05
#: More workers that bring less than this bring nothing.
_NO_GAIN: Final = 0.02
#: Titles of the cells.
HEADER: Final = (
    "slot",
    "last commit (UTC)",
    "transactions",
    "half within",
    "99 % within",
    "conflicts",
    "waits",
    "limit",
)


def period(first: datetime, last: datetime) -> str:
    """Return the time a log covers."""
    return f"{first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC ({duration((last - first).total_seconds())})"


def span(since: datetime | None, until: datetime | None) -> str:
    """Return a time that is asked for, in UTC."""
    begin = f"{since:%Y-%m-%d %H:%M:%S}" if since else "the beginning"
    return f"{begin} to {f'{until:%Y-%m-%d %H:%M:%S}' if until else 'the end'}"


def in_short(tables: Tables) -> list[str]:
    """Return the statements of the figures of one slot, the most important first."""
    (summary,) = tables["summary"]
    return [
        text
        for text in (
            _incomplete(summary, tables["gaps"]),
            _throughput(summary, tables["parallelism"], tables["over_time"]),
            _delay(tables["latency"], summary),
            _waits(tables["waits"], tables["dependencies"]),
            _parallelism(tables["parallelism"]),
            _repeats(summary["repeated_batches"], summary["batches"], summary["conflicts"]),
            _more_workers(tables["what_if"], tables["reading"], summary["workers"]),
            _asked(tables["what_if"]),
        )
        if text
    ]


def _incomplete(summary: dict[str, Any], gaps: Rows) -> str:
    texts = []
    if gaps:
        missing, where = sum(row["missing"] for row in gaps), number(len(gaps))
        texts.append(
            f"{number(missing)} batch records are missing in {where} {'places' if len(gaps) > 1 else 'place'}: "
            "every figure is too small by them (see 'Records that are missing')"
        )
    recorded, transactions = summary["transaction_records"], summary["transactions"]
    if 0 < recorded < transactions:
        texts.append(
            f"{number(recorded)} of {number(transactions)} transactions have their own record: "
            "applylog.detail was not the same all the time, or records are missing"
        )
    if summary["doubled_records"]:
        texts.append(f"{number(summary['doubled_records'])} records also exist in a copy, and count once")
    return f"{'. '.join(texts)}." if texts else ""


def _throughput(summary: dict[str, Any], parallelism: Rows, over_time: Rows) -> str:
    best = max(over_time, key=lambda row: row["transactions_per_s"])
    busy_s = sum(row["seconds"] for row in parallelism)
    if not busy_s:
        return ""
    return (
        f"{number(summary['transactions'] / busy_s)} transactions a second were applied while any batch was with a "
        f"worker ({duration(busy_s)}). By the clock, which also counts pauses, it was "
        f"{number(best['transactions_per_s'])} a second ({number(best['rows_per_s'])} rows) in the best interval."
    )


def delay_of(latency: Rows, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the row of `latency` that is a slot's delay: of each transaction only where all have their record."""
    stages = {row["stage"]: row for row in latency if row["slot"] == summary["slot"]}
    is_whole = summary["transaction_records"] >= summary["transactions"]
    oldest: dict[str, Any] = stages["oldest transaction of a batch"]
    return stages.get(EACH_TRANSACTION[0], oldest) if is_whole else oldest


def _delay(latency: Rows, summary: dict[str, Any]) -> str:
    stages = {row["stage"]: row for row in latency}
    row = delay_of(latency, summary)
    what, basis = "transactions were", ""
    if row["stage"] != EACH_TRANSACTION[0]:
        what, basis = "batches were", ", counted from its oldest transaction"
    text = (
        f"Half of the {what} visible on the target within {duration(row['p50_s'])} of the commit on the publisher"
        f"{basis}; 1 % took longer than {duration(row['p99_s'])}, and the slowest {duration(row['max_s'])}."
    )
    if stages["delivery"]["p50_s"] < 0:
        text += " The clocks of publisher and daemon differ: the daemon read half of it before it was committed."
    return text


def _waits(waits: Rows, dependencies: Rows) -> str:
    by_share = sorted(waits, key=lambda row: -row["share"])
    parts = [f"{row['part']} {percent(row['share'])}" for row in by_share if row["share"] >= _NOTABLE]
    if not parts:
        return ""
    text = f"From received to committed the time of the batches went to: {', '.join(parts)}."
    if dependencies and dependencies[0]["seconds"] > 0:
        first = dependencies[0]
        total_s = sum(row["seconds"] for row in waits)
        text += (
            f" The dependency that batches waited for longest before they could start was {key_words(first)}: "
            f"{duration(first['seconds'])}, {percent(first['seconds'] / total_s)} of all that."
        )
    return text


def key_words(row: dict[str, object]) -> str:
    """Return a dependency's kind, name and table: ``unique item_code_key in public.item``."""
    what = f"{row['kind']} {row['name']}".strip()
    return f"{what} in {row['table']}" if row["table"] else what


def _parallelism(parallelism: Rows) -> str:
    total_s = sum(row["seconds"] for row in parallelism)
    if not total_s:
        return ""
    held = sum(row["held"] * row["seconds"] for row in parallelism) / total_s
    executing = sum(row["executing"] * row["seconds"] for row in parallelism) / total_s
    return (
        f"While there was work, {held:.1f} batches were with a worker at a time on average, and {executing:.1f} of "
        "them were executing statements."
    )


def _repeats(n_repeated: int, n_batches: int, n_conflicts: int) -> str:
    repeated = (
        f"{number(n_repeated)} of {number(n_batches)} batches had to be repeated"
        if n_repeated
        else "No batch was repeated"
    )
    conflicts = {0: "there was no conflict", 1: "one conflict was recorded"}
    return f"{repeated}, and {conflicts.get(n_conflicts, f'{number(n_conflicts)} conflicts were recorded')}."


def _more_workers(what_if: Rows, reading: Rows, n_workers: int) -> str:
    """Report the gain of twice as many workers in each commit order, with the interval."""
    rows = {(row["commit_order"], row["workers"]): row for row in what_if if not row["question"]}
    now = int(reading[0]["workers"]) if reading else n_workers
    if ("preserve", now) not in rows or ("preserve", 2 * now) not in rows:
        return ""
    texts = [
        f"{order_words} {_gain(rows[order, now], rows[order, 2 * now])}"
        for order, order_words in (("preserve", "with the commit order kept"), ("relaxed", "with it relaxed"))
    ]
    # A prediction leaves out the time in which reading was paused.
    without = ", if apply.max_changes_per_s held nothing back" if reading and reading[0]["throttled_s"] else ""
    return (
        f"The daemon has {number(now)} workers. By the run until {what_if[0]['until']:%Y-%m-%d %H:%M}, "
        f"{number(2 * now)} would bring{without}: {'; '.join(texts)}."
    )


def _gain(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return by how much more is applied in a second, from when to when, and what limits then."""
    limit = "the source is the limit" if after["limit"] == "source" else f"limit: {after['limit']}"
    gain, least, most = (
        max(0.0, before["seconds"] / after[name] - 1) if after[name] else 0.0
        for name in ("seconds", "most_s", "least_s")
    )
    if gain < _NO_GAIN and after["limit"] == "source":
        return f"nothing ({limit})"
    if gain < _NO_GAIN:
        return f"nothing ({limit})" if most < _NOTABLE * 2 else f"nothing, at most {percent(most)} more ({limit})"
    span = f" ({percent(least)} to {percent(most)})" if most - least > _NO_GAIN else ""
    return f"{percent(gain)} more a second{span}, {limit}"


def _asked(what_if: Rows) -> str:
    """Say how long the run would have been for each --what-if."""
    return " ".join(
        [
            f"With {row['question']} the run would take {duration(row['seconds'])} ({duration(row['least_s'])} to "
            f"{duration(row['most_s'])}); limit: {row['limit']}."
            for row in what_if
            if row["question"]
        ]
    )


def times(factor: float) -> str:
    """Return the factor of a speed-up in words: ``2.7 times``, ``280 times``."""
    return f"{factor:.1f} times" if factor < 10 else f"{factor:.0f} times"


def overview(tables: Tables, verdicts: Mapping[str, LimitVerdict]) -> Rows:
    """Return one row a slot, in the order of `summary`, then slots with days before it only.

    A slot without a verdict is not limited by anything that was measured.
    """
    rows = []
    for summary in tables["summary"]:
        slot = summary["slot"]
        delay = delay_of(tables["latency"], summary)
        waits = max((row for row in tables["waits"] if row["slot"] == slot), key=lambda row: row["share"], default=None)
        said = verdicts.get(slot)
        rows.append(
            {
                "slot": slot,
                "last_at": summary["last_at"],
                "transactions": summary["transactions"],
                "delay_p50_s": delay["p50_s"],
                "delay_p99_s": delay["p99_s"],
                "conflicts": summary["conflicts"],
                "wait": waits["part"] if waits else None,
                "wait_share": waits["share"] if waits else None,
                "limit": said.limit if said else None,
                "limit_words": said.words if said else None,
            }
        )
    last_days = {row["slot"]: row["day"] for row in tables["days"]}
    for slot in sorted(last_days.keys() - {row["slot"] for row in rows}):
        said_of_it = f"no batch in this time, the last on {last_days[slot]}"
        rows.append(
            dict.fromkeys(rows[0]) | {"slot": slot, "transactions": 0, "conflicts": 0, "limit_words": said_of_it}
        )
    return rows


def cells(rows: Rows) -> list[tuple[str, ...]]:
    """Return the rows as texts, as `HEADER` names them."""
    return [
        (
            row["slot"],
            f"{row['last_at']:%Y-%m-%d %H:%M:%S}" if row["last_at"] else "",
            number(row["transactions"]),
            *("" if row[name] is None else duration(row[name]) for name in ("delay_p50_s", "delay_p99_s")),
            number(row["conflicts"]),
            f"{row['wait']} {percent(row['wait_share'])}" if row["wait"] else "",
            row["limit_words"] or "",
        )
        for row in rows
    ]
