"""`python -m bench.synth`: write apply logs of a stated shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from bench.synth.shape import LogShape
from bench.synth.write import write_logs


@click.command(
    name="bench.synth",
    epilog="""\b
Examples:
  python -m bench.synth --out /tmp/log --records 100000
  python -m bench.synth --out /tmp/log --records 20000000 --detail transaction --batch-transactions 50
  python -m bench.synth --out /tmp/log --records 1000000 --dependency-rate 0.5 --conflict-rate 0.001 --seed 7
Content of the records: docs/APPLYLOG.md.""",
)
@click.option(
    "--out", "directory", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
    help="Directory for the files; made if it does not exist.",
)  # fmt: skip
@click.option("--records", type=click.IntRange(min=1), required=True, metavar="N", help="Number of records, about.")
@click.option(
    "--detail", type=click.Choice(["batch", "transaction"]), default="batch", show_default=True,
    help="Records of batches only, or also of their transactions.",
)  # fmt: skip
@click.option("--slot", default="synth", show_default=True, help="Name of the slot.")
@click.option(
    "--tables", type=click.IntRange(1, 1000), default=8, show_default=True,
    help="Tables, each used half as often as the one before.",
)  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Number of workers.")
@click.option(
    "--batch-transactions", type=click.IntRange(1, 100_000), default=20, show_default=True,
    help="Transactions of a batch, on average.",
)  # fmt: skip
@click.option(
    "--transaction-changes", type=click.IntRange(1, 1000), default=3, show_default=True,
    help="Rows of a transaction, on average.",
)  # fmt: skip
@click.option(
    "--dependency-rate", type=click.FloatRange(0, 1), default=0.1, show_default=True,
    help="Part of the batches that wait for an earlier one.",
)  # fmt: skip
@click.option(
    "--conflict-rate", type=click.FloatRange(0, 1), default=0.0, show_default=True,
    help="Part of the transactions with a conflict.",
)  # fmt: skip
@click.option(
    "--retry-rate", type=click.FloatRange(0, 1), default=0.001, show_default=True, help="Part of the batches repeated."
)
@click.option(
    "--execute-ms", type=click.FloatRange(min=0.01), default=20.0, show_default=True,
    help="Execution of a batch: the median of a log-normal distribution.",
)  # fmt: skip
@click.option(
    "--execute-spread", type=click.FloatRange(0, 3), default=0.6, show_default=True, help="Its spread, sigma."
)
@click.option(
    "--duration-s", type=click.FloatRange(min=0.001),
    help="From the first to the last commit.  [default: so long that workers are busy half of the time]",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of the random numbers.")
def synth_log(directory: Path, **options: Any) -> None:  # noqa: ANN401  click's options
    """Write apply logs of a stated shape, for trying the report."""
    shape = LogShape(**options)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("records", total=shape.records)
        total = write_logs(shape, directory, lambda n_records: progress.advance(task, n_records))
        progress.update(task, completed=shape.records)
    click.echo(f"{total:,} records in {shape.n_files} files: {directory}")


if __name__ == "__main__":
    synth_log()
