"""A standby as the publisher: copy and stream are read there, and the primary gets nothing but the publication."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.databases import Database, create_database
from tests.fixtures.plain import FAST, TABLES, check_equal, commit_each
from tests.fixtures.roles import SOURCE_ROLE
from tests.fixtures.route import Route
from tests.fixtures.standby import make_standby

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

_REFUSED = 3
_LOG = "SELECT pg_log_standby_snapshot()"


def _run_with_snapshots(
    run_command: RunCommand, route: Route, command: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, and log the primary's running transactions until it has ended, as it asks for."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_command, route, command, *arguments)
        while not running.done():
            route.source.execute(_LOG)
            with suppress(TimeoutError):
                running.result(timeout=0.1)
        return running.result()


def _check_until_a_time(source: Database, standby: Database, route: Route, start_daemon: StartDaemon) -> None:
    """`run --until TIME` goes by what the standby has replayed, not by its clock: what it has not replayed may come."""
    standby.execute("SELECT pg_wal_replay_pause()")
    source.execute("INSERT INTO evt VALUES (-1)")
    ((time,),) = source.rows("SELECT clock_timestamp()::text")
    source.execute("SELECT pg_sleep(1.1)")
    source.execute("INSERT INTO evt VALUES (-2)")
    daemon = start_daemon(route, "--until", time)
    daemon.wait_for_event("source_connected")
    # The monitor has looked, and the lag in seconds says so.
    slot = "SELECT lag_s IS NOT NULL AND updated_at > clock_timestamp() - interval '1 s' FROM parapply.slots"
    route.target.wait_until(slot)
    assert daemon.is_running()
    standby.execute("SELECT pg_wal_replay_resume()")
    assert daemon.exit_code() == 0, daemon.log_tail()
    assert route.target.rows("SELECT n FROM evt WHERE n < 0") == [(-1,)]


@pytest.mark.pg_majors(16, 18)
def test_a_standby_is_the_publisher(
    own_servers: OwnServers, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """`init --copy`, `run` and `verify` read a standby, which says what it waits for; what writes there is refused.

    After the standby's promotion the daemon goes on there, with the same slot, and so does the next one.
    """
    primary, standby = own_servers("primary"), own_servers("standby")
    source = create_database(primary, "source")
    source.execute(f"{TABLES} CREATE PUBLICATION pub FOR TABLE item, evt")
    source.execute("CREATE SEQUENCE plain; SELECT setval('plain', 50); CREATE UNLOGGED SEQUENCE fast")
    target_db.execute(f"{TABLES} CREATE SEQUENCE plain; CREATE SEQUENCE fast")
    commit_each(source, 1, 50)
    make_standby(primary, standby)
    dsn = make_conninfo(host="127.0.0.1", port=standby.port, dbname="source", user=SOURCE_ROLE)
    settings: dict[str, str | float] = {
        **FAST,
        "source.failover": "auto",
        "source.catch_up_enter_bytes": 2,
    }
    route = Route(source=source, target=target_db, settings=settings, source_dsn=dsn)
    # A standby can copy only the rows that it has replayed.
    Database(dbname="source", server=standby).wait_until("SELECT count(*) = 50 FROM item")
    back = tmp_path / "back.toml"
    back.write_text(
        f'[source]\ndsn = "{target_db.source_role_dsn}"\nslot = "back"\npublications = ["back"]\n'
        f'[target]\ndsn = "{source.target_role_dsn}"\n'
    )
    for command, *arguments in (("migrate",), ("cutover", "--reverse", str(back)), ("init", "--ddl")):
        refused = run_command(route, command, *arguments)
        assert (refused.returncode, "standby" in refused.stderr) == (_REFUSED, True), refused
    copied = _run_with_snapshots(run_command, route, "init", "--copy")
    assert copied.returncode == 0, copied
    assert "pg_log_standby_snapshot()" in copied.stderr
    assert "a slot on a standby cannot be a failover slot" in copied.stdout
    assert target_db.rows("SELECT count(*) FROM item") == [(50,)]
    assert primary.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'logical'") == [(0,)]
    commit_each(source, 51, 300)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    assert [one["reason"] for one in daemon.events_of("catch_up_declined")] == ["the publisher is a standby"]
    verified = _run_with_snapshots(run_command, route, "verify")
    assert verified.returncode == 0, verified
    carried = run_command(route, "sequences")
    assert (carried.returncode, "public.fast: refused" in carried.stdout) == (1, True), carried
    assert target_db.rows("SELECT last_value FROM plain") == [(50,)]
    daemon.stop()
    _check_until_a_time(source, Database(dbname="source", server=standby), route, start_daemon)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    target_db.execute("INSERT INTO parapply.skips (slot_id, lsn) SELECT slot_id, 'FF/0' FROM parapply.slots")
    primary.stop()
    standby.execute("SELECT pg_promote(true, 60)")
    promoted = Database(dbname="source", server=standby)
    commit_each(promoted, 301, 350)
    daemon.route = Route(source=promoted, target=target_db, slot=route.slot, settings=settings, source_dsn=dsn)
    daemon.wait_caught_up()
    target_db.wait_until("SELECT NOT EXISTS (SELECT FROM parapply.skips)")
    daemon.stop()
    commit_each(promoted, 351, 360)
    again = start_daemon(daemon.route)
    again.wait_caught_up()
    again.stop()
    assert target_db.rows("SELECT timeline FROM parapply.slots") == [(2,)]
    check_equal(daemon.route)
