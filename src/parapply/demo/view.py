"""Progress while the load runs: a live screen on a terminal, plain lines elsewhere.

In go a stage and a slot; out come samples and what is shown of them. The transactions are counted by both servers'
own statistics of inserted rows, not by the daemon.
"""

from __future__ import annotations

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
from parapply.demo.stage import BANK
from parapply.model import parse_lsn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from parapply.demo.stage import Stage

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
        """Show what happens until `goes_on` says no.

        Raises:
            DemoError: a server went away; and whatever `goes_on` raises.
        """
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
