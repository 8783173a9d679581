"""The publisher comes back without the end of its history: a standby that lacked it, or an older copy (F14).

Its commits from then on have LSNs that the target holds for other transactions.
"""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from parapply.model import format_lsn
from parapply.wire.decode import decode
from parapply.wire.messages import Commit
from tests.fixtures.captures import Capture
from tests.fixtures.databases import create_database
from tests.fixtures.plain import (
    check_equal,
    commit_each,
    drop_slot,
    foreign_transaction,
    lsn_of,
    plain_route,
    watermark,
)
from tests.fixtures.roles import SOURCE_ROLE
from tests.fixtures.route import Route
from tests.fixtures.two_phase import decide, n_prepared, stream_early, write_prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

_SOURCE_REFUSED = 3
_WORKERS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'parapply worker%'"


def _put(data: Path, at: Path) -> None:
    """Copy the data directory of a server that does not run, slots and all, over another."""
    subprocess.run(["rm", "-rf", str(at)], check=True)
    subprocess.run(["cp", "-a", str(data), str(at)], check=True)


def _keep(server: PgServer) -> Path:
    """Return a copy of a server's files as they are now; it runs before and afterwards."""
    older = server.directory / "older"
    server.stop()
    _put(server.data_dir, older)
    server.start()
    return older


def _put_back(server: PgServer, older: Path) -> None:
    """Crash a server, and start it with older files of its own."""
    server.kill()
    _put(older, server.data_dir)
    server.start()


def _standby_of(primary: PgServer, standby: PgServer) -> None:
    """Make a server the streaming standby of a stopped one, which runs afterwards."""
    standby.stop()
    _put(primary.data_dir, standby.data_dir)
    primary.start()
    standby.configure({"primary_conninfo": primary.dsn(application_name="standby")})
    signal_file = standby.data_dir / "standby.signal"
    signal_file.touch()
    signal_file.chmod(0o666)
    standby.start()


def _check_refused(daemon: Daemon, *words: str) -> None:
    assert daemon.exit_code(60) == _SOURCE_REFUSED, daemon.log_tail()
    last = daemon.failure
    assert [word for word in words if word not in last] == [], last


def _count(database: Database) -> int:
    return int(database.rows("SELECT count(*) FROM evt")[0][0])


@pytest.mark.pg_majors(15, 18)
def test_f14_relaxed_a_standby_that_lacks_what_passed_the_watermark_is_refused(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """The watermark is on the new primary's history, but transactions recorded above it are not: exit 3.

    Transactions that the new primary commits under their LSNs must not be taken for applied.
    """
    primary, standby = own_servers("primary"), own_servers("standby")
    plain = plain_route(create_database(primary, "source"), target_db, new_slot)
    primary.stop()
    _standby_of(primary, standby)
    hosts = make_conninfo(
        host="127.0.0.1,127.0.0.1", port=f"{primary.port},{standby.port}", dbname="source", user=SOURCE_ROLE,
        target_session_attrs="read-write",
    )  # fmt: skip
    route = Route(source=plain.source, target=target_db, slot=plain.slot, settings=plain.settings, source_dsn=hosts)
    settings: Mapping[str, str | float] = {
        "apply.commit_order": "relaxed",
        "apply.max_batch_transactions": 1,
        "apply.workers": 4,
    }
    daemon = start_daemon(route, settings=settings)
    commit_each(plain.source, 1, 1)
    daemon.wait_caught_up()
    with foreign_transaction(target_db, "SELECT FROM item WHERE id = 1 FOR UPDATE") as holder:
        plain.source.execute("UPDATE item SET v = 0 WHERE id = 1")
        target_db.wait_until(f"SELECT EXISTS (SELECT {_WORKERS} AND wait_event_type = 'Lock')")
        end_lsn = plain.source.rows("SELECT pg_current_wal_flush_lsn()")[0][0]
        plain.source.wait_until(
            f"SELECT replay_lsn >= '{end_lsn}' FROM pg_stat_replication WHERE application_name = 'standby'"
        )
        standby.stop()
        commit_each(plain.source, 2, 20)
        target_db.wait_until("SELECT count(*) = 20 FROM evt")
        daemon.kill()
        primary.kill()
        # The COMMIT of the held transaction is on its way with its statement: the lock must not go first.
        holder.execute(f"SELECT pg_terminate_backend(pid) {_WORKERS}".encode())
        target_db.wait_until(f"SELECT NOT EXISTS (SELECT {_WORKERS})")
    standby.start()
    standby.execute("SELECT pg_promote(true, 60)")
    standby.execute("INSERT INTO evt SELECT -n FROM generate_series(1, 20) AS n", dbname="source")
    assert target_db.rows("SELECT v FROM item WHERE id = 1") == [(1,)]
    _check_refused(start_daemon(route, settings=settings), "now on timeline 2, left it at", "the publisher lost")
    assert (_count(target_db), target_db.rows("SELECT v FROM item WHERE id = 1")) == (20, [(1,)])


@pytest.mark.pg_majors(15, 18)
def test_f14_a_slot_put_where_the_target_is_proves_nothing(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """A slot made again on a promoted standby that lacked transactions, and moved past others of its own: exit 3."""
    primary, standby = own_servers("primary"), own_servers("standby")
    plain = plain_route(create_database(primary, "source"), target_db, new_slot)
    primary.stop()
    _standby_of(primary, standby)
    hosts = make_conninfo(
        host="127.0.0.1,127.0.0.1", port=f"{primary.port},{standby.port}", dbname="source", user=SOURCE_ROLE,
        target_session_attrs="read-write",
    )  # fmt: skip
    route = Route(source=plain.source, target=target_db, slot=plain.slot, settings=plain.settings, source_dsn=hosts)
    daemon = start_daemon(route)
    commit_each(plain.source, 1, 1)
    daemon.wait_caught_up()
    standby.stop()
    commit_each(plain.source, 2, 20)
    daemon.finish()
    low_lsn = format_lsn(watermark(route))
    primary.kill()
    standby.start()
    standby.execute("SELECT pg_promote(true, 60)")
    standby.execute(f"SELECT pg_drop_replication_slot('{route.slot}')", dbname="source")
    standby.execute(f"SELECT pg_create_logical_replication_slot('{route.slot}', 'pgoutput')", dbname="source")
    standby.execute("INSERT INTO evt SELECT -n FROM generate_series(1, 1000) AS n", dbname="source")
    standby.execute(f"SELECT pg_replication_slot_advance('{route.slot}', '{low_lsn}')", dbname="source")
    _check_refused(start_daemon(route), "now on timeline 2, left it at", "the publisher lost")
    assert _count(target_db) == 20


@pytest.mark.parametrize("outcome", ["lost", "kept", "continued"])
def test_f14_a_table_copied_as_of_what_a_standby_lacks(  # noqa: PLR0917  fixtures
    own_servers: OwnServers,
    target_db: Database,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
    run_command: RunCommand,
    outcome: str,
) -> None:
    """A promoted standby that lacks it is refused; one from which the table was copied after the promotion is not.

    Neither is one on which a copy goes on that was begun on the primary, and that it has.
    """
    is_lost, is_continued = outcome == "lost", outcome == "continued"
    primary, standby = own_servers("primary"), own_servers("standby")
    plain = plain_route(create_database(primary, "source"), target_db, (lambda _: None) if is_continued else init_route)
    hosts = make_conninfo(
        host="127.0.0.1,127.0.0.1", port=f"{primary.port},{standby.port}", dbname="source", user=SOURCE_ROLE,
        target_session_attrs="read-write",
    )  # fmt: skip
    route = Route(source=plain.source, target=target_db, slot=plain.slot, settings=plain.settings, source_dsn=hosts)
    copy = ("init", "--copy") if is_continued else ("refresh", "--table", "public.evt", "--truncate")
    if is_continued:
        begun = run_command(route, *copy, environ={"PARAPPLY_FAILPOINT": "copy_begun:kill"})
        assert begun.returncode == -signal.SIGKILL, begun.stderr
    primary.stop()
    _standby_of(primary, standby)
    end_lsn = plain.source.rows("SELECT pg_current_wal_flush_lsn()")[0][0]
    plain.source.wait_until(f"SELECT replay_lsn >= '{end_lsn}' FROM pg_stat_replication")
    standby.stop()
    if is_lost:
        commit_each(plain.source, 1, 300)
        run_command(route, *copy, code=0)
        assert _count(target_db) == 300
    primary.kill()
    standby.start()
    standby.execute("SELECT pg_promote(true, 60)")
    standby.execute("INSERT INTO evt VALUES (-1)", dbname="source")
    done = run_command(route, *copy)
    assert done.returncode == (_SOURCE_REFUSED if is_lost else 0), done.stderr
    daemon = start_daemon(route)
    if is_lost:
        _check_refused(daemon, "now on timeline 2, left it at", "the publisher lost")
    else:
        standby.execute("INSERT INTO evt VALUES (-2)", dbname="source")
        target_db.wait_until("SELECT count(*) = 2 FROM evt")


def test_f14_a_publisher_put_back_is_refused_where_keep_alives_alone_have_moved_the_watermark(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """Nothing was applied, so no record says what the publisher had; what it writes after the copy is not left out."""
    server = own_servers("publisher")
    route = plain_route(create_database(server, "source"), target_db, new_slot)
    older = _keep(server)
    route.source.execute("CREATE TABLE apart (v int); INSERT INTO apart SELECT generate_series(1, 1000)")
    end_lsn = route.source.rows("SELECT pg_current_wal_lsn()")[0][0]
    assert start_daemon(route, "--until", end_lsn).exit_code(60) == 0
    _put_back(server, older)
    commit_each(route.source, 1, 2000)
    assert route.source.rows(f"SELECT pg_current_wal_lsn() > '{end_lsn}'") == [(True,)]
    _check_refused(start_daemon(route), "sends another transaction that ends at", "put back to an older state")


def test_f14_a_capture_does_not_go_on_where_the_publisher_was_put_back(own_servers: OwnServers, tmp_path: Path) -> None:
    """Its files would lack what was committed since; after a mere crash, which the slot forgets as much in, it does."""
    server = own_servers("publisher")
    source = create_database(server, "source")
    source.execute("CREATE TABLE item (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES")
    stream_early(source)
    capture = Capture(source, tmp_path / "day")
    capture.go_on()
    older = _keep(server)
    source.execute("INSERT INTO item VALUES (1)")
    write_prepared(source, "gid", "INSERT INTO item VALUES (2)")
    with source.session("begin") as connection, connection.transaction():
        # Streamed, and so its end is sent although nothing of it is left.
        connection.execute("SAVEPOINT s; INSERT INTO item SELECT generate_series(10, 5000); ROLLBACK TO s")
    capture.go_on()
    server.kill()
    server.start()
    decide(source, "gid", "COMMIT")
    source.execute("INSERT INTO item VALUES (3)")
    capture.go_on()
    _put_back(server, older)
    source.execute("INSERT INTO item SELECT generate_series(100, 5000)")
    refused = capture.run()
    assert refused.returncode == 2, refused.stderr
    assert "cannot go on, and is whole up to" in refused.stderr
    assert "put back to an older state" in refused.stderr


def test_f14_a_publisher_put_back_that_has_written_since_is_healed(
    own_servers: OwnServers,
    target_db: Database,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
    run_command: RunCommand,
) -> None:
    """Rows that only the target has go, as with any heal; the dry run names the table and does nothing."""
    server = own_servers("publisher")
    route = plain_route(create_database(server, "source"), target_db, new_slot)
    older = _keep(server)
    daemon = start_daemon(route)
    commit_each(route.source, 1, 20)
    daemon.wait_caught_up()
    daemon.kill()
    _put_back(server, older)
    commit_each(route.source, 101, 400)
    _check_refused(start_daemon(route), "sends no transaction, or another one", "put back to an older state", "heal")
    dry = run_command(route, "heal", "--dry-run")
    assert (dry.returncode, "public.evt" in dry.stdout) == (1, True), dry
    assert _count(target_db) == 20
    # A copy that was interrupted, of a table that the older publisher does not have.
    target_db.execute(
        "INSERT INTO parapply.copies (slot_id, schema_name, table_name, source_oid, state, start_lsn)"
        " SELECT slot_id, 'public', 'later', 1, 'copying', 'F/0' FROM parapply.slots"
    )
    run_command(route, "heal", code=0)
    check_equal(route)
    daemon = start_daemon(route)
    commit_each(route.source, 501, 510)
    daemon.wait_caught_up()
    check_equal(route)


def test_f14_a_publisher_put_back_is_refused_where_the_watermark_is_inside_a_commit_record(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """Its transaction ends after the watermark, and yet a stream from there leaves it out: the record begins before."""
    server = own_servers("publisher")
    route = plain_route(create_database(server, "source"), target_db, new_slot)
    begin_lsn = route.source.rows("SELECT pg_current_wal_lsn()")[0][0]
    assert start_daemon(route, "--until", begin_lsn).exit_code(60) == 0
    commit_each(route.source, 1, 1)
    ((data,),) = route.source.rows(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{route.slot}', NULL, NULL, 'proto_version', '1',"
        f" 'publication_names', '{route.publication}') WHERE get_byte(data, 0) = 67"
    )
    end = decode(bytes(data))
    assert isinstance(end, Commit)
    inside = format_lsn(end.commit_lsn + 8)
    target_db.execute(f"UPDATE parapply.slots SET lowest_lsn = '{inside}', highest_lsn = '{inside}'")
    server.kill()
    server.start()
    _check_refused(start_daemon(route), "sends another transaction that ends at", "put back to an older state")


def test_f14_a_publisher_put_back_is_refused_where_the_watermark_is_inside_a_rollbacks_record(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """Of ROLLBACK PREPARED only the end is sent. Left out, what it rolls back would stay prepared on the target."""
    server = own_servers("publisher")
    route = plain_route(create_database(server, "source"), target_db, new_slot, source__two_phase="true")
    write_prepared(route.source, "g", "INSERT INTO evt VALUES (1)")
    begin_lsn = route.source.rows("SELECT pg_current_wal_lsn()")[0][0]
    assert start_daemon(route, "--until", begin_lsn).exit_code(60) == 0
    assert n_prepared(target_db) == 1
    inside = format_lsn(lsn_of(route.source) + 8)
    decide(route.source, "g", "ROLLBACK")
    target_db.execute(f"UPDATE parapply.slots SET lowest_lsn = '{inside}', highest_lsn = '{inside}'")
    server.kill()
    server.start()
    _check_refused(start_daemon(route), "sends another transaction that ends at", "put back to an older state")


def test_f14_a_publisher_that_crashed_is_taken_again_with_thousands_of_records_above_the_watermark(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """Each is found, and so are those that another history lacks; what is above and not recorded does not count."""
    server = own_servers("publisher")
    route = plain_route(create_database(server, "source"), target_db, new_slot)
    settings: Mapping[str, str | float] = {"apply.commit_order": "relaxed", "apply.max_batch_transactions": 1}
    daemon = start_daemon(route, settings=settings)
    commit_each(route.source, 1, 1)
    daemon.wait_caught_up()
    with foreign_transaction(target_db, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
        route.source.execute("UPDATE item SET v = 0 WHERE id = 1")
        commit_each(route.source, 2, 1200)
        target_db.wait_until("SELECT count(*) = 1200 FROM evt")
        daemon.kill()
        server.kill()
        target_db.execute(f"SELECT pg_terminate_backend(pid) {_WORKERS}")
        target_db.wait_until(f"SELECT NOT EXISTS (SELECT {_WORKERS})")
    server.start()
    commit_each(route.source, 1201, 1300)
    daemon = start_daemon(route, settings=settings)
    daemon.wait_caught_up()
    check_equal(route)


def test_f14_a_publisher_put_back_with_its_memory_is_refused(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """A virtual machine's snapshot: the server says that it runs since the same time, and its slot is behind.

    That it has another transaction at the recorded place is what the record is made to say.
    """
    route = plain_route(create_database(own_servers("publisher"), "source"), target_db, new_slot)
    route.source.rows(f"SELECT pg_copy_logical_replication_slot('{route.slot}', 'older')")
    daemon = start_daemon(route)
    commit_each(route.source, 1, 20)
    daemon.wait_caught_up()
    target_db.wait_until("SELECT confirmed_flush_lsn > begin_lsn FROM parapply.slots")
    daemon.pause()
    drop_slot(route)
    route.source.rows(f"SELECT pg_copy_logical_replication_slot('older', '{route.slot}')")
    target_db.execute("UPDATE parapply.applied SET commit_time = commit_time - interval '1 second'")
    daemon.send(signal.SIGCONT)
    _check_refused(daemon, "sends no transaction, or another one, that ends at", "put back to an older state")


def test_f14_a_publisher_put_back_to_before_the_copy_of_a_table_is_refused(
    own_servers: OwnServers,
    target_db: Database,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
    run_command: RunCommand,
) -> None:
    """Nothing of the stream is applied that it lacks, but a table was copied later, and its changes count from there.

    So it is while the daemon is behind, or when `refresh` reads what a standby does not have yet.
    """
    server = own_servers("publisher")
    route = plain_route(create_database(server, "source"), target_db, init_route)
    daemon = start_daemon(route)
    commit_each(route.source, 1, 20)
    daemon.finish()
    older = _keep(server)
    commit_each(route.source, 21, 300)
    done = run_command(route, "refresh", "--table", "public.evt", "--truncate")
    assert (done.returncode, _count(target_db)) == (0, 300), done.stderr
    _put_back(server, older)
    route.source.execute("INSERT INTO evt VALUES (1000)")
    _check_refused(start_daemon(route), "the publisher's WAL ends at", "put back to an older state")


def _pass_a_gigabyte(database: Database) -> None:
    """Let more than a gigabyte of WAL pass that holds nothing."""
    for _ in range(66):
        database.execute("SELECT pg_logical_emit_message(false, 'tests', ''), pg_switch_wal()")


def test_f14_a_slot_more_than_a_gigabyte_behind_does_not_hide_an_older_copy(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """A publisher that only crashed is taken again; without an old transaction's end its slot is as far behind."""
    server = own_servers("publisher", settings={"wal_init_zero": "off", "max_wal_size": "8GB"})
    route = plain_route(create_database(server, "source"), target_db, new_slot)
    older = _keep(server)
    daemon = start_daemon(route)
    with foreign_transaction(route.source, "SELECT pg_current_xact_id()"):
        commit_each(route.source, 1, 20)
        _pass_a_gigabyte(route.source)
        commit_each(route.source, 21, 40)
        daemon.wait_caught_up()
        daemon.kill()
    server.kill()
    server.start()
    ((behind,),) = route.source.rows("SELECT pg_current_wal_lsn() - confirmed_flush_lsn FROM pg_replication_slots")
    assert behind > 1 << 30
    daemon = start_daemon(route)
    commit_each(route.source, 41, 50)
    daemon.wait_caught_up()
    daemon.kill()
    assert daemon.events_of("history_unproved") == []
    _put_back(server, older)
    _pass_a_gigabyte(route.source)
    commit_each(route.source, 1, 10)
    _pass_a_gigabyte(route.source)
    _check_refused(start_daemon(route), "sends no transaction, or another one, that ends at")


def test_f14_a_publisher_put_back_to_an_older_copy_is_refused(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """The same cluster on the same timeline, as it was before: exit 3 from a running daemon and at a start.

    In both orders. Brought back to what it was last, it is taken again.
    """
    server = own_servers("publisher")
    route = plain_route(create_database(server, "source"), target_db, new_slot)
    older, newer = server.directory / "older", server.directory / "newer"
    server.stop()
    _put(server.data_dir, older)
    server.start()
    daemon = start_daemon(route)
    commit_each(route.source, 1, 20)
    daemon.wait_caught_up()
    server.kill()
    _put(server.data_dir, newer)
    _put(older, server.data_dir)
    server.start()
    route.source.execute("INSERT INTO evt VALUES (1000)")
    _check_refused(daemon, "the publisher's WAL ends at", "put back to an older state")
    ((shown, reason),) = target_db.rows("SELECT state, reason FROM parapply.progress")
    assert (shown, "put back to an older state" in reason) == ("lost", True)
    _check_refused(start_daemon(route, settings={"apply.commit_order": "relaxed"}), "the publisher's WAL ends at")
    assert _count(target_db) == 20
    server.stop()
    _put(newer, server.data_dir)
    server.start()
    daemon = start_daemon(route)
    commit_each(route.source, 21, 30)
    daemon.wait_caught_up()
    check_equal(route)
    server.stop()
    target_db.wait_until("SELECT state = 'reconnecting' FROM parapply.progress")
    daemon.stop()
    assert target_db.rows("SELECT state FROM parapply.progress") == [("stopped",)]
