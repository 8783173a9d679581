"""Output of the demonstration: comparisons, the daemon's records, the race, and next steps.

In go results; out comes text for people. Decides nothing.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parapply.amounts import duration, size
from parapply.demo.server import SUPERUSER
from parapply.demo.stage import BANK
from parapply.model import parse_lsn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from parapply.demo.command import Comparison, Parapply
    from parapply.demo.race import Drained
    from parapply.demo.stage import Stage

_PROGRESS = "SELECT to_json(p) FROM parapply.progress AS p WHERE slot_name = %s"
_LOG_TAIL_LINES = 3
# PostgreSQL's sessions report their statistics about once a second; rates are means of this many seconds.
_RATE_WINDOW_S = 3.0
_SAMPLE_S = 0.5
_LINE_S = 2.0

_INSERTED = "pg_catalog.pg_stat_get_tuples_inserted('public.pgbench_history'::pg_catalog.regclass)"
_SOURCE = f"SELECT pg_catalog.pg_current_wal_flush_lsn(), {_INSERTED}"
_TARGET = f"""
SELECT lowest_remote_lsn, lag_s, state, reason, {_INSERTED} FROM parapply.progress WHERE slot_name = %s"""  # noqa: S608
_WORKERS = """
SELECT w.worker, w.pid, w.state, coalesce(w.waits_for, ''), w.transactions, w.changes
  FROM parapply.workers AS w JOIN parapply.slots USING (slot_id) WHERE slot_name = %s ORDER BY w.worker"""


def show_comparison(console: Console, tables: Sequence[Comparison]) -> None:
    """Print a row for each table, with the verdict."""
    grid = _grid("table", "rows: publisher", "subscriber", "")
    for table in tables:
        rows = ["" if n is None else f"{n:,}" for n in (table.source_rows, table.target_rows)]
        verdict = _verdict(table.is_equal) if all(rows) else Text("NOT COMPARED", style="bold red")
        grid.add_row(Text(table.name), *rows, verdict)
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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Both ends at one moment."""

    at_s: float  # monotonic clock
    published: int  # transactions committed on the publisher
    applied: int  # of these, applied on the subscriber
    lag_bytes: int  # WAL of the publisher beyond the watermark
    lag_s: float | None  # age of the oldest change that is not applied, as the daemon last said; `None` before it spoke
    watermark: str  # everything up to this LSN is on the subscriber
    state: str  # of the daemon, with the reason
    workers: list[tuple[Any, ...]]  # number, server process, state, what it waits for, transactions, changes


class View:
    """Reads both ends and shows what it sees."""

    def __init__(self, stage: Stage, slot: str, console: Console) -> None:
        self._stage = stage
        self._slot = slot
        self._console = console
        self._started_s = time.monotonic()
        self._recent: deque[Sample] = deque()

    def follow(self, goes_on: Callable[[], bool]) -> None:
        """Show what happens until `goes_on` says no."""
        with self._output() as show:
            while goes_on():
                show(self._sample())
                time.sleep(_SAMPLE_S)

    def _sample(self) -> Sample:
        ((flush_lsn, published),) = self._stage.source.execute(_SOURCE, dbname=BANK)
        ((watermark, lag_s, state, reason, applied),) = self._stage.target.execute(_TARGET, [self._slot], dbname=BANK)
        sample = Sample(
            at_s=time.monotonic(),
            published=published,
            applied=applied,
            lag_bytes=max(0, parse_lsn(flush_lsn) - parse_lsn(watermark)),
            lag_s=lag_s,
            watermark=watermark,
            state=f"{state} ({reason})" if reason else state,
            workers=self._stage.target.execute(_WORKERS, [self._slot], dbname=BANK),
        )
        self._recent.append(sample)
        while sample.at_s - self._recent[0].at_s > _RATE_WINDOW_S:
            self._recent.popleft()
        return sample

    @contextmanager
    def _output(self) -> Iterator[Callable[[Sample], None]]:
        if not self._console.is_terminal:
            yield self._print_line
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield lambda sample: live.update(self._screen(sample), refresh=True)

    def _rates(self) -> tuple[float, float]:
        first, last = self._recent[0], self._recent[-1]
        seconds = last.at_s - first.at_s
        if seconds <= 0:
            return 0.0, 0.0
        return (last.published - first.published) / seconds, (last.applied - first.applied) / seconds

    def _print_line(self, sample: Sample) -> None:
        elapsed_s = sample.at_s - self._started_s
        # The first sample has no rate yet.
        if len(self._recent) == 1 or elapsed_s < _LINE_S * self._n_lines:
            return
        self._n_lines += 1
        published, applied = self._rates()
        self._console.print(
            f"{elapsed_s:4.0f} s  publisher {published:7,.0f} tx/s  applied {applied:7,.0f} tx/s  "
            f"lag {size(sample.lag_bytes)}, {duration(sample.lag_s)}  watermark {sample.watermark}",
            soft_wrap=True,
        )

    # Number of printed lines; written by `_print_line` only.
    _n_lines = 1

    def _screen(self, sample: Sample) -> Group:
        published, applied = self._rates()
        facts = Table.grid(padding=(0, 2))
        for name, value in (
            ("running for", f"{sample.at_s - self._started_s:.0f} s"),
            ("publisher", f"{published:,.0f} transactions/s"),
            ("applied", f"{applied:,.0f} transactions/s"),
            ("lag", f"{size(sample.lag_bytes)} of WAL, {duration(sample.lag_s)}"),
            ("complete up to", sample.watermark),
            ("daemon", sample.state),
        ):
            facts.add_row(Text(name, style="bold"), Text(value))
        workers = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("worker", "server process", "state", "waits for"):
            workers.add_column(name)
        for name in ("transactions", "changes"):
            workers.add_column(name, justify="right")
        for worker, pid, state, waits_for, transactions, changes in sample.workers:
            cells = (worker, pid, state, waits_for, f"{transactions:,}", f"{changes:,}")
            workers.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
        return Group(facts, Text(), workers)
