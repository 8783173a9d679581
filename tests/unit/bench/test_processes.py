"""Usage of real processes is reported as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from bench.processes import ProcessWatch, Usage, server_cpu_s
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MEBIBYTE = 1024 * 1024
# For each line on its input: takes memory and gives it back, burns CPU, and says what it has used so far.
CHILD = """
import sys, time
for line in sys.stdin:
    block = bytearray(b"x") * (int(line) * 1048576)
    del block
    end_s = time.process_time() + 0.25
    while time.process_time() < end_s:
        pass
    print(time.process_time(), flush=True)
"""
PROCESS_NAME = "postgres"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")]


@contextmanager
def child(program: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """A process that works when told to, and ends with the block."""
    command: Sequence[str] = [program, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def work(process: subprocess.Popen[str], mebibytes: int) -> float:
    """Have it take memory and burn a quarter of a second; return the CPU it has used since its start."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{mebibytes}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def test_cpu_counts_from_add_or_from_the_start() -> None:
    """CPU counts from the moment of `add`, or from the start of the process, up to the clock tick."""
    with child() as process:
        before_s = work(process, 1)
        watch = ProcessWatch()
        watch.add("since now", process.pid)
        watch.add("whole", process.pid, from_start=True)
        # Again changes nothing, however it is asked for.
        watch.add("since now", process.pid, from_start=True)
        after_s = work(process, 1)
        usage = watch.usage()
        assert usage["whole"].cpu_s == pytest.approx(after_s, abs=0.05)
        assert usage["since now"].cpu_s == pytest.approx(after_s - before_s, abs=0.05)


def test_peak_memory_is_remembered() -> None:
    """Memory that was given back before anybody looked is in the peak; the peak of a role is its largest process."""
    with child() as small, child() as large:
        watch = ProcessWatch()
        for process, mebibytes in ((small, 1), (large, 64)):
            work(process, mebibytes)
            watch.add("both", process.pid, from_start=True)
            watch.add(f"{mebibytes} MiB", process.pid)
        usage = watch.usage()
    assert 64 * MEBIBYTE < usage["both"].peak_bytes < 128 * MEBIBYTE
    assert usage["both"].peak_bytes == usage["64 MiB"].peak_bytes
    assert usage["1 MiB"].peak_bytes < usage["64 MiB"].peak_bytes - 32 * MEBIBYTE


def test_cpu_of_a_role_is_the_sum() -> None:
    """The CPU of a role is the sum over all its processes."""
    with child() as one, child() as other:
        watch = ProcessWatch()
        for process in (one, other):
            watch.add("both", process.pid)
        spent_s = work(one, 1) + work(other, 1)
        assert 0.4 < watch.usage()["both"].cpu_s <= spent_s + 0.05


def test_private_memory_stands_for_a_server_process(tmp_path: Path) -> None:
    """Of a process called postgres the largest private memory seen counts: its peak would hold shared buffers."""
    program = tmp_path / PROCESS_NAME
    program.symlink_to(sys.executable)
    with child(str(program)) as process:
        work(process, 64)
        assert (Path("/proc") / str(process.pid) / "comm").read_text(encoding="utf-8").strip() == PROCESS_NAME
        watch = ProcessWatch()
        watch.add("server", process.pid)
        assert 0 < watch.usage()["server"].peak_bytes < 32 * MEBIBYTE


def test_a_process_that_has_ended_keeps_its_last_sample() -> None:
    """The last sample of a process stays when it is gone."""
    watch = ProcessWatch()
    with child() as process:
        watch.add("gone", process.pid, from_start=True)
        spent_s = work(process, 8)
        watch.sample()
    watch.sample()
    usage = watch.usage()["gone"]
    assert usage.cpu_s == pytest.approx(spent_s, abs=0.05)
    assert usage.peak_bytes > 8 * MEBIBYTE
    watch.add("too late", process.pid, from_start=True)
    assert watch.usage()["too late"] == Usage(cpu_s=0.0, peak_bytes=0)


def test_a_pid_that_another_process_has_now_is_not_counted() -> None:
    """A process id given to another process does not add what that one uses, unless it is added itself."""
    found: dict[int, psutil.Process] = {}
    watch = ProcessWatch(lambda pid: found.get(pid) or psutil.Process(pid))
    with child() as first, child() as second:
        spent_s = work(first, 1)
        watch.add("daemon", first.pid, from_start=True)
        before = watch.usage()["daemon"]
        other_s = work(second, 1)
        # The kernel gives an id again after thousands of others only.
        found[first.pid] = psutil.Process(second.pid)
        watch.sample()
        assert watch.usage()["daemon"] == before
        watch.add("daemon", first.pid, from_start=True)
        assert watch.usage()["daemon"].cpu_s == pytest.approx(spent_s + other_s, abs=0.05)


def test_a_server_s_cpu_has_processes_that_run_and_that_have_ended() -> None:
    """The sum has the server itself, its children, and those that it has waited for."""
    family = f"""
import subprocess, sys
words = [sys.executable, "-c", {CHILD!r}]
ended = subprocess.run(words, input="1", stdout=subprocess.PIPE, text=True)
running = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print("1", file=running.stdin, flush=True)
print(float(ended.stdout) + float(running.stdout.readline()), flush=True)
sys.stdin.read()
"""
    words = [sys.executable, "-c", family]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children_s = float(process.stdout.readline())
        own = psutil.Process(process.pid).cpu_times()
        assert server_cpu_s(process.pid) == pytest.approx(children_s + own.user + own.system, abs=0.05)


def test_elsewhere_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the peak of memory is not known there is one clear error."""
    monkeypatch.setattr(psutil, "LINUX", False)
    with pytest.raises(DemoError, match="needs /proc"):
        ProcessWatch()
