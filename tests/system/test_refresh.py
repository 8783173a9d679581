"""`refresh`: a table added to the publication is copied while the daemon runs, and joins the stream exactly."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from parapply.target.session import lease
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.plain import FAST, TABLES, WORKER_IS_BLOCKED, check_equal, foreign_transaction
from tests.fixtures.route import Route
from tests.fixtures.two_phase import LARGE
from tests.fixtures.workloads import BankLoad, check_bank, create_bank

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_PUBLISHED_FIRST = "acct, xfer"


@pytest.fixture
def route(source_db: Database, target_db: Database, run_command: RunCommand) -> Route:
    """The bank, of which `evt` is not published; the others are copied."""
    create_bank(source_db, target_db)
    target_db.execute("TRUNCATE acct")
    source_db.execute("ALTER PUBLICATION pub DROP TABLE evt")
    made = Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2})
    run_command(made, "init", "--copy", code=0)
    return made


def test_an_added_table_joins_under_load(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """Rows of the new table from before, during and after its copy are applied once, though two copies were killed."""
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    with BankLoad(route.source, seed=1) as load:
        load.wait_for_more(30)
        route.source.execute("ALTER PUBLICATION pub ADD TABLE evt")
        load.wait_for_more(30)
        for point in (failpoints.COPY_STATE, failpoints.COPY_PART_DONE):
            environ = {"PARAPPLY_FAILPOINT": f"{point}:kill"}
            assert run_command(route, "refresh", environ=environ).returncode == -signal.SIGKILL
            load.wait_for_more(30)
        run_command(route, "refresh", code=0)
        load.wait_for_more(30)
        load.stop()
        daemon.wait_caught_up()
    daemon.stop()
    check_bank(route.source, route.target, load)
    assert "nothing to do" in run_command(route, "refresh").stdout


def test_a_table_is_copied_anew(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """`--table` with `--truncate` replaces what a table holds while its changes go on: what differed is equal."""
    daemon = start_daemon(route)
    with BankLoad(route.source, seed=2) as load:
        load.wait_for_more(30)
        route.target.execute("INSERT INTO xfer VALUES (-1, 1, 1, 1)")
        refused = run_command(route, "refresh", "--table", "public.xfer", code=4)
        assert "public.xfer hold rows already" in refused.stderr
        run_command(route, "refresh", "--table", "public.xfer", "--truncate", code=0)
        load.wait_for_more(30)
    daemon.finish()
    check_equal(route, "acct", "xfer")


def test_a_paused_table_stands_still_until_it_is_resumed(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """After `pause` nothing is applied to a table, and everything to the others; `resume` brings it where they are.

    It is shown, and a plain `refresh` leaves it paused.
    """
    held = "SELECT count(*), max(id) FROM xfer"
    daemon = start_daemon(route)
    with BankLoad(route.source, seed=3) as load:
        load.wait_for_more(30)
        for _ in range(2):  # the second time there is nothing to do
            run_command(route, "pause", "public.xfer", code=0)
        before = route.target.rows(held)
        load.wait_for_more(30)
        daemon.wait_caught_up()
        assert route.target.rows(held) == before != route.source.rows(held)
        assert "`parapply resume`: public.xfer" in run_command(route, "refresh").stdout
        assert "paused" in run_command(route, "status").stdout
        run_command(route, "resume", "public.xfer", code=0)
        load.wait_for_more(30)
    daemon.wait_caught_up()
    again = run_command(route, "resume", "public.xfer")
    assert (again.returncode, "not paused: public.xfer" in again.stderr) == (4, True)
    daemon.stop()
    check_equal(route, "acct", "xfer")


def test_a_wait_for_a_session_of_an_earlier_copy_is_told(route: Route, start_daemon: StartDaemon) -> None:
    """A command that waits behind one that survived its client names it."""
    ((slot_id,),) = route.target.rows("SELECT slot_id FROM parapply.slots")
    lock = f"SELECT pg_advisory_xact_lock_shared({lease.COPY_LOCK_CLASS}, {lease.worker_key(int(str(slot_id)))})"
    with foreign_transaction(route.target, lock):
        pausing = start_daemon(route, "public.xfer", verb="pause")
        pausing.wait_for_line("waiting for the end of pid")
    assert pausing.exit_code() == 0, pausing.log_tail()


def test_a_table_that_waits_is_paused(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """No change of a table that waits is applied, before `pause` and after it; the daemon answers all the same."""
    route.source.execute("INSERT INTO evt VALUES (1, 1); ALTER PUBLICATION pub ADD TABLE evt")
    daemon = start_daemon(route)
    assert daemon.wait_for_event("table_waits")["relation"] == "public.evt"
    run_command(route, "pause", "public.evt", code=0)
    run_command(route, "resume", "public.evt", code=0)
    daemon.wait_caught_up()
    check_equal(route, "evt")


def test_a_table_is_renamed_while_it_is_paused(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """The stream says no name of a table whose changes are left out; `status` has the one that `resume` takes."""
    run_command(route, "pause", "public.xfer", code=0)
    for database in (route.source, route.target):
        database.execute("ALTER TABLE xfer RENAME TO moved")
    daemon = start_daemon(route)
    route.target.wait_until("SELECT EXISTS (SELECT FROM parapply.copies WHERE table_name = 'moved')")
    assert "public.moved" in run_command(route, "status").stdout
    run_command(route, "resume", "public.moved", code=0)
    daemon.wait_caught_up()


def test_a_table_that_is_missing_is_refused(route: Route, run_command: RunCommand) -> None:
    """The hint of `refresh`, of `resume` and of a copy that goes on names no option that only the first copy has."""
    route.source.execute("CREATE TABLE late (id int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE late")
    done = run_command(route, "refresh", code=4)
    assert done.stderr == "parapply: target: table public.late is missing. Hint: create what is missing\n"


def test_without_a_free_slot_a_table_stays_copied(route: Route, run_command: RunCommand) -> None:
    """A refresh that gets no snapshot is refused before the table is noted as being copied: its changes go on."""
    states = "SELECT table_name, state FROM parapply.copies ORDER BY 1"
    before = route.target.rows(states)
    filled = route.source.rows(
        "SELECT slot_name FROM generate_series(1, current_setting('max_replication_slots')::int"
        " - (SELECT count(*) FROM pg_replication_slots)::int) AS i, pg_create_physical_replication_slot('filler_' || i)"
    )
    try:
        refused = run_command(route, "refresh", "--table", "public.xfer", "--truncate")
    finally:
        for (name,) in filled:
            route.source.execute(f"SELECT pg_drop_replication_slot('{name}')")
    assert refused.returncode == 3
    assert "no replication slot is free" in refused.stderr
    assert route.target.rows(states) == before


def test_only_what_meets_the_copy_waits(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """While a table's copy waits for a lock others go on; its later change waits until the copy has ended."""
    route.source.execute("INSERT INTO evt VALUES (1, 1); ALTER PUBLICATION pub ADD TABLE evt")
    daemon = start_daemon(route)
    with route.target.connect() as foreign:
        foreign.execute("BEGIN; LOCK TABLE evt IN SHARE MODE")
        copying = threading.Thread(target=run_command, args=(route, "refresh"))
        copying.start()
        route.target.wait_until("SELECT start_lsn IS NOT NULL AND state = 'copying' FROM parapply.copies"
                                " WHERE table_name = 'evt'")  # fmt: skip
        route.target.wait_until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE"
                                " 'parapply copy%' AND wait_event_type = 'Lock')")  # fmt: skip
        route.source.execute("INSERT INTO xfer VALUES (1, 1, 1, 1)")
        route.target.wait_until("SELECT EXISTS (SELECT FROM xfer WHERE id = 1)")
        route.source.execute("INSERT INTO evt VALUES (2, 2)")
        route.source.execute("INSERT INTO xfer VALUES (2, 1, 1, 1)")
        daemon.wait_for_event("table_awaited")
        assert route.target.rows("SELECT count(*) FROM xfer") == [(1,)]
        foreign.execute("COMMIT")
    copying.join(30)
    daemon.finish()
    check_equal(route, "acct", "xfer", "evt")


def test_a_table_that_is_paused_before_its_copy_stays_paused(route: Route, run_command: RunCommand) -> None:
    """A refresh of all has chosen it, and no lock as yet keeps another command from it."""
    route.source.execute("INSERT INTO evt VALUES (1, 1); ALTER PUBLICATION pub ADD TABLE evt")
    with ThreadPoolExecutor(1) as pool, foreign_transaction(route.target, "LOCK TABLE evt"):
        copying = pool.submit(run_command, route, "refresh")
        route.target.wait_until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE"
                                " 'parapply refresh%' AND wait_event_type = 'Lock')")  # fmt: skip
        assert run_command(route, "pause", "public.evt").returncode == 0
    done = copying.result()
    assert (done.returncode, "public.evt" in done.stdout, "join the stream" in done.stdout) == (0, True, False), done
    assert route.target.rows("SELECT state FROM parapply.copies WHERE table_name = 'evt'") == [("waiting",)]
    assert route.target.rows("SELECT FROM evt") == []


def test_a_transaction_in_progress_spans_the_copy(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Streamed before the copy, committed while it waits for that: the new table's rows come with the copy, once."""
    name = route.source.rows("SELECT quote_ident(current_database())")[0][0]
    route.source.execute(f"ALTER DATABASE {name} SET logical_decoding_work_mem = '64kB'")
    route.source.execute("ALTER PUBLICATION pub ADD TABLE evt")
    daemon = start_daemon(route, settings={"apply.stream_start_bytes": 0, "apply.workers": 4})
    daemon.wait_for_event("source_connected")
    with route.source.connect() as large:
        large.execute("BEGIN; INSERT INTO xfer SELECT i, 1, 1, 1 FROM generate_series(1, 3000) AS i")
        large.execute("INSERT INTO evt SELECT i, i FROM generate_series(1, 9000) AS i")
        copying = threading.Thread(target=run_command, args=(route, "refresh"))
        copying.start()
        route.target.wait_until("SELECT bool_or(state = 'copying' AND is_seen) FROM parapply.copies")
        large.execute("COMMIT")
    copying.join(30)
    route.source.execute("INSERT INTO evt VALUES (0, 0)")
    daemon.finish()
    check_equal(route, "acct", "xfer", "evt")


def test_a_truncate_of_a_table_that_a_paused_one_refers_to(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """The paused table keeps its rows, the other one is emptied, though the server refuses a TRUNCATE of it alone."""
    tables = "CREATE TABLE boss (id int PRIMARY KEY); CREATE TABLE clerk (id int PRIMARY KEY, b int REFERENCES boss)"
    for database in (source_db, target_db):
        database.execute(tables)
    source_db.execute("INSERT INTO boss VALUES (1); INSERT INTO clerk VALUES (1, 1)")
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    run_command(route, "pause", "public.clerk", code=0)
    source_db.execute("TRUNCATE boss, clerk")
    source_db.execute("INSERT INTO boss VALUES (2)")
    daemon.wait_caught_up()
    assert target_db.rows("SELECT id FROM boss") == [(2,)]
    assert target_db.rows("SELECT id FROM clerk") == [(1,)]
    run_command(route, "resume", "public.clerk", code=0)
    daemon.finish()
    check_equal(route, "boss", "clerk")


def test_a_truncate_in_part_begins_with_the_children(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Whatever order the publisher's TRUNCATE names them in, an enforced foreign key among them is kept."""
    tables = (
        "CREATE TABLE boss (id int PRIMARY KEY); CREATE TABLE clerk (id int PRIMARY KEY, b int REFERENCES boss);"
        "CREATE TABLE desk (id int PRIMARY KEY)"
    )
    for database in (source_db, target_db):
        database.execute(tables)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings={**FAST, "target.session_replication_role": "origin"})
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO boss VALUES (1); INSERT INTO clerk VALUES (1, 1); INSERT INTO desk VALUES (1)")
    daemon.wait_caught_up()
    run_command(route, "pause", "public.desk", code=0)
    source_db.execute("TRUNCATE clerk, boss, desk")
    source_db.execute("INSERT INTO boss VALUES (2)")
    daemon.finish()
    check_equal(route, "boss", "clerk")
    assert target_db.rows("SELECT id FROM desk") == [(1,)]


def test_a_table_whose_refresh_was_killed_stops_no_other(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """While another table is copied its changes are left out, as before: they come with the next copy of it."""
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_PART_DONE}:kill"}
    killed = run_command(route, "refresh", "--table", "public.acct", "--truncate", environ=environ)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    route.source.execute("ALTER PUBLICATION pub ADD TABLE evt")
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_BEGUN}:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    held = tmp_path / f"{failpoints.COPY_BEGUN}.held"
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(run_command, route, "refresh", "--table", "public.evt", environ=environ)
        while not held.exists():
            assert not wait([copying], timeout=0.05).done, copying.result()
        route.source.execute("UPDATE acct SET v = v + 1; INSERT INTO xfer VALUES (1, 1, 1, 1)")
        route.target.wait_until("SELECT EXISTS (SELECT FROM xfer WHERE id = 1)")
        held.unlink()
        assert copying.result().returncode == 0
    # Its rows are from the copy: no --truncate is needed.
    run_command(route, "refresh", code=0)
    daemon.finish()
    check_equal(route, "acct", "xfer", "evt")


@pytest.mark.parametrize("is_early", [False, True])
def test_a_copy_begins_within_a_large_transaction(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand, *, is_early: bool
) -> None:
    """Pieces of it wait for the copy, which does not wait for its end to make the snapshot; both end.

    The rows come after its end, because an earlier piece may have written the table: no row comes twice.
    """
    for database in (source_db, target_db):
        database.execute(f"{TABLES} CREATE TABLE wide (id int PRIMARY KEY, v text); CREATE TABLE spare (n int)")
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", code=0)
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_BEGUN}:kill"}
    assert run_command(route, "refresh", "--table", "public.spare", environ=environ).returncode == -signal.SIGKILL
    daemon = start_daemon(route, settings={**LISTEN, **LARGE.settings})
    endpoint = Endpoint(daemon)
    source_db.execute("INSERT INTO item VALUES (1, 0)")
    daemon.wait_caught_up()
    noting = "SELECT FROM parapply.copies WHERE table_name = 'spare' FOR UPDATE"
    with ThreadPoolExecutor(1) as pool:
        with foreign_transaction(target_db, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
            source_db.execute("UPDATE item SET v = 1")
            target_db.wait_until(WORKER_IS_BLOCKED)
            # The copy has its LSN, which the daemon cannot read yet.
            with foreign_transaction(target_db, noting):
                refreshing = pool.submit(run_command, route, "refresh", "--table", "public.evt")
                target_db.wait_until(WORKER_IS_BLOCKED.replace("worker%", "refresh%"))
                early = "INSERT INTO evt VALUES (1); " if is_early else ""
                wide = "INSERT INTO wide SELECT g, repeat('x', 10000) FROM generate_series(1, 3000) AS g"
                source_db.execute(f"BEGIN; {early}{wide}; INSERT INTO evt VALUES (2); COMMIT")
                # More than two pieces: intake stands at one that has no place, behind the first and before the last.
                piece_bytes = int(LARGE.settings["apply.memory_limit_bytes"]) // 4
                endpoint.wait_until(lambda: endpoint.samples()["parapply_queue_bytes"][()] > 2 * piece_bytes)
            daemon.wait_for_event("copies_changed")
        daemon.wait_for_event("table_awaited")
        done = refreshing.result()
    assert done.returncode == 0, done.stderr
    daemon.finish()
    check_equal(route, "item", "evt", "wide")
