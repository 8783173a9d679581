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
from parapply.errors import ConfigError
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
    file = ApplyLog(tmp_path, 1 << 20, 3600)
    log = ApplyLogWriter(lambda: file)
    (path,) = tmp_path.iterdir()
    written = threading.Event()
    append = file.append

    def noted(lines: bytes | bytearray, n_records: int) -> None:
        append(lines, n_records)
        written.set()

    file.append = noted  # type: ignore[method-assign]
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
    log = ApplyLogWriter(lambda: file, limit_bytes=100_000)
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
    log = ApplyLogWriter(lambda: file)
    log.write([record(1)])
    log.close()
    assert _names(events) == ["applylog_dropping"]
    assert json.loads(disk.release())["seq"] == 1
    log._thread.join()


async def test_the_start_does_not_wait_for_a_hanging_disk(
    tmp_path: Path, events: io.BytesIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the disk some seconds, then applies; what came in between is written when the disk answers."""
    monkeypatch.setattr(applylog_writer, "_OPEN_S", 0.05)
    answers = threading.Event()

    def open_log() -> ApplyLog:
        answers.wait()
        return ApplyLog(tmp_path, 1 << 20, 3600)

    log = ApplyLogWriter(open_log)
    await log.opened()
    log.write([record(1)])
    assert _names(events) == ["applylog_dropping"]
    answers.set()
    log.close()
    assert _names(events) == ["applylog_dropping", "applylog_resumed"]
    assert (lines_in(tmp_path), log.dropped) == ([1], 0)


async def test_a_directory_is_refused(tmp_path: Path, events: io.BytesIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start; later, because the disk did not answer then, all records are counted as lost."""
    (tmp_path / "file").touch()
    answers = threading.Event()
    answers.set()

    def open_log() -> ApplyLog:
        answers.wait()
        return ApplyLog(tmp_path / "file" / "log", 1 << 20, 3600)

    with pytest.raises(ConfigError, match=r"^applylog\.directory: "):
        await ApplyLogWriter(open_log).opened()
    monkeypatch.setattr(applylog_writer, "_OPEN_S", 0.05)
    answers.clear()
    late = ApplyLogWriter(open_log)
    await late.opened()
    late.write([record(1), record(2)])
    answers.set()
    late._thread.join()
    late.write([record(3)])
    late.close()
    assert late.dropped == 3
    assert _names(events) == ["applylog_dropping"] * 2


def test_an_error_of_ours_does_not_end_the_log(tmp_path: Path, events: io.BytesIO) -> None:
    """Its records are counted, and those that follow are written."""
    file = ApplyLog(tmp_path, 1 << 20, 3600)
    append, failed = file.append, threading.Event()

    def fail(_lines: bytes | bytearray, _n_records: int) -> None:
        file.append = append  # type: ignore[method-assign]
        failed.set()
        raise ValueError("ours")

    file.append = fail  # type: ignore[assignment,method-assign]
    log = ApplyLogWriter(lambda: file)
    log.write([record(1), record(2)])
    assert failed.wait(30)
    log.write([record(3)])
    log.close()
    assert (lines_in(tmp_path), log.dropped) == ([3], 2)
    assert _names(events) == ["applylog_dropping", "applylog_resumed"]
