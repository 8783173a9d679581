"""One streamed transaction on its worker: followed chunk by chunk, or applied at its commit.

Following, the worker applies a chunk as soon as every batch that came before it has committed, because it can depend
only on those (trap T-54). Subtransactions are savepoints (T-51).
Batches that come later, and commit before, never wait for it on purpose; if one does on the target, the follower rolls
back, and all is applied at the commit, when everything earlier has committed. It also does so with anything that it
cannot do exactly, or not without blocking others. Only a failure at the commit is a real error.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from parapply import failpoints
from parapply.engine.job import NOTHING_COUNTED, Counted
from parapply.errors import StatementFailed, TargetRefused
from parapply.logs import get_logger
from parapply.plan.steps import is_serial
from parapply.runtime.apply.large import LargeApply
from parapply.runtime.apply.pieces import CodeFound, Pieces
from parapply.runtime.pool.streams import Block, SubAborted, buffer_of, piece_of
from parapply.vocabulary import WorkerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from parapply.engine.job import StreamJob
    from parapply.model import Relation, Transaction
    from parapply.runtime.apply.repair import Repair
    from parapply.runtime.apply.transaction import TargetTransaction, WorkerKit

#: Subtransactions that may be open at a time: each costs a savepoint and splits what could be one set. After the commit
#: it is known which of them count, so none is needed.
_SAVEPOINTS = 64

_IN_THE_WAY = "it was in the way of an earlier transaction"


class _GiveWay(Exception):
    """The follower rolls back; `reason` is shown."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Aborted(Exception):
    """The publisher has rolled the transaction back."""


class _Savepoint(NamedTuple):
    subxid: int
    counted: Counted  # before it


class StreamApply:
    """Used by one worker for one job."""

    def __init__(self, job: StreamJob, target: TargetTransaction, repair: Repair, kit: WorkerKit) -> None:
        """Apply nothing yet; the target has no open transaction, and the repair is for failures at the commit."""
        self._job = job
        self._stream = buffer_of(job)
        self._target = target
        self._session = target.session
        self._repair = repair
        self._kit = kit
        self._pool = kit.pool
        self._tables = kit.tables
        self._savepoints: list[_Savepoint] = []
        #: Last batch that came before the block in hand.
        self._after_seq = 0
        self._log = get_logger()

    async def apply(self) -> bool:
        """Apply the transaction; False if nothing was left to do, or nothing can be done before its commit.

        Raises:
            ApplyFailed: a row still fails when everything earlier has committed.
            SpillFailed: the kept chunks are damaged.
        """
        stream, job = self._stream, self._job
        if stream.is_followed:
            try:
                await self._follow()
            except _GiveWay as way:
                await self._session.rollback()
                job.must_yield = False
                job.attempts += 1
                job.counts.go_back_to(NOTHING_COUNTED)
                self._log.info("stream_spilled", xid=stream.xid, reason=way.reason, size_bytes=stream.size_bytes)
                stream.stop_following(way.reason)
                if stream.end is None:
                    self._pool.leave(job)
                    return False
            else:
                stream.close()
                if not stream.is_aborted:
                    return True
                self._pool.leave(job)
                return False
        await self._at_commit()
        stream.close()
        return True

    async def _follow(self) -> None:
        self._log.info("stream_followed", xid=self._stream.xid, worker=self._job.worker)
        await self._session.begin()
        pieces = self._pieces()
        try:
            while (item := await self._next()) is not None:
                await self._one(item, pieces)
            await pieces.settle()
            self._job.times.executed_s = asyncio.get_running_loop().time()
            await self._wait_until(self._has_turn)
        except StatementFailed as failure:
            await pieces.stop()
            raise _GiveWay(_IN_THE_WAY if self._job.must_yield else _because(failure)) from failure
        except TargetRefused as error:
            await pieces.stop()
            raise _GiveWay(f"refused: {error}") from error
        except _GiveWay:
            await pieces.stop()
            raise
        except _Aborted:
            await pieces.stop()
            await self._session.rollback()
            return
        finally:
            await pieces.abandon()
        end = self._stream.end
        assert end is not None, "a stream that is not aborted ends with an event"
        if self._kit.conflict_handler.skips.find(end.commit_lsn, end.end_lsn) is not None:
            raise _GiveWay("it is to be skipped")
        try:
            await self._target.finish(self._job, end)
        except StatementFailed as failure:
            raise _GiveWay(_because(failure)) from failure

    async def _one(self, item: Block | SubAborted, pieces: Pieces) -> None:
        if isinstance(item, SubAborted):
            await self._sub_aborted(item.subxid, pieces)
            return
        self._after_seq = item.after_seq
        await self._block(item, pieces)

    async def _next(self) -> Block | SubAborted | None:
        """Return the next block or rolled back subtransaction; None at the end."""
        stream = self._stream
        await self._wait_until(lambda: bool(stream.todo) or stream.end is not None, WorkerState.STREAMING)
        if not stream.todo:
            return None
        item = stream.todo.popleft()
        if isinstance(item, Block) and item.piece is not None:
            stream.todo_bytes -= item.size_bytes
        return item

    async def _wait_until(self, is_true: Callable[[], bool], state: WorkerState = WorkerState.WAITING) -> None:
        """Wait for news until `is_true` holds.

        Raises:
            _GiveWay: the worker is to yield, or the changes can no longer be kept.
            _Aborted: the publisher has rolled the transaction back.
        """
        stream, job = self._stream, self._job
        is_waiting = False
        while True:
            if job.must_yield:
                raise _GiveWay(_IN_THE_WAY)
            if stream.failure is not None:
                raise _GiveWay("its changes could not be kept on disk")
            if stream.is_aborted:
                raise _Aborted
            if is_true():
                break
            if not is_waiting:
                is_waiting = True
                self._target.show(state)
            stream.news.clear()
            await stream.news.wait()
        if is_waiting:
            self._target.show(WorkerState.EXECUTING)

    def _has_turn(self) -> bool:
        return self._job.batch.seq > 0 and not self._pool.flight.waits_of(self._job)

    async def _block(self, block: Block, pieces: Pieces) -> None:
        """Apply one block: a piece, or several where subtransactions begin in it."""
        changes = await self._stream.read(block)
        starts = self._new_subs(block)
        bounds = sorted({0, len(changes), *starts})
        for begin, end in pairwise(bounds):
            if begin in starts:
                await self._savepoint(starts[begin], pieces)
            part = changes if len(changes) == end - begin else changes[begin:end]
            await self._piece(part, block.size_bytes * len(part) // len(changes), pieces)

    def _new_subs(self, block: Block) -> dict[int, int]:
        """Return the subtransactions that begin in a block, by the index of their first change."""
        known = {self._stream.xid, *[one.subxid for one in self._savepoints]}
        starts: dict[int, int] = {}
        for index, xid in block.runs:
            if xid not in known:
                known.add(xid)
                starts[index] = xid
        return starts

    async def _piece(self, changes: list[bytes | Relation], size_bytes: int, pieces: Pieces) -> None:
        piece = piece_of(self._stream.xid, changes, size_bytes)
        if self._stream.has_ddl:
            raise _GiveWay("a command of the publisher is among its changes")
        if piece.has_truncate:
            raise _GiveWay("TRUNCATE would lock the table until the commit")
        if any(relation.lacks for relation in piece.relations):
            raise _GiveWay("a column to leave out may have another name, which is looked up at the commit")
        await self._tables.resolve_streamed(piece.relations)
        self._check_not_serial(piece, pieces)
        planned = await pieces.plan(piece)
        await self._wait_until(lambda: self._pool.flight.has_passed(self._after_seq))
        # Counted only now: while many followers wait, reading must continue.
        self._pool.flight.count_in(piece.size_bytes)
        pieces.start(planned)

    def _check_not_serial(self, piece: Transaction, pieces: Pieces) -> None:
        if is_serial(piece, self._tables.plans_from(pieces.current)):
            raise _GiveWay("code runs on the target for a table of it")

    async def _savepoint(self, subxid: int, pieces: Pieces) -> None:
        if len(self._savepoints) >= _SAVEPOINTS:
            raise _GiveWay(f"more than {_SAVEPOINTS} subtransactions")
        await pieces.settle()
        await self._session.savepoint(len(self._savepoints))
        self._savepoints.append(_Savepoint(subxid, self._job.counts.counted()))

    async def _sub_aborted(self, subxid: int, pieces: Pieces) -> None:
        depth = next((depth for depth, one in enumerate(self._savepoints) if one.subxid == subxid), None)
        if depth is None:
            return
        await pieces.settle()
        await self._session.rollback_to(depth)
        self._job.counts.go_back_to(self._savepoints[depth].counted)
        del self._savepoints[depth:]

    async def _at_commit(self) -> None:
        """Apply everything that was kept; the batch is a barrier, so everything earlier has committed."""
        stream, job = self._stream, self._job
        failpoints.probe(failpoints.STREAM_ENDED)
        job.error = stream.why_spilled or "no worker was free to follow it"
        self._target.show(WorkerState.WAITING)
        while not self._has_turn():
            # With nothing held on the target, this job blocks no other.
            stream.news.clear()
            await stream.news.wait()
        self._target.show(WorkerState.EXECUTING)
        end = stream.end
        assert end is not None, "it is applied at its end"
        await self._large(end).apply_kept(self._resolved(), end)

    async def _resolved(self) -> AsyncIterator[Transaction]:
        """Yield all kept pieces; the relations announced in them are known by then."""
        async for piece in self._stream.pieces(self._kit.rules.piece_bytes):
            if not piece.has_ddl:
                await self._tables.resolve_streamed(piece.relations)
            yield piece

    def _pieces(self) -> Pieces:
        return Pieces(self._job, self._session, self._kit, None)

    def _large(self, end: Transaction) -> LargeApply:
        return LargeApply(self._job, self._target, self._repair, self._kit, end)


def _because(failure: StatementFailed) -> str:
    if isinstance(failure, CodeFound):
        return str(failure)
    return f"a change failed ({failure.sqlstate or 'row count'})"
