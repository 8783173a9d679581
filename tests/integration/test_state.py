"""The state on the target: its schema, what is read at start, and how it advances."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import psycopg
import pytest
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo

from parapply.errors import SourceRefused, TargetRefused
from parapply.login import Login
from parapply.model import format_lsn, parse_lsn
from parapply.source import ddl_queue
from parapply.source.slot import state_schemas
from parapply.target.session import settings
from parapply.target.state import commands, cutovers, heals, requests
from parapply.target.state import schema as state_schema
from parapply.target.state import slots as state
from parapply.vocabulary import CutoverStep, DaemonState
from parapply.wire.ddl_queue import CommandName
from tests.fixtures.roles import make_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

pytestmark = pytest.mark.each_session

#: Everything that breaks naive quoting (trap T-60).
NASTY = "S.p %s \"x\" {c} 'q'"
NEW = state.NewSlot(
    slot_name="s",
    system_identifier="18446744073709551615",
    timeline=1,
    database_name="d",
    publications=("p", "q,r"),
    low_lsn=parse_lsn("FF/FFFFFFF0"),
    commit_order="preserve",
    workers=4,
)


@asynccontextmanager
async def control(dsn: str) -> AsyncIterator[settings.Connection]:
    """Open a control session."""
    conn = await settings.connect_control(Login(dsn), role="replica", application_name="test control")
    async with conn:
        yield conn


def record(dsn: str, schema: str, *values: object) -> str:
    """Send record_sql as a worker does, with text parameters; return the SQLSTATE, '' if it went well."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        texts = [None if value is None else str(value).encode() for value in values]
        result = conn.pgconn.exec_params(state.record_sql(schema).encode(), texts)
        return (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()


async def made(conn: settings.Connection, schema: str) -> int:
    """Make the schema and one slot."""
    await state.ensure_schema(conn, schema)
    return await state.create(conn, schema, NEW)


@pytest.mark.pg_majors(15, 16, 18)
@pytest.mark.bare_target
async def test_schema_takes_any_name_and_explains_itself(target_db: Database) -> None:
    """Any schema name works, making it twice changes nothing, and every object and column has a comment."""
    async with control(target_db.dsn) as conn:
        await state.ensure_schema(conn, NASTY)
        await state.ensure_schema(conn, NASTY)
    bare = target_db.rows(
        sql.SQL(
            "SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum >= 0"
            " WHERE c.relnamespace = {}::regnamespace AND c.relkind IN ('r', 'v')"
            " AND (col_description(c.oid, a.attnum) IS NULL OR obj_description(c.oid, 'pg_class') IS NULL)"
        ).format(sql.Literal(sql.Identifier(NASTY).as_string(None)))
    )
    assert bare == []
    columns = target_db.rows(
        "SELECT attname::text FROM pg_attribute JOIN pg_class c ON c.oid = attrelid"
        " WHERE relname = 'progress' AND attnum > 0 ORDER BY attnum"
    )
    assert [name for (name,) in columns] == [
        *("slot_name", "lowest_remote_lsn", "highest_remote_lsn", "list_remote_lsn", "in_doubt", "confirmed_flush_lsn"),
        *("lag_bytes", "lag_s", "commit_order", "workers", "state", "reason", "updated_at", "two_phase"),
        *("reading", "shown_every_s"),
    ]


async def test_two_at_once_make_one_schema(target_db: Database) -> None:
    """Daemons that start together do not collide on CREATE ... IF NOT EXISTS."""
    async with control(target_db.dsn) as one, control(target_db.dsn) as two, control(target_db.dsn) as three:
        await asyncio.gather(*(state.ensure_schema(conn, "x") for conn in (one, two, three)))
    assert target_db.rows("SELECT version FROM x.schema_version") == [(state_schema.SCHEMA_VERSION,)]


async def test_every_table_has_a_replica_identity(target_db: Database) -> None:
    """A database that was a source until now publishes the state, whose rows must still be updated."""
    target_db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    async with control(target_db.dsn) as conn:
        await state.ensure_schema(conn, "x")
    without = (
        "SELECT relname FROM pg_class AS c WHERE relnamespace = 'x'::regnamespace AND relkind = 'r' AND relreplident"
        " <> 'f' AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary)"
    )
    assert target_db.rows(without) == []


async def test_unlogged_state_and_other_layouts_are_refused(target_db: Database) -> None:
    """A crash empties an unlogged table (F7); a layout of another version is neither read nor changed."""
    async with control(target_db.dsn) as conn:
        await state.ensure_schema(conn, "x")
        await conn.execute("ALTER TABLE x.applied SET UNLOGGED")
        with pytest.raises(TargetRefused, match="applied is UNLOGGED"):
            await state.ensure_schema(conn, "x")
        await conn.execute("ALTER TABLE x.applied SET LOGGED")
        for version, hint in ((99, "or a newer one"), (15, "copies all rows again")):
            await conn.execute(sql.SQL("UPDATE x.schema_version SET version = {}").format(version))
            # `check`, `drop` and the other commands that make none ask by the second.
            for ask in (state.ensure_schema, state.has_schema):
                with pytest.raises(TargetRefused, match=f"has version {version}") as refused:
                    await ask(conn, "x")
                assert hint in refused.value.hint
    assert target_db.rows("SELECT version FROM x.schema_version") == [(15,)]


async def test_missing_schema_points_to_init(target_db: Database) -> None:
    """Reading a state that was never made is a refusal with the command that makes it."""
    async with control(target_db.dsn) as conn:
        with pytest.raises(TargetRefused) as caught:
            await state.load(conn, "x", "s", "1")
        assert "init" in caught.value.hint


@pytest.mark.pg_majors(15, 18)
async def test_what_is_recorded_is_what_is_read(target_db: Database) -> None:
    """Ranges and member lists above the watermark are known exactly; LSNs compare as numbers (T-6)."""
    base = NEW.low_lsn
    async with control(target_db.dsn) as conn:
        slot_id = await made(conn, NASTY)
        low = format_lsn(base + 0x20)
        at = [format_lsn(base + step) for step in (0x10, 0x20, 0x40, 0x50, 0x80, 0xA0)]
        assert record(target_db.dsn, NASTY, slot_id, at[1], at[0], None, low, 0, 2) == ""
        assert record(target_db.dsn, NASTY, slot_id, at[3], at[2], None, low, 1, 2) == ""
        members = f"{{{at[4]},{at[5]}}}"
        assert record(target_db.dsn, NASTY, slot_id, at[5], at[4], members, low, 789_000_000_123_456, 2) == ""
        # The row's key is what stops a second apply of the same transactions (T-14).
        assert record(target_db.dsn, NASTY, slot_id, at[5], at[4], None, low, 2, 2) == "23505"
        found = await state.load(conn, NASTY, "s", NEW.system_identifier)
    assert found is not None
    assert found.resume_lsn == base + 0x20
    applied = [step for step in range(0, 0xC0, 8) if found.is_applied(base + step)]
    assert applied == [0, 8, 0x10, 0x18, 0x20, 0x40, 0x48, 0x50, 0x80, 0xA0]
    progress = sql.SQL(
        "SELECT lowest_remote_lsn, highest_remote_lsn, list_remote_lsn::text[], in_doubt FROM {}.progress"
    )
    assert target_db.rows(progress.format(sql.Identifier(NASTY))) == [
        ("100/10", "100/90", ["100/30", "100/40", "100/70", "100/90"], 0)
    ]
    times = sql.SQL("SELECT max(commit_time) = '2024-12-31 22:40:00.123456+00' FROM {}.applied")
    assert target_db.rows(times.format(sql.Identifier(NASTY))) == [(True,)]


async def test_state_of_another_cluster_is_refused(target_db: Database) -> None:
    """The same slot name in another cluster names both system identifiers (F13); an unknown slot is None."""
    async with control(target_db.dsn) as conn:
        await made(conn, "x")
        assert await state.load(conn, "x", "other", "1") is None
        with pytest.raises(SourceRefused, match=r"18446744073709551615.*cluster 77"):
            await state.load(conn, "x", "s", "77")


def test_watermark_never_goes_back_and_prunes(target_db: Database) -> None:
    """A late, lower advance changes nothing; rows below the newest one that it has passed go; display is kept."""
    base = NEW.low_lsn

    async def run() -> None:
        async with control(target_db.dsn) as conn:
            slot_id = await made(conn, "x")
            for step in (16, 32, 48):
                end = format_lsn(base + step)
                assert record(target_db.dsn, "x", slot_id, end, end, None, end, 0, 1) == ""
            up = state.SlotProgress(
                low_lsn=base + 32, high_lsn=base + 48, source_lsn=base + 64, lag_s=0.5, state="streaming"
            )
            await state.advance(conn, "x", slot_id, up)
            down = state.SlotProgress(low_lsn=base, high_lsn=base, state="waiting", reason="lock")
            await state.advance(conn, "x", slot_id, down)
            assert target_db.rows("SELECT lowest_lsn FROM x.slots") == [(format_lsn(base + 32),)]
            with pytest.raises(TargetRefused, match="no longer"):
                await state.advance(conn, "x", slot_id + 1, up)

    asyncio.run(run())
    assert target_db.rows("SELECT count(*) FROM x.applied") == [(2,)]
    assert target_db.rows("SELECT lag_bytes, lag_s, state, reason FROM x.progress") == [(16, 0.5, "waiting", "lock")]
    target_db.execute("UPDATE x.slots SET updated_at = updated_at - interval '1 hour'")

    async def lag_s(*states: str) -> float:
        async with control(target_db.dsn) as conn:
            slot_id = await state.find_slot(conn, "x", NEW.slot_name)
            for one in states:
                await state.set_state(conn, "x", slot_id, one)
            found = await state.load(conn, "x", NEW.slot_name, NEW.system_identifier)
            assert found is not None
            return found.lag_s

    # No daemon has checked the publisher since: the row of another date has the lag as of then.
    assert asyncio.run(lag_s("reconnecting", "stopped")) > 3600.5
    shown = "SELECT lag_s > 3600.5, updated_at > now() - interval '1 minute' FROM x.slots"
    assert target_db.rows(shown) == [(True, True)]
    target_db.execute("UPDATE x.slots SET lag_s = NULL, updated_at = updated_at - interval '1 hour'")
    assert asyncio.run(lag_s("stopped", "retrying")) > 3600 - 60


@pytest.mark.crash
async def test_what_was_advanced_survives_a_crash(own_servers: OwnServers) -> None:
    """Once advance has returned, earlier commits with synchronous_commit off are durable (T-1, F6)."""
    server = own_servers(settings={"wal_writer_delay": "10s"})
    server.execute("CREATE TABLE t (i int)")
    async with control(server.dsn()) as conn:
        slot_id = await made(conn, "x")
        with psycopg.connect(server.dsn(), autocommit=True) as worker:
            worker.execute("SET synchronous_commit = off")
            worker.execute("INSERT INTO t VALUES (1)")
        lsn = NEW.low_lsn + 8
        await state.advance(conn, "x", slot_id, state.SlotProgress(low_lsn=lsn, high_lsn=lsn, state="streaming"))
        # The control: without an advance after it, the same kind of commit is lost.
        with psycopg.connect(server.dsn(), autocommit=True) as worker:
            worker.execute("SET synchronous_commit = off")
            worker.execute("INSERT INTO t VALUES (2)")
        server.crash()
    server.start()
    assert server.execute("SELECT array_agg(i) FROM t") == [([1],)]
    assert server.execute("SELECT lowest_remote_lsn::text FROM x.progress") == [(format_lsn(NEW.low_lsn + 8),)]


async def test_display_rows_and_drop(target_db: Database) -> None:
    """Displayed rows are replaced one by one, a new daemon starts with an empty screen, and drop leaves nothing."""
    worker = state.WorkerRow(worker=0, pid=1, state="idle")
    table = state.TableRow(
        schema_name="a b",
        table_name="t%s",
        lane="serial",
        is_table_exclusive=True,
        reason="trigger",
        key_columns=('k"',),
    )
    daemon = state.DaemonRow(
        timeline=2, publications=("p",), commit_order="preserve", workers=2, host="h", pid=7, version="1"
    )
    async with control(target_db.dsn) as conn:
        slot_id = await made(conn, "x")
        await state.write_workers(conn, "x", slot_id, [worker, state.WorkerRow(worker=1, pid=2, state="idle")])
        await state.write_workers(conn, "x", slot_id, [state.WorkerRow(worker=1, pid=2, state="busy", waits_for="0")])
        await state.write_tables(conn, "x", slot_id, [table])
        await state.write_tables(conn, "x", slot_id, [table])
        assert target_db.rows("SELECT worker, state FROM x.workers ORDER BY 1") == [(0, "idle"), (1, "busy")]
        assert target_db.rows("SELECT table_name, key_columns FROM x.tables") == [("t%s", ['k"'])]
        await state.write_daemon(conn, "x", slot_id, daemon)
        await state.set_state(conn, "x", slot_id, "stopped", "SIGTERM")
        assert target_db.rows("SELECT count(*) FROM x.workers") == [(0,)]
        assert target_db.rows("SELECT timeline, pid, state, reason FROM x.slots") == [(2, 7, "stopped", "SIGTERM")]
        assert not await state.drop_schema(conn, "x")
        await state.drop_slot_state(conn, "x", slot_id)
        assert await state.drop_schema(conn, "x")
        assert not await state.has_schema(conn, "x")
    assert target_db.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'x'") == []


async def test_names_of_any_letters_are_shown_in_any_encoding_of_the_target(target_db: Database) -> None:
    """A target in SQL_ASCII takes them as they are (T-61); it refuses JSON in which they are escaped."""
    there = sql.Identifier(f"{target_db.dbname}_ascii")
    create = sql.SQL("CREATE DATABASE {} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0").format(there)
    table = state.TableRow(
        schema_name="s", table_name="t", lane="set", is_table_exclusive=False, reason="", key_columns=("größe", "id")
    )
    with psycopg.connect(target_db.dsn, autocommit=True) as conn:
        conn.execute(create)
        try:
            async with control(make_conninfo(target_db.dsn, dbname=f"{target_db.dbname}_ascii")) as session:
                slot_id = await made(session, "x")
                await state.write_tables(session, "x", slot_id, [table])
                query = sql.SQL("SELECT key_columns FROM x.tables")
                assert await settings.rows(session, query) == [(["größe", "id"],)]
        finally:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(there))


@pytest.mark.pg_majors(15, 16, 18)
async def test_wait_for_returns_as_soon_as_the_progress_is_there(target_db: Database) -> None:
    """wait_for is read-your-writes in SQL: true once the watermark reaches the LSN, false when the time is over."""
    async with control(target_db.dsn) as conn:
        slot_id = await made(conn, NASTY)
        call = sql.SQL("SELECT {}.wait_for($1::pg_lsn, $2)").format(sql.Identifier(NASTY))
        async with control(target_db.dsn) as reader:
            assert await settings.rows(reader, call, ["FF/FFFFFFF0", 0]) == [(True,)]
            assert await settings.rows(reader, call, ["100/28", 0.05]) == [(False,)]
            waiting = asyncio.ensure_future(settings.rows(reader, call, ["100/28", 30]))
            progress = state.SlotProgress(low_lsn=parse_lsn("100/28"), high_lsn=0, state="running")
            await state.advance(conn, NASTY, slot_id, progress)
            assert await waiting == [(True,)]
            with pytest.raises(psycopg.errors.UndefinedObject, match="needs one slot"):
                await reader.execute(
                    sql.SQL("SELECT {}.wait_for('0/1', 0, 'no such slot')").format(sql.Identifier(NASTY))
                )
            await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            with pytest.raises(psycopg.errors.InvalidTransactionState, match="sees no progress"):
                await settings.rows(reader, call, ["100/0", 0])
            await reader.execute("ROLLBACK")


@pytest.mark.bare_target
async def test_a_monitoring_role_may_read_everything_and_write_nothing(target_db: Database) -> None:
    """A role of pg_monitor inspects the progress without grants, and no queue of commands that the schema had.

    Default privileges do not give it more, nor everybody.
    """
    target_db.execute("CREATE SCHEMA parapply; CREATE TABLE parapply.ddl_queue (id int PRIMARY KEY, command text)")
    target_db.execute("ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO pg_monitor, PUBLIC")
    target_db.execute("DROP ROLE IF EXISTS parapply_watcher")
    target_db.execute("CREATE ROLE parapply_watcher LOGIN IN ROLE pg_monitor")
    async with control(target_db.dsn) as conn:
        await made(conn, "parapply")
    with psycopg.connect(target_db.dsn_with(user="parapply_watcher"), autocommit=True) as watcher:
        for relation in ("progress", "slots", "applied", "workers", "tables", "schema_version", "prepared"):
            watcher.execute(sql.SQL("SELECT * FROM parapply.{}").format(sql.Identifier(relation)))
        for text in ("DELETE FROM parapply.applied", "SELECT remote_row FROM parapply.conflicts",
                     "SELECT command FROM parapply.ddl"):  # fmt: skip
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                watcher.execute(text)
        hidden = watcher.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'parapply'::regnamespace AND relkind IN ('r', 'v')"
            " AND NOT has_any_column_privilege(oid, 'SELECT')"
        ).fetchall()
        assert hidden == [("ddl_queue",)]
    target_db.execute("DROP OWNED BY parapply_watcher")
    target_db.execute("DROP ROLE parapply_watcher")


@pytest.mark.bare_target
async def test_a_command_is_named_without_its_text(target_db: Database, tmp_path: Path) -> None:
    """Publisher and target give it one name, and neither sends the text, which is asked for again and again."""
    text = "ALTER TABLE é ADD long int"
    target_db.execute("CREATE SCHEMA parapply; CREATE TABLE parapply.ddl_queue (id int, command text)")
    async with control(target_db.dsn) as conn:
        slot_id = await made(conn, "x")
        assert await commands.noted(conn, "x", slot_id) == (frozenset(), NEW.low_lsn)
        queue = await settings.rows(conn, sql.SQL("INSERT INTO parapply.ddl_queue VALUES (7, $1) RETURNING id"), [text])
        note = sql.SQL(commands.command_sql("x"))
        await settings.rows(conn, note, [slot_id, "0/1", queue[0][0], "", text, "", "applied", "", "{}", ""])
        with (tmp_path / "sent").open("wb") as sent:
            conn.pgconn.trace(sent.fileno())
            names = await ddl_queue.names(conn)
            noted, _ = await commands.noted(conn, "x", slot_id)
            conn.pgconn.untrace()
    assert names == noted == {CommandName(7, hashlib.sha256(text.encode()).hexdigest()[:16])}
    assert b"ADD long" not in (tmp_path / "sent").read_bytes()


async def test_every_role_reads_the_step_of_a_cut_over_until_the_last_is_done(target_db: Database) -> None:
    """A role that cannot have it so begins none; one that ends as another begins leaves the right."""
    cutover = cutovers.Cutover(
        step=CutoverStep.PREPARING, reverse_slot="back", made_slot=False, made_publication=False, fence="database",
        opens="", fence_lsn=None, takeover_lsn=None, fenced_s=None, gap_s=None,
    )  # fmt: skip
    role = f"mallory_{target_db.dbname}"
    is_open = "SELECT has_schema_privilege('public', 'x', 'USAGE')"
    async with control(target_db.dsn) as conn, control(target_db.dsn) as other:
        first = await made(conn, "x")
        second = await state.create(conn, "x", msgspec.structs.replace(NEW, slot_name="t"))
        target_db.execute(
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA x TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA x TO {role}"
        )
        try:
            await conn.execute(f"SET ROLE {role}".encode())
            with pytest.raises(TargetRefused, match="may not let all roles read the step") as refused:
                await cutovers.begin(conn, "x", first, cutover)
            assert 'GRANT SELECT (step, reverse_slot) ON "x".cutovers TO PUBLIC;' in refused.value.hint
            await conn.execute(b"RESET ROLE")
            assert target_db.rows("SELECT FROM x.cutovers") == []
        finally:
            target_db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await cutovers.begin(conn, "x", first, cutover)
        async with other.transaction():
            await cutovers.begin(other, "x", second, cutover)
            ending = asyncio.create_task(cutovers.forget(conn, "x", first))
            waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'x.cutovers'::regclass AND NOT granted)"
            await asyncio.to_thread(target_db.wait_until, waits)
        await ending
        assert target_db.rows(is_open) == [(True,)]
        await cutovers.forget(conn, "x", second)
    assert target_db.rows(is_open) == [(False,)]


async def test_a_heal_sets_no_lag(target_db: Database) -> None:
    """No daemon has looked at the publisher since: the lag of the slot goes on from what it was."""
    async with control(target_db.dsn) as conn:
        slot_id = await made(conn, "x")
        target_db.execute("UPDATE x.slots SET lag_s = 1, updated_at = updated_at - interval '1 hour'")
        await heals.begin(conn, "x", slot_id, source_lsn=1, source_started_us=1, state=DaemonState.LOST)
        lag = "SELECT lag_s > 3600, updated_at > now() - interval '1 minute' FROM x.slots"
        assert target_db.rows(lag) == [(True, True)]
        await heals.finish(conn, "x", slot_id, lsn=1, timeline=1, publications=[], source_oids=[])
        assert target_db.rows(lag) == [(True, True)]


async def test_a_refused_snapshot_stays_refused(target_db: Database) -> None:
    """An LSN that the command names late does not hide why the daemon has given up."""
    async with control(target_db.dsn) as conn:
        slot_id = await made(conn, "x")
        number = await requests.ask(conn, "x", slot_id, None, stands=True)
        for answer in ("standing", "refused", "go"):
            await requests.answer(conn, "x", slot_id, number, answer, reason="no LSN" if answer == "refused" else "")
        found = await requests.read(conn, "x", number)
        assert found is not None
        assert (found.state, found.reason) == ("refused", "no LSN")


async def test_a_table_named_like_ours_makes_no_state_schema(target_db: Database) -> None:
    """A role that may only create tables in a schema cannot have its others left out; a state schema is still known."""
    role = f"mallory_{target_db.dbname}"
    target_db.execute(f"CREATE ROLE {role}; CREATE SCHEMA shop; CREATE TABLE shop.t (id int)")
    try:
        target_db.execute(
            f"GRANT CREATE, USAGE ON SCHEMA shop TO {role}; SET ROLE {role};"
            " CREATE TABLE shop.schema_version (x int CONSTRAINT schema_version_one_row PRIMARY KEY)"
        )
        async with control(target_db.dsn) as conn:
            await state.ensure_schema(conn, "x")
            before = await state_schemas(conn)
            assert "x" in before
            assert "shop" not in before
            target_db.execute("ALTER TABLE x.schema_version OWNER TO " + role)
            assert await state_schemas(conn) == before, "by its comment"
    finally:
        target_db.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_schema_with_tables_of_others_is_refused(target_db: Database) -> None:
    """All of a state schema counts as parapply's own once its server is a publisher, also another's table of a name."""
    target_db.execute("CREATE SCHEMA shop; CREATE TABLE shop.schema_version (version text)")

    async def run() -> None:
        async with control(target_db.dsn) as conn:
            await state.ensure_schema(conn, "shop")

    with pytest.raises(TargetRefused, match="holds tables of others, such as schema_version"):
        asyncio.run(run())


@pytest.mark.pg_majors(15, 16, 18)
async def test_the_remedy_for_a_state_schema_of_another_role_is_enough(target_db: Database) -> None:
    """No state is refused for ever, and no superuser is to be granted to a role. Those who only read may."""
    roles = daemon, group, other = [f"{name}_{target_db.dbname}" for name in ("daemon", "group", "other")]
    target_db.execute(
        f"CREATE ROLE {daemon} LOGIN; CREATE ROLE {group} ROLE {daemon}; CREATE ROLE {other} LOGIN;"
        f" GRANT pg_monitor TO {other}; CREATE SCHEMA parted AUTHORIZATION {group};"
        f" GRANT CREATE ON SCHEMA parted TO {daemon}; GRANT CREATE ON DATABASE {target_db.dbname} TO {daemon}, {other}"
    )
    plain, third = target_db.dsn_with(user=daemon), target_db.dsn_with(user=other)
    await make_state(plain, "x")
    await make_state(target_db.dsn, "queue")
    target_db.execute(
        f"GRANT USAGE ON SCHEMA queue TO {daemon}; GRANT SELECT ON ALL TABLES IN SCHEMA queue TO {daemon};"
        f" ALTER SCHEMA queue OWNER TO {other}"
    )
    give = "ALTER SCHEMA {0} OWNER TO {1}; GRANT USAGE ON SCHEMA {0} TO {2};".format
    cases = (
        # A group's other members could make objects there, and the daemon is a member already.
        (plain, "parted", "which is made; or, as an administrator", give("parted", daemon, group)),
        (plain, "queue", "as an administrator", give("queue", target_db.rows("SELECT CURRENT_USER")[0][0], other)),
        (third, "x", "connect as its owner; or, if a daemon has that role", f"GRANT {other} TO {daemon};"),
        (target_db.dsn, "x", "has that role", f"GRANT SET ON PARAMETER session_replication_role TO {daemon};"),
    )
    try:
        async with await settings.connect_reader(Login(third), "test reader") as reader:
            assert await state.has_schema(reader, "x", only_reads=True)
            target_db.execute("ALTER TABLE x.schema_version RENAME TO own; CREATE VIEW x.schema_version AS TABLE x.own")
            with pytest.raises(TargetRefused, match="holds a schema_version that is no table"):
                await state.has_schema(reader, "x", only_reads=True)
            target_db.execute("DROP VIEW x.schema_version; ALTER TABLE x.own RENAME TO schema_version")
        for dsn, schema, words, remedy in cases:
            with pytest.raises(TargetRefused, match="whose code could run as this one") as refused:
                await make_state(dsn, schema)
            assert refused.value.hint.endswith(remedy), refused.value.hint
            assert words in refused.value.hint
            target_db.execute(remedy)
            if dsn != third:
                await make_state(dsn, schema)
        assert target_db.rows(f"SELECT has_schema_privilege('{other}', 'queue', 'USAGE')") == [(True,)]
        # Its owner could have put something in the place of any table before.
        target_db.execute(f"ALTER TABLE queue.snapshots OWNER TO {other}")
        with pytest.raises(TargetRefused, match=f"belongs to the role '{other}'"):
            await make_state(plain, "queue")
        target_db.execute(
            f"REVOKE SET ON PARAMETER session_replication_role FROM {daemon};"
            f" GRANT EXECUTE ON FUNCTION pg_replication_origin_create TO {daemon}"
        )
        await make_state(target_db.dsn, "x")
    finally:
        target_db.execute(f"DROP OWNED BY {', '.join(roles)} CASCADE; DROP ROLE {', '.join(roles)}")


async def test_a_schema_that_another_role_makes_at_the_same_time_is_refused(
    target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it comes between the look and CREATE SCHEMA IF NOT EXISTS, its owner could replace our tables later."""
    role, look = f"sly_{target_db.dbname}", state_schema._check_free

    async def late(conn: settings.Connection, schema: str) -> None:
        await look(conn, schema)
        target_db.execute(f"CREATE ROLE {role}; CREATE SCHEMA x AUTHORIZATION {role}")

    monkeypatch.setattr(state_schema, "_check_free", late)
    try:
        async with control(target_db.dsn) as conn:
            with pytest.raises(TargetRefused, match=f"belongs to the role '{role}'"):
                await state.ensure_schema(conn, "x")
        assert target_db.rows("SELECT relname FROM pg_class WHERE relnamespace = 'x'::regnamespace") == []
    finally:
        target_db.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")
