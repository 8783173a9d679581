"""A batch that fails is repeated whole at the head, then in halves; only the smallest part that fails goes row by row.

Of each batch the log says how it was applied in the end: `batch_retried` when it was rolled back first, `batch_split`
when it took parts, with the number of source transactions applied row by row.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from parapply.applylog_schema import BatchRecord, read_record
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED
from tests.fixtures.streams import wait_received

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.daemon import Daemon

__all__ = ["pair"]

_HOLD = "CREATE TABLE hold (id int PRIMARY KEY, v int); INSERT INTO hold VALUES (1, 0);"
_PASS_HOLD = "UPDATE hold SET v = v + 1 WHERE id = 1"
_HAS_ROLLED_BACK = (
    "SELECT count(*) >= 1 FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%' AND query LIKE 'ROLLBACK%'"
)
#: Of which sets are tried at least (`plan/halving.py`).
_SMALLEST = 64


@contextmanager
def _held(
    pair: Pair, first: str = _PASS_HOLD, *, workers: int = 1, settings: dict[str, str | float] | None = None
) -> Iterator[Daemon]:
    """Run the block while the first batch waits for a lock on the target; with one worker all else is the second."""
    with pair.target.connect() as foreign:
        foreign.execute("BEGIN; SELECT FROM hold WHERE id = 1 FOR UPDATE")
        daemon = pair.start(workers=workers, settings=settings)
        pair.write(first)
        pair.target.wait_until(WORKER_IS_BLOCKED)
        yield daemon
        wait_received(pair.route)
        foreign.execute("COMMIT")


def test_what_overtook_is_repeated_as_the_same_set(pair: Pair, tmp_path: Path) -> None:
    """The value that a delete frees is not on the wire: who takes it too early succeeds whole at the head (T-19)."""
    pair.create(
        f"{_HOLD} CREATE TABLE u (id int PRIMARY KEY, email text UNIQUE);"
        "INSERT INTO u SELECT n, 'a' || n FROM generate_series(1, 10) AS n"
    )
    settings: dict[str, str | float] = {"applylog.directory": str(tmp_path)}
    first = f"BEGIN; {_PASS_HOLD}; DELETE FROM u; COMMIT"
    with _held(pair, first, workers=2, settings=settings) as daemon:
        pair.write("INSERT INTO u SELECT 1000 + n, 'a' || n FROM generate_series(1, 10) AS n")
        pair.target.wait_until(_HAS_ROLLED_BACK)
    daemon.finish()
    pair.check_equal()
    assert [event["reason"] for event in daemon.events_of("batch_retried")] == ["23505"]
    assert not daemon.events_of("batch_split")
    records = [read_record(line) for path in tmp_path.iterdir() for line in path.read_bytes().splitlines()]
    assert [(one.mode, one.attempts) for one in records if isinstance(one, BatchRecord)] == [("set", 1), ("set", 2)]


def test_what_a_late_key_frees_is_taken_whole_at_the_head(pair: Pair) -> None:
    """A row held by an earlier batch goes after all others, and frees its value too late; at the head it goes first."""
    pair.create(
        f"{_HOLD} CREATE TABLE u (id int PRIMARY KEY, email text, v int); INSERT INTO u VALUES (1, 'a', 0);"
        "CREATE UNIQUE INDEX ON u (lower(email))"
    )
    with _held(pair, f"BEGIN; UPDATE u SET v = 1 WHERE id = 1; {_PASS_HOLD}; COMMIT", workers=2) as daemon:
        pair.write("BEGIN; DELETE FROM u WHERE id = 1; INSERT INTO u VALUES (2, 'a', 0); COMMIT")
        # The second waits for the holder of the value.
        pair.target.wait_until(
            "SELECT count(*) = 2 FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock'"
        )
    daemon.finish()
    pair.check_equal()
    assert [event["reason"] for event in daemon.events_of("batch_retried")] == ["23505"]
    assert not daemon.events_of("batch_split")


@pytest.mark.in_turn("order")
@pytest.mark.parametrize("order", ["preserve", "relaxed"])
def test_a_failure_that_passes_does_not_apply_the_second_half_twice(pair: Pair, order: str) -> None:
    """The head's statements are cancelled once: it goes on in halves, each under its own record with its own rows."""
    pair.create(
        f"{_HOLD} CREATE TABLE other (id int PRIMARY KEY, v int); INSERT INTO other VALUES (1, 0);"
        "CREATE TABLE noted (v int)"
    )
    pair.write("INSERT INTO noted VALUES (-1)")
    with pair.target.connect() as foreign:
        with _held(pair, settings={"apply.commit_order": order}) as daemon:
            foreign.execute("BEGIN; SELECT FROM other WHERE id = 1 FOR UPDATE")
            pair.write(*(f"INSERT INTO noted VALUES ({number})" for number in range(3 * _SMALLEST)))
            pair.write("UPDATE other SET v = 1")
        pair.target.wait_until(f"{WORKER_IS_BLOCKED} AND (SELECT v FROM hold) = 1")
        pair.target.execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock'"
        )
        daemon.wait_for_event("batch_retried")
        foreign.execute("COMMIT")
    daemon.finish()
    pair.check_equal()
    assert [event["reason"] for event in daemon.events_of("batch_retried")] == ["57014"]


@pytest.mark.in_turn("order")
@pytest.mark.parametrize("order", ["preserve", "relaxed"])
def test_one_conflict_costs_its_batch_a_few_parts(pair: Pair, order: str) -> None:
    """Of 600 transactions with one conflict at most 64 are applied row by row, and one conflict is recorded (T-69)."""
    pair.create(f"{_HOLD} CREATE TABLE t (id int PRIMARY KEY, v text)")
    pair.target.execute("INSERT INTO t VALUES (417, 'local')")
    with _held(pair, settings={"conflict.insert_exists": "skip", "apply.commit_order": order}) as daemon:
        pair.write(*(f"INSERT INTO t VALUES ({number}, 'remote')" for number in range(600)))
    daemon.finish()
    [split] = daemon.events_of("batch_split")
    assert split["n_transactions"] == 600
    assert 1 <= split["n_in_order"] <= _SMALLEST
    assert len(daemon.events_of("conflicts_settled")) == 1
    assert pair.target.rows("SELECT count(*), count(*) FILTER (WHERE v = 'local') FROM t") == [(600, 1)]
    assert pair.target.rows("SELECT conflict_type FROM parapply.conflicts") == [("insert_exists",)]


def test_values_that_change_hands_inside_a_batch_need_the_source_order_only_there(pair: Pair) -> None:
    """A set cannot swap unique values (T-38): the smallest part with the swap goes row by row, without a conflict."""
    pair.create(
        f"{_HOLD} CREATE TABLE t (id int PRIMARY KEY, code text UNIQUE);"
        "INSERT INTO t SELECT n, 'c' || n FROM generate_series(1, 600) AS n"
    )
    values = (("x", 401), ("c401", 402), ("c402", 401))
    swap = "; ".join([f"UPDATE t SET code = '{code}' WHERE id = {number}" for code, number in values])
    with _held(pair) as daemon:
        pair.write(
            *(f"UPDATE t SET code = 'd{number}' WHERE id = {number}" for number in range(1, 301)),
            f"BEGIN; {swap}; COMMIT",
            *(f"UPDATE t SET code = 'd{number}' WHERE id = {number}" for number in range(501, 601)),
        )
    daemon.finish()
    pair.check_equal()
    [split] = daemon.events_of("batch_split")
    assert split["n_transactions"] == 401
    assert 1 <= split["n_in_order"] <= _SMALLEST
    assert not daemon.events_of("conflicts_settled")


def test_t35_a_check_at_the_commit_is_found_by_halves(pair: Pair) -> None:
    """A deferred check names no statement: everything before its transaction is committed, and that one is named."""
    tables = f"{_HOLD} CREATE TABLE t (id int PRIMARY KEY, code int)"
    pair.create(tables, f"{tables}; ALTER TABLE t ADD UNIQUE (code) DEFERRABLE INITIALLY DEFERRED")
    pair.target.execute("INSERT INTO t VALUES (-1, 230)")
    with _held(pair, settings={"target.session_replication_role": "origin"}) as daemon:
        pair.write(*(f"INSERT INTO t VALUES ({number}, {number})" for number in range(230)))
        pair.write("INSERT INTO t VALUES (230, 230)", *(f"INSERT INTO t VALUES ({n}, {n})" for n in range(231, 400)))
    pair.check_stopped(daemon, code=5, says=r"commit: unique_violation \(23505\).*; transaction \d+, end LSN")
    assert pair.target.rows("SELECT count(*), max(id) FROM t WHERE id >= 0") == [(230, 229)]
    pair.target.execute("DELETE FROM t WHERE id = -1")
    pair.drain(settings={"target.session_replication_role": "origin"})
    pair.check_equal()


def test_a_kill_between_two_parts_loses_and_doubles_nothing(pair: Pair) -> None:
    """Each part is recorded with its rows: the next daemon goes on after the last one that has committed."""
    pair.create(f"{_HOLD} CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE log (n int)")
    pair.target.execute("INSERT INTO t VALUES (75, 'local'), (150, 'local'), (225, 'local')")
    settings: dict[str, str | float] = {"conflict.insert_exists": "skip"}
    pair.write(
        *(f"BEGIN; INSERT INTO t VALUES ({n}, 'remote'); INSERT INTO log VALUES ({n}); COMMIT" for n in range(300))
    )
    # Three conflicts, each of which is committed alone, take more commits than all lives have, however batches are cut.
    for point in ("committed:kill:2", "commit_sent:kill:2", "before_commit:kill:2"):
        daemon = pair.start_only(
            "--until",
            pair.route.end_of_source_lsn(),
            settings={**settings, "apply.workers": 1},
            environ={"PARAPPLY_FAILPOINT": point},
        )
        assert daemon.exit_code(30) == -9, daemon.log_tail()
    pair.drain(settings=settings)
    assert pair.target.rows("SELECT count(*), count(*) FILTER (WHERE v = 'local') FROM t") == [(300, 3)]
    assert pair.target.rows("SELECT count(*), count(DISTINCT n) FROM log") == [(300, 300)]
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(3,)]
