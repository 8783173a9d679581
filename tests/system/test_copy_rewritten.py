"""A table that changes on the publisher between the first look at it and its copy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from parapply import failpoints
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database


def test_a_rewritten_table_is_refused_and_copied_by_the_next_command(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """It is empty for the older snapshot: noted as copied, its rows would be missing without a word."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY, v text)")
    source_db.execute(
        "INSERT INTO a SELECT generate_series(1, 100); INSERT INTO b SELECT i, i FROM generate_series(1, 100) AS i;"
        " CREATE PUBLICATION pub FOR TABLE a, b"
    )
    route = Route(source=source_db, target=target_db, settings=FAST)
    held = tmp_path / f"{failpoints.COPY_BEGUN}.held"
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_BEGUN}:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    with ThreadPoolExecutor(1) as threads:
        copying = threads.submit(run_command, route, "init", "--copy", environ=environ)
        while not held.exists():
            assert not wait([copying], timeout=0.02).done, copying.result()
        source_db.execute("ALTER TABLE b ALTER v TYPE varchar(10) USING v || ''")
        held.unlink()
        done = copying.result()
    assert done.returncode == 3
    assert "public.b was rewritten, or replaced, after the snapshot of this copy" in done.stderr
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO b VALUES (0, 'later')")
    daemon.finish()
    check_equal(route, "a", "b")


def test_a_column_that_comes_while_the_slot_is_made_is_not_left_out(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Making a slot waits for all transactions; what happens to tables in that time is in no stream."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    target_db.execute("ALTER TABLE a ADD v int")
    source_db.execute("INSERT INTO a VALUES (1), (2); CREATE PUBLICATION pub FOR TABLE a")
    route = Route(source=source_db, target=target_db, settings=FAST)
    with ThreadPoolExecutor(1) as threads, source_db.connect() as old:
        old.execute("BEGIN; SELECT pg_current_xact_id()")
        copying = threads.submit(run_command, route, "init", "--copy")
        source_db.wait_until(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock' AND backend_type = 'walsender'"
        )
        source_db.execute("ALTER TABLE a ADD v int; UPDATE a SET v = 7")
        old.execute("COMMIT")
        done = copying.result()
    assert (done.returncode, "while the snapshot was awaited: public.a" in done.stderr) == (3, True), done
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    daemon.finish()
    check_equal(route, "a")
