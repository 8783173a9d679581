"""Forked processes of the command behave like those that a user starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import warm

_PATH = str(Path(__file__).parents[2] / "src")
_ENVIRON = {**{k: v for k, v in os.environ.items() if not k.startswith(("PARAPPLY_", "PG"))}, "PYTHONPATH": _PATH}

# Each test starts processes that import the package.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "arguments", [["--version"], ["status"], ["run", "--no-such-option"], ["conflicts", "list", "--help"]]
)
def test_a_forked_command_says_and_returns_what_a_cold_one_does(arguments: list[str]) -> None:
    """Exit code, standard output and standard error are the same."""
    forked = warm.run(arguments, _ENVIRON, 30)
    cold = subprocess.run(
        [sys.executable, "-m", "parapply", *arguments], env=_ENVIRON, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def test_the_environment_is_that_of_the_call() -> None:
    """A forked command sees the variables it was given, and none of the origin's."""
    done = warm.run(["run"], {**_ENVIRON, "PARAPPLY_APPLY__WORKERS": "banana"}, 30)
    assert done.returncode == 2
    assert "apply.workers" in done.stderr


def test_a_signal_ends_it_as_the_kernel_says() -> None:
    """SIGKILL shows as -9, as in `subprocess`; a process that hangs can be killed at any time."""
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # A server that accepts and never answers.
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x user=x sslmode=disable"
        words = ["wait", "--target", dsn, "--slot", "s", "--lsn", "0/1", "--timeout", "60"]
        process = warm.start(words, _ENVIRON, (None, os.dup(writing), writing))
        silent.settimeout(30)
        with silent.accept()[0]:
            assert process.poll() is None
            process.kill()
            assert process.wait(30) == -signal.SIGKILL
    os.close(reading)


def test_what_is_read_at_the_start_is_not_forked() -> None:
    """Variables that Python or the package reads when it starts ask for a cold process."""
    assert warm.is_possible(_ENVIRON)
    assert not warm.is_possible({**_ENVIRON, "PARAPPLY_COMPILED": "forbid"})
    assert not warm.is_possible({**_ENVIRON, "PYTHONUTF8": "0"})


def test_what_still_runs_ends_with_the_origin() -> None:
    """A command that outlives its test does not stay on the machine."""
    origin = warm.Origin(Path(_PATH))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x user=x sslmode=disable"
        words = ["wait", "--target", dsn, "--slot", "s", "--lsn", "0/1", "--timeout", "60"]
        nothing = os.open(os.devnull, os.O_RDWR)
        origin.fork(words, _ENVIRON, (nothing, nothing, nothing), None)
        os.close(nothing)
        silent.settimeout(30)
        with silent.accept()[0] as connection:
            origin.close()
            connection.settimeout(5)  # by itself it gives up after 10
            while connection.recv(1 << 16):
                pass  # what it has said first
