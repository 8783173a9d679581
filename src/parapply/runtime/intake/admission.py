"""Admission to batches: nothing committed or prepared here already, and nothing that a copy holds or will hold.

Nothing enters before the tables it needs are known and copied, nor past a hold.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from parapply.engine.intake import Hold
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.wire.messages import BeginPrepare, Prepare, StreamPrepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.model import Relation, Transaction
    from parapply.plan.copy_starts import Name
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.copied import Copied
    from parapply.target.state.slots import SlotState

#: Seconds for which a batch stays open at most while tables are read ahead: the target may take longer to answer.
_HELD_S = 1.0


class Admission:
    """Asked by intake's task only; the fields say who else writes them."""

    def __init__(self, batcher: Batcher, copied: Copied, two_phase: TwoPhase, state: SlotState) -> None:
        """Start with nothing admitted, and no hold.

        Args:
            batcher: whose open batch is closed before something waits, and whose reader stops then.
            copied: decides from where on announced relations are applied.
            two_phase: the prepared transactions.
            state: the target's state at the start.
        """
        self._reader = batcher.reader
        self.batcher = batcher
        self._tables = batcher.tables
        self.copied = copied
        self.two_phase = two_phase
        self._state = state
        # True once transactions end after everything in the state.
        self._is_past_state = False
        self._log = get_logger()
        #: Read by intake and requests; requests close and open it by `hold_at` and `let_pass`.
        self.hold = Hold()
        self._hold_moved = asyncio.Event()
        #: Changes that are left out, because a copy holds or will hold them. Updated by `copied`. Read by requests and
        #: gauges.
        self.starts = copied.starts

    @property
    def admits_runs(self) -> bool:
        """Return whether plain transactions need no other question than `is_plain`: no table is special."""
        plans = self._tables.plans
        return not (plans.refused or plans.may_be_serial or self.starts.is_active)

    def is_plain(self, transaction: Transaction) -> bool:
        """Return whether a transaction is whole, announces nothing and cannot be committed here already."""
        return (
            transaction.event is None
            and not transaction.relations
            and not transaction.has_ddl
            and transaction.is_first
            and transaction.is_last
            and not self._may_be_done(transaction)
        )

    def _may_be_done(self, transaction: Transaction) -> bool:
        """Return whether a whole transaction must be looked up in the state; never again after the last one in it."""
        if self._is_past_state:
            return False
        self._is_past_state = transaction.end_lsn > self._state.high_lsn
        return not self._is_past_state

    def is_done(self, transaction: Transaction) -> bool:
        """Return whether a re-sent transaction is committed here; of a large one only the commit LSN is known early."""
        if self.is_prepared(transaction.event):
            return True
        if transaction.is_first and transaction.is_last:
            return self.is_applied(transaction.end_lsn)
        # No commit record straddles the watermark: it is the end of another one, or of a keep-alive between them.
        return transaction.commit_lsn < self._state.low_lsn

    def is_applied(self, end_lsn: int) -> bool:
        """Return whether the transaction that ends at an LSN was committed here before the start."""
        return self._state.is_applied(end_lsn)

    def is_prepared(self, message: object) -> bool:
        """Return whether a transaction that comes again was prepared here before (trap T-57)."""
        return isinstance(message, BeginPrepare | Prepare | StreamPrepare) and self.two_phase.is_prepared(message)

    async def look_up(self, relations: Sequence[Relation], *, was_in_progress: bool = False) -> None:
        """Have plans ready for the relations that a transaction announces, before it is read.

        The open batch also takes new tables, because a thousand of them would otherwise be a thousand small batches. It
        waits for them only in a backlog, and while they are being read ahead. The first one is not kept back, so that a
        backlog's first rows come soon.

        A relation already in force is announced again with every range of WAL, and a root with each of its partitions.
        It needs no query, because the watch soon finds any change of the target's table.

        Args:
            relations: in their order.
            was_in_progress: they were announced some time ago, while their transaction was: they are read again.

        Raises:
            TargetLost: the connection ended.
        """
        others = relations if was_in_progress else self._not_in_force(relations)
        if others and self.batcher.is_backlog:
            self.batcher.hold_open(_HELD_S)
            await self._tables.read_ahead(others)
            self.batcher.hold_open(0.0)
        if not self.copied.is_settled(relations) or not self._tables.resolve_new(others):
            self.batcher.close_open()
            await self._resolve(others)
            await self._settle(relations)
            self.batcher.plans_changed()
        elif others:
            self.batcher.close_first()
        for relation in relations:
            self.starts.announce(relation)

    async def settle_made(self, relations: Sequence[Relation]) -> None:
        """Settle from where on relations are applied that a transaction announces which may make their tables itself.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be asked.
        """
        self.batcher.close_open()
        with self._reader.waiting("what is known of a new table"):
            await self.copied.settle(relations, may_be_missing=True)
        for relation in relations:
            self.starts.announce(relation)

    async def announce(self, relations: Sequence[Relation]) -> None:
        """Put relations in force for the next changes.

        Raises:
            TargetLost: the connection ended.
        """
        await self._resolve(relations)
        await self._settle(relations)
        self.batcher.announce(relations)
        for relation in relations:
            self.starts.announce(relation)

    def _not_in_force(self, relations: Sequence[Relation]) -> list[Relation]:
        """Return the relations to plan, and have the watch look at the others."""
        found = [relation for relation in relations if not self._tables.is_in_force(relation)]
        if len(found) < len(relations):
            self._tables.is_in_doubt.set()
        return found

    async def _resolve(self, relations: Sequence[Relation]) -> None:
        with self._reader.waiting("the target's catalogue"):
            await self._tables.resolve(relations)

    async def _settle(self, relations: Sequence[Relation]) -> None:
        with self._reader.waiting("what is known of a new table"):
            await self.copied.settle(relations)

    async def wait_at_hold(self, transaction: Transaction) -> None:
        """Wait until a transaction may pass that is held."""
        self.batcher.close_open()
        self._reader.stop()
        with self._reader.waiting("a snapshot"):
            try:
                while self.hold.holds(transaction):
                    self.hold.is_reached = True
                    self._hold_moved.clear()
                    await self._hold_moved.wait()
            finally:
                self.hold.is_reached = False

    async def wait_until_hold_moves(self, limit_s: float) -> None:
        """Return when the hold was closed, moved or opened, or after some seconds."""
        self._hold_moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._hold_moved.wait()

    def hold_at(self, lsn: int) -> None:
        """Let transactions pass whose commit record lies before an LSN, and nothing later."""
        self.hold.close(lsn)
        self._hold_moved.set()

    def let_pass(self) -> None:
        """Let everything pass."""
        self.hold.open()
        self._hold_moved.set()

    async def without_skipped(self, transaction: Transaction) -> Transaction:
        """Return the part of a transaction that is to be applied, as soon as every table that it needs is copied."""
        while (name := self.starts.waits_for(transaction)) is not None:
            await self._wait_for_copy(name, transaction.commit_lsn)
        return self.starts.without_skipped(transaction)

    async def kept_of(self, relations: Sequence[Relation], commit_lsn: int) -> Callable[[Transaction], Transaction]:
        """Return a function that drops a streamed transaction's skipped changes, once all its tables are copied."""
        while (name := self.starts.copying_of(relations, commit_lsn)) is not None:
            await self._wait_for_copy(name, commit_lsn)
        return self.starts.kept_at(commit_lsn)

    async def _wait_for_copy(self, name: Name, commit_lsn: int) -> None:
        """Wait until there is news about copies."""
        self.batcher.close_open()
        self._reader.stop()
        self._log.info("table_awaited", relation=".".join(name), commit_lsn=format_lsn(commit_lsn))
        self.copied.changed.clear()
        with self._reader.waiting("a copy"):
            await self.copied.changed.wait()
