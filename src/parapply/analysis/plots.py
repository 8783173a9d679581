"""Plots as Plotly takes them: plain objects, made from the tables of one slot. Common settings are in the page.

In go rows; out comes a `Plot`. Names from the log are escaped: Plotly reads markup in texts.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from parapply.amounts import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from parapply.analysis.engine import Rows


BLUE: Final = "#2563a8"
ORANGE: Final = "#e08a2c"
GREEN: Final = "#3f9b63"
RED: Final = "#c94a44"
GREY: Final = "#9aa5b1"
PURPLE: Final = "#7d5fa8"
TEAL: Final = "#2a9aa5"
BROWN: Final = "#8d6e53"
_MANY: Final = (BLUE, ORANGE, GREEN, PURPLE, TEAL, BROWN, RED)

#: Bars that a list shows; the rest is in the tables.
MOST_BARS: Final = 12
_MOST_LINES: Final = 6
#: Points up to which each is marked.
MARKED_POINTS: Final = 40
_DENSE_DECADES: Final = 2.5


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture."""

    title: str  # short
    caption: str  # how to read it, in a sentence or two
    data: list[dict[str, Any]]  # Plotly's traces
    layout: dict[str, Any] = field(default_factory=dict)  # Plotly's layout, on top of the page's
    height: int = 300  # in pixels


def timeline(rows: Rows, interval_s: int) -> list[datetime]:
    """Return every interval from the first to the last, also those without a row."""
    first, last = min(row["at"] for row in rows), max(row["at"] for row in rows)
    count = int((last - first).total_seconds()) // interval_s + 1
    return [first + timedelta(seconds=n * interval_s) for n in range(count)]


def series(rows: Rows, times: list[datetime], value: Callable[[dict[str, Any]], float]) -> list[float]:
    """Return the sum of a value for each interval, 0 where nothing was committed."""
    sums: dict[datetime, float] = {}
    for row in rows:
        sums[row["at"]] = sums.get(row["at"], 0.0) + value(row)
    return [_short(sums.get(at, 0.0)) for at in times]


def line(name: str, times: list[datetime], values: Iterable[float | None], color: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  whatever Plotly takes
    """Return a line over time; a None is a gap."""
    mode = "lines+markers" if len(times) <= MARKED_POINTS else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": text(name),
        "x": _axis(times),
        "y": list(values),
        "line": {"color": color, "width": 2},
        "marker": {"size": 5},
        **more,
    }


def columns(times: list[datetime], values: Iterable[float], color: str) -> dict[str, Any]:
    """Return vertical bars over time."""
    return {"type": "bar", "x": _axis(times), "y": list(values), "marker": {"color": color}}


def bars(name: str, labels: list[str], values: Iterable[float], color: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  whatever Plotly takes
    """Return horizontal bars, the first on top."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": text(name),
        "y": [text(label) for label in labels],
        "x": [_short(value) for value in values],
        "marker": {"color": color},
        **more,
    }


def stacked_lines(
    rows: Rows, times: list[datetime], key: str, value: Callable[[dict[str, Any]], float], interval_s: int
) -> list[dict[str, Any]]:
    """Return areas on top of each other, one for each of the greatest values of a column and one for all others.

    Numbers keep their order, with the column's name; names by how much they are of the whole.
    """
    totals: dict[str, float] = {}
    for row in rows:
        totals[str(row[key])] = totals.get(str(row[key]), 0.0) + value(row)
    order = sorted(totals, key=lambda name: (-totals[name], name))
    shown = order[: _MOST_LINES if len(order) > _MOST_LINES + 1 else _MOST_LINES + 1]
    is_numbered = all(isinstance(row[key], int) for row in rows)
    if is_numbered:
        shown.sort(key=int)
    traces = []
    for name, color in zip([*shown, None], [*_MANY[: len(shown)], GREY], strict=True):
        mine = [row for row in rows if (str(row[key]) == name if name is not None else str(row[key]) not in shown)]
        if mine:
            values = [one / interval_s for one in series(mine, times, value)]
            label = "all others" if name is None else f"{key} {name}" if is_numbered else name
            trace = line(label, times, map(_short, values), color, stackgroup="all")
            traces.append({**trace, "mode": "lines", "line": {"color": color, "width": 1}})
    return traces


def log_axis(values: Iterable[float | None]) -> dict[str, Any]:
    """Return a logarithmic axis over seconds, at least a factor of ten long, labelled as people say durations."""
    found = [value for value in values if value is not None and value > 0] or [0.001]
    low, high = math.log10(min(found)) - 0.1, math.log10(max(found)) + 0.1
    low, high = min(low, high - 1), max(high, low + 1)
    digits = (1, 2, 5) if high - low <= _DENSE_DECADES else (1,)
    ticks = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
    return {"type": "log", "range": [low, high], "tickvals": ticks, "ticktext": [duration(tick) for tick in ticks]}


def text(words: str) -> str:
    """Return words that Plotly shows as they are."""
    return html.escape(words, quote=False)


def bar_height(n_bars: int) -> int:
    """Return a height at which this number of bars is easy to read, in pixels."""
    return 110 + 30 * max(n_bars, 2)


def moment(at: datetime) -> str:
    """Return a time to the millisecond, as Plotly takes it."""
    # Texts without an offset are shown as they are, so in UTC.
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _axis(times: list[datetime]) -> list[str]:
    # Plotly shows texts without an offset as they are, so in UTC.
    return [at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") for at in times]


def _short(value: float) -> float:
    # Half of the page would be digits that no reader sees.
    return float(f"{value:.5g}")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page."""

    title: str
    lead: str
    plots: list[Plot] = field(default_factory=list)
    #: Shown below the plots: heading of each column, and rows of texts.
    header: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
