"""Transactions a second that a publisher makes while a system is its synchronous standby.

In goes a stage; out come turns. pgbench (simple-update) commits with `synchronous_commit = on`, which waits until the
subscriber has the transaction on disk, or `remote_apply`, which waits until it is visible there.

Source: PostgreSQL manual, "Synchronous Replication", "pgbench".
"""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from bench.attached import System, attached
from bench.observe import Observer
from parapply.demo.errors import DemoError
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.options import Sync
    from parapply.demo.stage import Stage

#: synchronous_commit of the publisher's sessions.
Level = Literal["on", "remote_apply"]

LEVELS: Final[tuple[Level, ...]] = ("on", "remote_apply")
#: Where commits wait for no subscriber.
NO_STANDBY: Final = "no standby"

_TURN = "standby"  # slot and database of the system whose turn it is, and the standby's name
_IN_EFFECT = "SELECT count(*) > 0 FROM pg_stat_replication WHERE application_name = %s AND sync_state = 'sync'"
_PATIENCE_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Standby:
    """A system and how it commits.

    Attributes:
        system: the one that replicates; `None`: there is none.
        sync: `synchronous_commit` of its sessions on the subscriber.
    """

    system: System | None
    sync: Sync

    @property
    def name(self) -> str:
        """Return its name for people."""
        return self.system.name if self.system else NO_STANDBY


@dataclass(frozen=True, kw_only=True)
class StandbyOptions:
    """Options of the measurement of synchronous standbys.

    Attributes:
        standbys: those measured.
        clients: of pgbench; one turn for each number.
        seconds: whole, of one turn.
        warm_up_s: before the first turn, so that pages are in memory and plans are made.
        rounds: each has every standby; every other one in the opposite order.
        scale: of pgbench's tables.
    """

    standbys: tuple[Standby, ...]
    clients: tuple[int, ...] = (1, 16, 64)
    seconds: int = 6
    warm_up_s: int = 2
    rounds: int = 2
    scale: int = 10


@dataclass(frozen=True, kw_only=True)
class StandbyTurn:
    """One standby, one level, one number of clients, one round.

    Attributes:
        round_number: from 1.
        standby: its name.
        sync: `synchronous_commit` on the subscriber.
        level: `synchronous_commit` on the publisher.
        clients: of pgbench.
        per_s: transactions a second.
        cpu_us: microseconds of CPU for each transaction, by role as `Observer` names them.
    """

    round_number: int
    standby: str
    sync: Sync
    level: Level
    clients: int
    per_s: float
    cpu_us: dict[str, float]


def measure(
    stage: Stage, options: StandbyOptions, on_turn: Callable[[StandbyTurn], None] = lambda _turn: None
) -> list[StandbyTurn]:
    """Measure every standby, one at a time, each from a slot of its own into a fresh database.

    Args:
        stage: two servers without the bank; it is made here, and stays.
        options: what and how.
        on_turn: is given every turn when it is over.

    Raises:
        DemoError: a server, pgbench or a system failed.
    """
    stage.fill_bank(options.scale)
    turns: list[StandbyTurn] = []
    for number in range(1, options.rounds + 1):
        for standby in options.standbys if number % 2 else reversed(options.standbys):
            for turn in _turns(stage, options, standby, number):
                turns.append(turn)
                on_turn(turn)
    return turns


def _turns(stage: Stage, options: StandbyOptions, standby: Standby, number: int) -> Iterator[StandbyTurn]:
    with ExitStack() as stack:
        daemon_pid = None
        if standby.system is not None:
            running = stack.enter_context(attached(stage, standby.system, _TURN))
            daemon_pid = running.daemon_pid
            stack.enter_context(_waited_for(stage))
        _load(stage, "on", max(options.clients), options.warm_up_s)
        for level in LEVELS:
            for clients in options.clients:
                with Observer(stage, _TURN) as observer:
                    observer.look(daemon_pid, is_over=True)
                    before = observer.usage()
                    n_done, per_s = _load(stage, level, clients, options.seconds)
                    observer.look(daemon_pid, is_over=True)
                    after = observer.usage()
                yield StandbyTurn(
                    round_number=number, standby=standby.name, sync=standby.sync, level=level, clients=clients,
                    per_s=per_s,
                    cpu_us={role: (used.cpu_s - before[role].cpu_s) * 1e6 / n_done for role, used in after.items()},
                )  # fmt: skip


@contextmanager
def _waited_for(stage: Stage) -> Iterator[None]:
    """Have the publisher's commits wait for the system whose turn it is."""
    stage.source.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{_TURN}'")
    stage.source.reload()
    try:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not stage.source.execute(_IN_EFFECT, [_TURN])[0][0]:
            if time.monotonic() > deadline_s:
                raise DemoError(f"The publisher does not know its standby after {_PATIENCE_S:g} s.")
            time.sleep(_POLL_S)
        yield
    finally:
        # A commit would hang for ever once the system has gone.
        stage.source.execute("ALTER SYSTEM RESET synchronous_standby_names")
        stage.source.reload()


def _load(stage: Stage, level: Level, clients: int, seconds: int) -> tuple[int, float]:
    """Run pgbench; return how many transactions it made, and how many a second."""
    done = stage.source.run(
        "pgbench", "--no-vacuum", "--protocol=prepared", "--builtin=simple-update", f"--client={clients}",
        f"--jobs={min(clients, os.cpu_count() or 1)}", f"--time={seconds}",
        dbname=BANK, env={"PGOPTIONS": f"-c synchronous_commit={level}"},
    )  # fmt: skip
    return read_pgbench(done.stdout)


def read_pgbench(text: str) -> tuple[int, float]:
    """Return from pgbench's report how many transactions it made, and how many a second.

    Raises:
        DemoError: it does not say so.
    """
    processed = re.search(r"^number of transactions actually processed: (\d+)", text, re.MULTILINE)
    per_s = re.search(r"^tps = ([\d.]+)", text, re.MULTILINE)
    if processed is None or per_s is None or not int(processed[1]):
        raise DemoError(f"pgbench made no transactions: {text}")
    return int(processed[1]), float(per_s[1])
