"""From the stream to closed batches: the loop that reads, asks what may enter, and has it added to a batch."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, Protocol

from parapply.errors import TargetRefused
from parapply.logs import get_logger
from parapply.plan.steps import check_plans
from parapply.wire.messages import BeginPrepare, Prepare

if TYPE_CHECKING:
    from parapply.engine.intake import DueTimes, Room, Throttle
    from parapply.model import Transaction
    from parapply.runtime.intake.batcher import Admission, Batcher
    from parapply.runtime.intake.special import SpecialTransactions
    from parapply.wire.copy import Keepalive

#: Seconds between two looks at the publisher's clock, which may be set, while a transaction is not due.
_LOOK_S: Final = 1.0
#: The same while the throttle lets nothing in, between two looks whether anything waits for it.
_LOOK_HELD_S: Final = 0.1


class Reports(Protocol):
    """Reports to the publisher, as intake needs them."""

    def keepalive(self, keepalive: Keepalive) -> None:
        """Take a keep-alive, after everything before it was taken."""

    def received(self) -> None:
        """Note that everything of a read is in the batcher's hands, while commits on the publisher wait for reports."""

    def ends_at(self, received_lsn: int) -> None:
        """Take the end of all before the first transaction that never enters.

        Everything up to there is in the worker pool's hands, and nothing more is read.
        """


class Intake:
    """Its only state is its parts', which its own task and the worker pool (`worker_changed`) use."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        admission: Admission,
        special: SpecialTransactions,
        batcher: Batcher,
        *,
        room: Room,
        due: DueTimes,
        reports: Reports,
    ) -> None:
        """Keep the parts, in the order in which a transaction passes them."""
        self._reader = batcher.reader
        self._room = room
        self._admission = admission
        self._special = special
        self._commands = special.commands
        self._batcher = batcher
        self._due = due
        self._pool = batcher.pool
        self._engine = batcher.pool.flight.state
        self._reports = reports
        self._has_room = asyncio.Event()
        self._is_told_full = False
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()

    async def run(self) -> None:
        """Read until cancelled.

        Raises:
            SourceLost: the stream ended. All whole transactions received are in the worker pool's hands.
            ProtocolError: the stream cannot be read.
            TargetRefused, TargetLost: a published table cannot be applied.
            SourceRefused: a publication was missing, and the publisher cannot be asked which tables it publishes.
        """
        reader, batcher, rest = self._reader, self._batcher, self._pool.rest
        reader.start(self)
        try:
            while True:
                transactions = await reader.read()
                has_gap = reader.stream.gap_lsn is not None
                if transactions or reader.is_inside_transaction or has_gap:
                    rest.stirred_s = reader.heard_s
                    if rest.is_on:
                        rest.end()
                batcher.is_taking = True
                if has_gap:
                    await self._admission.wait_for_gap()
                await self._take_due(transactions)
                # A change may be a gigabyte, and the next read may come late.
                del transactions
                batcher.is_taking = False
                if batcher.close_if_due():
                    # Its worker sends it first: reports, and a pause of reading, are no part of a commit's latency.
                    await asyncio.sleep(0)
                keepalive = reader.take_keepalive()
                if keepalive is not None:
                    self._take_keepalive(keepalive)
                if reader.stream.is_synchronous:
                    self._reports.received()
                await self._wait_for_room()
                if reader.stream.is_drained and (pause_s := batcher.pause_s):
                    await reader.pause(pause_s)
        finally:
            reader.end()
            # Whole transactions are handed over; the rest will be sent again.
            batcher.finish()
            self._special.close()

    def _take_keepalive(self, keepalive: Keepalive) -> None:
        self._batcher.received_lsn = max(self._batcher.received_lsn, keepalive.end_lsn)
        self._reports.keepalive(keepalive)

    def may_take_alone(self) -> bool:
        """See `Taker`."""
        return self._batcher.holds_nothing and not self._engine.jobs

    def take_alone(self, keepalive: Keepalive) -> None:
        """See `Taker`."""
        self._take_keepalive(keepalive)
        if self._reader.stream.is_synchronous:
            self._reports.received()

    def take_first(self, transactions: list[Transaction]) -> list[Transaction]:
        """See `Taker`; the task goes on with reports and pauses, behind the worker that is given the batch."""
        rest = self._pool.rest
        rest.stirred_s = self._reader.heard_s
        if rest.is_on:
            rest.end()
        is_limited = self._due.is_limited or self._batcher.throttle is not None
        if is_limited or not self._is_room_left() or not self._admission.hold.lets_pass(transactions):
            return transactions
        at = self._take_run(transactions, 0)
        self._batcher.close_if_due()
        return transactions[at:] if at else transactions

    def worker_changed(self) -> None:
        """Note that a worker is idle or a batch has committed; called by the worker pool."""
        self._has_room.set()
        self._commands.moved.set()
        if not self._pool.flight.state.jobs:
            self._reader.end_pause()
        self._batcher.close_if_due()

    def _is_room_left(self) -> bool:
        throttle = self._batcher.throttle
        if throttle is not None and throttle.left_s:
            return False
        open_bytes = self._batcher.open_bytes
        is_left = self._room.is_left(open_bytes)
        if not is_left and not self._is_told_full:
            held_bytes = self._pool.flight.state.held_bytes + open_bytes
            if self._room.is_memory_full(held_bytes):
                self._is_told_full = True
                self._log.warning("memory_limit_reached", size_bytes=held_bytes)
        return is_left

    async def _wait_for_room(self, *, is_more_at_hand: bool = False) -> None:
        """Return when more may be taken; reading is stopped until then."""
        while not self._is_room_left():
            self._reader.stop()
            self._has_room.clear()
            throttle = self._batcher.throttle
            if throttle is not None and throttle.left_s:
                await self._wait_for(throttle, is_more_at_hand=is_more_at_hand)
            else:
                await self._has_room.wait()
        self._is_told_full = False
        self._reader.go_on()

    async def _wait_for(self, throttle: Throttle, *, is_more_at_hand: bool) -> None:
        """Wait as long as the throttle asks for; the open batch goes to the workers, because nothing can join it.

        The throttle holds something back only while there is more. Otherwise the source is what limits.
        """
        self._batcher.close_open()
        try:
            with self._reader.waiting("apply.max_changes_per_s"):
                while left_s := throttle.left_s:
                    if is_more_at_hand or self._reader.has_more:
                        throttle.hold()
                    await asyncio.sleep(min(left_s, _LOOK_HELD_S))
        finally:
            throttle.go_on()

    async def _take_due(self, transactions: list[Transaction]) -> None:
        """Take transactions as soon as each is due."""
        due = self._due
        if not due.is_limited:
            await self._take_all(transactions)
            return
        at = 0
        while at < len(transactions):
            end = due.first_not_due(transactions, at, self._engine.source_time_us(self._clock()))
            if end > at:
                await self._take_all(transactions[at:end])
                at = end
            else:
                await self._wait_until_due(transactions[at])

    async def _wait_until_due(self, transaction: Transaction) -> None:
        """Read no more until a transaction is due; what was taken before it goes to the workers."""
        hold, reader = self._admission.hold, self._reader
        self._batcher.close_open()
        reader.stop()
        while (left_s := self._due.left_s(transaction, self._engine.source_time_us(self._clock()))) > 0:
            if hold.holds(transaction):
                await self._admission.wait_at_hold(transaction)
                continue
            what = "apply.delay_s"
            if left_s == math.inf:
                what = "the end: the next transaction is later than --until"
                # Not the transaction's own LSN: of a ROLLBACK PREPARED only the end is sent, and the publisher never
                # sends again what begins before the position that it was told.
                self._reports.ends_at(self._batcher.received_lsn)
            with reader.waiting(what):
                await self._admission.wait_until_hold_moves(min(left_s, _LOOK_S))

    async def _take_all(self, transactions: list[Transaction]) -> None:
        admission = self._admission
        at = 0
        while at < len(transactions):
            if not self._is_room_left():
                await self._wait_for_room(is_more_at_hand=True)
            if admission.hold.lets_pass(transactions):
                at = self._take_run(transactions, at)
                if at == len(transactions):
                    break
                if not self._is_room_left():
                    continue
            elif admission.hold.holds(transactions[at]):
                await admission.wait_at_hold(transactions[at])
            await self._take(transactions[at])
            at += 1

    def _take_run(self, transactions: list[Transaction], at: int) -> int:
        """Add transactions from an index on while nothing about them is special and there is room.

        Returns:
            The index of the next one.
        """
        admission, batcher = self._admission, self._batcher
        if not admission.admits_runs:
            return at
        while at < len(transactions) and admission.is_plain(transactions[at]):
            at = batcher.add_run(transactions, at)
            if batcher.is_empty and not self._is_room_left():
                break
        return at

    async def _take(self, transaction: Transaction) -> None:
        was_in_progress = transaction.event is not None and not isinstance(transaction.event, BeginPrepare | Prepare)
        if was_in_progress:
            whole = await self._special.take(transaction)
            if whole is None:
                return
            transaction = whole
        else:
            self._special.announce(transaction.relations)
        if self._commands.takes(transaction):
            await self._commands.take(transaction)
            return
        event = transaction.event
        if transaction.relations:
            await self._admission.look_up(transaction, was_in_progress=was_in_progress)
        if self._admission.is_done(transaction):
            self._batcher.announce(transaction.relations)
            if isinstance(event, Prepare) and self._admission.is_prepared(event):
                self._special.record_prepared(transaction, event)
            return
        if self._admission.starts.apart:
            transaction = await self._admission.without_skipped(transaction)
        if not (transaction.is_first and transaction.is_last):
            await self._batcher.add_piece(transaction)
        elif await self._is_applicable(transaction):
            self._batcher.add_whole(transaction)

    async def _is_applicable(self, transaction: Transaction) -> bool:
        """Make sure that every change can be applied; False if it need not: a PREPARE, rolled back and recorded so."""
        try:
            check_plans(transaction, self._batcher.tables.plans)
        except TargetRefused:
            event = transaction.event
            if not isinstance(event, Prepare) or not await self._admission.two_phase.is_rolled_back(event):
                raise
            self._batcher.announce(transaction.relations)
            self._special.record_prepared(transaction, event)
            return False
        return True
