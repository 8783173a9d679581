"""`parapply status`: one screen, or JSON, about a slot; once or each second.

In: what `state_reader.py` has read. Out: text that fits 80 columns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parapply.amounts import brief
from parapply.commands.state_reader import StateReader, collect, is_between_tries, is_present, is_silent, stranger
from parapply.errors import ParapplyError
from parapply.printable import printable_tree
from parapply.terminal import is_hung_up
from parapply.vocabulary import SCHEMA_ONLY, CopyState, WorkerState
from parapply.wording import cutover_line, how_far, step_state

if TYPE_CHECKING:
    from rich.console import RenderableType

    from parapply.config import Config

#: Tables shown where lines have no limit: the ones with the most rows. `--json` has all.
_MOST_TABLES = 1000
#: Seconds between two looks of --watch.
_REFRESH_S = 1.0


def show(config: Config, as_json: bool, watch: bool) -> None:  # noqa: FBT001  the command line passes them by position
    """Print the status once, or each second until Ctrl-C.

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
    # The terminal that is written to is asked before it goes, because later it no longer says so.
    terminals = [sys.stdout.fileno()] if sys.stdout.isatty() else []
    async with StateReader(config) as reader:
        report = await reader.read()
        if as_json:
            await _print_lines(reader, report, terminals)
            return
        with Live(screen=True, auto_refresh=False) as live:
            size = live.console.size
            live.update(render(report, size.width, size.height), refresh=True)
            while not is_hung_up(terminals):
                await asyncio.sleep(_REFRESH_S)
                size, notice = live.console.size, ""
                try:
                    report = await reader.read()
                except ParapplyError as error:
                    # The last reading stays below, because nothing later is known.
                    notice = error.line()
                live.update(render(report, size.width, size.height, notice), refresh=True)


async def _print_lines(reader: StateReader, report: dict[str, Any], terminals: list[int]) -> None:
    while not is_hung_up(terminals):
        started_s = time.monotonic()
        click.echo(json.dumps(report))
        await asyncio.sleep(max(0.0, started_s + _REFRESH_S - time.monotonic()))
        report = await reader.read()


def render(report: dict[str, Any], width: int = 80, height: int = 0, notice: str = "") -> Group:
    """Lay a report of `StateReader.read` out as one screen, below a notice that must be seen first.

    A height leaves out workers, tables and reasons that do not fit, and only with one do the columns matter; 0: none is
    left out, up to a thousand tables.
    """
    report = printable_tree(report)
    head: list[RenderableType] = [Text(notice, style="bold red")] if notice else []
    if report["state"] is None:
        # A migration has not made it yet.
        return Group(*head, Text(f"slot {report['slot_name']} is not made yet"), "", *_migration(report))
    head += [_facts(report, with_evidence=not height), "", *_migration(report)]
    for end, found in (("source", report["source"].get("blocked", ())), ("target", report["blocked"])):
        head += [Text(f"{end}: {one['line']}", style="bold") for one in found]
    if report["prepared"]:
        held = _grid("prepared here, source xid", "end lsn", "owner", "age")
        for one in report["prepared"]:
            _add(held, one["source_xid"], one["end_lsn"], one["owner"], f"{one['age_s']:,.0f} s")
        head += [held, ""]
    head += _seldom(report)
    workers, tables = report["workers"], report["tables"]
    if not height:
        return Group(*head, *_body(workers, tables, len(workers), min(len(tables), _MOST_TABLES)), *_reasons(tables))
    n_head = len(Console(width=width).render_lines(Group(*head), pad=False))
    body = _body(workers, tables, *_shares(len(workers), len(tables), height - n_head))
    for part in body:
        if isinstance(part, Table):
            # A line each, or they could not be counted.
            for column in part.columns:
                column.no_wrap, column.overflow = True, "ellipsis"
    return Group(*head, *body)


def _shares(n_workers: int, n_tables: int, room: int) -> tuple[int, int]:
    """Return how many workers and tables to show on some lines, the longer list cut first, and one of each at least.

    Each list needs a line for its heading, and one more to say that it is cut; a blank line is between the two.
    """
    shown_workers, shown_tables = n_workers, n_tables

    def n_lines() -> int:
        cut = (shown_workers < n_workers) + (shown_tables < n_tables)
        return shown_workers + shown_tables + cut + 3

    while n_lines() > room and max(shown_workers, shown_tables) > 1:
        if shown_workers > shown_tables:
            shown_workers -= 1
        else:
            shown_tables -= 1
    return shown_workers, shown_tables


def _body(
    workers: list[dict[str, Any]], tables: list[dict[str, Any]], n_workers: int, n_tables: int
) -> list[RenderableType]:
    """Return some of the workers, those with work first, and some of the tables, those with the most rows first."""
    parts: list[RenderableType] = []
    if workers:
        busiest = sorted(workers, key=lambda one: one["state"] == WorkerState.IDLE)[:n_workers]
        shown = sorted(busiest, key=lambda one: one["worker"])
        parts += [_workers(shown), *_more(len(workers) - n_workers), ""]
    if tables:
        largest = {id(one) for one in sorted(tables, key=_n_rows, reverse=True)[:n_tables]}
        parts += [_tables([one for one in tables if id(one) in largest]), *_more(len(tables) - n_tables)]
    return parts


def _more(n: int) -> list[RenderableType]:
    return [Text(f"and {n} more", style="dim")] if n > 0 else []


def _n_rows(table: dict[str, Any]) -> int:
    return int(table["inserts"] + table["updates"] + table["deletes"])


def _facts(report: dict[str, Any], *, with_evidence: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    reason = f" ({report['reason']})" if report["reason"] else ""
    _add(grid, "slot", f"{report['slot_name']} from database {report['database_name']}")
    _add(grid, "state", f"{report['state']}{reason}")
    _add(grid, "daemon", _daemon_line(report))
    _add(grid, "source", "; ".join(filter(None, (stranger(report), _source_line(report["source"])))))
    _add(grid, "complete up to", f"{report['lowest_remote_lsn']}, newest {report['highest_remote_lsn']}")
    _add(grid, "confirmed", report["confirmed_flush_lsn"] or "nothing yet")
    lag_bytes = "unknown" if report["lag_bytes"] is None else f"{report['lag_bytes']:,} bytes of WAL"
    _add(grid, "lag", f"{lag_bytes}, {_lag(report)}")
    if report["reading"]:
        _add(grid, "reads", report["reading"])
    if retained := _retained(report["source"]):
        _add(grid, "WAL kept", retained)
    if report["cutover"]:
        _add(grid, "cut-over", cutover_line(report["cutover"]))
    two_phase = "" if report["two_phase"] == "disabled" else f", two-phase {report['two_phase']}"
    _add(grid, "commit order", f"{report['commit_order']}, {_worker_count(report)} workers{two_phase}")
    if limits := report["limits"]:
        _add(grid, "what limits", limits["words"])
        _add(grid, "what to do", limits["advice"])
        if with_evidence:
            _add(grid, "because", " ".join(limits["evidence"]))
    return grid


def line(report: dict[str, Any]) -> str:
    """Return a slot's state in one line."""
    if report["state"] is None:
        return "a migration has not made the slot yet"
    reason = f": {report['reason']}" if report["reason"] else ""
    state, silent = report["state"], f", nothing heard for {brief(report['silent_s'])}" if is_silent(report) else ""
    if not (report["is_daemon_connected"] or is_between_tries(report)):
        state, silent = f"no daemon runs ({state})", ""
    wrong = f", the source is {why}" if (why := stranger(report)) else ""
    return f"{state}{silent}, {_lag(report)} behind{wrong}{reason}"


def _worker_count(report: dict[str, Any]) -> str:
    """Return the number of workers, and the most that there may be where that is more."""
    here, most = len(report["workers"]), report["worker_count"]
    return f"{here} of up to {most}" if 0 < here < most else f"{most}"


def _lag(report: dict[str, Any]) -> str:
    if report["lag_s"] is None:
        return "age unknown"
    if not report["lag_s"] or is_present(report):
        return f"{report['lag_s']:.1f} s"
    return f"at most {brief(report['lag_s'])}"


def _retained(source: dict[str, Any]) -> str:
    """Report how much WAL the publisher keeps for the slot, and how much it may add before the slot is lost."""
    if source.get("slot_retained_wal_bytes") is None:
        return ""
    safe_bytes = source["slot_safe_wal_bytes"]
    limit = "" if safe_bytes is None else f"; {max(0, safe_bytes):,} more may be written before the slot can be lost"
    kept_bytes, allowed_bytes = source["slot_retained_wal_bytes"], source["slot_retained_wal_limit_bytes"]
    if allowed_bytes is not None and kept_bytes > allowed_bytes:
        limit += f"; MORE than source.retained_wal_limit_bytes, {allowed_bytes:,}"
    return f"{kept_bytes:,} bytes, {source['slot_wal_status']}{limit}"


def _daemon_line(report: dict[str, Any]) -> str:
    if report["is_daemon_connected"]:
        if report["started_at"] is None:
            # Its first start: the lease comes before everything else, and `drop` also holds it.
            return "one holds the lease, and has not shown itself yet"
        since = report["started_at"][:19]
        silent = f"; nothing heard for {brief(report['silent_s'])}" if is_silent(report) else ""
        return f"pid {report['pid']} on {report['host']}, version {report['version']}, since {since} UTC{silent}"
    if is_between_tries(report):
        return (
            f"{report['state']}, pid {report['pid']} on {report['host']}; last heard of {report['silent_s']:,.0f} s ago"
        )
    return f"none runs; nothing was updated since {report['updated_at'][:19]} UTC ({report['silent_s']:,.0f} s)"


def _source_line(source: dict[str, Any]) -> str:
    if not source["is_reachable"]:
        return f"not reachable: {source['error']}"
    if not source["slot_exists"]:
        return "reachable, but the slot is not there"
    why_lost = source["slot_invalidation_reason"] or ("wal_removed" if source["slot_wal_status"] == "lost" else "")
    reader = (
        f"read by process {source['slot_active_pid']}" if source["slot_active_pid"] else "no process reads the slot"
    )
    return f"at {source['flush_lsn']}, " + (f"the slot is INVALIDATED: {why_lost}" if why_lost else reader)


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = _grid("worker", "state", "for", "end lsn", "changes", "waits for")
    for column in (2, 4):
        table.columns[column].justify = "right"
    for one in workers:
        changes = f"{one['changes']:,}"
        _add(table, one["worker"], one["state"], brief(one["since_s"]), one["end_lsn"], changes, one["waits_for"])
    return table


def _tables(tables: list[dict[str, Any]]) -> Table:
    shown = _grid("table", "lane", "rows", "waits", "retries")
    for column in (2, 3, 4):
        shown.columns[column].justify = "right"
    for one in tables:
        lane = one["lane"] + (", one batch at a time" if one["is_table_exclusive"] else "")
        figures = (f"{n:,}" for n in (_n_rows(one), one["waits"], one["retries"]))
        _add(shown, f"{one['schema_name']}.{one['table_name']}", lane, *figures)
    return shown


def _reasons(tables: list[dict[str, Any]]) -> list[RenderableType]:
    """Return why tables are not applied in the best way, a line each."""
    telling = [one for one in tables if one["reason"] and not _is_plain(one)]
    parts: list[RenderableType] = ["", Text("why", style="bold")] if telling else []
    for one in telling[:_MOST_TABLES]:
        reason = f"{one['schema_name']}.{one['table_name']}: {one['reason']}"
        parts.append(Padding(Text(reason), (0, 0, 0, 2)))
    return parts + _more(len(telling) - _MOST_TABLES)


def _is_plain(table: dict[str, Any]) -> bool:
    """Return whether a table is applied in the best way, so that no reason needs to be shown."""
    starts = table["reason"].startswith("set-based by key") and ";" not in table["reason"]
    return starts and not table["is_table_exclusive"]


def _seldom(report: dict[str, Any]) -> list[RenderableType]:
    """Return parts that only appear at times: tables not copied yet, conflicts."""
    parts: list[RenderableType] = []
    if empty := [copy for copy in report["copies"] if copy["reason"] == SCHEMA_ONLY]:
        names = ", ".join([f"{copy['schema_name']}.{copy['table_name']}" for copy in empty])
        parts += [Text(f"schema only, so their rows are left out: {len(empty):,} tables: {names}"), Text("")]
    if left := [copy for copy in report["copies"] if copy["state"] != CopyState.COPIED and copy not in empty]:
        shown = _grid("not applied yet", "state", "as of", "rows so far", "because")
        shown.columns[3].justify = "right"
        for copy in left:
            name = f"{copy['schema_name']}.{copy['table_name']}"
            so_far = "" if copy["rows"] is None else f"{copy['rows']:,}, {copy['size_bytes'] / 1e6:,.1f} MB"
            _add(shown, name, copy["state"], copy["start_lsn"], so_far, copy["reason"])
        parts += [shown, ""]
    if report["ddl"]:
        shown = _grid("commands of the publisher", "number", "at", "what became of it")
        for one in report["ddl"]:
            became = f"{one['outcome'].replace('_', ' ')}{': ' if one['reason'] else ''}{one['reason']}"
            _add(shown, one["tag"], one["number"], one["recorded_at"][:19], became)
        parts += [shown, ""]
    if report["conflicts"]:
        shown = _grid("conflicts kept", "type", "outcome", "latest", "count")
        for one in report["conflicts"]:
            _add(shown, one["table"], one["type"], one["outcome"], one["latest"][:19], one["count"])
        parts += [shown, ""]
    return parts


def _migration(report: dict[str, Any]) -> list[RenderableType]:
    """Return the steps of a migration that are not done, with the names of those that are; nothing once all are."""
    left = [one for one in report["migration"] if one["state"] != "done"]
    if not left:
        return []
    shown = _grid("migration", "state", "for", "how far", "left")
    for one in left:
        _add(shown, one["step"], step_state(one), brief(one["seconds"]), how_far(one), brief(one["left_s"]))
    done = ", ".join([one["step"] for one in report["migration"] if one["state"] == "done"])
    return [shown, *([Text(f"done: {done}", style="dim")] if done else []), ""]


def _grid(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    return table


def _add(table: Table, *values: object) -> None:
    """Add a row; as Text, because names may hold what rich takes for markup."""
    table.add_row(*(Text("" if value is None else str(value)) for value in values))
