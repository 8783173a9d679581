"""Sessions of workers that a target gives, and those that it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psycopg
import pytest

from parapply.errors import TargetLost
from parapply.runtime.worker_sessions import WorkerSessions
from parapply.target.session import session, settings


async def test_a_worker_without_a_connection_is_left_out_in_any_language(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target may have room for some; an error of a session that is open ends the epoch."""
    full = psycopg.OperationalError("connection failed: FATAL:  tut mir leid, schon zu viele Verbindungen")
    monkeypatch.setattr(settings, "open_session", AsyncMock(side_effect=full))
    options: Any = SimpleNamespace(login=None, application_name="")
    sessions: Any = SimpleNamespace(
        _shares_origin=False, _resting=None, _open={}, _first=0, _options=lambda *_: options
    )
    sessions._connect = lambda number: WorkerSessions._connect(sessions, number)
    refused = await WorkerSessions.open(sessions, 2)
    assert isinstance(refused, TargetLost)
    assert "zu viele Verbindungen" in str(refused)
    monkeypatch.setattr(session.WorkerSession, "connect", AsyncMock(side_effect=TargetLost("target, taking the lease")))
    with pytest.raises(TargetLost):
        await WorkerSessions.open(sessions, 2)
