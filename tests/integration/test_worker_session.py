"""One worker's session on a real server: requests to cancel that come late."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from parapply.errors import StatementFailed, TargetLost
from parapply.login import Login
from parapply.target.session.pipeline import Statement
from parapply.target.session.session import SessionOptions, WorkerSession
from parapply.target.sql.statements import Sql

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.fixtures.databases import Database

pytestmark = pytest.mark.each_session


def _statement(text: bytes) -> Statement:
    return Statement(Sql(name=b"", text=text, n_parameters=0, is_set=False, positions=()), ())


_CANCELLED = _statement(b"DO $$ BEGIN RAISE query_canceled; END $$")


class _Hit:
    """A request to cancel that hits the next flight, before any of its statements."""

    def __init__(self, session: WorkerSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run = session.pipeline.run
        self._pipeline = session.pipeline
        self._patch = monkeypatch
        monkeypatch.setattr(session.pipeline, "run", self)

    async def __call__(self, statements: Sequence[Statement], **options: Any) -> object:  # noqa: ANN401  as the pipeline's
        self._patch.setattr(self._pipeline, "run", self._run)
        return await self._run([_CANCELLED, *statements], **options)


@asynccontextmanager
async def _session(dsn: str) -> AsyncIterator[WorkerSession]:
    options = SessionOptions(Login(dsn), "parapply", 1, 0, "replica", "off", "test worker")
    session = WorkerSession(await psycopg.AsyncConnection.connect(dsn, autocommit=True), options)
    yield session
    await session.close()


async def test_a_request_to_cancel_that_comes_late_is_no_failure(
    target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hit the next BEGIN, or the way back to a savepoint, which are then sent again."""
    async with _session(target_db.dsn) as session:
        _Hit(session, monkeypatch)
        await session.begin()
        await session.run([_statement(b"CREATE TABLE t ()")])
        await session.piece([])
        with pytest.raises(StatementFailed):
            await session.run([_statement(b"SELECT 1 / 0")])
        _Hit(session, monkeypatch)
        await session.undo_piece()
        await session.commit()
    assert target_db.rows("SELECT * FROM t") == []


async def test_a_piece_whose_savepoint_fails_does_not_undo_the_one_before(
    target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The savepoint of the piece before is still the latest then: to go back there would lose that piece silently."""
    async with _session(target_db.dsn) as session:
        await session.begin()
        await session.piece([])
        await session.run([_statement(b"CREATE TABLE t ()")])
        _Hit(session, monkeypatch)
        with pytest.raises(TargetLost, match="all of it is sent again"):
            await session.piece([])
