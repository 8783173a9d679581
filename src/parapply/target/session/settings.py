"""Session settings of every target session, and the checks a target must pass before it is used.

In: a DSN or an open connection and plain strings. Out: SQL texts, a pinned connection, or one of our errors.
Also the one place where errors of a psycopg connection to the target become ours (`target_error`).
Must never read the configuration and never start a task.

Source: PostgreSQL manual, "Server Configuration"; traps F26, F32, F37, T-34, T-44, T-62 to T-64, T-72.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import psycopg
from psycopg import conninfo, sql

from parapply.driver import Session, dsn_problem, lost_hint, parameters_of
from parapply.errors import ConfigError, TargetLost, TargetRefused
from parapply.quoting import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.login import Login

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
Kind: TypeAlias = Literal["worker", "control"]

#: Seconds to wait for a TCP connection to the target; libpq would wait for the kernel, which is minutes.
CONNECT_TIMEOUT_S = 10

#: Parameters of every connection, unless the DSN says otherwise. A target that goes silently is noticed in a minute;
#: the kernel alone takes a quarter of an hour with data on its way, and two hours without (F16).
_CLIENT_PARAMETERS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
#: Milliseconds; of sessions that ask short questions only. The kernel also counts the time in which a living server
#: does not read, so a worker whose statement waits for a lock, with more sent than the server's buffer takes, would
#: lose its session. The control session notices a server that is gone, and then every session is closed.
_QUESTION_TIMEOUT_MS = 30_000


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One pinned server setting."""

    name: str
    value: str
    reason: str
    since: int = 0  # server_version_num of the first server that knows it
    workers_only: bool = False


#: Everything an ALTER ROLE or ALTER DATABASE could have changed under us. `session_replication_role` and
#: `synchronous_commit` are not here: their values come from the configuration (see `pinning`).
SETTINGS: tuple[Setting, ...] = (
    Setting(name="client_encoding", value="UTF8", reason="the publisher sends UTF8; an unmappable character must fail"),
    Setting(
        name="default_transaction_isolation",
        value="read committed",
        reason="a statement must see what its dependency committed after our snapshot began (T-34)",
    ),
    Setting(name="default_transaction_read_only", value="off", reason="we write"),
    Setting(name="default_transaction_deferrable", value="off", reason="would wait for a safe snapshot"),
    Setting(name="statement_timeout", value="0", reason="a large batch is one statement; waiting is our business"),
    Setting(name="lock_timeout", value="0", reason="the head of the queue must wait, not fail"),
    Setting(
        name="idle_in_transaction_session_timeout",
        value="0",
        reason="a worker that waits for its turn to commit is idle in a transaction (T-72)",
    ),
    Setting(name="transaction_timeout", value="0", since=170000, reason="as above"),
    Setting(name="idle_session_timeout", value="0", since=140000, reason="workers idle while the source is idle"),
    Setting(name="row_security", value="off", reason="a policy that hides a row must be an error, not UPDATE 0 (T-63)"),
    Setting(
        name="search_path",
        value="pg_catalog, pg_temp",
        reason="no name of ours is unqualified, and no user's object may shadow a catalogue one (T-60, T-64)",
    ),
    Setting(name="DateStyle", value="ISO, YMD", reason="text values travel both ways unchanged (T-44)"),
    Setting(name="IntervalStyle", value="postgres", reason="as DateStyle"),
    Setting(name="TimeZone", value="UTC", reason="as DateStyle"),
    Setting(name="extra_float_digits", value="3", reason="floats must print all their digits"),
    Setting(name="bytea_output", value="hex", reason="as DateStyle"),
    Setting(name="lc_monetary", value="C", reason="money is read with the separators the publisher's session wrote"),
    Setting(name="xmloption", value="content", reason="an xml fragment is a legal value; 'document' refuses it"),
    Setting(name="array_nulls", value="on", reason="off reads NULL in an array as the string 'NULL'"),
    Setting(name="standard_conforming_strings", value="on", reason="our quoting relies on it"),
    Setting(name="quote_all_identifiers", value="off", reason="as DateStyle, for reg* values"),
    Setting(
        name="gin_fuzzy_search_limit",
        value="0",
        reason="a lookup through a GIN index (btree_gin, jsonb) must find every row, not some at random",
    ),
    Setting(
        name="parapply.record_ddl",
        value="off",
        reason="a target may be a publisher with event triggers of `init --ddl=automatic`: what came is not sent on",
    ),
    Setting(name="jit", value="off", reason="compiling a statement of some milliseconds costs more than it"),
    Setting(
        name="client_connection_check_interval",
        value="1s",
        since=140000,
        reason="the backend of a dead client must stop working within about a second (F2)",
    ),
    Setting(name="tcp_user_timeout", value="30s", reason="unacknowledged data to a dead client ends the session (F16)"),
    Setting(name="tcp_keepalives_idle", value="30", reason="an idle session of a dead client must end (F15, F20)"),
    Setting(name="tcp_keepalives_interval", value="10", reason="as tcp_keepalives_idle"),
    Setting(name="tcp_keepalives_count", value="3", reason="as tcp_keepalives_idle"),
    Setting(
        name="plan_cache_mode",
        value="force_generic_plan",
        workers_only=True,
        reason="planning each execution costs more than applying it",
    ),
    Setting(
        name="enable_seqscan",
        value="off",
        workers_only=True,
        reason="a lookup by key uses the key's index whatever the statistics say when the plan is made",
    ),
    Setting(name="enable_hashjoin", value="off", workers_only=True, reason="it would read the whole table"),
    Setting(name="enable_mergejoin", value="off", workers_only=True, reason="as enable_hashjoin"),
)


@lru_cache
def pinning(kind: Kind, server_version_num: int, role: str, synchronous_commit: str) -> str:
    """Return the statement that pins the settings of a new session.

    One for all of them: the result of each statement costs psycopg a tenth of a millisecond, for each session of a
    start. session_replication_role comes first and needs a privilege: map its SQLSTATE 42501 with `target_errors`.

    Args:
        kind: `worker` applies; `control` holds the lease and writes progress. A control session commits
            synchronously whatever the configuration says: what it reports to the publisher must be durable (T-1).
        server_version_num: as `SHOW server_version_num`, for example 180004.
        role: session_replication_role, `replica` or `origin`.
        synchronous_commit: for worker sessions.
    """
    commit = "on" if kind == "control" else synchronous_commit
    pairs = [("synchronous_commit", commit), *_pairs(server_version_num, is_worker=kind == "worker")]
    return _set_all([("session_replication_role", role), *pairs])


@lru_cache
def _reading(server_version_num: int) -> str:
    """Return the statement that pins the settings of a session that only reads, under any role."""
    return _set_all([*_pairs(server_version_num, is_worker=False), ("default_transaction_read_only", "on")])


def _pairs(server_version_num: int, *, is_worker: bool) -> list[tuple[str, str]]:
    return [
        (setting.name, setting.value)
        for setting in SETTINGS
        if server_version_num >= setting.since and (is_worker or not setting.workers_only)
    ]


async def may_take_role(conn: Connection, role: str) -> bool:
    """Return whether a session of this role may have a session_replication_role, which is tried and taken back.

    No catalogue knows it where a provider has changed the server, or where the role has the setting already.

    Raises:
        psycopg.Error: another one than a missing privilege.
    """
    try:
        async with conn.transaction(force_rollback=True):
            await conn.execute(_set_all([("session_replication_role", role)]).encode())
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def _set_all(pairs: Sequence[tuple[str, str]]) -> str:
    # search_path and DateStyle are lists: set_config takes the whole list as one text, SET would quote it as one name.
    # No `sql.Literal`, which takes a start milliseconds: names and values are ours, or checked by the configuration.
    template = "pg_catalog.set_config({0}, {1}, false)"
    # A role may not even set session_replication_role to what it is.
    careful = f"CASE pg_catalog.current_setting({{0}}) WHEN {{1}} THEN {{1}} ELSE {template} END"
    calls = [
        (careful if name == "session_replication_role" else template).format(literal(name), literal(value))
        for name, value in pairs
    ]
    return f"SELECT {', '.join(calls)}"


@contextmanager
def target_errors(doing: str) -> Iterator[None]:
    """Turn errors of psycopg into ours; every other exception passes.

    Args:
        doing: what was attempted, for the message, for example "reading the state".

    Raises:
        ConfigError: libpq refuses the DSN.
        TargetRefused: a privilege, an object or a setting is wrong; retrying does not help.
        TargetLost: the connection broke or the server is short of something; read the state again and retry.
    """
    try:
        yield
    except psycopg.Error as error:
        raise target_error(doing, error) from error


#: Hints about a missing privilege: the first whose words are in the server's text.
_PRIVILEGES = {
    "session_replication_role": "GRANT SET ON PARAMETER session_replication_role TO the target's role (PostgreSQL 15 "
    "and later; before that it takes a superuser), or set target.session_replication_role = 'origin' if triggers, "
    "rules and foreign keys shall act on applied rows",
    "must be owner": "make the target's role the owner, or a member of the role that is",
    "": "grant the target's role what is missing: config/roles/subscriber.sql does",
}


_READ_ONLY_HINT = "point target.dsn to the primary, for example with target_session_attrs=read-write and all hosts"
_SCHEMA_HINT = "run `parapply init` to create the state schema, or check target.state_schema"
LOCKS_HINT = (
    "if transactions lock many tables and indexes, raise max_locks_per_transaction of the target, which takes a restart"
)
#: SQLSTATE: hint, for errors that no retry helps.
_REFUSALS = {"25006": _READ_ONLY_HINT, "42P01": _SCHEMA_HINT, "3F000": _SCHEMA_HINT}
#: The same for errors that may pass without help.
_SHORTAGES = {"53200": LOCKS_HINT}


def target_error(doing: str, error: psycopg.Error) -> ConfigError | TargetRefused | TargetLost:
    """Return the error of ours to raise, as `target_errors` does."""
    if problem := dsn_problem(error):
        return ConfigError(
            f"target.dsn: {problem}", hint="correct target.dsn, or the variable or service it comes from"
        )
    text = f"target, {doing}: {first_line(error)}"
    if error.sqlstate == "42501":
        return TargetRefused(text, hint=next(hint for words, hint in _PRIVILEGES.items() if words in str(error)))
    if error.sqlstate == "55000" and "publishes" in str(error):
        hint = "a publication of this server takes the table: give it a replica identity, or publish tables by name"
        return TargetRefused(text, hint=hint)
    if error.sqlstate in _REFUSALS:
        return TargetRefused(text, hint=_REFUSALS[error.sqlstate])
    # The server has ended the session, which psycopg calls an internal error.
    has_stood_still = isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout)
    if has_stood_still or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return TargetLost(text, hint=_SHORTAGES.get(error.sqlstate or "") or lost_hint(error, text))
    return TargetRefused(text)


def first_line(error: psycopg.Error) -> str:
    """Return the server's primary message, or libpq's first line, without DETAIL (it can hold row values)."""
    return error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]


async def rows(conn: Connection, query: sql.Composed | sql.SQL, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    """Run one statement with `$1` style parameters and return its rows; [] for a statement without a result.

    A raw cursor, because psycopg's own placeholders stumble over a percent sign inside a quoted name (T-60).
    """
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(query, params)
        return await cursor.fetchall() if cursor.description else []


#: server_version_num of the first server whose sessions may share a replication origin.
SHARED_ORIGINS_SINCE = 190000


class TargetSettings(NamedTuple):
    """Settings of a server that a daemon or a copy has to know."""

    #: It remembers when rows were committed, and by which origin.
    tracks_commits: bool
    #: Sessions with an origin give their transactions the source's commit time. Where the right for it is missing, none
    #: does, and readers of the target's WAL get false times; a server that tracks them refuses the transaction instead.
    may_stamp: bool
    #: Number of tables and indexes that all its sessions together can have locked.
    lock_places: int
    #: Several sessions may write under one replication origin.
    shares_origins: bool


_TARGET_SETTINGS = sql.SQL(
    "SELECT pg_catalog.current_setting('track_commit_timestamp')::bool,"
    " pg_catalog.has_function_privilege("
    "'pg_catalog.pg_replication_origin_xact_setup(pg_lsn,timestamptz)'::regprocedure, 'EXECUTE'),"
    " pg_catalog.current_setting('max_locks_per_transaction')::int8 *"
    " (SELECT pg_catalog.sum(pg_catalog.current_setting(one.name)::int8)"
    " FROM unnest('{max_connections,max_prepared_transactions,autovacuum_max_workers,max_worker_processes,"
    "max_wal_senders}'::text[]) AS one (name))::int8"
)


async def target_settings(conn: Connection) -> TargetSettings:
    """Return the settings of a session's server.

    Source: PostgreSQL manual, "Lock Management", for the places of the table of locks.
    """
    with target_errors("reading its settings"):
        (row,) = await rows(conn, _TARGET_SETTINGS)
    tracks_commits, may_stamp, lock_places = row
    return TargetSettings(
        tracks_commits, tracks_commits or may_stamp, lock_places, conn.info.server_version >= SHARED_ORIGINS_SINCE
    )


def client_conninfo(dsn: str, application_name: str, *, kind: Kind = "control") -> str:
    """Return the connection string of a session on the target: the DSN, and what it leaves open.

    Args:
        dsn: as configured; it holds the password, so the result also does.
        application_name: put over one in the DSN, because our own sessions are known by it.
        kind: a worker's may wait as long as locks on the target make it.

    Raises:
        psycopg.ProgrammingError: the DSN cannot be parsed.
    """
    parameters: dict[str, Any] = {
        **_CLIENT_PARAMETERS,
        **({"tcp_user_timeout": _QUESTION_TIMEOUT_MS} if kind == "control" else {}),
        **parameters_of(dsn),
        "application_name": application_name,
    }
    return conninfo.make_conninfo(**parameters)


async def open_session(login: Login, application_name: str, *, kind: Kind = "control") -> Connection:
    """Open an autocommit session on the target with nothing pinned.

    Raises:
        psycopg.Error: no connection.
    """
    text = client_conninfo(login.dsn, application_name, kind=kind)
    return await Session.connect(text, command=login.command, autocommit=True)


async def connect_control(
    login: Login, *, role: str, application_name: str, on_open: Callable[[], object] | None = None
) -> Connection:
    """Open a control session: autocommit, every setting pinned, checked to be direct and writable.

    `on_open` is called once the server has answered.

    Raises:
        TargetLost: no connection.
        TargetRefused: a privilege is missing, a pooler stands between, or the server is read only.
    """
    with target_errors("connecting"):
        conn = await open_session(login, application_name)
    if on_open is not None:
        on_open()
    try:
        await pin_session(conn, kind="control", role=role, synchronous_commit="on")
        await check_direct(conn)
    except BaseException:
        await conn.close()
        raise
    return conn


async def connect_reader(login: Login, application_name: str) -> Connection:
    """Open a read-only session for `wait` and `status`: any role that may read the state; also on a standby.

    Raises:
        TargetLost: no connection.
    """
    with target_errors("connecting"):
        conn = await open_session(login, application_name)
    try:
        with target_errors("pinning session settings"):
            await conn.execute(_reading(conn.info.server_version).encode())
    except BaseException:
        await conn.close()
        raise
    return conn


async def pin_session(conn: Connection, *, kind: Kind, role: str, synchronous_commit: str) -> None:
    """Set every setting of `pinning` on a psycopg connection, in one round trip.

    Raises:
        TargetRefused: session_replication_role may not be set by this role (T-62).
    """
    text = pinning(kind, conn.info.server_version, role, synchronous_commit)
    with target_errors("pinning session settings"):
        await conn.execute(text.encode())


async def check_direct(conn: Connection) -> None:
    """Refuse a target behind a pooler, and one that cannot write.

    A pooler keeps or shares server sessions on its own terms, so advisory locks, settings and prepared
    statements would belong to no session for certain (F37). It cannot know the server's process id at connection time,
    so the announced id differs from the id that the session reports.

    Raises:
        TargetRefused: a pooler stands between, or the server is a standby or read only (F32).
    """
    query = sql.SQL(
        "SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_is_in_recovery(),"
        " pg_catalog.current_setting('transaction_read_only') = 'on'"
    )
    with target_errors("checking the session"):
        ((pid, is_in_recovery, is_read_only),) = await rows(conn, query)
    if pid != conn.info.backend_pid:
        raise TargetRefused(
            f"target: the session's process {pid} is not the one announced at connection ({conn.info.backend_pid}): "
            "a connection pooler stands between",
            hint="connect to the PostgreSQL server itself; locks and settings must last as long as the session",
        )
    if is_in_recovery or is_read_only:
        what = "a standby (in recovery)" if is_in_recovery else "read only"
        raise TargetRefused(f"target: the server is {what}", hint=_READ_ONLY_HINT)
