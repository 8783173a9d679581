"""`source.retained_wal_limit_bytes`: too much WAL is reported, a copy pauses for it, or the slot is dropped for it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import pytest

from parapply import connect, failpoints, retention
from parapply.commands import lifecycle
from parapply.config import load_config
from parapply.copy import command, slot_guard
from parapply.copy.published import published_tables
from parapply.errors import ParapplyError, TargetRefused
from parapply.source import slot
from parapply.target.session import lease
from parapply.tasks import end_tasks
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST, check_equal, commit_each, plain_route
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.config import Config
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_DROPS: dict[str, str | float] = {"source.retained_wal_limit_bytes": 1, "source.on_retained_wal": "drop_slot"}
_MEGABYTE = 1024 * 1024
#: Of a table that is not published, as what an application writes besides.
_WRITE = "CREATE TABLE other (t text); INSERT INTO other SELECT repeat('x', 2000) FROM generate_series(1, 10000)"


@pytest.fixture
def route(source_db: Database, target_db: Database) -> Route:
    """Plain tables and a slot."""
    return plain_route(source_db, target_db, make_slot)


def _slots(route: Route) -> list[tuple[object, ...]]:
    return route.source.rows(f"SELECT slot_name FROM pg_replication_slots WHERE slot_name = '{route.slot}'")


def test_too_much_wal_is_reported_and_changes_nothing(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """By default the limit is one event, and a reason in the state; the daemon applies on."""
    daemon = start_daemon(route, settings={"source.retained_wal_limit_bytes": 1})
    event = daemon.wait_for_event("retained_wal_exceeded")
    assert (event["level"], event["limit_bytes"], event["action"]) == ("warning", 1, "warn")
    commit_each(route.source, 1, 10)
    daemon.wait_caught_up()
    route.target.wait_until("SELECT reason LIKE '%source.retained_wal_limit_bytes is 1' FROM parapply.slots")
    shown = run_command(route, "status", "--set", "source.retained_wal_limit_bytes=1")
    assert "MORE than source.retained_wal_limit_bytes, 1" in " ".join(shown.stdout.split())
    document = json.loads(run_command(route, "status", "--json", "--set", "source.retained_wal_limit_bytes=1").stdout)
    assert document["source"]["slot_retained_wal_limit_bytes"] == 1
    daemon.stop()
    check_equal(route)
    assert len(daemon.events_of("retained_wal_exceeded")) == 1


def test_f22_the_slot_is_dropped_for_the_disk_of_the_publisher(
    route: Route, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """Asked for, the slot goes; what is lost and what helps is named, and shown by this and by each later daemon."""
    commit_each(route.source, 1, 10)
    daemon = start_daemon(route, settings=_DROPS)
    lost = daemon.wait_for_event("slot_dropped")["reason"]
    assert daemon.exit_code() == 3, daemon.log_tail()
    assert _slots(route) == []
    shown = "SELECT lowest_remote_lsn::text, state, reason FROM parapply.progress"
    ((low_lsn, state, reason),) = route.target.rows(shown)
    assert f"committed on the publisher after {low_lsn} is missing" in lost
    assert state == "lost"
    assert lost in reason
    for said in (daemon.failure, reason):
        assert "Hint: `parapply heal`" in said
    again = start_daemon(route)
    assert again.exit_code() == 3
    assert "is no longer on the publisher" in again.failure
    assert route.target.rows("SELECT state FROM parapply.progress") == [("lost",)]
    assert "lost" in run_command(route, "status").stdout
    run_command(route, "heal", code=0)
    check_equal(route)
    assert route.target.rows("SELECT state FROM parapply.progress") == [("stopped",)]


def _config(route: Route) -> Config:
    overrides = [word for word in route.arguments({**FAST, **_DROPS}) if "=" in word and not word.startswith("--")]
    flags = {
        "source.dsn": route.source.source_role_dsn, "source.slot": route.slot, "source.publications": ["pub"],
        "target.dsn": route.target.target_role_dsn,
    }  # fmt: skip
    texts = [text for text in overrides if re.match(r"[a-z]+\.[a-z_]+=", text)]
    return load_config(None, texts, flags, {})


def _give_up(route: Route, *, is_asked: bool = True) -> str:
    """Return what is said of a slot that is to be dropped; empty if it stays without a word."""
    try:
        lost = asyncio.run(retention.give_up(_config(route), lambda _: None, lambda: is_asked))
    except ParapplyError as error:
        return str(error)
    return "" if lost is None else str(lost)


def test_only_the_slot_that_the_target_follows_is_dropped(route: Route, start_daemon: StartDaemon) -> None:
    """A slot that another program has made, that another process reads, or that was made again, stays."""
    name, drop = route.slot, f"SELECT pg_drop_replication_slot('{route.slot}')"
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    assert "another parapply holds the lease" in _give_up(route)
    daemon.stop()
    # A reload in the last moment took the setting away.
    assert _give_up(route, is_asked=False) == ""
    assert _slots(route) == [(name,)]
    route.source.execute(drop)
    route.source.execute(f"SELECT pg_create_physical_replication_slot('{name}')")
    assert "is not one of parapply's" in _give_up(route)
    route.source.execute(drop)
    # Behind what the target has: another program may count on it.
    commit_each(route.source, 1, 10)
    route.source.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    assert _give_up(route) == ""
    assert _slots(route) == [(name,)]


def test_a_daemon_that_is_to_end_drops_no_slot(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """SIGTERM while it waits, to drop the slot, for the last session that wrote: it ends, and the slot stays."""
    held = tmp_path / f"{failpoints.DRAIN}.held"
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.DRAIN}:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    daemon = start_daemon(route, settings=_DROPS, environ=environ)
    while not held.exists():
        assert daemon.runs_for(0.02), daemon.log_tail()
    ((slot_id,),) = route.target.rows("SELECT slot_id FROM parapply.slots")
    with route.target.connect() as foreign:
        foreign.execute("SELECT pg_advisory_lock_shared(%s, %s)", [lease.LOCK_CLASS, lease.worker_key(slot_id)])
        held.unlink()
        daemon.wait_for_event("lease_waiting")
        daemon.stop()
    assert _slots(route) == [(route.slot,)]


async def test_a_paused_copy_says_that_no_daemon_frees_wal(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a daemon that has ended since: the operator hears of it."""
    said: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr("click.echo", lambda text, err: said.put_nowait(text))
    waiting = asyncio.create_task(slot_guard.until_free(_config(route), 1))
    text = await asyncio.wait_for(said.get(), 30)
    await end_tasks([waiting])
    assert "No daemon reads the slot" in text


def test_a_paused_copy_ends_where_its_state_was_removed(
    route: Route, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no lock by then, so `drop` succeeds. That another slot is left in the schema changes nothing."""
    other = replace(route, slot=f"{route.slot}_other")
    for one in (route, other):
        run_command(one, "init", code=0)

    async def drop(config: Config, _: int) -> None:
        await lifecycle.drop_one(config)

    async def go_on(*, is_left: bool) -> None:
        config = _config(route)
        async with connect.open_both(config, "refresh") as ends:
            facts = await slot.inspect(ends.source, route.slot)
            found = await connect.known_state(config, ends.target, facts.system_identifier)
            assert found is not None
            published = await published_tables(ends.source, config.source.publications, config.mapping)
            if not is_left:
                await ends.source.close()
            copy = command._Copy(config, ends, command.CopyOptions())
            await copy.go_on_after_pause(found, published if is_left else [])

    monkeypatch.setattr(slot_guard, "until_free", AsyncMock())
    # A session that broke in the pause is not missed where nothing is left.
    asyncio.run(go_on(is_left=False))
    monkeypatch.setattr(slot_guard, "until_free", drop)
    with pytest.raises(TargetRefused, match="was removed while its copy waited"):
        asyncio.run(go_on(is_left=True))
    run_command(other, "drop", "--yes", code=0)


def test_a_copy_pauses_while_the_slot_keeps_too_much(route: Route, start_daemon: StartDaemon) -> None:
    """A copy that holds the daemon up gives way to it, and goes on when the WAL is free. Nothing is lost."""
    limits: dict[str, str | float] = {
        "source.retained_wal_limit_bytes": 8 * _MEGABYTE, "source.on_retained_wal": "pause_copy",
    }  # fmt: skip
    daemon = start_daemon(route)
    commit_each(route.source, 1, 10)
    daemon.wait_caught_up()
    with route.target.connect() as foreign:
        foreign.execute("BEGIN; LOCK TABLE evt IN SHARE MODE")
        arguments = ("--table", "public.evt", "--truncate")
        copy = start_daemon(route, *arguments, settings={**FAST, **limits}, verb="refresh")
        route.target.wait_until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE"
                                " 'parapply copy%' AND wait_event_type = 'Lock')")  # fmt: skip
        commit_each(route.source, 11, 20)
        daemon.wait_for_event("table_awaited")
        route.source.execute(_WRITE)
        copy.wait_for_line("the copy pauses: the slot keeps")
        daemon.wait_caught_up()
        foreign.execute("COMMIT")
    assert route.target.rows("SELECT count(*) FROM item") == [(20,)]
    route.source.execute("CHECKPOINT")
    copy.wait_for_line("the copy goes on")
    assert copy.exit_code() == 0, copy.log_tail()
    commit_each(route.source, 21, 30)
    daemon.finish()
    check_equal(route)


def test_a_copy_without_a_daemon_drops_the_slot(
    source_db: Database, target_db: Database, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """No daemon looks while the first copy runs, so the copy does: its slot goes, and the state says so."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE item (id int PRIMARY KEY, v int NOT NULL)")
    source_db.execute("INSERT INTO item VALUES (1, 1), (2, 2); CREATE PUBLICATION pub FOR TABLE item")
    made = Route(source=source_db, target=target_db, settings={**FAST, **_DROPS})
    with target_db.connect() as foreign:
        foreign.execute("BEGIN; LOCK TABLE item IN SHARE MODE")
        copy = start_daemon(made, "--copy", verb="init")
        copy.wait_for_line("was dropped: the slot keeps")
        assert copy.exit_code() == 3, copy.log_tail()
    assert _slots(made) == []
    assert target_db.rows("SELECT state FROM parapply.slots") == [("lost",)]
    healed = run_command(made, "heal", code=0)
    assert "its first copy was interrupted" in healed.stdout
    check_equal(made, "item")
