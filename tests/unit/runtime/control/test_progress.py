"""When the publisher is asked where it is, and that its answer moves the watermark."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from parapply.errors import SourceLost
from parapply.plan.watermark import Watermark
from parapply.runtime.control import progress as module
from parapply.runtime.control.progress import Progress
from parapply.runtime.control.shown import Shown
from parapply.vocabulary import DaemonState, Reading
from parapply.wire.frames import Keepalive

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_AT_LSN = 100
_SOURCE_LSN = 500


class _Stream:
    """Takes reports; `asked` is set by one that wants an answer."""

    confirmed_flush_lsn = 0
    shown = "stream"
    reading = Reading.STREAM

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    def send_status(self, *_lsns: int, reply_requested: bool) -> None:
        if reply_requested:
            self.asked.set()


class _Lab:
    """The task with a stream, a reader, a batcher and a worker pool of a test; nothing reaches a server."""

    def __init__(self) -> None:
        self.stream = _Stream()
        loop = asyncio.get_running_loop()
        self.reader: Any = SimpleNamespace(is_paused=False, heard_s=loop.time())
        self.batcher: Any = SimpleNamespace(received_lsn=_AT_LSN, holds_nothing=True)
        self.pool: Any = SimpleNamespace(is_idle=True, watermark=Watermark(_AT_LSN))
        self.shown = Shown()
        self.shown.source_lsn = _SOURCE_LSN
        parts: list[Any] = [SimpleNamespace(), self.stream, self.reader, self.batcher, self.pool]
        self.progress = Progress(
            *parts,
            shown=self.shown,
            schema="parapply",
            slot_id=1,
            advance_interval_s=0.01,
            status_interval_s=60,
            receive_timeout_s=60,
            is_apply_durable=False,
            until_lsn=None,
            on_serving=lambda: None,
        )


@pytest.fixture(autouse=True)
def _no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    async def advance(*_: object) -> None:
        """Write nothing."""

    monkeypatch.setattr("parapply.target.state.slots.advance", advance)
    monkeypatch.setattr(module, "_ASK_IDLE_S", 0.0)


async def _while_running(lab: _Lab, work: Callable[[], Awaitable[object]]) -> None:
    running = asyncio.create_task(lab.progress.run(), name="progress")
    try:
        await work()
    finally:
        lab.progress.finish(DaemonState.STOPPED, "")
        await running


async def test_an_idle_daemon_asks_what_has_been_passed() -> None:
    """WAL of other databases is no lag: with nothing in hand the walsender is asked, and its answer is where we are.

    Busy with such WAL, a walsender says by itself nothing before it is at its end.
    """
    lab = _Lab()

    async def work() -> None:
        await lab.stream.asked.wait()
        lab.progress.keepalive(Keepalive(end_lsn=300, send_time_us=0, reply_requested=False))
        lab.stream.asked.clear()
        await lab.stream.asked.wait()
        assert lab.pool.watermark.low_lsn == 300

    await _while_running(lab, work)


@pytest.mark.parametrize("why", ["working", "inside a transaction", "at the end"])
async def test_it_does_not_ask_without_need(why: str) -> None:
    """A daemon that has something in hand learns by its commits, and one that is at the end knows it."""
    lab = _Lab()
    lab.pool.is_idle = why != "working"
    lab.batcher.holds_nothing = why != "inside a transaction"
    if why == "at the end":
        lab.shown.source_lsn = _AT_LSN

    async def work() -> None:
        turns = lab.progress.turns
        while lab.progress.turns < turns + 3:
            lab.progress._wake.set()
            await asyncio.sleep(0)

    await _while_running(lab, work)
    assert not lab.stream.asked.is_set()


async def test_silence_is_loss_only_of_a_stream() -> None:
    """A range is decoded whole before its first byte comes; the time of a stream counts from its own beginning."""
    now_s = 1000.0
    lab = _Lab()
    lab.progress._clock = lambda: now_s
    lab.reader.heard_s = now_s
    lab.stream.reading = Reading.RANGES
    now_s += 3600
    lab.progress._check_silence()
    lab.stream.reading = Reading.STREAM
    now_s += 59
    lab.progress._check_silence()
    now_s += 1
    with pytest.raises(SourceLost, match="said nothing for 60 s"):
        lab.progress._check_silence()
