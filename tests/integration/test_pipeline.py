"""Statements of many megabytes through a worker's pipeline: the event loop stays free, and nothing is lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.errors import StatementFailed, TargetLost
from parapply.target.session import pipeline as pipeline_module
from parapply.target.session.pipeline import FLIGHT_BYTES, LONG_TEXT_BYTES, Pipeline, Statement
from parapply.target.sql.statements import Sql
from tests.fixtures.proxy import CutProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.fixtures.databases import Database

pytestmark = pytest.mark.each_session

_LENGTH = Sql(name=b"length", text=b"SELECT length($1::text)", n_parameters=1, is_set=False, positions=())
_LARGE = Sql(
    name=b"large", text=b"SELECT FROM generate_series(1, length($1) % 10)", n_parameters=1, is_set=False, positions=()
)
_NAMES = _LENGTH._replace(
    name=b"names", text=b"SELECT name FROM pg_prepared_statements WHERE name NOT IN ('', 'names')", n_parameters=0
)
_MARK = b"in the middle"


@pytest.fixture
def proxy(target_db: Database) -> Iterator[CutProxy]:
    """A proxy before the session's target."""
    info = psycopg.conninfo.conninfo_to_dict(target_db.dsn)
    with CutProxy(str(info["host"]), int(info["port"] or 5432)) as made:
        yield made


@asynccontextmanager
async def _pipeline(dsn: str) -> AsyncIterator[Pipeline]:
    async with await psycopg.AsyncConnection[object].connect(dsn, autocommit=True) as connection:
        pipeline = Pipeline(connection)
        yield pipeline
        pipeline.close()


async def test_a_large_statement_leaves_the_event_loop_alone(
    target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is flushed part by part, because libpq moves the rest of its buffer each time; order and outcomes stay."""
    loop = asyncio.get_running_loop()
    flushed: list[object] = []
    add_writer = loop.add_writer

    def counted(fd: int, flush: Callable[[], None]) -> None:
        flushed.append(fd)
        add_writer(fd, flush)

    async with _pipeline(target_db.dsn) as pipeline:
        monkeypatch.setattr(loop, "add_writer", counted)
        large = Statement(_LARGE, [b"x" * (2 * FLIGHT_BYTES + 7 - 2 * FLIGHT_BYTES % 10)])
        small = Statement(_LARGE, [b"xxx"])
        outcomes = await pipeline.run([small, large, large, small])
        assert [outcome.rows for outcome in outcomes] == [3, 7, 7, 3]
        assert not flushed
        # A message of the server that comes while bytes are sent is not lost.
        assert await pipeline.fetch(Statement(_LENGTH, [b"x" * (FLIGHT_BYTES + 1)])) == [(b"%d" % (FLIGHT_BYTES + 1),)]


async def test_the_server_says_when_it_begins_to_commit(target_db: Database) -> None:
    """Asked for it, it sends all results before the end: so the commit there is timed by itself."""
    loop = asyncio.get_running_loop()
    target_db.execute("CREATE TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    target_db.execute(
        "CREATE FUNCTION waits() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_advisory_lock(1); RETURN NULL; END';"
        "CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION waits()"
    )
    insert = Sql(name=b"late", text=b"INSERT INTO late VALUES (1)", n_parameters=0, is_set=False, positions=())
    async with (
        _pipeline(target_db.dsn) as pipeline,
        await psycopg.AsyncConnection.connect(target_db.dsn, autocommit=True) as other,
    ):
        await other.execute("SELECT pg_advisory_lock(1)")
        statements = [Statement(_LENGTH, [b"x"]), Statement(insert, [])]
        running = asyncio.create_task(pipeline.run(statements, is_end_timed=True))
        waiting = "SELECT FROM pg_locks WHERE pid = %s AND NOT granted"
        while await (await other.execute(waiting, [pipeline.backend_pid])).fetchone() is None:
            pass
        await other.execute("SELECT 1")
        unlocked_s = loop.time()
        await other.execute("SELECT pg_advisory_unlock(1)")
        await running
        assert pipeline.before_end_s < unlocked_s
        assert pipeline.is_outside_transaction


async def test_a_flight_commits_at_its_end_or_says_why_not(target_db: Database) -> None:
    """The failure of a deferred check counts as behind the last statement, and the connection goes on."""
    target_db.execute("CREATE TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    insert = Sql(name=b"late", text=b"INSERT INTO late VALUES (1)", n_parameters=0, is_set=False, positions=())
    async with _pipeline(target_db.dsn) as pipeline:
        for _ in range(2):
            with pytest.raises(StatementFailed) as failed:
                await pipeline.run([Statement(insert, []), Statement(insert, [])])
            assert (failed.value.sqlstate, failed.value.statement) == ("23505", 2)
            assert pipeline.is_outside_transaction
        await pipeline.run([Statement(insert, [])])
        assert target_db.execute("SELECT * FROM late") == [(1,)]


async def test_errors_that_code_raises_do_not_end_the_session(target_db: Database) -> None:
    """A foreign server that is down, or a limit, fails a statement; no disk, no memory and a shutdown all of them."""

    def raising(code: str) -> Statement:
        text = f"DO 'BEGIN RAISE SQLSTATE ''{code}''; END'".encode()
        return Statement(Sql(name=b"", text=text, n_parameters=0, is_set=False, positions=()), [])

    async with _pipeline(target_db.dsn) as pipeline:
        for code in ("08001", "08P01", "53400", "58000"):
            with pytest.raises(StatementFailed) as failed:
                await pipeline.run([Statement(_LENGTH, [b"x"]), raising(code)])
            assert (failed.value.sqlstate, failed.value.statement, pipeline.is_lost) == (code, 1, False)
    for code in ("53000", "53100", "53200", "53300", "57P01", "57P03", "58030", "25006"):
        async with _pipeline(target_db.dsn) as pipeline:
            with pytest.raises(TargetLost):
                await pipeline.run([raising(code)])
            assert pipeline.is_lost


async def test_a_connection_that_broke_still_tells_where_its_server_is(target_db: Database) -> None:
    """A question of the apply log to a worker's connection is no error when the server has just ended it."""
    async with _pipeline(target_db.dsn) as pipeline:
        target_db.execute(f"SELECT pg_terminate_backend({pipeline.backend_pid})")
        await pipeline.lost
        assert pipeline.is_lost
        assert pipeline.is_near


async def test_only_so_many_statements_stay_prepared(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of tables they would fill the server's memory; those without a name do the same, every time.

    At its first use none is prepared: that costs more than to send it once.
    """
    monkeypatch.setattr(pipeline_module, "NAMED_STATEMENTS", 3)
    prepared = [
        Sql(name=b"p%d" % n, text=b"SELECT FROM generate_series(1, %d)" % n, n_parameters=0, is_set=False, positions=())
        for n in range(1, 6)
    ]
    async with _pipeline(target_db.dsn) as pipeline:
        for kept in ([], [(b"p1",), (b"p2",), (b"p3",)], [(b"p1",), (b"p2",), (b"p3",)]):
            outcomes = await pipeline.run([Statement(one, []) for one in prepared])
            assert [outcome.rows for outcome in outcomes] == [1, 2, 3, 4, 5]
            assert sorted(await pipeline.fetch(Statement(_NAMES, []))) == kept
        large = Statement(_LARGE, [b"x" * (FLIGHT_BYTES + 13 - FLIGHT_BYTES % 10)])
        assert [outcome.rows for outcome in await pipeline.run([large, large])] == [3, 3]


async def test_a_long_text_is_prepared_at_once(target_db: Database) -> None:
    """To parse and plan it twice would cost more than the name; a short one waits for its second use."""
    short = Sql(name=b"short", text=b"SELECT", n_parameters=0, is_set=False, positions=())
    long = short._replace(name=b"long", text=b"SELECT %s" % b"1, ".rjust(LONG_TEXT_BYTES) + b"2")
    async with _pipeline(target_db.dsn) as pipeline:
        for kept in ([(b"long",)], [(b"long",), (b"short",)]):
            await pipeline.run([Statement(one, []) for one in (short, long)])
            assert sorted(await pipeline.fetch(Statement(_NAMES, []))) == kept


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_large_statement_can_be_given_up(target_db: Database, proxy: CutProxy, how: str) -> None:
    """With a target that takes no more, a session ends at once, and libpq's memory is not freed under its thread."""
    seen = proxy.freeze_before(_MARK)
    async with _pipeline(proxy.dsn(target_db.dsn)) as pipeline:
        # After the mark more than the kernel's buffers on the way may ever hold.
        large = Statement(_LARGE, [b"x" * FLIGHT_BYTES + _MARK + b"x" * 5 * FLIGHT_BYTES])
        running = asyncio.create_task(pipeline.run([large]))
        assert await asyncio.to_thread(seen.wait, 30)
        if how == "cancelled":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            pipeline.close()
            with pytest.raises(TargetLost):
                await running
        assert pipeline.is_lost
        with pytest.raises(TargetLost):
            await pipeline.run([large])
