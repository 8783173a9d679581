"""What processes cost: CPU time and peak memory by role, from what the kernel keeps of each.

In go process ids with the role that each has; out come sums. Reads /proc and nothing else.

Source: proc_pid_stat(5), proc_pid_status(5).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from parapply.demo.errors import DemoError

# What the kernel calls every process of PostgreSQL, whatever its title says.
_POSTGRES = "postgres"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the processes of one role have used.

    Attributes:
        cpu_s: seconds of CPU, user and system, of all its processes together; those of their children are not in it.
        peak_bytes: largest resident memory that one of its processes has had (VmHWM). That of a PostgreSQL process
            holds every page of the shared buffers that it ever touched and says little, so for one of these it is the
            largest private memory (RssAnon) met when samples were taken.
    """

    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Stat:
    """One look at /proc/PID/stat.

    Attributes:
        name: of the program, cut to 15 bytes.
        started: when the process started, in ticks since boot; together with the id it names a process.
        ticks: CPU used, user and system.
    """

    name: str
    started: int
    ticks: int


@dataclass(kw_only=True)
class _Process:
    """One process: what it is, and what was seen of it last."""

    role: str
    pid: int
    started: int
    base_ticks: int
    ticks: int
    peak_bytes: int = 0
    has_ended: bool = False


class ProcessWatch:
    """Processes under watch. One that ends keeps what was seen of it last, so take samples often enough for it."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        """Watch nobody yet.

        Args:
            proc: where the kernel tells of processes.

        Raises:
            DemoError: it does not on this machine.
        """
        if not (proc / "self" / "stat").exists():
            raise DemoError("Measuring CPU time and memory of processes needs /proc.", hint="run this on Linux")
        self._proc = proc
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._roles: dict[str, None] = {}
        self._processes: dict[tuple[str, int, int], _Process] = {}

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
        stat = _read_stat(self._proc, pid)
        if stat is None:
            return
        process = _Process(
            role=role,
            pid=pid,
            started=stat.started,
            base_ticks=0 if from_start else stat.ticks,
            ticks=stat.ticks,
        )
        self._look(self._processes.setdefault((role, pid, stat.started), process))

    def sample(self) -> None:
        """Look at every process that has not ended."""
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
                cpu_s=sum(process.ticks - process.base_ticks for process in processes) / self._ticks_per_s,
                peak_bytes=max((process.peak_bytes for process in processes), default=0),
            )
            for role, processes in by_role.items()
        }

    def _look(self, process: _Process) -> None:
        stat = _read_stat(self._proc, process.pid)
        if stat is None or stat.started != process.started:
            # The id may belong to somebody else by now.
            process.has_ended = True
            return
        process.ticks = stat.ticks
        field = "RssAnon" if stat.name == _POSTGRES else "VmHWM"
        process.peak_bytes = max(process.peak_bytes, _read_memory_bytes(self._proc, process.pid, field))


def _read_stat(proc: Path, pid: int) -> _Stat | None:
    """Return a process's state; `None` if there is none of this id."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name can hold blanks and brackets; nothing behind it does.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    # Of proc_pid_stat(5): fields 14, 15 and 22; the first one here is number 3.
    return _Stat(name=head.partition("(")[2], started=int(fields[19]), ticks=int(fields[11]) + int(fields[12]))


def _read_memory_bytes(proc: Path, pid: int, field: str) -> int:
    """Return a field of /proc/PID/status that is in kB; 0 for a process that has ended and was not waited for yet."""
    try:
        text = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0
