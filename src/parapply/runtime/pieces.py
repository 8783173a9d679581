"""One large transaction on its worker: the next piece is planned while the target executes the one before.

Each piece is behind a savepoint, so that a piece whose sets fail is repeated row by row, and the pieces before it need
not be kept. Everything that the transaction depends on has committed; the caller sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

from parapply.conflict.settle import may_be_conflict
from parapply.errors import StatementFailed, TargetLost
from parapply.plan.batch import Batch
from parapply.plan.steps import ordered_changes
from parapply.target.pipeline import ANY_COUNT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from parapply.model import Transaction
    from parapply.plan.steps import TruncateStep
    from parapply.plan.table import TablePlan
    from parapply.runtime.crew import Crew
    from parapply.runtime.job import Job
    from parapply.runtime.tables import Tables
    from parapply.target.commands import Command, CommandBuilder
    from parapply.target.session import WorkerSession

    #: Told of each failure in source order, of one piece; returns when the same may be tried again, or raises.
    LookAt = Callable[[StatementFailed, Sequence[Command], Transaction], Awaitable[None]]
    #: Applies the changes of a piece so that their conflicts are settled.
    Settle = Callable[[Transaction, Sequence[tuple[TablePlan, bytes] | TruncateStep]], Awaitable[None]]


#: Seconds after which the server is asked once more to stop.
_CANCEL_AGAIN_S = 0.5


class Clear(Protocol):
    """Told of each piece when it is planned; returns when it may be executed, or raises."""

    def __call__(self, piece: Transaction, batch: Batch | None, *, is_checked: bool) -> Awaitable[bool]:
        """Return whether everything earlier has committed by then.

        Args:
            piece: to be executed.
            batch: its net changes; None if only its source order is exact.
            is_checked: the number of rows of each statement is known and will be checked.
        """


class _Planned(NamedTuple):
    """A piece as sets; without a batch if only its source order is exact."""

    piece: Transaction
    before: dict[int, TablePlan]
    batch: Batch | None
    commands: list[Command]
    after: dict[int, TablePlan]

    @property
    def is_checked(self) -> bool:
        """Tell whether each statement fails unless it finds the rows that it should."""
        return all(command.expected != ANY_COUNT for command in self.commands)


class Pieces:
    """Applies the pieces of one transaction. Used once, by the worker that has it."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        job: Job,
        *,
        session: WorkerSession,
        builder: CommandBuilder,
        tables: Tables,
        crew: Crew,
        new_look: Callable[[], LookAt],
        settle: Settle | None = None,
        clear: Clear | None = None,
    ) -> None:
        """Apply nothing yet; the session is inside the transaction.

        Without `settle` nothing is a conflict yet: something earlier, not committed, may be the reason (trap T-69).
        Without `clear` each piece may be executed when the one before is: everything earlier has committed.
        """
        self._job = job
        self._session = session
        self._builder = builder
        self._tables = tables
        self._crew = crew
        self._new_look = new_look
        self._settle = settle
        self._clear = clear
        #: The latest piece that has come.
        self.latest: Transaction | None = None
        #: Plan of each publisher's OID behind the last piece added.
        self.current = dict(job.plans_before)
        self._under_way: asyncio.Task[None] | None = None

    async def apply(self, pieces: asyncio.Queue[Transaction | None]) -> Transaction:
        """Apply all pieces and return the last, which knows where the transaction ends.

        Raises:
            ApplyFailed: a row still fails in source order. `new_look` and `settle` may raise others instead.
            TargetLost, TargetRefused, ProtocolError: as everywhere.
        """
        last: Transaction | None = None
        try:
            while True:
                if pieces.empty():
                    # Nothing to plan: whatever went wrong must not wait for the next piece.
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
            ApplyFailed: a row of the one before still fails in source order.
            TargetLost, TargetRefused, ProtocolError: as everywhere.
        """
        planned = self._plan(piece, self.current)
        if self._under_way is not None:
            n_attempts = self._job.attempts
            await self.settle()
            if self._job.attempts != n_attempts:
                # The tables may have been looked up anew since.
                planned = self._plan(piece, self.current)
        may_repeat = True
        if self._clear is not None:
            may_repeat = await self._clear(piece, planned.batch, is_checked=planned.is_checked)
        self.current = planned.after
        self._under_way = self._start(self._execute(planned, may_repeat=may_repeat))

    async def settle(self) -> None:
        """Wait until what was begun is executed.

        Raises:
            ApplyFailed, TargetLost, TargetRefused: as `add`.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            try:
                await under_way
            except asyncio.CancelledError:
                self._under_way = under_way  # for `abandon`
                raise

    async def stop(self) -> None:
        """Have the target stop what it executes, and wait until it has; the session can be used afterwards.

        Raises:
            TargetLost: the connection ended.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        while not under_way.done():
            await self._session.cancel()
            # Once more after a while: the server may have been between two statements.
            await asyncio.wait({under_way}, timeout=_CANCEL_AGAIN_S)
        if isinstance(error := under_way.exception(), TargetLost):
            raise error

    async def abandon(self) -> None:
        """End what is still executed; called in any case, before the session is used again."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        if not under_way.done():
            under_way.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await under_way
        elif not under_way.cancelled():
            # A connection that ended while nobody waited for this: others have met it, and the loop must not complain.
            under_way.exception()

    def _start(self, executing: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return asyncio.create_task(executing, name=f"piece of batch {self._job.batch.seq}")

    def _plan(self, piece: Transaction, current: dict[int, TablePlan]) -> _Planned:
        plans = self._tables.plans_from(current)
        batch = Batch(self._job.batch.seq)
        batch.add(piece, plans)
        batch.close()
        if batch.is_suspect:
            plans = self._tables.plans_from(current)
            ordered_changes(piece, plans)
            return _Planned(piece, current, None, [], dict(plans.current))
        commands = self._builder.of_steps(batch.steps, batch.size_bytes)
        return _Planned(piece, current, batch, commands, dict(plans.current))

    async def _execute(self, planned: _Planned, *, may_repeat: bool) -> None:
        """Apply one piece, as sets if that succeeds, else row by row.

        Beside an earlier transaction, what fails is not repeated: of single rows not each number is checked, and one
        that the earlier will write would pass for one that need not be there.
        """
        piece = planned.piece
        try:
            if planned.batch is None or not await self._execute_sets(planned, may_repeat=may_repeat):
                await self._execute_rows(planned)
        finally:
            self._crew.held_bytes -= piece.size_bytes
        self._job.count_piece(piece, planned.batch, planned.after)
        self._crew.changed()

    async def _execute_sets(self, planned: _Planned, *, may_repeat: bool) -> bool:
        try:
            await self._session.piece(planned.commands)
        except StatementFailed:
            await self._session.undo_piece()
            self._job.attempts += 1
            if self._job.must_yield or not may_repeat:
                raise
            return False
        return True

    async def _execute_rows(self, planned: _Planned) -> None:
        look_at = self._new_look()
        while True:
            commands: Sequence[Command] = ()
            changes = ordered_changes(planned.piece, self._tables.plans_from(planned.before))
            try:
                commands = self._builder.in_order(changes)
                await self._session.piece(commands)
            except StatementFailed as failure:
                await self._session.undo_piece()
                self._job.attempts += 1
                if self._settle is not None and may_be_conflict(failure, commands):
                    await self._settle(planned.piece, changes)
                    return
                await look_at(failure, commands, planned.piece)
            else:
                return
