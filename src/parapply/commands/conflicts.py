"""`conflicts` and `skip`: read the history, apply a kept change, ask for a transaction to be skipped.

In: the configuration and filters. Out: lines or JSON on standard output. Each opens its own session on the target.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parapply import connect
from parapply.conflict import asking, listing, replay
from parapply.errors import SourceLost, SourceRefused, TargetRefused
from parapply.printable import printable
from parapply.source import slot
from parapply.target.session import settings
from parapply.target.state import cutovers
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from parapply.config import Config
    from parapply.config_mapping import MappingConfig
    from parapply.conflict.listing import Filter
    from parapply.target.session.settings import Connection


#: Columns of a key at most, and of a list that is never cut.
_KEY_COLUMNS = 40
_WIDE = 1000
#: A replay is committed now, as far as readers of the target know; see `stamp_sql`.
_STAMP = "SELECT pg_catalog.pg_replication_origin_xact_setup('0/0', pg_catalog.now())"


@asynccontextmanager
async def _opened(config: Config, command: str) -> AsyncIterator[tuple[Connection, int]]:
    """Open a session on the target and find the slot's state."""
    schema = config.target.state_schema
    async with await connect.open_target(config, command) as conn:
        await state.has_schema(conn, schema)  # refuses another version
        yield conn, await state.find_slot(conn, schema, config.source.slot)


async def list_conflicts(config: Config, wanted: Filter, *, as_json: bool) -> None:
    """Print conflicts without their rows; raise ConfigError if a filter cannot be read."""
    found = await _read(config, wanted)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not found:
        click.echo("no conflicts")
    else:
        _print(found, config.mapping)


def _print(found: list[dict[str, Any]], mapping: MappingConfig) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "recorded", "type", "table", "key", "policy", "outcome", "end LSN", "xid"):
        # All of it on one line, which the terminal wraps, so that copied text is whole; keys may be long.
        table.add_column(name, overflow="fold", max_width=_KEY_COLUMNS if name == "key" else None)
    for one in found:
        key = ", ".join(f"{name}={value}" for name, value in (one["key"] or {}).items())
        outcome = one["outcome"] + (", replayed" if one["replayed_at"] else "")
        shown = [one["conflict_id"], one["recorded_at"][:19], one["conflict_type"]]
        shown += [mapping.shown((one["schema_name"], one["table_name"])), key, one["policy"], outcome]
        # As Text: names and values may hold what rich takes for markup.
        table.add_row(*(Text(printable(str(value))) for value in (*shown, one["remote_lsn"], one["remote_xid"])))
    Console(width=_WIDE).print(table)


async def _read(config: Config, wanted: Filter, *, with_rows: bool = False) -> list[dict[str, Any]]:
    async with _opened(config, "conflicts") as (conn, slot_id):
        return await listing.read(conn, config.target.state_schema, slot_id, wanted, with_rows=with_rows)


async def show_conflicts(config: Config, wanted: Filter, *, as_json: bool) -> None:
    """Print conflicts with both rows.

    Raises:
        ConfigError: a filter cannot be read.
        TargetRefused: there are none; or as everywhere.
    """
    found = await _read(config, wanted, with_rows=True)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    _check_found(found, wanted)
    for one in found:
        click.echo("\n".join(map(printable, _described(one, config.mapping))))


def _described(one: dict[str, Any], mapping: MappingConfig) -> list[str]:
    table = mapping.shown((one["schema_name"], one["table_name"]))
    lines = [f"conflict {one['conflict_id']}: {one['conflict_type']} on {table}"]
    names = ("operation", "policy", "outcome", "attempts", "recorded_at", "replayed_at")
    lines += [f"  {name}: {one[name]}" for name in names]
    source = f"{one['remote_xid']}, change {one['change_no']}, committed {one['remote_commit_time']}"
    lines.append(f"  source transaction: {source}, end LSN {one['remote_lsn']}")
    if one["constraints"]:
        lines.append(f"  in the way by: {', '.join(one['constraints'])}")
    if one["local_commit_time"]:
        lines.append(
            f"  target's row written: {one['local_commit_time']} by {one['local_origin'] or 'a session there'}"
        )
    local = one["local_row"] if isinstance(one["local_row"], list) else [one["local_row"] or {}]
    remote = one["remote_row"] or {}
    key = one["key"] or {}
    lines.append("  column: target | publisher")
    for column in dict.fromkeys([*key, *remote, *(name for row in local for name in row)]):
        mine = ", ".join(json.dumps(row[column], ensure_ascii=False) for row in local if column in row) or "-"
        theirs = json.dumps(remote[column], ensure_ascii=False) if column in remote else "-"
        lines.append(f"    {column}{' (key)' if column in key else ''}: {mine} | {theirs}")
    return lines


def _check_found(found: list[dict[str, Any]], wanted: Filter) -> None:
    missing = sorted(set(wanted.ids) - {one["conflict_id"] for one in found})
    if missing or not found:
        names = ", ".join(map(str, missing)) or "of this filter"
        raise TargetRefused(f"no conflict {names} is kept", hint="see `parapply conflicts list`")


async def replay_conflicts(config: Config, wanted: Filter, *, is_dry: bool, assume_yes: bool, as_json: bool) -> None:
    """Show what applying kept changes would do, ask, and do it in one transaction.

    Raise ConfigError if a filter cannot be read; TargetRefused if one of them cannot be applied, and so none was.
    """
    schema = config.target.state_schema
    async with _opened(config, "conflicts") as (conn, slot_id):
        if not is_dry:
            await cutovers.check_may_write(conn, schema, slot_id, config.source.slot, until=cutovers.COPIES_STOP)
        found = await listing.read(conn, schema, slot_id, wanted, with_rows=True)
        _check_found(found, wanted)
        async with conn.transaction(force_rollback=True):
            effects = await replay.replay(conn, schema, found, config.mapping, config.target)
        if not as_json:
            for effect in effects:
                click.echo("\n".join(map(printable, replay.as_lines(effect))))
        if not is_dry:
            if not assume_yes:
                click.confirm(f"Apply {len(effects)} change{'s' if len(effects) > 1 else ''}?", abort=True)
            # As the workers write, because replayed changes came from the publisher and must not go back there. An
            # origin outlives the command, so it is not made for a replay that is only shown, or refused.
            tables = [config.mapping.target_of((one["schema_name"], one["table_name"])) for one in found]
            has_origin = await connect.carry_origin(config, conn, slot_id, "replay", "a replay", tables)
            stamps = has_origin and (await settings.target_settings(conn)).may_stamp
            async with conn.transaction():
                # The answer may have taken a while.
                await cutovers.hold_off(conn, schema)
                await cutovers.check_may_write(conn, schema, slot_id, config.source.slot, until=cutovers.COPIES_STOP)
                if stamps:
                    with settings.target_errors("setting the replay's commit time"):
                        await conn.execute(_STAMP)
                effects = await replay.replay(conn, schema, found, config.mapping, config.target)
        if as_json:
            click.echo(json.dumps([msgspec.structs.asdict(effect) for effect in effects], indent=2))
        else:
            n_applied = sum(effect.action != "nothing" for effect in effects)
            left = f", {len(effects) - n_applied} not" if n_applied < len(effects) else ""
            click.echo("nothing was changed (--dry-run)" if is_dry else f"{n_applied} applied{left}")


async def drop_conflicts(config: Config, wanted: Filter, *, assume_yes: bool, as_json: bool) -> None:
    """Drop conflicts from the history; asks first.

    Raises:
        ConfigError, TargetRefused, TargetLost: as `list_conflicts`.
    """
    schema = config.target.state_schema
    async with _opened(config, "conflicts") as (conn, slot_id):
        if not assume_yes:
            n_found = len(await listing.read(conn, schema, slot_id, wanted))
            click.confirm(f"Drop {n_found} conflicts from the history?", abort=True)
        n_dropped = await listing.drop(conn, schema, slot_id, wanted)
    click.echo(json.dumps({"dropped": n_dropped}) if as_json else f"{n_dropped} dropped")


async def skip(config: Config, lsn: int, wait_s: float, *, as_json: bool) -> None:
    """Ask for a transaction to be skipped and print the outcome of the request.

    Raises:
        TargetRefused: it has been applied, or no transaction can end there yet.
    """
    async with _opened(config, "skip") as (conn, slot_id):
        source_lsn = await _end_of_source(config)
        request = await asking.ask(conn, config.target.state_schema, slot_id, lsn, wait_s, source_lsn=source_lsn)
    click.echo(json.dumps(msgspec.structs.asdict(request)) if as_json else _told(request))


async def cancel_skip(config: Config, lsn: int, *, as_json: bool) -> None:
    """Take back a request that was not carried out."""
    async with _opened(config, "skip") as (conn, slot_id):
        was_open = await asking.take_back(conn, config.target.state_schema, slot_id, lsn)
    if as_json:
        click.echo(json.dumps({"cancelled": was_open}))
    else:
        click.echo("taken back" if was_open else "there is no open request for this transaction")


def _told(request: asking.SkipRequest) -> str:
    if request.outcome == "skipped":
        return f"skipped: transaction {request.remote_xid}; its {request.kept} changes are in `parapply conflicts list`"
    if request.outcome == "accepted":
        return "accepted: the daemon skips it when it comes"
    if request.outcome == "unanswered":
        return (
            "noted, not answered: the daemon may have sent the transaction's COMMIT, which may still succeed, and"
            " cannot skip it before that fails; `parapply status` says which session it waits for"
        )
    return "noted: no daemon runs; the next `parapply run` skips it"


async def _end_of_source(config: Config) -> int | None:
    """Return where the publisher's WAL ends; None if it is not named, or does not answer: a conflict may outlast it."""
    login = config.source.login
    if not login.dsn:
        return None
    try:
        async with await slot.connect(login, application_name=f"parapply skip {config.source.slot}") as conn:
            return (await slot.position(conn)).flush_lsn
    except (SourceLost, SourceRefused):
        return None
