"""Cases of conflicts: one for each cell of the policies' truth table, and what else a target can differ in."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from tests.fixtures.conflict_lab import ConflictCase

#: A column that only the target has keeps its value where a row is overwritten.
_TABLE = "CREATE TABLE t (id int PRIMARY KEY, u int, v text)"
_TARGET = "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text, local text DEFAULT 'new')"
_LOCAL = "INSERT INTO t VALUES (7, 70, 'local', 'mine')"
_TWO = "INSERT INTO t VALUES (7, 70, 'local', 'mine'), (8, 71, 'other', 'too')"
_INSERT = "INSERT INTO t VALUES (7, 71, 'remote')"
_BESIDE = "INSERT INTO t VALUES (1, 1, 'beside')"
_BESIDE_ROW = (1, 1, "beside", "new")
#: The row is on both sides, and another one of the target has what it becomes.
_SHARED = "INSERT INTO t VALUES (3, 30, 'a')"
_UPDATE = "UPDATE t SET u = 70, v = 'remote' WHERE id = 3"
_DROPPED = (("skip", "skipped"), ("keep_local", "kept_local"))


def _insert_exists() -> list[ConflictCase]:
    kept = [_BESIDE_ROW, (7, 70, "local", "mine")]
    cases = [
        ConflictCase(
            name=f"insert_exists_{policy}", tables=_TABLE, target_tables=_TARGET, policies={"insert_exists": policy},
            before=_LOCAL, transactions=[_BESIDE, _INSERT], rows=kept, found=[f"insert_exists insert {outcome}"],
        )
        for policy, outcome in _DROPPED
    ]  # fmt: skip
    applied = "insert_exists insert applied_remote"
    return [
        *cases,
        ConflictCase(
            name="insert_exists_apply_remote", tables=_TABLE, target_tables=_TARGET,
            policies={"insert_exists": "apply_remote"}, before=_LOCAL, transactions=[_BESIDE, _INSERT],
            rows=[_BESIDE_ROW, (7, 71, "remote", "mine")], found=[applied],
        ),
        ConflictCase(
            name="insert_exists_by_another_index", tables=_TABLE, target_tables=_TARGET,
            policies={"insert_exists": "apply_remote"}, before="INSERT INTO t VALUES (99, 71, 'local', 'mine')",
            transactions=[_INSERT], rows=[(7, 71, "remote", "mine")], found=[applied],
        ),
        ConflictCase(
            name="insert_exists_identity", tables="CREATE TABLE t (id int PRIMARY KEY, v text)",
            target_tables="CREATE TABLE t (id int PRIMARY KEY, v text, n int GENERATED ALWAYS AS IDENTITY)",
            policies={"insert_exists": "apply_remote"}, before="INSERT INTO t VALUES (7, 'local')",
            transactions=["INSERT INTO t VALUES (7, 'remote')"], rows=[(7, "remote", 1)], found=[applied],
        ),
        ConflictCase(
            name="insert_exists_identity_key",
            tables="CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)",
            policies={"insert_exists": "apply_remote"}, before="INSERT INTO t (v) VALUES ('local')",
            transactions=["INSERT INTO t (v) VALUES ('remote')"], rows=[(1, "remote")], found=[applied],
        ),
    ]  # fmt: skip


def _multiple() -> list[ConflictCase]:
    kind = "multiple_unique_conflicts"
    three = "CREATE TABLE t (a int PRIMARY KEY, b int UNIQUE, c int UNIQUE)"
    rows = "INSERT INTO t VALUES (2, 2, 2), (3, 3, 3), (4, 4, 4)"
    cases = [
        ConflictCase(
            name=f"multiple_{policy}", tables=_TABLE, target_tables=_TARGET, policies={kind: policy}, before=_TWO,
            transactions=[_BESIDE, _INSERT],
            rows=[_BESIDE_ROW, (7, 70, "local", "mine"), (8, 71, "other", "too")], found=[f"{kind} insert {outcome}"],
        )
        for policy, outcome in _DROPPED
    ]  # fmt: skip
    return [
        *cases,
        ConflictCase(
            name="multiple_apply_remote", tables=_TABLE, target_tables=_TARGET, policies={kind: "apply_remote"},
            before=_TWO, transactions=[_INSERT], rows=[(7, 71, "remote", "mine")],
            found=[f"{kind} insert applied_remote"],
        ),
        # PostgreSQL 18's 035_conflicts: three rows of the target in the way of one insert, and of one update.
        ConflictCase(
            name="multiple_035_insert", tables=three, policies={kind: "skip"}, before=rows,
            transactions=["INSERT INTO t VALUES (2, 3, 4)"], rows=[(2, 2, 2), (3, 3, 3), (4, 4, 4)],
            found=[f"{kind} insert skipped"],
        ),
        ConflictCase(
            name="multiple_035_update", tables=f"{three}; INSERT INTO t VALUES (5, 5, 5)",
            policies={kind: "apply_remote"},
            before="INSERT INTO t VALUES (6, 6, 6), (7, 7, 7), (8, 8, 8)",
            transactions=["UPDATE t SET a = 6, b = 7, c = 8 WHERE a = 5"], rows=[(6, 7, 8)],
            found=[f"{kind} update applied_remote"],
        ),
        ConflictCase(
            name="multiple_in_one_row", tables=_TABLE, target_tables=_TARGET, policies={kind: "apply_remote"},
            before="INSERT INTO t VALUES (7, 71, 'local', 'mine')", transactions=[_INSERT],
            rows=[(7, 71, "remote", "mine")], found=[f"{kind} insert applied_remote"],
        ),
    ]  # fmt: skip


def _update_exists() -> list[ConflictCase]:
    tables: dict[str, Any] = {"tables": f"{_TABLE}; {_SHARED}", "target_tables": f"{_TARGET}; {_SHARED}"}
    cases = [
        ConflictCase(
            name=f"update_exists_{policy}", **tables, policies={"update_exists": policy}, before=_LOCAL,
            transactions=[_UPDATE, _BESIDE],
            rows=[_BESIDE_ROW, (3, 30, "a", "new"), (7, 70, "local", "mine")],
            found=[f"update_exists update {outcome}"],
        )
        for policy, outcome in _DROPPED
    ]  # fmt: skip
    return [
        *cases,
        ConflictCase(
            name="update_exists_apply_remote", **tables, policies={"update_exists": "apply_remote"}, before=_LOCAL,
            transactions=[_UPDATE], rows=[(3, 70, "remote", "new")], found=["update_exists update applied_remote"],
        ),
        ConflictCase(
            name="update_exists_moved_key", **tables, policies={"update_exists": "apply_remote"}, before=_LOCAL,
            transactions=["UPDATE t SET id = 7 WHERE id = 3"], rows=[(7, 30, "a", "new")],
            found=["update_exists update applied_remote"],
        ),
    ]  # fmt: skip


def _missing() -> list[ConflictCase]:
    tables: dict[str, Any] = {"tables": f"{_TABLE}; {_SHARED}", "target_tables": _TARGET}
    change = "UPDATE t SET v = 'remote' WHERE id = 3"
    return [
        ConflictCase(
            name="update_missing_skip", **tables, policies={"update_missing": "skip"}, transactions=[change, _BESIDE],
            rows=[_BESIDE_ROW], found=["update_missing update skipped"],
        ),
        ConflictCase(
            name="update_missing_apply_remote", **tables, policies={"update_missing": "apply_remote"},
            transactions=[change], rows=[(3, 30, "remote", "new")], found=["update_missing update applied_remote"],
        ),
        ConflictCase(
            name="update_missing_then_exists", **tables, before="INSERT INTO t VALUES (9, 30, 'local', 'mine')",
            policies={"update_missing": "apply_remote", "insert_exists": "apply_remote"},
            transactions=[change], rows=[(3, 30, "remote", "new")],
            found=["insert_exists update applied_remote", "update_missing update applied_remote"],
        ),
        ConflictCase(
            name="delete_missing_skip", **tables, policies={"delete_missing": "skip"},
            transactions=["DELETE FROM t WHERE id = 3", _BESIDE], rows=[_BESIDE_ROW],
            found=["delete_missing delete skipped"],
        ),
        ConflictCase(
            name="missing_with_full_identity",
            tables="CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY FULL;"
            " INSERT INTO t VALUES (1, NULL), (1, 'x')",
            before="DELETE FROM t WHERE b = 'x'", policies={"update_missing": "skip", "delete_missing": "skip"},
            transactions=["UPDATE t SET b = 'y' WHERE b = 'x'; DELETE FROM t WHERE b = 'y'"], rows=[(1, None)],
            found=["update_missing update skipped", "delete_missing delete skipped"],
        ),
    ]  # fmt: skip


def _indexes() -> list[ConflictCase]:
    """Unique indexes whose conflicts equal columns do not show; pglogical's secondary unique keys are among them."""
    flagged = "CREATE TABLE t (a int PRIMARY KEY, b int, is_unique bool)"
    mails = "CREATE TABLE t (id int PRIMARY KEY, mail text, l text GENERATED ALWAYS AS (upper(mail)) STORED)"
    return [
        ConflictCase(
            name="partial_index", tables=flagged,
            target_tables=f"{flagged}; CREATE UNIQUE INDEX p ON t (b) WHERE is_unique",
            before="INSERT INTO t VALUES (90, 2, true), (91, 3, false)", policies={"insert_exists": "apply_remote"},
            # The second and third conflict with no row: pglogical's (4,2,false).
            transactions=[
                "INSERT INTO t VALUES (3, 2, true)", "INSERT INTO t VALUES (4, 2, false)",
                "INSERT INTO t VALUES (5, 3, true)",
            ],
            rows=[(3, 2, True), (4, 2, False), (5, 3, True), (91, 3, False)],
            found=["insert_exists insert applied_remote"],
        ),
        ConflictCase(
            name="expression_index", tables="CREATE TABLE t (id int PRIMARY KEY, mail text)", target_tables=mails
            + "; CREATE UNIQUE INDEX lower_mail ON t ((lower(mail)), (1)); CREATE UNIQUE INDEX made ON t (l)",
            before="INSERT INTO t VALUES (9, 'A@x')", policies={"multiple_unique_conflicts": "apply_remote"},
            transactions=["INSERT INTO t VALUES (1, 'a@X')"], rows=[(1, "a@X", "A@X")],
            found=["multiple_unique_conflicts insert applied_remote"],
        ),
        ConflictCase(
            name="nulls_not_distinct", tables="CREATE TABLE t (id int PRIMARY KEY, a int, b int)",
            target_tables="CREATE TABLE t (id int PRIMARY KEY, a int, b int, UNIQUE NULLS NOT DISTINCT (a, b))",
            before="INSERT INTO t VALUES (9, 1, NULL)", policies={"insert_exists": "keep_local"},
            transactions=["INSERT INTO t VALUES (1, 1, NULL); INSERT INTO t VALUES (2, NULL, NULL)"],
            rows=[(2, None, None), (9, 1, None)], found=["insert_exists insert kept_local"],
        ),
        # Of the columns that only the target has the first gets its default, the others what is not known before.
        ConflictCase(
            name="defaults_of_the_target", tables="CREATE TABLE t (id int PRIMARY KEY, a int)",
            target_tables="CREATE TABLE t (id int PRIMARY KEY, a int, region text DEFAULT lower('EU'), n bigserial,"
            "g bigint GENERATED ALWAYS AS (n + 1) STORED) PARTITION BY LIST (id); ALTER TABLE t ALTER n DROP NOT NULL;"
            "CREATE TABLE leaf PARTITION OF t DEFAULT; ALTER TABLE leaf ALTER region SET DEFAULT 'of the parent';"
            "CREATE UNIQUE INDEX ON leaf (a, region) NULLS NOT DISTINCT;"
            "CREATE UNIQUE INDEX ON leaf (a) WHERE region IS NULL; CREATE UNIQUE INDEX ON leaf (a) WHERE n IS NULL;"
            "CREATE UNIQUE INDEX ON leaf (a, g) NULLS NOT DISTINCT",
            before="INSERT INTO t VALUES (1, 5, 'eu', 11), (2, 7, NULL, NULL), (3, 8, 'eu', 13)",
            policies={"insert_exists": "apply_remote"},
            transactions=["INSERT INTO t VALUES (1, 7)", "INSERT INTO t VALUES (4, 8)"],
            query="SELECT id, a, region, n FROM t ORDER BY 1",
            rows=[(1, 7, "eu", 11), (2, 7, None, None), (4, 8, "eu", 13)],
            found=["insert_exists insert applied_remote"] * 2,
        ),
        ConflictCase(
            name="texts_of_the_wire", tables="CREATE TABLE t (id int PRIMARY KEY, b bool, i inet, c char(4))",
            before="INSERT INTO t VALUES (1, true, '1.2.3.4', 'ab')", policies={"insert_exists": "keep_local"},
            transactions=["INSERT INTO t VALUES (1, false, NULL, 'x')"], query="SELECT id, b FROM t", rows=[(1, True)],
            found=["insert_exists insert kept_local"],
            kept=[(["t_pkey"], {"id": "1", "b": "t", "i": "1.2.3.4", "c": "ab  "})],
        ),
        ConflictCase(
            name="composite_of_nulls",
            tables="CREATE TYPE two AS (x int, y int); CREATE TABLE t (id int PRIMARY KEY, c two)",
            target_tables="CREATE TYPE two AS (x int, y int);"
            "CREATE TABLE t (id int PRIMARY KEY, c two, UNIQUE NULLS NOT DISTINCT (c))",
            before="INSERT INTO t VALUES (8, NULL), (9, (NULL, NULL))", policies={"insert_exists": "apply_remote"},
            transactions=["INSERT INTO t VALUES (1, NULL)"], query="SELECT id, c::text FROM t ORDER BY 1",
            rows=[(1, None), (9, "(,)")], found=["insert_exists insert applied_remote"],
        ),
        ConflictCase(
            name="types_of_indexes",
            tables="CREATE TYPE mood AS ENUM ('low', 'high'); CREATE DOMAIN feeling AS mood;"
            "CREATE TABLE t (id int PRIMARY KEY, c char(4), b bit(4), m feeling, n name)",
            target_tables="CREATE TYPE mood AS ENUM ('low', 'high'); CREATE DOMAIN feeling AS mood;"
            "CREATE TABLE t (id int PRIMARY KEY, c char(4) UNIQUE, b bit(4) UNIQUE, m feeling UNIQUE, n name UNIQUE)",
            before="INSERT INTO t VALUES (7, 'abc', NULL, NULL), (8, NULL, B'1011', NULL), (9, NULL, NULL, 'high');"
            "INSERT INTO t (id, n) VALUES (10, 'N')",
            policies={"insert_exists": "apply_remote"},
            transactions=[
                "INSERT INTO t VALUES (1, 'abc')", "INSERT INTO t (id, b) VALUES (2, B'1011')",
                "INSERT INTO t (id, m) VALUES (3, 'high')", "INSERT INTO t (id, n) VALUES (4, 'N')",
            ],
            query="SELECT id FROM t ORDER BY 1", rows=[(1,), (2,), (3,), (4,)],
            found=["insert_exists insert applied_remote"] * 4,
        ),
        ConflictCase(
            name="odd names",
            tables='CREATE TABLE "t %s ""{x}" ("a b" char(5), "it\'s" numeric, v text, PRIMARY KEY ("a b", "it\'s"))',
            query='SELECT rtrim("a b"), "it\'s", v FROM "t %s ""{x}"', policies={}, policy_tables=(),
            before='INSERT INTO "t %s ""{x}" VALUES (\'x\', 1.50, \'local\')',
            transactions=['INSERT INTO "t %s ""{x}" VALUES (\'x  \', 1.5, \'remote\')'],
            rows=[("x", Decimal("1.50"), "local")], found=["insert_exists insert skipped"],
        ),
    ]  # fmt: skip


def _partitions(policy: str, outcome: str) -> ConflictCase:
    """Unique indexes that only a part of the target's table has: of two leaves by one name, and of a branch.

    The first row is on both sides, in the other leaf, and has the values of a row in the way: it conflicts with none.
    """
    name = f"partitions_{policy}"
    table = "CREATE TABLE t (id int, p int, a int, u int, v text, PRIMARY KEY (id, p, a))"
    shared = "INSERT INTO t VALUES (1, 1, 5, 6, 'other leaf'), (7, 1, 5, 17, 'moves')"
    kinds = ("insert_exists", "insert_exists", "multiple_unique_conflicts", "update_exists")
    local = [(2, 2, 5, 6, "local"), (4, 3, 5, 6, "local"), (6, 2, 5, 7, "local"), (8, 3, 5, 8, "local")]
    remote = [(3, 2, 5, 6, "remote"), (5, 3, 5, 6, "remote"), (6, 2, 5, 7, "remote"), (7, 3, 5, 8, "moves")]
    indexes = (["uniq"], ["leaf_a_u_idx"], ["two_pkey", "uniq"], ["leaf_a_u_idx"])
    is_applied = outcome == "applied_remote"
    return ConflictCase(
        name=name, tables=f"{table}; {shared}",
        target_tables=f"{table} PARTITION BY LIST (p); CREATE SCHEMA {name}_1; CREATE SCHEMA {name}_2;"
        f"CREATE TABLE {name}_1.one PARTITION OF t FOR VALUES IN (1); CREATE UNIQUE INDEX uniq ON {name}_1.one (u);"
        f"CREATE TABLE {name}_2.two PARTITION OF t FOR VALUES IN (2); CREATE UNIQUE INDEX uniq ON {name}_2.two (u);"
        "CREATE TABLE branch PARTITION OF t FOR VALUES IN (3) PARTITION BY RANGE (a);"
        f"CREATE TABLE {name}_2.leaf PARTITION OF branch FOR VALUES FROM (0) TO (100);"
        f"CREATE UNIQUE INDEX of_branch ON branch (a, u); {shared}",
        before="".join(f"INSERT INTO t VALUES {row};" for row in local), policies=dict.fromkeys(kinds, policy),
        transactions=[
            *(f"INSERT INTO t VALUES {row}" for row in remote[:3]), "UPDATE t SET p = 3, u = 8 WHERE id = 7",
        ],
        rows=[(1, 1, 5, 6, "other leaf"), *remote] if is_applied
        else sorted([(1, 1, 5, 6, "other leaf"), *local, (7, 1, 5, 17, "moves")]),
        found=[f"{kind} {'update' if kind == 'update_exists' else 'insert'} {outcome}" for kind in kinds],
        kept=[
            (names, {column: str(value) for column, value in zip(("id", "p", "a", "u", "v"), row, strict=True)})
            for names, row in zip(indexes, local, strict=True)
        ],
    )  # fmt: skip


def _origins() -> list[ConflictCase]:
    """Rows that a session of the target wrote last; of two updates only the first meets another's row."""
    tables: dict[str, Any] = {
        "tables": "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'), (2, 'a')",
    }
    changes = ["UPDATE t SET v = 'b' WHERE id = 1", "UPDATE t SET v = 'c' WHERE id = 1", "DELETE FROM t WHERE id = 2"]
    own = [
        "INSERT INTO t VALUES (5, 'ours')",
        "UPDATE t SET v = 'still ours' WHERE id = 5",
        "DELETE FROM t WHERE id = 5",
    ]
    kinds = ("update_origin_differs", "delete_origin_differs")
    return [
        ConflictCase(
            name=f"origin_differs_{policy}", **tables, policies=dict.fromkeys(kinds, policy),
            transactions=[*changes, *own],
            rows=[(1, "c")] if outcome == "applied_remote" else [(1, "a"), (2, "a")],
            found=[f"update_origin_differs update {outcome}"] * (1 if outcome == "applied_remote" else 2)
            + [f"delete_origin_differs delete {outcome}"],
        )
        for policy, outcome in (*_DROPPED, ("apply_remote", "applied_remote"))
    ] + [
        ConflictCase(
            name="origin_differs_deletes_only", **tables, policies={"delete_origin_differs": "apply_remote"},
            transactions=[*changes[:1], "DELETE FROM t WHERE id = 1; DELETE FROM t WHERE id = 2"], rows=[],
            found=["delete_origin_differs delete applied_remote"],
        ),
        ConflictCase(
            name="origin_differs_and_exists", tables=tables["tables"],
            target_tables=f"{tables['tables']}; CREATE UNIQUE INDEX ON t (v) WHERE v <> 'a'",
            before="INSERT INTO t VALUES (9, 'b')",
            policies={"update_origin_differs": "apply_remote", "update_exists": "apply_remote"},
            transactions=changes[:1], rows=[(1, "b"), (2, "a")],
            found=["update_exists update applied_remote", "update_origin_differs update applied_remote"],
        ),
        # A table with a rule is asked in another way whose row it is.
        ConflictCase(
            name="origin_differs_ruled", tables=tables["tables"],
            target_tables=f"{tables['tables']}; CREATE RULE also AS ON UPDATE TO t DO ALSO NOTIFY ruled;"
            "ALTER TABLE t ENABLE ALWAYS RULE also",
            policies=dict.fromkeys(kinds, "keep_local"), transactions=changes, rows=[(1, "a"), (2, "a")],
            found=["update_origin_differs update kept_local"] * 2 + ["delete_origin_differs delete kept_local"],
        ),
        # The first row is a local client's, the second the publisher's, and nothing else distinguishes them.
        ConflictCase(
            name="origin_differs_twins", tables="CREATE TABLE t (v text); ALTER TABLE t REPLICA IDENTITY FULL",
            before="INSERT INTO t VALUES ('a')", policies=dict.fromkeys(kinds, "keep_local"),
            transactions=["INSERT INTO t VALUES ('a')", "UPDATE t SET v = 'b'", "DELETE FROM t"],
            rows=[("a",)], found=[],
        ),
        # Whose row it is comes first, as in PostgreSQL 18: what is left out meets no row in its way.
        ConflictCase(
            name="origin_differs_before_exists", tables=tables["tables"],
            target_tables=f"{tables['tables']}; CREATE UNIQUE INDEX ON t (v) WHERE v <> 'a'",
            before="INSERT INTO t VALUES (9, 'b')", policies={"update_origin_differs": "keep_local"},
            transactions=changes[:1], rows=[(1, "a"), (2, "a"), (9, "b")],
            found=["update_origin_differs update kept_local"],
        ),
        ConflictCase(
            name="origin_differs_undone_by_exists", tables=tables["tables"],
            target_tables=f"{tables['tables']}; CREATE UNIQUE INDEX ON t (v) WHERE v <> 'a'",
            before="INSERT INTO t VALUES (9, 'b')",
            policies={"update_origin_differs": "apply_remote", "update_exists": "keep_local"},
            transactions=changes[:1], rows=[(1, "a"), (2, "a"), (9, "b")],
            found=["update_exists update kept_local", "update_origin_differs update kept_local"],
        ),
    ]  # fmt: skip


def _long() -> list[ConflictCase]:
    """One transaction with conflicts at the edges of what is executed in one go, and good changes between."""
    numbers = (1, 64, 65, 128, 200)
    return [
        ConflictCase(
            name="many_in_one", tables="CREATE TABLE t (id int PRIMARY KEY, v text)",
            before="".join(f"INSERT INTO t VALUES ({number}, 'local');" for number in numbers),
            policies={"insert_exists": "keep_local"},
            transactions=["INSERT INTO t SELECT n, 'remote' FROM generate_series(1, 200) AS n"],
            query="SELECT v, count(*) FROM t GROUP BY v ORDER BY v", rows=[("local", 5), ("remote", 195)],
            found=["insert_exists insert kept_local"] * 5,
        ),
        # The server reports the key that is taken before the row that was not found is noticed.
        ConflictCase(
            name="missing_then_exists",
            tables="CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a')",
            before="DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (2, 'local')",
            policies={"update_missing": "skip", "insert_exists": "keep_local"},
            transactions=[
                "UPDATE t SET v = 'b' WHERE id = 1; INSERT INTO t VALUES (2, 'remote'), (3, 'remote')",
            ],
            rows=[(2, "local"), (3, "remote")],
            found=["update_missing update skipped", "insert_exists insert kept_local"],
        ),
    ]  # fmt: skip


CASES = (
    *_insert_exists(),
    *_multiple(),
    *_update_exists(),
    *_missing(),
    *_indexes(),
    *(_partitions(policy, outcome) for policy, outcome in (*_DROPPED, ("apply_remote", "applied_remote"))),
    *_origins(),
    *_long(),
)


def _last_update_wins() -> list[ConflictCase]:
    """The target's row is older, or newer, than the transaction."""
    plain: dict[str, Any] = {"tables": _TABLE, "target_tables": _TARGET}
    shared: dict[str, Any] = {"tables": f"{_TABLE}; {_SHARED}", "target_tables": f"{_TARGET}; {_SHARED}"}
    return [
        _partitions("last_update_wins", "applied_remote"),
        ConflictCase(
            name="insert_exists_older", **plain, policies={"insert_exists": "last_update_wins"}, before=_LOCAL,
            transactions=[_INSERT], rows=[(7, 71, "remote", "mine")], found=["insert_exists insert applied_remote"],
        ),
        ConflictCase(
            name="insert_exists_newer", **plain, policies={"insert_exists": "last_update_wins"}, after=_LOCAL,
            transactions=[_INSERT], rows=[(7, 70, "local", "mine")], found=["insert_exists insert kept_local"],
        ),
        ConflictCase(
            name="update_exists_older", **shared, policies={"update_exists": "last_update_wins"}, before=_LOCAL,
            transactions=[_UPDATE], rows=[(3, 70, "remote", "new")], found=["update_exists update applied_remote"],
        ),
        ConflictCase(
            name="update_exists_newer", **shared, policies={"update_exists": "last_update_wins"}, after=_LOCAL,
            transactions=[_UPDATE], rows=[(3, 30, "a", "new"), (7, 70, "local", "mine")],
            found=["update_exists update kept_local"],
        ),
        # The newest of the rows in the way counts.
        ConflictCase(
            name="multiple_newer", **plain, policies={"multiple_unique_conflicts": "last_update_wins"},
            before="INSERT INTO t VALUES (7, 70, 'local', 'mine')",
            after="INSERT INTO t VALUES (8, 71, 'other', 'too')",
            transactions=[_INSERT], rows=[(7, 70, "local", "mine"), (8, 71, "other", "too")],
            found=["multiple_unique_conflicts insert kept_local"],
        ),
        ConflictCase(
            name="multiple_older", **plain, policies={"multiple_unique_conflicts": "last_update_wins"}, before=_TWO,
            transactions=[_INSERT], rows=[(7, 71, "remote", "mine")],
            found=["multiple_unique_conflicts insert applied_remote"],
        ),
        ConflictCase(
            name="update_origin_older", **shared, policies={"update_origin_differs": "last_update_wins"},
            transactions=["UPDATE t SET v = 'remote' WHERE id = 3"], rows=[(3, 30, "remote", "new")],
            found=["update_origin_differs update applied_remote"],
        ),
        ConflictCase(
            name="update_origin_newer", **shared, policies={"update_origin_differs": "last_update_wins"},
            transactions=["UPDATE t SET v = 'remote' WHERE id = 3"], after="UPDATE t SET v = 'local' WHERE id = 3",
            rows=[(3, 30, "local", "new")], found=["update_origin_differs update kept_local"],
        ),
        ConflictCase(
            name="delete_origin_older", **shared, policies={"delete_origin_differs": "last_update_wins"},
            transactions=["DELETE FROM t WHERE id = 3"], rows=[],
            found=["delete_origin_differs delete applied_remote"],
        ),
        ConflictCase(
            name="delete_origin_newer", **shared, policies={"delete_origin_differs": "last_update_wins"},
            transactions=["DELETE FROM t WHERE id = 3"], after="UPDATE t SET v = 'local' WHERE id = 3",
            rows=[(3, 30, "local", "new")], found=["delete_origin_differs delete kept_local"],
        ),
    ]  # fmt: skip


LAST_UPDATE_CASES = tuple(_last_update_wins())
