"""Unique indexes beside the key, for `test_dependencies.py`: what the first transaction frees, the later ones take.

A freed value is mostly not on the wire; the index says what is equal, and only the target may have it.
"""

from __future__ import annotations

from tests.fixtures.gated_case import GatedCase

_U = "CREATE TABLE u (id int PRIMARY KEY, email text UNIQUE, v int);"
_OWNER = "INSERT INTO u VALUES (1, 'a@x', 0)"
_TAKE = "INSERT INTO u VALUES (2, 'a@x', 0)"

FREED_VALUES = (
    GatedCase(
        name="t19_update",
        tables=_U,
        before=[_OWNER],
        first="UPDATE u SET email = 'b@x' WHERE id = 1",
        later=[_TAKE],
        retries=None,
    ),
    GatedCase(
        name="t19_delete", tables=_U, before=[_OWNER], first="DELETE FROM u WHERE id = 1", later=[_TAKE], retries=None
    ),
    GatedCase(
        name="t19_update_takes",
        tables=_U,
        before=[_OWNER, "INSERT INTO u VALUES (2, 'c@x', 0)"],
        first="UPDATE u SET email = 'b@x' WHERE id = 1",
        later=["UPDATE u SET email = 'a@x' WHERE id = 2", "UPDATE u SET v = 1 WHERE id = 2"],
        retries=None,
    ),
    # The whole old row is on the wire, so the freed value is.
    GatedCase(
        name="t19_full",
        tables=f"{_U} ALTER TABLE u REPLICA IDENTITY FULL",
        target_tables=_U,
        before=[_OWNER],
        first="UPDATE u SET email = 'b@x' WHERE id = 1",
        later=[_TAKE],
    ),
    # A value that was taken and freed again may be taken by the third, not before the first has had it.
    GatedCase(
        name="t19_taken_and_freed",
        tables=_U,
        before=[_OWNER],
        first="INSERT INTO u VALUES (2, 'b@x', 0)",
        later=["UPDATE u SET email = 'c@x' WHERE id = 2", "INSERT INTO u VALUES (3, 'b@x', 0)"],
        retries=None,
    ),
    # Kapila's example: the fourth before the second and third fails.
    GatedCase(
        name="t19_kapila",
        tables="CREATE TABLE tab1 (a int PRIMARY KEY, b int UNIQUE)",
        before=["INSERT INTO tab1 VALUES (1, 1)"],
        first="INSERT INTO tab1 VALUES (2, 2)",
        later=["DELETE FROM tab1 WHERE a = 2", "UPDATE tab1 SET b = 2 WHERE a = 1"],
        retries=None,
    ),
)


def _unique(name: str, tables: str, *, old: str, first: str, new: str, retries: int | None = None) -> GatedCase:
    """Return a case in which the first transaction frees what the last one takes."""
    return GatedCase(
        name=f"t22_{name}",
        tables=tables,
        before=[f"INSERT INTO t VALUES {old}"],
        first=first,
        later=[f"INSERT INTO t VALUES {new}"],
        retries=retries,
    )


_DELETE = "DELETE FROM t WHERE id = 1"
_NULLS = "CREATE TABLE t (id int PRIMARY KEY, k int, UNIQUE NULLS NOT DISTINCT (k));"
_LOWER = "CREATE TABLE t (id int PRIMARY KEY, e text); CREATE UNIQUE INDEX ON t (lower(e));"
_PARTIAL = "CREATE TABLE t (id int PRIMARY KEY, e text, active bool); CREATE UNIQUE INDEX t_e ON t (e) WHERE active;"
_GENERATED = "CREATE TABLE t (id int PRIMARY KEY, e text, l text GENERATED ALWAYS AS (lower(e)) STORED UNIQUE);"
#: The later of two bookings that overlap must not come first; nothing of the wire is equal.
_ROOMS = (
    "CREATE TABLE t (id int PRIMARY KEY, room int4range, r int4range, EXCLUDE USING gist (room WITH =, r WITH &&));"
)

FREED_BY_OTHER_RULES = (
    _unique("nulls_not_distinct", _NULLS, old="(1, NULL)", first=_DELETE, new="(2, NULL)"),
    _unique("expression", _LOWER, old="(1, 'A@x')", first=_DELETE, new="(2, 'a@X')"),
    _unique("expression_update", _LOWER, old="(1, 'A@x')", first="UPDATE t SET e = 'b' WHERE id = 1", new="(2, 'a@X')"),
    _unique(
        "partial",
        _PARTIAL,
        old="(1, 'a', true)",
        first="UPDATE t SET active = false WHERE id = 1",
        new="(2, 'a', true)",
    ),
    _unique("generated", _GENERATED, old="(1, 'A@x')", first=_DELETE, new="(2, 'a@X')"),
    _unique("exclusion", _ROOMS, old="(1, '[1,1]', '[1,10)')", first=_DELETE, new="(2, '[1,1]', '[5,15)')", retries=0),
)


def _taken(name: str, tables: str) -> GatedCase:
    """Return a case in which the first transaction takes, the second frees and the third takes the same.

    Committed before the first, in any order of commits, the third would be in its way for ever.
    """
    return GatedCase(
        name=f"t22_taken_{name}",
        tables=tables,
        before=["INSERT INTO t VALUES (0, 'z')"],
        first="INSERT INTO t VALUES (1, 'A@x')",
        later=["UPDATE t SET e = 'b' WHERE id = 1", "INSERT INTO t VALUES (2, 'a@X')"],
        retries=None,
    )


TAKEN_BY_OTHER_RULES = (
    GatedCase(
        name="t22_taken_nulls_not_distinct",
        tables=_NULLS,
        before=["INSERT INTO t VALUES (0, 0)"],
        first="INSERT INTO t VALUES (1, NULL)",
        later=["UPDATE t SET k = 5 WHERE id = 1", "INSERT INTO t VALUES (2, NULL)"],
        retries=None,
    ),
    _taken("expression", _LOWER),
    _taken("generated", _GENERATED),
    GatedCase(
        name="t22_taken_partial",
        tables=_PARTIAL,
        before=["INSERT INTO t VALUES (0, 'z', true)"],
        first="INSERT INTO t VALUES (1, 'a', true)",
        later=["UPDATE t SET active = false WHERE id = 1", "INSERT INTO t VALUES (2, 'a', true)"],
        retries=None,
    ),
    GatedCase(
        name="t22_taken_exclusion",
        tables=_ROOMS,
        before=["INSERT INTO t VALUES (0, '[9,9]', '[1,10)')"],
        first="INSERT INTO t VALUES (1, '[1,1]', '[1,10)')",
        later=["UPDATE t SET r = '[20,30)' WHERE id = 1", "INSERT INTO t VALUES (2, '[1,1]', '[5,15)')"],
    ),
)

_SPANS = "CREATE TABLE t (id int4range, d int4range, v text, {}); ALTER TABLE t REPLICA IDENTITY FULL;"
#: For PostgreSQL 18.
WITHOUT_OVERLAPS = (
    GatedCase(
        name="t22_without_overlaps",
        tables=_SPANS.format("PRIMARY KEY (id, d WITHOUT OVERLAPS)"),
        before=["INSERT INTO t VALUES ('[1,1]', '[1,10)', 'old')"],
        first="DELETE FROM t",
        later=["INSERT INTO t VALUES ('[1,1]', '[5,15)', 'new')"],
    ),
)

_ONLY_THERE = "CREATE TABLE u (id int PRIMARY KEY, email text, v int);"
_PARTED = "CREATE TABLE u (id int PRIMARY KEY, email text, v int) PARTITION BY RANGE (id);"
_LEAVES = (
    "CREATE TABLE low PARTITION OF u FOR VALUES FROM (MINVALUE) TO (100);"
    "CREATE TABLE high PARTITION OF u FOR VALUES FROM (100) TO (MAXVALUE);"
)

KEYS_OF_THE_TARGET = (
    GatedCase(
        name="t23_index_of_target",
        tables=_ONLY_THERE,
        target_tables=_U,
        before=[_OWNER],
        first="UPDATE u SET email = 'b@x' WHERE id = 1",
        later=[_TAKE],
        retries=None,
    ),
    GatedCase(
        name="t23_index_of_leaf",
        tables=_ONLY_THERE,
        target_tables=f"{_PARTED}{_LEAVES} CREATE UNIQUE INDEX ON low (email)",
        before=[_OWNER],
        first="UPDATE u SET email = 'b@x' WHERE id = 1",
        later=[_TAKE],
        retries=None,
        query="SELECT * FROM u ORDER BY id",
    ),
    GatedCase(
        name="t23_taken_in_leaf",
        tables=_ONLY_THERE,
        target_tables=f"{_PARTED}{_LEAVES} CREATE UNIQUE INDEX ON low (email)",
        before=[_OWNER],
        first="INSERT INTO u VALUES (2, 'b@x', 0)",
        later=["UPDATE u SET email = 'c@x' WHERE id = 2", "INSERT INTO u VALUES (3, 'b@x', 0)"],
        retries=None,
        query="SELECT * FROM u ORDER BY id",
    ),
    # An index made during a run has a separate daemon, because noticing it is a barrier (test_catalogue_watch.py).
)
