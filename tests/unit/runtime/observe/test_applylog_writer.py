"""The apply-log writer: a disk that does not answer holds up no worker; what comes too late is dropped and counted."""

from __future__ import annotations

import io
import json
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from parapply import logs
from parapply.applylog import ApplyLog
from parapply.runtime.observe import applylog_writer
from parapply.runtime.observe.applylog_writer import ApplyLogWriter
from tests.unit.test_applylog import lines_in, record

if TYPE_CHECKING:
    from pathlib import Path


class HangingDisk:
    """A file that takes no byte until it is released: a full pipe in its place, as a stopped file server does."""

    def __init__(self, log: ApplyLog) -> None:
        """Put the pipe in the place of the open file."""
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while os.write(writing, b"\n" * 4096):
                pass
        os.set_blocking(writing, True)
        os.dup2(writing, log._fd)
        os.close(writing)

    def release(self) -> bytes:
        """Take what was written until the writer closes the file."""
        with os.fdopen(self._reading, "rb") as stream:
            return stream.read().lstrip(b"\n")


@pytest.fixture
def events() -> io.BytesIO:
    """Return what is logged."""
    stream = io.BytesIO()
    logs.configure("info", "json", stream)
    return stream


def _names(events: io.BytesIO) -> list[str]:
    return [json.loads(line)["event"] for line in events.getvalue().splitlines()]


def test_records_reach_the_file_by_themselves(tmp_path: Path) -> None:
    """Without another call a record is written within a second or so; a full chunk at once."""
    log = ApplyLogWriter(ApplyLog(tmp_path, 1 << 20, 3600))
    (path,) = tmp_path.iterdir()
    written = threading.Event()
    append = log._file.append

    def noted(lines: bytes | bytearray, n_records: int) -> None:
        append(lines, n_records)
        written.set()

    log._file.append = noted  # type: ignore[method-assign]
    log.write([record(1)])
    assert written.wait(30)
    assert path.read_bytes().endswith(b"\n")
    log.close()
    assert lines_in(tmp_path) == [1]
    assert log.dropped == 0


def test_a_hanging_disk_holds_up_nobody(tmp_path: Path, events: io.BytesIO) -> None:
    """While a write hangs, records are taken up to a limit, then dropped, told once; the others are written later."""
    file = ApplyLog(tmp_path, 1 << 30, 3600)
    disk = HangingDisk(file)
    log = ApplyLogWriter(file, limit_bytes=100_000)
    # These return although nothing can be written: the limit is reached on the way, whenever the thread began.
    for seq in range(1000):
        log.write([record(seq)])
    dropped = log.dropped
    assert 500 < dropped < 1000
    assert _names(events) == ["applylog_dropping"]
    closing = threading.Thread(target=log.close)
    closing.start()
    written = disk.release()
    closing.join()
    assert _names(events) == ["applylog_dropping", "applylog_resumed"]
    seqs = [json.loads(line)["seq"] for line in written.splitlines()]
    assert seqs == sorted(seqs)
    assert len(seqs) == 1000 - dropped == 1000 - log.dropped


def test_the_end_does_not_wait_for_a_hanging_disk(
    tmp_path: Path, events: io.BytesIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that stops gives the disk some seconds, then goes, and says so."""
    monkeypatch.setattr(applylog_writer, "_CLOSE_S", 0.05)
    file = ApplyLog(tmp_path, 1 << 30, 3600)
    disk = HangingDisk(file)
    log = ApplyLogWriter(file)
    log.write([record(1)])
    log.close()
    assert _names(events) == ["applylog_dropping"]
    assert json.loads(disk.release())["seq"] == 1
    log._thread.join()
