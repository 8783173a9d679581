"""A copied table of which changes were not published: it waits with the reason, and `refresh` copies it again."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from parapply.target.state.schema import ensure_schema
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_TABLES = """
CREATE TABLE taken_out (id int PRIMARY KEY); CREATE TABLE filtered (id int PRIMARY KEY);
CREATE TABLE m (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100);
CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200);
CREATE TABLE untouched (id int PRIMARY KEY);
"""
_ROOT = """
CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100);
"""


class _ListInFile(Route):
    """A route whose publications the command line does not name."""

    def arguments(self, *settings: Any, **defaults: Any) -> list[str]:  # noqa: ANN401  as the route's
        """Return the options that every command takes but `--publication`."""
        words = super().arguments(*settings, **defaults)
        at = words.index("--publication")
        return words[:at] + words[at + 2 :]


def _copied(
    source: Database, target: Database, run_command: RunCommand, tables: str, published: str, *more: str
) -> Route:
    for database in (source, target):
        database.execute(tables)
    source.execute(f"CREATE PUBLICATION pub FOR {published}")
    route = Route(source=source, target=target, settings={**FAST, "apply.workers": 2})
    run_command(route, "init", "--copy", *more, code=0)
    return route


def _waiting(route: Route) -> dict[str, str]:
    return dict(route.target.rows("SELECT table_name, reason FROM parapply.copies WHERE state = 'waiting'"))


def test_tables_that_were_not_published_for_a_time(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Taken out and back, another row filter, detached and attached: each waits; the others, and OWNER TO, do not."""
    published = "TABLE taken_out, filtered WHERE (id < 100), m, untouched"
    route = _copied(source_db, target_db, run_command, _TABLES, published)
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO taken_out VALUES (1); INSERT INTO filtered VALUES (1), (101)")
    daemon.wait_caught_up()
    # Each at once, so that no look of the daemon comes between.
    source_db.execute(
        "ALTER PUBLICATION pub DROP TABLE taken_out; INSERT INTO taken_out VALUES (2);"
        " ALTER PUBLICATION pub ADD TABLE taken_out"
    )
    source_db.execute("ALTER PUBLICATION pub SET TABLE taken_out, filtered, m, untouched")
    source_db.execute(
        "ALTER TABLE m DETACH PARTITION m1; INSERT INTO m1 VALUES (1);"
        " ALTER TABLE m ATTACH PARTITION m1 FOR VALUES FROM (0) TO (100)"
    )
    refused = run_command(route, "snapshot", "--", "true")
    assert "tables are not copied" in refused.stderr
    waiting = _waiting(route)
    assert sorted(waiting) == ["filtered", "m1", "taken_out"]
    assert "made again" in waiting["taken_out"]
    assert "row filter" in waiting["filtered"]
    assert "attached" in waiting["m1"]
    assert "again" in daemon.wait_for_event("table_waits")["hint"]
    daemon.stop()
    run_command(route, "refresh", code=0)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    check_equal(route, "taken_out", "filtered", "m", "untouched")
    assert "nothing to do" in run_command(route, "refresh").stdout
    assert not daemon.events_of("publication_altered")
    source_db.execute("ALTER PUBLICATION pub SET (publish = 'insert'); ALTER PUBLICATION pub SET (publish ="
                      " 'insert, update, delete, truncate')")  # fmt: skip
    run_command(route, "snapshot", "--", "true", code=0)
    daemon.wait_for_event("publication_altered")
    assert _waiting(route) == {}
    daemon.stop()


def test_a_publication_that_is_not_asked_for_for_a_time(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Its tables wait although no look came between: one comes before the stream is asked for another list."""
    source_db.execute("CREATE TABLE more (id int PRIMARY KEY); CREATE PUBLICATION more FOR TABLE more")
    target_db.execute("CREATE TABLE more (id int PRIMARY KEY)")
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    both = ("--publication", "more")
    route = _copied(source_db, target_db, run_command, tables, "TABLE t", *both)
    daemon = start_daemon(route, *both)
    daemon.finish()
    killed = start_daemon(route, environ={"PARAPPLY_FAILPOINT": "connected:kill"})
    assert killed.exit_code() == -signal.SIGKILL
    source_db.execute("INSERT INTO t VALUES (1)")
    daemon = start_daemon(route, *both)
    assert daemon.wait_for_event("table_waits")["relation"] == "public.more"
    daemon.wait_caught_up()
    assert list(_waiting(route)) == ["more"]
    check_equal(route, "t")


def test_a_list_of_publications_that_is_refused(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The stream passes nothing with it: no table of the list before waits, and nothing of it is noted."""
    source_db.execute("CREATE TABLE more (id int PRIMARY KEY); CREATE PUBLICATION more FOR TABLE more")
    target_db.execute("CREATE TABLE more (id int PRIMARY KEY)")
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    route = _copied(source_db, target_db, run_command, tables, "TABLE t", "--publication", "more")
    # Of another slot, whose rows in a table that nothing writes yet have constants.
    row = json.dumps({"slot_id": 0, "slot_name": "other", "constants_in": {"public.taken": [{"site": "1"}]}})
    target_db.execute(
        "INSERT INTO parapply.slots OVERRIDING SYSTEM VALUE"
        " SELECT (jsonb_populate_record(s, %s)).* FROM parapply.slots AS s",
        [row],
    )
    target_db.execute("CREATE TABLE taken (id int PRIMARY KEY)")
    path = tmp_path / "app.toml"
    path.write_text('[source]\npublications = ["pub", "more"]\n')
    given = _ListInFile(source=source_db, target=target_db, slot=route.slot, settings=route.settings)
    daemon = start_daemon(given, "--config", str(path))
    daemon.wait_caught_up()
    path.write_text('[source]\npublications = ["pub"]\n[mapping.tables]\n"public.t" = "public.taken"\n')
    daemon.send(signal.SIGHUP)
    assert "lacks constants" in str(daemon.wait_for_event("config_refused")["error"])
    source_db.execute("INSERT INTO more VALUES (1)")
    path.write_text('[source]\npublications = ["pub", "more"]\n')
    daemon.send(signal.SIGHUP)
    daemon.wait_for_event("source_connected", count=2)
    daemon.wait_caught_up()
    # A look.
    run_command(route, "snapshot", "--publication", "more", "--", "true", code=0)
    assert _waiting(route) == {}
    check_equal(route, "t", "more")
    daemon.stop()


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "not_copied"])
def test_a_publication_that_is_made_again(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon, *, copies: bool
) -> None:
    """Its tables wait as soon as the publisher decodes changes without it: the stream says so, no look is awaited."""
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    for database in (source_db, target_db):
        database.execute(tables)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2})
    run_command(route, "init", *(["--copy"] if copies else []), code=0)
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO t VALUES (1)")
    daemon.wait_caught_up()
    run_command(route, "snapshot", "--", "true", code=0)
    source_db.execute("DROP PUBLICATION pub; INSERT INTO t VALUES (2); CREATE PUBLICATION pub FOR ALL TABLES")
    source_db.execute("INSERT INTO t VALUES (3)")
    assert daemon.wait_for_event("table_waits")["relation"] == "public.t"
    assert "published" in _waiting(route)["t"]
    more = [] if copies else ["--table", "public.t", "--truncate"]
    run_command(route, "refresh", *more, code=0)
    daemon.wait_caught_up()
    check_equal(route, "t")
    # Made UNLOGGED and LOGGED again, with a look between.
    source_db.execute("ALTER TABLE t SET UNLOGGED; INSERT INTO t VALUES (4)")
    run_command(route, "snapshot", "--", "true")
    source_db.execute("ALTER TABLE t SET LOGGED")
    assert run_command(route, "snapshot", "--", "true").returncode != 0
    assert list(_waiting(route)) == ["t"]
    daemon.stop()


@pytest.mark.pg_majors(18)
@pytest.mark.parametrize("has_looked", [True, False])
def test_a_publication_that_was_missing_while_nothing_ran(
    source_db: Database,
    target_db: Database,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
    *,
    has_looked: bool,
) -> None:
    """It is back before any look, and a warning in the stream is the only sign: the state has it before the rows."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    source_db.execute("CREATE SCHEMA parapply; CREATE TABLE parapply.ddl_queue (id int PRIMARY KEY)")
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings=FAST)
    init_route(route)
    if has_looked:
        daemon = start_daemon(route)
        target_db.wait_until("SELECT count(*) = 1 FROM parapply.marks")
        daemon.stop()
    source_db.execute("ALTER PUBLICATION pub RENAME TO away")
    source_db.execute("INSERT INTO t VALUES (1)")
    source_db.execute("ALTER PUBLICATION away RENAME TO pub")
    source_db.execute("INSERT INTO t VALUES (2)")
    ((end_lsn,),) = source_db.rows("SELECT pg_current_wal_lsn()")
    assert start_daemon(route, "--until", end_lsn).exit_code() == 0
    # Nothing of the publisher's queue of commands is ever copied.
    assert _waiting(route).keys() == {"t"}
    assert "published" in _waiting(route)["t"]
    assert target_db.rows("SELECT id FROM t") == []


@pytest.mark.pg_majors(18)
def test_a_publication_that_was_missing_while_a_table_was_copied(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Its snapshot is of before, and the changes since come neither with it nor with the stream: it waits then."""
    route = _copied(source_db, target_db, run_command, "CREATE TABLE t (id int PRIMARY KEY)", "ALL TABLES")
    source_db.execute("INSERT INTO t VALUES (1)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    environ = {"PARAPPLY_FAILPOINT": "copy_part:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    refresh = start_daemon(route, "--table", "public.t", "--truncate", verb="refresh", environ=environ)
    held = tmp_path / "copy_part.held"
    while refresh.runs_for(0.01) and not held.exists():
        pass
    source_db.execute("ALTER PUBLICATION pub RENAME TO away")
    source_db.execute("INSERT INTO t VALUES (2)")
    source_db.execute("ALTER PUBLICATION away RENAME TO pub")
    source_db.execute("INSERT INTO t VALUES (3)")
    try:
        target_db.wait_until("SELECT published_by = '' FROM parapply.copies")
    finally:
        held.unlink(missing_ok=True)
    assert refresh.exit_code() == 0, refresh.log_tail()
    assert "tables are not copied" in run_command(route, "snapshot", "--", "true").stderr
    assert "published" in _waiting(route)["t"]
    daemon.stop()


def test_a_gap_of_a_table_that_was_made_again(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """The row of the table that had its name, which a refresh has left, does not hide that changes are missing."""
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    for database in (source_db, target_db):
        database.execute(tables)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2})
    for words in (["init"], ["refresh", "--table", "public.t"]):
        run_command(route, *words, code=0)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    for database in (target_db, source_db):
        database.execute(f"DROP TABLE t; {tables}")
    source_db.execute("INSERT INTO t VALUES (1)")
    daemon.wait_caught_up()
    # A look, which keeps how the new table is published.
    run_command(route, "snapshot", "--", "true", code=0)
    source_db.execute("DROP PUBLICATION pub; INSERT INTO t VALUES (2); CREATE PUBLICATION pub FOR ALL TABLES")
    assert daemon.wait_for_event("table_waits")["relation"] == "public.t"
    assert "published" in _waiting(route)["t"]
    run_command(route, "refresh", "--table", "public.t", "--truncate", code=0)
    daemon.wait_caught_up()
    check_equal(route, "t")
    daemon.stop()


@pytest.mark.pg_majors(15)
def test_a_publication_that_was_missing_up_to_17(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Such a publisher cannot decode changes of a time without it, now or later: the hint leads to a new copy."""
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    for database in (source_db, target_db):
        database.execute(tables)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2})
    run_command(route, "init", "--copy", code=0)
    source_db.execute("DROP PUBLICATION pub; INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR ALL TABLES")
    daemon = start_daemon(route)
    assert daemon.exit_code() == 3, daemon.log_tail()
    assert "`parapply drop`, then `parapply init --copy --truncate`" in daemon.failure
    run_command(route, "drop", "--yes", code=0)
    run_command(route, "init", "--copy", "--truncate", code=0)
    check_equal(route, "t")


@pytest.mark.pg_majors(15, 18)
def test_partitions_of_a_root_that_is_published_as_one(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """None of them waits; one that is attached with rows makes the root wait before its first change is applied."""
    route = _copied(source_db, target_db, run_command, _ROOT, "TABLE p WITH (publish_via_partition_root)")
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO p VALUES (1)")
    target_db.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200);"
                      " CREATE TABLE p3 PARTITION OF p FOR VALUES FROM (200) TO (300)")  # fmt: skip
    source_db.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200); INSERT INTO p VALUES (101)")
    daemon.wait_caught_up()
    assert target_db.rows("SELECT table_name, state FROM parapply.copies") == [("p", "copied")]
    run_command(route, "verify", code=0)
    source_db.execute("CREATE TABLE p3 (id int PRIMARY KEY); INSERT INTO p3 VALUES (201)")
    source_db.execute(
        "ALTER TABLE p ATTACH PARTITION p3 FOR VALUES FROM (200) TO (300); UPDATE p SET id = 202 WHERE id = 201"
    )
    daemon.wait_caught_up()
    assert "public.p3 was attached" in _waiting(route)["p"]
    run_command(route, "refresh", code=0)
    source_db.execute("INSERT INTO p VALUES (2), (203)")
    daemon.wait_caught_up()
    check_equal(route, "p")
    assert _waiting(route) == {}
    daemon.stop()


async def test_a_state_schema_that_is_gone_from_the_publisher(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Its changes, still in WAL, are left out by what its tables look like; no table waits for a copy."""
    route = _copied(source_db, target_db, run_command, "CREATE TABLE t (id int PRIMARY KEY)", "ALL TABLES")
    async with await psycopg.AsyncConnection.connect(source_db.dsn, autocommit=True) as conn:
        await ensure_schema(conn, "progress")
    source_db.execute("INSERT INTO t VALUES (1); DROP SCHEMA progress CASCADE")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    check_equal(route, "t")
    assert daemon.events_of("state_left_out")
    assert _waiting(route) == {}
    run_command(route, "snapshot", "--", "true", code=0)
    daemon.stop()
