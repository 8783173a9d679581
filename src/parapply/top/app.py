"""The live screen in a terminal; the one place for Textual."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.widgets import Footer, Static

from parapply.terminal import is_hung_up
from parapply.top.layout import screen
from parapply.top.overview import ORDERS, in_order, overview

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from parapply.top.overview import Watched

_ORDERS = ("rows", "waits", "name")


class Top(App[None]):
    """Reads once a second and shows it; ends with q."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; } #screen { height: 1fr; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("s", "sort", "Sort"),
        ("space", "pause", "Pause"),
        ("up,k", "move(-1)", "Up"),
        ("down,j", "move(1)", "Down"),
        ("enter", "open", "Open"),
        ("escape,backspace", "overview", "All"),
    ]

    def __init__(self, slots: Sequence[Watched], interval_s: float) -> None:
        super().__init__(ansi_color=True)
        self._slots = slots
        self._interval_s = interval_s
        self._order = _ORDERS[0]
        self._slots_order = ORDERS[0]
        self._is_paused = False
        #: The slot whose screen is shown; None: a line for each.
        self._opened = slots[0] if len(slots) == 1 else None
        self._chosen = in_order(slots, self._slots_order)[0].name

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

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key does something here; the line of keys shows those that do."""
        del parameters
        if action in {"move", "open"}:
            return self._opened is None
        return action != "overview" or (self._opened is not None and len(self._slots) > 1)

    def action_sort(self) -> None:
        """Put the tables, or the slots, into the next order."""
        if self._opened is None:
            self._slots_order = ORDERS[(ORDERS.index(self._slots_order) + 1) % len(ORDERS)]
        else:
            self._order = _ORDERS[(_ORDERS.index(self._order) + 1) % len(_ORDERS)]
        self._show()

    def action_move(self, lines: int) -> None:
        """Choose another slot."""
        names = [one.name for one in in_order(self._slots, self._slots_order)]
        self._chosen = names[min(max(names.index(self._chosen) + lines, 0), len(names) - 1)]
        self._show()

    def action_open(self) -> None:
        """Show the screen of the slot that is chosen."""
        chosen = next(one for one in self._slots if one.name == self._chosen)
        # One that was never read has no screen; its line says why.
        if chosen.history.report:
            self._opened = chosen
            self.refresh_bindings()
            self._show()

    def action_overview(self) -> None:
        """Show all slots again."""
        self._opened = None
        self.refresh_bindings()
        self._show()

    def action_pause(self) -> None:
        """Pause, or resume."""
        self._is_paused = not self._is_paused
        self._show()

    async def _look(self) -> None:
        while not is_hung_up([sys.__stdin__.fileno() if sys.__stdin__ else 0]):
            if not self._is_paused:
                await asyncio.gather(*[one.look() for one in self._slots])
                self._show()
            await asyncio.sleep(self._interval_s)
        self.exit()

    def _show(self) -> None:
        shown = self.query_one("#screen", Static)
        size = self.size
        # A reading that was under way when the key was pressed must not hide that the screen is paused.
        notice = "paused" if self._is_paused else ""
        if self._opened is None:
            slots = in_order(self._slots, self._slots_order)
            shown.update(overview(slots, size.height - 1, chosen=self._chosen, notice=notice))
            return
        if not notice and self._opened.error is not None:
            # The last reading stays, because nothing newer is known.
            notice = self._opened.error.line()
        shown.update(screen(self._opened.history, size.width - 2, size.height - 1, self._order, notice))
