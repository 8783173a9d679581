"""One transaction applied in pieces at the head: a large one as it comes, or a streamed one at its commit.

Everything earlier has committed, so a failure is judged at once. Its conflicts are settled piece by piece; an error of
the data, or a policy to stop, rolls all of it back. The end LSN of a large one is known only when its last piece has
come. So an error that stops it is reported then, with that LSN, by which it can be skipped. A transaction to be skipped
is recorded as done, in a target transaction that keeps all its changes in the history. A failure before a PREPARE is
judged only if the publisher has not rolled it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from parapply.conflict.kinds import ConflictStop
from parapply.errors import StatementFailed, TargetLost, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.plan.steps import ordered_changes
from parapply.runtime.apply.conflicts import source_of
from parapply.runtime.apply.ddl import (
    CommandFailed,
    PiecesWithCommands,
    SkippedCommands,
    command_failed,
    log_done,
)
from parapply.runtime.apply.failure import FailureClass, apply_failed, classify
from parapply.runtime.apply.repair import DataFailed, PieceRepair, RolledBack, Unwanted
from parapply.wire.messages import Prepare, StreamPrepare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from parapply.engine.job import LargeJob, PieceQueue, StreamJob
    from parapply.errors import ApplyFailed
    from parapply.model import Transaction
    from parapply.runtime.apply.repair import Repair
    from parapply.runtime.apply.transaction import TargetTransaction, WorkerKit
    from parapply.runtime.pool.pool import WorkerPool


class LargeApply:
    """Used by one worker for one transaction."""

    def __init__(
        self,
        job: LargeJob | StreamJob,
        target: TargetTransaction,
        repair: Repair,
        kit: WorkerKit,
        end: Transaction | None = None,
    ) -> None:
        """Apply nothing yet.

        Args:
            job: of the transaction.
            target: with no open transaction.
            repair: of the worker.
            kit: of the workers.
            end: the event that ends it, where that is known from the beginning; its pieces do not carry it then.
        """
        self._job = job
        self._target = target
        self._session = target.session
        self._repair = PieceRepair(job, end, repair, kit)
        self._kit = kit
        self._pool = kit.pool
        self._conflict_handler = kit.conflict_handler
        self._end = end
        #: True if it holds commands, and is sent again if it fails; with commands even a small one comes here.
        self._is_repeated = False
        self._log = get_logger()

    async def apply(self, job: LargeJob) -> None:
        """Apply a large transaction as its pieces come, or skip it.

        Raises:
            ApplyFailed: it cannot be applied.
            TargetLost: the connection ended; or it is to be skipped, which is known only now, and must be sent again.
            TargetRefused, ProtocolError: as everywhere.
        """
        wanted = self._conflict_handler.skips.find(job.commit_lsn, 0)
        if wanted is not None:
            await self._skip(_taken(job.pieces, self._pool), wanted, job.commit_lsn)
            return
        await self._session.begin()
        pieces = self._pieces(job.commit_lsn)
        try:
            last = await pieces.apply(job.pieces)
        except (ConflictStop, DataFailed, CommandFailed, TargetRefused, RolledBack, Unwanted) as stop:
            await self._session.rollback()
            self._is_repeated = pieces.has_commands and not self._kit.rules.stops_on_error
            last = await self._rest(pieces.latest, job.pieces)
            if not await self._is_applied(last):
                await self._fail(stop, last)
        else:
            self._is_repeated = pieces.has_commands and not self._kit.rules.stops_on_error
            if not await self._is_applied(last):
                await self._finish(last)
                log_done(pieces.done, last)

    async def apply_kept(self, kept: AsyncIterator[Transaction], end: Transaction) -> None:
        """Apply a streamed transaction that has ended, or skip it.

        Args:
            kept: all pieces; announcements in them are resolved.
            end: the event that ends it.

        Raises:
            ApplyFailed, TargetLost, TargetRefused, ProtocolError: as `apply`.
            SpillFailed: a piece cannot be read.
        """
        wanted = self._conflict_handler.skips.find(end.commit_lsn, end.end_lsn)
        if wanted is not None:
            await self._skip(kept, wanted, end.commit_lsn)
            return
        # Cancelled while it was followed, for a request that has been taken back since.
        self._job.is_unwanted = False
        await self._session.begin()
        pieces = self._pieces(end.commit_lsn)
        try:
            async for piece in kept:
                self._pool.flight.count_in(piece.size_bytes)
                await pieces.add(piece)
            await pieces.settle()
        except (ConflictStop, DataFailed, CommandFailed, TargetRefused, RolledBack, Unwanted) as stop:
            await self._session.rollback()
            self._is_repeated = pieces.has_commands and not self._kit.rules.stops_on_error
            await self._fail(stop, end)
            return
        finally:
            await pieces.abandon()
        self._is_repeated = pieces.has_commands and not self._kit.rules.stops_on_error
        await self._finish(end)
        log_done(pieces.done, end)

    async def _is_applied(self, last: Transaction) -> bool:
        """Return whether it was committed before the start, which is known only now; then nothing of it stays."""
        if not self._kit.is_applied(last.end_lsn):
            return False
        await self._session.rollback()
        self._repair.succeeded()
        self._job.left_out("committed before the start")
        return True

    def _pieces(self, commit_lsn: int) -> PiecesWithCommands:
        return PiecesWithCommands(self._job, self._session, self._kit, self._repair, commit_lsn)

    async def _finish(self, last: Transaction) -> None:
        """Record and end the open transaction, unless it is to be skipped.

        Raises:
            ApplyFailed: a deferred check fails.
            TargetLost: the connection ended; or as `apply`.
        """
        kept = self._repair.kept
        try:
            if self._conflict_handler.skips.find(last.commit_lsn, last.end_lsn) is not None:
                await self._session.rollback()
                await self._send_again(last)
            if kept and self._end is None:
                kept = await self._conflict_handler.name_by_end(self._session, last, kept)
            await self._target.finish(self._job, last)
        except StatementFailed as failure:
            # A deferred check: it fails for the whole, and every row was applied already in its best form.
            await self._session.rollback()
            await self._fail(DataFailed(failure, None), last)
        else:
            self._conflict_handler.count(self._job, kept)

    async def _fail(
        self, stop: ConflictStop | DataFailed | CommandFailed | TargetRefused | RolledBack | Unwanted, last: Transaction
    ) -> None:
        """Raise the error that stopped it, with its end; or have it sent again to be skipped. It is rolled back.

        Returns only if it ends with a PREPARE that the publisher has rolled back: recorded, and nothing is prepared.

        Raises:
            ApplyFailed, TargetRefused: the error that stopped it.
            TargetLost: it is sent again, or the connection ended.
        """
        if isinstance(stop, RolledBack) or await self._kit.two_phase.is_rolled_back(last.event):
            assert isinstance(last.event, Prepare | StreamPrepare), "the last piece or event of what is prepared"
            await self._target.leave_out(self._job, last.event, last)
            self._repair.succeeded()
            return
        if self._conflict_handler.skips.find(last.commit_lsn, last.end_lsn) is not None:
            await self._send_again(last)
        if isinstance(stop, TargetRefused):
            raise stop
        # Deferred checks can wait for another session, and the pieces are not kept.
        in_the_way = stop if isinstance(stop, DataFailed) and classify(stop.failure) is FailureClass.AGAIN else None
        if isinstance(stop, Unwanted) or in_the_way:
            # Known by its end now, so it is not cancelled for another one's sake a second time.
            self._conflict_handler.skips.read_to_end(last.commit_lsn, last.end_lsn)
            why: object = "it is not to be skipped"
            if in_the_way:
                why = apply_failed(in_the_way.failure, in_the_way.command, last.xid, last.end_lsn, is_retried=True)
            raise TargetLost(f"the large transaction that ends at {format_lsn(last.end_lsn)} is sent again: {why}")
        if isinstance(stop, CommandFailed):
            self._stop_at(command_failed(stop, last, is_retried=self._is_repeated))
        if isinstance(stop, ConflictStop):
            await self._conflict_handler.stopped(stop, source_of(last))
        conflict = stop if isinstance(stop, ConflictStop) else None
        error = apply_failed(
            stop.failure, stop.command, last.xid, last.end_lsn, stop=conflict, is_retried=self._is_repeated
        )
        self._stop_at(error, stop.failure)

    async def _skip(self, pieces: AsyncIterator[Transaction], wanted: int, commit_lsn: int) -> None:
        """Keep every change in the history and record the transaction as done.

        Args:
            pieces: all of them; announcements in them are resolved.
            wanted: as `Skips.find` gives it.
            commit_lsn: of the transaction.

        Raises:
            TargetLost: it is sent again, because the connection ended, the history could not be written, or the request
                was taken back.
            TargetRefused, ProtocolError: a change cannot be read.
        """
        conflict_handler, job = self._conflict_handler, self._job
        current = dict(job.plans_before)
        last = self._end
        change_no = 1
        commands = SkippedCommands(job, self._session, self._kit, commit_lsn)
        try:
            await self._session.begin()
            async for whole in pieces:
                piece = await commands.taken_from(whole, current)
                plans = self._kit.tables.plans_from(current)
                changes = ordered_changes(piece, plans)
                source = source_of(self._end or piece)
                conflict_handler.count(
                    job, await conflict_handler.write_skipped(self._session, source, changes, change_no)
                )
                change_no += len(changes)
                current = dict(plans.current)
                last = self._end or whole
            assert last is not None, "a transaction has pieces"
            job.counts.n_transactions, job.counts.xids = 1, (last.xid,)
            if self._end is None:
                await conflict_handler.name_by_end(self._session, last)
            if not await conflict_handler.finish_skip(self._session, wanted, last.xid):
                raise TargetLost(
                    f"the large transaction that ends at {format_lsn(last.end_lsn)} is sent again: it is not to be"
                    " skipped any more"
                )
            await self._target.finish(job, last)
        except StatementFailed as failure:
            raise TargetLost(f"target: a skipped transaction could not be kept: {failure.sqlstate}") from failure
        if not job.is_left_out:
            conflict_handler.skipped(wanted, last.xid)
            commands.log(last)

    def _stop_at(self, error: ApplyFailed, cause: Exception | None = None) -> NoReturn:
        """Raise the error that it failed with; with on_error = retry one with commands is sent again after a pause."""
        if not self._is_repeated:
            raise error from cause
        self._log.error("batch_failed", worker=self._job.worker, error=str(error), hint=error.hint)
        raise TargetLost(str(error), hint=error.hint) from cause

    async def _send_again(self, last: Transaction) -> NoReturn:
        await self._conflict_handler.learn(last)
        raise TargetLost(f"the large transaction that ends at {format_lsn(last.end_lsn)} is sent again, to be skipped")

    async def _rest(self, latest: Transaction | None, pieces: PieceQueue) -> Transaction:
        """Read to the end of the transaction and return its last piece."""
        while latest is None or not latest.is_last:
            piece = await pieces.get()
            assert piece is not None, "the last piece says so"
            latest = piece
            self._pool.flight.count_out(piece.size_bytes)
            self._pool.changed()
        return latest


async def _taken(pieces: PieceQueue, pool: WorkerPool) -> AsyncIterator[Transaction]:
    while (piece := await pieces.get()) is not None:
        yield piece
        pool.flight.count_out(piece.size_bytes)
        pool.changed()
