"""Reasons not to go on: slot, publisher, target or password are not as they were (F7, F11 to F13, F17, F30)."""

from __future__ import annotations

import re
import secrets
import signal
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.databases import Database, create_database, drop_database
from tests.fixtures.pair import named
from tests.fixtures.plain import FAST, check_equal, commit_each, end_sessions, plain_route
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

_SOURCE_REFUSED = 3
_TARGET_REFUSED = 4
_PASSWORD = "secret-sesame"


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Plain tables and a slot."""
    return plain_route(source_db, target_db, new_slot)


def check_refused(daemon: Daemon, code: int, *words: str) -> None:
    """Wait for the end and check exit code and last line, which is of the log, without a traceback or a password.

    Raises:
        AssertionError: it ended differently.
    """
    assert daemon.exit_code() == code, daemon.log_tail()
    last = daemon.failure
    assert [word for word in words if word not in last] == [], last
    everything = "\n".join(daemon.lines)
    assert "Traceback" not in everything
    assert _PASSWORD not in everything


def _apply_and_stop(route: Route, start_daemon: StartDaemon, first: int = 1) -> None:
    daemon = start_daemon(route)
    commit_each(route.source, first, first + 9)
    daemon.finish()


def test_what_is_not_as_it_was_is_refused(
    route: Route, start_daemon: StartDaemon, new_slot: Callable[[Route], None]
) -> None:
    """State table, publisher and slot are, in turn, not as the daemon left them: each is refused by name.

    T-16, F7: a state table that a crash would empty is named, with what to do.
    F13: the source's DSN leads to another cluster with tables, publication and slot of the same names.
    F12: the slot goes while the daemon runs: it ends with exit 3 instead of trying for ever. Without its slot the next
    one refuses, and makes none. A slot of the same name that starts after transactions that no daemon read is refused,
    also the next time.
    """
    slot = f"slot_name = '{route.slot}'"
    _apply_and_stop(route, start_daemon)
    with named("T-16"):
        route.target.execute("ALTER TABLE parapply.applied SET UNLOGGED")
        check_refused(start_daemon(route), _TARGET_REFUSED, "applied is UNLOGGED", "SET LOGGED")
        route.target.execute("ALTER TABLE parapply.applied SET LOGGED")
    with named("F13"):
        route.target.execute("CREATE PUBLICATION pub FOR TABLE item, evt")
        new_slot(Route(source=route.target, target=route.target, slot=route.slot))
        wrong = Route(source=route.target, target=route.target, slot=route.slot, settings=route.settings)
        check_refused(start_daemon(wrong), _SOURCE_REFUSED, "system identifier", "correct source.dsn")
    daemon = start_daemon(route)
    commit_each(route.source, 11, 20)
    daemon.wait_caught_up()
    check_equal(route)
    with named("F12, the slot goes"):
        daemon.pause()
        route.source.execute(f"SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE {slot}")
        route.source.execute(f"SELECT pg_drop_replication_slot('{route.slot}')")
        daemon.send(signal.SIGCONT)
        told = f"slot '{route.slot}' is no longer on the publisher"
        check_refused(daemon, _SOURCE_REFUSED, told)
    with named("F12, the slot is gone"):
        route.target.execute("UPDATE parapply.slots SET reason = ''")
        check_refused(start_daemon(route), _SOURCE_REFUSED, told)
        # The view shows this end, and not the end of the daemon before.
        ((shown, reason),) = route.target.rows("SELECT state, reason FROM parapply.progress")
        assert shown == "lost"
        assert told in reason
        assert route.source.rows(f"SELECT count(*) FROM pg_replication_slots WHERE {slot}") == [(0,)]
    with named("F12, another slot of the name"):
        commit_each(route.source, 21, 120)
        new_slot(route)
        for _ in range(2):
            check_refused(
                start_daemon(route), _SOURCE_REFUSED, "the slot was dropped and made again", "transactions are missing"
            )
        assert route.target.rows("SELECT count(*) FROM item") == [(20,)]


@pytest.mark.parametrize(
    ("log_format", "last"),
    [
        ("json", r'{.*"event":"daemon_failed".*}'),
        ("logfmt", r"timestamp=\S+ level=error event=daemon_failed error=.* hint=.*"),
        ("console", r"parapply: state schema .* Hint: run the parapply that wrote it, or a newer one"),
    ],
)
def test_a_state_of_a_newer_version_is_left_alone(
    route: Route, start_daemon: StartDaemon, log_format: str, last: str
) -> None:
    """A daemon that does not know the layout writes nothing into it, not even why it ended: the log has that.

    A log for programs ends with its event, and no line of it or after it is for people only.
    """
    _apply_and_stop(route, start_daemon)
    route.target.execute("UPDATE parapply.schema_version SET version = 99")
    written = "SELECT xmin::text, * FROM parapply.slots"
    before = route.target.rows(written)
    daemon = start_daemon(route, settings={"log.format": log_format})
    assert daemon.exit_code() == _TARGET_REFUSED, daemon.log_tail()
    assert "has version 99" in daemon.lines[-1]
    assert re.fullmatch(last, daemon.lines[-1]), daemon.log_tail()
    assert [line for line in daemon.lines if line.startswith("parapply: ")] == daemon.lines[-1:] * (
        log_format == "console"
    )
    assert route.target.rows(written) == before


def test_f11_an_invalidated_slot_ends_the_daemon(
    own_servers: OwnServers, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """F11: the publisher removes WAL that a stopped daemon would need: exit 3 as it wakes up, and at every start."""
    server = own_servers("publisher", settings={"max_slot_wal_keep_size": "1MB"})
    source = create_database(server, "source")
    route = plain_route(source, target_db, new_slot)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    daemon.pause()
    for number in range(4):
        commit_each(source, number + 1, number + 1)
        source.execute("SELECT pg_switch_wal()")
    source.execute("CHECKPOINT")
    source.wait_until(f"SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = '{route.slot}'")
    daemon.send(signal.SIGCONT)
    check_refused(daemon, _SOURCE_REFUSED, "was invalidated by the publisher (wal_removed)", "parapply heal")
    check_refused(start_daemon(route), _SOURCE_REFUSED, "was invalidated by the publisher")


@pytest.fixture
def older_target(route: Route, start_daemon: StartDaemon) -> Iterator[Database]:
    """The target as it was before its last transactions, as a restored backup would be."""
    _apply_and_stop(route, start_daemon)
    older = Database(dbname=f"older_{secrets.token_hex(4)}", server=route.target.server)
    # A template has no sessions.
    route.target.forget()
    route.target.server.execute(
        sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(older.dbname), sql.Identifier(route.target.dbname)
        ),
        dbname="postgres",
    )
    yield older
    drop_database(older)


def test_f30_a_target_restored_to_an_older_state_is_refused(
    route: Route, older_target: Database, start_daemon: StartDaemon
) -> None:
    """F30, F31: the publisher was told of more than the target has: exit 3, and nothing is applied after the gap."""
    _apply_and_stop(route, start_daemon, 11)
    commit_each(route.source, 21, 30)
    restored = Route(source=route.source, target=older_target, slot=route.slot, settings=route.settings)
    check_refused(start_daemon(restored), _SOURCE_REFUSED, "the target was restored", "restore the target")
    assert older_target.rows("SELECT count(*) FROM item") == [(10,)]


@pytest.fixture
def limited_role(target_db: Database) -> Iterator[str]:
    """A role with all it needs but connections."""
    name = f"applier_{secrets.token_hex(4)}"
    for command in (
        f"CREATE ROLE {name} LOGIN CONNECTION LIMIT 4",
        f"GRANT CREATE ON DATABASE {target_db.dbname} TO {name}",
        f"GRANT ALL ON SCHEMA public TO {name}",
        f"GRANT SET ON PARAMETER session_replication_role TO {name}",
    ):
        target_db.execute(command)
    yield name
    target_db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.bare_target
def test_f17_too_few_connections_mean_fewer_workers(
    source_db: Database,
    target_db: Database,
    limited_role: str,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
) -> None:
    """F17: the target gives four connections: two of the eight workers serve, it is said once, and all is applied."""
    for database, user in ((source_db, "postgres"), (target_db, limited_role)):
        with database.connect(user=user) as connection:
            connection.execute(b"CREATE TABLE item (id int PRIMARY KEY, v int); CREATE TABLE evt (n int)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item, evt")
    route = Route(source=source_db, target=target_db, target_dsn=target_db.dsn_with(user=limited_role), settings=FAST)
    init_route(route)
    # The server processes of `init` count until they have ended.
    target_db.wait_until(f"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE usename = '{limited_role}')")
    daemon = start_daemon(route, settings={"apply.workers": 8})
    assert daemon.wait_for_event("workers_reduced")["workers"] == 2
    commit_each(source_db, 1, 500)
    daemon.wait_caught_up()
    assert len(daemon.events_of("workers_reduced")) == 1
    daemon.stop()
    check_equal(route)


@pytest.fixture
def guarded(own_servers: OwnServers) -> PgServer:
    """A server that asks the role `guarded` for its password."""
    server = own_servers("guarded")
    server.execute(f"CREATE ROLE guarded LOGIN SUPERUSER REPLICATION PASSWORD '{_PASSWORD}'")
    path = server.data_dir / "pg_hba.conf"
    rules = "host all guarded 127.0.0.1/32 scram-sha-256\nhost replication guarded 127.0.0.1/32 scram-sha-256\n"
    path.write_text(rules + path.read_text(encoding="utf-8"), encoding="utf-8")
    server.restart()
    return server


def test_f17_a_wrong_password_is_said_at_once(
    *,
    guarded: PgServer,
    source_db: Database,
    target_db: Database,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
) -> None:
    """F17: refused at the first attempt, the daemon says so in one line without the password and exits.

    Refused later, while it runs, it goes on trying, and comes back when the password is right again. First the
    publisher asks for one, then the target.
    """
    with named("source"):
        plain = plain_route(create_database(guarded, "source"), target_db, new_slot)
        _check_password(plain, start_daemon, "source", _SOURCE_REFUSED)
    with named("target"):
        plain = plain_route(source_db, create_database(guarded, "target", with_state=True), new_slot)
        _check_password(plain, start_daemon, "target", _TARGET_REFUSED)


def _check_password(plain: Route, start_daemon: StartDaemon, end: str, code: int) -> None:
    guarded = {"source": plain.source, "target": plain.target}[end]

    def with_password(password: str) -> Route:
        dsn = guarded.dsn_with(user="guarded", password=password)
        dsns = {"source_dsn": "", "target_dsn": "", f"{end}_dsn": dsn}
        return Route(source=plain.source, target=plain.target, slot=plain.slot, settings=plain.settings, **dsns)

    check_refused(start_daemon(with_password(f"{_PASSWORD}-wrong")), code, end, "password authentication failed")
    daemon = start_daemon(with_password(_PASSWORD))
    daemon.wait_caught_up()
    guarded.execute("ALTER ROLE guarded PASSWORD 'another'")
    assert end_sessions(guarded, f"%{plain.slot}") >= 1
    daemon.wait_for_event(f"{end}_lost", count=2)
    commit_each(plain.source, 1, 50)
    guarded.execute(f"ALTER ROLE guarded PASSWORD '{_PASSWORD}'")
    daemon.finish()
    check_equal(plain)
    assert _PASSWORD not in "\n".join(daemon.lines)
