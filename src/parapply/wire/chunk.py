"""The messages between a Stream Start and its Stream Stop, as the assembler hands them on. No I/O."""

from __future__ import annotations

import msgspec


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a transaction that is still in progress on the publisher; its changes are in the form of `Transaction`.

    A change belongs to a subtransaction, or to the top-level one, and each can be rolled back separately. Changes of a
    subtransaction and of all that began inside it are consecutive, because subtransactions nest.
    """

    xid: int  # of the top-level transaction
    #: (index of the first change, xid it belongs to), in order; the first index is 0.
    runs: tuple[tuple[int, int], ...]
