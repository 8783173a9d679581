"""The daemon beside pgbench: it follows a running load and drains a backlog, and the tables are equal."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from parapply.demo.binaries import find_binaries, find_program
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database

_TABLES = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")
_PGBENCH_TIMEOUT_S = 60.0
_CLIENTS = 8
_LOAD_TRANSACTIONS = 30
_BACKLOG_CLIENTS = 4
_BACKLOG_TRANSACTIONS = 60


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """The tables of pgbench with the same rows on both sides, and a slot."""
    for database in (source_db, target_db):
        # Rows made by the server, and no vacuum.
        _pgbench(database, "--initialize", "--quiet", "--init-steps=dtGp")
    source_db.execute(f"CREATE PUBLICATION pub FOR TABLE {', '.join(_TABLES)}")
    made = Route(source=source_db, target=target_db)
    new_slot(made)
    return made


def _pgbench(database: Database, *arguments: str) -> None:
    command = [str(find_program("pgbench", find_binaries())), *arguments, database.dsn]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PGBENCH_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def _check_equal(route: Route) -> None:
    """Compare number and content of the rows of every table, in any order."""
    for table in _TABLES:
        query = f"SELECT count(*), sum(hashtextextended(t::text, 0)::numeric) FROM {table} AS t"
        assert route.source.rows(query) == route.target.rows(query), f"{table} differs"


def test_the_daemon_follows_a_load_and_drains_a_backlog(route: Route, start_daemon: StartDaemon) -> None:
    """Eight clients of TPC-B, which all meet on one branch row, are followed; afterwards every table is equal.

    With `--until` the daemon applies what waits in the slot and exits 0 by itself, with one worker and with four.
    """
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    _pgbench(route.source, "--client", str(_CLIENTS), "--transactions", str(_LOAD_TRANSACTIONS), "--no-vacuum")
    daemon.finish()
    n_transactions = _CLIENTS * _LOAD_TRANSACTIONS
    assert route.source.rows("SELECT count(*) FROM pgbench_history") == [(n_transactions,)]
    _check_equal(route)
    arguments = ("--builtin", "simple-update", "--client", str(_BACKLOG_CLIENTS), "--no-vacuum")
    for workers in (1, 4):
        _pgbench(route.source, *arguments, "--transactions", str(_BACKLOG_TRANSACTIONS))
        daemon = start_daemon(route, "--until", route.end_of_source_lsn(), settings={"apply.workers": workers})
        assert daemon.exit_code(timeout_s=60) == 0, daemon.log_tail()
        n_transactions += _BACKLOG_CLIENTS * _BACKLOG_TRANSACTIONS
        assert route.target.rows("SELECT count(*) FROM pgbench_history") == [(n_transactions,)], f"{workers} workers"
    _check_equal(route)
