"""Tables published after `init --copy`: they join from their first row on, or wait and are named everywhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_PARTITIONED = """
CREATE TABLE m (id int, p int, d int NOT NULL DEFAULT 0, PRIMARY KEY (id, p)) PARTITION BY LIST (p);
CREATE TABLE m1 PARTITION OF m FOR VALUES IN (1);
"""


def _copied(source: Database, target: Database, run_command: RunCommand, tables: str, published: str) -> Route:
    source.execute(tables)
    target.execute(tables)
    source.execute(f"CREATE PUBLICATION pub FOR {published}")
    route = Route(source=source, target=target, settings={**FAST, **LISTEN, "apply.workers": 2})
    run_command(route, "init", "--copy", code=0)
    return route


def _both(route: Route, *statements: str) -> None:
    """Run statements as docs/how-to/change-schemas.md says: on the target first."""
    for database in (route.target, route.source):
        for statement in statements:
            database.execute(statement)


def _waiting(route: Route) -> list[tuple[str, str]]:
    return [
        (name, reason)
        for name, reason in route.target.rows(
            "SELECT table_name, reason FROM parapply.copies WHERE state = 'waiting' ORDER BY 1"
        )
    ]


@pytest.mark.pg_majors(15, 18)
def test_partitions_made_later(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """A partition made as one gets every row, and a row that moves into it is whole; one attached with rows waits.

    As long as it waits, log, status, metric and state name it, and neither snapshot nor verify call anything equal.
    """
    route = _copied(source_db, target_db, run_command, _PARTITIONED, "TABLE m")
    source_db.execute("INSERT INTO m SELECT g, 1 FROM generate_series(1, 5) AS g")
    daemon = start_daemon(route)
    endpoint = Endpoint(daemon)
    _both(
        route,
        "CREATE TABLE m2 PARTITION OF m FOR VALUES IN (2)",
        "CREATE TABLE m3 PARTITION OF m FOR VALUES IN (3) PARTITION BY RANGE (id)",
        "CREATE TABLE m3a PARTITION OF m3 FOR VALUES FROM (0) TO (100)",
    )
    source_db.execute("INSERT INTO m VALUES (10, 2); UPDATE m SET p = 2 WHERE id = 1; UPDATE m SET p = 3 WHERE id = 2")
    daemon.wait_caught_up()
    check_equal(route, "m", "m2", "m3a")
    assert [event["relation"] for event in daemon.events_of("table_joined")] == ["public.m2", "public.m3a"]
    run_command(route, "verify", code=0)

    target_db.execute("CREATE TABLE m4 PARTITION OF m FOR VALUES IN (4)")
    source_db.execute(
        "BEGIN; CREATE TABLE m4 (id int, p int, d int NOT NULL DEFAULT 0); INSERT INTO m4 VALUES (40, 4);"
        " ALTER TABLE m4 ADD PRIMARY KEY (id, p); ALTER TABLE m ATTACH PARTITION m4 FOR VALUES IN (4); COMMIT"
    )
    refused = run_command(route, "snapshot", "--", "true")
    assert refused.returncode != 0, "it is published, and no change of it has come yet"
    assert "tables are not copied" in refused.stderr
    source_db.execute("UPDATE m SET p = 4 WHERE id = 3")
    daemon.wait_caught_up()
    told = daemon.wait_for_event("table_waits")
    assert (told["relation"], told["level"]) == ("public.m4", "warning")
    assert "refresh" in told["hint"]
    assert endpoint.samples()["parapply_tables_waiting"] == {(): 1}
    assert [name for name, _ in _waiting(route)] == ["m4"]
    status = run_command(route, "status")
    assert "public.m4" in status.stdout
    assert "waiting" in status.stdout
    (shown,) = [
        one for one in json.loads(run_command(route, "status", "--json").stdout)["copies"] if one["state"] == "waiting"
    ]
    assert shown["table_name"] == "m4"
    assert "before it was published" in shown["reason"]
    assert "tables are not copied" in run_command(route, "verify").stderr
    run_command(route, "refresh", code=0)
    daemon.wait_caught_up()
    check_equal(route, "m", "m4")
    endpoint.wait_until(lambda: endpoint.samples()["parapply_tables_waiting"] == {(): 0})
    run_command(route, "verify", code=0)
    assert len(daemon.events_of("table_waits")) == 1, "told once"
    daemon.stop()


def test_tables_made_later(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Of all tables published a new one joins by itself, before and after a restart; what had other rows waits."""
    route = _copied(source_db, target_db, run_command, "CREATE TABLE a (id int PRIMARY KEY)", "ALL TABLES")
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    _both(route, "CREATE TABLE b (id int PRIMARY KEY)", "CREATE TABLE kept (id int PRIMARY KEY)")
    source_db.execute("INSERT INTO b VALUES (1); INSERT INTO a VALUES (1)")
    daemon.finish()
    target_db.execute("INSERT INTO kept VALUES (7)")
    source_db.execute("INSERT INTO b VALUES (2); CREATE TABLE c (id int PRIMARY KEY); INSERT INTO c VALUES (1)")
    source_db.execute("CREATE UNLOGGED TABLE d (id int PRIMARY KEY); INSERT INTO d VALUES (1)")
    source_db.execute("CREATE TABLE absent (id int); INSERT INTO absent VALUES (1); INSERT INTO kept VALUES (1)")
    source_db.execute("CREATE TABLE gone (id int); INSERT INTO gone VALUES (1); DROP TABLE gone")
    source_db.execute("ALTER TABLE d SET LOGGED; INSERT INTO d VALUES (2)")
    target_db.execute("CREATE TABLE c (id int PRIMARY KEY); CREATE TABLE d (id int PRIMARY KEY)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    check_equal(route, "a", "b", "c")
    reasons = dict(_waiting(route))
    assert reasons == {
        "absent": "the target does not have it",
        "d": "it was rewritten since it was made, as by TRUNCATE or SET LOGGED",
        "gone": "it is no longer on the publisher",
        "kept": "it holds rows on the target already",
    }
    target_db.execute("CREATE TABLE absent (id int)")
    run_command(route, "refresh", "--truncate", code=0)
    daemon.wait_caught_up()
    check_equal(route, "a", "b", "c", "d", "absent", "kept")
    assert _waiting(route) == []
    # Rows of a child table do not belong to its parent.
    _both(route, "CREATE TABLE e (id int PRIMARY KEY)", "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (e)")
    source_db.execute("INSERT INTO child VALUES (1)")
    daemon.wait_caught_up()
    source_db.execute("INSERT INTO e VALUES (2)")
    daemon.wait_caught_up()
    check_equal(route, "e", "child")
    daemon.stop()


def test_renamed_tables(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """A table that was copied is applied under any name it gets on both sides, and no refresh wants to copy it."""
    tables = "; ".join(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in ("a", "b", "c", "d", "unchanged"))
    route = _copied(source_db, target_db, run_command, f"CREATE SCHEMA s; CREATE SCHEMA u; {tables};"
                    " ALTER TABLE d SET SCHEMA u", "ALL TABLES")  # fmt: skip
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1); INSERT INTO c VALUES (1)")
    daemon.wait_caught_up()
    _both(
        route,
        "ALTER TABLE a RENAME TO x; ALTER TABLE b RENAME TO a; ALTER TABLE x RENAME TO b",
        "ALTER TABLE c SET SCHEMA s; ALTER SCHEMA u RENAME TO w",
    )
    source_db.execute("INSERT INTO a VALUES (2); INSERT INTO w.d VALUES (2); INSERT INTO s.c VALUES (2)")
    daemon.wait_caught_up()
    source_db.execute("INSERT INTO b VALUES (3)")
    daemon.wait_caught_up()
    # The state has the publisher's names of the tables before any command has looked.
    names = "SELECT c.oid::bigint, n.nspname, relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace"
    wanted = source_db.rows(f"{names} WHERE relkind = 'r' AND nspname IN ('public', 's', 'w') ORDER BY 1")
    assert target_db.rows("SELECT source_oid, schema_name, table_name FROM parapply.copies ORDER BY 1") == wanted
    assert daemon.events_of("table_renamed")
    assert not daemon.events_of("table_joined")
    daemon.stop()
    _both(route, "ALTER TABLE unchanged RENAME TO other")
    source_db.execute("INSERT INTO w.d VALUES (3); INSERT INTO other VALUES (3)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    check_equal(route, "a", "b", "s.c", "w.d", "other")
    assert "nothing to do" in run_command(route, "refresh").stdout
    assert target_db.rows("SELECT schema_name || '.' || table_name FROM parapply.copies ORDER BY 1") == [
        ("public.a",), ("public.b",), ("public.other",), ("s.c",), ("w.d",),
    ]  # fmt: skip
    daemon.stop()


def test_a_copied_table_that_is_made_again(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """A table dropped and made again under its name is a new one: it joins, and is not left out without a word."""
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    route = _copied(source_db, target_db, run_command, tables, "ALL TABLES")
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO t VALUES (1)")
    daemon.wait_caught_up()
    _both(route, "DROP TABLE t", tables)
    source_db.execute("INSERT INTO t VALUES (2)")
    daemon.wait_caught_up()
    assert target_db.rows("SELECT id FROM t") == [(2,)]
    assert _waiting(route) == []


@pytest.mark.parametrize("is_renamed", [False, True], ids=["dropped", "renamed"])
def test_a_table_that_takes_the_name_of_a_copied_one_waits(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon, *, is_renamed: bool
) -> None:
    """It had rows before it was published, and no change of it comes: the look notes it all the same.

    The copied table keeps its row under the name that it has now, or has none once it is gone.
    """
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    route = _copied(source_db, target_db, run_command, tables, "TABLE t")
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    _both(route, "ALTER TABLE t RENAME TO older" if is_renamed else "DROP TABLE t", tables)
    source_db.execute("INSERT INTO t SELECT * FROM generate_series(1, 1000); ALTER PUBLICATION pub ADD TABLE t")
    refused = run_command(route, "snapshot", "--", "true")
    assert "tables are not copied" in refused.stderr
    assert daemon.wait_for_event("table_waits")["relation"] == "public.t"
    assert [name for name, _ in _waiting(route)] == ["t"]
    run_command(route, "refresh", code=0)
    source_db.execute("INSERT INTO t VALUES (0)")
    daemon.wait_caught_up()
    check_equal(route, "t")
    names = "SELECT table_name, state FROM parapply.copies ORDER BY 1"
    assert target_db.rows(names) == [("older", "copied")] * is_renamed + [("t", "copied")]
    daemon.stop()


def test_every_new_table_is_looked_at(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """One with rows is found however many there are before it that will join with their first row."""
    route = _copied(source_db, target_db, run_command, "CREATE TABLE t (id int PRIMARY KEY)", "ALL TABLES")
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    source_db.execute("".join([f"CREATE TABLE new_{number:02} (id int PRIMARY KEY);" for number in range(51)]))
    source_db.execute(
        "CREATE UNLOGGED TABLE z (id int PRIMARY KEY); INSERT INTO z VALUES (1); ALTER TABLE z SET LOGGED"
    )
    refused = run_command(route, "snapshot", "--", "true")
    assert "tables are not copied" in refused.stderr
    assert [name for name, _ in _waiting(route)] == ["z"]
    daemon.stop()


@pytest.mark.parametrize("published", ["ALL TABLES", "TABLES IN SCHEMA public"])
def test_a_table_made_while_its_publication_was_not_read(
    source_db: Database,
    target_db: Database,
    run_command: RunCommand,
    start_daemon: StartDaemon,
    published: str,
) -> None:
    """It had rows by then: a publication that was left out of the configuration for a time counts as new."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    source_db.execute(f"CREATE PUBLICATION pa FOR TABLE a; CREATE PUBLICATION pub FOR {published}")
    route = Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2}, publication="pa")
    both = ("--publication", "pub")
    run_command(route, "init", "--copy", *both, code=0)
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    _both(route, "CREATE TABLE t (id int PRIMARY KEY)")
    source_db.execute("INSERT INTO t SELECT * FROM generate_series(1, 1000); INSERT INTO a VALUES (1)")
    daemon.finish()
    daemon = start_daemon(route, *both)
    source_db.execute("INSERT INTO t VALUES (0)")
    assert daemon.wait_for_event("table_waits")["relation"] == "public.t"
    run_command(route, "refresh", *both, code=0)
    _both(route, "CREATE TABLE later (id int PRIMARY KEY)")
    source_db.execute("INSERT INTO t VALUES (-1); INSERT INTO later VALUES (1)")
    daemon.wait_caught_up()
    check_equal(route, "t", "later")
    assert _waiting(route) == []
    daemon.stop()


def test_a_table_made_while_its_publication_sent_no_inserts(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """It had rows by then, though the publication is as it was, and no look has come in between."""
    route = _copied(source_db, target_db, run_command, "CREATE TABLE a (id int PRIMARY KEY)", "ALL TABLES")
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO a VALUES (1)")
    daemon.wait_caught_up()
    source_db.execute("ALTER PUBLICATION pub SET (publish = 'update, delete')")
    _both(route, "CREATE TABLE t (id int PRIMARY KEY)")
    source_db.execute("INSERT INTO t SELECT * FROM generate_series(1, 1000)")
    source_db.execute("ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')")
    source_db.execute("INSERT INTO t VALUES (0)")
    assert daemon.wait_for_event("table_waits")["relation"] == "public.t"
    run_command(route, "refresh", code=0)
    _both(route, "CREATE TABLE later (id int PRIMARY KEY)")
    source_db.execute("INSERT INTO t VALUES (-1); INSERT INTO later VALUES (1)")
    daemon.wait_caught_up()
    check_equal(route, "t", "later")
    assert _waiting(route) == []
    daemon.stop()
