"""Progress of a cut-over: one row for each slot, on the target that takes over.

In: a control session, the name of the state schema. Out: rows of `parapply.cutovers`. Every change of it is a
separate synchronous commit, before the work that it announces begins, so that a command that was killed is continued or
undone. Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply.errors import StateClosed, TargetRefused
from parapply.model import lsn_text
from parapply.target.session import lease
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.copies import notify
from parapply.target.state.schema import in_schema, state_rows, struct_of
from parapply.vocabulary import CutoverStep

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from parapply.target.session.settings import Connection

#: No daemon applies the slot from here on.
_DAEMON_STOPS: Final = CutoverStep.STOPPING
#: No table is copied from here on, because the target is compared, and then opened, as it is.
COPIES_STOP: Final = CutoverStep.FENCING
#: No daemon applies the slot of the way back before this step: the stream ahead runs, and rows would go round; or what
#: it applies would look like late writes.
BACK_BEGINS: Final = CutoverStep.ENDING
#: Rights of every role while a cut-over is under way, because the role that reads the way back has no other right here.
_READ_BY_ALL: Final = "USAGE ON SCHEMA {s}", "SELECT (step, reverse_slot) ON {s}.cutovers"
#: True if every role has them; no row without a cut-over.
_IS_READ_BY_ALL: Final = (
    "SELECT pg_catalog.has_schema_privilege('public', t.relnamespace, 'USAGE')"
    " AND pg_catalog.has_column_privilege('public', t.oid, 'step', 'SELECT')"
    " AND pg_catalog.has_column_privilege('public', t.oid, 'reverse_slot', 'SELECT')"
    " FROM {s}.cutovers AS c JOIN pg_catalog.pg_class AS t ON t.oid = c.tableoid LIMIT 1"
)
#: The rights go with the last cut-over, and none may begin between the look for others and that.
_LOCK: Final = "LOCK TABLE {s}.cutovers IN SHARE UPDATE EXCLUSIVE MODE"

#: The cut-over of a slot, for people.
SHOWN: Final = f"""
SELECT c.step, c.step_at::text AS step_at, c.begun_at::text AS begun_at, c.reverse_slot, c.fence,
       c.fence_lsn::text AS fence_lsn, c.takeover_lsn::text AS takeover_lsn, c.fenced_at::text AS fenced_at,
       c.opened_at::text AS opened_at, c.fenced_at IS NOT NULL AS is_fenced,
       ARRAY(SELECT DISTINCT (one.value ->> 'database') || ' at ' || (one.value ->> 'dsn')
               FROM pg_catalog.jsonb_array_elements(c.poolers) AS one ORDER BY 1) AS paused,
       EXTRACT(epoch FROM pg_catalog.clock_timestamp() - c.step_at)::float8 AS step_s,
       EXTRACT(epoch FROM COALESCE(c.opened_at, pg_catalog.clock_timestamp())
                          - COALESCE(c.paused_at, c.fenced_at))::float8 AS gap_s,
       EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
                  AND l.classid::bigint = {lease.CUTOVER_LOCK_CLASS} AND l.objid::bigint = c.slot_id
                  AND l.database = (SELECT oid FROM pg_catalog.pg_database
                                     WHERE datname = pg_catalog.current_database())) AS is_worked_on
  FROM {{s}}.cutovers AS c WHERE c.slot_id = $1::int"""  # noqa: S608  own text

_COLUMNS: Final = (
    "step, reverse_slot, made_slot, made_publication, fence, opens, fence_lsn::text, takeover_lsn::text,"
    " EXTRACT(epoch FROM pg_catalog.clock_timestamp() - fenced_at)::float8,"
    " EXTRACT(epoch FROM opened_at - COALESCE(paused_at, fenced_at))::float8, poolers, commands, command"
)


class PausedPooler(msgspec.Struct, frozen=True, kw_only=True):
    """A database of a pooler that may be paused."""

    dsn: str  # of its console, without a password
    database: str  # as clients name it there
    file: str  # that is rewritten; empty: none
    led_to: tuple[str, int, str]  # before: host, empty for a socket of its default directory; port; name there
    words: dict[str, str | None] = {}  # of the file's line before, where it is rewritten; None: it had none


class Cutover(msgspec.Struct, frozen=True, kw_only=True):
    """A cut-over that was begun."""

    step: CutoverStep  # that is under way: it is done again from its beginning
    reverse_slot: str  # on the target, for the way back
    made_slot: bool  # by this cut-over
    made_publication: bool
    fence: str  # of the source: database (its default_transaction_read_only) or command
    opens: str  # what keeps writers from the target since it was a fenced source itself: database, command or empty
    fence_lsn: int | None  # of the source; after the end of its last writer
    takeover_lsn: int | None  # of the target; what commits after it is sent the way back
    fenced_s: float | None  # since the fence
    gap_s: float | None  # from the fence, or the pause before it, until the target was opened
    poolers: tuple[PausedPooler, ...] = ()  # noted before they are paused, and until they are resumed
    commands: tuple[str, ...] = ()  # the operator's that have run and were not taken back
    command: str = ""  # the one that runs, or was interrupted

    @property
    def is_done(self) -> bool:
        """Return whether the target has taken over, and nothing is left to do."""
        return self.step is CutoverStep.DONE

    @property
    def stops_daemon(self) -> bool:
        """Return whether daemons may no longer apply the slot."""
        return not self.step.is_before(_DAEMON_STOPS)

    @property
    def holds_others(self) -> bool:
        """Return whether only the cut-over's own command takes away what it has made: a fence, a slot and its state."""
        return self.step.is_before(CutoverStep.ENDING)

    @property
    def is_open(self) -> bool:
        """Return whether writers may have been let in, so that nothing can be undone."""
        return not self.step.is_before(CutoverStep.OPENING)


async def read(conn: Connection, schema: str, slot_id: int) -> Cutover | None:
    """Return the cut-over of a slot, None if none was begun."""
    query = f"SELECT {_COLUMNS} FROM {{s}}.cutovers WHERE slot_id = $1::int"  # noqa: S608  own text
    found = await state_rows(conn, schema, "reading the cut-over", query, [slot_id])
    return struct_of(Cutover, found[0]) if found else None


async def begin(conn: Connection, schema: str, slot_id: int, cutover: Cutover) -> None:
    """Write the first row of a cut-over; one that is done is replaced.

    Raise TargetRefused also where this role cannot have every role read it, as one that does not own the table.
    """
    query = in_schema(
        "INSERT INTO {s}.cutovers (slot_id, step, reverse_slot, made_slot, made_publication, fence, opens)"
        " VALUES ($1::int, $2, $3, $4::bool, $5::bool, $6, $7)",
        schema,
    )
    with target_errors("noting the cut-over"):
        async with conn.transaction():
            await rows(conn, in_schema(_LOCK, schema))
            await rows(conn, in_schema("DELETE FROM {s}.cutovers WHERE slot_id = $1::int", schema), [slot_id])
            values = [cutover.made_slot, cutover.made_publication, cutover.fence, cutover.opens]
            await rows(conn, query, [slot_id, cutover.step, cutover.reverse_slot, *values])
            # With the row, and before the slot of the way back exists: who sees the slot can read its step.
            for right in _READ_BY_ALL:
                await conn.execute(in_schema(f"GRANT {right} TO PUBLIC", schema))
            # Without the right to grant, GRANT only warns.
            ((is_readable,),) = await rows(conn, in_schema(_IS_READ_BY_ALL, schema))
            if not is_readable:
                texts = [in_schema(f"GRANT {right} TO PUBLIC;", schema).as_string(None) for right in _READ_BY_ALL]
                raise TargetRefused(
                    f"target: the role {conn.info.user!r} may not let all roles read the step of the cut-over, before"
                    " which nothing may apply the way back",
                    hint=f"run the cut-over as the owner of the state schema, or have it say {' '.join(texts)}",
                )
            await notify(conn, slot_id)


async def enter(  # noqa: PLR0913  what a step leaves
    conn: Connection,
    schema: str,
    slot_id: int,
    step: CutoverStep,
    *,
    fence_lsn: int | None = None,
    takeover_lsn: int | None = None,
) -> None:
    """Note the step that begins now; the time of the fence is taken with its step.

    Raise TargetRefused if the row is gone, and TargetLost if the connection broke, when the step may be noted.
    """
    query = in_schema(
        "UPDATE {s}.cutovers SET step = $2, step_at = pg_catalog.clock_timestamp(),"
        " fence_lsn = COALESCE($3::pg_lsn, fence_lsn),"
        # Back to draining: what the daemon applies then must not be sent back, so the way back begins later.
        " takeover_lsn = CASE $2 WHEN 'draining' THEN NULL ELSE COALESCE($4::pg_lsn, takeover_lsn) END,"
        " fenced_at = CASE $2 WHEN 'fencing' THEN COALESCE(fenced_at, pg_catalog.clock_timestamp())"
        " WHEN 'preparing' THEN NULL ELSE fenced_at END"
        " WHERE slot_id = $1::int RETURNING step",
        schema,
    )
    with target_errors("noting the step of the cut-over"):
        async with conn.transaction():
            found = await rows(conn, query, [slot_id, step, lsn_text(fence_lsn), lsn_text(takeover_lsn)])
            if step is CutoverStep.DONE:
                await _close(conn, schema)
            await notify(conn, slot_id)
    if not found:
        raise TargetRefused(
            "the cut-over is no longer noted on the target: it was undone, or the slot dropped",
            hint="see `parapply status`; run one command at a time",
        )


async def note_poolers(conn: Connection, schema: str, slot_id: int, poolers: Sequence[PausedPooler]) -> None:
    """Note the poolers that may be paused from now on, all of them; the first time is taken."""
    query = (
        "UPDATE {s}.cutovers SET poolers = $2::jsonb,"
        " paused_at = CASE poolers WHEN '[]' THEN pg_catalog.clock_timestamp() ELSE paused_at END"
        " WHERE slot_id = $1::int"
    )
    values = [slot_id, msgspec.json.encode(poolers).decode()]
    await state_rows(conn, schema, "noting the poolers that are paused", query, values)


async def note_commands(conn: Connection, schema: str, slot_id: int, ran: Sequence[str], command: str) -> None:
    """Note the commands of the operator's that have run, and the one that begins or was interrupted; or empty."""
    query = "UPDATE {s}.cutovers SET commands = $2::text[], command = $3 WHERE slot_id = $1::int"
    await state_rows(conn, schema, "noting a command", query, [slot_id, list(ran), command])


async def note_opened(conn: Connection, schema: str, slot_id: int) -> None:
    """Note that nothing keeps writers from the target any longer."""
    query = "UPDATE {s}.cutovers SET opens = '' WHERE slot_id = $1::int"
    await state_rows(conn, schema, "noting that the fence was lifted", query, [slot_id])


async def note_takeover(conn: Connection, schema: str, slot_id: int) -> None:
    """Note that writers may write here from now on; the first time is taken."""
    query = (
        "UPDATE {s}.cutovers SET opened_at = COALESCE(opened_at, pg_catalog.clock_timestamp()) WHERE slot_id = $1::int"
    )
    await state_rows(conn, schema, "noting that the target takes over", query, [slot_id])


async def unfence(conn: Connection, schema: str, slot_id: int) -> None:
    """Note that writers were let in on the source again."""
    query = "UPDATE {s}.cutovers SET fenced_at = NULL, paused_at = NULL WHERE slot_id = $1::int"
    await state_rows(conn, schema, "noting that the fence was lifted", query, [slot_id])


async def forget(conn: Connection, schema: str, slot_id: int) -> None:
    """Remove the row."""
    with target_errors("forgetting the cut-over"):
        async with conn.transaction():
            await rows(conn, in_schema("DELETE FROM {s}.cutovers WHERE slot_id = $1::int", schema), [slot_id])
            await _close(conn, schema)
            await notify(conn, slot_id)


async def _close(conn: Connection, schema: str) -> None:
    """Revoke the right of other roles to read here, unless another slot is being cut over."""
    await rows(conn, in_schema(_LOCK, schema))
    query = in_schema("SELECT 1 FROM {s}.cutovers WHERE step <> $1 LIMIT 1", schema)
    if not await rows(conn, query, [CutoverStep.DONE]):
        for right in _READ_BY_ALL:
            await conn.execute(in_schema(f"REVOKE {right} FROM PUBLIC", schema))


async def readable(conn: Connection, schemas: Collection[str]) -> list[tuple[str, str]]:
    """Return the schemas, and their owners, where this session of any role may read the ways back of cut-overs."""
    query = sql.SQL(
        "SELECT n.nspname, pg_catalog.pg_get_userbyid(n.nspowner) FROM pg_catalog.pg_class AS c"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE c.relname = 'cutovers' AND c.relkind = 'r' AND n.nspname = ANY ($1::text[])"
        " AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')"
        " AND pg_catalog.has_column_privilege(c.oid, 'step', 'SELECT')"
        " AND pg_catalog.has_column_privilege(c.oid, 'reverse_slot', 'SELECT') ORDER BY 1"
    )
    return await rows(conn, query, [list(schemas)])


async def step_before_back(conn: Connection, schema: str, slot_name: str, *, until: CutoverStep) -> str:
    """Return the step of a cut-over whose way back is a slot, as long as nothing may apply it; empty: it may.

    It may from the step `until` on. The session on the slot's server is of any role, and the schema may be of anybody.
    """
    later = [step.value for step in CutoverStep if not step.is_before(until)]
    # Whole and unplanned: to plan a SELECT runs code of the table's owner, such as constants of an index predicate.
    query = in_schema("COPY {s}.cutovers (step, reverse_slot) TO STDOUT", schema)
    async with conn.cursor() as cursor, cursor.copy(query) as copy:
        found = [step async for step, slot in copy.rows() if slot == slot_name and step not in later]
    return str(found[0]) if found else ""


async def hold_off(conn: Connection, schema: str) -> None:
    """Have any cut-over wait, where it begins or goes to its next step, until this transaction ends."""
    await state_rows(conn, schema, "holding off a cut-over", "LOCK TABLE {s}.cutovers IN SHARE MODE")


async def check_may_write(
    conn: Connection, schema: str, slot_id: int, slot_name: str, *, until: CutoverStep = _DAEMON_STOPS
) -> None:
    """Refuse to write what comes from the publisher once the target has taken over, or is about to.

    That is from the step `until` on; the slot's name is for the message.

    Raises:
        StateClosed: it has.
    """
    found = await read(conn, schema, slot_id)
    if found is None or found.step.is_before(until):
        return
    what = "the target has taken over" if found.is_open else f"it is under way, at the step {found.step}"
    raise StateClosed(
        f"slot {slot_name!r} was cut over: {what}",
        hint="`parapply cutover` goes on with it, or takes it back (--undo, or --back once it is done)",
    )
