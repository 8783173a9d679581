"""Every supported major version as publisher and as target, mixed: the ways of applying on a pair of servers each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.plain import FAST, TABLES, check_equal, commit_each
from tests.fixtures.route import Route
from tests.fixtures.two_phase import stream_early, write_prepared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.servers import NewDatabase, OwnServers, ServerOf

#: Publisher and target; each version is once either. 19 is left out, and named, until its programs can be fetched.
_PAIRS = [(15, 17), (16, 18), (17, 15), (18, 16), (17, 17), (19, 18), (18, 19)]
_SETTINGS: Mapping[str, str | float] = {
    **FAST,
    "source.two_phase": "true",
    "conflict.insert_exists": "apply_remote",
    "apply.workers": 3,
    "apply.stream_start_bytes": 0,
    "target.lease_wait_s": 20,
}


@pytest.mark.in_turn("publisher", "target")
@pytest.mark.parametrize(
    ("publisher", "target"),
    [
        pytest.param(*pair, id=f"{pair[0]}-to-{pair[1]}", marks=pytest.mark.needs_majors(*sorted(set(pair))))
        for pair in _PAIRS
    ],
)
def test_a_pair_of_versions(
    *,
    server_of: ServerOf,
    new_database: NewDatabase,
    run_command: RunCommand,
    start_daemon: StartDaemon,
    publisher: int,
    target: int,
) -> None:
    """Copy, stream, a transaction in progress, two-phase commit, a conflict and a restart leave both sides equal."""
    source = new_database(server_of("source", publisher), "source")
    sink = new_database(server_of("target", target), "target")
    for database in (source, sink):
        database.execute(TABLES)
    stream_early(source)
    source.execute("CREATE PUBLICATION pub FOR TABLE item, evt")
    commit_each(source, 1, 20)
    route = Route(source=source, target=sink, settings=_SETTINGS)
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    commit_each(source, 21, 60)
    daemon.wait_caught_up()
    # Only now has the copy joined, before which nothing is prepared.
    sink.wait_until("SELECT two_phase = 'enabled' FROM parapply.slots")
    sink.execute("INSERT INTO item VALUES (1000, 0)")
    source.execute("INSERT INTO item VALUES (1000, 1); INSERT INTO evt VALUES (1000)")
    # Streamed in chunks; with a subtransaction that is rolled back.
    source.execute(
        "BEGIN; INSERT INTO item SELECT n, n FROM generate_series(2001, 6000) AS n; SAVEPOINT a;"
        " DELETE FROM item WHERE id > 3000; ROLLBACK TO a; UPDATE item SET v = -v WHERE id > 5000; COMMIT"
    )
    gid = f"{source.dbname}_{target}"
    write_prepared(source, gid, "UPDATE item SET v = v + 1 WHERE id <= 20", "INSERT INTO evt VALUES (7000)")
    sink.wait_until("SELECT count(*) = 1 FROM parapply.prepared")
    commit_each(source, 61, 70)
    daemon.wait_caught_up()
    daemon.kill()
    source.execute(f"COMMIT PREPARED '{gid}'")
    commit_each(source, 71, 90)
    daemon = start_daemon(route)
    daemon.finish()
    check_equal(route)
    assert sink.rows("SELECT conflict_type, outcome FROM parapply.conflicts") == [("insert_exists", "applied_remote")]
    assert sink.rows("SELECT count(*) FROM parapply.prepared") == [(0,)]


@pytest.mark.pg_majors(19)
def test_what_19_does_otherwise(own_servers: OwnServers, new_database: NewDatabase, run_command: RunCommand) -> None:
    """With wal_level = replica a slot is made; a table behind EXCEPT stays away, and sequences are noted.

    More workers than the target has places for origins share one. A sequence's page LSN stays while values are drawn
    that were logged ahead, so it is no reason to leave a sequence out.

    Sources: PostgreSQL 19, release notes, "Logical Replication"; its syntax of CREATE PUBLICATION; its manual,
    "Refreshing Out-of-Sync Sequences".
    """
    source = new_database(own_servers("nineteen", settings={"wal_level": "replica"}), "source")
    sink = new_database(own_servers("sink", settings={"max_active_replication_origins": "4"}), "target")
    for database in (source, sink):
        database.execute(f"{TABLES}; CREATE TABLE aside (id int PRIMARY KEY); CREATE SEQUENCE ticket")
    source.execute("CREATE PUBLICATION pub FOR ALL TABLES EXCEPT (TABLE aside), ALL SEQUENCES")
    commit_each(source, 1, 20)
    route = Route(source=source, target=sink, settings={**FAST, "apply.workers": 6, "source.origin": "none"})
    found = json.loads(run_command(route, "check", "--copy", "--json").stdout)["findings"]
    codes = {one["code"]: one["severity"] for one in found}
    assert "refused" not in codes.values(), found
    assert codes["sequences_published"] == "note"
    run_command(route, "init", "--copy", code=0)
    assert source.rows("SHOW effective_wal_level") == [("logical",)]
    commit_each(source, 21, 40)
    source.execute("INSERT INTO aside VALUES (1)")
    run_command(route, "run", "--until", route.end_of_source_lsn(), code=0)
    check_equal(route)
    assert sink.rows("SELECT * FROM aside") == []
    assert sink.rows("SELECT count(*) FROM pg_replication_origin WHERE roname NOT LIKE '%copy%'") == [(1,)]
    lsns = []
    for _ in range(2):
        source.execute("SELECT nextval('ticket')")
        lsns += source.rows("SELECT page_lsn FROM pg_get_sequence_data('ticket')")
        run_command(route, "sequences", code=0)
        assert sink.rows("SELECT * FROM ticket")[0][0] == source.rows("SELECT * FROM ticket")[0][0]
    assert lsns[0] == lsns[1]
