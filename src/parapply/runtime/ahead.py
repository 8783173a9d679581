"""Facts of published tables, read while the stream starts: the first of them are announced some milliseconds later.

The server takes its time for the first look of a session at the catalogue; here nobody waits for that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.errors import ParapplyError
from parapply.runtime.tasks import end_tasks
from parapply.target import facts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from parapply.plan.table import TableFacts
    from parapply.runtime.desk import Desk

#: Seconds after which facts are too old to be used: an announcement that comes later may speak of a table that was
#: changed on both sides meanwhile.
_VALID_S = 1.0


class FactsAhead:
    """Belongs to one epoch. Written by its own task, which never fails; read by `Tables`."""

    def __init__(self, desk: Desk, role: str, names: Callable[[], Awaitable[Sequence[tuple[str, str]]]]) -> None:
        """Begin to read; without names the catalogue is read once for nothing, which fills the session's caches.

        Args:
            desk: sessions on the target; open.
            role: session_replication_role of the workers.
            names: asks for schema and name of the tables to read.
        """
        self._desk = desk
        self._role = role
        self._found: dict[tuple[str, str], tuple[TableFacts, float]] = {}
        self._clock = asyncio.get_running_loop().time
        self._reading = asyncio.create_task(self._read(names), name="facts-ahead")

    async def close(self) -> None:
        """Stop reading."""
        await end_tasks([self._reading])

    async def take(self, schema: str, name: str) -> TableFacts | None:
        """Return what was read of a table a moment ago, once; None if there is nothing fresh.

        The role may write to that table.
        """
        # Also for a table that is not among them: a second session would have to fill its caches first.
        await asyncio.wait({self._reading})
        found, read_s = self._found.pop((schema, name), (None, 0.0))
        return found if self._clock() - read_s <= _VALID_S else None

    async def _read(self, names: Callable[[], Awaitable[Sequence[tuple[str, str]]]]) -> None:
        try:
            tables = await names()
            async with self._desk.session() as conn:
                for schema, name in tables or [("pg_catalog", "pg_class")]:
                    read_s = self._clock()
                    found = await facts.load_facts(conn, schema, name, role=self._role)
                    if tables and found is not None:
                        await facts.check_table_access(conn, found)
                        self._found[schema, name] = (found, read_s)
        except ParapplyError:
            return  # whoever needs the session or the table meets this again, and can say what for
