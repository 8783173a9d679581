"""A publisher that is, or was, a target itself publishes its own progress FOR ALL TABLES: none of it comes here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.plain import FAST, TABLES, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

#: A row that must stay as it was: another slot that is applied here.
_OWN = "SELECT slot_id, slot_name, lowest_lsn FROM parapply.slots WHERE slot_name = 'another'"
#: Seconds that no daemon of a test is behind, on no machine.
_LAG_S = 7_000_000
_CHANGES = f"""
INSERT INTO item VALUES (2, 2);
UPDATE parapply.slots SET lag_s = {_LAG_S};
INSERT INTO parapply.undecided SELECT slot_id, 'x' FROM parapply.slots;
INSERT INTO evt VALUES (1);
"""


@pytest.fixture
def route(source_db: Database, target_db: Database, run_command: RunCommand) -> Route:
    """Tables on both sides, published by the source; the target has the state of another slot."""
    for database in (source_db, target_db):
        database.execute(TABLES)
    source_db.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA public; INSERT INTO item VALUES (1, 1)")
    route = Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2})
    target_db.execute("CREATE PUBLICATION back FOR TABLE item")
    run_command(route, "init", code=0)
    target_db.execute("UPDATE parapply.slots SET slot_name = 'another'")
    source_db.execute(f"SELECT pg_drop_replication_slot('{route.slot}')")
    return route


def _make_state_of_its_own(route: Route, run_command: RunCommand) -> None:
    back = Route(source=route.target, target=route.source, publication="back")
    run_command(back, "init", code=0)
    # The publication gets what FOR ALL TABLES would add; made before `init` it would keep `init` from its work.
    route.source.execute("ALTER PUBLICATION pub ADD TABLES IN SCHEMA parapply")


def test_the_publishers_progress_is_left_out(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """Copy, stream, refresh, verify and sequences leave it out, whole and streamed; all but that is equal."""
    _make_state_of_its_own(route, run_command)
    before = route.target.rows(_OWN)
    done = run_command(route, "init", "--copy", "--truncate", code=0)
    assert 'warning: source, state_published: schema "parapply" holds the progress of a parapply' in done.stdout
    assert route.target.rows("SELECT table_name FROM parapply.copies ORDER BY 1") == [("evt",), ("item",)]
    daemon = start_daemon(route, settings={"source.decoding_memory_bytes": 65536, "apply.stream_start_bytes": 0})
    assert daemon.wait_for_event("state_left_out")["schemas"] == ["parapply"]
    route.source.execute(f"BEGIN; {_CHANGES} COMMIT")
    with route.source.connect() as large:
        large.execute(f"BEGIN; UPDATE parapply.slots SET lag_s = {_LAG_S} + 1; TRUNCATE parapply.undecided, evt")
        large.execute("INSERT INTO parapply.undecided SELECT slot_id, 'y' || i FROM parapply.slots,"
                      " generate_series(1, 3000) AS i")  # fmt: skip
        large.execute("INSERT INTO evt SELECT i FROM generate_series(1, 3000) AS i; COMMIT")
    daemon.wait_caught_up()
    check_equal(route)
    assert route.target.rows(_OWN) == before
    assert route.target.rows("SELECT count(*) FROM parapply.undecided") == [(0,)]
    assert route.target.rows(f"SELECT max(lag_s) < {_LAG_S} FROM parapply.slots") != [(False,)]
    assert "nothing to do" in run_command(route, "refresh").stdout
    run_command(route, "verify", code=0)
    daemon.stop()
    sequences = run_command(route, "sequences", "--exact")
    assert (sequences.returncode, "parapply" in sequences.stdout) == (0, False), sequences.stdout


@pytest.mark.in_turn("copy")
@pytest.mark.parametrize("copy", [[], ["--copy", "--truncate"]], ids=["init", "copy"])
def test_what_comes_later_is_left_out(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon, copy: list[str]
) -> None:
    """A parapply may be set up on the publisher while the daemon runs: its tables are left out from then on."""
    if not copy:
        route.target.execute("INSERT INTO item VALUES (1, 1)")
    run_command(route, "init", *copy, code=0)
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    before = route.target.rows(_OWN)
    _make_state_of_its_own(route, run_command)
    route.source.execute(f"BEGIN; {_CHANGES} COMMIT")
    daemon.finish()
    assert daemon.events_of("state_left_out")
    check_equal(route)
    assert route.target.rows(_OWN) == before
    assert route.target.rows("SELECT count(*) FROM parapply.undecided") == [(0,)]


def test_tables_of_that_name_are_never_emptied(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """An application's table with the name of one of the target's own is refused, by the copy and by the daemon."""
    before = route.target.rows(_OWN)
    route.source.execute("CREATE SCHEMA parapply; CREATE TABLE parapply.slots (slot_id int PRIMARY KEY);"
                         " ALTER PUBLICATION pub ADD TABLES IN SCHEMA parapply")  # fmt: skip
    refused = run_command(route, "init", "--copy", "--truncate", code=4)
    assert "parapply.slots: the schema holds parapply's own progress here" in refused.stderr
    assert route.target.rows(_OWN) == before
    assert route.source.rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    run_command(route, "init", "--despite", "table_refused", code=0)
    daemon = start_daemon(route)
    route.source.execute("INSERT INTO parapply.slots VALUES (1)")
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert "parapply.slots: the schema holds parapply's own progress here" in daemon.failure
    assert route.target.rows(_OWN) == before
