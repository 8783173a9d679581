"""`parapply top` and `status --watch` beside a running daemon: as text, as JSON, and in a terminal."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from parapply.cli import main as cli
from parapply.extras import install_hint
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import closed, foreign_transaction
from tests.fixtures.terminal import TIMEOUT_S, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand

__all__ = ["pair"]

_TABLES = (
    "CREATE TABLE item (id int PRIMARY KEY, v int); CREATE TABLE evt (n int); ALTER TABLE evt REPLICA IDENTITY FULL;"
)
pytestmark = pytest.mark.timeout(300)
_TARGET_REFUSED = 4
_USAGE = 2


@contextmanager
def terminal(pair: Pair, *arguments: str) -> Iterator[Terminal]:
    """Run a command of a pair's route in a terminal."""
    command, *rest = arguments
    shown = Terminal([command, *pair.route.arguments(), *rest])
    try:
        yield shown
    finally:
        shown.close()


def test_once(pair: Pair, run_command: RunCommand) -> None:
    """Applied changes are in the state tables within seconds, and on the screen: rows, tables, workers, who waits."""
    pair.create(_TABLES)
    daemon = pair.start(workers=2)
    pair.write("INSERT INTO item SELECT g, 0 FROM generate_series(1, 30) AS g", "INSERT INTO evt VALUES (1), (2)")
    daemon.wait_caught_up()
    pair.target.wait_until("SELECT sum(inserts) = 32 FROM parapply.tables")
    with foreign_transaction(pair.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
        pair.write("UPDATE item SET v = 1 WHERE id = 1", "UPDATE item SET v = 2 WHERE id = 1", "DELETE FROM evt")
        pair.target.wait_until("SELECT count(*) > 0 FROM parapply.workers WHERE waits_for LIKE '%lock%'")
        done = run_command(pair.route, "top", "--once", environ={"COLUMNS": "80"}, code=0)
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert f"slot {pair.route.slot}  running" in done.stdout
        assert "a lock held by pid" in done.stdout
        found = json.loads(run_command(pair.route, "top", "--once", "--json").stdout)
        assert {one["name"]: one["n_rows"] for one in found["rates"]} == {"public.item": 30, "public.evt": 2}
        assert max(found["busy"].values()) == 1
        assert found["lag_s"] > 0
    daemon.wait_caught_up()
    pair.target.wait_until("SELECT sum(updates) = 2 AND sum(deletes) = 2 FROM parapply.tables")


@pytest.mark.skipif(importlib.util.find_spec("textual") is None, reason="the extra top is not installed")
def test_what_limits_now(pair: Pair, run_command: RunCommand) -> None:
    """While a session holds a row's lock the daemon says that locks limit, with number, evidence and advice."""
    pair.create(_TABLES)
    pair.write("INSERT INTO item VALUES (1, 0)")
    daemon = pair.start(workers=1)
    daemon.wait_caught_up()
    with foreign_transaction(pair.target, "SELECT FROM item WHERE id = 1 FOR UPDATE"):
        pair.write("UPDATE item SET v = 1 WHERE id = 1")
        shown = _shown(pair, run_command, "status", "statements waited for locks")
        assert "what limits The target: statements waited for locks of other sessions, " in shown
        assert "what to do look at the sessions that hold the locks on the target" in shown
        assert "because Of the last " in shown
        assert "Lock:transactionid" in shown
        assert "look at the sessions that hold the locks" in _shown(
            pair, run_command, "top --once", "locks of other sessions"
        )
    daemon.finish()
    assert json.loads(run_command(pair.route, "status", "--json").stdout)["limits"] is None


def _shown(pair: Pair, run_command: RunCommand, command: str, words: str) -> str:
    """Return what a command shows once it has some words: the limit of a moment is another one of a busy machine."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while words not in (shown := " ".join(run_command(pair.route, command).stdout.split())):
        assert time.monotonic() < deadline_s, shown
    return shown


def test_a_newer_state_is_refused(pair: Pair, run_command: RunCommand) -> None:
    """A command of this version says nothing about a state that it cannot know, and changes none of it."""
    pair.create("")
    pair.target.execute("UPDATE parapply.schema_version SET version = 99")
    commands = (
        ("status",), ("top", "--once"), ("wait", "--lsn", "0/1"), ("check",), ("sequences",), ("drop", "--yes"),
        ("conflicts list",), ("skip", "--lsn", "0/1"),
    )  # fmt: skip
    for command in commands:
        done = run_command(pair.route, *command)
        assert done.returncode == 4, (command, done.stdout)
        assert "has version 99" in done.stdout + done.stderr


def test_in_a_terminal(pair: Pair) -> None:
    """It shows the slot, sorts and pauses by key, outlives a target that goes away for a while, and ends with q."""
    pair.create(_TABLES)
    daemon = pair.start()
    pair.write("INSERT INTO item VALUES (1, 0)")
    daemon.wait_caught_up()
    with terminal(pair, "top", "--interval", "0.2") as shown:
        shown.wait_for("item")
        shown.wait_for("Quit")
        shown.press("s")
        shown.press(" ")
        shown.wait_for("paused")
        shown.press(" ")
        with closed(pair.target):
            shown.wait_for("accepting")
        shown.wait_for("running")
        shown.press("q")
        assert shown.exit_code() == 0


def test_status_watch_in_a_terminal(pair: Pair) -> None:
    """`status --watch` outlives a target that goes away for a while, and ends with Ctrl-C."""
    pair.create(_TABLES)
    pair.start().wait_caught_up()
    with terminal(pair, "status", "--watch") as shown:
        shown.wait_for("complete up to")
        with closed(pair.target):
            shown.wait_for("accepting")
        shown.wait_for("running")
        shown.interrupt()
        assert shown.exit_code() == 130


def test_what_cannot_be_shown_is_one_line(pair: Pair, run_command: RunCommand) -> None:
    """An unknown slot is exit 4; no terminal is exit 2 and says --once."""
    done = run_command(pair.route, "top", "--once")
    assert (done.returncode, done.stderr.count("\n")) == (_TARGET_REFUSED, 1)
    done = run_command(pair.route, "top", code=_USAGE)
    assert "--once" in done.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where Textual is not installed one line says how to get it, and what works without."""
    monkeypatch.setattr("parapply.cli.top.find_spec", lambda _name: None)
    assert cli.main(["top", "--target", "host=x", "--slot", "s"]) == _USAGE
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert install_hint("top") in err
    assert "--once" in err


def test_it_ends_with_its_terminal(pair: Pair) -> None:
    """A terminal that is closed without a signal, as under `su -` and nohup, ends what was shown in it."""
    pair.create(_TABLES)
    pair.start()
    with terminal(pair, "top") as shown:
        shown.wait_for(pair.route.slot)
        assert shown.hang_up() == 0
    # A signal ignored here is ignored by the programs that are started.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for words in (["status", "--watch"], ["status", "--watch", "--json"]):
            with terminal(pair, *words) as shown:
                shown.wait_for(pair.route.slot)
                # Some of what it writes then may be refused.
                assert shown.hang_up() in {0, 1}
    finally:
        signal.signal(signal.SIGHUP, before)
