"""A target that is late on purpose, and a run that ends at a time: which transactions it has, by commit time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.wire.decode import decode
from parapply.wire.messages import BeginPrepare, Commit
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import commit_each, plain_route
from tests.fixtures.route import Route
from tests.fixtures.two_phase import TWO_PHASE, decide, n_prepared, write_prepared

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase, OwnServers

_WRONG_CONFIGURATION = 2
_DELAY_S = 0.7
#: Commit times of what the publisher itself got by replication: they need not rise.
_TIMES = {1: "10:00", 2: "12:00", 3: "11:00", 4: "13:00"}


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Plain tables and a slot."""
    return plain_route(source_db, target_db, new_slot)


def _ids(database: Database) -> list[int]:
    return [number for (number,) in database.rows("SELECT id FROM item ORDER BY id")]


def _commit_at_times(source: Database) -> None:
    """Commit an item for each of `_TIMES`, with its time."""
    with source.connect() as connection:
        connection.execute("SELECT pg_replication_origin_create(current_database())")
        connection.execute("SELECT pg_replication_origin_session_setup(current_database())")
        for number, time in _TIMES.items():
            with connection.transaction():
                connection.execute(f"INSERT INTO item VALUES ({number}, 0)".encode())
                connection.execute(
                    f"SELECT pg_replication_origin_xact_setup('0/{number:X}', '2026-01-02 {time}+00')".encode()
                )
        connection.execute("SELECT pg_replication_origin_session_reset()")
    source.execute("SELECT pg_replication_origin_drop(current_database())")


def test_each_transaction_waits_for_its_time(route: Route, start_daemon: StartDaemon) -> None:
    """With apply.delay_s none is visible on the target before that number of seconds after its commit on the publisher.

    That is said where people look.
    """
    route.target.execute("ALTER TABLE item ADD at timestamptz DEFAULT clock_timestamp()")
    daemon = start_daemon(route, settings={"apply.delay_s": _DELAY_S})
    for number in range(1, 4):
        commit_each(route.source, number, number)
    daemon.wait_caught_up()
    route.target.wait_until(f"SELECT reason = 'late on purpose: apply.delay_s = {_DELAY_S}' FROM parapply.progress")
    daemon.stop()
    applied = dict(route.target.rows("SELECT id, at FROM item"))
    committed = dict(route.source.rows("SELECT id, pg_xact_commit_timestamp(xmin) FROM item"))
    assert applied.keys() == {1, 2, 3}
    assert all((applied[number] - committed[number]).total_seconds() >= _DELAY_S for number in committed)


def test_what_is_held_back_stays_with_the_publisher(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """A transaction that is not due is not on the target, whatever its size, and comes once the delay is removed.

    A snapshot of the present rows needs no waiting; one that needs changes still to come is refused. A daemon that was
    away shows at once how old the change may be.
    """
    commit_each(route.source, 1, 2)
    start_daemon(route, "--until", route.end_of_source_lsn()).exit_code()
    # Far more than is read at once; and one in progress that would be followed without a delay.
    commit_each(route.source, 3, 5000)
    route.source.execute("INSERT INTO evt SELECT generate_series(10001, 60000)")
    daemon = start_daemon(route, settings={"apply.delay_s": 3600, "source.decoding_memory_bytes": 65536})
    route.target.wait_until("SELECT reason LIKE 'late on purpose%' AND lag_bytes > 0 FROM parapply.progress")
    run_command(route, "snapshot", "--", "true", code=0)
    refused = run_command(route, "verify")
    assert "apply.delay_s = 0" in refused.stderr
    daemon.stop()
    assert _ids(route.target) == [1, 2]
    route.target.execute("UPDATE parapply.slots SET updated_at = updated_at - interval '1 hour'")
    daemon = start_daemon(route, settings={"apply.delay_s": 3600, **LISTEN})
    endpoint = Endpoint(daemon)
    endpoint.wait_until(lambda: "parapply_lag_seconds" in endpoint.samples())
    assert endpoint.samples()["parapply_lag_seconds"][()] > 3600
    daemon.stop()
    assert route.target.rows("SELECT lag_s > 3600 FROM parapply.slots") == [(True,)]
    assert start_daemon(route, "--until", route.end_of_source_lsn()).exit_code() == 0
    assert route.target.rows("SELECT count(*) FROM evt") == [(55000,)]


def test_until_a_time(route: Route, start_daemon: StartDaemon) -> None:
    """`run --until TIME` ends before the first transaction in commit order that is later, whatever follows it.

    The next run continues from there; a time before the last applied one is refused, because nothing can be taken back.
    """
    _commit_at_times(route.source)
    for time, wanted in (("09:59", []), ("11:30", [1]), ("12:00", [1, 2, 3])):
        daemon = start_daemon(route, "--until", f"2026-01-02 {time}:00+00")
        assert daemon.exit_code() == 0, daemon.log_tail()
        assert _ids(route.target) == wanted
    daemon = start_daemon(route, "--until", "2026-01-02T10:30:00Z")
    assert daemon.exit_code() == _WRONG_CONFIGURATION
    assert "the target has applied a transaction already" in daemon.log_tail()
    # Nothing later has come, and so the publisher's clock says that the time is over.
    ((now,),) = route.source.rows("SELECT clock_timestamp()::text")
    assert start_daemon(route, "--until", now).exit_code() == 0
    assert _ids(route.target) == list(_TIMES)


def test_a_time_without_an_offset_is_refused(route: Route, start_daemon: StartDaemon) -> None:
    """The same words would be another moment on another machine."""
    daemon = start_daemon(route, "--until", "2026-01-02 11:30")
    assert daemon.exit_code() == _WRONG_CONFIGURATION
    assert "has no offset from UTC" in daemon.log_tail()


def _times(route: Route) -> list[int]:
    """Return the times of commits and PREPAREs as a slot's reader gets them."""
    sent = route.source.rows(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{route.slot}', NULL, NULL,"
        " 'proto_version', '3', 'publication_names', 'pub')"
    )
    messages = [decode(bytes(data)) for (data,) in sent]
    commits = [message.commit_time_us for message in messages if isinstance(message, Commit)]
    return commits + [message.prepare_time_us for message in messages if isinstance(message, BeginPrepare)]


def test_readers_of_the_target_get_the_times_of_the_publisher(
    own_servers: OwnServers, source_db: Database, new_database: NewDatabase, start_daemon: StartDaemon
) -> None:
    """A session with an origin logs the time that it had last, so each transaction sets it, tracked here or not."""
    server = own_servers(settings={"track_commit_timestamp": "off", "wal_level": "logical"})
    route = plain_route(source_db, new_database(server, "target"), lambda route: make_slot(route, is_two_phase=True))
    route.target.execute("CREATE PUBLICATION pub FOR TABLE item, evt")
    before, behind = Route(source=route.source, target=route.target), Route(source=route.target, target=route.source)
    for watched in (before, behind):
        make_slot(watched, is_two_phase=True)
    _commit_at_times(route.source)
    settings = {**TWO_PHASE, "apply.workers": 1, "apply.max_batch_transactions": 1}
    daemon = start_daemon(route, settings=settings)
    daemon.wait_caught_up()
    write_prepared(route.source, "late", "INSERT INTO item VALUES (9, 0)")
    daemon.wait_caught_up()
    assert n_prepared(route.target) == 1
    assert _times(behind) == _times(before)
    decide(route.source, "late", "COMMIT")
    daemon.stop()


def test_readers_of_the_target_get_true_times_of_commands(
    own_servers: OwnServers, source_db: Database, new_database: NewDatabase, start_daemon: StartDaemon,
    run_command: RunCommand,
) -> None:  # fmt: skip
    """A copy has the time of its snapshot, and a replay the present."""
    server = own_servers(settings={"track_commit_timestamp": "off", "wal_level": "logical"})
    route = plain_route(source_db, new_database(server, "target"), make_slot)
    route.target.execute("CREATE PUBLICATION pub FOR TABLE item, evt; INSERT INTO item VALUES (1, 5)")
    behind = Route(source=route.target, target=route.source)
    make_slot(behind)
    daemon = start_daemon(route, settings={"conflict.insert_exists": "keep_local"})
    ((now_us,),) = route.source.rows("SELECT (extract(epoch FROM now() - '2000-01-01 00:00+00') * 1e6)::int8")
    route.source.execute("INSERT INTO item VALUES (1, 6)")
    daemon.wait_caught_up()
    replay = "conflicts replay --yes --type insert_exists"
    # Only the first one has just made its origin, which sets a time.
    for command in (replay, replay, "refresh --table public.item --truncate"):
        run_command(route, command, code=0)
        times = _times(behind)
        assert times
        assert min(times) > now_us
    daemon.stop()
