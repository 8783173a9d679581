"""`python -m bench.micro.applylog`: what the apply log costs.

`cost` drains one backlog without the log and with each detail, in turn.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import click

from bench.catchup import prepare
from bench.compare import is_equal
from bench.observe import LEADER, LEADER_STREAM, Observer
from bench.options import Options
from bench.output import write_result
from bench.report import machine_facts
from bench.servers import make_stage, versions
from bench.workloads import LARGE_ROWS, WORKLOADS
from parapply.demo.race import drain_with_parapply, drop_target, make_target
from parapply.demo.stage import BANK, Interrupts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.demo.stage import Stage

_RESULTS: Final = Path(__file__).parents[1] / "results"
_SLOT: Final = "backlog"
_TURN: Final = "turn"
_OFF: Final = "off"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One drained backlog.

    Attributes:
        total_s: from the daemon's start until the last row was visible.
        leader_cpu_s: CPU of the daemon while it reads the slot.
        cpu_s: of it, its sessions on the target and the publisher's walsender.
        peak_bytes: largest resident memory of the daemon.
        log_bytes: of the apply log.
        records: of it.
    """

    total_s: float
    leader_cpu_s: float
    cpu_s: float
    peak_bytes: int
    log_bytes: int
    records: int


def _drain(stage: Stage, number: int, settings: Sequence[str]) -> Turn:
    directory = stage.directory / f"applylog-{number}"
    directory.mkdir()
    stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_SLOT, _TURN], dbname=BANK)
    make_target(stage, _TURN)
    with Observer(stage, _TURN) as observer:
        drained = drain_with_parapply(
            stage,
            slot=_TURN,
            dbname=_TURN,
            settings=[f"applylog.directory={directory}", *settings],
            watch=observer,
        )
        usages = observer.usage()
        usage = usages[LEADER_STREAM]
    if not is_equal(stage, _TURN):
        raise click.ClickException("the tables differ")
    drop_target(stage, _TURN)
    files = sorted(directory.iterdir())
    return Turn(
        total_s=drained.total_s,
        leader_cpu_s=usage.cpu_s,
        cpu_s=sum([one.cpu_s for role, one in usages.items() if role != LEADER]),
        peak_bytes=usage.peak_bytes,
        log_bytes=sum(file.stat().st_size for file in files),
        records=sum([file.read_bytes().count(b"\n") for file in files]),
    )


@click.group()
def main() -> None:
    """Measure the apply log."""


@main.command()
@click.option("--workload", type=click.Choice(list(WORKLOADS)), default="simple-update", show_default=True)
@click.option("--transactions", type=click.IntRange(min=1), help="By default the workload's own.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--detail", "details", type=click.Choice(["batch", "transaction"]), multiple=True, default=["batch", "transaction"]
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="For the daemon.")
def cost(
    workload: str, transactions: int | None, rounds: int, details: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    """Drain a backlog without the log and with each detail."""
    details = (_OFF, *details)
    options = Options(transactions=transactions, large_rows=LARGE_ROWS)
    turns: dict[str, list[Turn]] = defaultdict(list)
    machine = machine_facts(os.getloadavg()[0])
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        facts = {**machine, **versions(stage)}
        backlog = prepare(stage, WORKLOADS[workload], options)
        for number in range(rounds * len(details)):
            # Each round begins with another one.
            detail = details[(number + number // len(details)) % len(details)]
            chosen = ["applylog.directory="] if detail == _OFF else [f"applylog.detail={detail}"]
            turn = _drain(stage, number, [*settings, *chosen])
            turns[detail].append(turn)
            click.echo(f"{detail:12} {turn.total_s:6.2f} s, leader {turn.leader_cpu_s:5.2f} s of CPU")
    best = {detail: median(turn.total_s for turn in turns[detail]) for detail in details}
    cpu = {detail: median(turn.leader_cpu_s for turn in turns[detail]) for detail in details}
    figures = {
        detail: {
            "total_s": [turn.total_s for turn in turns[detail]],
            "median_s": best[detail],
            "part_of_throughput": 1 - best[_OFF] / best[detail],
            "leader_cpu_s": cpu[detail],
            "cpu_s": [turn.cpu_s for turn in turns[detail]],
            "median_cpu_s": median(turn.cpu_s for turn in turns[detail]),
            "peak_bytes": max(turn.peak_bytes for turn in turns[detail]),
            "log_bytes": turns[detail][-1].log_bytes,
            "records": turns[detail][-1].records,
        }
        for detail in details
    }
    for detail in details:
        click.echo(f"{detail:12} median {best[detail]:6.2f} s ({best[detail] / best[_OFF] - 1:+.1%}), "
                   f"leader {cpu[detail]:5.2f} s of CPU, all {figures[detail]['median_cpu_s']:5.2f} s")  # fmt: skip
    content = {"workload": workload, "backlog": asdict(backlog), "facts": facts, "settings": settings, **figures}
    _write("applylog-cost", content)


def _write(stem: str, content: Mapping[str, object]) -> None:
    path = write_result(_RESULTS / f"{stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json", content)
    click.echo(f"written: bench/{_RESULTS.name}/{path.name}")


if __name__ == "__main__":
    main()
