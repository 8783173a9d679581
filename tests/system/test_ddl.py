"""Commands of the publisher: run on the target in their place between the rows, once, and only if they may."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from parapply.copy import schema as schemas
from parapply.demo.binaries import find_binaries, find_program
from parapply.demo.errors import DemoError
from parapply.login import Login
from parapply.source.ddl_automatic import Automatic
from parapply.source.ddl_queue import install_sql
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route
from tests.fixtures.streams import LITTLE_MEMORY, MANY_ROWS, SOME_ROWS, fill

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase, ServerOf

__all__ = ["pair"]

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text);"
_ON: Mapping[str, str | float] = {"ddl.apply": "true"}
#: Matches what is looked up by name better than the catalogue's operator, and notes that it was called.
_TRAP = """CREATE SEQUENCE public.ran; GRANT ALL ON SEQUENCE public.ran TO PUBLIC;
CREATE FUNCTION public.equal(oid, regclass) RETURNS bool LANGUAGE sql AS
$$ SELECT nextval('public.ran') > 0 AND $1 = $2::oid $$;
CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.equal)"""
_IS_TRAPPED = "SELECT is_called FROM public.ran"
_HISTORY = "SELECT number, tag, outcome FROM parapply.ddl ORDER BY commit_lsn, number"


def _ddl(command: str) -> str:
    return f"SELECT parapply.replicate_ddl($ddl${command}$ddl$)"


def _own(target: Database) -> None:
    """Let the daemon's role own what is in public: commands run as it, unless ddl.role names another."""
    role = target.target_role
    target.execute(
        f"ALTER SCHEMA public OWNER TO {role};"
        "DO $$ DECLARE one regclass; BEGIN FOR one IN SELECT oid FROM pg_class WHERE relkind IN ('r', 'p')"
        f" AND relnamespace = 'public'::regnamespace LOOP EXECUTE format('ALTER TABLE %s OWNER TO {role}', one);"
        " END LOOP; END $$"
    )


def _create(pair: Pair, tables: str = _TABLE, *, published: str = "ALL TABLES") -> None:
    pair.create(tables, published=published)
    pair.source.execute(install_sql(["pub"]))
    _own(pair.target)


def _refused(database: Database, text: str) -> str:
    """Run a text that must be refused, and return what the server said."""
    with pytest.raises(DemoError) as refused:
        database.execute(text)
    return str(refused.value)


def test_rows_command_rows_in_one_transaction(pair: Pair, run_command: RunCommand) -> None:
    """Rows before a command, the command, and rows that need it are one target transaction, in this order."""
    _create(pair, _TABLE + "CREATE TABLE other (id int PRIMARY KEY, t int REFERENCES t)")
    daemon = pair.start(settings=_ON)
    pair.write("INSERT INTO t VALUES (1, 'a')")
    xid = pair.write_one(
        "INSERT INTO t VALUES (2, 'b')",
        _ddl("ALTER TABLE t ADD n int DEFAULT 5"),
        "INSERT INTO t VALUES (3, 'c', 6)",
        "UPDATE t SET n = n + id",
        _ddl("ALTER TABLE t DROP v"),
        "INSERT INTO t VALUES (4, 99)",
        _ddl("CREATE UNIQUE INDEX t_n ON t (n)"),
        "INSERT INTO other VALUES (1, 4)",
    )
    pair.write("INSERT INTO t VALUES (5, 10)", "UPDATE t SET n = -n", "DELETE FROM other")
    daemon.wait_caught_up()
    pair.check_equal()
    assert pair.target.rows(_HISTORY) == [
        (1, "ALTER TABLE", "applied"),
        (2, "ALTER TABLE", "applied"),
        (3, "CREATE INDEX", "applied"),
    ]
    told = [(event["tag"], event["xid"]) for event in daemon.events_of("ddl_applied")]
    assert told == [("ALTER TABLE", xid), ("ALTER TABLE", xid), ("CREATE INDEX", xid)]
    daemon.stop()
    assert [one["event"] for one in daemon.events if one["level"] in {"warning", "error"}] == ["slot_adopted"]
    shown = json.loads(run_command(pair.route, "status", "--json").stdout)["ddl"]
    assert [(one["number"], one["outcome"]) for one in shown] == [(3, "applied"), (2, "applied"), (1, "applied")]
    assert "commands of the publisher" in run_command(pair.route, "status").stdout


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ["large", "streamed", "followed"])
def test_a_command_in_a_transaction_in_pieces(pair: Pair, way: str) -> None:
    """A command amid rows that come in pieces, or while their transaction is in progress, has its place among them."""
    settings = {**_ON, **LITTLE_MEMORY, "source.streaming": "off" if way == "large" else "on"}
    if way != "large":
        settings["source.decoding_memory_bytes"] = 65536
    settings["apply.stream_start_bytes"] = 0 if way == "followed" else 1 << 30
    n_rows = MANY_ROWS if way == "large" else SOME_ROWS
    _create(pair)
    daemon = pair.start(settings=settings)
    pair.write_one(
        fill("t", 0, n_rows).decode(),
        "SAVEPOINT one",
        _ddl("ALTER TABLE t ADD wrong int"),
        "ROLLBACK TO one",
        _ddl("ALTER TABLE t ADD n int"),
        _ddl("CREATE TABLE made (id int PRIMARY KEY, v text)"),
        fill("made", 0, n_rows).decode(),
        "UPDATE t SET n = id",
    )
    pair.write("INSERT INTO made VALUES (-1, 'later')", "INSERT INTO t VALUES (-1, 'later', 1)")
    daemon.wait_caught_up()
    pair.check_equal()
    assert [row[1:] for row in pair.target.rows(_HISTORY)] == [("ALTER TABLE", "applied"), ("CREATE TABLE", "applied")]
    daemon.stop()


def test_new_tables_from_their_first_row_on(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """After `init --copy` a table that a command makes is applied at once, made with its rows or before them."""
    pair = Pair(source_db, target_db, start_daemon)
    for database in (source_db, target_db):
        database.execute(_TABLE + "INSERT INTO t VALUES (1, 'copied')" if database is source_db else _TABLE)
    source_db.execute(
        f"CREATE PUBLICATION pub FOR ALL TABLES; GRANT CREATE ON DATABASE {source_db.dbname} TO {source_db.source_role}"
    )
    _own(target_db)
    run_command(pair.route, "init --ddl --copy", code=0)
    # Read when the publisher's catalogue says that it was rewritten since.
    pair.write_one(_ddl("CREATE TABLE early (id int PRIMARY KEY, v int)"), "INSERT INTO early VALUES (1, 2)")
    pair.write(_ddl("ALTER TABLE early ALTER v TYPE bigint"), "INSERT INTO early VALUES (2, 2::bigint ^ 40)")
    pair.write_one(
        _ddl("CREATE TABLE in_progress (id int PRIMARY KEY, v text)"), fill("in_progress", 0, MANY_ROWS).decode()
    )
    pair.write(_ddl("ALTER TABLE in_progress ALTER id TYPE bigint"))
    # The change that a copy would show has not run here yet.
    pair.write(_ddl("ALTER TABLE t ADD n int DEFAULT 1"), _ddl("ALTER TABLE t ALTER n TYPE int USING n * 2"))
    refused = run_command(pair.route, "refresh --table public.t --truncate", "--set", "ddl.apply=true", code=4)
    assert "6 commands in the publisher's queue may still have to run here" in refused.stderr
    daemon = pair.start(settings={**_ON, **LITTLE_MEMORY, "source.decoding_memory_bytes": 65536})
    done = run_command(pair.route, "refresh --table public.t --truncate", "--set", "ddl.apply=true", code=0)
    pair.write_one(_ddl("CREATE TABLE one (id int PRIMARY KEY)"), "INSERT INTO one VALUES (1), (2)")
    pair.write(_ddl("CREATE TABLE two (id int PRIMARY KEY, v text)"), "INSERT INTO two VALUES (1, 'a')")
    pair.write(_ddl("ALTER TABLE two RENAME TO three"), "INSERT INTO three VALUES (2, 'b')", _ddl("DROP TABLE one"))
    pair.write("UPDATE three SET v = 'c' WHERE id = 1", "INSERT INTO t VALUES (2, 'later')")
    pair.write(_ddl("CREATE TABLE one (w text PRIMARY KEY)"), "INSERT INTO one VALUES ('another table of this name')")
    daemon.wait_caught_up()
    pair.check_equal()
    assert pair.target.rows("SELECT table_name FROM parapply.copies WHERE state <> 'copied'") == []
    for command in ("verify", "refresh", "init --ddl"):
        done = run_command(pair.route, command, code=0)
        assert "ddl_queue" not in done.stdout or command == "init --ddl"
    daemon.stop()
    told = [event for event in daemon.events if event["level"] in {"warning", "error"}]
    # The publisher's catalogue shows it before the stream has come to the command that makes it.
    assert [event for event in told if event.get("relation") not in {"public.in_progress", "public.early"}] == []
    # A publisher that was put back gives a number once more.
    source_db.execute(f"SELECT pg_drop_replication_slot('{pair.route.slot}')")
    target_db.execute("UPDATE parapply.ddl SET command = 'another' WHERE number = 2")
    healed = run_command(pair.route, "heal --dry-run", "--set", "ddl.apply=true")
    assert "1 commands of parapply.ddl_queue, from number 2 on, were not run here" in healed.stderr, healed


def test_a_command_for_a_table_that_a_copy_has_not_begun_to_read(pair: Pair, run_command: RunCommand) -> None:
    """Rows of a snapshot from before a command lack its default: the copy is refused, and begins again.

    The command runs on both sides, because nothing has locked the table there yet.
    """
    tables = "CREATE TABLE a_held (id int PRIMARY KEY); CREATE TABLE b_next (id int PRIMARY KEY);"
    _create(pair, _TABLE + tables, published="TABLE t")
    pair.source.execute(
        "INSERT INTO a_held VALUES (1); INSERT INTO b_next VALUES (1); ALTER PUBLICATION pub ADD TABLE a_held, b_next"
    )
    daemon = pair.start(settings=_ON)
    again = "refresh --table public.a_held --table public.b_next --connections 1 --truncate --set ddl.apply=true"
    refused: list[subprocess.CompletedProcess[str]] = []
    with pair.target.connect() as holder:
        holder.execute("BEGIN; LOCK TABLE a_held IN SHARE MODE")
        copying = threading.Thread(target=lambda: refused.append(run_command(pair.route, again)))
        copying.start()
        pair.target.wait_until(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'a_held'::regclass AND NOT granted)"
        )
        pair.write(_ddl("ALTER TABLE b_next ADD n int"), _ddl("ALTER TABLE b_next ALTER n SET DEFAULT 9"))
        pair.target.wait_until("SELECT count(*) = 2 FROM parapply.ddl")
        holder.execute("COMMIT")
    copying.join(30)
    assert refused[0].returncode == 4
    assert "the columns of public.b_next changed after this copy began" in refused[0].stderr
    run_command(pair.route, again, code=0)
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT id, n FROM b_next") == [(1, None)]
    daemon.stop()


def test_a_command_that_fails(pair: Pair) -> None:
    """It rolls its transaction back and stops the daemon with one line; named in ddl.skip, it is left out and told."""
    _create(pair)
    pair.target.execute("ALTER TABLE t ADD n int")
    daemon = pair.start(settings=_ON)
    pair.write_one("INSERT INTO t VALUES (1, 'a')", _ddl("ALTER TABLE t ADD n int"), "INSERT INTO t VALUES (2, 'b', 3)")
    assert daemon.exit_code(30) == 5, daemon.log_tail()
    told = daemon.failure
    assert re.search(
        r"ddl: command 1 of the publisher's queue, ALTER TABLE: duplicate_column \(42701\): column \"n\" of relation "
        r"\"t\" already exists; transaction \d+, end LSN [0-9A-F]+/[0-9A-F]+\. Hint: .*ddl\.skip = \[1\]",
        told,
    ), told
    assert pair.target.rows("SELECT id FROM t") == []
    drained = pair.drain(settings={**_ON, "ddl.skip": "1"})
    assert [event["reason"] for event in drained.events_of("ddl_left_out")] == ["ddl.skip names it"]
    pair.check_equal()
    assert pair.target.rows(_HISTORY) == [(1, "ALTER TABLE", "left_out")]


def test_a_row_that_fails_behind_a_command(pair: Pair) -> None:
    """The table is read again in the open transaction, where it exists: the error is the row's, with the end LSN."""
    mood = "CREATE TYPE mood AS ENUM ('glad'{})"
    _create(pair, _TABLE)
    pair.source.execute(mood.format(", 'sad'"))
    pair.target.execute(mood.format(""))
    daemon = pair.start(settings=_ON)
    make = _ddl("CREATE TABLE one (id int PRIMARY KEY, v mood)")
    pair.write_one("INSERT INTO t VALUES (1, 'a')", make, "INSERT INTO one VALUES (1, 'glad'), (2, 'sad')")
    pair.check_stopped(daemon, code=5, says=r"public\.one.*\(22P02\).*end LSN [0-9A-F]+/[0-9A-F]+")
    assert pair.target.rows("SELECT id FROM t") == []
    pair.target.execute("ALTER TYPE mood ADD VALUE 'sad'")
    pair.drain(settings=_ON)
    pair.check_equal()


def test_what_may_run_is_said_on_the_target(pair: Pair) -> None:
    """Off, a command is left out and told; on, a tag that is not allowed stops the daemon, and nothing has run."""
    _create(pair)
    pair.write(_ddl("CREATE VIEW v1 AS SELECT id FROM t"), "INSERT INTO t VALUES (1, 'a')")
    off = pair.drain()
    assert [event["reason"] for event in off.events_of("ddl_left_out")] == ["ddl.apply is off"]
    pair.write(_ddl("CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'"), "INSERT INTO t VALUES (2, 'b')")
    daemon = pair.start_only(settings=_ON)
    assert daemon.exit_code(30) == 5, daemon.log_tail()
    told = daemon.failure
    assert "ddl.tags does not allow CREATE FUNCTION" in told
    assert pair.target.rows("SELECT to_regclass('v1'), to_regproc('f'), (SELECT max(id) FROM t)") == [(None, None, 1)]
    pair.drain(settings={**_ON, "ddl.tags": "CREATE FUNCTION"})
    assert pair.target.rows("SELECT f(), (SELECT max(id) FROM t)") == [(1, 2)]


@pytest.mark.in_turn("point")
@pytest.mark.crash
@pytest.mark.parametrize("point", ["before_state", "commit_sent"])
def test_killed_at_a_command(pair: Pair, point: str) -> None:
    """Killed before or at the commit of its transaction, a command has run once, with its rows."""
    _create(pair)
    pair.write_one("INSERT INTO t VALUES (1, 'a')", _ddl("ALTER TABLE t ADD n int"), "INSERT INTO t VALUES (2, 'b', 3)")
    killed = pair.start_only(settings=_ON, environ={"PARAPPLY_FAILPOINT": f"{point}:kill"})
    assert killed.exit_code(30) == -9, killed.log_tail()
    pair.write("INSERT INTO t VALUES (3, 'c', 4)")
    pair.drain(settings=_ON)
    pair.check_equal()
    assert pair.target.rows(_HISTORY) == [(1, "ALTER TABLE", "applied")]


@pytest.fixture
def app_roles(pair: Pair) -> Iterator[tuple[str, str]]:
    """A role without rights, of the publisher and of the target, and one of the target that owns tables."""
    token = secrets.token_hex(4)
    app, owner = f"app_{token}", f"owner_{token}"
    made = ((pair.source, app), (pair.target, owner), (pair.target, app))
    for database, role in made:
        database.execute(f"CREATE ROLE {role} LOGIN")
    yield app, owner
    for database, role in made:
        database.execute(f"SET parapply.record_ddl = 'off'; DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_whoever_may_not_run_ddl_on_the_publisher_can_run_nothing_on_the_target(
    pair: Pair, app_roles: tuple[str, str]
) -> None:
    """A row of the queue comes only with its command, run by the role that inserts it, with that role's own rights."""
    app, owner = app_roles
    _create(pair)
    pair.source.execute(f"CREATE SCHEMA mine; GRANT USAGE, CREATE ON SCHEMA mine TO {app}")

    def refused(*texts: str) -> str:
        return _refused(pair.source, "; ".join([f"SET ROLE {app}", *texts]))

    assert "permission denied for schema parapply" in refused(_ddl("DROP TABLE t"))
    # A grant lets it queue what it may do anyway, and no more: neither by the function nor by a row of its own.
    pair.source.execute(
        f"GRANT USAGE ON SCHEMA parapply TO {app}; GRANT INSERT ON parapply.ddl_queue TO {app};"
        f"GRANT EXECUTE ON FUNCTION parapply.replicate_ddl TO {app}"
    )
    queued = (
        "INSERT INTO parapply.ddl_queue (command, tag, role_name, first_schema, settings)"
        " VALUES ('{}', '{}', '', '', '{{}}')"
    )
    assert "must be owner of table t" in refused(_ddl("DROP TABLE t"))
    assert "must be owner of table t" in refused(queued.format("DROP TABLE t", "DROP TABLE"))
    assert "permission denied to set parameter" in refused(
        "SET session_replication_role = replica", queued.format("DROP TABLE t", "DROP TABLE")
    )
    assert "permission denied" in refused("UPDATE parapply.ddl_queue SET command = 'DROP TABLE t'")
    assert "must be owner" in refused("ALTER TABLE parapply.ddl_queue DISABLE TRIGGER run")
    # Neither several commands, nor one that is something else, nor a name that means another table there.
    assert "several" in refused(_ddl("CREATE TABLE mine.a (); DROP TABLE t"))
    assert "several" in refused(_ddl("-- nothing"))
    for text, tag in (
        ("SELECT 1", "SELECT"), ("DELETE FROM t", "DELETE"), ("DO $$ BEGIN END $$", "DO"), ("SET ROLE NONE", "SET"),
        ("CREATE TABLE mine.a AS SELECT 1", "CREATE TABLE AS"), ("ALTER ROLE x LOGIN", "ALTER ROLE"),
    ):  # fmt: skip
        assert f"{tag} cannot be replicated" in refused(_ddl(text))
    pair.source.execute(f"GRANT TEMP ON DATABASE {pair.source.dbname} TO {app}")
    assert "temporary objects" in refused("CREATE TEMP TABLE t ()", _ddl("DROP TABLE t"))
    assert "temporary objects" in refused(_ddl("CREATE TEMP TABLE x ()"))
    assert pair.source.rows("SELECT count(*) FROM parapply.ddl_queue") == [(0,)]

    # A role may queue commands that it may run, with less of a grant; here they run as ddl.role with its rights only.
    pair.source.execute(f"REVOKE INSERT ON parapply.ddl_queue FROM {app}")
    pair.source.execute(f"GRANT INSERT (command) ON parapply.ddl_queue TO {app}")
    assert "permission denied" in refused(queued.format("CREATE TABLE mine.a ()", "CREATE TABLE"))
    pair.target.execute(f"CREATE SCHEMA mine AUTHORIZATION {owner}; GRANT {owner} TO {pair.target.target_role}")
    pair.source.execute(f"SET ROLE {app}; SET search_path = mine; {_ddl('CREATE TABLE made (id int PRIMARY KEY)')}")
    pair.drain(settings={**_ON, "ddl.role": owner})
    assert pair.target.rows("SELECT relowner::regrole::text FROM pg_class WHERE oid = 'mine.made'::regclass") == [
        (owner,)
    ]
    assert pair.source.rows("SELECT role_name, tag FROM parapply.ddl_queue") == [(app, "CREATE TABLE")]
    pair.write(_ddl("ALTER TABLE t ADD n int"))
    daemon = pair.start_only(settings={**_ON, "ddl.role": owner})
    assert daemon.exit_code(30) == 5, daemon.log_tail()
    assert "must be owner of table t" in daemon.log_tail()


def test_what_would_differ_is_refused_on_the_publisher(pair: Pair) -> None:
    """A new column whose value each server would work out by itself is refused where there are rows, with a way out.

    Rows count that the caller does not see: because of a policy, or because its snapshot is older.
    """
    hidden = (
        "CREATE TABLE hidden (id int PRIMARY KEY); ALTER TABLE hidden ENABLE ROW LEVEL SECURITY;"
        "ALTER TABLE hidden FORCE ROW LEVEL SECURITY; CREATE POLICY none ON hidden USING (false)"
    )
    _create(pair, f"{_TABLE} CREATE TABLE empty (id int PRIMARY KEY); {hidden}")
    pair.write("INSERT INTO t VALUES (1, 'a')", "INSERT INTO hidden VALUES (1)")
    pair.target.execute("ALTER TABLE hidden DISABLE ROW LEVEL SECURITY")
    role = pair.source.source_role
    pair.source.execute(
        f"ALTER TABLE hidden OWNER TO {role}; GRANT CREATE ON SCHEMA public TO {role};"
        f"GRANT USAGE ON SCHEMA parapply TO {role}; GRANT INSERT (command) ON parapply.ddl_queue TO {role}"
    )
    insert = "INSERT INTO parapply.ddl_queue (command) VALUES ('ALTER TABLE hidden ADD n timestamptz DEFAULT {}')"
    for default in ("now()", "clock_timestamp()"):
        assert "the rows of public.hidden would get" in _refused(
            pair.source, f"SET ROLE {role}; {insert.format(default)}"
        )
    with pair.source.connect() as older:
        older.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        pair.source.execute("INSERT INTO empty VALUES (0)")
        with pytest.raises(Exception, match=r"the rows of public\.empty would get"):
            older.execute(_ddl("ALTER TABLE empty ADD n timestamptz DEFAULT now()").encode())
    pair.source.execute("TRUNCATE empty")
    for column in (
        "n timestamptz DEFAULT now()", "n date DEFAULT CURRENT_DATE", "n float8 DEFAULT 1 + random()", "n serial",
        "n int GENERATED ALWAYS AS IDENTITY",
    ):  # fmt: skip
        assert "the rows of public.t would get other values of n" in _refused(
            pair.source, _ddl(f"ALTER TABLE t ADD {column}")
        )
    assert "while public.t is UNLOGGED its changes are not published" in _refused(
        pair.source, _ddl("ALTER TABLE t SET UNLOGGED")
    )
    pair.write(
        _ddl("ALTER TABLE empty ADD n timestamptz DEFAULT now()"),
        _ddl("ALTER TABLE t ADD k int DEFAULT 1 + 1, ADD n timestamptz"),
        _ddl("ALTER TABLE t ALTER n SET DEFAULT now()"),
        "UPDATE t SET n = now()",
        "INSERT INTO empty VALUES (1)",
        "INSERT INTO t VALUES (2, 'b')",
    )
    with (
        pair.source.connect() as connection,
        pytest.raises(Exception, match="has executed LISTEN, UNLISTEN, or NOTIFY"),
    ):
        connection.execute(f"BEGIN; {_ddl('ALTER TABLE t ADD z int')}; PREPARE TRANSACTION 'p'".encode())
    pair.drain(settings=_ON)
    pair.check_equal()


def test_a_type_changes_beside_transactions_that_wrote_it(pair: Pair) -> None:
    """A command that changes what a type's values look like waits for them: they are sent as they were before it.

    Else labels that change places would be others on the target without a word, and the rest stop the daemon.
    """
    types = (
        "CREATE TYPE mood AS ENUM ('a', 'b'); CREATE DOMAIN part AS mood; CREATE TYPE both_of AS (m mood, n int);"
        "CREATE DOMAIN few AS int; CREATE TABLE plain (id int PRIMARY KEY, m mood);"
        "CREATE TABLE within (id int PRIMARY KEY, m both_of[], p part); CREATE TABLE other (id int PRIMARY KEY, n few)"
    )
    _create(pair, types)
    for name in ("mood", "both_of", "part", "few"):
        kind = "DOMAIN" if name in {"part", "few"} else "TYPE"
        pair.target.execute(f"ALTER {kind} {name} OWNER TO {pair.target.target_role}")
    daemon = pair.start(settings=_ON)
    insert = "INSERT INTO within (id, m) VALUES ({n}, '{{\"(%s,1)\"}}')"
    _beside(
        pair, 1, ("INSERT INTO plain VALUES ({n}, 'a')", insert % "b"),
        _ddl("ALTER TYPE mood RENAME VALUE 'a' TO 'c'"), _ddl("ALTER TYPE mood RENAME VALUE 'b' TO 'a'"),
    )  # fmt: skip
    _beside(pair, 2, (insert % "a",), _ddl("ALTER TYPE both_of ADD ATTRIBUTE t text"))
    _beside(
        pair, 3, ("INSERT INTO other VALUES ({n}, 9)",), _ddl("ALTER DOMAIN few ADD CHECK (VALUE < 5) NOT VALID")
    )  # fmt: skip
    # As people type it.
    pair.source.execute(install_sql(["pub"], Automatic(tags=("ALTER TYPE",))))
    _beside(pair, 4, ("INSERT INTO plain VALUES ({n}, 'a')",), "ALTER TYPE mood RENAME VALUE 'a' TO 'e'")
    # A label that is new changes no value, and nothing waits for it.
    with pair.source.connect() as writer:
        writer.execute("BEGIN; INSERT INTO plain VALUES (9, 'c')")
        pair.source.execute(_ddl("ALTER TYPE mood ADD VALUE 'd'"))
        writer.execute("COMMIT")
    daemon.wait_caught_up()
    pair.check_equal()


def _beside(pair: Pair, number: int, rows: Sequence[str], *commands: str) -> None:
    """Run commands while a transaction that has written is open: they must wait, and it can be committed."""
    with pair.source.connect() as writer, pair.source.connect() as waiter, ThreadPoolExecutor(1) as pool:
        writer.execute("BEGIN")
        for text in rows:
            writer.execute(text.format(n=number).encode())
        ((pid,),) = waiter.execute("SELECT pg_backend_pid()").fetchall()
        done = pool.submit(lambda: [waiter.execute(text.encode()) for text in commands])
        pair.source.wait_until(f"SELECT pg_blocking_pids({pid}) <> '{{}}'")
        writer.execute("COMMIT")
        done.result(30)


def test_rows_written_beside_the_rename_of_their_schema(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """ALTER SCHEMA ... RENAME waits for no transaction: one that goes on comes later, with the table's earlier name."""
    for database in (source_db, target_db):
        database.execute("CREATE SCHEMA s; CREATE TABLE s.t (id int PRIMARY KEY)")
    target_db.execute(f"GRANT CREATE ON DATABASE {target_db.dbname} TO {target_db.target_role};"
                      f" ALTER SCHEMA s OWNER TO {target_db.target_role}")  # fmt: skip
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES;" + install_sql(["pub"]))
    route = Route(source=source_db, target=target_db, settings={**FAST, **_ON})
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    with source_db.connect() as connection:
        connection.execute("BEGIN; INSERT INTO s.t VALUES (1)")
        source_db.execute(_ddl("ALTER SCHEMA s RENAME TO s2"))
        connection.execute("INSERT INTO s2.t VALUES (2); UPDATE s2.t SET id = 3 WHERE id = 1; COMMIT")
    daemon.wait_caught_up()
    check_equal(route, "s2.t")
    daemon.stop()


@pytest.mark.needs_majors(15, 18)
def test_schemas_change_names_in_the_middle_of_a_stream(
    server_of: ServerOf, new_database: NewDatabase, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """PostgreSQL 15 does not announce tables of a renamed schema again: the stream is left, and no row goes astray."""
    source, target = new_database(server_of("source", 15), "source"), new_database(server_of("target", 18), "target")
    for database in (source, target):
        database.execute("".join(f"CREATE SCHEMA {s}; CREATE TABLE {s}.t (id int PRIMARY KEY, v text);" for s in "ab"))
    owner = target.target_role
    target.execute(f"ALTER SCHEMA a OWNER TO {owner}; ALTER SCHEMA b OWNER TO {owner};"
                   f" GRANT CREATE ON DATABASE {target.dbname} TO {owner}")  # fmt: skip
    source.execute("CREATE PUBLICATION pub FOR ALL TABLES;" + install_sql(["pub"]))
    source.execute("INSERT INTO a.t VALUES (1, 'a'); INSERT INTO b.t VALUES (1, 'b')")
    route = Route(source=source, target=target, settings={**FAST, **_ON})
    run_command(route, "init", "--copy", code=0)
    for old, new in [("a", "x"), ("b", "a"), ("x", "b"), ("b", "c"), ("c", "b")]:
        source.execute(f"UPDATE {old}.t SET v = v || '+' WHERE id = 1")
        source.execute(_ddl(f"ALTER SCHEMA {old} RENAME TO {new}"))
        source.execute(f"UPDATE {new}.t SET v = v || '-' WHERE id = 1")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    check_equal(route, "a.t")
    check_equal(route, "b.t")
    assert len(daemon.events_of("stream_left")) == 5
    daemon.stop()


@pytest.mark.in_turn("order")
@pytest.mark.parametrize("order", ["preserve", "relaxed"])
def test_commands_amid_the_load_of_others(pair: Pair, order: str) -> None:
    """Columns come and go, tables are made and renamed while others write: nothing waits for ever, nothing is lost."""
    _create(pair, _TABLE + "CREATE TABLE other (id int PRIMARY KEY, v text)")
    daemon = pair.start(workers=4, settings={**_ON, "apply.commit_order": order, "apply.max_batch_transactions": 5})
    stop = threading.Event()

    def write(table: str) -> int:
        with pair.source.connect() as connection:
            for number in itertools.count():
                if stop.is_set():
                    return number
                connection.execute(f"INSERT INTO {table} (id, v) VALUES ({number}, 'row')".encode())
                connection.execute(f"UPDATE {table} SET v = v || '!' WHERE id = {number // 2}".encode())
        raise AssertionError("counting has no end")

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, table) for table in ("t", "other")]
        try:
            for number in range(3):
                pair.write(
                    _ddl(f"ALTER TABLE t ADD c{number} int DEFAULT {number}"),
                    f"UPDATE t SET c{number} = id WHERE id % 7 = 0",
                    _ddl(f"CREATE TABLE made{number} (id int PRIMARY KEY)"),
                    f"INSERT INTO made{number} SELECT id FROM t",
                    _ddl(f"ALTER TABLE t DROP c{number}"),
                    _ddl(f"ALTER TABLE made{number} RENAME TO kept{number}"),
                )
        finally:
            stop.set()
        assert all(writer.result() > 0 for writer in writers)
    daemon.wait_caught_up()
    pair.check_equal()
    daemon.stop()
    assert len(daemon.events_of("source_connected")) == 1
    assert len(daemon.events_of("ddl_applied")) == 12


#: Obstacles to a table, by the error of its command, which is sent again, or tried again at once and for long.
_IN_THE_WAY = {
    "42P07": "CREATE VIEW seen AS SELECT 1",
    "55P03": "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN"
    " RAISE 'busy' USING ERRCODE = '55P03'; END $$; CREATE EVENT TRIGGER refuse ON ddl_command_start"
    " WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION refuse(); ALTER EVENT TRIGGER refuse ENABLE ALWAYS",
}


@pytest.mark.in_turn("sqlstate")
@pytest.mark.parametrize("sqlstate", _IN_THE_WAY)
def test_tried_again_and_skipped(pair: Pair, run_command: RunCommand, sqlstate: str) -> None:
    """With on_error = retry a command is tried until it succeeds; `skip` leaves its transaction out, and says so."""
    _create(pair)
    pair.target.execute("CREATE TABLE made (wrong int)")
    daemon = pair.start(settings={**_ON, "apply.on_error": "retry", "source.reconnect_min_s": 0.05})
    pair.write_one(_ddl("CREATE TABLE made (id int PRIMARY KEY)"), "INSERT INTO made VALUES (1)")
    daemon.wait_for_event("batch_failed")
    pair.target.execute("DROP TABLE made")
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT id FROM made") == [(1,)]
    pair.target.execute(_IN_THE_WAY[sqlstate])
    pair.write_one(
        "INSERT INTO made VALUES (2)", _ddl("CREATE TABLE seen (id int PRIMARY KEY)"), "INSERT INTO seen VALUES (1)"
    )
    failed = daemon.wait_for_event("batch_failed", count=len(daemon.events_of("batch_failed")) + 1)
    (end_lsn,) = re.findall(rf"{sqlstate}.* end LSN ([0-9A-F]+/[0-9A-F]+)", failed["error"])
    pair.target.wait_until(f"SELECT state = 'retrying' OR '{sqlstate}' = '42P07' FROM parapply.progress")
    run_command(pair.route, "skip", "--lsn", end_lsn, code=0)
    pair.write("INSERT INTO made VALUES (3)")
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT id FROM made ORDER BY id") == [(1,), (3,)]
    assert [event["reason"] for event in daemon.events_of("ddl_left_out")] == ["its transaction is skipped"]
    assert pair.target.rows("SELECT table_name FROM parapply.conflicts WHERE conflict_type = 'skipped'") == [("made",)]
    daemon.stop()


def test_what_init_and_the_daemon_refuse(pair: Pair, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """Without the privileges to make the queue nothing is made; a role that may not be taken is named at the start.

    Of two slots of one publisher's database that lead into one target only one runs its commands.
    """
    pair.create(_TABLE)
    refused = run_command(pair.route, "init", "--ddl", code=3)
    assert "making parapply.ddl_queue: permission denied for database" in refused.stderr
    assert pair.source.rows("SELECT to_regnamespace('parapply')") == [(None,)]
    printed = run_command(pair.route, "init", "--ddl=print", code=0)
    pair.source.execute(printed.stdout)
    pair.source.execute(printed.stdout)
    assert pair.source.rows("SELECT count(*) FROM parapply.ddl_queue") == [(0,)]
    daemon = pair.start_only(settings={**_ON, "ddl.role": "no_such_role"})
    assert daemon.exit_code(30) == 4, daemon.log_tail()
    assert "ddl.role = 'no_such_role': role \"no_such_role\" does not exist" in daemon.failure
    # Each would run every command: one of them does.
    running = pair.start(settings=_ON)
    other = Route(source=pair.source, target=pair.target, slot=f"{pair.route.slot}_2", settings=FAST)
    run_command(other, "init", code=0)
    second = start_daemon(other, settings=_ON)
    assert second.exit_code(30) == 4, second.log_tail()
    said = f"runs the commands of the database '{pair.source.dbname}' here already (parapply leader {pair.route.slot})"
    assert said in second.failure
    start_daemon(other, settings={"ddl.apply": "false"}).wait_for_event("source_connected")
    running.stop()


def test_a_queue_that_another_role_made_is_refused(source_db: Database) -> None:
    """Its owner can disable the trigger, and so have commands run on the targets that it may not run here."""
    role = f"sly_{source_db.dbname}"
    source_db.execute(
        f"CREATE PUBLICATION pub FOR ALL TABLES; CREATE ROLE {role}; CREATE SCHEMA parapply AUTHORIZATION {role};"
        f" CREATE TABLE parapply.ddl_queue (id int); ALTER TABLE parapply.ddl_queue OWNER TO {role}"
    )
    try:
        with pytest.raises(DemoError, match=f"belongs to the role {role}"):
            source_db.execute(install_sql(["pub"]))
    finally:
        source_db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def _type(database: Database, *texts: str) -> list[str]:
    """Run texts in one session, each as a string of its own, and return the warnings and notices."""
    told: list[str] = []
    with database.connect() as connection:
        connection.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        for text in texts:
            connection.execute(text.encode())
    return told


def _not_recorded(database: Database, *texts: str) -> str:
    """Run texts like `_type`, the last of which must be refused, and return what the server said."""
    with database.connect() as connection:
        for text in texts[:-1]:
            connection.execute(text.encode())
        with pytest.raises(Exception, match="parapply: this cannot be recorded") as refused:
            connection.execute(texts[-1].encode())
    return str(refused.value)


@pytest.mark.crash
def test_what_cannot_run_in_a_transaction_runs_after_it(pair: Pair, run_command: RunCommand) -> None:
    """Killed anywhere an index is made once; an INVALID one is made again; what fails is logged and stays pending."""
    _create(pair, _TABLE + 'CREATE TABLE "T 2" (id int PRIMARY KEY, v text)')
    source, target = pair.source, pair.target
    indexes = (
        "SELECT c.relname, indisvalid FROM pg_index JOIN pg_class AS c ON c.oid = indexrelid"
        " WHERE NOT indisprimary AND c.relnamespace = 'public'::regnamespace ORDER BY 1"
    )
    pair.write("INSERT INTO t VALUES (1, 'a')", """INSERT INTO "T 2" VALUES (1, 'a'), (2, 'a')""")
    target.execute(_TRAP)
    (warning,) = _type(source, _ddl("CREATE UNIQUE INDEX CONCURRENTLY t_v ON t (v);"))
    assert "CREATE INDEX CONCURRENTLY has not run here" in warning
    assert source.rows(indexes) == []
    # Killed before it runs, after an INVALID one was left, and when it has run.
    for point in ("later_begun", "later_begun", "later_done"):
        killed = pair.start_only(settings=_ON, environ={"PARAPPLY_FAILPOINT": f"{point}:kill"})
        assert killed.exit_code(30) == -9, killed.log_tail()
        if not target.rows(indexes) and point == "later_begun":
            target.execute("INSERT INTO t VALUES (-1, 'a')")
            assert "could not create unique index" in _refused(target, "CREATE UNIQUE INDEX CONCURRENTLY t_v ON t (v)")
            target.execute("DELETE FROM t WHERE id = -1")
        assert [row[2] for row in target.rows(_HISTORY)] == ["pending"]
        assert target.rows(indexes) == [("t_v", point == "later_done")]
    oid = target.rows("SELECT 't_v'::regclass::oid::int")
    daemon = pair.start(settings=_ON)
    daemon.wait_for_event("ddl_applied")
    assert target.rows("SELECT 't_v'::regclass::oid::int") == oid

    # A transaction with commands comes after it; a command that fails is left, and nothing waits for it.
    build = 'INDEX {} "N" ON public."T 2" (id, (v || 1)) WHERE id > 0'
    pair.write_one("INSERT INTO t VALUES (2, 'b')", _ddl(f"CREATE {build.format('CONCURRENTLY')}"))
    source.execute(f"CREATE {build.format('')}")
    pair.write(_ddl('ALTER INDEX "N" RENAME TO n2'), _ddl('CREATE UNIQUE INDEX CONCURRENTLY no ON "T 2" (v)'))
    failed = daemon.wait_for_event("ddl_failed")
    assert failed["reason"] == "unique_violation (23505), constraint no"
    pair.write(_ddl("ALTER TABLE t ADD n int"), "INSERT INTO t VALUES (3, 'c', 4)")
    daemon.wait_caught_up()
    pair.check_equal()
    assert target.rows(indexes) == [("n2", True), ("t_v", True)]
    shown = json.loads(run_command(pair.route, "status", "--json").stdout)["ddl"][0]
    assert (shown["number"], shown["outcome"], shown["reason"]) == (4, "pending", failed["reason"])
    daemon.stop()
    # Switched off, nothing pending runs, and why is seen.
    target.execute("""UPDATE "T 2" SET v = id""")
    daemon = pair.start()
    assert daemon.wait_for_event("ddl_failed")["reason"] == "ddl.apply is off"
    shown = json.loads(run_command(pair.route, "status", "--json").stdout)["ddl"][0]
    assert (shown["number"], shown["outcome"], shown["reason"]) == (4, "pending", "ddl.apply is off")
    daemon.stop()
    assert target.rows(indexes) == [("n2", True), ("t_v", True)]
    daemon = pair.start(settings={**_ON, "ddl.skip": "4"})
    daemon.wait_for_event("ddl_left_out")
    # Only what the role may do here, and only what can be found again.
    for text, why in (
        ("CREATE INDEX CONCURRENTLY ON t (v)", "cannot be told"),
        ("CREATE INDEX CONCURRENTLY i ON t (no_such_column)", "does not exist"),
        ("CREATE INDEX CONCURRENTLY i ON no_such_table (v)", "must be owner"),
        ("ALTER TABLE p DETACH PARTITION q CONCURRENTLY", "cannot run inside a transaction"),
        ("REINDEX TABLE CONCURRENTLY t", "REINDEX cannot be replicated"),
        ("VACUUM t", "VACUUM cannot be replicated"),
    ):
        assert why in _refused(source, _ddl(text))
    assert source.rows("SELECT to_regclass('parapply_probe')") == [(None,)]
    source.execute("CREATE UNIQUE INDEX t_v ON t (v)")
    pair.write(_ddl("DROP INDEX CONCURRENTLY t_v"))
    daemon.wait_for_event("ddl_applied")
    assert target.rows(indexes) + target.rows(_IS_TRAPPED) == [("n2", True), (False,)]
    daemon.stop()


@pytest.mark.pg_majors(15, 18)
def test_what_people_type_is_recorded(  # noqa: PLR0915  one pair of servers for all of it
    pair: Pair, app_roles: tuple[str, str], run_command: RunCommand
) -> None:
    """With event triggers a command has its place in the stream; what cannot be recorded exactly is refused."""
    app, _ = app_roles
    source = pair.source
    pair.create(_TABLE + "CREATE SCHEMA mine; CREATE TABLE mine.t (id int PRIMARY KEY)")
    _own(pair.target)
    run_command(pair.route, "init", "--ddl=automatic", code=3)
    assert source.rows("SELECT to_regclass('parapply.ddl_queue')") == [(None,)]
    source.execute(f"GRANT CREATE ON DATABASE {source.dbname} TO {source.source_role}")
    refused = run_command(pair.route, "init", "--ddl=automatic")
    assert "only a superuser may make event triggers" in refused.stderr, refused.stderr
    assert refused.stderr.count("\n") == 1
    printed = run_command(pair.route, "init", "--ddl=print-automatic")
    source.execute(_TRAP)
    for _ in range(2):
        source.execute(printed.stdout)
    assert source.rows(_IS_TRAPPED) == [(False,)]
    source.execute("DROP OPERATOR public.= (oid, regclass)")
    source.execute(
        f"SET parapply.record_ddl = 'off'; ALTER SCHEMA mine OWNER TO {app}; ALTER TABLE mine.t OWNER TO {app};"
        f" GRANT TEMP ON DATABASE {source.dbname} TO {app}"
    )
    pair.target.execute(f"ALTER SCHEMA mine OWNER TO {app}; ALTER TABLE mine.t OWNER TO {app}")
    # The target is also a publisher with event triggers: what comes to it is not sent on, whatever sessions set.
    pair.drain()
    pair.target.execute("CREATE PUBLICATION pub FOR TABLE t")
    with pytest.raises(DemoError, match="belongs to a role that is no superuser"):
        pair.target.execute(printed.stdout)
    pair.target.execute(
        f"ALTER SCHEMA parapply OWNER TO CURRENT_USER; GRANT ALL ON SCHEMA parapply TO {pair.target.target_role};"
        + printed.stdout
    )
    daemon = pair.start(settings={**_ON, "target.session_replication_role": "origin"})

    # Each in its place; the names, literals and the schema mean there what they meant here.
    told = _type(
        source,
        "ALTER TABLE t ADD n int DEFAULT 5;",
        "INSERT INTO t VALUES (1, 'a')",
        "/* said */ ALTER TABLE t DROP v -- done",
        "BEGIN",
        "CREATE SCHEMA other",
        "SET LOCAL search_path = other, public",
        "SET LOCAL DateStyle = 'German'",
        "CREATE TABLE made (id int PRIMARY KEY, at date DEFAULT '1.2.2003')",
        "INSERT INTO made VALUES (1)",
        "SAVEPOINT one",
        "DROP TABLE t",
        "ROLLBACK TO one",
        "COMMIT",
        "CREATE TABLE parts (id int PRIMARY KEY, v serial) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (9)",
        "INSERT INTO parts VALUES (1)",
        "ALTER SCHEMA other RENAME TO another",
        "INSERT INTO another.made (id) VALUES (2)",
        _ddl("ALTER TABLE t ADD once int"),
        "CREATE INDEX CONCURRENTLY typed ON t (n)",
    )
    assert told == []
    recorded = [
        "ALTER TABLE", "ALTER TABLE", "CREATE SCHEMA", "CREATE TABLE", "CREATE TABLE", "CREATE TABLE", "ALTER SCHEMA",
        "ALTER TABLE", "CREATE INDEX",
    ]  # fmt: skip
    tags = "SELECT tag FROM parapply.ddl_queue ORDER BY id"
    assert [tag for (tag,) in source.rows(tags)] == recorded

    # Only some of the embedded servers have one.
    has_extension = bool(source.rows("SELECT FROM pg_available_extensions WHERE name = 'vector'"))
    # Nothing for the targets: temporary objects, nothing at all, what is said to be for here only, another tag.
    told = _type(
        source,
        "CREATE TEMP TABLE t (x int)",
        "ALTER TABLE t ADD y int",
        "CREATE INDEX ON t (x)",
        "DROP TABLE t",
        "SELECT 1 AS x INTO TEMP t",
        "DROP TABLE IF EXISTS no_such_table",
        "CREATE TABLE IF NOT EXISTS public.t (other int)",
        "DO $$ BEGIN CREATE TEMP TABLE u (); DROP TABLE u; END $$",
        "CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS 'BEGIN DROP TABLE public.t; RETURN 1; END'",
        *([f"{word} EXTENSION vector" for word in ("CREATE", "DROP")] if has_extension else []),
        "SET parapply.record_ddl = 'off'",
        "CREATE INDEX here_only ON another.made (at)",
    )
    assert [text for text in told if text.startswith("parapply")] == [
        f"parapply: CREATE {what} is not recorded for the targets"
        for what in ("FUNCTION", *(["EXTENSION"] if has_extension else []))
    ]
    # Commands that would have another result there.
    assert "several in a string" in _not_recorded(source, "ALTER TABLE t ADD a int; ALTER TABLE t ADD b int")
    for text in ("DO $$ BEGIN ALTER TABLE t ADD a int; END $$", "SELECT f()"):
        assert "inside a function" in _not_recorded(source, text)
    assert "fills it" in _not_recorded(source, "CREATE TABLE filled AS SELECT 1 AS x")
    assert "get other values of a" in _not_recorded(source, "ALTER TABLE t ADD a timestamptz DEFAULT now()")
    assert "while public.t is UNLOGGED" in _not_recorded(source, "ALTER TABLE t SET UNLOGGED")
    assert "temporary object" in _not_recorded(source, "CREATE TEMP TABLE u ()", "CREATE TABLE b (LIKE u)")
    assert "before the name" in _not_recorded(source, "CREATE INDEX CONCURRENTLY ON t (n)")
    assert "Run it by itself" in _refused(source, _ddl("CREATE INDEX CONCURRENTLY another ON t (n)"))
    assert source.rows("SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 't'::regclass ORDER BY 1") == [
        ("t_pkey",), ("typed",),
    ]  # fmt: skip
    assert "the role" in _not_recorded(source, f"SET ROLE {app}", "ALTER TABLE mine.t ADD a int")
    assert source.rows(tags) == [(tag,) for tag in recorded]
    daemon.wait_caught_up()
    pair.check_equal()
    pair.check_equal("another")
    assert pair.target.rows("SELECT id, at::text FROM another.made ORDER BY id") == [
        (1, "2003-02-01"), (2, "2003-02-01"),
    ]  # fmt: skip
    daemon.wait_for_event("ddl_applied", count=len(recorded))
    daemon.stop()
    assert [event for event in daemon.events if event["level"] in {"warning", "error"}] == []
    assert (
        pair.target.rows("SELECT indexrelid::regclass::text FROM pg_index WHERE indexrelid = 'typed'::regclass") != []
    )
    assert pair.target.rows("SELECT count(*) FROM parapply.ddl_queue") == [(0,)]
    # A dump of the schema is without the triggers.
    pg_dump = str(find_program("pg_dump", find_binaries()))
    script = asyncio.run(schemas.dump(pg_dump, Login(source.dsn), without=["parapply"]))
    assert b"\nCREATE EVENT TRIGGER" not in script
    assert b"\nCREATE TABLE public.t " in script

    # A grant lets a role have recorded the commands that it may run anyway. Their meaning cannot be changed by the
    # role's code that runs within them.
    source.execute(f"GRANT INSERT (command) ON parapply.ddl_queue TO {app}")
    _type(
        source,
        f"SET ROLE {app}",
        "SET search_path = mine",
        "CREATE FUNCTION sly() RETURNS int LANGUAGE plpgsql AS $$ BEGIN PERFORM"
        " set_config('search_path', 'public', true), set_config('parapply.ddl_state', '{}', true); RETURN 1; END $$",
        "INSERT INTO t VALUES (1)",
        "CREATE INDEX by_sly ON t (id)",
        "ALTER TABLE t ADD c int CHECK (sly() = c)",
        "SET parapply.record_ddl = 'off'",
        "CREATE DOMAIN mine.text AS pg_catalog.text CHECK (mine.sly() = 1)",
    )
    _type(source, f"SET ROLE {app}", "SET search_path = mine, pg_catalog", "ALTER TABLE t ADD d int DEFAULT 1")
    assert "must be owner of table t" in _refused(source, f"SET ROLE {app}; ALTER TABLE public.t ADD sly int")
    for text in ("SELECT parapply.ddl_ends()", "INSERT INTO parapply.ddl_running VALUES (1)",
                 "INSERT INTO parapply.ddl_queue (command, tag) VALUES ('DROP TABLE public.t', 'DROP TABLE')",
                 "CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION parapply.ddl_ends()"):  # fmt: skip
        assert "permission denied" in _refused(source, f"SET ROLE {app}; {text}")
    assert [path for (path,) in source.rows(
        f"SELECT settings ->> 'search_path' FROM parapply.ddl_queue WHERE role_name = '{app}' ORDER BY id"
    )] == ["mine", "mine", "mine, pg_catalog"]  # fmt: skip
    pair.target.execute("CREATE FUNCTION mine.sly() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    # The role of that name runs it there.
    daemon = pair.start_only(settings={**_ON, "ddl.role": "*"})
    assert daemon.exit_code(30) == 5, daemon.log_tail()
    assert re.search(f'CREATE INDEX: insufficient_privilege.*permission denied to set role "{app}"', daemon.failure)
    pair.target.execute(f"GRANT {app} TO {pair.target.target_role}")
    pair.drain(settings={**_ON, "ddl.role": "*"})
    pair.check_equal()
    pair.check_equal("mine")
    assert pair.target.rows("SELECT relowner::regrole::text FROM pg_class WHERE relname = 'by_sly'") == [(app,)]

    # By configuration it is only warned of.
    printed = run_command(pair.route, "init", "--ddl=print-automatic", "--ddl-inexact", "warn")
    source.execute(printed.stdout)
    (warning,) = _type(source, "DO $$ BEGIN CREATE INDEX warned_of ON t (id); END $$")
    assert "not recorded for the targets: it runs inside a function" in warning
    assert source.rows("SELECT to_regclass('warned_of') IS NULL") == [(False,)]
    assert "warn; recorded: ALTER DOMAIN" in str(
        source.rows("SELECT obj_description(oid) FROM pg_event_trigger WHERE evtname = 'parapply_ddl_4_end'")
    )
