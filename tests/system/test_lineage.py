"""Records of single transactions: what each depends on, of a stream whose dependencies are known by construction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.applylog_schema import BatchRecord, Dependency, TransactionRecord, read_record
from parapply.model import parse_lsn
from tests.fixtures.plain import lsn_of, slot_route

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

_VALUE = "never-in-the-log"
_TABLES = f"""
CREATE TABLE item (id text PRIMARY KEY, v int NOT NULL, code text UNIQUE);
CREATE TABLE note (n int NOT NULL);
CREATE TABLE parent (id int PRIMARY KEY, v int NOT NULL DEFAULT 0);
CREATE TABLE child (id int PRIMARY KEY, parent_id int NOT NULL CONSTRAINT of_parent REFERENCES parent);
CREATE TABLE flat (n int NOT NULL);
ALTER TABLE flat REPLICA IDENTITY FULL;
CREATE TABLE watched (id int PRIMARY KEY, v int NOT NULL);
INSERT INTO item VALUES ('{_VALUE}-a', 0, 'a'), ('{_VALUE}-b', 0, 'b'), ('{_VALUE}-c', 0, 'c');
INSERT INTO parent VALUES (1), (2);
"""
_TRIGGER = """
CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TRIGGER noted BEFORE INSERT ON watched FOR EACH ROW EXECUTE FUNCTION noted();
ALTER TABLE watched ENABLE ALWAYS TRIGGER noted;
"""

#: Transactions, in order, each with what it depends on: number (from 1), kind, table, name and how many changes.
_STREAM: list[tuple[str, list[tuple[int, str, str, str, int]]]] = [
    # Every table is announced: a parent before its child's table is known is not seen as one.
    ("INSERT INTO child VALUES (1, 1); INSERT INTO note VALUES (0); INSERT INTO flat VALUES (0)", []),
    (f"UPDATE item SET v = 1 WHERE id = '{_VALUE}-a'", []),
    (f"UPDATE item SET v = 1 WHERE id = '{_VALUE}-b'", []),
    # One of its two changes meets the one before the last.
    (
        f"UPDATE item SET v = 2 WHERE id = '{_VALUE}-a'; INSERT INTO note VALUES (1)",
        [(2, "key", "public.item", "", 1)],
    ),
    # Nearest first; an old key is met as well, and a row that moves moves as a whole.
    (
        f"UPDATE item SET v = 3 WHERE id = '{_VALUE}-a'; UPDATE item SET id = '{_VALUE}-d' WHERE id = '{_VALUE}-b'",
        [(4, "key", "public.item", "", 1), (3, "key", "public.item", "", 0)],
    ),
    (f"DELETE FROM item WHERE id = '{_VALUE}-d'", [(5, "key", "public.item", "", 1)]),
    # Twice in one transaction is no dependency.
    ("INSERT INTO parent VALUES (3); UPDATE parent SET v = 1 WHERE id = 3", []),
    ("INSERT INTO child VALUES (2, 3)", [(7, "foreign key", "public.child", "of_parent", 1)]),
    ("UPDATE parent SET v = 2 WHERE id = 3", [(7, "key", "public.parent", "", 1)]),
    ("DELETE FROM child WHERE id = 2", [(8, "key", "public.child", "", 1)]),
    # The child's parent is not in its old row: it may be any that goes.
    (
        "DELETE FROM parent WHERE id = 3",
        [
            (10, "foreign key", "public.parent", "of_parent", 0),
            (9, "key", "public.parent", "", 1),
            (8, "foreign key", "public.parent", "of_parent", 1),
        ],
    ),
    # The value is known to be freed because its row was written before.
    (f"UPDATE item SET code = 'x' WHERE id = '{_VALUE}-a'", [(5, "key", "public.item", "", 1)]),
    (f"UPDATE item SET code = 'y' WHERE id = '{_VALUE}-a'", [(12, "key", "public.item", "", 1)]),
    (f"UPDATE item SET code = 'x' WHERE id = '{_VALUE}-c'", [(13, "unique", "public.item", "item_code_key", 1)]),
    # Rows of a table without a key cannot be told apart: whoever changes one waits for all before it.
    ("INSERT INTO flat VALUES (1)", []),
    ("UPDATE flat SET n = 2 WHERE n = 1", [(15, "table", "public.flat", "", 0), (1, "table", "public.flat", "", 0)]),
    ("INSERT INTO flat VALUES (3)", [(16, "table", "public.flat", "", 0)]),
    # Everything before, and everything after.
    ("TRUNCATE note", [(17, "barrier", "public.note", "truncate", 0)]),
    (f"UPDATE item SET v = 9 WHERE id = '{_VALUE}-a'", [(18, "barrier", "public.note", "truncate", 0)]),
    ("INSERT INTO watched VALUES (1, 1)", [(19, "barrier", "public.watched", "serial", 0)]),
    ("INSERT INTO note VALUES (7)", [(20, "barrier", "public.watched", "serial", 0)]),
]


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Tables of every kind; foreign keys matter because the order is relaxed."""
    for database in (source_db, target_db):
        database.execute(_TABLES)
    target_db.execute(_TRIGGER)
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item, note, parent, child, flat, watched")
    return slot_route(source_db, target_db, new_slot, apply__commit_order="relaxed")


@pytest.mark.parametrize("size", [1, 1000])
def test_a_known_stream_has_its_known_dependencies(
    route: Route, start_daemon: StartDaemon, tmp_path: Path, size: int
) -> None:
    """Whether transactions are merged or not, each says what it depends on, nearest first, and no value of any row."""
    ends = []
    for statements, _ in _STREAM:
        route.source.execute(f"BEGIN; {statements}; COMMIT")
        ends.append(lsn_of(route.source))
    settings: dict[str, str | float] = {
        "applylog.detail": "transaction", "applylog.directory": str(tmp_path), "apply.max_batch_transactions": size,
    }  # fmt: skip
    daemon = start_daemon(route, settings=settings)
    daemon.wait_caught_up()
    daemon.stop()
    (path,) = tmp_path.iterdir()
    records = [read_record(line) for line in path.read_bytes().splitlines()]
    found = {one.seq: one for one in records if isinstance(one, TransactionRecord)}
    assert sorted(found)[: len(ends)] == list(range(1, len(ends) + 1))
    for seq, (end, (statements, expected)) in enumerate(zip(ends, _STREAM, strict=True), 1):
        assert parse_lsn(found[seq].end_lsn) <= end
        depends_on = [Dependency(seq=at, kind=kind, table=table, name=name, changes=changes)
                      for at, kind, table, name, changes in expected]  # fmt: skip
        assert list(found[seq].depends_on) == depends_on, f"{seq}: {statements}"
        assert found[seq].depends_on_left_out == 0
    assert _VALUE.encode() not in path.read_bytes()
    batches = [one for one in records if isinstance(one, BatchRecord)]
    assert sum(one.n_transactions for one in batches) == len(found)
    assert all(one.retry_reason == "" for one in batches)


@pytest.mark.crash
def test_killed_in_mid_line(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """After kill -9 and a torn last line the next start closes the file, whole lines only, and loses nothing else."""
    settings = {"applylog.detail": "transaction", "applylog.directory": str(tmp_path)}
    daemon = start_daemon(route, settings=settings)
    route.source.execute("INSERT INTO note VALUES (1)")
    daemon.wait_caught_up()
    (path,) = tmp_path.iterdir()
    while not path.read_bytes():
        # Nothing tells when the second is over after which records are written; more of them do no harm.
        route.source.execute("INSERT INTO note VALUES (2)")
        daemon.wait_caught_up()
    daemon.kill()
    whole = path.read_bytes()
    with path.open("ab") as stream:
        stream.write(whole.splitlines()[0][:50])  # what a crash in the middle of a write leaves
    second = start_daemon(route, settings=settings)
    route.source.execute("INSERT INTO note VALUES (3)")
    second.wait_caught_up()
    second.stop()
    names = sorted(tmp_path.iterdir())
    assert [name.suffix for name in names] == [".jsonl", ".jsonl"]
    assert path.with_suffix("").read_bytes() == whole
    assert second.wait_for_event("applylog_recovered")["file"] == str(path.with_suffix(""))
    records = [read_record(line) for name in names for line in name.read_bytes().splitlines()]
    assert len({record.run for record in records}) == 2


_BIG = "INSERT INTO note SELECT generate_series(1, 30000)"


@pytest.mark.parametrize("streaming", ["off", "parallel"])
def test_what_runs_alone_says_so(route: Route, start_daemon: StartDaemon, tmp_path: Path, streaming: str) -> None:
    """A large transaction, in pieces or while in progress, and one that is prepared: a record each."""
    settings: dict[str, str | float] = {
        "applylog.detail": "transaction",
        "applylog.directory": str(tmp_path),
        "source.streaming": streaming,
        "source.two_phase": "true",
        "apply.stream_start_bytes": 0,
    }
    name = route.source.rows("SELECT quote_ident(current_database())")[0][0]
    route.source.execute(f"ALTER DATABASE {name} SET logical_decoding_work_mem = '64kB'")
    route.source.execute("INSERT INTO note VALUES (0)")
    daemon = start_daemon(route, settings=settings)
    route.source.execute(_BIG)
    daemon.wait_caught_up()
    with route.source.connect() as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO item VALUES ('p', 1, 'p')")
        connection.execute("PREPARE TRANSACTION 'lineage'")
        connection.execute("COMMIT PREPARED 'lineage'")
    daemon.wait_caught_up()
    daemon.stop()
    (path,) = tmp_path.iterdir()
    records = [read_record(line) for line in path.read_bytes().splitlines()]
    batches = {one.seq: one for one in records if isinstance(one, BatchRecord)}
    found = [one for one in records if isinstance(one, TransactionRecord) and one.rows]
    rows = [{table: counts.insert for table, counts in one.rows.items()} for one in found]
    assert rows == [{"public.note": 1}, {"public.note": 30_000}, {"public.item": 1}]
    assert found[1].n_changes == 30_000
    assert [(at.seq, at.kind, at.name) for at in found[1].depends_on] == [(found[1].seq - 1, "barrier", "large")]
    assert batches[found[1].batch_seq].mode == ("large" if streaming == "off" else "streamed")
    alone = [at.name for one in records if isinstance(one, TransactionRecord) for at in one.depends_on]
    assert "two-phase" in alone
    for batch in batches.values():
        of_it = [one for one in records if isinstance(one, TransactionRecord) and one.batch_seq == batch.seq]
        assert len(of_it) == batch.n_transactions
        assert batch.received_at <= batch.committed_at
        assert all(one.received_at > "2026" for one in of_it)
