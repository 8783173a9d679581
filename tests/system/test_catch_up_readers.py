"""A backlog that several sessions read at once: each transaction once and in order, whatever becomes of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.backlog import RANGES, TABLES, fill, fill_long, fill_more, reason_left, stop_equal
from tests.fixtures.databases import create_database
from tests.fixtures.fan import QUICK
from tests.fixtures.pair import Pair, pair
from tests.fixtures.streams import stream_everything

if TYPE_CHECKING:
    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

__all__ = ["pair"]

#: Less is read ahead than the transactions have, so that sessions wait for room.
_READERS: dict[str, str | float] = {
    **RANGES, "source.catch_up_readers": 4, "source.catch_up_range_bytes": 1 << 17, "apply.memory_limit_bytes": 1 << 24,
}  # fmt: skip
_MANY = 500


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("readers", [2, 4])
def test_several_sessions_read_one_backlog(pair: Pair, readers: int, pg_major: int) -> None:
    """By a role with LOGIN and REPLICATION, in either order; what is committed in the meantime also comes once."""
    order = "preserve" if (pg_major == 15) == (readers == 2) else "relaxed"
    pair.create(TABLES)
    fill(pair.source, 1, _MANY)
    daemon = pair.start(settings={**_READERS, "source.catch_up_readers": readers, "apply.commit_order": order})
    fill(pair.source, _MANY + 1, 100)
    left = daemon.wait_for_event("catch_up_left")
    assert left["reason"] == "caught up"
    assert 2 <= left["n_readers"] <= readers
    assert not daemon.events_of("catch_up_readers_reduced")
    pair.write("TRUNCATE b; INSERT INTO b VALUES (1, 10001, 2)")
    fill(pair.source, _MANY + 101, 20)
    stop_equal(pair, daemon)


@pytest.mark.crash
def test_killed_with_several_sessions_nothing_is_lost_or_doubled(pair: Pair, start_daemon: StartDaemon) -> None:
    """SIGKILL within ranges, between two, with the slot just moved, and with the first copy dropped and no stream."""
    pair.create(TABLES)
    fill_long(pair.source, 350)
    # As in `test_catch_up`: reading waits for the target, so that the slot is moved on the way.
    steps: dict[str, str | float] = {"apply.max_batch_transactions": 20, "target.synchronous_commit": "on"}
    settings = {**QUICK, **_READERS, **steps}
    for point in (
        "range_part:kill:5",
        "range_read:kill:4",
        "slot_moved:kill",
        "range_part:kill:12",
        "handed_over:kill",
    ):
        daemon = start_daemon(pair.route, settings=settings, environ={"PARAPPLY_FAILPOINT": point})
        assert daemon.exit_code(90) == -9, f"{point}: {daemon.log_tail()}"
        fill_long(pair.source, 20)
    stop_equal(pair, pair.start(settings=_READERS))


@pytest.mark.crash
def test_the_end_of_one_session_ends_all(pair: Pair) -> None:
    """Another one may have read beyond what is missing then: the next epoch begins at the watermark."""
    pair.create(TABLES)
    fill(pair.source, 1, _MANY)
    of_others = "slot_name LIKE 'parapply_catch_up_%' AND database = current_database()"
    with pair.target.connect() as lock:
        lock.execute("BEGIN; LOCK TABLE a")
        daemon = pair.start_only(settings=_READERS)
        pair.source.wait_until(f"SELECT count(*) = 4 FROM pg_replication_slots WHERE {of_others}")
        pair.source.execute(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE {of_others}"
            " ORDER BY active_pid DESC LIMIT 1"
        )
        lock.execute("COMMIT")
    daemon.wait_for_event("source_lost")
    fill_more(pair.source, 50)
    stop_equal(pair, daemon)


@pytest.mark.parametrize(
    ("limit", "says"),
    [({"max_replication_slots": 3}, "all replication slots are in use"), ({"max_wal_senders": 2}, "max_wal_senders")],
    ids=["slots", "senders"],
)
def test_fewer_sessions_than_wanted_are_no_error(
    own_servers: OwnServers, target_db: Database, start_daemon: StartDaemon, limit: dict[str, int], says: str
) -> None:
    """A line says how many read, and why; they read the backlog."""
    server = own_servers("publisher", settings={**limit})
    pair = Pair(create_database(server, "source"), target_db, start_daemon)
    pair.create(TABLES)
    fill(pair.source, 1, _MANY)
    daemon = pair.start(settings=_READERS)
    assert says in daemon.wait_for_event("catch_up_readers_reduced")["reason"]
    assert reason_left(daemon) == "caught up"
    stop_equal(pair, daemon)
    assert not daemon.events_of("source_lost")


@pytest.mark.pg_majors(15, 18)
def test_a_transaction_in_progress_stops_the_readers_behind_it(pair: Pair) -> None:
    """Their later ranges are forgotten, and come with the stream."""
    pair.create(TABLES)
    stream_everything(pair.source)
    fill(pair.source, 1, _MANY)
    with pair.source.connect() as open_one, pair.source.connect() as undone:
        for connection, first in ((open_one, 1_000_000), (undone, 2_000_000)):
            connection.execute("BEGIN")
            rows = f"SELECT g, 1, repeat('x', 100) FROM generate_series({first}, {first} + 3000) g"
            connection.execute(f"INSERT INTO a {rows}".encode())
        fill(pair.source, _MANY + 1, 200)
        daemon = pair.start(settings=_READERS)
        assert reason_left(daemon) == "a transaction in progress is too large for a range"
        open_one.execute("COMMIT")
        undone.execute("ROLLBACK")
    fill_more(pair.source, 20)
    stop_equal(pair, daemon)
