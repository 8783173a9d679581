"""Dependencies that are wider than a row, for `test_dependencies.py`: TRUNCATE, new columns, partitions."""

from __future__ import annotations

from tests.fixtures.gated_case import GatedCase

_PAIR = "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a);"
_PAIR_ROWS = ["INSERT INTO a VALUES (1)", "INSERT INTO b VALUES (1, 1)"]

TRUNCATES = (
    # One message names both tables.
    GatedCase(
        name="t26_truncate_insert",
        tables=_PAIR,
        before=_PAIR_ROWS,
        first="TRUNCATE a CASCADE",
        later=["INSERT INTO a VALUES (2)", "INSERT INTO b VALUES (2, 2)"],
        is_beside=False,
    ),
    GatedCase(
        name="t26_insert_truncate",
        tables=_PAIR,
        before=_PAIR_ROWS,
        first="INSERT INTO a VALUES (2); INSERT INTO b VALUES (2, 2)",
        later=["TRUNCATE a CASCADE", "INSERT INTO a VALUES (3)", "INSERT INTO b VALUES (3, 3)"],
        is_beside=False,
    ),
    # The held one has touched the other table of the TRUNCATE.
    GatedCase(
        name="t26_update_truncate",
        tables=_PAIR,
        before=[*_PAIR_ROWS, "INSERT INTO b VALUES (2, NULL)"],
        first="UPDATE b SET a = 1 WHERE id = 2",
        later=["TRUNCATE a, b RESTART IDENTITY", "INSERT INTO b VALUES (2, NULL)"],
        is_beside=False,
    ),
)

_T = "CREATE TABLE t (id int PRIMARY KEY, v text);"

NEW_COLUMNS = (
    GatedCase(
        name="t27_add_column",
        tables=_T,
        before=["INSERT INTO t VALUES (1, 'one'), (2, 'two')"],
        target_change="ALTER TABLE t ADD w text",
        first="UPDATE t SET v = 'held'; INSERT INTO t VALUES (3, 'three')",
        later=[
            "UPDATE t SET v = 'old form' WHERE id = 2",
            "ALTER TABLE t ADD w text",
            "UPDATE t SET w = 'w1' WHERE id = 1",
            "UPDATE t SET w = 'w3', v = NULL WHERE id = 3",
            "UPDATE t SET w = 'w2' WHERE id = 2",
            "UPDATE t SET id = 4 WHERE id = 1; INSERT INTO t VALUES (1, 'new', 'form')",
        ],
        is_beside=False,
    ),
    GatedCase(
        name="t27_drop_column",
        tables=f"{_T} ALTER TABLE t ADD w text;",
        before=["INSERT INTO t VALUES (1, 'one', 'w'), (2, 'two', 'w')"],
        first="UPDATE t SET v = 'w', w = 'held' WHERE id = 1",
        later=[
            "ALTER TABLE t DROP v",
            "UPDATE t SET w = 'after' WHERE id = 1",
            "UPDATE t SET id = 3 WHERE id = 1",
            "INSERT INTO t VALUES (1, 'new form')",
        ],
        is_beside=False,
    ),
    # The column changes its place: the old map would put each value into the other one's.
    GatedCase(
        name="t27_swap_columns",
        tables=f"{_T} ALTER TABLE t ADD w text;",
        before=["INSERT INTO t VALUES (1, 'v', 'w')"],
        first="INSERT INTO t VALUES (2, 'v', 'w')",
        later=[
            "ALTER TABLE t RENAME v TO x; ALTER TABLE t RENAME w TO v; ALTER TABLE t RENAME x TO w",
            "UPDATE t SET v = 'v!' WHERE id = 2",
            "UPDATE t SET id = 3 WHERE id = 2",
            "INSERT INTO t VALUES (2, 'w2', 'v2')",
        ],
        is_beside=False,
        query="SELECT id, v, w FROM t ORDER BY id",
        expected=[(1, "v", "w"), (2, "v2", "w2"), (3, "v!", "v")],
    ),
)

_BY_PART = (
    "CREATE TABLE t (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);"
    "CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2);"
)
_BY_ID = (
    "CREATE TABLE t (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY RANGE (id);"
    "CREATE TABLE low PARTITION OF t FOR VALUES FROM (MINVALUE) TO (100);"
    "CREATE TABLE high PARTITION OF t FOR VALUES FROM (100) TO (MAXVALUE);"
)
_WHOLE = "CREATE TABLE t (id int, part int, v text, PRIMARY KEY (id, part));"
#: Leaves of one root there that are tables of their own here.
_TWO_TABLES = (
    "CREATE TABLE t_1 (id int, part int, v text, PRIMARY KEY (id, part));"
    "CREATE TABLE t_2 (id int, part int, v text, PRIMARY KEY (id, part));"
)
_ROWS = ["INSERT INTO t VALUES (1, 1, 'a'), (2, 2, 'b')"]
_ALL_ROWS = "SELECT * FROM t ORDER BY id, part"
_MOVE = "UPDATE t SET part = 2 WHERE id = 1"
#: Moves there and back, each of them a delete and an insert under two names.
_THERE_AND_BACK = [
    "UPDATE t SET v = 'z' WHERE id = 1",
    "UPDATE t SET part = 1 WHERE id = 1",
    "UPDATE t SET v = v || '!' WHERE id = 1",
    "DELETE FROM t WHERE id = 1",
    "INSERT INTO t VALUES (1, 2, 'again')",
]
_VIA_ROOT = "ALTER PUBLICATION pub_root ADD TABLE t"

PARTITIONS = (
    GatedCase(name="t28_leaves", tables=_BY_PART, before=_ROWS, first=_MOVE, later=_THERE_AND_BACK),
    GatedCase(
        name="t28_leaves_to_tables",
        tables=_BY_PART,
        target_tables=_TWO_TABLES,
        before=_ROWS,
        first=_MOVE,
        later=_THERE_AND_BACK,
        query="SELECT * FROM t_1 UNION ALL SELECT * FROM t_2 ORDER BY 1, 2",
    ),
    GatedCase(
        name="t28_whole_to_partitions",
        tables=_WHOLE,
        target_tables=_BY_PART,
        before=_ROWS,
        first=_MOVE,
        later=_THERE_AND_BACK,
        query=_ALL_ROWS,
    ),
    # Rows of two publisher's tables meet under a unique index of the root that both belong to on the target.
    GatedCase(
        name="t28_tables_to_leaves",
        tables=_TWO_TABLES,
        target_tables=f"{_BY_PART} CREATE UNIQUE INDEX ON t (v, part);",
        before=["INSERT INTO t_1 VALUES (1, 1, 'a')", "INSERT INTO t_2 VALUES (2, 2, 'b')"],
        first="DELETE FROM t_1 WHERE id = 1; INSERT INTO t_2 VALUES (1, 2, 'a')",
        later=["UPDATE t_2 SET v = 'z' WHERE id = 1", "INSERT INTO t_1 VALUES (3, 1, 'a')"],
        retries=None,
        query="SELECT * FROM t_1 UNION ALL SELECT * FROM t_2 ORDER BY 1, 2",
    ),
    GatedCase(
        name="t28_root",
        tables=_BY_PART,
        publish=_VIA_ROOT,
        before=_ROWS,
        first=_MOVE,
        later=_THERE_AND_BACK,
    ),
    GatedCase(
        name="t28_root_to_other_partitions",
        tables=_BY_PART,
        target_tables=_BY_ID,
        publish=_VIA_ROOT,
        before=_ROWS,
        first=_MOVE,
        later=[*_THERE_AND_BACK, "UPDATE t SET id = 200 WHERE id = 1", "UPDATE t SET v = 'far' WHERE id = 200"],
        query=_ALL_ROWS,
    ),
    GatedCase(
        name="t28_root_to_whole",
        tables=_BY_PART,
        target_tables=_WHOLE,
        publish=_VIA_ROOT,
        before=_ROWS,
        first=_MOVE,
        later=_THERE_AND_BACK,
        query=_ALL_ROWS,
    ),
)
