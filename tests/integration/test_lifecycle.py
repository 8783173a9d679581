"""`init`, `drop`, `wait` and `status` on two real servers, without a daemon."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec.structs import replace
from psycopg import sql

from parapply import connect
from parapply.commands import lifecycle, status
from parapply.commands import state_reader as reading
from parapply.commands.conflicts import replay_conflicts
from parapply.config import Config, load_config
from parapply.config_mapping import MappingConfig, TargetPlace
from parapply.conflict.listing import Filter
from parapply.copy import left_out
from parapply.errors import LeaseHeld, ParapplyError, SlotBusy, SourceRefused, StateClosed, TargetRefused
from parapply.init import init
from parapply.login import Login
from parapply.migrate import follow
from parapply.model import format_lsn, parse_lsn
from parapply.source import failover
from parapply.target.session import lease, settings
from parapply.target.state import copies, migrations
from parapply.target.state import slots as state
from parapply.top.layout import state_text
from parapply.vocabulary import CopyState, DaemonState, MigrationStep
from tests.fixtures.documents import blocks

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.databases import Database

SCHEMA = 'my "state" %s'
#: A process that runs until it gets a line.
_UNTIL_TOLD = (sys.executable, "-c", "input()")


@dataclass(frozen=True)
class Pair:
    """Two databases with one published table, and the configuration that joins them."""

    source: Database
    target: Database
    config: Config

    @property
    def slot(self) -> str:
        """Name of the slot."""
        return self.config.source.slot

    def state(self, query: str) -> list[tuple[object, ...]]:
        """Return rows of a query in which {s} stands for the state schema."""
        return self.target.rows(sql.SQL(query).format(s=sql.Identifier(SCHEMA)))

    def advance(self, lsn: int) -> None:
        """Move the watermark as the daemon does."""

        async def run() -> None:
            async with await connect.open_target(self.config, "test") as conn:
                found = await state.load(
                    conn, SCHEMA, self.slot, str(self.state("SELECT system_identifier FROM {s}.slots")[0][0])
                )
                assert found
                await state.advance(
                    conn, SCHEMA, found.slot_id, state.SlotProgress(low_lsn=lsn, high_lsn=lsn, state="streaming")
                )

        asyncio.run(run())


@pytest.fixture
def pair(source_db: Database, target_db: Database) -> Pair:
    """Make a published table on both sides; the slot goes with its database."""
    source_db.execute("CREATE TABLE t (i int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    target_db.execute("CREATE TABLE t (i int PRIMARY KEY)")
    flags = {
        "source.dsn": source_db.dsn,
        "source.slot": f"s_{secrets.token_hex(4)}",
        "source.publications": ("p",),
        "target.dsn": target_db.dsn,
        "target.state_schema": SCHEMA,
    }
    return Pair(source_db, target_db, load_config(flags=flags, environ={}))


def changed(config: Config, section: str, **values: object) -> Config:
    """Return the configuration with other values in one section."""
    return replace(config, **{section: replace(getattr(config, section), **values)})


@pytest.mark.pg_majors(15, 18)
def test_init_makes_slot_and_state_once(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The state starts where the slot does; a second init changes nothing and says so."""
    init(pair.config)
    slots = pair.source.rows(
        "SELECT slot_name, confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = current_database()"
    )
    assert pair.state("SELECT slot_name, lowest_remote_lsn::text FROM {s}.progress") == slots
    assert "starts at" in capsys.readouterr().out
    init(pair.config)
    assert "nothing to do" in capsys.readouterr().out
    assert pair.state("SELECT count(*) FROM {s}.slots") == [(1,)]


def test_init_adopts_a_slot(pair: Pair) -> None:
    """A slot that exists while the target knows nothing of it is adopted at its own position.

    Not while it is a subscription's that has yet to copy a table, whose rows of before would be missing for ever. Once
    it was read, only if asked to: the target may be new, and lack what the reader has confirmed.
    """
    pair.source.execute(
        sql.SQL("SELECT pg_create_logical_replication_slot({}, 'pgoutput')").format(sql.Literal(pair.slot))
    )
    pair.source.execute("INSERT INTO t VALUES (1)")
    pair.target.execute(
        sql.SQL(
            "CREATE SUBSCRIPTION {0} CONNECTION {1} PUBLICATION p WITH (create_slot = false, enabled = false)"
        ).format(sql.Identifier(pair.slot), sql.Literal(pair.source.dsn))
    )
    with pytest.raises(TargetRefused, match=r"has tables left to copy: public\.t"):
        init(pair.config)
    pair.target.execute(sql.SQL("ALTER SUBSCRIPTION {} SET (slot_name = NONE)").format(sql.Identifier(pair.slot)))
    pair.target.execute(sql.SQL("DROP SUBSCRIPTION {}").format(sql.Identifier(pair.slot)))
    read = "SELECT pg_logical_slot_get_binary_changes({}, NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
    pair.source.execute(sql.SQL(read).format(sql.Literal(pair.slot)))
    with pytest.raises(TargetRefused, match=r"slot_read: slot .* was read before, and the target has no state of it"):
        init(pair.config)
    assert not pair.target.rows("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'my%'")
    init(pair.config, despite=["slot_read"])
    (confirmed,) = pair.source.rows(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = current_database()"
    )
    assert pair.state("SELECT lowest_remote_lsn::text FROM {s}.progress") == [confirmed]


def test_init_that_is_refused_late_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither slot nor state, whichever look refuses, so that the next init begins again."""

    def refuse(*_: object) -> None:
        raise SourceRefused("not now")

    for module, name in ((failover, "ensure"), (left_out, "note")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, refuse)
            with pytest.raises(SourceRefused, match="not now"):
                init(pair.config)
        assert pair.source.rows("SELECT slot_name FROM pg_replication_slots") == []
        assert not pair.target.rows("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'my%'")
    init(pair.config)


def test_init_never_makes_a_slot_in_place_of_a_lost_one(pair: Pair) -> None:
    """State without its slot is a gap: refused with exit code 3, and no slot is made (F12)."""
    init(pair.config)
    pair.source.execute(sql.SQL("SELECT pg_drop_replication_slot({})").format(sql.Literal(pair.slot)))
    with pytest.raises(SourceRefused, match="no longer") as caught:
        init(pair.config)
    assert caught.value.exit_code == 3
    assert pair.source.rows("SELECT 1 FROM pg_replication_slots WHERE database = current_database()") == []


def test_init_refuses_missing_publications_and_names_missing_tables(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing publication stops before anything is made; a missing target table is named."""
    with pytest.raises(SourceRefused, match=r'no publication "q" in this database; there is "p"'):
        init(changed(pair.config, "source", publications=("q",)))
    assert pair.target.rows(sql.SQL("SELECT 1 FROM pg_namespace WHERE nspname = {}").format(sql.Literal(SCHEMA))) == []
    pair.target.execute("DROP TABLE t")
    with pytest.raises(TargetRefused, match=r'"public"\."t" is published but missing'):
        init(pair.config)
    assert pair.target.rows(sql.SQL("SELECT 1 FROM pg_namespace WHERE nspname = {}").format(sql.Literal(SCHEMA))) == []
    init(pair.config, despite=["table_missing"])
    assert '"public"."t" is published but missing' in capsys.readouterr().out


@pytest.mark.pg_majors(15, 18)
def test_drop_leaves_nothing(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Slot, state and the empty schema go; a second drop has nothing to do."""
    init(pair.config)
    lifecycle.drop(pair.config, assume_yes=True)
    assert pair.source.rows("SELECT 1 FROM pg_replication_slots WHERE database = current_database()") == []
    assert pair.target.rows(sql.SQL("SELECT 1 FROM pg_namespace WHERE nspname = {}").format(sql.Literal(SCHEMA))) == []
    capsys.readouterr()
    lifecycle.drop(pair.config, assume_yes=True)
    assert "nothing to do" in capsys.readouterr().out


def test_indexes_are_made_where_a_copy_has_dropped_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever [mapping] says by now; one is gone only with its table, which may have got another name.

    A wait for a lock says how to see whose it is.
    """
    create = 'CREATE INDEX IF NOT EXISTS "%s ON t" ON %s USING btree (i)'
    wanted = tuple([create % one for one in (("a", "public.t"), ("b", "public.renamed"), ("c", "away.t"))])
    row = copies.CopyRow(schema_name="public", table_name="t", state=CopyState.COPYING, start_lsn=1, source_oid=1,
                         indexes=wanted)  # fmt: skip
    pair.target.execute("CREATE SCHEMA other; CREATE TABLE more (i int)")
    config = replace(pair.config, mapping=MappingConfig(schemas={"public": TargetPlace(name="other")}))
    monkeypatch.setattr(lifecycle, "_PATIENCE_S", 0.0)

    async def make() -> None:
        async with await connect.open_target(config, "test") as conn:
            await lifecycle.make_left_indexes(config, conn, [row])

    with pair.target.connect() as foreign, ThreadPoolExecutor(1) as threads:
        foreign.execute("BEGIN; LOCK TABLE t IN ROW EXCLUSIVE MODE")
        making = threads.submit(asyncio.run, make())
        pair.target.wait_until("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 't'::regclass)")
        foreign.execute("COMMIT")
        making.result()
    assert pair.target.rows("SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 't'::regclass"
                            " AND NOT indisprimary") == [('"a ON t"',)]  # fmt: skip
    said = capsys.readouterr()
    assert "pg_blocking_pids(" in said.out
    assert said.err.count("because the table or its column is gone: CREATE INDEX") == 2
    pair.target.execute("CREATE TABLE other.t (i int)")
    with pytest.raises(TargetRefused, match=r'"c ON t" ON away.t USING') as lacking:
        asyncio.run(make())
    assert "by its present name" in lacking.value.hint
    pair.target.execute('CREATE INDEX "b ON t" ON other.t (i); CREATE INDEX "c ON t" ON other.t (i)')
    asyncio.run(make())
    assert "is gone" not in capsys.readouterr().err
    # Another one has its name, and this one is not made.
    pair.target.execute('DROP INDEX "a ON t"; CREATE INDEX "a ON t" ON more (i)')
    with pytest.raises(TargetRefused, match="another one has its name"):
        asyncio.run(make())


def test_a_daemon_that_another_one_was_before_is_told_from_one_that_failed(pair: Pair, tmp_path: Path) -> None:
    """Only where the lease was held is the other one followed; one that waits for it in vain is ended."""
    init(pair.config)
    slots = sql.Identifier(SCHEMA, "slots")
    ((slot_id,),) = pair.target.rows(sql.SQL("SELECT slot_id FROM {}").format(slots))
    log = tmp_path / "daemon.log"
    earlier_bytes = 0

    def refused() -> follow.Daemon:
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({LeaseHeld.exit_code})"])
        process.wait()
        return follow.Daemon(process, log, earlier_bytes)

    async def run() -> None:
        nonlocal earlier_bytes
        async with (
            await connect.open_target(pair.config, "one") as one,
            await connect.open_target(pair.config, "two") as two,
        ):
            await lease.take_lease(one, slot_id, 0)
            with pytest.raises(LeaseHeld) as held:
                await lease.take_lease(two, slot_id, 0)
            word = held.value.line()
            for line in (f"parapply: {word}", f'{{"error":"{word}","event":"daemon_failed","level":"error"}}'):
                log.write_text(f"{line}\n")
                daemon = refused()
                assert (await daemon.has_ended(pair.config, two, slot_id), daemon.pid) == (False, None)
                await refused().end(pair.config, two, slot_id)
            # The word of an earlier daemon is none of this one's.
            log.write_text(f"parapply: {word}\n")
            earlier_bytes = log.stat().st_size
            with log.open("a") as file:
                file.write("parapply: a column is missing\n")
            with pytest.raises(ParapplyError, match="has ended with 4: a column is missing"):
                await refused().has_ended(pair.config, two, slot_id)
            await follow.Daemon(waiting, log).end(pair.config, two, slot_id)
            await asyncio.gather(
                follow.Daemon(leading, log).end(pair.config, two, slot_id),
                asyncio.to_thread(leading.communicate, b"\n"),
            )
            assert (waiting.returncode, leading.returncode) == (-signal.SIGTERM, 0)

    with (
        subprocess.Popen(_UNTIL_TOLD, stdin=subprocess.PIPE) as waiting,
        subprocess.Popen(_UNTIL_TOLD, stdin=subprocess.PIPE) as leading,
    ):
        pair.target.execute(sql.SQL("UPDATE {} SET pid = {}").format(slots, leading.pid))
        asyncio.run(run())


def test_a_daemon_of_others_may_come_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two epochs it holds no lease: neither has it ended, nor is another one started in its place.

    Nor is its lag small by what it has said last: a killed one looks the same.
    """
    init(pair.config)
    slots = sql.Identifier(SCHEMA, "slots")
    ((slot_id,),) = pair.target.rows(sql.SQL("SELECT slot_id FROM {}").format(slots))

    def show(shown: str) -> None:
        pair.target.execute(sql.SQL("UPDATE {} SET state = {}").format(slots, shown))

    async def run() -> None:
        monkeypatch.setattr(follow, "_MISSING_S", 600.0)
        config, daemon = pair.config, follow.Daemon(None, None)
        async with (
            await connect.open_target(config, "one") as one,
            await connect.open_target(config, "two") as two,
        ):
            ended = {}
            for shown in DaemonState:
                show(shown)
                ended[shown] = await daemon.has_ended(config, one, slot_id)
            assert [shown for shown in ended if ended[shown]] == [DaemonState.STOPPED, DaemonState.LOST]
            show(DaemonState.RECONNECTING)
            options: Any = None  # by which a daemon is started
            finding = asyncio.create_task(follow.daemon_of(options, config, one, slot_id))
            await lease.take_lease(two, slot_id, 0)
            assert (await finding).pid is None
            await lease.release_lease(two, slot_id, lease.LOCK_CLASS)
            counter: Any = SimpleNamespace(set=lambda *_: show(DaemonState.STOPPED))
            assert await follow.until_it_ends(config, one, slot_id, daemon, counter) == DaemonState.STOPPED
            show(DaemonState.RUNNING)
            assert not await daemon.has_ended(config, one, slot_id)
            pair.target.execute(sql.SQL("UPDATE {} SET lag_s = 0, updated_at = now()").format(slots))
            looks = iter([DaemonState.RUNNING, DaemonState.RUNNING, DaemonState.STOPPED])
            counter.set = lambda *_: show(next(looks))
            with pytest.raises(ParapplyError, match="the daemon has ended: stopped"):
                await follow.small_lag(config, one, slot_id, daemon, 600.0, counter)
            show(DaemonState.RUNNING)
            monkeypatch.setattr(follow, "_MISSING_S", -config.source.reconnect_max_s)
            assert await daemon.has_ended(config, one, slot_id)

    asyncio.run(run())


def test_drop_asks_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a yes nothing is touched; until the answer no other command drops it, to make another of its name."""
    init(pair.config)

    def refuse(_: str) -> bool:
        with ThreadPoolExecutor(1) as pool, pytest.raises(LeaseHeld):
            pool.submit(lifecycle.drop, pair.config, assume_yes=True).result()
        return False

    monkeypatch.setattr("click.confirm", refuse)
    with pytest.raises(ParapplyError, match="nothing was dropped"):
        lifecycle.drop(pair.config, assume_yes=False)
    assert pair.state("SELECT count(*) FROM {s}.slots") == [(1,)]


def test_drop_removes_a_state_of_another_cluster_only_if_asked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pg_upgrade of the publisher leaves one: nothing else removes it. The slot of that name is left alone.

    A wrong source.dsn looks the same, so a `yes` that a script pipes in is no answer.
    """
    init(pair.config)
    ((source,),) = pair.state("UPDATE {s}.slots SET system_identifier = '17' RETURNING system_identifier")
    with pytest.raises(SourceRefused, match="system identifier 17") as refused:
        lifecycle.drop(pair.config, assume_yes=True)
    assert "`parapply drop`, without --yes, removes the state" in refused.value.hint
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n17\n"))
    with pytest.raises(ParapplyError, match="nothing was dropped"):
        lifecycle.drop(pair.config, assume_yes=False)
    assert pair.state("SELECT count(*) FROM {s}.slots") == [(1,)]
    lifecycle.drop(pair.config, assume_yes=False)
    told = capsys.readouterr().out
    assert f"is of the cluster {source}, and" in told
    assert f"slot '{pair.slot}' of the cluster 17 is left" in told
    assert not pair.target.rows("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'my%'")
    assert pair.source.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")


def test_drop_leaves_notes_of_another_migration(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """A migration whose slot is yet to be made keeps its notes; its own drop takes them, and an item alone also."""
    init(pair.config)
    ((publisher,),) = pair.state("SELECT system_identifier FROM {s}.slots")
    other = migrations.Migration(schema=SCHEMA, slot_name=f"{pair.slot}_2", system_identifier=str(publisher))
    own = replace(other, slot_name=pair.slot)

    async def note() -> None:
        async with await connect.open_target(pair.config, "test") as conn:
            await migrations.begin(conn, other, MigrationStep.SCHEMA, "kept")
            with pytest.raises(TargetRefused, match="are no longer on the target"):
                await migrations.add_item(conn, own, "made without a note")

    asyncio.run(note())
    lifecycle.drop(pair.config, assume_yes=True)
    assert pair.state("SELECT slot_name, options FROM {s}.migrations") == [(other.slot_name, "kept")]
    pair.state("UPDATE {s}.migrations SET slot_name = 'gone' RETURNING 1")
    pair.state(f"INSERT INTO {{s}}.migration_items VALUES ('{pair.slot}', '{publisher}', 'left') RETURNING 1")
    make_slot = "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')"
    # The state of this one is gone.
    pair.source.execute(make_slot.format(pair.slot))
    lifecycle.drop(pair.config, assume_yes=True)
    assert pair.state("SELECT item FROM {s}.migration_items") == []
    capsys.readouterr()
    lifecycle.drop(changed(pair.config, "source", slot="gone"), assume_yes=True)
    assert "dropped, no slot was left in it" in capsys.readouterr().out


def test_a_replay_is_refused_if_a_cut_over_began_while_it_asked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come once the target is compared would stand on one side only."""
    init(pair.config)
    pair.state(
        "INSERT INTO {s}.conflicts (slot_id, conflict_type, schema_name, table_name, operation, key, remote_row,"
        " is_complete, constraints, remote_lsn, remote_xid, remote_commit_time, change_no, policy, outcome)"
        " SELECT slot_id, 'insert_exists', 'public', 't', 'insert', jsonb_build_object('i', '1'),"
        " jsonb_build_object('i', '1'), true, ARRAY[]::text[], '0/1', 7, now(), 1, 'skip', 'skipped'"
        " FROM {s}.slots RETURNING 1"
    )

    def fence(*_: object, **__: object) -> bool:
        note = "INSERT INTO {s}.cutovers (slot_id, step, reverse_slot, made_slot, made_publication, fence, opens)"
        pair.state(f"{note} SELECT slot_id, 'fencing', 'back', true, true, 'database', '' FROM {{s}}.slots RETURNING 1")
        return True

    monkeypatch.setattr("click.confirm", fence)
    with pytest.raises(StateClosed, match="was cut over: it is under way, at the step fencing"):
        asyncio.run(replay_conflicts(pair.config, Filter(), is_dry=False, assume_yes=False, as_json=False))
    assert pair.target.rows("SELECT i FROM t") == []


def test_drop_refuses_while_used(pair: Pair) -> None:
    """No slot that is read is dropped, and none whose daemon holds the lease, or that a migration is at work on."""
    init(pair.config)
    ((slot_id, publisher),) = pair.state("SELECT slot_id, system_identifier FROM {s}.slots")
    migration = migrations.Migration(schema=SCHEMA, slot_name=pair.slot, system_identifier=str(publisher))

    async def hold() -> None:
        async with await connect.open_target(pair.config, "test") as conn:
            await lease.take_lease(conn, int(str(slot_id)), 0)
            with pytest.raises(LeaseHeld):
                await asyncio.to_thread(lifecycle.drop, pair.config, assume_yes=True)
            report = await reading.collect(pair.config)
            assert report["is_daemon_connected"]
        async with await connect.open_target(pair.config, "test") as conn:
            await migrations.lock(conn, migration, 0)
            with pytest.raises(LeaseHeld, match="another command works on the migration"):
                await asyncio.to_thread(lifecycle.drop, pair.config, assume_yes=True)

    asyncio.run(hold())
    with psycopg.connect(pair.source.dsn_with(replication="database"), autocommit=True) as stream:
        stream.pgconn.send_query(
            f"START_REPLICATION SLOT {pair.slot} LOGICAL 0/0 (proto_version '1', publication_names 'p')".encode()
        )
        pair.source.wait_until("SELECT active FROM pg_replication_slots WHERE database = current_database()")
        with pytest.raises(SlotBusy, match="in use by process"):
            lifecycle.drop(pair.config, assume_yes=True)
        stream.pgconn.finish()
    assert pair.state("SELECT count(*) FROM {s}.slots") == [(1,)]


def test_wait_returns_when_the_target_is_there(pair: Pair) -> None:
    """Wait returns once the watermark has passed the LSN, at once if it had, and fails with exit code 1 in time."""
    init(pair.config)
    low = parse_lsn(str(pair.state("SELECT lowest_remote_lsn::text FROM {s}.progress")[0][0]))
    lifecycle.wait(pair.config, low, 0)
    with pytest.raises(ParapplyError, match=format_lsn(low + 48)) as caught:
        lifecycle.wait(pair.config, low + 48, 0.05)
    assert caught.value.exit_code == 1
    waiter = threading.Thread(target=lifecycle.wait, args=(pair.config, low + 48, 30))
    waiter.start()
    pair.target.wait_until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE 'parapply wait%')")
    pair.advance(low + 48)
    waiter.join(timeout=10)
    assert not waiter.is_alive()


def test_unknown_slot_points_to_init(pair: Pair) -> None:
    """Wait and status before init say what to run."""
    with pytest.raises(TargetRefused, match=r"does not exist|knows nothing") as waited:
        lifecycle.wait(pair.config, 1, 0)
    with pytest.raises(TargetRefused) as shown:
        status.show(pair.config, as_json=True, watch=False)
    assert "init" in waited.value.hint
    assert "init" in shown.value.hint


def test_status_shows_all_and_survives_a_dead_source(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The screen names state, workers, tables and reasons; without a source or a daemon it says so.

    Workers are shown while the daemon that noted them holds its lease: none is shown of a daemon that was killed.
    """
    init(pair.config)
    ((slot_id,),) = pair.state("SELECT slot_id FROM {s}.slots")

    async def fill() -> None:
        async with await connect.open_target(pair.config, "test") as conn:
            number = int(str(slot_id))
            row = state.WorkerRow(worker=0, pid=1, state="executing", waits_for="[red]batch 7[/red]")
            await state.write_workers(conn, SCHEMA, number, [row])
            table = state.TableRow(
                schema_name="public",
                table_name="t",
                lane="serial",
                is_table_exclusive=True,
                reason="trigger x",
                key_columns=("i",),
            )
            await state.write_tables(conn, SCHEMA, number, [table])

            await lease.take_lease(conn, number, 0)
            await asyncio.to_thread(status.show, pair.config, as_json=False, watch=False)

    asyncio.run(fill())
    screen = " ".join(capsys.readouterr().out.split())
    for text in ("one holds the lease", "no process reads the slot", "[red]batch 7[/red]", "public.t", "trigger x"):
        assert text in screen, text
    status.show(pair.config, as_json=False, watch=False)
    screen = " ".join(capsys.readouterr().out.split())
    assert "none runs; nothing was updated since" in screen
    assert "[red]batch 7[/red]" not in screen
    # A daemon that has lost an end holds no lease, and its state says what it does.
    (alarm,) = [one.text for one in blocks() if one.page == "docs/how-to/monitor.md" and one.language == "sql"]
    for waiting, age in (("reconnecting", "2 minutes"), ("retrying", "0")):
        pair.state("UPDATE {s}.slots SET state = 'running', updated_at = now() RETURNING 1")
        assert not pair.state(alarm.replace("parapply.", "{s}."))
        pair.state(
            f"UPDATE {{s}}.slots SET state = '{waiting}', pid = 17, updated_at = now() - interval '{age}' RETURNING 1"
        )
        assert pair.state(alarm.replace("parapply.", "{s}.")) == [(pair.config.source.slot,)]
        status.show(pair.config, as_json=False, watch=False)
        assert f"daemon {waiting}, pid 17 on" in " ".join(capsys.readouterr().out.split())
        report = asyncio.run(reading.collect(pair.config))
        assert status.line(report).startswith(f"{waiting}, ")
        assert state_text(report).plain == waiting
    dead = changed(pair.config, "source", dsn=type(pair.config.source.dsn)("host=127.0.0.1 port=1 password=hidden"))
    status.show(dead, as_json=True, watch=False)
    report = json.loads(capsys.readouterr().out)
    assert report["source"]["is_reachable"] is False
    assert "hidden" not in json.dumps(report)
    assert report["workers"] == []
    assert report["is_daemon_connected"] is False
    status.show(dead, as_json=False, watch=False)
    assert "not reachable" in capsys.readouterr().out


def test_a_state_for_people_has_no_connection_string(pair: Pair) -> None:
    """The reason is an error's line, and every reader of the state sees it."""
    init(pair.config)
    asyncio.run(connect.show_state(pair.config, "reconnecting", "source: postgresql://u:hunter2@h/d failed"))
    assert pair.state("SELECT reason FROM {s}.slots") == [("source: postgresql://*** failed",)]


def test_a_reader_needs_only_select(pair: Pair) -> None:
    """A role that may only read the state can wait and see the status."""
    init(pair.config)
    role = sql.Identifier(f"r_{secrets.token_hex(4)}")
    schema = sql.Identifier(SCHEMA)
    pair.target.execute(
        sql.SQL(
            "CREATE ROLE {r} LOGIN; GRANT USAGE ON SCHEMA {s} TO {r}; GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO {r}"
        ).format(r=role, s=schema)
    )
    try:
        dsn = pair.target.dsn_with(user=role.as_string(None).strip('"'))
        config = changed(pair.config, "target", dsn=type(pair.config.target.dsn)(dsn))
        lifecycle.wait(config, 0, 0)
        assert asyncio.run(reading.collect(config))["state"] == "stopped"
    finally:
        pair.target.execute(sql.SQL("DROP OWNED BY {r}; DROP ROLE {r}").format(r=role))


def test_settings_of_the_reader(pair: Pair) -> None:
    """A reader's session cannot write, whatever goes wrong."""

    async def run() -> None:
        async with await settings.connect_reader(Login(pair.target.dsn), "test") as conn:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                await conn.execute("CREATE TABLE public.x ()")

    asyncio.run(run())
