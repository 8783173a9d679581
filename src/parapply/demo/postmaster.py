"""Processes, ports and shared memory of a PostgreSQL server that we run.

In goes a server's directory; out come its processes, a port, and nothing left behind. Knows no SQL.
Layout of the directory: `data` is the data directory, `log` what the server wrote to its standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from parapply.demo.errors import DemoError

# Below Linux's range for outgoing connections (32768 and up): there, a client could take the port of a server that
# is down for a moment between a crash and its restart.
_PORTS = range(20000, 32000)
_PORT_ATTEMPTS = 200
_POLL_S = 0.01
_IPC_RMID = 0  # <sys/ipc.h>: remove a System V segment
# Line of postmaster.pid with key and identifier of the System V segment. Source: src/include/utils/pidfile.h,
# LOCK_FILE_LINE_SHMEM_KEY.
_SEGMENT_LINE = 7
_POSIX_SEGMENTS = "/dev/shm/PostgreSQL."  # noqa: S108 - the name that PostgreSQL gives its segments

# Waits for a word or for the end of its input. The end without a word means that our process died, however it died:
# then the server is stopped at once and its directory removed. The pid is read from postmaster.pid at that moment,
# so a restart needs no new guardian; a killed server leaves a stale one, hence the check of the process's directory.
# 100 rounds of 0.1 s: an immediate shutdown itself gives up after 5 s.
_GUARDIAN_SCRIPT = """
read -r word && exit 0
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
data=$(cd -P "$1/data" 2>/dev/null && pwd)
is_ours() { [ ! -d /proc/self ] || [ "$(readlink "/proc/$pid/cwd")" = "$data" ]; }
if [ -n "$pid" ] && is_ours && kill -QUIT "$pid" 2>/dev/null; then
  rounds=0
  while kill -0 "$pid" 2>/dev/null && [ "$rounds" -lt 100 ]; do sleep 0.1; rounds=$((rounds + 1)); done
  kill -KILL "$pid" 2>/dev/null
fi
rm -rf -- "$1"
"""


class Guardian:
    """A small process that ends the server and removes its directory when our process dies, even by SIGKILL.

    Chosen over PR_SET_PDEATHSIG, which fires when the starting *thread* ends, is Linux only, cannot be taken back
    and leaves the directory. It holds the other end of a pipe of ours, so a process forked from us without `exec`
    (multiprocessing's fork) keeps the server alive.
    """

    def __init__(self, directory: Path) -> None:
        shell = shutil.which("sh") or "/bin/sh"
        self._process = subprocess.Popen(  # noqa: S603 - constant script, the directory is an argument
            [shell, "-c", _GUARDIAN_SCRIPT, "guardian", directory],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Process id of the guardian."""
        return self._process.pid

    def dismiss(self) -> None:
        """End the watch: from now on no guardian stops the server or removes the directory for us."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(b"dismissed\n")


def free_port() -> int:
    """Return a TCP port of the loopback address that no process listens on; one may take it any moment.

    Raises:
        DemoError: none was found.
    """
    for _ in range(_PORT_ATTEMPTS):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DemoError(f"No free TCP port from {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1.")


def processes_in(data_dir: Path) -> list[int]:
    """Return the ids of all processes whose working directory is a data directory: the postmaster and its children.

    Children of a killed postmaster get another parent, so their parent cannot be used to find them.

    Raises:
        DemoError: the machine has no /proc.
    """
    if not Path("/proc/self").exists():
        raise DemoError("Finding a server's processes needs /proc.", hint="run this on Linux")
    wanted = str(data_dir.resolve())
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end while we read, or belong to another user.
        with contextlib.suppress(OSError):
            if str((process / "cwd").readlink()) == wanted:
                found.append(int(process.name))
    return found


def kill_processes_in(data_dir: Path, *, timeout_s: float) -> None:
    """Kill every process of a data directory and return when all are gone.

    Raises:
        DemoError: some were still there after `timeout_s` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while pids := processes_in(data_dir):
        if time.monotonic() > deadline_s:
            raise DemoError(f"Processes {pids} of {data_dir} do not end after SIGKILL.")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


class SharedMemory:
    """Shared memory that a killed server leaves; only its own restart, or this, frees it."""

    def __init__(self) -> None:
        self._system_v: set[int] = set()
        self._posix: set[Path] = set()

    def remember(self, data_dir: Path) -> None:
        """Note the segments of a running server that is about to be killed."""
        lines = _lines(data_dir / "postmaster.pid")
        if len(lines) >= _SEGMENT_LINE:
            self._system_v.update(int(word) for word in lines[_SEGMENT_LINE - 1].split()[1:])
        for pid in processes_in(data_dir):
            for line in _lines(Path(f"/proc/{pid}/maps")):
                if _POSIX_SEGMENTS in line and "(deleted)" not in line:
                    self._posix.add(Path(line[line.index(_POSIX_SEGMENTS) :]))

    def forget(self) -> None:
        """Drop the notes: the server started again and freed its old segments itself."""
        self._system_v.clear()
        self._posix.clear()

    def free(self) -> None:
        """Remove the remembered segments that still exist."""
        for path in self._posix:
            path.unlink(missing_ok=True)
        library = ctypes.CDLL(None)
        for identifier in self._system_v:
            library.shmctl(identifier, _IPC_RMID, None)
        self.forget()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
