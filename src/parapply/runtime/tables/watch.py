"""Changes of the target's catalogue, which are not in the stream: noticed by asking, from time to time and on errors.

An index or a trigger that is added changes which transactions depend on which (trap T-23). Until it is noticed a batch
may fail and is repeated. A trigger or a rule that acts on a batch's tables is found by the batch itself (`code_check`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.logs import get_logger
from parapply.target.catalogue.fingerprint import change_counts, fingerprints, fingerprints_of_few
from parapply.target.session import settings

if TYPE_CHECKING:
    from parapply.model import Relation
    from parapply.runtime.rest import Rest
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.plans import TablePlans

#: Tables read again at once: others wait for the same few sessions.
_TABLES = 250
#: Part of the time that comparisons may take while no batch fails: with thousands of tables they are further apart.
_SHARE = 0.01
#: Limit of this, in multiples of the usual distance: one comparison may have taken long because the target was busy.
_MOST_TIMES = 20
#: The same where nothing has been counted in the catalogue since the last one: it may be a session that counts nothing.
_QUIET_SHARE = 0.001
_QUIET_MOST_TIMES = 120
#: Seconds between two checks at least, however many batches fail, and multiples of the time that the last one took, up
#: to the usual distance: each range of WAL announces thousands of tables again, and has them compared.
_PAUSE_S = 0.5
_PAUSE_TIMES = 9


def pause_s(catalogue_check_s: float, took_s: float, *, is_quiet: bool = False) -> float:
    """Return the seconds to the next comparison of all tables while no batch fails, after one that took `took_s`.

    It is quiet if the target has counted no change of its catalogue since then.
    """
    share, most_times = (_QUIET_SHARE, _QUIET_MOST_TIMES) if is_quiet else (_SHARE, _MOST_TIMES)
    return max(catalogue_check_s, min(took_s / share, most_times * catalogue_check_s))


class CatalogueWatch:
    """All fields are written and read here only."""

    def __init__(self, tables: TablePlans, control_pool: ControlPool, catalogue_check_s: float, rest: Rest) -> None:
        """Start with nothing checked."""
        self._tables = tables
        self._rest = rest
        self._control_pool = control_pool
        self._catalogue_check_s = catalogue_check_s
        self._log = get_logger()
        #: By relation: OID and fingerprint with which its plan was compared.
        self._seen: dict[Relation, tuple[int, str]] = {}
        self._clock = asyncio.get_running_loop().time
        #: Time and duration of the last comparison of all tables, and the target's counts before it.
        self._compared_s = self._clock()
        self._took_s = 0.0
        self._counts = ""

    async def run(self) -> None:
        """Check from time to time until cancelled."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(took_s, min(max(_PAUSE_S, _PAUSE_TIMES * took_s), self._catalogue_check_s)))
            await self._rest.sleep(self._catalogue_check_s, until=self._tables.is_in_doubt)
            is_in_doubt = self._tables.is_in_doubt.is_set()
            self._tables.is_in_doubt.clear()
            began_s = self._clock()
            with settings.target_errors("looking for changes of the tables"):
                await self._look(is_in_doubt=is_in_doubt)
            took_s = self._clock() - began_s

    async def _look(self, *, is_in_doubt: bool) -> None:
        if not self._tables.plans.current:
            return
        began_s = self._clock()
        async with self._control_pool.session() as conn:
            # Where all are compared at each check nothing can be saved.
            is_slow = self._took_s > _SHARE * self._catalogue_check_s
            counts = await change_counts(conn) if is_slow else ""
            is_quiet = counts == self._counts != ""
            pause = pause_s(self._catalogue_check_s, self._took_s, is_quiet=is_quiet)
            is_due = is_in_doubt or began_s - self._compared_s >= pause
            planned = self._tables.in_force(but=() if is_due else self._seen)
            oids = sorted(set(planned.values()))
            is_few = not is_due and len(oids) <= _TABLES
            now = await (fingerprints_of_few if is_few else fingerprints)(conn, oids)
        if is_due:
            self._compared_s, self._took_s, self._counts = began_s, self._clock() - began_s, counts
        self._seen.update(self._tables.take_fingerprints())
        # A new table that was planned by facts read for it alone is also read again, because it may have changed before
        # this check.
        found = {relation: (oid, now.get(oid, "")) for relation, oid in planned.items()}
        changed = [relation for relation, print_ in found.items() if self._seen.get(relation) != print_]
        for at in range(0, len(changed), _TABLES):
            group = changed[at : at + _TABLES]
            for relation, error in (await self._tables.reread(group)).items():
                # Its next change fails with the same error and reports it where the operator can act.
                self._log.warning("table_unusable", relation=relation.qualified_name, error=error.line())
            self._seen.update({relation: found[relation] for relation in group})
