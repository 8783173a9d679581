"""Load beside the bank: large, rolled back and prepared transactions, moving keys, unique values, markers, DDL.

In go two databases; out come committed transactions on the source. Every text that is written holds `SECRET`, which no
log may show. A marker is a transaction that holds the tables still and writes down a checksum of them: a trigger on the
target computes the same when it is applied, so every marker compares both sides at one LSN, under load (oracle O5).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Self

import psycopg
from psycopg import sql

from tests.fixtures.streams import stream_everything
from tests.fixtures.workloads import create_bank

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.databases import Database

#: In every text; no line of a log may hold it.
SECRET = "geheim"
#: Published, and compared at the end and by every marker.
TABLES = ("acct", "xfer", "evt", "bulk", "bulk_txn", "kv", "uq", "single")
_UNIQUE_ROWS = 20
_KEYS = 200
_RECOVER_TIMEOUT_S = 120.0
_POLL_S = 0.05
# A session that waits longer for a lock gives up and does something else: a fault may hold that lock.
_LOCK_TIMEOUT = "SET lock_timeout = '5s'; SET statement_timeout = '60s'"

_SIDE_TABLES = f"""
CREATE TABLE bulk (txid bigint NOT NULL, n int NOT NULL, v text NOT NULL);
CREATE TABLE bulk_txn (txid bigint PRIMARY KEY, n_rows int NOT NULL);
CREATE TABLE single (txid bigint NOT NULL, n int NOT NULL);
CREATE TABLE kv (k int PRIMARY KEY, v int NOT NULL, log text NOT NULL);
ALTER TABLE kv ALTER COLUMN log SET STORAGE EXTERNAL;
CREATE TABLE uq (id int PRIMARY KEY, email text UNIQUE, v int NOT NULL);
INSERT INTO uq SELECT g, 'mail' || g, 0 FROM generate_series(1, {_UNIQUE_ROWS}) AS g;
CREATE TABLE marker (n bigint PRIMARY KEY, h text NOT NULL);
-- VOLATILE, so that each query has a snapshot of its own, taken behind the lock: a table that was rewritten while an
-- older one waited for it is empty for that one (PostgreSQL manual, "Caveats" of "Concurrency Control").
CREATE FUNCTION h() RETURNS text LANGUAGE plpgsql VOLATILE
SET timezone = 'UTC' SET datestyle = 'ISO' SET extra_float_digits = 1 AS $$
DECLARE name text; one text; every text := '';
BEGIN
  FOREACH name IN ARRAY ARRAY['acct', 'xfer', 'evt', 'bulk', 'bulk_txn', 'kv', 'uq', 'single'] LOOP
    -- kv gets columns now and then, on the target first, and some tables have one more there: those do not count.
    EXECUTE format('SELECT concat(count(*), '':'', sum(hashtextextended(%s::text, 0)::numeric)) FROM public.%I AS t',
      CASE name WHEN 'kv' THEN 'ROW(t.k, t.v, t.log)' WHEN 'xfer' THEN 'ROW(t.id, t.src, t.dst, t.amt)'
        WHEN 'evt' THEN 'ROW(t.txid, t.n)' WHEN 'bulk' THEN 'ROW(t.txid, t.n, t.v)'
        WHEN 'bulk_txn' THEN 'ROW(t.txid, t.n_rows)' ELSE 't' END, name) INTO one;
    every := every || name || '=' || one || ' ';
  END LOOP;
  RETURN every;
END $$;
"""
# Not xmin: rows that are written behind a savepoint carry the number of a subtransaction there.
_TARGET_ONLY = """
ALTER TABLE xfer ADD COLUMN target_xid xid8 NOT NULL DEFAULT pg_current_xact_id();
ALTER TABLE evt ADD COLUMN target_xid xid8 NOT NULL DEFAULT pg_current_xact_id();
ALTER TABLE bulk ADD COLUMN target_xid xid8 NOT NULL DEFAULT pg_current_xact_id();
ALTER TABLE bulk_txn ADD COLUMN target_xid xid8 NOT NULL DEFAULT pg_current_xact_id();
CREATE TABLE marker_seen (n bigint NOT NULL, is_ok boolean NOT NULL, here text NOT NULL, there text NOT NULL);
CREATE FUNCTION see_marker() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE here text := public.h();
BEGIN
  INSERT INTO public.marker_seen VALUES (NEW.n, here = NEW.h, here, NEW.h);
  RETURN NULL;
END $$;
CREATE TRIGGER see_marker AFTER INSERT ON marker FOR EACH ROW EXECUTE FUNCTION see_marker();
ALTER TABLE marker ENABLE ALWAYS TRIGGER see_marker;
"""
# The campaign marks beside the load: SHARE alone would let both take the same number.
_MARK = (
    f"BEGIN; LOCK TABLE marker IN EXCLUSIVE MODE; LOCK TABLE {', '.join(TABLES)} IN SHARE MODE; "
    "INSERT INTO marker SELECT coalesce(max(n), 0) + 1, h() FROM marker; COMMIT"
)
#: Each returns no row when all is well; both sides alike.
SIDE_RULES = {
    "O2: a large or prepared transaction is present twice or in part": """
        SELECT coalesce(b.txid, t.txid), b.n, t.n_rows FROM bulk_txn AS t
        FULL JOIN (SELECT txid, count(*) AS n FROM bulk GROUP BY txid) AS b USING (txid)
        WHERE b.n IS DISTINCT FROM t.n_rows""",
}


def create_tables(source: Database, target: Database) -> None:
    """Make all tables on both sides with equal rows, the publication `pub`, and what makes the publisher stream."""
    create_bank(source, target)
    for database in (source, target):
        database.execute(_SIDE_TABLES)
    target.execute(_TARGET_ONLY)
    source.execute("CREATE TABLE unpublished (n int, v text)")
    source.execute("ALTER PUBLICATION pub ADD TABLE bulk, bulk_txn, kv, uq, single, marker")
    stream_everything(source)


def mark(source: Database) -> None:
    """Commit a marker.

    Raises:
        psycopg.Error: the publisher is gone, or another session holds the tables for longer than a minute.
    """
    with source.connect() as connection:
        connection.execute(b"SET lock_timeout = '60s'")
        connection.execute(_MARK.encode())


def large(connection: psycopg.Connection, chooser: random.Random, n_rows: int) -> None:
    """Write the rows of one large transaction: subtransactions, one of them rolled back; does not end it."""
    txid = chooser.getrandbits(60)
    series = "INSERT INTO bulk SELECT {}, g, repeat('" + SECRET + "', 30) FROM generate_series({}, {}) AS g"
    half = n_rows // 2
    for statement in (
        series.format(txid, 1, half),
        "SAVEPOINT undone",
        series.format(txid, 1, half),
        "ROLLBACK TO SAVEPOINT undone",
        "SAVEPOINT kept",
        series.format(txid, half + 1, n_rows),
        "RELEASE SAVEPOINT kept",
        f"INSERT INTO bulk_txn VALUES ({txid}, {n_rows})",
    ):
        connection.execute(statement.encode())


class SideLoad:
    """Two clients beside the bank's; as a context manager it starts and stops them.

    Attributes:
        committed: transactions that were acknowledged, markers too. Written by the clients, read by the campaign.
    """

    def __init__(self, source: Database, target: Database, *, seed: str, is_two_phase: bool, pace_s: float) -> None:
        """Keep the parameters.

        Args:
            source: database of the publisher, with the tables.
            target: database of the subscriber; only for DDL, which replication does not bring.
            seed: of the random choices.
            is_two_phase: prepare transactions now and then.
            pace_s: pause after each transaction.
        """
        self.committed = 0
        self._source = source
        self._target = target
        self._pace_s = pace_s
        self._n_columns = 0
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []
        works: list[tuple[str, list[Callable[[psycopg.Connection, random.Random], None]]]] = [
            ("churn", [self._large, self._keys, self._keys, self._keys, self._swap, self._swap, self._alter]),
            ("marks", [self._mark, self._mark, *([self._prepared] * 2 if is_two_phase else [])]),
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(actions, random.Random(f"{seed}/{name}")), name=name, daemon=True)
            for name, actions in works
        ]

    def __enter__(self) -> Self:
        """Start the clients."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the clients."""
        self.stop()

    def stop(self) -> None:
        """Let each client end what it is doing.

        Raises:
            AssertionError: a client met what it must not meet.
        """
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * _RECOVER_TIMEOUT_S)
        assert not self._errors, f"a client failed: {self._errors}"
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def _run(self, actions: list[Callable[[psycopg.Connection, random.Random], None]], chooser: random.Random) -> None:
        try:
            connection = self._connect()
            while not self._stopping.wait(self._pace_s * chooser.uniform(0.5, 1.5)):
                try:
                    chooser.choice(actions)(connection, chooser)
                    self.committed += 1
                except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected):
                    connection.rollback()
                except psycopg.OperationalError:
                    connection.close()
                    connection = self._connect()
            connection.close()
        except BaseException as error:  # noqa: BLE001  a thread's error is raised where the campaign waits
            self._errors.append(error)

    def _connect(self) -> psycopg.Connection:
        """Return a connection as soon as the publisher gives one, and end what the last one left prepared."""
        deadline_s = time.monotonic() + _RECOVER_TIMEOUT_S
        while True:
            connection = None
            try:
                connection = self._source.connect(connect_timeout=5)
                connection.execute(_LOCK_TIMEOUT.encode())
                if threading.current_thread().name == "marks":
                    self._end_prepared(connection)
            except psycopg.OperationalError:
                if connection is not None:
                    connection.close()
                if time.monotonic() > deadline_s:
                    raise
                threading.Event().wait(_POLL_S)
            else:
                return connection

    def _end_prepared(self, connection: psycopg.Connection) -> None:
        query = b"SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE 'side%'"
        for (gid,) in connection.execute(query).fetchall():
            connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)))

    def _large(self, connection: psycopg.Connection, chooser: random.Random) -> None:
        with connection.transaction(force_rollback=chooser.random() < 0.2):
            large(connection, chooser, chooser.randrange(400, 2000))

    def _keys(self, connection: psycopg.Connection, chooser: random.Random) -> None:
        """Insert, update, delete and move rows by key; the long text is unchanged by most updates (TOAST)."""
        key, other = chooser.randrange(_KEYS), chooser.randrange(_KEYS)
        text = f"repeat('{SECRET}', 500)"
        moved = key + _KEYS
        statements = chooser.sample(
            [
                f"INSERT INTO kv (k, v, log) VALUES ({key}, 0, {text}) ON CONFLICT (k) DO UPDATE SET log = {text}",
                f"UPDATE kv SET v = v + 1 WHERE k = {other}",
                f"DELETE FROM kv WHERE k = {other}",
                f"UPDATE kv SET k = {moved} WHERE k = {key} AND NOT EXISTS (SELECT FROM kv WHERE k = {moved})",
                f"DELETE FROM kv WHERE k = {moved}",
            ],
            3,
        )
        connection.execute("; ".join(["BEGIN", *statements, "COMMIT"]).encode())

    def _swap(self, connection: psycopg.Connection, chooser: random.Random) -> None:
        """Pass a unique value from row to row, in two transactions and in one: what it frees is not on the wire."""
        one, other = chooser.sample(range(1, _UNIQUE_ROWS + 1), 2)
        value = f"mail{chooser.randrange(1, 2 * _UNIQUE_ROWS)}"
        free = f"UPDATE uq SET email = NULL, v = v + 1 WHERE email = '{value}' OR id = {one}"
        take = f"UPDATE uq SET email = '{value}' WHERE id = {other}"
        between = "COMMIT; BEGIN" if chooser.random() < 0.5 else "SELECT 1"
        with contextlib.suppress(psycopg.errors.UniqueViolation):
            connection.execute(f"BEGIN; {free}; {between}; {take}; COMMIT".encode())
            return
        connection.rollback()

    def _alter(self, connection: psycopg.Connection, chooser: random.Random) -> None:
        """Add a column, on the target first, as operators do; few times."""
        if self._n_columns >= 3 or chooser.random() < 0.7:
            return
        command = f"ALTER TABLE kv ADD COLUMN IF NOT EXISTS more_{self._n_columns} int".encode()
        with contextlib.suppress(psycopg.OperationalError):
            with self._target.connect(connect_timeout=5) as target:
                target.execute(_LOCK_TIMEOUT.encode())
                # An operator's change is durable before the publisher's: the server's default here is not.
                target.execute("SET synchronous_commit = on")
                target.execute(command)
            connection.execute(command)
            connection.execute(f"UPDATE kv SET more_{self._n_columns} = v".encode())
            self._n_columns += 1

    def _mark(self, connection: psycopg.Connection, _: random.Random) -> None:
        connection.execute(_MARK.encode())

    def _prepared(self, connection: psycopg.Connection, chooser: random.Random) -> None:
        gid = f"side_{chooser.getrandbits(40)}"
        connection.execute(b"BEGIN")
        large(connection, chooser, chooser.choice([2, 4, 700]))
        connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
        self._stopping.wait(chooser.choice([0, 0.05, 0.5]))
        outcome = "COMMIT" if chooser.random() < 0.7 else "ROLLBACK"
        connection.execute(sql.SQL("{} PREPARED {}").format(sql.SQL(outcome), sql.Literal(gid)))
