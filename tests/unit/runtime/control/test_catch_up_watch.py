"""When a stream that has fallen behind is left for ranges of WAL."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from parapply.errors import SourceLost
from parapply.runtime.control.catch_up_watch import CatchUpWatch
from parapply.runtime.rest import Rest
from parapply.source.catch_up import CAUGHT_UP, IN_PROGRESS, IN_PROGRESS_WHOLE, RangeLimits
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_LAG_BYTES = 1000
_LIMITS = RangeLimits(range_bytes=4000, enter_bytes=0, leave_bytes=0, buffer_bytes=1)


async def _may_not() -> bool:
    return False


async def _looks(
    monkeypatch: pytest.MonkeyPatch,
    n_checks: int,
    log_running: Callable[[], Awaitable[bool]] = _may_not,
    *,
    pause_s: float = 0,
    grows_bytes: int = 0,
    **changed: object,
) -> bool:
    """Return whether the stream is left within a number of checks."""
    values: dict[str, Any] = {
        "reading": Reading.STREAM, "reason": CAUGHT_UP, "is_paused": False, "streams": [],
        "large": None, "is_inside_transaction": False,
        "source_lsn": 5000 + _LAG_BYTES, "received_lsn": 5000, **changed,
    }  # fmt: skip
    one: Any = SimpleNamespace(**values)
    one.rest = Rest()
    one.reader = one.stream = one.pool = one.flight = one.state = one
    watch = CatchUpWatch(one, one.streams, log_running, limits=_LIMITS, behind_bytes=_LAG_BYTES, pause_s=pause_s)
    left = n_checks

    async def look(_seconds: float) -> None:
        nonlocal left
        left -= 1
        one.source_lsn = one.source_lsn and one.source_lsn + grows_bytes
        if left < 0:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", look)
    try:
        await watch.run()
    except SourceLost:
        return True
    except asyncio.CancelledError:
        pass
    return False


async def test_three_checks_behind_leave_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not two: a burst is soon read."""
    assert not await _looks(monkeypatch, 2)
    assert await _looks(monkeypatch, 3)
    assert await _looks(monkeypatch, 3, reason=IN_PROGRESS)


@pytest.mark.parametrize(
    "changed",
    [
        {"source_lsn": 5000 + _LAG_BYTES - 1},
        {"source_lsn": None},
        {"is_paused": True},
        {"streams": ["one"]},
        {"large": "one"},
        {"is_inside_transaction": True},
        {"reason": IN_PROGRESS_WHOLE},
        {"reason": "source.catch_up is off"},
        {"reading": Reading.RANGES},
        {"pause_s": 1e9},
    ],
    ids=str,
)
async def test_what_keeps_the_stream(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    """Little behind, or the target behind, or a transaction in progress that would come again, or not for long yet."""
    assert not await _looks(monkeypatch, 10, **changed)


@pytest.mark.parametrize("may", [True, False])
async def test_restart_points_are_asked_for_while_it_is_behind(monkeypatch: pytest.MonkeyPatch, *, may: bool) -> None:
    """A few in each range of WAL, however it is read; never again where the role may not."""
    n_asked = 0

    async def log_running() -> bool:
        nonlocal n_asked
        n_asked += 1
        return may

    for reading in Reading:
        n_asked = 0
        await _looks(monkeypatch, 7, log_running, reading=reading, is_paused=True, grows_bytes=500)
        assert n_asked == (3 if may else 1)
    await _looks(monkeypatch, 7, log_running, reading=Reading.RANGES, received_lsn=9000, grows_bytes=500)
    assert n_asked == (3 if may else 1)
