"""Has the stream every row of a table? Decided from the catalogue of real servers, for all ways to make a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.driver import Session
from parapply.source import late_tables

if TYPE_CHECKING:
    from parapply.source import slot
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.pg_majors(15, 18)

_BEFORE = """
CREATE TABLE m (id int NOT NULL DEFAULT 1, p int NOT NULL DEFAULT 2, PRIMARY KEY (id, p)) PARTITION BY LIST (p);
CREATE TABLE m_between PARTITION OF m FOR VALUES IN (50) PARTITION BY RANGE (id);
CREATE TABLE apart (id int NOT NULL, p int NOT NULL, PRIMARY KEY (id, p)) PARTITION BY RANGE (id);
CREATE TABLE m_before (id int NOT NULL, p int NOT NULL, PRIMARY KEY (id, p));
CREATE SCHEMA s;
CREATE PUBLICATION pub FOR TABLE m, TABLES IN SCHEMA s;
"""
_LATER = "it may have had rows before it was published"
_REWRITTEN = "it was rewritten since it was made, as by TRUNCATE or SET LOGGED"
_THERE = "it existed before it was published, or its copy was not asked for"
#: By table: what makes it after the marks are taken, and why it waits.
_CASES: dict[str, tuple[list[str], str]] = {
    "made": (["CREATE TABLE made PARTITION OF m FOR VALUES IN (1)"], ""),
    "made_with_rows": (
        [
            "BEGIN",
            "CREATE TABLE made_with_rows PARTITION OF m FOR VALUES IN (2)",
            "INSERT INTO made_with_rows VALUES (1, 2)",
            "COMMIT",
        ],
        "",
    ),
    "sub": (
        [
            "BEGIN",
            "SAVEPOINT one",
            "CREATE TABLE sub PARTITION OF m FOR VALUES IN (3)",
            "RELEASE one",
            "COMMIT",
        ],
        "",
    ),
    "below": (["CREATE TABLE below PARTITION OF m_between FOR VALUES FROM (0) TO (5)"], ""),
    "below_new": (
        [
            "CREATE TABLE n PARTITION OF m FOR VALUES IN (60) PARTITION BY RANGE (id)",
            "CREATE TABLE below_new PARTITION OF n DEFAULT",
        ],
        "",
    ),
    "altered": (
        [
            "CREATE TABLE altered PARTITION OF m FOR VALUES IN (5)",
            "ALTER TABLE altered ALTER p SET DEFAULT 5",
            "CREATE INDEX ON altered (p)",
            "ANALYZE altered",
        ],
        "",
    ),
    "moved_in": (["CREATE TABLE moved_in (id int)", "ALTER TABLE moved_in SET SCHEMA s"], _LATER),
    "moved_at_once": (
        [
            "BEGIN",
            "CREATE TABLE moved_at_once (id int)",
            "INSERT INTO moved_at_once VALUES (1)",
            "ALTER TABLE moved_at_once SET SCHEMA s",
            "COMMIT",
        ],
        _LATER,
    ),
    "in_schema": (["CREATE TABLE s.in_schema AS SELECT 1 AS id"], ""),
    "attached": (
        ["CREATE TABLE attached (LIKE m INCLUDING ALL)", "ALTER TABLE m ATTACH PARTITION attached FOR VALUES IN (10)"],
        _LATER,
    ),
    "filled": (
        [
            "BEGIN",
            "CREATE TABLE filled (LIKE m INCLUDING ALL)",
            "INSERT INTO filled VALUES (1, 11)",
            "ALTER TABLE m ATTACH PARTITION filled FOR VALUES IN (11)",
            "COMMIT",
        ],
        _LATER,
    ),
    "plain_filled": (
        [
            "BEGIN",
            "CREATE TABLE plain_filled (id int NOT NULL, p int NOT NULL)",
            "INSERT INTO plain_filled VALUES (1, 12)",
            "ALTER TABLE m ATTACH PARTITION plain_filled FOR VALUES IN (12)",
            "COMMIT",
        ],
        _LATER,
    ),
    "selected": (
        [
            "BEGIN",
            "CREATE TABLE selected AS SELECT 1 AS id, 13 AS p",
            "ALTER TABLE selected ALTER id SET NOT NULL, ALTER p SET NOT NULL",
            "ALTER TABLE m ATTACH PARTITION selected FOR VALUES IN (13)",
            "COMMIT",
        ],
        _LATER,
    ),
    "again": (
        [
            "CREATE TABLE again PARTITION OF m FOR VALUES IN (14)",
            "ALTER TABLE m DETACH PARTITION again",
            "INSERT INTO again VALUES (1, 14)",
            "ALTER TABLE m ATTACH PARTITION again FOR VALUES IN (14)",
        ],
        _LATER,
    ),
    "below_attached": (
        [
            "CREATE TABLE below_attached PARTITION OF apart DEFAULT",
            "INSERT INTO below_attached VALUES (1, 70)",
            "ALTER TABLE m ATTACH PARTITION apart FOR VALUES IN (70)",
        ],
        _LATER,
    ),
    "m_before": (["ALTER TABLE m ATTACH PARTITION m_before FOR VALUES IN (15)"], _THERE),
    "unlogged": (
        [
            "CREATE UNLOGGED TABLE s.unlogged (id int)",
            "INSERT INTO s.unlogged VALUES (1)",
            "ALTER TABLE s.unlogged SET LOGGED",
        ],
        _REWRITTEN,
    ),
    "later": (["CREATE TABLE later (id int)", "ALTER PUBLICATION pub ADD TABLE later"], _LATER),
    "gone": (
        ["CREATE TABLE gone PARTITION OF m FOR VALUES IN (16)", "DROP TABLE gone"],
        "it is no longer on the publisher",
    ),
}
_OID = b"SELECT oid::bigint FROM pg_class WHERE relname = %s"


async def test_what_the_stream_has_whole(source_db: Database) -> None:
    """A table joins only if no row of it can lie before its first published change; all others have a reason.

    An entry of a publication that is recreated does not count for rows written in between.
    """
    source_db.execute(_BEFORE)
    async with await Session.connect(source_db.dsn, autocommit=True) as conn:
        marks = frozenset(await late_tables.marks(conn, ["pub"]))
        oids: dict[str, int] = {}
        for name, (statements, _) in _CASES.items():
            for statement in statements:
                await conn.execute(statement.encode())
                oids[name] = await _oid(conn, name) or oids.get(name, 0)
        found = {
            name: late_tables.why_not_whole(await late_tables.places(conn, ["pub"], oid), marks)
            for name, oid in oids.items()
        }
        assert found == {name: reason for name, (_, reason) in _CASES.items()}
        uncovered = await late_tables.uncovered(conn, ["pub"], [await _oid(conn, "m")], [await _oid(conn, "m")])
        assert [name for _, (_, name) in uncovered] == ["later", "in_schema", "moved_at_once", "moved_in", "unlogged"]
        await conn.execute("ALTER PUBLICATION pub DROP TABLE m; ALTER PUBLICATION pub ADD TABLE m")
        line = await late_tables.places(conn, ["pub"], oids["made"])
        assert late_tables.why_not_whole(line, marks) == _LATER


async def test_of_all_tables(source_db: Database) -> None:
    """Published from the first moment on is every table, wherever it was made, attached or moved since."""
    source_db.execute(_BEFORE + "DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES")
    async with await Session.connect(source_db.dsn, autocommit=True) as conn:
        marks = frozenset(await late_tables.marks(conn, ["pub"]))
        for name in ("made", "filled", "moved_at_once", "below_attached"):
            for statement in _CASES[name][0]:
                await conn.execute(statement.encode())
            line = await late_tables.places(conn, ["pub"], await _oid(conn, name))
            assert late_tables.why_not_whole(line, marks) == "", name
        await conn.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES")
        line = await late_tables.places(conn, ["pub"], await _oid(conn, "made"))
        assert late_tables.why_not_whole(line, marks) == _LATER


async def _oid(conn: slot.Connection, name: str) -> int:
    """Return the OID of a table, 0 if there is none."""
    row = await (await conn.execute(_OID, [name])).fetchone()
    return int(row[0]) if row else 0
