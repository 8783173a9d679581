"""Tables copied at the same time over several connections: who does which part, and when a table is complete.

In: published tables, a snapshot of the publisher, the state's rows. Out: rows on the target, and each table noted as
copied when its last part has committed. What is interrupted is done again as a whole, table by table: a part's commit
says nothing of the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

from parapply import probes
from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.parts import copy_in, copy_out, parts_of
from parapply.copy.pump import pump
from parapply.target import copies, lease, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def __init__(self, published: PublishedTable, parts: list[Part]) -> None:
        self.published = published
        self.parts_left = len(parts)
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
        self._writing = asyncio.Lock()
        self._connections = connections
        self._defers_indexes = defers_indexes
        self._watcher = watcher

    async def run(self, tables: Sequence[PublishedTable], snapshot: SourceSnapshot) -> None:
        """Empty the tables, copy them as of the snapshot, and note each one as it is complete.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: what is not complete is noted as being copied.
        """
        queue: deque[tuple[_Table, Part]] = deque()
        for published in tables:
            parts = [part for leaf in published.leaves for part in parts_of(leaf)]
            table = _Table(published, parts)
            queue.extend((table, part) for part in parts)
            if not parts:
                await self._complete(table)
        # The largest first, or the last one would be under way alone; parts of one table stay together.
        queue = deque(sorted(queue, key=lambda one: -sum(leaf.pages for leaf in one[0].published.leaves)))
        self._watcher.begin(
            len(queue), sum(part.pages for _, part in queue), sum(part.estimated_rows for _, part in queue)
        )
        async with AsyncExitStack() as stack:
            lanes = [await self._open(stack, snapshot) for _ in range(min(self._connections, len(queue)))]
            await self._prepare([table for table in tables if table.leaves])
            try:
                async with asyncio.TaskGroup() as group:
                    for number, lane in enumerate(lanes, 1):
                        group.create_task(self._lane(queue, *lane), name=f"copy-{number}")
            except ExceptionGroup as errors:
                # The others were ended because of the first one.
                raise errors.exceptions[0] from errors

    async def _prepare(self, tables: Sequence[PublishedTable]) -> None:
        if self._defers_indexes:
            for table in tables:
                await self._drop_indexes(table)
        await on_target.empty(self._control, await on_target.not_empty(self._control, tables))

    async def _drop_indexes(self, table: PublishedTable) -> None:
        found = await on_target.deferrable_indexes(self._control, table)
        if found:
            known = await copies.load(self._control, self._schema, self._slot_id)
            kept = [make for row in known.tables if row.name == table.full_name for make in row.indexes]
            makes = [*kept, *(make for _, make in found if make not in kept)]
            await copies.keep_indexes(self._control, self._schema, self._slot_id, table.full_name, makes)
            await on_target.run_all(self._control, [drop for drop, _ in found], "dropping indexes")

    async def _open(
        self, stack: AsyncExitStack, snapshot: SourceSnapshot
    ) -> tuple[slot.Connection, settings.Connection]:
        name = f"parapply copy {self._config.source.slot}"
        source = await stack.enter_async_context(
            await snapshots.open_reader(self._config.source.dsn.get_secret_value(), name, snapshot)
        )
        target_config = self._config.target
        target = await stack.enter_async_context(
            await settings.connect_control(
                target_config.dsn.get_secret_value(), role=target_config.session_replication_role, application_name=name
            )
        )
        with settings.target_errors("joining the copy"):
            # So that nothing of an interrupted copy is still on its way when the next one begins.
            lock = lease.worker_lock_sql(self._slot_id, self._control.info.backend_pid, copies.LOCK_CLASS)
            await target.execute(lock.encode())
            await target.execute("SET synchronous_commit = off")
        return source, target

    async def _lane(
        self, queue: deque[tuple[_Table, Part]], source: slot.Connection, target: settings.Connection
    ) -> None:
        while queue:
            table, part = queue.popleft()
            n_rows, size = await self._copy(table.published, part, source, target)
            table.rows += n_rows
            table.size_bytes += size
            table.parts_left -= 1
            self._watcher.part_done(part, n_rows)
            if not table.parts_left:
                await self._complete(table)

    async def _copy(
        self, table: PublishedTable, part: Part, source: slot.Connection, target: settings.Connection
    ) -> tuple[int, int]:
        with settings.target_errors(f"copying into {table.text}"):
            async with target.transaction():
                done = await pump(
                    source,
                    target,
                    copy_out(table, part),
                    copy_in(table),
                    relation=table.text,
                    on_data=self._watcher.data,
                )
                probes.probe(probes.COPY_PART)
        probes.probe(probes.COPY_PART_DONE)
        return done

    async def _complete(self, table: _Table) -> None:
        published = table.published
        async with self._writing:
            known = await copies.load(self._control, self._schema, self._slot_id)
            indexes = [make for row in known.tables if row.name == published.full_name for make in row.indexes]
            if indexes:
                await on_target.run_all(self._control, indexes, f"making the indexes of {published.text} again")
            # This commit is synchronous: WAL is flushed in order, so the rows are durable then, too.
            await copies.finish(
                self._control,
                self._schema,
                self._slot_id,
                published.full_name,
                n_rows=table.rows,
                size_bytes=table.size_bytes,
            )
        probes.probe(probes.COPY_TABLE_DONE)
        self._watcher.table_done(published, table.rows, table.size_bytes)
