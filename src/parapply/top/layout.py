"""The screen: a history laid out on the available columns and lines. 80 by 24 is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from parapply.amounts import brief, size
from parapply.commands.state_reader import is_between_tries, is_silent, stranger
from parapply.printable import printable, printable_tree
from parapply.vocabulary import SCHEMA_ONLY, CopyState, DaemonState, WaitKind, WorkerState
from parapply.wording import cutover_line, how_far, step_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from parapply.top.history import ReadingHistory, TableRate

_BARS: Final = "▁▂▃▄▅▆▇█"
#: Columns of a course over time, at 80 columns of screen; a wider screen gives it the rest.
_COURSE: Final = 34
#: Colours by state; the words are shown also without them.
_STYLES: Final = {
    WorkerState.IDLE: "dim",
    WorkerState.EXECUTING: "green",
    WorkerState.STREAMING: "green",
    WorkerState.COMMITTING: "cyan",
    WorkerState.WAITING: "yellow",
    WorkerState.RETRYING: "bold red",
    DaemonState.RUNNING: "bold green",
    DaemonState.RECONNECTING: "bold yellow",
    DaemonState.HEALING: "bold yellow",
    DaemonState.STOPPED: "bold red",
    DaemonState.LOST: "bold red",
}
#: Lanes in few letters; "alone" is one batch at a time, "ins sets" only inserts as sets.
_LANES: Final = {"set-based": "sets", "row by row": "rows"}
#: Kinds of dependencies in few letters.
_KINDS: Final[dict[str, str]] = {WaitKind.FOREIGN_KEY: "parent"}
#: Lines besides the head, the workers, the tables and the rare ones: one more of the head, two blank, two headings.
_OTHER_LINES: Final = 5
_FEW_TABLES: Final = 3
_NOTICE_LINES: Final = 4
_LIMIT_LINES: Final = 3
#: Kinds of changes. Their rates are shown where a name of this width has room beside them.
_SORTS: Final = ("ins", "upd", "del")
_NAME_COLUMNS: Final = 16
#: Lines of a screen from which on the limit takes more than one.
_TALL: Final = 22
#: Columns of a worker's line before what it waits for.
_BEFORE_WAITS: Final = 28


def screen(history: ReadingHistory, width: int, height: int, order: str, notice: str = "") -> Group:
    """Lay one screen out."""
    is_tall = not height or height >= _TALL
    head = _head(history, width, _LIMIT_LINES if is_tall else int(not notice))
    if notice:
        # As long as it takes, within reason, because the cause of a lost connection is at the end.
        lines = Text(notice, style="bold red").wrap(Console(width=width), width)
        head += lines[:_NOTICE_LINES]
    seldom = _seldom(printable_tree(history.report))
    workers: Sequence[dict[str, Any]] = printable_tree(history.report["workers"])
    tables: Sequence[TableRate] = history.tables(order)
    n_workers, wraps = len(workers), True
    if height:
        left = height - len(head) - len(seldom) - _OTHER_LINES
        if len(workers) + len(tables) > left:
            # Few tables are hot, but every worker may wait for something, so the workers have the larger part.
            workers = workers[: max(left - min(len(tables), max(_FEW_TABLES, left // 3)), 1)]
            left -= n_workers > len(workers)
            tables = tables[: max(left - len(workers), 1)]
        room = width - _BEFORE_WAITS
        wraps = sum([max(0, len(one["waits_for"] or "") - 1) // room for one in workers]) <= left - len(workers) - len(
            tables
        )
    parts: list[RenderableType] = [*head, Text(), _workers(history, workers, wraps=wraps)]
    if n_workers > len(workers):
        parts.append(Text(f"    and {n_workers - len(workers)} more", style="dim"))
    return Group(*parts, Text(), _tables(tables, width), *seldom)


def _head(history: ReadingHistory, width: int, limit_lines: int) -> list[RenderableType]:
    report = printable_tree(history.report)
    state = Text.assemble(("slot ", "dim"), (report["slot_name"], "bold"), "  ")
    if report["state"] is None:
        state.append("not made yet")
        return [state]
    state.append_text(state_text(report))
    if report["is_daemon_connected"]:
        state.append(f"  {report['reason']}")
    elif is_between_tries(report):
        state.append(f", pid {report['pid']}", "bold red")
    if is_silent(report):
        state.append(f"  nothing heard for {brief(report['silent_s'])}", "bold red")
    state.no_wrap, state.overflow = True, "ellipsis"
    lines: list[RenderableType] = [state, _courses(history, max(8, _COURSE + width - 80)), _positions(report)]
    if limit_lines and (limits := report["limits"]):
        said = Text.assemble((limits["words"].rstrip("."), "bold"), (": ", "dim"), limits["advice"])
        # The advice is at the end, and evidence is shown by `parapply status`.
        wrapped = said.wrap(Console(width=width), width)
        if len(wrapped) > limit_lines:
            wrapped[limit_lines - 1].append(" ...")
            wrapped[limit_lines - 1].truncate(width, overflow="ellipsis")
        lines += wrapped[:limit_lines]
    return lines


def state_text(report: dict[str, Any]) -> Text:
    """Return the state of a slot that is made."""
    if report["is_daemon_connected"]:
        return Text(report["state"], _STYLES.get(report["state"], ""))
    return Text(report["state"] if is_between_tries(report) else "no daemon runs", "bold red")


def _courses(history: ReadingHistory, room: int) -> Table:
    """Return the current lag and rate, and their courses over time in some columns."""
    report, lag, rows = history.report, history.lag_s, history.rows_s
    table = Table.grid(padding=(0, 1), expand=False)
    for justify, columns in (("left", 4), ("right", 9), ("right", 10), ("left", room), ("left", None)):
        table.add_column(justify=justify, no_wrap=True, width=columns)  # type: ignore[arg-type]
    behind = "?" if report["lag_bytes"] is None else size(report["lag_bytes"])
    lag_course = Text(_course(lag, room), "yellow")
    age = "?" if report["lag_s"] is None else brief(report["lag_s"])
    table.add_row(_dim("lag"), age, behind, lag_course, _dim(_most(lag, room, brief)))
    rows_now = _per_second(sum([one.rows_s for one in history.tables()]))
    rows_course = Text(_course(rows, room), "green")
    transactions = f"{history.transactions_s:,.0f} tx/s"
    table.add_row(_dim("rows"), rows_now, transactions, rows_course, _dim(_most(rows, room, _per_second)))
    return table


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}/s"


def _positions(report: dict[str, Any]) -> Text:
    """Return the position up to which everything is applied, or a note that the publisher's position is not known."""
    upto = Text.assemble(
        ("complete up to ", "dim"), report["lowest_remote_lsn"], ("  newest ", "dim"), report["highest_remote_lsn"],
        ("  order ", "dim"), report["commit_order"], ("  reads ", "dim"), report["reading"].partition(":")[0],
    )  # fmt: skip
    if problem := report["source"]["error"] or stranger(report):
        upto = Text(f"publisher: {problem}", style="bold red")
    upto.no_wrap, upto.overflow = True, "ellipsis"
    return upto


def _workers(history: ReadingHistory, workers: Sequence[dict[str, Any]], *, wraps: bool) -> Table:
    table = grid(
        ("#", "right", 2),
        ("busy", "right", 4),
        ("state", "left", 10),
        ("for", "right", 7),
        ("waits for", "left", None),
        wraps=wraps,
    )
    for one in workers:
        state = Text(one["state"], style=_STYLES.get(one["state"], ""))
        waits = Text(one["waits_for"] or "", no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
        busy = f"{history.busy(one['worker']):.0%}"
        table.add_row(str(one["worker"]), busy, state, brief(one["since_s"]), waits)
    return table


def _tables(tables: Sequence[TableRate], width: int) -> Table:
    schemas = {one.name.partition(".")[0] for one in tables}
    # Where all tables share a schema, its name is shown once, because there is little room.
    heading, start = (f"table in {printable(schemas.pop())}", True) if len(schemas) == 1 else ("table", False)
    names = [printable(one.name.partition(".")[2] if start else one.name) for one in tables]
    # Not wider than the longest name: on a wide screen the figures would be far away from it.
    widest = max(map(len, [heading, *names]))
    sorts: Sequence[str] = _SORTS
    if _room(width, _table_columns(sorts)) < min(widest, _NAME_COLUMNS):
        sorts = ()
    columns = _table_columns(sorts)
    table = grid((heading, "left", max(1, min(_room(width, columns), widest))), *columns)
    table.expand = False
    for one, shown in zip(tables, names, strict=True):
        counts = dict(zip(_SORTS, (one.inserts_s, one.updates_s, one.deletes_s), strict=True))
        rates = [_rate(rate) for rate in (one.rows_s, *[counts[sort] for sort in sorts], one.waits_s)]
        name = Text(shown, no_wrap=True, overflow="ellipsis")
        name.style = "dim" if one.is_quiet else ""
        waits_for = _KINDS.get(one.waits_for, one.waits_for) if one.waits_s else ""
        table.add_row(name, *rates, waits_for, _applied(one))
    return table


def _table_columns(sorts: Sequence[str]) -> list[tuple[str, Any, int | None]]:
    return [
        ("rows/s", "right", 7), *[(sort, "right", 5) for sort in sorts],
        ("waits", "right", 5), ("for", "left", 6), ("applied", "left", 8),
    ]  # fmt: skip


def _room(width: int, columns: Sequence[tuple[str, Any, int | None]]) -> int:
    """Return the number of columns of the screen that are left for a name."""
    return width - sum([n_columns + 2 for _, _, n_columns in columns if n_columns]) - 2


def _applied(table: TableRate) -> str:
    if table.is_alone:
        return "alone"
    return "ins sets" if table.is_set_for_inserts else _LANES.get(table.lane, table.lane)


def _seldom(report: dict[str, Any]) -> list[RenderableType]:
    """Return lines that appear only at times, such as the line of a cut-over."""
    lines = []
    for end, found in (("source", report["source"].get("blocked", ())), ("target", report["blocked"])):
        # The holder first, because the end of a line may be cut.
        for one in found[:1]:
            holder = f"pid {one['pid']}" if one["pid"] else one["gid"] or "a lock"
            lines.append(f"{end}: waits for {holder}, {brief(one['wait_s'])} so far: {one['line']}")
    if report["cutover"] and report["cutover"]["step"] != "done":
        lines.append(f"cut-over: {cutover_line(report['cutover'])}")
    for one in report["migration"]:
        if one["state"] != "done":
            still = f", {brief(one['left_s'])} left" if one["left_s"] is not None else ""
            far = how_far(one)
            lines.append(f"migration: {one['step']} {step_state(one)} for {brief(one['seconds'])}{still}; {far}")
    if report["conflicts"]:
        n = sum([one["count"] for one in report["conflicts"]])
        latest = max(report["conflicts"], key=lambda one: str(one["latest"]))
        lines.append(f"{n:,} conflicts kept, the latest: {latest['type']} in {latest['table']}, {latest['outcome']}")
    if report["prepared"]:
        oldest = brief(max([one["age_s"] for one in report["prepared"]]))
        lines.append(f"{len(report['prepared']):,} prepared transactions, the oldest for {oldest}")
    if left := [one for one in report["copies"] if one["state"] == CopyState.COPYING]:
        lines.append(f"{len(left):,} tables are being copied")
    waiting = [one for one in report["copies"] if one["state"] == CopyState.WAITING]
    if left := [one for one in waiting if one["reason"] != SCHEMA_ONLY]:
        names = ", ".join([f"{one['schema_name']}.{one['table_name']}" for one in left])
        lines.append(f"{len(left):,} tables not applied until `parapply refresh` or `resume`: {names}")
    return [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in lines]


def _course(values: Sequence[float | None], room: int) -> str:
    """Return the latest values as bars, the highest of them full; one column each, empty for one that is not known."""
    shown = list(values)[-room:]
    most = max([value for value in shown if value is not None], default=0.0) or 1.0
    return "".join([" " if value is None else _BARS[min(7, int(value / most * 7.999))] for value in shown])


def _most(values: Sequence[float | None], room: int, text: Any) -> str:  # noqa: ANN401  a function of a number
    shown = list(values)[-room:]
    known = [value for value in shown if value is not None]
    return f"max {text(max(known, default=0.0)) if known or not shown else '?'}"


def _rate(rate: float) -> str:
    if rate < 10:
        return f"{rate:.1f}" if rate else ""
    for limit, per, unit in ((10_000, 1, ""), (1_000_000, 1e3, "k")):
        if rate < limit:
            return f"{rate / per:.0f}{unit}"
    return f"{rate / 1e6:.1f}M"


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def grid(*columns: tuple[str, Any, int | None], wraps: bool = False) -> Table:
    """Return a table of columns without lines: heading, side, and width or None for what is left."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", expand=True)
    for name, justify, width in columns:
        table.add_column(
            name, justify=justify, width=width, no_wrap=bool(width) or not wraps, ratio=None if width else 1
        )
    return table
