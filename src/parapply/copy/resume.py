"""Parts of tables that an interrupted copy has left, brought forward from their snapshot to a later one.

In: what is noted of the parts, the slot, the new snapshot. Out: the same parts with the rows that the new snapshot
shows in their pages; so the rest of the table is copied from that snapshot, and the table joins the stream at one LSN.

Let a part hold the rows that its snapshot, as of L1, showed in some pages of a relation, and let the new snapshot be
as of L2. K is a set of keys, among them the old and the new key of every change that committed from L1 on and before
L2: the slot still sends those changes. Then

1. a row whose key is not in K was neither written nor deleted in between, so it is the same version at the same
   place: what the part has of such rows is what the new snapshot shows of them in its pages;
2. rows whose key is in K are deleted here, and copied again from the new snapshot, as far as they lie in its pages.

Together this is all that the new snapshot shows in these pages, and nothing else. K may hold too many keys, never too
few. It would hold too few if a change were not sent: so everything that decides what is sent, and where rows lie, must
be as it was (`_FINGERPRINT`): the publication, the table's definition and identity, its file. All of that is compared
by the version of each row of the catalogue, so a change that was undone is also seen. And the slot must not have moved
past L1. If any of this fails, or a key is not of a type that both ends compare alike, the table is copied from its
start.

Source: PostgreSQL manual, "System Columns" (ctid, xmin), "Replication Management Functions".
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

import click
from psycopg import sql

from parapply.copy import snapshot as snapshots
from parapply.copy import tables as on_target
from parapply.copy.parts import Part, bounds, column_list, parts_of
from parapply.copy.pump import pump
from parapply.errors import SourceRefused
from parapply.model import format_lsn, parse_lsn
from parapply.printable import printable
from parapply.source import options as stream_options
from parapply.source import slot
from parapply.target.catalogue.facts import check_foreign_code
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import copy_parts
from parapply.wire.decode import decode
from parapply.wire.messages import ColumnKind, Delete, Insert, RelationMessage, Truncate, Update

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parapply.config import Config
    from parapply.copy.published import Leaf, PublishedTable
    from parapply.copy.snapshot import SourceSnapshot
    from parapply.copy.writer import Writer
    from parapply.model import Relation
    from parapply.target.state.copy_parts import CopiedPart
    from parapply.wire.messages import TupleData

Key: TypeAlias = tuple[str, ...]

#: Types of keys that both ends compare alike, by OID; others have operators outside pg_catalog, or many forms of one
#: value.
KEY_TYPES: Final = {
    20: "bigint", 21: "smallint", 23: "integer", 25: "text", 1042: "bpchar", 1043: "varchar", 1082: "date",
    1114: "timestamp", 1184: "timestamptz", 1700: "numeric", 2950: "uuid",
}  # fmt: skip
_UNLIKE: Final = "its key is no longer one that both ends compare alike"
#: Keys above which a table is copied from its start: they are held in memory, and each is looked up.
_MOST_KEYS: Final = 500_000
#: Keys looked up by one statement.
_KEYS_AT_ONCE: Final = 20_000
#: Messages after which the publisher begins a new answer, between two transactions.
_MESSAGES_AT_ONCE: Final = 100_000

#: The key's columns on either end, with the facts that decide which values are equal, and how they are kept.
_KEY_COLUMNS: Final = """
SELECT a.attname, a.atttypmod, COALESCE(c.collisdeterministic, true)
  FROM pg_catalog.pg_attribute AS a LEFT JOIN pg_catalog.pg_collation AS c ON c.oid = a.attcollation
 WHERE a.attrelid = $1::text::regclass AND a.attname = ANY ($2::text[]) AND NOT a.attisdropped ORDER BY 1"""

#: Facts that decide which changes are sent and where rows lie, as a snapshot shows them, each row with its version. A
#: file that the snapshot does not show yet is one that was written since.
_FINGERPRINT: Final = """
SELECT pg_catalog.md5(pg_catalog.concat_ws(',',
         (SELECT pg_catalog.string_agg(p.oid || ':' || p.xmin, ',' ORDER BY p.oid)
            FROM pg_catalog.pg_publication AS p WHERE p.pubname = ANY (%(publications)s::text[])),
         (SELECT pg_catalog.string_agg(r.oid || ':' || r.xmin, ',' ORDER BY r.oid)
            FROM pg_catalog.pg_publication_rel AS r JOIN pg_catalog.pg_publication AS p ON p.oid = r.prpubid
           WHERE p.pubname = ANY (%(publications)s::text[])),
         (SELECT pg_catalog.string_agg(r.oid || ':' || r.xmin, ',' ORDER BY r.oid)
            FROM pg_catalog.pg_publication_namespace AS r JOIN pg_catalog.pg_publication AS p ON p.oid = r.pnpubid
           WHERE p.pubname = ANY (%(publications)s::text[])),
         (SELECT pg_catalog.string_agg(c.oid || ':' || c.xmin || ':' || c.relfilenode, ',' ORDER BY c.oid)
            FROM pg_catalog.pg_class AS c WHERE c.oid IN (%(root)s::oid, leaf.oid)
              OR c.oid IN (SELECT a.relid FROM pg_catalog.pg_partition_ancestors(leaf.oid) AS a)),
         (SELECT pg_catalog.string_agg(i.indexrelid || ':' || i.xmin, ',' ORDER BY i.indexrelid)
            FROM pg_catalog.pg_index AS i
           WHERE i.indrelid IN (%(root)s::oid, leaf.oid) AND (i.indisprimary OR i.indisreplident)))),
       leaf.relfilenode = pg_catalog.pg_relation_filenode(leaf.oid)
         AND (SELECT pg_catalog.bool_and(p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate)
                FROM pg_catalog.pg_publication AS p WHERE p.pubname = ANY (%(publications)s::text[]))
  FROM pg_catalog.pg_class AS leaf JOIN pg_catalog.pg_namespace AS n ON n.oid = leaf.relnamespace
 WHERE n.nspname = %(schema)s AND leaf.relname = %(name)s"""


def may_resume(table: PublishedTable, target_types: Mapping[str, int]) -> bool:
    """Return whether parts of a table can be brought forward, so that it is worth noting them."""
    types = dict(zip(table.columns, table.types, strict=True))
    return (
        # The notes do not say under which name the rows are, or with which constants.
        table.target is None
        and not (table.constants or table.omitted or table.replaced)
        and bool(table.key)
        and not table.row_filter
        and all(types[column] in KEY_TYPES and target_types.get(column) == types[column] for column in table.key)
        and all(leaf.has_ranges for leaf in table.leaves)
    )


async def fingerprint(
    conn: slot.Connection, publications: Sequence[str], table: PublishedTable, leaf: tuple[str, str]
) -> str:
    """Return the facts that must be unchanged for a part to be brought forward, as the session's snapshot shows them.

    Once the session has read the relation, or holds a lock on it. Empty: it must not be noted.
    """
    values = {"publications": list(publications), "root": table.oid, "schema": leaf[0], "name": leaf[1]}
    with slot.source_errors(f"reading the catalogue of {'.'.join(leaf)}"):
        cursor = await conn.execute(_FINGERPRINT, values)
        row = await cursor.fetchone()
    return f"{row[0]},{','.join(table.columns)}" if row and row[1] else ""


def left_of(leaf: Leaf, done: Sequence[CopiedPart], part_pages: int) -> Iterator[Part]:
    """Cut the rest of a relation into parts."""
    if not done:
        yield from parts_of(leaf, part_pages)
        return
    first = 0
    for part in [*sorted(done, key=lambda one: one.first_page), None]:
        end = None if part is None else part.first_page
        if end is None or end > first:
            pages = max(0, (leaf.pages if end is None else end) - first)
            n_parts = max(1, -(-pages // part_pages))
            cuts = [first + pages * number // n_parts for number in range(n_parts)]
            for at, until in zip(cuts, [*cuts[1:], end], strict=True):
                share = ((leaf.pages if until is None else until) - at) / leaf.pages if leaf.pages else 0
                yield Part(
                    schema=leaf.schema,
                    name=leaf.name,
                    first_page=at,
                    end_page=until,
                    pages=max(0, (leaf.pages if until is None else until) - at),
                    estimated_rows=max(0, int(leaf.estimated_rows * share)),
                )
        if part is None or part.end_page is None:
            return
        first = part.end_page


class Resumption:
    """Brings parts forward; the copy lock is held."""

    def __init__(
        self, config: Config, slot_id: int, writer: Writer, types: Mapping[tuple[str, str], Mapping[str, int]]
    ) -> None:
        self._config = config
        self._schema = config.target.state_schema
        self._slot_id = slot_id
        self._writer = writer
        self._target = writer.conn
        self._types = types

    async def run(self, tables: Sequence[PublishedTable], snapshot: SourceSnapshot) -> dict[int, list[CopiedPart]]:
        """Bring what can be brought forward, and return the parts that need not be copied, by the table's OID.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: nothing that was noted is lost.
        """
        noted: defaultdict[int, list[CopiedPart]] = defaultdict(list)
        for part in await copy_parts.load(self._target, self._schema, self._slot_id):
            noted[part.source_oid].append(part)
        wanted = {table.oid: table for table in tables if table.oid in noted}
        if not wanted:
            return {}
        reasons: dict[int, str] = {}
        name = f"parapply resume {self._config.source.slot}"
        reader = await snapshots.open_reader(self._config.source.login, name, snapshot)
        async with reader:
            for oid, table in wanted.items():
                prints = await self._prints(reader, table)
                reasons[oid] = await self._why_not(table, noted[oid], prints) or await self._why_unlike(reader, table)
            kept = {oid: table for oid, table in wanted.items() if not reasons[oid]}
            if kept:
                first_lsn = min(part.lsn for oid in kept for part in noted[oid])
                keys = await self._keys(kept, first_lsn, snapshot.lsn, reasons)
                kept = {oid: table for oid, table in kept.items() if not reasons[oid]}
                for oid, table in kept.items():
                    await self._bring(reader, table, noted[oid], sorted(keys[oid]), snapshot.lsn)
        for oid, table in wanted.items():
            what = f"copied from its start: {reasons[oid]}" if reasons[oid] else f"{len(noted[oid])} parts are copied"
            click.echo(f"{printable(table.text)}: {what}")
        # Before their rows go.
        await copy_parts.forget(self._target, self._schema, self._slot_id, [oid for oid in wanted if reasons[oid]])
        return {oid: noted[oid] for oid in kept}

    async def _prints(self, reader: slot.Connection, table: PublishedTable) -> dict[tuple[str, str], str]:
        publications = self._config.source.publications
        prints = {}
        for leaf in table.leaves:
            with slot.source_errors(f"locking {leaf.schema}.{leaf.name}"):
                # From here on its file stays as it is.
                await reader.execute(
                    sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.Identifier(leaf.schema, leaf.name))
                )
            prints[leaf.schema, leaf.name] = await fingerprint(reader, publications, table, (leaf.schema, leaf.name))
        return prints

    async def _why_not(
        self, table: PublishedTable, parts: Sequence[CopiedPart], prints: Mapping[tuple[str, str], str]
    ) -> str:
        if not may_resume(table, self._types[table.full_name]):
            return _UNLIKE
        if len({part.lsn for part in parts}) > 1:
            return "its parts are of different moments"
        if any(prints.get((part.leaf_schema, part.leaf_name)) != part.fingerprint for part in parts):
            return "its definition, its file or the publication is another"
        return await self._why_not_here(table, sum(part.rows for part in parts))

    async def _why_unlike(self, reader: slot.Connection, table: PublishedTable) -> str:
        """Return why a key may not be found by its text on both ends; empty: it is."""
        values = [sql.Identifier(table.schema, table.name).as_string(None), list(table.key)]
        with slot.source_errors(f"reading the key of {table.text}"):
            there = await slot.read_rows(reader, _KEY_COLUMNS, values)
        with target_errors(f"reading the key of {table.text}"):
            here = await slot.read_rows(self._target, _KEY_COLUMNS, values)
        return "" if there == here and all(is_exact for *_, is_exact in here) else _UNLIKE

    async def _why_not_here(self, table: PublishedTable, n_copied: int) -> str:
        relation = sql.Identifier(table.schema, table.name)
        allowed = sql.SQL(
            "SELECT pg_catalog.has_table_privilege($1::regclass, 'SELECT')"
            " AND pg_catalog.has_table_privilege($1::regclass, 'DELETE')"
        )
        with target_errors(f"looking what the role may do with {table.text}"):
            ((is_allowed,),) = await rows(self._target, allowed, [relation.as_string(None)])
        if not is_allowed:
            return "the target's role may not SELECT and DELETE"
        relations = await on_target.alone(self._target, [table.full_name])
        query = sql.SQL("SELECT pg_catalog.count(*) FROM {}").format(relations[table.full_name])
        with target_errors(f"counting the rows of {table.text}"):
            async with self._target.transaction():
                await self._check_code(table)
                ((n_rows,),) = await rows(self._target, query)
        if n_rows != n_copied:
            return "the target's rows are not those that were copied"
        with target_errors(f"looking for foreign keys to {table.text}"):
            async with self._target.transaction(force_rollback=True):
                if acting := await on_target.still_acting(self._target, [table.full_name]):
                    return f"rows of others would change by {acting[0]}"
        return ""

    async def _keys(
        self, tables: Mapping[int, PublishedTable], first_lsn: int, end_lsn: int, reasons: dict[int, str]
    ) -> dict[int, set[Key]]:
        """Return the keys of all changes from one LSN to another, and why that cannot be, for some or for all."""
        keys: dict[int, set[Key]] = {oid: set() for oid in tables}
        config = self._config.source
        copy = f"parapply_resume_{secrets.token_hex(6)}"
        conn = await slot.connect(config.login, application_name=f"parapply resume {config.slot}")
        async with conn:
            facts = await slot.inspect(conn, config.slot)
            confirmed = facts.slot.confirmed_flush_lsn if facts.slot else None
            if confirmed is None or confirmed > first_lsn:
                reasons.update(dict.fromkeys(tables, "the slot has moved past the copy"))
                return keys
            try:
                with slot.source_errors("copying the slot"):
                    cursor = await conn.execute(
                        "SELECT (pg_catalog.pg_copy_logical_replication_slot(%s, %s, true)).lsn::text",
                        [config.slot, copy],
                    )
                    row = await cursor.fetchone()
            except SourceRefused as error:
                reasons.update(dict.fromkeys(tables, str(error)))
                return keys
            # A daemon may have moved the slot since it was looked at; what the copy says is where it reads from.
            if row is None or parse_lsn(row[0]) > first_lsn:
                reasons.update(dict.fromkeys(tables, "the slot has moved past the copy"))
                return keys
            collector = _Collector(tables, keys, reasons)
            names = dict(stream_options.start_options(facts.server_version_num, config.publications, "any"))
            query = (
                "SELECT data FROM pg_catalog.pg_logical_slot_get_binary_changes(%s, %s::pg_lsn, %s, 'proto_version',"
                " %s, 'publication_names', %s)"
            )
            values = [
                copy, format_lsn(end_lsn), _MESSAGES_AT_ONCE, names["proto_version"], names["publication_names"],
            ]  # fmt: skip
            await slot.take_bytes(conn)
            n_messages = _MESSAGES_AT_ONCE
            # Fewer than asked for: the end was reached.
            while n_messages >= _MESSAGES_AT_ONCE:
                n_messages = 0
                with slot.source_errors("reading what has changed since the copy"):
                    async with conn.cursor(binary=True) as cursor:
                        async for (data,) in cursor.stream(query, values):
                            n_messages += 1
                            collector.take(bytes(data))
        return keys

    async def _check_code(self, table: PublishedTable) -> None:
        if self._config.target.apply_as == "owner":
            await check_foreign_code(self._target, *table.here().full_name, table.columns)

    async def _bring(
        self, reader: slot.Connection, table: PublishedTable, parts: Sequence[CopiedPart], keys: Sequence[Key], lsn: int
    ) -> None:
        """Replace the rows with these keys by the rows that the reader sees in the pages of the parts."""
        by_name = dict(zip(table.columns, table.types, strict=True))
        types = [KEY_TYPES[by_name[column]] for column in table.key]
        relation = sql.Identifier(table.schema, table.name)
        into = sql.SQL("COPY {} ({}) FROM STDIN").format(relation, column_list(table.columns))
        alone = (await on_target.alone(self._target, [table.full_name]))[table.full_name]
        more_rows = 0
        with target_errors(f"bringing {table.text} forward"):
            async with self._writer.transaction():
                await self._check_code(table)
                await on_target.still_acting(self._target, [table.full_name])
                for first in range(0, len(keys), _KEYS_AT_ONCE):
                    some = keys[first : first + _KEYS_AT_ONCE]
                    remove = sql.SQL("DELETE FROM {} AS t USING {} WHERE {}").format(
                        alone, listed(some, types), equal(table.key)
                    )
                    cursor = await self._target.execute(remove)
                    more_rows -= cursor.rowcount
                    for out in _selects(table, parts, some, types):
                        n_rows, _ = await pump(
                            reader, self._target, out, into, relation=table.text, on_data=lambda *_: None
                        )
                        more_rows += n_rows
                await copy_parts.bring_forward(
                    self._target, self._schema, self._slot_id, table.oid, lsn=lsn, more_rows=more_rows
                )


class _Collector:
    """Takes pgoutput's messages; keeps keys of changes."""

    def __init__(
        self, tables: Mapping[int, PublishedTable], keys: dict[int, set[Key]], reasons: dict[int, str]
    ) -> None:
        self._tables = tables
        self._keys = keys
        self._reasons = reasons
        self._relations: dict[int, Relation] = {}

    def take(self, data: bytes) -> None:
        message = decode(data)
        match message:
            case RelationMessage():
                self._relations[message.relation.oid] = message.relation
            case Truncate():
                for oid in message.relation_oids:
                    self._refuse(oid, "it was truncated")
            case Insert():
                self._keep(message.relation_oid, message.new)
            case Update():
                self._keep(message.relation_oid, message.new)
                if (old := message.key or message.old) is not None:
                    self._keep(message.relation_oid, old)
            case Delete():
                old = message.key or message.old
                assert old is not None
                self._keep(message.relation_oid, old)
            case _:
                pass

    def _refuse(self, oid: int, reason: str) -> None:
        if oid in self._tables:
            self._reasons[oid] = reason

    def _keep(self, oid: int, row: TupleData) -> None:
        table = self._tables.get(oid)
        if table is None or self._reasons[oid]:
            return
        names = [column.name for column in self._relations[oid].columns]
        key = []
        for column in table.key:
            value = row[names.index(column)] if column in names else None
            if value is None or value.kind is not ColumnKind.TEXT or value.value is None:
                self._refuse(oid, "a change has not its whole key")
                return
            try:
                key.append(value.value.decode())
            except UnicodeDecodeError:
                self._refuse(oid, "a key is no text in UTF-8")
                return
        self._keys[oid].add(tuple(key))
        if len(self._keys[oid]) > _MOST_KEYS:
            self._refuse(oid, f"more than {_MOST_KEYS:,} of its rows have changed since")
            self._keys[oid].clear()


def listed(keys: Sequence[Key], types: Sequence[str]) -> sql.Composed:
    """Return keys as a table expression `k` with the columns k0, k1 and so on."""
    arrays = sql.SQL(", ").join(
        [sql.SQL("{}::text[]").format(sql.Literal(list(column))) for column in zip(*keys, strict=True)]
    )
    raw = sql.SQL(", ").join([sql.Identifier(f"r{number}") for number in range(len(types))])
    cast = sql.SQL(", ").join(
        [
            sql.SQL("{}::{} AS {}").format(sql.Identifier(f"r{number}"), sql.SQL(name), sql.Identifier(f"k{number}"))
            for number, name in enumerate(types)
        ]
    )
    return sql.SQL("(SELECT {} FROM unnest({}) AS u({})) AS k").format(cast, arrays, raw)


def equal(key: Sequence[str]) -> sql.Composed:
    """Return the condition for rows `t` whose key is one of `listed`."""
    return sql.SQL(" AND ").join(
        [
            sql.SQL("t.{} = k.{}").format(sql.Identifier(column), sql.Identifier(f"k{number}"))
            for number, column in enumerate(key)
        ]
    )


def _selects(
    table: PublishedTable, parts: Sequence[CopiedPart], keys: Sequence[Key], types: Sequence[str]
) -> Iterator[sql.Composed]:
    """Yield the statements that read the rows with these keys in the pages of the parts, for each relation."""
    columns = sql.SQL(", ").join([sql.SQL("t.{}").format(sql.Identifier(column)) for column in table.columns])
    for leaf in sorted({(part.leaf_schema, part.leaf_name) for part in parts}):
        pages = [
            Part(schema=leaf[0], name=leaf[1], first_page=part.first_page, end_page=part.end_page)
            for part in _merged([part for part in parts if (part.leaf_schema, part.leaf_name) == leaf])
        ]
        where = sql.SQL(" OR ").join(
            [sql.SQL("({})").format(bounds(one, alias="t")) for one in pages if not one.is_whole]
        )
        within = sql.SQL("true") if any(one.is_whole for one in pages) else sql.SQL("({})").format(where)
        # Each row once, though two of the texts may be one key, as 1.0 and 1.00.
        yield sql.SQL(
            "COPY (SELECT {} FROM ONLY {} AS t WHERE EXISTS (SELECT FROM {} WHERE {}) AND {}) TO STDOUT"
        ).format(columns, sql.Identifier(*leaf), listed(keys, types), equal(table.key), within)


def _merged(parts: Sequence[CopiedPart]) -> Iterator[Part]:
    """Yield ranges of pages that do not touch."""
    first: int | None = None
    end: int | None = None
    for part in sorted(parts, key=lambda one: one.first_page):
        if first is not None and end == part.first_page:
            end = part.end_page
            continue
        if first is not None:
            yield Part(schema="", name="", first_page=first, end_page=end)
        first, end = part.first_page, part.end_page
    if first is not None:
        yield Part(schema="", name="", first_page=first, end_page=end)
