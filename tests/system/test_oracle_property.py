"""The main property: parallel apply ends in the rows that serial apply by the built-in subscription ends in.

PARAPPLY_TEST_SEEDS chooses the runs: `7,8` these seeds, `1-50` a range. A failure names its seed in the test's id; the
clients' interleaving is not repeated with it, so run it several times.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.builtin import BuiltinSubscription
from tests.fixtures.random_load import run_clients
from tests.fixtures.random_tables import TYPES, RandomTable, random_tables
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase

_SEEDS_VARIABLE = "PARAPPLY_TEST_SEEDS"
_DEFAULT_SEEDS = "1-2"
_WORKERS = (1, 2, 8)
_CLIENTS = 4
_TRANSACTIONS = 300
# Small batches run beside each other, large ones are reduced to net changes: both must be right.
_BATCH_TRANSACTIONS = (1, 4, 1000)


def _seeds(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@pytest.mark.pg_majors(15, 16, 18)
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
    """Any tables, any concurrent transactions, 1, 2 and 8 workers: every table equals the built-in subscription's.

    No transaction is reported as failed on the way (T-69), whether the daemon follows the load or finds a backlog.
    """
    print(f"seed {seed}: repeat with {_SEEDS_VARIABLE}={seed}")  # noqa: T201  shown when it fails
    chooser = random.Random(seed)
    tables = random_tables(chooser)
    source_db.execute(TYPES + "".join(table.source_sql() for table in tables))
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    routes = {
        workers: Route(
            source=source_db,
            target=new_database(target_db.server, f"workers{workers}"),
            settings={"apply.workers": workers, "apply.max_batch_transactions": chooser.choice(_BATCH_TRANSACTIONS)},
        )
        for workers in _WORKERS
    }
    for database in (target_db, *(route.target for route in routes.values())):
        database.execute(TYPES + "".join(table.target_sql() for table in tables))
    builtin = BuiltinSubscription(source_db, target_db)
    for route in routes.values():
        init_route(route)

    def start() -> list[Daemon]:
        return [start_daemon(route) for route in routes.values()]

    daemons = _load_and_follow(source_db, tables, start, seed=seed, start_at=chooser.randrange(3))
    builtin.wait_caught_up()
    for daemon in daemons:
        daemon.wait_caught_up()
        daemon.stop()
        assert not daemon.events_of("batch_failed"), daemon.log_tail()
    _check_equal(source_db, target_db, tables, with_extra=False, name="built-in subscription and source")
    for workers, route in routes.items():
        _check_equal(target_db, route.target, tables, with_extra=True, name=f"{workers} workers, seed {seed}")


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


def _check_equal(
    expected: Database, actual: Database, tables: list[RandomTable], *, with_extra: bool, name: str
) -> None:
    """Compare every table as sorted rows."""
    for table in tables:
        query = table.rows_sql(with_extra=with_extra)
        wanted, found = sorted(expected.rows(query)), sorted(actual.rows(query))
        missing = [row for row in wanted if row not in found][:3]
        extra = [row for row in found if row not in wanted][:3]
        assert wanted == found, f"{name}: {table.name} differs: missing {missing}, not expected {extra}"
