"""Sequence values of the publisher brought to the target: by a command for the cut-over, or by the daemon in intervals.

Logical replication does not carry them: the first insert on the target would take a value that is taken (trap T-36).
A sequence is never moved backwards unless that is asked for, so doing it again, or too late, does no harm.

Source: PostgreSQL manual, "CREATE SEQUENCE" (a sequence is a relation of one row), "Sequence Manipulation Functions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from psycopg import sql

from parapply.errors import TargetLost, TargetRefused
from parapply.source.slot import source_errors
from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.target.session.settings import rows, target_errors
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from parapply.connect import Connections
    from parapply.source import slot

#: Sequences read by one statement: far below what the parser's stack takes.
_AT_ONCE = 200


class SequenceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The way to carry sequences over."""

    ahead: int = 0  # steps further than the publisher, for values that are drawn there in the meantime
    is_exact: bool = False  # also backwards
    is_dry: bool = False  # only report


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a sequence."""

    last_value: int
    is_called: bool  # nextval gives the value after last_value, else last_value itself

    def following(self, increment: int) -> int:
        """Return the value that nextval would give."""
        return self.last_value + (increment if self.is_called else 0)


class SequenceOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one sequence."""

    schema_name: str
    sequence_name: str
    before: Value | None  # on the target
    after: Value | None
    outcome: str  # moved, equal, ahead (on the target already), missing, refused
    reason: str = ""

    @property
    def is_carried(self) -> bool:
        """Return whether the target's sequence exists, and is not behind."""
        return self.outcome not in {"missing", "refused"}


async def carry(ends: Connections, how: SequenceOptions) -> list[SequenceOutcome]:
    """Bring every sequence forward that is behind on the target; return the outcome of each.

    Raises:
        SourceRefused, SourceLost, TargetLost: an end is not there, or does not let them be read.
    """
    here = await _source_sequences(ends.source)
    return [await _one(ends, name, *found, how) for name, found in here.items()]


async def _source_sequences(conn: slot.Connection) -> dict[tuple[str, str], tuple[int, Value]]:
    """Return increment and value of every sequence on the publisher, by schema and name."""
    # Sequences that number the rows of parapply's tables are left out, because each side counts independently.
    listed = sql.SQL(
        "SELECT n.nspname, c.relname, s.seqincrement FROM pg_catalog.pg_sequence AS s"
        " JOIN pg_catalog.pg_class AS c ON c.oid = s.seqrelid AND c.relpersistence <> 't'"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname NOT IN (SELECT schema_name FROM {} AS own UNION ALL SELECT {}) ORDER BY 1, 2"
    ).format(sql.SQL(STATE_SCHEMAS_SQL), sql.Literal(QUEUE[0]))
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
    ends: Connections, name: tuple[str, str], increment: int, value: Value, how: SequenceOptions
) -> SequenceOutcome:
    schema, sequence = name
    wanted = value
    if how.ahead and value.is_called:
        wanted = Value(last_value=value.last_value + how.ahead * increment, is_called=True)

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
        if distance * increment <= 0 and not how.is_exact:
            return outcome("ahead", before)
        if not how.is_dry:
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
