"""The fence: new sessions of a database are read only, and its old ones end; or a command of the operator's does it.

A session may still say `SET default_transaction_read_only = off`. The fence is for applications that do not. That none
of them wrote is not assumed: the slot is asked for transactions after the fence (`command.py`). Deadlines are by
`time.monotonic`.

In: a plain session on the server that is fenced. Source: PostgreSQL manual, "ALTER DATABASE", "pg_stat_activity",
"Server Signaling Functions", "Predefined Roles".
"""

from __future__ import annotations

import asyncio
import os
import time
from asyncio.subprocess import DEVNULL
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import conninfo, sql

from parapply.amounts import few
from parapply.errors import ParapplyError, SourceRefused
from parapply.model import parse_lsn
from parapply.quoting import shown
from parapply.source.slot import read_rows, source_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.source.slot import Connection

DATABASE: Final = "database"
COMMAND: Final = "command"

#: Seconds between two looks at sessions that end.
_POLL_S: Final = 0.01

# Without walsenders, which write nothing. While the daemon is needed, sessions with the name of parapply's are also
# left out; any session may have taken it. A role sees of other roles' sessions the process, the role and the name, and
# not when they began.
_SESSIONS: Final = """
SELECT a.pid, a.usename::text, a.backend_start,
       CASE WHEN me.rolsuper THEN true WHEN r.rolsuper THEN false
            ELSE pg_catalog.pg_has_role(a.usesysid, 'USAGE') OR pg_catalog.pg_has_role('pg_signal_backend', 'USAGE') END
  FROM pg_catalog.pg_stat_activity AS a
  JOIN pg_catalog.pg_roles AS r ON r.oid = a.usesysid
  JOIN pg_catalog.pg_roles AS me ON me.rolname = CURRENT_USER
 WHERE a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
   AND a.usename <> ALL ($1::name[]) AND a.pid <> ALL ($2::int[])
   AND NOT ($3::bool AND pg_catalog.starts_with(a.application_name, 'parapply '))
   AND a.pid NOT IN (SELECT pid FROM pg_catalog.pg_stat_replication)
 ORDER BY 1"""

# A session reads the settings of its database while it starts, shows itself in pg_stat_activity after that, and holds
# this lock from before the one until after the other. (postinit.c, InitPostgres)
_STARTING: Final = """
SELECT l.pid FROM pg_catalog.pg_locks AS l
 WHERE l.locktype = 'object' AND l.database = 0 AND l.classid = 'pg_catalog.pg_database'::pg_catalog.regclass
   AND l.objid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid()"""

# A transaction that has written holds the lock on its own number, which every role may see.
_WRITING: Final = """
SELECT a.pid, a.usename::text
  FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
   AND a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
 ORDER BY 1"""

_PREPARED: Final = (
    "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database() ORDER BY prepared"
)


class _Session(msgspec.Struct, frozen=True):
    pid: int
    role: str
    began_at: datetime | None  # None where this role may not see it
    may_be_ended: bool

    def began_after(self, time: datetime) -> bool:
        return self.began_at is not None and self.began_at > time

    def __str__(self) -> str:
        return f"process {self.pid} (role {self.role})"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions that stay."""

    roles: tuple[str, ...]
    pids: tuple[int, ...]  # of the cut-over itself
    with_daemon: bool  # and everything that has such a name; without it nothing that has


async def _sessions(conn: Connection, kept: Kept) -> list[_Session]:
    with source_errors("reading the sessions"):
        found = await read_rows(conn, _SESSIONS, [list(kept.roles), list(kept.pids), kept.with_daemon])
        return [_Session(*row) for row in found]


async def prepared(conn: Connection) -> list[str]:
    """Return the names of prepared transactions of the database, which can be committed by any session later."""
    with source_errors("reading the prepared transactions"):
        return [str(gid) for (gid,) in await read_rows(conn, _PREPARED)]


async def refusals_of_owner(conn: Connection) -> list[SourceRefused]:
    """Return the reasons why this role could not change the database's setting."""
    query = (
        "SELECT CURRENT_USER::text, pg_catalog.pg_get_userbyid(datdba)::text, datname::text,"
        " pg_catalog.pg_has_role(datdba, 'USAGE')"
        " FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
    )
    with source_errors("looking whether the database can be fenced"):
        ((role, owner, database, is_owner),) = await read_rows(conn, query)
    if is_owner:
        return []
    owned, quoted = shown(owner), shown(role)
    return [
        SourceRefused(
            f"the role {role!r} may not fence the database {database!r}, which {owner!r} owns",
            hint=f"GRANT {owned} TO {quoted} for the time of the cut-over, or give a command of yours: --fence-command",
        )
    ]


async def refusals(conn: Connection, kept: Kept) -> list[SourceRefused]:
    """Return the reasons why this role could not fence the database, or why the fence would not hold."""
    # A setting of a role wins over one of the database.
    exempt = """
        SELECT DISTINCT pg_catalog.pg_get_userbyid(s.setrole)::text
          FROM pg_catalog.pg_db_role_setting AS s, pg_catalog.unnest(s.setconfig) AS one
         WHERE s.setrole <> 0 AND s.setrole <> (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER)
           AND pg_catalog.starts_with(one, 'default_transaction_read_only=') AND NOT one LIKE '%=on'
           AND s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database
                                      WHERE datname = pg_catalog.current_database()))"""
    with source_errors("looking whether the database can be fenced"):
        exempted = sorted({str(name) for (name,) in await read_rows(conn, exempt)} - set(kept.roles))
        ((role,),) = await read_rows(conn, "SELECT CURRENT_USER::text")
    found = await refusals_of_owner(conn)
    held = [str(one) for one in await _sessions(conn, kept) if not one.may_be_ended]
    if held:
        quoted = shown(role)
        found.append(
            SourceRefused(
                f"source: the role {role!r} may not end {few(held)}",
                hint=f"GRANT pg_signal_backend TO {quoted} (a superuser's sessions only a superuser can end), end them"
                " yourself, or leave a role that writes nothing with --keep-role",
            )
        )
    if exempted:
        found.append(
            SourceRefused(
                f"source: default_transaction_read_only of the database does not hold for {few(exempted)}, which have a"
                " separate setting",
                hint="ALTER ROLE ... RESET default_transaction_read_only, or --keep-role if it writes nothing",
            )
        )
    return found


async def is_up(conn: Connection) -> bool:
    """Return whether new sessions of the database are read only; raise SourceLost if the connection broke."""
    query = """
        SELECT EXISTS (SELECT FROM pg_catalog.pg_db_role_setting AS s JOIN pg_catalog.pg_database AS d
                ON d.oid = s.setdatabase, pg_catalog.unnest(s.setconfig) AS one
         WHERE s.setrole = 0 AND d.datname = pg_catalog.current_database()
           AND one = 'default_transaction_read_only=on')"""
    with source_errors("looking whether the database is fenced"):
        ((found,),) = await read_rows(conn, query)
    return bool(found)


async def put_up(conn: Connection, deadline_s: float) -> datetime:
    """Make new sessions of the database read only, and return since when they are.

    Raises:
        ParapplyError: a session that began before has not started in time.
    """
    await _set_read_only(conn, is_on=True)
    fenced_at = await _now(conn)
    await _wait_for_starting(conn, deadline_s)
    return fenced_at


async def end_writers(conn: Connection, kept: Kept, fenced_at: datetime, deadline_s: float) -> int:
    """End the sessions that are older than the fence, and return how many ended.

    Raises:
        ParapplyError: a session has not ended in time.
    """
    old = [one for one in await _sessions(conn, kept) if not one.began_after(fenced_at)]
    await _end(conn, kept, old, deadline_s)
    return len(old)


async def _end(conn: Connection, kept: Kept, sessions: Sequence[_Session], deadline_s: float) -> None:
    old = {one.pid: one for one in sessions}
    for one in sessions:
        with source_errors(f"ending {one}"):
            await read_rows(conn, "SELECT pg_catalog.pg_terminate_backend($1::int)", [one.pid])
    while old:
        there = {one.pid for one in await _sessions(conn, kept)}
        old = {pid: one for pid, one in old.items() if pid in there}
        if old:
            await _wait([str(one) for one in old.values()], "did not end in time", deadline_s)


async def _wait_for_starting(conn: Connection, deadline_s: float) -> None:
    """Return once every session shows itself that may have read the setting as it was before the fence."""
    starting: set[int] | None = None
    while starting is None or starting:
        with source_errors("reading which sessions start"):
            now = {int(pid) for (pid,) in await read_rows(conn, _STARTING)}
        starting = now if starting is None else starting & now
        if starting:
            await _wait([f"process {pid}" for pid in sorted(starting)], "did not start in time", deadline_s)


async def _wait(names: Sequence[str], what: str, deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise ParapplyError(f"source: {few(names)} {what}", hint="see pg_stat_activity and pg_locks there")
    await asyncio.sleep(_POLL_S)


async def lift_fence(conn: Connection) -> datetime:
    """Let new sessions of the database write again, and return since when they may."""
    await _set_read_only(conn, is_on=False)
    return await _now(conn)


async def end_readers(conn: Connection, kept: Kept, lifted_at: datetime, deadline_s: float) -> list[str]:
    """End the sessions that began behind the fence, because they stay read only; return those that this role may not.

    Raises:
        ParapplyError: a session has not ended in time.
    """
    await _wait_for_starting(conn, deadline_s)
    old = [one for one in await _sessions(conn, kept) if not one.began_after(lifted_at)]
    await _end(conn, kept, [one for one in old if one.may_be_ended], deadline_s)
    return [str(one) for one in old if not one.may_be_ended]


async def _now(conn: Connection) -> datetime:
    with source_errors("reading the clock"):
        ((now,),) = await read_rows(conn, "SELECT pg_catalog.clock_timestamp()")
    assert isinstance(now, datetime)
    return now


async def _set_read_only(conn: Connection, *, is_on: bool) -> None:
    name = sql.Identifier(conn.info.dbname)
    query = sql.SQL(
        "ALTER DATABASE {} SET default_transaction_read_only = on"
        if is_on
        else "ALTER DATABASE {} RESET default_transaction_read_only"
    )
    with source_errors("fencing the database" if is_on else "lifting the fence of the database"):
        await conn.execute(query.format(name))


async def run_command(command: str, conn: Connection, *, is_on: bool) -> None:
    """Run the operator's command; its output goes to standard error.

    It finds `PARAPPLY_FENCE`, on or off, and `PARAPPLY_FENCE_DSN`, the database and server that are meant.

    Raises:
        ParapplyError: it failed.
    """
    info = conn.info
    place = conninfo.make_conninfo(host=info.host, port=info.port, dbname=info.dbname)
    environ = {**os.environ, "PARAPPLY_FENCE": "on" if is_on else "off", "PARAPPLY_FENCE_DSN": place}
    process = await asyncio.create_subprocess_exec("/bin/sh", "-c", command, env=environ, stdin=DEVNULL, stdout=2)
    status = await process.wait()
    if status:
        raise ParapplyError(
            f"--fence-command ended with {status}, with PARAPPLY_FENCE={environ['PARAPPLY_FENCE']}",
            hint="its own output shows why",
        )


async def last_lsn(conn: Connection, deadline_s: float) -> int:
    """Wait until no transaction of the database has written and not ended; return an LSN after all of them.

    Raise SourceRefused if a transaction is prepared, ParapplyError if one has not ended in time.
    """
    while True:
        with source_errors("reading the transactions in progress"):
            writing = await read_rows(conn, _WRITING)
        if not writing:
            break
        if time.monotonic() >= deadline_s:
            texts = [f"process {pid} (role {role})" for pid, role in writing]
            raise ParapplyError(
                f"source: transactions that write have not ended in time: {few(texts)}",
                hint="they are of roles that were kept, or the fence does not keep them out; end them",
            )
        await asyncio.sleep(_POLL_S)
    if held := await prepared(conn):
        raise SourceRefused(
            f"source: {len(held)} transactions are prepared, which any session can commit later: {few(held)}",
            hint="COMMIT PREPARED or ROLLBACK PREPARED them",
        )
    return await mark(conn)


async def mark(conn: Connection) -> int:
    """Commit an empty transaction durably, and return an LSN between everything committed before it and all later."""
    # Its own commit lies after the LSN that it returns; the flush takes all earlier commits to disk with it.
    query = "SELECT pg_catalog.pg_logical_emit_message(true, 'parapply', 'cut-over')::text"
    with source_errors("marking the end of the source's writes"):
        async with conn.transaction():
            await conn.execute("SET LOCAL synchronous_commit = local")
            ((lsn,),) = await read_rows(conn, query)
    return parse_lsn(lsn)
