"""Cases that sets could get wrong: tables and transactions for `test_sets.py`, each named after its trap."""

from __future__ import annotations

from tests.fixtures.fan import Case

_SAME_ROW = [
    text
    for number in range(25)
    for key in (number % 5,)
    for text in (
        f"INSERT INTO t VALUES ({key}, 'a{number}')",
        f"UPDATE t SET v = 'b{number}' WHERE id = {key}",
        f"UPDATE t SET v = v || 'c' WHERE id = {key}",
        f"DELETE FROM t WHERE id = {key}",
        f"INSERT INTO t VALUES ({key}, 'new{number}')",
        f"DELETE FROM t WHERE id = {key}" if number < 20 else f"UPDATE t SET v = 'last' WHERE id = {key}",
    )
]

_SWAP = (
    "BEGIN; UPDATE t SET id = -1 WHERE id = {a}; UPDATE t SET id = {a} WHERE id = {b};"
    " UPDATE t SET id = {b} WHERE id = -1; COMMIT"
)
_MOVES = [
    "INSERT INTO t SELECT n, 'v' || n FROM generate_series(1, 20) AS n",
    *(
        text
        for number in range(1, 9)
        for text in (
            f"UPDATE t SET id = id + 100 WHERE id = {number}",
            f"INSERT INTO t VALUES ({number}, 'uno{number}')",
            f"UPDATE t SET v = v || '!' WHERE id = {number + 100}",
        )
    ),
    *(_SWAP.format(a=number, b=number + 1) for number in range(1, 12)),
    # A move onto a key freed in the same transaction, a move there and back, a move and then a delete.
    (
        "BEGIN; DELETE FROM t WHERE id = 15; UPDATE t SET id = 15 WHERE id = 16;"
        " INSERT INTO t VALUES (16, 'again'); COMMIT"
    ),
    "BEGIN; UPDATE t SET id = 500 WHERE id = 17; UPDATE t SET id = 17, v = 'back' WHERE id = 500; COMMIT",
    "BEGIN; UPDATE t SET id = 600 WHERE id = 18; DELETE FROM t WHERE id = 600; COMMIT",
    "UPDATE t SET id = 700 WHERE id = 19",
    "DELETE FROM t WHERE id = 700",
    # Every key by one, from the top: no unique check fails row by row, and any other order fails.
    (
        "DO $$ DECLARE k int; BEGIN FOR k IN SELECT id FROM t ORDER BY id DESC LOOP"
        " UPDATE t SET id = id + 1 WHERE id = k; END LOOP; END $$"
    ),
    "UPDATE pair SET (a, b) = (b, a) WHERE a = 'x'",
    "INSERT INTO pair VALUES ('x', 'y', 0)",
    "BEGIN; UPDATE pair SET a = 'z' WHERE a = 'y'; UPDATE pair SET n = n + 1; COMMIT",
]

_TWINS = [
    "INSERT INTO t VALUES (1, 'x'), (1, 'x'), (1, 'x'), (1, NULL), (1, NULL), (NULL, NULL), (NULL, NULL), (2, 'y')",
    "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE b = 'x')",
    "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE b IS NULL AND a = 1)",
    "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE a IS NULL)",
    "UPDATE t SET b = 'changed' WHERE ctid = (SELECT min(ctid) FROM t WHERE b = 'x')",
    (
        "BEGIN; INSERT INTO t SELECT 3, 'z' FROM generate_series(1, 6);"
        " DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE a = 3);"
        " DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE a = 3); COMMIT"
    ),
    *("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE a = 3)" for _ in range(2)),
    "UPDATE t SET a = 1, b = NULL WHERE a = 2",
]

_TRUNCATES = [
    text
    for number in range(4)
    for text in (
        "INSERT INTO parent (v) SELECT 'p' FROM generate_series(1, 30)",
        "INSERT INTO child (parent) SELECT id FROM parent",
        "UPDATE parent SET v = 'q' WHERE id % 2 = 0",
        "TRUNCATE parent, child RESTART IDENTITY" if number % 2 else "TRUNCATE parent CASCADE",
        "INSERT INTO parent (id, v) VALUES (1000, 'after')",
        (
            "BEGIN; INSERT INTO child (id, parent) VALUES (5, 1000); TRUNCATE child; INSERT INTO child (id, parent)"
            " VALUES (7, 1000); COMMIT"
        ),
        "INSERT INTO other SELECT n FROM generate_series(1, 5) AS n",
        "DELETE FROM parent USING child WHERE false",
        "TRUNCATE other",
        *(("DELETE FROM child", "DELETE FROM parent") if number < 3 else ()),
    )
]

_TOAST = "(SELECT string_agg(md5((i * {seed})::text), '') FROM generate_series(1, 80) AS i)"

#: Tables without a key, with and without an index that narrows the search.
_WHOLE = (
    "CREATE TABLE {0} (a int, b numeric, c float8, d text, big text);"
    "ALTER TABLE {0} ALTER big SET STORAGE EXTERNAL; ALTER TABLE {0} REPLICA IDENTITY FULL;"
)
_WHOLE_TABLES = ("scanned", "narrowed", "by_two", "parted")
_WHOLE_CHANGES = [
    text.format(table)
    for table in _WHOLE_TABLES
    for text in (
        (
            "INSERT INTO {0} SELECT n, n * 1.10, n / 7.0, CASE WHEN n % 3 > 0 THEN 'd' || n % 5 END,"
            f" CASE WHEN n % 20 = 0 THEN {_TOAST.format(seed='n')} END FROM generate_series(1, 200) AS n"
        ),
        "INSERT INTO {0} SELECT a, b, c, d, big FROM {0} WHERE a % 4 = 0",
        "UPDATE {0} SET b = b + 1 WHERE a % 2 = 0",
        "UPDATE {0} SET d = NULL WHERE a % 5 = 0",
        "BEGIN; UPDATE {0} SET c = c + 1; UPDATE {0} SET c = c - 1, a = a + 1 WHERE a > 100; COMMIT",
        "DELETE FROM {0} WHERE ctid IN (SELECT DISTINCT ON (a) ctid FROM {0} WHERE a % 8 = 0)",
        "UPDATE {0} SET a = NULL WHERE a % 7 = 0",
        (
            "BEGIN; INSERT INTO {0} VALUES (-1, 1, 1, 'new', NULL); UPDATE {0} SET d = 'newer' WHERE a = -1;"
            " DELETE FROM {0} WHERE a < 10; COMMIT"
        ),
        "UPDATE {0} SET big = NULL WHERE a % 40 = 0",
        "DELETE FROM {0} WHERE a % 3 = 0",
        "UPDATE {0} SET d = 'all'",
    )
]

CASES = (
    Case(name="t18", tables="CREATE TABLE t (id int PRIMARY KEY, v text)", transactions=_SAME_ROW),
    Case(
        name="t20",
        tables="CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE pair (a text, b text, n int,"
        " PRIMARY KEY (a, b))",
        transactions=["INSERT INTO pair VALUES ('x', 'y', 1), ('u', 'v', 2)", *_MOVES],
    ),
    Case(
        name="t22",
        tables="CREATE TABLE nulls (id int PRIMARY KEY, k int, UNIQUE NULLS NOT DISTINCT (k));"
        "CREATE TABLE folded (id int PRIMARY KEY, e text); CREATE UNIQUE INDEX ON folded (lower(e));"
        "CREATE TABLE active (id int PRIMARY KEY, e text, is_active bool);"
        "CREATE UNIQUE INDEX ON active (e) WHERE is_active;"
        "CREATE TABLE room (id int PRIMARY KEY, r int4range, EXCLUDE USING gist (r WITH &&))",
        transactions=[
            text
            for n in range(0, 40, 2)
            for text in (
                f"INSERT INTO nulls VALUES ({n}, NULL)",
                f"DELETE FROM nulls WHERE id = {n}",
                f"INSERT INTO folded VALUES ({n}, 'A@x')",
                f"DELETE FROM folded WHERE id = {n}",
                f"INSERT INTO folded VALUES ({n + 1}, 'a@X')",
                f"UPDATE folded SET e = 'a' || id WHERE id = {n + 1}",
                f"INSERT INTO active VALUES ({n}, 'e', true)",
                f"UPDATE active SET is_active = false WHERE id = {n}",
                f"INSERT INTO room VALUES ({n}, '[1,10)')",
                f"UPDATE room SET r = '[{n}00,{n}01)' WHERE id = {n}",
            )
        ],
    ),
    Case(
        name="t24",
        tables="CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY FULL",
        transactions=_TWINS,
    ),
    Case(
        name="t24_whole",
        tables="".join([_WHOLE.format(name) for name in _WHOLE_TABLES]),
        target_tables="".join([_WHOLE.format(name) for name in _WHOLE_TABLES[:-1]])
        + "CREATE INDEX ON narrowed (a); CREATE INDEX ON by_two (d, a);"
        "CREATE TABLE parted (a int, b numeric, c float8, d text, big text) PARTITION BY RANGE (a);"
        "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (MINVALUE) TO (50);"
        "CREATE TABLE parted_rest PARTITION OF parted DEFAULT; CREATE INDEX ON parted (a)",
        transactions=_WHOLE_CHANGES,
        compared=False,
    ),
    Case(
        name="t25",
        tables="CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY,"
        " parent int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE)",
        transactions=[
            text
            for n in range(12)
            for text in (
                f"INSERT INTO parent VALUES ({n})",
                f"INSERT INTO child SELECT {n} * 10 + i, {n} FROM generate_series(0, 4) AS i",
                f"UPDATE parent SET id = {n + 1000} WHERE id = {n}",
                *((f"DELETE FROM parent WHERE id = {n + 1000}",) if n % 3 else ()),
            )
        ],
    ),
    Case(
        name="t26",
        tables="CREATE TABLE parent (id serial PRIMARY KEY, v text); CREATE TABLE child (id serial PRIMARY KEY,"
        " parent int REFERENCES parent); CREATE TABLE other (id int)",
        transactions=_TRUNCATES,
        owned=("parent", "child"),
    ),
    Case(
        name="t33",
        tables="CREATE TABLE t (a text, b text, v int, PRIMARY KEY (a, b));"
        "CREATE TABLE raw (k bytea PRIMARY KEY, v int);"
        "CREATE TABLE nine (a int, b int, c int, d int, e int, f int, g int, h int, i int, v int,"
        " PRIMARY KEY (a, c, d, e, f, g, h, i, b))",
        transactions=[
            "INSERT INTO nine SELECT n, n, 1, 1, 1, 1, 1, 1, n % 2, 0 FROM generate_series(1, 6) AS n",
            "UPDATE nine SET a = 1",
            "UPDATE nine SET v = v + b",
            *(f"UPDATE nine SET v = v + 10 WHERE b = {n}" for n in (1, 2, 3)),
            "DELETE FROM nine WHERE b > 4",
            "INSERT INTO t VALUES ('ab', 'c', 1), ('', '', 2), ('NULL', '', 3), ('', 'NULL', 4)",
            "DELETE FROM t WHERE a = 'ab'",
            "INSERT INTO t VALUES ('a', 'bc', 5)",
            "INSERT INTO t VALUES ('ab', 'c', 6)",
            "UPDATE t SET v = v + 10 WHERE a = ''",
            "DELETE FROM t WHERE b = 'NULL'",
            r"INSERT INTO raw VALUES ('\x00', 1), ('\x0000', 2), ('\x', 3), ('\x5c', 4)",
            r"UPDATE raw SET v = 9 WHERE k = '\x0000'",
            r"DELETE FROM raw WHERE k = '\x00'",
        ],
    ),
    Case(
        name="t38",
        tables="CREATE TABLE t (id int PRIMARY KEY, pos int UNIQUE); CREATE TABLE late (id int PRIMARY KEY, pos int,"
        " UNIQUE (pos) DEFERRABLE INITIALLY DEFERRED)",
        transactions=[
            "INSERT INTO t SELECT n, n FROM generate_series(1, 30) AS n",
            (
                "DO $$ DECLARE k int; BEGIN FOR k IN SELECT id FROM t ORDER BY pos DESC LOOP"
                " UPDATE t SET pos = pos + 1 WHERE id = k; END LOOP; END $$"
            ),
            "BEGIN; UPDATE t SET pos = 0 WHERE id = 1; UPDATE t SET pos = 2 WHERE id = 2; COMMIT",
            # T-49: two rows hold one value until the commit.
            "INSERT INTO late VALUES (1, 1), (2, 2), (3, 3)",
            "BEGIN; UPDATE late SET pos = 2 WHERE id = 1; UPDATE late SET pos = 1 WHERE id = 2; COMMIT",
            "UPDATE late SET pos = pos + 1",
            "UPDATE late SET pos = 3 - pos WHERE pos < 3",
        ],
    ),
    Case(
        name="t39",
        tables="CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE keyless (v text)",
        transactions=[
            "BEGIN; INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c'); INSERT INTO keyless VALUES ('k'), ('k'); COMMIT",
            "BEGIN; DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'new'); COMMIT",
            (
                "BEGIN; INSERT INTO t VALUES (4, 'x'); UPDATE t SET v = 'y' WHERE id = 4; DELETE FROM t WHERE id = 4;"
                " INSERT INTO t VALUES (4, 'z'); COMMIT"
            ),
            "BEGIN; INSERT INTO t VALUES (5, 'x'); DELETE FROM t WHERE id = 5; COMMIT",
            "BEGIN; UPDATE t SET v = 'u' WHERE id = 2; DELETE FROM t WHERE id = 2; COMMIT",
            (
                "BEGIN; SAVEPOINT a; INSERT INTO t VALUES (6, 'gone'); ROLLBACK TO a;"
                " INSERT INTO t VALUES (6, 'kept'); COMMIT"
            ),
        ],
    ),
    Case(
        name="t40",
        tables="CREATE TABLE t (id int PRIMARY KEY, n int, v text)",
        transactions=[
            "INSERT INTO t VALUES (1, 0, 'a'), (2, 0, 'b')",
            *(f"UPDATE t SET n = n + 1 WHERE id = {number % 2 + 1}" for number in range(30)),
            "BEGIN; UPDATE t SET n = n + 1; UPDATE t SET v = v || n; UPDATE t SET n = n * 2; COMMIT",
        ],
    ),
    Case(
        name="t41",
        tables="CREATE TABLE t (id int PRIMARY KEY, big text, n int, other text);"
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL;"
        "CREATE TABLE keyed (n int, k text, big text, PRIMARY KEY (k));"
        "ALTER TABLE keyed ALTER k SET STORAGE EXTERNAL, ALTER big SET STORAGE EXTERNAL;"
        "CREATE TABLE whole (n int, big text); ALTER TABLE whole REPLICA IDENTITY FULL;"
        "ALTER TABLE whole ALTER big SET STORAGE EXTERNAL",
        transactions=[
            (
                f"INSERT INTO t SELECT n, {_TOAST.format(seed='n')}, 0, {_TOAST.format(seed='n + 7')}"
                " FROM generate_series(1, 6) AS n"
            ),
            "UPDATE t SET n = 1",
            f"UPDATE t SET big = {_TOAST.format(seed='99')} WHERE id = 1",
            "UPDATE t SET other = 'short' WHERE id = 2",
            "UPDATE t SET n = n + 1, big = NULL WHERE id = 3",
            "UPDATE t SET id = 100 WHERE id = 4",
            (
                f"BEGIN; INSERT INTO t VALUES (7, {_TOAST.format(seed='5')}, 0, NULL);"
                " UPDATE t SET n = 2 WHERE id = 7; COMMIT"
            ),
            "UPDATE t SET n = n + 1 WHERE id IN (5, 100)",
            (
                "BEGIN; UPDATE t SET n = 9 WHERE id = 6; UPDATE t SET big = 'x' WHERE id = 6; UPDATE t SET n = 10"
                " WHERE id = 6; COMMIT"
            ),
            (
                f"INSERT INTO keyed SELECT n, {_TOAST.format(seed='n')}, {_TOAST.format(seed='n + 1')}"
                " FROM generate_series(1, 3) AS n"
            ),
            "UPDATE keyed SET n = n + 10",
            "UPDATE keyed SET big = 'short' WHERE n = 11",
            f"UPDATE keyed SET k = {_TOAST.format(seed='77')} WHERE n = 12",
            "UPDATE keyed SET n = n + 1 WHERE n = 12",
            "DELETE FROM keyed WHERE n = 13 AND k NOT LIKE 'z%' AND big <> 'short' AND n > 500",
            f"INSERT INTO whole SELECT n, {_TOAST.format(seed='n')} FROM generate_series(1, 4) AS n",
            "UPDATE whole SET n = n + 1",
            "DELETE FROM whole WHERE n = 3",
        ],
    ),
    Case(
        name="t45",
        tables="CREATE TABLE big (id int PRIMARY KEY, v text, b bytea); CREATE TABLE many (id int PRIMARY KEY, v text);"
        f"CREATE TABLE wide (id int PRIMARY KEY, {', '.join(f'c{n} int2' for n in range(1599))})",
        transactions=[
            (
                "INSERT INTO big SELECT n, repeat(md5(n::text), 90000), decode(repeat('00ff', 500000), 'hex')"
                " FROM generate_series(1, 2) AS n"
            ),
            "UPDATE big SET v = v || 'x' WHERE id = 1",
            "INSERT INTO many SELECT n, 'v' || n FROM generate_series(1, 10000) AS n",
            "UPDATE many SET v = v || '!' WHERE id % 2 = 0",
            "DELETE FROM many WHERE id % 3 = 0",
            *(f"INSERT INTO wide VALUES ({row}, {', '.join(str(n % 100) for n in range(1599))})" for row in (1, 2, 3)),
            "UPDATE wide SET c0 = NULL, c1598 = 7 WHERE id = 2",
            "UPDATE wide SET c5 = id",
            "DELETE FROM wide WHERE id = 3",
        ],
    ),
    Case(
        name="t67",
        tables="CREATE TABLE none (); CREATE TABLE nothing_left (); CREATE TABLE only_key (id int PRIMARY KEY)",
        transactions=[
            *("INSERT INTO none DEFAULT VALUES" for _ in range(3)),
            "INSERT INTO only_key SELECT generate_series(1, 5)",
            "UPDATE only_key SET id = id + 100 WHERE id > 3",
            "UPDATE only_key SET id = id",
            "DELETE FROM only_key WHERE id = 1",
        ],
    ),
)
