"""Snapshots at an LSN, in both commit orders and under load: the target equals the source at exactly that LSN."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from parapply.commands.snapshot import snapshots
from parapply.config import load_config
from parapply.errors import TargetLost, TargetRefused
from parapply.model import format_lsn, parse_lsn
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST, WORKER_IS_BLOCKED, foreign_transaction, wait_until_gone
from tests.fixtures.route import Route
from tests.fixtures.streams import LITTLE_MEMORY
from tests.fixtures.workloads import BankLoad, create_bank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.config import Config
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase

_SNAPSHOTS = 2
_EARLIEST_EVERY = 2
_TIMEOUT_S = 30.0
_CHECKSUM = " UNION ALL ".join(
    f"SELECT '{table}', count(*), sum(hashtextextended(t::text, 0)::numeric) FROM {table} AS t"
    for table in ("acct", "xfer", "evt")
)
_SNAPSHOT_HAS_BEGUN = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'BEGIN ISOLATION%'"
    " AND application_name LIKE 'parapply snapshot%')"
)
_TORN = """
SELECT txid FROM evt GROUP BY 1 HAVING count(*) <> 3 UNION ALL SELECT 1 FROM acct HAVING sum(bal) <> 20000
"""


def _config(route: Route) -> Config:
    flags = {"source.dsn": route.source.dsn, "target.dsn": route.target.dsn, "source.slot": route.slot,
             "source.publications": (route.publication,)}  # fmt: skip
    return load_config(None, (), flags, {})


def _in_snapshot(target: Database, name: str, query: str) -> list[tuple[Any, ...]]:
    with target.connect() as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(name)))
        return connection.execute(query.encode()).fetchall()


class _Moment:
    """The tables' checksums on the source, and an LSN at which they hold: no session writes while they are taken."""

    def __init__(self, source: Database) -> None:
        self.checksums: list[tuple[object, ...]] = []
        self._source = source

    async def choose(self, standing_lsn: int) -> int:
        with self._source.connect() as connection, connection.transaction():
            connection.execute("LOCK TABLE acct, xfer, evt IN SHARE MODE")
            self.checksums = connection.execute(_CHECKSUM.encode()).fetchall()
            row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row is not None
        lsn = parse_lsn(str(row[0]))
        assert lsn >= standing_lsn
        return lsn


@pytest.mark.in_turn("order")
@pytest.mark.parametrize("order", ["preserve", "relaxed"])
async def test_a_snapshot_equals_the_source_at_its_lsn(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, order: str
) -> None:
    """O5 for any LSN: checksums taken on the source while no session writes equal the snapshot's at that LSN.

    One at the earliest LSN possible holds all transfers known to end before, and each whole.
    """
    create_bank(source_db, target_db)
    route = Route(source=source_db, target=target_db, settings={**FAST, "apply.commit_order": order})
    make_slot(route)
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    moment = _Moment(source_db)
    with BankLoad(source_db, seed=3, pace_s=0.1) as load:
        load.wait_for_more(20)
        for number in range(_SNAPSHOTS):
            async with snapshots([_config(route)], choose=moment.choose, timeout_s=_TIMEOUT_S) as (taken,):
                assert _in_snapshot(target_db, taken.name, _CHECKSUM) == moment.checksums
            if number % _EARLIEST_EVERY:
                continue
            async with snapshots([_config(route)], timeout_s=_TIMEOUT_S) as (taken,):
                found = {one for (one,) in _in_snapshot(target_db, taken.name, "SELECT id FROM xfer")}
                assert load.ids_up_to(taken.at_lsn) <= found
                assert _in_snapshot(target_db, taken.name, _TORN) == []
    daemon.finish()


async def test_a_large_transaction_that_has_begun_to_come_is_in_no_snapshot_of_before_it(
    source_db: Database, target_db: Database, start_daemon: StartDaemon
) -> None:
    """Its first piece had passed when intake was held before its commit, and the rest is not held: refused."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE item (id int PRIMARY KEY, v text); INSERT INTO item VALUES (0, '')")
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings={**FAST, **LITTLE_MEMORY, "source.streaming": "off"})
    make_slot(route)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    ((before,),) = source_db.rows("SELECT pg_current_wal_insert_lsn()")

    async def take() -> None:
        async with snapshots([_config(route)], lsn=parse_lsn(before), timeout_s=_TIMEOUT_S):
            pass

    with foreign_transaction(target_db, "SELECT FROM item WHERE id = 0 FOR UPDATE"):
        source_db.execute(
            "BEGIN; UPDATE item SET v = 'held';"
            " INSERT INTO item SELECT g, repeat('x', 3000) FROM generate_series(1, 20000) AS g; COMMIT"
        )
        target_db.wait_until(WORKER_IS_BLOCKED)
        taking = asyncio.create_task(take())
        await asyncio.to_thread(target_db.wait_until, _SNAPSHOT_HAS_BEGUN)
    with pytest.raises(TargetRefused, match="is in the past"):
        await taking
    daemon.finish()


@contextmanager
def _transfers(source: Database) -> Iterator[None]:
    """Move money between the tables in a loop."""
    stop = threading.Event()

    def run() -> None:
        with source.connect() as connection:
            while not stop.wait(0.03):
                connection.execute("BEGIN; UPDATE here SET n = n - 1; UPDATE there SET n = n + 1; COMMIT")

    thread = threading.Thread(target=run)
    thread.start()
    yield
    stop.set()
    thread.join()


async def test_two_targets_are_cut_at_one_lsn(
    source_db: Database, target_db: Database, new_database: NewDatabase, start_daemon: StartDaemon
) -> None:
    """Money moves between two tables that follow to different targets: its sum is constant in every cut."""
    other_db = new_database(target_db.server, "other")
    source_db.execute("CREATE TABLE here (n int PRIMARY KEY); CREATE TABLE there (n int PRIMARY KEY)")
    source_db.execute("INSERT INTO here VALUES (100000); INSERT INTO there VALUES (0)")
    routes = []
    for target, table, rows in ((target_db, "here", 100000), (other_db, "there", 0)):
        target.execute(f"CREATE TABLE {table} (n int PRIMARY KEY); INSERT INTO {table} VALUES ({rows})")
        source_db.execute(f"CREATE PUBLICATION pub_{table} FOR TABLE {table}")
        routes.append(Route(source=source_db, target=target, publication=f"pub_{table}", settings=FAST))
        make_slot(routes[-1])
    daemons = [start_daemon(route) for route in routes]
    for daemon in daemons:
        daemon.wait_for_event("source_connected")
    sums = []
    with _transfers(source_db):
        for _ in range(3):
            async with snapshots([_config(route) for route in routes], timeout_s=_TIMEOUT_S) as (first, second):
                assert first.at_lsn == second.at_lsn
                ((here,),) = _in_snapshot(target_db, first.name, "SELECT n FROM here")
                ((there,),) = _in_snapshot(other_db, second.name, "SELECT n FROM there")
                sums.append((here, here + there))
    assert {total for _, total in sums} == {100000}
    assert len({here for here, _ in sums}) > 1, "nothing moved"


async def test_what_those_who_ask_are_told(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """No daemon, and an LSN that the target has passed: each is one clear error, and nothing stands still for it.

    The command line prints name, LSN and pause; its command finds them, and its exit code is passed on. The requester
    is gone while the daemon pauses for it, and the daemon goes on without it.
    """
    create_bank(source_db, target_db)
    route = Route(source=source_db, target=target_db, settings=FAST)
    make_slot(route)
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    daemon.stop()
    wait_until_gone(route)
    with pytest.raises(TargetRefused, match="no daemon applies"):
        async with snapshots([_config(route)], timeout_s=1):
            pass
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    before = route.end_of_source_lsn()
    route.source.execute("INSERT INTO evt VALUES (1, 1)")
    daemon.wait_caught_up()
    with pytest.raises(TargetRefused, match=f"{before} is in the past"):
        async with snapshots([_config(route)], lsn=parse_lsn(before), timeout_s=_TIMEOUT_S):
            pass
    # No session writes, so the publisher reports that nothing comes before this LSN.
    after = parse_lsn(route.end_of_source_lsn())
    async with snapshots([_config(route)], lsn=after, timeout_s=_TIMEOUT_S) as (taken,):
        assert taken.at_lsn == after

    done = run_command(
        route, "snapshot", "--json", "--", "sh", "-c", 'echo "$PARAPPLY_SNAPSHOT $PARAPPLY_LSN"; exit 7', code=7
    )
    document, said = done.stdout.splitlines()
    (shown,) = json.loads(document)
    assert said == f"{shown['snapshot']} {shown['at_lsn']}"
    assert 0 <= shown["pause_s"] < _TIMEOUT_S
    assert format_lsn(parse_lsn(shown["at_lsn"])) == shown["at_lsn"]
    with pytest.raises(psycopg.Error):
        _in_snapshot(target_db, shown["snapshot"], "SELECT 1")

    async def choose(standing_lsn: int) -> int:
        target_db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'parapply asking%'"
        )
        return standing_lsn

    with pytest.raises(TargetLost):
        async with snapshots([_config(route)], choose=choose, timeout_s=_TIMEOUT_S):
            pass
    source_db.execute("INSERT INTO evt VALUES (2, 2)")
    daemon.finish()
    assert target_db.rows("SELECT count(*) FROM evt") == [(2,)]


async def test_a_snapshot_of_a_daemon_that_ends_is_refused_at_once(
    source_db: Database, target_db: Database, start_daemon: StartDaemon
) -> None:
    """No other daemon finishes it, so the command does not wait until its time is over."""
    create_bank(source_db, target_db)
    route = Route(source=source_db, target=target_db, settings=FAST)
    make_slot(route)
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")

    async def choose(standing_lsn: int) -> int:
        daemon.kill()
        return standing_lsn

    with pytest.raises(TargetRefused, match="the daemon ended while it made the snapshot"):
        async with snapshots([_config(route)], choose=choose, timeout_s=_TIMEOUT_S):
            pass
