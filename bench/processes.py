"""Cost of processes: CPU time and peak memory by role, from the kernel's counters of each.

In go process ids with the role that each has; out come sums.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable

# The kernel's name for every process of PostgreSQL, whatever its title says.
_POSTGRES = "postgres"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Usage of the processes of one role.

    Attributes:
        cpu_s: seconds of CPU, user and system, of all its processes together, without their children.
        peak_bytes: largest resident memory that one of its processes has had (VmHWM). For a PostgreSQL process that
            would hold every page of the shared buffers that it ever touched, and say little, so for one of these it is
            the largest private memory found when samples were taken (resident and not shared, RssAnon).
    """

    cpu_s: float
    peak_bytes: int


@dataclass(kw_only=True)
class _Process:
    """One process: what it is, and what was seen of it last.

    Attributes:
        identity: id and moment of its start; two are equal if they are one process.
    """

    role: str
    identity: psutil.Process
    base_s: float
    cpu_s: float
    peak_bytes: int = 0
    has_ended: bool = False


class ProcessWatch:
    """Processes under watch. One that ends keeps what was seen of it last, so take samples often enough for it."""

    def __init__(self, find: Callable[[int], psutil.Process] = psutil.Process) -> None:
        """Start with nothing watched.

        Args:
            find: the process that has an id now.

        Raises:
            DemoError: the peak of memory is known on Linux only.
        """
        if not psutil.LINUX:
            raise DemoError("Measuring CPU time and memory of processes needs /proc.", hint="run this on Linux")
        self._find = find
        self._roles: dict[str, None] = {}
        self._processes: dict[tuple[str, psutil.Process], _Process] = {}

    def add(self, role: str, pid: int, *, from_start: bool = False) -> None:
        """Watch a process; one that is watched in this role already stays as it is.

        One that has ended already is passed over: a list of PostgreSQL's processes is old when it arrives. The role is
        known then, with nothing used.

        Args:
            role: under which its use is summed up.
            pid: process id.
            from_start: count its CPU from its start, not from now.
        """
        self._roles[role] = None
        try:
            identity = self._find(pid)
            cpu_s = _cpu_s(identity)
        except psutil.NoSuchProcess:
            return
        process = _Process(role=role, identity=identity, base_s=0.0 if from_start else cpu_s, cpu_s=cpu_s)
        self._look(self._processes.setdefault((role, identity), process))

    def sample(self) -> None:
        """Sample every process that has not ended."""
        for process in self._processes.values():
            if not process.has_ended:
                self._look(process)

    def usage(self) -> dict[str, Usage]:
        """Take a last sample and return what each role has used, in the order in which roles were added."""
        self.sample()
        by_role: dict[str, list[_Process]] = {role: [] for role in self._roles}
        for process in self._processes.values():
            by_role[process.role].append(process)
        return {
            role: Usage(
                cpu_s=sum(process.cpu_s - process.base_s for process in processes),
                peak_bytes=max((process.peak_bytes for process in processes), default=0),
            )
            for role, processes in by_role.items()
        }

    def _look(self, process: _Process) -> None:
        try:
            now = self._find(process.identity.pid)
            # The id may belong to another process by now.
            process.has_ended = now != process.identity
            if process.has_ended:
                return
            process.cpu_s = _cpu_s(now)
            if now.name() == _POSTGRES:
                memory = now.memory_info()
                held_bytes = memory.rss - memory.shared
            else:
                held_bytes = peak_bytes(now.pid)
            process.peak_bytes = max(process.peak_bytes, held_bytes)
        except psutil.NoSuchProcess:
            process.has_ended = True


def server_cpu_s(postmaster_pid: int) -> float:
    """Return the seconds, user and system, that a server's processes have used since it started.

    The kernel adds processes that have ended to their parent, so no process has to be polled while the server works.
    """
    postmaster = psutil.Process(postmaster_pid)
    children = postmaster.children()
    times = postmaster.cpu_times()
    used_s: float = times.user + times.system + times.children_user + times.children_system
    for child in children:
        # It may have ended in between; its parent knows next time.
        with contextlib.suppress(psutil.NoSuchProcess):
            used_s += _cpu_s(child)
    return used_s


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had (VmHWM); 0 for one that has ended.

    psutil does not report it. Source: proc_pid_status(5).
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    used_s: float = times.user + times.system
    return used_s
