"""Foreign keys, for `test_dependencies.py` and `test_dependencies_origin.py` (trap T-25).

Under the origin role the wrong order fails on the target; under the replica role nothing is checked, and a reader would
see a child without its parent.
"""

from __future__ import annotations

from tests.fixtures.gated_case import GatedCase

_FAMILY = (
    "CREATE TABLE parent (id int PRIMARY KEY, v text);"
    "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent {}, v text);"
)
_SEED = ["INSERT INTO parent VALUES (1, 'seed')", "INSERT INTO child VALUES (10, 1, 'seed')"]
_SELF = "CREATE TABLE t (id int PRIMARY KEY, up int REFERENCES t);"

FAMILIES = (
    GatedCase(
        name="t25_insert_parent_insert_child",
        tables=_FAMILY.format(""),
        before=_SEED,
        first="INSERT INTO parent VALUES (2, 'new')",
        later=["INSERT INTO child VALUES (20, 2, 'new')", "UPDATE child SET parent = 2 WHERE id = 10"],
    ),
    GatedCase(
        name="t25_delete_child_delete_parent",
        tables=_FAMILY.format(""),
        before=_SEED,
        first="DELETE FROM child WHERE id = 10",
        later=["DELETE FROM parent WHERE id = 1"],
    ),
    GatedCase(
        name="t25_move_child_delete_parent",
        tables=_FAMILY.format(""),
        before=[*_SEED, "INSERT INTO parent VALUES (2, 'other')"],
        first="UPDATE child SET parent = 2 WHERE id = 10",
        later=["DELETE FROM parent WHERE id = 1"],
    ),
    GatedCase(
        name="t25_referenced_key_moves",
        tables=_FAMILY.format(""),
        before=[*_SEED, "INSERT INTO parent VALUES (2, 'other')"],
        first="UPDATE parent SET id = 3 WHERE id = 2",
        later=["INSERT INTO child VALUES (30, 3, 'new')", "INSERT INTO parent VALUES (2, 'again')"],
    ),
    GatedCase(
        name="t25_referenced_key_leaves",
        tables=_FAMILY.format(""),
        before=_SEED,
        first="UPDATE child SET parent = NULL WHERE id = 10",
        later=["UPDATE parent SET id = 9 WHERE id = 1", "INSERT INTO child VALUES (90, 9, 'new')"],
    ),
    GatedCase(
        name="t25_self_reference",
        tables=_SELF,
        before=["INSERT INTO t VALUES (0, 0)"],
        first="INSERT INTO t VALUES (1, NULL)",
        later=["INSERT INTO t VALUES (2, 1)", "INSERT INTO t VALUES (3, 2), (4, 4)"],
    ),
    GatedCase(
        name="t25_self_reference_deletes",
        tables=_SELF,
        before=["INSERT INTO t VALUES (1, NULL), (2, 1), (3, 2)"],
        first="DELETE FROM t WHERE id = 3",
        later=["DELETE FROM t WHERE id = 2", "DELETE FROM t WHERE id = 1"],
    ),
    GatedCase(
        name="t25_unique_column",
        tables="CREATE TABLE parent (id int PRIMARY KEY, code text UNIQUE NOT NULL);"
        "CREATE TABLE child (id int PRIMARY KEY, code text REFERENCES parent (code));",
        before=["INSERT INTO parent VALUES (1, 'a')", "INSERT INTO child VALUES (10, 'a')"],
        first="INSERT INTO parent VALUES (2, 'b')",
        later=["INSERT INTO child VALUES (20, 'b')"],
    ),
    GatedCase(
        name="t25_other_type",
        tables="CREATE TABLE parent (id numeric PRIMARY KEY);"
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent);",
        before=["INSERT INTO parent VALUES (1.0)", "INSERT INTO child VALUES (10, 1)"],
        first="INSERT INTO parent VALUES (2.00)",
        later=["INSERT INTO child VALUES (20, 2)"],
    ),
    # The source's cascade arrives as deletes; the target's must not make them find nothing (false delete_missing).
    GatedCase(
        name="t25_cascade",
        tables=_FAMILY.format("ON DELETE CASCADE"),
        before=[*_SEED, "INSERT INTO child VALUES (11, 1, 'seed'), (12, 1, 'seed')"],
        first="DELETE FROM parent WHERE id = 1",
        later=["INSERT INTO parent VALUES (1, 'again')", "INSERT INTO child VALUES (11, 1, 'again')"],
    ),
    # Overtaking, the delete would leave the held child without its parent, for ever.
    GatedCase(
        name="t25_insert_child_cascade",
        tables=_FAMILY.format("ON DELETE CASCADE"),
        before=_SEED,
        first="INSERT INTO child VALUES (13, 1, 'held')",
        later=["DELETE FROM parent WHERE id = 1"],
    ),
    GatedCase(
        name="t25_update_child_cascade",
        tables=_FAMILY.format("ON DELETE CASCADE"),
        before=_SEED,
        first="UPDATE child SET v = 'held' WHERE id = 10",
        later=["DELETE FROM parent WHERE id = 1"],
    ),
    GatedCase(
        name="t25_set_null",
        tables=_FAMILY.format("ON DELETE SET NULL"),
        before=_SEED,
        first="UPDATE child SET v = 'held' WHERE id = 10",
        later=["DELETE FROM parent WHERE id = 1", "DELETE FROM child WHERE id = 10"],
    ),
    # Enforced, a referenced key that moves with its children has no order as sets: that batch is done alone, by rows.
    GatedCase(
        name="t25_update_cascade",
        tables=_FAMILY.format("ON UPDATE CASCADE"),
        before=_SEED,
        first="UPDATE child SET v = 'held' WHERE id = 10",
        later=["UPDATE parent SET id = 5 WHERE id = 1", "UPDATE child SET v = 'last' WHERE parent = 5"],
        is_beside=False,
        retries=None,
    ),
    # Within a transaction the child may come first.
    GatedCase(
        name="t25_deferred",
        tables=_FAMILY.format("DEFERRABLE INITIALLY DEFERRED"),
        before=_SEED,
        first="INSERT INTO child VALUES (20, 2, 'early'); INSERT INTO parent VALUES (2, 'late')",
        later=["DELETE FROM parent WHERE id = 2; DELETE FROM child WHERE id = 20", "INSERT INTO parent VALUES (2, '')"],
    ),
)
