"""Two servers and a directory to show something on, and every process started there.

In goes the name of the show; out come a publisher, a subscriber and processes. When the stage is left, or our process
dies, however it dies, the processes end and the directory goes, unless `keep` was called.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from parapply.demo.binaries import find_binaries
from parapply.demo.server import PgServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from parapply.demo.binaries import PgBinaries
    from parapply.demo.cluster import Setting

    Handler = Callable[[int, FrameType | None], object] | int | None

MAJOR = 18
#: Database on both servers, and the publication of all its tables.
BANK = "bank"
PUBLICATION = "bank"

# A process that ignores SIGTERM for this time is killed: the daemon drains within a few seconds.
STOP_TIMEOUT_S = 20.0
# Scale 100 takes about half a minute on a slow machine.
_FILL_TIMEOUT_S = 900.0
# Checkpoints in the middle of a short race would decide it by chance.
_SETTINGS: Mapping[str, Setting] = {"max_wal_size": "8GB", "checkpoint_timeout": "1h"}

# Every line on its input is the list of processes that run now. The end of input without a last word means that we
# died: the processes and the directory must go. The servers have their own guardians.
_WATCH_SCRIPT = """
pids=
while read -r line; do [ "$line" = dismissed ] && exit 0; pids=$line; done
[ -n "$pids" ] && kill -KILL $pids 2>/dev/null
sleep 1
rm -rf -- "$1"
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The base of a shell's exit code for a program that a signal ended.
_SIGNAL_EXIT_BASE = 128


class Interrupts:
    """Turns the first signal into `KeyboardInterrupt` (SIGINT) or `SystemExit` and ignores later ones.

    Never inside a `held` block: an exception between the start of a process and its note would leave it behind.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Handler] = {}
        self._held = 0
        self._waiting: signal.Signals | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        # A hang-up that `nohup` made ignored stays so.
        is_immune = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in _SIGNALS if not (is_immune and number == signal.SIGHUP)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # A handler that was not set from Python reads as None and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal until the end of the block; for blocks of seconds at most."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._waiting and not self._held:
            self._raise(self._waiting)

    def ignore(self) -> None:
        """Raise nothing from now on: the end has begun, and it takes a few seconds only."""
        self._is_over = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._is_over:
            return
        if self._held:
            self._waiting = signal.Signals(number)
            return
        self._raise(signal.Signals(number))

    def _raise(self, number: signal.Signals) -> None:
        # At once: a second signal must not interrupt the cleaning up that begins now.
        self._is_over = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_SIGNAL_EXIT_BASE + number)


class Stage:
    """A publisher, a subscriber, a directory, and the processes that run between them."""

    directory: Path  # everything of the stage lies in it
    source: PgServer  # the publisher
    target: PgServer  # the subscriber

    def __init__(  # noqa: PLR0913  what differs between shows
        self,
        interrupts: Interrupts,
        *,
        name: str,
        settings: Mapping[str, Setting] | None = None,
        source_binaries: PgBinaries | None = None,
        target_binaries: PgBinaries | None = None,
        target_settings: Mapping[str, Setting] | None = None,
        target_environment: Mapping[str, str] | None = None,
        is_local: bool = False,
    ) -> None:
        """Choose programs; nothing runs before the stage is entered.

        Args:
            interrupts: held back while processes are started and ended.
            name: begins the directory's name.
            settings: of both servers, over the ones of `PgServer`.
            source_binaries: the publisher's programs; PostgreSQL 18 when `None`.
            target_binaries: the subscriber's; PostgreSQL 18 when `None`.
            target_settings: of the subscriber, over `settings`.
            target_environment: variables of the subscriber's process, over ours.
            is_local: systems reach the publisher by its Unix socket, not by TCP.
        """
        self._interrupts = interrupts
        self._name = name
        self._settings = {**_SETTINGS, **(settings or {})}
        found = (source_binaries and target_binaries) or find_binaries(MAJOR)
        self._source_binaries = source_binaries or found
        self._target_binaries = target_binaries or found
        self._target_settings = {**self._settings, **(target_settings or {})}
        self._target_environment = target_environment
        self._is_local = is_local
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_kept = False

    def __enter__(self) -> Self:
        """Start both servers; raise DemoError if one did not start, and leave nothing behind."""
        with self._interrupts.held():
            self._make_directory()
        try:
            for server in (self.source, self.target):
                with self._interrupts.held():
                    server.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make_directory(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"parapply-{self._name}-"))
        # The account that runs the servers passes through; it reads nothing of ours.
        self.directory.chmod(0o711)
        self._watch = subprocess.Popen(  # noqa: S603 - constant script, the directory is an argument
            [shutil.which("sh") or "/bin/sh", "-c", _WATCH_SCRIPT, "watch", str(self.directory)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        self.source = PgServer(
            parent=self.directory, binaries=self._source_binaries, settings=self._settings, name="publisher",
            unix_socket=self._is_local,
        )  # fmt: skip
        self.target = PgServer(
            parent=self.directory,
            binaries=self._target_binaries,
            settings=self._target_settings,
            name="subscriber",
            environment=self._target_environment,
        )

    def __exit__(self, *_: object) -> None:
        """End everything and remove the directory, unless `keep` was called; a signal no longer interrupts."""
        self._interrupts.ignore()
        if not self._is_kept:
            for process in reversed(self._processes):
                end(process)
            for server in (self.source, self.target):
                server.cleanup()
            shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            self._watch.communicate(b"dismissed\n")

    def source_dsn(self) -> str:
        """Return the connection string by which systems reach the publisher's database."""
        return self.source.dsn(BANK, unix_socket=self._is_local)

    def start(self, command: Sequence[str], *, env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start a process that writes to a log; the terminal's Ctrl-C is ours to handle, not its.

        Raises:
            OSError: the program cannot be run.
        """
        with self._interrupts.held(), output.open("ab") as file:
            process = subprocess.Popen(  # noqa: S603 - our own programs, no shell
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )
            self._processes = [one for one in self._processes if one.poll() is None] + [process]
            self._tell_watch()
        return process

    def keep(self) -> None:
        """Let everything that runs outlive us, and the directory stay."""
        with self._interrupts.held():
            self._is_kept = True
            self.source.keep()
            self.target.keep()

    def fill_bank(self, scale: int) -> None:
        """Make the same bank on both servers, and publish it.

        pgbench fills its tables the same way every time, so there is nothing to copy.
        """
        for server in (self.source, self.target):
            server.execute(f"CREATE DATABASE {BANK}")
            server.run("pgbench", "--initialize", "--quiet", f"--scale={scale}", dbname=BANK, timeout_s=_FILL_TIMEOUT_S)
            server.execute("CREATE TABLE race_line (position int PRIMARY KEY, label text NOT NULL)", dbname=BANK)
        self.source.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES", dbname=BANK)

    def _tell_watch(self) -> None:
        if self._watch.stdin and self._watch.poll() is None:
            pids = " ".join(str(process.pid) for process in self._processes)
            self._watch.stdin.write(f"{pids}\n".encode())
            self._watch.stdin.flush()


def end(process: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> int:
    """Ask a process to end, kill it if it does not, and return its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def own_environment() -> dict[str, str]:
    """Return our environment without what would steer PostgreSQL's clients or `parapply` elsewhere.

    Nor slow `parapply` down: an installed one does not compile its modules again at every start.
    """
    others = ("PG", "PARAPPLY_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}
