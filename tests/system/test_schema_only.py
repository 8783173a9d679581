"""Tables whose rows the configuration leaves out: never copied, applied, compared or emptied, and named everywhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from parapply.demo.binaries import find_binaries, find_program
from parapply.source.ddl_queue import install_sql
from parapply.vocabulary import SCHEMA_ONLY
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

#: `audit` refers to `item`, so that a TRUNCATE of that alone would be refused; `log` is published as its root.
_TABLES = """
CREATE TABLE item (id int PRIMARY KEY, v int);
CREATE TABLE audit (id int PRIMARY KEY, item int REFERENCES item, v int);
CREATE TABLE log (id int, at int, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE log_1 PARTITION OF log FOR VALUES FROM (0) TO (10);
"""
_ROWS = (
    "INSERT INTO item VALUES (1, 0), (2, 0); INSERT INTO audit VALUES (1, 1, 0), (2, 2, 0);"
    "INSERT INTO log VALUES (1, 1)"
)
_SETTINGS: Mapping[str, str | float] = {**FAST, "mapping.schema_only": "public.audit,public.log"}
_NAMED = "schema only, so their rows are left out: 2 tables: public.audit, public.log"
_WRITES = (
    "UPDATE item SET v = v + 1; UPDATE audit SET v = v + 1; INSERT INTO log VALUES (2, 2)",
    "TRUNCATE item, audit; INSERT INTO item VALUES (1, 7); INSERT INTO audit VALUES (1, 1, 7); TRUNCATE log",
    "INSERT INTO audit SELECT n, 1, n FROM generate_series(100, 3000) AS n; INSERT INTO item VALUES (9, 9)",
    "DELETE FROM audit WHERE id = 1; CREATE TABLE log_2 PARTITION OF log FOR VALUES FROM (10) TO (20)",
    "INSERT INTO log VALUES (3, 15); INSERT INTO item VALUES (10, 10)",
)
#: Rows of the target's own.
_OWN = "INSERT INTO audit VALUES (77, NULL, 77); INSERT INTO log VALUES (7, 7)"
_TARGET_REFUSED = 4
_APPLY_FAILED = 5


@pytest.fixture
def route(source_db: Database, target_db: Database) -> Route:
    """Rows on both sides: of the tables that are left out the target has others."""
    source_db.execute(_TABLES + _ROWS)
    target_db.execute(_TABLES + _OWN)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    return Route(source=source_db, target=target_db, settings=_SETTINGS)


def _check(route: Route) -> None:
    items = "SELECT * FROM item ORDER BY id"
    assert route.target.rows(items) == route.source.rows(items)
    assert route.target.rows("SELECT * FROM audit") == [(77, None, 77)]
    assert route.target.rows("SELECT * FROM log") == [(7, 7)]


@pytest.mark.parametrize("is_copy", [True, False], ids=["copied", "not copied"])
def test_rows_are_left_out(route: Route, run_command: RunCommand, start_daemon: StartDaemon, *, is_copy: bool) -> None:
    """No copy, change, TRUNCATE, refresh or verify concerns them, also after a kill; status names them."""
    if not is_copy:
        route.target.execute("INSERT INTO item VALUES (1, 0), (2, 0)")
    done = run_command(route, "init", *(["--copy", "--truncate"] if is_copy else []), code=0)
    assert _NAMED in done.stdout
    _check(route)
    daemon = start_daemon(route, settings={**LISTEN, "apply.memory_limit_bytes": 16 << 20})
    for number, text in enumerate(_WRITES):
        route.source.execute(text)
        if number == 1:
            daemon.kill()
            daemon = start_daemon(route, settings=LISTEN)
    daemon.wait_caught_up()
    _check(route)
    assert Endpoint(daemon).samples()["parapply_tables_waiting"] == {(): 0.0}
    assert daemon.events_of("table_waits") == []
    assert _NAMED in run_command(route, "status").stdout
    copies = json.loads(run_command(route, "status", "--json").stdout)["copies"]
    assert {one["table_name"] for one in copies if one["reason"] == SCHEMA_ONLY} == {"audit", "log"}
    verified = run_command(route, "verify", "--json", code=0)
    assert "schema only, not compared: public.audit, public.log" in verified.stderr
    assert json.loads(verified.stdout)["tables_not_compared"] == ["public.audit", "public.log"]
    if is_copy:
        again = run_command(route, "refresh", code=0)
        assert _NAMED in again.stdout
    daemon.stop()
    _check(route)


def test_a_truncate_takes_no_rows_of_a_table_that_is_left_out(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Under `origin` the DELETE that it becomes would cascade: it is refused, also behind a change with a conflict.

    Under `replica` no key acts, and it is not.
    """
    run_command(route, "init", "--copy", code=0)
    route.target.execute(
        "INSERT INTO audit VALUES (78, 1, 78); DELETE FROM item WHERE id = 2;"
        "ALTER TABLE audit DROP CONSTRAINT audit_item_fkey,"
        " ADD CONSTRAINT own FOREIGN KEY (item) REFERENCES item ON DELETE CASCADE"
    )
    origin = {"target.session_replication_role": "origin", "conflict.update_missing": "skip"}
    daemon = start_daemon(route, settings=origin)
    route.source.execute("UPDATE item SET v = 5 WHERE id = 2; TRUNCATE item, audit; INSERT INTO item VALUES (1, 7)")
    assert daemon.exit_code() == _APPLY_FAILED
    assert "truncate on public.item, key (id): a foreign key with ON DELETE CASCADE" in daemon.log_tail()
    assert route.target.rows("SELECT id FROM audit ORDER BY 1") == [(77,), (78,)]
    start_daemon(route, settings={**origin, "target.session_replication_role": "replica"}).finish()
    check_equal(route, "item")
    assert route.target.rows("SELECT id FROM audit ORDER BY 1") == [(77,), (78,)]


def test_a_table_that_gets_rows_again_waits_for_a_copy(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Nothing goes on in the middle, neither after it was left out from the beginning, nor for a time."""
    run_command(route, "init", "--copy", code=0)
    left = route
    route = Route(
        source=route.source, target=route.target, slot=route.slot,
        settings={**_SETTINGS, "mapping.schema_only": "public.log"},
    )  # fmt: skip
    daemon = start_daemon(route)
    route.source.execute("INSERT INTO audit VALUES (3, 1, 1)")
    assert daemon.wait_for_event("table_waits")["relation"] == "public.audit"
    daemon.wait_caught_up()
    assert route.target.rows("SELECT * FROM audit") == [(77, None, 77)]
    run_command(route, "refresh", "--table", "public.audit", "--truncate", code=0)
    route.source.execute("UPDATE audit SET v = v + 1; UPDATE item SET v = v + 1")
    daemon.wait_caught_up()
    for table in ("item", "audit"):
        rows = f"SELECT * FROM {table} ORDER BY id"
        assert route.target.rows(rows) == route.source.rows(rows)
    assert route.target.rows("SELECT * FROM log") == [(7, 7)]
    daemon.stop()
    # And the other way round: one that was copied, and for which a row was left out, waits after that.
    daemon = start_daemon(left)
    route.source.execute("INSERT INTO audit VALUES (50, 1, 1)")
    daemon.finish()
    daemon = start_daemon(route)
    route.source.execute("INSERT INTO audit VALUES (51, 1, 1)")
    daemon.wait_caught_up()
    assert route.target.rows("SELECT count(*) FROM audit WHERE id IN (50, 51)") == [(0,)]
    daemon.wait_for_event("table_waits")


def test_a_partition_that_leaves_one_waits(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """It has rows that were left out, so a slot that was begun without a copy does not go on with it in the middle."""
    run_command(route, "init", code=0)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    run_command(route, "snapshot", "--", "true", code=0)
    for database in (route.target, route.source):
        database.execute("ALTER TABLE log DETACH PARTITION log_1")
    assert "tables are not copied" in run_command(route, "snapshot", "--", "true").stderr
    route.source.execute("INSERT INTO log_1 VALUES (2, 2)")
    daemon.wait_caught_up()
    assert daemon.wait_for_event("table_waits")["relation"] == "public.log_1"
    assert route.target.rows("SELECT * FROM log_1") == [(7, 7)]
    run_command(route, "refresh", "--table", "public.log_1", "--truncate", code=0)
    daemon.wait_caught_up()
    check_equal(route, "log_1")


def test_check_names_them_and_refuses_other_names(route: Route, run_command: RunCommand) -> None:
    """A note for each, and nothing else about them; a name that is not published ends `init` at once."""
    route.target.execute("DROP TABLE audit")
    findings = json.loads(run_command(route, "check", "--json").stdout)["findings"]
    assert [one["object"] for one in findings if one["code"] == "schema_only"] == ['"public"."audit"', '"public"."log"']
    assert not [one for one in findings if "audit" in one["found"] and one["code"] != "schema_only"]
    run_command(route, "init", code=0)
    for words in (("refresh", "--table"), ("pause",), ("verify", "--table")):
        refused = run_command(route, *words, "public.audit")
        assert "mapping.schema_only leaves out the rows of public.audit" in refused.stderr
    for option in ((), ("--prepare",)):
        assert "a physical copy has what `replace`, `omit` and sch" in run_command(route, "seed", *option).stderr
    wrong = Route(source=route.source, target=route.target, settings={**FAST, "mapping.schema_only": "public.audits"})
    n_slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    refused = run_command(wrong, "init", code=_TARGET_REFUSED)
    assert "public.audits is no published table; did you mean public.audit?" in refused.stderr
    assert route.source.rows(n_slots) == [(1,)]


def test_migrate_makes_them_and_commands_reach_them(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Schema, keys and later commands are theirs as of other tables; a foreign key to one that has rows is refused."""
    source_db.execute(_TABLES + _ROWS + "; CREATE PUBLICATION pub FOR ALL TABLES;" + install_sql(["pub"]))
    role = target_db.target_role
    target_db.execute(f"ALTER SCHEMA public OWNER TO {role}")
    settings: Mapping[str, str | float] = {**FAST, "ddl.apply": "true", "mapping.schema_only": "public.item"}
    folder = find_program("pg_dump", find_binaries()).parent
    options = (
        "--no-owner", "--no-privileges", "--to", "constraints", "--jobs", "2", "--pg-bin", str(folder),
        "--daemon-log", str(tmp_path / "daemon.log"),
    )  # fmt: skip
    bad = Route(source=source_db, target=target_db, settings=settings)
    refused = run_command(bad, "migrate", *options)
    assert refused.returncode != 0
    assert "foreign keys lead to tables that are left out: audit_item_fkey of public.audit" in refused.stderr
    route = Route(
        source=source_db, target=target_db, settings={**settings, "mapping.schema_only": "public.audit,public.log_1"}
    )
    done = run_command(route, "migrate", *options, code=0)
    assert "2 schema only: public.audit, public.log_1" in done.stdout
    assert "schema only, so their rows are left out: 2 tables: public.audit, public.log_1" in done.stdout
    daemon = start_daemon(route)
    source_db.execute(
        "BEGIN; INSERT INTO audit VALUES (5, 1, 5);"
        "SELECT parapply.replicate_ddl('ALTER TABLE audit ADD extra int DEFAULT 3');"
        "INSERT INTO audit VALUES (6, 1, 6, 6); UPDATE item SET v = 5; COMMIT"
    )
    source_db.execute("UPDATE audit SET v = 0; UPDATE item SET v = v + 1; INSERT INTO log VALUES (8, 8)")
    daemon.wait_caught_up()
    assert target_db.rows("SELECT count(extra) FROM audit") == [(0,)]
    assert target_db.rows("SELECT count(*) FROM log") == [(0,)]
    assert target_db.rows("SELECT id, v FROM item ORDER BY id") == [(1, 6), (2, 6)]
