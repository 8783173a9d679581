"""When a batch closes, and that nothing half read ever reaches a worker."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

import pytest
from msgspec.structs import replace

from parapply.config import ApplyConfig, DdlConfig, TargetConfig
from parapply.engine import intake as closing
from parapply.engine.flight import Flight
from parapply.engine.intake import DueTimes, Room
from parapply.engine.job import LargeJob, SetJob
from parapply.engine.state import EngineState
from parapply.errors import ProtocolError, SourceLost, TargetRefused
from parapply.plan.copy_starts import CopyStarts
from parapply.plan.table import Plans
from parapply.runtime.control.requests import Awaited, Requests
from parapply.runtime.intake import batcher
from parapply.runtime.intake.batcher import Admission, Batcher
from parapply.runtime.intake.commands import CommandTransactions
from parapply.runtime.intake.intake import Intake
from parapply.runtime.intake.reader import SlotReader
from parapply.runtime.intake.special import SpecialTransactions
from parapply.runtime.pool.pool import WorkerPool
from parapply.runtime.pool.streams import StreamBuffers, StreamLimits
from parapply.runtime.pool.two_phase import TwoPhase
from parapply.runtime.shares import share_of
from parapply.spill import Spill
from parapply.target.state.slots import SlotState, StatePlace
from parapply.wire.assembler import Assembler
from parapply.wire.copy import Keepalive
from tests import build
from tests.unit.changes_model import PLAIN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from parapply.engine.job import Job
    from parapply.model import Transaction
    from parapply.runtime.control.progress import Progress
    from parapply.runtime.intake.reader import Taker
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.copied import Copied
    from parapply.runtime.tables.plans import TablePlans
    from parapply.source.catch_up_stream import CatchUpStream
    from parapply.source.slot import StreamSender

#: Microseconds by which a transaction of a backlog was sent after its commit.
LATE_US = 1_000_000
OID = PLAIN.oid


class _Sender:
    async def is_rolled_back(self, _xid: int) -> bool:
        return False


class _Stream:
    """Feeds frames as the socket would: all available ones are drained at once."""

    gathers = True
    is_synchronous = False
    gap_lsn: int | None = None
    waiting_bytes = 0

    def __init__(self) -> None:
        self.waiting: list[list[bytes]] = []
        self.keepalive: Keepalive | None = None
        self.is_drained = True
        self.reading = asyncio.Event()
        self._on_readable: Callable[[], None] = lambda: None

    def feed(self, *frames: bytes) -> None:
        self.waiting.append(list(frames))
        self._on_readable()

    def forget_gap(self, lsn: int) -> None:
        assert self.gap_lsn == lsn
        self.gap_lsn = None

    def drain(self, _limit_bytes: int) -> list[bytes]:
        frames, self.waiting = [frame for part in self.waiting for frame in part], []
        return frames

    def resume_reading(self, on_readable: Callable[[], None]) -> None:
        self.reading.set()
        self._on_readable = on_readable
        if self.waiting:
            on_readable()

    def pause_reading(self) -> None:
        self.reading.clear()


class _Tables:
    """Plans of the model's tables, without a server."""

    def __init__(self) -> None:
        self.plans = Plans()
        plan = PLAIN.plan(0)
        self.plans.known[plan.relation] = plan
        self.plans.announce(plan.relation)

        #: Held by a test while the catalogue is to be slow.
        self.catalogue = asyncio.Lock()
        self.is_read_ahead = False
        #: Held by a test while tables are being read ahead.
        self.reading_ahead = asyncio.Lock()
        self.is_asked = asyncio.Event()
        #: As the table was announced before.
        self.is_announced = False
        self.is_in_doubt = asyncio.Event()
        self.has_changed = False

    def is_in_force(self, _relation: object) -> bool:
        return self.is_announced

    async def read_ahead(self, _relations: Sequence[object]) -> None:
        self.is_asked.set()
        async with self.reading_ahead:
            pass

    def resolve_new(self, relations: Sequence[object]) -> bool:
        return (self.is_read_ahead or not relations) and all(relation in self.plans.known for relation in relations)

    def announced(self, _relations: object) -> None:
        """No table takes another's name."""

    async def resolve(self, relations: Sequence[object]) -> None:
        assert all(relation in self.plans.known for relation in relations)
        async with self.catalogue:
            pass


class _Later:
    def call(self) -> None:
        """Nothing runs later."""

    async def settled(self) -> None:
        """Nothing is under way."""


class _Copied:
    """No table is copied."""

    def __init__(self) -> None:
        self.starts = CopyStarts()
        self.n_changes = 0
        self.gaps: list[int] = []
        #: Held by a test while the publisher is to be slow.
        self.looking = asyncio.Lock()
        self.is_lost = False

    async def look(self, *, gap_lsn: int) -> None:
        self.gaps.append(gap_lsn)
        async with self.looking:
            if self.is_lost:
                raise SourceLost("gone")

    def is_settled(self, relations: Sequence[object], _commit_lsn: int) -> bool:
        return bool(relations)

    def may_follow(self, relations: Sequence[object]) -> bool:
        return bool(relations)

    async def settle(self, relations: Sequence[object], _commit_lsn: int = 0) -> None:
        pass


class _Lab:
    """An intake with a worker pool whose workers take jobs only when the test says so."""

    def __init__(
        self, *, order: str = "preserve", piece_bytes: int = 1 << 30, low_lsn: int = 0, **config: float
    ) -> None:
        self.stream = _Stream()
        self.tables = _Tables()
        engine = EngineState(low_lsn, 0.0, is_relaxed=order == "relaxed")
        flight = Flight(engine)
        self.pool = WorkerPool(flight)
        self.pool.listen(self)
        state = SlotState(
            slot_id=1,
            slot_name="s",
            system_identifier="1",
            timeline=1,
            begin_lsn=0,
            low_lsn=low_lsn,
            ranges=(),
            members=frozenset(),
        )
        limits = ApplyConfig(workers=2, **config)  # type: ignore[arg-type]
        tables = cast("TablePlans", self.tables)
        self.reader = SlotReader(cast("CatchUpStream", self.stream), Assembler(piece_bytes))
        self.batcher = Batcher(self.reader, tables, self.pool, config=limits, state=state, most_places=1_000)
        self.copied = _Copied()
        admits = Admission(
            self.batcher,
            cast("Copied", self.copied),
            TwoPhase(1, {}, cast("StreamSender", _Sender()), is_each_noted=True),
            state,
        )
        self.admission, self.hold = admits, admits.hold
        commands = CommandTransactions(admits, _Later(), DdlConfig(), announces_renamed=True)
        streams = StreamBuffers(Spill(None, 1 << 20), StreamLimits(1 << 20, 1 << 20, 1 << 20))
        #: Each keep-alive's LSN, and whether everything read was in the pool's hands then.
        self.keepalives: list[tuple[int, bool]] = []
        self.n_received = 0
        self.intake = Intake(
            admits,
            SpecialTransactions(admits, commands, streams, piece_bytes=piece_bytes),
            self.batcher,
            room=Room(flight, share_of(limits)),
            due=DueTimes(0, None),
            reports=self,
        )
        self.lsn = 0x1000

    def pool_changed(self) -> None:
        self.intake.worker_changed()

    def batch_committed(self, job: Job) -> None:
        self.pool_changed()

    def keepalive(self, keepalive: Keepalive) -> None:
        self.keepalives.append((keepalive.end_lsn, self.batcher.holds_nothing))

    def received(self) -> None:
        self.n_received += 1

    def ends_at(self, received_lsn: int) -> None:
        """There is no end."""

    def transaction(self, *payloads: bytes, late_us: int = 0) -> list[bytes]:
        """Return the frames of the next transaction; without changes it has one insert."""
        self.lsn += 0x100
        lsn = self.lsn
        changes = payloads or (build.insert(row(str(lsn)), oid=OID),)
        whole = (
            build.begin(final_lsn=lsn, commit_time_us=1000, xid=lsn),
            *changes,
            build.commit(commit_lsn=lsn, end_lsn=lsn + 0x30, commit_time_us=1000),
        )
        return [build.xlog_data(payload, send_time_us=1000 + late_us) for payload in whole]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.intake.run())
        await settle()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def take(self) -> Job:
        """Be an idle worker until a job comes."""
        async with asyncio.timeout(5):
            return await self.pool.next_job()

    async def read(self, *frames: bytes) -> None:
        """Feed transactions that no batch has left with yet, and wait until they are read."""
        self.stream.feed(*frames)
        async with asyncio.timeout(5):
            await self.stream.reading.wait()
        await settle()
        assert not self.batcher.holds_nothing

    def commit(self, job: Job) -> None:
        """Be the worker at its turn."""
        self.pool.committed(job, 0.0)


def row(key: str) -> bytes:
    """Return a row of the plain table."""
    return build.row(build.text(key.encode()), build.text(b"a"), build.null())


def announced(*, xid: int | None = None, replica_identity: str = "d") -> bytes:
    """Return the announcement of the plain table."""
    columns = [
        build.ColumnSpec(column.name, type_oid=column.type_oid, flags=int(column.is_key))
        for column in PLAIN.relation(0).columns
    ]
    return build.relation(*columns, oid=OID, namespace="s", name=PLAIN.name, replica_identity=replica_identity, xid=xid)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_without_a_backlog_each_transaction_leaves_alone_and_at_once() -> None:
    """Merging never adds latency: an idle worker gets the first transaction before a second has come."""
    lab = _Lab()
    async with lab.running():
        for _ in range(2):
            worker = asyncio.create_task(lab.take())
            await settle()
            lab.stream.feed(*lab.transaction())
            job = await worker
            assert len(job.batch.transactions) == 1
            lab.commit(job)


async def test_a_refused_table_keeps_only_its_own_transactions_out_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that is withheld beside its root costs others nothing, and what came before its change is applied."""
    monkeypatch.setattr(closing, "BEHIND_S", 3600.0)
    lab = _Lab()
    lab.tables.plans.may_be_serial = False
    leaf = replace(PLAIN.relation(0), oid=OID + 1, name="leaf")
    lab.tables.plans.refused[leaf] = TargetRefused("leaf is withheld")
    alone: list[Transaction] = []
    monkeypatch.setattr(lab.batcher, "add_whole", alone.append)
    async with lab.running() as task:
        await lab.read(*lab.transaction(), *lab.transaction())
        assert not alone
        lab.stream.feed(*lab.transaction(), *lab.transaction(build.insert(row("1"), oid=leaf.oid)))
        with pytest.raises(TargetRefused, match="withheld"):
            await task
    assert not lab.batcher.is_torn
    assert lab.batcher.taken_lsn == lab.lsn - 0x100 + 0x30


@pytest.mark.parametrize("is_synchronous", [False, True])
async def test_what_came_is_reported_at_once_where_commits_wait_for_it(*, is_synchronous: bool) -> None:
    """Otherwise reports have their own times."""
    lab = _Lab()
    lab.stream.is_synchronous = is_synchronous
    async with lab.running():
        await lab.read(*lab.transaction())
        assert lab.n_received == int(is_synchronous)


async def test_behind_a_batch_under_way_transactions_join_until_it_has_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They could not commit before it, and one commit is cheaper than two: also where another worker is idle."""
    monkeypatch.setattr(closing, "BEHIND_S", 3600.0)
    lab = _Lab()
    async with lab.running():
        first, second = asyncio.create_task(lab.take()), asyncio.create_task(lab.take())
        await settle()
        lab.stream.feed(*lab.transaction())
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        (under_way,) = done
        await lab.read(*lab.transaction(), *lab.transaction())
        await settle()
        (waiting,) = {first, second} - done
        assert not waiting.done()
        lab.commit(await under_way)
        assert len((await waiting).batch.transactions) == 2


@pytest.mark.parametrize(
    ("behind_s", "n_rows", "order"), [(0.0, 1, "preserve"), (3600.0, 200, "preserve"), (3600.0, 1, "relaxed")]
)
async def test_nobody_waits_behind_a_batch_for_long(
    monkeypatch: pytest.MonkeyPatch, behind_s: float, n_rows: int, order: str
) -> None:
    """After a moment, with rows enough for a worker of its own, or in any order, a batch leaves beside another."""
    monkeypatch.setattr(closing, "BEHIND_S", behind_s)
    lab = _Lab(order=order)
    async with lab.running():
        workers = [asyncio.create_task(lab.take()) for _ in range(2)]
        await settle()
        lab.stream.feed(*lab.transaction())
        await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
        lab.stream.feed(*lab.transaction(*[build.insert(row(str(number)), oid=OID) for number in range(n_rows)]))
        assert [len((await worker).batch.transactions) for worker in workers] == [1, 1]


async def test_while_all_workers_are_busy_transactions_gather_in_one_batch() -> None:
    """A batch closes when a worker is free to take it, so what waits is merged."""
    lab = _Lab()
    async with lab.running():
        first = asyncio.create_task(lab.take())
        await settle()
        lab.stream.feed(*lab.transaction())
        job = await first
        for _ in range(3):
            lab.stream.feed(*lab.transaction())
        await settle()
        assert len(lab.pool.flight.state.jobs) == 1, "no worker is free: nothing is closed"
        second = asyncio.create_task(lab.take())
        assert len((await second).batch.transactions) == 3
        lab.commit(job)


async def test_in_a_backlog_a_free_worker_waits_for_more_until_the_stream_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of a backlog grow; one closes all the same when nothing comes for linger_s and a pause of reading.

    The loop's clock is the test's: it stands between two steps, however long they take.
    """
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    lab = _Lab(linger_s=0.05)
    async with lab.running():
        worker = asyncio.create_task(lab.take())
        await settle()
        for _ in range(3):
            lab.stream.feed(*lab.transaction(late_us=LATE_US))
            await settle()
            now_s += 0.002
            await settle()
            assert not worker.done()
        while not worker.done():
            now_s += 0.01
            await settle()
        assert len(worker.result().batch.transactions) == 3
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("limit", "size"),
    [({"max_batch_transactions": 2}, 2), ({"max_batch_changes": 3}, 3), ({"max_batch_bytes": 1024}, 3)],
)
async def test_a_batch_closes_at_its_limits(limit: dict[str, int], size: int) -> None:
    """Transactions, changes and bytes each limit what is merged."""
    lab = _Lab(**limit)  # type: ignore[arg-type]  # none of them is the order
    async with lab.running():
        lab.stream.feed(*[frame for _ in range(size + 1) for frame in lab.transaction(late_us=LATE_US)])
        await settle()
        (job,) = lab.pool.flight.state.jobs.values()
        assert len(job.batch.transactions) == size


async def test_reading_stops_while_enough_batches_wait_and_goes_on_when_one_has_committed() -> None:
    """Back-pressure: the publisher waits, nothing piles up here."""
    lab = _Lab(max_batch_transactions=1)
    async with lab.running():
        for _ in range(10):
            lab.stream.feed(*lab.transaction(late_us=LATE_US))
        await settle()
        assert lab.reader.is_paused
        assert not lab.stream.reading.is_set()
        n_waiting = len(lab.pool.flight.state.jobs)
        assert n_waiting < 10, "transactions that came with it in one read also wait"
        for _ in range(10):
            lab.commit(await lab.take())
            assert len(lab.pool.flight.state.jobs) <= n_waiting
        async with asyncio.timeout(5):
            await lab.stream.reading.wait()
        assert not lab.reader.is_paused


async def test_bytes_that_wait_for_a_busy_intake_do_not_wake_it_again_and_again() -> None:
    """While the catalogue or a large transaction takes its time the socket is left alone; then all of it is read.

    A descriptor that stays readable would call back in every turn of the loop: a core lost just when the target needs
    it. Nor is the publisher silent during that time, however long: `is_paused` says so (progress reads it).
    """
    lab = _Lab()
    announcement = announced()
    async with lab.running():
        await lab.tables.catalogue.acquire()
        lab.stream.feed(*lab.transaction(announcement, build.insert(row("1"), oid=OID), late_us=LATE_US))
        await settle()
        lab.stream.feed(*lab.transaction(late_us=LATE_US))
        assert lab.stream.reading.is_set(), "once is no spin"
        assert not lab.reader.is_paused
        lab.stream.feed(*lab.transaction(late_us=LATE_US))
        assert not lab.stream.reading.is_set()
        assert lab.reader.is_paused
        lab.tables.catalogue.release()
        async with asyncio.timeout(5):
            await lab.stream.reading.wait()
            jobs = [await lab.take()]
            while sum(len(job.batch.transactions) for job in jobs) < 3:
                lab.commit(jobs[-1])
                jobs.append(await lab.take())
        assert not lab.reader.is_paused


@pytest.mark.parametrize(
    ("is_read_ahead", "is_first", "sizes"), [(True, False, [3]), (True, True, [1, 2]), (False, False, [1, 2])]
)
async def test_a_new_table_ends_the_open_batch_only_if_the_catalogue_must_be_asked_or_it_is_the_first(
    sizes: list[int], *, is_read_ahead: bool, is_first: bool
) -> None:
    """A backlog of a thousand tables would begin with as many batches; nothing whole waits for a query."""
    lab = _Lab()
    lab.tables.is_read_ahead = is_read_ahead
    async with lab.running():
        if not is_first:
            under_way = asyncio.create_task(lab.take())
            await settle()
            lab.stream.feed(*lab.transaction())
            lab.commit(await under_way)
        before = lab.batcher.plans_now
        news = lab.transaction(announced(), build.insert(row("1"), oid=OID), late_us=LATE_US)
        await lab.read(*lab.transaction(late_us=LATE_US), *news, *lab.transaction(late_us=LATE_US))
        jobs = [await lab.take() for _ in sizes]
        assert [len(job.batch.transactions) for job in jobs] == sizes
        assert isinstance(jobs[0], SetJob)
        assert jobs[0].plans_before is before


@pytest.mark.parametrize(("held_s", "size"), [(3600.0, 3), (0.0, 1)])
async def test_a_batch_of_a_backlog_stays_open_while_a_new_table_is_being_read_ahead(
    monkeypatch: pytest.MonkeyPatch, held_s: float, size: int
) -> None:
    """The groups that are read one after the other would else be as many batches, each of nearly all tables.

    It does not stay so for long where the target does not answer.
    """
    monkeypatch.setattr(batcher, "_HELD_S", held_s)
    lab = _Lab()
    lab.tables.is_read_ahead = True
    async with lab.running():
        under_way = asyncio.create_task(lab.take())
        await settle()
        lab.stream.feed(*lab.transaction())
        lab.commit(await under_way)
        await lab.tables.reading_ahead.acquire()
        news = lab.transaction(announced(), build.insert(row("1"), oid=OID), late_us=LATE_US)
        taken = asyncio.create_task(lab.take())
        lab.stream.feed(*lab.transaction(late_us=LATE_US), *news, *lab.transaction(late_us=LATE_US))
        async with asyncio.timeout(5):
            await lab.tables.is_asked.wait()
        lab.batcher.close_if_due()
        await settle()
        if held_s:
            assert not taken.done()
            lab.tables.reading_ahead.release()
        async with asyncio.timeout(5):
            job = await taken
        assert len(job.batch.transactions) == size


async def test_a_batch_of_a_backlog_leaves_while_intake_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room may come as late as another batch is held up, and an idle worker need not wait for that."""
    lab = _Lab(linger_s=0.01)
    async with lab.running():
        under_way = asyncio.create_task(lab.take())
        await settle()
        lab.stream.feed(*lab.transaction())
        await under_way
        await lab.read(*lab.transaction(late_us=LATE_US))
        has_stopped = asyncio.Event()
        monkeypatch.setattr(SlotReader, "stop", lambda _: has_stopped.set())
        lab.pool.flight.count_in(1 << 40)
        lab.stream.feed(*lab.transaction(late_us=LATE_US))
        async with asyncio.timeout(5):
            await has_stopped.wait()
        assert lab.batcher.is_taking
        assert len((await lab.take()).batch.transactions) == 1
        assert lab.batcher.is_taking


async def test_what_is_announced_again_as_it_is_ends_no_batch_and_asks_nothing() -> None:
    """Each range of WAL announces all again; whether the target has changed, too, the watch finds out, soon."""
    lab = _Lab()
    lab.tables.is_announced = True
    async with lab.running():
        await lab.tables.catalogue.acquire()  # for ever
        news = lab.transaction(announced(), build.insert(row("1"), oid=OID), late_us=LATE_US)
        await lab.read(*lab.transaction(late_us=LATE_US), *news, *lab.transaction(late_us=LATE_US))
        job = await lab.take()
        assert len(job.batch.transactions) == 3
        assert lab.tables.is_in_doubt.is_set()


async def test_what_a_transaction_announced_that_is_left_out_is_known_to_retries() -> None:
    """A retry starts with the plans before its batch, and meets no announcement but its transactions' own."""
    lab = _Lab()
    lab.tables.is_read_ahead = True
    async with lab.running():
        under_way = asyncio.create_task(lab.take())
        await settle()
        lab.stream.feed(*lab.transaction())
        lab.commit(await under_way)
        lab.tables.plans.current.clear()
        other = PLAIN.plan(0).relation
        lab.batcher.announce([other])
        await lab.read(*lab.transaction(late_us=LATE_US))
        lab.batcher.announce([other])
        await lab.read(*lab.transaction(late_us=LATE_US))
        jobs = [await lab.take(), await lab.take()]
        for job in jobs:
            assert isinstance(job, SetJob)
            assert len(job.batch.transactions) == 1
            assert OID in job.plans_before


@pytest.mark.parametrize("piece_bytes", [1 << 30, 2000], ids=["whole", "large"])
async def test_what_a_stream_has_announced_before_others_is_in_force_for_it_alone(piece_bytes: int) -> None:
    """The later announcement stays in force when the stream ends, because the publisher does not send it again."""
    lab = _Lab(piece_bytes=piece_bytes)
    plan = PLAIN.plan(0)
    older = replace(plan.relation, replica_identity="f")
    lab.tables.plans.known[older] = replace(plan, relation=older)
    insert = build.insert(row("1"), oid=OID, xid=700)
    chunk = (build.stream_start(), announced(xid=700, replica_identity="f"), *[insert] * 5, build.stream_stop())
    async with lab.running():
        lab.stream.feed(
            *[build.xlog_data(payload) for payload in chunk],
            *lab.transaction(announced(), build.insert(row("2"), oid=OID)),
            build.xlog_data(build.stream_commit(commit_lsn=lab.lsn + 0x100, end_lsn=lab.lsn + 0x130)),
        )
        await settle()
        assert lab.batcher.received_lsn == lab.lsn + 0x130
        assert lab.tables.plans.current[OID].relation == plan.relation


async def test_a_streamed_transaction_without_a_change_leaves_no_record() -> None:
    """The publisher sends its end only because it was streamed: looked for later (F14) it would seem to be lost.

    One that was prepared has its end sent in any case. The relations of either are in force.
    """
    lab = _Lab()
    lab.tables.plans.current.clear()
    insert = build.insert(row("1"), oid=OID, xid=701)
    chunk = (build.stream_start(), announced(xid=700), insert, build.stream_stop(), build.stream_abort())
    late = (build.stream_start(), build.stream_stop(), build.stream_prepare(end_lsn=0), build.commit_prepared())
    async with lab.running():
        lab.stream.feed(*[build.xlog_data(payload) for payload in (*chunk, build.stream_commit())])
        await settle()
        assert lab.batcher.holds_nothing
        assert OID in lab.tables.plans.current
        lab.stream.feed(*[build.xlog_data(payload) for payload in late])
        job = await lab.take()
        assert [transaction.end_lsn for transaction in job.batch.transactions] == [0x130]


async def test_what_is_committed_already_is_not_applied_again() -> None:
    """A transaction that ends at or below the watermark was re-sent (trap T-4)."""
    lab = _Lab(low_lsn=0x1130)
    async with lab.running():
        worker = asyncio.create_task(lab.take())
        await settle()
        lab.stream.feed(*lab.transaction(), *lab.transaction())
        job = await worker
        assert [transaction.end_lsn for transaction in job.batch.transactions] == [0x1230]


async def test_half_a_transaction_never_reaches_a_worker() -> None:
    """A change that cannot be read ends the stream; its transaction and what was merged with it are sent again."""
    lab = _Lab()
    async with lab.running() as task:
        malformed = build.insert(build.row(build.text(b"1")), oid=OID)
        good = build.insert(row("7"), oid=OID)
        lab.stream.feed(*lab.transaction(), *lab.transaction(good, malformed))
        with pytest.raises(ProtocolError):
            await task
        assert not lab.pool.flight.state.jobs


async def test_a_large_transaction_goes_to_one_worker_in_pieces() -> None:
    """Its pieces reach the worker before its commit is read, and memory holds a few of them only."""
    lab = _Lab(piece_bytes=2000)
    async with lab.running():
        worker = asyncio.create_task(lab.take())
        await settle()
        frames = lab.transaction(*[build.insert(row(str(key)), oid=OID) for key in range(100)])
        lab.stream.feed(*frames[:-1])
        job = await worker
        assert isinstance(job, LargeJob)
        assert job.batch.is_barrier
        assert lab.batcher.large is not None
        lab.stream.feed(frames[-1])
        n_changes = 0
        while (piece := await job.pieces.get()) is not None:
            n_changes += len(piece.changes)
        assert n_changes == 100
        await settle()
        assert lab.batcher.large is None
        assert job.batch.end_lsn == lab.lsn + 0x30


async def test_a_worker_sends_before_anything_is_reported_and_reading_goes_on() -> None:
    """Reports, and a pause of reading for other clients, are no part of a single transaction's latency."""
    lab = _Lab()

    async def work() -> list[tuple[int, bool]]:
        await lab.pool.next_job()
        return [*lab.keepalives]

    async with lab.running():
        worker = asyncio.create_task(work())
        await settle()
        lab.stream.keepalive = Keepalive(end_lsn=0x9000, send_time_us=1, reply_requested=False)
        lab.stream.feed(*lab.transaction())
        assert await worker == []
        await settle()
        assert lab.keepalives == [(0x9000, True)]
        assert lab.stream.reading.is_set()


async def test_a_keepalive_is_told_after_what_came_before_it() -> None:
    """Its LSN proves something only if everything before it is in the worker pool's hands (trap T-8)."""
    lab = _Lab()
    async with lab.running():
        lab.stream.keepalive = Keepalive(end_lsn=0x9000, send_time_us=1, reply_requested=False)
        lab.stream.feed(*lab.transaction())
        await settle()
        assert lab.keepalives == [(0x9000, False)]
        assert lab.batcher.received_lsn == 0x9000


async def test_a_keepalive_that_comes_alone_wakes_no_task() -> None:
    """It is taken as it comes, unless it asks for an answer or something is open, which intake's task looks at."""
    lab = _Lab()
    async with lab.running():

        def feed(end_lsn: int, *, reply_requested: bool = False) -> None:
            lab.stream.keepalive = Keepalive(end_lsn=end_lsn, send_time_us=1, reply_requested=reply_requested)
            lab.stream.feed()

        feed(0x9000)
        assert lab.keepalives == [(0x9000, True)]
        assert lab.batcher.received_lsn == 0x9000
        feed(0x9100, reply_requested=True)
        assert len(lab.keepalives) == 1
        await settle()
        assert lab.keepalives[1:] == [(0x9100, True)]
        lab.stream.feed(*lab.transaction())
        await settle()
        feed(0x9200)
        assert len(lab.keepalives) == 2
        await settle()
        assert [lsn for lsn, _ in lab.keepalives[2:]] == [0x9200]


async def test_a_transaction_leaves_as_it_comes() -> None:
    """No task is woken before its worker, and the keep-alive behind it is taken by intake's task as ever."""
    lab = _Lab()
    lab.tables.plans.may_be_serial = False
    async with lab.running():
        worker = asyncio.create_task(lab.take())
        await settle()
        lab.stream.keepalive = Keepalive(end_lsn=0x9000, send_time_us=1, reply_requested=False)
        lab.stream.feed(*lab.transaction())
        assert len(lab.pool.flight.state.jobs) == 1
        assert lab.keepalives == []
        await settle()
        assert worker.done()
        assert lab.keepalives == [(0x9000, True)]
        lab.commit(await worker)
        lab.hold.close(lab.lsn)
        lab.stream.feed(*lab.transaction())
        await settle()
        assert lab.hold.is_reached
        assert lab.batcher.is_empty
        assert not lab.pool.flight.state.jobs


@pytest.mark.parametrize("is_lost", [False, True])
async def test_nothing_is_taken_before_the_state_knows_of_a_gap(*, is_lost: bool) -> None:
    """The warning is the only sign of changes that were left out, and does not come again for a later watermark."""
    lab = _Lab()
    lab.tables.plans.may_be_serial = False
    lab.copied.is_lost = is_lost
    async with lab.running() as task:
        worker = asyncio.create_task(lab.take())
        await settle()
        await lab.copied.looking.acquire()
        lab.stream.gap_lsn = 0x2000
        lab.stream.keepalive = Keepalive(end_lsn=0x9000, send_time_us=1, reply_requested=False)
        lab.stream.feed(*lab.transaction())
        await settle()
        assert lab.copied.gaps == [lab.stream.gap_lsn]
        assert not worker.done()
        assert not lab.keepalives
        lab.copied.looking.release()
        await settle()
        assert worker.done() is not is_lost
        assert bool(lab.keepalives) is not is_lost
        assert lab.stream.gap_lsn == (0x2000 if is_lost else None)
        if is_lost:
            worker.cancel()
            with pytest.raises(SourceLost):
                await task


async def test_nothing_leaves_twice_before_a_change_that_cannot_be_read() -> None:
    """A batch that has left as it came is not made again by the task that meets the error."""
    lab = _Lab(max_batch_transactions=1)
    lab.tables.plans.may_be_serial = False
    async with lab.running() as task:
        worker = asyncio.create_task(lab.take())
        await settle()
        malformed = build.insert(build.row(build.text(b"1")), oid=OID)
        lab.stream.feed(*lab.transaction(), *lab.transaction(malformed))
        with pytest.raises(ProtocolError):
            await task
        assert [transaction.end_lsn for transaction in (await worker).batch.transactions] == [0x1130]
        assert len(lab.pool.flight.state.jobs) == 1


async def test_a_keep_alive_behind_what_cannot_be_read_is_not_taken() -> None:
    """It would say that everything before it was returned, and the watermark would pass what was not."""
    lab = _Lab()

    class _TakesNothing:
        def take_first(self, transactions: list[Transaction]) -> list[Transaction]:
            return transactions

    lab.reader.start(cast("Taker", _TakesNothing()))
    task = asyncio.create_task(lab.reader.read())
    await settle()
    lab.stream.feed(*lab.transaction())
    lab.stream.waiting.append([*lab.transaction(), build.xlog_data(b"B", send_time_us=1)])
    lab.stream.keepalive = Keepalive(end_lsn=0x9000, send_time_us=1, reply_requested=False)
    assert [transaction.end_lsn for transaction in await task] == [0x1130]
    assert lab.reader.take_keepalive() is None
    with pytest.raises(ProtocolError):
        await lab.reader.read()


async def test_a_batch_with_a_change_that_cannot_be_read_is_not_passed() -> None:
    """All of it comes again, so a keep-alive that was behind its first transactions says nothing any more."""
    lab = _Lab()
    async with lab.running() as task:
        await lab.read(*lab.transaction())
        lab.stream.feed(*lab.transaction(build.insert(build.row(build.text(b"1")), oid=OID)))
        with pytest.raises(ProtocolError):
            await task
        assert lab.batcher.is_empty
        assert not lab.batcher.holds_nothing


async def test_no_snapshot_stands_on_a_batch_that_was_dropped() -> None:
    """All that was taken is committed and nothing is open, but the transactions before the change are nowhere."""
    lab = _Lab()
    lab.tables.plans.may_be_serial = False
    requests = Requests(
        TargetConfig(), StatePlace("parapply", "s", 1), cast("ControlPool", None), admission=lab.admission,
        progress=cast("Progress", None), awaited=Awaited(two_phase=False, whole_until_lsn=0, delay_s=0.0),
    )  # fmt: skip
    async with lab.running():
        assert requests._stands_at(0)
        lab.stream.feed(*lab.transaction(), *lab.transaction(build.insert(build.row(build.text(b"1")), oid=OID)))
        assert lab.batcher.is_empty
        assert not requests._stands_at(0)


@pytest.mark.parametrize("n_transactions", [0, 1])
async def test_an_end_that_is_met_outside_of_the_task_ends_it(
    monkeypatch: pytest.MonkeyPatch, n_transactions: int
) -> None:
    """After the rows that came before it, which are in the pool's hands then."""
    lab = _Lab()
    held = [lab.transaction() for _ in range(n_transactions)]

    def drain(_limit_bytes: int) -> list[bytes]:
        if held:
            return held.pop()
        raise SourceLost("gone")

    async with lab.running() as task:
        monkeypatch.setattr(lab.stream, "drain", drain)
        lab.stream.feed()
        with pytest.raises(SourceLost):
            await asyncio.wait_for(task, 5)
    jobs = [await lab.take() for _ in range(n_transactions)]
    assert [len(job.batch.transactions) for job in jobs] == [1] * n_transactions
