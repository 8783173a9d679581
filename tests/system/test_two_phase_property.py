"""The main property with prepared transactions: the rows of the built-in subscription, whoever is killed meanwhile."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.builtin import BuiltinSubscription
from tests.fixtures.fan import make_slot
from tests.fixtures.random_prepared import TABLES, PreparedLoad
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents, differences
from tests.fixtures.two_phase import TWO_PHASE, check_nothing_is_left, stream_early

if TYPE_CHECKING:
    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase

_LOAD_S = 4.0
_WAYS = (("preserve", 1), ("preserve", 4), ("relaxed", 1), ("relaxed", 4))


@pytest.mark.crash
@pytest.mark.pg_majors(18)
@pytest.mark.parametrize("seed", [1])
def test_prepared_transactions_end_as_in_the_built_in_subscription(
    source_db: Database, target_db: Database, new_database: NewDatabase, start_daemon: StartDaemon, seed: int
) -> None:
    """Random transactions, some prepared and ended later, some streamed; random daemons killed and started again.

    In both commit orders, with one worker and with four, the tables are those of the built-in subscription, and nothing
    is prepared, noted or proved at the end.
    """
    chooser = random.Random(seed)
    stream_early(source_db)
    source_db.execute(f"{TABLES} CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute(TABLES)
    builtin = BuiltinSubscription(source_db, target_db, two_phase=True)
    routes: list[Route] = []
    for order, workers in _WAYS:
        target = new_database(target_db.server, "target")
        target.execute(TABLES)
        settings = {**TWO_PHASE, "apply.commit_order": order, "apply.workers": workers, "apply.stream_start_bytes": 0}
        routes.append(Route(source=source_db, target=target, settings=settings))
        make_slot(routes[-1])
    daemons = [start_daemon(route) for route in routes]
    load = PreparedLoad(source_db, seed=seed)
    for _ in load.run_for(_LOAD_S):
        n = chooser.randrange(len(routes))
        daemons[n].kill()
        daemons[n] = start_daemon(routes[n])
    builtin.wait_caught_up()
    wanted = contents(target_db, "public")
    assert load.prepared > 20, "hardly anything was prepared: this proves nothing"
    for route, daemon in zip(routes, daemons, strict=True):
        daemon.wait_for_event("source_connected")
        daemon.wait_caught_up()
        daemon.stop()
        assert differences(contents(route.target, "public"), wanted) == [], route.settings
        check_nothing_is_left(route.target)
