"""Waits that PostgreSQL cannot see: the commit order among our sessions, with a foreign session's in between (T-30)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from parapply.model import format_lsn, parse_lsn
from parapply.wire.decode import decode
from parapply.wire.messages import Commit
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.plain import WORKER_IS_BLOCKED, check_equal, foreign_transaction, plain_route, slot_route
from tests.fixtures.route import Route
from tests.fixtures.streams import LITTLE_MEMORY, stream_everything

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase

_STALL_TIMEOUT_S = 15
_ONE_WAITS_ITS_TURN = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%' AND state = 'idle in transaction')"
)


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Plain tables; each source transaction is a target transaction."""
    return plain_route(source_db, target_db, new_slot, apply__max_batch_transactions=1)


def test_t30_a_foreign_session_between_head_and_later_batch(route: Route, start_daemon: StartDaemon) -> None:
    """T-30: the head waits for a foreign session, which waits for a later batch, which waits for its turn.

    The later one yields, the foreign session gets its lock and ends, and everything is applied, in order.
    """
    route.source.execute("INSERT INTO item VALUES (1, 0), (2, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with (
        foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE") as foreign,
        ThreadPoolExecutor(1) as pool,
    ):
        for item in (1, 2):
            route.source.execute(f"UPDATE item SET v = 1 WHERE id = {item}")
        route.target.wait_until(WORKER_IS_BLOCKED)
        route.target.wait_until(_ONE_WAITS_ITS_TURN)
        # The server gives up in time, so that a stall fails the test instead of holding it.
        foreign.execute(f"SET LOCAL statement_timeout = '{_STALL_TIMEOUT_S}s'".encode())
        pool.submit(foreign.execute, b"SELECT FROM item WHERE id = 2 FOR UPDATE").result()
        daemon.wait_for_event("stall_broken")
    daemon.finish()
    check_equal(route)


def test_t30_two_slots_that_take_rows_in_opposite_order(
    source_db: Database, target_db: Database, new_database: NewDatabase, new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
) -> None:  # fmt: skip
    """T-30: each slot's head waits for a row of the other's later batch, which waits for its turn: one of them yields.

    Neither server nor daemon sees a circle: the turn of the other slot is seen in its workers' names only.
    """
    tables = "CREATE TABLE gate (id int PRIMARY KEY, v int); CREATE TABLE item (id int PRIMARY KEY, v int);"
    rows = "INSERT INTO gate VALUES (1, 0), (2, 0); INSERT INTO item VALUES (1, 0), (2, 0)"
    sources = source_db, new_database(source_db.server)
    routes, daemons = [], []
    for database in (target_db, *sources):
        database.execute(tables + rows)
    for source in sources:
        source.execute("CREATE PUBLICATION pub FOR TABLE gate, item")
        routes.append(slot_route(source, target_db, new_slot, apply__max_batch_transactions=1, apply__workers=2))
        daemons.append(start_daemon(routes[-1]))
        daemons[-1].wait_for_event("source_connected")
    with foreign_transaction(target_db, "SELECT FROM gate FOR UPDATE"):
        for n, source in enumerate(sources, start=1):
            source.execute(f"BEGIN; UPDATE gate SET v = 1 WHERE id = {n}; UPDATE item SET v = {n} WHERE id = {n}; END")
            source.execute(f"UPDATE item SET v = {n} WHERE id = {3 - n}")
        for state in ("wait_event_type = 'Lock'", "state = 'idle in transaction'"):
            target_db.wait_until(
                "SELECT count(*) = 2 FROM pg_stat_activity WHERE datname = current_database()"
                f" AND application_name LIKE 'parapply worker%' AND {state}"
            )
    for daemon, route in zip(daemons, routes, strict=True):
        route.wait_caught_up(check=daemon.check_running)
    assert daemons[0].events_of("stall_broken") + daemons[1].events_of("stall_broken")
    for daemon in daemons:
        daemon.stop()


def test_who_holds_a_batch_up_is_told(route: Route, start_daemon: StartDaemon) -> None:
    """A batch that waits for a foreign session is in the log with the facts, and in the state's reason."""
    route.source.execute("INSERT INTO item VALUES (1, 0)")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 1 FOR UPDATE") as foreign:
        route.source.execute("UPDATE item SET v = 1 WHERE id = 1")
        told = daemon.wait_for_event("batch_blocked")
        pid = foreign.info.backend_pid
        assert (told["pid"], told["application_name"], told["relation"], told["mode"]) == (
            pid, "foreign", "public.item", "ShareLock",
        )  # fmt: skip
        assert told["wait_s"] >= 5
        assert told["level"] == "warning"
        words = rf"SELECT reason ~ 'blocked for \d+ s by a lock held by pid {pid}' FROM parapply.progress"
        route.target.wait_until(words)
    assert daemon.wait_for_event("batch_unblocked")["wait_s"] >= 5
    daemon.finish()
    check_equal(route)


def test_t70_a_blocked_transaction_is_skipped(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """`skip` of a transaction that waits for a foreign session works while it waits, and its neighbours are applied.

    Merged with them, it was executed in one flight with its COMMIT.
    """
    route.source.execute("INSERT INTO item VALUES (1, 0), (2, 0), (3, 0)")
    daemon = start_daemon(route)
    daemon.finish()
    for item in (1, 2, 3):
        route.source.execute(f"UPDATE item SET v = 1 WHERE id = {item}")
    ends = ends_of(route)
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 2 FOR UPDATE"):
        daemon = start_daemon(route, settings={"apply.max_batch_transactions": 100})
        route.target.wait_until(WORKER_IS_BLOCKED)
        asked = run_command(route, "skip", "--lsn", format_lsn(ends[-2]), "--wait", "30")
        assert (asked.returncode, asked.stdout.partition(":")[0]) == (0, "skipped"), asked
        assert len(daemon.events_of("batch_cancelled")) == 1
        daemon.wait_caught_up()
        assert route.target.rows("SELECT id, v FROM item ORDER BY id") == [(1, 1), (2, 0), (3, 1)]
    assert route.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)]
    kept = "SELECT conflict_type, operation, remote_row->>'id' FROM parapply.conflicts"
    assert route.target.rows(kept) == [("skipped", "update", "2")]
    daemon.stop()


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ["large", "kept", "followed"])
def test_t70_a_blocked_large_transaction_is_skipped(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand, way: str
) -> None:
    """The same with one of many pieces, which waits in its midst: not streamed, applied at its commit, or followed.

    Of one that is not streamed the end is not known before it has come whole. A request to skip a later one costs it a
    repetition, once.
    """
    stream_everything(route.source)
    for database in (route.source, route.target):
        database.execute("CREATE TABLE wide (n int PRIMARY KEY, v text)")
    route.source.execute("ALTER PUBLICATION pub ADD TABLE wide")
    route.source.execute("INSERT INTO item VALUES (2, 0), (0, 0)")
    daemon = start_daemon(route)
    daemon.finish()
    route.source.execute("UPDATE item SET v = 1 WHERE id = 0")
    route.source.execute(
        "BEGIN; UPDATE item SET v = 1 WHERE id = 2;"
        " INSERT INTO wide SELECT n, repeat('x', 20000) FROM generate_series(1, 1200) AS n; COMMIT"
    )
    route.source.execute("INSERT INTO item VALUES (3, 0)")
    route.source.execute("INSERT INTO item VALUES (4, 0)")
    ends = ends_of(route)
    settings: dict[str, str | float] = {**LITTLE_MEMORY, "source.streaming": "off" if way == "large" else "on"}
    settings["apply.stream_start_bytes"] = 0 if way == "followed" else 1 << 30
    with foreign_transaction(route.target, "SELECT FROM item WHERE id = 2 FOR UPDATE"):
        daemon = start_daemon(route, settings=settings)
        route.target.wait_until(WORKER_IS_BLOCKED)
        if way == "large":
            told = daemon.wait_for_event("batch_blocked")
            assert told["end_lsn"] is None
            assert ends[-4] <= parse_lsn(told["commit_lsn"]) < ends[-3]
        run_command(route, "skip", "--lsn", format_lsn(ends[-1]), "--wait", "0", code=0)
        if way == "large":
            daemon.wait_for_event("target_lost")
            route.target.wait_until(WORKER_IS_BLOCKED)
        asked = run_command(route, "skip", "--lsn", format_lsn(ends[-3]), "--wait", "60")
        assert (asked.returncode, asked.stdout.partition(":")[0]) == (0, "skipped"), asked
        daemon.wait_caught_up()
    assert route.target.rows("SELECT id, v FROM item ORDER BY id") == [(0, 1), (2, 0), (3, 0)]
    assert route.target.rows("SELECT count(*) FROM wide") == [(0,)]
    assert route.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)] * 2
    kept = "SELECT count(*), count(DISTINCT change_no) FROM parapply.conflicts WHERE remote_lsn = '{}'"
    assert route.target.rows(kept.format(format_lsn(ends[-3]))) == [(1201, 1201)]
    assert len(daemon.events_of("batch_cancelled")) == (2 if way == "large" else 1)
    daemon.stop()


def ends_of(route: Route) -> list[int]:
    """Return the end LSNs of the transactions that the slot still has to send."""
    sent = route.source.rows(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{route.slot}', NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub') WHERE get_byte(data, 0) = ascii('C')"
    )
    return [message.end_lsn for (data,) in sent if isinstance(message := decode(bytes(data)), Commit)]


def test_a_session_that_is_no_workers_and_is_blocked_is_told(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """Also where no batch waits: another session has locked the state, so nothing can be shown or confirmed."""
    daemon = start_daemon(route, settings=LISTEN)
    daemon.wait_caught_up()
    with foreign_transaction(route.target, "LOCK TABLE parapply.slots IN SHARE ROW EXCLUSIVE MODE") as foreign:
        told = daemon.wait_for_event("session_blocked")
        assert (told["pid"], told["application_name"], told["relation"]) == (
            foreign.info.backend_pid, "foreign", "parapply.slots",
        )  # fmt: skip
        assert told["wait_s"] >= 5
        assert str(told["session"]).endswith(route.slot)
        endpoint = Endpoint(daemon)
        endpoint.wait_until(lambda: endpoint.samples()["parapply_session_blocked_seconds"]["target",] >= 5)
        blocked = json.loads(run_command(route, "status", "--json").stdout)["blocked"]
        assert {one["pid"] for one in blocked} == {foreign.info.backend_pid}
    daemon.stop()


def test_locked_tables_do_not_hold_up_the_start(route: Route, start_daemon: StartDaemon) -> None:
    """A table that another session has locked on either end keeps a daemon that starts from no other table."""
    route.source.execute("INSERT INTO item VALUES (1, 0)")
    with (
        foreign_transaction(route.source, "TRUNCATE evt"),
        foreign_transaction(route.target, "LOCK TABLE evt IN ACCESS EXCLUSIVE MODE"),
    ):
        daemon = start_daemon(route)
        daemon.wait_caught_up()
    daemon.stop()
    check_equal(route, "item")


_LOCKED = "LOCK TABLE pg_publication IN ACCESS EXCLUSIVE MODE"


def test_what_waits_on_the_publisher_is_told(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """A session of the daemon's there that waits is in its log, its metrics and the status, with who holds it."""
    daemon = start_daemon(route)
    daemon.finish()
    with foreign_transaction(route.source, _LOCKED) as foreign:
        daemon = start_daemon(route, settings=LISTEN)
        told = daemon.wait_for_event("session_blocked")
        assert (told["end"], told["pid"], told["application_name"], told["relation"]) == (
            "source", foreign.info.backend_pid, "foreign", "pg_publication",
        )  # fmt: skip
        assert told["wait_s"] >= 5
        assert Endpoint(daemon).samples()["parapply_session_blocked_seconds"]["source",] >= 5
        shown = json.loads(run_command(route, "status", "--json").stdout)
        assert [one["pid"] for one in shown["source"]["blocked"]] == [foreign.info.backend_pid]
        words = f"source: {told['session']}: waits for AccessShareLock on pg_publication"
        text = " ".join(run_command(route, "status").stdout.split())
        assert words in text
        assert f"held by: pid {foreign.info.backend_pid} (" in text
    daemon.wait_caught_up()
    endpoint = Endpoint(daemon)
    endpoint.wait_until(
        lambda: endpoint.samples()["parapply_session_blocked_seconds"] == {("source",): 0, ("target",): 0}
    )
    daemon.stop()


def test_a_command_says_what_it_waits_for_on_the_publisher(route: Route, start_daemon: StartDaemon) -> None:
    """One line on standard error, while it waits."""
    with foreign_transaction(route.source, _LOCKED) as foreign:
        command = start_daemon(route, verb="refresh")
        line = command.wait_for_line("waits for AccessShareLock on pg_publication")
        assert f"held by: pid {foreign.info.backend_pid} (role" in line
    assert command.exit_code() == 4, command.log_tail()


@pytest.mark.parametrize("way", ["session", "prepared"])
def test_a_slot_that_waits_for_transactions_names_the_oldest(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, way: str
) -> None:
    """A new slot waits for every transaction that runs on its server: the one that keeps it longest is named."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE item (id int PRIMARY KEY, v int NOT NULL)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item")
    with ExitStack() as stack:
        oldest = stack.enter_context(foreign_transaction(source_db, "INSERT INTO item VALUES (1, 0)"))
        gid = f"oldest {oldest.info.backend_pid}"
        if way == "prepared":
            oldest.execute(f"PREPARE TRANSACTION '{gid}'".encode())
            stack.callback(source_db.execute, f"ROLLBACK PREPARED '{gid}'")
        stack.enter_context(foreign_transaction(source_db, "INSERT INTO item VALUES (2, 0)"))
        command = start_daemon(Route(source=source_db, target=target_db), verb="init")
        line = command.wait_for_line("waits for transactions that run on the publisher to end")
        who = f"prepared transaction {gid} (" if way == "prepared" else f"pid {oldest.info.backend_pid} (role"
        assert f"the oldest: {who}" in line
    assert command.exit_code() == 0, command.log_tail()
