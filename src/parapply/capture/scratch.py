"""A scratch database with the captured tables: made, filled, compared, emptied. It holds nothing else.

Tables are made of facts, never of a statement from a file, and every name is quoted. A column is a text where its type
cannot be made here, and where it is of an extension that the database does not have. Partitions are plain tables,
because the stream names each table that it means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import psycopg
from psycopg import sql

from parapply.capture import folder as folders
from parapply.capture.blocks import BlockKind, CapturedColumn, CapturedTable, CapturedType, Shapes, decode
from parapply.errors import CaptureRefused, TargetRefused
from parapply.printable import printable
from parapply.quoting import identifier, literal, qualified
from parapply.source.slot import source_errors
from parapply.target.session import origins, prepared
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import slots as state
from parapply.target.state.schema import drop_schema, in_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from parapply.capture.blocks import CapturedBlock
    from parapply.source import slot
    from parapply.target.session import settings

#: Schema with the results; it marks a database as scratch.
MARK: Final = "parapply_replay"
_MAKE_MARK: Final = f"""
    CREATE SCHEMA IF NOT EXISTS {MARK};
    CREATE TABLE IF NOT EXISTS {MARK}.runs (
        capture text, settings text, is_done bool NOT NULL, result jsonb NOT NULL, PRIMARY KEY (capture, settings))"""
#: Objects of anyone but the server and its extensions.
_OTHERS: Final = """
    SELECT n.nspname, c.relname FROM pg_catalog.pg_class AS c
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d WHERE d.objid = c.oid AND d.deptype = 'e')
     ORDER BY 1, 2 LIMIT 1"""
_TABLES: Final = """
    SELECT n.nspname, c.relname FROM pg_catalog.pg_class AS c
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', $1) AND c.relkind = 'r'
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d WHERE d.objid = c.oid AND d.deptype = 'e')"""
_TYPES: Final = """
    SELECT n.nspname, t.typname FROM pg_catalog.pg_type AS t
      JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
     WHERE n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', $1) AND t.typtype IN ('e', 'd')
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d WHERE d.objid = t.oid AND d.deptype = 'e')"""
#: Before FROM a table AS t: number and checksum of its rows.
SUM: Final = "SELECT pg_catalog.count(*), COALESCE(pg_catalog.sum(pg_catalog.hashtextextended(t::text, 0)), 0)::text"
#: Methods whose indexes need no operator class to be named.
_METHODS: Final = frozenset({"btree", "hash"})
#: OIDs below are PostgreSQL's own, the same on every server.
_FIRST_OF_USERS: Final = 16384


def shapes_of(folder: Path, places: Sequence[CapturedBlock], *, without: str) -> Shapes:
    """Return the tables of a capture, each with all columns that it had at any time.

    Raises:
        CaptureRefused: a table was renamed, or a column has got another type.
    """
    types: dict[int, CapturedType] = {}
    tables: dict[tuple[str, str], list[CapturedTable]] = {}
    names: dict[int, tuple[str, str]] = {}
    for place in places:
        if place.header.kind is not BlockKind.TABLES:
            continue
        found = decode(place, folders.read(folder, place), Shapes)
        types |= {one.oid: one for one in found.types}
        for table in found.tables:
            name = table.schema, table.name
            if names.setdefault(table.oid, name) != name:
                before = ".".join(names[table.oid])
                raise CaptureRefused(
                    f"table {before} became {table.schema}.{table.name} during the capture",
                    hint="a replay applies no such change: end one capture before it, and begin another one after it",
                )
            if table.schema != without:
                tables.setdefault(name, []).append(table)
    return Shapes(tables=tuple([_joined(versions) for versions in tables.values()]), types=tuple(types.values()))


def _joined(versions: Sequence[CapturedTable]) -> CapturedTable:
    columns: dict[str, CapturedColumn] = {}
    for table in versions:
        for column in table.columns:
            before = columns.get(column.name, column)
            if (before.type_oid, before.modifier) != (column.type_oid, column.modifier):
                raise CaptureRefused(
                    f"{table.schema}.{table.name}: column {column.name!r} got another type in the capture",
                    hint="a replay applies no such change: end one capture before it, and begin another one after it",
                )
            columns[column.name] = column
    first = {column.name for column in versions[0].columns}
    always = [{column.name for column in table.columns if column.is_not_null} for table in versions]
    kept = tuple(
        [
            msgspec.structs.replace(
                column,
                is_not_null=all(column.name in names for names in always),
                missing=None if column.name in first else column.missing,
            )
            for column in columns.values()
        ]
    )
    # A unique index of a later time need not hold before, nor one that was dropped later. The key does if no row had
    # an identity before it: without one the publisher refuses updates and deletes.
    everywhere = set.intersection(*[{index.name for index in table.indexes} for table in versions])
    everywhere |= _later_key(versions)
    indexes = {
        index.name: index
        for table in versions
        for index in table.indexes
        if index.name in everywhere or not index.is_unique
    }
    return msgspec.structs.replace(versions[-1], columns=kept, indexes=tuple(indexes.values()))


def _later_key(versions: Sequence[CapturedTable]) -> set[str]:
    """Return the name of the identity that a table has got, if it had none before: `pgbench -i` makes keys so."""
    keys = [_key_of(table) for table in versions]
    without = next((number for number, key in enumerate(keys) if key), 0)
    is_later = without and all(key == keys[-1] for key in keys[without:])
    return {keys[-1]} if is_later and not any(table.identity == "f" for table in versions[:without]) else set()


def _key_of(table: CapturedTable) -> str:
    is_primary = table.identity == "d"
    return next((one.name for one in table.indexes if (one.is_primary if is_primary else one.is_identity)), "")


def left_out(found: Shapes) -> list[str]:
    """Return lines about the parts that the scratch tables lack."""
    lines = []
    for table in found.tables:
        names = [*table.left_out, *[index.name for index in table.indexes if index.method not in _METHODS]]
        if names:
            lines.append(f"{table.schema}.{table.name}: without {', '.join(sorted(names))}")
    return [printable(line) for line in lines]


class Scratch:
    """The database. Used between two runs only."""

    def __init__(self, conn: settings.Connection, schema: str, found: Shapes) -> None:
        self._conn = conn
        self._schema = schema
        self._found = found
        self._types = {one.oid: one for one in found.types}
        #: By OID and modifier.
        self._type_names: dict[tuple[int, int], str] = {}
        #: Schema and name of each table.
        self.tables = [(table.schema, table.name) for table in found.tables]

    async def mark(self) -> None:
        """Make sure that nothing of anyone else is in the database; raise TargetRefused if something is."""
        with target_errors("looking into the scratch database"):
            is_marked = await rows(
                self._conn, sql.SQL("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1"), [MARK]
            )
            others = [] if is_marked else await rows(self._conn, sql.SQL(_OTHERS))
            if others:
                raise TargetRefused(
                    f"target: the database is not empty, it has {'.'.join(others[0])}",
                    hint="name an empty database: a replay makes, empties and drops tables in it",
                )
            await self._conn.execute(_MAKE_MARK.encode())

    async def empty(self) -> None:
        """Drop all that replays have made, of this capture and of others, but for their results."""
        conn, schema = self._conn, self._schema
        if await state.has_schema(conn, schema):
            with target_errors("reading the state"):
                slots = await rows(conn, in_schema("SELECT slot_id FROM {s}.slots", schema))
            for (slot_id,) in slots:
                await prepared.roll_back(
                    conn, [gid for gid, _ in (await prepared.pending(conn, schema, slot_id)).values()]
                )
                await state.drop_slot_state(conn, schema, slot_id)
                await origins.drop_origins(conn, slot_id)
            await drop_schema(conn, schema)
        with target_errors("emptying the scratch database"):
            for schema_name, name in await rows(conn, sql.SQL(_TABLES), [MARK]):
                await conn.execute(f"DROP TABLE {qualified(schema_name, name)} CASCADE".encode())
            for schema_name, name in await rows(conn, sql.SQL(_TYPES), [MARK]):
                await conn.execute(f"DROP TYPE IF EXISTS {qualified(schema_name, name)} CASCADE".encode())

    async def make(self) -> None:
        """Make types, tables and indexes."""
        with target_errors("making the scratch tables"):
            schemas = {table.schema for table in self._found.tables} | {one.schema for one in self._own_types()}
            for schema in sorted(schemas):
                await self._conn.execute(f"CREATE SCHEMA IF NOT EXISTS {identifier(schema)}".encode())
            for one in self._own_types():
                await self._conn.execute((await self._type(one)).encode())
            for table in self._found.tables:
                await self._conn.execute("; ".join(await self._table(table)).encode())

    def _own_types(self) -> list[CapturedType]:
        """Return enums and domains of users, a domain after its base."""
        users = [one for one in self._types.values() if one.oid >= _FIRST_OF_USERS and not one.extension]
        domains = [one for one in users if one.kind == "d"]
        return [one for one in users if one.kind == "e"] + sorted(domains, key=self._depth)

    def _depth(self, one: CapturedType | None) -> int:
        depth, seen = 0, set()
        while one is not None and one.kind == "d" and one.oid not in seen:
            seen.add(one.oid)
            depth, one = depth + 1, self._types.get(one.base)
        return depth

    async def _type(self, one: CapturedType) -> str:
        name = qualified(one.schema, one.name)
        if one.kind == "e":
            return f"CREATE TYPE {name} AS ENUM ({', '.join(map(literal, one.labels))})"
        return f"CREATE DOMAIN {name} AS {await self._type_name(one.base, one.base_modifier)}"

    async def _type_name(self, oid: int, modifier: int) -> str:
        """Return a type as this server writes it; a text for one that it does not have."""
        if (oid, modifier) in self._type_names:
            return self._type_names[oid, modifier]
        one = self._types.get(oid)
        found = None
        if one is not None:
            query = sql.SQL("SELECT pg_catalog.format_type(pg_catalog.to_regtype($1), $2::int)")
            ((found,),) = await rows(self._conn, query, [qualified(one.schema, one.name), modifier])
        self._type_names[oid, modifier] = str(found) if found and found != "???" else "pg_catalog.text"
        return self._type_names[oid, modifier]

    async def _table(self, table: CapturedTable) -> list[str]:
        name = qualified(table.schema, table.name)
        columns = []
        for column in table.columns:
            text = f"{identifier(column.name)} {await self._type_name(column.type_oid, column.modifier)}"
            text += f" DEFAULT {literal(column.missing)}" if column.missing is not None else ""
            columns.append(text + (" NOT NULL" if column.is_not_null else ""))
        return [f"CREATE TABLE {name} ({', '.join(columns)})", *_indexes(table, name)]

    async def copy_from(self, source: slot.Connection) -> int:
        """Copy the rows of another database, all as of one moment; return their number.

        Raises:
            SourceRefused, SourceLost: they cannot be read; the message says target where it is the target's fault.
        """
        n_rows = 0
        with source_errors("reading the rows of before"):
            await source.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            for table in self._found.tables:
                names = await self._columns_there(source, table)
                if not names:
                    continue
                listed = ", ".join(map(identifier, names))
                name = qualified(table.schema, table.name)
                async with source.cursor() as out, self._conn.cursor() as into:
                    reading = f"COPY (SELECT {listed} FROM {name}) TO STDOUT".encode()  # noqa: S608  quoted names
                    writing = f"COPY {name} ({listed}) FROM STDIN".encode()
                    async with out.copy(reading) as given:
                        with target_errors("copying the rows of before"):
                            async with into.copy(writing) as taken:
                                async for part in given:
                                    await taken.write(part)
                    n_rows += max(0, into.rowcount)
            await source.execute(b"COMMIT")
        return n_rows

    async def _columns_there(self, source: slot.Connection, table: CapturedTable) -> list[str]:
        query = (
            "SELECT a.attname FROM pg_catalog.pg_attribute AS a WHERE a.attnum > 0 AND NOT a.attisdropped"
            " AND a.attrelid = pg_catalog.to_regclass($1)"
        )
        async with psycopg.AsyncRawCursor(source) as cursor:
            await cursor.execute(query, [qualified(table.schema, table.name)])
            there = {str(name) for (name,) in await cursor.fetchall()}
        return [column.name for column in table.columns if column.name in there]

    async def sums(self) -> dict[str, tuple[int, str]]:
        """Return number and checksum of each table's rows, by ``schema.name``."""
        found = {}
        with target_errors("comparing the tables"):
            for table in self._found.tables:
                name = qualified(table.schema, table.name)
                cursor = await self._conn.execute(f"{SUM} FROM {name} AS t".encode())
                row = await cursor.fetchone()
                assert row is not None, "an aggregate has a row"
                found[f"{table.schema}.{table.name}"] = (int(row[0]), str(row[1]))
        return found


def _indexes(table: CapturedTable, name: str) -> Iterator[str]:
    for index in table.indexes:
        if index.method not in _METHODS:
            continue
        keys = ", ".join(map(identifier, index.columns[: index.n_keys]))
        more = ", ".join(map(identifier, index.columns[index.n_keys :]))
        behind = f" INCLUDE ({more})" if more else ""
        behind += " NULLS NOT DISTINCT" if index.nulls_not_distinct and not index.is_primary else ""
        if index.is_primary:
            yield f"ALTER TABLE {name} ADD CONSTRAINT {identifier(index.name)} PRIMARY KEY ({keys}){behind}"
        else:
            unique = "UNIQUE " if index.is_unique else ""
            yield f"CREATE {unique}INDEX {identifier(index.name)} ON {name} USING {index.method} ({keys}){behind}"
