"""A PostgreSQL data directory of our own and the processes in it: made, signalled, killed and removed.

In goes a directory to work under, programs and settings; out come processes. Speaks no SQL: whether the server
answers is known in `server.py`. When our process ends, however it ends, the server ends and its files go.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from parapply.demo.account import process_options, server_account
from parapply.demo.binaries import PgBinaries, find_binaries
from parapply.demo.errors import DemoError
from parapply.demo.postmaster import Guardian, SharedMemory, free_port, kill_processes_in

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
        """The server's directory, removed at the end.

        Raises:
            DemoError: before `init`.
        """
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
        """Process id of the postmaster."""
        return self._running().pid

    @property
    def guardian_pid(self) -> int | None:
        """Process id of the process that ends the server should we die; `None` before `init` and after `keep`."""
        return self._guardian.pid if self._guardian else None

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
