"""Conflicts and skipping in transactions that were streamed while in progress, and in prepared ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair
from tests.system.test_skip import stopped_at

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand

__all__ = ["pair"]

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
#: A worker follows everything, or nothing; six megabytes are more than a piece then.
_WAYS: dict[str, dict[str, str | float]] = {
    "followed": {"apply.memory_limit_bytes": 1 << 24, "apply.stream_start_bytes": 0},
    "spilled": {"apply.memory_limit_bytes": 1 << 24, "apply.stream_start_bytes": 1 << 30},
}
_BIG = "INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series(1, 400) AS n"
_KEEP_LOCAL = {"conflict.insert_exists": "keep_local"}
_TWO_PHASE: dict[str, str | float] = {"source.two_phase": "true"}
_SKIPPED = "SELECT count(*), min(remote_lsn)::text, max(remote_lsn)::text, max(change_no) FROM parapply.conflicts"


def _stream(pair: Pair) -> None:
    """Make the publisher stream everything that is not tiny."""
    pair.source.execute(f"ALTER DATABASE {pair.source.dbname} SET logical_decoding_work_mem = '64kB'")
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (3, 'local'), (390, 'local')")


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", _WAYS)
def test_conflicts_of_a_streamed_transaction(pair: Pair, way: str) -> None:
    """Nothing is settled before its commit; then it is settled like any other, with its end LSN."""
    _stream(pair)
    daemon = pair.start(settings={**_WAYS[way], **_KEEP_LOCAL})
    pair.write(_BIG, "INSERT INTO t VALUES (2000, 'after')")
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT id FROM t WHERE v = 'local' ORDER BY id") == [(3,), (390,)]
    assert pair.target.rows("SELECT count(*) FROM t") == [(401,)]
    is_end = "remote_lsn < (SELECT lowest_remote_lsn FROM parapply.progress)"
    found = f"SELECT change_no, outcome, attempts, {is_end} FROM parapply.conflicts ORDER BY 1"
    assert pair.target.rows(found) == [(3, "kept_local", 1, True), (390, "kept_local", 1, True)]
    assert bool(daemon.events_of("stream_followed")) == (way == "followed")
    daemon.stop()


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", _WAYS)
def test_t70_a_streamed_transaction_is_skipped(pair: Pair, run_command: RunCommand, way: str) -> None:
    """It stops with its end LSN, by which it is skipped and kept whole; what was streamed beside it is applied."""
    _stream(pair)
    daemon = pair.start(settings=_WAYS[way])
    pair.write("INSERT INTO t VALUES (1000, 'before')", _BIG, "INSERT INTO t VALUES (2000, 'after')")
    lsn = stopped_at(pair, daemon)
    run_command(pair.route, "skip", "--lsn", lsn, code=0)
    pair.drain(settings=_WAYS[way])
    assert pair.target.rows("SELECT id FROM t ORDER BY id") == [(3,), (390,), (1000,), (2000,)]
    assert pair.target.rows(f"{_SKIPPED} WHERE conflict_type = 'skipped'") == [(400, lsn, lsn, 400)]
    assert pair.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)]


def _prepare(pair: Pair, *statements: str) -> None:
    with pair.source.connect() as connection:
        for text in ("BEGIN", *statements, "PREPARE TRANSACTION 'one'"):
            connection.execute(text.encode())


@pytest.mark.in_turn("outcome")
@pytest.mark.parametrize("outcome", ["COMMIT", "ROLLBACK"])
def test_conflicts_of_a_prepared_transaction(pair: Pair, outcome: str) -> None:
    """A conflict settled at PREPARE is in the history once that is committed, and is not if it is rolled back."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (3, 'local')")
    daemon = pair.start(settings={**_TWO_PHASE, **_KEEP_LOCAL})
    _prepare(pair, "INSERT INTO t VALUES (2, 'remote')", "INSERT INTO t VALUES (3, 'remote')")
    pair.write("INSERT INTO t VALUES (4, 'after')")
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]
    pair.write(f"{outcome} PREPARED 'one'")
    daemon.finish()
    committed = outcome == "COMMIT"
    expected = [(2, "remote")] if committed else []
    assert pair.target.rows("SELECT id, v FROM t ORDER BY id") == [*expected, (3, "local"), (4, "after")]
    found = "SELECT key->>'id', outcome, change_no FROM parapply.conflicts"
    assert pair.target.rows(found) == ([("3", "kept_local", 2)] if committed else [])


def test_t70_a_prepared_transaction_is_skipped(pair: Pair, run_command: RunCommand) -> None:
    """PostgreSQL's 029: asked for by the end of its PREPARE; its COMMIT PREPARED then commits nothing but the history.

    While it is prepared nothing waits for it, not what looks for requests either (T-37).
    """
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (3, 'local')")
    daemon = pair.start(settings=_TWO_PHASE)
    _prepare(pair, "INSERT INTO t VALUES (2, 'remote')", "INSERT INTO t VALUES (3, 'remote')")
    lsn = stopped_at(pair, daemon)
    run_command(pair.route, "skip", "--lsn", lsn, code=0)
    pair.write("INSERT INTO t VALUES (4, 'after')")
    daemon = pair.start(settings=_TWO_PHASE)
    daemon.wait_caught_up()
    before = pair.target.rows("SELECT updated_at FROM parapply.progress")[0][0]
    pair.target.wait_until(f"SELECT updated_at > '{before}'::timestamptz + interval '1 s' FROM parapply.progress")
    assert pair.target.rows("SELECT outcome FROM parapply.skips") == [("accepted",)]
    pair.write("COMMIT PREPARED 'one'")
    daemon.finish()
    assert pair.target.rows("SELECT id, v FROM t ORDER BY id") == [(3, "local"), (4, "after")]
    assert pair.target.rows(f"{_SKIPPED} WHERE conflict_type = 'skipped'") == [(2, lsn, lsn, 2)]
    assert pair.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)]
    assert pair.target.rows("SELECT outcome FROM parapply.conflicts WHERE conflict_type <> 'skipped'") == [("skipped",)]
