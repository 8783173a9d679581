"""The publisher dies under load and its standby is promoted: the daemon goes on there by itself, with its own slot."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.databases import Database, create_database
from tests.fixtures.plain import check_equal, commit_each, plain_route
from tests.fixtures.roles import SOURCE_ROLE
from tests.fixtures.route import Route
from tests.fixtures.standby import STANDBY_SLOT, make_standby

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

_IS_FAILOVER = "SELECT failover FROM pg_replication_slots WHERE slot_name = '{}'"
_IS_SYNCED = (
    "SELECT synced AND NOT temporary AND invalidation_reason IS NULL FROM pg_replication_slots WHERE slot_name = '{}'"
)
#: How often the standby's worker is woken up, and seconds in between.
_ROUNDS = 30
_ROUND_S = 1.0


def _wait_until_synced(primary: PgServer, standby: Database, slot: str) -> None:
    """Return once the standby has the slot for good.

    Its worker sleeps for up to 30 s after a round that moved nothing, and a reload wakes it up.
    """
    for _ in range(_ROUNDS):
        primary.execute("SELECT pg_log_standby_snapshot()")
        standby.server.execute("SELECT pg_reload_conf()")
        with suppress(AssertionError):
            standby.wait_until(_IS_SYNCED.format(slot), timeout_s=_ROUND_S)
            return
    standby.wait_until(_IS_SYNCED.format(slot))


def _write_until_it_dies(source: Database, first: int) -> int:
    """Commit an item after the other until the server is gone; return the last whose commit was acknowledged."""
    number = first
    with suppress(psycopg.Error), source.connect() as connection:
        while True:
            connection.execute(f"INSERT INTO item VALUES ({number}, 0)".encode())
            number += 1
    return number - 1


@pytest.mark.pg_majors(18)
def test_a_promoted_standby_is_followed(
    own_servers: OwnServers,
    target_db: Database,
    init_route: Callable[[Route], None],
    run_command: RunCommand,
    start_daemon: StartDaemon,
) -> None:
    """A slot of before is made a failover slot by `init`; after the primary's death under load the daemon goes on.

    Source and target are equal then: the server sent nothing that the standby did not have.
    """
    primary, standby = own_servers("primary"), own_servers("standby")
    created = create_database(primary, "source")
    # Settings are alike on both as a rule, and the slot that they name is not.
    make_standby(primary, standby, sync_replication_slots="on", synchronized_standby_slots=STANDBY_SLOT)
    primary.configure({"synchronized_standby_slots": STANDBY_SLOT})
    primary.execute("SELECT pg_reload_conf()")
    plain = plain_route(created, target_db, init_route)
    assert plain.source.rows(_IS_FAILOVER.format(plain.slot)) == [(False,)]
    hosts = make_conninfo(
        host="127.0.0.1,127.0.0.1", port=f"{primary.port},{standby.port}", dbname="source", user=SOURCE_ROLE,
        target_session_attrs="read-write",
    )  # fmt: skip
    settings = {**plain.settings, "source.failover": "auto"}
    route = Route(source=plain.source, target=target_db, slot=plain.slot, settings=settings, source_dsn=hosts)
    done = run_command(route, "init")
    assert (done.returncode, "it is a failover slot now" in done.stdout) == (0, True), done
    target_db.execute("INSERT INTO parapply.skips (slot_id, lsn) SELECT slot_id, 'FF/0' FROM parapply.slots")
    daemon = start_daemon(route)
    commit_each(plain.source, 1, 20)
    daemon.wait_caught_up()
    promoted = Database(dbname="source", server=standby)
    _wait_until_synced(primary, promoted, plain.slot)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(_write_until_it_dies, plain.source, 1000)
        target_db.wait_until("SELECT count(*) > 100 FROM item")
        primary.kill()
        assert writing.result(timeout=60) >= 1100 - 20
    standby.execute("SELECT pg_promote(true, 60)")
    commit_each(promoted, 21, 40)
    followed = Route(source=promoted, target=target_db, slot=plain.slot, settings=settings, source_dsn=hosts)
    daemon.route = followed
    # It was protected; the new primary has no standby to wait for, waits all the same, and that is said.
    waiting_for = f"synchronized_standby_slots names {STANDBY_SLOT}, which no standby reads"
    assert daemon.wait_for_event("failover_unprotected")["reason"].startswith(waiting_for)
    standby.configure({"synchronized_standby_slots": ""})
    standby.execute("SELECT pg_reload_conf()")
    daemon.finish()
    check_equal(followed)
    assert target_db.rows("SELECT timeline FROM parapply.slots") == [(2,)]
    # Another transaction may end there now.
    assert [one["end_lsn"] for one in daemon.events_of("skip_passed")] == ["FF/0"]
    assert target_db.rows("SELECT lsn FROM parapply.skips") == []
