"""Commit-to-visible latency: how long after the publisher's COMMIT a reader on the subscriber sees the row.

In goes a stage; out come turns, two for each system and round: with nothing else going on, and alongside a load of half
of what the slower system sustains. Probes, single rows, are committed at fixed distances and looked for on the
subscriber all the time while one is on its way.

Time 0 is when COMMIT's answer has arrived. The publisher wakes its walsender before it answers, so a probe could be
seen in less than no time. The time of a poll of the subscriber is in every figure, the same for every system.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from bench.attached import System, attached
from bench.probing import PROBE_TABLE, probe
from parapply.demo.errors import DemoError
from parapply.demo.load import DemoLoad
from parapply.demo.stage import BANK, end

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.probing import Probed
    from parapply.demo.stage import Stage

LoadKind = Literal["idle", "half"]

_TURN = "latency"  # slot and database of the system whose turn it is
_TAIL_LINES = 5
# Longer than any turn; the load is ended before.
_FOREVER_S = 86_400


def parapply(*, workers: int = 4, target_delay_s: float = 0.0) -> System:
    """Return parapply with its commit order kept."""
    name = f"parapply preserve {workers}"
    return System(
        name=f"{name}, {target_delay_s * 1000:g} ms" if target_delay_s else name,
        settings=(f"apply.workers={workers}", "apply.commit_order=preserve"),
        target_delay_s=target_delay_s,
    )


BUILT_IN: Final = System(name="built-in")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """Options of the latency measurement.

    Attributes:
        probes: counted in each turn.
        interval_s: between two probes.
        rounds: each has every system, idle and at half load; every other one in the opposite order.
        scale: of pgbench's tables.
        clients: pgbench clients.
        ceiling_s: whole seconds for which each system meets an unlimited load, to find out what it sustains.
        systems: those measured.
    """

    probes: int = 500
    interval_s: float = 0.02
    rounds: int = 2
    scale: int = 10
    clients: int = 4
    ceiling_s: int = 8
    systems: tuple[System, ...] = (BUILT_IN, parapply())


@dataclass(frozen=True, kw_only=True)
class LatencyTurn:
    """One system, one round, one load.

    Attributes:
        round_number: from 1.
        system: its name.
        load: `idle`, or `half` of what the slower system sustains.
        wanted_per_s: transactions a second of the load; 0 if idle.
        load_per_s: what pgbench made of it.
        visible_ms: for each probe the milliseconds from COMMIT's answer until it was seen.
        commit_ms: for each probe the milliseconds from sending COMMIT to its answer; together they are the whole way.
        look_ms: median distance of two polls: the probes were visible up to so much earlier.
    """

    round_number: int
    system: str
    load: LoadKind
    wanted_per_s: float
    load_per_s: float
    visible_ms: tuple[float, ...]
    commit_ms: tuple[float, ...]
    look_ms: float


def measure(
    stage: Stage, options: LatencyOptions, on_turn: Callable[[LatencyTurn], None] = lambda _turn: None
) -> list[LatencyTurn]:
    """Measure every system, one at a time, each from a slot of its own into a fresh database.

    Args:
        stage: two servers without the bank; it is made here. Afterwards it stays, changed on the publisher, which does
            not wait for its disk any more.
        options: what and how.
        on_turn: is given every turn when it is over.

    Raises:
        DemoError: a server, pgbench or a system failed, or a probe was not seen 30 s after the last.
    """
    _prepare(stage, options.scale)
    # Never one twice: the publisher keeps its rows from turn to turn.
    ids = itertools.count(1)
    half_per_s = min(_ceiling_per_s(stage, system, options, ids) for system in options.systems) / 2
    loads: tuple[tuple[LoadKind, float], ...] = (("idle", 0.0), ("half", half_per_s))
    turns: list[LatencyTurn] = []
    for number in range(1, options.rounds + 1):
        for system in options.systems if number % 2 else reversed(options.systems):
            with attached(stage, system, _TURN) as running:
                for load, wanted_per_s in loads:
                    with _beside(stage, options, wanted_per_s) as rate:
                        probed = _probe(stage, options.probes, options.interval_s, ids, running.check)
                        load_per_s = rate()
                    turn = LatencyTurn(
                        round_number=number,
                        system=system.name,
                        load=load,
                        wanted_per_s=wanted_per_s,
                        load_per_s=load_per_s,
                        visible_ms=probed.visible_ms,
                        commit_ms=probed.commit_ms,
                        look_ms=probed.look_ms,
                    )
                    turns.append(turn)
                    on_turn(turn)
    return turns


def _prepare(stage: Stage, scale: int) -> None:
    stage.fill_bank(scale)
    # How long a disk takes is no part of what is measured; when the walsender is woken stays the same.
    stage.source.configure({"fsync": False})
    stage.source.reload()
    for server in (stage.source, stage.target):
        server.execute(PROBE_TABLE, dbname=BANK)


def _probe(stage: Stage, probes: int, interval_s: float, ids: Iterator[int], check: Callable[[], None]) -> Probed:
    source_dsn, target_dsn = stage.source.dsn(BANK), stage.target.dsn(_TURN)
    return probe(source_dsn, target_dsn, ids, probes=probes, interval_s=interval_s, check=check)


def _ceiling_per_s(stage: Stage, system: System, options: LatencyOptions, ids: Iterator[int]) -> float:
    """Return how many transactions a second a system applies while the publisher takes as many as it can."""
    with attached(stage, system, _TURN) as running:
        # Its start-up must not count.
        _probe(stage, 1, options.interval_s, ids, running.check)
        started_s = time.monotonic()
        DemoLoad(stage, "simple-update", clients=options.clients, limit=f"--time={options.ceiling_s:d}").wait()
        elapsed_s = time.monotonic() - started_s
        running.check()
        ((applied,),) = stage.target.execute("SELECT count(*) FROM pgbench_history", dbname=_TURN)
    if not applied:
        raise DemoError(f"{system.name} applied nothing within {elapsed_s:.0f} s.")
    return float(applied) / elapsed_s


@contextmanager
def _beside(stage: Stage, options: LatencyOptions, wanted_per_s: float) -> Iterator[Callable[[], float]]:
    """Load the publisher while the block runs; yields what says how many transactions a second that is.

    Raises:
        DemoError: pgbench ended before the block did.
    """
    if not wanted_per_s:
        yield lambda: 0.0
        return
    log = stage.directory / "pgbench-half.log"
    before = _history(stage)
    started_s = time.monotonic()
    process = _start_pgbench(stage, options, wanted_per_s, log)

    def rate() -> float:
        elapsed_s = time.monotonic() - started_s
        return (_history(stage) - before) / elapsed_s

    try:
        yield rate
        if (code := process.poll()) is not None:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
            raise DemoError(f"pgbench ended with {code}: {tail}")
    finally:
        end(process)


def _start_pgbench(stage: Stage, options: LatencyOptions, wanted_per_s: float, log: Path) -> subprocess.Popen[bytes]:
    """Start simple-update at a rate, until it is ended. Source: PostgreSQL manual, "pgbench"."""
    # Unlike a backlog it must reach the walsender commit by commit: flushed by the next probe, it would come in bursts,
    # each with a probe at its end.
    env = {**stage.source.client_env(BANK), "PGOPTIONS": "-c synchronous_commit=on"}
    command = [
        str(stage.source.program("pgbench")), "--no-vacuum", "--protocol=prepared", "--builtin=simple-update",
        f"--client={options.clients}", f"--jobs={min(options.clients, os.cpu_count() or 1)}",
        f"--rate={wanted_per_s:.1f}", f"--time={_FOREVER_S}",
    ]  # fmt: skip
    return stage.start(command, env=env, output=log)


def _history(stage: Stage) -> int:
    """Return how many transactions pgbench has committed on the publisher."""
    ((transactions,),) = stage.source.execute("SELECT count(*) FROM pgbench_history", dbname=BANK)
    return int(transactions)
