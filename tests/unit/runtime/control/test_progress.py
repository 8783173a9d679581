"""When the publisher is asked where it is, and that its answer moves the watermark."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from parapply.engine.durability import Durability, Reporting
from parapply.engine.flight import Flight
from parapply.engine.job import SetJob
from parapply.engine.state import EngineState
from parapply.errors import SourceLost
from parapply.model import Until
from parapply.plan.batch import Batch
from parapply.runtime.control.progress import Progress
from parapply.runtime.rest import Rest
from parapply.target.state.slots import StatePlace
from parapply.tasks import end_tasks
from parapply.vocabulary import DaemonState, Reading
from parapply.wire.copy import Keepalive

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from parapply.engine.job import Job
    from parapply.target.state.slots import SlotProgress

_AT_LSN = 100
_SOURCE_LSN = 500


class _Stream:
    """Takes reports; `asked` is set by one that wants an answer, `told` by each."""

    is_synchronous = False
    confirmed_flush_lsn = 0
    shown = "stream"
    reading = Reading.STREAM

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.told = asyncio.Event()
        #: Written, flushed and applied, of each report.
        self.reports: list[tuple[int, ...]] = []

    def send_status(self, *lsns: int, reply_requested: bool) -> None:
        self.reports.append(lsns)
        self.told.set()
        if reply_requested:
            self.asked.set()


class _Lab:
    """The task with a stream, a reader, a batcher and a worker pool of a test; nothing reaches a server."""

    def __init__(self, *, advance_interval_s: float = 0.01, is_apply_durable: bool = False) -> None:
        self.stream = _Stream()
        loop = asyncio.get_running_loop()
        self.reader: Any = SimpleNamespace(is_paused=False, heard_s=loop.time(), stream=self.stream)
        pool = SimpleNamespace(rest=Rest())
        tables = SimpleNamespace(plans=SimpleNamespace(may_be_serial=False), has_code=False)
        self.batcher: Any = SimpleNamespace(
            received_lsn=_AT_LSN, holds_nothing=True, large=None, pool=pool, tables=tables
        )
        self.engine = EngineState(_AT_LSN, loop.time())
        self.engine.source_lsn = _SOURCE_LSN
        reporting = Reporting(
            advance_interval_s=advance_interval_s,
            status_interval_s=60,
            receive_timeout_s=60,
            is_apply_durable=is_apply_durable,
            until=Until(),
            ask_idle_s=0.0,
        )
        durability = Durability(Flight(self.engine), reporting, loop.time())
        parts: list[Any] = [SimpleNamespace(), StatePlace("parapply", "s", 1), self.reader, self.batcher, durability]
        self.progress = Progress(*parts)

    def begin(self) -> None:
        """Have a batch in flight."""
        self.engine.jobs[1] = SetJob(Batch(1), {})

    def commit(self, lsn: int) -> None:
        """Have a batch commit that ends at an LSN, while another one is in flight."""
        self.begin()
        self.engine.watermark.low_lsn = lsn
        self.progress.committed(
            cast(
                "Job",
                SimpleNamespace(
                    batch=SimpleNamespace(commit_time_us=0),
                    times=SimpleNamespace(committed_s=0.0),
                    is_left_out=False,
                ),
            )
        )


@pytest.fixture(autouse=True)
def _no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    async def advance(*_: object) -> None:
        """Write nothing."""

    monkeypatch.setattr("parapply.target.state.slots.advance", advance)


async def _while_running(lab: _Lab, work: Callable[[], Awaitable[object]]) -> None:
    lab.progress.report()
    running = asyncio.create_task(lab.progress.run(), name="progress")
    reporting = asyncio.create_task(lab.progress.report_at_once(), name="reports")
    try:
        await work()
    finally:
        lab.progress.finish(DaemonState.STOPPED, "")
        await running
        await end_tasks([reporting])


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
        assert lab.engine.watermark.low_lsn == 300

    await _while_running(lab, work)


async def test_at_rest_a_position_is_taken_at_once_and_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no lag. The task sleeps on until rest ends, which a command's call does, and then it is written."""
    monkeypatch.setattr("parapply.runtime.rest.QUIET_S", 0.0)
    lab = _Lab()
    lab.engine.source_lsn = _AT_LSN
    rest = lab.batcher.pool.rest
    rest.allow(lambda: True)
    rest.look()
    written: asyncio.Queue[SlotProgress] = asyncio.Queue()

    async def advance(_conn: object, _schema: str, _slot_id: int, progress: SlotProgress) -> None:
        written.put_nowait(progress)

    monkeypatch.setattr("parapply.target.state.slots.advance", advance)

    async def work() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        assert lab.progress.is_at_rest
        turns = lab.progress.turns
        lab.progress.keepalive(Keepalive(end_lsn=300, send_time_us=0, reply_requested=False))
        assert lab.engine.watermark.low_lsn == 300
        for _ in range(5):
            await asyncio.sleep(0)
        assert lab.progress.turns == turns
        rest.end()
        row = await asyncio.wait_for(written.get(), 5)
        assert (row.low_lsn, row.shown_every_s) == (300, 1.0)

    await _while_running(lab, work)


@pytest.mark.parametrize("why", ["working", "inside a transaction", "at the end"])
async def test_it_does_not_ask_without_need(why: str) -> None:
    """A daemon that has something in hand learns by its commits, and one that is at the end knows it."""
    lab = _Lab()
    if why == "working":
        lab.begin()
    lab.batcher.holds_nothing = why != "inside a transaction"
    if why == "at the end":
        lab.engine.source_lsn = _AT_LSN

    async def work() -> None:
        turns = lab.progress.turns
        while lab.progress.turns < turns + 3:
            lab.progress._wake.set()
            await asyncio.sleep(0)

    await _while_running(lab, work)
    assert not lab.stream.asked.is_set()


async def test_nothing_is_said_after_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor's last look before the end does not show a daemon that stops as one that runs."""
    said: list[tuple[str, str]] = []

    async def advance(*arguments: object) -> None:
        written = cast("SlotProgress", arguments[-1])
        said.append((written.state, written.reason))

    monkeypatch.setattr("parapply.target.state.slots.advance", advance)
    lab = _Lab()
    lab.progress.report()
    running = asyncio.create_task(lab.progress.run(), name="progress")
    await lab.stream.told.wait()
    lab.progress.finish(DaemonState.STOPPED, "a conflict")
    lab.engine.reason = "late on purpose"
    await running
    assert said[-1] == (DaemonState.STOPPED, "a conflict")


async def test_the_row_goes_on_while_the_monitor_waits_for_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that are not applied grow older, and a batch that fails shows, without a check of the publisher."""
    lab = _Lab()
    lab.engine.lag_s, lab.engine.looked_s = 1.0, asyncio.get_running_loop().time() - 100
    lab.engine.troubles[7] = "a conflict"
    written: asyncio.Queue[SlotProgress] = asyncio.Queue()

    async def advance(_conn: object, _schema: str, _slot_id: int, progress: SlotProgress) -> None:
        written.put_nowait(progress)

    monkeypatch.setattr("parapply.target.state.slots.advance", advance)
    await lab.progress.advance()
    row = written.get_nowait()
    assert row.lag_s is not None
    assert row.lag_s >= 101
    assert (row.state, row.reason) == (DaemonState.RETRYING, "a conflict")


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


@pytest.mark.parametrize("is_apply_durable", [False, True])
async def test_who_waits_is_told_at_once_what_is_visible_and_what_is_durable(
    monkeypatch: pytest.MonkeyPatch, *, is_apply_durable: bool
) -> None:
    """With no timer due, a commit is reported as applied before the flush, and as flushed only after it (T-1).

    A commit during a flush is not made durable by it: the next one follows. Commits that are durable without it need
    none.
    """
    lab = _Lab(advance_interval_s=3600, is_apply_durable=is_apply_durable)
    lab.stream.is_synchronous = True
    flushing: asyncio.Queue[int] = asyncio.Queue()
    flushed = asyncio.Semaphore(0)

    async def flush(*arguments: object) -> None:
        flushing.put_nowait(cast("int", arguments[-2]))
        await flushed.acquire()

    monkeypatch.setattr("parapply.target.state.slots.flush", flush)

    async def told(*lsns: int) -> None:
        while lsns not in lab.stream.reports:
            lab.stream.told.clear()
            await lab.stream.told.wait()

    async def work() -> None:
        await told(_AT_LSN, _AT_LSN, _AT_LSN)
        lab.batcher.received_lsn = 400
        lab.progress.received()
        await told(400, _AT_LSN, _AT_LSN)
        lab.commit(200)
        # Not at the next turn of the event loop: a single client waits for every one of them.
        assert lab.stream.reports[-1] == (400, 200 if is_apply_durable else _AT_LSN, 200)
        if is_apply_durable:
            assert flushing.empty()
            return
        assert await flushing.get() == 200
        lab.commit(300)
        await told(400, _AT_LSN, 300)
        flushed.release()
        assert await flushing.get() == 300
        assert (400, 200, 300) in lab.stream.reports
        flushed.release()
        await told(400, 300, 300)

    await _while_running(lab, work)


async def test_a_stream_that_ends_at_a_report_of_a_commit_is_no_error_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its task goes on and the batch counts as committed; the task of the reports ends with the error."""
    lab = _Lab(is_apply_durable=True)
    lab.stream.is_synchronous = True
    reporting = asyncio.create_task(lab.progress.report_at_once(), name="reports")

    def send_status(*_: int, reply_requested: bool) -> None:
        assert not reply_requested
        raise SourceLost("the stream ended.")

    monkeypatch.setattr(lab.stream, "send_status", send_status)
    lab.commit(200)
    assert lab.engine.durable_lsn == 200
    with pytest.raises(SourceLost):
        await reporting


async def test_a_commit_is_not_believed_where_code_may_have_made_it_quick() -> None:
    """Trusted code also may set synchronous_commit to off, and its session keeps that: an advance makes it durable."""
    lab = _Lab(is_apply_durable=True)
    lab.batcher.tables.has_code = True
    lab.commit(200)
    assert lab.engine.durable_lsn == _AT_LSN
    await lab.progress.advance()
    assert lab.engine.durable_lsn == 200
    lab.batcher.tables.has_code = False
    lab.commit(300)
    assert lab.engine.durable_lsn == 300


async def test_reports_wait_for_their_time_where_no_commit_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits under load cost neither a report nor a flush each."""
    lab = _Lab(advance_interval_s=3600)

    async def flush(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("parapply.target.state.slots.flush", flush)

    async def work() -> None:
        lab.begin()
        await lab.stream.told.wait()
        turns = lab.progress.turns
        for lsn in range(200, 300):
            lab.batcher.received_lsn = lsn
            lab.commit(lsn)
            lab.progress._wake.set()
            await asyncio.sleep(0)
        while lab.progress.turns < turns + 3:
            lab.progress._wake.set()
            await asyncio.sleep(0)
        assert lab.stream.reports == [(_AT_LSN, _AT_LSN, _AT_LSN)]

    await _while_running(lab, work)
