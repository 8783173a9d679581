"""The command `parapply`, run as a user runs it: in a separate process.

In go a stage, a slot and settings; out come the command's output and a daemon that can be stopped.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from psycopg.conninfo import make_conninfo

from parapply.demo.errors import DemoError
from parapply.demo.stage import BANK, PUBLICATION, end, own_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.demo.stage import Stage

# Longer than any wait we ask for on the command line.
_CALL_TIMEOUT_S = 900.0
_TAIL_LINES = 5
# Exit status of `parapply verify` where a table differs.
_DIFFERENT = 1
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `parapply verify` for one table."""

    name: str
    source_rows: int | None  # None: not compared
    target_rows: int | None
    is_equal: bool


class Parapply:
    """`parapply` between the two servers of a stage, for one slot."""

    def __init__(  # noqa: PLR0913  one for each thing that differs
        self,
        stage: Stage,
        *,
        slot: str,
        target_dbname: str = BANK,
        target_port: int | None = None,
        source_dsn: str | None = None,
        settings: Sequence[str] = (),
        environment: Mapping[str, str] = _NO_VARIABLES,
    ) -> None:
        """Start nothing yet.

        Args:
            stage: the servers.
            slot: name of the slot; it also names the daemon's log.
            target_dbname: database on the subscriber.
            target_port: of something on 127.0.0.1 that forwards to the subscriber; its own port when `None`.
            source_dsn: of the publisher, by another way than the stage's.
            settings: `key=value`, as for `--set`.
            environment: variables for every command, over those that they inherit.
        """
        self._environment = {**own_environment(), **environment}
        self.slot = slot
        self.log = stage.directory / f"daemon-{slot}.log"
        self._stage = stage
        self._process: subprocess.Popen[bytes] | None = None
        target_dsn = make_conninfo(stage.target.dsn(target_dbname), port=target_port or stage.target.port)
        self._options = [
            "--source", source_dsn or stage.source_dsn(), "--target", target_dsn,
            "--slot", slot, "--publication", PUBLICATION,
        ]  # fmt: skip
        self._settings = [word for setting in settings for word in ("--set", setting)]

    @property
    def pid(self) -> int | None:
        """Process id of the daemon; `None` if it was not started."""
        return self._process.pid if self._process else None

    def call(self, command: str, *arguments: str) -> str:
        """Run a command to its end and return what it printed.

        Raises:
            DemoError: it failed; the message holds what it wrote.
        """
        return self._run(command, *arguments)

    def verify(self) -> list[Comparison]:
        """Compare every published table on both sides, by `parapply verify`; the daemon must run."""
        document = json.loads(self._run("verify", "--json", codes=(0, _DIFFERENT)))
        return [
            Comparison(
                name=f"{table['schema_name']}.{table['table_name']}",
                source_rows=table["source_rows"],
                target_rows=table["target_rows"],
                is_equal=table["is_equal"],
            )
            for table in document["tables"]
        ]

    def _run(self, command: str, *arguments: str, codes: Sequence[int] = (0,)) -> str:
        words = [sys.executable, "-m", "parapply", command, *self._options, *arguments]
        done = subprocess.run(  # noqa: S603 - our own program, no shell
            words, env=self._environment, capture_output=True, text=True, check=False,
            timeout=_CALL_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode not in codes:
            raise DemoError(f"`parapply {command}` ended with {done.returncode}: {done.stderr.strip()}{self._tail()}")
        return done.stdout

    def start(self) -> None:
        """Start the daemon; raise OSError if Python cannot be run."""
        words = [sys.executable, "-m", "parapply", "run", *self._options, *self._settings]
        self._process = self._stage.start(words, env=self._environment, output=self.log)

    def check(self) -> None:
        """Raise DemoError, with the end of its log, if the daemon does not run."""
        code = self._process.poll() if self._process else None
        if code is not None:
            raise DemoError(f"`parapply run` ended with {code}.{self._tail()}")

    def stop(self) -> None:
        """Ask the daemon to finish what it has in hand and end, and wait for that."""
        if self._process and (code := end(self._process)):
            raise DemoError(f"`parapply run` ended with {code} when it was asked to stop.{self._tail()}")

    def shell_line(self, command: str, *arguments: str) -> str:
        """Return a command as the user can type it."""
        settings = self._settings if command == "run" else []
        return f"{_program()} {shlex.join([command, *self._options, *settings, *arguments])}"

    def _tail(self) -> str:
        if not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return " The end of its log: " + "\n".join(lines) if lines else ""


def _program() -> str:
    """Return the shortest name under which the user's shell finds us."""
    if shutil.which("parapply"):
        return "parapply"
    beside = Path(sys.executable).with_name("parapply")
    return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m parapply"
