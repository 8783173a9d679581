"""One streamed transaction on its worker: followed chunk by chunk, or applied at its commit.

Following, a chunk is applied as soon as every batch that came before it has committed: only on those it can depend
(trap T-54). It does not wait for a large one that another worker follows and that touches other tables or other ranges
of keys, as far as is known (`plan/reach.py`); its commit does. Subtransactions are savepoints (T-51). Batches that come
later, and commit before, never wait for it on purpose; if one does on the target, the follower rolls back, and all is
applied at the commit, when everything earlier has committed. It does so, too, with whatever it cannot do exactly, or
not without standing in the way. Only what fails at the commit is a real error.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from parapply import probes
from parapply.conflict.kinds import ConflictStop
from parapply.errors import StatementFailed, TargetRefused
from parapply.logs import get_logger
from parapply.plan.reach import Reach
from parapply.plan.steps import is_serial
from parapply.runtime.job import NOTHING_COUNTED, Counted
from parapply.runtime.pieces import Pieces
from parapply.runtime.streams import Block, SubAborted, piece_of
from parapply.runtime.whole import DataFailed, Whole

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from parapply.model import Relation, Transaction
    from parapply.plan.batch import Batch
    from parapply.runtime.arbiter import Arbiter
    from parapply.runtime.crew import Crew
    from parapply.runtime.job import Job
    from parapply.runtime.pieces import LookAt
    from parapply.runtime.streams import Stream
    from parapply.runtime.tables import Tables
    from parapply.target.commands import Command, CommandBuilder
    from parapply.target.session import WorkerSession

#: Subtransactions that may be open at a time: each costs a savepoint and splits what could be one set. After the
#: commit it is known which of them count, and none is needed.
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


class Streamed:
    """Used by one worker for one job."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        job: Job,
        *,
        session: WorkerSession,
        builder: CommandBuilder,
        tables: Tables,
        crew: Crew,
        whole: Whole,
        arbiter: Arbiter,
        note: Callable[[str], None],
        finish: Callable[[Job, Transaction], Awaitable[None]],
        piece_bytes: int,
    ) -> None:
        """Apply nothing yet.

        Args:
            job: with a stream.
            session: of the worker, with no open transaction.
            builder: of commands.
            tables: to look up what is announced.
            crew: to know what has committed.
            whole: applies it at its commit.
            arbiter: to know whether it is to be skipped.
            note: told what the worker does now, for people and for the stall check.
            finish: records and ends the target transaction as its last event says: by a commit or a prepare.
            piece_bytes: of what is applied at once.
        """
        assert job.stream is not None, "the job has a stream"
        self._job = job
        self._stream: Stream = job.stream
        self._session = session
        self._builder = builder
        self._tables = tables
        self._crew = crew
        self._whole = whole
        self._arbiter = arbiter
        self._note = note
        self._finish = finish
        self._piece_bytes = piece_bytes
        self._savepoints: list[_Savepoint] = []
        #: Last batch that came before the block in hand.
        self._after_seq = 0
        self._log = get_logger()

    async def apply(self) -> bool:
        """Apply the transaction; False if nothing was left to do, or nothing can be done before its commit.

        Raises:
            ApplyFailed: a row still fails when everything earlier has committed.
            SpillFailed: what was kept is damaged.
            TargetLost, TargetRefused, ProtocolError: as everywhere.
        """
        stream, job = self._stream, self._job
        if stream.follower is job:
            try:
                await self._follow()
            except _GiveWay as way:
                await self._session.rollback()
                job.must_yield = False
                job.attempts += 1
                job.count_again_from(NOTHING_COUNTED)
                self._log.info("stream_spilled", xid=stream.xid, reason=way.reason, size_bytes=stream.size_bytes)
                stream.stop_following(way.reason)
                if stream.end is None:
                    return False
            else:
                stream.close()
                return not stream.is_aborted
        await self._at_commit()
        stream.close()
        return True

    async def _follow(self) -> None:
        self._job.mode = "streamed"
        self._log.info("stream_followed", xid=self._stream.xid, worker=self._job.worker)
        await self._session.begin()
        pieces = self._pieces(self._give_way_on_failure)
        try:
            while (item := await self._next()) is not None:
                await self._one(item, pieces)
            await pieces.settle()
            self._job.executed_s = asyncio.get_running_loop().time()
            await self._wait_until(self._has_turn)
        except StatementFailed as failure:
            await pieces.stop()
            raise _GiveWay(_IN_THE_WAY if self._job.must_yield else _because(failure)) from failure
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
        if self._arbiter.skips.find(end.commit_lsn, end.end_lsn) is not None:
            raise _GiveWay("it is to be skipped")
        try:
            await self._finish(self._job, end)
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
        await self._wait_until(lambda: bool(stream.todo) or stream.end is not None, "streaming")
        if not stream.todo:
            return None
        item = stream.todo.popleft()
        if isinstance(item, Block) and item.piece is not None:
            stream.todo_bytes -= item.size_bytes
        return item

    async def _wait_until(self, is_true: Callable[[], bool], state: str = "waiting") -> None:
        """Wait for news until something is true.

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
                self._note(state)
            stream.news.clear()
            await stream.news.wait()
        if is_waiting:
            self._note("executing")

    def _has_turn(self) -> bool:
        return self._job.batch.seq > 0 and not self._crew.waits_of(self._job)

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

    async def _clear(self, piece: Transaction, batch: Batch | None, *, is_checked: bool) -> bool:
        """Wait until a piece may be executed: what came before it has committed, or is apart from it and checked.

        Returns:
            Whether all of that has committed.
        """
        crew, seq = self._crew, self._after_seq
        own = Reach.of(batch)
        if self._stream.reach.join(own):
            # Later ones wait until something is known of a table.
            crew.tell_followers()
        await self._wait_until(lambda: crew.has_passed(seq) or (is_checked and crew.is_beside(seq, own)))
        # Not before: while many wait, reading must go on.
        crew.held_bytes += piece.size_bytes
        return crew.has_passed(seq)

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
        if piece.has_truncate:
            raise _GiveWay("TRUNCATE would lock the table until the commit")
        try:
            await self._tables.resolve_streamed(piece.relations)
            self._check_not_serial(piece, pieces)
            await pieces.add(piece)
        except TargetRefused as error:
            raise _GiveWay(f"refused: {error}") from error

    def _check_not_serial(self, piece: Transaction, pieces: Pieces) -> None:
        if is_serial(piece, self._tables.plans_from(pieces.current)):
            raise _GiveWay("code runs on the target for a table of it")

    async def _savepoint(self, subxid: int, pieces: Pieces) -> None:
        if len(self._savepoints) >= _SAVEPOINTS:
            raise _GiveWay(f"more than {_SAVEPOINTS} subtransactions")
        await pieces.settle()
        await self._session.savepoint(len(self._savepoints))
        self._savepoints.append(_Savepoint(subxid, self._job.counted()))

    async def _sub_aborted(self, subxid: int, pieces: Pieces) -> None:
        depth = next((depth for depth, one in enumerate(self._savepoints) if one.subxid == subxid), None)
        if depth is None:
            return
        await pieces.settle()
        await self._session.rollback_to(depth)
        self._job.count_again_from(self._savepoints[depth].counted)
        del self._savepoints[depth:]

    async def _give_way_on_failure(
        self, failure: StatementFailed, commands: Sequence[Command], piece: Transaction
    ) -> None:
        """Look at what fails while others may be the reason: later, at the commit, they are not."""
        del commands, piece
        raise _GiveWay(_because(failure)) from failure

    async def _at_commit(self) -> None:
        """Apply everything that was kept; the batch is a barrier, so everything earlier has committed."""
        stream, job = self._stream, self._job
        probes.probe(probes.STREAM_ENDED)
        job.mode = "spilled"
        job.error = stream.why_spilled or "no worker was free to follow it"
        self._note("waiting")
        while not self._has_turn():
            # With nothing held on the target there is nobody to give way to.
            stream.news.clear()
            await stream.news.wait()
        self._note("executing")
        # Asked for by somebody who looked before the worker had rolled back.
        job.must_yield = False
        end = stream.end
        assert end is not None, "it is applied at its end"
        whole, whole.end = self._whole, end
        wanted = self._arbiter.skips.find(end.commit_lsn, end.end_lsn)
        if wanted is not None:
            await whole.skip(self._resolved(), wanted)
            return
        await self._session.begin()
        pieces = whole.pieces()
        try:
            async for piece in self._resolved():
                self._crew.held_bytes += piece.size_bytes
                await pieces.add(piece)
            await pieces.settle()
        except (ConflictStop, DataFailed) as stop:
            await self._session.rollback()
            await whole.fail(stop, end)
        finally:
            await pieces.abandon()
        job.executed_s = asyncio.get_running_loop().time()
        await whole.finish(end)

    async def _resolved(self) -> AsyncIterator[Transaction]:
        """Give everything that was kept; what is announced in it is known by then."""
        async for piece in self._stream.pieces(self._piece_bytes):
            await self._tables.resolve_streamed(piece.relations)
            yield piece

    def _pieces(self, look_at: LookAt) -> Pieces:
        return Pieces(
            self._job,
            session=self._session,
            builder=self._builder,
            tables=self._tables,
            crew=self._crew,
            new_look=lambda: look_at,
            clear=self._clear,
        )


def _because(failure: StatementFailed) -> str:
    return f"a change failed ({failure.sqlstate or 'row count'})"
