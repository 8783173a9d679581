"""Settings and privileges as administrators leave them: pinned, or refused by name (F26, T-34, T-62 to T-65, T-72)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.pair import Pair, named, pair
from tests.fixtures.plain import FAST, WORKER_IS_BLOCKED, check_equal, commit_each, foreign_transaction
from tests.fixtures.route import Route
from tests.fixtures.streams import FOLLOW, fill, stream_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

__all__ = ["pair"]

_TARGET_REFUSED = 4

#: Settings that may be set for a role or a database; each one breaks an applier that does not pin it (F26).
_HOSTILE = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "statement_timeout": "800ms",
    "lock_timeout": "500ms",
    "idle_in_transaction_session_timeout": "1s",
    "idle_session_timeout": "400ms",
    "transaction_timeout": "1s",
    "row_security": "on",
    "search_path": "hostile, public",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "iso_8601",
    "TimeZone": "Asia/Tokyo",
    "extra_float_digits": "-10",
    "bytea_output": "escape",
    "xmloption": "document",
    "array_nulls": "off",
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
    "quote_all_identifiers": "on",
    "gin_fuzzy_search_limit": "1",
}
_SINCE = {"transaction_timeout": 17}
_MEMORY_BYTES = 16 << 20

_TYPES = """
CREATE TABLE item (id int PRIMARY KEY, v int NOT NULL);
CREATE TABLE evt (n int NOT NULL);
CREATE TABLE bulk (n int NOT NULL, v text NOT NULL);
CREATE TABLE typed (
    id int PRIMARY KEY, d date, t timestamptz, i interval, f float8, b bytea, a text[], s text, r regclass);
"""
_TYPED_ROWS = """
INSERT INTO typed VALUES
(1, DATE '2024-03-02', TIMESTAMPTZ '2024-03-02 01:02:03.000004+00', INTERVAL '1 year -2 days 3:04:05',
 0.1::float8 + 0.2, decode('00ff27', 'hex'), ARRAY[NULL, 'NULL', 'a\\b'], U&'\\20AC \\4E2D', 'public.item');
UPDATE typed SET d = DATE '2024-12-01' WHERE id = 1;
"""
# Operators and functions that would be taken if the path of the role were.
_SHADOWS = """
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.set_config(text, text, bool) RETURNS text LANGUAGE plpgsql AS
$$BEGIN RAISE EXCEPTION 'shadowed'; END$$;
CREATE TABLE hostile.item (id int PRIMARY KEY, v int NOT NULL);
"""


@pytest.fixture
def roles(source_db: Database, target_db: Database) -> Iterator[str]:
    """A superuser on both ends with every hostile setting; whether by role or by database does not matter."""
    name = f"hostile_{secrets.token_hex(4)}"
    for database in (source_db, target_db):
        database.execute(f"CREATE ROLE {name} LOGIN SUPERUSER REPLICATION")
        major = int(database.rows("SELECT current_setting('server_version_num')")[0][0]) // 10000
        for setting, value in _HOSTILE.items():
            if major >= _SINCE.get(setting, 0):
                # A list must not become one quoted name.
                text = sql.SQL(value) if setting == "search_path" else sql.Literal(value)
                database.execute(
                    sql.SQL("ALTER ROLE {} SET {} = {}").format(sql.Identifier(name), sql.Identifier(setting), text)
                )
        database.execute(
            sql.SQL("ALTER DATABASE {} SET statement_timeout = '800ms'").format(sql.Identifier(database.dbname))
        )
    yield name
    for database in (source_db, target_db):
        database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.pg_majors(15, 18)
def test_f26_hostile_settings_change_nothing(
    source_db: Database,
    target_db: Database,
    roles: str,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
) -> None:
    """F26, T-34, T-64, T-72: with every hostile setting of role and database the stream is applied, and equal.

    A worker waits for a lock longer than each timeout, later ones for their turn to commit, and the publisher, in the
    middle of a transaction, until the daemon has room for more.
    """
    for database in (source_db, target_db):
        database.execute(_TYPES)
    target_db.execute(_SHADOWS)
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item, evt, bulk, typed")
    route = Route(
        source=source_db,
        target=target_db,
        settings={
            **FAST,
            "apply.max_batch_transactions": 10,
            "apply.max_batch_bytes": _MEMORY_BYTES // 8,
            "apply.memory_limit_bytes": _MEMORY_BYTES,
            "source.streaming": "off",
        },
        source_dsn=source_db.dsn_with(user=roles),
        target_dsn=target_db.dsn_with(user=roles),
    )
    init_route(route)
    daemon = start_daemon(route)
    source_db.execute(_TYPED_ROWS)
    commit_each(source_db, 1, 50)
    daemon.wait_caught_up()
    with foreign_transaction(target_db, "SELECT FROM public.item WHERE id = 1 FOR UPDATE") as foreign:
        source_db.execute("UPDATE item SET v = 7 WHERE id = 1")
        commit_each(source_db, 51, 300)
        source_db.execute(
            "SET statement_timeout = 0;INSERT INTO bulk SELECT n, repeat('x', 30000) FROM generate_series(1, 1000) AS n"
        )
        target_db.wait_until(WORKER_IS_BLOCKED)
        foreign.execute(b"SET LOCAL statement_timeout = 0; SELECT pg_sleep(1.5)")
    daemon.wait_caught_up()
    assert not daemon.events_of("target_lost")
    assert not daemon.events_of("source_lost")
    assert not daemon.events_of("batch_retried")
    daemon.stop()
    # All of `bulk` may take longer to read.
    for database in (source_db, target_db):
        database.execute(f"ALTER DATABASE {database.dbname} RESET statement_timeout")
        database.forget()
    check_equal(route, "public.item", "evt", "bulk", "typed")
    assert target_db.rows("SELECT count(*) FROM hostile.item") == [(0,)]


@pytest.fixture
def plain_role(target_db: Database) -> Iterator[str]:
    """A role on the target that may make the state schema, and nothing else."""
    name = f"plain_{secrets.token_hex(4)}"
    target_db.execute(f"CREATE ROLE {name} LOGIN")
    target_db.execute(
        sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(target_db.dbname), sql.Identifier(name))
    )
    yield name
    target_db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.fixture
def plain_route_of_role(
    source_db: Database, target_db: Database, plain_role: str, init_route: Callable[[Route], None]
) -> Route:
    """Tables of another owner, which the role may change but, as yet, not read."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE item (id int PRIMARY KEY, v int NOT NULL); CREATE TABLE evt (n int NOT NULL)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item, evt; INSERT INTO item VALUES (1, 0)")
    target_db.execute("INSERT INTO item VALUES (1, 0)")
    target_db.execute(f"GRANT SET ON PARAMETER session_replication_role TO {plain_role}")
    target_db.execute(f"GRANT INSERT, UPDATE, DELETE ON item, evt TO {plain_role}")
    route = Route(source=source_db, target=target_db, target_dsn=target_db.dsn_with(user=plain_role), settings=FAST)
    init_route(route)
    return route


@pytest.mark.bare_target
def test_what_the_role_lacks_is_named(
    plain_route_of_role: Route, plain_role: str, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """A privilege that the role lacks stops the daemon with exit 4 and its name, one by one; with all it goes on.

    T-62: without SET on session_replication_role, init and run refuse with the GRANT to give.
    T-65: an update needs SELECT on its table; privilege and table are named, and nothing is skipped.
    T-63: a policy that would hide rows from the role is named; no update is lost silently.
    """
    route = plain_route_of_role
    route.source.execute("UPDATE item SET v = 1 WHERE id = 1; INSERT INTO evt VALUES (1)")

    def refused() -> str:
        daemon = start_daemon(route)
        assert daemon.exit_code() == _TARGET_REFUSED, daemon.log_tail()
        assert route.target.rows("SELECT count(*) FROM evt") == [(0,)]
        return daemon.failure

    grant = "GRANT SET ON PARAMETER session_replication_role"
    with named("T-62"):
        route.target.execute(f"REVOKE SET ON PARAMETER session_replication_role FROM {plain_role}")
        assert grant in refused()
        done = run_command(route, "init", code=_TARGET_REFUSED)
        assert grant in done.stderr
        assert done.stderr.count("\n") == 1
        route.target.execute(f"{grant} TO {plain_role}")
    with named("T-65"):
        line = refused()
        assert "SELECT" in line
        assert "item" in line
        route.target.execute(f"GRANT SELECT ON item, evt TO {plain_role}")
    with named("T-63"):
        route.target.execute("ALTER TABLE item ENABLE ROW LEVEL SECURITY")
        line = refused()
        assert "item" in line
        assert "SELECT" not in line
        route.target.execute(f"ALTER ROLE {plain_role} BYPASSRLS")
    daemon = start_daemon(route)
    daemon.finish()
    check_equal(route)


def test_when_the_publisher_begins_to_send(pair: Pair) -> None:
    """A transaction in progress of 300 kB is sent if the lower limit is below that; PostgreSQL's own is 64 MB."""
    pair.create("CREATE TABLE t (id int PRIMARY KEY, v text)")

    def is_streamed(first: int, wanted_bytes: int) -> bool:
        pair.write(fill("t", first).decode())
        daemon = pair.drain(settings={**FOLLOW, "source.decoding_memory_bytes": wanted_bytes})
        pair.check_equal()
        return bool(daemon.events_of("stream_followed"))

    with named("lowered"):
        assert is_streamed(1, 65_536)
    with named("left"):
        assert not is_streamed(10_001, 0)
    with named("never raised"):
        stream_everything(pair.source)
        assert is_streamed(20_001, 1 << 30)
