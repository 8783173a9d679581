"""Sequence values of the publisher brought to the target: by a command for the cut-over, or by the daemon in intervals.

Logical replication does not carry them: the first insert on the target would take a value that is taken (trap T-36).
A sequence is never moved backwards unless that is asked for, so doing it again, or too late, does no harm. One session
at a time does it in a database, because what waits for a lock between its look and its act acts on an old value.

Source: PostgreSQL manual, "CREATE SEQUENCE" (a sequence is a relation of one row), "Sequence Manipulation Functions".
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from psycopg import sql

from parapply.errors import TargetLost, TargetRefused
from parapply.source.slot import source_errors
from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.target.session.lease import SEQUENCES_LOCK_CLASS
from parapply.target.session.settings import rows, target_errors
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from parapply.connect import Connections
    from parapply.source import slot
    from parapply.target.session.settings import Connection

#: Schema and name.
_Name: TypeAlias = tuple[str, str]

#: Seconds to wait for another one, which may wait for a lock on a sequence.
_LOCK_WAIT_S = 10.0
_POLL_S = 0.05
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

    A few round trips for many, because a cut-over lets clients wait for it.

    Raises:
        SourceRefused, SourceLost, TargetLost: an end is not there, or does not let them be read.
        TargetRefused: another session carries sequences, and has not ended in time.
    """
    if how.is_dry:
        return await _carry(ends, how)
    await _lock(ends.target)
    try:
        return await _carry(ends, how)
    finally:
        with suppress(TargetLost), target_errors("releasing the sequences"):
            await rows(ends.target, sql.SQL("SELECT pg_catalog.pg_advisory_unlock($1::int, 0)"), [SEQUENCES_LOCK_CLASS])


async def _lock(target: Connection) -> None:
    query = sql.SQL("SELECT pg_catalog.pg_try_advisory_lock($1::int, 0)")
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + _LOCK_WAIT_S
    with target_errors("waiting for who sets sequences"):
        while not (await rows(target, query, [SEQUENCES_LOCK_CLASS]))[0][0]:
            if clock() >= deadline_s:
                raise TargetRefused(
                    "target: another session of parapply's sets sequences", hint="wait for its end, or end it"
                )
            await asyncio.sleep(_POLL_S)


async def _carry(ends: Connections, how: SequenceOptions) -> list[SequenceOutcome]:
    here, unreadable = await _source_sequences(ends.source)
    found = [_refused(name, "source: a standby does not read an unlogged sequence") for name in unreadable]
    names = list(here)
    for first in range(0, len(names), _AT_ONCE):
        some = names[first : first + _AT_ONCE]
        there = await _for_all_or_each(some, partial(_target_values, ends.target))
        wanted = {name: _wanted(*here[name], how) for name in some}
        outcomes = {name: _outcome(name, here[name][0], wanted[name], there.get(name), how) for name in some}
        moved = [name for name in some if outcomes[name].outcome == "moved"]
        if moved and not how.is_dry:
            steps = {name: None if how.is_exact else here[name][0] for name in moved}
            done = await _for_all_or_each(moved, partial(_set, ends.target, wanted, steps))
            outcomes |= {
                name: _refused(name, str(error)) for name, error in done.items() if isinstance(error, TargetRefused)
            }
            for name in set(moved) - done.keys():
                was = outcomes[name]
                outcomes[name] = msgspec.structs.replace(was, outcome="ahead", after=was.before)
        found += outcomes.values()
    return found


async def _for_all_or_each(
    names: Sequence[_Name], act: Callable[[Sequence[_Name]], Awaitable[dict[_Name, Value]]]
) -> dict[_Name, Value | TargetRefused]:
    """Act on all at once; where that is refused, on each, and return what it gave or why it was refused."""
    try:
        return {**await act(names)}
    except TargetRefused:
        found: dict[_Name, Value | TargetRefused] = {}
        for name in names:
            try:
                found |= await act([name])
            except TargetRefused as error:
                found[name] = error
        return found


async def _source_sequences(conn: slot.Connection) -> tuple[dict[_Name, tuple[int, Value, int | None]], list[_Name]]:
    """Return increments, values and the ends of sequences that begin again there; and those that cannot be read."""
    # Sequences that number the rows of parapply's tables are left out, because each side counts independently.
    listed = sql.SQL(
        "SELECT n.nspname, c.relname, s.seqincrement, c.relpersistence = 'u' AND pg_catalog.pg_is_in_recovery(),"
        " CASE WHEN s.seqcycle THEN CASE WHEN s.seqincrement > 0 THEN s.seqmax ELSE s.seqmin END END"
        " FROM pg_catalog.pg_sequence AS s"
        " JOIN pg_catalog.pg_class AS c ON c.oid = s.seqrelid AND c.relpersistence <> 't'"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname NOT IN (SELECT schema_name FROM {} AS own UNION ALL SELECT {}) ORDER BY 1, 2"
    ).format(sql.SQL(STATE_SCHEMAS_SQL), sql.Literal(QUEUE[0]))
    found: dict[_Name, tuple[int, Value, int | None]] = {}
    with source_errors("reading the sequences"):
        every = await (await conn.execute(listed)).fetchall()
        names = [one for one in every if not one[3]]
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            query = sql.SQL(" UNION ALL ").join(
                [
                    sql.SQL("SELECT {}::int, last_value, is_called FROM {}").format(
                        sql.Literal(number), sql.Identifier(schema, name)
                    )
                    for number, (schema, name, *_) in enumerate(some)
                ]
            )
            for number, last_value, is_called in await (await conn.execute(query)).fetchall():
                schema, name, increment, _, end = some[number]
                found[schema, name] = (increment, Value(last_value=last_value, is_called=is_called), end)
    return found, [(schema, name) for schema, name, _, is_unreadable, _ in every if is_unreadable]


async def _target_values(conn: Connection, names: Sequence[_Name]) -> dict[_Name, Value]:
    quoted = [sql.Identifier(*name) for name in names]
    listed = sql.SQL(
        "SELECT w.number - 1 FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS w(name, number)"
        " JOIN pg_catalog.pg_class AS c ON c.oid = pg_catalog.to_regclass(w.name) AND c.relkind = 'S'"
    )
    with target_errors(f"reading {_shown(names)}"):
        numbers = [number for (number,) in await rows(conn, listed, [[one.as_string(None) for one in quoted]])]
        if not numbers:
            return {}
        query = sql.SQL(" UNION ALL ").join(
            [
                sql.SQL("SELECT {}::int, last_value, is_called FROM {}").format(sql.Literal(number), quoted[number])
                for number in numbers
            ]
        )
        found = await rows(conn, query)
    return {names[number]: Value(last_value=last, is_called=is_called) for number, last, is_called in found}


async def _set(
    conn: Connection, wanted: Mapping[_Name, Value], steps: Mapping[_Name, int | None], names: Sequence[_Name]
) -> dict[_Name, Value]:
    """Set some sequences, which no rollback undoes, and return the values of those that were not ahead by now.

    Args:
        conn: session on the target.
        wanted: values.
        steps: their increments; None: set backwards also.
        names: which.
    """
    each = []
    for number, name in enumerate(names):
        value, step = wanted[name], steps[name]
        setting = sql.SQL("SELECT {}::int, pg_catalog.setval({}::regclass, {}::bigint, {})").format(
            *map(sql.Literal, (number, sql.Identifier(*name).as_string(None), str(value.last_value), value.is_called))
        )
        if step is not None:
            # Clients may have drawn values since the look.
            setting += sql.SQL(
                " FROM {} WHERE (last_value::numeric + CASE WHEN is_called THEN {step} ELSE 0 END)"
                " * pg_catalog.sign({step}::numeric) <= {}::numeric * pg_catalog.sign({step}::numeric)"
            ).format(sql.Identifier(*name), sql.Literal(str(value.following(step))), step=sql.Literal(step))
        each.append(setting)
    with target_errors(f"setting {_shown(names)}"):
        found = await rows(conn, sql.SQL(" UNION ALL ").join(each))
    return {names[number]: wanted[names[number]] for number, _ in found}


def _shown(names: Sequence[_Name]) -> str:
    return f"the sequence {'.'.join(names[0])}" if len(names) == 1 else f"{len(names)} sequences"


def _wanted(increment: int, value: Value, end: int | None, how: SequenceOptions) -> Value:
    last_value = value.last_value + how.ahead * increment
    if end is not None:
        # Beyond the end of any other one the server refuses it: none of its values would be left.
        last_value = min(last_value, end) if increment > 0 else max(last_value, end)
    return Value(last_value=last_value, is_called=value.is_called)


def _outcome(
    name: _Name, increment: int, wanted: Value, before: Value | TargetRefused | None, how: SequenceOptions
) -> SequenceOutcome:
    """Return what is to be done with a sequence that has this value on the target."""
    if isinstance(before, TargetRefused):
        return _refused(name, str(before))
    kind, after, reason = "moved", wanted if before is not None else None, ""
    if before is None:
        kind, reason = "missing", "there is no such sequence on the target"
    elif before == wanted:
        kind = "equal"
    elif (wanted.following(increment) - before.following(increment)) * increment <= 0 and not how.is_exact:
        kind, after = "ahead", before
    return SequenceOutcome(
        schema_name=name[0], sequence_name=name[1], before=before, after=after, outcome=kind, reason=reason
    )


def _refused(name: _Name, reason: str) -> SequenceOutcome:
    schema, sequence = name
    return SequenceOutcome(
        schema_name=schema, sequence_name=sequence, before=None, after=None, outcome="refused", reason=reason
    )
