"""Tables copied at the same time over several connections: who does which part, and when a table is complete.

In: published tables, a snapshot of the publisher, the state's rows. Out: rows on the target, and each table noted as
copied when its last part has committed. What is interrupted is done again as a whole, table by table: a part's commit
says nothing of the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from parapply import probes
from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.binary import is_binary
from parapply.copy.parts import COPIED_PAGES, copy_in, copy_out, parts_of
from parapply.copy.pump import pump
from parapply.target import copies, lease, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from parapply.config import Config
    from parapply.copy.parts import Part
    from parapply.copy.published import PublishedTable
    from parapply.copy.snapshot import SourceSnapshot
    from parapply.source import slot


class Watcher(Protocol):
    """Who shows progress."""

    def begin(self, parts: int, pages: int, rows: int) -> None:
        """Be told what there is to do: parts, their pages, and rows as estimated."""

    def data(self, rows: int, size_bytes: int) -> None:
        """Be told of rows that were handed on."""

    def part_done(self, part: Part, rows: int) -> None:
        """Be told of a part that is committed."""

    def table_done(self, table: PublishedTable, rows: int, size_bytes: int) -> None:
        """Be told of a table that is complete."""


class _Table:
    """One table on its way. Written by the lanes, which are tasks of one loop."""

    def __init__(self, published: PublishedTable, parts: list[Part], *, is_binary: bool) -> None:
        self.published = published
        self.parts = parts
        self.parts_left = len(parts)
        self.is_binary = is_binary
        self.rows = 0
        self.size_bytes = 0


class Load:
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
            watcher: told of all that is done.
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
        # The largest first, or the last one would be under way alone; parts of one table stay together.
        under_way.sort(key=lambda table: -sum(part.pages for part in table.parts))
        queue = deque((table, part) for table in under_way for part in table.parts)
        self._watcher.begin(
            len(queue), sum(part.pages for _, part in queue), sum(part.estimated_rows for _, part in queue)
        )
        for table in under_way:
            if not table.parts:
                self._complete.put_nowait(table)
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, min(self._connections, len(queue)) + 1):
                    group.create_task(self._lane(queue, snapshot), name=f"copy-{number}")
                group.create_task(self._note(len(under_way)), name="copy-notes")
        except ExceptionGroup as errors:
            # The others were ended because of the first one.
            raise errors.exceptions[0] from errors

    async def _prepare(self, tables: Sequence[PublishedTable]) -> None:
        known = await copies.load(self._control, self._schema, self._slot_id)
        self._indexes = {row.name: list(row.indexes) for row in known.tables if row.indexes}
        if self._defers_indexes:
            for table in tables:
                await self._drop_indexes(table)
        await on_target.empty(self._control, await on_target.not_empty(self._control, tables))

    async def _drop_indexes(self, table: PublishedTable) -> None:
        found = await on_target.deferrable_indexes(self._control, table)
        if found:
            kept = self._indexes.get(table.full_name, [])
            makes = [*kept, *(make for _, make in found if make not in kept)]
            await copies.keep_indexes(self._control, self._schema, self._slot_id, table.full_name, makes)
            await on_target.run_all(self._control, [drop for drop, _ in found], "dropping indexes")
            self._indexes[table.full_name] = makes

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

    async def _lane(self, queue: deque[tuple[_Table, Part]], snapshot: SourceSnapshot) -> None:
        async with self._sessions(snapshot) as (source, target):
            while queue:
                table, part = queue.popleft()
                n_rows, size = await self._copy(table, part, source, target)
                table.rows += n_rows
                table.size_bytes += size
                table.parts_left -= 1
                self._watcher.part_done(part, n_rows)
                if not table.parts_left:
                    await self._make_indexes(table.published, target)
                    self._complete.put_nowait(table)

    async def _copy(
        self, table: _Table, part: Part, source: slot.Connection, target: settings.Connection
    ) -> tuple[int, int]:
        # COPY is a transaction of its own.
        done = await pump(
            source,
            target,
            copy_out(table.published, part, is_binary=table.is_binary),
            copy_in(table.published, is_binary=table.is_binary),
            relation=table.published.text,
            on_data=self._watcher.data,
        )
        probes.probe(probes.COPY_PART_DONE)
        return done

    async def _make_indexes(self, table: PublishedTable, target: settings.Connection) -> None:
        if indexes := self._indexes.get(table.full_name):
            await on_target.run_all(target, indexes, f"making the indexes of {table.text} again")

    async def _note(self, n_tables: int) -> None:
        """Note each table as it is complete, beside the lanes; the last one durably, and with it all of them.

        WAL is flushed in order, so the rows are durable then, too.
        """
        for n_left in range(n_tables, 0, -1):
            table = await self._complete.get()
            published = table.published
            await copies.finish(
                self._control,
                self._schema,
                self._slot_id,
                published.full_name,
                n_rows=table.rows,
                size_bytes=table.size_bytes,
                is_durable=n_left == 1,
            )
            probes.probe(probes.COPY_TABLE_DONE)
            self._watcher.table_done(published, table.rows, table.size_bytes)
