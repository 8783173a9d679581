"""A migration of a database with everything that is hard to move, from one version to another, killed on its way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql

from parapply import failpoints
from parapply.demo.binaries import find_binaries, find_program
from parapply.demo.server import PgServer
from parapply.source.ddl_queue import install_sql
from parapply.target.session import lease
from tests.fixtures.daemon import Daemon
from tests.fixtures.plain import FAST
from tests.fixtures.roles import SOURCE_ROLE, TARGET_ROLE, run_script
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase, ServerOf

_SCHEMAS = ("public", "S.p 1")
_NASTY = """
CREATE SCHEMA "S.p 1";
CREATE TYPE mood AS ENUM ('sad', 'it''s; ok');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE pair AS (a int, b text);
CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS $x$BEGIN NEW.note := 'a; "b'; RETURN NEW; END$x$;
CREATE TABLE "S.p 1"."t%s;""x" (
  "a%b" int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, m mood, p positive, both_of pair,
  twice int GENERATED ALWAYS AS ("p" * 2) STORED);
CREATE TABLE root (id int, region text, at date NOT NULL, PRIMARY KEY (id, region, at)) PARTITION BY LIST (region);
CREATE TABLE root_a PARTITION OF root FOR VALUES IN ('a') PARTITION BY RANGE (at);
CREATE TABLE root_a_1 PARTITION OF root_a FOR VALUES FROM ('2026-01-01') TO ('2026-07-01');
CREATE TABLE root_b PARTITION OF root FOR VALUES IN ('b');
CREATE INDEX root_at ON root (at DESC) INCLUDE (id);
CREATE TABLE parent (id int PRIMARY KEY DEFERRABLE, code text UNIQUE, span int4range,
  EXCLUDE USING gist (span WITH &&));
ALTER TABLE parent REPLICA IDENTITY FULL;
CREATE TABLE child (id serial PRIMARY KEY, parent_code text REFERENCES parent (code) DEFERRABLE INITIALLY DEFERRED,
  root_id int, region text, at date, note text, FOREIGN KEY (root_id, region, at) REFERENCES root);
CREATE TRIGGER noted BEFORE UPDATE ON child FOR EACH ROW WHEN (OLD.note IS DISTINCT FROM 'x;y')
  EXECUTE FUNCTION later();
CREATE TABLE tree (id int PRIMARY KEY, up int REFERENCES tree);
CREATE TABLE no_key (n int, t text);
CREATE UNLOGGED TABLE cache (k text PRIMARY KEY, v int);
CREATE TABLE rules (n int PRIMARY KEY);
CREATE RULE both_rows AS ON INSERT TO rules WHERE (NEW.n < 0) DO INSTEAD (
  DELETE FROM rules WHERE (n = (- NEW.n)); INSERT INTO no_key (t) VALUES ('; it''s'));
CREATE VIEW needs_key AS SELECT t.id, t.up, count(*) AS n FROM tree AS t JOIN tree AS u ON u.up = t.id GROUP BY t.id;
CREATE MATERIALIZED VIEW "z first" AS SELECT parent_code, count(*) AS n FROM child GROUP BY 1;
CREATE MATERIALIZED VIEW a_second AS SELECT sum(n) AS n FROM "z first" WITH DATA;
CREATE UNIQUE INDEX ON "z first" (parent_code);
CREATE SEQUENCE alone START 100 INCREMENT -5 MINVALUE -1000 MAXVALUE 1000;
CREATE STATISTICS together ON root_id, region FROM child;
COMMENT ON INDEX root_at IS
  E'x\\n--\\n-- Name: evil; Type: INDEX; Schema: public; Owner: x\\n--\\n\\nDROP TABLE no_key;\\n';
ALTER TABLE rules ENABLE ROW LEVEL SECURITY;
CREATE POLICY seen ON rules USING ((n > 0));
"""
_ROWS = """
INSERT INTO "S.p 1"."t%s;""x" (m, p, both_of) SELECT 'it''s; ok', i, ROW(i, 'x')::pair FROM generate_series(1, 20) AS i;
INSERT INTO root SELECT i, CASE i % 2 WHEN 0 THEN 'a' ELSE 'b' END, '2026-03-01' FROM generate_series(1, 60) AS i;
INSERT INTO parent SELECT i, 'c' || i, int4range(i * 10, i * 10 + 5) FROM generate_series(1, 20) AS i;
INSERT INTO child (parent_code, root_id, region, at) SELECT 'c' || i, i * 2, 'a', '2026-03-01'
  FROM generate_series(1, 20) AS i;
INSERT INTO tree SELECT i, nullif(i - 1, 0) FROM generate_series(1, 20) AS i;
INSERT INTO no_key SELECT i % 3, 'same' FROM generate_series(1, 9) AS i;
INSERT INTO cache VALUES ('k', 1);
REFRESH MATERIALIZED VIEW "z first"; REFRESH MATERIALIZED VIEW a_second;
SELECT nextval('alone'), nextval('alone');
SELECT lo_from_bytea(4711, decode(repeat('00ff5c', 700000), 'hex'));
CREATE PUBLICATION pub FOR ALL TABLES;
"""
#: Between two commands: rows of two tables that refer to each other, and moves between partitions.
_LATER = """
INSERT INTO parent VALUES ({n}, 'later{n}', NULL);
INSERT INTO child (parent_code, root_id, region, at) VALUES ('later{n}', 2, 'a', '2026-03-01');
UPDATE root SET region = 'b' WHERE id = {n} - 958;
UPDATE child SET note = 'x;y' WHERE id % 3 = 0;
"""
#: Each kill is of the command that goes on with what the one before has left.
_KILLS = (
    f"{failpoints.MIGRATE_BEGUN}:kill:2",  # the schema is not made
    f"{failpoints.MIGRATE_DONE}:kill:1",  # it is made, the step is not noted
    f"{failpoints.COPY_TABLE_DONE}:kill:3",  # some tables are copied
    f"{failpoints.MIGRATE_ITEM}:kill:4",  # some indexes are made
    f"{failpoints.MIGRATE_DONE}:kill:2",  # the stream is applied as far as the foreign keys need it
    f"{failpoints.MIGRATE_ITEM}:kill:1",  # a foreign key is made
)


@pytest.fixture
def owner(request: pytest.FixtureRequest, server_of: ServerOf) -> Iterator[str]:
    """The name of a role; what the test has made of it goes after the databases."""
    name = f"owner {os.getpid()}"
    yield name
    versions = request.node.callspec.params["versions"]
    for server in (server_of("source", versions[0]), server_of("target", versions[1])):
        server.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))


@pytest.fixture
def nasty(owner: str, versions: tuple[int, int], server_of: ServerOf, new_database: NewDatabase) -> Iterator[Route]:
    """A source of one version with all of it, and an empty target of another; superusers on both."""
    source = new_database(server_of("source", versions[0]), "source")
    target = new_database(server_of("target", versions[1]), "empty")
    source.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x' CONNECTION LIMIT 7").format(sql.Identifier(owner)))
    source.execute(_NASTY)
    source.execute(_ROWS)
    who = sql.Identifier(owner)
    for text in (
        "ALTER TABLE parent OWNER TO {}",
        "GRANT SELECT (id) ON child TO {}",
        "GRANT SELECT ON tree TO PUBLIC",
    ):
        source.execute(sql.SQL(text).format(who))
    yield Route(source=source, target=target, settings=FAST, source_dsn=source.dsn, target_dsn=target.dsn)
    # The command's daemon outlives it, also where the test fails.
    if target.rows("SELECT to_regclass('parapply.slots') IS NOT NULL") == [(True,)]:
        for (pid,) in target.rows("SELECT pid FROM parapply.slots WHERE pid IS NOT NULL AND state <> 'stopped'"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_PAIRS = [
    pytest.param((15, 18), id="15-to-18", marks=pytest.mark.needs_majors(15, 18)),
    pytest.param((18, 15), id="18-to-15", marks=pytest.mark.needs_majors(15, 18)),
]
_OPTIONS = ("--roles", "--large-objects", "copy", "--unlogged", "copy", "--jobs", "3", "--no-wait")


@pytest.mark.parametrize("versions", _PAIRS[:1])
def test_a_migration_that_is_killed_again_and_again(nasty: Route, run_command: RunCommand, tmp_path: Path) -> None:
    """Killed between and within its steps while rows come, it goes on each time; at the end both sides are equal."""
    arguments = (*_OPTIONS, "--pg-bin", _pg_bin(), "--daemon-log", str(tmp_path / "daemon.log"))
    for number, point in enumerate(_KILLS, 1000):
        killed = run_command(nasty, "migrate", *arguments, environ={"PARAPPLY_FAILPOINT": point})
        assert killed.returncode == -signal.SIGKILL, f"{point} was not reached: {killed.stdout}{killed.stderr}"
        nasty.source.execute(_LATER.format(n=number))
    # No stream brings the rows of a table that is paused: the answer names it, and the command that does.
    run_command(nasty, "pause", "public.parent", code=0)
    refused = run_command(nasty, "migrate", *arguments)
    assert (refused.returncode, "tables are paused: public.parent" in refused.stderr) == (4, True), refused
    run_command(nasty, "resume", "public.parent", code=0)
    run_command(nasty, "migrate", *arguments, "--only", "catch-up", code=0)
    run_command(nasty, "migrate", *arguments, code=0)
    nasty.source.execute(_LATER.format(n=2000))
    _end_daemon(nasty)
    _check_equal(nasty)
    found = nasty.target.rows("SELECT step FROM parapply.migrations WHERE state <> 'done'")
    assert found == []
    # Where clients write to the target by now, nothing of theirs goes.
    note = "INSERT INTO parapply.cutovers (slot_id, step, reverse_slot, made_slot, made_publication, fence, opens)"
    nasty.target.execute(f"{note} SELECT slot_id, 'done', 'back', true, true, 'database', '' FROM parapply.slots")
    nasty.target.execute("SELECT lo_from_bytea(77001, 'of a client')")
    for step in ("large-objects", "unlogged", "copy", "sequences"):
        refused = run_command(nasty, "migrate", *arguments, "--only", step)
        assert (refused.returncode, "was cut over: the target has taken over" in refused.stderr) == (4, True), refused
    assert nasty.target.rows("SELECT lo_get(77001)") == [(b"of a client",)]
    assert nasty.target.rows("SELECT count(*) > 1 FROM (SELECT DISTINCT start_lsn FROM parapply.copies) AS a") == [
        (True,)
    ]


@pytest.mark.parametrize("versions", _PAIRS[1:])
def test_a_migration_to_an_older_version(nasty: Route, run_command: RunCommand, tmp_path: Path) -> None:
    """A newer pg_dump's settings are left out for an older target; a statement it cannot take is refused with the line.

    Changes of the publisher's schema after it was brought are named; a command that no stream would bring is refused.
    """
    arguments = ("--pg-bin", _pg_bin(), "--daemon-log", str(tmp_path / "daemon.log"))
    refused = run_command(nasty, "migrate", *arguments, "--exclude", "public.par*", code=3)
    for what in ("1 large objects", "unlogged tables hold rows, which no stream brings: public.cache",
                 "left out, and published all the same: public.parent", "foreign keys lead to tables that are left out",
                 "roles of the publisher are missing"):  # fmt: skip
        assert what in refused.stderr
    assert nasty.target.rows("SELECT count(*) FROM pg_namespace WHERE nspname = 'parapply'") == [(0,)]
    nasty.source.execute("CREATE TABLE too_new (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a + 1) VIRTUAL)")
    _check_objects_of_others(nasty, run_command, *arguments, *_OPTIONS)
    refused = run_command(nasty, "migrate", *arguments, *_OPTIONS, code=4)
    assert "in the dump's line: b integer GENERATED ALWAYS AS ((a + 1))" in refused.stderr
    nasty.source.execute("DROP TABLE too_new")
    # The check was long ago: what is published is looked at again before the schema is made.
    nasty.source.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR TABLE tree")
    refused = run_command(nasty, "migrate", *arguments, *_OPTIONS, code=3)
    assert "no publication has these tables, so their rows would stay behind" in refused.stderr
    nasty.source.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES")
    nasty.source.execute(install_sql(["pub"]))
    options = (*arguments, *_OPTIONS, "--set", "ddl.apply=true")
    # The check leaves a role that does not exist yet to this step.
    refused = run_command(nasty, "migrate", *options, "--set", "ddl.role=nosuch", "--only", "roles", code=4)
    assert re.search(r'role "nosuch" does not exist. Hint: GRANT "nosuch" TO "\w+";', refused.stderr)
    run_command(nasty, "migrate", *options, "--to", "schema", code=0)
    nasty.source.execute("SELECT parapply.replicate_ddl('CREATE INDEX came_later ON tree (up)')")
    refused = run_command(nasty, "migrate", *options, code=3)
    assert "1 commands of parapply.ddl_queue, from number 1 on, came after the schema was brought" in refused.stderr
    assert nasty.source.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
    nasty.target.execute("CREATE INDEX came_later ON tree (up)")
    # Also before a slot exists.
    seen = _steps(run_command(nasty, "status", "--json"))
    assert [(step, one["state"], one["is_worked_on"]) for step, one in seen.items()] == [
        ("check", "done", False), ("roles", "done", False), ("schema", "done", False), ("copy", "failed", False),
    ]  # fmt: skip
    copied = run_command(
        nasty, "migrate", *options, "--from", "copy", "--to", "indexes", "--json", "--max-rate", "100M", code=0
    )
    _check_objects_of_others(nasty, run_command, *options, "--only", "large-objects")
    more = ("--from", "catch-up", "--to", "views", "--json", "--set", "metrics.listen=127.0.0.1:0")
    done = _watched(nasty, Daemon(nasty, *options, *more, verb="migrate"), run_command)
    assert any("not made by this step: index came_later;" in line for line in done.lines)
    said = [*map(json.loads, copied.stdout.splitlines()), *done.events]
    assert [one["step"] for one in said if one.get("state") == "done"] == [
        "copy", "indexes", "catch-up", "constraints", "large-objects", "unlogged", "sequences", "analyze",
        "views",
    ]  # fmt: skip
    _check_equal(nasty)
    run_command(nasty, "drop", "--yes", code=0)


@pytest.mark.pg_majors(18)
def test_what_only_a_superuser_grants_is_left_out_and_named(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """A role without superuser makes the schema all the same, with the grants on its own objects.

    Default privileges of a role that it is no member of are also left out. A table that already exists is refused
    with a hint that `migrate` can follow, and the same command goes on.
    """
    source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES;"
        f"GRANT SELECT ON t TO {SOURCE_ROLE}; GRANT EXECUTE ON FUNCTION pg_ls_waldir() TO {SOURCE_ROLE}"
    )
    target_db.execute(
        sql.SQL("ALTER SCHEMA public OWNER TO {1}; GRANT CREATE ON DATABASE {0} TO {1}").format(
            sql.Identifier(target_db.dbname), sql.Identifier(TARGET_ROLE)
        )
    )
    route = Route(source=source_db, target=target_db, settings=FAST, source_dsn=source_db.dsn)
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    words = ("--no-owner", "--to", "schema", "--pg-bin", _pg_bin())
    refused = run_command(route, "migrate", *words, code=4)
    assert "drop the objects in it if nothing needs them, and the same command goes on" in refused.stderr, refused
    target_db.execute("DROP TABLE t")
    done = run_command(route, "migrate", *words, code=0)
    named = "only a superuser of the target can run it: GRANT ALL ON FUNCTION pg_catalog.pg_ls_waldir(OUT name text,"
    assert named in done.stderr
    assert "needs their role: ALTER DEFAULT PRIVILEGES FOR ROLE postgres" in done.stderr
    ((detail,),) = target_db.rows("SELECT detail FROM parapply.migrations WHERE step = 'schema'")
    assert re.search(r"SQL, [1-9]\d* GRANT and REVOKE left out$", detail), detail
    assert target_db.rows(f"SELECT has_table_privilege('{SOURCE_ROLE}', 't', 'SELECT')") == [(True,)]


@pytest.fixture
def reader(server_of: ServerOf) -> Iterator[str]:
    """The name of a role of the publisher that a test makes; it is removed after the databases."""
    name = f"reader {os.getpid()}"
    yield name
    server_of("source", 18).execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))


@pytest.mark.pg_majors(18)
def test_privileges_of_the_role_that_reads_are_left_out_and_named(
    reader: str, source_db: Database, target_db: Database, run_command: RunCommand, tmp_path: Path
) -> None:
    """The target does without the publisher's role for parapply where the role has nothing but privileges there.

    Privileges of other roles come, and a policy for the role is refused, because it would be lost.
    """
    assert isinstance(source_db.server, PgServer)
    source_db.execute("CREATE SCHEMA s; CREATE TABLE s.t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES")
    source_db.execute(f"GRANT SELECT ON s.t TO {TARGET_ROLE}; INSERT INTO s.t VALUES (1)")
    run_script(source_db.server, source_db.dbname, "publisher", role=reader)
    route = Route(
        source=source_db, target=target_db, settings=FAST, source_dsn=source_db.dsn_with(user=reader),
        target_dsn=target_db.dsn,
    )  # fmt: skip
    words = ("--to", "constraints", "--pg-bin", _pg_bin(), "--daemon-log", str(tmp_path / "daemon.log"))
    policy = "CREATE POLICY p ON s.t TO {}"
    source_db.execute(sql.SQL(policy).format(sql.Identifier(reader)))
    refused = run_command(route, "migrate", *words, code=4)
    assert f"roles of the publisher are missing: {reader}" in refused.stderr
    source_db.execute("DROP POLICY p ON s.t")
    done = run_command(route, "migrate", *words, code=0)
    assert f"not brought over: privileges of {reader}, by which parapply reads" in done.stdout
    assert "came to the publisher after" not in done.stderr
    assert target_db.rows("SELECT * FROM s.t") == [(1,)]
    assert target_db.rows(f"SELECT has_table_privilege('{TARGET_ROLE}', 's.t', 'SELECT')") == [(True,)]


@pytest.mark.pg_majors(18)
def test_a_daemon_that_ends_too_early_and_what_comes_by_the_stream(
    source_db: Database, target_db: Database, run_command: RunCommand, tmp_path: Path
) -> None:
    """A daemon of a command that was killed, which ends before this one's LSN, is followed by another.

    A table that the stream makes before the step `constraints` has the default privileges of the publisher.
    """
    source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY REFERENCES t);"
        "INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR ALL TABLES;"
        "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC"
    )
    source_db.execute(install_sql(["pub"]))
    route = Route(
        source=source_db, target=target_db, settings={**FAST, "ddl.apply": "true"}, source_dsn=source_db.dsn,
        target_dsn=target_db.dsn,
    )  # fmt: skip
    arguments = ("--pg-bin", _pg_bin(), "--daemon-log", str(tmp_path / "daemon.log"), "--jobs", "1")
    killed = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_TABLE_DONE}:kill"}
    assert run_command(route, "migrate", *arguments, environ=killed).returncode == -signal.SIGKILL
    source_db.execute("INSERT INTO t VALUES (2)")
    run_command(route, "migrate", *arguments, "--to", "indexes", code=0)
    source_db.execute("SELECT parapply.replicate_ddl('CREATE TABLE fresh (id int PRIMARY KEY)')")
    source_db.execute("INSERT INTO fresh VALUES (1)")
    with target_db.connect() as other:
        ((slot_id,),) = target_db.rows("SELECT slot_id FROM parapply.slots")
        other.execute("SELECT pg_advisory_lock(%s, %s)", [lease.LOCK_CLASS, lease.lease_key(slot_id)])
        command = Daemon(route, *arguments, "--to", "catch-up", verb="migrate")
        target_db.wait_until(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '%lowest_remote_lsn%' AND datname ="
            " current_database() AND pid <> pg_backend_pid())"
        )
    assert command.exit_code() == 0, command.log_tail()
    assert contents(target_db, "public") == contents(source_db, "public")
    assert target_db.rows("SELECT has_table_privilege('public', 'fresh', 'SELECT')") == [(True,)]


def _watched(route: Route, command: Daemon, run_command: RunCommand) -> Daemon:
    """Return the command once it has ended; while a foreign key cannot be made, others see how far it is."""
    with route.target.connect() as session:
        session.execute("BEGIN; LOCK TABLE child IN ACCESS EXCLUSIVE MODE")
        found: dict[str, str] = {}

        def is_waiting() -> bool:
            for line in command.lines:
                if address := re.search(r"metrics: (http://\S+)", line):
                    with urllib.request.urlopen(address[1], timeout=20) as answer:
                        found.update(re.findall(r"(?m)^(parapply_migration.*) (\S+)$", answer.read().decode()))
            return any("_done{" in name and 'step="constraints"' in name for name in found)

        while not is_waiting():
            command.check_running()
            threading.Event().wait(0.02)
        named = f'slot="{route.slot}",step="constraints"'
        assert found[f'parapply_migration_step{{{named},state="running"}}'] == "1"
        assert int(found[f'parapply_migration_expected{{{named},unit="statements"}}']) > 1
        seen = _steps(run_command(route, "status", "--json"))
        assert (seen["constraints"]["state"], seen["constraints"]["is_worked_on"]) == ("running", True)
        assert seen["copy"]["size_bytes"] > 0
        session.rollback()
    assert command.exit_code() == 0, command.log_tail()
    return command


def _check_objects_of_others(route: Route, run_command: RunCommand, *arguments: str) -> None:
    """A large object of another application would be taken for one that the publisher has removed."""
    route.target.execute("SELECT lo_from_bytea(4711, 'of others')")
    refused = run_command(route, "migrate", *arguments, code=4)
    assert "target: it has large objects of its own, which the publisher's would replace: 4711" in refused.stderr
    assert route.target.rows("SELECT lo_get(4711)") == [(b"of others",)]
    route.target.execute("SELECT lo_unlink(4711)")


def _steps(seen: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert seen.returncode == 0, seen
    return {one["step"]: one for one in json.loads(seen.stdout)["migration"]}


def _end_daemon(route: Route) -> None:
    """End the daemon that the command has left, once everything is applied."""
    route.wait_caught_up()
    ((pid,),) = route.target.rows("SELECT pid FROM parapply.slots")
    os.kill(pid, signal.SIGTERM)
    route.target.wait_until("SELECT state = 'stopped' FROM parapply.slots")


def _check_equal(route: Route) -> None:
    assert _schema(route.target) == _schema(route.source)
    for name in _SCHEMAS:
        assert contents(route.target, name) == contents(route.source, name)
    for query in (
        "SELECT oid, md5(lo_get(oid)) FROM pg_largeobject_metadata ORDER BY 1",
        "SELECT rolconnlimit, rolcanlogin FROM pg_roles WHERE rolname LIKE 'owner %' ORDER BY 1",
        "SELECT last_value, is_called FROM alone",
    ):
        assert route.target.rows(query) == route.source.rows(query), query
    ((second,),) = route.target.rows("SELECT n FROM a_second")
    assert [(second,)] == route.target.rows('SELECT sum(n) FROM "z first"')


def _schema(database: Database) -> list[str]:
    """Return what pg_dump says of a database, without what names servers and sessions."""
    program = find_program("pg_dump", find_binaries())
    said = subprocess.run(
        [program, "-s", "--exclude-schema=parapply", "--no-publications", database.dsn],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    # Servers before 18 name the one table of a view before each of its columns, and know no names of NOT NULL.
    text = said.stdout.replace("child.parent_code", "parent_code").replace('"z first".n', "n")
    text = re.sub(r" CONSTRAINT \w+_not_null NOT NULL", " NOT NULL", text)
    return [line for line in text.splitlines() if not line.startswith(("--", "\\", "SET ")) and line]


def _pg_bin() -> str:
    return str(find_program("pg_dump", find_binaries()).parent)
