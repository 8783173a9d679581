"""`parapply heal`: a lost slot is replaced, and the target is equal again although only what differs was copied."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.fixtures.databases import create_database
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST, check_equal, commit_each, plain_route, wait_until_unread
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents
from tests.fixtures.two_phase import N_PREPARED, TABLES, TWO_PHASE, write_prepared
from tests.system.test_two_way import TwoWay

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

_TABLES = """
CREATE TABLE item (id int PRIMARY KEY, v int NOT NULL);
CREATE TABLE evt (n int NOT NULL);
CREATE TABLE pair (a int, b text, u int UNIQUE, t text, PRIMARY KEY (a, b));
CREATE TABLE quiet (id int PRIMARY KEY);
"""
_FIRST = """
INSERT INTO item SELECT i, i FROM generate_series(1, 50) AS i;
INSERT INTO evt SELECT i FROM generate_series(1, 50) AS i;
INSERT INTO pair SELECT i, 'b''"' || i, i, repeat('x', i) FROM generate_series(1, 50) AS i;
INSERT INTO quiet VALUES (1);
"""
#: Rows that come, go, change, and take each other's unique values.
_LOST = """
INSERT INTO item SELECT i, i FROM generate_series({0} * 100, {0} * 100 + 9) AS i; DELETE FROM item WHERE id = {0};
UPDATE item SET v = v + 1 WHERE id BETWEEN 20 AND 25;
INSERT INTO evt VALUES ({0});
UPDATE pair SET u = 1000 WHERE a = 30; UPDATE pair SET u = 30 WHERE a = 31; UPDATE pair SET u = 31 WHERE a = 30;
UPDATE pair SET b = b || ',(' WHERE a = 40 + {0}; INSERT INTO pair VALUES (1000 + {0}, '', NULL, NULL);
"""


@pytest.fixture
def route(source_db: Database, target_db: Database, run_command: RunCommand) -> Route:
    """Tables with rows, that were copied."""
    for database in (source_db, target_db):
        database.execute(_TABLES)
    source_db.execute(_FIRST + "CREATE PUBLICATION pub FOR ALL TABLES")
    made = Route(source=source_db, target=target_db, settings=FAST)
    run_command(made, "init", "--copy", code=0)
    return made


def _lose(route: Route, daemon: Daemon | None = None) -> None:
    """Stop a daemon, and drop the slot, as a publisher whose disk is full may have to."""
    if daemon is not None:
        daemon.stop()
    route.source.execute(f"SELECT pg_drop_replication_slot('{route.slot}')")


def _equal(route: Route) -> bool:
    return contents(route.target, "public") == contents(route.source, "public")


def test_f12_a_slot_that_was_dropped_is_healed(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """Changes from a time without a slot are on the target afterwards, and later ones are applied once."""
    daemon = start_daemon(route)
    commit_each(route.source, 60, 69)
    daemon.wait_caught_up()
    held = run_command(route, "heal", code=4)
    assert "holds the lease" in held.stderr
    daemon.stop()
    refused = run_command(route, "heal")
    assert (refused.returncode, "needs no healing" in refused.stderr) == (3, True)
    _lose(route)
    route.source.execute(_LOST.format(1))
    before = contents(route.target, "public"), route.target.rows("SELECT lowest_lsn FROM parapply.slots")
    dry = run_command(route, "heal", "--dry-run", code=1)
    assert "public.item: 1 of 1 ranges differ, 17 rows: 10 to insert, 6 to replace, 1 to delete" in dry.stdout
    assert "public.evt: emptied of 60 rows, and all rows copied (61): it has no key" in dry.stdout
    assert "public.quiet: equal, 1 rows" in dry.stdout
    low = run_command(route, "heal", "--max-rows", "20")
    assert (low.returncode, "nothing was changed" in low.stderr) == (4, True)
    assert before == (contents(route.target, "public"), route.target.rows("SELECT lowest_lsn FROM parapply.slots"))
    assert route.source.rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    route.target.execute("INSERT INTO parapply.skips (slot_id, lsn) SELECT slot_id, 'FF/0' FROM parapply.slots")
    done = run_command(route, "heal", code=0)
    assert "the request to skip FF/0 is forgotten" in done.stderr
    assert _equal(route)
    assert route.target.rows("SELECT lsn FROM parapply.skips") == []
    route.source.execute(_LOST.format(2))
    again = start_daemon(route)
    again.finish()
    assert _equal(route)
    assert route.target.rows("SELECT DISTINCT state FROM parapply.copies") == [("copied",)]


def test_f1_a_heal_that_is_killed_goes_on(route: Route, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """Killed at each of its points, with more changes in between: no daemon starts, and the next heal ends it."""
    _lose(route)
    for number, point in enumerate(failpoints.HEAL_NAMES, 1):
        route.source.execute(_LOST.format(number))
        killed = run_command(route, "heal", environ={"PARAPPLY_FAILPOINT": f"{point}:kill"})
        assert killed.returncode == -signal.SIGKILL, (point, killed.stderr)
        refused = start_daemon(route)
        assert refused.exit_code() == 3, point
        assert "`parapply heal`" in refused.failure
    route.source.execute(_LOST.format(7))
    run_command(route, "heal", code=0)
    assert _equal(route)
    daemon = start_daemon(route)
    route.source.execute(_LOST.format(8))
    daemon.finish()
    assert _equal(route)


def test_only_what_differs_is_copied(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Of 100,000 rows three differ: fewer than a hundredth is copied. Begun without a copy, the slot goes on so."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE big (id int PRIMARY KEY, v text)")
        database.execute("INSERT INTO big SELECT i, 'v' || i FROM generate_series(1, 100000) AS i; ANALYZE big")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE big")
    made = Route(source=source_db, target=target_db, settings=FAST)
    assert run_command(made, "init").returncode == 0
    _lose(made)
    source_db.execute("UPDATE big SET v = 'other' WHERE id = 50000; DELETE FROM big WHERE id = 7;"
                      " INSERT INTO big VALUES (100001, 'more')")  # fmt: skip
    done = run_command(made, "heal", code=0)
    copied = re.search(r"([\d,]+) rows were copied", done.stdout)
    assert copied is not None, done.stdout
    assert int(copied[1].replace(",", "")) == 2
    ranges = re.search(r"public.big: (\d+) of (\d+) ranges differ, 3 rows", done.stdout)
    assert ranges is not None, done.stdout
    assert int(ranges[1]) <= 3 < int(ranges[2])
    check_equal(made, "big")
    daemon = start_daemon(made)
    daemon.wait_caught_up()
    # It looks how tables are published before a snapshot.
    assert run_command(made, "snapshot", "--", "true").returncode == 0
    source_db.execute("INSERT INTO big VALUES (100002, 'later')")
    daemon.finish()
    assert not daemon.events_of("table_waits")
    check_equal(made, "big")


@pytest.mark.pg_majors(16, 18)
def test_t17_a_healed_node_of_a_pair_sends_nothing_back(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """Rows that a heal writes are no changes of the node: the other one gets none of them, and both are equal."""
    both = TwoWay(source_db, target_db, start_daemon)
    there, back = both.start({})
    for number, node in enumerate(both.nodes):
        node.execute(f"INSERT INTO u SELECT 2 * n + {number}, 'node {number}' FROM generate_series(1, 20) AS n")
    both.check_equal([there, back])
    there.stop()
    one, other = both.nodes
    _lose(both.routes[0])
    one.execute(
        "UPDATE u SET node = 'changed' WHERE id < 20; DELETE FROM u WHERE id = 30; INSERT INTO t VALUES (1, 'v')"
    )
    other.execute("INSERT INTO u VALUES (1000, 'of the target'); DELETE FROM u WHERE id = 31")
    back.wait_caught_up()
    counted = "SELECT sum(changes)::int FROM parapply.workers"
    one.wait_until(f"SELECT ({counted}) = 22")
    run_command(both.routes[0], "heal", "--set", "source.origin=none", code=0)
    there = both.start_one(0)
    both.check_equal([there, back])
    assert one.rows(counted) == [(22,)]
    assert one.rows("SELECT count(*) FROM u WHERE id = 1000") == [(1,)]
    for daemon in (there, back):
        daemon.stop()


def test_tables_apart_stay_apart(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """A paused table stays as it is; columns of the target alone keep their values; a new table joins with its rows."""
    tables = "CREATE TABLE item (id int PRIMARY KEY, v int); CREATE TABLE held (id int PRIMARY KEY)"
    for database in (source_db, target_db):
        database.execute(tables)
    target_db.execute("ALTER TABLE item ADD COLUMN own text DEFAULT 'new'")
    source_db.execute(
        "INSERT INTO item SELECT i, i FROM generate_series(1, 9) AS i; CREATE PUBLICATION pub FOR ALL TABLES"
    )
    made = Route(source=source_db, target=target_db, settings=FAST)
    assert run_command(made, "init", "--copy").returncode == 0
    target_db.execute("UPDATE item SET own = 'kept'")
    assert run_command(made, "pause", "public.held").returncode == 0
    _lose(made)
    for database in (source_db, target_db):
        database.execute("CREATE TABLE late (id int PRIMARY KEY); CREATE TABLE other (id int)")
    source_db.execute("UPDATE item SET v = 100 WHERE id = 5; INSERT INTO item VALUES (10, 10)")
    source_db.execute("INSERT INTO late VALUES (1); INSERT INTO held VALUES (1); INSERT INTO other VALUES (1)")
    target_db.execute("INSERT INTO other VALUES (2)")
    done = run_command(made, "heal", code=0)
    assert "public.held: not compared: paused" in done.stdout
    assert "public.other: not compared: published while the slot was lost" in done.stdout
    daemon = start_daemon(made)
    source_db.execute("INSERT INTO late VALUES (2); INSERT INTO held VALUES (2); INSERT INTO other VALUES (3)")
    daemon.finish()
    assert target_db.rows("SELECT id, v, own FROM item WHERE id IN (5, 10) ORDER BY 1") == [
        (5, 100, "kept"),
        (10, 10, "new"),
    ]
    check_equal(made, "late")
    assert target_db.rows("SELECT count(*) FROM held") == [(0,)]
    assert target_db.rows("SELECT id FROM other") == [(2,)]
    states = target_db.rows("SELECT table_name, state FROM parapply.copies ORDER BY 1")
    assert states == [("held", "waiting"), ("item", "copied"), ("late", "copied"), ("other", "waiting")]


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "not_copied"])
def test_tables_that_are_not_healed_wait(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand, *, copies: bool
) -> None:
    """Applied tables that are not published, or left out, at the heal lack changes: none goes on as if it had them."""
    tables = "CREATE TABLE item (id int PRIMARY KEY); CREATE TABLE log (id int PRIMARY KEY); CREATE TABLE big (id int)"
    for database in (source_db, target_db):
        database.execute(tables)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings=FAST)
    assert run_command(route, "init", *(["--copy"] if copies else [])).returncode == 0
    writes = "INSERT INTO item VALUES ({0}); INSERT INTO log VALUES ({0}); INSERT INTO big VALUES ({0})"
    daemon = start_daemon(route)
    source_db.execute(writes.format(1))
    daemon.wait_caught_up()
    # Only now it has looked how the tables are published.
    assert run_command(route, "snapshot", "--", "true").returncode == 0
    _lose(route, daemon)
    source_db.execute(writes.format(2) + "; ALTER TABLE log SET UNLOGGED")
    less = replace(route, settings={**FAST, "mapping.schema_only": "public.big"})
    run_command(less, "heal", code=0)
    source_db.execute("ALTER TABLE log SET LOGGED")
    daemon = start_daemon(route)
    assert daemon.wait_for_event("table_waits", count=2)
    source_db.execute(writes.format(3))
    daemon.wait_caught_up()
    check_equal(route, "item")
    assert [target_db.rows(f"SELECT * FROM {one}") for one in ("big", "log")] == [[(1,)], [(1,)]]
    waiting = target_db.rows("SELECT table_name FROM parapply.copies WHERE state = 'waiting' ORDER BY 1")
    assert waiting == [("big",), ("log",)]
    assert run_command(
        route, "refresh", "--truncate", *(word for one in ("big", "log") for word in ("--table", f"public.{one}"))
    ).returncode == 0  # fmt: skip
    daemon.wait_caught_up()
    check_equal(route, "item", "log", "big")


def test_shapes_of_tables_are_healed(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """Filters, column lists, other names, partitions, keys of many types: equal, by key or copied whole."""
    tables = """
        CREATE TABLE part (id int PRIMARY KEY, v int, secret text);
        CREATE TABLE {name} (day date, at timestamptz, n numeric, id uuid, c char(3), v text[],
                               PRIMARY KEY (day, at, n, id, c));
        CREATE TABLE root (id bigint, v text, PRIMARY KEY (id)) PARTITION BY HASH (id);
        CREATE TABLE root_0 PARTITION OF root FOR VALUES WITH (MODULUS 2, REMAINDER 0);
        CREATE TABLE root_1 PARTITION OF root FOR VALUES WITH (MODULUS 2, REMAINDER 1);
        CREATE TYPE letter AS ENUM ('a', 'b', 'c', 'd', 'e', 'f');
        CREATE TABLE odd (id letter PRIMARY KEY, v text);
        CREATE TABLE scaled (n numeric PRIMARY KEY, v int, own text);
    """
    source_db.execute(tables.format(name="wide"))
    target_db.execute(tables.format(name="wider"))
    rows = """
        INSERT INTO part SELECT i, i % 3, 'hidden' FROM generate_series(1, 30) AS i;
        INSERT INTO wide SELECT '2026-01-01'::date + i, '2026-01-01 12:00+00'::timestamptz + i * interval '1.5 s',
                                i / 4.0, lpad(i::text, 32, '0')::uuid, i, ARRAY[i::text, NULL]
                           FROM generate_series(1, 30) AS i;
        INSERT INTO root SELECT i, repeat('x', i) FROM generate_series(1, 30) AS i;
        INSERT INTO odd SELECT unnest(enum_range('b'::letter, 'f')), 'a';
        INSERT INTO scaled SELECT i / 2.0, i FROM generate_series(1, 5) AS i;
        CREATE PUBLICATION pub FOR TABLE part (id, v) WHERE (id > 3), wide, root, odd, scaled (n, v)
          WITH (publish_via_partition_root = true);
    """
    source_db.execute(rows)
    named: dict[str, str | float] = {**FAST, 'mapping.tables."public.wide"': "public.wider"}
    made = Route(source=source_db, target=target_db, settings=named)
    run_command(made, "init", "--copy", code=0)
    _lose(made)
    target_db.execute("UPDATE scaled SET own = 'kept'; INSERT INTO scaled VALUES (7, 7, 'extra')")
    source_db.execute("""
        UPDATE scaled SET n = 2.50000, v = 0 WHERE v = 5; UPDATE scaled SET v = 0 WHERE v = 1;
        DELETE FROM scaled WHERE v = 2; INSERT INTO scaled VALUES (6, 6);
        UPDATE part SET v = v + 1; UPDATE part SET id = -id WHERE id = 7; INSERT INTO part VALUES (100, 1, 'hidden');
        UPDATE wide SET c = 'z' WHERE n < 2; UPDATE wide SET n = 2.50 WHERE n = 2.5; DELETE FROM wide WHERE n > 7;
        UPDATE root SET id = id + 1000 WHERE id < 4; UPDATE root SET v = '' WHERE id = 9; DELETE FROM root WHERE id = 5;
        UPDATE odd SET v = 'x' WHERE id = 'b';
    """)
    done = run_command(made, "heal", "--whole", "public.root", code=0)
    assert "public.odd: emptied of 5 rows, and all rows copied (5): the type of its key's column id" in done.stdout
    assert "public.root: emptied of about " in done.stdout
    assert re.search(r"public.wide \(public.wider on the target\): 1 of 1 ranges differ", done.stdout)
    assert source_db.rows("SELECT id, v, NULL FROM part WHERE id > 3 ORDER BY 1") == target_db.rows(
        "TABLE part ORDER BY 1"
    )
    # Equal numbers are one key, whatever their scale.
    assert [f"{n} {v} {own}" for n, v, own in target_db.rows("TABLE scaled ORDER BY 1")] == [
        "0.50000000000000000000 0 kept", "1.5000000000000000 3 kept", "2.0000000000000000 4 kept", "2.50000 0 kept",
        "6 6 None",
    ]  # fmt: skip
    for here, there in (("wide", "wider"), ("root", "root"), ("odd", "odd")):
        printed = "SELECT t::text FROM {} AS t ORDER BY 1"
        assert source_db.rows(printed.format(here)) == target_db.rows(printed.format(there)), here


def test_a_client_that_writes_is_found(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand, tmp_path: Path
) -> None:
    """Rows that a client of the target writes after they were compared are not lost: the heal ends, to go on later."""
    _lose(route)
    route.source.execute(_LOST.format(1))
    hold = {"PARAPPLY_FAILPOINT": f"{failpoints.HEAL_COMPARED}:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    held = start_daemon(route, environ=hold, verb="heal")
    held.wait_for_line("tables differ")
    route.target.wait_until(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE 'parapply heal%'"
        " AND state = 'idle in transaction')"
    )
    route.target.execute("UPDATE item SET v = -1 WHERE id = 30")
    while not (marker := tmp_path / f"{failpoints.HEAL_COMPARED}.held").exists():
        held.check_running()
    marker.unlink()
    assert held.exit_code() == 4, held.log_tail()
    assert "target: rows of public.item were changed since they were compared" in held.log_tail()
    assert route.target.rows("SELECT v FROM item WHERE id = 30") == [(-1,)]
    run_command(route, "heal", code=0)
    assert _equal(route)


def test_f34_prepared_transactions_of_a_lost_slot_are_rolled_back(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """Of two transactions prepared on both sides one is committed there and one rolled back. Both end alike here."""
    for database in (source_db, target_db):
        database.execute(TABLES)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    made = Route(source=source_db, target=target_db, settings=TWO_PHASE)
    assert run_command(made, "init").returncode == 0
    daemon = start_daemon(made)
    for gid, number in (("goes", 1), ("comes", 2)):
        write_prepared(source_db, gid, f"INSERT INTO t VALUES ({number}, 'v'); INSERT INTO evt VALUES ({number}, 'v')")
    target_db.wait_until(f"SELECT ({N_PREPARED}) = 2")
    _lose(made, daemon)
    source_db.execute("ROLLBACK PREPARED 'goes'")
    source_db.execute("COMMIT PREPARED 'comes'")
    done = run_command(made, "heal", code=0)
    assert "2 prepared transactions rolled back" in done.stdout
    assert target_db.rows(N_PREPARED) == [(0,)]
    daemon = start_daemon(made)
    write_prepared(source_db, "later", "INSERT INTO t VALUES (3, 'v')")
    source_db.execute("COMMIT PREPARED 'later'")
    daemon.finish()
    check_equal(made, "t", "evt")
    assert target_db.rows("SELECT id FROM t ORDER BY 1") == [(2,), (3,)]


def test_f11_an_invalidated_slot_is_healed(
    own_servers: OwnServers, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """A slot whose WAL the publisher has removed is dropped and replaced; the new one is a failover slot if it was."""
    server = own_servers("publisher", settings={"max_slot_wal_keep_size": "1MB"})
    source = create_database(server, "source")
    made = plain_route(source, target_db, make_slot)
    daemon = start_daemon(made)
    commit_each(source, 1, 5)
    daemon.finish()
    wait_until_unread(made)
    assert run_command(made, "init", "--set", "source.failover=auto").returncode == 0
    # Servers before 17 have none.
    is_failover = f"SELECT to_jsonb(s) ->> 'failover' FROM pg_replication_slots AS s WHERE slot_name = '{made.slot}'"
    was_failover = source.rows(is_failover)
    for number in range(6, 10):
        commit_each(source, number, number)
        source.execute("SELECT pg_switch_wal()")
    source.execute("CHECKPOINT")
    source.wait_until(f"SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = '{made.slot}'")
    done = run_command(made, "heal", code=0)
    assert "was invalidated by the publisher" in done.stdout
    assert source.rows(is_failover) == was_failover
    daemon = start_daemon(made)
    commit_each(source, 10, 12)
    daemon.finish()
    check_equal(made)
