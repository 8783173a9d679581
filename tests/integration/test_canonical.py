"""The queries of a comparison, as a server plans and answers them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from parapply.config import load_config
from parapply.copy.parts import Part
from parapply.copy.published import PublishedTable
from parapply.verify.canonical import Ranges, summary
from parapply.verify.command import VerifyAgain, VerifyOptions, VerifyResult, ends_at_rest
from tests.fixtures.databases import Database, drop_database

if TYPE_CHECKING:
    from psycopg import sql

    from parapply.config import Config

_PART = Part(schema="public", name="t")


def _table(type_oid: int) -> PublishedTable:
    return PublishedTable(
        oid=7, schema="public", name="t", columns=("id", "v"), types=(type_oid, 25), modifiers=(-1, -1),
        row_filter="", key=("id",), leaves=(),
    )  # fmt: skip


def _ask(database: Database, query: sql.Composed, before: str = "") -> list[tuple[object, ...]]:
    with database.connect() as connection:
        return database.rows(before + query.as_string(connection))


@pytest.mark.parametrize("number", [0, 2])
def test_a_range_is_found_by_the_key_before_the_server_has_statistics(target_db: Database, number: int) -> None:
    """The first and the last range of a table that was only just copied are found by its key's index.

    Clients wait for such a query behind a cut-over's fence.
    """
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text) WITH (autovacuum_enabled = off)")
    target_db.execute("INSERT INTO t SELECT g, '' FROM generate_series(1, 200000) g")
    ranges = Ranges(count=3, column="id", type_name="int8", bounds=("100", "199900"))
    plan = "\n".join(
        [str(line) for (line,) in _ask(target_db, summary(_table(23), _PART, ranges, "", [number]), "EXPLAIN ")]
    )
    assert "t_pkey" in plan
    assert "Seq Scan" not in plan


@pytest.mark.parametrize(
    ("oid", "name", "ordered", "values"),
    [
        (20, "bigint", "int8", ["-9223372036854775808", "0", "9223372036854775807"]),
        (21, "smallint", "int8", ["-32768", "0", "32767"]),
        (1082, "date", "date", ["-infinity", "2026-01-01", "infinity"]),
        (1114, "timestamp", "timestamp", ["-infinity", "2026-01-01", "infinity"]),
        (1184, "timestamptz", "timestamptz", ["-infinity", "2026-01-01", "infinity"]),
        (2950, "uuid", "uuid", [f"{c * 8}-{c * 4}-{c * 4}-{c * 4}-{c * 12}" for c in "08f"]),
    ],
)
def test_the_ends_of_a_type_are_in_a_range(
    target_db: Database, oid: int, name: str, ordered: str, values: list[str]
) -> None:
    """The least and the largest value of a key are in the first and the last range."""
    target_db.execute(f"CREATE TABLE t (id {name} PRIMARY KEY, v text)")
    target_db.execute("".join([f"INSERT INTO t VALUES ('{value}', 'v');" for value in values]))
    ranges = Ranges(count=3, column="id", type_name=ordered, bounds=tuple(values[1:]))
    for number in range(3):
        assert [row[:2] for row in _ask(target_db, summary(_table(oid), _PART, ranges, "", [number]))] == [(number, 1)]


@pytest.mark.pg_majors(15)  # one version: the functions are old
def test_databases_of_different_encodings_are_compared(source_db: Database) -> None:
    """Texts of UTF-8 and of LATIN1 are equal if their characters are, as keys, in slices by hash, and without a key."""
    name = f"{source_db.dbname}_latin1"
    source_db.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    target_db = Database(dbname=name, server=source_db.server)
    try:
        for database in (source_db, target_db):
            database.execute("CREATE TABLE keyed (k text PRIMARY KEY, v text); CREATE TABLE loose (v text)")
            database.execute(r"INSERT INTO keyed SELECT U&'\00E9' || g, U&'\00FC' FROM generate_series(1, 21000) AS g")
            database.execute(r"INSERT INTO loose VALUES (U&'\00E4'), ('a'); ANALYZE")
        source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        target_db.execute(r"UPDATE keyed SET v = 'u' WHERE k = U&'\00E97'; DELETE FROM loose WHERE v <> 'a'")
        flags = {"source.dsn": source_db.dsn, "target.dsn": target_db.dsn, "source.slot": "s",
                 "source.publications": ("pub",)}  # fmt: skip
        found = asyncio.run(_compared(load_config(None, (), flags, {})))
    finally:
        drop_database(target_db)
    assert [[(one.kind, one.key) for one in verdict.found] for verdict in found.verdicts] == [
        [("different", ("é7",))], [("missing", ("ä",))],
    ]  # fmt: skip


async def _compared(config: Config) -> VerifyResult:
    earlier = VerifyResult(verdicts=[], at_lsn=0, pause_s=0.0, tables=[])
    async with ends_at_rest(config, VerifyOptions(connections=1)) as ends:
        return await ends.comparison(VerifyAgain(earlier, 60.0), 0)
