"""Facts of columns that the catalogue query finds on real servers: types, casts and equality."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from parapply.plan.table import Equality
from tests.integration.table_cases import CASELESS_TYPE, Worker, worker_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.databases import Database

#: Key type and texts, canonical and distinct, that come near to being equal. Where the canonical form is not plain,
#: test_equality.py has the texts.
EQUALITIES: list[tuple[str, Equality, list[str]]] = [
    ("bool", Equality.BYTES, ["t", "f"]),
    ("int2", Equality.BYTES, ["0", "1"]),
    ("int4", Equality.BYTES, ["0", "-1"]),
    ("int8", Equality.BYTES, ["0", "-1"]),
    ("oid", Equality.BYTES, ["0", "4294967295"]),
    ("xid8", Equality.BYTES, ["0", "18446744073709551615"]),
    ("tid", Equality.BYTES, ["(0,1)", "(1,0)"]),
    ("text", Equality.BYTES, ["a", "a ", "A", "á", "á"]),
    ("varchar(9)", Equality.BYTES, ["a", "a ", "A"]),
    ('name COLLATE "C"', Equality.BYTES, ["a", "a ", "A"]),
    ('"char"', Equality.BYTES, ["a", "A", ""]),
    ("bytea", Equality.BYTES, ["\\x", "\\x00", "\\x0000"]),
    ("uuid", Equality.BYTES, ["00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-000000000001"]),
    ("date", Equality.BYTES, ["infinity", "2024-01-01", "2024-01-01 BC"]),
    ("time", Equality.BYTES, ["00:00:00", "24:00:00"]),
    ("timetz", Equality.BYTES, ["12:00:00+00", "13:00:00+01", "24:00:00+00", "00:00:00+00", "12:00:00-00:00:01"]),
    ("timestamp", Equality.BYTES, ["infinity", "2024-01-01 00:00:00", "2024-01-01 00:00:00.000001"]),
    ("timestamptz", Equality.BYTES, ["-infinity", "2024-01-01 00:00:00+00", "2024-01-01 01:00:00+00"]),
    ("inet", Equality.BYTES, ["10.0.0.1", "10.0.0.1/8", "10.0.0.0/8", "::ffff:10.0.0.1"]),
    ("cidr", Equality.BYTES, ["10.0.0.0/8", "10.0.0.0/9", "10.0.0.0/32"]),
    ("macaddr", Equality.BYTES, ["08:00:2b:01:02:03", "08:00:2b:01:02:04"]),
    ("macaddr8", Equality.BYTES, ["08:00:2b:ff:fe:01:02:03", "08:00:2b:ff:fe:01:02:04"]),
    ("bit(3)", Equality.BYTES, ["010", "100"]),
    ("varbit", Equality.BYTES, ["", "0", "00", "01", "010"]),
    ("pg_lsn", Equality.BYTES, ["0/0", "1/0"]),
    ("public.mood", Equality.BYTES, ["sad", "Sad"]),
    ("public.amount", Equality.BYTES, ["1", "2"]),
    ("numeric", Equality.NUMERIC, ["1.0", "1.00", "NaN", "Infinity", "10"]),
    ("float4", Equality.FLOAT, ["0", "-0", "NaN", "1e-45"]),
    ("float8", Equality.FLOAT, ["0", "-0", "NaN", "5e-324"]),
    ("char(3)", Equality.BPCHAR, ["a  ", "A  "]),
    ("money", Equality.UNKNOWN, []),
    ("interval", Equality.INTERVAL, []),
    ("jsonb", Equality.JSONB, []),
    ("int4[]", Equality.BYTES, ["{1,2}", "{2,1}", "[0:1]={1,2}", "{{1,2}}", "{}"]),
    ("numrange", Equality.NUMBERS, []),
    ("public.pair", Equality.UNKNOWN, []),
    ("public.amounts", Equality.BYTES, ["{1}", "{NULL}"]),
    ("regclass", Equality.UNKNOWN, []),
    ("tsvector", Equality.UNKNOWN, []),
    ("ext.ci", Equality.UNKNOWN, []),
]


@pytest.fixture
def worker(target_db: Database) -> Iterator[Worker]:
    """A worker's session on an empty database."""
    with worker_on(target_db) as session:
        yield session


@pytest.mark.pg_majors(15, 18)
def test_equality_classes_are_true(worker: Worker) -> None:
    """A class promises what the server's = says of every pair of texts; all else is UNKNOWN (trap T-21)."""
    worker.run_text(CASELESS_TYPE)
    worker.run_text(
        "CREATE TYPE mood AS ENUM ('sad', 'Sad'); CREATE TYPE pair AS (x int); CREATE DOMAIN amount AS int;"
        "CREATE DOMAIN amounts AS int[]"
    )
    for number, (type_, equality, texts) in enumerate(EQUALITIES):
        worker.run_text(f"CREATE TABLE t{number}(k {type_} PRIMARY KEY)")
        (column,) = worker.facts(f"t{number}").columns
        assert column.equality is equality, type_
        assert column.has_equality, type_
        for one, other in combinations(texts, 2):
            bare = type_.removesuffix(' COLLATE "C"')
            ((same,),) = worker.rows(f"SELECT '{one}'::{bare} = '{other}'::{bare}")
            assert (same == "t") == (_canonical(equality, one) == _canonical(equality, other)), (type_, one, other)


def _canonical(equality: Equality, text: str) -> str:
    """Return the form that the class says is the same for equal values."""
    if equality is Equality.NUMERIC and "." in text:
        return text.rstrip("0").rstrip(".")
    if equality is Equality.FLOAT and text == "-0":
        return "0"
    return text.rstrip(" ") if equality is Equality.BPCHAR else text


def test_columns(worker: Worker) -> None:
    """Columns come in attnum order without dropped ones, with casts that add no length and no domain (trap T-44)."""
    worker.run_text(
        "CREATE DOMAIN d1 AS varchar(3); CREATE DOMAIN d2 AS d1; CREATE TYPE \"my Type\" AS ENUM ('a');"
        'CREATE TABLE t(gone int, b bit(5), c char(4), v varchar(9)[], d d2, e "my Type", n numeric(4,1), j json,'
        " g int GENERATED ALWAYS AS (1) STORED, i int GENERATED ALWAYS AS IDENTITY,"
        " y int GENERATED BY DEFAULT AS IDENTITY);"
        "ALTER TABLE t DROP gone"
    )
    facts = worker.facts("t")
    # A keyword only since SQL/JSON came; quoted or not it is the same type.
    ((quoted_json,),) = worker.rows("SELECT 'pg_catalog.' || quote_ident('json')")
    assert {column.name: (column.type_sql, column.type_modifier) for column in facts.columns} == {
        "b": ('pg_catalog."bit"', 5),
        "c": ("pg_catalog.bpchar", 8),
        "v": ("pg_catalog._varchar", 13),
        "d": ('pg_catalog."varchar"', 7),
        "e": ('public."my Type"', -1),
        "n": ('pg_catalog."numeric"', 262149),
        "j": (quoted_json, -1),
        "g": ("pg_catalog.int4", -1),
        "i": ("pg_catalog.int4", -1),
        "y": ("pg_catalog.int4", -1),
    }
    assert [column.name for column in facts.columns if column.is_generated] == ["g"]
    assert [column.name for column in facts.columns if column.is_identity_always] == ["i"]
    assert [column.name for column in facts.columns if not column.has_equality] == ["j"]
    domain = facts.columns[3]
    assert domain.base_type_oid == 1043
    assert domain.type_oid != 1043
    assert facts.columns[4].is_enum


def test_comparable_only_if_every_part_is(worker: Worker) -> None:
    """Arrays, composites and domains compare if what is in them does; ranges bring an order of their own."""
    worker.run_text(
        "CREATE TYPE good AS (a int, b text); CREATE TYPE bad AS (a int, b json[]); CREATE DOMAIN worse AS bad;"
        "CREATE TABLE t(a good[], b bad, c worse[], d point, e xid, f tstzmultirange, g box[], h aclitem)"
    )
    comparable = [column.name for column in worker.facts("t").columns if column.has_equality]
    assert comparable == ["a", "e", "f", "h"]


def test_key_index_of_its_own_order(worker: Worker) -> None:
    """An identity index with another operator class or collation compares in its own way: equality is UNKNOWN."""
    worker.run_text(
        "CREATE TABLE o(k text NOT NULL); CREATE UNIQUE INDEX o_i ON o(k text_pattern_ops);"
        "ALTER TABLE o REPLICA IDENTITY USING INDEX o_i;"
        'CREATE TABLE c(k text NOT NULL); CREATE UNIQUE INDEX c_i ON c(k COLLATE "POSIX");'
        "ALTER TABLE c REPLICA IDENTITY USING INDEX c_i"
    )
    assert worker.facts("o").columns[0].equality is Equality.UNKNOWN
    (column,) = worker.facts("c").columns
    assert column.equality is Equality.UNKNOWN
    assert column.collation_sql == ' COLLATE pg_catalog."POSIX"'


@pytest.mark.pg_majors(15)  # the embedded servers are built without ICU
def test_nondeterministic_collation(worker: Worker) -> None:
    """The target's collation counts: under a nondeterministic one different texts are equal (trap T-21)."""
    worker.run_text(
        "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
        "CREATE DOMAIN d AS text COLLATE ci; CREATE TABLE t(k text COLLATE ci, d d, c char(3) COLLATE ci, plain text)"
    )
    classes = [column.equality for column in worker.facts("t").columns]
    assert classes == [Equality.UNKNOWN, Equality.UNKNOWN, Equality.UNKNOWN, Equality.BYTES]
