"""`parapply sequences`: the publisher's sequence values brought to the target, for the cut-over.

Logical replication does not carry them: the first insert on the target would take a value that is taken (trap T-36).
A sequence is never moved backwards unless that is asked for, so doing it again, or too late, does no harm.

In: the configuration and options. Out: a line for each sequence that moved or could not, or a JSON document.

Source: PostgreSQL manual, "CREATE SEQUENCE" (a sequence is a relation of one row), "Sequence Manipulation Functions".
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import click
import msgspec
from psycopg import sql

from parapply import connect
from parapply.errors import TargetLost, TargetRefused
from parapply.printable import printable
from parapply.source.slot import source_errors
from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.connect import Connections
    from parapply.source import slot

#: Sequences read by one statement: far below what the parser's stack takes.
_AT_ONCE = 200

_INCOMPLETE = 1


class SequenceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to do."""

    ahead: int = 0  # steps further than the publisher, for what is written there in the meantime
    is_exact: bool = False  # backwards, too
    is_dry: bool = False  # only tell
    as_json: bool = False


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence holds."""

    last_value: int
    is_called: bool  # nextval gives the value after last_value, else last_value itself

    def following(self, increment: int) -> int:
        """Return what nextval would give."""
        return self.last_value + (increment if self.is_called else 0)


class SequenceOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one sequence."""

    schema_name: str
    sequence_name: str
    before: Value | None  # on the target
    after: Value | None
    outcome: str  # moved, equal, ahead (on the target already), missing, refused
    reason: str = ""


def copy_sequences(config: Config, options: SequenceOptions) -> int:
    """Copy and tell; return 0, or 1 if a sequence is missing on the target or could not be set.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost: an end is not there, or does not let them be read.
    """
    return asyncio.run(_copy(config, options))


async def _copy(config: Config, options: SequenceOptions) -> int:
    async with connect.open_both(config, "sequences") as ends:
        here = await _source_sequences(ends.source)
        outcomes = [await _one(ends, name, *found, options) for name, found in here.items()]
    _print(outcomes, options)
    return _INCOMPLETE if any(one.outcome in {"missing", "refused"} for one in outcomes) else 0


async def _source_sequences(conn: slot.Connection) -> dict[tuple[str, str], tuple[int, Value]]:
    """Return increment and value of every sequence on the publisher, by schema and name."""
    # Without those that number the rows of parapply's own tables: on each side they count by themselves.
    listed = sql.SQL(
        "SELECT n.nspname, c.relname, s.seqincrement FROM pg_catalog.pg_sequence AS s"
        " JOIN pg_catalog.pg_class AS c ON c.oid = s.seqrelid AND c.relpersistence <> 't'"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname NOT IN (SELECT schema_name FROM {} AS own) ORDER BY 1, 2"
    ).format(sql.SQL(STATE_SCHEMAS_SQL))
    found: dict[tuple[str, str], tuple[int, Value]] = {}
    with source_errors("reading the sequences"):
        names = await (await conn.execute(listed)).fetchall()
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            query = sql.SQL(" UNION ALL ").join(
                [
                    sql.SQL("SELECT {}::int, last_value, is_called FROM {}").format(
                        sql.Literal(number), sql.Identifier(schema, name)
                    )
                    for number, (schema, name, _) in enumerate(some)
                ]
            )
            for number, last_value, is_called in await (await conn.execute(query)).fetchall():
                schema, name, increment = some[number]
                found[schema, name] = (increment, Value(last_value=last_value, is_called=is_called))
    return found


async def _one(
    ends: Connections, name: tuple[str, str], increment: int, value: Value, options: SequenceOptions
) -> SequenceOutcome:
    schema, sequence = name
    wanted = value
    if options.ahead and value.is_called:
        wanted = Value(last_value=value.last_value + options.ahead * increment, is_called=True)

    def outcome(kind: str, before: Value | None, reason: str = "") -> SequenceOutcome:
        after = wanted if kind == "moved" else before
        return SequenceOutcome(
            schema_name=schema, sequence_name=sequence, before=before, after=after, outcome=kind, reason=reason
        )

    quoted = sql.Identifier(schema, sequence)
    exists = sql.SQL("SELECT EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = to_regclass($1) AND relkind = 'S')")
    try:
        with target_errors(f"reading the sequence {schema}.{sequence}"):
            ((is_there,),) = await rows(ends.target, exists, [quoted.as_string(None)])
            if not is_there:
                return outcome("missing", None, "there is no such sequence on the target")
            query = sql.SQL("SELECT last_value, is_called FROM {}").format(quoted)
            ((last_value, is_called),) = await rows(ends.target, query)
        before = Value(last_value=last_value, is_called=is_called)
        if before == wanted:
            return outcome("equal", before)
        distance = wanted.following(increment) - before.following(increment)
        if distance * increment <= 0 and not options.is_exact:
            return outcome("ahead", before)
        if not options.is_dry:
            await _set(ends, quoted, wanted)
    except TargetLost:
        raise
    except TargetRefused as error:
        return outcome("refused", None, str(error))
    return outcome("moved", before)


async def _set(ends: Connections, quoted: sql.Identifier, wanted: Value) -> None:
    query = sql.SQL("SELECT pg_catalog.setval($1::regclass, $2::bigint, $3::bool)")
    with target_errors(f"setting the sequence {quoted.as_string(None)}"):
        await rows(ends.target, query, [quoted.as_string(None), wanted.last_value, wanted.is_called])


def _print(outcomes: Sequence[SequenceOutcome], options: SequenceOptions) -> None:
    if options.as_json:
        document: list[Any] = [msgspec.to_builtins(one) for one in outcomes]
        click.echo(json.dumps({"is_dry": options.is_dry, "sequences": document}, indent=2))
        return
    for one in outcomes:
        name = printable(f"{one.schema_name}.{one.sequence_name}")
        if one.outcome == "moved" and one.before and one.after:
            click.echo(f"{name}: {one.before.last_value} -> {one.after.last_value}")
        elif one.outcome == "ahead" and one.before:
            click.echo(f"{name}: stays at {one.before.last_value}, which is ahead of the source")
        elif one.reason:
            click.echo(f"{name}: {one.outcome}: {one.reason}")
    moved = sum(one.outcome == "moved" for one in outcomes)
    would = "would move" if options.is_dry else "moved"
    click.echo(f"{len(outcomes)} sequences, {moved} {would}")
