"""A stream whose bytes were changed on the way: one line with exit 3, nothing of it applied, nothing lost."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.plain import check_equal, plain_route
from tests.fixtures.proxy import CutProxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

#: Stands in the stream as a text of this length, behind 't'.
_VALUE = b"1234567"
_CELL = b"t" + struct.pack("!i", len(_VALUE)) + _VALUE


@pytest.mark.in_turn("broken")
@pytest.mark.parametrize(
    "broken",
    [b"t\x7f\xff\xff\xff" + _VALUE, b"t\xff\xff\xff\xfe" + _VALUE, b"z" + _CELL[1:]],
    ids=["a length beyond all", "a negative length", "an unknown kind"],
)
def test_changed_bytes_end_the_daemon_and_lose_nothing(
    source_db: Database,
    target_db: Database,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
    broken: bytes,
) -> None:
    """Bytes that are no message of pgoutput end the daemon with exit 3 and their place; the next one gets it all."""
    route = plain_route(source_db, target_db, new_slot)
    with CutProxy("127.0.0.1", int(source_db.rows("SELECT inet_server_port()")[0][0])) as proxy:
        daemon = start_daemon(replace(route, source_dsn=proxy.dsn(source_db.source_role_dsn)))
        source_db.execute("INSERT INTO item VALUES (1, 1)")
        daemon.wait_caught_up()
        is_done = proxy.corrupt_reply(_CELL, broken)
        source_db.execute(f"INSERT INTO item VALUES (2, {_VALUE.decode()})")
        assert daemon.exit_code(30) == 3, daemon.log_tail()
        assert is_done.is_set()
    assert daemon.failure.startswith("pgoutput message 'I', offset ")
    assert target_db.rows("SELECT count(*) FROM item") == [(1,)]
    again = start_daemon(route)
    again.finish()
    check_equal(route)
