"""Dependencies between rows of one table, for `test_dependencies.py`: keys and when they are equal, and twins.

Each case is a line of SQL of the trap it is named after. Its later transactions would fail, find nothing or be undone
if they were applied before the first.
"""

from __future__ import annotations

from tests.fixtures.gated_case import GatedCase

_T = "CREATE TABLE t (id int PRIMARY KEY, v text);"
_SEED = "INSERT INTO t VALUES (0, 'seed')"

SAME_ROW = (
    GatedCase(
        name="t18_insert_update",
        tables=_T,
        before=[_SEED],
        first="INSERT INTO t VALUES (1, 'a')",
        later=["UPDATE t SET v = 'b' WHERE id = 1"],
    ),
    GatedCase(
        name="t18_delete_insert",
        tables=_T,
        before=["INSERT INTO t VALUES (1, 'old')"],
        first="DELETE FROM t WHERE id = 1",
        later=["INSERT INTO t VALUES (1, 'new')"],
    ),
    GatedCase(
        name="t18_insert_delete",
        tables=_T,
        before=[_SEED],
        first="INSERT INTO t VALUES (1, 'a')",
        later=["DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (1, 'again')", "DELETE FROM t WHERE id = 1"],
    ),
    # No statement of the wrong order fails: only the value left behind shows it.
    GatedCase(
        name="t18_update_update",
        tables=_T,
        before=["INSERT INTO t VALUES (1, 'old')"],
        first="UPDATE t SET v = 'a' WHERE id = 1",
        later=["UPDATE t SET v = 'b' WHERE id = 1", "UPDATE t SET v = 'c' WHERE id = 1"],
    ),
)

MOVED_KEYS = (
    GatedCase(
        name="t20_moved_away",
        tables=_T,
        before=["INSERT INTO t VALUES (1, 'one')"],
        first="UPDATE t SET id = 2 WHERE id = 1",
        later=["INSERT INTO t VALUES (1, 'uno')", "UPDATE t SET v = 'two' WHERE id = 2"],
    ),
    GatedCase(
        name="t20_moved_here",
        tables=_T,
        before=["INSERT INTO t VALUES (1, 'one'), (3, 'three')"],
        first="UPDATE t SET id = 2 WHERE id = 1",
        later=["UPDATE t SET id = 1 WHERE id = 3", "DELETE FROM t WHERE id = 2"],
    ),
    GatedCase(
        name="t20_swap",
        tables=_T,
        before=["INSERT INTO t VALUES (1, 'one'), (2, 'two')"],
        first="UPDATE t SET id = -1 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2; UPDATE t SET id = 2 WHERE id = -1",
        later=["UPDATE t SET v = 'x' WHERE id = 1", "UPDATE t SET v = 'y' WHERE id = 2", "DELETE FROM t WHERE id = 1"],
    ),
)


def _equal(name: str, type_: str, old: str, new: str, more: str = "") -> GatedCase:
    """Return a case in which a key is freed in one text and taken in another of the same value."""
    return GatedCase(
        name=f"t21_{name}",
        tables=f"{more} CREATE TABLE t (k {type_} PRIMARY KEY, v text);",
        before=[f"INSERT INTO t VALUES ('{old}', 'old')"],
        first="DELETE FROM t",
        later=[f"INSERT INTO t VALUES ('{new}', 'new')"],
    )


_CHAR = "CREATE TABLE t (k {} PRIMARY KEY, v text);"

EQUAL_KEYS = (
    _equal("numeric", "numeric", "1.0", "1.00"),
    _equal("float8", "float8", "-0", "0"),
    _equal("interval", "interval", "1 mon", "30 days"),
    _equal("jsonb", "jsonb", "1.0", "1.00"),
    _equal("caseless_type", "ext.ci", "Bob", "BOB"),
    _equal("array", "numeric[]", "{1.0,2}", "{1.00,2}"),
    _equal("range", "numrange", "[1.0,2]", "[1.00,2.0]"),
    _equal("composite", "pair", "(1.0,x)", "(1.00,x)", "CREATE TYPE pair AS (a numeric, b text);"),
    _equal("domain", "amount", "1.0", "1.00", "CREATE DOMAIN amount AS numeric CHECK (VALUE > 0);"),
    _equal("array_of_domain", "amount[]", "{1.0}", "{1.00}", "CREATE DOMAIN amount AS numeric;"),
    GatedCase(
        name="t21_numeric_update",
        tables="CREATE TABLE t (k numeric PRIMARY KEY, v int);",
        before=["INSERT INTO t VALUES (1.0, 0)"],
        first="UPDATE t SET k = 1.00, v = 5",
        later=["UPDATE t SET v = 6 WHERE k = 1", "UPDATE t SET k = 1.000, v = 7 WHERE k = 1"],
    ),
    GatedCase(
        name="t21_text_to_char",
        tables=_CHAR.format("text"),
        target_tables=_CHAR.format("char(4)"),
        before=["INSERT INTO t VALUES ('a', 'old')"],
        first="DELETE FROM t WHERE k = 'a'",
        later=["INSERT INTO t VALUES ('a  ', 'new')", "UPDATE t SET v = 'newer'"],
        query="SELECT rtrim(k), v FROM t",
    ),
)

#: For servers with ICU and citext.
EQUAL_KEYS_ICU = (
    _equal("citext", "citext", "Bob", "BOB"),
    _equal("collation", "text COLLATE caseless", "Bob", "bob"),
    GatedCase(
        name="t21_collation_of_target",
        tables=_CHAR.format("text"),
        target_tables=_CHAR.format("text COLLATE caseless"),
        before=["INSERT INTO t VALUES ('Bob', 'old')"],
        first="DELETE FROM t WHERE k = 'Bob'",
        later=["INSERT INTO t VALUES ('bob', 'new')"],
    ),
)

_TWINS = "CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY FULL;"
_ONE = "(SELECT min(ctid) FROM t WHERE a = 1)"

TWINS = (
    GatedCase(
        name="t24_delete_delete",
        tables=_TWINS,
        before=["INSERT INTO t VALUES (1, 'x'), (1, 'x'), (1, 'x')"],
        first=f"DELETE FROM t WHERE ctid = {_ONE}",
        later=[f"DELETE FROM t WHERE ctid = {_ONE}"],
    ),
    GatedCase(
        name="t24_nulls",
        tables=_TWINS,
        before=["INSERT INTO t VALUES (1, NULL), (1, NULL)"],
        first=f"UPDATE t SET b = 'y' WHERE ctid = {_ONE}",
        later=["UPDATE t SET b = 'z' WHERE b IS NULL", "DELETE FROM t WHERE b = 'y'"],
    ),
    GatedCase(
        name="t24_insert_delete",
        tables=_TWINS,
        before=["INSERT INTO t VALUES (0, 'seed')"],
        first="INSERT INTO t VALUES (1, 'x')",
        later=["DELETE FROM t WHERE a = 1", "INSERT INTO t VALUES (1, 'x'), (1, 'x')"],
    ),
    GatedCase(
        name="t24_update_update",
        tables=_TWINS,
        before=["INSERT INTO t VALUES (1, 'x'), (2, 'x')"],
        first="UPDATE t SET b = 'y' WHERE a = 1",
        later=["UPDATE t SET b = 'x', a = 2 WHERE b = 'y'", "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t)"],
    ),
)

_TEXT_KEY = "CREATE TABLE t (a text, b text, v text, PRIMARY KEY (a, b));"

SERIALISED_KEYS = (
    GatedCase(
        name="t33_parts",
        tables=_TEXT_KEY,
        before=["INSERT INTO t VALUES ('ab', 'c', 'old')"],
        first="DELETE FROM t WHERE a = 'ab'",
        later=["INSERT INTO t VALUES ('a', 'bc', 'beside')", "INSERT INTO t VALUES ('ab', 'c', 'new')"],
        seen="SELECT array_agg(v ORDER BY v) = '{beside,old}' FROM t",
    ),
    GatedCase(
        name="t33_empty_and_null",
        tables=_TEXT_KEY,
        before=["INSERT INTO t VALUES ('', 'NULL', 'old')"],
        first="DELETE FROM t",
        later=["INSERT INTO t VALUES ('NULL', '', 'beside')", "INSERT INTO t VALUES ('', 'NULL', 'new')"],
        seen="SELECT array_agg(v ORDER BY v) = '{beside,old}' FROM t",
    ),
    GatedCase(
        name="t33_bytes",
        tables="CREATE TABLE t (k bytea PRIMARY KEY, v text);",
        before=[r"INSERT INTO t VALUES ('\x0061', 'old')"],
        first="DELETE FROM t",
        later=[r"INSERT INTO t VALUES ('\x00', 'beside')", r"INSERT INTO t VALUES ('\x0061', 'new')"],
        seen="SELECT array_agg(v ORDER BY v) = '{beside,old}' FROM t",
    ),
    GatedCase(
        name="t33_relations",
        tables=f"{_T} CREATE TABLE other (id int PRIMARY KEY, v text, w int UNIQUE);",
        before=[_SEED, "INSERT INTO other VALUES (0, 'seed', 0)"],
        first="INSERT INTO t VALUES (1, 'a')",
        later=["INSERT INTO other VALUES (1, 'a', 2)", "INSERT INTO other VALUES (2, 'b', 1)", "DELETE FROM t"],
        seen="SELECT count(*) = 3 AND (SELECT count(*) FROM t) = 1 FROM other",
    ),
)
