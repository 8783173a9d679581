"""Clients that write to whichever side takes writes, at a rate, and remember what was acknowledged.

Each transaction has a number of its own. It writes that number first into `evt`, which has no key, so that a
transaction that is applied twice stays visible, and last into `ended`: with one of the two only it is torn.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import psycopg

from tests.migration.tables import ACCOUNTS, CUSTOMERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.databases import Database

_CLIENT_NUMBERS = 1_000_000_000
_WAIT_S = 60.0
_RETRY_S = 0.02
#: The transaction did not happen, and may be tried again: clients that meet, and a schema change that goes first.
_AGAIN = (
    psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable, psycopg.errors.FeatureNotSupported,
    psycopg.errors.SerializationFailure,
)  # fmt: skip


class Writer:
    """Some clients; as a context manager it starts and stops them.

    Attributes:
        database: where clients write; another one is found by each client with its next transaction.
        acknowledged: numbers of transactions whose COMMIT was answered.
        unknown: numbers of transactions whose COMMIT may have happened.
        extras: statements with one parameter, the number; each transaction runs one of them. Added to from outside.
    """

    def __init__(self, database: Database, role: str, *, seed: str, per_s: float, clients: int = 2) -> None:
        """Keep the parameters."""
        self.database = database
        self.acknowledged: list[int] = []
        self.unknown: list[int] = []
        self.extras: list[str] = []
        self._role = role
        self._pause_s = clients / per_s
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._is_held = False
        self._between: set[str] = set()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(
                target=self._run, args=(number, random.Random(f"{seed}/{number}")), name=f"client-{number}"
            )
            for number in range(1, clients + 1)
        ]

    def __enter__(self) -> Self:
        """Start the clients."""
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let each client end its transaction."""
        self._stopping.set()
        with self._changed:
            self._is_held = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_WAIT_S)

    def check(self) -> None:
        """Fail if a client met what it must not meet.

        Raises:
            AssertionError: it has.
        """
        assert not self._errors, f"a client failed: {self._errors}"

    def wait_for(self, more: int) -> None:
        """Return when this number of further transactions is acknowledged.

        Raises:
            AssertionError: they were not in time, or a client has failed.
        """
        with self._changed:
            wanted = len(self.acknowledged) + more
            self._changed.wait_for(lambda: self._errors or len(self.acknowledged) >= wanted, _WAIT_S)
            self.check()
            assert len(self.acknowledged) >= wanted, "no write came through"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have no client write inside of the context.

        Raises:
            AssertionError: a client does not end its transaction, or has failed.
        """
        with self._changed:
            self._is_held = True
            is_still = self._changed.wait_for(lambda: self._errors or len(self._between) == len(self._threads), _WAIT_S)
        self.check()
        assert is_still, "a client hangs"
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def _run(self, client: int, chooser: random.Random) -> None:
        try:
            number = client * _CLIENT_NUMBERS
            due_s = time.monotonic()
            while not self._stopping.is_set():
                try:
                    where = self.database
                    with where.connect(user=self._role, application_name="writer", connect_timeout=10) as session:
                        session.execute(b"SET lock_timeout = '20s'")
                        while not self._stopping.is_set() and self.database is where:
                            self._wait_while_held()
                            number += 1
                            self._transaction(session, number, chooser)
                            due_s = max(time.monotonic(), due_s + self._pause_s * chooser.uniform(0.5, 1.5))
                            self._stopping.wait(due_s - time.monotonic())
                except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction):
                    # Fenced, or ended by the fence.
                    self._stopping.wait(_RETRY_S)
        except BaseException as error:  # noqa: BLE001  raised where the run waits
            self._errors.append(error)
            with self._changed:
                self._changed.notify_all()

    def _wait_while_held(self) -> None:
        name = threading.current_thread().name
        with self._changed:
            if self._is_held:
                self._between.add(name)
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_held)
                self._between.discard(name)

    def _transaction(self, session: psycopg.Connection, number: int, chooser: random.Random) -> None:
        action = chooser.choice(_ACTIONS)
        is_committing = False
        try:
            session.execute(b"BEGIN")
            session.execute(b"INSERT INTO evt VALUES (%s, %s)", [number, action.__name__])
            action(session, number, chooser)
            if self.extras and chooser.random() < 0.3:
                session.execute(chooser.choice(self.extras).encode(), [number])
            session.execute(b"INSERT INTO ended (n) VALUES (%s)", [number])
            if chooser.random() < 0.03:
                session.execute(b"ROLLBACK")
                return
            is_committing = True
            session.execute(b"COMMIT")
        except _AGAIN:
            session.execute(b"ROLLBACK")
        except psycopg.OperationalError:
            if is_committing:
                self.unknown.append(number)
            raise
        else:
            with self._changed:
                self.acknowledged.append(number)
                self._changed.notify_all()


def _order(session: psycopg.Connection, number: int, chooser: random.Random) -> None:
    """The items come before their order: their key is checked at the commit."""
    at, region = f"2026-{chooser.randrange(1, 13):02}-11", chooser.choice(["north", "south"])
    (row,) = session.execute(b"""SELECT nextval('"S.p 1"."Order''s number"')""").fetchall()
    for _ in range(chooser.randrange(1, 4)):
        session.execute(
            'INSERT INTO "Gr""öße"."Pöst ""en" ("order", at, region, "Stück") VALUES (%s, %s, %s, %s)'.encode(),
            [*row, at, region, number % 9 + 1],
        )
    session.execute(
        b'INSERT INTO "order" (id, at, region, customer, total) VALUES (%s, %s, %s, %s, %s)',
        [*row, at, region, chooser.randrange(1, CUSTOMERS), number % 100],
    )


def _move(session: psycopg.Connection, _: int, chooser: random.Random) -> None:
    """Move an order to another partition, with its items."""
    found = session.execute(
        b'SELECT id, at FROM "order" WHERE id = %s FOR UPDATE', [chooser.randrange(1, 500)]
    ).fetchone()
    if found:
        values = [f"2026-{chooser.randrange(1, 13):02}-12", chooser.choice(["north", "south"]), found[0]]
        session.execute('UPDATE "Gr""öße"."Pöst ""en" SET at = %s, region = %s WHERE "order" = %s'.encode(), values)
        session.execute(b'UPDATE "order" SET at = %s, region = %s WHERE id = %s', values)


def _customer(session: psycopg.Connection, number: int, chooser: random.Random) -> None:
    key = chooser.randrange(1, CUSTOMERS)
    if chooser.random() < 0.3:
        session.execute(
            b"""INSERT INTO "S.p 1"."Cust%%s;""omer" (code, mood, credit, home) VALUES (%s, 'sad', 1, ROW('x', 1))""",
            [f"n{number}"],
        )
    session.execute(
        b"""UPDATE "S.p 1"."Cust%%s;""omer" SET mood = 'it''s; ok', credit = credit + 1, home."Nr." = %s
             WHERE id = %s""",
        [number % 1000, key],
    )


def _accounts(session: psycopg.Connection, _: int, chooser: random.Random) -> None:
    """Swap two keys, which are checked at the end of the statement, and move money."""
    one, other = sorted(chooser.sample(range(1, ACCOUNTS + 1), 2))
    session.execute(b"SELECT FROM account WHERE id IN (%s, %s) ORDER BY id FOR UPDATE", [one, other])
    session.execute(b"UPDATE account SET id = %s - id WHERE id IN (%s, %s)", [one + other, one, other])
    session.execute(b"UPDATE account SET balance = balance + CASE id WHEN %s THEN 1 ELSE -1 END WHERE id IN (%s, %s)",
                    [one, one, other])  # fmt: skip


def _bookings(session: psycopg.Connection, number: int, chooser: random.Random) -> None:
    session.execute(b"DELETE FROM booking WHERE id = %s", [chooser.randrange(1, 100)])
    session.execute(b"INSERT INTO booking VALUES (%s, int8range(%s, %s))", [number, number * 10, number * 10 + 5])


def _tree(session: psycopg.Connection, number: int, chooser: random.Random) -> None:
    session.execute(b"INSERT INTO tree (up, label) VALUES (%s, %s)", [chooser.randrange(1, 100), f"n{number}"])
    session.execute(b"UPDATE tree SET up = NULL WHERE id = %s", [chooser.randrange(1, 200)])


def _places(session: psycopg.Connection, number: int, chooser: random.Random) -> None:
    key = f"p{chooser.randrange(1, 100)}"
    session.execute(b"DELETE FROM place WHERE k = %s", [key])
    session.execute(b"INSERT INTO place VALUES (%s, %s) ON CONFLICT (k) DO NOTHING", [key, number % 1_000_000])


def _without_key(session: psycopg.Connection, number: int, chooser: random.Random) -> None:
    session.execute(b"""INSERT INTO "no key %%" VALUES (%s, 'same', 'NaN'), (1, 'same', 1)""", [number % 3])
    where = b"""WHERE ctid IN (SELECT ctid FROM "no key %%" WHERE n = %s LIMIT 1)"""
    session.execute(b"""UPDATE "no key %%" SET f = %s """ + where, [number, chooser.randrange(3)])
    session.execute(b"""DELETE FROM "no key %%" """ + where, [chooser.randrange(3)])


def _documents(session: psycopg.Connection, number: int, chooser: random.Random) -> None:
    """A long value that an update leaves as it is, is not sent again."""
    key = chooser.randrange(1, 400)
    session.execute(b"UPDATE document SET payload = jsonb_build_object('n', %s::bigint) WHERE id = %s", [number, key])
    session.execute(b"INSERT INTO document (body, seen) VALUES (repeat(md5(%s::text), 100), now())", [number])


_ACTIONS: tuple[Callable[[psycopg.Connection, int, random.Random], None], ...] = (
    _order, _move, _customer, _accounts, _bookings, _tree, _places, _without_key, _documents,
)  # fmt: skip
