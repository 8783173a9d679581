"""Triggers, rules, defaults, foreign keys and views on the target: what acts, in which order, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import SECRET, Pair, named, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


_VETO = """
CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF OLD.id = 1 OR NEW.id = 3 THEN RETURN NULL; END IF;
  RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END; END $$;
CREATE TRIGGER veto BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION veto();
ALTER TABLE t ENABLE ALWAYS TRIGGER veto;
"""
_TOTAL = """
CREATE FUNCTION total() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.w := NEW.id * 100 + NEW.v; RETURN NEW; END $$;
CREATE TRIGGER total BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION total();
"""
_TOTAL_ALWAYS = "ALTER TABLE t ENABLE ALWAYS TRIGGER total;"
_COUNT = _TOTAL.replace("NEW.id * 100 + NEW.v", "coalesce(OLD.w, 0) + 1")


def audited_load() -> Iterator[str]:
    """Yield transactions over both tables in which every order but the source's would show."""
    for n in range(1, 41):
        yield f"INSERT INTO t VALUES ({n}, 0, 0)"
        yield f"BEGIN; INSERT INTO other VALUES ({n}, 0); UPDATE t SET v = {n} WHERE id = {n}; COMMIT"
        yield f"UPDATE other SET v = v + 1 WHERE id = {n}"
        if n % 4 == 0:
            yield f"BEGIN; DELETE FROM other WHERE id = {n}; DELETE FROM t WHERE id = {n - 1}; COMMIT"


@dataclass(frozen=True, kw_only=True)
class Coded:
    """Tables in a schema of their own, code on the target, and what it leaves behind a backlog.

    Attributes:
        code: SQL for the target's tables.
        tables: on both sides.
        load: transactions.
        entries: query for what the code wrote, and its rows; those that the source's own code wrote when None.
        lanes: of each table, with a word of the reason.
        is_equal: whether the tables hold the same on both sides.
    """

    code: str
    tables: str = _TABLES
    load: Sequence[str] = field(default_factory=lambda: tuple(audited_load()))
    entries: tuple[str, Sequence[tuple[object, ...]] | None] = ("SELECT 1", [(1,)])
    lanes: Sequence[tuple[str, str, str]] = ()
    is_equal: bool = True


_ENTRIES = "SELECT entry FROM audit ORDER BY n"
#: By schema.
_CODED = {
    # ENABLE ALWAYS triggers write the source's own audit, over several tables (T-29).
    "audited": Coded(
        tables=_TABLES + _AUDIT + "".join(_NOTE.format(table) for table in ("t", "other")),
        code="".join(_ALWAYS.format(table) for table in ("t", "other")),
        entries=(_ENTRIES, None),
        lanes=[("other", "serial", "trigger note"), ("t", "serial", "trigger note")],
    ),
    # Only transactions that touch a table with code are serial; the rest stays set-based (T-29).
    "one_of_two": Coded(
        code=_AUDIT + _NOTE.format("t") + _ALWAYS.format("t"),
        lanes=[("other", "set-based", ""), ("t", "serial", "trigger note")],
    ),
    # Every column that came is set, so a trigger for one column fires as in the built-in subscription (T-29).
    "update_of": Coded(
        code=_AUDIT
        + "CREATE TRIGGER note AFTER UPDATE OF v ON t FOR EACH ROW EXECUTE FUNCTION note();"
        + _ALWAYS.format("t"),
        load=["INSERT INTO t VALUES (1, 5, 0)", "UPDATE t SET w = 1 WHERE id = 1"],
        entries=("SELECT entry FROM audit", [("UPDATE t 1 1 5",)]),
    ),
    # A BEFORE trigger that returns NULL keeps the row as it is; that is neither missing nor an error (T-43).
    "veto": Coded(
        tables=_TABLES + "INSERT INTO t VALUES (1, 0, 0), (2, 0, 0);",
        code=_VETO,
        load=["UPDATE t SET v = 1", "INSERT INTO t VALUES (3, 0, 0), (4, 0, 0)", "DELETE FROM t WHERE id = 1"],
        entries=("SELECT id, v FROM t ORDER BY id", [(1, 0), (2, 1), (4, 0)]),
        is_equal=False,
    ),
    # SQL fires statement triggers, which the built-in subscription does not: once a row, in order (T-29).
    "statements": Coded(
        code=_AUDIT
        + """
            CREATE FUNCTION count_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO statements.audit (entry) VALUES (TG_OP); RETURN NULL; END $$;
            CREATE TRIGGER note AFTER INSERT OR UPDATE ON t FOR EACH STATEMENT EXECUTE FUNCTION count_it();
        """
        + _ALWAYS.format("t"),
        load=["INSERT INTO t SELECT n, 0, 0 FROM generate_series(1, 3) AS n", "UPDATE t SET v = 1 WHERE id = 2"],
        entries=(_ENTRIES, [("INSERT",)] * 3 + [("UPDATE",)]),
    ),
    # A rule ALWAYS that adds something acts in order (T-29); one that swallows the row is below.
    "rules": Coded(
        code=_AUDIT
        + "CREATE RULE note AS ON UPDATE TO t DO ALSO INSERT INTO audit (entry) VALUES (NEW.id);"
        + "ALTER TABLE t ENABLE ALWAYS RULE note;",
        load=["INSERT INTO t VALUES (1, 0, 0), (2, 0, 0)", "UPDATE t SET v = 1"],
        entries=(_ENTRIES, [("1",), ("2",)]),
        lanes=[("t", "serial", "rule note")],
    ),
    # Under the replica role ordinary triggers and rules do nothing, and tables with them stay set-based.
    "silent": Coded(
        code="""
            CREATE FUNCTION explode() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'fired'; END $$;
            CREATE TRIGGER bomb BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION explode();
            CREATE RULE swallow AS ON INSERT TO other DO INSTEAD NOTHING;
        """,
        lanes=[("other", "set-based", ""), ("t", "set-based", "")],
    ),
    # A trigger that computes columns of its row is no reason for any lane but sets (T-29).
    "computed": Coded(
        tables=_TABLES + _TOTAL,
        code=_TOTAL_ALWAYS,
        lanes=[("other", "set-based", ""), ("t", "set-based", "trigger total computes columns of the row")],
    ),
    # One that counts the changes of its row needs each of them, in a batch with others (T-29).
    "counted": Coded(
        tables=_TABLES + _COUNT,
        code=_TOTAL_ALWAYS,
        load=[*audited_load(), *(f"UPDATE t SET v = v WHERE id <= {n}" for n in range(9))],
        lanes=[("other", "set-based", ""), ("t", "row by row", "trigger total may depend on earlier values")],
    ),
    # Trusted not to see transactions, an audit is the source's own, and one target transaction holds several (T-29).
    "joined": Coded(
        tables=_TABLES + _AUDIT + "".join(_NOTE.format(table) for table in ("t", "other")),
        code="".join(_ALWAYS.format(table) for table in ("t", "other")),
        entries=(_ENTRIES, None),
        lanes=[("other", "serial", 'parallel = "ordered" joins transactions'), ("t", "serial", "trigger note")],
    ),
    # A veto that comes unexpectedly in one of them is a veto all the same (T-43).
    "joined_veto": Coded(
        tables=_TABLES + "INSERT INTO t VALUES (1, 0, 0), (2, 0, 0);",
        code=_VETO,
        load=["UPDATE t SET v = 1", "INSERT INTO t VALUES (3, 0, 0), (4, 0, 0)", "DELETE FROM t WHERE id = 1"],
        entries=("SELECT id, v FROM t ORDER BY id", [(1, 0), (2, 1), (4, 0)]),
        is_equal=False,
    ),
    # A failure at COMMIT names no transaction: each is tried, and the check of each sees its own end.
    "joined_deferred": Coded(
        code="""
            CREATE FUNCTION alone() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF (SELECT v FROM public.t WHERE id = NEW.id) > 0 THEN RAISE 'late'; END IF; RETURN NULL; END $$;
            CREATE CONSTRAINT TRIGGER note AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED
              FOR EACH ROW EXECUTE FUNCTION alone();
        """
        + _ALWAYS.format("t"),
        load=[one for n in range(4) for one in (f"INSERT INTO t VALUES ({n}, 0, 0)", "UPDATE t SET v = 1")],
    ),
    # With parallel = "never" a table is serial, "always" trusts its triggers; parapply.tables says which and why.
    "configured": Coded(
        code=_AUDIT + _NOTE.format("other") + _ALWAYS.format("other"),
        lanes=[
            ("other", "set-based", 'parallel = "always" trusts trigger note'),
            ("t", "serial", 'serial: the configuration says parallel = "never"'),
        ],
    ),
}
_CONFIGURED: dict[str, str | float] = {
    'apply.tables."configured.t".parallel': "never",
    'apply.tables."configured.other".parallel': "always",
    'apply.tables."joined.t".parallel': "ordered",
    'apply.tables."joined.other".parallel': "ordered",
    'apply.tables."joined_veto.t".parallel': "ordered",
    'apply.tables."joined_deferred.t".parallel': "ordered",
}


def test_t29_t43_code_acts_as_on_the_source(pair: Pair) -> None:
    """Triggers and rules of the target see the order of the source, and keep only their own table serial (T-29, T-43).

    Each case of `_CODED` has a schema; one daemon with eight workers finds the backlog of all.
    """
    there = {schema: f"CREATE SCHEMA {schema}; SET search_path = {schema}" for schema in _CODED}
    tables = {schema: case.tables.replace("public.", f"{schema}.") for schema, case in _CODED.items()}
    code = {schema: case.code.replace("public.", f"{schema}.") for schema, case in _CODED.items()}
    pair.create(
        "; ".join(f"{there[schema]}; {tables[schema]}" for schema in _CODED),
        "; ".join(f"{there[schema]}; {tables[schema]}; {code[schema]}" for schema in _CODED),
        published="TABLE " + ", ".join(f"{schema}.t, {schema}.other" for schema in _CODED),
    )
    for schema, case in _CODED.items():
        pair.write(f"SET search_path = {schema}", *case.load)
    pair.drain(workers=8, settings=_CONFIGURED)
    for schema, case in _CODED.items():
        with named(schema):
            _check_coded(pair, schema, case)


def _check_coded(pair: Pair, schema: str, case: Coded) -> None:
    query, wanted = case.entries
    inside = f"SET search_path = {schema}; {query}"
    assert pair.target.rows(inside) == (pair.source.rows(inside) if wanted is None else wanted)
    shown = pair.target.rows(
        f"SELECT table_name, lane, coalesce(reason, '') FROM parapply.tables WHERE schema_name = '{schema}' ORDER BY 1"
    )
    for table, lane, words in case.lanes:
        (found,) = [one for one in shown if one[0] == table]
        assert found[1] == lane, found
        assert words in found[2], found
    if case.is_equal:
        for table in ("t", "other"):
            rows = f"SELECT * FROM {schema}.{table} ORDER BY id"
            assert pair.target.rows(rows) == pair.source.rows(rows), table


def test_t29_always_triggers_see_the_order_of_the_source_live(pair: Pair) -> None:
    """An audit by ENABLE ALWAYS triggers is the source's own audit, also while a daemon follows (T-29)."""
    notes = "".join(_NOTE.format(table) for table in ("t", "other"))
    always = "".join(_ALWAYS.format(table) for table in ("t", "other"))
    pair.create(_TABLES + _AUDIT + notes, _TABLES + _AUDIT + notes + always, published="TABLE t, other")
    daemon = pair.start(workers=8)
    pair.write(*audited_load())
    daemon.finish()
    assert pair.target.rows(_ENTRIES) == pair.source.rows(_ENTRIES)


def test_t29_ordered_joins_transactions_and_auto_does_not(pair: Pair) -> None:
    """Code that is trusted not to see transactions finds several in one; by default each is its own (T-29)."""
    pair.create(_TABLES, _TABLES + _AUDIT + _NOTE.format("t") + _ALWAYS.format("t"), published="TABLE t, other")
    xids = "SELECT count(DISTINCT xmin::text) FROM audit"
    pair.write(*(f"INSERT INTO t VALUES ({n}, 0, 0)" for n in range(20)))
    pair.drain()
    assert pair.target.rows(xids) == [(20,)]
    pair.target.execute("TRUNCATE audit")
    pair.write(*(f"UPDATE t SET v = {n} WHERE id = {n}" for n in range(20)))
    pair.drain(settings={'apply.tables."public.t".parallel': "ordered"})
    ((n_joined,),) = pair.target.rows(xids)
    assert n_joined < 20
    assert pair.target.rows("SELECT count(*) FROM audit") == [(20,)]


def test_t29_joined_transactions_notice_code_on_another_table(pair: Pair) -> None:
    """Code that begins to act on a table beside a trusted one is trusted with nothing: one by one again (T-29)."""
    notes = "".join(_NOTE.format(table) for table in ("t", "other"))
    pair.create(_TABLES, _TABLES + _AUDIT + notes + _ALWAYS.format("t"), published="TABLE t, other")
    daemon = pair.start(settings={'apply.tables."public.t".parallel': "ordered", "apply.catalogue_check_s": 3600})
    pair.write("BEGIN; INSERT INTO t VALUES (1, 0, 0); INSERT INTO other VALUES (1, 0); COMMIT")
    daemon.wait_caught_up()
    pair.target.execute(_ALWAYS.format("other"))
    pair.write(*(f"BEGIN; UPDATE t SET v = {n}; UPDATE other SET v = {n}; COMMIT" for n in range(1, 4)))
    daemon.finish()
    assert pair.target.rows("SELECT count(*), count(DISTINCT xmin::text) FROM audit WHERE n > 1") == [(6, 3)]
    assert daemon.events_of("batch_retried")[0]["reason"] == "code"


def test_t29_code_sees_single_changes_as_they_come_and_is_found_by_several(pair: Pair) -> None:
    """Enabled under a daemon, it acts on each change alone as on the source, and the first set of two finds it (T-29).

    So does a table that takes the name of another: single rows go where the name leads.
    """
    note = _NOTE.format("t")
    pair.create(_TABLES + _AUDIT, _TABLES + _AUDIT + note, published="TABLE t, other")
    daemon = pair.start(settings={"apply.catalogue_check_s": 3600})
    pair.write("INSERT INTO t VALUES (1, 0, 0)")
    daemon.wait_caught_up()
    pair.target.execute(_ALWAYS.format("t"))
    pair.target.execute("ALTER TABLE other RENAME TO aside; CREATE TABLE other (LIKE aside INCLUDING ALL)")
    for change in ("UPDATE t SET v = 1", "INSERT INTO other VALUES (1, 0)", "INSERT INTO t VALUES (2, 2, 0)"):
        pair.write(change)
        daemon.wait_caught_up()
    assert not daemon.events_of("batch_retried")
    pair.write("BEGIN; UPDATE t SET v = 3 WHERE id = 1; UPDATE t SET v = 4 WHERE id = 2; COMMIT")
    daemon.finish()
    expected = ["UPDATE t 1 1 1", "INSERT t 2 2", "UPDATE t 1 1 3", "UPDATE t 2 2 4"]
    assert pair.target.rows("SELECT entry FROM audit ORDER BY xmin::text::bigint, n") == [
        (entry,) for entry in expected
    ]
    assert {event["reason"] for event in daemon.events_of("batch_retried")} == {"code"}
    assert pair.target.rows("SELECT * FROM other") == [(1, 0)]


def test_t29_a_row_trigger_is_looked_at_again_when_its_function_changes(pair: Pair) -> None:
    """A function replaced under a daemon, which locks no table, sees each change in order from then on (T-29)."""
    pair.create(_TABLES, _TABLES + _AUDIT + _TOTAL + _TOTAL_ALWAYS, published="TABLE t, other")
    daemon = pair.start(workers=8)
    pair.write("INSERT INTO t VALUES (1, 0, 0)", "UPDATE t SET v = 1")
    daemon.wait_caught_up()
    lane = "SELECT lane FROM parapply.tables WHERE table_name = 't'"
    pair.target.wait_until(f"SELECT ({lane}) = 'set-based'")
    pair.target.execute(
        "CREATE OR REPLACE FUNCTION total() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.audit (entry) VALUES (concat_ws(' ', TG_OP, NEW.id, NEW.v)); RETURN NEW; END $$"
    )
    pair.write("BEGIN; UPDATE t SET v = 2; UPDATE t SET v = 3; COMMIT", "UPDATE t SET v = 4")
    daemon.wait_caught_up()
    pair.target.wait_until(f"SELECT ({lane}) = 'serial'")
    daemon.stop()
    assert pair.target.rows(_ENTRIES) == [(f"UPDATE 1 {n}",) for n in range(2, 5)]
    assert {event["reason"] for event in daemon.events_of("batch_retried")} == {"code"}


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
    assert "column w would have to change" in daemon.failure
    pair.target.execute("ALTER TABLE t ALTER w SET GENERATED BY DEFAULT")
    pair.drain()
    assert pair.target.rows("SELECT * FROM t ORDER BY id") == pair.source.rows("SELECT * FROM t ORDER BY id")


_SWALLOWED = {
    "insert": f"INSERT INTO t VALUES (3, length('{SECRET}'), 0)",
    "update": f"UPDATE t SET v = length('{SECRET}') WHERE id = 1",
    "delete": "DELETE FROM t WHERE id = 1",
}


def _rule(on: str, also: str = "INSTEAD NOTHING") -> str:
    return f"CREATE RULE swallow AS ON {on} TO t DO {also}; ALTER TABLE t ENABLE ALWAYS RULE swallow;"


@pytest.mark.parametrize("operation", _SWALLOWED)
def test_t29_a_rule_that_swallows_a_row_stops_the_daemon(pair: Pair, operation: str) -> None:
    """The built-in subscription ignores rules, SQL cannot: losing the row silently is what must not happen (T-29)."""
    tables = f"{_TABLES} INSERT INTO t VALUES (1, 0, 0);"
    pair.create(tables, f"{tables} {_rule(operation)}", published="TABLE t, other")
    pair.write(_SWALLOWED[operation])
    says = rf"{operation} on public\.t, key \(id\): 0 rows where 1 are expected \(rule swallow\); transaction \d+, end"
    pair.check_stopped(pair.start(), code=5, says=says)
    pair.target.execute("DROP RULE swallow ON t")
    pair.drain()
    pair.check_equal()


def test_t29_a_rule_swallows_no_row_while_others_are_settled(pair: Pair) -> None:
    """A conflict of another table in the same transaction changes nothing about that (T-29)."""
    pair.create(_TABLES, f"{_TABLES} {_rule('INSERT')}", published="TABLE t, other")
    pair.write_one(*[f"INSERT INTO {table} (id, v) VALUES ({n}, 0)" for n in (1, 2) for table in ("other", "t")])
    pair.target.execute("INSERT INTO other VALUES (2, 7)")
    says = r"insert on public\.t, key \(id\): 0 rows where 1 are expected \(rule swallow\); transaction"
    pair.check_stopped(pair.start(settings={"conflict.insert_exists": "keep_local"}), code=5, says=says)
    assert pair.target.rows("SELECT id FROM other") == [(2,)]


def test_t29_a_rule_that_keeps_a_row_from_being_overwritten_stops_the_daemon(pair: Pair) -> None:
    """An insert that is to overwrite the row in its way is not left out as an update whose row is missing (T-29)."""
    pair.create(_TABLES, f"{_TABLES} {_rule('UPDATE')}", published="TABLE t")
    pair.target.execute("INSERT INTO t VALUES (1, 7, 7)")
    pair.write("INSERT INTO t VALUES (1, 0, 0)")
    settings = {"conflict.insert_exists": "apply_remote", "conflict.update_missing": "skip"}
    says = r"update on public\.t, key \(id\): 0 rows where 1 are expected \(rule swallow\); transaction"
    pair.check_stopped(pair.start(settings=settings), code=5, says=says)
    assert pair.target.rows("SELECT count(*) FROM parapply.conflicts") == [(0,)]


@pytest.mark.parametrize("n_rows", [1, 2000], ids=["small", "large"])
def test_t29_a_row_missing_from_a_table_with_a_rule_is_a_conflict(pair: Pair, n_rows: int) -> None:
    """A rule that only adds something hides no missing row, whether its transaction comes in pieces or not (T-29)."""
    tables = f"CREATE TABLE log (id int); CREATE TABLE wide (id int, v text); {_TABLES}"
    tables += "INSERT INTO t VALUES (1, 0, 0);"
    also = _rule("UPDATE", "ALSO INSERT INTO log VALUES (NEW.id)")
    pair.create(tables, f"{tables} {also}", published="TABLE t, wide")
    pair.target.execute("DELETE FROM t")
    wide = f"INSERT INTO wide SELECT n, repeat('x', 5000) FROM generate_series(1, {n_rows}) AS n"
    xid = pair.write_one(wide, "UPDATE t SET v = 1 WHERE id = 1", wide)
    settings: dict[str, str | float] = {"apply.memory_limit_bytes": 16 << 20}
    pair.check_conflict(pair.start(settings=settings), kind="update_missing", xid=xid, place="public.t, key (id)")
    assert pair.target.rows("SELECT (SELECT count(*) FROM log), (SELECT count(*) FROM wide)") == [(0, 0)]
    assert pair.target.rows("SELECT change_no FROM parapply.conflicts") == [(n_rows + 1,)]
    pair.drain(settings={**settings, "conflict.update_missing": "skip"})
    assert pair.target.rows("SELECT outcome FROM parapply.conflicts") == [("skipped",)]
    assert pair.target.rows("SELECT (SELECT count(*) FROM log), (SELECT count(*) FROM wide)") == [(0, 2 * n_rows)]


def test_t29_sequences_count_in_the_order_of_the_source(pair: Pair) -> None:
    """A number that only the target gives follows the source's order, also when the first is held up (T-29).

    It comes from a default or an identity, of a table each.
    """
    tables = "".join(f"CREATE TABLE {name} (id int PRIMARY KEY, v text);" for name in ("by_default", "by_identity"))
    tables += "CREATE TABLE hold (id int PRIMARY KEY, v int); INSERT INTO hold VALUES (1, 0);"
    numbered = (
        "CREATE SEQUENCE numbers; ALTER TABLE by_default ADD n int DEFAULT nextval('numbers');"
        "ALTER TABLE by_identity ADD n int GENERATED BY DEFAULT AS IDENTITY"
    )
    pair.create(tables, tables + numbered)
    daemon = pair.start(workers=8)
    insert = "INSERT INTO by_default VALUES ({0}, '{1}'); INSERT INTO by_identity VALUES ({0}, '{1}')"
    with pair.target.connect() as foreign:
        foreign.execute("BEGIN; SELECT FROM hold WHERE id = 1 FOR UPDATE")
        pair.write(f"BEGIN; UPDATE hold SET v = 1 WHERE id = 1; {insert.format(1000, 'first')}; COMMIT")
        pair.target.wait_until(WORKER_IS_BLOCKED)
        # Alone, each of its own table: neither is held up by the other's order.
        pair.write(*(one for number in range(1, 30) for one in insert.format(1000 - number, "v").split("; ")))
        pair.write("INSERT INTO hold VALUES (2, 0)")
        # All of it has been received, so any batch that could run beside the first has had the chance.
        end_lsn = pair.route.end_of_source_lsn()
        pair.target.wait_until(f"SELECT source_lsn >= '{end_lsn}' FROM parapply.slots")
        foreign.execute("COMMIT")
    daemon.finish()
    for table in ("by_default", "by_identity"):
        found = pair.target.rows(f"SELECT n, id FROM {table} ORDER BY n")
        assert found == [(n + 1, 1000 - n) for n in range(30)], table


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
    daemon.finish()
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


def test_t29_a_view_is_refused(pair: Pair) -> None:
    """A view of the published name is refused with 4, even one that would take the rows (T-29)."""
    pair.create(_TABLES, "CREATE TABLE real (id int, v int, w int); CREATE VIEW t AS SELECT * FROM real")
    pair.write(f"INSERT INTO t VALUES (1, length('{SECRET}'), 0)")
    pair.check_stopped(pair.start(), code=4, says=r"target relation public\.t is a view, not a table")


def test_a_connection_that_code_cannot_make_stops_the_daemon(pair: Pair) -> None:
    """A trigger whose own connection fails gives the code of a lost one: on_error holds, the error has the end LSN."""
    fails = """
        CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          IF NEW.id = 2 THEN RAISE 'no other server' USING ERRCODE = '08001'; END IF; RETURN NEW; END $$;
        CREATE TRIGGER fails BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fails();
        ALTER TABLE t ENABLE ALWAYS TRIGGER fails;
    """
    pair.create(_TABLES, _TABLES + fails)
    pair.write(*(f"INSERT INTO t VALUES ({n}, 0, 0)" for n in (1, 2, 3)))
    pair.check_stopped(pair.start(), code=5, says=r"public\.t.*\(08001\).*end LSN [0-9A-F]+/[0-9A-F]+")
    assert pair.target.rows("SELECT id FROM t") == [(1,)]
