"""`python -m bench.micro.applylog`: what the apply log costs, and how good its what-if is.

`cost` drains one backlog without the log and with each detail, in turn. `what-if` drains one backlog with 1, 2, 4 and 8
workers, predicts from the records of the run with one worker how long the others take, and compares: from the start of
the first batch to the last commit, both as the records have it.
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
from bench.observe import LEADER_STREAM, Observer
from bench.options import Options
from bench.output import write_result
from bench.proxy import delayed_port
from bench.report import machine_facts
from bench.servers import make_stage, versions
from bench.workloads import LARGE_ROWS, WORKLOADS
from parapply.analysis.units import commit_floor_s, flights_of, of_batches, of_transactions, rows_of
from parapply.analysis.verdict import shares_of
from parapply.analysis.whatif import what_if
from parapply.applylog_schema import BatchRecord, IntervalRecord, read_record
from parapply.demo.interrupts import Interrupts
from parapply.demo.race import drain_with_parapply, drop_target, make_target
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.analysis.whatif import Attainable, WhatIf
    from parapply.applylog_schema import Record
    from parapply.demo.stage import Stage

_RESULTS: Final = Path(__file__).parents[1] / "results"
_SLOT: Final = "backlog"
_TURN: Final = "turn"
_ORDERS: Final = ("preserve", "relaxed")
_WORKERS: Final = (1, 2, 4, 8)
_OFF: Final = "off"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One drained backlog.

    Attributes:
        total_s: from the daemon's start until the last row was visible.
        leader_cpu_s: CPU of the daemon while it reads the slot.
        peak_bytes: largest resident memory of the daemon.
        log_bytes: of the apply log.
        records: of it.
    """

    total_s: float
    leader_cpu_s: float
    peak_bytes: int
    log_bytes: int
    records: list[Record]


def _drain(stage: Stage, number: int, settings: Sequence[str], delay_s: float = 0.0) -> Turn:
    directory = stage.directory / f"applylog-{number}"
    directory.mkdir()
    stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_SLOT, _TURN], dbname=BANK)
    make_target(stage, _TURN)
    with Observer(stage, _TURN) as observer, delayed_port("127.0.0.1", stage.target.port, delay_s) as port:
        drained = drain_with_parapply(
            stage,
            slot=_TURN,
            dbname=_TURN,
            settings=[f"applylog.directory={directory}", *settings],
            target_port=port if delay_s else None,
            watch=observer,
        )
        usage = observer.usage()[LEADER_STREAM]
    if not is_equal(stage, _TURN):
        raise click.ClickException("the tables differ")
    drop_target(stage, _TURN)
    files = sorted(directory.iterdir())
    return Turn(
        total_s=drained.total_s,
        leader_cpu_s=usage.cpu_s,
        peak_bytes=usage.peak_bytes,
        log_bytes=sum(file.stat().st_size for file in files),
        records=[read_record(line) for file in files for line in file.read_bytes().splitlines()],
    )


@click.group()
def main() -> None:
    """Measure the apply log."""


@main.command()
@click.option("--workload", type=click.Choice(list(WORKLOADS)), default="simple-update", show_default=True)
@click.option("--transactions", type=click.IntRange(min=1), help="By default the workload's own.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="For the daemon.")
def cost(workload: str, transactions: int | None, rounds: int, settings: tuple[str, ...]) -> None:
    """Drain a backlog without the log and with each detail."""
    details = (_OFF, "batch", "transaction")
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
            "peak_bytes": max(turn.peak_bytes for turn in turns[detail]),
            "log_bytes": turns[detail][-1].log_bytes,
            "records": len(turns[detail][-1].records),
        }
        for detail in details
    }
    for detail in details:
        click.echo(f"{detail:12} median {best[detail]:6.2f} s ({best[detail] / best[_OFF] - 1:+.1%}), "
                   f"leader {cpu[detail]:5.2f} s of CPU")  # fmt: skip
    content = {"workload": workload, "backlog": asdict(backlog), "facts": facts, "settings": settings, **figures}
    _write("applylog-cost", content)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One order and number of workers.

    Attributes:
        order: of the commits.
        workers: connections.
        measured_s: from the first batch's start to the last commit.
        predicted_s: the same, from the run that predicts, batches as that one formed them.
        free_s: the same, if each transaction could be given to any worker.
        limit: what the what-if says limits.
    """

    order: str
    workers: int
    measured_s: float
    predicted_s: float
    free_s: float
    limit: str


@main.command(name="what-if")
@click.option("--workload", type=click.Choice(list(WORKLOADS)), default="simple-update", show_default=True)
@click.option("--transactions", type=click.IntRange(min=1), default=20_000, show_default=True)
@click.option("--delay-ms", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Each direction.")
@click.option(
    "--from-workers", type=click.Choice([str(workers) for workers in _WORKERS]), default="1", show_default=True,
    help="The run whose log predicts the others.",
)  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="For the daemon.")
def compare(workload: str, transactions: int, delay_ms: float, from_workers: str, settings: tuple[str, ...]) -> None:
    """Compare the what-if with what more workers really do."""
    options = Options(transactions=transactions, large_rows=LARGE_ROWS)
    machine = machine_facts(os.getloadavg()[0])
    found: list[Compared] = []
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        facts = {**machine, **versions(stage)}
        prepare(stage, WORKLOADS[workload], options)
        number = 0
        for order in _ORDERS:
            drained: dict[int, list[Record]] = {}
            for workers in _WORKERS:
                number += 1
                chosen = [
                    *WORKLOADS[workload].settings, *settings, "applylog.detail=transaction",
                    f"apply.workers={workers}", f"apply.commit_order={order}",
                ]  # fmt: skip
                drained[workers] = _drain(stage, number, chosen, delay_ms / 1000).records
            merged, free = _predict(drained[int(from_workers)])
            for workers, records in drained.items():
                found.append(_compared(records, merged.of(order, workers), free.of(order, workers)))
                click.echo(found[-1])
    for one in found:
        first = next(each for each in found if each.order == one.order)
        click.echo(
            f"| {workload}, {delay_ms:g} ms | {one.order} | {one.workers} | {one.measured_s:.2f} |"
            f" {one.predicted_s:.2f} | {one.predicted_s / one.measured_s - 1:+.0%} |"
            f" {first.measured_s / one.measured_s:.2f} | {first.predicted_s / one.predicted_s:.2f} | {one.limit} |"
        )
    content = {
        "workload": workload, "transactions": transactions, "delay_ms": delay_ms, "settings": settings,
        "from_workers": int(from_workers),
    }  # fmt: skip
    _write(f"whatif-{workload}", {**content, "facts": facts, "turns": [asdict(one) for one in found]})


def _predict(records: list[Record]) -> tuple[WhatIf, WhatIf]:
    """Return the what-if of batches and of transactions."""
    batches = [record for record in records if isinstance(record, BatchRecord)]
    samples = [one for record in records if isinstance(record, IntervalRecord) for one in record.backends]
    flights, shares = flights_of(batches), shares_of((one.wait, one.samples) for one in samples)
    floor_s = commit_floor_s(flights, shares.commit)
    rows = rows_of(records, (flights.whole_s or 0.0) * (shares.flush or 0.0))
    merged = what_if(of_batches(rows), _WORKERS, commit_floor_s=floor_s)
    return merged, what_if(of_transactions(rows), _WORKERS)


def _compared(records: list[Record], merged: Attainable, free: Attainable) -> Compared:
    batches = [record for record in records if isinstance(record, BatchRecord)]
    begun = min(datetime.fromisoformat(batch.started_at) for batch in batches)
    ended = max(datetime.fromisoformat(batch.committed_at) for batch in batches)
    return Compared(
        order=merged.order,
        workers=merged.workers,
        measured_s=(ended - begun).total_seconds(),
        predicted_s=merged.makespan_s,
        free_s=free.makespan_s,
        limit=str(merged.limit),
    )


def _write(stem: str, content: Mapping[str, object]) -> None:
    path = write_result(_RESULTS / f"{stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json", content)
    click.echo(f"written: bench/{_RESULTS.name}/{path.name}")


if __name__ == "__main__":
    main()
