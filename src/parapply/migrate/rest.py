"""Data that the stream does not bring: large objects, rows of unlogged tables, statistics, materialized views.

In: sessions on both ends. Out: done on the target. Each may be done again at any time, and then holds what the
publisher holds at that moment: the last time after the writers have stopped.

Source: PostgreSQL manual, "Large Objects", "ANALYZE", "REFRESH MATERIALIZED VIEW".
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from parapply.amounts import few
from parapply.connect import open_target
from parapply.copy.pump import pump
from parapply.copy.tables import still_acting
from parapply.errors import TargetRefused
from parapply.source.slot import read_rows, source_errors
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from parapply.config import Config
    from parapply.connect import Connections
    from parapply.copy.places import Access, RateLimit
    from parapply.migrate.show import Counter
    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection

#: Bytes of a large object that are read at once.
_CHUNK_BYTES: Final = 1024 * 1024
#: Objects of which the first bytes are read by one query.
_AT_ONCE: Final = 16


async def large_objects(
    ends: Connections, counter: Counter, limit: RateLimit, *, has_owners: bool, has_privileges: bool
) -> tuple[int, list[int]]:
    """Copy all large objects, under their numbers; objects that only the target has are removed.

    Returns:
        Number of objects that were copied, and OIDs of the objects that were removed.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost: those that are complete stay.
    """
    with source_errors("reading the large objects"):
        # One snapshot for all, because clients go on removing objects.
        async with ends.source.transaction():
            await ends.source.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return await _large_objects(ends, counter, limit, has_owners=has_owners, has_privileges=has_privileges)


async def _large_objects(
    ends: Connections, counter: Counter, limit: RateLimit, *, has_owners: bool, has_privileges: bool
) -> tuple[int, list[int]]:
    listed = (
        "SELECT oid::bigint, pg_catalog.pg_get_userbyid(lomowner) FROM pg_catalog.pg_largeobject_metadata ORDER BY 1"
    )
    with source_errors("reading the large objects"):
        found = await read_rows(ends.source, listed)
    with target_errors("reading the large objects"):
        there = {oid for (oid,) in await rows(ends.target, _THERE)}
        removed = sorted(there - {oid for oid, _ in found})
        for oid in removed:
            await rows(ends.target, sql.SQL("SELECT pg_catalog.lo_unlink($1::oid)"), [oid])
    counter.total = len(found)
    first = "SELECT oid::bigint, pg_catalog.lo_get(oid, 0, $2::int) FROM unnest($1::oid[]) AS w(oid)"
    for start in range(0, len(found), _AT_ONCE):
        some = dict(found[start : start + _AT_ONCE])
        with source_errors("reading large objects"):
            begun = await read_rows(ends.source, first, [list(some), _CHUNK_BYTES])
        for oid, data in begun:
            await _object(ends, oid, bytes(data), limit, is_there=oid in there)
            if has_owners:
                await _give(ends.target, oid, some[oid])
            if has_privileges:
                await _grants(ends, oid)
            counter.add(f"large object {oid}", len(data))
    return len(found), removed


_THERE: Final = sql.SQL("SELECT oid::bigint FROM pg_catalog.pg_largeobject_metadata ORDER BY 1")


async def large_objects_of_others(target: Connection) -> list[TargetRefused]:
    """Return why large objects cannot be copied to a target to which none was copied yet: an error, or none."""
    with target_errors("reading the large objects"):
        there = [str(oid) for (oid,) in await rows(target, _THERE)]
    if not there:
        return []
    return [
        TargetRefused(
            f"target: it has large objects of its own, which the publisher's would replace: {few(there)}",
            hint="lo_unlink them there, or leave the publisher's out with --large-objects skip",
        )
    ]


async def _object(ends: Connections, oid: int, data: bytes, limit: RateLimit, *, is_there: bool) -> None:
    with target_errors(f"writing large object {oid}"):
        # In one transaction, so that an object is complete, or as it was.
        async with ends.target.transaction():
            if is_there:
                await rows(ends.target, sql.SQL("SELECT pg_catalog.lo_unlink($1::oid)"), [oid])
            await rows(ends.target, sql.SQL("SELECT pg_catalog.lo_create($1::oid)"), [oid])
            offset = 0
            while data:
                put = sql.SQL("SELECT pg_catalog.lo_put($1::oid, $2::bigint, $3::bytea)")
                await rows(ends.target, put, [oid, offset, data])
                await limit.take(len(data))
                offset += len(data)
                if len(data) < _CHUNK_BYTES:
                    break
                with source_errors(f"reading large object {oid}"):
                    more = "SELECT pg_catalog.lo_get($1::oid, $2::bigint, $3::int)"
                    ((data,),) = await read_rows(ends.source, more, [oid, offset, _CHUNK_BYTES])


async def _grants(ends: Connections, oid: int) -> None:
    query = """
        SELECT CASE a.grantee WHEN 0 THEN NULL ELSE pg_catalog.pg_get_userbyid(a.grantee) END, a.privilege_type,
               a.is_grantable FROM pg_catalog.pg_largeobject_metadata AS m
         CROSS JOIN LATERAL pg_catalog.aclexplode(m.lomacl) AS a WHERE m.oid = $1::oid AND a.grantee <> m.lomowner"""
    with source_errors("reading the privileges of a large object"):
        found = await read_rows(ends.source, query, [oid])
    for grantee, privilege, is_grantable in found:
        to = sql.SQL("PUBLIC") if grantee is None else sql.Identifier(grantee)
        with target_errors(f"granting on large object {oid}"):
            await rows(
                ends.target,
                sql.SQL("GRANT {} ON LARGE OBJECT {} TO {}{}").format(
                    sql.SQL(privilege), sql.Literal(oid), to, sql.SQL(" WITH GRANT OPTION" if is_grantable else "")
                ),
            )


async def _give(target: Connection, oid: int, role: str) -> None:
    with target_errors(f"giving large object {oid} to its owner"):
        query = sql.SQL("ALTER LARGE OBJECT {} OWNER TO {}")
        await rows(target, query.format(sql.Literal(oid), sql.Identifier(role)))


async def unlogged(ends: Connections, names: Sequence[Name], counter: Counter, limit: RateLimit) -> int:
    """Replace the rows of unlogged tables by the publisher's, and return the number of tables.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost: tables that are complete stay.
    """
    counter.total = len(names)
    columns = """
        SELECT COALESCE(array_agg(a.attname::text ORDER BY a.attnum), '{}') FROM pg_catalog.pg_attribute AS a
         WHERE a.attrelid = (SELECT c.oid FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n
                             ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2)
           AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"""
    for name in names:
        text = ".".join(name)
        counter.begin(text)
        with source_errors(f"reading the columns of {text}"):
            ((listed,),) = await read_rows(ends.source, columns, list(name))
        table, some = sql.Identifier(*name), sql.SQL(", ").join(map(sql.Identifier, listed))
        sizes: list[int] = []
        with target_errors(f"copying into {text}"):
            async with ends.target.transaction():
                if acting := await still_acting(ends.target, [name]):
                    raise TargetRefused(
                        f"target: emptying {text} would change rows of other tables by {acting[0]}",
                        hint="GRANT SET ON PARAMETER session_replication_role TO the target's role",
                    )
                await rows(ends.target, sql.SQL("DELETE FROM ONLY {}").format(table))
                await pump(
                    ends.source,
                    ends.target,
                    sql.SQL("COPY {} ({}) TO STDOUT").format(table, some),
                    sql.SQL("COPY {} ({}) FROM STDIN").format(table, some),
                    relation=text,
                    on_data=lambda _, size, sizes=sizes: sizes.append(size),  # type: ignore[misc]
                    limit=limit,
                )
        counter.add(text, sum(sizes))
    return len(names)


async def analyze(config: Config, counter: Counter, access: Access, tables: Sequence[Name]) -> list[str]:
    """Collect statistics of tables, and return the ones left out: missing, or not to be analyzed by the role."""
    skipped: list[str] = []

    async def one(conn: Connection, name: Name) -> None:
        async with _unless_missing(name, skipped):
            with target_errors(f"collecting statistics of {'.'.join(name)}"):
                await rows(conn, sql.SQL("ANALYZE {}").format(sql.Identifier(*name)))

    def on_notice(notice: psycopg.errors.Diagnostic) -> None:
        # The server skips what the role does not own, with a warning only.
        if notice.severity_nonlocalized == "WARNING":
            skipped.append(notice.message_primary or "")

    await _each(config, counter, access, access.connections, tables, one, on_notice)
    return skipped


async def refresh_views(config: Config, counter: Counter, access: Access, views: Sequence[Name]) -> list[str]:
    """Refresh materialized views, one after the other, as one may read another; return which are missing here.

    Raises:
        TargetRefused, TargetLost: those that are refreshed stay so.
    """
    skipped: list[str] = []

    async def one(conn: Connection, name: Name) -> None:
        async with _unless_missing(name, skipped):
            with target_errors(f"refreshing {'.'.join(name)}"):
                await rows(conn, sql.SQL("REFRESH MATERIALIZED VIEW {}").format(sql.Identifier(*name)))

    await _each(config, counter, access, 1, views, one)
    return skipped


@asynccontextmanager
async def _unless_missing(name: Name, skipped: list[str]) -> AsyncIterator[None]:
    """Leave out, and note, objects that the publisher has got since its schema was brought."""
    try:
        yield
    except TargetRefused as error:
        cause = error.__cause__
        if not isinstance(cause, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
            raise
        skipped.append(f"{'.'.join(name)} is not here yet")


async def _each(  # noqa: PLR0913, PLR0917  what, where, how
    config: Config,
    counter: Counter,
    access: Access,
    connections: int,
    names: Sequence[Name],
    do: Callable[[Connection, Name], Awaitable[None]],
    on_notice: Callable[[Any], None] | None = None,
) -> None:
    left = deque(names)

    async def lane() -> None:
        async with access.lane(), await open_target(config, "migrate") as conn:
            if on_notice is not None:
                conn.add_notice_handler(on_notice)
            while left:
                name = left.popleft()
                counter.begin(".".join(name))
                await do(conn, name)
                counter.add(".".join(name))

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(1, min(connections, len(names)) + 1):
                group.create_task(lane(), name=f"each-{number}")
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
