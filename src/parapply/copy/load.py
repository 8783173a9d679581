"""Tables copied at the same time over several connections: which one does which part, and when a table is complete.

In: published tables, a snapshot of the publisher, the state's rows. Out: rows on the target, and each table noted as
copied when its last part has committed. The parts of a large table are also noted, and `resume.py` brings the parts of
an interrupted copy forward; a table for which that is not possible is copied again as a whole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from parapply import failpoints
from parapply.commands import lifecycle
from parapply.copy import replaced, resume
from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.parts import COPIED_PAGES, copy_in, copy_out, is_binary
from parapply.copy.places import Access, Places
from parapply.copy.published import rewritten
from parapply.copy.pump import pump
from parapply.copy.writer import Writers
from parapply.errors import ParapplyError, SourceRefused, TargetRefused
from parapply.source import slot
from parapply.target.catalogue.facts import check_foreign_code
from parapply.target.session import settings
from parapply.target.state import copies, copy_parts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from parapply.config import Config
    from parapply.copy.bar import Bar
    from parapply.copy.parts import Part
    from parapply.copy.published import Leaf, PublishedTable
    from parapply.copy.snapshot import SourceSnapshot
    from parapply.copy.tables import Deferrable
    from parapply.copy.writer import Writer
    from parapply.plan.copy_starts import Name
    from parapply.target.state.copy_parts import CopiedPart

#: Seconds between two notes of how far tables are, if none is complete before.
_NOTE_S = 2.0


class PartQueue:
    """The next part for each connection. Written by the connections' tasks, which are tasks of one loop.

    Each connection has a table to itself as long as there are tables that none has begun. Every other one takes the
    smallest, so that many tables are complete soon: what is complete is kept if the copy is killed. The others take the
    largest, whose indexes are then made while there is still something to copy. At the end they share what is left.
    """

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


class _Table:
    """One table on its way. Written by the lanes, which are tasks of one loop."""

    def __init__(
        self,
        published: PublishedTable,
        parts: list[Part],
        kept: Sequence[CopiedPart],
        *,
        target_types: Mapping[str, int],
        is_noted: bool,
    ) -> None:
        self.published = published
        self.parts = parts
        self.parts_left = len(parts)
        self.target_types = target_types
        self.is_binary = is_binary(published, target_types)
        self.is_noted = is_noted  # each part
        # Handed on to the target, of parts under way too.
        self.rows = sum(part.rows for part in kept)
        self.size_bytes = sum(part.size_bytes for part in kept)
        self.has_moved = False  # since that was last written down


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to load."""

    connections: int = 4  # on each side
    defers_indexes: bool = False  # drop those that no constraint needs, and make them after the rows
    access: Access | None = None  # to connections that several copies share; None: this one alone has all


class CopyLoad:
    """Copies tables; the copy lock is held, and the tables are noted as being copied."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: Config,
        slot_id: int,
        control: settings.Connection,
        options: LoadOptions,
        *,
        shapes: Mapping[Name, str],
        bar: Bar,
    ) -> None:
        self._config = config
        self._schema = config.target.state_schema
        self._slot_id = slot_id
        self._control = control
        self._shapes = shapes
        self._options = options
        self._bar = bar
        self._access = options.access or Access(Places(options.connections))
        # Statements that make a table's indexes again which this copy or an interrupted one has dropped.
        self._indexes: dict[int, list[str]] = {}
        self._complete: asyncio.Queue[_Table] = asyncio.Queue()

    async def run(self, tables: Sequence[PublishedTable], snapshot: SourceSnapshot) -> None:
        """Empty the tables, copy them as of the snapshot, and note each one as it is complete.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: what is not complete is noted as being copied.
        """
        tables = await replaced.judged(self._control, tables)
        of_here = await on_target.column_types(self._control, [table.here() for table in tables])
        types = {table.full_name: of_here[table.here().full_name] for table in tables}
        names = [table.here().full_name for table in tables]
        writers = Writers(self._config, self._slot_id, self._control.info.backend_pid, snapshot, names)
        async with writers.open(1) as writer:
            kept = await resume.Resumption(self._config, self._slot_id, writer, types).run(tables, snapshot)
            await self._prepare(tables, kept, writer.conn)
        under_way = []
        for published in tables:
            done = kept.get(published.oid, [])
            parts = [part for leaf in published.leaves for part in _left(leaf, done)]
            of_target = types[published.full_name]
            under_way.append(
                _Table(
                    published,
                    parts,
                    done,
                    target_types=of_target,
                    # One part is the table.
                    is_noted=len(parts) + len(done) > 1 and resume.may_resume(published, of_target),
                )
            )
        by_name = {table.published.full_name: table for table in under_way}
        parts = [part for table in under_way for part in table.parts]
        queue = PartQueue({name: table.parts for name, table in by_name.items()})
        self._bar.begin(len(parts), sum(part.pages for part in parts), sum(part.estimated_rows for part in parts))
        for table in under_way:
            if not table.parts:
                await self._make_indexes(table.published, self._control)
                self._complete.put_nowait(table)
        n_lanes = min(self._access.connections, len(parts))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, n_lanes + 1):
                    group.create_task(self._lane(number, queue, by_name, snapshot, writers), name=f"copy-{number}")
                group.create_task(self._note(under_way), name="copy-notes")
        except ExceptionGroup as errors:
            # The others were ended because of the first one.
            # The driver's error stays its cause.
            first = errors.exceptions[0]
            raise first from first.__cause__
        finally:
            with suppress(ParapplyError):
                await writers.release_origins(self._control, max(n_lanes, 1))

    async def _prepare(
        self, tables: Sequence[PublishedTable], kept: Collection[int], target: settings.Connection
    ) -> None:
        known = await copies.load(self._control, self._schema, self._slot_id)
        self._indexes = {row.source_oid: list(row.indexes) for row in known.tables if row.source_oid and row.indexes}
        if self._options.defers_indexes:
            alone = [table for table in tables if not table.constants]
            found = await on_target.deferrable_indexes(self._control, [table.here() for table in alone])
            for table in alone:
                if indexes := found.get(table.here().full_name):
                    await self._drop_indexes(table.oid, indexes)
        emptied = [table.here() for table in tables if table.oid not in kept]
        full = await on_target.not_empty(target, emptied, self._config.target)
        with settings.target_errors("emptying tables"):
            async with target.transaction():
                if self._config.target.apply_as == "owner":
                    for table in full:
                        await check_foreign_code(target, *table.full_name, table.filled)
                await on_target.empty(target, full, also=emptied)

    async def _drop_indexes(self, oid: int, found: Sequence[Deferrable]) -> None:
        kept = self._indexes.get(oid, [])
        makes = [*kept, *(index.make for index in found if index.make not in kept)]
        with settings.target_errors("dropping indexes"):
            # In one transaction: what is noted was dropped, and what was dropped is noted.
            async with self._control.transaction():
                await copies.keep_indexes(self._control, self._schema, self._slot_id, oid, makes)
                for index in found:
                    await self._control.execute(index.drop.encode())
        self._indexes[oid] = makes

    async def _lane(
        self, number: int, queue: PartQueue, tables: Mapping[Name, _Table], snapshot: SourceSnapshot, writers: Writers
    ) -> None:
        async with self._access.lane():
            # Others may have done the rest by now.
            if queue.is_empty:
                return
            application_name = f"parapply copy {self._config.source.slot}"
            source = await snapshots.open_reader(self._config.source.login, application_name, snapshot)
            async with source, writers.open(number) as writer:
                while (taken := queue.take(number)) is not None:
                    name, part = taken
                    table = tables[name]
                    n_rows = await self._copy(table, part, source, writer, snapshot)
                    table.parts_left -= 1
                    self._bar.part_done(part, n_rows)
                    if not table.parts_left:
                        await self._make_indexes(table.published, writer.conn)
                        self._complete.put_nowait(table)

    async def _copy(
        self, table: _Table, part: Part, source: slot.Connection, writer: Writer, snapshot: SourceSnapshot
    ) -> int:
        target = writer.conn
        sizes = [0]

        def on_data(rows: int, size_bytes: int) -> None:
            table.rows += rows
            table.size_bytes += size_bytes
            table.has_moved = True
            sizes[0] += size_bytes
            self._bar.data(rows, size_bytes, table.published.text)

        # A part is noted in the transaction of its COPY, which ends only once the file is known to be the snapshot's.
        async with writer.transaction():
            if self._config.target.apply_as == "owner":
                await check_foreign_code(target, *table.published.here().full_name, table.published.filled)
            out = copy_out(table.published, part, is_binary=table.is_binary, target_types=table.target_types)
            into = copy_in(table.published, is_binary=table.is_binary)
            if table.published.replacements:
                out, into = replaced.staged_out(table.published, part), replaced.STAGE_IN
                await replaced.make_stage(target, table.published)
            n_rows, _ = await pump(
                source, target, out, into, relation=table.published.text, on_data=on_data, limit=self._access.limit,
                hides_values=bool(table.published.replacements),
            )  # fmt: skip
            if table.published.replacements:
                await replaced.insert_staged(target, table.published, n_rows)
            await _check_file(source, part)
            await self._check_shape(table.published.here(), target)
            if table.is_noted:
                await self._note_part(table.published, part, source, target, snapshot, n_rows, sizes[0])
        failpoints.probe(failpoints.COPY_PART_DONE)
        return n_rows

    async def _check_shape(self, table: PublishedTable, target: settings.Connection) -> None:
        """Refuse rows for a table whose columns have changed, as a command of the publisher changes them beside a copy.

        Such a command is later than the snapshot, whose rows would get defaults that they never had, or come to columns
        that now have each other's names. COPY holds a lock, so the columns stay as they are.
        """
        if await on_target.shapes(target, [table]) != {table.full_name: self._shapes[table.full_name]}:
            raise TargetRefused(
                f"target: the columns of {table.text} changed after this copy began",
                hint="run the same command again: it goes on with a new snapshot",
            )

    async def _note_part(  # noqa: PLR0913, PLR0917  what is noted
        self,
        table: PublishedTable,
        part: Part,
        source: slot.Connection,
        target: settings.Connection,
        snapshot: SourceSnapshot,
        n_rows: int,
        size_bytes: int,
    ) -> None:
        leaf = (part.schema, part.name)
        fingerprint = await resume.fingerprint(source, self._config.source.publications, table, leaf)
        if not fingerprint:
            return
        noted = copy_parts.CopiedPart(
            source_oid=table.oid,
            leaf_schema=part.schema,
            leaf_name=part.name,
            first_page=part.first_page,
            end_page=part.end_page,
            lsn=snapshot.lsn,
            rows=n_rows,
            size_bytes=size_bytes,
            fingerprint=fingerprint,
        )
        await copy_parts.add(target, self._schema, self._slot_id, noted)

    async def _make_indexes(self, table: PublishedTable, target: settings.Connection) -> None:
        if statements := self._indexes.get(table.oid):
            await lifecycle.make_indexes(target, table.here().full_name, statements)

    async def _note(self, tables: Sequence[_Table]) -> None:
        """Note each table as it is complete, and how far the others are, alongside the lanes.

        The last one is noted durably, and with it all of them: WAL is flushed in order, so the rows are also durable.
        """
        n_left = len(tables)
        while n_left:
            try:
                async with asyncio.timeout(_NOTE_S):
                    table = await self._complete.get()
            except TimeoutError:
                await self._note_moved(tables)
                continue
            n_left -= 1
            published = table.published
            await copies.finish(
                self._control,
                self._schema,
                self._slot_id,
                published.oid,
                n_rows=table.rows,
                size_bytes=table.size_bytes,
                is_durable=not n_left,
            )
            table.has_moved = False
            failpoints.probe(failpoints.COPY_TABLE_DONE)
            self._bar.table_done(published, table.rows, table.size_bytes)

    async def _note_moved(self, tables: Sequence[_Table]) -> None:
        moved = [table for table in tables if table.has_moved]
        for table in moved:
            table.has_moved = False
        figures = {table.published.oid: (table.rows, table.size_bytes) for table in moved}
        await copies.note_progress(self._control, self._schema, self._slot_id, figures)


def _left(leaf: Leaf, done: Sequence[CopiedPart]) -> Iterator[Part]:
    """Cut the rest of a relation into parts."""
    own = [part for part in done if (part.leaf_schema, part.leaf_name) == (leaf.schema, leaf.name)]
    return resume.left_of(leaf, own, COPIED_PAGES)


async def _check_file(source: slot.Connection, part: Part) -> None:
    """Refuse a part that was read from another file than the snapshot's. From the COPY on a lock keeps its file."""
    relation = f"{part.schema}.{part.name}"
    with slot.source_errors(f"looking for the file of {relation}"):
        found = await rewritten(source, [(part.schema, part.name)])
    if found:
        raise SourceRefused(
            f"source: {relation} was rewritten, or replaced, after the snapshot of this copy",
            hint="run the same command again: it goes on with a new snapshot",
        )
