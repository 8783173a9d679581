"""Checks of a migration beyond `parapply check`: everything that would be left out without a word.

In: a session on each end, the published tables, the choice. Out: `Sight`, and what is wrong as errors of ours, all of
them. A table that is meant and not published, rows that no stream brings, an owner that the target does not have: each
is refused by name here, before anything is made.

Source: PostgreSQL manual, "pg_shdepend", "Large Objects", "CREATE PUBLICATION" (what is published).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply import amounts
from parapply.errors import ParapplyError, SourceRefused, TargetRefused
from parapply.plan.copy_starts import Name
from parapply.quoting import shown_list
from parapply.source.slot import read_rows, source_errors
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Sequence

    from parapply.connect import Connections
    from parapply.copy.published import PublishedTable
    from parapply.migrate.options import Choice
    from parapply.source.slot import Connection
    from parapply.target.session.settings import Connection as TargetConnection

#: Names in one message.
_MOST_NAMES: Final = 10

_OWN: Final = (
    "n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND NOT n.nspname = ANY ($1::text[])"
    " AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS e WHERE e.classid = 'pg_catalog.pg_class'::regclass"
    " AND e.objid = c.oid AND e.deptype = 'e')"
)
_TABLES: Final = f"""
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, rn.nspname, r.relname
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_class AS r ON r.oid = COALESCE(pg_catalog.pg_partition_root(c.oid), c.oid)
  JOIN pg_catalog.pg_namespace AS rn ON rn.oid = r.relnamespace
 WHERE c.relkind IN ('r', 'p', 'f') AND c.relpersistence <> 't' AND {_OWN} ORDER BY 2, 3"""  # noqa: S608  a constant
_LEADING_OUT: Final = """
SELECT k.conname, k.conrelid::bigint, k.confrelid::bigint FROM pg_catalog.pg_constraint AS k
 WHERE k.contype = 'f' AND k.conparentid = 0 ORDER BY 1"""
#: In the order in which each finds what it reads refreshed.
_VIEWS: Final = f"""
WITH RECURSIVE reads AS (
    SELECT DISTINCT w.ev_class AS view, d.refobjid AS what FROM pg_catalog.pg_rewrite AS w
      JOIN pg_catalog.pg_depend AS d ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = w.oid
       AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid <> w.ev_class),
  depth AS (
    SELECT c.oid AS view, 0 AS n FROM pg_catalog.pg_class AS c WHERE c.relkind = 'm'
    UNION SELECT x.view, p.n + 1 FROM depth AS p JOIN reads AS x ON x.what = p.view)
SELECT n.nspname, c.relname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  JOIN (SELECT view, max(n) AS n FROM depth GROUP BY 1) AS o ON o.view = c.oid
 WHERE c.relkind = 'm' AND c.relispopulated AND {_OWN} ORDER BY o.n, 1, 2"""  # noqa: S608  a constant
_ROLES: Final = """
SELECT r.rolname, bool_or(d.is_owner), bool_and(d.is_granted) AND r.rolname = CURRENT_USER FROM (
    SELECT refobjid, deptype = 'o' AND classid <> 'pg_catalog.pg_default_acl'::regclass AS is_owner,
           deptype IN ('a', 'i') AS is_granted
      FROM pg_catalog.pg_shdepend
     WHERE dbid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
       AND refclassid = 'pg_catalog.pg_authid'::regclass
       AND NOT (classid = 'pg_catalog.pg_namespace'::regclass AND objid IN (
                SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = ANY ($1::text[])))
       AND NOT (classid = 'pg_catalog.pg_class'::regclass AND objid IN (
                SELECT c.oid FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                 WHERE n.nspname = ANY ($1::text[])))
       AND NOT classid = ANY (ARRAY['pg_catalog.pg_publication'::regclass, 'pg_catalog.pg_subscription'::regclass])
    UNION ALL SELECT c.relowner, true, false FROM pg_catalog.pg_class AS c
     JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND NOT n.nspname = ANY ($1::text[])) AS d
  JOIN pg_catalog.pg_roles AS r ON r.oid = d.refobjid WHERE r.rolname !~ '^pg_' GROUP BY 1 ORDER BY 1"""
_SETTINGS: Final = """
SELECT DISTINCT pg_catalog.split_part(one, '=', 1) FROM pg_catalog.pg_db_role_setting AS s
 CROSS JOIN LATERAL pg_catalog.unnest(s.setconfig) AS one
 WHERE s.setdatabase = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
 ORDER BY 1"""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher's database as a migration sees it."""

    left_out: tuple[Name, ...]  # tables that are not meant
    not_published: tuple[Name, ...]  # tables that hold rows and are meant
    not_meant: tuple[Name, ...]  # published tables
    schema_only: tuple[Name, ...]  # published tables that are meant without their rows
    unlogged: tuple[Name, ...]  # that are meant
    views: tuple[Name, ...]  # materialized, with rows, in the order of their refresh
    leading_out: tuple[str, ...]  # foreign keys from what is meant to what is not, or comes without rows
    n_large_objects: int
    owners: tuple[str, ...]
    others: tuple[str, ...]  # roles that have privileges, and own nothing
    reader: str  # the role of this session, if privileges are all that names it there; else empty
    extensions: tuple[str, ...]
    settings: tuple[str, ...]  # of the database


async def see(
    conn: Connection,
    choice: Choice,
    published: Sequence[PublishedTable],
    without: Sequence[str],
    schema_only: Sequence[PublishedTable],
) -> Sight:
    """Read the publisher; raise SourceRefused or SourceLost if it could not be read."""
    with source_errors("looking at the database"):
        found = await read_rows(conn, _TABLES, [list(without)])
        keys = await read_rows(conn, _LEADING_OUT)
        views = await read_rows(conn, _VIEWS, [list(without)])
        roles = await read_rows(conn, _ROLES, [list(without)])
        extensions = await read_rows(conn, "SELECT extname FROM pg_catalog.pg_extension ORDER BY 1")
        settings = await read_rows(conn, _SETTINGS)
        ((n_objects,),) = await read_rows(conn, "SELECT count(*) FROM pg_catalog.pg_largeobject_metadata")
    covered = {(leaf.schema, leaf.name) for table in (*published, *schema_only) for leaf in table.leaves}
    meant = {oid for oid, *_, root_schema, root in found if choice.is_meant(root_schema, root)}
    names: dict[int, Name] = {row[0]: (row[1], row[2]) for row in found}
    own_rows = [(row[0], row[4]) for row in found if row[3] == "r" and row[0] in meant]
    not_meant = {names[oid] for oid in names if oid not in meant}
    empty = {
        name for one in schema_only for name in (one.full_name, *[(leaf.schema, leaf.name) for leaf in one.leaves])
    }
    filled = {oid for oid in meant if names[oid] not in empty}
    return Sight(
        left_out=tuple(sorted(not_meant)),
        not_published=tuple([names[oid] for oid, kind in own_rows if kind == "p" and names[oid] not in covered]),
        not_meant=tuple([table.full_name for table in (*published, *schema_only) if table.full_name in not_meant]),
        schema_only=tuple([table.full_name for table in schema_only]),
        unlogged=tuple([names[oid] for oid, kind in own_rows if kind == "u"]),
        views=tuple([(schema, name) for schema, name in views]),
        leading_out=tuple(
            [
                f"{name} of {'.'.join(names[one])}"
                for name, one, other in keys
                if (one in meant and other in names and other not in meant)
                or (one in filled and other in meant and other not in filled)
            ]
        ),
        n_large_objects=n_objects,
        owners=tuple([name for name, is_owner, _ in roles if is_owner]),
        others=tuple([name for name, is_owner, _ in roles if not is_owner]),
        reader="".join([name for name, _, is_reader in roles if is_reader]),
        extensions=tuple([name for (name,) in extensions]),
        settings=tuple([name for (name,) in settings]),
    )


async def unneeded_reader(target: TargetConnection, sight: Sight) -> str:
    """Return the role by which parapply reads the publisher, if the target lacks it and so needs none of its grants.

    It may do without, because the role has nothing but privileges; empty if the target has the role, or it is more.
    """
    with target_errors("looking for the role that reads"):
        query = sql.SQL("SELECT FROM pg_catalog.pg_roles WHERE rolname = $1")
        return "" if await rows(target, query, [sight.reader]) else sight.reader


async def settings_left(target: TargetConnection, sight: Sight) -> list[str]:
    """Return the settings of the publisher's database that the target's does not have."""
    with target_errors("reading the database's settings"):
        known = {name for (name,) in await rows(target, sql.SQL(_SETTINGS))}
    return [name for name in sight.settings if name not in known]


async def refusals(ends: Connections, sight: Sight, choice: Choice, *, has_roles: bool) -> AsyncIterator[ParapplyError]:
    """Yield why the migration cannot be begun, the publisher's reasons last, as `init` does; nothing if it can."""
    async for error in _of_target(ends, sight, choice, has_roles=has_roles):
        yield error
    for error in of_tables(sight):
        yield error
    if choice.unlogged == "refuse" and (full := await _with_rows(ends.source, sight.unlogged)):
        yield SourceRefused(
            f"source: unlogged tables hold rows, which no stream brings: {few(full)}",
            hint="--unlogged copy copies them as they are then, and again with `parapply migrate --only unlogged`;"
            " --unlogged skip leaves them empty",
        )
    if choice.large_objects == "refuse" and sight.n_large_objects:
        yield SourceRefused(
            f"source: {sight.n_large_objects:,} large objects, which no stream brings",
            hint="--large-objects copy copies them as they are then, and again with"
            " `parapply migrate --only large-objects`; --large-objects skip leaves them out",
        )


def of_tables(sight: Sight) -> Iterator[ParapplyError]:
    """Yield reasons why the tables that are meant are not the published ones."""
    if sight.not_published:
        named = shown_list(sight.not_published[:_MOST_NAMES])
        yield SourceRefused(
            f"source: no publication has these tables, so their rows would stay behind: {few(sight.not_published)}",
            hint=f"ALTER PUBLICATION ... ADD TABLE {named}; or leave them out with --exclude",
        )
    if sight.not_meant:
        yield SourceRefused(
            f"source: these tables are left out, and published all the same: {few(sight.not_meant)}",
            hint="ALTER PUBLICATION ... DROP TABLE; in the place of FOR ALL TABLES make a publication that names the"
            " tables, or their schemas",
        )
    if sight.leading_out:
        yield SourceRefused(
            f"source: foreign keys lead to tables that are left out: {', '.join(sight.leading_out[:_MOST_NAMES])}",
            hint="include those tables with their rows, or also leave out the tables with the foreign keys",
        )


async def _with_rows(conn: Connection, names: Sequence[Name]) -> list[Name]:
    full = []
    for name in names:
        query = sql.SQL("SELECT EXISTS (SELECT FROM ONLY {})").format(sql.Identifier(*name))
        with source_errors(f"looking whether {'.'.join(name)} holds rows"):
            cursor = await conn.execute(query)
            row = await cursor.fetchone()
        if row and row[0]:
            full.append(name)
    return full


async def _of_target(
    ends: Connections, sight: Sight, choice: Choice, *, has_roles: bool
) -> AsyncIterator[ParapplyError]:
    with target_errors("looking for roles and extensions"):
        known = {
            name: bool(may_own)
            for name, may_own in await rows(
                ends.target, sql.SQL("SELECT rolname, pg_catalog.pg_has_role(oid, 'MEMBER') FROM pg_catalog.pg_roles")
            )
        }
        available = {
            name for (name,) in await rows(ends.target, sql.SQL("SELECT name FROM pg_catalog.pg_available_extensions"))
        }
    wanted = [*(sight.owners if choice.has_owners else ()), *(sight.others if choice.has_privileges else ())]
    missing = [name for name in wanted if name not in known and name != sight.reader]
    if not has_roles and missing:
        yield TargetRefused(
            f"target: roles of the publisher are missing: {', '.join(missing)}",
            hint="--roles makes them; or --no-owner and --no-privileges leave owners and privileges out",
        )
    foreign = [name for name in sight.owners if name in known and not known[name]]
    if choice.has_owners and foreign:
        yield TargetRefused(
            f"target: the role may not make what {', '.join(foreign)} own",
            hint=f"GRANT {shown_list([(name,) for name in foreign])} TO the target's role, or --no-owner, and it"
            " owns everything",
        )
    if absent := [name for name in sight.extensions if name not in available]:
        yield TargetRefused(
            f"target: extensions are not installed: {', '.join(absent)}",
            hint="install their packages on the target's server",
        )


def few(names: Collection[Name]) -> str:
    """Return the first names, and the number of the others."""
    return amounts.few([".".join(name) for name in names], _MOST_NAMES)
