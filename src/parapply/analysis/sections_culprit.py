"""Sections of the page that name culprits: slow batches and transactions, batches that waited, workers' lanes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from parapply import amounts
from parapply.analysis import plots, words
from parapply.analysis.plots import Plot, Section, bar_height

if TYPE_CHECKING:
    from datetime import datetime

    from parapply.analysis.engine import Rows, Tables

_LANE_STATES: Final = (
    ("executing", "execute_s", plots.BLUE),
    ("commit turn", "wait_turn_s", plots.ORANGE),
    ("committing", "commit_s", plots.GREEN),
)
#: Days of a slot on the page: the cells of a year of 50 slots would take longer than a day's figures.
_DAYS: Final = 92


#: Lists by their table: title, lead, headings, and the column of each.
_LISTS: Final = {
    "slow_batches": (
        "Slowest batches",
        "From received to committed, and the part that took longest of it. A batch has its transactions' LSNs.",
        "took|mostly|of it|batch|worker|transactions|rows|first xid|end LSN|tables|committed (UTC)",
        "total_s stage stage_s seq worker transactions row_changes xid end_lsn tables at",
    ),
    "slow_transactions": (
        "Slowest transactions",
        "From the publisher's commit to the target's, by two clocks.",
        "took|until read|xid|commit LSN|rows|tables|batch|worker|committed (UTC)",
        "total_s delivery_s xid commit_lsn row_changes tables batch_seq worker at",
    ),
    "blockers": (
        "Batches that waited for others",
        "The longest waits of one batch for another.",
        "waited|batch|xid|end LSN|for batch|its xid|its end LSN|because of|committed (UTC)",
        "wait_s seq xid end_lsn holder_seq holder_xid holder_end_lsn because at",
    ),
    "chain": (
        "The chain to the longest wait",
        "The batch that waited longest, the one that it waited for, the one that this waited for: a row each.",
        "batch|first xid|end LSN|transactions|worker|executed|committed in|waited for|because of|committed (UTC)",
        "seq xid end_lsn transactions worker execute_s commit_s link because at",
    ),
    "hot_keys": (
        "Rows that batches waited for",
        (
            "By a hash that does not reveal the key, and is another one after each connection; from the first four "
            "late rows of each batch."
        ),
        "table|row|batches|run",
        "table key batches run",
    ),
    "days": (
        "Days",
        "Of the whole log, the latest first. Delays are of oldest transactions.",
        "day (UTC)|transactions|rows|size|delay, half|delay, 99 %|longest|executed|repeated|conflicts",
        (
            "day transactions row_changes size_bytes oldest_p50_s oldest_p99_s oldest_max_s execute_s repeated_batches "
            "conflicts"
        ),
    ),
}


def listed(name: str, rows: Rows, more: str = "") -> Section:
    """Return the list of rows of a table, with more at the end of its lead; without rows it says nothing."""
    title, lead, headings, columns = _LISTS[name]
    return Section(
        title=title,
        lead=f"{lead}{more}" if rows else "",
        header=tuple(headings.split("|")),
        rows=texts(rows, columns),
    )


def texts(rows: Rows, columns: str) -> list[tuple[str, ...]]:
    """Return the named columns of rows as texts, each by its unit."""
    return [tuple(_cell(row, column) for column in columns.split()) for row in rows]


def _cell(row: dict[str, Any], column: str) -> str:
    if column in ("because", "link"):
        if row["holder_seq"] is None:
            return ""
        return words.key_words(row) if column == "because" else f"batch {row['holder_seq']}"
    value = row[column]
    if column == "at":
        return f"{value:%Y-%m-%d %H:%M:%S.%f}"[:-3]
    if value is None or isinstance(value, str):
        return value or ""
    if column.endswith(("seq", "xid", "worker")):
        return str(value)
    return {"s": amounts.duration, "bytes": amounts.size}.get(column.rpartition("_")[2], amounts.number)(value)


def days(tables: Tables) -> Section:
    """The days of the whole log."""
    rows = tables["days"]
    earlier = f" {len(rows) - _DAYS:,} earlier days are in tables/days.parquet." if rows[_DAYS:] else ""
    return listed("days", rows[: -1 - _DAYS : -1] if len(rows) > 1 else [], earlier)


def compared(tables: Tables, span: str) -> Section:
    """The same figures of another span of time."""
    rows = tables["comparison"]
    return Section(
        title="Compared",
        lead=f"Then: {span} UTC. Now: the time of this report." if rows else "",
        header=("what", "then", "now", "change"),
        rows=[
            (
                row["what"],
                _value(row["then"], row["unit"]),
                _value(row["now"], row["unit"]),
                "" if row["change"] is None else f"{row['change']:+.0%}".replace("%", "\N{NO-BREAK SPACE}%"),
            )
            for row in rows
        ],
    )


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "none"
    return {"s": amounts.duration, "share": amounts.percent, "number": amounts.number}[unit](value)


def lanes(tables: Tables, interval_s: int) -> Section:
    """Lanes of workers over the whole time, and the latest batches one by one."""
    found = [_busy(tables["workers"], tables["runs"], plots.timeline(tables["over_time"], interval_s), interval_s)]
    rows = tables["lanes"]
    if rows:
        found.append(_latest(rows, tables["runs"]))
    n_runs = len(tables["runs"])
    return Section(
        title="Lanes",
        lead=(
            "Each worker over time. "
            + (
                f"A dotted line is where the daemon connected again ({amounts.number(n_runs)} times in all)."
                if n_runs > 1
                else "The daemon connected once."
            )
        ),
        plots=found,
    )


def _busy(workers: Rows, runs: Rows, times: list[datetime], interval_s: int) -> Plot:
    numbers = sorted({row["worker"] for row in workers})
    shares = {
        (row["worker"], row["at"]): (row["execute_s"] + row["wait_turn_s"] + row["commit_s"]) / interval_s
        for row in workers
    }
    return Plot(
        title="How busy each worker was",
        caption="Part of each interval; a batch counts where it was committed, so a long one may be above 100 %.",
        data=[
            {
                "type": "heatmap",
                "x": [plots.moment(at) for at in times],
                "y": [f"worker {number}" for number in numbers],
                "z": [[round(100 * shares.get((number, at), 0.0), 1) for at in times] for number in numbers],
                "zmin": 0,
                "zmax": 100,
                "colorscale": [[0, "rgba(127,140,155,0.12)"], [1, plots.BLUE]],
                "colorbar": {"ticksuffix": " %", "thickness": 10},
                "hovertemplate": "%{y}, %{x}: %{z} %<extra></extra>",
            }
        ],
        layout={"yaxis": {"autorange": "reversed"}, "shapes": _lines(runs[1:]), "showlegend": False},
        height=bar_height(len(numbers)),
    )


def _latest(rows: Rows, runs: Rows) -> Plot:
    first_at = rows[0]["first_at"]
    labels = [f"worker {number}" for number in sorted({row["worker"] for row in rows})]
    traces: list[dict[str, Any]] = []
    for name, column, color in _LANE_STATES:
        begin_s = [_begin_s(row, column) for row in rows]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [f"worker {row['worker']}" for row in rows],
                # On an axis of times the length of a bar is milliseconds.
                "base": [
                    plots.moment(row["first_at"] + timedelta(seconds=at)) for row, at in zip(rows, begin_s, strict=True)
                ],
                "x": [round(row[column] * 1000, 3) for row in rows],
                "text": [f"batch {row['seq']}, {amounts.number(row['transactions'])} transactions" for row in rows],
                "textposition": "none",
                "hovertemplate": f"{name}: %{{text}}<extra></extra>",
                "marker": {"color": color},
            }
        )
    later = [row for row in runs if row["first_at"] > first_at]
    return Plot(
        title="The latest batches",
        caption=f"The latest {amounts.number(len(rows))}, one by one. Drag to look closer, double-click to go back.",
        data=traces,
        layout={
            "barmode": "overlay",
            "xaxis": {"type": "date"},
            "yaxis": {"categoryorder": "array", "categoryarray": labels, "autorange": "reversed"},
            "shapes": _lines(later),
        },
        height=bar_height(len(labels)),
    )


def _begin_s(row: dict[str, Any], column: str) -> float:
    whole_s = (row["at"] - row["first_at"]).total_seconds()
    if column == "execute_s":
        return 0.0
    commit_s = min(row["commit_s"], whole_s)
    return float(whole_s - commit_s - (row["wait_turn_s"] if column == "wait_turn_s" else 0.0))


def _lines(runs: Rows) -> list[dict[str, Any]]:
    """Return a dotted line where each run begins, of the latest hundred."""
    line = {"color": plots.RED, "width": 1, "dash": "dot"}
    return [
        {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}
        for at in [plots.moment(row["first_at"]) for row in runs[-100:]]
    ]
