"""Cut-over: a transaction that the source has committed or prepared after the fence is late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.config import load_config
from parapply.cutover.command import late_count
from parapply.model import parse_lsn
from parapply.source.slot import inspect
from tests.fixtures.databases import encoded_database
from tests.fixtures.two_phase import decide, write_prepared
from tests.integration.test_slot import new_name, on_source

if TYPE_CHECKING:
    from parapply.source.slot import Connection
    from tests.fixtures.databases import Database


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize(
    ("outcome", "is_applied", "n_late"),
    [
        ("", False, 1),
        ("COMMIT", False, 1),
        ("ROLLBACK", False, 0),
        ("", True, 0),
        ("COMMIT", True, 1),
        ("ROLLBACK", True, 1),
    ],
)
def test_a_prepared_transaction_is_late(source_db: Database, outcome: str, n_late: int, *, is_applied: bool) -> None:
    """With two_phase its changes come without a Begin; its slot is dropped at the end, and nothing else has them.

    Of one whose PREPARE is applied only the outcome is late.
    """
    source_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    name = new_name()
    source_db.rows(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput', false, true)")
    flags = {"source.dsn": source_db.dsn, "target.dsn": "dbname=none", "source.slot": name,
             "source.publications": ("pub",), "source.two_phase": True}  # fmt: skip
    config = load_config(flags=flags, environ={})
    insert_lsn = "SELECT pg_current_wal_insert_lsn()::text"
    low_lsn = parse_lsn(source_db.rows(insert_lsn)[0][0])
    write_prepared(source_db, "late", "INSERT INTO t VALUES (1)")
    if is_applied:
        low_lsn = parse_lsn(source_db.rows(insert_lsn)[0][0])
    if outcome:
        decide(source_db, "late", outcome)

    async def count(conn: Connection) -> int:
        return await late_count(conn, config, low_lsn)

    try:
        assert on_source(source_db.dsn, count) == n_late
    finally:
        if not outcome:
            decide(source_db, "late", "ROLLBACK")
        source_db.rows(f"SELECT pg_drop_replication_slot('{name}')")


def test_bytes_of_no_encoding_are_counted(source_db: Database) -> None:
    """A publisher in SQL_ASCII would refuse to send them in UTF8, while no client can write (T-61)."""
    with encoded_database(source_db, "SQL_ASCII") as source:
        source.execute("CREATE TABLE t (v text); CREATE PUBLICATION pub FOR TABLE t")
        name = new_name()
        source.rows(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
        flags = {"source.dsn": source.dsn, "target.dsn": "dbname=none", "source.slot": name,
                 "source.publications": ("pub",)}  # fmt: skip
        config = load_config(flags=flags, environ={})
        source.execute("INSERT INTO t VALUES (convert_from('\\xe9', 'SQL_ASCII'))")

        async def count(conn: Connection) -> tuple[int, str]:
            n_late = await late_count(conn, config, 1)
            # Of the session others ask for texts.
            return n_late, (await inspect(conn, name)).database

        assert on_source(source.dsn, count) == (1, source.dbname)
