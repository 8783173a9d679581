"""Rows that a copy, or a repair, takes out of a table on the target are of that table alone."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from parapply import connect, failpoints
from parapply.config import load_config
from parapply.copy.places import RateLimit
from parapply.migrate import rest
from parapply.migrate.show import Screen
from parapply.vocabulary import MigrationStep
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.config import Config
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_INHERITED = "CREATE TABLE par (id int PRIMARY KEY, v text); CREATE TABLE a_chi (PRIMARY KEY (id)) INHERITS (par)"
_REFERENCED = (
    "CREATE TABLE pa (id int PRIMARY KEY); CREATE TABLE ch (id int PRIMARY KEY,"
    " pid int REFERENCES pa ON DELETE CASCADE, q int REFERENCES pa ON DELETE SET NULL)"
)
#: A role that owns its tables, and may not set session_replication_role.
_PLAIN = "parapply_no_replica"
#: One that may, and may not use a schema of its tables.
_SHUT_OUT = "parapply_no_schema"


def test_a_parent_is_emptied_without_its_children(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """Rows of a table that inherits from one that is copied again stay: `resume`, `refresh`, a copy that goes on."""
    for node in (source_db, target_db):
        node.execute(_INHERITED)
    source_db.execute(
        "INSERT INTO par SELECT g, 'p' FROM generate_series(1, 5) AS g; INSERT INTO a_chi"
        " SELECT g, 'c' FROM generate_series(11, 17) AS g; CREATE PUBLICATION pub FOR TABLE par, a_chi"
    )
    route = Route(source=source_db, target=target_db)
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_TABLE_DONE}:kill"}
    killed = run_command(route, "init", "--copy", "--connections", "1", environ=environ)
    assert killed.returncode == -signal.SIGKILL
    assert target_db.rows("SELECT table_name FROM parapply.copies WHERE state = 'copied'") == [("a_chi",)]
    for command in (
        ("init", "--copy"),
        ("pause", "public.par"),
        ("resume", "public.par"),
        ("refresh", "--table", "public.par", "--truncate"),
    ):
        run_command(route, *command, code=0)
        assert contents(target_db, "public") == contents(source_db, "public"), command


def test_tables_that_refer_to_each_other_are_truncated(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """Only tables to which one leads that stays, be it by way of others, are emptied row by row."""
    tables = "CREATE TABLE {} (id int PRIMARY KEY, r int REFERENCES {}); INSERT INTO {} VALUES (1, {})"
    for node in (source_db, target_db):
        node.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE d (id int PRIMARY KEY, r int REFERENCES d)")
        node.execute("INSERT INTO a VALUES (1); INSERT INTO d VALUES (1, 1)")
        for name, other in (("b", "a"), ("c", "b"), ("e", "d")):
            node.execute(tables.format(name, other, name, 1))
    source_db.execute("CREATE PUBLICATION pub FOR TABLE a, b, d, e; INSERT INTO d VALUES (2, 1)")
    files = "SELECT relname, relfilenode FROM pg_class WHERE relname IN ('a', 'b', 'd', 'e') ORDER BY 1"
    before = target_db.rows(files)
    run_command(Route(source=source_db, target=target_db), "init", "--copy", "--truncate", code=0)
    assert [name for name, _ in set(before) & set(target_db.rows(files))] in (["a", "b"], ["b", "a"])
    assert contents(target_db, "public") == contents(source_db, "public")


@pytest.mark.bare_target
def test_foreign_keys_do_not_act_when_a_parent_is_emptied(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """Under session_replication_role = origin nothing cascades to a child's rows, which do not come again.

    Where the role cannot prevent it, the copy is refused, with the keys, and nothing is gone.
    """
    role = sql.Identifier(_PLAIN)
    target_db.execute(sql.SQL("DROP ROLE IF EXISTS {0}; CREATE ROLE {0} LOGIN").format(role))
    target_db.execute(
        sql.SQL("GRANT CREATE ON DATABASE {1} TO {0}; GRANT ALL ON SCHEMA public TO {0}").format(
            role, sql.Identifier(target_db.dbname)
        )
    )
    for node in (source_db, target_db):
        node.execute(_REFERENCED)
    target_db.execute(sql.SQL("ALTER TABLE pa OWNER TO {0}; ALTER TABLE ch OWNER TO {0}").format(role))
    source_db.execute(
        "INSERT INTO pa SELECT g FROM generate_series(1, 5) AS g;"
        "INSERT INTO ch VALUES (1, 1, 2), (2, 3, 4), (3, NULL, 5);"
        "INSERT INTO ch SELECT g FROM generate_series(10, 1000) AS g;"
        "CREATE PUBLICATION pub FOR TABLE pa, ch"
    )
    route = Route(source=source_db, target=target_db, target_dsn=target_db.dsn_with(user=_PLAIN))
    as_origin = ("--set", "target.session_replication_role=origin")
    source_db.execute("ALTER PUBLICATION pub DROP TABLE ch")
    run_command(route, "init", "--copy", *as_origin, code=0)
    source_db.execute("ALTER PUBLICATION pub ADD TABLE ch")
    both = ("--table", "public.pa", "--table", "public.ch")
    # The smaller one, to which the other's keys lead, comes first.
    run_command(route, "refresh", "--truncate", "--connections", "1", *both, *as_origin, code=0)
    repair = ("refresh", "--table", "public.pa", "--truncate", *as_origin)
    refused = run_command(route, *repair, code=4)
    assert (
        "emptying tables would change rows of others by ch_pid_fkey of public.ch, ch_q_fkey of public.ch"
        in refused.stderr
    )
    assert contents(target_db, "public") == contents(source_db, "public")
    target_db.execute(sql.SQL("GRANT SET ON PARAMETER session_replication_role TO {}").format(role))
    run_command(route, *repair, code=0)
    assert contents(target_db, "public") == contents(source_db, "public")


@pytest.mark.bare_target
def test_a_copy_asks_for_no_privileges_on_other_schemas(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """Tables that might be parents of a copied one are found though the role may not use their schema any more."""
    role = sql.Identifier(_SHUT_OUT)
    target_db.execute(sql.SQL("DROP ROLE IF EXISTS {0}; CREATE ROLE {0} LOGIN").format(role))
    target_db.execute(
        sql.SQL(
            "GRANT CREATE ON DATABASE {1} TO {0}; GRANT ALL ON SCHEMA public TO {0};"
            "GRANT SET ON PARAMETER session_replication_role TO {0}"
        ).format(role, sql.Identifier(target_db.dbname))
    )
    for node in (source_db, target_db):
        node.execute(
            "CREATE SCHEMA s; CREATE TABLE s.pa (id int PRIMARY KEY);"
            "CREATE TABLE t (id int PRIMARY KEY, up int REFERENCES t ON DELETE CASCADE)"
        )
    target_db.execute(
        sql.SQL("GRANT USAGE ON SCHEMA s TO {0}; ALTER TABLE s.pa OWNER TO {0}; ALTER TABLE t OWNER TO {0}").format(
            role
        )
    )
    source_db.execute("INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE s.pa, t")
    route = Route(source=source_db, target=target_db, target_dsn=target_db.dsn_with(user=_SHUT_OUT))
    run_command(route, "init", "--copy", code=0)
    target_db.execute(sql.SQL("REVOKE USAGE ON SCHEMA s FROM {}").format(role))
    refresh = ("refresh", "--table", "public.t", "--truncate")
    as_origin = ("--set", "target.session_replication_role=origin")
    run_command(route, *refresh, code=0)
    run_command(route, *refresh, *as_origin, code=0)
    assert contents(target_db, "public") == contents(source_db, "public")
    # The hint names only what this role may do.
    target_db.execute("ALTER TABLE t ADD FOREIGN KEY (up) REFERENCES s.pa ON DELETE SET NULL")
    for has_hint in (True, False):
        refused = run_command(route, *refresh, *as_origin, code=4)
        assert "older changes of s.pa would change copied rows of public.t" in refused.stderr
        assert ('session_replication_role = "replica" until' in refused.stderr) is has_hint
        target_db.execute(sql.SQL("REVOKE SET ON PARAMETER session_replication_role FROM {}").format(role))


_TIED = (
    "CREATE TABLE boss (id int PRIMARY KEY) PARTITION BY RANGE (id);"
    "CREATE TABLE boss_1 PARTITION OF boss FOR VALUES FROM (0) TO (100);"
    "CREATE TABLE between_them (id int PRIMARY KEY REFERENCES boss ON DELETE CASCADE);"
    "CREATE TABLE clerk (id int PRIMARY KEY, boss_id int REFERENCES boss ON DELETE CASCADE, by_way int"
    " REFERENCES between_them ON DELETE SET NULL) PARTITION BY RANGE (id);"
    "CREATE TABLE clerk_1 PARTITION OF clerk FOR VALUES FROM (0) TO (100)"
)


@pytest.mark.parametrize(
    ("row", "publishes", "names"),
    [("1, NULL", "false", ("boss_1", "clerk_1")), ("NULL, 1", "true", ("boss", "clerk"))],
    ids=["own-key", "by-way-of-another"],
)
def test_a_child_is_not_copied_ahead_of_its_parents_changes(  # noqa: PLR0917  fixtures and cases
    source_db: Database,
    target_db: Database,
    run_command: RunCommand,
    start_daemon: StartDaemon,
    row: str,
    publishes: str,
    names: tuple[str, str],
) -> None:
    """Under origin a parent's older changes would act on copied rows, also by way of a table that is not published.

    Not even if the copy was made under replica: the daemon refuses it.
    """
    for node in (source_db, target_db):
        node.execute(_TIED)
    rows = "INSERT INTO boss VALUES (1); INSERT INTO between_them VALUES (1); INSERT INTO clerk VALUES ({}, {})"
    source_db.execute(
        f"{rows.format(1, row)}; CREATE PUBLICATION pub FOR TABLE boss, clerk"
        f" WITH (publish_via_partition_root = {publishes})"
    )
    route = Route(source=source_db, target=target_db, settings={**FAST, "target.session_replication_role": "origin"})
    as_replica = ("--set", "target.session_replication_role=replica")
    target_db.execute("INSERT INTO boss VALUES (1); INSERT INTO between_them VALUES (1)")
    run_command(route, "init", "--copy", "--truncate", *as_replica, code=0)
    source_db.execute(f"DELETE FROM boss; DELETE FROM clerk; {rows.format(10, row)}")
    parent, child = [f"public.{name}" for name in names]
    refused = run_command(route, "refresh", "--table", child, "--truncate", code=4)
    assert f"older changes of {parent} would change copied rows of {child} by foreign keys" in refused.stderr
    assert f"parapply refresh --truncate --table {parent} --table {child}" in refused.stderr
    assert 'target.session_replication_role = "replica" until' in refused.stderr
    alone = ("refresh", "--truncate", "--table", child, *as_replica)
    run_command(route, *alone, code=0)
    daemon = start_daemon(route)
    assert (daemon.exit_code(), f"rows of {child} by foreign keys" in daemon.failure) == (4, True)
    run_command(route, *alone, "--table", parent, code=0)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    assert contents(target_db, "public") == contents(source_db, "public")
    run_command(route, *alone, code=0)
    assert (daemon.exit_code(), f"rows of {child} by foreign keys" in daemon.failure) == (4, True)


def test_tables_of_one_copy_are_not_ahead_of_each_other(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """A daemon that looks at a copy's notes, because another table is paused, does not end under origin."""
    for node in (source_db, target_db):
        node.execute(f"{_REFERENCED}; CREATE TABLE other (id int PRIMARY KEY)")
    source_db.execute(
        "INSERT INTO pa SELECT g FROM generate_series(1, 5) AS g;"
        "INSERT INTO ch SELECT g, 1 FROM generate_series(1, 1000) AS g;"
        "CREATE PUBLICATION pub FOR TABLE pa, ch, other"
    )
    route = Route(source=source_db, target=target_db, settings={**FAST, "target.session_replication_role": "origin"})
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_TABLE_DONE}:kill:2"}
    killed = run_command(route, "init", "--copy", "--connections", "1", environ=environ)
    assert killed.returncode == -signal.SIGKILL
    states = "SELECT table_name, state::text FROM parapply.copies ORDER BY 1"
    assert target_db.rows(states) == [("ch", "copying"), ("other", "copied"), ("pa", "copied")]
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    run_command(route, "pause", "public.other", code=0)
    daemon.stop()


def test_a_refused_copy_of_a_slot_begun_without_one_leaves_no_note(
    source_db: Database, target_db: Database, run_command: RunCommand, init_route: Callable[[Route], None]
) -> None:
    """Where the state lists no tables all published ones are applied; a note of a copy would leave changes out."""
    for node in (source_db, target_db):
        node.execute(f"{_REFERENCED}; CREATE TABLE gran (id int PRIMARY KEY REFERENCES ch ON UPDATE CASCADE)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE pa, gran")
    route = Route(source=source_db, target=target_db, settings={"target.session_replication_role": "origin"})
    init_route(route)
    refused = run_command(route, "refresh", "--table", "public.gran", code=4)
    assert "older changes of public.pa would change copied rows of public.gran" in refused.stderr
    assert target_db.rows("SELECT count(*) FROM parapply.copies") == [(0,)]
    run_command(route, "refresh", "--table", "public.pa", code=0)


async def test_foreign_keys_rest_when_an_unlogged_parent_is_emptied(source_db: Database, target_db: Database) -> None:
    """`migrate` copies unlogged tables in any order; a child's rows that have come before its parent's stay."""
    for node in (source_db, target_db):
        node.execute(_REFERENCED.replace("CREATE TABLE", "CREATE UNLOGGED TABLE"))
        node.execute("INSERT INTO pa VALUES (1); INSERT INTO ch VALUES (1, 1, NULL)")
    async with connect.open_both(_config(source_db, target_db), "migrate") as ends:
        with Screen(as_json=True).counting(MigrationStep.UNLOGGED, 2, "tables") as counter:
            assert await rest.unlogged(ends, [("public", "ch"), ("public", "pa")], counter, RateLimit(0)) == 2
    assert contents(target_db, "public") == contents(source_db, "public")


def _config(source: Database, target: Database) -> Config:
    flags = {"source.dsn": source.dsn, "target.dsn": target.dsn, "source.slot": "unused",
             "source.publications": ("pub",), "target.session_replication_role": "origin"}  # fmt: skip
    return load_config(None, (), flags, {})


async def test_large_objects_are_of_one_moment(source_db: Database, target_db: Database) -> None:
    """A client that removes objects while they are copied does not end the copy."""
    source_db.execute("SELECT lo_from_bytea(g, 'data') FROM generate_series(1001, 1040) AS g")
    remove = "SELECT lo_unlink(oid) FROM pg_largeobject_metadata"
    async with connect.open_both(_config(source_db, target_db), "migrate") as ends:
        with Screen(as_json=True).counting(MigrationStep.LARGE_OBJECTS, 40, "objects") as counter:
            counter.add = lambda *_: source_db.execute(remove)  # type: ignore[method-assign, assignment]
            n_copied, _ = await rest.large_objects(ends, counter, RateLimit(0), has_owners=False, has_privileges=True)
    assert n_copied == 40
    assert target_db.rows("SELECT count(lo_get(oid)) FROM pg_largeobject_metadata") == [(40,)]


def test_the_statements_of_verify_delete_no_other_rows(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """In partitions rows have the same ctid, and in a table that inherits the same key; only what differs goes."""
    for node in (source_db, target_db):
        node.execute(
            f"{_INHERITED}; CREATE TABLE p (k int, v text) PARTITION BY LIST (k);"
            "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1); CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2)"
        )
    source_db.execute(
        "INSERT INTO p VALUES (2, 'right'); INSERT INTO a_chi VALUES (1, 'right'), (2, 'right');"
        "INSERT INTO par VALUES (2, 'of the parent');"
        "CREATE PUBLICATION pub FOR TABLE p, par, a_chi WITH (publish_via_partition_root = true)"
    )
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", code=0)
    start_daemon(route).wait_for_event("source_connected")
    target_db.execute("INSERT INTO p VALUES (1, 'extra'); INSERT INTO par VALUES (1, 'extra')")
    target_db.execute("DELETE FROM ONLY par WHERE id = 2")
    report = json.loads(run_command(route, "verify", "--json", "--statements").stdout)
    target_db.execute("".join(text for table in report["tables"] for text in table["statements"]))
    assert contents(target_db, "public") == contents(source_db, "public")
