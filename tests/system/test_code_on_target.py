"""Triggers, rules, defaults, foreign keys and views on the target: what acts, in which order, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import SECRET, Pair, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pair"]

_TABLES = "CREATE TABLE t (id int PRIMARY KEY, v int, w int); CREATE TABLE other (id int PRIMARY KEY, v int);"
_AUDIT = """
CREATE TABLE audit (n serial PRIMARY KEY, entry text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO public.audit (entry) VALUES (concat_ws(' ', TG_OP, TG_TABLE_NAME, OLD.id, NEW.id, NEW.v));
  RETURN NEW; END $$;
"""
_NOTE = "CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON {} FOR EACH ROW EXECUTE FUNCTION note();"
_ALWAYS = "ALTER TABLE {} ENABLE ALWAYS TRIGGER note;"


def audited_load() -> Iterator[str]:
    """Yield transactions over both tables in which every order but the source's would show."""
    for n in range(1, 41):
        yield f"INSERT INTO t VALUES ({n}, 0, 0)"
        yield f"BEGIN; INSERT INTO other VALUES ({n}, 0); UPDATE t SET v = {n} WHERE id = {n}; COMMIT"
        yield f"UPDATE other SET v = v + 1 WHERE id = {n}"
        if n % 4 == 0:
            yield f"BEGIN; DELETE FROM other WHERE id = {n}; DELETE FROM t WHERE id = {n - 1}; COMMIT"


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "backlog"])
def test_t29_always_triggers_see_the_order_of_the_source(pair: Pair, *, is_live: bool) -> None:
    """An audit by ENABLE ALWAYS triggers is the source's own audit, over several tables and eight workers (T-29)."""
    notes = "".join(_NOTE.format(table) for table in ("t", "other"))
    always = "".join(_ALWAYS.format(table) for table in ("t", "other"))
    pair.create(_TABLES + _AUDIT + notes, _TABLES + _AUDIT + notes + always, published="TABLE t, other")
    if is_live:
        daemon = pair.start(workers=8)
        pair.write(*audited_load())
        daemon.wait_caught_up()
        daemon.stop()
    else:
        pair.write(*audited_load())
        pair.drain(workers=8)
    audit = "SELECT entry FROM audit ORDER BY n"
    assert pair.target.rows(audit) == pair.source.rows(audit)
    lanes = pair.target.rows("SELECT table_name, lane, reason LIKE '%trigger note%' FROM parapply.tables ORDER BY 1")
    assert lanes == [("other", "serial", True), ("t", "serial", True)]


def test_t29_triggers_of_one_table_do_not_hold_up_the_others(pair: Pair) -> None:
    """Only transactions that touch a table with code are serial; the rest stays set-based (T-29)."""
    pair.create(_TABLES, _TABLES + _AUDIT + _NOTE.format("t") + _ALWAYS.format("t"), published="TABLE t, other")
    pair.write(*audited_load())
    pair.drain(workers=8)
    lanes = pair.target.rows("SELECT table_name, lane FROM parapply.tables ORDER BY 1")
    assert lanes == [("other", "set-based"), ("t", "serial")]
    for table in ("t", "other"):
        query = f"SELECT * FROM {table} ORDER BY id"
        assert pair.target.rows(query) == pair.source.rows(query)


def test_t29_update_of_triggers_fire(pair: Pair) -> None:
    """Every column that came is set, so a trigger for one column fires as in the built-in subscription (T-29)."""
    trigger = "CREATE TRIGGER note AFTER UPDATE OF v ON t FOR EACH ROW EXECUTE FUNCTION note();" + _ALWAYS.format("t")
    pair.create(_TABLES, _TABLES + _AUDIT + trigger, published="TABLE t, other")
    pair.write("INSERT INTO t VALUES (1, 5, 0)", "UPDATE t SET w = 1 WHERE id = 1")
    pair.drain()
    assert pair.target.rows("SELECT entry FROM audit") == [("UPDATE t 1 1 5",)]


def test_t43_a_vetoing_trigger_is_no_conflict(pair: Pair) -> None:
    """A BEFORE trigger that returns NULL keeps the row as it is; that is neither missing nor an error (T-43)."""
    trigger = """
        CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF OLD.id = 1 OR NEW.id = 3 THEN RETURN NULL; END IF;
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END; END $$;
        CREATE TRIGGER veto BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION veto();
        ALTER TABLE t ENABLE ALWAYS TRIGGER veto;
    """
    pair.create(_TABLES + "INSERT INTO t VALUES (1, 0, 0), (2, 0, 0)", published="TABLE t, other")
    pair.target.execute(trigger)
    pair.write("UPDATE t SET v = 1", "INSERT INTO t VALUES (3, 0, 0), (4, 0, 0)", "DELETE FROM t WHERE id = 1")
    pair.drain()
    assert pair.target.rows("SELECT id, v FROM t ORDER BY id") == [(1, 0), (2, 1), (4, 0)]


def test_t43_a_missing_row_is_a_conflict_beside_a_trigger(pair: Pair) -> None:
    """Where triggers act the row is looked for: a deleted one is delete_missing, not a veto (T-43)."""
    pair.create(
        _TABLES + "INSERT INTO t VALUES (1, 0, 0)",
        _TABLES + _AUDIT + _NOTE.format("t") + _ALWAYS.format("t"),
        published="TABLE t, other",
    )
    xid = pair.write_one("DELETE FROM t WHERE id = 1")
    pair.check_conflict(pair.start(), kind="delete_missing", xid=xid, place="public.t, key (id)")


def test_a_unique_violation_of_a_triggers_own_table_is_settled_by_no_policy(pair: Pair) -> None:
    """It concerns another table, even one of the same names in another schema: an error of the data that names it."""
    tables = "CREATE TABLE t (id int PRIMARY KEY, v int)"
    trigger = """
        CREATE SCHEMA log; CREATE TABLE log.t (id int PRIMARY KEY); INSERT INTO log.t VALUES (1);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO log.t VALUES (NEW.id); RETURN NEW; END $$;
        CREATE TRIGGER note BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION note();
    """
    pair.create(tables, f"{tables}; INSERT INTO t VALUES (1, 0); {trigger} {_ALWAYS.format('t')}", published="TABLE t")
    pair.write("INSERT INTO t VALUES (1, 1)")
    daemon = pair.start(settings={"conflict.insert_exists": "apply_remote"})
    pair.check_stopped(daemon, code=5, says=r"unique_violation \(23505\), constraint t_pkey of log\.t; transaction")
    assert pair.target.rows("SELECT v FROM t") == [(0,)]
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]


def test_t50_an_identity_that_cannot_change_is_a_conflict_beside_a_trigger(pair: Pair) -> None:
    """An update that changes an ALWAYS identity column is never lost silently, as if a trigger had vetoed it (T-50).

    Other updates of the table, and those in which the column keeps its value, are applied.
    """
    identity = "ALTER TABLE t ALTER w ADD GENERATED ALWAYS AS IDENTITY;"
    tables = "CREATE TABLE t (id int PRIMARY KEY, v int, w int NOT NULL); INSERT INTO t VALUES (1, 0, 1), (2, 0, 2);"
    pair.create(tables, tables + identity + _AUDIT + _NOTE.format("t") + _ALWAYS.format("t"), published="TABLE t")
    pair.write("UPDATE t SET v = 1")
    xid = pair.write_one("UPDATE t SET w = 7 WHERE id = 1")
    daemon = pair.start()
    pair.check_conflict(daemon, kind="update_missing", xid=xid, place="public.t, key (id)")
    assert "column w would have to change" in daemon.lines[-1]
    pair.target.execute("ALTER TABLE t ALTER w SET GENERATED BY DEFAULT")
    pair.drain()
    assert pair.target.rows("SELECT * FROM t ORDER BY id") == pair.source.rows("SELECT * FROM t ORDER BY id")


def test_t29_statement_triggers_make_a_table_serial(pair: Pair) -> None:
    """SQL fires statement triggers, which the built-in subscription does not: once a row, in order (T-29)."""
    trigger = """
        CREATE FUNCTION count_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO public.audit (entry) VALUES (TG_OP); RETURN NULL; END $$;
        CREATE TRIGGER note AFTER INSERT OR UPDATE ON t FOR EACH STATEMENT EXECUTE FUNCTION count_it();
    """
    pair.create(_TABLES, _TABLES + _AUDIT + trigger + _ALWAYS.format("t"), published="TABLE t, other")
    pair.write("INSERT INTO t SELECT n, 0, 0 FROM generate_series(1, 3) AS n", "UPDATE t SET v = 1 WHERE id = 2")
    pair.drain()
    assert pair.target.rows("SELECT entry FROM audit ORDER BY n") == [("INSERT",)] * 3 + [("UPDATE",)]


def test_t29_rules(pair: Pair) -> None:
    """A rule ALWAYS that adds something acts in order; one that swallows the row stops the daemon (T-29).

    The built-in subscription ignores rules, SQL cannot: losing the row silently is what must not happen.
    """
    also = "CREATE RULE note AS ON UPDATE TO t DO ALSO INSERT INTO audit (entry) VALUES (NEW.id);"
    pair.create(_TABLES, _TABLES + _AUDIT + also + "ALTER TABLE t ENABLE ALWAYS RULE note", published="TABLE t, other")
    pair.write("INSERT INTO t VALUES (1, 0, 0), (2, 0, 0)", "UPDATE t SET v = 1")
    pair.drain()
    assert pair.target.rows("SELECT entry FROM audit ORDER BY n") == [("1",), ("2",)]
    assert "rule note" in pair.target.rows("SELECT reason FROM parapply.tables")[0][0]
    pair.target.execute(
        "CREATE RULE swallow AS ON INSERT TO t DO INSTEAD NOTHING; ALTER TABLE t ENABLE ALWAYS RULE swallow"
    )
    pair.write(f"INSERT INTO t VALUES (3, length('{SECRET}'), 0)")
    says = r"insert on public\.t, key \(id\): 0 rows where 1 are expected; transaction \d+, end LSN"
    pair.check_stopped(pair.start(), code=5, says=says)
    pair.target.execute("DROP RULE swallow ON t")
    pair.drain()
    assert pair.target.rows("SELECT v FROM t WHERE id = 3") == [(6,)]


@pytest.mark.parametrize("default", ["DEFAULT nextval('numbers')", "GENERATED BY DEFAULT AS IDENTITY"])
def test_t29_sequences_count_in_the_order_of_the_source(pair: Pair, default: str) -> None:
    """A number that only the target gives follows the source's order, also when the first is held up (T-29)."""
    tables = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE hold (id int PRIMARY KEY, v int);"
    tables += "INSERT INTO hold VALUES (1, 0);"
    pair.create(tables, f"{tables} CREATE SEQUENCE numbers; ALTER TABLE t ADD n int {default}")
    daemon = pair.start(workers=8)
    with pair.target.connect() as foreign:
        foreign.execute("BEGIN; SELECT FROM hold WHERE id = 1 FOR UPDATE")
        pair.write("BEGIN; UPDATE hold SET v = 1 WHERE id = 1; INSERT INTO t VALUES (1000, 'first'); COMMIT")
        pair.target.wait_until(WORKER_IS_BLOCKED)
        pair.write(*(f"INSERT INTO t VALUES ({1000 - number}, 'v')" for number in range(1, 30)))
        pair.write("INSERT INTO hold VALUES (2, 0)")
        # All of it has been received, so whoever could run beside the first has had the chance.
        end_lsn = pair.route.end_of_source_lsn()
        pair.target.wait_until(f"SELECT source_lsn >= '{end_lsn}' FROM parapply.slots")
        foreign.execute("COMMIT")
    daemon.wait_caught_up()
    daemon.stop()
    assert pair.target.rows("SELECT n, id FROM t ORDER BY n") == [(n + 1, 1000 - n) for n in range(30)]


def test_triggers_of_the_origin_stay_silent(pair: Pair) -> None:
    """Under the replica role ordinary triggers and rules do nothing, and tables with them stay set-based."""
    bomb = """
        CREATE FUNCTION explode() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'fired'; END $$;
        CREATE TRIGGER bomb BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION explode();
        CREATE RULE swallow AS ON INSERT TO other DO INSTEAD NOTHING;
    """
    pair.create(_TABLES, _TABLES + bomb)
    pair.write(*audited_load())
    pair.drain()
    pair.check_equal()
    assert pair.target.rows("SELECT DISTINCT lane FROM parapply.tables") == [("set-based",)]


_FAMILY = """
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent, self int REFERENCES child);
"""


def test_t25_foreign_keys_are_enforced_in_the_origin_role(pair: Pair) -> None:
    """With session_replication_role = origin every key is checked, and rows come in an order that holds (T-25)."""
    pair.create(_FAMILY)
    settings = {"target.session_replication_role": "origin"}
    daemon = pair.start(workers=8, settings=settings)
    for n in range(20):
        pair.write(
            f"BEGIN; INSERT INTO parent VALUES ({n}); INSERT INTO child VALUES ({n}, {n}, {max(n - 1, 0)}); COMMIT",
            f"UPDATE child SET parent = {n} WHERE parent = {n - 1}; DELETE FROM parent WHERE id = {n - 1}",
        )
    daemon.wait_caught_up()
    daemon.stop()
    pair.check_equal()
    pair.write("INSERT INTO parent VALUES (99)")
    pair.drain(settings=settings)
    pair.target.execute("DELETE FROM parent WHERE id = 99")
    xid = pair.write_one("INSERT INTO child VALUES (99, 99, NULL)")
    daemon = pair.start(settings=settings)
    pair.check_conflict(daemon, kind="insert", xid=xid, place="public.child, key (id)")
    pair.target.execute("INSERT INTO parent VALUES (99)")
    pair.drain(settings=settings)
    pair.check_equal()


def test_t26_checks_that_are_deferred_here_do_not_stop_a_truncate(pair: Pair) -> None:
    """A table that the target still has to check is truncated all the same, alone or in a merged batch (T-26)."""
    tree = "CREATE TABLE tree (id int PRIMARY KEY, up int REFERENCES tree{})"
    pair.create(tree.format(""), tree.format(" DEFERRABLE INITIALLY DEFERRED"))
    pair.write(
        "INSERT INTO tree VALUES (1, 1)",
        "BEGIN; INSERT INTO tree VALUES (2, 1), (3, 2); TRUNCATE tree; INSERT INTO tree VALUES (4, 4); COMMIT",
        "INSERT INTO tree VALUES (5, 4)",
    )
    daemon = pair.drain(settings={"target.session_replication_role": "origin"})
    pair.check_equal()
    assert not daemon.events_of("batch_retried"), daemon.log_tail()


def test_the_configuration_decides_how_a_table_is_applied(pair: Pair) -> None:
    """With parallel = "never" a table is serial, "always" trusts its triggers; parapply.tables says which and why."""
    more = _AUDIT + _NOTE.format("other") + _ALWAYS.format("other")
    pair.create(_TABLES, _TABLES + more, published="TABLE t, other")
    pair.write(*audited_load())
    settings = {'apply.tables."public.t".parallel': "never", 'apply.tables."public.other".parallel': "always"}
    pair.drain(settings=settings)
    rows = pair.target.rows("SELECT table_name, lane, reason FROM parapply.tables")
    shown = {table: (lane, reason) for table, lane, reason in rows}
    assert shown["t"] == ("serial", 'serial: the configuration says parallel = "never"')
    assert shown["other"][0] == "set-based"
    assert 'parallel = "always" trusts trigger note' in shown["other"][1]
    query = "SELECT * FROM t ORDER BY id"
    assert pair.target.rows(query) == pair.source.rows(query)


def test_t29_a_view_is_refused(pair: Pair) -> None:
    """A view of the published name is refused with 4, even one that would take the rows (T-29)."""
    pair.create(_TABLES, "CREATE TABLE real (id int, v int, w int); CREATE VIEW t AS SELECT * FROM real")
    pair.write(f"INSERT INTO t VALUES (1, length('{SECRET}'), 0)")
    pair.check_stopped(pair.start(), code=4, says=r"target relation public\.t is a view, not a table")
