"""One large transaction on its worker: the next piece is planned while the target executes the one before.

Each piece is preceded by a savepoint, so that a piece whose sets fail is repeated row by row, and the pieces before it
need not be kept. Everything that the transaction depends on has committed; the caller sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

from parapply.conflict.settle import may_be_conflict
from parapply.engine.job import Attempts
from parapply.errors import StatementFailed, TargetLost, TargetRefused
from parapply.plan.batch import Batch
from parapply.plan.steps import ordered_changes
from parapply.runtime.apply.failure import may_follow_conflict
from parapply.runtime.apply.transaction import commands_of, found_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.engine.job import LargeJob, PieceQueue, StreamJob
    from parapply.model import Relation, Transaction
    from parapply.plan.table import TablePlan
    from parapply.runtime.apply.repair import PieceRepair
    from parapply.runtime.apply.transaction import WorkerKit
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import Command

#: Seconds after which the server is asked again to stop.
_CANCEL_AGAIN_S = 0.5


class CodeFound(StatementFailed):
    """Code acts on a table of the piece, and the plans do not know it: it must see the changes in commit order."""

    def __init__(self) -> None:
        """Say the same each time."""
        super().__init__("code runs on the target for a table of it")


class PlannedPiece(NamedTuple):
    """A piece as sets; without a batch if only its source order is exact."""

    piece: Transaction
    before: dict[int, TablePlan]
    batch: Batch | None
    commands: list[Command]
    after: dict[int, TablePlan]


class Pieces:
    """Applies the pieces of one transaction. Used once, by the worker that has it."""

    def __init__(
        self, job: LargeJob | StreamJob, session: WorkerSession, kit: WorkerKit, repair: PieceRepair | None
    ) -> None:
        """Apply nothing yet.

        Args:
            job: of the transaction.
            session: inside the target transaction.
            kit: of the workers.
            repair: what is done about a failure, at the head; None where something earlier, not committed, may be the
                reason (trap T-69): then the failure is the caller's.
        """
        self._job = job
        self._session = session
        self._builder = kit.builder
        self._tables = kit.tables
        self._pool = kit.pool
        self._repair = repair
        #: The latest piece that has come.
        self.latest: Transaction | None = None
        #: Plan of each publisher's OID after the last piece added.
        self.current = dict(job.plans_before)
        self._under_way: asyncio.Task[None] | None = None

    async def apply(self, pieces: PieceQueue) -> Transaction:
        """Apply all pieces and return the last, which knows where the transaction ends.

        Raises:
            ConflictStop, DataFailed, RolledBack, Unwanted: as `PieceRepair`, at the head.
            StatementFailed: a piece failed, elsewhere.
        """
        last: Transaction | None = None
        try:
            while True:
                if pieces.empty():
                    # There is nothing to plan, so an error must not wait for the next piece.
                    await self.settle()
                piece = await pieces.get()
                if piece is None:
                    break
                self.latest = piece
                await self.add(piece)
                last = piece
            await self.settle()
        finally:
            await self.abandon()
        assert last is not None, "a large transaction has pieces"
        return last

    async def add(self, piece: Transaction) -> None:
        """Plan a piece while the one before is executed, then begin to execute it.

        Raises:
            ConflictStop, DataFailed, RolledBack, Unwanted, StatementFailed: as `apply`, of the one before.
        """
        try:
            planned = await self.plan(piece)
        except BaseException:
            self._pool.flight.count_out(piece.size_bytes)
            raise
        self.start(planned)

    async def plan(self, piece: Transaction) -> PlannedPiece:
        """Plan a piece while the one before is executed; the next call, if any, must be `start` with the result.

        Raises:
            ConflictStop, DataFailed, RolledBack, Unwanted, StatementFailed: as `apply`, of the one before.
        """
        n_attempts = self._job.attempts
        try:
            planned = await self._plan(piece, self.current)
        except TargetRefused:
            # The caller rolls back, and until this is executed the session cannot be used.
            await self.settle()
            raise
        if self._under_way is not None:
            await self.settle()
            if self._job.attempts != n_attempts:
                # The tables may have been looked up again since.
                planned = await self._plan(piece, self.current)
        return planned

    def start(self, planned: PlannedPiece) -> None:
        """Begin to execute a piece, the result of `plan`."""
        self.current = planned.after
        self._under_way = asyncio.create_task(self._execute(planned), name=f"piece of batch {self._job.batch.seq}")

    async def settle(self) -> None:
        """Wait until the statements sent are executed.

        Raises:
            ConflictStop, DataFailed, RolledBack, Unwanted, StatementFailed, TargetLost, TargetRefused: as `apply`.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            try:
                await under_way
            except asyncio.CancelledError:
                self._under_way = under_way  # for `abandon`
                raise

    async def stop(self) -> None:
        """Have the target stop the running statement, and wait until it has; the session can be used afterwards."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        while not under_way.done():
            await self._session.cancel()
            # Ask again after a while, because the server may have been between two statements.
            await asyncio.wait({under_way}, timeout=_CANCEL_AGAIN_S)
        if isinstance(error := under_way.exception(), TargetLost):
            raise error

    async def abandon(self) -> None:
        """End the statements still running; called in any case, before the session is used again."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        if not under_way.done():
            under_way.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await under_way
        elif not under_way.cancelled():
            # The connection ended while nothing awaited this: others have met that, and the loop must not complain.
            under_way.exception()

    async def _plan(self, piece: Transaction, current: dict[int, TablePlan]) -> PlannedPiece:
        plans = self._tables.plans_from(current)
        batch = Batch(self._job.batch.seq)
        batch.add(piece, plans)
        batch.close()
        if batch.is_suspect:
            plans = self._tables.plans_from(current)
            ordered_changes(piece, plans)
            return PlannedPiece(piece, current, None, [], dict(plans.current))
        commands = await commands_of(batch, self._builder, self._tables.role)
        return PlannedPiece(piece, current, batch, commands, dict(plans.current))

    async def _execute(self, planned: PlannedPiece) -> None:
        """Apply one piece, as sets if that succeeds, else row by row."""
        piece = planned.piece
        try:
            if planned.batch is None or not await self._execute_sets(planned):
                await self._execute_rows(planned)
        finally:
            self._pool.flight.count_out(piece.size_bytes)
        if self._repair is not None:
            self._repair.succeeded()
        self._job.counts.count_piece(piece, planned.batch, planned.after)
        self._pool.changed()

    async def _execute_sets(self, planned: PlannedPiece) -> bool:
        try:
            await self._session.piece(planned.commands)
        except StatementFailed as failure:
            await self._session.undo_piece()
            self._job.attempts += 1
            self._tables.is_in_doubt.set()
            if self._repair is not None:
                self._repair.check_wanted()
            if self._job.must_yield or self._job.is_unwanted:
                raise
            if found_code(failure, planned.commands):
                if self._repair is None:
                    # Code must see every change in commit order, and this transaction has not had its turn.
                    raise CodeFound from failure
                await self._refresh({plan.relation for one in planned.commands for plan in one.plans})
            return False
        return True

    async def _refresh(self, relations: Iterable[Relation]) -> None:
        """Read the target's tables of relations again; raise TargetRefused or TargetLost as `TablePlans.refresh`."""
        await self._tables.refresh(relations)

    async def _execute_rows(self, planned: PlannedPiece) -> None:
        attempts = Attempts(stops_on_error=True)
        while True:
            commands: Sequence[Command] = ()
            changes = ordered_changes(planned.piece, self._tables.plans_from(planned.before))
            try:
                commands = self._builder.in_order(changes)
                await self._session.piece(commands)
            except StatementFailed as failure:
                await self._session.undo_piece()
                self._job.attempts += 1
                if self._repair is None:
                    raise
                if await self._repair.learns(failure, commands, attempts, self._refresh):
                    continue
                if may_be_conflict(failure, commands) or may_follow_conflict(failure, commands):
                    await self._repair.settle(planned.piece, changes, self._refresh)
                    return
                await self._repair.look_at(failure, commands, planned.piece, attempts, self._refresh)
            else:
                return
