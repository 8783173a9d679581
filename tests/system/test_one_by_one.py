"""Where code runs on the target each source transaction is a target transaction, though many are sent in one flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.applylog_schema import BatchRecord, read_record
from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pair"]

#: The trigger's notes differ if two source transactions share a target transaction, or one has two: its number,
#: whether it is the first of its transaction (a setting that COMMIT takes back), and the rows present when it commits.
_TABLES = """
CREATE TABLE t (id int PRIMARY KEY, v int);
CREATE TABLE plain (id int PRIMARY KEY, v int);
CREATE TABLE audit (n serial PRIMARY KEY, entry text, tx bigint DEFAULT txid_current());
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO public.audit (entry) VALUES (concat_ws(' ', TG_NAME, TG_OP, OLD.id, NEW.id, NEW.v,
    nullif(current_setting('test.has_begun', true), ''), (SELECT sum(v) FROM public.t),
    (SELECT count(*) FROM public.plain)));
  PERFORM set_config('test.has_begun', 'yes', true);
  RETURN NEW; END $$;
CREATE TRIGGER at_once AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note();
CREATE CONSTRAINT TRIGGER at_end AFTER INSERT OR UPDATE OR DELETE ON t DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION note();
"""
_ALWAYS = "ALTER TABLE t ENABLE ALWAYS TRIGGER at_once; ALTER TABLE t ENABLE ALWAYS TRIGGER at_end;"
_AUDIT = "SELECT array_agg(entry ORDER BY n) FROM audit GROUP BY tx ORDER BY min(n)"
_N = 120


def _create(pair: Pair, on_target: str = "") -> None:
    pair.create(_TABLES, _TABLES + _ALWAYS + on_target, published="TABLE t, plain")


def _write(pair: Pair) -> None:
    load: list[str] = []
    for n in range(1, _N + 1):
        load += [f"INSERT INTO t VALUES ({n}, {n})", f"INSERT INTO plain VALUES ({n}, {n})"]
        updates = "; ".join(f"UPDATE t SET v = v + 1 WHERE id = {id_}" for id_ in (n, n - 1))
        load.append(f"BEGIN; {updates}; DELETE FROM t WHERE id = {n - 5}; COMMIT")
    pair.write(*load)


def _check_equal(pair: Pair) -> None:
    for query in (_AUDIT, "SELECT * FROM t ORDER BY id", "SELECT * FROM plain ORDER BY id"):
        assert pair.target.rows(query) == pair.source.rows(query)


def test_t46_none_is_merged_with_another_or_seen_in_part(pair: Pair, tmp_path: Path) -> None:
    """A trigger that looks at its transaction sees on the target what it saw on the source, and no batch for each."""
    _create(pair)
    _write(pair)
    pair.drain(settings={"applylog.directory": str(tmp_path)})
    _check_equal(pair)
    lines = (line for path in tmp_path.glob("*.jsonl") for line in path.read_bytes().splitlines())
    batches = [record for line in lines if isinstance(record := read_record(line), BatchRecord)]
    assert sum(batch.n_transactions for batch in batches) == 3 * _N
    assert len(batches) < _N / 4
    assert {batch.attempts for batch in batches} == {1}


def test_t35_nothing_runs_after_a_commit_that_fails(pair: Pair) -> None:
    """A deferred check refuses one of many in flight: all before it are applied, none after it; later all are."""
    refuse = """
        CREATE TABLE gate (id int); INSERT INTO gate VALUES (1);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          IF NEW.id = 100 AND EXISTS (SELECT FROM public.gate) THEN RAISE EXCEPTION 'not now'; END IF;
          RETURN NEW; END $$;
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED
          FOR EACH ROW EXECUTE FUNCTION refuse();
        ALTER TABLE t ENABLE ALWAYS TRIGGER refuse;
    """
    _create(pair, refuse)
    _write(pair)
    pair.check_stopped(pair.start(), code=5, says=r"raise_exception \(P0001\)")
    assert pair.target.rows("SELECT max(id) FROM t") == [(99,)]
    assert pair.target.rows("SELECT max(id) FROM plain") == [(99,)]
    pair.target.execute("DELETE FROM gate")
    pair.drain()
    _check_equal(pair)


def test_t69_nothing_runs_after_a_row_that_is_missing(pair: Pair) -> None:
    """A count that differs fails on the server, before COMMIT: the conflict is the only one, and none is passed."""
    _create(pair)
    pair.write("INSERT INTO t VALUES (1, 0), (2, 0)")
    pair.drain()
    pair.target.execute("ALTER TABLE t DISABLE TRIGGER USER; DELETE FROM t WHERE id = 2;" + _ALWAYS)
    updates = [f"UPDATE t SET v = {n} WHERE id = 1" for n in range(1, 20)]
    pair.write(*updates[:9])
    xid = pair.write_one("UPDATE t SET v = 1 WHERE id = 2")
    pair.write(*updates[9:])
    pair.check_conflict(pair.start(), kind="update_missing", xid=xid, place="public.t, key (id)")
    assert pair.target.rows("SELECT v FROM t") == [(9,)]
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(1,)]


def test_t11_a_kill_in_the_middle_of_many_leaves_whole_ones_and_repeats_none(pair: Pair) -> None:
    """Each has its own record: after a crash with half a batch committed the rest is applied, and nothing twice."""
    _create(pair)
    _write(pair)
    daemon = pair.start_only(environ={"PARAPPLY_FAILPOINT": "commit_sent:kill:3"})
    assert daemon.exit_code(60) == -9, daemon.log_tail()
    pair.drain()
    _check_equal(pair)


def test_t43_a_trigger_that_leaves_rows_out_is_met_once(pair: Pair) -> None:
    """The first row that it leaves out looks like a missing one; the table is asked first from then on (T-43)."""
    veto = """
        CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS
          'BEGIN RETURN CASE WHEN NEW.v % 3 = 0 THEN NULL ELSE NEW END; END';
        CREATE TRIGGER veto BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION veto();
        ALTER TABLE t ENABLE ALWAYS TRIGGER veto;
    """
    tables = "CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT n, -1 FROM generate_series(1, 60) AS n;"
    pair.create(tables, tables + veto)
    pair.write(*(f"UPDATE t SET v = {n} WHERE id = {n}" for n in range(1, 61)))
    daemon = pair.drain()
    assert pair.target.rows("SELECT v FROM t ORDER BY id") == [(-1 if n % 3 == 0 else n,) for n in range(1, 61)]
    assert [retried["reason"] for retried in daemon.events_of("batch_retried")] == ["row count"]
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]
