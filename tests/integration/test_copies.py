"""Rows of the tables that are copied: each is written and answered as the table and the version that was meant."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from parapply.errors import TargetRefused
from parapply.target.state import copies, copy_parts
from parapply.target.state.copy_parts import CopiedPart
from parapply.vocabulary import CopyState
from tests.integration.test_state import control, made

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from parapply.target.session.settings import Connection
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.each_session

_LSN = 0x5000
_A, _B = ("public", "a"), ("public", "b")


class _State(NamedTuple):
    conn: Connection
    slot_id: int

    async def load(self) -> copies.Copies:
        return await copies.load(self.conn, "x", self.slot_id)

    async def row(self, oid: int) -> copies.CopyRow:
        return next(row for row in (await self.load()).tables if row.source_oid == oid)


@asynccontextmanager
async def _two_tables(target: Database) -> AsyncIterator[_State]:
    """A state with two tables, 1 and 2."""
    async with control(target.dsn) as conn:
        slot_id = await made(conn, "x")
        await copies.add(conn, "x", slot_id, {_A: 1, _B: 2}, is_listed=True)
        yield _State(conn, slot_id)


async def test_a_row_that_was_written_again_is_not_answered(target_db: Database) -> None:
    """A copy begun again at the same LSN must hear of its own row, not of what the daemon read of the one before."""
    async with _two_tables(target_db) as state:
        await copies.begin(state.conn, "x", state.slot_id, [1], _LSN)
        before = await state.load()
        await copies.begin(state.conn, "x", state.slot_id, [1], _LSN)
        await copies.tell_seen(state.conn, "x", state.slot_id, before)
        assert target_db.rows("SELECT is_seen FROM x.copies WHERE source_oid = 1") == [(False,)]
        await copies.tell_seen(state.conn, "x", state.slot_id, await state.load())
        assert target_db.rows("SELECT is_seen FROM x.copies WHERE source_oid = 1") == [(True,)]


async def test_a_table_is_written_by_what_it_is(target_db: Database) -> None:
    """A table renamed while it is copied becomes copied; one that is another by now is refused, and loses nothing."""
    async with _two_tables(target_db) as state:
        here = state.conn, "x", state.slot_id
        await copies.begin(*here, [1, 2], _LSN)
        await copies.rename(*here, {1: ("public", "renamed")})
        await copies.keep_indexes(*here, 1, ["CREATE INDEX i ON public.renamed (id)"])
        await copies.finish(*here, 1, n_rows=1, size_bytes=1, is_durable=True)
        assert (await state.row(1)).state == CopyState.COPIED
        # Made again under its name.
        assert await copies.settle(*here, _B, 3, "it existed before it was published")
        part = CopiedPart(
            source_oid=2, leaf_schema="public", leaf_name="b", first_page=0, end_page=1, lsn=_LSN, rows=1,
            size_bytes=1, fingerprint="",
        )  # fmt: skip
        await copy_parts.add(*here, part)
        with pytest.raises(TargetRefused, match="no longer knows"):
            await copies.finish(*here, 2, n_rows=1, size_bytes=1, is_durable=True)
        with pytest.raises(TargetRefused, match="no longer knows"):
            await copies.keep_indexes(*here, 2, [])
        with pytest.raises(TargetRefused, match="no longer knows"):
            await copies.begin(*here, [1, 2], _LSN)
        with pytest.raises(TargetRefused, match="no longer knows"):
            await copies.is_seen(*here, [2])
        assert len(await copy_parts.load(*here)) == 1
        assert (await state.row(1)).state == CopyState.COPIED
        assert (await state.row(3)).state == CopyState.WAITING


async def test_dropped_indexes_are_known_by_the_next_table_of_the_name(target_db: Database) -> None:
    """Nothing else knows of them: a table made again, or renamed to the name of one that is gone, is to have them."""
    async with _two_tables(target_db) as state:
        here = state.conn, "x", state.slot_id
        await copies.keep_indexes(*here, 1, ["of a"])
        await copies.keep_indexes(*here, 2, ["of b"])
        # Announced by the stream under its name: no table of the state has another one by now.
        await copies.rename(*here, {3: _A})
        await copies.settle(*here, _A, 3, "it existed before it was published")
        assert (await state.row(3)).indexes == ("of a",)
        await copies.rename(*here, {2: _A})
        assert (await state.row(2)).indexes == ("of b", "of a")
        # A command makes it on the target also.
        await copies.settle(*here, _A, 4, "")
        assert (await state.row(4)).indexes == ()


async def test_a_copy_of_others_leaves_none_under_way(target_db: Database) -> None:
    """A table whose copy was interrupted is not taken for one of the next command's, and keeps that it has rows."""
    async with _two_tables(target_db) as state:
        await copies.begin(state.conn, "x", state.slot_id, [1], _LSN)
        await copies.begin(state.conn, "x", state.slot_id, [2], _LSN)
        first, second = await state.row(1), await state.row(2)
        assert (first.state, first.is_begun, first.is_late) == (CopyState.WAITING, True, False)
        assert second.state == CopyState.COPYING


async def test_a_gap_that_is_met_while_a_copy_begins_stays(target_db: Database) -> None:
    """The marks of the snapshot do not hide it. The next copy, which has those changes, forgets it."""
    async with _two_tables(target_db) as state:
        here = state.conn, "x", state.slot_id
        await copies.begin(*here, [1], _LSN)
        await copies.note_gap(*here, _LSN + 1, [])
        await copies.keep_published(*here, {1: "marks", 2: "marks"})
        assert [(await state.row(oid)).published_by for oid in (1, 2)] == ["", "marks"]
        await copies.begin(*here, [1], _LSN)
        await copies.keep_published(*here, {1: "marks"})
        assert (await state.row(1)).published_by == "marks"
