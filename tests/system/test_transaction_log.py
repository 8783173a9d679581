"""Records of single transactions, `applylog.detail = "transaction"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.applylog_schema import BatchRecord, TransactionRecord, read_record
from tests.fixtures.plain import slot_route

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

_TABLES = """
CREATE TABLE item (id text PRIMARY KEY, v int NOT NULL);
CREATE TABLE note (n int NOT NULL);
"""


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Two tables."""
    for database in (source_db, target_db):
        database.execute(_TABLES)
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item, note")
    return slot_route(source_db, target_db, new_slot, apply__commit_order="relaxed")


@pytest.mark.crash
def test_killed_in_mid_line(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """After kill -9 and a torn last line the next start closes the file, whole lines only, and loses nothing else."""
    settings = {"applylog.detail": "transaction", "applylog.directory": str(tmp_path)}
    daemon = start_daemon(route, settings=settings)
    route.source.execute("INSERT INTO note VALUES (1)")
    daemon.wait_caught_up()
    (path,) = tmp_path.iterdir()
    while not path.read_bytes():
        # No event reports when the second after which records are written is over; more of them do no harm.
        route.source.execute("INSERT INTO note VALUES (2)")
        daemon.wait_caught_up()
    daemon.kill()
    whole = path.read_bytes()
    with path.open("ab") as stream:
        stream.write(whole.splitlines()[0][:50])  # what a crash in the middle of a write leaves
    second = start_daemon(route, settings=settings)
    route.source.execute("INSERT INTO note VALUES (3)")
    second.finish()
    names = sorted(tmp_path.iterdir())
    assert [name.suffix for name in names] == [".jsonl", ".jsonl"]
    assert path.with_suffix("").read_bytes() == whole
    assert second.wait_for_event("applylog_recovered")["file"] == str(path.with_suffix(""))
    records = [read_record(line) for name in names for line in name.read_bytes().splitlines()]
    assert len({record.run for record in records}) == 2


_BIG = "INSERT INTO note SELECT generate_series(1, 30000)"


@pytest.mark.in_turn("streaming")
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
        connection.execute("INSERT INTO item VALUES ('p', 1)")
        connection.execute("PREPARE TRANSACTION 'logged'")
        connection.execute("COMMIT PREPARED 'logged'")
    daemon.finish()
    (path,) = tmp_path.iterdir()
    records = [read_record(line) for line in path.read_bytes().splitlines()]
    batches = {one.seq: one for one in records if isinstance(one, BatchRecord)}
    found = [one for one in records if isinstance(one, TransactionRecord) and one.rows]
    rows = [{table: counts.insert for table, counts in one.rows.items()} for one in found]
    assert rows == [{"public.note": 1}, {"public.note": 30_000}, {"public.item": 1}]
    assert found[1].n_changes == 30_000
    assert batches[found[1].batch_seq].mode == ("large" if streaming == "off" else "streamed")
    for batch in batches.values():
        of_it = [one for one in records if isinstance(one, TransactionRecord) and one.batch_seq == batch.seq]
        assert len(of_it) == batch.n_transactions
        assert batch.received_at <= batch.committed_at
        assert all(one.received_at > "2026" for one in of_it)
