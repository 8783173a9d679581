"""Display of several migrations at the same time: a table on a terminal, else lines with the name of a database."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Final

from parapply.amounts import brief
from parapply.database_lines import DatabaseLines, about
from parapply.migrate.show import Screen
from parapply.printable import printable
from parapply.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

    from rich.live import Live
    from rich.table import Table

_MEGABYTE: Final = 1e6
#: Seconds between two drawings of the table.
_DRAW_S: Final = 0.5


class Board:
    """Screens of several databases."""

    def __init__(self, names: Collection[str], *, as_json: bool) -> None:
        self._is_drawn = not as_json and sys.stderr.isatty()
        self._out = sys.stderr if as_json else sys.stdout
        self.screens = {name: Screen(as_json=as_json, database=name) for name in names}
        self._sizes: dict[str, int] = {}
        self._ends: dict[str, str] = {}

    def order(self, sizes: dict[str, int]) -> None:
        """Show the databases in this order, with their sizes."""
        self._sizes = sizes

    def ended(self, name: str, text: str) -> None:
        """Show the end of a database's migration."""
        self._ends[name] = text

    @contextmanager
    def of(self, name: str) -> Iterator[Screen]:
        """Take lines as a database's until the block ends."""
        with about(name):
            yield self.screens[name]

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Take all lines of this process, and draw the table, until the block ends."""
        if not self._is_drawn:
            with redirect_stdout(DatabaseLines(self._out)), redirect_stderr(DatabaseLines(sys.stderr)):
                yield
            return
        from rich.console import Console  # noqa: PLC0415  a tenth of a second, not needed without a terminal
        from rich.live import Live  # noqa: PLC0415

        out = sys.stdout
        # By the stream itself, because the name `sys.stderr` means another one in the block.
        with Live(self._table(), console=Console(file=sys.stderr), auto_refresh=False, transient=True) as live:
            drawing = asyncio.create_task(self._draw(live), name="migrate-table")
            try:
                # Rich has put its own streams there, which write above the table.
                lines = DatabaseLines(sys.stdout if out.isatty() else out)
                with redirect_stdout(lines), redirect_stderr(DatabaseLines(sys.stderr)):
                    yield
            finally:
                await end_tasks([drawing])

    async def _draw(self, live: Live) -> None:
        while True:
            live.update(self._table(), refresh=True)
            await asyncio.sleep(_DRAW_S)

    def _table(self) -> Table:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False)
        for heading, justify in (("database", "left"), ("MB", "right"), ("step", "left"), ("done", "right"),
                                 ("left", "right")):  # fmt: skip
            table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for name, size_bytes in self._sizes.items():
            cells = self._cells(name)
            table.add_row(*[Text(cell) for cell in (printable(name), f"{size_bytes / _MEGABYTE:,.0f}", *cells)])
        return table

    def _cells(self, name: str) -> tuple[str, str, str]:
        if name in self._ends:
            return printable(self._ends[name]), "", ""
        screen = self.screens[name]
        step, state = screen.latest
        if not step:
            return "waits", "", ""
        far = screen.how_far() if state != "done" else None
        if far is None:
            return f"{step} {'' if state in {'begun', 'running'} else state}", "", ""
        share = f"{far.done / far.total:.0%}" if far.total else f"{far.done:,} {far.unit}"
        return step, share, "" if far.left_s is None else brief(far.left_s)
