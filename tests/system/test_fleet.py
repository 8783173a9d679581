"""Several slots in one process: each is as exact as alone, whatever happens to the others, and shares the totals."""

from __future__ import annotations

import json
import re
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from parapply.printable import printable
from tests.fixtures.endpoint import LISTEN, Endpoint, NotifySocket
from tests.fixtures.fleet import Databases, of_slot, wait_for
from tests.fixtures.plain import (
    WORKER_IS_BLOCKED,
    check_equal,
    closed,
    commit_each,
    drop_slot,
    end_sessions,
    foreign_transaction,
    wait_until_unread,
)
from tests.fixtures.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.servers import ServerPool

#: A name that would break out of a connection string, a log line, a file's name and a page.
_HOSTILE = "q\"u'o\\te\n%s ../ü <b> host=x"
_SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname LIKE 'fleet%' AND application_name LIKE 'parapply %'"


@pytest.fixture
def databases(server_pool: ServerPool, pg_major: int, tmp_path: Path, start_daemon: StartDaemon) -> Iterator[Databases]:
    """Databases on the session's servers; asks for `start_daemon` to end before they go."""
    del start_daemon
    found = Databases(server_pool.get("source", pg_major), server_pool.get("target", pg_major), tmp_path / "fleet.toml")
    yield found
    found.drop()


def _caught_up(daemon: Daemon, databases: Databases, *names: str) -> None:
    for name in names:
        databases.routes[name].wait_caught_up(check=daemon.check_running)
        check_equal(databases.routes[name])


def test_each_slot_keeps_on_whatever_happens_to_the_others(databases: Databases, start_daemon: StartDaemon) -> None:
    """One whose publisher refuses, one that loses a session, one with a conflict: each alone, and says so itself.

    All others are equal all the time, and each is once its trouble is over; a reload starts a failed one at once.
    """
    names = ["fleet first", _HOSTILE, "fleet_third"]
    databases.add(*names)
    databases.write(names, LISTEN)
    daemon = databases.start(start_daemon)
    endpoint = Endpoint(daemon)
    one, two, three = databases.routes.values()
    for n, route in enumerate((one, two, three), start=1):
        wait_for(daemon, "source_connected", route)
        commit_each(route.source, 1, 20 * n)
    _caught_up(daemon, databases, *names)

    with closed(three.source):
        wait_for(daemon, "source_lost", three)
        assert end_sessions(one.target, "parapply worker%")
        wait_for(daemon, "target_lost", one)
        for route in (one, two):
            commit_each(route.source, 101, 150)
        _caught_up(daemon, databases, *names[:2])
        status, report = endpoint.health()
        assert status == 503
        assert [(slot["database"], slot["ready"]) for slot in report["slots"]] == list(
            zip(names, (True, True, False), strict=True)
        )
    _caught_up(daemon, databases, "fleet_third")
    assert not of_slot(daemon, "source_lost", one) + of_slot(daemon, "source_lost", two)
    assert not of_slot(daemon, "target_lost", two) + of_slot(daemon, "target_lost", three)

    two.target.execute("INSERT INTO item VALUES (200, 0)")
    commit_each(two.source, 200, 210)
    failed = wait_for(daemon, "slot_failed", two, count=2)
    assert (failed["exit_code"], failed["wait_s"]) == (5, 2)
    commit_each(one.source, 201, 210)
    _caught_up(daemon, databases, "fleet first")
    assert endpoint.health("/healthz/live")[0] == 200
    endpoint.wait_until(lambda: endpoint.health()[1]["slots"][1]["state"] == "stopped")
    assert "insert_exists on public.item" in endpoint.health()[1]["slots"][1]["reason"]
    # The counts of a leader outlive it.
    conflicts = rf'conflicts_total\{{slot="{two.slot}",type="insert_exists",outcome="stopped"'
    counted = rf'parapply_(?:{conflicts}|slot_failures_total\{{slot="{two.slot}")\}} (\d+)\n'
    endpoint.wait_until(lambda: [int(n) >= 2 for n in re.findall(counted, endpoint.get("/metrics")[1])] == [True] * 2)
    stopped = f'parapply_state{{slot="{two.slot}",state="stopped"}} 1\n'
    endpoint.wait_until(lambda: stopped in endpoint.get("/metrics")[1])
    two.target.execute("DELETE FROM item WHERE id = 200")
    daemon.send(signal.SIGHUP)
    assert daemon.wait_for_event("fleet_reloaded")["added"] == []
    _caught_up(daemon, databases, *names)
    daemon.stop()


def test_f12_a_lost_slot_is_healed_while_the_others_keep_on(databases: Databases, start_daemon: StartDaemon) -> None:
    """A transaction of the publisher's holds the heal up, and the other database is equal all the while."""
    databases.add("fleet_lost", "fleet_kept")
    lost, kept = databases.routes.values()
    databases.write(list(databases.routes), {"source.on_lost_slot": "heal"})
    daemon = databases.start(start_daemon)
    for one in (lost, kept):
        wait_for(daemon, "source_connected", one)
        commit_each(one.source, 1, 10)
    _caught_up(daemon, databases, "fleet_lost", "fleet_kept")
    with foreign_transaction(lost.source, "INSERT INTO item VALUES (30, 30)"):
        daemon.pause()
        drop_slot(lost)
        lost.source.execute("UPDATE item SET v = 50 WHERE id = 5")
        daemon.send(signal.SIGCONT)
        wait_for(daemon, "heal_started", lost)
        lost.target.wait_until("SELECT state = 'healing' FROM parapply.slots")
        commit_each(kept.source, 11, 20)
        _caught_up(daemon, databases, "fleet_kept")
        assert not of_slot(daemon, "heal_done", lost)
    wait_for(daemon, "heal_done", lost)
    commit_each(lost.source, 11, 20)
    _caught_up(daemon, databases, "fleet_lost")
    assert not of_slot(daemon, "source_lost", kept) + of_slot(daemon, "slot_failed", lost)
    assert len(of_slot(daemon, "source_connected", kept)) == 1
    daemon.stop()


def test_a_slot_whose_state_is_gone_waits_while_the_others_keep_on(
    databases: Databases, start_daemon: StartDaemon
) -> None:
    """It is refused again and again, and nothing is confirmed; with the state it goes on."""
    databases.add("fleet_gone", "fleet_kept")
    gone, kept = databases.routes.values()
    databases.write([*databases.routes])
    daemon = databases.start(start_daemon)
    for one in (gone, kept):
        wait_for(daemon, "source_connected", one)
        commit_each(one.source, 1, 10)
    _caught_up(daemon, databases, "fleet_gone", "fleet_kept")
    daemon.pause()
    ((kept_lsn,),) = gone.source.rows("SELECT pg_current_wal_lsn()::text")
    commit_each(gone.source, 11, 20)
    gone.target.execute("ALTER SCHEMA parapply RENAME TO dropped")
    end_sessions(gone.target, "parapply%")
    daemon.send(signal.SIGCONT)
    assert "the target no longer knows slot" in wait_for(daemon, "target_refused", gone, count=2)["error"]
    slot = f"FROM pg_replication_slots WHERE slot_name = '{gone.slot}'"
    assert gone.source.rows(f"SELECT confirmed_flush_lsn <= '{kept_lsn}' {slot}") == [(True,)]
    commit_each(kept.source, 11, 20)
    _caught_up(daemon, databases, "fleet_kept")
    gone.target.execute("DROP SCHEMA IF EXISTS parapply CASCADE; ALTER SCHEMA dropped RENAME TO parapply")
    _caught_up(daemon, databases, "fleet_gone")
    assert len(of_slot(daemon, "slot_adopted", gone)) == 1
    daemon.stop()


def test_a_reload_adds_and_removes_slots(databases: Databases, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """The others stay in their epochs. Lines, series, pages and files of the apply log have the slot."""
    databases.add("fleet_old", _HOSTILE, "fleet_new")
    old, kept, new = databases.routes.values()
    settings = {**LISTEN, "applylog.directory": str(tmp_path / "log")}
    databases.write(["fleet_old", _HOSTILE], settings)
    daemon = databases.start(start_daemon)
    endpoint = Endpoint(daemon)
    for route in (old, kept):
        wait_for(daemon, "source_connected", route)
        commit_each(route.source, 1, 20)
    _caught_up(daemon, databases, "fleet_old", _HOSTILE)

    databases.write([_HOSTILE, "fleet_new"], settings)
    daemon.send(signal.SIGHUP)
    reloaded = daemon.wait_for_event("fleet_reloaded")
    assert (reloaded["added"], reloaded["removed"]) == ([new.slot], [old.slot])
    wait_until_unread(old)
    wait_for(daemon, "source_connected", new)
    for route in (new, kept):
        commit_each(route.source, 21, 50)
    _caught_up(daemon, databases, _HOSTILE, "fleet_new")
    assert of_slot(daemon, "daemon_stopped", old)
    assert len(of_slot(daemon, "source_connected", kept)) == 1

    text = endpoint.get("/metrics")[1]
    assert set(re.findall(r'parapply_ready\{slot="(\w+)"\} 1\n', text)) == {kept.slot, new.slot}
    assert text.count("# TYPE parapply_ready gauge") == 1
    overview = endpoint.get("/")[1]
    assert f'<a href="/slots/{kept.slot}">' in overview
    assert "&lt;b&gt;" in overview
    assert endpoint.get(f"/slots/{kept.slot}")[0] == 200
    assert endpoint.get(f"/slots/{old.slot}")[0] == 404
    daemon.stop()
    _check_lines(daemon, {old.slot: "fleet_old", kept.slot: _HOSTILE, new.slot: "fleet_new"})
    files = {path.name.split("-")[1] for path in (tmp_path / "log").iterdir()}
    assert files == {old.slot, kept.slot, new.slot}
    # No folder for the apply log: the slot ends before it has connected, and is no gap in the metrics.
    databases.write([_HOSTILE], {**settings, "applylog.directory": str(tmp_path / "log" / "none")})
    (tmp_path / "log" / "none").write_text("")
    daemon = databases.start(start_daemon)
    wait_for(daemon, "slot_failed", kept)
    assert f'parapply_slot_failures_total{{slot="{kept.slot}"}} ' in Endpoint(daemon).get("/metrics")[1]
    daemon.send(signal.SIGTERM)
    assert daemon.exit_code() == 2


def test_a_removed_slot_finishes_its_work_also_where_all_are_stopped(
    databases: Databases, start_daemon: StartDaemon
) -> None:
    """The first signal asks for an orderly end, also of a slot that a reload has asked before."""
    databases.add("fleet_old", "fleet_new")
    old, kept = databases.routes.values()
    databases.write(["fleet_old", "fleet_new"])
    daemon = databases.start(start_daemon)
    for route in (old, kept):
        wait_for(daemon, "source_connected", route)
    with foreign_transaction(old.target, "LOCK TABLE item, evt"):
        commit_each(old.source, 1, 3)
        old.target.wait_until(WORKER_IS_BLOCKED)
        databases.write(["fleet_new"])
        daemon.send(signal.SIGHUP)
        wait_for(daemon, "drain_started", old)
        daemon.send(signal.SIGTERM)
        wait_for(daemon, "daemon_stopped", kept)
    assert daemon.exit_code() == 0
    assert not daemon.events_of("drain_aborted")
    assert old.target.rows("SELECT count(*) > 0 FROM evt") == [(True,)]


def _check_lines(daemon: Daemon, databases: dict[str, str]) -> None:
    """Fail unless every line is an event, and has slot and database if it is not of the process.

    Raises:
        AssertionError: one is not.
    """
    assert len(daemon.lines) == len(daemon.events)
    of_process = ("fleet_", "metrics_listening")
    for line in daemon.events:
        if not line["event"].startswith(of_process):
            assert databases[line["slot"]] == line["database"], line


def test_the_end_is_the_worst_of_all(databases: Databases, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Ready once each slot is served or has failed; SIGTERM drains all, and the exit code is the failed one's."""
    databases.add("fleet_a", "fleet_b")
    a, b = databases.routes.values()
    databases.write([*databases.routes], {"apply.workers": 2})
    b.target.execute("INSERT INTO item VALUES (7, 0)")
    commit_each(b.source, 7, 7)
    with NotifySocket(tmp_path) as systemd:
        daemon = databases.start(start_daemon, **systemd.environ(watchdog_s=10))
        shown = systemd.wait_for("READY", "1")["STATUS"]
        wait_for(daemon, "slot_failed", b)
        words = f"1 of 2 slots apply; not {b.slot}"
        assert shown == words or systemd.wait_for("STATUS", words)
        assert systemd.wait_for("WATCHDOG")
        commit_each(a.source, 1, 50)
        _caught_up(daemon, databases, "fleet_a")
        daemon.send(signal.SIGTERM)
        assert daemon.exit_code() == 5, daemon.log_tail()
        assert [one for one in systemd.pending() if one.get("STOPPING") == "1"]
    assert daemon.events[-1]["event"] == "fleet_stopped"
    assert of_slot(daemon, "daemon_stopped", a)
    check_equal(a)


def test_a_reload_that_is_wrong_changes_nothing(databases: Databases, start_daemon: StartDaemon) -> None:
    """Neither one with a mistake, nor one without databases, nor another state of one slot is taken."""
    databases.add("fleet_a")
    (a,) = databases.routes.values()
    databases.write(["fleet_a"])
    good = databases.path.read_text(encoding="utf-8")
    daemon = databases.start(start_daemon)
    wait_for(daemon, "source_connected", a)
    for n, (text, says) in enumerate(
        [
            (good + "\napply.workers = 0\n", "apply.workers: must be"),
            (good.split("\n", 1)[1], "the file names none any more"),
            (good + '\ntarget.state_schema = "other"\n', "target.state_schema: another one needs another daemon"),
        ],
        start=1,
    ):
        databases.path.write_text(text, encoding="utf-8")
        daemon.send(signal.SIGHUP)
        assert says in daemon.wait_for_event("config_refused", count=n)["error"]
    commit_each(a.source, 1, 20)
    _caught_up(daemon, databases, "fleet_a")
    assert len(daemon.events_of("source_connected")) == 1
    databases.path.write_text(good + "\napply.max_batch_changes = 7\n", encoding="utf-8")
    daemon.send(signal.SIGHUP)
    assert wait_for(daemon, "config_reloaded", a)["settings"] == ["apply.max_batch_changes"]
    wait_for(daemon, "source_connected", a, count=2)
    daemon.stop()


def test_the_sessions_are_never_more_than_the_total(databases: Databases, start_daemon: StartDaemon) -> None:
    """Workers go where the backlog is; the others keep their two, and all sessions together never exceed the total."""
    names = [f"fleet_{n}" for n in range(3)]
    databases.add(*names)
    most = 3 * 6 + 4
    databases.write(names, {"fleet.max_connections": most})
    first, *others = databases.routes.values()
    counts: list[int] = []
    ended = threading.Event()

    def count() -> None:
        with first.target.connect(application_name="counter") as connection:
            while not ended.wait(0.02):
                row = connection.execute(_SESSIONS.encode()).fetchone()
                counts.append(row[0] if row else 0)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        # Each row waits, so that more workers are quicker.
        first.target.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(0.002); RETURN new; END';"
            "CREATE TRIGGER slow BEFORE INSERT ON item FOR EACH ROW EXECUTE FUNCTION slow();"
            "ALTER TABLE item ENABLE ALWAYS TRIGGER slow"
        )
        first.source.execute("ALTER PUBLICATION pub SET TABLE item")
        commit_each(first.source, 1, 4000)
        daemon = databases.start(start_daemon, "--set", 'apply.tables."public.item".parallel=always',
                                 "--set", "target.apply_as=role", "--set", "apply.max_batch_changes=50")  # fmt: skip
        for route in others:
            wait_for(daemon, "source_connected", route)
            commit_each(route.source, 1, 20)
        assert wait_for(daemon, "workers_changed", first)["workers"] > 2
        first.wait_caught_up(check=daemon.check_running)
        _caught_up(daemon, databases, *names[1:])
        check_equal(first, "item")
        daemon.stop()
    finally:
        ended.set()
        counter.join()
    assert 3 * 5 < max(counts) <= most
    assert not [line for route in others for line in of_slot(daemon, "workers_changed", route)]


def test_commands_about_several_databases(
    databases: Databases, start_daemon: StartDaemon, run_command: RunCommand, tmp_path: Path
) -> None:
    """One table, one document and the worst exit code: from a file of several, and from a template.

    Templates and databases that allow no connections are left out by name; an error of one stops no other.
    """
    names = ["fleet_a", _HOSTILE]
    databases.add(*names, "fleet_closed")
    databases.write(names)
    a, b, shut = databases.routes.values()
    template = tmp_path / "template.toml"
    template.write_text(databases.path.read_text(encoding="utf-8").split("\n", 1)[1], encoding="utf-8")

    def run(command: str, *arguments: str, code: int, path: Path = databases.path) -> str:
        done = run_command(databases.file_route(), command, "--config", str(path), *arguments, code=code)
        return done.stdout + done.stderr

    def shown(command: str, *arguments: str, code: int, path: Path = databases.path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(command, "--json", *arguments, code=code, path=path))
        assert found["exit_code"] == code
        return found

    # Neither has a state yet: each has a separate error.
    assert [(one["database"], one["exit_code"]) for one in shown("status", code=4)["databases"]] == [
        (name, 4) for name in names
    ]
    daemon = databases.start(start_daemon)
    for route in (a, b):
        wait_for(daemon, "source_connected", route)
        commit_each(route.source, 1, 20)
    _caught_up(daemon, databases, *names)
    first, *lines = run("status", code=0).splitlines()
    assert first.split() == ["database", "slot", "exit", "result"]
    assert [line.split()[0] for line in lines] == ["fleet_a", printable(_HOSTILE).split()[0]]
    assert ["  running, " in line for line in lines] == [True] * 2

    b.target.execute("UPDATE item SET v = 8 WHERE id = 7")
    only = ("--include-databases", "fleet_a", "--include-databases", _HOSTILE)
    with closed(shut.source):
        verified = shown("verify", "--all-databases", *only, code=1, path=template)
        assert "'fleet_closed': it allows no connections" in run(
            "verify", "--include-databases", "fleet_closed", code=2, path=template
        )
    chosen = shown("status", "--all-databases", *only, "--exclude-databases", _HOSTILE, code=0, path=template)
    assert [one["database"] for one in chosen["databases"]] == ["fleet_a"]
    results = {one["database"]: one["report"]["is_equal"] for one in verified["databases"]}
    assert results == {"fleet_a": True, _HOSTILE: False}
    left_out = {one["database"]: one["reason"] for one in verified["left_out"]}
    assert (left_out["template0"], left_out["fleet_closed"]) == ("a template", "it allows no connections")

    checked = shown("check", "--exclude-databases", _HOSTILE, code=1)
    assert [one["report"]["slot_name"] for one in checked["databases"]] == [a.slot]
    assert "no database 'fleet_b'; did you mean fleet_a?" in run("check", "--exclude-databases", "fleet_b", code=2)
    none = [word for name in names for word in ("--exclude-databases", name)]
    assert "no database is left" in run("check", *none, code=2)
    assert "give --database NAME" in run("refresh", code=2)
    daemon.kill()
    a.target.wait_until(_SESSIONS.replace("count(*)", "count(*) = 0"))
    killed = run("status", code=0).splitlines()[1:]
    assert ["  no daemon runs (running), " in line for line in killed] == [True] * 2


def test_top_of_several(databases: Databases, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """A line for each database; a key opens the one that is chosen, and another goes back to all."""
    databases.add("fleet_a", _HOSTILE)
    databases.write(["fleet_a", _HOSTILE])
    daemon = databases.start(start_daemon)
    for route in databases.routes.values():
        wait_for(daemon, "source_connected", route)
    once = run_command(databases.file_route(), "top", "--config", str(databases.path), "--once")
    assert (once.returncode, len(once.stdout.splitlines())) == (0, 3), once
    shown = Terminal(["top", "--config", str(databases.path), "--interval", "0.2"])
    try:
        shown.wait_for("behind")
        shown.press("s")
        shown.press("j")
        shown.press("\r")
        shown.wait_for("complete up to")
        shown.press("\x1b")
        shown.wait_for("behind")
        shown.press("q")
        assert shown.exit_code() == 0
    finally:
        shown.close()
