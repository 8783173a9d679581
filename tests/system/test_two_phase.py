"""Prepared transactions, applied as such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE small (id int PRIMARY KEY, v int)"
TWO_PHASE = {"source.two_phase": "true"}


def test_smoke(pair: Pair) -> None:
    """Smoke."""
    pair.create(TABLES)
    daemon = pair.start(settings=TWO_PHASE)
    pair.source.execute("INSERT INTO small VALUES (1, 1)")
    with pair.source.connect() as one:
        for name, what in (("a", "COMMIT"), ("b", "ROLLBACK")):
            one.execute("BEGIN")
            one.execute(f"INSERT INTO t VALUES ({ord(name)}, 'x')".encode())
            one.execute(f"PREPARE TRANSACTION '{name}'".encode())
        pair.route.wait_caught_up(check=daemon.check_running)
        assert len(pair.target.rows("SELECT * FROM parapply.prepared")) == 2
        print(pair.target.rows("SELECT * FROM parapply.prepared"))
        for name, what in (("a", "COMMIT"), ("b", "ROLLBACK")):
            one.execute(f"{what} PREPARED '{name}'".encode())
    pair.route.wait_caught_up(check=daemon.check_running)
    for line in daemon.events:
        print(line)
    pair.check_equal()
    assert len(pair.target.rows("SELECT * FROM parapply.prepared")) == 0
    assert len(pair.target.rows("SELECT * FROM parapply.committed_prepared")) == 0
    print(pair.target.rows("SELECT * FROM parapply.progress"))
