"""The table `ddl` of the state: commands of the publisher, and the outcome of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
from psycopg import sql

from parapply.model import format_lsn, parse_lsn
from parapply.target.state.schema import state_rows
from parapply.wire.ddl_queue import DIGEST_SQL, CommandName, QueuedCommand

if TYPE_CHECKING:
    from parapply.target.session.settings import Connection
    from parapply.vocabulary import CommandOutcome


class CommandKey(NamedTuple):
    """The key of a command of a slot."""

    slot_id: int
    commit_lsn: int
    number: int


class PendingCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command that is run after the transaction in which it came."""

    key: CommandKey
    command: QueuedCommand
    is_begun: bool  # what it makes was not there before, or what it drops was


def command_sql(schema: str) -> str:
    """Return the INSERT that notes a command inside the target transaction that runs it, or leaves it out.

    Parameters, in text format: $1 slot_id, $2 commit LSN of the source transaction, $3 number of the queue's row, $4
    tag, $5 command, $6 role that ran it on the publisher, $7 outcome, $8 reason, $9 settings as JSON, $10 schema.
    """
    text = (
        "INSERT INTO {s}.ddl (slot_id, commit_lsn, number, tag, command, source_role, outcome, reason, settings,"
        " first_schema) VALUES ($1::int, $2::pg_lsn, $3::bigint, $4::text, $5::text, $6::text, $7::text, $8::text,"
        " $9::jsonb, $10::text)"
    )
    return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)


async def noted(conn: Connection, schema: str, slot_id: int) -> tuple[frozenset[CommandName], int]:
    """Return the names of the commands that have come here, and the watermark."""
    query = (
        f"SELECT lowest_remote_lsn::text, number, {DIGEST_SQL} FROM {{s}}.progress"  # noqa: S608  a constant
        " JOIN {s}.slots USING (slot_name) LEFT JOIN {s}.ddl USING (slot_id) WHERE slots.slot_id = $1::int"
    )
    found = await state_rows(conn, schema, "reading which commands have come", query, [slot_id])
    names = [CommandName(number, digest) for _, number, digest in found if digest is not None]
    return frozenset(names), parse_lsn(found[0][0]) if found else 0


async def pending(conn: Connection, schema: str, slot_id: int) -> list[PendingCommand]:
    """Return the commands that are to be run after their transactions, in their order."""
    query = (
        "SELECT commit_lsn::text, number, tag, command, source_role, first_schema, settings, begun_at IS NOT NULL"
        " FROM {s}.ddl WHERE slot_id = $1::int AND outcome = 'pending' ORDER BY ddl.commit_lsn, number"
    )
    found = await state_rows(conn, schema, "reading which commands are pending", query, [slot_id])
    return [
        PendingCommand(
            key=CommandKey(slot_id, parse_lsn(lsn), number),
            command=QueuedCommand(
                number=number, tag=tag, command=command, role_name=role, schema=first_schema, made=(),
                settings=settings, is_later=True,
            ),
            is_begun=is_begun,
        )
        for lsn, number, tag, command, role, first_schema, settings, is_begun in found
    ]  # fmt: skip


async def begin(conn: Connection, schema: str, key: CommandKey) -> None:
    """Note that a pending command is run from now on, and that none of its effects existed before."""
    query = (
        "UPDATE {s}.ddl SET begun_at = pg_catalog.clock_timestamp()"
        " WHERE slot_id = $1::int AND commit_lsn = $2::pg_lsn AND number = $3::bigint"
    )
    values = [key.slot_id, format_lsn(key.commit_lsn), key.number]
    await state_rows(conn, schema, "noting that a command is run", query, values)


async def finish(conn: Connection, schema: str, key: CommandKey, outcome: CommandOutcome, reason: str) -> None:
    """Note the outcome of a pending command; one that is still pending can be run again."""
    query = (
        "UPDATE {s}.ddl SET outcome = $4, reason = $5, recorded_at = pg_catalog.clock_timestamp()"
        " WHERE slot_id = $1::int AND commit_lsn = $2::pg_lsn AND number = $3::bigint"
    )
    values = [key.slot_id, format_lsn(key.commit_lsn), key.number, outcome.value, reason]
    await state_rows(conn, schema, "noting what became of a command", query, values)
