"""The operational log: one line an event on standard error, and the list of all event and key names.

Nothing per row, no row or key values, no connection strings. The apply log is data and lives in `applylog`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec

from parapply.printable import printable

_rich = sys.modules.get("rich")
try:
    # structlog takes rich for coloured tracebacks wherever it is installed: a tenth of each start, for nothing here.
    sys.modules["rich"] = None  # type: ignore[assignment]
    import structlog
finally:
    if _rich is None:
        del sys.modules["rich"]
    else:
        sys.modules["rich"] = _rich

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from typing import IO, BinaryIO

    _Renderer = Callable[[Any, str, MutableMapping[str, Any]], bytes]

#: Every event. ERROR: someone must act. WARNING: it recovers by itself. INFO: life cycle. DEBUG: off by default.
EVENTS: Final = {
    "daemon_started": "info: versions, slot, workers",
    "daemon_stopped": "info: drained or aborted",
    "daemon_failed": "error: what ended the daemon, with the hint",
    "worker_freed": "info: a batch gave its worker back: it waited for another one, and others could start",
    "table_trust": "info: batches of a table fail often and go alone, or in_order (row by row), or it is trusted again",
    "table_unusable": "warning: a table was changed so that it cannot be applied; its next change will stop the daemon",
    "slot_adopted": "warning: the slot existed while the target had no state of it",
    "retained_wal_exceeded": "warning: the slot keeps more WAL than source.retained_wal_limit_bytes; how much, and what"
    " is done about it",
    "retained_wal_fallen": "info: it keeps no more than that again",
    "slot_dropped": "error: the slot was dropped because of that; what is lost",
    "heal_started": "warning: the slot is lost, why, and the daemon heals it, as source.on_lost_slot says",
    "heal_reported": "info: a line of the heal's progress, or a warning",
    "heal_done": "warning: the slot is healed, and the daemon goes on; the rows that were copied",
    "heal_failed": "error: it could not be healed; the daemon ends, or tries again if an end was lost",
    "server_untested": "warning: a server is newer than every version that this program was tested with; told once",
    "source_connected": "info: streaming from start_lsn",
    "catch_up_entered": "info: the backlog is read in ranges of WAL, from a copy of the slot; how much it is",
    "catch_up_readers_reduced": "info: fewer sessions than source.catch_up_readers read ranges; how many, and why",
    "catch_up_left": "info: the stream goes on where the ranges ended; why",
    "catch_up_declined": "info: there is much to catch up, and the stream reads it; why",
    "stream_left": "info: the stream has fallen behind, and ranges are read instead; how far",
    "standby_changed": "info: commits on the publisher wait for this daemon from now on, or wait no more",
    "history_unproved": "warning: the slot is behind what is applied, and nothing says that the publisher still has it",
    "timeline_followed": "info: the publisher was promoted, or follows another primary, under a stream that continues",
    "failover_unprotected": "warning: source.failover is wanted, and what may keep the slot from surviving one; once",
    "fleet_started": "info: version, pid, number of databases that this process follows",
    "fleet_reloaded": "info: by SIGHUP: slots that begin, and slots that end",
    "fleet_stopped": "info: every slot has ended; the worst exit code of those that were in an error",
    "slot_failed": "error: a slot of several has ended with the error before, and begins again after wait_s",
    "source_lost": "warning: reconnecting after wait_s",
    "target_connected": "info: sessions open, state read",
    "target_lost": "warning: reconnecting after wait_s, state is read again",
    "target_refused": "error: with on_error = retry: the target cannot take what comes; tried again after wait_s",
    "lease_waiting": "warning: another daemon holds the lease",
    "lease_taken": "info: this daemon owns the slot",
    "workers_reduced": "warning: the target has no connection for more workers",
    "workers_changed": "info: with apply.workers = auto, another number of workers is wanted; why",
    "worker_left": "debug: its session is closed; what it had applied",
    "settings_lowered": "info: an interval was lowered to suit the server",
    "table_planned": "info: how a table is applied and why",
    "conflicts_settled": "warning: changes of a transaction met other rows, and a policy said what to do",
    "conflict_stopped": "warning: a change met other rows, and its policy is to stop; told once for each run",
    "transaction_skipped": "warning: recorded as done without being applied, as an operator asked for",
    "setting_without_table": "warning: a section of the configuration names a table that is not published",
    "origin_missing": "warning: workers write without a replication origin; what that means is in the hint",
    "batch_retried": "warning: rolled back, to be repeated at the head: whole, then in halves, then row by row",
    "batch_split": "info: a repeated batch was applied in parts, n_in_order of its transactions row by row",
    "batch_failed": "error: still fails at the head",
    "batch_committed": "debug: one target transaction is done",
    "ddl_applied": "info: a command of the publisher has run on the target, in its place in the stream; its tag",
    "ddl_left_out": "warning: a command of the publisher has not run on the target; why",
    "ddl_awaited": "info: a command of the publisher that cannot run in a transaction will run after this one",
    "ddl_failed": "warning: such a command has not run, and why; it is tried again, at the latest by the next start",
    "skip_not_whole": "warning: changes of a skipped transaction are not kept: the target does not have their tables",
    "batch_blocked": "warning: a batch waits for a lock of a foreign session; told again at growing intervals",
    "session_blocked": "warning: a session of the slot's that is no worker's waits for a lock; end: on which side",
    "batch_cancelled": "warning: what of it waited for a foreign lock, because the operator skips a transaction",
    "batch_unblocked": "info: it waits no more; how long it has",
    "stall_broken": "warning: a batch was rolled back that blocked the head, or that a prepared transaction blocked",
    "prepare_left_out": "info: a PREPARE that cannot be applied: the publisher has rolled it back, nothing is prepared",
    "outcome_waits": "warning: a transaction prepared here is being ended by another session",
    "rolled_back_early": "warning: a transaction prepared here, which the publisher rolled back, was in the way",
    "stream_followed": "info: a worker applies a transaction while it is in progress on the publisher",
    "stream_spilled": "info: it has rolled back, and the transaction is applied at its commit; why",
    "spill_failed": "error: a transaction in progress cannot be kept on disk; its commit will end the epoch",
    "streaming_paused": "warning: one found no room on disk: none is asked for in progress until it is applied",
    "table_awaited": "info: the stream stands at a change of a table until its copy has joined",
    "table_joined": "info: a table made after the first copy is applied from its first row on",
    "table_renamed": "info: a table that is applied has another name on the publisher; its former one",
    "table_waits": "warning: published and not applied; told once and each day, until `parapply refresh` has copied it",
    "publication_altered": "warning: a publication was altered and altered back; changes of between may be missing",
    "state_left_out": "info: schemas of the publisher with tables of parapply's own: none of their rows is applied",
    "sequence_missing": "warning: a sequence of the publisher could not be set; why; told once and each day",
    "sequences_not_carried": "warning: a round of sequences.interval_s has set none; why; told once and each day",
    "copies_changed": "info: how many tables are waiting, being copied, and copied",
    "rest_begun": "debug: nothing comes and nothing is open, so both servers are looked at seldom",
    "requests_polled": "info: the target has no connection for being told of requests, so they are looked for",
    "snapshot_exported": "info: a snapshot was exported at an LSN; how long commits were held for it",
    "snapshot_refused": "info: and why",
    "memory_limit_reached": "warning: reading paused until batches are done",
    "config_reloaded": "info: by SIGHUP: the keys that hold from now on; none if nothing has changed",
    "config_needs_restart": "warning: keys that have changed and that only a restart makes hold",
    "config_refused": "error: what was read by SIGHUP is wrong; the configuration in force stays",
    "tasks": "info: asked for by SIGUSR1: the calls that each task is inside",
    "drain_started": "info: no new batches; those in hand are finished",
    "drain_aborted": "warning: a second signal, or the time limit",
    "metrics_listening": "info: address of the endpoint for Prometheus and probes",
    "leader_stuck": "error: a part of the leader makes no progress and has nothing to wait for; no watchdog signal",
    "applylog_recovered": "warning: a file of a process that died was closed",
    "applylog_dropping": "error: records cannot be written and are dropped; applying goes on",
    "applylog_resumed": "info: records are written again",
    "applylog_removed": "info: a finished file was removed, as applylog.retention_s and retention_bytes say",
    "applylog_not_removed": "warning: the directory cannot be read or a file not removed",
}

_DSN: Final = re.compile(r"postgres(?:ql)?://\S+")
_PASSWORD: Final = re.compile(
    r"""\b(password|sslpassword|passfile|oauth_client_secret)(\s*=\s*)('(?:[^'\\]|\\.)*'|"[^"]*"|\S+)""", re.IGNORECASE
)
#: Of syslog, by level.
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "exception": 3, "critical": 2}
_SECRET_KEYS: Final = frozenset({"dsn", "password", "conninfo"})


#: True if a debug event is written now: to ask a logger takes longer than to count a batch. Written by `configure`.
writes_debug = False


def configure(level: str, output_format: str, stream: BinaryIO | None = None) -> None:
    """Set up structlog and route foreign records (asyncio, psycopg) through the same lines, on standard error."""
    global writes_debug  # noqa: PLW0603  as structlog's own configuration
    out = sys.stderr.buffer if stream is None else stream
    number = logging.getLevelNamesMapping()[level.upper()]
    writes_debug = number <= logging.DEBUG
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact,
    ]
    line = {"json": _json_line, "logfmt": _logfmt_line, "console": _console_line}[output_format]
    structlog.configure(
        processors=[*shared, _for_journal(line) if is_journal(out) else line],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # All that it asks of a file.
        logger_factory=structlog.BytesLoggerFactory(_Lossy(out)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,  # few lines a second: a changed set-up matters more
    )
    _route_foreign(max(number, logging.WARNING))


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return the logger: ``log.info("worker_started", worker=3)``, the name from `EVENTS`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide anything like a connection string or a password, also deep inside a value (structlog processor)."""
    for key, value in event.items():
        event[key] = "***" if key in _SECRET_KEYS else _redact_value(value)
    return event


def redact_text(text: str) -> str:
    """Return the text with connection URIs and passwords replaced by ``***``."""
    if "=" not in text and "://" not in text:
        return text  # most are names, of each of thousands of tables: neither pattern can be in them
    return _PASSWORD.sub(r"\1\2***", _DSN.sub("postgresql://***", text))


def _redact_value(value: object) -> object:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {key: "***" if key in _SECRET_KEYS else _redact_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(item) for item in value]
    # Numbers need no check; anything else is written as its text, which may quote a connection string.
    return value if isinstance(value, int | float | None) else redact_text(str(value))


class _Lossy:
    """A stream that drops what cannot be written: a full disk or a terminal that has gone must not end the program."""

    def __init__(self, stream: BinaryIO) -> None:
        # Bypass the buffer: Python retries unflushed output at exit and turns a failure into exit code 120.
        self._stream: BinaryIO = getattr(stream, "raw", stream)

    def write(self, line: bytes) -> None:
        left = memoryview(line)
        with contextlib.suppress(OSError):
            # Without a buffer a part may be taken, or nothing.
            while left and (n_bytes := self._stream.write(left)):
                left = left[n_bytes:]

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _json_line(_logger: object, _method: str, event: MutableMapping[str, Any]) -> bytes:
    return msgspec.json.encode(event, enc_hook=str)


def _console_line(logger: Any, method: str, event: MutableMapping[str, Any]) -> bytes:  # noqa: ANN401  structlog's
    text = structlog.dev.ConsoleRenderer(colors=False)(logger, method, event)
    return text.encode()


def _logfmt_line(logger: Any, method: str, event: MutableMapping[str, Any]) -> bytes:  # noqa: ANN401  structlog's
    text = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False)(
        logger, method, {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}
    )
    return text.encode()


def is_journal(stream: IO[Any]) -> bool:
    """Return whether a stream leads to systemd's journal, by what systemd says of it in JOURNAL_STREAM."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def prioritized(text: bytes, level: str) -> bytes:
    """Return text for the journal: each line begins with its priority (sd-daemon(3)), which is taken off there."""
    mark = b"<%d>" % _PRIORITIES[level]
    return mark + text.replace(b"\n", b"\n" + mark)


def _for_journal(line: _Renderer) -> _Renderer:
    def render(logger: Any, method: str, event: MutableMapping[str, Any]) -> bytes:  # noqa: ANN401  structlog's
        level = event["level"]
        return prioritized(line(logger, method, event), level)

    return render


class _ForeignHandler(logging.Handler):
    """Turns a record of the standard library's logging into one event of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record with its logger's name as event."""
        try:
            get_logger().log(record.levelno, record.name, error=record.getMessage(), exc_info=record.exc_info)
        except Exception:  # noqa: BLE001  a log line must not end the program
            self.handleError(record)


def _route_foreign(level: int) -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ForeignHandler)]:
        root.removeHandler(handler)
    root.addHandler(_ForeignHandler())
    root.setLevel(level)
