"""`python -m bench`: parapply against the built-in subscription on the same backlog, workload by workload."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

import click
from rich.console import Console

from bench.catchup import Options, Order, Sync, Turn, prepare, turns
from bench.report import RESULTS, applied_reasons, applied_summary, machine_facts, save, summary
from bench.workloads import WORKLOADS, Workload
from parapply.demo.interrupts import Interrupts
from parapply.demo.stage import Stage
from parapply.errors import ParapplyError

# Neither runner shall meet a vacuum that the other did not, nor read from disk what fits into memory.
_SETTINGS: dict[str, str | int | bool] = {"autovacuum": False, "shared_buffers": "512MB"}
# A narrower terminal wraps the lines and loses nothing.
_COLUMNS = 120


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), default=["simple-update"],
    show_default=True, help="What the backlog holds. May be given several times.",
)  # fmt: skip
@click.option("--transactions", type=click.IntRange(min=1), default=200_000, show_default=True, help="Backlog.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each runner.")
@click.option(
    "--workers", multiple=True, type=click.IntRange(1, 64), default=[4],
    show_default=True, help="parapply's connections. May be given several times.",
)  # fmt: skip
@click.option(
    "--order", "orders", multiple=True, type=click.Choice(["preserve", "relaxed"]), default=["preserve"],
    show_default=True, help="parapply's commit order. May be given several times.",
)  # fmt: skip
@click.option("--sync", type=click.Choice(["off", "on"]), default="off", show_default=True, help="synchronous_commit.")
@click.option("--scale", type=click.IntRange(min=1), default=10, show_default=True, help="Size of the tables.")
@click.option("--clients", type=click.IntRange(min=1), default=4, show_default=True, help="Clients making the backlog.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE",
    help="Passed on to parapply, after the workload's own. May be given several times.",
)  # fmt: skip
@click.option("--save/--no-save", "is_saved", default=True, help="Write the JSON files.")
def main(  # noqa: PLR0913  one parameter for each option
    *,
    names: tuple[str, ...],
    transactions: int,
    rounds: int,
    workers: tuple[int, ...],
    orders: tuple[Order, ...],
    sync: Sync,
    scale: int,
    clients: int,
    settings: tuple[str, ...],
    is_saved: bool,
) -> None:
    """Drain one backlog of each workload by each runner in turn, and print times, retries and waits."""
    options = Options(
        transactions=transactions,
        scale=scale,
        clients=clients,
        # Twice the same runner would count as one.
        workers=tuple(dict.fromkeys(workers)),
        orders=tuple(dict.fromkeys(orders)),
        rounds=rounds,
        sync=sync,
        settings=settings,
    )
    console = Console(highlight=False, soft_wrap=True, width=_COLUMNS)
    # Of others: a busy machine makes the figures worthless, and the reader shall see it. Later it would be our own.
    load = os.getloadavg()[0]
    is_equal = True
    try:
        for name in dict.fromkeys(names):
            is_equal = _measure(WORKLOADS[name], options, console, load=load, is_saved=is_saved) and is_equal
    except ParapplyError as error:
        click.echo(f"bench: {error.line()}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0 if is_equal else 1)


def _measure(workload: Workload, options: Options, console: Console, *, load: float, is_saved: bool) -> bool:
    """Run one workload on servers of its own, print it, and say whether the tables were equal after every turn."""
    at = datetime.now(UTC)
    facts = machine_facts(load)
    done: list[Turn] = []
    with Interrupts() as interrupts, Stage(interrupts, name="bench", settings=_SETTINGS) as stage:
        facts["postgresql"] = stage.source.binaries.version_text
        console.print(f"{workload.name}: {workload.text}")
        console.print(f"Making a backlog of {options.transactions:,} transactions ...")
        transactions = prepare(stage, workload, options)
        for turn in turns(stage, workload, options):
            done.append(turn)
            verdict = "tables equal" if turn.is_equal else "TABLES DIFFER"
            console.print(f"round {turn.round_number}  {turn.runner:22} {turn.total_s:6.2f} s  {verdict}")
    console.print(f"\n{transactions:,} transactions, synchronous_commit {options.sync}")
    console.print(summary(done, transactions))
    console.print()
    console.print(applied_summary(done))
    for line in applied_reasons(done):
        console.print(line, markup=False)
    if is_saved:
        path = save(done, workload, options, transactions=transactions, facts=facts, at=at)
        console.print(f"written: bench/{RESULTS.name}/{path.name}")
    console.print()
    return all(turn.is_equal for turn in done)


if __name__ == "__main__":
    main()
