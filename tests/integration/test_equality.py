"""Canonical keys against real servers: the same for two values exactly when the default btree class holds them equal.

The server orders each list of literals and numbers its groups of peers; the texts are what it prints under the settings
that the publisher's session pins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.model import Column
from parapply.plan.keys import key_reader, value_reader
from parapply.plan.table import Equality
from parapply.source.options import connection_options
from parapply.target.catalogue import equality
from parapply.target.catalogue.match import match
from parapply.wire.rows import NULL
from tests.integration.equality_cases import CASES, INFINITE_INTERVALS, INTS, NUMERICS, TEXTS, TYPES, UNKNOWN, arrays
from tests.integration.table_cases import CASELESS_TYPE, relation_of, worker_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from parapply.plan.keys import Key
    from parapply.plan.table import TableFacts
    from tests.fixtures.databases import Database
    from tests.integration.table_cases import Worker


@pytest.fixture
def worker(target_db: Database) -> Iterator[Worker]:
    """A worker's session on a database with types of its own."""
    with worker_on(target_db) as session:
        session.run_text(CASELESS_TYPE)
        session.run_text(TYPES)
        yield session


@pytest.fixture
def publisher(target_db: Database) -> Iterator[psycopg.Connection]:
    """A session that prints as the publisher's does."""
    with target_db.connect(options=connection_options()) as connection:
        yield connection


def _printed(publisher: psycopg.Connection, type_: str, literals: list[str]) -> list[tuple[bytes, bytes]]:
    """Return each literal as the type's output function prints it, with the number of its group of equal ones."""
    query = f"SELECT k, dense_rank() OVER (ORDER BY k) FROM (SELECT CAST(t AS {type_}) k FROM unnest($1::text[]) t) x"
    with psycopg.RawCursor(publisher) as cursor:
        cursor.execute(query.encode(), (literals,))
        result = cursor.pgresult
        assert result is not None
        return [(result.get_value(row, 0) or b"", result.get_value(row, 1) or b"") for row in range(result.ntuples)]


def _value(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def _assert_exact(keys: Iterable[Key | None], ranks: Iterable[bytes], type_: str) -> None:
    """Two groupings of the same values are one."""
    pairs = set(zip(keys, ranks, strict=True))
    by_key: dict[Key | None, list[bytes]] = {}
    by_rank: dict[bytes, list[Key | None]] = {}
    for key, rank in pairs:
        by_key.setdefault(key, []).append(rank)
        by_rank.setdefault(rank, []).append(key)
    assert not [key for key, found in by_key.items() if len(found) > 1], f"{type_}: one key for different values"
    assert not [found for found in by_rank.values() if len(found) > 1], f"{type_}: several keys for equal values"


def _facts(worker: Worker, number: int, type_: str) -> TableFacts:
    worker.run_text(f"CREATE TABLE t{number}(k {type_} PRIMARY KEY)")
    return worker.facts(f"t{number}")


@pytest.mark.pg_majors(15, 18)
def test_keys_are_equal_exactly_when_the_server_says_so(worker: Worker, publisher: psycopg.Connection) -> None:
    """For every type of a known class, keys from the wire's text are the server's equality, both ways (trap T-21)."""
    for number, (type_, expected, literals) in enumerate(CASES):
        facts = _facts(worker, number, type_)
        assert facts.columns[0].equality is expected, type_
        plan = match(relation_of(facts), facts) if not type_.startswith("public.") else None
        texts = list(literals)
        assert len(texts) >= 20, type_
        if expected is Equality.INTERVAL and "(" not in type_ and "to" not in type_ and _is_since_17(publisher):
            texts += INFINITE_INTERVALS
        printed = _printed(publisher, type_, texts)
        # A domain's OID on the wire is the publisher's: it says nothing, so there is no plan with such a key.
        of = key_reader(plan) if plan else value_reader((0,), (expected,), is_nulls_distinct=True)
        _assert_exact([of([_value(text)]) for text, _ in printed], [rank for _, rank in printed], type_)
        if expected is not Equality.BYTES and "(" not in type_:  # a scale or length makes texts of equal values one
            assert len({text for text, _ in printed}) > len({rank for _, rank in printed}), f"{type_}: proves nothing"


def _is_since_17(publisher: psycopg.Connection) -> bool:
    return publisher.info.server_version >= 170000


@pytest.mark.pg_majors(15, 18)
def test_what_is_not_known_to_be_exact_is_unknown(worker: Worker) -> None:
    """Types of users and extensions, and built-in ones that print in more than one way, widen to the table."""
    for number, type_ in enumerate(UNKNOWN):
        assert _facts(worker, number, type_).columns[0].equality is Equality.UNKNOWN, type_


@pytest.mark.pg_majors(15)  # the embedded servers are built without ICU
def test_arrays_under_a_nondeterministic_collation_are_unknown(worker: Worker) -> None:
    """An array column's collation is its elements' collation; jsonb never asks for one (trap T-21)."""
    worker.run_text(
        "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
        "CREATE TABLE t(a text[] COLLATE ci, b varchar(9)[] COLLATE ci, c bpchar[] COLLATE ci, plain text[], j jsonb)"
    )
    classes = [column.equality for column in worker.facts("t").columns]
    assert classes == [*[Equality.UNKNOWN] * 3, Equality.BYTES, Equality.JSONB]
    assert worker.rows("SELECT '{a}'::text[] COLLATE ci = '{A}'") == [("t",)]


@pytest.mark.pg_majors(15, 18)
def test_element_types_are_the_catalogues(worker: Worker) -> None:
    """Each array's element type is as in pg_type, its delimiter a comma, and every comparable element has its array."""
    known = ",".join(map(str, equality._ELEMENTS))
    found = worker.rows(f"SELECT oid, typelem, typdelim FROM pg_type WHERE oid IN ({known})")
    assert {(int(oid or 0), int(element or 0)) for oid, element, _ in found} == set(equality._ELEMENTS.items())
    assert {delimiter for _, _, delimiter in found} == {","}
    assert set(equality._ELEMENTS.values()) == set(equality._CLASSES)


@pytest.mark.pg_majors(15, 18)
def test_values_of_two_tables_compare(publisher: psycopg.Connection) -> None:
    """A child's integer is its parent's numeric, whatever the types on the wire; NULL refers to nothing."""
    of = value_reader((0,), (Equality.NUMERIC,), is_nulls_distinct=True)
    ((parent, _),) = _printed(publisher, "numeric(9,2)", ["12"])
    ((child, _),) = _printed(publisher, "int8", ["12"])
    assert parent != child
    assert of([_value(parent)]) == of([_value(child)])
    assert of([NULL]) is None


@pytest.mark.pg_majors(15, 18)
def test_texts_of_another_type(worker: Worker, publisher: psycopg.Connection) -> None:
    """Where the publisher's type is another, keys are what the target makes of its texts."""
    cases = [
        ("text[]", "bpchar[]", arrays(TEXTS)),
        ("varchar[]", "text[]", arrays(TEXTS)),
        ("bpchar[]", "text[]", arrays(TEXTS)),
        ("numeric[]", "varchar[]", arrays(NUMERICS)),
        ("int4[]", "numeric[]", INTS),
        ("int8[]", "int4[]", INTS),
    ]
    for number, (wire, target, literals) in enumerate(cases):
        facts = _facts(worker, number, target)
        ((oid,),) = worker.rows(f"SELECT '{wire}'::regtype::oid")
        column = Column(name="k", type_oid=int(oid or 0), type_modifier=-1, is_key=True)
        found = equality.equality_across(column, facts.columns[0])
        of = value_reader((0,), (found,), is_nulls_distinct=True)
        sent = sorted({text.decode() for text, _ in _printed(publisher, wire, literals)})
        query = f"SELECT dense_rank() OVER (ORDER BY CAST(t AS {target})), t FROM unnest($1::text[]) t"
        with psycopg.RawCursor(publisher) as cursor:
            rows = cursor.execute(query.encode(), (sent,)).fetchall()
        _assert_exact([of([_value(text.encode())]) for _, text in rows], [b"%d" % rank for rank, _ in rows], target)
