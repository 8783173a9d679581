"""DDL on either side while the daemon runs: new plans take over at the right change, and nothing restarts."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import SECRET, Pair, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import Daemon
    from tests.fixtures.databases import Database

__all__ = ["pair"]

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n int);"


@contextmanager
def inserting(source: Database) -> Iterator[threading.Event]:
    """Insert rows and change them, one transaction each, until the block ends; the event says that it has begun."""
    stop, begun = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with source.connect() as connection:
                number = 0
                while not stop.is_set():
                    connection.execute("INSERT INTO t (id, v) VALUES (%s, 'row')", [number])
                    connection.execute("UPDATE t SET v = v || '!' WHERE id = %s", [number // 2])
                    number += 1
                    if number > 20:
                        begun.set()
        except BaseException as error:  # noqa: BLE001  raised below, where the test waits
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=run, name="inserting")
    thread.start()
    try:
        assert begun.wait(30)
        yield begun
    finally:
        stop.set()
        thread.join()
    assert not errors, errors


def check_went_on(daemon: Daemon) -> None:
    """Fail unless a daemon ends in order, without errors, in its first epoch."""
    daemon.finish()
    assert [event for event in daemon.events if event.get("level") == "error"] == []
    assert len(daemon.events_of("source_connected")) == 1


def test_t27_columns_come_and_go_under_load(pair: Pair) -> None:
    """Added on the target and then on the source, dropped the other way round: every row has its columns (T-27).

    A column that must have a value may lack it on the target before the source drops it.
    """
    pair.create(_TABLE.replace("n int", "n int NOT NULL DEFAULT 0"))
    pair.target.execute("ALTER TABLE t ALTER n DROP DEFAULT")
    daemon = pair.start(workers=8, settings={"apply.max_batch_transactions": 5})
    with inserting(pair.source):
        pair.target.execute("ALTER TABLE t ADD extra text DEFAULT 'd'")
        pair.source.execute("ALTER TABLE t ADD extra text DEFAULT 'd'")
        pair.write("UPDATE t SET extra = 'x' WHERE id < 10", "INSERT INTO t VALUES (-1, 'v', 1, 'all')")
        daemon.wait_caught_up()
        pair.target.execute("ALTER TABLE t ALTER n DROP NOT NULL")
        pair.source.execute("ALTER TABLE t DROP n")
        pair.write("INSERT INTO t VALUES (-2, 'v', 'without n')")
        daemon.wait_caught_up()
        pair.target.execute("ALTER TABLE t DROP n")
    check_went_on(daemon)
    pair.check_equal()


def test_t27_a_column_that_the_target_has_not(pair: Pair) -> None:
    """A column added on the source only stops the daemon at the first row with it, and names it (T-27, F28)."""
    pair.create(_TABLE)
    daemon = pair.start(workers=8)
    pair.write("INSERT INTO t VALUES (1, 'a', 1)", "ALTER TABLE t ADD extra text")
    pair.write("INSERT INTO t VALUES (2, 'b', 2, 'c')")
    pair.check_stopped(daemon, code=4, says=r'target table public\.t is missing replicated columns: "extra"')
    assert pair.target.rows("SELECT id FROM t") == [(1,)]
    pair.target.execute("ALTER TABLE t ADD extra text")
    pair.drain()
    pair.check_equal()


def test_t27_a_column_dropped_under_the_daemon(pair: Pair) -> None:
    """A published column dropped on the target mid-run stops the daemon and is named; added again, it goes on (F27)."""
    pair.create(_TABLE)
    daemon = pair.start()
    pair.write("INSERT INTO t VALUES (1, 'a', 1)")
    daemon.wait_caught_up()
    pair.target.execute("ALTER TABLE t DROP n")
    pair.write(f"INSERT INTO t VALUES (2, '{SECRET}', NULL)")
    pair.check_stopped(daemon, code=4, says=r'target table public\.t is missing replicated columns: "n"')
    pair.target.execute("ALTER TABLE t ADD n int; UPDATE t SET n = 1")
    pair.drain()
    pair.check_equal()


@pytest.mark.in_turn("is_live")
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "backlog"])
def test_t71_names_that_change_hands(pair: Pair, *, is_live: bool) -> None:
    """A renamed table, a new one under its old name and a renamed schema keep their rows apart (T-71, 100_bugs 6)."""
    tables = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE SCHEMA one; CREATE TABLE one.s (id int PRIMARY KEY);"
    later = (
        "CREATE TABLE old (id int PRIMARY KEY, v text); CREATE SCHEMA two; CREATE TABLE two.s (id int PRIMARY KEY);"
        "ALTER TABLE t ADD w int; CREATE TABLE swapped (v text, id int PRIMARY KEY)"
    )
    pair.create(tables, tables + later)
    daemon = pair.start(workers=8) if is_live else None
    pair.write(
        "INSERT INTO t VALUES (1, 'first')",
        "INSERT INTO one.s VALUES (1)",
        "ALTER TABLE t RENAME TO old",
        "CREATE TABLE t (w int, id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (7, 2, 'second'), (8, 3, 'third')",
        "INSERT INTO old VALUES (10, 'renamed')",
        "BEGIN; UPDATE t SET v = 'again' WHERE id = 2; INSERT INTO old VALUES (11, 'too');"
        " DELETE FROM t WHERE id = 3; COMMIT",
        "ALTER SCHEMA one RENAME TO two",
        "CREATE SCHEMA one; CREATE TABLE one.s (id int PRIMARY KEY)",
        "INSERT INTO one.s VALUES (2)",
        "INSERT INTO two.s VALUES (3)",
        "DROP TABLE t",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (20, 'third of the name')",
        "ALTER TABLE old RENAME TO swapped; ALTER TABLE t RENAME TO old; ALTER TABLE swapped RENAME TO t",
        "UPDATE old SET v = 'fourth' WHERE false",
        "INSERT INTO t VALUES (30, 'x')",
        "INSERT INTO old VALUES (31, 'y')",
    )  # fmt: skip
    if daemon:
        check_went_on(daemon)
    else:
        pair.drain(workers=8)
    rows = pair.target.rows("SELECT id, v, w FROM t ORDER BY id")
    assert rows == [(1, "first", None), (2, "again", 7), (20, "third of the name", None), (30, "x", None)]
    assert pair.target.rows("SELECT id FROM old ORDER BY id") == [(10,), (11,), (31,)]
    assert pair.target.rows("SELECT id FROM one.s ORDER BY id") == [(1,), (2,)]
    assert pair.target.rows("SELECT id FROM two.s") == [(3,)]


@pytest.mark.pg_majors(15, 18)
def test_t71_a_name_that_changes_hands_inside_a_transaction(pair: Pair, pg_major: int) -> None:
    """Both tables that had the name are announced in it; later rows of the first one are not the other's (T-71).

    PostgreSQL 15 names the first one's new schema in a new stream only: the daemon ends before it guesses.
    """
    tables = "CREATE SCHEMA one; CREATE TABLE one.s (id int PRIMARY KEY);"
    pair.create(tables, f"{tables} CREATE SCHEMA two; CREATE TABLE two.s (id int PRIMARY KEY)")
    pair.write(
        f"BEGIN; INSERT INTO one.s VALUES (1); ALTER SCHEMA one RENAME TO two; {tables} INSERT INTO one.s VALUES (2);"
        " COMMIT",
        "INSERT INTO two.s VALUES (3)",
    )
    daemon = pair.start(settings={"apply.max_batch_transactions": 1})
    if pg_major == 15:
        pair.check_stopped(daemon, code=3, says="was never announced")
        pair.drain()
    else:
        daemon.finish()
    found = [pair.target.rows(f"SELECT id FROM {schema}.s ORDER BY id") for schema in ("one", "two")]
    assert found == [[(1,), (2,)], [(3,)]]


def test_t71_names_with_dots_are_no_others_names(pair: Pair) -> None:
    """Two tables whose schema and name are one text when put together stay two: none takes the other's place (T-71)."""
    names = ('"a.b".c', 'a."b.c"')
    pair.create(
        'CREATE SCHEMA a; CREATE SCHEMA "a.b";' + "".join(f"CREATE TABLE {n} (id int PRIMARY KEY);" for n in names)
    )
    pair.write(*(f"INSERT INTO {name} VALUES ({number})" for number in (1, 2) for name in names))
    pair.drain()
    assert [pair.target.rows(f"SELECT id FROM {name} ORDER BY id") for name in names] == [[(1,), (2,)]] * 2
    assert pair.target.rows("SELECT schema_name, table_name FROM parapply.tables ORDER BY 1") == [
        ("a", "b.c"), ("a.b", "c"),
    ]  # fmt: skip


def test_t48_column_types_change_under_prepared_statements(pair: Pair) -> None:
    """ALTER COLUMN TYPE on the target mid-run costs one repeat; the tables are read again and it goes on (T-48)."""
    pair.create(_TABLE + "CREATE TABLE u (id int PRIMARY KEY, n int, e text)")
    daemon = pair.start(settings={"apply.max_batch_transactions": 1})
    load = (
        "INSERT INTO t VALUES ({0}, 'v', 1), ({0} + 1, 'v', 1)",
        "UPDATE t SET n = n + 1 WHERE id = {0}",
        "DELETE FROM t WHERE id = {0} + 1",
        "INSERT INTO u VALUES ({0}, 5, 'x')",
        "UPDATE u SET id = id + 500, n = {0} WHERE id = {0}",
    )
    pair.write(*(text.format(10) for text in load))
    daemon.wait_caught_up()
    pair.target.execute(
        "ALTER TABLE t ALTER id TYPE text, ALTER v TYPE varchar(10), ALTER n TYPE bigint;"
        "ALTER TABLE u ALTER n TYPE text, ALTER id TYPE numeric"
    )
    pair.write(*(text.format(20) for text in load))
    daemon.wait_caught_up()
    # On both sides, and data that only the new type takes.
    pair.target.execute("ALTER TABLE u ALTER n TYPE text")
    pair.source.execute("ALTER TABLE u ALTER n TYPE text USING n::text")
    pair.write("UPDATE u SET n = 'no number'", "INSERT INTO u VALUES (1, 'neither', 'y')")
    check_went_on(daemon)
    assert daemon.events_of("batch_retried")
    pair.check_equal()


def test_t48_a_type_changes_again_while_a_transaction_is_repeated(pair: Pair) -> None:
    """The tables are read again as often as they have changed: it is the second change that meets the repeat (T-48)."""
    pair.create(_TABLE)
    daemon = pair.start(settings={"apply.max_batch_transactions": 1})
    pair.write("INSERT INTO t VALUES (1, 'v', 1)")
    daemon.wait_caught_up()
    with ExitStack() as sessions:
        holder = sessions.enter_context(pair.target.connect())
        holder.execute("BEGIN; ALTER TABLE t ALTER n TYPE bigint")
        pair.write("INSERT INTO t VALUES (2, 'v', 2)")
        for kind in ("numeric", "bigint", "numeric"):
            pair.target.wait_until(WORKER_IS_BLOCKED)
            waiting = sessions.enter_context(pair.target.connect())
            altering = threading.Thread(target=waiting.execute, args=(f"BEGIN; ALTER TABLE t ALTER n TYPE {kind}",))
            altering.start()
            pair.target.wait_until("SELECT count(*) = 2 FROM pg_locks WHERE relation = 't'::regclass AND NOT granted")
            # The worker is first in the queue, and fails; what it tries next waits for the other session.
            holder.execute("COMMIT")
            altering.join()
            holder = waiting
        pair.target.wait_until(WORKER_IS_BLOCKED)
        holder.execute("COMMIT")
    check_went_on(daemon)
    pair.check_equal()


def test_t48_a_target_table_is_exchanged(pair: Pair) -> None:
    """A table recreated under the same name mid-run, with other column numbers, is taken as it comes (T-48, F27)."""
    pair.create(_TABLE)
    daemon = pair.start(workers=8)
    with inserting(pair.source):
        pair.target.execute(
            "BEGIN; LOCK TABLE t; CREATE TABLE made_anew (n int, v text, id int PRIMARY KEY);"
            "INSERT INTO made_anew SELECT n, v, id FROM t; DROP TABLE t; ALTER TABLE made_anew RENAME TO t; COMMIT"
        )
        pair.write("INSERT INTO t VALUES (-1, 'v', 1)")
        daemon.wait_caught_up()
    check_went_on(daemon)
    query = "SELECT id, v, n FROM t ORDER BY id"
    assert pair.target.rows(query) == pair.source.rows(query)
