"""`python -m bench`: parapply against the built-in subscription on the same backlog."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

import click
from rich.console import Console

from bench.catchup import Sync, Turn, Workload, prepare, turns
from bench.report import RESULTS, machine_facts, save, summary
from parapply.demo.interrupts import Interrupts
from parapply.demo.stage import Stage
from parapply.errors import ParapplyError

# Neither runner shall meet a vacuum that the other did not, nor read from disk what fits into memory.
_SETTINGS: dict[str, str | int | bool] = {"autovacuum": False, "shared_buffers": "512MB"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--transactions", type=click.IntRange(min=1), default=200_000, show_default=True, help="Backlog.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each runner.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="parapply's connections.")
@click.option("--sync", type=click.Choice(["off", "on"]), default="off", show_default=True, help="synchronous_commit.")
@click.option("--scale", type=click.IntRange(min=1), default=10, show_default=True, help="pgbench scale factor.")
@click.option("--clients", type=click.IntRange(min=1), default=4, show_default=True, help="Clients making the backlog.")
@click.option("--save/--no-save", "is_saved", default=True, help="Write the JSON file.")
def main(  # noqa: PLR0913  one parameter for each option
    *, transactions: int, rounds: int, workers: int, sync: Sync, scale: int, clients: int, is_saved: bool
) -> None:
    """Drain one backlog of pgbench simple-update transactions by each runner in turn, and print the times."""
    workload = Workload(
        transactions=transactions, scale=scale, clients=clients, workers=workers, rounds=rounds, sync=sync
    )
    try:
        is_equal = _measure(workload, Console(highlight=False), is_saved=is_saved)
    except ParapplyError as error:
        click.echo(f"bench: {error.line()}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0 if is_equal else 1)


def _measure(workload: Workload, console: Console, *, is_saved: bool) -> bool:
    """Run everything, print it, and say whether the tables were equal after every turn."""
    at = datetime.now(UTC)
    # Of others: a busy machine makes the figures worthless, and the reader shall see it.
    load = os.getloadavg()[0]
    done: list[Turn] = []
    with Interrupts() as interrupts, Stage(interrupts, name="bench", settings=_SETTINGS) as stage:
        console.print(f"Making a backlog of {workload.transactions:,} transactions ...")
        transactions = prepare(stage, workload)
        for turn in turns(stage, workload):
            done.append(turn)
            verdict = "tables equal" if turn.is_equal else "TABLES DIFFER"
            console.print(f"round {turn.round_number}  {turn.runner:22} {turn.total_s:6.2f} s  {verdict}")
        facts = machine_facts(stage.source.binaries.version_text, load)
    console.print(f"\n{transactions:,} transactions, synchronous_commit {workload.sync}, {workload.workers} workers")
    console.print(summary(done, transactions))
    if is_saved:
        path = save(done, workload, transactions, facts, at)
        console.print(f"written: bench/{RESULTS.name}/{path.name}")
    return all(turn.is_equal for turn in done)


if __name__ == "__main__":
    main()
