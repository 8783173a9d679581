"""The piece under way when its transaction is given up."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from parapply.errors import StatementFailed, TargetLost, TargetRefused
from parapply.model import Transaction
from parapply.plan.table import Plans
from parapply.runtime.apply.ddl import PiecesWithCommands
from parapply.runtime.apply.pieces import Pieces, PlannedPiece
from parapply.runtime.apply.repair import DataFailed, PieceRepair, Repair
from parapply.target.sql.commands import CommandBuilder

if TYPE_CHECKING:
    from parapply.plan.table import TablePlan


async def test_a_piece_that_failed_while_nobody_waited_for_it_is_no_complaint_of_the_loop() -> None:
    """A worker that waits for more of its transaction does not wait for the piece; others report the lost target."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))

    async def fails() -> None:
        raise TargetLost("target: it is gone")

    pieces = Pieces.__new__(Pieces)
    pieces._under_way = loop.create_task(fails())
    await asyncio.wait({pieces._under_way})
    await pieces.abandon()
    assert pieces._under_way is None
    gc.collect()
    assert told == []


async def test_a_piece_is_refused_when_the_one_before_has_been_executed() -> None:
    """The transaction is rolled back then, by the session that the piece before is executed with."""
    is_executed = False

    async def executes() -> None:
        nonlocal is_executed
        await asyncio.sleep(0)
        is_executed = True

    class Refused(Pieces):
        async def _plan(self, piece: Transaction, current: dict[int, TablePlan]) -> PlannedPiece:
            del piece, current
            raise TargetRefused("target table public.gone does not exist")

    pieces: Any = Refused.__new__(Refused)
    pieces._job, pieces.current = SimpleNamespace(attempts=1), {}
    pieces._under_way = asyncio.get_running_loop().create_task(executes())
    with pytest.raises(TargetRefused):
        await pieces.plan(None)
    assert is_executed


async def test_a_count_that_code_has_changed_is_no_conflict_once_the_plans_know_it() -> None:
    """The piece is undone and repeated with the new plans; what else a wrong count means is judged only after that."""
    calls: list[str] = []

    class Session:
        async def piece(self, commands: object) -> None:
            del commands
            calls.append("piece")
            if len(calls) == 1:
                raise StatementFailed("0 rows where 1 are expected", statement=0)

        async def undo_piece(self) -> None:
            calls.append("undo")

    class Repair:
        async def learns(self, *failed: object) -> bool:
            del failed
            calls.append("learns")
            return True

    pieces: Any = Pieces.__new__(Pieces)
    pieces._session, pieces._repair, pieces._builder = Session(), Repair(), CommandBuilder()
    pieces._job, pieces._tables = SimpleNamespace(attempts=1), SimpleNamespace(plans_from=lambda _: Plans())
    await pieces._execute_rows(PlannedPiece(Transaction(1, 0, 0), {}, None, [], {}))
    assert calls == ["piece", "undo", "learns", "piece"]


async def _settled(failure: StatementFailed) -> None:
    """Settle a piece whose transaction has run a command, where a query about its conflict fails."""

    class Settler:
        commands = ()

        async def apply(self, *changes: object) -> None:
            del changes
            raise failure

    async def ask(*query: object) -> None:
        del query
        raise StatementFailed("current transaction is aborted", sqlstate="25P02")

    async def is_rolled_back(event: object) -> bool:
        del event
        return False

    inner: Any = Repair.__new__(Repair)
    inner._kit = SimpleNamespace(tables=SimpleNamespace(plans=Plans()))
    inner.settler = lambda _: Settler()
    repair: Any = PieceRepair.__new__(PieceRepair)
    repair._repair, repair._end, repair._two_phase = inner, None, SimpleNamespace(is_rolled_back=is_rolled_back)
    repair._job = SimpleNamespace(counts=SimpleNamespace(n_changes=0), is_unwanted=False)
    repair._conflict_handler = SimpleNamespace(is_to_skip=lambda _: False)
    pieces: Any = PiecesWithCommands.__new__(PiecesWithCommands)
    pieces._has_run, pieces._session = True, SimpleNamespace(ask=ask)
    pieces._tables = SimpleNamespace(resolve_inside=lambda _, ask: ask())
    await repair.settle(Transaction(7, 0, 0), (), pieces._refresh)


async def test_a_query_about_a_conflict_that_fails_each_time_stops_a_transaction_with_commands() -> None:
    """Its session can be asked nothing more then, not even whether a table has changed; sent again it fails again."""
    with pytest.raises(DataFailed, match="no operator"):
        await _settled(StatementFailed("no operator", sqlstate="42883"))


async def test_a_transaction_that_is_sent_again_for_another_session_says_what_failed() -> None:
    """An error that only looks like one would never be known otherwise (F24)."""
    with pytest.raises(TargetLost, match=r"lock_not_available \(55P03\); transaction 7, not ended yet"):
        await _settled(StatementFailed("busy", sqlstate="55P03"))
