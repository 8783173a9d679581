"""Processor time of this machine and of processes on it, as Linux counts it; elsewhere nothing is known.

Where the target runs on the daemon's machine, this shows how much of the processors its statements can still get.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
#: Fields of a process: user and system time, counted from the field after its name. Source: proc_pid_stat(5).
_USER, _SYSTEM = 11, 12
#: Fields of the machine: idle and waiting for a disk. Source: proc_stat(5).
_IDLE, _IO_WAIT = 3, 4


def processors(pid: int) -> int:
    """Return on how many processors of this machine a process may run; of all if it does not exist."""
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:
        return os.cpu_count() or 0


def busy_s() -> float | None:
    """Return the processor seconds that everything on this machine has taken; None where that is not counted."""
    try:
        line = (_PROC / "stat").read_bytes().split(b"\n", 1)[0].split()[1:9]
        ticks = [int(word) for word in line]
        return (sum(ticks) - ticks[_IDLE] - ticks[_IO_WAIT]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def taken_s(pid: int) -> float:
    """Return the processor seconds that a process has taken; 0 if it does not exist."""
    try:
        # The name is in brackets and may hold anything.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def is_sender(pid: int) -> bool:
    """Return whether a process of this machine is a walsender of PostgreSQL's."""
    try:
        return b"walsender" in (_PROC / str(pid) / "cmdline").read_bytes() and is_postgres(pid)
    except OSError:
        return False


def is_postgres(pid: int) -> bool:
    """Return whether a process of this machine is one of PostgreSQL's."""
    try:
        return (_PROC / str(pid) / "comm").read_bytes().startswith(b"postgres")
    except OSError:
        return False
