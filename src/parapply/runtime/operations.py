"""The commands around the daemon: `init`, `drop` and `wait`.

In: the configuration. Out: lines on standard output for people; failures are ours, with their exit code.
Each one opens its own sessions, does its work, and closes them; none needs a running daemon but `wait`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import click
import msgspec
from psycopg import sql

from parapply.errors import ParapplyError, SlotBusy, SourceRefused, TargetRefused
from parapply.model import format_lsn, parse_lsn
from parapply.source import refusals, slot
from parapply.target import lease, origins, prepared, settings, state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from parapply.config import Config

#: Seconds between two looks at the progress: the first ones soon, for a read that follows its own write.
_POLL_MIN_S = 0.02
_POLL_MAX_S = 0.2


class Ends(msgspec.Struct, frozen=True):
    """A session on both ends."""

    source: slot.Connection
    target: settings.Connection


@asynccontextmanager
async def open_ends(config: Config, command: str) -> AsyncIterator[Ends]:
    """Open a plain session on the publisher and a control session on the target.

    Raises:
        SourceLost, SourceRefused, TargetLost, TargetRefused: as `source.slot.connect`, `settings.connect_control`.
    """
    name = f"parapply {command} {config.source.slot}"
    source = await slot.connect(config.source.dsn.get_secret_value(), application_name=name)
    async with source:
        target = await open_target(config, command)
        async with target:
            yield Ends(source, target)


async def open_target(config: Config, command: str) -> settings.Connection:
    """Open a control session on the target.

    Raises:
        TargetLost, TargetRefused: as `settings.connect_control`.
    """
    return await settings.connect_control(
        config.target.dsn.get_secret_value(),
        role=config.target.session_replication_role,
        application_name=f"parapply {command} {config.source.slot}",
    )


def known_position(found: state.SlotState | None) -> refusals.KnownPosition | None:
    """Return what the slot check needs of the target's state."""
    if found is None:
        return None
    return refusals.KnownPosition(
        system_identifier=found.system_identifier, timeline=found.timeline, lowest_lsn=found.lowest_lsn
    )


def init(config: Config) -> None:
    """Check both ends, create the slot and the state, and say what was done.

    Doing it again changes nothing and says so. A slot that exists while the target knows nothing of it is adopted.

    Raises:
        SourceRefused, SourceLost: the publisher, its publications or the slot are not as they must be.
        TargetRefused, TargetLost: the same for the target.
    """
    asyncio.run(_init(config))


async def _init(config: Config) -> None:
    schema, name = config.target.state_schema, config.source.slot
    async with open_ends(config, "init") as ends:
        facts = await slot.inspect(ends.source, name)
        refusals.check_server(facts)
        await slot.check_publications(ends.source, config.source.publications)
        click.echo(f"source: database {facts.database!r}, system identifier {facts.system_identifier}: fine")
        if config.source.two_phase:
            await prepared.check_possible(ends.target)
        await state.ensure_schema(ends.target, schema)
        found = await state.load(ends.target, schema, name, facts.system_identifier)
        click.echo(f"target: state schema {schema!r}: fine")
        await _warn_of_missing_tables(config, ends)
        if found:
            dsn, two_phase = config.source.dsn.get_secret_value(), config.source.two_phase
            await refusals.verify(ends.source, dsn, name, known_position(found), two_phase=two_phase)
            click.echo(f"slot {name!r}: exists and is applied up to {format_lsn(found.lowest_lsn)}; nothing to do")
            return
        if facts.slot is None:
            # The slot first: if this ends in between, the next init adopts it. State first would name a lost slot.
            await slot.create_slot(ends.source, name, two_phase=config.source.two_phase)
        adopted = await adopt(config, ends)
        click.echo(f"slot {name!r}: starts at {format_lsn(adopted.lowest_lsn)}; rows from before are not copied")
        click.echo("next: parapply run")


async def adopt(config: Config, ends: Ends) -> state.SlotState:
    """Write the state of a slot that the target knows nothing of, from the slot's own position.

    Raises:
        SourceRefused: the slot cannot be read.
        TargetRefused, TargetLost: the state could not be written.
    """
    name, schema = config.source.slot, config.target.state_schema
    facts = await slot.inspect(ends.source, name)
    refusals.check_slot(facts, name, None, two_phase=config.source.two_phase)
    start_lsn = (facts.slot.confirmed_flush_lsn if facts.slot else None) or 0
    new = state.NewSlot(
        slot_name=name,
        system_identifier=facts.system_identifier,
        timeline=facts.timeline,
        database_name=facts.database,
        publications=tuple(config.source.publications),
        lowest_lsn=start_lsn,
        commit_order=config.apply.commit_order,
        workers=config.apply.workers,
    )
    await state.create(ends.target, schema, new)
    found = await state.load(ends.target, schema, name, facts.system_identifier)
    if found is None:
        raise TargetRefused(f"the state of slot {name!r} vanished while it was made", hint="run one init at a time")
    return found


async def _warn_of_missing_tables(config: Config, ends: Ends) -> None:
    published = await slot.published_tables(ends.source, config.source.publications)
    for schema in sorted({schema for schema, table in published if table == "schema_version"}):
        if {(schema, "slots"), (schema, "applied"), (schema, "schema_version")} <= set(published):
            click.echo(
                f"source: schema {schema} is the state of a parapply that applies there, and is published: publish the"
                " other tables or schemas by name (docs/CONFLICTS.md, two-way replication)"
            )
    query = sql.SQL(
        "SELECT w.schema_name, w.table_name FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)"
        " WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n"
        " ON n.oid = c.relnamespace WHERE n.nspname = w.schema_name AND c.relname = w.table_name"
        " AND c.relkind IN ('r', 'p')) ORDER BY 1, 2"
    )
    with settings.target_errors("looking for the published tables"):
        missing = await settings.rows(
            ends.target, query, [[schema for schema, _ in published], [table for _, table in published]]
        )
    for schema, table in missing:
        click.echo(f"target: table {schema}.{table} is published but missing here: create it before `parapply run`")


def drop(config: Config, assume_yes: bool) -> None:  # noqa: FBT001  the command line passes it by position
    """Remove the slot and its state, and the state schema when no slot is left in it; asks first.

    Raises:
        SlotBusy: a process reads the slot.
        LeaseHeld: a daemon runs.
        SourceRefused, SourceLost, TargetRefused, TargetLost: an end is not there or refuses.
    """
    asyncio.run(_drop(config, assume_yes=assume_yes))


async def _drop(config: Config, *, assume_yes: bool) -> None:
    schema, name = config.target.state_schema, config.source.slot
    async with open_ends(config, "drop") as ends:
        facts = await slot.inspect(ends.source, name)
        found = None
        if await state.has_schema(ends.target, schema):
            found = await state.load(ends.target, schema, name, facts.system_identifier)
        if facts.slot is None and found is None:
            click.echo(f"slot {name!r}: neither slot nor state; nothing to do")
            return
        _check_own_and_idle(config, facts)
        if not assume_yes:
            at = f" (applied up to {format_lsn(found.lowest_lsn)})" if found else ""
            click.confirm(f"Drop slot {name!r}{at} on the source and its state on the target?", abort=True)
        if found:
            # A daemon that still runs would go on applying without a record.
            await lease.take_lease(ends.target, found.slot_id, 0)
            # Nor may a session of one that was killed prepare anything from now on.
            await lease.fence(ends.target, found.slot_id, _say_whom_drop_waits_for)
        if facts.slot is not None:
            await slot.drop_slot(ends.source, name)
            click.echo(f"source: slot {name!r} dropped")
        if found:
            # Nobody would ever end them: they hold locks and keep vacuum from its work (F34).
            held = [gid for gid, _ in (await prepared.pending(ends.target, found.slot_id)).values()]
            await prepared.roll_back(ends.target, held)
            if held:
                click.echo(f"target: {len(held)} prepared transactions rolled back")
            await state.drop_slot_state(ends.target, schema, found.slot_id)
            if left := await origins.drop_origins(ends.target, found.slot_id):
                click.echo(f"target: replication origins of the slot are left: {left}")
            click.echo(f"target: state of slot {name!r} removed")
            if await state.drop_schema(ends.target, schema):
                click.echo(f"target: state schema {schema!r} dropped, no slot was left in it")


def _say_whom_drop_waits_for(sessions: Sequence[lease.Holder]) -> None:
    click.echo(f"target: waiting for the end of {', '.join(map(str, sessions))}")


def _check_own_and_idle(config: Config, facts: slot.SourceFacts) -> None:
    found = facts.slot
    if found is None:
        return
    if found.plugin != "pgoutput" or found.database != facts.database:
        raise SourceRefused(
            f"slot {found.name!r} is not one of parapply's: plugin {found.plugin}, database {found.database!r}",
            hint="correct source.slot or source.dsn; drop a foreign slot with pg_drop_replication_slot",
        )
    if found.active_pid is not None:
        raise SlotBusy(
            f"slot {config.source.slot!r} is in use by process {found.active_pid} on the publisher",
            hint="stop the daemon first",
        )


def wait(config: Config, lsn: int, timeout_s: float) -> None:
    """Return as soon as the target shows everything that ends at `lsn` or before: read-your-writes.

    Rows and their record commit together, so what the progress shows is visible.

    Args:
        config: only the target and the slot's name are used.
        lsn: of the publisher, for example pg_current_wal_insert_lsn() after the write.
        timeout_s: how long to wait; 0 looks once.

    Raises:
        ParapplyError: not there in time; exit code 1.
        TargetRefused: the target knows nothing of the slot.
        TargetLost: the connection broke.
    """
    asyncio.run(_wait(config, lsn, timeout_s))


async def _wait(config: Config, lsn: int, timeout_s: float) -> None:
    schema, name = config.target.state_schema, config.source.slot
    query = state.in_schema(
        "SELECT lowest_remote_lsn, state, updated_at::text FROM {s}.progress WHERE slot_name = $1", schema
    )
    deadline_s = time.monotonic() + timeout_s
    delay_s = _POLL_MIN_S
    # A plain session: a reader needs neither the replica role nor a primary.
    async with await settings.connect_reader(config.target.dsn.get_secret_value(), f"parapply wait {name}") as conn:
        while True:
            with settings.target_errors("reading the progress"):
                found = await settings.rows(conn, query, [name])
            if not found:
                raise TargetRefused(f"the target knows nothing of slot {name!r}", hint="run `parapply init`")
            lowest, daemon_state, updated_at = found[0]
            if parse_lsn(lowest) >= lsn:
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ParapplyError(
                    f"not there after {timeout_s:g} s: {format_lsn(lsn)} is wanted, the target shows {lowest} "
                    f"(daemon {daemon_state}, last heard of {updated_at})",
                    hint="see `parapply status`",
                )
            await asyncio.sleep(min(delay_s, left_s))
            delay_s = min(delay_s * 2, _POLL_MAX_S)
