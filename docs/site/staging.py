"""The folder that mkdocs reads: each document at its place in the site, and the files of the repository that they name.

A link to a page becomes one to its place, and a link to another file of the repository leads to a copy of it, so that
the site needs no other address.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from docs.site.reference import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).parents[2]
#: Documents beside docs/, and their names in the site.
_OUTSIDE: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK: Final = re.compile(r"(?<=\]\()(?P<target>[^)#\s]+)(?=[)#])")
_FENCE: Final = re.compile(r"^ *```")
#: Comments that say how a test runs a block.
_COMMENT: Final = re.compile(r"^ *<!-- .* -->$")
#: Of a table or a list, and a line of a paragraph.
_BEGIN: Final = re.compile(r"\||- ")
_PARAGRAPH: Final = re.compile(r"[^\s|-]")
#: Columns by which the content of an item of a list is indented.
_ITEM: Final = 4
#: A browser shows these by their name; any other file as text.
_SHOWN: Final = {".json", ".svg", ".txt"}


def places() -> dict[str, str]:
    """Return the place of each page in the site, by its path in the repository, also of pages that are made."""
    written = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    made = [f"docs/reference/{name}" for name in reference()]
    return _OUTSIDE | {path: path.removeprefix("docs/") for path in (*written, *made)}


def stage(folder: Path) -> None:
    """Write all pages.

    Args:
        folder: emptied first.

    Raises:
        FileNotFoundError: a page has a link to a file that does not exist.
    """
    shutil.rmtree(folder, ignore_errors=True)
    where = places()
    texts = {f"docs/reference/{name}": text for name, text in reference().items()}
    for path, place in where.items():
        text = texts[path] if path in texts else (ROOT / path).read_text(encoding="utf-8")
        page = folder / place
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_linked(text, path, where, folder), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("tables.css"), folder)


def _linked(text: str, path: str, where: Mapping[str, str], folder: Path) -> str:
    """Return a page whose links lead to places in the site."""

    def placed(found: re.Match[str]) -> str:
        return _target(found[0], path, where, folder)

    return "".join(f"{line if is_code else _LINK.sub(placed, line)}\n" for line, is_code in _lines(text))


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line as mkdocs must have it for what GitHub shows, and whether it is code.

    GitHub takes what follows a paragraph at once for a table or a list, and the content of an item at the width of the
    item's sign; mkdocs needs an empty line, and four columns.
    """
    before, is_code, is_loose, shift = "", False, False, 0
    for line in text.splitlines():
        if _COMMENT.match(line):
            continue
        if not is_code:
            if _BEGIN.match(line) and (_PARAGRAPH.match(before) or (is_loose and before)):
                yield "", False
            is_loose = not _BEGIN.match(line) and (is_loose or not line)
            depth = len(line) - len(line.lstrip())
            shift = _ITEM * (depth // 2) - depth
        is_fence = _FENCE.match(line) is not None
        is_code ^= is_fence
        yield " " * shift + line if line else "", is_code
        before = line


def _target(target: str, path: str, where: Mapping[str, str], folder: Path) -> str:
    """Return a link's target in the site, where it has a file after this call."""
    if re.match(r"[a-z]+:", target):
        return target
    named = os.path.normpath(Path(path).parent / target)
    place = where.get(named)
    if place is None:
        place = f"files/{named}" if Path(named).suffix in _SHOWN else f"files/{named}.txt"
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / named, folder / place)
    return os.path.relpath(place, Path(where[path]).parent)
