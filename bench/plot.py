"""One picture of a run: for each workload a bar for each runner, as long as it took.

In go measured workloads; out comes an SVG file. Short bars are good; the number after a bar says how many times as fast
as the built-in subscription it is.
"""

from __future__ import annotations

import io
import math
import re
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.runners import BULK, BY_QUERY, CEILING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.figures import Figures
    from bench.report import Measured

_PANELS_A_ROW = 2
_PANEL_INCHES: Final = (6.0, 0.9)  # width, and height without bars
_BAR_INCHES = 0.28
# References first in grey, then PostgreSQL's own blue, ours in green.
_GREY, _BLUE, _GREEN = "#9aa0a6", "#336791", "#3a9d5d"
#: Of every drawing. Text stays text: smaller, and it can be searched; the same figures give the same file.
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "parapply",
    "font.size": 8.0,
    "font.sans-serif": ["DejaVu Sans"],
}
# Half of the file otherwise: digits that no reader sees, indentation, turns by nothing, names that nothing refers to,
# and groups around one element. In this order.
_SUPERFLUOUS: Final = (
    (re.compile(r"(\.\d)\d+(?=[^<>]*>)"), r"\1"),  # inside of tags only: the text between them stays
    (re.compile(r"[ \t]*\n[ \t]*"), "\n"),
    (re.compile(r' transform="rotate\(-0 [^"]*"'), ""),
    (re.compile(r'<g id="[^"]*">'), "<g>"),
    (re.compile(r"<g>\n(<(?:text|use)\b[^\n]*\n)</g>\n"), r"\1"),
    (re.compile(r"<g>\n(<(?:text|use)\b[^\n]*\n)</g>\n"), r"\1"),
)


def write_plot(every: Sequence[Measured], path: Path) -> Path:
    """Draw a panel for each workload and synchronous_commit, write the file and return its place.

    Raises:
        OSError: it cannot be written.
    """
    with mpl.rc_context(STYLE):
        columns = min(_PANELS_A_ROW, len(every))
        rows = math.ceil(len(every) / columns)
        bars = max(len(each.figures) for each in every)
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(width * columns, (height + _BAR_INCHES * bars) * rows), layout="constrained")
        FigureCanvasSVG(figure)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, measured in zip(panels, every, strict=False):
            _draw(panel, measured)
        for panel in panels[len(every) :]:
            panel.set_axis_off()
        figure.suptitle(title(every[0].facts))
        return write_svg(figure, path)


def write_svg(figure: Figure, path: Path) -> Path:
    """Write a drawing, made in the style of ours, and return its place.

    Raises:
        OSError: it cannot be written.
    """
    buffer = io.StringIO()
    # Without a date, a run twice drawn is the same file.
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawing = buffer.getvalue()
    for pattern, instead in _SUPERFLUOUS:
        drawing = pattern.sub(instead, drawing)
    path.write_text(drawing, encoding="utf-8")
    return path


def title(facts: Mapping[str, str | float]) -> str:
    """Return what the figures depend on, in a line."""
    return (
        f"PostgreSQL {facts['publisher']} to {facts['subscriber']}, parapply {facts['parapply']}, "
        f"{facts['cores']} cores, {facts['processor'] or facts['architecture']}"
    )


def _draw(panel: Axes, measured: Measured) -> None:
    figures = measured.figures
    places = range(len(figures))
    medians_s = [one.median_s for one in figures]
    below_s = [one.median_s - one.best_s for one in figures]
    above_s = [one.worst_s - one.median_s for one in figures]
    panel.barh(places, medians_s, xerr=[below_s, above_s], color=[colour(one.runner) for one in figures], height=0.7,
               error_kw={"elinewidth": 0.8, "capsize": 0})  # fmt: skip
    for place, one in zip(places, figures, strict=True):
        panel.annotate(_label(one), (one.worst_s, place), xytext=(4, 0), textcoords="offset points", va="center")
    panel.set_yticks(places, [one.runner for one in figures])
    panel.invert_yaxis()
    # Room for the labels.
    panel.set_xlim(0, max(one.worst_s for one in figures) * 1.35)
    panel.tick_params(axis="y", left=False)
    panel.locator_params(axis="x", nbins=4)
    panel.set_xlabel("seconds")
    panel.set_title(f"{measured.workload.name}: {measured.backlog.transactions:,} transactions, sync {measured.sync}")
    panel.spines[["top", "right"]].set_visible(False)


def colour(runner: str) -> str:
    """Return the colour of a runner's bar."""
    if runner in {CEILING, BY_QUERY, BULK}:
        return _GREY
    return _GREEN if runner.startswith("parapply") else _BLUE


def _label(one: Figures) -> str:
    ratio = "" if one.times_built_in is None else f", {one.times_built_in:.2f} x"
    verdict = ", DIFFERS" if one.is_equal is False else ""
    return f"{one.median_s:.2f} s{ratio}{verdict}"
