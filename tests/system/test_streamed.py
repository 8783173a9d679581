"""Transactions streamed while they are in progress: followed by a worker or kept until their commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    pass

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE small (id int PRIMARY KEY, v int)"
#: Every chunk is as small as PostgreSQL makes them.
SMALL_CHUNKS = "ALTER DATABASE {} SET logical_decoding_work_mem = '64kB'"
FOLLOW_ALL = {"apply.stream_start_bytes": 0}


def _stream_all(pair: Pair) -> None:
    name = pair.source.rows("SELECT quote_ident(current_database())")[0][0]
    pair.source.execute(SMALL_CHUNKS.format(name))


def test_smoke(pair: Pair) -> None:
    """Smoke."""
    _stream_all(pair)
    pair.create(TABLES)
    daemon = pair.start(settings=FOLLOW_ALL)
    with pair.source.connect() as big, pair.source.connect() as other:
        with big.transaction():
            big.execute("INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(1, 20000) g")
            other.execute("INSERT INTO small VALUES (1, 1)")
            big.execute("SAVEPOINT a")
            big.execute("UPDATE t SET v = 'y' WHERE id <= 5000")
            big.execute("ROLLBACK TO a")
            big.execute("SAVEPOINT b")
            big.execute("DELETE FROM t WHERE id > 19000")
            other.execute("INSERT INTO small VALUES (2, 1)")
    pair.route.wait_caught_up(check=daemon.check_running)
    for line in daemon.events:
        print(line)
    pair.check_equal()
