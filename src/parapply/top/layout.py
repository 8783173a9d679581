"""The screen: what a history says, on as many columns and lines as there are. 80 by 24 is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from parapply.runtime.status import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from parapply.top.history import History, TableRate

_BARS: Final = "▁▂▃▄▅▆▇█"
#: Columns of a course over time, at 80 columns of screen; what is wider goes to it.
_COURSE: Final = 34
#: Colours by state; the words are there without them.
_STYLES: Final = {
    "idle": "dim",
    "executing": "green",
    "streaming": "green",
    "committing": "cyan",
    "waiting": "yellow",
    "retrying": "bold red",
    "running": "bold green",
    "reconnecting": "bold yellow",
    "stopped": "bold red",
}
#: Lanes in few letters; "alone" is one batch at a time.
_LANES: Final = {"set-based": "sets", "row by row": "rows"}
#: Lines of a worker's table and of the tables' one that are no rows: heading and blank line.
_HEADINGS: Final = 2
_FEW_TABLES: Final = 3


def screen(history: History, width: int, height: int, order: str, notice: str = "") -> Group:
    """Lay one screen out.

    Args:
        history: with at least one look.
        width: columns, from 60 on.
        height: lines; 0: as many as it takes.
        order: of the tables, as `History.tables` takes it.
        notice: something that must be seen, such as an end that does not answer.
    """
    head = _head(history, width)
    if notice:
        head.append(Text(notice, style="bold red", no_wrap=True, overflow="ellipsis"))
    seldom = _seldom(history.report)
    workers: Sequence[dict[str, Any]] = history.report["workers"]
    tables: Sequence[TableRate] = history.tables(order)
    if height:
        left = height - len(head) - len(seldom) - 2 * _HEADINGS
        n_tables = max(_FEW_TABLES, left - len(workers))
        tables = tables[:n_tables]
        workers = workers[: max(1, left - len(tables))]
    parts: list[RenderableType] = [*head, Text(), _workers(history, workers), Text(), _tables(tables)]
    n_hidden = len(history.report["workers"]) - len(workers)
    if n_hidden:
        parts.insert(-2, Text(f"   and {n_hidden} more workers", style="dim"))
    return Group(*parts, *seldom)


def _head(history: History, width: int) -> list[RenderableType]:
    report = history.report
    state = Text.assemble(("slot ", "dim"), (report["slot_name"], "bold"), "  ")
    if report["is_daemon_connected"]:
        state.append(report["state"], _STYLES.get(report["state"], ""))
        state.append(f"  {report['reason']}")
    else:
        state.append("no daemon runs", "bold red")
        state.append(f", last update {duration(report['silent_s'])} ago")
    state.no_wrap, state.overflow = True, "ellipsis"
    room = _COURSE + max(0, width - 80)
    lag, rows = history.lag_s, history.rows_s
    lag_bytes = "?" if report["lag_bytes"] is None else _bytes(report["lag_bytes"])
    courses = Table.grid(padding=(0, 1), expand=False)
    for justify in ("left", "right", "right", "left", "left"):
        courses.add_column(justify=justify, no_wrap=True)
    courses.columns[1].width, courses.columns[2].width, courses.columns[3].width = 9, 10, room
    courses.add_row(
        _dim("lag"), duration(lag[-1]), lag_bytes, Text(_course(lag, room), "yellow"), _dim(_most(lag, room, duration))
    )
    courses.add_row(
        _dim("rows"), f"{sum([one.rows_s for one in history.tables()]):,.0f}/s", f"{history.transactions_s:,.0f} tx/s", Text(_course(rows, room), "green"),
        _dim(_most(rows, room, lambda rate: f"{rate:,.0f}/s")),
    )  # fmt: skip
    upto = Text.assemble(
        ("complete up to ", "dim"), report["lowest_remote_lsn"], ("  newest ", "dim"), report["highest_remote_lsn"],
        ("  order ", "dim"), report["commit_order"],
    )  # fmt: skip
    if not report["source"]["is_reachable"]:
        upto = Text(f"publisher: {report['source']['error']}", style="bold red")
    upto.no_wrap, upto.overflow = True, "ellipsis"
    return [state, courses, upto]


def _workers(history: History, workers: Sequence[dict[str, Any]]) -> Table:
    table = _grid(
        ("#", "right", 2), ("busy", "right", 4), ("state", "left", 10), ("for", "right", 6), ("waits for", "left", None)
    )
    for one in workers:
        state = Text(one["state"], style=_STYLES.get(one["state"], ""))
        waits = Text(one["waits_for"] or "", no_wrap=True, overflow="ellipsis")
        busy = f"{history.busy(one['worker']):.0%}"
        table.add_row(str(one["worker"]), busy, state, duration(one["since_s"]), waits)
    return table


def _tables(tables: Sequence[TableRate]) -> Table:
    schemas = {one.name.partition(".")[0] for one in tables}
    # Where all tables share a schema its name is told once: there is little room.
    heading, start = (f"table in {schemas.pop()}", True) if len(schemas) == 1 else ("table", False)
    table = _grid(
        (heading, "left", None), ("rows/s", "right", 7), ("ins", "right", 5), ("upd", "right", 5), ("del", "right", 5),
        ("waits", "right", 5), ("for", "left", 7), ("applied", "left", 7),
    )  # fmt: skip
    for one in tables:
        rates = [_rate(rate) for rate in (one.rows_s, one.inserts_s, one.updates_s, one.deletes_s, one.waits_s)]
        name = Text(one.name.partition(".")[2] if start else one.name, no_wrap=True, overflow="ellipsis")
        name.style = "dim" if one.is_quiet else ""
        waits_for = one.waits_for.replace("foreign key", "parent") if one.waits_s else ""
        table.add_row(name, *rates, waits_for, "alone" if one.is_alone else _LANES.get(one.lane, one.lane))
    return table


def _seldom(report: dict[str, Any]) -> list[RenderableType]:
    """Return what is there at times only, a line each."""
    lines = []
    if report["conflicts"]:
        n = sum([one["count"] for one in report["conflicts"]])
        latest = max(report["conflicts"], key=lambda one: str(one["latest"]))
        lines.append(f"{n:,} conflicts kept, the latest: {latest['type']} in {latest['table']}, {latest['outcome']}")
    if report["prepared"]:
        oldest = duration(max([one["age_s"] for one in report["prepared"]]))
        lines.append(f"{len(report['prepared']):,} prepared transactions, the oldest for {oldest}")
    if left := [one for one in report["copies"] if one["state"] != "copied"]:
        lines.append(f"{len(left):,} tables not copied yet")
    return [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in lines]


def _course(values: Sequence[float], room: int) -> str:
    """Return the latest values as bars, the highest of them full; one column each."""
    shown = list(values)[-room:]
    most = max(shown, default=0.0)
    if not most:
        return _BARS[0] * len(shown)
    return "".join([_BARS[min(7, int(value / most * 7.999))] for value in shown])


def _most(values: Sequence[float], room: int, text: Any) -> str:  # noqa: ANN401  a function of a number
    """Return what the highest bar stands for."""
    return f"max {text(max(list(values)[-room:], default=0.0))}"


def _rate(rate: float) -> str:
    """Return a rate in five characters at most, nothing for none."""
    if rate < 10:
        return f"{rate:.1f}" if rate else ""
    for limit, size, unit in ((10_000, 1, ""), (1_000_000, 1e3, "k")):
        if rate < limit:
            return f"{rate / size:.0f}{unit}"
    return f"{rate / 1e6:.1f}M"


def _bytes(n_bytes: int) -> str:
    for limit, size, unit in ((10_000, 1, "B"), (10_000_000, 1e3, "kB"), (10_000_000_000, 1e6, "MB")):
        if n_bytes < limit:
            return f"{n_bytes / size:,.0f} {unit}"
    return f"{n_bytes / 1e9:,.0f} GB"


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def _grid(*columns: tuple[str, Any, int | None]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", expand=True)
    for name, justify, width in columns:
        table.add_column(name, justify=justify, width=width, no_wrap=True, ratio=None if width else 1)
    return table
