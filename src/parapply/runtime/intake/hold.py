"""Where intake is held: after everything up to an LSN of the publisher, before everything later.

A snapshot of the target equals the publisher at an LSN if all up to there is committed and nothing later is. So no
worker has to be stopped, in either commit order: intake takes nothing later, and what it took before commits by itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.model import Transaction


class Hold:
    """Closed and opened by the requests' task, passed by intake."""

    def __init__(self) -> None:
        """Start open."""
        self._lsn: int | None = None
        self._moved = asyncio.Event()
        #: Whether intake waits at its present LSN. Set by intake.
        self.is_reached = False

    def lets_pass(self, transactions: Sequence[Transaction]) -> bool:
        """Tell whether all of some transactions, pieces and events may pass."""
        lsn = self._lsn
        return lsn is None or all(transaction.commit_lsn < lsn for transaction in transactions)

    def close(self, lsn: int) -> None:
        """Let transactions pass whose commit record lies before an LSN; called again it moves."""
        self._lsn = lsn
        # A waiting intake must check again, and only then waits at this LSN.
        self.is_reached = False
        self._moved.set()

    def open(self) -> None:
        """Let everything pass."""
        self._lsn = None
        self._moved.set()

    def holds(self, transaction: Transaction) -> bool:
        """Tell whether a transaction must wait; pieces of one that has passed continue."""
        # A piece without an LSN belongs to a transaction in progress, which counts only when its end comes.
        lsn, commit_lsn = self._lsn, transaction.commit_lsn
        return lsn is not None and transaction.is_first and commit_lsn > 0 and commit_lsn >= lsn

    async def wait_for_change(self, limit_s: float) -> None:
        """Return when it was closed, moved or opened, or after some seconds."""
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._moved.wait()

    async def wait(self, transaction: Transaction) -> None:
        """Return when the transaction may pass."""
        try:
            while self.holds(transaction):
                self.is_reached = True
                self._moved.clear()
                await self._moved.wait()
        finally:
            self.is_reached = False
