"""A PostgreSQL data directory of our own and the processes in it: made, signalled, killed and removed.

In goes a directory to work under, programs and settings; out come processes. Speaks no SQL: whether the server
answers is known in `server.py`. When our process ends, however it ends, the server ends and its files go.
`data` is the data directory, `log` what the server wrote to its standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from parapply.demo.binaries import PgBinaries, find_binaries, process_options, server_account
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Mapping

Setting = str | int | bool
StopMode = Literal["smart", "fast", "immediate"]

SUPERUSER = "postgres"
# Settings for replication between two servers, with room for many slots and workers; the rest is PostgreSQL's default.
DEFAULT_SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "wal_level": "logical",
        "max_wal_senders": 20,
        "max_replication_slots": 20,
        "max_worker_processes": 32,
        "max_logical_replication_workers": 16,
        "max_prepared_transactions": 20,
        "max_connections": 60,
        "shared_buffers": "128MB",
        # A publisher must notice a frozen or cut reader within a test's patience.
        "wal_sender_timeout": "10s",
        "log_line_prefix": "%m [%p] %q%d ",
    }
)

# Source: PostgreSQL manual, "Shutting Down the Server".
_STOP_SIGNALS: Mapping[StopMode, signal.Signals] = MappingProxyType(
    {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
)
_STOP_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 15
# sun_path of the smallest common system, less the terminating zero. Source: unix(7).
_SOCKET_PATH_BYTES = 103
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

    def dismiss(self) -> None:
        """End the watch: from now on no guardian stops the server or removes the directory for us."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(b"dismissed\n")


def free_port() -> int:
    """Return a TCP port of the loopback address that no process listens on; one may take it any moment."""
    for _ in range(_PORT_ATTEMPTS):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DemoError(f"No free TCP port from {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1.")


def processes_in(data_dir: Path) -> list[int]:
    """Return the ids of all processes whose working directory is a data directory: the postmaster and its children.

    Children of a killed postmaster get another parent, so their parent cannot be used to find them.
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


class Cluster:
    """A data directory and its postmaster."""

    def __init__(  # noqa: PLR0913  what differs between servers
        self,
        *,
        parent: Path | None = None,
        binaries: PgBinaries | None = None,
        settings: Mapping[str, Setting] | None = None,
        name: str = "server",
        unix_socket: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Choose programs and port; nothing is written before `init`.

        Args:
            parent: directory to make the server's directory in; the system's temporary directory when `None`.
                The account that runs the server must be able to enter it.
            binaries: the programs to run; the best ones found when `None`.
            settings: added to, or put over, `DEFAULT_SETTINGS`.
            name: letters, digits, `_` and `-`; seen in the directory's name and in errors.
            unix_socket: listen also on a Unix socket in `socket_dir`.
            environment: variables of the postmaster, over ours.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise DemoError(f"{name!r} cannot name a server: use letters, digits, _ and -.")
        self.name = name
        self.binaries = binaries or find_binaries()
        self.port = free_port()
        self._account = server_account()
        self._parent = parent or Path(tempfile.gettempdir())
        self._settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self._unix_socket = unix_socket
        self._environment = {**clean_environment(), **(environment or {})}
        self._base: Path | None = None
        self._guardian: Guardian | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._shared_memory = SharedMemory()
        self._is_kept = False

    @property
    def directory(self) -> Path:
        """The server's directory, removed at the end; raise DemoError before `init`."""
        if self._base is None:
            raise DemoError(f"The server {self.name} was not initialised.")
        return self._base

    @property
    def data_dir(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    @property
    def socket_dir(self) -> Path | None:
        """The directory of the Unix socket, or `None` without one."""
        return self.directory if self._unix_socket else None

    @property
    def pid(self) -> int:
        """Process id of the postmaster; raise DemoError if the server does not run."""
        return self._running().pid

    def init(self) -> None:
        """Make the directory and the database cluster."""
        base = Path(tempfile.mkdtemp(prefix=f"parapply-{self.name}-", dir=self._parent))
        if self._unix_socket and len(os.fsencode(base / f".s.PGSQL.{self.port}")) > _SOCKET_PATH_BYTES:
            base.rmdir()
            raise DemoError(f"The path {base} is too long for a Unix socket.", hint="set TMPDIR to a shorter one")
        self._base = base
        self._guardian = Guardian(base)
        try:
            if self._account:
                os.chown(base, self._account.uid, self._account.gid)
            self._initdb()
            self.configure(self._settings)
        except BaseException:
            self.cleanup()
            raise

    def configure(self, settings: Mapping[str, Setting]) -> None:
        """Append settings to postgresql.conf; the last one of a name wins, from the next start or `reload` on."""
        lines = [f"{name} = {_quote_setting(value)}\n" for name, value in settings.items()]
        with (self.data_dir / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def reload(self) -> None:
        """Have the server read its configuration again; it does so shortly after this returns."""
        self._running().send_signal(signal.SIGHUP)

    def stop(self, mode: StopMode = "fast", timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Stop the server, and return when it is gone; a server that does not run is left alone.

        Raises:
            DemoError: it still runs after `timeout_s` seconds, for example held up by a reader of a slot.
        """
        if not self.is_running():
            return
        process = self._running()
        process.send_signal(_STOP_SIGNALS[mode])
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DemoError(
                f"The server {self.name} did not stop ({mode}) within {timeout_s:g} s: {self.log_tail()}"
            ) from error

    def crash(self) -> None:
        """Stop the server as `pg_ctl stop -m immediate` does: no checkpoint, recovery at the next start."""
        self.stop("immediate")

    def kill(self) -> None:
        """Kill the postmaster and all its children with SIGKILL, and return when they are gone.

        Written data stays in the operating system's cache, so `fsync = off` loses nothing here.
        """
        process = self._running()
        self._shared_memory.remember(self.data_dir)
        process.kill()
        process.wait()
        kill_processes_in(self.data_dir, timeout_s=_KILL_TIMEOUT_S)

    def keep(self) -> None:
        """Let the server outlive this process and its context manager; its directory stays too."""
        if self._guardian:
            self._guardian.dismiss()
            self._guardian = None
        self._is_kept = True

    def cleanup(self) -> None:
        """Stop the server without ceremony and remove all its files; does nothing after `keep` or a second time."""
        if self._is_kept or self._base is None:
            return
        if self.is_running():
            self._end_quickly()
        self._shared_memory.free()
        shutil.rmtree(self._base)
        self._base = None
        if self._guardian:
            self._guardian.dismiss()
            self._guardian = None

    def is_running(self) -> bool:
        """Return whether the postmaster runs; it need not answer yet."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """Return the last lines of the server's log."""
        path = self.directory / "log"
        if not path.exists():
            return "(no log)"
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise DemoError(f"The server {self.name} does not run.")
        return self._process

    def _initdb(self) -> None:
        """Make the cluster, in the C.UTF-8 locale where there is one."""
        done = self._run_initdb("C.UTF-8")
        if "invalid locale" in done.stderr:
            done = self._run_initdb("C")
        if done.returncode != 0:
            hint = f"user {self._account.name if self._account else 'you'} must be able to enter {self._parent}"
            if "could not look up effective user ID" in done.stderr:
                hint = "PostgreSQL needs an entry of the user who runs it in /etc/passwd: run as one who has it"
            raise DemoError(f"initdb {self.binaries.version_text} failed for {self.name}: {done.stderr}", hint=hint)

    def _run_initdb(self, locale: str) -> subprocess.CompletedProcess[str]:
        """Run initdb, which removes what it made if it fails."""
        return subprocess.run(  # noqa: S603 - programs of the installation, no shell
            [
                str(self.binaries.bin_dir / "initdb"), "--pgdata", str(self.data_dir), "--username", SUPERUSER,
                "--auth", "trust", "--encoding", "UTF8", "--locale", locale, "--no-sync",
            ],
            env=clean_environment(), cwd="/", capture_output=True, text=True, check=False,
            **process_options(self._account),
        )  # fmt: skip

    def _launch(self) -> None:
        """Start the postmaster in a separate session, because the terminal's Ctrl-C is ours to handle, not its."""
        command = [
            str(self.binaries.bin_dir / "postgres"), "-D", str(self.data_dir), "-p", str(self.port),
            "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={self.socket_dir or ''}",
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - programs of the installation, no shell
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=self._environment,
                start_new_session=True, **process_options(self._account),
            )  # fmt: skip

    def _end_quickly(self) -> None:
        """Stop for good; these data are not read again."""
        try:
            self.crash()
        except DemoError:
            self.kill()


def clean_environment() -> dict[str, str]:
    """Return our environment without libpq's variables: PGDATA, PGPORT or PGOPTIONS would point elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _quote_setting(value: Setting) -> str:
    """Return a value as postgresql.conf wants it. Source: PostgreSQL manual, "Setting Parameters"."""
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
