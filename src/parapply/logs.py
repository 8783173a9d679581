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

#: Parameters of libpq whose values are never shown.
SECRETS: Final = frozenset({"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"})
_DSN: Final = re.compile(r"postgres(?:ql)?://\S+")
_PASSWORD: Final = re.compile(
    rf"""\b({"|".join(SECRETS)}|passfile)(\s*=\s*)('(?:[^'\\]|\\.)*'|"[^"]*"|\S+)""", re.IGNORECASE
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
    """Return the logger: ``log.info("worker_started", worker=3)``, a name of docs/site/log_events.py."""
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
    return "\n".join(map(printable, text.split("\n"))).encode()  # a traceback has several lines


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
