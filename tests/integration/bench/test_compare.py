"""Tables that the benchmark takes for equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.compare import compare

if TYPE_CHECKING:
    from tests.fixtures.databases import Database

TABLE = """
CREATE TABLE "a ""%s"" {{}}" (t text, "whole row" int, at timestamptz DEFAULT '2026-01-02 03:04:05.678901+00');
CREATE TABLE other (id int PRIMARY KEY);
"""


def equal_tables(source_db: Database, target_db: Database) -> list[bool]:
    """Compare all tables of two databases and return the verdicts, in the order of the names."""
    return [table.is_equal for table in compare(source_db.dsn, target_db.dsn, "everything")]


def test_the_comparison_sees_rows_and_nothing_else(source_db: Database, target_db: Database) -> None:
    """Order and time zone do not matter; a changed value, a missing row and a row held twice do."""
    source_db.execute(TABLE + "CREATE PUBLICATION everything FOR ALL TABLES")
    target_db.execute(TABLE)
    name = '"a ""%s"" {{}}"'
    source_db.execute(f"INSERT INTO {name} VALUES ('x', 1), ('y', 2), ('y', 2), (NULL, NULL)")
    target_db.execute(f"INSERT INTO {name} VALUES (NULL, NULL), ('y', 2), ('y', 2), ('x', 1)")
    target_db.execute(f"ALTER DATABASE {target_db.dbname} SET timezone = 'Asia/Kathmandu'")
    assert equal_tables(source_db, target_db) == [True, True]
    # As many rows as before: only the checksum differs.
    target_db.execute(f"UPDATE {name} SET t = 'x', \"whole row\" = 1 WHERE ctid = '(0,2)'")
    assert equal_tables(source_db, target_db) == [False, True]
    source_db.execute("INSERT INTO other VALUES (1)")
    assert equal_tables(source_db, target_db) == [False, False]
