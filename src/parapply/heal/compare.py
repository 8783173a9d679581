"""Each table compared under one snapshot of either end, and how it is made equal: by keys, whole, or not at all.

In: sessions that see the snapshots. Out: a `HealPlan` for each table. Nothing is changed here.

A table is repaired by its key if both ends compare the key's values alike and no key has several rows. Any other one
that differs is emptied and copied whole, as is one that is empty, whose copy was interrupted, or that was named.

Source: `verify/canonical.py`, for what equal means.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.copy import tables as on_target
from parapply.copy.resume import KEY_TYPES
from parapply.printable import printable
from parapply.verify.command import compared_of, target_leaves
from parapply.verify.differences import Difference, Summary, differences, differing_ranges
from parapply.verify.postgres import BEFORE_TABLES, Compared, VerifyEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from parapply.copy.bar import Bar
    from parapply.copy.parts import Part
    from parapply.copy.published import PublishedTable
    from parapply.source import slot
    from parapply.target.session import settings
    from parapply.verify.differences import Key

#: Ranges whose rows are read at once: a few hundred thousand keys in memory.
_RANGES_AT_ONCE: Final = 16


class HealPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The repair of one table."""

    compared: Compared
    types: Mapping[str, int]  # of the target's columns, by name
    why_whole: str = ""  # it is emptied and copied; empty: it is not
    source_rows: int | None = None  # None: not counted
    target_rows: int | None = None
    ranges: tuple[int, ...] = ()  # that differ
    #: Rows and sums of these ranges, as both ends had them.
    here: Summary = {}
    there: Summary = {}
    found: tuple[Difference, ...] = ()  # keys that differ
    is_cut: bool = False  # there are more than may be copied

    @property
    def table(self) -> PublishedTable:
        """Return the table."""
        return self.compared.published

    @property
    def is_equal(self) -> bool:
        """Return whether nothing is to be done."""
        return not self.ranges and not self.why_whole

    @property
    def n_rows(self) -> int:
        """Return how many rows are written or deleted, about where the table is copied whole."""
        if not self.why_whole:
            return len(self.found)
        return max(self._rows_there, self._rows_here)

    @property
    def _rows_there(self) -> int:
        estimated = sum(leaf.estimated_rows for leaf in self.compared.target_leaves)
        return estimated if self.target_rows is None else self.target_rows

    @property
    def _rows_here(self) -> int:
        estimated = sum(leaf.estimated_rows for leaf in self.table.leaves)
        return estimated if self.source_rows is None else self.source_rows

    def keys(self, *kinds: str) -> list[Key]:
        """Return the keys that differ in one of these ways."""
        return [one.key for one in self.found if one.kind in kinds]

    def line(self) -> str:
        """Return it for people."""
        name = printable(self.table.shown)
        if self.is_equal:
            return f"{name}: equal, {self.source_rows or 0:,} rows"
        if self.why_whole:
            about = "about " if self.source_rows is None else ""
            numbers = f"emptied of {about}{self._rows_there:,} rows, and all rows copied ({about}{self._rows_here:,})"
            return f"{name}: {numbers}: {self.why_whole}"
        counts = Counter(one.kind for one in self.found)
        n_ranges = max(self.compared.ranges.count, len(self.compared.ranges.bounds) + 1)
        return (
            f"{name}: {len(self.ranges):,} of {n_ranges:,} ranges differ, {'more than ' if self.is_cut else ''}"
            f"{len(self.found):,} rows: {counts['missing']:,} to insert, {counts['different']:,} to replace,"
            f" {counts['extra']:,} to delete"
        )


class TableComparison:
    """Compares tables one after the other, over several sessions on each end."""

    def __init__(
        self, source: Sequence[slot.Connection], target: Sequence[settings.Connection], *, max_rows: int, bar: Bar
    ) -> None:
        self._source = source[0]
        self._target = target[0]
        self._ends = VerifyEnd(source, is_source=True), VerifyEnd(target, is_source=False)
        self._max_rows = max_rows
        self._bar = bar

    async def run(
        self,
        tables: Sequence[PublishedTable],
        *,
        named: Collection[int],
        begun: Collection[int],
        said: Callable[[HealPlan], None],
    ) -> list[HealPlan]:
        """Compare tables."""
        types = await on_target.column_types(self._target, [table.here() for table in tables])
        leaves = await target_leaves(self._target, tables)
        plans = []
        for table in tables:
            of_here = types[table.here().full_name]
            compared = await compared_of(self._source, self._target, table, leaves[table.oid], of_here)
            why = "named with --whole" if table.oid in named else ""
            why = why or ("its first copy was interrupted" if table.oid in begun else "")
            if why:
                plan = HealPlan(compared=compared, types=of_here, why_whole=why)
            else:
                plan = await self._compare(compared, of_here)
            for end in self._ends:
                await end.done(compared)
            said(plan)
            plans.append(plan)
        return plans

    async def _compare(self, compared: Compared, types: Mapping[str, int]) -> HealPlan:
        def on_part(part: Part, rows: int) -> None:
            self._bar.part_done(part, rows)
            self._bar.data(rows, 0, compared.published.text)

        source, target = self._ends
        here, there = await asyncio.gather(source.summary(compared, on_part), target.summary(compared, on_part))
        ranges = tuple(differing_ranges(here, there))
        plan = HealPlan(
            compared=compared,
            types=types,
            source_rows=sum(rows for rows, _ in here.values()),
            target_rows=sum(rows for rows, _ in there.values()),
            ranges=ranges,
            here=only(here, ranges),
            there=only(there, ranges),
        )
        if not ranges:
            return plan
        why = _why_no_key(compared.published, types)
        why = why or ("it holds no rows here" if not there else "")
        if why:
            return msgspec.structs.replace(plan, why_whole=why)
        return await self._with_keys(plan)

    async def _with_keys(self, plan: HealPlan) -> HealPlan:
        found: list[Difference] = []
        left = list(plan.ranges)
        source, target = self._ends
        while left and len(found) <= self._max_rows:
            numbers, left = left[:_RANGES_AT_ONCE], left[_RANGES_AT_ONCE:]
            rows_here, rows_there = await asyncio.gather(
                source.rows(plan.compared, numbers), target.rows(plan.compared, numbers)
            )
            times = Counter([key for key, _ in rows_there])
            differing = differences(rows_here, rows_there)
            if any(None in one.key or one.count > 1 or times[one.key] > 1 for one in differing):
                why = "a key is NULL there, or has several rows"
                return msgspec.structs.replace(plan, why_whole=why)
            found += differing
        return msgspec.structs.replace(plan, found=tuple(found), is_cut=bool(left))


def only(summary: Summary, ranges: Collection[int]) -> Summary:
    """Return rows and sums of some ranges."""
    return {number: summary[number] for number in ranges if number in summary}


def _why_no_key(table: PublishedTable, types: Mapping[str, int]) -> str:
    """Return why rows cannot be told apart by a key that both ends compare alike; empty if they can."""
    if not table.key:
        return "it has no key"
    ours = dict(zip(table.columns, table.types, strict=True))
    others = [column for column in table.key if not {ours[column], types.get(column, 0)} <= KEY_TYPES.keys()]
    return f"the type of its key's column {', '.join(others)} is not compared alike everywhere" if others else ""


async def before_tables(sessions: Sequence[slot.Connection | settings.Connection]) -> None:
    """Prepare sessions that see a snapshot for the comparison; the caller turns errors into ours."""
    for session in sessions:
        await session.execute(BEFORE_TABLES)
