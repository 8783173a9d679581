"""Cut-over: a transaction that the source has committed or prepared after the fence is late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.config import load_config
from parapply.cutover.command import late_count
from parapply.model import parse_lsn
from tests.fixtures.two_phase import decide, write_prepared
from tests.integration.test_slot import new_name, on_source

if TYPE_CHECKING:
    from parapply.source import slot
    from tests.fixtures.databases import Database


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("outcome", ["prepared", "committed"])
def test_a_prepared_transaction_is_late(source_db: Database, outcome: str) -> None:
    """With two_phase its changes come without a Begin; its slot is dropped at the end, and nothing else has them."""
    source_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    name = new_name()
    source_db.rows(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput', false, true)")
    flags = {"source.dsn": source_db.dsn, "target.dsn": "dbname=none", "source.slot": name,
             "source.publications": ("pub",), "source.two_phase": True}  # fmt: skip
    config = load_config(flags=flags, environ={})
    low_lsn = parse_lsn(source_db.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])
    write_prepared(source_db, "late", "INSERT INTO t VALUES (1)")
    if outcome == "committed":
        decide(source_db, "late", "COMMIT")

    async def count(conn: slot.Connection) -> int:
        return await late_count(conn, config, low_lsn)

    try:
        assert on_source(source_db.dsn, count) == 1
    finally:
        if outcome == "prepared":
            decide(source_db, "late", "ROLLBACK")
        source_db.rows(f"SELECT pg_drop_replication_slot('{name}')")
