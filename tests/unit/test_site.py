"""The site: mkdocs builds it without a warning, with every document in it, and no page needs another address."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from docs.site.staging import places
from tests.fixtures.documents import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# Seconds on a quiet machine, and mkdocs is another process.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Limit for the count of `wc -w` over all documents; 42,000 once every page is shortened.
_WORDS = 42_000
#: Elements that make a browser load what they name.
_LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


class _Loaded(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what the element names."""
        values = dict(attrs)
        if values.get("rel") not in {"canonical", "next", "prev"}:
            self.addresses.append(values.get(_LOADED.get(tag, "")) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does; a warning of mkdocs ends it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "docs.site", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_document_is_a_page_of_the_navigation(site: Path) -> None:
    """Each document, and each page that is made from the code, is a page that the navigation leads to."""
    first = (site / "index.html").read_text(encoding="utf-8")
    for place in places().values():
        name = place.removesuffix(".md") + ".html"
        assert (site / name).is_file(), name
        assert f'href="{name}"' in first, name


def test_no_page_loads_anything_from_another_address(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(places())
    for page in pages:
        reader = _Loaded()
        reader.feed(page.read_text(encoding="utf-8"))
        assert [one for one in reader.addresses if re.match(r"(https?:)?//", one)] == [], page.name
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")) == []


def test_no_markup_is_left_as_text(site: Path) -> None:
    """No row of a table, item of a list, fence, link or emphasis stands in a page as it was typed."""
    for page in site.rglob("*.html"):
        text = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"))
        assert re.findall(r"\|---|```|\n *- .*|\]\(|\*\*\w", re.sub(r"<[^>]+>", "", text)) == [], page.name


def test_the_documents_are_short() -> None:
    """All documents together have no more words than the limit."""
    files = [*ROOT.glob("[A-Z]*.md"), *(ROOT / "docs").rglob("*.md")]
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in files) <= _WORDS
