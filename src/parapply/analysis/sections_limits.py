"""More sections of the page: how large batches were, what went wrong, and what more workers would bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply import amounts
from parapply.analysis import plots
from parapply.analysis.more_workers import MOST_SLOTS
from parapply.analysis.plots import Plot
from parapply.analysis.section import Section

if TYPE_CHECKING:
    from parapply.analysis.engine import Rows, Tables

_ORDERS: Final = (("preserve", "commit order kept", plots.BLUE), ("relaxed", "relaxed", plots.ORANGE))
_NONE: Final = (
    "Left out, or there is no batch to learn from. Without --what-if only the"
    f" {MOST_SLOTS} slots with most batches are predicted."
)
_ORDER_WORDS: Final = {name: order_words for name, order_words, _ in _ORDERS}


def batches(tables: Tables) -> Section:
    """Sizes of batches, in transactions."""
    rows = tables["batch_sizes"]
    n_batches = sum(row["batches"] for row in rows)
    n_transactions = sum(row["transactions"] for row in rows)
    labels = [_size_class(row["at_least"]) for row in rows]

    def shares(name: str, column: str, total: int, color: str) -> dict[str, object]:
        values = [100 * row[column] / max(total, 1) for row in rows]
        return {"type": "bar", "name": name, "x": labels, "y": values, "marker": {"color": color}}

    return Section(
        title="Batches",
        lead=(
            f"{amounts.number(n_transactions)} transactions were applied in {amounts.number(n_batches)} target "
            "transactions. Without a backlog a transaction is a batch of its own; with one, batches grow."
        ),
        plots=[
            Plot(
                title="Transactions in a batch",
                caption="Of all batches, and of all transactions, the part in batches of this size.",
                data=[
                    shares("of all batches", "batches", n_batches, plots.GREY),
                    shares("of all transactions", "transactions", n_transactions, plots.BLUE),
                ],
                layout={
                    "xaxis": {"type": "category", "title": {"text": "transactions in the batch"}},
                    "yaxis": {"ticksuffix": " %"},
                },
            )
        ],
    )


def trouble(tables: Tables, interval_s: int) -> Section:
    """Repetitions and conflicts."""
    found = []
    conflicts = tables["conflicts"]
    if conflicts:
        times = plots.timeline(tables["over_time"], interval_s)
        traces = plots.stacked_lines(conflicts, times, "type", lambda row: row["conflicts"], interval_s)
        found.append(
            Plot(
                title="Conflicts a second by type",
                caption="Rows that were not as the publisher's change expects them, after a retry at the head.",
                data=traces,
                layout={"yaxis": {"rangemode": "tozero"}},
            )
        )
    if any(row["repeated_batches"] for row in tables["over_time"]):
        times = plots.timeline(tables["over_time"], interval_s)
        repeated = plots.series(tables["over_time"], times, lambda row: row["repeated_batches"])
        found.append(
            Plot(
                title="Repeated batches",
                caption="In each interval. Most are dependencies that could not be foreseen; they cost time, no rows.",
                data=[plots.columns(times, repeated, plots.ORANGE)],
                # A few batches have no half.
                layout={"yaxis": {"rangemode": "tozero", "dtick": max(1, max(repeated) // 5)}, "showlegend": False},
            )
        )
    n_transactions = max(sum(row["transactions"] for row in tables["summary"]), 1)
    return Section(
        title="Conflicts and repetitions",
        lead="" if found else "No batch was repeated, and no conflict was recorded.",
        plots=found,
        header=("what", "where", "how", "how many", "per million transactions"),
        rows=[*_conflict_rows(conflicts, n_transactions), *_retry_rows(tables["retries"], n_transactions)],
    )


def _conflict_rows(conflicts: Rows, n_transactions: int) -> list[tuple[str, ...]]:
    sums: dict[tuple[str, str, str], int] = {}
    for row in conflicts:
        key = (f"conflict {row['type']}", row["table"], f"{row['policy']}: {row['outcome']}")
        sums[key] = sums.get(key, 0) + row["conflicts"]
    return [
        (*key, amounts.number(count), amounts.number(count * 1e6 / n_transactions))
        for key, count in sorted(sums.items(), key=lambda item: (-item[1], item[0]))[: plots.MOST_BARS]
    ]


def _retry_rows(retries: Rows, n_transactions: int) -> list[tuple[str, ...]]:
    return [
        (
            "repeated",
            f"applied as {row['mode']} in the end",
            row["reason"] or "no reason recorded",
            amounts.number(row["batches"]),
            amounts.number(row["batches"] * 1e6 / n_transactions),
        )
        for row in retries[: plots.MOST_BARS]
    ]


def more_workers(tables: Tables) -> Section:
    """Predictions for other numbers of workers."""
    rows = tables["what_if"]
    if not rows:
        return Section(title="With more workers", lead=_NONE)
    return Section(
        title="With more workers",
        lead=(
            f"Predicted from {amounts.number(rows[0]['units'])} batches: the daemon's engine is driven with what the "
            "log says of execution, COMMITs, processors and the source. docs/WHATIF.md says how, and how good that is. "
            "The span is of another run of that kind; on a machine that is busy with other things it is wider."
        ),
        plots=[_speed_up([row for row in rows if not row["question"]])],
        header=("what if", "commit order", "workers", "speed-up", "seconds", "from", "to", "what limits it"),
        rows=[
            (
                row["question"],
                _ORDER_WORDS[row["commit_order"]],
                str(row["workers"] or "as many as needed"),
                f"{row['speed_up']:.2f}",
                *(amounts.duration(row[name]) for name in ("seconds", "least_s", "most_s")),
                row["limit"],
            )
            for row in rows
        ],
    )


def _speed_up(rows: Rows) -> Plot:
    counts = sorted({row["workers"] for row in rows if row["workers"]})
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "every worker adds its own speed",
            "x": counts,
            "y": counts,
            "hoverinfo": "skip",
            "line": {"color": plots.GREY, "width": 1},
        }
    ]
    for order, order_words, color in _ORDERS:
        mine = [row for row in rows if row["commit_order"] == order and row["workers"]]
        if not mine:
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": order_words,
                "x": [row["workers"] for row in mine],
                "y": [row["speed_up"] for row in mine],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [_times(row, "least_s") - row["speed_up"] for row in mine],
                    "arrayminus": [row["speed_up"] - _times(row, "most_s") for row in mine],
                    "thickness": 1,
                },
                "text": [plots.text(row["limit"]) for row in mine],
                "hovertemplate": "%{x} workers: %{y:.2f} times as fast<br>limit: %{text}<extra></extra>",
                "line": {"color": color, "width": 2},
                "marker": {"size": 8},
            }
        )
    return Plot(
        title="Speed-up",
        caption=(
            "Times as fast as one worker; both scales double from line to line. Point at a mark to see what limits it."
        ),
        data=traces,
        layout={
            "xaxis": {"type": "log", "tickvals": counts, "title": {"text": "workers"}},
            "yaxis": {"type": "log", "tickvals": counts, "ticktext": [f"{count}x" for count in counts]},
            "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
        },
        height=420,
    )


def _times(row: dict[str, Any], name: str) -> float:
    return float(row["speed_up"] * row["seconds"] / row[name]) if row[name] else float(row["speed_up"])


def _size_class(at_least: int) -> str:
    return str(at_least) if at_least == 1 else f"{at_least}\N{EN DASH}{2 * at_least - 1}"
