"""Two-way set-ups: two daemons, `origin = none`, replication origins on the workers, and who wins (T-17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.fan import QUICK, make_slot
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, node text)"
_LAST = {
    f"conflict.{kind}": "last_update_wins"
    for kind in ("insert_exists", "update_exists", "multiple_unique_conflicts", "update_origin_differs")
}
_LAST["conflict.delete_origin_differs"] = "last_update_wins"
_SETTINGS: dict[str, str | float] = {**QUICK, "source.origin": "none", "apply.workers": 2}
#: A role that may do everything but write under a replication origin.
_PLAIN = "parapply_no_origin"


class TwoWay:
    """Two databases that each follow the other."""

    def __init__(self, one: Database, other: Database, start_daemon: StartDaemon) -> None:
        """Make tables, publications and slots; the state schemas must not be published."""
        self.nodes = (one, other)
        self.routes = (Route(source=one, target=other), Route(source=other, target=one))
        self._start_daemon = start_daemon
        for node in self.nodes:
            node.execute(f"{_TABLE}; CREATE PUBLICATION pub FOR TABLES IN SCHEMA public")
        for route in self.routes:
            make_slot(route)

    def start(self, settings: dict[str, str]) -> list[Daemon]:
        """Start both daemons and return them when they read."""
        return [self.start_one(number, settings) for number in range(len(self.routes))]

    def start_one(self, number: int, settings: Mapping[str, str] | None = None) -> Daemon:
        """Start the daemon of a route and return it when it reads."""
        daemon = self._start_daemon(self.routes[number], settings={**_SETTINGS, **(settings or {})})
        daemon.wait_for_event("source_connected")
        return daemon

    def check_equal(self, daemons: list[Daemon]) -> None:
        """Wait until both have applied what the other wrote, then compare."""
        for daemon in daemons:
            daemon.wait_caught_up()
        assert contents(self.nodes[0], "public") == contents(self.nodes[1], "public")


@pytest.mark.pg_majors(16, 18)
def test_t17_nothing_goes_round(source_db: Database, target_db: Database, start_daemon: StartDaemon) -> None:
    """PostgreSQL's 030: what came from the other node is not sent back; each applies what the other wrote (T-17)."""
    both = TwoWay(source_db, target_db, start_daemon)
    daemons = both.start({})
    for number, node in enumerate(both.nodes):
        node.execute(f"INSERT INTO u SELECT 2 * n + {number}, 'node {number}' FROM generate_series(1, 50) AS n")
        node.execute(f"UPDATE u SET node = node || ' again' WHERE id % 2 = {number}")
    both.check_equal(daemons)
    assert both.nodes[0].rows("SELECT count(*) FROM u WHERE node LIKE '% again'") == [(100,)]
    for node in both.nodes:
        # The two transactions of the other node and the message behind them, which holds no change.
        node.wait_until("SELECT sum(transactions) = 2 AND sum(changes) = 100 FROM parapply.workers")
    for daemon in daemons:
        assert not daemon.events_of("origin_missing") + daemon.events_of("origin_gap")
        daemon.stop()
    # With `any` again the rows of the other node have been passed, and come no more.
    daemon = both.start_one(0, {"source.origin": "any"})
    assert "parapply verify" in daemon.wait_for_event("origin_gap")["hint"]
    target_db.wait_until("SELECT reason LIKE 'source.origin was none: rows%' FROM parapply.progress")
    daemon.stop()


def test_t17_the_last_update_wins_on_both_nodes(
    source_db: Database, target_db: Database, start_daemon: StartDaemon
) -> None:
    """Both nodes end with the row that was committed last, whichever of them wrote it, and both kept the conflict."""
    both = TwoWay(source_db, target_db, start_daemon)
    one, other = both.nodes
    one.execute("INSERT INTO t VALUES (1, 'start'), (2, 'start'), (3, 'start')")
    for daemon in (daemons := both.start(_LAST)):
        daemon.wait_caught_up()
    both.check_equal(daemons)
    for daemon in daemons:
        daemon.stop()
    # Each pair of writes in its order: the second one is the newer.
    for first, second, row in ((one, other, 1), (other, one, 2)):
        first.execute(f"UPDATE t SET v = 'older' WHERE id = {row}")
        second.execute(f"UPDATE t SET v = 'newer' WHERE id = {row}")
        first.execute(f"INSERT INTO t VALUES ({row} + 10, 'older')")
        second.execute(f"INSERT INTO t VALUES ({row} + 10, 'newer')")
    daemons = both.start(_LAST)
    both.check_equal(daemons)
    expected = [(1, "newer"), (2, "newer"), (3, "start"), (11, "newer"), (12, "newer")]
    assert one.rows("SELECT id, v FROM t ORDER BY id") == expected
    query = "SELECT conflict_type, key->>'id', outcome FROM parapply.conflicts ORDER BY 1, 2"
    kinds = [
        ("insert_exists", "11"),
        ("insert_exists", "12"),
        ("update_origin_differs", "1"),
        ("update_origin_differs", "2"),
    ]
    won, lost = "applied_remote", "kept_local"
    assert one.rows(query) == [(*kind, result) for kind, result in zip(kinds, [won, lost, won, lost], strict=True)]
    assert other.rows(query) == [(*kind, result) for kind, result in zip(kinds, [lost, won, lost, won], strict=True)]
    for daemon in daemons:
        daemon.stop()


def test_t17_a_table_copied_again_does_not_go_back(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """`refresh --truncate` on one node is no local change there: neither its TRUNCATE nor its rows are sent.

    Its rows are the publisher's for every policy, with the time of the snapshot. The places of its origins are free
    again, of which a server has few.
    """
    both = TwoWay(source_db, target_db, start_daemon)
    one, other = both.nodes
    one.execute("INSERT INTO t VALUES (1, 'a'), (2, 'a'); INSERT INTO u VALUES (1, 'a')")
    policies = {"conflict.update_origin_differs": "keep_local", "conflict.update_missing": "skip"}
    daemons = both.start({**_LAST, **policies})
    both.check_equal(daemons)
    tables = ("--table", "public.t", "--table", "public.u", "--truncate")
    run_command(both.routes[0], "refresh", *tables, "--set", "source.origin=none", code=0)
    written = (
        "SELECT count(DISTINCT w.timestamp), pg_catalog.bool_and(o.roname LIKE 'parapply%copy%') FROM"
        " (SELECT xmin FROM t UNION ALL SELECT xmin FROM u) AS r, pg_xact_commit_timestamp_origin(r.xmin) AS w"
        " LEFT JOIN pg_replication_origin AS o ON o.roident = w.roident"
    )
    assert other.rows(written) == [(1, True)]
    assert other.rows("SELECT count(*) FROM pg_replication_origin_status WHERE external_id LIKE '%copy%'") == [(0,)]
    one.execute("UPDATE t SET v = 'b' WHERE id = 1")
    both.check_equal(daemons)
    assert one.rows("SELECT id, v FROM t ORDER BY id") == [(1, "b"), (2, "a")]
    assert one.rows("SELECT COALESCE(sum(changes), 0)::int FROM parapply.workers") == [(0,)]
    assert other.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]
    # The same for a row that is replayed while the daemon runs.
    other.execute(
        "SELECT pg_replication_origin_create('else'); SELECT pg_replication_origin_session_setup('else');"
        "DELETE FROM t WHERE id = 2; SELECT pg_replication_origin_session_reset(), pg_replication_origin_drop('else')"
    )
    one.execute("UPDATE t SET v = 'b' WHERE id = 2")
    daemons[0].wait_caught_up()
    run_command(both.routes[0], "conflicts replay", "--yes", "--type", "update_missing", code=0)
    one.execute("UPDATE t SET v = 'c' WHERE id = 2")
    both.check_equal(daemons)
    assert one.rows("SELECT v FROM t WHERE id = 2") == [("c",)]
    for daemon in daemons:
        daemon.stop()


@pytest.mark.bare_target
def test_t17_without_the_privilege_the_daemon_says_what_will_not_work(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """It applies all the same and warns; policies and a replay that need origins are refused with the grants."""
    source_db.execute(f"{_TABLE}; CREATE PUBLICATION pub FOR ALL TABLES")
    role = sql.Identifier(_PLAIN)
    target_db.execute(sql.SQL("DROP ROLE IF EXISTS {0}; CREATE ROLE {0} LOGIN").format(role))
    target_db.execute(sql.SQL("GRANT SET ON PARAMETER session_replication_role TO {0}").format(role))
    target_db.execute(
        sql.SQL("GRANT CREATE ON DATABASE {1} TO {0}; GRANT ALL ON SCHEMA public TO {0}").format(
            role, sql.Identifier(target_db.dbname)
        )
    )
    target_db.execute(
        sql.SQL("{1}; ALTER TABLE t OWNER TO {0}; ALTER TABLE u OWNER TO {0}").format(role, sql.SQL(_TABLE))
    )
    route = Route(source=source_db, target=target_db, target_dsn=target_db.dsn_with(user=_PLAIN))
    make_slot(route)
    source_db.execute("INSERT INTO t VALUES (1, 'a')")
    target_db.execute("INSERT INTO t VALUES (2, 'local')")
    source_db.execute("INSERT INTO t VALUES (2, 'remote')")
    daemon = start_daemon(route, settings={**QUICK, "conflict.insert_exists": "keep_local"})
    warning = daemon.wait_for_event("origin_missing")
    assert "pg_replication_origin" in warning["error"]
    assert "GRANT EXECUTE ON FUNCTION pg_replication_origin_create, " in warning["hint"]
    daemon.finish()
    refused = start_daemon(route, settings={**QUICK, "conflict.update_origin_differs": "keep_local"})
    assert refused.exit_code(30) == 4
    assert 'conflict.update_origin_differs = "keep_local" needs replication origins' in refused.failure
    # Between two nodes every change would go round.
    refused = start_daemon(route, settings=_SETTINGS)
    assert refused.exit_code(30) == 4
    assert 'source.origin = "none" needs replication origins' in refused.failure
    assert "GRANT EXECUTE ON FUNCTION" in refused.failure
    assert target_db.rows("SELECT lacks_origins FROM parapply.slots") == [(False,)]
    # So would what is replayed.
    replay = ("conflicts replay", "--yes", "--type", "insert_exists")
    kept = run_command(route, *replay, "--set", "source.origin=none", code=4)
    assert 'target: source.origin = "none" needs replication origins' in kept.stderr
    assert "GRANT EXECUTE ON FUNCTION" in kept.stderr
    assert target_db.rows("SELECT v FROM t WHERE id = 2") == [("local",)]
    assert target_db.rows("SELECT replayed_at FROM parapply.conflicts") == [(None,)]
    # Nor is a table emptied and copied again where a slot may send that on.
    target_db.execute("CREATE PUBLICATION back FOR TABLE t")
    back = Route(source=target_db, target=source_db, slot=f"{route.slot}_back")
    make_slot(back)
    copied = run_command(route, "refresh", "--table", "public.t", "--truncate", code=4)
    assert f"the copy, which slot '{back.slot}' on the target would send on" in copied.stderr
    assert "GRANT EXECUTE ON FUNCTION" in copied.stderr
    assert target_db.rows("SELECT v FROM t WHERE id = 2") == [("local",)]
    target_db.execute("DROP PUBLICATION back")
    run_command(route, *replay, code=0)
    assert target_db.rows("SELECT v FROM t WHERE id = 2") == [("remote",)]


def test_policies_are_refused_where_the_target_remembers_no_commits(
    own_servers: OwnServers, source_db: Database, new_database: object, start_daemon: StartDaemon
) -> None:
    """Without track_commit_timestamp the setting that needs it is named, before anything is applied (exit 4).

    Where no origin is free, the limit is named, and so is what a dropped database has left.
    """
    assert callable(new_database)
    server = own_servers(settings={"track_commit_timestamp": "off", "max_active_replication_origins": 1})
    target: Database = new_database(server, "target")
    # As a database leaves it that is dropped with its state.
    left = "SELECT pg_replication_origin_create('parapply_5_1'), pg_replication_origin_advance('parapply_5_1', '0/1')"
    target.execute(left)
    source_db.execute(f"{_TABLE}; INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION pub FOR ALL TABLES")
    target.execute(_TABLE)
    route = Route(source=source_db, target=target)
    make_slot(route)
    for key, policy in (
        ("conflict.insert_exists", "last_update_wins"),
        ('conflict.tables."public.t".delete_origin_differs', "skip"),
    ):
        refused = start_daemon(route, settings={**QUICK, key: policy})
        assert refused.exit_code(30) == 4
        says = f'{key} = "{policy}" needs commit timestamps, and track_commit_timestamp is off'
        assert says in refused.failure
    source_db.execute("INSERT INTO t VALUES (2, 'b')")
    daemon = start_daemon(route, settings={**QUICK, "conflict.insert_exists": "apply_remote"})
    target.wait_until("SELECT to_regclass('parapply.progress') IS NOT NULL")
    daemon.wait_caught_up()
    hint = daemon.wait_for_event("origin_missing")["hint"]
    assert "raise max_active_replication_origins of the target" in hint
    assert "no daemon applies the slots of 1 origins (parapply_5_1)" in hint
    daemon.stop()
