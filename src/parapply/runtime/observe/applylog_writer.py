"""Takes records from the event loop to the apply log's files, without ever waiting for the disk.

A disk that is slow, full or gone (a hanging NFS server holds a write for minutes) must not hold up applying. So the
loop only encodes and appends to a buffer of limited size, and a thread writes. When the buffer is full, records are
dropped and counted. The thread does little but system calls, so it does not take the interpreter from the loop.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.applylog import ApplyLog
    from parapply.applylog_schema import Record

#: Bytes that may wait for the disk: a few seconds of a busy slot at ``detail = "transaction"``.
_LIMIT_BYTES: Final = 32 * 1024 * 1024
#: Bytes after which the thread is woken: one system call for a few hundred records.
_CHUNK_BYTES: Final = 64 * 1024
#: Seconds a record waits for others: this much of the log is lost when the process is killed.
_FLUSH_S: Final = 1.0
#: Seconds that the end of the daemon waits for the disk.
_CLOSE_S: Final = 5.0


class ApplyLogWriter:
    """Written by the loop's thread (`write`, `close`) and by its own; the buffer is shared under a lock."""

    def __init__(self, log: ApplyLog, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._file = log
        self._limit_bytes = limit_bytes
        self._encoder = msgspec.json.Encoder()
        self._log = get_logger()
        self._changed = threading.Condition()
        self._buffer = bytearray()
        self._n_buffered = 0
        self._is_closing = False
        self._lost = 0
        self._is_losing = False
        self._thread = threading.Thread(target=self._run, name="applylog", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Return the records lost since the start: refused by the disk, or too many for the buffer."""
        return self._lost + self._file.dropped

    def write(self, records: Sequence[Record]) -> None:
        """Take records, all or none; they reach the file within a second. Never raises, never waits for the disk."""
        lines = self._encoder.encode_lines(records)
        with self._changed:
            if len(self._buffer) + len(lines) >= self._limit_bytes:
                self._lose(len(records))
                return
            self._buffer += lines
            self._n_buffered += len(records)
            if len(self._buffer) >= _CHUNK_BYTES:
                self._changed.notify()

    def close(self) -> None:
        """Let the thread write the buffered lines and close the file; give up on a disk that does not answer."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # A daemon thread: it does not keep the process. The open file is recovered by the next start.
            self._log.error("applylog_dropping", reason="the disk does not answer", dropped=self.dropped)

    def _lose(self, n_records: int) -> None:
        self._lost += n_records
        if not self._is_losing:  # once for each outage
            self._is_losing = True
            self._log.error("applylog_dropping", reason="the disk is too slow", dropped=self.dropped)

    def _go_on(self) -> None:
        with self._changed:
            was_losing, self._is_losing = self._is_losing, False
        if was_losing:
            self._log.info("applylog_resumed", dropped=self.dropped)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._is_closing and len(self._buffer) < _CHUNK_BYTES:
                    self._changed.wait(_FLUSH_S)
                lines, self._buffer = self._buffer, bytearray()
                n_records, self._n_buffered = self._n_buffered, 0
                is_closing = self._is_closing
            if lines:
                self._file.append(lines, n_records)
                self._go_on()
            if is_closing:
                self._file.close()
                return
            self._file.tick()
