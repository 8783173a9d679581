"""The state schema on the target: its tables, the view people read, and their comments.

In: an open connection and a schema name. Out: the schema, of the version this program writes.
Must never create an unlogged table: a crash would empty it while the rows it speaks of stay (T-16, F7).
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from typing import TYPE_CHECKING

from psycopg import sql

from parapply.errors import TargetRefused
from parapply.model import format_lsn
from parapply.state_mark import STATE_COMMENT
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.comments import COMMENTS
from parapply.target.state.functions import functions
from parapply.target.state.upgrades import UPGRADES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from parapply.target.session.settings import Connection

#: A newer one on the target is refused, an older one is brought up to this.
SCHEMA_VERSION = UPGRADES[-1].version

#: slot_id starts at a random number below this. Locks and prepared transactions are named after the slot_id, and
#: are shared by all state schemas of a database (or a cluster), which must not meet. Times two it still fits an int.
_SLOT_ID_LIMIT = 1_000_000_000

#: Key of the transaction lock under which the schema is made: two `CREATE ... IF NOT EXISTS` at once can collide.
_DDL_LOCK_KEY = 0x70617261_70706C79

#: Version 1; what came since is in `state_upgrades`.
_TABLES = """
CREATE SCHEMA IF NOT EXISTS {s};
CREATE TABLE IF NOT EXISTS {s}.schema_version (
    version int NOT NULL, created_at timestamptz NOT NULL DEFAULT pg_catalog.now());
CREATE UNIQUE INDEX IF NOT EXISTS schema_version_one_row ON {s}.schema_version ((true));
CREATE TABLE IF NOT EXISTS {s}.slots (
    slot_id int GENERATED ALWAYS AS IDENTITY (START WITH {start}) PRIMARY KEY,
    slot_name text NOT NULL,
    system_identifier text NOT NULL,
    timeline int NOT NULL,
    database_name text NOT NULL,
    publications text[] NOT NULL,
    lowest_lsn pg_lsn NOT NULL,
    highest_lsn pg_lsn NOT NULL,
    confirmed_flush_lsn pg_lsn,
    source_lsn pg_lsn,
    last_commit_time timestamptz,
    lag_s double precision,
    commit_order text NOT NULL,
    workers int NOT NULL,
    state text NOT NULL,
    reason text NOT NULL DEFAULT '',
    host text NOT NULL DEFAULT '',
    pid int,
    version text NOT NULL DEFAULT '',
    started_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    UNIQUE (slot_name, system_identifier)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS {s}.applied (
    slot_id int NOT NULL REFERENCES {s}.slots,
    end_lsn pg_lsn NOT NULL,
    first_lsn pg_lsn NOT NULL,
    members pg_lsn[],
    low_lsn pg_lsn NOT NULL,
    commit_time timestamptz NOT NULL,
    n_transactions int NOT NULL,
    PRIMARY KEY (slot_id, end_lsn));
CREATE TABLE IF NOT EXISTS {s}.workers (
    slot_id int NOT NULL REFERENCES {s}.slots,
    worker int NOT NULL,
    pid int,
    state text NOT NULL,
    batch_seq bigint,
    end_lsn pg_lsn,
    waits_for text,
    since timestamptz,
    transactions bigint NOT NULL,
    changes bigint NOT NULL,
    PRIMARY KEY (slot_id, worker)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS {s}.tables (
    slot_id int NOT NULL REFERENCES {s}.slots,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    lane text NOT NULL,
    is_table_exclusive bool NOT NULL,
    reason text NOT NULL,
    key_columns text[] NOT NULL,
    retries bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    PRIMARY KEY (slot_id, schema_name, table_name));
CREATE OR REPLACE VIEW {s}.progress AS
SELECT slot.slot_name,
       low.lowest_lsn AS lowest_remote_lsn,
       GREATEST(slot.highest_lsn, done.highest_lsn) AS highest_remote_lsn,
       ARRAY(SELECT DISTINCT member.end_lsn
               FROM {s}.applied AS batch,
                    pg_catalog.unnest(COALESCE(batch.members, ARRAY[batch.first_lsn, batch.end_lsn])) AS member(end_lsn)
              WHERE batch.slot_id = slot.slot_id AND member.end_lsn > low.lowest_lsn
              ORDER BY 1) AS list_remote_lsn,
       0 AS in_doubt,
       slot.confirmed_flush_lsn,
       GREATEST(slot.source_lsn - low.lowest_lsn, 0)::bigint AS lag_bytes,
       slot.lag_s,
       slot.commit_order,
       slot.workers,
       slot.state,
       slot.reason,
       slot.updated_at
  FROM {s}.slots AS slot
 CROSS JOIN LATERAL (SELECT pg_catalog.max(a.low_lsn) AS low_lsn, pg_catalog.max(a.end_lsn) AS highest_lsn
                       FROM {s}.applied AS a WHERE a.slot_id = slot.slot_id) AS done
 CROSS JOIN LATERAL (SELECT GREATEST(slot.lowest_lsn, done.low_lsn) AS lowest_lsn) AS low;
"""

_DROP = "DROP FUNCTION {s}.wait_for; DROP TABLE {s}.tables, {s}.workers, {s}.applied, {s}.slots, {s}.schema_version"


async def ensure_schema(conn: Connection, schema: str) -> bool:
    """Create the state schema where it is missing, upgrade an older one, and check it where it is there.

    An existing schema of this version is only read, so that a role without CREATE can run the daemon. An upgrade waits
    for a daemon that writes to the schema no longer than a statement of it; an older daemon refuses it when it starts.

    Args:
        conn: control session.
        schema: name of the state schema, any name PostgreSQL takes.

    Returns:
        Whether it was missing.

    Raises:
        TargetRefused: a newer version, an unlogged table (F7), or a privilege is missing.
        TargetLost: the connection broke.
    """
    with target_errors(f"creating the state schema {schema!r}"):
        found = await _version(conn, schema)
        is_new = found is None
        if found is None or 0 < found < SCHEMA_VERSION:
            await _bring_up(conn, schema)
            found = await _version(conn, schema)
        if found != SCHEMA_VERSION:
            raise _unknown(schema, found)
        # One is of the event triggers of `init --ddl=automatic`, where the target is a publisher, too.
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
    return is_new


def is_of_state(table: str, columns: Collection[str]) -> bool:
    """Tell whether a table that is gone, and is known by name and columns only, was one of a state schema."""
    found = COMMENTS.get(("TABLE", table))
    return found is not None and len(columns) > 1 and set(columns) <= set(found[1])


async def has_schema(conn: Connection, schema: str) -> bool:
    """Tell whether the state schema is there, of this version or an older one.

    Raises:
        TargetRefused: it is of a newer version, or a privilege is missing.
        TargetLost: the connection broke.
    """
    with target_errors("looking for the state schema"):
        found = await _version(conn, schema)
    if found is not None and found > SCHEMA_VERSION:
        raise _unknown(schema, found)
    return found is not None


def _unknown(schema: str, found: int | None) -> TargetRefused:
    return TargetRefused(
        f"state schema {schema!r} has version {found}; this parapply knows version {SCHEMA_VERSION}",
        hint="run the parapply that wrote it, or a newer one",
    )


async def refuse_older(conn: Connection, schema: str) -> None:
    """Refuse tables of an older version, for what reads them and must not change them.

    Raises:
        TargetRefused: they are, or a privilege is missing.
        TargetLost: the connection broke.
    """
    with target_errors("looking for the state schema"):
        found = await _version(conn, schema)
    if found is not None and found < SCHEMA_VERSION:
        raise TargetRefused(
            f"state schema {schema!r} has version {found}; this parapply shows version {SCHEMA_VERSION}",
            hint="the next `parapply run` or `parapply migrate` of this version upgrades it, and an older daemon "
            "refuses it from then on; until then ask with the older parapply",
        )


async def _version(conn: Connection, schema: str) -> int | None:
    there = sql.SQL(
        "SELECT 1 FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname = $1 AND c.relname = 'schema_version_one_row'"
    )
    if not await rows(conn, there, [schema]):
        return None
    query = sql.SQL("SELECT version FROM {s}.schema_version").format(s=sql.Identifier(schema))
    found = await rows(conn, query)
    return int(found[0][0]) if found else 0


async def _bring_up(conn: Connection, schema: str) -> None:
    """Make the schema, or take an older one through the versions that it lacks, in one transaction."""
    name = sql.Identifier(schema)
    start = sql.Literal(secrets.randbelow(_SLOT_ID_LIMIT) + 1)
    async with conn.transaction():
        await rows(conn, sql.SQL("SELECT pg_catalog.pg_advisory_xact_lock($1)"), [_DDL_LOCK_KEY])
        found = await _version(conn, schema)
        if found is None:
            await _check_free(conn, schema)
            await conn.execute(sql.SQL(_TABLES).format(s=name, start=start))
            await rows(conn, sql.SQL("INSERT INTO {s}.schema_version (version) VALUES (1)").format(s=name))
            found = 1
        missing = [upgrade for upgrade in UPGRADES if upgrade.version > found]
        if not missing:
            return
        await conn.execute(sql.Composed([in_schema(upgrade.text, schema) for upgrade in missing]))
        await conn.execute(sql.Composed([*_comments(schema), functions(schema)]))
        # It has no key, and a publication FOR ALL TABLES of a database that was a source until now takes it, too.
        await conn.execute(sql.SQL("ALTER TABLE {s}.schema_version REPLICA IDENTITY FULL").format(s=name))
        await rows(conn, sql.SQL("UPDATE {s}.schema_version SET version = $1").format(s=name), [missing[-1].version])


async def _check_free(conn: Connection, schema: str) -> None:
    """Refuse a schema with tables of others: all of a state schema is left out where its server is a publisher.

    Raises:
        TargetRefused: there are some.
    """
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
    for (kind, relation), (comment, columns) in COMMENTS.items():
        statement = sql.SQL("COMMENT ON VIEW {} IS {};" if kind == "VIEW" else "COMMENT ON TABLE {} IS {};")
        yield statement.format(sql.Identifier(schema, relation), sql.Literal(comment))
        for column, text in columns.items():
            name = sql.Identifier(schema, relation, column)
            yield sql.SQL("COMMENT ON COLUMN {} IS {};").format(name, sql.Literal(text))


async def drop_schema(conn: Connection, schema: str) -> bool:
    """Drop the state schema if no slot is left in it; say whether it went.

    Only our own objects go: a schema with objects of others stays, without ours.

    Raises:
        TargetRefused: a privilege is missing.
        TargetLost: the connection broke.
    """
    with target_errors(f"dropping the state schema {schema!r}"):
        if await _version(conn, schema) is None:
            return False
        async with conn.transaction():
            # Between the check and the drop no new slot may come.
            lock = sql.SQL("LOCK TABLE {s}.slots IN ACCESS EXCLUSIVE MODE").format(s=sql.Identifier(schema))
            await rows(conn, lock)
            left = sql.SQL("SELECT 1 FROM {s}.slots LIMIT 1").format(s=sql.Identifier(schema))
            if await rows(conn, left):
                return False
            await conn.execute(in_schema(" ".join([upgrade.drop for upgrade in reversed(UPGRADES)]) + _DROP, schema))
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


def lsn_text(lsn: int | None) -> str | None:
    """Return an LSN as a parameter; None is NULL."""
    return None if lsn is None else format_lsn(lsn)


def gone(slot_id: int) -> TargetRefused:
    """Return the error for a slot whose row is no longer there."""
    return TargetRefused(
        f"the state of slot {slot_id} is no longer on the target",
        hint="was `parapply drop` run, or the target restored? Nothing more is confirmed to the publisher",
    )
