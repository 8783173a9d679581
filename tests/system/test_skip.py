"""`parapply skip`: exactly one transaction, by its end LSN, whatever it is merged with and whatever is killed."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from parapply.model import format_lsn
from parapply.wire.decode import decode
from parapply.wire.messages import Commit
from tests.fixtures.backlog import RANGES
from tests.fixtures.databases import encoded_database
from tests.fixtures.fan import make_slot
from tests.fixtures.pair import SECRET, Pair, named, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED, foreign_transaction, wait_until_gone
from tests.fixtures.route import Route
from tests.fixtures.streams import wait_followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database

__all__ = ["pair"]

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
_KEPT = (
    "SELECT operation, remote_row->>'id', change_no FROM parapply.conflicts WHERE conflict_type = 'skipped' ORDER BY 3"
)


def stopped_at(pair: Pair, daemon: Daemon) -> str:
    """Return the end LSN of the transaction that stopped a daemon, as the history has it."""
    assert daemon.exit_code(30) == 5, daemon.log_tail()
    wait_until_gone(pair.route)
    ((lsn,),) = pair.target.rows("SELECT DISTINCT remote_lsn::text FROM parapply.conflicts WHERE outcome = 'stopped'")
    assert f"parapply skip --lsn {lsn}" in daemon.log_tail()
    return str(lsn)


def _ends(pair: Pair) -> list[str]:
    """Return the end LSN of every transaction that waits in the slot, which no session reads.

    As the stream says it: the publisher's insert position may lie after other WAL, or a page's header. A daemon must
    have read the slot before, because one without a state refuses a slot that has been read.
    """
    sent = pair.source.rows(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{pair.route.slot}', NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')"
    )
    messages = [decode(bytes(data)) for (data,) in sent]
    return [format_lsn(message.end_lsn) for message in messages if isinstance(message, Commit)]


def test_t70_a_stopped_transaction_is_skipped_and_nothing_else(pair: Pair, run_command: RunCommand) -> None:
    """PostgreSQL's 029: in a merged batch its neighbours are applied, and it is kept change by change (T-70).

    In relaxed order; the tests of kills and of large transactions keep it.
    """
    settings: Mapping[str, str | float] = {"apply.commit_order": "relaxed"}
    pair.create(_TABLE)
    pair.target.execute(f"INSERT INTO t VALUES (7, '{SECRET}')")
    pair.write("INSERT INTO t VALUES (1, 'before')")
    pair.write_one(
        "INSERT INTO t VALUES (6, 'with it')", "INSERT INTO t VALUES (7, 'remote')", "DELETE FROM t WHERE id = 1"
    )
    pair.write("INSERT INTO t VALUES (8, 'after')")
    lsn = stopped_at(pair, pair.start(settings=settings))
    asked = run_command(pair.route, "skip", "--lsn", lsn)
    assert (asked.returncode, asked.stdout) == (0, "noted: no daemon runs; the next `parapply run` skips it\n")
    daemon = pair.drain(settings=settings)
    assert pair.target.rows("SELECT id FROM t ORDER BY id") == [(1,), (7,), (8,)]
    assert pair.target.rows(_KEPT) == [("insert", "6", 1), ("insert", "7", 2), ("delete", "1", 3)]
    assert len(daemon.events_of("transaction_skipped")) == 1
    # The conflict that had stopped it is over, and the request is done.
    assert pair.target.rows("SELECT outcome FROM parapply.conflicts WHERE conflict_type = 'insert_exists'") == [
        ("skipped",)
    ]
    assert pair.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)]
    again = run_command(pair.route, "skip", "--lsn", lsn, "--json")
    assert json.loads(again.stdout)["outcome"] == "skipped"
    assert json.loads(again.stdout)["kept"] == 3


def test_a_row_that_comes_into_a_filter_without_a_value_stops_the_daemon(pair: Pair, run_command: RunCommand) -> None:
    """The publisher sends no unchanged large value with it: it is never NULL, its transaction is skipped by its LSN.

    With REPLICA IDENTITY FULL the row comes whole.
    """
    table = "CREATE TABLE t (id int PRIMARY KEY, v text STORAGE EXTERNAL, w int)"
    pair.create(table, published="TABLE t WHERE (id > 100)")
    pair.write("INSERT INTO t SELECT n, repeat('x', 5000), n FROM generate_series(1, 2) AS n")
    pair.write("INSERT INTO t VALUES (200, 'before', 200)")
    xid = pair.write_one("UPDATE t SET id = 101 WHERE id = 1", "INSERT INTO t VALUES (201, 'with it', 201)")
    pair.write("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET id = 102 WHERE id = 2")
    daemon = pair.start()
    pair.check_conflict(daemon, kind="insert", xid=xid, place="public.t, key (id)")
    assert "left v unchanged" in daemon.failure
    assert "REPLICA IDENTITY FULL" in daemon.failure
    found = re.search(r"parapply skip --lsn (\S+/[0-9A-F]+)`", daemon.failure)
    assert found
    assert run_command(pair.route, "skip", "--lsn", found[1]).returncode == 0
    pair.drain()
    assert pair.target.rows("SELECT id, length(v) FROM t ORDER BY id") == [(102, 5000), (200, 6)]
    kept = "SELECT remote_row ->> 'id', is_complete FROM parapply.conflicts ORDER BY change_no"
    assert pair.target.rows(kept) == [("101", False), ("201", True)]


def test_t70_a_transaction_that_is_not_to_come_is_refused(pair: Pair, run_command: RunCommand) -> None:
    """A transaction that has been applied cannot be skipped, with a daemon or without; the request changes nothing.

    A slip in the LSN is reported at once, by the publisher or from what is known of it, and no request is left.
    """
    pair.create(_TABLE)
    pair.write("INSERT INTO t VALUES (1, 'a')")
    pair.drain()
    ((lsn,),) = pair.target.rows("SELECT lowest_remote_lsn FROM parapply.progress")
    refused = run_command(pair.route, "skip", "--lsn", lsn)
    assert refused.returncode == 4
    assert "has passed" in refused.stderr
    for source in ((), ("--source", "host=127.0.0.1 port=1")):
        refused = run_command(pair.route, "skip", "--lsn", "FFFFFFFF/FFFFFFFF", *source)
        assert refused.returncode == 4
        assert "no transaction ends at FFFFFFFF/FFFFFFFF: the publisher's WAL ends at" in refused.stderr
    pair.start()
    assert run_command(pair.route, "skip", "--lsn", "0/1").returncode == 4
    assert pair.target.rows("SELECT * FROM parapply.skips") == []


#: By way: a transaction whose row 7 is refused as if a lock were not available, and whether its end is known by then.
_REFUSED_ROWS = {
    "small": ("INSERT INTO t VALUES (7, 'x')", True),
    "large": ("INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series(1, 600) AS n", False),
}
REFUSING = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'busy' USING ERRCODE = '55P03'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW WHEN (NEW.id = 7) EXECUTE FUNCTION refuse();
ALTER TABLE t ENABLE ALWAYS TRIGGER refuse;
"""


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", _REFUSED_ROWS)
def test_f24_what_is_always_to_be_tried_again_is_told_and_can_be_skipped(
    pair: Pair, run_command: RunCommand, way: str
) -> None:
    """An error that says so (55P03) is repeated whatever on_error says, and after some seconds that shows (F24)."""
    refused, is_end_known = _REFUSED_ROWS[way]
    pair.create(_TABLE, f"{_TABLE}; {REFUSING}")
    pair.drain()
    wait_until_gone(pair.route)
    pair.write(refused)
    (lsn,) = _ends(pair)
    daemon = pair.start(settings={"apply.memory_limit_bytes": 16 << 20})
    pair.write("INSERT INTO t VALUES (1000, 'after')")
    failed = daemon.wait_for_event("batch_failed")
    says = "insert on public.t, key (id): lock_not_available (55P03); transaction %"
    says += f", end LSN {lsn}." if is_end_known else ", not ended yet."
    pair.target.wait_until(f"SELECT state = 'retrying' AND reason LIKE '{says}%' FROM parapply.progress")
    assert bool(failed["commit_lsn"]) is not is_end_known
    asked = run_command(pair.route, "skip", "--lsn", lsn, "--wait", "30", "--json")
    assert json.loads(asked.stdout)["outcome"] == "skipped", asked
    daemon.wait_caught_up()
    pair.target.wait_until("SELECT state = 'running' AND reason = '' FROM parapply.progress")
    assert pair.target.rows("SELECT id FROM t") == [(1000,)]


def test_t70_a_running_daemon_skips_what_it_keeps_trying(pair: Pair, run_command: RunCommand) -> None:
    """With on_error = "retry" the request reaches the daemon, which goes on at once; a later one can be taken back."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (7, 'local')")
    daemon = pair.start(settings={"apply.on_error": "retry"})
    pair.write("INSERT INTO t VALUES (7, 'remote')", "INSERT INTO t VALUES (8, 'after')")
    daemon.wait_for_event("batch_failed")
    shown = "SELECT state = 'retrying' AND reason LIKE 'insert_exists%' FROM parapply.progress"
    pair.target.wait_until(shown)
    ((lsn,),) = pair.target.rows("SELECT remote_lsn::text FROM parapply.conflicts")
    asked = run_command(pair.route, "skip", "--lsn", lsn, "--wait", "30", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["outcome"] == "skipped"
    daemon.wait_caught_up()
    pair.target.wait_until("SELECT state = 'running' AND reason = '' FROM parapply.progress")
    assert pair.target.rows("SELECT v FROM t ORDER BY id") == [("local",), ("after",)]
    with foreign_transaction(pair.target, "LOCK TABLE t"):
        pair.write("INSERT INTO t VALUES (9, 'later')")
        lsn = pair.route.end_of_source_lsn()
        later = run_command(pair.route, "skip", "--lsn", lsn, "--wait", "0")
        assert later.stdout == "accepted: the daemon skips it when it comes\n"
        assert run_command(pair.route, "skip", "--lsn", lsn, "--cancel").stdout == "taken back\n"
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT v FROM t WHERE id = 9") == [("later",)]
    daemon.stop()


@pytest.mark.parametrize("n_rows", [1, 300], ids=["small", "large"])
def test_t70_a_request_that_is_taken_back_while_it_is_carried_out(
    pair: Pair, run_command: RunCommand, n_rows: int
) -> None:
    """The answer that it is taken back holds also where the history of it is being written: the rows arrive."""
    pair.create(_TABLE)
    settings: Mapping[str, str | float] = {"apply.memory_limit_bytes": 16 << 20, "apply.stall_check_s": 3600}
    pair.drain(settings=settings)
    wait_until_gone(pair.route)
    pair.write(f"INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series(1, {n_rows}) AS n")
    lsn = _ends(pair)[-1]
    pair.target.execute("""
        CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
          'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END';
        CREATE TRIGGER wait BEFORE INSERT ON parapply.conflicts FOR EACH ROW EXECUTE FUNCTION wait();
        ALTER TABLE parapply.conflicts ENABLE ALWAYS TRIGGER wait;
    """)
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    with foreign_transaction(pair.target, "SELECT pg_advisory_xact_lock(7)"):
        daemon = pair.start(settings=settings)
        pair.target.wait_until(WORKER_IS_BLOCKED)
        assert run_command(pair.route, "skip", "--lsn", lsn, "--cancel").stdout == "taken back\n"
    pair.target.wait_until(f"SELECT count(*) = {n_rows} FROM t")
    assert pair.target.rows("SELECT FROM parapply.conflicts") == []
    daemon.stop()


def test_t70_a_request_before_the_transaction_comes(pair: Pair, run_command: RunCommand) -> None:
    """A transaction that would be applied without a conflict is skipped just as well, and only it."""
    pair.create(_TABLE)
    pair.write("INSERT INTO t VALUES (1, 'a')")
    pair.drain()
    wait_until_gone(pair.route)
    pair.write("SELECT pg_logical_emit_message(true, 'x', '')", "INSERT INTO t VALUES (2, 'b')")
    lsn = _ends(pair)[-1]
    pair.write("INSERT INTO t VALUES (3, 'c')", "UPDATE t SET v = 'd' WHERE id = 1")
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    pair.drain()
    assert pair.target.rows("SELECT id, v FROM t ORDER BY id") == [(1, "d"), (3, "c")]
    assert pair.target.rows(_KEPT) == [("insert", "2", 1)]


def test_t70_a_transaction_that_waits_for_its_turn_says_nothing_against_its_table(
    pair: Pair, run_command: RunCommand
) -> None:
    """It was executed, and is rolled back only for the request: no retry is counted, and its table is trusted."""
    pair.create(f"{_TABLE}; CREATE TABLE held (id int PRIMARY KEY, v int); INSERT INTO held VALUES (1, 0)")
    watching = Route(source=pair.source, target=pair.target)
    make_slot(watching)
    daemon = pair.start(settings={"apply.max_batch_transactions": 1})
    with foreign_transaction(pair.target, "SELECT FROM held FOR UPDATE"):
        pair.write("UPDATE held SET v = 1", "INSERT INTO t VALUES (1, 'a')")
        sent = pair.source.rows(
            f"SELECT data FROM pg_logical_slot_peek_binary_changes('{watching.slot}', NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'pub')"
        )
        commits = [message for (data,) in sent if isinstance(message := decode(bytes(data)), Commit)]
        pair.target.wait_until(WORKER_IS_BLOCKED)
        wait_followed(pair.route, "t")
        asked = run_command(pair.route, "skip", "--lsn", format_lsn(commits[-1].end_lsn), "--wait", "0")
        assert asked.returncode == 0, asked.stderr
        pair.target.wait_until("SELECT outcome = 'accepted' FROM parapply.skips")
    pair.target.wait_until("SELECT outcome = 'skipped' FROM parapply.skips")
    # Written together with everything that is to be shown of other tables by then.
    for database in (pair.target, pair.source):
        database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    pair.write("INSERT INTO later VALUES (1)")
    pair.target.wait_until("SELECT EXISTS (SELECT FROM parapply.tables WHERE table_name = 'later')")
    assert pair.target.rows("SELECT retries FROM parapply.tables WHERE table_name = 't'") == [(0,)]
    assert pair.target.rows("SELECT count(*) FROM t") == [(0,)]
    daemon.stop()


def test_t70_a_daemon_killed_while_it_skips(pair: Pair, run_command: RunCommand) -> None:
    """Killed at any moment around the skipping, the next one ends in the same rows and the same history."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (7, 'local')")
    pair.write("INSERT INTO t VALUES (7, 'remote')", "INSERT INTO t VALUES (8, 'after')")
    lsn = stopped_at(pair, pair.start())
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    # The first target transaction is the merged batch's look for the request, or the skipping itself.
    for point in ("before_commit", "commit_sent"):
        with named(point):
            killed = pair.start_only("--until", lsn, environ={"PARAPPLY_FAILPOINT": f"{point}:kill"})
            assert killed.exit_code(30) == -9
    pair.drain()
    assert pair.target.rows("SELECT id, v FROM t ORDER BY id") == [(7, "local"), (8, "after")]
    assert pair.target.rows(_KEPT) == [("insert", "7", 1)]
    assert pair.target.rows("SELECT outcome FROM parapply.skips") == [("skipped",)]


def test_t70_a_large_transaction_is_skipped(pair: Pair, run_command: RunCommand) -> None:
    """A transaction of several pieces stops with its end LSN, by which it is skipped and kept whole."""
    pair.create(_TABLE)
    # A quarter of it is a piece.
    settings: Mapping[str, str | float] = {"apply.memory_limit_bytes": 16 << 20}
    pair.target.execute("INSERT INTO t VALUES (150, 'local')")
    pair.write("INSERT INTO t VALUES (0, 'before')")
    pair.write_one("INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series(1, 300) AS n")
    pair.write("INSERT INTO t VALUES (30000, 'after')")
    lsn = stopped_at(pair, pair.start(settings=settings))
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    pair.drain(settings=settings)
    assert pair.target.rows("SELECT id FROM t ORDER BY id") == [(0,), (150,), (30000,)]
    kept = "SELECT count(*), count(DISTINCT change_no), min(remote_lsn)::text, max(remote_lsn)::text"
    assert pair.target.rows(f"{kept} FROM parapply.conflicts WHERE conflict_type = 'skipped'") == [(300, 300, lsn, lsn)]


def test_t70_a_large_transaction_that_the_target_refuses_is_skipped(pair: Pair, run_command: RunCommand) -> None:
    """A refusal is known before its end, by which it is skipped."""
    pair.create(_TABLE, _TABLE.replace(" PRIMARY KEY", ""))
    settings: Mapping[str, str | float] = {"apply.memory_limit_bytes": 16 << 20}
    pair.drain(settings=settings)
    wait_until_gone(pair.route)
    pair.write_one(
        "INSERT INTO t VALUES (1, 'a')",
        "UPDATE t SET v = 'b'",
        "INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series(2, 400) AS n",
    )
    pair.write("INSERT INTO t VALUES (30000, 'after')")
    lsn = _ends(pair)[-2]
    pair.check_stopped(pair.start(settings=settings), code=4, says="neither a replica identity index nor a primary key")
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    pair.drain(settings=settings)
    assert pair.target.rows("SELECT id FROM t") == [(30000,)]
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts WHERE conflict_type = 'skipped'") == [(401,)]


@pytest.mark.parametrize("n_rows", [1, 100], ids=["with others", "alone"])
def test_t70_a_request_during_commit_is_not_accepted(pair: Pair, run_command: RunCommand, n_rows: int) -> None:
    """COMMIT is on its way where code runs also, with many transactions in one flight or row by row: it may succeed."""
    wait = """
        CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
          'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED
          FOR EACH ROW EXECUTE FUNCTION wait();
        ALTER TABLE t ENABLE ALWAYS TRIGGER wait;
    """
    pair.create(_TABLE, f"{_TABLE};{wait}")
    daemon = pair.start(settings={"apply.stall_check_s": 3600})
    with foreign_transaction(pair.target, "SELECT pg_advisory_xact_lock(7)"):
        pair.write(f"INSERT INTO t SELECT n, 'a' FROM generate_series(1, {n_rows}) AS n")
        pair.target.wait_until(WORKER_IS_BLOCKED)
        lsn = pair.target.wait_until("SELECT max(end_lsn)::text FROM parapply.workers")
        asked = run_command(pair.route, "skip", "--lsn", lsn, "--wait", "0", "--json")
        assert asked.returncode == 0, asked.stderr
        assert json.loads(asked.stdout)["outcome"] == "unanswered"
        assert pair.target.rows("SELECT outcome FROM parapply.skips") == [("requested",)]
    pair.target.wait_until("SELECT outcome = 'passed' FROM parapply.skips")
    assert pair.target.rows("SELECT count(*) FROM t") == [(n_rows,)]
    daemon.stop()


def test_t61_bytes_of_no_encoding_come_and_are_skipped(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """A publisher in SQL_ASCII sends what it has, so that the target refuses it by its transaction (T-61).

    So it does in ranges, and to a start that looks for what was applied and not confirmed. Of a value that is no UTF-8
    the history of conflicts has nothing that a replay could write.
    """
    with encoded_database(source_db, "SQL_ASCII") as source:
        pair = Pair(source, target_db, start_daemon)
        pair.create(_TABLE)
        pair.write("INSERT INTO t VALUES (1, 'größe')", "INSERT INTO t VALUES (2, convert_from('\\xe9', 'SQL_ASCII'))")
        assert "only texts in UTF8 can be applied" in run_command(pair.route, "check").stdout
        daemon = pair.start_only(settings=RANGES)
        assert daemon.exit_code(30) == 5, daemon.log_tail()
        assert not daemon.events_of("source_lost")
        (found,) = set(re.findall(r"parapply skip --lsn ([0-9A-F/]+)", daemon.failure))
        assert run_command(pair.route, "skip", "--lsn", found).returncode == 0
        killed = pair.start_only(environ={"PARAPPLY_FAILPOINT": f"{failpoints.COMMITTED}:kill"})
        assert killed.exit_code(30) == -signal.SIGKILL, killed.log_tail()
        pair.write("INSERT INTO t VALUES (3, 'after')")
        assert not pair.drain().events_of("history_unproved")
        assert pair.target.rows("SELECT id, v FROM t ORDER BY id") == [(1, "größe"), (3, "after")]
        kept = pair.target.rows("SELECT key, remote_row, is_complete FROM parapply.conflicts")
        assert kept == [({"id": "2"}, {"id": "2"}, False)]


def test_t61_a_character_without_utf8_ends_the_daemon(
    source_db: Database, target_db: Database, start_daemon: StartDaemon
) -> None:
    """The publisher would refuse to send it each time (T-61)."""
    with encoded_database(source_db, "WIN1252") as source:
        pair = Pair(source, target_db, start_daemon)
        pair.create(_TABLE)
        pair.write("INSERT INTO t VALUES (1, convert_from('\\x81', 'WIN1252'))")
        pair.check_stopped(pair.start_only(), code=3, says="0x81.*correct it on the publisher")
