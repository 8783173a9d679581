"""Takes records from the event loop to the apply log's files, without ever waiting for the disk.

A disk that is slow, full or gone (a hanging NFS server holds a write for minutes) must not hold up applying. So the
loop only encodes and appends to a buffer of limited size, and a thread opens, writes and closes the files. When the
buffer is full, records are dropped and counted. The thread does little but system calls, so it does not take the
interpreter from the loop.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextvars import copy_context
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.applylog import ApplyLog
    from parapply.applylog_schema import Record

#: Bytes that may wait for the disk: a few seconds of a busy slot at ``detail = "transaction"``.
_LIMIT_BYTES: Final = 32 * 1024 * 1024
#: Bytes after which the thread is woken: one system call for a few hundred records.
_CHUNK_BYTES: Final = 64 * 1024
#: Seconds a record waits for others: this much of the log is lost when the process is killed.
_FLUSH_S: Final = 1.0
#: Seconds that the start and the end of the daemon wait for the disk.
_OPEN_S: Final = 5.0
_CLOSE_S: Final = 5.0
_NO_ANSWER: Final = "the disk does not answer"


class ApplyLogWriter:
    """Written by the loop's thread (`write`), by `close`, and by its own; the buffer is shared under a lock."""

    def __init__(self, open_log: Callable[[], ApplyLog], limit_bytes: int = _LIMIT_BYTES) -> None:
        self._open = open_log
        self._file: ApplyLog | None = None
        #: Done when the thread has opened the first file, or was refused.
        self._opening: Future[None] = Future()
        self._opening.set_running_or_notify_cancel()
        self._limit_bytes = limit_bytes
        self._encoder = msgspec.json.Encoder()
        self._log = get_logger()
        self._changed = threading.Condition()
        self._buffer = bytearray()
        self._n_buffered = 0
        self._is_closing = False
        self._lost = 0
        self._is_losing = False
        # In a fleet its lines also have slot and database.
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="applylog", daemon=True)
        self._thread.start()

    async def opened(self) -> None:
        """Wait for the first file, but not for a disk that does not answer: applying then goes on without it.

        Raises:
            ConfigError: as `ApplyLog`.
        """
        try:
            async with asyncio.timeout(_OPEN_S):
                await asyncio.wrap_future(self._opening)
        except TimeoutError:
            self._lose(0, _NO_ANSWER)

    @property
    def dropped(self) -> int:
        """Return the records lost since the start: refused by the disk, or too many for the buffer."""
        return self._lost + (0 if self._file is None else self._file.dropped)

    def write(self, records: Sequence[Record]) -> None:
        """Take records, all or none; they reach the file within a second. Never raises, never waits for the disk."""
        lines = self._encoder.encode_lines(records)
        with self._changed:
            if len(self._buffer) + len(lines) >= self._limit_bytes:
                self._lose(len(records), "the disk is too slow")
                return
            self._buffer += lines
            self._n_buffered += len(records)
            if len(self._buffer) >= _CHUNK_BYTES:
                self._changed.notify()

    def close(self) -> None:
        """Let the thread write the buffered lines and close the file; give up on a disk that does not answer.

        To be called from another thread than the loop's, because it waits.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # A daemon thread: it does not keep the process. The open file is recovered by the next start.
            with self._changed:
                self._lost += self._n_buffered
            self._log.error("applylog_dropping", reason=_NO_ANSWER, dropped=self.dropped)

    def _lose(self, n_records: int, reason: str) -> None:
        self._lost += n_records
        if not self._is_losing:  # once for each outage
            self._is_losing = True
            self._log.error("applylog_dropping", reason=reason, dropped=self.dropped)

    def _go_on(self) -> None:
        with self._changed:
            was_losing, self._is_losing = self._is_losing, False
        if was_losing:
            self._log.info("applylog_resumed", dropped=self.dropped)

    def _run(self) -> None:
        try:
            self._file = file = self._open()
        except Exception as error:  # noqa: BLE001  `opened` raises it
            self._refused(error)
            return
        self._opening.set_result(None)
        while True:
            with self._changed:
                if not self._is_closing and len(self._buffer) < _CHUNK_BYTES:
                    self._changed.wait(_FLUSH_S)
                lines, self._buffer = self._buffer, bytearray()
                n_records, self._n_buffered = self._n_buffered, 0
                is_closing = self._is_closing
            try:
                if lines:
                    file.append(lines, n_records)
                    n_records = 0
                    self._go_on()
                (file.close if is_closing else file.tick)()
            except Exception as error:  # noqa: BLE001  with the thread all later records would be lost, uncounted
                with self._changed:
                    self._lose(n_records, repr(error))
            if is_closing:
                return

    def _refused(self, error: Exception) -> None:
        """End the start, or take nothing more where it did not wait for this."""
        with self._changed:
            self._limit_bytes = 0
            if self._is_losing:
                self._log.error("applylog_dropping", reason=str(error), dropped=self.dropped + self._n_buffered)
            self._lost += self._n_buffered
            self._buffer, self._n_buffered = bytearray(), 0
        self._opening.set_exception(error)
