"""The state schema on the target: its tables, the view people read, and their comments.

In: an open connection and a schema name. Out: the schema, of the version this program writes.
Must never create an unlogged table: a crash would empty it while the rows it speaks of stay (T-16, F7).
"""

from __future__ import annotations

import re
import secrets
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from psycopg import sql

from parapply.errors import StateClosed, TargetRefused
from parapply.model import parse_lsn
from parapply.state_mark import STATE_COMMENT
from parapply.target.catalogue.query import MAY
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from parapply.target.session.settings import Connection

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

#: Version of the layout in `schema.sql`. No other one is read or changed; `ensure_schema` would bring an older one up.
SCHEMA_VERSION = 24

#: slot_id starts at a random number below this. Locks and prepared transactions are named after the slot_id, and
#: all state schemas of a database (or a cluster) share these names, so slot_ids must differ. Times two it still fits an
#: int.
_SLOT_ID_LIMIT = 1_000_000_000

#: Statements against rights that nothing here gives. The queue of commands is not of the state.
_REVOKES = """
SELECT DISTINCT pg_catalog.format('REVOKE ALL ON %I.%I FROM %s', n.nspname, c.relname,
                                  COALESCE(pg_catalog.quote_ident(r.rolname), 'PUBLIC'))
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) AS a LEFT JOIN pg_catalog.pg_roles AS r ON r.oid = a.grantee
 WHERE n.nspname = $1 AND c.relname !~ '^ddl_(queue|running)' AND a.grantee <> c.relowner"""

#: True for a role that may do something only a superuser grants, as subscriber.sql does: it is a daemon's role.
_APPLIES = """(pg_catalog.has_parameter_privilege({0}, 'session_replication_role', 'SET')
    OR pg_catalog.has_function_privilege({0}, 'pg_catalog.pg_replication_origin_create(text)', 'EXECUTE'))"""

#: The schema: whether it is a state schema, whose version can be read; whether this role is more than a reader; and a
#: role that owns the schema or something of the names $2, by whose code it would be used, with the remedy. Trusted are
#: those who may become this role or the database's owner, and roles of daemons. To own all of a state proves nothing,
#: since who makes one to run code owns it. Nor does a membership of this role, since a superuser is a member of all.
_LOOK = f"""
SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.relnamespace = n.oid
                                                      AND c.relname = 'schema_version_one_row'),
       COALESCE(t.relkind = 'r', false), {_APPLIES.format("CURRENT_USER")}, doubted.owner, doubted.remedy
  FROM pg_catalog.pg_namespace AS n JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
  LEFT JOIN pg_catalog.pg_class AS t ON t.relnamespace = n.oid AND t.relname = 'schema_version'
  LEFT JOIN LATERAL (
       SELECT r.rolname AS owner,
              CASE WHEN NOT has_table
                   THEN pg_catalog.format('ALTER SCHEMA %1$I OWNER TO %2$I; GRANT USAGE ON SCHEMA %1$I TO %3$I;',
                          n.nspname, COALESCE(pg_catalog.pg_get_userbyid(t.relowner), CURRENT_USER), r.rolname)
                   -- A role that is a member, as a superuser is, cannot or must not be granted to the owner.
                   WHEN pg_catalog.pg_has_role(CURRENT_USER, r.oid, 'MEMBER')
                   THEN pg_catalog.format('GRANT SET ON PARAMETER session_replication_role TO %I;', r.rolname)
                   ELSE pg_catalog.format('GRANT %I TO %I;', CURRENT_USER, r.rolname) END AS remedy
         FROM (SELECT n.nspowner, false UNION ALL
               SELECT c.relowner, true FROM pg_catalog.pg_class AS c
                WHERE c.relnamespace = n.oid AND c.relname = ANY ($2::pg_catalog.name[])) AS owned(oid, has_table)
         JOIN pg_catalog.pg_roles AS r ON r.oid = owned.oid
        WHERE r.rolname <> 'pg_database_owner' AND NOT pg_catalog.pg_has_role(r.oid, CURRENT_USER, {MAY})
          AND NOT pg_catalog.pg_has_role(r.oid, d.datdba, {MAY}) AND NOT {_APPLIES.format("r.oid")}
        ORDER BY has_table DESC LIMIT 1) AS doubted ON true
 WHERE n.nspname = $1"""  # noqa: S608  constants

_DROP = "DROP FUNCTION {s}.wait_for; DROP VIEW {s}.progress, {s}.prepared; DROP TABLE"

#: Key of the transaction lock under which the schema is made: two `CREATE ... IF NOT EXISTS` at once can collide.
_DDL_LOCK_KEY = 0x70617261_70706C79

#: Everything that is in it; the comments on tables, views and columns stand behind them.
_TABLES = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
#: Names of its tables and views; each start asks for their owners, and `comments` takes a millisecond.
_MADE = re.compile(r"^CREATE (?:TABLE|VIEW) \{s\}\.(\w+)", re.MULTILINE)


@cache
def comments() -> dict[tuple[str, str], tuple[str, dict[str, str]]]:
    """Return the comments on each table and view, by kind (TABLE, VIEW) and name: its own, and its columns'."""
    found = {}
    for kind, body in re.findall(r"^CREATE (TABLE|VIEW) \{s\}\.(.*?);$", _TABLES, re.MULTILINE | re.DOTALL):
        (words, own), *columns = (
            (re.findall(r"\w+", code), " ".join(re.findall("-- (.*)", comment)))
            # Behind a view's FROM a comment is about the query.
            for code, comment in re.findall(r"^(.*\S)((?:\s+-- .*)+)$", body.partition("\n  FROM ")[0], re.MULTILINE)
        )
        found[kind, words[0]] = own, {words[0 if kind == "TABLE" else -1]: text for words, text in columns}
    return found


async def ensure_schema(conn: Connection, schema: str) -> bool:
    """Create the state schema where it is missing, and check it where it exists; return True if it was missing.

    An existing schema is only read, so that a role without CREATE can run the daemon. Errors as of `check_schema`.
    """
    is_new = not await check_schema(conn, schema)
    if is_new:
        with target_errors(f"creating the state schema {schema!r}"):
            await _create(conn, schema)
    return is_new


async def check_schema(conn: Connection, schema: str) -> bool:
    """Return whether the state schema exists.

    Raises:
        TargetRefused: as of `has_schema`, or it has an unlogged table (F7).
    """
    if not await has_schema(conn, schema):
        return False
    with target_errors(f"looking at the state schema {schema!r}"):
        # One table is of the event triggers of `init --ddl=automatic`, where the target is also a publisher.
        query = sql.SQL(
            "SELECT c.relname FROM pg_catalog.pg_class AS c WHERE c.relnamespace = (SELECT oid FROM"
            " pg_catalog.pg_namespace WHERE nspname = $1) AND c.relkind IN ('r', 'p') AND c.relpersistence <> 'p'"
            " AND c.relname <> 'ddl_running' ORDER BY 1"
        )
        unlogged = [str(name) for (name,) in await rows(conn, query, [schema])]
    if unlogged:
        raise TargetRefused(
            f"state schema {schema!r}: {', '.join(unlogged)} is UNLOGGED: a crash would empty it",
            hint="stop here: if the server crashed since, progress is lost; else ALTER TABLE ... SET LOGGED",
        )
    return True


async def state_rows(
    conn: Connection, schema: str, doing: str, query: str, params: Sequence[object] = ()
) -> list[tuple[Any, ...]]:
    """Run one statement with `$1` style parameters on a state schema, `{s}` in it, and return its rows.

    Raises:
        TargetRefused: a privilege is missing, or the state schema is.
    """
    with target_errors(doing):
        return await rows(conn, in_schema(query, schema), params)


def struct_of(kind: type[_Struct], row: Sequence[Any]) -> _Struct:
    """Return a row as a struct: its columns are in the order of the fields, an LSN is text. Later fields stay."""
    values = dict(zip(kind.__struct_fields__, row, strict=False))
    lsns = {name: parse_lsn(text) for name, text in values.items() if name.endswith("lsn") and text is not None}
    return msgspec.convert(values | lsns, kind)


async def update_slot(conn: Connection, schema: str, doing: str, query: str, params: Sequence[Any]) -> None:
    """Run a statement whose $1 is the slot's id, and raise TargetRefused if it returns no row: the slot's is gone."""
    if not await state_rows(conn, schema, doing, query, params):
        raise gone(params[0])


def is_of_state(table: str, columns: Collection[str]) -> bool:
    """Return whether a table that is gone, and is known by name and columns only, was one of a state schema."""
    found = comments().get(("TABLE", table))
    return found is not None and len(columns) > 1 and set(columns) <= set(found[1])


async def has_schema(conn: Connection, schema: str, *, only_reads: bool = False) -> bool:
    """Return whether the state schema exists; a session that `only_reads` may be of a role that its owner is not.

    Raises:
        StateClosed: it is of another version.
        TargetRefused: its owner could have code run as the session's role.
    """
    with target_errors("looking for the state schema"):
        found = await _version(conn, schema, only_reads=only_reads)
    if found is None or found == SCHEMA_VERSION:
        return found is not None
    raise StateClosed(
        f"state schema {schema!r} has version {found}; this parapply knows version {SCHEMA_VERSION}",
        hint="run the parapply that wrote it, or a newer one"
        if found > SCHEMA_VERSION
        else "go on with the parapply that wrote it; or end it there with `parapply drop`, and begin with this one: "
        "`parapply init --copy --truncate` copies all rows again",
    )


async def _version(conn: Connection, schema: str, *, only_reads: bool = False) -> int | None:
    found = await rows(conn, sql.SQL(_LOOK), [schema, _MADE.findall(_TABLES)])
    is_ours, is_table, applies, owner, remedy = found[0] if found else (False, False, False, None, "")
    # A daemon's role need not have rights that show it, and a role of monitoring reads its state all the same.
    if owner is not None and (applies or not only_reads):
        way = "connect as its owner; or, if a daemon has that role, " if remedy.startswith("GRANT") else ""
        if not is_ours:  # else a state would be left, and another one begun
            way = "name another schema, which is made; or, "
        raise TargetRefused(
            f"target.state_schema = {schema!r} belongs to the role {owner!r}, whose code could run as this one",
            hint=f"{way}as an administrator: {remedy}",
        )
    if not is_ours:
        return None
    if not is_table:
        raise TargetRefused(
            f"target.state_schema = {schema!r} holds a schema_version that is no table", hint="name another schema"
        )
    query = sql.SQL("SELECT version FROM {s}.schema_version").format(s=sql.Identifier(schema))
    found = await rows(conn, query)
    return int(found[0][0]) if found else 0


async def _create(conn: Connection, schema: str) -> None:
    name = sql.Identifier(schema)
    start = sql.Literal(secrets.randbelow(_SLOT_ID_LIMIT) + 1)
    async with conn.transaction():
        await rows(conn, sql.SQL("SELECT pg_catalog.pg_advisory_xact_lock($1)"), [_DDL_LOCK_KEY])
        if await _version(conn, schema) is not None:
            return
        await _check_free(conn, schema)
        made, grant, granted = _TABLES.partition("\nGRANT ")
        await conn.execute(sql.Composed([sql.SQL(made).format(s=name, start=start), *_comments(schema)]))
        # Default privileges, as of roles for other daemons, would let these move the progress, or read values.
        revokes = [text for (text,) in await rows(conn, sql.SQL(_REVOKES), [schema])]
        await conn.execute("; ".join([*revokes, in_schema(grant + granted, schema).as_string(None)]).encode())
        query = sql.SQL("INSERT INTO {s}.schema_version (version) VALUES ($1)").format(s=name)
        await rows(conn, query, [SCHEMA_VERSION])
        await _version(conn, schema)  # refuses a schema that another role made after the first look


async def _check_free(conn: Connection, schema: str) -> None:
    """Refuse a schema with tables of others: all of a state schema is left out where its server is a publisher."""
    query = sql.SQL(
        "SELECT c.relname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname = $1 AND c.relkind IN ('r', 'p', 'f', 'm')"
        " AND NOT (n.nspname = 'parapply' AND c.relname IN ('ddl_queue', 'ddl_running')) ORDER BY 1 LIMIT 1"
    )
    if found := await rows(conn, query, [schema]):
        raise TargetRefused(
            f"target.state_schema = {schema!r} holds tables of others, such as {found[0][0]}",
            hint="name a schema for parapply alone: it is made, and nothing in it counts as the application's",
        )


def _comments(schema: str) -> Iterator[sql.Composed]:
    yield sql.SQL("COMMENT ON SCHEMA {} IS {};").format(sql.Identifier(schema), sql.Literal(STATE_COMMENT))
    for (kind, relation), (comment, columns) in comments().items():
        statement = sql.SQL("COMMENT ON VIEW {} IS {};" if kind == "VIEW" else "COMMENT ON TABLE {} IS {};")
        yield statement.format(sql.Identifier(schema, relation), sql.Literal(comment))
        for column, text in columns.items():
            name = sql.Identifier(schema, relation, column)
            yield sql.SQL("COMMENT ON COLUMN {} IS {};").format(name, sql.Literal(text))


async def drop_schema(conn: Connection, schema: str) -> bool:
    """Drop the state schema if neither slot nor migration is left in it; return whether it was dropped.

    Only our own objects go: a schema with objects of others stays, without ours.
    """
    with target_errors(f"dropping the state schema {schema!r}"):
        if await _version(conn, schema) is None:
            return False
        async with conn.transaction():
            # Between the check and the drop nothing new may come.
            lock = "LOCK TABLE {s}.slots, {s}.migrations, {s}.migration_items IN ACCESS EXCLUSIVE MODE"
            await rows(conn, in_schema(lock, schema))
            # The first steps of a migration come before its slot; an item alone is of none.
            left = "SELECT 1 FROM {s}.slots UNION ALL SELECT 1 FROM {s}.migrations LIMIT 1"
            if await rows(conn, in_schema(left, schema)):
                return False
            tables = [f"{{s}}.{name}" for kind, name in comments() if kind == "TABLE"]
            await conn.execute(in_schema(f"{_DROP} {', '.join(tables)}", schema))
            others = sql.SQL(
                "SELECT 1 FROM pg_catalog.pg_depend WHERE refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass"
                " AND refobjid = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1) LIMIT 1"
            )
            if await rows(conn, others, [schema]):
                return False
            await conn.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(schema)))
            return True


@lru_cache(maxsize=256)
def in_schema(text: str, schema: str) -> sql.Composed:
    """Put the quoted name of the state schema where the text says {s}."""
    return sql.SQL(text).format(s=sql.Identifier(schema))


def gone(slot_id: int) -> TargetRefused:
    """Return the error for a slot whose row is no longer there."""
    return TargetRefused(
        f"the state of slot {slot_id} is no longer on the target",
        hint="was `parapply drop` run, or the target restored? Nothing more is confirmed to the publisher",
    )
