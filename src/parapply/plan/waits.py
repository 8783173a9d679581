"""Why one batch waits for another: for people, the metrics and the apply log. Pure."""

from __future__ import annotations

import msgspec

from parapply.vocabulary import WaitKind


class Wait(msgspec.Struct, frozen=True):
    """The batch that another one waits for, and the rows or values that it holds."""

    seq: int
    table: str  # schema.table; empty for a barrier
    kind: WaitKind
    name: str = ""  # of the index or constraint

    def __str__(self) -> str:
        """Return it in words."""
        what = f"{self.kind} {self.name}" if self.name else self.kind
        return f"batch {self.seq}: {what}" + (f" in {self.table}" if self.table else "")
