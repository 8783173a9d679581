"""The main property: parallel apply ends in the rows that serial apply by the built-in subscription ends in.

PARAPPLY_TEST_SEEDS chooses the runs: `7,8` these seeds, `1-50` a range. A failure names its seed in the test's id; the
clients' interleaving is not repeated with it, so run it several times.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.builtin import BuiltinSubscription
from tests.fixtures.random_load import run_clients
from tests.fixtures.random_routes import SEEDS_OF_ALL_WAYS, Way, all_ways, random_ways
from tests.fixtures.random_schema import SEEDS_OF_ALL_KINDS, RandomSchema, random_schema
from tests.fixtures.route import Route
from tests.fixtures.streams import stream_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.random_tables import RandomTable
    from tests.fixtures.servers import NewDatabase

_SEEDS_VARIABLE = "PARAPPLY_TEST_SEEDS"
_DEFAULT_SEEDS = "1-3"
#: In more than one piece, some of which are told to be rolled back.
_WAS_STREAMED = (
    "SELECT stream_txns > 0 AND stream_count > stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{}'"
)
_CLIENTS = 4
_TRANSACTIONS = 240


def _seeds(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@pytest.mark.pg_majors(18)
@pytest.mark.parametrize("seed", list(_seeds(os.environ.get(_SEEDS_VARIABLE, _DEFAULT_SEEDS))))
def test_parallel_apply_equals_serial_apply(
    *,
    source_db: Database,
    target_db: Database,
    new_database: NewDatabase,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
    seed: int,
) -> None:
    """Any tables, transactions, workers, commit order and role: every table equals the built-in subscription's.

    The load has no conflict, so none is reported on the way (T-69), whether the daemon follows it or finds a backlog.
    What triggers write in the order of changes is equal, too, in both commit orders (T-29). The publisher streams what
    has more than 64 kB, subtransactions that are rolled back afterwards among it (T-51).
    """
    print(f"seed {seed}: repeat with {_SEEDS_VARIABLE}={seed}")  # noqa: T201  shown when it fails
    chooser = random.Random(seed)
    schema = random_schema(seed)
    source_db.execute(schema.source_sql())
    stream_everything(source_db)
    routes = {
        way: Route(
            source=source_db, target=new_database(target_db.server, f"target{number}"), settings=way.settings
        )
        for number, way in enumerate(random_ways(seed))
    }  # fmt: skip
    for database in (target_db, *(route.target for route in routes.values())):
        database.execute(schema.target_sql())
    builtin = BuiltinSubscription(source_db, target_db)
    for route in routes.values():
        init_route(route)

    def start() -> list[Daemon]:
        return [start_daemon(route) for route in routes.values()]

    daemons = _load_and_follow(source_db, schema.tables, start, seed=seed, start_at=chooser.randrange(3))
    builtin.wait_caught_up()
    for (way, route), daemon in zip(routes.items(), daemons, strict=True):
        daemon.wait_caught_up()
        daemon.stop()
        assert not daemon.events_of("batch_failed"), daemon.log_tail()
        assert source_db.rows(_WAS_STREAMED.format(route.slot)) == [(True,)], f"{way}: nothing was streamed"
        assert bool(daemon.events_of("stream_followed")) or not way.must_follow, f"{way}: nothing was followed"
    for table in schema.tables:
        _check_rows(source_db, target_db, table)
    for way, route in routes.items():
        _check_target(target_db, route.target, schema, way)


def test_seeds_in_a_row_draw_every_kind_and_every_way() -> None:
    """A few seeds, the default ones among them, leave out no kind of table and no way to apply."""
    seeds = list(_seeds(_DEFAULT_SEEDS))
    names = {table.name for seed in range(30) for table in random_schema(seed).tables}
    assert len(seeds) >= max(SEEDS_OF_ALL_KINDS, SEEDS_OF_ALL_WAYS)
    assert {table.name for seed in seeds for table in random_schema(seed).tables} == names
    for first in range(30):
        ways = [way for seed in range(first, first + SEEDS_OF_ALL_WAYS) for way in random_ways(seed)]
        assert {(way.commit_order, way.workers, way.role) for way in ways} == all_ways()


def _load_and_follow(
    source: Database, tables: list[RandomTable], start: Callable[[], list[Daemon]], *, seed: int, start_at: int
) -> list[Daemon]:
    """Run the load with the daemons started before it (`start_at` 0), in its middle (1), or after it (2)."""
    daemons: list[Daemon] = []
    for part in range(2):
        if start_at == part:
            daemons = start()
        done, refused = run_clients(
            source, tables, seed=2 * seed + part, clients=_CLIENTS, transactions=_TRANSACTIONS // 2
        )
        assert done > refused, "most of the load was refused: it tests nothing"
    return daemons or start()


def _check_rows(source: Database, builtin: Database, table: RandomTable) -> None:
    """Compare the published columns: the load itself must be one that a target can take."""
    wanted = source.rows(table.rows_sql(on_target=False, with_extra=False))
    found = builtin.rows(table.rows_sql(on_target=True, with_extra=False))
    _check_equal(wanted, found, f"built-in subscription and source: {table.name}")


def _check_target(builtin: Database, target: Database, schema: RandomSchema, way: Way) -> None:
    """Compare every table with all its columns, and what the triggers noted, in their order."""
    for table in schema.tables:
        query = table.rows_sql(on_target=True, with_extra=True)
        _check_equal(builtin.rows(query), target.rows(query), f"{way}: {table.name}")
    notes = builtin.rows("SELECT entry FROM audit_always ORDER BY id")
    assert bool(notes) is any(table.has_audit for table in schema.tables)
    for audit in ("audit_always", "audit_ordinary"):
        # The built-in subscription has the role replica, so ordinary triggers are measured by the other ones.
        wanted = notes if audit == "audit_always" or way.role == "origin" else []
        found = target.rows(f"SELECT entry FROM {audit} ORDER BY id")
        first = next((n for n, (one, other) in enumerate(zip(wanted, found, strict=False)) if one != other), "the end")
        assert found == wanted, f"{way}: {audit} differs from entry {first} on, of {len(wanted)} and {len(found)}"


def _check_equal(wanted: list[tuple[object, ...]], found: list[tuple[object, ...]], name: str) -> None:
    """Compare as sorted rows."""
    missing, extra = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    problem = f"missing {list(missing)[:3]}, not expected {list(extra)[:3]}"
    assert not missing + extra, f"{name} differs: {problem}"
