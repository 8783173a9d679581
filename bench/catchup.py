"""Catch-up: one backlog, drained by every runner in turn, each from its own copy of the slot into a fresh database.

In go a stage, a workload and options; out come the turns. The rounds are interleaved and their order turns round, so
that what drifts on the machine meets every runner alike.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bench import bulk, compare, pglogical
from bench.applied import read_applied
from bench.ceiling import drain_to_nowhere
from bench.filling import fill, load
from bench.observe import Observer
from bench.proxy import delayed_port
from bench.runners import runners
from parapply.demo.command import Parapply
from parapply.demo.race import (
    Drained,
    create_slot,
    drain_with_parapply,
    drain_with_subscription,
    drop_target,
    make_target,
)
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from bench.applied import Applied
    from bench.disk import SlowDisk
    from bench.filling import Backlog
    from bench.options import Options, Sync
    from bench.processes import Usage
    from bench.runners import Runner
    from bench.wal import Wal
    from bench.workloads import Workload
    from parapply.demo.stage import Stage

_BACKLOG_SLOT: Final = "backlog"
_TURN: Final = "turn"  # slot, subscription and database of the one that drains
_STREAMING: Final = {"built-in": "off", "built-in-parallel": "parallel"}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One runner, one round.

    Attributes:
        round_number: from 1.
        runner: its name.
        disk: its subscriber's, as it ends the name.
        first_s: until the backlog's first row was visible; `None` where rows become visible once or never.
        total_s: until its last row was visible, or until all was read.
        is_equal: whether every table was equal afterwards; `None` without a target.
        usage: by role, as `Observer` names them.
        wal: of the subscriber; `None` without a target.
        applied: from parapply's records; `None` for the others, which keep none.
    """

    round_number: int
    runner: str
    first_s: float | None
    total_s: float
    is_equal: bool | None
    usage: dict[str, Usage]
    wal: Wal | None = None
    applied: Applied | None = None
    disk: str = ""


def prepare(stage: Stage, workload: Workload, options: Options) -> Backlog:
    """Fill the servers, make the slot, then the backlog, and return what it is.

    Raises:
        DemoError: a server or a program failed.
    """
    fill(stage, workload, scale=options.scale)
    if "pglogical" in options.systems:
        pglogical.prepare(stage, workload.publication)
    create_slot(stage, _BACKLOG_SLOT)
    backlog = load(stage, workload, options)
    if workload.is_bulk_possible and "bulk-statement" in options.systems:
        bulk.make_template(stage)
    return backlog


def turns(  # noqa: PLR0913  one for each thing that a turn needs
    stage: Stage, workload: Workload, options: Options, backlog: Backlog, sync: Sync, *, disk: SlowDisk | None = None
) -> Iterator[Turn]:
    """Drain the backlog again and again, and yield each turn when it is over.

    `disk` is the subscriber's, where a runner wants a slow one.

    Raises:
        DemoError: a runner failed.
    """
    all_runners = runners(workload, options, sync)
    for number in range(1, options.rounds + 1):
        for runner in all_runners if number % 2 else reversed(all_runners):
            yield replace(_take_turn(stage, runner, number, backlog, sync, disk=disk), disk=runner.disk.text)


def _take_turn(  # noqa: PLR0913  as above
    stage: Stage, runner: Runner, number: int, backlog: Backlog, sync: Sync, *, disk: SlowDisk | None
) -> Turn:
    """Drain a copy of the slot into a copy of the tables; both are gone afterwards."""
    if runner.system == "pglogical":
        return _pglogical_turn(stage, runner, number)
    slowed = nullcontext() if disk is None else disk.slowed(runner.disk)
    with Observer(stage, _TURN) as observer:
        if runner.system == "bulk-statement":
            return _bulk_turn(stage, runner, number, sync, observer, slowed=slowed)
        stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_BACKLOG_SLOT, _TURN], dbname=BANK)
        if runner.system == "ceiling":
            total_s = drain_to_nowhere(
                stage, reader=runner.name, slot=_TURN, end_lsn=backlog.end_lsn, observer=observer
            )
            return Turn(
                round_number=number, runner=runner.name, first_s=None, total_s=total_s, is_equal=None,
                usage=observer.usage(),
            )  # fmt: skip
        make_target(stage, _TURN)
        with slowed:
            if runner.system.startswith("parapply"):
                drained, applied = _drain_with_parapply(stage, runner, observer)
            else:
                applied = None
                drained = drain_with_subscription(
                    stage, slot=_TURN, dbname=_TURN, synchronous_commit=sync, streaming=_STREAMING[runner.system],
                    watch=observer,
                )  # fmt: skip
        is_equal = compare.is_equal(stage, _TURN)
        drop_target(stage, _TURN)
        return Turn(
            round_number=number, runner=runner.name, first_s=drained.first_s, total_s=drained.total_s,
            is_equal=is_equal, usage=observer.usage(), wal=observer.wal, applied=applied,
        )  # fmt: skip


def _pglogical_turn(stage: Stage, runner: Runner, number: int) -> Turn:
    make_target(stage, _TURN)
    # The server starts again for it, so its sessions come after that.
    with pglogical.loaded(stage.target), Observer(stage, _TURN, slot=pglogical.slot_of(_TURN)) as observer:
        drained = pglogical.drain(stage, dbname=_TURN, watch=observer)
        usage = observer.usage()
    is_equal = compare.is_equal(stage, _TURN)
    drop_target(stage, _TURN)
    return Turn(
        round_number=number, runner=runner.name, first_s=drained.first_s, total_s=drained.total_s, is_equal=is_equal,
        usage=usage, wal=observer.wal,
    )  # fmt: skip


def _bulk_turn(  # noqa: PLR0913  as above
    stage: Stage, runner: Runner, number: int, sync: Sync, observer: Observer, *, slowed: AbstractContextManager[None]
) -> Turn:
    make_target(stage, _TURN, template=bulk.TEMPLATE)
    with slowed:
        total_s = bulk.apply_changes(stage, _TURN, sync, observer)
    is_equal = compare.is_equal(stage, _TURN)
    drop_target(stage, _TURN)
    return Turn(
        round_number=number, runner=runner.name, first_s=None, total_s=total_s, is_equal=is_equal,
        usage=observer.usage(), wal=observer.wal,
    )  # fmt: skip


def _drain_with_parapply(stage: Stage, runner: Runner, observer: Observer) -> tuple[Drained, Applied]:
    """Drain with the daemon, over a detour if there is to be one, and read what it recorded."""
    # A turn of the same name may have been taken with another synchronous_commit.
    directory = stage.directory / f"applylog-{len(list(stage.directory.glob('applylog-*')))}"
    log = Parapply(stage, slot=_TURN).log
    # One file for the daemons of all turns.
    before_bytes = log.stat().st_size if log.exists() else 0
    with ExitStack() as detour:
        port = None
        if runner.delay_s:
            port = detour.enter_context(delayed_port("127.0.0.1", stage.target.port, runner.delay_s))
        settings = [*runner.settings, f"applylog.directory={directory}"]
        drained = drain_with_parapply(
            stage, slot=_TURN, dbname=_TURN, settings=settings, environment=runner.environment, target_port=port,
            watch=observer,
        )  # fmt: skip
    return drained, read_applied(directory, log.read_bytes()[before_bytes:])
