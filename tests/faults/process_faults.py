"""Faults of the daemon's own process: killed, paused, doubled, stopped, short of memory or disk."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING

from parapply import failpoints
from tests.faults.catalogue import fault
from tests.faults.lab import WAIT_S
from tests.faults.side_load import large
from tests.fixtures.plain import WORKER_IS_BLOCKED, end_sessions, foreign_transaction, walsender_pid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.faults.lab import Round

#: Passed by every load, with the largest passage to be killed at.
_POINTS = {
    failpoints.CONNECTED: 1, failpoints.RECOVERY: 1, failpoints.BATCH_READY: 30, failpoints.BEFORE_STATE: 30,
    failpoints.DML_SENT: 30,
    failpoints.BEFORE_COMMIT: 30, failpoints.COMMIT_SENT: 30, failpoints.COMMITTED: 30, failpoints.ADVANCED: 5,
    failpoints.FEEDBACK_SENT: 5, failpoints.PRUNING: 3,
}  # fmt: skip
_KILLS = 4
_LARGE_ROWS = 6000
_HUGE_ROWS = 60_000
# Far below what one huge transaction takes: its changes alone are more.
_MEMORY_LIMIT_BYTES = 16 * 1024 * 1024
_PEAK_LIMIT_BYTES = 400 * 1024 * 1024
_REFUSED = 4
#: A worker follows every streamed transaction, and its changes go to disk at once.
_SPOOL: Mapping[str, str | float] = {"source.streaming": "on", "apply.stream_start_bytes": 0, "apply.workers": 4}


def killed(run: Round) -> None:
    """Fail unless the daemon dies by SIGKILL.

    Raises:
        AssertionError: it ended otherwise, or passed no such point.
    """
    code = run.daemon.exit_code(WAIT_S)
    assert code == -signal.SIGKILL, f"the point was not reached: exit code {code}\n{run.daemon.log_tail()}"


def kill_at(run: Round, point: str, passage: int = 1) -> None:
    """Replace the daemon by one that is killed at a point, once it has passed it so often."""
    if run.daemon.is_running():
        run.daemon.kill()
    run.start(environ={"PARAPPLY_FAILPOINT": f"{point}:kill:{passage}"})
    if point == failpoints.DRAIN:
        run.daemon.wait_for_event("source_connected", WAIT_S)
        run.work()
        run.daemon.send(signal.SIGTERM)
    try:
        killed(run)
    except AssertionError as error:
        error.add_note(f"point {point}, passage {passage}")
        raise


@fault("F1", "daemon killed (-9) at named points")
def f1_named(run: Round) -> None:
    """Killed at points from the first connection to the drain, again and again (K0 to K9, K15, K16)."""
    for point in run.chooser.sample([*_POINTS, failpoints.DRAIN], 3):
        kill_at(run, point, run.chooser.randint(1, _POINTS.get(point, 1)))
    run.start_connected()


@fault("F1", "daemon killed (-9) while it reads ranges of WAL")
def f1_ranges(run: Round) -> None:
    """Killed between two ranges, and with the copy of the slot dropped and no stream yet (K18, K20)."""
    if run.options.is_two_phase:
        run.notes.append("two_phase: the stream reads")
        return
    settings: dict[str, str | float] = {"source.catch_up": "auto", "source.catch_up_range_bytes": 1 << 24}
    for point in (failpoints.RANGE_READ, failpoints.HANDED_OVER):
        if run.daemon.is_running():
            run.daemon.kill()
        # More than is left to the stream.
        run.work(200, 300)
        # While a session still reads it, the stream would be asked first.
        run.source.wait_until(f"SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{run.route.slot}'")
        run.start(settings=settings, environ={"PARAPPLY_FAILPOINT": f"{point}:kill"})
        killed(run)
    run.start_connected()


@fault("F1", "daemon killed (-9) at random moments")
def f1_random(run: Round) -> None:
    """Killed between any two instructions, every other time before it has begun."""
    for number in range(_KILLS):
        if number % 2:
            run.daemon.wait_for_event("source_connected", WAIT_S)
        run.work(1, 30)
        run.daemon.kill()
        run.start()
    run.daemon.wait_for_event("source_connected", WAIT_S)


@fault("F2", "sessions of a killed daemon live on")
def f2(run: Round) -> None:
    """Killed while its sessions wait for locks; the next daemon waits behind the fence until they are gone.

    They go when the lock does, or when their server looks for its client (`client_connection_check_interval`).
    """
    with foreign_transaction(run.target, "SELECT FROM acct FOR UPDATE"):
        run.target.wait_until(WORKER_IS_BLOCKED, WAIT_S)
        run.daemon.kill()
        run.start()
        run.work(10, 40)
    run.daemon.wait_for_event("source_connected", WAIT_S)


@fault("F18", "a second daemon on the slot, then a takeover")
def f18(run: Round) -> None:
    """The second one waits and gives up; a third takes over, and the first one ends."""
    second = run.start_beside(settings={"target.lease_wait_s": 0.5})
    assert second.exit_code(WAIT_S) == _REFUSED, second.log_tail()
    run.work()
    first = run.daemon
    third = run.start("--takeover")
    third.wait_for_event("source_connected", WAIT_S)
    assert first.exit_code(WAIT_S) == _REFUSED, first.log_tail()


@fault("F20", "daemon paused, another takes over, the first wakes up")
def f20(run: Round) -> None:
    """A transaction that the paused one holds is never committed: rows without a key would show it."""
    first = run.daemon
    with foreign_transaction(run.target, "SELECT FROM acct FOR UPDATE"):
        run.target.wait_until(WORKER_IS_BLOCKED, WAIT_S)
        run.work()
        first.pause()
    second = run.start("--takeover")
    second.wait_for_event("lease_taken", WAIT_S)
    pid = walsender_pid(run.route)
    if pid is not None:
        # The slot is busy with the paused one's walsender until its session is ended.
        run.source.execute(f"SELECT pg_terminate_backend({pid})")
    second.wait_for_event("source_connected", WAIT_S)
    run.work()
    first.send(signal.SIGCONT)
    assert first.exit_code(WAIT_S) == _REFUSED, first.log_tail()


@fault("F21", "disk of the daemon full (spill files, apply log)")
def f21(run: Round) -> None:
    """A streamed transaction finds no room: nothing of it is applied until there is."""
    run.restart(settings=_SPOOL)
    lost = len(run.daemon.events_of("source_lost"))
    with run.file_limit(100_000), run.source.connect() as session:
        session.execute("BEGIN")
        large(session, run.chooser, _LARGE_ROWS)
        run.daemon.wait_for_event("spill_failed", WAIT_S)
        run.work()
        session.execute("COMMIT")
        run.daemon.wait_for_event("source_lost", WAIT_S, count=lost + 1)
    run.caught_up()
    run.restart()


@fault("F33", "daemon killed (-9) at PREPARE and at its outcome", needs_two_phase=True)
def f33_kill(run: Round) -> None:
    """Killed when PREPARE or its outcome is sent, or done and not recorded (K12, K13)."""
    for point in run.chooser.sample(
        [failpoints.PREPARE_SENT, failpoints.PREPARED, failpoints.DECISION_SENT, failpoints.DECIDED], 2
    ):
        kill_at(run, point, run.chooser.randint(1, 2))
    run.start_connected()


@fault("F35", "daemon killed (-9) inside streamed transactions")
def f35(run: Round) -> None:
    """Killed while chunks come and when what was kept is to be applied (K10, K11); then all comes again."""
    run.daemon.kill()
    for point, passage in ((failpoints.SPOOLED, run.chooser.randint(2, 12)), (failpoints.STREAM_ENDED, 1)):
        more: dict[str, str | float] = {
            **_SPOOL,
            "apply.memory_limit_bytes": _MEMORY_LIMIT_BYTES,
            "apply.max_batch_bytes": 1 << 20,
        }
        if point == failpoints.STREAM_ENDED:
            more["apply.workers"] = 1
        run.start(settings=more, environ={"PARAPPLY_FAILPOINT": f"{point}:kill:{passage}"})
        run.daemon.wait_for_event("source_connected", WAIT_S)
        with run.source.connect() as session, session.transaction():
            # A kept transaction is applied as such only if it is more than a piece, a quarter of the memory limit.
            large(session, run.chooser, _HUGE_ROWS if point == failpoints.STREAM_ENDED else _LARGE_ROWS)
        killed(run)
    run.start_connected()


@fault("F36", "one huge transaction, little memory")
def f36(run: Round) -> None:
    """Its changes are several times the limit; the daemon's memory stays bounded, and so it does when streamed."""
    for streaming in ("off", "on"):
        run.restart(settings={"source.streaming": streaming, "apply.memory_limit_bytes": _MEMORY_LIMIT_BYTES,
                              "apply.max_batch_bytes": 1 << 20})  # fmt: skip
        with run.source.connect() as session, session.transaction():
            large(session, run.chooser, _HUGE_ROWS)
        run.caught_up()
        peak_bytes = run.peak_bytes()
        assert peak_bytes < _PEAK_LIMIT_BYTES, f"{peak_bytes} bytes with streaming {streaming}"
        run.source.execute("TRUNCATE bulk, bulk_txn")
    run.restart()


@fault("F38", "SIGTERM and SIGHUP under load, SIGINT twice")
def f38(run: Round) -> None:
    """An orderly end under load has exit code 0, another configuration none; a second signal ends it at once."""
    path = run.directory / "app.toml"
    path.write_text("", encoding="ascii")
    for _ in range(2):
        run.work(5, 40)
        run.daemon.stop(WAIT_S)
        run.start("--config", str(path)).wait_for_event("source_connected", WAIT_S)
    for n in range(1, 4):
        run.work(5, 40)
        path.write_text(f"[apply]\nlinger_s = 0.00{n}\n", encoding="ascii")
        run.daemon.send(signal.SIGHUP)
        run.daemon.wait_for_event("source_connected", WAIT_S, count=1 + n)
    run.work(5, 40)
    run.daemon.send(signal.SIGINT)
    run.daemon.send(signal.SIGINT)
    assert run.daemon.exit_code(WAIT_S) >= 0, run.daemon.log_tail()
    run.start_connected()


@fault("F3", "worker sessions terminated, again and again")
def f3(run: Round) -> None:
    """A random worker's session is ended while the daemon works, many times in a row."""
    chooser = random.Random(run.chooser.getrandbits(30))
    for _ in range(12):
        end_sessions(run.target, f"parapply worker {chooser.randint(1, 6)}%")
        run.load.wait_for_more(chooser.randint(1, 20), WAIT_S)
    run.daemon.check_running()
