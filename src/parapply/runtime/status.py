"""`parapply status`: one screen, or one JSON document, about a slot.

In: the configuration. Out: text. Reads both ends and writes to neither; works when the publisher is not reachable,
when no daemon runs, and for a role that may only read the state schema.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import click
import psycopg
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parapply.conflict import listing
from parapply.errors import ParapplyError, TargetRefused
from parapply.model import format_lsn, parse_lsn
from parapply.source import slot
from parapply.target import lease, settings, state
from parapply.target.state_schema import lsn_text

if TYPE_CHECKING:
    from psycopg import sql

    from parapply.config import Config

#: Seconds between two screens of --watch.
_REFRESH_S = 1.0

#: Seconds to wait for the publisher: somebody looks at the screen.
_SOURCE_TIMEOUT_S = 3

_PROGRESS = """
SELECT p.slot_name, p.lowest_remote_lsn, p.highest_remote_lsn, p.list_remote_lsn::text[] AS list_remote_lsn, p.in_doubt,
       p.confirmed_flush_lsn, p.lag_bytes, p.lag_s, p.commit_order, p.workers AS worker_count, p.state, p.reason,
       p.two_phase, p.updated_at::text AS updated_at,
       GREATEST(EXTRACT(epoch FROM pg_catalog.clock_timestamp() - p.updated_at), 0)::float8 AS silent_s,
       s.slot_id, s.system_identifier, s.timeline, s.database_name, s.publications, s.host, s.pid, s.version,
       s.started_at::text AS started_at, s.last_commit_time::text AS last_commit_time
  FROM {s}.progress AS p JOIN {s}.slots AS s USING (slot_name) WHERE p.slot_name = $1"""

_WORKERS = """
SELECT worker, pid, state, batch_seq, end_lsn, waits_for, since::text AS since, transactions, changes
  FROM {s}.workers WHERE slot_id = $1::int ORDER BY worker"""

_TABLES = """
SELECT schema_name, table_name, lane, is_table_exclusive, reason, key_columns, retries
  FROM {s}.tables WHERE slot_id = $1::int ORDER BY schema_name, table_name"""

_COPIES = """
SELECT schema_name, table_name, state, start_lsn::text AS start_lsn, rows, size_bytes, finished_at::text AS finished_at
  FROM {s}.copies WHERE slot_id = $1::int ORDER BY schema_name, table_name"""

_PREPARED = """
SELECT gid, source_xid, end_lsn::text AS end_lsn, owner, prepared_at::text AS prepared_at,
       EXTRACT(epoch FROM age)::float8 AS age_s
  FROM {s}.prepared WHERE slot_name = $1 ORDER BY prepared_at, gid"""


def show(config: Config, as_json: bool, watch: bool) -> None:  # noqa: FBT001  the command line passes them by position
    """Print the status once, or each second until Ctrl-C.

    Args:
        config: target and slot; the source is asked if source.dsn is set.
        as_json: a document a line with --watch, else one indented document; the keys are those of `collect`.
        watch: go on until interrupted.

    Raises:
        TargetRefused: the target knows nothing of the slot.
        TargetLost: the target cannot be reached.
    """
    asyncio.run(_watch(config, as_json=as_json) if watch else _once(config, as_json=as_json))


async def _once(config: Config, *, as_json: bool) -> None:
    report = await collect(config)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        Console().print(render(report))


async def _watch(config: Config, *, as_json: bool) -> None:
    if as_json:
        while True:
            started_s = time.monotonic()
            click.echo(json.dumps(await collect(config)))
            await asyncio.sleep(max(0.0, started_s + _REFRESH_S - time.monotonic()))
    with Live(render(await collect(config)), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(_REFRESH_S)
            live.update(render(await collect(config)), refresh=True)


async def collect(config: Config) -> dict[str, Any]:
    """Read both ends.

    Returns:
        A JSON document. Keys: the columns of `parapply.progress` (LSNs and times as text; `worker_count` for its
        `workers`), `is_daemon_connected`, `silent_s` (seconds since the state was last written), the daemon's
        `host`, `pid`, `version`, `started_at`; `workers`, `tables`, `copies`, lists with the columns of those tables;
        `prepared`, a list with those of `parapply.prepared` (`age_s`, seconds, for its `age`);
        `conflicts`, a list of how many are kept by `type`, `table` and `outcome`, with the `latest`;
        `source`, an object whose `is_reachable` tells whether the other keys are there.

    Raises:
        TargetRefused: the target knows nothing of the slot.
        TargetLost: the target cannot be reached.
    """
    name, schema = config.source.slot, config.target.state_schema
    conn = await settings.connect_reader(config.target.dsn.get_secret_value(), f"parapply status {name}")
    async with conn:
        with settings.target_errors("reading the status"):
            found = await _records(conn, state.in_schema(_PROGRESS, schema), [name])
            if not found:
                raise TargetRefused(f"the target knows nothing of slot {name!r}", hint="run `parapply init`")
            report = found[0]
            slot_id = report.pop("slot_id")
            report["workers"] = await _records(conn, state.in_schema(_WORKERS, schema), [slot_id])
            report["tables"] = await _records(conn, state.in_schema(_TABLES, schema), [slot_id])
            report["copies"] = await _records(conn, state.in_schema(_COPIES, schema), [slot_id])
            report["prepared"] = await _records(conn, state.in_schema(_PREPARED, schema), [name])
        report["conflicts"] = await listing.count(conn, schema, slot_id)
        present = await lease.holders(conn, slot_id)
    report["is_daemon_connected"] = any(holder.is_leader for holder in present)
    report["source"] = await _collect_source(config, parse_lsn(report["lowest_remote_lsn"]))
    if "lag_bytes" in report["source"]:
        report["lag_bytes"] = report["source"]["lag_bytes"]
    return report


async def _records(conn: settings.Connection, query: sql.Composed, params: list[object]) -> list[dict[str, Any]]:
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(query, params)
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]


async def _collect_source(config: Config, lowest_lsn: int) -> dict[str, Any]:
    dsn = config.source.dsn.get_secret_value()
    if not dsn:
        return {"is_reachable": False, "error": "source.dsn is not set"}
    try:
        name = f"parapply status {config.source.slot}"
        conn = await slot.connect(dsn, application_name=name, connect_timeout_s=_SOURCE_TIMEOUT_S)
        async with conn:
            facts = await slot.inspect(conn, config.source.slot)
    except ParapplyError as error:
        # Not raised: that the publisher is down is one of the things a status is asked for.
        return {"is_reachable": False, "error": error.line()}
    found = facts.slot
    return {
        "is_reachable": True,
        "system_identifier": facts.system_identifier,
        "timeline": facts.timeline,
        "flush_lsn": format_lsn(facts.flush_lsn),
        "lag_bytes": max(0, facts.flush_lsn - lowest_lsn),
        "slot_exists": found is not None,
        "slot_active_pid": found.active_pid if found else None,
        "slot_wal_status": found.wal_status if found else None,
        "slot_invalidation_reason": found.invalidation_reason if found else None,
        "slot_confirmed_flush_lsn": lsn_text(found.confirmed_flush_lsn) if found else None,
    }


def render(report: dict[str, Any]) -> Group:
    """Lay a report of `collect` out as one screen."""
    parts = [_facts(report)]
    if report["workers"]:
        keys = ("worker", "state", "end_lsn", "waits_for", "since", "transactions", "changes")
        parts.append(_grid(*(key.replace("_", " ") for key in keys)))
        for worker in report["workers"]:
            # The time of day is enough: a worker does nothing for days.
            shown = {**worker, "since": (worker["since"] or "")[11:19]}
            _add(parts[-1], *(shown[key] for key in keys))
    if report["prepared"]:
        parts.append(_grid("prepared transaction", "source xid", "end lsn", "owner", "age"))
        for held in report["prepared"]:
            age = f"{held['age_s']:,.0f} s"
            _add(parts[-1], held["gid"], held["source_xid"], held["end_lsn"], held["owner"], age)
    if report["tables"]:
        parts.append(_grid("table", "lane", "one batch at a time", "reason", "retries"))
        for table in report["tables"]:
            name = f"{table['schema_name']}.{table['table_name']}"
            alone = "yes" if table["is_table_exclusive"] else "no"
            _add(parts[-1], name, table["lane"], alone, table["reason"], table["retries"])
    return Group(*parts, *_seldom(report))


def _seldom(report: dict[str, Any]) -> list[Table]:
    """Return what is there at times only: tables not copied yet, conflicts."""
    parts = []
    if left := [copy for copy in report["copies"] if copy["state"] != "copied"]:
        parts.append(_grid("not copied yet", "state", "as of"))
        for copy in left:
            _add(parts[-1], f"{copy['schema_name']}.{copy['table_name']}", copy["state"], copy["start_lsn"])
    if report["conflicts"]:
        parts.append(_grid("conflicts kept", "type", "outcome", "latest", "count"))
        for one in report["conflicts"]:
            _add(parts[-1], one["table"], one["type"], one["outcome"], one["latest"][:19], one["count"])
    return parts


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
    _add(grid, "commit order", f"{report['commit_order']}, {report['worker_count']} workers")
    _add(grid, "two-phase", report["two_phase"])
    return grid


def _daemon_line(report: dict[str, Any]) -> str:
    if report["is_daemon_connected"]:
        return f"pid {report['pid']} on {report['host']}, version {report['version']}, since {report['started_at']}"
    return f"none runs; nothing was updated since {report['updated_at']} ({report['silent_s']:.0f} s)"


def _source_line(source: dict[str, Any]) -> str:
    if not source["is_reachable"]:
        return f"not reachable: {source['error']}"
    if not source["slot_exists"]:
        return "reachable, but the slot is not there"
    lost = source["slot_invalidation_reason"] or source["slot_wal_status"] == "lost"
    reader = f"read by process {source['slot_active_pid']}" if source["slot_active_pid"] else "nobody reads the slot"
    return f"at {source['flush_lsn']}, " + ("the slot is INVALIDATED" if lost else reader)


def _grid(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    return table


def _add(table: Table, *values: object) -> None:
    """Add a row; as Text, because names may hold what rich takes for markup."""
    table.add_row(*(Text("" if value is None else str(value)) for value in values))
