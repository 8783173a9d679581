"""One transaction applied in pieces at the head: a large one as it comes, or a streamed one at its commit.

Everything earlier has committed, so what fails is looked at at once. Its conflicts are settled piece by piece; an error
of the data, or a policy to stop, rolls all of it back. Where a large one ends is known only when its last piece has
come: what stops it is told with that LSN, by which it can be skipped. What is to be skipped is recorded as done, in a
target transaction that keeps all its changes in the history.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn

from parapply.conflict.kinds import ConflictStop
from parapply.errors import StatementFailed, TargetLost
from parapply.model import format_lsn
from parapply.plan.steps import ordered_changes
from parapply.runtime.arbiter import source_of
from parapply.runtime.head import Attempts, Head
from parapply.runtime.pieces import Pieces
from parapply.runtime.verdict import Verdict, apply_failed, verdict

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from parapply.conflict.kinds import Conflict
    from parapply.model import Transaction
    from parapply.plan.steps import TruncateStep
    from parapply.plan.table import TablePlan
    from parapply.runtime.arbiter import Arbiter
    from parapply.runtime.crew import Crew
    from parapply.runtime.job import Job
    from parapply.runtime.tables import Tables
    from parapply.target.commands import Command, CommandBuilder
    from parapply.target.session import WorkerSession


class DataFailed(Exception):
    """An error of the data; told when the end of the transaction is known."""

    def __init__(self, failure: StatementFailed, command: Command | None) -> None:
        """Keep the failure and the command that failed, if it was one."""
        super().__init__(str(failure))
        self.failure = failure
        self.command = command


class Whole:
    """Used by one worker for one transaction. The caller begins the target transaction."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        job: Job,
        *,
        session: WorkerSession,
        builder: CommandBuilder,
        tables: Tables,
        crew: Crew,
        arbiter: Arbiter,
        head: Head,
        finish: Callable[[Job, Transaction], Awaitable[None]],
    ) -> None:
        """Apply nothing yet; `finish` records the transaction and commits or prepares it."""
        self._job = job
        self._session = session
        self._builder = builder
        self._tables = tables
        self._crew = crew
        self._arbiter = arbiter
        self._head = head
        self._finish = finish
        self._kept: list[Conflict] = []
        #: The event that ends it, where that is known from the beginning: pieces do not tell then.
        self.end: Transaction | None = None

    async def apply_large(self, pieces: asyncio.Queue[Transaction | None]) -> None:
        """Apply a large transaction as its pieces come, or skip it.

        Raises:
            ApplyFailed: it cannot be applied.
            TargetLost: the connection ended; or it is to be skipped, which is known only now, and must be sent again.
            TargetRefused, ProtocolError: as everywhere.
        """
        wanted = self._arbiter.skips.find(self._job.commit_lsn, 0)
        if wanted is not None:
            await self.skip(_taken(pieces, self._crew), wanted)
            return
        await self._session.begin()
        applying = self.pieces()
        try:
            last = await applying.apply(pieces)
        except (ConflictStop, DataFailed) as stop:
            await self._session.rollback()
            await self.fail(stop, await self._rest(applying.latest, pieces))
        await self.finish(last)

    def pieces(self) -> Pieces:
        """Return what applies its pieces, with their conflicts settled.

        What it is given raises ConflictStop or DataFailed; the caller ends with `fail` then.
        """
        return Pieces(
            self._job,
            session=self._session,
            builder=self._builder,
            tables=self._tables,
            crew=self._crew,
            new_look=lambda: partial(self._look, attempts=Attempts(stops_on_error=True)),
            settle=self._settle,
        )

    async def finish(self, last: Transaction) -> None:
        """Record and end the open transaction, unless it is to be skipped.

        Raises:
            ApplyFailed: a deferred check fails.
            TargetLost: the connection ended; or as `apply_large`.
        """
        try:
            if self._arbiter.skips.find(last.commit_lsn, last.end_lsn) is not None:
                await self._session.rollback()
                await self._send_again(last)
            if self._kept and self.end is None:
                await self._arbiter.name_by_end(self._session, last)
            await self._finish(self._job, last)
        except StatementFailed as failure:
            # A deferred check: it fails for the whole, and every row was applied already in its best form.
            await self._session.rollback()
            await self.fail(DataFailed(failure, None), last)
        self._arbiter.count(self._job, self._kept)

    async def fail(self, stop: ConflictStop | DataFailed, last: Transaction) -> NoReturn:
        """Tell what stopped it, with its end; or have it sent again to be skipped. It is rolled back.

        Raises:
            ApplyFailed, TargetLost: always one of them.
        """
        if self._arbiter.skips.find(last.commit_lsn, last.end_lsn) is not None:
            await self._send_again(last)
        if isinstance(stop, ConflictStop):
            await self._arbiter.stopped(stop, source_of(last))
            raise apply_failed(stop.failure, stop.command, last.xid, last.end_lsn, stop=stop)
        raise apply_failed(stop.failure, stop.command, last.xid, last.end_lsn) from stop.failure

    async def skip(self, pieces: AsyncIterator[Transaction], wanted: int) -> None:
        """Keep every change in the history and record the transaction as done.

        Args:
            pieces: all of them; announcements in them are resolved.
            wanted: as `Skips.find` gives it.

        Raises:
            TargetLost: the connection ended, or the history could not be written: it is sent again.
            TargetRefused, ProtocolError: a change cannot be read.
        """
        arbiter, job = self._arbiter, self._job
        current = dict(job.plans_before)
        last = self.end
        change_no = 1
        try:
            await self._session.begin()
            async for piece in pieces:
                plans = self._tables.plans_from(current)
                changes = ordered_changes(piece, plans)
                source = source_of(self.end or piece)
                arbiter.count(job, await arbiter.write_skipped(self._session, source, changes, change_no))
                change_no += len(changes)
                current = dict(plans.current)
                last = self.end or piece
            assert last is not None, "a transaction has pieces"
            job.n_transactions, job.xids = 1, (last.xid,)
            if self.end is None:
                await arbiter.name_by_end(self._session, last)
            await self._session.run(arbiter.skips.finishing(wanted, last.xid))
            await self._finish(job, last)
        except StatementFailed as failure:
            raise TargetLost(f"target: a skipped transaction could not be kept: {failure.sqlstate}") from failure
        arbiter.skipped(wanted, last.xid)

    async def _look(
        self, failure: StatementFailed, commands: Sequence[Command], piece: Transaction, attempts: Attempts
    ) -> None:
        judged = verdict(failure)
        if judged is Verdict.FINAL or (judged is Verdict.STALE and attempts.is_refreshed):
            raise DataFailed(failure, _command(failure, commands))
        await self._head.look_at(failure, commands, piece, attempts)

    async def _settle(self, piece: Transaction, changes: Sequence[tuple[TablePlan, bytes] | TruncateStep]) -> None:
        """Apply a piece change by change, its conflicts settled; half of it cannot be repeated."""
        settler = self._arbiter.settler(self._session, source_of(self.end or piece))
        try:
            await settler.apply(changes, self._job.n_changes + 1)
            self._kept += await self._arbiter.keep(self._session, settler)
        except StatementFailed as failure:
            if verdict(failure) is Verdict.AGAIN:
                raise TargetLost("target: a large transaction met another session; it is sent again") from failure
            raise DataFailed(failure, _command(failure, settler.commands)) from failure

    async def _send_again(self, last: Transaction) -> NoReturn:
        await self._arbiter.learn(last)
        raise TargetLost(f"the large transaction that ends at {format_lsn(last.end_lsn)} is sent again, to be skipped")

    async def _rest(self, latest: Transaction | None, pieces: asyncio.Queue[Transaction | None]) -> Transaction:
        """Read to the end of the transaction and return its last piece."""
        while latest is None or not latest.is_last:
            piece = await pieces.get()
            assert piece is not None, "the last piece says so"
            latest = piece
            self._crew.held_bytes -= piece.size_bytes
            self._crew.changed()
        return latest


async def _taken(pieces: asyncio.Queue[Transaction | None], crew: Crew) -> AsyncIterator[Transaction]:
    while (piece := await pieces.get()) is not None:
        yield piece
        crew.held_bytes -= piece.size_bytes
        crew.changed()


def _command(failure: StatementFailed, commands: Sequence[Command]) -> Command | None:
    return commands[failure.statement] if 0 <= failure.statement < len(commands) else None
