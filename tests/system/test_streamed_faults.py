"""Transactions in progress when something breaks: the daemon, the connection, the disk, another transaction's lock.

In every test a table without a key shows a row that was applied twice (O2).
"""

from __future__ import annotations

import json
import resource
import signal
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST, check_equal, foreign_transaction
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.streams import (
    FOLLOW,
    LITTLE_MEMORY,
    MANY_ROWS,
    fill,
    stream_everything,
    wait_followed,
    wait_none_follows,
    wait_received,
    wait_spilled,
    xid_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase

pytestmark = pytest.mark.crash

_TABLES = """
CREATE TABLE item (id int PRIMARY KEY, v text);
CREATE TABLE evt (id int, v text);
CREATE TABLE small (id serial PRIMARY KEY, v int);
"""
_ALL = ("item", "evt", "small")
#: No worker follows: only one exists, which the head needs.
_KEEP = {**FOLLOW, **LITTLE_MEMORY, "apply.workers": 1}


@pytest.fixture
def route(source_db: Database, target_db: Database) -> Route:
    """Tables on both sides, a publisher that streams, and a slot."""
    for database in (source_db, target_db):
        database.execute(_TABLES)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    stream_everything(source_db)
    made = Route(source=source_db, target=target_db, settings={**FAST, "source.status_interval_s": 0.1})
    make_slot(made)
    return made


def _is_there(route: Route, number: int) -> str:
    """Commit a small transaction and return the query that is true once it is visible on the target."""
    route.source.execute(f"INSERT INTO small VALUES ({number}, 0)")
    return f"SELECT EXISTS (SELECT FROM small WHERE id = {number})"


def _modes(directory: Path) -> list[str]:
    """Return how each target transaction was applied, in order; the daemon must have ended."""
    lines = [line for path in sorted(directory.iterdir()) for line in path.read_text(encoding="utf-8").splitlines()]
    return [str(record["mode"]) for record in map(json.loads, lines) if "mode" in record]


@pytest.mark.in_turn("point", "settings")
@pytest.mark.parametrize(
    ("point", "settings"),
    [(f"{failpoints.SPOOLED}:kill:9", FOLLOW), (f"{failpoints.STREAM_ENDED}:kill", _KEEP)],
    ids=["K10", "K11"],
)
def test_f35_killed_inside_a_stream(
    route: Route, start_daemon: StartDaemon, tmp_path: Path, point: str, settings: dict[str, str | float]
) -> None:
    """Killed while chunks come (K10) or when what was kept is to be applied (K11), the next one has it all once (F35).

    Nothing of the first one's files is left.
    """
    more = {**settings, "apply.spill_dir": str(tmp_path / "spill"), "applylog.directory": str(tmp_path / "log")}
    daemon = start_daemon(route, settings=more, environ={"PARAPPLY_FAILPOINT": point})
    daemon.wait_for_event("source_connected")
    with route.source.connect() as session:
        session.execute("BEGIN")
        session.execute(fill("item", 1, MANY_ROWS))
        session.execute("SAVEPOINT a")
        session.execute(fill("evt", 1))
        session.execute("ROLLBACK TO a")
        session.execute(fill("evt", 5001, MANY_ROWS))
        if settings is _KEEP:
            session.execute("COMMIT")
        assert daemon.exit_code(30) == -signal.SIGKILL, daemon.log_tail()
        assert list((tmp_path / "spill").iterdir()) == []
        daemon = start_daemon(route, settings=more)
        daemon.wait_for_event("source_connected")
        route.target.wait_until(_is_there(route, 1))
        if settings is not _KEEP:
            session.execute("COMMIT")
    daemon.finish()
    check_equal(route, *_ALL)
    assert set(_modes(tmp_path / "log")) == {"set", "spilled" if settings is _KEEP else "streamed"}


def test_t55_a_cut_connection_inside_streams(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """After a cut in the middle of three transactions all of each comes again, and is applied once (T-55).

    Two are followed and one is kept; a subtransaction of each is rolled back after the cut.
    """
    port = int(route.source.rows("SELECT inet_server_port()")[0][0])
    with CutProxy("127.0.0.1", port) as proxy:
        behind = Route(
            source=route.source, target=route.target, slot=route.slot, settings=route.settings,
            source_dsn=proxy.dsn(route.source.source_role_dsn),
        )  # fmt: skip
        more = {**FOLLOW, "apply.spill_dir": str(tmp_path), "apply.workers": 4}
        daemon = start_daemon(behind, settings=more)
        daemon.wait_for_event("source_connected")
        sessions = [route.source.connect() for _ in range(3)]
        for number, session in enumerate(sessions):
            session.execute("BEGIN")
            session.execute(fill("evt", number * 10_000))
            session.execute("SAVEPOINT a")
            session.execute(fill("item", number * 10_000))
            wait_received(route)
        wait_followed(route, "evt", "item")
        proxy.cut()
        daemon.wait_for_event("source_connected", count=2)
        for number, session in enumerate(sessions):
            session.execute("ROLLBACK TO a")
            session.execute(fill("item", number * 10_000 + 5000))
            route.target.wait_until(_is_there(route, number + 1))
        for session in reversed(sessions):
            session.execute("COMMIT")
            session.close()
            daemon.wait_caught_up()
        daemon.stop()
    check_equal(route, *_ALL)
    assert list(tmp_path.iterdir()) == []


def test_f21_a_full_disk_stops_that_transaction_only(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """No room for a followed transaction: small ones go on until it commits, and it is applied when there is (F21).

    The file size that the process may write stands for the disk: what does not fit is refused by the kernel. With
    room or without, the publisher sends it whole if all of it lies before what was applied since.
    """
    daemon = start_daemon(route, settings={**FOLLOW, "apply.spill_dir": str(tmp_path)})
    daemon.wait_for_event("source_connected")
    unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (200_000, unlimited[1]))
    with route.source.connect() as session:
        session.execute("BEGIN")
        xid = xid_of(session)
        session.execute(fill("evt", 1))
        failed = daemon.wait_for_event("spill_failed")
        assert failed["xid"] == xid
        assert "File too large" in failed["error"]
        assert "make room" in failed["hint"]
        assert daemon.wait_for_event("stream_spilled")["reason"] == "its changes could not be kept on disk"
        wait_none_follows(route)
        session.execute(fill("item", 1))
        route.target.wait_until(_is_there(route, 1))
        assert not daemon.events_of("source_lost")
        session.execute("COMMIT")
    assert "make room" in str(daemon.wait_for_event("source_lost")["error"])
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
    daemon.finish()
    check_equal(route, *_ALL)


def test_f21_the_limit_of_all_files(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Streams beyond apply.spill_limit_bytes are not kept; one that is rolled back, or fits later, has no effect."""
    more = {**_KEEP, "apply.spill_dir": str(tmp_path), "apply.spill_limit_bytes": 1 << 20}
    daemon = start_daemon(route, settings=more)
    daemon.wait_for_event("source_connected")
    with route.source.connect() as session:
        session.execute("BEGIN")
        session.execute(fill("evt", 1, MANY_ROWS))
        assert "apply.spill_limit_bytes = 1048576 is reached" in daemon.wait_for_event("spill_failed")["error"]
        session.execute("ROLLBACK")
        session.execute(fill("evt", 9001))
    daemon.finish()
    check_equal(route, *_ALL)
    assert not daemon.events_of("source_lost")


def test_f21_what_finds_no_room_comes_whole(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """A transaction that has no room is applied after its commit: streaming is off until then, and then on again."""
    more = {**FOLLOW, "apply.spill_dir": str(tmp_path), "apply.spill_limit_bytes": 1 << 20}
    daemon = start_daemon(route, settings=more)
    daemon.wait_for_event("source_connected")
    with route.source.connect() as session, foreign_transaction(route.target, "LOCK TABLE evt"):
        session.execute("BEGIN")
        session.execute(fill("evt", 1, MANY_ROWS))
        daemon.wait_for_event("spill_failed")
        session.execute("COMMIT")
        daemon.wait_for_event("streaming_paused")
        route.target.wait_until(
            "SELECT state = 'running' AND reason LIKE 'streaming is off until %' FROM parapply.progress"
        )
    daemon.wait_for_event("source_connected", count=3)
    n_followed = len(daemon.events_of("stream_followed"))
    with route.source.connect() as session:
        session.execute("BEGIN")
        session.execute(fill("item", 1))
        daemon.wait_for_event("stream_followed", count=n_followed + 1)
        session.execute("COMMIT")
    daemon.finish()
    check_equal(route, *_ALL)
    route.target.wait_until("SELECT reason = 'stopped by a signal' FROM parapply.progress")
    assert len(daemon.events_of("streaming_paused")) == 1


def test_two_daemons_share_a_directory(
    route: Route, new_database: NewDatabase, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Two slots keep the same transaction, of the same number, in one directory; one dies, the other does not care."""
    target = new_database(route.target.server, "target")
    target.execute(_TABLES)
    other = Route(source=route.source, target=target, settings=route.settings)
    make_slot(other)
    more = {**_KEEP, "apply.spill_dir": str(tmp_path)}
    daemons = [start_daemon(one, settings=more) for one in (route, other)]
    for daemon in daemons:
        daemon.wait_for_event("source_connected")
    with route.source.connect() as session:
        session.execute("BEGIN")
        session.execute(fill("evt", 1, MANY_ROWS))
        for one in (route, other):
            wait_received(one)
        daemons[0].kill()
        session.execute(fill("item", 1, MANY_ROWS))
        daemons[0] = start_daemon(route, settings=more)
        session.execute("COMMIT")
    for one, daemon in zip((route, other), daemons, strict=True):
        daemon.finish()
        check_equal(one, *_ALL)
    assert list(tmp_path.iterdir()) == []


def test_relaxed_nobody_waits_for_the_end_of_a_transaction_in_progress(route: Route, start_daemon: StartDaemon) -> None:
    """Relaxed, a transaction in progress gives its locks not only to the head: also to one behind a held up head."""
    route.source.execute("CREATE TABLE loose (id int, v text); INSERT INTO item VALUES (1, 'held')")
    route.target.execute("CREATE TABLE loose (id int PRIMARY KEY, v text)")
    daemon = start_daemon(route, settings={**FOLLOW, "apply.commit_order": "relaxed", "apply.workers": 4})
    daemon.wait_for_event("source_connected")
    daemon.wait_caught_up()
    with route.source.connect() as session:
        session.execute("BEGIN")
        xid = xid_of(session)
        session.execute("SAVEPOINT a")
        session.execute(fill("loose", 1))
        wait_followed(route, "loose")
        with foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
            route.source.execute("UPDATE item SET v = 'changed'")
            route.source.execute("INSERT INTO loose VALUES (1, 'other')")
            route.target.wait_until("SELECT EXISTS (SELECT FROM loose WHERE v = 'other')")
        session.execute("ROLLBACK TO a")
        session.execute(fill("loose", 5001))
        session.execute("COMMIT")
    daemon.finish()
    check_equal(route, *_ALL, "loose")
    assert wait_spilled(daemon, xid) == "it was in the way of an earlier transaction"
