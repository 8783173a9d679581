"""A snapshot of the publisher at a known LSN, and sessions that read it.

The snapshot is exported by the command that makes a slot. It shows exactly the transactions whose commit record lies
before the slot's consistent point. A snapshot that an ordinary session exports could not be placed in the stream:
transactions become visible in another order than their commit records have. A permanent slot is the one that is read
afterwards; a temporary one is made for the snapshot only.

Making a slot waits until every transaction has ended that runs on the publisher, prepared ones too: PostgreSQL's rule.

Source: PostgreSQL manual, "CREATE_REPLICATION_SLOT", "SET TRANSACTION"; `snapbuild.c`, SnapBuildExportSnapshot.
"""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import click
import msgspec
from psycopg import sql

from parapply.copy.published import published_tables
from parapply.errors import SourceRefused
from parapply.model import parse_lsn
from parapply.source import ddl_queue, publishing, slot
from parapply.source.options import check_slot_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from parapply.config import Config
    from parapply.copy.published import PublishedTable
    from parapply.login import Login
    from parapply.wire.ddl_queue import CommandName
#: Microseconds since 2000-01-01 UTC.
_NOW: Final = "SELECT ((EXTRACT(epoch FROM pg_catalog.clock_timestamp()) - 946684800) * 1000000)::bigint"
IS_LEFT: Final = "tables that are complete stay, and the same command goes on with the others"


class SourceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that was exported and can be imported now."""

    lsn: int  # shows every transaction whose commit record lies before it, and no other
    name: str  # for SET TRANSACTION SNAPSHOT
    slot_name: str  # that was made for it
    time_us: int  # on the publisher's clock, since 2000-01-01 UTC; what the snapshot does not show was committed later


def tell_what_is_awaited(conn: slot.Connection) -> None:
    """Report the event that a slot on a standby waits for, because only a person can bring it about."""
    if conn.info.parameter_status("in_hot_standby") == "on":
        click.echo(
            "source: this is a standby, and makes a slot when its primary has logged the running transactions;"
            " `SELECT pg_log_standby_snapshot()` there does it at once",
            err=True,
        )


@asynccontextmanager
async def exported(login: Login, slot_name: str | None) -> AsyncIterator[SourceSnapshot]:
    """Make a slot with its snapshot, which can be imported until the block ends; without a name it goes with the block.

    Raises:
        ConfigError: no slot can have this name.
        SourceRefused: the slot exists, no slot is free, or the role lacks REPLICATION.
        SourceLost: the connection broke; the slot may exist.
    """
    name = slot_name or f"parapply_copy_{secrets.token_hex(6)}"
    check_slot_name(name)
    conn = await slot.connect(login, application_name=f"parapply snapshot {name}", is_replication=True)
    async with conn:
        kind = "" if slot_name else "TEMPORARY "
        tell_what_is_awaited(conn)
        with slot.source_errors(f"creating the slot {name!r}"):
            # Before it waits for transactions: one that ends while it waits, and after the snapshot, is also later.
            ((time_us,),) = await (await conn.execute(_NOW)).fetchall()
            # The form that all versions take; since 15 there is a longer one for the same.
            cursor = await conn.execute(
                f'CREATE_REPLICATION_SLOT "{name}" {kind}LOGICAL "pgoutput" EXPORT_SNAPSHOT'.encode()
            )
            row = await cursor.fetchone()
        assert row is not None
        yield SourceSnapshot(lsn=parse_lsn(str(row[1])), name=str(row[2]), slot_name=name, time_us=int(time_us))


async def open_reader(login: Login, name: str, snapshot: SourceSnapshot) -> slot.Connection:
    """Open a session on the publisher whose one read-only transaction sees the snapshot.

    Raises:
        SourceRefused: the snapshot is gone.
    """
    conn = await slot.connect(login, application_name=name)
    try:
        with slot.source_errors("importing the snapshot"):
            await conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            await conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot.name)))
    except BaseException:
        await conn.close()
        raise
    return conn


async def check_commands(config: Config, snapshot: SourceSnapshot, have_run: Collection[CommandName]) -> None:
    """Raise SourceRefused for a slot behind commands that the schema does not have: the stream does not bring them."""
    login, name = config.source.login, f"parapply copy {config.source.slot}"
    async with await open_reader(login, name, snapshot) as reader:
        missed = sorted(await ddl_queue.names(reader) - set(have_run))
    if missed:
        raise SourceRefused(
            f"source: {len(missed)} commands of parapply.ddl_queue, from number {missed[0].number} on, came after the"
            " schema was brought and before the slot, so no stream brings them",
            hint="do on the target what they do, and go on with `parapply migrate --from copy`; or `parapply drop`,"
            " empty the target and begin again",
        )


def came_late() -> SourceRefused:
    """Return the error for a command that the copy already has."""
    return SourceRefused(
        "source: a command that is to run here came before the copy's snapshot",
        hint=f"run the same command again; {IS_LEFT}",
    )


async def check_unchanged(
    config: Config, tables: Sequence[PublishedTable], snapshot: SourceSnapshot, have_run: Collection[CommandName] | None
) -> dict[int, str]:
    """Refuse tables that changed while the snapshot was awaited, which may take as long as other transactions do.

    A column that came in that time would be left out of the copy, and the stream does not bring what is before it.
    A command that came in that time would run on rows that have what it did.

    Args:
        config: publications.
        tables: as they were before.
        snapshot: to be copied.
        have_run: commands of the publisher that have run here; None: none run here that the snapshot shows.

    Returns:
        How they are published in the snapshot.

    Raises:
        SourceRefused: one did, or came.
    """
    login, name = config.source.login, f"parapply copy {config.source.slot}"
    async with await open_reader(login, name, snapshot) as reader:
        published = await published_tables(reader, config.source.publications, config.mapping)
        marks = await publishing.published(reader, config.source.publications, [table.oid for table in tables])
        has_more = have_run is not None and not (await ddl_queue.names(reader)).issubset(have_run)
    if has_more:
        raise came_late()
    now = {table.oid: _shape(table) for table in published}
    if changed := [table.text for table in tables if now.get(table.oid) != _shape(table)]:
        raise SourceRefused(
            f"source: changed, or no longer published, while the snapshot was awaited: {', '.join(changed)}",
            hint=f"run the same command again; {IS_LEFT}",
        )
    return marks


def _shape(table: PublishedTable) -> tuple[object, ...]:
    leaves = frozenset((leaf.schema, leaf.name) for leaf in table.leaves)
    return table.full_name, table.columns, table.types, table.modifiers, table.row_filter, table.key, leaves
