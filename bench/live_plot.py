"""One picture of huge transactions alongside small ones: bars until visible, and bars of the longest gap.

In go figures; out comes an SVG file, a row of panels for each time that the transaction was held open. Short bars are
good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.plot import STYLE, colour, title, write_svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.live_report import LiveFigures

_PANEL_INCHES: Final = (5.0, 0.9)  # width, and height without bars
_BAR_INCHES: Final = 0.28
# Room for the labels after the bars.
_ROOM: Final = 1.5


def write_live_plot(every: Sequence[LiveFigures], rows: int, facts: Mapping[str, str | float], path: Path) -> Path:
    """Draw, write the file and return its place.

    Args:
        every: at least one.
        rows: of the huge transaction.
        facts: of machine and servers.
        path: of the file.

    Raises:
        OSError: it cannot be written.
    """
    holds_s = list(dict.fromkeys(one.hold_s for one in every))
    bars = max(sum(one.hold_s == hold_s for one in every) for hold_s in holds_s)
    width, height = _PANEL_INCHES
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2 * width, (height + _BAR_INCHES * bars) * len(holds_s)), layout="constrained")
        FigureCanvasSVG(figure)
        for (left, right), hold_s in zip(figure.subplots(len(holds_s), 2, squeeze=False), holds_s, strict=True):
            its = [one for one in every if one.hold_s == hold_s]
            held = f", held open for {hold_s:g} s" if hold_s else ""
            _draw_visible(left, its, f"{rows:,} rows{held}: from COMMIT until visible")
            _draw_gaps(right, its, "longest time without a small one after COMMIT")
        figure.suptitle(title(facts))
        return write_svg(figure, path)


def _draw_visible(panel: Axes, its: Sequence[LiveFigures], heading: str) -> None:
    places = range(len(its))
    panel.barh(
        places, [one.visible_s for one in its], height=0.7, color=[colour(one.system) for one in its],
        xerr=[[one.visible_s - one.best_s for one in its], [one.worst_s - one.visible_s for one in its]],
        error_kw={"elinewidth": 0.8, "capsize": 0},
    )  # fmt: skip
    for place, one in zip(places, its, strict=True):
        ratio = "" if one.times_built_in is None else f", {one.times_built_in:.2f} x"
        differs = "" if one.is_equal else ", DIFFERS"
        _label(panel, f"{one.visible_s:.2f} s{ratio}{differs}", one.worst_s, place)
    panel.set_yticks(places, [one.system for one in its])
    _finish(panel, max(one.worst_s for one in its), heading)


def _draw_gaps(panel: Axes, its: Sequence[LiveFigures], heading: str) -> None:
    places = range(len(its))
    panel.barh(places, [one.gap_s for one in its], height=0.7, color=[colour(one.system) for one in its])
    for place, one in zip(places, its, strict=True):
        _label(panel, f"{one.gap_s:.2f} s", one.gap_s, place)
    panel.set_yticks([])
    _finish(panel, max(one.gap_s for one in its), heading)


def _label(panel: Axes, text: str, x: float, place: int) -> None:
    panel.annotate(text, (x, place), xytext=(4, 0), textcoords="offset points", va="center")


def _finish(panel: Axes, longest_s: float, heading: str) -> None:
    panel.invert_yaxis()
    # A transaction seen before the answer is read took no time; a panel must have a width all the same.
    panel.set_xlim(0, max(longest_s, 0.001) * _ROOM)
    panel.tick_params(axis="y", left=False)
    panel.locator_params(axis="x", nbins=4)
    panel.set_xlabel("seconds")
    panel.set_title(heading)
    panel.spines[["top", "right"]].set_visible(False)
