"""A copy that is killed within a large table goes on there: parts that are here are brought forward, exactly."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.fixtures.databases import encoded_database
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_LARGE = 'CREATE TABLE large ("i d" int, at date, fill text NOT NULL, note text, PRIMARY KEY ("i d", at));'
# A row a page: four parts.
_ROWS = """
ALTER TABLE large SET (fillfactor = 10, autovacuum_enabled = off);
INSERT INTO large SELECT i, date '2026-01-01' + i % 3, repeat(md5(i::text), 25) FROM generate_series(1, 7000) AS i;
CREATE PUBLICATION pub FOR TABLE large;
"""
#: Rows of the parts that are copied here and of others: changed in place and elsewhere, with another key, deleted,
#: and new where others were. Until it ends nothing of the second transaction counts.
_CHANGES = """
UPDATE large SET note = 'a' WHERE "i d" % 500 = {n};
UPDATE large SET "i d" = "i d" + 100000 WHERE "i d" % 700 = {n};
UPDATE large SET at = at + 1 WHERE "i d" % 900 = {n};
DELETE FROM large WHERE "i d" % 300 = {n};
VACUUM large;
INSERT INTO large SELECT 200000 + {n} * 1000 + i, '2026-01-01', repeat('x', 700) FROM generate_series(1, 30) AS i;
BEGIN; DELETE FROM large WHERE "i d" < 100; INSERT INTO large VALUES (-{n}, '2026-01-01', 'x'); ROLLBACK;
"""


@pytest.fixture
def large(source_db: Database, target_db: Database) -> Route:
    """A table of several parts."""
    for database in (source_db, target_db):
        database.execute(_LARGE)
    source_db.execute(_ROWS)
    return Route(source=source_db, target=target_db, settings=FAST)


def _kill(route: Route, run_command: RunCommand, point: str) -> str:
    killed = run_command(route, "init", "--copy", "--connections", "1", environ={"PARAPPLY_FAILPOINT": point})
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    return killed.stdout


def _change(route: Route, number: int) -> None:
    for text in _CHANGES.format(n=number).split(";\n"):
        if text.strip():
            route.source.execute(text)


def test_parts_are_kept_and_brought_forward(large: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """Killed three times with writes in between, no part is copied twice, and the rows are the publisher's."""
    _kill(large, run_command, f"{failpoints.COPY_PART_DONE}:kill:2")
    _change(large, 1)
    # Killed while what is here is brought forward.
    _kill(large, run_command, f"{failpoints.COPY_PART}:kill:1")
    _change(large, 2)
    assert "public.large: 2 parts are copied" in _kill(large, run_command, f"{failpoints.COPY_PART_DONE}:kill:1")
    _change(large, 3)
    done = run_command(large, "init", "--copy", code=0)
    assert "public.large: 3 parts are copied" in done.stdout
    assert large.target.rows("SELECT count(*) FROM parapply.copy_parts") == [(0,)]
    # Nothing is written since: the copy alone makes them equal.
    check_equal(large, "large")
    daemon = start_daemon(large)
    _change(large, 4)
    daemon.finish()
    check_equal(large, "large")


def test_bytes_of_no_encoding_in_between(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """A publisher in SQL_ASCII has corrected them before parts are brought forward; its slot still has them (T-61)."""
    with encoded_database(source_db, "SQL_ASCII") as source:
        for database in (source, target_db):
            database.execute(_LARGE)
        source.execute(f"{_ROWS} GRANT SELECT ON large TO {source.source_role}")
        large = Route(source=source, target=target_db, settings=FAST)
        _kill(large, run_command, f"{failpoints.COPY_PART_DONE}:kill:2")
        for note in ("convert_from('\\xe9', 'SQL_ASCII')", "'é'"):
            source.execute(f'UPDATE large SET note = {note} WHERE "i d" = 1')
        assert "public.large: 2 parts are copied" in run_command(large, "init", "--copy", code=0).stdout
        check_equal(large, "large")


_OTHER = "its definition, its file or the publication is another"
_UNPUBLISHED = """
ALTER PUBLICATION pub DROP TABLE large;
UPDATE large SET note = 'not sent' WHERE "i d" < 50;
ALTER PUBLICATION pub ADD TABLE large;
"""
_DELETE = 'DELETE FROM large WHERE "i d" = 7'


@pytest.mark.parametrize(
    ("side", "what", "reason"),
    [
        pytest.param("source", "VACUUM FULL large", _OTHER, id="rewritten"),
        pytest.param("source", _UNPUBLISHED, _OTHER, id="not-published-for-a-while"),
        pytest.param("target", _DELETE, "the target's rows are not those that were copied", id="target-changed"),
    ],
)
def test_what_cannot_be_brought_forward_is_copied_again(
    large: Route, run_command: RunCommand, side: str, what: str, reason: str
) -> None:
    """Where a change may not be in the stream, or pages are others, the table is copied from its start."""
    _kill(large, run_command, f"{failpoints.COPY_PART_DONE}:kill:2")
    (large.source if side == "source" else large.target).execute(what)
    done = run_command(large, "init", "--copy", code=0)
    assert f"public.large: copied from its start: {reason}" in done.stdout
    check_equal(large, "large")


def test_a_slot_that_has_moved_names_no_changes(
    large: Route, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """A daemon that ran since has left the table's changes out, and the slot no longer sends them."""
    _kill(large, run_command, f"{failpoints.COPY_PART_DONE}:kill:2")
    _change(large, 1)
    daemon = start_daemon(large)
    daemon.finish()
    done = run_command(large, "init", "--copy", code=0)
    assert "public.large: copied from its start: the slot has moved past the copy" in done.stdout
    check_equal(large, "large")


@pytest.mark.parametrize("key", ["PRIMARY KEY", ""], ids=["target-has-key", "target-has-none"])
def test_two_texts_of_one_key_bring_its_row_once(
    source_db: Database, target_db: Database, run_command: RunCommand, key: str
) -> None:
    """A numeric key that was 1.0 and is 1.00 by now is one key, and its row comes once."""
    columns = "CREATE TABLE large (id numeric {}, fill text)"
    source_db.execute(columns.format("PRIMARY KEY"))
    target_db.execute(columns.format(key))
    source_db.execute("ALTER TABLE large SET (fillfactor = 10, autovacuum_enabled = off)")
    source_db.execute("INSERT INTO large SELECT i + 0.0, repeat(md5(i::text), 25) FROM generate_series(1, 7000) AS i")
    # So the stream can be applied where the target has no key.
    source_db.execute("ALTER TABLE large REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR TABLE large")
    route = Route(source=source_db, target=target_db, settings=FAST)
    _kill(route, run_command, f"{failpoints.COPY_PART_DONE}:kill:2")
    source_db.execute("UPDATE large SET id = id + 0.00 WHERE id < 50")
    done = run_command(route, "init", "--copy", code=0)
    assert "public.large: 2 parts are copied" in done.stdout
    check_equal(route, "large")


@pytest.mark.pg_majors(15)  # the embedded servers are built without ICU
@pytest.mark.parametrize("side", ["source", "target"])
def test_keys_that_are_not_equal_alike_are_copied_again(large: Route, run_command: RunCommand, side: str) -> None:
    """Under a nondeterministic collation one key has several texts, which are several keys at the other end."""
    for database in (large.source, large.target):
        database.execute("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        database.execute("DROP TABLE large")
        loose = "COLLATE loose" if database is (large.source if side == "source" else large.target) else ""
        database.execute(f"CREATE TABLE large (id text {loose} PRIMARY KEY, fill text)")
    large.source.execute("ALTER TABLE large SET (fillfactor = 10, autovacuum_enabled = off)")
    large.source.execute("INSERT INTO large SELECT 'k' || i, repeat(md5(i::text), 25) FROM generate_series(1, 7000) i")
    large.source.execute("ALTER PUBLICATION pub ADD TABLE large")
    _kill(large, run_command, f"{failpoints.COPY_PART_DONE}:kill:2")
    large.source.execute("UPDATE large SET id = upper(id) WHERE id IN ('k5', 'k6')")
    done = run_command(large, "init", "--copy", code=0)
    assert "its key is no longer one that both ends compare alike" in done.stdout
    check_equal(large, "large")


def test_a_slot_is_not_dropped_below_a_copy(large: Route, run_command: RunCommand, tmp_path: Path) -> None:
    """The copy would go on, and put its next parts beside the rows of a copy that is begun then."""
    for database in (large.source, large.target):
        database.execute("ALTER TABLE large DROP CONSTRAINT large_pkey")
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_PART}:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    held = tmp_path / f"{failpoints.COPY_PART}.held"
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(run_command, large, "init", "--copy", "--connections", "1", environ=environ)
        while not held.exists():
            assert not wait([copying], timeout=0.05).done, copying.result()
        refused = run_command(large, "drop", "--yes")
        held.unlink()
        assert copying.result().returncode == 0, copying.result()
    assert (refused.returncode, "another parapply holds the lease" in refused.stderr) == (4, True), refused
    assert large.target.rows("SELECT count(*) FROM large") == large.source.rows("SELECT count(*) FROM large")
    run_command(large, "drop", "--yes", code=0)


def _index(route: Route) -> None:
    """Make an index on the target, which the role may drop and make again; PostgreSQL then has other words for it."""
    role = route.target.target_role
    route.target.execute("CREATE INDEX by_note ON large (note) WHERE note::varchar IN ('a', 'b')")
    route.target.execute(f"ALTER TABLE large OWNER TO {role}; GRANT CREATE ON SCHEMA public TO {role}")


def test_indexes_are_made_again_though_no_part_is_left(large: Route, run_command: RunCommand) -> None:
    """Killed between its last part and its indexes, a table has nothing left to copy, and gets its indexes."""
    _index(large)
    words = ("init", "--copy", "--connections", "1", "--defer-indexes")
    killed = run_command(large, *words, environ={"PARAPPLY_FAILPOINT": f"{failpoints.COPY_PART_DONE}:kill:4"})
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert large.target.rows("SELECT to_regclass('by_note')") == [(None,)]
    done = run_command(large, *words, code=0)
    assert "public.large: 4 parts are copied" in done.stdout
    assert large.target.rows("SELECT to_regclass('by_note')::text") == [("by_note",)]
    check_equal(large, "large")


def test_no_dropped_index_is_forgotten(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """However the table of an interrupted copy leaves the state, its unique index is made again, or a copy will."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE item (id int PRIMARY KEY, v text); CREATE TABLE rest (id int PRIMARY KEY)")
    role = target_db.target_role
    target_db.execute("CREATE UNIQUE INDEX by_v ON item (v)")
    target_db.execute(f"ALTER TABLE item OWNER TO {role}; GRANT CREATE ON SCHEMA public TO {role}")
    source_db.execute("INSERT INTO item VALUES (1, 'a'); INSERT INTO rest VALUES (1)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA public")
    route = Route(source=source_db, target=target_db, settings=FAST)
    begun = ("init", "--copy", "--defer-indexes")
    again = ("refresh", "--table", "public.item", "--truncate", "--defer-indexes")
    is_there = "SELECT to_regclass('by_v') IS NOT NULL"

    def kill(*words: str) -> None:
        killed = run_command(route, *words, environ={"PARAPPLY_FAILPOINT": f"{failpoints.COPY_PART}:kill"})
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        assert target_db.rows(is_there) == [(False,)]

    def finish(*words: str) -> None:
        done = run_command(route, *words, code=0)
        assert target_db.rows(is_there) == [(True,)], done.stdout

    kill(*begun)
    # Refused for a row in the way, the state stays.
    target_db.execute("INSERT INTO item VALUES (8, 'x'), (9, 'x')")
    refused = run_command(route, "drop", "--yes")
    assert (refused.returncode, "could not create unique index" in refused.stderr) == (4, True), refused
    target_db.execute("TRUNCATE item")
    finish("drop", "--yes")
    kill(*begun)
    target_db.execute("ALTER TABLE item RENAME TO moved")
    told = run_command(route, "drop", "--yes").stderr
    assert "is not made again, because the table or its column is gone: CREATE UNIQUE INDEX" in told
    target_db.execute("ALTER TABLE moved RENAME TO item; CREATE UNIQUE INDEX by_v ON item (v)")
    kill(*begun)
    source_db.execute("ALTER PUBLICATION pub SET TABLE rest")
    finish(*begun)
    source_db.execute("ALTER PUBLICATION pub ADD TABLE item")
    kill(*again)
    source_db.execute("ALTER PUBLICATION pub DROP TABLE item")
    finish("refresh")
    source_db.execute("ALTER PUBLICATION pub SET TABLES IN SCHEMA public")
    finish("refresh", "--truncate")
    kill(*again)
    source_db.execute("DROP TABLE item")
    daemon = start_daemon(route)
    source_db.execute("CREATE TABLE item (id int PRIMARY KEY, v text); INSERT INTO item VALUES (2, 'b')")
    assert "has dropped indexes" in daemon.wait_for_event("table_waits")["reason"]
    finish("refresh")
    daemon.finish()
    check_equal(route, "item")


def test_an_index_whose_name_is_taken_is_missed(large: Route, run_command: RunCommand) -> None:
    """It is made again by its name: another index of that name, made in between, does not stand for it."""
    _index(large)
    large.target.execute("CREATE TABLE other (id int)")
    words = ("init", "--copy", "--connections", "1", "--defer-indexes")
    killed = run_command(large, *words, environ={"PARAPPLY_FAILPOINT": f"{failpoints.COPY_PART_DONE}:kill:1"})
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    large.target.execute("CREATE INDEX by_note ON other (id)")
    refused = run_command(large, *words, code=4)
    assert "an index of public.large was not made again" in refused.stderr
    large.target.execute("ALTER INDEX by_note RENAME TO of_other")
    run_command(large, *words, code=0)
    assert large.target.rows(
        "SELECT indrelid::regclass::text FROM pg_index WHERE indexrelid = 'by_note'::regclass"
    ) == [("large",)]
    check_equal(large, "large")
