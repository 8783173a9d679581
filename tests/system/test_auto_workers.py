"""apply.workers = "auto": workers come while a backlog gains by them, and leave when they bring nothing.

The target's table has an expression index whose function sleeps, so what more workers gain does not depend on the
machine: in one case they sleep side by side, in the other each longer, the more there are.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.plain import check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database

ALONGSIDE = "pg_catalog.pg_sleep(0.02)"
IN_TURN = (
    "pg_catalog.pg_sleep(0.004 * (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity"
    " WHERE datname = pg_catalog.current_database() AND application_name LIKE 'parapply worker %'))"
)
#: Each transaction by itself, so that a backlog is many batches.
SETTINGS: dict[str, str | float] = {
    "apply.workers": "auto",
    "apply.max_workers": 8,
    "apply.max_batch_transactions": 1,
    'apply.tables."public.item".parallel': "always",
    "apply.advance_interval_s": 0.05,
}
#: Transactions that are committed at once, how many such parts the target is behind, and how many there are at most.
_PART, _PARTS_BEHIND, _PARTS = 100, 4, 150
SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker %'"
)


def make_tables(source: Database, target: Database, sleep: str, user: str | None = None) -> None:
    """Make a table whose changes take their time on the target."""
    table = "CREATE TABLE item (id int PRIMARY KEY, v int)"
    function = f"CREATE FUNCTION slow (v int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$BEGIN PERFORM {sleep};"
    source.execute(f"{table}; CREATE PUBLICATION pub FOR TABLE item")
    with target.connect(user=user or "postgres") as connection:
        connection.execute(f"{table}; {function} RETURN v; END$$; CREATE INDEX ON item (slow(v))".encode())


def keep_backlog(route: Route, is_enough: Callable[[], bool]) -> None:
    """Keep the target a few hundred transactions behind, about a second's work, until it is enough.

    Raises:
        AssertionError: the target does not get on, or it is never enough.
    """
    for part in range(_PARTS):
        first = part * _PART + 1
        route.source.execute(
            f"DO $$ BEGIN FOR i IN {first:d}..{first + _PART - 1:d} LOOP"
            " INSERT INTO item VALUES (i, i); COMMIT; END LOOP; END $$"
        )
        if part >= _PARTS_BEHIND:
            route.target.wait_until(f"SELECT count(*) > {(part - _PARTS_BEHIND) * _PART:d} FROM item")
        if is_enough():
            return
    raise AssertionError(f"{_PARTS} times {_PART} transactions were not enough")


def test_more_while_throughput_rises_with_them(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """Twice the workers sleep twice as much at a time: they come, and apply; rows are equal."""
    make_tables(source_db, target_db, ALONGSIDE)
    route = Route(source=source_db, target=target_db, settings=SETTINGS)
    new_slot(route)
    daemon = start_daemon(route, settings={"log.level": "debug"})
    keep_backlog(route, lambda: any(event["worker"] > 4 for event in daemon.events_of("batch_committed")))
    step = daemon.events_of("workers_changed")[0]
    assert step["workers"] == 8
    assert "a trial: " in step["reason"]
    # The reason of the last step is shown, whichever step came after the first.
    target_db.wait_until("SELECT 1 FROM parapply.progress WHERE reason ~ '^[0-9]+ workers: '")
    daemon.finish()
    check_equal(route, "item")


def test_fewer_when_they_bring_nothing(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """Where twice the workers are half as fast, some leave again under load: session and row go, and rows are equal."""
    make_tables(source_db, target_db, IN_TURN)
    route = Route(source=source_db, target=target_db, settings=SETTINGS)
    new_slot(route)
    daemon = start_daemon(route, settings={"log.level": "debug"})
    keep_backlog(route, lambda: bool(daemon.events_of("worker_left")))
    first, second = (event["workers"] for event in daemon.events_of("workers_changed")[:2])
    assert second < first == 8
    daemon.wait_caught_up()
    # Whatever was tried last: those that are connected are those that are shown.
    target_db.wait_until(f"SELECT ({SESSIONS}) = (SELECT count(*) FROM parapply.workers)")
    daemon.stop()
    check_equal(route, "item")


@pytest.fixture
def limited_role(target_db: Database) -> Iterator[str]:
    """A role that may open what the leader needs, and four to six workers."""
    name = f"applier_{secrets.token_hex(4)}"
    for command in (
        f"CREATE ROLE {name} LOGIN CONNECTION LIMIT 8",
        f"GRANT CREATE ON DATABASE {target_db.dbname} TO {name}",
        f"GRANT ALL ON SCHEMA public TO {name}",
        f"GRANT SET ON PARAMETER session_replication_role TO {name}",
    ):
        target_db.execute(command)
    yield name
    target_db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.bare_target
def test_f17_where_no_more_connect_those_that_are_there_go_on(
    source_db: Database,
    target_db: Database,
    limited_role: str,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
) -> None:
    """F17: the target gives fewer connections than eight workers need: that is said once, and all is applied."""
    make_tables(source_db, target_db, ALONGSIDE, limited_role)
    dsn = target_db.dsn_with(user=limited_role)
    route = Route(source=source_db, target=target_db, target_dsn=dsn, settings=SETTINGS)
    new_slot(route)
    daemon = start_daemon(route)
    keep_backlog(route, lambda: bool(daemon.events_of("workers_reduced")))
    # It depends on what else the leader has open at this moment.
    assert daemon.wait_for_event("workers_reduced")["workers"] in {4, 5, 6}
    daemon.finish()
    assert len(daemon.events_of("workers_reduced")) == 1
    assert daemon.events_of("target_lost") == []
    check_equal(route, "item")
