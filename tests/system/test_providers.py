"""Roles with the rights that a provider's page gives: the tutorial's steps work with them, and `check` shows its rules.

A provider has changed its server so that `rds_replication` replicates, and `postgres` of Supabase sets what only a
superuser may; here the attribute and a superuser's ALTER ROLE stand for that.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.fixtures.databases import Database, drop_database
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.servers import ServerPool

_TABLES = """CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent, v text)"""


class Rights(NamedTuple):
    """Rights that a provider's page gives to its first role."""

    attributes: str
    more: str  # SQL of the superuser
    role: str  # target.session_replication_role that fits


_RIGHTS = {
    # CREATE ROLE postgres WITH LOGIN NOSUPERUSER INHERIT CREATEDB CREATEROLE NOREPLICATION, member of rds_superuser,
    # which is one of pg_monitor, pg_signal_backend and rds_replication.
    "rds": Rights("CREATEDB CREATEROLE REPLICATION", "GRANT pg_monitor, pg_signal_backend TO {role}", "origin"),
    # The administrator after its own ALTER ROLE ... WITH REPLICATION.
    "azure": Rights("CREATEDB CREATEROLE REPLICATION", "SELECT 1", "origin"),
    "supabase": Rights(
        "CREATEDB CREATEROLE REPLICATION", "ALTER ROLE {role} SET session_replication_role TO 'replica'", "replica"
    ),
}


@pytest.fixture(params=list(_RIGHTS))
def provider(request: pytest.FixtureRequest) -> str:
    """A provider whose rights are known from its page."""
    return str(request.param)


@pytest.fixture
def managed(server_pool: ServerPool, pg_major: int, provider: str) -> Iterator[Route]:
    """A route between databases of a role that has the provider's rights and no others, on both ends."""
    token, rights = secrets.token_hex(4), _RIGHTS[provider]
    role, name = f"admin_{token}", f"managed_{token}"
    ends = []
    for end in ("source", "target"):
        server = server_pool.own(end, pg_major)
        server.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER INHERIT {rights.attributes}")
        server.execute(rights.more.format(role=role))
        server.execute(f"CREATE DATABASE {name} OWNER {role} TEMPLATE template0")
        ends.append(Database(dbname=name, server=server))
    source, target = ends
    yield Route(
        source=source,
        target=target,
        source_dsn=source.dsn_with(user=role),
        target_dsn=target.dsn_with(user=role),
        settings={**FAST, "target.session_replication_role": rights.role},
    )
    for database in ends:
        drop_database(database)
        database.server.execute(f"DROP ROLE {role}")


def _as_admin(database: Database, dsn: str, text: str) -> list[tuple[Any, ...]]:
    """Run SQL as the role of the provider, not as the superuser of the tests."""
    user = dsn.partition("user=")[2].split()[0]
    with database.connect(user=user) as session:
        cursor = session.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


@pytest.mark.pg_majors(15, 18)
def test_the_tutorials_steps_work_with_the_rights_of_a_provider(
    managed: Route, provider: str, run_command: RunCommand
) -> None:
    """Check, init with the copy, run, status and drop need nothing that the provider's page does not give."""
    source, target = managed.source, managed.target
    assert _as_admin(source, managed.source_dsn, "SELECT rolsuper FROM pg_roles WHERE rolname = CURRENT_USER") == [
        (False,)
    ]
    _as_admin(source, managed.source_dsn, f"{_TABLES}; INSERT INTO parent VALUES (1), (2)")
    _as_admin(source, managed.source_dsn, "CREATE PUBLICATION pub FOR TABLE parent, child")
    _as_admin(target, managed.target_dsn, _TABLES)
    named = ("--provider", provider, "--target-provider", provider)
    checked = run_command(managed, "check", "--copy", "--json", *named)
    report = json.loads(checked.stdout)
    assert [one for one in report["findings"] if one["severity"] == "refused"] == []
    assert [one for one in report["provider_rules"] if one["status"] == "broken"] == []
    assert {one["end"] for one in report["provider_rules"]} >= {"source"}
    run_command(managed, "init", "--copy", code=0)
    _as_admin(
        source,
        managed.source_dsn,
        "INSERT INTO child VALUES (1, 1, 'a'), (2, 2, 'b'); UPDATE child SET v = 'c' WHERE id = 1;"
        " DELETE FROM child WHERE id = 2; DELETE FROM parent WHERE id = 2",
    )
    run_command(managed, "run", "--until", managed.end_of_source_lsn(), code=0)
    for table in ("parent", "child"):
        query = f"SELECT * FROM {table} ORDER BY 1"
        assert _as_admin(target, managed.target_dsn, query) == _as_admin(source, managed.source_dsn, query) != []
    status = json.loads(run_command(managed, "status", "--json").stdout)
    assert status["slot_name"] == managed.slot
    run_command(managed, "drop", "--yes", code=0)
    assert source.rows(f"SELECT FROM pg_replication_slots WHERE slot_name = '{managed.slot}'") == []


def test_a_role_that_may_not_replicate_is_helped_as_its_provider_does(
    managed: Route, provider: str, run_command: RunCommand
) -> None:
    """The finding has the provider's statement in the place of PostgreSQL's, and the rule that it breaks is shown."""
    role = managed.source_dsn.partition("user=")[2].split()[0]
    managed.source.server.execute(f"ALTER ROLE {role} NOREPLICATION")
    managed.source.execute("CREATE TABLE t (i int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    managed.target.execute("CREATE TABLE t (i int PRIMARY KEY)")
    checked = run_command(managed, "check", "--json", "--provider", provider)
    report = json.loads(checked.stdout)
    (lacks,) = (one for one in report["findings"] if one["code"] == "source_replication")
    assert checked.returncode == 3
    wanted = f'GRANT rds_replication TO "{role}"' if provider == "rds" else f'ALTER ROLE "{role}" WITH REPLICATION'
    assert wanted in lacks["fix"]
    broken = [one["name"] for one in report["provider_rules"] if one["status"] == "broken"]
    assert broken == ["replication_role"]
    shown = run_command(managed, "check", "--provider", provider).stdout
    assert f"  broken  {provider}, replication_role  source\n" in shown
