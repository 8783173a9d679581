"""After which errors a daemon that has not served yet tries again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from parapply.errors import TargetLost
from parapply.runtime.daemon import Leader

_FAILED = 'target, connecting: connection failed: connection to server at "127.0.0.1", port 5432 failed: FATAL:  '


@pytest.mark.parametrize(
    ("text", "may_retry"),
    [
        ('password authentication failed for user "p"', False),
        ('Peer authentication failed for user "p"', False),
        ('pg_hba.conf rejects connection for host "::1", user "p", database "d", no encryption', False),
        ('database "d" does not exist', False),
        ('role "p" does not exist', False),
        ('unrecognized configuration parameter "x"', False),
        ("sorry, too many clients already", True),
        ("the database system is starting up", True),
        ("tut mir leid, schon zu viele Verbindungen", True),
        ("das Datenbanksystem startet", True),
    ],
)
def test_only_a_known_refusal_ends_the_first_attempt(text: str, may_retry: bool) -> None:  # noqa: FBT001
    """A server that starts up or is full passes, in whatever language it says so; a wrong setting is said at once."""
    for has_served in (False, True):
        leader: Any = SimpleNamespace(_has_served=has_served)
        assert Leader._may_retry(leader, TargetLost(f"{_FAILED}{text}")) is (may_retry or has_served)
