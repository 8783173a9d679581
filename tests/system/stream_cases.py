"""Streamed transactions for `test_streamed_cases.py`: PostgreSQL's own, by the number of their file, and others.

PostgreSQL's come from src/test/subscription/t; rows are made larger until each step is a separate chunk.
"""

from __future__ import annotations

from tests.fixtures.fan import Case

#: Whatever has more is streamed, in chunks of this size.
SETUP = """
DO $$ BEGIN
  EXECUTE format('ALTER DATABASE %I SET logical_decoding_work_mem = ''64kB''', current_database());
END $$
"""

_TABLE = "CREATE TABLE t (a int PRIMARY KEY, b varchar)"
_DEFAULTS = "CREATE TABLE t (a int PRIMARY KEY, b text, c text DEFAULT 'here', d bigint DEFAULT 999)"
_FIVE = "CREATE TABLE t (a int PRIMARY KEY, b text, c int, d int, e int, f int)"
_START = "INSERT INTO t VALUES (1, 'foo'), (2, 'bar')"


def _rows(first: int, last: int, more: str = "", width: int = 8) -> str:
    return f"INSERT INTO t SELECT i, repeat(md5(i::text), {width}){more} FROM generate_series({first}, {last}) AS i"


def _work(first: int, last: int, width: int = 8) -> str:
    return f"{_rows(first, last, width=width)}; UPDATE t SET b = md5(b) WHERE a % 2 = 0; DELETE FROM t WHERE a % 3 = 0"


_WHOLE = Case(
    name="s015",
    tables=_TABLE,
    target_tables=_DEFAULTS,
    transactions=[
        _START,
        # More than what is merged with others, for a daemon with little memory.
        f"BEGIN; {_work(3, 700, width=190)}; COMMIT",
        f"BEGIN; {_rows(3001, 3500)}; DELETE FROM t WHERE a > 3000; COMMIT",
        f"BEGIN; {_work(3001, 3500)}; COMMIT",
        # Not streamed, behind streamed ones.
        "UPDATE t SET b = 'plain' WHERE a <= 10",
        "UPDATE t SET b = md5(a::text)",
    ],
)

_SUBTRANSACTIONS = Case(
    name="s016",
    tables=_TABLE,
    target_tables=_DEFAULTS,
    transactions=[
        _START,
        "BEGIN; " + "; SAVEPOINT s; ".join(_work(n * 300 + 3, n * 300 + 302) for n in range(5)) + "; COMMIT",
    ],
)

_SCHEMA = Case(
    name="s017",
    tables=_TABLE,
    target_tables=_FIVE,
    transactions=[
        _START,
        (
            "BEGIN; INSERT INTO t VALUES (3, 'x'); ALTER TABLE t ADD COLUMN c int; SAVEPOINT s1;"
            " INSERT INTO t VALUES (4, 'y', -4); COMMIT"
        ),
        (
            f"BEGIN; {_rows(5, 400, ', -i')}; ALTER TABLE t ADD COLUMN d int; SAVEPOINT s1;"
            f" {_rows(1001, 1400, ', -i, 2 * i')}; COMMIT"
        ),
        (
            "BEGIN; INSERT INTO t VALUES (2001, 'x', -2001, 4002); ALTER TABLE t ADD COLUMN e int; SAVEPOINT s1;"
            " INSERT INTO t VALUES (2002, 'y', -2002, 4004, -6006); COMMIT"
        ),
        # The last change of the schema has no row behind it: the next transaction announces the table again.
        f"BEGIN; {_rows(2003, 2400, ', -i, 2 * i, -3 * i')}; ALTER TABLE t ADD COLUMN f int; COMMIT",
        _rows(3001, 3005, ", -i, 2 * i, -3 * i, 4 * i"),
    ],
)

_ROLLBACKS = Case(
    name="s018",
    tables=_TABLE,
    target_tables=_FIVE,
    transactions=[
        _START,
        (
            f"BEGIN; {_rows(1000, 1299)}; SAVEPOINT s1; {_rows(2000, 2299)}; SAVEPOINT s2; {_rows(3000, 3299)};"
            f" SAVEPOINT s3; {_rows(4000, 4299)}; ROLLBACK TO s2; {_rows(5000, 5299)}; ROLLBACK TO s1;"
            f" {_rows(6000, 6299)}; SAVEPOINT s4; {_rows(7000, 7299)}; SAVEPOINT s5; {_rows(8000, 8299)}; COMMIT"
        ),
        # The children of the part rolled back were released: they are sent first, in the order of their numbers.
        (
            f"BEGIN; {_rows(11000, 11299)}; SAVEPOINT s1; {_rows(12000, 12299)}; SAVEPOINT s2; {_rows(13000, 13299)};"
            f" SAVEPOINT s3; {_rows(14000, 14299)}; RELEASE s2; {_rows(15000, 15299)}; ROLLBACK TO s1; COMMIT"
        ),
        (
            f"BEGIN; {_rows(16000, 16299)}; SAVEPOINT s1; {_rows(17000, 17299)}; SAVEPOINT s2; {_rows(18000, 18299)};"
            " ROLLBACK"
        ),
        _rows(19000, 19001),
    ],
)

_SCHEMA_ROLLBACKS = Case(
    name="s019",
    tables=_TABLE,
    target_tables=_FIVE,
    transactions=[
        _START,
        (
            f"BEGIN; {_rows(3, 500)}; ALTER TABLE t ADD COLUMN c int; SAVEPOINT s1; {_rows(501, 1000, ', -i')};"
            f" ALTER TABLE t ADD COLUMN d int; SAVEPOINT s2; {_rows(1001, 1500, ', -i, 2 * i')};"
            f" ALTER TABLE t ADD COLUMN e int; SAVEPOINT s3; {_rows(1501, 2000, ', -i, 2 * i, -3 * i')};"
            f" ALTER TABLE t DROP COLUMN c; ROLLBACK TO s1; {_rows(501, 1000, ', i')}; COMMIT"
        ),
        # Nothing of the rolled back schema is in force for what comes whole afterwards.
        "INSERT INTO t VALUES (1001, 'x', 1)",
    ],
)

_KEYLESS = Case(
    name="keyless",
    tables="CREATE TABLE evt (n int, pad text)",
    transactions=[
        "BEGIN; "
        + "; ".join(
            f"SAVEPOINT s; INSERT INTO evt SELECT {n}, repeat('x', 300) FROM generate_series(1, 120);"
            f" SAVEPOINT i; INSERT INTO evt SELECT {-n}, repeat('y', 300) FROM generate_series(1, 120);"
            f" {('RELEASE i', 'ROLLBACK TO i', 'RELEASE s', 'ROLLBACK TO s')[n % 4]}"
            for n in range(12)
        )
        + "; COMMIT",
    ],
)

#: More savepoints than a follower keeps; every third is rolled back by an exception.
_MANY = Case(
    name="many",
    tables=_TABLE,
    transactions=[
        (
            "DO $$ BEGIN FOR n IN 1..150 LOOP BEGIN INSERT INTO t VALUES (n, repeat('x', 1000));"
            " IF n % 3 = 0 THEN RAISE EXCEPTION 'no'; END IF; EXCEPTION WHEN raise_exception THEN NULL; END;"
            " END LOOP; END $$"
        ),
    ],
)

# No rows into a table truncated before in a subtransaction that is rolled back: PostgreSQL then ends each stream with
# "could not map filenumber", also the stream of the built-in subscription.
_TRUNCATE = Case(
    name="truncate",
    tables=_TABLE + "; CREATE TABLE u (a int PRIMARY KEY, b varchar)",
    transactions=[
        f"{_rows(1, 300)}; INSERT INTO u SELECT * FROM t",
        (
            f"BEGIN; {_rows(301, 700)}; SAVEPOINT s; UPDATE u SET b = b || 'x'; TRUNCATE t; ROLLBACK TO s;"
            f" {_rows(701, 1000)}; TRUNCATE t; {_rows(2, 300)}; COMMIT"
        ),
    ],
)

#: Values pass from row to row and keys move, across chunks.
_MOVES = Case(
    name="moves",
    tables="CREATE TABLE t (a int PRIMARY KEY, b varchar, u int UNIQUE)",
    transactions=[
        _rows(1, 300, ", i"),
        (
            "BEGIN; UPDATE t SET u = NULL WHERE a <= 150;"
            " SAVEPOINT s; UPDATE t SET u = a - 150, b = b || 'x' WHERE a > 150;"
            " UPDATE t SET a = a + 1000; ROLLBACK TO s; UPDATE t SET u = a - 150, b = b || 'y' WHERE a > 150;"
            " UPDATE t SET u = a + 150, b = b || 'z' WHERE a <= 150; UPDATE t SET a = a + 2000;"
            " DELETE FROM t WHERE a < 2050;"
            " UPDATE t SET a = a - 2000; COMMIT"
        ),
    ],
)

_TOAST = Case(
    name="toast",
    tables="CREATE TABLE t (a int PRIMARY KEY, n int, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
    transactions=[
        "INSERT INTO t SELECT i, 0, repeat(md5(i::text), 200) FROM generate_series(1, 60) AS i",
        (
            "BEGIN; UPDATE t SET n = 1;"
            " INSERT INTO t SELECT i, 0, repeat(md5(i::text), 200) FROM generate_series(61, 99) AS i;"
            " SAVEPOINT s; UPDATE t SET big = repeat('x', 9000) WHERE a % 2 = 0; ROLLBACK TO s;"
            " UPDATE t SET n = n + 1; UPDATE t SET a = a + 100 WHERE a % 5 = 0; COMMIT"
        ),
    ],
)

_PARTITIONS = Case(
    name="partitions",
    tables="CREATE TABLE t (a int PRIMARY KEY, b varchar) PARTITION BY RANGE (a);"
    " CREATE TABLE t_0 PARTITION OF t FOR VALUES FROM (0) TO (500);"
    " CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (500) TO (5000)",
    target_tables="CREATE TABLE t (a int PRIMARY KEY, b varchar) PARTITION BY HASH (a);"
    " CREATE TABLE h_0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
    " CREATE TABLE h_1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    transactions=[
        (
            f"BEGIN; {_rows(1, 900)}; SAVEPOINT s; DELETE FROM t WHERE a % 2 = 0; ROLLBACK TO s;"
            " UPDATE t SET a = a + 1000 WHERE a < 100; DELETE FROM t WHERE a % 7 = 0; COMMIT"
        ),
    ],
    compared=False,
)

#: Code runs on the target: such a transaction is not followed, and its rows come in source order.
_TRIGGERS = Case(
    name="triggers",
    tables="CREATE TABLE t (a int PRIMARY KEY, b varchar); CREATE TABLE other (a int PRIMARY KEY, b varchar)",
    target_tables="""
CREATE TABLE t (a int PRIMARY KEY, b varchar); CREATE TABLE other (a int PRIMARY KEY, b varchar);
CREATE TABLE noted (n bigint, what text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS
$$ BEGIN INSERT INTO noted SELECT count(*), TG_OP || coalesce(NEW.a, OLD.a) FROM noted; RETURN NULL; END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note();
ALTER TABLE t ENABLE ALWAYS TRIGGER note
""",
    transactions=[
        (
            f"BEGIN; INSERT INTO other SELECT i, repeat('x', 300) FROM generate_series(1, 400) AS i; {_rows(1, 300)};"
            " SAVEPOINT s; UPDATE t SET b = 'gone'; ROLLBACK TO s; DELETE FROM t WHERE a % 3 = 0;"
            " INSERT INTO t SELECT i, 'again' FROM generate_series(3, 30, 3) AS i; COMMIT"
        ),
    ],
    compared=False,
)

CASES = (
    _WHOLE, _SUBTRANSACTIONS, _SCHEMA, _ROLLBACKS, _SCHEMA_ROLLBACKS, _KEYLESS, _MANY, _TRUNCATE, _MOVES, _TOAST,
    _PARTITIONS, _TRIGGERS,
)  # fmt: skip
