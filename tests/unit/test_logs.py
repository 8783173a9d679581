"""Operational log: one line an event, known names, no secrets."""

from __future__ import annotations

import ast
import asyncio
import importlib
import io
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import pytest
import structlog
from psycopg.pq import Conninfo

from docs.site.log_events import EVENTS
from parapply import logs
from parapply.copy.schema import connection
from parapply.cutover.pooler import without_secrets
from parapply.errors import ConfigError
from parapply.login import Login

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(logs.__file__).parent
#: Every key besides the event, level and timestamp of each line.
KEYS: Final = frozenset({
    "server_version", "before", "timeline", "slot", "seq", "xid", "gid", "commit_lsn", "end", "end_lsn", "low_lsn",
    "start_lsn", "worker", "workers", "relation", "schemas", "conflict_type", "constraints", "policy", "outcome",
    "size_bytes", "wait_s", "at_lsn", "pause_s", "error", "hint", "version", "lane", "reason", "n_transactions",
    "n_changes", "n_ranges", "n_in_order", "attempts", "dropped", "number", "tag", "file", "setting", "settings",
    "n_readers", "readers",
    "value", "host", "pid", "port", "part", "tasks", "is_synchronous", "holder", "mode", "role", "session",
    "application_name", "xact_start", "query_start", "until_lsn", "until_time", "databases", "added", "removed",
    "exit_code", "retained_bytes", "limit_bytes", "action", "report", "n_rows",
})  # fmt: skip
_LEVELS = {"debug", "info", "warning", "error", "exception"}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    monkeypatch.setattr(logs, "writes_debug", False)
    yield
    structlog.reset_defaults()
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_json_lines() -> None:
    """Each event is one JSON object with event, level and UTC time; what is below the level is not written."""
    stream = io.BytesIO()
    logs.configure("info", "json", stream)
    log = logs.get_logger()
    log.debug("batch_committed", end_lsn="0/1")
    log.info("source_connected", slot="app", hint=Path("x"))
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "source_connected", "level": "info", "slot": "app", "hint": "x"}


def test_a_change_of_the_level_holds_for_debug_events_at_once() -> None:
    """A hot path asks whether a debug event is written before it makes one."""
    found = []
    for level in ("info", "debug", "warning"):
        logs.configure(level, "json", io.BytesIO())
        found.append(logs.writes_debug)
    assert found == [False, True, False]


def test_console_lines() -> None:
    """The console form is for people: the event and its facts on one line."""
    stream = io.BytesIO()
    logs.configure("info", "console", stream)
    logs.get_logger().info("source_connected", slot="app")
    assert b"source_connected" in stream.getvalue()
    assert b"slot=app" in stream.getvalue()


def test_logfmt_lines() -> None:
    """An event is one line of key=value; what holds blanks is quoted, and what does not print stands as its escape."""
    stream = io.BytesIO()
    logs.configure("info", "logfmt", stream)
    logs.get_logger().info("table_waits", relation='a "b"=\x1b[2J\u202e\n<3>c', is_synchronous=True, wait_s=1.5)
    (line,) = stream.getvalue().decode().splitlines()
    time, _, rest = line.partition(" ")
    assert time.startswith("timestamp=2")
    first, _, others = rest.partition(" is_synchronous")
    assert first == r'level=info event=table_waits relation="a \"b\"=\\x1b[2J\\u202e\\x0a<3>c"'
    assert others == "=true wait_s=1.5"


@pytest.mark.parametrize("output_format", ["json", "logfmt", "console"])
def test_lines_for_the_journal_have_a_priority(
    output_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where systemd says that standard error is the journal's, each line begins with its level; elsewhere none does."""
    path = tmp_path / "log"
    found = path.open("wb", buffering=0)
    with found:
        place = os.fstat(found.fileno())
        for stream_of_journal in ("", f"{place.st_dev}:{place.st_ino + 1}", f"{place.st_dev}:{place.st_ino}"):
            monkeypatch.setenv("JOURNAL_STREAM", stream_of_journal)
            logs.configure("info", output_format, cast("BinaryIO", found))
            logs.get_logger().info("source_connected", slot="app")
        logs.get_logger().warning("source_lost", error="x")
        try:
            int("x")
        except ValueError:
            logs.get_logger().exception("daemon_failed")
        logging.getLogger("asyncio").warning("slow")
    lines = path.read_bytes().splitlines()
    assert [line[:1] == b"<" for line in lines[:3]] == [False, False, True]
    assert [line[:3] for line in lines[2:4]] == [b"<6>", b"<4>"]
    assert {line[:3] for line in lines[4:-1]} == {b"<3>"}, "also a traceback of several lines"
    assert lines[-1].startswith(b"<4>")


@pytest.mark.parametrize("output_format", ["json", "logfmt", "console"])
def test_secrets_are_hidden(output_format: str) -> None:
    """Connection strings and passwords never reach a line, in whatever value or traceback they hide."""
    stream = io.BytesIO()
    logs.configure("info", output_format, stream)
    log = logs.get_logger()
    log.info("source_lost", error="postgres://u:hunter2@h/d failed", dsn="hunter2")
    log.info("source_lost", error="x password=hunter2 y", hint={"a": ["PASSWORD = 'hun\\'ter2 hunter2' y"]})
    log.info("source_lost", error=ValueError("postgresql://u:hunter2@h/d"))
    try:
        int("password=hunter2")
    except ValueError:
        log.exception("daemon_failed")
    assert b"hunter2" not in stream.getvalue()
    assert b"***" in stream.getvalue()


@pytest.mark.parametrize("output_format", ["logfmt", "console"])
def test_names_do_not_act_on_a_terminal(output_format: str) -> None:
    """Signs of control and direction come as their escapes, also in a traceback, which keeps its lines."""
    stream = io.BytesIO()
    logs.configure("info", output_format, stream)
    for name in ("a\x1b[2Jb\x9b2J\u202ec\rd", "a b\x1b[2J\x9b2J\u202e\rd"):
        logs.get_logger().info("source_lost", relation=name)
        try:
            raise ValueError(name)  # noqa: TRY301  its text is to be in a traceback
        except ValueError:
            logs.get_logger().exception("daemon_failed")
    text = stream.getvalue().decode()
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("\\u202e") == 4
    assert ("\n    raise ValueError(name)" in text) is (output_format == "console")


def test_each_secret_of_a_connection_string_is_known() -> None:
    """Those that libpq marks: logs hide them, notes leave them out, and no command line shows them."""
    marked = {one.keyword.decode() for one in Conninfo.get_defaults() if one.dispchar in {b"*", b"D"}}
    harmless = {"replication", "sslkeylogfile"}  # a mode, and the name of a file
    assert marked - harmless <= logs.SECRETS
    for name in marked - harmless:
        assert "hunter2" not in logs.redact_text(f"host=a {name}=hunter2")
        assert without_secrets(f"host=a {name}=hunter2") == "host=a"
        if name != "password":
            with pytest.raises(ConfigError, match=f"{name} cannot be handed"):
                asyncio.run(connection(Login(f"host=a {name}=hunter2"), {}))


def test_foreign_records_come_the_same_way_once() -> None:
    """Warnings of the standard library's logging become our lines; psycopg's own do not.

    It raises what it warns of, and the driver's module silences it for commands without such lines.
    """
    importlib.import_module("parapply.driver")
    stream = io.BytesIO()
    logs.configure("info", "json", stream)
    logs.configure("info", "json", stream)
    logging.getLogger("asyncio").warning("slow %s", "postgresql://u:hunter2@h/d")
    logging.getLogger("asyncio").info("quiet")
    logging.getLogger("psycopg.pool").warning("error connecting")
    assert not logging.getLogger("psycopg").isEnabledFor(logging.WARNING)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["error"]) == ("asyncio", "warning", "slow postgresql://***")


def test_a_line_that_cannot_be_written_is_dropped() -> None:
    """A disk that is full does not end the daemon."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        logs.configure("info", "json", cast("BinaryIO", full))
        logs.get_logger().info("daemon_stopped")


@pytest.mark.slow
def test_event_and_key_names_are_listed() -> None:
    """Every event logged in the sources is in EVENTS, every key in KEYS, and what is listed is logged somewhere.

    Dashboards and alarms depend on the names, so a name that never comes is as wrong as one that is not listed.
    """
    unknown = []
    events: set[str] = set()
    keys_logged: set[str] = set()
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if owner not in {"log", "_log", "get_logger()"} or node.func.attr not in _LEVELS:
                continue
            names = _event_names(node.args[0])
            keys = {keyword.arg for keyword in node.keywords if keyword.arg} - {"exc_info"}
            if names - EVENTS.keys() or keys - KEYS:
                unknown.append((path.name, node.lineno, names, keys - KEYS))
            events |= names
            keys_logged |= keys
    assert unknown == []
    assert EVENTS.keys() == events
    assert keys_logged == KEYS


def _event_names(argument: ast.expr) -> set[str]:
    """Return the events that a call may log: the constant, both branches' events, or the ends of a formatted name."""
    if isinstance(argument, ast.Constant):
        return {str(argument.value)}
    if isinstance(argument, ast.IfExp):
        return _event_names(argument.body) | _event_names(argument.orelse)
    assert isinstance(argument, ast.JoinedStr), ast.unparse(argument)
    end = "".join([str(part.value) for part in argument.values if isinstance(part, ast.Constant)])
    return {event for event in EVENTS if event.endswith(end)}
