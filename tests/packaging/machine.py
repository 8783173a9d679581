"""A Debian with systemd of its own: a folder made by debootstrap, booted by systemd-nspawn.

It has no network but its loopback. Commands enter it by nsenter, so neither machinectl nor this machine's D-Bus is
needed.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds within which an event of the machine must come.
WAIT_S = 120
_NSPAWN = ("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--console=read-only")


class Machine:
    """A booted system; commands run in all of its namespaces."""

    def __init__(self, init_pid: int) -> None:
        """Take the process that is its number 1, as seen from here."""
        self._enter = ["nsenter", "--target", str(init_pid), "--all"]

    def run(self, *command: str, check: bool = True, feed: str | None = None) -> str:
        """Run a command there and return what it prints on both outputs.

        Raises:
            RuntimeError: it failed, and `check` is set.
        """
        print("==", " ".join(command), flush=True)  # noqa: T201  talks to a person
        done = subprocess.run(
            [*self._enter, *command],
            check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, input=feed, timeout=WAIT_S,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}")
        return done.stdout

    def fails(self, *command: str) -> bool:
        """Return whether a command fails there."""
        return subprocess.run([*self._enter, *command], check=False, capture_output=True).returncode != 0

    def shown(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--property", name, "--value", unit).strip()

    @contextmanager
    def expecting(self, unit: str, *texts: str) -> Iterator[None]:
        """Wait at the end of the block until the journal of a unit has had texts, one after the other, since its start.

        Raises:
            RuntimeError: one did not come in time.
        """
        cursor = self.run("journalctl", "--show-cursor", "--lines=0").rpartition("-- cursor: ")[2].strip()
        yield
        follow = ["timeout", str(WAIT_S), "journalctl", "--follow", "--output=cat", f"--unit={unit}"]
        journal = subprocess.Popen(
            [*self._enter, *follow, f"--after-cursor={cursor}"], stdout=subprocess.PIPE, text=True
        )
        seen: list[str] = []
        left = list(texts)
        with journal:
            assert journal.stdout is not None
            for line in journal.stdout:
                seen.append(line)
                if left[0] in line:
                    del left[0]
                if not left:
                    break
            journal.terminate()
        if left:
            raise RuntimeError(f"{unit}: the journal never had {left[0]!r}:\n{''.join(seen[-40:])}")


@contextmanager
def booted(root: Path) -> Iterator[Machine]:
    """Boot a folder until its units are started; it is powered off at the end.

    Raises:
        RuntimeError: this machine cannot boot it.
    """
    with subprocess.Popen(
        [*_NSPAWN, "--boot", "--directory", str(root)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as nspawn:
        assert nspawn.stdout is not None
        for line in nspawn.stdout:
            if "multi-user.target" in line or "login:" in line:
                break
        else:
            raise RuntimeError("systemd-nspawn ended before systemd had started")
        children = Path(f"/proc/{nspawn.pid}/task/{nspawn.pid}/children").read_text().split()
        machine = Machine(int(children[0]))
        try:
            machine.run("systemctl", "is-system-running", "--wait", check=False)
            yield machine
        finally:
            machine.run("systemctl", "poweroff", check=False)
            try:
                nspawn.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                nspawn.kill()
