"""The catalogue is asked about groups of tables: what a table costs does not grow with their number."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from parapply.config import TableConfig
from parapply.login import Login
from parapply.model import Column, Relation
from parapply.runtime.rest import Rest
from parapply.runtime.tables import prefetch as ahead_module
from parapply.runtime.tables import watch as watch_module
from parapply.runtime.tables.control_pool import ControlPool
from parapply.runtime.tables.plans import TablePlans
from parapply.runtime.tables.prefetch import CataloguePrefetch
from parapply.runtime.tables.watch import CatalogueWatch
from parapply.target.catalogue import facts
from parapply.target.catalogue.fingerprint import fingerprints
from parapply.target.catalogue.match import match
from parapply.target.sql.statements import Statements, counted
from parapply.tasks import end_tasks
from parapply.wire.rows import BINARY_TYPES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from parapply.target.session.settings import Connection
    from tests.fixtures.databases import Database

_N_TABLES = 200
_MAKE = f"""
DO $$ BEGIN FOR i IN 1..{_N_TABLES} LOOP
  EXECUTE format('CREATE TABLE t%s (i int PRIMARY KEY, n int)', i);
END LOOP; END $$
"""
_NAMES = [("public", f"t{number}") for number in range(1, _N_TABLES + 1)]
#: The plan; names to OIDs, shapes and facts, for the first group and for the others.
_AHEAD = 7


class Queries:
    """Counts what is asked of the catalogue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count from now on."""
        self.n_facts = self.n_fingerprints = 0
        rows = facts._rows

        async def counted_rows(conn: Connection, query: str, params: Sequence[object]) -> list[tuple[Any, ...]]:
            self.n_facts += 1
            return await rows(conn, query, params)

        async def counted_fingerprints(conn: Connection, oids: Sequence[int]) -> dict[int, str]:
            found = await fingerprints(conn, oids)
            self.n_fingerprints += 1
            return found

        monkeypatch.setattr(facts, "_rows", counted_rows)
        for module, name in (
            (ahead_module, "fingerprints_of_few"),
            (ahead_module, "fingerprints"),
            (watch_module, "fingerprints"),
        ):
            monkeypatch.setattr(module, name, counted_fingerprints)


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> Queries:
    """Count the queries of a test."""
    return Queries(monkeypatch)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine reads a group as slowly as it likes."""
    monkeypatch.setattr(ahead_module, "_PATIENCE_S", 60.0)


@pytest.fixture
async def control_pool(target_db: Database) -> AsyncIterator[ControlPool]:
    """Sessions for questions, on a target with many tables."""
    target_db.execute(_MAKE)
    async with ControlPool(Login(target_db.dsn), "replica", "parapply control pool test") as opened:
        yield opened


async def _names() -> Sequence[tuple[str, str]]:
    return _NAMES


def _relations() -> list[Relation]:
    columns = tuple([Column(name=name, type_oid=23, type_modifier=-1, is_key=name == "i") for name in ("i", "n")])
    return [
        Relation(oid=5000 + number, schema=schema, name=name, replica_identity="d", columns=columns)
        for number, (schema, name) in enumerate(_NAMES)
    ]


@pytest.mark.parametrize("age_s", [0.0, 3600.0], ids=["fresh", "old"])
async def test_first_announcements_of_known_tables_cost_no_query_each(
    control_pool: ControlPool, queries: Queries, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    """Tables known at the start are planned by what was read at once; old facts are compared: one first, then all."""
    monkeypatch.setattr(ahead_module, "_VALID_S", 60.0)
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    assert await ahead.take(*_NAMES[-1])  # the last group is read
    assert queries.n_facts <= _AHEAD
    queries.n_facts = queries.n_fingerprints = 0
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr(ahead, "_clock", lambda: clock() + age_s)
    tables = TablePlans(control_pool, ahead, "replica", {})
    relations = _relations()[:-1]
    await tables.resolve(relations)
    await ahead.close()
    assert set(tables.plans.known) == set(relations)
    assert queries.n_facts == 0
    assert queries.n_fingerprints <= 2


async def test_the_question_is_planned_before_the_names_are_known(control_pool: ControlPool, queries: Queries) -> None:
    """The target plans while the publisher is asked, and then describes a single table by one query more."""
    asked: list[int] = []

    async def names() -> list[tuple[str, str]]:
        asked.append(queries.n_facts)
        return _NAMES[:1]

    ahead = CataloguePrefetch(control_pool, "replica", names)
    assert await ahead.take(*_NAMES[0])
    await ahead.close()
    assert (asked, queries.n_facts) == ([1], 3), "the plan; then the name's OID and the facts"


async def test_a_plan_by_another_ones_shape_is_the_tables_own(control_pool: ControlPool, target_db: Database) -> None:
    """Of a table that differs from those before it by names only, and of one that differs by an index as well."""
    target_db.execute("CREATE INDEX ON t3 (n); CREATE UNIQUE INDEX ON t4 (n)")
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    tables = TablePlans(control_pool, ahead, "replica", {"public.t5": TableConfig(parallel="never")})
    relations = _relations()[:6]
    relations[5] = replace(relations[5], replica_identity="f")
    await tables.resolve(relations)
    await ahead.close()
    for relation in relations:
        async with control_pool.session() as conn:
            found = await facts.load_facts(conn, *relation.full_name, role="replica")
        assert found is not None
        parallel = "never" if relation.name == "t5" else "auto"
        assert tables.plans.known[relation] == match(relation, found, parallel=parallel), relation.name


async def test_a_table_is_planned_without_waiting_at_its_first_announcement_only(
    control_pool: ControlPool, queries: Queries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table announced before may have changed, and a name may be another table's now: the catalogue is asked."""
    monkeypatch.setattr(ahead_module, "_VALID_S", 3600.0)
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    tables = TablePlans(control_pool, ahead, "replica", {})
    known, taken, later = _relations()[-3:]
    await ahead.take(*taken.full_name)  # all groups are read now
    queries.n_facts = 0
    assert tables.resolve_new([known])
    assert set(tables.plans.known) == {known}
    assert not tables.resolve_new([known])
    assert not tables.resolve_new([replace(known, oid=1)])
    assert not tables.resolve_new([taken]), "what was read serves once"
    assert not tables.resolve_new([later, replace(later, oid=2)])
    assert not tables.resolve_new([later, taken])
    monkeypatch.setattr(ahead, "_valid_s", 0.0)
    assert not tables.resolve_new([later])
    assert set(tables.plans.known) == {known}
    assert queries.n_facts == 0
    await ahead.close()


async def test_little_is_kept_of_a_table(control_pool: ControlPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts, plan and statements of ten thousand tables must fit into the daemon's memory: 20 kB for each, at most."""
    monkeypatch.setattr(ahead_module, "_VALID_S", 3600.0)
    tracemalloc.start()
    try:
        ahead = CataloguePrefetch(control_pool, "replica", _names)
        await ahead.take(*_NAMES[-1])
        await ahead.close()
        tables = TablePlans(control_pool, ahead, "replica", {})
        relations = _relations()[:-1]
        assert tables.resolve_new(relations)
        kept = []
        for relation in relations:
            tables.plans.announce(relation)
            statements = Statements(tables.plans.known[relation], BINARY_TYPES)
            kept.append([statements, *map(counted, (statements.set_insert((0, 1)), statements.set_update((0, 1))))])
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 20_000 * len(kept)
    finally:
        tracemalloc.stop()


async def test_announcements_one_after_the_other_are_compared_all_at_once(
    control_pool: ControlPool, queries: Queries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts read long ago are compared, first of one table, then of all; that holds for a while."""
    monkeypatch.setattr(ahead_module, "_GROUP", 50)
    monkeypatch.setattr(ahead_module, "_VALID_S", 60.0)
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    await ahead.take(*_NAMES[-1])
    await ahead.close()
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr(ahead, "_clock", lambda: clock() + 3600.0)
    queries.n_fingerprints = 0
    for name in _NAMES[:-1]:
        assert await ahead.take(*name)
    assert queries.n_fingerprints == 2


async def test_of_too_many_tables_the_first_are_read_ahead(
    control_pool: ControlPool, queries: Queries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are read when they are announced: what is kept of a table that may never come costs memory."""
    monkeypatch.setattr(ahead_module, "_MOST_TABLES", 10)
    monkeypatch.setattr(ahead_module, "_VALID_S", 60.0)
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    assert await ahead.take(*_NAMES[0])
    assert await ahead.take(*_NAMES[10]) is None
    assert queries.n_facts <= _AHEAD
    await ahead.close()


async def test_the_watch_reads_changed_tables_together(
    target_db: Database, control_pool: ControlPool, queries: Queries
) -> None:
    """Plans made of facts read at the start are not read again; of the others all that have changed, at once."""
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    await ahead.take(*_NAMES[-1])
    tables = TablePlans(control_pool, ahead, "replica", {})
    relations = _relations()[:-1]
    await tables.resolve(relations)
    await ahead.close()
    for relation in relations:
        tables.plans.announce(relation)
    watching = asyncio.create_task(CatalogueWatch(tables, control_pool, 0.01, Rest()).run(), name="watch")
    queries.n_facts = queries.n_fingerprints = 0
    await _until(lambda: queries.n_fingerprints >= 2)
    assert queries.n_facts == 0
    changed = relations[::2]
    target_db.execute("; ".join(f"CREATE UNIQUE INDEX ON {relation.name} (n)" for relation in changed))
    await _until(lambda: all(tables.plans.known[relation].facts.unique for relation in changed))
    assert queries.n_facts <= 2 * 2  # the indexes may have become visible in the middle of a check
    await end_tasks([watching])


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  the watch signals nothing
            await asyncio.sleep(0.01)
