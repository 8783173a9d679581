"""A table's columns are published otherwise while a transaction is in progress that has announced it before.

For the publisher the later announcement stays in force, whatever becomes of that transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair
from tests.fixtures.streams import FOLLOW, LITTLE_MEMORY, SOME_ROWS, fill, stream_everything, wait_received
from tests.fixtures.two_phase import TWO_PHASE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pair"]

_TABLES = """
CREATE TABLE load (id int, v text);
CREATE TABLE t (id int PRIMARY KEY, a int, b int);
CREATE TABLE part (id int PRIMARY KEY, a int, secret int, b int);
INSERT INTO t VALUES (1, 0, 0), (2, 0, 0);
INSERT INTO part VALUES (1, 0, 7, 0), (2, 0, 7, 0);
"""
_BEFORE = "TABLE load, t (id, a), part (id, a, secret)"
_AFTER = "TABLE load, t (id, b), part (id, secret, b)"
_SETTINGS: Mapping[str, str | float] = {
    **TWO_PHASE,
    **LITTLE_MEMORY,
    "source.status_interval_s": 0.1,
    'mapping.tables."public.part".omit': "secret",
}
#: Number of rows by the way in which a transaction of them is applied, and settings.
_WAYS: Mapping[str, tuple[int, Mapping[str, str | float]]] = {
    "whole": (SOME_ROWS, {}),
    "spilled": (10 * SOME_ROWS, {"apply.workers": 1}),
    "followed": (SOME_ROWS, FOLLOW),
}


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("way", _WAYS)
def test_the_later_announcement_stays_in_force(pair: Pair, way: str) -> None:
    """A stream's earlier announcement takes effect in it only, whether it is committed, prepared or rolled back.

    PostgreSQL 15.18, 16.14 and 18.4 announce the table once more behind the stream's end; nothing else depends on that.
    """
    n_rows, settings = _WAYS[way]
    pair.create(_TABLES, published=_BEFORE)
    stream_everything(pair.source)
    daemon = pair.start(settings={**_SETTINGS, **settings})
    for number, end in enumerate(("COMMIT", "PREPARE TRANSACTION 'gid'", "ROLLBACK"), 1):
        with pair.source.connect() as session:
            session.execute("BEGIN")
            for table in ("t", "part"):
                session.execute(f"UPDATE {table} SET a = {number} WHERE id = 2".encode())
            session.execute(fill("load", 1, n_rows))
            wait_received(pair.route)
            pair.write(
                f"ALTER PUBLICATION pub SET {_AFTER}",
                *(f"UPDATE {table} SET b = {number} WHERE id = 1" for table in ("t", "part")),
            )
            wait_received(pair.route)
            session.execute(end.encode())
        pair.write(*(f"UPDATE {table} SET b = {-number} WHERE id = 1" for table in ("t", "part")))
        if end.startswith("PREPARE"):
            pair.source.execute("COMMIT PREPARED 'gid'")
        daemon.wait_caught_up()
        pair.check_equal()
        pair.write(f"ALTER PUBLICATION pub SET {_BEFORE}")
    daemon.stop()
    assert bool(daemon.events_of("stream_followed")) is (way == "followed")
