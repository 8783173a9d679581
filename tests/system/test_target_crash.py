"""The target crashes while it acknowledges commits that are not on disk: nothing that was confirmed is lost."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Self

import pytest

from tests.fixtures.databases import create_database
from tests.fixtures.plain import check_equal, commit_each, plain_route
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from parapply.demo.server import PgServer, Setting
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

_SAMPLE_PACE_S = 0.01
_SAMPLER_TIMEOUT_S = 30.0
# Transactions that are visible and not yet durable when the target crashes.
_AT_STAKE = 50
_TARGET_REFUSED = 4
# Commits are acknowledged at once, and written ten seconds later unless something flushes (F6).
_LAZY: Mapping[str, Setting] = {
    "synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB",
    "bgwriter_lru_maxpages": 0, "checkpoint_timeout": "1h",
}  # fmt: skip


class _ConfirmedSampler:
    """Reads what the publisher was told is flushed, all the time; as a context manager it starts and stops."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="confirmed-sampler", daemon=True)
        # Written by the thread, read after it ended.
        self.lsns: list[int] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(_SAMPLER_TIMEOUT_S)

    def _run(self) -> None:
        query = b"SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s"
        with self._route.source.connect() as connection:
            while not self._stopping.wait(_SAMPLE_PACE_S):
                row = connection.execute(query, [self._route.slot]).fetchone()
                if row:
                    self.lsns.append(int(row[0]))


@pytest.fixture
def lazy_server(own_servers: OwnServers) -> PgServer:
    """A target that loses commits that no session flushes."""
    return own_servers("lazy", settings=_LAZY)


# Up to PostgreSQL 16 the WAL writer is woken for every full page, whatever its delay, and there is little to lose.
@pytest.mark.pg_majors(18)
@pytest.mark.slow
def test_nothing_confirmed_is_lost(
    source_db: Database, lazy_server: PgServer, init_route: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """After each of two crashes under load, all confirmed rows are present before anything repairs them (O7, T-1).

    Then the daemon, the same process all the time, recovers, and in the end nothing is lost or doubled.
    """
    target = create_database(lazy_server, "target")
    # With longer breaks between the durable advances more is at stake.
    route = Route(source=source_db, target=target, settings={"apply.workers": 4, "apply.advance_interval_s": 1})
    create_bank(route.source, route.target)
    lazy_server.execute("CHECKPOINT")
    init_route(route)
    with BankReader(route.target) as reader, BankLoad(source_db, seed=3, pace_s=0.005) as load:
        daemon = start_daemon(route)
        for crash, before in ((lazy_server.crash, _nothing), (lazy_server.kill, _pile_up)):
            with _ConfirmedSampler(route) as sampler:
                daemon.wait_caught_up()
                # Otherwise nothing may be confirmed yet in the first round.
                slot = f"FROM pg_replication_slots WHERE slot_name = '{route.slot}'"
                source_db.wait_until(f"SELECT confirmed_flush_lsn >= '{route.end_of_source_lsn()}' {slot}")
                load.wait_for_more(100)
                with before(route) as at_stake:
                    crash()
            # It must not repair what we are about to look at.
            daemon.pause()
            confirmed = load.ids_up_to(max([*sampler.lsns, route.confirmed_flush_lsn()]))
            lazy_server.start()
            present = _transfers(route)
            assert confirmed, "nothing was confirmed: this proves nothing"
            assert confirmed <= present, f"{len(confirmed - present)} confirmed transactions are lost"
            assert not at_stake or at_stake - present, "all are present: the target is not lazy, this proves nothing"
            daemon.send(signal.SIGCONT)
        daemon.wait_caught_up()
        load.stop()
        daemon.wait_caught_up()
        reader.wait_for_snapshot()
        daemon.stop()
        check_bank(route.source, route.target, load)
    assert reader.outages >= 1


@contextmanager
def _nothing(_route: Route) -> Iterator[set[int]]:
    """Leave the daemon alone: it advances and reports as it likes."""
    yield set()


@contextmanager
def _pile_up(route: Route) -> Iterator[set[int]]:
    """Let commits pile up that are acknowledged and not written, and give those that readers see.

    Holding the row of the watermark keeps the daemon from its durable advances (and from reporting), and workers from
    nothing. The WAL writer stands still: however slow the machine is, it does not wake up before the crash.
    """
    writer = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
    with closing(route.target.connect()) as holder:
        ((writer_pid,),) = route.target.rows(writer)
        os.kill(writer_pid, signal.SIGSTOP)
        holder.execute("BEGIN")
        holder.execute("SELECT FROM parapply.slots FOR UPDATE")
        route.target.wait_until(f"SELECT count(*) > {len(_transfers(route)) + _AT_STAKE} FROM xfer")
        yield _transfers(route)


def _transfers(route: Route) -> set[int]:
    return {int(one) for (one,) in route.target.rows("SELECT id FROM xfer")}


def test_an_unlogged_table_is_not_applied(
    source_db: Database,
    own_servers: OwnServers,
    init_route: Callable[[Route], None],
    start_daemon: StartDaemon,
    run_command: RunCommand,
) -> None:
    """A table that a crash would empty is named before the crash, and nothing is confirmed that went into it.

    Other tables go on; once it is LOGGED again a copy and the stream make it equal.
    """
    server = own_servers("target")
    route = plain_route(source_db, create_database(server, "target"), init_route, apply__catalogue_check_s=0.5)
    commit_each(route.source, 1, 5)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    route.target.execute("ALTER TABLE evt SET UNLOGGED")
    assert daemon.wait_for_event("table_unusable")["relation"] == "public.evt"
    server.crash()
    server.start()
    assert route.target.rows("SELECT count(*) FROM evt") == [(0,)], "it was no crash: this proves nothing"
    route.source.execute("INSERT INTO item VALUES (6, 6)")
    daemon.wait_caught_up()
    route.source.execute("INSERT INTO evt VALUES (6)")
    assert daemon.exit_code() == _TARGET_REFUSED
    assert "target table public.evt is UNLOGGED: a crash of the server would empty public.evt" in daemon.failure
    assert "`parapply refresh --table ... --truncate`" in daemon.failure
    assert "UNLOGGED" in run_command(route, "status").stdout
    route.target.execute("ALTER TABLE evt SET LOGGED")
    run_command(route, "refresh", "--table", "public.evt", "--truncate", code=0)
    daemon = start_daemon(route)
    daemon.finish()
    check_equal(route)
