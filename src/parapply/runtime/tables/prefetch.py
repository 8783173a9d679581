"""Facts of published tables, read in groups while the stream starts: a first announcement needs no separate query.

The catalogue describes a group in little more time than one table. The facts are used for a first announcement only,
and only if the table's fingerprint says that they still hold. Among thousands of tables, a group that an announcement
waits for comes first, and the others when there is time.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.errors import ParapplyError
from parapply.plan.table import TableFacts
from parapply.target.catalogue import facts
from parapply.target.catalogue.fingerprint import fingerprints, fingerprints_of_few, gives_access
from parapply.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.target.session.settings import Connection

#: Seconds after which facts are compared with the catalogue before they are used: an announcement that comes later may
#: name a table that was changed on both sides in the meantime.
_VALID_S = 1.0
#: Seconds at most if a comparison takes long, and the part of the time that comparisons may take while announcements
#: come one after the other.
_LONG_VALID_S: Final = 10.0
_SHARE: Final = 0.1
#: Seconds for which an announcement waits for a group; it waits in vain if another session has locked a table.
_PATIENCE_S = 5.0
#: Tables read at once: an announcement may wait for two groups, and the leader does nothing else while it takes one in.
_GROUP: Final = 200
#: Tables read ahead at most, because the facts of one take some kilobytes. Others are read when they are announced.
_MOST_TABLES: Final = 20_000
#: All wait for the first group.
_FIRST_GROUP: Final = 20
#: Tables read without a rest, and the length of a rest in multiples of the time that the group took: a tenth of a
#: millisecond of the target's CPU for each of twenty thousand tables is more than a start should take of it.
_AT_ONCE: Final = 5000
_REST: Final = 4
#: Tables from which the fingerprints of all are read at once, in half the time.
_MANY: Final = 1000


class AheadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the catalogue about a table that the role may write to.

    Attributes:
        facts: of the table.
        fingerprint: read before the facts, so that a change in between shows as another fingerprint.
        valid_s: when the catalogue was last known to say this, by the event loop's clock.
    """

    facts: TableFacts
    fingerprint: str
    valid_s: float


class CataloguePrefetch:
    """Belongs to one epoch. Written by its own task and by `take`, which never fail; read by `TablePlans`."""

    def __init__(
        self, control_pool: ControlPool, role: str, names: Callable[[], Awaitable[Sequence[tuple[str, str]]]]
    ) -> None:
        """Begin to read; without names the question is planned for nothing, which fills the session's caches.

        Args:
            control_pool: sessions on the target; open.
            role: session_replication_role of the workers.
            names: asks for schema and name of the tables to read.
        """
        self._control_pool = control_pool
        self._role = role
        self._found: dict[tuple[str, str], AheadFacts] = {}
        #: Still to be read; and all of them in the order in which they are read, each with its place.
        self._queue: set[tuple[str, str]] = set()
        self._order: list[tuple[str, str]] = []
        self._places: dict[tuple[str, str], int] = {}
        #: Where the next group begins, if an announcement waits for it.
        self._wanted: tuple[str, str] | None = None
        self._has_begun = False
        #: A group takes longer than an announcement should wait.
        self._is_slow = False
        #: Seconds for which facts hold once read or compared, and the time of the last comparison.
        self._valid_s = _VALID_S
        self._checked_s = -math.inf
        self._group_read = asyncio.Condition()
        #: Fingerprints read before the facts of any of these tables, by OID.
        self._prints: dict[int, str] = {}
        #: Number of announcements that wait for a group; the event ends a rest.
        self._n_waiting = 0
        self._is_wanted = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._reading = asyncio.create_task(self._read(names), name="facts-ahead")

    async def close(self) -> None:
        """Stop reading."""
        await end_tasks([self._reading])

    async def take(self, schema: str, name: str) -> AheadFacts | None:
        """Return the facts read about a table, once, if they hold now; None if they do not, or were not read.

        The role may write to that table.
        """
        table = schema, name
        await self.make_ready(schema, name)
        self._queue.discard(table)
        return self._found.pop(table, None)

    async def make_ready(self, schema: str, name: str) -> None:
        """Wait until the facts about a table are read and hold now; not for long if they cannot be read."""
        table = schema, name
        # Wait even for a table that is not among them: a second session would have to fill its caches first.
        await self._wait_for(table)
        found = self._found.get(table)
        if found is not None and self._clock() - found.valid_s > self._valid_s:
            await self._check(table)

    def ready(self, schema: str, name: str) -> AheadFacts | None:
        """Return what `take` would return without waiting, and keep it; None if it would have to wait."""
        found = self._found.get((schema, name))
        return found if found is not None and self._clock() - found.valid_s <= self._valid_s else None

    def forget(self, schema: str, name: str) -> None:
        """Drop the facts about a table that is announced now, because they serve once."""
        self._found.pop((schema, name), None)

    def forget_all(self) -> None:
        """Drop everything that was read: commands of the publisher have changed the tables."""
        self._found.clear()
        self._queue.clear()

    async def _wait_for(self, table: tuple[str, str]) -> None:
        if self._is_read(table) or self._is_slow:
            return
        self._wanted = table if table in self._queue else self._wanted
        self._n_waiting += 1
        self._is_wanted.set()
        try:
            async with asyncio.timeout(_PATIENCE_S), self._group_read:
                await self._group_read.wait_for(lambda: self._is_read(table))
        except TimeoutError:
            self._is_slow = True
            self._queue.discard(table)
        finally:
            self._n_waiting -= 1

    def _is_read(self, table: tuple[str, str]) -> bool:
        return self._reading.done() or (self._has_begun and table not in self._queue)

    async def _check(self, table: tuple[str, str]) -> None:
        """Compare a table with the catalogue, and with it others that wait for their announcement.

        It alone at first; if more announcements come soon after, all that would have to be compared soon.
        """
        now_s = self._clock()
        is_repeated = now_s - self._checked_s <= 2 * self._valid_s
        half_s = self._valid_s / 2
        old = (one for one, found in self._found.items() if now_s - found.valid_s > half_s and one != table)
        group = {one: self._found.pop(one) for one in [table, *(old if is_repeated else ())]}
        compare = fingerprints if len(group) > _GROUP else fingerprints_of_few
        with suppress(ParapplyError):  # each is read again when it is announced, where the error has a name
            async with self._control_pool.session() as conn:
                current = await compare(conn, [found.facts.oid for found in group.values()])
            for one, found in group.items():
                if current.get(found.facts.oid) == found.fingerprint:
                    self._found[one] = msgspec.structs.replace(found, valid_s=now_s)
        self._checked_s = self._clock()
        self._valid_s = max(_VALID_S, min(_LONG_VALID_S, (self._checked_s - now_s) / _SHARE))

    async def _read(self, names: Callable[[], Awaitable[Sequence[tuple[str, str]]]]) -> None:
        try:
            # While the names are asked for.
            async with self._control_pool.session() as conn:
                await facts.make_plan(conn, role=self._role)
            published = await names()
            self._order = list(dict.fromkeys(published[:_MOST_TABLES]))
            self._places = {table: place for place, table in enumerate(self._order)}
            self._queue = set(self._order)
            if not self._queue:
                return
            await self._read_group(self._next(_FIRST_GROUP))
            if len(self._queue) >= _MANY:
                await self._read_all()
            n_read = 0
            while self._queue:
                began_s = self._clock()
                await self._read_group(self._next(_GROUP))
                n_read += _GROUP
                if n_read >= _AT_ONCE:
                    await self._rest(_REST * (self._clock() - began_s))
        except ParapplyError:
            return  # the next user of the session or the table gets this error again, and can say what it was for
        finally:
            self._prints = {}
            await self._note_progress(list(self._queue))

    def _next(self, most: int) -> list[tuple[str, str]]:
        """Return a group: the table that an announcement waits for and its successors, often next; then the first."""
        wanted, self._wanted = self._wanted, None
        place = self._places[wanted] if wanted in self._queue else 0
        order = chain(islice(self._order, place, None), islice(self._order, place))
        return list(islice((one for one in order if one in self._queue), most))

    async def _rest(self, rest_s: float) -> None:
        if not self._n_waiting:
            self._is_wanted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._is_wanted.wait()

    async def _read_all(self) -> None:
        """Read the fingerprints of all tables that are still to be read, and the facts of those that are like others.

        In groups each table would take the target three times as long.
        """
        async with self._control_pool.session() as conn:
            oids = await facts.table_oids(conn, list(self._queue))
            self._prints = await fingerprints(conn, list(oids.values()))
        shapes: dict[bytes, TableFacts] = {}
        for at in range(0, len(self._order), _AT_ONCE):
            if self._n_waiting:
                await self._read_group(self._next(_FIRST_GROUP))
            began_s = self._clock()
            tables = [oids[one] for one in self._order[at : at + _AT_ONCE] if one in self._queue and one in oids]
            async with self._control_pool.session() as conn:
                alike = await facts.load_alike(conn, tables, role=self._role, shapes=shapes, most=_GROUP)
                denied = await self._denied(conn, list(alike.values()), self._prints)
            self._keep(alike.values(), self._prints, denied, began_s)
            await self._note_progress(alike)
            if at:
                await self._rest(_REST * (self._clock() - began_s))

    async def _read_group(self, group: Sequence[tuple[str, str]]) -> None:
        now_s = self._clock()
        async with self._control_pool.session() as conn:
            # Whatever changes after this shows as another fingerprint.
            before = self._prints
            if not before:
                oids = await facts.table_oids(conn, group)
                before = await fingerprints_of_few(conn, list(oids.values()))
            many = await facts.load_many(conn, group, role=self._role)
            tables = [one for one in many.values() if isinstance(one, TableFacts)]
            denied = await self._denied(conn, tables, before)
        self._keep(tables, before, denied, now_s)
        await self._note_progress(group)

    async def _denied(
        self, conn: Connection, tables: Sequence[TableFacts], before: Mapping[int, str]
    ) -> Collection[tuple[str, str]]:
        """Return the tables to which the role may not write; of most the fingerprint says that it may."""
        unknown = [one for one in tables if not gives_access(before.get(one.oid, ""))]
        return await facts.access_problems(conn, unknown) if unknown else ()

    def _keep(
        self,
        tables: Iterable[TableFacts],
        before: Mapping[int, str],
        denied: Collection[tuple[str, str]],
        now_s: float,
    ) -> None:
        for table in tables:
            name = table.schema, table.name
            if table.oid in before and name in self._queue and name not in denied:  # not forgotten since
                self._found[name] = AheadFacts(facts=table, fingerprint=before[table.oid], valid_s=now_s)

    async def _note_progress(self, group: Iterable[tuple[str, str]]) -> None:
        self._queue.difference_update(group)
        self._has_begun, self._is_slow = True, False
        async with self._group_read:
            self._group_read.notify_all()
