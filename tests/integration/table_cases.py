"""A target session as a worker has it, and published relations made from the target's own tables."""

from __future__ import annotations

import asyncio
import struct
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg import pq

from parapply.model import Column, Relation
from parapply.target.catalogue.facts import load_facts
from parapply.target.catalogue.match import match
from parapply.target.session import settings
from parapply.target.sql.statements import Statements
from parapply.wire.rows import NULL, columns_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.plan.table import TableFacts
    from parapply.target.sql.statements import Sql
    from tests.fixtures.databases import Database

#: A type compared without regard to case by operators outside pg_catalog, like citext, which not every server has.
CASELESS_TYPE = """
CREATE SCHEMA ext;
CREATE TYPE ext.ci;
CREATE FUNCTION ext.ci_in(cstring) RETURNS ext.ci LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION ext.ci_out(ext.ci) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE TYPE ext.ci (INPUT = ext.ci_in, OUTPUT = ext.ci_out, LIKE = pg_catalog.text, COLLATABLE = true);
CREATE CAST (ext.ci AS text) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (text AS ext.ci) WITHOUT FUNCTION AS ASSIGNMENT;
CREATE FUNCTION ext.cmp(a ext.ci, b ext.ci) RETURNS int4 LANGUAGE sql IMMUTABLE STRICT
  AS 'SELECT pg_catalog.bttextcmp(pg_catalog.lower(a::text), pg_catalog.lower(b::text))';
CREATE FUNCTION ext.eq(a ext.ci, b ext.ci) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT ext.cmp(a, b) = 0';
CREATE FUNCTION ext.lt(a ext.ci, b ext.ci) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT ext.cmp(a, b) < 0';
CREATE FUNCTION ext.gt(a ext.ci, b ext.ci) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT ext.cmp(a, b) > 0';
CREATE FUNCTION ext.le(a ext.ci, b ext.ci) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT ext.cmp(a, b) <= 0';
CREATE FUNCTION ext.ge(a ext.ci, b ext.ci) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT ext.cmp(a, b) >= 0';
CREATE OPERATOR ext.= (FUNCTION = ext.eq, LEFTARG = ext.ci, RIGHTARG = ext.ci, MERGES);
CREATE OPERATOR ext.< (FUNCTION = ext.lt, LEFTARG = ext.ci, RIGHTARG = ext.ci);
CREATE OPERATOR ext.> (FUNCTION = ext.gt, LEFTARG = ext.ci, RIGHTARG = ext.ci);
CREATE OPERATOR ext.<= (FUNCTION = ext.le, LEFTARG = ext.ci, RIGHTARG = ext.ci);
CREATE OPERATOR ext.>= (FUNCTION = ext.ge, LEFTARG = ext.ci, RIGHTARG = ext.ci);
CREATE OPERATOR CLASS ext.ci_ops DEFAULT FOR TYPE ext.ci USING btree AS
  OPERATOR 1 ext.<, OPERATOR 2 ext.<=, OPERATOR 3 ext.=, OPERATOR 4 ext.>=, OPERATOR 5 ext.>,
  FUNCTION 1 ext.cmp(ext.ci, ext.ci);
"""


class Refused(Exception):
    """The server refused a statement; `sqlstate` says how."""

    def __init__(self, result: pq.abc.PGresult) -> None:
        """Keep the message and the state."""
        super().__init__(result.error_message.decode())
        self.sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()


class Worker:
    """A worker's session: its settings, and statements sent the way the daemon sends them."""

    def __init__(self, connection: psycopg.Connection, owner: psycopg.Connection, dsn: str) -> None:
        """Keep two open connections in autocommit mode whose settings are pinned.

        Args:
            connection: as the daemon's.
            owner: of a user with the usual search_path, who defines tables and looks at them.
            dsn: of the database.
        """
        self._connection = connection
        self._owner = owner
        self.dsn = dsn
        self._prepared: set[bytes] = set()
        # A session that was just opened knows nothing of the catalogue, which is most of what its first query costs.
        self._looking = asyncio.Runner()
        self._looker: psycopg.AsyncConnection | None = None

    def facts(self, name: str, schema: str = "public", *, role: str = "replica") -> TableFacts:
        """Read a table that must exist."""

        async def load() -> TableFacts | None:
            if self._looker is None:
                self._looker = await reading(self.dsn)
            return await load_facts(self._looker, schema, name, role=role)

        facts = self._looking.run(load())
        assert facts is not None
        return facts

    def close(self) -> None:
        """Close what `facts` has opened."""
        if self._looker is not None:
            self._looking.run(self._looker.close())
        self._looking.close()

    def statements(
        self, name: str, schema: str = "public", *, identity: str = "d", binary_types: frozenset[int] = frozenset()
    ) -> Statements:
        """Return the statements for a relation that looks like the target table itself."""
        facts = self.facts(name, schema)
        return Statements(match(relation_of(facts, identity=identity), facts), binary_types)

    def run(
        self,
        statement: Sql,
        *rows: Sequence[str | None],
        count: int | None = None,
        ranges: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Execute a statement; return the number of rows found.

        Args:
            statement: to execute.
            rows: for a set form any number of rows, one value per position; for a row form at most one, whose values
                are the values of all parameters.
            count: last parameter of a statement that counts what it finds.
            ranges: for each row, which of the rows equal to it are meant, for a form that takes whole rows.

        Raises:
            Refused: the server's error.
        """
        pg = self._connection.pgconn
        if not statement.name or statement.name not in self._prepared:
            _checked(pg.prepare(statement.name, statement.text))
            self._prepared.add(statement.name)
        if statement.is_set:
            parameters = columns_of(
                [[_wire(value) for value in row] for row in rows],
                tuple(range(len(statement.type_oids))),
                statement.type_oids,
                len(statement.type_oids),
            )
            assert None not in parameters
            parameters += [_int4_array(numbers) for numbers in zip(*ranges, strict=True)]
            if count is not None:
                parameters.append(struct.pack(">q", count))
        else:
            (row,) = rows or ((),)
            parameters = [None if value is None else value.encode() for value in row]
        assert len(parameters) == statement.n_parameters
        formats = [pq.Format.BINARY if statement.is_set else pq.Format.TEXT] * len(parameters)
        result = _checked(pg.exec_prepared(statement.name, parameters, formats))  # type: ignore[arg-type] # NULL is allowed
        return int((result.command_status or b"").split()[-1])

    def plan_of(self, statement: Sql) -> str:
        """Return the server's generic plan of a statement."""
        self.control(f"PREPARE explained AS {statement.text.decode()}")
        # Parentheses without parameters are a syntax error.
        nulls = f"({', '.join(['NULL'] * statement.n_parameters)})" if statement.n_parameters else ""
        lines = _texts(_checked(self._connection.pgconn.exec_(f"EXPLAIN EXECUTE explained{nulls}".encode())))
        self.control("DEALLOCATE explained")
        return "\n".join(line for (line,) in lines if line)

    def control(self, text: str) -> None:
        """Run SQL on the worker's session."""
        _checked(self._connection.pgconn.exec_(text.encode()))

    def run_text(self, text: str) -> None:
        """Run SQL on the owner's session."""
        _checked(self._owner.pgconn.exec_(text.encode()))

    def rows(self, text: str) -> list[tuple[str | None, ...]]:
        """Return rows as the owner sees them, in text format as a publisher would print them."""
        return _texts(_checked(self._owner.pgconn.exec_(text.encode())))


async def reading(dsn: str) -> psycopg.AsyncConnection:
    """Open a session as the daemon reads the catalogue in; without its settings some servers compile each query."""
    connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    await connection.execute(settings.pinning("control", connection.info.server_version, "replica", "off").encode())
    return connection


@contextmanager
def worker_on(database: Database) -> Iterator[Worker]:
    """Open a worker's session, and one of a table's owner."""
    with database.connect() as connection, database.connect() as owner:
        for session in (connection, owner):
            session.execute(settings.pinning("worker", session.info.server_version, "replica", "off").encode())
        owner.execute("SET search_path = public; SET session_replication_role = origin")
        with closing(Worker(connection, owner, database.dsn)) as worker:
            yield worker


def relation_of(facts: TableFacts, *, identity: str = "d", keys: Sequence[str] | None = None) -> Relation:
    """Return a relation with the columns of a target table, generated ones left out, as a publisher announces it.

    Args:
        facts: of the table.
        identity: the publisher's replica identity; 'f' flags every column as part of it.
        keys: names of the publisher's key columns; the target's when not given.
    """
    key_names = facts.key_columns if keys is None else keys
    columns = tuple(
        Column(
            name=column.name,
            type_oid=column.type_oid,
            type_modifier=column.type_modifier,
            is_key=identity == "f" or column.name in key_names,
        )
        for column in facts.columns
        if not column.is_generated
    )
    return Relation(oid=1, schema=facts.schema, name=facts.name, replica_identity=identity, columns=columns)


def _int4_array(numbers: Sequence[int]) -> bytes:
    elements = b"".join([struct.pack(">ii", 4, number) for number in numbers])
    return struct.pack(">iiIii", 1, 0, 23, len(numbers), 1) + elements


def _wire(value: str | None) -> bytes:
    """Return a value as it travels."""
    return NULL if value is None else struct.pack(">i", len(encoded := value.encode())) + encoded


def _texts(result: pq.abc.PGresult) -> list[tuple[str | None, ...]]:
    values = [[result.get_value(row, field) for field in range(result.nfields)] for row in range(result.ntuples)]
    return [tuple(None if value is None else value.decode() for value in row) for row in values]


def _checked(result: pq.abc.PGresult) -> pq.abc.PGresult:
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise Refused(result)
    return result
