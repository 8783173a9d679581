"""Tables copied at the same time over several connections: which one does which part, and when a table is complete.

In: published tables, a snapshot of the publisher, the state's rows. Out: rows on the target, and each table noted as
copied when its last part has committed. An interrupted table is copied again as a whole, because a part's commit says
nothing of the others.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from parapply import failpoints
from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.binary import is_binary
from parapply.copy.parts import COPIED_PAGES, copy_in, copy_out, parts_of
from parapply.copy.pump import pump
from parapply.copy.queue import PartQueue
from parapply.target.session import lease, settings
from parapply.target.state import copies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from parapply.config import Config
    from parapply.copy.parts import Part
    from parapply.copy.published import PublishedTable
    from parapply.copy.snapshot import SourceSnapshot
    from parapply.copy.tables import Deferrable
    from parapply.plan.copy_starts import Name
    from parapply.source import slot

#: Seconds between two notes of how far tables are, if none is complete before.
_NOTE_S = 2.0


class Watcher(Protocol):
    """What shows progress."""

    def begin(self, parts: int, pages: int, rows: int) -> None:
        """Begin with what there is to do: parts, their pages, and rows as estimated."""

    def data(self, rows: int, size_bytes: int, table: str) -> None:
        """Count rows of a table that were handed on."""

    def part_done(self, part: Part, rows: int) -> None:
        """Count a part that is committed."""

    def table_done(self, table: PublishedTable, rows: int, size_bytes: int) -> None:
        """Note a table that is complete."""


class _Table:
    """One table on its way. Written by the lanes, which are tasks of one loop."""

    def __init__(self, published: PublishedTable, parts: list[Part], *, is_binary: bool) -> None:
        self.published = published
        self.parts = parts
        self.parts_left = len(parts)
        self.is_binary = is_binary
        # Handed on to the target, of parts under way too.
        self.rows = 0
        self.size_bytes = 0
        self.has_moved = False  # since that was last written down


class CopyLoad:
    """Copies tables; the copy lock is held, and the tables are noted as being copied."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: Config,
        slot_id: int,
        control: settings.Connection,
        *,
        connections: int,
        defers_indexes: bool,
        watcher: Watcher,
    ) -> None:
        """Keep what is needed; open nothing.

        Args:
            config: both ends.
            slot_id: of the state.
            control: session that holds the copy lock.
            connections: on each side.
            defers_indexes: drop indexes that no constraint needs, and make them after the rows.
            watcher: called with all that is done.
        """
        self._config = config
        self._schema = config.target.state_schema
        self._slot_id = slot_id
        self._control = control
        self._connections = connections
        self._defers_indexes = defers_indexes
        self._watcher = watcher
        # Statements that make a table's indexes again which this copy or an interrupted one has dropped.
        self._indexes: dict[tuple[str, str], list[str]] = {}
        self._complete: asyncio.Queue[_Table] = asyncio.Queue()

    async def run(self, tables: Sequence[PublishedTable], snapshot: SourceSnapshot) -> None:
        """Empty the tables, copy them as of the snapshot, and note each one as it is complete.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: what is not complete is noted as being copied.
        """
        await self._prepare([table for table in tables if table.leaves])
        types = await on_target.column_types(self._control, tables)
        under_way = []
        for published in tables:
            parts = [part for leaf in published.leaves for part in parts_of(leaf, COPIED_PAGES)]
            under_way.append(_Table(published, parts, is_binary=is_binary(published, types[published.full_name])))
        by_name = {table.published.full_name: table for table in under_way}
        parts = [part for table in under_way for part in table.parts]
        queue = PartQueue({name: table.parts for name, table in by_name.items()})
        self._watcher.begin(len(parts), sum(part.pages for part in parts), sum(part.estimated_rows for part in parts))
        for table in under_way:
            if not table.parts:
                self._complete.put_nowait(table)
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, min(self._connections, len(parts)) + 1):
                    group.create_task(self._lane(number, queue, by_name, snapshot), name=f"copy-{number}")
                group.create_task(self._note(under_way), name="copy-notes")
        except ExceptionGroup as errors:
            # The others were ended because of the first one.
            raise errors.exceptions[0] from errors

    async def _prepare(self, tables: Sequence[PublishedTable]) -> None:
        known = await copies.load(self._control, self._schema, self._slot_id)
        self._indexes = {row.name: list(row.indexes) for row in known.tables if row.indexes}
        if self._defers_indexes:
            for name, indexes in (await on_target.deferrable_indexes(self._control, tables)).items():
                await self._drop_indexes(name, indexes)
        await on_target.empty(self._control, await on_target.not_empty(self._control, tables))

    async def _drop_indexes(self, name: Name, found: Sequence[Deferrable]) -> None:
        kept = self._indexes.get(name, [])
        makes = [*kept, *(index.make for index in found if index.make not in kept)]
        with settings.target_errors("dropping indexes"):
            # In one transaction: what is noted was dropped, and what was dropped is noted.
            async with self._control.transaction():
                await copies.keep_indexes(self._control, self._schema, self._slot_id, name, makes)
                await on_target.run_all(self._control, [index.drop for index in found], "dropping indexes")
        self._indexes[name] = makes

    @asynccontextmanager
    async def _sessions(self, snapshot: SourceSnapshot) -> AsyncIterator[tuple[slot.Connection, settings.Connection]]:
        """Open a session on each end, until the block ends."""
        name = f"parapply copy {self._config.source.slot}"
        target_config = self._config.target
        source = await snapshots.open_reader(self._config.source.dsn.get_secret_value(), name, snapshot)
        async with source:
            target = await settings.connect_control(
                target_config.dsn.get_secret_value(), role=target_config.session_replication_role, application_name=name
            )
            async with target:
                with settings.target_errors("joining the copy"):
                    # So that nothing of an interrupted copy is still on its way when the next one begins.
                    lock = lease.worker_lock_sql(self._slot_id, self._control.info.backend_pid, copies.LOCK_CLASS)
                    await target.execute(lock.encode())
                    await target.execute("SET synchronous_commit = off")
                yield source, target

    async def _lane(
        self, number: int, queue: PartQueue, tables: Mapping[Name, _Table], snapshot: SourceSnapshot
    ) -> None:
        async with self._sessions(snapshot) as (source, target):
            while (taken := queue.take(number)) is not None:
                name, part = taken
                table = tables[name]
                n_rows = await self._copy(table, part, source, target)
                table.parts_left -= 1
                self._watcher.part_done(part, n_rows)
                if not table.parts_left:
                    await self._make_indexes(table.published, target)
                    self._complete.put_nowait(table)

    async def _copy(self, table: _Table, part: Part, source: slot.Connection, target: settings.Connection) -> int:
        def on_data(rows: int, size_bytes: int) -> None:
            table.rows += rows
            table.size_bytes += size_bytes
            table.has_moved = True
            self._watcher.data(rows, size_bytes, table.published.text)

        # COPY is a transaction of its own.
        n_rows, _ = await pump(
            source,
            target,
            copy_out(table.published, part, is_binary=table.is_binary),
            copy_in(table.published, is_binary=table.is_binary),
            relation=table.published.text,
            on_data=on_data,
        )
        failpoints.probe(failpoints.COPY_PART_DONE)
        return n_rows

    async def _make_indexes(self, table: PublishedTable, target: settings.Connection) -> None:
        if not (indexes := self._indexes.get(table.full_name)):
            return
        # An index that is there needs no owner's right, and a note may name one that was never dropped, or is made
        # already.
        found = await on_target.deferrable_indexes(target, [table])
        there = {index.make for index in found.get(table.full_name, ())}
        missing = [make for make in indexes if make not in there]
        await on_target.run_all(target, missing, f"making the indexes of {table.text} again")

    async def _note(self, tables: Sequence[_Table]) -> None:
        """Note each table as it is complete, and how far the others are, alongside the lanes.

        The last one durably, and with it all of them: WAL is flushed in order, so the rows are durable then, too.
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
                published.full_name,
                n_rows=table.rows,
                size_bytes=table.size_bytes,
                is_durable=not n_left,
            )
            table.has_moved = False
            failpoints.probe(failpoints.COPY_TABLE_DONE)
            self._watcher.table_done(published, table.rows, table.size_bytes)

    async def _note_moved(self, tables: Sequence[_Table]) -> None:
        """Write down how far the tables are of which rows have come."""
        moved = [table for table in tables if table.has_moved]
        for table in moved:
            table.has_moved = False
        figures = {table.published.full_name: (table.rows, table.size_bytes) for table in moved}
        await copies.note_progress(self._control, self._schema, self._slot_id, figures)
