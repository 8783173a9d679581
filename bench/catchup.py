"""Catch-up: one backlog, drained by every runner in turn, each from its own copy of the slot into a fresh database.

In go a stage and the workload; out come the turns. The rounds are interleaved and their order turns round, so that
what drifts on the machine meets every runner alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from parapply.demo.race import (
    create_slot,
    drain_with_parapply,
    drain_with_subscription,
    drop_target,
    make_backlog,
    make_target,
)
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.demo.race import Drained
    from parapply.demo.stage import Stage

Sync = Literal["off", "on"]

BUILT_IN, PARAPPLY = "built-in subscription", "parapply"

_BACKLOG_SLOT = "backlog"
_TURN = "turn"  # slot and database of the one that drains


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is drained, and how.

    Attributes:
        transactions: at least so many; rounded up to a multiple of the clients.
        scale: of pgbench, 100,000 accounts each.
        clients: pgbench clients that make the backlog.
        workers: target connections of parapply.
        rounds: turns of each runner.
        sync: synchronous_commit of both runners on the subscriber.
    """

    transactions: int
    scale: int
    clients: int
    workers: int
    rounds: int
    sync: Sync


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One runner, one round; seconds as in `Drained`."""

    round_number: int
    runner: str
    first_s: float
    total_s: float
    is_equal: bool


def prepare(stage: Stage, workload: Workload) -> int:
    """Fill the servers, make the slot, then the backlog, and return its transactions.

    Raises:
        DemoError: a server or pgbench failed.
    """
    stage.fill_bank(workload.scale)
    create_slot(stage, _BACKLOG_SLOT)
    each = math.ceil(workload.transactions / workload.clients)
    return make_backlog(stage, clients=workload.clients, limit=f"--transactions={each}")


def turns(stage: Stage, workload: Workload) -> Iterator[Turn]:
    """Drain the backlog again and again, and yield each turn when it is over.

    Raises:
        DemoError: a runner failed.
    """
    runners = (BUILT_IN, PARAPPLY)
    for number in range(1, workload.rounds + 1):
        for runner in runners if number % 2 else reversed(runners):
            drained = _take_turn(stage, workload, runner)
            yield Turn(
                round_number=number,
                runner=runner,
                first_s=drained.first_s,
                total_s=drained.total_s,
                is_equal=drained.is_equal,
            )


def _take_turn(stage: Stage, workload: Workload, runner: str) -> Drained:
    """Drain a copy of the slot into a copy of the bank; both are gone afterwards."""
    stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_BACKLOG_SLOT, _TURN], dbname=BANK)
    make_target(stage, _TURN)
    if runner == BUILT_IN:
        drained = drain_with_subscription(stage, slot=_TURN, dbname=_TURN, synchronous_commit=workload.sync)
    else:
        settings = [f"apply.workers={workload.workers}", f"target.synchronous_commit={workload.sync}"]
        drained = drain_with_parapply(stage, slot=_TURN, dbname=_TURN, settings=settings)
    drop_target(stage, _TURN)
    return drained
