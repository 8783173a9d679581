"""Lines of several migrations that run at the same time: whole, and each with the name of its database."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import click

from parapply.migrate.several import Board
from parapply.vocabulary import MigrationStep

if TYPE_CHECKING:
    import pytest

_HOSTILE = "a\x1b[2J\n%s"


async def _migrate(board: Board, name: str, other: asyncio.Barrier) -> None:
    with board.of(name) as screen:
        click.echo("begins ", nl=False)
        await other.wait()
        click.echo("and ends")
        await asyncio.to_thread(click.echo, "of a thread", err=True)
        screen.said(MigrationStep.COPY, "done", "5 rows")


def _run(*, as_json: bool) -> None:
    async def run() -> None:
        board, both = Board(["b", _HOSTILE], as_json=as_json), asyncio.Barrier(2)
        async with board.shown(), asyncio.TaskGroup() as group:
            for name in ("b", _HOSTILE):
                group.create_task(_migrate(board, name, both))
        click.echo("of none")

    asyncio.run(run())


def test_each_line_is_of_its_database(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where two write parts of lines by turns, and where a thread writes; a name cannot act on the terminal."""
    _run(as_json=False)
    out, err = capsys.readouterr()
    shown = ["b", r"a\x1b[2J\x0a%s"]
    wanted = [f"{name}: {text}" for name in shown for text in ("begins and ends", "copy: done: 5 rows")]
    assert sorted(out.splitlines()) == sorted([*wanted, "of none"])
    assert sorted(err.splitlines()) == sorted([f"{name}: of a thread" for name in shown])


def test_documents_name_their_database(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has nothing else."""
    _run(as_json=True)
    *documents, _ = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in documents]
    assert sorted([one["database"] for one in found]) == [_HOSTILE, "b"]
    assert {(one["step"], one["state"]) for one in found} == {("copy", "done")}
