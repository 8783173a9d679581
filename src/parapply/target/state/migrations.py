"""Progress of a migration: its steps, and the statements after the rows that are committed.

In: a control session, the schema's name, which migration. Out: rows of `parapply.migrations` and
`parapply.migration_items`. A migration is named by slot and publisher, because its first steps come before the slot.

Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply.errors import LeaseHeld, TargetRefused
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.copies import notify
from parapply.target.state.schema import has_schema, in_schema, state_rows, struct_of

if TYPE_CHECKING:
    from parapply.target.session.settings import Connection

#: Seconds between two attempts to take its lock.
_POLL_S: Final = 0.2
#: Key of the lock of a migration m.
_LOCK: Final = "pg_catalog.hashtextextended('parapply migrate ' || m.slot_name || ' ' || m.system_identifier, 7809632)"
#: Steps of a slot's migration, for people, without the options: $1 its name, $2 its number, $3 the publisher; with NULL
#: for both, of the publisher whose step was begun last, because a rehearsal may have used the same slot name.
SHOWN: Final = f"""
SELECT m.step, m.state, m.done, m.total, m.unit, m.size_bytes, m.left_s, m.detail, m.started_at::text AS started_at,
       m.finished_at::text AS finished_at,
       EXTRACT(epoch FROM COALESCE(m.finished_at, pg_catalog.clock_timestamp()) - m.started_at)::float8 AS seconds,
       EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
                  AND l.classid::bigint << 32 | l.objid::bigint = {_LOCK}
                  AND l.database = (SELECT oid FROM pg_catalog.pg_database
                                     WHERE datname = pg_catalog.current_database())) AS is_worked_on
  FROM {{s}}.migrations AS m
 WHERE m.slot_name = $1 AND m.system_identifier =
       COALESCE($3::text, (SELECT s.system_identifier FROM {{s}}.slots AS s WHERE s.slot_id = $2::int),
                (SELECT n.system_identifier FROM {{s}}.migrations AS n WHERE n.slot_name = $1
                  ORDER BY n.started_at DESC LIMIT 1))
 ORDER BY m.started_at"""  # noqa: S608  own text


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """The key of a migration."""

    schema: str  # of the state
    slot_name: str
    system_identifier: str

    @property
    def key(self) -> list[object]:
        """Return its columns."""
        return [self.slot_name, self.system_identifier]


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step that was begun."""

    step: str
    state: str  # running, failed, done
    done: int
    total: int
    unit: str
    size_bytes: int
    left_s: float | None
    detail: str
    options: str
    started_at: str
    finished_at: str | None
    seconds: float  # from its begin to its end, or to now


async def load(conn: Connection, migration: Migration) -> dict[str, StepRow]:
    """Return the steps that were begun, by name; none where there is no state schema."""
    if not await has_schema(conn, migration.schema):
        return {}
    query = (
        "SELECT step, state, done, total, unit, size_bytes, left_s, detail, options, started_at::text,"
        " finished_at::text,"
        " EXTRACT(epoch FROM COALESCE(finished_at, pg_catalog.clock_timestamp()) - started_at)::float8"
        " FROM {s}.migrations"
        " WHERE slot_name = $1 AND system_identifier = $2 ORDER BY started_at"
    )
    found = await state_rows(conn, migration.schema, "reading how far the migration is", query, migration.key)
    return {row[0]: struct_of(StepRow, row) for row in found}


async def begin(conn: Connection, migration: Migration, step: str, options: str = "") -> None:
    """Note that a step begins, or begins again; without options the earlier ones stay."""
    query = (
        "INSERT INTO {s}.migrations AS migrations (slot_name, system_identifier, step, state, options)"
        " VALUES ($1, $2, $3, 'running', $4) ON CONFLICT (slot_name, system_identifier, step) DO UPDATE"
        " SET state = 'running', detail = '', finished_at = NULL, started_at = pg_catalog.clock_timestamp(),"
        " done = 0, total = 0, unit = '', size_bytes = 0, left_s = NULL,"
        " options = CASE EXCLUDED.options WHEN '' THEN migrations.options ELSE EXCLUDED.options END"
    )
    await state_rows(conn, migration.schema, "noting a step of the migration", query, [*migration.key, step, options])
    await _call(conn, migration)


async def keep(conn: Connection, migration: Migration, step: str, options: str) -> None:
    """Keep what a step that was begun leaves to later ones."""
    query = "UPDATE {s}.migrations SET options = $4 WHERE slot_name = $1 AND system_identifier = $2 AND step = $3"
    await _write(conn, migration, "noting a step of the migration", query, [*migration.key, step, options])


class HowFar(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a step."""

    done: int
    total: int  # 0: not known
    unit: str
    size_bytes: int = 0
    left_s: float | None = None


async def note(conn: Connection, migration: Migration, step: str, how_far: HowFar) -> None:
    """Note the progress of a step."""
    query = (
        "UPDATE {s}.migrations SET done = $4::bigint, total = $5::bigint, unit = $6, size_bytes = $7::bigint,"
        " left_s = $8::float8"
        " WHERE slot_name = $1 AND system_identifier = $2 AND step = $3"
    )
    values = [*migration.key, step, *msgspec.structs.astuple(how_far)]
    await state_rows(conn, migration.schema, "noting how far the migration is", query, values)


async def end(conn: Connection, migration: Migration, step: str, detail: str, *, is_done: bool) -> None:
    """Note that a step is done, or has failed."""
    query = (
        "UPDATE {s}.migrations SET state = $4, detail = $5, finished_at = pg_catalog.clock_timestamp(), left_s = NULL"
        " WHERE slot_name = $1 AND system_identifier = $2 AND step = $3"
    )
    values = [*migration.key, step, "done" if is_done else "failed", detail]
    await _write(conn, migration, "noting a step of the migration", query, values)
    await _call(conn, migration)


async def _write(conn: Connection, migration: Migration, doing: str, query: str, values: list[object]) -> None:
    """Write one note; raise TargetRefused if nothing notes the migration any more, as after `parapply drop`."""
    if not await state_rows(conn, migration.schema, doing, f"{query} RETURNING true", values):
        raise TargetRefused(
            f"{doing}: the notes of the migration with slot {migration.slot_name!r} are no longer on the target",
            hint="was `parapply drop` run? Then empty the target and begin again",
        )


async def _call(conn: Connection, migration: Migration) -> None:
    """Call the daemon of the slot, if there is a slot already."""
    query = "SELECT slot_id FROM {s}.slots WHERE slot_name = $1 AND system_identifier = $2"
    for (slot_id,) in await state_rows(conn, migration.schema, "calling the daemon", query, migration.key):
        await notify(conn, slot_id)


async def items(conn: Connection, migration: Migration) -> frozenset[str]:
    """Return the statements that are committed."""
    query = "SELECT item FROM {s}.migration_items WHERE slot_name = $1 AND system_identifier = $2"
    found = await state_rows(conn, migration.schema, "reading which statements are done", query, migration.key)
    return frozenset([item for (item,) in found])


async def add_item(conn: Connection, migration: Migration, item: str) -> None:
    """Note a statement, in the transaction that runs it."""
    query = (
        "INSERT INTO {s}.migration_items (slot_name, system_identifier, item) SELECT $1, $2, $3 WHERE EXISTS"
        # Without steps the next migration would take the statement for one that need not be made.
        " (SELECT FROM {s}.migrations WHERE slot_name = $1 AND system_identifier = $2)"
    )
    await _write(conn, migration, "noting a statement that is done", query, [*migration.key, item])


async def forget(conn: Connection, migration: Migration) -> bool:
    """Forget a migration that has not come as far as its slot; return whether one existed."""
    gone = False
    with target_errors("forgetting the migration"):
        async with conn.transaction():
            for table in ("migrations", "migration_items"):  # an item comes only while there are steps
                query = in_schema(
                    f"DELETE FROM {{s}}.{table} WHERE slot_name = $1 AND system_identifier = $2 RETURNING true",  # noqa: S608  ours
                    migration.schema,
                )
                gone = bool(await rows(conn, query, migration.key)) or gone
    return gone


async def lock(conn: Connection, migration: Migration, wait_s: float) -> None:
    """Take the lock under which one command at a time works on a migration; the session keeps it until it ends.

    Raise LeaseHeld if another session has it for `wait_s` seconds: of a command that was killed it ends soon.
    """
    until_s = time.monotonic() + wait_s
    while not await _try_lock(conn, migration):
        if time.monotonic() >= until_s:
            raise LeaseHeld(
                f"another command works on the migration with slot {migration.slot_name!r}",
                hint="wait for its end; of a command that was killed the server ends the session after a moment",
            )
        await asyncio.sleep(_POLL_S)


async def _try_lock(conn: Connection, migration: Migration) -> bool:
    query = sql.SQL(
        f"SELECT pg_catalog.pg_try_advisory_lock({_LOCK})"  # noqa: S608  own text
        " FROM (SELECT $1::text AS slot_name, $2::text AS system_identifier) AS m"
    )
    with target_errors("taking the migration's lock"):
        ((is_taken,),) = await rows(conn, query, migration.key)
    return bool(is_taken)
