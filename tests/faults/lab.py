"""One round of the campaign: databases under load, proxies, a daemon that comes and goes, and the checks of it.

In go two servers that may be crashed and a seed; out come findings. Faults (`injections`) act on a `Round` only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import resource
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import psycopg

from parapply.demo.errors import DemoError
from parapply.demo.server import PgServer
from tests.faults import oracles
from tests.faults.oracles import Findings, Sampler
from tests.faults.side_load import SideLoad, create_tables, mark
from tests.fixtures.daemon import Daemon
from tests.fixtures.databases import create_end, drop_database
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import foreign_transaction, lsn_of, watermark
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.servers import _SETTINGS_OF_18, TEST_SETTINGS
from tests.fixtures.workloads import BankLoad, BankReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.fixtures.databases import Database

#: A busy machine of two cores takes its time; what hangs for longer has found something.
WAIT_S = 180.0
#: The role that the daemon uses: faults change it, and leave the campaign's own sessions alone.
ROLE = "applier"
# A target that loses commits that no session flushes: acknowledged at once, and on disk ten seconds later (F6).
_LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
_POLL_S = 0.05
_TIMINGS: Mapping[str, str | float] = {
    "apply.advance_interval_s": 0.1,
    "apply.stall_check_s": 0.2,
    "apply.catalogue_check_s": 1.0,
    "source.status_interval_s": 1.0,
    "source.receive_timeout_s": 6.0,
    "source.reconnect_min_s": 0.05,
    "source.reconnect_max_s": 1.0,
    "target.lease_wait_s": 20,
}


#: Sessions of the database, and who holds them up; and the slots.
_STANDING = (
    (
        "SELECT pid, pg_blocking_pids(pid), application_name, state, wait_event_type, wait_event, now() - xact_start,"
        " now() - state_change, left(query, 100) FROM pg_stat_activity WHERE datname = current_database()"
    ),
    "SELECT slot_name, active_pid, restart_lsn, confirmed_flush_lsn, pg_current_wal_lsn() FROM pg_replication_slots",
)
_SLOTS = "SELECT s::text FROM parapply.slots AS s"


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Publisher and target, which only the campaign uses."""

    source: PgServer
    target: PgServer


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    """Start a publisher and a target; both are removed at the end.

    Raises:
        DemoError: a server does not start.
    """
    with ExitStack() as stack:
        made = []
        for name, more in (("publisher", {}), ("target", _LAZY)):
            server = PgServer(settings={**TEST_SETTINGS, "max_connections": 100, **more}, name=name)
            if server.binaries.major >= 18:
                server = PgServer(
                    settings={**TEST_SETTINGS, **_SETTINGS_OF_18, "max_connections": 100, **more}, name=name
                )
            made.append(stack.enter_context(server))
            made[-1].execute(f"CREATE ROLE {ROLE} LOGIN SUPERUSER")
        yield Servers(source=made[0], target=made[1])


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a round.

    Attributes:
        seed: of everything that is drawn in it.
        is_two_phase: whether the slot has two-phase commit.
        settings: of every daemon in it.
        pace_s: pause of each of the four clients of the bank after a transaction.
        environ: variables of every daemon, for mutants.
        reader_pace_s: pause between two looks of the reader.
        is_standby: whether the publisher's `synchronous_standby_names` names the daemon, which so reports everything at
            once. Its sessions commit with `local`: what is done while no daemon runs must not wait for one.
    """

    seed: str
    is_two_phase: bool
    settings: Mapping[str, str | float]
    pace_s: float = 0.03
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reader_pace_s: float = 0.3
    is_standby: bool = False


def draw_settings(chooser: random.Random) -> dict[str, str | float]:
    """Return settings of a daemon for a round."""
    return {
        "apply.commit_order": chooser.choice(["preserve", "preserve", "relaxed"]),
        "apply.workers": chooser.choice([1, 2, 4, 4, 6]),
        "apply.max_batch_transactions": chooser.choice([1, 5, 20000]),
        "apply.stream_start_bytes": chooser.choice([0, 1 << 20]),
        "source.streaming": chooser.choice(["off", "on", "parallel", "parallel"]),
        "target.session_replication_role": chooser.choice(["replica", "replica", "origin"]),
        "target.synchronous_commit": chooser.choice(["off", "off", "on"]),
        "source.catch_up": chooser.choice(["auto", "auto", "off"]),
        "source.catch_up_range_bytes": chooser.choice([1 << 14, 1 << 16, 1 << 20]),
        "source.catch_up_readers": chooser.choice([1, 1, 2, 4]),
        # Whatever there is to catch up.
        "source.catch_up_enter_bytes": 0,
    }


class Round:
    """Databases, load and daemon of one round; as a context manager it begins, and removes everything at the end.

    Attributes:
        chooser: for what a fault draws.
        daemon: the one that runs.
        load: of the bank.
        directory: for files of the round, such as what is kept of streamed transactions.
    """

    def __init__(self, servers: Servers, options: Options) -> None:
        """Make nothing yet."""
        self.servers = servers
        self.options = options
        self.chooser = random.Random(options.seed)
        self.notes: list[str] = []
        self._stack = ExitStack()
        self._ended: list[Daemon] = []

    def __enter__(self) -> Self:
        """Make the databases, start the load and the daemon."""
        with self._stack:
            self.directory = Path(self._stack.enter_context(TemporaryDirectory(prefix="parapply-faults-")))
            self.source = self._database(self.servers.source, "source")
            self.target = self._database(self.servers.target, "target")
            create_tables(self.source, self.target)
            self.source_proxy = self._stack.enter_context(CutProxy("127.0.0.1", self.servers.source.port))
            self.target_proxy = self._stack.enter_context(CutProxy("127.0.0.1", self.servers.target.port))
            spill = self.directory / "spill"
            spill.mkdir()
            self.route = Route(
                source=self.source,
                target=self.target,
                source_dsn=self.source_proxy.dsn(self.source.dsn_with(user=ROLE)),
                target_dsn=self.target_proxy.dsn(self.target.dsn_with(user=ROLE)),
                settings={
                    **_TIMINGS,
                    "source.two_phase": str(self.options.is_two_phase).lower(), "apply.spill_dir": str(spill),
                    "applylog.directory": str(self.directory / "log"), "applylog.rotate_bytes": 1 << 20,
                    "applylog.retention_bytes": 4 << 20, **self.options.settings,
                },
            )  # fmt: skip
            make_slot(self.route)
            self._stack.callback(self._end_daemons)
            self.daemon = self.start()
            self.daemon.wait_for_event("source_connected", WAIT_S)
            if self.options.is_standby:
                self._stack.enter_context(self.standby("local"))
            in_order = self.options.settings.get("apply.commit_order", "preserve") == "preserve"
            self.sampler = self._stack.enter_context(Sampler(self.route))
            self.reader = BankReader(self.target, in_order=in_order, pace_s=self.options.reader_pace_s)
            self._stack.enter_context(_quietly(self.reader))
            self.load = BankLoad(self.source, seed=self.chooser.getrandbits(30), pace_s=self.options.pace_s)
            self._stack.enter_context(self.load)
            self.side = SideLoad(
                self.source, self.target, seed=self.options.seed, is_two_phase=self.options.is_two_phase,
                pace_s=8 * self.options.pace_s,
            )  # fmt: skip
            self._stack.enter_context(self.side)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything, whatever state it is in."""
        for server in (self.servers.source, self.servers.target):
            with contextlib.suppress(DemoError):
                server.start()
        for proxy in (self.source_proxy, self.target_proxy):
            proxy.thaw()
            proxy.restore()
        self._stack.close()

    @property
    def n_transactions(self) -> int:
        """Return how many transactions the publisher has acknowledged."""
        return self.load.n_acknowledged() + self.side.committed

    def start(self, *arguments: str, settings: Mapping[str, str | float] | None = None,
              environ: Mapping[str, str] | None = None) -> Daemon:  # fmt: skip
        """Start a daemon, which is `daemon` from now on."""
        self.daemon = self.start_beside(*arguments, settings=settings, environ=environ)
        return self.daemon

    def start_beside(self, *arguments: str, settings: Mapping[str, str | float] | None = None,
                     environ: Mapping[str, str] | None = None, route: Route | None = None) -> Daemon:  # fmt: skip
        """Start a daemon beside `daemon`."""
        every = {**self.options.environ, **(environ or {})}
        # A mutant is made when its Python starts.
        is_cold = bool(self.options.environ)
        daemon = Daemon(route or self.route, *arguments, settings=settings, environ=every, is_cold=is_cold)
        self._ended.append(daemon)
        return daemon

    def restart(self, *, settings: Mapping[str, str | float] | None = None,
                environ: Mapping[str, str] | None = None) -> Daemon:  # fmt: skip
        """Stop the daemon in order and start one with other settings, which reads the stream when this returns."""
        self.daemon.stop(WAIT_S)
        return self.start_connected(settings=settings, environ=environ)

    def start_connected(self, *, settings: Mapping[str, str | float] | None = None,
                        environ: Mapping[str, str] | None = None) -> Daemon:  # fmt: skip
        """Start a daemon that reads the stream when this returns."""
        daemon = self.start(settings=settings, environ=environ)
        daemon.wait_for_event("source_connected", WAIT_S)
        return daemon

    def standing(self) -> str:
        """Return how slot and sessions stand on both sides, a line each, as far as the servers answer."""
        lines: list[str] = []
        for database, queries in ((self.source, _STANDING), (self.target, (*_STANDING, _SLOTS))):
            for query in queries:
                with contextlib.suppress(psycopg.Error):
                    lines += [" ".join(map(str, row)) for row in database.rows(query)]
        return "\n".join(["", *lines])

    def wait_event(self, name: str, *, more_than: int | None = None) -> dict[str, Any]:
        """Return the next log line of an event, or the one after `more_than` of them."""
        count = len(self.daemon.events_of(name)) if more_than is None else more_than
        return self.daemon.wait_for_event(name, WAIT_S, count=count + 1)

    @contextlib.contextmanager
    def standby(self, level: str) -> Iterator[None]:
        """Have the publisher name the daemon as its synchronous standby while the block runs.

        Args:
            level: synchronous_commit of every session on the publisher, those that run included.
        """
        names = ("synchronous_standby_names", "synchronous_commit")
        before = [self.source.rows(f"SELECT setting FROM pg_settings WHERE name = '{name}'")[0][0] for name in names]
        try:
            self._configure_source(names, (self.route.slot, level))
            state = f"SELECT sync_state = 'sync' FROM pg_stat_replication WHERE application_name = '{self.route.slot}'"
            self.source.wait_until(state, WAIT_S)
            yield
        finally:
            self._configure_source(names, before)

    def _configure_source(self, names: Sequence[str], values: Sequence[str]) -> None:
        for name, value in zip(names, values, strict=True):
            self.servers.source.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self.servers.source.reload()

    def work(self, least: int = 20, most: int = 80) -> None:
        """Let the load go on for some transactions."""
        self.load.wait_for_more(self.chooser.randint(least, most), WAIT_S)

    def caught_up(self) -> None:
        """Return when the target shows everything that the source has committed so far.

        A daemon that applies each transaction by itself on a busy machine may need long; one that stands still fails.

        Raises:
            AssertionError: the watermark did not move for `WAIT_S` seconds, or the daemon ended.
        """
        wanted_lsn, low_lsn, moved_s = lsn_of(self.source), 0, time.monotonic()
        self.route.end_of_source_lsn()
        while low_lsn < wanted_lsn:
            self.daemon.check_running()
            now_lsn = self._low_lsn()
            if now_lsn > low_lsn:
                low_lsn, moved_s = now_lsn, time.monotonic()
            elif time.monotonic() - moved_s > WAIT_S:
                # Says what each worker and task waits for.
                self.daemon.wait_caught_up(1)
            self.daemon.runs_for(_POLL_S)

    def _low_lsn(self) -> int:
        """Return the watermark that the target shows; 0 while its server is away or knows nothing of the slot."""
        try:
            return watermark(self.route)
        except (DemoError, IndexError):
            return 0

    def check(self) -> Findings:
        """Mark, catch up, and look at everything that can be seen under load."""
        mark(self.source)
        self.caught_up()
        self.reader.wait_for_snapshot(WAIT_S)
        found = oracles.check_live(self.target)
        found.take(oracles.check_state(self.target))
        found.take(self._seen())
        return found

    def finish(self) -> Findings:
        """End the load, let the daemon finish in order, and compare everything."""
        self.side.stop()
        self.load.stop()
        mark(self.source)
        self.caught_up()
        self.reader.wait_for_snapshot(WAIT_S)
        self.daemon.stop(WAIT_S)
        found = oracles.check_transactions(self.source, self.target)
        missing = set(self.load.acknowledged) - {int(one) for (one,) in self.source.rows("SELECT id FROM xfer")}
        assert not missing, f"the publisher itself lost {len(missing)} transactions"
        found.take(oracles.check_live(self.target))
        found.take(oracles.check_nothing_left(self.source, self.target))
        left = list((self.directory / "spill").iterdir())
        found.add("other", len(left), f"O9: files left in spill_dir: {left[:3]}")
        found.take(self._seen())
        return found

    def _seen(self) -> Findings:
        """Return what reader, sampler and logs have shown since the last look."""
        found = Findings()
        seen, self.reader._findings = self.reader._findings, []
        found.add("torn", len(seen), "O3/O6: " + " | ".join(seen[:3]))
        back, self.sampler.went_back = self.sampler.went_back, []
        found.add("other", len(back), " | ".join(back[:2]))
        for daemon in self._ended:
            found.take(oracles.check_log(daemon))
        self._ended = [one for one in self._ended if one is self.daemon or one.is_running()]
        return found

    def crash_target(self, crash: Callable[[], None], *, piles_up: bool = False) -> Findings:
        """Crash the target, look whether all transactions reported to the publisher are present, let all go on (O7).

        Args:
            crash: of the server.
            piles_up: keep the daemon from its durable advances, but not the workers: commits pile up that readers see
            and no disk has.
        """
        found = Findings()
        self.caught_up()
        ((n_before,),) = self.target.rows("SELECT count(*) FROM xfer")
        # Not FOR UPDATE: workers in the role origin look the slot up when they write a record, by the foreign key.
        lock = "SELECT FROM parapply.slots FOR NO KEY UPDATE" if piles_up else "SELECT"
        # The lock's own session ends with the server.
        with contextlib.suppress(psycopg.OperationalError), foreign_transaction(self.target, lock):
            self.target.wait_until(f"SELECT count(*) > {n_before} + 20 FROM xfer", WAIT_S)
            crash()
        # It must not repair what we are about to look at.
        self.daemon.pause()
        told_lsn = self.sampler.told_lsn
        with contextlib.suppress(DemoError):
            told_lsn = max(told_lsn, self.route.confirmed_flush_lsn())
        promised = self.load.ids_up_to(told_lsn)
        # Before it is back: the sampler may read it as soon as it is.
        self.sampler.forgive()
        self.servers.target.start()
        present = {int(one) for (one,) in self.target.rows("SELECT id FROM xfer")}
        gone = promised - present
        found.add("lost", len(gone), f"O7: {len(gone)} confirmed transactions are lost, such as {sorted(gone)[:3]}")
        self.daemon.send(signal.SIGCONT)
        return found

    def peak_bytes(self) -> int:
        """Return the largest resident memory of the daemon."""
        for line in Path(f"/proc/{self.daemon.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the process has no VmHWM")

    @contextlib.contextmanager
    def file_limit(self, size_bytes: int) -> Iterator[None]:
        """Have the kernel refuse the daemon files beyond a size, which stands for a full disk."""
        unlimited = resource.prlimit(self.daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.daemon.pid, resource.RLIMIT_FSIZE, (size_bytes, unlimited[1]))
        try:
            yield
        finally:
            resource.prlimit(self.daemon.pid, resource.RLIMIT_FSIZE, unlimited)

    def _database(self, server: PgServer, role: str) -> Database:
        database = create_end(server, role)
        self._stack.callback(_drop, database)
        return database

    def _end_daemons(self) -> None:
        for daemon in [*self._ended, self.daemon]:
            if daemon.is_running():
                daemon.send(signal.SIGCONT)
            daemon.end()


def _drop(database: Database) -> None:
    """Drop a database; a session that still ends there gets some time."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            drop_database(database)
        except psycopg.Error:
            if time.monotonic() > deadline_s:
                raise
        else:
            return


@contextlib.contextmanager
def _quietly(reader: BankReader) -> Iterator[None]:
    """Run a reader whose findings are asked for by hand."""
    reader.__enter__()
    try:
        yield
    finally:
        reader.__exit__(RuntimeError)
