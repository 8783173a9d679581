"""A publisher that streams a transaction with subtransactions, and a target that knows savepoints.

In go wishes; out come the frames that PostgreSQL sends for them, in its order, and what must be left at the end. The
target is one list of changes, so that a change too many, too few or out of place shows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from parapply.conflict.skips import Skips
from parapply.engine.flight import Flight
from parapply.engine.job import StreamJob
from parapply.engine.state import EngineState
from parapply.errors import TargetRefused
from parapply.plan.batch import Batch
from parapply.plan.table import Plans
from parapply.runtime.apply.large import LargeApply
from parapply.runtime.apply.pieces import PlannedPiece
from parapply.runtime.apply.repair import Repair
from parapply.runtime.apply.streamed import StreamApply
from parapply.runtime.apply.transaction import ApplyRules, TargetTransaction, WorkerKit
from parapply.runtime.pool.pool import WorkerPool, give_way
from parapply.runtime.pool.streams import StreamBuffers, StreamLimits
from parapply.spill import Spill
from parapply.wire.assembler import OVERHEAD_BYTES, Assembler
from parapply.wire.messages import Chunk, StreamAbort
from tests import build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from parapply.engine.job import LargeJob
    from parapply.model import Relation, Transaction
    from parapply.runtime.apply.conflicts import ConflictHandler
    from parapply.runtime.apply.ddl import PiecesWithCommands
    from parapply.runtime.apply.pieces import Pieces
    from parapply.runtime.apply.transaction import CommandRules
    from parapply.runtime.pool.streams import StreamBuffer
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.plans import TablePlans
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import CommandBuilder

XID = 700
#: Bytes that a change counts for in limits, about.
CHANGE_BYTES = OVERHEAD_BYTES + 50
#: Turns of the event loop in which a worker with nothing in its way gets through all there is.
_PATIENCE = 10_000


@dataclass
class _Sub:
    """An open subtransaction; its xid comes with its first change or with the first one inside it."""

    first: int  # index in `changes` of what comes first in it
    xid: int = 0
    is_streamed: bool = False
    released: list[_Sub] = field(default_factory=list)  # inside it, and all inside those


class Publisher:
    """Makes frames from wishes: `write`, `savepoint`, `release`, `rollback`, `chunk`."""

    def __init__(self) -> None:
        """Begin a transaction."""
        #: The rest of the transaction, as frames behind the assembler.
        self.changes: list[bytes] = []
        self._open = [_Sub(0, XID)]
        self._last_xid = XID
        self._n_written = 0
        self._unsent: list[tuple[_Sub, bytes]] = []

    def do(self, wish: str, number: int) -> list[bytes]:
        """Return the frames of a wish; `number` is how many changes, or how many savepoints back."""
        if wish == "write":
            self._write(number)
        elif wish == "savepoint":
            self._open.append(_Sub(len(self.changes)))
        elif wish == "chunk":
            return self._chunk()
        elif len(self._open) > 1:
            depth = max(1, len(self._open) - number)
            return self._release(depth) if wish == "release" else self._roll_back(depth)
        return []

    def end(self) -> list[bytes]:
        """Return the frames of what has not been sent yet; the commit is the caller's."""
        return self._chunk()

    def _write(self, count: int) -> None:
        for sub in self._open:
            # Those around it get theirs first.
            if not sub.xid:
                self._last_xid += 1
                sub.xid = self._last_xid
        for _ in range(count):
            self._n_written += 1
            row = build.row(build.text(b"%d" % self._n_written))
            self.changes.append(build.xlog_data(build.insert(row)))
            self._unsent.append((self._open[-1], build.xlog_data(build.insert(row, xid=self._open[-1].xid))))

    def _chunk(self) -> list[bytes]:
        frames = [frame for _, frame in self._unsent]
        for sub, _ in self._unsent:
            sub.is_streamed = True
        self._unsent = []
        start, stop = build.stream_start(xid=XID), build.stream_stop()
        return [build.xlog_data(start), *frames, build.xlog_data(stop)]

    def _release(self, depth: int) -> list[bytes]:
        gone, self._open = self._open[depth:], self._open[:depth]
        self._open[-1].released += [one for sub in gone for one in [sub, *sub.released]]
        return []

    def _roll_back(self, depth: int) -> list[bytes]:
        """Roll back the savepoints from a depth on, the innermost first; each with what was released inside it."""
        gone, self._open = self._open[depth:], self._open[:depth]
        frames: list[bytes] = []
        for sub in reversed(gone):
            inside = sorted(sub.released, key=lambda one: one.xid)
            told = [one.xid for one in [*inside, sub] if one.is_streamed]
            frames += [build.xlog_data(build.stream_abort(xid=XID, subxid=xid)) for xid in told]
        del self.changes[gone[0].first :]
        dropped = {id(one) for sub in gone for one in [sub, *sub.released]}
        self._unsent = [one for one in self._unsent if id(one[0]) not in dropped]
        return frames


class Target:
    """Stands for a worker's session, its tables, and the pieces it applies; a transaction is a list of changes."""

    def __init__(self) -> None:
        """Start without a transaction."""
        self.changes: list[bytes | Relation] = []
        self._marks: list[int] = []
        #: True if it refuses a change that is executed now: what follows learns that when it settles.
        self.refuses = False
        self.current: Mapping[int, object] = {}

    async def begin(self) -> None:
        """Begin."""
        assert not self.changes, "the one before was not rolled back"

    async def rollback(self) -> None:
        """Forget all."""
        self.changes, self._marks, self.refuses = [], [], False

    async def savepoint(self, depth: int) -> None:
        """Set a savepoint inside `depth` others."""
        assert depth == len(self._marks), "savepoints nest"
        self._marks.append(len(self.changes))

    async def rollback_to(self, depth: int) -> None:
        """Go back to a savepoint and forget it."""
        del self.changes[self._marks[depth] :]
        del self._marks[depth:]

    async def plan(self, piece: Transaction) -> PlannedPiece:
        """Plan a piece, some time later."""
        await asyncio.sleep(0)
        assert piece.changes, "a piece without changes"
        return PlannedPiece(piece, {}, None, [], {})

    def start(self, planned: PlannedPiece) -> None:
        """Apply a piece."""
        self.changes += planned.piece.changes

    async def add(self, piece: Transaction) -> None:
        """Do both."""
        self.start(await self.plan(piece))

    async def settle(self) -> None:
        """Nothing is under way."""
        if self.refuses:
            raise TargetRefused("a change")

    async def abandon(self) -> None:
        """Nothing is under way."""

    stop = abandon
    done: tuple[object, ...] = ()
    has_commands = False

    async def resolve_streamed(self, relations: Sequence[Relation]) -> None:
        """Every table is known."""

    def plans_from(self, current: Mapping[int, object]) -> Plans:
        """No table is serial."""
        del current
        plans = Plans()
        plans.may_be_serial = False
        return plans


class _Following(StreamApply):
    """With a target in place of pieces."""

    def _pieces(self) -> Pieces:
        return cast("Pieces", self._session)

    def _large(self, end: Transaction) -> LargeApply:
        return _AtOnce(self._job, self._target, self._repair, self._kit, end)


class _AtOnce(LargeApply):
    """With a target in place of pieces."""

    def _pieces(self, commit_lsn: int) -> PiecesWithCommands:
        del commit_lsn
        return cast("PiecesWithCommands", self._session)


class _Ended(TargetTransaction):
    """That records nothing."""

    async def finish(self, job: LargeJob | StreamJob, end: Transaction) -> None:
        """Leave what was applied where it is."""


class _NothingFails:
    """In place of the conflict handler: no skip is wanted, and nothing is a conflict."""

    def __init__(self) -> None:
        self.skips = Skips("parapply", 0, {})

    def count(self, job: StreamJob, conflicts: Sequence[object]) -> None:
        assert not conflicts, job


class Subscriber:
    """Real streams, with at most one worker that follows the one transaction, on a `Target`."""

    def __init__(self, directory: Path, limits: StreamLimits, *, piece_bytes: int) -> None:
        """Follow nothing."""
        self.spill = Spill(directory, 1 << 30)
        self.streams = StreamBuffers(self.spill, limits)
        self.target = Target()
        self._pool = WorkerPool(Flight(EngineState(0, 0.0), max_followers=1))
        self._assembler = Assembler(piece_bytes)
        self._piece_bytes = piece_bytes
        self._stream: StreamBuffer | None = None
        self._job: StreamJob | None = None
        self._worker: asyncio.Task[bool] | None = None

    async def take(self, frames: Sequence[bytes], *, may_follow: bool) -> None:
        """Take frames; have a worker follow the transaction if it is large and that is wanted."""
        for event in self._assembler.push(frames):
            if isinstance(event.event, Chunk):
                stream = self._stream = await self.streams.add(event, event.event, 0)
                if may_follow and self.streams.is_worth_a_worker(stream):
                    self._job = StreamJob(Batch(0), {}, stream)
                    self.streams.follow(stream)
                    self._pool.follow(self._job)
                    assert await self._pool.next_job() is self._job
                    self._worker = asyncio.create_task(self._streamed(self._job).apply())
            else:
                assert isinstance(event.event, StreamAbort)
                self.streams.abort(event.event)

    async def settle(self) -> None:
        """Wait until the worker has nothing left to do, or has given up."""
        stream = self._stream
        for _ in range(_PATIENCE):
            if stream is None or self._worker is None or self._worker.done() or not stream.todo:
                return
            await asyncio.sleep(0)

    def yield_to_others(self) -> None:
        """Make the worker roll back, if there is one."""
        if self._job is not None and self._job.stream.is_followed:
            give_way(self._job)

    def refuse(self) -> None:
        """Have the target refuse what the worker has executed, if there is one."""
        self.target.refuses = self._job is not None and self._job.stream.is_followed

    async def end(self, event: Transaction) -> list[bytes | Relation]:
        """Let the transaction commit and return what was applied of it.

        Raises:
            TimeoutError: a worker waits for ever.
        """
        stream = self.streams.ending(event)
        self.streams.take(event)
        follower = self._pool.flight.follower_of(stream)
        job = follower if follower is not None else StreamJob(Batch(0), {}, stream)
        job.batch = Batch(1)
        job.batch.end_lsn = 1
        self._pool.submit(job, 0.0)
        async with asyncio.timeout(5):
            if self._worker is None or not await self._worker:
                assert follower is None, "it follows, but has not committed"
                await self._streamed(job).apply()
        return self.target.changes

    async def close(self) -> None:
        """Let the transaction be rolled back on the publisher; a worker that follows it leaves.

        Raises:
            TimeoutError: a worker waits for ever.
        """
        self.streams.drop(XID)
        if self._worker is not None:
            async with asyncio.timeout(5):
                assert not await self._worker, "nothing is committed"

    def _streamed(self, job: StreamJob) -> StreamApply:
        session = cast("WorkerSession", self.target)
        kit = WorkerKit(
            pool=self._pool,
            builder=cast("CommandBuilder", None),
            tables=cast("TablePlans", self.target),
            conflict_handler=cast("ConflictHandler", _NothingFails()),
            two_phase=cast("TwoPhase", None),
            rules=ApplyRules(commands=cast("CommandRules", None), piece_bytes=self._piece_bytes, stops_on_error=True),
            is_applied=lambda _: False,
        )
        return _Following(job, _Ended(session, kit), Repair(session, kit), kit)
