"""CPU time of a whole server, by what the kernel keeps: nobody has to look while it works.

In goes a postmaster's process id; out come seconds. Processes that have ended are in their parent's sum.

Source: proc_pid_stat(5): utime, stime, cutime, cstime.
"""

from __future__ import annotations

import os
from pathlib import Path


def server_cpu_s(postmaster_pid: int, proc: Path = Path("/proc")) -> float:
    """Return the seconds, user and system, that a server's processes have used since it started."""
    folder = proc / str(postmaster_pid)
    children = (folder / "task" / str(postmaster_pid) / "children").read_text(encoding="ascii").split()
    ticks = _ticks(folder, with_ended=True)
    for child in children:
        try:
            ticks += _ticks(proc / child, with_ended=False)
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended in between; its parent knows next time.
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(folder: Path, *, with_ended: bool) -> int:
    # The name can hold blanks and brackets; nothing behind it does. Fields 14 to 17; the first one here is number 3.
    fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11 : 15 if with_ended else 13])
