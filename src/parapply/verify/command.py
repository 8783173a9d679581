"""`parapply verify`: source and target compared table by table at one LSN, while both are in use.

The daemon pauses while the publisher exports a snapshot, whose LSN is later than its own; it applies up to that LSN,
exports the target's snapshot, and continues. From then on only sessions are read that see these two snapshots.

In: the configuration and options. Out: a line for each table, the differing keys, and exit code 1 if there are any.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from psycopg import sql

from parapply import connect
from parapply.commands.snapshot import Snapshot, snapshots
from parapply.copy import replaced
from parapply.copy import snapshot as source_snapshots
from parapply.copy import tables as on_target
from parapply.copy.bar import Bar
from parapply.copy.published import PublishedTable, leaves_of, named, published_tables, without
from parapply.errors import ParapplyError, SourceRefused
from parapply.model import format_lsn
from parapply.printable import printable
from parapply.quoting import copyable
from parapply.source import refusals, slot
from parapply.target.session import settings
from parapply.verify import canonical
from parapply.verify.differences import Difference, differences, differing_ranges, shown
from parapply.verify.postgres import BEFORE_TABLES, Compared, VerifyEnd, drawn, ranges_of
from parapply.verify.statements import statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from parapply.config import Config
    from parapply.copy.published import Leaf
    from parapply.copy.snapshot import SourceSnapshot

#: Ranges whose rows are read at once: a few hundred thousand keys in memory.
_RANGES_AT_ONCE = 16
#: Seconds to wait for the daemon, unless told otherwise.
_SNAPSHOT_TIMEOUT_S = 600.0

_DIFFERENT = 1
_BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class VerifyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to compare."""

    tables: tuple[str, ...] = ()  # schema.table; empty: all published
    connections: int = 2  # on each side
    max_keys: int = 100  # named for each table
    sampled_ranges: int = 0  # of each table whose key both sides sort alike; 0: all of it
    max_pause_s: float = 10.0  # that the daemon may pause for the publisher's snapshot
    timeout_s: float = _SNAPSHOT_TIMEOUT_S  # to wait for the daemon
    prints_statements: bool = False
    is_brief: bool = False  # tables that are equal get no line
    allows_none: bool = False  # no table to compare is no error
    as_json: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing one table."""

    table: PublishedTable
    source_rows: int
    target_rows: int
    found: tuple[Difference, ...]
    is_cut: bool  # more rows differ than were asked for
    sampled: tuple[int, ...] = ()  # the ranges that were compared, and have these rows; empty: all
    equal_at: int | None = None  # not compared now: it was equal at this LSN, and the figures are from then
    seconds: float = 0.0  # that the comparison took
    statements: tuple[str, ...] = ()
    why_not: str = ""  # it was not compared; empty: it was

    @property
    def is_sampled(self) -> bool:
        """Return whether only some ranges were compared."""
        return bool(self.sampled)

    @property
    def is_equal(self) -> bool:
        """Return whether it was compared, and no row differs."""
        return not (self.found or self.why_not)


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing all tables."""

    verdicts: list[Verdict]
    at_lsn: int  # of the publisher, as both sides were compared
    pause_s: float  # for which the daemon applied nothing
    tables: list[Compared]
    left_out: tuple[str, ...] = ()  # schema.table of tables whose rows are not wanted on the target

    @property
    def is_equal(self) -> bool:
        """Return whether all tables were compared, and no row differs."""
        return all(verdict.is_equal for verdict in self.verdicts)


class VerifyAgain:
    """The second look at tables that were compared a moment ago and were equal."""

    def __init__(self, earlier: VerifyResult, budget_s: float) -> None:
        self.earlier = earlier
        self.budget_s = budget_s
        pairs = zip(earlier.tables, earlier.verdicts, strict=True)
        self._then = {one.published.oid: (one, verdict) for one, verdict in pairs}

    def then(self, table: PublishedTable) -> tuple[Compared, Verdict] | None:
        """Return the earlier verdict on a table; None if it did not exist, or is another table by now."""
        found = self._then.get(table.oid)
        if found is None:
            return None
        was = found[0].published
        here, there = ({(leaf.schema, leaf.name) for leaf in one.leaves} for one in (was, table))
        return found if here == there and msgspec.structs.replace(was, leaves=table.leaves) == table else None


async def verify(config: Config, options: VerifyOptions) -> int:
    """Compare, print, and return the exit code: 0 if all tables are equal, else 1.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be read; no daemon runs.
        ParapplyError: the publisher gave no snapshot in time.
    """
    found = await comparison(config, options)
    _print(options, found)
    return 0 if found.is_equal else _DIFFERENT


async def comparison(config: Config, options: VerifyOptions, again: VerifyAgain | None = None) -> VerifyResult:
    """Compare, print a line for each table, and return what was found.

    Raises:
        As `verify`.
    """
    async with connect.open_both(config, "verify") as ends:
        # Refused before a daemon has to pause.
        await _tables(config, options, ends)
        awaited = await refusals.awaited(ends.source, config.source)
    async with AsyncExitStack() as stack:
        sessions = _Sessions(config, options, stack, awaited)
        (taken,) = await stack.enter_async_context(
            snapshots([config], choose=sessions.open_source, timeout_s=options.timeout_s)
        )
        await sessions.open_target(taken)
        # Until the snapshot, which may be long, a table, a partition or a filter may have come.
        tables = await _tables(config, options, connect.Connections(sessions.source[0], sessions.target[0]))
        _say_left_out(config, tables)
        both = _Both(options, again, sessions.source, sessions.target)
        found = await both.compare(tables, taken.at_lsn, taken.pause_s)
        return msgspec.structs.replace(found, left_out=config.mapping.schema_only)


@asynccontextmanager
async def ends_at_rest(config: Config, options: VerifyOptions) -> AsyncIterator[EndsAtRest]:
    """Open sessions for comparisons of two sides to which nothing is written."""
    async with AsyncExitStack() as stack:
        name = f"parapply verify {config.source.slot}"
        source, target = [], []
        for _ in range(options.connections):
            source.append(await slot.connect(config.source.login, application_name=name))
            stack.push_async_callback(source[-1].close)
            target.append(await connect.open_target(config, "verify"))
            stack.push_async_callback(target[-1].close)
        yield EndsAtRest(config, options, source, target)


class EndsAtRest:
    """Sessions that see both sides as they are, not through snapshots of one LSN, which the daemon would have to make.

    If nothing is written, equal rows are equal at one LSN. A row that is written may look like a difference.
    """

    def __init__(
        self,
        config: Config,
        options: VerifyOptions,
        source: Sequence[slot.Connection],
        target: Sequence[settings.Connection],
    ) -> None:
        self._config = config
        self._options = options
        self._source = source
        self._target = target

    async def comparison(self, again: VerifyAgain, at_lsn: int) -> VerifyResult:
        """Compare what both sides hold now; all up to `at_lsn` has been applied, and nothing came after."""
        with slot.source_errors("comparing"):
            for reader in self._source:
                await reader.execute(f"{_BEGIN}; {BEFORE_TABLES}")
        with settings.target_errors("comparing"):
            for reader in self._target:
                await reader.execute(f"{_BEGIN}; {BEFORE_TABLES}")
        tables = await _tables(self._config, self._options, connect.Connections(self._source[0], self._target[0]))
        return await _Both(self._options, again, self._source, self._target).compare(tables, at_lsn, 0.0)


def say_all(found: VerifyResult) -> None:
    """Print the result in one line."""
    _print(VerifyOptions(), found)


async def _tables(config: Config, options: VerifyOptions, ends: connect.Connections) -> list[PublishedTable]:
    await slot.check_publications(ends.source, config.source.publications)
    config.mapping.check_rows(options.tables)
    tables = _chosen(options, await published_tables(ends.source, config.source.publications, config.mapping))
    if not (tables or options.allows_none):
        but = " but tables of mapping.schema_only" if config.mapping.schema_only else ""
        raise SourceRefused(
            f"the publications {', '.join(config.source.publications)} have no table to compare{but}",
            hint="ALTER PUBLICATION ... ADD TABLE on the publisher, or correct source.publications",
        )
    await on_target.check_columns(ends.target, [table.here() for table in tables])
    if not any(table.replaced for table in tables):
        return tables
    # Sessions that compare may be in a transaction that writes nothing.
    role, name = config.target.session_replication_role, f"parapply verify {config.source.slot}"
    async with await settings.connect_control(config.target.login, role=role, application_name=name) as conn:
        return [_compared(table) for table in await replaced.judged(conn, tables)]


def _compared(table: PublishedTable) -> PublishedTable:
    """Return a table without columns whose values are of users' functions, which may be others on the publisher."""
    left = [one.name for one in table.replacements if not one.is_system]
    kept = tuple([one for one in table.replacements if one.is_system])
    return msgspec.structs.replace(without(table, left), replacements=kept) if left else table


def _say_left_out(config: Config, tables: Sequence[PublishedTable]) -> None:
    only = config.mapping.schema_only
    texts = [f"schema only, not compared: {', '.join(only)}"] if only else []
    texts += [
        f"{table.text}: not compared, because users' functions replace it: {', '.join(left)}"
        for table in tables
        if (left := [name for name in table.omitted if name in table.replaced])
    ]
    for text in texts:
        click.echo(printable(text), err=True)


def _chosen(options: VerifyOptions, published: Sequence[PublishedTable]) -> list[PublishedTable]:
    return named(published, options.tables, "write schema.table") if options.tables else list(published)


class _Sessions:
    """Sessions on both ends that see the snapshots of one LSN; closed by the stack's owner."""

    def __init__(
        self, config: Config, options: VerifyOptions, stack: AsyncExitStack, awaited: SourceRefused | None
    ) -> None:
        self._config = config
        self._options = options
        self._stack = stack
        #: Why commits wait for the daemon that is paused: the snapshot waits for them.
        self._awaited = awaited
        self.source: list[slot.Connection] = []
        self.target: list[settings.Connection] = []

    async def open_source(self, standing_lsn: int) -> int:
        """Open the sessions on the publisher while the daemon is paused; return the LSN that they see."""
        login = self._config.source.login
        try:
            async with asyncio.timeout(self._options.max_pause_s):
                snapshot: SourceSnapshot = await self._stack.enter_async_context(source_snapshots.exported(login, None))
        except TimeoutError as error:
            if self._awaited is not None:
                raise self._awaited from error
            raise ParapplyError(
                f"the publisher gave no snapshot in {self._options.max_pause_s:g} s: transactions run there, or are"
                " prepared, that are older",
                hint="try again when they have ended, or allow a longer pause with --max-pause",
            ) from error
        assert snapshot.lsn >= standing_lsn, "the publisher's WAL goes forward"
        name = f"parapply verify {self._config.source.slot}"
        for _ in range(self._options.connections):
            session = await source_snapshots.open_reader(login, name, snapshot)
            reader = await self._stack.enter_async_context(session)
            with slot.source_errors("comparing"):
                await reader.execute(BEFORE_TABLES)
            self.source.append(reader)
        return snapshot.lsn

    async def open_target(self, taken: Snapshot) -> None:
        for _ in range(self._options.connections):
            conn = await self._stack.enter_async_context(await connect.open_target(self._config, "verify"))
            with settings.target_errors("importing the snapshot"):
                await conn.execute(_BEGIN)
                await conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(taken.name)))
                await conn.execute(BEFORE_TABLES)
            self.target.append(conn)


class _Both:
    def __init__(
        self,
        options: VerifyOptions,
        again: VerifyAgain | None,
        source: Sequence[slot.Connection],
        target: Sequence[settings.Connection],
    ) -> None:
        self._again = again
        self._options = options
        self._source = source
        self._target = target
        self._seed = random.getrandbits(64)

    async def compare(self, tables: Sequence[PublishedTable], at_lsn: int, pause_s: float) -> VerifyResult:
        """Compare tables, and print a line for each."""
        target = self._target
        ends = VerifyEnd(self._source, is_source=True), VerifyEnd(target, is_source=False)
        types = await on_target.column_types(target[0], [table.here() for table in tables])
        leaves = await target_leaves(target[0], tables)
        compared = []
        for table in tables:
            compared.append(await self._compared(table, leaves[table.oid], types[table.here().full_name]))
            # The search for a large table's ranges has locked it.
            await ends[0].unlock(compared[-1])
        with Bar("comparing", has_bytes=False) as bar:
            whole = [table for table in compared if not self._sample(table)]
            parts = [part for end in ends for table in whole for part in end.parts(table)]
            bar.begin(len(parts), sum(max(1, part.pages) for part in parts), sum(p.estimated_rows for p in parts))
            if self._options.sampled_ranges:
                verdicts = await self._side_by_side(compared, bar)
            else:
                verdicts = [self._said(await self._table(table, *ends, bar), bar) for table in compared]
        return VerifyResult(verdicts=verdicts, at_lsn=at_lsn, pause_s=pause_s, tables=compared)

    def _said(self, verdict: Verdict, bar: Bar) -> Verdict:
        if not self._options.as_json and not (self._options.is_brief and verdict.is_equal):
            bar.say(_line(verdict))
        return verdict

    async def _side_by_side(self, compared: Sequence[Compared], bar: Bar) -> list[Verdict]:
        """Compare as many tables at once as sessions exist, and tables with many pages to read by all sessions.

        Of the tables compared before, the ones that took the least time come first, as long as time is left.
        """
        again, began_s = self._again, time.monotonic()
        found: dict[int, Verdict] = {}
        then_of = {one.published.oid: then[1] if (then := self._then(one.published)) else None for one in compared}

        async def one(table: Compared, ends: tuple[VerifyEnd, VerifyEnd]) -> None:
            spent_s = time.monotonic() - began_s
            if again is not None and (then := then_of[table.published.oid]) and spent_s + then.seconds > again.budget_s:
                verdict = msgspec.structs.replace(then, table=table.published, equal_at=again.earlier.at_lsn)
            else:
                verdict = await self._table(table, *ends, bar)
            found[table.published.oid] = self._said(verdict, bar)

        def expected_s(table: Compared) -> float:
            then = then_of[table.published.oid]
            return 0.0 if then is None else then.seconds

        both = VerifyEnd(self._source, is_source=True), VerifyEnd(self._target, is_source=False)
        large = [
            table for table in compared if not self._sample(table) and any(len(end.parts(table)) > 1 for end in both)
        ]
        by_all = {table.published.oid for table in large}
        left = deque(sorted([table for table in compared if table.published.oid not in by_all], key=expected_s))

        async def lane(here: slot.Connection, there: settings.Connection) -> None:
            ends = VerifyEnd([here], is_source=True), VerifyEnd([there], is_source=False)
            while left:
                await one(left.popleft(), ends)

        try:
            async with asyncio.TaskGroup() as group:
                for number, ends in enumerate(zip(self._source, self._target, strict=True), 1):
                    group.create_task(lane(*ends), name=f"verify-{number}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        for table in sorted(large, key=expected_s):
            await one(table, both)
        return [found[table.published.oid] for table in compared]

    async def _compared(
        self, table: PublishedTable, leaves: Sequence[Leaf], target_types: Mapping[str, int]
    ) -> Compared:
        if (then := self._then(table)) is not None:
            return Compared(published=table, target_leaves=tuple(leaves), ranges=then[0].ranges)
        return await compared_of(self._source[0], self._target[0], table, leaves, target_types)

    def _then(self, table: PublishedTable) -> tuple[Compared, Verdict] | None:
        return self._again.then(table) if self._again is not None else None

    def _sample(self, table: Compared) -> list[int]:
        """Return the ranges that stand for a table; none if all of it is to be compared."""
        n_ranges = len(table.ranges.bounds) + 1
        if not table.ranges.bounds or not 0 < self._options.sampled_ranges < n_ranges:
            return []
        # The same ones while a table is asked about twice; others in the next run.
        chosen = random.Random(f"{self._seed} {table.published.text}")  # noqa: S311  which rows to look at
        if self._again is None:
            return sorted(chosen.sample(range(n_ranges), self._options.sampled_ranges))
        # Rows that have come since are in the last one, where keys ascend.
        then = self._then(table.published)
        others = drawn(chosen, n_ranges - 1, self._options.sampled_ranges - 1, then[1].sampled if then else ())
        return [*others, n_ranges - 1]

    async def _table(self, table: Compared, source: VerifyEnd, target: VerifyEnd, bar: Bar) -> Verdict:
        def on_part(part: Any, rows: int) -> None:  # noqa: ANN401  a Part
            bar.part_done(part, rows)
            bar.data(rows, 0, table.published.text)

        began_s = time.monotonic()
        sample = self._sample(table)
        here, there = await asyncio.gather(
            source.summary(table, on_part, sample), target.summary(table, on_part, sample)
        )
        # From here on a lock keeps what was read.
        why_not = await source.why_unknown(table) or await target.why_unknown(table)
        left = [] if why_not else differing_ranges(here, there)
        source_rows, target_rows = (sum(rows for rows, _ in one.values()) for one in (here, there))
        found: list[Difference] = []
        while left and len(found) <= self._options.max_keys:
            numbers, left = left[:_RANGES_AT_ONCE], left[_RANGES_AT_ONCE:]
            rows_here, rows_there = await asyncio.gather(source.rows(table, numbers), target.rows(table, numbers))
            found += differences(rows_here, rows_there)
        kept = found[: self._options.max_keys]
        texts: Sequence[str] = ()
        if kept and self._options.prints_statements:
            texts = await statements(self._source[0], self._target[0], table, kept)
        await source.unlock(table)
        await target.unlock(table)
        return Verdict(
            table=table.published,
            source_rows=source_rows,
            target_rows=target_rows,
            found=tuple(kept),
            is_cut=bool(left) or len(found) > len(kept),
            sampled=tuple(sample),
            seconds=time.monotonic() - began_s,
            statements=tuple(texts),
            why_not=why_not,
        )


async def compared_of(
    source: slot.Connection,
    target: settings.Connection,
    table: PublishedTable,
    leaves: Sequence[Leaf],
    target_types: Mapping[str, int],
) -> Compared:
    """Return how a table is compared; raise SourceRefused or SourceLost if a sample could not be read."""
    rows = max(sum(leaf.estimated_rows for leaf in table.leaves), sum(leaf.estimated_rows for leaf in leaves))
    ranges = canonical.Ranges(count=canonical.n_ranges(rows))
    type_name = canonical.ordered_type(table, target_types)
    if ranges.count > 1 and type_name:
        ranges = await ranges_of(source, table, type_name, ranges.count)
    encodings = {conn.info.parameter_status("server_encoding") for conn in (source, target)}
    ranges = msgspec.structs.replace(ranges, is_utf8=len(encodings) > 1)
    return Compared(published=table, target_leaves=tuple(leaves), ranges=ranges)


async def target_leaves(target: settings.Connection, tables: Sequence[PublishedTable]) -> dict[int, list[Leaf]]:
    """Return the target's relations of each table, by its OID on the publisher."""
    query = sql.SQL(
        "SELECT w.name::pg_catalog.regclass::oid::bigint"
        " FROM unnest($1::text[]) WITH ORDINALITY AS w(name, number) ORDER BY w.number"
    )
    names = [sql.Identifier(*table.here().full_name).as_string(None) for table in tables]
    with settings.target_errors("reading the tables"):
        oids = [int(oid) for (oid,) in await settings.rows(target, query, [names])]
        # Several sources may lead to one table.
        leaves = await leaves_of(target, list(dict.fromkeys(oids)))
    return {table.oid: leaves[oid] for table, oid in zip(tables, oids, strict=True)}


def _line(verdict: Verdict) -> str:
    if verdict.why_not:
        return printable(f"{verdict.table.shown}: NOT COMPARED, {verdict.why_not}")
    if verdict.equal_at is not None:
        what = "of a sample " if verdict.is_sampled else ""
        return (
            f"{printable(verdict.table.shown)}: not compared again; {verdict.source_rows:,} rows {what}were equal at"
            f" {format_lsn(verdict.equal_at)}"
        )
    if verdict.is_equal:
        sampled = " of a sample" if verdict.is_sampled else ""
        return f"{printable(verdict.table.shown)}: equal, {verdict.source_rows:,} rows{sampled}"
    rows = f"source {verdict.source_rows:,} rows, target {verdict.target_rows:,}"
    keys = f"{'more than ' if verdict.is_cut else ''}{len(verdict.found):,} keys differ"
    columns = verdict.table.key or verdict.table.columns
    lines = [f"{printable(verdict.table.shown)}: DIFFERENT, {rows}, {keys}"]
    for one in verdict.found:
        many = f" ({one.count} rows)" if one.count > 1 else ""
        lines.append(f"  {one.kind:9} {printable(shown(columns, one.key))}{many}")
    return "\n".join([*lines, *map(copyable, verdict.statements)])


def _print(options: VerifyOptions, found: VerifyResult) -> None:
    click.echo(json.dumps(document(found), indent=2) if options.as_json else said(found))


def said(found: VerifyResult) -> str:
    """Return what was found in one line."""
    verdicts = found.verdicts
    if not verdicts:
        return "no table is published that could be compared"
    different, unknown = (sum(map(bool, one)) for one in zip(*[(v.found, v.why_not) for v in verdicts], strict=True))
    is_equal = not (different or unknown)
    words = f"all {len(verdicts)} tables are equal" if is_equal else f"{different} of {len(verdicts)} tables differ"
    words += f", {unknown} not compared" if unknown else ""
    if sampled := sum(verdict.is_sampled for verdict in verdicts):
        words += f" (of {sampled} only a sample)"
    if left := sum(verdict.equal_at is not None for verdict in verdicts):
        words += f", {left} of them as of before"
    pause = f" (the daemon stood still for {found.pause_s * 1000:.0f} ms)" if found.pause_s else ""
    return f"{words} at {format_lsn(found.at_lsn)}{pause}"


def document(found: VerifyResult) -> dict[str, object]:
    """Return what was found, as JSON has it."""
    return {
        "at_lsn": format_lsn(found.at_lsn),
        "pause_s": round(found.pause_s, 6),
        "is_equal": found.is_equal,
        "tables_not_compared": list(found.left_out),
        "tables": [
            {
                "schema_name": verdict.table.schema,
                "table_name": verdict.table.name,
                "target_name": verdict.table.here().text,
                "is_equal": verdict.is_equal,
                "why_not_compared": verdict.why_not,
                "is_sampled": verdict.is_sampled,
                "source_rows": None if verdict.why_not else verdict.source_rows,
                "target_rows": None if verdict.why_not else verdict.target_rows,
                "key_columns": list(verdict.table.key),
                "columns_not_compared": list(verdict.table.omitted),
                "differences": [{"kind": one.kind, "key": list(one.key), "count": one.count} for one in verdict.found],
                "is_cut": verdict.is_cut,
                "statements": list(verdict.statements),
            }
            for verdict in found.verdicts
        ],
    }
