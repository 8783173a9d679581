"""Dependencies through what the target does itself, for `test_dependencies_code.py`: triggers, locks, COMMIT."""

from __future__ import annotations

from tests.fixtures.gated_case import GATE, GatedCase

_T = "CREATE TABLE t (id int PRIMARY KEY, v text);"
_SEED = "INSERT INTO t VALUES (0, 'seed')"
_AUDIT = """
CREATE TABLE audit (n serial PRIMARY KEY, entry text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO {schema}.audit (entry) VALUES (concat_ws(' ', TG_OP, OLD.id, NEW.id, NEW.v)); RETURN NULL; END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note();
ALTER TABLE t ENABLE ALWAYS TRIGGER note;
"""
_DOWN = [f"INSERT INTO t VALUES ({10 - n}, 'v')" for n in range(1, 5)]

CODE = (
    GatedCase(
        name="t29_audit",
        tables=_T,
        target_tables=_T + _AUDIT.format(schema="t29_audit"),
        before=[_SEED],
        first="INSERT INTO t VALUES (10, 'first')",
        later=[*_DOWN, "UPDATE t SET v = 'w' WHERE id = 10", "DELETE FROM t WHERE id = 0"],
        is_beside=False,
        query="SELECT entry FROM audit ORDER BY n",
        expected=[
            ("INSERT 0 seed",), ("INSERT 10 first",), *((f"INSERT {10 - n} v",) for n in range(1, 5)),
            ("UPDATE 10 10 w",), ("DELETE 0",),
        ],
    ),
    GatedCase(
        name="t29_sequence",
        tables=_T,
        target_tables=f"{_T} ALTER TABLE t ADD n serial",
        before=[_SEED],
        first="INSERT INTO t VALUES (10, 'first')",
        later=_DOWN,
        is_beside=False,
        query="SELECT id FROM t ORDER BY n",
        expected=[(0,), (10,), *((10 - n,) for n in range(1, 5))],
    ),
    # A check that looks at other rows: 002.4 of PostgreSQL's own tests.
    GatedCase(
        name="t29_check_that_queries",
        tables=_T,
        target_tables="""
            CREATE FUNCTION top() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
              RETURN (SELECT coalesce(max(id), -1) FROM t29_check_that_queries.t); END $$;
            CREATE TABLE t (id int PRIMARY KEY, v text);
            ALTER TABLE t ADD CHECK (id > t29_check_that_queries.top());
        """,
        before=[_SEED],
        first="INSERT INTO t VALUES (1, 'first')",
        later=["INSERT INTO t VALUES (2, 'second')", "INSERT INTO t VALUES (3, 'third')"],
        is_beside=False,
    ),
)  # fmt: skip

_COUNTED = "CREATE TABLE ta (id int PRIMARY KEY, k int); CREATE TABLE tb (id int PRIMARY KEY, k int);"
_COUNTERS = """
CREATE TABLE counter (k int PRIMARY KEY, n int); INSERT INTO counter VALUES (1, 0), (2, 0);
CREATE FUNCTION bump() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  UPDATE {schema}.counter SET n = n + 1 WHERE k = NEW.k; RETURN NULL; END $$;
CREATE TRIGGER bump AFTER INSERT ON ta FOR EACH ROW EXECUTE FUNCTION bump();
CREATE TRIGGER bump AFTER INSERT ON tb FOR EACH ROW EXECUTE FUNCTION bump();
ALTER TABLE ta ENABLE ALWAYS TRIGGER bump; ALTER TABLE tb ENABLE ALWAYS TRIGGER bump;
"""
_COUNTED_SEED = ["INSERT INTO ta VALUES (0, 0)", "INSERT INTO tb VALUES (0, 0)"]
_COUNTS = "SELECT k, n FROM counter ORDER BY k"

#: Tables that the configuration trusts although they have triggers.
TRUSTED = {
    f'apply.tables."{table}".parallel': "always"
    for table in ("t30_counter.ta", "t30_counter.tb", "t31_counters.ta", "t31_counters.tb", "t35_deferred.t")
}

LOCKS = (
    # The later one holds what the first needs, and in commit order it waits for the first.
    GatedCase(
        name="t30_counter",
        tables=_COUNTED,
        target_tables=_COUNTED + _COUNTERS.format(schema="t30_counter"),
        before=_COUNTED_SEED,
        first="INSERT INTO ta VALUES (1, 1)",
        later=["INSERT INTO tb VALUES (2, 1)", "INSERT INTO ta VALUES (3, 1)"],
        seen="SELECT n = 2 FROM counter WHERE k = 1",
        retries=None,
        query=_COUNTS,
        expected=[(1, 3), (2, 0)],
    ),
    # Each holds the row that the other wants next.
    GatedCase(
        name="t31_counters",
        tables=_COUNTED,
        target_tables=_COUNTED + _COUNTERS.format(schema="t31_counters"),
        before=_COUNTED_SEED,
        first=f"INSERT INTO ta VALUES (1, 1); {GATE}; INSERT INTO tb VALUES (1, 2)",
        later=["INSERT INTO ta VALUES (2, 2); INSERT INTO tb VALUES (2, 1)"],
        seen=None,
        retries=None,
        query=_COUNTS,
        expected=[(1, 2), (2, 2)],
    ),
)

ANOMALIES = (
    GatedCase(
        name="t32_invoice_before_order",
        tables="CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE invoice (id int PRIMARY KEY);",
        before=["INSERT INTO orders VALUES (0)", "INSERT INTO invoice VALUES (0)"],
        first="INSERT INTO orders VALUES (1)",
        later=["INSERT INTO invoice VALUES (1)"],
        seen="SELECT max(id) = 1 AND (SELECT max(id) FROM orders) = 0 FROM invoice",
    ),
)

ISOLATION = (
    GatedCase(
        name="t34_isolation",
        tables="CREATE TABLE t (id int PRIMARY KEY, n int);",
        before=["INSERT INTO t VALUES (1, 0), (2, 0)"],
        first="UPDATE t SET n = 1 WHERE id = 1",
        later=["UPDATE t SET n = n + 1 WHERE id = 1", "UPDATE t SET n = n + 1", "DELETE FROM t WHERE n = 3"],
    ),
)

#: Refuses the first COMMIT of row 1; a sequence is not rolled back.
_ONCE = """
CREATE SEQUENCE tries;
CREATE FUNCTION refuse_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF NEW.id = 1 AND nextval('t35_deferred.tries') = 1 THEN RAISE 'once'; END IF; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION refuse_once();
ALTER TABLE t ENABLE ALWAYS TRIGGER refuse;
"""

COMMIT_FAILS = (
    GatedCase(
        name="t35_deferred",
        tables=_T,
        target_tables=_T + _ONCE,
        before=[_SEED],
        first="INSERT INTO t VALUES (1, 'first')",
        later=["UPDATE t SET v = 'second' WHERE id = 1", "UPDATE t SET id = 5 WHERE id = 1"],
        # Only the refused one is repeated: one that had run before it committed would find no row.
        retries=1,
    ),
)

SEQUENCES = (
    GatedCase(
        name="t36_sequence",
        tables="CREATE TABLE s (id serial PRIMARY KEY, v text);",
        before=["INSERT INTO s (v) SELECT 'v' FROM generate_series(1, 99)"],
        first="INSERT INTO s (v) VALUES ('last')",
        later=["UPDATE s SET v = 'w' WHERE id = 100"],
        query="SELECT (SELECT count(*) FROM s), last_value, is_called FROM s_id_seq",
        expected=[(100, 1, False)],
    ),
)

_PREPARED = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, email text);"

PREPARED = (
    # Its place in the order is at COMMIT PREPARED: transactions that commit while it is undecided come before it.
    GatedCase(
        name="t37_keys",
        tables=_PREPARED,
        before=["INSERT INTO t VALUES (1, 'old')", "INSERT INTO u VALUES (1, 'a')"],
        first="UPDATE t SET v = 'prepared' WHERE id = 1; INSERT INTO t VALUES (2, 'prepared')",
        ends=["PREPARE TRANSACTION 't37_keys'", "INSERT INTO marker VALUES (2)", "COMMIT PREPARED 't37_keys'"],
        later=["UPDATE t SET v = 'after' WHERE id = 1", "DELETE FROM t WHERE id = 2"],
    ),
    # Only the target knows that the undecided one and the next two want the same value.
    GatedCase(
        name="t37_index_of_target",
        tables=_PREPARED,
        target_tables=f"{_PREPARED} CREATE UNIQUE INDEX ON u (email);",
        before=["INSERT INTO t VALUES (1, 'old')", "INSERT INTO u VALUES (1, 'a')"],
        first="UPDATE u SET email = 'b' WHERE id = 1",
        ends=["PREPARE TRANSACTION 't37_index'", "INSERT INTO marker VALUES (2)", "COMMIT PREPARED 't37_index'"],
        later=[
            "INSERT INTO u VALUES (2, 'a')",
            "UPDATE u SET email = 'c' WHERE id = 1",
            "INSERT INTO u VALUES (3, 'b')",
        ],
        retries=None,
    ),
)
