"""The apply log: one JSON line for each target transaction, for the report and for people with grep.

In: records (`applylog_schema.py`). Out: files ``apply-<utc>-<pid>-<n>.jsonl`` in one directory. A file is written as
``.jsonl.open`` and renamed when it is closed, so that a reader that takes ``*.jsonl`` sees finished files only. The
open file is locked; a ``.jsonl.open`` that nobody has locked belongs to a process that died, and is closed at the next
start.

No row and no key values. Never raises into the apply path: what cannot be written is counted and dropped.
The caller calls `ApplyLog.tick` at least once a second; nothing here starts a task.
"""

from __future__ import annotations

import fcntl
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.errors import ConfigError
from parapply.logs import get_logger
from parapply.model import POSTGRES_EPOCH_US

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.applylog_schema import Record

#: Bytes collected before they are written: one system call for some hundred records.
_BUFFER_BYTES: Final = 64 * 1024
#: Seconds records may stay in memory: what is lost of the log when the process is killed.
_FLUSH_S: Final = 1.0
_OPEN_SUFFIX: Final = ".open"


def utc_text(unix_s: float) -> str:
    """Return seconds since 1970 as ``2026-11-21T02:40:22.123456+00:00``."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds")


def wire_time_text(postgres_us: int) -> str:
    """Return a timestamp of the wire (microseconds since 2000-01-01 UTC) as `utc_text` does."""
    return utc_text((postgres_us + POSTGRES_EPOCH_US) / 1e6)


class ApplyLog:
    """Appends records to files of limited size and age. All fields are written by the leader's thread only."""

    def __init__(
        self, directory: Path, rotate_bytes: int, rotate_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Make the directory, close what a dead process left, open the first file.

        Args:
            directory: absolute or relative to the working directory; several daemons may share it.
            rotate_bytes: a file that has reached this size is closed.
            rotate_s: a file of this age that is not empty is closed.
            clock: seconds since 1970.

        Raises:
            ConfigError: the directory cannot be made or written.
        """
        self._directory = directory
        self._rotate_bytes = rotate_bytes
        self._rotate_s = rotate_s
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._log = get_logger()
        #: Records lost since the start. Read by the status display.
        self.dropped = 0
        self._buffer = bytearray()
        self._buffered = 0  # records in the buffer
        self._is_failing = False
        self._number = 0
        self._fd = -1
        self._path = Path()
        self._size_bytes = 0  # of whole records in the file
        self._opened_s = self._flushed_s = clock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            recover(directory)
            self._open()
        except OSError as error:
            raise ConfigError(f"applylog.directory: cannot write in {directory}: {error.strerror}.") from error

    def write(self, record: Record) -> None:
        """Take one record; it reaches the file within a second. Never raises."""
        self._buffer += self._encoder.encode(record)
        self._buffer += b"\n"
        self._buffered += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def tick(self) -> None:
        """Write what has waited long enough, and close a file that is old enough. Never raises."""
        now_s = self._clock()
        if self._buffered and now_s - self._flushed_s >= _FLUSH_S:
            self._flush()
        if self._size_bytes and now_s - self._opened_s >= self._rotate_s:
            self._rotate()

    def close(self) -> None:
        """Write everything and give the file its final name. Never raises; closing twice is fine."""
        if self._buffered:
            self._flush()
        self._finish()

    def _flush(self) -> None:
        self._flushed_s = self._clock()
        try:
            if self._fd < 0:
                self._open()
            _write_all(self._fd, bytes(self._buffer))
        except OSError as error:
            self._drop(error)
        else:
            self._size_bytes += len(self._buffer)
            if self._is_failing:
                self._is_failing = False
                self._log.info("applylog_resumed", dropped=self.dropped)
        self._buffer.clear()
        self._buffered = 0
        if self._size_bytes >= self._rotate_bytes:
            self._rotate()

    def _drop(self, error: OSError) -> None:
        self.dropped += self._buffered
        if not self._is_failing:  # once for each outage, not once a second
            self._log.error("applylog_dropping", file=str(self._path), error=error.strerror, dropped=self.dropped)
            self._is_failing = True
        if self._fd >= 0:
            try:
                os.ftruncate(self._fd, self._size_bytes)
            except OSError:
                # The torn line stays last in this file, where recovery cuts it off.
                os.close(self._fd)
                self._fd, self._size_bytes = -1, 0

    def _rotate(self) -> None:
        self._finish()
        try:
            self._open()
        except OSError as error:
            self._drop(error)

    def _open(self) -> None:
        utc = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y%m%dT%H%M%SZ")
        while True:
            final = self._directory / f"apply-{utc}-{os.getpid()}-{self._number}.jsonl"
            self._number += 1
            fd = _create_locked(final)
            if fd >= 0:
                break
        self._path, self._fd, self._size_bytes, self._opened_s = final, fd, 0, self._clock()

    def _finish(self) -> None:
        if self._fd < 0:
            return
        try:
            _give_final_name(self._path.with_name(self._path.name + _OPEN_SUFFIX), self._size_bytes)
        except OSError as error:
            # The records are in the file: the next start renames it.
            self._log.error("applylog_dropping", file=str(self._path), error=error.strerror, dropped=self.dropped)
        os.close(self._fd)
        self._fd, self._size_bytes = -1, 0


def recover(directory: Path) -> list[Path]:
    """Close the files that processes which died left open: cut an unfinished last line off, then rename.

    Process ids say nothing here (every container's daemon is process 1); the lock of a dead process is gone.

    Returns:
        The final names of the files that hold records.

    Raises:
        OSError: the directory cannot be read or written.
    """
    recovered = []
    for path in sorted(directory.glob(f"apply-*.jsonl{_OPEN_SUFFIX}")):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size_bytes = _whole_lines_bytes(fd)
            os.ftruncate(fd, size_bytes)
            final = _give_final_name(path, size_bytes)
        except BlockingIOError:
            continue  # its writer lives
        finally:
            os.close(fd)
        if final is not None:
            recovered.append(final)
            get_logger().warning("applylog_recovered", file=str(final), size_bytes=size_bytes)
    return recovered


def _write_all(fd: int, data: bytes) -> None:
    # A full disk takes a part, and refuses only the next write.
    while data:
        data = data[os.write(fd, data) :]


def _whole_lines_bytes(fd: int) -> int:
    """Return the offset after the last newline; looks backwards, for the file may be large."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _BUFFER_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _create_locked(final: Path) -> int:
    """Return a new, locked file for the final name, or -1 if the name is taken."""
    path = final.with_name(final.name + _OPEN_SUFFIX)
    if final.exists():
        return -1
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640)
    except FileExistsError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass  # another start took the new file for a dead one's, between its creation and its lock
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return -1


def _give_final_name(path: Path, size_bytes: int) -> Path | None:
    if size_bytes == 0:
        path.unlink()
        return None
    return path.rename(path.with_name(path.name.removesuffix(_OPEN_SUFFIX)))
