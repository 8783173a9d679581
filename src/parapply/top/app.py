"""The live screen in a terminal; the one place for Textual."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.widgets import Footer, Static

from parapply.errors import ParapplyError
from parapply.terminal import is_hung_up
from parapply.top.layout import screen

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from parapply.commands.state_reader import StateReader
    from parapply.top.history import ReadingHistory

_ORDERS = ("rows", "waits", "name")


class Top(App[None]):
    """Reads once a second and shows it; ends with q."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; } #screen { height: 1fr; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("s", "sort", "Sort: rows, waits, name"),
        ("space", "pause", "Pause"),
    ]

    def __init__(self, reader: StateReader, history: ReadingHistory, interval_s: float) -> None:
        """Show what is known.

        Args:
            reader: queried repeatedly.
            history: with at least one reading.
            interval_s: between two readings.
        """
        super().__init__(ansi_color=True)
        self._reader = reader
        self._history = history
        self._interval_s = interval_s
        self._order = _ORDERS[0]
        self._notice = ""
        self._is_paused = False

    def compose(self) -> ComposeResult:
        """Yield the screen and the line of keys."""
        yield Static(id="screen")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self.run_worker(self._look(), name="look", exclusive=True)

    def on_resize(self) -> None:
        """Lay it out again."""
        self._show()

    def action_sort(self) -> None:
        """Put the tables into the next order."""
        self._order = _ORDERS[(_ORDERS.index(self._order) + 1) % len(_ORDERS)]
        self._show()

    def action_pause(self) -> None:
        """Pause, or resume."""
        self._is_paused = not self._is_paused
        self._show()

    async def _look(self) -> None:
        while not is_hung_up([sys.__stdin__.fileno() if sys.__stdin__ else 0]):
            if not self._is_paused:
                try:
                    self._history.add(await self._reader.read(), time.monotonic())
                    self._notice = ""
                except ParapplyError as error:
                    # The last reading stays, because nothing newer is known.
                    self._notice = error.line()
                self._show()
            await asyncio.sleep(self._interval_s)
        self.exit()

    def _show(self) -> None:
        shown = self.query_one("#screen", Static)
        size = self.size
        # A reading that was under way when the key was pressed must not hide that the screen is paused.
        notice = "paused" if self._is_paused else self._notice
        shown.update(screen(self._history, size.width - 2, size.height - 1, self._order, notice))
