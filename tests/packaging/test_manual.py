"""The manual page and the completion, both made of the commands themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from parapply.cli.main import cli
from parapply.cli.man import page

if TYPE_CHECKING:
    from collections.abc import Iterator


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")


def test_the_page_has_every_command_and_option() -> None:
    """Whatever `--help` shows is in parapply(1), commands of commands included."""
    text = page().replace(r"\-", "-").replace(r"\:", "")
    for path, command in _commands(cli, "parapply"):
        _, _, section = text.partition(f'.SS "{path} ')
        shown = section.partition(".SS ")[0]
        assert shown, path
        options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        assert [one.opts for one in options if one.opts[-1] not in shown] == [], path
    assert "Exit codes: 0 done" in text


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed: nothing to format a page with")
def test_it_is_formatted_without_a_warning() -> None:
    """The formatter knows every request, and nothing runs off the page."""
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Kutf8", "-Tutf8"],
        input=page(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "parapply conflicts list" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete(shell: str) -> None:
    """The program prints a script for each shell, and answers it with commands and options."""
    run = [sys.executable, "-m", "parapply"]

    def ask(word: str, **variables: str) -> str:
        environ = {**os.environ, "_PARAPPLY_COMPLETE": f"{shell}_{word}", **variables}
        return subprocess.run(run, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "_PARAPPLY_COMPLETE" in ask("source")
    incomplete = "verif"
    assert "verify" in ask(
        "complete", COMP_WORDS=f"parapply {incomplete}", COMP_CWORD=incomplete if shell == "fish" else "1"
    )
