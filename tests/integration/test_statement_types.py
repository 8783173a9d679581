"""Every built-in type through set and row forms: the same text comes out, and what the input refuses is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.conflict.changes import RowChange
from parapply.conflict.kinds import LocalRow
from parapply.conflict.settle import remote_wins
from parapply.errors import StatementFailed
from parapply.plan.table import Equality, Lane
from parapply.runtime.apply.failure import FailureClass, classify
from parapply.vocabulary import ConflictType
from parapply.wire.rows import BINARY_TYPES
from tests.integration.table_cases import CASELESS_TYPE, Refused, Worker, worker_on
from tests.integration.type_cases import JUDGED_BY_INPUT, KEYS, ROUND_TRIPS, TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.databases import Database


@pytest.fixture
def worker(target_db: Database) -> Iterator[Worker]:
    """A worker's session on a database with types of every kind."""
    with worker_on(target_db) as session:
        session.run_text(TYPES)
        yield session


@pytest.mark.pg_majors(15, 18)
def test_text_in_is_text_out(worker: Worker) -> None:
    """Every value of every type comes out as it went in, through all five writing forms, and so does NULL."""
    # One table: a publisher's row has them all.
    names = [f"c{number}" for number in range(len(ROUND_TRIPS))]
    columns = ", ".join(f"{name} {type_}" for name, type_ in zip(names, ROUND_TRIPS, strict=True))
    worker.run_text(f"CREATE TABLE t(id int PRIMARY KEY, {columns})")
    statements = worker.statements("t")
    everything = tuple(range(len(names) + 1))
    depth = max(len(texts) for texts in ROUND_TRIPS.values())
    rows: list[list[str | None]] = [[texts[row % len(texts)] for texts in ROUND_TRIPS.values()] for row in range(depth)]
    rows.append([None] * len(names))
    keyed: list[list[str | None]] = [[str(key), *row] for key, row in enumerate(rows)]
    expected: list[tuple[str | None, ...]] = [tuple(row) for row in keyed]
    query = f"SELECT id, {', '.join(names)} FROM t ORDER BY id"
    worker.run(statements.set_insert(everything), *keyed)
    _same(worker.rows(query), expected)
    worker.run_text("TRUNCATE t")
    for row in keyed:
        worker.run(statements.row_insert(everything), row)
    _same(worker.rows(query), expected)
    worker.run_text("TRUNCATE t")
    worker.run(statements.few_insert(len(keyed)), [value for row in keyed for value in row])
    _same(worker.rows(query), expected)
    blank = f"UPDATE t SET {', '.join(f'{name} = NULL' for name in names)}"
    worker.run_text(blank)
    assert worker.run(statements.set_update(everything), *keyed) == len(rows)
    _same(worker.rows(query), expected)
    worker.run_text(blank)
    for row in keyed:
        assert worker.run(statements.row_update(everything), [*row, row[0]]) == 1
    _same(worker.rows(query), expected)


@pytest.mark.pg_majors(15, 18)
def test_binary_values_are_those_of_the_input(worker: Worker) -> None:
    """Arrays made of texts by the planner hold what the type's input function makes of them; they need no parsing."""
    cases = {
        "boolean": ["t", "f"],
        "smallint": ["0", "-32768", "32767"],
        "integer": ["0", "-2147483648", "2147483647"],
        "bigint": ["0", "-9223372036854775808", "9223372036854775807"],
        "double precision": ["0", "-0", "0.1", "1e+300", "5e-324", "-1.7976931348623157e+308", "123456.789"],
        "date": ["0001-01-01", "1999-12-31", "2000-01-01", "2024-02-29", "9999-12-31"],
        "timestamp": ["0001-01-01 00:00:00", "1999-12-31 23:59:59.999999", "2024-02-29 12:34:56.7"],
        "timestamptz": ["0001-01-01 00:00:00+00", "1999-12-31 23:59:59.999999+00", "2024-02-29 12:34:56.7+00"],
        "uuid": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    }
    for case, (type_, texts) in enumerate(cases.items()):
        worker.run_text(f"CREATE DOMAIN d{case} AS {type_}")
        worker.run_text(f"CREATE TABLE t{case}(id bigint PRIMARY KEY, a {type_}, b d{case})")
        rows: list[list[str | None]] = [[str(number), text, text] for number, text in enumerate(texts, 1)]
        rows.append([str(len(rows) + 1), None, None])
        statements = worker.statements(f"t{case}", binary_types=BINARY_TYPES)
        worker.run(statements.set_insert((0, 1, 2)), *rows)
        assert worker.rows(f"SELECT id, a, b FROM t{case} ORDER BY id") == [tuple(row) for row in rows]
        worker.run_text(f"UPDATE t{case} SET a = NULL, b = NULL")
        assert worker.run(statements.set_update((0, 1, 2)), *rows) == len(rows), type_
        assert worker.rows(f"SELECT id, a, b FROM t{case} ORDER BY id") == [tuple(row) for row in rows]
        assert worker.run(statements.set_delete(), [rows[0][0]]) == 1, type_


def _same(found: list[tuple[str | None, ...]], expected: list[tuple[str | None, ...]]) -> None:
    types = ["id", *ROUND_TRIPS]
    wrong = {
        (types[column], row[column], want[column])
        for row, want in zip(found, expected, strict=True)
        for column in range(len(types))
        if row[column] != want[column]
    }
    assert not wrong


@pytest.mark.pg_majors(15, 18)
def test_lengths_and_errors_are_those_of_the_input_function(worker: Worker) -> None:
    """Set and row forms store, round and refuse exactly as a literal does: nothing is cut silently (trap T-44)."""
    for number, (type_, text) in enumerate(JUDGED_BY_INPUT):
        worker.run_text(f"CREATE TABLE t{number}(id int PRIMARY KEY, v {type_})")
        statements = worker.statements(f"t{number}")
        insert, update = statements.set_insert((0, 1)), statements.set_update((0, 1))
        row_insert, row_update = statements.row_insert((0, 1)), statements.row_update((0, 1))
        literal = _outcome(
            worker, number, lambda n=number, x=text: worker.run_text(f"INSERT INTO t{n} VALUES (1, '{x}')")
        )
        as_set = _outcome(worker, number, lambda s=insert, x=text: worker.run(s, ["1", x]))
        as_row = _outcome(worker, number, lambda s=row_insert, x=text: worker.run(s, ["1", x]))
        few = statements.few_insert(2)
        as_few = _outcome(worker, number, lambda s=few, x=text: worker.run(s, ["1", x, "2", x]), n_rows=2)
        assert as_set == as_row == as_few == literal, (type_, text)
        worker.run(insert, ["1", None])
        assert _outcome(worker, number, lambda s=update, x=text: worker.run(s, ["1", x])) == literal, (type_, text)
        worker.run(insert, ["1", None])
        assert _outcome(worker, number, lambda s=row_update, x=text: worker.run(s, ["1", x, "1"])) == literal, (
            type_,
            text,
        )


def _outcome(worker: Worker, number: int, write: object, n_rows: int = 1) -> str | None:
    """Return the text stored, in each of the rows, or the SQLSTATE; the table is empty afterwards."""
    assert callable(write)
    try:
        write()
        (text, *more) = [text for (text,) in worker.rows(f"SELECT v FROM t{number}")]
        assert more == [text] * (n_rows - 1)
    except Refused as refused:
        text = refused.sqlstate
    worker.run_text(f"DELETE FROM t{number}")
    return text


@pytest.mark.pg_majors(15, 18)
def test_keys_are_found_by_their_index(worker: Worker) -> None:
    """Every form finds a row by an equal key of any type, through the key's index and never by reading the table."""
    for number, (type_, stored, same) in enumerate(KEYS):
        worker.run_text(f"CREATE TABLE t{number}(v int, k {type_}, PRIMARY KEY (k))")
        statements = worker.statements(f"t{number}")
        update, delete = statements.set_update((0, 1)), statements.set_delete()
        row_update, row_delete = statements.row_update((0, 1)), statements.row_delete()
        for statement in (update, delete, row_update, row_delete, statements.row_exists()):
            plan = worker.plan_of(statement)
            assert "Index Cond" in plan, (type_, plan)
            assert "Seq Scan" not in plan, (type_, plan)
        worker.run(statements.row_insert((0, 1)), ["0", stored])
        assert worker.run(update, ["1", same]) == 1, type_
        assert worker.run(row_update, ["2", same, same]) == 1, type_
        assert worker.run(statements.row_exists(), [same]) == 1, type_
        assert worker.run(row_delete, [same]) == 1, type_
        worker.run(statements.row_insert((0, 1)), ["0", stored])
        assert worker.run(delete, [same]) == 1, type_


def test_new_text_of_an_equal_key_is_kept(worker: Worker) -> None:
    """A set update writes key columns whose equal values print differently: 1.00 replaces 1.0."""
    worker.run_text("CREATE TABLE t(k numeric PRIMARY KEY, v int)")
    statements = worker.statements("t")
    assert statements.plan.columns[0].equality is Equality.NUMERIC
    worker.run(statements.set_insert((0, 1)), ["1.0", "1"])
    assert worker.run(statements.set_update((0, 1)), ["1.00", "2"]) == 1
    assert worker.rows("SELECT * FROM t") == [("1.00", "2")]


def test_partitions_are_found_by_their_index(worker: Worker) -> None:
    """Sets and rows reach partitions through indexes, without reading a partition."""
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY, v int) PARTITION BY HASH (id);"
        "CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    )
    statements = worker.statements("t")
    for statement in (statements.set_update((0, 1)), statements.set_delete(), statements.row_update((0, 1))):
        assert "Seq Scan" not in worker.plan_of(statement)


@pytest.mark.pg_majors(15, 18)
def test_a_value_of_the_old_type_is_not_assigned_to_the_new_one(worker: Worker) -> None:
    """Once a column's type has changed every form that was prepared before fails as stale, and writes nothing."""
    worker.run_text("CREATE DOMAIN d AS int; CREATE TYPE m AS ENUM ('a')")
    cases = [
        ("float8", "1.5", "int USING f::int"), ("bool", "t", "text"), ("d", "1", "int2"), ("int[]", "{1}", "bigint[]"),
        ("m", "a", "text"),
    ]  # fmt: skip
    for number, (type_, sent, new_type) in enumerate(cases):
        table = f"t{number}"
        worker.run_text(f"CREATE TABLE {table}(id int PRIMARY KEY, f {type_}); INSERT INTO {table} VALUES (1)")
        made = worker.statements(table)
        both = (0, 1)
        change = RowChange(plan=made.plan, operation="insert", old=None, new=[None, None])
        there = LocalRow(table=f"public.{table}", ctid="(0,1)", values={}, commit_time_us=None, origin=None)
        (by_policy,) = remote_wins(ConflictType.INSERT_EXISTS, change, [there], first_by_key=True, own=[])
        forms = [
            (by_policy.prepared, [there.ctid, "1", sent]),  # first, while the row exists
            (made.set_insert(both), ["2", sent]),
            (made.set_update(both), ["1", sent]),
            (made.row_insert(both), ["3", sent]),
            (made.row_update(both), ["1", sent, "1"]),
        ]
        for form, row in forms:
            assert worker.run(form, row) == 1, type_
        worker.run_text(f"DELETE FROM {table} WHERE id > 1; UPDATE {table} SET f = NULL")
        worker.run_text(f"ALTER TABLE {table} ALTER f TYPE {new_type}")
        for form, row in forms:
            with pytest.raises(Refused) as refused:
                worker.run(form, row)
            assert classify(StatementFailed("", sqlstate=refused.value.sqlstate)) is FailureClass.STALE, type_
        assert worker.rows(f"TABLE {table}") == [("1", None)], type_


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("identity", ["d", "f"], ids=["key", "whole row"])
def test_a_row_is_found_by_a_value_that_its_column_has_rounded(worker: Worker, identity: str) -> None:
    """Lengths, scales and precisions of the target hold for the row that is looked for, as they did for the stored one.

    A value that the column would have refused is no row's value: nothing is found, and nothing is cut.
    """
    key = "PRIMARY KEY" if identity == "d" else ""
    cases = [
        ("numeric(8,2)", "1.239", "99999999.239"), ("numeric(4,-2)", "1251", "1351"), ("varchar(3)", "a    ", "a  b"),
        ("varchar(3)", "abc ", "abcd"), ("char(3)", "a    ", "a  b"), ("bit(3)", "101", "1010"),
        ("varbit(3)", "101", "1010"), ("timestamp(0)", "2020-01-01 00:00:00.6", "2020-01-01 00:00:01.6"),
        ("timestamptz(0)", "2020-01-01 00:00:00.6+00", "2020-01-01 00:00:01.6+00"),
        ("time(1)", "00:00:00.66", "00:00:01"), ("timetz(1)", "00:00:00.66+00", "00:00:01+00"),
        ("interval(1)", "00:00:01.66", "00:00:02"),
        ("interval day to second(0)", "1 day 00:00:00.6", "1 day 00:00:00"), ("numeric(8,2)", "NaN", "1"),
        ("numeric(8,2)[]", "{1.239,NULL,NaN}", "{99999999.239,NULL,NaN}"), ("numeric(4,-2)[]", "{{1251}}", "{{1351}}"),
        ("timestamp(0)[]", "{2020-01-01 00:00:00.6}", "{2020-01-01 00:00:01.6}"),
        ("timestamptz(0)[]", "{2020-01-01 00:00:00.6+00}", "{2020-01-01 00:00:01.6+00}"),
        ("time(1)[]", "{00:00:00.66}", "{00:00:01}"), ("timetz(1)[]", "{00:00:00.66+00}", "{00:00:01+00}"),
        ("interval(1)[]", "[2:2]={00:00:01.66}", "{00:00:01.66}"), ("interval hour[]", "{02:03:04}", "{03:00:00}"),
        ("interval day to second(0)[]", "{1 day 00:00:00.6}", "{1 day 00:00:00}"),
    ]  # fmt: skip
    for number, (type_, sent, other) in enumerate(cases):
        worker.run_text(f"CREATE TABLE t{number}(k {type_} {key}, v int)")
        made = worker.statements(f"t{number}", identity=identity)
        worker.run(made.row_insert((0, 1)), [sent, "1"])
        old = [] if identity == "d" else ["1"]
        assert worker.run(made.row_exists(), [other, *old]) == 0, type_
        assert worker.run(made.row_exists(), [sent, *old]) == 1, type_
        assert worker.run(made.row_update((0, 1)), [sent, "2", sent, *old]) == 1, type_
        assert worker.run(made.row_delete(), [sent, *(["2"] if old else [])]) == 1, type_


@pytest.mark.pg_majors(15, 18)
def test_a_key_of_a_domain_over_an_enum(worker: Worker) -> None:
    """Its rows are found, in every form, and by the key's index."""
    worker.run_text("CREATE TYPE grade AS ENUM ('low', 'high'); CREATE DOMAIN d1 AS grade; CREATE DOMAIN d2 AS d1")
    for number, (key, identity) in enumerate((("PRIMARY KEY", "d"), ("", "f"))):
        worker.run_text(f"CREATE TABLE t{number}(k d2 {key}, v int)")
        made = worker.statements(f"t{number}", identity=identity)
        old = [] if key else ["1"]
        worker.run(made.row_insert((0, 1)), ["low", "1"])
        assert worker.run(made.row_update((0, 1)), ["high", "1", "low", *old]) == 1
        if key:
            assert worker.run(made.set_update((0, 1)), ["high", "2"]) == 1
            worker.control("SET enable_seqscan = off")
            assert "Index" in worker.plan_of(made.row_delete())
            assert worker.run(made.set_delete(), ["high"]) == 1
        else:
            assert worker.run(made.row_delete(), ["high", "1"]) == 1
        assert not worker.rows(f"TABLE t{number}")


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("is_partitioned", [False, True], ids=["plain", "partitioned"])
def test_of_equal_rows_the_one_that_looks_the_same_is_taken(worker: Worker, *, is_partitioned: bool) -> None:
    """Without a key rows are found by all their values: of several equal ones also by their text."""
    cases = {
        "float8": ["0", "-0"], "numeric": ["1", "1.0", "1.00"], "jsonb": ["1.0", "1.00"],
        "interval": ["1 mon", "30 days"],
    }  # fmt: skip
    for type_, texts in cases.items():
        table = f"of_{type_}"
        worker.run_text(f"CREATE TABLE {table}(k int, v {type_}){' PARTITION BY LIST (k)' if is_partitioned else ''}")
        if is_partitioned:
            worker.run_text(f"CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES IN (1)")
            worker.run_text(f"CREATE TABLE {table}_2 PARTITION OF {table} DEFAULT")
        made = worker.statements(table, identity="f")
        for text in texts:
            worker.run(made.row_insert((0, 1)), ["1", text])
        for number, text in reversed(list(enumerate(texts))):
            assert worker.run(made.row_update((0, 1)), ["2", text, "1", text]) == 1, type_
            # The change wrote all columns, so the remaining rows show which row it took.
            left = worker.rows(f"SELECT v FROM {table} WHERE k = 1")
            assert sorted(left) == sorted((other,) for other in texts[:number])
            assert worker.run(made.row_delete(), ["2", text]) == 1, type_
        # One that only is equal is taken where there is no other.
        worker.run(made.row_insert((0, 1)), ["1", texts[0]])
        assert worker.run(made.row_delete(), ["1", texts[1]]) == 1, type_


@pytest.mark.pg_majors(15)  # the embedded servers are built without libxml
def test_xml(worker: Worker) -> None:
    """Fragments of XML come out as they went in, and what is not XML is refused by every form."""
    worker.run_text("CREATE TABLE t(id int PRIMARY KEY, v xml)")
    statements = worker.statements("t")
    insert, row_insert = statements.set_insert((0, 1)), statements.row_insert((0, 1))
    worker.run(insert, ["1", "<a/><b/>"], ["2", "just text"])
    worker.run(row_insert, ["3", "<a/><b/>"])
    assert worker.rows("SELECT v FROM t ORDER BY id") == [("<a/><b/>",), ("just text",), ("<a/><b/>",)]
    for statement in (insert, row_insert):
        with pytest.raises(Refused) as caught:
            worker.run(statement, ["4", "<a>"])
        assert caught.value.sqlstate == "2200N"


def test_cast_from_text_is_not_input(worker: Worker) -> None:
    """A user's cast from text would change values in a set: such tables go row by row."""
    worker.run_text(CASELESS_TYPE)
    worker.run_text(
        "CREATE FUNCTION ext.upper_pair(text) RETURNS public.pair LANGUAGE sql IMMUTABLE"
        " AS $$ SELECT ROW(0, pg_catalog.upper($1))::public.pair $$;"
        "CREATE CAST (text AS public.pair) WITH FUNCTION ext.upper_pair(text) AS ASSIGNMENT;"
        "CREATE TABLE t(id int PRIMARY KEY, v public.pair); CREATE TABLE u(id int PRIMARY KEY, v ext.ci);"
        "CREATE TABLE r(id int PRIMARY KEY, v regclass)"
    )
    statements = worker.statements("t")
    assert statements.plan.lane is Lane.ROW
    worker.run(statements.row_insert((0, 1)), ["1", "(1,a)"])
    assert worker.rows("SELECT v FROM t") == [("(1,a)",)]
    by_number = worker.statements("r")
    assert by_number.plan.lane is Lane.ROW
    worker.run(by_number.row_insert((0, 1)), ["1", "99999999"])
    # A relabelling from text with text's own input function is no other function.
    assert worker.statements("u").plan.lane is Lane.SET
