"""The progress of a copy or a comparison: a bar on a terminal, else a line now and then.

Lines of progress go to standard error, as the bar does; what is complete is said on standard output.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

import click
import msgspec

from parapply.amounts import brief
from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

    from parapply.copy.parts import Part
    from parapply.copy.published import PublishedTable

_MEGABYTE = 1e6
#: Seconds between two lines where there is no terminal.
_LINE_S = 10.0
#: Seconds between two calls of a listener.
_LISTENER_S = 1.0
#: Tables named in such a line.
_MOST_NAMES = 4


class CopyProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a copy is."""

    rows: int
    size_bytes: int
    share: float  # of the publisher's pages, from 0 to 1
    bytes_per_s: float  # since the copy began
    left_s: float | None  # about; None: not known yet


class Bar:
    """Counts rows and bytes; the bar's length is the part of the publisher's pages that is done."""

    def __init__(
        self,
        doing: str = "copying",
        *,
        has_bytes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        listener: Callable[[CopyProgress], None] | None = None,
        said: Callable[[str], None] | None = None,
    ) -> None:
        """Show nothing yet; `said` gets all lines, which are not printed then, and `listener` figures each second."""
        self._said = said
        self._listener = listener
        self._heard_s = 0.0
        self._doing = doing
        self._has_bytes = has_bytes
        self._clock = clock
        # rich takes a tenth of a second to import, and output to a log does not need it.
        self._progress = terminal_progress() if said is None and sys.stderr.isatty() else None
        self._task = self._progress.add_task(doing, total=None, figures="") if self._progress else None
        self.rows = 0
        self.size_bytes = 0
        self._rows_done = 0  # of parts that are committed
        self._pages_done = 0
        self._pages = 0
        self._estimated_rows = 0
        self._began_s = self._said_s = clock()
        #: Names of tables under way, as an ordered set.
        self._tables: dict[str, None] = {}

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away; the listener hears the last figures."""
        if self._listener is not None and self._pages:
            self._listener(self._figures())
        if self._progress:
            self._progress.stop()

    @property
    def seconds(self) -> float:
        """Return the time since the copy began."""
        return max(1e-6, self._clock() - self._began_s)

    def begin(self, parts: int, pages: int, rows: int) -> None:
        """Begin with what there is to do: parts, their pages, and rows as estimated."""
        self._pages, self._estimated_rows = max(pages, parts), rows
        self._began_s = self._said_s = self._clock()
        if self._progress and self._task is not None:
            self._progress.update(self._task, total=self._pages)

    def data(self, rows: int, size_bytes: int, table: str) -> None:
        """Count rows of a table that were handed on."""
        self._tables[table] = None
        self.rows += rows
        self.size_bytes += size_bytes
        self._show()

    def part_done(self, part: Part, rows: int) -> None:
        """Count a part that is committed."""
        self._rows_done += rows
        self._pages_done += max(1, part.pages)
        self._show()

    def table_done(self, table: PublishedTable, rows: int, size_bytes: int) -> None:
        """Note a table that is complete."""
        self._tables.pop(table.text, None)
        self.say(f"{printable(table.text)}: {rows:,} rows, {size_bytes / _MEGABYTE:,.1f} MB")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._said is not None:
            self._said(line)
        elif self._progress:
            self._progress.console.print(line, highlight=False, markup=False)
        else:
            click.echo(line)

    def _show(self) -> None:
        if self._listener is not None and self._clock() - self._heard_s >= _LISTENER_S:
            self._heard_s = self._clock()
            self._listener(self._figures())
        if self._progress is None and self._clock() - self._said_s < _LINE_S:
            return
        done = self._done_pages()
        rate = self.size_bytes / _MEGABYTE / self.seconds
        figures = f"{self.rows:,} rows  {self.rows / self.seconds:,.0f} rows/s"
        if self._has_bytes:
            figures += f"  {self.size_bytes / _MEGABYTE:,.0f} MB  {rate:,.0f} MB/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, figures=figures)
            return
        self._said_s = self._clock()
        share = done / self._pages if self._pages else 0.0
        left = f", about {brief(self.seconds * (1 - share) / share)} left" if share else ""
        names = [printable(name) for name in self._tables]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        now = f"; now {', '.join(names[:_MOST_NAMES])}{more}" if names else ""
        line = f"{self._doing}: {share:.0%}, {figures.replace('  ', ', ')}{left}{now}"
        if self._said is not None:
            self._said(line)
        else:
            click.echo(line, err=True)

    def _done_pages(self) -> float:
        # Rows of parts under way count as the pages they fill by the publisher's own estimate.
        rows_per_page = self._estimated_rows / self._pages if self._pages else 0
        under_way = (self.rows - self._rows_done) / rows_per_page if rows_per_page else 0
        return min(self._pages, self._pages_done + under_way)

    def _figures(self) -> CopyProgress:
        share = self._done_pages() / self._pages if self._pages else 0.0
        return CopyProgress(
            rows=self.rows,
            size_bytes=self.size_bytes,
            share=share,
            bytes_per_s=self.size_bytes / self.seconds,
            left_s=self.seconds * (1 - share) / share if share else None,
        )

    def summary(self) -> str:
        """Return the whole in one line."""
        megabytes = self.size_bytes / _MEGABYTE
        return (
            f"{self.rows:,} rows, {megabytes:,.1f} MB in {self.seconds:.1f} s"
            f" ({self.rows / self.seconds:,.0f} rows/s, {megabytes / self.seconds:,.1f} MB/s)"
        )


def terminal_progress() -> Progress:
    """Return a bar on standard error, with the field `figures` beside it."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
