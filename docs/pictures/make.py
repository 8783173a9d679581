"""Makes docs/pictures/demo.svg from a run of `parapply demo`: what the program printed, and nothing else.

    python docs/pictures/make.py                 # runs the demonstration, about a minute
    python docs/pictures/make.py demo.txt        # takes what an earlier run has printed

Lines between two passages that the picture shows are left out, and stand as dots. Long lines are broken as in a
terminal of that width, but between words.
"""

from __future__ import annotations

import subprocess
import sys
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Final

PICTURE: Final = Path(__file__).with_name("demo.svg")
#: First words of the passages to show; each goes to the next empty line.
PASSAGES: Final = ("publisher: PostgreSQL", "parapply init", "Load:", "Proof:", "Race:", "Every comparison")
#: Pixels: of a character of the font below, of a line, and around all.
_CHARACTER, _LINE, _MARGIN = 7.8, 19, 16
_COLUMNS: Final = 104
_COLOURS: Final = {"equal": "#7ee787", "DIFFERS": "#ff7b72"}


def demonstration() -> str:
    """Run the demonstration and return what it printed.

    Raises:
        CalledProcessError: it failed.
    """
    done = subprocess.run([sys.executable, "-m", "parapply", "demo"], capture_output=True, text=True, check=True)
    return done.stdout


def chosen(text: str) -> list[str]:
    """Return the lines of the passages, with a line of dots where others were."""
    found: list[str] = []
    for passage in text.rstrip().split("\n\n"):
        lines = [part for line in passage.splitlines() for part in wrap(line, _COLUMNS)]
        if lines[0].startswith(PASSAGES):
            found += [*lines, ""]
        elif found and found[-2] != "...":
            found += ["...", ""]
    return found[:-1]


def drawn(lines: list[str]) -> str:
    """Return the lines as SVG, light on dark, in any monospaced font."""
    width, height = round(_COLUMNS * _CHARACTER + 2 * _MARGIN), len(lines) * _LINE + 2 * _MARGIN
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape('parapply demo: what it prints')}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13" fill="#c9d1d9">',
    ]
    for number, line in enumerate(lines):
        is_head = line.startswith(PASSAGES[1:])
        style = ' font-weight="bold" fill="#ffffff"' if is_head else ""
        rows.append(f'<text x="{_MARGIN}" y="{_MARGIN + (number + 1) * _LINE - 6}"{style}>{_coloured(line)}</text>')
    return "\n".join([*rows, "</g>", "</svg>", ""])


def _coloured(line: str) -> str:
    # Spaces in a row would be one: viewers differ in what they make of xml:space.
    line = line.replace(" ", "\u00a0")
    head, space, last = line.rpartition("\u00a0\u00a0")
    colour = _COLOURS.get(last)
    return f'{escape(head + space)}<tspan fill="{colour}">{last}</tspan>' if colour else escape(line)


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else demonstration()
    PICTURE.write_text(drawn(chosen(text)), encoding="utf-8")
