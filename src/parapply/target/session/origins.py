"""Replication origins of sessions that write users' rows: a change applied here is known as one from elsewhere.

A publisher that is asked for `origin = none` leaves such changes out, so in a two-way set-up nothing goes round; and a
row that another writer wrote last is distinguished from one of ours. An origin belongs to one session at a time up to
PostgreSQL 18 (trap T-17), so each worker, each session of a copy and the replay of conflicts has its own. From 19 the
workers share one. The functions need a superuser or a grant. Without them everything else works, and the daemon says
what does not.

Sources: PostgreSQL manual, "Replication Progress Tracking", "Replication Management Functions"; `origin.c` of 19, which
lets the first session's process be named by the others, and no session join once that one has ended.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import sql

from parapply.target.session.lease import LOCK_CLASS
from parapply.target.session.settings import first_line, rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection

#: The functions to grant; without parameters, because versions differ in these.
FUNCTIONS: Final = (
    "pg_replication_origin_create",
    "pg_replication_origin_drop",
    "pg_replication_origin_session_setup",
    "pg_replication_origin_xact_setup",
)
#: Asks for the role's right to use them.
MAY_USE_SQL: Final = f"""
SELECT pg_catalog.bool_and(pg_catalog.has_function_privilege(oid, 'EXECUTE')) FROM pg_catalog.pg_proc
WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY ('{{{",".join(FUNCTIONS)}}}')"""  # noqa: S608
_GRANT_HINT: Final = f"GRANT EXECUTE ON FUNCTION {', '.join(FUNCTIONS)} TO the target's role (a superuser needs none)"
#: A session that has just ended gives its origin back a moment later.
_TRIES: Final = 50
_POLL_S: Final = 0.05
#: All in use; none allowed.
_NONE_FREE: Final = (psycopg.errors.ConfigurationLimitExceeded, psycopg.errors.ObjectNotInPrerequisiteState)
#: server_version_num of the first server that has a separate setting for their limit.
_OWN_LIMIT_SINCE: Final = 180000
#: Origins that a hint names.
_NAMED: Final = 3


class OriginProblem(NamedTuple):
    """Why a session does not write under an origin."""

    text: str
    hint: str  # what the operator can do


def origin_name(slot_id: int, who: int | str) -> str:
    """Return the name of an origin: of a worker, by its number, or of a command."""
    return f"parapply_{slot_id}_{who}"


async def carry_origin(conn: Connection, name: str, first_pid: int = 0) -> OriginProblem | None:
    """Make a session write under an origin until it ends; return why it does not, None if it does.

    Args:
        conn: in autocommit mode.
        name: of the origin; made if it is not there.
        first_pid: server process of the session that has it and shares it; 0: it is for this session first.
    """
    text = sql.SQL(
        "SELECT pg_catalog.pg_replication_origin_create({name}) WHERE NOT EXISTS (SELECT FROM"
        " pg_catalog.pg_replication_origin WHERE roname = {name});"
        " SELECT pg_catalog.pg_replication_origin_session_setup({name}{pid})"
    ).format(name=sql.Literal(name), pid=sql.SQL(f", {first_pid}" if first_pid else ""))
    with target_errors("setting up a replication origin"):
        for _ in range(_TRIES):
            try:
                await conn.execute(text)
            except psycopg.errors.ObjectInUse:
                await asyncio.sleep(_POLL_S)
            except psycopg.errors.InsufficientPrivilege as error:
                return OriginProblem(first_line(error), _GRANT_HINT)
            except _NONE_FREE as error:
                return OriginProblem(first_line(error), await _hint_where_none_is_free(conn))
            else:
                return None
    return OriginProblem(
        f"replication origin {name} is in use by another session",
        "end that session; pg_replication_origin_status and pg_stat_activity on the target show it",
    )


async def _hint_where_none_is_free(conn: Connection) -> str:
    """Name the setting, and origins that seem to be left of databases that were dropped with their state.

    They belong to the cluster and outlive their database. Locks show which slots have a daemon, in every database.
    """
    limit = (
        "max_active_replication_origins" if conn.info.server_version >= _OWN_LIMIT_SINCE else "max_replication_slots"
    )
    query = sql.SQL(
        "SELECT roname FROM pg_catalog.pg_replication_origin CROSS JOIN LATERAL"
        " (SELECT pg_catalog.substring(roname, '^parapply_([0-9]{1,10})_[0-9a-z_]+$')::int8 * 2) AS own (k)"
        " WHERE own.k IS NOT NULL AND NOT EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory'"
        " AND l.classid::int8 = $1::int8 AND l.objsubid = 2 AND l.objid::int8 IN (own.k, own.k + 1)) ORDER BY 1"
    )
    unused = [str(name) for (name,) in await rows(conn, query, [LOCK_CLASS])]
    hint = f"raise {limit} of the target above the workers of all daemons and subscriptions there, and restart it"
    if not unused:
        return hint
    named = ", ".join(unused[:_NAMED]) + (", ..." if len(unused) > _NAMED else "")
    return (
        f"{hint}; no daemon applies the slots of {len(unused)} origins ({named}): if their database was dropped, "
        "SELECT pg_replication_origin_drop(name)"
    )


async def release_origins(conn: Connection, names: Sequence[str]) -> None:
    """Let other sessions have the places of origins in which no session is; the origins stay, with their numbers.

    A server has few places, and an origin keeps the one that it was given until it is dropped. Dropping is no part of
    its transaction there, so it is taken back. Where the role may not drop any, they stay.

    Args:
        conn: in autocommit mode.
        names: of the origins; one that is not there is left out.
    """
    query = sql.SQL(
        "SELECT pg_catalog.pg_replication_origin_drop(roname) FROM pg_catalog.pg_replication_origin WHERE roname = $1"
    )
    with target_errors("releasing the replication origins"), suppress(psycopg.errors.InsufficientPrivilege):
        for name in names:
            for _ in range(_TRIES):
                try:
                    async with conn.transaction(force_rollback=True):
                        await rows(conn, query, [name])
                except psycopg.errors.ObjectInUse:
                    await asyncio.sleep(_POLL_S)
                else:
                    break


async def followers(conn: Connection, tables: Sequence[Name]) -> list[str]:
    """Return the slots of this database that may send changes of tables on: a publication has one of them."""
    query = sql.SQL(
        "SELECT s.slot_name::text FROM pg_catalog.pg_replication_slots AS s WHERE s.plugin = 'pgoutput'"
        " AND s.database = pg_catalog.current_database() AND EXISTS (SELECT"
        " FROM unnest($1::text[], $2::text[]) AS w(s, t)"
        " JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.s"
        " JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.t"
        " CROSS JOIN LATERAL (SELECT c.oid::regclass UNION SELECT p.relid FROM pg_catalog.pg_partition_tree(c.oid) AS p"
        " UNION SELECT a.relid FROM pg_catalog.pg_partition_ancestors(c.oid) AS a(relid)) AS m(oid)"
        " JOIN pg_catalog.pg_class AS mc ON mc.oid = m.oid"
        " JOIN pg_catalog.pg_namespace AS mn ON mn.oid = mc.relnamespace"
        " JOIN pg_catalog.pg_publication_tables AS p ON p.schemaname = mn.nspname AND p.tablename = mc.relname)"
        " ORDER BY 1"
    )
    with target_errors("looking who follows the target"):
        found = await rows(conn, query, [[schema for schema, _ in tables], [table for _, table in tables]])
    return [str(name) for (name,) in found]


async def drop_origins(conn: Connection, slot_id: int) -> str:
    """Drop all origins of a slot; return why some are left, empty if none is."""
    query = "SELECT {} FROM pg_catalog.pg_replication_origin WHERE pg_catalog.starts_with(roname, $1)"
    of_slot = [origin_name(slot_id, "")]
    with target_errors("dropping the replication origins"):
        # A role that may not drop any has none to drop, mostly.
        if not await rows(conn, sql.SQL(query.format("1")), of_slot):
            return ""
        try:
            await rows(conn, sql.SQL(query.format("pg_catalog.pg_replication_origin_drop(roname)")), of_slot)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ObjectInUse) as error:
            return first_line(error)
    return ""
