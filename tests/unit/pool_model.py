"""Workers of a real pool on a target of dictionaries, which takes no statement that PostgreSQL would not take at once.

In go wishes for a parent with a unique column and its child; out come the rows of both sides. The publisher sends whole
old rows, so everything that one transaction frees for another is on the wire: a right planner has nothing refused.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parapply.engine.flight import CommitTurn, Flight
from parapply.engine.job import SetJob
from parapply.engine.state import EngineState
from parapply.model import FRAME_HEADER_BYTES
from parapply.plan.steps import TablesStep, TruncateStep
from parapply.plan.table_changes import NET_ABSENT, NET_DELETE, NET_INSERT, NetSegment, RowSegment
from parapply.runtime.pool.pool import WorkerPool
from parapply.wire.decode import decode
from parapply.wire.messages import Truncate
from parapply.wire.rows import text_of, values_of
from tests import build
from tests.unit.changes_stream import batches
from tests.unit.foreign_key_model import CHILD, PARENT, Op, Row, Rows, Source, apply_frame, moved_rows, refused, view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from parapply.plan.batch import Batch
    from parapply.plan.table_changes import TableChanges

#: Turns of the event loop without anything happening: then nothing will.
_PATIENCE = 500
#: Share of commits that the target refuses once, as a deferred trigger or a lost connection does (trap T-35).
_FAILED_COMMITS = 0.1


class TruncatingSource(Source):
    """A publisher whose wishes may be `truncate`: the table of the wish, a parent with its child."""

    def _do(self, op: Op) -> None:
        if op.kind != "truncate":
            super()._do(op)
            return
        tables = (PARENT, CHILD) if op.table == PARENT else (CHILD,)
        self.rows = {**self.rows, **{table: {} for table in tables}}
        self._changes.append(build.xlog_data(build.truncate(*tables)))


@dataclass
class _Open:
    """A target transaction."""

    written: dict[tuple[int, int], Row | None] = field(default_factory=dict)  # None: the row is gone
    truncated: set[int] = field(default_factory=set)


class CrewTarget:
    """Workers that take any time for each of their steps."""

    def __init__(self, random: Random, *, n_workers: int, is_relaxed: bool) -> None:
        """Start empty."""
        self.rows: Rows = {PARENT: {}, CHILD: {}}
        self.commits: list[int] = []
        self._random = random
        self._n_workers = n_workers
        self._is_relaxed = is_relaxed
        self._open: dict[int, _Open] = {}
        self._n_steps = 0

    async def run(self, batches: Sequence[Batch]) -> None:
        """Submit batches while workers apply them.

        Raises:
            AssertionError: something was refused or waits for a lock, or nothing goes on.
        """
        self._pool = WorkerPool(Flight(EngineState(0, 0.0, is_relaxed=self._is_relaxed)))
        workers = [asyncio.create_task(self._work()) for _ in range(self._n_workers)]
        try:
            for batch in batches:
                await self._steps()
                self._pool.submit(SetJob(batch, {}), 0.0)
            await self._wait_until_idle(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _wait_until_idle(self, workers: Sequence[asyncio.Task[None]]) -> None:
        idle, seen = 0, self._n_steps
        while self._pool.flight.state.jobs or self._open:
            await asyncio.sleep(0)
            for worker in workers:
                if worker.done():
                    worker.result()
            idle, seen = (idle + 1 if seen == self._n_steps else 0), self._n_steps
            assert idle < _PATIENCE, "nothing goes on"

    async def _steps(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 3, 9))):
            await asyncio.sleep(0)
        self._n_steps += 1

    async def _work(self) -> None:
        while True:
            job = await self._pool.next_job()
            assert isinstance(job, SetJob)
            if job.batch.is_suspect or not await self._attempt(job):
                await self._pool.head_turn(job)
                self._in_order(job.batch)
                await self._steps()
                self._commit(job.batch)
            await self._steps()
            self._pool.committed(job, 0.0)

    async def _attempt(self, job: SetJob) -> bool:
        """Execute and commit; False if the commit failed."""
        batch = job.batch
        self._open[batch.seq] = _Open()
        self._execute(batch, is_late=False)
        await self._steps()
        assert await self._pool.turn(job) is CommitTurn.COMMIT
        self._execute(batch, is_late=True)
        await self._steps()
        if self._random.random() < _FAILED_COMMITS:
            del self._open[batch.seq]
            return False
        self._commit(batch)
        return True

    def _commit(self, batch: Batch) -> None:
        self.rows = self._view(self._open.pop(batch.seq))
        assert not refused(self.rows), "committed what the source never had"
        self.commits.append(batch.seq)

    def _execute(self, batch: Batch, *, is_late: bool) -> None:
        for step in batch.steps:
            if isinstance(step, TablesStep):
                for changes in step.tables.values():
                    self._table(batch.seq, changes, is_late=is_late)
            elif not is_late:
                assert isinstance(step, TruncateStep)
                self._truncate(batch.seq, [plan.facts.oid for plan in step.plans])
        assert not refused(self._view(self._open[batch.seq])), "a constraint refuses what the wire foretold"

    def _table(self, seq: int, changes: TableChanges, *, is_late: bool) -> None:
        table = changes.plan.facts.oid
        for segment in changes.segments:
            if isinstance(segment, NetSegment):
                for key, (effect, values) in segment.net.items():
                    if (key in changes.late_keys) is is_late:
                        row_id, value = [_number(each) for each in values_of(values)]
                        assert row_id is not None
                        self._net(seq, table, effect, (row_id, value))
            elif not is_late:
                assert isinstance(segment, RowSegment)
                for frame in segment.frames:
                    old, new = moved_rows(frame)
                    self._net(seq, table, NET_DELETE, old)
                    self._net(seq, table, NET_INSERT, new)

    def _net(self, seq: int, table: int, effect: int, row: Row) -> None:
        is_there = row[0] in self._view(self._open[seq])[table]
        assert is_there is (effect not in (NET_INSERT, NET_ABSENT)), "the count is wrong"
        if effect != NET_ABSENT:
            self._write(seq, table, {row[0]: None if effect == NET_DELETE else row})

    def _write(self, seq: int, table: int, rows: dict[int, Row | None]) -> None:
        for other, open_ in self._open.items():
            if other != seq:
                assert table not in open_.truncated, "a statement waits for a TRUNCATE"
                assert not any((table, key) in open_.written for key in rows), "a statement waits for a row"
        self._open[seq].written |= {(table, key): row for key, row in rows.items()}

    def _truncate(self, seq: int, tables: Sequence[int]) -> None:
        written = {table for other, open_ in self._open.items() if other != seq for table, _ in open_.written}
        assert not written & set(tables), "TRUNCATE waits for a row"
        for table in tables:
            self._write(seq, table, dict.fromkeys(self._view(self._open[seq])[table]))
            self._open[seq].truncated.add(table)

    def _in_order(self, batch: Batch) -> None:
        """Apply every change as it was sent, with everything earlier committed."""
        open_ = self._open[batch.seq] = _Open()
        for transaction in batch.transactions:
            for frame in transaction.changes:
                assert isinstance(frame, bytes)
                if tables := _truncated(frame):
                    self._truncate(batch.seq, tables)
                else:
                    apply_frame(open_.written, frame)
        assert not refused(self._view(open_)), "refused at the head"

    def _view(self, open_: _Open) -> Rows:
        return view(self.rows, open_.written)


def _number(value: bytes | None) -> int | None:
    assert value is not None, "every value is sent"
    text = text_of(value)
    return None if text is None else int(text)


def _truncated(frame: bytes) -> tuple[int, ...]:
    message = decode(frame[FRAME_HEADER_BYTES:])
    return tuple(message.relation_oids) if isinstance(message, Truncate) else ()


def check_equal(
    wishes: Sequence[Op], sizes: Sequence[int], random: Random, *, n_workers: int, is_relaxed: bool
) -> None:
    """Apply what a publisher makes of wishes, and compare.

    Raises:
        AssertionError: rows differ, commits left the source's order although it is kept, or see `CrewTarget.run`.
    """
    source = TruncatingSource(is_full=True, is_enforced=True)
    source.run(wishes)
    made = batches(source.transactions, source.plans, sizes)
    target = CrewTarget(random, n_workers=n_workers, is_relaxed=is_relaxed)
    asyncio.run(target.run(made))
    assert target.rows == source.rows, "rows differ"
    seqs = [batch.seq for batch in made]
    commits = sorted(target.commits) if is_relaxed else target.commits
    assert commits == seqs, "commits out of order"
