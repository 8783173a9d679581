"""The sections of the page for one slot: title, what it answers, plots. Definitions of the figures: `figures`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply import amounts
from parapply.analysis import plots, words
from parapply.analysis import sections_culprit as culprit
from parapply.analysis.figures import PARTS, STAGES
from parapply.analysis.more_workers import MOST_SLOTS
from parapply.analysis.plots import Plot, Section, bar_height, bars, line

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.analysis.engine import Rows, Tables

_OPERATIONS: Final = (
    ("inserts", plots.GREEN),
    ("updates", plots.BLUE),
    ("deletes", plots.ORANGE),
    ("truncates", plots.RED),
)
_PART_COLORS: Final = dict(zip(PARTS, (plots.GREY, plots.RED, plots.BLUE, plots.ORANGE, plots.GREEN), strict=True))


def sections(tables: Tables, interval_s: int, compared: str) -> list[Section]:
    """Return the sections of a slot, in order."""
    made = (
        culprit.compared(tables, compared),
        _throughput(tables, interval_s),
        _delay(tables, interval_s),
        _where(tables),
        _tables(tables, interval_s),
        _workers(tables, interval_s),
        culprit.lanes(tables, interval_s),
        *(culprit.listed(name, tables[name]) for name in ("slow_batches", "slow_transactions", "blockers", "chain")),
        culprit.listed("hot_keys", tables["hot_keys"][:20]),
        batches(tables),
        trouble(tables, interval_s),
        more_workers(tables),
        culprit.days(tables),
    )
    return [section for section in made if section.plots or section.rows or section.lead]


def _throughput(tables: Tables, interval_s: int) -> Section:
    rows = tables["over_time"]
    times = plots.timeline(rows, interval_s)

    def rate(column: str) -> list[float]:
        return [value / interval_s for value in plots.series(rows, times, lambda row: row[column])]

    return Section(
        title="Throughput",
        lead="Transactions and rows applied, over time. A gap means that nothing was committed on the target.",
        plots=[
            Plot(
                title="Transactions a second",
                caption="Source transactions committed on the target.",
                data=[line("transactions", times, rate("transactions"), plots.BLUE, fill="tozeroy")],
                layout={"yaxis": {"rangemode": "tozero"}, "showlegend": False},
            ),
            Plot(
                title="Rows a second",
                caption="Rows as the publisher sent them, before changes of one row were merged.",
                data=[line("rows", times, rate("row_changes"), plots.TEAL, fill="tozeroy")],
                layout={"yaxis": {"rangemode": "tozero"}, "showlegend": False},
            ),
        ],
    )


def _delay(tables: Tables, interval_s: int) -> Section:
    rows = tables["over_time"]
    times = plots.timeline(rows, interval_s)
    by_time = {row["at"]: row for row in rows}

    def values(column: str) -> list[float | None]:
        # A logarithmic axis has no place for 0 and below; clocks that differ make such values.
        found = [by_time.get(at, {}).get(column) for at in times]
        return [value if value is not None and value > 0 else None for value in found]

    stages = [row for row in tables["latency"] if row["stage"] in STAGES or row["stage"] == "each transaction"]
    order = ["each transaction", *STAGES]
    stages.sort(key=lambda row: order.index(row["stage"]))
    header = ("stage", "half took at most", "90 %", "99 %", "99.9 %", "longest", "what it is")
    return Section(
        title="Delay",
        lead=(
            "From the commit on the publisher until the change is visible on the target. It compares the clocks of two "
            "machines: where they differ, every delay is off by that much."
        ),
        plots=[
            Plot(
                title="Delay over time",
                caption=(
                    "Of the oldest transaction of each batch; the scale is logarithmic. 'Shortest delivery' is what "
                    "network, decoding and the clocks' difference take at least."
                ),
                data=[
                    line("longest", times, values("oldest_max_s"), plots.RED, line={"color": plots.RED, "width": 1}),
                    line("99 %", times, values("oldest_p99_s"), plots.ORANGE),
                    line("half", times, values("oldest_p50_s"), plots.BLUE),
                    line("shortest delivery", times, values("delivery_floor_s"), plots.GREY),
                ],
                layout={"yaxis": plots.log_axis([*values("oldest_max_s"), *values("delivery_floor_s")])},
            ),
            _stage_plot(stages),
        ],
        header=header,
        rows=[
            (
                row["stage"],
                *(amounts.duration(row[name]) for name in ("p50_s", "p90_s", "p99_s", "p999_s", "max_s")),
                STAGES[row["stage"]][1] if row["stage"] in STAGES else "every source transaction by itself",
            )
            for row in stages
        ],
    )


def _stage_plot(stages: Rows) -> Plot:
    labels = [row["stage"] for row in stages]
    traces = []
    for name, column, color in (("half", "p50_s", plots.BLUE), ("99 %", "p99_s", plots.ORANGE)):
        found = [row[column] if row[column] > 0 else None for row in stages]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "y": labels,
                "x": found,
                "marker": {"size": 13, "color": color},
            }
        )
    return Plot(
        title="Each stage",
        caption="How long a batch was in each stage: half of them at most the blue mark, 99 % at most the orange one.",
        data=traces,
        layout={
            "xaxis": plots.log_axis([row[name] for row in stages for name in ("p50_s", "p99_s")]),
            "yaxis": {"autorange": "reversed"},
        },
        height=bar_height(len(labels)),
    )


def _where(tables: Tables) -> Section:
    waits = {row["part"]: row for row in tables["waits"]}
    total_s = sum(row["seconds"] for row in tables["waits"])
    found = [
        Plot(
            title="From received to committed",
            caption=(
                "Seconds of all batches together, so more than the clock's where several were under way. 'Executing' "
                "and 'committing' are the target's work, 'commit turn' is the price of keeping the order."
            ),
            data=[
                bars(
                    part,
                    [f"{part} ({amounts.percent(waits[part]['share'])})"],
                    [waits[part]["seconds"]],
                    _PART_COLORS[part],
                )
                for part in PARTS
                if part in waits
            ],
            layout={"xaxis": {"ticksuffix": " s"}, "yaxis": {"autorange": "reversed"}, "showlegend": False},
            height=bar_height(len(PARTS)),
        )
    ]
    rows = tables["dependencies"]
    shown = [row for row in rows if row["seconds"] > 0][: plots.MOST_BARS]
    if shown:
        labels = [words.key_words(row) for row in shown]
        found.append(
            Plot(
                title="Dependencies that batches waited for",
                caption="Seconds that batches could not start because of this key, the last one they waited for.",
                data=[bars("waited", labels, [row["seconds"] for row in shown], plots.RED)],
                layout={"xaxis": {"ticksuffix": " s"}, "yaxis": {"autorange": "reversed"}, "showlegend": False},
                height=bar_height(len(shown)),
            )
        )
    late = sum(row["late_keys"] for row in rows)
    more = f" {amounts.number(late)} rows were left for later so that their batches need not wait." if late else ""
    return Section(
        title="Where the time went",
        lead="Waits of a change once the daemon had read it." + more,
        plots=found if total_s else [],
    )


def _tables(tables: Tables, interval_s: int) -> Section:
    rows = tables["tables"]
    if not rows:
        return Section(title="Tables", lead="")
    totals: dict[str, dict[str, int]] = {}
    for row in rows:
        sums = totals.setdefault(row["table"], dict.fromkeys([name for name, _ in _OPERATIONS], 0))
        for name in sums:
            sums[name] += row[name]
    order = sorted(totals, key=lambda table: (-sum(totals[table].values()), table))
    shown = order[: plots.MOST_BARS]
    of_all = f" The {len(shown)} busiest of {len(order)}." if len(order) > len(shown) else ""
    every_row: Callable[[dict[str, Any]], float] = lambda row: row["inserts"] + row["updates"] + row["deletes"]  # noqa: E731
    times = plots.timeline(tables["over_time"], interval_s)
    return Section(
        title="Tables",
        lead="The changes by table." + _target_names(tables["target_names"]),
        plots=[
            Plot(
                title="Rows by table and operation",
                caption="Over the whole log. A TRUNCATE counts as one." + of_all,
                data=[
                    bars(name, shown, [totals[table][name] for table in shown], color)
                    for name, color in _OPERATIONS
                    if any(totals[table][name] for table in shown)
                ],
                layout={"barmode": "stack", "yaxis": {"autorange": "reversed"}},
                height=bar_height(len(shown)),
            ),
            Plot(
                title="Rows a second by table",
                caption="On top of each other; the upper edge is all rows.",
                data=plots.stacked_lines(rows, times, "table", every_row, interval_s),
                layout={"yaxis": {"rangemode": "tozero"}},
            ),
        ],
    )


def _target_names(rows: Rows) -> str:
    if not rows:
        return ""
    names = sorted({(row["table"], row["target"]) for row in rows})
    shown = [f"{table} is {target} there" for table, target in names[: plots.MOST_BARS]]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f" They are named as published; with other names on the target: {', '.join(shown)}{more}."


def _workers(tables: Tables, interval_s: int) -> Section:
    rows = tables["workers"]
    workers = sorted({row["worker"] for row in rows})
    labels = [f"worker {worker}" for worker in workers]

    def total(worker: int, column: str) -> float:
        return float(sum(row[column] for row in rows if row["worker"] == worker))

    states = (("executing", "execute_s"), ("commit turn", "wait_turn_s"), ("committing", "commit_s"))
    times = plots.timeline(tables["over_time"], interval_s)
    parallel = tables["parallelism"]
    held = [one / interval_s for one in plots.series(parallel, times, lambda row: row["held"] * row["seconds"])]
    active = [one / interval_s for one in plots.series(parallel, times, lambda row: row["executing"] * row["seconds"])]
    return Section(
        title="Workers and parallelism",
        lead="Batches applied at the same time, and their workers.",
        plots=[
            Plot(
                title="Batches at once",
                caption=(
                    "Average in each interval. 'With a worker' counts from the start of a batch to its commit, "
                    "'executing' only while its statements ran. The distance is time spent on the commit order."
                ),
                data=[
                    line("with a worker", times, held, plots.GREY, fill="tozeroy"),
                    line("executing", times, active, plots.BLUE, fill="tozeroy"),
                ],
                layout={"yaxis": {"rangemode": "tozero"}},
            ),
            _share_plot(parallel),
            Plot(
                title="Work of each worker",
                caption="Seconds each connection spent on batches.",
                data=[
                    bars(name, labels, [total(worker, column) for worker in workers], _PART_COLORS[name])
                    for name, column in states
                ],
                layout={"barmode": "stack", "xaxis": {"ticksuffix": " s"}, "yaxis": {"autorange": "reversed"}},
                height=bar_height(len(workers)),
            ),
            Plot(
                title="Transactions a second by worker",
                caption="On top of each other; the upper edge is all transactions.",
                data=plots.stacked_lines(rows, times, "worker", lambda row: row["transactions"], interval_s),
                layout={"yaxis": {"rangemode": "tozero"}},
            ),
        ],
    )


def _share_plot(parallelism: Rows) -> Plot:
    seconds: dict[int, float] = {}
    for row in parallelism:
        seconds[row["executing"]] = seconds.get(row["executing"], 0.0) + row["seconds"]
    total_s = sum(seconds.values()) or 1.0
    levels = sorted(seconds)
    return Plot(
        title="Executing at once",
        caption="Part of the time with any batch under way, by the number of batches that were executing statements.",
        data=[
            {
                "type": "bar",
                "x": [str(level) for level in levels],
                "y": [100 * seconds[level] / total_s for level in levels],
                "marker": {"color": plots.BLUE},
            }
        ],
        layout={
            "xaxis": {"type": "category", "title": {"text": "batches"}},
            "yaxis": {"ticksuffix": " %"},
            "showlegend": False,
        },
    )


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
