"""States that a reader of the target can see, at each level of docs/CONSISTENCY.md; starts and ends two servers.

Run it with `python docs/examples/consistency.py`; it needs `pip install 'parapply[demo]'` or PostgreSQL's programs.
Each example prints the state that it saw, and fails if the document says otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep
from typing import TYPE_CHECKING

import psycopg

from parapply.demo.binaries import find_binaries
from parapply.demo.server import PgServer

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLES = """CREATE TABLE orders (id int PRIMARY KEY, amount int NOT NULL);
CREATE TABLE invoices (order_id int PRIMARY KEY, amount int NOT NULL);"""
# No foreign key, no common row: as far as keys tell, an order and its invoice are independent.
SEEN = """SELECT (SELECT count(*) FROM orders WHERE id = {0}), (SELECT count(*) FROM invoices WHERE order_id = {0})"""
PATIENCE_S = 30.0


class Example:
    """A source, a target, and a daemon in one commit order."""

    def __init__(self, source: PgServer, target: PgServer, order: str) -> None:
        """Make databases of their own for it."""
        self.name = order
        for server in (source, target):
            server.execute(f"CREATE DATABASE {order}")
            server.execute(TABLES, dbname=order)
        source.execute("CREATE PUBLICATION app FOR ALL TABLES", dbname=order)
        self.source = psycopg.connect(source.dsn(order), autocommit=True)
        self.target = psycopg.connect(target.dsn(order), autocommit=True)
        self.options = [
            "--source", source.dsn(order), "--target", target.dsn(order), "--slot", order, "--publication", "app",
            # Otherwise an order and its invoice may come in one batch, and would be seen together.
            "--set", f"apply.commit_order={order}", "--set", "apply.max_batch_transactions=1",
        ]  # fmt: skip

    def parapply(self, command: str, *words: str) -> list[str]:
        """Return the command line of a command."""
        return [sys.executable, "-m", "parapply", command, *self.options, *words]

    @contextmanager
    def daemon(self) -> Iterator[None]:
        """Run the daemon; our sessions end with it."""
        subprocess.run(self.parapply("init", "--copy"), check=True, capture_output=True)
        process = subprocess.Popen(self.parapply("run"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with self.source, self.target:
                yield
        finally:
            process.terminate()
            process.wait()

    @contextmanager
    def order_held_up(self, number: int) -> Iterator[None]:
        """Keep the daemon's insert of an order waiting on the target, as a slow worker, a lock or a retry would."""
        with psycopg.connect(self.target.info.dsn) as foreign:
            foreign.execute("INSERT INTO orders VALUES (%s, 0)", [number])
            yield
            foreign.rollback()

    def buy(self, number: int) -> str:
        """Commit an order and, later, its invoice; return an LSN behind both."""
        self.source.execute("INSERT INTO orders VALUES (%s, 100)", [number])
        self.source.execute("INSERT INTO invoices VALUES (%s, 100)", [number])
        row = self.source.execute("SELECT pg_logical_emit_message(true, 'example', '')").fetchone()
        assert row
        return str(row[0])

    def seen(self, number: int) -> tuple[int, int]:
        """Return how many orders and invoices a reader sees now: one statement, one snapshot."""
        row = self.target.execute(SEEN.format(number).encode()).fetchone()
        assert row
        return int(row[0]), int(row[1])

    def wait_seen(self, number: int, wanted: tuple[int, int]) -> None:
        """Return when a reader sees that."""
        end_s = monotonic() + PATIENCE_S
        while self.seen(number) != wanted:
            assert monotonic() < end_s, f"{self.name}: {self.seen(number)} instead of {wanted}"
            sleep(0.01)

    def wait_blocked(self) -> None:
        """Return when a worker waits for the lock."""
        query = (
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE 'parapply worker%'"
            " AND wait_event_type = 'Lock')"
        )
        end_s = monotonic() + PATIENCE_S
        while not (row := self.target.execute(query).fetchone()) or not row[0]:
            assert monotonic() < end_s, "no worker waits"
            sleep(0.01)


def invoice_without_order(relaxed: Example) -> None:
    """Relaxed, any read: the effect may be visible before its cause."""
    with relaxed.order_held_up(1):
        relaxed.buy(1)
        relaxed.wait_seen(1, (0, 1))
        print("relaxed, any read: the invoice is visible, its order is not")
    relaxed.wait_seen(1, (1, 1))


def never_in_snapshot(relaxed: Example) -> None:
    """Relaxed, snapshot: a state of the source, although the invoice was committed here first."""
    with relaxed.order_held_up(2):
        lsn = relaxed.buy(2)
        relaxed.wait_seen(2, (0, 1))
        query = f"BEGIN ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT '{{}}'; {SEEN.format(2)}"
        asking = subprocess.Popen(relaxed.parapply("snapshot", "--json"), stdout=subprocess.PIPE, text=True)
    assert asking.stdout
    (taken,) = json.loads(asking.stdout.readline())
    with psycopg.connect(relaxed.target.info.dsn, autocommit=True) as reader:
        found = reader.execute(query.format(taken["snapshot"]).encode())
        while found.nextset():
            pass
        orders, invoices = found.fetchone() or (0, 0)
    asking.terminate()
    asking.communicate()
    assert orders >= invoices, (orders, invoices)
    print(f"relaxed, snapshot at {taken['at_lsn']}: {orders} order, {invoices} invoice (written before {lsn})")


def in_order(preserve: Example) -> None:
    """Order kept, any read: what is later waits, so neither is seen before both may be."""
    with preserve.order_held_up(1):
        preserve.buy(1)
        preserve.wait_blocked()
        assert preserve.seen(1) == (0, 0), preserve.seen(1)
        print("order kept, any read: neither is visible yet")
    preserve.wait_seen(1, (1, 1))


def own_write(example: Example) -> None:
    """Read your writes: any order, after `wait_for` of an LSN behind the write."""
    lsn = example.buy(3)
    example.target.execute("SELECT parapply.wait_for(%s, 30)", [lsn])
    assert example.seen(3) == (1, 1)
    print(f"{example.name}, behind wait_for({lsn}): order and invoice are visible")


def main() -> None:
    """Show all of it."""
    with ExitStack() as stack:
        binaries = find_binaries()
        source = stack.enter_context(PgServer(binaries=binaries, name="source"))
        target = stack.enter_context(PgServer(binaries=binaries, name="target"))
        relaxed, preserve = Example(source, target, "relaxed"), Example(source, target, "preserve")
        stack.enter_context(relaxed.daemon())
        invoice_without_order(relaxed)
        never_in_snapshot(relaxed)
        own_write(relaxed)
        stack.enter_context(preserve.daemon())
        in_order(preserve)
        own_write(preserve)


if __name__ == "__main__":
    main()
