"""Output of the demonstration: comparisons, the daemon's records, the race, and next steps.

In go results; out comes text for people. Decides nothing.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from parapply.demo.server import SUPERUSER
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from parapply.demo.command import Comparison, Parapply
    from parapply.demo.race import Drained
    from parapply.demo.stage import Stage

_PROGRESS = "SELECT to_json(p) FROM parapply.progress AS p WHERE slot_name = %s"
_LOG_TAIL_LINES = 3


def show_comparison(console: Console, tables: Sequence[Comparison]) -> None:
    """Print a row for each table, with the verdict."""
    grid = _grid("table", "rows: publisher", "subscriber", "")
    for table in tables:
        grid.add_row(Text(table.name), f"{table.source_rows:,}", f"{table.target_rows:,}", _verdict(table.is_equal))
    console.print(grid)


def _verdict(is_equal: bool) -> Text:  # noqa: FBT001  what it shows
    return Text("equal", style="green") if is_equal else Text("DIFFERS", style="bold red")


def _grid(first: str, *others: str) -> Table:
    """Return an empty table: the first column to the left, the figures to the right."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column(first, no_wrap=True)
    for name in others:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def show_progress(console: Console, stage: Stage, slot: str) -> None:
    """Print the slot's row of the progress view."""
    ((row,),) = stage.target.execute(_PROGRESS, [slot], dbname=BANK)
    console.print("The view parapply.progress on the subscriber:")
    grid = Table.grid(padding=(0, 2))
    for name, value in row.items():
        grid.add_row(f"  {name}", Text("" if value is None else str(value)))
    console.print(grid)


def show_applylog(console: Console, directory: Path, log: Path) -> None:
    """Print what the apply log holds, its largest record, and the last lines of the operational log."""
    lines = (json.loads(line) for path in sorted(directory.glob("apply-*.jsonl")) for line in path.open("rb"))
    records = [record for record in lines if record["record"] == "batch"]
    transactions = sum(record["n_transactions"] for record in records)
    console.print(
        f"The apply log: {len(records):,} target transactions hold {transactions:,} source transactions.",
        soft_wrap=True,
    )
    if records:
        largest = max(records, key=lambda record: int(record["n_transactions"]))
        console.print("The largest (the xids shortened):")
        console.print(_record_text(largest), markup=False, soft_wrap=True)
    console.print("The daemon's log ends with:")
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _record_text(record: dict[str, Any]) -> str:
    short = {**record, "xids": record["xids"][:4]}
    return "\n".join(f"  {name}: {json.dumps(value)}" for name, value in short.items())


def show_race(
    console: Console, runners: Mapping[str, Drained], tables: Mapping[str, Sequence[Comparison]], transactions: int
) -> None:
    """Print both times, start-up included, and whether the tables were equal afterwards."""
    grid = _grid("runner", "first row after", "caught up after", "transactions/s", "tables")
    for name, runner in runners.items():
        verdict = _verdict(all(table.is_equal for table in tables[name]))
        rate = transactions / runner.total_s
        grid.add_row(name, f"{runner.first_s:.2f} s", f"{runner.total_s:.2f} s", f"{rate:,.0f}", verdict)
    console.print(grid)
    for compared in tables.values():
        if not all(table.is_equal for table in compared):
            show_comparison(console, compared)
    built_in, ours = runners.values()
    share = ours.total_s / built_in.total_s
    text = f"parapply needed {share:.0%} of the built-in subscription's time, the start of both included"
    # With a backlog of a few rows, all may be there before the first poll.
    if built_in.total_s > built_in.first_s and ours.total_s > ours.first_s:
        applying = (ours.total_s - ours.first_s) / (built_in.total_s - built_in.first_s)
        text += (
            f"; {applying:.0%} from the first row on. Until then parapply starts a process and opens its connections,"
            " where the built-in subscription starts a worker inside of the server"
        )
    console.print(f"{text}.", soft_wrap=True)


def show_how_to_go_on(console: Console, stage: Stage, daemon: Parapply, applylog: Path) -> None:
    """Print connection strings, places, what to try, and how to end it."""
    pgbench, psql = str(stage.source.program("pgbench")), str(stage.target.program("psql"))
    source_dsn, target_dsn = stage.source.dsn(BANK), stage.target.dsn(BANK)
    pids = [str(pid) for pid in (daemon.pid, stage.source.pid, stage.target.pid)]
    address = ["-h", "127.0.0.1", "-p", str(stage.source.port), "-U", SUPERUSER]
    lines = [
        f"publisher   {source_dsn}",
        f"subscriber  {target_dsn}",
        f"slot        {daemon.slot}",
        f"apply log   {applylog}",
        f"daemon log  {daemon.log}",
        "",
        "Try:",
        f"  {shlex.join([pgbench, *address, '-n', '-c', '4', '-T', '30', BANK])}",
        f"  {daemon.shell_line('status', '--watch')}",
        f"  {shlex.join([psql, target_dsn, '-xc', 'TABLE parapply.progress'])}",
        "",
        "End it and remove everything:",
        # SIGINT is PostgreSQL's fast shutdown, and the daemon drains on it too.
        f"  kill -INT {' '.join(pids)}; sleep 3; rm -r {shlex.quote(str(stage.directory))}",
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
