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

from parapply.model import parse_lsn
from parapply.source import slot
from parapply.source.options import check_slot_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from parapply.login import Login


#: Microseconds since 2000-01-01 UTC.
_NOW: Final = "SELECT ((EXTRACT(epoch FROM pg_catalog.clock_timestamp()) - 946684800) * 1000000)::bigint"


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
    """Make a slot with its snapshot, which can be imported until the block ends.

    Args:
        login: of the publisher.
        slot_name: of a permanent slot to make; None for a temporary one, which goes with the block.

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
