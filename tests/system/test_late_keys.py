"""Hot rows: batches that share some keys run side by side, and only the changes of those keys wait for their turn.

A test that needs a batch in flight holds it by a row of `hold` that another session has locked on the target.
Tables of a batch are applied in the order of their first change, so the changes of `hold` come first.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from parapply.applylog_schema import LATE_ROWS_LIMIT, BatchRecord, read_record
from tests.fixtures.pair import SECRET, Pair, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED, foreign_transaction, wait_for_replies, walsender_pid, watermark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, StartDaemon

__all__ = ["pair"]

_TABLES = """
CREATE TABLE hold (id int PRIMARY KEY, v int NOT NULL); INSERT INTO hold SELECT n, 0 FROM generate_series(1, 9) AS n;
CREATE TABLE hot (id int PRIMARY KEY, n int NOT NULL, big text); ALTER TABLE hot ALTER big SET STORAGE EXTERNAL;
INSERT INTO hot SELECT n, 0, repeat('x', 5000) FROM generate_series(1, 3) AS n;
CREATE TABLE own (id int PRIMARY KEY, v int NOT NULL); INSERT INTO own SELECT n, 0 FROM generate_series(1, 400) AS n;
CREATE TABLE door (id numeric PRIMARY KEY, v int NOT NULL);
CREATE TABLE history (hot int NOT NULL, delta int NOT NULL);
"""
_N_TRANSACTIONS = 400
#: One row in three is hot; the keys of `door` come, change, go and come again, 1.0 is 1.00 (T-21).
_LOAD = f"""
DO $$ BEGIN FOR i IN 1..{_N_TRANSACTIONS} LOOP
  IF i = 1 THEN UPDATE hold SET v = v + 1 WHERE id = 1; END IF;
  UPDATE hot SET n = n + i WHERE id = i % 3 + 1;
  UPDATE own SET v = i WHERE id = i;
  INSERT INTO history VALUES (i % 3 + 1, i);
  CASE i % 5
    WHEN 0 THEN INSERT INTO door VALUES (1.0, i);
    WHEN 1 THEN UPDATE door SET v = i WHERE id = 1;
    WHEN 2 THEN UPDATE door SET id = 1.00 WHERE id = 1;
    WHEN 3 THEN DELETE FROM door WHERE id = 1; INSERT INTO door VALUES (1, i);
    ELSE DELETE FROM door;
  END CASE;
  IF i % 50 = 0 THEN UPDATE hot SET big = repeat(i::text, 2000) WHERE id = 1; END IF;
COMMIT; END LOOP; END $$
"""
#: As in TPC-B: what the hot rows hold is the sum of the history, in every state of the source.
_IS_WHOLE = "SELECT (SELECT sum(n) FROM hot) = (SELECT coalesce(sum(delta), 0) FROM history)"
_LOCK = "SELECT FROM hold WHERE id = {} FOR UPDATE"
_HOT = "UPDATE hot SET n = n + 1 WHERE id = {}"
_OWN = "UPDATE own SET v = v + 1 WHERE id = {}"
_WAITS_ITS_TURN = (
    "SELECT count(*) >= {} FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%' AND state = 'idle in transaction'"
)
#: Workers that wait for a lock in a statement on a table.
_BLOCKED = (
    "SELECT {} FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'parapply worker%'"
    " AND wait_event_type = 'Lock' AND query LIKE '%\"{}\"%'"
)


def _with_hold(number: int, change: str, *, first: str = "") -> str:
    return f"BEGIN; {first}; UPDATE hold SET v = v + 1 WHERE id = {number}; {change}; COMMIT"


def _records(directory: Path) -> list[BatchRecord]:
    records = [read_record(line) for path in directory.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    return sorted([record for record in records if isinstance(record, BatchRecord)], key=lambda record: record.seq)


@pytest.mark.in_turn("workers", "size")
@pytest.mark.parametrize(("workers", "size"), [(1, 1), (8, 1), (8, 7)])
def test_hot_rows_neither_serialise_nor_repeat(pair: Pair, tmp_path: Path, workers: int, size: int) -> None:
    """All rows arrive, each state seen is one of the source's, and no batch is repeated, whatever the workers do."""
    pair.create(_TABLES)
    directory = tmp_path / "log"
    with foreign_transaction(pair.target, "SELECT FROM hold WHERE id = 1 FOR UPDATE"):
        pair.write(_LOAD)
        settings: dict[str, str | float] = {"apply.max_batch_transactions": size, "applylog.directory": str(directory)}
        daemon = pair.start(workers=workers, settings=settings)
        pair.target.wait_until(WORKER_IS_BLOCKED)
        # Whatever hot row the later ones have, with their other changes done they wait for their turn.
        pair.target.wait_until(_WAITS_ITS_TURN.format(workers - 1))

    def look() -> None:
        daemon.check_running()
        assert pair.target.rows(_IS_WHOLE) == [(True,)], "a transaction is torn"

    pair.route.wait_caught_up(check=look)
    daemon.stop()
    pair.check_equal()
    records = _records(directory)
    assert sum(record.n_transactions for record in records) == _N_TRANSACTIONS
    assert {(record.attempts, record.mode) for record in records} == {(1, "set")}
    late = [record for record in records if record.late_keys]
    # One worker begins with a batch when its holders have committed: then nothing of it is late.
    assert bool(late) is (workers > 1)
    # As many as there are workers were in flight behind the one that was held; every third has the same hot row.
    assert {record.seq for record in late} >= set(range(4, workers + 1))
    for record in late:
        assert record.waited_for is not None
        assert record.waited_for.seq < record.seq
        assert (record.waited_for.kind, record.wait_dependency_s) == ("key", 0)
        assert record.waited_for.table in ("public.hot", "public.door")
        assert len(record.late_rows) == min(record.late_keys, LATE_ROWS_LIMIT)
        assert all(len(row.key) == len("0123abcd") for row in record.late_rows)
    planned = pair.target.rows("SELECT DISTINCT lane, is_table_exclusive, retries FROM parapply.tables")
    assert planned == [("set-based", False, 0)]
    assert not daemon.events_of("stall_broken")


@contextmanager
def _before_its_late_part(pair: Pair, **settings: str | float) -> Iterator[Daemon]:
    """Run the block when the first batch of a backlog has committed and the second, now the head, is held.

    They change rows 1 and 2 of `hold`. A row that both touch is late in the second, and changed after the block.
    """
    with foreign_transaction(pair.target, _LOCK.format(2)):
        with foreign_transaction(pair.target, _LOCK.format(1)):
            daemon = pair.start(settings={name.replace("__", "."): value for name, value in settings.items()})
            pair.target.wait_until(_BLOCKED.format("count(*) = 2", "hold"))
        pair.target.wait_until("SELECT v > 0 FROM hold WHERE id = 1")
        yield daemon


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Damage to a hot row between its holder's commit and its late change.

    Attributes:
        kind: what the message calls it.
        before: change of the batch before.
        target: SQL that damages the target.
        poison: the late change.
        repair: SQL for the target.
    """

    kind: str
    before: str = "UPDATE hot SET n = 1 WHERE id = 1"
    target: str = "DELETE FROM hot WHERE id = 1"
    poison: str
    repair: str = "INSERT INTO hot VALUES (1, 1, 'repaired')"


_DAMAGES = (
    Damage(kind="update_missing", poison=f"UPDATE hot SET n = 5, big = '{SECRET}' WHERE id = 1"),
    Damage(kind="delete_missing", poison="DELETE FROM hot WHERE id = 1"),
    Damage(
        kind="insert_exists",
        before="DELETE FROM hot WHERE id = 1",
        target=f"INSERT INTO hot VALUES (1, 77, '{SECRET}')",
        poison="INSERT INTO hot VALUES (1, 0, 'again')",
        repair="DELETE FROM hot WHERE id = 1",
    ),
)


@pytest.mark.in_turn("damage")
@pytest.mark.parametrize("damage", _DAMAGES, ids=lambda damage: damage.kind)
def test_t46_a_late_part_that_fails_stops_with_its_conflict(pair: Pair, damage: Damage) -> None:
    """The batch is rolled back and repeated in order, and what fails there is named as ever (T-46, T-69).

    The whole batch before the poison is applied once, nothing of the poison or after it; repaired, it goes on.
    """
    pair.create(_TABLES)
    history = "INSERT INTO history VALUES (1, {})"
    pair.write(_with_hold(1, f"{damage.before}; {history.format(10)}"), history.format(11), history.format(12))
    pair.write(_with_hold(2, history.format(20)))
    xid = pair.write_one(history.format(21), damage.poison, history.format(21))
    pair.write(history.format(22), history.format(30), _OWN.format(3))
    # Long enough for all to be read: three transactions in each of the first two batches.
    with _before_its_late_part(pair, apply__max_batch_transactions=3, apply__linger_s=5) as daemon:
        pair.target.execute(damage.target)
    pair.check_conflict(daemon, kind=damage.kind, xid=xid, place="public.hot, key (id)")
    [retried] = daemon.events_of("batch_retried")
    assert (retried["seq"], retried["reason"]) == (2, "23505" if damage.kind == "insert_exists" else "row count")
    assert pair.target.rows("SELECT delta FROM history ORDER BY delta") == [(10,), (11,), (12,), (20,)]
    assert pair.target.rows("SELECT id, v FROM hold WHERE v > 0 ORDER BY id") == [(1, 1), (2, 1)]
    pair.target.execute(damage.repair)
    pair.drain()
    pair.check_equal()


@pytest.mark.in_turn("end")
@pytest.mark.parametrize("end", ["released", "killed"])
def test_f23_a_foreign_lock_on_a_hot_row_is_waited_for(pair: Pair, end: str, tmp_path: Path) -> None:
    """The head waits with its late part, replies go on, nothing later commits; released, all of it goes on (F23).

    A daemon killed before that has committed nothing of the batch: the next one applies it, once.
    """
    pair.create(_TABLES)
    pair.write(*(_with_hold(number, _HOT.format(1)) for number in (1, 2)), _OWN.format(3), _HOT.format(1))
    settings = {"apply__max_batch_transactions": 1, "source__status_interval_s": 0.05}
    with pair.target.connect() as foreign:
        with _before_its_late_part(pair, **settings, applylog__directory=str(tmp_path)) as daemon:
            foreign.execute("BEGIN; SELECT FROM hot WHERE id = 1 FOR UPDATE")
        pair.target.wait_until(_BLOCKED.format("count(*) = 1", "hot"))
        sender, low_lsn = walsender_pid(pair.route), watermark(pair.route)

        def look() -> None:
            daemon.check_running()
            assert (walsender_pid(pair.route), watermark(pair.route)) == (sender, low_lsn)
            assert pair.target.rows("SELECT sum(v) FROM own") == [(0,)]

        wait_for_replies(pair.route, 10, look)
        assert not daemon.events_of("stall_broken")
        if end == "killed":
            daemon.kill()
        foreign.execute("ROLLBACK")
    if end == "killed":
        daemon = pair.start(settings={"target.lease_wait_s": 20})
    daemon.finish()
    pair.check_equal()
    assert not daemon.events_of("batch_retried")
    if end == "released":
        assert [(record.late_keys, record.attempts) for record in _records(tmp_path)] == [
            (0, 1),
            (1, 1),
            (0, 1),
            (0, 1),  # nothing but the hot row: it waits as a whole
        ]


def test_t30_a_late_part_waits_for_a_later_batch(pair: Pair) -> None:
    """A foreign session between the head's late part and a later batch: that one yields, all are applied (T-30)."""
    pair.create(_TABLES)
    pair.write(*(_with_hold(number, _HOT.format(1)) for number in (1, 2)), _OWN.format(3))
    with pair.target.connect() as foreign, ThreadPoolExecutor(1) as pool:
        with _before_its_late_part(pair, apply__max_batch_transactions=1) as daemon:
            # The server gives up in time, so that a stall fails the test instead of holding it.
            foreign.execute("BEGIN; SET LOCAL statement_timeout = '15s'; SELECT FROM hot WHERE id = 1 FOR UPDATE")
            pair.target.wait_until(_WAITS_ITS_TURN.format(1))
        pair.target.wait_until(_BLOCKED.format("count(*) = 1", "hot"))
        pool.submit(foreign.execute, b"SELECT FROM own WHERE id = 3 FOR UPDATE").result()
        daemon.wait_for_event("stall_broken")
        foreign.execute("ROLLBACK")
    daemon.finish()
    pair.check_equal()
    assert not daemon.events_of("batch_retried")


def test_f24_a_late_part_that_is_a_deadlocks_victim_is_repeated(pair: Pair) -> None:
    """A deadlock of the head's early and late rows with a foreign session costs a repeat and nothing else (F24)."""
    pair.create(_TABLES)
    pair.target.execute(f"ALTER DATABASE {pair.target.dbname} SET deadlock_timeout = '50ms'")
    # The row of its own comes first: it is locked when `hold` holds the batch.
    pair.write(_with_hold(1, _HOT.format(1)), _with_hold(2, _HOT.format(1), first=_OWN.format(2)), _OWN.format(3))
    with pair.target.connect(application_name="foreign") as foreign, ThreadPoolExecutor(1) as pool:
        with _before_its_late_part(pair, apply__max_batch_transactions=1) as daemon:
            # It is not the one that looks for a deadlock.
            foreign.execute("BEGIN; SET LOCAL deadlock_timeout = '60s'; SELECT FROM hot WHERE id = 1 FOR UPDATE")
            waiting = pool.submit(foreign.execute, b"SELECT FROM own WHERE id = 2 FOR UPDATE")
            pair.target.wait_until(
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'foreign' AND wait_event_type = 'Lock')"
            )
        waiting.result()
        foreign.execute("ROLLBACK")
    daemon.finish()
    pair.check_equal()
    assert [(event["seq"], event["reason"]) for event in daemon.events_of("batch_retried")] == [(2, "40P01")]


@pytest.mark.crash
def test_f1_killed_among_late_parts_nothing_is_lost_or_twice(pair: Pair, start_daemon: StartDaemon) -> None:
    """Killed between early part and commit, or with the commit in doubt: each transaction is applied once (F1).

    One daemon after the other, each after the one before: what a kill tears or doubles shows in the hot rows' sums.
    """
    pair.create(_TABLES)
    pair.write(_LOAD)
    settings = {"apply.workers": 8, "apply.max_batch_transactions": 5, "target.lease_wait_s": 20}
    for point in ("dml_sent", "before_commit", "commit_sent", "committed"):
        killed = start_daemon(pair.route, settings=settings, environ={"PARAPPLY_FAILPOINT": f"{point}:kill:12"})
        assert killed.exit_code(30) == -9, f"{point} was not reached: {killed.log_tail()}"
        assert pair.target.rows(_IS_WHOLE) == [(True,)], f"a transaction is torn after the kill at {point}"
    pair.drain(workers=8, settings={**settings, "apply.max_batch_transactions": 3})
    pair.check_equal()
