"""Several slots on one screen: a line for each, with its lag, rate and limit. 80 by 24 is enough."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from parapply.amounts import brief, size
from parapply.commands.state_reader import StateReader
from parapply.errors import ParapplyError
from parapply.logs import redact_text
from parapply.printable import printable, printable_tree
from parapply.top.history import ReadingHistory
from parapply.top.layout import grid, state_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from parapply.config import Config

ORDERS: Final = ("lag", "rows", "name")
#: Lines besides the slots: the heading, what is left out, a notice.
_OTHER_LINES: Final = 3
_NAME_COLUMNS: Final = 16


class Watched:
    """A slot that is read again and again. Written by `look`."""

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        self.reader = StateReader(config)
        self.history = ReadingHistory()
        #: Why the latest reading failed; None: it did not.
        self.error: ParapplyError | None = None

    async def look(self) -> None:
        """Read once; an error is kept until the next reading, beside what was read before."""
        try:
            self.history.add(await self.reader.read(), time.monotonic())
            self.error = None
        except ParapplyError as error:
            self.error = error

    @property
    def lag_s(self) -> float:
        """Return the lag for the order: one that is not known comes first."""
        lag_s = self.history.report.get("lag_s")
        return float("inf") if lag_s is None else float(lag_s)

    @property
    def rows_s(self) -> float:
        """Return rows a second of all tables."""
        return sum([one.rows_s for one in self.history.tables()]) if self.history.report else 0.0


def in_order(slots: Sequence[Watched], order: str) -> list[Watched]:
    """Return slots with the highest `order` (lag or rows) or by name first."""
    by_name = sorted(slots, key=lambda one: one.name)
    if order == "name":
        return by_name
    return sorted(by_name, key=lambda one: one.lag_s if order == "lag" else one.rows_s, reverse=True)


def overview(slots: Sequence[Watched], height: int, *, chosen: str | None = None, notice: str = "") -> Group:
    """Lay the screen out."""
    room = max(1, height - _OTHER_LINES) if height else len(slots)
    names = [one.name for one in slots]
    first = max(0, names.index(chosen) - room + 1) if chosen in names else 0
    shown = slots[first : first + room]
    widest = max([len("database"), *[len(printable(one.name)) for one in shown]])
    table = grid(
        ("", "left", 1), ("database", "left", min(widest, _NAME_COLUMNS)), ("state", "left", 14), ("lag", "right", 7),
        ("behind", "right", 9), ("rows/s", "right", 7), ("limit", "left", None),
    )  # fmt: skip
    for one in shown:
        name = Text(printable(one.name), no_wrap=True, overflow="ellipsis")
        table.add_row(">" if one.name == chosen else " ", name, *_cells(one))
    parts: list[RenderableType] = [Text(notice, style="bold red", no_wrap=True)] if notice else []
    parts.append(table)
    if left := len(slots) - len(shown):
        parts.append(Text(f"    and {left} more", style="dim"))
    return Group(*parts)


def _cells(one: Watched) -> list[Text]:
    report: dict[str, Any] = printable_tree(one.history.report)
    words = Text(no_wrap=True, overflow="ellipsis")
    if one.error is not None:
        words = Text(redact_text(one.error.line()), style="bold red", no_wrap=True, overflow="ellipsis")
    elif limits := report.get("limits"):
        words.append(limits["words"])
    if not report or report["state"] is None:
        return [Text("not made yet" if report else "not read"), Text(), Text(), Text(), words]
    lag = "?" if report["lag_s"] is None else brief(report["lag_s"])
    behind = "?" if report["lag_bytes"] is None else size(report["lag_bytes"])
    return [state_text(report), Text(lag), Text(behind), Text(f"{one.rows_s:,.0f}"), words]
