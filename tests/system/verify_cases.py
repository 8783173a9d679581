"""Tables of a comparison, and what is damaged on the target: every kind of difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fixtures.plain import FAST
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

TABLES = r"""
CREATE TABLE keyed (a int, "b c" text, v text, at timestamptz, f float8, PRIMARY KEY (a, "b c"));
CREATE TABLE loose (n int, v text, b bool DEFAULT true, c char(3) DEFAULT 'x', i inet DEFAULT '10.0.0.1',
                    s text DEFAULT U&'a\00A0b', at timestamptz DEFAULT '2026-11-28 01:02:03Z');
CREATE TABLE part_root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE part_1 PARTITION OF part_root FOR VALUES FROM (0) TO (500);
CREATE TABLE part_2 PARTITION OF part_root FOR VALUES FROM (500) TO (1000);
"""
ROWS = """
INSERT INTO keyed SELECT i, 'k' || i, CASE WHEN i % 3 > 0 THEN 'v' || i END, now(), i / 3.0
  FROM generate_series(1, 500) AS i;
INSERT INTO loose SELECT i % 100, CASE i % 4 WHEN 0 THEN NULL WHEN 1 THEN '' WHEN 2 THEN 'a,"b' ELSE E'\\\\' END
  FROM generate_series(1, 400) AS i;
INSERT INTO part_root SELECT i, 'v' FROM generate_series(1, 999) AS i;
"""
DAMAGE = """
DELETE FROM keyed WHERE a = 7;
INSERT INTO keyed VALUES (9001, 'extra', NULL, now(), 0);
UPDATE keyed SET v = NULL WHERE a = 11;
UPDATE keyed SET v = '' WHERE a = 12;
DELETE FROM loose WHERE ctid IN (SELECT ctid FROM loose WHERE v IS NULL ORDER BY n LIMIT 1);
INSERT INTO loose VALUES (1, 'a,"b');
UPDATE part_root SET v = 'w' WHERE id = 700;
"""
PUBLICATION = "CREATE PUBLICATION pub FOR TABLE keyed, loose, part_root WITH (publish_via_partition_root)"


def damaged(source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon) -> Route:
    """Copy the tables, have a daemon follow, and damage the target."""
    source_db.execute(TABLES + ROWS + PUBLICATION)
    target_db.execute(TABLES)
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", code=0)
    start_daemon(route).wait_for_event("source_connected")
    target_db.execute(DAMAGE)
    return route
