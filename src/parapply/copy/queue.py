"""The next part to copy for each connection. Pure.

Each connection has a table to itself as long as there are tables that none has begun. Every other one takes the
smallest, so that many tables are complete soon: what is complete is kept if the copy is killed. The others take the
largest, whose indexes are then made while there is still something to copy. At the end they share what is left.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.copy.parts import Part
    from parapply.plan.copy_starts import Name


class PartQueue:
    """Written by the connections' tasks, which are tasks of one loop."""

    def __init__(self, tables: Mapping[Name, Sequence[Part]]) -> None:
        """Take tables with their parts; one without any is never given out."""
        sizes = {name: sum(part.pages for part in parts) for name, parts in tables.items() if parts}
        #: Not begun, the smallest first.
        self._waiting = deque(sorted(sizes, key=lambda name: (sizes[name], name)))
        self._parts = {name: deque(parts) for name, parts in tables.items() if parts}
        self._table_of: dict[int, Name] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether all parts are given out."""
        return not self._parts

    def take(self, connection: int) -> tuple[Name, Part] | None:
        """Return the next part for a connection, by its number from 1 on; None when all are given out."""
        name = self._table_of.get(connection)
        if name not in self._parts:
            if self._waiting:
                name = self._waiting.popleft() if connection % 2 else self._waiting.pop()
            else:
                name = max(self._parts, key=lambda one: len(self._parts[one]), default=None)
            if name is None:
                return None
            self._table_of[connection] = name
        parts = self._parts[name]
        part = parts.popleft()
        if not parts:
            del self._parts[name]
        return name, part
