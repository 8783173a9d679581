"""Load from pgbench: several clients that write to the publisher as fast as they can.

In go a stage and a script's name; out comes a process. Every transaction of both scripts inserts exactly one row into
`pgbench_history`, so that table counts them.

Source: PostgreSQL manual, "pgbench".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from parapply.demo.errors import DemoError
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from parapply.demo.stage import Stage

Script = Literal["tpcb-like", "simple-update"]

_TAIL_LINES = 5


class DemoLoad:
    """One run of pgbench."""

    def __init__(self, stage: Stage, script: Script, *, clients: int, limit: str, rate: int | None = None) -> None:
        """Start it: `--time=S`, or `--transactions=N` for each client.

        The rate is transactions a second of all clients; None: as fast as they can. Raise DemoError if there is no
        pgbench on this machine.
        """
        self._log: Path = stage.directory / f"pgbench-{script}.log"
        # The publisher's own commits are not what is measured; waiting for its disk would only slow the show.
        env = {**stage.source.client_env(BANK), "PGOPTIONS": "-c synchronous_commit=off"}
        threads = min(clients, os.cpu_count() or 1)
        command = [
            str(stage.source.program("pgbench")), "--no-vacuum", "--protocol=prepared", f"--builtin={script}",
            f"--client={clients}", f"--jobs={threads}", limit,
            *([f"--rate={rate}"] if rate else []),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] = stage.start(command, env=env, output=self._log)

    def is_running(self) -> bool:
        """Return whether it still writes; raise DemoError, with the end of its log, if it failed."""
        code = self._process.poll()
        if code:
            raise DemoError(f"pgbench ended with {code}: {self._tail()}")
        return code is None

    def wait(self) -> None:
        """Return when it has ended; raise DemoError if it failed."""
        self._process.wait()
        self.is_running()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
