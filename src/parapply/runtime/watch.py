"""Changes of the target's catalogue, which are not in the stream: noticed by asking, from time to time and on errors.

An index or a trigger that somebody adds changes who depends on whom (trap T-23). Until it is noticed a batch may fail
and is repeated; a trigger that sees the order of changes is noticed too late by as much as the interval.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.errors import TargetRefused
from parapply.logs import get_logger
from parapply.target import settings
from parapply.target.fingerprint import fingerprints

if TYPE_CHECKING:
    from parapply.model import Relation
    from parapply.runtime.desk import Desk
    from parapply.runtime.tables import Tables

#: Tables read again in one look: others wait for the same few sessions.
_TABLES = 50
#: Seconds between two looks at least, however many batches fail.
_PAUSE_S = 0.5


class CatalogueWatch:
    """`_seen` is written and read here only."""

    def __init__(self, tables: Tables, desk: Desk, catalogue_check_s: float) -> None:
        """Look at nothing yet."""
        self._tables = tables
        self._desk = desk
        self._catalogue_check_s = catalogue_check_s
        self._log = get_logger()
        #: By relation: OID and fingerprint with which its plan was compared.
        self._seen: dict[Relation, tuple[int, str]] = {}

    async def run(self) -> None:
        """Look from time to time until cancelled.

        Raises:
            TargetLost: the connection ended.
        """
        while True:
            await asyncio.sleep(min(_PAUSE_S, self._catalogue_check_s))
            try:
                async with asyncio.timeout(self._catalogue_check_s):
                    await self._tables.is_in_doubt.wait()
            except TimeoutError:
                pass
            self._tables.is_in_doubt.clear()
            await self._look()

    async def _look(self) -> None:
        planned = self._tables.in_force
        if not planned:
            return
        with settings.target_errors("looking for changes of the tables"):
            async with self._desk.session() as conn:
                now = await fingerprints(conn, sorted(set(planned.values())))
        # A new one is read again, too: it may have changed between its plan and this look.
        found = {relation: (oid, now.get(oid, "")) for relation, oid in planned.items()}
        changed = [relation for relation, print_ in found.items() if self._seen.get(relation) != print_]
        for relation in changed[:_TABLES]:
            try:
                await self._tables.refresh([relation])
            except TargetRefused as error:
                # Its next change meets the same and says so where it can be acted upon.
                self._log.warning("table_unusable", relation=relation.qualified_name, error=error.line())
            self._seen[relation] = found[relation]
