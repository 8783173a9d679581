"""The command that prints a password: its first line is the password, whatever it is, and nothing of it is shown."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
from typing import TYPE_CHECKING

import pytest

from parapply import login
from parapply.config import load_config
from parapply.errors import ConfigError
from parapply.login import Login, PasswordCommand, PasswordUnknown

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "geheim"
_GIVEN = {"source.dsn": "dbname=a", "source.slot": "app", "source.publications": ("app",), "target.dsn": "dbname=b"}


def shell(script: str, *arguments: str) -> PasswordCommand:
    """Return a script of the shell as a command."""
    return PasswordCommand(["sh", "-c", script, "sh", *arguments])


def printed(command: PasswordCommand) -> str:
    """Return the password that a command prints."""
    return asyncio.run(command.password())


@pytest.mark.parametrize(
    "text",
    ["plain", " spaces \t", "'single' \"double\"", "back\\slash\\", "é€\U0001f511", "host=x password=y", "%s {0} $1 #"],
)
def test_the_first_line_is_the_password(text: str) -> None:
    """As it is, but for the end of the line; later lines are nothing to anyone, of whatever size they are."""
    assert printed(PasswordCommand(["printf", "%s", text])) == text
    assert printed(PasswordCommand(["printf", r"%s\r\nsecond\n", text])) == text
    assert printed(shell('printf "%s\n" "$1"; yes geheim | head -c 1000000', text)) == text


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("true", "no password in its first line"),
        ("printf '\\ngeheim\\n'", "no password in its first line"),
        ("head -c 1000000 /dev/zero | tr '\\0' g", "first line of more than 65,534 bytes"),
        ("printf 'geheim\\377\\n'", "first line that is not UTF-8"),
        ("printf 'geheim\\0\\n'", "first line with a NUL"),
        ("echo geheim; exit 7", "exit code 7$"),
        ("echo geheim; echo first >&2; echo 'vault is sealed ' >&2; echo >&2; exit 1", "exit code 1: vault is sealed$"),
        ("echo geheim; echo 'the token geheim has ended' >&2; exit 1", r"exit code 1: the token \*\*\* has ended$"),
        ("echo geheim; yes x | head -c 1000000 >&2; echo end >&2; exit 1", "exit code 1: end$"),
        ("kill -KILL $$", "signal 9$"),
    ],
)
def test_a_command_that_fails_is_one_line_without_its_output(script: str, says: str) -> None:
    """The last line of its standard error is for the operator; nothing that it printed is, also where it repeats it."""
    with pytest.raises(PasswordUnknown, match=f"^password_command .*{says}") as caught:
        printed(shell(script))
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    """A missing program, and a file that is none."""
    for program in (tmp_path / "missing", tmp_path):
        with pytest.raises(PasswordUnknown, match=f"^password_command cannot be run: {program}: "):
            printed(PasswordCommand([str(program)]))


def test_a_command_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it has started, after its time, although it has printed something."""
    monkeypatch.setattr(login, "COMMAND_TIMEOUT_S", 0.1)
    path = tmp_path / "pid"
    # Made before: with so little time the shell may not get as far.
    path.write_text("")
    with pytest.raises(PasswordUnknown, match=r"has not ended after 0\.1 s$"):
        printed(shell('echo $$ >"$1"; echo geheim; sleep 1000; echo', str(path)))
    if pid := path.read_text().strip():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


async def test_a_caller_that_gives_up_leaves_no_command(tmp_path: Path) -> None:
    """It is ended with its caller, and the next one has it run again."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = shell('[ -p "$1" ] || { echo geheim; exit; }; echo $$ >"$1"; sleep 1000', str(fifo))
    asking = asyncio.create_task(command.password())
    pid = int(await asyncio.to_thread(fifo.read_text))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    fifo.unlink()
    assert await command.password() == SECRET


def _counted(path: Path) -> PasswordCommand:
    """Return a command that prints how often it has been run."""
    return shell('echo >>"$1"; wc -l <"$1"', str(path))


async def test_sessions_that_are_opened_together_share_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do their errors; the next ones share the next run."""
    monkeypatch.setattr(login, "REUSED_S", 0.0)
    command, failing = _counted(tmp_path / "runs"), shell('echo >>"$1"; exit 1', str(tmp_path / "failures"))
    for number in ("1", "2"):
        assert set(await asyncio.gather(*[command.password() for _ in range(5)])) == {number}
    errors = await asyncio.gather(*[failing.password() for _ in range(5)], return_exceptions=True)
    assert {str(error) for error in errors} == {"password_command ended with exit code 1"}
    assert (tmp_path / "failures").read_text() == "\n"


async def test_a_password_is_used_again_until_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that are refused together share the next run, and one that must not be old has a separate run."""
    monkeypatch.setattr(login, "REUSED_S", math.inf)
    command = _counted(tmp_path / "runs")
    assert await command.password() == "1"
    assert await command.password() == "1"
    assert set(await asyncio.gather(*[command.password(refused="1") for _ in range(5)])) == {"2"}
    assert await command.password() == "2"
    assert await command.password(is_new=True) == "3"


def test_a_failure_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next session has it run again."""
    monkeypatch.setattr(login, "REUSED_S", math.inf)
    path = tmp_path / "token"
    command = PasswordCommand(["cat", str(path)])
    with pytest.raises(PasswordUnknown):
        printed(command)
    path.write_text("geheim\n")
    assert printed(command) == SECRET


@pytest.mark.parametrize("key", ["source.password_command", "target.password_command"])
def test_it_is_written_as_words_of_a_shell_and_run_by_none(key: str, tmp_path: Path) -> None:
    """In the file, in a variable, in a file that one names and in --set alike; an empty text is none."""
    text = "printf '%s' \"a $HOME, 'b' | c\""
    path, named = tmp_path / "app.toml", tmp_path / "command"
    section, _, name = key.partition(".")
    path.write_text(f"[{section}]\n{name} = '''{text}'''\n")
    named.write_text(f"{text}\n")
    variable = f"PARAPPLY_{section}__{name}".upper()
    for config in (
        load_config(path, [], _GIVEN, {}),
        load_config(None, [f"{key}={text}"], _GIVEN, {}),
        load_config(None, [], _GIVEN, {variable: text}),
        load_config(None, [], _GIVEN, {f"{variable}_FILE": str(named)}),
    ):
        end = getattr(config, section)
        assert str(end.password_command) == shlex.join(["printf", "%s", "a $HOME, 'b' | c"])
        assert printed(end.password_command) == "a $HOME, 'b' | c"
    assert getattr(load_config(path, [f"{key}="], _GIVEN, {}), section).password_command is None


@pytest.mark.parametrize("text", ["printf 'geheim", "printf geheim\\", "printf geheim\0"])
def test_what_is_no_command_is_refused_by_name(text: str) -> None:
    """The line has the key and the rule, and nothing of the text."""
    with pytest.raises(ConfigError, match=r"^source\.password_command: must be a program") as caught:
        load_config(None, [f"source.password_command={text}"], _GIVEN, {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("dsn", ["dbname=a password=geheim", "postgresql://u:geheim@h/a", "postgresql:///a?password=x"])
def test_a_password_comes_from_one_place(dsn: str) -> None:
    """A command beside a password in the DSN would leave open which one holds."""
    with pytest.raises(ConfigError, match=r"^target: password_command must be left out, or the password in dsn$"):
        load_config(None, ["target.password_command=true"], {**_GIVEN, "target.dsn": dsn}, {})


def test_no_representation_shows_it() -> None:
    """Arguments may be as secret as what is printed."""
    command = PasswordCommand(["vault", "read", SECRET])
    assert SECRET not in repr(command)
    assert SECRET not in repr(Login(f"password={SECRET}", command))
    assert Login("dbname=a", command) == Login("dbname=a", PasswordCommand(["vault", "read", SECRET]))
    assert Login("dbname=a", command) != Login("dbname=a", PasswordCommand(["vault"]))
