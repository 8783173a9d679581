"""`parapply seed`: a physical copy of the publisher joins the slot where its recovery ended, with each row once."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from parapply import failpoints
from parapply.config import load_config
from parapply.demo.server import PgServer
from parapply.errors import SourceRefused
from parapply.seed.command import SeedOptions, prepare, seed
from parapply.source import failover
from tests.fixtures.databases import Database, create_database
from tests.fixtures.physical import base_backup, clone_files, follow, upgrade
from tests.fixtures.plain import FAST, TABLES, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from parapply.config import Config
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.crash

_SOURCE_REFUSED, _TARGET_REFUSED = 3, 4
#: Large transactions are streamed.
_SETTINGS: Final = {"logical_decoding_work_mem": "64kB"}
_MORE_TABLES: Final = "CREATE TABLE big (id int PRIMARY KEY, v text); CREATE UNLOGGED TABLE scratch (n int)"


class Writers:
    """Sessions that write to the publisher: `evt` has no key, so that a transaction applied twice shows."""

    def __init__(self, source: Database) -> None:
        """Write nothing yet."""
        self._source = source
        self._ends = threading.Event()
        self._passed = threading.Condition()
        self._n_committed = 0

    @contextmanager
    def running(self) -> Iterator[Writers]:
        """Write while the block runs."""
        threads = [threading.Thread(target=self._write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            for thread in threads:
                thread.join()

    def wait_for_more(self, count: int) -> None:
        """Return once that many more transactions are committed.

        Raises:
            AssertionError: they are not within a minute.
        """
        with self._passed:
            wanted = self._n_committed + count
            assert self._passed.wait_for(lambda: self._n_committed >= wanted, 60.0)

    def _write(self, number: int) -> None:
        with self._source.connect() as session:
            at = number
            while not self._ends.is_set():
                at += 2
                rows = 300 if at % 50 < 2 else 1
                session.execute(
                    f"BEGIN; INSERT INTO item VALUES ({at}, 0);"
                    f" INSERT INTO evt SELECT {at} FROM generate_series(1, {rows});"
                    f" UPDATE item SET v = v + 1 WHERE id = {at - 10}; COMMIT".encode()
                )
                with self._passed:
                    self._n_committed += 1
                    self._passed.notify_all()


def _publisher(own_servers: OwnServers) -> Database:
    return _publisher_on(own_servers("publisher", settings=_SETTINGS))


def _publisher_on(server: PgServer) -> Database:
    source = create_database(server, "app")
    source.execute(f"{TABLES} {_MORE_TABLES}")
    source.execute("INSERT INTO scratch VALUES (1)")
    return source


def _route(source: Database, copy: PgServer, **settings: str) -> Route:
    """Return the route into a copy, by superusers."""
    target = Database(dbname="app", server=copy)
    more = {name.replace("__", "."): value for name, value in settings.items()}
    return Route(
        source=source, target=target, source_dsn=source.dsn, target_dsn=target.dsn, slot="app", publication="app",
        settings={**FAST, **more},
    )  # fmt: skip


def _own(database: Database) -> PgServer:
    assert isinstance(database.server, PgServer)
    return database.server


def _promote(copy: PgServer) -> None:
    copy.execute("SELECT pg_promote()")


def _joins_at(output: str) -> str:
    found = re.search(r"the copy joins at ([0-9A-F]+/[0-9A-F]+)", output)
    assert found is not None, output
    return found[1]


@pytest.mark.pg_majors(15, 16, 18)
@pytest.mark.parametrize("two_phase", ["false", "true"])
def test_a_standby_promoted_under_load_becomes_a_target(
    own_servers: OwnServers, run_command: RunCommand, start_daemon: StartDaemon, two_phase: str
) -> None:
    """No row is lost or doubled, also of transactions in progress or prepared at the end of the copy.

    `seed` is killed at each of its points. Before it has ended neither `run` nor `init` takes the slot over.
    """
    source, copy = _publisher(own_servers), own_servers("copy")
    made = _route(source, copy, source__two_phase=two_phase)
    with Writers(source).running() as writers:
        run_command(made, "seed", "--prepare", code=0)
        again = run_command(made, "seed", "--prepare")
        assert (again.returncode, "made" in again.stdout) == (0, False), again.stderr
        base_backup(_own(source), copy)
        follow(_own(source), copy)
        refused = run_command(made, "seed")
        assert (refused.returncode, "is in recovery" in refused.stderr) == (_TARGET_REFUSED, True), refused.stderr
        source.execute("BEGIN; INSERT INTO big VALUES (1, 'kept'); PREPARE TRANSACTION 'kept'")
        source.execute("BEGIN; INSERT INTO big VALUES (2, 'not kept'); PREPARE TRANSACTION 'not kept'")
        with source.connect() as open_session:
            open_session.execute("BEGIN")
            open_session.execute("INSERT INTO big SELECT i, repeat('x', 100) FROM generate_series(10, 5000) AS i")
            ((lsn,),) = source.rows("SELECT pg_current_wal_insert_lsn()::text")
            writers.wait_for_more(random.randrange(10, 200))
            Database(dbname="app", server=copy).wait_until(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'")
            _promote(copy)
            for command in ("run", "init"):
                refused = run_command(made, command)
                assert "is a physical copy of the publisher" in refused.stdout + refused.stderr, refused.stderr
            refused = run_command(made, "seed", code=_TARGET_REFUSED)
            assert "2 prepared came along (kept, not kept)" in refused.stderr
            for point in failpoints.SEED_NAMES:
                killed = run_command(
                    made, "seed", "--clean", "prepared", environ={"PARAPPLY_FAILPOINT": f"{point}:kill"}
                )
                assert killed.returncode == -signal.SIGKILL, (point, killed.stdout, killed.stderr)
            done = run_command(made, "seed", "--clean", "prepared", code=0)
            assert "nothing to copy" in done.stdout
            assert made.target.rows("SELECT count(*) FROM pg_prepared_xacts") == [(0,)]
            daemon = start_daemon(made)
            daemon.wait_for_event("source_connected")
            open_session.execute("COMMIT")
        source.execute("COMMIT PREPARED 'kept'")
        source.execute("ROLLBACK PREPARED 'not kept'")
        writers.wait_for_more(50)
    daemon.wait_caught_up()
    run_command(made, "verify", "--sampled", "3", code=0)
    daemon.stop()
    check_equal(made, "item", "evt", "big")
    assert made.target.rows("SELECT count(*) FROM big WHERE id < 10") == [(1,)]


@pytest.mark.pg_majors(16)
def test_a_backup_recovered_to_an_lsn_joins_there(
    own_servers: OwnServers, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """The same by a recovery target; a copy that ends before the slot begins is refused, and nothing is changed.

    The daemon goes on after a kill and a crash of the publisher, whose slot is before the copy's end then.
    """
    source, old, copy = _publisher(own_servers), own_servers("old"), own_servers("copy")
    source.execute("CREATE PUBLICATION app FOR TABLE item, evt, big")
    early, made = _route(source, old), _route(source, copy, source__catch_up_enter_bytes="2")
    with Writers(source).running() as writers:
        writers.wait_for_more(20)
        base_backup(_own(source), old)
        follow(_own(source), old)
        _promote(old)
        run_command(made, "seed", "--prepare", code=0)
        refused = run_command(early, "seed")
        assert (refused.returncode, "is missing on the copy" in refused.stderr) == (_SOURCE_REFUSED, True)
        assert early.target.rows("SELECT to_regnamespace('parapply')") == [(None,)]
        base_backup(_own(source), copy)
        follow(_own(source), copy)
        # A standby of the publisher and a promoted copy are two databases, although both have one identifier.
        for target, is_one in ((old, False), (copy, True)):
            checked = run_command(_route(made.target, target), "check")
            assert ("lead to one database" in checked.stdout + checked.stderr) == is_one, checked.stderr
        copy.stop()
        writers.wait_for_more(30)
        ((lsn,),) = source.rows("SELECT pg_current_wal_insert_lsn()::text")
        follow(_own(source), copy, recovery_target_lsn=lsn, recovery_target_action="promote")
        made.target.wait_until("SELECT NOT pg_is_in_recovery()")
        dry = run_command(made, "seed", "--dry-run", code=0)
        assert "UNLOGGED tables are empty here, and the stream does not bring them: public.scratch" in dry.stdout
        assert made.target.rows("SELECT to_regnamespace('parapply')") == [(None,)]
        with made.target.connect() as session:
            session.execute("BEGIN; INSERT INTO item VALUES (-1, -1); ROLLBACK")
        made.target.wait_until("SELECT n_tup_ins > 0 FROM pg_stat_user_tables WHERE relname = 'item'")
        refused = run_command(made, "seed")
        assert (refused.returncode, "have written to published" in refused.stderr) == (_TARGET_REFUSED, True)
        done = run_command(made, "seed", "--despite", "writes", code=0)
        assert made.target.rows(f"SELECT '{_joins_at(done.stdout)}'::pg_lsn >= '{lsn}'") == [(True,)]
        source.execute("ALTER PUBLICATION app DROP TABLE big")
        source.execute("INSERT INTO big VALUES (1, 'not sent')")
        source.execute("ALTER PUBLICATION app ADD TABLE big")
        writers.wait_for_more(20)
    killed = start_daemon(made, environ={"PARAPPLY_FAILPOINT": f"{failpoints.COMMITTED}:kill"})
    assert killed.exit_code() == -signal.SIGKILL, killed.log_tail()
    # The slot is before the copy's end again.
    _own(source).crash()
    _own(source).start()
    daemon = start_daemon(made)
    daemon.wait_for_event("table_waits")
    daemon.finish()
    check_equal(made)
    assert made.target.rows("SELECT table_name FROM parapply.copies WHERE state = 'waiting'") == [("big",)]


@pytest.mark.pg_majors(18)
def test_what_came_along_is_refused_by_name_and_cleaned(
    own_servers: OwnServers,
    run_command: RunCommand,
    start_daemon: StartDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots, subscriptions, jobs and states that came with cloned files stop it until their kind is named.

    A clone that was started without a recovery is refused, and so is two_phase of a failover slot of 17, before
    anything is made. The copy takes over from the server whose identifier it has.
    """
    source, other = _publisher(own_servers), own_servers("other")
    wild, copy = own_servers("wild"), own_servers("copy")
    upstream = create_database(other, "up")
    upstream.execute("CREATE TABLE u (n int); CREATE PUBLICATION up FOR TABLE u; INSERT INTO u VALUES (1)")
    source.execute("CREATE TABLE u (n int); CREATE SCHEMA cron; CREATE PUBLICATION app FOR TABLES IN SCHEMA public")
    source.execute(
        "CREATE TABLE cron.job (jobid bigint PRIMARY KEY, active bool); INSERT INTO cron.job VALUES (7, true)"
    )
    source.execute("CREATE TABLE cron.noted (n int)")
    source.execute(
        "CREATE FUNCTION cron.note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO cron.noted VALUES (1);"
        " RETURN NULL; END'; CREATE TRIGGER noted AFTER UPDATE ON cron.job EXECUTE FUNCTION cron.note()"
    )
    source.execute(f"CREATE SUBSCRIPTION su CONNECTION '{upstream.dsn}' PUBLICATION up")
    into = Route(source=upstream, target=source, slot="into", publication="up", settings=FAST)
    run_command(into, "init", code=0)
    made = _route(source, copy)
    _check_refused_on_17(made, prepare, monkeypatch)
    assert source.rows("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'app'") == [(0,)]
    run_command(made, "seed", "--prepare", code=0)
    source.execute("INSERT INTO item VALUES (1, 1)")
    publisher = _own(source)
    publisher.stop()
    clone_files(publisher, wild)
    clone_files(publisher, copy)
    publisher.start()
    for server in (wild, copy):
        server.configure({"max_logical_replication_workers": 0})
    wild.start()
    refused = run_command(_route(source, wild), "seed")
    assert (refused.returncode, "started without a recovery" in refused.stderr) == (_TARGET_REFUSED, True)
    follow(publisher, copy)
    _promote(copy)
    wrong = run_command(made, "seed", "--despite", "prepared")
    assert (wrong.returncode, "seed cannot go on with that" in wrong.stderr) == (2, True)
    refused = run_command(made, "seed", code=_TARGET_REFUSED)
    for text in ("1 subscriptions came along (su)", "1 slots came along (app)", "1 jobs came along (7)",
                 "1 states came along (into)"):  # fmt: skip
        assert text in refused.stderr, refused.stderr
    _check_refused_on_17(made, lambda config: seed(config, SeedOptions()), monkeypatch)
    run_command(made, "seed", *[word for kind in ("subscriptions", "slots", "jobs", "states", "publications")
                                       for word in ("--clean", kind)], code=0)  # fmt: skip
    left = (
        "SELECT (SELECT count(*) FROM pg_subscription WHERE subenabled OR subslotname IS NOT NULL),"
        " (SELECT count(*) FROM pg_publication), (SELECT count(*) FROM cron.job WHERE active),"
        " (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM cron.noted)"
    )
    assert made.target.rows(left) == [(0, 0, 0, 0, 1)]
    assert made.target.rows("SELECT slot_name FROM parapply.slots") == [("app",)]
    assert upstream.rows("SELECT count(*) FROM pg_replication_slots WHERE slot_name IN ('su', 'into')") == [(2,)]
    daemon = start_daemon(made)
    source.execute("INSERT INTO item VALUES (2, 2)")
    daemon.wait_caught_up()
    refused = run_command(made, "seed", "--clean", "slots")
    assert (refused.returncode, "a daemon has applied changes" in refused.stderr) == (_TARGET_REFUSED, True)
    source.execute("ALTER SUBSCRIPTION su DISABLE")
    _cut_over_and_follow(made, run_command, start_daemon, tmp_path)


def _check_refused_on_17(
    made: Route, work: Callable[[Config], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a failover slot with two_phase is refused where the server is one of 17 for all that counts."""
    flags = {
        "source.dsn": made.source_dsn, "target.dsn": made.target_dsn, "source.slot": made.slot,
        "source.publications": (made.publication,), "source.failover": "auto", "source.two_phase": True,
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(failover, "_TWO_PHASE_SINCE", 190000)
        with pytest.raises(SourceRefused, match="before PostgreSQL 18"):
            asyncio.run(work(load_config(None, (), flags, {})))


def _cut_over_and_follow(made: Route, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Let the copy take the writes, and the publisher follow it."""
    printed = run_command(made, "cutover", "--print-reverse", code=0)
    path = tmp_path / "back.toml"
    path.write_text(printed.stdout, encoding="utf-8")
    run_command(made, "cutover", "--reverse", str(path), code=0)
    back = Route(
        source=made.target, target=made.source, source_dsn=made.target_dsn, target_dsn=made.source_dsn,
        slot=_reverse(printed.stdout, "slot"), publication=_reverse(printed.stdout, "publications"), settings=FAST,
    )  # fmt: skip
    daemon = start_daemon(back)
    made.target.execute("INSERT INTO item VALUES (-3, 3)")
    daemon.finish()
    check_equal(made)
    assert made.source.rows("SELECT v FROM item WHERE id = -3") == [(3,)]


def _reverse(text: str, key: str) -> str:
    found = re.search(rf'^{key} = \[?"(.*?)"', text, re.MULTILINE)
    assert found is not None, text
    return found[1]


@pytest.mark.needs_majors(15, 18)
def test_a_copy_is_upgraded_and_takes_over(
    own_servers: OwnServers, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """From 15 to 18 by pg_upgrade of a copy that has joined: the state comes along, and no row is lost or doubled."""
    server = own_servers("publisher", major=15, settings=_SETTINGS)
    source, old, new = _publisher_on(server), own_servers("old", major=15), own_servers("new", major=18)
    made = _route(source, old)
    with Writers(source).running() as writers:
        run_command(made, "seed", "--prepare", code=0)
        base_backup(server, old)
        follow(server, old)
        writers.wait_for_more(50)
        _promote(old)
        run_command(made, "seed", code=0)
        upgrade(old, new)
        upgraded = _route(source, new)
        again = run_command(upgraded, "seed")
        assert (again.returncode, "nothing to copy" in again.stdout) == (0, True), again.stderr
        daemon = start_daemon(upgraded)
        daemon.wait_for_event("source_connected")
        writers.wait_for_more(50)
    daemon.wait_caught_up()
    run_command(upgraded, "verify", code=0)
    check_equal(upgraded)
    _cut_over_and_follow(upgraded, run_command, start_daemon, tmp_path)
