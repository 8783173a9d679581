"""`parapply status`: one screen, or JSON, about a slot; once or each second.

In: what `reading.py` has read. Out: text that fits 80 columns.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parapply.errors import ParapplyError
from parapply.printable import printable_tree
from parapply.runtime.reading import Reader, collect

if TYPE_CHECKING:
    from rich.console import RenderableType

    from parapply.config import Config

#: Seconds between two looks of --watch.
_REFRESH_S = 1.0

#: Seconds without a word of the daemon, which writes once a second, that are worth telling.
_SILENT_S = 5.0


def show(config: Config, as_json: bool, watch: bool) -> None:  # noqa: FBT001  the command line passes them by position
    """Print the status once, or each second until Ctrl-C.

    Args:
        config: target and slot; the source is asked if source.dsn is set.
        as_json: a document a line with `watch`, else one indented document; the keys are those of `Reader.read`.
        watch: go on until interrupted, also while the target cannot be reached.

    Raises:
        TargetRefused: the target knows nothing of the slot.
        TargetLost: the target cannot be reached at the first look.
    """
    asyncio.run(_watch(config, as_json=as_json) if watch else _once(config, as_json=as_json))


async def _once(config: Config, *, as_json: bool) -> None:
    report = await collect(config)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        Console().print(render(report))


async def _watch(config: Config, *, as_json: bool) -> None:
    async with Reader(config) as reader:
        report = await reader.read()
        if as_json:
            await _print_lines(reader, report)
        with Live(render(report), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(_REFRESH_S)
                try:
                    report = await reader.read()
                    live.update(render(report), refresh=True)
                except ParapplyError as error:
                    # What was seen last stays below: it is all that anybody knows.
                    live.update(Group(Text(error.line(), style="bold red"), render(report)), refresh=True)


async def _print_lines(reader: Reader, report: dict[str, Any]) -> None:
    while True:
        started_s = time.monotonic()
        click.echo(json.dumps(report))
        await asyncio.sleep(max(0.0, started_s + _REFRESH_S - time.monotonic()))
        report = await reader.read()


def render(report: dict[str, Any]) -> Group:
    """Lay a report of `Reader.read` out as one screen."""
    report = printable_tree(report)
    parts: list[RenderableType] = [_facts(report), ""]
    if report["workers"]:
        parts += [_workers(report["workers"]), ""]
    if report["prepared"]:
        held = _grid("prepared here, source xid", "end lsn", "owner", "age")
        for one in report["prepared"]:
            _add(held, one["source_xid"], one["end_lsn"], one["owner"], f"{one['age_s']:,.0f} s")
        parts += [held, ""]
    parts += _seldom(report)
    if report["tables"]:
        parts += _tables(report["tables"])
    return Group(*parts)


def _facts(report: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    reason = f" ({report['reason']})" if report["reason"] else ""
    _add(grid, "slot", f"{report['slot_name']} from database {report['database_name']}")
    _add(grid, "state", f"{report['state']}{reason}")
    _add(grid, "daemon", _daemon_line(report))
    _add(grid, "source", _source_line(report["source"]))
    _add(grid, "complete up to", f"{report['lowest_remote_lsn']}, newest {report['highest_remote_lsn']}")
    _add(grid, "confirmed", report["confirmed_flush_lsn"] or "nothing yet")
    lag_bytes = "unknown" if report["lag_bytes"] is None else f"{report['lag_bytes']:,} bytes of WAL"
    lag_s = "" if report["lag_s"] is None else f", {report['lag_s']:.1f} s"
    _add(grid, "lag", lag_bytes + lag_s)
    two_phase = "" if report["two_phase"] == "disabled" else f", two-phase {report['two_phase']}"
    _add(grid, "commit order", f"{report['commit_order']}, {report['worker_count']} workers{two_phase}")
    return grid


def _daemon_line(report: dict[str, Any]) -> str:
    if report["is_daemon_connected"]:
        since = report["started_at"][:19]
        silent = "" if report["silent_s"] < _SILENT_S else f"; nothing heard for {duration(report['silent_s'])}"
        return f"pid {report['pid']} on {report['host']}, version {report['version']}, since {since} UTC{silent}"
    return f"none runs; nothing was updated since {report['updated_at'][:19]} UTC ({report['silent_s']:,.0f} s)"


def _source_line(source: dict[str, Any]) -> str:
    if not source["is_reachable"]:
        return f"not reachable: {source['error']}"
    if not source["slot_exists"]:
        return "reachable, but the slot is not there"
    lost = source["slot_invalidation_reason"] or source["slot_wal_status"] == "lost"
    reader = f"read by process {source['slot_active_pid']}" if source["slot_active_pid"] else "nobody reads the slot"
    return f"at {source['flush_lsn']}, " + ("the slot is INVALIDATED" if lost else reader)


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = _grid("worker", "state", "for", "end lsn", "changes", "waits for")
    for column in (2, 4):
        table.columns[column].justify = "right"
    for one in workers:
        changes = f"{one['changes']:,}"
        _add(table, one["worker"], one["state"], duration(one["since_s"]), one["end_lsn"], changes, one["waits_for"])
    return table


def _tables(tables: list[dict[str, Any]]) -> list[RenderableType]:
    """Return how each table is applied: figures in columns, the reason in a line of its own."""
    parts: list[RenderableType] = []
    shown = _grid("table", "lane", "rows", "waits", "retries")
    for column in (2, 3, 4):
        shown.columns[column].justify = "right"
    for one in tables:
        n_rows = one["inserts"] + one["updates"] + one["deletes"]
        lane = one["lane"] + (", one batch at a time" if one["is_table_exclusive"] else "")
        figures = (f"{n:,}" for n in (n_rows, one["waits"], one["retries"]))
        _add(shown, f"{one['schema_name']}.{one['table_name']}", lane, *figures)
    parts.append(shown)
    telling = [one for one in tables if one["reason"] and not _is_plain(one)]
    if telling:
        parts.append("")
        parts.append(Text("why", style="bold"))
    for one in telling:
        reason = f"{one['schema_name']}.{one['table_name']}: {one['reason']}"
        parts.append(Padding(Text(reason), (0, 0, 0, 2)))
    return parts


def _is_plain(table: dict[str, Any]) -> bool:
    """Tell whether a table is applied in the best way there is, so that nobody asks why."""
    starts = table["reason"].startswith("set-based by key") and ";" not in table["reason"]
    return starts and not table["is_table_exclusive"]


def _seldom(report: dict[str, Any]) -> list[RenderableType]:
    """Return what is there at times only: tables not copied yet, conflicts."""
    parts: list[RenderableType] = []
    if left := [copy for copy in report["copies"] if copy["state"] != "copied"]:
        shown = _grid("not copied yet", "state", "as of")
        for copy in left:
            _add(shown, f"{copy['schema_name']}.{copy['table_name']}", copy["state"], copy["start_lsn"])
        parts += [shown, ""]
    if report["conflicts"]:
        shown = _grid("conflicts kept", "type", "outcome", "latest", "count")
        for one in report["conflicts"]:
            _add(shown, one["table"], one["type"], one["outcome"], one["latest"][:19], one["count"])
        parts += [shown, ""]
    return parts


def duration(seconds: float | None) -> str:
    """Return a time span in at most six characters."""
    if seconds is None:
        return ""
    for limit, size, unit in ((1, 0.001, "ms"), (100, 1, "s"), (6000, 60, "min"), (360_000, 3600, "h")):
        if seconds < limit:
            number = seconds / size
            return f"{number:.1f} {unit}" if number < 10 and unit != "ms" else f"{number:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def _grid(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    return table


def _add(table: Table, *values: object) -> None:
    """Add a row; as Text, because names may hold what rich takes for markup."""
    table.add_row(*(Text("" if value is None else str(value)) for value in values))
