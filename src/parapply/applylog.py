"""The apply log's files: lines in, finished files out.

In: encoded lines. Out: files ``apply-<slot>-<utc>-<pid>-<n>.jsonl`` in one directory. A file is written as
``.jsonl.open`` and renamed when it is closed, so that a reader that takes ``*.jsonl`` sees finished files only. The
open file is locked; an unlocked ``.jsonl.open`` belongs to a process that died, and is closed at the next start.
Finished files of the slot are removed by age and by their size together; files of other slots are not.

Lines that cannot be written are counted and dropped; nothing here raises after the start. The disk may keep a call
waiting without limit, so the daemon calls from a thread (`runtime/observe/applylog_writer.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.errors import ConfigError
from parapply.logs import get_logger
from parapply.model import POSTGRES_EPOCH_US

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes that recovery reads in one go for the last end of a line.
_BLOCK_BYTES: Final = 64 * 1024
#: Seconds between two searches for files that are too old.
_RETENTION_CHECK_S: Final = 60.0
_OPEN_SUFFIX: Final = ".open"


class Retention(NamedTuple):
    """Until when finished files of the slot are kept; 0 is no limit."""

    age_s: float = 0.0  # since the last line was written
    size_bytes: int = 0  # of all of them; the oldest go first, the latest never


_NO_RETENTION: Final = Retention()
#: The rest after the slot in the name of a finished file.
_REST: Final = re.compile(r"\d{8}T\d{6}Z-\d+-\d+\.jsonl")


def utc_text(unix_s: float) -> str:
    """Return seconds since 1970 as ``2026-11-21T02:40:22.123456+00:00``."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds")


def wire_time_text(postgres_us: int) -> str:
    """Return a timestamp of the wire (microseconds since 2000-01-01 UTC) as `utc_text` does."""
    second, part_us = divmod(postgres_us, 1_000_000)
    return f"{_second_text(second)}.{part_us:06d}+00:00"


@lru_cache(maxsize=64)
def _second_text(postgres_s: int) -> str:
    # Transactions come in the order of their commits: hundreds share a second.
    at = datetime.fromtimestamp(postgres_s + POSTGRES_EPOCH_US // 1_000_000, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S")


class ApplyLog:
    """Appends lines to files of limited size and age. Used by one thread at a time."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        directory: Path,
        rotate_bytes: int,
        rotate_s: float,
        *,
        slot: str = "",
        retention: Retention = _NO_RETENTION,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the directory, close what a dead process left, open the first file.

        Args:
            directory: absolute or relative to the working directory; several daemons may share it.
            rotate_bytes: a file that has reached this size is closed.
            rotate_s: a file of this age that is not empty is closed.
            slot: whose log it is; lower-case letters, digits and underscores.
            retention: of the slot's finished files, including files of earlier runs.
            clock: seconds since 1970.

        Raises:
            ConfigError: the directory cannot be made or written.
        """
        self._directory = directory
        self._rotate_bytes = rotate_bytes
        self._rotate_s = rotate_s
        self._stem = f"apply-{slot}-"
        self._retention = retention
        self._clock = clock
        self._log = get_logger()
        #: Records lost since the start because the disk refused them.
        self.dropped = 0
        self._is_failing = False
        self._number = 0
        self._fd = -1
        self._path = Path()
        self._size_bytes = 0  # of whole lines in the file
        self._n_records = 0  # the same
        self._opened_s = self._retained_s = clock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            recover(directory)
            self._open()
        except OSError as error:
            raise ConfigError(f"applylog.directory: cannot write in {directory}: {error.strerror}.") from error
        self._remove_old()

    def append(self, lines: bytes | bytearray, n_records: int) -> None:
        """Write whole lines. Never raises; waits as long as the disk does."""
        try:
            if self._fd < 0:
                self._open()
            _write_all(self._fd, lines)
        except OSError as error:
            self._drop(error, n_records)
        else:
            self._size_bytes += len(lines)
            self._n_records += n_records
            if self._is_failing:
                self._is_failing = False
                self._log.info("applylog_resumed", dropped=self.dropped)
        if self._size_bytes >= self._rotate_bytes:
            self._rotate()

    def tick(self) -> None:
        """Close a file that is old enough, remove finished ones that are; to be called about once a second."""
        now_s = self._clock()
        if self._size_bytes and now_s - self._opened_s >= self._rotate_s:
            self._rotate()
        if abs(now_s - self._retained_s) >= _RETENTION_CHECK_S:
            self._remove_old()

    def close(self) -> None:
        """Give the file its final name. Never raises; closing twice is fine."""
        self._finish()

    def _drop(self, error: OSError, n_records: int = 0) -> None:
        self.dropped += n_records
        if not self._is_failing:  # once for each outage, not once a second
            self._log.error("applylog_dropping", file=str(self._path), error=error.strerror, dropped=self.dropped)
            self._is_failing = True
        if self._fd >= 0:
            try:
                os.ftruncate(self._fd, self._size_bytes)
            except OSError:
                # The torn line stays last in this file, where recovery cuts it off.
                self._close()

    def _close(self) -> None:
        fd, n_records = self._fd, self._n_records
        self._fd, self._size_bytes, self._n_records = -1, 0, 0
        try:
            os.close(fd)
        except OSError as error:
            # A file server says only now that it has no room for some of what it took.
            self.dropped += n_records
            self._log.error("applylog_dropping", file=str(self._path), error=error.strerror, dropped=self.dropped)

    def _rotate(self) -> None:
        self._finish()
        try:
            self._open()
        except OSError as error:
            self._drop(error)
        self._remove_old()

    def _open(self) -> None:
        utc = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y%m%dT%H%M%SZ")
        while True:
            final = self._directory / f"{self._stem}{utc}-{os.getpid()}-{self._number}.jsonl"
            self._number += 1
            fd = _create_locked(final)
            if fd >= 0:
                break
        self._path, self._fd, self._opened_s = final, fd, self._clock()

    def _finish(self) -> None:
        if self._fd < 0:
            return
        try:
            _give_final_name(self._path.with_name(self._path.name + _OPEN_SUFFIX), self._size_bytes)
        except OSError as error:
            # The records are in the file, and the next start renames it, unless another process has removed it.
            if isinstance(error, FileNotFoundError):
                self.dropped += self._n_records
            self._log.error("applylog_dropping", file=str(self._path), error=error.strerror, dropped=self.dropped)
        self._close()

    def _remove_old(self) -> None:
        """Remove finished files of the slot: this is its only daemon, so no other process touches them."""
        self._retained_s = self._clock()
        if not any(self._retention):
            return
        try:
            for path in _outlived(_finished(self._directory, self._stem), self._retention, self._retained_s):
                path.unlink(missing_ok=True)
                self._log.info("applylog_removed", file=str(path))
        except OSError as error:
            self._log.warning("applylog_not_removed", file=str(self._directory), error=error.strerror)


class _Finished(NamedTuple):
    """A finished file; sorts by age, the newest last."""

    written_s: float
    name: str
    size_bytes: int
    path: Path


def _finished(directory: Path, stem: str) -> list[_Finished]:
    """Return the finished files of a stem, the oldest first; raise OSError if the directory cannot be read."""
    found = []
    for entry in os.scandir(directory):
        # Slots have no hyphen in their name: no other slot's file has this stem.
        if entry.name.startswith(stem) and _REST.fullmatch(entry.name, len(stem)):
            try:
                facts = entry.stat()
            except FileNotFoundError:
                continue
            found.append(_Finished(facts.st_mtime, entry.name, facts.st_size, Path(entry.path)))
    return sorted(found)


def _outlived(files: list[_Finished], retention: Retention, now_s: float) -> list[Path]:
    """Return the files to remove, of files that are sorted with the oldest first."""
    left_bytes = sum([file.size_bytes for file in files])
    outlived = []
    for file in files:
        is_old = 0 < retention.age_s < now_s - file.written_s
        is_latest = file is files[-1]
        if not is_old and (is_latest or not 0 < retention.size_bytes < left_bytes):
            break
        left_bytes -= file.size_bytes
        outlived.append(file.path)
    return outlived


def recover(directory: Path) -> list[Path]:
    """Close the files that processes which died left open: cut an unfinished last line off, then rename.

    This covers every slot. Only the lock shows which process lives, because a dead one has lost its lock. Process
    ids show nothing (every container's daemon is process 1). A file that cannot be recovered, such as one of
    another role's daemon, is left as it is, with a warning.

    Returns:
        The final names of the files that hold records.

    Raises:
        OSError: the directory cannot be read.
    """
    recovered = []
    for path in sorted(directory.glob(f"apply-*.jsonl{_OPEN_SUFFIX}")):
        try:
            final, size_bytes = _recovered(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # its writer lives, or has closed it since
        except OSError as error:
            get_logger().warning("applylog_not_recovered", file=str(path), error=error.strerror)
            continue
        if final is not None:
            recovered.append(final)
            get_logger().warning("applylog_recovered", file=str(final), size_bytes=size_bytes)
    return recovered


def _recovered(path: Path) -> tuple[Path | None, int]:
    """Cut and rename an open file; return its final name and size. Raise OSError if it is in use or cannot be."""
    # Other roles may write here: a link may lead to a file of theirs, and opening a pipe would wait for its writer.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size_bytes = _whole_lines_bytes(fd)
        os.ftruncate(fd, size_bytes)
        return _give_final_name(path, size_bytes), size_bytes
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | bytearray) -> None:
    # A full disk takes a part, and refuses only the next write.
    while data:
        data = data[os.write(fd, data) :]


def _whole_lines_bytes(fd: int) -> int:
    """Return the offset after the last newline; reads backwards, because the file may be large."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
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
