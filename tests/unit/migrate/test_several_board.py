"""Several migrations at the same time: each line whole and with its database's name, and a file of their databases."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click
import pytest

from parapply.errors import ConfigError
from parapply.migrate.several import Board, write_run_config
from parapply.vocabulary import MigrationStep

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


def test_a_file_with_a_password_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another user of the folder makes just before the file would have the password, or lose its own text."""
    template, theirs, unlink = tmp_path / "template", tmp_path / "theirs", Path.unlink
    template.write_text("password=hunter2")
    theirs.touch()

    def unlink_and_lose(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        path.symlink_to(theirs)

    monkeypatch.setattr(Path, "unlink", unlink_and_lose)
    with pytest.raises(ConfigError, match=r"run\.toml\.new: File exists"):
        write_run_config(tmp_path / "run.toml", ["a"], template)
    assert not theirs.read_text()
