"""A publication of all tables that leaves some out (PostgreSQL 19), as the entries of publications are read.

Older servers have no such row, so a view with the column of 19 stands before the catalogue: the query for 19 is the one
that runs, on real tables. Sources: PostgreSQL 19, release notes ("EXCEPT clause") and `pg_publication_rel.prexcept`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from parapply.driver import Session
from parapply.source import late_tables, publishing

if TYPE_CHECKING:
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.pg_majors(15, 18)

_TABLES = """
CREATE TABLE kept (id int PRIMARY KEY);
CREATE TABLE aside (id int PRIMARY KEY);
CREATE TABLE tree (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE tree_1 PARTITION OF tree FOR VALUES FROM (0) TO (10);
CREATE TABLE tree_2 PARTITION OF tree FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);
CREATE TABLE tree_2_1 PARTITION OF tree_2 DEFAULT;
CREATE PUBLICATION everything FOR ALL TABLES;
CREATE PUBLICATION named FOR TABLE kept;
CREATE SCHEMA nineteen;
CREATE TABLE nineteen.excepted (oid oid PRIMARY KEY, prrelid regclass);
CREATE VIEW nineteen.pg_publication_rel AS
SELECT oid, xmin, prpubid, prrelid, prqual, prattrs, false AS prexcept FROM pg_catalog.pg_publication_rel
UNION ALL
SELECT e.oid, e.xmin, p.oid, e.prrelid, NULL, NULL, true FROM nineteen.excepted AS e, pg_catalog.pg_publication AS p
 WHERE p.puballtables"""
_VERSION = 190000


@pytest.fixture
async def publisher(source_db: Database, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401  an async generator
    """A session whose entries are read as of 19, on tables of which none is left out yet."""
    source_db.execute(_TABLES)
    text = late_tables.entries(_VERSION).replace("pg_catalog.pg_publication_rel", "nineteen.pg_publication_rel")
    monkeypatch.setattr(late_tables, "entries", lambda version_num: text)
    conn = await Session.connect(source_db.dsn, autocommit=True)
    async with conn:
        yield conn


def test_only_servers_with_the_column_are_asked_for_it() -> None:
    """Servers before 19 are asked what they were asked before."""
    assert "prexcept" not in late_tables.entries(180004)
    assert "prexcept" in late_tables.entries(_VERSION)


async def _published(conn: Any, names: list[str]) -> set[str]:  # noqa: ANN401  a session
    """Return the tables of the test that are published, and in the same way as those that `uncovered` lists."""
    of_stream = await publishing.published(conn, names, None)
    of_leaves = await late_tables.uncovered(conn, names, [], [])
    named = await late_tables.names(conn, of_stream)
    shown = {name for schema, name in named.values() if schema == "public"}
    assert {name for _, (schema, name) in of_leaves if schema == "public"} == shown
    return shown


async def test_tables_that_are_left_out_are_not_published(source_db: Database, publisher: Any) -> None:  # noqa: ANN401
    """Nor is a partition below one, unless another publication has the table."""
    everything = {"kept", "aside", "tree_1", "tree_2_1"}
    assert await _published(publisher, ["everything"]) == everything
    source_db.execute("INSERT INTO nineteen.excepted VALUES (1, 'aside'), (2, 'tree_2'), (3, 'kept')")
    assert await _published(publisher, ["everything"]) == {"tree_1"}
    assert await _published(publisher, ["everything", "named"]) == {"tree_1", "kept"}
    source_db.execute("INSERT INTO nineteen.excepted VALUES (4, 'tree')")
    assert await _published(publisher, ["everything"]) == set()


async def test_a_table_that_was_left_out_is_not_taken_as_published_all_the_time(
    source_db: Database,
    publisher: Any,  # noqa: ANN401  a session
) -> None:
    """One that was made since has all its rows only under the same list, and only if the list does not name it."""

    async def why(name: str) -> str:
        ((oid,),) = source_db.rows(f"SELECT '{name}'::regclass::oid::bigint")
        return late_tables.why_not_whole(await late_tables.places(publisher, ["everything"], oid), known)

    source_db.execute("INSERT INTO nineteen.excepted VALUES (1, 'aside')")
    known = await late_tables.marks(publisher, ["everything"])
    source_db.execute("CREATE TABLE made (id int PRIMARY KEY)")
    assert await why("made") == ""
    source_db.execute("INSERT INTO nineteen.excepted VALUES (2, 'made')")
    assert "it may have had rows before it was published" in await why("made")
    # The list names it no longer, and is another one than at the marks.
    source_db.execute("UPDATE nineteen.excepted SET prrelid = 'tree' WHERE prrelid = 'made'::regclass")
    assert "it may have had rows before it was published" in await why("made")


async def test_a_change_of_the_list_leaves_the_way_of_other_tables(
    source_db: Database,
    publisher: Any,  # noqa: ANN401  a session
) -> None:
    """Tables that stay published need no copy."""
    ((oid,),) = source_db.rows("SELECT 'kept'::regclass::oid::bigint")
    before = (await publishing.published(publisher, ["everything"], None))[oid]
    source_db.execute("INSERT INTO nineteen.excepted VALUES (1, 'aside')")
    after = await publishing.published(publisher, ["everything"], None)
    assert after[oid] == before
