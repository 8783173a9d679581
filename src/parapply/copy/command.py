"""`parapply init --copy` and `parapply refresh`: the hand-over from a copy to the stream.

In: the configuration and options. Out: tables with the publisher's rows as of one LSN each, and a state that says so;
the daemon adds what comes later. Both may be interrupted anywhere and begun again: what is complete stays, the rest is
copied anew from a later snapshot.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import click
import msgspec

from parapply import probes
from parapply.copy import schema as schemas
from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.bar import Bar
from parapply.copy.load import Load
from parapply.copy.published import published_tables
from parapply.errors import SourceRefused, TargetRefused
from parapply.model import format_lsn
from parapply.runtime import operations
from parapply.source import refusals, slot
from parapply.target import copies, lease, settings, state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from parapply.config import Config
    from parapply.copy.published import PublishedTable
    from parapply.copy.snapshot import SourceSnapshot

#: Seconds between two looks whether the daemon knows of the copy, and after which people are told what is waited for.
_POLL_S = 0.02
_PATIENCE_S = 3.0
#: Tables named in one message.
_MOST_NAMES = 5


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to copy."""

    connections: int = 4  # on each side
    truncates: bool = False  # tables that hold rows
    defers_indexes: bool = False
    brings_schema: bool = False
    pg_dump: str | None = None
    tables: tuple[str, ...] = ()  # schema.table; of `refresh`: copy these, empty: those that are not copied


def init(config: Config, options: Options) -> None:
    """Make slot and state, and copy all published tables; go on with it if it was interrupted.

    Raises:
        SourceRefused, SourceLost: the publisher, its publications or the slot are not as they must be.
        TargetRefused, TargetLost: the same for the target; tables hold rows.
        LeaseHeld: another process copies.
    """
    asyncio.run(_init(config, options))


async def _init(config: Config, options: Options) -> None:
    name, schema = config.source.slot, config.target.state_schema
    program = schemas.find_pg_dump(options.pg_dump) if options.brings_schema else ""
    async with operations.open_ends(config, "init") as ends:
        facts = await slot.inspect(ends.source, name)
        refusals.check_server(facts)
        await slot.check_publications(ends.source, config.source.publications)
        await state.ensure_schema(ends.target, schema)
        found = await state.load(ends.target, schema, name, facts.system_identifier)
        if found is not None:
            await _go_on(config, options, ends, found)
            return
        if program:
            dsn = config.source.dsn.get_secret_value()
            size = await schemas.bring_over(program, dsn, ends.target, not_schema=schema)
            click.echo(f"target: schema made ({size:,} bytes of SQL)")
        tables = await published_tables(ends.source, config.source.publications)
        await on_target.check_columns(ends.target, tables)
        await _check_empty(ends.target, tables, options)
        if facts.slot is not None:
            # Its snapshot is gone; the state first says that nothing is copied, then it is as after an interruption.
            async with ends.target.transaction():
                adopted = await operations.adopt(config, ends)
                await copies.add(
                    ends.target, schema, adopted.slot_id, [table.full_name for table in tables], is_listed=True
                )
            await _copy_later(config, options, ends, adopted, tables)
        else:
            await _begin(config, options, ends, tables)
        click.echo("next: parapply run")


async def _begin(config: Config, options: Options, ends: operations.Ends, tables: Sequence[PublishedTable]) -> None:
    """Make the slot and copy from its own snapshot: the stream begins where the copy ends."""
    schema = config.target.state_schema
    dsn = config.source.dsn.get_secret_value()
    async with _patiently(_WAITS_FOR_TRANSACTIONS) as told, snapshots.exported(dsn, config.source.slot) as snapshot:
        told.cancel()
        probes.probe(probes.COPY_SLOT)
        names = [table.full_name for table in tables]
        # One transaction: a daemon that finds the state finds the tables under way, too.
        async with ends.target.transaction():
            made = await operations.adopt(config, ends)
            await lease.take_lease(ends.target, made.slot_id, 0, lock_class=copies.LOCK_CLASS)
            await copies.add(ends.target, schema, made.slot_id, names, is_listed=True)
            await copies.begin(ends.target, schema, made.slot_id, names, snapshot.lsn)
        probes.probe(probes.COPY_STATE)
        click.echo(f"slot {config.source.slot!r}: starts at {format_lsn(snapshot.lsn)}, where the copy ends")
        await _load(config, options, ends, made.slot_id, tables, snapshot)


async def _go_on(config: Config, options: Options, ends: operations.Ends, found: state.SlotState) -> None:
    """Copy what an interrupted copy has left."""
    name, schema = config.source.slot, config.target.state_schema
    known = await copies.load(ends.target, schema, found.slot_id)
    dsn = config.source.dsn.get_secret_value()
    position, two_phase = operations.known_position(found), config.source.two_phase
    await refusals.verify(ends.source, dsn, name, position, two_phase=two_phase)
    if not known.is_listed:
        raise TargetRefused(
            f"slot {name!r} was begun without a copy and is applied up to {format_lsn(found.lowest_lsn)}",
            hint="`parapply refresh --table` copies single tables; to copy all of them `parapply drop` first",
        )
    left = {row.name for row in known.tables if row.state != "copied"}
    if not left:
        click.echo(f"slot {name!r}: all {len(known.tables)} tables are copied; nothing to do")
        return
    published = await published_tables(ends.source, config.source.publications)
    tables = [table for table in published if table.full_name in left]
    click.echo(f"slot {name!r}: {len(known.tables) - len(left)} tables are copied, {len(left)} are left")
    await on_target.check_columns(ends.target, tables)
    untouched = {row.name for row in known.tables if row.state == "waiting"}
    await _check_empty(ends.target, [table for table in tables if table.full_name in untouched], options)
    unpublished = sorted(left - {table.full_name for table in tables})
    await copies.forget(ends.target, schema, found.slot_id, unpublished)
    await _copy_later(config, options, ends, found, tables)
    click.echo("next: parapply run")


def refresh(config: Config, options: Options) -> None:
    """Copy tables that were added to the publications, or single ones anew, and join them to the stream.

    The daemon may run meanwhile. It goes on with all other tables; it stands still when it meets a change of a table
    that is being copied and is later than the copy.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost, LeaseHeld: as `init`.
    """
    asyncio.run(_refresh(config, options))


async def _refresh(config: Config, options: Options) -> None:
    name, schema = config.source.slot, config.target.state_schema
    async with operations.open_ends(config, "refresh") as ends:
        facts = await slot.inspect(ends.source, name)
        await slot.check_publications(ends.source, config.source.publications)
        # An older state schema is refused here, and not when something is half done.
        await state.ensure_schema(ends.target, schema)
        found = await state.load(ends.target, schema, name, facts.system_identifier)
        if found is None:
            raise TargetRefused(f"the target knows nothing of slot {name!r}", hint="run `parapply init --copy`")
        if facts.slot is not None and facts.slot.is_two_phase:
            raise SourceRefused(
                f"slot {name!r} has two_phase: a transaction prepared before the copy and committed after it would be"
                " neither in the copy nor in the stream",
                hint="`parapply drop`, then `parapply init --copy`, during which two_phase is pending",
            )
        known = await copies.load(ends.target, schema, found.slot_id)
        published = await published_tables(ends.source, config.source.publications)
        tables = _chosen(options, known, published)
        gone = sorted({row.name for row in known.tables} - {table.full_name for table in published})
        if gone:
            await copies.forget(ends.target, schema, found.slot_id, gone)
            click.echo(f"no longer published, their rows stay: {_names([f'{one}.{two}' for one, two in gone])}")
        if not tables:
            click.echo("all published tables are copied; nothing to do")
            return
        await on_target.check_columns(ends.target, tables)
        interrupted = {row.name for row in known.tables if row.state == "copying"}
        await _check_empty(ends.target, [table for table in tables if table.full_name not in interrupted], options)
        names = [table.full_name for table in tables]
        await copies.add(ends.target, schema, found.slot_id, names, is_listed=known.is_listed)
        await _copy_later(config, options, ends, found, tables)


def _chosen(options: Options, known: copies.Copies, published: Sequence[PublishedTable]) -> list[PublishedTable]:
    """Return the tables to copy.

    Raises:
        SourceRefused: a named table is not published.
        TargetRefused: which tables are new cannot be known.
    """
    if options.tables:
        by_text = {table.text: table for table in published}
        if missing := [text for text in options.tables if text not in by_text]:
            raise SourceRefused(
                f"not published: {', '.join(missing)}",
                hint="ALTER PUBLICATION ... ADD TABLE first, and write schema.table",
            )
        return [by_text[text] for text in dict.fromkeys(options.tables)]
    if not known.is_listed:
        raise TargetRefused(
            "this slot was begun without a copy: which tables are new is not known",
            hint="name them with --table schema.table",
        )
    copied = {row.name for row in known.tables if row.state == "copied"}
    return [table for table in published if table.full_name not in copied]


async def _copy_later(
    config: Config,
    options: Options,
    ends: operations.Ends,
    found: state.SlotState,
    tables: Sequence[PublishedTable],
) -> None:
    """Copy from a snapshot of now, although the stream has begun before.

    First everybody who reads the stream must know that these tables are under way: the snapshot shows what is committed
    before it, so nothing may be left out of the stream any more that comes later.
    """
    schema, slot_id = config.target.state_schema, found.slot_id
    await lease.take_lease(ends.target, slot_id, 0, lock_class=copies.LOCK_CLASS)
    await lease.fence(ends.target, slot_id, lambda _: None, lock_class=copies.LOCK_CLASS)
    names = [table.full_name for table in tables]
    before_lsn, _ = await slot.position(ends.source)
    await copies.begin(ends.target, schema, slot_id, names, before_lsn)
    probes.probe(probes.COPY_STATE)
    async with _patiently("waiting for the daemon to take note of the copy"):
        while not await copies.is_seen(ends.target, schema, slot_id):  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(_POLL_S)
    dsn = config.source.dsn.get_secret_value()
    async with _patiently(_WAITS_FOR_TRANSACTIONS) as told, snapshots.exported(dsn, None) as snapshot:
        told.cancel()
        await copies.begin(ends.target, schema, slot_id, names, snapshot.lsn)
        click.echo(f"{len(tables)} tables join the stream at {format_lsn(snapshot.lsn)}")
        await _load(config, options, ends, slot_id, tables, snapshot)


async def _load(  # noqa: PLR0913, PLR0917  all that is known by now
    config: Config,
    options: Options,
    ends: operations.Ends,
    slot_id: int,
    tables: Sequence[PublishedTable],
    snapshot: SourceSnapshot,
) -> None:
    probes.probe(probes.COPY_BEGUN)
    with Bar() as bar:
        load = Load(
            config,
            slot_id,
            ends.target,
            connections=options.connections,
            defers_indexes=options.defers_indexes,
            watcher=bar,
        )
        await load.run(tables, snapshot)
    probes.probe(probes.COPY_DONE)
    click.echo(f"copied {len(tables)} tables: {bar.summary()}")


async def _check_empty(target: settings.Connection, tables: Sequence[PublishedTable], options: Options) -> None:
    if options.truncates:
        return
    full = await on_target.not_empty(target, tables)
    if full:
        raise TargetRefused(
            f"target: {_names([table.text for table in full])} hold rows already",
            hint="--truncate empties them before the copy",
        )


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


_WAITS_FOR_TRANSACTIONS = (
    "waiting until the transactions that run on the publisher have ended, prepared ones too: the snapshot needs it"
)


@asynccontextmanager
async def _patiently(text: str) -> AsyncIterator[asyncio.TimerHandle]:
    """Say what is waited for if it takes a while."""
    timer = asyncio.get_running_loop().call_later(_PATIENCE_S, click.echo, text)
    try:
        yield timer
    finally:
        timer.cancel()
