"""The record of a conflict: its content, its count, how long it is kept, and what operators do with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from parapply.model import format_lsn
from tests.fixtures.pair import SECRET, Pair, pair
from tests.fixtures.plain import lsn_of
from tests.system.test_skip import stopped_at

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand

__all__ = ["pair"]

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
_FOUND = (
    "SELECT conflict_type, outcome, policy, key, local_row, remote_row, constraints, change_no FROM parapply.conflicts"
    " ORDER BY remote_lsn, change_no"
)
_KEEP_LOCAL: Mapping[str, str | float] = {"conflict.insert_exists": "keep_local"}
_DROPPING = ("insert_exists", "update_exists", "multiple_unique_conflicts", "update_missing", "delete_missing")


def test_t68_a_stopped_conflict_is_kept_once_and_said_to_be_repaired(pair: Pair) -> None:
    """It survives the rollback, is one row however often it was met, over restarts too, and no log has its values."""
    pair.create(_TABLE)
    pair.target.execute(f"INSERT INTO t VALUES (7, '{SECRET}')")
    xid = pair.write_one("INSERT INTO t VALUES (6, 'with it')", f"INSERT INTO t VALUES (7, '{SECRET} too')")
    for _ in range(2):
        pair.check_conflict(pair.start(), kind="insert_exists", xid=xid, place="public.t, key (id)")
    rows = ({"id": "7"}, {"id": "7", "v": SECRET}, {"id": "7", "v": f"{SECRET} too"})
    assert pair.target.rows(_FOUND) == [("insert_exists", "stopped", "error", *rows, ["t_pkey"], 2)]
    assert pair.target.rows("SELECT attempts, remote_xid FROM parapply.conflicts") == [(2, xid)]
    pair.target.execute("DELETE FROM t")
    pair.drain()
    assert pair.target.rows(_FOUND) == [("insert_exists", "repaired", "error", *rows, ["t_pkey"], 2)]
    pair.check_equal()


def test_an_error_of_the_data_is_not_said_to_be_in_the_history(pair: Pair) -> None:
    """Its hint names no policy, and what shows its values after a skip only; a setting for no table is logged."""
    pair.create(_TABLE)
    pair.target.execute("ALTER TABLE t ALTER v TYPE varchar(3)")
    pair.write("INSERT INTO t VALUES (1, 'abcd')")
    daemon = pair.start_only(settings={'conflict.tables."public.tt".insert_exists': "skip"})
    assert daemon.exit_code(30) == 5
    hint = daemon.wait_for_event("daemon_failed")["hint"]
    assert "no policy settles that" in hint
    assert "parapply skip --lsn" in hint
    assert "`, which keeps its changes for `parapply conflicts show`" in hint
    assert pair.target.rows(_FOUND) == []
    told = daemon.wait_for_event("setting_without_table")
    assert told["setting"] == 'conflict.tables."public.tt"'
    assert told["reason"] == "public.tt is no published table; did you mean public.t?"


def test_t68_a_settled_conflict_and_a_kill(pair: Pair) -> None:
    """Rows, record and history commit together: killed before or behind the COMMIT there is one row in the end."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (7, 'local')")
    pair.write("INSERT INTO t VALUES (7, 'remote')")
    for point in ("before_commit", "commit_sent"):
        killed = pair.start_only(settings=_KEEP_LOCAL, environ={"PARAPPLY_FAILPOINT": f"{point}:kill"})
        assert killed.exit_code(30) == -9
    pair.drain(settings=_KEEP_LOCAL)
    assert pair.target.rows("SELECT outcome, attempts FROM parapply.conflicts") == [("kept_local", 1)]


def test_a_snapshot_says_that_changes_were_left_out(pair: Pair, run_command: RunCommand) -> None:
    """It equals the publisher but for them, in the history or not, since a heal or a copy; else it says no more."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (7, 'local'), (8, 'local')")
    daemon = pair.start(settings=_KEEP_LOCAL)
    taken = run_command(pair.route, "snapshot", "--", "true")
    assert " equals the publisher at " in taken.stdout, taken.stderr
    assert "left out" not in taken.stdout
    pair.write("INSERT INTO t VALUES (7, 'remote')")
    daemon.wait_caught_up()
    taken = run_command(pair.route, "snapshot", "--", "true")
    assert ", but for 1 change that was left out (`parapply conflicts list`) (paused " in taken.stdout
    assert run_command(pair.route, "conflicts drop", "--all", "--yes").returncode == 0
    pair.write("INSERT INTO t VALUES (8, 'remote')")
    daemon.wait_caught_up()
    taken = run_command(pair.route, "snapshot", "--", "true")
    left = "that were left out (`parapply conflicts list`, which no longer has 1 of them) (paused "
    assert f", but for 2 changes {left}" in taken.stdout
    replayed = run_command(pair.route, "conflicts replay", "--outcome", "kept_local", "--yes")
    assert replayed.returncode == 0, replayed.stderr
    taken = run_command(pair.route, "snapshot", "--json", "--", "true")
    assert [(one["n_left_out"], one["n_forgotten"]) for one in json.loads(taken.stdout)] == [(1, 1)]
    # As a heal leaves it.
    pair.target.execute(
        "UPDATE parapply.conflicts SET replayed_at = NULL; UPDATE parapply.slots SET n_forgotten = 0,"
        " begin_lsn = lowest_lsn"
    )
    assert "left out" not in run_command(pair.route, "snapshot", "--", "true").stdout
    # A copy has the changes from before it, also when the history drops them.
    pair.target.execute("INSERT INTO t VALUES (9, 'local')")
    pair.write("INSERT INTO t VALUES (9, 'remote')")
    daemon.wait_caught_up()
    assert run_command(pair.route, "refresh", "--table", "public.t", "--truncate").returncode == 0
    assert run_command(pair.route, "conflicts drop", "--all", "--yes").returncode == 0
    daemon.wait_caught_up()
    taken = run_command(pair.route, "snapshot", "--", "true")
    assert " equals the publisher at " in taken.stdout, taken.stderr
    assert "left out" not in taken.stdout


def test_t69_no_policy_ever_hides_a_change_of_order(pair: Pair) -> None:
    """Where unseen values are freed and taken all the time, policies that drop changes drop none (T-19, T-69)."""
    pair.create("CREATE TABLE u (id int PRIMARY KEY, email text UNIQUE)")
    pair.write("INSERT INTO u SELECT n, 'a' || n FROM generate_series(1, 60) AS n")
    drop: dict[str, str | float] = {f"conflict.{kind}": "skip" for kind in _DROPPING}
    daemon = pair.start(
        workers=8, settings={**drop, "apply.max_batch_transactions": 2, "apply.commit_order": "relaxed"}
    )
    pair.write(
        *(
            text
            for n in range(1, 61)
            for text in (
                f"UPDATE u SET email = 'b{n}' WHERE id = {n}" if n % 2 else f"DELETE FROM u WHERE id = {n}",
                f"INSERT INTO u VALUES ({1000 + n}, 'a{n}')",
                f"UPDATE u SET email = 'c' WHERE id = {1000 + n}",
                f"UPDATE u SET email = 'c{n}' WHERE id = {1000 + n}",
            )
        )
    )
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]
    pair.check_equal()


def test_t41_an_incomplete_update_never_becomes_an_insert(pair: Pair) -> None:
    """Where unchanged TOAST was not sent apply_remote stops, and says why; a replay refuses as well (T-41)."""
    pair.create("CREATE TABLE t (id int PRIMARY KEY, n int, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    pair.write("INSERT INTO t VALUES (1, 0, repeat('x', 5000)), (2, 0, 'small')")
    pair.drain()
    pair.target.execute("DELETE FROM t")
    pair.write("UPDATE t SET n = 2 WHERE id = 2", "UPDATE t SET n = 1 WHERE id = 1")
    settings = {"conflict.update_missing": "apply_remote"}
    says = r"update_missing on public\.t, key \(id\): the row is not there; the publisher did not send its unchanged"
    pair.check_stopped(pair.start(settings=settings), code=5, says=says)
    assert pair.target.rows("SELECT id, n, big FROM t") == [(2, 2, "small")]
    kept = "SELECT outcome, is_complete, remote_row FROM parapply.conflicts ORDER BY remote_lsn"
    assert pair.target.rows(kept) == [
        ("applied_remote", True, {"id": "2", "n": "2", "big": "small"}),
        ("stopped", False, {"id": "1", "n": "1"}),
    ]


def test_a_lost_connection_is_no_conflict(pair: Pair) -> None:
    """A worker's session that ends while a conflict is settled costs a repetition and no change (as F3)."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (7, 'local')")
    daemon = pair.start(settings={**_KEEP_LOCAL, "source.reconnect_min_s": 0.01})
    with pair.target.connect() as foreign:
        foreign.execute("BEGIN; SELECT FROM t WHERE id = 7 FOR UPDATE")
        pair.write("INSERT INTO t VALUES (7, 'remote')", "INSERT INTO t VALUES (8, 'after')")
        # It looks at the row in its way, which another session holds.
        looks = "application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock' AND query LIKE '%FOR UPDATE%'"
        ends = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND {looks}"
        pair.target.wait_until(ends)
        foreign.execute("COMMIT")
    daemon.wait_caught_up()
    assert daemon.events_of("target_lost")
    assert pair.target.rows("SELECT id, v FROM t ORDER BY id") == [(7, "local"), (8, "after")]
    assert pair.target.rows("SELECT outcome, attempts FROM parapply.conflicts") == [("kept_local", 1)]


def test_t47_an_error_of_the_data_is_no_conflict(pair: Pair) -> None:
    """An error that is neither a row missing nor a row in the way stops, whatever the policies (T-47)."""
    pair.create(_TABLE)
    pair.target.execute("ALTER TABLE t ADD CHECK (id < 100)")
    pair.write("INSERT INTO t VALUES (1, 'good')", "INSERT INTO t VALUES (100, 'refused')")
    settings: dict[str, str | float] = {f"conflict.{kind}": "skip" for kind in _DROPPING}
    says = r"insert on public\.t, key \(id\): check_violation \(23514\), constraint t_id_check"
    pair.check_stopped(pair.start(settings=settings), code=5, says=says)
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]


@pytest.mark.parametrize("order", ["preserve", "relaxed"])
def test_what_goes_on_while_a_transaction_is_retried(pair: Pair, order: str) -> None:
    """Relaxed, even one worker applies what is independent of two that fail; with the order kept nothing passes."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (1, 'local'), (2, 'local')")
    settings: dict[str, str | float] = {
        "apply.on_error": "retry",
        "apply.commit_order": order,
        "apply.max_batch_transactions": 1,
    }
    daemon = pair.start(workers=1, settings=settings)
    pair.write(*(f"INSERT INTO t VALUES ({n}, 'remote')" for n in (1, 2, 3, 4)), "UPDATE t SET v = 'v' WHERE id = 1")
    daemon.wait_for_event("batch_failed", count=2)
    if order == "relaxed":
        pair.target.wait_until("SELECT count(*) = 2 FROM t WHERE id > 2")
    else:
        assert pair.target.rows("SELECT count(*) FROM t WHERE v <> 'local'") == [(0,)]
    pair.target.execute("DELETE FROM t WHERE v = 'local'")
    daemon.wait_caught_up()
    pair.check_equal()
    pair.target.wait_until("SELECT count(*) > 0 AND bool_and(outcome = 'repaired') FROM parapply.conflicts")
    daemon.stop()


def test_conflicts_inside_a_large_transaction(pair: Pair, tmp_path: Path) -> None:
    """A transaction of several pieces is settled like any other, and its conflicts have its end LSN (T-46)."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t VALUES (3, 'local'), (280, 'local')")
    pair.write_one("INSERT INTO t SELECT n, repeat('x', 15000) FROM generate_series(1, 300) AS n")
    pair.write("INSERT INTO t VALUES (2000, 'after')")
    # A quarter of the memory is a piece.
    pair.drain(settings={**_KEEP_LOCAL, "apply.memory_limit_bytes": 16 << 20, "applylog.directory": str(tmp_path),
                         "applylog.detail": "transaction"})  # fmt: skip
    assert pair.target.rows("SELECT id FROM t WHERE v = 'local' ORDER BY id") == [(3,), (280,)]
    assert pair.target.rows("SELECT count(*) FROM t") == [(301,)]
    is_end = "remote_lsn < (SELECT lowest_remote_lsn FROM parapply.progress)"
    found = f"SELECT change_no, outcome, {is_end} FROM parapply.conflicts ORDER BY 1"
    assert pair.target.rows(found) == [(3, "kept_local", True), (280, "kept_local", True)]
    records = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    of_transactions = [len(record["conflicts"]) for record in records if record["record"] == "transaction"]
    assert of_transactions == [2, 0]


def test_t47_counters_and_commands(pair: Pair, run_command: RunCommand, tmp_path: Path) -> None:
    """Status, the apply log and the commands say the same; what is replayed is applied, what is dropped is gone."""
    pair.create("CREATE TABLE t (id int PRIMARY KEY, v text, w text); INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    pair.target.execute(f"DELETE FROM t; INSERT INTO t VALUES (7, '{SECRET}')")
    pair.write("UPDATE t SET v = 'remote' WHERE id = 1", "DELETE FROM t WHERE id = 2", "INSERT INTO t VALUES (7, 'x')")
    skip = {f"conflict.{kind}": "skip" for kind in ("update_missing", "delete_missing", "insert_exists")}
    pair.drain(settings={**skip, "applylog.directory": str(tmp_path), "applylog.detail": "transaction"})
    kinds = ["update_missing", "delete_missing", "insert_exists"]

    status = json.loads(run_command(pair.route, "status", "--json").stdout)["conflicts"]
    assert [(one["type"], one["table"], one["outcome"], one["count"]) for one in status] == [
        (kind, "public.t", "skipped", 1) for kind in sorted(kinds)
    ]
    records = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    settled = [{"type": kind, "table": "public.t", "policy": "skip", "outcome": "skipped"} for kind in kinds]
    of_batches = [record["conflicts"] for record in records if record["record"] == "batch"]
    assert [one for conflicts in of_batches for one in conflicts] == settled
    assert [record["conflicts"] for record in records if record["record"] == "transaction"] == [
        [one] for one in settled
    ]

    def listed(*filters: str) -> list[dict[str, object]]:
        done = run_command(pair.route, "conflicts list", "--json", *filters, code=0)
        found: list[dict[str, object]] = json.loads(done.stdout)
        return found

    assert [one["conflict_type"] for one in listed()] == kinds
    shown = run_command(pair.route, "conflicts list", environ={"COLUMNS": "80"}).stdout
    assert all(kind in shown for kind in kinds)
    assert "…" not in shown
    assert all(f" {row['remote_lsn']} " in shown for row in listed()), "each whole, to be copied"
    assert [one["conflict_type"] for one in listed("--limit", "1")] == kinds[-1:]
    assert [one["key"] for one in listed("--type", "delete_missing", "--table", "public.t")] == [{"id": "2"}]
    assert listed("--since", "tomorrow") == listed("--outcome", "stopped") == []
    shown = run_command(pair.route, "conflicts show", "--type", "insert_exists").stdout
    assert f'v: "{SECRET}" | "x"' in shown
    plan = run_command(pair.route, "conflicts replay", "--outcome", "skipped", "--dry-run", code=0)
    assert f'~ v: "{SECRET}" -> "x"' in plan.stdout
    assert pair.target.rows("SELECT id, v FROM t") == [(7, SECRET)]
    done = run_command(pair.route, "conflicts replay", "--outcome", "skipped", "--yes", "--json")
    assert [one["action"] for one in json.loads(done.stdout)] == ["insert", "nothing", "update"]
    pair.check_equal()
    assert all(one["replayed_at"] for one in listed())
    ids = [str(one["conflict_id"]) for one in listed()]
    assert json.loads(run_command(pair.route, "conflicts drop", ids[0], "--yes", "--json").stdout) == {"dropped": 1}
    assert run_command(pair.route, "conflicts show", ids[0]).returncode == 4
    assert len(listed()) == 2


def test_what_is_replayed_of_a_table_without_a_key_is_exact(pair: Pair, run_command: RunCommand) -> None:
    """Rows with the same values are as many as on the publisher, and a second replay changes nothing and says so.

    The change that stopped the daemon has a second conflict, of the skip: it counts once, and is replayed once.
    """
    pair.create(
        "CREATE TABLE t (id int, n int); ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (5, 1), (7, 1)"
    )
    pair.write("BEGIN; INSERT INTO t VALUES (5, 1), (5, 1), (6, 1); UPDATE t SET n = 2 WHERE id = 7; COMMIT")
    pair.target.execute("DELETE FROM t WHERE id = 7")
    lsn = stopped_at(pair, pair.start())
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    daemon = pair.start()
    daemon.wait_caught_up()
    (taken,) = json.loads(run_command(pair.route, "snapshot", "--json", "--", "true").stdout)
    assert taken["n_left_out"] == 4
    daemon.stop()
    replayed = run_command(pair.route, "conflicts replay", "--lsn", lsn, "--yes")
    assert replayed.stdout.endswith("4 applied, 1 not\n"), replayed.stderr
    pair.check_equal()
    again = run_command(pair.route, "conflicts replay", "--lsn", lsn, "--yes")
    assert again.stdout.endswith("0 applied, 5 not\n"), again.stderr
    assert "it was replayed at" in again.stdout
    pair.check_equal()


def test_a_replayed_truncate_empties_what_the_publisher_has_emptied(pair: Pair, run_command: RunCommand) -> None:
    """Not the children of a table, which have rows of their own, whatever their names are."""
    pair.create(
        'CREATE TABLE "par, public.kid" (id int PRIMARY KEY, v int);'
        'CREATE TABLE kid (PRIMARY KEY (id)) INHERITS ("par, public.kid")',
        published='TABLE ONLY "par, public.kid", ONLY kid',
    )
    pair.write('INSERT INTO "par, public.kid" VALUES (1, 1)', "INSERT INTO kid VALUES (2, 2)")
    pair.drain()
    pair.write('TRUNCATE ONLY "par, public.kid"')
    lsn = format_lsn(lsn_of(pair.source))
    assert run_command(pair.route, "skip", "--lsn", lsn).returncode == 0
    pair.drain()
    assert pair.target.rows('SELECT count(*) FROM ONLY "par, public.kid"') == [(1,)]
    replayed = run_command(pair.route, "conflicts replay", "--lsn", lsn, "--yes")
    assert "truncate public.par, public.kid\n" in replayed.stdout, replayed.stderr
    pair.check_equal()
    assert pair.target.rows("SELECT v FROM ONLY kid") == [(2,)]


def test_retention(pair: Pair) -> None:
    """Old conflicts go, and beyond a number the oldest; never what a transaction is still stopped by."""
    pair.create(_TABLE)
    pair.target.execute("INSERT INTO t SELECT n, 'local' FROM generate_series(1, 5) AS n")
    pair.write(*(f"INSERT INTO t VALUES ({n}, 'remote')" for n in range(1, 6)))
    pair.drain(settings=_KEEP_LOCAL)
    pair.target.execute("UPDATE parapply.conflicts SET outcome = 'stopped', remote_lsn = 'FF/0' WHERE key->>'id' = '1'")
    pair.drain(settings={"conflict.keep_rows": 3})
    assert pair.target.rows("SELECT key->>'id' FROM parapply.conflicts ORDER BY 1") == [("1",), ("3",), ("4",), ("5",)]
    pair.drain(settings={"conflict.keep_s": 0})
    assert pair.target.rows("SELECT key->>'id' FROM parapply.conflicts") == [("1",)]
    assert pair.target.rows("SELECT n_forgotten FROM parapply.slots") == [(4,)]
