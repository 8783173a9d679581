"""The daemon of a migration: a separate process, which outlives this command.

In: the arguments of `parapply run`. Out: everything up to an LSN applied, or the lag small. A daemon that runs already
is used; where the command is killed the daemon continues, and the next command finds it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from parapply.errors import LeaseHeld, ParapplyError, TargetRefused
from parapply.model import covers, format_lsn, parse_lsn
from parapply.target.session import lease
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import cutovers
from parapply.target.state.display import LATE_S
from parapply.target.state.schema import in_schema
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.config import Config
    from parapply.migrate.options import MigrateOptions
    from parapply.migrate.show import Counter
    from parapply.target.session.settings import Connection

_POLL_S: Final = 0.1
#: Bytes of the daemon's log that are read for its last word.
_TAIL_BYTES: Final = 4096
#: Looks in a row at which the lag is small.
_LOOKS: Final = 2
#: Seconds beyond the longest wait for another attempt after which a daemon without a session has ended, though it did
#: not say so.
_MISSING_S: Final = 2.0


class Daemon:
    """A daemon that was started here, or one that ran already."""

    def __init__(self, process: subprocess.Popen[bytes] | None, log: Path | None, from_bytes: int = 0) -> None:
        self._process = process
        self._log = log
        #: The size of the log when it was started.
        self._from_bytes = from_bytes
        #: Since when no session holds the lease; None: one does.
        self._missing_since_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Return its number; None: it is not ours."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """Return whether it is ours and runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_session(self) -> bool:
        """Return whether a session held the lease at the last look."""
        return self._missing_since_s is None

    def check(self) -> None:
        """Do nothing if it runs; raise ParapplyError if it has ended without being stopped.

        A killed command may have started one that held no lease yet as this one was started: that one is followed.
        """
        if self._process is not None and self._process.poll():
            # Other failures have this code as well.
            if self._process.poll() == LeaseHeld.exit_code and any(lease.HELD in line for line in self._lines()):
                self._process = None
                return
            raise ParapplyError(
                f"the daemon has ended with {self._process.returncode}: {self._last_word()}",
                hint=f"its log is {self._log}; mend what it says and run the same command",
            )

    async def has_ended(self, config: Config, target: Connection, slot_id: int) -> bool:
        """Return whether it has ended without a failure.

        Raises:
            ParapplyError: it is ours, and has failed.
        """
        has_ended = not self.is_running
        self.check()
        return has_ended if self._process is not None else await self.is_missing(config, target, slot_id)

    async def is_missing(self, config: Config, target: Connection, slot_id: int) -> bool:
        """Return whether no session holds the lease, for long enough that none comes back after a lost or left one."""
        if await lease.holders(target, slot_id):
            self._missing_since_s = None
            return False
        _, _, state, *_ = await _progress(config, target, slot_id)
        now_s = time.monotonic()
        self._missing_since_s = self._missing_since_s or now_s
        has_said = state in {DaemonState.STOPPED, DaemonState.LOST}
        return has_said or now_s - self._missing_since_s >= config.source.reconnect_max_s + _MISSING_S

    async def end(self, config: Config, target: Connection, slot_id: int) -> None:
        """Return when it has come to its end, at once if it was not started here; everything is applied.

        Raises:
            ParapplyError: it has failed.
        """
        if self._process is not None and self.is_running and await _pid(config, target, slot_id) != self.pid:
            # Another one was the leader, for whose lease it would wait.
            process, self._process = self._process, None
            process.terminate()
            await asyncio.to_thread(process.wait)
        while self.is_running:  # noqa: ASYNC110  another process ends
            await asyncio.sleep(_POLL_S)
        self.check()

    def _lines(self) -> list[str]:
        """Return the end of what the log has got since it was started; another daemon may write to the same."""
        if self._log is None:
            return []
        with self._log.open("rb") as file:
            file.seek(max(self._from_bytes, self._log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip().splitlines()

    def _last_word(self) -> str:
        lines = self._lines()
        ours = [line for line in lines if line.startswith("parapply: ")]
        return (ours or lines or ["it has left no log"])[-1].removeprefix("parapply: ")


async def daemon_of(options: MigrateOptions, config: Config, target: Connection, slot_id: int, *more: str) -> Daemon:
    """Return the daemon of a slot; start one if none runs, or comes back.

    Raises:
        TargetRefused: the log cannot be written.
    """
    there = Daemon(None, None)
    while not await there.is_missing(config, target, slot_id):
        if there.has_session:
            return there
        await asyncio.sleep(_POLL_S)
    log = options.daemon_log
    assert log is not None
    try:
        file = log.open("ab")
    except OSError as error:
        raise TargetRefused(
            f"the daemon's log {log}: {error.strerror}", hint="name another with --daemon-log"
        ) from error
    with file:
        from_bytes = file.tell()
        # Not asyncio's: that would end it with this command.
        process = subprocess.Popen(  # noqa: ASYNC220, S603  it returns at once; this program
            [sys.executable, "-m", "parapply", "run", *options.run_arguments, *more],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(options.run_environ),
            # Ctrl-C on the terminal ends this command, not the stream.
            start_new_session=True,
        )
    return Daemon(process, log, from_bytes)


async def reach(  # noqa: PLR0913, PLR0917  whose, where to
    config: Config, target: Connection, slot_id: int, daemon: Daemon, lsn: int, counter: Counter
) -> bool:
    """Wait until the target shows everything up to an LSN; return false if the daemon has ended before.

    A daemon that ran already may be of a command that was killed, and end at an earlier LSN.

    Raises:
        ParapplyError: the daemon has failed.
    """
    first_lsn: int | None = None
    while True:
        # Before the progress: what it has written at its end counts.
        has_ended = await daemon.has_ended(config, target, slot_id)
        low_lsn, *_ = await _progress(config, target, slot_id)
        first_lsn = low_lsn if first_lsn is None else first_lsn
        counter.total = max(1, lsn - first_lsn)
        counter.set(max(0, min(low_lsn, lsn) - first_lsn), f"at {format_lsn(low_lsn)}")
        if covers(low_lsn, lsn):
            return True
        if has_ended:
            return False
        await asyncio.sleep(_POLL_S)


async def small_lag(  # noqa: PLR0913, PLR0917  whose, how small
    config: Config, target: Connection, slot_id: int, daemon: Daemon, max_lag_s: float, counter: Counter
) -> float:
    """Return the lag in seconds once it is small; raise ParapplyError if the daemon has ended before."""
    n_looks = 0
    while True:
        low_lsn, lag_s, state, reason, late_s = await _progress(config, target, slot_id)
        if await daemon.has_ended(config, target, slot_id):
            raise ParapplyError(f"the daemon has ended: {reason or state}", hint="see its log, then run this again")
        # One that was killed just now has left its last words.
        is_fresh = daemon.has_session and state == DaemonState.RUNNING and late_s < LATE_S
        is_small = is_fresh and lag_s is not None and lag_s <= max_lag_s
        n_looks = n_looks + 1 if is_small else 0
        counter.set(0, f"lag {'not known yet' if lag_s is None else f'{lag_s:.1f} s'}, at {format_lsn(low_lsn)}")
        if n_looks >= _LOOKS and lag_s is not None:
            return float(lag_s)
        await asyncio.sleep(_POLL_S)


async def until_it_ends(config: Config, target: Connection, slot_id: int, daemon: Daemon, counter: Counter) -> str:
    """Show the lag until the daemon has ended, as a cut-over ends it, and return its last state.

    Raises:
        ParapplyError: it has ended without being stopped.
    """
    # One of ours that has lost its session comes back.
    while daemon.is_running or not await daemon.is_missing(config, target, slot_id):
        low_lsn, lag_s, state, *_ = await _progress(config, target, slot_id)
        counter.set(0, f"{state}, lag {lag_s or 0:.1f} s, at {format_lsn(low_lsn)}")
        await asyncio.sleep(_POLL_S * 10)
    cutover = await cutovers.read(target, config.target.state_schema, slot_id)
    if cutover is not None and cutover.stops_daemon:
        return "by `parapply cutover`"
    daemon.check()
    _, _, state, reason, _ = await _progress(config, target, slot_id)
    return f"{state} ({reason})" if reason else state


async def _pid(config: Config, target: Connection, slot_id: int) -> int | None:
    """Return the process of the daemon that took the lease last."""
    query = in_schema("SELECT pid FROM {s}.slots WHERE slot_id = $1::int", config.target.state_schema)
    with target_errors("reading whose the slot is"):
        found = await rows(target, query, [slot_id])
    return found[0][0] if found else None


async def _progress(config: Config, target: Connection, slot_id: int) -> tuple[int, float | None, str, str, float]:
    query = in_schema(
        "SELECT p.lowest_remote_lsn::text, p.lag_s, p.state, p.reason,"
        " EXTRACT(epoch FROM pg_catalog.clock_timestamp() - p.updated_at)::float8 - p.shown_every_s"
        " FROM {s}.progress AS p JOIN {s}.slots AS s USING (slot_name) WHERE s.slot_id = $1::int",
        config.target.state_schema,
    )
    with target_errors("reading the progress"):
        found = await rows(target, query, [slot_id])
    if not found:
        raise TargetRefused("the state of the slot is no longer on the target", hint="was `parapply drop` run?")
    ((low, lag_s, state, reason, late_s),) = found
    return parse_lsn(low), lag_s, str(state), str(reason), float(late_s)
