"""Halving: the source transactions of a failed batch that are tried together next. Pure.

    SETS, the whole batch ── failed ──► SETS, the first half, then the other ── failed ──► ... down to _SMALLEST
                                                                                                │ failed
                            ALONE, the transaction whose statement failed ◄── failed ── ORDERED ◄┘

Where code runs on the target each transaction is a separate target transaction, unless the code is trusted not to see
that:

    JOINED ── failed ──► EACH ── the first that fails ──► ALONE ──► EACH, those after it

Parts come in source order, and each is committed before the next is tried, so a part that fails meets nothing of the
others. The cost of one conflict therefore grows with the logarithm of the batch's size.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

#: Transactions of which sets are tried at least; below that a round trip costs more than their statements one by one.
_SMALLEST: Final = 64


class Form(Enum):
    """How a part is tried."""

    SETS = "sets"
    ORDERED = "ordered"  # row by row in source order, as one target transaction
    JOINED = "joined"  # the same, from the beginning
    EACH = "each"  # row by row, each source transaction a target transaction, one sent after the other
    ALONE = "alone"  # one source transaction, row by row: only here a conflict is one


class BatchPart(NamedTuple):
    """The next part to try: transactions of the batch from `start` to before `end`."""

    start: int
    end: int
    form: Form


class Halving:
    """How far a batch has come that is applied in parts. Written by the worker that has the batch."""

    def __init__(self, n_transactions: int, *, form: Form = Form.SETS) -> None:
        """Start with nothing committed, and the whole batch as the next part.

        Args:
            n_transactions: of the batch; at least one.
            form: in which it is tried next. ALONE is for a single transaction.
        """
        #: Transactions committed.
        self.n_done = 0
        #: End and form of the parts to come, the next one last.
        self._parts = [(n_transactions, form)]

    @property
    def is_done(self) -> bool:
        """Return whether all is committed."""
        return not self._parts

    @property
    def part(self) -> BatchPart:
        """Return the part that is tried next."""
        end, form = self._parts[-1]
        return BatchPart(self.n_done, end, form)

    def committed(self) -> None:
        """Go on after the part, which has committed."""
        self.n_done, _ = self._parts.pop()

    def passed(self, count: int) -> None:
        """Go on after this many transactions of the part, which have committed; the others are still to come."""
        self.n_done += count
        if self.n_done == self._parts[-1][0]:
            self._parts.pop()

    def failed(self) -> None:
        """Try less of the part, which is rolled back; the transaction that is to blame is not known."""
        start, end, form = self.part
        count = end - start
        if form is Form.JOINED:
            self._parts[-1] = end, Form.EACH
        elif count == 1:
            self._parts[-1] = end, Form.ALONE
        elif form is Form.SETS and count <= _SMALLEST:
            self._parts[-1] = end, Form.ORDERED
        else:
            self._parts.append((start + count // 2, form))

    def isolate(self, number: int) -> None:
        """Try one transaction of the part alone, because it is to blame or must be; the ones before it come first.

        Args:
            number: its index in the batch; it is in the part.
        """
        start, end, form = self.part
        if number + 1 == end:
            self._parts.pop()
        self._parts.append((number + 1, Form.ALONE))
        if number > start:
            self._parts.append((number, form))
