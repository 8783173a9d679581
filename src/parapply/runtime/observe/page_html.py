"""The pieces of the daemon's page as HTML: texts go in, each is escaped here. Pure but for its style and its script."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.quoting import html

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HERE: Final = files(__package__)
_STYLE: Final = (_HERE / "page.css").read_text(encoding="utf-8")
_SCRIPT: Final = (_HERE / "page.js").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


#: Content-Security-Policy: our style and our script and no other, and nothing is asked of another address.
POLICY: Final = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Number(NamedTuple):
    """A cell that stands on the right."""

    text: str


class Link(NamedTuple):
    """A cell that leads to another page."""

    text: str
    path: str


#: A cell of a table.
Cell = str | Number | Link


def document(title: str, parts: Iterable[str]) -> bytes:
    """Return the page: parts of HTML under a title."""
    body = "\n".join(parts)
    # The icon is empty, so that no browser asks for one.
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{html(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        '<p id="silent" class="bad" role="alert" hidden>The daemon does not answer. This is what it said last.</p>\n'
        f"{body}\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    ).encode()


def heading(text: str, below: str) -> str:
    """Return the page's heading, and a line below it."""
    return f'<h1>{html(text)}</h1>\n<p class="soft">{html(below)}</p>'


def facts(rows: Iterable[tuple[str, str]], *, mood: str) -> str:
    """Return names with their facts, the first in a mood (good, bad or nothing); empty ones are left out."""
    lines = [(html(name), html(text)) for name, text in rows if text]
    marks = [f' class="{mood}"' if mood else "", *[""] * len(lines)]
    body = "\n".join(
        [f"<dt>{name}</dt><dd{mark}>{text}</dd>" for (name, text), mark in zip(lines, marks, strict=False)]
    )
    return f"<section><dl>\n{body}\n</dl></section>"


def sentences(title: str, first: str, second: str, others: Iterable[str]) -> str:
    """Return a section of sentences, the first two of which matter most."""
    rest = "\n".join([f'<p class="soft">{html(text)}</p>' for text in others])
    return f"<section><h2>{html(title)}</h2>\n<p><b>{html(first)}</b></p>\n<p>{html(second)}</p>\n{rest}</section>"


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[Cell]], more: str = "") -> str:
    """Return a section with a table, and a line below it; nothing where there is neither a row nor that line."""
    if not rows and not more:
        return ""
    numeric = [bool(rows) and isinstance(cell, Number) for cell in (rows[0] if rows else [""] * len(names))]
    head = "".join([_cell("th", Number(name) if right else name) for name, right in zip(names, numeric, strict=True)])
    body = "\n".join([f"<tr>{''.join([_cell('td', cell) for cell in row])}</tr>" for row in rows])
    shown = (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
        if rows
        else ""
    )
    below = f'<p class="soft">{html(more)}</p>' if more else ""
    return f"<section><h2>{html(title)}</h2>\n{shown}{below}</section>"


def _cell(element: str, cell: Cell) -> str:
    if isinstance(cell, Number):
        return f'<{element} class="number">{html(cell.text)}</{element}>'
    if isinstance(cell, Link):
        return f'<{element}><a href="{html(cell.path)}">{html(cell.text)}</a></{element}>'
    return f"<{element}>{html(cell)}</{element}>"
