"""The proof of the proofs: the bank's checks are silent on a right target and speak on each kind of wrong one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.oracles import check_transactions
from tests.faults.side_load import create_tables
from tests.fixtures.builtin import BuiltinSubscription
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from tests.fixtures.databases import Database


def test_the_bank_accepts_the_builtin_subscription(source_db: Database, target_db: Database) -> None:
    """A subscription of PostgreSQL itself breaks no rule, in no snapshot and not at the end."""
    create_bank(source_db, target_db)
    subscription = BuiltinSubscription(source_db, target_db)
    with BankReader(target_db) as reader:
        with BankLoad(source_db, seed=1, pace_s=0.001) as load:
            load.wait_for_more(200)
        subscription.wait_caught_up()
        reader.wait_for_snapshot()
    check_bank(source_db, target_db, load)


def test_the_bank_finds_damage(source_db: Database, target_db: Database) -> None:
    """A transaction lost, doubled, torn or invented, and money out of nowhere, each fails the check of the end."""
    create_bank(source_db, target_db)
    with BankLoad(source_db, seed=1, pace_s=0) as load:
        load.wait_for_more(20)
    for damage, oracle in (
        ("INSERT INTO evt SELECT * FROM evt WHERE txid = (SELECT min(txid) FROM evt)", "O2"),
        ("DELETE FROM evt WHERE ctid = (SELECT ctid FROM evt LIMIT 1)", "O2"),
        ("DELETE FROM xfer WHERE id = (SELECT max(id) FROM xfer)", "O1"),
        ("INSERT INTO xfer VALUES (-1, 1, 2, 0)", "O1"),
        ("UPDATE acct SET bal = bal + 1 WHERE id = 1", "acct|O3"),
    ):
        _copy(source_db, target_db)
        check_bank(source_db, target_db, load)
        target_db.execute(damage)
        with pytest.raises(AssertionError, match=oracle):
            check_bank(source_db, target_db, load)


def _copy(source_db: Database, target_db: Database) -> None:
    """Give the target the rows of the source."""
    for table in ("acct", "xfer", "evt"):
        target_db.execute(f"TRUNCATE {table}")
        with source_db.connect() as source, target_db.connect() as target:
            reading, writing = source.cursor(), target.cursor()
            with reading.copy(f"COPY {table} TO STDOUT".encode()) as out:
                rows = list(out)
            with writing.copy(f"COPY {table} FROM STDIN".encode()) as into:
                for row in rows:
                    into.write(row)


def test_the_reader_finds_a_state_that_never_was(source_db: Database, target_db: Database) -> None:
    """A snapshot with a torn transaction, or with a client's later transaction before its earlier one, is noted."""
    create_bank(source_db, target_db)
    for damage, rule in (
        ("UPDATE acct SET bal = bal + 1 WHERE id = 1", "O3: money"),
        ("UPDATE acct SET bal = bal + CASE id WHEN 1 THEN 5 ELSE -5 END WHERE id IN (1, 2)", "O3: an account"),
        ("UPDATE acct SET v = v + 1 WHERE id = 1", "O3: updates"),
        ("INSERT INTO xfer VALUES (2, 1, 1, 5); INSERT INTO evt VALUES (2, 0), (2, 1), (2, 2)", "O6"),
    ):
        _copy(source_db, target_db)
        with pytest.raises(AssertionError, match=rule):
            _read_around(target_db, damage)


def test_o4_tells_pieces_of_one_target_transaction_from_two(source_db: Database, target_db: Database) -> None:
    """O4: rows behind savepoints, as streamed transactions write them, are not torn; rows of two transactions are.

    The oracle looks at small transactions and at large ones; a marker sees the same rows on both sides.
    """
    create_tables(source_db, target_db)
    small = [
        "INSERT INTO xfer VALUES ({0}, 1, 2, 0)",
        "INSERT INTO evt VALUES ({0}, 0)",
        "INSERT INTO evt VALUES ({0}, 1)",
    ]
    large = [
        "INSERT INTO bulk VALUES ({0}, 1, '')",
        "INSERT INTO bulk VALUES ({0}, 2, '')",
        "INSERT INTO bulk_txn VALUES ({0}, 2)",
    ]
    for statements in (small, large):
        source_db.execute("; ".join(["BEGIN", *statements, "COMMIT"]).replace("{0}", "1"))
        target_db.execute("; SAVEPOINT piece; ".join(["BEGIN", *statements, "COMMIT"]).replace("{0}", "1"))
    assert source_db.rows("SELECT h()") == target_db.rows("SELECT h()")
    assert not check_transactions(source_db, target_db)
    for statements in (small, large):
        source_db.execute("; ".join(["BEGIN", *statements, "COMMIT"]).replace("{0}", "2"))
        target_db.execute("; COMMIT; BEGIN; ".join(["BEGIN", *statements, "COMMIT"]).replace("{0}", "2"))
    found = check_transactions(source_db, target_db)
    assert [found.lost, found.duplicated, found.torn, found.other] == [0, 0, 2, 0], found.texts
    assert [text[:8] for text in found.texts] == ["O4 xfer:", "O4 bulk_"]


def _read_around(target: Database, damage: str) -> None:
    """Read before and after a statement."""
    with BankReader(target) as reader:
        reader.wait_for_snapshot()
        reader.check()
        target.execute(damage)
        reader.wait_for_snapshot()
