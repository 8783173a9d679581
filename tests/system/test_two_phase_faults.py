"""PREPARE, COMMIT PREPARED and ROLLBACK PREPARED exactly once: lost answers, kills, crashes (T-57, F33, K12, K13)."""

from __future__ import annotations

import os
import signal
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.fixtures.daemon import EVENT_TIMEOUT_S
from tests.fixtures.databases import create_database
from tests.fixtures.pair import Pair, pair
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.two_phase import (
    SHAPES,
    TABLES,
    TWO_PHASE,
    WHOLE,
    check_nothing_is_left,
    decide,
    n_prepared,
    rows_from,
    stream_early,
    write_prepared,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from threading import Event

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers
    from tests.fixtures.two_phase import Shape

__all__ = ["pair"]

pytestmark = pytest.mark.crash

_COMMANDS = {"PREPARE": b"PREPARE TRANSACTION", "COMMIT": b"COMMIT PREPARED", "ROLLBACK": b"ROLLBACK PREPARED"}
# Of the statements that record it. A session sends their text at their first use and at their second, and it does not
# live longer here.
_NOTE, _FORGET = b".undecided (slot_id, gid) VALUES", b"WITH noted AS (DELETE"
_RECORDS = {"PREPARE": _NOTE, "COMMIT": _FORGET, "ROLLBACK": _FORGET}
#: Acknowledged at once, and on disk ten seconds later unless another session flushes.
_LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
#: Processes of the server that flush WAL when their time has come.
_FLUSHERS = "SELECT pid FROM pg_stat_activity WHERE backend_type IN ('walwriter', 'background writer', 'checkpointer')"


class Run:
    """A pair whose daemons come and go, and the number of the next transaction."""

    def __init__(self, pair: Pair, shape: Shape, start_daemon: StartDaemon) -> None:
        self.pair = pair
        self.shape = shape
        self._start_daemon = start_daemon
        self._daemons: list[Daemon] = []
        self._n = 0

    def start(self, failpoint: str = "", route: Route | None = None) -> Daemon:
        """Start a daemon, to be killed at a point if one is named."""
        environ = {"PARAPPLY_FAILPOINT": f"{failpoint}:kill"} if failpoint else {}
        settings = {**TWO_PHASE, **self.shape.settings}
        daemon = self._start_daemon(route or self.pair.route, settings=settings, environ=environ)
        daemon.wait_for_event("source_connected")
        self._daemons.append(daemon)
        return daemon

    def prepare(self) -> str:
        """Prepare the next transaction on the source and return its name; later ones do not touch its rows."""
        self._n += 1
        gid = f"g{self._n}"
        write_prepared(self.pair.source, gid, *rows_from(self._n * 100_000, self.shape))
        return gid

    def decide(self, gid: str, what: str) -> None:
        """End a transaction on the source."""
        decide(self.pair.source, gid, what)

    def wait_prepared(self) -> None:
        """Return once one transaction is prepared on the target, and recorded as such."""
        self.pair.target.wait_until("SELECT count(*) = 1 FROM parapply.undecided")
        assert n_prepared(self.pair.target) == 1

    def check(self, daemon: Daemon) -> None:
        """Let the daemon finish, then compare."""
        daemon.finish()
        if self.shape.event:
            assert any(one.events_of(self.shape.event) for one in self._daemons), f"never {self.shape.event}"
        self.pair.check_equal()
        check_nothing_is_left(self.pair.target)


@pytest.fixture
def run(pair: Pair, shape: Shape, start_daemon: StartDaemon) -> Run:
    """Tables and a slot; transactions of more than a few hundred rows are streamed."""
    stream_early(pair.source)
    pair.create(TABLES)
    return Run(pair, shape, start_daemon)


@pytest.fixture
def run_whole(pair: Pair, start_daemon: StartDaemon) -> Run:
    """The same with small transactions."""
    pair.create(TABLES)
    return Run(pair, WHOLE, start_daemon)


for_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


#: The part of a PREPARE that is lost. After one that has happened, its shape decides only what is not applied again; it
#: makes no difference to that whether answer or record is lost, or whether the file was followed or read at the end.
_LOST = {"whole": ("before", "answer", "record"), "large": ("before", "answer"), "followed": ("before", "record")}


@pytest.mark.in_turn("shape")
@for_each_shape
def test_t57_lost_connections(run: Run, shape: Shape) -> None:
    """T-57: each command is lost on its way, or its answer is, or its record: done once, whatever the target says.

    The daemon, the same process all the time, reads from the target which it was.
    """
    target = run.pair.target
    with CutProxy("127.0.0.1", int(target.rows("SELECT inet_server_port()")[0][0])) as proxy:
        route = Route(source=run.pair.source, target=target, slot=run.pair.route.slot,
                      target_dsn=proxy.dsn(target.target_role_dsn))  # fmt: skip
        daemon = run.start(route=route)
        n_lost = 0
        for what in ("COMMIT", "ROLLBACK") if shape is WHOLE else ("COMMIT",):
            for way in _LOST.get(shape.name, ("before",)):
                # A PREPARE is the same whatever becomes of it.
                cut = _arm(proxy, "PREPARE", way) if what == "COMMIT" else None
                gid = run.prepare()
                n_lost = _wait_lost(daemon, cut, n_lost)
                run.wait_prepared()
                cut = _arm(proxy, what, way) if shape is WHOLE else None
                run.decide(gid, what)
                n_lost = _wait_lost(daemon, cut, n_lost)
                daemon.wait_caught_up()
        run.check(daemon)


def _arm(proxy: CutProxy, command: str, way: str) -> Event:
    text = _COMMANDS[command]
    if way == "record":
        return proxy.drop_before(_RECORDS[command])
    # With the quote: the name of our own tables also holds the word.
    return (
        proxy.drop_before(text + b" '") if way == "before" else proxy.drop_reply_after(text + b" '", reply=text + b"\0")
    )


def _wait_lost(daemon: Daemon, cut: Event | None, n_lost: int) -> int:
    """Return how often the target was lost when this cut, if there is one, has been met."""
    if cut is None:
        return n_lost
    assert cut.wait(EVENT_TIMEOUT_S), f"the connection was not cut:\n{daemon.log_tail()}"
    daemon.wait_for_event("target_lost", count=n_lost + 1)
    return n_lost + 1


def test_t57_kills_at_every_point(run_whole: Run) -> None:
    """T-57, K12, K13: killed when a command is sent and when it is answered; the next one goes on exactly.

    Each is started with a transaction prepared, or with one that was just ended.
    """
    run = run_whole
    for what in ("COMMIT", "ROLLBACK"):
        for prepare_point, outcome_point in (
            (failpoints.PREPARE_SENT, failpoints.DECISION_SENT),
            (failpoints.PREPARED, failpoints.DECIDED),
        ):
            daemon = run.start(prepare_point)
            gid = run.prepare()
            _wait_killed(daemon)
            daemon = run.start(outcome_point)
            run.wait_prepared()
            run.decide(gid, what)
            _wait_killed(daemon)
    run.check(run.start())


@pytest.mark.in_turn("shape", "point")
@pytest.mark.parametrize(
    ("shape", "point"),
    list(zip(SHAPES[1:], (failpoints.PREPARE_SENT, failpoints.PREPARED, failpoints.PREPARED, failpoints.PREPARE_SENT),
             strict=True)),
    ids=str,
)  # fmt: skip
def test_t57_kills_in_every_shape(run: Run, point: str) -> None:
    """T-57, K12: large or streamed, killed at its PREPARE: it comes again, and is prepared once.

    Not streamed and streamed, in memory and from a file: of each two one is killed before and one after its PREPARE.
    """
    daemon = run.start(point)
    gid = run.prepare()
    _wait_killed(daemon)
    # Ended while no daemon runs.
    run.decide(gid, "COMMIT")
    daemon = run.start()
    daemon.wait_caught_up()
    gid = run.prepare()
    run.wait_prepared()
    run.decide(gid, "ROLLBACK")
    run.check(daemon)


def _wait_killed(daemon: Daemon) -> None:
    code = daemon.exit_code(timeout_s=EVENT_TIMEOUT_S)
    assert code == -signal.SIGKILL, f"the point was not reached: exit code {code}\n{daemon.log_tail()}"


# Up to PostgreSQL 16 the WAL writer is woken for every full page, whatever its delay, and there is little to lose.
@pytest.mark.pg_majors(18)
def test_f33_a_target_that_forgets_what_is_not_on_disk(
    source_db: Database, own_servers: OwnServers, start_daemon: StartDaemon
) -> None:
    """F33, T-1: prepared or ended for good, and its record lost in a crash: recorded again, nothing is repeated."""
    server = own_servers("lazy", settings=_LAZY)
    pair = Pair(source_db, create_database(server, "target"), start_daemon)
    pair.create(TABLES)
    run = Run(pair, WHOLE, start_daemon)
    daemon = run.start()
    pair.write("INSERT INTO t VALUES (0, '')", "INSERT INTO evt VALUES (0, '')")
    daemon.wait_caught_up()
    for what, left in (("COMMIT", "committed_prepared"), ("ROLLBACK", "undecided")):
        with _crash_without_a_flush(daemon, pair.target, server):
            gid = run.prepare()
            pair.target.wait_until("SELECT count(*) = 1 FROM parapply.undecided")
        assert _count(pair.target, "undecided") == 0, "it was flushed: this proves nothing"
        assert n_prepared(pair.target) == 1
        daemon.send(signal.SIGCONT)
        pair.target.wait_until("SELECT count(*) = 1 FROM parapply.undecided")
        with _crash_without_a_flush(daemon, pair.target, server):
            run.decide(gid, what)
            pair.target.wait_until("SELECT count(*) = 0 FROM parapply.undecided")
        assert n_prepared(pair.target) == 0
        assert _count(pair.target, left) == 1, "it was flushed: this proves nothing"
        assert pair.target.rows("SELECT in_doubt FROM parapply.progress") == [(int(what == "COMMIT"),)]
        daemon.send(signal.SIGCONT)
        daemon.wait_caught_up()
    run.check(daemon)


def _count(target: Database, table: str) -> int:
    return int(target.rows(f"SELECT count(*) FROM parapply.{table}")[0][0])


@contextmanager
def _crash_without_a_flush(daemon: Daemon, target: Database, server: PgServer) -> Iterator[None]:
    """Keep everything from a flush; then kill the server, start it, and leave the daemon stopped.

    The daemon flushes when it advances, and when it writes its marks once a minute. Holding the row of the watermark
    and the table of marks keeps workers from nothing. The server flushes by its own processes, however long it takes.
    """
    with closing(target.connect()) as holder:
        holder.execute("BEGIN")
        holder.execute("SELECT FROM parapply.slots FOR UPDATE")
        holder.execute("LOCK TABLE parapply.marks IN SHARE ROW EXCLUSIVE MODE")
        for (pid,) in holder.execute(_FLUSHERS).fetchall():
            os.kill(pid, signal.SIGSTOP)
        yield
        server.kill()
    # It must not repair what we are about to look at.
    daemon.pause()
    server.start()
