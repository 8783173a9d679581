"""The comparison by the servers themselves: each sums up its own rows, a part at a time, over several sessions.

In: sessions that see the snapshot of their end. Out: summaries and rows of `canonical`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from psycopg import sql

from parapply.amounts import few
from parapply.copy.parts import Part, parts_of
from parapply.copy.published import Leaf, PublishedTable, rewritten
from parapply.driver import values_hidden
from parapply.errors import SourceRefused, TargetRefused
from parapply.source.slot import source_errors
from parapply.target.session.settings import target_errors
from parapply.target.sql.own_rows import own_condition
from parapply.verify import canonical
from parapply.verify.canonical import Ranges
from parapply.verify.differences import Summary, add

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

    from parapply.source.slot import Connection
    from parapply.verify.differences import Key

#: Run in a session that compares, before it reads.
BEFORE_TABLES: Final = "SAVEPOINT before_tables"
GO_BACK: Final = "ROLLBACK TO SAVEPOINT before_tables"
#: Relations that are kept locked at most, with their indexes besides, and the seconds after which the next table's end
#: unlocks them: behind a session that waits for such a table, its clients and the daemon also wait.
_MOST_LOCKED: Final = 100
_LONGEST_LOCKED_S: Final = 0.5

Session: TypeAlias = "psycopg.AsyncConnection[tuple[Any, ...]]"
#: Pages of the sample for each range, about, and at least for a table.
_PAGES_PER_RANGE = 2
_FEWEST_PAGES = 64


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A table on both ends."""

    published: PublishedTable
    target_leaves: tuple[Leaf, ...]
    ranges: canonical.Ranges


class VerifyEnd:
    """One end: its sessions, and how its errors are reported."""

    def __init__(self, sessions: Sequence[Session], *, is_source: bool) -> None:
        self._sessions = sessions
        self._is_source = is_source
        #: Relations that the sessions have read, and keep locked.
        self._n_locked = 0
        self._unlocked_s = time.monotonic()

    def parts(self, table: Compared) -> list[Part]:
        """Return the parts of a table here."""
        leaves = table.published.leaves if self._is_source else table.target_leaves
        return [part for leaf in leaves for part in parts_of(leaf, canonical.READ_PAGES)]

    def _leaves(self, table: Compared) -> list[Part]:
        leaves = table.published.leaves if self._is_source else table.target_leaves
        return [Part(schema=leaf.schema, name=leaf.name) for leaf in leaves]

    def _here(self, table: Compared) -> PublishedTable:
        """Return a table without the expressions that replace columns, whose values the target's rows have."""
        published = table.published
        is_plain = self._is_source or not published.replacements
        return published if is_plain else msgspec.structs.replace(published, replacements=())

    @contextmanager
    def _errors(self, table: PublishedTable) -> Iterator[None]:
        end_errors = source_errors if self._is_source else target_errors
        with end_errors(f"reading {table.text}"), values_hidden(when=bool(table.replaced)):
            yield

    def _filter(self, table: PublishedTable) -> str | sql.Composed:
        # Rows that the filter keeps back are not on the target; rows with other constants there are of other sources.
        return table.row_filter if self._is_source else own_condition(table.constants) if table.constants else ""

    async def summary(
        self, table: Compared, on_part: Callable[[Part, int], None], numbers: Sequence[int] = ()
    ) -> Summary:
        """Return rows and sums of all ranges, or of some; `on_part` is called with each part and its rows."""
        published = self._here(table)
        total: Summary = {}

        async def one(session: Session, part: Part) -> None:
            query = canonical.summary(published, part, table.ranges, self._filter(published), numbers)
            found = await self._rows(session, published, query)
            add(total, [(int(number), int(rows), int(hashes)) for number, rows, hashes in found])
            on_part(part, sum(int(rows) for _, rows, _ in found))

        await self._each(deque(self._parts_with(table, numbers)), one)
        return total

    def _parts_with(self, table: Compared, numbers: Sequence[int]) -> list[Part]:
        """Return the parts to read: the key's index finds the rows of key ranges, for all others all pages are read."""
        return self._leaves(table) if numbers and table.ranges.bounds else self.parts(table)

    async def rows(self, table: Compared, numbers: Sequence[int]) -> list[tuple[Key, int]]:
        """Return key and hash of every row in some ranges."""
        published = self._here(table)
        collected: list[tuple[Key, int]] = []

        async def one(session: Session, part: Part) -> None:
            query = canonical.rows_of(published, part, table.ranges, numbers, self._filter(published))
            found = await self._rows(session, published, query)
            collected.extend((tuple(key), int(hashed)) for key, hashed in found)

        await self._each(deque(self._parts_with(table, numbers)), one)
        return collected

    async def why_unknown(self, table: Compared) -> str:
        """Return why the snapshot's rows of a table were not read; empty: they were."""
        relations = [(part.schema, part.name) for part in self._leaves(table)]
        with self._errors(table.published):
            found = await rewritten(self._sessions[0], relations)
        end = "source" if self._is_source else "target"
        words = "was rewritten, emptied or replaced after the snapshot of this comparison"
        return f"{end}: {few(found)} {words}" if found else ""

    async def done(self, table: Compared) -> None:
        """Check that a table's rows were the snapshot's, and unlock.

        Raises:
            SourceRefused, TargetRefused: they are not known.
        """
        if why := await self.why_unknown(table):
            raise (SourceRefused if self._is_source else TargetRefused)(why, hint="run the same command again")
        await self.unlock(table)

    async def unlock(self, table: Compared) -> None:
        """Note that a table is read, and unlock all now and then.

        A transaction keeps each relation that it has read locked, and shared memory has room for a few thousand.
        Relations locked after a savepoint are unlocked by going back to it (manual, SAVEPOINT and "Explicit Locking").
        """
        self._n_locked += len(self._leaves(table))
        if self._n_locked >= _MOST_LOCKED or time.monotonic() - self._unlocked_s >= _LONGEST_LOCKED_S:
            self._n_locked, self._unlocked_s = 0, time.monotonic()
            with self._errors(table.published):
                for session in self._sessions:
                    await session.execute(GO_BACK)

    async def _rows(self, session: Session, table: PublishedTable, query: sql.Composed) -> list[tuple[Any, ...]]:
        with self._errors(table):
            async with session.cursor() as cursor:
                await cursor.execute(query)
                return await cursor.fetchall()

    async def _each(self, parts: deque[Part], one: Callable[[Session, Part], Any]) -> None:
        async def lane(session: Session) -> None:
            while parts:
                await one(session, parts.popleft())

        end = "source" if self._is_source else "target"
        try:
            async with asyncio.TaskGroup() as group:
                for number, session in enumerate(self._sessions, 1):
                    group.create_task(lane(session), name=f"verify-{end}-{number}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors


def drawn(chosen: random.Random, n_ranges: int, n_wanted: int, read: Sequence[int]) -> list[int]:
    """Return numbers of ranges in their order, none of those that were read; fewer if not enough are left."""
    some = chosen.sample(range(n_ranges), min(n_ranges, n_wanted + len(read)))
    return sorted([number for number in some if number not in read][:n_wanted])


# A bad sample makes ranges of unequal size, but no wrong result: both ends number the rows by the same values.
async def ranges_of(source: Connection, table: PublishedTable, type_name: str, count: int) -> Ranges:
    """Return about `count` ranges of the key's first column; hash slices if too few of its values differ."""
    column = table.key[0]
    leaves = [leaf for leaf in table.leaves if leaf.has_ranges]
    pages = max(1, sum(leaf.pages for leaf in leaves))
    # The same share of every leaf, or the sample would not be like the table.
    percent = min(100.0, 100 * max(_FEWEST_PAGES, count * _PAGES_PER_RANGE) / pages)
    select = sql.SQL("SELECT {}::{} AS v FROM ONLY {} TABLESAMPLE SYSTEM ({})")
    samples = sql.SQL(" UNION ALL ").join(
        [
            select.format(
                sql.Identifier(column),
                sql.Identifier("pg_catalog", type_name),
                sql.Identifier(leaf.schema, leaf.name),
                sql.Literal(percent),
            )
            for leaf in leaves
        ]
    )
    # The least value of each of `count` equal portions of the sample but the first.
    query = sql.SQL(
        "SELECT DISTINCT ON (portion) v::pg_catalog.text FROM (SELECT v, pg_catalog.ntile({count}) OVER (ORDER BY v)"
        " AS portion FROM ({samples}) AS s) AS n WHERE portion > 1 ORDER BY portion, v"
    ).format(count=sql.Literal(count), samples=samples)
    if not leaves:
        return Ranges(count=count)
    with source_errors(f"reading a sample of {table.text}"):
        async with source.cursor() as cursor:
            await cursor.execute(query)
            bounds = tuple(dict.fromkeys(bound for (bound,) in await cursor.fetchall()))
    if len(bounds) < count // 2:
        return Ranges(count=count)
    return Ranges(count=len(bounds) + 1, column=column, type_name=type_name, bounds=bounds)
