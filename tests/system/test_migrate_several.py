"""One command migrates all databases of an instance: killed anywhere, each is complete, and equal at the end."""

from __future__ import annotations

import json
import os
import signal
import threading
import tomllib
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from parapply import failpoints
from parapply.config_fleet import slot_name
from parapply.demo.binaries import find_binaries, find_program, server_account
from parapply.printable import printable
from parapply.quoting import toml_string
from tests.fixtures.databases import Database
from tests.fixtures.fleet import FileRoute, wait_for
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents
from tests.fixtures.terminal import Terminal

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.servers import OwnServers

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300), pytest.mark.pg_majors(18), pytest.mark.needs_majors(15, 18)]

_HOSTILE = "q\"u'o\\te\n%s {0} ../ü <b> host=x"
_OWNER = 'Own"er %s'
_UTF8 = "ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'"
#: The largest has the most rows. The options of each are as CREATE DATABASE takes them.
_DATABASES = {
    "largest": (_UTF8, 3000),
    _HOSTILE: (_UTF8, 10),
    "Upper Case": ("ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'", 10),
    "-dash": (_UTF8, 10),
    "größe": ("ENCODING 'UTF8' LC_COLLATE 'C.UTF-8' LC_CTYPE 'C.UTF-8'", 10),
    "%(x)s;--": (_UTF8, 10),
}
_TABLES = """
CREATE TABLE parent (id int PRIMARY KEY, word text NOT NULL UNIQUE);
CREATE TABLE child (id serial PRIMARY KEY, parent_id int NOT NULL REFERENCES parent, note text);
CREATE INDEX ON child (parent_id);
CREATE MATERIALIZED VIEW sums AS SELECT count(*) FROM child;
INSERT INTO parent SELECT i, 'w' || i FROM generate_series(1, {n}) AS i;
INSERT INTO child (parent_id, note) SELECT i, 'über' FROM generate_series(1, {n}) AS i;
CREATE PUBLICATION pub FOR ALL TABLES;
"""
_LOAD = """
WITH one AS (INSERT INTO parent SELECT max(id) + 1, 'w' || max(id) + 1 FROM parent RETURNING id)
INSERT INTO child (parent_id) SELECT id FROM one"""
#: Each kill is of the command that goes on with what the one before has left; the number counts all databases.
_KILLS = (
    f"{failpoints.MIGRATE_DATABASE}:kill:3",
    f"{failpoints.MIGRATE_BEGUN}:kill:2",
    f"{failpoints.MIGRATE_DONE}:kill:2",
    f"{failpoints.COPY_SLOT}:kill:2",
    f"{failpoints.COPY_TABLE_DONE}:kill:2",
    f"{failpoints.COPY_STATE}:kill:1",
    f"{failpoints.MIGRATE_ITEM}:kill:5",
    f"{failpoints.MIGRATE_DONE}:kill:9",
)
_SPACE = "Sp'ace \" %s"
_SPACES = """
SELECT spcname, spcoptions, pg_get_userbyid(spcowner), pg_tablespace_location(oid),
       ARRAY(SELECT one::text FROM unnest(spcacl) AS one ORDER BY 1)
  FROM pg_tablespace WHERE spcname !~ '^pg_' ORDER BY 1"""
#: Everything of a database that is not inside of it.
_PROPERTIES = """
SELECT pg_get_userbyid(datdba), pg_encoding_to_char(encoding), datcollate, datctype, datlocprovider,
       COALESCE(to_jsonb(d) ->> 'datlocale', to_jsonb(d) ->> 'daticulocale'), datconnlimit, spcname,
       shobj_description(d.oid, 'pg_database'),
       ARRAY(SELECT CASE grantee WHEN 0 THEN '' ELSE pg_get_userbyid(grantee) END || privilege_type || is_grantable
               FROM aclexplode(datacl) ORDER BY 1),
       ARRAY(SELECT CASE setrole WHEN 0 THEN '' ELSE pg_get_userbyid(setrole) END || setconfig::text
               FROM pg_db_role_setting WHERE setdatabase = d.oid ORDER BY 1)
  FROM pg_database AS d JOIN pg_tablespace AS t ON t.oid = dattablespace WHERE datname = {}"""


class _Instance:
    """A server of 15 with databases, an empty one of 18, and the command's file."""

    def __init__(self, source: PgServer, target: PgServer, path: Path, run_command: RunCommand) -> None:
        self.source = source
        self.target = target
        self.path = path
        self._run_command = run_command
        values: dict[str, Any] = {
            "source.dsn": source.dsn(), "source.slot": "many", "target.dsn": target.dsn(), **FAST,
        }  # fmt: skip
        lines = [f"{key} = {toml_string(value) if isinstance(value, str) else value}" for key, value in values.items()]
        path.write_text("\n".join(['source.publications = ["pub"]', *lines]), encoding="utf-8")
        path.chmod(0o640)

    def run(self, command: str, *arguments: str, point: str = "") -> subprocess.CompletedProcess[str]:
        environ = {"PARAPPLY_FAILPOINT": point} if point else {}
        return self._run_command(self.file_route(), command, *self.words(*arguments), environ=environ)

    def words(self, *arguments: str) -> list[str]:
        return ["--config", str(self.path), "--all-databases", "--exclude-databases", "postgres", *arguments]

    def file_route(self) -> Route:
        ends = [Database(dbname="postgres", server=server) for server in (self.source, self.target)]
        return FileRoute(source=ends[0], target=ends[1])

    def routes(self, *names: str) -> dict[str, Route]:
        return {
            name: Route(
                source=Database(dbname=name, server=self.source),
                target=Database(dbname=name, server=self.target),
                slot=slot_name("many", name),
            )
            for name in names
        }

    def check_properties(self, name: str) -> None:
        query = sql.SQL(_PROPERTIES).format(sql.Literal(name))
        assert self.target.execute(query) == self.source.execute(query)


@pytest.fixture
def instance(own_servers: OwnServers, tmp_path: Path, run_command: RunCommand) -> _Instance:
    """Servers of the test alone, because all their databases are meant."""
    found = _Instance(
        own_servers("old", major=15), own_servers("new", major=18), tmp_path / "template.toml", run_command
    )
    who = sql.Identifier(_OWNER)
    found.source.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(who))
    return found


def _make(server: PgServer, name: str, options: str, n_rows: int) -> None:
    make = sql.SQL("CREATE DATABASE {} TEMPLATE template0 {}").format(sql.Identifier(name), sql.SQL(options))
    server.execute(make)
    server.execute(_TABLES.format(n=n_rows), dbname=name)
    for text in (
        "ALTER DATABASE {0} OWNER TO {1}",
        "REVOKE ALL ON DATABASE {0} FROM PUBLIC",
        "GRANT CONNECT ON DATABASE {0} TO PUBLIC",
        "GRANT CREATE ON DATABASE {0} TO postgres WITH GRANT OPTION",
        "ALTER DATABASE {0} CONNECTION LIMIT 90",
        'ALTER DATABASE {0} SET search_path = "a\'b", public, "%s"',
        "ALTER ROLE {1} IN DATABASE {0} SET work_mem = '5MB'",
        "COMMENT ON DATABASE {0} IS 'it''s; \\ %s'",
    ):
        server.execute(sql.SQL(text).format(sql.Identifier(name), sql.Identifier(_OWNER)))


class _Load:
    """Commits rows in each database, one after the other, until it is ended."""

    def __init__(self, server: PgServer, names: list[str]) -> None:
        self._sessions = [psycopg.connect(server.dsn(name), autocommit=True) for name in names]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for session in self._sessions:
            session.close()

    def _run(self) -> None:
        while True:
            for session in self._sessions:
                session.execute(_LOAD.encode())
                if self._ended.wait(0.02):
                    return


def test_an_instance_that_is_migrated_by_one_command(
    instance: _Instance, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Killed between and within steps of its databases while rows come, the same command goes on.

    At the end all have the publisher's properties, roles and rows, also by the daemon of the file that it writes.
    """
    for name, (options, n_rows) in _DATABASES.items():
        _make(instance.source, name, options, n_rows)
    fleet = tmp_path / "fleet.toml"
    where = ("--pg-bin", _pg_bin(), "--daemon-log", str(tmp_path), "--run-config", str(fleet))
    arguments = ("--roles", "--jobs", "3", *where)
    routes = instance.routes(*_DATABASES)
    with _Load(instance.source, list(_DATABASES)):
        planned = json.loads(instance.run("migrate", *arguments, "--dry-run", "--json").stdout)
        assert [one["databases"] for one in planned["servers"]] == [sorted(_DATABASES)]
        assert _OWNER in planned["servers"][0]["roles"]
        for point in _KILLS:
            killed = instance.run("migrate", *arguments, point=point)
            assert killed.returncode == -signal.SIGKILL, f"{point} was not reached: {killed.stdout}{killed.stderr}"
        done = instance.run("migrate", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{printable(_HOSTILE)}: views: done" in done.stdout
        daemon = start_daemon(instance.file_route(), "--config", str(fleet))
        for route in routes.values():
            wait_for(daemon, "source_connected", route)
    for name, route in routes.items():
        route.wait_caught_up(check=daemon.check_running)
        assert contents(route.target, "public") == contents(route.source, "public")
        instance.check_properties(name)
    daemon.stop()
    again = json.loads(instance.run("migrate", *arguments, "--dry-run", "--json").stdout)
    assert {one["database"]: one["report"]["steps"] for one in again["databases"]} == {key: [] for key in _DATABASES}
    roles = "SELECT rolname, rolcanlogin, rolpassword FROM pg_authid WHERE rolname !~ '^pg_' ORDER BY 1"
    assert instance.target.execute(roles) == instance.source.execute(roles)
    made = "SELECT datname FROM pg_database WHERE NOT datistemplate ORDER BY 1"
    assert instance.target.execute(made) == instance.source.execute(made)


def test_one_that_fails_stops_no_other(instance: _Instance, run_command: RunCommand, tmp_path: Path) -> None:
    """It is named with its hint, and the same command goes on with it; `top` and `drop` take all of them.

    A tablespace comes with its options and privileges. A database that exists stays as it is.
    """
    names = ["a", _HOSTILE, "there"]
    for name in names:
        _make(instance.source, name, _UTF8, 10)
    instance.source.execute("DROP PUBLICATION pub", dbname=_HOSTILE)
    _make_space(instance.source)
    instance.target.execute("CREATE DATABASE there")
    fleet = tmp_path / "fleet.toml"
    arguments = ("--pg-bin", _pg_bin(), "--daemon-log", str(tmp_path), "--run-config", str(fleet))
    refused = instance.run("migrate", *arguments)
    assert refused.returncode == 4, refused.stdout + refused.stderr
    assert "roles of the publisher are missing" in refused.stdout
    failed = instance.run("migrate", *arguments, "--roles", "--json")
    assert failed.returncode == 3, failed.stdout + failed.stderr
    found = json.loads(failed.stdout.splitlines()[-1])
    ends = {one["database"]: (one["exit_code"], one["hint"]) for one in found["databases"]}
    assert {name: code for name, (code, _) in ends.items()} == {"a": 0, _HOSTILE: 3, "there": 0}
    assert ends[_HOSTILE][1]
    instance.source.execute("CREATE PUBLICATION pub FOR ALL TABLES", dbname=_HOSTILE)
    _migrate_in_terminal(instance, *arguments, "--roles")
    assert fleet.stat().st_mode & 0o777 == 0o640
    assert sorted(tomllib.loads(fleet.read_text(encoding="utf-8"))["databases"]) == sorted(names)
    for name in ("a", _HOSTILE):
        instance.check_properties(name)
    assert instance.target.execute("SELECT datconnlimit FROM pg_database WHERE datname = 'there'") == [(-1,)]
    assert instance.target.execute(_SPACES) == instance.source.execute(_SPACES) != []
    _check_commands(instance, names)
    _check_one_of_file(instance, run_command, fleet, names[1:])
    _check_dropped(instance, names)


def _migrate_in_terminal(instance: _Instance, *arguments: str) -> None:
    """On a terminal a table shows all databases, and lines go above it."""
    shown = Terminal(["migrate", *instance.words(*arguments)])
    try:
        shown.wait_for("MB")
        shown.wait_for("schema: begun")
        shown.wait_for("next: parapply run --config")
        assert shown.exit_code() == 0
    finally:
        shown.close()


def _check_commands(instance: _Instance, names: list[str]) -> None:
    shown = json.loads(instance.run("migrate", "--show", "--json").stdout)
    latest = {one["database"]: one["report"]["steps"][-1]["step"] for one in shown["databases"]}
    assert latest == dict.fromkeys(names, "views")
    top = json.loads(instance.run("top", "--once", "--json").stdout)
    assert {one["database"]: one["report"]["database_name"] for one in top["databases"]} == {
        name: name for name in names
    }


def _check_one_of_file(instance: _Instance, run_command: RunCommand, fleet: Path, others: list[str]) -> None:
    """The daemon that `migrate` starts for one database of a file follows that one alone."""
    words = ("--config", str(fleet), "--database", "a", "--only", "follow", "--no-wait")
    done = run_command(instance.file_route(), "migrate", *words, "--daemon-log", str(fleet.with_suffix(".log")))
    pids = "SELECT pid FROM parapply.slots WHERE pid IS NOT NULL"
    target = Database(dbname="a", server=instance.target)
    ((pid,),) = target.rows(pids)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert [Database(dbname=name, server=instance.target).rows(pids) for name in others] == [[] for _ in others]
    finally:
        os.kill(pid, signal.SIGTERM)
    target.wait_until("SELECT state = 'stopped' FROM parapply.slots")


def _check_dropped(instance: _Instance, names: list[str]) -> None:
    asked = instance.run("drop")
    slots = "SELECT slot_name FROM pg_replication_slots"
    assert len(instance.source.execute(slots)) == len(names)
    assert [f"of database {printable(name)!r} (applied up to" in asked.stdout for name in names] == [True] * 3, asked
    assert asked.stdout.count("[y/N]") == 1
    dropped = instance.run("drop", "--yes")
    assert dropped.returncode == 0, dropped.stdout + dropped.stderr
    assert instance.source.execute(slots) == []
    for route in instance.routes(*names).values():
        assert route.target.rows("SELECT to_regnamespace('parapply')") == [(None,)]


def _make_space(server: PgServer) -> None:
    """Put a database into a tablespace, in a folder where the other server also finds a place."""
    place, account = server.directory / "space", server_account()
    place.mkdir()
    if account is not None:
        os.chown(place, account.uid, account.gid)
    name = sql.Identifier(_SPACE)
    for text in (
        "CREATE TABLESPACE {0} LOCATION {1} WITH (random_page_cost = 1.5)",
        "GRANT CREATE ON TABLESPACE {0} TO {2}",
        "ALTER DATABASE a SET TABLESPACE {0}",
    ):
        server.execute(sql.SQL(text).format(name, sql.Literal(str(place)), sql.Identifier(_OWNER)))


def _pg_bin() -> str:
    return str(find_program("pg_dump", find_binaries()).parent)
