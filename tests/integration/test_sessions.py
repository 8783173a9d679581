"""Opening both ends at the same time: which error is reported, and that nothing stays open. On real servers."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
from contextlib import AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import structlog
from msgspec.structs import replace
from psycopg import sql, waiting

from parapply import logs
from parapply.config import Config, TableConfig, load_config
from parapply.config_values import Secret
from parapply.driver import Session
from parapply.errors import ParapplyError, SlotBusy, SourceLost, SourceRefused, TargetLost, TargetRefused
from parapply.init import init
from parapply.login import Login
from parapply.model import Column, Relation
from parapply.runtime import sessions as ends_module
from parapply.runtime.first_sessions import FirstSessions
from parapply.runtime.sessions import Connector
from parapply.runtime.shares import share_of
from parapply.runtime.tables import control_pool as control_pool_module
from parapply.runtime.tables import prefetch as ahead_module
from parapply.runtime.tables.control_pool import ControlPool
from parapply.runtime.tables.plans import TablePlans
from parapply.runtime.tables.prefetch import CataloguePrefetch
from parapply.source import slot
from parapply.source.stream import ReplicationStream
from parapply.target.session import lease, origins, settings
from parapply.target.session.session import WorkerSession
from parapply.target.state import slots as state
from tests.fixtures.pair import named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from parapply.target.session.settings import Connection
    from tests.fixtures.databases import Database

#: No process listens on port 1.
NOWHERE = "host=127.0.0.1 port=1 dbname=x"
OURS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND (application_name LIKE 'parapply %'"
    " OR backend_type = 'walsender')"
)


async def test_a_session_asks_of_psycopg_only_what_its_first_supported_version_has(
    target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 3.3.0 waits with two arguments; a third one came later, and nothing at all would run there."""

    async def wait(self: Session, gen: Any, interval: float = 0.1) -> Any:  # noqa: ANN401  psycopg's
        return await waiting.wait_async(gen, self.pgconn.socket, interval=interval)

    monkeypatch.setattr(psycopg.AsyncConnection, "wait", wait)
    async with await Session.connect(target_db.dsn) as conn:
        assert await (await conn.execute("SELECT 1")).fetchall() == [(1,)]


async def test_a_control_session_that_stands_still_keeps_no_row_locked(
    target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F20: a daemon is paused while it writes what people see; the next one, which writes there too, can begin."""
    monkeypatch.setattr(control_pool_module, "_IDLE_TRANSACTION_MS", 200)
    target_db.execute("CREATE TABLE shown (n int)")

    async def stand_still(pool: ControlPool) -> None:
        async with pool.session() as conn, conn.transaction():
            await conn.execute("LOCK TABLE public.shown")
            await asyncio.to_thread(target_db.execute, "ALTER TABLE shown ADD m int")
            with settings.target_errors("showing"):
                await conn.execute("SELECT 1")

    async with ControlPool(Login(target_db.dsn), "origin", "paused") as pool:
        with pytest.raises(TargetLost):
            await stand_still(pool)


@pytest.fixture
async def config(source_db: Database, target_db: Database) -> Config:
    """Make a published table on both sides, slot and state."""
    source_db.execute("CREATE TABLE t (i int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    target_db.execute("CREATE TABLE t (i int PRIMARY KEY)")
    flags = {
        "source.dsn": source_db.dsn,
        "source.slot": f"s_{secrets.token_hex(4)}",
        "source.publications": ("p",),
        "target.dsn": target_db.dsn,
    }
    made = load_config(flags=flags, environ={})
    await asyncio.to_thread(init, made)
    return made


def elsewhere(config: Config, *ends: str) -> Config:
    """Return the configuration with ends that have no listener."""
    for end in ends:
        config = replace(config, **{end: replace(getattr(config, end), dsn=Secret(NOWHERE))})
    return config


async def refused(config: Config) -> ParapplyError:
    """Return the error of opening both ends, which must leave no task behind."""
    before = asyncio.all_tasks()
    with pytest.raises(ParapplyError) as caught:
        async with AsyncExitStack() as stack:
            await Connector(config, share_of(config.apply), takeover=False).open(stack)
    await _settled(before)
    return caught.value


async def _settled(before: set[asyncio.Task[object]]) -> None:
    async with asyncio.timeout(10):
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)


def check_nothing_is_open(source_db: Database, target_db: Database) -> None:
    """Wait until none of our sessions is left on either server."""
    for database in (source_db, target_db):
        database.wait_until(f"SELECT NOT EXISTS ({OURS})")


@pytest.mark.parametrize("is_reloaded", [False, True])
async def test_sessions_begun_with_the_process_serve_its_configuration(
    config: Config, source_db: Database, target_db: Database, *, is_reloaded: bool
) -> None:
    """The first epoch takes them; where another configuration was read by then, they are closed and others opened."""
    first = FirstSessions(config)
    opener = Connector(config, share_of(config.apply), takeover=False, first=first)
    if is_reloaded:
        opener.use(replace(config), share_of(config.apply))
    async with AsyncExitStack() as stack:
        ends = await opener.open(stack)
        mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}'"
        assert target_db.execute(mine.format(f"parapply leader {config.source.slot}")) == [(1,)]
        assert source_db.execute(mine.format(f"parapply {config.source.slot}")) == [(1,)]
        assert first.leading.cancelled() if is_reloaded else first.leading.result() is ends.control
    check_nothing_is_open(source_db, target_db)


async def test_a_server_of_a_newer_version_is_taken_and_said_to_be_untested(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that no test has run with serves like the newest known one, and is reported once for each end."""
    monkeypatch.setattr(ends_module, "NEWEST_MAJOR", 1)
    stream = io.BytesIO()
    logs.configure("warning", "json", stream)
    opener = Connector(config, share_of(config.apply), takeover=False)
    for _ in range(2):
        async with AsyncExitStack() as stack:
            await opener.open(stack)
    structlog.reset_defaults()
    told = [json.loads(line) for line in stream.getvalue().decode().splitlines() if "server_untested" in line]
    assert sorted(event["end"] for event in told) == ["source", "target"]
    assert all(event["hint"].startswith("the newest that parapply was tested with is 1;") for event in told)


async def test_workers_share_an_origin_where_the_target_lets_them(
    config: Config, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL 19: the others name the process of the first, whose session stays open after its worker has left.

    A stand-in has the second form of the function; `tests/system/test_versions.py` has a real one.
    """
    monkeypatch.setattr(settings, "SHARED_ORIGINS_SINCE", 150000)
    target_db.execute("CREATE TABLE joined (name text, first_pid int, pid int DEFAULT pg_backend_pid());"
                      "CREATE FUNCTION pg_catalog.pg_replication_origin_session_setup(text, integer) RETURNS void"
                      " LANGUAGE sql SECURITY DEFINER AS 'INSERT INTO public.joined VALUES ($1, $2)'")  # fmt: skip
    async with AsyncExitStack() as stack:
        ends = await Connector(config, share_of(config.apply), takeover=False).open(stack)
        (number, first), *others = ends.sessions
        assert number == 1
        assert all(session.origin_problem is None for _, session in ends.sessions)
        name = origins.origin_name(ends.state.slot_id, 1)
        assert target_db.rows(f"SELECT roname FROM pg_replication_origin WHERE roname = '{name}'") == [(name,)]
        expected = {(name, first.pipeline.backend_pid, session.pipeline.backend_pid) for _, session in others}
        assert set(target_db.rows("SELECT * FROM joined")) == expected
        await ends.opener.close(1)
        assert isinstance(late := await ends.opener.open_one_more(len(others) + 2), WorkerSession)
        assert (name, first.pipeline.backend_pid, late.pipeline.backend_pid) in target_db.rows("SELECT * FROM joined")
        assert await ends.opener.open_one_more(1) is first
        await ends.opener.close(1)
    target_db.wait_until(f"SELECT NOT EXISTS ({OURS})")


async def test_everything_opened_is_closed(config: Config, source_db: Database, target_db: Database) -> None:
    """Workers, control pool, the lease's session, the look and the stream are open, and gone with the epoch."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        ends = await Connector(config, share_of(config.apply), takeover=False).open(stack)
        assert len(ends.sessions) == config.apply.first_workers
        await ends.ahead.take("public", "nothing")
        names = {
            name
            for (name,) in target_db.rows(
                "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name LIKE 'parapply %'"
            )
        }
        kinds = {" ".join(name.split()[:-1]) for name in names}
        workers = {f"parapply worker {number}" for number in range(1, config.apply.first_workers + 1)}
        assert kinds == {"parapply leader", "parapply control pool", *workers}
        ((is_streaming,),) = source_db.rows(
            sql.SQL("SELECT active FROM pg_replication_slots WHERE slot_name = {}").format(
                sql.Literal(config.source.slot)
            )
        )
        assert is_streaming
    await _settled(before)
    check_nothing_is_open(source_db, target_db)


async def test_only_sessions_of_the_slot_are_ended(config: Config, target_db: Database) -> None:
    """A number that a lost session had may be another slot's on the server that took over (F16)."""
    config = replace(config, source=replace(config.source, slot=config.source.slot.ljust(60, "x")))
    await asyncio.to_thread(init, config)
    slot = config.source.slot
    names = [f"parapply leader {slot}", f"parapply worker 12 {slot}", "parapply worker 1 s", f"parapply top {slot}"]
    left = [psycopg.connect(target_db.dsn, autocommit=True, application_name=name) for name in names]
    connector = Connector(config, share_of(config.apply), takeover=False)
    connector._own_pids = [conn.info.backend_pid for conn in left]
    async with AsyncExitStack() as stack:
        await connector.open(stack)
    for conn, is_own in zip(left, (True, True, False, False), strict=True):
        with conn, pytest.raises(psycopg.OperationalError) if is_own else nullcontext():
            conn.execute("SELECT 1")


async def test_an_end_that_is_away_is_told_and_the_other_closed(
    config: Config, source_db: Database, target_db: Database
) -> None:
    """One end fails while the other connects; if both fail it is always the target that is reported."""
    for away, error in ((("target",), TargetLost), (("source",), SourceLost), (("source", "target"), TargetLost)):
        assert type(await refused(elsewhere(config, *away))) is error, away
        check_nothing_is_open(source_db, target_db)


async def test_a_slot_that_was_lost_is_told_before_anything_else(
    config: Config, source_db: Database, target_db: Database
) -> None:
    """Slot and publication are gone: the slot is what matters, although the publication is asked for as well."""
    source_db.execute(sql.SQL("SELECT pg_drop_replication_slot({})").format(sql.Literal(config.source.slot)))
    source_db.execute("DROP PUBLICATION p")
    error = await refused(config)
    assert isinstance(error, SourceRefused)
    assert "is no longer on the publisher" in str(error)
    check_nothing_is_open(source_db, target_db)


async def test_a_missing_publication_is_told_and_the_slot_stays_free(
    config: Config, source_db: Database, target_db: Database
) -> None:
    """The stream's connection is open by then, but it must not have started."""
    source_db.execute("DROP PUBLICATION p")
    error = await refused(config)
    assert isinstance(error, SourceRefused)
    assert "no publication 'p'" in str(error)
    check_nothing_is_open(source_db, target_db)


async def test_a_slot_in_use_is_busy_and_all_is_closed(
    config: Config, source_db: Database, target_db: Database
) -> None:
    """Another reader holds the slot: workers that connected in the meantime are closed."""
    command = f"START_REPLICATION SLOT {config.source.slot} LOGICAL 0/0 (proto_version '1', publication_names 'p')"
    reader = psycopg.connect(source_db.dsn, replication="database", autocommit=True)
    try:
        reader.pgconn.exec_(command.encode())
        assert isinstance(await refused(config), SlotBusy)
    finally:
        reader.close()
    check_nothing_is_open(source_db, target_db)


async def test_a_state_that_goes_while_the_lease_is_taken_is_not_used(
    config: Config, source_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`drop` was faster: the lease belongs to a slot that no longer exists, so the epoch begins again."""
    fence = lease.fence

    async def fence_then_drop(
        conn: Connection, slot_id: int, on_wait: Callable[[Sequence[lease.Holder]], None]
    ) -> None:
        await fence(conn, slot_id, on_wait)
        target_db.execute("DELETE FROM parapply.slots")

    monkeypatch.setattr(lease, "fence", fence_then_drop)
    error = await refused(config)
    assert isinstance(error, TargetLost)
    assert "was removed" in str(error)
    check_nothing_is_open(source_db, target_db)


_STEPS = (
    (settings, "connect_control"),
    (slot, "connect"),
    (slot, "inspect"),
    (state, "check_schema"),
    (lease, "take_lease"),
    (lease, "fence"),
    (settings, "check_direct"),
    (slot, "check_publications"),
    (state, "write_daemon"),
    (ReplicationStream, "start"),
)


async def test_an_opening_given_up_leaves_nothing_behind(
    config: Config, source_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes in the middle of any step: every session and task ends."""
    for where, name in _STEPS:
        with named(name), monkeypatch.context() as patch:
            await _give_up_in(config, where, name, patch)
            check_nothing_is_open(source_db, target_db)


async def _give_up_in(config: Config, where: Any, name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ANN401  any
    before = asyncio.all_tasks()
    reached = asyncio.Event()
    real = getattr(where, name)

    async def do(*arguments: object, **options: object) -> object:
        reached.set()
        return await real(*arguments, **options)

    patch.setattr(where, name, do)

    async def opened() -> None:
        async with AsyncExitStack() as stack:
            await Connector(config, share_of(config.apply), takeover=False).open(stack)
            await asyncio.Event().wait()

    opening = asyncio.create_task(opened(), name="opening")
    async with asyncio.timeout(10):
        await reached.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await _settled(before)


def relation(name: str, *columns: str) -> Relation:
    """Return a relation of int columns as the publisher announces it; the first one is the key."""
    made = [Column(name=column, type_oid=23, type_modifier=-1, is_key=not at) for at, column in enumerate(columns)]
    return Relation(oid=4711, schema="public", name=name, replica_identity="d", columns=tuple(made))


@pytest.fixture
async def control_pool(target_db: Database) -> AsyncIterator[ControlPool]:
    """Sessions for questions."""
    async with ControlPool(Login(target_db.dsn), "replica", "parapply control pool test") as opened:
        yield opened


async def _names() -> Sequence[tuple[str, str]]:
    return [("public", "t"), ("public", "missing")]


async def _named(*names: str) -> Sequence[tuple[str, str]]:
    return [("public", name) for name in names]


async def test_facts_read_ahead_are_given_once(target_db: Database, control_pool: ControlPool) -> None:
    """A later announcement of the same table may come after a change: it is read again."""
    target_db.execute("CREATE TABLE t (i int PRIMARY KEY)")
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    found = await ahead.take("public", "t")
    assert found is not None
    assert found.facts.key_columns == ("i",)
    assert await ahead.take("public", "t") is None
    assert await ahead.take("public", "missing") is None
    await ahead.close()


async def test_facts_read_long_ago_are_given_if_they_still_hold(
    target_db: Database, control_pool: ControlPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first change of a table may come hours later: one that was changed, dropped or replaced is read again."""
    monkeypatch.setattr(ahead_module, "_VALID_S", -1.0)
    # On a busy machine a comparison takes long, and what it says would hold for longer.
    monkeypatch.setattr(ahead_module, "_LONG_VALID_S", -1.0)
    monkeypatch.setattr(ahead_module, "_PATIENCE_S", 60.0)
    names = ("same", "wider", "indexed", "granted", "dropped", "replaced", "renamed", "parent", "child", "root")
    for name in names[:-2]:
        target_db.execute(sql.SQL("CREATE TABLE {} (i int PRIMARY KEY)").format(sql.Identifier(name)))
    target_db.execute(
        "CREATE TABLE child (i int PRIMARY KEY, p int REFERENCES parent);"
        "CREATE TABLE root (i int PRIMARY KEY) PARTITION BY RANGE (i);"
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (9)"
    )
    ahead = CataloguePrefetch(control_pool, "replica", lambda: _named(*names))
    await ahead.take("public", "missing")  # has read all
    target_db.execute(
        "ALTER TABLE wider ADD COLUMN n int; CREATE UNIQUE INDEX ON indexed ((i + 1)); DROP TABLE dropped;"
        "REVOKE INSERT ON granted FROM CURRENT_USER; DROP TABLE replaced; CREATE TABLE replaced (i int PRIMARY KEY);"
        "ALTER TABLE renamed RENAME TO other; ALTER TABLE parent DISABLE TRIGGER ALL;"
        "CREATE UNIQUE INDEX ON leaf (i)"
    )
    given = [name for name in names if await ahead.take("public", name) is not None]
    assert given == ["same"]
    await ahead.close()


async def test_reading_ahead_never_fails(target_db: Database, control_pool: ControlPool) -> None:
    """A table that cannot be read is left to the code that needs it, which can say what for."""
    target_db.execute("CREATE VIEW t AS SELECT 1 AS i")
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    assert await ahead.take("public", "t") is None
    await ahead.close()


async def test_a_table_made_to_fit_after_it_was_read_ahead_is_read_again(
    target_db: Database, control_pool: ControlPool
) -> None:
    """Target first, then publisher, as the manual says: what was read before must not refuse the new column."""
    target_db.execute("CREATE TABLE t (i int PRIMARY KEY)")
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    await ahead.take("public", "missing")  # has read all
    target_db.execute("ALTER TABLE t ADD COLUMN n int")
    tables = TablePlans(control_pool, ahead, "replica", {})
    await tables.resolve([relation("t", "i", "n"), relation("missing", "i")])
    assert [plan.relation.name for plan in tables.plans.known.values()] == ["t"]
    assert [type(error) for error in tables.plans.refused.values()] == [TargetRefused]
    await ahead.close()


async def test_code_counts_as_run_also_when_it_is_dropped(target_db: Database, control_pool: ControlPool) -> None:
    """It may have set synchronous_commit to off in a worker's session; a trigger that the role leaves out never did."""
    target_db.execute(
        "CREATE TABLE t (i int PRIMARY KEY); CREATE TRIGGER u BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION"
        " suppress_redundant_updates_trigger()"
    )
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    tables = TablePlans(control_pool, ahead, "replica", {"public.t": TableConfig(parallel="always")})
    announced = relation("t", "i")
    await tables.resolve([announced])
    seen = [tables.has_code]
    for what in ("ALTER TABLE t ENABLE ALWAYS TRIGGER u", "DROP TRIGGER u ON t"):
        target_db.execute(what)
        await tables.refresh([announced])
        seen.append(tables.has_code)
    await ahead.close()
    assert seen == [False, True, True]
    assert (tables.plans.may_be_serial, tables.plans.known[announced].runs_code) == (False, False)


async def test_a_refused_table_stays_so_while_it_is_looked_up_again(
    target_db: Database, control_pool: ControlPool
) -> None:
    """A worker that follows a transaction in progress may need to know at that time."""
    target_db.execute("CREATE TABLE t (i int PRIMARY KEY)")
    ahead = CataloguePrefetch(control_pool, "replica", _names)
    tables = TablePlans(control_pool, ahead, "replica", {})
    fits, missing = relation("t", "i"), relation("missing", "i")
    await tables.resolve([fits, missing])
    again = asyncio.create_task(tables.resolve([fits, missing]))
    n_looks = 0
    while not again.done():
        for one in (fits, missing):
            tables.plans.view().announce(one)
        n_looks += 1
        await asyncio.sleep(0)
    assert n_looks > 1
    await again
    await ahead.close()


@pytest.mark.pg_majors(15, 18)
async def test_tables_to_expect_are_named_without_a_lock(source_db: Database) -> None:
    """A hint is not worth a wait for another session's lock; a partition is announced along with its root."""
    source_db.execute(
        "CREATE TABLE a (i int) PARTITION BY LIST (i); CREATE TABLE b PARTITION OF a DEFAULT; CREATE TABLE c (i int);"
        "CREATE SCHEMA s; CREATE TABLE s.d (i int); CREATE VIEW s.v AS SELECT 1; CREATE UNLOGGED TABLE s.u (i int);"
        "CREATE PUBLICATION p FOR TABLE a WITH (publish_via_partition_root);"
        "CREATE PUBLICATION q FOR TABLES IN SCHEMA s; CREATE PUBLICATION r FOR ALL TABLES"
    )
    a, b, c, d = ("public", "a"), ("public", "b"), ("public", "c"), ("s", "d")
    async with await slot.connect(Login(source_db.dsn), application_name="parapply test") as conn:
        with psycopg.connect(source_db.dsn) as other:
            other.execute("LOCK TABLE a, c")
            for names, expected in ((["p"], [a, b]), (["p", "q"], [a, b, d]), (["r"], [a, b, c, d]), (["none"], [])):
                assert sorted(await slot.tables_to_expect(conn, names)) == expected
