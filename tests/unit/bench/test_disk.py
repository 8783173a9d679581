"""The slow disk: a process with its library waits in page reads and flushes, as long as it is set to and no longer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bench.disk import SlowDisk
from bench.options import FAST, Disk
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from pathlib import Path

# Prints the seconds of ten reads of a page, in each way, and of ten flushes, for each line it reads.
READER = """
import ctypes, os, sys, time
class Part(ctypes.Structure):
    _fields_ = [("to", ctypes.c_void_p), ("size", ctypes.c_size_t)]
page = ctypes.create_string_buffer(8192)
part = Part(ctypes.addressof(page), 8192)
libc = ctypes.CDLL(None)  # Python itself calls preadv2
libc.preadv.argtypes = [ctypes.c_int, ctypes.POINTER(Part), ctypes.c_int, ctypes.c_long]
file = os.open(sys.argv[1], os.O_RDWR)
def seconds(call):
    began = time.monotonic()
    for _ in range(10):
        call()
    return time.monotonic() - began
for _ in sys.stdin:
    calls = (lambda: os.pread(file, 8192, 0), lambda: libc.preadv(file, part, 1, 0),
             lambda: os.fsync(file), lambda: os.fdatasync(file))
    print(*[seconds(call) for call in calls], flush=True)
"""
READ_S, SYNC_S = 0.01, 0.02


def test_reads_of_pages_and_flushes_take_longer_while_it_is_slow(tmp_path: Path) -> None:
    """Each page read and each flush takes at least as much longer; both are changed while the process runs.

    A process without the library is found out: it must not be measured as if its disk were slow.
    """
    if shutil.which("cc") is None:
        with pytest.raises(DemoError, match="needs a C compiler"):
            SlowDisk(tmp_path)
        return
    disk = SlowDisk(tmp_path)
    page = tmp_path / "page"
    page.write_bytes(bytes(8192))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(page)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **disk.environment},
    )  # fmt: skip

    def measure() -> list[float]:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
        return [float(word) for word in reader.stdout.readline().split()]

    with reader:
        # It has answered, so the program runs and the library is loaded or never will be.
        measure()
        disk.check(reader.pid)
        with pytest.raises(DemoError, match="did not load"):
            disk.check(os.getpid())
        with disk.slowed(Disk(read_us=int(READ_S * 1e6), sync_us=int(SYNC_S * 1e6))):
            pread_s, preadv_s, fsync_s, fdatasync_s = measure()
        assert min(pread_s, preadv_s) >= 10 * READ_S
        assert min(fsync_s, fdatasync_s) >= 10 * SYNC_S
        assert (tmp_path / "delays").read_bytes() == bytes(8)


def test_without_a_compiler_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler is missing the error names what to install; where it fails, what it said."""
    monkeypatch.setenv("CC", "there-is-no-such-compiler")
    with pytest.raises(DemoError, match="needs a C compiler"):
        SlowDisk(tmp_path)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(DemoError, match="cannot be built"):
        SlowDisk(tmp_path)


def test_names_tell_the_disk() -> None:
    """A disk as it is adds nothing to a runner's name."""
    assert [disk.text for disk in (FAST, Disk(read_us=150), Disk(read_us=1, sync_us=2))] == [
        "", ", read 150 us", ", read 1 us, sync 2 us",
    ]  # fmt: skip
