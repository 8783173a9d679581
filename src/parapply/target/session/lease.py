"""One daemon for each slot: the lease, and the fence that waits for the last commit of the daemon before.

Two advisory locks for each slot. Lock 1, exclusive, is the lease: the leader's control session holds it while it
lives. Lock 2, shared, is held by every worker session. A new leader takes lock 1, then lock 2 exclusively, which
succeeds only when every worker session of the old leader is gone, commits in doubt included (traps T-14, T-15, F18,
F20). Only then is the state final and may be read. This costs nothing for each transaction.

A lock lives as long as the server process, not as the client. That is the point: an orphaned process that is still
executing still holds its lock.

Source: PostgreSQL manual, "Advisory Locks", "Advisory Lock Functions", "pg_locks".
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply.errors import LeaseHeld, TargetLost
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.target.session.settings import Connection

#: First keys of our advisory locks. The daemon's: "para" in ASCII, so that other users of such locks do not clash.
LOCK_CLASS = 0x70617261
#: Keys of the command that copies tables, of the publisher's commands that run outside of transactions, of the cut-over
#: ("cuto"). The slot is the second key of each; who carries sequences has none.
COPY_LOCK_CLASS: Final = LOCK_CLASS + 1
LATER_LOCK_CLASS: Final = LOCK_CLASS + 2
SEQUENCES_LOCK_CLASS: Final = LOCK_CLASS + 3
CUTOVER_LOCK_CLASS: Final = 0x6375746F

#: Beginning of what is said of a lease that another one holds.
HELD: Final = "another parapply holds the lease of this slot"

#: Seconds between two tries: a lock freed at the first is noticed soon, a long wait costs few queries.
_POLL_MIN_S = 0.02
_POLL_MAX_S = 0.5

#: Milliseconds that pg_terminate_backend waits for the process to be gone.
_TERMINATE_WAIT_MS = 5000


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A session that holds one of the locks."""

    pid: int
    application_name: str
    client: str  # address, "local" for a socket, or "unknown" where the role may not see it
    since: datetime | None  # start of the session; None where the role may not see it
    is_leader: bool

    def __str__(self) -> str:
        """Return it as the operator reads it."""
        since = f" since {self.since:%Y-%m-%d %H:%M:%S %Z}" if self.since else ""
        return f"pid {self.pid} ({self.application_name or 'no name'}, client {self.client}{since})"


def awaited(sessions: Sequence[Holder]) -> str:
    """Return for people that a command waits for sessions."""
    return f"target: waiting for the end of {', '.join(map(str, sessions))}"


def lease_key(slot_id: int) -> int:
    """Return the second key of lock 1."""
    return slot_id * 2


def worker_key(slot_id: int) -> int:
    """Return the second key of lock 2."""
    return slot_id * 2 + 1


def worker_lock_sql(slot_id: int, leader_pid: int, lock_class: int = LOCK_CLASS) -> str:
    """Return the statement that a new worker session sends before anything else.

    It takes lock 2 shared, then checks that the leader that opened the session still holds the lease, and fails with
    55006 otherwise. In this order: a leader that lost the lease while it was stopped (SIGSTOP) and then reconnects a
    worker must not slip in behind the fence of its successor, and once the check has passed every successor's
    fence waits for this session.

    Args:
        slot_id: of the state.
        leader_pid: server process of the control session, `conn.info.backend_pid`.
        lock_class: first key of the locks.
    """
    return f"""DO $parapply$BEGIN
PERFORM pg_catalog.pg_advisory_lock_shared({lock_class:d}, {worker_key(slot_id):d});
IF NOT EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND classid = {lock_class:d}
    AND objid = {lease_key(slot_id):d} AND objsubid = 2 AND granted AND pid = {leader_pid:d} AND database =
    (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())) THEN
    RAISE EXCEPTION 'this parapply no longer holds the lease of its slot' USING ERRCODE = '55006';
END IF;
END$parapply$"""  # noqa: S608  integers only


async def holders(
    conn: Connection, slot_id: int, *, lock_class: int = LOCK_CLASS, with_self: bool = False
) -> tuple[Holder, ...]:
    """Return the sessions that hold the locks of a slot, the leader first; this session only with `with_self`."""
    query = sql.SQL(
        "SELECT l.pid, a.application_name, pg_catalog.host(a.client_addr), a.client_port, a.backend_start,"
        " l.objid = $2::oid"
        " FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid"
        " WHERE l.locktype = 'advisory' AND l.granted AND l.classid = $1::oid AND l.objid IN ($2::oid, $3::oid)"
        " AND l.objsubid = 2 AND (l.pid <> pg_catalog.pg_backend_pid() OR $4::bool) AND l.database ="
        " (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
        " ORDER BY 6 DESC, 1"
    )
    with target_errors("reading who holds the lease"):
        found = await rows(conn, query, [lock_class, lease_key(slot_id), worker_key(slot_id), with_self])
    return tuple(
        Holder(
            pid=pid,
            application_name=name or "",
            client=address or ("local" if port == -1 else "unknown"),
            since=since,
            is_leader=is_leader,
        )
        for pid, name, address, port, since, is_leader in found
    )


async def take_commands(conn: Connection, system_identifier: str, database: str, wait_s: float) -> None:
    """Take the lock for running the commands of a publisher's database here; the session keeps it until it ends.

    Raises:
        LeaseHeld: the daemon of another slot has it.
    """
    taking = sql.SQL(
        "SELECT pg_catalog.pg_try_advisory_lock(key), (SELECT a.application_name FROM pg_catalog.pg_locks AS l"
        " JOIN pg_catalog.pg_stat_activity AS a USING (pid) WHERE l.locktype = 'advisory' AND l.objsubid = 1"
        " AND l.granted AND l.classid::bigint << 32 | l.objid::bigint = key LIMIT 1)"
        " FROM (SELECT pg_catalog.hashtextextended('parapply ddl ' || $1::text || ' ' || $2::text, 0) AS key) AS k"
    )
    deadline_s = time.monotonic() + wait_s
    while True:
        with target_errors("taking the lock of commands"):
            ((is_taken, holder),) = await rows(conn, taking, [system_identifier, database])
        if is_taken:
            return
        if time.monotonic() >= deadline_s:
            raise LeaseHeld(
                f"ddl.apply: another daemon runs the commands of the database {database!r} here already"
                f" ({holder or 'its name is not visible'})",
                hint="each command would run twice: set ddl.apply = false for all but one of the slots of a publisher's"
                " database that lead into one target",
            )
        await asyncio.sleep(_POLL_MAX_S)


async def take_lease(  # noqa: PLR0913  who, which, how long
    conn: Connection,
    slot_id: int,
    wait_s: float,
    *,
    takeover: bool = False,
    on_wait: Callable[[Sequence[Holder]], None] | None = None,
    lock_class: int = LOCK_CLASS,
) -> None:
    """Take lock 1 on the control session, which keeps it until it ends.

    Args:
        conn: control session.
        slot_id: of the state.
        wait_s: how long to wait for another leader to go; 0 tries once.
        takeover: end the server processes of the other leader and its workers instead of waiting for them.
        on_wait: called once with who holds it, before the wait.
        lock_class: first key of the locks; other than the daemons' for those who copy tables, and without takeover.

    Raises:
        LeaseHeld: another session still holds it after `wait_s`; names it.
        TargetRefused: takeover needs the same role, or pg_signal_backend.
    """
    if takeover:
        with target_errors("taking over the lease"):
            await conn.execute(_takeover_sql(slot_id).encode())
        await _terminate(conn, await holders(conn, slot_id))
    deadline_s = time.monotonic() + wait_s
    delay_s = _POLL_MIN_S
    while not await _try_lock(conn, lease_key(slot_id), lock_class):
        if time.monotonic() >= deadline_s:
            present = await holders(conn, slot_id, lock_class=lock_class)
            leaders = [str(holder) for holder in present if holder.is_leader]
            raise LeaseHeld(
                f"{HELD}: {', '.join(leaders) or 'a session that just left'}",
                hint="stop that one; if it hangs, `parapply run --takeover` ends its sessions"
                if lock_class == LOCK_CLASS
                else "wait for its end, or stop it",
            )
        if on_wait is not None:
            present = await holders(conn, slot_id, lock_class=lock_class)
            on_wait([holder for holder in present if holder.is_leader])
            on_wait = None
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, _POLL_MAX_S)


async def release_lease(conn: Connection, slot_id: int, lock_class: int) -> None:
    """Give lock 1 back, which this session has taken once.

    Raises:
        TargetLost: the connection broke, and with it the lock.
    """
    with target_errors("releasing the lease"):
        query = sql.SQL("SELECT pg_catalog.pg_advisory_unlock($1::int, $2::int)")
        await rows(conn, query, [lock_class, lease_key(slot_id)])


async def fence(
    conn: Connection, slot_id: int, on_wait: Callable[[Sequence[Holder]], None], *, lock_class: int = LOCK_CLASS
) -> None:
    """Wait until every worker session of an earlier leader is gone. The lease must be held.

    It waits without limit: going on while one of them may still commit would apply its transactions twice.

    Args:
        conn: control session that holds the lease.
        slot_id: of the state.
        on_wait: called with the sessions waited for, at first and whenever they change.
        lock_class: first key of the locks.
    """
    told: tuple[Holder, ...] = ()
    delay_s = _POLL_MIN_S
    # Tries instead of a blocking lock, because a wait in the server could not report whom it waits for.
    while not await _try_lock(conn, worker_key(slot_id), lock_class):
        present = await holders(conn, slot_id, lock_class=lock_class)
        if present and present != told:
            told = present
            on_wait(present)
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, _POLL_MAX_S)
    with target_errors("releasing the fence"):
        query = sql.SQL("SELECT pg_catalog.pg_advisory_unlock($1::int, $2::int)")
        ((is_released,),) = await rows(conn, query, [lock_class, worker_key(slot_id)])
    if not is_released:
        raise TargetLost("target, releasing the fence: the session no longer holds its lock")


async def take_both(conn: Connection, slot_id: int, wait_s: float, on_wait: Callable[[Sequence[Holder]], None]) -> None:
    """Take the leases of daemon and copy, and wait until no session of who held them before can write.

    The arguments and errors are as in `take_lease` and `fence`.
    """
    for lock_class in (LOCK_CLASS, COPY_LOCK_CLASS):
        await take_lease(conn, slot_id, wait_s, lock_class=lock_class)
        await fence(conn, slot_id, on_wait, lock_class=lock_class)


async def _try_lock(conn: Connection, key: int, lock_class: int) -> bool:
    with target_errors("taking the lease"):
        query = sql.SQL("SELECT pg_catalog.pg_try_advisory_lock($1::int, $2::int)")
        ((is_taken,),) = await rows(conn, query, [lock_class, key])
    return bool(is_taken)


def _takeover_sql(slot_id: int) -> str:
    """Return the statement that ends the leader and stands in line for its lock before the leader is gone.

    Between two statements a leader that lives would have reconnected and taken the lease again. The lock may be taken
    once more afterwards: it ends with the session however often it was taken.
    """
    return f"""DO $parapply$BEGIN
PERFORM pg_catalog.set_config('lock_timeout', '{_TERMINATE_WAIT_MS:d}', true);
PERFORM pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_locks WHERE locktype = 'advisory'
    AND classid = {LOCK_CLASS:d} AND objid = {lease_key(slot_id):d} AND objsubid = 2 AND granted
    AND pid <> pg_catalog.pg_backend_pid() AND database =
    (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database());
PERFORM pg_catalog.pg_advisory_lock({LOCK_CLASS:d}, {lease_key(slot_id):d});
EXCEPTION WHEN lock_not_available THEN
    NULL;
END$parapply$"""  # noqa: S608  integers only


async def _terminate(conn: Connection, sessions: Sequence[Holder]) -> None:
    query = sql.SQL("SELECT pg_catalog.pg_terminate_backend($1::int, $2::bigint)")
    with target_errors("ending the sessions of the other parapply"):
        for pid in sorted({session.pid for session in sessions}):
            await rows(conn, query, [pid, _TERMINATE_WAIT_MS])
