"""`sequences`: values are copied forwards only, and all that could not be is said."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.sequences import Value, _set
from parapply.target.session.lease import SEQUENCES_LOCK_CLASS
from tests.fixtures.plain import foreign_transaction
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.databases import Database

_BOTH = """
CREATE TABLE item (id bigint GENERATED ALWAYS AS IDENTITY, v int);
CREATE TABLE "O d%d" ("I d" serial, v int);
CREATE SEQUENCE down INCREMENT -5 MINVALUE -1000 MAXVALUE 0;
CREATE SEQUENCE untouched START 77;
CREATE SEQUENCE ahead;
CREATE SEQUENCE short;
CREATE SEQUENCE round MAXVALUE 9 CYCLE;
CREATE SEQUENCE "round down" INCREMENT -1 MINVALUE -9 CYCLE;
"""


@pytest.mark.parametrize(("step", "is_kept"), [(1, True), (-1, True), (None, False)])
async def test_a_value_drawn_since_the_look_stays(target_db: Database, step: int | None, *, is_kept: bool) -> None:
    """Both sides may draw, and a daemon and a command may carry at once: only --exact goes back."""
    sign = step or 1
    target_db.execute(f"CREATE SEQUENCE s INCREMENT {sign} MINVALUE -9999 MAXVALUE 9999 START {1000 * sign}")
    wanted = {("public", "s"): Value(last_value=50 * sign, is_called=True)}
    async with await psycopg.AsyncConnection.connect(target_db.dsn, autocommit=True) as conn:
        assert await _set(conn, wanted, {("public", "s"): step}, list(wanted)) == ({} if is_kept else wanted)
    assert target_db.rows("SELECT abs(last_value) FROM s") == [(1000 if is_kept else 50,)]


def test_one_session_at_a_time_carries(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """Where one waits for a lock with a value that it has read, no other sets a newer one in between."""
    for database in (source_db, target_db):
        database.execute("CREATE SEQUENCE s")
    source_db.execute("SELECT setval('s', 50)")
    route, done = Route(source=source_db, target=target_db), []
    thread = threading.Thread(target=lambda: done.append(run_command(route, "sequences")))
    with foreign_transaction(target_db, "ALTER SEQUENCE s OWNED BY NONE"):
        thread.start()
        target_db.wait_until(
            "SELECT EXISTS (SELECT FROM pg_locks AS w JOIN pg_locks AS l USING (pid) WHERE NOT w.granted"
            " AND w.relation = 's'::regclass AND l.locktype = 'advisory'"
            f" AND l.classid::bigint = {SEQUENCES_LOCK_CLASS})"
        )
    thread.join()
    assert done[0].returncode == 0, done
    assert target_db.rows("SELECT last_value FROM s") == [(50,)]
    assert target_db.rows("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid::bigint ="
                          f" {SEQUENCES_LOCK_CLASS}") == [(0,)]  # fmt: skip


@pytest.mark.pg_majors(15, 16, 18)
def test_values_move_forwards(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """The next value on the target is one that the source never gave; nothing goes back without --exact."""
    for database in (source_db, target_db):
        database.execute(_BOTH)
    source_db.execute("INSERT INTO item (v) SELECT 1 FROM generate_series(1, 50);"
                      'INSERT INTO "O d%d" (v) SELECT 1 FROM generate_series(1, 5);'
                      "SELECT nextval('down') FROM generate_series(1, 3); CREATE SEQUENCE only_here;"
                      "SELECT setval('short', 50)")  # fmt: skip
    target_db.execute("SELECT setval('ahead', 1000); ALTER SEQUENCE short MAXVALUE 10")
    route = Route(source=source_db, target=target_db)
    dry = run_command(route, "sequences", "--dry-run")
    assert "4 would move" in dry.stdout
    done = run_command(route, "sequences", "--json", code=1)
    outcomes = {one["sequence_name"]: one["outcome"] for one in json.loads(done.stdout)["sequences"]}
    assert outcomes == {"item_id_seq": "moved", "O d%d_I d_seq": "moved", "down": "moved", "untouched": "equal",
                        "ahead": "ahead", "only_here": "missing", "short": "refused", "round": "equal",
                        "round down": "equal"}  # fmt: skip
    assert target_db.rows("INSERT INTO item (v) VALUES (1) RETURNING id") == [(51,)]
    assert target_db.rows('INSERT INTO "O d%d" (v) VALUES (1) RETURNING "I d"') == [(6,)]
    assert target_db.rows("SELECT nextval('down'), nextval('untouched')") == [(-15, 77)]
    source_db.execute("DROP SEQUENCE only_here")
    target_db.execute("ALTER SEQUENCE short NO MAXVALUE")
    again = run_command(route, "sequences", "--exact", "--ahead", "10", code=0)
    assert "public.ahead: 1000 -> 11" in again.stdout
    assert target_db.rows("SELECT nextval('item_id_seq'), nextval('down')") == [(61, -65)]
    # None of its values was drawn, and the first ones may be.
    assert target_db.rows("SELECT nextval('untouched')") == [(87,)]
    # No further than the end where a sequence begins again.
    assert target_db.rows("SELECT nextval('round'), nextval('\"round down\"')") == [(9, -9)]
