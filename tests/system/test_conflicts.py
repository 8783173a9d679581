"""Real conflicts and errors of the data: the daemon stops with 5 at the right place, and goes on once repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import SECRET, Pair, named, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["pair"]

_TABLE = "CREATE TABLE t (id int, part text, v text, u int, PRIMARY KEY (id, part))"
_ROWS = "INSERT INTO t SELECT n, 'p', 'start', n FROM generate_series(1, 5) AS n"
_BEFORE = ("INSERT INTO t VALUES (100, 'p', 'before', 100)", "UPDATE t SET v = 'before' WHERE id = 5")
_AFTER = ("INSERT INTO t VALUES (200, 'p', 'after', 200)", "UPDATE t SET v = 'after' WHERE id = 5")
_TRIGGER = (
    "CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER noted AFTER"
    " UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION noted(); ALTER TABLE t ENABLE ALWAYS TRIGGER noted;"
)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A way in which a target refuses a change.

    Attributes:
        kind: what the message calls it.
        target: SQL that makes the target refuse.
        poison: the change.
        repair: SQL for the target.
    """

    kind: str
    target: str
    poison: Sequence[str]
    repair: str

    def __str__(self) -> str:
        """Return the test's id."""
        return self.target.split()[0] + "-" + self.kind if self.kind in ("insert", "update") else self.kind


DAMAGES = (
    Damage(
        kind="insert_exists",
        target=f"INSERT INTO t VALUES (7, 'p', '{SECRET}', 0)",
        poison=[f"INSERT INTO t VALUES (7, 'p', '{SECRET} too', 7)"],
        repair="DELETE FROM t WHERE id = 7",
    ),
    Damage(
        kind="update_missing",
        target="DELETE FROM t WHERE id = 2",
        poison=[f"UPDATE t SET v = '{SECRET}' WHERE id = 2"],
        repair="INSERT INTO t VALUES (2, 'p', 'start', 2)",
    ),
    Damage(
        kind="delete_missing",
        target="DELETE FROM t WHERE id = 2",
        poison=["DELETE FROM t WHERE id = 2"],
        repair="INSERT INTO t VALUES (2, 'p', 'start', 2)",
    ),
    Damage(
        kind="update_exists",
        target=f"CREATE UNIQUE INDEX ON t (u); INSERT INTO t VALUES (99, 'p', '{SECRET}', 77)",
        poison=["UPDATE t SET u = 77 WHERE id = 3"],
        repair="DELETE FROM t WHERE id = 99",
    ),
    Damage(
        kind="update_exists",
        target=f"INSERT INTO t VALUES (99, 'p', '{SECRET}', 77)",
        poison=["UPDATE t SET id = 99 WHERE id = 3"],
        repair="DELETE FROM t WHERE id = 99",
    ),
    Damage(
        kind="update",
        target="ALTER TABLE t ADD CONSTRAINT small CHECK (length(v) < 20)",
        poison=[f"UPDATE t SET v = '{SECRET}' || repeat('x', 30) WHERE id = 4", "DELETE FROM t WHERE id = 3"],
        repair="ALTER TABLE t DROP CONSTRAINT small",
    ),
    Damage(
        kind="insert",
        target="ALTER TABLE t ALTER v TYPE varchar(8)",
        # Blanks too many are cut, as the type demands; letters are not (T-44).
        poison=["INSERT INTO t VALUES (6, 'p', 'blank', 6)", f"INSERT INTO t VALUES (7, 'p', '{SECRET}!!!', 7)"],
        repair="ALTER TABLE t ALTER v TYPE text",
    ),
)


def test_t46_a_conflict_stops_between_its_neighbours(pair: Pair) -> None:
    """In a merged batch, all before the poison is applied and nothing of it or after; repaired, it goes on (T-46).

    Every damage has tables in a schema of its own; each daemon but the first begins with what the one before left.
    """
    schemas = {f"damage_{number}": damage for number, damage in enumerate(DAMAGES)}
    pair.create("; ".join(f"CREATE SCHEMA {name}; SET search_path = {name}; {_TABLE}; {_ROWS}" for name in schemas))
    for schema, damage in schemas.items():
        with named(f"{schema}: {damage}"):
            _stop_between_neighbours(pair, schema, damage)
    pair.drain()
    for schema in schemas:
        pair.check_equal(schema)


def _stop_between_neighbours(pair: Pair, schema: str, damage: Damage) -> None:
    there = f"SET search_path = {schema}"
    pair.target.execute(f"{there}; {damage.target}")
    pair.write(there, *_BEFORE)
    same = "INSERT INTO t VALUES (150, 'p', 'same transaction', 150)"
    xid = pair.write_one(f"SET LOCAL search_path = {schema}", same, *damage.poison)
    pair.write(there, *_AFTER)
    pair.check_conflict(pair.start(), kind=damage.kind, xid=xid, place=f"{schema}.t, key (id, part)")
    seen = pair.target.rows(f"SELECT id, v FROM {schema}.t WHERE id >= 100 OR id = 5 ORDER BY id")
    assert seen == [(5, "before"), (100, "before")]
    pair.target.execute(f"{there}; {damage.repair}")


def test_on_error_retry_goes_on_by_itself_once_repaired(pair: Pair) -> None:
    """With on_error = "retry" the daemon keeps trying, says so without values, and needs no restart."""
    pair.create(f"{_TABLE}; {_ROWS}")
    pair.target.execute("DELETE FROM t WHERE id = 2")
    daemon = pair.start(settings={"apply.on_error": "retry"})
    pair.write(_BEFORE[0], f"UPDATE t SET v = '{SECRET}' WHERE id = 2", _AFTER[0])
    failed = daemon.wait_for_event("batch_failed", count=2)
    assert "update_missing on public.t" in failed["error"]
    assert failed["hint"].endswith("; the daemon tries again by itself")
    assert pair.target.rows("SELECT id FROM t WHERE id >= 100") == [(100,)]
    pair.target.execute("INSERT INTO t VALUES (2, 'p', 'start', 2)")
    daemon.finish()
    assert not [line for line in daemon.lines if SECRET in line]
    pair.check_state_has_no_values()
    pair.check_equal()


def test_t42_an_insert_is_never_an_upsert(pair: Pair) -> None:
    """A row inserted and deleted again inside one batch still is a conflict if the target has one there (T-42)."""
    pair.create("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pair.target.execute(f"INSERT INTO t VALUES (1, '{SECRET}')")
    xid = pair.write_one("INSERT INTO t VALUES (1, 'x')")
    pair.write("DELETE FROM t WHERE id = 1")
    pair.check_conflict(pair.start(), kind="insert_exists", xid=xid, place="public.t, key (id)")
    assert pair.target.rows("SELECT v FROM t") == [(SECRET,)]


def test_t46_a_conflict_inside_a_large_transaction(pair: Pair) -> None:
    """A transaction applied in pieces is rolled back as a whole when a row in its midst is refused (T-46).

    Where it ends is known only behind its last piece, and the history names it by that.
    """
    pair.create("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pair.target.execute(f"INSERT INTO t VALUES (150, '{SECRET}')")
    pair.write("INSERT INTO t VALUES (0, 'before')")
    # A quarter of the memory is a piece, and this is more; wide rows cost less than many.
    settings: Mapping[str, str | float] = {"apply.memory_limit_bytes": 16 << 20}
    xid = pair.write_one("INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series(1, 300) AS n")
    pair.write("INSERT INTO t VALUES (30000, 'after')")
    says = rf"insert_exists on public\.t, key \(id\): .*; transaction {xid}, "
    daemon = pair.start(settings=settings)
    pair.check_stopped(daemon, code=5, says=says)
    assert pair.target.rows("SELECT id FROM t ORDER BY id") == [(0,), (150,)]
    ((lsn,),) = pair.target.rows("SELECT remote_lsn::text FROM parapply.conflicts")
    assert f"end LSN {lsn}." in daemon.failure
    pair.target.execute("DELETE FROM t WHERE id = 150")
    pair.drain(settings=settings)
    pair.check_equal()


def test_f27_a_table_that_changes_before_a_conflict_of_a_large_transaction(pair: Pair) -> None:
    """Half of a piece is settled by then, so all of it is sent again; an error of the data stops the daemon (F27)."""
    pair.create("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (n int PRIMARY KEY, d date)")
    settings: dict[str, str | float] = {"apply.memory_limit_bytes": 16 << 20, "apply.catalogue_check_s": 3600}
    settings |= {"conflict.insert_exists": "keep_local", "source.reconnect_min_s": 0.01}
    daemon = pair.start(settings=settings)
    pair.write_one("INSERT INTO t VALUES (0, '')", "INSERT INTO other VALUES (0)")
    daemon.wait_caught_up()
    large = "INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series({}) AS n"
    pair.target.execute("ALTER TABLE other ALTER n TYPE bigint; INSERT INTO t VALUES (1, 'local'), (1001, 'local')")
    pair.write_one("INSERT INTO t VALUES (1, 'remote')", "INSERT INTO other VALUES (1)", large.format("2, 600"))
    daemon.wait_caught_up()
    assert daemon.events_of("target_lost")
    assert pair.target.rows("SELECT v, (SELECT count(*) FROM t) FROM t WHERE id = 1") == [("local", 602)]
    assert pair.target.rows("SELECT n FROM other ORDER BY n") == [(0,), (1,)]
    pair.target.execute("ALTER TABLE other DROP d, ADD d int")
    other = "INSERT INTO other VALUES (2, '2000-01-01')"
    xid = pair.write_one("INSERT INTO t VALUES (1001, 'remote')", other, large.format("1002, 1600"))
    pair.check_conflict(daemon, kind="insert", xid=xid, place="public.other, key (n)")


def test_two_conflicts_in_one_transaction_stop_at_the_first(pair: Pair) -> None:
    """The first change that met other data is the one named, though the server reports a later one's error before it.

    An update that finds no row, then a key that is taken: with default settings the daemon stops. The history has the
    first conflict.
    """
    pair.create("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pair.write("INSERT INTO t VALUES (1, 'old')")
    pair.drain()
    pair.target.execute("DELETE FROM t; INSERT INTO t VALUES (2, 'local')")
    xid = pair.write_one("UPDATE t SET v = 'new' WHERE id = 1", "INSERT INTO t VALUES (2, 'new')")
    pair.check_conflict(pair.start(), kind="update_missing", xid=xid, place="public.t, key (id)")
    assert pair.target.rows("SELECT conflict_type, change_no FROM parapply.conflicts") == [("update_missing", 1)]


@pytest.mark.parametrize("rule", ["", "CREATE RULE also AS ON UPDATE TO parent DO ALSO NOTIFY ruled"], ids=["", "rule"])
def test_a_cause_is_settled_before_its_consequence(pair: Pair, rule: str) -> None:
    """A child without its parent is no error where the change before it would have made the parent, by its policy."""
    tables = (
        "CREATE TABLE parent (id int PRIMARY KEY, v int);"
        "CREATE TABLE child (id int PRIMARY KEY, parent_id int REFERENCES parent);"
    )
    pair.create(tables, tables + rule)
    pair.write("INSERT INTO parent VALUES (2, 0)")
    settings = {"target.session_replication_role": "origin", "conflict.update_missing": "apply_remote"}
    pair.drain(settings=settings)
    pair.target.execute("DELETE FROM parent")
    pair.write_one("UPDATE parent SET v = 1 WHERE id = 2", "INSERT INTO child VALUES (2, 2)")
    pair.drain(settings=settings)
    pair.check_equal()
    assert pair.target.rows("SELECT conflict_type, outcome FROM parapply.conflicts") == [
        ("update_missing", "applied_remote")
    ]


def test_a_row_that_went_with_its_parent_is_not_missing(pair: Pair) -> None:
    """The target's own cascade has taken it before its delete comes, whatever is asked before that (T-25).

    A transaction of more than 64 changes is applied by itself, and triggers are thought of from the start.
    """
    child = "(id int PRIMARY KEY, parent_id int REFERENCES parent ON DELETE CASCADE);"
    tables = f"CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child {child} CREATE TABLE t {child}"
    pair.create(tables, tables + _TRIGGER)
    settings: dict[str, str | float] = {"target.session_replication_role": "origin"}
    settings |= {f'apply.tables."public.{name}".parallel': "never" for name in ("parent", "child", "t")}
    for policies in ({}, {"conflict.delete_origin_differs": "keep_local"}):
        numbers = "SELECT n {} FROM generate_series(1, 70) AS n"
        rows = (f"INSERT INTO {name} {numbers.format(', n')}" for name in ("child", "t"))
        pair.write_one(f"INSERT INTO parent {numbers.format('')}", *rows)
        pair.write("DELETE FROM parent WHERE id = 1", "DELETE FROM child WHERE id = 2", "DELETE FROM parent")
        pair.drain(settings={**settings, **policies})
        pair.check_equal()
    assert pair.target.rows("SELECT conflict_type FROM parapply.conflicts") == []


def test_an_index_made_again_under_its_name_is_read_again(pair: Pair) -> None:
    """A row that only the old index had is not in the way, and stays (T-22)."""
    table = "CREATE TABLE t (id int PRIMARY KEY, u int, n int);"
    index = "CREATE UNIQUE INDEX p ON t (u) WHERE n > {};"
    pair.create(table, table + index.format(0) + "INSERT INTO t VALUES (90, 1, 1)")
    daemon = pair.start(workers=1, settings={"conflict.insert_exists": "apply_remote"})
    pair.write("INSERT INTO t VALUES (1, 1, 1)")
    daemon.wait_caught_up()
    pair.target.execute(f"DROP INDEX p; {index.format(1)} INSERT INTO t VALUES (91, 2, 1), (92, 2, 2)")
    pair.write("INSERT INTO t VALUES (2, 2, 2)")
    daemon.finish()
    assert pair.target.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (91,)]


@pytest.mark.parametrize("operation", ["update", "delete"])
def test_t43_a_row_that_a_client_moves_away_is_missing(pair: Pair, operation: str) -> None:
    """Where a trigger may veto a change, its row is locked when it is asked for, so that none moves it in between."""
    table = "CREATE TABLE t (id int PRIMARY KEY, v text);"
    pair.create(table, table + _TRIGGER)
    daemon = pair.start()
    pair.write("INSERT INTO t SELECT n, 'old' FROM generate_series(1, 70) AS n")
    daemon.wait_caught_up()
    with pair.target.connect() as client:
        client.execute("BEGIN; UPDATE t SET id = 100 WHERE id = 1")
        xid = pair.write_one("UPDATE t SET v = 'new'" if operation == "update" else "DELETE FROM t")
        pair.target.wait_until(WORKER_IS_BLOCKED)
        client.execute("COMMIT")
    pair.check_conflict(daemon, kind=f"{operation}_missing", xid=xid, place="public.t, key (id)")


#: Puts another row in the place of row 1.
_REPLACED = "DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'local')"
_MOVED_TO = "DELETE FROM t WHERE id = 1; UPDATE t SET id = 1, v = 'local' WHERE id = 9"
#: By schema: on the target alone, by a client of it that has not committed, by the publisher, and the conflict.
_RACES = {
    "updated": ("", _REPLACED, "UPDATE t SET v = 'remote' WHERE id = 1", "update_origin_differs kept_local"),
    "deleted": ("", _MOVED_TO, "DELETE FROM t WHERE id = 1", "delete_origin_differs kept_local"),
    "several": ("", _MOVED_TO, "UPDATE t SET v = 'remote' WHERE id < 4", "update_origin_differs kept_local"),
    "in_order": ("", _REPLACED, "UPDATE t SET v = 'remote' WHERE id = 1", "update_origin_differs kept_local"),
    "trigger": (_TRIGGER, _REPLACED, "UPDATE t SET v = 'remote' WHERE id = 1", "update_origin_differs kept_local"),
    "gone": ("", "DELETE FROM t WHERE id = 1", "UPDATE t SET v = 'remote' WHERE id < 4", "update_missing skipped"),
}


def test_a_row_put_in_the_place_of_another_is_asked_for_its_writer(pair: Pair) -> None:
    """The check of a row's writer waits for a client that then puts a row of its own there: that row is no missing one.

    Each case has a table in a schema of its own.
    """
    table = "CREATE TABLE t (id int PRIMARY KEY, v text);"
    there = {name: f"CREATE SCHEMA {name}; SET search_path = {name}; {table}" for name in _RACES}
    pair.create("; ".join(there.values()), "; ".join(there[name] + _RACES[name][0] for name in there))
    policies = {"conflict.update_origin_differs": "keep_local", "conflict.delete_origin_differs": "keep_local"}
    policies |= {"conflict.update_missing": "skip", 'apply.tables."in_order.t".parallel': "never"}
    daemon = pair.start(settings=policies)
    pair.write(*(f"INSERT INTO {name}.t SELECT n, 'old' FROM generate_series(1, 9) AS n" for name in there))
    daemon.wait_caught_up()
    for name, (_, local, remote, found) in _RACES.items():
        with named(name):
            with pair.target.connect() as client:
                client.execute(f"SET search_path = {name}; BEGIN; {local}".encode())
                pair.write(f"SET search_path = {name}; {remote}")
                pair.target.wait_until(WORKER_IS_BLOCKED)
                client.execute("COMMIT")
            daemon.wait_caught_up()
            kept = f"SELECT conflict_type || ' ' || outcome FROM parapply.conflicts WHERE schema_name = '{name}'"
            assert pair.target.rows(kept) == [(found,)]
            rows = pair.target.rows(f"SELECT v FROM {name}.t WHERE id = 1")
            assert rows == ([] if name == "gone" else [("local",)])
    beside = "SELECT v FROM several.t WHERE id = 2 UNION ALL SELECT v FROM gone.t WHERE id = 2"
    assert pair.target.rows(beside) == [("remote",)] * 2
