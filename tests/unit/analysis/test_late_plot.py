"""The picture of a replay: each run and prediction is a line with its name, and the threshold is drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from parapply.analysis.late_plot import LateLines, check_plot, draw
from parapply.errors import ReportRefused

if TYPE_CHECKING:
    from pathlib import Path

_LATE = {100: 10.0, 101: 40.0, 102: 80.0, 110: 20.0}
_HOSTILE = 'server.path=$x_1$ <a href="b">'


def _points(drawing: str, gid: str) -> list[list[tuple[float, float]]]:
    """Return the points of a line's pieces, the lower ones with larger numbers."""
    found = re.search(rf'<g id="{gid}">\s*<path d="([^"]*)"', drawing)
    assert found is not None, gid
    pieces = re.split(r"M", found[1])[1:]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", piece)] for piece in pieces]


def test_each_line_is_drawn_with_its_name_and_gaps(tmp_path: Path) -> None:
    """A prediction of half the delay is half as high, the threshold lies between, and a quiet time is a gap."""
    path = tmp_path / "day.svg"
    lines = [LateLines(_HOSTILE, _LATE, {minute: late_s / 2 for minute, late_s in _LATE.items()}),
             LateLines("apply.workers=8", {}, {100: 0.0})]  # fmt: skip
    draw(lines, 60.0, path)
    drawing = path.read_text(encoding="utf-8")
    run, prediction = _points(drawing, "run 0"), _points(drawing, "prediction 0")
    ((_, at), _) = _points(drawing, "threshold")[0]
    assert [len(piece) for piece in run if len(piece) > 1] == [3]
    highest, half = run[0][2][1], prediction[0][2][1]
    ((_, bottom),) = _points(drawing, "prediction 1")[0]
    assert highest < at < half
    assert bottom - highest == pytest.approx(2 * (bottom - half), rel=1e-3)
    assert 'id="run 1"' not in drawing
    for text in ("server.path=$x_1$ &lt;a href=", "apply.workers=8, predicted"):
        assert text in drawing
    draw(lines, 60.0, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == drawing


def test_a_png_is_one_and_another_name_is_refused(tmp_path: Path) -> None:
    """The end of the name says the format; nothing else is drawn, and no folder is made."""
    draw([LateLines("one", _LATE, {})], 60.0, tmp_path / "day.png")
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")
    for name, why in (("day.pdf", "no picture"), ("there/day.svg", "is no folder")):
        with pytest.raises(ReportRefused, match=why):
            check_plot(tmp_path / name)
    check_plot(tmp_path / "day.SVG")
