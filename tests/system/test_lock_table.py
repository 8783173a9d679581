"""A target with few places for locks: a batch has as few tables as fit beside others, and fewer where that is too many.

Source: PostgreSQL manual, `max_locks_per_transaction`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.fixtures.databases import create_database
from tests.fixtures.pair import Pair

if TYPE_CHECKING:
    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

#: Without autovacuum, which locks all indexes of a table that it looks at.
_FEW_LOCKS = {
    "max_locks_per_transaction": 10,
    "max_connections": 30,
    "max_prepared_transactions": 0,
    "autovacuum": False,
}
_MAKE = """
DO $$ BEGIN FOR i IN 1..{tables} LOOP
  EXECUTE format('CREATE TABLE t%s (i int PRIMARY KEY, n int)', i);
  FOR j IN 1..{indexes} LOOP EXECUTE format('CREATE INDEX ON t%s (n)', i); END LOOP;
  EXECUTE format('INSERT INTO t%s VALUES (1, 1)', i);
  COMMIT;
END LOOP; END $$
"""
#: A transaction for each table. An update locks all indexes until its commit, an insert none.
_CHANGE = """
DO $$ BEGIN FOR i IN 1..{tables} LOOP
  EXECUTE format('UPDATE t%s SET n = 2', i);
  COMMIT;
END LOOP; END $$
"""


def test_a_backlog_of_more_tables_than_the_target_can_lock(pair_of_few_locks: Pair) -> None:
    """A batch has only a part of the tables that would fill the table of locks."""
    pair = pair_of_few_locks
    pair.create(_MAKE.format(tables=900, indexes=0))
    pair.source.execute(_CHANGE.format(tables=900))
    daemon = pair.start()
    daemon.wait_caught_up()
    assert daemon.events_of("target_lost") == []
    pair.check_equal()


def test_batches_have_fewer_tables_where_others_hold_the_places(pair_of_few_locks: Pair) -> None:
    """A batch that is refused comes again with half as many tables, until it fits beside the locks of others."""
    pair = pair_of_few_locks
    pair.create(_MAKE.format(tables=60, indexes=24))
    pair.source.execute(_CHANGE.format(tables=60))
    with psycopg.connect(pair.target.server.dsn(pair.target.dbname), autocommit=True) as other:
        _leave_places(other, 300)
        daemon = pair.start(workers=1)
        daemon.wait_caught_up()
        lost = [str(event["error"]) for event in daemon.events_of("target_lost")]
    # 60, again 60, 56, 28 and 14 tables are too many, and 7 fit. Without this each attempt would commit one transaction
    # and fail. While one is refused, a look at who blocks a session finds no room either.
    assert 0 < len([error for error in lost if "the target has no room" in error]) <= 5
    assert all("raise max_locks_per_transaction" in error for error in lost), lost
    pair.check_equal()


def _leave_places(connection: psycopg.Connection, n_places: int) -> None:
    """Take advisory locks, which are in the same table, until this number more fits."""
    n_held = 0
    with suppress(psycopg.errors.OutOfMemory):
        while True:
            connection.execute("SELECT pg_advisory_lock(%s)", [n_held])
            n_held += 1
    for number in range(n_held - n_places, n_held):
        connection.execute("SELECT pg_advisory_unlock(%s)", [number])


@pytest.fixture
def pair_of_few_locks(source_db: Database, own_servers: OwnServers, start_daemon: StartDaemon) -> Pair:
    """A pair whose target has few places for locks."""
    target = create_database(own_servers("target", settings=_FEW_LOCKS), "target")
    return Pair(source_db, target, start_daemon)
