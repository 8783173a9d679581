"""Catch-up: one backlog, drained by every runner in turn, each from its own copy of the slot into a fresh database.

In go a stage, a workload and options; out come the turns. The rounds are interleaved and their order turns round, so
that what drifts on the machine meets every runner alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bench.applied import read_applied
from parapply.demo.command import Parapply
from parapply.demo.race import create_slot, drain_with_parapply, drain_with_subscription, drop_target, make_target
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.applied import Applied
    from bench.workloads import Workload
    from parapply.demo.stage import Stage

Sync = Literal["off", "on"]
Order = Literal["preserve", "relaxed"]

BUILT_IN = "built-in subscription"

_BACKLOG_SLOT = "backlog"
_TURN = "turn"  # slot and database of the one that drains


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how.

    Attributes:
        transactions: at least so many; rounded up to a multiple of the clients.
        scale: of the tables.
        clients: pgbench clients that make the backlog.
        workers: target connections of parapply; one runner for each number.
        orders: commit orders of parapply; one runner for each.
        rounds: turns of each runner.
        sync: synchronous_commit of all runners on the subscriber.
        settings: further `key=value` for parapply; they win over the workload's.
    """

    transactions: int
    scale: int
    clients: int
    workers: tuple[int, ...]
    orders: tuple[Order, ...]
    rounds: int
    sync: Sync
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Who drains.

    Attributes:
        name: for people.
        settings: `key=value` for parapply; `None` for the built-in subscription.
    """

    name: str
    settings: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One runner, one round; seconds as in `Drained`.

    Attributes:
        applied: from parapply's records; `None` for the built-in subscription, which keeps none.
    """

    round_number: int
    runner: str
    first_s: float
    total_s: float
    is_equal: bool
    applied: Applied | None


def runners(workload: Workload, options: Options) -> list[Runner]:
    """Return the built-in subscription and each parapply that was asked for."""
    return [Runner(name=BUILT_IN)] + [
        Runner(
            name=f"parapply {order} {workers}",
            settings=(
                f"apply.workers={workers}",
                f"apply.commit_order={order}",
                f"target.synchronous_commit={options.sync}",
                *workload.settings,
                *options.settings,
            ),
        )
        for order in options.orders
        for workers in options.workers
    ]


def prepare(stage: Stage, workload: Workload, options: Options) -> int:
    """Fill the servers, make the slot, then the backlog, and return its transactions.

    Raises:
        DemoError: a server or pgbench failed.
    """
    workload.fill(stage, options.scale)
    create_slot(stage, _BACKLOG_SLOT)
    each = math.ceil(options.transactions / options.clients)
    return workload.load(stage, scale=options.scale, clients=options.clients, each=each)


def turns(stage: Stage, workload: Workload, options: Options) -> Iterator[Turn]:
    """Drain the backlog again and again, and yield each turn when it is over.

    Raises:
        DemoError: a runner failed.
    """
    all_runners = runners(workload, options)
    for number in range(1, options.rounds + 1):
        for runner in all_runners if number % 2 else reversed(all_runners):
            yield _take_turn(stage, options, runner, number)


def _take_turn(stage: Stage, options: Options, runner: Runner, number: int) -> Turn:
    """Drain a copy of the slot into a copy of the tables; both are gone afterwards."""
    stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_BACKLOG_SLOT, _TURN], dbname=BANK)
    make_target(stage, _TURN)
    applied = None
    if runner.settings is None:
        drained = drain_with_subscription(stage, slot=_TURN, dbname=_TURN, synchronous_commit=options.sync)
    else:
        directory = stage.directory / f"applylog-{number}-{runner.name.replace(' ', '-')}"
        log = Parapply(stage, slot=_TURN).log
        # One file for the daemons of all turns.
        before_bytes = log.stat().st_size if log.exists() else 0
        settings = [*runner.settings, f"applylog.directory={directory}"]
        drained = drain_with_parapply(stage, slot=_TURN, dbname=_TURN, settings=settings)
        applied = read_applied(directory, log.read_bytes()[before_bytes:])
    drop_target(stage, _TURN)
    return Turn(
        round_number=number,
        runner=runner.name,
        first_s=drained.first_s,
        total_s=drained.total_s,
        is_equal=drained.is_equal,
        applied=applied,
    )
