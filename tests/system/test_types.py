"""Values of every built-in type and of the user's own, through the daemon and the built-in subscription alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.fan import Case, Fan, Fans, Variant
from tests.fixtures.rotation import values_of
from tests.integration.type_cases import KEYS, ROUND_TRIPS, TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fixtures.servers import ServerPool

VARIANTS = (Variant(workers=4, mode="live"), Variant(workers=4, mode="backlog"))

pytestmark = pytest.mark.in_turn("variant")
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)

#: No equality operator that the planner knows: a row of REPLICA IDENTITY FULL cannot be found by them.
NOT_COMPARABLE = frozenset(
    {"json", "jsonpath", "pg_snapshot", "txid_snapshot", "point", "line", "lseg", "box", "path", "polygon", "circle",
     "box[]"}
)  # fmt: skip

#: Texts of trap T-44 beyond the ones of the integration tests.
MORE_TEXTS = {
    "text": ["\x01\x7f", "\u200d\u0301", "'; DROP TABLE every; --", "$1"],
    "bytea": ["\\x" + "00" * 300, "\\x5c5c00"],
    "numeric": ["-0.000", "1e-16383", "9" * 1000],
    "json": ['{"a":1,"a":2}', "[1.0, 1.00]"],
    "text[]": ['[-2:0]={a,NULL,"NULL"}', '{"{}","\\\\\\""}'],
    "public.pair": ['("-1","""quoted"", \\\\ and (nested)")'],
    "int4multirange": ["{(,5),[10,)}"],
    "timestamptz": ["infinity", "294276-12-31 23:59:59.999999+00"],
    "date": ["0001-01-01 BC", "10000-01-01"],
    "money": ["$0.01"],
}  # fmt: skip


def literals(texts: Iterable[str | None]) -> str:
    """Return SQL literals with commas between them."""
    return ", ".join(sql.Literal(text).as_string(None) for text in texts)


def all_types() -> Case:
    """Return a table with a column of every type, and one without a key with every comparable one."""
    texts = {type_: [*found, *MORE_TEXTS.get(type_, [])] for type_, found in ROUND_TRIPS.items()}
    names = {type_: f"c{number}" for number, type_ in enumerate(texts)}
    depth = max(map(len, texts.values()))
    comparable = [type_ for type_ in texts if type_ not in NOT_COMPARABLE]
    transactions = []
    for row in range(depth):
        values = [found[row % len(found)] for found in texts.values()]
        transactions.append(f"INSERT INTO every VALUES ({row}, {literals(values)})")
        some = [texts[type_][row % len(texts[type_])] for type_ in comparable]
        transactions.append(f"INSERT INTO whole VALUES ({row}, {literals(some)})")
    transactions += [
        "INSERT INTO every (id) VALUES (1000)",
        "INSERT INTO whole (id) VALUES (1000)",
        "INSERT INTO every (id) VALUES (1001)",
        *(
            f"UPDATE every SET {name} = {literals([texts[type_][-1]])} WHERE id IN (0, 1001)"
            for type_, name in names.items()
        ),
        f"UPDATE every SET {', '.join(f'{name} = NULL' for name in names.values())} WHERE id = 1",
        "UPDATE whole SET id = id + 2000 WHERE id % 2 = 0",
        "DELETE FROM whole WHERE id % 3 = 0",
    ]
    columns = ", ".join(f"{name} {type_}" for type_, name in names.items())
    some_columns = ", ".join(f"{names[type_]} {type_}" for type_ in comparable)
    return Case(
        name="all_types",
        tables=f"CREATE TABLE every (id int PRIMARY KEY, {columns});"
        f"CREATE TABLE whole (id int, {some_columns}); ALTER TABLE whole REPLICA IDENTITY FULL",
        transactions=transactions,
    )


def all_keys() -> Case:
    """Return a table with a key of each type, written in one text and found by another of the same value."""
    tables, transactions = [], []
    for number, (type_, stored, same) in enumerate(KEYS):
        tables.append(f"CREATE TABLE k{number} (v int, k {type_} PRIMARY KEY);")
        one, other = (f"{literals([text])}::{type_}" for text in (stored, same))
        transactions += [
            f"INSERT INTO k{number} VALUES (0, {one})",
            f"UPDATE k{number} SET v = 1 WHERE k = {other}",
            f"UPDATE k{number} SET v = v + 1, k = {other}",
            f"DELETE FROM k{number} WHERE k = {one}",
            f"INSERT INTO k{number} VALUES (5, {other})",
        ]
    return Case(name="all_keys", tables="".join(tables), transactions=transactions)


@pytest.fixture(scope="module")
def fans(server_pool: ServerPool, request: pytest.FixtureRequest) -> Fans:
    """The cases, run when first asked for."""

    def make(major: int) -> Fan:
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        variants = values_of(request, "variant", major)
        return Fan(source, target, [all_types(), all_keys()], variants, setup=TYPES)

    return Fans(make)


@pytest.fixture
def fan(fans: Fans, pg_major: int) -> Fan:
    """The cases on this test's major version."""
    return fans.get(pg_major)


@every_variant
def test_t44_every_type(fan: Fan, variant: Variant) -> None:
    """A column of any type holds on the target what it holds on the source, to the last character (T-44)."""
    found = fan.check(variant, "all_types")
    assert len(found["every"]) > 8


@every_variant
def test_keys_of_every_type(fan: Fan, variant: Variant) -> None:
    """A row is found by a key of any type that has one, also by another text of the same value."""
    found = fan.check(variant, "all_keys")
    assert all(len(rows) == 1 for rows in found.values())


@pytest.mark.pg_majors(15)  # the embedded servers are built without libxml
def test_t44_xml(server_pool: ServerPool, pg_major: int) -> None:
    """Documents and fragments of XML arrive as they are (T-44)."""
    case = Case(
        name="xml",
        tables="CREATE TABLE t (id int PRIMARY KEY, x xml)",
        transactions=[
            "INSERT INTO t VALUES (1, '<a/><b/>'), (2, 'text'), (3, '<?xml version=\"1.0\"?><a>&lt;ü</a>'), (4, NULL)",
            "UPDATE t SET x = '<c at=\"1\"/>' WHERE id = 4",
        ],
    )
    variants = VARIANTS[1:]
    fan = Fan(server_pool.get("source", pg_major), server_pool.get("target", pg_major), [case], variants)
    fan.check(variants[0], "xml")
