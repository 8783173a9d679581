"""Random transactions on random tables, from several sessions whose statements interleave.

In go tables and a seed; out come committed transactions in an order that the seed also decides: one thread runs the
statements of all sessions, so one that would wait for a lock waits in vain and is refused. A refusal that a real
application meets (duplicate key, lock not available) rolls the transaction back, and the stream goes on.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import psycopg

from tests.differential.statements import bulk_statement, come_and_go, operations_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.differential.tables import RandomTable
    from tests.fixtures.databases import Database

# An application lives with these: unique_violation, exclusion_violation, foreign_key_violation, not_null_violation (a
# key that a row of NULLs takes), object_in_use (TRUNCATE while deferred checks are pending), lock_not_available,
# serialization_failure (a row that moved to another partition).
_REFUSALS = frozenset({"23505", "23P01", "23503", "23502", "55006", "55P03", "40001"})
# The holder of a lock cannot go on while another session waits: every wait is in vain, so it is short. Far less than
# deadlock_timeout, so that no session becomes the victim of another.
_SESSION = "SET lock_timeout = '8ms'; SET client_min_messages = 'error'"
_SESSIONS = 4
# How often a session goes on with its next statement before another one has its turn.
_STAYS = 0.6
# Few enough that tables have rows most of the time.
_TRUNCATE_SHARE = 0.012
_PREPARED_SHARE = 0.15
# Of a large one that is rolled back in the end the publisher may send a part of the changes.
_LARGE_PREPARED_SHARE = 0.6
_PENDING = 3
# Of large ones: with rows that come and go in them. Of what is prepared and rolled back a publisher may send less.
_COME_AND_GO_SHARE = 0.6
#: One in this number of transactions is large, and the first one is.
_LARGE_EVERY = 40


@dataclass(kw_only=True)
class Counts:
    """Numbers of transactions by their outcome."""

    committed: int = 0
    refused: int = 0
    prepared: int = 0


@dataclass(kw_only=True)
class _Session:
    """A connection and what is left of its transaction."""

    connection: psycopg.Connection
    statements: list[str] = field(default_factory=list)
    gid: str = ""


class RandomStream:
    """Sessions on a publisher; as a context manager it connects them, and closes them in the end.

    Attributes:
        counts: of the transactions so far.
    """

    def __init__(self, source: Database, tables: Sequence[RandomTable], *, seed: int, is_two_phase: bool) -> None:
        """Connect nothing yet.

        Args:
            source: database of the publisher, with the tables.
            tables: what to write to.
            seed: of the random choices.
            is_two_phase: prepare some of the transactions.
        """
        self.counts = Counts()
        self._source = source
        self._tables = tables
        self._chooser = random.Random(f"stream {seed}")
        self._is_two_phase = is_two_phase
        self._number = 0
        self._pending: list[str] = []
        self._stack = ExitStack()
        self._sessions: list[_Session] = []

    def __enter__(self) -> Self:
        """Connect the sessions."""
        with self._stack:
            for _ in range(_SESSIONS):
                connection = self._stack.enter_context(self._source.connect())
                connection.execute(_SESSION)
                self._sessions.append(_Session(connection=connection))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the sessions."""
        self._stack.close()

    def run(self, transactions: int, between: Callable[[], None] = lambda: None) -> None:
        """Begin a number of transactions and end all, also the prepared ones.

        Args:
            transactions: how many.
            between: called after each one.

        Raises:
            psycopg.Error: the publisher refused what no application should meet; with the statement.
        """
        session = self._sessions[0]
        last = self._number + transactions
        while self._number < last or any(one.statements for one in self._sessions):
            if self._chooser.random() > _STAYS or not session.statements:
                session = self._chooser.choice(self._sessions)
            if not session.statements:
                if self._number == last:
                    continue
                between()
                self._begin(session)
            self._step(session)
        while self._pending:
            self._decide()

    def _begin(self, session: _Session) -> None:
        if self._pending and self._chooser.random() < 2 * _PREPARED_SHARE:
            self._decide()
        is_large = not self._number % _LARGE_EVERY
        share = _LARGE_PREPARED_SHARE if is_large else _PREPARED_SHARE
        is_prepared = self._is_two_phase and self._chooser.random() < share
        # Of twins the built-in subscription may choose one that a prepared transaction holds, and waits for ever.
        tables = [table for table in self._tables if table.key or not table.can_update or not is_prepared]
        text = (_large if is_large else _transaction)(tables, self._chooser)
        self._number += 1
        session.gid = ""
        if is_prepared and text[-1] == "COMMIT" and len(self._pending) < _PENDING:
            session.gid = f"gid {self._number}"
            text[-1] = f"PREPARE TRANSACTION '{session.gid}'"
        session.statements = text

    def _step(self, session: _Session) -> None:
        text = session.statements.pop(0)
        try:
            session.connection.execute(text.encode())
        except psycopg.Error as error:
            if error.sqlstate not in _REFUSALS:
                error.add_note(text)
                raise
            session.connection.execute("ROLLBACK")
            session.statements = []
            self.counts.refused += 1
            return
        if session.statements:
            return
        if session.gid:
            self._pending.append(session.gid)
            self.counts.prepared += 1
        elif text == "COMMIT":
            self.counts.committed += 1

    def _decide(self) -> None:
        gid = self._pending.pop(self._chooser.randrange(len(self._pending)))
        what = self._chooser.choice(("COMMIT", "COMMIT", "ROLLBACK"))
        self._source.execute(f"{what} PREPARED '{gid}'")


def _transaction(tables: Sequence[RandomTable], chooser: random.Random) -> list[str]:
    """Return the statements of one transaction: on several tables, some undone by a savepoint."""
    statements = ["BEGIN"]
    for _ in range(chooser.choice((1, 1, 2, 3, 5))):
        statement = _statement(chooser.choice(tables), chooser)
        if chooser.random() < 0.15:
            ending = chooser.choice(("ROLLBACK TO SAVEPOINT s", "RELEASE SAVEPOINT s"))
            statements += ["SAVEPOINT s", statement, ending]
        else:
            statements.append(statement)
    statements.append("ROLLBACK" if chooser.random() < 0.05 else "COMMIT")
    return statements


def _large(tables: Sequence[RandomTable], chooser: random.Random) -> list[str]:
    """Return a transaction that the publisher may stream, with subtransactions inside each other.

    The part that is rolled back was streamed before.
    """
    bulk = next(table for table in tables if table.name == "bulk")

    def some() -> list[str]:
        rows = [bulk_statement(bulk, chooser) for _ in range(chooser.choice((1, 1, 2)))]
        # Not TRUNCATE: what comes into a truncated table and is rolled back PostgreSQL cannot always stream.
        small = [_row_statement(chooser.choice(tables), chooser) for _ in range(chooser.choice((0, 1, 2)))]
        return chooser.sample([*rows, *small], len(rows) + len(small))

    statements = ["BEGIN", *some(), "SAVEPOINT a", *some()]
    if chooser.random() < _COME_AND_GO_SHARE:
        statements += come_and_go(bulk, chooser)
    for _ in range(chooser.choice((0, 1, 2))):
        ending = chooser.choice(("ROLLBACK TO SAVEPOINT b", "RELEASE SAVEPOINT b"))
        statements += ["SAVEPOINT b", *some(), ending]
    statements += [chooser.choice(("ROLLBACK TO SAVEPOINT a", "RELEASE SAVEPOINT a")), *some()]
    statements.append("ROLLBACK" if chooser.random() < 0.1 else "COMMIT")
    return statements


def _statement(table: RandomTable, chooser: random.Random) -> str:
    if chooser.random() < _TRUNCATE_SHARE:
        return f"TRUNCATE {table.name} CASCADE"
    return _row_statement(table, chooser)


def _row_statement(table: RandomTable, chooser: random.Random) -> str:
    return chooser.choice(operations_of(table))(table, chooser)
