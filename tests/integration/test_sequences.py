"""`sequences`: values are copied forwards only, and all that could not be is said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

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
"""


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
    done = run_command(route, "sequences", "--json")
    assert done.returncode == 1, done.stderr
    outcomes = {one["sequence_name"]: one["outcome"] for one in json.loads(done.stdout)["sequences"]}
    assert outcomes == {"item_id_seq": "moved", "O d%d_I d_seq": "moved", "down": "moved", "untouched": "equal",
                        "ahead": "ahead", "only_here": "missing", "short": "refused"}  # fmt: skip
    assert target_db.rows("INSERT INTO item (v) VALUES (1) RETURNING id") == [(51,)]
    assert target_db.rows('INSERT INTO "O d%d" (v) VALUES (1) RETURNING "I d"') == [(6,)]
    assert target_db.rows("SELECT nextval('down'), nextval('untouched')") == [(-15, 77)]
    source_db.execute("DROP SEQUENCE only_here")
    target_db.execute("ALTER SEQUENCE short NO MAXVALUE")
    again = run_command(route, "sequences", "--exact", "--ahead", "10")
    assert again.returncode == 0, again.stdout
    assert "public.ahead: 1000 -> 1" in again.stdout
    assert target_db.rows("SELECT nextval('item_id_seq'), nextval('down')") == [(61, -65)]
