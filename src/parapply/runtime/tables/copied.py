"""Copied tables, as intake must know them: read again, and settled for tables that are new or have a new name.

A table that the state does not know joins from its first row on if the stream has every row of it, as
`source/late_tables.py` decides. Else it waits for `parapply refresh`, and a warning says so as soon as that is known.
So does a table that was copied and of which changes may be missing, because it was not published all the time
(`continuity.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply import cascades, continuity, sharing
from parapply.errors import TargetRefused
from parapply.logs import get_logger
from parapply.plan.copy_starts import NEVER, CopyStarts
from parapply.runtime.rest import LONG_S
from parapply.source import late_tables, publishing, slot
from parapply.target.session import settings
from parapply.target.sql.own_rows import own_rows
from parapply.target.state import copies
from parapply.target.state.schema import is_of_state
from parapply.vocabulary import SCHEMA_ONLY, CopyState
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from parapply.config import Config
    from parapply.model import Relation
    from parapply.plan.copy_starts import Known, Name, Start
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.plans import TablePlans
    from parapply.source.late_tables import TablePlace
    from parapply.source.slot import Connection
    from parapply.target.state.copies import Copies, CopyRow
    from parapply.target.state.slots import SlotState
    from parapply.wire.ddl_queue import MadeTable

#: An LSN after all others.
_LATER: Final = 1 << 64
#: Seconds between two checks for tables that are published and have not come in the stream.
_LOOK_S = 60.0
#: Part of the time that reading the state may take while no command calls, and seconds to the next time at most.
_READ_SHARE = 0.002
_READ_S = 5.0
#: Seconds between two warnings of one table that waits.
_AGAIN_S = 86_400.0
#: New tables checked by one look that no command waits for: each costs a query.
_TABLES = 50
_HINT = "`parapply refresh` copies it; until then its changes are left out"
_HINT_AGAIN = "`parapply refresh` empties it and copies it again; until then its changes are left out"


class DailyWarnings:
    """Tables that are due for a warning: each at once, and again every day as long as the reason lasts."""

    def __init__(self) -> None:
        """Start with no warning given."""
        self._told_s: dict[Name, float] = {}

    def due(self, names: Collection[Name], now_s: float) -> list[Name]:
        """Return the tables to warn of now; a name that is missing in one call is new when it comes back."""
        told_s = {name: self._told_s[name] for name in names if name in self._told_s}
        due = [name for name in names if name not in told_s or now_s - told_s[name] >= _AGAIN_S]
        self._told_s = {**told_s, **dict.fromkeys(due, now_s)}
        return due


class Copied:
    """Used by intake (`settle`) and by requests (all others); one of them at a time does the work."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: Config,
        state: SlotState,
        source: Connection,
        control_pool: ControlPool,
        *,
        tables: TablePlans,
        known: Copies,
        taken: sharing.Taken,
        names: Mapping[int, Name],
    ) -> None:
        """Start with the copied tables as read with the state; the stream is read from the slot's state on.

        In `taken` tables rows of other slots have constants; `names` are of epochs before, of tables not in the state.
        """
        self._config = config
        self._publications = config.source.publications
        self._mapping = config.mapping
        self._schema = config.target.state_schema
        self._slot_id = state.slot_id
        self._source = source
        self._control_pool = control_pool
        self._tables = tables
        #: Changes that are left out, because a copy holds or will hold them. Written here, and by intake for relations
        #: that are announced.
        self.starts = CopyStarts()
        self._low_lsn = state.low_lsn
        #: Partitions that are announced with the root that they are published as: the root's OID by theirs.
        self._roots: dict[int, int] = {}
        #: Tables of a parapply's progress on the publisher that no longer exist there.
        self._gone: set[int] = set()
        #: Announced under a name that the target does not have, and looked for under the publisher's name of now.
        self._sought: set[Relation] = set()
        self._withholds = bool(config.mapping.withholding)
        #: By OID, the tables of which rows or values are kept that are it or in its partition tree.
        self._relatives: Mapping[int, Sequence[Name]] = {}
        #: Everything that committed before this LSN had when they were read.
        self._read_lsn = 0
        #: Asked whether they may come under their own names, with the LSN of that time.
        self._judged: dict[Relation, int] = {}
        #: Numbers of columns by name, as seen when they were announced first, 0 if another name had taken their place;
        #: by OID of tables with columns to leave out.
        self._numbers: dict[int, dict[str, int]] = {}
        #: Written by looks; one is due as soon as a command calls and another slot has changed its own.
        self._taken = taken
        self._names = names
        self._know(known)
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._looked_s: float | None = None
        #: The new table that was checked last; the next look goes on behind it.
        self._checked: Name = ("", "")
        #: A table has joined: the next look is due.
        self._is_due = False
        self._next_read_s = 0.0
        self._warnings = DailyWarnings()
        #: Counts changes of the set of copied tables, and commands that ask for an answer. Read by requests.
        self.n_changes = 0
        #: Set with each of them; admission clears it.
        self.changed = asyncio.Event()
        self._log = get_logger()
        self._update(known.starts(state.low_lsn))

    async def read(self, *, is_called: bool = True, may_wait: bool = False) -> None:
        """Read the state again, and log the tables that wait: at once, and once a day.

        If a command has not called, less often than this is called with thousands of tables; at rest never, because
        then only commands change what is read.
        """
        began_s = self._clock()
        due_s = self._next_read_s + (LONG_S if may_wait else 0.0)
        if not is_called and not self.is_under_way and began_s < due_s:
            return
        async with self._lock:
            await self._read()
            if is_called:
                async with self._control_pool.session() as conn:
                    taken = await sharing.others(conn, self._schema, self._slot_id)
                self._is_due = self._is_due or taken != self._taken
        self._next_read_s = began_s + min((self._clock() - began_s) / _READ_SHARE, _READ_S)
        self._tell()

    async def look(self, *, gap_lsn: int | None = None, is_due: bool = False) -> None:
        """Look for published tables that neither the state knows nor the stream has named, from time to time or now.

        Before `gap_lsn` a publication was missing, as the stream has said: the look is due. With `is_due` it comes now,
        and checks every table.
        """
        now_s = self._clock()
        n_tables = None if is_due else _TABLES
        is_due = is_due or self._is_due or gap_lsn is not None
        if not is_due and self._looked_s is not None and now_s - self._looked_s < _LOOK_S:
            return
        is_first, self._looked_s, self._is_due = self._looked_s is None, now_s, False
        async with self._lock:
            async with self._control_pool.session() as conn:
                self._taken = await sharing.claim(self._source, conn, self._config, self._slot_id, is_daemon=True)
            await self._compare(gap_lsn)
            await self._name_waiting()
            if self.known.is_listed:
                await self._look_for_others(n_tables, is_first=is_first)
            await self._read()
        self._tell()

    async def _compare(self, gap_lsn: int | None = None) -> None:
        """Make copied tables wait if they were not published all the time."""
        async with self._control_pool.session() as conn:
            found = await continuity.look(self._source, conn, self._config, self._slot_id, self.known, gap_lsn=gap_lsn)
        continuity.warn_of_altered(found)
        if found.has_changed:
            await self._read()

    async def _name_waiting(self) -> None:
        """Note the present names of tables of which no change is applied, because the stream may never name them."""
        rows = [row for row in self.known.tables if row.state == CopyState.WAITING]
        waiting = {row.source_oid: row.name for row in rows}
        now = await late_tables.names(self._source, waiting) if waiting else {}
        if any(waiting[oid] != name for oid, name in now.items()):
            await self._rename({})
            await self._read()

    async def _look_for_others(self, n_tables: int | None, *, is_first: bool) -> None:
        """Note published tables that the stream has not named; check this many, all if None."""
        if is_first:
            await self._marks()  # a state of an older version has them from now on
        oids = [row.source_oid for row in self.known.tables]
        roots = [row.source_oid for row in self.known.tables if _may_be_root(row)]
        found = await late_tables.uncovered(self._source, self._publications, oids, roots)
        if any(not self._is_left_out(name) for _, name in found):
            # A cut-over may have made its state there a moment ago, of which the stream has sent nothing yet.
            self.starts.leave_out(await slot.state_schemas(self._source))
        others = [(name, oid) for oid, name in found if not self._is_left_out(name)]
        others.sort(key=lambda one: (one[0] <= self._checked, one))
        marks = await self._marks() if others else frozenset()
        for name, oid in others[:n_tables]:
            # A table that will join from its first row on has no rows, or they are on their way. It is found again.
            self._checked = name
            line = await late_tables.places(self._source, self._publications, oid)
            if reason := self._why_left_out(name) or late_tables.why_not_whole(line, marks):
                if self._namesake(name) is not None:
                    await self._rename({})
                await self._note(name, oid, reason)

    def is_settled(self, relations: Sequence[Relation], commit_lsn: int = _LATER) -> bool:
        """Return whether `settle` has nothing to do for a transaction that commits at an LSN."""
        return self._are_judged(relations, commit_lsn) and all(self._is_settled(relation) for relation in relations)

    def _are_judged(self, relations: Collection[Relation], commit_lsn: int) -> bool:
        # A table may have become a partition since it was announced last, but not before the catalogue was read.
        return not self._withholds or all(self._is_judged(relation, commit_lsn) for relation in relations)

    def _is_judged(self, relation: Relation, commit_lsn: int) -> bool:
        if commit_lsn < self._judged.get(relation, 0):
            return True
        is_apart = relation.oid in self._relatives or self._mapping.masked_of(relation.full_name)
        return commit_lsn < self._read_lsn and not is_apart and not self._tables.is_withheld(relation)

    def may_follow(self, relations: Collection[Relation]) -> bool:
        """Return whether nothing that `settle` finds out keeps changes back that come before a commit."""
        return self._are_judged(relations, 0) and not any(self._tables.is_withheld(relation) for relation in relations)

    async def settle(
        self, relations: Sequence[Relation], commit_lsn: int = _LATER, *, may_be_missing: bool = False
    ) -> None:
        """Decide from where on the relations announced now are applied, before their first change is read.

        One may be missing on the target where a command in the same transaction may make it.
        """
        if self.is_settled(relations, commit_lsn):
            return
        async with self._lock:
            if not self._are_judged(relations, commit_lsn):
                await self._check_withheld(relations, commit_lsn)
            for relation in relations:
                if not self._is_settled(relation):
                    await self._settle(relation, may_be_missing=may_be_missing)
                    await self._read()
        self._tell()

    async def note_made(self, tables: Sequence[MadeTable]) -> None:
        """Note tables that a command is about to make as applied, as far as the stream has all of their rows.

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
                    await self._note(name, table.oid, self._why_left_out(name))
                if not self._why_left_out(name):
                    self._log.info("table_joined", relation=f"{table.schema}.{table.name}")
            await self._read()

    def _why_left_out(self, name: Name) -> str:
        """Return why a table that the state does not know gets no rows, whatever the stream has; empty: it may."""
        return SCHEMA_ONLY if self._mapping.is_schema_only(name) else ""

    def _is_left_out(self, name: Name) -> bool:
        return name == QUEUE or self.starts.leaves_out(name[0])

    def _know(self, known: Copies) -> None:
        self.known = known
        #: A copy is running or was interrupted.
        self.is_under_way = known.is_under_way
        waiting = [row for row in known.tables if row.state == CopyState.WAITING]
        self._waiting = {row.name: row.reason for row in waiting if not row.is_schema_only}
        self._schema_only = frozenset([row.name for row in waiting if row.is_schema_only])
        self._again = {row.name for row in known.tables if row.is_again}
        self._by_oid = {row.source_oid: row for row in known.tables}
        self._by_name = {row.name: row for row in known.tables}

    def _row(self, oid: int) -> CopyRow | None:
        return self._by_oid.get(oid)

    def _namesake(self, name: Name) -> CopyRow | None:
        return self._by_name.get(name)

    def _root(self, oid: int) -> CopyRow | None:
        """Return the root that a partition is published as, if it was announced so."""
        row = self._row(self._roots.get(oid, 0))
        return row if row is not None and _may_be_root(row) else None

    def _update(self, starts: dict[Known, Start]) -> None:
        """Set from where on tables are applied."""
        beside = {oid: starts[root] for oid, root in self._roots.items() if root in starts}
        beside |= dict.fromkeys(self._gone, NEVER)
        self.starts.update(starts, beside, is_listed=self.known.is_listed)

    def _is_settled(self, relation: Relation) -> bool:
        if self.starts.leaves_out(relation.schema):
            return True
        return not self._is_to_compare(relation) and self._has_place(relation)

    def _has_place(self, relation: Relation) -> bool:
        name = relation.full_name
        if sharing.problems(self._config, [name], self._taken) or (
            relation in self._tables.plans.refused and relation not in self._sought
        ):
            return False
        row = self._row(relation.oid)
        if row is not None:
            return row.name == name
        if relation.oid in self._gone or self._root(relation.oid) is not None:
            return True
        if self._was_named(relation) != name:
            return False
        # One in the schema of our own progress may belong to another parapply, made since the publisher was read.
        return not (self.known.is_listed or name[0] == self._schema or self._why_left_out(name))

    def _was_named(self, relation: Relation) -> Name:
        return self.starts.name_of(relation.oid) or self._names.get(relation.oid, relation.full_name)

    async def _settle(self, relation: Relation, *, may_be_missing: bool) -> None:
        name = relation.full_name
        sharing.check(self._config, [name], self._taken)
        if name[0] == self._schema and name[0] in (schemas := await slot.state_schemas(self._source)):
            self._log.info("state_left_out", schemas=sorted(schemas))
            self.starts.leave_out(schemas)
            return
        if self._is_to_compare(relation):
            await self._compare_columns(relation)
            if self._has_place(relation):
                return
        row = self._row(relation.oid)
        if row is not None:
            await self._settle_known(relation, row)
        else:
            sharing.check_renamed(self._mapping, self._was_named(relation), name)
            await self._settle_new(relation, self._namesake(name), may_be_missing=may_be_missing)

    def _is_to_compare(self, relation: Relation) -> bool:
        # Any command in between may have given a name to another column: each announcement that lacks one is compared.
        known = self._numbers.get(relation.oid, {})
        omitted = self._mapping.omitted_of(relation.full_name)
        return bool(relation.lacks) or any(name not in known for name in omitted)

    async def _compare_columns(self, relation: Relation) -> None:
        """Apply a table that lacks columns to leave out only if they have been added since it was announced.

        The number of an added column is above all others. If the names of all that is announced belong to lower ones,
        none of these was it by another name, because there would be one name too few for them. No column may have been
        dropped, because one that was left out before may have its name since.
        """
        now = (await late_tables.columns(self._source, [relation.oid]))[relation.oid]
        known = self._numbers.get(relation.oid, {})
        omitted = self._mapping.omitted_of(relation.full_name)
        announced = {column.name for column in relation.columns} | {*omitted} - {*relation.lacks}
        numbers = {name: now.get(name, 0) for name in announced}
        highest = max(numbers.values(), default=0)
        is_whole = {*range(1, max(now.values(), default=0))} <= {*now.values()}
        is_same = is_whole and all(number == known.get(name, number) != 0 for name, number in numbers.items())
        are_new = all(name not in known and now.get(name, 0) > highest for name in relation.lacks)
        self._numbers[relation.oid] = numbers | known
        await self._tables.apply_lacking(relation, may_lack=is_same and are_new)

    async def _settle_known(self, relation: Relation, row: CopyRow) -> None:
        if relation in self._tables.plans.refused and await self._has_other_name(relation, row):
            return
        if row.name != relation.full_name:
            await self._rename({relation.oid: relation.full_name})
            self._log.info("table_renamed", relation=relation.qualified_name, value=".".join(row.name))

    async def _settle_new(self, relation: Relation, namesake: CopyRow | None, *, may_be_missing: bool) -> None:
        name, oid = relation.full_name, relation.oid
        self._sought.add(relation)
        left_out = self._why_left_out(name)
        if not (self.known.is_listed or name[0] == self._schema or left_out):
            return
        line = await late_tables.places(self._source, self._publications, oid)
        if not line and is_of_state(relation.name, [column.name for column in relation.columns]):
            self._log.info("state_left_out", schemas=[relation.schema])
            self._gone.add(oid)
            self._update(self.known.starts(self._low_lsn))
            return
        if not (self.known.is_listed or left_out) or await self._settle_partition(line):
            return
        lacks = ""
        if namesake is not None and namesake.source_oid not in await self._rename({oid: name}) and namesake.indexes:
            lacks = copies.LACKS_INDEXES
        reason = left_out or late_tables.why_not_whole(line, await self._marks())
        reason = reason or await self._why_not_here(name, may_be_missing=may_be_missing) or lacks
        await self._note(name, oid, reason)
        if not reason:
            self._log.info("table_joined", relation=relation.qualified_name)

    async def _check_withheld(self, relations: Sequence[Relation], commit_lsn: int) -> None:
        """Refuse changes of tables under their own names that have a root or partitions with other settings.

        Changes of a table are also refused if a column whose values are kept from the target has another name now.

        A partition is also announced beside its root where the root's name is sent. The catalogue does not have the
        names of that time.
        """
        if commit_lsn >= self._read_lsn:
            # Before the catalogue is read, which must have all that committed before it.
            read_lsn = (await slot.position(self._source)).flush_lsn
            self._relatives = await late_tables.relatives(self._source, self._mapping.withholding)
            self._read_lsn = read_lsn
        tables = {relation.full_name: relation.oid for relation in relations}
        refused = sharing.of_other_partitions(self._mapping, tables, self._relatives)
        refused |= await self._of_other_columns(relations)
        for relation in relations:
            self._judged[relation] = self._read_lsn
            await self._tables.withhold(relation, refused.get(relation.full_name))

    async def _of_other_columns(self, relations: Sequence[Relation]) -> dict[Name, TargetRefused]:
        masked = [relation for relation in relations if self._mapping.masked_of(relation.full_name)]
        if not masked:
            return {}
        async with self._control_pool.session() as conn:
            names = await continuity.keep_columns(self._source, conn, self._config, self._slot_id, self.known)
        refused = {}
        for relation in masked:
            omitted = self._mapping.omitted_of(relation.full_name)
            # A name that is missing is refused with the plan.
            announced = {*omitted, *[column.name for column in relation.columns]} - {*relation.lacks}
            for former, name in names.get(relation.oid, {}).items():
                if former in announced and name not in {former, *omitted}:
                    refused[relation.full_name] = TargetRefused(
                        f'column "{former}" of {relation.qualified_name} became "{name}", and another one has its name,'
                        " but the first one's values are kept from the target",
                        hint="name both in `omit` or `replace` of [mapping]; any change of the names there is taken as"
                        " right for the columns of now",
                    )
        return refused

    async def _settle_partition(self, line: Sequence[TablePlace]) -> bool:
        """Take a partition that is announced beside the root that it is published as; return whether it is one.

        It may have been attached since the last look, with rows: then its root waits before its first change is read.
        """
        for place in line[1:]:
            root = self._row(place.oid)
            if root is not None and _may_be_root(root):
                self._roots[line[0].oid] = place.oid
                if root.published_by is None or line[0].edge not in root.published_by.split():
                    await self._compare()
                self._update(self.known.starts(self._low_lsn))
                return self._root(line[0].oid) is not None
        return False

    async def _has_other_name(self, relation: Relation, row: CopyRow) -> bool:
        """Apply a table under its present name if a transaction has its old name; return whether it is such a table.

        ALTER SCHEMA ... RENAME waits for no transaction. One that is open during it is sent later, each change with the
        table's name at the time of the change.
        """
        self._sought.add(relation)
        now = (await late_tables.names(self._source, [relation.oid])).get(relation.oid)
        if now is None or now == relation.full_name:
            return False
        other = self._namesake(now)
        if (other is not None and other.source_oid != row.source_oid) or not await self._kind_of(now):
            self._tables.plans.refused[relation] = TargetRefused(
                f"target table {relation.qualified_name} does not exist; the publisher calls it {'.'.join(now)} now",
                hint="the target's table that has its rows must have the old name until this transaction is applied:"
                " rename it, start again, and do not create another one",
            )
            return False
        await self._tables.apply_as(relation, now)
        if row.name != now:
            await self._rename({})
        return True

    async def _rename(self, names: dict[int, Name]) -> dict[int, Name]:
        """Note the names that tables have on the publisher now, or for some the names that the stream has.

        Return those that are others than before.

        A dropped table gives up its name to the table that has it in the stream.
        """
        known = {row.source_oid: row.name for row in self.known.tables}
        names |= await late_tables.names(self._source, list(known))
        changed = {oid: name for oid, name in names.items() if known.get(oid) != name}
        for row in self.known.tables:
            if not row.is_schema_only:
                sharing.check_renamed(self._mapping, row.name, changed.get(row.source_oid, row.name))
        async with self._control_pool.session() as conn:
            await copies.rename(conn, self._schema, self._slot_id, changed)
        return changed

    async def _marks(self) -> frozenset[str]:
        """Return the marks of the state; a state of an older version has none and gets the present marks."""
        async with self._control_pool.session() as conn:
            found = await copies.load_marks(conn, self._schema, self._slot_id)
            if found is None:
                found = frozenset(await late_tables.marks(self._source, self._publications))
                await copies.keep_marks(conn, self._schema, self._slot_id, list(found))
        return found

    async def _why_not_here(self, name: Name, *, may_be_missing: bool) -> str:
        """Return why a table of the publisher cannot begin empty on the target; empty: it can."""
        kind = await self._kind_of(name)
        if not kind:
            return "" if may_be_missing else "the target does not have it"
        # Without the rows of tables that inherit from it.
        only = sql.SQL("" if kind == "p" else "ONLY ")
        here = sql.Identifier(*self._mapping.target_of(name))
        mine = own_rows(self._mapping.constants_of(name))
        has_rows = sql.SQL("SELECT EXISTS (SELECT FROM {}{}{})").format(only, here, mine)
        async with self._control_pool.session() as conn:
            try:
                with settings.target_errors("looking into a new table"):
                    is_full = (await settings.rows(conn, has_rows))[0][0]
            except TargetRefused as error:
                return error.line()
        return "it holds rows on the target already" if is_full else ""

    async def _kind_of(self, name: Name) -> str:
        """Return the kind of the target's table for a table of the publisher, as in pg_class; empty if it has none."""
        there = sql.SQL(
            "SELECT c.relkind::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n"
            " ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p')"
        )
        async with self._control_pool.session() as conn:
            with settings.target_errors("looking for a table"):
                found = await settings.rows(conn, there, list(self._mapping.target_of(name)))
        return found[0][0] if found else ""

    async def _note(self, name: Name, oid: int, reason: str) -> None:
        async with self._control_pool.session() as conn:
            await copies.settle(conn, self._schema, self._slot_id, name, oid, reason)
        self._is_due = self._is_due or not reason

    async def _read(self) -> None:
        async with self._control_pool.session() as conn:
            if not self.is_under_way:
                stamp = await copies.load_stamp(conn, self._schema, self._slot_id)
                if stamp == self.known.stamp:
                    return
            found = await copies.load(conn, self._schema, self._slot_id)
            if found.unseen - self.known.unseen and found.is_running:
                begun = {row.start_lsn for row in found.tables if row.state == CopyState.COPYING}
                # Also tables of the same copy that are copied already: none of one LSN is ahead of another.
                copied = [
                    row.name for row in found.tables
                    if row.start_lsn in begun and row.state in (CopyState.COPYING, CopyState.COPIED)
                ]  # fmt: skip
                await cascades.check(self._source, conn, self._config, found, self._low_lsn, copied=copied)
        before = self.known
        self._know(found)
        starts = found.starts(self._low_lsn)
        if starts != before.starts(self._low_lsn) or found.is_listed != before.is_listed:
            self._log.info("copies_changed", **{state.value: found.count(state) for state in CopyState})
            self._update(starts)
            self._note_change()
        elif found.unseen - before.unseen:
            # Such as a pause of a table that waited anyway: nothing changes, and the command waits for an answer.
            self._note_change()

    def _note_change(self) -> None:
        self.n_changes += 1
        self.changed.set()

    def _tell(self) -> None:
        waiting = self._waiting
        self._tables.show_waiting(frozenset(waiting), self._schema_only)
        for name in self._warnings.due(waiting, self._clock()):
            reason = waiting[name]
            hint = None if reason == copies.PAUSED else _HINT_AGAIN if name in self._again else _HINT
            self._log.warning("table_waits", relation=".".join(name), reason=reason, hint=hint)


def _may_be_root(row: CopyRow) -> bool:
    """Return whether partitions below a table may be published as it; before the first look it is not known."""
    return row.published_by is None or publishing.is_by_root(row.published_by)
