"""Statements on a real server: what is written, what is found, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from parapply.errors import TargetRefused
from parapply.target.catalogue.match import match
from parapply.target.sql.statements import Statements, counted, truncate
from tests.integration.table_cases import CASELESS_TYPE, Refused, Worker, relation_of, worker_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.databases import Database

pytestmark = pytest.mark.each_session


@pytest.fixture
def worker(target_db: Database) -> Iterator[Worker]:
    """A worker's session on an empty database."""
    with worker_on(target_db) as session:
        yield session


def test_names_are_only_names(worker: Worker) -> None:
    """Quotes, dots, percent signs and braces in names mean nothing to any form (trap T-60)."""
    worker.run_text('CREATE SCHEMA "S.p 1"')
    worker.run_text(
        'CREATE TABLE "S.p 1"."t%s""x"("a%b" int PRIMARY KEY, "{c}" text, "d\'e" int, "$1" int, "x y;--" int)'
    )
    statements = worker.statements('t%s"x', "S.p 1")
    everything = (0, 1, 2, 3, 4)
    assert worker.run(statements.set_insert(everything), ["1", "a", "2", "3", "4"], ["2", "b", "2", "3", "4"]) == 2
    assert worker.run(statements.few_insert(1), ["3", "c", None, "3", "4"]) == 1
    assert worker.run(statements.row_delete(), ["3"]) == 1
    assert worker.run(statements.row_insert(everything), ["3", "c", None, "3", "4"]) == 1
    assert worker.run(statements.set_update(everything), ["1", "A", "5", "6", "7"]) == 1
    assert worker.run(statements.row_update(everything), ["2", "B", "5", "6", "7", "2"]) == 1
    assert worker.run(statements.row_exists(), ["3"]) == 1
    assert worker.run(statements.row_delete(), ["3"]) == 1
    rows = worker.rows('SELECT * FROM "S.p 1"."t%s""x" ORDER BY 1')
    assert rows == [("1", "A", "5", "6", "7"), ("2", "B", "5", "6", "7")]
    assert worker.run(statements.set_delete(), ["1"], ["9"]) == 1
    worker.control(truncate([statements.plan.facts], restart_identity=True).text.decode())
    assert worker.rows('SELECT * FROM "S.p 1"."t%s""x"') == []


def test_unchanged_columns_keep_their_value(worker: Worker) -> None:
    """An update without a column leaves it alone; NULL sets it (trap T-41)."""
    worker.run_text("CREATE TABLE t(id int PRIMARY KEY, big text, n int)")
    statements = worker.statements("t")
    worker.run(statements.set_insert((0, 1, 2)), ["1", "x", "0"], ["2", "y", "0"], ["3", "z", "0"])
    assert worker.run(statements.set_update((0, 2)), ["1", "7"], ["2", "8"]) == 2
    assert worker.run(statements.row_update((0, 2)), ["3", "9", "3"]) == 1
    assert worker.run(statements.set_update((0, 1, 2)), ["2", None, "8"]) == 1
    assert worker.rows("SELECT * FROM t ORDER BY 1") == [("1", "x", "7"), ("2", None, "8"), ("3", "z", "9")]


def test_row_count_tells_missing_rows(worker: Worker) -> None:
    """Every form counts the rows found, so a missing row is seen (trap T-43)."""
    worker.run_text("CREATE TABLE t(id int PRIMARY KEY, v int)")
    statements = worker.statements("t")
    worker.run(statements.set_insert((0, 1)), ["1", "1"], ["2", "2"])
    assert worker.run(statements.set_update((0, 1)), ["1", "10"], ["7", "10"]) == 1
    assert worker.run(statements.row_update((0, 1)), ["7", "10", "7"]) == 0
    assert worker.run(statements.row_exists(), ["7"]) == 0
    assert worker.run(statements.row_delete(), ["7"]) == 0
    assert worker.run(statements.set_delete(), ["1"], ["7"]) == 1


def test_table_of_keys_only_counts_updates(worker: Worker) -> None:
    """Where nothing changes but the key column, an update still counts the rows it found."""
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY); CREATE TABLE i(id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)"
    )
    for name in ("t", "i"):
        statements = worker.statements(name)
        worker.run(statements.set_insert((0,)), ["1"], ["2"])
        assert worker.run(statements.set_update((0,)), ["1"], ["2"], ["3"]) == 2
    assert worker.run(worker.statements("t").row_update((0,), is_key_moved=True), ["5", "1"]) == 1
    assert worker.run(worker.statements("i").row_update((0,)), ["2"]) == 1
    assert worker.rows("SELECT id FROM t ORDER BY 1") == [("2",), ("5",)]


def test_always_identity(worker: Worker) -> None:
    """Identity columns take the publisher's value on insert and are left out of SET; a move is refused (trap T-50)."""
    worker.run_text("CREATE TABLE t(id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int)")
    statements = worker.statements("t")
    worker.run(statements.set_insert((0, 1)), ["100", "1"])
    worker.run(statements.row_insert((0, 1)), ["200", "1"])
    assert worker.run(statements.set_update((0, 1)), ["100", "2"]) == 1
    assert worker.run(statements.row_update((0, 1)), ["2", "200"]) == 1
    assert worker.rows("SELECT * FROM t ORDER BY 1") == [("100", "2"), ("200", "2")]
    with pytest.raises(TargetRefused, match='GENERATED ALWAYS AS IDENTITY and SQL cannot change its value: "id"'):
        statements.row_update((0, 1), is_key_moved=True)


def test_changed_always_identity_is_not_lost_in_silence(worker: Worker) -> None:
    """An update that would change an identity column outside the key finds no row, though the row exists."""
    worker.run_text("CREATE TABLE t(k int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, v int)")
    statements = worker.statements("t")
    worker.run(statements.set_insert((0, 1, 2)), ["1", "10", "0"], ["2", "20", "0"])
    assert worker.run(statements.set_update((0, 1, 2)), ["1", "10", "5"], ["2", "99", "5"]) == 1
    changed = statements.row_update((0, 1, 2))
    by_position = {0: "2", 1: "99", 2: "5"}
    values = [by_position[position] for position in changed.positions]
    assert worker.run(changed, [*values, "2"]) == 0
    assert worker.run(statements.row_exists(), ["2"]) == 1


def test_generated_and_dropped_columns_are_not_written(worker: Worker) -> None:
    """Columns that the target computes and columns that are gone take no part, also where rows are found whole."""
    worker.run_text("CREATE TABLE t(gone int, a int, twice int GENERATED ALWAYS AS (a * 2) STORED, b text)")
    worker.run_text("ALTER TABLE t DROP gone; ALTER TABLE t ADD extra int DEFAULT 7")
    statements = worker.statements("t", identity="f")
    assert [column.name for column in statements.plan.columns] == ["a", "b", "extra"]
    worker.run(statements.row_insert((0, 1)), ["1", "x"])
    assert worker.run(statements.row_update((0, 1, 2)), ["2", "y", "7", "1", "x", "7"]) == 1
    assert worker.rows("SELECT a, twice, b, extra FROM t") == [("2", "4", "y", "7")]
    assert worker.run(statements.row_delete(), ["2", "y", "7"]) == 1


def test_no_columns(worker: Worker) -> None:
    """A table without columns takes rows, and loses one at a time (trap T-67)."""
    worker.run_text("CREATE TABLE t()")
    statements = worker.statements("t", identity="f")
    for _ in range(3):
        worker.run(statements.row_insert(()))
    assert worker.run(statements.row_update(())) == 1
    assert worker.run(statements.row_delete()) == 1
    assert worker.rows("SELECT count(*) FROM t") == [("2",)]


def test_inheritance_children_are_left_alone(worker: Worker) -> None:
    """Children of a plain table are other published tables: no form touches their rows."""
    worker.run_text("CREATE TABLE t(id int PRIMARY KEY, v int); CREATE TABLE child() INHERITS (t)")
    worker.run_text("CREATE TABLE f(a int); CREATE TABLE fchild() INHERITS (f)")
    worker.run_text(
        "INSERT INTO t VALUES (1, 1); INSERT INTO child VALUES (1, 1), (2, 2); INSERT INTO fchild VALUES (1)"
    )
    statements, full = worker.statements("t"), worker.statements("f", identity="f")
    assert worker.run(statements.set_update((0, 1)), ["1", "5"], ["2", "5"]) == 1
    assert worker.run(statements.row_update((0, 1)), ["2", "5", "2"]) == 0
    assert worker.run(statements.set_delete(), ["1"], ["2"]) == 1
    assert worker.run(statements.row_exists(), ["1"]) == 0
    assert worker.run(full.row_delete(), ["1"]) == 0
    worker.control(truncate([statements.plan.facts, full.plan.facts], restart_identity=False).text.decode())
    assert worker.rows("SELECT * FROM child ORDER BY 1") == [("1", "1"), ("2", "2")]
    assert worker.rows("SELECT * FROM fchild") == [("1",)]


def test_partitioned_table_is_written_as_a_whole(worker: Worker) -> None:
    """Rows are found in every partition and move between them; twins in two files at one ctid are distinguished."""
    worker.run_text(
        "CREATE TABLE t(id int, v int, PRIMARY KEY (id)) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20);"
        "CREATE TABLE f(a int) PARTITION BY LIST (a);"
        "CREATE TABLE f1 PARTITION OF f FOR VALUES IN (1); CREATE TABLE f2 PARTITION OF f FOR VALUES IN (2)"
    )
    statements = worker.statements("t")
    worker.run(statements.set_insert((0, 1)), ["1", "1"], ["11", "1"])
    worker.run(statements.row_insert((0, 1)), ["12", "1"])
    assert worker.run(statements.set_update((0, 1)), ["1", "2"], ["11", "2"]) == 2
    assert worker.run(statements.row_update((0, 1), is_key_moved=True), ["13", "3", "1"]) == 1
    assert worker.run(statements.set_delete(), ["11"]) == 1
    assert worker.run(statements.row_delete(), ["12"]) == 1
    assert worker.rows("SELECT tableoid::regclass, id, v FROM t") == [("t2", "13", "3")]
    full = worker.statements("f", identity="f")
    worker.run(full.row_insert((0,)), ["1"])
    worker.run(full.row_insert((0,)), ["2"])
    assert worker.run(full.row_update((0,)), ["1", "2"]) == 1
    assert worker.rows("SELECT tableoid::regclass, a FROM f") == [("f1", "1"), ("f1", "1")]
    assert worker.run(full.row_delete(), ["1"]) == 1
    worker.control(truncate([statements.plan.facts, full.plan.facts], restart_identity=False).text.decode())
    assert worker.rows("SELECT id FROM t UNION ALL SELECT a FROM f") == []


def test_whole_row_takes_one_of_twins(worker: Worker) -> None:
    """One change, one row; NULL finds NULL, and a composite of NULLs is not NULL (trap T-24)."""
    worker.run_text("CREATE TYPE pair AS (x int, y int); CREATE TABLE t(a int, b text, c public.pair)")
    statements = worker.statements("t", identity="f")
    twins = ["1", "x", "(1,2)"], ["1", "x", "(1,2)"], ["1", None, "(,)"], ["1", None, None]
    for twin in twins:
        worker.run(statements.row_insert((0, 1, 2)), twin)
    assert worker.run(statements.row_delete(), ["1", "x", "(1,2)"]) == 1
    assert worker.run(statements.row_update((0, 1, 2)), ["2", "x", "(1,2)", "1", "x", "(1,2)"]) == 1
    assert worker.run(statements.row_delete(), ["1", "x", "(1,2)"]) == 0
    assert worker.run(statements.row_delete(), ["1", None, None]) == 1
    assert worker.run(statements.row_exists(), ["1", None, "(,)"]) == 1
    assert worker.rows("SELECT * FROM t ORDER BY 1") == [("1", None, "(,)"), ("2", "x", "(1,2)")]


_WHOLE = {
    "plain": "CREATE TABLE t(a int, b numeric, c text, own serial)",
    "partitioned": "CREATE TABLE t(a int, b numeric, c text, own serial) PARTITION BY LIST (c);"
    "CREATE TABLE t_x PARTITION OF t FOR VALUES IN ('x'); CREATE TABLE t_rest PARTITION OF t DEFAULT",
}
_WHOLE_ROWS = (
    "INSERT INTO t (a, b, c) SELECT n, 1.0, 'x' FROM generate_series(1, 300) AS n;"
    "INSERT INTO t (a, b, c) VALUES (1, 1.00, 'x'), (7, 2, NULL), (7, 2, NULL), (7, 2, NULL), (8, NULL, 'x'),"
    " (8, NULL, 'x'), (9, 9, 'y'); ANALYZE t"
)


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize(
    ("kind", "index"),
    [
        *[(kind, index) for kind in _WHOLE for index in ("", "CREATE INDEX ON t (a)")],
        ("plain", "CREATE INDEX ON t USING hash (a)"),
    ],
)
def test_sets_of_whole_rows_take_as_many_twins_as_are_meant(worker: Worker, kind: str, index: str) -> None:
    """One statement changes many rows: of twins the ones of its range, of equal ones the one that looks alike (T-24).

    With an index it is used; without one the table is read once, and not once for each row.
    """
    worker.run_text(f"{_WHOLE[kind]};{index};{_WHOLE_ROWS}")
    sent = relation_of(worker.facts("t"), identity="f")
    statements = Statements(match(replace(sent, columns=sent.columns[:3]), worker.facts("t")))
    update, delete = statements.whole_update((0, 1, 2), ()), statements.whole_delete((2,))
    for statement in (update, delete):
        plan = worker.plan_of(statement)
        assert ("Hash Full Join" in plan) is not bool(index), plan
        assert ("_a_idx" in plan) is bool(index), plan
        assert plan.count("Seq Scan") == (0 if index else 1 if kind == "plain" else 2), plan

    news = [["1", "1.00", "z"], ["2", "5", "x"], ["9", "10", "y"]]
    olds = [["1", "1.00", "x"], ["2", "1.0", "x"], ["9", "9", "y"]]
    both = [[*new, *old] for new, old in zip(news, olds, strict=True)]
    assert worker.run(update, *both, ranges=[(0, 1)] * 3) == 3
    assert worker.rows("SELECT a, b, c, own FROM t WHERE a < 3 OR a = 9 ORDER BY a, own") == [
        ("1", "1.0", "x", "1"),
        ("1", "1.00", "z", "301"),
        ("2", "5", "x", "2"),
        ("9", "1.0", "x", "9"),
        ("9", "10", "y", "307"),
    ]
    # Of three twins the first two go; there is no fourth one; what is not there is not found.
    assert worker.run(delete, ["7", "2"], ["6", "2"], ranges=[(0, 2), (0, 1)]) == 2
    assert worker.run(delete, ["7", "2"], ranges=[(1, 2)]) == 0
    assert worker.rows("SELECT own FROM t WHERE a = 7 AND c IS NULL") == [("304",)]
    apart = statements.whole_update((0,), (1,))
    assert worker.run(apart, ["80", "8", "x"], ["81", "8", "x"], ranges=[(0, 1), (1, 2)]) == 2
    assert worker.rows("SELECT a FROM t WHERE b IS NULL ORDER BY a") == [("80",), ("81",)]
    for statement, row in ((counted(delete), ["7", "2"]), (counted(update), ["1", "1", "q", "1", "1.00", "z"])):
        worker.run(statement, row, count=1, ranges=[(0, 1)])
        with pytest.raises(Refused):
            worker.run(statement, row, count=1, ranges=[(0, 1)])


@pytest.mark.pg_majors(15, 18)
def test_a_row_that_is_locked_is_taken_last(worker: Worker, target_db: Database) -> None:
    """Of twins a set takes those that no session holds, so that it waits only where it must."""
    worker.run_text("CREATE TABLE t(a int, own serial); CREATE INDEX ON t (a); INSERT INTO t (a) VALUES (1), (1), (1)")
    sent = relation_of(worker.facts("t"), identity="f")
    statements = Statements(match(replace(sent, columns=sent.columns[:1]), worker.facts("t")))
    with target_db.connect() as other, other.transaction():
        other.execute("SELECT FROM public.t WHERE own < 3 FOR UPDATE")
        assert worker.run(statements.whole_delete(()), ["1"], ranges=[(0, 1)]) == 1
    assert worker.rows("SELECT own FROM t ORDER BY own") == [("1",), ("2",)]


def test_whole_row_without_equality_is_refused(worker: Worker) -> None:
    """A column that cannot be compared is named with its type, as by the built-in subscription; inserts go on."""
    worker.run_text("CREATE TABLE t(a int, j json, p point[])")
    statements = worker.statements("t", identity="f")
    worker.run(statements.row_insert((0, 1, 2)), ["1", '{"b": 1}', "{}"])
    with pytest.raises(TargetRefused, match=r'"j" \(json\), "p" \(point\[\]\)'):
        statements.row_delete()


def test_operators_outside_the_catalogue(worker: Worker) -> None:
    """A type's own equality is used for keys and whole rows, although search_path does not show it."""
    worker.run_text(CASELESS_TYPE)
    worker.run_text("CREATE TABLE t(k ext.ci PRIMARY KEY, v int); CREATE TABLE f(k ext.ci)")
    statements, full = worker.statements("t"), worker.statements("f", identity="f")
    worker.run(statements.row_insert((0, 1)), ["Bob", "1"])
    assert worker.run(statements.set_update((0, 1)), ["BOB", "2"]) == 1
    assert worker.run(statements.row_update((0, 1)), ["boB", "3", "bob"]) == 1
    assert worker.rows("SELECT * FROM t") == [("boB", "3")]
    assert worker.run(statements.set_delete(), ["bOb"]) == 1
    worker.run(full.row_insert((0,)), ["Bob"])
    assert worker.run(full.row_delete(), ["BOB"]) == 1


@pytest.mark.pg_majors(15)  # the embedded servers are built without ICU, and no other collation can be nondeterministic
def test_index_collation_decides(worker: Worker) -> None:
    """Rows are found as the identity index compares, not as the column does."""
    worker.run_text(
        "CREATE COLLATION public.ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
        "CREATE TABLE t(k text NOT NULL, v int); CREATE UNIQUE INDEX i ON t(k COLLATE public.ci);"
        "ALTER TABLE t REPLICA IDENTITY USING INDEX i"
    )
    statements = worker.statements("t")
    worker.run(statements.row_insert((0, 1)), ["Bob", "1"])
    assert worker.run(statements.row_delete(), ["BOB"]) == 1


def test_key_moves_and_deferrable_keys(worker: Worker) -> None:
    """A moved key is set row by row; two rows may swap under a deferrable key, found by the whole row (trap T-49)."""
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY, v int);"
        "CREATE TABLE d(id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v int)"
    )
    statements = worker.statements("t")
    worker.run(statements.row_insert((0, 1)), ["1", "1"])
    assert worker.run(statements.row_update((0, 1), is_key_moved=True), ["2", "1", "1"]) == 1
    swap = worker.statements("d", identity="f")
    worker.run(swap.row_insert((0, 1)), ["1", "10"])
    worker.run(swap.row_insert((0, 1)), ["2", "20"])
    worker.control("BEGIN")
    assert worker.run(swap.row_update((0, 1)), ["2", "10", "1", "10"]) == 1
    assert worker.run(swap.row_update((0, 1)), ["1", "20", "2", "20"]) == 1
    worker.control("COMMIT")
    assert worker.rows("SELECT * FROM d ORDER BY 1") == [("1", "20"), ("2", "10")]
    # Why nothing here relies on a deferrable key: this role does not even check it.
    worker.run(swap.row_insert((0, 1)), ["1", "30"])
    assert worker.rows("SELECT count(*) FROM d WHERE id = 1") == [("2",)]


def test_truncate_is_one_statement_without_cascade(worker: Worker) -> None:
    """Tables that refer to each other are emptied together; a table that only the target has is not (trap T-26)."""
    worker.run_text(
        "CREATE TABLE a(id serial PRIMARY KEY); CREATE TABLE b(a int REFERENCES a);"
        "INSERT INTO a DEFAULT VALUES; INSERT INTO b VALUES (1)"
    )
    a, b = worker.facts("a"), worker.facts("b")
    with pytest.raises(Refused) as caught:
        worker.control(truncate([a], restart_identity=False).text.decode())
    assert caught.value.sqlstate == "0A000"
    worker.control(truncate([a, b, a], restart_identity=True).text.decode())
    assert worker.rows("SELECT nextval('public.a_id_seq')") == [("1",)]
    assert worker.rows("SELECT a FROM b") == []


def test_rows_of_a_refused_plan(worker: Worker) -> None:
    """Where the publisher sends no usable identity, inserts work and the rest says why, as PostgreSQL does."""
    worker.run_text("CREATE TABLE t(a int)")
    statements: Statements = worker.statements("t")
    assert worker.run(statements.set_insert((0,)), ["1"], ["1"]) == 2
    for form in (statements.set_delete, statements.row_delete, statements.row_exists):
        with pytest.raises(TargetRefused, match="neither a replica identity index nor a primary key"):
            form()


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("kind", ["plain", "partitioned"])
def test_a_counted_set_fails_when_it_finds_another_number(worker: Worker, kind: str) -> None:
    """Every set form can check its own count on the server: it fails, and nothing behind it in a pipeline runs."""
    partitioned = kind == "partitioned"
    worker.run_text(
        f"CREATE TABLE t(id int PRIMARY KEY, v int){' PARTITION BY RANGE (id)' if partitioned else ''};"
        + ("CREATE TABLE t1 PARTITION OF t DEFAULT;" if partitioned else "")
    )
    statements = worker.statements("t")
    insert, update, delete = statements.set_insert((0, 1)), statements.set_update((0, 1)), statements.set_delete()
    worker.run(counted(insert), ["1", "1"], ["2", None], count=2)
    worker.run(counted(update), ["1", "10"], ["2", "20"], count=2)
    worker.run(counted(update), ["7", "70"], count=0)
    assert worker.rows("SELECT id, v FROM t ORDER BY id") == [("1", "10"), ("2", "20")]
    for statement, row, count in (
        (insert, ["3", "3"], 2),
        (update, ["3", "3"], 1),
        (delete, ["3"], 1),
        (delete, ["1"], 0),
    ):
        with pytest.raises(Refused) as refused:
            worker.run(counted(statement), row, count=count)
        assert refused.value.sqlstate == "22012"
    assert worker.rows("SELECT id, v FROM t ORDER BY id") == [("1", "10"), ("2", "20")]
    worker.run(counted(delete), ["1"], ["2"], count=2)
    assert worker.rows("SELECT id FROM t") == []


def test_a_set_in_which_nothing_can_be_set_is_counted_too(worker: Worker) -> None:
    """An update of nothing but ALWAYS identity columns is a SELECT; its rows count."""
    worker.run_text("CREATE TABLE t(id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY); INSERT INTO t DEFAULT VALUES")
    update = worker.statements("t").set_update((0,))
    worker.run(counted(update), ["1"], count=1)
    with pytest.raises(Refused):
        worker.run(counted(update), ["2"], count=1)
