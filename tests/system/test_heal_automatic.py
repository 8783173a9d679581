"""`source.on_lost_slot = "heal"`: the daemon replaces a lost slot and goes on, and stops where it may not."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.fixtures.databases import create_database
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import check_equal, commit_each, drop_slot, foreign_transaction, plain_route

if TYPE_CHECKING:
    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route
    from tests.fixtures.servers import OwnServers

_HEALS: dict[str, str | float] = {"source.on_lost_slot": "heal"}
_SOURCE_REFUSED = 3
_TARGET_REFUSED = 4
_HEALED = "SELECT healed_at IS NOT NULL FROM parapply.slots"


@pytest.fixture
def route(source_db: Database, target_db: Database) -> Route:
    """Plain tables and a slot."""
    return plain_route(source_db, target_db, make_slot)


def _served(daemon: Daemon, route: Route) -> None:
    commit_each(route.source, 1, 10)
    daemon.wait_caught_up()


def test_f12_a_slot_that_is_dropped_under_a_daemon_is_healed_once(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """Rows are equal afterwards, and later ones come; a second loss within the hour ends the daemon with the reason."""
    daemon = start_daemon(route, settings=_HEALS)
    _served(daemon, route)
    route.source.execute("ALTER TABLE item REPLICA IDENTITY FULL")
    daemon.pause()
    drop_slot(route)
    route.source.execute(
        "DELETE FROM item WHERE id = 3; UPDATE item SET v = 50 WHERE id = 5; INSERT INTO evt VALUES (7)"
    )
    daemon.send(signal.SIGCONT)
    started, done = daemon.wait_for_event("heal_started"), daemon.wait_for_event("heal_done")
    assert (started["level"], "is no longer on the publisher" in started["reason"]) == ("warning", True)
    # Ten rows of the table without a key and one more, and one of the other.
    assert done["n_rows"] == 12
    commit_each(route.source, 20, 29)
    daemon.wait_caught_up()
    check_equal(route)
    shown = json.loads(run_command(route, "status", "--json").stdout)
    assert shown["state"] == "running"
    assert route.target.rows(_HEALED) == [(True,)]
    drop_slot(route)
    assert daemon.exit_code() == _SOURCE_REFUSED, daemon.log_tail()
    assert "one an hour at most" in daemon.failure
    assert "Hint: `parapply heal`" in daemon.failure
    assert route.target.rows("SELECT state, lowest_lsn > '0/0' FROM parapply.slots") == [("lost", True)]
    run_command(route, "heal", code=0)


@pytest.mark.crash
def test_f11_a_slot_that_is_invalidated_under_a_daemon_is_healed(
    own_servers: OwnServers, target_db: Database, start_daemon: StartDaemon
) -> None:
    """The publisher removes its WAL, and ends the session that read it."""
    server = own_servers("publisher", settings={"max_slot_wal_keep_size": "1MB"})
    made = plain_route(create_database(server, "source"), target_db, make_slot)
    daemon = start_daemon(made, settings=_HEALS)
    _served(daemon, made)
    daemon.pause()
    for number in range(11, 15):
        commit_each(made.source, number, number)
        made.source.execute("SELECT pg_switch_wal()")
    made.source.execute("UPDATE item SET v = 50 WHERE id = 5; CHECKPOINT")
    made.source.wait_until(f"SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = '{made.slot}'")
    daemon.send(signal.SIGCONT)
    assert "was invalidated by the publisher" in daemon.wait_for_event("heal_started")["reason"]
    daemon.wait_for_event("heal_done")
    commit_each(made.source, 20, 29)
    daemon.wait_caught_up()
    check_equal(made)
    daemon.stop()


def test_without_the_setting_the_daemon_stops(route: Route, start_daemon: StartDaemon) -> None:
    """By default a lost slot ends the daemon, with exit 3."""
    daemon = start_daemon(route)
    _served(daemon, route)
    drop_slot(route)
    assert daemon.exit_code() == _SOURCE_REFUSED, daemon.log_tail()
    assert "is no longer on the publisher" in daemon.failure
    assert daemon.events_of("heal_started") == []


@pytest.mark.parametrize("point", [failpoints.HEAL_COMPARED, failpoints.HEAL_BEGUN, failpoints.HEAL_SLOT,
                                   failpoints.HEAL_TABLE_DONE, failpoints.HEAL_DONE])  # fmt: skip
def test_f1_a_daemon_killed_in_the_middle_goes_on(route: Route, start_daemon: StartDaemon, point: str) -> None:
    """Its next start ends the heal, which changes on both sides of the kill are in."""
    daemon = start_daemon(route)
    _served(daemon, route)
    daemon.stop()
    drop_slot(route)
    route.source.execute("UPDATE item SET v = 50 WHERE id = 5")
    killed = start_daemon(route, settings=_HEALS, environ={"PARAPPLY_FAILPOINT": f"{point}:kill"})
    assert killed.exit_code() == -signal.SIGKILL, killed.log_tail()
    route.source.execute("UPDATE item SET v = 60 WHERE id = 6")
    again = start_daemon(route, settings=_HEALS)
    again.wait_for_event("heal_done")
    commit_each(route.source, 20, 29)
    again.wait_caught_up()
    check_equal(route)


def test_a_daemon_that_waits_for_the_snapshot_shows_it_and_ends_in_order(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """A transaction of the publisher holds the heal up; the state says so, and SIGTERM ends the daemon all the same."""
    daemon = start_daemon(route)
    _served(daemon, route)
    daemon.stop()
    drop_slot(route)
    with foreign_transaction(route.source, "INSERT INTO item VALUES (30, 30)"):
        held = start_daemon(route, settings=_HEALS)
        held.wait_for_line("waiting for the publisher's snapshot")
        shown = json.loads(run_command(route, "status", "--json").stdout)
        assert (shown["state"], shown["is_daemon_connected"]) == ("healing", True)
        held.stop()
    again = start_daemon(route, settings=_HEALS)
    again.wait_for_event("heal_done")
    again.wait_caught_up()
    check_equal(route)


def test_more_rows_than_allowed_change_nothing(route: Route, start_daemon: StartDaemon) -> None:
    """The daemon ends, and its next start does not compare again within the hour."""
    daemon = start_daemon(route)
    _served(daemon, route)
    daemon.stop()
    drop_slot(route)
    route.source.execute("UPDATE item SET v = 50")
    limits = {**_HEALS, "source.heal_limit_rows": 5}
    refused = start_daemon(route, settings=limits)
    assert refused.exit_code() == _TARGET_REFUSED, refused.log_tail()
    assert "source.heal_limit_rows is 5: nothing was changed" in refused.failure
    assert route.target.rows("SELECT count(*) FROM item WHERE v = 50") == [(0,)]
    again = start_daemon(route, settings=limits)
    assert again.exit_code() == _SOURCE_REFUSED, again.log_tail()
    assert "one an hour at most" in again.failure


def test_an_archive_keeps_its_rows(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """Where deletes are not published rows that only the target has are kept, with a key and without.

    The daemon refuses. The command asks, and its `--max-rows` also counts the rows of a table that is emptied.
    """
    route.source.execute("ALTER PUBLICATION pub SET (publish = 'insert')")
    daemon = start_daemon(route, settings=_HEALS)
    commit_each(route.source, 1, 100)
    daemon.finish()
    route.source.execute("DELETE FROM item WHERE id > 10; DELETE FROM evt WHERE n > 10")
    drop_slot(route)
    refused = start_daemon(route, settings={**_HEALS, "source.heal_limit_rows": 95})
    assert refused.exit_code() == _SOURCE_REFUSED, refused.log_tail()
    named = "rows deleted: public.evt (update, delete, truncate), public.item (update, delete, truncate)"
    assert named in refused.failure
    assert named in run_command(route, "heal").stderr
    dry = run_command(route, "heal", "--dry-run")
    assert (dry.returncode, named in dry.stderr) == (1, True)
    assert "public.evt: emptied of 100 rows, and all rows copied (10): it has no key" in dry.stdout
    few = run_command(route, "heal", "--follow-unpublished", "--max-rows", "189")
    assert (few.returncode, "190 rows are to be copied or deleted" in few.stderr) == (_TARGET_REFUSED, True), few
    assert route.target.rows("SELECT (SELECT count(*) FROM item), (SELECT count(*) FROM evt)") == [(100, 100)]
    run_command(route, "heal", "--follow-unpublished", code=0)
    check_equal(route)


def test_f22_a_slot_that_the_daemon_drops_is_healed(route: Route, start_daemon: StartDaemon) -> None:
    """With `on_retained_wal = "drop_slot"` the publisher's disk is freed, and the target loses nothing."""
    settings = {**_HEALS, "source.retained_wal_limit_bytes": 1, "source.on_retained_wal": "drop_slot"}
    daemon = start_daemon(route, settings=settings)
    commit_each(route.source, 1, 10)
    daemon.wait_for_event("slot_dropped")
    daemon.wait_for_event("heal_done")
    route.target.wait_until("SELECT count(*) = 10 FROM item")
    daemon.stop()


def test_check_names_the_missing_rights(route: Route, run_command: RunCommand) -> None:
    """Both are warnings: the daemon itself needs neither, until the slot is lost."""
    ((name,),) = route.target.rows("SELECT current_database()")
    route.source.execute(f"REVOKE SELECT ON item FROM {route.source.source_role}")
    route.target.execute(f"REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC, {route.target.target_role}")
    found = {}
    for setting in ("stop", "heal"):
        done = run_command(route, "check", "--json", "--set", f"source.on_lost_slot={setting}")
        found[setting] = {one["code"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["heal"].keys() - found["stop"].keys() == {"heal_select", "heal_temporary"}
    assert "GRANT SELECT ON" in found["heal"]["heal_select"]["fix"]
    assert found["heal"]["heal_temporary"]["fix"].startswith(f'GRANT TEMPORARY ON DATABASE "{name}" TO ')


@pytest.mark.crash
def test_f14_a_publisher_put_back_is_not_healed_from(
    own_servers: OwnServers, target_db: Database, start_daemon: StartDaemon
) -> None:
    """An older copy without the slot, whether or not it has written as much since: exit 3, and no row is deleted."""
    server = own_servers("publisher")
    made = plain_route(create_database(server, "source"), target_db, make_slot)
    older = server.directory / "older"
    daemon = start_daemon(made, settings=_HEALS)
    commit_each(made.source, 1, 10)
    daemon.finish()
    server.stop()
    subprocess.run(["cp", "-a", str(server.data_dir), str(older)], check=True)
    server.start()
    daemon = start_daemon(made, settings=_HEALS)
    commit_each(made.source, 11, 400)
    daemon.finish()
    server.kill()
    subprocess.run(["rm", "-rf", str(server.data_dir)], check=True)
    subprocess.run(["cp", "-a", str(older), str(server.data_dir)], check=True)
    server.start()
    drop_slot(made)
    ((high_lsn,),) = target_db.rows("SELECT highest_lsn::text FROM parapply.slots")
    assert made.source.rows(f"SELECT pg_current_wal_flush_lsn() < '{high_lsn}'") == [(True,)]
    for words in ("was put back to an older state", "may be an older copy of itself"):
        refused = start_daemon(made, settings=_HEALS)
        assert refused.exit_code() == _SOURCE_REFUSED, refused.log_tail()
        assert words in refused.failure
        assert target_db.rows("SELECT count(*) FROM item") == [(400,)]
        made.source.execute("CREATE TABLE IF NOT EXISTS apart AS SELECT generate_series(1, 20000) AS n")
        made.source.wait_until(f"SELECT pg_current_wal_flush_lsn() > '{high_lsn}'")
