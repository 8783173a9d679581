"""Which tables are copied, as intake must know it: read again, and settled for tables that are new or have a new name.

A table that the state does not know joins from its first row on if the stream has every row of it, as
`source/late_tables.py` decides. Else it waits for `parapply refresh`, and a warning says so as soon as that is known.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from psycopg import sql

from parapply.errors import TargetRefused
from parapply.logs import get_logger
from parapply.source import late_tables
from parapply.source.slot import state_schemas
from parapply.target.session import settings
from parapply.target.state import copies
from parapply.vocabulary import CopyState
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from parapply.config import Config
    from parapply.model import Relation
    from parapply.plan.copy_starts import CopyStarts, Name
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.plans import TablePlans
    from parapply.source.slot import Connection
    from parapply.target.state.copies import Copies, CopyRow
    from parapply.wire.ddl_queue import MadeTable

#: Seconds between two checks for tables that are published and have not come in the stream.
_LOOK_S = 60.0
#: Part of the time that reading the state may take while no command calls, and seconds to the next time at most.
_READ_SHARE = 0.002
_READ_S = 5.0
#: Seconds between two warnings of one table that waits.
_AGAIN_S = 86_400.0
#: New tables checked in one go: each costs a query.
_TABLES = 50
_HINT = "`parapply refresh` copies it; until then its changes are left out"


class DailyWarnings:
    """Which tables are due to be warned of: each at once, and again a day later for as long as there is reason to."""

    def __init__(self) -> None:
        """Start with no warning given."""
        self._told_s: dict[Name, float] = {}

    def due(self, names: Collection[Name], now_s: float) -> list[Name]:
        """Return those to warn of now; what is no longer among the names is new when it comes back."""
        told_s = {name: self._told_s[name] for name in names if name in self._told_s}
        due = [name for name in names if name not in told_s or now_s - told_s[name] >= _AGAIN_S]
        self._told_s = {**told_s, **dict.fromkeys(due, now_s)}
        return due


class Copied:
    """Used by intake (`settle`) and by requests (all others); one of them at a time does the work."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: Config,
        slot_id: int,
        source: Connection,
        control_pool: ControlPool,
        *,
        tables: TablePlans,
        starts: CopyStarts,
        known: Copies,
        low_lsn: int,
    ) -> None:
        """Tell which tables are copied, as read with the state.

        Args:
            config: publications and state schema.
            slot_id: of the state.
            source: plain session on the publisher.
            control_pool: sessions on the target.
            tables: learns which of them are not applied.
            starts: updated with every change.
            known: as read.
            low_lsn: the stream is read from here on.
        """
        self._publications = config.source.publications
        self._mapping = config.mapping
        self._schema = config.target.state_schema
        self._slot_id = slot_id
        self._source = source
        self._control_pool = control_pool
        self._tables = tables
        self._starts = starts
        self._low_lsn = low_lsn
        self._know(known)
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._looked_s: float | None = None
        self._next_read_s = 0.0
        self._warnings = DailyWarnings()
        #: Called when the set of copied tables has changed; requests puts itself here.
        self.on_changed: Callable[[], None] = _ignore
        self._log = get_logger()
        starts.update(known.starts(low_lsn), is_listed=known.is_listed)

    async def read(self, *, is_called: bool = True) -> None:
        """Read the state again, and log the tables that wait: at once, and once a day.

        Args:
            is_called: a command has called; else, with thousands of tables, less often than this is called.

        Raises:
            TargetRefused, TargetLost: it could not be read.
        """
        began_s = self._clock()
        if not is_called and not self._is_under_way and began_s < self._next_read_s:
            return
        async with self._lock:
            await self._read()
        self._next_read_s = began_s + min((self._clock() - began_s) / _READ_SHARE, _READ_S)
        self._tell()

    async def look(self, *, is_due: bool = False) -> None:
        """Look for published tables that neither the state knows nor the stream has named; from time to time only.

        Args:
            is_due: now, whenever the last check was.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be asked.
        """
        now_s = self._clock()
        if not is_due and self._looked_s is not None and now_s - self._looked_s < _LOOK_S:
            return
        if not self.known.is_listed or any(row.source_oid is None for row in self.known.tables):
            return
        is_first, self._looked_s = self._looked_s is None, now_s
        async with self._lock:
            if is_first:
                await self._marks()  # a state of an older version has them from now on
            oids = [row.source_oid for row in self.known.tables if row.source_oid is not None]
            found = await late_tables.uncovered(self._source, self._publications, oids)
            if any(not self._is_left_out(name) for _, name in found):
                # A cut-over may have made its state there a moment ago, of which the stream has sent nothing yet.
                self._starts.leave_out(await state_schemas(self._source))
            for oid, name in [one for one in found if not self._is_left_out(one[1])][:_TABLES]:
                # A table that will join from its first row on has no rows, or they are on their way.
                if reason := await self._why_not_whole(oid):
                    await self._note(name, oid, reason)
            await self._read()
        self._tell()

    def is_settled(self, relations: Sequence[Relation]) -> bool:
        """Tell whether `settle` has nothing to do."""
        return all(self._is_settled(relation) for relation in relations)

    async def settle(self, relations: Sequence[Relation], *, may_be_missing: bool = False) -> None:
        """Settle from where on relations are applied that are announced now, before their first change is read.

        Args:
            relations: announced.
            may_be_missing: a command in the same transaction may make a table that the target does not have.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be asked.
        """
        if self.is_settled(relations):
            return
        async with self._lock:
            for relation in relations:
                if not self._is_settled(relation):
                    await self._settle(relation, may_be_missing=may_be_missing)
                    await self._read()
        self._tell()

    async def note_made(self, tables: Sequence[MadeTable]) -> None:
        """Note that tables are applied which a command is about to make, as far as the stream has all of their rows.

        Raises:
            TargetRefused, TargetLost: it could not be noted.
        """
        if not self.known.is_listed:
            return
        async with self._lock:
            for table in tables:
                name = table.schema, table.name
                row = self._row(table.oid)
                if set(self._publications).isdisjoint(table.publications) or (row is not None and not row.is_late):
                    continue
                if row is not None:
                    # `look` has found it before the stream came here.
                    async with self._control_pool.session() as conn:
                        await copies.join(conn, self._schema, self._slot_id, table.oid)
                else:
                    if self._namesake(name) is not None:
                        await self._rename({table.oid: name})
                    await self._note(name, table.oid, "")
                self._log.info("table_joined", relation=f"{table.schema}.{table.name}")
            await self._read()

    def _is_left_out(self, name: Name) -> bool:
        return name == QUEUE or self._starts.leaves_out(name[0])

    def _know(self, known: Copies) -> None:
        self.known = known
        self._is_under_way = known.is_under_way
        self._waiting = {row.name: row.reason for row in known.tables if row.state == CopyState.WAITING}
        self._by_oid = {row.source_oid: row for row in known.tables if row.source_oid is not None}
        self._by_name = {row.name: row for row in known.tables}

    def _row(self, oid: int) -> CopyRow | None:
        return self._by_oid.get(oid)

    def _namesake(self, name: Name) -> CopyRow | None:
        return self._by_name.get(name)

    def _is_settled(self, relation: Relation) -> bool:
        name = relation.full_name
        row = self._row(relation.oid)
        if row is not None:
            return row.name == name
        namesake = self._namesake(name)
        if namesake is not None and namesake.source_oid is None:
            return False
        # One in the schema of our own progress may belong to another parapply, made since the publisher was read.
        return self._starts.leaves_out(name[0]) or (not self.known.is_listed and name[0] != self._schema)

    async def _settle(self, relation: Relation, *, may_be_missing: bool) -> None:
        name, oid = relation.full_name, relation.oid
        if name[0] == self._schema and name[0] in (schemas := await state_schemas(self._source)):
            self._log.info("state_left_out", schemas=sorted(schemas))
            self._starts.leave_out(schemas)
            return
        row, namesake = self._row(oid), self._namesake(name)
        if row is not None:
            await self._rename({oid: name})
            self._log.info("table_renamed", relation=relation.qualified_name, value=".".join(row.name))
            return
        if namesake is not None and namesake.source_oid is None:
            async with self._control_pool.session() as conn:
                await copies.identify(conn, self._schema, self._slot_id, name, oid)
            return
        if not self.known.is_listed:
            return
        if namesake is not None:
            await self._rename({oid: name})
        reason = await self._why_not_whole(oid) or await self._why_not_here(name, may_be_missing=may_be_missing)
        await self._note(name, oid, reason)
        if not reason:
            self._log.info("table_joined", relation=relation.qualified_name)

    async def _rename(self, names: dict[int, Name]) -> None:
        """Note the names that tables have on the publisher now; of some, what the stream says.

        What is gone gives its name to a table that the stream says has it.
        """
        oids = [row.source_oid for row in self.known.tables if row.source_oid is not None]
        names |= await late_tables.names(self._source, oids)
        known = {row.source_oid: row.name for row in self.known.tables}
        changed = {oid: name for oid, name in names.items() if known.get(oid) != name}
        async with self._control_pool.session() as conn:
            await copies.rename(conn, self._schema, self._slot_id, changed)

    async def _why_not_whole(self, oid: int) -> str:
        line = await late_tables.places(self._source, self._publications, oid)
        return late_tables.why_not_whole(line, await self._marks())

    async def _marks(self) -> frozenset[str]:
        """Return the marks, which a state of an older version has not: then those of now."""
        async with self._control_pool.session() as conn:
            found = await copies.load_marks(conn, self._schema, self._slot_id)
            if found is None:
                found = frozenset(await late_tables.marks(self._source, self._publications))
                await copies.keep_marks(conn, self._schema, self._slot_id, list(found))
        return found

    async def _why_not_here(self, name: Name, *, may_be_missing: bool) -> str:
        """Return why a table of the publisher cannot begin empty on the target; empty: it can."""
        there = sql.SQL(
            "SELECT c.relkind = 'p' FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n"
            " ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p')"
        )
        name = self._mapping.target_of(name)
        async with self._control_pool.session() as conn:
            with settings.target_errors("looking for a new table"):
                if not (found := await settings.rows(conn, there, list(name))):
                    return "" if may_be_missing else "the target does not have it"
            # Without the rows of tables that inherit from it.
            only = sql.SQL("" if found[0][0] else "ONLY ")
            has_rows = sql.SQL("SELECT EXISTS (SELECT FROM {}{})").format(only, sql.Identifier(*name))
            try:
                with settings.target_errors("looking into a new table"):
                    is_full = (await settings.rows(conn, has_rows))[0][0]
            except TargetRefused as error:
                return error.line()
        return "it holds rows on the target already" if is_full else ""

    async def _note(self, name: Name, oid: int, reason: str) -> None:
        async with self._control_pool.session() as conn:
            await copies.settle(conn, self._schema, self._slot_id, name, oid, reason)

    async def _read(self) -> None:
        async with self._control_pool.session() as conn:
            if not self._is_under_way:
                stamp = await copies.load_stamp(conn, self._schema, self._slot_id)
                if stamp == self.known.stamp:
                    return
            found = await copies.load(conn, self._schema, self._slot_id)
        before = self.known
        self._know(found)
        starts = found.starts(self._low_lsn)
        if starts != before.starts(self._low_lsn) or found.is_listed != before.is_listed:
            self._log.info("copies_changed", **{state.value: found.count(state) for state in CopyState})
            self._starts.update(starts, is_listed=found.is_listed)
            self.on_changed()

    def _tell(self) -> None:
        waiting = self._waiting
        self._tables.show_waiting(frozenset(waiting))
        for name in self._warnings.due(waiting, self._clock()):
            reason = waiting[name]
            hint = None if reason == copies.PAUSED else _HINT
            self._log.warning("table_waits", relation=".".join(name), reason=reason, hint=hint)


def _ignore() -> None:
    """Placeholder until a listener is set."""
