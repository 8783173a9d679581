"""The picture of a replay: how late each run was over the day, and would be by its prediction, as SVG or PNG."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from parapply.amounts import brief
from parapply.analysis.plots import BLUE, BROWN, GREEN, MARKED_POINTS, ORANGE, PURPLE, RED, TEAL
from parapply.errors import ReportRefused
from parapply.extras import install_hint
from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

FORMATS: Final = (".svg", ".png")
#: Red is the threshold's.
_COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE, TEAL, BROWN)
#: The same lines give the same file, texts stay texts, and a dollar sign in a setting begins no formula.
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "parapply",
    "font.size": 8.0,
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,
    "timezone": "UTC",
    "date.converter": "concise",
}
_INCHES: Final = (9.0, 4.0)
_DOTS_PER_INCH: Final = 150
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LateLines(NamedTuple):
    """The lines of one group of settings: most seconds late, by minutes since 1970-01-01 UTC."""

    settings: str
    replayed: Mapping[int, float]  # empty: not replayed
    predicted: Mapping[int, float]  # empty: not predicted


def check_plot(path: Path) -> None:
    """Refuse a file that could not be drawn, before anything runs.

    Raises:
        ReportRefused: its name ends otherwise, its folder does not exist, or a package is missing.
    """
    if path.suffix.lower() not in FORMATS:
        raise ReportRefused(f"--plot: {path.name} is no picture", hint="name a file that ends in .svg or .png")
    if not path.parent.is_dir():
        raise ReportRefused(f"--plot: {path.parent} is no folder", hint="name a file in a folder that exists")
    if find_spec("matplotlib") is None:
        raise ReportRefused("--plot needs matplotlib", hint=install_hint("plot"))


def draw(lines: Sequence[LateLines], late_after_s: float, path: Path) -> None:
    """Draw the lines, and write the file; raise ReportRefused if it cannot be written."""
    import matplotlib as mpl  # noqa: PLC0415  an extra
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for number, one in enumerate(lines):
            colour = _COLOURS[number % len(_COLOURS)]
            name = printable(one.settings)
            _draw_line(axes, one.replayed, label=name, gid=f"run {number}", color=colour)
            label, gid = f"{name}, predicted", f"prediction {number}"
            _draw_line(axes, one.predicted, label=label, gid=gid, color=colour, linestyle="--")
        axes.axhline(
            late_after_s,
            color=RED,
            linewidth=1,
            linestyle=":",
            gid="threshold",
            label=f"late after {brief(late_after_s)}",
        )
        _label(axes)
        try:
            figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ReportRefused(f"--plot: {path} cannot be written: {error.strerror or error}") from error


def _draw_line(axes: Axes, minutes: Mapping[int, float], **style: Any) -> None:  # noqa: ANN401  matplotlib's
    if not minutes:
        return
    # A minute in which nothing came is a gap.
    every = range(min(minutes), max(minutes) + 1)
    times: Any = [_EPOCH + timedelta(minutes=minute) for minute in every]
    marker = "o" if len(minutes) <= MARKED_POINTS else ""
    late_s = [minutes.get(minute, float("nan")) for minute in every]
    axes.plot(times, late_s, linewidth=1.5, marker=marker, markersize=3, **style)


def _label(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: brief(seconds) if seconds else "0"))
    axes.set_ylim(bottom=0)
    axes.set_title("How late each run was, by the minute of the capture (UTC)")
    axes.grid(visible=True, color="#e3e7eb", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=1, frameon=False)
