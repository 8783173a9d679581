"""Changes of the target's catalogue, which are not in the stream: noticed by asking, from time to time and on errors.

An index or a trigger that is added changes which transactions depend on which (trap T-23). Until it is noticed a batch
may fail and is repeated; a batch finds a trigger or a rule that acts on its tables by itself (`code_check`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from parapply.logs import get_logger
from parapply.target.catalogue.fingerprint import fingerprints
from parapply.target.session import settings

if TYPE_CHECKING:
    from parapply.model import Relation
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.plans import TablePlans

#: Tables read again in one check: others wait for the same few sessions.
_TABLES = 250
#: Part of the time that checks may take while no batch fails: with thousands of tables they are further apart.
_SHARE = 0.01
#: But never so many times further apart: one check may have taken long because the target was busy.
_MOST_TIMES = 20
#: Seconds between two checks at least, however many batches fail.
_PAUSE_S = 0.5


def pause_s(catalogue_check_s: float, took_s: float) -> float:
    """Return the seconds to the next check while no batch fails, after one that took `took_s`."""
    return max(catalogue_check_s, min(took_s / _SHARE, _MOST_TIMES * catalogue_check_s))


class CatalogueWatch:
    """`_seen` is written and read here only."""

    def __init__(self, tables: TablePlans, control_pool: ControlPool, catalogue_check_s: float) -> None:
        """Start with nothing checked."""
        self._tables = tables
        self._control_pool = control_pool
        self._catalogue_check_s = catalogue_check_s
        self._log = get_logger()
        #: By relation: OID and fingerprint with which its plan was compared.
        self._seen: dict[Relation, tuple[int, str]] = {}

    async def run(self) -> None:
        """Check from time to time until cancelled.

        Raises:
            TargetLost: the connection ended.
        """
        clock = asyncio.get_running_loop().time
        took_s = 0.0
        while True:
            await asyncio.sleep(max(took_s, min(_PAUSE_S, self._catalogue_check_s)))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s(self._catalogue_check_s, took_s)):
                    await self._tables.is_in_doubt.wait()
            self._tables.is_in_doubt.clear()
            began_s = clock()
            await self._look()
            took_s = clock() - began_s

    async def _look(self) -> None:
        planned = self._tables.in_force
        if not planned:
            return
        with settings.target_errors("looking for changes of the tables"):
            async with self._control_pool.session() as conn:
                now = await fingerprints(conn, sorted(set(planned.values())))
        self._seen.update(self._tables.take_fingerprints())
        # A new one that was planned by facts of its own is read again, too: it may have changed before this check.
        found = {relation: (oid, now.get(oid, "")) for relation, oid in planned.items()}
        changed = [relation for relation, print_ in found.items() if self._seen.get(relation) != print_]
        if not changed:
            return
        if len(changed) > _TABLES:
            self._tables.is_in_doubt.set()  # the others follow soon
            del changed[_TABLES:]
        for relation, error in (await self._tables.reread(changed)).items():
            # Its next change meets the same error and reports it where the operator can act.
            self._log.warning("table_unusable", relation=relation.qualified_name, error=error.line())
        self._seen.update({relation: found[relation] for relation in changed})
