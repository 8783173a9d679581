"""One migration from its first command to the way back and on: stages, kills, schema changes, checks after each stage.

In go a source with tables, an empty target and a seed; out comes an `Account`. The order is how-to/cut-over.md's:
`migrate`, killed and run again, while clients write and the schema changes; `cutover`, killed once and run again;
clients write to the target; `cutover --back`, killed once and run again; clients write to the source.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Self

import msgspec
import psycopg

from parapply.demo.binaries import find_binaries, find_program
from parapply.vocabulary import MigrationStep
from tests.fixtures import warm
from tests.fixtures.daemon import Daemon, _environment
from tests.fixtures.route import Route
from tests.migration import compare
from tests.migration.tables import CHANGES
from tests.migration.writer import Writer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.fixtures.databases import Database

_POLL_S = 0.02
#: Where a kill falls: most of the time goes to these.
_STEPS = tuple(step.value for step in MigrationStep)
_HEAVY = ("copy", "copy", "copy", "indexes", "indexes", "catch-up", "constraints", "constraints", "analyze", "follow")
_COMMAND_S = 3600.0
_AGAIN = "run the same command again"
_GAP = re.compile(r"no client could write for ([\d.]+) s")


class Stage(msgspec.Struct, kw_only=True):
    """Result of one stage: nothing is written while both sides are compared after it."""

    name: str
    seconds: float
    acknowledged: int = 0
    unknown: int = 0
    lost: int = 0
    duplicated: int = 0
    torn: int = 0
    other: int = 0
    texts: list[str] = []
    kills: list[str] = []
    ended: int = 0  # by itself, to be run again
    gap_s: float | None = None


class Account(msgspec.Struct, kw_only=True):
    """Result of all stages."""

    stages: list[Stage] = []
    changes: int = 0
    source_bytes: int = 0

    @property
    def total(self) -> int:
        """Number of findings."""
        return sum(one.lost + one.duplicated + one.torn + one.other for one in self.stages)


class Migration:
    """One migration; as a context manager it ends what it has started."""

    def __init__(
        self,
        source: Database,
        target: Database,
        role: str,
        directory: Path,
        *,
        seed: str,
        kills: int,
        pace_s: float,
        per_s: float = 100.0,
        writes: int = 200,
        settings: Mapping[str, str | float] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Keep the parameters.

        Args:
            source: with `tables.make`.
            target: empty.
            role: that owns all and writes.
            directory: for logs and the file of the way back.
            seed: of kills, schema changes and load.
            kills: of `migrate`.
            pace_s: the largest time from the begin of a step to its kill; as long as a step may take.
            per_s: transactions a second.
            writes: transactions at least before each comparison.
            settings: of all daemons and commands.
            tell: gets a line for a person.
        """
        self.account = Account()
        self._source, self._target, self._directory = source, target, directory
        self._chooser = random.Random(seed)
        self._n_kills, self._pace_s, self._writes, self._tell = kills, pace_s, writes, tell
        both = dict(settings or {})
        self._ahead = Route(
            source=source, target=target, settings={**both, "ddl.apply": "true", "ddl.role": role},
            source_dsn=source.dsn, target_dsn=target.dsn,
        )  # fmt: skip
        name = f"{self._ahead.slot}_back"
        self._back = Route(
            source=target, target=source, slot=name, publication=name, settings=both, source_dsn=target.dsn,
            target_dsn=source.dsn,
        )  # fmt: skip
        self._role = role
        self._path = directory / "back.toml"
        self.writer = Writer(source, role, seed=seed, per_s=per_s)
        self._daemons: list[Daemon] = []
        self._changes = list(CHANGES)

    def __enter__(self) -> Self:
        """Start the clients."""
        self.writer.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """End the clients and every daemon."""
        self.writer.__exit__()
        for daemon in self._daemons:
            daemon.end()
        if self._target.rows("SELECT to_regclass('parapply.slots') IS NOT NULL") == [(True,)]:
            for (pid,) in self._target.rows("SELECT pid FROM parapply.slots WHERE pid IS NOT NULL"):
                _kill(pid)

    def run(self) -> Account:
        """Do all of it.

        Raises:
            AssertionError: a command or a client failed; what differs is not raised but noted.
        """
        ((self.account.source_bytes,),) = self._source.rows("SELECT pg_database_size(current_database())")
        waiting = self._migrate()
        self._write_file()
        self._cutover("cutover", self._target)
        code = waiting.exit_code(_COMMAND_S)
        assert code == 0, f"migrate ended with {code} after the cut-over: {waiting.log_tail()}"
        self._follow(self._back)
        self._stage("after the cut-over", self._back)
        self._cutover("cutover --back", self._source, "--back")
        self._follow(self._ahead)
        self._change(len(self._changes))
        self._stage("after the way back", self._ahead)
        return self.account

    # The stages.

    def _migrate(self) -> Daemon:
        """Run the command until it follows; return it as it waits."""
        began_s = time.monotonic()
        steps = sorted(self._chooser.choices(_HEAVY, k=self._n_kills), key=_STEPS.index)
        kills = []
        n_ended = 0
        for step in steps:
            is_first = True
            while (command := self._killed_migrate(step, changes=1 if is_first else 0)) is None:
                is_first = False
                # A schema change came between two looks of the copy at the schema, which is refused.
                n_ended += 1
            is_all = self._chooser.random() < 0.3 and self._kill_daemon()
            kills.append(_where(command) + (" and the daemon" if is_all else ""))
            self._tell(f"killed at {kills[-1]}, {time.monotonic() - began_s:.0f} s")
        command = self._start_migrate()
        _wait_for_step(command, "follow", state="ready")
        self._change(max(0, len(self._changes) - 2))
        assert not compare.check_large_objects(self._source, self._target)
        self._stage("after migrate", self._ahead, began_s=began_s, kills=kills)
        self.account.stages[-1].ended = n_ended
        return command

    def _killed_migrate(self, step: str, *, changes: int) -> Daemon | None:
        """Return the command, killed at a random moment from a step on; None: it has ended, to be run again."""
        command = self._start_migrate()
        try:
            _wait_for_step(command, step)
            self._change(changes)
            threading.Event().wait(self._chooser.uniform(0, self._pace_s))
            command.kill()
        except AssertionError:
            if not any(_AGAIN in line for line in command.lines):
                raise
        return command if command.exit_code() < 0 else None

    def _cutover(self, name: str, new_side: Database, *more: str) -> None:
        """Cut over, killed once; then clients write to the new side."""
        began_s = time.monotonic()
        self._source.forget()
        self._target.forget()
        words = ["--reverse", str(self._path), *more]
        kills = []
        if self._n_kills:
            command = self._start(Daemon(self._ahead, *words, verb="cutover"))
            threading.Event().wait(self._chooser.uniform(0.1, 1.2))
            if command.is_running():
                command.kill()
                kills.append(command.lines[-1] if command.lines else "its start")
        done = self._run(self._ahead, "cutover", *words)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        gap = _GAP.search(done.stdout)
        self.writer.database = new_side
        self.writer.wait_for(self._writes)
        self.account.stages.append(
            Stage(name=name, seconds=round(time.monotonic() - began_s, 1), kills=kills,
                  gap_s=float(gap[1]) if gap else None)
        )  # fmt: skip
        self._tell(f"{name}: {done.stdout}")

    def _stage(self, name: str, route: Route, *, began_s: float | None = None, kills: list[str] | None = None) -> None:
        """Compare both sides while the clients hold still; its time is until then."""
        began_s = began_s or time.monotonic()
        self.writer.wait_for(self._writes)
        seconds = time.monotonic() - began_s
        with self.writer.held():
            route.wait_caught_up(_COMMAND_S)
            writer = self.writer
            found = compare.check(self._source, self._target, writer.acknowledged, writer.unknown)
            verified = self._run(route, "verify")
            found.add("other", int(verified.returncode != 0), f"verify: {verified.stdout}{verified.stderr}"[-400:])
            n_acknowledged, n_unknown = len(writer.acknowledged), len(writer.unknown)
        self.account.stages.append(
            Stage(name=name, seconds=round(seconds, 1), acknowledged=n_acknowledged, unknown=n_unknown,
                  lost=found.lost, duplicated=found.duplicated, torn=found.torn, other=found.other, texts=found.texts,
                  kills=kills or [])
        )  # fmt: skip
        self._tell(f"{name}: {n_acknowledged} acknowledged; {found}")

    def _change(self, count: int) -> None:
        """Change the schema through the queue of commands, and have clients use what is new."""
        for _ in range(count):
            # Before there is a slot nothing brings them.
            if not self._changes or not self._source.rows("SELECT 1 FROM pg_replication_slots"):
                return
            command, extra = self._changes[0]
            with self._source.connect(user=self._role, options="-c lock_timeout=2s") as session:
                try:
                    session.execute("SELECT parapply.replicate_ddl(%s)", [command])
                except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                    return
            self._changes.pop(0)
            self.account.changes += 1
            if extra:
                self.writer.extras.append(extra)

    # Commands.

    def _start_migrate(self) -> Daemon:
        program = find_program("pg_dump", find_binaries())
        return self._start(
            Daemon(
                self._ahead, "--roles", "--large-objects", "copy", "--unlogged", "copy", "--json",
                "--pg-bin", str(program.parent), "--daemon-log", str(self._directory / "daemon.log"), verb="migrate",
            )
        )  # fmt: skip

    def _start(self, daemon: Daemon) -> Daemon:
        self._daemons.append(daemon)
        return daemon

    def _follow(self, route: Route) -> None:
        """Start a daemon as a service would, and return when it reads."""
        self._start(Daemon(route)).wait_for_event("source_connected")

    def _run(self, route: Route, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        return warm.run([command, *route.arguments(), *words], _environment(None), _COMMAND_S)

    def _write_file(self) -> None:
        printed = self._run(self._ahead, "cutover", "--print-reverse")
        assert printed.returncode == 0, printed.stderr
        self._path.write_text(printed.stdout)

    def _kill_daemon(self) -> bool:
        """Kill the daemon that `migrate` has started, if there is one."""
        if self._target.rows("SELECT to_regclass('parapply.slots') IS NULL") == [(True,)]:
            return False
        found = self._target.rows("SELECT pid FROM parapply.slots WHERE pid IS NOT NULL AND state <> 'stopped'")
        return bool([pid for (pid,) in found if _kill(pid)])


def _wait_for_step(command: Daemon, step: str, *, state: str = "") -> None:
    """Return when `migrate` has begun a step, or a later one; or is in a state of it.

    Raises:
        AssertionError: it has ended.
    """
    wanted = _STEPS.index(step)
    while not any(
        _STEPS.index(one["step"]) >= wanted and state in {"", one["state"]} for one in command.events if "step" in one
    ):
        command.check_running()
        threading.Event().wait(_POLL_S)


def _where(command: Daemon) -> str:
    """Return what a command has said last."""
    said = [one for one in command.events if "step" in one]
    return f"{said[-1]['step']}, {said[-1]['state']}" if said else "its start"


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
