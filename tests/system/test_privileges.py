"""The roles of config/roles: enough for everything, no more than needed, and one clear error for what is missing."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from parapply.source.ddl_queue import install_sql
from tests.fixtures.daemon import Daemon, error_of
from tests.fixtures.databases import Database, create_database, drop_database
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST
from tests.fixtures.roles import SCRIPTS, make_state, run_script
from tests.fixtures.route import Route
from tests.system.privilege_cases import CASES, RUN, SOURCE_TABLES, TARGET_TABLES, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.servers import ServerPool

_DOCUMENT = Path(__file__).parents[2] / "docs" / "PRIVILEGES.md"
#: Operands that match better than what the catalogue has, so that the parser takes these where it sees the schema.
_TRAPS = """CREATE SEQUENCE public.ran;
CREATE FUNCTION public.matches(name, name) RETURNS bool LANGUAGE sql AS $$ SELECT nextval('public.ran') > 0 $$;
CREATE OPERATOR public.!~ (LEFTARG = name, RIGHTARG = name, FUNCTION = public.matches);
CREATE FUNCTION public.format(text, name, text) RETURNS text LANGUAGE sql AS
$$ SELECT 'SELECT ' || nextval('public.ran') $$"""
_ATTRIBUTES = ("rolsuper", "rolcreaterole", "rolcreatedb", "rolbypassrls")


@pytest.fixture(scope="module")
def roles() -> dict[str, str]:
    """Names of roles that only this module uses, by end: what is taken from them belongs to the whole server."""
    token = secrets.token_hex(4)
    return {"source": f"lacking_source_{token}", "target": f"lacking_target_{token}"}


@pytest.fixture(scope="module")
def lacking(server_pool: ServerPool, pg_major: int, roles: dict[str, str]) -> Iterator[Route]:
    """A route between roles that the scripts made; the target has its state."""
    ends = {}
    for end, script, tables in (("source", "publisher", SOURCE_TABLES), ("target", "subscriber", TARGET_TABLES)):
        server = server_pool.own(end, pg_major)  # type: ignore[arg-type]  # the two words are the roles
        ends[end] = create_database(server, f"{roles[end]}_db")
        ends[end].execute(tables)
        run_script(server, ends[end].dbname, script, role=roles[end])
    source, target = ends["source"], ends["target"]
    source.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(
        source=source,
        target=target,
        source_dsn=source.dsn_with(user=roles["source"]),
        target_dsn=target.dsn_with(user=roles["target"]),
        settings=FAST,
    )
    make_slot(route)
    _drain(route)
    yield route
    # Apply the changes that each test of a privilege has left in the slot, now that all privileges are given back.
    _drain(route)
    for table in ("shop.good", "item", "gone", "drawn"):
        query = f"SELECT id FROM {table} ORDER BY id"
        assert target.rows(query) == source.rows(query), table
    for end, database in ends.items():
        database.execute(f"DROP OWNED BY {roles[end]} CASCADE")
        drop_database(database)
        database.server.execute(f"DROP ROLE {roles[end]}")


def _drain(route: Route) -> None:
    daemon = Daemon(route, "--until", route.end_of_source_lsn())
    try:
        assert daemon.exit_code(60) == 0, daemon.log_tail()
    finally:
        daemon.end()


def _run(route: Route, case: Case, run_command: RunCommand) -> tuple[int, list[str]]:
    """Return the exit code of the case's command, and the lines that it told a person."""
    name, *options = case.command.split()
    if name == RUN:
        options += ["--until", route.end_of_source_lsn()]
    done = run_command(route, name, *options)
    assert "Traceback" not in done.stderr
    if name == RUN and done.returncode:
        return done.returncode, [error_of(done.stderr.splitlines())]
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("{")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.end}-{case.name}".replace(" ", "_"))
def test_what_is_missing_is_named(lacking: Route, roles: dict[str, str], case: Case, run_command: RunCommand) -> None:
    """Without the privilege the command that needs it ends with its code and one line that says so; with it, not.

    A daemon with the privileges of all cases runs once, when `lacking` ends.
    """
    database: Database = getattr(lacking, case.end)
    names = {"role": roles[case.end], "database": database.dbname}
    database.execute(case.take.format(**names))
    try:
        lacking.source.execute(case.change or "SELECT 1")
        code, lines = _run(lacking, case, run_command)
    finally:
        database.execute(case.give.format(**names))
    assert code == case.code, lines
    assert len([line for line in lines if re.search(".*".join(map(re.escape, case.words)), line)]) == 1, lines
    if case.command != RUN:
        code, lines = _run(lacking, case, run_command)
        assert code == 0, lines


def test_only_what_is_published_needs_a_privilege(
    lacking: Route, roles: dict[str, str], run_command: RunCommand
) -> None:
    """A publication of inserts needs neither UPDATE nor DELETE, unless a policy writes over rows of the target.

    Not even to look at the row in the way of one that is left out, or stops the daemon.
    """
    lacking.source.execute("CREATE PUBLICATION inserts FOR ALL TABLES WITH (publish = 'insert')")
    only = replace(lacking, slot="inserts", publication="inserts")
    make_slot(only)
    lacking.target.execute(f"REVOKE UPDATE, DELETE ON item FROM {roles['target']}")
    try:
        lacking.source.execute("INSERT INTO item VALUES (100, 1)")
        until = ("--until", lacking.end_of_source_lsn())
        refused = run_command(only, "run", *until, "--set", "conflict.insert_exists=apply_remote", code=4)
        assert "lacks privileges on target table public.item: UPDATE, DELETE" in refused.stderr
        run_command(only, "run", *until, code=0)
        lacking.target.execute("INSERT INTO item VALUES (101, 7)")
        lacking.source.execute("INSERT INTO item VALUES (101, 1)")
        until = ("--until", lacking.end_of_source_lsn())
        stopped = run_command(only, "run", *until, code=5)
        assert "insert_exists on public.item, key (id): " in stopped.stderr
        run_command(only, "run", *until, "--set", "conflict.insert_exists=skip", code=0)
        assert lacking.target.rows("SELECT outcome FROM parapply.conflicts") == [("skipped",)]
    finally:
        lacking.target.execute(f"GRANT UPDATE, DELETE ON item TO {roles['target']}")
        lacking.source.execute("SELECT pg_drop_replication_slot('inserts'); DROP PUBLICATION inserts")
    assert lacking.target.rows("DELETE FROM item WHERE id >= 100 RETURNING v") == [(1,), (7,)]


def test_every_case_is_documented() -> None:
    """docs/PRIVILEGES.md has a row for each privilege, in the table of its end."""
    sections = dict(
        re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", _DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    for case in CASES:
        section = sections["On the publisher" if case.end == "source" else "On the target"]
        assert f"| {case.name} |" in section, case.name


@pytest.mark.pg_majors(15, 18)
def test_the_scripts_make_no_superuser(server_pool: ServerPool, pg_major: int) -> None:
    """Roles of the scripts have no attribute of administrators; running them again, with less, is no error.

    No function of the database runs as the superuser, whatever its schemas hold.
    """
    server = server_pool.own("target", pg_major)
    database = create_database(server, 'odd "%s" {}')
    made = ('odd "role" %s', 'o"ner')
    try:
        database.execute('CREATE SCHEMA "odd,%"; CREATE TABLE "odd,%".t (); CREATE ROLE "o""ner"')
        database.execute(_TRAPS)
        less = {"schemas": "public", "owner": made[1], "copy": "off", "origins": "off", "replica": "off"}
        for script in ("publisher", "subscriber"):
            for more in ({}, less):
                run_script(server, database.dbname, script, role=made[0], **more)
        names = ("-v", f"role={made[0]}", "-c", "SHOW search_path")
        for path in SCRIPTS.glob("*.sql"):
            # The session of an operator goes on afterwards.
            said = server.run("psql", "-XAt", "-f", str(path), *names, dbname=database.dbname).stdout
            assert said.splitlines()[-1] == '"$user", public'
        columns = ", ".join(_ATTRIBUTES)
        found = database.rows(f"""SELECT {columns} FROM pg_roles WHERE rolname = 'odd "role" %s'""")
        assert found == [(False,) * len(_ATTRIBUTES)]
        assert database.rows("SELECT is_called FROM public.ran") == [(False,)]
    finally:
        roles = sql.SQL(", ").join(map(sql.Identifier, made))
        database.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(roles))
        drop_database(database)
        server.execute(sql.SQL("DROP ROLE {}").format(roles))


@pytest.mark.pg_majors(18)
def test_no_role_may_write_what_others_apply_by(server_pool: ServerPool, pg_major: int) -> None:
    """The scripts give no rights on the progress of another role's daemons, or on the queue of commands.

    Rights that exist are taken back, unless a role is to share a state schema. Reading the queue is no such right.
    """
    server = server_pool.own("target", pg_major)
    database = create_database(server, "two_roles")
    roles = ("role_a", "role_b")
    theirs = """
        SELECT rolname, c.oid::regclass::text FROM pg_roles, pg_class c WHERE rolname ~ '^role_.$' AND relkind = 'r'
        AND relnamespace::regnamespace::text IN ('state_role_a', 'state_role_b', 'state_of_owner', 'parapply')
        AND c.relowner <> pg_roles.oid AND has_table_privilege(pg_roles.oid, c.oid, '{}') ORDER BY 1, 2"""
    try:
        for role in roles:
            run_script(server, database.dbname, "subscriber", role=role)
            asyncio.run(make_state(server.dsn(database.dbname, role), f"state_{role}"))
        # Its tables are of the role whose later tables the scripts let others write.
        asyncio.run(make_state(database.dsn, "state_of_owner"))
        database.execute("CREATE TABLE item (id int); CREATE PUBLICATION pub FOR TABLE item")
        assert [row for row in database.rows(theirs.format("SELECT")) if "owner" in row[1]] == []
        database.execute(install_sql(["pub"]))
        for role, other in (roles, roles[::-1]):
            database.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA state_{other}, parapply TO {role}")
            run_script(server, database.dbname, "subscriber", role=role)
        assert database.rows(theirs.format("INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER")) == []
        assert database.rows("SELECT has_table_privilege('role_b', 'item', 'INSERT')") == [(True,)]
        for role in roles:
            run_script(server, database.dbname, "publisher", role=role)
            run_script(server, database.dbname, "subscriber", role=role)
        assert database.rows(theirs.format("SELECT")) == [(role, "parapply.ddl_queue") for role in roles]
        assert database.rows(theirs.format("INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER")) == []
        assert database.rows("SELECT has_schema_privilege('role_a', 'parapply', 'USAGE')") == [(True,)]
        run_script(server, database.dbname, "subscriber", role="role_b", state="state_role_a")
        asyncio.run(make_state(server.dsn(database.dbname, "role_b"), "state_role_a"))
        assert ("role_b", "state_role_a.slots") in database.rows(theirs.format("INSERT"))
    finally:
        database.execute("DROP OWNED BY role_a, role_b CASCADE")
        drop_database(database)
        server.execute("DROP ROLE role_a, role_b")
