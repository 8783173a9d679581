"""A prepared transaction that was rolled back before it is applied: what fails of it is no conflict.

If the rollback is in the WAL when the transaction is decoded, PostgreSQL sends only a part of it: up to 16 it leaves
out what makes it look into the catalogue, such as the first value of a type, from 18 on what it would have to evict.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.fixtures.daemon import EVENT_TIMEOUT_S
from tests.fixtures.fan import make_slot
from tests.fixtures.pair import Pair, pair
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.two_phase import TWO_PHASE, check_nothing_is_left, decide, n_prepared, stream_early, write_prepared
from tests.system.test_skip import REFUSING, stopped_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon

__all__ = ["pair"]

_TABLES = "CREATE TABLE t (id int PRIMARY KEY, v varchar); CREATE TABLE n (id int PRIMARY KEY);"
#: Rows that both sides have before the backlog.
_KEPT = "INSERT INTO t SELECT -g, 'kept' FROM generate_series(1, 10) AS g"
#: Some of the deletes are sent without the inserts.
_UNDONE = (
    "INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 2000) AS g",
    "SAVEPOINT a",
    "DELETE FROM t WHERE id <= 500 AND id > 0",
    "SAVEPOINT b",
    "DELETE FROM t WHERE id <= 700 AND id > 0",
)
#: The part of it that is sent could be prepared.
_HALF = (_UNDONE[0], "SAVEPOINT a", "DELETE FROM t WHERE id = -1")
#: With 4 MB for decoding more than a piece is sent without its inserts.
_LARGE = (
    "INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 40000) AS g",
    "SAVEPOINT a",
    "DELETE FROM t WHERE id <= 12000 AND id > 0",
)
_SMALL_PIECES = {"apply.memory_limit_bytes": 16 * 1024 * 1024}


def _new_slot(pair: Pair) -> None:
    """Make tables, rows on both sides, and a slot with two_phase that no session reads."""
    stream_early(pair.source)
    pair.source.execute(_TABLES + _KEPT)
    pair.target.execute(_TABLES + _KEPT)
    pair.source.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    make_slot(pair.route, is_two_phase=True)


def _roll_back(pair: Pair, *statements: str) -> None:
    """Prepare and roll back, after a change that has the table's catalogue read, and nothing of the type varchar."""
    pair.write("DELETE FROM t WHERE id = (SELECT min(id) FROM t)")
    write_prepared(pair.source, "a", *statements)
    decide(pair.source, "a", "ROLLBACK")


def _check(pair: Pair, daemon: Daemon, *, left_out: int) -> None:
    """Let the daemon catch up, then compare; as many PREPAREs were left out by this daemon."""
    daemon.finish()
    pair.check_equal()
    check_nothing_is_left(pair.target)
    assert len(daemon.events_of("prepare_left_out")) == left_out
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]


@pytest.mark.in_turn("settings")
@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize(
    "settings",
    [{"apply.workers": 1}, {"apply.stream_start_bytes": 0, "apply.commit_order": "relaxed"}],
    ids=["spilled", "followed"],
)
def test_a_part_that_is_streamed(pair: Pair, settings: Mapping[str, str | float]) -> None:
    """H1: a transaction that fails is neither prepared nor reported, nor is one that could be: it may be a part.

    A standby that is promoted without the rollback may commit it.
    """
    _new_slot(pair)
    for number, statements in enumerate((_UNDONE, _HALF, _UNDONE)):
        _roll_back(pair, *statements)
        pair.write(f"INSERT INTO n VALUES ({number})")
    _check(pair, pair.start(settings={**TWO_PHASE, **settings}), left_out=3)


@pytest.mark.pg_majors(18)
def test_a_part_that_comes_whole(pair: Pair) -> None:
    """D1: the same without streaming, where a policy would settle what fails, and in pieces; in one order each."""
    _new_slot(pair)
    settings = {**TWO_PHASE, **_SMALL_PIECES, "source.streaming": "off", "conflict.delete_missing": "skip"}
    _roll_back(pair, *_UNDONE)
    _roll_back(pair, "INSERT INTO n VALUES (2)")
    daemon = pair.start(settings={**settings, "apply.commit_order": "relaxed"})
    daemon.finish()
    pair.source.execute(f"ALTER DATABASE {pair.source.dbname} SET logical_decoding_work_mem = '4MB'")
    _roll_back(pair, *_LARGE)
    pair.write("INSERT INTO n VALUES (1)")
    assert len(daemon.events_of("prepare_left_out")) == 2
    _check(pair, pair.start(settings=settings), left_out=1)


@pytest.mark.crash
@pytest.mark.pg_majors(18)
def test_restarts_and_a_publisher_away(pair: Pair, start_daemon: StartDaemon) -> None:
    """Killed before it is recorded, and cut off while the publisher is asked: it comes again, with the same answer."""
    _new_slot(pair)
    _roll_back(pair, *_UNDONE)
    killed = start_daemon(pair.route, settings=TWO_PHASE, environ={"PARAPPLY_FAILPOINT": f"{failpoints.DECIDED}:kill"})
    assert killed.exit_code(EVENT_TIMEOUT_S) == -signal.SIGKILL, killed.log_tail()
    source = pair.source
    with CutProxy("127.0.0.1", int(source.rows("SELECT inet_server_port()")[0][0])) as proxy:
        route = Route(source=source, target=pair.target, slot=pair.route.slot,
                      source_dsn=proxy.dsn(source.source_role_dsn))  # fmt: skip
        cut = proxy.drop_before(b"pg_xact_status")
        daemon = start_daemon(route, settings=TWO_PHASE)
        assert cut.wait(EVENT_TIMEOUT_S), daemon.log_tail()
        daemon.wait_for_event("source_lost")
        _check(pair, daemon, left_out=1)


def test_only_a_rollback_is_left_out(pair: Pair, run_command: RunCommand) -> None:
    """One still prepared, or committed, stops the daemon; repaired, it is applied. A rolled back one does not.

    Nor is it reported as skipped, although that was asked for.
    """
    _new_slot(pair)
    pair.drain(settings=TWO_PHASE)
    pair.target.execute("DELETE FROM t WHERE id = -5")
    write_prepared(pair.source, "a", "UPDATE t SET v = 'new' WHERE id = -5")
    pair.check_stopped(pair.start(settings=TWO_PHASE), code=5, says="update_missing")
    decide(pair.source, "a", "COMMIT")
    pair.check_stopped(pair.start(settings=TWO_PHASE), code=5, says="update_missing")
    pair.target.execute("INSERT INTO t VALUES (-5, 'kept'); DELETE FROM t WHERE id = -6")
    daemon = pair.start(settings=TWO_PHASE)
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT v FROM t WHERE id = -5") == [("new",)]
    write_prepared(pair.source, "a", "UPDATE t SET v = 'new' WHERE id = -6")
    lsn = stopped_at(pair, daemon)
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    decide(pair.source, "a", "ROLLBACK")
    again = pair.start(settings=TWO_PHASE)
    again.finish()
    assert len(again.events_of("prepare_left_out")) == 1
    assert not again.events_of("transaction_skipped")
    assert n_prepared(pair.target) == 0
    check_nothing_is_left(pair.target)


def test_it_is_not_shown_as_tried_again_once_it_is_left_out(pair: Pair) -> None:
    """Nothing is tried any longer, and a daemon that says so is not ready and never rests (F24)."""
    _new_slot(pair)
    pair.target.execute(REFUSING)
    daemon = pair.start(settings={**TWO_PHASE, "apply.stream_start_bytes": 0})
    write_prepared(pair.source, "a", *_UNDONE)
    daemon.wait_for_event("batch_failed")
    decide(pair.source, "a", "ROLLBACK")
    daemon.wait_for_event("prepare_left_out")
    pair.target.wait_until("SELECT state = 'running' AND reason = '' FROM parapply.progress")
    _check(pair, daemon, left_out=1)


@pytest.mark.in_turn("streaming")
@pytest.mark.parametrize("streaming", ["off", "auto"])
def test_a_table_that_only_it_has_changed(pair: Pair, streaming: str) -> None:
    """A column that the target lacks stops no daemon if the transaction that made it was rolled back."""
    _new_slot(pair)
    daemon = pair.start(settings={**TWO_PHASE, "source.streaming": streaming})
    daemon.pause()
    write_prepared(pair.source, "a", "ALTER TABLE t ADD COLUMN more int", *_UNDONE)
    lsn = pair.route.end_of_source_lsn()
    pair.source.wait_until(f"SELECT bool_or(sent_lsn >= '{lsn}') FROM pg_stat_replication")
    decide(pair.source, "a", "ROLLBACK")
    pair.write("INSERT INTO t VALUES (100000, 'after')")
    daemon.send(signal.SIGCONT)
    _check(pair, daemon, left_out=1)
